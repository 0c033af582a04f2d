"""What a TaskPool with resources= does: verdicts, requeues, parked requirements, wait cycles."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from headgate import CooldownResource, DisableResource, Resource, ResourcePool, RetryOperation, TaskPool
from headgate.testing import settle
from tests.unit.traces.resource_scenarios import ident, keys, raising
from tests.unit.traces.traces import Trace, scenario


@scenario
async def combined_verdicts_and_requeues(trace: Trace) -> None:
    resources = keys("a", "b", "c", strategy="primary_backup")
    async with TaskPool("line", resources=resources, max_concurrent=2) as pool:
        handles = {
            "cools": await pool.submit(raising(CooldownResource(30, "429"))),
            "disables": await pool.submit(raising(DisableResource("revoked")), key="t"),
            "retries": await pool.submit(raising(RetryOperation("odd")), max_attempts=5),
            "gives up": await pool.submit(raising(*[RetryOperation(f"no {n}") for n in range(3)])),
            "fails": await pool.submit(raising(LookupError("own"))),
            "fails and is retried": await pool.submit(raising(LookupError("own")), retries=1),
            "times out": await pool.submit(raising(seconds=50), timeout=2),
            "returns": await pool.submit(ident, priority=9),
        }
        trace.look("submitted", pool)
        for name, handle in handles.items():
            await trace.outcome(name, handle)
        trace.tell(*handles.values())
        trace.look("ended", pool)
        trace.look("resources", resources)


@scenario
async def combined_siblings_go_back(trace: Trace) -> None:
    resources = keys("a", "b", strategy="primary_backup")
    async with TaskPool("line", resources=resources, max_concurrent=5) as pool:
        first = [True]

        async def body(key: Resource[str], seconds: float) -> str:
            await asyncio.sleep(seconds)
            if seconds == 2 and first:
                first.pop()
                raise CooldownResource(60, "overloaded")
            return key.resource_id

        handles = []
        for seconds in (3, 2, 4, 5):
            handles.append(await pool.submit(body, seconds))
            await asyncio.sleep(0.25)
        await pool.drain()
        for handle in handles:
            await trace.outcome(handle.label, handle)
        trace.tell(*handles)
        trace.look("ended", pool)
        trace.look("resources", resources)


@scenario
async def combined_requirements_are_parked(trace: Trace) -> None:
    resources = ResourcePool(
        [
            Resource("a", "sk-frozen-a", 1, tags=["fast"]),
            Resource("b", "sk-frozen-b", 1, tags=["slow"]),
        ],
        name="keys",
    )
    async with TaskPool("line", resources=resources, max_concurrent=4, queue="fair_round_robin") as pool:
        fast = [await pool.submit(raising(seconds=3), tags=["fast"], key=f"t-{n % 2}") for n in range(3)]
        slow = await pool.submit(raising(seconds=1), tags=["slow"], key="t-1")
        nobody = await pool.submit(ident, tags=["none such"], ttl=20)
        excluded = await pool.submit(ident, exclude=["a"])
        await asyncio.sleep(0.5)
        trace.look("parked", pool)
        trace.tell(*fast, slow, nobody, excluded)
        await resources.disable("a")
        await asyncio.sleep(5)
        trace.tell(*fast)
        cancelled = await pool.submit(ident, tags=["fast"], affinity="user")
        cancelled.cancel()
        await resources.enable("a")
        await asyncio.sleep(1)
        await resources.add("c", "sk-frozen-c", tags=["fast"])
        await pool.drain()
        await trace.outcome("nobody", nobody)
        trace.tell(*fast, slow, nobody, excluded, cancelled)
        trace.look("ended", pool)
        trace.look("resources", resources)


@scenario
async def combined_all_resources_rest(trace: Trace) -> None:
    resources = keys("a", "b", cooldown_table=[10.0, 100.0])
    async with TaskPool("line", resources=resources, max_concurrent=3) as pool:
        storm = [CooldownResource(reason=f"429 {n}") for n in range(5)]
        operation = raising(*storm)
        handles = [await pool.submit(operation, max_attempts=6) for _ in range(3)]
        await asyncio.sleep(5)
        trace.look("all rest", pool)
        trace.tell(*handles)
        await pool.drain()
        trace.tell(*handles)
        trace.look("ended", pool)
        trace.look("resources", resources)


@scenario
async def combined_wait_cycles(trace: Trace) -> None:
    resources = keys("only", limit=1)
    async with TaskPool("line", resources=resources, max_concurrent=5) as pool:

        async def outer(key: Resource[str]) -> str:
            await trace.outcome("inner", await pool.submit(ident))
            return "noticed"

        await trace.outcome("outer", await pool.submit(outer))
    two = keys("a", "b", limit=1, strategy="primary_backup")
    async with TaskPool("one", resources=two, max_concurrent=3) as one:
        async with TaskPool("two", resources=two, max_concurrent=3) as other:

            async def crosses(key: Resource[str]) -> str:
                await trace.outcome("crosses", await other.submit(ident))
                return "noticed"

            async with two.lease(exclude=["a"]):
                handle = await one.submit(crosses)
                await asyncio.sleep(1)
                await two.disable("b")
                await asyncio.sleep(1)
            await trace.outcome("crossed", handle)
            trace.tell(handle)
            trace.look("one", one)
            trace.look("two", other)


@scenario
async def combined_nested_streams_and_close(trace: Trace) -> None:
    resources = keys("a", "b", limit=2)
    pool = TaskPool("line", resources=resources, max_concurrent=2)

    async def parent(key: Resource[str]) -> Any:
        children = [await pool.submit(raising(CooldownResource(5, "child"))) for _ in range(2)]
        return [await child for child in children]

    await trace.outcome("parent", await pool.submit(parent))

    async def items(key: Resource[str], stop: int) -> AsyncGenerator[str, None]:
        for number in range(stop):
            await asyncio.sleep(1)
            yield f"{key.resource_id}{number}"

    trace.note("stream", [item async for item in pool.stream(items, 3)])
    results = pool.map(_with_key, [1, 2, 3], tags=[])
    trace.note("map", [item async for item in results])
    handles = [await pool.submit(raising(seconds=30)) for _ in range(3)]
    await asyncio.sleep(1)
    await settle()
    trace.look("busy", pool)
    await pool.close(cancel=True)
    trace.tell(*handles)
    trace.look("closed", pool)
    trace.look("resources", resources)


async def _with_key(key: Resource[str], item: int) -> str:
    await asyncio.sleep(1)
    return f"{key.resource_id}{item}"
