"""W05 and what goes with it: async generators that run on workers, and are to be told from local ones by nothing."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import gc
import inspect
import itertools
import os
import pickle
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import headgate
from headgate import (
    HeadgateError,
    InvalidArgument,
    InvalidType,
    NoActivePool,
    PoolClosed,
    RemoteError,
    RoutineTimeout,
    WorkerLost,
    WorkerPool,
    routine,
)
from headgate.testing import capture_events
from headgate.workers.client import connection as connection_module
from headgate.workers.client import dispatcher as dispatcher_module
from tests.conftest import SCALE
from tests.integration.workers import stream_jobs
from tests.support.workers import jobs
from tests.support.workers.support import (
    PATIENCE,
    Shared,
    alive,
    all_ready,
    environment,
    in_flight,
    lines,
    pids,
    read_line,
    run,
    script,
    states,
    until,
    wait_until,
)

pytestmark = pytest.mark.integration

MB = 1 << 20
Stream = AsyncGenerator[Any, Any]


async def eventually(condition: Callable[[], Coroutine[Any, Any, Any]], seconds: float = 10.0) -> None:
    """`until`, for a condition that has to ask."""
    end = time.monotonic() + seconds
    while not await condition():
        assert time.monotonic() < end, f"waited {seconds} s for it"
        await asyncio.sleep(0.01)


async def census(pool: WorkerPool) -> dict[int, tuple[int, int]]:
    """Of each worker: how many generators are open on it, and how many tasks it has."""
    found: dict[int, tuple[int, int]] = {}
    tries = 0
    while set(found) != set(pids(pool)):
        # One on which something is open is asked only when the others have as much to do: more and more at once, then.
        at_once = max(1, (tries := tries + 1) - 10)
        for pid, opened, tasks in await asyncio.gather(*(stream_jobs.census() for _ in range(at_once))):
            found[pid] = opened, tasks
    return found


async def none_is_open(pool: WorkerPool) -> None:
    """Wait till no worker has an open generator, and the pool knows of none."""

    async def closed() -> bool:
        return all(opened <= _left_by_others.get(pid, 0) for pid, (opened, _) in (await census(pool)).items())

    await eventually(closed)
    await until(lambda: in_flight(pool) <= _left_by_others.get(0, 0))


_left_by_others: dict[int, int] = {}
"""What was open on which worker before the test: one that fails and leaves something is not to fail all that follow."""


@pytest.fixture(autouse=True)
def what_others_left(request: pytest.FixtureRequest) -> Iterator[None]:
    if "shared" in request.fixturenames:
        shared: Shared = request.getfixturevalue("shared")

        async def look() -> None:
            _left_by_others.update((pid, opened) for pid, (opened, _) in (await census(shared.pool)).items())
            _left_by_others[0] = in_flight(shared.pool)

        shared(look)
    yield
    _left_by_others.clear()


async def first(stream: Stream) -> Any:
    """A coroutine, of which a task can be made and cancelled before it has begun."""
    return await anext(stream)


async def taken(stream: Stream, count: int) -> list[Any]:
    return [await anext(stream) for _ in range(count)]


async def read_into(got: list[Any], stream: Stream) -> None:
    async for value in stream:
        got.append(value)


def produced(path: str, name: str) -> int:
    """How far a generator that notes its steps has gone."""
    return sum(line.startswith(f"{name} ") and line.split()[1].isdigit() for line in lines(path))


async def settled(path: str, name: str, least: int) -> int:
    """How far it has gone, once it has gone so far and stands still."""
    await until(lambda: produced(path, name) >= least)
    before = -1
    while before != (now := produced(path, name)):
        before = now
        await asyncio.sleep(0.1)
    return now


async def in_thread(function: Callable[..., Any], *args: Any) -> None:
    """In one that is gone afterwards, other than those of a loop."""
    thread = threading.Thread(target=function, args=args)
    thread.start()
    await until(lambda: not thread.is_alive(), PATIENCE)
    thread.join()


def resident(pid: int) -> int:
    """Bytes of memory that it uses now."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


# -- what it looks like -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [None, {}, {"timeout": 1}, {"prefetch": 0}, {"prefetch": 5, "timeout": 0.5}])
def test_w05_a_generator_looks_like_its_function(options: dict[str, Any] | None) -> None:
    async def numbers(x: int, *, more: str = "a") -> AsyncGenerator[str, int]:
        """Say it."""
        yield more * x

    made: Any = routine(numbers) if options is None else routine(**options)(numbers)
    assert inspect.isasyncgenfunction(made)
    assert not inspect.iscoroutinefunction(made)
    assert inspect.isasyncgenfunction(made.__wrapped__)
    assert made.__wrapped__ is numbers
    assert (made.__name__, made.__qualname__, made.__doc__) == (numbers.__name__, numbers.__qualname__, "Say it.")
    assert made.__module__ == __name__
    assert inspect.signature(made) == inspect.signature(numbers)
    assert made.__annotations__ == numbers.__annotations__
    assert inspect.isasyncgen(made(1)), "and nothing is asked of a pool"


def test_w05_methods_look_like_methods() -> None:
    shelf = stream_jobs.Shelf("a")
    for made in (shelf.read, shelf.read_ahead, stream_jobs.Shelf.class_above, stream_jobs.Shelf.static_above):
        assert inspect.isasyncgenfunction(made)
    assert stream_jobs.Shelf.read.__doc__ == "One after the other."


def test_w05_a_generator_routine_is_pickled_by_name() -> None:
    assert pickle.loads(pickle.dumps(stream_jobs.count)) is stream_jobs.count


# -- options ----------------------------------------------------------------------------------------------------------


async def _numbers() -> AsyncGenerator[int, None]:
    yield 1


def _plain_numbers() -> Any:
    yield 1


@pytest.mark.parametrize("bad", [-1, -64, 1.5, "1", None, [], float("nan")])
def test_w10_a_bad_prefetch_is_refused_at_decoration(bad: Any) -> None:
    with pytest.raises((InvalidArgument, InvalidType), match="prefetch") as caught:
        routine(prefetch=bad)(_numbers)
    assert repr(bad) in str(caught.value) or type(bad).__name__ in str(caught.value)
    assert caught.value.remedy in str(caught.value)


@pytest.mark.parametrize("fn", [jobs.add.__wrapped__, jobs.plain.__wrapped__], ids=["async", "plain"])
@pytest.mark.parametrize("count", [1, 64])
def test_w10_prefetch_is_for_generators_only(fn: Any, count: int) -> None:
    with pytest.raises(InvalidArgument, match="prefetch") as caught:
        routine(prefetch=count)(fn)
    assert caught.value.remedy in str(caught.value)


@pytest.mark.parametrize("options", [{"retries": 1}, {"thread": True}, {"retries": 2, "prefetch": 3}])
@pytest.mark.parametrize("wrap", [lambda fn: fn, classmethod, staticmethod], ids=["function", "class", "static"])
def test_w10_what_a_generator_cannot_have_is_refused_at_decoration(options: dict[str, Any], wrap: Any) -> None:
    with pytest.raises(InvalidArgument, match="retries" if "retries" in options else "thread") as caught:
        routine(**options)(wrap(_numbers))
    assert caught.value.remedy in str(caught.value)


@pytest.mark.parametrize("bad", [-1, 0, float("nan"), "1"])
def test_w08_a_bad_timeout_of_a_generator_is_refused(bad: Any) -> None:
    with pytest.raises((InvalidArgument, InvalidType), match="timeout"):
        routine(timeout=bad)(_numbers)


@pytest.mark.parametrize("options", [None, {"prefetch": 3}, {"timeout": 1}])
@pytest.mark.parametrize("bad", [_plain_numbers, lambda: (yield 1)], ids=["def", "lambda"])
def test_w05_a_plain_generator_is_refused_at_decoration(options: dict[str, Any] | None, bad: Any) -> None:
    decorate: Any = routine if options is None else routine(**options)
    with pytest.raises((InvalidType, InvalidArgument)) as caught:
        decorate(bad)
    if options != {"prefetch": 3}:  # then either of the two faults may be named
        assert isinstance(caught.value, InvalidType)
        assert "async" in str(caught.value)
    for wrap in (classmethod, staticmethod):
        with pytest.raises(InvalidType, match="async"):
            routine(wrap(bad))


def test_w05_a_generator_object_is_refused_at_decoration() -> None:
    for bad in (_numbers(), _plain_numbers()):
        with pytest.raises(InvalidType):
            routine(bad)


def test_w05_a_generator_is_decorated_once() -> None:
    with pytest.raises(InvalidType):
        routine(stream_jobs.count)


# -- the first step ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["anext", "async for", "asend"])
def test_w01_dispatch_is_at_the_first_step(shared: Shared, log: str, way: str) -> None:
    async def main() -> None:
        with capture_events("workers") as events:
            stream = stream_jobs.noted(log, "it")
            await asyncio.sleep(0.05)
            assert (lines(log), events.names) == ([], [])
            if way == "anext":
                assert await anext(stream) == 0
            elif way == "asend":
                assert await stream.asend(None) == 0
            else:
                async for value in stream:
                    assert value == 0
                    break
            assert lines(log) == ["it 0"]
            assert events.names.count("task_dispatched") == 1
            await stream.aclose()

    shared(main)


def test_w07_without_a_pool_the_first_step_says_so() -> None:
    async def main() -> None:
        stream = stream_jobs.count(3)
        with pytest.raises(NoActivePool, match="count") as caught:
            await anext(stream)
        assert "async with headgate.WorkerPool():" in str(caught.value)
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
        with pytest.raises(NoActivePool):
            async for _ in stream_jobs.count_ahead(3):
                pass

    run(main)


