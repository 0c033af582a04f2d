"""H10: calls that wait for a quota of several processes are all served. Members of a `SharedMemory` play these."""

from __future__ import annotations

import asyncio
import gc
from unittest.mock import Mock

import pytest

from headgate import CooldownResource, PoolExhausted, Resource, ResourcePool
from headgate.core.clock import clock
from headgate.resources.accounts import Account
from headgate.resources.leased_budget import LeasedBudget
from headgate.resources.quota_exchange import Granted
from headgate.sharing.memory import SharedMemory
from headgate.sharing.states import ClockOffset
from headgate.testing import settle, virtual
from tests.support.resources.support import Gate, at_once, ident
from tests.unit.resources.test_quotas import Upstream, limited
from tests.unit.resources.test_shared_health import count_exchanges
from tests.unit.resources.test_shared_quotas import share

TOKENS = at_once(tokens=100, per=10.0)

# -- groups -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first_pool_goes", [False, True])
def test_h10_a_pool_without_a_store_takes_part_in_a_group_that_is_shared(first_pool_goes: bool) -> None:
    @virtual
    async def scenario() -> None:
        quota, group, upstream = at_once(requests=10, per=10.0), f"shared {first_pool_goes}", Upstream(10, None, 10.0)
        resource = Resource("a", "a", quota=quota, quota_group=group)
        shared = ResourcePool([resource], name="keys", store=SharedMemory().member())
        alone = limited("b", quota=quota, group=group)
        if first_pool_goes:
            del shared
            gc.collect()
        for _ in range(30):
            assert await alone.run(ident, wait_for_capacity=True) == "b"
            upstream.arrive("b", 0)
        assert upstream.exceeded == []
        assert clock.now() <= 30

    scenario()


# -- resources that join ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["add", "reconcile"])
def test_h10_a_call_that_waits_does_not_exceed_a_quota_of_a_resource_that_is_added(how: str) -> None:
    """Another process has spent it: this one has to ask before its waiting call uses the resource."""

    @virtual
    async def scenario() -> None:
        place, upstream = SharedMemory(), Upstream(1, None, 10.0)
        quota = at_once(requests=1, per=10.0)
        busy, other = share(place, quota), share(place, quota, "b")
        for pool in (busy, other):
            upstream.arrive(await pool.run(ident, wait_for_capacity=True), 0)
        waiting = asyncio.create_task(busy.run(ident, wait_for_capacity=True))
        await settle()
        await (busy.add("b", "secret-b") if how == "add" else busy.reconcile([Resource("b", "secret-b")]))
        upstream.arrive(await waiting, 0)
        assert upstream.exceeded == []
        assert clock.now() == pytest.approx(10.0, abs=1.5)

    scenario()


@virtual
async def test_h10_a_call_that_waits_does_not_exceed_the_limit_of_a_resource_that_is_added() -> None:
    place, gate = SharedMemory(), Gate()
    pools = [ResourcePool([Resource(name, name, max_in_flight=1)], name="keys", store=place.member()) for name in "ab"]
    running = [asyncio.create_task(pool.run(gate)) for pool in pools]
    await settle()
    running.append(asyncio.create_task(pools[0].run(gate, wait_for_capacity=True)))
    await settle()
    await pools[0].add(Resource("b", "b", max_in_flight=1))
    await settle()
    assert gate.entered == ["a", "b"]
    gate.finish(1)
    await settle()
    assert gate.entered == ["a", "b", "b"]
    gate.finish(0)
    gate.finish(2)
    await asyncio.gather(*running)


def test_h10_the_end_of_a_call_gives_back_nothing_if_it_began_before_the_quota_was_shared() -> None:
    quota = (at_once(requests=4, per=10.0),)
    account = Account(quota)
    before = account.reserve(0.0, 0.0)
    budget = LeasedBudget(quota, lambda: None)
    account.lease(budget, Mock(askers={}), 0.0)
    report = budget.message(looks=True)
    assert report is not None
    budget.take(report, Granted({"requests": 2.0}, {"requests": 4.0}, None, False, quota), ClockOffset(), 0.0)
    account.reserve(0.0, 0.0)
    account.settle(before, 1.0, answered=True)
    assert budget.views(1.0)["requests"].left == 1.0
    message = budget.message()
    assert message is not None
    assert message.ended == {"requests": 1.0}
    assert [amount for _, amount in message.rows["requests"]] == [1.0]


# -- calls of different costs -----------------------------------------------------------------------------------------


@virtual
async def test_h10_a_process_that_holds_a_part_can_get_all() -> None:
    pool = share(SharedMemory(), TOKENS)
    await pool.run(ident, cost=10)
    assert await pool.run(ident, cost=100, wait_for_capacity=True) == "a"
    assert clock.now() == pytest.approx(10.0, abs=1.0)


@virtual
async def test_h10_processes_that_each_want_all_take_turns() -> None:
    place = SharedMemory()
    pools = [share(place, TOKENS) for _ in range(3)]
    for pool in pools:
        await pool.run(ident, cost=10)
    await asyncio.gather(*(pool.run(ident, cost=100, wait_for_capacity=True) for pool in pools))
    assert clock.now() <= 45


