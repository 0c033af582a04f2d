"""W31, W40a, W10, W44, W51, W52: workers that are killed, stopped and lost, and what becomes of their calls."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import pickle
import random
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from headgate import HeadgateError, NoWorkersAvailable, TaskPool, WorkerLost, WorkerPool
from headgate.testing import capture_events, no_leaks
from tests.support.workers import jobs
from tests.support.workers.support import (
    Shared,
    alive,
    all_ready,
    in_flight,
    lines,
    parent_of,
    pids,
    run,
    states,
    times,
    until,
)

pytestmark = pytest.mark.integration

LOST_WITHIN = 10.0 + 2.0  # what the specification allows, and a loaded machine


@pytest.fixture(scope="module")
def shared() -> Iterator[Shared]:
    """Two workers of this module's own: here they are killed."""
    shared = Shared(spawn=2, lazy=False)
    shared.open()
    yield shared
    shared.close()


@pytest.fixture(autouse=True)
def leaves_nothing_behind() -> Iterator[None]:
    """Workers are killed and replaced in a pool that outlives the test, and with them go and come connections.

    When the last connection goes, so does gRPC's thread.
    """
    with no_leaks(files=False, threads=False):
        yield


async def rested(shared: Shared) -> WorkerPool:
    """The pool, with two workers again that both take calls, and without the calls that were abandoned before."""
    ready = set(await all_ready(shared.pool, 2))
    while {await jobs.pid(), await jobs.pid()} != ready:
        pass  # a worker is ready before this loop has a session with it
    await until(lambda: in_flight(shared.pool) == 0)
    return shared.pool


async def noted(path: str, start: str) -> int:
    """Wait till a routine has noted this and its pid; the pid."""
    line = await until(lambda: next((line for line in lines(path) if line.startswith(f"{start} ")), None))
    return int(line.split()[1])


def kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


# -- one death --------------------------------------------------------------------------------------------------------


def test_w40a_a_lost_worker_is_named_with_its_task(shared: Shared, log: str) -> None:
    async def main() -> None:
        pool = await rested(shared)
        call = asyncio.create_task(jobs.begun_at(log, 1, 60))
        pid = await noted(log, "1")
        uid = next(view.uid for view in pool.workers() if view.pid == pid)
        with capture_events("workers") as events:
            kill(pid)
            with pytest.raises(WorkerLost) as caught:
                async with asyncio.timeout(5):
                    await call
            await until(lambda: "worker_lost" in events.names)
        error = caught.value
        assert isinstance(error, HeadgateError)
        assert "begun_at" in str(error)
        assert str(uid) in str(error) or str(pid) in str(error)
        assert str(uid) in str(error.worker) or str(pid) in str(error.worker)
        assert error.task
        assert "retries" in str(error)
        again = pickle.loads(pickle.dumps(error))
        assert (type(again), str(again)) == (WorkerLost, str(error))
        assert (str(again.task), str(again.worker)) == (str(error.task), str(error.worker))
        lost = next(event for event in events if event.name == "worker_lost")
        assert str(uid) in str(lost.to_dict())
        await all_ready(pool, 2)
        assert lines(log) == [f"1 {pid}"], "it did not run again"

    shared(main)


def test_w40a_the_dead_do_not_take_others_with_them(shared: Shared, log: str) -> None:
    """All calls on the one worker are lost, those on the other are not."""

    async def main() -> None:
        pool = await rested(shared)
        calls = {n: asyncio.create_task(jobs.begun_at(log, n, 1.0)) for n in range(10)}
        await until(lambda: len(lines(log)) == 10)
        victim = pids(pool)[0]
        there = {n for n in calls if await noted(log, str(n)) == victim}
        assert len(there) == 5
        kill(victim)
        for n, call in calls.items():
            if n in there:
                with pytest.raises(WorkerLost):
                    await call
            else:
                assert await call == n
        assert max(times(log).values()) == 1
        assert in_flight(pool) == 0

    shared(main)


