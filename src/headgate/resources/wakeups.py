"""The waiters: how a call that waits for a resource sleeps and is woken, on an event loop or in a thread without one.

The wait queue itself is pure (`core.wait_queue`). What is granted is written on the ticket under the pools' lock;
`wake` only brings the news, which may come too late or to a loop that is gone.

The first waiter of each queue also keeps the alarm: its loop or thread notices that a cooldown has ended. When it
leaves, the engine gives the alarm to the next.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextvars import Context
from typing import Protocol

from headgate.core.clock import clock


class Waiter(Protocol):
    """A call that sleeps until it is woken."""

    def wake(self) -> bool:
        """Tell the waiter to look at its ticket. From any thread. False: it is gone and will never look."""
        ...

    def passes(self) -> bool:
        """Whether the waiter could use nothing at all now. From any thread."""
        ...

    def is_gone(self) -> bool:
        """Whether the waiter cannot be told anything any more. From any thread."""
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
        """Sleep until woken, or until `deadline`."""
        limit = None
        if deadline is not None:
            limit = self._loop.call_later(max(0.0, deadline - clock.now()), self._finish, context=Context())
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
                # In an empty context: what is logged when the time has come belongs to no task.
                self._alarm = self._loop.call_later(max(0.0, delay), ring, context=Context())

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
        """Sleep until woken, or until `deadline`."""
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
