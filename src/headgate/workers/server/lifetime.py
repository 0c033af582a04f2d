"""When a worker that stands alone ends by itself: after so many tasks, above so much memory, or without clients."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headgate.workers.server.service import Service

MEMORY_PERIOD = 1.0
"""Seconds between two looks at the memory of the process: no event tells that it has grown."""


@dataclass(frozen=True, slots=True)
class Lifetime:
    """Limits of the life of a worker. None: no limit."""

    max_tasks: int | None = None
    """Tasks that it executes."""
    max_memory: int | None = None
    """Bytes of memory that its process may have."""
    orphan_timeout: float | None = None
    """Seconds that it waits for a client, from its start or since the last one went."""


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
        if lifetime.max_memory is not None:
            self._look_at_memory(lifetime.max_memory)
        self.changed()

    def changed(self) -> None:
        """Look at the worker after calls have ended, or a client came or went."""
        most, patience = self._lifetime.max_tasks, self._lifetime.orphan_timeout
        if most is not None and self._service.finished >= most:
            self._end(f"it has executed {self._service.finished} tasks, and max_tasks is {most}")
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
        for timer in (self._orphaned, self._memory):
            if timer is not None:
                timer.cancel()

    def _look_at_memory(self, most: int) -> None:
        used = memory_of_process()
        if used > most:
            self._end(f"its process has {used / 2**20:.0f} MB of memory, and max_memory is {most / 2**20:.0f} MB")
        else:
            self._memory = self._loop.call_later(MEMORY_PERIOD, self._look_at_memory, most)

    def _end(self, reason: str) -> None:
        if not self._over:
            self.close()
            self._tell(reason)


def memory_of_process() -> int:
    """Return the bytes of memory that this process has now; where there is no /proc, the most that it ever had."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        import resource

        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return most if sys.platform == "darwin" else most * 1024
