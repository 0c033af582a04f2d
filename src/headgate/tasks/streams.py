"""`pool.stream`: a generator that runs as a task, and gives its items to one consumer, one for each that is asked for.

The generator runs in the pool's own Task, so that slot, context and whatever a runner gave are its own from the first
step to the last. Consumer and generator meet at each item: the generator goes on when the next one is wanted, as a
generator that runs in its consumer does. Whoever leaves early has the generator closed, and gets its slot free.

A consumer that is a task itself lends its slot while it waits for an item, as for any task; and between two items the
generator, which waits for that task, lends its own. Else the two would need two slots where there may be one.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING, Any, Final, TypeVar

from headgate.errors import InvalidArgument, InvalidType
from headgate.tasks.handle import TaskHandle, result_of
from headgate.tasks.options import refuse_callables
from headgate.tasks.runtime.nested_waits import enclosing, lend_meanwhile, lend_while, wait_for

if TYPE_CHECKING:
    from headgate.tasks.model import TaskRecord
    from headgate.tasks.runtime.submit import Submitter

R = TypeVar("R")

_END: Final = object()
_NOTHING: Final = object()


class StreamBody:
    """What a pool runs for a stream: its generator, and the meeting place with its consumer."""

    def __init__(self, fn: Callable[..., AsyncIterator[Any]]) -> None:
        functools.update_wrapper(self, fn, updated=())
        self.fn: Callable[..., AsyncIterator[Any]] = fn
        self.opened: bool = False
        """Has it given out an item? Then it cannot begin again."""
        self.when_open: Callable[[], None] | None = None
        """Is called when the first item is given out."""
        self._reader: TaskRecord | None = None  # the task that the consumer is a part of
        self._left = False
        self._item: Any = _NOTHING  # one that nobody has asked for yet
        self._asking: asyncio.Future[Any] | None = None  # the consumer waits for an item
        self._wanted: asyncio.Future[None] | None = None  # the generator waits for the consumer

    async def __call__(self, *args: Any) -> None:
        await self.feed(self.fn(*args))

    async def feed(self, items: AsyncIterator[Any]) -> None:
        """Give out its items until there are no more, or nobody wants them."""
        try:
            while not self._left:
                try:
                    item = await items.__anext__()
                except StopAsyncIteration:
                    return
                if not self.opened:
                    self.opened = True
                    if self.when_open is not None:
                        self.when_open()
                self._give(item)
                del item  # the consumer has it: it may be long
                if self._reader is None:
                    await self._until_wanted()
                else:
                    await lend_meanwhile(self._until_wanted())
        finally:
            close = getattr(items, "aclose", None)
            if close is not None:
                await close()

    def _give(self, item: Any) -> None:
        if self._asking is not None and not self._asking.done():
            self._asking.set_result(item)
        else:
            self._item = item

    async def _until_wanted(self) -> None:
        while not self._left and (self._asking is None or self._asking.done()):
            self._wanted = asyncio.get_running_loop().create_future()
            await self._wanted
        self._wanted = None

    # -- at the consumer -----------------------------------------------------------------------------------------------

    async def next(self, handle: TaskHandle[Any]) -> Any:
        """The next item, or `_END` when the task has ended."""
        item, self._item = self._item, _NOTHING
        if item is not _NOTHING:
            return item
        if handle.finished:
            return _END
        asking = self._asking = asyncio.get_running_loop().create_future()
        self._reader = enclosing()
        self._wake()
        await lend_while([handle], _until(asking))
        return asking.result()

    def ended(self, handle: TaskHandle[Any]) -> None:
        """The task has ended: nothing more will come."""
        if self._asking is not None and not self._asking.done():
            self._asking.set_result(_END)

    async def leave(self, handle: TaskHandle[Any]) -> None:
        """Nobody wants more: have the generator closed, and wait for that."""
        self._left = True
        if handle.finished:
            return
        if not self._wake():
            handle.cancel()  # it has not begun, or makes an item that nobody will take
        await wait_for((handle,))

    def _wake(self) -> bool:
        if self._wanted is None or self._wanted.done():
            return self._wanted is not None
        self._wanted.set_result(None)
        return True


def has_opened(fn: object) -> bool:
    """Is it a stream that has given out an item? Then it cannot begin again."""
    return isinstance(fn, StreamBody) and fn.opened


async def _until(future: asyncio.Future[Any]) -> None:
    await future


def run_stream(
    submit: Callable[..., Awaitable[TaskHandle[Any]]],
    submitter: Submitter,
    fn: Callable[..., AsyncIterator[R]],
    args: tuple[Any, ...],
    options: dict[str, Any],
) -> AsyncGenerator[R, None]:
    """Check the arguments now, and return the generator of the items."""
    check_generator(fn)
    submitter.check_names(options, "stream()", (), fn)
    refuse_callables(options)
    if "idempotency_key" in options:
        raise InvalidArgument(
            "stream() cannot take an idempotency_key: items are handed out and not kept",
            remedy="Leave it out, or submit a function that returns all items.",
        )
    if options.get("detached"):
        raise InvalidArgument(
            "stream() cannot be detached: its generator is closed when nobody reads it", remedy="Leave it out."
        )
    return _items(submit, StreamBody(fn), args, options)


async def _items(
    submit: Callable[..., Awaitable[TaskHandle[Any]]],
    body: StreamBody,
    args: tuple[Any, ...],
    options: dict[str, Any],
) -> AsyncGenerator[Any, None]:
    handle = await submit(body, *args, **options)
    try:
        handle.on_end(body.ended)
        while (item := await body.next(handle)) is not _END:
            yield item
            del item
    except GeneratorExit:
        await body.leave(handle)
        if handle.status == "failed":
            result_of(handle)  # its clean-up raised, and who closes it hears of that
        raise
    finally:
        await body.leave(handle)
    try:
        result_of(handle)
    finally:
        del handle  # see `TaskHandle.__await__`


def check_generator(fn: object) -> None:
    """InvalidType: this makes no items."""
    target = fn
    while isinstance(target, functools.partial):
        target = target.func
    if inspect.isasyncgenfunction(target) or inspect.isasyncgenfunction(getattr(type(target), "__call__", None)):  # noqa: B004
        return
    if inspect.iscoroutine(fn):
        fn.close()
    kind = getattr(fn, "__qualname__", None) or type(fn).__name__
    if inspect.isasyncgen(fn):
        remedy = "Pass the function and its arguments: stream(items, 3) instead of stream(items(3))."
    else:
        remedy = "Write it with `async def` and `yield`; for one result use submit()."
    raise InvalidType(f"stream() takes an async generator function, got {kind}", remedy=remedy)
