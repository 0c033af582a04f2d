"""Routines that do not keep to their limits."""

from __future__ import annotations

import asyncio
import os
import resource
import sys
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from typing import Any

from headgate import RuntimeContext, routine
from tests.support.workers.jobs import note, pid, sleep_with_the_gil

TIMEOUT = 0.3
LONG = 60.0


def stay(stop: str) -> None:
    """Until there is such a file, or for long."""
    end = time.monotonic() + LONG
    while time.monotonic() < end and not os.path.exists(stop):
        time.sleep(0.01)


class HangsWhenRead:
    """An argument that takes long to be unpickled, as one does whose module is imported then."""

    def __reduce__(self) -> Any:
        return time.sleep, (LONG,)


@routine(timeout=TIMEOUT)
async def holds_the_loop() -> None:
    time.sleep(LONG)  # noqa: ASYNC251 - that it blocks the loop is the point


@routine(timeout=TIMEOUT)
async def holds_the_loop_in_a_child() -> None:
    async def child() -> None:
        time.sleep(LONG)  # noqa: ASYNC251

    await asyncio.gather(child())


@routine(timeout=TIMEOUT)
async def holds_the_loop_for(seconds: float) -> str:
    time.sleep(seconds)  # noqa: ASYNC251
    return "done"


@routine(timeout=TIMEOUT)
async def takes(argument: Any) -> Any:
    return argument


@routine(timeout=TIMEOUT)
async def holds_the_gil(path: str = os.devnull) -> None:
    note(path, f"begun {os.getpid()}")
    sleep_with_the_gil(LONG)


@routine
async def calls_what_holds_the_gil(path: str) -> None:
    """On the other one of two workers: nested calls take turns."""
    while await pid() != os.getpid():
        pass
    await holds_the_gil(path)


@routine(timeout=TIMEOUT)
async def items(steps: int) -> AsyncGenerator[int, None]:
    """So many, and then it holds the loop."""
    for number in range(steps):
        await asyncio.sleep(0.1)
        yield number
    time.sleep(LONG)  # noqa: ASYNC251


@routine(timeout=TIMEOUT)
def stays(path: str, stop: str) -> None:
    note(path, f"begun {os.getpid()}")
    stay(stop)


@routine
def stays_within_time(path: str, seconds: float) -> None:
    note(path, "begun")
    time.sleep(seconds)


@routine(timeout=TIMEOUT)
def short() -> int:
    return os.getpid()


@routine
def plain_pid() -> int:
    return os.getpid()


@routine(timeout=TIMEOUT)
async def swallows(path: str) -> None:
    """Past its timeout, and waiting."""
    note(path, "begun")
    while True:
        try:
            await asyncio.sleep(LONG)
        except asyncio.CancelledError:
            pass


def dispatch_limit() -> float | None:
    with RuntimeContext() as block:
        return block.dispatch_timeout


@routine
async def limit_at_depth(depth: int) -> list[float | None]:
    """The limit of dispatch here, and in a call of mine, and in one of its own."""
    return [dispatch_limit(), *(await limit_at_depth(depth - 1) if depth else [])]


@routine
def limit_in_a_thread() -> float | None:
    return dispatch_limit()


@routine
async def limits_of_items() -> AsyncGenerator[float | None, None]:
    yield dispatch_limit()
    yield (await limit_at_depth(0))[0]


@routine
async def calls_short() -> int:
    return await short()


# -- what routines leave on a worker's loop ---------------------------------------------------------------------------

_left: list[Any] = []


async def _ends_with_a_note(path: str, text: str) -> None:
    try:
        await asyncio.sleep(LONG)
    finally:
        await asyncio.sleep(0)  # the loop still turns
        note(path, text)


async def _noted_items(path: str) -> AsyncGenerator[int, None]:
    try:
        yield 1
        yield 2
    finally:
        await asyncio.sleep(0)
        note(path, "generator")


async def _fails_when_cancelled() -> None:
    try:
        await asyncio.sleep(LONG)
    finally:
        raise ValueError("in its finally")


async def _exits_when_cancelled() -> None:
    try:
        await asyncio.sleep(LONG)
    finally:
        sys.exit(3)


async def _does_not_end() -> None:
    while True:
        try:
            await asyncio.sleep(LONG)
        except asyncio.CancelledError:
            pass


@routine
async def leaves_things(path: str, *names: str) -> None:
    """Tasks and a generator that go on when this has ended."""
    made: dict[str, Any] = {
        "task": lambda: _ends_with_a_note(path, "task"),
        "fails": _fails_when_cancelled,
        "exits": _exits_when_cancelled,
        "stays": _does_not_end,
    }
    for name in names:
        if name == "generator":
            items = _noted_items(path)
            await anext(items)
            _left.append(items)
        elif name == "thread":
            _left.append(asyncio.get_running_loop().run_in_executor(None, time.sleep, LONG))
        else:
            _left.append(asyncio.create_task(made[name]()))
    await asyncio.sleep(0)


# -- short of descriptors ---------------------------------------------------------------------------------------------


@contextmanager
def few_descriptors(free: int) -> Iterator[None]:
    """So many that this process can still open."""
    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    opened = [os.open(os.devnull, os.O_RDONLY) for _ in range(free)]
    limit = max(opened, default=0) + 1
    for descriptor in opened:
        os.close(descriptor)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, most))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (now, most))


@routine
async def noted_bytes(path: str, size: int) -> bytes:
    note(path, "ran")
    return bytes(size)


@routine
async def lengths(free: int) -> AsyncGenerator[int, bytes]:
    """Of what is sent into it, while this worker is short of descriptors."""
    with few_descriptors(free):
        data = b""
        while True:
            data = yield len(data)


@routine
async def long_items(*sizes: int) -> AsyncGenerator[bytes, None]:
    for size in sizes:
        yield bytes(size)


@routine
async def length(data: bytes) -> int:
    return len(data)