@pytest.mark.parametrize("how", ["exit 0", pytest.param("exit 1", marks=pytest.mark.soak), "crash"])
def test_w40a_a_worker_may_die_of_its_routine(shared: Shared, how: str) -> None:
    async def main() -> None:
        pool = await rested(shared)
        before = set(pids(pool))
        with pytest.raises(WorkerLost):
            await (jobs.crashes() if how == "crash" else jobs.leaves_without_a_word(int(how[-1])))
        await until(lambda: set(pids(pool)) != before)
        assert len(before - set(await all_ready(pool, 2))) == 1
        assert await jobs.add(1, 2) == 3

    shared(main)


def test_w10_retries_run_it_again_elsewhere(shared: Shared, log: str) -> None:
    async def main() -> None:
        pool = await rested(shared)
        call = asyncio.create_task(jobs.begun_at_with_retries(log, 1, 0.5))
        first = await noted(log, "1")
        kill(first)
        assert await call == 1
        assert len(lines(log)) == 2
        assert lines(log)[1] != lines(log)[0]
        await all_ready(pool, 2)

    shared(main)


def test_w10_retries_have_an_end(shared: Shared, log: str, tmp_path: Path) -> None:
    async def main() -> None:
        pool = await rested(shared)
        with pytest.raises(WorkerLost):
            await jobs.dies(log)
        assert lines(log) == ["ran"]
        await all_ready(pool, 2)
        with pytest.raises(WorkerLost):
            await jobs.dies_with_retries(str(tmp_path / "again"))
        assert lines(tmp_path / "again") == ["ran"] * 3
        assert await jobs.dies_twice(str(tmp_path / "twice")) == "alive"
        assert lines(tmp_path / "twice") == ["ran"] * 3
        await all_ready(pool, 2)

    shared(main)


def test_w10_an_exception_is_not_tried_again(shared: Shared, log: str) -> None:
    async def main() -> None:
        await rested(shared)
        with pytest.raises(LookupError, match="not the worker's fault"):
            await jobs.fails_with_retries(log)
        await jobs.pid()
        assert lines(log) == ["ran"]

    shared(main)


@pytest.mark.parametrize("fails", [jobs.fails_until_named, jobs.fails_until_judged], ids=["class", "function"])
def test_l10_a_routine_says_which_errors_are_tried_again(shared: Shared, log: str, fails: Any) -> None:
    async def main() -> None:
        await rested(shared)
        assert await fails(log, 3, 40, 2) == 42, "each attempt has the arguments of the call"
        assert len(lines(log)) == 4
        with pytest.raises(ConnectionError, match="away"):
            await fails(f"{log}-again", 4)
        assert len(lines(f"{log}-again")) == 4

    shared(main)


def test_l10_a_lost_worker_is_one_of_the_errors_that_are_named_or_not(shared: Shared, log: str) -> None:
    async def main() -> None:
        pool = await rested(shared)
        assert await jobs.fails_and_dies(log) == "alive"
        assert len(lines(log)) == 4
        await all_ready(pool, 2)
        with pytest.raises(WorkerLost):
            await jobs.dies_though_it_may_fail(f"{log}-once")
        assert lines(f"{log}-once") == ["ran"], "retry_on names what may run twice, and it does not name a lost worker"
        await all_ready(pool, 2)

    shared(main)


def test_l10_a_routine_pauses_before_it_runs_elsewhere(shared: Shared, log: str) -> None:
    async def main() -> None:
        pool = await rested(shared)
        with pytest.raises(WorkerLost):
            await jobs.dies_with_pauses(log)
        first, second, third = map(float, lines(log))
        assert second - first >= 0.1
        assert third - second >= 0.2
        await all_ready(pool, 2)

    shared(main)


def test_l11_runs_after_a_loss_count_for_the_budget_of_the_task_that_calls(shared: Shared, log: str) -> None:
    async def main() -> None:
        pool = await rested(shared)
        left = 10

        async def fails_ten_times() -> None:
            nonlocal left
            left -= 1
            if left >= 0:
                raise LookupError

        async with TaskPool(retry_budget=0) as tasks:
            await tasks.run(fails_ten_times, retries=10)
            with pytest.raises(WorkerLost) as caught:
                await tasks.run(lambda: jobs.dies_each_time(log))
        assert lines(log) == ["ran"]
        assert any("the retry budget is spent" in note for note in caught.value.__notes__)
        await all_ready(pool, 2)

    shared(main)


