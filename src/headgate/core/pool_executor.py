"""A pool as a `concurrent.futures.Executor`: what `TaskPool.as_executor` and `WorkerPool.as_executor` return.

The pool works on one event loop. Calls come from any thread, are begun on that loop, and end there; each has a future
of `concurrent.futures`. Which loop it is:

    the pool is bound to a loop, or its block was entered   that loop; whoever opened the pool closes it
    otherwise, `with pool.as_executor():`                   a loop in a thread of its own, which opens and closes it
    otherwise, `submit` where a loop runs                   what the pool says: a TaskPool takes that loop
    otherwise                                               a loop in a thread of its own

A future is pending until its call starts. Until then it can be cancelled, and after that it cannot, as with the
executors of Python. Both are decided by the state of the future, under its lock, so a call that was cancelled never
runs (`PoolFuture.begins`).
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import threading
import weakref
from asyncio import _get_running_loop
from collections.abc import Callable, Coroutine
from contextvars import Context, copy_context
from typing import Any, ParamSpec, Protocol, Self, TypeVar, overload

from headgate.core.redaction import log_exception
from headgate.errors import PoolClosed, WaitCycle

P = ParamSpec("P")
R = TypeVar("R")

_AFTER = "cannot schedule new futures after"  # the words of Python's own executors, which programs look for


class Backend(Protocol):
    """The pool, as an executor needs it. All but `home` and `waited` are called on the loop of the pool."""

    def home(self, running: asyncio.AbstractEventLoop | None) -> asyncio.AbstractEventLoop | None:
        """Return the loop on which calls from a thread with this loop are run; None: a loop of the executor's own."""
        ...

    async def open(self) -> None:
        """Open the pool, on a loop of the executor's own."""
        ...

    async def close(self) -> None:
        """Close the pool that `open` has opened. All calls have ended."""
        ...

    def begin(self, future: PoolFuture) -> None:
        """Start or queue the call of a future, in the context of its submitter."""
        ...

    def withdraw(self, future: PoolFuture) -> None:
        """Forget the call of a future that was cancelled before the call started."""
        ...

    def waited(self, future: PoolFuture, timeout: float | None) -> bool:
        """Wait for a future, in a thread that wants its result, if the pool has a way of its own to do that.

        Returns whether it has waited.
        """
        ...


class PoolFuture(concurrent.futures.Future[Any]):
    """The future of one call."""

    def __init__(self, calls: Calls, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__()
        self._calls = calls
        self._is_told = False
        self.work: tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]] | None = (fn, args, kwargs)
        """Function and arguments, until the pool has them."""
        self.running_as: Any = None
        """What the pool knows the call by; its own affair."""

    def cancel(self) -> bool:
        """Cancel the call if it has not started. Returns whether it is cancelled."""
        before = self.cancelled()
        if not super().cancel():
            return False
        if not before:
            self._calls.withdraw(self)
        return True

    def result(self, timeout: float | None = None) -> Any:
        """Return what the call returned, or raise what it raised."""
        try:
            return super().result(self._calls.waited(self, timeout))
        finally:
            del self  # what is raised holds this frame, and the future holds that

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Return what the call raised; None if it returned."""
        return super().exception(self._calls.waited(self, timeout))

    def begins(self) -> bool:
        """Say that the call starts now, or has ended without; False: it was cancelled. On the loop of the pool only."""
        if self._is_told:
            return not self.cancelled()
        self._is_told = True
        return self.set_running_or_notify_cancel()

    def ended(self, result: object, error: BaseException | None = None) -> None:
        """Give the result, or what was raised, to whoever waits."""
        self.work = self.running_as = None
        if not self.begins():
            return
        try:
            if error is None:
                self.set_result(result)
            else:
                self.set_exception(error)
        finally:
            del self, error


class PoolExecutor(concurrent.futures.Executor):
    """Runs calls in a pool: ``with pool.as_executor() as executor: executor.submit(fn, ...)``."""

    def __init__(self, backend: Backend, name: str) -> None:
        self._calls = Calls(backend, name)
        weakref.finalize(self, self._calls.shut).atexit = False  # what was submitted is done all the same

    # An async function gives its result, which Python's own executors do not promise.
    @overload
    def submit(
        self, fn: Callable[P, Coroutine[Any, Any, R]], /, *args: P.args, **kwargs: P.kwargs
    ) -> concurrent.futures.Future[R]: ...
    @overload
    def submit(self, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> concurrent.futures.Future[R]: ...
    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> concurrent.futures.Future[Any]:
        """Call ``fn(*args, **kwargs)`` in the pool when its turn comes. An async function is awaited there.

        What the pool says of it (a full queue, a closed pool) is raised by the future. RuntimeError: shut down.
        """
        return self._calls.submit(fn, args, kwargs)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more calls; with `wait`, return when all have ended; `cancel_futures` cancels those not started."""
        if cancel_futures:
            self._calls.cancel(soon=wait)
        self._calls.shut()
        if wait:
            self._calls.join()

    def runs_on(self, loop: asyncio.AbstractEventLoop) -> bool:
        """Whether it is decided that its calls run on this loop."""
        return self._calls.loop is loop

    def __enter__(self) -> Self:
        self._calls.open()
        return self

    def __repr__(self) -> str:
        return f"<PoolExecutor of {self._calls.name!r}{self._calls.state()}>"


