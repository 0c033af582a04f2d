"""Ends a program on SIGINT or SIGTERM when the running tasks of its pools have finished.

The first signal stops the pools from starting tasks, cancels what is queued, and lets what runs finish. The second one
cancels what runs. Then the program ends with the code that shells use: 130 or 143. It ends by SystemExit, which runs
every ``finally`` and prints nothing: raised by the block of a pool, or by `map` when it has handed out what finished,
wherever the program is. A program that waits for something else is cancelled there first.

The pools of one event loop end together, because the program ends once.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, NoReturn

from headgate.core.signal_handlers import SignalHandlers
from headgate.errors import PoolClosed, TaskCancelled

if TYPE_CHECKING:
    from headgate.tasks.runtime.executor import Executor

Close = Callable[[], Coroutine[Any, Any, None]]

_EXPECTED = (asyncio.CancelledError, KeyboardInterrupt, SystemExit, TaskCancelled, PoolClosed)
"""What a block is left by because its tasks were dropped."""


class SignalDrain:
    """One pool that is drained on signals."""

    def __init__(self, executor: Executor, close: Close) -> None:
        assert executor.loop is not None, "it is bound"
        self._executor = executor
        self._close = close  # drops the queue, and returns when nothing runs any more
        self._closing: asyncio.Task[None] | None = None
        self.readers: int = 0
        """How many `map` hand out results: each ends the program when it has handed out what there is."""
        self.block: asyncio.Task[Any] | None = None
        """The asyncio Task in whose ``async with`` the pool is; None if it is in none."""
        self.leaves_block: bool = False
        """Is that block being left? Then it ends the program."""
        self._pools = _pools_of(executor.loop)
        self._pools.join(self)

    @property
    def exit_code(self) -> int | None:
        """With what the program ends; None as long as there was no signal."""
        return self._executor.ending.exit_code

    @property
    def is_done(self) -> bool:
        """Has everything that ran come to its end?"""
        return self._closing is not None and self._closing.done()

    def heard(self, what: signal.Signals, count: int) -> None:
        """Drain on the first signal, and cancel on the next."""
        ending = self._executor.ending
        ending.signals = count
        ending.tell_signal(what.name)
        if self._closing is None:
            ending.exit_code = 128 + what
            self._closing = asyncio.ensure_future(self._close())
            self._closing.add_done_callback(lambda _: self._pools.end())
        else:
            self._executor.cancel_all()

    async def finish(self) -> NoReturn:
        """Wait until what runs has finished, and end the program."""
        assert self._closing is not None, "there was a signal"
        await asyncio.shield(self._closing)
        self._pools.is_ending = True
        raise SystemExit(self.exit_code)

    def reader_left(self) -> None:
        """A `map` is over, or was left early."""
        self.readers -= 1
        if self._closing is not None:
            self._pools.end()

    def leave(self) -> None:
        """Drain on no more signals: the pool is closed."""
        self._pools.leave(self)


class _Pools:
    """The pools of one event loop that are drained on signals."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._drains: list[SignalDrain] = []
        self._handlers: SignalHandlers | None = None
        self._count = 0
        self.is_ending: bool = False
        """Is somebody ending the program already? Then a cancellation would hit what runs in its ``finally`` blocks."""

    def join(self, drain: SignalDrain) -> None:
        if self._handlers is None:
            self._handlers = SignalHandlers(self._loop, self._heard)
            _pools[self._loop] = self
        self._drains.append(drain)

    def leave(self, drain: SignalDrain) -> None:
        if drain in self._drains and not self._count:
            self._drains.remove(drain)
        if self._handlers is not None and not self._drains:
            self._handlers.remove()
            self._handlers = None
            _pools.pop(self._loop, None)

    def _heard(self, what: signal.Signals) -> None:
        self._count += 1
        for drain in list(self._drains):
            drain.heard(what, self._count)
        if self._count > 1 and self._handlers is not None:
            self._handlers.remove()  # a third one ends the program by the program's own means

    def end(self) -> None:
        """End the program, if nothing runs in any pool, and no `map` has results to hand out."""
        if not all(drain.is_done for drain in self._drains) or any(drain.readers for drain in self._drains):
            return
        if self.is_ending or any(drain.leaves_block for drain in self._drains):
            return
        block = next(
            (drain.block for drain in self._drains if drain.block is not None and not drain.block.done()), None
        )
        self.is_ending = True
        if block is not None:
            block.cancel("headgate: the program was told to end")
        else:
            self._loop.call_soon(_exit, self._drains[0].exit_code)


def _exit(code: int | None) -> NoReturn:
    raise SystemExit(code)


_pools: dict[asyncio.AbstractEventLoop, _Pools] = {}


def _pools_of(loop: asyncio.AbstractEventLoop) -> _Pools:
    return _pools.get(loop) or _Pools(loop)


def is_expected(error: BaseException | None) -> bool:
    """Is a block left by what dropped tasks and a cancelled program raise there, and by nothing else?"""
    if isinstance(error, BaseExceptionGroup):
        return error.split(_EXPECTED)[1] is None
    return error is None or isinstance(error, _EXPECTED)