def test_w10_a_cancelled_call_is_not_tried_again(shared: Shared, log: str) -> None:
    async def main() -> None:
        pool = await rested(shared)
        call = asyncio.create_task(jobs.begun_at_with_retries(log, 1, 60))
        pid = await noted(log, "1")
        call.cancel()
        kill(pid)
        with pytest.raises((asyncio.CancelledError, WorkerLost)):
            await call
        await all_ready(pool, 2)
        for _ in range(4):
            await jobs.pid()
        assert len(lines(log)) == 1

    shared(main)


# -- many deaths under load -------------------------------------------------------------------------------------------


class Storm:
    """Callers that never stop, on workers that are killed."""

    def __init__(self, pool: WorkerPool, routine: Callable[..., Any], log: str) -> None:
        self.pool = pool
        self.routine = routine
        self.log = log
        self.outcomes: dict[int, Any] = {}
        self.kills = 0
        self._numbers = itertools.count()
        self._stop = asyncio.Event()
        self._chance = random.Random(3)

    async def rage(self, seconds: float, callers: int = 16) -> None:
        """About every second one is killed, now and then two at nearly the same moment."""
        self._stop.clear()
        async with asyncio.TaskGroup() as group:
            for _ in range(callers):
                group.create_task(self._call())
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                await asyncio.sleep(self._chance.choice([0.05, 0.7, 1.0]))
                if found := pids(self.pool):
                    kill(self._chance.choice(found))
                    self.kills += 1
            self._stop.set()

    async def _call(self) -> None:
        while not self._stop.is_set():
            number = next(self._numbers)
            assert number not in self.outcomes
            try:
                self.outcomes[number] = await self.routine(self.log, number)
            except WorkerLost as error:
                self.outcomes[number] = error
            await asyncio.sleep(0.005)  # so that a storm leaves others some of the processor


@contextlib.asynccontextmanager
async def stormy(shared: Shared, routine: Callable[..., Any], log: str) -> AsyncIterator[Storm]:
    pool = await rested(shared)
    storm = Storm(pool, routine, log)
    yield storm
    assert sorted(storm.outcomes) == list(range(len(storm.outcomes)))
    assert storm.kills >= 2
    assert len(storm.outcomes) > 100
    await all_ready(pool, 2)
    assert in_flight(pool) == 0
    assert await asyncio.gather(*(jobs.add(n, 1) for n in range(20))) == list(range(1, 21))


def test_w10_with_retries_no_result_is_lost_or_confused(shared: Shared, log: str, scale: float) -> None:
    async def main() -> None:
        async with stormy(shared, jobs.again, log) as storm:
            await storm.rage(30 * scale if scale > 0.1 else 1.2)
            assert [n for n, outcome in storm.outcomes.items() if outcome != n] == []
            ran = times(log)
            assert all(ran[str(n)] >= 1 for n in storm.outcomes)
            assert set(ran) == set(map(str, storm.outcomes))

    shared(main, patience=60 + 60 * scale)


def test_w40a_without_retries_what_is_lost_says_so_and_nothing_runs_twice(
    shared: Shared, log: str, scale: float
) -> None:
    async def main() -> None:
        async with stormy(shared, jobs.once, log) as storm:
            await storm.rage(30 * scale if scale > 0.1 else 1.2)
            for _ in range(20):  # the first worker that dies may have no call just then
                if any(isinstance(outcome, WorkerLost) for outcome in storm.outcomes.values()):
                    break
                await storm.rage(1.0)
            ran = times(log)
            for n, outcome in storm.outcomes.items():
                if isinstance(outcome, WorkerLost):
                    assert ran[str(n)] <= 1, f"{n} was lost and ran {ran[str(n)]} times"
                else:
                    assert (outcome, ran[str(n)]) == (n, 1)
            assert any(isinstance(outcome, WorkerLost) for outcome in storm.outcomes.values())

    shared(main, patience=60 + 60 * scale)


