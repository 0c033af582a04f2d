"""L08: a task that another task submits ends with it, unless that returns normally."""

from __future__ import annotations

import asyncio
import gc
import logging
import time
import weakref
from pathlib import Path
from typing import Any

import pytest

import headgate
from headgate import (
    InvalidArgument,
    InvalidType,
    PoolBusy,
    QueueFull,
    ResourcePool,
    TaskCancelled,
    TaskExpired,
    TaskHandle,
    TaskPool,
    backpressure_queue,
    fail_fast,
    pool_wait,
    spawn_to_pool,
)
from headgate.sharing.memory import SharedMemory
from headgate.stores import JsonLinesStore
from headgate.testing import run, settle, virtual
from tests.support.tasks.support import EVERY_STRATEGY, Gate, counts, quick, slow, until
from tests.unit.tasks.test_shared_pools import Work, make


def now() -> float:
    return asyncio.get_running_loop().time()


class Tree:
    """A tree of tasks, three wide and four deep, that notes when nodes begin and end."""

    def __init__(self, pool: TaskPool, last: BaseException | None = None) -> None:
        self.pool = pool
        self.began: list[float] = []
        self.ended = 0
        self._last = last  # what the root raises after nine seconds, instead of waiting on

    async def node(self, depth: int) -> int:
        self.began.append(now())
        try:
            await asyncio.sleep(2)
            if depth == 4:
                return 1
            below = [await self.pool.submit(self.node, depth + 1, key=f"k{n}") for n in range(3)]
            if depth == 1 and self._last is not None:
                await asyncio.sleep(7)
                raise self._last
            return 1 + sum([await handle for handle in below])
        finally:
            self.ended += 1


@pytest.mark.parametrize("queue", EVERY_STRATEGY)
@pytest.mark.parametrize("how", ["cancel", "timeout", "deadline", "failure", "run"])
@virtual
async def test_l08_a_tree_ends_with_its_root(how: str, queue: str, caplog: pytest.LogCaptureFixture) -> None:
    async with TaskPool(max_concurrent=3, queue=queue) as pool:
        tree = Tree(pool, LookupError("gone") if how == "failure" else None)
        if how == "run":
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(9):
                    await pool.run(tree.node, 1)
        else:
            options = {"timeout": {"timeout": 9}, "deadline": {"deadline": 9.0}}.get(how, {})
            root = await pool.submit(tree.node, 1, **options)
            if how == "cancel":
                asyncio.get_running_loop().call_later(9, root.cancel)
            with pytest.raises((TaskCancelled, TimeoutError, LookupError)):
                await root
            assert root.children() == []
        await settle()
        assert now() == 9
        assert pool.size() == 0
        assert tree.ended == len(tree.began)
        assert max(tree.began) == 8
    assert now() == 9
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING and how == "deadline"]


@virtual
async def test_l08_a_normal_return_leaves_children_running() -> None:
    async with TaskPool(max_concurrent=2) as pool:

        async def parent() -> list[TaskHandle[Any]]:
            return [await pool.submit(slow, 10, n) for n in range(3)]

        async def grandparent() -> list[TaskHandle[Any]]:
            handles = await (await pool.submit(parent))
            await asyncio.sleep(1)
            return handles

        handle = await pool.submit(grandparent, timeout=0.5)
        with pytest.raises(TimeoutError):
            await handle
        children = [task for task in headgate.pending() if task.pool_id == pool.id]
        assert len(children) == 3, "their parent has returned: nothing ends them"
        await pool.drain()
        assert counts(pool) == {"completed": 4, "failed": 1}


@virtual
async def test_l08_a_retry_cancels_the_children_of_the_attempt() -> None:
    attempts: list[list[TaskHandle[Any]]] = []

    async def parent() -> Any:
        attempts.append([await pool.submit(slow, 10, len(attempts)) for _ in range(3)])
        if len(attempts) == 1:
            await asyncio.sleep(1)
            raise LookupError("once")
        assert [child.status for child in attempts[0]] == ["cancelled"] * 3
        return await attempts[1][0]

    async with TaskPool(max_concurrent=2) as pool:
        handle = await pool.submit(parent, retries=1)
        assert await handle == 1
        await pool_wait(attempts[1])
        with pytest.raises(TaskCancelled, match=r"was cancelled because its parent tasks-\d+#1 is tried again"):
            await attempts[0][0]
        assert "cancelled: its parent" in attempts[0][2].story()
        assert counts(pool) == {"completed": 4, "cancelled": 3}


