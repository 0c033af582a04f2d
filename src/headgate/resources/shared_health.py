"""The shell of shared health: sends what this process learned to the store at once, and applies what others learned.

One message is under way at a time; what is learned meanwhile goes with the next. Answers come in the thread of the
store, which must not be held up: the rotation and the waiters are told there, and users (events, logs, callbacks) from
`background`.

The store's clock is translated to the monotonic clock of this process by the difference of both at the moment of each
exchange (`ClockOffset`). The wall clock of this process decides nothing.

A pool is not closed, it is dropped. So nothing here holds it: the store holds a listener, which holds the pool weakly.
When the pool is gone, the listener notices at its next call, and leaves.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from functools import partial
from typing import TYPE_CHECKING, Any

from headgate.core.clock import clock
from headgate.core.redaction import redact
from headgate.errors import InvalidArgument, PoolClosed, StoreUnreachable
from headgate.resources.background import reports
from headgate.resources.effects import Effects
from headgate.resources.engine import Engine, begin, lock
from headgate.resources.events import FROM_ANOTHER
from headgate.resources.exchange import Message, Reply, exchange
from headgate.resources.members import Member, Requirement
from headgate.resources.quota_news import send_due
from headgate.resources.replica import Replica
from headgate.resources.shared_quotas import SharedQuota, lease_quotas, quota_came, quota_came_sync, share_quotas
from headgate.resources.wakeups import LoopWaiter, ThreadWaiter, Waiter
from headgate.sharing.states import ClockOffset, SharedState, Step, timed
from headgate.stores.addresses import store_from_environment, store_of

if TYPE_CHECKING:
    from headgate.resources.attempts import Call

CONNECT = 10.0
"""Seconds for which a new pool waits for its store."""

_log = logging.getLogger("headgate.resources")
_living: weakref.WeakSet[SharedHealth] = weakref.WeakSet()


def checked_store(store: object) -> SharedState:
    """The store that was given or named; True is the one of HEADGATE_STORE. InvalidArgument for anything else."""
    found = store_from_environment() if store is True else store_of(store)
    if store is True and found is None:
        raise InvalidArgument(
            "store=True takes the store that HEADGATE_STORE names, and that is not set",
            remedy='Set it to an address such as "sqlite:///shared.db", or pass a store.',
        )
    if not isinstance(found, SharedState) or isinstance(found, type):
        raise InvalidArgument(
            f"store must be a shared store, its address or True, got {type(found).__name__}",
            remedy='Pass SqliteStore("shared.db"), PostgresStore("postgresql://..."), or the address as text.',
        )
    return found


class SharedHealth:
    """Shares the health of one pool with the pools of the same name on the same store."""

    def __init__(self, engine: Engine[Any], store: SharedState, name: str) -> None:
        self._engine = engine
        self._store = store
        self._name = name
        self._key = f"resources/{name}"
        self._replica = Replica(engine.rotation, name, clock.token()[:12])
        self._busy = False  # a message is under way
        self._looks = False  # an answer is wanted even if there is nothing to tell
        self._again = False  # something happened since the message was made
        self._lease = 0  # how often the lease was lost
        self._unreachable = False
        self._stopped = False
        self._troubles: set[str] = set()  # what was logged
        self._askers: list[_Asker] = []
        self._followed: Effects = []  # since `members_changed` was last called
        self._unstarted: list[SharedQuota] = []  # the same

    @property
    def store(self) -> SharedState:
        """The store of these pools."""
        return self._store

    def start(self) -> None:
        """Take part; returns when the health that others know is known here too. Blocks this thread."""
        self._store.connect(CONNECT)
        listener = _Listener(weakref.ref(self), self._store, self._key, self._replica.leaving())
        listener.stop = self._store.listen(self._key, listener)
        if self._store.deadline != float("inf"):
            store = self._store
            self._replica.guard(lambda: store.deadline)
        with lock:
            self._replica.want_more(clock.now())
        first = threading.Event()
        self._send(looks=True, then=first.set)
        if not first.wait(CONNECT):
            listener.stop()
            raise StoreUnreachable(f"the store did not answer within {CONNECT:g} s")
        share_quotas(self._engine.rotation, self._store, self._name, CONNECT)
        _living.add(self)

    # -- what happens here --------------------------------------------------------------------------------------------

    def learned(self, members: set[Member]) -> None:
        """Tell others what was learned about these resources."""
        with lock:
            now = clock.now()
            for member in members:
                self._replica.learn(member, now)
            self._replica.want_more(now)
        self._send()
        send_due()

    def waiters_changed(self) -> None:
        """Ask for the permits and the quota that waiters need, or give back what nobody needs."""
        self._send()
        send_due()

    def follow_members(self) -> None:
        """Follow resources that were added, removed or changed, before calls use them. With the lock held.

        Otherwise calls that wait would use a resource whose limits other processes use up.
        """
        self._unstarted += lease_quotas(self._engine.rotation, self._store, self._name)
        self._followed += self._replica.refresh(clock.now())

    def members_changed(self) -> None:
        """Carry out what followed from that, and ask for what calls need of these resources."""
        with lock:
            effects, self._followed = self._followed, []
            fresh, self._unstarted = self._unstarted, []
        self._engine.carry_out(effects, FROM_ANOTHER)
        self._send(looks=True)
        for quota in fresh:
            quota.start()

    async def permit_came(self, call: Call) -> bool:
        """Wait for a permit or a quota that a call without a wait mode lacks; False: none came within `PATIENCE`."""
        asker = self._ask(call, waiter := LoopWaiter())
        if asker is None:
            return await quota_came(self._engine.rotation, call)
        try:
            self._send()
            await waiter.wait(asker.limit)
        finally:
            self._asked(asker)
        return self._replica.grants != asker.grants

    def permit_came_sync(self, call: Call) -> bool:
        """`permit_came` for a thread without a loop."""
        asker = self._ask(call, waiter := ThreadWaiter())
        if asker is None:
            return quota_came_sync(self._engine.rotation, call)
        try:
            self._send()
            waiter.wait(asker.limit)
        finally:
            self._asked(asker)
        return self._replica.grants != asker.grants

    def _ask(self, call: Call, waiter: Waiter) -> _Asker | None:
        requirement = call.plan.requirement
        with lock:
            avoid = self._engine.rotation.avoided(call.choices()[-1], call.plan.affinity)
            limit = self._replica.lacks(requirement, avoid, clock.now(), call.plan.cost)
            if limit is None or self._unreachable or self._stopped:
                return None
            if call.deadline is not None:
                limit = min(limit, call.deadline)
            asker = _Asker(requirement, waiter, limit, self._replica.grants)
            self._askers.append(asker)
            return asker

    def _asked(self, asker: _Asker) -> None:
        with lock:
            self._askers.remove(asker)
        self._send()

    # -- the store ----------------------------------------------------------------------------------------------------

    def look(self) -> None:
        """Ask the store what is new."""
        with lock:
            self._replica.want_more(clock.now())
        self._send(looks=True)

    def lease_lost(self) -> None:
        """Note that what this process held belongs to others."""
        with lock:
            self._lease += 1
            self._replica.forget_permits()
        self._send(looks=True)

    def store_unreachable(self, error: Exception) -> None:
        """Go on with what is known."""
        with lock:
            is_news, self._unreachable = not self._unreachable, True
            effects = self._replica.set_alone(clock.now(), alone=True)
            askers = list(self._askers)
        self._adopt(effects)
        for asker in askers:
            asker.waiter.wake()
        if is_news:
            reports.call(partial(self._engine.reporter.unshared, redact(str(error))))

    def after_fork(self) -> None:
        """Take part as a process of its own: the permits are the parent's."""
        self._busy = self._again = False
        self._lease += 1
        self._askers.clear()
        self._replica.forget_permits()

    def _send(self, *, looks: bool = False, then: Callable[[], object] | None = None) -> None:
        """Send what is to be told, unless a message is under way: then as soon as that is answered."""
        nested = lock._is_owned()  # type: ignore[attr-defined]  # a finaliser in the middle of a transition
        with lock:
            self._looks = self._looks or looks
            self._again = True
            if self._busy or self._stopped or nested:
                return
            self._again = False
            message = self._replica.message(clock.now(), self._askers, looks=self._looks)
            if message is None:
                return
            self._busy, self._looks = True, False
            lease = self._lease
        try:
            future = self._store.transact(self._key, _step(message))
        except Exception as error:
            future = Future()
            future.set_exception(error)
        future.add_done_callback(partial(_answered, weakref.ref(self), message, lease, then))

    def answered(self, message: Message, lease: int, future: Future[tuple[Reply, ClockOffset]]) -> None:
        """Take the answer to a message, in the thread of the store."""
        try:
            reply, offset = future.result()
        except (Exception, CancelledError) as error:
            self._failed(message, error)
            return
        if not reply.is_usable:
            self._stop(f"its state in the store cannot be used: {reply.trouble}")
            return
        with lock:
            self._busy = False
            was_unreachable, self._unreachable = self._unreachable, False
            grants = self._replica.grants
            now = clock.now()
            effects = self._replica.set_alone(now, alone=False)
            effects += self._replica.take(reply, offset, now, is_current=lease == self._lease)
            again = self._again or lease != self._lease
            askers = list(self._askers) if self._replica.grants != grants else []
        self._adopt(effects)
        for asker in askers:
            asker.waiter.wake()
        if was_unreachable:
            reports.call(self._engine.reporter.shared_again)
        if reply.trouble is not None:
            self._warn(f"its state in the store was unreadable ({reply.trouble}) and is begun anew")
        self._troubles.discard("failed")
        self._send(looks=again and lease != self._lease)

    def _failed(self, message: Message, error: BaseException) -> None:
        with lock:
            self._busy = False
            self._replica.failed(message)
        if isinstance(error, PoolClosed):
            self._stop(None if self._is_over() else f"its store cannot be used: {redact(str(error))}")
        elif isinstance(error, StoreUnreachable):
            self.store_unreachable(error)
        elif "failed" not in self._troubles:  # tried again with the next news, and when the store says to look
            self._troubles.add("failed")
            self._warn(f"what it learned could not be stored: {redact(str(error))}")

    def _is_over(self) -> bool:
        """Whether the program closed the store, or ends. Otherwise a store is refused that could not start a thread."""
        return getattr(self._store, "is_closed", True) or not threading.main_thread().is_alive()

    def _stop(self, why: str | None) -> None:
        """Share nothing any more, and warn of it; without a reason nobody needs to be warned."""
        with lock:
            self._busy, self._stopped = False, True
            effects = self._replica.set_alone(clock.now(), alone=True)
        self._adopt(effects)
        if why is not None:
            self._warn(f"{why}; its health is not shared any more")

    def _warn(self, what: str) -> None:
        if what not in self._troubles:
            self._troubles.add(what)
            reports.call(partial(_log.warning, "%s: %s", self._engine.reporter.name, what))

    def _adopt(self, effects: Effects) -> None:
        report = begin(effects, FROM_ANOTHER)
        if report is not None:
            reports.call(report)


