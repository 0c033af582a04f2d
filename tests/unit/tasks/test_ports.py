"""The runner port: what a task needs besides a slot."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from headgate import PoolBusy, TaskPool, fail_fast, fifo, pool_wait
from headgate.tasks.model import TaskRecord
from headgate.testing import virtual


class Keys:
    """So many permits. Runs a task with the number of its permit before its arguments."""

    def __init__(self, permits: int) -> None:
        self.free = list(range(permits))
        self.asked = 0
        self.most = 0
        self.out = 0
        self.ready: Callable[[], None] = lambda: None

    def reserve(self, task: TaskRecord) -> int | None:
        self.asked += 1
        if not self.free:
            return None
        self.out += 1
        self.most = max(self.most, self.out)
        return self.free.pop()

    def on_ready(self, callback: Callable[[], None]) -> None:
        self.ready = callback

    def release(self, permit: int) -> None:
        self.out -= 1
        self.free.append(permit)
        self.ready()

    async def run(self, task: TaskRecord, permit: int) -> Any:
        try:
            return await task.fn(permit, *task.args)  # type: ignore[misc]
        finally:
            self.release(permit)


async def work(permit: int, number: int) -> int:
    await asyncio.sleep(1)
    return number


@virtual
async def test_a_task_needs_a_slot_and_a_permit_and_queues_until_it_has_both() -> None:
    keys = Keys(2)
    async with TaskPool(max_concurrent=5, queue=fifo(), runner=keys) as pool:
        handles = [await pool.submit(work, number) for number in range(10)]
        assert (pool.snapshot().active, pool.snapshot().queued) == (2, 8)
        assert pool.snapshot().waiting_for == {"cause": "runner", "seconds": None}
        assert [await handle for handle in handles] == list(range(10))
        starts = [handle.snapshot().started_at for handle in handles]
        assert starts == sorted(starts), "whoever was refused kept its turn"
    assert (keys.most, keys.out, sorted(keys.free)) == (2, 0, [0, 1])
    assert keys.asked < 40, "the runner is not asked again before it calls back"


@virtual
async def test_a_permit_is_given_back_whatever_becomes_of_the_task() -> None:
    keys = Keys(1)
    async with TaskPool(max_concurrent=3, runner=keys) as pool:
        unstarted = await pool.submit(work, 1)
        unstarted.cancel()
        assert (await pool_wait(unstarted)).status == "cancelled"
        assert keys.free == [0]
        running = await pool.submit(work, 2)
        await asyncio.sleep(0.5)
        running.cancel()
        overdue = await pool.submit(work, 3, timeout=0.5)
        again = await pool.submit(work, 4)
        assert [task.status for task in await pool_wait([running, overdue, again])] == [
            "cancelled",
            "failed",
            "completed",
        ]
    assert keys.free == [0]


@virtual
async def test_fail_fast_without_a_permit_is_busy() -> None:
    keys = Keys(1)
    async with TaskPool(max_concurrent=3, backpressure=fail_fast(), runner=keys) as pool:
        handle = await pool.submit(work, 1)
        with pytest.raises(PoolBusy):
            await pool.submit(work, 2)
        await handle
        await (await pool.submit(work, 3))


@virtual
async def test_a_queued_task_that_is_late_needs_no_permit() -> None:
    keys = Keys(1)
    async with TaskPool(max_concurrent=3, runner=keys) as pool:
        first = await pool.submit(work, 1)
        late = await pool.submit(work, 2, ttl=0.5)
        assert [task.status for task in await pool_wait([first, late])] == ["completed", "expired"]
    assert keys.free == [0]
