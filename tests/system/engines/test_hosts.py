"""Workers on hosts, without an engine: the contract of placements, certificates, and hosts that are killed."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import headgate
from headgate import InvalidArgument, StaticDiscovery, WorkerCredentials, WorkerPool
from headgate.certs import make_certificates
from headgate.testing import check_placement, no_leaks
from headgate.workers.client.inspection import inspect
from headgate.workers.processes.engine_placement import EnginePlacement, pool_credentials
from headgate.workers.processes.host_process import HostProcess
from headgate.workers.processes.worker_host import KEEP
from headgate.workers.protocol.transport import dial, grpc
from tests.support.workers import jobs
from tests.support.workers.support import Shared, alive, run, until, wait_until
from tests.system.engines.subprocesses import Subprocesses

pytestmark = pytest.mark.integration


def test_p01_a_placement_on_hosts_keeps_the_contract() -> None:
    check_placement(lambda workers: EnginePlacement(Subprocesses(), workers), patience=30)


class Placed(Shared):
    """An open pool of two workers on two hosts."""

    def __init__(self) -> None:
        self.engine = Subprocesses()
        self.placement = EnginePlacement(self.engine, 2, orphan_timeout=1.0)
        super().__init__(placement=self.placement)

    def credentials(self) -> WorkerCredentials:
        found = self.placement.credentials
        assert found is not None
        return found


@pytest.fixture(scope="module")
def placed() -> Iterator[Placed]:
    shared = Placed()
    shared.open()
    shared(lambda: shared.pool.broadcast(jobs.pid))  # both are connected
    yield shared
    shared.close()


# -- trust ------------------------------------------------------------------------------------------------------------


def test_p05_calls_and_nested_calls_run_over_mutual_tls_with_certificates_that_name_the_pool(placed: Placed) -> None:
    async def main() -> None:
        assert await jobs.add(1, 2) == 3
        assert len(set((await placed.pool.broadcast(jobs.pid)).values())) == 2
        found = placed.credentials()
        assert found.mutual
        assert found.identity is not None
        assert found.identity.startswith("pool-")
        assert "PRIVATE" not in repr(found) + repr(placed.placement) + repr(placed.pool)
        for view in placed.pool.workers():
            assert (await inspect(view.metadata, found)).load is not None

    placed(main)


@pytest.mark.parametrize("who", ["another pool", "nobody", "the wrong name"])
def test_p05_others_are_refused_by_workers_and_hosts(placed: Placed, who: str) -> None:
    async def main() -> None:
        ours = placed.credentials()
        other: WorkerCredentials | None = await pool_credentials()
        if who == "nobody":
            other = None
        elif who == "the wrong name":
            other = replace(ours, identity="pool-of-somebody-else.headgate")
        [view, *_] = placed.pool.workers()
        found = await inspect(view.metadata, other, timeout=1)
        assert found.load is None
        host = next(iter(placed.engine.where.values()))["address"]
        async with dial(host, session=False, credentials=other) as channel:
            with pytest.raises(grpc.aio.AioRpcError):
                await _speak(channel)

    placed(main)


async def _speak(channel: grpc.aio.Channel) -> None:
    """Say to a host what a placement says."""
    stream = channel.stream_stream(KEEP)()
    async with asyncio.timeout(5):
        await stream.write(pickle.dumps({"do": "hello", "seen": {}}))
        await stream.read()


def test_p05_certificates_that_the_pool_was_given_are_used(tmp_path: Path) -> None:
    make_certificates(tmp_path / "certs", ["my-pool"])
    files = (tmp_path / "certs" / name for name in ("ca-cert.pem", "worker-key.pem", "worker-cert.pem"))
    given = WorkerCredentials.from_files(*files, identity="my-pool")

    async def main() -> None:
        placement = EnginePlacement(Subprocesses(), 1)
        async with WorkerPool(placement=placement, credentials=given) as pool:
            assert placement.credentials == given
            assert await jobs.add(1, 2) == 3
            assert (await inspect(pool.workers()[0].metadata, given)).load is not None

    with no_leaks(grace=5):
        run(main)


def test_p05_a_discovery_beside_placed_workers_needs_certificates_for_all() -> None:
    with pytest.raises(InvalidArgument, match="credentials= must be given when placed workers and discovered ones"):
        WorkerPool(placement=EnginePlacement(Subprocesses(), 1), discovery=StaticDiscovery(["127.0.0.1:1"]))


# -- hosts ------------------------------------------------------------------------------------------------------------


@pytest.mark.headgate_leaks(threads=False, files=False, children=False)  # another host is in its place
def test_p06_a_killed_host_leaves_nothing_and_its_worker_is_replaced(placed: Placed) -> None:
    async def main() -> None:
        before = {view.uid: view.pid for view in placed.pool.workers()}
        host = next(iter(placed.engine.where.values()))["pid"]
        beneath = [pid for pid in before.values() if host in _ancestors(pid)]
        os.kill(host, signal.SIGKILL)
        await until(lambda: not any(alive(pid) for pid in beneath), 5)
        await until(lambda: len({view.uid for view in placed.pool.workers()} - before.keys()) == 1)
        await until(lambda: [view.state for view in placed.pool.workers()] == ["ready", "ready"])
        assert await asyncio.gather(*(jobs.add(number, 1) for number in range(10))) == list(range(1, 11))

    placed(main)


def test_p06_a_host_that_is_stopped_for_a_while_loses_nobody(placed: Placed) -> None:
    """What cannot be reached for a while is a hint only: its worker answers, so it stays."""

    async def main() -> None:
        before = {view.uid for view in placed.pool.workers()}
        host = next(iter(placed.engine.where.values()))["pid"]
        os.kill(host, signal.SIGSTOP)
        try:
            for number in range(20):
                assert await jobs.add(number, 1) == number + 1
        finally:
            os.kill(host, signal.SIGCONT)
        assert {view.uid for view in placed.pool.workers()} == before

    placed(main)


def test_p06_a_host_ends_without_a_placement_and_with_its_parent(placed: Placed) -> None:
    settings = placed.engine.settings
    lonely = HostProcess(settings, "127.0.0.1")
    pid = lonely.where()["pid"]
    wait_until(lambda: not alive(pid), 5)  # its orphan timeout is 1 s
    wait_until(lambda: lonely.where()["pid"] != pid)  # it is started again, when all its threads have ended
    lonely.end()
    with pytest.raises(headgate.WorkerStartFailed, match="the host of a worker ended before it listened"):
        HostProcess(b"garbage", "127.0.0.1").where()
    with pytest.raises(headgate.WorkerStartFailed, match="the host of a worker ended before it listened"):
        HostProcess(settings, "192.0.2.123").where()  # no address of this machine


def test_p01_places_that_are_not_wanted_any_more_are_dropped() -> None:
    """Also those that were not up yet when the pool became smaller again."""

    async def main() -> None:
        engine = Subprocesses()
        async with WorkerPool(placement=EnginePlacement(engine, 1)) as pool:
            growing = asyncio.create_task(pool.resize(3))
            await until(lambda: len(engine.hosts) == 3)
            growing.cancel()
            await asyncio.wait([growing])
            await pool.resize(1)
            assert len(pool.workers()) == 1
            await until(lambda: len(engine.hosts) == 1)
            assert len(engine.dropped) == 2
            assert await jobs.add(1, 2) == 3

    with no_leaks(grace=5):
        run(main)


def _ancestors(pid: int) -> list[int]:
    found: list[int] = []
    while pid > 1:
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        found.append(pid)
    return found
