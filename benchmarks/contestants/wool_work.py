"""Large and nested work for wool's workers: `ours_work`, decorated by wool."""

from __future__ import annotations

import asyncio

import wool


@wool.routine
async def echo(data: bytes) -> bytes:
    return data


@wool.routine
async def take(data: bytes) -> int:
    return len(data)


@wool.routine
async def fib(n: int) -> int:
    if n <= 1:
        return n
    async with asyncio.TaskGroup() as group:
        a = group.create_task(fib(n - 1))
        b = group.create_task(fib(n - 2))
    return a.result() + b.result()
