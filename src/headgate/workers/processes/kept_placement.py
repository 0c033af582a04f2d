"""`KeptPlacement`: what all placements of headgate have in common. Each opens and closes in its own way."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headgate.discovery.port import DiscoveryEvent, Filter
    from headgate.workers.credentials import WorkerCredentials
    from headgate.workers.model import WorkerView
    from headgate.workers.processes.kept_workers import KeptWorkers
    from headgate.workers.processes.placement import Retirement


class KeptPlacement:
    """A placement whose workers are `KeptWorkers`."""

    def __init__(self, workers: KeptWorkers, num_workers: int | None) -> None:
        self._workers = workers
        self._num_workers = num_workers
        self._credentials: WorkerCredentials | None = None

    @property
    def num_workers(self) -> int | None:
        """How many workers it was made for; None: it knows when it is open."""
        return self._num_workers

    @property
    def credentials(self) -> WorkerCredentials | None:
        """What clients show to its workers, known when it is open."""
        return self._credentials

    async def scale(self, workers: int) -> None:
        """Start what is missing, or let the surplus finish what it has and go."""
        await self._workers.scale(workers)

    def retire(self, uid: str, reason: str, how: Retirement) -> None:
        """Put another in its place: when it has ended, or, if it finishes what it has, now."""
        self._workers.retire(uid, reason, how)

    def workers(self) -> list[WorkerView]:
        """Return the workers that there are to be; one that is known to have died is lost."""
        return self._workers.workers()

    def subscribe(self, filter: Filter | None = None) -> AsyncIterator[DiscoveryEvent]:
        """Tell of the workers that take calls."""
        return self._workers.subscribe(filter)
