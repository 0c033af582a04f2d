"""`headgate.map`: a routine over many items, in constant memory."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Awaitable, Callable, Iterable
from typing import Any, TypeVar

from headgate.core.feeding import Bell, Feeder, check_items
from headgate.errors import InvalidType
from headgate.workers.routines import Routine
from headgate.workers.serialization.settled import routine_of

T = TypeVar("T")
R = TypeVar("R")

WINDOW = 128
"""Items that are out at the same time unless something else is said: enough to fill the messages to several workers."""


def map(  # noqa: A001 - it is headgate.map
    routine: Callable[[T], Awaitable[R]],
    items: Iterable[T] | AsyncIterable[T],
    /,
    *,
    window: int | None = None,
    ordered: bool = True,
    return_exceptions: bool = False,
) -> AsyncIterator[R]:
    """``async for result in headgate.map(routine, items)``: call a routine with every item of an (async) iterable.

    At most `window` items are called and not yet handed out, so it runs in constant memory. Results come in the order
    of the items, or with ordered=False as they are done. With return_exceptions=True a failure is handed out like a
    result; otherwise the first one cancels what is outstanding and is raised.
    """
    routine_for(routine, "map()")
    check_items(items, window)
    return _Map(routine, window or WINDOW, ordered).results(items, return_exceptions)


def routine_for(fn: object, what: str) -> Routine:
    """Return the routine of a function if it has one result; InvalidType says why not."""
    found = routine_of(getattr(fn, "__func__", fn))
    if found is None:
        raise InvalidType(
            f"{what} takes a routine, got {getattr(fn, '__qualname__', None) or type(fn).__name__}",
            remedy="Decorate the function with @headgate.routine.",
        )
    if found.portable.generator:
        raise InvalidType(
            f"{what} takes a routine with one result, and {found.tag} is a generator",
            remedy="Call it and iterate over it, or return a list.",
        )
    return found


class _Map:
    """One run of `map`: it calls the routine for the items, and hands out the results."""

    def __init__(self, routine: Callable[[Any], Any], window: int, ordered: bool) -> None:
        self._routine = routine
        self._window = window
        self._ordered = ordered
        self._out: dict[asyncio.Future[Any], int] = {}  # called and not handed out, in the order of the items
        self._called = 0
        self._done: deque[asyncio.Future[Any]] = deque()  # those of them that are done, in that order
        self._took_one = Bell()
        self._got_one = Bell()
        self._feeder = Feeder(self._got_one)

    async def results(
        self, items: Iterable[Any] | AsyncIterable[Any], return_exceptions: bool
    ) -> AsyncGenerator[Any, None]:
        """Yield the results until all items were fed and handed out."""
        feeder = asyncio.ensure_future(self._feeder.feed(items, self._call))
        try:
            while (call := await self._next()) is not None:
                error = None if call.cancelled() else call.exception()
                if call.cancelled() or (error is not None and not (return_exceptions and isinstance(error, Exception))):
                    call.result()
                yield error if error is not None else call.result()
                del call, error  # not while the next one is waited for
            if self._feeder.failure is not None:
                raise self._feeder.failure
        finally:
            feeder.cancel()
            for call in self._out:
                call.cancel()
            await asyncio.gather(feeder, *self._out, return_exceptions=True)

    async def _call(self, item: Any) -> None:
        while len(self._out) >= self._window:
            await self._took_one.heard()
        call = asyncio.ensure_future(self._routine(item))
        self._out[call] = self._called
        self._called += 1
        call.add_done_callback(self._ended)
        if len(self._out) == 1:
            self._got_one.ring()

    def _ended(self, call: asyncio.Future[Any]) -> None:
        if not self._ordered:
            self._done.append(call)
        self._got_one.ring()

    async def _next(self) -> asyncio.Future[Any] | None:
        """Wait for the next call that is done; None when there are no more."""
        while (call := self._ready()) is None:
            if self._feeder.over and not self._out:
                return None
            await self._got_one.heard()
        index = self._out.pop(call)
        error = None if call.cancelled() else call.exception()
        if error is not None:
            error.add_note(f"This was item {index} of headgate.map (the first is 0).")
        self._took_one.ring()
        return call

    def _ready(self) -> asyncio.Future[Any] | None:
        if not self._ordered:
            return self._done.popleft() if self._done else None
        first = next(iter(self._out), None)
        return first if first is not None and first.done() else None
