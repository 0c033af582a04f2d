"""Waiting for tasks, from anywhere and from inside other tasks.

Inside a task a wait is more than a wait: the task lends its slot (see `lending`). Which task a piece of code belongs to
travels in a context variable, so waits in a TaskGroup's children, in `asyncio.gather` or in a helper count for the task
that started them.
"""

from __future__ import annotations

import asyncio
from asyncio import _get_running_loop
from collections.abc import Awaitable, Callable, Generator, Sequence
from contextvars import ContextVar
from functools import partial
from typing import TYPE_CHECKING, Any, overload

from headgate.core import current_task
from headgate.core.redaction import log_exception
from headgate.errors import InvalidArgument, InvalidType
from headgate.tasks.model import TaskRecord, TaskSnapshot
from headgate.tasks.scheduling.slots import Waits, ancestors

if TYPE_CHECKING:
    from collections.abc import Iterable

    from headgate.tasks.handle import TaskHandle

CURRENT: ContextVar[TaskRecord | None] = current_task.CURRENT
"""The task whose code is running."""


def enclosing() -> TaskRecord | None:
    """The unfinished task whose code is running on this loop, or None."""
    task = CURRENT.get()
    if task is None or task.finished or task.owner.loop is not _get_running_loop():
        return None
    return task


@overload
async def pool_wait(handle: TaskHandle[Any], /) -> TaskSnapshot: ...
@overload
async def pool_wait(handle: Iterable[TaskHandle[Any]], /) -> list[TaskSnapshot]: ...
async def pool_wait(handle: TaskHandle[Any] | Iterable[TaskHandle[Any]], /) -> TaskSnapshot | list[TaskSnapshot]:
    """Wait until the task has ended, however it ends, and return its final snapshot.

    Several handles give a list, in the order given. A task's own failure is in its snapshot and is not raised.
    """
    if isinstance(handle, TaskRecord):
        await wait_for((handle,))
        return handle.snapshot()
    handles: list[TaskHandle[Any]]
    try:
        handles = list(handle)
    except TypeError:
        handles = [handle]  # type: ignore[list-item] # it is neither, and is refused
    for one in handles:
        if not isinstance(one, TaskRecord):
            raise InvalidType(
                f"pool_wait() takes a task handle or a list of them, got {type(one).__name__}",
                remedy="Pass what `await pool.submit(...)` returned.",
            )
    await wait_for(handles)
    return [one.snapshot() for one in handles]


wait_agent = pool_wait


def wait_for_one(task: TaskRecord) -> Generator[Any, Any, None]:
    """``yield from`` this until it has ended. `wait_for`, without its coroutines where nobody has a slot to lend."""
    loop = _get_running_loop()
    if CURRENT.get() is not None or loop is not task.owner.loop or loop is None:
        yield from wait_for((task,)).__await__()
        return
    future = loop.create_future()
    add_waiter(task, future)
    try:
        yield from future
    except BaseException:
        _forget(task, future)
        raise


def need_not_be_retrieved(error: BaseException) -> None:
    """If `error`, which is raised now, ends the Task that runs, and nobody looks at that: it is no news.

    Whoever cancels all tasks of a pool at once knows of it. Otherwise a thousand handles in `asyncio.as_completed`
    would be a thousand tracebacks, "Task exception was never retrieved", when the program is stopped by Ctrl-C.
    """
    task = asyncio.current_task() if _get_running_loop() is not None else None
    if task is not None:
        task.add_done_callback(partial(_retrieve, error))


def _retrieve(error: BaseException, task: asyncio.Task[Any]) -> None:
    if not task.cancelled() and getattr(task, "_exception", None) is error:
        task.exception()


async def wait_for(tasks: Sequence[TaskRecord]) -> None:
    """Return when all of them have ended. Lends the slot of the task that waits, from the first to the last."""
    unfinished = [task for task in tasks if not task.finished]
    if not unfinished:
        return
    loop = asyncio.get_running_loop()
    for task in unfinished:
        if task.owner.loop is not loop:
            raise InvalidArgument(
                f"{task!r} belongs to a pool on another event loop",
                remedy="Await it on the loop on which it was submitted.",
            )
    await lend_while(unfinished, _all_ended(unfinished, loop))


async def lend_while(tasks: list[TaskRecord], until: Awaitable[None]) -> None:
    """Await `until`, which happens because of `tasks`; a task that waits so lends its slot meanwhile."""
    waiter = enclosing()
    if waiter is None or not tasks:
        await until
    else:
        await _Nested(waiter, tasks).wait(until)


async def lend_meanwhile(until: Awaitable[None]) -> None:
    """Await `until`, for which others may need the slot of this task: it lends it, and goes on with one again."""
    task = enclosing()
    waits = None if task is None else task.owner.lending.lend_for_another(task)
    if task is None or waits is None:
        await until
        return
    pool = task.owner
    pool.pump()
    try:
        await until
    finally:
        waits.roused -= 1
        if not waits.roused and task.waits is waits and pool.scheduler.needs_slot(task):
            pool.lending.reclaim(task)
    await pool.lending.slot_returned(task)


