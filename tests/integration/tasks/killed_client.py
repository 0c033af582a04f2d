"""A program that is killed while a plain function runs on its worker: for `test_shared_workers.py`.

``python killed_client.py how store folder`` writes "runs" and the pid of its worker when the function runs, which notes
every few milliseconds in the file `folder/notes` that it does. The function of the name `how` says what came before.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3]))

from headgate import PostgresStore, Resource, ResourcePool, SqliteStore, TaskPool, WorkerPool
from tests.integration.tasks.shared_jobs import note_for_a_minute, note_with_resource, pid
from tests.support.workers.support import alive, all_ready, keeper_client_of, pids, until

OPTIONS: dict[str, Any] = {"scope": "tenant", "scope_id": "acme", "max_concurrent": 1}
LOCKS = "shared.db-members/*.lock"


class Client:
    """The store, the folder and the pools of this program."""

    def __init__(self, store: str, folder: Path) -> None:
        is_file = store.startswith("/")
        self.store: Any = SqliteStore(store, heartbeat=0.2) if is_file else PostgresStore(store, lease=4.0)
        self.folder = folder
        self.notes = str(folder / "notes")

    async def run(self, pool: TaskPool, workers: WorkerPool, fn: Callable[..., Any] = note_for_a_minute) -> None:
        """Have the function run, say so, and wait to be killed."""
        await pool.submit(fn, self.notes)
        await until(lambda: os.path.exists(self.notes))
        say("runs", *pids(workers))
        await asyncio.sleep(60)

    def pool(self, workers: WorkerPool | None, name: str = "shared", store: Any = None) -> TaskPool:
        return TaskPool(name, store=store or self.store, workers=workers, **OPTIONS)


def say(*words: object) -> None:
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


async def workers_first(client: Client) -> None:
    async with WorkerPool(spawn=1) as workers, client.pool(workers) as pool:
        await client.run(pool, workers)


async def store_first(client: Client) -> None:
    workers = WorkerPool(spawn=1)
    pool = client.pool(workers)
    async with workers, pool:
        await client.run(pool, workers)


async def on_a_new_worker(client: Client) -> None:
    async with WorkerPool(spawn=1) as workers, client.pool(workers) as pool:
        old = await (await pool.submit(pid))
        os.kill(old, signal.SIGKILL)
        await until(lambda: not alive(old) and old not in pids(workers))
        await all_ready(workers, 1)
        await client.run(pool, workers)


async def with_a_new_keeper(client: Client) -> None:
    async with WorkerPool(spawn=1) as workers, client.pool(workers) as pool:
        old, keeper = await (await pool.submit(pid)), keeper_client_of(workers).pid
        os.kill(keeper, signal.SIGKILL)
        await until(lambda: not alive(old) and old not in pids(workers))
        await all_ready(workers, 1)
        assert keeper_client_of(workers).pid != keeper
        await client.run(pool, workers)


async def with_a_new_lock(client: Client) -> None:
    """Somebody deletes the lock of this member, and it takes part under another id."""
    async with WorkerPool(spawn=1) as workers, client.pool(workers) as pool:
        [lock] = [path for path in client.folder.glob(LOCKS) if path.read_text().startswith(f"{os.getpid()} ")]
        lock.unlink()
        await until(lambda: any(path.read_text().startswith(f"{os.getpid()} ") for path in client.folder.glob(LOCKS)))
        await client.run(pool, workers)


async def of_two_stores(client: Client) -> None:
    """Two pools on the workers, of which one is closed with its store."""
    async with WorkerPool(spawn=1) as workers, client.pool(workers) as pool:
        other = SqliteStore(client.folder / "other.db")
        async with client.pool(workers, "other", other) as closed:
            assert await (await closed.submit(pid)) in pids(workers)
            await until(lambda: len(held_by(keeper_client_of(workers).pid)) == 2)
        other.close()
        await until(lambda: len(held_by(keeper_client_of(workers).pid)) == 1)
        await client.run(pool, workers)


async def with_a_permit(client: Client) -> None:
    """A pool of its own, with a key that processes share."""
    keys = ResourcePool([Resource("key", "sk-1", max_in_flight=1)], name="keys", store=client.store)
    async with WorkerPool(spawn=1) as workers, TaskPool(resources=keys, workers=workers) as pool:
        await client.run(pool, workers, note_with_resource)


async def in_a_routine(client: Client) -> None:
    """A task of this process calls a routine."""
    from headgate import routine

    remote = routine(note_for_a_minute_async)

    async def body(notes: str) -> None:
        await remote(notes)

    async with WorkerPool(spawn=1) as workers, client.pool(None) as pool:
        client.store.share_lock(workers.kept_locks)
        await client.run(pool, workers, body)


async def note_for_a_minute_async(notes: str) -> None:
    await asyncio.to_thread(note_for_a_minute, notes)


async def closed(client: Client) -> None:
    """Use the store, close it, and keep the workers."""
    async with WorkerPool(spawn=1) as workers:
        async with client.pool(workers) as pool:
            await (await pool.submit(pid))
            say("joined")
            sys.stdin.readline()
        client.store.close()
        say("closed", *pids(workers))
        await asyncio.to_thread(sys.stdin.readline)


async def forgotten(client: Client) -> None:
    """End the program with pools that nobody closed."""
    workers = WorkerPool(spawn=1)
    await workers.__aenter__()
    pool = client.pool(workers)
    KEPT.extend((workers, pool))
    KEPT.append(asyncio.ensure_future(client.run(pool, workers)))
    await asyncio.to_thread(sys.stdin.readline)


KEPT: list[Any] = []
"""What nobody closes."""


def held_by(pid: int) -> list[str]:
    """The lock files of members that a process has open."""
    return [path for path in open_files(pid) if "-members/" in path]


def open_files(pid: int) -> list[str]:
    found = []
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed since it was listed
            found.append(os.readlink(path))
    return found


def main() -> None:
    how, store, folder = sys.argv[1:]
    body: Callable[[Client], Coroutine[Any, Any, None]] = globals()[how]
    client = Client(store, Path(folder))
    if how != "forgotten":
        asyncio.run(body(client))
        return
    asyncio.new_event_loop().run_until_complete(body(client))


if __name__ == "__main__":
    main()
