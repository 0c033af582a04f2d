"""Small things many tests of task pools need."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from headgate import TaskHandle, TaskPool, subscribe

AUDIT = "lifecycle.pool.audit"
EVERY_STRATEGY = ["fifo", "lifo", "priority", "fair_round_robin", "fair_share"]


class Gate:
    """A body that waits until the gate is opened. In a pool of one slot it holds back everybody else."""

    def __init__(self) -> None:
        self.entered = 0
        self._opened = asyncio.Event()

    async def wait(self, result: Any = None) -> Any:
        self.entered += 1
        await self._opened.wait()
        return result

    def open(self) -> None:
        self._opened.set()


class Turns:
    """A body that notes whose turn it was, and takes no time."""

    def __init__(self) -> None:
        self.order: list[Any] = []

    async def take(self, name: Any) -> Any:
        self.order.append(name)
        return name


async def quick(value: Any = "done") -> Any:
    """A body that is done at once."""
    return value


async def slow(seconds: float, value: Any = "done") -> Any:
    """A body that takes its time."""
    await asyncio.sleep(seconds)
    return value


async def broken(error: Exception | None = None) -> None:
    """A body that fails."""
    raise error or LookupError("broken")


class Flaky:
    """A body that fails so many times, and then not any more."""

    def __init__(self, failures: int) -> None:
        self.failures = failures
        self.calls = 0

    async def run(self) -> int:
        self.calls += 1
        if self.calls <= self.failures:
            raise LookupError(f"failure {self.calls}")
        return self.calls


async def order_behind_a_gate(pool: TaskPool, *submits: tuple[Any, dict[str, Any]]) -> list[Any]:
    """Queue these (name, options) while a gate holds the only slot, then open it: in which order do they run?"""
    gate, turns = Gate(), Turns()
    await pool.submit(gate.wait)
    handles = [await pool.submit(turns.take, name, **options) for name, options in submits]
    assert all(handle.status == "queued" for handle in handles)
    gate.open()
    await pool.drain()
    return turns.order


def counts(pool: TaskPool) -> dict[str, int]:
    """The counters of a pool that are not 0."""
    snapshot = pool.snapshot(0)
    names = ("active", "waiting", "queued", "completed", "failed", "rejected", "cancelled", "expired", "stale")
    return {name: snapshot[name] for name in names if snapshot[name]}


class Watch:
    """Looks at its pools at every event of theirs: is one above its cap, does a counter not add up?"""

    def __init__(self, *pools: TaskPool) -> None:
        self.pools = {pool.id: pool for pool in pools}
        self.wrong: list[str] = []
        self.most = dict.fromkeys(self.pools, 0)

    def __call__(self, event: Any) -> None:
        pool = self.pools.get(event.pool_id)
        if pool is not None:
            self.look(pool, event.name)

    def look(self, pool: TaskPool, at: str = "") -> None:
        seen = pool.snapshot(0)
        self.most[pool.id] = max(self.most[pool.id], seen.active)
        if not 0 <= seen.active <= seen.max_concurrent or seen.waiting < 0 or seen.queued < 0:
            self.wrong.append(f"{at}: {seen.active} active of {seen.max_concurrent}, {seen.waiting} waiting")
        if pool.size() != seen.active + seen.waiting + seen.queued:
            self.wrong.append(f"{at}: size {pool.size()}")


@contextmanager
def never_above_the_cap(*pools: TaskPool) -> Iterator[Watch]:
    """Fails if at any event of one of these pools more tasks are active than its cap allows."""
    watch = Watch(*pools)
    unsubscribe = subscribe(watch, AUDIT)
    try:
        yield watch
    finally:
        unsubscribe()
    assert watch.wrong == []


class Busy:
    """Counts bodies that really run at this moment, whatever the pool's counters say."""

    def __init__(self) -> None:
        self.now = 0
        self.most = 0

    @contextmanager
    def __call__(self) -> Iterator[None]:
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            yield
        finally:
            self.now -= 1


class Barrier:
    """A plain function for threads, that waits until it is let go."""

    def __init__(self) -> None:
        self.entered = threading.Semaphore(0)
        self.released = threading.Event()
        self.left = 0

    def wait(self, result: Any = "late") -> Any:
        self.entered.release()
        assert self.released.wait(10), "nobody let it go"
        self.left += 1
        return result


async def until(condition: Callable[[], Any], seconds: float = 5.0) -> None:
    """Poll, in real time: only for tests with threads on a real loop."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"waited {seconds} s for it"
        await asyncio.sleep(0.001)


def ids(handles: list[TaskHandle[Any]]) -> list[str]:
    return [handle.id for handle in handles]
