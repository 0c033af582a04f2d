"""The shell of shared quotas: passes what this process has used to the store, and what it is granted to its calls.

`LeasedBudget` says what is to be told; `sharing.link.Link` carries it. Nothing here keeps a pool alive: the quota
belongs to the account of its resources.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING

from headgate.core.clock import clock
from headgate.resources.accounts import Account
from headgate.resources.background import reports
from headgate.resources.costs import AnyCost
from headgate.resources.effects import Effects
from headgate.resources.engine import begin, lock
from headgate.resources.health import mark_of
from headgate.resources.leased_budget import LeasedBudget
from headgate.resources.quota import as_given
from headgate.resources.quota_exchange import SHARED_QUOTA, Granted, Report
from headgate.resources.wakeups import Waiter
from headgate.sharing.link import Answer, Link, Then, send_due
from headgate.sharing.states import ClockOffset, SharedState

if TYPE_CHECKING:
    from headgate.resources.attempts import Call
    from headgate.resources.rotation import Rotation

PATIENCE = 0.5
"""Seconds for which a call without a wait mode waits for the store to say what is left."""

_log = logging.getLogger("headgate.resources")


def share_quotas(rotation: Rotation, store: SharedState, name: str) -> None:
    """Share the quotas of the resources of a pool with all pools of this name; those of groups with all of the group.

    Returns when it is known what is left, and blocks this thread for that.
    """
    with lock:
        fresh = lease_quotas(rotation, store, name)
    answers = []
    for quota in fresh:
        quota.start(answer := Answer())
        answers.append(answer)
    for answer in answers:
        answer.wait()


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


class QuotaWait:
    """A call without a wait mode that lacks quota, and waits for what other processes leave."""

    def __init__(self, quotas: Iterable[SharedQuota], call: Call, waiter: Waiter) -> None:
        self._quotas, self._call, self._waiter = quotas, call, waiter
        patience = clock.now() + PATIENCE
        self.limit: float = patience if call.deadline is None else min(patience, call.deadline)

    def end(self) -> bool:
        """Wait no longer. Returns whether there is enough now."""
        with lock:
            for quota in self._quotas:
                quota.askers.pop(self._waiter, None)
                quota.want_no_more()
        send_due()
        with lock:
            now, cost = clock.now(), self._call.plan.cost
            return any(quota.account.admits(cost, now, None) for quota in self._quotas)


def wait_for_quota(rotation: Rotation, call: Call, waiter: Waiter) -> QuotaWait | None:
    """Ask for what a call needs, of each quota that could give it. None: no other process could leave it any."""
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
    return QuotaWait(asked, call, waiter) if asked else None


class SharedQuota:
    """Shares one quota with other processes. Implements `sharing.link.Sharer`."""

    def __init__(self, account: Account, store: SharedState, key: str, rotation: Rotation) -> None:
        """Calls may take nothing until `start`. With the lock held."""
        self.account: Account = account
        self.askers: dict[Waiter, AnyCost] = {}
        """Calls without a wait mode that wait for an answer, and what they cost."""
        self._key = key
        self._rotation = weakref.ref(rotation)
        lost = "what is left of it is not given to calls any more"
        self._link = link = Link(self, store, key, SHARED_QUOTA, lost, lock=lock)
        self._budget = LeasedBudget(account.quota, link.note, lambda: store.deadline)
        self._effects: Effects = []  # to be carried out
        self._woken: list[Waiter] = []  # the same
        self._others: Granted | None = None  # the last answer
        account.lease(self._budget, self, clock.now())
        for member in account.members:
            member.rotation.shares_quotas = True

    @property
    def is_reachable(self) -> bool:
        """Whether the store answers, as far as is known."""
        return self._link.is_reachable

    def start(self, then: Then | None = None) -> None:
        """Take part, and call `then` when the first answer is there."""
        with lock:
            self._budget.lack(self._budget.need(0.0), clock.now())
        self._link.start(then)

    def want_no_more(self) -> None:
        """Leave to others what was asked for here, if no call waits for it any more."""
        if self.account.cost_waited_for() is None:
            self._budget.want_no_more()

    # -- what the link asks -------------------------------------------------------------------------------------------

    def message(self, now: float, *, looks: bool) -> Report | None:
        """What is to be told; None: nothing."""
        return self._budget.message(looks=looks)

    def take(self, said: Report, told: Granted, offset: ClockOffset, now: float, *, is_current: bool) -> bool:
        """Take an answer, unless it speaks of an id that this process has no more."""
        if is_current:
            self._budget.take(said, told, offset, now)
            self._changed()
            if told.is_wanted and not self.askers:  # they are woken soon, and use what was given
                self._budget.give_back(now)
            self._woken += self.askers
            self._others = told
        return False

    def failed(self, said: Report, error: BaseException) -> None:
        """Do nothing: the same message is sent again."""

    def forget(self, now: float, *, forked: bool = False) -> None:
        """Hold nothing any more."""
        self._budget.forget()
        if forked:
            self.askers.clear()
            self.account.refresh(now)
        else:
            self._changed()

    def set_alone(self, now: float, *, alone: bool, why: Exception | None = None) -> None:
        """Go on with what this process holds. There is no more until the store answers."""
        self._woken += self.askers

    def carry_out(self) -> None:
        """Open or close the resources, and serve those who wait."""
        with lock:
            effects, self._effects = self._effects, []
            woken, self._woken = self._woken, []
            others, self._others = self._others, None
        report = begin(effects, None)
        if report is not None:
            reports.call(report)
        for engine in {member.rotation.owner for member in self.account.members}:
            if engine is not None:
                engine.watch()  # it may open at another time than was known
        for asker in woken:
            asker.wake()
        if others is not None and others.quota != self.account.quota:
            self._link.warn(
                f"other processes share {as_given(others.quota)!r}, and this one has {as_given(self.account.quota)!r}: "
                "theirs counts. "
                "Give all processes the same quota"
            )

    def _changed(self) -> None:
        rotation = next((member.rotation for member in self.account.members), self._rotation())
        if rotation is not None:
            self._effects += rotation.quota_changed(self.account, clock.now()) or []

    def warn(self, what: str) -> None:
        """Log this."""
        reports.call(partial(_log.warning, "the quota %s: %s", self._key.removeprefix("quotas/"), what))
