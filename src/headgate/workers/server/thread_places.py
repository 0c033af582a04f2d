"""Places for calls in threads: how many run at a time, and which of them nobody waits for any more.

A thread cannot be interrupted, so a plain function that timed out or was cancelled continues and keeps its place. When
such calls hold every place, other calls that need a thread are refused, so that another worker can run them. Otherwise
they wait for a place.

Used on one event loop, without a lock.
"""

from __future__ import annotations

import asyncio
import inspect
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

from headgate.context.travel import Elsewhere
from headgate.core.threads import call_in_thread


class Places:
    """A fixed number of places for calls in threads. `changed` is called when calls can, or cannot, wait for one."""

    __slots__ = ("_changed", "_free", "_held", "_waiting", "total")

    def __init__(self, total: int, changed: Callable[[bool], None]) -> None:
        self.total: int = total
        self._free = total
        self._held = 0  # by calls that nobody waits for
        self._waiting: deque[asyncio.Future[bool]] = deque()
        self._changed = changed

    @property
    def are_held(self) -> bool:
        """Is every place held by a call that nobody waits for?"""
        return self._held >= self.total

    async def take(self) -> bool:
        """Wait for a place. False: all are held by calls that nobody waits for."""
        if self.are_held:
            return False
        if self._free and not self._waiting:
            self._free -= 1
            return True
        turn: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            return await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled() and turn.result():
                self.give_back()  # it was its turn, and it goes away
            elif turn in self._waiting:
                self._waiting.remove(turn)
            raise

    def abandon(self) -> None:
        """Note that nobody waits any more for a call that has a place."""
        self._held += 1
        if self.are_held:
            waiting, self._waiting = self._waiting, deque()
            for turn in waiting:
                if not turn.done():
                    turn.set_result(False)
            self._changed(False)

    def give_back(self, *, abandoned: bool = False) -> None:
        """Give back the place of a call; `abandoned`: nobody waited for that call."""
        were_held = self.are_held
        self._held -= abandoned
        self._free += 1
        while self._waiting and self._free:
            turn = self._waiting.popleft()
            if not turn.done():
                self._free -= 1
                turn.set_result(True)
        if were_held:
            self._changed(True)


class ThreadCall:
    """A call in a thread: a plain function, or an async one on a loop of its own."""

    def __init__(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.fn: Callable[..., Any] = fn
        self.args: tuple[Any, ...] = args
        self.kwargs: dict[str, Any] = kwargs
        self.loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[Any] | None = None
        self._cancelled = False

    def __call__(self) -> Any:
        result = call_in_thread(self.fn, self.args, self.kwargs)
        if not inspect.iscoroutine(result):
            return result
        with asyncio.Runner() as runner:
            self.loop = runner.get_loop()
            elsewhere = Elsewhere()
            try:
                return runner.run(self._follow(result), context=elsewhere.context)
            finally:
                elsewhere.bring_back()

    async def _follow(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        self._task = asyncio.current_task()
        if self._cancelled and self._task is not None:
            self._task.cancel()
        return await coroutine

    def cancel(self) -> None:
        """Cancel the call, if it can be cancelled; to be called on the task loop."""
        self._cancelled = True
        if self.loop is not None and self._task is not None:
            try:
                self.loop.call_soon_threadsafe(self._task.cancel)
            except RuntimeError:  # it has just ended
                pass
