"""Pools with credentials: TLS between programs, workers and their peers, and refusals that say what is wrong."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from headgate import LocalWorker, WorkerCredentials, WorkerMetadata, WorkerPool
from headgate.discovery import OwnDiscovery
from headgate.errors import InvalidType, NoWorkersAvailable, WorkerStartFailed
from tests.support.workers import jobs
from tests.support.workers.certificates import Authority
from tests.support.workers.support import Shared, run, until

DAY = timedelta(days=1)


@pytest.fixture(autouse=True)
def soon_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who is refused for good waits less for another worker than users do."""
    monkeypatch.setattr("headgate.workers.client.dispatcher.GRACE", 0.2)


@cache
def ours() -> Authority:
    return Authority("ours")


@cache
def another() -> Authority:
    return Authority("another")


def credentials(authority: Authority, *names: str, **options: Any) -> WorkerCredentials:
    times = {name: options.pop(name) for name in ("start", "end") if name in options}
    pair = authority.issue(*names, **times)
    return WorkerCredentials(authority.cert, pair.key, pair.cert, **options)


def over_tcp(*tags: str, credentials: WorkerCredentials | None = None) -> LocalWorker:
    return LocalWorker(*tags, credentials=credentials, host="127.0.0.1")


@pytest.fixture(scope="module")
def secure() -> Iterator[list[WorkerMetadata]]:
    """Two workers with mutual TLS, for all tests of this file."""
    shared = Shared(spawn=2, worker=over_tcp, credentials=credentials(ours()))
    shared.open()
    yield [view.metadata for view in shared.pool.workers()]
    shared.close()


def found(*workers: WorkerMetadata) -> OwnDiscovery:
    discovery = OwnDiscovery()
    for metadata in workers:
        discovery.announce("worker-added", metadata)
    return discovery


async def pids(count: int = 12) -> set[int]:
    return set(await asyncio.gather(*(jobs.pid() for _ in range(count))))


def test_w70_w64_a_pool_with_credentials_uses_secure_workers_and_their_routines_call_each_other(
    secure: list[WorkerMetadata],
) -> None:
    async def main() -> None:
        assert all(metadata.secure for metadata in secure)
        async with WorkerPool(discovery=found(*secure), credentials=credentials(ours()), lazy=False, quorum=2):
            assert await pids() == {metadata.pid for metadata in secure}
            assert await jobs.fib(8) == 21
            assert await jobs.echo(b"x" * 5_000_000) == b"x" * 5_000_000

    run(main)


def test_w70_a_spawned_pool_with_credentials_stays_on_private_unix_sockets() -> None:
    async def main() -> None:
        async with WorkerPool(spawn=2, credentials=credentials(ours())) as pool:
            assert all(view.address.startswith("unix:") and view.metadata.secure for view in pool.workers())
            assert await jobs.fib(8) == 21

    run(main)


def test_w70_w20_a_hybrid_pool_announces_secure_workers_on_tcp(secure: list[WorkerMetadata]) -> None:
    async def main() -> None:
        discovery = found(secure[0])
        async with WorkerPool(spawn=1, discovery=discovery, credentials=credentials(ours()), lease=1) as pool:
            own = next(view for view in pool.workers() if view.pid != secure[0].pid)
            assert own.metadata.secure
            assert own.address.startswith("127.0.0.1:")
            await jobs.pid()
            await until(lambda: len(pool.workers()) == 2)
            async with WorkerPool(discovery=discovery, credentials=credentials(ours()), lazy=False, quorum=2):
                assert await pids() == {own.pid, secure[0].pid}
                assert await jobs.fib(8) == 21

    run(main)


@pytest.mark.parametrize("mutual", [True, False])
def test_w70_mutual_and_one_way_tls(mutual: bool) -> None:
    async def main() -> None:
        worker = LocalWorker(credentials=credentials(ours(), mutual=mutual), host="127.0.0.1")
        async with worker:
            assert worker.metadata is not None
            async with WorkerPool(discovery=found(worker.metadata), credentials=credentials(ours(), mutual=mutual)):
                assert await jobs.pid() == worker.pid

    run(main)


