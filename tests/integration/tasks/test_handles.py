"""T15, T15b: what a handle tells, and how a task is stopped."""

from __future__ import annotations

import asyncio
import time
import traceback
from typing import Any

import pytest

from headgate import (
    HeadgateError,
    TaskCancelled,
    TaskExpired,
    TaskHandle,
    TaskPool,
    TaskRejected,
    pool_wait,
    ring_buffer,
)
from headgate.testing import settle, virtual
from tests.support.tasks.support import Barrier, Flaky, Gate, Turns, broken, counts, quick, slow, until

# -- T15: telling ------------------------------------------------------------------------


@virtual
async def test_t15_a_handle_says_who_it_is() -> None:
    async with TaskPool("review") as pool:
        before = time.time()
        first, second = await pool.submit(quick, key="acme"), await pool.submit(quick)
        assert isinstance(first, TaskHandle)
        assert first.id != second.id
        assert (first.pool, first.pool_id) == ("review", pool.id)
        assert isinstance(first.submitted_at, float)
        assert first.submitted_at > 1e9
        assert first.submitted_at <= second.submitted_at
        assert (first.key, second.key) == ("acme", None)
        assert first.status == "running"
        assert before > 1e9


def test_t15_submitted_at_is_in_unix_seconds() -> None:
    async def main() -> None:
        async with TaskPool() as pool:
            before = time.time()
            handle = await pool.submit(quick)
            assert before - 0.01 <= handle.submitted_at <= time.time() + 0.01

    asyncio.run(main())


@virtual
async def test_t15_a_completed_task_gives_its_result_any_number_of_times() -> None:
    async with TaskPool() as pool:
        value = object()
        handle = await pool.submit(slow, 5, value)
        assert await asyncio.gather(*[_get(handle) for _ in range(5)]) == [value] * 5
        assert await handle is value
        assert handle.status == "completed"


async def _get(handle: TaskHandle[Any]) -> Any:
    return await handle


@virtual
async def test_t15_a_failed_task_raises_its_own_exception_each_time() -> None:
    async with TaskPool() as pool:
        error = LookupError("mine")
        handle = await pool.submit(broken, error)
        lengths = []
        for _ in range(4):
            with pytest.raises(LookupError) as caught:
                await handle
            assert caught.value is error
            lengths.append(len(traceback.extract_tb(caught.value.__traceback__)))
        assert len(set(lengths)) == 1, "the traceback grows with every await"
        assert any(frame.name == "broken" for frame in traceback.extract_tb(error.__traceback__))


@virtual
async def test_t15_every_other_end_has_its_error() -> None:
    async with TaskPool(backpressure=ring_buffer(1)) as pool:
        running = await pool.submit(slow, 10)
        rejected = await pool.submit(quick)
        expired = await pool.submit(quick, ttl=1)
        assert rejected.status == "rejected"
        with pytest.raises(TaskExpired):
            await expired
        running.cancel()
        for handle, error in ((rejected, TaskRejected), (running, TaskCancelled), (expired, TaskExpired)):
            for _ in range(2):
                with pytest.raises(error) as caught:
                    await handle
                assert isinstance(caught.value, HeadgateError)
                assert not isinstance(caught.value, asyncio.CancelledError)
                assert handle.label in str(caught.value)


@virtual
async def test_t15_awaiters_of_a_rejected_task_wake() -> None:
    async with TaskPool(backpressure=ring_buffer(1)) as pool:
        await pool.submit(slow, 10)
        victim = await pool.submit(quick)
        awaiter = asyncio.create_task(_get(victim))
        await settle()
        await pool.submit(quick)
        await settle()
        assert isinstance(awaiter.exception(), TaskRejected)


@virtual
async def test_t15_cancelling_an_awaiter_leaves_the_task_alone() -> None:
    async with TaskPool() as pool:
        running, queued = await pool.submit(slow, 10, 1), await pool.submit(slow, 10, 2)
        awaiters = [asyncio.create_task(_get(handle)) for handle in (running, queued, running)]
        await settle()
        for awaiter in awaiters[:2]:
            awaiter.cancel()
        await asyncio.wait(awaiters[:2])
        assert [awaiter.cancelled() for awaiter in awaiters[:2]] == [True, True]
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(_get(running), 1)
        assert await awaiters[2] == 1
        assert await queued == 2


