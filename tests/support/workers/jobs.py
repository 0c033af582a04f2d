"""Routines that workers import by name, as they import a user's."""

from __future__ import annotations

import argparse
import asyncio
import contextvars
import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, NoReturn

import headgate
from headgate import routine
from headgate.workers.routines import CALLER


def note(path: Path | str, text: object) -> None:
    """Append a line in one write: it is noted whole or not at all, whoever is killed."""
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(file, f"{text}\n".encode())
    finally:
        os.close(file)


# -- calls ------------------------------------------------------------------------------------------------------------


@routine
async def add(x: int, y: int) -> int:
    """The sum of both."""
    return x + y


@routine
async def pid() -> int:
    return os.getpid()


@routine(retries=5)
async def patient_pid() -> int:
    """For callers whose worker may be killed."""
    await asyncio.sleep(0.001)
    return os.getpid()


@routine
async def sleep_and_pid(seconds: float) -> int:
    await asyncio.sleep(seconds)
    return os.getpid()


@routine
async def hold_memory(size: int, seconds: float) -> int:
    held = bytearray(b"x" * size)
    await asyncio.sleep(seconds)
    return len(held)


@routine
async def pid_of_a_peer() -> int:
    return await pid()


@routine
async def pids_of_peers(calls: int) -> list[int]:
    return await asyncio.gather(*(pid() for _ in range(calls)))


@routine
async def sleep_and_pid_of_a_peer(seconds: float) -> int:
    await asyncio.sleep(seconds)
    return await pid()


@routine(retries=1)
async def patient_pid_of_a_peer(seconds: float) -> int:
    await asyncio.sleep(seconds)
    return await pid()


@routine
async def echo(value: Any) -> Any:
    return value


@routine
async def parameters(a: Any, b: Any = 2, *rest: Any, c: Any, d: Any = 4, **more: Any) -> tuple[Any, ...]:
    return a, b, rest, c, d, more


@routine
async def append_to(values: list[Any]) -> list[Any]:
    values.append("worker")
    return values


@routine
async def apply(function: Any, *args: Any) -> Any:
    return await function(*args)


@routine
async def is_add(function: Any) -> bool:
    return function is add


@routine
async def call(function: Any, *args: Any) -> Any:
    return function(*args)


@routine
def plain(x: int) -> tuple[int, int, bool]:
    return x + 1, os.getpid(), threading.current_thread() is threading.main_thread()


@routine
def plain_without_a_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return True
    return False


@routine
async def surroundings(name: str) -> tuple[str, str | None, list[str]]:
    return os.getcwd(), os.environ.get(name), list(sys.path)


@routine
async def import_by_name(name: str) -> str:
    return str(__import__(name).VALUE)


class Account:
    """Methods of every kind, with the decorator above and below."""

    def __init__(self, balance: int) -> None:
        self.balance = balance

    @routine
    async def pay(self, amount: int) -> tuple[int, int]:
        """Pay in."""
        self.balance += amount
        return self.balance, os.getpid()

    @routine
    def pay_in_a_thread(self, amount: int) -> tuple[int, int]:
        return self.balance + amount, os.getpid()

    @routine
    @classmethod
    async def class_above(cls, x: int) -> tuple[str, int, int]:
        return cls.__name__, x, os.getpid()

    @classmethod
    @routine
    async def class_below(cls, x: int) -> tuple[str, int, int]:
        return cls.__name__, x, os.getpid()

    @routine
    @staticmethod
    async def static_above(x: int) -> tuple[int, int]:
        return x, os.getpid()

    @staticmethod
    @routine
    async def static_below(x: int) -> tuple[int, int]:
        return x, os.getpid()


class Savings(Account):
    """Inherits the routines."""

    @routine
    async def pay(self, amount: int) -> tuple[int, int]:
        balance, _ = await super().pay(amount)
        return balance * 2, os.getpid()


# -- nested calls and the gate ----------------------------------------------------------------------------------------


@routine
async def leaves(count: int) -> tuple[int, list[int]]:
    """My pid and those of so many nested calls."""
    return os.getpid(), list(await asyncio.gather(*(pid() for _ in range(count))))