def test_w40a_workers_killed_while_they_start_lose_no_call(shared: Shared, log: str, scale: float) -> None:
    """A call that no worker has seen goes to the next one: only those that were sent may be lost."""
    chance = random.Random(9)

    async def main() -> None:
        pool = await rested(shared)
        stop = asyncio.Event()

        async def kill_on() -> None:
            end = time.monotonic() + max(1.5, 10 * scale)
            while time.monotonic() < end:
                for view in pool.workers():
                    if view.state == "ready" and chance.random() < 0.5:
                        kill(view.pid)
                await asyncio.sleep(chance.uniform(0, 0.4))
            stop.set()

        killer = asyncio.create_task(kill_on())
        number = 0
        while not stop.is_set():
            number += 1
            with contextlib.suppress(WorkerLost):
                assert await jobs.once(log, number, 0) == number
        await killer
        assert max(times(log).values()) == 1
        await all_ready(pool, 2)

    shared(main, patience=60)


# -- silence ----------------------------------------------------------------------------------------------------------


async def keeps_its_caller_for_five_seconds(path: str) -> None:
    """W06, asked here because it takes as long to answer: a routine that does not end when it is cancelled."""
    task = asyncio.create_task(jobs.slow_to_end(path, 7))
    await until(lambda: lines(path) == ["begun"])
    asked = time.monotonic()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert time.monotonic() - asked > 4
    assert lines(path) == ["begun"], "it has not ended"


def test_w51_a_stopped_worker_is_lost_within_ten_seconds_and_its_late_result_discarded(
    shared: Shared, log: str
) -> None:
    async def main() -> None:
        pool = await rested(shared)
        beside = asyncio.create_task(keeps_its_caller_for_five_seconds(log + ".beside"))
        await until(lambda: lines(log + ".beside"))
        [victim, other] = [view.pid for view in sorted(pool.workers(), key=lambda view: view.in_flight)]
        lost = [asyncio.create_task(jobs.begun_at(log, n, 1.0)) for n in range(2)]
        retried = [asyncio.create_task(jobs.begun_at_with_retries(log, n, 1.0)) for n in range(10, 12)]
        await until(lambda: len(lines(log)) == 4)
        there = {line.split()[0] for line in lines(log) if line.endswith(f" {victim}")}
        assert len(there) == 2, "one of each kind"
        os.kill(victim, signal.SIGSTOP)
        try:
            stopped = time.monotonic()
            outcomes = await asyncio.gather(*lost, return_exceptions=True)
            assert time.monotonic() - stopped < LOST_WITHIN
            assert [isinstance(one, WorkerLost) for one in outcomes] == [str(n) in there for n in range(2)]
            # The second attempt takes its second elsewhere, while the first comes back to life beside it.
            with contextlib.suppress(ProcessLookupError):
                os.kill(victim, signal.SIGCONT)
            assert await asyncio.gather(*retried) == [10, 11]
            await until(lambda: victim not in states(pool))
            ready = await all_ready(pool, 2)
            assert other in ready
            assert await asyncio.gather(*(jobs.add(n, 0) for n in range(200))) == list(range(200))
            counted = {n: sum(line.startswith(f"{n} ") for line in lines(log)) for n in (0, 1, 10, 11)}
            assert counted == {n: 2 if n >= 10 and str(n) in there else 1 for n in counted}
            await until(lambda: not alive(victim))
            await beside
        finally:
            if alive(victim):
                kill(victim)

    shared(main, patience=60)


def test_w51_an_idle_worker_that_was_stopped_for_a_moment_is_not_lost(shared: Shared) -> None:
    """A laptop that slept for a second: nothing of it is seen."""

    async def main() -> None:
        pool = await rested(shared)
        before = pids(pool)
        os.kill(before[0], signal.SIGSTOP)
        try:
            calls = [asyncio.create_task(jobs.pid()) for _ in range(4)]
            await asyncio.sleep(0.7)
        finally:
            os.kill(before[0], signal.SIGCONT)
        assert set(await asyncio.gather(*calls)) <= set(before)
        assert pids(pool) == before

    shared(main)


# -- the keeper -------------------------------------------------------------------------------------------------------


