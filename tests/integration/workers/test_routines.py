"""W01-W04, W07, W08's timeouts, W09: what a routine is, where it runs, and what it knows about itself."""

from __future__ import annotations

import ast
import asyncio
import contextvars
import copy
import functools
import inspect
import math
import os
import pickle
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import headgate
from headgate import HeadgateError, InvalidArgument, InvalidType, NoActivePool, RoutineTimeout, WorkerPool, routine
from headgate.testing import capture_events
from headgate.workers.routines import OPEN, dispatch_limit
from headgate.workers.server.task_loop import THREADS
from tests.integration.workers import limit_jobs as limits
from tests.support.workers import jobs
from tests.support.workers.support import Shared, environment, in_flight, lines, pids, run, script, until

pytestmark = pytest.mark.integration


# -- what it looks like -----------------------------------------------------------------------------------------------


def test_w01_a_routine_looks_like_its_function() -> None:
    async def twice(x: int, *, more: str = "a") -> str:
        """Say it twice."""
        return more * x * 2

    made = routine(twice)
    assert inspect.iscoroutinefunction(made)
    assert asyncio.iscoroutinefunction(made)
    assert made.__wrapped__ is twice
    assert (made.__name__, made.__qualname__, made.__doc__) == (twice.__name__, twice.__qualname__, twice.__doc__)
    assert made.__module__ == __name__
    assert inspect.signature(made) == inspect.signature(twice)
    assert made.__annotations__ == twice.__annotations__


@pytest.mark.parametrize("options", [{}, {"timeout": 1}, {"timeout": 0.5, "retries": 2}, {"thread": True}])
def test_w01_the_decorator_may_have_options(options: dict[str, Any]) -> None:
    @routine(**options)
    async def one() -> int:
        return 1

    assert inspect.iscoroutinefunction(one)
    assert inspect.iscoroutinefunction(one.__wrapped__)


def test_w01_a_plain_function_becomes_a_coroutine_function() -> None:
    @routine
    def one() -> int:
        return 1

    assert inspect.iscoroutinefunction(one)
    assert not inspect.iscoroutinefunction(one.__wrapped__)


