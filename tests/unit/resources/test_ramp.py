"""R74: after a cooldown one probe, then two at a time, then four: a rested resource is not flooded."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from headgate import CooldownResource, PoolExhausted, Resource, ResourcePool
from headgate.resources.effects import Recover, Serve
from headgate.resources.members import Requirement, Use, WaitTicket
from headgate.resources.rotation import Rotation
from headgate.resources.stats import check, pool_stats
from headgate.resources.strategies import NAMED, strategy_of
from headgate.testing import settle, virtual
from tests.support.resources.support import Gate, always, keys

FIELDS = {
    "status",
    "in_flight",
    "max_in_flight",
    "consecutive_cooldown",
    "cooldown_seconds_remaining",
    "last_acquired_at",
}


def rotation_of(*resources: Resource[None], probes: bool = True, strategy: str = "round_robin") -> Rotation:
    return Rotation(resources, strategy=strategy_of(strategy), cooldown_table=(30.0, 120.0), probe_on_recovery=probes)


def recovered(limit: int | None = None, strategy: str = "round_robin") -> Rotation:
    """A rotation of one resource whose cooldown has just ended, at 30."""
    rotation = rotation_of(Resource("a", None, limit), strategy=strategy)
    rotation.cooled(take(rotation, 0.0), now=0.0)
    rotation.advance(30.0)
    return rotation


def take(rotation: Rotation, now: float = 30.0) -> Use:
    flight = rotation.acquire(now)
    assert flight is not None, "nothing is eligible"
    return flight


def fill(rotation: Rotation, most: int = 200) -> list[Use]:
    """As many at a time as it lets in."""
    flights: list[Use] = []
    while len(flights) < most and (flight := rotation.acquire(30.0)):
        flights.append(flight)
    return flights


def rounds(rotation: Rotation) -> list[int]:
    """How many are let in at a time, when all of each round succeed."""
    found = []
    while not found or found[-1] < 200:
        flights = fill(rotation)
        if found and len(flights) == found[-1]:
            break
        found.append(len(flights))
        for flight in flights:
            rotation.ok(flight, 31.0)
        check(rotation, 31.0)
    return found


@pytest.mark.parametrize("strategy", sorted(NAMED))
@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        (1, [1]),
        (2, [1, 2]),
        (3, [1, 2, 3]),
        (8, [1, 2, 4, 8]),
        (100, [1, 2, 4, 8, 16, 32, 64, 100]),
        (None, [1, 2, 4, 8, 16, 32, 200]),
    ],
)
def test_r74_the_limit_doubles_with_each_round_of_successes(
    limit: int | None, expected: list[int], strategy: str
) -> None:
    rotation = recovered(limit, strategy)
    assert rounds(rotation) == expected
    assert rotation.members["a"].trial is None


def test_r74_a_round_is_as_many_successes_as_its_limit() -> None:
    rotation = recovered()
    rotation.ok(take(rotation), 31.0)
    one, _two = fill(rotation)
    rotation.ok(one, 31.0)
    [three] = fill(rotation)
    rotation.ok(three, 31.0)
    assert len(fill(rotation)) == 3, "four at a time, of which one is out"


def test_r74_who_says_nothing_counts_for_nothing() -> None:
    rotation = recovered()
    rotation.ok(take(rotation), 31.0)
    for _ in range(10):
        rotation.ended(take(rotation), 31.0)
    assert len(fill(rotation)) == 2


def test_r74_a_cooldown_ends_the_ramp_and_the_next_begins_with_a_probe() -> None:
    rotation = recovered()
    for _ in range(3):
        rotation.ok(take(rotation), 31.0)
    flights = fill(rotation)
    assert len(flights) == 4
    rotation.cooled(flights[0], now=31.0)
    assert rotation.members["a"].trial is None
    rotation.advance(61.0)
    probe = rotation.acquire(61.0)
    assert probe is not None
    assert rotation.acquire(61.0) is None
    for flight in flights[1:]:
        rotation.ok(flight, 62.0)
    assert rotation.acquire(62.0) is None, "successes of those from before prove nothing"
    rotation.ok(probe, 62.0)
    assert len(fill(rotation)) == 2


def test_r74_uses_from_before_the_cooldown_do_not_fill_the_ramp() -> None:
    rotation = rotation_of(Resource("a", None))
    old = [take(rotation, 0.0) for _ in range(10)]
    rotation.cooled(old.pop(), now=0.0)
    rotation.advance(30.0)
    rotation.ok(take(rotation), 31.0)
    assert len(fill(rotation)) == 2
    for flight in old:
        rotation.ok(flight, 31.0)
    assert fill(rotation) == []


def test_r74_the_limit_of_the_resource_holds_as_well() -> None:
    rotation = rotation_of(Resource("a", None, 10))
    old = [take(rotation, 0.0) for _ in range(10)]
    rotation.cooled(old.pop(), now=0.0)
    rotation.advance(30.0)
    rotation.ok(take(rotation), 31.0)
    assert len(fill(rotation)) == 1


def test_r74_enable_ends_the_ramp() -> None:
    rotation = recovered()
    rotation.ok(take(rotation), 31.0)
    ticket_fill = fill(rotation)
    ticket = WaitTicket(Requirement(), rotation)
    rotation.wait_queue.join(ticket)
    assert rotation.enable("a") == [Serve(ticket)]
    assert len(fill(rotation)) == 200
    for flight in ticket_fill:
        rotation.ok(flight, 32.0)
    check(rotation, 32.0)


@pytest.mark.parametrize("how", ["verdict", "policy"])
def test_r74_disable_ends_the_ramp(how: str) -> None:
    rotation = recovered()
    rotation.ok(take(rotation), 31.0)
    flights = fill(rotation)
    if how == "verdict":
        rotation.disabled(flights.pop(), 31.0)
    else:
        rotation.disable("a")
    check(rotation, 31.0)
    rotation.enable("a")
    assert len(fill(rotation)) == 200


def test_r74_waiters_are_served_as_the_ramp_opens() -> None:
    rotation = rotation_of(Resource("a", None))
    rotation.cooled(take(rotation, 0.0), now=0.0)
    tickets = [WaitTicket(Requirement(), rotation) for _ in range(8)]
    for ticket in tickets:
        rotation.wait_queue.join(ticket)

    def succeed(nth: int) -> object:
        grant = tickets[nth].grant
        assert grant is not None
        grant.ticket = None
        return rotation.ok(grant, 31.0)

    assert rotation.advance(30.0) == [Recover("a"), Serve(tickets[0])]
    assert succeed(0) == [Serve(tickets[1]), Serve(tickets[2])]
    assert succeed(1) == [Serve(tickets[3])]
    assert succeed(2) == [Serve(tickets[4]), Serve(tickets[5]), Serve(tickets[6])]
    assert succeed(3) == [Serve(tickets[7])]


def test_r74_a_waiter_whose_grant_was_taken_back_leaves_no_trace_in_the_next_ramp() -> None:
    rotation = recovered()
    rotation.ok(take(rotation), 31.0)
    first, _second = fill(rotation)
    ticket = WaitTicket(Requirement(), rotation)
    rotation.wait_queue.join(ticket)
    rotation.ok(first, 31.0)
    assert ticket.grant is not None
    rotation.cooled(_second, now=32.0)
    assert ticket.grant is None
    assert rotation.advance(62.0) == [Recover("a"), Serve(ticket)]
    check(rotation, 62.0)


def test_r74_the_first_success_counts_in_every_pool_and_then_each_has_its_own_ramp() -> None:
    shared = Resource("a", None)
    one, two = rotation_of(shared), rotation_of(shared)
    one.cooled(take(one, 0.0), now=0.0)
    one.advance(30.0)
    probe = take(two)
    one.ok(take(one), 31.0)
    assert len(fill(two)) == 1, "the probe of the second pool is one of its two"
    two.ok(probe, 31.0)
    assert rounds(one)[:2] == [2, 4]
    assert len(fill(two)) == 1, "of two"


def test_r74_a_pool_that_does_not_probe_has_no_ramp() -> None:
    rotation = rotation_of(Resource("a", None), probes=False)
    rotation.cooled(take(rotation, 0.0), now=0.0)
    rotation.advance(30.0)
    assert len(fill(rotation)) == 200


def test_r74_a_limit_that_is_lowered_below_the_ramp_ends_it() -> None:
    rotation = recovered(100)
    for _ in range(7):
        rotation.ok(take(rotation), 31.0)
    resource = rotation.members["a"].resource
    rotation.retag(resource, Resource("a", None, 4))
    rotation.ok(take(rotation), 31.0)
    assert rotation.members["a"].trial is None
    assert len(fill(rotation)) == 4


def test_r74_a_ramp_that_has_no_room_is_not_counted_as_eligible() -> None:
    runs = dict.fromkeys(("retries", "runs_ok", "runs_exhausted", "runs_error", "runs_cancelled"), 0)
    rotation = recovered()
    rotation.ok(take(rotation), 31.0)
    assert pool_stats(rotation, 31.0, runs).eligible == 1
    fill(rotation)
    assert pool_stats(rotation, 31.0, runs).eligible == 0


# -- in a pool ---------------------------------------------------------------------------------------------------------


async def rest(pool: ResourcePool[Any]) -> None:
    with pytest.raises(PoolExhausted):
        await pool.run(always(CooldownResource(5)))
    await asyncio.sleep(5)


@virtual
async def test_r74_a_crowd_that_waits_is_let_in_by_and_by() -> None:
    pool, gate = keys("a", probe_on_recovery=True), Gate()
    await rest(pool)
    crowd = [asyncio.create_task(pool.run(gate, wait_for_capacity=True)) for _ in range(150)]
    sizes, done = [], 0
    while done < 150:
        await settle()
        sizes.append(len(gate.uses) - done)
        for number in range(done, len(gate.uses)):
            gate.finish(number)
        done = len(gate.uses)
    assert sizes == [1, 2, 4, 8, 16, 32, 87]
    await asyncio.gather(*crowd)


@virtual
async def test_r70_a_ramp_does_not_show_in_the_snapshot() -> None:
    pool = keys("a", probe_on_recovery=True)
    await rest(pool)
    async with pool.lease():
        pass
    async with pool.lease(), pool.lease():
        assert set(pool.snapshot()["a"]) == FIELDS
        assert pool.snapshot()["a"]["status"] == "healthy"
        assert pool.snapshot()["a"]["max_in_flight"] is None
        with pytest.raises(PoolExhausted, match="in full use"):
            await pool.run(always("x"))


@virtual
async def test_r74_enable_lets_everybody_in() -> None:
    pool, gate = keys("a", probe_on_recovery=True), Gate()
    await rest(pool)
    crowd = [asyncio.create_task(pool.run(gate, wait_for_capacity=True)) for _ in range(20)]
    await settle()
    assert len(gate.uses) == 1
    await pool.enable("a")
    await settle()
    assert len(gate.uses) == 20
    for number in range(20):
        gate.finish(number)
    await asyncio.gather(*crowd)
