"""One thread with an event loop of its own, which a store owns.

Pools of any thread and any event loop share a store, so nothing of a store may depend on one of them: a loop of the
user that is blocked must not delay a heartbeat. The thread is started by the first `post` and is a daemon: a program
that forgets to close its store ends all the same.

In a forked child the thread does not exist. The child begins anew: its first `post` starts a thread of its own. What
was posted in the parent and not run is the parent's, and is not run in the child.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

from headgate.errors import PoolClosed
from headgate.stores.shared.fork_guard import ForkGuard, never_free


class StoreThread:
    """Runs callbacks one after the other, in a thread of its own."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._guard = ForkGuard(self._forked)
        self._loop: asyncio.SelectorEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def post(self, callback: Callable[[], object]) -> None:
        """Run this in the thread, after all that was posted before. May be called from any thread.

        PoolClosed when the thread was closed, or when the interpreter is ending and no thread can be started.
        """
        with self._lock:
            if self._is_closed:
                raise PoolClosed("the store is closed", remedy="Make a new store.")
            loop = self._loop or self._start()
            loop.call_soon_threadsafe(callback)

    def close(self, last: Callable[[], object], timeout: float) -> bool:
        """End the thread after all that was posted, and after `last`; wait for that, at most so many seconds.

        Returns whether it has ended, or will as soon as its own callback that called this returns.
        """
        with self._lock:
            loop, thread = self._loop, self._thread
            if loop is not None and not self._is_closed:
                loop.call_soon_threadsafe(_end, loop, last)
            self._is_closed = True
        if thread is None or thread is threading.current_thread():
            return True
        thread.join(timeout)
        return not thread.is_alive()

    def _start(self) -> asyncio.SelectorEventLoop:
        with self._guard:
            loop = asyncio.SelectorEventLoop()
        thread = threading.Thread(target=_run, args=(loop,), name=self._name, daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            loop.close()
            raise PoolClosed(f"the thread of the store cannot be started: {error}", remedy="Try again.") from error
        self._loop, self._thread = loop, thread
        return loop

    def _forked(self) -> None:
        self._lock = threading.Lock()
        if self._loop is not None:
            never_free(self._loop)  # it believes that it runs, and warns when it is freed
        self._loop = self._thread = None


def _run(loop: asyncio.SelectorEventLoop) -> None:
    try:
        loop.run_forever()
    finally:
        loop.close()


def _end(loop: asyncio.SelectorEventLoop, last: Callable[[], object]) -> None:
    try:
        last()
    finally:
        loop.stop()
