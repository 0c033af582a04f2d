"""What a call costs on so many workers: CPU time of the client and of all workers, and how many calls share a message.

    python many_workers.py WORKERS      a line of JSON asks, a line of JSON answers, until the end of input

The callers share one number of calls, so that all of them are busy to the end: with a number of calls for each, those
on a slow worker would be left over, and a message for a few callers costs as much as one for all.
"""

from __future__ import annotations

import asyncio
import gc
import json
import sys
import time
from pathlib import Path
from typing import Any

import ours_routines
from grpc.aio import _call

import headgate


class Messages:
    """Counts what this process writes to gRPC streams: calls, and now and then something else."""

    def __init__(self) -> None:
        self.count = 0
        kind: Any = _call.StreamStreamCall
        write = kind.write

        async def counted(stream: Any, data: bytes) -> None:
            self.count += 1
            await write(stream, data)

        kind.write = counted


def cpu_of(pid: int) -> float:
    """Seconds that all threads of a process have run."""
    threads = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads) / 1e9


async def add_up(callers: int, calls: int) -> None:
    left = calls

    async def caller() -> None:
        nonlocal left
        while left > 0:
            left -= 1
            if await ours_routines.add(1, 2) != 3:
                raise AssertionError("it adds wrongly: its figures would mean nothing")

    await asyncio.gather(*[caller() for _ in range(callers)])


async def measure(pids: list[int], messages: Messages, callers: int, calls: int) -> dict[str, float]:
    gc.collect()
    before, client, workers = messages.count, time.process_time(), sum(map(cpu_of, pids))
    await add_up(callers, calls)
    client, workers = time.process_time() - client, sum(map(cpu_of, pids)) - workers
    return {"client": client / calls, "workers": workers / calls, "batch": calls / (messages.count - before)}


async def main(workers: int) -> None:
    messages = Messages()
    async with headgate.WorkerPool(spawn=workers) as pool:
        pids = [view.pid for view in pool.workers()]
        await add_up(100, 2_000)
        while line := await asyncio.to_thread(sys.stdin.readline):
            asked = json.loads(line)
            print(json.dumps(await measure(pids, messages, asked["callers"], asked["calls"])), flush=True)


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
