"""W34a: the modules that calls need are imported in a thread, while other calls of the worker proceed."""

from __future__ import annotations

import asyncio
import ctypes
import importlib
import os
import sys
import textwrap
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from headgate import ContextVar, PoolClosed, RemoteError, RoutineTimeout, WorkerPool, routine
from headgate.testing import capture_events
from tests.support.workers import jobs
from tests.support.workers.support import alive, in_flight, lines, pids, run, states, until

pytestmark = pytest.mark.integration

VALUE: ContextVar[Any] = ContextVar("w34a_value", default=None)

THREADS = 32
"""Number of plain functions that a worker runs at a time."""

MODULE = """
import asyncio, os, time
from pathlib import Path
from headgate import routine

IN_WORKER = os.getpid() != {parent}

class Value:
    def __init__(self, number):
        self.number = number

@routine
def plain(number): return VALUE + number

@routine(timeout=0.3)
def plain_within_time(number): return VALUE + number

@routine
async def coroutine(number): return VALUE + number

@routine(timeout=0.3)
async def within_time(number): return VALUE + number

@routine
async def items(number):
    yield VALUE + number

def read_with_the_gil(path):
    from tests.integration.workers.test_imports import read_with_the_gil
    read_with_the_gil(path)

def wait_for(path):
    while not Path(path).exists():
        time.sleep(0.005)

if IN_WORKER:
    with open({log!r}, "a") as file:
        file.write("importing {name}\\n")
{body}
VALUE = 41
"""


class Planted:
    """Modules that take as long to import on workers as a test wants. Here they are imported at once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = str(folder / "log")
        self.go = str(folder / "go")
        self.names: list[str] = []

    def module(self, body: str = "wait_for(GO)", name: str = "") -> Any:
        name = name or f"w34a_{len(self.names)}_{self.folder.name}"
        self.names.append(name)
        body = textwrap.indent(textwrap.dedent(body).strip().replace("GO", repr(self.go)), "    ")
        path = self.folder / f"{name.replace('.', '/')}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(MODULE.format(parent=os.getpid(), log=self.log, name=name, body=body))
        importlib.invalidate_caches()
        return importlib.import_module(name)

    @property
    def begun(self) -> list[str]:
        """The modules whose import has begun on a worker, in that order."""
        return [line.split()[1] for line in lines(self.log)]

    def release(self) -> None:
        """Let imports end that wait."""
        jobs.note(self.go, "go")


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Planted]:
    monkeypatch.syspath_prepend(tmp_path)
    made = Planted(tmp_path)
    yield made
    for name in made.names:
        sys.modules.pop(name, None)


@asynccontextmanager
async def one_worker(**options: Any) -> AsyncIterator[WorkerPool]:
    """A pool whose worker has imported the modules of these tests: imports wait for each other."""
    async with WorkerPool(spawn=1, **options) as pool:
        assert await jobs.pid() == await plain_pid()
        yield pool


@contextmanager
def never_blocked() -> Iterator[None]:
    with capture_events("workers") as events:
        yield
    assert not {"worker_blocked", "worker_lost"} & set(events.names)


@routine
def number_of(value: Any) -> int:
    return 41 + int(value.number)


@routine
async def begun_at(value: Any) -> float:
    """When this call began. Holds the loop for a moment."""
    began = time.monotonic()
    while time.monotonic() < began + 0.02:
        pass
    return began


@routine
async def soon_number_of(value: Any) -> int:
    return 41 + int(value.number)


@routine
async def number_set() -> int:
    return 41 + int(VALUE.get().number)


@routine
def plain_pid() -> int:
    return os.getpid()


@routine(timeout=1.5)
def number_within_time(value: Any) -> int:
    return 41 + int(value.number)


@routine
def stays(path: str) -> None:
    """Until there is a file `path`.go."""
    jobs.note(path, "begun")
    while not os.path.exists(f"{path}.go"):
        time.sleep(0.01)


def read_with_the_gil(path: str) -> None:
    """Until something is written to this pipe."""
    pipe = os.open(path, os.O_RDWR)  # so that it opens without a writer
    ctypes.PyDLL(None).read(pipe, ctypes.create_string_buffer(1), 1)
    os.close(pipe)


@routine
async def holds_the_lock(path: str) -> int:
    jobs.note(f"{path}.begun", "begun")
    read_with_the_gil(path)
    return 42


@routine
async def holds_the_lock_again_and_again(path: str) -> None:
    """Until there is a file `path`.go."""
    jobs.note(path, "begun")
    while not os.path.exists(f"{path}.go"):  # noqa: ASYNC240 - it blocks anyway
        jobs.sleep_with_the_gil(2.0)
        await asyncio.sleep(0.02)


class Noted:
    """A number that notes that it is added to another."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __radd__(self, other: int) -> int:
        jobs.note(self.path, "begun")
        return other + 1


