"""When a worker is to end: after so many tasks, above so much memory, or without clients or calls for some time.

A worker that stands alone then stops. One of a pool tells that it is to be replaced, and goes on until it is.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from headgate.core.clock import clock
from headgate.workers.model import Lifetime

if TYPE_CHECKING:
    from headgate.workers.server.service import Service

MEMORY_PERIOD = 1.0
"""Seconds between two looks at the memory of the process: no event tells that it has grown."""


class LifetimeWatch:
    """Watches one worker, and calls `end` once, with the reason, when a limit is reached. `close` ends the watching."""

    def __init__(self, service: Service, lifetime: Lifetime, end: Callable[[str], None]) -> None:
        self._service = service
        self._lifetime = lifetime
        self._tell = end
        self._over = False
        self._loop = asyncio.get_running_loop()
        self._orphaned: asyncio.TimerHandle | None = None
        self._memory: asyncio.TimerHandle | None = None
        self._idle: asyncio.TimerHandle | None = None
        self._seen = service.finished
        self._last_call = clock.now()  # when the last call ended
        if lifetime.idle_timeout is not None:
            self._look_for_calls(lifetime.idle_timeout)
        if lifetime.max_memory is not None:
            self._look_at_memory(lifetime.max_memory)
        self.changed()

    def changed(self) -> None:
        """Look at the worker after calls have ended, or a client came or went."""
        most, patience = self._lifetime.max_tasks, self._lifetime.orphan_timeout
        if most is not None and self._service.finished >= most:
            self._end(f"it has executed {self._service.finished} tasks, and max_tasks is {most}")
        if self._idle is not None and self._service.finished != self._seen:
            self._seen, self._last_call = self._service.finished, clock.now()
        if patience is None or self._over:
            return
        if self._service.clients:
            if self._orphaned is not None:
                self._orphaned.cancel()
                self._orphaned = None
        elif self._orphaned is None:
            self._orphaned = self._loop.call_later(patience, self._end, f"no client was connected for {patience:g} s")

    def close(self) -> None:
        """Stop watching."""
        self._over = True
        for timer in (self._orphaned, self._memory, self._idle):
            if timer is not None:
                timer.cancel()

    def _look_at_memory(self, most: int) -> None:
        used = memory_of_process()
        if used > most:
            self._end(f"its process has {used / 2**20:.0f} MB of memory, and max_memory is {most / 2**20:.0f} MB")
        else:
            self._memory = self._loop.call_later(MEMORY_PERIOD, self._look_at_memory, most)

    def _look_for_calls(self, patience: float) -> None:
        """End if there was no call for so long, else look again when that may be. A generator between two steps is a
        call."""
        left = self._last_call + patience - clock.now()
        if self._service.is_awaited:
            left = patience
        if left > 0:
            self._idle = self._loop.call_later(left, self._look_for_calls, patience)
        else:
            self._end(f"it had no call for {patience:g} s, and idle_timeout is {patience:g}")

    def _end(self, reason: str) -> None:
        if not self._over:
            self.close()
            self._tell(reason)


def memory_of_process() -> int:
    """Return the bytes of memory that this process has now; where there is no /proc, the most that it ever had.

    This is the resident memory (RSS), with pages that are shared with other processes. What is the process's own alone
    (USS) would leave out what workers share by being forks, some 25 MB; but reading it walks through all its pages,
    which takes milliseconds for a large process, and nobody else shows that number.
    """
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        import resource

        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return most if sys.platform == "darwin" else most * 1024