@virtual
async def test_l08_a_resource_that_fails_ends_the_children_of_the_attempt() -> None:
    children: list[TaskHandle[Any]] = []

    async def parent(key: Any) -> str:
        children.append(await inner.submit(slow, 10))
        if len(children) == 1:
            raise headgate.CooldownResource(5)
        return "done"

    keys = ResourcePool({"a": 1, "b": 2})
    async with TaskPool(resources=keys) as pool, TaskPool(max_concurrent=5) as inner:
        assert await pool.run(parent) == "done"
        await settle()
        assert [child.status for child in children] == ["cancelled", "running"]


@virtual
async def test_l08_the_deadline_is_the_earlier_of_both() -> None:
    children: dict[str, TaskHandle[Any]] = {}

    async def parent() -> None:
        children["none"] = await pool.submit(slow, 20)
        children["later"] = await pool.submit(slow, 20, deadline=15.0)
        children["earlier"] = await pool.submit(slow, 20, deadline=5.0)
        children["queued"] = await pool.submit(slow, 20)
        children["ttl"] = await pool.submit(slow, 20, ttl=3)
        children["detached"] = await pool.submit(slow, 20, deadline=15.0, detached=True)

    async with TaskPool(max_concurrent=4, queue="fifo") as pool:
        await (await pool.submit(parent, deadline=10.0))
        ends = {}
        for name, child in children.items():
            child.on_end(lambda task: ends.__setitem__(task.number, (now(), task.status)))
            children[name] = child
        await pool_wait(children.values())
        found = {name: ends[child.number] for name, child in children.items()}
    assert found == {
        "none": (10, "failed"),
        "later": (10, "failed"),
        "earlier": (5, "failed"),
        "queued": (10, "failed"),  # it began when the earlier one ended
        "ttl": (3, "expired"),
        "detached": (15, "failed"),
    }


@pytest.mark.parametrize("own", [None, 5.0])
@virtual
async def test_l08_who_is_told_of_a_deadline_is_not_told_of_it_for_each_child(
    own: float | None, caplog: pytest.LogCaptureFixture
) -> None:
    async def parent() -> None:
        await pool.submit(slow, 60, deadline=own)
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(3)

    async with TaskPool(max_concurrent=2) as pool:
        handle = await pool.submit(parent, deadline=10.0)
        assert (await pool_wait(handle)).status == "failed"
        assert counts(pool) == {"failed": 2}
    assert [record.message for record in caplog.records if "nobody awaited" in record.message] == (
        [] if own is None else [caplog.records[0].message]
    )


@virtual
async def test_l08_a_queued_child_expires_at_the_deadline_of_its_parent() -> None:
    children: list[TaskHandle[Any]] = []

    async def parent() -> None:
        children.append(await busy.submit(quick))

    async with TaskPool() as pool, TaskPool() as busy:
        await busy.submit(slow, 60)
        await (await pool.submit(parent, deadline=10.0))
        with pytest.raises(TaskExpired):
            await children[0]
        assert now() == 10