async def sees(module: Any, plain: bool) -> int:
    """Call a function that is sent by value and sees the module."""
    if plain:

        def seeing(number: int) -> int:
            return int(module.VALUE + number)

        return await routine(seeing)(1)

    async def seeing_soon(number: int) -> int:
        return int(module.VALUE + number)

    return await routine(seeing_soon)(1)


async def with_value_set(module: Any) -> int:
    VALUE.set(module.Value(1))
    return await number_set()


async def first(module: Any) -> int:
    async for item in module.items(1):
        return int(item)
    raise AssertionError("no item")


CALLS: dict[str, Callable[[Any], Any]] = {
    "plain function": lambda module: module.plain(1),
    "coroutine function": lambda module: module.coroutine(1),
    "generator": first,
    "by value, plain": lambda module: sees(module, plain=True),
    "by value, coroutine": lambda module: sees(module, plain=False),
    "argument of a plain function": lambda module: number_of(module.Value(1)),
    "argument of a coroutine function": lambda module: soon_number_of(module.Value(1)),
    "long argument": lambda module: soon_number_of(with_ballast(module.Value(1))),
    "context variable": with_value_set,
}


def with_ballast(value: Any) -> Any:
    value.ballast = os.urandom(1024 * 1024)
    return value


# -- the loop stays free ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", CALLS)
def test_w34a_other_calls_proceed_while_a_module_is_imported(planted: Planted, what: str) -> None:
    module = planted.module()

    async def main() -> None:
        async with one_worker() as pool:
            [worker] = pids(pool)
            with never_blocked():
                waiting = asyncio.create_task(CALLS[what](module))
                await until(lambda: planted.begun)
                async with asyncio.timeout(10):
                    assert await jobs.pid() == await plain_pid() == worker
                assert states(pool) == {worker: "ready"}
                assert not waiting.done()
                planted.release()
                assert await waiting == 42
                assert await CALLS[what](module) == 42
            assert len(planted.begun) == 1

    run(main)


def test_w34a_calls_that_wait_for_an_import_hold_no_thread_places(planted: Planted) -> None:
    """There are 32 of them."""
    module = planted.module()

    async def main() -> None:
        async with one_worker():
            waiting = [asyncio.create_task(module.plain(n)) for n in range(40)]
            waiting += [asyncio.create_task(number_of(module.Value(n))) for n in range(40)]
            await until(lambda: planted.begun)
            async with asyncio.timeout(10):
                await plain_pid()
            planted.release()
            assert await asyncio.gather(*waiting) == [41 + n for n in range(40)] * 2
            assert len(planted.begun) == 1

    run(main)


