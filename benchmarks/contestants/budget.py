"""One of the processes that share a budget: `python budget.py <contestant> <place> <number> <tally>`.

`benchmarks/shared.py` starts as many as share, and asks each of them to do its part, line by line as in `client.py`.
`place` is the path of a SQLite file or the address of a PostgreSQL database, `number` says which of the processes this
is, and `tally` is a file in which each process counts what it has run: queues of jobs hand a job to any of them, and
none of them tells when all jobs are through.
"""

from __future__ import annotations

import asyncio
import json
import mmap
import os
import struct
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MEMBERS = 4
LIMIT = 4
TENANTS = [f"tenant-{number}" for number in range(100)]
"""All of them have tasks in every process."""
_COUNT = struct.Struct("=q")


class Tally:
    """How many tasks each process has run, in memory that all of them have mapped."""

    def __init__(self, path: Path, number: int) -> None:
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 0)
        self._place = number * _COUNT.size
        self._own = 0
        self._lock = threading.Lock()  # a peer runs jobs in threads
        self.newest: float = 0.0
        """When a task ended last in this process."""

    def ran(self) -> None:
        """Count one more task of this process."""
        with self._lock:
            self._own += 1
            self.newest = time.monotonic()
            _COUNT.pack_into(self._memory, self._place, self._own)

    def total(self) -> int:
        """How many have been run by all processes."""
        return sum(number for (number,) in _COUNT.iter_unpack(self._memory))

    async def reached(self, total: int) -> None:
        """Return when all processes together have run so many.

        Nobody can tell it: another process writes to memory. A look costs a microsecond, 200 times a second.
        """
        while self.total() < total:  # noqa: ASYNC110
            await asyncio.sleep(0.005)


@dataclass(frozen=True, slots=True)
class Part:
    """What one process has to do with a contestant that is open."""

    submit: Callable[[int], Awaitable[object]]
    """Submit so many tasks that return at once."""
    hand_over: Callable[[int, float], Awaitable[list[tuple[float, float]]]] | None = None
    """Run so many tasks of so many seconds, one at a time in all processes; returns when each began and ended."""
    keep_busy: Callable[[float, float], Awaitable[list[tuple[float, float]]]] | None = None
    """Until a moment have tasks of so many seconds waiting for slots; returns when each began and ended."""


async def serve(name: str, place: str, number: int, tally: Tally, answer: Callable[[Any], None]) -> None:
    from budgets import OPENED

    async with OPENED[name](place, number, tally) as part:
        answer("ready")
        while line := await asyncio.to_thread(sys.stdin.readline):
            match json.loads(line):
                case {"measure": "run", "tasks": many, "total": total}:
                    begun, cpu = time.monotonic(), time.process_time()
                    await part.submit(many)
                    await tally.reached(total)
                    answer({"begun": begun, "ended": tally.newest, "cpu": time.process_time() - cpu})
                case {"measure": "hand over", "tasks": many, "seconds": seconds}:
                    assert part.hand_over is not None, "only contestants that have it are asked"
                    answer(await part.hand_over(many, seconds))
                case {"measure": "keep busy", "seconds": seconds, "task": task}:
                    assert part.keep_busy is not None, "only contestants that have it are asked"
                    answer(await part.keep_busy(time.monotonic() + seconds, task))
                case unknown:
                    raise ValueError(f"asked for {unknown}")


def main() -> None:
    name, place, number, path = sys.argv[1:]
    # What a library prints goes where errors go: standard output is for answers.
    answers = os.fdopen(os.dup(1), "w", encoding="ascii")
    os.dup2(2, 1)

    def answer(value: Any) -> None:
        print(json.dumps(value), file=answers, flush=True)

    asyncio.run(serve(name, place, int(number), Tally(Path(path), int(number)), answer))


if __name__ == "__main__":
    main()
