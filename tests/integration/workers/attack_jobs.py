"""What workers are asked to run in the tests of attacks, fork servers, balancers and loops.

Not in the modules of the tests: a worker that imports one of those imports pytest too, and that takes as long as
starting it.
"""

from __future__ import annotations

import asyncio
import os
import random
import resource
import time
from contextlib import aclosing
from pathlib import Path
from typing import Any

import headgate
from headgate import WorkerPool, routine
from headgate.workers.server import task_loop
from tests.integration.workers import stream_jobs
from tests.support.workers import jobs
from tests.support.workers.support import lines

# -- test_attacks ------------------------------------------------------------------------------------------------------


@routine
async def leave_a_daemon() -> int:
    """Double-forked, in a session of its own, without the environment of its worker."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.setsid()
        if os.fork() == 0:
            os.write(write, str(os.getpid()).encode())
            os.execve("/bin/sleep", ["sleep", "60"], {})
        os._exit(0)
    os.waitpid(child, 0)  # noqa: ASYNC222 - it ends at once
    return int(os.read(read, 20))


@routine(timeout=1)
async def compute_a_little() -> float:
    end = time.perf_counter() + 0.01
    while time.perf_counter() < end:
        pass
    return time.time()


class Held:
    @routine
    async def __private(self) -> int:
        return os.getpid()

    @property
    @routine
    async def value(self) -> int:
        return os.getpid()

    async def ask(self) -> tuple[int, int]:
        return await self.__private(), await self.value


@routine(timeout=1)
def rest_a_little() -> int:
    time.sleep(0.12)
    return 1


@routine(thread=True)
async def deep(depth: int) -> int:
    return 0 if depth == 0 else 1 + await deep(depth - 1)


# -- test_stream_attacks -----------------------------------------------------------------------------------------------


@routine(prefetch=100)
async def blocks() -> Any:
    number = 0
    while True:
        try:
            yield number, bytes(2**20)
            number += 1
        except LookupError:
            number = 1000


@routine(prefetch=4)
async def falls_silent(path: str) -> Any:
    try:
        yield 1
        await asyncio.sleep(3600)
    finally:
        jobs.note(path, "closed")


@routine
async def survives() -> Any:
    number = 0
    while True:
        try:
            await asyncio.sleep(0.002)
        except asyncio.CancelledError:
            pass
        try:
            yield number
        except asyncio.CancelledError:
            pass
        number += 1


@routine
async def hears() -> Any:
    got: list[Any] = []
    while True:
        try:
            value = yield list(got)
            got.append(None if value is None else len(value))
            if value is not None:
                await asyncio.sleep(3)
        except asyncio.CancelledError:
            got.append("cancelled")


@routine
async def goes_on_too_long(path: str) -> Any:
    try:
        yield 0
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            await asyncio.sleep(0.8)  # longer than its caller waits
        yield 1
    finally:
        jobs.note(path, "closed")


@routine(timeout=0.2)
async def disobeys() -> Any:
    yield 0
    for _ in range(15):
        try:
            await asyncio.sleep(0.2)
        except asyncio.CancelledError:
            pass
    yield 1


@routine
async def counts(path: str) -> Any:
    try:
        for number in range(10):
            yield number
        await asyncio.sleep(3600)
    finally:
        await asyncio.sleep(0.1)
        jobs.note(path, "closed")


@routine(thread=True)
async def reads_in_a_thread(path: str) -> list[Any]:
    async with aclosing(counts(path)) as stream:
        async for _ in stream:
            break
    stream = counts(path)
    found: list[Any] = [await anext(stream) for _ in range(10)]
    try:
        async with asyncio.timeout(0.1):
            await anext(stream)
    except TimeoutError:
        found.append(len(lines(path)))
    return found


@routine
async def forget_after(seconds: float) -> None:
    """Let this worker forget resting generators after so long when it stops."""
    task_loop.FORGOTTEN = seconds


@routine
async def gives_an_error() -> Exception:
    return ValueError("a value")


class Holder:
    """It has one attribute."""

    def __init__(self, held: Any) -> None:
        self.held = held


@routine
async def same(value: Any, holder: Holder, cyclic: list[Any]) -> tuple[bool, bool, int]:
    return holder.held is value, cyclic[1] is cyclic, sum(value[:10])


# -- test_fork_server --------------------------------------------------------------------------------------------------


@routine
async def surroundings(name: str) -> tuple[str | None, str, int, int]:
    return os.environ.get(name), os.getcwd(), os.getsid(0), len(os.environ["HEADGATE_WORKER"])


@routine
async def call_later() -> int:
    import headgate_later  # type: ignore[import-not-found]

    return int(headgate_later.answer())


@routine
async def opens_a_pool() -> int:
    async with WorkerPool(spawn=1):
        return await jobs.add(20, 22)


@routine
async def draws() -> float:
    import random

    return random.random()


# -- test_uvloop -------------------------------------------------------------------------------------------------------


@routine
async def loop_here() -> str:
    return type(asyncio.get_running_loop()).__module__


@routine
async def nested() -> list[Any]:
    return [await loop_here(), [item async for item in stream_jobs.count(3)]]


# -- test_balancing: hooks ---------------------------------------------------------------------------------------------


def refuses_when_busy(context: headgate.BackpressureContext) -> bool:
    return context.active_task_count >= 1


async def refuses_when_busy_async(context: headgate.BackpressureContext) -> bool:
    await asyncio.sleep(0.001)
    return context.active_task_count >= 1


def refuses_while(flag: str, context: headgate.BackpressureContext) -> bool:
    """Only the worker whose pid is written there."""
    try:
        return Path(flag).read_text() == str(os.getpid())
    except FileNotFoundError:
        return False


class Oddly:
    """Looks at the task it is asked about."""

    def __call__(self, context: headgate.BackpressureContext) -> bool:
        if "raises" in context.task.tag or "exits" in context.task.tag:
            raise LookupError("planted in the hook")
        return "echo" in context.task.tag


def refuses_by_chance(context: headgate.BackpressureContext) -> bool:
    return random.random() < 0.5


@headgate.routine
async def opens_no_more() -> None:
    """From now on this process can open no file, but it keeps those it has."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1, most))


@headgate.routine
async def may_open_again() -> None:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(1024, most), most))


@routine
async def dumps_after(seconds: float) -> None:
    """From now on faulthandler writes the stacks of this worker after so many seconds without a turn."""
    from headgate.workers.server import stack_dumps

    stack_dumps.AFTER = seconds
    stack_dumps.dump_later()  # the next call may come before the next check


@routine
async def no_watchdogs(count: int) -> None:
    """From now on so many threads of faulthandler cannot be started."""
    import faulthandler

    real, left = faulthandler.dump_traceback_later, [count]

    def later(*args: Any, **kwargs: Any) -> None:
        if left[0] > 0:
            left[0] -= 1
            raise RuntimeError("unable to start watchdog thread")
        faulthandler.dump_traceback_later = real
        real(*args, **kwargs)

    faulthandler.dump_traceback_later = later
