"""T15, T50: a pool keeps records of finished tasks, not their values.

A result lives as long as somebody can still ask for it: by a handle, or by an idempotency key. Looked at by weak
references to results and to what a failing function had in its frame. Most tests run the collector, so nothing depends
on time. Those named `without_the_collector` switch it off: it goes by the number of objects and not by their size, and
comes late where a thousand of them hold a gigabyte.
"""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from headgate import (
    Resource,
    ResourcePool,
    TaskFailed,
    TaskPool,
    WorkerPool,
    backpressure_queue,
    fair_round_robin,
    fair_share,
)
from headgate.testing import virtual
from tests.integration.tasks import memory_jobs

alive: weakref.WeakSet[Large] = weakref.WeakSet()


class Large:
    """Stands for a result of a megabyte."""

    def __init__(self) -> None:
        alive.add(self)


def count() -> int:
    gc.collect()
    return len(alive)


@pytest.fixture(autouse=True)
def nothing_before() -> None:
    gc.collect()
    alive.clear()


async def make(*_: Any) -> Large:
    return Large()


async def slowly(*_: Any) -> Large:
    await asyncio.sleep(0.01)
    return Large()


def plainly(*_: Any) -> Large:
    return Large()


async def fails(*_: Any) -> None:
    large = Large()
    raise ValueError(f"no {type(large).__name__}")


def fails_plainly(*_: Any) -> None:
    large = Large()
    raise ValueError(f"no {type(large).__name__}")


async def items_that_fail(*_: Any) -> AsyncGenerator[int, None]:
    large = Large()
    yield 1
    raise ValueError(f"no {type(large).__name__}")


@contextmanager
def without_the_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


async def at_most(number: int, alive: weakref.WeakSet[Any]) -> None:
    """Wait until no more are alive: a thread lets go of what it raised after it told of it."""
    async with asyncio.timeout(20):
        while len(alive) > number:  # noqa: ASYNC110 - nobody tells when an object goes
            await asyncio.sleep(0.001)


POOLS: dict[str, Callable[[], TaskPool]] = {
    "plain": lambda: TaskPool(max_concurrent=3),
    "fair": lambda: TaskPool(max_concurrent=2, queue=fair_round_robin("tenant"), max_concurrent_per_key=1),
    "keyed": lambda: TaskPool(max_concurrent=2, queue="fifo", max_concurrent_per_key=1),
    "share": lambda: TaskPool(max_concurrent=2, queue=fair_share("tenant", weights={"a": 3.0})),
    "ring": lambda: TaskPool(max_concurrent=2, backpressure={"kind": "ring_buffer", "capacity": 100}),
    "drop fair": lambda: TaskPool(max_concurrent=2, backpressure=backpressure_queue(100, "drop_fair")),
    "block": lambda: TaskPool(max_concurrent=2, backpressure=backpressure_queue(4)),
    "resources": lambda: TaskPool(max_concurrent=3, resources=ResourcePool([Resource("a", 1, tags=["x"])])),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "times": {"ttl": 1000, "deadline": 1e9, "timeout": 500},
    "delay": {"delay": 0.5},
    "retries": {"retries": 2, "labels": {"a": 1}, "priority": 3},
    "tags": {"tags": ["x"], "exclude": ["z"]},
    "a key for a while": {"idempotency_key": "k", "window": "while_active"},
}
POOL = pytest.mark.parametrize("pool", POOLS.values(), ids=POOLS)


def pools_and_options() -> Iterator[Any]:
    """Every pool and every option, and tags where there are resources; all of one with all of the other in the soak."""
    for pool in POOLS:
        for options in OPTIONS:
            usual = options == "nothing" or pool == "plain" or (pool, options) == ("resources", "tags")
            marks = () if usual else pytest.mark.soak
            yield pytest.param(POOLS[pool], OPTIONS[options], id=f"{options}-{pool}", marks=marks)


@pytest.mark.parametrize(("pool", "options"), list(pools_and_options()))
@virtual
async def test_t50_results_that_were_read_and_dropped_are_gone(
    pool: Callable[[], TaskPool], options: dict[str, Any]
) -> None:
    options = dict(options)
    async with pool() as tasks:
        # One that queues all the time, and one that runs: what is forgotten when a pool is idle is not the point.
        running = await tasks.submit(asyncio.sleep, 10_000) if tasks._executor.allocator is None else None
        if tasks._executor.allocator is None:
            options.pop("tags", options.pop("exclude", None))
        for _ in range(20):
            for fn in (make, slowly, fails):
                handle = await tasks.submit(fn, **options)
                try:
                    await handle
                except ValueError:
                    pass
            del handle
        held = count()
        assert held == 0, f"{held} of 60 are held by {[gc.get_referrers(one) for one in alive][:1]}"
        if running is not None:
            running.cancel()


@POOL
@virtual
async def test_t15_a_result_lives_as_long_as_its_handle(pool: Callable[[], TaskPool]) -> None:
    async with pool() as tasks:
        handles = [await tasks.submit(make) for _ in range(5)]
        await tasks.drain()
        assert count() == 5
        assert isinstance(tasks.snapshot().tasks[0].result, Large), "a pool shows it as long as it is there"
        assert await handles[0] is await handles[0]
        del handles[1:]
        assert count() == 1
        assert handles[0].snapshot().result is await handles[0]


