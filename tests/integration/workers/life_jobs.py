"""What workers run before their first call and at their end, and routines that tell of it."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import os
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import headgate
from headgate import routine, setup_result
from tests.support.workers.jobs import note

LOG = "HEADGATE_TEST_LOG"
"""An environment variable: the file in which setups and teardowns note what they did."""
FLAG = "HEADGATE_TEST_FLAG"
"""An environment variable: a file that decides what some setups do."""

MODEL: list[str] = []
STANDARD: contextvars.ContextVar[str] = contextvars.ContextVar("life_jobs.standard", default="unset")
TRAVELS: headgate.ContextVar[str] = headgate.ContextVar("life_jobs.travels", default="unset")


def noted(text: str) -> None:
    note(os.environ[LOG], f"{text} {os.getpid()}")


def flag() -> str:
    try:
        return Path(os.environ[FLAG]).read_text()
    except FileNotFoundError:
        return ""


# -- routines ---------------------------------------------------------------------------------------------------------


@routine
async def noted_call(path: str, number: int, seconds: float = 0.001) -> int:
    note(path, number)
    await asyncio.sleep(seconds)
    return os.getpid()


@routine
async def nested_calls(path: str, first: int, count: int) -> int:
    async with asyncio.TaskGroup() as group:
        for number in range(first, first + count):
            group.create_task(noted_call(path, number))
    return os.getpid()


@routine
async def fails() -> NoReturn:
    raise ValueError("on purpose")


@routine
async def numbers(count: int) -> AsyncIterator[tuple[int, int]]:
    for number in range(count):
        yield number, os.getpid()


@routine
async def what_setup_made() -> Any:
    return setup_result()


@routine
async def uses_the_lock() -> bool:
    """An asyncio.Lock that was contended on one loop cannot be used on another."""
    lock: asyncio.Lock = setup_result()
    return await asyncio.wait_for(_both(lock), 5)


async def _both(lock: asyncio.Lock) -> bool:
    async def hold() -> None:
        async with lock:
            await asyncio.sleep(0)

    await asyncio.gather(hold(), hold())
    return True


@routine
async def variables() -> tuple[list[str], str, str]:
    return MODEL, STANDARD.get(), TRAVELS.get()


@routine
async def cancels_every_task() -> None:
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        task.cancel()
    await asyncio.sleep(0.01)


@routine
async def hoards(megabytes: int) -> int:
    HOARD.append(os.urandom(1 << 20) * megabytes)
    return os.getpid()


HOARD: list[bytes] = []


# -- setups -----------------------------------------------------------------------------------------------------------


def plain() -> str:
    noted("setup")
    return "plain"


async def coroutine() -> str:
    await asyncio.sleep(0)
    noted("setup")
    return "coroutine"


@contextlib.asynccontextmanager
async def manager() -> AsyncIterator[str]:
    async with asyncio.TaskGroup():  # refuses to be left in another task than it was entered in
        noted("setup")
        try:
            yield "manager"
        finally:
            await asyncio.sleep(0)
            noted("closed")


@contextlib.contextmanager
def plain_manager() -> Iterator[str]:
    noted("setup")
    yield "plain_manager"
    noted("closed")


class Opened:
    def __init__(self, name: str = "Opened") -> None:
        self.name = name

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Opened) and other.name == self.name

    __hash__ = None  # type: ignore[assignment]

    async def __aenter__(self) -> str:
        noted("setup")
        return self.name

    async def __aexit__(self, *_: object) -> None:
        noted("closed")


def makes_a_manager() -> contextlib.AbstractAsyncContextManager[str]:
    return manager()


def makes_an_object() -> Opened:
    """It is a context manager by chance, as a lock is."""
    noted("setup")
    return Opened("made")


named = functools.partial(Opened, "named")


def makes_a_lock() -> asyncio.Lock:
    asyncio.get_running_loop()
    return asyncio.Lock()


async def makes_a_contended_lock() -> asyncio.Lock:
    lock = asyncio.Lock()
    await _both(lock)
    return lock


def sets_variables() -> None:
    MODEL.append("loaded")
    STANDARD.set("of setup")
    TRAVELS.set("of setup")


async def depends_on_the_flag() -> str:
    """Succeeds, fails, hangs or waits, as the flag says."""
    said = flag()
    if said == "fail":
        raise ConnectionError("the database is down")
    if said == "hang":
        await asyncio.Event().wait()
    if said == "block":
        time.sleep(1000)  # noqa: ASYNC251 - on purpose
    while flag() == "wait":  # noqa: ASYNC110 - the other process cannot set an event
        await asyncio.sleep(0.005)
    return "there"


def raises(error: BaseException) -> NoReturn:
    raise error


def raises_what_cannot_travel() -> NoReturn:
    error = ValueError("unpicklable")
    error.lock = threading.Lock()  # type: ignore[attr-defined]
    raise error


def exits() -> NoReturn:
    sys.exit(3)


async def cancels_itself() -> None:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()
    await asyncio.sleep(0)


def leaves_a_thread() -> NoReturn:
    threading.Thread(target=time.sleep, args=(1000,)).start()
    raise ValueError("and a thread is left")


# -- teardowns --------------------------------------------------------------------------------------------------------


def teardown() -> None:
    noted("teardown")


async def async_teardown() -> None:
    await asyncio.sleep(0)
    noted("teardown")


def failing_teardown() -> NoReturn:
    noted("teardown")
    raise ValueError("no luck")


def exiting_teardown() -> NoReturn:
    noted("teardown")
    sys.exit(3)


async def hanging_teardown() -> None:
    noted("teardown")
    await asyncio.Event().wait()


def blocking_teardown() -> None:
    noted("teardown")
    time.sleep(1000)


def calling(fn: Callable[[BaseException], NoReturn], error: BaseException) -> Callable[[], NoReturn]:
    return functools.partial(fn, error)


def forgotten() -> Iterator[int]:
    """What its author forgot to decorate."""
    yield 1
