"""Routines for workers on engines. The module is sent by value: the nodes of an engine do not have the tests.

Whoever uses it says so to cloudpickle, and only while it is used: that changes how everything is pickled.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator

from headgate import ContextVar, routine

TENANT: ContextVar[str] = ContextVar("engine_jobs_tenant", namespace="tests", default="nobody")


@routine
async def add(one: int, other: int) -> int:
    return one + other


@routine
async def pid() -> int:
    return os.getpid()


@routine
async def environment(name: str) -> str | None:
    return os.environ.get(name)


@routine
async def count(most: int) -> AsyncIterator[int]:
    for number in range(most):
        yield number


@routine
async def nested(depth: int) -> list[int]:
    """Return the pid of each level: a level calls the next one on some worker of the pool."""
    return [os.getpid(), *(await nested(depth - 1) if depth else [])]


@routine
async def tenant() -> str:
    return TENANT.get()


@routine
async def nap(seconds: float, note: str = "") -> str:
    """Sleep; if that is cancelled, make a folder as a note."""
    try:
        await asyncio.sleep(seconds)
    except asyncio.CancelledError:
        if note:
            os.mkdir(note)
        raise
    return "slept"


@routine
async def until_there(path: str) -> int:
    """Return the pid when there is a file."""
    while not os.access(path, os.F_OK):  # noqa: ASYNC110 - another process makes it
        await asyncio.sleep(0.01)
    return os.getpid()


@routine
async def hold_everything(seconds: float) -> None:
    """Hold the loop and, in long steps, the interpreter's lock."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        sum(range(3_000_000))
