"""T01, T01b: drains and closes that are interrupted, said on the wrong loop, or said by the tasks themselves."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from headgate import HeadgateError, PoolClosed, TaskPool, WaitCycle, pool_get, pool_wait
from headgate.testing import settle, virtual
from tests.support.tasks.support import Gate, broken, counts, quick, slow


@pytest.mark.parametrize("what", ["drain", "close"])
def test_t01_draining_on_another_loop_is_a_clear_error_and_no_hang(what: str) -> None:
    pool = TaskPool("bound")
    with asyncio.Runner() as first, asyncio.Runner() as second:

        async def begin() -> Any:
            return await pool.submit(slow, 3600)

        async def end() -> None:
            async with asyncio.timeout(0.2):  # on a real loop: it must not wait for what it cannot hear
                await getattr(pool, what)()

        first.run(begin())
        with pytest.raises(HeadgateError, match="loop"):
            second.run(end())
        first.run(pool.close(cancel=True))
    assert pool_get("bound") is None


def test_t01_a_pool_that_was_never_used_closes_on_any_loop() -> None:
    pool = TaskPool("unused")
    with asyncio.Runner() as first, asyncio.Runner() as second:
        first.run(pool.drain())
        second.run(pool.close())
        first.run(pool.close())
    assert pool_get("unused") is None


@virtual
async def test_t01b_a_close_that_is_cancelled_can_be_said_again() -> None:
    pool = TaskPool("patient")
    handle = await pool.submit(slow, 10)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(pool.close(), 1)
    assert pool_get("patient") is pool
    with pytest.raises(PoolClosed):
        await pool.submit(quick)
    await pool.close()
    assert (handle.status, asyncio.get_running_loop().time()) == ("completed", 10)
    assert pool_get("patient") is None


@virtual
async def test_t01b_a_drain_that_is_cancelled_leaves_the_pool_as_it_was() -> None:
    async with TaskPool() as pool:
        await pool.submit(slow, 10)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(pool.drain(), 1)
        assert await (await pool.submit(quick)) == "done"


@virtual
async def test_t01b_drain_waits_for_what_comes_while_it_drains() -> None:
    async with TaskPool() as pool:
        await pool.submit(slow, 5)
        draining = asyncio.create_task(pool.drain())
        await asyncio.sleep(1)
        await pool.submit(slow, 5)
        await draining
        assert asyncio.get_running_loop().time() == 10


@virtual
async def test_t01b_drain_waits_for_retries_and_tasks_that_wait() -> None:
    async with TaskPool() as pool:
        calls: list[int] = []

        async def child() -> None:
            calls.append(1)
            if len(calls) < 3:
                await asyncio.sleep(1)
                raise LookupError

        async def parent() -> None:
            await (await pool.submit(child, retries=5))

        await pool.submit(parent)
        await pool.drain()
        assert counts(pool) == {"completed": 2}


@pytest.mark.parametrize("what", ["drain", "close"])
@virtual
async def test_t42_a_task_that_waits_for_its_own_pool_is_a_cycle(what: str) -> None:
    async with TaskPool("own") as pool:

        async def body() -> None:
            await getattr(pool, what)()

        handle = await pool.submit(body)
        assert isinstance((await pool_wait(handle)).error, WaitCycle)


@virtual
async def test_t42_a_task_may_drain_another_pool() -> None:
    async with TaskPool("outer") as outer:

        async def body() -> int:
            async with TaskPool("inner") as inner:
                for number in range(3):
                    await inner.submit(slow, 1, number)
            return inner.snapshot().completed

        assert await asyncio.gather(await outer.submit(body)) == [3]


@virtual
async def test_t01b_an_idempotent_submit_is_refused_by_a_closed_pool_too() -> None:
    pool = TaskPool()
    await (await pool.submit(quick, idempotency_key="k"))
    await pool.close()
    with pytest.raises(PoolClosed):
        await pool.submit(quick, idempotency_key="k")


@virtual
async def test_t01b_cancelling_the_block_itself_cancels_the_work() -> None:
    async def block() -> None:
        async with TaskPool("block") as pool:
            handles.extend([await pool.submit(slow, 60), await pool.submit(slow, 60)])
            await asyncio.sleep(60)

    handles: list[Any] = []
    blocked = asyncio.create_task(block())
    await asyncio.sleep(1)
    blocked.cancel()
    await asyncio.wait([blocked])
    assert blocked.cancelled()
    assert [handle.status for handle in handles] == ["cancelled", "cancelled"]
    assert pool_get("block") is None


@virtual
async def test_t01b_failures_of_tasks_do_not_break_the_block() -> None:
    async with TaskPool() as pool:
        gate = Gate()
        handle = await pool.submit(broken)
        await pool.submit(gate.wait)
        await settle()
        gate.open()
    assert handle.status == "failed"
    assert counts(pool) == {"failed": 1, "completed": 1}
