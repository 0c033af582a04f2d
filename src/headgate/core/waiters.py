"""A fair line of waiters that want different things.

First come, first served: what comes free goes to the first waiter that can use it. Waiters that want the same thing are
one queue, so asking "who is first?" costs as much as there are different wants (usually one), not as there are waiters.

Pure: a waiter is granted something by being taken out of the line and told what it got, while the owner still holds its
lock. So there is no moment in which a later comer could take what an earlier one was promised, and a waiter that has
gone away when the news reaches it finds the grant on its ticket and can hand it on.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from itertools import count
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
        """Stand before all others of the same want: what it was granted was taken back before it could be used."""
        ticket.grant = None
        self.join(ticket)
        self._queues[ticket.want].move_to_end(ticket.number, last=False)

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
        return serve([(self, take)])

    def heads(self) -> Iterator[TicketT]:
        """The first of each want."""
        return (next(iter(queue.values())) for queue in self._queues.values())

    def first(self) -> TicketT | None:
        """Whoever has waited longest."""
        return min(self.heads(), key=_number, default=None)

    def __iter__(self) -> Iterator[TicketT]:
        return iter(sorted((ticket for queue in self._queues.values() for ticket in queue.values()), key=_number))

    def __bool__(self) -> bool:
        return bool(self._queues)

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))


def serve(lines: Sequence[tuple[Line[TicketT], Callable[[Any], Any]]]) -> list[TicketT]:
    """Grant what each line's `take(want)` finds, oldest waiter of all first, until nobody can use anything.

    Returns who was served. Lines that share something are served together, so that their waiters are one line for it.
    """
    served: list[TicketT] = []
    stuck: set[tuple[int, Hashable]] = set()
    while True:
        heads = [(t, n) for n, (line, _) in enumerate(lines) for t in line.heads() if (n, t.want) not in stuck]
        if not heads:
            return served
        first, nth = min(heads, key=lambda head: head[0].number)
        line, take = lines[nth]
        grant = take(first.want)
        if grant is None:
            stuck.add((nth, first.want))
            continue
        line.leave(first)
        first.grant = grant
        served.append(first)


def _number(ticket: Ticket[Any, Any]) -> int:
    return ticket.number
