"""What our workers are asked to run. They find it by reference, so it imports no more than it needs."""

from __future__ import annotations

import asyncio
import os

from plain_routines import tell_pid

import headgate


@headgate.routine
async def add(a: int, b: int) -> int:
    return a + b


@headgate.routine
async def pid() -> int:
    return os.getpid()


@headgate.routine
async def hold(path: str) -> None:
    tell_pid(path)
    await asyncio.sleep(60)
