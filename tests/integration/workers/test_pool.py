"""W20, W22-W25, W35, W26: how a pool is made, entered, resized, mended and left."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
import os
import random
import signal
import textwrap
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import headgate
from headgate import (
    HeadgateError,
    InvalidArgument,
    InvalidType,
    LocalWorker,
    NoActivePool,
    NoWorkersAvailable,
    PoolClosed,
    WorkerPool,
    WorkerStartFailed,
)
from headgate.discovery import OwnDiscovery
from headgate.testing import capture_events, no_leaks
from headgate.workers.processes import restarts
from tests.support.workers import jobs
from tests.support.workers.support import Shared, alive, all_ready, in_flight, lines, pids, run, script, states, until

pytestmark = pytest.mark.integration


# -- making one -------------------------------------------------------------------------------------------------------


def test_w20_nothing_given_makes_a_worker_per_cpu() -> None:
    async def main() -> None:
        async with WorkerPool() as pool:
            assert len(pool.workers()) in {os.cpu_count(), len(os.sched_getaffinity(0))}
            assert await jobs.pid() in pids(pool)

    run(main)


async def _tasks() -> set[str]:
    """What runs on this loop, besides this."""
    return {str(task.get_coro()) for task in asyncio.all_tasks() if task is not asyncio.current_task()}


async def _until_no_tasks() -> None:
    async with asyncio.timeout(20):
        while await _tasks():  # noqa: ASYNC110 - asyncio tells nobody that a task has ended
            await asyncio.sleep(0.01)


async def _entered(pool: WorkerPool) -> int:
    await pool.__aenter__()
    return await jobs.pid()


mostly_hybrid = pytest.mark.parametrize(
    "durable", [pytest.param(False, marks=pytest.mark.soak), True], ids=["spawn", "hybrid"]
)


@mostly_hybrid
def test_w35_a_pool_may_be_left_on_another_loop_while_its_own_runs(durable: bool) -> None:
    pool = WorkerPool(spawn=1, discovery=OwnDiscovery() if durable else None)
    first = asyncio.new_event_loop()
    thread = threading.Thread(target=first.run_forever)
    thread.start()
    try:
        pid = asyncio.run_coroutine_threadsafe(_entered(pool), first).result(60)
        asyncio.run(pool.__aexit__(None, None, None))
        assert asyncio.run_coroutine_threadsafe(_tasks(), first).result(10) == set()
        assert not alive(pid)
    finally:
        first.call_soon_threadsafe(first.stop)
        thread.join()
        first.close()


@mostly_hybrid
def test_w35_a_pool_that_is_left_on_another_loop_while_its_own_does_not_run_ends_its_workers(durable: bool) -> None:
    """And says so. What it has on its own loop ends when that runs again."""
    pool = WorkerPool(spawn=1, discovery=OwnDiscovery() if durable else None)
    first = asyncio.new_event_loop()
    try:
        pid = first.run_until_complete(_entered(pool))
        with pytest.warns(RuntimeWarning, match="Leave a pool on the loop on which it was entered"):
            asyncio.run(pool.__aexit__(None, None, None))
        assert not alive(pid)
        first.run_until_complete(_until_no_tasks())
    finally:
        first.close()


def test_w20_a_pool_is_made_without_a_loop_and_starts_nothing() -> None:
    with no_leaks():
        pool = WorkerPool("gpu", spawn=3)
        assert pool.workers() == []
        assert "WorkerPool" in repr(pool)


def test_w20_as_many_workers_as_asked_for_and_all_are_ready() -> None:
    async def main() -> None:
        async with WorkerPool("gpu", "big", spawn=3, lease=5) as pool:
            views = pool.workers()
            assert [view.state for view in views] == ["ready"] * 3
            assert len({view.pid for view in views}) == 3
            assert len({view.uid for view in views}) == 3
            assert len({view.address for view in views}) == 3
            for view in views:
                assert set(view.tags) == {"gpu", "big"}
                assert view.in_flight == 0
                assert alive(view.pid)
                assert view.metadata.uid == view.uid
                assert view.metadata.pid == view.pid
                assert set(view.metadata.tags) == {"gpu", "big"}
                assert view.metadata.secure is False
                with pytest.raises((dataclasses.FrozenInstanceError, AttributeError)):
                    view.state = "lost"
            assert os.getpid() not in pids(pool)
            assert {await jobs.pid() for _ in range(6)} == set(pids(pool))
        for view in views:
            await until(lambda view=view: not alive(view.pid), 2)

    run(main)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"spawn": -1}, "spawn"),
        ({"spawn": 0}, "spawn"),
        ({"spawn": 1.5}, "spawn"),
        ({"spawn": "2"}, "spawn"),
        ({"spawn": 1, "lease": -1}, "lease"),
        ({"spawn": 1, "lease": "1"}, "lease"),
        ({"spawn": 2, "quorum": 3}, "quorum"),
        ({"spawn": 2, "quorum": -1}, "quorum"),
        ({"spawn": 2, "quorum": "1"}, "quorum"),
        ({"spawn": 1, "quorum_timeout": -1}, "quorum_timeout"),
        ({"spawn": 1, "quorum_timeout": math.nan}, "quorum_timeout"),
        ({"spawn": 1, "quorum_timeout": "1"}, "quorum_timeout"),
        ({"spawn": 1, "shutdown_timeout": math.nan}, "shutdown_timeout"),
        ({"spawn": 1, "shutdown_timeout": "1"}, "shutdown_timeout"),
        ({"spawn": 1, "loadbalancer": 3}, "loadbalancer"),
        ({"spawn": 1, "worker": 3}, "worker"),
        ({"spawn": 1, "discovery": object()}, "discovery"),
        ({"spawn": 1, "credentials": object()}, "credentials"),
    ],
)
def test_w24_bad_arguments_are_refused_at_construction(options: dict[str, Any], named: str) -> None:
    with pytest.raises((InvalidArgument, InvalidType), match=named) as caught:
        WorkerPool(**options)
    assert caught.value.remedy in str(caught.value)


def test_w24_a_number_in_the_place_of_a_tag_is_refused() -> None:
    with pytest.raises((InvalidArgument, InvalidType), match="tag"):
        WorkerPool(4)  # type: ignore[arg-type]


def test_w20_an_unknown_option_is_refused() -> None:
    with pytest.raises(TypeError, match="workers"):
        WorkerPool(workers=4)  # type: ignore[call-arg]


def sockets() -> int:
    found = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found += os.readlink(f"/proc/self/fd/{name}").startswith("socket:")
    return found


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs /proc")
@pytest.mark.parametrize("lazy", [True, False])
def test_w22_a_lazy_pool_connects_at_its_first_call(lazy: bool) -> None:
    async def main() -> None:
        async with WorkerPool(spawn=1, lazy=lazy):
            before = sockets()
            assert await jobs.add(1, 2) == 3
            assert (sockets() > before) is lazy

    run(main)


# -- balancers and factories ------------------------------------------------------------------------------------------


class Last:
    """A balancer that prefers the last worker."""

    def __init__(self) -> None:
        self.reports: list[tuple[Any, str]] = []
        self.entered = 0
        self.left = 0

    def order(self, task: Any, workers: Any) -> list[Any]:
        return list(workers)[::-1]

    def report(self, worker: Any, outcome: str) -> None:
        self.reports.append((worker.uid, outcome))

    @contextlib.contextmanager
    def managed(self) -> Iterator[Last]:
        self.entered += 1
        try:
            yield self
        finally:
            self.left += 1

    @contextlib.asynccontextmanager
    async def managed_async(self) -> AsyncIterator[Last]:
        with self.managed():
            yield self


FORMS: dict[str, Callable[[Last], Any]] = {
    "factory": lambda made: lambda: made,
    "context manager": lambda made: made.managed(),
    "async context manager": lambda made: made.managed_async(),
    "factory of a context manager": lambda made: made.managed,
}


@pytest.mark.parametrize("form", list(FORMS))
def test_w23_a_balancer_comes_in_many_forms(form: str) -> None:
    made = Last()

    async def main() -> None:
        async with WorkerPool(spawn=1, loadbalancer=FORMS[form](made)) as pool:
            if "context manager" in form:
                assert (made.entered, made.left) == (1, 0)
            assert {await jobs.pid() for _ in range(4)} == set(pids(pool))
            uids = {view.uid for view in pool.workers()}
            assert len(made.reports) == 4
            assert {outcome for _, outcome in made.reports} == {"accepted"}
            assert {uid for uid, _ in made.reports} <= uids
        if "context manager" in form:
            assert (made.entered, made.left) == (1, 1)

    run(main)


def test_w23_a_factory_makes_every_worker() -> None:
    made: list[tuple[tuple[str, ...], Any]] = []

    def factory(*tags: str, credentials: Any = None) -> LocalWorker:
        made.append((tags, credentials))
        return LocalWorker(*tags, "extra", credentials=credentials)

    async def main() -> None:
        async with WorkerPool("gpu", spawn=2, worker=factory) as pool:
            assert made == [(("gpu",), None)] * 2
            assert all(set(view.tags) == {"gpu", "extra"} for view in pool.workers())
            assert await jobs.add(1, 2) == 3
            os.kill(pids(pool)[0], signal.SIGKILL)
            await until(lambda: len(made) == 3)
            await all_ready(pool, 2)

    run(main)


def broken_factory(*tags: str, credentials: Any = None) -> Any:
    raise LookupError("planted in the factory")


def empty_factory(*tags: str, credentials: Any = None) -> Any:
    return None


def test_w23_a_factory_that_raises_or_makes_nothing_ends_the_start() -> None:
    async def main() -> None:
        with pytest.raises((LookupError, HeadgateError), match="planted in the factory"):
            async with WorkerPool(spawn=2, worker=broken_factory):
                pytest.fail("it was entered")
        with pytest.raises(HeadgateError, match=r"LocalWorker|worker"):
            async with WorkerPool(spawn=2, worker=empty_factory):
                pytest.fail("it was entered")

    run(main)


@pytest.mark.parametrize("bad", [3, "hook", []])
def test_w32_a_hook_that_cannot_be_called_is_refused(bad: Any) -> None:
    with pytest.raises(InvalidType, match="backpressure"):
        LocalWorker(backpressure=bad)


# -- entering and nesting ---------------------------------------------------------------------------------------------


def test_w25_the_innermost_pool_is_active() -> None:
    async def main() -> None:
        async with WorkerPool(spawn=1) as outer:
            assert await jobs.pid() == pids(outer)[0]
            async with WorkerPool(spawn=1) as inner:
                assert {await jobs.pid() for _ in range(3)} == set(pids(inner))
                assert not set(pids(inner)) & set(pids(outer))
            assert await jobs.pid() == pids(outer)[0]
        with pytest.raises(NoActivePool):
            await jobs.pid()

    run(main)


def test_w25_two_tasks_have_their_own_pools() -> None:
    async def one(barrier: asyncio.Barrier) -> None:
        async with WorkerPool(spawn=1) as pool:
            await barrier.wait()
            assert {await jobs.pid() for _ in range(4)} == set(pids(pool))
            await barrier.wait()

    async def main() -> None:
        barrier = asyncio.Barrier(2)
        async with asyncio.TaskGroup() as group:
            group.create_task(one(barrier))
            group.create_task(one(barrier))
        with pytest.raises(NoActivePool):
            await jobs.pid()

    run(main)


def test_w25_a_pool_is_entered_once() -> None:
    async def main() -> None:
        pool = WorkerPool(spawn=1)
        async with pool:
            with pytest.raises(RuntimeError, match="once"):
                await pool.__aenter__()
            assert await jobs.add(1, 2) == 3
        with pytest.raises(RuntimeError, match="once"):
            async with pool:
                pytest.fail("it was entered twice")
        with no_leaks():
            assert [view.state for view in pool.workers() if view.state == "ready"] == []

    run(main)


def test_w25_an_exception_passes_through_and_ends_the_workers() -> None:
    async def main() -> None:
        found: list[int] = []

        async def work() -> None:
            async with WorkerPool(spawn=1) as pool:
                found.extend(pids(pool))
                raise LookupError("mine")

        with pytest.raises(LookupError, match="mine"):
            await work()
        await until(lambda: not alive(found[0]), 2)

    run(main)


def test_w25_cancelled_at_any_moment_a_pool_leaves_nothing(scale: float) -> None:
    """While it starts its workers, while it works, while it stops them."""
    chance = random.Random(5)

    async def use() -> None:
        async with WorkerPool(spawn=2, shutdown_timeout=0.1):
            await asyncio.gather(*(jobs.slow(0.05) for _ in range(4)))

    async def main() -> None:
        for _ in range(max(4, int(50 * scale))):
            task = asyncio.create_task(use())
            await asyncio.sleep(chance.uniform(0, 0.6))
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            async with no_leaks(grace=3):
                pass
        with pytest.raises(NoActivePool):
            await jobs.pid()

    with no_leaks(grace=3):
        run(main, patience=120)


# -- no worker --------------------------------------------------------------------------------------------------------


SLOW_WHILE_FLAGGED = "while os.path.exists(FLAG): time.sleep(0.01)"


def test_w24_without_a_worker_a_call_waits_and_then_fails(planted: Callable[[str], Any], tmp_path: Path) -> None:
    module = planted(SLOW_WHILE_FLAGGED)
    flag = tmp_path / "flag"

    async def main() -> None:
        async with WorkerPool(spawn=1, worker=module.worker, quorum_timeout=2) as pool:
            assert len(lines(tmp_path / "count")) == 1, "the hook is imported before the worker is ready"
            flag.touch()
            os.kill(pids(pool)[0], signal.SIGKILL)
            await until(lambda: not pids(pool))
            begun = time.monotonic()
            with pytest.raises(NoWorkersAvailable) as caught:
                await jobs.add(1, 2)
            assert time.monotonic() - begun > 1.6
            assert "quorum_timeout" in str(caught.value)
            assert not isinstance(caught.value, TimeoutError)
            begun = time.monotonic()
            with headgate.RuntimeContext(dispatch_timeout=0.1):
                with pytest.raises(headgate.DispatchTimeout) as timed_out:
                    await jobs.add(1, 2)
            assert time.monotonic() - begun > 0.05
            assert isinstance(timed_out.value, NoWorkersAvailable)
            assert isinstance(timed_out.value, TimeoutError)
            assert "dispatch_timeout" in str(timed_out.value)
            flag.unlink()
            await all_ready(pool, 1)
            assert await jobs.add(1, 2) == 3

    run(main)


def test_w24_a_call_in_a_restart_gap_waits_for_the_worker(planted: Callable[[str], Any], tmp_path: Path) -> None:
    module = planted(SLOW_WHILE_FLAGGED)
    flag = tmp_path / "flag"

    async def main() -> None:
        async with WorkerPool(spawn=1, worker=module.worker) as pool:
            flag.touch()
            os.kill(pids(pool)[0], signal.SIGKILL)
            await until(lambda: not pids(pool))
            calls = [asyncio.create_task(jobs.add(n, 1)) for n in range(5)]
            cancelled = asyncio.create_task(jobs.add(7, 1))
            await asyncio.sleep(0.2)
            assert not any(call.done() for call in calls)
            cancelled.cancel()
            with pytest.raises(asyncio.CancelledError):
                await cancelled
            flag.unlink()
            assert await asyncio.gather(*calls) == [1, 2, 3, 4, 5]

    run(main)


# -- restarts ---------------------------------------------------------------------------------------------------------


def test_w26_a_killed_worker_is_replaced_at_once_and_without_limit() -> None:
    async def main() -> None:
        async with WorkerPool(spawn=2) as pool:
            seen_pids = set(pids(pool))
            seen_uids = {view.uid for view in pool.workers()}
            with capture_events("workers") as events:
                for number in range(6):
                    [killed, kept] = pids(pool)
                    os.kill(killed, signal.SIGKILL)
                    await until(lambda killed=killed: killed not in pids(pool))
                    fresh = set(await all_ready(pool, 2)) - {kept}
                    assert not fresh & seen_pids
                    seen_pids |= fresh
                    uids = {view.uid for view in pool.workers()}
                    assert len(uids - seen_uids) == 1
                    seen_uids |= uids
                    assert {await jobs.pid() for _ in range(4)} == set(pids(pool))
                    assert len(seen_pids) == 3 + number
            assert events.names.count("worker_lost") == 6
            assert events.names.count("worker_ready") == 6

    run(main, patience=60)


def test_w26_some_deaths_before_readiness_are_survived(planted: Callable[[str], Any], tmp_path: Path) -> None:
    module = planted("os.path.getsize(COUNT) <= 2 * len('import\\n') and os._exit(9)")

    async def main() -> None:
        async with WorkerPool(spawn=1, worker=module.worker) as pool:
            assert await jobs.pid() in pids(pool)
        assert len(lines(tmp_path / "count")) == 3

    run(main)


def test_w26_five_deaths_before_readiness_end_the_pool(planted: Callable[[str], Any], tmp_path: Path) -> None:
    module = planted("raise RuntimeError('planted fault')")

    async def main() -> None:
        with pytest.raises(WorkerStartFailed, match="planted fault") as caught:
            async with WorkerPool(spawn=1, worker=module.worker):
                pytest.fail("it was entered")
        assert caught.value.remedy in str(caught.value)
        assert len(lines(tmp_path / "count")) == 5
        with pytest.raises(NoActivePool):
            await jobs.pid()

    run(main)


def test_w26_callers_are_told_when_workers_cannot_come_back(
    planted: Callable[[str], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restarts, "PATIENCE", 0.0)
    module = planted("os.path.exists(FLAG) and os._exit(77)")

    async def main() -> None:
        async with WorkerPool(spawn=1, worker=module.worker) as pool:
            (tmp_path / "flag").touch()
            os.kill(pids(pool)[0], signal.SIGKILL)
            await until(lambda: not pids(pool))
            with pytest.raises(WorkerStartFailed, match="77"):
                await jobs.add(1, 2)
            with pytest.raises(WorkerStartFailed, match="77"):
                await jobs.add(1, 2)

    run(main)


def test_w26_resize_up_and_down(shared: Shared) -> None:
    async def main() -> None:
        async with WorkerPool(spawn=1) as pool:
            first = pids(pool)
            await pool.resize(3)
            grown = await all_ready(pool, 3)
            assert set(first) < set(grown)
            assert {await jobs.pid() for _ in range(6)} == set(grown)
            calls = [asyncio.create_task(jobs.slow(1.0, n)) for n in range(6)]
            await until(lambda: in_flight(pool) == 6)
            await pool.resize(1)
            assert await asyncio.gather(*calls) == list(range(6)), "what runs on a worker that goes is not lost"
            [left] = await all_ready(pool, 1)
            assert left in grown
            for pid in set(grown) - {left}:
                await until(lambda pid=pid: not alive(pid))
            assert {await jobs.pid() for _ in range(3)} == {left}
            await pool.resize(1)
            assert pids(pool) == [left]

    run(main)


@pytest.mark.parametrize("bad", [-1, 0, 1.5, "2", None])
def test_w26_a_bad_size_is_refused(shared: Shared, bad: Any) -> None:
    async def main() -> None:
        before = states(shared.pool)
        with pytest.raises((InvalidArgument, InvalidType)):
            await shared.pool.resize(bad)
        assert states(shared.pool) == before

    shared(main)


def test_w26_a_pool_that_is_not_open_cannot_be_resized() -> None:
    async def main() -> None:
        pool = WorkerPool(spawn=1)
        with pytest.raises((HeadgateError, RuntimeError)):
            await pool.resize(2)
        async with pool:
            pass
        with pytest.raises(PoolClosed):
            await pool.resize(2)

    run(main)


def test_w26_workers_show_their_load(shared: Shared) -> None:
    async def main() -> None:
        assert in_flight(shared.pool) == 0
        calls = [asyncio.create_task(jobs.slow(0.3)) for _ in range(6)]
        await until(lambda: [view.in_flight for view in shared.pool.workers()] == [3, 3])
        await asyncio.gather(*calls)
        assert in_flight(shared.pool) == 0

    shared(main)


# -- leaving ----------------------------------------------------------------------------------------------------------


def test_w35_leaving_waits_for_the_calls_in_flight() -> None:
    async def main() -> None:
        async with WorkerPool(spawn=1) as pool:
            found = pids(pool)
            calls = [asyncio.create_task(jobs.slow(1.0, n)) for n in range(4)]
            await until(lambda: in_flight(pool) == 4)
        assert await asyncio.gather(*calls) == [0, 1, 2, 3]
        await until(lambda: not alive(found[0]))

    run(main)


@pytest.mark.parametrize("timeout", [pytest.param(0, marks=pytest.mark.soak), 0.2])
def test_w35_after_the_timeout_callers_get_pool_closed(log: str, timeout: float) -> None:
    async def main() -> None:
        async with WorkerPool(spawn=1, shutdown_timeout=timeout) as pool:
            call = asyncio.create_task(jobs.endless(log))
            await until(lambda: lines(log) == ["begun"])
            found = pids(pool)
        with pytest.raises(PoolClosed) as caught:
            await call
        assert caught.value.remedy in str(caught.value)
        await until(lambda: not alive(found[0]), 2)
        assert lines(log) == ["begun", "ended"], "it was cancelled, not killed"

    run(main)


def test_w35_a_worker_that_holds_the_gil_does_not_hold_the_exit(log: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headgate.workers.processes.kept_workers._LAST", 0.3)

    async def main() -> None:
        begun = time.monotonic()
        async with WorkerPool(spawn=1, shutdown_timeout=0.2) as pool:
            call = asyncio.create_task(jobs.holds_the_gil(log, 60))
            await until(lambda: lines(log))
            found = pids(pool)
        assert time.monotonic() - begun < 20
        with pytest.raises(HeadgateError):
            await call
        await until(lambda: not alive(found[0]), 2)

    run(main)


def test_w35_while_it_drains_new_calls_are_refused() -> None:
    async def main() -> None:
        async with WorkerPool(spawn=1) as pool:
            running = asyncio.create_task(jobs.slow(0.6, "kept"))

            async def call_on() -> bool:
                while True:
                    try:
                        await jobs.add(1, 2)
                    except PoolClosed:
                        return running.done()

            late = asyncio.create_task(call_on())
            await until(lambda: in_flight(pool) >= 1)
        assert await late is False, "refused while the other was still running"
        assert await running == "kept"

    run(main)


def test_w35_a_task_that_outlives_its_pool_gets_pool_closed() -> None:
    async def main() -> None:
        go_on = asyncio.Event()

        async def call_late() -> None:
            await go_on.wait()
            await jobs.add(1, 2)

        async with WorkerPool(spawn=1):
            late = asyncio.create_task(call_late())
            await asyncio.sleep(0)
        go_on.set()
        with pytest.raises(PoolClosed):
            await late

    run(main)


def test_w35_events_tell_the_life_of_a_worker() -> None:
    async def main() -> None:
        with capture_events("workers") as events:
            async with WorkerPool(spawn=1) as pool:
                uid = pool.workers()[0].uid
                await jobs.add(1, 2)
        names = [name for name in events.names if name.startswith("worker_")]
        assert names == ["worker_started", "worker_ready", "worker_stopped"]
        assert all(str(uid) in str(event.to_dict()) for event in events if event.name.startswith("worker_"))
        assert [name for name in events.names if name.startswith("task_")] == ["task_dispatched", "task_finished"]
        assert all(event.topic.startswith("workers") for event in events)

    run(main)


def test_w35_a_program_that_ends_inside_its_block_leaves_quietly(tmp_path: Path) -> None:
    """asyncio.run cancels what is left, also pools that nobody left."""
    code = """
        import asyncio, headgate
        from tests.support.workers import jobs
        here = []
        async def keep():
            async with headgate.WorkerPool(spawn=1) as pool:
                here.append(pool)
                await jobs.slow(60)
        async def main():
            task = asyncio.create_task(keep())
            while not (here and here[0].workers()[0].in_flight):
                await asyncio.sleep(0.01)
        asyncio.run(main())
        print("ended")
    """
    done = script(textwrap.dedent(code), tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "ended\n", "")


# -- a worker alone ---------------------------------------------------------------------------------------------------


def test_w30_a_worker_can_be_started_alone() -> None:
    async def main() -> None:
        worker = LocalWorker("gpu")
        async with no_leaks(grace=3):
            await worker.start()
            metadata = worker.metadata
            assert metadata is not None
            assert alive(metadata.pid)
            assert metadata.pid != os.getpid()
            assert set(metadata.tags) == {"gpu"}
            assert (metadata.secure, metadata.version) == (False, headgate.__version__)
            await worker.stop()
            await until(lambda: not alive(metadata.pid), 2)

    run(main)


def test_w30_a_worker_alone_can_be_started_again() -> None:
    async def main() -> None:
        worker = LocalWorker()
        assert worker.metadata is None
        await worker.stop()  # it never started: nothing to do
        seen = set()
        async with no_leaks(grace=3):
            for how in ("stopped", "killed", "stopped"):
                await worker.start()
                metadata = worker.metadata
                assert metadata is not None
                assert (alive(metadata.pid), metadata.uid) == (True, worker.uid)
                with pytest.raises(RuntimeError, match="started already"):
                    await worker.start()
                seen.add(metadata.pid)
                if how == "killed":
                    os.kill(metadata.pid, signal.SIGKILL)
                    await until(lambda: worker._exited is not None and worker._exited.done())
                else:
                    await worker.stop()
                    assert worker.metadata is None
                    await worker.stop()
        assert len(seen) == 3

    run(main)


def test_w30_a_worker_alone_whose_start_failed_can_be_started_again(
    planted: Callable[[str], Any], tmp_path: Path
) -> None:
    module = planted("os.path.exists(FLAG) and os._exit(77)")

    async def main() -> None:
        worker = LocalWorker(backpressure=module.hook)
        (tmp_path / "flag").touch()
        async with no_leaks(grace=3):
            with pytest.raises(WorkerStartFailed, match="77"):
                await worker.start()
            assert worker.metadata is None
            (tmp_path / "flag").unlink()
            async with worker:
                assert worker.metadata is not None
            assert worker.metadata is None

    run(main)


@pytest.mark.parametrize("early", [pytest.param(0.0, marks=pytest.mark.soak), 0.01], ids=["in time", "early"])
def test_w24_without_a_limit_calls_wait_for_a_worker_and_the_exit_for_calls(
    planted: Callable[[str], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, early: float
) -> None:
    """Also where timers come a little early, as those of uvloop do."""
    timeout = asyncio.timeout
    monkeypatch.setattr(asyncio, "timeout", lambda seconds: timeout(None if seconds is None else seconds - early))
    module = planted(SLOW_WHILE_FLAGGED)
    flag = tmp_path / "flag"

    async def main() -> None:
        pool = WorkerPool(spawn=2, worker=module.worker, quorum_timeout=None, shutdown_timeout=None)
        async with pool:
            await pool.resize(1)
            flag.touch()
            os.kill(pids(pool)[0], signal.SIGKILL)
            await until(lambda: not pids(pool))
            call = asyncio.create_task(jobs.slow(0.3))
            with headgate.RuntimeContext(dispatch_timeout=0.1), pytest.raises(headgate.DispatchTimeout):
                await jobs.add(1, 2)
            flag.unlink()
            await until(lambda: in_flight(pool))
        assert call.done()
        await call

    run(main)


@pytest.mark.parametrize("bad", [3, None, b"tag"])
def test_w30_a_bad_tag_is_refused(bad: Any) -> None:
    with pytest.raises((InvalidArgument, InvalidType), match="tag"):
        LocalWorker(bad)
