"""The shell of shared quotas: sends what this process has used to the store, and passes on what it is granted.

One message for each quota is under way at a time. As for shared health, answers come in the thread of the store, and
nothing here keeps a pool alive: the store holds a listener, which holds the quota weakly, and the quota belongs to the
account of its resources.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import CancelledError, Future
from functools import partial
from typing import TYPE_CHECKING, Any

from headgate.core.clock import clock
from headgate.core.redaction import redact
from headgate.errors import PoolClosed, StoreUnreachable
from headgate.resources.accounts import Account
from headgate.resources.background import reports
from headgate.resources.effects import Effects
from headgate.resources.engine import begin, lock
from headgate.resources.health import mark_of
from headgate.resources.leased_budget import LeasedBudget
from headgate.resources.quota_exchange import Message, Reply, exchange
from headgate.resources.quota_news import forget_all, forget_due, is_due, note_due, send_due
from headgate.resources.wakeups import LoopWaiter, ThreadWaiter, Waiter
from headgate.sharing.states import ClockOffset, SharedState, Step, timed

if TYPE_CHECKING:
    from headgate.resources.attempts import Call
    from headgate.resources.rotation import Rotation

PATIENCE = 0.5
"""Seconds for which a call without a wait mode waits for the store to say what is left."""

_log = logging.getLogger("headgate.resources")
_living: weakref.WeakSet[SharedQuota] = weakref.WeakSet()


def share_quotas(rotation: Rotation, store: SharedState, name: str, timeout: float) -> None:
    """Share the quotas of the resources of a pool with all pools of this name; those of groups with all of the group.

    Returns when it is known what is left, and blocks this thread for that.
    """
    with lock:
        fresh = lease_quotas(rotation, store, name)
    waits = []
    for quota in fresh:
        first = threading.Event()
        quota.start(first.set)
        waits.append(first)
    for first in waits:
        if not first.wait(timeout):
            raise StoreUnreachable(f"the store did not answer within {timeout:g} s")


def lease_quotas(rotation: Rotation, store: SharedState, name: str) -> list[SharedQuota]:
    """Let calls take nothing of quotas that are not shared yet, until `start` is called for what is returned."""
    fresh: list[SharedQuota] = []
    for member in rotation.members.values():
        account = member.sharing.account
        if account is None or isinstance(account.budget, LeasedBudget):
            continue
        own = f"{name}/{mark_of(name, member.resource)}"
        key = f"quotas/pool/{own}" if account.group is None else f"quotas/group/{account.group}"
        fresh.append(SharedQuota(account, store, key, rotation))
    return fresh


async def quota_came(rotation: Rotation, call: Call) -> bool:
    """Wait for what a call without a wait mode lacks of a shared quota; False: none came within `PATIENCE`."""
    asked = _ask(rotation, call, waiter := LoopWaiter())
    if not asked:
        return False
    try:
        await waiter.wait(_limit(call))
    finally:
        _asked(asked, waiter)
    return _has_come(asked, call)


def quota_came_sync(rotation: Rotation, call: Call) -> bool:
    """`quota_came` for a thread without a loop."""
    asked = _ask(rotation, call, waiter := ThreadWaiter())
    if not asked:
        return False
    try:
        waiter.wait(_limit(call))
    finally:
        _asked(asked, waiter)
    return _has_come(asked, call)


def _limit(call: Call) -> float:
    patience = clock.now() + PATIENCE
    return patience if call.deadline is None else min(patience, call.deadline)


def _ask(rotation: Rotation, call: Call, waiter: Waiter) -> list[SharedQuota]:
    """Ask for what a call needs, of each quota that could give it."""
    asked = []
    with lock:
        now = clock.now()
        avoid = rotation.avoided(call.choices()[-1], call.plan.affinity)
        for member in rotation.matching_members(call.plan.requirement):
            account = member.sharing.account
            quota = None if account is None else account.shared
            if account is None or quota is None or member.resource.status != "healthy" or not quota.is_reachable:
                continue
            if member.resource.resource_id in avoid or not member.can_ever_serve(call.plan.cost):
                continue
            account.budget.lack(account.budget.need(call.plan.cost), now, waits=True)
            quota.askers[waiter] = call.plan.cost
            asked.append(quota)
    send_due()
    return asked


def _asked(quotas: Iterable[SharedQuota], waiter: Waiter) -> None:
    with lock:
        for quota in quotas:
            quota.askers.pop(waiter, None)
            quota.want_no_more()
    send_due()


def _has_come(quotas: Iterable[SharedQuota], call: Call) -> bool:
    with lock:
        now = clock.now()
        return any(quota.account.admits(call.plan.cost, now, None) for quota in quotas)


class SharedQuota:
    """Shares one quota with other processes."""

    def __init__(self, account: Account, store: SharedState, key: str, rotation: Rotation) -> None:
        """Calls may take nothing until `start`. With the lock held."""
        self.account: Account = account
        self.askers: dict[Waiter, float] = {}
        """Calls without a wait mode that wait for an answer, and what they cost."""
        self._store = store
        self._key = key
        self._rotation = weakref.ref(rotation)
        self._token = clock.token()[:12]
        self._budget = LeasedBudget(account.quota, self._token, self._needs, lambda: store.deadline)
        self._leases_lost = 0
        self._busy = True  # until `start`
        self._again = False
        self._stopped = False
        self._troubles: set[str] = set()
        account.lease(self._budget, self, clock.now())
        for member in account.members:
            member.rotation.shares_quotas = True
        _living.add(self)

    @property
    def is_reachable(self) -> bool:
        """Whether the store answers, as far as is known."""
        return not self._stopped and not self._budget.is_alone

    def start(self, then: Callable[[], object] | None = None) -> None:
        """Take part, and call `then` when the first answer is there."""
        leaving = Message(self._token, 0, None, self.account.quota, leaves=True)
        listener = _Listener(weakref.ref(self), self._store, self._key, leaving)
        listener.stop = self._store.listen(self._key, listener)
        with lock:
            self._busy = False
            self._budget.lack(self._budget.need(0.0), clock.now())
        self.send(looks=True, then=then)

    def _needs(self) -> None:
        note_due(self)

    def send(self, *, looks: bool = False, then: Callable[[], object] | None = None) -> None:
        """Send what is to be told, unless a message is under way: then as soon as that is answered."""
        nested = lock._is_owned()  # type: ignore[attr-defined]  # a finaliser in the middle of a transition
        with lock:
            forget_due(self)
            if self._busy or self._stopped or nested:
                self._again = True
                return
            self._again = False
            message = self._budget.message(looks=looks)
            if message is None:
                return
            self._busy = True
            lost = self._leases_lost
        try:
            future = self._store.transact(self._key, _step(message))
        except Exception as error:
            future = Future()
            future.set_exception(error)
        future.add_done_callback(partial(_answered, weakref.ref(self), message, lost, then))

    def want_no_more(self) -> None:
        """Leave to others what was asked for here, if no call waits for it any more."""
        if self.account.cost_waited_for() is None:
            self._budget.want_no_more()

    def look(self) -> None:
        """Ask the store what is new."""
        self.send(looks=True)

    def lease_lost(self) -> None:
        """Note that what this process held belongs to others."""
        with lock:
            self._leases_lost += 1
            self._budget.forget()
            effects = self._changed()
        _carry_out(effects)
        self.look()

    def store_unreachable(self) -> None:
        """Go on with what this process holds. There is no more until the store answers."""
        with lock:
            self._budget.is_alone = True
            askers = list(self.askers)
        for asker in askers:
            asker.wake()

    def after_fork(self) -> None:
        """Take part as a process of its own: what was granted is the parent's."""
        self._leases_lost += 1
        self._busy = self._again = False
        self.askers.clear()
        self._budget.forget()
        self.account.refresh(clock.now())

    def answered(self, message: Message, lost: int, future: Future[tuple[Reply, ClockOffset]]) -> None:
        """Take the answer to a message, in the thread of the store. `lost`: how many leases had been lost by then."""
        try:
            reply, offset = future.result()
        except (Exception, CancelledError) as error:
            self._failed(error)
            return
        if not reply.is_usable:
            self._stop(f"its state in the store cannot be used: {reply.trouble}")
            return
        if lost != self._leases_lost:  # what it says is of an id that this process has no more: ask again
            with lock:
                self._busy = False
            self.look()
            return
        with lock:
            self._busy = False
            now = clock.now()
            self._budget.take(message, reply, offset, now)
            effects = self._changed()
            if reply.is_wanted and not self.askers:  # they are woken below, and use what was given
                self._budget.give_back(now)
            askers, again = list(self.askers), self._again or is_due(self)
        _carry_out(effects)
        for engine in {member.rotation.owner for member in self.account.members}:
            if engine is not None:
                engine.watch()  # it may open at another time than was known
        for asker in askers:
            asker.wake()
        if reply.trouble is not None:
            self._warn(f"its state in the store was unreadable ({reply.trouble}) and is begun anew")
        if reply.quota != self.account.quota:
            self._warn(f"other processes share {reply.quota!r}, which counts instead of {self.account.quota!r}")
        if again:
            self.send()

    def _changed(self) -> Effects:
        """Open or close the resources, and serve those who wait."""
        rotation = next((member.rotation for member in self.account.members), self._rotation())
        now = clock.now()
        return [] if rotation is None else rotation.quota_changed(self.account, now) or []

    def _failed(self, error: BaseException) -> None:
        with lock:
            self._busy = False
        if isinstance(error, PoolClosed):
            self._stop(None)
        elif isinstance(error, StoreUnreachable):
            self.store_unreachable()
        else:
            self._warn(f"what was used could not be stored: {redact(str(error))}")

    def _stop(self, why: str | None) -> None:
        with lock:
            self._busy, self._stopped = False, True
            askers = list(self.askers)
        for asker in askers:
            asker.wake()
        if why is not None:
            self._warn(f"{why}; what is left of it is not given to calls any more")

    def _warn(self, what: str) -> None:
        if what not in self._troubles:
            self._troubles.add(what)
            reports.call(partial(_log.warning, "the quota %s: %s", self._key.removeprefix("quotas/"), what))


