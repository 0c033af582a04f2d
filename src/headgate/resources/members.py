"""The objects a rotation works with: members, their uses, the requirements of calls, and the tickets of waiters."""

from __future__ import annotations

import heapq
import math
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from headgate.core.checks import Affinity
from headgate.core.current_task import Standing
from headgate.core.views import AdaptiveStats
from headgate.core.wait_queue import Ticket
from headgate.resources.costs import AnyCost
from headgate.resources.model import (
    Resource,
    ResourceStats,
    ResourceStatus,
    Sharing,
    Usage,
    UsageStatus,
)

if TYPE_CHECKING:
    from headgate.resources.accounts import Account, Reservation
    from headgate.resources.permits import Lease
    from headgate.resources.pickers import Picker
    from headgate.resources.rotation import Rotation
    from headgate.resources.wakeups import Waiter


_NOBODY = Standing()


class Requirement(NamedTuple):
    """What a call can use: resources with all of `tags`, and none of the ids in `skip`."""

    tags: frozenset[str] = frozenset()
    skip: frozenset[str] = frozenset()
    affinity: Affinity | None = None
    """Set for calls that queue apart from others, because a resource cools down for their affinity."""
    only: str | None = None
    """The id of the one resource that is meant."""

    def fits(self, resource: Resource[Any]) -> bool:
        """Whether this resource could serve the call if it were free."""
        is_meant = self.only is None or resource.resource_id == self.only
        return is_meant and self.tags <= resource.tags and resource.resource_id not in self.skip


ANY = Requirement()

MOST_SHOWN = 100  # cooldowns for single affinities that statistics show of one resource
RAMP_TOP = 64  # a resource without a limit is on trial no longer once it may have this many uses at a time


class Trial:
    """The trial of a member after a cooldown: one use at a time until a success, then 2, 4, 8 ... at a time.

    Uses from before the cooldown are not counted: they prove nothing, and must not keep out those that could.
    """

    __slots__ = ("limit", "running", "successes")

    def __init__(self, limit: int = 1) -> None:
        """A `limit` of 0: another process has the right to try it first."""
        self.limit: int = limit
        self.successes: int = 0  # of this round, which ends when they reach the limit
        self.running: set[int] = set()  # the orders of uses that began since the cooldown

    @property
    def is_full(self) -> bool:
        """Whether the next use must wait until one of the running ones has ended."""
        return len(self.running) >= self.limit

    def succeeded(self, top: int) -> bool:
        """Count a success. True: as many as `top` may be used at a time, so the trial is over."""
        self.successes += 1
        if self.successes >= self.limit:
            self.limit, self.successes = 2 * max(1, self.limit), 0
        return self.limit >= top


class Adopted(NamedTuple):
    """The health of a resource as other processes know it, on the monotonic clock of this process."""

    until: float = 0.0
    consecutive: int = 0
    disabled: bool = False
    enabled: bool = False
    """It was enabled by hand since this process last heard of it."""
    cleared: bool = False
    """A success cleared the cooldowns that this process had heard of."""
    is_new: bool = False
    """There is a cooldown that this process had not heard of."""


