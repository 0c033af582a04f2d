"""How somebody who stands in line sleeps and is woken: a coroutine on its loop, or a thread without one.

The line itself is pure (`core.waiters`). What is granted is written on the ticket under the pool's lock; waking is only
news of it, and news may come too late or to a loop that is gone.

One waiter of each line, the first, also keeps the alarm: it is the one whose loop or thread will notice that a cooldown
has ended. When it leaves, the pool gives the alarm to the next.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Protocol

from headgate.core.clock import clock


class Waiter(Protocol):
    """Sleeps until woken."""

    def wake(self) -> bool:
        """Tell it to look at its ticket. From any thread. False: it is gone and will never look."""
        ...

    def passes(self) -> bool:
        """Could it use nothing at all now? From any thread."""
        ...

    def is_gone(self) -> bool:
        """Can it be told nothing any more? From any thread."""
        ...

    def set_alarm(self, delay: float, ring: Callable[[], None]) -> bool:
        """Call `ring` after `delay` seconds, from its own loop or thread, if it still waits. False: it is gone."""
        ...


class LoopWaiter:
    """A coroutine that waits on its own event loop."""

    def passes(self) -> bool:
        return False

    def is_gone(self) -> bool:
        return self._loop.is_closed()

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._future: asyncio.Future[None] = self._loop.create_future()
        self._alarm: asyncio.TimerHandle | None = None

    async def wait(self, deadline: float | None) -> None:
        """Until woken or `deadline`."""
        limit = None
        if deadline is not None:
            limit = self._loop.call_later(max(0.0, deadline - clock.now()), self._finish)
        try:
            await self._future
        finally:
            if limit is not None:
                limit.cancel()
            if self._alarm is not None:
                self._alarm.cancel()

    def wake(self) -> bool:
        return self._post(self._finish)

    def set_alarm(self, delay: float, ring: Callable[[], None]) -> bool:
        def arm() -> None:
            if self._alarm is not None:
                self._alarm.cancel()
            if not self._future.done():
                self._alarm = self._loop.call_later(max(0.0, delay), ring)

        return self._post(arm)

    def _post(self, callback: Callable[[], None]) -> bool:
        try:
            self._loop.call_soon_threadsafe(callback)
        except RuntimeError:
            return False  # the loop is closed
        return True

    def _finish(self) -> None:
        if not self._future.done():
            self._future.set_result(None)


class ThreadWaiter:
    """A thread that waits without an event loop."""

    def passes(self) -> bool:
        return False

    def is_gone(self) -> bool:
        return False

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._woken = False
        self._alarm: tuple[float, Callable[[], None]] | None = None

    def wait(self, deadline: float | None) -> None:
        """Until woken or `deadline`."""
        while True:
            with self._changed:
                if self._woken:
                    return
                now = clock.now()
                if deadline is not None and now >= deadline:
                    return
                ends = [deadline] if deadline is not None else []
                due = None
                if self._alarm is not None:
                    at, ring = self._alarm
                    if now >= at:
                        self._alarm, due = None, ring
                    else:
                        ends.append(at)
                if due is None:
                    self._changed.wait(min(min(ends) - now, threading.TIMEOUT_MAX) if ends else None)
            if due is not None:
                due()

    def wake(self) -> bool:
        with self._changed:
            self._woken = True
            self._changed.notify()
        return True

    def set_alarm(self, delay: float, ring: Callable[[], None]) -> bool:
        with self._changed:
            self._alarm = clock.now() + delay, ring
            self._changed.notify()
        return True