@virtual
async def test_t15_handles_work_with_the_tools_of_asyncio() -> None:
    async with TaskPool(max_concurrent=3) as pool:
        handles = [await pool.submit(slow, 3 - n, n) for n in range(3)]
        assert await asyncio.gather(*handles) == [0, 1, 2]
        assert await asyncio.wait_for(handles[0], 1) == 0
        assert [await one for one in asyncio.as_completed(handles)] != []


@virtual
async def test_t15_a_snapshot_of_every_state() -> None:
    async with TaskPool("shown") as pool:
        gate = Gate()
        running = await pool.submit(gate.wait, "result", key="a", priority=3, idempotency_key="i", labels={"l": 1})
        queued = await pool.submit(broken)
        assert queued.snapshot().status == "queued"
        assert queued.snapshot().started_at is None
        shown = running.snapshot()
        assert (shown._type, shown.id, shown.pool, shown.pool_id) == ("pool_task", running.id, "shown", pool.id)
        assert (shown.status, shown.key, shown.priority) == ("running", "a", 3)
        assert (shown.idempotency_key, shown.labels) == ("i", {"l": 1})
        assert shown.submitted_at == running.submitted_at
        assert shown.started_at is not None
        assert (shown.finished_at, shown.result, shown.error) == (None, None, None)
        await asyncio.sleep(7)
        gate.open()
        await pool_wait(queued)
        done, failed = running.snapshot(), queued.snapshot()
        assert (done.status, done.result, done.error) == ("completed", "result", None)
        assert done.finished_at == pytest.approx(done.started_at + 7)
        assert (failed.status, failed.result) == ("failed", None)
        assert "broken" in repr(failed.error)
        assert shown.status == "running"  # it tells how things were


@virtual
async def test_t15_a_snapshot_is_frozen_and_a_mapping() -> None:
    async with TaskPool() as pool:
        shown = (await pool.submit(quick)).snapshot()
    assert shown["status"] == shown.status == "running"
    assert dict(shown)["_type"] == "pool_task"
    with pytest.raises(TypeError):
        shown["status"] = "other"  # type: ignore[index]
    with pytest.raises(AttributeError):
        shown.status = "other"
    with pytest.raises(AttributeError):
        _ = shown.nonsense
    with pytest.raises(KeyError):
        shown["nonsense"]


# -- T15b: stopping on the loop ----------------------------------------------------------


@virtual
async def test_t15b_a_queued_task_ends_at_once() -> None:
    async with TaskPool() as pool:
        turns = Turns()
        running, queued, last = [await pool.submit(slow, 5, n) for n in range(2)] + [await pool.submit(turns.take, 1)]
        assert queued.cancel() is True
        assert queued.status == "cancelled"
        assert pool.size() == 2
        assert queued.cancel() is False
        with pytest.raises(TaskCancelled):
            await queued
        await last
        assert asyncio.get_running_loop().time() == 5
        assert await running == 0


@virtual
async def test_t15b_a_running_task_ends_with_its_body() -> None:
    async with TaskPool() as pool:

        async def body() -> None:
            try:
                await asyncio.sleep(60)
            finally:
                await asyncio.sleep(5)

        handle, behind = await pool.submit(body), await pool.submit(quick)
        await asyncio.sleep(1)
        assert handle.cancel() is True
        assert handle.status == "running"
        await asyncio.sleep(1)
        assert (handle.status, behind.status) == ("running", "queued")  # it cleans up, in its slot
        with pytest.raises(TaskCancelled):
            await handle
        assert asyncio.get_running_loop().time() == 6
        assert await behind == "done"
    assert counts(pool) == {"cancelled": 1, "completed": 1}


@virtual
async def test_t15b_a_task_cancelled_before_its_first_step_ends_and_gives_its_slot_back() -> None:
    async with TaskPool() as pool:
        turns = Turns()
        handle, behind = await pool.submit(turns.take, "never"), await pool.submit(turns.take, "next")
        assert handle.cancel() is True
        await behind
        assert handle.status == "cancelled"
    assert turns.order == ["next"]


@virtual
async def test_t15b_a_cancelled_task_is_not_tried_again() -> None:
    async with TaskPool() as pool:
        flaky = Flaky(99)
        handle = await pool.submit(slow, 60, retries=5)
        await settle()
        handle.cancel()
        assert (await pool_wait(handle)).status == "cancelled"
        between = await pool.submit(flaky.run, retries=5)
        await pool.submit(slow, 60, priority=1)
        await settle()
        assert (between.status, flaky.calls) == ("queued", 1)
        assert between.cancel() is True
        assert between.status == "cancelled"
        await pool.drain()
        assert flaky.calls == 1