@routine
async def leaves_in_turn(count: int) -> list[int]:
    """The pids of nested calls, made one at a time."""
    return [await pid() for _ in range(count)]


@routine
async def branch(count: int) -> list[int]:
    """The pids of nested calls of a nested call."""
    return await leaves_in_turn(count)


@routine
async def known_peers() -> list[str]:
    """The uids of the workers that the routines of this one may call."""
    return [peer.uid for peer in CALLER.get().pool.introduction.peers]


@routine
async def leaves_here(count: int) -> tuple[int, list[int]]:
    with headgate.do_dispatch(False):
        return os.getpid(), list(await asyncio.gather(*(pid() for _ in range(count))))


@routine
async def fib(n: int) -> int:
    if n <= 1:
        return n
    async with asyncio.TaskGroup() as group:
        a = group.create_task(fib(n - 1))
        b = group.create_task(fib(n - 2))
    return a.result() + b.result()


def task_fields() -> dict[str, Any]:
    task = headgate.current_task()
    assert task is not None
    return {"id": task.id, "caller": task.caller, "tag": task.tag, "timeout": task.timeout}


@routine(timeout=20)
async def my_task() -> dict[str, Any]:
    return task_fields()


@routine
async def my_task_and_a_nested_one() -> tuple[dict[str, Any], dict[str, Any]]:
    return task_fields(), await my_task()


@routine
async def my_task_after_a_turn() -> dict[str, Any]:
    await asyncio.sleep(0.01)
    return task_fields()


@routine
def my_task_in_a_thread() -> dict[str, Any]:
    return task_fields()


@routine
async def is_outside() -> bool:
    return headgate.current_task() is None


@routine
async def is_a_task() -> bool:
    return isinstance(asyncio.current_task(), asyncio.Task)


_variable: contextvars.ContextVar[str] = contextvars.ContextVar("jobs_variable", default="unset")


@routine
async def swap_variable(value: str) -> str:
    """What the variable was before: a former call on this worker must not be seen."""
    before = _variable.get()
    _variable.set(value)
    return before


# -- time -------------------------------------------------------------------------------------------------------------


@routine
async def slow(seconds: float, value: Any = "done") -> Any:
    await asyncio.sleep(seconds)
    return value


@routine(timeout=0.3)
async def bounded(seconds: float, path: str) -> str:
    note(path, "begun")
    try:
        await asyncio.sleep(seconds)
    finally:
        note(path, "ended")
    return "done"


@routine(timeout=0.3)
async def bounded_blocking(seconds: float) -> str:
    time.sleep(seconds)  # noqa: ASYNC251 - that it blocks the loop is the point
    await asyncio.sleep(0.05)
    return "done"


@routine(timeout=0.3)
def bounded_thread(seconds: float) -> str:
    time.sleep(seconds)
    return "done"


@routine(timeout=20)
async def own_timeout() -> None:
    raise TimeoutError("my own")


@routine(timeout=20, retries=3)
async def inner_timeout() -> None:
    async with asyncio.timeout(0.01):
        await asyncio.sleep(60)


# -- cancellation -----------------------------------------------------------------------------------------------------


@routine
async def endless(path: str) -> None:
    note(path, "begun")
    try:
        await asyncio.sleep(3600)
    finally:
        note(path, "ended")


@routine
async def slow_to_end(path: str, seconds: float) -> None:
    note(path, "begun")
    try:
        await asyncio.sleep(3600)
    finally:
        await asyncio.sleep(seconds)
        note(path, "ended")


@routine
async def swallows(path: str) -> float:
    """When the cancellation came, on the clock that all processes share."""
    note(path, "begun")
    try:
        await asyncio.sleep(3600)
    except asyncio.CancelledError:
        return time.monotonic()
    raise AssertionError("it was to be cancelled")


@routine
async def turns_it_into_an_error(path: str) -> None:
    note(path, "begun")
    try:
        await asyncio.sleep(3600)
    except asyncio.CancelledError:
        raise ValueError("instead") from None


