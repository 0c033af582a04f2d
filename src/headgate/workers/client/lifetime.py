"""When a session has lasted for long enough: before its connection gets too old, and after a time without calls."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Literal

from headgate.core.clock import clock

IDLE = 60.0
"""Seconds without calls after which a session is closed; the next call opens another."""
AGING = 0.63, 0.77
"""Between which parts of the age limit of a connection the next session is opened. A server closes connections up to a
tenth earlier than it says, and clients that came together should not all come again together."""
AGAIN = 0.1
"""The part of the age limit after which it is tried again, if the next session did not open."""
LATER = 5.0
"""Seconds after which it is tried again where there is no such limit."""


class Lifetime:
    """The timers of one session. `tell` hears that it is to be replaced: for its age, or because nobody uses it.

    `last_use` returns when it was last used, or None while it is in use.
    """

    __slots__ = ("_age", "_idle", "_last_use", "_loop", "_max_age", "_tell")

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        last_use: Callable[[], float | None],
        tell: Callable[[Literal["aging", "idle"]], None],
    ) -> None:
        self._loop = loop
        self._last_use = last_use
        self._tell = tell
        self._max_age = 0.0
        self._age: asyncio.TimerHandle | None = None
        self._idle: asyncio.TimerHandle | None = None

    def begin(self, max_age: float) -> None:
        """Begin to count, because the session is open; `max_age`: seconds until its connection is closed, or 0."""
        self._max_age = max_age
        if max_age:
            self._age = self._loop.call_later(max_age * clock.uniform(*AGING), self._tell, "aging")
        self._idle = self._loop.call_later(IDLE, self._look)

    def again(self) -> None:
        """Tell of its age again a little later, because the next session did not open."""
        if self._idle is not None:
            pause = max(0.1, AGAIN * self._max_age) if self._max_age else LATER
            self._age = self._loop.call_later(pause, self._tell, "aging")

    def end(self) -> None:
        """Stop counting."""
        for timer in (self._age, self._idle):
            if timer is not None:
                timer.cancel()
        self._age = self._idle = None

    def _look(self) -> None:
        used = self._last_use()
        left = IDLE if used is None else used + IDLE - clock.now()
        if left > 0:
            self._idle = self._loop.call_later(left, self._look)
        else:
            self._tell("idle")