@pytest.mark.cold
def test_w01_decorating_needs_no_pool_and_no_grpc() -> None:
    code = """
        import sys, headgate
        @headgate.routine
        async def add(x, y): return x + y
        assert headgate.do_dispatch() is True and headgate.current_task() is None
        print("grpc" in sys.modules)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], env=environment(), capture_output=True, text=True, check=True
    )
    assert (done.stdout, done.stderr) == ("False\n", "")


class SomeClass:
    async def __call__(self) -> None: ...


@pytest.mark.parametrize("bad", [3, "add", 1.5, [jobs.add], object(), SomeClass, int, Exception])
def test_w03_what_is_no_function_is_refused_at_decoration(bad: Any) -> None:
    with pytest.raises(InvalidType) as caught:
        routine(bad)
    assert caught.value.remedy in str(caught.value)
    with pytest.raises(InvalidType):
        routine(retries=1)(bad)


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("timeout", -1),
        ("timeout", math.nan),
        ("timeout", "1"),
        ("timeout", []),
        ("retries", -1),
        ("retries", 1.5),
        ("retries", "1"),
        ("retries", None),
        ("thread", "yes"),
        ("thread", 3),
    ],
)
def test_w01_bad_options_are_refused_at_decoration(name: str, bad: Any) -> None:
    with pytest.raises((InvalidArgument, InvalidType), match=name) as caught:
        routine(**{name: bad})(jobs.add.__wrapped__)
    assert repr(bad) in str(caught.value) or type(bad).__name__ in str(caught.value)


def test_w01_an_unknown_option_is_refused() -> None:
    with pytest.raises(TypeError, match="patience"):
        routine(patience=3)


# -- when it is dispatched --------------------------------------------------------------------------------------------


def test_w01_dispatch_is_at_await(shared: Shared, log: str) -> None:
    async def main() -> None:
        with capture_events("workers") as events:
            call = jobs.noted_pid(log, 1)
            assert inspect.iscoroutine(call)
            for _ in range(5):
                await asyncio.sleep(0.01)
            assert lines(log) == []
            assert events.names == []
            assert await call in pids(shared.pool)
            assert lines(log) == ["1"]
            assert events.names.count("task_dispatched") == 1

    shared(main)


def test_w01_a_call_closed_before_it_was_awaited_is_never_made(shared: Shared, log: str) -> None:
    async def main() -> None:
        jobs.noted_pid(log, 1).close()
        await jobs.pid()
        await jobs.pid()
        assert lines(log) == []

    shared(main)


def test_w01_calls_run_elsewhere_and_spread_over_the_workers(shared: Shared) -> None:
    async def main() -> None:
        found = await asyncio.gather(*(jobs.pid() for _ in range(20)))
        assert set(found) == set(pids(shared.pool))
        assert os.getpid() not in found

    shared(main)


def test_w01_an_ordinary_task_runs_the_body(shared: Shared) -> None:
    """Bodies use asyncio.timeout, TaskGroup and current_task, which ask for one."""

    async def main() -> None:
        assert await jobs.is_a_task()

    shared(main)


# -- what can be one --------------------------------------------------------------------------------------------------


def test_w03_every_kind_of_method(shared: Shared) -> None:
    async def main() -> None:
        workers = pids(shared.pool)
        account = jobs.Account(10)
        balance, pid = await account.pay(5)
        assert (balance, pid in workers) == (15, True)
        assert account.balance == 10, "the worker has a copy"
        assert (await account.pay_in_a_thread(1))[0] == 11
        assert (await jobs.Account.pay(account, 7))[0] == 17
        for made in (jobs.Account.class_above, jobs.Account.class_below, account.class_above, account.class_below):
            name, x, pid = await made(3)
            assert (name, x, pid in workers) == ("Account", 3, True)
        for made in (jobs.Account.static_above, jobs.Account.static_below, account.static_above, account.static_below):
            x, pid = await made(4)
            assert (x, pid in workers) == (4, True)

    shared(main)


def test_w03_methods_are_inherited_and_overridden(shared: Shared) -> None:
    async def main() -> None:
        assert (await jobs.Savings.class_above(3))[0] == "Savings"
        assert (await jobs.Savings.class_below(3))[0] == "Savings"
        assert (await jobs.Savings(1).pay_in_a_thread(2))[0] == 3
        assert (await jobs.Savings(1).pay(2))[0] == 6

    shared(main)


def test_w03_methods_look_like_methods() -> None:
    assert inspect.iscoroutinefunction(jobs.Account(1).pay)
    assert inspect.iscoroutinefunction(jobs.Account.class_above)
    assert inspect.iscoroutinefunction(jobs.Account.static_above)
    assert jobs.Account.pay.__doc__ == "Pay in."


def test_w03_closures_and_local_functions(shared: Shared) -> None:
    factor = 3

    @routine
    async def times(x: int) -> tuple[int, int]:
        return x * factor, os.getpid()

    @routine
    async def calls_a_helper(x: int) -> int:
        def helper(y: int) -> int:
            return y + factor

        return helper(x)

    async def main() -> None:
        nonlocal factor
        result, pid = await times(2)
        assert (result, pid in pids(shared.pool)) == (6, True)
        factor = 10
        assert (await times(2))[0] == 20, "a closure sees its current cells"
        assert await calls_a_helper(1) == 11

    shared(main)


def test_w03_what_a_closure_changes_is_seen_by_no_later_call(shared: Shared) -> None:
    seen: list[int] = []

    @routine
    async def remember(x: int) -> list[int]:
        seen.append(x)
        return seen

    async def main() -> None:
        for x in range(6):
            assert await remember(x) == [x]
        assert seen == []
        seen.append(100)
        assert await remember(7) == [100, 7]

    shared(main)


def test_w03_lambdas(shared: Shared) -> None:
    async def main() -> None:
        assert await routine(lambda x: x + 1)(2) == 3
        assert await routine(lambda: os.getpid())() in pids(shared.pool)

    shared(main)


def test_w03_a_local_class(shared: Shared) -> None:
    class Point:
        def __init__(self, x: int) -> None:
            self.x = x

        @routine
        async def moved(self, by: int) -> Any:
            return type(self)(self.x + by)

        @routine
        @classmethod
        async def origin(cls) -> Any:
            return cls(0)

    async def main() -> None:
        moved = await Point(3).moved(4)
        assert (type(moved).__name__, moved.x) == ("Point", 7)
        assert (await Point.origin()).x == 0

    shared(main)


def test_w03_a_plain_function_is_awaited_and_runs_in_a_thread(shared: Shared) -> None:
    async def main() -> None:
        result, pid, in_main = await jobs.plain(2)
        assert (result, pid in pids(shared.pool), in_main) == (3, True, False)
        assert await jobs.plain_without_a_loop()

    shared(main)


def test_w03_partials_copies_and_pickles_of_a_routine(shared: Shared) -> None:
    assert pickle.loads(pickle.dumps(jobs.add)) is jobs.add
    assert copy.deepcopy(jobs.add) is jobs.add

    async def main() -> None:
        assert await functools.partial(jobs.add, 1)(2) == 3
        assert await jobs.is_add(jobs.add)
        assert await jobs.echo(jobs.add) is jobs.add

    shared(main)


def test_w03_a_routine_may_be_an_argument(shared: Shared) -> None:
    @routine
    async def local(x: int) -> int:
        return x + 1

    async def main() -> None:
        assert await jobs.apply(jobs.add, 1, 2) == 3
        assert await jobs.apply(local, 1) == 2

    shared(main)


def test_w03_a_worker_has_the_path_folder_and_environment_of_its_parent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = tmp_path / "library with space"
    library.mkdir()
    (library / "headgate_found_me.py").write_text("VALUE = 'found'")
    monkeypatch.chdir(tmp_path)
    here = os.getcwd()
    monkeypatch.setenv("HEADGATE_TEST_VALUE", "a b=c\nd ü")
    monkeypatch.syspath_prepend(library)

    async def main() -> None:
        async with WorkerPool(spawn=1):
            folder, value, path = await jobs.surroundings("HEADGATE_TEST_VALUE")
            assert (folder, value) == (here, "a b=c\nd ü")
            assert [entry for entry in path if entry in sys.path] == sys.path
            assert await jobs.import_by_name("headgate_found_me") == "found"

    run(main)


MAIN = """
import asyncio, dataclasses, os, sys
import headgate