@routine
async def guarded(path: str, number: int, seconds: float) -> int:
    note(path, f"begun {number}")
    try:
        await asyncio.sleep(seconds)
    finally:
        note(path, f"ended {number}")
    return number


@routine
def sleeps_in_a_thread(path: str, seconds: float) -> str:
    note(path, "begun")
    time.sleep(seconds)
    note(path, "ended")
    return "done"


@routine
def computes_in_a_thread(path: str, seconds: float) -> str:
    """For so long, or until there is a file that says stop."""
    note(path, "begun")
    end = time.monotonic() + seconds
    while time.monotonic() < end and not os.path.exists(f"{path}.stop"):
        sum(range(1000))
    return "done"


# -- exceptions -------------------------------------------------------------------------------------------------------


class KeywordOnly(Exception):
    """Cannot be made again from its `args`."""

    def __init__(self, *, field: str, count: int = 0) -> None:
        super().__init__(f"{field} x {count}")
        self.field = field
        self.count = count


class SeveralArguments(ValueError):
    """Neither can this one."""

    def __init__(self, code: int, reason: str, detail: dict[str, int]) -> None:
        super().__init__(f"{code}: {reason}")
        self.code = code
        self.reason = reason
        self.detail = detail


class HoldsALock(Exception):
    """Cannot be pickled."""

    def __init__(self) -> None:
        super().__init__("holds a lock")
        self.lock = threading.Lock()


class BreaksOnLoad(Exception):
    """Can be pickled, and not be loaded."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _break, ("loading it breaks",)


class BreaksItsRepr(Exception):
    def __repr__(self) -> str:
        raise RuntimeError("no repr")

    def __str__(self) -> str:
        raise RuntimeError("no str")


def _break(words: str) -> NoReturn:
    raise RuntimeError(words)


def innermost(error: BaseException) -> NoReturn:
    raise error


@routine
async def fails(make: Any, *args: Any, **more: Any) -> None:
    """Made here: not every exception that can come back can also go there as an argument."""
    innermost(make(*args, **more))


@routine
def fails_in_a_thread(make: Any, *args: Any, **more: Any) -> None:
    innermost(make(*args, **more))


@routine
async def fails_from_a_cause() -> None:
    try:
        innermost(KeyError("deep"))
    except KeyError as error:
        raise SeveralArguments(7, "on top", {"a": 1}) from error


@routine
async def fails_in_a_context() -> None:
    try:
        innermost(KeyError("deep"))
    except KeyError:
        raise ValueError("while handling")  # noqa: B904 - the context is the point


@routine
async def fails_in_a_group() -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(_fail_soon(ValueError("one")))
        group.create_task(_fail_soon(KeywordOnly(field="two")))


async def _fail_soon(error: Exception) -> None:
    raise error


@routine
async def fails_with_a_local_class() -> None:
    class Local(Exception):
        pass

    raise Local("made here")


@routine
async def fails_noted() -> None:
    error = ValueError("noted")
    error.add_note("mine")
    raise error


@routine
async def too_deep(n: int = 0) -> int:
    return await too_deep.__wrapped__(n + 1) + 1


@routine
async def returns_a_lock() -> Any:
    return threading.Lock()


class LoadsOnlyThere:
    """Breaks when it is loaded in the process whose pid it carries."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if os.getpid() == self.pid:
            raise RuntimeError("it breaks here")


