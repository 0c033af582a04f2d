"""`sticky`: the same affinity, the same resource (R24); and what an affinity may be (R25)."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
from collections import Counter
from enum import IntEnum
from typing import Any

import pytest

from headgate import InvalidType, Resource, ResourcePool, RetryOperation
from headgate.resources import affinity as affinity_module
from headgate.resources import round_robin, sticky
from headgate.resources.affinity import Rendezvous, stable_text
from headgate.resources.members import Requirement, Use, WaitTicket
from headgate.resources.rotation import Rotation
from headgate.resources.stats import check
from headgate.testing import run, virtual
from tests.conftest import SCALE, seeds
from tests.support.resources.support import Gate, ident, in_flight, keys

USERS = [f"user-{number}" for number in range(2000)]
LARGE = 10_000 if SCALE >= 1 else 2_000


def rotation_of(*members: str | Resource[None], limit: int | None = None) -> Rotation:
    resources = [Resource(one, None, limit) if isinstance(one, str) else one for one in members]
    return Rotation(resources, strategy=sticky(), cooldown_table=(30.0,))


def names(count: int) -> list[str]:
    return [f"key-{number}" for number in range(count)]


def take(rotation: Rotation, affinity: Any, want: Requirement = Requirement()) -> Use | None:  # noqa: B008 - immutable
    return rotation.acquire(0.0, want, (), affinity)


def favourite(rotation: Rotation, affinity: Any) -> str:
    flight = take(rotation, affinity)
    assert flight is not None
    rotation.ended(flight)
    return flight.member.resource.resource_id


def homes(rotation: Rotation) -> dict[str, str]:
    return {user: favourite(rotation, user) for user in USERS}


# -- the order ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [3, 10, pytest.param(100, marks=pytest.mark.soak)])
def test_r24_affinities_are_spread_evenly(count: int) -> None:
    found = Counter(homes(rotation_of(*names(count))).values())
    expected = len(USERS) / count
    chi_square = sum((found[name] - expected) ** 2 / expected for name in names(count))
    assert chi_square < count + 4 * (2 * count) ** 0.5, "as uneven as chance alone, and no more"


def test_r24_shares_are_in_proportion_to_weights() -> None:
    rotation = rotation_of(Resource("big", None, weight=3.0), Resource("small", None))
    assert 1400 <= Counter(homes(rotation).values())["big"] <= 1600


@pytest.mark.parametrize("count", [3, 60])
def test_r24_a_newcomer_takes_only_its_own(count: int) -> None:
    rotation = rotation_of(*names(count))
    before = homes(rotation)
    rotation.add(Resource("new", None))
    after = homes(rotation)
    moved = {user for user in USERS if after[user] != before[user]}
    assert moved == {user for user in USERS if after[user] == "new"}
    assert len(moved) == pytest.approx(2000 / (count + 1), rel=0.5)


@pytest.mark.parametrize("count", [3, pytest.param(60, marks=pytest.mark.soak)])
def test_r24_who_leaves_leaves_only_its_own(count: int) -> None:
    rotation = rotation_of(*names(count))
    before = homes(rotation)
    rotation.remove("key-1")
    after = homes(rotation)
    assert {user for user in USERS if after[user] != before[user]} == {u for u in USERS if before[u] == "key-1"}
    heirs = {after[user] for user in USERS if before[user] == "key-1"}
    assert len(heirs) > 1, "they are not all left to one"


def test_r24_more_weight_takes_and_gives_nothing_else() -> None:
    rotation = rotation_of(*names(10))
    before = homes(rotation)
    rotation.retag(rotation.members["key-3"].resource, Resource("key-3", None, weight=4.0))
    after = homes(rotation)
    assert {after[user] for user in USERS if after[user] != before[user]} == {"key-3"}


def test_r24_the_order_of_the_pool_means_nothing() -> None:
    rotation = rotation_of(*names(10))
    before = homes(rotation)
    rotation.reorder(list(reversed(names(10))))
    assert homes(rotation) == before == homes(rotation_of(*reversed(names(10))))


def test_r24_the_order_is_the_same_in_every_process_and_version() -> None:
    """Pinned: whoever changes the hash moves the affinities of every user of the library."""
    pinned = ["key-5", "key-0", "key-3", "key-3"]
    rotation = rotation_of(*names(7))
    assert [favourite(rotation, one) for one in ("ann", 7, b"ann", ("acme", 7))] == pinned
    script = (
        "from headgate.resources import sticky\n"
        "from headgate.resources.model import Resource\n"
        "from headgate.resources.rotation import Rotation\n"
        "r = Rotation([Resource(f'key-{n}', None) for n in range(7)], strategy=sticky(), cooldown_table=(1.0,))\n"
        "for one in ('ann', 7, b'ann', ('acme', 7)):\n"
        "    print(r.acquire(0.0, affinity=one).member.resource.resource_id)\n"
    )
    for seed in ("1", "2"):
        done = subprocess.run([sys.executable, "-c", script], env={**_ENV, "PYTHONHASHSEED": seed}, **_TEXT)
        assert done.stdout.split() == pinned


_ENV: dict[str, str] = {"PYTHONPATH": ":".join(sys.path)}
_TEXT: dict[str, Any] = {"capture_output": True, "text": True, "check": True}


def test_r24_what_is_hashed_tells_kinds_apart() -> None:
    different = ["1", 1, b"1", ("1",), (1,), (b"1",), ("1", ""), ("", "1"), (), "", b"", -1, ("1:s",), "ab", ("a", "b")]
    assert len({stable_text(one) for one in different}) == len(different)
    assert stable_text(10**5000)
    assert stable_text("\udcff")


@pytest.mark.parametrize("seed", seeds(20, 8))
def test_r24_what_is_remembered_is_what_would_be_found(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside a rendezvous that is made anew for each question, with members that come, go and change."""
    chance = random.Random(seed)
    monkeypatch.setattr(affinity_module, "FAVOURITES", chance.choice([1, 2, 4]))
    monkeypatch.setattr(affinity_module, "REMEMBERED", chance.choice([8, 64]))
    real = Rendezvous()
    members: dict[str, float] = {}
    for _ in range(300):
        name = f"k{chance.randrange(40)}"
        match chance.randrange(4):
            case 0:
                members.pop(name, None)
                real.dismiss(name)
            case 1:
                real.dismiss(name)
                members[name] = chance.choice([0.25, 1.0, 1.0, 5.0])
                real.admit(name, members[name])
        text = stable_text(chance.choice(USERS[:8]))
        found, are_all = real.favourites(text)
        if chance.random() < 0.2 and not are_all:
            found, are_all = real.more_favourites(text)
        ranked = sorted(fresh(members)._measured(affinity_module._Ranking(text), members))
        assert found == (ranked if are_all else ranked[: len(found)])
        assert found or not members
        assert real._remembered == sum(len(one.nearest) for one in real._rankings.values())
        assert len(real._rankings) == 1 or real._remembered <= affinity_module.REMEMBERED
        some = chance.sample(sorted(members), len(members) // 2)
        assert real.nearest(text, some) == next((one for _, one in ranked if one in some), None)


def fresh(members: dict[str, float]) -> Rendezvous:
    rendezvous = Rendezvous()
    for name, weight in members.items():
        rendezvous.admit(name, weight)
    return rendezvous


# -- spilling ----------------------------------------------------------------------------------------------------------


def order_of(rotation: Rotation, affinity: str) -> list[str]:
    """Whom it likes best, second best, and so on."""
    return [name for _, name in fresh(dict.fromkeys(rotation.members, 1.0)).favourites(stable_text(affinity))[0]]


def test_r24_the_favourite_while_it_is_eligible_and_then_the_next() -> None:
    rotation = rotation_of(*names(5), limit=1)
    order = order_of(rotation, "ann")
    flights = [take(rotation, "ann") for _ in range(5)]
    assert [one and one.member.resource.resource_id for one in flights] == order
    assert take(rotation, "ann") is None
    assert flights[2] is not None
    rotation.ok(flights[2], 1.0)
    assert favourite(rotation, "ann") == order[2]


def test_r24_it_returns_to_the_favourite_after_its_cooldown() -> None:
    rotation = rotation_of(*names(5))
    first, second, *_ = order_of(rotation, "ann")
    flight = take(rotation, "ann")
    assert flight is not None
    rotation.cooled(flight, now=0.0)
    assert favourite(rotation, "ann") == second
    rotation.advance(30.0)
    assert favourite(rotation, "ann") == first


@pytest.mark.parametrize("seed", range(max(2, int(10 * SCALE))))
@pytest.mark.parametrize("depth", [1, 16])
def test_r24_spilling_goes_by_the_order_at_any_load(seed: int, depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also beyond what is remembered, with few or many that are open, with tags and ids to skip."""
    monkeypatch.setattr(affinity_module, "FAVOURITES", depth)
    chance = random.Random(seed)
    rotation = rotation_of(*(Resource(name, None, 1, tags=[*chance.choice(["", "x"])]) for name in names(120)))
    flights: list[Use] = []
    for _ in range(600 if SCALE >= 1 else 100):
        ends = chance.choice([0, 0, 1, 1, 2, 30])
        for _ in range(min(ends, len(flights))):
            rotation.ok(flights.pop(chance.randrange(len(flights))))
        tags = frozenset(chance.choice(["", "", "x"]))
        skip = frozenset(chance.sample(names(120), chance.choice([0, 0, 5, 100])))
        user = chance.choice(USERS[:3])
        fit = {
            one.resource.resource_id for one in rotation.members.values() if one.is_open and tags <= one.resource.tags
        }
        ranking = fresh(dict.fromkeys(fit - skip, 1.0))
        expected = ranking.nearest(stable_text(user), fit - skip)
        flight = take(rotation, user, Requirement(tags, skip)) if chance.random() < 0.9 else None
        if flight is not None:
            flights.append(flight)
            assert flight.member.resource.resource_id == expected
        check(rotation, 0.0)


def test_r24_without_an_affinity_it_is_round_robin() -> None:
    rotation = rotation_of(*names(4))
    plain = Rotation([Resource(name, None) for name in names(4)], strategy=round_robin(), cooldown_table=(30.0,))
    for step in range(50):
        mine, other = rotation.acquire(float(step)), plain.acquire(float(step))
        assert mine is not None
        assert other is not None
        assert mine.member.resource.resource_id == other.member.resource.resource_id
        if step % 3:
            rotation.ok(mine)
            plain.ok(other)


def test_r24_at_ten_thousand_a_known_affinity_measures_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    rotation = rotation_of(*names(LARGE))
    expected = [favourite(rotation, user) for user in USERS[:50]]
    rotation.add(Resource("new", None))
    measured = 0
    usual = Rendezvous._measured

    def counted(self: Rendezvous, ranking: Any, wanted: Any) -> Any:
        nonlocal measured
        measured += len(wanted)
        return usual(self, ranking, wanted)

    monkeypatch.setattr(Rendezvous, "_measured", counted)
    assert [favourite(rotation, user) for user in USERS[:50]] == expected
    assert measured == 50, "only the newcomer, once for each"
    assert [favourite(rotation, user) for user in USERS[:50]] == expected
    assert measured == 50


def test_r24_at_ten_thousand_a_busy_affinity_is_measured_a_few_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of its uses takes one more favourite; surveys grow with the logarithm of how many."""
    rotation = rotation_of(*names(10_000), limit=1)
    surveys = []
    usual = Rendezvous._survey

    def counted(self: Rendezvous, ranking: Any, depth: int) -> None:
        surveys.append(depth)
        usual(self, ranking, depth)

    monkeypatch.setattr(Rendezvous, "_survey", counted)
    assert all(take(rotation, "ann") for _ in range(500))
    assert surveys == [16, 64, 256, 1024]


# -- waiters -----------------------------------------------------------------------------------------------------------


def test_r25_a_waiter_is_given_its_favourite_of_what_is_free() -> None:
    rotation = rotation_of(*names(5), limit=1)
    order = order_of(rotation, "ann")
    for name in names(5):
        rotation.disable(name)
    ticket = WaitTicket(Requirement(), rotation, affinity="ann")
    for name in names(5):
        rotation.members[name].resource.status = "cooling_down"
        rotation.members[name].resource.cooldown_until = 30.0
        rotation.cooling.append((30.0, rotation.members[name].index, rotation.members[name]))
    rotation.wait_queue.join(ticket)
    rotation.advance(30.0)
    assert ticket.grant is not None
    assert ticket.grant.member.resource.resource_id == order[0]


def test_r25_a_waiter_takes_what_comes() -> None:
    rotation = rotation_of(*names(3), limit=1)
    flights = [take(rotation, "ann") for _ in range(3)]
    tickets = [WaitTicket(Requirement(), rotation, affinity=one) for one in ("ann", "bob")]
    for ticket in tickets:
        rotation.wait_queue.join(ticket)
    assert flights[2] is not None
    rotation.ok(flights[2])
    assert tickets[0].grant is not None
    assert tickets[1].grant is None, "first come, first served, whatever they like"


# -- the option --------------------------------------------------------------------------------------------------------


def agents(**options: Any) -> ResourcePool[str]:
    return keys(*names(20), strategy="sticky", **options)


@virtual
async def test_r25_every_kind_of_call_takes_an_affinity() -> None:
    pool = agents()
    home = await pool.run(ident, affinity="ann")

    @pool.use(affinity="ann")
    async def used(resource: Resource[str]) -> str:
        return resource.resource_id

    async def streamed(resource: Resource[str]) -> Any:
        yield resource.resource_id

    async with pool.lease(affinity="ann") as leased:
        assert leased.resource_id == home
    assert await used() == home
    assert [item async for item in pool.stream(streamed, affinity="ann")] == [home]
    assert {await pool.run(ident, affinity=("ann", number)) for number in range(40)} > {home}


def test_r25_run_sync_takes_an_affinity() -> None:
    pool = agents()
    assert len({pool.run_sync(lambda resource: resource.resource_id, affinity=b"ann") for _ in range(5)}) == 1


@virtual
async def test_r25_a_retry_goes_to_the_next_best_and_the_next_call_home() -> None:
    pool = agents()
    seen: list[str] = []

    async def operation(resource: Resource[str]) -> None:
        seen.append(resource.resource_id)
        if len(seen) < 3:
            raise RetryOperation

    await pool.run(operation, affinity="ann", retry_delay=0)
    order = order_of(pool._engine.rotation, "ann")
    assert seen == order[:3]
    assert await pool.run(ident, affinity="ann") == order[0]


@virtual
async def test_r25_waiting_calls_keep_their_affinity() -> None:
    pool = ResourcePool([Resource(name, None, 1) for name in names(3)], strategy="sticky")
    gate = Gate()
    calls = [asyncio.create_task(pool.run(gate, affinity="ann")) for _ in range(3)]
    await asyncio.sleep(1)
    waiting = asyncio.create_task(pool.run(ident, affinity="ann", wait_for_capacity=True))
    await asyncio.sleep(1)
    for number in range(3):
        gate.finish(number)
    assert await waiting == gate.entered[0]
    await asyncio.gather(*calls)
    assert in_flight(pool) == 0


@pytest.mark.parametrize("strategy", ["round_robin", "primary_backup", "weighted", "least_latency"])
def test_r25_other_strategies_do_not_look_at_it(strategy: str) -> None:
    async def main() -> None:
        pool = keys("a", "b", strategy=strategy)
        assert {await pool.run(ident, affinity="ann") for _ in range(3)} <= {"a", "b"}

    run(main)


class Tenant(IntEnum):
    ACME = 7


@pytest.mark.parametrize("good", ["", "ann", 0, -5, b"x", (), ("a", 1, b"c"), Tenant.ACME, None])
@virtual
async def test_r25_what_an_affinity_may_be(good: Any) -> None:
    assert await agents().run(ident, affinity=good) in names(20)


@pytest.mark.parametrize(
    ("bad", "shown"),
    [
        (1.5, "float"),
        (True, "bool"),
        (object(), "object"),
        (["a"], "list"),
        (frozenset("a"), "frozenset"),
        (("a", None), "tuple with NoneType in it"),
        (("a", ("b",)), "tuple with tuple in it"),
        (("a", 1.0, True), "tuple with bool, float in it"),
    ],
)
@virtual
async def test_r25_what_is_no_affinity_is_refused(bad: Any, shown: str) -> None:
    pool = agents()
    with pytest.raises(InvalidType, match="affinity must be") as refused:
        await pool.run(ident, affinity=bad)
    assert f"got {shown}" in str(refused.value)
    for call in (pool.lease, pool.use):
        with pytest.raises(InvalidType, match="affinity must be"):
            call(affinity=bad)
    assert in_flight(pool) == 0
