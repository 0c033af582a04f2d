"""`TaskPool(keep_failed=n)` and `pool.retry(task_id)`."""

from __future__ import annotations

import asyncio
from contextvars import ContextVar
from pathlib import Path

import pytest

from headgate import InvalidArgument, PoolClosed, TaskPool
from headgate.stores import JsonLinesStore
from headgate.testing import virtual

WHO: ContextVar[str] = ContextVar("who", default="nobody")


@virtual
async def test_o10_a_failed_task_runs_again_with_its_arguments_options_and_context() -> None:
    seen: list[tuple[int, str]] = []

    async def work(number: int) -> int:
        seen.append((number, WHO.get()))
        WHO.set("the first run")
        if len(seen) == 1:
            raise ValueError("once")
        return number

    async with TaskPool("o10-retry", keep_failed=2, queue="fair_round_robin") as pool:
        WHO.set("submitter")
        failed = await pool.submit(work, 7, key="ann", priority=3)
        with pytest.raises(ValueError, match="once"):
            await failed
        WHO.set("somebody else")
        again = await pool.retry(failed.id)
        assert await again == 7
        assert (again.key, again.priority, again.id != failed.id) == ("ann", 3, True)
        with pytest.raises(InvalidArgument, match="cannot be retried"):
            await pool.retry(failed.id)
    assert [number for number, _ in seen] == [7, 7]
    assert seen[0][1] == "submitter"


@virtual
async def test_o10_what_is_not_kept_cannot_be_retried_and_the_error_says_why() -> None:
    async def fail() -> None:
        raise ValueError("always")

    async with TaskPool("o10-none") as pool:
        handle = await pool.submit(fail)
        with pytest.raises(ValueError, match="always"):
            await handle
        with pytest.raises(InvalidArgument, match="keeps no failed tasks"):
            await pool.retry(handle.id)
    async with TaskPool("o10-last", keep_failed=1) as pool:
        handles = [await pool.submit(fail) for _ in range(2)]
        done = await pool.submit(asyncio.sleep, 0)
        await asyncio.gather(*handles, done, return_exceptions=True)
        for wrong in (handles[0].id, done.id):
            with pytest.raises(InvalidArgument, match="not among the last 1"):
                await pool.retry(wrong)
        for odd in ("", "no/7", "x", f"{pool.id}/seven"):
            with pytest.raises(InvalidArgument):
                await pool.retry(odd)
        again = await pool.retry(handles[1].id)
        with pytest.raises(ValueError, match="always"):
            await again
    with pytest.raises(PoolClosed):
        await pool.retry(again.id)
    with pytest.raises(InvalidArgument, match="keep_failed"):
        TaskPool("o10-wrong", keep_failed=-1)


@pytest.mark.integration
def test_o10_a_task_of_a_durable_pool_can_be_retried(tmp_path: Path) -> None:
    times = 0

    async def once() -> int:
        nonlocal times
        times += 1
        if times == 1:
            raise ValueError("once")
        return times

    async def main() -> None:
        store = JsonLinesStore(tmp_path)
        async with TaskPool(scope="pipeline", pipeline_id="o10", store=store, keep_failed=1) as pool:
            handle = await pool.submit(once)
            with pytest.raises(ValueError, match="once"):
                await handle
            assert await (await pool.retry(handle.id)) == 2

    asyncio.run(main())
