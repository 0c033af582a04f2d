"""Shares the health and the permits of one pool with the pools of the same name on the same store.

`Replica` says what is to be told and takes what others have told; `sharing.link.Link` carries it. What follows from an
answer, such as a resource that is not offered any more, is carried out in the thread of the store.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from headgate.core.clock import clock
from headgate.core.redaction import redact
from headgate.errors import InvalidArgument
from headgate.resources.background import reports
from headgate.resources.effects import Effects
from headgate.resources.engine import Engine, begin, lock
from headgate.resources.events import FROM_ANOTHER
from headgate.resources.exchange import RESOURCE_HEALTH, News, Told
from headgate.resources.members import Member, Requirement
from headgate.resources.replica import Replica
from headgate.resources.shared_quotas import QuotaWait, SharedQuota, lease_quotas, share_quotas, wait_for_quota
from headgate.resources.wakeups import LoopWaiter, ThreadWaiter, Waiter
from headgate.sharing.link import CONNECT, Answer, Link, send_due
from headgate.sharing.states import ClockOffset, SharedState
from headgate.stores.addresses import store_from_environment, store_of

if TYPE_CHECKING:
    from headgate.resources.attempts import Call

_log = logging.getLogger("headgate.resources")


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
    """Shares the health of one pool. Implements `sharing.link.Sharer`."""

    def __init__(self, engine: Engine[Any], store: SharedState, name: str) -> None:
        self._engine = engine
        self._store = store
        self._name = name
        self._replica = Replica(engine.rotation, name)
        self._link = Link(
            self, store, f"resources/{name}", RESOURCE_HEALTH, "its health is not shared any more", lock=lock
        )
        self._waits: list[PermitWait] = []
        self._effects: Effects = []  # to be carried out
        self._woken: list[PermitWait] = []  # the same
        self._followed: Effects = []  # since `members_changed` was last called
        self._unstarted: list[SharedQuota] = []  # the same

    @property
    def store(self) -> SharedState:
        """The store of these pools."""
        return self._store

    def start(self) -> None:
        """Take part; returns when the health that others know is known here too. Blocks this thread."""
        self._store.connect(CONNECT)
        if self._store.deadline != float("inf"):
            store = self._store
            self._replica.guard(lambda: store.deadline)
        self._link.start(answer := Answer())
        answer.wait()
        share_quotas(self._engine.rotation, self._store, self._name)

    # -- what happens here --------------------------------------------------------------------------------------------

    def learned(self, members: set[Member]) -> None:
        """Tell others what was learned about these resources."""
        with lock:
            now = clock.now()
            for member in members:
                self._replica.learn(member, now)
            self._replica.want_more(now)
        self._link.send()
        send_due()

    def waiters_changed(self) -> None:
        """Ask for the permits and the quota that waiters need, or give back what nobody needs."""
        self._link.send()
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
        self._link.send(looks=True)
        for quota in fresh:
            quota.start()

    async def permit_came(self, call: Call) -> bool:
        """Wait for a permit or a quota that a call without a wait mode lacks; False: none came in time."""
        wait = self._wait(call, waiter := LoopWaiter())
        if wait is None:
            return False
        try:
            await waiter.wait(wait.limit)
        finally:
            came = wait.end()
        return came

    def permit_came_sync(self, call: Call) -> bool:
        """`permit_came` for a thread without a loop."""
        wait = self._wait(call, waiter := ThreadWaiter())
        if wait is None:
            return False
        try:
            waiter.wait(wait.limit)
        finally:
            came = wait.end()
        return came

    def _wait(self, call: Call, waiter: Waiter) -> PermitWait | QuotaWait | None:
        wait = None
        with lock:
            avoid = self._engine.rotation.avoided(call.choices()[-1], call.plan.affinity)
            limit = self._replica.lacks(call.plan.requirement, avoid, clock.now(), call.plan.cost)
            if limit is not None and self._link.is_reachable:
                limit = limit if call.deadline is None else min(limit, call.deadline)
                wait = PermitWait(call.plan.requirement, waiter, limit, self._replica, self._stopped_waiting)
                self._waits.append(wait)
        if wait is None:
            return wait_for_quota(self._engine.rotation, call, waiter)
        self._link.send()
        return wait

    def _stopped_waiting(self, wait: PermitWait) -> None:
        with lock:
            self._waits.remove(wait)
        self._link.send()

    # -- what the link asks -------------------------------------------------------------------------------------------

    def message(self, now: float, *, looks: bool) -> News | None:
        """What is to be told; None: nothing."""
        if looks:
            self._replica.want_more(now)
        return self._replica.message(now, self._waits, looks=looks)

    def take(self, said: News, told: Told, offset: ClockOffset, now: float, *, is_current: bool) -> bool:
        """Take an answer. There may be something to tell: what the store has lost."""
        grants = self._replica.grants
        self._effects += self._replica.take(told, offset, now, is_current=is_current)
        if self._replica.grants != grants:
            self._woken += self._waits
        return True

    def failed(self, said: News, error: BaseException) -> None:
        """Note that a message may not have arrived."""
        self._replica.failed(said)

    def forget(self, now: float, *, forked: bool = False) -> None:
        """Have no permits any more."""
        if forked:
            self._waits.clear()
        self._replica.forget_permits()

    def set_alone(self, now: float, *, alone: bool, why: Exception | None = None) -> None:
        """Go on with what is known while the store does not answer."""
        self._effects += self._replica.set_alone(now, alone=alone)
        if alone:
            self._woken += self._waits
        if why is not None:
            reports.call(partial(self._engine.reporter.unshared, redact(str(why))))
        elif not alone:
            reports.call(self._engine.reporter.shared_again)

    def carry_out(self) -> None:
        """Do what followed from an answer, in the thread of the store."""
        with lock:
            effects, self._effects = self._effects, []
            woken, self._woken = self._woken, []
        report = begin(effects, FROM_ANOTHER)
        if report is not None:
            reports.call(report)
        for wait in woken:
            wait.waiter.wake()

    def warn(self, what: str) -> None:
        """Log this."""
        reports.call(partial(_log.warning, "%s: %s", self._engine.reporter.name, what))


class PermitWait:
    """A call without a wait mode that lacks a permit, and waits until another process returns one."""

    __slots__ = ("_grants", "_replica", "_stopped", "limit", "requirement", "waiter")

    def __init__(
        self,
        requirement: Requirement,
        waiter: Waiter,
        limit: float,
        replica: Replica,
        stopped: Callable[[PermitWait], None],
    ) -> None:
        self.requirement: Requirement = requirement
        self.waiter: Waiter = waiter
        self.limit: float = limit
        self._replica = replica
        self._grants = replica.grants
        self._stopped = stopped

    def end(self) -> bool:
        """Wait no longer. Returns whether a permit came, perhaps for somebody else."""
        self._stopped(self)
        return self._replica.grants != self._grants
