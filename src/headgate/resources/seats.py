"""The pieces a rotation moves: a seat, a flight, what a call wants, a place in the line."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from headgate.core.waiters import Ticket
from headgate.resources.model import Resource, ResourceStats, ResourceStatus, Usage, UsageStatus

if TYPE_CHECKING:
    from headgate.resources.rotation import Rotation
    from headgate.resources.strategies import Picker


class Want(NamedTuple):
    """What a call can use: resources with all of `tags`, and none of the ids in `skip`."""

    tags: frozenset[str] = frozenset()
    skip: frozenset[str] = frozenset()

    def fits(self, resource: Resource[Any]) -> bool:
        """Could this resource serve the call, were it free?"""
        return self.tags <= resource.tags and resource.resource_id not in self.skip


ANY = Want()


class Seat:
    """A resource's place in a rotation. Strategies read `resource`, `index` and `is_open`."""

    __slots__ = (
        "__weakref__",
        "acquires",
        "cooldowns",
        "disables",
        "gone",
        "index",
        "pickers",
        "plain",
        "probe",
        "probing",
        "resource",
        "rotation",
        "shut",
        "sibling_cancels",
        "successes",
    )

    def __init__(self, resource: Resource[Any], rotation: Rotation, index: int) -> None:
        self.resource: Resource[Any] = resource
        self.rotation: Rotation = rotation
        self.index: int = index
        """Its number in the rotation, rising in pool order."""
        self.pickers: tuple[Picker, ...] = ()
        self.shut: bool = False  # cooling, disabled, or one probe is already out
        self.gone: bool = False  # removed from the rotation
        self.probing: bool = False  # recovered and not yet proven: one flight at a time
        self.probe: Flight | None = None
        self.plain: bool = True  # none of the rarer things above, and no other pool holds the resource
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


class Flight:
    """One use of a resource. The shell keeps its handle and its request id here."""

    __slots__ = ("acquired_at", "handle", "order", "request_id", "seat", "status", "ticket")

    def __init__(self, order: int, seat: Seat, acquired_at: float) -> None:
        self.order: int = order
        self.seat: Seat = seat
        self.acquired_at: float = acquired_at
        self.status: UsageStatus = "in_flight"
        self.handle: object = None  # what interrupts it; None: it cannot or must not be cancelled
        self.request_id: str | None = None  # None: not needed so far
        self.ticket: WaitTicket | None = None  # granted to a waiter that has not begun to use it

    def usage(self, request_id: str) -> Usage:
        """How events show it."""
        return Usage(self.order, self.seat.resource.resource_id, request_id, self.status, self.acquired_at)


class WaitTicket(Ticket[Want, Flight]):
    """A waiter's place in the line of one rotation."""

    __slots__ = ("deadline", "rotation", "waiter")

    def __init__(self, want: Want, rotation: Rotation, waiter: Any = None, deadline: float | None = None) -> None:
        super().__init__(want)
        self.rotation: Rotation = rotation
        self.waiter: Any = waiter
        """Whom the shell has to wake; opaque here."""
        self.deadline: float | None = deadline
        """Set for one that waits for a cooldown only: it gives up as soon as none can end before this."""


class Totals:
    """Counters that outlive the seats they were counted on."""

    __slots__ = ("acquires", "cooldowns", "disables", "sibling_cancels", "successes")

    def __init__(self) -> None:
        self.acquires: int = 0
        self.successes: int = 0
        self.cooldowns: int = 0
        self.disables: int = 0
        self.sibling_cancels: int = 0

    def absorb(self, seat: Seat) -> None:
        """Take over a seat's counts."""
        for name in self.__slots__:
            setattr(self, name, getattr(self, name) + getattr(seat, name))
            setattr(seat, name, 0)
