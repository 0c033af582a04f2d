"""Feeds the items of an iterable to a consumer that may pause it: what both kinds of `map` begin with."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, Awaitable, Callable, Iterable
from typing import TypeVar

from headgate.errors import InvalidArgument, InvalidType

T = TypeVar("T")


def check_items(items: object, window: object) -> None:
    """Raise InvalidType or InvalidArgument if nothing can be fed from these."""
    if not isinstance(items, (AsyncIterable, Iterable)):
        raise InvalidType(
            f"items must be an iterable, async or not, got {type(items).__name__}", remedy="Pass a list or a generator."
        )
    if window is not None and (not isinstance(window, int) or isinstance(window, bool) or window < 1):
        raise InvalidArgument(f"window must be >= 1 or None, got {window!r}")


class Bell:
    """An event that one waits for and others set again and again."""

    __slots__ = ("_heard",)

    def __init__(self) -> None:
        self._heard: asyncio.Future[None] | None = None

    def ring(self) -> None:
        """Wake everybody who waits in `heard`."""
        if self._heard is not None and not self._heard.done():
            self._heard.set_result(None)

    def heard(self) -> asyncio.Future[None]:
        """A future that is done at the next ring."""
        self._heard = asyncio.get_running_loop().create_future()
        return self._heard


class Feeder:
    """Gives items away, one after the other."""

    def __init__(self, bell: Bell) -> None:
        self.over: bool = False
        """Were all items fed, or did the source fail?"""
        self.failure: BaseException | None = None
        """What the source of the items raised, if it did."""
        self._bell = bell

    async def feed(self, items: AsyncIterable[T] | Iterable[T], give: Callable[[T], Awaitable[None]]) -> None:
        """Give away the items until there are no more; then ring."""
        try:
            if isinstance(items, AsyncIterable):
                async for item in items:
                    await give(item)
            else:
                for item in items:
                    await give(item)
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            self.failure = error
        finally:
            self.over = True
            self._bell.ring()
