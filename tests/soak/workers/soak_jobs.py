"""Routines of the long tests."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import AsyncGenerator

from headgate import routine


@routine
async def child() -> int:
    return 1


@routine
async def parent() -> AsyncGenerator[object, None]:
    kid = asyncio.create_task(child())
    yield "started"
    yield await kid


@routine
async def numbers(count: int) -> AsyncGenerator[tuple[int, int], None]:
    for number in range(count):
        yield number, os.getpid()


def block(number: int, size: int) -> bytes:
    """Bytes that belong to this number."""
    return number.to_bytes(8, "big") * (size // 8)


@routine(prefetch=64)
async def endless_blocks_ahead(size: int) -> AsyncGenerator[tuple[int, bytes], None]:
    for number in itertools.count():
        yield os.getpid(), block(number, size)
