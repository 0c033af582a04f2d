"""Journals of durable pools, written on the virtual loop: the lines as they are, and what they mean.

A line holds the number and the host of its process, and the traceback of a failed task names files. These are replaced
by fixed values, and the checksum of the line is made anew; everything else is compared byte for byte.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import uuid
from collections.abc import Callable, Coroutine, Mapping
from contextlib import ExitStack
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any
from zlib import crc32

from headgate import CooldownResource, Resource, ResourcePool, StoreWriteFailed, TaskPool, backpressure_queue
from headgate.stores import Done, Entry, Journal, JsonLinesStore, Opaque, Store, read_journal
from headgate.testing import VirtualLoop, run, settle
from tests.frozen import jobs
from tests.frozen.support import plain

Writer = Callable[[Path], Coroutine[Any, Any, None]]

WRITERS: dict[str, Writer] = {}
CODECS = {"pickled": "pickle"}
"""Of the journals that are not written as JSON alone."""


def writer(function: Writer) -> Writer:
    """Record the journal that this one writes, under its name."""
    WRITERS[function.__name__] = function
    return function


def pool_in(folder: Path, name: str, **options: Any) -> TaskPool:
    """The durable pool of a recording."""
    store = Patient(JsonLinesStore(folder, codec=CODECS.get(name, "json")))  # type: ignore[arg-type]
    return TaskPool(name, scope="pipeline", pipeline_id="frozen run", store=store, **options)


class Patient:
    """A store for the virtual loop: time stands while something is being written, else it would jump meanwhile."""

    shared = False

    def __init__(self, store: Store) -> None:
        self._store = store

    def open(self, pool_id: str, about: Mapping[str, Any], keep: int) -> Journal:
        return _PatientJournal(self._store.open(pool_id, about, keep))


class _PatientJournal:
    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self.tasks = journal.tasks

    def append(self, entry: Entry, done: Done | None = None) -> None:
        waiting = ExitStack()
        waiting.enter_context(_loop().outside("the disk"))

        def ended(error: StoreWriteFailed | None) -> None:
            waiting.close()
            if done is not None:
                done(error)

        self._journal.append(entry, ended)

    async def flush(self) -> None:
        with _loop().outside("the disk"):
            await self._journal.flush()

    def close(self) -> None:
        self._journal.close()


def _loop() -> VirtualLoop:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    return loop


async def give(value: Any) -> Any:
    return value


async def slow(seconds: float) -> str:
    await asyncio.sleep(seconds)
    return "done"


async def fails(text: str) -> None:
    await asyncio.sleep(1)
    raise jobs.Picky(7, detail=text)


@writer
async def outcomes(folder: Path) -> None:
    async with pool_in(folder, "outcomes", queue="fifo", backpressure=backpressure_queue(4, "drop_oldest")) as pool:
        running = await pool.submit(slow, 5, key="tenant", priority=3, labels={"a": 1, "b": ("no", "JSON")})
        handles = [
            await pool.submit(fails, "on purpose"),
            await pool.submit(slow, 1, ttl=2),
            await pool.submit(slow, 1, key=("a", 1)),
            await pool.submit(slow, 1, retries=1, timeout=0.5),
            await pool.submit(slow, 1),
        ]
        handles[3].cancel()
        await running
        await pool.drain()
        await asyncio.sleep(40)
        last = await pool.submit(fails, "twice", retries=1)
        await asyncio.gather(last, return_exceptions=True)


def _copied(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def _put_back(folder: Path, files: dict[str, bytes]) -> None:
    for name, data in files.items():
        (folder / name).write_bytes(data)


@writer
async def unfinished(folder: Path) -> None:
    """Its process was killed while one task ran and one waited. Then it was opened again."""
    pool = pool_in(folder, "unfinished", queue="fifo")
    await pool.submit(give, "first")
    await settle()
    await pool.submit(slow, 100, idempotency_key="ran")
    await pool.submit(slow, 100, idempotency_key="waited")
    await asyncio.sleep(65)
    before = _copied(folder)
    await pool.close(cancel=True)
    _put_back(folder, before)
    await asyncio.sleep(10)
    again = pool_in(folder, "unfinished", queue="fifo")
    await again.submit(give, "second")
    await again.close()


@writer
async def windows(folder: Path) -> None:
    async with pool_in(folder, "windows") as pool:
        for window in ("while_active", "until_success", "forever", 50.0):
            good = await pool.submit(give, window, idempotency_key=f"good {window}", window=window)
            await good
            bad = await pool.submit(fails, "on purpose", idempotency_key=f"bad {window}", window=window)
            await asyncio.gather(bad, return_exceptions=True)
        odd = jobs.Point(1, None)  # no JSON: the digest is one of a pickle
        await pool.submit(give, odd, idempotency_key="odd argument")


VALUES: list[Any] = [
    None,
    True,
    -(2**70),
    0.1,
    "text \u00fc \U0001f600 \n",
    b"\x00bytes",
    bytearray(b"array"),
    [1, [2, (3, "x")], {"$key": {"a": None}, 5: "number"}],
    (1, b"x"),
    {"one"},
    frozenset({1}),
    datetime(2024, 5, 17, 12, 30, 1, 5, tzinfo=UTC),
    date(2024, 5, 17),
    timedelta(days=1, microseconds=3),
    Decimal("1.50"),
    uuid.UUID(int=77),
    complex(1, -2),
    float("inf"),
    jobs.Colour.RED,
    jobs.Point(1, [2]),
    jobs.Pair("l", "r"),
    range(3),
]


@writer
async def typed(folder: Path) -> None:
    async with pool_in(folder, "typed", queue="fifo") as pool:
        for value in VALUES:
            await pool.submit(give, value)


@writer
async def pickled(folder: Path) -> None:
    async with pool_in(folder, "pickled", queue="fifo") as pool:
        for value in VALUES:
            await pool.submit(give, value, idempotency_key=f"value {value!r}" if type(value) is jobs.Point else None)


@writer
async def requeues(folder: Path) -> None:
    resources = ResourcePool([Resource("a", "sk-frozen-a"), Resource("b", "sk-frozen-b")], strategy="primary_backup")
    errors: list[Exception] = [CooldownResource(30, "429"), CooldownResource(30, "429 too")]

    async def operation(key: Resource[str]) -> str:
        await asyncio.sleep(1)
        if errors:
            raise errors.pop()
        return key.resource_id

    async with pool_in(folder, "requeues", resources=resources, audit=folder / "audit.log") as pool:
        handle = await pool.submit(operation, max_attempts=5, idempotency_key="one")
        await handle


# -- writing now ------------------------------------------------------------------------------------------------------


def written(name: str, folder: Path) -> dict[str, bytes]:
    """The files that this writer makes now, by name, with what is different each time replaced."""
    run(lambda: WRITERS[name](folder))
    return {
        path.name: b"".join(_steady(line) for line in path.read_bytes().splitlines(keepends=True))
        for path in sorted(folder.iterdir())
    }


_END = b',"crc":"'


def _steady(line: bytes) -> bytes:
    text = line
    if line.startswith(b'{"kind":"open",'):
        text = line.replace(f'"pid":{os.getpid()},'.encode(), b'"pid":4194305,', 1)
        text = text.replace(f'"host":{json.dumps(socket.gethostname())},'.encode(), b'"host":"frozen",', 1)
    elif b'"traceback":"' in line:
        before, _, rest = line.partition(b'"traceback":"')
        _, quote, after = rest.partition(b'"}')
        text = before + b'"traceback":"Traceback (frozen)' + quote + after
    return text if text == line else _checked(text)


def _checked(line: bytes) -> bytes:
    """The line with the checksum that it needs: CRC-32 of all bytes before it."""
    text = line[: line.rindex(_END)]
    return b'%b%b%08x"}\n' % (text, _END, crc32(text))


def without_checksums(data: bytes) -> bytes:
    """A journal as the first release wrote it."""
    return b"".join(line[: line.rindex(_END)] + b"}\n" for line in data.splitlines())


# -- what a journal means ---------------------------------------------------------------------------------------------


def meaning(name: str, file: Path, folder: Path) -> dict[str, Any]:
    """What the reader says of a journal, and what a pool that opens it knows and does."""
    before = file.read_bytes()
    told: dict[str, Any] = {"file": file.name, "tasks": [_plain(task) for task in read_journal(file)]}
    assert file.read_bytes() == before, "a reader changes nothing"
    place = folder / "reopened"
    place.mkdir()
    shutil.copy(file, place / file.name)
    told["reopened"] = run(lambda: _reopened(name, place))
    lines = [_steady(line) for line in (place / file.name).read_bytes().splitlines(keepends=True)]
    last = max(number for number, line in enumerate(lines) if line.startswith(b'{"kind":"open",'))
    told["lines since"] = [line.decode().rstrip() for line in lines[last:]]
    return told


async def _reopened(name: str, folder: Path) -> dict[str, Any]:
    await asyncio.sleep(100)  # later than all that was recorded
    async with pool_in(folder, name) as pool:
        snapshot = _plain(pool.snapshot())
        kept = [task["idempotency_key"] for task in snapshot["tasks"] if task["idempotency_key"]]
        told = {"repr": repr(pool), "snapshot": snapshot, "keys": {}}
        for key in sorted(set(kept)):
            # The same function and arguments where they can be told from the key; else other work, which is refused.
            argument: Any = key.removeprefix("good ")
            handle = await asyncio.gather(
                pool.submit(give, 50.0 if argument == "50.0" else argument, idempotency_key=key), return_exceptions=True
            )
            told["keys"][key] = await _end(handle[0])
        told["first new number"] = (await pool.submit(give, 1)).id
        return told


async def _end(handle: Any) -> Any:
    if isinstance(handle, BaseException):
        return _plain(handle)
    ended = (await asyncio.gather(handle, return_exceptions=True))[0]
    return {"id": handle.id, "status": handle.status, "outcome": _plain(ended)}


def _plain(value: Any) -> Any:
    if isinstance(value, Opaque):
        return {"Opaque": value.type_name}
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (bool, int, float, str, type(None))):
        return plain(value)
    told = plain(value)
    if isinstance(value, BaseException) or hasattr(value, "items"):
        return {name: _plain(value[name]) if name in ("result", "tasks") else item for name, item in told.items()}
    if isinstance(value, (list, tuple)) and value and hasattr(value[0], "status"):
        return [_plain(item) for item in value]
    return {type(value).__name__: told}
