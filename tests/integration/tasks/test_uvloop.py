"""A smoke test on uvloop: queues, waiting submitters, nested waits, threads, timeouts and cancels on another loop."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from headgate import TaskCancelled, TaskPool, WaitCycle, backpressure_queue, fair_round_robin, pool_wait
from tests.support.tasks.support import Barrier, counts, never_above_the_cap, order_behind_a_gate, quick, slow, until

uvloop = pytest.importorskip("uvloop", reason="pip install headgate[speed]")
uvloop.new_event_loop().close()  # libuv opens a pipe of its own, once for the process: not a leak of any test


def run(main: Any) -> Any:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main())


def test_order_door_and_map() -> None:
    async def main() -> None:
        async with TaskPool(queue=fair_round_robin()) as pool:
            submits = [(name, {"key": name[0]}) for name in ("a1", "a2", "b1", "a3", "b2")]
            assert await order_behind_a_gate(pool, *submits) == ["a1", "b1", "a2", "b2", "a3"]
        async with TaskPool(max_concurrent=2, backpressure=backpressure_queue(1)) as pool:

            async def submitter(number: int) -> int:
                return await (await pool.submit(slow, 0.001, number))

            assert await asyncio.gather(*[submitter(n) for n in range(20)]) == list(range(20))
            assert [one async for one in pool.map(quick, range(20))] == list(range(20))

    run(main)


def test_nested_work_and_cycles() -> None:
    async def main() -> None:
        async with TaskPool(max_concurrent=2) as pool:

            async def node(depth: int) -> int:
                if not depth:
                    return 1
                children = [await pool.submit(node, depth - 1) for _ in range(2)]
                return sum([await child for child in children])

            with never_above_the_cap(pool):
                assert await (await pool.submit(node, 5)) == 32
            mine: list[Any] = []

            async def ring() -> Any:
                await asyncio.sleep(0)
                return await mine[0]

            mine.append(await pool.submit(ring))
            with pytest.raises(WaitCycle):
                await mine[0]

    run(main)


def test_timeouts_cancels_and_threads() -> None:
    async def main() -> None:
        barrier = Barrier()
        async with TaskPool() as pool:
            late = await pool.submit(slow, 60, timeout=0.01)
            with pytest.raises(TimeoutError):
                await late
            stopped, queued = await pool.submit(slow, 60), await pool.submit(slow, 60, ttl=0.01)
            assert (await pool_wait(queued)).status == "expired"
            stopped.cancel()
            with pytest.raises(TaskCancelled):
                await stopped
            thread = await pool.submit(barrier.wait)
            await until(lambda: barrier.entered.acquire(blocking=False))
            thread.cancel()
            barrier.released.set()
            assert (await pool_wait(thread)).status == "cancelled"
            assert await (await pool.submit(len, "abc")) == 3
            assert await (await pool.submit(quick, delay=0.01)) == "done"
        assert counts(pool) == {"failed": 1, "expired": 1, "cancelled": 2, "completed": 2}

    run(main)
