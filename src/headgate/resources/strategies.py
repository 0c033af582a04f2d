"""Which eligible resource is next? Strategies are frozen values; the picker each one makes keeps the order for one
pool.

A picker holds *seats*, the places of resources in a pool. Asked to `pick`, it names the best seat that is open and
not in `skip`. It is told by `offer` whenever a seat may have moved forward: it is new, it opened, or a use of it
ended. It is not told when a seat is taken, which can only move it back.

So the shipped pickers are lazy heaps: one current entry per seat, never *behind* the seat's true place in the order.
An entry that turns out to be too optimistic when it reaches the top is put back at its true place; a seat that moved
forward gets a new entry, and the old one is dropped when it surfaces. The heap is rebuilt when dropped entries
outnumber the living.

A picker that goes by more than the seats says so by its methods, and is asked and told accordingly: `pick_for` instead
of `pick` is given time, chance and the call's affinity, `learn` is told how long each use took. Those that have neither
cost nothing more for it.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

from headgate.core.checks import Affinity, is_finite
from headgate.errors import InvalidArgument

if TYPE_CHECKING:
    from headgate.resources.members import Member

Entry = tuple[float, float, int, "Member"]


class Picker(Protocol):
    """The order of one pool's seats. Pure and synchronous; called with the pool's lock held."""

    def offer(self, seat: Member) -> None:
        """`seat` is new, or may have moved forward."""

    def withdraw(self, seat: Member) -> None:
        """`seat` left the pool."""

    def pick(self, skip: Container[str]) -> Member | None:
        """The best open seat whose resource id is not in `skip`; the pool takes it at once."""
        ...


class Occasion(NamedTuple):
    """What a pick may go by besides the seats. More fields may come."""

    now: float
    """A monotonic reading."""
    chance: Callable[[], float]
    """Draws a number from 0 to 1."""
    affinity: Affinity | None = None
    """What the call is to be kept together by."""


class GuidedPicker(Protocol):
    """A picker that goes by more than the seats. The rest of the contract is that of `Picker`."""

    def offer(self, seat: Member) -> None:
        """`seat` is new, or may have moved forward."""

    def withdraw(self, seat: Member) -> None:
        """`seat` left the pool."""

    def pick_for(self, skip: Container[str], occasion: Occasion) -> Member | None:
        """The best open seat whose resource id is not in `skip`; the pool takes it at once."""
        ...


@runtime_checkable
class Learner(Protocol):
    """What a picker of either kind may be as well.

    A pool has further pickers for calls with `tags=`, and tells only its first: keep what is learned in `seat.notes`,
    where all of them see it.
    """

    def learn(self, seat: Member, seconds: float, now: float, well: bool) -> None:
        """A use of `seat` ended after so long. Not `well`: by a signal or cancelled, so it might have taken longer."""


@runtime_checkable
class Strategy(Protocol):
    """A way to choose among resources: a value that makes pickers."""

    def picker(self) -> Picker | GuidedPicker:
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


@dataclass(frozen=True, slots=True)
class least_latency:  # noqa: N801
    """Of two drawn by chance the one that is likely to answer first: its latency times its uses in flight and this one.

    Its latency is a moving average over `decay` seconds that takes a rise at once. An idle one's fades, so that whoever
    was slow is tried again.
    """

    decay: float = 10.0

    def __post_init__(self) -> None:
        if not is_finite(self.decay) or self.decay <= 0:
            raise InvalidArgument(
                f"decay must be a finite number of seconds > 0, got {self.decay!r}",
                remedy="Pass about as long as a slow spell of a resource lasts, or leave it out.",
            )

    def picker(self) -> GuidedPicker:
        """A new picker without seats."""
        return _LeastLatency(self.decay)


@dataclass(frozen=True, slots=True)
class sticky:  # noqa: N801
    """Calls with the same `affinity=` go to the same resource; while it is not eligible, to the next by hash order.

    The order is the same in every process. Shares are in proportion to `Resource.weight`. Calls without an affinity go
    as in `round_robin`.
    """

    def picker(self) -> GuidedPicker:
        """A new picker without seats."""
        return _Sticky()


NAMED: dict[str, Strategy] = {
    "round_robin": round_robin(),
    "primary_backup": primary_backup(),
    "weighted": weighted(),
    "least_latency": least_latency(),
    "sticky": sticky(),
}


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

    def standing(self, seat: Member) -> Entry:
        """The seat's true place in the order."""
        raise NotImplementedError

    def offer(self, seat: Member) -> None:
        current = self._current.get(seat.index)
        if current is None or self.standing(seat) < current:
            self._push(seat)

    def withdraw(self, seat: Member) -> None:
        self._current.pop(seat.index, None)
        self._heap = [entry for entry in self._heap if entry[3] is not seat]  # lest its value stays in memory
        heapq.heapify(self._heap)

    def pick(self, skip: Container[str]) -> Member | None:
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

    def _push(self, seat: Member) -> None:
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

    def standing(self, seat: Member) -> Entry:
        resource = seat.resource
        return len(resource._flights), resource.last_acquired_at, seat.index, seat

    def withdraw(self, seat: Member) -> None:
        super().withdraw(seat)
        self._idle = deque(entry for entry in self._idle if entry[3] is not seat)

    def offer(self, seat: Member) -> None:
        # The second key only grows, so a seat has moved forward only if fewer of its uses are in flight.
        current = self._current.get(seat.index)
        if current is None or current[0] > len(seat.resource._flights):
            self._push(seat)

    def pick(self, skip: Container[str]) -> Member | None:
        # The path of every call, in line: usually the head of the queue is true, or goes to its end.
        heap, idle, current = self._heap, self._idle, self._current
        if len(current) == 1 and not skip:  # nobody to take turns with: its entry may stay, too early as it is
            seat = next(iter(current.values()))[3]
            limit = seat.resource.max_in_flight
            if not seat.shut and (limit is None or len(seat.resource._flights) < limit):
                return seat
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

    def _push(self, seat: Member) -> None:
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
    def standing(self, seat: Member) -> Entry:
        return 0.0, 0.0, seat.index, seat


