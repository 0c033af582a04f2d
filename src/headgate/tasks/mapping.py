"""`pool.map`: one function over many items, through the pool, in constant memory.

A feeder reads the items and submits them, as long as fewer than `window` are out; the caller's loop takes results. Both
go on while the other waits, so a slow source does not hold back results, nor a slow consumer the tasks of its window.

In a durable pool the feeder does not wait until an item is on disk before it submits the next one. So all items for
which there is room go to the disk together.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Awaitable, Callable, Iterable, Sized
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

from headgate.core.feeding import Bell, Feeder, check_items
from headgate.tasks.handle import TaskHandle, outcome_of, result_of
from headgate.tasks.item_options import ItemOptions
from headgate.tasks.progress import Progress, progress_of
from headgate.tasks.runtime.functions import check_function
from headgate.tasks.runtime.nested_waits import lend_while, wait_for
from headgate.tasks.scheduling.submit_queue import Arrival

if TYPE_CHECKING:
    from headgate.tasks.pool import TaskPool
    from headgate.tasks.runtime.executor import Executor
    from headgate.tasks.runtime.submit import Claim, Submitter

Wanted = Literal["results", "outcomes", "handles"]
"""What is handed out: results, results and exceptions, or handles."""


class Work(NamedTuple):
    """What is to be done with each item, and by whom."""

    pool: TaskPool
    executor: Executor
    submitter: Submitter
    fn: Callable[[Any], Any]
    loaded: Callable[[], Awaitable[None]]
    """Returns when the journal of the pool is read, if it has one."""


def run_map(
    work: Work,
    items: Iterable[Any] | AsyncIterable[Any],
    *,
    ordered: bool,
    window: int | None,
    wanted: Wanted,
    progress: bool | str,
    options: dict[str, Any],
) -> AsyncIterator[Any]:
    """Check what can be checked now, and return the results-to-be."""
    check_function(work.fn)
    check_items(items, window)
    own = ("ordered", "window", "return_exceptions", "return_handles", "progress")
    work.submitter.check_names(options, "map()", own, work.fn)
    item_options = ItemOptions(options, work.executor.scheduler.strategy.key)
    bound = window or max(16, 2 * work.pool.max_concurrent)
    shown = progress_of(progress, work.pool.name, len(items) if isinstance(items, Sized) else None)
    kind = _Ordered if ordered else _Unordered
    return kind(work, bound, item_options, shown, detached=options.get("detached") is True).results(items, wanted)


class _Ordered:
    """Results in the order of their items."""

    skips_dropped: ClassVar[bool] = False
    """Are results handed out that come after a task which was dropped? Not in order: the next would seem to be its."""

    def __init__(self, work: Work, window: int, options: ItemOptions, progress: Progress, *, detached: bool) -> None:
        self._work = work
        self._detached = detached  # do submitted tasks run to their end, whatever becomes of this?
        self._submitter = work.submitter
        self._ending = work.executor.ending
        self._window = window
        self._options = options
        self._progress = progress
        self._out: deque[TaskHandle[Any]] = deque()  # submitted and not handed out
        self._claims: dict[TaskHandle[Any], Claim] = {}  # of those that are being written
        self._fed_one = Bell()
        self._took_one = Bell()
        self._feeder = Feeder(self._fed_one)

    async def results(self, items: Iterable[Any] | AsyncIterable[Any], wanted: Wanted) -> AsyncGenerator[Any, None]:
        """Feed and hand out until both are done."""
        feeder = asyncio.ensure_future(self._feeder.feed(items, self._submit))
        drain = self._ending.drain
        if drain is not None:
            drain.readers += 1
        try:
            with self._progress:
                while (handle := await self._next()) is not None:
                    if handle.status == "cancelled" and self._ending.exit_code is not None:
                        if self.skips_dropped:
                            continue
                        break
                    self._progress.advance(failed=handle.status != "completed")
                    yield _handed_out(handle, wanted)
            if drain is not None and drain.exit_code is not None:
                await drain.finish()
            if self._feeder.failure is not None:
                raise self._feeder.failure
        finally:
            self._ending.tell_interrupted(None)
            feeder.cancel()
            for claim in list(self._claims.values()):
                if not _is_accepted(claim):
                    self._submitter.give_up(claim)
            for handle in [] if self._detached else list(self._outstanding()):
                if handle.status != "running" or not self._ending.drops_queue:
                    handle.cancel()
            await asyncio.wait((feeder,))
            if drain is not None:
                drain.reader_left()

    async def _submit(self, item: Any) -> None:
        while self._is_full():
            await self._took_one.heard()
        options, work = self._options.of(item), self._work
        if work.executor.records is None:
            self._joined(await work.pool.submit(work.fn, item, **options))
        else:
            await work.loaded()
            entered = work.submitter.enter(work.fn, (item,), options, wait=True)
            if isinstance(entered, Arrival) and work.submitter.is_writing(entered):
                self._claim(entered)
            elif isinstance(entered, Arrival):
                self._joined(await work.submitter.accepted(entered, options.get("wait_timeout")))
            else:
                self._joined(entered)  # type: ignore[arg-type] # every task is a handle
        self._fed_one.ring()

    def _claim(self, arrival: Arrival) -> None:
        """Take a task that is being written for one that is accepted, and hear of it if it was not."""
        handle: TaskHandle[Any] = arrival.task  # type: ignore[assignment] # every task is a handle
        if handle not in self._claims:  # else two items have one idempotency key
            claim = self._claims[handle] = self._submitter.claim(arrival, None)
            claim.future.add_done_callback(lambda _: self._settled(handle, claim))
        self._joined(handle)

    def _settled(self, handle: TaskHandle[Any], claim: Claim) -> None:
        """A task was written, or could not be: then its claim is kept, for `_next` to raise what happened."""
        self._submitter.settle(claim)
        if _is_accepted(claim):
            self._claims.pop(handle, None)

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
        if handle in self._claims:
            await asyncio.shield(self._claims[handle].future)
        if not handle.finished:
            await wait_for((handle,))
        del self._out[0]
        self._took_one.ring()
        return handle


class _Unordered(_Ordered):
    """Results as they are done."""

    skips_dropped = True

    def __init__(self, *args: Any, detached: bool) -> None:
        super().__init__(*args, detached=detached)
        self._running: dict[TaskHandle[Any], int] = {}  # and for how many items: they may have one key
        self._done: deque[TaskHandle[Any]] = deque()
        self._items = 0  # that are out and not done
        self._refused: BaseException | None = None  # why a task could not be written

    def _is_full(self) -> bool:
        return self._items + len(self._done) >= self._window

    def _outstanding(self) -> Iterable[TaskHandle[Any]]:
        return (*self._running, *self._done)

    def _settled(self, handle: TaskHandle[Any], claim: Claim) -> None:
        super()._settled(handle, claim)
        if handle in self._claims and not claim.future.cancelled():
            self._refused = claim.future.exception()
            self._fed_one.ring()

    def _joined(self, handle: TaskHandle[Any]) -> None:
        if handle.finished:
            self._done.append(handle)
            return
        self._items += 1
        self._running[handle] = self._running.get(handle, 0) + 1
        if self._running[handle] == 1:
            handle.on_end(self._ended)

    def _ended(self, handle: TaskHandle[Any]) -> None:
        items = self._running.pop(handle)
        self._items -= items
        self._done.extend([handle] * items)
        self._fed_one.ring()

    async def _next(self) -> TaskHandle[Any] | None:
        while not self._done:
            if self._refused is not None:
                raise self._refused
            if self._feeder.over and not self._running:
                return None
            await lend_while(list(self._running), self._fed_one.heard())
        handle = self._done.popleft()
        self._took_one.ring()
        return handle


def _is_accepted(claim: Claim) -> bool:
    future = claim.future
    return future.done() and not future.cancelled() and future.exception() is None


def _handed_out(handle: TaskHandle[Any], wanted: Wanted) -> Any:
    if wanted == "handles":
        return handle
    return outcome_of(handle) if wanted == "outcomes" else result_of(handle)