@virtual
async def test_t50_a_task_that_nobody_holds_leaves_a_record() -> None:
    async with TaskPool("work") as pool:
        for fn in (make, fails):
            await pool.submit(fn, key="acme", priority=2, labels={"a": "b"})
        await pool.drain()
        assert count() == 0
        failed, completed = pool.snapshot().tasks
        assert (completed.status, failed.status) == ("completed", "failed")
        assert completed.result is None
        assert isinstance(failed.error, TaskFailed)
        assert "work#2 failed with ValueError: no Large" in str(failed.error)
        [note] = failed.error.__notes__
        assert note.startswith("Traceback (most recent call last)")
        assert "in fails" in note
        assert 'raise ValueError(f"no {type(large).__name__}")' in note
        for task in (completed, failed):
            assert (task.key, task.priority, task.attempt, dict(task.labels)) == ("acme", 2, 1, {"a": "b"})
            assert task._type == "pool_task"
            assert task.pool == "work"
            assert None not in (task.submitted_at, task.started_at, task.finished_at)


@virtual
async def test_t50_causes_are_told_too() -> None:
    async def chained() -> None:
        try:
            await fails()
        except ValueError as error:
            raise RuntimeError("second") from error

    async with TaskPool() as pool:
        await pool.submit(chained)
        await pool.drain()
        gc.collect()
        note = pool.snapshot().tasks[0].error.__notes__[0]  # type: ignore[union-attr]
        assert note.index("ValueError: no Large") < note.index("This led to") < note.index("RuntimeError: second")


@virtual
async def test_t14_an_idempotency_key_holds_the_result() -> None:
    async with TaskPool() as pool:
        await (await pool.submit(make, idempotency_key="k"))
        await (await pool.submit(make, idempotency_key="for a while", window=60))
        assert count() == 2
        assert isinstance(await (await pool.submit(make, idempotency_key="k")), Large)
        await asyncio.sleep(61)
        await (await pool.submit(asyncio.sleep, 0, idempotency_key="another"))  # windows end when somebody asks
        assert count() == 1


@pytest.mark.parametrize("ordered", [True, False])
@virtual
async def test_t15c_map_holds_no_more_than_its_window(ordered: bool) -> None:
    most = 0
    async with TaskPool(max_concurrent=2) as pool:
        async for _ in pool.map(slowly, range(100), ordered=ordered, window=4):
            most = max(most, len(alive))
        assert most <= 8
        del _
        assert count() == 0
        assert pool.snapshot().completed == 100
        assert len(pool.snapshot().tasks) == 100


@virtual
async def test_t50_failures_that_nobody_saw_hold_no_frames() -> None:
    async with TaskPool() as pool:
        for _ in range(50):
            await pool.submit(fails)
        await pool.drain()
        assert count() == 0
        assert pool.snapshot(tasks=0).failed == 50


@virtual
async def test_t42_a_child_does_not_hold_the_result_of_its_parent_for_ever() -> None:
    async def parent(pool: TaskPool, kept: list[Any]) -> Large:
        kept.append(await pool.submit(asyncio.sleep, 1))
        return Large()

    kept: list[Any] = []
    async with TaskPool(max_concurrent=2) as pool:
        await (await pool.submit(parent, pool, kept))
        await kept[0]
        assert count() == 0
        assert kept[0].status == "completed"


@virtual
async def test_t81_streams_and_resources_hold_nothing() -> None:
    async def items(key: Resource[int]) -> AsyncGenerator[Large, None]:
        for _ in range(5):
            yield Large()

    async with TaskPool(resources=ResourcePool({"a": 1})) as pool:
        async for _ in pool.stream(items):
            pass
        del _
        assert count() == 0


@pytest.mark.integration
def test_t50_results_of_threads_are_gone() -> None:
    async def main() -> None:
        async with TaskPool(max_concurrent=2) as pool:
            for _ in range(10):
                await (await pool.submit(plainly))
            assert count() <= 2, "a thread may hold what it returned last"
            async for _ in pool.map(plainly, range(20)):
                pass

    asyncio.run(main())
    assert count() == 0


WAYS = ["awaited", "not awaited", "map", "unordered map", "retries"]


async def run_to_its_end(pool: TaskPool, fn: Any, way: str) -> None:
    try:
        if way == "not awaited":
            await pool.submit(fn)
            await pool.drain()
        elif "map" in way:
            async for _ in pool.map(fn, range(3), return_exceptions=True, ordered=way == "map"):
                pass
        else:
            await (await pool.submit(fn, retries=1 if way == "retries" else 0))
    except ValueError:
        pass


@pytest.mark.integration
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("keys", [False, True], ids=["alone", "with a key"])
def test_t50_what_failed_is_gone_without_the_collector(way: str, keys: bool) -> None:
    async def main() -> None:
        resources = ResourcePool({"a": 1}) if keys else None
        async with TaskPool(max_concurrent=2, resources=resources) as pool:
            for fn in (fails, fails_plainly, make, plainly):
                await run_to_its_end(pool, fn, way)
                await at_most(0, alive)

    with without_the_collector():
        asyncio.run(main())


@pytest.mark.integration
def test_t81_a_stream_that_failed_is_gone_without_the_collector() -> None:
    async def main() -> None:
        async with TaskPool() as pool:
            try:
                async for _ in pool.stream(items_that_fail):
                    pass
            except ValueError:
                pass
            assert len(alive) == 0

    with without_the_collector():
        asyncio.run(main())


@pytest.mark.integration
def test_t50_results_of_workers_are_gone_without_the_collector() -> None:
    async def main() -> None:
        async with WorkerPool(spawn=1) as workers:
            for way in WAYS:
                async with TaskPool(max_concurrent=2, workers=workers) as pool:
                    await run_to_its_end(pool, memory_jobs.make, way)
                    for fn in (memory_jobs.make, memory_jobs.fails) * 5:
                        await run_to_its_end(pool, fn, way)
                        await at_most(1, memory_jobs.alive)  # of a worker the last answer is held until its next

    with without_the_collector():
        asyncio.run(main())
