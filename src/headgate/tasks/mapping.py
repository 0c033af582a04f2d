"""`pool.map`: one function over many items, through the pool, in constant memory.

A feeder reads the items and submits them, as long as fewer than `window` are out; the caller's loop takes results. Both
go on while the other waits, so a slow source does not hold back results, nor a slow consumer the tasks of its window.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Iterable, Sized
from typing import TYPE_CHECKING, Any

from headgate.core.feeding import Bell, Feeder, check_items
from headgate.errors import InvalidArgument
from headgate.tasks.handle import TaskHandle, outcome_of, result_of
from headgate.tasks.options import refuse_callables
from headgate.tasks.progress import Progress, progress_of
from headgate.tasks.runtime.functions import check_function
from headgate.tasks.runtime.nested_waits import lend_while, wait_for

if TYPE_CHECKING:
    from headgate.tasks.pool import TaskPool
    from headgate.tasks.runtime.executor import Executor
    from headgate.tasks.runtime.submit import Submitter


def run_map(
    pool: TaskPool,
    executor: Executor,
    submitter: Submitter,
    fn: Callable[[Any], Any],
    items: Iterable[Any] | AsyncIterable[Any],
    *,
    ordered: bool,
    window: int | None,
    return_exceptions: bool,
    progress: bool | str,
    options: dict[str, Any],
) -> AsyncIterator[Any]:
    """Check what can be checked now, and return the results-to-be."""
    check_function(fn)
    check_items(items, window)
    submitter.check_names(options, "map()", ("ordered", "window", "return_exceptions", "progress"), fn)
    refuse_callables(options)
    if "idempotency_key" in options:
        raise InvalidArgument(
            "map() cannot take one idempotency_key for all items",
            remedy="Submit the items one by one, each with its key.",
        )
    bound = window or max(16, 2 * pool.max_concurrent)
    shown = progress_of(progress, pool.name, len(items) if isinstance(items, Sized) else None)
    work = _Unordered if not ordered else _Ordered
    return work(pool, executor, fn, bound, options, shown).results(items, return_exceptions)


class _Ordered:
    """Results in the order of their items."""

    def __init__(
        self,
        pool: TaskPool,
        executor: Executor,
        fn: Callable[[Any], Any],
        window: int,
        options: dict[str, Any],
        progress: Progress,
    ) -> None:
        self._pool = pool
        self._executor = executor
        self._fn = fn
        self._window = window
        self._options = options
        self._progress = progress
        self._out: deque[TaskHandle[Any]] = deque()  # submitted and not handed out
        self._fed_one = Bell()
        self._took_one = Bell()
        self._feeder = Feeder(self._fed_one)

    async def results(
        self, items: Iterable[Any] | AsyncIterable[Any], return_exceptions: bool
    ) -> AsyncGenerator[Any, None]:
        """Feed and hand out until both are done."""
        feeder = asyncio.ensure_future(self._feeder.feed(items, self._submit))
        try:
            with self._progress:
                while (handle := await self._next()) is not None:
                    self._progress.advance(failed=handle.status != "completed")
                    yield outcome_of(handle) if return_exceptions else result_of(handle)
            if self._feeder.failure is not None:
                raise self._feeder.failure
        finally:
            self._executor.tell_interrupted(None)
            feeder.cancel()
            for handle in list(self._outstanding()):
                handle.cancel()
            await asyncio.wait((feeder,))

    async def _submit(self, item: Any) -> None:
        while self._is_full():
            await self._took_one.heard()
        self._joined(await self._pool.submit(self._fn, item, **self._options))
        self._fed_one.ring()

    def _is_full(self) -> bool:
        return len(self._out) >= self._window

    def _outstanding(self) -> Iterable[TaskHandle[Any]]:
        return self._out

    def _joined(self, handle: TaskHandle[Any]) -> None:
        self._out.append(handle)

    async def _next(self) -> TaskHandle[Any] | None:
        """The next one that is done; None when there is none any more."""
        while not self._out:
            if self._feeder.over:
                return None
            await self._fed_one.heard()
        handle = self._out[0]
        if not handle.finished:
            await wait_for((handle,))
        del self._out[0]
        self._took_one.ring()
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

    def _ended(self, handle: TaskHandle[Any]) -> None:
        del self._running[handle]
        self._done.append(handle)
        self._fed_one.ring()

    async def _next(self) -> TaskHandle[Any] | None:
        while not self._done:
            if self._feeder.over and not self._running:
                return None
            await lend_while(list(self._running), self._fed_one.heard())
        handle = self._done.popleft()
        self._took_one.ring()
        return handle
