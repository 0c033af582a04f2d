"""The port Placement suffices: a WorkerPool works with workers that no keeper starts, here servers in this process."""

from __future__ import annotations

import asyncio
import faulthandler
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path

import pytest

from headgate import (
    InvalidArgument,
    InvalidType,
    LocalPlacement,
    LocalWorker,
    NoWorkersAvailable,
    PoolClosed,
    WorkerMetadata,
    WorkerPool,
    WorkerStartFailed,
    __version__,
)
from headgate.discovery import DiscoveryEvent, OwnDiscovery
from headgate.discovery.port import Filter
from headgate.testing import check_placement, no_leaks
from headgate.workers import Launch, Placement, WorkerView
from headgate.workers.processes.exit_status import Ending
from headgate.workers.processes.placement import Retirement
from headgate.workers.processes.restarts import Trouble
from headgate.workers.protocol.transport import bind, make_server
from headgate.workers.server.service import Service
from tests.support.workers import jobs
from tests.support.workers.support import ROOT, run, until

pytestmark = pytest.mark.integration


class Server:
    """A worker inside this process: the server of a worker, with its thread for routines."""

    def __init__(self, metadata: WorkerMetadata) -> None:
        self.metadata = metadata
        self.ready = False

    async def start(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._service = Service(self.metadata.uid, "worker of a test", None, self._loop)
        self._server = make_server(self._service)
        bind(self._server, self.metadata.address)
        self._service.tasks.start()
        await self._server.start()
        self.ready = True

    async def stop(self, timeout: float) -> None:
        if self.ready:
            await self._service.stop(timeout)
            await self.die()

    async def die(self) -> None:
        """End without a word to clients."""
        self.ready = False
        await self._server.stop(0)
        self._service.end()
        self._loop.close()


class InProcess:
    """A Placement whose workers are servers in this process. It notes what it is asked."""

    credentials = None

    def __init__(self, folder: Path, holds: asyncio.Event | None = None, workers: int = 2) -> None:
        self.folder = folder
        self.num_workers = workers
        self.asked: list[str] = []
        self.servers: dict[str, Server] = {}
        self.holds = holds  # workers become ready when it is set
        self.launch: Launch
        self._discovery = OwnDiscovery()
        self._number = 0
        self._busy: set[asyncio.Task[None]] = set()

    async def open(self, launch: Launch) -> None:
        if self.asked:
            raise RuntimeError("opened before")
        self.asked.append(f"open {launch.workers}")
        self.launch = launch
        self._wanted = self.num_workers
        self._fill()

    async def scale(self, workers: int) -> None:
        self.asked.append(f"scale {workers}")
        self._wanted = workers
        surplus = list(self.servers.values())[workers:]
        for server in surplus:
            self._drop(server)
        self._fill()
        await asyncio.gather(*(server.stop(self.launch.stop_timeout or 0) for server in surplus))
        self._tell()

    def retire(self, uid: str, reason: str, how: Retirement) -> None:
        self.asked.append(f"retire {how}")
        server = self.servers.get(uid)
        if server is not None:
            self._drop(server)
            self._fill()
            self._do(self._end(server, how))

    def workers(self) -> list[WorkerView]:
        servers = list(self.servers.values())
        return [WorkerView(server.metadata, "ready" if server.ready else "starting") for server in servers]

    def subscribe(self, filter: Filter | None = None) -> AsyncIterator[DiscoveryEvent]:
        return self._discovery.subscribe(filter)

    async def close(self, drained: Awaitable[object]) -> None:
        self._wanted = 0
        self.asked.append("close")
        try:
            await drained
        finally:
            self.asked.append("drained")
            await self._end_all()

    async def _end_all(self) -> None:
        if self.holds is not None:
            self.holds.set()
        await asyncio.gather(*self._busy)
        for server in list(self.servers.values()):
            self._drop(server)
            await server.stop(0)
        self._discovery.close()

    def _fill(self) -> None:
        while len(self.servers) < self._wanted:
            self._number += 1
            uid = f"in-process-{self._number}"
            address = f"unix:{self.folder}/{self._number}"
            tags = frozenset(self.launch.tags)
            server = self.servers[uid] = Server(WorkerMetadata(uid, address, os.getpid(), __version__, tags))
            self._do(self._start(server))

    async def _start(self, server: Server) -> None:
        if self.holds is not None:
            await self.holds.wait()
        await server.start()
        self._discovery.announce("worker-added", server.metadata)
        self.launch.on_trouble(None)
        self._tell()

    async def _end(self, server: Server, how: Retirement) -> None:
        await server.stop(5.0 if how == "finish" else 0)
        self.launch.on_ended(server.metadata.uid, Ending())
        self._tell()

    def _drop(self, server: Server) -> None:
        del self.servers[server.metadata.uid]
        self._discovery.announce("worker-dropped", server.metadata)

    def _tell(self) -> None:
        self.launch.on_change(sum(server.ready for server in self.servers.values()))

    def _do(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._busy.add(task)
        task.add_done_callback(self._busy.discard)


def placed(placement: Placement, **options: float | None) -> WorkerPool:
    return WorkerPool(placement=placement, **options)  # type: ignore[arg-type]


# -- a pool with another placement ------------------------------------------------------------------------------------


def test_a_pool_runs_calls_on_workers_of_another_placement(tmp_path: Path) -> None:
    async def main() -> None:
        placement = InProcess(tmp_path)
        async with placed(placement) as pool:
            assert [view.state for view in pool.workers()] == ["ready", "ready"]
            assert [await jobs.add(number, 1) for number in range(6)] == [1, 2, 3, 4, 5, 6]
            assert await jobs.pid() == os.getpid()
            assert set(await pool.broadcast(jobs.pid)) == {"in-process-1", "in-process-2"}
        assert placement.asked == ["open 2", "close", "drained"]
        with pytest.raises(PoolClosed):
            await pool.resize(1)

    with no_leaks(grace=3):
        run(main)


def test_w34_after_the_end_of_a_worker_no_stacks_are_dumped_in_its_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here the process is that of the tests, which goes on. So does a program that awaits `WorkerProcess.serve`."""
    done: list[str] = []
    monkeypatch.setattr(faulthandler, "dump_traceback_later", lambda *args, **kwargs: done.append("armed"))
    monkeypatch.setattr(faulthandler, "cancel_dump_traceback_later", lambda: done.append("cancelled"))

    async def main() -> None:
        async with placed(InProcess(tmp_path, workers=1)):
            await jobs.add(1, 2)

    run(main)
    assert "armed" in done
    assert done[-1] == "cancelled"


def test_resize_scales_the_placement(tmp_path: Path) -> None:
    async def main() -> None:
        placement = InProcess(tmp_path)
        async with placed(placement) as pool:
            await pool.resize(3)
            assert [view.state for view in pool.workers()] == ["ready"] * 3
            await pool.resize(1)
            assert [view.uid for view in pool.workers()] == ["in-process-1"]
            assert await jobs.add(1, 2) == 3
        assert placement.asked == ["open 2", "scale 3", "scale 1", "close", "drained"]

    run(main)


def test_a_worker_that_is_lost_is_retired_and_replaced(tmp_path: Path) -> None:
    async def main() -> None:
        placement = InProcess(tmp_path)
        async with placed(placement) as pool:
            await jobs.add(1, 2)
            await jobs.add(1, 2)  # both are connected
            await placement.servers["in-process-1"].die()
            await until(lambda: "retire unreachable" in placement.asked)
            await until(lambda: [view.state for view in pool.workers()] == ["ready", "ready"])
            assert {view.uid for view in pool.workers()} == {"in-process-2", "in-process-3"}
            assert [await jobs.add(number, 1) for number in range(4)] == [1, 2, 3, 4]

    run(main)


def test_a_pool_waits_for_calls_before_the_placement_ends_its_workers(tmp_path: Path) -> None:
    async def main() -> None:
        placement = InProcess(tmp_path)
        async with placed(placement):
            call = asyncio.create_task(jobs.slow(0.3))
            await until(lambda: any(server._service.tasks.busy for server in placement.servers.values()))
        assert call.done()
        assert placement.asked == ["open 2", "close", "drained"]
        await call

    run(main)


def test_a_placement_that_gives_up_ends_the_entering_with_its_failure(tmp_path: Path) -> None:
    async def main() -> None:
        placement = InProcess(tmp_path, asyncio.Event())
        pool = placed(placement)
        entering = asyncio.create_task(pool.__aenter__())
        await until(lambda: placement.asked)
        placement.launch.on_trouble(
            Trouble(WorkerStartFailed("no machine is free"), "no machine is free", 1, 0.0, None)
        )
        placement.launch.on_change(0)
        with pytest.raises(WorkerStartFailed, match="no machine is free"):
            await entering
        assert placement.asked == ["open 2", "close", "drained"]

    run(main)


def test_a_quorum_that_is_not_reached_names_the_last_trouble(tmp_path: Path) -> None:
    async def main() -> None:
        placement = InProcess(tmp_path, asyncio.Event())
        entering = asyncio.create_task(placed(placement, quorum_timeout=0.2).__aenter__())
        await until(lambda: placement.asked)
        placement.launch.on_trouble(Trouble(WorkerStartFailed("out of quota"), "out of quota", 1, 0.0, 9.0))
        with pytest.raises(NoWorkersAvailable, match=r"0 of 2 workers were ready .*: out of quota"):
            await entering

    run(main)


def test_a_placement_that_cannot_open_is_closed(tmp_path: Path) -> None:
    class Broken(InProcess):
        async def open(self, launch: Launch) -> None:
            self.asked.append("open")
            raise WorkerStartFailed("no engine")

    async def main() -> None:
        placement = Broken(tmp_path)
        with pytest.raises(WorkerStartFailed, match="no engine"):
            await placed(placement).__aenter__()
        assert placement.asked == ["open", "close", "drained"]

    run(main)


# -- the contract -----------------------------------------------------------------------------------------------------


def test_p01_a_placement_of_the_tests_keeps_the_contract(tmp_path: Path) -> None:
    folders = (tmp_path / str(number) for number in range(100))

    def make(workers: int) -> InProcess:
        folder = next(folders)
        folder.mkdir()
        return InProcess(folder, workers=workers)

    check_placement(make, patience=10)


def test_p01_the_local_placement_keeps_the_contract() -> None:
    check_placement(LocalPlacement, patience=20)


class Forgetful(InProcess):
    """Breaks the contract in one way each."""

    fault = ""

    def _drop(self, server: Server) -> None:
        del self.servers[server.metadata.uid]
        if self.fault != "never drops":
            self._discovery.announce("worker-dropped", server.metadata)

    def _tell(self) -> None:
        if self.fault != "never tells":
            super()._tell()

    async def close(self, drained: Awaitable[object]) -> None:
        await super().close(asyncio.sleep(0) if self.fault == "does not wait" else drained)
        if asyncio.iscoroutine(drained):
            drained.close()


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("never drops", "expected 1 workers that are ready within 0.5 s"),
        ("never tells", "expected 2 workers that are ready within 0.5 s"),
        ("does not wait", "did not wait until calls are drained"),
    ],
)
@pytest.mark.headgate_leaks(tasks=False, threads=False, files=False)
def test_p01_a_placement_that_breaks_the_contract_is_told_how(tmp_path: Path, fault: str, says: str) -> None:
    class Faulty(Forgetful):
        pass

    Faulty.fault = fault
    folders = (tmp_path / str(number) for number in range(100))

    def make(workers: int) -> InProcess:
        folder = next(folders)
        folder.mkdir()
        return Faulty(folder, workers=workers)

    with pytest.raises(AssertionError, match=says):
        check_placement(make, patience=0.5)


# -- the option of a pool ---------------------------------------------------------------------------------------------


def test_p01_spawn_is_a_local_placement() -> None:
    async def main() -> None:
        async with WorkerPool(placement=LocalPlacement(2)) as pool:
            assert [view.state for view in pool.workers()] == ["ready", "ready"]
            assert await jobs.add(1, 2) == 3
            await pool.resize(1)
            assert len(pool.workers()) == 1

    assert isinstance(WorkerPool(spawn=3)._placement, LocalPlacement)
    assert WorkerPool(spawn=3)._placement.num_workers == 3
    assert LocalPlacement().num_workers == os.cpu_count()
    run(main)


def test_p01_a_placement_serves_one_pool() -> None:
    async def main() -> None:
        placement = LocalPlacement(1)
        async with WorkerPool(placement=placement):
            pass
        with pytest.raises(RuntimeError, match="a placement is opened once"):
            async with WorkerPool(placement=placement):
                pass

    run(main)


def test_p01_options_that_contradict_a_placement_are_refused() -> None:
    for options, says in (
        ({"spawn": 2}, r"placement= and spawn= cannot be given together\. Leave spawn= out"),
        ({"worker": LocalWorker}, "placement= and worker= cannot"),
        ({"quorum": 3}, r"quorum must be at most the capacity of the pool \(2\), got 3"),
    ):
        with pytest.raises(InvalidArgument, match=says):
            WorkerPool(placement=LocalPlacement(2), **options)  # type: ignore[arg-type]
    with pytest.raises(InvalidType, match=r"placement must be a Placement, got int\. Pass LocalPlacement"):
        WorkerPool(placement=4)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="num_workers must be >= 0, got -1"):
        LocalPlacement(-1)
    with pytest.raises(InvalidType, match="worker must be a factory of workers, got int"):
        LocalPlacement(1, worker=3)  # type: ignore[arg-type]


# -- a forked child ---------------------------------------------------------------------------------------------------

FORKS = """
import asyncio, os, sys
import headgate
from tests.support.workers import jobs

async def call():
    return await jobs.add(1, 2)

async def main():
    async with headgate.WorkerPool(spawn=1):
        assert await call() == 3
        child = os.fork()
        if child == 0:
            try:
                asyncio.run(call())
            except headgate.NoActivePool as error:
                os.write(1, str(error).encode())
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        assert await call() == 3

asyncio.run(main())
"""


def test_a_forked_child_is_told_that_it_cannot_use_the_workers_of_its_parent() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORKS], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "this process was forked from the one that opened the pool" in done.stdout
