"""Imports the modules that calls need, in a thread, so that the task loop stays free.

One module is imported at a time, in the order in which calls asked. (Python breaks the deadlock between two threads
whose imports wait for each other by showing one of them a half-initialized module.) Calls that need the same module
wait for the same import. A call that is cancelled stops waiting, and the import continues.

The calls that waited resume one in each turn of the loop. If all of them resumed in one turn, the first would be
answered when the last has run.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import threading
from collections import deque
from contextlib import suppress
from itertools import accumulate
from types import TracebackType
from typing import NamedTuple, NoReturn

from headgate.core.clock import clock

SLOW = 1.0
"""Seconds after which the import of a module is worth a line in the log."""

_log = logging.getLogger("headgate.workers")


class FailedImport(NamedTuple):
    """What an import raised, for every call that waited for it."""

    error: BaseException
    traceback: TracebackType | None

    def throw(self) -> NoReturn:
        """Raise it, with a traceback that does not grow with each call that it is raised in."""
        raise self.error.with_traceback(self.traceback)


class Imports:
    """The imports of one task loop. Used on that loop, without a lock."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: dict[str, deque[asyncio.Future[FailedImport | None]]] = {}  # by the module they wait for
        self._queue: deque[str] = deque()
        self.ended: float = 0.0
        """When the last import ended."""

    @property
    def active(self) -> bool:
        """True while a module is being imported. Thread-safe."""
        return bool(self._waiting)

    async def wait(self, module: str) -> FailedImport | None:
        """Import a module, or wait for the import that is under way. Returns what the import raised, or None."""
        future: asyncio.Future[FailedImport | None] = self._loop.create_future()
        waiting = self._waiting.get(module)
        if waiting is None:
            waiting = self._waiting[module] = deque()
            self._queue.append(module)
            if len(self._waiting) == 1:
                self._start_next()
        waiting.append(future)
        return await future

    def _start_next(self) -> None:
        module = self._queue.popleft()
        # A daemon: a worker that stops does not wait for an import.
        thread = threading.Thread(target=self._import, args=(module,), name="headgate import", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # there cannot be another thread
            self._import(module)

    def _import(self, module: str) -> None:
        """Import a module in this thread, for which the task loop is the running one.

        So clients that a module makes belong to that loop, and `asyncio.run` in a module that lacks its ``if __name__
        == "__main__":`` fails: it would start workers that import the module again, and so on.
        """
        asyncio._set_running_loop(self._loop)
        failed: FailedImport | None = None
        try:
            _import(module)
        except BaseException as error:  # SystemExit too: it is for the caller
            failed = FailedImport(error, error.__traceback__)
        with suppress(RuntimeError):  # the loop is closed, and nobody waits
            self._loop.call_soon_threadsafe(self._end, module, failed)
        del failed  # its traceback holds this frame

    def _end(self, module: str, failed: FailedImport | None) -> None:
        if self._queue:
            self._start_next()
        self.ended = clock.now()  # before `active` is False: another thread reads both
        self._resume(self._waiting.pop(module), failed)

    def _resume(self, waiting: deque[asyncio.Future[FailedImport | None]], failed: FailedImport | None) -> None:
        while waiting:
            future = waiting.popleft()
            if not future.done():  # else its call was cancelled
                future.set_result(failed)
                self._loop.call_soon(self._resume, waiting, failed)
                return


def _import(module: str) -> None:
    """Import a module after its packages, and log what took long: the one of them that a user knows by name."""
    slowest, longest = "", 0.0
    for name in accumulate(module.split("."), "{}.{}".format):
        began = clock.now()
        importlib.import_module(name)
        if (took := clock.now() - began) > longest:
            slowest, longest = name, took
    if longest >= SLOW:
        _log.warning("importing %s took %.1f s", slowest, longest)
