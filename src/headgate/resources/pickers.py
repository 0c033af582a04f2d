"""The pickers: each keeps the members of one pool in the order in which a strategy chooses them. Pure.

Asked to `pick`, a picker names the best member that is open and not in `skip`. It is told by `offer` whenever a member
may have moved forward in the order: it is new, it opened, or a use of it ended. It is not told when a member is taken,
which can only move it back.

So the shipped pickers are lazy heaps: one current entry per member, never *behind* the member's true place in the
order. An entry that turns out to be too early when it reaches the top is put back at its true place; a member that
moved forward gets a new entry, and the old one is dropped when it reaches the top. The heap is rebuilt when dropped
entries outnumber the others.

A picker that needs more than the members says so by its methods: `pick_for` instead of `pick` is given time, chance and
the call's affinity, `learn` is told how long each use took. Pickers that have neither cost nothing more for it.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Container, Iterable
from typing import TYPE_CHECKING, NamedTuple, Protocol, cast, runtime_checkable

from headgate.core.checks import Affinity

if TYPE_CHECKING:
    from headgate.resources.members import Member
    from headgate.resources.strategies import Strategy

Entry = tuple[float, float, int, "Member"]

MAX_CLASSES = 64  # sets of tags that have a picker; the one longest known goes first


class Picker(Protocol):
    """Keeps one pool's members in order. Pure and synchronous; called with the pool's lock held."""

    def offer(self, member: Member, /) -> None:
        """Note that `member` is new, or may have moved forward."""

    def withdraw(self, member: Member, /) -> None:
        """Forget `member`, which left the pool."""

    def pick(self, skip: Container[str]) -> Member | None:
        """Name the best open member whose resource id is not in `skip`; the pool takes it at once."""
        ...


class Occasion(NamedTuple):
    """What a picker may use for its choice besides the members. More fields may come."""

    now: float
    """The time of the choice, as a reading of the monotonic clock."""
    chance: Callable[[], float]
    """Draws a random number from 0 to 1."""
    affinity: Affinity | None = None
    """What the call passed as `affinity=`, if anything."""


class GuidedPicker(Protocol):
    """A picker that needs time, chance or the affinity. The rest of the contract is that of `Picker`."""

    def offer(self, member: Member, /) -> None:
        """Note that `member` is new, or may have moved forward."""

    def withdraw(self, member: Member, /) -> None:
        """Forget `member`, which left the pool."""

    def pick_for(self, skip: Container[str], occasion: Occasion) -> Member | None:
        """Name the best open member whose resource id is not in `skip`; the pool takes it at once."""
        ...


@runtime_checkable
class Learner(Protocol):
    """A picker of either kind that is told how long uses took.

    A pool has further pickers for calls with `tags=`, and tells only its first: keep what is learned in `member.notes`,
    where all of them see it.
    """

    def learn(self, member: Member, seconds: float, now: float, well: bool, /) -> None:
        """Note that a use of `member` took `seconds`. Not `well`: a signal or a cancellation ended it early."""


class LazyHeap:
    """A heap of entries (first key, second key, member index, member); `_current` has the valid one of each member."""

    def __init__(self) -> None:
        self._heap: list[Entry] = []
        self._current: dict[int, Entry] = {}

    def entry_of(self, member: Member) -> Entry:
        """The entry at the member's true place in the order."""
        raise NotImplementedError

    def offer(self, member: Member) -> None:
        current = self._current.get(member.index)
        if current is None or self.entry_of(member) < current:
            self._push(member)

    def withdraw(self, member: Member) -> None:
        self._current.pop(member.index, None)
        self._heap = [entry for entry in self._heap if entry[3] is not member]  # lest its value stays in memory
        heapq.heapify(self._heap)

    def pick(self, skip: Container[str]) -> Member | None:
        heap, current = self._heap, self._current
        aside: list[Entry] = []
        chosen = None
        while heap:
            entry = heap[0]
            member = entry[3]
            if current.get(member.index) is not entry:
                heapq.heappop(heap)
            elif not member.is_open:
                heapq.heappop(heap)
                del current[member.index]
            elif skip and member.resource.resource_id in skip:
                aside.append(heapq.heappop(heap))
            elif entry[:2] != (true := self.entry_of(member))[:2]:
                current[member.index] = true
                heapq.heapreplace(heap, true)
            else:
                chosen = member
                break
        for entry in aside:
            heapq.heappush(heap, entry)
        return chosen

    def _push(self, member: Member) -> None:
        entry = self._current[member.index] = self.entry_of(member)
        heapq.heappush(self._heap, entry)
        if len(self._heap) > 4 * len(self._current) + 64:
            self._heap = list(self._current.values())
            heapq.heapify(self._heap)


