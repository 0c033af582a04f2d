"""Routines for workers that stand alone, and a program for them: `python fleet_jobs.py NAMESPACE CALLS [stay]`."""

from __future__ import annotations

import asyncio
import os
import sys

import headgate


@headgate.routine
async def where() -> int:
    await asyncio.sleep(0.001)
    return os.getpid()


@headgate.routine(retries=10)
async def somewhere() -> int:
    """For callers whose worker may be killed."""
    await asyncio.sleep(0.001)
    return os.getpid()


@headgate.routine
async def nested(depth: int) -> set[int]:
    """The pids of all workers that a tree of calls ran on."""
    below = await asyncio.gather(*(nested(depth - 1) for _ in range(2 if depth else 0)))
    return {os.getpid()}.union(*below)


async def call(namespace: str, calls: int, *, stay: bool) -> None:
    async with headgate.WorkerPool(discovery=headgate.LocalDiscovery(namespace)):
        print(*sorted(set(await asyncio.gather(*(where() for _ in range(calls))))), flush=True)  # noqa: T201
        if stay:
            await asyncio.sleep(600)


if __name__ == "__main__":
    from fleet_jobs import call as by_its_module  # not of __main__, which workers do not have

    asyncio.run(by_its_module(sys.argv[1], int(sys.argv[2]), stay="stay" in sys.argv))
