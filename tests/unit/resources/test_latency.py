"""`least_latency`: peak EWMA and two choices by chance (R24)."""

from __future__ import annotations

import asyncio
import math
import random
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from headgate import CooldownResource, InvalidArgument, Resource, ResourcePool
from headgate.core.clock import clock
from headgate.resources import least_latency
from headgate.resources.members import Requirement, Use, offer
from headgate.resources.rotation import Rotation
from headgate.testing import virtual
from tests.support.resources.support import keys


def rotation_of(*members: str | Resource[None], chance: Callable[[], float], **options: Any) -> Rotation:
    resources = [Resource(one, None) if isinstance(one, str) else one for one in members]
    return Rotation(resources, strategy=least_latency(), cooldown_table=(30.0,), chance=chance, **options)


def by_chance(seed: int = 0) -> Callable[[], float]:
    return random.Random(seed).random


def take(rotation: Rotation, now: float, want: Requirement = Requirement(), avoid: Iterable[str] = ()) -> Use:  # noqa: B008
    flight = rotation.acquire(now, want, frozenset(avoid))
    assert flight is not None
    return flight


def use(rotation: Rotation, name: str, seconds: float, now: float) -> None:
    """One use of this one that ends well at `now`."""
    others = [other for other in rotation.members if other != name]
    rotation.ok(take(rotation, now - seconds, avoid=others), now)


def name_of(flight: Use) -> str:
    return flight.member.resource.resource_id


def choice(rotation: Rotation, now: float) -> str:
    """Whom a call at this time would be given."""
    flight = take(rotation, now)
    del flight.member.uses[flight.order]
    offer(flight.member.resource)
    return name_of(flight)


def latency(rotation: Rotation, name: str) -> float:
    seconds: float = rotation.members[name].notes.seconds
    return seconds


def test_r24_of_two_the_faster() -> None:
    rotation = rotation_of("slow", "fast", chance=by_chance())
    use(rotation, "slow", 1.0, now=1.0)
    use(rotation, "fast", 0.1, now=1.0)
    assert {choice(rotation, 1.0) for _ in range(20)} == {"fast"}


def test_r24_what_is_in_flight_counts_as_so_many_times_the_latency() -> None:
    rotation = rotation_of("slow", "fast", chance=by_chance())
    use(rotation, "slow", 0.35, now=1.0)
    use(rotation, "fast", 0.1, now=1.0)
    assert [name_of(take(rotation, 1.0)) for _ in range(5)] == ["fast", "fast", "fast", "slow", "fast"]


def test_r24_a_rise_is_taken_at_once() -> None:
    rotation = rotation_of("a", chance=by_chance())
    for number in range(100):
        use(rotation, "a", 0.1, now=number + 1.0)
    use(rotation, "a", 5.0, now=101.0)
    assert latency(rotation, "a") == 5.0


def test_r24_a_fall_is_believed_by_and_by() -> None:
    rotation = rotation_of("a", chance=by_chance())
    use(rotation, "a", 5.0, now=10.0)
    use(rotation, "a", 1.0, now=10.0)
    assert latency(rotation, "a") == 5.0, "no time has passed"
    use(rotation, "a", 1.0, now=20.0)
    assert latency(rotation, "a") == pytest.approx(1 + 4 * math.exp(-1))
    use(rotation, "a", 1.0, now=120.0)
    assert latency(rotation, "a") == pytest.approx(1, rel=1e-3)


def test_r24_who_was_slow_is_tried_again() -> None:
    rotation = rotation_of("slow", "fast", chance=by_chance())
    use(rotation, "slow", 10.0, now=10.0)
    for number in range(400):
        now = 10.0 + number * 0.25
        flight = take(rotation, now)
        if name_of(flight) == "slow":
            assert 10 * math.exp((10.0 - now) / 10) <= 0.1, "when its latency has faded to that of the other"
            break
        rotation.ok(flight, now + 0.1)
    else:
        pytest.fail("it never was")