class _Weighted(_LazyHeap):
    """Stride scheduling: each pick moves a seat back by 1/weight. One that was away returns level with the others."""

    def __init__(self) -> None:
        super().__init__()
        self._passes: dict[int, float] = {}
        self._reached = 0.0

    def standing(self, seat: Member) -> Entry:
        return self._passes.get(seat.index, self._reached), 0.0, seat.index, seat

    def offer(self, seat: Member) -> None:
        if seat.index not in self._current:
            self._passes[seat.index] = max(self._passes.get(seat.index, 0.0), self._reached)
            self._push(seat)

    def withdraw(self, seat: Member) -> None:
        super().withdraw(seat)
        self._passes.pop(seat.index, None)

    def pick(self, skip: Container[str]) -> Member | None:
        seat = super().pick(skip)
        if seat is not None:
            place = self._passes[seat.index]
            self._reached = max(self._reached, place)
            self._passes[seat.index] = place + 1 / seat.resource.weight
        return seat


class _Latency:
    """What `_LeastLatency` notes on a seat: how long a use took, as it was known at some time."""

    __slots__ = ("at", "seconds")

    def __init__(self, seconds: float, at: float) -> None:
        self.seconds = seconds
        self.at = at


class _LeastLatency:
    """Two choices by chance, of which the cheaper is taken.

    To take the cheapest of all would send everybody to the same seat until it has slowed down, and would need an order
    that changes with time. The seats that may be open stand in a list, in no order: drawing is an index, leaving is
    a swap with the last. Those found shut leave it and return when they are offered.
    """

    def __init__(self, decay: float) -> None:
        self._decay = decay
        self._seats: list[Member] = []
        self._places: dict[Member, int] = {}

    def offer(self, seat: Member) -> None:
        if seat not in self._places:
            self._places[seat] = len(self._seats)
            self._seats.append(seat)

    def withdraw(self, seat: Member) -> None:
        if seat in self._places:
            self._leave(seat)

    def learn(self, seat: Member, seconds: float, now: float, well: bool) -> None:
        known = seat.notes
        if known is None or seconds >= known.seconds:
            seat.notes = _Latency(seconds, now)
        else:
            if well:
                weight = math.exp((known.at - now) / self._decay)
                known.seconds = seconds + (known.seconds - seconds) * weight
            known.at = now  # a seat that fails quickly is as slow as it was: it must not fade into the best

    def pick_for(self, skip: Container[str], occasion: Occasion) -> Member | None:
        seats, chance = self._seats, occasion.chance
        first = None
        left = len(seats)  # to draw from; those that were drawn and remain stand behind
        while left:
            at = min(int(chance() * left), left - 1)
            seat = seats[at]
            left -= 1
            self._swap(at, left)
            if not seat.is_open:
                self._leave(seat)
            elif skip and seat.resource.resource_id in skip:
                continue
            elif first is None:
                first = seat
            else:
                return min(first, seat, key=lambda one: self._cost(one, occasion.now))
        return first

    def _cost(self, seat: Member, now: float) -> tuple[float, int]:
        """The least first; of equals whoever has less in flight."""
        known, load = seat.notes, seat.in_flight
        if known is None:  # try it, and wait for what that says before sending more
            return (math.inf if load else 0.0), load
        return known.seconds * math.exp((known.at - now) / self._decay) * (load + 1), load

    def _leave(self, seat: Member) -> None:
        last = len(self._seats) - 1
        self._swap(self._places[seat], last)
        self._seats.pop()
        del self._places[seat]

    def _swap(self, one: int, other: int) -> None:
        seats, places = self._seats, self._places
        seats[one], seats[other] = seats[other], seats[one]
        places[seats[one]], places[seats[other]] = one, other


