"""W92: tasks of a TaskPool on workers that die: a task that crashes fails by itself."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from headgate import ResourcePool, WorkerLost, WorkerPool
from headgate import TaskPool as Pool
from tests.integration.workers import lost_jobs
from tests.support.workers.support import lines, run

pytestmark = pytest.mark.integration


@pytest.mark.parametrize(
    ("workers", "retries", "keys"),
    [
        pytest.param(1, 1, False, marks=pytest.mark.soak),
        (3, 1, True),
        pytest.param(3, 2, False, marks=pytest.mark.soak),
    ],
)
def test_w92_a_task_that_crashes_fails_by_itself(log: str, workers: int, retries: int, keys: bool) -> None:
    async def main() -> None:
        resources = ResourcePool({"a": "secret-a"}) if keys else None
        async with (
            WorkerPool(spawn=workers) as there,
            Pool(max_concurrent=40, workers=there, resources=resources) as pool,
        ):
            handles, culprits = [], []

            async def submit(fn: Any, *args: Any) -> Any:
                fn, args = (lost_jobs.with_key, (fn, *args)) if keys else (fn, args)
                return await pool.submit(fn, *args, retries=retries)

            for n in range(25):
                handles.append(await submit(lost_jobs.neighbour, log, n, 0.02))
                if n % 10 == 0:
                    culprits.append(await submit(lost_jobs.culprit, log, n, "SIGSEGV", 0.01))
            assert await asyncio.gather(*handles) == list(range(25))
            for n, culprit in zip((0, 10, 20), culprits, strict=True):
                with pytest.raises(WorkerLost, match="SIGSEGV") as caught:
                    await culprit
                assert caught.value.signal == 11
                assert sum(line.startswith(f"culprit {n} ") for line in lines(log)) == retries + 1
            if resources is not None:
                assert resources.snapshot()["a"]["status"] == "healthy"

    run(main)
