"""W90: what takes longer than any grace period does not end a worker."""

from __future__ import annotations

import asyncio

from headgate import LocalWorker, StaticDiscovery, WorkerPool
from headgate.testing import no_leaks
from tests.soak.workers import soak_jobs
from tests.support.workers import jobs
from tests.support.workers.support import alive, pids, run, until


def test_w90_a_generator_that_nobody_advances_for_long_is_waited_for() -> None:
    async def main() -> None:
        async with WorkerPool(spawn=1, max_tasks_per_worker=1) as pool:
            stream = soak_jobs.numbers(2)
            _, old = await anext(stream)
            await jobs.pid()
            await until(lambda: old not in pids(pool))
            await asyncio.sleep(7)
            assert await anext(stream) == (1, old)

    run(main)


def test_w90_a_local_worker_with_a_call_is_not_idle() -> None:
    async def main() -> None:
        async with LocalWorker(idle_timeout=3) as worker:
            assert worker.metadata is not None
            async with WorkerPool(discovery=StaticDiscovery([worker.metadata.address])):
                assert await jobs.sleep_and_pid(5) == worker.pid
                assert await jobs.pid() == worker.pid
                await until(lambda: not alive(worker.pid))

    with no_leaks(grace=3):
        run(main)
