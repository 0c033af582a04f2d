"""The room under uvloop, on both sides."""

from __future__ import annotations

import asyncio
import os

import pytest

from headgate import WorkerPool
from tests.integration.workers import attack_jobs, stream_jobs
from tests.support.workers import jobs
from tests.support.workers.support import bounded

uvloop = pytest.importorskip("uvloop", reason="pip install headgate[speed]")
uvloop.new_event_loop().close()  # libuv opens a pipe of its own, once for the process: not a leak of any test


def test_w52_workers_have_the_loop_of_their_client() -> None:
    async def main() -> None:
        async with WorkerPool(spawn=2) as pool:
            assert set((await pool.broadcast(attack_jobs.loop_here)).values()) == {"uvloop"}
            assert await attack_jobs.nested() == ["uvloop", [0, 1, 2]]
            assert [item async for item in stream_jobs.count(5)] == list(range(5))
            value = os.urandom(3_000_000)
            assert await jobs.echo(value) == value
            with pytest.raises(jobs.KeywordOnly):
                await jobs.fails(jobs.KeywordOnly, field="f")
            call = asyncio.create_task(jobs.slow(60))
            await asyncio.sleep(0.05)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(bounded(main))