class Member:
    """A resource's membership of one pool. Strategies read `resource`, `index`, `in_flight` and `is_open`.

    `notes` is for strategies: what they learned about the member, seen by all pickers of the pool and gone with it.
    """

    __slots__ = (
        "__weakref__",
        "acquires",
        "cooldowns",
        "disables",
        "gone",
        "index",
        "lease",
        "notes",
        "pickers",
        "plain",
        "probe",
        "refusals",
        "resource",
        "rotation",
        "sharing",
        "sibling_cancels",
        "successes",
        "trial",
        "unavailable",
        "uses",
    )

    def __init__(self, resource: Resource[Any], rotation: Rotation, index: int) -> None:
        self.resource: Resource[Any] = resource
        self.rotation: Rotation = rotation
        self.index: int = index
        """Its number in the rotation, rising in pool order."""
        self.sharing: Sharing = resource.sharing
        self.uses: dict[int, Use] = resource.sharing.uses
        """Uses of the resource that have not ended, in whichever pool, oldest first."""
        self.notes: Any = None
        self.pickers: tuple[Picker, ...] = ()
        # Cooling, disabled, paused, on trial with as many uses as that allows, or without quota.
        self.unavailable: bool = False
        self.gone: bool = False  # removed from the rotation
        self.trial: Trial | None = None  # recovered from a cooldown, and not yet allowed its full limit
        self.plain: bool = True  # the end of a use takes the short path: see `Rotation.is_plain`
        self.lease: Lease | None = None  # the permits of this process, when processes share the limit
        self.probe: Lease | None = None  # the right to try it after a cooldown, when one process does it for all
        self.acquires: int = 0
        self.successes: int = 0
        self.cooldowns: int = 0
        self.disables: int = 0
        self.refusals: int = 0  # uses that asked for a cooldown, or found it unusable
        self.sibling_cancels: int = 0

    @property
    def is_open(self) -> bool:
        """Whether it may be used now. (The end of its cooldown is noticed before a picker asks.)"""
        limit = self.resource.limit
        return not self.unavailable and (limit is None or len(self.uses) < limit)

    @property
    def in_flight(self) -> int:
        """How many uses of its resource have not ended, in whichever pool."""
        return len(self.uses)

    def can_ever_serve(self, cost: AnyCost) -> bool:
        """Whether a call that costs so much can be served some day without anybody's help."""
        account = self.sharing.account
        affordable = account is None or not cost or account.can_ever_allow(cost)
        return affordable and self.resource.status != "disabled"

    @property
    def shares_quota(self) -> bool:
        """Whether its quota is shared between processes."""
        return self.sharing.account is not None and self.sharing.account.shared is not None

    def cooling_until(self, affinity: Affinity | None) -> float | None:
        """When its resource has cooled down for calls with this affinity alone; None if it need not."""
        kept = self.sharing.affinity_cooldowns
        return None if kept is None else kept.until(affinity)

    @property
    def lacks_only_quota(self) -> bool:
        """Whether it could be used now if its quota allowed that."""
        limit = self.resource.limit
        is_free = limit is None or len(self.uses) < limit
        on_trial = self.trial is not None and self.trial.is_full
        is_closed = on_trial or self.gone or self.sharing.paused
        return is_free and not is_closed and self.resource.status == "healthy"

    def update_availability(self) -> None:
        """Set `unavailable` from the resource's status, its pause, the trial and the quota."""
        account = self.sharing.account
        self.unavailable = (
            self.resource.status != "healthy"
            or self.sharing.paused
            or (self.trial is not None and self.trial.is_full)
            or (account is not None and account.is_closed)
        )

    def adaptive_stats(self, now: float) -> AdaptiveStats | None:
        """The bounds and the last cut of its limit; None: the limit is not adaptive."""
        limit = self.sharing.adaptive
        if limit is None:
            return None
        policy, cut = limit.policy, limit.last_cut
        last = (None, None) if cut is None else (max(0.0, now - cut.at), cut.in_flight)
        return AdaptiveStats(policy.least, policy.most, limit.level.cuts, *last)

    def fully_used(self, in_flight: int) -> int:
        """How many uses this process may have, if it has them all and can get no more; 0 if it could have more."""
        resource = self.resource
        number, usable = resource.max_in_flight or 0, resource.limit or 0
        if in_flight < usable:
            return 0
        leases = [one.lease for one in self.sharing.members if one.lease is not None]
        return usable if all(lease.permits >= number or lease.lacks for lease in leases) else 0

    def stats(self, status: ResourceStatus, left: float, now: float) -> ResourceStats:
        """Gauges and counters of this member, with `status` and the seconds `left` of a cooldown as they are now."""
        resource, kept, account = self.resource, self.sharing.affinity_cooldowns, self.sharing.account
        ends = {} if kept is None else {affinity: until for affinity, until in kept.active().items() if until > now}
        longest = heapq.nlargest(MOST_SHOWN, ends, key=lambda affinity: ends[affinity])
        return ResourceStats(
            resource_id=resource.resource_id,
            status=status,
            in_flight=len(self.uses),
            max_in_flight=resource.max_in_flight,
            consecutive_cooldown=resource.consecutive_cooldown,
            cooldown_seconds_remaining=left,
            acquires=self.acquires,
            successes=self.successes,
            cooldowns=self.cooldowns,
            disables=self.disables,
            sibling_cancels=self.sibling_cancels,
            refusals=self.refusals,
            adaptive=self.adaptive_stats(now),
            affinity_cooldowns={affinity: ends[affinity] - now for affinity in longest},
            quota=None if account is None else account.snapshot(now),
            paused=self.sharing.paused,
        )