@virtual
async def test_h10_costs_may_be_fractions() -> None:
    place = SharedMemory()
    pools = [share(place, TOKENS) for _ in range(2)]
    for number in range(20):
        for pool in pools:
            await pool.run(ident, cost=1.1 + number / 7, wait_for_capacity=True)
    began = clock.now()
    await asyncio.gather(*(pool.run(ident, cost=100, wait_for_capacity=True) for pool in pools))
    assert clock.now() - began <= 31


@virtual
async def test_h10_what_a_call_reserved_and_did_not_spend_goes_to_other_processes_at_once() -> None:
    place, gate = SharedMemory(), Gate()
    one, other = share(place, TOKENS), share(place, TOKENS)

    async def cheaper(key: Resource[str]) -> None:
        await gate(key)
        key.spent(5)

    running = asyncio.create_task(one.run(cheaper, cost=60, wait_for_capacity=True))
    await settle()
    waiting = asyncio.create_task(other.run(ident, cost=90, wait_for_capacity=True))
    await asyncio.sleep(3)
    gate.finish(0)
    await running
    assert await waiting == "a"
    assert clock.now() <= 4


@virtual
async def test_h10_a_large_call_is_not_kept_out_by_small_ones_of_another_process() -> None:
    place = SharedMemory()
    store = place.member()
    many, one = share(store, TOKENS), share(place, TOKENS)
    asked = count_exchanges(store)
    served: list[str] = []

    async def call(pool: ResourcePool[str], name: str, cost: float) -> None:
        await pool.run(ident, cost=cost, wait_for_capacity=True)
        served.append(name)

    async def stream_of_small_calls() -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(80):
                group.create_task(call(many, "small", 10))
                await asyncio.sleep(0.5)

    async with asyncio.TaskGroup() as group:
        group.create_task(stream_of_small_calls())
        await asyncio.sleep(3.25)
        group.create_task(call(one, "large", 90))
    assert served.index("large") < 20
    assert len(asked) < 300


@pytest.mark.parametrize("how", ["cancelled", "without a wait mode"])
def test_h10_a_large_call_that_gave_up_keeps_nobody_waiting(how: str) -> None:
    @virtual
    async def scenario() -> None:
        place = SharedMemory()
        one, other = share(place, TOKENS), share(place, TOKENS)
        await one.run(ident, cost=60, wait_for_capacity=True)
        if how == "cancelled":
            large = asyncio.create_task(other.run(ident, cost=90, wait_for_capacity=True))
            await asyncio.sleep(1)
            large.cancel()
            await asyncio.wait([large])
        else:
            with pytest.raises(PoolExhausted):
                await other.run(ident, cost=90)
        assert await one.run(ident, cost=30, wait_for_capacity=True, within=5) == "a"

    scenario()


@virtual
async def test_h10_a_cost_that_only_the_own_quota_allows_fails_and_keeps_nobody_waiting() -> None:
    place = SharedMemory()
    small, large = share(place, TOKENS), share(place, at_once(tokens=1000, per=10.0))
    with pytest.raises(PoolExhausted, match="cost=500"):
        await large.run(ident, cost=500, wait_for_capacity=True)
    assert await small.run(ident, cost=90, wait_for_capacity=True, within=5) == "a"


@virtual
async def test_h10_processes_do_not_ask_for_a_quota_that_they_cannot_use_now() -> None:
    """Two of them, whose key cools down: what is left of the quota does not go to and fro between them."""
    place = SharedMemory()
    stores = [place.member(), place.member()]
    one, other = [share(store, at_once(requests=10, per=10.0)) for store in stores]
    asked = [count_exchanges(store) for store in stores]

    async def refused(key: Resource[str]) -> None:
        raise CooldownResource(30.0)

    with pytest.raises(PoolExhausted):
        await one.run(refused)
    await settle()
    waiting = [asyncio.create_task(pool.run(ident, wait_for_capacity=True)) for pool in (one, other) for _ in range(20)]
    await asyncio.sleep(29)
    assert not any(task.done() for task in waiting)
    assert sum(map(len, asked)) <= 40
    await asyncio.gather(*waiting)
    assert clock.now() <= 75


@virtual
async def test_h10_permits_do_not_go_to_and_fro_between_calls_for_which_a_quota_has_too_little() -> None:
    """The quota is open, so a process that has the permit keeps it until there is enough for its call."""
    place = SharedMemory()
    stores = [place.member(), place.member()]
    quota = at_once(requests=3, tokens=100, per=10.0, delay=0.0)
    limits = {"a": (quota, None), "b": (at_once(tokens=100, per=10.0, delay=0.0), 2)}
    pools = [
        ResourcePool(
            [Resource(name, name, quota=one, max_in_flight=most) for name, (one, most) in limits.items()],
            name="keys",
            store=store,
        )
        for store in stores
    ]
    asked = [count_exchanges(store) for store in stores]
    await asyncio.sleep(3.5)
    calls = [asyncio.create_task(pools[1].run(ident, cost=cost, wait_for_capacity=True)) for cost in (1, 100)]
    await asyncio.sleep(3)
    calls.append(asyncio.create_task(pools[0].run(lambda key: asyncio.sleep(1.0, "slow"), wait_for_capacity=True)))
    await asyncio.sleep(0.5)
    calls.append(asyncio.create_task(pools[0].run(ident, cost=50, wait_for_capacity=True)))
    await asyncio.gather(*calls)
    assert sum(map(len, asked)) <= 60
