"""Shared health in real processes on a SqliteStore, with an upstream that counts what each key gets."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import gc
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from headgate.resources import ResourcePool
from headgate.stores.sqlite import SqliteStore
from tests.conftest import SCALE

pytestmark = pytest.mark.integration

PROGRAM = Path(__file__).with_name("shared_process.py")
LIMIT = 30.0
SEVERAL = 3 if SCALE >= 1 else 2
"""How many processes: two show most of what three do."""


class Upstream:
    """An HTTP server that counts requests by key."""

    def __init__(self) -> None:
        self.requests: Counter[str] = Counter()
        self.running: Counter[str] = Counter()
        self.most: Counter[str] = Counter()
        self.answers: dict[str, str] = {}
        self.seconds = 0.0
        self.gate: asyncio.Event | None = None
        self.port = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        key = head.split("planted-value-of-")[1].split("\r\n")[0]
        self.requests[key] += 1
        self.running[key] += 1
        self.most[key] = max(self.most[key], self.running[key])
        try:
            answer = self.answers.get(key, "200 ok")
            if self.gate is not None:
                gone = asyncio.create_task(reader.read())  # ends when the process is killed
                opened = asyncio.create_task(self.gate.wait())
                await asyncio.wait([gone, opened], return_when=asyncio.FIRST_COMPLETED)
                gone.cancel(), opened.cancel()
            elif self.seconds:
                await asyncio.sleep(self.seconds)
        finally:
            self.running[key] -= 1
        code, text = answer.split(" ", 1)
        writer.write(f"HTTP/1.1 {code} X\r\n\r\n{text}".encode())
        writer.close()


class Remote:
    """Another process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.pid = process.pid
        self._numbers = count()
        self._answers: dict[int, asyncio.Future[Any]] = {}

    async def hear(self) -> None:
        assert self.process.stdout is not None
        while line := await self.process.stdout.readline():
            said = json.loads(line)
            if "number" in said:
                self._answers.pop(said["number"]).set_result(said["answer"])

    def ask(self, do: str, **command: Any) -> asyncio.Future[Any]:
        assert self.process.stdin is not None
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        self.process.stdin.write(json.dumps({"do": do, "number_of_command": number, **command}).encode() + b"\n")
        return answer


@asynccontextmanager
async def fleet(
    path: Path, *, processes: int = 3, limit: int | None = None, probe: bool = False, heartbeat: float = 5.0
) -> AsyncIterator[tuple[Upstream, list[Remote]]]:
    """Processes that share a pool, and the upstream that they call."""
    upstream = Upstream()
    server = await asyncio.start_server(upstream.serve, "127.0.0.1", 0)
    upstream.port = server.sockets[0].getsockname()[1]
    remotes: list[Remote] = []
    hearing: list[asyncio.Task[None]] = []
    try:
        for _ in range(processes):
            arguments = [str(path), str(upstream.port), json.dumps(limit), json.dumps(probe), str(heartbeat)]
            process = await asyncio.create_subprocess_exec(
                sys.executable, str(PROGRAM), *arguments, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
            )
            remotes.append(Remote(process))
        for remote in remotes:
            assert remote.process.stdout is not None
            assert await asyncio.wait_for(remote.process.stdout.readline(), LIMIT)
            hearing.append(asyncio.create_task(remote.hear()))
        yield upstream, remotes
    finally:
        for remote in remotes:
            if remote.process.returncode is None:
                assert remote.process.stdin is not None
                remote.process.stdin.close()
        for remote in remotes:
            try:
                await asyncio.wait_for(remote.process.wait(), LIMIT)
            except TimeoutError:
                remote.process.kill()
                await remote.process.wait()
        await asyncio.gather(*hearing)
        server.close()
        await server.wait_closed()


def real(test: Callable[[Path], Coroutine[Any, Any, None]]) -> Callable[[Path], None]:
    """Run a test on a real loop, with a limit."""

    def run(tmp_path: Path) -> None:
        asyncio.run(asyncio.wait_for(test(tmp_path / "shared.db"), 2 * LIMIT))

    run.__name__ = test.__name__
    return run


async def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < end, "it never came true"
        await asyncio.sleep(0.005)


