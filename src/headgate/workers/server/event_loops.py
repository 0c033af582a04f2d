"""Event loops of workers: making one of the right kind, and ending one within a time limit."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

from headgate.core.clock import clock
from headgate.core.redaction import redact

_log = logging.getLogger("headgate.workers")


def kind_of(loop: asyncio.AbstractEventLoop) -> str:
    """Return the kind of an event loop, for workers that have to use the same."""
    return "uvloop" if type(loop).__module__.partition(".")[0] == "uvloop" else ""


def new_loop(kind: str) -> asyncio.AbstractEventLoop:
    """Make an event loop of this kind."""
    if kind == "uvloop":
        import uvloop

        made: asyncio.AbstractEventLoop = uvloop.new_event_loop()
        return made
    return asyncio.new_event_loop()


def end_loop(loop: asyncio.AbstractEventLoop, seconds: float) -> None:
    """Cancel the tasks of a stopped loop, close its generators and end its threads. Called in its thread.

    `asyncio.run` does the same without a limit: it waits for ever for a task that swallows its cancellation, or for a
    thread that continues. A worker that stops must not.
    """
    until = clock.now() + seconds
    left = asyncio.all_tasks(loop)
    for task in left:
        task.cancel()
    if left:
        _complete(loop, _end_tasks(left, until))
        for task in left:
            _report(loop, task)
    _complete(loop, _within(loop.shutdown_asyncgens(), until))
    _complete(loop, _within(loop.shutdown_default_executor(), until))


def _complete(loop: asyncio.AbstractEventLoop, ending: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine to its end, even if other tasks raise what ends a loop (SystemExit)."""
    task = loop.create_task(ending)
    while not task.done():
        try:
            loop.run_until_complete(task)
        except BaseException as error:
            if task.done():
                _log.warning("the end of a worker's loop failed: %s", redact(repr(error)))
            else:
                _log.warning("something a routine started raised %s while the worker stopped", redact(repr(error)))


async def _end_tasks(tasks: set[asyncio.Task[Any]], until: float) -> None:
    _, pending = await asyncio.wait(tasks, timeout=max(0.0, until - clock.now()))
    if pending:
        names = ", ".join(sorted(task.get_name() for task in pending)[:5])
        _log.warning("%d tasks that routines left did not end when they were cancelled: %s", len(pending), names)


async def _within(ending: Coroutine[Any, Any, Any], until: float) -> None:
    task = asyncio.ensure_future(ending)
    done, _ = await asyncio.wait((task,), timeout=max(0.05, until - clock.now()))
    for one in done:
        one.result()


def _report(loop: asyncio.AbstractEventLoop, task: asyncio.Task[Any]) -> None:
    if not task.done() or task.cancelled():
        return
    error = task.exception()
    if error is not None:
        loop.call_exception_handler(
            {
                "message": "unhandled exception in a task that a routine left, when its worker stopped",
                "exception": error,
                "task": task,
            }
        )