@pytest.mark.parametrize("how", ["submit", "submit_nowait", "submit_many", "submit_many one fn", "map", "run"])
@virtual
async def test_l08_detached_tasks_outlive_their_submitter(how: str) -> None:
    gate = Gate()

    async def parent(detached: bool) -> None:
        if how == "submit":
            await pool.submit(gate.wait, detached=detached)
        elif how == "submit_nowait":
            pool.submit_nowait(gate.wait, detached=detached)
        elif how == "submit_many":
            await pool.submit_many([(gate.wait, (), {"detached": detached})])
        elif how == "submit_many one fn":
            await pool.submit_many(gate.wait, [()], detached=detached)
        elif how == "map":
            async for _ in pool.map(gate.wait, [1], detached=detached):
                pass
        else:
            await pool.run(gate.wait, detached=detached)
        await asyncio.sleep(60)

    async with TaskPool(max_concurrent=3) as pool:
        bound, free = [await pool.submit(parent, detached, timeout=5) for detached in (False, True)]
        await asyncio.sleep(1)
        assert (len(bound.children()), len(free.children())) == (1, 0)
        await pool_wait([bound, free])
        await settle()
        assert counts(pool) == {"active": 1, "cancelled": 1, "failed": 2}
        gate.open()


@virtual
async def test_l08_detached_is_true_or_false_and_not_for_streams() -> None:
    async def items() -> Any:
        yield 1

    async with TaskPool() as pool:
        with pytest.raises(InvalidType, match="detached must be bool, got int"):
            await pool.submit(quick, detached=1)
        with pytest.raises(InvalidArgument, match=r"stream\(\) cannot be detached"):
            pool.stream(items, detached=True)
        with pytest.raises(InvalidArgument, match=r"as_executor\(\) has no option 'detached'"):
            pool.as_executor(detached=True)
        with pytest.raises(InvalidArgument, match="Did you mean detached"):
            await pool.submit(quick, detach=True)
        assert pool.size() == 0


@virtual
async def test_l08_events_are_nobodys_children() -> None:
    gate = Gate()

    async def parent() -> None:
        await spawn_to_pool("events", lambda event: gate.wait)({})
        raise LookupError("gone")

    async with TaskPool("events") as events, TaskPool() as pool:
        with pytest.raises(LookupError):
            await pool.run(parent)
        await settle()
        assert counts(events) == {"active": 1}
        gate.open()


def test_l08_calls_of_an_executor_are_nobodys_children() -> None:
    async def main() -> None:
        async with TaskPool(max_concurrent=2) as pool:
            executor, loop = pool.as_executor(), asyncio.get_running_loop()
            called: list[Any] = []

            async def parent() -> None:
                called.append(loop.run_in_executor(executor, time.sleep, 0.05))
                await asyncio.sleep(0)
                raise LookupError("gone")

            with pytest.raises(LookupError):
                await pool.run(parent)
            assert await called[0] is None
            assert counts(pool) == {"completed": 1, "failed": 1}

    asyncio.run(main())


# -- idempotency keys --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("other", ["nobody", "awaits", "holds the handle", "is another task"])
@virtual
async def test_l08_a_child_whose_key_another_caller_uses_continues_for_that_one(other: str) -> None:
    gate = Gate()

    async def parent(seconds: float) -> Any:
        return await (await pool.submit(gate.wait, "shared", idempotency_key="k"))

    async with TaskPool(max_concurrent=3) as pool:
        handle = await pool.submit(parent, 5, deadline=5.0)
        await asyncio.sleep(1)
        [child] = handle.children()
        also: Any = None
        if other == "awaits":
            also = asyncio.ensure_future(pool.run(gate.wait, "shared", idempotency_key="k"))
        elif other == "holds the handle":
            also = await pool.submit(gate.wait, "shared", idempotency_key="k")
            assert also is child
        elif other == "is another task":
            also = await pool.submit(parent, 60)
        await settle()
        assert handle.children() == ([child] if other == "nobody" else [])
        with pytest.raises(TimeoutError):
            await handle
        await asyncio.sleep(5)  # and the deadline of the first caller is not that of the others
        assert child.finished == (other == "nobody")
        gate.open()
        if also is not None:
            assert await also == "shared"


