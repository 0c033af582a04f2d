"""`WorkerSlots`: as many slots as the workers of a pool can take, for a TaskPool without `max_concurrent`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from headgate.workers.model import WorkerView
    from headgate.workers.pool import WorkerPool

THREAD_PLACES: Final = 32
"""Calls that a worker without a limit of its own is given at a time: as many plain functions as it runs."""


class WorkerSlots:
    """A `SlotBudget` that follows the workers of a pool as they come and go."""

    by_tenant = False

    def __init__(self, workers: WorkerPool, loop: Callable[[], asyncio.AbstractEventLoop | None]) -> None:
        """`loop` gives the event loop of the TaskPool."""
        self._workers = workers
        self._loop = loop
        self._fixed: int | None = None
        self._changed: Callable[[int], None] | None = None

    @property
    def limit(self) -> int:
        """What all workers can take; at least 1, so that a task finds out why there is no worker."""
        if self._fixed is not None:
            return self._fixed
        return max(1, sum(_taken_by(view) for view in self._workers.workers()))

    def on_change(self, changed: Callable[[int], None]) -> None:
        """Call `changed(limit)` from now on whenever workers come or go."""
        self._changed = changed

    def resize(self, limit: int) -> None:
        """Set the limit: the workers do not decide any more."""
        self._fixed = limit
        self._tell()

    def want(self, tenant: Hashable, queued: int) -> None:
        """Do nothing: the limit does not depend on what is queued."""

    def granted(self, tenant: Hashable) -> int:
        """The limit of the pool: no tenant has less than all of it."""
        return self.limit

    def started(self, tenant: Hashable) -> None:
        """Do nothing: `Slots` counts what runs."""

    def ended(self, tenant: Hashable) -> None:
        """Do nothing: `Slots` counts what runs."""

    def look(self) -> None:
        """Tell the TaskPool, on its event loop, that workers have come or gone."""
        loop = self._loop()
        if loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(self._tell)
        elif loop is None:
            self._tell()  # nothing was submitted yet

    def _tell(self) -> None:
        if self._changed is not None:
            self._changed(self.limit)


def _taken_by(view: WorkerView) -> int:
    if view.state in ("lost", "stopping"):
        return 0
    options = view.metadata.options
    most = None if options is None else options.max_concurrent_streams
    return THREAD_PLACES if most is None else most
