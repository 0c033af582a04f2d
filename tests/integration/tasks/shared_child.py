"""A process that shares a budget with others, for tests/integration/tasks/test_shared_processes.py.

``python shared_child.py`` is a nursery: it has imported headgate, and forks one process for each line that it reads, so
that a test with many processes does not wait for many imports. A line has the options of one process, as JSON:

    socket   where the test listens; the process does what it is told there, one line of JSON for each command
    events   the file to which everybody appends when a task starts and ends, on the clock that all processes share
    stderr   where its stderr goes
    path     the file of the store
    pool     the options of its TaskPool, which is made when the process starts
"""

from __future__ import annotations

import asyncio
import atexit
import json
import logging
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

from headgate import CooldownResource, PoolExhausted, Resource, ResourcePool, TaskPool, WorkerPool
from headgate.sharing.states import Outcome, Seen
from headgate.stores import SqliteStore

WHEN = datetime(2026, 1, 1, tzinfo=UTC)


class Journal:
    """Tells the test what happens: one small write for each event, which is there as a whole or not at all."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def close(self) -> None:
        os.close(self._file)

    def say(self, what: str, name: Any, **more: Any) -> None:
        event = {"at": time.monotonic(), "pid": os.getpid(), "what": what, "name": name, **more}
        os.write(self._file, json.dumps(event).encode() + b"\n")


class CountingStore(SqliteStore):
    """Counts the exchanges that its process asks for."""

    exchanges = 0

    def transact(self, key: str, step: Any, *, durable: bool = False) -> Any:
        self.exchanges += 1
        return super().transact(key, step, durable=durable)


class Program:
    """What the test tells a process to do: each method is a command."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.journal = Journal(options["events"])
        self.store = CountingStore(options["path"], heartbeat=options.get("heartbeat", 0.5))
        keys = options.get("keys")
        self.resources = None
        more: dict[str, Any] = {}
        if keys is not None:
            self.resources = more["resources"] = ResourcePool(
                [Resource(f"key-{number}", number, max_in_flight=1) for number in range(keys)]
            )
        settings = {"scope": "tenant", "scope_id": "acme", "max_concurrent": 1, **options.get("pool", {})}
        self.pool = TaskPool("shared", store=self.store, **settings, **more)
        self.gates: dict[str, asyncio.Event] = {}
        self.handles: dict[str, Any] = {}
        self.feeding = False
        self.accepted = 0

    # -- bodies --------------------------------------------------------------------------------------------------------

    async def work(self, name: str, seconds: float | None) -> str:
        """Take so many seconds; None: until the gate of this name is opened."""
        self.journal.say("start", name)
        try:
            if seconds is None:
                await self.gate(name).wait()
            else:
                await asyncio.sleep(seconds)
        finally:
            self.journal.say("end", name)
        return name

    async def with_key(self, key: Resource[int], name: str, seconds: float | None) -> str:
        return await self.work(name, seconds)

    async def typed(self, name: str, seconds: float | None) -> Any:
        await self.work(name, seconds)
        return (name, WHEN, os.getpid())

    async def blocked(self, name: str, seconds: float) -> None:
        """Hold the event loop."""
        self.journal.say("start", name)
        time.sleep(seconds)  # noqa: ASYNC251 - that is what it is for
        self.journal.say("end", name)

    def gate(self, name: str) -> asyncio.Event:
        return self.gates.setdefault(name, asyncio.Event())

    # -- commands ------------------------------------------------------------------------------------------------------

    async def submit(self, name: str, seconds: float | None = None, body: str = "work", **options: Any) -> str:
        body = body if self.resources is None else "with_key"
        self.journal.say("submit", name)
        self.handles[name] = handle = await self.pool.submit(getattr(self, body), name, seconds, **options)
        return str(handle.status)

    async def submit_all(self, tasks: list[dict[str, Any]]) -> None:
        for task in tasks:
            await self.submit(**task)

    async def idempotent(self, key: str, seconds: float | None) -> Any:
        """Submit a key and wait for its result: what it is, and of which types."""
        handle = await self.pool.submit(keyed, key, seconds, idempotency_key=key)
        name, when, pid = result = await handle
        return {"types": [type(result).__name__, type(when).__name__], "name": name, "same": when == WHEN, "by": pid}

    async def feed(self, seconds: float) -> None:
        """Keep up to twenty tasks queued or running, until it is told to stop."""
        self.feeding = True
        running: set[asyncio.Task[Any]] = set()
        while self.feeding:
            self.accepted += 1
            name = f"{os.getpid()}-{self.accepted}"
            handle = await self.pool.submit(self.work, name, seconds)
            running.add(asyncio.ensure_future(asyncio.wait_for(handle, None)))
            if len(running) >= 20:
                _, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        if running:
            await asyncio.wait(running)

    async def stop_feeding(self) -> int:
        self.feeding = False
        return self.accepted

    async def status(self, name: str) -> str:
        return self.handles[name].status

    async def result(self, name: str) -> Any:
        return await self.handles[name]

    async def open(self, *names: str) -> None:
        for name in names:
            self.gate(name).set()

    async def drain(self) -> None:
        await self.pool.drain()

    async def close(self) -> None:
        await self.pool.close()

    async def resize(self, limit: int) -> None:
        self.pool.resize(limit)

    async def settled(self) -> None:
        """Return when the store has been asked once more."""
        await asyncio.wrap_future(self.store.transact("nothing", nothing))

    async def look(self) -> dict[str, Any]:
        snapshot = self.pool.snapshot()
        shared = snapshot.shared
        return {
            "limit": self.pool.max_concurrent,
            "active": shared["active"],
            "queued": shared["queued"],
            "held": shared["held"],
            "members": sorted(member.pid for member in shared["members"]),
            "reachable": shared["reachable"],
            "exchanges": self.store.exchanges,
        }

    async def cool(self, seconds: float) -> None:
        """Have the only key of this process rest."""
        assert self.resources is not None

        async def refused(_: Resource[int]) -> None:
            raise CooldownResource(seconds, "429")

        with suppress(PoolExhausted):
            await self.resources.run(refused, max_attempts=1)

    async def fill_disk(self, path: str) -> None:
        """Leave no room in the file system of this path."""
        file = os.open(path, os.O_WRONLY | os.O_CREAT)
        with suppress(OSError):
            while os.write(file, b"x" * 4096):
                pass
        os.close(file)

    async def remove(self, path: str) -> None:
        os.unlink(path)

    async def workers(self, tasks: int) -> dict[str, Any]:
        """Run tasks of another pool, with the same limit, on a worker of this process: where and how many at once."""
        async with WorkerPool(spawn=1) as workers:
            settings: dict[str, Any] = {"scope": "tenant", "scope_id": "acme", "max_concurrent": 3, "workers": workers}
            async with TaskPool("on-workers", store=self.store, **settings) as pool:
                path = self.journal.path
                handles = [await pool.submit(remote, path, f"{os.getpid()}-{number}", 0.02) for number in range(tasks)]
                pids = {await handle for handle in handles}
        return {"here": os.getpid() in pids, "workers": len(pids), "exchanges": self.store.exchanges}

    async def fork(self) -> int:
        """Fork a child that ends as programs do, except that it leaves the event loop of its parent alone."""
        with warnings.catch_warnings():  # from 3.12 on: stores have threads, and forks beside them are the point
            warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
            pid = os.fork()
        if not pid:
            atexit._run_exitfuncs()
            os._exit(0)
        return os.waitpid(pid, 0)[1]  # noqa: ASYNC222 - it ends at once


