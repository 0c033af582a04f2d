"""What rooms need of threads: to call a function in one, and to see what each of them is doing."""

from __future__ import annotations

import asyncio
import gc
import sys
from collections.abc import Callable, Coroutine
from contextvars import Context
from types import FrameType
from typing import Any


def call_in_thread(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Any:
    """Call it in a thread whose future somebody awaits.

    A future refuses to carry StopIteration, and whoever waits for it would wait for ever: it becomes a RuntimeError, as
    in a coroutine.
    """
    try:
        return fn(*args, **(kwargs or {}))
    except StopIteration as stop:
        raise RuntimeError("the function raised StopIteration") from stop


async def on_loop(
    there: asyncio.AbstractEventLoop, fn: Callable[[], Coroutine[Any, Any, Any]], context: Context | None = None
) -> Any:
    """Await a coroutine on another loop, as if it were on this one: cancelled, it is waited for until it has ended.

    (Not `run_coroutine_threadsafe`: its future is done as soon as it is cancelled, and SystemExit would end that loop.)
    """
    here = asyncio.get_running_loop()
    done: asyncio.Future[tuple[Any, BaseException | None]] = here.create_future()
    tasks: list[asyncio.Task[None]] = []

    async def run() -> None:
        try:
            outcome: tuple[Any, BaseException | None] = await fn(), None
        except BaseException as error:
            outcome = None, error
        try:
            here.call_soon_threadsafe(done.set_result, outcome)
        except RuntimeError:  # it is closed, and so nobody waits
            pass

    there.call_soon_threadsafe(lambda: tasks.append(there.create_task(run(), context=context)))
    while not done.done():
        try:
            await asyncio.wait((done,))
        except asyncio.CancelledError:
            there.call_soon_threadsafe(lambda: [task.cancel() for task in tasks])
    result, error = done.result()
    if error is not None:
        try:
            raise error
        finally:
            del error
    return result


def current_frames() -> dict[int, FrameType]:
    """The topmost frame of each thread, by its ident.

    The collector must not run in the middle of it: CPython holds the lock of its list of threads here, and what is
    collected may want that lock too (seen on 3.11: a test suite that stood still for ever).
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        return sys._current_frames()
    finally:
        if collects:
            gc.enable()
