"""Pools that share a budget through a real PostgreSQL server. Each store object is a member of its own."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from headgate import PostgresStore, TaskPool, fair_round_robin
from headgate.tasks.names import unregister
from tests.integration.tasks import shared_jobs
from tests.postgres_server import PostgresServer

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[3]
PATIENCE = 60.0


@asynccontextmanager
async def pools(dsn: str, number: int, *, lease: float = 15.0, **options: Any) -> AsyncIterator[list[TaskPool]]:
    """So many pools of one budget, each with a store of its own."""
    stores = [PostgresStore(dsn, lease=lease) for _ in range(number)]
    settings = {"max_concurrent": 2, "scope": "tenant", "scope_id": "acme", **options}
    made = []
    try:
        for store in stores:
            pool = TaskPool("shared", store=store, **settings)
            unregister(pool)  # names are unique in a process, and each of them plays a process
            made.append(pool)
        async with asyncio.timeout(PATIENCE):
            yield made
            for pool in made:
                await pool.close()
    finally:
        for store in stores:
            store.close()


async def until(holds: Callable[[], Any]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not holds():  # noqa: ASYNC110 - what is waited for happens in another process
            await asyncio.sleep(0.005)


class Counted:
    """Work that counts how much of it runs at once."""

    def __init__(self) -> None:
        self.running = 0
        self.most = 0
        self.began: list[Any] = []

    async def __call__(self, name: Any, seconds: float = 0.002) -> Any:
        self.began.append(name)
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(seconds)
        self.running -= 1
        return name


def test_g01_g10_pools_share_one_budget_and_tenants_take_turns(postgres_dsn: str) -> None:
    async def main() -> None:
        work = Counted()
        async with pools(postgres_dsn, 3, max_concurrent=2, queue=fair_round_robin()) as members:
            handles = [
                await pool.submit(work, (tenant, number), key=tenant)
                for number in range(10)
                for pool in members
                for tenant in ("acme", "bolt")
            ]
            await asyncio.gather(*handles)
            assert members[0].snapshot().shared["members"]
        assert work.most == 2
        assert len(work.began) == 60
        half = Counter(tenant for tenant, _ in work.began[:30])
        assert abs(half["acme"] - half["bolt"]) <= 4

    asyncio.run(main())


def test_g13_a_key_runs_once_over_the_server(postgres_dsn: str) -> None:
    async def main() -> None:
        work = Counted()
        async with pools(postgres_dsn, 3) as members:
            handles = [await pool.submit(work, "job", 0.1, idempotency_key="k") for pool in members]
            assert await asyncio.gather(*handles) == ["job"] * 3
        assert work.began == ["job"]

    asyncio.run(main())


OWNER = """
import asyncio, sys
from headgate import PostgresStore, TaskPool
from tests.integration.tasks.shared_jobs import run_here

async def main():
    store = PostgresStore(sys.argv[1], lease=2.0)
    pool = TaskPool("shared", store=store, scope="tenant", scope_id="acme", max_concurrent=2)
    await (await pool.submit(run_here, idempotency_key="k"))

asyncio.run(main())
"""


def test_g13_when_the_process_that_runs_a_key_is_killed_one_other_runs_it(postgres_dsn: str) -> None:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}", "NEVER_ENDS": "1"}
    child = subprocess.Popen([sys.executable, "-c", OWNER, postgres_dsn], stdout=subprocess.PIPE, env=environment)

    async def main() -> None:
        shared_jobs.RAN.clear()
        async with pools(postgres_dsn, 3, lease=2.0) as members:
            handles = [await pool.submit(shared_jobs.run_here, idempotency_key="k") for pool in members]
            assert all(handle.status == "queued" for handle in handles), "they follow"
            child.kill()
            assert await asyncio.gather(*handles) == [os.getpid()] * 3
            late = await members[0].submit(shared_jobs.run_here, idempotency_key="k")
            assert await late == os.getpid()
        assert len(shared_jobs.RAN) == 1, "one of them ran it, and the others have its result"

    try:
        assert child.stdout is not None
        assert child.stdout.readline() == b"runs\n"
        asyncio.run(main())
    finally:
        child.kill()
        child.communicate()


CHILD = """
import asyncio, sys
from headgate import PostgresStore, TaskPool

async def main():
    store = PostgresStore(sys.argv[1], lease=float(sys.argv[2]))
    pool = TaskPool("shared", store=store, scope="tenant", scope_id="acme", max_concurrent=2)
    for _ in range(2):
        await pool.submit(asyncio.sleep, 3600)
    print("holds", flush=True)
    await asyncio.sleep(3600)

asyncio.run(main())
"""


@pytest.mark.soak
def test_g20_what_a_killed_process_held_is_free_when_its_lease_is_over(postgres_dsn: str) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, postgres_dsn, "2"],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"},
    )

    async def main() -> None:
        work = Counted()
        async with pools(postgres_dsn, 1, lease=2.0) as (pool,):
            handle = await pool.submit(work, 1)
            assert handle.status == "queued"
            killed = time.monotonic()
            os.kill(child.pid, signal.SIGKILL)
            assert await handle == 1
            assert time.monotonic() - killed < 20.0  # 3 s on a machine that has nothing else to do

    try:
        assert child.stdout is not None
        assert child.stdout.readline() == b"holds\n"
        asyncio.run(main())
    finally:
        child.kill()
        child.communicate()


def test_g20_a_process_stopped_for_longer_than_its_lease_starts_nothing_and_joins_again(postgres_dsn: str) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, postgres_dsn, "2"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"},
    )

    async def main() -> None:
        work = Counted()
        async with pools(postgres_dsn, 1, lease=2.0) as (pool,):
            os.kill(child.pid, signal.SIGSTOP)
            assert await (await pool.submit(work, 1)) == 1
            os.kill(child.pid, signal.SIGCONT)
            await until(lambda: len(pool.snapshot().shared["members"]) == 2)
            assert await (await pool.submit(work, 2)) == 2, "what it still runs is counted by nobody"

    try:
        assert child.stdout is not None
        assert child.stdout.readline() == b"holds\n"
        asyncio.run(main())
    finally:
        child.kill()
        _, errors = child.communicate()
    assert b"the lease was lost; 2 running tasks finish" in errors


@pytest.mark.parametrize("how", ["immediate", pytest.param("fast", marks=pytest.mark.soak)])
def test_g21_a_restart_of_the_server_under_load_loses_nothing(
    postgres_dsn: str, postgres_server: PostgresServer, how: str
) -> None:
    async def main() -> None:
        work = Counted()
        async with pools(postgres_dsn, 2, max_concurrent=3) as members:
            handles = [await pool.submit(work, number) for number in range(100) for pool in members]
            await until(lambda: len(work.began) > 20)
            await asyncio.to_thread(postgres_server.restart, how)
            await asyncio.gather(*handles)
        assert len(work.began) == 200
        assert work.most <= 3 or how == "immediate"  # after a crash all leases are lost: what runs is outside the count
        assert work.most <= 6

    asyncio.run(main())