base = 1
seen = []

class Oops(Exception):
    def __init__(self, *, field):
        super().__init__(field)
        self.field = field

@dataclasses.dataclass
class Point:
    x: int

def helper():
    return base * 10

@headgate.routine
async def look():
    seen.append(base)
    return base, helper(), len(seen)

@headgate.routine
async def change():
    global base
    base = 99
    seen.append("changed")
    return helper()

@headgate.routine
async def move(point):
    return Point(point.x + 1)

@headgate.routine
async def fail():
    raise Oops(field="mine")

@headgate.routine
async def fib(n):
    if n <= 1:
        return n
    async with asyncio.TaskGroup() as tg:
        a = tg.create_task(fib(n - 1))
        b = tg.create_task(fib(n - 2))
    return a.result() + b.result()

@headgate.routine
def plain():
    return helper(), os.getpid() != PARENT

PARENT = os.getpid()

async def main():
    global base, helper
    async with headgate.WorkerPool(spawn=1):
        for _ in range(3):
            assert await look() == (1, 10, 1)
        base = 2
        assert await look() == (2, 20, 1)
        assert await change() == 990
        assert await look() == (2, 20, 1)
        assert (base, seen) == (2, [])
        seen.append(0)
        assert await look() == (2, 20, 2)
        moved = await move(Point(1))
        assert type(moved) is Point and moved == Point(2)
        try:
            await fail()
        except Oops as error:
            assert error.field == "mine"
        else:
            raise AssertionError
        assert await fib(4) == 3
        assert await plain() == (20, True)
        helper = lambda: "another"
        assert await look() == (2, "another", 2)
    print("fine")

