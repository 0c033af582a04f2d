"""A discovery inside one process: announces the workers of a pool to its event loops, without file or socket."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Self

from headgate.discovery.port import DiscoveryEvent, DiscoveryEventType, Filter
from headgate.workers.model import WorkerMetadata


class OwnDiscovery:
    """The list of the workers of one pool, and the subscribers that hear of each change. Usable from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._workers: dict[str, WorkerMetadata] = {}
        self._listeners: dict[asyncio.Queue[DiscoveryEvent | None], asyncio.AbstractEventLoop] = {}
        self._closed = False

    @property
    def publisher(self) -> OwnDiscovery:
        """The discovery itself, which announces workers too."""
        return self

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def publish(self, type: DiscoveryEventType, metadata: WorkerMetadata) -> None:
        """Tell every subscriber of a worker, each on its own loop."""
        self.announce(type, metadata)

    def announce(self, type: DiscoveryEventType, metadata: WorkerMetadata) -> None:
        """Tell every subscriber without an await. A worker that is not known cannot be dropped."""
        with self._lock:
            if type == "worker-dropped":
                if self._workers.pop(metadata.uid, None) is None:
                    return
            else:
                self._workers[metadata.uid] = metadata
            listeners = list(self._listeners.items())
        event = DiscoveryEvent(type, metadata)
        for queue, loop in listeners:
            _put(loop, queue, event)

    async def subscribe(self, filter: Filter | None = None) -> AsyncIterator[DiscoveryEvent]:
        """Yield a "worker-added" for each worker that is there, then every change, until this is closed."""
        queue: asyncio.Queue[DiscoveryEvent | None] = asyncio.Queue()
        with self._lock:
            present = list(self._workers.values())
            self._listeners[queue] = asyncio.get_running_loop()
            if self._closed:
                queue.put_nowait(None)
        try:
            for metadata in present:
                if filter is None or filter(metadata):
                    yield DiscoveryEvent("worker-added", metadata)
            while (event := await queue.get()) is not None:
                if filter is None or filter(event.metadata):
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


def _put(
    loop: asyncio.AbstractEventLoop, queue: asyncio.Queue[DiscoveryEvent | None], event: DiscoveryEvent | None
) -> None:
    if asyncio._get_running_loop() is loop:
        queue.put_nowait(event)
        return
    try:
        loop.call_soon_threadsafe(queue.put_nowait, event)
    except RuntimeError:  # that loop is closed: nobody listens there
        pass