@real
async def test_h01_a_key_limited_in_one_process_rests_in_all(path: Path) -> None:
    async with fleet(path, processes=SEVERAL) as (upstream, (one, *others)):
        upstream.answers["k1"] = "429 60"
        watched = [remote.ask("watch", key="k1", status="cooling_down") for remote in (one, *others)]
        assert await one.ask("run") == "k2"
        moments = await asyncio.gather(*watched)
        # The promise is 50 ms; the machine of a test may be busy with others.
        assert max(moments) - min(moments) < 1.0
        for remote in others:
            assert [await remote.ask("run") for _ in range(4)] == ["k2"] * 4
        assert upstream.requests["k1"] == 1
        seen = await asyncio.gather(*(remote.ask("snapshot") for remote in (one, *others)))
        left = [one["k1"]["cooldown_seconds_remaining"] for one in seen]
        assert max(left) - min(left) < 1.0
        assert min(left) > 50


def test_r31_only_the_process_that_was_refused_warns(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    async def main() -> None:
        async with fleet(tmp_path / "shared.db", processes=SEVERAL) as (upstream, (one, *others)):
            upstream.answers.update(k1="429 60", k2="401 no")
            asked = (("k1", "cooling_down"), ("k2", "disabled"))
            watched = [remote.ask("watch", key=key, status=status) for remote in others for key, status in asked]
            await one.ask("run")
            await asyncio.gather(*watched)

    asyncio.run(asyncio.wait_for(main(), 2 * LIMIT))
    assert sorted(capfd.readouterr().err.splitlines()) == [
        "keys: k1 cools down for 60.0 s (1 in a row): 429",
        "keys: k2 is disabled: 401",
    ]


@pytest.mark.soak
@real
async def test_h02_disable_and_enable_are_known_to_all_processes(path: Path) -> None:
    async with fleet(path) as (upstream, (one, two, three)):
        upstream.answers["k1"] = "401 no"
        watched = [remote.ask("watch", key="k1", status="disabled") for remote in (two, three)]
        assert await one.ask("run") == "k2"
        await asyncio.gather(*watched)
        watched = [remote.ask("watch", key="k1", status="healthy") for remote in (one, two, three)]
        del upstream.answers["k1"]
        await three.ask("enable", key="k1")
        await asyncio.gather(*watched)
        assert {await one.ask("run") for _ in range(4)} == {"k1", "k2"}


@real
async def test_h03_max_in_flight_is_never_exceeded_over_all_processes(path: Path) -> None:
    async with fleet(path, processes=SEVERAL, limit=3) as (upstream, remotes):
        upstream.seconds = 0.005
        assert await asyncio.gather(*(remote.ask("many", number=60) for remote in remotes)) == [60] * SEVERAL
        assert upstream.requests.total() == 60 * SEVERAL
        assert upstream.most == {"k1": 3, "k2": 3}


@real
async def test_h03_a_killed_process_frees_its_permits(path: Path) -> None:
    async with fleet(path, processes=2, limit=2) as (upstream, (dying, other)):
        upstream.gate = asyncio.Event()
        await dying.ask("begin", number=4)
        await until(lambda: upstream.running.total() == 4)
        waiting = [other.ask("run", wait_for_capacity=True) for _ in range(4)]
        dying.process.kill()
        await dying.process.wait()
        await until(lambda: upstream.requests.total() == 8)
        upstream.gate.set()
        assert sorted(await asyncio.gather(*waiting)) == ["k1", "k1", "k2", "k2"]


@pytest.mark.soak
@real
async def test_h03_one_probe_for_all_processes(path: Path) -> None:
    async with fleet(path, probe=True) as (upstream, remotes):
        upstream.answers["k1"] = "429 0.5"
        watched = [remote.ask("watch", key="k1", status="cooling_down") for remote in remotes]
        assert await remotes[0].ask("run", exclude=["k2"]) in ("attempts", "no_eligible")
        await asyncio.gather(*watched)
        del upstream.answers["k1"]
        upstream.gate = asyncio.Event()
        calls = [remote.ask("run", exclude=["k2"], wait_for_capacity=True) for remote in remotes for _ in range(2)]
        await until(lambda: upstream.running["k1"] == 1)
        await asyncio.gather(*(remote.ask("snapshot") for remote in remotes))
        await asyncio.sleep(0.2)  # long enough for a second probe to arrive, if there were one
        assert upstream.requests["k1"] == 2
        upstream.gate.set()
        assert await asyncio.gather(*calls) == ["k1"] * 6


@real
async def test_g24_h01_no_value_is_in_any_file_of_the_store(path: Path) -> None:
    async with fleet(path, processes=1, limit=1) as (upstream, remotes):
        upstream.answers["k1"] = "401 no"
        await asyncio.gather(*(remote.ask("many", number=2) for remote in remotes))
        files = [file for file in path.parent.rglob("*") if file.is_file()]
        assert any(b"k1" in file.read_bytes() for file in files)
        assert not any(b"planted" in file.read_bytes() for file in files)


@real
async def test_h01_a_pool_made_by_its_address_takes_part_and_is_forgotten_with_its_store(path: Path) -> None:
    async with fleet(path, processes=1) as (_, (remote,)):
        pool = ResourcePool({"k1": "planted-value-of-k1", "k2": "other"}, name="keys", store=f"sqlite:///{path}")
        watched = remote.ask("watch", key="k1", status="disabled")
        await pool.disable("k1")
        await watched
        await remote.ask("disable", key="k2")
        assert pool.snapshot()["k2"]["status"] == "healthy", "the same id with another value is another resource"
        del pool
        gc.collect()


@real
async def test_h04_while_the_store_stands_still_pools_go_on_and_join_later(path: Path) -> None:
    async with fleet(path, processes=2) as (upstream, (one, other)):
        files = list(path.parent.glob("*-lock"))
        assert files
        with contextlib.ExitStack() as locks:
            for file in files:
                fcntl.flock(locks.enter_context(file.open()), fcntl.LOCK_EX)
            upstream.answers["k1"] = "401 no"
            assert await one.ask("run") == "k2"
            assert (await one.ask("snapshot"))["k1"]["status"] == "disabled", "it learns by itself"
            watched = other.ask("watch", key="k1", status="disabled")
            await other.ask("disable", key="k2")
            assert (await other.ask("snapshot"))["k1"]["status"] == "healthy", "it has not heard"
            assert (await one.ask("snapshot"))["k2"]["status"] == "healthy"
        await watched
        await one.ask("watch", key="k2", status="disabled")


def test_h01_pools_in_threads_and_loops_share_one_store_object(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "shared.db")
    try:
        one = ResourcePool({"k": "v"}, name="keys", store=store)
        other = ResourcePool({"k": "v"}, name="keys", store=store)
        asyncio.run(one.disable("k"))
        end = time.monotonic() + LIMIT
        while other.snapshot()["k"]["status"] != "disabled":
            assert time.monotonic() < end
            time.sleep(0.001)
    finally:
        store.close()


FORKED = """
import os, sys
from headgate import Resource, ResourcePool, SqliteStore

pool = ResourcePool([Resource("k", "v", 1)], name="keys", store=SqliteStore(sys.argv[1]))
name = lambda key: key.resource_id
assert pool.run_sync(name) == "k"
child = os.fork()
assert pool.run_sync(name, wait_for_capacity=True, within=20) == "k"
if child:
    assert os.waitpid(child, 0)[1] == 0
    assert pool.run_sync(name, wait_for_capacity=True, within=20) == "k"
    print("both")
os._exit(0)
"""


def test_h03_a_forked_child_leases_permits_of_its_own(tmp_path: Path) -> None:
    program = [sys.executable, "-c", FORKED, str(tmp_path / "shared.db")]
    ended = subprocess.run(program, capture_output=True, text=True, timeout=2 * LIMIT, check=False)
    assert (ended.stdout, ended.returncode) == ("both\n", 0), ended.stderr


AT_ITS_END = """
import asyncio, atexit, threading

def late():  # registered before headgate is imported, so it runs after all stores were closed
    asyncio.run(pool.disable("k"))
    for thread in threading.enumerate():
        if thread.name == "headgate-reports":
            thread.join()
    print("late")

atexit.register(late)
from headgate.resources import Resource, ResourcePool

pool = ResourcePool([Resource("k", "v", 2)], name="keys", store="sqlite:///shared.db")
"""


def test_h04_a_program_that_ends_does_not_warn_that_its_store_is_closed(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", AT_ITS_END], cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT, check=True
    )
    assert done.stdout == "late\n"
    assert "shared" not in done.stderr
