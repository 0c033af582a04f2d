"""The port of discovery: all that those who announce workers and those who use them know of each other."""

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
    """News of one worker: it came, changed or went."""

    type: DiscoveryEventType
    metadata: WorkerMetadata


@runtime_checkable
class DiscoveryPublisherLike(Protocol):
    """The side of a discovery that announces workers."""

    async def publish(self, type: DiscoveryEventType, metadata: WorkerMetadata) -> None:
        """Tell everyone who is subscribed, or subscribes later, of a worker."""


@runtime_checkable
class DiscoveryLike(Protocol):
    """A way for workers and pools to find each other.

    Two attributes may be there besides. `bind_host` is the address on which workers that a pool starts for this
    discovery listen; without it that is 127.0.0.1, and None means a Unix socket of this user, unless there are
    credentials. ``publishes = False`` says that workers cannot be announced. `headgate.testing.check_discovery` checks
    the contract.
    """

    @property
    def publisher(self) -> Any:
        """An async context manager that gives a `DiscoveryPublisherLike`."""
        ...

    def subscribe(self, filter: Filter | None = None) -> AsyncIterator[DiscoveryEvent]:
        """Yield a "worker-added" for each worker that is there, then what happens from now on."""
        ...
