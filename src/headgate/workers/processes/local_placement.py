"""`LocalPlacement`: the workers of a pool as processes of this machine, started and ended by a keeper."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from headgate.core.checks import checked_optional_count, named_options
from headgate.errors import InvalidType
from headgate.workers.processes.keepers import LocalKeepers
from headgate.workers.processes.kept_placement import KeptPlacement
from headgate.workers.processes.kept_workers import KeptWorkers

if TYPE_CHECKING:
    from headgate.workers.processes.placement import Launch


class LocalPlacement(KeptPlacement):
    """Starts worker processes on this machine and restarts those that end: ``WorkerPool(placement=LocalPlacement(4))``.

    `num_workers` is the number of CPUs by default. `worker` makes the LocalWorkers, if they are to be special.
    """

    @named_options
    def __init__(self, num_workers: int | None = None, *, worker: Callable[..., object] | None = None) -> None:
        checked_optional_count("num_workers", num_workers, 0)
        if worker is not None and not callable(worker):
            raise InvalidType(f"worker must be a factory of workers, got {type(worker).__name__}")
        self.keepers: LocalKeepers = LocalKeepers()
        """What has the processes started."""
        size = (os.cpu_count() or 1) if num_workers is None else num_workers
        super().__init__(KeptWorkers(self.keepers, worker), size)

    async def open(self, launch: Launch) -> None:
        """Start the keeper, and have it start the workers. Without workers there is no keeper."""
        self._credentials = launch.credentials
        self._workers.open(launch, (self._num_workers or 0) if launch.workers is None else launch.workers)

    async def close(self, drained: Awaitable[object]) -> None:
        """Stop the workers when what they run has ended, and the keeper, which ends what is left of them."""
        await self._workers.close(drained)
