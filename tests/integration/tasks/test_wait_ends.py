"""T42: waits that could never end, waits that are cut short, and what a resize, a close or a retry does to lenders."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest

from headgate import TaskCancelled, TaskHandle, TaskPool, WaitCycle, pool_wait
from headgate.testing import settle, virtual
from tests.support.tasks.support import Gate, counts, never_above_the_cap, quick, slow

# -- cycles ------------------------------------------------------------------------------


def labels(error: BaseException, name: str) -> list[str]:
    """The tasks that the message names, in order."""
    return re.findall(rf"{name}[#/]\d+", str(error))


@virtual
async def test_t42_a_task_that_waits_for_itself() -> None:
    async with TaskPool("ring") as pool:
        mine: list[TaskHandle[Any]] = []

        async def body() -> Any:
            await asyncio.sleep(1)
            return await mine[0]

        mine.append(await pool.submit(body))
        with pytest.raises(WaitCycle) as caught:
            await mine[0]
        assert caught.value.code == "HEADGATE-POL-007"
        assert len(set(labels(caught.value, "ring"))) == 1
        assert asyncio.get_running_loop().time() == 1
        assert counts(pool) == {"failed": 1}


@pytest.mark.parametrize("length", [2, 3, 7])
@pytest.mark.parametrize("slots", [1, 10])
@pytest.mark.parametrize("wait", ["await", "pool_wait"])
@virtual
async def test_t42_tasks_that_wait_for_each_other(length: int, slots: int, wait: str) -> None:
    async with TaskPool("ring", max_concurrent=slots) as pool:
        handles: list[TaskHandle[Any]] = []
        raised: list[BaseException] = []

        async def body(number: int) -> Any:
            await asyncio.sleep(0)
            awaited = handles[(number + 1) % length]
            try:
                if wait == "pool_wait":
                    await pool_wait(awaited)
                else:
                    await awaited
            except WaitCycle as error:
                raised.append(error)
                if wait == "await":
                    raise

        for number in range(length):
            handles.append(await pool.submit(body, number))
        await pool_wait(handles)
        assert asyncio.get_running_loop().time() == 0
        assert raised
        chain = labels(raised[0], "ring")
        assert len(set(chain)) == length
        assert chain[0] == chain[-1]
        assert pool.size() == 0


@virtual
async def test_t42_a_cycle_over_two_pools() -> None:
    async with TaskPool("left") as left, TaskPool("right") as right:
        handles: dict[str, TaskHandle[Any]] = {}

        async def body(other: str) -> Any:
            await asyncio.sleep(1)
            return await handles[other]

        handles["a"] = await left.submit(body, "b")
        handles["b"] = await right.submit(body, "a")
        with pytest.raises(WaitCycle) as caught:
            await handles["a"]
        assert labels(caught.value, "left")
        assert labels(caught.value, "right")
        assert left.size() == right.size() == 0


@virtual
async def test_t42_a_child_that_waits_for_its_parent() -> None:
    async with TaskPool() as pool:
        parents: list[TaskHandle[Any]] = []

        async def child() -> Any:
            return await parents[0]

        async def parent() -> Any:
            await asyncio.sleep(0)
            return await (await pool.submit(child))

        parents.append(await pool.submit(parent))
        with pytest.raises(WaitCycle):
            await parents[0]


@virtual
async def test_t42_a_list_with_a_cycle_begins_no_wait_at_all() -> None:
    async with TaskPool() as pool:
        mine: list[TaskHandle[Any]] = []

        async def body() -> str:
            await asyncio.sleep(0)
            fine = await pool.submit(slow, 5)
            with pytest.raises(WaitCycle):
                await pool_wait([fine, mine[0]])
            assert counts(pool)["active"] == 1  # it has its slot, as if it had not asked
            assert "waiting" not in counts(pool)
            return "went on"

        mine.append(await pool.submit(body))
        assert await mine[0] == "went on"


@virtual
async def test_t42_a_diamond_is_no_cycle() -> None:
    async with TaskPool() as pool:
        bottom = await pool.submit(slow, 1, "bottom", delay=1)

        async def side() -> Any:
            return await bottom

        async def top() -> list[Any]:
            return await asyncio.gather(await pool.submit(side), await pool.submit(side), bottom)

        assert await (await pool.submit(top)) == ["bottom"] * 3


@virtual
async def test_t42_a_wait_that_is_over_is_in_no_cycle() -> None:
    async with TaskPool(max_concurrent=2) as pool:
        handles: dict[str, TaskHandle[Any]] = {}
        gate = Gate()

        async def first() -> str:
            await asyncio.sleep(0)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(1):
                    await handles["second"]
            return "first"

        async def second() -> Any:
            await gate.wait()
            return await handles["first"]

        handles["first"] = await pool.submit(first)
        handles["second"] = await pool.submit(second)
        await asyncio.sleep(2)
        gate.open()
        assert await handles["second"] == "first"


# -- cut short ---------------------------------------------------------------------------


@virtual
async def test_t42_cancelling_a_waiter_leaves_the_awaited_alone_unless_it_is_its_child() -> None:
    async with TaskPool() as pool:
        awaited: list[TaskHandle[Any]] = [await pool.submit(slow, 10, "of another")]

        async def parent() -> Any:
            awaited.append(await pool.submit(slow, 10, "detached", detached=True))
            awaited.append(await pool.submit(slow, 10, "child"))
            return await pool_wait(awaited)

        handle = await pool.submit(parent, priority=1)
        await asyncio.sleep(11)
        assert handle.cancel()
        with pytest.raises(TaskCancelled):
            await handle
        assert asyncio.get_running_loop().time() == 11
        assert [(await pool_wait(one)).status for one in awaited] == ["completed", "completed", "cancelled"]
        assert counts(pool) == {"completed": 2, "cancelled": 2}


@virtual
async def test_t42_a_timeout_runs_on_while_it_waits() -> None:
    async with TaskPool() as pool:
        children: list[TaskHandle[Any]] = []

        async def parent() -> Any:
            children.append(await pool.submit(slow, 10, "child"))
            return await children[0]

        handle = await pool.submit(parent, timeout=5)
        with pytest.raises(TimeoutError):
            await handle
        assert asyncio.get_running_loop().time() == 5
        assert (await pool_wait(children[0])).status == "cancelled"


@virtual
async def test_t42_a_deadline_runs_on_while_it_waits() -> None:
    async with TaskPool() as pool:

        async def parent() -> Any:
            return await (await pool.submit(slow, 10, "child"))

        handle = await pool.submit(parent, deadline=5.0)
        with pytest.raises(TimeoutError):
            await handle
        assert asyncio.get_running_loop().time() == 5


@virtual
async def test_t42_a_task_may_stop_waiting_and_cancel_the_child_that_has_its_slot() -> None:
    async with TaskPool() as pool:

        async def parent() -> str:
            child = await pool.submit(slow, 3600)
            try:
                async with asyncio.timeout(1):
                    await child
            except TimeoutError:
                assert child.cancel()
            return (await pool_wait(child)).status

        with never_above_the_cap(pool):
            assert await (await pool.submit(parent)) == "cancelled"
        assert asyncio.get_running_loop().time() == 1
        assert counts(pool) == {"completed": 1, "cancelled": 1}


@virtual
async def test_t42_a_cancelled_lender_that_stood_for_its_slot_leaves_the_line() -> None:
    async with TaskPool(max_concurrent=1) as pool, TaskPool("other") as other:
        gate = Gate()
        foreign = await other.submit(gate.wait)

        async def waiter() -> Any:
            return await foreign

        handle = await pool.submit(waiter)
        await settle()
        blocker = await pool.submit(slow, 10)  # has its slot
        gate.open()
        await settle()
        assert handle.status == "running"
        assert counts(pool) == {"active": 1, "waiting": 1}
        handle.cancel()
        assert (await pool_wait(handle)).status == "cancelled"
        assert counts(pool) == {"active": 1, "cancelled": 1}
        await blocker
        assert (await pool.submit(quick)).status == "running"


@virtual
async def test_t42_a_failed_child_raises_in_the_parent_which_has_its_slot_again() -> None:
    async with TaskPool() as pool:

        async def child() -> None:
            raise LookupError("child")

        async def parent() -> dict[str, int]:
            with pytest.raises(LookupError, match="child"):
                await (await pool.submit(child))
            return counts(pool)

        assert await (await pool.submit(parent)) == {"active": 1, "failed": 1}


@virtual
async def test_t42_a_retry_of_a_parent_begins_clean() -> None:
    async with TaskPool() as pool:
        calls: list[int] = []

        async def parent() -> Any:
            calls.append(1)
            found = await (await pool.submit(slow, 1, len(calls)))
            if len(calls) < 3:
                raise LookupError
            return found

        with never_above_the_cap(pool):
            assert await (await pool.submit(parent, retries=2)) == 3
        assert counts(pool) == {"completed": 4}


@virtual
async def test_t42_shrinking_under_lenders_keeps_the_cap() -> None:
    async with TaskPool(max_concurrent=4) as pool:

        async def node(depth: int) -> int:
            if not depth:
                await asyncio.sleep(1)
                return 1
            children = [await pool.submit(node, depth - 1) for _ in range(3)]
            return sum([await child for child in children])

        handle = await pool.submit(node, 3)
        await asyncio.sleep(1.5)
        pool.resize(1)
        await asyncio.sleep(2)
        with never_above_the_cap(pool):
            assert await handle == 27


@virtual
async def test_t42_close_lets_parents_finish_their_children() -> None:
    pool = TaskPool()

    async def parent() -> Any:
        await asyncio.sleep(1)
        return await (await pool.submit(slow, 1, "late child"))

    handle = await pool.submit(parent)
    closing = asyncio.create_task(pool.close())
    await settle()
    shown = await pool_wait(handle)
    await closing
    assert pool.size() == 0
    assert shown.status in ("completed", "failed")


@virtual
async def test_t42_close_with_cancel_ends_a_tree() -> None:
    pool = TaskPool(max_concurrent=2)

    async def node(depth: int) -> Any:
        return await pool_wait([await pool.submit(node, depth + 1) for _ in range(2)]) if depth < 5 else await slow(60)

    await pool.submit(node, 0)
    await asyncio.sleep(1)
    await pool.close(cancel=True)
    assert pool.size() == 0
    assert set(counts(pool)) <= {"cancelled", "completed", "failed"}
    assert asyncio.get_running_loop().time() == 1


# -- caps and threads --------------------------------------------------------------------


@virtual
async def test_t42_a_lender_whose_key_is_at_its_cap_meanwhile_waits_for_its_key() -> None:
    async with TaskPool(max_concurrent=3, max_concurrent_per_key=1) as pool, TaskPool("other") as other:
        times: list[float] = []

        async def parent() -> None:
            await (await other.submit(slow, 1))
            times.append(asyncio.get_running_loop().time())
            assert counts(pool)["active"] == 2

        handle = await pool.submit(parent, key="a")
        await settle()
        stranger = await pool.submit(slow, 10, key="a")  # the key was lent too
        assert stranger.status == "running"
        queued = await pool.submit(slow, 5, key="a")
        await pool.submit(slow, 60)
        await handle
        assert times == [10]
        assert queued.status == "queued" or asyncio.get_running_loop().time() == 10


@pytest.mark.integration
def test_t42_a_thread_that_waits_through_the_loop_lends_its_slot() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        async with TaskPool() as pool:

            async def ask(number: int) -> Any:
                return await (await pool.submit(quick, number))

            def body() -> Any:
                return asyncio.run_coroutine_threadsafe(ask(7), loop).result(10)

            assert await asyncio.wait_for(pool_wait(await pool.submit(body)), 10) is not None
            assert counts(pool) == {"completed": 2}

    asyncio.run(main())


@virtual
async def test_t42_a_lender_cancelled_in_the_moment_it_gets_its_slot_back_gives_it_on() -> None:
    async with TaskPool() as pool:

        async def parent() -> Any:
            return await (await pool.submit(slow, 1))

        for turns in range(6):
            handle, behind = await pool.submit(parent), await pool.submit(quick)
            await asyncio.sleep(1)
            for _ in range(turns):
                await asyncio.sleep(0)
            handle.cancel()
            assert (await pool_wait(handle)).status in ("cancelled", "completed")
            assert await behind == "done"
            await pool.drain()
            assert pool.size() == 0
        assert (await pool.submit(quick)).status == "running"