def test_w05_what_is_closed_or_dropped_before_its_first_step_is_never_begun(shared: Shared, log: str) -> None:
    async def main() -> None:
        with capture_events("workers.tasks") as events:
            stream = stream_jobs.noted(log, "closed")
            await stream.aclose()
            with pytest.raises(StopAsyncIteration):
                await anext(stream)
            stream = stream_jobs.noted(log, "thrown")
            with pytest.raises(LookupError, match="mine"):
                await stream.athrow(LookupError("mine"))
            with pytest.raises(StopAsyncIteration):
                await anext(stream)
            stream = stream_jobs.noted(log, "sent")
            with pytest.raises(TypeError, match="just-started"):
                await stream.asend(1)
            del stream
            stream_jobs.noted_ahead_3(log, "dropped")
            gc.collect()
            await asyncio.sleep(0.02)
            assert events.names == []
        assert lines(log) == []

    shared(main)


def test_w07_closing_before_the_first_step_needs_no_pool() -> None:
    async def main() -> None:
        await stream_jobs.count(3).aclose()
        with pytest.raises(TypeError):
            await stream_jobs.count(3).asend(3)

    run(main)


def test_w05_wrong_parameters_are_a_type_error(shared: Shared) -> None:
    async def main() -> None:
        assert [value async for value in stream_jobs.parameters(1, 5, 6, c=3, d=4)] == [1, 5, (6,), 3, {"d": 4}]
        assert [value async for value in stream_jobs.parameters(c=3, a=1)] == [1, 2, (), 3, {}]
        with pytest.raises(TypeError, match="c"):
            await anext(stream_jobs.parameters(1))
        with pytest.raises(TypeError):
            await anext(stream_jobs.count(1, 2))

    shared(main)


def test_w05_only_the_first_step_looks_for_a_pool(shared: Shared) -> None:
    """Later ones may come from a task that knows no pool, or from the block of another pool."""

    async def main() -> None:
        outside = contextvars.Context()
        stream = stream_jobs.here(4)
        with pytest.raises(NoActivePool):
            await asyncio.create_task(first(stream_jobs.here(4)), context=outside)
        pid = await anext(stream)
        assert pid in pids(shared.pool)
        assert await asyncio.create_task(first(stream), context=outside) == pid
        async with WorkerPool(spawn=1) as inner:
            assert await anext(stream) == pid
            mine = stream_jobs.here(2)
            assert [await anext(mine)] == pids(inner)
            await mine.aclose()
        assert await asyncio.create_task(first(stream), context=outside) == pid
        with pytest.raises(StopAsyncIteration):
            await anext(stream)

    shared(main)


def test_w04_the_gate_is_looked_at_when_the_first_step_is_made(shared: Shared) -> None:
    me = os.getpid()

    async def main() -> None:
        with headgate.do_dispatch(False):
            made_inside = stream_jobs.here(3)
            assert [pid async for pid in stream_jobs.here(2)] == [me] * 2
            assert [said async for said in stream_jobs.is_outside(2)] == [(True, me)] * 2
        made_outside = stream_jobs.here(3)
        assert await anext(made_inside) in pids(shared.pool)
        with headgate.do_dispatch(False):
            assert await anext(made_outside) == me
            assert await anext(made_inside) in pids(shared.pool)
        assert await anext(made_outside) == me
        assert await anext(made_inside) in pids(shared.pool)
        with pytest.raises(StopAsyncIteration):
            await anext(made_inside)
        await made_outside.aclose()

    shared(main)


def test_w04_a_closed_gate_needs_no_pool(log: str) -> None:
    async def main() -> None:
        with headgate.do_dispatch(False):
            assert [x async for x in stream_jobs.fib(5)] == [0, 1, 1, 2, 3]
            assert [x async for x in stream_jobs.count_ahead(5)] == [0, 1, 2, 3, 4]
            stream = stream_jobs.noted(log, "it")
            assert await taken(stream, 2) == [0, 1]
            await stream.aclose()
            assert lines(log) == ["it 0", "it 1", "it finally"]
            stream = stream_jobs.gives_back()
            await anext(stream)
            values: list[int] = []
            assert await stream.asend(values) is values
            await stream.aclose()

    run(main)


# -- steps ------------------------------------------------------------------------------------------------------------


def test_w02_the_generator_fib(shared: Shared) -> None:
    async def main() -> None:
        assert [x async for x in stream_jobs.fib(10)] == [0, 1, 1, 2, 3, 5, 8, 13, 21, 34]
        assert [x async for x in stream_jobs.fib(0)] == []

    shared(main)


def test_w05_all_steps_of_one_are_on_one_worker_and_several_are_spread(shared: Shared) -> None:
    async def main() -> None:
        found = set()
        streams = [stream_jobs.here(5) for _ in range(6)]
        for stream in streams:
            found.add(await anext(stream))
        for stream in streams:
            assert len({pid async for pid in stream}) == 1
        assert found == set(pids(shared.pool))

    shared(main)


def test_w05_the_worker_pauses_between_the_steps(shared: Shared, log: str) -> None:
    async def main() -> None:
        stream = stream_jobs.noted(log, "it")
        for number in range(4):
            assert await anext(stream) == number
            await asyncio.sleep(0.05)
            assert produced(log, "it") == number + 1
        await stream.aclose()
        assert lines(log)[-1] == "it finally"
        assert produced(log, "it") == 4

    shared(main)


def test_w05_an_ordinary_task_runs_the_body(shared: Shared) -> None:
    """Bodies use asyncio.timeout, also over several steps, as long as one task makes them."""

    async def main() -> None:
        assert [x async for x in stream_jobs.in_tasks(3)] == [True] * 3
        stream = stream_jobs.bounded_inside(0.3)
        assert await taken(stream, 2) == ["inside", "still"]
        with pytest.raises(TimeoutError) as caught:
            await anext(stream)
        assert not isinstance(caught.value, HeadgateError)
        with pytest.raises(StopAsyncIteration):
            await anext(stream)

    shared(main)


def test_w05_values_of_all_kinds(shared: Shared) -> None:
    class Local:
        x = 3

    async def main() -> None:
        values = [None, 0, "", b"", (), {"a": [1, {2}]}, int, len, StopAsyncIteration("a value"), 10**50, Ellipsis]
        back = [value async for value in stream_jobs.gives(values)]
        assert list(map(repr, back)) == list(map(repr, values))
        [function, made] = [value async for value in stream_jobs.gives([lambda x: x + 1, Local()])]
        assert (function(2), made.x) == (3, 3)
        stream = stream_jobs.gives_back()
        await anext(stream)
        for value in values:
            assert repr(await stream.asend(value)) == repr(value)
        assert (await stream.asend(lambda x: x * 2))(4) == 8
        assert await stream.asend(stream_jobs.count) is stream_jobs.count
        mine = ["mine"]
        back = await stream.asend(mine)
        assert back == mine
        assert back is not mine, "what is sent is a copy"
        await stream.aclose()

    shared(main)


def test_w05_many_streams_are_not_mixed_up(shared: Shared, scale: float) -> None:
    async def one(number: int, items: int) -> None:
        stream = stream_jobs.gives_back() if number % 3 else None
        if stream is None:
            assert [x async for x in stream_jobs.count(items)] == list(range(items))
            return
        await anext(stream)
        for item in range(items):
            assert await stream.asend((number, item)) == (number, item)
        await stream.aclose()

    async def main() -> None:
        await asyncio.gather(*(one(number, max(20, int(200 * scale))) for number in range(40)))
        await none_is_open(shared.pool)

    shared(main)


def test_w05_two_advances_at_once_are_a_runtime_error(shared: Shared, log: str) -> None:
    async def advances(stream: Stream, has_begun: Callable[[], bool]) -> list[str]:
        step = asyncio.create_task(first(stream))
        await until(has_begun)
        said = []
        for second in (anext(stream), stream.asend(None), stream.athrow(ValueError("mine")), stream.aclose()):
            with pytest.raises(RuntimeError, match="asynchronous generator is already running") as caught:
                await second
            said.append(str(caught.value))
        assert not step.done()
        step.cancel()
        with pytest.raises(asyncio.CancelledError):
            await step
        return said

    async def main() -> None:
        theirs = await advances(stream_jobs.waits(log, "it"), lambda: "it waits" in lines(log))
        local = log + ".local"
        ours = await advances(stream_jobs.waits.__wrapped__(local, "it"), lambda: "it waits" in lines(local))
        assert theirs == ours
        assert lines(log) == lines(local) == ["it waits", "it finally"]
        stream = stream_jobs.count(5)
        outcomes = await asyncio.gather(*(first(stream) for _ in range(3)), return_exceptions=True)
        assert outcomes[0] == 0
        assert [type(outcome) for outcome in outcomes[1:]] == [RuntimeError] * 2
        await stream.aclose()  # the frames of `advances` are in cycles, and from 3.12 on they hold this one

    shared(main)


# -- any script of steps gives what it gives locally ------------------------------------------------------------------

Step = tuple[Any, ...]

