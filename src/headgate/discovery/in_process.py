"""A discovery inside one process: announces the workers of a pool to its event loops, without file or socket."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Self

from headgate.discovery.news import News, checked_type
from headgate.discovery.port import DiscoveryEvent, DiscoveryEventType, Filter
from headgate.errors import UnknownWorker
from headgate.workers.model import WorkerMetadata

_Change = tuple[WorkerMetadata, bool]
"""A worker, and whether it is there."""


class OwnDiscovery:
    """The list of the workers of one pool, and the subscribers that hear of each change. Usable from any thread."""

    bind_host: str = "127.0.0.1"
    """Where workers that a pool starts for this discovery listen."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._workers: dict[str, WorkerMetadata] = {}
        self._owners: dict[str, object] = {}
        self._listeners: dict[asyncio.Queue[_Change | None], asyncio.AbstractEventLoop] = {}
        self._closed = False

    @property
    def publisher(self) -> OwnPublisher:
        """A new publisher, to be entered with ``async with``. What it was first to announce goes when it is left."""
        return OwnPublisher(self)

    def announce(self, type: DiscoveryEventType, metadata: WorkerMetadata, owner: object = None) -> None:
        """Tell every subscriber of a worker, each on its own loop, without an await.

        A worker that is not known cannot be updated (`UnknownWorker`), and to drop it does nothing.
        """
        checked_type(type)
        with self._lock:
            known = metadata.uid in self._workers
            if type == "worker-dropped":
                if not known:
                    return
                del self._workers[metadata.uid], self._owners[metadata.uid]
            elif type == "worker-updated" and not known:
                raise UnknownWorker(f"worker {metadata.uid} is not announced here")
            else:
                self._workers[metadata.uid] = metadata
                self._owners.setdefault(metadata.uid, owner)
            listeners = list(self._listeners.items())
        for queue, loop in listeners:
            _put(loop, queue, (metadata, type != "worker-dropped"))

    def drop_all(self, owner: object) -> None:
        """Drop the workers that this owner was first to announce."""
        with self._lock:
            workers = [self._workers[uid] for uid, its_owner in self._owners.items() if its_owner is owner]
        for metadata in workers:
            self.announce("worker-dropped", metadata)

    async def subscribe(self, filter: Filter | None = None) -> AsyncIterator[DiscoveryEvent]:
        """Yield a "worker-added" for each worker that is there, then every change, until this is closed."""
        news = News(filter)
        queue: asyncio.Queue[_Change | None] = asyncio.Queue()
        with self._lock:
            present = list(self._workers.values())
            self._listeners[queue] = asyncio.get_running_loop()
            if self._closed:
                queue.put_nowait(None)
        try:
            for metadata in present:
                for event in news.present(metadata):
                    yield event
            while (change := await queue.get()) is not None:
                metadata, is_there = change
                for event in news.present(metadata) if is_there else news.gone(metadata.uid):
                    yield event
        finally:
            with self._lock:
                self._listeners.pop(queue, None)

    def close(self) -> None:
        """End every subscription, those that begin later too."""
        with self._lock:
            self._closed = True
            listeners = list(self._listeners.items())
        for queue, loop in listeners:
            _put(loop, queue, None)


class OwnPublisher:
    """Announces workers to the subscribers of one `OwnDiscovery`."""

    def __init__(self, discovery: OwnDiscovery) -> None:
        self._discovery = discovery

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._discovery.drop_all(self)

    async def publish(self, type: DiscoveryEventType, metadata: WorkerMetadata) -> None:
        """Tell every subscriber of a worker, each on its own loop."""
        self._discovery.announce(type, metadata, self)


def _put(loop: asyncio.AbstractEventLoop, queue: asyncio.Queue[_Change | None], change: _Change | None) -> None:
    if asyncio._get_running_loop() is loop:
        queue.put_nowait(change)
        return
    try:
        loop.call_soon_threadsafe(queue.put_nowait, change)
    except RuntimeError:  # that loop is closed: nobody listens there
        pass
