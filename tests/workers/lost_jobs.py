"""Routines that end their worker, and their neighbours."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncGenerator

from headgate import routine
from tests.workers.jobs import note


def end(how: str) -> None:
    """End this process: "exit 7", or the name of a signal."""
    if how.startswith("exit"):
        os._exit(int(how.split()[1]))
    os.kill(os.getpid(), getattr(signal, how))


@routine
async def ends(how: str) -> None:
    end(how)
    await asyncio.sleep(60)


@routine
def ends_in_a_thread(how: str) -> None:
    end(how)
    signal.pause()


@routine
async def ends_after_an_item(how: str) -> AsyncGenerator[int, None]:
    yield 1
    end(how)
    await asyncio.sleep(60)


@routine
async def calls_one_that_ends(how: str) -> None:
    await ends(how)


@routine
async def says(text: str, times: int) -> None:
    for _ in range(times):
        sys.stderr.write(f"{text}\n")


@routine
async def reads_null() -> None:
    import ctypes

    ctypes.string_at(0)


@routine
async def about_stderr() -> tuple[int, str, bool, str]:
    return sys.stderr.fileno(), sys.stderr.name, sys.stderr.isatty(), sys.stderr.errors or ""


async def neighbour(path: str, n: int, seconds: float) -> int:
    """Ends well if nobody ends its worker."""
    note(path, f"{n} {os.getpid()}")
    await asyncio.sleep(seconds)
    return n


async def culprit(path: str, n: int, how: str, seconds: float) -> int:
    """Ends its worker each time, a moment after it began."""
    note(path, f"culprit {n} {os.getpid()}")
    await asyncio.sleep(seconds)
    end(how)
    await asyncio.sleep(60)
    return n
