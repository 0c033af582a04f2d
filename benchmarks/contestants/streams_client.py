"""The process of one contestant of `streams.py`: opens its pool and does what it is asked, so many times.

    python streams_client.py CONTESTANT     a line of JSON asks, a line of JSON answers, until the end of input

As `client.py`, with other work. Here what fails is an answer too, `{"failed": why}`: one row less, not all of them.
Workers that `multiprocessing` starts import this file again, so it imports little.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import sys
import time
from collections.abc import Awaitable, Callable
from importlib import import_module
from typing import Any

import client

PATIENCE = 100.0  # less than that of who asks
ENDS = 64

Work = Callable[[int], Awaitable[None]]
"""Does it so many times."""


# -- work -------------------------------------------------------------------------------------------------------------


def work_of(name: str, about: dict[str, Any]) -> Work:
    """Modules are imported when they are asked for: what cannot be imported fails alone."""
    match about:
        case {"work": "stream", "ahead": ahead}:
            streams = import_module(f"{name}_streams")
            return stream(streams.count_ahead if ahead else streams.count)
        case {"work": "echo", "size": size}:
            return echo(import_module(f"{name}_work").echo, os.urandom(size))
        case {"work": "take", "size": size}:
            return take(import_module(f"{name}_work").take, os.urandom(size))
        case {"work": "fib", "n": n}:
            return fib(import_module(f"{name}_work").fib, n)
        case unknown:
            raise ValueError(f"asked for {unknown}")


def stream(count: Callable[[int], Any]) -> Work:
    """One stream of so many items."""

    async def work(items: int) -> None:
        total = 0
        async for item in count(items):
            total += item
        _right(total == items * (items - 1) // 2)

    return work


def echo(routine: Callable[[bytes], Awaitable[bytes]], data: bytes) -> Work:
    """One after the other. Only both ends are compared: all of it would be a good part of the time."""

    async def work(times: int) -> None:
        for _ in range(times):
            back = await routine(data)
            _right(len(back) == len(data) and back[:ENDS] == data[:ENDS] and back[-ENDS:] == data[-ENDS:])

    return work


def take(routine: Callable[[bytes], Awaitable[int]], data: bytes) -> Work:
    async def work(times: int) -> None:
        for _ in range(times):
            _right(await routine(data) == len(data))

    return work


def fib(routine: Callable[[int], Awaitable[int]], n: int) -> Work:
    a, b = 0, 1
    for _ in range(n):
        a, b = b, a + b

    async def work(times: int) -> None:
        for _ in range(times):
            _right(await routine(n) == a)

    return work


def _right(well: bool) -> None:
    if not well:
        raise AssertionError("a contestant answers wrongly: its figures would mean nothing")


async def timed(work: Work, count: int) -> float:
    gc.collect()
    start = time.perf_counter()
    await work(count)
    return time.perf_counter() - start


async def how_many(work: Work, seconds: float) -> int:
    """How many times fill a slice. Also the warm-up."""
    count, spent = 1, await timed(work, 1)
    while spent < seconds / 4:
        count *= 2
        spent = await timed(work, count)
    return max(1, round(count * seconds / spent))


# -- small calls beside large ones ------------------------------------------------------------------------------------


async def measure_beside(add: client.Add, bulk: Work | None, seconds: float) -> dict[str, float]:
    """One small call after the other, in seconds, while `bulk` is done again and again. And how often it was."""
    done, going = 0, True

    async def again() -> None:
        nonlocal done
        while going and bulk is not None:
            await bulk(1)
            done += 1

    await client.measure_calls(add, 1, 100)
    if bulk is not None:
        await bulk(2)  # each worker has had one
    gc.collect()
    beside = asyncio.create_task(again())
    spent, clock = [], time.perf_counter
    begin = clock()
    try:
        while (start := clock()) < begin + seconds:
            await add(1, 2)
            spent.append(clock() - start)
        times = done
    finally:
        going = False
        await beside  # and if it failed, say so
    spent.sort()
    calls = len(spent)
    return {"p50": spent[calls // 2], "p99": spent[calls * 99 // 100], "longest": spent[-1], "times": times}


# -- the process ------------------------------------------------------------------------------------------------------


async def serve(name: str, answer: Callable[[Any], None]) -> None:
    from pools import IMPORTED

    async with IMPORTED[name]()() as calls:
        while line := await asyncio.to_thread(sys.stdin.readline):
            try:
                async with asyncio.timeout(PATIENCE):
                    answer(await answer_to(name, calls, json.loads(line)))
            except Exception as error:
                text = str(error).partition("\n")[0]
                answer({"failed": f"{type(error).__name__}: {text}" if text else type(error).__name__})


async def answer_to(name: str, calls: Any, question: dict[str, Any]) -> Any:
    from pools import WORKERS

    match question:
        case {"measure": "how many", "seconds": seconds}:
            return await how_many(work_of(name, question), seconds)
        case {"measure": "timed", "count": count}:
            return await timed(work_of(name, question), count)
        case {"measure": "beside", "seconds": seconds}:
            return await measure_beside(calls.add, work_of(name, question) if "work" in question else None, seconds)
        case {"measure": "processes"}:
            return sorted({os.getpid(), *await client.pids_of(calls.pid, WORKERS), *client._descendants(os.getpid())})
        case unknown:
            raise ValueError(f"asked for {unknown}")


def main() -> None:
    # What a library or a worker prints goes where errors go: standard output is for answers.
    answers = os.fdopen(os.dup(1), "w", encoding="ascii")
    os.dup2(2, 1)

    def answer(value: Any) -> None:
        print(json.dumps(value), file=answers, flush=True)

    asyncio.run(serve(sys.argv[1], answer))


if __name__ == "__main__":
    main()