ERRORS: dict[str, Callable[[], BaseException | type[BaseException]]] = {
    "value": lambda: ValueError("thrown", 1),
    "class": lambda: KeyError,
    "keyword": lambda: jobs.KeywordOnly(field="thrown", count=2),
    "several": lambda: jobs.SeveralArguments(1, "thrown", {}),
    "group": lambda: ExceptionGroup("both", [ValueError("one"), KeyError("two")]),
    "cancelled": lambda: asyncio.CancelledError("thrown"),
    "exit": lambda: GeneratorExit("thrown"),
    "stop": lambda: StopAsyncIteration("thrown"),
    "stop plainly": lambda: StopIteration("thrown"),
    "system exit": lambda: SystemExit(4),
    "interrupt": lambda: KeyboardInterrupt("thrown"),
}

BODIES = [
    stream_jobs.counts,
    stream_jobs.echoes,
    stream_jobs.catches,
    stream_jobs.ignores_exit,
    stream_jobs.returns_on_exit,
    stream_jobs.fails_in_finally,
    stream_jobs.guarded,
    stream_jobs.catches_cancellation,
    stream_jobs.fails_when_cancelled,
    stream_jobs.catches_everything,
    stream_jobs.replaces,
    stream_jobs.ends_oddly,
    stream_jobs.delegates,
]
STUBBORN = (stream_jobs.ignores_exit, stream_jobs.catches_everything)
"""They give a value when they are closed. One that did, and is dropped then, is never closed: by Python's own rules."""

STEPS = st.one_of(
    st.just(("next",)),
    st.tuples(st.just("send"), st.sampled_from([None, 0, "text", [1, 2]])),
    st.tuples(st.just("throw"), st.sampled_from(sorted(ERRORS))),
    st.just(("close",)),
)
SCRIPTS = st.lists(
    st.one_of(
        STEPS,
        st.just(("next",)),  # half of all: most else ends a generator
        st.just(("next",)),
        st.tuples(st.just("cancel"), STEPS),
        st.tuples(st.just("overlap"), STEPS, STEPS),
    ),
    max_size=7,
)
ENDS = st.sampled_from(["drain", "close", "drop", "break"])


def told(error: BaseException) -> tuple[Any, ...]:
    """An exception, as far as it must be the same. Who was cancelled by whom is told by its type. What would end a
    program comes as RoutineExited from a worker, unless its consumer has thrown it."""
    if isinstance(error, headgate.RoutineExited) and error.__cause__ is not None:
        error = error.__cause__
    said: tuple[Any, ...] = (type(error).__name__, str(error), getattr(error, "field", None))
    if isinstance(error, asyncio.CancelledError):
        return said
    return (*said, *(chained and (type(chained), str(chained)) for chained in (error.__cause__, error.__context__)))


async def made(stream: Stream, step: Step) -> tuple[Any, ...]:
    try:
        match step:
            case ("next",):
                return "gave", await stream.__anext__()
            case ("send", value):
                return "gave", await stream.asend(value)
            case ("throw", name):
                return "gave", await stream.athrow(ERRORS[name]())
            case _:
                return "closed", await stream.aclose()
    except BaseException as error:
        return told(error)


async def first_of(stream: Stream) -> tuple[Any, ...]:
    try:
        async for value in stream:
            return "gave", value
    except BaseException as error:
        return told(error)
    return ("ended",)


async def within(task: asyncio.Task[tuple[Any, ...]], step: Step) -> tuple[Any, ...]:
    await asyncio.wait((task,), timeout=10)
    if not task.done():
        task.cancel()
        await asyncio.wait((task,), timeout=10)
        raise AssertionError(f"{step} hangs")
    return task.result()


def hold(path: str) -> None:
    Path(f"{path}.hold").touch()


def not_yet_held(path: str) -> bool:
    """Nobody has come to where it is held."""
    return os.path.exists(f"{path}.hold")


def let_go(path: str) -> None:
    Path(f"{path}.hold").unlink(missing_ok=True)


async def act(stream: Stream, path: str, step: Step) -> list[tuple[Any, ...]]:
    """One line of a script, and what came of it."""
    if step[0] not in ("cancel", "overlap"):
        return [await within(asyncio.create_task(made(stream, step)), step)]
    hold(path)
    task = asyncio.create_task(made(stream, step[1]))
    end = time.monotonic() + 10
    while not_yet_held(path) and not task.done():
        assert time.monotonic() < end, f"{step} is not held, and does not end"
        await asyncio.sleep(0.001)
    let_go(path)
    outcomes = []
    if step[0] == "overlap":
        outcomes.append(await within(asyncio.create_task(made(stream, step[2])), step))
    task.cancel()
    return [*outcomes, await within(task, step)]


async def play(fn: Any, path: str, n: int, steps: list[Step], end: str) -> list[tuple[Any, ...]]:
    """A whole script. The generator has ended, or is dropped, when this returns."""
    stream = fn(path, n)
    trace = []
    for step in steps:
        trace += await act(stream, path, step)
        if step[1:2] == (("close",),) and trace[-1][0] not in ("closed", "RuntimeError", "StopAsyncIteration"):
            return trace  # CPython 3.11 takes a generator whose aclose() was cancelled for a running one, for ever
    if end in ("drop", "break") and _name(fn) not in map(_name, STUBBORN):
        if end == "break":
            trace.append(await within(asyncio.create_task(first_of(stream)), (end,)))
        return trace
    if end == "close":
        trace += await act(stream, path, ("close",))
    for _ in range(20):
        trace += await act(stream, path, ("next",))
        if trace[-1][0] == "StopAsyncIteration":
            return trace
    raise AssertionError(f"it does not end: {trace}")


def _name(fn: Any) -> str:
    return str(fn.__name__)


async def compare(fn: Any, folder: Path, n: int, steps: list[Step], end: str) -> None:
    # One that is dropped and fails in its `finally` is told to the loop, which would print it.
    asyncio.get_running_loop().set_exception_handler(lambda *_: None)
    try:
        number = next(_numbers_of_scripts)
        local, remote = str(folder / f"{number}.local"), str(folder / f"{number}.remote")
        expected = await play(fn.__wrapped__, local, n, steps, end)
        gc.collect(1)  # what is young: all of it takes too long to be done for each script
        for _ in range(30):  # the loop closes what was dropped
            await asyncio.sleep(0)
        assert await play(fn, remote, n, steps, end) == expected
        gc.collect(1)
        with contextlib.suppress(AssertionError):
            await until(lambda: lines(remote) == lines(local), 5)
        assert lines(remote) == lines(local)
    finally:
        asyncio.get_running_loop().set_exception_handler(None)


_numbers_of_scripts = itertools.count()


@pytest.mark.parametrize("fn", BODIES, ids=_name)
@settings(
    max_examples=int(210 * SCALE**1.6),
)
@given(n=st.integers(0, 4), steps=SCRIPTS, end=ENDS)
def test_w05_any_script_gives_what_it_gives_locally(
    shared: Shared, tmp_path: Path, fn: Any, n: int, steps: list[Step], end: str
) -> None:
    shared(lambda: compare(fn, tmp_path, n, steps, end))


CHOSEN: list[tuple[Any, int, str]] = [
    (stream_jobs.counts, 3, "next, close, close, next, send 1, throw value"),
    (stream_jobs.counts, 1, "next, next, next, throw value, close"),
    (stream_jobs.counts, 2, "send 1, send None, send 1, send 1, send 1"),
    (stream_jobs.counts, 3, "cancel next, next"),
    (stream_jobs.echoes, 4, "next, send 1, send None, send 2, send 3"),
    (stream_jobs.catches, 4, "next, throw value, next, throw keyword, throw several"),
    (stream_jobs.catches, 4, "next, throw group, send 1, throw stop, send 2"),
    (stream_jobs.ignores_exit, 3, "next, close, next, close, throw value, next"),
    (stream_jobs.ignores_exit, 3, "next, throw exit, next, cancel close"),
    (stream_jobs.returns_on_exit, 3, "next, throw exit, next"),
    (stream_jobs.fails_in_finally, 3, "next, close, close, next"),
    (stream_jobs.fails_in_finally, 3, "next, throw value, throw value"),
    (stream_jobs.fails_in_finally, 3, "next, cancel close, close"),
    (stream_jobs.guarded, 3, "next, cancel throw value, next"),
    (stream_jobs.guarded, 3, "next, cancel close, close, next"),
    (stream_jobs.guarded, 3, "next, next / close, next"),
    (stream_jobs.guarded, 3, "next, close / close, next"),
    (stream_jobs.catches_cancellation, 4, "cancel next, cancel next, next, close"),
    (stream_jobs.catches_cancellation, 4, "next, next / throw value, next"),
    (stream_jobs.fails_when_cancelled, 4, "next, cancel send 3, next"),
    (stream_jobs.fails_when_cancelled, 4, "next, throw cancelled, throw value"),
    (stream_jobs.catches_everything, 4, "next, throw system exit, next, throw interrupt"),
    (stream_jobs.catches_everything, 4, "next, close, cancel next, throw exit"),
    (stream_jobs.replaces, 3, "next, close, next"),
    (stream_jobs.replaces, 3, "next, throw stop, next"),
    (stream_jobs.replaces, 3, "next, throw stop plainly, throw interrupt"),
    *((stream_jobs.ends_oddly, n, ", ".join(["next"] * (n + 2))) for n in range(5)),
    (stream_jobs.delegates, 3, "next, cancel next, next"),
]


def parsed(text: str) -> Step:
    """One line of a script, from words: "cancel throw value", or "next / close" for both at once."""
    if " / " in text:
        return "overlap", *map(parsed, text.split(" / "))
    word, _, rest = text.partition(" ")
    if word == "cancel":
        return word, parsed(rest)
    if word == "send":
        return word, None if rest == "None" else int(rest)
    return (word, rest) if rest else (word,)


