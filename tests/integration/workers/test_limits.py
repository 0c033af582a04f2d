"""W34: timeouts hold whatever the worker does, and a worker that routines keep from its work is replaced."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest

from headgate import (
    InvalidArgument,
    InvalidType,
    LeastLoadedLoadBalancer,
    RoutineTimeout,
    WorkerLost,
    WorkerPool,
)
from headgate.testing import capture_events
from headgate.workers.client import dispatcher
from headgate.workers.server.task_loop import THREADS
from tests.integration.workers import limit_jobs as limits
from tests.support.workers import jobs
from tests.support.workers.support import alive, in_flight, lines, pids, run, states, until

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("told_soon")]


class Favourite:
    """Asks the same worker first, always; or one for each routine."""

    def __init__(self, *, by_tag: bool = False) -> None:
        self._by_tag = by_tag
        self._tags: dict[str, int] = {}

    def order(self, task: Any, workers: Sequence[Any]) -> Iterable[Any]:
        place = self._tags.setdefault(task.tag, len(self._tags)) if self._by_tag else 0
        found = sorted(workers, key=lambda worker: worker.pid)
        return [*found[place:], *found[:place]]

    def report(self, worker: Any, report: Any) -> None:
        pass


async def outcomes(calls: Iterable[Any]) -> list[Any]:
    return await asyncio.gather(*calls, return_exceptions=True)


async def first_item(stream: Any, after: int) -> Any:
    for number in range(after):
        assert await anext(stream) == number
    return await anext(stream)


# -- timeouts ---------------------------------------------------------------------------------------------------------


def test_w34_timeouts_hold_whatever_the_worker_does(log: str) -> None:
    """All at once, each on a worker of its own: they end within their timeout and 5 s, or would after a minute."""
    long = dispatcher.CONFIRMATION + 1.5

    async def main() -> None:
        stop = f"{log}.stop"
        async with WorkerPool(spawn=7, loadbalancer=Favourite(by_tag=True), max_overdue=None) as pool:
            # More than its places: one with a timeout stands in line for longer than that and 5 s, and is not ended.
            crowd = [asyncio.create_task(limits.stays_within_time(log, long)) for _ in range(THREADS)]
            await until(lambda: len(lines(log)) == THREADS)
            [busy] = [view.uid for view in pool.workers() if view.in_flight]
            routine = limits.short.__headgate_routine__  # type: ignore[attr-defined]
            in_line = asyncio.create_task(pool.__dispatcher__().call(routine, (), {}, None, "", to=busy))
            calls = {
                "loop": limits.holds_the_loop(),
                "child": limits.holds_the_loop_in_a_child(),
                "gil": limits.holds_the_gil(),
                "import": limits.takes(limits.HangsWhenRead()),
                "thread": limits.stays(f"{log}.thread", stop),
                "step": first_item(limits.items(2), 2),
            }
            async with asyncio.timeout(15):
                found = dict(zip(calls, await outcomes(calls.values()), strict=True))
            assert {name: type(error) for name, error in found.items()} == dict.fromkeys(found, RoutineTimeout)
            for error in found.values():
                assert f"timeout of {limits.TIMEOUT:g} s" in error.message
                assert "may be running still" in error.message
            assert states(pool).keys() == {view.pid for view in pool.workers() if alive(view.pid)}
            assert in_flight(pool) >= len(calls), "they count as load: nobody waits for them, and they run"
            assert await in_line in {view.pid for view in pool.workers()}, "it only waited for its turn"
            await asyncio.gather(*crowd)
            jobs.note(stop, "stop")

    run(main, patience=40)


def test_w34_a_routine_that_ends_late_without_an_await_raises_routine_timeout() -> None:
    async def main() -> None:
        async with WorkerPool(spawn=1):
            with pytest.raises(RoutineTimeout, match="without an await"):
                await limits.holds_the_loop_for(0.6)
            assert await limits.holds_the_loop_for(0.01) == "done"

    run(main)


# -- thread places ----------------------------------------------------------------------------------------------------


def test_w34_calls_that_need_a_thread_avoid_a_worker_whose_places_are_held(log: str) -> None:
    async def main() -> None:
        stop = f"{log}.stop"
        async with WorkerPool(spawn=2, loadbalancer=Favourite(), max_overdue=None) as pool:
            held, other = sorted(pids(pool))
            assert await limits.plain_pid() == held
            with capture_events("workers.lifecycle") as events:
                calls = [asyncio.create_task(limits.stays(log, stop)) for _ in range(THREADS + 4)]
                await until(lambda: lines(log).count(f"begun {other}") == 4)
                assert lines(log).count(f"begun {held}") == THREADS, "those that stood in line went to the other"
                assert states(pool) == {held: "blocked", other: "ready"}
                assert {await limits.plain_pid() for _ in range(4)} == {other}
                assert await jobs.pid() == held, "its loop is free"
                assert {type(error) for error in await outcomes(calls)} == {RoutineTimeout}
                load = {view.pid: view.in_flight for view in pool.workers()}
                assert load == {held: THREADS, other: 4}, "nobody waits for them any more, and they run"
                assert {await limits.plain_pid() for _ in range(4)} == {other}
                jobs.note(stop, "stop")
                await until(lambda: in_flight(pool) == 0)
                await until(lambda: states(pool) == {held: "ready", other: "ready"})
                assert await limits.plain_pid() == held
        assert [event.to_dict()["threads"] for event in events if event.name == "worker_blocked"] == [True]
        assert "worker_unblocked" in events.names
        assert "worker_lost" not in events.names

    run(main, patience=40)


def test_w34_the_load_of_a_worker_counts_calls_that_nobody_waits_for(log: str) -> None:
    async def main() -> None:
        stop = f"{log}.stop"
        async with WorkerPool(spawn=2, loadbalancer=LeastLoadedLoadBalancer()) as pool:
            cancelled = asyncio.create_task(limits.stays_within_time(log, 20))
            await until(lambda: lines(log) == ["begun"])
            cancelled.cancel()
            timed = asyncio.create_task(limits.stays(f"{log}.timed", stop))
            await outcomes([cancelled, timed])
            assert [view.in_flight for view in pool.workers()] == [1, 1]
            jobs.note(stop, "stop")
            await until(lambda: in_flight(pool) == 1)
            [free] = [view.pid for view in pool.workers() if not view.in_flight]
            assert {await limits.plain_pid() for _ in range(6)} == {free}

    run(main, patience=40)


def test_w34_with_every_place_held_a_call_waits_for_one_within_its_timeout(log: str) -> None:
    async def main() -> None:
        stop = f"{log}.stop"
        async with WorkerPool(spawn=1, max_overdue=None) as pool:
            calls = [asyncio.create_task(limits.stays(log, stop)) for _ in range(THREADS)]
            await until(lambda: list(states(pool).values()) == ["blocked"])
            waits = asyncio.create_task(limits.plain_pid())
            everywhere = asyncio.create_task(pool.broadcast(limits.plain_pid))
            with pytest.raises(RoutineTimeout, match="thread places are held") as caught:
                await limits.short()
            assert "could begin" in caught.value.message
            assert not waits.done()
            jobs.note(stop, "stop")
            assert await waits in states(pool)
            assert list((await everywhere).values()) == [await waits]
            await outcomes(calls)

    run(main, patience=40)


# -- replacement ------------------------------------------------------------------------------------------------------


def test_w34_a_worker_whose_places_are_held_past_their_timeout_is_drained_and_replaced(
    log: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        stop = f"{log}.stop"
        async with WorkerPool(spawn=1, max_overdue=0.5) as pool:
            [old] = pids(pool)
            live = asyncio.create_task(jobs.slow(3.0, "done"))
            with capture_events("workers.lifecycle") as events:
                calls = [asyncio.create_task(limits.stays(log, stop)) for _ in range(THREADS)]
                await until(lambda: "worker_replaced" in events.names)
                await until(lambda: pids(pool) not in ([], [old]))
                assert alive(old), "it finishes what somebody waits for"
                assert await limits.plain_pid() in pids(pool)
                assert await live == "done"
                assert {type(error) for error in await outcomes(calls)} == {RoutineTimeout}
                await until(lambda: not alive(old))
                await until(lambda: "worker_stopped" in events.names)
            assert "worker_lost" not in events.names
            assert f"all its {THREADS} thread places are held by calls that are 0.5 s or more past" in caplog.text

    run(main)


@pytest.mark.parametrize(
    ("holds", "says"),
    [
        pytest.param(limits.holds_the_loop, "limit_jobs.holds_the_loop", id="loop"),
        pytest.param(
            limits.holds_the_loop_in_a_child, "something a routine started", id="child", marks=pytest.mark.soak
        ),
        pytest.param(limits.holds_the_gil, "0.5 s or more past its timeout", id="gil"),
    ],
)
def test_w34_a_worker_that_is_held_past_a_timeout_is_killed_and_replaced(
    holds: Any, says: str, caplog: pytest.LogCaptureFixture, log: str
) -> None:
    async def main() -> None:
        async with WorkerPool(spawn=1, max_overdue=0.5) as pool:
            [old] = pids(pool)
            swallower = asyncio.create_task(limits.swallows(log))
            await until(lambda: lines(log) == ["begun"])
            await asyncio.sleep(limits.TIMEOUT * 2)
            with pytest.raises(RoutineTimeout):
                await holds()
            with pytest.raises(RoutineTimeout):
                await swallower
            await until(lambda: pids(pool) not in ([], [old]))
            assert not alive(old)
            assert "it was ended, to be replaced" in caplog.text
            assert says in caplog.text
            assert "another takes its place" in caplog.text

    run(main)


def test_w34_what_else_runs_on_a_worker_that_is_killed_is_worker_lost(log: str) -> None:
    async def main() -> None:
        async with WorkerPool(spawn=1, max_overdue=0.5):
            neighbour = asyncio.create_task(jobs.once(log, 1, 30))
            await until(lambda: len(lines(log)) == 1)
            with pytest.raises(RoutineTimeout):
                await limits.holds_the_loop()
            with pytest.raises(WorkerLost, match=r"it was ended, to be replaced: .*holds_the_loop.* past its timeout"):
                await neighbour

    run(main)


@pytest.mark.parametrize("held", ["loop", pytest.param("gil", marks=pytest.mark.soak)])
def test_w34_a_routine_without_a_timeout_computes_for_as_long_as_it_likes(log: str, held: str) -> None:
    """Beside it is one past its timeout, which does not hold anything."""

    async def main() -> None:
        async with WorkerPool(spawn=1, max_overdue=0.3) as pool:
            [pid] = pids(pool)
            late = asyncio.create_task(limits.stays(f"{log}.late", f"{log}.stop"))
            await until(lambda: len(lines(f"{log}.late")) == 1)
            holds = jobs.holds_the_loop if held == "loop" else jobs.holds_the_gil
            assert await holds(log, 3.5) == pid
            assert await jobs.pid() == pid
            jobs.note(f"{log}.stop", "stop")
            assert {type(error) for error in await outcomes([late])} == {RoutineTimeout}

    run(main)


@pytest.mark.parametrize("held", [pytest.param("loop", marks=pytest.mark.soak), "gil"])
def test_w34_max_blocked_limits_that_too(log: str, held: str, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with WorkerPool(spawn=1, max_blocked=1.5) as pool:
            [old] = pids(pool)
            holds = jobs.holds_the_loop if held == "loop" else jobs.holds_the_gil
            assert await holds(log, 0.3) == old
            with pytest.raises(WorkerLost, match=r"max_blocked is 1\.5"):
                await holds(log, 60)
            await until(lambda: pids(pool) not in ([], [old]))
            assert "max_blocked is 1.5" in caplog.text
            assert await jobs.pid() != old

    run(main)


def test_w34_a_worker_held_by_a_call_of_another_worker_is_replaced(log: str) -> None:
    """The client itself has no call there."""

    async def main() -> None:
        async with WorkerPool(spawn=2, max_overdue=0.5) as pool:
            before = pids(pool)
            with pytest.raises(RoutineTimeout):
                await limits.calls_what_holds_the_gil(log)
            held = int(lines(log)[0].split()[1])
            assert held in before
            await until(lambda: not alive(held))
            await until(lambda: len(pids(pool)) == 2)

    run(main)


@pytest.mark.parametrize("name", ["max_blocked", "max_overdue"])
def test_w34_limits_are_seconds_above_zero_or_none(name: str) -> None:
    WorkerPool(spawn=1, **{name: None})
    WorkerPool(spawn=1, **{name: 0.5})
    for value in (0, -1, float("nan"), float("inf")):
        with pytest.raises(InvalidArgument, match=name):
            WorkerPool(spawn=1, **{name: value})
    for wrong in ("1", True):
        with pytest.raises(InvalidType, match=name):
            WorkerPool(spawn=1, **{name: wrong})


# -- what routines leave on a worker's loop ---------------------------------------------------------------------------


def test_w91_what_routines_left_on_the_loop_is_ended_when_the_worker_stops(log: str, capfd: Any) -> None:
    async def main() -> None:
        async with WorkerPool(spawn=2):
            await jobs.leaves(4)  # and connections between the workers
            await limits.leaves_things(log, "exits", "fails", "task", "generator")
            await limits.leaves_things(log, "task", "generator")

    run(main)
    assert sorted(lines(log)) == ["generator", "generator", "task", "task"]
    said = capfd.readouterr().err
    assert "in its finally" in said
    assert "unhandled exception in a task that a routine left" in said
    assert "SystemExit(3)" in said
    assert "was destroyed" not in said
    assert "never retrieved" not in said


def test_w91_what_does_not_end_keeps_no_worker(log: str, capfd: Any) -> None:
    async def main() -> None:
        async with WorkerPool(spawn=1) as pool:
            [pid] = pids(pool)
            await limits.leaves_things(log, "stays", "thread", "task", "generator")
        assert not alive(pid)

    run(main)
    assert sorted(lines(log)) == ["generator", "task"]
    assert "did not end when they were cancelled" in capfd.readouterr().err


def test_w91_a_worker_stopped_by_a_signal_or_by_hand_ends_them_too(log: str) -> None:
    async def main() -> None:
        async with WorkerPool(spawn=2) as pool:
            before = pids(pool)
            await limits.leaves_things(log, "task")
            await limits.leaves_things(log, "task")
            os.kill(before[0], signal.SIGTERM)
            await until(lambda: lines(log) == ["task"])
            await pool.resize(1)
            await until(lambda: lines(log) == ["task", "task"] or before[1] in pids(pool))

    run(main)
    assert lines(log) == ["task", "task"]


# -- short of descriptors ---------------------------------------------------------------------------------------------

SIZES = [300_000, 2_000_000, 20_000_000]
"""Read at once, in a thread, and piece by piece."""


def lent(pid: int) -> int:
    """Memory that a process lends and has not let go of."""
    found = 0
    for name in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):  # closed since it was listed
            found += "headgate-loan" in os.readlink(f"/proc/{pid}/fd/{name}")
    return found


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="memory is lent on Linux only")
@pytest.mark.parametrize("free", [0, pytest.param(1, marks=pytest.mark.soak)])
def test_w42_a_client_short_of_descriptors_gets_the_results_of_calls_that_have_run(log: str, free: int) -> None:
    async def main() -> None:
        async with WorkerPool(spawn=1) as pool:
            [pid] = pids(pool)
            assert await limits.noted_bytes(log, SIZES[0]) == bytes(SIZES[0])
            stream = limits.long_items(1, *SIZES)
            await anext(stream)
            with limits.few_descriptors(free):
                found = await asyncio.gather(*(limits.noted_bytes(log, size) for size in SIZES))
                assert [len(item) async for item in stream] == SIZES
            assert found == [bytes(size) for size in SIZES]
            assert lines(log) == ["ran"] * 4, "once each"
            await until(lambda: lent(pid) == 0)
            assert await limits.noted_bytes(log, SIZES[1]) == bytes(SIZES[1])
            assert lent(os.getpid()) == 0

    run(main)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="memory is lent on Linux only")
@pytest.mark.parametrize("free", [0, pytest.param(1, marks=pytest.mark.soak)])
def test_w42_a_worker_short_of_descriptors_gets_what_is_sent_to_it(log: str, free: int) -> None:
    async def main() -> None:
        async with WorkerPool(spawn=1) as pool:
            [pid] = pids(pool)
            assert await limits.length(bytes(SIZES[0])) == SIZES[0]
            stream = limits.lengths(free)
            assert await anext(stream) == 0
            for size in SIZES:
                assert await stream.asend(bytes(size)) == size
            for size in SIZES:
                assert await limits.length(bytes(size)) == size
            await stream.aclose()
            await until(lambda: (lent(pid), lent(os.getpid())) == (0, 0))

    run(main)


def lends(pid: int) -> bool:
    """`lent` for a process that cannot open even the list: a link is read without a descriptor."""
    for number in range(256):
        with contextlib.suppress(OSError):
            if "headgate-loan" in os.readlink(f"/proc/{pid}/fd/{number}"):
                return True
    return False


async def each_turn(condition: Callable[[], bool]) -> None:
    """Look whenever this loop has turned. A long result takes many turns, because it is sent as the client takes it."""
    while not condition():  # noqa: ASYNC110 - the other process sets no event
        await asyncio.sleep(0)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="memory is lent on Linux only")
def test_w42_a_result_that_is_sent_again_is_lost_with_its_worker() -> None:
    async def main() -> None:
        async with WorkerPool(spawn=1) as pool:
            [pid] = pids(pool)
            assert await limits.length(bytes(SIZES[0])) == SIZES[0]
            with limits.few_descriptors(0):
                assert await limits.noted_bytes(os.devnull, SIZES[2]) == bytes(SIZES[2])
                call = asyncio.create_task(limits.noted_bytes(os.devnull, SIZES[2]))
                await each_turn(lambda: lends(pid))
                await each_turn(lambda: not lends(pid))  # the worker has taken it back, and begins to send it
                os.kill(pid, signal.SIGKILL)
                assert [type(one) for one in await outcomes([call])] == [WorkerLost]

    run(main)