@virtual
async def test_t15b_cancel_after_the_end_says_no() -> None:
    async with TaskPool() as pool:
        for body in (quick, broken):
            handle = await pool.submit(body)
            await pool_wait(handle)
            status = handle.status
            assert handle.cancel() is False
            assert handle.status == status


@virtual
async def test_t15b_a_body_that_cancels_itself_is_cancelled_and_nobody_else() -> None:
    async with TaskPool() as pool:

        async def body() -> None:
            raise asyncio.CancelledError

        handle = await pool.submit(body)
        with pytest.raises(TaskCancelled):
            await handle
        assert await (await pool.submit(quick)) == "done"


@virtual
async def test_t15b_a_task_may_cancel_itself() -> None:
    async with TaskPool() as pool:
        mine: list[Any] = []

        async def body() -> None:
            assert mine[0].cancel() is True
            await asyncio.sleep(60)

        mine.append(await pool.submit(body))
        assert (await pool_wait(mine[0])).status == "cancelled"
        assert asyncio.get_running_loop().time() == 0


@virtual
async def test_t15b_timeouts_of_a_body_and_of_the_pool_do_not_mix() -> None:
    async def body(seconds: float) -> str:
        try:
            async with asyncio.timeout(seconds):
                await asyncio.sleep(60)
        except TimeoutError:
            return "its own"
        return "none"

    async with TaskPool() as pool:
        assert await (await pool.submit(body, 1, timeout=5)) == "its own"
        with pytest.raises(TimeoutError):
            await (await pool.submit(body, 5, timeout=1))
        both = await pool.submit(body, 5, timeout=5)
        assert (await pool_wait(both)).status in ("completed", "failed")
        assert await (await pool.submit(quick)) == "done"


@virtual
async def test_t15b_a_cancel_storm_of_the_queue_leaves_the_rest_in_order() -> None:
    async with TaskPool(queue="fifo") as pool:
        gate, turns = Gate(), Turns()
        await pool.submit(gate.wait)
        handles = [await pool.submit(turns.take, n) for n in range(100)]
        for number, handle in enumerate(handles):
            if number % 3:
                assert handle.cancel()
        gate.open()
    assert turns.order == list(range(0, 100, 3))


# -- T15b: threads, on a real loop -------------------------------------------------------


@pytest.mark.integration
def test_t15b_a_cancelled_thread_keeps_its_slot_until_it_returns() -> None:
    async def main() -> None:
        barrier = Barrier()
        async with TaskPool() as pool:
            handle, behind = await pool.submit(barrier.wait), await pool.submit(quick)
            await until(lambda: barrier.entered.acquire(blocking=False))
            assert handle.cancel() is True
            for _ in range(20):
                await asyncio.sleep(0)
            assert (handle.status, behind.status) == ("running", "queued")
            assert pool.snapshot().active == 1
            handle.cancel()
            barrier.released.set()
            with pytest.raises(TaskCancelled):
                await handle
            assert await behind == "done"
            assert barrier.left == 1
            assert handle.snapshot().result is None

    asyncio.run(main())


@pytest.mark.integration
def test_t15b_a_thread_past_its_timeout_keeps_its_slot_and_fails() -> None:
    async def main() -> None:
        barrier = Barrier()
        async with TaskPool() as pool:
            handle, behind = await pool.submit(barrier.wait, timeout=0.01), await pool.submit(quick)
            await until(lambda: barrier.entered.acquire(blocking=False))
            await asyncio.sleep(0.05)  # the timeout is real, so it must really pass
            assert (handle.status, behind.status) == ("running", "queued")
            barrier.released.set()
            with pytest.raises(TimeoutError):
                await handle
            assert handle.status == "failed"
            assert handle.snapshot().result is None
            assert await behind == "done"

    asyncio.run(main())


@pytest.mark.integration
def test_t15b_an_awaiter_of_a_thread_can_be_cancelled() -> None:
    async def main() -> None:
        barrier = Barrier()
        async with TaskPool() as pool:
            handle = await pool.submit(barrier.wait, "result")
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(_get(handle), 0.01)
            barrier.released.set()
            assert await handle == "result"

    asyncio.run(main())