class RoundRobin(LazyHeap):
    """Fewest uses first, then longest unused, then pool order.

    Members without a use usually come free in the order they were taken: they need a queue, not a heap. `_idle` holds
    entries without uses in ascending order; one that does not fit at its end goes into the heap with the rest. Taking
    turns is then a pop on one side and a push on the other, at any number of resources.
    """

    def __init__(self) -> None:
        super().__init__()
        self._idle: deque[Entry] = deque()

    def entry_of(self, member: Member) -> Entry:
        return len(member.uses), member.resource.last_acquired_at, member.index, member

    def withdraw(self, member: Member) -> None:
        super().withdraw(member)
        self._idle = deque(entry for entry in self._idle if entry[3] is not member)

    def offer(self, member: Member) -> None:
        # The second key only grows, so a member has moved forward only if fewer of its uses are in flight.
        current = self._current.get(member.index)
        if current is None or current[0] > len(member.uses):
            self._push(member)

    def pick(self, skip: Container[str]) -> Member | None:
        # The path of every call, inlined (benchmarks/resources.py): usually the head of the queue is at its true place.
        heap, idle, current = self._heap, self._idle, self._current
        if len(current) == 1 and not skip:  # a single member: its place in the order does not matter
            member = next(iter(current.values()))[3]
            limit = member.resource.limit
            if not member.unavailable and (limit is None or len(member.uses) < limit):
                return member
        aside: list[Entry] = []
        chosen = None
        while idle or heap:
            from_idle = idle and not (heap and heap[0] < idle[0])
            entry = idle[0] if from_idle else heap[0]
            load, last, index, member = entry
            resource = member.resource
            uses = len(member.uses)
            true = None
            if current.get(index) is entry:
                if load != uses or last != resource.last_acquired_at:
                    true = current[index] = (uses, resource.last_acquired_at, index, member)
                elif member.unavailable or ((limit := resource.limit) is not None and uses >= limit):
                    del current[index]
                elif skip and resource.resource_id in skip:
                    aside.append(entry)
                else:
                    chosen = member
                    break
            if from_idle:
                idle.popleft()
            else:
                heapq.heappop(heap)
            if true is not None:
                if not uses and (not idle or idle[-1] < true):
                    idle.append(true)
                else:
                    heapq.heappush(heap, true)
        for entry in aside:
            heapq.heappush(heap, entry)
        return chosen

    def _push(self, member: Member) -> None:
        heap, idle = self._heap, self._idle
        self._current[member.index] = entry = self.entry_of(member)
        if not entry[0] and (not idle or idle[-1] < entry):
            idle.append(entry)
        else:
            heapq.heappush(heap, entry)
        if len(heap) + len(idle) > 4 * len(self._current) + 64:
            living = sorted(self._current.values())
            self._idle = deque(entry for entry in living if not entry[0])
            self._heap = [entry for entry in living if entry[0]]


class PrimaryBackup(LazyHeap):
    """Members in pool order, whatever their uses."""

    def entry_of(self, member: Member) -> Entry:
        return 0.0, 0.0, member.index, member


