"""When a worker that stands alone ends by itself, in virtual time."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import pytest

from headgate.testing import run
from headgate.workers.model import Lifetime
from headgate.workers.server import lifetime
from headgate.workers.server.lifetime import LifetimeWatch


@dataclass
class Service:
    """What is watched of a worker."""

    clients: int = 0
    finished: int = 0
    is_awaited: bool = False


def watched(limits: Lifetime) -> tuple[Service, LifetimeWatch, list[str]]:
    service: Any = Service()
    reasons: list[str] = []
    return service, LifetimeWatch(service, limits, reasons.append), reasons


def test_c01_a_worker_counts_as_orphaned_from_its_start_and_from_when_its_last_client_has_left() -> None:
    async def main() -> None:
        service, watch, reasons = watched(Lifetime(orphan_timeout=10.0))
        await asyncio.sleep(9)
        service.clients = 1
        watch.changed()
        await asyncio.sleep(1000)
        service.clients = 2
        watch.changed()
        service.clients = 0
        watch.changed()
        await asyncio.sleep(9)
        watch.changed()  # a call that nobody waited for has ended
        assert reasons == []
        await asyncio.sleep(1.5)
        assert reasons == ["no client was connected for 10 s"]

    run(main())


def test_c01_a_worker_is_told_once_that_it_has_executed_enough() -> None:
    async def main() -> None:
        service, watch, reasons = watched(Lifetime(max_tasks=2, orphan_timeout=1.0))
        for service.finished in (1, 2, 3):
            watch.changed()
        await asyncio.sleep(5)
        assert reasons == ["it has executed 2 tasks, and max_tasks is 2"]

    run(main())


def test_c01_memory_is_looked_at_from_time_to_time(monkeypatch: pytest.MonkeyPatch) -> None:
    used = [100 * 2**20]
    monkeypatch.setattr(lifetime, "memory_of_process", lambda: used[0])

    async def main() -> None:
        _, watch, reasons = watched(Lifetime(max_memory=200 * 2**20))
        await asyncio.sleep(10)
        assert reasons == []
        used[0] = 300 * 2**20
        await asyncio.sleep(2)
        assert reasons == ["its process has 300 MB of memory, and max_memory is 200 MB"]
        watch.close()

    run(main())


def test_c01_a_watch_that_was_closed_says_nothing() -> None:
    async def main() -> None:
        service, watch, reasons = watched(Lifetime(max_tasks=1, max_memory=2**50, orphan_timeout=1.0))
        watch.close()
        service.finished = 5
        watch.changed()
        await asyncio.sleep(10)
        assert reasons == []

    run(main())


def test_c01_the_memory_of_a_process_is_told_in_bytes() -> None:
    assert 2**20 < lifetime.memory_of_process() < 2**40


def test_w90_a_worker_is_idle_from_its_start_and_from_when_its_last_call_has_ended() -> None:
    async def main() -> None:
        service, watch, reasons = watched(Lifetime(idle_timeout=10.0))
        await asyncio.sleep(9)
        service.is_awaited = True  # a call begins, which tells nothing
        await asyncio.sleep(1000)
        service.is_awaited, service.finished = False, 1
        watch.changed()
        await asyncio.sleep(6)
        service.clients = 1
        watch.changed()  # clients do not count
        await asyncio.sleep(3.9)
        assert reasons == []
        await asyncio.sleep(0.2)
        assert reasons == ["it had no call for 10 s, and idle_timeout is 10"]

    run(main())
