"""The one thread that a PostgresStore owns, with an event loop of its own.

Pools of any thread and any event loop share a store. Nothing of it may depend on one of them: a loop of the user that
is blocked must not delay a heartbeat. The thread is a daemon, so a program that forgets to close its store ends all the
same.
"""

from __future__ import annotations

import asyncio
import ctypes
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from headgate.errors import PoolClosed

T = TypeVar("T")


class LoopThread:
    """A thread that runs one coroutine on a loop of its own, and beside it what others post."""

    def __init__(self, name: str, main: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Start the thread. It ends when `main` has ended."""
        self._loop = asyncio.SelectorEventLoop()
        self._main = main
        self._waiting: dict[Future[Any], list[asyncio.Task[None]]] = {}
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:  # the interpreter is ending, or there are no more threads
            self._loop.close()
            raise PoolClosed(f"the thread of the store cannot be started: {error}", remedy="Try again.") from None

    def post(self, callback: Callable[[], object]) -> bool:
        """Call this on the loop of the thread, after all that was posted before. False when the thread has ended."""
        try:
            self._loop.call_soon_threadsafe(callback)
        except RuntimeError:  # the loop is closed
            return False
        return True

    def call(self, work: Callable[[], Coroutine[Any, Any, T]]) -> Future[T]:
        """Await a coroutine on the loop of the thread."""
        future: Future[T] = Future()
        closed = PoolClosed("the store is closed", remedy="Make a new store.")

        async def run() -> None:
            try:
                result = await work()
            except asyncio.CancelledError:
                future.set_exception(closed)
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)

        tasks: list[asyncio.Task[None]] = []  # the loop holds tasks weakly
        self._waiting[future] = tasks
        future.add_done_callback(lambda _: self._waiting.pop(future, None))
        if not self.post(lambda: tasks.append(self._loop.create_task(run()))) and not future.done():
            future.set_exception(closed)
        return future

    def is_current(self) -> bool:
        """Is this called in the thread itself?"""
        return threading.current_thread() is self._thread

    def join(self, timeout: float) -> bool:
        """Wait until the thread has ended, for so many seconds; returns whether it has."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def abandon(self) -> None:
        """Leave everything alone, in a forked child: loop, epoll and sockets are shared with the parent.

        Freeing a connection would take its socket out of the epoll of the parent. So nothing is freed, not even when
        the interpreter ends.
        """
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self))

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._main())
        finally:
            self._loop.run_until_complete(_end_others())
            self._loop.close()
            for future in list(self._waiting):  # posted, and not begun
                if not future.done():
                    future.set_exception(PoolClosed("the store is closed", remedy="Make a new store."))


async def _end_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    await asyncio.sleep(0)  # transports that were aborted close their sockets in the next turn
