"""What a killed process held is not free while its workers still run it. The others are in this process."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from headgate import PostgresStore, Resource, ResourcePool, SqliteStore, TaskPool, WorkerPool
from headgate.tasks.names import unregister
from tests.integration.tasks.killed_client import LOCKS, OPTIONS, held_by, open_files
from tests.integration.tasks.programs import Program
from tests.support.workers.support import (
    alive,
    keeper_client_of,
    lines,
    parent_of,
    pids,
    read_line,
    run,
    until,
    wait_until,
)

pytestmark = [
    pytest.mark.integration,
    pytest.mark.usefixtures("warm_programs"),
    pytest.mark.skipif(sys.platform != "linux", reason="it looks at processes in /proc"),
]

PATIENCE = 60.0
NEVER = 3600.0
"""Seconds between heartbeats: what is shown does not wait for one."""


class Client:
    """The program that is to be killed."""

    def __init__(self, program: Program, folder: Path) -> None:
        self._program = program
        self._notes = folder / "notes"
        self.pid = program.pid
        self.worker = self.keeper = 0

    def says(self, word: str) -> None:
        """Wait for this, and learn the pid of its worker."""
        assert self._program.stdout is not None
        said, *workers = read_line(self._program.stdout).split()
        assert said == word
        for pid in workers:
            self.worker, self.keeper = int(pid), parent_of(int(pid))

    def go_on(self) -> None:
        assert self._program.stdin is not None
        self._program.stdin.write(b"\n")
        self._program.stdin.flush()

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def last_note(self) -> float:
        """When its function ran last, when its worker is gone."""
        wait_until(lambda: not alive(self.worker))
        return float(lines(self._notes)[-1])


@contextmanager
def client(how: str, store: str, folder: Path) -> Iterator[Client]:
    command = [sys.executable, str(Path(__file__).with_name("killed_client.py")), how, store, str(folder)]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with open(folder / "stderr", "wb") as stderr, Program(command, **pipes, stderr=stderr) as program:
        made = Client(program, folder)
        try:
            yield made
        finally:
            program.kill()
            program.communicate()
            if made.worker:
                wait_until(lambda: not alive(made.worker) and not alive(made.keeper))


async def began() -> float:
    return time.monotonic()


def starts(store: Any, killed: Client | None, how_killed: str = "client") -> float:
    """Submit a task beside the client, kill that, and return when the task began."""

    async def main() -> float:
        pool = TaskPool("shared", store=store, **OPTIONS)
        try:
            async with asyncio.timeout(PATIENCE), pool:
                handle = await pool.submit(began)
                if killed is not None:
                    assert handle.status == "queued"
                    kill(killed, how_killed)
                return await handle
        finally:
            unregister(pool)

    return asyncio.run(main())


def kill(killed: Client, how: str) -> None:
    if how == "keeper and client":
        os.kill(killed.keeper, signal.SIGKILL)
    killed.kill()
    if how == "client and keeper":
        os.kill(killed.keeper, signal.SIGKILL)


@pytest.mark.parametrize(
    "how",
    [
        "workers_first",
        "store_first",
        pytest.param("on_a_new_worker", marks=pytest.mark.soak),
        "with_a_new_keeper",
        "with_a_new_lock",
        "of_two_stores",
        "in_a_routine",
    ],
)
def test_g20_the_slot_of_a_killed_process_is_free_when_its_workers_have_ended(how: str, tmp_path: Path) -> None:
    path = tmp_path / "shared.db"
    with closing(SqliteStore(path, heartbeat=NEVER)) as store, client(how, str(path), tmp_path) as doomed:
        doomed.says("runs")
        began_at = starts(store, doomed)
        assert began_at > doomed.last_note()


@pytest.mark.parametrize("how", ["client and keeper", "keeper and client"])
def test_g20_the_slot_is_free_soon_when_the_keeper_of_the_workers_is_killed_too(how: str, tmp_path: Path) -> None:
    path = tmp_path / "shared.db"
    with closing(SqliteStore(path, heartbeat=NEVER)) as store, client("workers_first", str(path), tmp_path) as doomed:
        doomed.says("runs")
        began_at = starts(store, doomed, how)
        assert began_at > doomed.last_note()


def test_g20_a_process_that_joins_while_the_workers_of_a_killed_one_run_waits_for_them(tmp_path: Path) -> None:
    path = tmp_path / "shared.db"
    with client("workers_first", str(path), tmp_path) as doomed:
        doomed.says("runs")
        doomed.kill()
        with closing(SqliteStore(path, heartbeat=NEVER)) as store:
            began_at = starts(store, None)
        assert began_at > doomed.last_note()


def test_g20_a_program_that_ends_and_forgets_its_workers_holds_its_slot_until_they_have_ended(tmp_path: Path) -> None:
    path = tmp_path / "shared.db"
    with closing(SqliteStore(path, heartbeat=NEVER)) as store, client("forgotten", str(path), tmp_path) as doomed:
        doomed.says("runs")
        doomed.go_on()
        began_at = starts(store, None)
        assert began_at > doomed.last_note()


def test_g20_closing_a_store_frees_its_lock_at_once_though_workers_live(tmp_path: Path) -> None:
    path = tmp_path / "shared.db"
    with client("closed", str(path), tmp_path) as other:
        other.says("joined")
        [lock] = tmp_path.glob(LOCKS)
        other.go_on()
        other.says("closed")
        assert alive(other.worker)
        assert not lock.exists()
        wait_until(lambda: not held_by(other.keeper))
        other.go_on()


def test_g20_a_keeper_without_room_for_a_lock_keeps_the_workers_and_the_locks_that_follow(tmp_path: Path) -> None:
    async def main(first: int, second: int) -> None:
        async with WorkerPool(spawn=1) as workers:
            keeper, [worker] = keeper_client_of(workers).pid, pids(workers)
            limits = resource.prlimit(keeper, resource.RLIMIT_NOFILE)
            used = {int(name) for name in os.listdir(f"/proc/{keeper}/fd")}
            resource.prlimit(keeper, resource.RLIMIT_NOFILE, (min(set(range(len(used) + 1)) - used), limits[1]))
            workers.kept_locks.add(first)
            await asyncio.sleep(0.1)  # nothing tells that it was not taken
            resource.prlimit(keeper, resource.RLIMIT_NOFILE, limits)
            workers.kept_locks.add(second)
            await until(lambda: str(tmp_path / "second") in open_files(keeper))
            workers.kept_locks.remove(first)
            workers.kept_locks.remove(second)
            await until(lambda: str(tmp_path / "second") not in open_files(keeper))
            assert pids(workers) == [worker]

    with open(tmp_path / "first", "w") as first, open(tmp_path / "second", "w") as second:
        run(lambda: main(first.fileno(), second.fileno()))


def test_h03_the_permit_of_a_killed_process_is_free_when_its_workers_have_ended(tmp_path: Path) -> None:
    path = tmp_path / "shared.db"

    async def call(_: Resource[str]) -> float:
        return time.monotonic()

    async def main(doomed: Client, store: SqliteStore) -> float:
        keys = ResourcePool([Resource("key", "sk-1", max_in_flight=1)], name="keys", store=store)
        waiting = asyncio.create_task(keys.run(call, wait_for_capacity=True))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        doomed.kill()
        async with asyncio.timeout(PATIENCE):
            return await waiting

    with closing(SqliteStore(path, heartbeat=NEVER)) as store, client("with_a_permit", str(path), tmp_path) as doomed:
        doomed.says("runs")
        began_at = asyncio.run(main(doomed, store))
        assert began_at > doomed.last_note()


def test_g20_on_postgres_the_lease_outlasts_the_workers_of_a_killed_process(postgres_dsn: str, tmp_path: Path) -> None:
    with (
        closing(PostgresStore(postgres_dsn, lease=4.0)) as store,
        client("workers_first", postgres_dsn, tmp_path) as doomed,
    ):
        doomed.says("runs")
        began_at = starts(store, doomed)
        assert began_at > doomed.last_note()
