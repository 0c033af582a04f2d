"""check_discovery finds what is wrong with a discovery."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from headgate import DiscoveryEvent, StaticDiscovery, WorkerMetadata
from headgate.discovery import OwnDiscovery
from headgate.discovery.in_process import OwnPublisher
from headgate.testing import check_discovery


def faulty(kind: type[OwnDiscovery], **options: Any) -> None:
    made: dict[str, OwnDiscovery] = {}
    check_discovery(lambda namespace: made.setdefault(namespace, kind()), patience=0.5, **options)


class _Forgets(OwnDiscovery):
    """Tells late subscribers nothing of the workers that are there."""

    async def subscribe(self, filter: Any = None) -> AsyncIterator[DiscoveryEvent]:
        there = set(self._workers)
        async for event in super().subscribe(filter):
            if event.metadata.uid not in there:
                yield event


class _Filterless(OwnDiscovery):
    """Takes no notice of the filter."""

    def subscribe(self, filter: Any = None) -> AsyncIterator[DiscoveryEvent]:
        return super().subscribe(None)


class _AddsTwice(OwnDiscovery):
    """Calls every news of a worker an addition."""

    async def subscribe(self, filter: Any = None) -> AsyncIterator[DiscoveryEvent]:
        async for event in super().subscribe(filter):
            yield DiscoveryEvent("worker-added", event.metadata) if event.type == "worker-updated" else event


class _LosesExtra(OwnDiscovery):
    """Carries no extra."""

    def announce(self, type: Any, metadata: WorkerMetadata, owner: object = None) -> None:
        plain = WorkerMetadata(metadata.uid, metadata.address, metadata.pid, metadata.version, metadata.tags)
        super().announce(type, plain, owner)


class _Stays(OwnDiscovery):
    """Keeps the workers of a publisher that has ended."""

    def drop_all(self, owner: object) -> None:
        pass


class _TakesAnyType(OwnDiscovery):
    """Accepts types that there are not."""

    @property
    def publisher(self) -> Any:
        return _Careless(self)


class _Careless(OwnPublisher):
    async def publish(self, type: Any, metadata: WorkerMetadata) -> None:
        await super().publish(type if str(type) in ("worker-added", "worker-dropped") else "worker-added", metadata)


@pytest.mark.parametrize(
    ("kind", "complaint"),
    [
        (_Forgets, "expected the workers"),
        (_Filterless, "worker-added"),
        (_AddsTwice, "added again"),
        (_LosesExtra, "expected"),
        (_Stays, "expected the workers"),
        (_TakesAnyType, "must raise InvalidArgument"),
    ],
)
def test_w65_faults_are_found(kind: type[OwnDiscovery], complaint: str) -> None:
    with pytest.raises(AssertionError, match=complaint):
        faulty(kind)


def test_w65_discoveries_of_a_namespace_must_be_equal() -> None:
    with pytest.raises(AssertionError, match="must be equal"):
        check_discovery(lambda namespace: OwnDiscovery())
    one = OwnDiscovery()
    with pytest.raises(AssertionError, match="must not be equal"):
        check_discovery(lambda namespace: one)


def test_w65_a_list_must_refuse_to_announce() -> None:
    class Silent(StaticDiscovery):
        @property
        def publisher(self) -> Any:
            return OwnDiscovery().publisher

    with pytest.raises(AssertionError, match="publishes is False"):
        check_discovery(lambda namespace: Silent(["h:1"]))