def test_w34a_a_function_that_is_loaded_needs_no_other_thread(planted: Planted) -> None:
    module = planted.module("pass")

    @routine
    async def threads_started(count: bool) -> list[str]:
        if count:
            threading.started = []  # type: ignore[attr-defined]
            start = threading.Thread.start

            def counted(self: threading.Thread) -> None:
                threading.started.append(self.name)  # type: ignore[attr-defined]
                start(self)

            threading.Thread.start = counted  # type: ignore[method-assign]
        return list(threading.started)  # type: ignore[attr-defined]

    async def main() -> None:
        async with one_worker():
            assert await threads_started(True) == []
            assert await soon_number_of(module.Value(1)) == 42
            started = await threads_started(False)
            assert set(started) == {"headgate import"}, "it does start them that way"
            for _ in range(20):
                assert await module.coroutine(1) == await soon_number_of(module.Value(1)) == 42
            assert await threads_started(False) == started

    run(main)


def said(capfd: pytest.CaptureFixture[str]) -> list[str]:
    """What workers wrote to stderr, without what a busy machine adds: that importing this module took long."""
    return [line for line in capfd.readouterr().err.splitlines() if not line.startswith(f"importing {__name__} took ")]


# -- what is said -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["plain function", "by value, coroutine"])
def test_w34a_a_slow_import_is_one_line(planted: Planted, capfd: pytest.CaptureFixture[str], what: str) -> None:
    module = planted.module("time.sleep(2)")

    async def main() -> None:
        async with one_worker():
            assert await asyncio.gather(*(CALLS[what](module) for _ in range(3))) == [42] * 3

    run(main)
    [line] = said(capfd)
    assert line.startswith(f"importing {module.__name__} took "), line


def test_w34a_the_line_names_the_package_that_took_the_time(
    planted: Planted, capfd: pytest.CaptureFixture[str]
) -> None:
    """As pandas for a DataFrame, whose class is in pandas.core.frame."""
    name = f"w34a_package_{planted.folder.name}"
    planted.module("time.sleep(1.2)", name=f"{name}.__init__")
    sys.modules.pop(f"{name}.__init__")
    module = planted.module("pass", name=f"{name}.inner")

    async def main() -> None:
        async with one_worker():
            assert await soon_number_of(module.Value(1)) == 42

    run(main)
    sys.modules.pop(name)
    [line] = said(capfd)
    assert line.startswith(f"importing {name} took "), line


def test_w34a_an_import_that_holds_the_interpreters_lock_dumps_no_stacks(
    planted: Planted, capfd: pytest.CaptureFixture[str]
) -> None:
    """As loading a large C extension does."""
    module = planted.module("import ctypes; ctypes.PyDLL(None).usleep(2_500_000)")

    async def main() -> None:
        async with one_worker():
            assert await module.coroutine(1) == 42

    run(main)
    [line] = said(capfd)
    assert line.startswith(f"importing {module.__name__} took "), line


def test_w34a_a_quick_import_is_not_worth_a_line(planted: Planted, capfd: pytest.CaptureFixture[str]) -> None:
    module = planted.module("pass")

    async def main() -> None:
        async with one_worker():
            assert await module.coroutine(1) == await module.plain(1) == 42

    run(main)
    assert said(capfd) == []


def test_w34a_an_import_in_the_body_of_a_coroutine_function_is_named_in_one_line(
    planted: Planted, capfd: pytest.CaptureFixture[str]
) -> None:
    name = planted.module("time.sleep(2)").__name__

    async def main() -> None:
        async with one_worker():
            assert await jobs.import_by_name(name) == "41"

    run(main)
    [line] = said(capfd)
    assert "import_by_name" in line
    assert f" imports {name} while it runs, which holds the loop of worker " in line