@pytest.mark.cold  # who starts one warm adopts for a moment what has lost its parent
def test_w33_without_its_keeper_a_pool_fails_and_does_not_hang(log: str) -> None:
    async def main() -> None:
        begun = time.monotonic()
        with contextlib.suppress(HeadgateError):  # leaving may tell it too
            async with WorkerPool(spawn=2, quorum_timeout=5) as pool:
                workers = pids(pool)
                # Each is forked by a process in between, which may not have ended when the worker is ready.
                await until(lambda: {parent_of(parent_of(pid)) for pid in workers} == {os.getpid()})
                keeper = parent_of(workers[0])
                assert {parent_of(pid) for pid in workers} == {keeper}
                call = asyncio.create_task(jobs.begun_at(log, 1, 60))
                await noted(log, "1")
                kill(keeper)
                with pytest.raises(HeadgateError):
                    await call
                for pid in workers:
                    await until(lambda pid=pid: not alive(pid), 2)
                with contextlib.suppress(HeadgateError):  # a keeper of its own would be fine as well
                    assert await jobs.add(1, 2) == 3
        assert time.monotonic() - begun < 30

    run(main, patience=60)


# -- going with notice ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.soak)])
def test_w31_a_worker_told_to_stop_drains_and_refuses_what_is_new(
    shared: Shared, log: str, number: signal.Signals
) -> None:
    async def main() -> None:
        pool = await rested(shared)
        calls = [asyncio.create_task(jobs.begun_at(log, n, 0.6)) for n in range(4)]
        await until(lambda: len(lines(log)) == 4)
        victim, other = pids(pool)
        os.kill(victim, number)
        fresh = []
        while not all(call.done() for call in calls):
            fresh.append(await jobs.once(log, 100 + len(fresh)))
        assert await asyncio.gather(*calls) == [0, 1, 2, 3], "what had begun was brought to its end"
        assert fresh == list(range(100, 100 + len(fresh)))
        assert max(times(log).values()) == 1
        await until(lambda: not alive(victim))
        assert other in await all_ready(pool, 2)

    shared(main)


def test_w31_a_second_interrupt_cancels(shared: Shared, log: str) -> None:
    async def main() -> None:
        pool = await rested(shared)
        call = asyncio.create_task(jobs.endless(log))
        await until(lambda: lines(log) == ["begun"])
        [pid] = [view.pid for view in pool.workers() if view.in_flight]
        os.kill(pid, signal.SIGINT)
        await until(lambda: pid not in pids(pool))
        assert not call.done()
        os.kill(pid, signal.SIGINT)
        with pytest.raises((HeadgateError, asyncio.CancelledError)):
            await call
        await until(lambda: not alive(pid))
        assert lines(log) == ["begun", "ended"]
        await all_ready(pool, 2)

    shared(main)


# -- nothing foreign escapes ------------------------------------------------------------------------------------------


def test_w44_every_failure_has_a_code_and_a_remedy(shared: Shared, log: str) -> None:
    async def main() -> None:
        pool = await rested(shared)
        calls = [asyncio.create_task(jobs.begun_at(log, n, 60)) for n in range(6)]
        await until(lambda: len(lines(log)) == 6)
        for pid in pids(pool):
            kill(pid)
        more = [asyncio.create_task(jobs.begun_at(log, n, 0)) for n in range(6, 12)]
        outcomes = await asyncio.gather(*calls, *more, return_exceptions=True)
        failures = [one for one in outcomes if isinstance(one, BaseException)]
        assert len(failures) >= 6
        for error in failures:
            assert isinstance(error, (WorkerLost, NoWorkersAvailable)), repr(error)
            assert error.code in str(error)
            assert error.remedy in str(error)

    shared(main)


def test_w52_calls_open_no_further_connection(shared: Shared) -> None:
    def open_files() -> int:
        return len(os.listdir("/proc/self/fd"))

    async def main() -> None:
        pool = await rested(shared)
        for _ in range(10):
            await jobs.pid()
        before = open_files()
        calls = [asyncio.create_task(jobs.slow(3600)) for _ in range(300)]
        await until(lambda: in_flight(pool) == 300)
        assert open_files() == before
        for one in calls:
            one.cancel()
        await asyncio.wait(calls)
        assert open_files() == before

    shared(main)