class _Listener:
    """What the store calls. Leaves when nobody has the quota any more."""

    def __init__(self, quota: weakref.ref[SharedQuota], store: SharedState, key: str, leaving: Message) -> None:
        self._quota = quota
        self._store = weakref.ref(store)
        self._key = key
        self._leaving = leaving
        self.stop: Callable[[], None] = _nothing

    def woken(self) -> None:
        quota = self._quota()
        if quota is not None:
            quota.look()
        else:
            self._leave()

    def lost(self) -> None:
        quota = self._quota()
        if quota is not None:
            quota.lease_lost()

    def unreachable(self, error: Exception) -> None:
        quota = self._quota()
        if quota is not None:
            quota.store_unreachable()

    def _leave(self) -> None:
        stop, self.stop = self.stop, _nothing
        if stop is not _nothing:
            stop()
            store = self._store()
            if store is not None:
                store.transact(self._key, _step(self._leaving))


def _nothing() -> None:
    pass


def _step(message: Message) -> Step:
    return timed(lambda text, seen: exchange(text, seen, message), clock.now())


def _answered(
    quota: weakref.ref[SharedQuota],
    message: Message,
    lost: int,
    then: Callable[[], object] | None,
    future: Future[Any],
) -> None:
    known = quota()
    if known is not None:
        known.answered(message, lost, future)
    if then is not None:
        then()


def _carry_out(effects: Effects) -> None:
    report = begin(effects, None)
    if report is not None:
        reports.call(report)


def _after_fork() -> None:
    forget_all()
    for quota in list(_living):
        quota.after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
