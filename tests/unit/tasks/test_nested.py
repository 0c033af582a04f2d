"""T42: tasks that wait for tasks. They lend their slots, so nothing deadlocks and the cap holds."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from headgate import TaskHandle, TaskPool, backpressure_queue, pool_wait
from headgate.testing import settle, virtual
from tests.support.tasks.support import EVERY_STRATEGY, Busy, Gate, counts, never_above_the_cap, quick, slow


@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("queue", EVERY_STRATEGY)
@virtual
async def test_t42_recursion_six_deep_and_two_wide(queue: str, slots: int) -> None:
    busy = Busy()
    async with TaskPool(max_concurrent=slots, queue=queue, backpressure=backpressure_queue(1)) as pool:

        async def node(depth: int) -> int:
            with busy():
                await asyncio.sleep(1)
                if not depth:
                    return 1
                children = [await pool.submit(node, depth - 1, key=f"k{n}", priority=n) for n in range(2)]
            results = [await child for child in children]
            with busy():
                await asyncio.sleep(1)
                return 1 + sum(results)

        with never_above_the_cap(pool) as watch:
            assert await (await pool.submit(node, 6)) == 127
        assert watch.most[pool.id] == slots
        assert busy.most == slots
        assert counts(pool) == {"completed": 127}


@virtual
async def test_t42_five_children_in_a_task_group_on_one_slot() -> None:
    busy = Busy()
    async with TaskPool(backpressure=backpressure_queue(1)) as pool:

        async def child(n: int) -> int:
            with busy():
                await asyncio.sleep(5 - n)
                return n

        async def parent() -> list[int]:
            async def ask(n: int) -> int:
                return await (await pool.submit(child, n))

            async with asyncio.TaskGroup() as group:
                asked = [group.create_task(ask(n)) for n in range(5)]
            with busy():
                return [one.result() for one in asked]

        with never_above_the_cap(pool):
            handle = await pool.submit(parent)
            assert await handle == [0, 1, 2, 3, 4]
        assert busy.most == 1
        assert asyncio.get_running_loop().time() == 15


@virtual
async def test_t42_several_subtasks_wait_at_once_and_it_is_lent_from_the_first_to_the_last() -> None:
    async with TaskPool(max_concurrent=2) as pool:
        gates = [Gate() for _ in range(3)]

        async def parent() -> list[Any]:
            handles = [await pool.submit(gate.wait, n) for n, gate in enumerate(gates)]
            return await asyncio.gather(*handles)

        handle = await pool.submit(parent)
        await settle()
        assert counts(pool) == {"active": 2, "waiting": 1, "queued": 1}
        assert pool.size() == 4
        gates[0].open()
        await settle()
        assert counts(pool) == {"active": 2, "waiting": 1, "completed": 1}
        gates[1].open()
        await settle()
        assert counts(pool) == {"active": 1, "waiting": 1, "completed": 2}
        gates[2].open()
        assert await handle == [0, 1, 2]
        assert counts(pool) == {"completed": 4}


@virtual
async def test_t42_a_waiting_task_is_still_running_and_counts_apart() -> None:
    async with TaskPool() as pool:
        gate = Gate()

        async def parent() -> Any:
            return await (await pool.submit(gate.wait, "child"))

        handle = await pool.submit(parent)
        await settle()
        assert handle.status == "running"
        assert counts(pool) == {"active": 1, "waiting": 1}
        gate.open()
        assert await handle == "child"


@pytest.mark.parametrize("how", ["await", "pool_wait", "pool_wait list", "gather", "wait_for", "shield", "subtask"])
@virtual
async def test_t42_every_way_of_waiting_through_our_api(how: str) -> None:
    async with TaskPool() as pool:

        async def get(handle: TaskHandle[Any]) -> Any:
            return await handle

        async def parent() -> Any:
            child = await pool.submit(slow, 1, "child")
            if how == "await":
                return await child
            if how == "pool_wait":
                return (await pool_wait(child)).result
            if how == "pool_wait list":
                return (await pool_wait([child, await pool.submit(quick)]))[0].result
            if how == "gather":
                return (await asyncio.gather(child))[0]
            if how == "wait_for":
                return await asyncio.wait_for(get(child), 60)
            if how == "shield":
                return await asyncio.shield(get(child))
            return await asyncio.create_task(get(child))

        assert await (await pool.submit(parent)) == "child"


@virtual
async def test_t42_waiting_for_a_queued_stranger() -> None:
    async with TaskPool(queue="fifo") as pool:
        order: list[str] = []
        strangers: list[TaskHandle[Any]] = []

        async def note(name: str) -> str:
            order.append(name)
            return name

        async def waiter() -> str:
            await asyncio.sleep(0)
            found = await strangers[2]
            order.append("waiter")
            return found

        handle = await pool.submit(waiter)
        strangers.extend([await pool.submit(note, f"s{n}") for n in range(5)])
        with never_above_the_cap(pool):
            assert await handle == "s2"
            await pool.drain()
        # No descendants: the slot goes to anyone, in order. The waiter then stands before all who have not begun.
        assert order == ["s0", "s1", "s2", "waiter", "s3", "s4"]


@virtual
async def test_t42_a_lent_slot_goes_to_descendants_first() -> None:
    async with TaskPool(queue="fifo") as pool:
        order: list[str] = []

        async def note(name: str) -> None:
            order.append(name)

        async def child(name: str) -> None:
            order.append(name)
            await (await pool.submit(note, f"{name}.1"))
            order.append(f"{name} again")

        async def parent() -> None:
            await asyncio.sleep(0)  # the strangers queue before its children do
            await pool_wait([await pool.submit(child, "c1"), await pool.submit(child, "c2")])
            order.append("parent again")

        await pool.submit(parent)
        for number in range(3):
            await pool.submit(note, f"s{number}")
        await pool.drain()
    assert order[:2] == ["c1", "c1.1"]
    assert sorted(order[2:7]) == sorted(["c1 again", "c2", "c2.1", "c2 again", "parent again"])
    assert order[6] == "parent again"
    assert order[7:] == ["s0", "s1", "s2"]


@pytest.mark.parametrize("queue", EVERY_STRATEGY)
@virtual
async def test_t42_a_lender_stands_before_all_newcomers(queue: str) -> None:
    async with TaskPool(queue=queue) as pool:
        order: list[str] = []

        async def note(name: str) -> None:
            order.append(name)
            await asyncio.sleep(1)

        async def parent() -> None:
            child = await pool.submit(note, "child", priority=-5, key="p")
            await child
            order.append("parent")
            await asyncio.sleep(1)

        await pool.submit(parent, key="p")
        for number in range(3):
            await pool.submit(note, f"s{number}", priority=9, key="s")
        with never_above_the_cap(pool):
            await pool.drain()
        assert order[:2] == ["child", "parent"]


@virtual
async def test_t42_a_lender_resumes_only_with_a_slot() -> None:
    """The stranger it waited for has ended, but somebody else has its slot."""
    async with TaskPool(max_concurrent=2, queue="fifo") as pool:
        busy, gate = Busy(), Gate()

        async def work(seconds: float) -> None:
            with busy():
                await asyncio.sleep(seconds)

        async def waiter(handle: TaskHandle[Any]) -> float:
            await handle
            with busy():
                return asyncio.get_running_loop().time()

        stranger = await pool.submit(gate.wait)
        handle = await pool.submit(waiter, stranger)
        await settle()
        await pool.submit(work, 10)  # takes the lent slot
        await asyncio.sleep(1)
        later = [await pool.submit(work, 10) for _ in range(3)]
        gate.open()  # stranger's slot is free: the lender's, before the three
        assert await handle == 1
        assert [one.status for one in later] == ["running", "queued", "queued"]
        await pool.drain()
        assert busy.most == 2


@virtual
async def test_t42_two_lenders_return_first_come_first_served() -> None:
    async with TaskPool(max_concurrent=1) as pool:
        order: list[str] = []
        gates = {"a": Gate(), "b": Gate()}

        async def parent(name: str) -> None:
            await (await outside.submit(gates[name].wait))
            order.append(name)
            await asyncio.sleep(5)

        async with TaskPool(max_concurrent=5) as outside:
            for name in "ab":
                await pool.submit(parent, name)
            await settle()
            assert counts(pool) == {"waiting": 2}
            blocker = await pool.submit(slow, 10)
            gates["b"].open()
            await settle()
            gates["a"].open()
            await settle()
            newcomer = await pool.submit(quick)
            await blocker
            await newcomer
    assert order == ["b", "a"]


@virtual
async def test_t42_nested_submits_never_park() -> None:
    async with TaskPool(backpressure=backpressure_queue(1)) as pool:

        async def parent() -> int:
            turned: list[int] = []
            asyncio.get_running_loop().call_soon(turned.append, 1)
            handles = [await pool.submit(quick, n) for n in range(10)]
            handles += [pool.submit_nowait(quick, n) for n in range(10)]
            assert turned == []
            assert pool.snapshot().queued >= 20
            return len(await pool_wait(handles))

        await_me = await pool.submit(parent)
        queued = await pool.submit(quick)
        parked = asyncio.create_task(pool.submit(quick))
        assert await await_me == 20
        assert await (await parked) == "done"
        assert await queued == "done"


@virtual
async def test_t42_nested_submits_pass_those_at_the_door() -> None:
    async with TaskPool(backpressure=backpressure_queue(1)) as pool:

        async def parent() -> Any:
            await asyncio.sleep(1)
            return await (await pool.submit(quick, "child"))

        handle = await pool.submit(parent)
        await pool.submit(slow, 5)
        parked = [asyncio.create_task(pool.submit(quick)) for _ in range(3)]
        await settle()
        assert pool.snapshot().blocked_submitters == 3
        assert await handle == "child"
        await asyncio.gather(*parked)


@virtual
async def test_t42_two_pools_call_each_other() -> None:
    async with TaskPool("left") as left, TaskPool("right") as right:

        async def down(depth: int) -> int:
            if not depth:
                return 0
            pool = left if depth % 2 else right
            return 1 + await (await pool.submit(down, depth - 1))

        with never_above_the_cap(left, right):
            assert await (await left.submit(down, 20)) == 20
            assert await asyncio.gather(*[_ask(pool, down, 7) for pool in (left, right, left, right)]) == [7] * 4
        assert left.size() == right.size() == 0


async def _ask(pool: TaskPool, fn: Any, *args: Any) -> Any:
    return await (await pool.submit(fn, *args))


@virtual
async def test_t42_every_slot_of_the_ancestry_is_lent() -> None:
    """The grandparent waits in a way nobody sees, for a child that waits for a grandchild in the grandparent's pool."""
    async with TaskPool("upper") as upper, TaskPool("lower") as lower:

        async def child(answer: asyncio.Future[Any]) -> None:
            answer.set_result(await (await upper.submit(quick, "grandchild")))

        async def grandparent() -> Any:
            answer = asyncio.get_running_loop().create_future()
            await lower.submit(child, answer)
            return await answer

        assert await (await upper.submit(grandparent)) == "grandchild"
        assert upper.size() == lower.size() == 0
        assert (await upper.submit(quick)).status == "running"