asyncio.run(main())
"""


def test_w03_a_function_of_main_sees_its_globals_of_now(tmp_path: Path) -> None:
    done = script(MAIN, tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "fine\n", "")


QUICK_START = """
import ast
import asyncio
import headgate
@headgate.routine
async def add(x: int, y: int) -> int:
    return x + y
async def main():
    async with headgate.WorkerPool(spawn=4):
        result = await add(1, 2)
        print(result) # 3
asyncio.run(main())
"""


def test_w02_the_quick_start_runs_as_written(tmp_path: Path) -> None:
    done = script(QUICK_START, tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "3\n", "")


@pytest.mark.parametrize("way", ["-", "exec"])
def test_w03_functions_that_no_file_holds(way: str) -> None:
    """A notebook's functions have a `__main__` and no file that a worker could read."""
    code = QUICK_START.replace("spawn=4", "spawn=1")
    command = [sys.executable, "-"]
    if way == "exec":
        command = [sys.executable, "-c", f"exec(compile({code!r}, '<cell 1>', 'exec'))"]
    done = subprocess.run(
        command, input=code if way == "-" else "", env=environment(), capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "3\n", "")


# -- the gate ---------------------------------------------------------------------------------------------------------


def test_w04_the_body_runs_on_the_worker_and_what_it_calls_goes_to_peers(shared: Shared) -> None:
    async def main() -> None:
        workers = set(pids(shared.pool))
        found: set[int] = set()
        for _ in range(4):
            me, leaves = await jobs.leaves(6)
            assert me in workers
            found |= set(leaves)
            assert any(pid != me for pid in leaves)
        assert found == workers

    shared(main)


def test_w02_recursive_fib_with_a_task_group(shared: Shared) -> None:
    async def main() -> None:
        assert await jobs.fib(7) == 13

    shared(main)


def test_w04_a_closed_gate_runs_here(shared: Shared) -> None:
    me = os.getpid()

    async def main() -> None:
        assert headgate.do_dispatch() is True
        with headgate.do_dispatch(False):
            assert headgate.do_dispatch() is False
            assert await jobs.pid() == me
            assert await jobs.leaves(3) == (me, [me] * 3)
            assert await jobs.is_outside()
            with headgate.do_dispatch(True):
                assert await jobs.pid() in pids(shared.pool)
            assert await jobs.pid() == me
            values: list[Any] = []
            assert await jobs.append_to(values) is values
        assert headgate.do_dispatch() is True
        assert await jobs.pid() in pids(shared.pool)

    shared(main)


def test_w04_a_closed_gate_needs_no_pool() -> None:
    async def main() -> None:
        with headgate.do_dispatch(False):
            assert await jobs.pid() == os.getpid()
            assert await jobs.fib(5) == 5
            assert (await jobs.plain(1))[:2] == (2, os.getpid())

    run(main)


def test_w04_the_gate_is_opened_again_by_an_exception() -> None:
    with pytest.raises(LookupError):
        with headgate.do_dispatch(False):
            raise LookupError
    assert headgate.do_dispatch() is True


def test_w04_the_gate_is_of_one_task(shared: Shared) -> None:
    async def main() -> None:
        closed = asyncio.Event()
        go_on = asyncio.Event()

        async def close_it() -> int:
            with headgate.do_dispatch(False):
                closed.set()
                await go_on.wait()
                return await jobs.pid()

        other = asyncio.create_task(close_it())
        await closed.wait()
        assert headgate.do_dispatch() is True
        assert await jobs.pid() in pids(shared.pool)
        go_on.set()
        assert await other == os.getpid()

    shared(main)


def test_w04_a_gate_closed_on_a_worker_keeps_the_leaves_there(shared: Shared) -> None:
    async def main() -> None:
        for _ in range(2):
            me, leaves = await jobs.leaves_here(3)
            assert leaves == [me] * 3
            assert me in pids(shared.pool)

    shared(main)


# -- no pool ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def nothing_open() -> Iterator[None]:
    """As in a program of its own: the error tells of other pools that are open, and tests may share one."""
    others = list(OPEN)
    OPEN.clear()
    yield
    OPEN.update(others)