def test_r24_one_that_nobody_knows_is_tried_once_and_waited_for() -> None:
    rotation = rotation_of("known", "new", chance=by_chance())
    use(rotation, "known", 0.1, now=1.0)
    assert [name_of(take(rotation, 1.0)) for _ in range(5)] == ["new", "known", "known", "known", "known"]


def test_r24_a_burst_on_new_ones_is_spread() -> None:
    rotation = rotation_of("a", "b", chance=by_chance())
    assert Counter(name_of(take(rotation, 0.0)) for _ in range(10)) == {"a": 5, "b": 5}


@pytest.mark.parametrize("verdict", ["ended", "cooled", "disabled"])
def test_r24_a_use_that_failed_tells_how_long_it_takes_at_least(verdict: str) -> None:
    def fail(name: str, seconds: float, now: float) -> None:
        flight = take(rotation, now - seconds, avoid=[one for one in "ab" if one != name])
        if verdict == "cooled":
            rotation.cooled(flight, 0.0, now=now)
            rotation.advance(now)
        else:
            getattr(rotation, verdict)(flight, now)
            rotation.enable(name)

    rotation = rotation_of("a", "b", chance=by_chance())
    use(rotation, "a", 1.0, now=1.0)
    fail("a", 0.001, now=50.0)
    assert latency(rotation, "a") == 1.0, "one that fails quickly does not become the best by that"
    assert rotation.members["a"].notes.at == 50.0, "nor by fading while it fails"
    fail("a", 3.0, now=51.0)
    assert latency(rotation, "a") == 3.0
    fail("b", 2.0, now=51.0)
    assert latency(rotation, "b") == 2.0


def test_r24_calls_with_tags_know_what_the_others_learned() -> None:
    members = [Resource("slow", None, tags=["x"]), Resource("fast", None, tags=["x"]), Resource("other", None)]
    rotation = rotation_of(*members, chance=by_chance())
    use(rotation, "slow", 1.0, now=1.0)
    use(rotation, "fast", 0.1, now=1.0)
    assert name_of(take(rotation, 1.0, Requirement(frozenset("x")))) == "fast"


def test_r24_two_pools_learn_for_themselves() -> None:
    shared = [Resource("a", None), Resource("b", None)]
    one, two = rotation_of(*shared, chance=by_chance()), rotation_of(*shared, chance=by_chance())
    use(one, "a", 1.0, now=1.0)
    assert two.members["a"].notes is None


def test_r24_a_late_end_of_one_that_was_removed_teaches_nothing() -> None:
    rotation = rotation_of("a", "b", chance=by_chance())
    flight = take(rotation, 0.0, avoid=["b"])
    rotation.remove("a")
    rotation.add(Resource("a", None))
    rotation.ok(flight, 9.0)
    assert flight.member.notes is None
    assert rotation.members["a"].notes is None


def test_r24_what_was_learned_survives_a_change_of_order_and_weight() -> None:
    rotation = rotation_of("slow", "fast", chance=by_chance())
    use(rotation, "slow", 1.0, now=1.0)
    use(rotation, "fast", 0.1, now=1.0)
    rotation.reorder(["fast", "slow"])
    rotation.retag(rotation.members["slow"].resource, Resource("slow", None, weight=2.0))
    assert {choice(rotation, 1.0) for _ in range(20)} == {"fast"}


def test_r24_with_many_the_worst_are_rarely_used_and_the_best_not_alone() -> None:
    """Power of two choices: of n that idle, the k-th best is taken with a chance of (2(n-k)+1)/n^2, about."""
    rotation = rotation_of(*map(str, range(10)), chance=by_chance())
    for rank in range(10):
        use(rotation, str(rank), 1.0 + rank, now=20.0)
    found = Counter(choice(rotation, 20.0) for _ in range(9000))
    for rank in range(10):
        assert found[str(rank)] == pytest.approx(9000 * 2 * (9 - rank) / 90, rel=0.15, abs=30)


