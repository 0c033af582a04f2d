"""The process of one contestant: opens its pool and measures what it is asked.

    python client.py CONTESTANT serve     a line of JSON asks, a line of JSON answers, until the end of input
    python client.py CONTESTANT first     from nothing to the first result, once
    python client.py CONTESTANT killed    what the caller of a running call is told when its worker is killed, once

Each contestant has a process of its own: gRPC, its threads and its handlers of forks are one per process, and memory
could not be told apart. Workers that `multiprocessing` starts import this file again, so it imports little.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

RESPAWN_SECONDS = 2.0

Add = Callable[[int, int], Awaitable[int]]


# -- calls ------------------------------------------------------------------------------------------------------------


async def measure_calls(add: Add, callers: int, each: int) -> float:
    """Seconds in which every caller has done its calls, one after the other."""

    async def caller() -> None:
        for _ in range(each):
            if await add(1, 2) != 3:
                raise AssertionError("a contestant adds wrongly: its figures would mean nothing")

    gc.collect()
    start = time.perf_counter()
    await asyncio.gather(*[caller() for _ in range(callers)])
    return time.perf_counter() - start


async def how_many_each(add: Add, callers: int, seconds: float) -> int:
    """How many calls of each caller fill a slice. Also the warm-up."""
    each, spent = 1, await measure_calls(add, callers, 1)
    while spent < seconds / 4:
        each *= 2
        spent = await measure_calls(add, callers, each)
    return max(1, round(each * seconds / spent))


async def measure_latency(add: Add, calls: int) -> dict[str, float]:
    """One at a time, in seconds."""
    gc.collect()
    spent, clock = [], time.perf_counter
    for _ in range(calls):
        start = clock()
        await add(1, 2)
        spent.append(clock() - start)
    spent.sort()
    return {"p50": spent[calls // 2], "p99": spent[calls * 99 // 100]}


# -- memory -----------------------------------------------------------------------------------------------------------


async def measure_memory(pid: Callable[[], Awaitable[int]] | None, workers: int) -> dict[str, float] | None:
    """Bytes that no other process shares, of this process, of a worker, and of all others below this one."""
    if pid is None or sys.platform != "linux":
        return None
    pids = await pids_of(pid, workers)
    others = set(_descendants(os.getpid())) - pids
    return {
        "worker": sum(map(_unshared, pids)) / len(pids),
        "client": _unshared(os.getpid()),
        "others": sum(map(_unshared, others)),
    }


async def pids_of(pid: Callable[[], Awaitable[int]], workers: int) -> set[int]:
    pids: set[int] = set()
    while len(pids) < workers:
        pids.update(await asyncio.gather(*[pid() for _ in range(16)]))
    return pids


def _unshared(pid: int) -> int:
    lines = (line.split() for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines())
    return 1024 * sum(int(words[1]) for words in lines if words[0] in ("Private_Clean:", "Private_Dirty:"))


def _descendants(pid: int) -> list[int]:
    found = []
    for thread in Path(f"/proc/{pid}/task").iterdir():
        for child in map(int, (thread / "children").read_text().split()):
            found += [child, *_descendants(child)]
    return found


# -- a pool of its own ------------------------------------------------------------------------------------------------


async def measure_first(name: str) -> dict[str, float]:
    """Seconds of the import, and from the making of the pool to the first result."""
    from pools import IMPORTED

    start = time.perf_counter()
    opened = IMPORTED[name]()
    imported = time.perf_counter()
    async with opened() as calls:
        await calls.add(1, 2)
        done = time.perf_counter()
    return {"import": imported - start, "first": done - imported}


async def measure_killed(name: str) -> dict[str, Any]:
    from pools import IMPORTED, WORKERS

    async with IMPORTED[name]()() as calls:
        assert calls.pid is not None
        assert calls.hold is not None
        before = await pids_of(calls.pid, WORKERS)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "pid"
            running = asyncio.ensure_future(calls.hold(str(path)))
            victim = await _begun(path)
            await asyncio.sleep(0.1)  # all is quiet again
            start = time.perf_counter()
            os.kill(victim, signal.SIGKILL)
            [error] = await asyncio.gather(running, return_exceptions=True)
            told = time.perf_counter() - start
        kinds = [f"{kind.__module__.partition('.')[0]}.{kind.__name__}" for kind in type(error).__mro__]
        return {"told": told, "error": kinds, "text": str(error), "respawned": await _respawned(calls.pid, before)}


async def _begun(path: Path) -> int:
    for _ in range(10_000):
        if told := _read(path):
            return int(told)
        await asyncio.sleep(0.001)
    raise TimeoutError("the call to be interrupted did not begin")


def _read(path: Path) -> str:
    return path.read_text("ascii") if path.exists() else ""


async def _respawned(pid: Callable[[], Awaitable[int]], before: set[int]) -> float | None:
    """Seconds until a call is answered by a worker that was not there before."""

    async def ask() -> int:
        return await asyncio.wait_for(pid(), RESPAWN_SECONDS)

    start = time.perf_counter()
    while (spent := time.perf_counter() - start) < RESPAWN_SECONDS:
        answers = await asyncio.gather(*[ask() for _ in range(4)], return_exceptions=True)
        if any(isinstance(answer, int) and answer not in before for answer in answers):
            return spent
        await asyncio.sleep(0.01)
    return None


# -- the process ------------------------------------------------------------------------------------------------------


async def serve(name: str, add: Add | None, answer: Callable[[Any], None]) -> None:
    from pools import IMPORTED, WORKERS

    async with IMPORTED[name]()() as calls:
        add = add or calls.add
        while line := await asyncio.to_thread(sys.stdin.readline):
            match json.loads(line):
                case {"measure": "calls", "callers": callers, "each": each}:
                    answer(callers * each / await measure_calls(add, callers, each))
                case {"measure": "each", "callers": callers, "seconds": seconds}:
                    answer(await how_many_each(add, callers, seconds))
                case {"measure": "latency", "calls": many}:
                    answer(await measure_latency(add, many))
                case {"measure": "memory"}:
                    answer(await measure_memory(calls.pid, WORKERS))
                case unknown:
                    raise ValueError(f"asked for {unknown}")


def main(add: Add | None = None) -> None:
    """`add` takes the place of the contestant's own."""
    name, what = sys.argv[1:]
    # What a library or a worker prints goes where errors go: standard output is for answers.
    answers = os.fdopen(os.dup(1), "w", encoding="ascii")
    os.dup2(2, 1)

    def answer(value: Any) -> None:
        print(json.dumps(value), file=answers, flush=True)

    if what == "serve":
        asyncio.run(serve(name, add, answer))
    else:
        answer(asyncio.run({"first": measure_first, "killed": measure_killed}[what](name)))


if __name__ == "__main__":
    main()