@pytest.mark.parametrize(("fn", "n", "text"), CHOSEN, ids=lambda value: getattr(value, "__name__", str(value)))
def test_w05_scripts_that_matter_give_what_they_give_locally(
    shared: Shared, tmp_path: Path, fn: Any, n: int, text: str
) -> None:
    async def main() -> None:
        for end in ("drain", "drop"):
            await compare(fn, tmp_path, n, [parsed(step) for step in text.split(", ")], end)

    shared(main)


def test_w05_no_script_leaves_a_generator_open(shared: Shared) -> None:
    """After those above, in whatever worker they were."""

    async def main() -> None:
        await none_is_open(shared.pool)

    shared(main)


# -- exceptions -------------------------------------------------------------------------------------------------------


def test_w43_an_exception_of_the_body_keeps_type_fields_and_traceback(shared: Shared) -> None:
    async def main() -> None:
        stream = stream_jobs.fails_after(2, jobs.SeveralArguments, 4, "because", {"x": 1})
        assert await taken(stream, 2) == [0, 1]
        with pytest.raises(jobs.SeveralArguments, match="4: because") as caught:
            await anext(stream)
        assert (caught.value.code, caught.value.detail) == (4, {"x": 1})
        note = caught.value.__notes__[-1]
        assert "Traceback" in note
        assert "in fails_after" in note
        assert "in innermost" in note
        for _ in range(2):
            with pytest.raises(StopAsyncIteration):
                await anext(stream)
        await stream.aclose()
        got: list[int] = []
        with pytest.raises(jobs.KeywordOnly, match="f x 1"):
            await read_into(got, stream_jobs.fails_after(3, jobs.KeywordOnly, field="f", count=1))
        assert got == [0, 1, 2]
        with pytest.raises(RemoteError, match="HoldsALock"):
            await anext(stream_jobs.fails_after(0, jobs.HoldsALock))
        await until(lambda: in_flight(shared.pool) == 0)

    shared(main)


def test_w05_an_exception_that_was_thrown_in_arrives_in_the_body_with_its_fields(shared: Shared, log: str) -> None:
    async def main() -> None:
        error = jobs.KeywordOnly(field="mine", count=3)
        stream = stream_jobs.catches(log, 3)
        await anext(stream)
        assert await stream.athrow(error) == "caught"
        assert lines(log)[-1] == "caught KeywordOnly mine x 3 mine"
        await stream.aclose()
        stream = stream_jobs.counts(log, 3)
        await anext(stream)
        with pytest.raises(jobs.KeywordOnly) as caught:
            await stream.athrow(error)
        assert (caught.value.field, caught.value.count) == ("mine", 3)

    shared(main)


@pytest.mark.parametrize(("way", "code"), [("exit", 3), ("interrupt", 130)])
def test_w30_what_ends_a_program_ends_the_generator_only(shared: Shared, way: str, code: int) -> None:
    async def main() -> None:
        before = states(shared.pool)
        beside = [stream_jobs.count(3) for _ in range(4)]
        for stream in beside:
            await anext(stream)
        for _ in range(2):
            stream = stream_jobs.exits(way)
            assert await anext(stream) == 1
            with pytest.raises(headgate.RoutineExited) as caught:
                await anext(stream)
            assert caught.value.exit_code == code
            with pytest.raises(StopAsyncIteration):
                await anext(stream)
        for stream in beside:
            assert [x async for x in stream] == [1, 2]
        assert states(shared.pool) == before
        await none_is_open(shared.pool)

    shared(main)


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt])
def test_w43_an_exit_that_its_consumer_throws_into_a_generator_stays_the_consumers(
    shared: Shared, log: str, kind: type[BaseException]
) -> None:
    async def main() -> None:
        stream = stream_jobs.counts(log, 3)
        await anext(stream)
        with pytest.raises(kind):
            await stream.athrow(kind(4))
        with pytest.raises(kind):
            async with contextlib.asynccontextmanager(stream_jobs.counts)(log, 3):
                raise kind(4)
        await none_is_open(shared.pool)

    shared(main)


@pytest.mark.parametrize("kind", ["cannot be pickled", "cannot be loaded"])
def test_w40b_a_value_that_cannot_travel_is_that_streams_outcome(shared: Shared, log: str, kind: str) -> None:
    async def main() -> None:
        before = states(shared.pool)
        beside = stream_jobs.count(3)
        await anext(beside)
        lock = kind == "cannot be pickled"
        stream = stream_jobs.gives_a_lock(log) if lock else stream_jobs.gives_what_breaks(log, os.getpid())
        assert await anext(stream) == 1
        with pytest.raises(HeadgateError, match="gives_a_lock" if lock else "it breaks here"):
            await anext(stream)
        await stream.aclose()
        await until(lambda: lines(log) == ["it finally"])
        assert [x async for x in beside] == [1, 2]
        assert states(shared.pool) == before
        await none_is_open(shared.pool)

    shared(main)


def test_w42_a_sent_value_that_cannot_be_pickled_is_the_callers_error(shared: Shared, log: str) -> None:
    async def main() -> None:
        before = states(shared.pool)
        stream = stream_jobs.hears(log)
        await anext(stream)
        assert await stream.asend(3) == "int"
        with pytest.raises(HeadgateError) as caught:
            await stream.asend(threading.Lock())
        assert caught.value.remedy in str(caught.value)
        await stream.aclose()
        await until(lambda: lines(log) == ["it finally"])
        stream = stream_jobs.hears(log)
        await anext(stream)
        with pytest.raises((jobs.HoldsALock, HeadgateError)):
            await stream.athrow(jobs.HoldsALock())
        await stream.aclose()
        await until(lambda: lines(log) == ["it finally"] * 2)
        assert states(shared.pool) == before
        await none_is_open(shared.pool)

    shared(main)


# -- ends -------------------------------------------------------------------------------------------------------------


def test_w05_aclose_returns_when_the_remote_finally_has_run(shared: Shared, tmp_path: Path) -> None:
    async def main() -> None:
        for number in range(5):
            path = str(tmp_path / str(number))
            stream = stream_jobs.slow_to_end(path, 0.05)
            await anext(stream)
            await stream.aclose()
            assert lines(path) == ["finally"]
            await stream.aclose()
            with pytest.raises(StopAsyncIteration):
                await anext(stream)
        assert in_flight(shared.pool) == 0

    shared(main)


class Holder:
    """Holds itself, and a stream."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.me = self


@pytest.mark.parametrize("ahead", [False, True], ids=["pulled", "prefetch"])
@pytest.mark.parametrize("way", ["break", "dropped", "a cycle", "in a thread", "return", "exception", "aclosing"])
def test_w05_what_is_abandoned_runs_its_finally(shared: Shared, log: str, way: str, ahead: bool) -> None:
    fn = stream_jobs.noted_ahead_3 if ahead else stream_jobs.noted

    async def abandon() -> None:
        stream: Any = fn(log, "it")
        if way == "break":
            async for value in stream:
                if value == 2:
                    break
        elif way == "return":
            async for _ in stream:
                return
        elif way == "exception":
            async for _ in stream:
                raise LookupError("mine")
        elif way == "aclosing":
            async with contextlib.aclosing(stream):
                await anext(stream)
            assert lines(log)[-1] == "it finally"
        elif way == "a cycle":
            await anext(stream)
            Holder(stream)
        elif way == "in a thread":
            await anext(stream)
            box = [stream]
            del stream
            await in_thread(box.clear)
        else:
            await anext(stream)

    async def main() -> None:
        with contextlib.suppress(LookupError):
            await abandon()
        gc.collect()
        await until(lambda: lines(log)[-1:] == ["it finally"])
        assert lines(log).count("it finally") == 1
        await none_is_open(shared.pool)

    shared(main)


@pytest.mark.parametrize("ahead", [False, True], ids=["pulled", "prefetch"])
def test_w05_a_cancelled_step_ends_the_body_before_its_caller(shared: Shared, tmp_path: Path, ahead: bool) -> None:
    async def main() -> None:
        for number in range(6):
            path = str(tmp_path / str(number))
            stream = (stream_jobs.waits_ahead if ahead else stream_jobs.waits)(path, "it", number % 3)
            await taken(stream, number % 3)
            step = asyncio.create_task(first(stream))
            await until(lambda path=path: lines(path) == ["it waits"])
            await asyncio.sleep(0)
            step.cancel()
            with pytest.raises(asyncio.CancelledError):
                await step
            assert lines(path) == ["it waits", "it finally"]
            assert step.cancelled()
            with pytest.raises(StopAsyncIteration):
                await anext(stream)
        await none_is_open(shared.pool)

    shared(main)


def test_w05_the_callers_timeout_ends_the_body(shared: Shared, log: str) -> None:
    async def main() -> None:
        stream = stream_jobs.slow_to_end(log, 0.05)
        await anext(stream)
        with pytest.raises(TimeoutError) as caught:
            async with asyncio.timeout(0.2):
                await anext(stream)
        assert not isinstance(caught.value, HeadgateError)
        assert lines(log) == ["waits", "finally"]

    shared(main)


def test_w05_a_swallowed_cancellation_gives_its_value_to_the_cancelled_step(shared: Shared, log: str) -> None:
    async def main() -> None:
        stream = stream_jobs.swallows(log)
        for number in range(3):
            step = asyncio.create_task(first(stream))
            await until(lambda number=number: lines(log).count("waits") == number + 1)
            step.cancel()
            assert await step == "not now"
            assert not step.cancelled()
        await stream.aclose()
        assert lines(log)[-1] == "it finally"
        stream = stream_jobs.turns_it_into_an_error(log + ".error")
        step = asyncio.create_task(first(stream))
        await until(lambda: lines(log + ".error") == ["waits"])
        step.cancel()
        with pytest.raises(ValueError, match="instead"):
            await step

    shared(main)


def test_w06_a_body_that_does_not_end_keeps_its_callers_for_five_seconds(
    log: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One whose step is cancelled, and beside it one that is cancelled while it is closed.

    Of the five seconds one is waited for; `test_failures` waits for all, with a routine.
    """
    for module in (dispatcher_module, connection_module):
        assert module.CONFIRMATION == 5
        monkeypatch.setattr(module, "CONFIRMATION", 1)

    async def main() -> None:
        async with WorkerPool(spawn=1, shutdown_timeout=0) as pool:
            streams = [stream_jobs.slow_to_end(f"{log}.{number}", 3600) for number in range(2)]
            for stream in streams:
                await anext(stream)
            steps = [asyncio.create_task(first(streams[0])), asyncio.create_task(streams[1].aclose())]
            await until(lambda: lines(f"{log}.0") == ["waits"])
            asked = time.monotonic()
            steps[0].cancel()
            await asyncio.wait(steps[:1], timeout=20)
            assert steps[0].cancelled()
            assert time.monotonic() - asked > 0.8
            assert not steps[1].done(), "one that is closed has the time it needs"
            steps[1].cancel()
            await asyncio.wait(steps[1:], timeout=20)
            assert steps[1].cancelled()
            assert await jobs.pid() in pids(pool)

    run(main)