@virtual
async def test_l08_a_key_that_is_used_all_over_a_tree_ends_with_the_tree() -> None:
    gate = Gate()

    async def branch(seconds: float) -> Any:
        handle = await pool.submit(gate.wait, idempotency_key="k")
        return await asyncio.wait_for(handle, seconds)

    async def root() -> None:
        for seconds in (2, 50):
            await pool.submit(branch, seconds)
        await asyncio.sleep(60)

    async with TaskPool(max_concurrent=5) as pool:
        handle = await pool.submit(root, timeout=10)
        await asyncio.sleep(5)
        assert counts(pool) == {"active": 2, "waiting": 1, "failed": 1}, "one branch has failed, the other waits"
        [_, shared] = handle.children()
        assert (shared.status, gate.entered) == ("running", 1)
        with pytest.raises(TimeoutError):
            await handle
        await settle()
        assert pool.size() == 0


@pytest.mark.parametrize("patience", [0.0, 3.0])
@virtual
async def test_l08_the_next_attempt_runs_keyed_children_again(patience: float) -> None:
    ran: list[int] = []

    async def child(number: int) -> int:
        ran.append(number)
        try:
            await asyncio.sleep(10)
        finally:
            await asyncio.sleep(patience)
        return number

    attempts: list[int] = []

    async def parent() -> int:
        attempts.append(1)
        handles = [await pool.submit(child, n, idempotency_key=f"k{n}") for n in range(3)]
        if len(attempts) == 1:
            await asyncio.sleep(1)
            raise LookupError("once")
        return sum([await handle for handle in handles])

    async with TaskPool(max_concurrent=3) as pool:
        handle = await pool.submit(parent, retries=1, key="p")
        await asyncio.sleep(1.5)
        assert handle.status == ("running" if not patience else "queued")
        assert await handle == 3
        assert sorted(ran) == [0, 0, 1, 1, 2]
        assert counts(pool) == {"completed": 4, "cancelled": 3}


@virtual
async def test_l08_a_parent_that_waits_for_its_children_to_end_can_be_cancelled() -> None:
    async def child() -> None:
        try:
            await asyncio.sleep(10)
        finally:
            await asyncio.sleep(10)

    async def parent() -> None:
        await pool.submit(child, idempotency_key="k")
        await asyncio.sleep(1)
        raise LookupError("always")

    async with TaskPool(max_concurrent=3) as pool:
        handle = await pool.submit(parent, retries=5)
        await asyncio.sleep(2)
        assert handle.status == "queued"
        assert handle.cancel()
        with pytest.raises(TaskCancelled):
            await handle
        await pool.drain()
        assert now() == 11
        assert counts(pool) == {"cancelled": 2}


def test_l08_a_key_that_another_process_follows_is_run_there() -> None:
    async def main() -> None:
        place, work = SharedMemory(), Work()
        one, _ = make(place, max_concurrent=3)
        two, _ = make(place, max_concurrent=3)

        async def parent() -> None:
            await one.submit(work, 1, idempotency_key="k")
            await asyncio.sleep(3600)

        handle = await one.submit(parent)
        await settle()
        [child] = handle.children()
        follower = await two.submit(work, 1, idempotency_key="k")
        assert follower.status == "queued"
        handle.cancel()
        await pool_wait([handle, child])
        await settle()
        assert (child.status, follower.status) == ("cancelled", "running")
        work.let_go()
        assert await follower == 1
        await one.close()
        await two.close()

    run(main)


# -- who is a child ----------------------------------------------------------------------------------------------------


@virtual
async def test_l08_children_are_in_any_pool_of_the_loop() -> None:
    async def parent() -> None:
        for pool in (one, two):
            await pool.submit(slow, 60)
            await pool.submit(slow, 60)
        await asyncio.sleep(60)

    async with TaskPool() as outer, TaskPool() as one, TaskPool() as two:
        handle = await outer.submit(parent, timeout=5)
        await asyncio.sleep(1)
        assert [(child.pool, child.status) for child in handle.children()] == [
            (pool.name, status) for pool in (one, two) for status in ("running", "queued")
        ]
        with pytest.raises(TimeoutError):
            await handle
        await settle()
        assert (one.size(), two.size()) == (0, 0)


