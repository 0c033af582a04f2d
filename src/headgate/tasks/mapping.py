"""`pool.map`: one function over many items, through the pool, in constant memory.

A feeder reads the items and submits them, as long as fewer than `window` are out; the caller's loop takes results. Both
go on while the other waits, so a slow source does not hold back results, nor a slow consumer the tasks of its window.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Iterable, Sized
from typing import TYPE_CHECKING, Any

from headgate.errors import InvalidArgument, InvalidType
from headgate.tasks.functions import check_function
from headgate.tasks.options import check_names
from headgate.tasks.progress import Progress, progress_of
from headgate.tasks.waiting import lend_while, wait_for

if TYPE_CHECKING:
    from headgate.tasks.handle import TaskHandle
    from headgate.tasks.pool import TaskPool


def run_map(
    pool: TaskPool,
    fn: Callable[[Any], Any],
    items: Any,
    *,
    ordered: bool,
    window: int | None,
    return_exceptions: bool,
    progress: bool | str,
    options: dict[str, Any],
) -> AsyncIterator[Any]:
    """Check what can be checked now, and return the results-to-be."""
    check_function(fn)
    if not isinstance(items, (AsyncIterable, Iterable)):
        raise InvalidType(
            f"items must be an iterable, async or not, got {type(items).__name__}", remedy="Pass a list or a generator."
        )
    if window is not None and (not isinstance(window, int) or isinstance(window, bool) or window < 1):
        raise InvalidArgument(f"window must be >= 1 or None, got {window!r}")
    check_names(options, pool._strategy, "map()", ("ordered", "window", "return_exceptions", "progress"))
    if "idempotency_key" in options:
        raise InvalidArgument(
            "map() cannot take one idempotency_key for all items",
            remedy="Submit the items one by one, each with its key.",
        )
    bound = window or max(16, 2 * pool.max_concurrent)
    shown = progress_of(progress, pool.name, len(items) if isinstance(items, Sized) else None)
    work = _Unordered if not ordered else _Ordered
    return work(pool, fn, bound, options, shown).results(items, return_exceptions)


class _Ordered:
    """Results in the order of their items."""

    def __init__(
        self, pool: TaskPool, fn: Callable[[Any], Any], window: int, options: dict[str, Any], progress: Progress
    ) -> None:
        self._pool = pool
        self._fn = fn
        self._window = window
        self._options = options
        self._progress = progress
        self._out: deque[TaskHandle[Any]] = deque()  # submitted and not handed out
        self._fed = False
        self._failure: BaseException | None = None
        self._fed_one: asyncio.Future[None] | None = None
        self._took_one: asyncio.Future[None] | None = None

    async def results(self, items: Any, return_exceptions: bool) -> AsyncGenerator[Any, None]:
        """Feed and hand out until both are done."""
        feeder = asyncio.ensure_future(self._feed(items))
        try:
            with self._progress:
                while (handle := await self._next()) is not None:
                    self._progress.advance(failed=handle.status != "completed")
                    try:
                        result = handle._result()
                    except Exception as error:
                        if not return_exceptions:
                            raise
                        result = error
                    yield result
            if self._failure is not None:
                raise self._failure
        finally:
            feeder.cancel()
            for handle in list(self._outstanding()):
                handle.cancel()
            await asyncio.wait((feeder,))

    async def _feed(self, items: Any) -> None:
        try:
            if isinstance(items, AsyncIterable):
                async for item in items:
                    await self._submit(item)
            else:
                for item in items:
                    await self._submit(item)
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            self._failure = error
        finally:
            self._fed = True
            _set(self._fed_one)

    async def _submit(self, item: Any) -> None:
        while self._is_full():
            self._took_one = asyncio.get_running_loop().create_future()
            await self._took_one
        self._joined(await self._pool.submit(self._fn, item, **self._options))
        _set(self._fed_one)

    def _is_full(self) -> bool:
        return len(self._out) >= self._window

    def _outstanding(self) -> Iterable[TaskHandle[Any]]:
        return self._out

    def _joined(self, handle: TaskHandle[Any]) -> None:
        self._out.append(handle)

    async def _next(self) -> TaskHandle[Any] | None:
        """The next one that is done; None when there is none any more."""
        while not self._out:
            if self._fed:
                return None
            self._fed_one = asyncio.get_running_loop().create_future()
            await self._fed_one
        handle = self._out[0]
        if not handle.finished:
            await wait_for((handle,))
        del self._out[0]
        _set(self._took_one)
        return handle


class _Unordered(_Ordered):
    """Results as they are done."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._running: dict[TaskHandle[Any], None] = {}
        self._done: deque[TaskHandle[Any]] = deque()

    def _is_full(self) -> bool:
        return len(self._running) + len(self._done) >= self._window

    def _outstanding(self) -> Iterable[TaskHandle[Any]]:
        return (*self._running, *self._done)

    def _joined(self, handle: TaskHandle[Any]) -> None:
        if handle.finished:
            self._done.append(handle)
        else:
            self._running[handle] = None
            handle.on_end(self._ended)

    def _ended(self, handle: Any) -> None:
        del self._running[handle]
        self._done.append(handle)
        _set(self._fed_one)

    async def _next(self) -> TaskHandle[Any] | None:
        while not self._done:
            if self._fed and not self._running:
                return None
            self._fed_one = asyncio.get_running_loop().create_future()
            await lend_while(list(self._running), self._fed_one)
        handle = self._done.popleft()
        _set(self._took_one)
        return handle


def _set(future: asyncio.Future[None] | None) -> None:
    if future is not None and not future.done():
        future.set_result(None)
