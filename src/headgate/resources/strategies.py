"""Which eligible resource is next? Strategies are frozen values; the picker each one makes keeps the order for one
pool.

A picker holds *seats*, the places of resources in a pool. Asked to `pick`, it names the best seat that is open and
not in `skip`. It is told by `offer` whenever a seat may have moved forward: it is new, it opened, or a use of it
ended. It is not told when a seat is taken, which can only move it back.

So the shipped pickers are lazy heaps: one current entry per seat, never *behind* the seat's true place in the order.
An entry that turns out to be too optimistic when it reaches the top is put back at its true place; a seat that moved
forward gets a new entry, and the old one is dropped when it surfaces. The heap is rebuilt when dropped entries
outnumber the living.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Container
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from headgate.errors import InvalidArgument

if TYPE_CHECKING:
    from headgate.resources.seats import Seat

Entry = tuple[float, float, int, "Seat"]


class Picker(Protocol):
    """The order of one pool's seats. Pure and synchronous; called with the pool's lock held."""

    def offer(self, seat: Seat) -> None:
        """`seat` is new, or may have moved forward."""

    def withdraw(self, seat: Seat) -> None:
        """`seat` left the pool."""

    def pick(self, skip: Container[str]) -> Seat | None:
        """The best open seat whose resource id is not in `skip`; the pool takes it at once."""
        ...


@runtime_checkable
class Strategy(Protocol):
    """A way to choose among resources: a value that makes pickers."""

    def picker(self) -> Picker:
        """A new picker without seats."""
        ...


@dataclass(frozen=True, slots=True)
class round_robin:  # noqa: N801 - a value that reads like the verb it is
    """Fewest in flight, then longest unused, then first in the pool."""

    def picker(self) -> Picker:
        """A new picker without seats."""
        return _RoundRobin()


@dataclass(frozen=True, slots=True)
class primary_backup:  # noqa: N801
    """First in the pool; a later one only while all before it cool, are disabled or are at their limit."""

    def picker(self) -> Picker:
        """A new picker without seats."""
        return _PrimaryBackup()


@dataclass(frozen=True, slots=True)
class weighted:  # noqa: N801
    """In proportion to `Resource.weight`, evenly spread: weight 3 gets three calls for each one of weight 1."""

    def picker(self) -> Picker:
        """A new picker without seats."""
        return _Weighted()


NAMED: dict[str, Strategy] = {"round_robin": round_robin(), "primary_backup": primary_backup(), "weighted": weighted()}


def strategy_of(choice: object) -> Strategy:
    """The strategy of this name, or the strategy itself; InvalidArgument for anything else."""
    if isinstance(choice, str) and choice in NAMED:
        return NAMED[choice]
    if isinstance(choice, Strategy) and not isinstance(choice, type):
        return choice
    called = " (call it: a strategy is a value)" if isinstance(choice, type) else ""
    raise InvalidArgument(
        f"strategy must be one of {', '.join(map(repr, NAMED))} or a Strategy object, got {choice!r}{called}",
        remedy="Pass one of these names, or an object with a picker() method.",
    )


class _LazyHeap:
    """A heap of entries (first key, second key, seat number, seat), of which `_current` knows the one that counts."""

    def __init__(self) -> None:
        self._heap: list[Entry] = []
        self._current: dict[int, Entry] = {}

    def standing(self, seat: Seat) -> Entry:
        """The seat's true place in the order."""
        raise NotImplementedError

    def offer(self, seat: Seat) -> None:
        current = self._current.get(seat.index)
        if current is None or self.standing(seat) < current:
            self._push(seat)

    def withdraw(self, seat: Seat) -> None:
        self._current.pop(seat.index, None)
        self._heap = [entry for entry in self._heap if entry[3] is not seat]  # lest its value stays in memory
        heapq.heapify(self._heap)

    def pick(self, skip: Container[str]) -> Seat | None:
        heap, current = self._heap, self._current
        aside: list[Entry] = []
        chosen = None
        while heap:
            entry = heap[0]
            seat = entry[3]
            if current.get(seat.index) is not entry:
                heapq.heappop(heap)
            elif not seat.is_open:
                heapq.heappop(heap)
                del current[seat.index]
            elif skip and seat.resource.resource_id in skip:
                aside.append(heapq.heappop(heap))
            elif entry[:2] != (true := self.standing(seat))[:2]:
                current[seat.index] = true
                heapq.heapreplace(heap, true)
            else:
                chosen = seat
                break
        for entry in aside:
            heapq.heappush(heap, entry)
        return chosen

    def _push(self, seat: Seat) -> None:
        entry = self._current[seat.index] = self.standing(seat)
        heapq.heappush(self._heap, entry)
        if len(self._heap) > 4 * len(self._current) + 64:
            self._heap = list(self._current.values())
            heapq.heapify(self._heap)


