"""Routines for the tests of options: they note how many of them execute at the same time."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import AsyncGenerator

import headgate
from headgate import routine
from tests.support.workers.jobs import note

_lock = threading.Lock()
_now = 0
_most = 0

VARIABLE: headgate.ContextVar[str] = headgate.ContextVar("option_jobs.VARIABLE", default="")


class Executing:
    """Counts those inside of it."""

    def __enter__(self) -> None:
        global _now, _most
        with _lock:
            _now += 1
            _most = max(_most, _now)

    def __exit__(self, *_: object) -> None:
        global _now
        with _lock:
            _now -= 1


@routine
async def executes(number: int, seconds: float = 0.0, path: str = "") -> int:
    with Executing():
        if path:
            note(path, number)
        await asyncio.sleep(seconds)
    return number


@routine
def executes_in_a_thread(number: int, seconds: float) -> int:
    with Executing():
        time.sleep(seconds)
    return number


@routine(timeout=0.2)
def stays_in_its_thread(path: str) -> None:
    """Until there is a file that says go, whatever its timeout."""
    note(path, "stays")
    while not os.path.exists(f"{path}.go"):
        time.sleep(0.01)


@routine(timeout=1.0)
async def bounded(number: int, seconds: float) -> int:
    await asyncio.sleep(seconds)
    return number


@routine
async def most() -> int:
    """How many executed at the same time since this was asked last."""
    global _most
    found, _most = _most, _now
    return found


@routine
async def ticks(name: str, count: int, seconds: float = 0.0) -> AsyncGenerator[str, None]:
    for number in range(count):
        with Executing():
            await asyncio.sleep(seconds)
        yield f"{name}{number}"


@routine(prefetch=4)
async def ticks_ahead(name: str, count: int, seconds: float = 0.0) -> AsyncGenerator[str, None]:
    for number in range(count):
        with Executing():
            await asyncio.sleep(seconds)
        yield f"{name}{number}"


@routine
async def sums(name: str, count: int) -> int:
    """Consume a generator, and call others in between: each of them may need a place on this very worker."""
    total = 0
    async for _ in ticks(name, count):
        total += await executes(1)
    return total


@routine
def sums_in_a_thread(count: int) -> int:
    """The same from a thread."""

    async def main() -> int:
        return sum([await executes(1) for _ in range(count)])

    return asyncio.run(main())


@routine
async def variable_of(length: int) -> int:
    """Set a variable of this length, which goes back to the caller."""
    VARIABLE.set(os.urandom(length // 2).hex())
    return len(VARIABLE.get())


@routine
async def size_of(data: bytes) -> int:
    return len(data)


@routine
async def zeros(size: int) -> bytes:
    return bytes(size)