def nothing(_: str | None, __: Seen) -> Outcome:
    return Outcome(None)


async def remote(path: str, name: str, seconds: float) -> int:
    """Run on a worker."""
    journal = Journal(path)
    journal.say("start", name)
    await asyncio.sleep(seconds)
    journal.say("end", name)
    journal.close()
    return os.getpid()


_program: Program | None = None


async def keyed(key: str, seconds: float | None) -> Any:
    """What every process runs for a key: the same function with the same arguments, so the same work."""
    assert _program is not None
    return await _program.typed(key, seconds)


async def serve(options: dict[str, Any]) -> None:
    """Do what the test says until it hangs up."""
    global _program
    reader, writer = await asyncio.open_unix_connection(options["socket"], limit=1 << 24)
    program = _program = Program(options)
    running: set[asyncio.Task[None]] = set()

    async def answer(number: int, name: str, given: dict[str, Any] | list[Any]) -> None:
        command: Callable[..., Any] = getattr(program, name)
        try:
            value = {"value": await (command(**given) if isinstance(given, dict) else command(*given))}
        except Exception as error:
            value = {"error": f"{type(error).__name__}: {error}"}
        writer.write(json.dumps({"number": number, **value}).encode() + b"\n")

    writer.write(json.dumps({"number": 0, "value": os.getpid()}).encode() + b"\n")
    while line := await reader.readline():
        task = asyncio.ensure_future(answer(*json.loads(line)))
        running.add(task)
        task.add_done_callback(running.discard)
    writer.close()
    os._exit(0)  # the test is over


def nursery() -> dict[str, Any]:
    """Fork one process for each line; returns in the new process, with its options."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    while line := sys.stdin.buffer.raw.readline():  # type: ignore[attr-defined] # stdin is not closed
        if not os.fork():
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            options: dict[str, Any] = json.loads(line)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.dup2(os.open(options["stderr"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), 2)
            return options
    sys.exit(0)


if __name__ == "__main__":
    found = nursery()
    logging.basicConfig(level=logging.WARNING)
    asyncio.run(serve(found))
