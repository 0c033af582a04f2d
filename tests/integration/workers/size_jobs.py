"""Routines for workers to import: of large arguments and results, of calls inside calls, of maps and broadcasts."""

from __future__ import annotations

import array
import asyncio
import contextlib
import ctypes
import gc
import hashlib
import os
import pickle
import random
import signal
import time
from typing import Any

import headgate
from headgate import WorkerLost, routine
from headgate.workers.protocol import shared_memory
from headgate.workers.protocol.bulk import Borrowed, BulkPayload
from tests.support.workers import jobs
from tests.support.workers.jobs import note

KB = 2**10
MB = 2**20
PERIOD = 1_000_003
"""After so many bytes a payload repeats itself. A prime, so that no two chunks of it are alike for a long time."""


# -- what travels -----------------------------------------------------------------------------------------------------


class Named(bytes):
    """Bytes that are not just bytes."""

    name = ""


class Frame:
    """Data that is pickled out of band, as arrays are."""

    def __init__(self, data: Any) -> None:
        self.data = memoryview(data)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        if protocol >= 5:
            return Frame, (pickle.PickleBuffer(self.data),)
        return Frame, (bytearray(self.data),)


class DiesOnLoad:
    """Whoever loads it is killed, but for the process that made it."""

    def __init__(self) -> None:
        self.pid = os.getpid()

    def __setstate__(self, state: dict[str, Any]) -> None:
        if os.getpid() != state["pid"]:
            os.kill(os.getpid(), signal.SIGKILL)


