"""How a pool comes to its end: what is given up, how often the program was interrupted, and what was lost."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Literal

from headgate.core.interrupts import Interrupts
from headgate.errors import InvalidArgument
from headgate.tasks.model import TaskRecord
from headgate.tasks.runtime.messages import log_interrupted

if TYPE_CHECKING:
    from headgate.tasks.runtime.ports import Launcher
    from headgate.tasks.runtime.signal_drain import SignalDrain
    from headgate.tasks.scheduling.scheduler import Scheduler


Cancel = Literal["none", "queued", "all"]
"""What is given up when a pool closes."""
OnSignal = Literal["drain"]
"""What a pool does on SIGINT and SIGTERM."""


class Ending:
    """The end of one pool."""

    def __init__(self, name: str, scheduler: Scheduler, launcher: Launcher) -> None:
        self._name = name
        self._scheduler = scheduler
        self._launcher = launcher
        self._interrupts: Interrupts | None = None  # of its loop
        self._told = False
        self.cancels_all: bool = False
        """Does the pool cancel all of its tasks, to close?"""
        self.drops_queue: bool = False
        """Does the pool finish what runs, and start nothing that is not needed for that?"""
        self.drain: SignalDrain | None = None
        """What drains the pool on signals; None if it was not asked to."""
        self.exit_code: int | None = None
        """With what the program ends when that is done, because of a signal; None if there was none."""
        self.signals: int = 0
        """How many signals told the pool to drain."""
        self.given_up: int = 0
        """Tasks that were queued when the loop ended around the pool."""
        self.cut_off: int = 0
        """Tasks that were running then."""

    def bind(self, loop: asyncio.AbstractEventLoop) -> None:
        """Count how often Ctrl-C is pressed while this loop runs."""
        self._interrupts = Interrupts(loop)

    def interrupts(self) -> int:
        """How often the program was interrupted: by Ctrl-C, or by a signal that the pool was told to drain on."""
        return max(self.signals, 0 if self._interrupts is None else self._interrupts.count)

    @property
    def is_early(self) -> bool:
        """Are tasks given up, because the pool closes or the program was interrupted?"""
        return self.cancels_all or self.drops_queue or self.interrupts() > 0

    def is_dropped(self, task: TaskRecord) -> bool:
        """Is a queued task given up? Not if a running task submitted it, or waits for it: that one is to finish."""
        parent = task.parent
        while parent is not None and parent.finished:
            parent = parent.parent
        return self.drops_queue and parent is None and not (task.waits is not None and task.waits.by)

    def left_over(self) -> str:
        """What was lost if the program ends here; "" if nothing was."""
        running, queued = self.unfinished()
        running, queued = running + self.cut_off, queued + self.given_up
        return f"{running} running and {queued} queued tasks were lost" if running + queued else ""

    def unfinished(self) -> tuple[int, int]:
        """How many tasks are running, and how many are queued."""
        slots = self._scheduler.slots
        return slots.active + slots.waiting, self._scheduler.depth

    def tell_interrupted(self, error: BaseException | None) -> None:
        """Log one line if a block is left because of Ctrl-C and there is something left to do."""
        running, queued = self.unfinished()
        pressed = self.interrupts() or isinstance(error, KeyboardInterrupt)
        if not self._told and pressed and running + queued:
            self._told = True
            in_threads = self._launcher.in_threads(self._scheduler.unfinished())
            log_interrupted(self._name, f"{running} running and {queued} queued tasks are cancelled", in_threads)

    def tell_signal(self, name: str) -> None:
        """Log one line about a signal: what the pool does now."""
        running, queued = self.unfinished()
        self._told = True
        if self.signals > 1:
            in_threads = self._launcher.in_threads(self._scheduler.unfinished())
            log_interrupted(self._name, f"{name} again, {running} running tasks are cancelled", in_threads)
        else:
            what = f"{name}, waits for {running} running tasks, starts no more ({queued} queued); again to cancel"
            log_interrupted(self._name, what, 0)


def is_ending(loop: asyncio.AbstractEventLoop | None) -> bool:
    """Is everything on this loop being cancelled, as asyncio.run does at its end? Then nothing new may begin."""
    return all(task.cancelling() for task in asyncio.all_tasks(loop))


def checked_cancel(cancel: object) -> Cancel:
    """What is given up when a pool closes; a flag says all or nothing."""
    if isinstance(cancel, bool):
        return "all" if cancel else "none"
    if cancel in ("none", "queued", "all"):
        return cancel
    raise InvalidArgument(
        f"cancel must be 'none', 'queued' or 'all', got {cancel!r}",
        remedy='Pass "queued" to finish what runs and drop what is queued.',
    )


def checked_on_signal(on_signal: object) -> OnSignal | None:
    """What to do on signals; None for nothing."""
    if on_signal is None:
        return None
    if on_signal == "drain":
        return "drain"
    raise InvalidArgument(f"on_signal must be 'drain' or None, got {on_signal!r}", remedy='Pass "drain".')