class Calls:
    """The calls of one executor. The thread of its loop holds this and not the executor, so that who drops the executor
    ends the thread."""

    def __init__(self, backend: Backend, name: str) -> None:
        self.name: str = name
        self._backend = backend
        self._lock = threading.Lock()
        self._unfinished: dict[concurrent.futures.Future[Any], None] = {}
        self.loop: asyncio.AbstractEventLoop | None = None
        """The loop on which they run, as soon as that is decided."""
        self._own: _OwnLoop | None = None
        self._is_shut = False
        _exit.add(self)

    # -- from any thread -----------------------------------------------------------------------------------------------

    def submit(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> PoolFuture:
        """Have a call begun, and return its future."""
        future, running = PoolFuture(self, fn, args, kwargs), _get_running_loop()
        with self._lock:
            if _exit.begun or self._is_shut:
                raise RuntimeError(f"{_AFTER} {'interpreter shutdown' if _exit.begun else 'shutdown'}")
            loop = self.loop or self._settle(self._backend.home(running))
            self._unfinished[future] = None
        future.add_done_callback(self._forget)
        context = copy_context()
        if running is loop:
            context.run(self._begin, future)
            return future
        try:
            loop.call_soon_threadsafe(self._begin, future, context=context)
        except RuntimeError as error:
            self._forget(future)
            raise PoolClosed(f"the event loop of {self.name!r} is closed, and {self.name!r} with it") from error
        return future

    def open(self) -> None:
        """Open the pool in a thread of its own, unless a loop has it already; raises what opening raises."""
        with self._lock:
            if self.loop is None:
                self._settle(self._backend.home(None))
            own = self._own
        if own is not None:
            try:
                own.wait_until_open()
            except BaseException:
                self.shut()  # the block is not entered, and so nobody leaves it
                raise

    def withdraw(self, future: PoolFuture) -> None:
        """Tell the pool that a call was cancelled before it started."""
        loop = self.loop
        try:
            if loop is None or _get_running_loop() is loop:
                self._withdraw(future)
            else:
                loop.call_soon_threadsafe(self._withdraw, future)
        except RuntimeError:  # the loop is closed
            future.begins()

    def shut(self) -> None:
        """Take no more calls; end the thread when all have ended."""
        with self._lock:
            self._is_shut = True
            own = self._own
        if own is not None:
            own.end()

    def cancel(self, *, soon: bool) -> None:
        """Take no more calls, and cancel those that have not started.

        Now, or, if that is `soon` enough, on the loop: then calls for which there is a slot have started before.
        """
        with self._lock:
            self._is_shut = True
            own = self._own
        if soon and own is not None:
            own.call(self._cancel_all)
        else:
            self._cancel_all()

    def _cancel_all(self) -> None:
        for future in self.unfinished():
            future.cancel()

    def join(self) -> None:
        """Wait until all calls have ended, and the thread with them."""
        own = self._own
        if own is None:
            unfinished = list(self._unfinished)
            if unfinished and _get_running_loop() is self.loop:
                raise _blocks("shutdown()", self.name, "Await the futures first, or call shutdown(wait=False)")
            concurrent.futures.wait(unfinished)
        elif own.thread is threading.current_thread():
            raise _blocks("shutdown()", self.name, "Call shutdown(wait=False)")
        else:
            self.join_thread()

    def join_thread(self) -> None:
        """Wait for the end of the thread, if there is one."""
        if self._own is not None:
            self._own.thread.join()

    def waited(self, future: PoolFuture, timeout: float | None) -> float | None:
        """Called by a thread that wants a result: returns how long it is to wait for it.

        WaitCycle: it is the thread of the loop that is to run the call, and so would wait for ever.
        """
        if future.done() or self.loop is None:
            return timeout
        if _get_running_loop() is not self.loop:
            return 0 if self._backend.waited(future, timeout) else timeout
        if timeout is None:
            raise _blocks("result()", self.name, "Write `await asyncio.wrap_future(future)`")
        return timeout

    def state(self) -> str:
        """Return what a repr says besides the name."""
        return f"{' shut down,' if self._is_shut else ''} {len(self._unfinished)} unfinished"

    def unfinished(self) -> list[concurrent.futures.Future[Any]]:
        """Return the futures that are not done."""
        return list(self._unfinished)

    def _settle(self, home: asyncio.AbstractEventLoop | None) -> asyncio.AbstractEventLoop:
        """Decide on which loop the calls run, once."""
        if home is None:
            self._own = _OwnLoop(self, self._backend)
            home = self._own.loop
        self.loop = home
        return home

    def _forget(self, future: concurrent.futures.Future[Any]) -> None:
        self._unfinished.pop(future, None)

    # -- on the loop ---------------------------------------------------------------------------------------------------

    def _begin(self, future: PoolFuture) -> None:
        if self._own is not None and self._own.holds(future):
            return
        if future.cancelled():
            future.begins()
            return
        try:
            self._backend.begin(future)
        except BaseException as error:
            future.ended(None, error)
            if not isinstance(error, Exception):
                raise

    def _withdraw(self, future: PoolFuture) -> None:
        future.work = None
        future.begins()
        self._backend.withdraw(future)

    def begin_held(self, held: list[tuple[PoolFuture, Context]]) -> None:
        """Begin the calls that came before the pool was open."""
        for future, context in held:
            context.run(self._begin, future)


class _OwnLoop:
    """A thread with an event loop, on which a pool is opened, used and closed."""

    def __init__(self, calls: Calls, backend: Backend) -> None:
        self.loop: asyncio.AbstractEventLoop = asyncio.new_event_loop()
        self.loop.set_exception_handler(_handle)
        self._calls = calls
        self._backend = backend
        self._held: list[tuple[PoolFuture, Context]] | None = []  # calls that came before the pool was open
        self._opened: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._failure: BaseException | None = None  # why it could not be opened
        self._ending = asyncio.Event()
        # A daemon, or a program that forgets to shut it down would never end. The end of the program waits for it.
        self.thread: threading.Thread = threading.Thread(target=self._run, name=f"headgate {calls.name}", daemon=True)
        try:
            self.thread.start()
        except RuntimeError:
            self.loop.close()
            raise

    def wait_until_open(self) -> None:
        """Return when the pool is open; raise why it could not be opened."""
        self._opened.result()

    def holds(self, future: PoolFuture) -> bool:
        """Keep a call back until the pool is open, or end it if it could not be opened. Returns whether it did."""
        if self._failure is not None:
            future.ended(None, self._failure)
            return True
        if self._held is None:
            return False
        self._held.append((future, copy_context()))
        return True

    def end(self) -> None:
        """Close the pool and end the thread when all calls have ended. May be called from any thread."""
        self.call(self._ending.set)

    def call(self, fn: Callable[[], None]) -> None:
        """Call a function on the loop, unless the thread has ended."""
        try:
            self.loop.call_soon_threadsafe(fn)
        except RuntimeError:
            pass

    def _run(self) -> None:
        try:
            self._finish(self._serve())
            self._finish(self.loop.shutdown_asyncgens())
            self._finish(self.loop.shutdown_default_executor())
        except BaseException:
            log_exception("headgate", "the pool of the executor %r could not be closed", self._calls.name)
        finally:
            self.loop.close()

    def _finish(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run the loop until this is done, also when a call raises SystemExit: that is for its future, not for us."""
        task = self.loop.create_task(coroutine)
        while True:
            try:
                return self.loop.run_until_complete(task)
            except (KeyboardInterrupt, SystemExit):
                if task.done():
                    raise

    async def _serve(self) -> None:
        try:
            await self._backend.open()
        except BaseException as error:
            self._fail(error)
        else:
            held, self._held = self._held or [], None
            self._opened.set_result(None)
            self._calls.begin_held(held)
        await self._ending.wait()
        while unfinished := self._calls.unfinished():
            await asyncio.wait([asyncio.wrap_future(future) for future in unfinished])
        if self._failure is None:
            await self._backend.close()

    def _fail(self, error: BaseException) -> None:
        """The pool could not be opened: so each call says."""
        self._failure = error
        held, self._held = self._held or [], None
        self._opened.set_exception(error)
        for future, _ in held:
            future.ended(None, error)


def _handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log what asyncio tells, except that a call ended with SystemExit: whoever has its future hears of that."""
    if not isinstance(context.get("exception"), (KeyboardInterrupt, SystemExit)):
        loop.default_exception_handler(context)


def _blocks(what: str, name: str, remedy: str) -> WaitCycle:
    return WaitCycle(
        f"{what} would block the event loop on which the calls of {name!r} run, and they would never end",
        remedy=f"{remedy}; or have a pool that is not in use yet opened in a thread of its own: "
        "`with pool.as_executor() as executor:`.",
    )


class _Exit:
    """The end of the program: it waits for what was submitted, as for Python's own executors. Ctrl-C ends the wait."""

    def __init__(self) -> None:
        self.begun = False
        self._calls: weakref.WeakSet[Calls] = weakref.WeakSet()
        self._is_watched = False

    def add(self, calls: Calls) -> None:
        """Wait for these calls too."""
        if not self._is_watched:
            # Not by `atexit`, unless there is nothing else: it comes too late to start threads.
            register: Callable[..., object] = getattr(threading, "_register_atexit", atexit.register)
            register(self._begin)
            self._is_watched = True
        self._calls.add(calls)

    def _begin(self) -> None:
        self.begun = True
        calls = list(self._calls)
        for one in calls:
            one.shut()
        for one in calls:
            one.join_thread()


_exit = _Exit()