@virtual
async def test_l08_handle_children_are_those_that_are_unfinished() -> None:
    gates = [Gate() for _ in range(3)]

    async def parent() -> None:
        for gate in gates:
            await pool.submit(gate.wait)
        await asyncio.sleep(60)

    async with TaskPool(max_concurrent=3) as pool:
        handle = await pool.submit(parent)
        assert handle.children() == []
        await settle()
        first, second, third = handle.children()
        gates[0].open()
        await settle()
        assert handle.children() == [second, third]
        assert first.status == "completed"
        second.cancel()
        await settle()
        assert handle.children() == [third]
        handle.cancel()
        await pool_wait(handle)
        assert handle.children() == []
    assert counts(pool) == {"completed": 1, "cancelled": 3}


@virtual
async def test_l08_a_refused_child_is_none() -> None:
    async def parent() -> None:
        await busy.submit(slow, 60)
        with pytest.raises(QueueFull):
            await busy.submit(slow, 60)
        dropped = await drops.submit(slow, 60)
        assert dropped.status == "rejected"
        await asyncio.sleep(60)

    full = backpressure_queue(1, "fail_submitter")
    async with (
        TaskPool() as pool,
        TaskPool(backpressure=full) as busy,
        TaskPool(backpressure=backpressure_queue(1, "drop_newest")) as drops,
    ):
        gate = Gate()
        for _ in range(2):
            await drops.submit(gate.wait)
        await busy.submit(gate.wait)
        handle = await pool.submit(parent)
        await settle()
        assert [child.pool for child in handle.children()] == [busy.name]
        handle.cancel()
        gate.open()


def test_l08_a_child_that_a_shared_pool_refuses_is_none() -> None:
    async def main() -> None:
        shared, _ = make(SharedMemory(), max_concurrent=1, backpressure=fail_fast())

        async def parent() -> None:
            await shared.submit(asyncio.sleep, 60)
            with pytest.raises(PoolBusy):
                await shared.submit(asyncio.sleep, 60)
            await asyncio.sleep(60)

        async with TaskPool() as pool:
            handle = await pool.submit(parent)
            await settle()
            assert [child.status for child in handle.children()] == ["running"]
            handle.cancel()
        await shared.close()

    run(main)


@virtual
async def test_l08_what_a_helper_submits_when_its_task_has_ended_is_nobodys_child() -> None:
    kept: list[TaskHandle[Any]] = []

    async def helper() -> None:
        await asyncio.sleep(5)
        kept.append(await pool.submit(slow, 10, "free"))

    helpers = []

    async def parent() -> None:
        helpers.append(asyncio.ensure_future(helper()))
        await asyncio.sleep(1)
        raise LookupError("gone")

    async def root() -> None:
        with pytest.raises(LookupError):
            await (await pool.submit(parent))
        await asyncio.sleep(60)

    async with TaskPool(max_concurrent=3) as pool:
        handle = await pool.submit(root, timeout=10)
        with pytest.raises(TimeoutError):
            await handle
        await settle()
        assert await kept[0] == "free"


@virtual
async def test_l08_what_a_helper_submits_while_its_task_runs_is_its_child() -> None:
    async def parent() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(pool.run(slow, 60))
            submitted = group.create_task(pool.submit(slow, 60))
        await submitted.result()

    async with TaskPool(max_concurrent=3) as pool:
        handle = await pool.submit(parent)
        await settle()
        assert len(handle.children()) == 2
        handle.cancel()
        await pool_wait(handle)
        await settle()
        assert counts(pool) == {"cancelled": 3}


# -- how they end ------------------------------------------------------------------------------------------------------


@virtual
async def test_l08_a_child_that_cleans_up_is_cancelled_once() -> None:
    cleaned: list[str] = []

    async def child() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(3)
            cleaned.append("child")

    async def parent() -> None:
        handle = await pool.submit(child)
        try:
            await asyncio.sleep(60)
        finally:
            handle.cancel()
            await asyncio.sleep(1)
            cleaned.append("parent")

    async with TaskPool(max_concurrent=3) as pool:
        handle = await pool.submit(parent, timeout=5)
        await pool_wait(handle)
        assert now() == 6
        await pool.drain()
        assert now() == 8
        assert cleaned == ["parent", "child"]


