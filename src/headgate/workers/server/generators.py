"""A generator on a worker: advanced when its consumer asks, and paused in between.

One task runs it from its first step to its end, so its body always sees the same task and context. The steps of the
consumer come as orders: continue, send a value, throw an exception, or close. With `prefetch` it continues without
being asked, by that many items and at most about `AHEAD` bytes.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from typing import Any

from headgate.errors import RemoteError
from headgate.workers.protocol.bulk import Borrowed
from headgate.workers.protocol.messages import Advance, Stepped
from headgate.workers.serialization.dynamic_classes import Scope, loads

AHEAD = 8 * 1024 * 1024
"""Bytes of items that were produced and not asked for; below this, one more item is produced."""

Order = tuple[Advance, Any]


class Orders:
    """The steps that the consumer of a generator asked for, and that were not taken yet."""

    __slots__ = ("_ahead", "_asked", "_bytes", "_credit", "_scope", "_sizes", "_wake", "contexts", "steps")

    def __init__(self, prefetch: int, scope: Scope) -> None:
        self._ahead = prefetch
        self._credit = prefetch
        self._scope = scope
        self._asked: deque[Stepped] = deque()
        self._sizes: deque[int] = deque()  # of items that were made and not asked for
        self._bytes = 0
        self._wake: asyncio.Future[None] | None = None
        self.contexts: list[bytes] = []
        """Encoded changes of the Context of the consumer since the last step."""
        self.steps: int = 0
        """Number of steps other than "next" that were taken."""

    def put(self, step: Stepped) -> None:
        """Add a step that the consumer asks for."""
        if step.context:
            self.contexts.append(step.context)
        if step.advance == "next":
            self._credit += max(1, step.times)
            for _ in range(min(step.times, len(self._sizes))):
                self._bytes -= self._sizes.popleft()
        else:
            self._asked.append(step)
        wake, self._wake = self._wake, None
        if wake is not None and not wake.done():
            wake.set_result(None)

    def made(self, size: int) -> None:
        """Note that an item of this size was made."""
        if self._ahead:
            self._sizes.append(size)
            self._bytes += size

    def next(self) -> Order | None:
        """Return what the generator has to do now; None: nothing."""
        if self._asked:
            step = self._asked.popleft()
            self.steps += 1
            self._credit, self._bytes = self._ahead, 0  # its consumer drops what was made in advance
            self._sizes.clear()
            return step.advance, self._value(step)
        if self._credit > 0 and (self._bytes < AHEAD or not self._sizes):
            self._credit -= 1
            return "next", None
        return None

    async def wait(self) -> None:
        """Wait until there may be something to do."""
        self._wake = asyncio.get_running_loop().create_future()
        await self._wake

    def _value(self, step: Stepped) -> Any:
        assert not isinstance(step.payload, Borrowed), "it was read"
        if step.advance == "close":
            return None
        try:
            return loads(step.payload, self._scope)
        except Exception as error:
            raise RemoteError(
                f"what was sent into a generator could not be read on the worker: {type(error).__name__}: {error}",
                remedy="Its class must be importable there, and what it pickles must unpickle.",
            ) from error


async def advance(generator: AsyncGenerator[Any, Any], order: Order) -> Any:
    """Advance a generator by one step. StopAsyncIteration: it has ended."""
    what, value = order
    if what == "throw":
        return await generator.athrow(value)
    if what == "close":
        await generator.aclose()
        raise StopAsyncIteration
    return await generator.asend(value)