class _Sticky(_RoundRobin):
    """Round robin, and beside it the hash order for calls with an affinity.

    Usually one of the favourites that are remembered for an affinity is open. If none is, either few seats are open at
    all, and these are measured (`_current` has them, and some that shut since); or the affinity keeps many seats busy
    by itself, and more of its favourites are worth remembering.
    """

    def __init__(self) -> None:
        # Here, because hashing is slow to import and no other strategy needs it.
        from headgate.resources.affinity import Rendezvous, stable_text

        super().__init__()
        self._seats: dict[str, Member] = {}
        self._rendezvous = Rendezvous()
        self._text_of = stable_text

    def offer(self, seat: Member) -> None:
        super().offer(seat)
        name = seat.resource.resource_id
        if name not in self._seats:
            self._seats[name] = seat
            self._rendezvous.admit(name, seat.resource.weight)

    def withdraw(self, seat: Member) -> None:
        super().withdraw(seat)
        if self._seats.pop(seat.resource.resource_id, None) is not None:
            self._rendezvous.dismiss(seat.resource.resource_id)

    def pick_for(self, skip: Container[str], occasion: Occasion) -> Member | None:
        if occasion.affinity is None:
            return self.pick(skip)
        text = self._text_of(occasion.affinity)
        favourites, are_all = self._rendezvous.favourites(text)
        while True:
            for _, name in favourites:
                seat = self._seats[name]
                if seat.is_open and not (skip and name in skip):
                    return seat
            if are_all:
                return None
            usable = self._usable(skip, at_most=16 * len(favourites))
            if usable is not None:
                nearest = self._rendezvous.nearest(text, usable)
                return None if nearest is None else self._seats[nearest]
            favourites, are_all = self._rendezvous.more_favourites(text)

    def _usable(self, skip: Container[str], at_most: int) -> list[str] | None:
        """The ids of all that are open; None when there are more of them."""
        current = self._current
        shut, usable, seen = [], [], 0
        for index, entry in current.items():
            if not entry[3].is_open:
                shut.append(index)
                continue
            seen += 1
            if seen > at_most:
                break
            usable.append(entry[3].resource.resource_id)
        for index in shut:
            del current[index]  # its entry is dropped when it surfaces, and it is offered when it opens
        return None if seen > at_most else [name for name in usable if name not in skip]