@virtual
async def test_l08_a_child_that_times_out_with_its_parent_is_not_tried_again() -> None:
    calls: list[float] = []

    async def child() -> None:
        calls.append(now())
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(2)
            calls.append(now())

    async def parent() -> None:
        await (await pool.submit(child, timeout=5, retries=9))

    async with TaskPool(max_concurrent=3) as pool:
        handle = await pool.submit(parent, timeout=6)
        await pool_wait(handle)
        await pool.drain()
        assert calls == [0, 7], "nor is its end disturbed"
        assert counts(pool) == {"failed": 1, "cancelled": 1}


@virtual
async def test_l08_a_parent_that_is_cancelled_and_returns_leaves_them_running() -> None:
    async def parent() -> str:
        await pool.submit(slow, 10)
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            return "done"
        return "never"

    async with TaskPool(max_concurrent=3) as pool:
        handle = await pool.submit(parent)
        await asyncio.sleep(1)
        handle.cancel()
        assert await handle == "done"
        await pool.drain()
        assert counts(pool) == {"completed": 2}


def test_l08_children_of_a_thread_end_when_it_is_told_to_stop() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()

        def parent() -> None:
            handle = asyncio.run_coroutine_threadsafe(pool.submit(slow, 60), loop).result()
            asyncio.run_coroutine_threadsafe(pool_wait(handle), loop).result()

        async with TaskPool(max_concurrent=3) as pool:
            handle = await pool.submit(parent)
            await until(lambda: pool.size() == 2)
            handle.cancel()
            with pytest.raises(TaskCancelled):
                await handle
            assert counts(pool) == {"cancelled": 2}

    asyncio.run(main())


@pytest.mark.parametrize("how", ["cancel", "retry", "return"])
def test_l08_children_of_durable_pools(how: str, tmp_path: Path) -> None:
    async def main() -> None:
        children: list[TaskHandle[Any]] = []

        async def parent() -> str:
            if len(children) < 2:
                children.extend([await pool.submit(gate.wait) for _ in range(2)])
                if how == "return":
                    return "done"
                if how == "retry":
                    raise LookupError("once")
                await asyncio.sleep(3600)
            return "done"

        gate = Gate()
        store = JsonLinesStore(tmp_path)
        async with TaskPool("p", scope="pipeline", pipeline_id="x", store=store) as pool:
            handle = await pool.submit(parent, retries=1)
            await until(lambda: len(children) == 2 and (how != "cancel" or len(handle.children()) == 2))
            if how == "cancel":
                handle.cancel()
            final = await pool_wait(handle)
            assert final.status == ("cancelled" if how == "cancel" else "completed")
            gate.open()
            ends = [task.status for task in await pool_wait(children)]
            assert ends == ["completed" if how == "return" else "cancelled"] * 2
            assert gate.entered == (2 if how == "return" else 0), "its slot was given to none of them"

    asyncio.run(main())


@virtual
async def test_l08_a_parent_keeps_no_finished_child() -> None:
    class Large:
        pass

    alive: list[weakref.ref[Any]] = []

    async def child() -> Large:
        result = Large()
        alive.append(weakref.ref(result))
        return result

    async def parent() -> None:
        for _ in range(100):
            await pool.submit(child)
        await asyncio.sleep(60)

    async with TaskPool(max_concurrent=3) as pool:
        handle = await pool.submit(parent)
        await asyncio.sleep(1)
        assert counts(pool) == {"active": 1, "completed": 100}
        assert handle.children() == []
        gc.collect()
        assert [one for one in alive if one() is not None] == []
        handle.cancel()


@virtual
async def test_l08_a_thousand_deep() -> None:
    async def node(depth: int) -> None:
        if depth:
            await (await pool.submit(node, depth - 1))
        await asyncio.sleep(60)

    async with TaskPool() as pool:
        root = await pool.submit(node, 1500)
        await asyncio.sleep(1)
        assert pool.size() == 1501
        root.cancel()
        await pool.drain()
        assert now() == 1
        assert counts(pool) == {"cancelled": 1501}
