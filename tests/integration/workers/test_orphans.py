"""W33: what the children of routines leave behind is reaped by their worker, and nothing that somebody waits for."""

from __future__ import annotations

import asyncio
import os
import signal
import sys

import pytest

from headgate import WorkerPool
from tests.integration.workers import orphan_jobs
from tests.support.workers import jobs
from tests.support.workers.support import alive, pids, run, until

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(sys.platform != "linux", reason="only Linux gives orphans to a subreaper"),
]


async def no_zombies() -> None:
    async with asyncio.timeout(20):
        while await orphan_jobs.zombies_here():  # noqa: ASYNC110 - another process
            await asyncio.sleep(0.1)


def test_w33_orphans_of_a_routine_do_not_stay_as_zombies() -> None:
    async def main() -> None:
        async with WorkerPool(spawn=1) as pool:
            [worker] = pids(pool)
            left = await orphan_jobs.orphans() | await orphan_jobs.orphans_of_a_thread()
            assert len(left) == 27
            await until(lambda: not any(map(exists, left)), 20)  # while no call runs any more
            daemons = await jobs.family()
            await no_zombies()
            assert all(alive(pid) for pid in daemons.values()), "only what has ended is reaped"
            assert pids(pool) == [worker]
        await until(lambda: not any(map(alive, daemons.values())))

    run(main, patience=60)


def test_w33_no_exit_status_is_taken_from_whoever_waits_for_it() -> None:
    async def main() -> None:
        async with WorkerPool(spawn=1):
            got = await orphan_jobs.statuses()
            assert {name: found for name, (found, _) in got.items()} == {name: code for name, (_, code) in got.items()}
            await no_zombies()

    run(main, patience=60)


def test_w31_a_signal_to_a_process_that_a_routine_forked_is_not_one_to_its_worker() -> None:
    async def main() -> None:
        async with WorkerPool(spawn=1) as pool:
            before = pids(pool)
            assert await orphan_jobs.terminated(signal.SIGINT, at_once=False) == 1
            assert await orphan_jobs.terminated(signal.SIGTERM, at_once=False) == -signal.SIGTERM
            for _ in range(10):
                assert await orphan_jobs.terminated(signal.SIGTERM, at_once=True) == -signal.SIGTERM
            assert await jobs.add(1, 2) == 3
            assert pids(pool) == before

    run(main)


def exists(pid: int) -> bool:
    """Also as a zombie."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
