"""The calls of an executor (`WorkerPool.as_executor`) on the workers of a pool.

Workers take any number of calls at once. An executor of Python's runs a few and keeps the others, which can still be
cancelled, so calls wait here until fewer than `max_concurrent` are out.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextvars import Context, copy_context
from typing import TYPE_CHECKING

from headgate.core.pool_executor import PoolFuture
from headgate.errors import WorkerLost
from headgate.workers.client.any_function import Placing

if TYPE_CHECKING:
    from headgate.workers.pool import WorkerPool

_AHEAD = 2  # calls for each worker: one that runs, and the next, so that no worker waits for it


class WorkerCalls:
    """Runs the calls of one executor on the workers of a WorkerPool."""

    def __init__(
        self,
        workers: WorkerPool,
        home: Callable[[], asyncio.AbstractEventLoop | None],
        max_concurrent: int | None,
    ) -> None:
        self._workers = workers
        self._home = home
        self._max_concurrent = max_concurrent
        self._placing = Placing(workers)
        self._waiting: deque[tuple[PoolFuture, Context]] = deque()
        self._out: set[asyncio.Task[None]] = set()
        self.on_close: Callable[[], object] = lambda: None
        """Called when the pool was left, or could not be entered."""

    def home(self, running: asyncio.AbstractEventLoop | None) -> asyncio.AbstractEventLoop | None:
        """Return the loop on which the pool is open. One that is not is opened on a loop of the executor's own."""
        return self._home()

    async def open(self) -> None:
        """Enter the pool."""
        try:
            await self._workers.__aenter__()
        except BaseException:
            self.on_close()
            raise

    async def close(self) -> None:
        """Leave the pool."""
        await self._workers.__aexit__(None, None, None)
        self.on_close()

    def begin(self, future: PoolFuture) -> None:
        """Send the call to a worker if few are out; else it waits."""
        self._waiting.append((future, copy_context()))
        self._pump()

    def withdraw(self, future: PoolFuture) -> None:
        """Nothing: a call that was cancelled is passed over when its turn comes."""

    def waited(self, future: PoolFuture, timeout: float | None) -> bool:
        """False: who waits holds no worker."""
        return False

    def _pump(self) -> None:
        limit = self._max_concurrent
        while self._waiting and len(self._out) < (limit or _AHEAD * max(1, len(self._workers.workers()))):
            future, context = self._waiting.popleft()
            if future.begins():
                task = asyncio.get_running_loop().create_task(self._run(future), context=context)
                self._out.add(task)
                task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._out.discard(task)
        self._pump()

    async def _run(self, future: PoolFuture) -> None:
        assert future.work is not None, "it is begun once"
        fn, args, kwargs = future.work
        future.work = None
        try:
            result = await self._placing.call_alone(fn, args, kwargs)
        except asyncio.CancelledError:
            future.ended(None, WorkerLost("the event loop of the pool ended while a worker had the call"))
            raise
        except BaseException as error:
            future.ended(None, error)
        else:
            future.ended(result)
        finally:
            del future, fn, args, kwargs  # what was raised holds this frame
