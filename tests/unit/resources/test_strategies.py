"""Each strategy beside a naive `min()` over all seats; strategies of one's own; what is no strategy (R21, R22, R24)."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Container, Sequence
from typing import Any

import pytest

from headgate import InvalidArgument, Resource
from headgate.resources import Member, Picker, Strategy, least_latency, primary_backup, round_robin, sticky, weighted
from headgate.resources.members import Requirement, Use
from headgate.resources.rotation import Rotation
from headgate.resources.stats import check
from headgate.resources.strategies import NAMED, strategy_of
from tests.conftest import seeds

Order = Callable[[list[Member]], Member]

TAGS = [frozenset[str](), frozenset("a"), frozenset("b"), frozenset("ab")]


def fewest_then_oldest(seats: list[Member]) -> Member:
    return min(seats, key=lambda seat: (seat.in_flight, seat.resource.last_acquired_at))


def first(seats: list[Member]) -> Member:
    return seats[0]


def rotation_of(resources: Sequence[Resource[None]], strategy: object) -> Rotation:
    return Rotation(resources, strategy=strategy_of(strategy), cooldown_table=(30.0,))


def some_resources(chance: random.Random) -> list[Resource[None]]:
    return [
        Resource(
            f"k{number}",
            None,
            chance.choice([None, 1, 2, 5]),
            tags=chance.choice(TAGS),
            weight=chance.choice([0.5, 1.0, 3.0]),
        )
        for number in range(chance.choice([1, 3, 8, 30]))
    ]


class Drive:
    """Random uses of a rotation; `pick` is compared by the caller."""

    def __init__(self, seed: int, strategy: object) -> None:
        self.chance = random.Random(seed)
        self.rotation = rotation_of(some_resources(self.chance), strategy)
        self.ids = list(self.rotation.members)
        self.flights: list[Use] = []
        self.now = 0.0

    def wanted(self, tags: frozenset[str], skip: Container[str]) -> list[Member]:
        """The seats that may be chosen, in the order of the pool."""
        fitting = (seat for seat in self.rotation.members.values() if tags <= seat.resource.tags)
        return [seat for seat in fitting if seat.is_open and seat.resource.resource_id not in skip]

    def acquire(self, tags: frozenset[str], skip: frozenset[str]) -> Member | None:
        flight = self.rotation.acquire(self.now, Requirement(tags, skip))
        if flight is None:
            return None
        self.flights.append(flight)
        return flight.member

    def disturb(self) -> None:
        """End a use; or close a seat, open one, or put all into another order; or let time pass, which may be none."""
        chance, rotation = self.chance, self.rotation
        self.now += chance.choice([0.0, 0.0, 1.0])
        match chance.randrange(24):
            case 0:
                rotation.disable(chance.choice(self.ids))
            case 1 | 2:
                rotation.enable(chance.choice(self.ids))
            case 3:
                rotation.reorder(chance.sample(list(rotation.members), len(self.ids)))
            case 4:
                rotation.retag(rotation.members[chance.choice(self.ids)].resource, some_resources(chance)[0])
            case number if number < 14 and self.flights:
                rotation.ended(self.flights.pop(chance.randrange(len(self.flights))), self.now)
        check(rotation, self.now)


@pytest.mark.parametrize(("strategy", "order"), [("round_robin", fewest_then_oldest), ("primary_backup", first)])
@pytest.mark.parametrize("seed", seeds(30, 8))
def test_r24_the_choice_is_the_best_of_all(strategy: str, order: Order, seed: int) -> None:
    """R21, R22, R25: also among those with some tags, and without some ids."""
    drive = Drive(seed, strategy)
    for _ in range(300):
        drive.disturb()
        tags = drive.chance.choice([frozenset[str](), frozenset[str](), *TAGS])
        skip = frozenset(drive.chance.sample(drive.ids, min(len(drive.ids), drive.chance.choice([0, 0, 1, 3]))))
        wanted = drive.wanted(tags, skip)
        expected = order(wanted) if wanted else None
        assert drive.acquire(tags, skip) is expected


@pytest.mark.parametrize("seed", seeds(30, 8))
def test_r24_weighted_takes_whoever_is_furthest_behind_its_share(seed: int) -> None:
    """With seats that close and open: one that was away returns level with the others."""
    drive = Drive(seed, "weighted")
    turns = dict.fromkeys(drive.rotation.members.values(), 0.0)
    away: set[Member] = set()
    level = 0.0
    for _ in range(300):
        if drive.chance.random() < 0.3:
            command = drive.chance.choice([drive.rotation.disable, drive.rotation.enable])
            command(drive.chance.choice(drive.ids))
        if drive.flights and drive.chance.random() < 0.6:
            drive.rotation.ended(drive.flights.pop(drive.chance.randrange(len(drive.flights))))
        wanted = drive.wanted(frozenset(), ())
        for seat in wanted:
            if seat in away:
                turns[seat] = max(turns[seat], level)
        away = {seat for seat in turns if seat not in wanted}
        expected = min(wanted, key=lambda seat: turns[seat]) if wanted else None
        assert drive.acquire(frozenset(), frozenset()) is expected
        if expected is not None:
            level = max(level, turns[expected])
            turns[expected] += 1 / expected.resource.weight


@pytest.mark.parametrize("seed", seeds(20, 8))
def test_r24_weighted_finds_one_whenever_there_is_one(seed: int) -> None:
    """With tags and ids to skip, whose shares are not exact."""
    drive = Drive(seed, "weighted")
    for _ in range(300):
        drive.disturb()
        tags = drive.chance.choice(TAGS)
        skip = frozenset(drive.chance.sample(drive.ids, min(len(drive.ids), 1)))
        wanted = drive.wanted(tags, skip)
        taken = drive.acquire(tags, skip)
        assert taken in wanted if wanted else taken is None


# -- strategies of one's own -------------------------------------------------------------------------------------------


class NewestFirst:
    """The last in the pool that is open; a strategy and its own picker, kept as simple as the protocol allows."""

    def __init__(self) -> None:
        self.members: list[Member] = []

    def picker(self) -> NewestFirst:
        return NewestFirst()

    def offer(self, seat: Member) -> None:
        if seat not in self.members:
            self.members.append(seat)

    def withdraw(self, seat: Member) -> None:
        self.members.remove(seat)

    def pick(self, skip: Container[str]) -> Member | None:
        usable = [seat for seat in self.members if seat.is_open and seat.resource.resource_id not in skip]
        return max(usable, key=lambda seat: seat.index, default=None)


def test_r24_a_strategy_of_ones_own() -> None:
    assert isinstance(NewestFirst(), Strategy)
    rotation = rotation_of(
        [Resource(name, None, 1, tags=set(tags)) for name, tags in [("a", "x"), ("b", ""), ("c", "x")]], NewestFirst()
    )

    def taken(want: Requirement = Requirement()) -> str | None:  # noqa: B008 - immutable
        flight = rotation.acquire(0.0, want)
        return flight and flight.member.resource.resource_id

    assert [taken(), taken(), taken(Requirement(frozenset("x"))), taken()] == ["c", "b", "a", None]


@pytest.mark.parametrize("seed", range(10))
def test_r24_a_strategy_of_ones_own_is_told_all_it_needs(seed: int) -> None:
    drive = Drive(seed, NewestFirst())
    for _ in range(300):
        drive.disturb()
        tags = drive.chance.choice(TAGS)
        wanted = drive.wanted(tags, ())
        assert drive.acquire(tags, frozenset()) is (wanted[-1] if wanted else None)


def test_r24_each_picker_is_a_new_one() -> None:
    strategy = round_robin()
    pickers: list[Picker] = [strategy.picker(), strategy.picker()]
    assert pickers[0] is not pickers[1]


def test_r24_strategies_are_values() -> None:
    assert strategy_of("round_robin") == round_robin()
    assert strategy_of("primary_backup") == primary_backup()
    assert strategy_of("weighted") == weighted()
    assert strategy_of("least_latency") == least_latency()
    assert strategy_of("sticky") == sticky()
    assert round_robin() != primary_backup()
    assert strategy_of(own := NewestFirst()) is own
    assert {strategy: name for name, strategy in NAMED.items()}[round_robin()] == "round_robin"


@pytest.mark.parametrize("bad", ["", "robin", None, 5, ["round_robin"], object(), round_robin, NewestFirst])
def test_r11_what_is_no_strategy_is_refused(bad: Any) -> None:
    with pytest.raises(InvalidArgument, match="strategy must be") as refused:
        strategy_of(bad)
    assert "'round_robin'" in str(refused.value)
    assert repr(bad) in str(refused.value)


def test_r11_a_class_where_a_value_is_meant_is_told_to_be_called() -> None:
    with pytest.raises(InvalidArgument, match="call it"):
        strategy_of(weighted)


# -- weights -----------------------------------------------------------------------------------------------------------


def picks(rotation: Rotation, times: int) -> list[str]:
    """Ids of `times` uses one after another."""
    found = []
    for number in range(times):
        flight = rotation.acquire(float(number))
        assert flight is not None
        rotation.ok(flight)
        found.append(flight.member.resource.resource_id)
    return found


def test_r24_weights_are_proportions() -> None:
    rotation = rotation_of([Resource("big", None, weight=3.0), Resource("small", None)], "weighted")
    assert Counter(picks(rotation, 400)) == {"big": 300, "small": 100}


def test_r24_weights_are_evenly_spread() -> None:
    rotation = rotation_of([Resource("big", None, weight=3.0), Resource("small", None)], "weighted")
    found = picks(rotation, 400)
    assert all(found[start : start + 4].count("small") == 1 for start in range(0, 400, 4))


def test_r24_weights_hold_among_those_with_some_tags() -> None:
    resources = [
        Resource("big", None, weight=3.0, tags={"x"}),
        Resource("small", None, tags={"x"}),
        Resource("other", None, weight=50.0),
    ]
    rotation = rotation_of(resources, "weighted")
    found = []
    for number in range(40):
        picks(rotation, 1)
        flight = rotation.acquire(float(number), Requirement(frozenset({"x"})))
        assert flight is not None
        rotation.ok(flight)
        found.append(flight.member.resource.resource_id)
    assert Counter(found) == {"big": 30, "small": 10}


def test_r24_who_returns_from_a_cooldown_gets_no_burst() -> None:
    rotation = rotation_of([Resource(name, None) for name in "abc"], "weighted")
    picks(rotation, 3)
    flight = rotation.acquire(0.0)
    assert flight is not None
    rotation.cooled(flight, 60.0, now=0.0)
    away = flight.member.resource.resource_id
    assert away not in picks(rotation, 1000)
    rotation.advance(60.0)
    counted = Counter(picks(rotation, 30))
    assert max(counted.values()) <= 11
    assert 9 <= counted[away] <= 11


def test_r24_a_newcomer_gets_no_burst() -> None:
    rotation = rotation_of([Resource(name, None) for name in "ab"], "weighted")
    picks(rotation, 1000)
    rotation.add(Resource("c", None))
    assert 9 <= Counter(picks(rotation, 30))["c"] <= 11


def test_r24_weights_survive_a_reconcile_that_changes_nothing() -> None:
    """Reordering into the same order, and taking over equal fields, must not begin all shares anew."""
    rotation = rotation_of([Resource("big", None, weight=3.0), Resource("small", None)], "weighted")
    found: list[str] = []
    for _ in range(100):
        found += picks(rotation, 2)
        for like in (Resource("big", None, weight=3.0), Resource("small", None)):
            rotation.retag(rotation.members[like.resource_id].resource, like)
        rotation.reorder(["big", "small"])
        rotation.settle(0.0)
    assert Counter(found) == {"big": 150, "small": 50}