@pytest.mark.parametrize("drawn", [0.0, 0.5, 0.999999, 1.0])
def test_r24_whatever_chance_says_one_that_is_open_is_found(drawn: float) -> None:
    rotation = rotation_of(*(Resource(name, None, 1) for name in "abcdef"), chance=lambda: drawn)
    rotation.disable("c")
    flights = [take(rotation, 0.0, avoid="e") for _ in range(4)]
    assert {name_of(flight) for flight in flights} == set("abdf")
    assert rotation.acquire(0.0, Requirement(), "e") is None
    assert name_of(take(rotation, 0.0)) == "e"
    assert rotation.acquire(0.0) is None
    rotation.ok(flights[1], 1.0)
    assert name_of(take(rotation, 1.0)) == name_of(flights[1])


@pytest.mark.parametrize("size", [100, 2_000, pytest.param(10_000, marks=pytest.mark.soak)])
def test_r24_two_numbers_are_drawn_for_a_call_at_any_size(size: int) -> None:
    drawn = 0
    chance = random.Random(1)

    def counted() -> float:
        nonlocal drawn
        drawn += 1
        return chance.random()

    rotation = rotation_of(*(Resource(str(number), None, 1) for number in range(size)), chance=counted)
    for now in range(1000):
        rotation.ok(take(rotation, float(now)), now + chance.random())
    assert drawn == 2000
    flights = [take(rotation, 1000.0) for _ in range(size - 1)]
    drawn = 0
    for now in range(1000, 2000):  # all but one are busy: those found shut are not drawn again
        rotation.ok(flights.pop(chance.randrange(len(flights))), float(now))
        flights.append(take(rotation, float(now)))
    assert drawn <= 3 * 1000 + size


@pytest.mark.parametrize("bad", [0, -1, math.inf, math.nan, "10", None, True])
def test_r11_what_is_no_time_constant_is_refused(bad: Any) -> None:
    with pytest.raises(InvalidArgument, match="decay must be a finite number of seconds > 0"):
        least_latency(bad)


def test_r24_the_time_constant_is_an_option() -> None:
    rotation = Rotation([Resource("a", None)], strategy=least_latency(decay=1.0), cooldown_table=(1.0,))
    use(rotation, "a", 5.0, now=10.0)
    use(rotation, "a", 1.0, now=11.0)
    assert latency(rotation, "a") == pytest.approx(1 + 4 * math.exp(-1))
    assert least_latency() == least_latency(10.0) != least_latency(5.0)


@virtual
async def test_r24_a_pool_learns_from_its_calls() -> None:
    pool = keys("slow", "fast", strategy="least_latency")

    async def operation(resource: Resource[str]) -> str:
        await asyncio.sleep(2.0 if resource.resource_id == "slow" else 0.1)
        return resource.resource_id

    found = Counter([await pool.run(operation) for _ in range(100)])
    assert found == {"slow": 1, "fast": 99}


@virtual
async def test_r24_a_timeout_is_a_long_latency() -> None:
    pool = keys("stuck", "fast", strategy="least_latency")
    seen: list[str] = []

    async def operation(resource: Resource[str]) -> None:
        seen.append(resource.resource_id)
        await asyncio.sleep(60.0 if resource.resource_id == "stuck" else 0.1)

    for _ in range(20):
        await pool.run(operation, timeout=5.0, retry_delay=0)
    assert seen.count("stuck") == 1


@virtual
async def test_r24_chance_comes_from_the_clock() -> None:
    """And cooldowns, retries and waiting work as with any strategy."""
    pool: ResourcePool[str] = keys("a", "b", "c", strategy="least_latency")

    async def operation(resource: Resource[str]) -> str:
        if resource.resource_id == "a":
            raise CooldownResource(5)
        return resource.resource_id

    with clock.replaced(uniform=lambda low, high: low):
        assert await pool.run(operation, retry_delay=0) in ("b", "c")
    assert pool.snapshot()["a"]["status"] == "cooling_down"
