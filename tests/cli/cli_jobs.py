"""Routines that workers of these tests run. The folder of this file is their current folder."""

from __future__ import annotations

import asyncio
from pathlib import Path

from headgate import routine


@routine
async def double(number: int) -> int:
    return 2 * number


@routine
async def nap(seconds: float, began: str) -> str:
    """Write a file when it has begun, and sleep."""
    Path(began).write_text("begun", "utf-8")
    await asyncio.sleep(seconds)
    return "slept"


@routine
async def wait_for(path: str, began: str) -> str:
    """Write a file when it has begun, and return when there is another one."""
    Path(began).write_text("begun", "utf-8")
    while not Path(path).exists():
        await asyncio.sleep(0.01)
    return "seen"


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
    import time

    threading.Thread(target=time.sleep, args=(seconds,)).start()
