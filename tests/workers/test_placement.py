"""The port Placement suffices: a WorkerPool works with workers that no keeper starts, here servers in this process."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from headgate import NoWorkersAvailable, PoolClosed, WorkerPool, WorkerStartFailed
from headgate._version import __version__
from headgate.discovery import DiscoveryEvent, OwnDiscovery
from headgate.discovery.port import Filter
from headgate.testing import no_leaks
from headgate.workers.model import Limits, WorkerMetadata, WorkerView
from headgate.workers.processes.exit_status import Ending
from headgate.workers.processes.local_placement import LocalPlacement
from headgate.workers.processes.placement import Launch, Placement, Retirement
from headgate.workers.processes.restarts import Trouble
from headgate.workers.protocol.transport import bind, make_server
from headgate.workers.server.service import Service
from tests.workers import jobs
from tests.workers.support import ROOT, alive, run, until

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
        self._service.tasks.stop()
        self._loop.close()


class InProcess:
    """A Placement whose workers are servers in this process. It notes what it is asked."""

    def __init__(self, folder: Path, holds: asyncio.Event | None = None) -> None:
        self.folder = folder
        self.asked: list[str] = []
        self.servers: dict[str, Server] = {}
        self.holds = holds  # workers become ready when it is set
        self.launch: Launch
        self._discovery = OwnDiscovery()
        self._number = 0
        self._busy: set[asyncio.Task[None]] = set()

    async def open(self, launch: Launch) -> None:
        self.asked.append(f"open {launch.workers}")
        self.launch = launch
        self._wanted = launch.workers
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
        await drained
        self.asked.append("drained")
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
    pool = WorkerPool(**{"spawn": 2, **options})  # type: ignore[arg-type]
    pool._placement = placement
    return pool


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


# -- what every placement does ----------------------------------------------------------------------------------------

Make = Callable[[Path], Placement]


class Told:
    """What a placement tells its pool."""

    def __init__(self) -> None:
        self.ready = 0
        self.ended: list[str] = []
        self.troubles: list[Trouble | None] = []

    def launch(self, workers: int) -> Launch:
        return Launch(
            workers=workers,
            tags=("tagged",),
            limits=Limits(),
            stop_timeout=5.0,
            on_change=lambda ready: setattr(self, "ready", ready),
            on_ended=lambda uid, _: self.ended.append(uid),
            on_trouble=self.troubles.append,
        )


@pytest.fixture(params=[InProcess, lambda _: LocalPlacement()], ids=["in_process", "local"])
def make(request: pytest.FixtureRequest) -> Make:
    found: Make = request.param
    return found


def test_what_a_placement_tells_from_opening_to_closing(make: Make, tmp_path: Path) -> None:
    async def main() -> None:
        placement, told = make(tmp_path), Told()
        seen: list[tuple[str, str]] = []

        async def follow() -> None:
            async for event in placement.subscribe():
                seen.append((event.type, event.metadata.uid))

        await placement.open(told.launch(2))
        assert [view.state for view in placement.workers()] == ["starting", "starting"]
        following = asyncio.create_task(follow())
        await until(lambda: told.ready == 2)
        assert set(told.troubles) == {None}
        first, second = (view.uid for view in placement.workers())
        assert {view.tags for view in placement.workers()} == {frozenset({"tagged"})}
        await until(lambda: sorted(seen) == sorted([("worker-added", first), ("worker-added", second)]))

        await placement.scale(1)
        assert [view.uid for view in placement.workers()] == [first]
        await until(lambda: ("worker-dropped", second) in seen)

        placement.retire(first, "because", "finish")
        placement.retire("unknown", "because", "end")
        await until(lambda: told.ready == 1 and placement.workers()[0].uid not in (first, second))
        [third] = (view.uid for view in placement.workers())
        await until(lambda: seen[-2:] == [("worker-dropped", first), ("worker-added", third)])

        placement.retire(third, "because", "end")
        await until(lambda: third in told.ended)
        await until(lambda: told.ready == 1)
        [fourth] = (view.uid for view in placement.workers())
        drained = asyncio.Event()
        closing = asyncio.create_task(placement.close(drained.wait()))
        await asyncio.sleep(0)
        assert ("worker-dropped", fourth) not in seen
        drained.set()
        await closing
        await following
        assert seen[-1] == ("worker-dropped", fourth)

    with no_leaks(grace=3):
        run(main)


def test_a_placement_that_was_not_opened_can_be_closed(make: Make, tmp_path: Path) -> None:
    async def main() -> None:
        await make(tmp_path).close(asyncio.sleep(0))

    run(main)


def test_a_failure_while_it_drains_ends_the_workers_of_this_machine_all_the_same() -> None:
    async def main() -> None:
        placement, told = LocalPlacement(), Told()
        await placement.open(told.launch(1))
        await until(lambda: told.ready == 1)
        [view] = placement.workers()

        async def fails() -> None:
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            await placement.close(fails())
        assert not alive(view.pid)

    with no_leaks(grace=3):
        run(main)


# -- a forked child ---------------------------------------------------------------------------------------------------

FORKS = """
import asyncio, os, sys
import headgate
from tests.workers import jobs

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
