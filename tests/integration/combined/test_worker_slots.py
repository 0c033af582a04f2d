"""A TaskPool with workers: how many tasks it runs at a time, and which worker gets the next one."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from headgate import (
    ChannelOptions,
    InvalidArgument,
    LeastLoadedLoadBalancer,
    RoundRobinLoadBalancer,
    SqliteStore,
    TaskPool,
    WorkerMetadata,
    WorkerPool,
    routine,
)
from headgate.tasks.attempts.worker_slots import WorkerSlots
from headgate.testing import check_slot_budget
from headgate.workers import WorkerView
from tests.support.workers.support import PATIENCE, until


def pid() -> int:
    return os.getpid()


async def waits(path: str) -> int:
    while not os.path.exists(path):  # noqa: ASYNC110, ASYNC240 - nobody here could set an event
        await asyncio.sleep(0.005)
    return os.getpid()


@routine
async def who() -> int:
    return os.getpid()


def test_t03_a_pool_without_max_concurrent_runs_one_task_at_a_time() -> None:
    for pool in (TaskPool("default"), TaskPool("none", max_concurrent=None)):
        assert pool.max_concurrent == 1
        assert pool.snapshot().config["max_concurrent"] == 1
        asyncio.run(pool.close())


@pytest.mark.parametrize("scope", ["tenant", "org"])
def test_t03_a_shared_pool_needs_max_concurrent(scope: Any, tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "s.db")
    with pytest.raises(InvalidArgument, match=f"max_concurrent is not given, and the scope '{scope}' shares it"):
        TaskPool("shared", scope=scope, scope_id="acme", store=store)
    store.close()


class Fleet:
    """In place of a WorkerPool: workers that come and go."""

    def __init__(self, *limits: int | None) -> None:
        self.views = [view(number, limit) for number, limit in enumerate(limits)]

    def workers(self) -> list[WorkerView]:
        return self.views


def view(number: int, limit: int | None, state: Any = "ready") -> WorkerView:
    options = ChannelOptions(max_concurrent_streams=limit)
    return WorkerView(WorkerMetadata(f"w-{number}", "a", 1, "1", options=options), state)


def test_t03_the_budget_is_what_all_workers_take() -> None:
    fleet: Any = Fleet(5, None)
    budget = WorkerSlots(fleet, lambda: None)
    assert budget.limit == 5 + 32
    seen: list[int] = []
    budget.on_change(seen.append)
    fleet.views = [view(1, 7), view(2, 7, "lost"), view(3, 7, "stopping"), view(4, 2, "cooling")]
    budget.look()
    fleet.views = []
    budget.look()
    budget.resize(3)
    fleet.views = [view(1, 7)]
    budget.look()
    assert seen == [9, 1, 3, 3]


def test_t03_the_budget_of_workers_keeps_the_contract() -> None:
    def budget_of(limit: int) -> WorkerSlots:
        fleet: Any = Fleet(limit)
        return WorkerSlots(fleet, lambda: None)

    check_slot_budget(budget_of)


@pytest.mark.integration
def test_t03_a_pool_follows_its_workers() -> None:
    async def main() -> None:
        workers = WorkerPool(spawn=2)
        early = TaskPool("early", workers=workers)
        assert early.max_concurrent == 1
        async with workers, TaskPool(workers=workers) as pool, TaskPool(workers=workers, max_concurrent=3) as fixed:
            assert (pool.max_concurrent, early.max_concurrent, fixed.max_concurrent) == (64, 64, 3)
            assert await pool.run(pid) in {worker.pid for worker in workers.workers()}
            await workers.resize(1)
            await until(lambda: pool.max_concurrent == 32)
            pool.resize(5)
            await workers.resize(2)
            await until(lambda: early.max_concurrent == 64)
            assert (pool.max_concurrent, fixed.max_concurrent) == (5, 3)
            await early.close()

    asyncio.run(asyncio.wait_for(main(), PATIENCE))


@pytest.mark.integration
@pytest.mark.parametrize(
    "given",
    [
        "nothing",
        "round robin",
        *(pytest.param(given, marks=pytest.mark.soak) for given in ("nothing, connected", "least loaded")),
    ],
)
def test_t81_tasks_go_to_the_worker_with_the_least_to_do_unless_told_otherwise(tmp_path: Path, given: str) -> None:
    balancer = {"round robin": RoundRobinLoadBalancer(), "least loaded": LeastLoadedLoadBalancer()}.get(given)

    async def main() -> None:
        async with WorkerPool(spawn=2, quorum=2, loadbalancer=balancer, lazy=given != "nothing, connected") as workers:
            if given != "least loaded":  # used alone, it asks one after the other
                assert set(Counter([await who() for _ in range(4)]).values()) == {2}
            async with TaskPool(max_concurrent=2, workers=workers) as pool:
                path = tmp_path / "go"
                long = await pool.submit(waits, str(path))
                short = Counter([await pool.run(pid) for _ in range(6)])
                path.touch()
                busy = await long
        assert short[busy] == (3 if given == "round robin" else 0)

    asyncio.run(asyncio.wait_for(main(), PATIENCE))