REFUSALS: dict[str, tuple[Any, str]] = {
    "another CA": (lambda: credentials(another()), r"CA"),
    "no certificate": (lambda: credentials(ours(), mutual=False), r"certificate"),
    "expired": (lambda: credentials(ours(), start=-2 * DAY, end=-DAY), r"expired"),
    "not yet valid": (lambda: credentials(ours(), start=DAY, end=2 * DAY), r"not yet valid|valid"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_w71_a_client_that_is_refused_says_why_and_what_to_do(secure: list[WorkerMetadata], case: str) -> None:
    make, says = REFUSALS[case]

    async def main() -> None:
        async with WorkerPool(discovery=found(secure[0]), credentials=make(), quorum_timeout=20):
            with pytest.raises(NoWorkersAvailable, match=f"all that are known refuse.*{says}"):
                await jobs.pid()

    run(main)


def test_w71_later_calls_are_refused_as_quickly_as_the_first_one(
    secure: list[WorkerMetadata], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However often the worker was tried in between: a refusal that will not go away is no reason to wait."""
    monkeypatch.setattr("headgate.workers.client.candidates.REFUSED", (0.01, 0.01, 0.01, 0.01, 60.0))
    pauses: list[float] = []
    sleep = asyncio.sleep

    async def noted(seconds: float) -> None:
        pauses.append(seconds)
        await sleep(seconds)

    monkeypatch.setattr("headgate.workers.client.candidates.asyncio.sleep", noted)

    async def main() -> None:
        async with WorkerPool(discovery=found(secure[0]), credentials=credentials(another()), quorum_timeout=60):
            with pytest.raises(NoWorkersAvailable, match="all that are known refuse"):
                await jobs.patient_pid_of_a_peer(0)  # which has retries: they are for calls that may have run
            await until(lambda: 60.0 in pauses)
            with pytest.raises(NoWorkersAvailable, match="all that are known refuse"):
                await jobs.patient_pid_of_a_peer(0)

    run(main, 30)


WORKERS: dict[str, tuple[Any, str]] = {
    "another CA": (lambda: credentials(another()), r"CA"),
    "expired": (lambda: credentials(ours(), start=-2 * DAY, end=-DAY), r"expired"),
    "not yet valid": (lambda: credentials(ours(), start=DAY, end=2 * DAY), r"valid"),
    "another name": (lambda: credentials(ours(), "elsewhere.example"), r"name"),
    "plain text": (lambda: None, r"TLS"),
}


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=pytest.mark.soak if case in ("not yet valid", "another CA") else ()) for case in WORKERS],
)
def test_w71_a_worker_whose_certificate_is_wrong_is_named(case: str) -> None:
    make, says = WORKERS[case]

    async def main() -> None:
        async with LocalWorker(credentials=make(), host="127.0.0.1") as worker:
            assert worker.metadata is not None
            announced = replace(worker.metadata, secure=True)
            async with WorkerPool(discovery=found(announced), credentials=credentials(ours()), quorum_timeout=20):
                with pytest.raises(NoWorkersAvailable, match=f"all that are known refuse.*{says}"):
                    await jobs.pid()

    run(main)


def test_w71_a_pool_whose_own_workers_have_a_wrong_certificate_says_so_and_does_not_replace_them() -> None:
    async def main() -> None:
        wrong = credentials(ours(), "elsewhere.example")
        async with WorkerPool(spawn=1, discovery=OwnDiscovery(), credentials=wrong, quorum_timeout=20) as pool:
            with pytest.raises(NoWorkersAvailable, match=r"all that are known refuse.*name"):
                await jobs.pid()
            before = [view.pid for view in pool.workers()]
            await asyncio.sleep(0.5)
            assert [view.pid for view in pool.workers()] == before

    run(main)


def test_w71_a_client_without_tls_of_a_worker_with_tls_is_told(secure: list[WorkerMetadata]) -> None:
    async def main() -> None:
        async with WorkerPool(discovery=found(replace(secure[0], secure=False)), quorum_timeout=20):
            with pytest.raises(NoWorkersAvailable, match=r"all that are known refuse.*TLS"):
                await jobs.pid()

    run(main)


def test_w70b_an_identity_is_verified_instead_of_the_address() -> None:
    async def main() -> None:
        named = credentials(ours(), "workers.example", identity="workers.example")
        async with LocalWorker(credentials=named, host="127.0.0.1") as worker:
            assert worker.metadata is not None
            async with WorkerPool(discovery=found(worker.metadata), credentials=named):
                assert await jobs.pid() == worker.pid
            other = replace(named, identity="others.example")
            async with WorkerPool(discovery=found(worker.metadata), credentials=other, quorum_timeout=20):
                with pytest.raises(NoWorkersAvailable, match=r"others\.example"):
                    await jobs.pid()

    run(main)


def test_w70b_certificates_rotate_under_load_without_a_failed_call(tmp_path: Path) -> None:
    """Old sessions go on; new ones use what is in the files then."""

    async def main() -> None:
        paths = ours().good.write(tmp_path, ours().cert)
        rotated = WorkerCredentials.from_files(*paths, reload=True)
        async with LocalWorker(credentials=rotated, host="127.0.0.1") as worker:
            assert worker.metadata is not None
            discovery = found(worker.metadata)
            done = 0

            async def caller() -> None:
                nonlocal done
                while done < 600:
                    assert await jobs.pid() == worker.pid
                    done += 1

            async with WorkerPool(discovery=discovery, credentials=rotated):
                callers = [asyncio.ensure_future(caller()) for _ in range(4)]
                await until(lambda: done > 100)
                newer = Authority("newer")
                newer.good.write(tmp_path, newer.cert)
                fresh = WorkerCredentials(newer.cert, newer.good.key, newer.good.cert)

                async def accepted() -> bool:
                    async with WorkerPool(discovery=found(worker.metadata), credentials=fresh, quorum_timeout=1):
                        try:
                            return await jobs.pid() == worker.pid
                        except NoWorkersAvailable:
                            return False

                async with asyncio.timeout(20):
                    while not await accepted():
                        pass
                await asyncio.gather(*callers)
            async with WorkerPool(discovery=discovery, credentials=rotated):
                assert await jobs.pid() == worker.pid, "the client has read the new ones too"

    run(main)


def test_w72_a_worker_does_not_listen_beyond_this_machine_without_credentials() -> None:
    async def main() -> None:
        with pytest.raises(WorkerStartFailed, match=r"without credentials.*insecure=True"):
            await LocalWorker(host="0.0.0.0").start()
        async with LocalWorker(host="0.0.0.0", insecure=True) as worker:
            assert worker.metadata is not None
            assert worker.metadata.secure is False
            port = worker.metadata.address.rpartition(":")[2]
            reachable = replace(worker.metadata, address=f"127.0.0.1:{port}")
            async with WorkerPool(discovery=found(reachable)):
                assert await jobs.pid() == worker.pid

    run(main)


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({"host": " "}, ValueError),
        ({"host": 7}, TypeError),
        ({"port": -1}, ValueError),
        ({"port": 65536}, ValueError),
        ({"port": "80"}, ValueError),
        ({"grace": 0}, ValueError),
        ({"grace": -1.0}, ValueError),
        ({"extra": {"a": {1, 2}}}, ValueError),
        ({"extra": {1: 2}}, ValueError),
        ({"extra": [1]}, TypeError),
        ({"credentials": "cert.pem"}, TypeError),
        ({"options": {"port": 1}}, TypeError),
    ],
    ids=str,
)
def test_w50a_w70_bad_options_of_a_worker_are_refused(options: dict[str, Any], kind: type[Exception]) -> None:
    with pytest.raises(kind):
        LocalWorker(**options)


def test_w70_what_is_no_credentials_is_refused_by_a_pool() -> None:
    with pytest.raises(InvalidType, match="credentials must be WorkerCredentials"):
        WorkerPool(spawn=1, credentials=b"pem")  # type: ignore[arg-type]
