"""T80: pools inside pools, beside asyncio's own tools, and outside their process."""

from __future__ import annotations

import asyncio
import copy
import pickle
import subprocess
import sys
from typing import Any

import pytest

from headgate import (
    HeadgateError,
    IdempotencyConflict,
    InvalidType,
    PoolBusy,
    PoolClosed,
    QueueFull,
    SubmitTimeout,
    TaskCancelled,
    TaskExpired,
    TaskPool,
    TaskRejected,
    WaitCycle,
    backpressure_queue,
    fair_round_robin,
    pool_get,
    pool_list,
)
from headgate.testing import run, virtual
from tests.support.tasks.support import Busy, never_above_the_cap, quick, slow


@virtual
async def test_t80_work_inside_a_task_sees_the_same_named_budget() -> None:
    busy = Busy()
    async with TaskPool("provider", max_concurrent=2) as provider, TaskPool("agents", max_concurrent=10) as agents:

        async def call() -> None:
            with busy():
                await asyncio.sleep(1)

        async def agent() -> bool:
            found = pool_get("provider")
            assert found is not None
            for _ in range(3):
                await (await found.submit(call))
            return found is provider

        with never_above_the_cap(provider, agents):
            handles = [await agents.submit(agent) for _ in range(10)]
            assert await asyncio.gather(*handles) == [True] * 10
    assert busy.most == 2
    assert asyncio.get_running_loop().time() == 15


@virtual
async def test_t80_a_thread_sees_the_registry_too() -> None:
    async with TaskPool("threads") as pool:
        assert await (await pool.submit(lambda: pool_get("threads") is pool and pool in pool_list())) is True


@virtual
async def test_t80_a_pool_made_inside_a_task_is_known_outside() -> None:
    async with TaskPool() as pool:

        async def make() -> None:
            TaskPool("made inside")

        await (await pool.submit(make))
        found = pool_get("made inside")
        assert found is not None
        assert await (await found.submit(quick)) == "done"
        await found.close()


@virtual
async def test_t80_a_semaphore_and_a_task_group_stay_a_call_sites_own_bound() -> None:
    busy, limit = Busy(), asyncio.Semaphore(2)
    async with TaskPool(max_concurrent=5) as pool:

        async def bounded() -> None:
            async with limit:
                with busy():
                    await asyncio.sleep(1)

        async with asyncio.TaskGroup() as group:
            for _ in range(8):
                group.create_task(_ask(pool, bounded))
    assert busy.most == 2


async def _ask(pool: TaskPool, fn: Any) -> Any:
    return await (await pool.submit(fn))


@virtual
async def test_t80_pools_and_handles_cannot_travel() -> None:
    async with TaskPool("here") as pool:
        handle = await pool.submit(slow, 1)
        for thing in (pool, handle):
            for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
                with pytest.raises(InvalidType) as caught:
                    pickle.dumps(thing, protocol)
                assert caught.value.remedy
            for how in (copy.copy, copy.deepcopy):
                with pytest.raises(InvalidType):
                    how(thing)


@virtual
async def test_t80_snapshots_strategies_and_policies_travel() -> None:
    async with TaskPool("here") as pool:
        handle = await pool.submit(quick, "result")
        await handle
        for thing in (pool.snapshot(), handle.snapshot(), fair_round_robin("t"), backpressure_queue(3)):
            assert pickle.loads(pickle.dumps(thing)) == thing
        assert pickle.loads(pickle.dumps(handle.snapshot())).result == "result"


@pytest.mark.parametrize(
    "kind",
    [
        QueueFull,
        PoolBusy,
        PoolClosed,
        SubmitTimeout,
        IdempotencyConflict,
        WaitCycle,
        TaskCancelled,
        TaskExpired,
        TaskRejected,
    ],
)
def test_t80_errors_travel(kind: type[HeadgateError]) -> None:
    error = kind("what happened")
    found = pickle.loads(pickle.dumps(error))
    assert type(found) is kind
    assert (str(found), found.code, found.remedy) == (str(error), error.code, error.remedy)


def test_t80_names_are_per_process() -> None:
    pool = TaskPool("only here")
    program = "import headgate; print(headgate.pool_get('only here'), headgate.pool_list())"
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert told.stdout.split() == ["None", "[]"]
    assert pool_get("only here") is pool
    run(pool.close())
