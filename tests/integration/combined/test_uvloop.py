"""A smoke test on uvloop: verdicts, waits in line, streams and workers on another event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from headgate import CooldownResource, Resource, ResourcePool, TaskPool, WorkerPool, fair_round_robin
from tests.integration.combined import combined_jobs

uvloop = pytest.importorskip("uvloop", reason="pip install headgate[speed]")
uvloop.new_event_loop().close()  # libuv opens a pipe of its own, once for the process: not a leak of any test


def run(main: Any) -> Any:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main())


async def items(key: Resource[str], most: int) -> AsyncGenerator[int, None]:
    for number in range(most):
        yield number


def test_line_verdicts_waits_and_streams() -> None:
    limited = 0

    async def ask(key: Resource[str], number: int) -> int:
        nonlocal limited
        await asyncio.sleep(0)
        if number % 5 == 0 and limited < 6:
            limited += 1
            raise CooldownResource(0.01, "429")
        return number

    async def main() -> None:
        keys = ResourcePool([Resource("a", "sa", 1), Resource("b", "sb", 2)], max_attempts=20)
        async with TaskPool(max_concurrent=10, queue=fair_round_robin("tenant"), resources=keys) as pool:
            handles = [await pool.submit(ask, n, tenant=f"t{n % 3}") for n in range(60)]
            assert [await handle for handle in handles] == list(range(60))
            assert [item async for item in pool.stream(items, 5)] == list(range(5))
        assert limited == 6
        assert all(one["in_flight"] == 0 for one in keys.snapshot().values())

    run(main)


def test_line_on_workers(what_grpc_opens_once: None) -> None:
    async def main() -> None:
        keys = ResourcePool([Resource("a", "sa", 4)])
        async with WorkerPool(spawn=1) as workers, TaskPool(max_concurrent=8, resources=keys, workers=workers) as pool:
            assert [one async for one in pool.map(combined_jobs.number, range(50))] == list(range(50))
        assert keys.snapshot()["a"]["in_flight"] == 0

    run(main)
