"""A fair queue of waiters with different requirements.

Higher priority first; among equals tenants take turns; waiters of one tenant in the order in which they came. Waiters
that name neither are served first come, first served. What comes free goes to the first waiter that can use it. Waiters
with the same requirement are one line, so "who is first?" costs as much as there are different requirements (usually
one), not waiters; first among the lines is the highest priority, and then the longest wait.

Pure: a waiter is granted something by being taken out of the queue and told what it got, while the owner still holds
its lock. So a later waiter can never take what an earlier one was promised, and a waiter that has gone away when the
news reaches it finds the grant on its ticket and can pass it on.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from itertools import count, takewhile
from typing import Any, Generic, TypeVar

RequirementT = TypeVar("RequirementT", bound=Hashable)
Grant = TypeVar("Grant")

_numbers = count(1)  # one series for all queues: waiters of queues that share something can be compared


class Ticket(Generic[RequirementT, Grant]):
    """A waiter's place in a queue."""

    __slots__ = ("grant", "number", "priority", "rank", "requirement", "tenant")

    def __init__(self, requirement: RequirementT, priority: float = 0, tenant: Hashable = None) -> None:
        self.number: int = next(_numbers)
        self.requirement: RequirementT = requirement
        self.priority: float = priority
        self.tenant: Hashable = tenant
        self.rank: tuple[float, int] = (-priority, self.number)
        """Its place among the first of all lines: the lowest is served first."""
        self.grant: Grant | None = None
        """What the waiter was given; None while it waits."""

    def passes(self) -> bool:
        """Whether the waiter could use nothing at all now; then it leaves the queue when its turn comes."""
        return False


TicketT = TypeVar("TicketT", bound=Ticket[Any, Any])

_Ring = OrderedDict[Hashable, OrderedDict[int, TicketT]]
"""The tenants of one priority, whose turn it is first, and their waiters, oldest first."""


class _Line(Generic[TicketT]):
    """The waiters with one requirement."""

    __slots__ = ("_rings", "head", "size")

    def __init__(self, ticket: TicketT) -> None:
        self.size: int = 0
        self.head: TicketT = ticket
        """The first, kept because it is asked for far more often than it changes."""
        self._rings: dict[float, _Ring[TicketT]] = {}

    def join(self, ticket: TicketT) -> None:
        self._add(ticket)
        if self.size == 1 or ticket.priority > self.head.priority:
            self.head = ticket

    def _add(self, ticket: TicketT) -> None:
        ring = self._rings.setdefault(ticket.priority, OrderedDict())
        ring.setdefault(ticket.tenant, OrderedDict())[ticket.number] = ticket
        self.size += 1

    def rejoin(self, ticket: TicketT) -> None:
        self._add(ticket)
        ring = self._rings[ticket.priority]
        own = ring[ticket.tenant]
        older = list(takewhile(lambda number: number < ticket.number, own))
        for number in (ticket.number, *reversed(older)):
            own.move_to_end(number, last=False)
        ring.move_to_end(ticket.tenant, last=False)
        self._find_head()

    def _find_head(self) -> None:
        if self.size:
            ring = self._rings[max(self._rings)]
            self.head = next(iter(next(iter(ring.values())).values()))

    def remove(self, ticket: TicketT, *, served: bool) -> bool:
        ring = self._rings.get(ticket.priority)
        own = None if ring is None else ring.get(ticket.tenant)
        if ring is None or own is None or own.pop(ticket.number, None) is None:
            return False
        self.size -= 1
        if not own:
            del ring[ticket.tenant]
            if not ring:
                del self._rings[ticket.priority]
        elif served:
            ring.move_to_end(ticket.tenant)
        if ticket is self.head:
            self._find_head()
        return True

    def __contains__(self, ticket: TicketT) -> bool:
        ring = self._rings.get(ticket.priority)
        return ring is not None and ticket.number in ring.get(ticket.tenant, ())

    def __iter__(self) -> Iterator[TicketT]:
        return (ticket for ring in self._rings.values() for own in ring.values() for ticket in own.values())


