"""`WorkerPool.as_executor`: worker processes where other code expects a `concurrent.futures.Executor`."""

from __future__ import annotations

import asyncio
import math
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import Executor, Future, ThreadPoolExecutor, as_completed
from typing import Any

import pytest

from headgate import InvalidArgument, PoolClosed, RoutineExited, WaitCycle, WorkerLost, WorkerPool, do_dispatch
from tests.support.workers import jobs
from tests.support.workers.support import Shared

pytestmark = pytest.mark.integration


def scaled(n: int, by: int = 2) -> int:
    return by * n


async def scaled_soon(n: int, by: int = 2) -> int:
    await asyncio.sleep(0)
    return by * n


def pid_of(_: object = None) -> int:
    return os.getpid()


def kill_worker() -> None:
    os._exit(3)


def test_c30_functions_of_all_kinds_run_on_workers(shared: Shared) -> None:
    async def main() -> None:
        loop, executor = asyncio.get_running_loop(), shared.pool.as_executor()
        assert isinstance(executor, Executor)
        assert await loop.run_in_executor(executor, scaled, 4) == 8
        assert await loop.run_in_executor(executor, pid_of) in {view.pid for view in shared.pool.workers()}
        assert await loop.run_in_executor(executor, math.sqrt, 16) == 4.0
        assert await loop.run_in_executor(executor, "-".join, ["a", "b"]) == "a-b"
        assert await asyncio.wrap_future(executor.submit(scaled_soon, 3, by=5)) == 15
        assert await asyncio.wrap_future(executor.submit(jobs.add, 3, 4)) == 7, "a routine"
        with ThreadPoolExecutor(1) as thread:
            found = await loop.run_in_executor(thread, lambda: list(executor.map(scaled, range(20), chunksize=5)))
            assert found == [2 * n for n in range(20)]
            done = await loop.run_in_executor(
                thread, lambda: [*as_completed([executor.submit(scaled, n) for n in range(5)])]
            )
            assert sorted(future.result() for future in done) == [0, 2, 4, 6, 8]
        with do_dispatch(False):
            assert await loop.run_in_executor(executor, pid_of) == os.getpid()

    shared(main)


def test_c30_failures_are_the_futures(shared: Shared) -> None:
    async def main() -> None:
        executor = shared.pool.as_executor()
        with pytest.raises(ZeroDivisionError):
            await asyncio.wrap_future(executor.submit(divmod, 1, 0))
        with pytest.raises(RoutineExited):
            await asyncio.wrap_future(executor.submit(sys.exit, 3))
        with pytest.raises(Exception, match="pickle"):
            await asyncio.wrap_future(executor.submit(scaled, threading.Lock()))
        future = executor.submit(scaled, 1)
        with pytest.raises(WaitCycle, match=r"result\(\) would block"):
            future.result()
        assert await asyncio.wrap_future(future) == 2

    shared(main)


def test_c30_calls_wait_in_the_executor_and_can_be_cancelled_there(shared: Shared) -> None:
    async def main() -> None:
        executor = shared.pool.as_executor(max_concurrent=1)
        first, second, third = (executor.submit(asyncio.sleep, seconds) for seconds in (0.05, 0, 0))
        assert (first.running(), second.running()) == (True, False)
        assert not first.cancel()
        assert second.cancel()
        await asyncio.wrap_future(third)
        assert [future for future in as_completed([first, second, third]) if future.cancelled()] == [second]
        other = shared.pool.as_executor()
        calls: list[Future[Any]] = [other.submit(asyncio.sleep, 0.02) for _ in range(9)]
        assert sum(future.running() for future in calls) == 4, "two for each worker"
        await asyncio.gather(*map(asyncio.wrap_future, calls))

    shared(main)


def test_c30_max_concurrent_is_checked() -> None:
    with pytest.raises(InvalidArgument, match=r"max_concurrent must be"):
        WorkerPool(spawn=1).as_executor(max_concurrent=0)


def test_c30_a_program_without_a_loop_uses_workers_as_executor() -> None:
    before = set(threading.enumerate())
    pool = WorkerPool(spawn=1)
    with pool.as_executor() as executor:
        assert list(executor.map(scaled, range(4))) == [0, 2, 4, 6]
        pids = set(executor.map(pid_of, range(3)))
        assert pids == {view.pid for view in pool.workers()}
        with pytest.raises(WorkerLost):
            executor.submit(kill_worker).result()
        assert executor.submit(scaled, 4).result() == 8, "with another worker"
        running, *others = [executor.submit(time.sleep, 0.1) for _ in range(10)]
        executor.shutdown(cancel_futures=True)
        assert others[-1].cancelled()
        assert running.done()
    assert set(threading.enumerate()) <= before
    with pytest.raises(RuntimeError, match="cannot schedule new futures after shutdown"):
        executor.submit(scaled, 1)
    with pytest.raises(PoolClosed):
        pool.as_executor().submit(scaled, 1)


def test_c30_a_pool_that_cannot_be_opened_says_so() -> None:
    def no_worker(*tags: str, **options: object) -> None:
        raise OSError("no such machine")

    with pytest.raises(OSError, match="no such machine"):
        with WorkerPool(spawn=1, worker=no_worker).as_executor():
            raise AssertionError("not reached")
    executor = WorkerPool(spawn=1, worker=no_worker).as_executor()
    first = executor.submit(scaled, 1)
    with pytest.raises(OSError, match="no such machine"):
        first.result()
    with pytest.raises(OSError, match="no such machine"):
        executor.submit(scaled, 2).result()
    executor.shutdown()


def test_c30_the_end_of_the_program_waits_for_calls_on_workers() -> None:
    code = (
        "from headgate import WorkerPool\nWorkerPool(spawn=1).as_executor().submit(pow, 2, 3).add_done_callback(print)"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "returned int" in ended.stdout
