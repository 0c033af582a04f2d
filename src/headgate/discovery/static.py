"""`StaticDiscovery`: a fixed list of workers, for a few machines whose addresses are known."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from types import TracebackType
from typing import NoReturn, Self

from headgate._version import __version__
from headgate.core.checks import checked_flag, checked_names
from headgate.discovery.news import News, checked_type
from headgate.discovery.port import DiscoveryEvent, DiscoveryEventType, Filter
from headgate.discovery.records import checked_address
from headgate.errors import DiscoveryFailed, InvalidArgument, InvalidType
from headgate.workers.model import WorkerMetadata


class StaticDiscovery:
    """Finds the workers at these addresses ("host:port", "[ipv6]:port", "unix:/path"), or of these `WorkerMetadata`.

    Nobody checks whether they run: a pool tries to reach them, and tries again later. An address says nothing else of
    its worker, so `secure` and `tags` are given here for all addresses.
    """

    publishes: bool = False
    """Workers cannot be announced here."""

    def __init__(
        self, workers: Iterable[str | WorkerMetadata], *, secure: bool = False, tags: Iterable[str] = ()
    ) -> None:
        secure, tags = checked_flag("secure", secure), checked_names("tags", tags)
        if isinstance(workers, str) or not isinstance(workers, Iterable):
            raise InvalidType(
                f"workers must be a list of addresses, got {type(workers).__name__}",
                remedy="Pass something like ['10.0.0.1:50051', '10.0.0.2:50051'].",
            )
        found = [_checked_worker(worker, secure, tags) for worker in workers]
        if not found:
            raise InvalidArgument("workers must hold at least one address, got none")
        self._workers = {worker.uid: worker for worker in found}

    def __eq__(self, other: object) -> bool:
        return self._workers == other._workers if isinstance(other, StaticDiscovery) else NotImplemented

    def __hash__(self) -> int:
        return hash((StaticDiscovery, frozenset(self._workers)))

    def __repr__(self) -> str:
        return f"StaticDiscovery({[worker.address for worker in self._workers.values()]!r})"

    @property
    def publisher(self) -> NoPublisher:
        """A publisher that refuses to announce workers."""
        return NoPublisher("StaticDiscovery is a fixed list of workers")

    async def subscribe(self, filter: Filter | None = None) -> AsyncIterator[DiscoveryEvent]:
        """Yield a "worker-added" for each worker of the list, and then wait until this is closed."""
        news = News(filter)
        for metadata in self._workers.values():
            for event in news.present(metadata):
                yield event
        await asyncio.get_running_loop().create_future()


class NoPublisher:
    """The publisher of a discovery that only finds workers: whatever it is told, it refuses."""

    def __init__(self, why: str) -> None:
        self._why = why

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    async def publish(self, type: DiscoveryEventType, metadata: WorkerMetadata) -> NoReturn:
        """Raise `DiscoveryFailed`."""
        checked_type(type)
        raise DiscoveryFailed(
            f"worker {metadata.uid} cannot be announced: {self._why}",
            remedy="Announce it with LocalDiscovery or LanDiscovery, or add its address where the list comes from.",
        )


def listed_worker(address: str, secure: bool, tags: frozenset[str]) -> WorkerMetadata:
    """Return the metadata of a worker of which only the address is known. The same address gives the same uid."""
    return WorkerMetadata(f"static-{address}", checked_address(address), 0, __version__, tags, secure)


def _checked_worker(worker: object, secure: bool, tags: frozenset[str]) -> WorkerMetadata:
    if isinstance(worker, WorkerMetadata):
        return worker
    if isinstance(worker, str):
        return listed_worker(worker, secure, tags)
    raise InvalidType(f"workers must hold addresses or WorkerMetadata, got {type(worker).__name__}")