def test_w05_a_step_cancelled_at_any_moment_gives_its_value_or_ends_the_generator(shared: Shared, scale: float) -> None:
    """Locally a generator that let a cancellation through has ended, and no value is lost: so it is here."""
    chance = random.Random(5)

    async def one(number: int) -> bool:
        stream = stream_jobs.steady(number, 15, chance.choice([0, 0.001, 0.004]))
        got: list[Any] = []
        cancelled = False
        while not cancelled:
            step = asyncio.create_task(first(stream))
            await asyncio.sleep(0)
            if chance.random() < 0.2:
                await asyncio.sleep(chance.choice([0, 0, chance.uniform(0, 0.006)]))
                step.cancel()
            try:
                got.append(await step)
            except StopAsyncIteration:
                assert len(got) == 15
                break
            except asyncio.CancelledError:
                cancelled = True
        assert got == [(number, item) for item in range(len(got))]
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
        return cancelled

    async def main() -> None:
        count = max(60, int(1000 * scale))
        outcomes = []
        for begin in range(0, count, 20):
            async with asyncio.timeout(20):
                outcomes += await asyncio.gather(*map(one, range(begin, begin + 20)))
        assert True in outcomes
        await none_is_open(shared.pool)

    shared(main, patience=60 + 60 * scale)


def test_w10_a_step_cancelled_at_any_moment_with_prefetch(shared: Shared, scale: float) -> None:
    chance = random.Random(6)

    async def one(number: int) -> None:
        stream = stream_jobs.steady_ahead(number, 30, chance.choice([0, 0.001, 0.004]))
        got: list[Any] = []
        with contextlib.suppress(StopAsyncIteration, asyncio.CancelledError):
            while True:
                step = asyncio.create_task(first(stream))
                await asyncio.sleep(0)
                if chance.random() < 0.2:
                    await asyncio.sleep(chance.choice([0, 0, chance.uniform(0, 0.006)]))
                    step.cancel()
                got.append(await step)
        assert got == [(number, item) for item in range(len(got))]
        await stream.aclose()

    async def main() -> None:
        for begin in range(0, max(60, int(600 * scale)), 20):
            async with asyncio.timeout(20):
                await asyncio.gather(*map(one, range(begin, begin + 20)))
        await none_is_open(shared.pool)

    shared(main, patience=60 + 60 * scale)


# -- many -------------------------------------------------------------------------------------------------------------


async def abandoned(stream: Stream, way: str, after: int) -> list[Any]:
    """Read some, then leave it; what was read."""
    if way == "break":
        got: list[Any] = []
        async for value in stream:
            got.append(value)
            if len(got) > after:
                break
        return got
    if way == "cancel":
        return await cancelled_reader(stream, after)
    got = await taken(stream, after)
    if way == "aclose":
        await stream.aclose()
    elif way == "athrow":
        with pytest.raises(LookupError, match="mine"):
            await stream.athrow(LookupError("mine"))
    return got


async def cancelled_reader(stream: Stream, after: int) -> list[Any]:
    got: list[Any] = []

    reader = asyncio.create_task(read_into(got, stream))
    await until(lambda: len(got) >= after or reader.done())
    reader.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await reader
    return got


def test_w05_a_hundred_streams_half_of_them_abandoned_leave_nothing(shared: Shared, scale: float) -> None:
    chance = random.Random(7)
    items = 12

    async def one(number: int) -> None:
        fn = chance.choice([stream_jobs.steady, stream_jobs.steady_ahead])
        stream: Any = fn(number, items, chance.choice([0, 0.001, 0.01]))
        if number % 2:
            way = chance.choice(["break", "aclose", "cancel", "athrow", "drop"])
            got = await abandoned(stream, way, chance.randrange(1, items - 1))
        else:
            got = [value async for value in stream]
            assert len(got) == items
        assert got == [(number, item) for item in range(len(got))]

    async def main() -> None:
        await none_is_open(shared.pool)
        before = await census(shared.pool)
        for _ in range(max(1, int(10 * scale))):
            await asyncio.gather(*map(one, range(100)))
        gc.collect()
        await none_is_open(shared.pool)

        async def as_before() -> bool:
            now = await census(shared.pool)
            return all(now[pid][1] <= tasks for pid, (_, tasks) in before.items())

        await eventually(as_before)
        assert len(pids(shared.pool)) == 2

    shared(main, patience=60 + 60 * scale)


def test_w05_a_stream_is_one_task_to_those_who_look(shared: Shared, log: str) -> None:
    async def main() -> None:
        with capture_events("workers.tasks") as events:
            assert len([x async for x in stream_jobs.count(5)]) == 5
            with pytest.raises(LookupError):
                async for _ in stream_jobs.fails_after(2, LookupError, "mine"):
                    pass
            stream = stream_jobs.noted(log, "it")
            await taken(stream, 3)
            await stream.aclose()
            await until(lambda: events.names.count("task_finished") == 3)
            assert events.names.count("task_dispatched") == 3
        finished = [event.to_dict() for event in events if event.name == "task_finished"]
        assert [event["outcome"] for event in finished[:2]] == ["returned", "raised"]
        assert [event["task"] for event in finished] == [
            event.to_dict()["task"] for event in events if event.name == "task_dispatched"
        ]
        for event in events:
            assert pickle.loads(pickle.dumps(event)) == event

    shared(main)


def test_w09_a_generator_is_one_task_and_the_caller_of_what_it_calls(shared: Shared) -> None:
    async def main() -> None:
        found = [fields async for fields in stream_jobs.my_task(3)]
        assert len({str(outer["id"]) for outer, _ in found}) == 1
        assert [outer["caller"] for outer, _ in found] == [None] * 3
        assert {outer["timeout"] for outer, _ in found} == {20}
        assert "stream_jobs.my_task:" in found[0][0]["tag"]
        assert [inner["caller"] for _, inner in found] == [outer["id"] for outer, _ in found]
        assert len({str(inner["id"]) for _, inner in found}) == 3
        assert headgate.current_task() is None

    shared(main)


# -- time -------------------------------------------------------------------------------------------------------------


def test_w08_a_timeout_bounds_each_step_of_a_generator(shared: Shared, log: str) -> None:
    async def too_slow(fn: Any, name: str) -> None:
        stream = fn(log, name, [0, 0, 60])
        assert await taken(stream, 2) == [0, 0]
        with pytest.raises(RoutineTimeout, match="bounded") as caught:
            await anext(stream)
        assert isinstance(caught.value, TimeoutError)
        assert "1" in str(caught.value)
        await until(lambda: f"{name} finally" in lines(log))
        with pytest.raises(StopAsyncIteration):
            await anext(stream)

    async def long_in_all(fn: Any, name: str) -> None:
        assert [x async for x in fn(log, name, [0.3] * 4)] == [0.3] * 4

    async def paused(fn: Any, name: str) -> None:
        stream = fn(log, name, [0] * 3)
        await anext(stream)
        await asyncio.sleep(1.3)
        assert await taken(stream, 2) == [0, 0]
        await stream.aclose()

    async def main() -> None:
        async with asyncio.TaskGroup() as group:
            for fn in (stream_jobs.bounded, stream_jobs.bounded_ahead):
                for check in (too_slow, long_in_all, paused):
                    group.create_task(check(fn, f"{check.__name__}-{fn.__name__}"))
        await none_is_open(shared.pool)

    shared(main)


def test_w08_a_timeout_of_the_bodys_own_is_its_own(shared: Shared) -> None:
    async def main() -> None:
        stream = stream_jobs.own_timeout()
        await anext(stream)
        with pytest.raises(TimeoutError, match="my own") as caught:
            await anext(stream)
        assert not isinstance(caught.value, RoutineTimeout)

    shared(main)


# -- running ahead ----------------------------------------------------------------------------------------------------

