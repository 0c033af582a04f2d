"""Calling functions in threads, waiting for them, and seeing what each thread is doing."""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
import traceback
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor, Future
from contextvars import Context
from queue import SimpleQueue
from types import FrameType
from typing import Any, TypeVar

from headgate.core.clock import clock

T = TypeVar("T")


def call_in_thread(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Any:
    """Call it in a thread whose future somebody awaits.

    A future refuses to carry StopIteration, and whoever waits for it would wait for ever: it becomes a RuntimeError, as
    in a coroutine.
    """
    try:
        return fn(*args, **(kwargs or {}))
    except StopIteration as stop:
        raise RuntimeError("the function raised StopIteration") from stop


class Threads(Executor):
    """An executor with a thread for each call in progress, which the end of the program does not wait for.

    (A ThreadPoolExecutor has a fixed number, and a call that waits for another one could wait for ever. And at the end
    of the program it joins its threads, however often Ctrl-C is pressed.)
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._crew = _Crew()
        self._threads: list[threading.Thread] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call it in a thread that is idle, or in a new one."""
        crew = self._crew
        with crew.lock:
            idle = crew.idle > 0
            crew.idle -= idle
        if not idle:
            name = f"{self._name}_{len(self._threads)}"
            thread = threading.Thread(target=_serve, args=(crew,), name=name, daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                if "interpreter shutdown" not in str(error):
                    raise
                # Python 3.12.0 to 3.12.2 starts none once the main thread has ended (CPython's gh-113964). What the end
                # of the program waits for is called here, then. The price: the caller's loop stands still meanwhile.
                return _called_here(fn, args, kwargs)
            self._threads.append(thread)
        future: Future[Any] = Future()
        crew.calls.put((future, fn, args, kwargs))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the threads: idle ones now, others when their calls have ended."""
        threads, self._threads = self._threads, []
        for _ in threads:
            self._crew.calls.put(None)
        for thread in threads if wait else ():
            thread.join()

    def __del__(self) -> None:
        self.shutdown(wait=False)


class _Crew:
    """What the threads of one executor share. They do not hold the executor: who drops it ends them."""

    def __init__(self) -> None:
        self.calls: SimpleQueue[Any] = SimpleQueue()
        self.lock = threading.Lock()
        self.idle = 0  # threads that have no call, and for which none is queued


def _serve(crew: _Crew) -> None:
    while (call := crew.calls.get()) is not None:
        future, fn, args, kwargs = call
        if future.set_running_or_notify_cancel():
            try:
                result = fn(*args, **kwargs)
            except BaseException as error:
                outcome: Callable[[], None] = _then(future.set_exception, error)
            else:
                outcome = _then(future.set_result, result)
                del result
        else:
            outcome = _nothing
        del call, future, fn, args, kwargs  # an idle thread holds on to nothing
        with crew.lock:
            crew.idle += 1  # before anybody knows of the result: who hears of it and calls again finds this thread
        outcome()
        del outcome


def _called_here(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Future[Any]:
    future: Future[Any] = Future()
    try:
        future.set_result(fn(*args, **kwargs))
    except BaseException as error:
        future.set_exception(error)
    return future


def _then(tell: Callable[[T], None], what: T) -> Callable[[], None]:
    return lambda: tell(what)


def _nothing() -> None:
    pass


async def outlast_cancellation(
    future: asyncio.Future[Any], on_cancel: Callable[[], object] | None = None
) -> asyncio.CancelledError | None:
    """Wait until a future is done, also when the waiting task is cancelled; returns the last cancellation, if any.

    For work that cannot be interrupted, such as a function in a thread: who cancels it must not be told that it has
    ended while it still runs. `on_cancel` is called at each cancellation; if it raises, the wait ends with that.
    """
    cancellation: asyncio.CancelledError | None = None
    try:
        while not future.done():
            try:
                await asyncio.wait((future,))
            except asyncio.CancelledError as error:
                cancellation = error
                if on_cancel is not None:
                    on_cancel()
        return cancellation
    finally:
        del cancellation, future, on_cancel  # its traceback holds this frame


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
    await outlast_cancellation(done, lambda: there.call_soon_threadsafe(lambda: [task.cancel() for task in tasks]))
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


def stacks() -> dict[int, str]:
    """Return the stack of each thread as text, by its ident.

    All stacks are walked before any is formatted: formatting reads files, other threads run meanwhile, and a frame that
    has returned no longer knows its caller.
    """
    clock.sleep(0)  # so that the walk begins with a full turn of the interpreter's lock
    walked = {ident: list(traceback.walk_stack(frame)) for ident, frame in current_frames().items()}
    return {
        ident: "".join(traceback.StackSummary.extract(reversed(frames)).format()) for ident, frames in walked.items()
    }


def living_threads() -> list[threading.Thread]:
    """The threads that have not ended. A foreign thread that once asked for its name stays in `threading.enumerate()`
    for ever; only the living have a stack."""
    stacks = current_frames()
    return [thread for thread in threading.enumerate() if thread.ident in stacks]