def payload(size: int, seed: int = 0) -> bytes:
    """So many bytes, the same for the same seed, among which a chunk out of place is seen."""
    block = random.Random(seed).randbytes(min(size, PERIOD))
    return block if len(block) == size else (block * (size // PERIOD + 1))[:size]


KINDS = [
    "bytes",
    "bytearray",
    "bytes of a subclass",
    "text",
    "wide text",
    "numbers",
    "array",
    "frame",
    "read-only frame",
    "list",
    "nested",
]


def make(kind: str, size: int, seed: int = 0) -> Any:
    """Something of this kind that has about so many bytes, or a few times as many."""
    raw = payload(size, seed)
    match kind:
        case "bytes":
            return raw
        case "bytearray":
            return bytearray(raw)
        case "bytes of a subclass":
            named = Named(raw)
            named.name = f"seed {seed}"
            return named
        case "text":
            return raw.hex()[:size]
        case "wide text":
            return raw.decode("latin-1") + "\N{SNOWMAN}"
        case "numbers":
            return [byte << 20 for byte in raw[: size // 5]]
        case "array":
            return array.array("B", raw)
        case "frame":
            return Frame(bytearray(raw))
        case "read-only frame":
            return Frame(raw)
        case "list":
            return [raw[start : start + 100 * KB] for start in range(0, size, 100 * KB)]
        case "nested":
            return {"first": [raw, {"second": bytearray(raw)}], "third": ((raw[: size // 2], "small"), None)}
    raise AssertionError(kind)


def digest(value: Any) -> str:
    """Of the contents, and of the types all the way down."""
    found = hashlib.sha256()
    _feed(found, value)
    return found.hexdigest()


def _feed(found: Any, value: Any) -> None:
    found.update(type(value).__name__.encode())
    match value:
        case Frame():
            _feed(found, value.data)
        case bytes() | bytearray() | memoryview() | array.array():
            found.update(f"{len(value)} {getattr(value, 'name', '')}".encode())
            found.update(value)
        case str():
            found.update(value.encode())
        case [int(), *_]:
            found.update(array.array("q", value))
        case list() | tuple():
            found.update(str(len(value)).encode())
            for one in value:
                _feed(found, one)
        case dict():
            for pair in value.items():
                _feed(found, pair)
        case _:
            found.update(repr(value).encode())


# -- large arguments and results --------------------------------------------------------------------------------------


@routine
async def describe(value: Any) -> str:
    return digest(value)


@routine
def describe_in_a_thread(value: Any) -> str:
    return digest(value)


@routine
async def describe_all(*values: Any, **more: Any) -> tuple[list[str], dict[str, str]]:
    return list(map(digest, values)), {name: digest(value) for name, value in more.items()}


@routine
async def made(kind: str, size: int, seed: int = 0) -> Any:
    return make(kind, size, seed)


@routine
async def same(one: Any, other: Any, both: list[Any]) -> tuple[bool, bool, str]:
    """Are they one object, and are those in the list?"""
    return one is other, both[0] is both[1] and both[0] is one, digest(other)


@routine
async def scribble(value: Any) -> Any:
    """Change it in place, and make it longer where that can be."""
    buffer = value.data if isinstance(value, Frame) else value
    buffer[0] ^= 255
    buffer[len(buffer) - 1] ^= 255
    if isinstance(value, bytearray):
        value += b"more"
    return value


@routine
async def zeros_and_ones(buffer: bytearray) -> tuple[int, int]:
    return buffer.count(0), buffer.count(1)


@routine
async def length(value: Any) -> int:
    return len(value)


@routine
async def fails_with(size: int) -> None:
    jobs.innermost(jobs.SeveralArguments(7, "r" * size, {"data": payload(size)}))  # type: ignore[dict-item]


@routine
async def relay(value: Any) -> tuple[str, Any]:
    """What a peer says of it, and what it gives back."""
    return await describe(value), await jobs.echo(value)


@routine
async def calls_with(size: int) -> str:
    """The error that a nested call with so large an argument raises here."""
    try:
        return await describe(payload(size))
    except headgate.HeadgateError as error:
        return f"{type(error).__name__}: {error}"


@routine
async def noted_digest(path: str, value: Any) -> str:
    note(path, os.getpid())
    return digest(value)


@routine
async def noted_result(path: str, size: int) -> bytes:
    """Note it just before the result goes out."""
    result = payload(size)
    note(path, os.getpid())
    return result


@routine(retries=2)
async def dies_once(path: str, value: Any) -> tuple[str, Any]:
    note(path, os.getpid())
    if os.stat(path).st_size <= len(f"{os.getpid()}\n"):  # the first time
        os.kill(os.getpid(), signal.SIGKILL)
    return digest(value), value


def give_back() -> None:
    """Return to the kernel what the allocator only keeps: then what is left is in use."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
    if trim is not None:
        trim(0)


@routine
async def gives_back() -> int:
    give_back()
    return os.getpid()


# -- waiting for a file -----------------------------------------------------------------------------------------------

_told: dict[str, asyncio.Task[None]] = {}


async def told(path: str) -> None:
    """Till there is a file that says go. One task looks for it, however many wait."""
    if path not in _told:
        _told[path] = asyncio.create_task(_look_for(f"{path}.go"))
    await asyncio.shield(_told[path])


async def _look_for(path: str) -> None:
    while not os.path.exists(path):  # noqa: ASYNC110, ASYNC240 - nobody here could set an event
        await asyncio.sleep(0.005)


# -- calls inside calls -----------------------------------------------------------------------------------------------


@routine
async def deep(depth: int) -> int:
    return 0 if depth == 0 else 1 + await deep(depth - 1)


@routine
async def deep_pids(depth: int) -> list[int]:
    return [os.getpid(), *(await deep_pids(depth - 1) if depth else ())]


@routine
async def deep_failure(depth: int) -> None:
    if depth == 0:
        jobs.innermost(jobs.SeveralArguments(7, "at the bottom", {"depth": depth}))
    await deep_failure(depth - 1)


@routine
async def deep_and_endless(path: str, depth: int) -> None:
    try:
        if depth == 0:
            note(path, "begun")
            await asyncio.sleep(3600)
        await deep_and_endless(path, depth - 1)
    finally:
        note(path, f"ended {depth}")


@routine
async def ancestry(depth: int) -> list[dict[str, Any]]:
    """Of this task and of those below it: what they know of themselves."""
    mine = jobs.task_fields()
    return [mine, *(await ancestry(depth - 1) if depth else ())]


@routine
async def family_tree(width: int, depth: int) -> dict[str, Any]:
    async with asyncio.TaskGroup() as group:
        below = [group.create_task(family_tree(width, depth - 1)) for _ in range(width if depth else 0)]
    return {**jobs.task_fields(), "children": [task.result() for task in below]}


@routine(thread=True)
async def threaded_parent() -> tuple[dict[str, Any], list[dict[str, Any]]]:
    return jobs.task_fields(), [await jobs.my_task(), await jobs.my_task_in_a_thread()]


@routine(thread=True)
async def deep_in_threads(depth: int) -> int:
    return 0 if depth == 0 else 1 + await deep_in_threads(depth - 1)


_executing = 0
_most = 0


@routine
async def holds(path: str, number: int) -> int:
    """How many at most were here at a time."""
    global _executing, _most
    _executing += 1
    _most = max(_most, _executing)
    note(path, number)
    try:
        await told(path)
    finally:
        _executing -= 1
    return _most


@routine
async def holds_and_calls(path: str, number: int) -> tuple[int, int]:
    return await holds.__wrapped__(path, number), await jobs.add(number, 1)


_standing = 0


@routine
async def stands(depth: int, wanted: int) -> int:
    """A call of a call of a call; the last one ends when so many are there."""
    global _standing
    _standing += 1
    if depth:
        return 1 + await stands(depth - 1, wanted)
    while _standing < wanted:  # noqa: ASYNC110 - the others are calls of their own
        await asyncio.sleep(0.005)
    return 1


@routine
async def endless_here(path: str) -> None:
    note(path, f"begun {os.getpid()}")
    try:
        await asyncio.sleep(3600)
    finally:
        note(path, f"ended {os.getpid()}")


@routine
async def calls_endless_ones(path: str, count: int) -> None:
    note(f"{path}.outer", os.getpid())
    await asyncio.gather(*(endless_here(path) for _ in range(count)))


@routine(timeout=0.5)
async def has_no_time(path: str, count: int) -> None:
    async with asyncio.TaskGroup() as group:  # which waits for all, where gather() goes when the first is cancelled
        for _ in range(count):
            group.create_task(endless_here(path))


@routine
async def dies_unless(pid: int) -> str:
    if os.getpid() != pid:
        os.kill(os.getpid(), signal.SIGKILL)
    return "here"


@routine
async def survives_a_peer() -> str:
    """What a routine sees of the death of another worker."""
    for _ in range(20):
        try:
            await dies_unless(os.getpid())
        except WorkerLost as error:
            return str(error)
    raise AssertionError("no call went to a peer")


# -- map --------------------------------------------------------------------------------------------------------------


@routine
async def where(number: int) -> tuple[int, int]:
    return number, os.getpid()


@routine
def squared(number: int) -> int:
    return number * number


@routine
async def nothing(number: int) -> None:
    return None


class Doubler:
    """A routine that is a method."""

    def __init__(self, factor: int) -> None:
        self.factor = factor

    @routine
    async def times(self, number: int) -> int:
        return self.factor * number

    @routine
    @staticmethod
    async def twice(number: int) -> int:
        return 2 * number


@routine
async def gated(item: tuple[str, int, bool]) -> int:
    """Note the number, and wait if told to."""
    path, number, waits = item
    note(path, f"begun {number}")
    try:
        if waits:
            await told(path)
    finally:
        note(path, f"ended {number}")
    return number


@routine
async def fails_if_odd(number: int) -> int:
    if number % 2:
        raise jobs.SeveralArguments(number, "odd", {})
    return number


@routine
async def gated_failure(item: tuple[str, int, str]) -> int:
    """Return, fail, or wait, as the item says."""
    path, number, what = item
    if what == "fail":
        raise jobs.SeveralArguments(number, "told to", {})
    return await gated.__wrapped__((path, number, what == "wait"))


@routine
async def dies_at(item: tuple[int, int]) -> int:
    number, last = item
    if number == last:
        os.kill(os.getpid(), signal.SIGKILL)
    return number


@routine
async def maps(count: int, ordered: bool = True) -> tuple[int, list[tuple[int, int]]]:
    """My pid, and what a map made here."""
    return os.getpid(), [found async for found in headgate.map(where, range(count), ordered=ordered, window=4)]


@routine
async def maps_and_breaks(path: str) -> int:
    items = ((path, number, number > 0) for number in range(1000))
    async with contextlib.aclosing(headgate.map(gated, items, window=5)) as results:  # type: ignore[type-var]
        async for number in results:
            return number
    raise AssertionError("nothing came")


# -- a busy machine ---------------------------------------------------------------------------------------------------


def slow_copies(seconds: float, reads: int = 0, writes: int = 0) -> None:
    """Have this process copy lent memory as slowly as a busy machine does: payloads of `reads` megabytes that it reads,
    and of `writes` megabytes that it writes."""
    read, write = shared_memory.read, shared_memory.write

    def slow_read(pid: int, borrowed: Borrowed) -> BulkPayload:
        if sum(length for length, _ in borrowed.segments) // MB == reads:
            time.sleep(seconds)
        return read(pid, borrowed)

    def slow_write(bulk: BulkPayload) -> int:
        if len(bulk) // MB == writes:
            time.sleep(seconds)
        return write(bulk)

    shared_memory.read, shared_memory.write = slow_read, slow_write


@routine
async def copy_slowly(seconds: float, reads: int, writes: int) -> None:
    slow_copies(seconds, reads, writes)


# -- broadcast --------------------------------------------------------------------------------------------------------


@routine
async def as_told(path: str, orders: dict[int, tuple[float, str]]) -> int:
    """Each worker has its order: how long to wait, and then to return, to fail or to die."""
    seconds, what = orders[os.getpid()]
    note(path, f"begun {os.getpid()}")
    await asyncio.sleep(seconds)
    note(path, f"ended {os.getpid()}")
    if what == "fail":
        raise jobs.SeveralArguments(os.getpid(), "told to", {})
    if what == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    return os.getpid()