class Interruptible(Protocol):
    """The handle by which a use of a resource is stopped because an older one failed."""

    def interrupt(self, why: str) -> None:
        """Stop the use soon, from any thread; does nothing if it has ended."""


class _CancelRequested:
    def interrupt(self, why: str) -> None:
        pass  # whoever sets the real handle does it then


CANCEL_REQUESTED: Interruptible = _CancelRequested()
"""In place of the handle of a use that was to be cancelled before it had a handle."""


class Use:
    """One call's hold on a resource. The engine keeps its handle and its request id here."""

    __slots__ = (
        "_affinity",
        "_is_refused",
        "_ticket",
        "acquired_at",
        "handle",
        "level",
        "member",
        "order",
        "request_id",
        "reservation",
        "status",
    )

    def __init__(self, order: int, member: Member, acquired_at: float) -> None:
        self.order: int = order
        self.member: Member = member
        self.acquired_at: float = acquired_at
        self.status: UsageStatus = "in_flight"
        self.handle: Interruptible | None = None  # None: it cannot be interrupted, or must not be
        self.request_id: str | None = None  # None: not needed so far
        self.level: int = 0
        """How many uses there were when it began, with itself. -1: only a quota learns from how it ends; 0: nothing."""
        self.reservation: Reservation | None = None  # what it takes of a quota

    @property
    def affinity(self) -> Affinity | None:
        """The affinity of its call, if that has one."""
        return getattr(self, "_affinity", None)  # most have none, and do not pay for it (benchmarks/resources.py)

    @affinity.setter
    def affinity(self, affinity: Affinity | None) -> None:
        self._affinity: Affinity | None = affinity

    @property
    def ticket(self) -> WaitTicket | None:
        """The place of the waiter to which it was granted, until that begins to use it."""
        return getattr(self, "_ticket", None)

    @ticket.setter
    def ticket(self, ticket: WaitTicket | None) -> None:
        self._ticket: WaitTicket | None = ticket

    @property
    def is_refused(self) -> bool:
        """Whether its answer was that of a provider that takes no more calls, whatever its verdict is."""
        return getattr(self, "_is_refused", False)

    @is_refused.setter
    def is_refused(self, is_refused: bool) -> None:
        self._is_refused: bool = is_refused

    @property
    def is_running(self) -> bool:
        """Whether this use has not ended."""
        return self.order in self.member.uses

    @property
    def is_late(self) -> bool:
        """Whether it began before the resource's last cooldown did."""
        return self.order <= self.member.sharing.outage

    def usage(self, request_id: str) -> Usage:
        """The value by which events show this use."""
        return Usage(self.order, self.member.resource.resource_id, request_id, self.status, self.acquired_at)


class WaitTicket(Ticket[Requirement, Use]):
    """A waiter's place in the wait queue of one rotation."""

    __slots__ = ("affinity", "cost", "deadline", "held", "rotation", "short_of", "waiter")

    def __init__(
        self,
        requirement: Requirement,
        rotation: Rotation,
        waiter: Waiter | None = None,
        deadline: float | None = None,
        affinity: Affinity | None = None,
        cost: AnyCost = 0.0,
        standing: Standing = _NOBODY,
    ) -> None:
        super().__init__(requirement, *standing)
        self.rotation: Rotation = rotation
        self.waiter: Waiter | None = waiter
        """Whom the engine has to wake; None only in tests of the rotation alone."""
        self.deadline: float | None = deadline
        """Set for a call that waits for a cooldown only: it gives up as soon as none can end before this."""
        self.affinity: Affinity | None = affinity
        """A preference among what comes free, not part of the requirement: nobody waits longer for a favourite."""
        self.cost: AnyCost = cost
        """Tokens that its call takes of a quota."""
        self.held: Member | None = None
        """The member whose account serves it next, because it waits for more than there was."""
        self.short_of: frozenset[Account] = frozenset()
        """Other accounts that have too little for it."""

    def lacks_only_quota_of(self, member: Member) -> bool:
        """Whether its call could use this member now if there were enough of the quota."""
        return member.lacks_only_quota and member.cooling_until(self.affinity) is None

    def passes(self) -> bool:
        """Whether its waiter could not use any resource now."""
        return self.waiter is not None and self.waiter.passes()


