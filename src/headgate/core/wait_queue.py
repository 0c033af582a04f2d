"""A fair line of waiters that want different things.

First come, first served: what comes free goes to the first waiter that can use it. Waiters that want the same thing are
one queue, so asking "who is first?" costs as much as there are different wants (usually one), not as there are waiters.

Pure: a waiter is granted something by being taken out of the line and told what it got, while the owner still holds its
lock. So there is no moment in which a later comer could take what an earlier one was promised, and a waiter that has
gone away when the news reaches it finds the grant on its ticket and can hand it on.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from itertools import count, takewhile
from typing import Any, Generic, TypeVar

Want = TypeVar("Want", bound=Hashable)
Grant = TypeVar("Grant")

_numbers = count(1)  # one series for all lines: lines that share something can be compared


class Ticket(Generic[Want, Grant]):
    """A place in a line."""

    __slots__ = ("grant", "number", "want")

    def __init__(self, want: Want) -> None:
        self.number: int = next(_numbers)
        self.want: Want = want
        self.grant: Grant | None = None
        """What the waiter was given; None while it waits."""

    def passes(self) -> bool:
        """Could it use nothing at all, were it its turn now? Then it steps out of the line when it is."""
        return False


TicketT = TypeVar("TicketT", bound=Ticket[Any, Any])


class Line(Generic[TicketT]):
    """Waiters, oldest first."""

    __slots__ = ("_queues",)

    def __init__(self) -> None:
        self._queues: dict[Hashable, OrderedDict[int, TicketT]] = {}

    def join(self, ticket: TicketT) -> None:
        """Stand at the end."""
        self._queues.setdefault(ticket.want, OrderedDict())[ticket.number] = ticket

    def rejoin(self, ticket: TicketT) -> None:
        """Stand again where it stood: what it was granted was taken back before it could be used."""
        ticket.grant = None
        self.join(ticket)
        queue = self._queues[ticket.want]
        older = list(takewhile(lambda number: number < ticket.number, queue))
        for number in (ticket.number, *reversed(older)):
            queue.move_to_end(number, last=False)

    def __contains__(self, ticket: TicketT) -> bool:
        return ticket.number in self._queues.get(ticket.want, ())

    def leave(self, ticket: TicketT) -> bool:
        """Step out; False when it was not in the line (it was granted something, or left before)."""
        queue = self._queues.get(ticket.want)
        if queue is None or queue.pop(ticket.number, None) is None:
            return False
        if not queue:
            del self._queues[ticket.want]
        return True

    def serve(self, take: Callable[[Any], Any]) -> list[TicketT]:
        """Grant what `take(want)` finds, oldest waiter first, until nobody can use anything; returns who was served."""
        return serve([(self, lambda ticket: take(ticket.want))])

    def heads(self) -> Iterator[TicketT]:
        """The first of each want."""
        return (next(iter(queue.values())) for queue in self._queues.values())

    def head(self, want: Hashable) -> TicketT | None:
        """The first of those who want this."""
        return next(iter(self._queues.get(want, {}).values()), None)

    def first(self) -> TicketT | None:
        """Whoever has waited longest."""
        return min(self.heads(), key=_number, default=None)

    def __iter__(self) -> Iterator[TicketT]:
        return iter(sorted((ticket for queue in self._queues.values() for ticket in queue.values()), key=_number))

    def __bool__(self) -> bool:
        return bool(self._queues)

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))


def serve(lines: Sequence[tuple[Line[TicketT], Callable[[TicketT], Any]]]) -> list[TicketT]:
    """Grant what each line's `take(ticket)` finds, oldest waiter of all first, until nobody can use anything.

    Whether it finds something is decided by the ticket's want alone; which, may depend on the ticket. Returns who left
    the line: with a grant, or without, if it could not use any now (`passes`). Lines that share something are served
    together, so that their waiters are one line for it.
    """
    served: list[TicketT] = []
    heads = [(ticket.number, nth, ticket) for nth, (line, _) in enumerate(lines) for ticket in line.heads()]
    heapq.heapify(heads)
    while heads:
        _, nth, ticket = heads[0]
        line, take = lines[nth]
        passes = ticket.passes()
        grant = None if passes else take(ticket)
        if grant is None and not passes:  # and so for all who want the same
            heapq.heappop(heads)
            continue
        line.leave(ticket)
        ticket.grant = grant
        served.append(ticket)
        behind = line.head(ticket.want)
        if behind is None:
            heapq.heappop(heads)
        else:
            heapq.heapreplace(heads, (behind.number, nth, behind))
    return served


def _number(ticket: Ticket[Any, Any]) -> int:
    return ticket.number
