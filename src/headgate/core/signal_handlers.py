"""Handles SIGINT and SIGTERM on an event loop, for as long as somebody asks for it, and then as before."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from typing import Any, Final

from headgate.errors import InvalidArgument

SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)


class SignalHandlers:
    """The handlers of one event loop. `heard` is called there with each signal."""

    def __init__(self, loop: asyncio.AbstractEventLoop, heard: Callable[[signal.Signals], None]) -> None:
        self._loop = loop
        self._before: dict[signal.Signals, Any] = {}
        for one in SIGNALS:
            before = signal.getsignal(one)
            try:
                loop.add_signal_handler(one, heard, one)
            except (ValueError, RuntimeError, NotImplementedError) as error:
                self.remove()
                raise InvalidArgument(
                    f"{one.name} cannot be handled here: {error}",
                    remedy="Python handles signals in the main thread only: run the event loop there, or leave it out.",
                ) from error
            self._before[one] = before

    def remove(self) -> None:
        """Let the program do with signals what it did before. Twice is fine."""
        before, self._before = self._before, {}
        for one, handler in before.items():
            if not self._loop.is_closed():
                self._loop.remove_signal_handler(one)
            if handler is not None:  # None: it was not set from Python, and cannot be
                signal.signal(one, handler)
