"""A program with a pool that is to be killed: ``python doomed_parent.py variant folder``.

When it is as its variant says, it writes "ready" and the pids of processes that are to be gone after it, then those
that are its own affair ("spare"), and waits.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import headgate
from tests.support.workers import jobs
from tests.support.workers.support import lines, pids, until


def say(*words: object) -> None:
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def forked() -> int:
    child = os.fork()
    if not child:
        time.sleep(120)
        os._exit(0)
    return child


async def prepare(variant: str, pool: headgate.WorkerPool, log: str) -> tuple[list[int], list[int]]:
    """The pids to be gone, and the spare ones."""
    gone = pids(pool)
    spare: list[int] = []
    if variant == "busy":
        calls = [asyncio.create_task(jobs.endless(log)) for _ in range(4)]
        await until(lambda: len(lines(log)) == len(calls))
    elif variant == "gil":
        calls = [asyncio.create_task(jobs.holds_the_gil(log, 120)) for _ in gone]
        await until(lambda: len(lines(log)) == len(calls))
    elif variant == "stopped":
        os.kill(gone[0], signal.SIGSTOP)
    elif variant == "family":
        gone += (await jobs.family()).values()
    elif variant == "forked":
        calls = [asyncio.create_task(jobs.endless(log)), asyncio.create_task(jobs.holds_the_gil(log, 120))]
        await until(lambda: len(lines(log)) == len(calls))
        spare.append(forked())
        spare.append(subprocess.Popen(["sleep", "120"], close_fds=False).pid)  # noqa: ASYNC220 - takes a moment
    return gone, spare


async def main(variant: str, folder: str) -> None:
    if variant == "churning":
        say("ready")
        while True:
            async with headgate.WorkerPool(spawn=2, shutdown_timeout=0):
                calls = [asyncio.create_task(jobs.slow(0.01 * n)) for n in range(6)]
                await asyncio.wait(calls, timeout=0.03)
            for call in calls:
                call.exception()
    async with headgate.WorkerPool(spawn=2 if variant in ("busy", "forked") else 1) as pool:
        gone, spare = await prepare(variant, pool, str(Path(folder) / "log"))
        say("ready", *gone)
        say("spare", *spare)
        await end(variant)


async def end(variant: str) -> None:
    if variant == "os._exit":
        os._exit(5)
    if variant == "raising":
        raise LookupError("on purpose")
    await asyncio.sleep(120)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2]))