class _RoundRobin(_LazyHeap):
    """Seats without a use in flight usually come free in the order they were taken: they need a queue, not a heap.

    `_idle` holds entries with nothing in flight in ascending order; one that does not fit at its end goes into the heap
    with the rest. Taking turns is then a pop on one side and a push on the other, at any number of resources.
    """

    def __init__(self) -> None:
        super().__init__()
        self._idle: deque[Entry] = deque()

    def standing(self, seat: Seat) -> Entry:
        resource = seat.resource
        return len(resource._flights), resource.last_acquired_at, seat.index, seat

    def withdraw(self, seat: Seat) -> None:
        super().withdraw(seat)
        self._idle = deque(entry for entry in self._idle if entry[3] is not seat)

    def offer(self, seat: Seat) -> None:
        # The second key only grows, so a seat has moved forward only if fewer of its uses are in flight.
        current = self._current.get(seat.index)
        if current is None or current[0] > len(seat.resource._flights):
            self._push(seat)

    def pick(self, skip: Container[str]) -> Seat | None:
        # The path of every call, in line: usually the head of the queue is true, or goes to its end.
        heap, idle, current = self._heap, self._idle, self._current
        aside: list[Entry] = []
        chosen = None
        while idle or heap:
            from_idle = idle and not (heap and heap[0] < idle[0])
            entry = idle[0] if from_idle else heap[0]
            load, last, index, seat = entry
            resource = seat.resource
            flights = len(resource._flights)
            true = None
            if current.get(index) is entry:
                if load != flights or last != resource.last_acquired_at:
                    true = current[index] = (flights, resource.last_acquired_at, index, seat)
                elif seat.shut or ((limit := resource.max_in_flight) is not None and flights >= limit):
                    del current[index]
                elif skip and resource.resource_id in skip:
                    aside.append(entry)
                else:
                    chosen = seat
                    break
            if from_idle:
                idle.popleft()
            else:
                heapq.heappop(heap)
            if true is not None:
                if not flights and (not idle or idle[-1] < true):
                    idle.append(true)
                else:
                    heapq.heappush(heap, true)
        for entry in aside:
            heapq.heappush(heap, entry)
        return chosen

    def _push(self, seat: Seat) -> None:
        heap, idle = self._heap, self._idle
        self._current[seat.index] = entry = self.standing(seat)
        if not entry[0] and (not idle or idle[-1] < entry):
            idle.append(entry)
        else:
            heapq.heappush(heap, entry)
        if len(heap) + len(idle) > 4 * len(self._current) + 64:
            living = sorted(self._current.values())
            self._idle = deque(entry for entry in living if not entry[0])
            self._heap = [entry for entry in living if entry[0]]


class _PrimaryBackup(_LazyHeap):
    def standing(self, seat: Seat) -> Entry:
        return 0.0, 0.0, seat.index, seat


class _Weighted(_LazyHeap):
    """Stride scheduling: each pick moves a seat back by 1/weight. One that was away returns level with the others."""

    def __init__(self) -> None:
        super().__init__()
        self._passes: dict[int, float] = {}
        self._reached = 0.0

    def standing(self, seat: Seat) -> Entry:
        return self._passes.get(seat.index, self._reached), 0.0, seat.index, seat

    def offer(self, seat: Seat) -> None:
        if seat.index not in self._current:
            self._passes[seat.index] = max(self._passes.get(seat.index, 0.0), self._reached)
            self._push(seat)

    def withdraw(self, seat: Seat) -> None:
        super().withdraw(seat)
        self._passes.pop(seat.index, None)

    def pick(self, skip: Container[str]) -> Seat | None:
        seat = super().pick(skip)
        if seat is not None:
            place = self._passes[seat.index]
            self._reached = max(self._reached, place)
            self._passes[seat.index] = place + 1 / seat.resource.weight
        return seat
