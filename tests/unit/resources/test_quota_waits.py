"""H10: calls that wait for a quota are served as soon as there is some, whatever becomes of others that wait for it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from headgate import CooldownResource, PoolExhausted, Resource, ResourcePool, TaskPool
from headgate.core.clock import clock
from headgate.testing import settle, virtual
from tests.support.resources.support import Gate, at_once, ident
from tests.unit.resources.test_quotas import limited, took

TOKENS = at_once(tokens=100, per=10.0)


async def waits(pool: ResourcePool[str], cost: float = 0.0, **options: Any) -> asyncio.Task[str]:
    """A call that has begun to wait, unless it was served at once."""
    task = asyncio.create_task(took(pool, cost=cost, wait_for_capacity=True, **options))
    await settle()
    return task


async def running(pool: ResourcePool[str], gate: Gate, **options: Any) -> asyncio.Task[object]:
    """A call that runs until its gate ends it."""
    task = asyncio.create_task(pool.run(gate, **options))
    await settle()
    return task


def spending_nothing(ends: asyncio.Event) -> Callable[[Resource[str]], Awaitable[None]]:
    """An operation that spends nothing of its cost, and says so when it ends."""

    async def operation(key: Resource[str]) -> None:
        await ends.wait()
        key.spent(0)

    return operation


# -- groups over several pools ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", range(7))
def test_h10_a_call_cancelled_at_any_point_gives_way_to_one_of_another_pool(steps: int) -> None:
    """While it waits, when it was granted the quota and has not begun, while it runs, when it has ended."""

    @virtual
    async def scenario() -> None:
        quota, group = at_once(requests=1, per=10.0, delay=0.0), f"cancelled {steps}"
        one, other = limited("a", quota=quota, group=group), limited("b", quota=quota, group=group)
        await took(one)
        gate = Gate()
        first = asyncio.create_task(one.run(gate, wait_for_capacity=True))
        await settle()
        second = await waits(other)
        with pytest.raises(PoolExhausted) as caught:
            await took(one)
        await asyncio.sleep(caught.value.retry_after or 0.0)
        for _ in range(steps):
            await asyncio.sleep(0)
        first.cancel()
        await asyncio.wait([first])
        assert await second == "b"
        assert clock.now() <= (21.0 if gate.entered else 11.0)

    scenario()


@virtual
async def test_h10_a_quota_is_not_kept_for_a_call_whose_resource_is_disabled() -> None:
    one = ResourcePool([Resource("a", "a", quota=TOKENS, quota_group="disabled"), Resource("c", "c", max_in_flight=1)])
    other, gate = limited("b", quota=TOKENS, group="disabled"), Gate()
    await took(other, cost=50)
    busy = await running(one, gate, exclude=["a"])
    large, small = await waits(one, 90), await waits(other, 10)
    assert not small.done()
    await one.disable("a")
    assert await small == "b"
    assert clock.now() == 0
    gate.finish(0)
    assert (await busy, await large) == ("done", "c")


@virtual
async def test_h10_a_quota_is_not_kept_for_a_call_whose_resource_is_removed() -> None:
    one = ResourcePool([Resource("a", "a", quota=TOKENS, quota_group="removed"), Resource("c", "c", max_in_flight=1)])
    other, gate = limited("b", quota=TOKENS, group="removed"), Gate()
    await took(other, cost=50)
    busy = await running(one, gate, exclude=["a"])
    large, small = await waits(one, 90), await waits(other, 10)
    await one.remove("a")
    assert await small == "b"
    assert clock.now() == 0
    gate.finish(0)
    assert (await busy, await large) == ("done", "c")


@virtual
async def test_h10_a_quota_is_not_kept_for_a_call_whose_resource_cools_down() -> None:
    one, other = limited("a", quota=TOKENS, group="cools"), limited("b", quota=TOKENS, group="cools")
    gate = Gate()
    refused = await running(one, gate, cost=50)
    large, small = await waits(one, 90), await waits(other, 10)
    assert not small.done()
    gate.finish(0, CooldownResource(3600))
    with pytest.raises(PoolExhausted):
        await refused
    assert await small == "b"
    assert clock.now() == 0
    assert await large == "a"
    assert clock.now() == 3600


@virtual
async def test_h10_a_quota_is_not_kept_for_a_call_whose_resource_is_in_full_use() -> None:
    one = ResourcePool([Resource("a", "a", quota=TOKENS, quota_group="full", max_in_flight=1)])
    other, gate = limited("b", quota=TOKENS, group="full"), Gate()
    busy = await running(one, gate)
    large = await waits(one, 90)
    assert await took(other, cost=5) == "b"
    gate.finish(0)
    assert (await busy, await large) == ("done", "a")


@virtual
async def test_h10_a_quota_is_not_kept_for_a_call_that_was_served_elsewhere() -> None:
    pool = ResourcePool(
        [
            Resource("a", "a", quota=TOKENS, quota_group="elsewhere", max_in_flight=1, tags=["x"]),
            Resource("c", "c", max_in_flight=1, tags=["x"]),
            Resource("b", "b", quota_group="elsewhere", tags=["y"]),
        ]
    )
    gate = Gate()
    busy = [await running(pool, gate, tags=["x"]) for _ in range(2)]
    either, only = await waits(pool, 50, tags=["x"]), await waits(pool, 10, tags=["y"])
    gate.finish(gate.entered.index("c"))
    assert await either == "c"
    assert await only == "b"
    gate.finish(gate.entered.index("a"))
    await asyncio.gather(*busy)


@virtual
async def test_h10_a_quota_is_not_kept_for_a_call_that_was_told_that_nothing_can_come() -> None:
    one, other = limited("a", quota=TOKENS, group="hopeless"), limited("b", quota=TOKENS, group="hopeless")
    await took(other, cost=50)
    large, small = await waits(one, 90), await waits(other, 10)
    assert not small.done()
    await one.remove("a")
    with pytest.raises(PoolExhausted):
        await large
    assert await small == "b"
    assert clock.now() == 0


@virtual
async def test_h10_reconcile_moves_a_resource_into_a_group_whose_quota_is_spent() -> None:
    quota = at_once(requests=1, per=10.0, delay=0.0)
    one, other = limited("a", quota=quota, group="joined"), ResourcePool([Resource("b", "b")])
    await took(one)
    await other.reconcile([Resource("b", "b", quota=quota, quota_group="joined")])
    assert await took(other, wait_for_capacity=True) == "b"
    assert clock.now() == pytest.approx(10.0, abs=0.2)


@virtual
async def test_h10_reconcile_moves_a_resource_out_of_a_group_that_was_kept_for_it() -> None:
    one, other = limited("a", quota=TOKENS, group="left"), limited("b", quota=TOKENS, group="left")
    await took(other, cost=50)
    large, small = await waits(one, 90), await waits(other, 10)
    assert not small.done()
    await one.reconcile([Resource("a", "a", quota=TOKENS)])
    assert (await large, await small) == ("a", "b")
    assert clock.now() == 0


@virtual
async def test_h10_a_task_that_takes_less_than_was_kept_for_it_leaves_the_rest_to_others() -> None:
    """The place of the tasks in the queue has the cost of the first. When its turn comes, another task is first."""
    pool, gate = limited("a", quota=TOKENS), Gate()

    async def ask(key: Resource[str]) -> str:
        return key.resource_id

    async with TaskPool("asks", max_concurrent=1, resources=pool) as tasks:
        busy = await running(pool, gate, cost=50)
        large = await tasks.submit(ask, cost=90)
        small = await tasks.submit(ask, cost=10)
        await settle()
        call = await waits(pool, 60)
        large.cancel()
        gate.finish(0)
        await busy
        assert await small == "a"
        assert await call == "a"
        assert clock.now() <= 11


@virtual
async def test_h10_calls_with_and_without_a_cost_wait_for_one_group() -> None:
    quota = at_once(requests=3, per=10.0, delay=0.0)
    one, other = limited("a", quota=quota, group="mixed"), limited("b", quota=quota, group="mixed")
    calls = [await waits(one) for _ in range(7)]
    calls += [await waits(other, 1), await waits(other)]
    await asyncio.gather(*calls)
    assert clock.now() == pytest.approx(25.0, abs=0.5)  # three at once, then three in each 10 s


@virtual
async def test_h10_a_call_that_waited_for_a_busy_resource_goes_on_to_wait_for_its_quota() -> None:
    pool = ResourcePool([Resource("a", "a", quota=TOKENS, max_in_flight=1)])
    gate = Gate()
    busy = await running(pool, gate, cost=50)
    call = await waits(pool, 90)
    gate.finish(0)
    await busy
    assert await call == "a"
    assert clock.now() == pytest.approx(10.0, abs=0.2)


# -- several quotas that a call may wait for --------------------------------------------------------------------------


@virtual
async def test_h10_a_call_is_served_by_the_first_quota_that_has_enough() -> None:
    """It holds that of a call that runs: nobody knows when that ends. The other one opens at a time that is known."""
    pool, gate = limited("a", "b", quota=TOKENS), Gate()
    first = await running(pool, gate, cost=50)
    assert await took(pool, cost=60) == "b"
    waiting = await waits(pool, 100)
    await asyncio.sleep(11)
    assert waiting.done()
    assert await waiting == "b"
    gate.finish(0)
    await first


@virtual
async def test_h10_a_call_is_served_by_a_group_when_a_call_of_another_pool_did_not_spend_its_cost() -> None:
    """The call that waits holds another quota, and the group was never closed."""
    one = limited("a", quota=TOKENS, group="not spent")
    both = ResourcePool(
        [
            Resource("b", "b", quota=TOKENS, quota_group="not spent"),
            Resource("c", "c", quota=at_once(tokens=100, per=5.0)),
        ]
    )
    ends = asyncio.Event()
    first = asyncio.create_task(one.run(spending_nothing(ends), cost=50))
    assert await took(both, cost=100, exclude=["b"]) == "c"
    waiting = await waits(both, 90)
    ends.set()
    await first
    assert await waiting == "b"
    assert clock.now() < 1


@virtual
async def test_h10_a_call_behind_one_that_gave_up_is_served_by_a_quota_that_had_too_little_for_that() -> None:
    spent = Resource("a", "a", quota=at_once(requests=1, tokens=100, per=10.0))
    pool = ResourcePool([spent, Resource("b", "b", quota=at_once(tokens=100, per=20.0))], strategy="primary_backup")
    assert [await took(pool, cost=40) for _ in range(2)] == ["a", "b"]
    ends = asyncio.Event()
    running = asyncio.create_task(pool.run(spending_nothing(ends), cost=20))
    await settle()
    first, second = await waits(pool, 70), await waits(pool, 50)
    ends.set()
    await running
    assert not first.done()
    assert not second.done()
    first.cancel()
    assert await second == "b"
    assert clock.now() < 1


@virtual
async def test_h10_when_a_call_that_held_a_quota_gives_up_others_are_served_as_soon_as_it_opens() -> None:
    quota, group = at_once(requests=3, tokens=100, per=10.0, delay=0.0), "given up"
    one, other = limited("a", quota=quota, group=group), limited("b", quota=quota, group=group)
    for _ in range(2):
        await one.run(ident)
    await asyncio.sleep(0.5)
    await one.run(ident, cost=1)
    call = asyncio.create_task(one.run(ident, wait_for_capacity=True))
    await settle()
    large = asyncio.create_task(other.run(ident, cost=100, wait_for_capacity=True))
    await settle()
    large.cancel()
    assert await call == "a"
    assert clock.now() == pytest.approx(10.0, abs=0.2)
