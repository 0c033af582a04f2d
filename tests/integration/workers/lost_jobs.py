"""Routines that end their worker, and their neighbours."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

from headgate import routine
from tests.support.workers.jobs import note
from tests.support.workers.support import lines, until


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


@routine
async def calls_others(depth: int) -> list[int]:
    """The pids of all."""
    if depth == 0:
        return [os.getpid()]
    return [os.getpid(), *await calls_others(depth - 1)]


@routine
def calls_others_in_a_thread(depth: int) -> list[int]:
    return asyncio.run(calls_others(depth))  # type: ignore[no-any-return, arg-type]


@routine
async def held(path: str, name: str, depth: int = 0) -> list[int]:
    """Note that it begins; wait until it is let go; call others; note that it ends."""
    note(path, f"{name} begins")
    await until(Path(f"{path}.{name}").exists, 30)
    found = await calls_others(depth) if depth else [os.getpid()]
    note(path, f"{name} ends")
    return found


@routine
async def noted(path: str, text: str) -> int:
    note(path, text)
    return os.getpid()


@routine
async def counts() -> AsyncGenerator[int, None]:
    for n in range(1000):
        yield n


@routine(retries=1)
async def dies_beside(path: str, caller: int) -> int:
    """Ends its worker the first time, if that is not its caller's."""
    note(path, f"{os.getpid()} {caller}")
    if len(lines(path)) == 1:
        end("SIGKILL")
        await asyncio.sleep(60)
    return os.getpid()


@routine
async def calls_one_that_dies(path: str) -> tuple[int, int]:
    return os.getpid(), await dies_beside(path, os.getpid())


def is_culprit(name: str, share: float) -> bool:
    """Is it one of those that end their worker each time?"""
    return random.Random(name).random() < share


@routine(retries=2)
async def leaf(name: str, share: float) -> int:
    await asyncio.sleep(random.Random(name).random() * 0.02)
    if is_culprit(name, share):
        end("SIGSEGV")
    return 1


@routine(retries=2)
async def tree(name: str, share: float) -> list[int | str]:
    """Calls three leaves; what each returned, or the name of what it raised."""
    if is_culprit(name, share):
        await asyncio.sleep(0.01)
        end("SIGKILL")
    leaves = (leaf(f"{name}.{n}", share) for n in range(3))
    found = await asyncio.gather(*leaves, return_exceptions=True)
    return [type(one).__name__ if isinstance(one, BaseException) else one for one in found]


async def with_key(key: Any, fn: Any, *args: Any) -> Any:
    """One of these, as a task with a resource."""
    return await fn(*args)