AHEAD = {1: stream_jobs.noted_ahead_1, 3: stream_jobs.noted_ahead_3, 64: stream_jobs.noted_ahead_64}
FINITE = {1: stream_jobs.finite_ahead_1, 3: stream_jobs.finite_ahead_3, 64: stream_jobs.finite_ahead_64}


@pytest.mark.parametrize("n", [1, 3, 64])
def test_w10_prefetch_runs_ahead_by_so_many_and_pauses(shared: Shared, log: str, n: int) -> None:
    async def main() -> None:
        stream = AHEAD[n](log, "it")
        await asyncio.sleep(0.02)
        assert lines(log) == [], "not before the first step"
        assert await anext(stream) == 0
        assert n <= await settled(log, "it", n) <= 1 + n
        for number in range(1, 3 * n + 10):
            assert await anext(stream) == number
            assert produced(log, "it") <= number + 1 + n
        await until(lambda: produced(log, "it") > 3 * n + 10)
        await stream.aclose()
        assert lines(log)[-1] == "it finally"
        await none_is_open(shared.pool)

    shared(main)


def test_w10_prefetch_of_nothing_is_pulled(shared: Shared, log: str) -> None:
    async def main() -> None:
        stream = stream_jobs.noted_ahead_0(log, "it")
        assert await taken(stream, 2) == [0, 1]
        await asyncio.sleep(0.05)
        assert produced(log, "it") == 2
        assert await stream.asend("ignored") == 2
        await stream.aclose()
        assert lines(log)[-1] == "it finally"

    shared(main)


def test_w10_prefetch_keeps_the_order(shared: Shared, scale: float) -> None:
    count = max(2000, int(30_000 * scale))

    async def main() -> None:
        assert [x async for x in stream_jobs.count_ahead(count)] == list(range(count))
        both = await asyncio.gather(*(stream_jobs.collects(stream_jobs.count_ahead, 300) for _ in range(6)))
        assert [values for _, values in both] == [list(range(300))] * 6
        got = []
        async for value in stream_jobs.count_ahead(300):
            got.append(value)
            if value % 50 == 0:
                await asyncio.sleep(0.01)  # now the worker is ahead, now the reader
        assert got == list(range(300))

    shared(main)


@settings(
    max_examples=int(420 * SCALE),
)
@given(
    ahead=st.sampled_from(sorted(FINITE)),
    n=st.integers(0, 9),
    fails=st.booleans(),
    reads=st.integers(0, 10),
    idle=st.booleans(),
    end=st.sampled_from(["drain", "close", "drop", "throw"]),
)
def test_w10_prefetch_gives_the_same_items_and_then_the_same_end(
    shared: Shared, tmp_path: Path, ahead: int, n: int, fails: bool, reads: int, idle: bool, end: str
) -> None:
    path = str(tmp_path / str(next(_numbers_of_scripts)))

    async def read(stream: Stream) -> list[Any]:
        trace: list[Any] = []
        for number in range(reads if end != "drain" else n + 2):
            trace.append(await made(stream, ("next",)))
            if idle and number == 0:
                await asyncio.sleep(0.005)
        if end == "close":
            trace.append(await made(stream, ("close",)))
        elif end == "throw":
            trace.append(await made(stream, ("throw", "value")))
        return trace

    async def main() -> None:
        local = await read(stream_jobs._finite(f"{path}.local", n, fails))
        trace = await read(FINITE[ahead](path, n, fails))
        if end == "throw" and 0 < reads <= n <= reads + ahead:
            # The body may have ended already, ahead of its reader: nobody is there to catch what is thrown.
            assert trace[:-1] == local[:-1]
            assert trace[-1][0] in ("ValueError", "StopAsyncIteration")
        else:
            assert trace == local
        gc.collect(1)
        begun = end == "drain" or reads > 0
        await until(lambda: lines(path) == ["it finally"] * begun)

    shared(main)


def test_w10_an_exception_comes_after_the_items_before_it(shared: Shared, log: str) -> None:
    async def main() -> None:
        stream = stream_jobs.finite_ahead_64(log, 5, True)
        assert await anext(stream) == 0
        await until(lambda: lines(log) == ["it finally"])  # long ended, and nobody has seen it
        assert await taken(stream, 4) == [1, 2, 3, 4]
        with pytest.raises(jobs.KeywordOnly, match="at the end x 5"):
            await anext(stream)
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
        stream = stream_jobs.finite_ahead_64(log, 5, True)
        await anext(stream)
        await until(lambda: lines(log) == ["it finally"] * 2)
        await stream.aclose()  # what it would have raised belongs to a step that is not made
        with pytest.raises(StopAsyncIteration):
            await anext(stream)

    shared(main)


def test_w10_with_prefetch_nothing_can_be_sent(shared: Shared, log: str) -> None:
    async def main() -> None:
        with pytest.raises(TypeError, match="just-started"):
            await stream_jobs.noted_ahead_3(log, "fresh").asend(1)
        stream = stream_jobs.noted_ahead_3(log, "it")
        assert [await stream.asend(None) for _ in range(3)] == [0, 1, 2]
        with pytest.raises(InvalidArgument, match="prefetch") as caught:
            await stream.asend("something")
        assert caught.value.remedy in str(caught.value)
        await stream.aclose()
        await until(lambda: lines(log)[-1:] == ["it finally"])
        await none_is_open(shared.pool)

    shared(main)


def test_w10_with_prefetch_an_exception_is_thrown_in_where_the_worker_is(shared: Shared, log: str) -> None:
    async def main() -> None:
        stream = stream_jobs.catches_ahead(log)
        assert await anext(stream) == 0
        far = await settled(log, "it", 3) - 1
        assert await stream.athrow(ValueError("mine")) == ("caught", "mine", far)
        assert await taken(stream, 10) == list(range(far + 1, far + 11)), "what was fetched before it is dropped"
        with pytest.raises(LookupError, match="not caught"):
            await stream.athrow(LookupError("not caught"))
        assert lines(log)[-1] == "it finally"
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
        await none_is_open(shared.pool)

    shared(main)


def test_w10_closing_with_prefetch_is_as_locally(shared: Shared, log: str) -> None:
    async def main() -> None:
        for reads in (1, 2, 7):
            stream = stream_jobs.noted_ahead_64(log, f"it-{reads}")
            assert await taken(stream, reads) == list(range(reads))
            await stream.aclose()
            assert lines(log)[-1] == f"it-{reads} finally"
            with pytest.raises(StopAsyncIteration):
                await anext(stream)
        stream = stream_jobs.ignores_exit_ahead(log)
        await anext(stream)
        with pytest.raises(RuntimeError, match="async generator ignored GeneratorExit"):
            await stream.aclose()
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
        stream = stream_jobs.fails_in_finally_ahead(log)
        await anext(stream)
        with pytest.raises(jobs.KeywordOnly, match="in finally"):
            await stream.aclose()
        await none_is_open(shared.pool)

    shared(main)


def test_w10_an_endless_generator_whose_reader_stops_keeps_memory_flat(shared: Shared, log: str) -> None:
    async def main() -> None:
        stream = stream_jobs.endless_blocks_ahead(log, 50_000)
        pid = (await taken(stream, 10))[-1][0]
        await asyncio.sleep(0.3)
        theirs, ours = resident(pid), resident(os.getpid())
        await asyncio.sleep(1)
        assert resident(pid) - theirs < 20 * MB
        assert resident(os.getpid()) - ours < 20 * MB
        await stream.aclose()
        assert lines(log) == ["it finally"]

    shared(main)


def test_w10_large_items_are_fetched_up_to_about_eight_megabytes(shared: Shared, log: str) -> None:
    async def main() -> None:
        stream = stream_jobs.blocks_noted_ahead(log, MB)
        assert await anext(stream) == stream_jobs.block(0, MB)
        assert 4 <= await settled(log, "it", 2) <= 12, "it may have 64, and has about 8"
        for number in range(1, 20):
            assert await anext(stream) == stream_jobs.block(number, MB)
            assert produced(log, "it") <= number + 12
        await stream.aclose()
        assert lines(log)[-1] == "it finally"
        for number in range(3):  # more than 8 MB each: one at a time
            assert await anext(stream_jobs.blocks_noted_ahead(f"{log}.{number}", 9 * MB)) == stream_jobs.block(
                0, 9 * MB
            )
        gc.collect()
        await none_is_open(shared.pool)

    shared(main)


# -- size -------------------------------------------------------------------------------------------------------------

SIZES = [0, 1, 256 * 1024 - 1, 256 * 1024, 256 * 1024 + 1, MB, 3, 5 * MB + 7, 20 * MB, 10]


async def check_sizes() -> None:
    for fn in (stream_jobs.blocks, stream_jobs.blocks_ahead):
        number = 0
        async for block in fn(SIZES):
            assert block == stream_jobs.block(number, SIZES[number]), f"block {number}"
            number += 1
        assert number == len(SIZES)
    stream = stream_jobs.gives_back()
    await anext(stream)
    for number, size in enumerate(SIZES):
        block = stream_jobs.block(number, size)
        assert await stream.asend(block) == block
    nested = {"a": [bytearray(b"x" * MB), "y" * MB], "b": (b"z" * MB,) * 2}
    assert await stream.asend(nested) == nested
    await stream.aclose()


def test_w42_large_values_are_given_and_sent(shared: Shared) -> None:
    async def main() -> None:
        await asyncio.gather(check_sizes(), check_sizes())
        await none_is_open(shared.pool)

    shared(main)


@pytest.mark.soak
def test_w42_large_values_without_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADGATE_SHARED_MEMORY", "0")

    async def main() -> None:
        async with WorkerPool(spawn=1) as pool:
            await check_sizes()
            await none_is_open(pool)

    run(main)


