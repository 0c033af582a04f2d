"""What a TaskPool does: order, backpressure, retries, timeouts, nested waits, idempotency, closing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from functools import partial
from typing import Any

from headgate import TaskPool, fair_round_robin, fair_share, pool_create, pool_wait, spawn_to_pool
from headgate.tasks import backpressure_queue, fail_fast, ring_buffer
from headgate.testing import settle
from tests.unit.traces.traces import Trace, scenario


async def slow(seconds: float, value: Any = "done") -> Any:
    await asyncio.sleep(seconds)
    return value


async def broken(text: str = "broken") -> None:
    await asyncio.sleep(1)
    raise LookupError(text)


class Flaky:
    """Fails so many times, and then not any more."""

    def __init__(self, failures: int) -> None:
        self.left = failures

    async def run(self) -> str:
        await asyncio.sleep(1)
        self.left -= 1
        if self.left >= 0:
            raise LookupError(f"{self.left} left")
        return "at last"


async def order_of(trace: Trace, name: str, **options: Any) -> None:
    """Queue the same tasks behind one that runs: in which order do they start?"""
    order: list[str] = []

    async def body(label: str) -> str:
        order.append(label)
        await asyncio.sleep(1)
        return label

    async with TaskPool(name, **options) as pool:
        await pool.submit(slow, 5)
        for number in range(12):
            key = "aab"[number % 3] if number < 9 else "c"
            cost = 1.0 + number % 2
            await pool.submit(body, f"{key}{number}", priority=number % 4, key=key, cost=cost)
        trace.look("queued", pool)
        await pool.drain()
        trace.note("order", order)
        trace.look("drained", pool)


@scenario
async def tasks_order_fifo(trace: Trace) -> None:
    await order_of(trace, "fifo", queue="fifo")


@scenario
async def tasks_order_lifo(trace: Trace) -> None:
    await order_of(trace, "lifo", queue="lifo")


@scenario
async def tasks_order_priority(trace: Trace) -> None:
    await order_of(trace, "priority", queue="priority")


@scenario
async def tasks_order_fair_round_robin(trace: Trace) -> None:
    await order_of(trace, "fair_round_robin", queue=fair_round_robin())


@scenario
async def tasks_order_fair_share(trace: Trace) -> None:
    await order_of(trace, "fair_share", queue=fair_share(weights={"a": 2.0, "c": 0.5}), max_concurrent=2)


@scenario
async def tasks_order_with_caps_and_partitions(trace: Trace) -> None:
    async with TaskPool(
        "caps", queue=fair_round_robin("tenant_id"), max_concurrent=3, max_concurrent_per_key={"a": 1}
    ) as pool:
        handles = [
            await pool.submit(slow, 2, f"{key}{turn}", key=key, tenant_id=f"t-{turn % 2}", labels={"turn": turn})
            for turn in range(3)
            for key in "aab"
        ]
        await asyncio.sleep(1)
        trace.look("capped", pool)
        pool.limit_keys(None)
        pool.resize(2)
        trace.look("resized", pool)
        await pool.drain()
        trace.look("drained", pool)
        trace.tell(*handles[:3])


@scenario
async def tasks_backpressure(trace: Trace) -> None:
    policies: dict[str, Any] = {
        "block_submitter": backpressure_queue(2),
        "fail_submitter": backpressure_queue(2, "fail_submitter"),
        "drop_oldest": backpressure_queue(2, "drop_oldest"),
        "drop_newest": backpressure_queue(2, "drop_newest"),
        "drop_fair": backpressure_queue(3, "drop_fair"),
        "fail_fast": fail_fast(),
        "ring_buffer": ring_buffer(2),
    }
    for name, policy in policies.items():
        async with TaskPool(name, queue="fifo", backpressure=policy) as pool:
            submits = []
            for number in range(6):
                submit = pool.submit(slow, 1, number, key="ab"[number == 3], wait_timeout=2.5)
                submits.append(asyncio.ensure_future(trace.outcome(f"submit {number}", submit)))
                await settle()
            trace.look("full", pool)
            await trace.outcome("nowait", _nowait(pool))
            await asyncio.gather(*submits)
            await pool.drain()
            trace.look("drained", pool)
            rejected = [handle for handle in trace.handles if handle.pool == name and handle.status == "rejected"]
            trace.tell(*rejected)
            for handle in rejected[:1]:
                await trace.outcome("awaited", handle)


async def _nowait(pool: TaskPool) -> Any:
    return pool.submit_nowait(slow, 1, "nowait")


@scenario
async def tasks_retries_timeouts_and_limits(trace: Trace) -> None:
    async with TaskPool("limits", max_concurrent=2) as pool:
        handles = {
            "retried": await pool.submit(Flaky(2).run, retries=3),
            "gives up": await pool.submit(Flaky(5).run, retries=1),
            "times out": await pool.submit(slow, 60, timeout=2),
            "times out twice": await pool.submit(slow, 60, timeout=2, retries=1),
            "expires": await pool.submit(slow, 1, ttl=1.5),
            "deadline": await pool.submit(slow, 1, deadline=0.5),
            "delayed": await pool.submit(slow, 1, delay=30),
            "late": await pool.submit(slow, 1, delay=20, ttl=10),
            "fails": await pool.submit(broken),
            "thread": await pool.submit(str.upper, "threads", labels={"kind": "plain"}),
            "partial": await pool.submit(partial(slow, 1, value="by name"), key="k", priority=-1),
        }
        await asyncio.sleep(1)
        trace.look("begun", pool)
        for name, handle in handles.items():
            await trace.outcome(name, handle)
        trace.tell(*handles.values())
        trace.look("ended", pool)


@scenario
async def tasks_nested_waits_lend_slots(trace: Trace) -> None:
    async with TaskPool("outer") as outer, TaskPool("inner", max_concurrent=2) as inner:

        async def child(number: int) -> int:
            await asyncio.sleep(1)
            return number

        async def parent() -> Any:
            here = await outer.submit(child, 1)
            there = [await inner.submit(child, number) for number in (2, 3, 4)]
            first = await here
            trace.look("waiting", outer)
            snapshots = await pool_wait(there)
            return first + sum(snapshot.result for snapshot in snapshots)

        handle = await outer.submit(parent)
        other = await outer.submit(child, 10)
        await asyncio.sleep(0.5)
        trace.look("lent", outer)
        await trace.outcome("parent", handle)
        await trace.outcome("other", other)
        trace.tell(handle, other)
        trace.look("outer", outer)
        trace.look("inner", inner)


@scenario
async def tasks_wait_cycles(trace: Trace) -> None:
    async with TaskPool("left") as left, TaskPool("right") as right:
        handles: dict[str, Any] = {}

        async def body(other: str) -> Any:
            await asyncio.sleep(1)
            return await handles[other]

        async def drains() -> None:
            await left.drain()

        handles["a"] = await left.submit(body, "b")
        handles["b"] = await right.submit(body, "a")
        for name, handle in handles.items():
            await trace.outcome(name, handle)
        own = await left.submit(drains)
        await trace.outcome("drains its own pool", own)
        trace.tell(*handles.values(), own)
        trace.look("left", left)


@scenario
async def tasks_idempotency(trace: Trace) -> None:
    async with TaskPool("keys", max_concurrent=2) as pool:
        for window in ("while_active", "until_success", "forever", 10.0):
            key = f"work-{window}"
            first = await pool.submit(slow, 1, "first", idempotency_key=key, window=window)
            again = await pool.submit(slow, 1, "first", idempotency_key=key, window=window)
            trace.note("same while active", first is again)
            await first
            after = await pool.submit(slow, 1, "first", idempotency_key=key, window=window)
            trace.note("same after success", first is after)
            await after
            await asyncio.sleep(20)
            later = await pool.submit(slow, 1, "first", idempotency_key=key, window=window)
            trace.note("same later", first is later)
            await later
            bad = await pool.submit(broken, idempotency_key=f"{key}-bad", window=window)
            await trace.outcome("fails", bad)
            trace.note("same after failure", bad is await pool.submit(broken, idempotency_key=f"{key}-bad"))
            await trace.outcome("conflict", pool.submit(slow, 2, "other", idempotency_key=key))
        await pool.drain()
        trace.look("at the end", pool)


@scenario
async def tasks_closing_and_cancelling(trace: Trace) -> None:
    pool = pool_create({"name": "closing", "max_concurrent": 2, "stale_after_ms": 1000})
    handles = [await pool.submit(slow, 10, number) for number in range(5)]
    await asyncio.sleep(1)
    trace.note("cancels", [handles[0].cancel(), handles[4].cancel(), handles[4].cancel()])
    await settle()
    trace.look("two cancelled", pool)
    closing = asyncio.ensure_future(pool.close())
    await settle()
    trace.look("closing", pool)
    await trace.outcome("too late", pool.submit(slow, 1))
    await asyncio.sleep(1)
    await pool.close(cancel=True)
    await closing
    trace.look("closed", pool)
    for handle in handles:
        await trace.outcome(handle.label, handle)
    trace.tell(*handles)

    unseen = TaskPool("unseen")
    kept = await unseen.submit(broken, "nobody looks")
    await unseen.close()
    trace.look("unseen", unseen)
    trace.tell(kept)

    async def block() -> None:
        async with TaskPool("block") as inner:
            trace.handles.append(await inner.submit(slow, 100))
            trace.handles.append(await inner.submit(slow, 100))
            await asyncio.sleep(1)
            raise KeyError("out of the block")

    await trace.outcome("block", block())
    trace.tell(*trace.handles[-2:])


@scenario
async def tasks_map_stream_and_triggers(trace: Trace) -> None:
    async with TaskPool("flow", max_concurrent=3) as pool:

        async def square(number: int) -> int:
            await asyncio.sleep(5 - number)
            if number == 3:
                raise LookupError("three")
            return number * number

        results = [item async for item in pool.map(square, range(5), window=3, return_exceptions=True)]
        trace.note("map", [item if isinstance(item, int) else type(item).__name__ for item in results])
        loose = pool.map(square, [0, 1, 2], ordered=False)
        trace.note("unordered", [item async for item in loose])

        async def whole() -> list[int]:
            return [item async for item in pool.map(square, range(6), window=2)]

        await trace.outcome("map that fails", whole())

        async def items(stop: int) -> AsyncGenerator[int, None]:
            try:
                for number in range(stop):
                    await asyncio.sleep(1)
                    yield number
            finally:
                trace.note("closed")

        trace.note("stream", [item async for item in pool.stream(items, 3, key="s")])
        early = pool.stream(items, 9)
        trace.note("first", await anext(early))
        trace.look("streaming", pool)
        await early.aclose()
        handler = spawn_to_pool("flow", lambda event: partial(slow, 1, event["id"]), "meta.rank", "user.id")
        handle = await handler({"id": 5, "meta": {"rank": "7"}, "user": {"id": 42}})
        await trace.outcome("event", handle)
        trace.tell(handle)
        trace.look("at the end", pool)