@pytest.mark.usefixtures("nothing_open")
def test_w07_without_a_pool_the_error_shows_what_to_add() -> None:
    async def main() -> None:
        with pytest.raises(NoActivePool) as caught:
            await jobs.add(1, 2)
        said = str(caught.value)
        assert "add" in said
        [first, second, third] = [line for line in said.splitlines() if line.startswith("    ")]
        assert first.strip() == "import headgate"
        assert second.strip() == "async with headgate.WorkerPool():"
        assert third.startswith(" " * 8), "the call, inside of it"
        assert isinstance(caught.value, HeadgateError)

    run(main)


class Notebook:
    """Runs cells as IPython does: top-level await, names in common, a task and a context for each cell."""

    def __init__(self) -> None:
        self.names: dict[str, Any] = {"__name__": "__main__"}

    async def cell(self, source: str) -> None:
        code = compile(source, "<cell>", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        running = eval(code, self.names)
        if running is not None:
            await asyncio.create_task(running, context=contextvars.Context())

    async def remedies(self, source: str) -> list[str]:
        """The pieces of code in the remedy of the NoActivePool that a cell raises."""
        with pytest.raises(NoActivePool) as caught:
            await self.cell(source)
        lines = [line if line.startswith("    ") or not line else "---" for line in str(caught.value).splitlines()]
        return [piece for piece in map(textwrap.dedent, "\n".join(lines).split("---")) if piece.strip()]


@pytest.mark.usefixtures("nothing_open")
@pytest.mark.parametrize("name", ["add", pytest.param("count", marks=pytest.mark.soak)])
def test_w07_the_remedy_works_when_it_is_pasted(name: str) -> None:
    """Into a cell of a notebook, and into an async function of a script."""
    asks = {"add": "result = await add(1, 2)", "count": "result = [item async for item in count(3)]"}[name]
    arguments = {"add": "1, 2", "count": "3"}[name]

    async def main() -> None:
        notebook = Notebook()
        await notebook.cell(
            "from tests.support.workers.jobs import add\nfrom tests.integration.workers.stream_jobs import count"
        )
        [opens] = await notebook.remedies(asks)
        printed: list[Any] = []
        notebook.names["print"] = printed.append
        await notebook.cell(opens.replace("...", arguments))
        assert notebook.names.pop("result", None) == 3 or printed == [0, 1, 2]

        script = {**notebook.names, "headgate": None}
        body = textwrap.indent(opens.replace("...", arguments), "    ")
        exec(f"async def main():\n{body}\n    return locals().get('result')", script)
        printed.clear()
        assert await script["main"]() == 3 or printed == [0, 1, 2]

        await notebook.cell("import headgate\nworkers = headgate.WorkerPool(spawn=1)\nawait workers.__aenter__()")
        pieces = await notebook.remedies(asks)
        assert len(pieces) == 2
        for piece in pieces:
            printed.clear()
            await notebook.cell(piece.replace("...", arguments))
            assert notebook.names.pop("result", None) == 3 or printed == [0, 1, 2]
        await notebook.cell("await workers.__aexit__(None, None, None)")

    run(main)


def test_w07_after_the_block_there_is_no_pool() -> None:
    async def main() -> None:
        async with WorkerPool(spawn=1):
            assert await jobs.add(1, 2) == 3
        with pytest.raises(NoActivePool):
            await jobs.add(1, 2)

    run(main)


def test_w07_calling_without_awaiting_needs_no_pool() -> None:
    jobs.add(1, 2).close()


# -- timeouts ---------------------------------------------------------------------------------------------------------


def test_w08_a_timeout_ends_the_routine_on_its_worker(shared: Shared, log: str) -> None:
    async def main() -> None:
        with pytest.raises(RoutineTimeout) as caught:
            await jobs.bounded(60, log)
        assert isinstance(caught.value, TimeoutError)
        assert isinstance(caught.value, HeadgateError)
        assert "bounded" in str(caught.value)
        assert "0.3" in str(caught.value)
        await until(lambda: lines(log) == ["begun", "ended"])
        await until(lambda: in_flight(shared.pool) == 0)
        assert await jobs.add(1, 2) == 3

    shared(main)


def test_w08_a_routine_that_is_quicker_is_not_disturbed(shared: Shared, log: str) -> None:
    async def main() -> None:
        assert await jobs.bounded(0.01, log) == "done"

    shared(main)


def test_w08_a_timeout_while_the_loop_was_held_is_one_too(shared: Shared) -> None:
    async def main() -> None:
        with pytest.raises(RoutineTimeout):
            await jobs.bounded_blocking(0.7)
        assert await jobs.add(1, 2) == 3

    shared(main)


def test_w08_a_function_in_a_thread_has_its_timeout_too(shared: Shared) -> None:
    async def main() -> None:
        with pytest.raises(RoutineTimeout):
            await jobs.bounded_thread(1.0)
        assert await jobs.add(1, 2) == 3

    shared(main)


def test_w08_a_timeout_of_the_routines_own_is_its_own(shared: Shared) -> None:
    async def main() -> None:
        with pytest.raises(TimeoutError, match="my own") as caught:
            await jobs.own_timeout()
        assert not isinstance(caught.value, RoutineTimeout)
        with pytest.raises(TimeoutError) as caught:
            await jobs.inner_timeout()
        assert not isinstance(caught.value, RoutineTimeout)

    shared(main)


def test_w08_the_callers_own_timeout_is_the_callers(shared: Shared, log: str) -> None:
    async def ends_when_begun(limit: asyncio.Timeout) -> None:
        await until(lambda: lines(log))
        limit.reschedule(asyncio.get_running_loop().time())

    async def within_its_time() -> None:
        async with asyncio.timeout(None) as limit:
            ending = asyncio.create_task(ends_when_begun(limit))
            await jobs.endless(log)
        await ending

    async def main() -> None:
        with pytest.raises(TimeoutError) as caught:
            await within_its_time()
        assert not isinstance(caught.value, RoutineTimeout)
        assert lines(log) == ["begun", "ended"]

    shared(main)


@pytest.mark.parametrize("bad", [-1, math.nan, "1", []])
def test_w08_a_bad_dispatch_timeout_is_refused(bad: Any) -> None:
    with pytest.raises((InvalidArgument, InvalidType), match="dispatch_timeout"):
        headgate.RuntimeContext(dispatch_timeout=bad)


def test_w08_a_dispatch_timeout_does_not_bound_the_routine(shared: Shared) -> None:
    async def main() -> None:
        with headgate.RuntimeContext(dispatch_timeout=1.0):
            assert await jobs.slow(1.5, "late") == "late"

    shared(main)


def test_w08_a_dispatch_timeout_reaches_nested_calls(shared: Shared) -> None:
    async def main() -> None:
        assert await limits.limit_at_depth(1) == [None, None]
        with headgate.RuntimeContext(dispatch_timeout=7.5):
            assert await limits.limit_at_depth(2) == [7.5, 7.5, 7.5]
            assert await limits.limit_in_a_thread() == 7.5
            assert [limit async for limit in limits.limits_of_items()] == [7.5, 7.5]
            found = await shared.pool.broadcast(limits.limit_at_depth, 1)
            assert list(found.values()) == [[7.5, 7.5]] * len(found)
            async with headgate.TaskPool(workers=shared.pool) as tasks:
                assert await (await tasks.submit(limits.limit_at_depth, 1)) == [7.5, 7.5]
        assert await limits.limit_at_depth(1) == [None, None], "nothing of it is left on the worker"

    shared(main)


def test_w08_a_nested_call_that_is_not_begun_in_time_raises_dispatch_timeout(log: str) -> None:
    async def main() -> None:
        async with WorkerPool(spawn=1):
            crowd = [asyncio.create_task(limits.stays_within_time(log, 1.5)) for _ in range(THREADS)]
            await until(lambda: len(lines(log)) == THREADS)
            with headgate.RuntimeContext(dispatch_timeout=0.3), pytest.raises(headgate.DispatchTimeout):
                await limits.calls_short()
            await asyncio.gather(*crowd)

    run(main)


def test_w08_a_runtime_context_without_an_argument_leaves_the_outer_limit() -> None:
    with headgate.RuntimeContext() as nothing:
        assert nothing.dispatch_timeout is None
    with headgate.RuntimeContext(dispatch_timeout=2):
        with headgate.RuntimeContext() as inner:
            assert inner.dispatch_timeout == 2
            assert dispatch_limit() == 2
        with headgate.RuntimeContext(dispatch_timeout=None) as lifted:
            assert lifted.dispatch_timeout is None
            assert dispatch_limit() is None
        assert dispatch_limit() == 2
    assert dispatch_limit() is None


# -- what a task knows about itself -----------------------------------------------------------------------------------


def test_w09_outside_a_worker_there_is_no_task(shared: Shared) -> None:
    assert headgate.current_task() is None

    async def main() -> None:
        assert headgate.current_task() is None
        await jobs.pid()
        assert headgate.current_task() is None

    shared(main)


def test_w09_a_task_has_an_id_a_tag_a_timeout_and_no_caller(shared: Shared) -> None:
    async def main() -> None:
        found = await asyncio.gather(*(jobs.my_task() for _ in range(20)))
        assert len({str(fields["id"]) for fields in found}) == 20
        assert {fields["caller"] for fields in found} == {None}
        assert {fields["timeout"] for fields in found} == {20}

    shared(main)


def test_w09_a_nested_task_knows_its_caller(shared: Shared) -> None:
    async def main() -> None:
        for _ in range(3):
            outer, inner = await jobs.my_task_and_a_nested_one()
            assert outer["caller"] is None
            assert inner["caller"] == outer["id"]
            assert inner["id"] != outer["id"]

    shared(main)


def test_w09_concurrent_tasks_of_one_worker_are_not_mixed_up(shared: Shared) -> None:
    async def main() -> None:
        found = await asyncio.gather(*(jobs.my_task_after_a_turn() for _ in range(30)))
        assert len({str(fields["id"]) for fields in found}) == 30
        assert {fields["timeout"] for fields in found} == {None}
        in_threads = await asyncio.gather(*(jobs.my_task_in_a_thread() for _ in range(5)))
        assert len({str(fields["id"]) for fields in in_threads}) == 5

    shared(main)


def test_w09_the_tag_says_where_the_routine_stands(shared: Shared) -> None:
    @routine
    async def local() -> str:
        task = headgate.current_task()
        assert task is not None
        return task.tag

    def place(function: Any) -> tuple[str, range]:
        source, first = inspect.getsourcelines(function)
        return f"{function.__module__}.{function.__qualname__}", range(first, first + len(source))

    async def main() -> None:
        for tag, function in (((await jobs.my_task())["tag"], jobs.my_task), (await local(), local)):
            found = re.fullmatch(r"(.+):(\d+)", tag)
            assert found is not None
            name, rows = place(function.__wrapped__)
            assert found[1] == name
            assert int(found[2]) in rows

    shared(main)


def test_w82_a_worker_keeps_no_context_of_a_former_call(shared: Shared) -> None:
    async def main() -> None:
        for _ in range(6):
            assert await jobs.swap_variable("left") == "unset"

    shared(main)


def test_w25_the_active_pool_travels_with_the_context(shared: Shared) -> None:
    async def main() -> None:
        inside = contextvars.copy_context()
        assert await asyncio.create_task(jobs.add(1, 2), context=inside) == 3
        outside = contextvars.Context()
        with pytest.raises(NoActivePool):
            await asyncio.create_task(jobs.add(1, 2), context=outside)

    shared(main)


def test_w01_a_thousand_calls_at_once(shared: Shared, scale: float) -> None:
    count = max(1000, int(10_000 * scale))

    async def main() -> None:
        assert await asyncio.gather(*(jobs.add(n, 1) for n in range(count))) == list(range(1, count + 1))
        assert in_flight(shared.pool) == 0

    shared(main)


def test_w01_a_misspelt_option_of_a_routine_names_the_nearest() -> None:
    with pytest.raises(InvalidType, match=r"@routine has no option 'timout'.* Did you mean timeout\?"):
        routine(timout=3)  # type: ignore[call-overload]