@virtual
async def test_t42_caps_of_keys_are_lent_with_the_slot() -> None:
    async with TaskPool(max_concurrent=3, max_concurrent_per_key=1) as pool:
        busy = Busy()

        async def node(depth: int) -> int:
            with busy():
                await asyncio.sleep(1)
                if not depth:
                    return 1
                children = [await pool.submit(node, depth - 1, key="same") for _ in range(2)]
            found = sum([await child for child in children])
            with busy():
                return found

        with never_above_the_cap(pool):
            assert await (await pool.submit(node, 3, key="same")) == 8
        assert busy.most == 1


@virtual
async def test_t42_plain_functions_that_return_coroutines_nest_too() -> None:
    async with TaskPool() as pool:

        async def down(depth: int) -> int:
            if not depth:
                return 0
            handle = await pool.submit(lambda: down(depth - 1))
            return 1 + await handle

        assert await (await pool.submit(lambda: down(5))) == 5


@virtual
async def test_t42_helpers_far_from_the_task_belong_to_it() -> None:
    """A wait in a subtask of a subtask lends the slot of the task that began it all."""
    async with TaskPool() as pool:

        async def helper(depth: int) -> Any:
            if depth:
                return await asyncio.create_task(helper(depth - 1))
            return await (await pool.submit(quick, "found"))

        assert await (await pool.submit(helper, 4)) == "found"


@virtual
async def test_t42_what_a_finished_task_left_running_belongs_to_nobody() -> None:
    async with TaskPool() as pool:
        left: list[asyncio.Task[Any]] = []

        async def stray() -> Any:
            await asyncio.sleep(5)
            return await (await pool.submit(slow, 1, "stray"))

        async def parent() -> None:
            left.append(asyncio.create_task(stray()))

        await (await pool.submit(parent))
        blocker = await pool.submit(slow, 10)
        assert await left[0] == "stray"
        assert blocker.status == "completed"
        assert counts(pool) == {"completed": 3}