class LoadsOnlyHere(LoadsOnlyThere):
    """Breaks when it is loaded in any other process."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if os.getpid() != self.pid:
            raise RuntimeError("it breaks there")


class ThreadProbe:
    """Remembers which thread loaded it."""

    thread = 0

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.thread = threading.get_ident()

    def __getstate__(self) -> dict[str, Any]:
        return {"some": "state"}


@routine
async def loaded_by_my_thread(probe: ThreadProbe) -> bool:
    return probe.thread == threading.get_ident()


# -- BaseExceptions ---------------------------------------------------------------------------------------------------


@routine
async def exits(code: int = 3) -> None:
    sys.exit(code)


@routine
async def exits_after_a_turn(code: int = 3) -> None:
    await asyncio.sleep(0.01)
    sys.exit(code)


@routine
def exits_in_a_thread(code: int = 3) -> None:
    sys.exit(code)


@routine
async def exits_in_a_child_task(code: int = 3) -> None:
    await asyncio.create_task(exits_after_a_turn.__wrapped__(code))


@routine
async def exits_in_an_executor(code: int = 3) -> None:
    await asyncio.to_thread(sys.exit, code)


@routine
async def parses(*arguments: str) -> None:
    argparse.ArgumentParser(prog="job").parse_args(arguments)


@routine(retries=3)
async def notes_and_exits(path: str, code: Any) -> None:
    note(path, "ran")
    sys.exit(code)


@routine
async def calls_exits(catches: bool) -> Any:
    try:
        await exits(7)
    except headgate.RoutineExited as error:
        if catches:
            return error.exit_code
        raise


@routine
async def interrupts() -> None:
    raise KeyboardInterrupt


@routine
async def interrupts_after_a_turn() -> None:
    await asyncio.sleep(0.01)
    raise KeyboardInterrupt


@routine
def interrupts_in_a_thread() -> None:
    raise KeyboardInterrupt


@routine
async def raises_generator_exit() -> None:
    raise GeneratorExit


# -- holding things ---------------------------------------------------------------------------------------------------


def sleep_without_the_gil(seconds: float) -> None:
    time.sleep(seconds)


@routine
async def holds_the_loop(path: str, seconds: float) -> int:
    note(path, f"begun {os.getpid()}")
    sleep_without_the_gil(seconds)
    return os.getpid()


def spin(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        sum(range(1000))


@routine
async def computes(path: str, seconds: float) -> int:
    note(path, f"begun {os.getpid()}")
    spin(seconds)
    return os.getpid()


def sleep_with_the_gil(seconds: float) -> None:
    ctypes.PyDLL(None).usleep(int(seconds * 1e6))


@routine
async def holds_the_gil(path: str, seconds: float) -> int:
    note(path, f"begun {os.getpid()}")
    sleep_with_the_gil(seconds)
    return os.getpid()


@routine
async def holds_the_gil_until_told(path: str) -> int:
    """Until `tell_who_holds_the_gil`; then it holds the loop until it is told again."""
    os.mkfifo(f"{path}.told")
    told = os.open(f"{path}.told", os.O_RDWR)  # so that it opens without a writer
    note(path, f"begun {os.getpid()}")
    read_with_the_gil(told)
    os.close(told)
    return os.getpid()


def read_with_the_gil(file: int) -> None:
    ctypes.PyDLL(None).read(file, ctypes.create_string_buffer(1), 1)
    os.read(file, 1)  # without the lock, in the same frame


def tell_who_holds_the_gil(path: str) -> None:
    told = os.open(f"{path}.told", os.O_RDWR | os.O_NONBLOCK)
    os.write(told, b"x")
    os.close(told)


@routine
def computes_until_told(path: str) -> int:
    """Runs Python code, and calls many functions, until there is a file `path`.told."""
    note(path, f"begun {os.getpid()}")
    while not os.path.exists(f"{path}.told"):
        for _ in range(100):
            json.dumps({"a": [1, {"b": 2}]}, indent=1)  # with an indent: by the encoder that is written in Python
    return os.getpid()


@routine(thread=True)
async def holds_only_a_thread(path: str, seconds: float) -> int:
    note(path, f"begun {os.getpid()}")
    time.sleep(seconds)  # noqa: ASYNC251 - the loop it would block is not the worker's
    await asyncio.sleep(0)
    return os.getpid()


@routine
async def noted_pid(path: str, number: int) -> int:
    note(path, number)
    return os.getpid()


# -- deaths -----------------------------------------------------------------------------------------------------------


@routine
async def once(path: str, number: int, seconds: float = 0.005) -> int:
    note(path, number)
    await asyncio.sleep(seconds)
    return number


@routine(retries=10)
async def again(path: str, number: int, seconds: float = 0.005) -> int:
    note(path, number)
    await asyncio.sleep(seconds)
    return number


@routine
async def begun_at(path: str, number: int, seconds: float) -> int:
    note(path, f"{number} {os.getpid()}")
    await asyncio.sleep(seconds)
    return number


@routine
async def until_told(path: str, number: int) -> int:
    """Till there is a file that says go."""
    note(path, f"{number} {os.getpid()}")
    while not os.path.exists(f"{path}.go"):  # noqa: ASYNC110, ASYNC240 - nobody here could set an event
        await asyncio.sleep(0.005)
    return number


@routine(retries=2)
async def begun_at_with_retries(path: str, number: int, seconds: float) -> int:
    note(path, f"{number} {os.getpid()}")
    await asyncio.sleep(seconds)
    return number


@routine
async def dies(path: str) -> None:
    note(path, "ran")
    os.kill(os.getpid(), signal.SIGKILL)


@routine(retries=2)
async def dies_with_retries(path: str) -> None:
    note(path, "ran")
    os.kill(os.getpid(), signal.SIGKILL)


def _noted(path: str, text: object) -> int:
    """Append a line. Returns how many there are then."""
    note(path, text)
    return len(Path(path).read_text().splitlines())


async def _fails_until(path: str, times: int, *values: Any) -> int:
    if _noted(path, os.getpid()) <= times:
        raise ConnectionError("the service is away")
    return sum(values)


def _is_away(error: BaseException) -> bool:
    return "away" in str(error)


fails_until_named = routine(retries=3, retry_on=ConnectionError)(_fails_until)
fails_until_judged = routine(retries=3, retry_on=_is_away, backoff=headgate.Backoff(0.05, jitter=False))(_fails_until)


@routine(retries=3, retry_on=(ConnectionError, headgate.WorkerLost))
async def fails_and_dies(path: str) -> str:
    """Raises, is killed, raises, and returns."""
    times = _noted(path, os.getpid())
    if times == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    if times < 4:
        raise ConnectionError("the service is away")
    return "alive"


@routine(retries=3, retry_on=ConnectionError)
async def dies_though_it_may_fail(path: str) -> None:
    note(path, "ran")
    os.kill(os.getpid(), signal.SIGKILL)


@routine(retries=2, backoff=0.2)
async def dies_with_pauses(path: str) -> None:
    note(path, f"{time.time()}")
    os.kill(os.getpid(), signal.SIGKILL)


@routine(retries=2)
async def dies_each_time(path: str) -> None:
    note(path, "ran")
    os.kill(os.getpid(), signal.SIGKILL)


@routine(retries=5)
async def dies_twice(path: str) -> str:
    note(path, "ran")
    if os.stat(path).st_size <= 2 * len("ran\n"):
        os.kill(os.getpid(), signal.SIGKILL)
    return "alive"


@routine(retries=3)
async def fails_with_retries(path: str) -> None:
    note(path, "ran")
    raise LookupError("not the worker's fault")


@routine
async def leaves_without_a_word(code: int) -> None:
    os._exit(code)


@routine
async def crashes() -> None:
    ctypes.string_at(0)


# -- families ---------------------------------------------------------------------------------------------------------

_children: list[subprocess.Popen[bytes]] = []


@routine
async def family() -> dict[str, int]:
    """Start a child, one in its own session, and a daemon whose parent has ended."""
    quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    child = subprocess.Popen(["sleep", "120"], **quiet)  # noqa: ASYNC220 - takes a moment
    session = subprocess.Popen(["sleep", "120"], start_new_session=True, **quiet)  # noqa: ASYNC220
    deaf = subprocess.Popen(  # noqa: ASYNC220
        ["sh", "-c", "trap '' TERM INT HUP; while :; do sleep 0.2; done"], start_new_session=True, **quiet
    )
    _children.extend((child, session, deaf))
    told = subprocess.run(  # noqa: ASYNC221
        ["sh", "-c", "setsid sleep 120 </dev/null >/dev/null 2>&1 & echo $!"], stdout=subprocess.PIPE, check=True
    )
    return {"child": child.pid, "session": session.pid, "deaf": deaf.pid, "daemon": int(told.stdout)}
