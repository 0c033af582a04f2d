"""`TaskPool.as_executor`: a pool where other code expects a `concurrent.futures.Executor`."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import gc
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Executor, Future, as_completed
from pathlib import Path
from typing import Any

import pytest

from headgate import (
    InvalidArgument,
    InvalidType,
    PoolClosed,
    QueueFull,
    ResourcePool,
    TaskCancelled,
    TaskPool,
    WaitCycle,
    backpressure_queue,
    pool_get,
    ring_buffer,
)
from headgate.testing import settle, virtual

integration = pytest.mark.integration


def double(n: int) -> int:
    return 2 * n


async def double_later(n: int, by: int = 2) -> int:
    await asyncio.sleep(1)
    return by * n


def until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.001)


# -- on a loop --------------------------------------------------------------------------------------------------------


@virtual
async def test_c30_run_in_executor_runs_async_and_plain_functions_in_the_pool() -> None:
    loop = asyncio.get_running_loop()
    async with TaskPool(max_concurrent=2) as pool:
        executor = pool.as_executor()
        assert isinstance(executor, Executor)
        assert await loop.run_in_executor(executor, double, 4) == 8
        calls = [loop.run_in_executor(executor, double_later, n) for n in range(4)]
        assert await asyncio.gather(*calls) == [0, 2, 4, 6]
        assert loop.time() == 2.0, "two at a time"
        assert pool.snapshot().completed == 5


@virtual
async def test_c30_futures_are_of_concurrent_futures() -> None:
    async with TaskPool(max_concurrent=1) as pool:
        executor = pool.as_executor()
        first, second = (executor.submit(double_later, n, by=3) for n in (1, 2))
        assert isinstance(first, Future)
        await settle()
        assert (first.running(), second.running()) == (True, False)
        assert repr(executor) == f"<PoolExecutor of {pool.name!r} 2 unfinished>"
        done = set[Any]()
        for future in (first, second):
            future.add_done_callback(done.add)
            await asyncio.wrap_future(future)
        assert done == {first, second}
        assert (first.result(), second.result()) == (3, 6)
        assert second.exception() is None


@virtual
async def test_c30_options_of_submit_are_given_once_for_all_calls() -> None:
    order: list[str] = []

    async def note(name: str) -> None:
        order.append(name)
        await asyncio.sleep(1)

    async with TaskPool(max_concurrent=1) as pool:
        batch, urgent = pool.as_executor(key="batch"), pool.as_executor(priority=5, timeout=60)
        futures = [batch.submit(note, "first"), batch.submit(note, "last"), urgent.submit(note, "urgent")]
        await asyncio.gather(*map(asyncio.wrap_future, futures))
        assert [task.key for task in pool.snapshot().tasks] == [None, "batch", "batch"]
    assert order == ["first", "urgent", "last"]


@virtual
async def test_c30_bad_options_are_refused_at_once() -> None:
    async with TaskPool() as pool:
        with pytest.raises(InvalidArgument, match=r"as_executor\(\) has no option 'prioritty'.*Did you mean priority"):
            pool.as_executor(prioritty=3)
        with pytest.raises(InvalidArgument, match="one idempotency_key for all calls"):
            pool.as_executor(idempotency_key="x")
        with pytest.raises(InvalidType, match="priority must be a plain value"):
            pool.as_executor(priority=lambda: 3)
        with pytest.raises(InvalidArgument, match="timeout must be"):
            await asyncio.wrap_future(pool.as_executor(timeout=-1).submit(double, 1))
        with pytest.raises(InvalidType, match="has been called already"):
            await asyncio.wrap_future(pool.as_executor().submit(double_later(1)))  # type: ignore[arg-type]


@virtual
async def test_c30_context_variables_of_the_submitter_reach_the_call() -> None:
    tenant = contextvars.ContextVar("tenant", default="nobody")
    async with TaskPool() as pool:
        tenant.set("ada")
        assert await asyncio.wrap_future(pool.as_executor().submit(tenant.get)) == "ada"


@virtual
async def test_c30_resources_come_first() -> None:
    async with TaskPool(resources=ResourcePool({"key-1": "sk-aaa"})) as pool:
        call = pool.as_executor().submit(lambda key, n: (key.value, n), 3)
        assert await asyncio.wrap_future(call) == ("sk-aaa", 3)


# -- how calls end ----------------------------------------------------------------------------------------------------


@virtual
async def test_c30_a_failure_is_the_futures_and_counts_as_seen(caplog: pytest.LogCaptureFixture) -> None:
    async def fail() -> None:
        raise LookupError("no such thing")

    async with TaskPool() as pool:
        future = pool.as_executor().submit(fail)
        with pytest.raises(LookupError, match="no such thing") as caught:
            await asyncio.wrap_future(future)
        assert [entry.name for entry in caught.traceback][-1] == "fail"
    assert not caplog.records, "the pool does not report failures that somebody has been given"


@virtual
async def test_c30_an_exception_makes_no_reference_cycle() -> None:
    class Noticed(Exception):
        pass

    def fail() -> None:
        raise Noticed

    async with TaskPool() as pool:
        executor = pool.as_executor()
        gc.collect()
        gc.disable()
        try:
            future = executor.submit(fail)
            await pool.drain()
            gone = weakref.ref(future.exception())  # type: ignore[arg-type]
            del future
            await settle()
            # The thread of the call gives the exception away, and forgets it a moment later. A cycle stays.
            until(lambda: gone() is None)
        finally:
            gc.enable()


@virtual
async def test_c30_a_retried_call_is_one_call() -> None:
    tries: list[int] = []

    async def fails_once() -> str:
        tries.append(len(tries))
        await (await pool.submit(asyncio.sleep, 1))  # a task of its own, which is not the call
        if len(tries) == 1:
            raise ConnectionError
        return "done"

    async with TaskPool(max_concurrent=2) as pool:
        future = pool.as_executor(retries=1).submit(fails_once)
        assert await asyncio.wrap_future(future) == "done"
    assert tries == [0, 1]


@virtual
async def test_c30_a_call_whose_task_is_cancelled_by_the_pool_says_so() -> None:
    pool = TaskPool(max_concurrent=1)
    executor = pool.as_executor()
    running, queued = executor.submit(double_later, 1), executor.submit(double_later, 2)
    await settle()
    await pool.close(cancel=True)
    for future in (running, queued):
        with pytest.raises(TaskCancelled):
            future.result()


# -- cancelling -------------------------------------------------------------------------------------------------------


@virtual
async def test_c30_a_queued_call_can_be_cancelled_and_a_running_one_cannot() -> None:
    ran: list[str] = []

    async def note(name: str) -> None:
        ran.append(name)
        await asyncio.sleep(1)

    async with TaskPool(max_concurrent=1) as pool:
        executor = pool.as_executor()
        first, second, third = (executor.submit(note, name) for name in ("first", "second", "third"))
        await settle()
        assert not first.cancel()
        assert second.cancel()
        assert second.cancel(), "as often as you like"
        assert pool.snapshot().queued == 1
        assert second.cancelled()
        with pytest.raises(concurrent.futures.CancelledError):
            second.result()
        await asyncio.wait([asyncio.wrap_future(third)])
        assert [future for future in as_completed([first, second, third]) if future.cancelled()] == [second]
        assert pool.snapshot().cancelled == 1
    assert ran == ["first", "third"]


@virtual
async def test_c30_a_call_cancelled_at_the_last_moment_never_runs() -> None:
    """Another thread has cancelled it, and the loop has not been told yet when its turn comes."""
    ran: list[str] = []

    async def note(name: str) -> None:
        ran.append(name)
        await asyncio.sleep(1)

    async with TaskPool(max_concurrent=1) as pool:
        executor = pool.as_executor(retries=2)
        first, second, third = (executor.submit(note, name) for name in ("first", "second", "third"))
        assert Future.cancel(second)
        await asyncio.wait([asyncio.wrap_future(third)])
        assert pool.snapshot().cancelled == 1
        assert first.done()
    assert ran == ["first", "third"]


@virtual
async def test_c30_cancelling_the_awaiter_of_run_in_executor_cancels_a_queued_call() -> None:
    loop = asyncio.get_running_loop()
    async with TaskPool(max_concurrent=1) as pool:
        executor = pool.as_executor()
        first = loop.run_in_executor(executor, double_later, 1)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await loop.run_in_executor(executor, double_later, 2)
        await settle()
        assert pool.snapshot().queued == 0
        assert await first == 2


# -- backpressure -----------------------------------------------------------------------------------------------------


@virtual
async def test_c30_a_full_queue_is_waited_for_or_is_the_failure_of_the_call() -> None:
    async with TaskPool(max_concurrent=1, backpressure=backpressure_queue(max_depth=1)) as pool:
        executor = pool.as_executor()
        futures = [executor.submit(double_later, n) for n in range(4)]
        assert pool.snapshot().blocked_submitters <= 2
        await settle()
        assert pool.snapshot().blocked_submitters == 2
        assert futures[3].cancel(), "one that waits for a place too"
        await settle()
        assert pool.snapshot().blocked_submitters == 1
        assert [await asyncio.wrap_future(future) for future in futures[:3]] == [0, 2, 4]
    async with TaskPool(
        max_concurrent=1, backpressure=backpressure_queue(max_depth=1, on_full="fail_submitter")
    ) as pool:
        executor = pool.as_executor()
        futures = [executor.submit(double_later, n) for n in range(3)]
        await asyncio.wait([asyncio.wrap_future(future) for future in futures])
        assert isinstance(futures[2].exception(), QueueFull)
        assert futures[1].result() == 2
    async with TaskPool(max_concurrent=1, backpressure=ring_buffer(1)) as pool:
        executor = pool.as_executor()
        futures = [executor.submit(double_later, n) for n in range(3)]
        await asyncio.wait([asyncio.wrap_future(future) for future in futures])
        assert type(futures[1].exception()).__name__ == "TaskRejected"


@integration
def test_c30_a_durable_pool_writes_its_calls_down(tmp_path: Path) -> None:
    from headgate.stores import JsonLinesStore

    pool = TaskPool("batch", scope="pipeline", pipeline_id="p1", store=JsonLinesStore(tmp_path))
    with pool.as_executor() as executor:
        assert list(executor.map(double, range(3))) == [0, 2, 4]
    assert sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()) > 0


# -- the end ----------------------------------------------------------------------------------------------------------


@virtual
async def test_c30_shutdown_on_the_loop_of_the_pool_does_not_hang() -> None:
    async with TaskPool(max_concurrent=1) as pool:
        with pool.as_executor() as executor:
            await asyncio.wrap_future(executor.submit(double_later, 1))
        with pytest.raises(RuntimeError, match="cannot schedule new futures after shutdown"):
            executor.submit(double, 1)
        other = pool.as_executor()
        future = other.submit(double_later, 2)
        with pytest.raises(WaitCycle, match=r"shutdown\(\) would block the event loop.*shutdown\(wait=False\)"):
            other.shutdown()
        other.shutdown(wait=False)
        assert await (await pool.submit(double, 2)) == 4, "the pool is not the executor's to close"
        assert await asyncio.wrap_future(future) == 4


@virtual
async def test_c30_result_on_the_loop_of_the_pool_does_not_hang() -> None:
    async with TaskPool() as pool:
        executor = pool.as_executor()
        future = executor.submit(double_later, 1)
        with pytest.raises(WaitCycle, match=r"result\(\) would block .*await asyncio.wrap_future"):
            future.result()
        with pytest.raises(WaitCycle):
            next(executor.map(double_later, [1]))
        with pytest.raises(TimeoutError):
            future.result(timeout=0)
        assert await asyncio.wrap_future(future) == 2
        assert future.result() == 2


@virtual
async def test_c30_a_closed_pool_takes_no_calls() -> None:
    pool = TaskPool()
    before = pool.as_executor()
    async with pool:
        await asyncio.wrap_future(before.submit(double, 1))
    with pytest.raises(PoolClosed):
        await asyncio.wrap_future(before.submit(double, 1))
    with pytest.raises(PoolClosed):
        pool.as_executor().submit(double, 1)


@integration
def test_c30_a_closed_loop_takes_no_calls() -> None:
    pool = TaskPool()

    async def use() -> Executor:
        executor = pool.as_executor()
        await asyncio.wrap_future(executor.submit(double, 1))
        return executor

    executor = asyncio.run(use())
    with pytest.raises(PoolClosed, match=r"event loop of .* is closed"):
        executor.submit(double, 1)
    with pytest.raises(PoolClosed):
        pool.as_executor().submit(double, 1)
    asyncio.run(pool.close())


# -- without a loop ---------------------------------------------------------------------------------------------------


@integration
def test_c30_a_program_without_a_loop_uses_a_pool_as_executor() -> None:
    before = set(threading.enumerate())
    with TaskPool("sync", max_concurrent=4).as_executor() as executor:
        assert list(executor.map(double, range(5))) == [0, 2, 4, 6, 8]
        assert list(executor.map(pow, range(3), range(3))) == [1, 1, 4]
        futures = [executor.submit(double_soon, n) for n in range(5)]
        assert sorted(future.result() for future in as_completed(futures)) == [0, 2, 4, 6, 8]
        with pytest.raises(ZeroDivisionError):
            executor.submit(lambda: 1 / 0).result()
    assert set(threading.enumerate()) <= before, "its thread has ended"
    assert pool_get("sync") is None, "and the pool is closed"
    with pytest.raises(RuntimeError, match="cannot schedule new futures after shutdown"):
        executor.submit(double, 1)
    executor.shutdown()


async def double_soon(n: int) -> int:
    await asyncio.sleep(0)
    return 2 * n


@integration
def test_c30_a_with_block_inside_a_loop_has_a_loop_of_its_own() -> None:
    """As in a cell of a notebook: a loop runs in this thread, and the code is plain."""

    async def cell() -> list[int]:
        with TaskPool(max_concurrent=2).as_executor() as executor:
            return list(executor.map(double, range(3)))

    assert asyncio.run(cell()) == [0, 2, 4]


@integration
def test_c30_threads_may_submit_to_a_pool_on_a_loop() -> None:
    async def main() -> list[int]:
        async with TaskPool(max_concurrent=2) as pool:
            executor = pool.as_executor()
            found = await asyncio.to_thread(lambda: list(executor.map(double_soon, range(20))))
            await asyncio.to_thread(executor.shutdown)
            return found

    assert asyncio.run(main()) == [2 * n for n in range(20)]


@integration
def test_c30_a_call_that_waits_for_another_lends_its_slot() -> None:
    """With the executors of Python this is a deadlock."""
    with TaskPool(max_concurrent=1).as_executor() as executor:

        def tree(depth: int) -> int:
            return 1 + sum(executor.map(tree, [depth - 1] * 2)) if depth else 1

        assert executor.submit(tree, 3).result(timeout=30) == 15

        def impatient(gate: threading.Event) -> str:
            with pytest.raises(TimeoutError):
                executor.submit(gate.wait).result(timeout=0.01)
            gate.set()
            return "went on"

        assert executor.submit(impatient, threading.Event()).result(timeout=30) == "went on"


@integration
def test_c30_system_exit_in_a_call_is_the_futures() -> None:
    with TaskPool(max_concurrent=2).as_executor() as executor:
        for call in (sys.exit, exit_later):
            with pytest.raises(SystemExit) as caught:
                executor.submit(call, 3).result()
            assert caught.value.code == 3
        assert executor.submit(double, 4).result() == 8


async def exit_later(code: int) -> None:
    sys.exit(code)


@integration
def test_c30_shutdown_cancels_what_has_not_started() -> None:
    gate = threading.Event()
    executor = TaskPool(max_concurrent=1).as_executor()
    first, *others = [executor.submit(gate.wait, 30) for _ in range(20)]
    until(first.running)
    executor.shutdown(wait=False, cancel_futures=True)
    assert all(future.cancelled() for future in others)
    assert not first.done()
    gate.set()
    executor.shutdown()
    assert first.result() is True


@integration
def test_c30_a_forgotten_executor_does_what_it_was_given_and_ends() -> None:
    before = set(threading.enumerate())
    futures = [*map(TaskPool().as_executor().submit, [double] * 3, range(3))]
    gc.collect()
    assert [future.result(timeout=30) for future in futures] == [0, 2, 4]
    until(lambda: set(threading.enumerate()) <= before)


@integration
def test_c30_a_call_may_shut_its_executor_down() -> None:
    executor = TaskPool().as_executor()

    async def end(wait: bool) -> None:
        executor.shutdown(wait=wait)

    with pytest.raises(WaitCycle, match="shutdown"):
        executor.submit(end, True).result()
    executor.shutdown()


@integration
def test_c30_many_threads_submit_and_cancel() -> None:
    ran: list[int] = []
    with TaskPool(max_concurrent=4).as_executor() as executor:

        def work(start: int) -> list[Future[None]]:
            futures = [executor.submit(ran.append, start + n) for n in range(100)]
            for future in futures[::3]:
                future.cancel()
            return futures

        with concurrent.futures.ThreadPoolExecutor(8) as threads:
            futures = [future for some in threads.map(work, range(0, 800, 100)) for future in some]
        done, pending = concurrent.futures.wait(futures, timeout=60)
        assert not pending
        kept = sum(not future.cancelled() for future in done)
    assert len(ran) == len(set(ran)) == kept


# -- the end of the program -------------------------------------------------------------------------------------------


def program(text: str) -> subprocess.CompletedProcess[str]:
    lines = (
        "import atexit, time\nfrom headgate import TaskPool, WorkerPool\ndef say(word): time.sleep(0.1); print(word)\n"
    )
    return subprocess.run([sys.executable, "-c", lines + text], capture_output=True, text=True, timeout=60, check=False)


@integration
@pytest.mark.parametrize("end", ["", "executor.shutdown(wait=False)", "del executor"])
def test_c30_the_end_of_the_program_waits_for_what_was_submitted(end: str) -> None:
    ended = program(
        "executor = TaskPool(max_concurrent=1).as_executor()\n"
        f"for word in ('apple', 'pear'): executor.submit(say, word)\n{end}"
    )
    assert (ended.returncode, ended.stdout.split(), ended.stderr) == (0, ["apple", "pear"], "")


@integration
def test_c30_nothing_can_be_submitted_after_the_end_of_the_program() -> None:
    ended = program(
        "executor = TaskPool().as_executor()\n"
        "@atexit.register\n"
        "def last():\n"
        "    try: executor.submit(say, 'pear')\n"
        "    except RuntimeError as error: print(error)\n"
    )
    assert ended.stdout.strip() == "cannot schedule new futures after interpreter shutdown"
    assert ended.stderr == ""
