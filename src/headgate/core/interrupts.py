"""How often Ctrl-C was pressed: the first one is waited for, the second one ends the program."""

from __future__ import annotations

import asyncio
import signal


class Interrupts:
    """How often Ctrl-C was pressed since `asyncio.run`, or a Runner, began to run a loop.

    The first one cancels the main task, and the second raises KeyboardInterrupt and ends everything. That is known to
    the Runner alone, so it is asked; without one, or where it does not tell, it is 0.
    """

    __slots__ = ("_runner",)

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        handler = signal.getsignal(signal.SIGINT)  # not later: it is taken away before the last tasks are cancelled
        runner = getattr(getattr(handler, "func", None), "__self__", None)
        self._runner: object = runner if getattr(runner, "_loop", None) is loop else None

    @property
    def count(self) -> int:
        """How often Ctrl-C was pressed."""
        return int(getattr(self._runner, "_interrupt_count", 0))