class Weighted(LazyHeap):
    """Stride scheduling: each pick moves a member back by 1/weight. One that was away returns level with the others."""

    def __init__(self) -> None:
        super().__init__()
        self._passes: dict[int, float] = {}
        self._reached = 0.0

    def entry_of(self, member: Member) -> Entry:
        return self._passes.get(member.index, self._reached), 0.0, member.index, member

    def offer(self, member: Member) -> None:
        if member.index not in self._current:
            self._passes[member.index] = max(self._passes.get(member.index, 0.0), self._reached)
            self._push(member)

    def withdraw(self, member: Member) -> None:
        super().withdraw(member)
        self._passes.pop(member.index, None)

    def pick(self, skip: Container[str]) -> Member | None:
        member = super().pick(skip)
        if member is not None:
            place = self._passes[member.index]
            self._reached = max(self._reached, place)
            self._passes[member.index] = place + 1 / member.resource.weight
        return member


class _Latency:
    """The notes of `LeastLatency` on a member: the average seconds of a use, and when it was computed."""

    __slots__ = ("at", "seconds")

    def __init__(self, seconds: float, at: float) -> None:
        self.seconds = seconds
        self.at = at


class LeastLatency:
    """Draw two members by chance and take the cheaper one.

    To take the cheapest of all would send everybody to the same member until it has slowed down, and would need an
    order that changes with time. The members that may be open are in a list, in no order: to draw is to index, to
    remove is to swap with the last. Members found unavailable are removed, and come back when they are offered.
    """

    def __init__(self, decay: float) -> None:
        self._decay = decay
        self._members: list[Member] = []
        self._places: dict[Member, int] = {}

    def offer(self, member: Member) -> None:
        if member not in self._places:
            self._places[member] = len(self._members)
            self._members.append(member)

    def withdraw(self, member: Member) -> None:
        if member in self._places:
            self._leave(member)

    def learn(self, member: Member, seconds: float, now: float, well: bool) -> None:
        known = member.notes
        if known is None or seconds >= known.seconds:
            member.notes = _Latency(seconds, now)
        else:
            if well:
                weight = math.exp((known.at - now) / self._decay)
                known.seconds = seconds + (known.seconds - seconds) * weight
            known.at = now  # a member that fails quickly must not count as fast

    def pick_for(self, skip: Container[str], occasion: Occasion) -> Member | None:
        members, chance = self._members, occasion.chance
        first = None
        left = len(members)  # to draw from; those that were drawn and remain are behind
        while left:
            at = min(int(chance() * left), left - 1)
            member = members[at]
            left -= 1
            self._swap(at, left)
            if not member.is_open:
                self._leave(member)
            elif skip and member.resource.resource_id in skip:
                continue
            elif first is None:
                first = member
            else:
                return min(first, member, key=lambda one: self._cost(one, occasion.now))
        return first

    def _cost(self, member: Member, now: float) -> tuple[float, int]:
        """Sort key: the expected seconds, then the uses in flight."""
        known, load = member.notes, member.in_flight
        if known is None:  # try it, and wait for what that says before sending more
            return (math.inf if load else 0.0), load
        return known.seconds * math.exp((known.at - now) / self._decay) * (load + 1), load

    def _leave(self, member: Member) -> None:
        last = len(self._members) - 1
        self._swap(self._places[member], last)
        self._members.pop()
        del self._places[member]

    def _swap(self, one: int, other: int) -> None:
        members, places = self._members, self._places
        members[one], members[other] = members[other], members[one]
        places[members[one]], places[members[other]] = one, other


