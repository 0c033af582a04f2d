"""A pool that its user has dropped is gone, although the event loop and the workers that its tasks used go on."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from headgate import CooldownResource, Resource, ResourcePool, TaskCancelled, TaskPool
from headgate.testing import virtual
from tests.integration.combined import cancel_jobs, combined_jobs
from tests.support.combined.combined_support import Apart, noted
from tests.support.resources.support import always

HOUR = 3600.0

Pool = TaskPool
Keys = ResourcePool[Any]


# -- workers -----------------------------------------------------------------------------------------------------------


async def ends(pool: Pool, log: str) -> None:
    await pool.run(combined_jobs.number, 1)


async def ends_in_time(pool: Pool, log: str) -> None:
    await (await pool.submit(combined_jobs.number, 1, timeout=HOUR))


async def is_cancelled(pool: Pool, log: str) -> None:
    handle = await pool.submit(cancel_jobs.victim, log, "cleans_up")
    await noted(log, "begun a cleans_up")
    handle.cancel()
    with pytest.raises(TaskCancelled):
        await handle


async def streams(pool: Pool, log: str) -> None:
    assert len([item async for item in pool.stream(combined_jobs.counts, log, 3, timeout=HOUR)]) == 3


async def streams_too_slowly(pool: Pool, log: str) -> None:
    with pytest.raises(TimeoutError):
        async for _ in pool.stream(combined_jobs.stalls, log, 0, timeout=0.5):
            pass


@pytest.mark.integration
@pytest.mark.parametrize("act", [ends, ends_in_time, is_cancelled, streams, streams_too_slowly])
def test_o01_a_session_with_a_worker_keeps_no_pool_whose_task_ran_there(
    shared: Apart, tmp_path: Any, act: Callable[[Pool, str], Coroutine[Any, Any, None]]
) -> None:
    async def main() -> weakref.ref[Keys]:
        keys = ResourcePool({"a": "secret"})
        async with TaskPool(resources=keys, workers=shared.pool) as pool:
            await act(pool, str(tmp_path / "log"))
        return weakref.ref(keys)

    kept = shared(main)
    gc.collect()
    assert kept() is None


# -- timers ------------------------------------------------------------------------------------------------------------


async def runs_in_time(keys: Keys, pool: Pool) -> None:
    await keys.run(lambda _: asyncio.sleep(1), timeout=HOUR)


async def waits_for_a_key(keys: Keys, pool: Pool) -> None:
    async with keys.lease():
        waiting = asyncio.create_task(keys.run(always("ok"), wait_for_capacity=True, within=HOUR))
        await asyncio.sleep(1)
    await waiting


async def submits_with_a_timeout(keys: Keys, pool: Pool) -> None:
    await (await pool.submit(asyncio.sleep, 1, timeout=HOUR))


@pytest.mark.parametrize("act", [runs_in_time, waits_for_a_key, submits_with_a_timeout])
@virtual
async def test_o01_timers_of_other_pools_keep_no_pool_whose_task_made_them(
    act: Callable[[Keys, Pool], Coroutine[Any, Any, None]],
) -> None:
    async def made() -> weakref.ref[Keys]:
        async def body(resource: Resource[Any]) -> None:
            await act(keys, inner)

        own = ResourcePool({"b": "secret"})
        async with TaskPool("outer", resources=own) as outer:
            await (await outer.submit(body))
        return weakref.ref(own)

    # asyncio keeps a timer that was cancelled, and its context, as long as another one is due before it.
    earlier = asyncio.get_running_loop().call_later(HOUR / 2, int)
    keys = ResourcePool([Resource("a", "secret", 1)])
    async with TaskPool("inner") as inner:
        kept = await asyncio.create_task(made())
        gc.collect()
        assert kept() is None
    earlier.cancel()


# -- logs --------------------------------------------------------------------------------------------------------------


def test_o01_the_log_of_cooldowns_keeps_no_virtual_loop() -> None:
    @virtual
    async def cools() -> weakref.ref[asyncio.AbstractEventLoop]:
        keys = ResourcePool({"a": "secret", "b": "secret"})
        outcomes: list[object] = [CooldownResource(5), "ok"]

        async def operation(resource: Resource[str]) -> object:
            return await always(outcomes.pop(0))(resource)

        await keys.run(operation, retry_delay=0)
        return weakref.ref(asyncio.get_running_loop())

    kept = cools()
    gc.collect()
    assert kept() is None
