"""L09: calls that wait inside tasks are served by the priority and the tenant of their task."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from headgate import Quota, Resource, ResourcePool, TaskPool, fair_round_robin, fifo, priority
from headgate.core.clock import clock
from headgate.testing import virtual
from tests.support.resources.support import Gate, at_once, ident


async def serve(
    keys: ResourcePool[str], tasks: TaskPool, submits: Sequence[dict[str, Any]], **options: Any
) -> list[str]:
    """Submit tasks that each call with a key, and return the tags of the calls in the order in which they started."""
    order: list[str] = []

    async def work(tag: str) -> None:
        async def call(key: Resource[str]) -> None:
            order.append(tag)

        await keys.run(call, wait_for_capacity=True, **options)

    handles = [await tasks.submit(work, one.pop("tag"), **one) for one in submits]
    for handle in handles:
        await handle
    return order


@virtual
async def test_l09_a_call_inside_a_task_waits_with_the_priority_of_its_task() -> None:
    keys = ResourcePool({"a": "a"}, quota=Quota(requests=10, per=10.0))
    async with TaskPool("calls", max_concurrent=100, queue=priority()) as tasks:
        async with asyncio.TaskGroup() as group:
            batch = group.create_task(serve(keys, tasks, [{"tag": "batch"} for _ in range(50)]))
            await asyncio.sleep(2.5)
            began = clock.now()
            assert await serve(keys, tasks, [{"tag": "urgent", "priority": 10}]) == ["urgent"]
            assert clock.now() - began <= 1.2
    assert len(batch.result()) == 50


@virtual
async def test_l09_tenants_take_turns_at_the_key_and_not_only_at_the_slot() -> None:
    keys = ResourcePool({"a": "a"}, quota=Quota(requests=10, per=10.0))
    async with TaskPool("calls", max_concurrent=100, queue=fair_round_robin("tenant")) as tasks:
        submits = [{"tag": "big", "tenant": "big"} for _ in range(20)] + [{"tag": "small", "tenant": "small"}] * 3
        order = await serve(keys, tasks, [dict(one) for one in submits])
    assert order[:8].count("small") == 3


@virtual
async def test_l09_a_pool_that_ignores_priority_does_so_at_the_key_too() -> None:
    keys = ResourcePool({"a": "a"}, quota=Quota(requests=10, per=10.0))
    async with TaskPool("calls", max_concurrent=100, queue=fifo()) as tasks:
        submits = [{"tag": "first"}] * 5 + [{"tag": "urgent", "priority": 9}]
        assert (await serve(keys, tasks, [dict(one) for one in submits]))[-1] == "urgent"


@virtual
async def test_l09_it_holds_for_slots_and_cooldowns_of_keys_too() -> None:
    keys = ResourcePool({"a": "a"}, max_in_flight=1)
    gate = Gate()
    busy = asyncio.create_task(keys.run(gate))
    await asyncio.sleep(0)
    async with TaskPool("calls", max_concurrent=100) as tasks:
        submits = [{"tag": str(number), "priority": number} for number in (1, 3, 2)]
        served = asyncio.create_task(serve(keys, tasks, submits))
        await asyncio.sleep(1)
        gate.finish(0)
        await busy
        assert await served == ["3", "2", "1"]


@pytest.mark.parametrize("urgent_cost", [0, 10])
def test_l09_an_urgent_call_overtakes_a_large_one_that_is_next_in_line(urgent_cost: int) -> None:
    """The large call holds the key, and there is not enough for it; there is for the urgent one."""

    @virtual
    async def scenario() -> None:
        keys = ResourcePool({"a": "a"}, quota=at_once(tokens=100, per=10.0))
        await keys.run(ident, cost=50)
        async with TaskPool("calls", max_concurrent=10) as tasks:
            large = asyncio.create_task(serve(keys, tasks, [{"tag": "large"}], cost=90))
            await asyncio.sleep(1)
            began = clock.now()
            await serve(keys, tasks, [{"tag": "urgent", "priority": 5}], cost=urgent_cost)
            assert clock.now() == began
            assert await large == ["large"]

    scenario()
