"""What wool's workers are asked to run: `ours_routines`, decorated by wool."""

from __future__ import annotations

import asyncio
import os

import wool
from plain_routines import tell_pid


@wool.routine
async def add(a: int, b: int) -> int:
    return a + b


@wool.routine
async def pid() -> int:
    return os.getpid()


@wool.routine
async def hold(path: str) -> None:
    tell_pid(path)
    await asyncio.sleep(60)
