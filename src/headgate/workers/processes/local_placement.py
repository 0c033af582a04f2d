"""`LocalPlacement`: the workers of a pool as processes of this machine, started and ended by a keeper."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING

from headgate.core.checks import checked_optional_count, named_options
from headgate.errors import InvalidType
from headgate.workers.processes.keepers import LocalKeepers
from headgate.workers.processes.kept_workers import KeptWorkers

if TYPE_CHECKING:
    from headgate.discovery.port import DiscoveryEvent, Filter
    from headgate.workers.credentials import WorkerCredentials
    from headgate.workers.model import WorkerView
    from headgate.workers.processes.placement import Launch, Retirement


class LocalPlacement:
    """Starts worker processes on this machine and restarts those that end: ``WorkerPool(placement=LocalPlacement(4))``.

    `num_workers` is the number of CPUs by default. `worker` makes the LocalWorkers, if they are to be special.
    """

    @named_options
    def __init__(self, num_workers: int | None = None, *, worker: Callable[..., object] | None = None) -> None:
        checked_optional_count("num_workers", num_workers, 0)
        if worker is not None and not callable(worker):
            raise InvalidType(f"worker must be a factory of workers, got {type(worker).__name__}")
        self._num_workers = (os.cpu_count() or 1) if num_workers is None else num_workers
        self._credentials: WorkerCredentials | None = None
        self.keepers: LocalKeepers = LocalKeepers()
        """What has the processes started."""
        self._workers = KeptWorkers(self.keepers, worker)

    @property
    def num_workers(self) -> int:
        """How many workers it was made for."""
        return self._num_workers

    @property
    def credentials(self) -> WorkerCredentials | None:
        """What clients show to its workers: what its pool was given."""
        return self._credentials

    async def open(self, launch: Launch) -> None:
        """Start the keeper, and have it start the workers. Without workers there is no keeper."""
        self._credentials = launch.credentials
        self._workers.open(launch, self._num_workers if launch.workers is None else launch.workers)

    async def scale(self, workers: int) -> None:
        """Start what is missing, or let the surplus finish what it has and go."""
        await self._workers.scale(workers)

    def retire(self, uid: str, reason: str, how: Retirement) -> None:
        """Put another in its place: when it has ended, or, if it finishes what it has, now."""
        self._workers.retire(uid, reason, how)

    def workers(self) -> list[WorkerView]:
        """Return the workers that there are to be; one that has died is lost, though its keeper may not know yet."""
        return self._workers.workers()

    def subscribe(self, filter: Filter | None = None) -> AsyncIterator[DiscoveryEvent]:
        """Tell of the workers that take calls."""
        return self._workers.subscribe(filter)

    async def close(self, drained: Awaitable[object]) -> None:
        """Stop the workers when what they run has ended, and the keeper, which ends what is left of them."""
        await self._workers.close(drained)
