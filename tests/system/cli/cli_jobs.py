"""Routines that workers of these tests run. The folder of this file is their current folder."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

from headgate import routine


@routine
async def double(number: int) -> int:
    return 2 * number


@routine
async def pid() -> int:
    return os.getpid()


def tell(began: str) -> None:
    Path(began).write_text("begun", "utf-8")


@routine
async def nap(seconds: float, began: str) -> str:
    """Write a file when it has begun, and sleep."""
    tell(began)
    await asyncio.sleep(seconds)
    return "slept"


@routine
async def wait_for(path: str, began: str) -> str:
    """Write a file when it has begun, and return when there is another one."""
    tell(began)
    await asyncio.to_thread(until_there, path)
    return "seen"


def until_there(path: str) -> None:
    while not Path(path).exists():
        time.sleep(0.01)


HOARD: list[bytes] = []


@routine
async def hoard(size: int) -> int:
    """Keep some memory."""
    HOARD.append(b"x" * size)
    return len(HOARD)


@routine
async def hold_the_thread(seconds: float) -> None:
    """Be of those that nothing can interrupt."""
    import threading

    threading.Thread(target=time.sleep, args=(seconds,)).start()