class FurtherTicket(WaitTicket):
    """The place of a running use that waits for another request of its quota, and for nothing else."""

    __slots__ = ("within",)

    def __init__(self, within: Use, waiter: Waiter | None = None) -> None:
        member = within.member
        super().__init__(Requirement(only=member.resource.resource_id), member.rotation, waiter)
        self.within: Use = within

    def lacks_only_quota_of(self, member: Member) -> bool:
        """Whether this member is the one that it uses."""
        return member is self.within.member


class Totals:
    """Counters of members that were removed from the pool."""

    __slots__ = ("acquires", "cooldowns", "disables", "refusals", "sibling_cancels", "successes")

    def __init__(self) -> None:
        self.acquires: int = 0
        self.successes: int = 0
        self.cooldowns: int = 0
        self.disables: int = 0
        self.refusals: int = 0
        self.sibling_cancels: int = 0

    def absorb(self, member: Member) -> None:
        """Add a member's counts to these, and set the member's to 0."""
        for name in self.__slots__:
            setattr(self, name, getattr(self, name) + getattr(member, name))
            setattr(member, name, 0)


def hopeless(rotation: Rotation) -> list[WaitTicket]:
    """Return the tickets of waiters that nothing can come for, or not before their deadline."""
    hope: dict[tuple[Requirement, AnyCost], tuple[bool, float]] = {}
    found = []
    for ticket in rotation.wait_queue:
        asked = ticket.requirement, ticket.cost
        if asked not in hope:
            hope[asked] = _outlook(rotation, *asked)
        can_come, earliest = hope[asked]
        if not can_come or (ticket.deadline is not None and earliest >= ticket.deadline):
            found.append(ticket)
    return found


def _outlook(rotation: Rotation, requirement: Requirement, cost: AnyCost) -> tuple[bool, float]:
    """Whether anything can come for a waiter, and not before when. (In use counts as any moment: 0.)"""
    members = [member for member in rotation.matching_members(requirement) if member.can_ever_serve(cost)]
    times = [
        math.inf
        if one.sharing.paused
        else max(
            one.resource.cooldown_until if one.resource.status == "cooling_down" else 0.0,
            one.cooling_until(requirement.affinity) or 0.0,
        )
        for one in members
    ]
    return bool(members), min(times, default=0.0)


def advance_trials(resource: Resource[Any], prover: Member | None) -> None:
    """Let members on trial have more uses at a time, after a success: all that had one, and the prover's own."""
    top = RAMP_TOP if resource.max_in_flight is None else resource.max_in_flight
    for member in resource.sharing.members:
        trial = member.trial
        if trial is not None and (trial.limit <= 1 or member is prover):
            if trial.succeeded(top):
                member.trial = None
            member.update_availability()
    refresh(resource)


def holders(resource: Resource[Any]) -> list[Rotation]:
    """Return the rotations that have a resource."""
    return [member.rotation for member in resource.sharing.members]


def offer(resource: Resource[Any]) -> None:
    """Tell the pickers of every rotation that holds this resource that it may have moved forward."""
    for member in resource.sharing.members:
        for picker in member.pickers:
            picker.offer(member)


def refresh(resource: Resource[Any]) -> None:
    """Note for each rotation that has a resource whether its use needs no further thought."""
    for member in resource.sharing.members:
        member.plain = member.rotation.is_plain(member)
