"""Runs a function over records through a TaskPool: with keys, on workers, fair between tenants, urgent records first.

The pool gets more records than it can run, so that it can choose: it is fair between the records of a window, not
between all of the input.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from headgate.cli.batch.flow import TURN, Flow
from headgate.cli.batch.sources import Item
from headgate.core.clock import clock
from headgate.core.topics import subscribe
from headgate.errors import PoolExhausted
from headgate.tasks.events import AUDIT
from headgate.tasks.handle import outcome_of

if TYPE_CHECKING:
    from headgate.tasks.handle import TaskHandle
    from headgate.tasks.pool import TaskPool


class Pooled:
    """Submits records to a pool."""

    def __init__(
        self,
        flow: Flow,
        fn: Callable[..., Any],
        pool: TaskPool,
        retries: int,
        *,
        fair: bool,
        priority: str | None,
        has_keys: Callable[[], bool],
    ) -> None:
        """`has_keys` says whether a key is left that is not disabled."""
        self._flow = flow
        self._fn = fn
        self._pool = pool
        self._retries = retries
        self._fair = fair
        self._priority = priority
        self._has_keys = has_keys
        self._running: dict[str, TaskHandle[Any]] = {}
        self._changed = asyncio.Event()
        self._unsubscribe: Callable[[], None] | None = None
        self._has_ended = False

    async def run(self) -> None:
        """Run until no record is left, or the flow is stopped and what runs is done."""
        self._flow.stopped.add_done_callback(self._stop)
        try:
            await self._feed()
            while self._running:
                await self._wait()
        finally:
            self._flow.stopped.remove_done_callback(self._stop)
            self._has_ended = True
            if self._unsubscribe is not None:
                self._unsubscribe()

    def _stop(self, _: object) -> None:
        """Let what runs finish, and start nothing: also nothing that is queued again because of its key."""
        if self._has_ended:  # it was stopped in its last turn, when this call was already on its way
            return
        self._changed.set()
        loop = asyncio.get_running_loop()
        self._unsubscribe = subscribe(lambda _: loop.call_soon_threadsafe(self._cancel_queued), AUDIT.name)
        self._cancel_queued()

    def _cancel_queued(self) -> None:
        for handle in list(self._running.values()):
            if handle.status == "queued":
                handle.cancel()

    async def _feed(self) -> None:
        flow = self._flow
        until = clock.now() + TURN
        while not flow.is_over:
            item = flow.take()
            if item is not None:
                self._submit(item)
                if clock.now() > until:
                    await asyncio.sleep(0)
                    until = clock.now() + TURN
            elif not await flow.more() and not flow.is_over:
                await self._wait()

    async def _wait(self) -> None:
        """Wait until a record has ended, or the run is stopped."""
        self._changed.clear()
        await self._changed.wait()

    def _submit(self, item: Item) -> None:
        options: dict[str, Any] = {"retries": self._retries} if self._retries else {}
        if self._fair:
            options["key"] = item.tenant
        if self._priority is not None:
            options["priority"] = int(item.record[self._priority])
        if item.reserve:
            options["cost"] = item.reserve
        handle = self._pool.submit_nowait(self._fn, item.record, **options)
        self._running[handle.id] = handle
        handle.on_end(partial(self._ended, item))

    def _ended(self, item: Item, handle: TaskHandle[Any]) -> None:
        del self._running[handle.id]
        self._changed.set()
        started, ended = handle.started, handle.ended
        seconds = ended.now - started.now if started is not None and ended is not None else 0.0
        if handle.status == "completed":
            self._flow.succeeded(item, outcome_of(handle), seconds, handle.attempt)
            return
        error = outcome_of(handle)
        if isinstance(error, PoolExhausted) and error.reason == "no_eligible" and not self._has_keys():
            self._flow.fail(error)  # the key is missing, not the record wrong: it stays open
        elif handle.status != "cancelled" or not self._flow.stopping:
            self._flow.failed(item, error, seconds, handle.attempt)
