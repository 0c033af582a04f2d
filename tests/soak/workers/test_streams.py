"""Thousands of streams at once, and long ones."""

from __future__ import annotations

import asyncio
import gc
import os
import sys
from pathlib import Path

import pytest

from headgate import WorkerPool
from tests.soak.workers import soak_jobs
from tests.support.workers.support import run

MB = 2**20


def resident(pid: int) -> int:
    """Bytes of memory that it uses now."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_w08_paused_generators_whose_calls_have_ended_hold_no_places() -> None:
    """Two thousand of them; the integration tests of channel options show it with a limit of a few."""

    async def main() -> None:
        async with WorkerPool(spawn=2, lazy=False):
            streams = [soak_jobs.parent() for _ in range(2100)]
            await asyncio.gather(*(anext(stream) for stream in streams))
            async with asyncio.timeout(15):
                assert await asyncio.gather(*(soak_jobs.child() for _ in range(10))) == [1] * 10
                assert sum(await asyncio.gather(*(anext(stream) for stream in streams))) == 2100
            await asyncio.gather(*(stream.aclose() for stream in streams))

    run(main, 60)


@pytest.mark.skipif(sys.platform != "linux", reason="looks at processes through /proc")
def test_w10_a_long_stream_keeps_memory_flat() -> None:
    async def main() -> None:
        async with WorkerPool(spawn=1, lazy=False):
            stream = soak_jobs.endless_blocks_ahead(100_000)
            for number in range(200):
                pid, block = await anext(stream)
                assert block == soak_jobs.block(number, 100_000)
            gc.collect()
            theirs, ours = resident(pid), resident(os.getpid())
            for number in range(200, 8200):
                assert await anext(stream) == (pid, soak_jobs.block(number, 100_000))
            gc.collect()
            assert resident(pid) - theirs < 40 * MB
            assert resident(os.getpid()) - ours < 40 * MB
            await stream.aclose()

    run(main)