# -- imports that fail ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", [what for what in CALLS if what != "context variable"])
def test_w34a_what_an_import_raises_reaches_every_caller_and_the_next_call_tries_again(
    planted: Planted, what: str
) -> None:
    module = planted.module("wait_for(GO); raise LookupError('no licence')")

    async def main() -> None:
        async with one_worker():
            calls = [asyncio.create_task(CALLS[what](module)) for _ in range(3)]
            await until(lambda: planted.begun)
            assert await jobs.add(1, 2) == 3
            planted.release()
            found: list[Any] = await asyncio.gather(*calls, return_exceptions=True)
            for error in found:
                assert isinstance(error, RemoteError)
                assert "LookupError: no licence" in str(error)
                assert isinstance(error.__cause__, LookupError)
                [note] = error.__notes__
                assert note.count(f"{module.__name__}.py") == 1, "with its traceback, once"
            before = len(planted.begun)
            with pytest.raises(RemoteError, match="no licence"):
                await CALLS[what](module)
            assert len(planted.begun) == before + 1

    run(main)


def test_w34a_a_value_of_a_context_variable_whose_import_fails_is_dropped(planted: Planted) -> None:
    module = planted.module("raise LookupError('no licence')")

    @routine
    async def value() -> Any:
        return VALUE.get()

    async def main() -> None:
        async with one_worker():
            VALUE.set(module.Value(1))
            assert await value() is None

    run(main)


def test_w34a_a_missing_module_is_named(planted: Planted) -> None:
    module = planted.module("pass")

    async def main() -> None:
        async with one_worker():
            (planted.folder / f"{module.__name__}.py").unlink()
            for call in (module.plain(1), sees(module, plain=False), soon_number_of(module.Value(1))):
                with pytest.raises(RemoteError, match=f"needs the module {module.__name__}, which the worker cannot"):
                    await call
            assert await jobs.add(1, 2) == 3

    run(main)


def test_w34a_sys_exit_at_import_fails_the_call_only(planted: Planted) -> None:
    module = planted.module("raise SystemExit(3)")

    async def main() -> None:
        async with one_worker() as pool:
            before = pids(pool)
            for call in (module.plain(1), soon_number_of(module.Value(1))):
                with pytest.raises(RemoteError, match="SystemExit: 3"):
                    await call
            assert pids(pool) == before

    run(main)


# -- order ------------------------------------------------------------------------------------------------------------


def test_w34a_modules_are_imported_one_after_the_other(planted: Planted) -> None:
    """Two threads that import modules which import each other would see one of them half initialized."""
    package = f"w34a_circle_{planted.folder.name}"
    one = planted.module(f"wait_for(GO); import {package}.two; assert {package}.two.VALUE", name=f"{package}.one")
    two = planted.module(f"import {package}.one", name=f"{package}.two")

    async def main() -> None:
        async with one_worker():
            calls = [asyncio.create_task(one.coroutine(1))]
            await until(lambda: planted.begun)
            calls.append(asyncio.create_task(two.coroutine(1)))
            await jobs.add(1, 2)
            planted.release()
            assert await asyncio.gather(*calls) == [42, 42]
            assert planted.begun == [one.__name__, two.__name__]

    run(main)
    sys.modules.pop(package)


def test_w34a_a_module_sees_the_loop_on_which_its_coroutines_run(planted: Planted) -> None:
    module = planted.module("LOOP = asyncio.get_event_loop()")
    module.LOOP = None

    async def main() -> None:
        async def same() -> bool:
            return module.LOOP is asyncio.get_running_loop()

        async with one_worker():
            assert await routine(same)()

    run(main)


def test_w34a_a_program_without_a_guard_is_not_run_by_workers(planted: Planted) -> None:
    module = planted.module("asyncio.run(asyncio.sleep(0))")

    async def main() -> None:
        async with one_worker():
            with pytest.raises(RemoteError, match=r"asyncio.run\(\) cannot be called from a running event loop"):
                await module.coroutine(1)

    run(main)


# -- cancelling, timeouts, the end ------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", CALLS)
def test_w34a_a_call_is_cancelled_while_it_waits_for_an_import(planted: Planted, what: str) -> None:
    module = planted.module()

    async def main() -> None:
        async with one_worker() as pool:
            cancelled, stays = (asyncio.create_task(CALLS[what](module)) for _ in range(2))
            await until(lambda: planted.begun)
            await jobs.add(1, 2)
            cancelled.cancel()
            async with asyncio.timeout(4):  # the import goes on
                await asyncio.wait([cancelled])
            assert cancelled.cancelled()
            [view] = pool.workers()
            assert view.in_flight == 1
            planted.release()
            assert await stays == 42
            assert len(planted.begun) == 1

    run(main)


