"""A fair queue of waiters with different requirements.

First come, first served: what comes free goes to the first waiter that can use it. Waiters with the same requirement
are one queue, so "who is first?" costs as much as there are different requirements (usually one), not waiters.

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

    __slots__ = ("grant", "number", "requirement")

    def __init__(self, requirement: RequirementT) -> None:
        self.number: int = next(_numbers)
        self.requirement: RequirementT = requirement
        self.grant: Grant | None = None
        """What the waiter was given; None while it waits."""

    def passes(self) -> bool:
        """Whether the waiter could use nothing at all now; then it leaves the queue when its turn comes."""
        return False


TicketT = TypeVar("TicketT", bound=Ticket[Any, Any])


class WaitQueue(Generic[TicketT]):
    """Tickets of waiters, oldest first."""

    __slots__ = ("_queues",)

    def __init__(self) -> None:
        self._queues: dict[Hashable, OrderedDict[int, TicketT]] = {}

    def join(self, ticket: TicketT) -> None:
        """Add a ticket at the end."""
        self._queues.setdefault(ticket.requirement, OrderedDict())[ticket.number] = ticket

    def rejoin(self, ticket: TicketT) -> None:
        """Put a ticket back in its old place: what it was granted was taken back before it could be used."""
        ticket.grant = None
        self.join(ticket)
        queue = self._queues[ticket.requirement]
        older = list(takewhile(lambda number: number < ticket.number, queue))
        for number in (ticket.number, *reversed(older)):
            queue.move_to_end(number, last=False)

    def __contains__(self, ticket: TicketT) -> bool:
        return ticket.number in self._queues.get(ticket.requirement, ())

    def leave(self, ticket: TicketT) -> bool:
        """Remove a ticket; False when it was not in the queue (it was granted something, or left before)."""
        queue = self._queues.get(ticket.requirement)
        if queue is None or queue.pop(ticket.number, None) is None:
            return False
        if not queue:
            del self._queues[ticket.requirement]
        return True

    def serve(self, take: Callable[[Any], Any]) -> list[TicketT]:
        """Grant what `take(requirement)` finds, oldest ticket first, until nothing fits; returns the tickets served."""
        return serve([(self, lambda ticket: take(ticket.requirement))])

    def heads(self) -> Iterator[TicketT]:
        """The oldest ticket of each requirement."""
        return (next(iter(queue.values())) for queue in self._queues.values())

    def head(self, requirement: Hashable) -> TicketT | None:
        """The oldest ticket with this requirement."""
        return next(iter(self._queues.get(requirement, {}).values()), None)

    def first(self) -> TicketT | None:
        """The oldest ticket of all."""
        return min(self.heads(), key=_number, default=None)

    def __iter__(self) -> Iterator[TicketT]:
        return iter(sorted((ticket for queue in self._queues.values() for ticket in queue.values()), key=_number))

    def __bool__(self) -> bool:
        return bool(self._queues)

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))


def serve(queues: Sequence[tuple[WaitQueue[TicketT], Callable[[TicketT], Any]]]) -> list[TicketT]:
    """Grant what each queue's `take(ticket)` finds, oldest ticket of all queues first, until nothing fits.

    Whether `take` finds something must depend on the ticket's requirement alone; what it finds may depend on the
    ticket. Returns the tickets that left their queue: with a grant, or without one if the waiter could not use any now
    (`passes`). Queues that share something are served together, so that their waiters are one queue for it.
    """
    served: list[TicketT] = []
    heads = [(ticket.number, nth, ticket) for nth, (queue, _) in enumerate(queues) for ticket in queue.heads()]
    heapq.heapify(heads)
    while heads:
        _, nth, ticket = heads[0]
        queue, take = queues[nth]
        passes = ticket.passes()
        grant = None if passes else take(ticket)
        if grant is None and not passes:  # nor is there anything for the others with the same requirement
            heapq.heappop(heads)
            continue
        queue.leave(ticket)
        ticket.grant = grant
        served.append(ticket)
        behind = queue.head(ticket.requirement)
        if behind is None:
            heapq.heappop(heads)
        else:
            heapq.heapreplace(heads, (behind.number, nth, behind))
    return served


def _number(ticket: Ticket[Any, Any]) -> int:
    return ticket.number
