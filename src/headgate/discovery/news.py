"""What one subscriber has been told, and so what it must be told next. Pure. Also the check of an event's type."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import cast, get_args

from headgate.discovery.port import DiscoveryEvent, DiscoveryEventType, Filter
from headgate.errors import InvalidArgument
from headgate.workers.model import WorkerMetadata


class News:
    """Turns what is known of workers into the events of one subscriber.

    The filter is asked at each news of a worker. A worker that it no longer wants is dropped for this subscriber, and
    one that it wants now is added.
    """

    def __init__(self, filter: Filter | None = None) -> None:
        self._filter: Callable[[WorkerMetadata], bool] = filter if filter is not None else _everyone
        self._told: dict[str, WorkerMetadata] = {}

    def present(self, metadata: WorkerMetadata) -> Iterator[DiscoveryEvent]:
        """A worker is there: it came, it changed, or it announced itself again."""
        known = metadata.uid in self._told
        if self._filter(metadata):
            self._told[metadata.uid] = metadata
            yield DiscoveryEvent("worker-updated" if known else "worker-added", metadata)
        elif known:
            del self._told[metadata.uid]
            yield DiscoveryEvent("worker-dropped", metadata)

    def gone(self, uid: str) -> Iterator[DiscoveryEvent]:
        """A worker is there no longer."""
        metadata = self._told.pop(uid, None)
        if metadata is not None:
            yield DiscoveryEvent("worker-dropped", metadata)


def checked_type(type: object) -> DiscoveryEventType:
    """Return the type of an event, or raise `InvalidArgument`."""
    if type not in get_args(DiscoveryEventType):
        raise InvalidArgument(
            f"type must be one of {', '.join(map(repr, get_args(DiscoveryEventType)))}, got {type!r}",
            remedy="Publish 'worker-added' for a worker that came or changed, and 'worker-dropped' when it goes.",
        )
    return cast("DiscoveryEventType", type)


def _everyone(metadata: WorkerMetadata) -> bool:
    return True