@pytest.mark.parametrize("name", ["within_time", "plain_within_time"])
def test_w34a_the_time_of_an_import_does_not_count_as_that_of_the_call(planted: Planted, name: str) -> None:
    module = planted.module("time.sleep(1); wait_for(GO)")

    async def main() -> None:
        async with one_worker():
            waiting = asyncio.create_task(getattr(module, name)(1))
            await until(lambda: planted.begun)
            planted.release()
            assert await waiting == 42

    run(main)


@pytest.mark.usefixtures("told_soon")
@pytest.mark.parametrize("name", ["within_time", "plain_within_time"])
def test_w34a_an_import_that_hangs_ends_in_routine_timeout_and_costs_no_worker(planted: Planted, name: str) -> None:
    module = planted.module()

    async def main() -> None:
        async with one_worker() as pool:
            before = states(pool)
            with pytest.raises(RoutineTimeout):
                await getattr(module, name)(1)
            assert await jobs.add(1, 2) == 3
            assert states(pool) == before
            planted.release()
            assert await getattr(module, name)(1) == 42

    run(main)


def test_w34a_a_call_whose_import_took_too_long_does_not_begin(planted: Planted) -> None:
    """Its caller may have given up just now, and this is not known on the worker."""
    module = planted.module("time.sleep(3.5)")

    async def main() -> None:
        async with one_worker():
            with pytest.raises(RoutineTimeout, match=f"did not begin: importing {module.__name__}"):
                await module.within_time(1)
            assert await module.within_time(1) == 42

    run(main)


def test_w34a_a_caller_is_told_by_the_worker_that_the_call_does_not_begin(planted: Planted) -> None:
    """If it gave up by itself, the call could begin until the worker has heard of that."""
    module = planted.module()

    async def main() -> None:
        async with one_worker() as pool:
            calls = [within_time(Noted(planted.log)) for within_time in (module.within_time, module.plain_within_time)]
            for error in await asyncio.gather(*calls, return_exceptions=True):
                assert isinstance(error, RoutineTimeout)
                assert f"did not begin: importing {module.__name__}" in error.message
            assert in_flight(pool) == 0
            planted.release()
            assert await module.within_time(1) == await module.plain_within_time(1) == 42
            assert lines(planted.log) == [f"importing {module.__name__}"], "it was imported once, and nothing began"

    run(main)


@pytest.mark.usefixtures("told_soon")
def test_w34a_a_call_that_waits_for_a_thread_after_its_import_is_in_line_again(planted: Planted, scale: float) -> None:
    """Its timeout had begun, and its caller knows when it would have ended."""
    patience = 5.0 if scale >= 1 else 2.0  # of its caller, after that
    module = planted.module()
    path = str(planted.folder / "crowd")

    async def main() -> None:
        async with one_worker():
            crowd = [asyncio.create_task(stays(path)) for _ in range(THREADS - 1)]
            try:
                await until(lambda: len(lines(path)) == THREADS - 1)
                waiting = asyncio.create_task(number_within_time(module.Value(1)))
                await until(lambda: planted.begun)
                crowd.append(asyncio.create_task(stays(path)))
                await until(lambda: len(lines(path)) == THREADS)
                await asyncio.sleep(0.8)  # the worker has said by now when the timeout ends
                planted.release()
                await asyncio.sleep(patience + 1)
                assert not waiting.done()
            finally:
                jobs.note(f"{path}.go", "go")
            assert await waiting == 42
            await asyncio.gather(*crowd)

    run(main)


