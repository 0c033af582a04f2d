"""Runs the setup and the teardown of a worker: in one task, on the loop on which its routines run.

On that loop, because a client or a connection that is made on one loop cannot be used on another. In one task, because
what was entered in a task must be left in it (task groups, time limits, cancel scopes). So the task is there for as
long as the worker: it runs the setup, waits until the worker has finished its calls, and runs the teardown.

It runs in the Context in which calls begin. A variable of `contextvars` that the setup sets is set in every call. The
variables of headgate are not kept: a call has those of its caller, and nothing else.

Plain functions hold the loop while they run. There are no calls yet, or none any more, that would wait for it.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import inspect
import logging
import sys
from collections.abc import Callable, Coroutine
from typing import Any, cast

from headgate.context.chains import CHAIN, NONE, VALUES
from headgate.core.redaction import log_exception, redact
from headgate.errors import WorkerStartFailed
from headgate.workers.serialization.dynamic_classes import loads
from headgate.workers.server.task_loop import TaskLoop
from headgate.workers.setup import TEARDOWN_SECONDS, Setup, is_context_manager, is_unentered_generator, keep_result

_log = logging.getLogger("headgate.workers")


class SetupTask:
    """The task that runs the setup and the teardown of one worker."""

    def __init__(self, tasks: TaskLoop, setup: Setup) -> None:
        self._tasks = tasks
        self._setup = setup
        self._ready: concurrent.futures.Future[BaseException | None] = concurrent.futures.Future()
        self._ended: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._ends = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    # -- on the server's loop -----------------------------------------------------------------------------------------

    async def begin(self) -> None:
        """Run the setup. WorkerStartFailed: it failed, which is the cause, or took too long."""
        self._tasks.loop.call_soon_threadsafe(self._start)
        if not await _is_done(self._ready, self._setup.timeout):
            sys.stderr.write(f"What setup did when its time was over:\n{self._where()}\n")
            self._tasks.loop.call_soon_threadsafe(self._ends.set)  # if it ends after all, nothing waits for calls
            raise WorkerStartFailed(
                f"setup did not end within {self._setup.timeout:g} s, the quorum_timeout of the pool",
                remedy="Find out what it waits for, or open the pool with a higher quorum_timeout.",
            )
        error = self._ready.result()
        if isinstance(error, SystemExit):
            raise WorkerStartFailed(f"setup called sys.exit({error.code!r})") from error
        if error is not None:
            raise WorkerStartFailed(f"setup raised {type(error).__name__}: {error}") from error

    async def end(self) -> None:
        """Run the teardown. What it raises is logged, and one that takes too long is not waited for."""
        self._tasks.loop.call_soon_threadsafe(self._ends.set)
        if not await _is_done(self._ended, TEARDOWN_SECONDS):
            _log.warning(
                "the teardown of a worker did not end within %g s and is cancelled. What it did then:\n%s",
                TEARDOWN_SECONDS,
                redact(self._where()),
            )

    def _where(self) -> str:
        """Return where the task is, as text: the line at which it waits, or the stack of the thread that it holds."""
        inner: Any = None if self._task is None else self._task.get_coro()
        frame = None
        while inner is not None:
            frame = getattr(inner, "cr_frame", None) or getattr(inner, "ag_frame", None) or frame
            inner = getattr(inner, "cr_await", None) or getattr(inner, "ag_await", None)
            if frame is not None and frame.f_code.co_filename == contextlib.__file__:
                inner = getattr(frame.f_locals.get("self"), "gen", inner)  # of an @asynccontextmanager
        if frame is None or frame.f_code is SetupTask._live.__code__:
            return self._tasks.stack()
        return f'  File "{frame.f_code.co_filename}", line {frame.f_lineno}, in {frame.f_code.co_name}'

    # -- on the task loop ---------------------------------------------------------------------------------------------

    def _start(self) -> None:
        self._task = self._tasks.loop.create_task(self._live(), name="headgate setup", context=self._tasks.clean)

    async def _live(self) -> None:
        entered = contextlib.AsyncExitStack()
        try:
            setup, teardown = loads(self._setup.pickled)
            keep_result(None if setup is None else await _entered(setup, entered))
            VALUES.set(NONE)
            CHAIN.set(None)
        except BaseException as error:  # SystemExit too: asyncio would let it end the loop
            self._ready.set_result(error)
            return
        self._ready.set_result(None)
        while not self._ends.is_set():
            with contextlib.suppress(asyncio.CancelledError):  # of a routine that cancels every task it finds
                await self._ends.wait()
        if teardown is not None:
            await _concluded("teardown", _called(teardown))
        await _concluded("context manager of setup", entered.aclose())
        self._ended.set_result(None)


async def _is_done(future: concurrent.futures.Future[Any], seconds: float | None) -> bool:
    """Wait until a future of the other thread is done, for so many seconds. It is left as it is if it is not."""
    done, _ = await asyncio.wait([asyncio.wrap_future(future)], timeout=seconds)
    return bool(done)


async def _concluded(what: str, ending: Coroutine[Any, Any, object]) -> None:
    """Await something at the end of the worker, which does not depend on its success."""
    try:
        await ending
    except BaseException as error:
        if not isinstance(error, asyncio.CancelledError):  # else it took too long, which was said
            log_exception("headgate.workers", "the %s of a worker failed", what)


async def _called(fn: Callable[[], Any]) -> Any:
    result = fn()
    return await result if inspect.isawaitable(result) else result


async def _entered(setup: Any, stack: contextlib.AsyncExitStack) -> Any:
    """Call the setup and return what it returns. A context manager is entered, and left when the stack is closed.

    Entered is a context manager that was given, or an object of a class that was, or what a function with
    `@asynccontextmanager` or `@contextmanager` returns. Whatever else a function returns belongs to the user: a lock is
    a context manager too.
    """
    made = cast("Any", setup() if callable(setup) else setup)
    kind = setup
    while isinstance(kind, functools.partial):
        kind = kind.func
    if made is setup or isinstance(kind, type) or is_unentered_generator(made):
        if hasattr(type(made), "__aenter__"):
            return await stack.enter_async_context(made)
        if is_context_manager(made):
            return stack.enter_context(made)
    return await made if inspect.isawaitable(made) else made
