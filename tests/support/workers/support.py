"""Small things many tests of worker pools need: a bounded run, polling, and a look at processes through /proc."""

from __future__ import annotations

import asyncio
import contextvars
import os
import select
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from functools import cache
from pathlib import Path
from typing import IO, Any

from headgate import LocalPlacement, WorkerPool
from headgate.workers.processes.keeper_client import KeeperClient
from tests.support.workers import jobs

ROOT = Path(__file__).parents[3]
PATIENCE = 30.0
"""Real seconds after which a test is taken to hang."""
HANGS = 25.0
"""The same for a condition: how long it takes is not what a test shows, unless it says so. Less than `PATIENCE`, so
that the test says for what it waited."""
LOOP: Any = None
"""What makes the loops of these tests; None: asyncio."""
if os.environ.get("HEADGATE_TEST_LOOP") == "uvloop":
    import uvloop

    LOOP = uvloop.new_event_loop
MARK = "HEADGATE_TEST_MARK"
"""An environment variable that every descendant of a parent inherits, however far it has gone."""


def run(main: Callable[[], Coroutine[Any, Any, Any]], patience: float = PATIENCE) -> Any:
    """`asyncio.run`, for so many seconds at most."""
    with asyncio.Runner(loop_factory=LOOP) as runner:
        return runner.run(bounded(main, patience))


async def bounded(main: Callable[[], Coroutine[Any, Any, Any]], patience: float = PATIENCE) -> Any:
    async with asyncio.timeout(patience):
        return await main()


async def until(condition: Callable[[], Any], seconds: float = HANGS) -> Any:
    """Poll, in real time, till it is true; what it said."""
    end = time.monotonic() + seconds
    while not (said := condition()):
        assert time.monotonic() < end, f"waited {seconds} s for it"
        await asyncio.sleep(0.005)
    return said


def wait_until(condition: Callable[[], Any], seconds: float = HANGS) -> Any:
    """The same without a loop."""
    end = time.monotonic() + seconds
    while not (said := condition()):
        assert time.monotonic() < end, f"waited {seconds} s for it"
        time.sleep(0.005)
    return said


def keeper_client_of(pool: WorkerPool) -> KeeperClient:
    """What speaks to the keeper of an open pool."""
    assert isinstance(pool._placement, LocalPlacement)
    assert pool._placement.keepers.keeper is not None
    return pool._placement.keepers.keeper


class Shared:
    """One open pool and its loop, for all tests of a module: ``shared(main)`` runs `main` as if inside its block."""

    def __init__(self, **options: Any) -> None:
        self.pool = WorkerPool(**options)
        self._runner = asyncio.Runner(loop_factory=LOOP)
        self._context = contextvars.copy_context()
        self._leave: asyncio.Event
        self._held: asyncio.Task[None]

    def __call__(self, main: Callable[[], Coroutine[Any, Any, Any]], patience: float = PATIENCE) -> Any:
        return self._runner.run(bounded(main, patience), context=self._context)

    def open(self) -> None:
        self(self._open)

    def close(self) -> None:
        self(self._close)
        self._runner.close()

    async def _open(self) -> None:
        opened = asyncio.Event()
        self._leave = asyncio.Event()

        async def hold() -> None:
            async with self.pool:
                opened.set()
                await self._leave.wait()

        # In the very context in which the tests run, so that the pool is active there too.
        self._held = asyncio.get_running_loop().create_task(hold(), context=self._context)
        await until(lambda: opened.is_set() or self._held.done(), PATIENCE)
        if self._held.done():
            await self._held

    async def _close(self) -> None:
        self._leave.set()
        await self._held


@cache
def what_grpc_opens() -> None:
    """Have gRPC open what it keeps until the process ends: not a leak of the test that happens to come first."""

    async def main() -> None:
        async with WorkerPool(spawn=1):
            assert await jobs.add(1, 2) == 3

    run(main)


# -- pools ------------------------------------------------------------------------------------------------------------


def pids(pool: WorkerPool) -> list[int]:
    """Of the workers that are ready."""
    return [view.pid for view in pool.workers() if view.state == "ready"]


def states(pool: WorkerPool) -> dict[int, str]:
    return {view.pid: view.state for view in pool.workers()}


def in_flight(pool: WorkerPool) -> int:
    return sum(view.in_flight for view in pool.workers())


async def all_ready(pool: WorkerPool, count: int, seconds: float = HANGS) -> list[int]:
    """Wait till the pool has just so many workers, and all are ready, none of them dead and not yet missed."""

    def settled() -> bool:
        found = states(pool)
        return list(found.values()) == ["ready"] * count and all(map(alive, found))

    await until(settled, seconds)
    return pids(pool)


# -- what routines noted in a file ------------------------------------------------------------------------------------


def lines(path: Path | str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except FileNotFoundError:
        return []


def times(path: Path | str) -> Counter[str]:
    """How often each line was noted."""
    return Counter(lines(path))


# -- processes --------------------------------------------------------------------------------------------------------


def alive(pid: int) -> bool:
    """Is it running? What has ended and waits for its parent is not."""
    return born(pid) != ""


def parent_of(pid: int) -> int:
    return int(_stat(pid)[1])


def born(pid: int) -> str:
    """When it began: a pid alone may have been given to another since. "" when it has ended."""
    stat = _stat(pid)
    return stat[19] if stat and stat[0] not in "ZX" else ""


def _stat(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _every_pid() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def descendants(pid: int) -> set[int]:
    """All that run below it now."""
    parents = {one: int(stat[1]) for one in _every_pid() if (stat := _stat(one))}
    found: set[int] = set()
    fresh = {pid}
    while fresh:
        fresh = {one for one, parent in parents.items() if parent in fresh} - found
        found |= fresh
    return {one for one in found if alive(one)}


def marked(mark: str) -> set[int]:
    """All that run with this mark in their environment, whoever their parent is."""
    wanted = f"{MARK}={mark}".encode()
    found = set()
    for pid in _every_pid():
        try:
            environment = Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:
            continue
        if wanted in environment.split(b"\0") and alive(pid):
            found.add(pid)
    return found


def command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:200]
    except OSError:
        return "gone"


# -- scripts ----------------------------------------------------------------------------------------------------------


def environment(**more: str) -> dict[str, str]:
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path, **more}


def script(code: str, folder: Path, *, patience: float = PATIENCE, **more: str) -> subprocess.CompletedProcess[str]:
    """Run this as ``python main.py``: what it defines is in `__main__`."""
    path = folder / "main.py"
    path.write_text(code)
    command = [sys.executable, str(path)]
    return subprocess.run(
        command, cwd=folder, env=environment(**more), timeout=patience, capture_output=True, text=True, check=False
    )


def read_line(out: IO[bytes], seconds: float = PATIENCE) -> str:
    """The next line of an unbuffered pipe; "" at its end."""
    end = time.monotonic() + seconds
    read = b""
    while not read.endswith(b"\n"):
        left = end - time.monotonic()
        assert left > 0, f"no line within {seconds} s, only {read!r}"
        assert select.select([out], [], [], left)[0], f"no line within {seconds} s, only {read!r}"
        byte = os.read(out.fileno(), 1)
        if not byte:
            break
        read += byte
    return read.decode().strip()