async def _all_ended(tasks: list[TaskRecord], loop: asyncio.AbstractEventLoop) -> None:
    for task in tasks:
        await _until_ended(task, loop)


async def _until_ended(task: TaskRecord, loop: asyncio.AbstractEventLoop) -> None:
    if not task.finished:
        future = loop.create_future()
        add_waiter(task, future)
        try:
            await future
        except BaseException:
            _forget(task, future)
            raise


def add_waiter(task: TaskRecord, waiter: asyncio.Future[None] | Callback) -> None:
    """Have a future (or a `Callback`) told when the task ends. Most tasks have one waiter, so a list is made late."""
    waiters = task.waiters
    if waiters is None:
        task.waiters = waiter
    elif waiters.__class__ is list:
        waiters.append(waiter)
    else:
        task.waiters = [waiters, waiter]


def is_awaited(task: TaskRecord) -> bool:
    """Does anybody await the task now? One whose wait was cancelled in this turn of the loop does not."""
    waiters = task.waiters if task.waiters.__class__ is list else [task.waiters]
    return any(isinstance(one, asyncio.Future) and not one.done() for one in waiters)


class Callback:
    """Waits like a future, and calls a function."""

    __slots__ = ("_call", "_task")

    def __init__(self, call: Callable[[Any], object], task: TaskRecord) -> None:
        self._call = call
        self._task = task

    def done(self) -> bool:
        """Never: it is told once."""
        return False

    def set_result(self, _: None) -> None:
        """The task has ended. What the function raises is its own affair."""
        try:
            self._call(self._task)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException:  # a CancelledError of its own must not end ours
            log_exception("headgate.tasks", "a callback at the end of %r failed", self._task)


def wake(task: TaskRecord) -> None:
    """It has ended: tell whoever waits."""
    waiters, task.waiters = task.waiters, None
    if waiters is None:
        return
    for future in waiters if waiters.__class__ is list else (waiters,):
        if not future.done():
            future.set_result(None)


def _forget(task: TaskRecord, future: asyncio.Future[None]) -> None:
    waiters = task.waiters
    if waiters is future:
        task.waiters = None
    elif waiters.__class__ is list and future in waiters:
        waiters.remove(future)


class _Nested:
    """One wait of a running task for others."""

    __slots__ = ("_above", "_awaited", "_begun", "_roused", "_waiter", "_waits")

    def __init__(self, waiter: TaskRecord, awaited: list[TaskRecord]) -> None:
        self._waiter = waiter
        self._waits: Waits | None = None  # of the attempt in which it began
        self._awaited = awaited
        self._begun: list[TaskRecord] = []
        self._above: list[Waits] = []  # of the ancestors
        self._roused: list[tuple[TaskRecord, Waits]] = []  # tasks that lend their slots because of this wait

    async def wait(self, until: Awaitable[None]) -> None:
        pool = self._waiter.owner
        try:
            try:
                self._begin()
            except BaseException:
                if asyncio.iscoroutine(until):
                    until.close()
                raise
            await until
        except BaseException:
            # Cut short: it may be about to cancel the very task that has its slot, so it does not wait for one.
            self._end()
            raise
        self._end()
        await pool.lending.slot_returned(self._waiter)

    def _begin(self) -> None:
        waiter, pool = self._waiter, self._waiter.owner
        for one in ancestors(waiter):
            waits = one.waits
            if waits is None:
                waits = one.waits = Waits()
            waits.below += 1
            self._above.append(waits)
        for task in self._awaited:
            pool.lending.begin_wait(waiter, task)
            self._waits = waiter.waits
            self._begun.append(task)
            self._rouse(task)
        pool.pump()

    def _rouse(self, task: TaskRecord) -> None:
        """Where the awaited task queues, and each slot there is held by a task whose descendants wait, they lend them.

        They may be waiting for those in a way that cannot be seen, and then nothing would ever go on. If they are not,
        that pool runs above its cap for as long as this wait lasts. Ancestors that lend already do so longer.
        """
        owner = task.owner
        if task.status != "queued" or not owner.scheduler.is_short_for(task):
            return
        lenders = [one for one in ancestors(self._waiter) if one.owner is owner and one.slot is None]
        holders = list(owner.scheduler.slots.holders())
        if all(one.waits is not None and one.waits.below for one in holders):
            lenders += holders
        lent = [(one, owner.lending.lend_for_another(one)) for one in lenders]
        self._roused += [(one, waits) for one, waits in lent if waits is not None]
        owner.pump()

    def _end(self) -> None:
        """The wait is over, or cut short: the waiter wants its slot back, if it waits for nobody else."""
        waiter, pool = self._waiter, self._waiter.owner
        if waiter.waits is self._waits:  # else its attempt has ended, and its waits with it
            for task in self._begun:
                pool.scheduler.end_wait(waiter, task)
        for waits in self._above:
            waits.below -= 1
        for one, waits in self._roused:
            waits.roused -= 1
            if not waits.roused and one.waits is waits and one.owner.scheduler.needs_slot(one):
                one.owner.lending.reclaim(one)
        if waiter.waits is self._waits and pool.scheduler.needs_slot(waiter):
            pool.lending.reclaim(waiter)