@pytest.mark.integration
def test_t15b_close_with_cancel_waits_for_threads() -> None:
    async def main() -> None:
        barrier = Barrier()
        pool = TaskPool(max_concurrent=2)
        handles = [await pool.submit(barrier.wait) for _ in range(4)]
        await until(lambda: barrier.entered.acquire(blocking=False))
        closing = asyncio.create_task(pool.close(cancel=True))
        await asyncio.sleep(0.01)
        assert not closing.done()
        assert [handle.status for handle in handles] == ["running"] * 2 + ["cancelled"] * 2
        barrier.released.set()
        await closing
        assert {handle.status for handle in handles} == {"cancelled"}
        assert barrier.left == 2

    asyncio.run(main())


@pytest.mark.integration
def test_t15b_a_cancel_from_another_thread_is_refused_clearly() -> None:
    async def main() -> None:
        async with TaskPool() as pool:
            handle = await pool.submit(slow, 60)

            def meddle() -> str:
                with pytest.raises(HeadgateError, match="loop"):
                    handle.cancel()
                return handle.status

            assert await asyncio.to_thread(meddle) == "running"
            handle.cancel()

    asyncio.run(main())


# -- on_end ------------------------------------------------------------------------------


@virtual
async def test_t15_on_end_calls_back_once_at_once() -> None:
    async with TaskPool() as pool:
        heard: list[Any] = []
        handle, queued = await pool.submit(quick), await pool.submit(quick)
        handle.on_end(lambda one: heard.append((one, one.status)))
        queued.on_end(lambda one: heard.append((one, one.status)))
        queued.cancel()
        assert heard == [(queued, "cancelled")]
        await handle
        assert heard == [(queued, "cancelled"), (handle, "completed")]
        handle.on_end(lambda one: heard.append("late"))
        assert heard[-1] == "late"
    assert len(heard) == 3


@virtual
async def test_t15_a_callback_that_raises_loses_no_slot_and_no_waiter() -> None:
    async with TaskPool() as pool:

        def grumble(_: Any) -> None:
            raise LookupError("callback")

        handle, behind = await pool.submit(quick), await pool.submit(quick)
        handle.on_end(grumble)
        waiter = asyncio.create_task(_get(handle))
        await settle()
        assert handle.status == "completed"
        assert await waiter == "done"
        assert await behind == "done"
        assert pool.size() == 0


@pytest.mark.parametrize("error", [LookupError("callback"), asyncio.CancelledError()])
@virtual
async def test_t15_on_end_of_a_finished_task_logs_what_its_callback_raises(
    error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    def grumble(_: Any) -> None:
        raise error

    async with TaskPool("work") as pool:
        handle = await pool.submit(quick)
        await handle
        handle.on_end(grumble)
        [record] = caplog.records
        assert record.getMessage() == f"a callback at the end of {handle!r} failed"
        assert record.exc_info is not None
        assert record.exc_info[1] is error
        error = SystemExit(3)
        with pytest.raises(SystemExit):
            handle.on_end(grumble)


# -- as the seed's code reads them -------------------------------------------------------


@virtual
async def test_t15_handles_and_pools_say_what_they_are_as_attribute_and_key() -> None:
    async with TaskPool("review") as pool:
        handle = await pool.submit(quick, key="acme")
        assert handle._type == handle["_type"] == "pool_task"
        assert pool._type == pool["_type"] == "pool"
        for name in ("id", "pool", "pool_id", "submitted_at", "status", "key"):
            assert handle[name] == getattr(handle, name)
        assert (pool["name"], pool["id"]) == ("review", pool.id)
        for thing, name in ((handle, "outcome"), (handle, "nonsense"), (pool, "_desk")):
            with pytest.raises(KeyError, match=name):
                thing[name]
        for thing in (handle, pool):
            with pytest.raises(TypeError):
                list(thing)  # type: ignore[call-overload]


@virtual
async def test_t15_dir_shows_what_is_for_users() -> None:
    async with TaskPool() as pool:
        handle = await pool.submit(quick)
        assert dir(handle) == [
            "attempt",
            "cancel",
            "children",
            "eta",
            "finished",
            "id",
            "key",
            "on_end",
            "partition",
            "pool",
            "pool_id",
            "priority",
            "snapshot",
            "status",
            "story",
            "submitted_at",
        ]
        for name in dir(handle):
            assert hasattr(handle, name)
        shown = dir(await pool_wait(handle))
        assert {"status", "result", "_type", "items"} <= set(shown)
        assert [name for name in shown if name.startswith("_")] == ["_type"]
