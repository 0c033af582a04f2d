"""The pieces a rotation moves: a seat, a flight, what a call wants, a place in the line."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from headgate.core.checks import Affinity
from headgate.core.wait_queue import Ticket
from headgate.resources.model import Resource, ResourceStats, ResourceStatus, Usage, UsageStatus

if TYPE_CHECKING:
    from headgate.resources.rotation import Rotation
    from headgate.resources.strategies import Picker


class Requirement(NamedTuple):
    """What a call can use: resources with all of `tags`, and none of the ids in `skip`."""

    tags: frozenset[str] = frozenset()
    skip: frozenset[str] = frozenset()

    def fits(self, resource: Resource[Any]) -> bool:
        """Could this resource serve the call, were it free?"""
        return self.tags <= resource.tags and resource.resource_id not in self.skip


ANY = Requirement()

RAMP_TOP = 64  # uses at a time from which on a resource without a limit is left alone


class Trial:
    """A seat's way back after a cooldown: one use at a time until a success, then 2, 4, 8 ... at a time.

    Uses from before the cooldown are not counted: they prove nothing, and must not keep out those that could.
    """

    __slots__ = ("aloft", "limit", "successes")

    def __init__(self) -> None:
        self.limit: int = 1
        self.successes: int = 0  # of this round: as many as the limit end it
        self.aloft: set[int] = set()  # the orders of flights begun since the cooldown

    @property
    def is_full(self) -> bool:
        """Must the next use wait for the end of one of these?"""
        return len(self.aloft) >= self.limit

    def succeeded(self, top: int) -> bool:
        """Count a success. True: as many as `top` may be used at a time, so the trial is over."""
        self.successes += 1
        if self.successes >= self.limit:
            self.limit, self.successes = 2 * self.limit, 0
        return self.limit >= top


class Member:
    """A resource's place in a rotation. Strategies read `resource`, `index`, `in_flight` and `is_open`.

    `notes` is theirs: whatever they learned about the seat, seen by all pickers of the pool and gone with the seat.
    """

    __slots__ = (
        "__weakref__",
        "acquires",
        "cooldowns",
        "disables",
        "gone",
        "index",
        "notes",
        "pickers",
        "plain",
        "resource",
        "rotation",
        "shut",
        "sibling_cancels",
        "successes",
        "trial",
    )

    def __init__(self, resource: Resource[Any], rotation: Rotation, index: int) -> None:
        self.resource: Resource[Any] = resource
        self.rotation: Rotation = rotation
        self.index: int = index
        """Its number in the rotation, rising in pool order."""
        self.notes: Any = None
        self.pickers: tuple[Picker, ...] = ()
        self.shut: bool = False  # cooling, disabled, or on trial and as many in flight as that allows
        self.gone: bool = False  # removed from the rotation
        self.trial: Trial | None = None  # recovered, and not yet what it was
        self.plain: bool = True  # none of the rarer things above, nobody learns, and no other pool holds the resource
        self.acquires: int = 0
        self.successes: int = 0
        self.cooldowns: int = 0
        self.disables: int = 0
        self.sibling_cancels: int = 0

    @property
    def is_open(self) -> bool:
        """May it be used now? (That its cooldown is over is noticed before anyone asks.)"""
        limit = self.resource.max_in_flight
        return not self.shut and (limit is None or len(self.resource._flights) < limit)

    @property
    def in_flight(self) -> int:
        """Uses of its resource that have not ended, in whichever pool."""
        return len(self.resource._flights)

    def reckon(self) -> None:
        """Find out whether it is shut."""
        self.shut = self.resource.status != "healthy" or (self.trial is not None and self.trial.is_full)

    def stats(self, status: ResourceStatus, left: float) -> ResourceStats:
        """Its gauges and counters; `status` and the `left` of a cooldown as they are now."""
        resource = self.resource
        return ResourceStats(
            resource_id=resource.resource_id,
            status=status,
            in_flight=len(resource._flights),
            max_in_flight=resource.max_in_flight,
            consecutive_cooldown=resource.consecutive_cooldown,
            cooldown_seconds_remaining=left,
            acquires=self.acquires,
            successes=self.successes,
            cooldowns=self.cooldowns,
            disables=self.disables,
            sibling_cancels=self.sibling_cancels,
        )


DOOMED = object()
"""In place of the handle of a flight that was to be cancelled before it could be."""


class Interruptible(Protocol):
    """How a use of a resource is stopped because an older one failed."""

    def interrupt(self, why: str) -> None:
        """Stop it soon, from any thread; nothing if it has ended."""


Seat = Member
"""The former name of `Member`, for strategies that were written with it."""


class Use:
    """One use of a resource. The shell keeps its handle and its request id here."""

    __slots__ = ("acquired_at", "handle", "order", "request_id", "seat", "status", "ticket")

    def __init__(self, order: int, seat: Member, acquired_at: float) -> None:
        self.order: int = order
        self.seat: Member = seat
        self.acquired_at: float = acquired_at
        self.status: UsageStatus = "in_flight"
        self.handle: Any = None  # what interrupts it (see `Interruptible`); None: it cannot or must not be
        self.request_id: str | None = None  # None: not needed so far
        self.ticket: WaitTicket | None = None  # granted to a waiter that has not begun to use it

    def usage(self, request_id: str) -> Usage:
        """How events show it."""
        return Usage(self.order, self.seat.resource.resource_id, request_id, self.status, self.acquired_at)


class WaitTicket(Ticket[Requirement, Use]):
    """A waiter's place in the line of one rotation."""

    __slots__ = ("affinity", "deadline", "rotation", "waiter")

    def __init__(
        self,
        want: Requirement,
        rotation: Rotation,
        waiter: Any = None,
        deadline: float | None = None,
        affinity: Affinity | None = None,
    ) -> None:
        super().__init__(want)
        self.rotation: Rotation = rotation
        self.waiter: Any = waiter
        """Whom the shell has to wake; opaque here."""
        self.deadline: float | None = deadline
        """Set for one that waits for a cooldown only: it gives up as soon as none can end before this."""
        self.affinity: Affinity | None = affinity
        """A preference among what comes free, and no part of the want: nobody waits longer for a favourite."""

    def passes(self) -> bool:
        """Has its waiter no use for anything now?"""
        return bool(self.waiter.passes()) if self.waiter is not None else False


class Totals:
    """Counters that outlive the seats they were counted on."""

    __slots__ = ("acquires", "cooldowns", "disables", "sibling_cancels", "successes")

    def __init__(self) -> None:
        self.acquires: int = 0
        self.successes: int = 0
        self.cooldowns: int = 0
        self.disables: int = 0
        self.sibling_cancels: int = 0

    def absorb(self, seat: Member) -> None:
        """Take over a seat's counts."""
        for name in self.__slots__:
            setattr(self, name, getattr(self, name) + getattr(seat, name))
            setattr(seat, name, 0)