def test_w42_large_values_that_nobody_waits_for_harm_nobody(shared: Shared, tmp_path: Path) -> None:
    """Steps cancelled, and streams closed and dropped, while much is on its way."""
    chance = random.Random(8)

    async def one(number: int) -> None:
        path = str(tmp_path / str(number))
        stream: Any = stream_jobs.hears_and_gives_blocks(path, 4 * MB)
        await anext(stream)
        step = asyncio.create_task(made(stream, ("send", b"x" * 4 * MB)))
        await asyncio.sleep(chance.uniform(0, 0.01))
        step.cancel()
        outcome = await step
        assert outcome[0] in ("gave", "CancelledError")
        if number % 2:
            await stream.aclose()
        del stream, step
        gc.collect()
        await until(lambda: lines(path)[-1:] == ["it finally"])

    async def main() -> None:
        before = states(shared.pool)
        await asyncio.gather(*map(one, range(6)))
        assert [x async for x in stream_jobs.count(3)] == [0, 1, 2]
        assert states(shared.pool) == before
        await none_is_open(shared.pool)

    shared(main)


def test_w42_max_payload_bounds_what_is_given_and_sent(log: str) -> None:
    async def main() -> None:
        async with WorkerPool(spawn=1, max_payload=MB) as pool:
            stream = stream_jobs.gives_back()
            await anext(stream)
            assert await stream.asend(b"x" * (MB // 2)) == b"x" * (MB // 2)
            with pytest.raises(InvalidArgument, match="max_payload"):
                await stream.asend(b"x" * 2 * MB)
            await stream.aclose()
            stream = stream_jobs.blocks([3, 2 * MB])
            assert len(await anext(stream)) == 3
            with pytest.raises(HeadgateError, match="max_payload"):
                await anext(stream)
            await stream.aclose()
            assert [x async for x in stream_jobs.count(3)] == [0, 1, 2]
            await none_is_open(pool)

    run(main)


# -- what can be one --------------------------------------------------------------------------------------------------


def test_w03_methods_of_every_kind(shared: Shared) -> None:
    async def main() -> None:
        workers = pids(shared.pool)
        shelf = stream_jobs.Shelf("a", "b")
        read = [value async for value in shelf.read()]
        assert [book for book, _ in read] == ["a", "b"]
        assert {pid in workers for _, pid in read} == {True}
        assert shelf.books == ["a", "b"], "the worker has a copy"
        assert [book async for book, _ in stream_jobs.Shelf.read(shelf, prefix="the ")] == ["the a", "the b"]
        assert [book async for book in shelf.read_ahead()] == ["a", "b"]
        for made in (
            stream_jobs.Shelf.class_above,
            stream_jobs.Shelf.class_below,
            shelf.class_above,
            shelf.class_below,
        ):
            got = [value async for value in made(2)]
            assert [(name, i, pid in workers) for name, i, pid in got] == [("Shelf", 0, True), ("Shelf", 1, True)]
        for static in (stream_jobs.Shelf.static_above, stream_jobs.Shelf.static_below, shelf.static_above):
            got = [value async for value in static(2)]
            assert [(i, pid in workers) for i, pid in got] == [(0, True), (1, True)]

    shared(main)


def test_w03_methods_are_inherited_and_overridden(shared: Shared) -> None:
    async def main() -> None:
        assert [name async for name, _, _ in stream_jobs.Library.class_above(1)] == ["Library"]
        assert [name async for name, _, _ in stream_jobs.Library.class_below(1)] == ["Library"]
        library = stream_jobs.Library("a", "b")
        assert [book async for book, _ in library.read("these: ")] == ["these: our a", "these: our b"]
        assert [book async for book in library.read_ahead()] == ["a", "b"]

    shared(main)


def test_w03_closures_and_local_functions(shared: Shared) -> None:
    factor = 3
    seen: list[int] = []

    @routine
    async def multiples(n: int) -> AsyncGenerator[tuple[int, int], int]:
        for i in range(n):
            seen.append(i)
            yield i * factor, os.getpid()

    @routine(prefetch=2)
    async def multiples_ahead(n: int) -> AsyncGenerator[int, None]:
        for i in range(n):
            yield i * factor

    @routine
    async def remembers() -> AsyncGenerator[list[int], int]:
        while True:
            seen.append((yield list(seen)))

    async def main() -> None:
        nonlocal factor
        got = [value async for value in multiples(3)]
        assert [value for value, _ in got] == [0, 3, 6]
        assert {pid for _, pid in got} <= set(pids(shared.pool))
        factor = 10
        assert [value async for value, _ in multiples(3)] == [0, 10, 20], "a closure sees its current cells"
        assert [value async for value in multiples_ahead(3)] == [0, 10, 20]
        assert seen == []
        for _ in range(4):
            stream = remembers()
            assert await anext(stream) == []
            assert await stream.asend(1) == [1]
            assert await stream.asend(2) == [1, 2], "it is one call, with one copy of what it closes over"
            await stream.aclose()

    shared(main)


def test_w03_a_local_class(shared: Shared) -> None:
    class Oops(Exception):
        pass

    class Point:
        def __init__(self, x: int) -> None:
            self.x = x

        @routine
        async def moved(self, n: int) -> AsyncGenerator[Any, Any]:
            for by in range(n):
                try:
                    yield type(self)(self.x + by)
                except Oops as error:
                    yield Oops(f"caught {error}")

    async def main() -> None:
        stream = Point(3).moved(3)
        assert [(await anext(stream)).x for _ in range(2)] == [3, 4]
        back = await stream.athrow(Oops("mine"))
        assert (type(back).__name__, str(back)) == ("Oops", "caught mine")
        assert (await anext(stream)).x == 5

    shared(main)


def test_w03_partials_and_bound_methods(shared: Shared) -> None:
    async def main() -> None:
        assert [x async for x in functools.partial(stream_jobs.count, 3)()] == [0, 1, 2]
        made: Any = routine(functools.partial(stream_jobs.count.__wrapped__, 3))
        assert inspect.isasyncgenfunction(made)
        assert [x async for x in made()] == [0, 1, 2]
        bound: Any = routine(stream_jobs.Library.read.__wrapped__.__get__(stream_jobs.Library("a")))
        assert inspect.isasyncgenfunction(bound)

    shared(main)


MAIN = """
import asyncio, dataclasses, os
import headgate

base = 1
seen = []
PARENT = os.getpid()

class Oops(Exception):
    def __init__(self, *, field):
        super().__init__(field)
        self.field = field

@dataclasses.dataclass
class Point:
    x: int

def helper(x):
    return base * x

@headgate.routine
async def multiples(n):
    global base
    for i in range(n):
        yield helper(i), len(seen), os.getpid() != PARENT
        seen.append(i)
    base = 99

@headgate.routine(prefetch=4)
async def points(n):
    for i in range(n):
        yield Point(i)

@headgate.routine
async def patient():
    got = None
    while True:
        try:
            got = yield got
        except Oops as error:
            got = Point(error.field)

@headgate.routine
async def failing():
    yield 1
    raise Oops(field="mine")

@headgate.routine
async def tree(depth):
    yield depth
    if depth:
        async for x in tree(depth - 1):
            yield x

async def main():
    global base, helper
    async with headgate.WorkerPool(spawn=1):
        for _ in range(2):
            assert [x async for x in multiples(3)] == [(0, 0, True), (1, 1, True), (2, 2, True)]
        base = 2
        assert [x async for x in multiples(3)] == [(0, 0, True), (2, 1, True), (4, 2, True)]
        assert (base, seen) == (2, [])
        helper = lambda x: "another"
        assert [x[0] async for x in multiples(2)] == ["another"] * 2
        got = [x async for x in points(10)]
        assert got == list(map(Point, range(10))) and type(got[0]) is Point
        stream = patient()
        await anext(stream)
        back = await stream.asend(Point(3))
        assert type(back) is Point and back == Point(3)
        assert await stream.athrow(Oops(field="caught")) == Point("caught")
        assert await stream.asend(5) == 5
        await stream.aclose()
        try:
            async for x in failing():
                assert x == 1
        except Oops as error:
            assert error.field == "mine"
        else:
            raise AssertionError
        assert [x async for x in tree(4)] == [4, 3, 2, 1, 0]
        abandoned = patient()
        await anext(abandoned)
    print("fine")

asyncio.run(main())
"""


def test_w03_a_generator_of_main_sees_its_globals_of_now(tmp_path: Path) -> None:
    done = script(MAIN, tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "fine\n", "")


SEED = """
import asyncio
import headgate
@headgate.routine
async def fib(n: int):
    a, b = 0, 1
    for _ in range(n):
        yield a
        a, b = b, a + b
async def main():
    async with headgate.WorkerPool(spawn=2):
        async for x in fib(10):
            print(x)
            if x > 5:
                break
asyncio.run(main())
"""


def test_w02_the_generator_fib_runs_as_written(tmp_path: Path) -> None:
    done = script(SEED, tmp_path)
    assert (done.returncode, done.stdout.split(), done.stderr) == (0, ["0", "1", "1", "2", "3", "5", "8"], "")


# -- nested -----------------------------------------------------------------------------------------------------------


def test_w04_a_routine_reads_a_generator_of_a_peer(shared: Shared) -> None:
    @routine
    async def local(n: int) -> AsyncGenerator[int, None]:
        for i in range(n):
            yield i * i

    async def main() -> None:
        found = set()
        for _ in range(6):
            me, there = await stream_jobs.collects(stream_jobs.here, 3)
            assert len(set(there)) == 1
            found |= {(me, there[0])}
        assert {there for _, there in found} <= set(pids(shared.pool))
        assert any(me != there for me, there in found)
        assert (await stream_jobs.collects(local, 4))[1] == [0, 1, 4, 9]
        assert (await stream_jobs.collects(stream_jobs.count_ahead, 100))[1] == list(range(100))
        leaves = [pair async for pair in stream_jobs.pids_of_leaves(6)]
        assert len({me for me, _ in leaves}) == 1
        assert {leaf for _, leaf in leaves} == set(pids(shared.pool))

    shared(main)


def test_w04_generators_of_generators(shared: Shared) -> None:
    def expected(depth: int) -> list[int]:
        return [depth] + (expected(depth - 1) * 2 if depth else [])

    async def main() -> None:
        assert [x async for x in stream_jobs.walks(5)] == expected(5)
        stream: Any = stream_jobs.walks(5)
        assert await taken(stream, 6) == [5, 4, 3, 2, 1, 0]
        await stream.aclose()
        del stream
        gc.collect()
        await none_is_open(shared.pool)

    shared(main)


@pytest.mark.parametrize("way", ["aclose", "drop", "athrow"])
def test_w05_an_outer_generator_that_is_left_takes_its_inner_one_with_it(shared: Shared, log: str, way: str) -> None:
    async def main() -> None:
        stream: Any = stream_jobs.relays(log)
        assert [value for _, value in await taken(stream, 3)] == [0, 1, 2]
        if way == "aclose":
            await stream.aclose()
        elif way == "athrow":
            with pytest.raises(LookupError):
                await stream.athrow(LookupError("mine"))
        del stream
        gc.collect()
        await until(lambda: {"inner finally", "outer finally"} <= set(lines(log)))
        await none_is_open(shared.pool)

    shared(main)


# -- workers and clients that go --------------------------------------------------------------------------------------


def test_w40a_a_worker_killed_in_mid_stream_is_lost_to_its_streams_only(log: str) -> None:
    async def main() -> None:
        async with WorkerPool(spawn=2) as pool:
            streams = [stream_jobs.here(1000) for _ in range(8)]
            at = [await anext(stream) for stream in streams]
            waiting = [asyncio.create_task(first(stream_jobs.waits(log, str(number)))) for number in range(4)]
            await until(lambda: len(lines(log)) == 4)
            victim = at[0]
            uid = next(view.uid for view in pool.workers() if view.pid == victim)
            doomed = [stream for stream, pid in zip(streams, at, strict=True) if pid == victim]
            others = [stream for stream, pid in zip(streams, at, strict=True) if pid != victim]
            assert len(doomed) == 4
            kill(victim)
            # At once, and when everybody knows of it.
            for number, stream in enumerate(doomed[:2]):
                with pytest.raises(WorkerLost, match="here") as caught:
                    async with asyncio.timeout(10):
                        await anext(stream)
                assert str(uid) in str(caught.value.worker) or str(victim) in str(caught.value.worker)
                assert caught.value.task
                with pytest.raises(StopAsyncIteration):
                    await anext(stream)
                await stream.aclose()
                if number == 0:
                    await until(lambda: victim not in states(pool))
            async with asyncio.timeout(10):
                with contextlib.suppress(WorkerLost):
                    await doomed[2].aclose()
                lost, _ = await asyncio.wait(waiting, timeout=10, return_when=asyncio.FIRST_EXCEPTION)
            assert {type(task.exception()) for task in lost} == {WorkerLost}
            del doomed
            gc.collect()
            for stream in others:
                assert {await anext(stream)} == set(at) - {victim}
                await stream.aclose()
            for task in waiting:
                task.cancel()
            outcomes = await asyncio.gather(*waiting, return_exceptions=True)
            assert sorted(type(outcome).__name__ for outcome in outcomes) == ["CancelledError"] * 2 + ["WorkerLost"] * 2
            await all_ready(pool, 2)
            assert len({pid async for pid in stream_jobs.here(3)}) == 1
            await none_is_open(pool)

    run(main)


def test_w40a_with_prefetch_what_had_arrived_comes_before_the_loss(log: str) -> None:
    async def main() -> None:
        async with WorkerPool(spawn=1) as pool:
            stream = stream_jobs.noted_ahead_64(log, "it")
            assert await anext(stream) == 0
            far = await settled(log, "it", 64)
            victim = await jobs.pid()  # an answer after all of them
            kill(victim)
            await until(lambda: victim not in states(pool))
            got: list[int] = []
            with pytest.raises(WorkerLost):
                await read_into(got, stream)
            assert got == list(range(1, far))
            with pytest.raises(StopAsyncIteration):
                await anext(stream)
            await all_ready(pool, 1)
            assert [x async for x in stream_jobs.count_ahead(3)] == [0, 1, 2]

    run(main)


VANISHES = """
import asyncio, os, sys
import headgate
from tests.integration.workers import stream_jobs
from tests.support.workers.support import lines, pids, until

async def main(log):
    async with headgate.WorkerPool(spawn=1) as pool:
        paused, ahead = stream_jobs.noted(log, "paused"), stream_jobs.noted_ahead_3(log, "ahead")
        await anext(paused)
        await anext(ahead)
        async def step():
            async for _ in stream_jobs.waits(log, "waiting"):
                pass
        waiting = asyncio.create_task(step())
        await until(lambda: "waiting waits" in lines(log))
        os.write(1, f"{pids(pool)[0]}\\n".encode())
        await asyncio.sleep(120)

asyncio.run(main(sys.argv[1]))
"""


def test_w51_a_vanished_clients_generators_are_closed(tmp_path: Path, log: str) -> None:
    (tmp_path / "client.py").write_text(VANISHES)
    client = subprocess.Popen(
        [sys.executable, str(tmp_path / "client.py"), log],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        bufsize=0,
    )
    assert client.stdout is not None
    try:
        worker = int(read_line(client.stdout))
        client.kill()
        client.wait(PATIENCE)
        wait_until(lambda: not alive(worker))
    finally:
        client.kill()
        client.wait(PATIENCE)
        client.stdout.close()
    assert {line for line in lines(log) if line.endswith("finally")} == {
        "paused finally",
        "ahead finally",
        "waiting finally",
    }


def test_w51_the_generators_of_a_loop_that_ends_are_closed(shared: Shared, log: str) -> None:
    """Another loop of this process, which is a client of its own to the worker."""
    held: list[Stream] = []

    async def begin() -> None:
        for fn, name in ((stream_jobs.noted, "pulled"), (stream_jobs.noted_ahead_3, "ahead")):
            held.append(fn(log, name))
            await anext(held[-1])

    async def main() -> None:
        await in_thread(contextvars.copy_context().run, asyncio.run, begin())
        await until(lambda: {"pulled finally", "ahead finally"} <= set(lines(log)))
        await none_is_open(shared.pool)
        held.clear()
        gc.collect()

    shared(main)


def test_w35_leaving_the_pool_closes_paused_generators_and_does_not_wait_for_them(log: str) -> None:
    async def main() -> None:
        async with WorkerPool(spawn=2) as pool:
            paused = [stream_jobs.noted(log, f"paused-{number}") for number in range(4)]
            ahead = stream_jobs.noted_ahead_3(log, "ahead")
            fresh = stream_jobs.noted(log, "fresh")
            for stream in (*paused, ahead):
                await anext(stream)
            await settled(log, "ahead", 3)
            workers = pids(pool)
        assert not any(map(alive, workers))
        ended = [line for line in lines(log) if line.endswith("finally")]
        assert sorted(ended) == ["ahead finally", *(f"paused-{number} finally" for number in range(4))]
        with pytest.raises(PoolClosed):
            await anext(paused[0])
        with pytest.raises(StopAsyncIteration):
            await anext(paused[0])
        with pytest.raises(PoolClosed):
            async for _ in ahead:  # what had arrived may come first
                pass
        with contextlib.suppress(PoolClosed):
            await paused[1].aclose()
        with pytest.raises((LookupError, PoolClosed)):
            await paused[2].athrow(LookupError("mine"))
        with pytest.raises((PoolClosed, NoActivePool)):
            await anext(fresh)
        paused.clear()
        gc.collect()
        assert produced(log, "fresh") == 0

    run(main)


def test_w35_leaving_the_pool_cancels_a_step_that_takes_too_long(log: str) -> None:
    async def main() -> None:
        async with WorkerPool(spawn=1, shutdown_timeout=0.2):
            stream = stream_jobs.waits(log, "it", 1)
            await anext(stream)
            step = asyncio.create_task(first(stream))
            slow = stream_jobs.steady(1, 3, 0.05)
            last = asyncio.create_task(first(slow))
            await until(lambda: "it waits" in lines(log))
        with pytest.raises(PoolClosed):
            await step
        assert await last == (1, 0), "there was time for this one"
        assert lines(log) == ["it waits", "it finally"]
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
        with contextlib.suppress(PoolClosed):
            await slow.aclose()

    run(main)


def test_w35_a_pool_left_by_an_exception_closes_its_generators_too(log: str) -> None:
    async def main() -> None:
        async def fail() -> None:
            async with WorkerPool(spawn=1):
                async for _ in stream_jobs.noted(log, "it"):
                    raise LookupError("mine")

        with pytest.raises(LookupError, match="mine"):
            await fail()
        assert lines(log) == ["it 0", "it finally"]

    run(main)
