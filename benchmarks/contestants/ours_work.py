"""Large and nested work for our workers."""

from __future__ import annotations

import asyncio

import headgate


@headgate.routine
async def echo(data: bytes) -> bytes:
    return data


@headgate.routine
async def take(data: bytes) -> int:
    return len(data)


@headgate.routine
async def fib(n: int) -> int:
    if n <= 1:
        return n
    async with asyncio.TaskGroup() as group:
        a = group.create_task(fib(n - 1))
        b = group.create_task(fib(n - 2))
    return a.result() + b.result()
