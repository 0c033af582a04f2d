"""The storm on real workers: a third of the keys fail, tenants flood, workers are killed, tasks are cancelled."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections import Counter
from typing import Any

import pytest

from headgate import (
    CooldownResource,
    DisableResource,
    PoolExhausted,
    Resource,
    ResourcePool,
    RetryOperation,
    TaskPool,
    WorkerLost,
    WorkerPool,
    fair_round_robin,
    subscribe,
)
from headgate.errors import NoWorkersAvailable
from tests.support.combined.support import jain
from tests.support.workers.support import run

pytestmark = pytest.mark.integration

SLOTS = 24
TENANTS = {"flood": 0.6, "ann": 0.2, "bob": 0.2}


async def stormy(key: Resource[str], number: int) -> int:
    """On a worker: every third key fails now and then, each kind in its own way."""
    await asyncio.sleep(random.choice((0.0, 0.002, 0.01)))
    nth = int(key.resource_id.removeprefix("k"))
    if nth % 3 == 0 and random.random() < 0.15:
        kind = nth // 3 % 3
        if kind == 0:
            raise CooldownResource(0.05, "429")
        if kind == 1 and random.random() < 0.1:
            raise DisableResource("401")
        raise RetryOperation("502")
    assert key.value == f"secret-{nth}"
    return number


class Watch:
    """Every event of the day, checked as it comes."""

    def __init__(self, keys: ResourcePool[str]) -> None:
        self.keys = keys
        self.wrong: list[str] = []
        self.ends: Counter[str] = Counter()
        self.starts: list[str] = []
        self.tenants: dict[str, str] = {}
        self.pool: TaskPool | None = None
        self.workers: WorkerPool | None = None
        self.kill_after: list[int] = []
        """Numbers of tasks: when so many have ended, a worker is killed."""
        self.killed: list[int] = []

    def hear(self, event: Any) -> None:
        if event.name == "resource_acquired":
            seen = self.keys.snapshot()[event.usage.resource_id]
            if seen["status"] != "healthy" or seen["in_flight"] > (seen["max_in_flight"] or 1e9):
                self.wrong.append(f"{event.usage.resource_id} was given out: {seen}")
        elif event.name == "pool_submit":
            self.tenants[event.task_id] = str(event.partition)
        elif event.name == "pool_dequeue":
            if event.attempt == 1:
                self.starts.append(self.tenants[event.task_id])
            if self.pool is not None and self.pool.snapshot(0).active > SLOTS:
                self.wrong.append("above the cap")
        elif event.name == "pool_finish":
            self.ends[event.task_id] += 1
            self.kill()

    def kill(self) -> None:
        """One worker after the other, while there is work."""
        if self.workers is None or not self.kill_after or len(self.ends) < self.kill_after[0]:
            return
        victims = [worker for worker in self.workers.workers() if worker.state == "ready"]
        if victims:
            self.kill_after.pop(0)
            self.killed.append(random.choice(victims).pid)
            os.kill(self.killed[-1], signal.SIGKILL)


def test_t81_t22_a_storm_on_real_workers(scale: float) -> None:
    tasks, kills = max(250, int(5000 * scale**1.4)), max(1, int(12 * scale))
    chance = random.Random(7)

    async def main() -> None:
        keys = ResourcePool(
            [Resource(f"k{n}", f"secret-{n}", 3) for n in range(20)], max_attempts=60, cooldown_table=(0.05, 0.1)
        )
        watch = Watch(keys)
        unsubscribe = subscribe(watch.hear)
        try:
            async with (
                WorkerPool(spawn=2) as workers,
                TaskPool(
                    max_concurrent=SLOTS, queue=fair_round_robin("tenant"), resources=keys, workers=workers
                ) as pool,
            ):
                watch.pool = pool
                handles = []
                names = [name for name, part in TENANTS.items() for _ in range(int(tasks * part))]
                for number, tenant in enumerate(names):  # the flood comes first
                    handles.append(await pool.submit(stormy, number, tenant=tenant, retries=50))
                watch.kill_after = [len(names) * (turn + 1) // (kills + 1) for turn in range(kills)]
                watch.workers = workers
                for handle in chance.sample(handles, tasks // 20):
                    await asyncio.sleep(0.002)
                    handle.cancel()
                await pool.drain()
        finally:
            unsubscribe()
        assert watch.killed
        assert watch.wrong == []
        assert set(watch.ends.values()) == {1}
        assert watch.ends.keys() == {handle.id for handle in handles}
        assert {handle.status for handle in handles} <= {"completed", "cancelled"}, outcomes(handles)
        assert all(h.snapshot().result == n for n, h in enumerate(handles) if h.status == "completed")
        seen = keys.snapshot()
        assert sum(one["in_flight"] for one in seen.values()) == 0
        assert keys.stats().waiting == 0
        assert fairness(watch.starts) >= 0.95

    run(main, patience=300)


def outcomes(handles: list[Any]) -> Counter[str]:
    """Why some failed, if any did."""
    errors = (handle.snapshot().error for handle in handles if handle.status == "failed")
    expected = (PoolExhausted, WorkerLost, NoWorkersAvailable)
    return Counter(f"{type(error).__name__}: {error}" for error in errors if isinstance(error, expected) or error)


def fairness(starts: list[str]) -> float:
    """Jain's index over first starts, while all tenants had tasks queued."""
    left = Counter(starts)
    until = len(starts)
    for position, tenant in enumerate(starts):
        left[tenant] -= 1
        if not left[tenant]:
            until = position
            break
    counts = Counter(starts[SLOTS:until])  # the first were alone when they came
    return jain([counts[tenant] for tenant in TENANTS])
