"""The port: who announces workers, and who hears of them, know each other through this only."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

from headgate.workers.model import WorkerMetadata

Filter = Callable[[WorkerMetadata], bool]
"""Says of which workers somebody wants to hear."""
DiscoveryEventType = Literal["worker-added", "worker-updated", "worker-dropped"]


@dataclass(frozen=True, slots=True)
class DiscoveryEvent:
    """A worker came, changed or went."""

    type: DiscoveryEventType
    metadata: WorkerMetadata


@runtime_checkable
class DiscoveryPublisherLike(Protocol):
    """Announces workers."""

    async def publish(self, type: DiscoveryEventType, metadata: WorkerMetadata) -> None:
        """Tell everyone who subscribed, now or later."""


@runtime_checkable
class DiscoveryLike(Protocol):
    """A way for workers and pools to find each other."""

    @property
    def publisher(self) -> Any:
        """An async context manager that gives a `DiscoveryPublisherLike`."""
        ...

    def subscribe(self, filter: Filter | None = None) -> AsyncIterator[DiscoveryEvent]:
        """What happens from now on, after a "worker-added" for each worker that is there."""
        ...