class WaitQueue(Generic[TicketT]):
    """Tickets of waiters, in lines by what they require."""

    __slots__ = ("_lines",)

    def __init__(self) -> None:
        self._lines: dict[Hashable, _Line[TicketT]] = {}

    def join(self, ticket: TicketT) -> None:
        """Add a ticket behind all others of its tenant and priority."""
        self._line(ticket).join(ticket)

    def rejoin(self, ticket: TicketT) -> None:
        """Put a ticket back in its old place: what it was granted was taken back before it could be used."""
        ticket.grant = None
        self._line(ticket).rejoin(ticket)

    def _line(self, ticket: TicketT) -> _Line[TicketT]:
        line = self._lines.get(ticket.requirement)
        if line is None:
            line = self._lines[ticket.requirement] = _Line(ticket)
        return line

    def __contains__(self, ticket: TicketT) -> bool:
        line = self._lines.get(ticket.requirement)
        return line is not None and ticket in line

    def leave(self, ticket: TicketT, *, served: bool = False) -> bool:
        """Remove a ticket; False when it was not in the queue (it was granted something, or left before).

        If it is `served`, the next turn is that of another tenant.
        """
        line = self._lines.get(ticket.requirement)
        if line is None or not line.remove(ticket, served=served):
            return False
        if not line.size:
            del self._lines[ticket.requirement]
        return True

    def serve(self, take: Callable[[Any], Any]) -> list[TicketT]:
        """Grant what `take(requirement)` finds, first ticket first, until nothing fits; returns the tickets served."""
        return serve([(self, lambda ticket: take(ticket.requirement))])

    def heads(self) -> Iterator[TicketT]:
        """The first ticket of each requirement."""
        return iter([line.head for line in self._lines.values()])

    def head(self, requirement: Hashable) -> TicketT | None:
        """The first ticket with this requirement, or None if there is none."""
        line = self._lines.get(requirement)
        return None if line is None else line.head

    def first(self) -> TicketT | None:
        """The first ticket of all, or None if nobody waits."""
        return min(self.heads(), key=_rank, default=None)

    def __iter__(self) -> Iterator[TicketT]:
        return iter(sorted((ticket for line in self._lines.values() for ticket in line), key=_rank))

    def __bool__(self) -> bool:
        return bool(self._lines)

    def __len__(self) -> int:
        return sum(line.size for line in self._lines.values())


def serve(queues: Sequence[tuple[WaitQueue[TicketT], Callable[[TicketT], Any]]]) -> list[TicketT]:
    """Grant what each queue's `take(ticket)` finds, first ticket of all queues first, until nothing fits.

    Whether `take` finds something must depend on the ticket's requirement alone; what it finds may depend on the
    ticket. Returns the tickets that left their queue: with a grant, or without one if the waiter could not use any now
    (`passes`). Queues that share something are served together, so that their waiters are one queue for it.
    """
    served: list[TicketT] = []
    heads = [(ticket.rank, nth, ticket) for nth, (queue, _) in enumerate(queues) for ticket in queue.heads()]
    heapq.heapify(heads)
    while heads:
        _, nth, ticket = heads[0]
        queue, take = queues[nth]
        passes = ticket.passes()
        grant = None if passes else take(ticket)
        if grant is None and not passes:  # nor is there anything for the others with the same requirement
            heapq.heappop(heads)
            continue
        queue.leave(ticket, served=True)
        ticket.grant = grant
        served.append(ticket)
        behind = queue.head(ticket.requirement)
        if behind is None:
            heapq.heappop(heads)
        else:
            heapq.heapreplace(heads, (behind.rank, nth, behind))
    return served


def _rank(ticket: Ticket[Any, Any]) -> tuple[float, int]:
    return ticket.rank