class _Asker:
    """A call without a wait mode that lacks a permit."""

    __slots__ = ("grants", "limit", "requirement", "waiter")

    def __init__(self, requirement: Requirement, waiter: Waiter, limit: float, grants: int) -> None:
        self.requirement = requirement
        self.waiter = waiter
        self.limit = limit
        self.grants = grants


class _Listener:
    """What the store calls. Leaves when the pool is gone."""

    def __init__(self, health: weakref.ref[SharedHealth], store: SharedState, key: str, leaving: Message) -> None:
        self._health = health
        self._store = weakref.ref(store)  # a store that only the pool holds is dropped with it
        self._key = key
        self._leaving = leaving
        self.stop: Callable[[], None] = _nothing

    def woken(self) -> None:
        health = self._health()
        if health is not None:
            health.look()
        else:
            self._leave()

    def lost(self) -> None:
        health = self._health()
        if health is not None:
            health.lease_lost()

    def unreachable(self, error: Exception) -> None:
        health = self._health()
        if health is not None:
            health.store_unreachable(error)

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
    health: weakref.ref[SharedHealth],
    message: Message,
    lease: int,
    then: Callable[[], object] | None,
    future: Future[tuple[Reply, ClockOffset]],
) -> None:
    known = health()
    if known is not None:
        known.answered(message, lease, future)
    if then is not None:
        then()


def _after_fork() -> None:
    for health in list(_living):
        health.after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
