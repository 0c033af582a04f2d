"""W03 and W42's pickles, W06's cancellation, W43's exceptions: what goes to a worker and what comes back."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import datetime
import decimal
import enum
import functools
import gc
import io
import os
import pickle
import random
import socket
import statistics
import sys
import threading
import time
import types
import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import headgate
from headgate import HeadgateError, InvalidArgument, RemoteError, WorkerPool, routine
from headgate.testing import capture_events
from headgate.workers.protocol.messages import CONFIRMATION
from tests.support.workers import jobs
from tests.support.workers.support import Shared, in_flight, lines, pids, run, states, until

pytestmark = pytest.mark.integration


class Colour(enum.Enum):
    RED = 1


@dataclasses.dataclass(frozen=True)
class Point:
    x: int
    y: list[int]


async def begun(path: str, count: int = 1) -> None:
    await until(lambda: lines(path).count("begun") >= count)


# -- what travels -----------------------------------------------------------------------------------------------------


VALUES: list[Any] = [
    None,
    True,
    0,
    -(10**50),
    1.5,
    float("inf"),
    "",
    "ü\0\ud800",
    b"",
    b"x" * 100_000,
    bytearray(b"abc"),
    (),
    (1, (2, [3, {4: {5}}])),
    frozenset({1, 2}),
    {"a": None, 1: "b", (1, 2): 3},
    range(3),
    slice(1, 2),
    Ellipsis,
    NotImplemented,
    int,
    len,
    Colour.RED,
    Point(1, [2]),
    decimal.Decimal("1.10"),
    datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC),
    Path("/some/where"),
]


def test_w03_values_of_all_kinds_come_back_as_they_went(shared: Shared) -> None:
    async def main() -> None:
        for value, back in zip(VALUES, await asyncio.gather(*map(jobs.echo, VALUES)), strict=True):
            assert (type(back), back) == (type(value), value)

    shared(main)


def test_w03_what_only_cloudpickle_carries(shared: Shared) -> None:
    class Local:
        def __init__(self, x: int) -> None:
            self.x = x

        def __eq__(self, other: object) -> bool:
            return isinstance(other, Local) and other.x == self.x

        __hash__ = None  # type: ignore[assignment]

    bonus = 10

    async def main() -> None:
        assert await jobs.call(lambda x: x + bonus, 1) == 11
        assert (await jobs.echo(lambda x: x * 2))(4) == 8
        assert await jobs.call(functools.partial(lambda x, y: x - y, 5), 3) == 2
        back = await jobs.echo(Local(3))
        assert (type(back).__name__, back.x) == ("Local", 3)
        assert (await jobs.echo(Local))(4).x == 4

    shared(main)


def test_w03_a_recursive_value(shared: Shared) -> None:
    async def main() -> None:
        loop: list[Any] = [1]
        loop.append(loop)
        back = await jobs.echo(loop)
        assert back[1] is back
        twice = [[]]
        same, other = await jobs.echo((twice, twice))
        assert same is other

    shared(main)


def test_w03_parameters_of_every_kind(shared: Shared) -> None:
    async def main() -> None:
        assert await jobs.parameters(1, c=3) == (1, 2, (), 3, 4, {})
        assert await jobs.parameters(1, 5, 6, 7, c=3, d=8, e=9) == (1, 5, (6, 7), 3, 8, {"e": 9})
        assert await jobs.parameters(a=1, b=5, c=3, timeout=1, retries=2, self=3) == (
            1,
            5,
            (),
            3,
            4,
            {"timeout": 1, "retries": 2, "self": 3},
        )

    shared(main)


def test_w03_wrong_parameters_are_a_type_error_as_locally(shared: Shared) -> None:
    async def main() -> None:
        with pytest.raises(TypeError, match="c"):
            await jobs.parameters(1)
        with pytest.raises(TypeError, match="y"):
            await jobs.add(1)
        with pytest.raises(TypeError):
            await jobs.add(1, 2, 3)
        assert await jobs.add(1, 2) == 3

    shared(main)


def test_w06_arguments_are_copies(shared: Shared) -> None:
    async def main() -> None:
        values = ["mine"]
        assert await jobs.append_to(values) == ["mine", "worker"]
        assert values == ["mine"]
        back = await jobs.echo(values)
        assert back == values
        assert back is not values

    shared(main)


# -- what cannot travel -----------------------------------------------------------------------------------------------


class RefusesToBePickled:
    def __reduce__(self) -> Any:
        raise LookupError("not me")


def too_deep() -> list[Any]:
    value: list[Any] = []
    for _ in range(100_000):
        value = [value]
    return value


@pytest.mark.parametrize("kind", ["lock", "file", "socket", "generator", "refusing", "deep", "coroutine"])
def test_w42_an_argument_that_cannot_be_pickled_touches_no_worker(shared: Shared, kind: str) -> None:
    async def unawaited() -> None: ...

    def made() -> Any:
        kinds: dict[str, Any] = {
            "lock": threading.Lock,
            "file": lambda: open(os.devnull, "w"),  # noqa: SIM115 - closed below
            "socket": socket.socket,
            "generator": lambda: (x for x in "a"),
            "refusing": RefusesToBePickled,
            "deep": too_deep,
            "coroutine": unawaited,
        }
        return kinds[kind]()

    async def main() -> None:
        bad = made()
        before = states(shared.pool)
        try:
            with capture_events("workers") as events:
                with pytest.raises(HeadgateError, match=r"argument 1 |'value'|argument value ") as caught:
                    await jobs.echo(bad)
                with pytest.raises(HeadgateError, match="value"):
                    await jobs.echo(value=bad)
            assert caught.value.remedy in str(caught.value)
            assert "task_dispatched" not in events.names
        finally:
            if kind in ("file", "socket", "coroutine"):
                bad.close()
        assert in_flight(shared.pool) == 0
        assert states(shared.pool) == before
        assert await jobs.add(1, 2) == 3

    shared(main)


def test_w42_bad_arguments_beside_good_ones_harm_nobody(shared: Shared) -> None:
    async def main() -> None:
        calls = [jobs.echo(threading.Lock() if n % 3 == 0 else n) for n in range(60)]
        for n, back in enumerate(await asyncio.gather(*calls, return_exceptions=True)):
            assert isinstance(back, HeadgateError) if n % 3 == 0 else back == n

    shared(main)


def test_w03_a_closure_that_cannot_be_pickled_is_the_callers_error(shared: Shared) -> None:
    lock = threading.Lock()

    @routine
    async def locked() -> bool:
        return lock.locked()

    async def main() -> None:
        with pytest.raises(HeadgateError, match="locked"):
            await locked()
        assert await jobs.add(1, 2) == 3

    shared(main)


def test_w40b_an_argument_that_cannot_be_loaded_is_that_tasks_outcome(shared: Shared) -> None:
    async def main() -> None:
        before = states(shared.pool)
        for _ in range(4):
            beside = asyncio.create_task(jobs.slow(0.05, "fine"))
            with pytest.raises(Exception, match="it breaks there"):
                await jobs.echo(jobs.LoadsOnlyHere(os.getpid()))
            assert await beside == "fine"
        assert states(shared.pool) == before
        assert in_flight(shared.pool) == 0

    shared(main)


def test_w40b_a_missing_module_is_named_with_the_remedy(shared: Shared, monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("headgate_only_here")
    exec("class Thing:\n    pass\nasync def work():\n    return 1\n", module.__dict__)
    monkeypatch.setitem(sys.modules, "headgate_only_here", module)
    work = routine(module.__dict__["work"])

    async def main() -> None:
        before = states(shared.pool)
        with pytest.raises(HeadgateError, match="headgate_only_here") as caught:
            await jobs.echo(module.__dict__["Thing"]())
        assert caught.value.remedy in str(caught.value)
        try:  # it may travel by value; if not, it cannot be found there
            assert await work() == 1
        except HeadgateError as error:
            assert "headgate_only_here" in str(error)  # noqa: PT017 - either way is fine
        assert states(shared.pool) == before
        assert await jobs.add(1, 2) == 3
        assert await jobs.echo(1) == 1, "other calls of the function do not need that module"

    shared(main)


def test_w40b_w93_a_class_that_workers_cannot_load_is_in_the_way_of_no_later_call(
    shared: Shared, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = types.ModuleType("headgate_base_only_here")
    exec("class Base:\n    pass\n", module.__dict__)
    monkeypatch.setitem(sys.modules, "headgate_base_only_here", module)

    class Local(module.__dict__["Base"]):  # type: ignore[misc] # it is sent by value, and its base by name
        pass

    async def main() -> None:
        for _ in range(2):
            with pytest.raises(HeadgateError, match="headgate_base_only_here"):
                await jobs.echo(Local())
            assert await jobs.echo(1) == 1

    shared(main)


def test_w40b_a_result_that_cannot_be_pickled_is_that_tasks_outcome(shared: Shared) -> None:
    async def main() -> None:
        before = states(shared.pool)
        with pytest.raises(HeadgateError, match="returns_a_lock") as caught:
            await jobs.returns_a_lock()
        assert caught.value.remedy in str(caught.value)
        assert states(shared.pool) == before
        assert await jobs.add(1, 2) == 3

    shared(main)


def test_w40b_a_result_that_cannot_be_loaded_is_that_calls_outcome(shared: Shared) -> None:
    async def main() -> None:
        before = states(shared.pool)
        beside = asyncio.create_task(jobs.slow(0.1, "fine"))
        with pytest.raises(Exception, match="it breaks here"):
            await jobs.call(jobs.LoadsOnlyThere, os.getpid())
        assert await beside == "fine"
        assert in_flight(shared.pool) == 0
        assert states(shared.pool) == before
        assert await jobs.add(1, 2) == 3

    shared(main)


def test_w30_arguments_are_not_loaded_by_the_servers_thread(shared: Shared) -> None:
    async def main() -> None:
        assert await jobs.loaded_by_my_thread(jobs.ThreadProbe())

    shared(main)


# -- exceptions -------------------------------------------------------------------------------------------------------


EXCEPTIONS: list[Callable[[], Exception]] = [
    lambda: ValueError("plain"),
    lambda: KeyError("key"),
    lambda: OSError(2, "No such file", "name"),
    lambda: UnicodeDecodeError("utf-8", b"abc", 0, 1, "why"),
    lambda: jobs.KeywordOnly(field="f", count=3),
    lambda: jobs.SeveralArguments(4, "because", {"x": 1}),
    lambda: InvalidArgument("theirs", remedy="Do this."),
    lambda: ExceptionGroup("both", [ValueError("one"), jobs.KeywordOnly(field="two")]),
    lambda: StopAsyncIteration("stop"),
    lambda: AssertionError(),
]


@pytest.mark.parametrize("make", EXCEPTIONS, ids=lambda make: type(make()).__name__ if callable(make) else None)
@pytest.mark.parametrize("fails", [jobs.fails, jobs.fails_in_a_thread], ids=["async", "plain"])
def test_w43_an_exception_arrives_as_its_own_type_with_its_fields(shared: Shared, make: Any, fails: Any) -> None:
    async def main() -> None:
        error = make()
        with pytest.raises(type(error)) as caught:
            await fails(make)
        arrived = caught.value
        assert type(arrived) is type(error)
        assert (arrived.args, str(arrived)) == (error.args, str(error)) or isinstance(error, ExceptionGroup)
        mine = {key: value for key, value in vars(error).items() if not key.startswith("__")}
        assert mine.items() <= vars(arrived).items()
        if isinstance(error, ExceptionGroup) and isinstance(arrived, ExceptionGroup):
            assert [type(one) for one in arrived.exceptions] == [ValueError, jobs.KeywordOnly]
            assert arrived.exceptions[1].field == "two"

    shared(main)


def test_w43_the_remote_traceback_is_the_last_note(shared: Shared) -> None:
    async def main() -> None:
        with pytest.raises(ValueError, match="plain") as caught:
            await jobs.fails(ValueError, "plain")
        note = caught.value.__notes__[-1]
        assert "Traceback" in note
        assert "in innermost" in note
        assert "jobs.py" in note
        with pytest.raises(ValueError, match="noted") as caught:
            await jobs.fails_noted()
        assert caught.value.__notes__[0] == "mine"
        assert len(caught.value.__notes__) == 2
        assert "fails_noted" in caught.value.__notes__[-1]

    shared(main)


def test_w43_cause_and_context_survive(shared: Shared) -> None:
    async def main() -> None:
        with pytest.raises(jobs.SeveralArguments, match="7: on top") as caught:
            await jobs.fails_from_a_cause()
        assert type(caught.value.__cause__) is KeyError
        assert caught.value.__cause__.args == ("deep",)
        assert caught.value.detail == {"a": 1}
        with pytest.raises(ValueError, match="while handling") as caught_too:
            await jobs.fails_in_a_context()
        assert caught_too.value.__cause__ is None
        assert type(caught_too.value.__context__) is KeyError

    shared(main)


def test_w43_an_exception_group_of_a_task_group(shared: Shared) -> None:
    async def main() -> None:
        found = []
        try:
            await jobs.fails_in_a_group()
        except* ValueError as group:
            found.extend(group.exceptions)
        except* jobs.KeywordOnly as group:
            found.extend(group.exceptions)
        assert [type(error) for error in found] == [ValueError, jobs.KeywordOnly]

    shared(main)


def test_w43_a_class_that_only_the_worker_had(shared: Shared) -> None:
    async def main() -> None:
        with pytest.raises(Exception, match="made here") as caught:
            await jobs.fails_with_a_local_class()
        assert type(caught.value).__name__ == "Local" or (
            isinstance(caught.value, RemoteError) and "Local" in str(caught.value)
        )

    shared(main)


def test_w43_an_exception_that_cannot_travel_arrives_as_remote_error(shared: Shared) -> None:
    async def main() -> None:
        before = states(shared.pool)
        for make in (jobs.HoldsALock, jobs.BreaksOnLoad):
            with pytest.raises(RemoteError, match=make.__name__) as caught:
                await jobs.fails(make)
            said = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", ())])
            assert "Traceback" in said
            assert "in innermost" in said
            assert caught.value.remedy in str(caught.value)
        assert states(shared.pool) == before
        assert await jobs.add(1, 2) == 3

    shared(main)


def test_w43_an_exception_with_a_broken_repr_is_an_outcome_too(shared: Shared) -> None:
    async def main() -> None:
        with pytest.raises((jobs.BreaksItsRepr, RemoteError)):
            await jobs.fails(jobs.BreaksItsRepr)
        assert await jobs.add(1, 2) == 3

    shared(main)


@pytest.mark.parametrize(("given", "code"), [(None, 0), (0, 0), (3, 3), (-1, -1), (True, 1), ("text", 1), ((1, 2), 1)])
def test_w43_sys_exit_on_a_worker_is_an_error_of_that_call(shared: Shared, log: str, given: Any, code: int) -> None:
    async def main() -> None:
        with pytest.raises(headgate.RoutineExited, match="notes_and_exits") as caught:
            await jobs.notes_and_exits(log, given)
        error = caught.value
        assert isinstance(error, headgate.HeadgateError)
        assert error.exit_code == code
        assert isinstance(error.__cause__, SystemExit)
        assert error.__cause__.code == given
        assert error.__notes__[-1].startswith("Remote traceback")
        assert not getattr(error.__cause__, "__notes__", ())
        assert pickle.loads(pickle.dumps(error)).exit_code == code
        assert lines(log) == ["ran"], "an exception is an answer: retries= is for lost workers"

    shared(main)


def test_w43_what_exits_in_a_library_is_named(shared: Shared) -> None:
    async def main() -> None:
        with pytest.raises(headgate.RoutineExited, match=r"sys\.exit\(2\)") as caught:
            await jobs.parses("--unknown")
        assert "argparse" in caught.value.__notes__[-1]

    shared(main)


def test_w43_a_call_that_exits_ends_nothing_else(shared: Shared) -> None:
    async def main() -> None:
        alone = [asyncio.create_task(end()) for end in (jobs.exits, jobs.exits_in_a_thread, jobs.interrupts)]
        beside = [asyncio.create_task(jobs.slow(0.1, n)) for n in range(4)]
        await asyncio.wait([*alone, *beside])  # nobody awaits those that exit
        assert [type(task.exception()) for task in alone] == [headgate.RoutineExited] * 3
        assert [task.result() for task in beside] == [0, 1, 2, 3]
        assert await jobs.calls_exits(True) == 7
        with pytest.raises(headgate.RoutineExited) as caught:
            await jobs.calls_exits(False)
        assert caught.value.exit_code == 7
        mapped = [one async for one in headgate.map(jobs.exits, [4, 5], return_exceptions=True)]
        assert [one.exit_code for one in mapped] == [4, 5]
        with pytest.raises(headgate.RoutineExited, match="exits"):
            await shared.pool.broadcast(jobs.exits)
        with headgate.do_dispatch(False), pytest.raises(SystemExit):
            await jobs.exits()  # here it is what it is

    shared(main)


def test_w43_what_cannot_be_raised_in_a_coroutine_is_a_runtime_error_as_locally(shared: Shared) -> None:
    async def main() -> None:
        for fails in (jobs.fails, jobs.fails_in_a_thread):
            with pytest.raises((RuntimeError, RemoteError)):
                await fails(StopIteration, "stop")
        assert await jobs.add(1, 2) == 3

    shared(main)


def test_w43_endless_recursion_is_an_outcome_too(shared: Shared) -> None:
    async def main() -> None:
        before = states(shared.pool)
        with pytest.raises(RecursionError):
            await jobs.too_deep()
        assert states(shared.pool) == before

    shared(main)


def test_w43_a_cancellation_of_the_routines_own_does_not_cancel_the_caller(shared: Shared) -> None:
    async def main() -> None:
        me = asyncio.current_task()
        assert me is not None
        with pytest.raises(asyncio.CancelledError):
            await jobs.fails(asyncio.CancelledError, "mine")
        assert me.cancelling() == 0
        assert await jobs.add(1, 2) == 3

    shared(main)


def test_w43_many_callers_get_their_own_exceptions(shared: Shared) -> None:
    async def main() -> None:
        calls = [jobs.fails(jobs.KeywordOnly, field="f", count=n) for n in range(50)]
        arrived = await asyncio.gather(*calls, return_exceptions=True)
        assert [getattr(error, "count", None) for error in arrived] == list(range(50))

    shared(main)


def test_w43_an_arrived_exception_can_travel_on(shared: Shared) -> None:
    async def main() -> None:
        with pytest.raises(jobs.SeveralArguments) as caught:
            await jobs.apply(jobs.fails, jobs.SeveralArguments, 4, "nested", {})
        assert caught.value.reason == "nested"
        assert "in innermost" in "\n".join(caught.value.__notes__)

    shared(main)


def test_w43_events_carry_type_and_traceback(shared: Shared) -> None:
    async def main() -> None:
        with capture_events("workers") as events:
            await jobs.add(1, 2)
            with pytest.raises(jobs.SeveralArguments):
                await jobs.fails(jobs.SeveralArguments, 4, "because", {})
            await until(lambda: events.names.count("task_finished") == 2)
        fine, failed = (event for event in events if event.name == "task_finished")
        assert getattr(fine, "exception") is None  # noqa: B009 - events have no common field of this name
        exception: Any = getattr(failed, "exception")  # noqa: B009
        assert "SeveralArguments" in str(exception.type)
        assert "in innermost" in "".join(exception.traceback)
        assert events.names.count("task_dispatched") == 2
        for event in events:
            assert pickle.loads(pickle.dumps(event)) == event
            assert event.to_dict()["name"] == event.name

    shared(main)


# -- cancellation -----------------------------------------------------------------------------------------------------


def test_w06_the_callers_cancellation_arrives_after_the_routine_has_ended(shared: Shared, tmp_path: Path) -> None:
    async def main() -> None:
        for number in range(10):
            path = str(tmp_path / str(number))
            task = asyncio.create_task(jobs.slow_to_end(path, 0.02))
            await begun(path)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert lines(path) == ["begun", "ended"]
            assert task.cancelled()
        assert in_flight(shared.pool) == 0

    shared(main)


def test_w06_a_swallowed_cancellation_delivers_the_result(shared: Shared, log: str) -> None:
    async def main() -> None:
        task = asyncio.create_task(jobs.swallows(log))
        await begun(log)
        task.cancel()
        assert isinstance(await task, float)
        assert not task.cancelled()

    shared(main)


def test_w06_a_cancellation_turned_into_an_error_delivers_the_error(shared: Shared, log: str) -> None:
    async def main() -> None:
        task = asyncio.create_task(jobs.turns_it_into_an_error(log))
        await begun(log)
        task.cancel()
        with pytest.raises(ValueError, match="instead"):
            await task

    shared(main)


@pytest.mark.parametrize(("computing", "within"), [(False, 0.05), (True, 0.2)], ids=["idle", "beside a computing one"])
def test_w06_a_cancellation_reaches_the_worker_soon(tmp_path: Path, computing: bool, within: float) -> None:
    """The median of several, because one of them may meet another process on its core."""

    async def main() -> None:
        async with WorkerPool(spawn=1):
            beside = asyncio.create_task(jobs.computes_in_a_thread(str(tmp_path / "beside"), 20 if computing else 0))
            await begun(str(tmp_path / "beside"))
            took = []
            for number in range(7):
                path = str(tmp_path / str(number))
                task = asyncio.create_task(jobs.swallows(path))
                await begun(path)
                asked = time.monotonic()
                task.cancel()
                took.append(await task - asked)
            assert beside.done() is not computing
            (tmp_path / "beside.stop").touch()
            await beside
            assert statistics.median(took) < within, took

    run(main)


def test_w06_a_task_cancelled_before_its_first_step_calls_nothing(shared: Shared, log: str) -> None:
    async def main() -> None:
        task = asyncio.create_task(jobs.noted_pid(log, 1))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        for _ in range(4):
            await jobs.pid()
        assert lines(log) == []

    shared(main)


def test_w06_a_call_cancelled_while_another_holds_the_loop_is_confirmed_after_it(shared: Shared, log: str) -> None:
    """Call and cancellation wait on the worker together, and are met in one turn of its loop."""

    async def main() -> None:
        holders = [asyncio.create_task(jobs.holds_the_loop(log, 0.4)) for _ in range(2)]
        await until(lambda: len(lines(log)) == 2)
        tasks = [asyncio.create_task(jobs.guarded(log, number, 60)) for number in range(4)]
        await asyncio.sleep(0.1)
        for task in tasks:
            task.cancel()
        asked = time.monotonic()
        await asyncio.wait(tasks)
        assert time.monotonic() - asked < CONFIRMATION
        assert all(task.cancelled() for task in tasks)
        said = Counter(line.split()[0] for line in lines(log)[2:])
        assert said["begun"] == said["ended"]
        await asyncio.gather(*holders)
        assert in_flight(shared.pool) == 0

    shared(main)


def test_w06_a_call_cancelled_before_it_began_is_confirmed_too(shared: Shared, scale: float) -> None:
    """The cancellation overtakes the call, or travels with it: nobody is to wait out the five seconds."""

    async def main() -> None:
        await jobs.pid()
        for number in range(max(20, int(200 * scale))):
            tasks = [asyncio.create_task(jobs.slow(0.01)) for _ in range(1 + number % 4)]
            for _ in range(1 + number % 3):
                await asyncio.sleep(0)
            asked = time.monotonic()
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            assert time.monotonic() - asked < CONFIRMATION, f"round {number}"
        assert in_flight(shared.pool) == 0

    shared(main)


def test_w06_cancelled_at_any_moment_every_routine_that_began_has_ended(shared: Shared, log: str, scale: float) -> None:
    chance = random.Random(11)
    count = max(150, int(2000 * scale))

    async def one(number: int) -> int | None:
        task = asyncio.create_task(jobs.guarded(log, number, chance.uniform(0, 0.02)))
        await asyncio.sleep(chance.choice([0, 0, chance.uniform(0, 0.03)]))
        task.cancel()
        try:
            return await task
        except asyncio.CancelledError:
            return None

    async def main() -> None:
        outcomes: list[int | None] = []
        for first in range(0, count, 50):
            numbers = range(first, min(first + 50, count))
            got = await asyncio.gather(*map(one, numbers))
            assert all(back in (None, number) for number, back in zip(numbers, got, strict=True))
            outcomes += got
            said = Counter(lines(log))
            for number in numbers:
                assert said[f"begun {number}"] == said[f"ended {number}"] <= 1
                assert got[number - first] is None or said[f"ended {number}"] == 1
        assert None in outcomes
        assert in_flight(shared.pool) == 0
        assert len(pids(shared.pool)) == 2

    shared(main)


def test_w06_a_failing_sibling_cancels_the_others_on_their_workers(shared: Shared, tmp_path: Path) -> None:
    async def main() -> None:
        paths = [str(tmp_path / str(number)) for number in range(4)]

        async def work() -> None:
            async with asyncio.TaskGroup() as group:
                for path in paths:
                    group.create_task(jobs.endless(path))
                for path in paths:
                    await begun(path)
                group.create_task(jobs.fails(LookupError, "the first"))

        with pytest.raises(ExceptionGroup) as caught:
            await work()
        assert caught.group_contains(LookupError)
        assert [lines(path) for path in paths] == [["begun", "ended"]] * 4

    shared(main)


def test_w06_a_function_in_a_thread_ends_before_its_callers_cancellation(shared: Shared, log: str) -> None:
    async def main() -> None:
        task = asyncio.create_task(jobs.sleeps_in_a_thread(log, 0.3))
        await begun(log)
        task.cancel()
        try:
            assert await task == "done"  # a thread cannot be cancelled: as good as swallowed
        except asyncio.CancelledError:
            pass
        await until(lambda: lines(log) == ["begun", "ended"])
        assert await jobs.add(1, 2) == 3

    shared(main)


def test_w06_a_second_cancellation_does_not_run_away(shared: Shared, log: str) -> None:
    async def main() -> None:
        task = asyncio.create_task(jobs.slow_to_end(log, 0.3))
        await begun(log)
        task.cancel()
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: in_flight(shared.pool) == 0)
        assert await jobs.add(1, 2) == 3

    shared(main)


def test_w06_a_cancelled_call_keeps_nothing_of_its_caller(shared: Shared) -> None:
    class Held:
        pass

    async def caller() -> weakref.ref[Held]:
        held = Held()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.05):
                await jobs.sleep_and_pid(30)
        return weakref.ref(held)

    async def main() -> None:
        await jobs.pid()
        gc.disable()  # it would free what is in a cycle
        try:
            held = await caller()
            await until(lambda: held() is None, 2.0)
        finally:
            gc.enable()

    shared(main)


def test_w03_buffers_and_files_of_bytes(shared: Shared) -> None:
    async def main() -> None:
        stream = io.BytesIO(b"abc")
        stream.seek(1)
        back = await jobs.echo(stream)
        assert (back.getvalue(), back.tell()) == (b"abc", 1)
        blocks = [bytes([n]) * 60_000 for n in range(20)]
        assert await asyncio.gather(*map(jobs.echo, blocks)) == blocks

    shared(main)