class Sticky(RoundRobin):
    """Hash order for calls with an affinity, round robin for calls without one.

    Usually one of the favourites that are remembered for an affinity is open. If none is, either few members are open
    at all, and their distances are computed (`_current` has them, and some that became unavailable since); or the
    affinity keeps many members busy by itself, and more of its favourites are worth remembering.
    """

    def __init__(self) -> None:
        # Here, because hashing is slow to import and no other strategy needs it.
        from headgate.resources.affinity import Rendezvous, stable_text

        super().__init__()
        self._members: dict[str, Member] = {}
        self._rendezvous = Rendezvous()
        self._text_of = stable_text

    def offer(self, member: Member) -> None:
        super().offer(member)
        name = member.resource.resource_id
        if name not in self._members:
            self._members[name] = member
            self._rendezvous.admit(name, member.resource.weight)

    def withdraw(self, member: Member) -> None:
        super().withdraw(member)
        if self._members.pop(member.resource.resource_id, None) is not None:
            self._rendezvous.dismiss(member.resource.resource_id)

    def pick_for(self, skip: Container[str], occasion: Occasion) -> Member | None:
        if occasion.affinity is None:
            return self.pick(skip)
        text = self._text_of(occasion.affinity)
        favourites, are_all = self._rendezvous.favourites(text)
        while True:
            for _, name in favourites:
                member = self._members[name]
                if member.is_open and not (skip and name in skip):
                    return member
            if are_all:
                return None
            usable = self._usable(skip, at_most=16 * len(favourites))
            if usable is not None:
                nearest = self._rendezvous.nearest(text, usable)
                return None if nearest is None else self._members[nearest]
            favourites, are_all = self._rendezvous.more_favourites(text)

    def _usable(self, skip: Container[str], at_most: int) -> list[str] | None:
        """The ids of all open members; None when there are more than `at_most`."""
        current = self._current
        unusable, usable, seen = [], [], 0
        for index, entry in current.items():
            if not entry[3].is_open:
                unusable.append(index)
                continue
            seen += 1
            if seen > at_most:
                break
            usable.append(entry[3].resource.resource_id)
        for index in unusable:
            del current[index]  # its entry in the heap is dropped later, and the member is offered when it opens
        return None if seen > at_most else [name for name in usable if name not in skip]


class PickersByTags:
    """The pickers of one pool: one for all members, and one for each set of tags that calls asked for."""

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy
        self.main: Picker = self._new()
        """The picker that orders all members."""
        self._pickers: dict[frozenset[str], Picker] = {frozenset(): self.main}
        self._sizes: dict[frozenset[str], int] = {frozenset(): 0}  # how many members each picker has

    def get(self, tags: frozenset[str]) -> Picker | None:
        """The picker of the members that carry these tags, if there is one."""
        return self._pickers.get(tags)

    def size(self, tags: frozenset[str]) -> int:
        """How many members the picker of these tags has."""
        return self._sizes[tags]

    def add(self, tags: frozenset[str], members: Iterable[Member]) -> Picker:
        """Make a picker for these tags; at `MAX_CLASSES`, the one longest known is forgotten."""
        oldest = None
        if len(self._pickers) > MAX_CLASSES:
            longest_known = next(tags for tags in self._pickers if tags)
            del self._sizes[longest_known]
            oldest = self._pickers.pop(longest_known)
        picker = self._pickers[tags] = self._new()
        self._sizes[tags] = 0
        for member in members:
            if oldest is not None:
                member.pickers = tuple(one for one in member.pickers if one is not oldest)
            if tags <= member.resource.tags:
                member.pickers += (picker,)
                self._sizes[tags] += 1
                picker.offer(member)
        return picker

    def enter(self, member: Member) -> None:
        """Offer a member to every picker whose tags it carries."""
        found = [(tags, picker) for tags, picker in self._pickers.items() if tags <= member.resource.tags]
        member.pickers = tuple(picker for _, picker in found)
        for tags, picker in found:
            self._sizes[tags] += 1
            picker.offer(member)

    def withdraw(self, member: Member) -> None:
        """Take a member out of all its pickers."""
        for tags, picker in self._pickers.items():
            if picker in member.pickers:
                self._sizes[tags] -= 1
                picker.withdraw(member)
        member.pickers = ()

    def _new(self) -> Picker:
        return cast(Picker, self._strategy.picker())  # of a guided one `pick` is never called
