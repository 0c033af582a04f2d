"""The calls of an executor (`TaskPool.as_executor`) as tasks of a pool.

A task that starts must tell its future, and must not start if that was cancelled a moment ago in another thread. So
the executor of the pool is given a hook for the start of tasks. Which future a task has stands in the context of the
task: it may start before anybody has its handle.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextvars import ContextVar
from functools import partial
from typing import TYPE_CHECKING, Any

from headgate.core.pool_executor import PoolFuture
from headgate.errors import PoolClosed, QueueFull
from headgate.tasks.handle import TaskHandle, end_of
from headgate.tasks.model import TaskRecord
from headgate.tasks.runtime.nested_waits import CURRENT, lend_meanwhile

if TYPE_CHECKING:
    from headgate.tasks.pool import TaskPool
    from headgate.tasks.runtime.executor import Executor

_FUTURE: ContextVar[PoolFuture | None] = ContextVar("headgate_future", default=None)


class TaskCalls:
    """Runs the calls of one executor in a TaskPool."""

    def __init__(
        self,
        pool: TaskPool,
        executor: Executor,
        entered: Callable[[], asyncio.AbstractEventLoop | None],
        options: dict[str, Any],
        *,
        waits: bool,
    ) -> None:
        self._pool = pool
        self._executor = executor
        self._entered = entered
        self._options = options
        self._waits = waits  # submit() waits for a disk or for other processes
        if not isinstance(executor.on_start, _Starts):
            executor.on_start = _Starts(executor.on_start)

    def home(self, running: asyncio.AbstractEventLoop | None) -> asyncio.AbstractEventLoop | None:
        """Return the loop of the pool; if it has none yet, the one that runs."""
        if self._executor.state == "closed" or self._executor.is_abandoned():
            raise PoolClosed(f"the pool {self._pool.name!r} is closed")
        return self._executor.loop or self._entered() or running

    async def open(self) -> None:
        """Enter the pool."""
        await self._pool.__aenter__()

    async def close(self) -> None:
        """Close the pool."""
        await self._pool.close()

    def begin(self, future: PoolFuture) -> None:
        """Submit the call."""
        assert future.work is not None, "it is begun once"
        fn, args, kwargs = future.work
        future.work = None
        fn = partial(fn, **kwargs) if kwargs else fn
        _FUTURE.set(future)  # in a context of its own
        # A future knows nothing of parents: who waits for it hears of no cancellation but its own.
        options = self._options if CURRENT.get() is None else {**self._options, "detached": True}
        if not self._waits:
            try:
                self._accepted(future, self._pool.submit_nowait(fn, *args, **options))
                return
            except QueueFull:
                pass  # it waits for a place, or is refused again
        future.running_as = asyncio.get_running_loop().create_task(self._submit(future, fn, args, options))

    async def _submit(
        self, future: PoolFuture, fn: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]
    ) -> None:
        try:
            self._accepted(future, await self._pool.submit(fn, *args, **options))
        except BaseException as error:
            if not isinstance(error, asyncio.CancelledError):
                future.ended(None, error.with_traceback(None))
                return
            future.ended(None, PoolClosed(f"the loop of the pool {self._pool.name!r} ended before the call began"))
            raise
        finally:
            del future

    def _accepted(self, future: PoolFuture, handle: TaskHandle[Any]) -> None:
        future.running_as = handle
        handle.on_end(partial(_ended, future))

    def withdraw(self, future: PoolFuture) -> None:
        """Cancel the task of a future that was cancelled, if it is queued, or its submit."""
        running, future.running_as = future.running_as, None
        if isinstance(running, asyncio.Task) or (isinstance(running, TaskHandle) and running.status == "queued"):
            running.cancel()

    def waited(self, future: PoolFuture, timeout: float | None) -> bool:
        """Wait for the future if a task of this pool waits so in its thread: it lends its slot meanwhile."""
        task, loop = CURRENT.get(), self._executor.loop
        if task is None or task.finished or loop is None or task.owner.loop is not loop:
            return False
        asyncio.run_coroutine_threadsafe(_lend(future, timeout), loop).result()
        return True


async def _lend(future: PoolFuture, timeout: float | None) -> None:
    async def until() -> None:
        done, _ = await asyncio.wait([asyncio.wrap_future(future)], timeout=timeout)
        if not done:
            raise TimeoutError

    try:
        await lend_meanwhile(until())
    except TimeoutError:
        pass  # it goes on without a slot: the call that has it may be waiting for what comes next


def _ended(future: PoolFuture, handle: TaskHandle[Any]) -> None:
    result, error = end_of(handle)
    try:
        future.ended(result, error)
    finally:
        del future, result, error  # an exception holds its frames


class _Starts:
    """Tells futures that their calls start."""

    def __init__(self, others: Callable[[TaskRecord], None] | None) -> None:
        self._others = others

    def __call__(self, task: TaskRecord) -> None:
        if self._others is not None:
            self._others(task)
        context = task.context
        future = None if context is None else context.get(_FUTURE)
        if context is None or future is None:
            return
        context.run(_FUTURE.set, None)  # else what it submits would have this future, and so would its next attempt
        if not future.begins():
            task.fn, task.args = _withdrawn, ()


async def _withdrawn(*_: object) -> None:
    """Runs instead of a call whose future was cancelled at the last moment."""
    raise asyncio.CancelledError