@pytest.mark.usefixtures("told_soon")
@pytest.mark.parametrize("holder", ["import", "routine"])
def test_w34a_a_call_that_came_while_the_lock_was_held_does_not_begin_when_it_was_given_up(
    planted: Planted, holder: str
) -> None:
    """The worker reads it when the lock is free, and the cancellation behind it."""
    module = planted.module("read_with_the_gil(GO)" if holder == "import" else "pass")
    path = str(planted.folder / "noted")
    os.mkfifo(planted.go)

    async def main() -> None:
        async with one_worker() as pool:
            before = pids(pool)
            if holder == "import":
                first = asyncio.create_task(module.coroutine(1))
                await until(lambda: planted.begun)
            else:
                assert await module.coroutine(1) == 42
                first = asyncio.create_task(holds_the_lock(planted.go))
                await until(lambda: lines(f"{planted.go}.begun"))
            await asyncio.sleep(0.3)  # nothing can say when it holds the lock
            calls = []
            for _ in range(5):
                calls.append(asyncio.create_task(module.within_time(Noted(path))))
                await asyncio.sleep(0.02)  # each in a message of its own
            errors = await asyncio.gather(*calls, return_exceptions=True)
            assert [type(error) for error in errors] == [RoutineTimeout] * 5
            planted.release()
            assert await first == 42
            assert await module.within_time(Noted(path)) == 42
            assert (lines(path), pids(pool)) == (["begun"], before)

    run(main)


def test_w34a_calls_begin_also_if_the_lock_is_held_again_and_again(planted: Planted) -> None:
    """Until the worker has read for long enough without being interrupted, it might never begin them."""
    path = str(planted.folder / "holder")

    async def main() -> None:
        async with one_worker():
            holder = asyncio.create_task(holds_the_lock_again_and_again(path))
            await until(lambda: lines(path))
            try:
                async with asyncio.timeout(15):
                    assert await jobs.add(1, 2) == 3
                assert not holder.done()
            finally:
                jobs.note(f"{path}.go", "go")
            await holder

    run(main)


@pytest.mark.parametrize("what", ["plain function", "coroutine function", "generator"])
def test_w34a_a_pool_ends_while_a_module_is_imported(
    planted: Planted, capfd: pytest.CaptureFixture[str], what: str
) -> None:
    module = planted.module()

    async def main() -> list[int]:
        async with one_worker(shutdown_timeout=0.1) as pool:
            waiting = asyncio.create_task(CALLS[what](module))
            await until(lambda: planted.begun)
            found = list(pids(pool))
        with pytest.raises(PoolClosed):
            await waiting
        return found

    [worker] = run(main)
    assert not alive(worker)
    assert said(capfd) == []


def test_w34a_calls_that_waited_for_an_import_are_answered_while_others_run(planted: Planted) -> None:
    module = planted.module("time.sleep(0.2)")

    async def main() -> None:
        heard: list[float] = []

        async def one() -> float:
            began = await begun_at(module.Value(1))
            heard.append(time.monotonic())
            return began

        async with one_worker():
            begun = await asyncio.gather(*(one() for _ in range(60)))
        assert heard[0] < max(begun), "the first answer came when the last call had begun"

    run(main)


def test_w34a_a_draining_worker_waits_for_an_import(planted: Planted) -> None:
    module = planted.module()

    async def main() -> None:
        async with one_worker():
            waiting = asyncio.create_task(module.coroutine(1))
            await until(lambda: planted.begun)
            release = asyncio.get_running_loop().call_later(0.3, planted.release)
        assert await waiting == 42
        release.cancel()

    run(main)


def test_w34a_what_a_module_sets_at_import_is_not_part_of_the_call(planted: Planted) -> None:
    """It would be for the first call on each worker, and for no other."""
    module = planted.module("from tests.integration.workers.test_imports import VALUE as VAR; VAR.set(1)")

    async def main() -> None:
        async with one_worker():
            assert await module.coroutine(1) == 42
            assert VALUE.get() is None

    run(main)
