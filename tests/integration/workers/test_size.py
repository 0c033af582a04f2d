"""W42: arguments and results of every size, in chunks and through shared memory, and what is left of them: nothing."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import gc
import inspect
import os
import random
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import headgate
from headgate import (
    HeadgateError,
    InvalidArgument,
    InvalidType,
    PoolClosed,
    RemoteError,
    WorkerLost,
    WorkerPool,
    routine,
)
from headgate.testing import capture_events, no_leaks
from headgate.workers.client.connection import SILENT
from headgate.workers.protocol import shared_memory
from tests.conftest import SCALE
from tests.integration.workers import size_jobs
from tests.integration.workers.size_jobs import KB, MB, digest, make, payload
from tests.support.workers import jobs
from tests.support.workers.support import (
    MARK,
    PATIENCE,
    Shared,
    alive,
    all_ready,
    command,
    environment,
    in_flight,
    lines,
    marked,
    pids,
    read_line,
    run,
    states,
    until,
    wait_until,
)

pytestmark = pytest.mark.integration
linux = pytest.mark.skipif(sys.platform != "linux", reason="looks at processes through /proc")

INLINE = 256 * KB
"""Above this size things travel in chunks, or through shared memory."""
CREDIT = 4 * MB
"""So much of a transfer may be on its way."""
SIZES = [0, 1, INLINE - 1, INLINE, INLINE + 1, MB, CREDIT - 1, CREDIT, CREDIT + 1, (20 if SCALE >= 1 else 6) * MB]
FEW = 8
"""Descriptors that a process may keep for later transfers."""
WAYS = {"shared memory": None, "chunks": "0"}
SWITCH = "HEADGATE_SHARED_MEMORY"


def choose(way: str, patch: pytest.MonkeyPatch) -> None:
    said = WAYS[way]
    if said is None:
        patch.delenv(SWITCH, raising=False)
    else:
        patch.setenv(SWITCH, said)


@contextlib.contextmanager
def opened(way: str, **options: Any) -> Iterator[Shared]:
    """A pool whose workers lend memory, or do not. That is in their environment: ours is as before once they run.

    Two such pools may be open at once, and the first need not end first.
    """
    shared = Shared(lazy=False, **options)
    with pytest.MonkeyPatch.context() as patch:
        choose(way, patch)
        shared.open()
    yield shared
    shared.close()


@pytest.fixture(scope="module", params=list(WAYS))
def sized(request: pytest.FixtureRequest) -> Iterator[Shared]:
    """Two workers that have seen something large."""
    with opened(request.param, spawn=2) as shared:

        async def warm() -> None:
            for _ in range(4):
                await jobs.echo(payload(5 * MB))

        shared(warm)
        yield shared


def ways(soak: str, fixture: str = "way") -> pytest.MarkDecorator:
    """For tests that show much the same both ways: this one is gone in `make soak` only."""
    params = [pytest.param(way, marks=pytest.mark.soak if way == soak else ()) for way in WAYS]
    return pytest.mark.parametrize(fixture, params, indirect=True, scope=None if fixture == "way" else "module")


mostly_shared_memory = ways("chunks", "sized")
mostly_chunks = ways("shared memory", "sized")


@pytest.fixture(params=list(WAYS))
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """For pools that the test makes itself."""
    choose(request.param, monkeypatch)
    return str(request.param)


@pytest.fixture(scope="module", params=["shared memory", pytest.param("chunks", marks=pytest.mark.soak)])
def narrow(request: pytest.FixtureRequest) -> Iterator[Shared]:
    """One worker, and nothing above 1 MB."""
    with opened(request.param, spawn=1, max_payload=MB) as shared:
        shared(jobs.pid)
        yield shared


@pytest.fixture(autouse=True)
def leaves_nothing_behind() -> Iterator[None]:
    """A pool that outlives the test may keep a descriptor or a thread for the next transfer; see `Steady` for how many.

    Pools that do not outlive it are run by `run_alone`.
    """
    with no_leaks(files=False, threads=False):
        yield


def run_alone(main: Callable[[], Coroutine[Any, Any, Any]], patience: float = 60) -> None:
    """A pool of its own is opened and left: nothing of it may be there afterwards."""
    with no_leaks(grace=3):
        run(main, patience)


# -- what processes hold ----------------------------------------------------------------------------------------------


class Held(NamedTuple):
    descriptors: int
    shared: int
    """Bytes of memory files that are open, and of those that are mapped."""
    private: int
    """Bytes of memory of its own."""


def held(pid: int) -> Held:
    descriptors = shared = private = 0
    for name in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):  # closed since it was listed
            path = f"/proc/{pid}/fd/{name}"
            target = os.readlink(path)
            descriptors += 1
            if target.endswith("(deleted)") or "memfd:" in target:
                shared += os.stat(path).st_size
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        if line.endswith("(deleted)") or "memfd:" in line:
            start, end = (int(one, 16) for one in line.split()[0].split("-"))
            shared += end - start
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            private = int(line.split()[1]) * KB
    return Held(descriptors, shared, private)


class Steady:
    """What processes hold now. Later they are to hold no more, but for a little."""

    def __init__(self, *pids: int) -> None:
        self._before = {pid: held(pid) for pid in pids}

    async def check(self, private: int = 1 << 40, pool: WorkerPool | None = None) -> None:
        """Soon, at the latest. Private memory is looked at where a bound and the pool are given, for the allocators
        are to return what they only keep.
        """
        end = time.monotonic() + 5
        while True:
            if pool is not None:
                await all_give_back(pool)
            if not (said := list(self._above(private))):
                return
            assert time.monotonic() < end, "\n".join(said)
            gc.collect()
            await asyncio.sleep(0.02)

    def _above(self, private: int) -> Iterator[str]:
        for pid, before in self._before.items():
            now = held(pid)
            if (
                now.descriptors > before.descriptors + FEW
                or now.shared > before.shared + CREDIT
                or now.private > before.private + private
            ):
                yield f"{'this process' if pid == os.getpid() else f'worker {pid}'} had {before} and has {now}"


async def all_give_back(pool: WorkerPool) -> None:
    size_jobs.give_back()
    missing = set(pids(pool))
    while missing:
        missing.discard(await size_jobs.gives_back())


def files(folder: Path) -> list[str]:
    return sorted(str(path) for path in folder.rglob("*") if not path.is_dir())


# -- every size -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "size",
    [
        pytest.param(size, marks=pytest.mark.soak if size in (1, INLINE - 1, MB, CREDIT - 1, CREDIT) else ())
        for size in SIZES
    ],
)
def test_w42_bytes_of_every_size_go_and_come(sized: Shared, size: int) -> None:
    async def main() -> None:
        for kind in ("bytes", "bytearray") if size <= CREDIT + 1 else ("bytes",):
            value = make(kind, size)
            wanted = digest(value)
            assert digest(await jobs.echo(value)) == wanted, "its type too"
            if size <= CREDIT + 1:
                assert await size_jobs.describe(value) == wanted
                assert digest(await size_jobs.made(kind, size)) == wanted
            assert digest(value) == wanted
        assert in_flight(sized.pool) == 0

    sized(main)


@mostly_chunks
@pytest.mark.parametrize("near", [INLINE, 2 * INLINE, CREDIT], ids=["one chunk", "two chunks", "the credit"])
def test_w42_sizes_around_a_boundary(sized: Shared, near: int) -> None:
    """Where it lies for what surrounds the bytes on their way is not known here: all around it."""

    async def main() -> None:
        sizes = range(near - 160, near + 33, 16 if near == CREDIT else 3)
        longest = payload(sizes[-1])
        for first in range(0, len(sizes), 16):
            values = [longest[:size] for size in sizes[first : first + 16]]
            assert await asyncio.gather(*map(jobs.echo, values)) == values

    sized(main, patience=60)


@mostly_shared_memory
@pytest.mark.parametrize("kind", size_jobs.KINDS)
def test_w42_large_things_of_every_kind(sized: Shared, kind: str) -> None:
    async def main() -> None:
        for size in (INLINE, MB + 1):
            value = make(kind, size)
            wanted = digest(value)
            assert await size_jobs.describe(value) == wanted
            assert digest(await jobs.echo(value)) == wanted

    sized(main, patience=60)


@mostly_shared_memory
def test_w42_arrays(sized: Shared) -> None:
    numpy = pytest.importorskip("numpy", reason="numpy is not installed: `pip install numpy` for this test")

    async def main() -> None:
        for array in (
            numpy.arange(10),
            numpy.arange(3 * MB, dtype="float64"),
            numpy.arange(3 * MB).reshape(3, -1).T,
            numpy.arange(6 * MB)[::3],
            numpy.zeros((0, 5)),
        ):
            back = await jobs.echo(array)
            assert (type(back), back.dtype, back.shape) == (type(array), array.dtype, array.shape)
            assert (back == array).all()
            assert back.flags.writeable
            if back.size:
                back[0] = 7
        mine = numpy.zeros(2 * MB, dtype="uint8")
        changed = await size_jobs.scribble(mine)
        assert changed[0] == changed[-1] == 255
        assert not mine.any()
        changed[1] = 3

    sized(main, patience=60)


@mostly_chunks
def test_w42_a_large_argument_and_a_large_result_under_defaults(sized: Shared, scale: float) -> None:
    async def main() -> None:
        size = 256 * MB if scale >= 1 else 24 * MB
        value = payload(size)
        wanted = digest(value)
        back = await jobs.echo(value)
        assert type(back) is bytes
        assert digest(back) == wanted
        assert await jobs.add(1, 2) == 3

    sized(main, patience=120)


@mostly_shared_memory
def test_w42_functions_in_threads_take_and_give_large_things(sized: Shared) -> None:
    async def main() -> None:
        values = [payload(5 * MB, seed) for seed in range(4)]
        assert await asyncio.gather(*map(size_jobs.describe_in_a_thread, values)) == list(map(digest, values))

    sized(main)


@mostly_chunks
def test_w42_peers_send_each_other_large_things(sized: Shared) -> None:
    async def main() -> None:
        value = payload(5 * MB + 3)
        for told, back in await asyncio.gather(*(size_jobs.relay(value) for _ in range(4))):
            assert (told, back) == (digest(value), value)

    sized(main)


def test_w42_large_yields_and_sent_values(sized: Shared) -> None:
    @routine
    async def stream(first: bytes) -> AsyncIterator[bytes]:
        sent = first
        while sent:
            sent = yield sent[::-1]  # type: ignore[misc]

    async def main() -> None:
        first = payload(5 * MB)
        values: Any = stream(first)
        assert await anext(values) == first[::-1]
        for seed in range(3):
            value = payload(INLINE + seed * MB, seed)
            assert await values.asend(value) == value[::-1]
        assert await values.asend(b"small") == b"llams"
        await values.aclose()
        assert in_flight(sized.pool) == 0

    sized(main)


# -- copies -----------------------------------------------------------------------------------------------------------


@mostly_shared_memory
@pytest.mark.parametrize("size", [1000, MB, CREDIT + 1])
@pytest.mark.parametrize("kind", ["bytearray", "frame"])
def test_w42_arguments_are_copies_that_can_be_written(sized: Shared, kind: str, size: int) -> None:
    async def main() -> None:
        mine = make(kind, size)
        before = digest(mine)
        expected = bytearray(payload(size))
        expected[0] ^= 255
        expected[-1] ^= 255
        calls = [*(size_jobs.scribble(mine) for _ in range(2)), *(size_jobs.describe(mine) for _ in range(2))]
        found = await asyncio.gather(*calls)
        for back in found[:2]:
            if kind == "bytearray":
                assert type(back) is bytearray
                assert back == expected + b"more"
                back.clear()  # it is its own, of no fixed size
                back += b"new"
            else:
                assert back.data == expected
                back.data[1] ^= 255
        assert found[2:] == [before] * 2, "what another call did is not seen"
        assert digest(mine) == before

    sized(main)


@mostly_chunks
@pytest.mark.parametrize("turns", [1, 3, pytest.param(10, marks=pytest.mark.soak)])
def test_w42_what_is_changed_while_it_travels_does_not_arrive_in_two_halves(sized: Shared, turns: int) -> None:
    async def main() -> None:
        buffer = bytearray(12 * MB)
        call = asyncio.create_task(size_jobs.zeros_and_ones(buffer))
        for _ in range(turns):
            await asyncio.sleep(0)
        buffer[:] = b"\1" * len(buffer)
        assert await call in ((12 * MB, 0), (0, 12 * MB))

    sized(main)


@mostly_shared_memory
@pytest.mark.parametrize("turns", [1, 3, 10])
def test_w42_a_callers_buffer_stays_its_own_while_it_travels(sized: Shared, turns: int) -> None:
    """Python refuses to resize a buffer that somebody else looks at; nobody else may."""

    async def main() -> None:
        buffer = bytearray(12 * MB)
        call = asyncio.create_task(size_jobs.length(buffer))
        for _ in range(turns):
            await asyncio.sleep(0)
        buffer.append(1)
        assert await call in (12 * MB, 12 * MB + 1)
        buffer.clear()

    sized(main)


@mostly_chunks
def test_w42_several_large_arguments(sized: Shared) -> None:
    async def main() -> None:
        values = [make(kind, size, size) for size in (3 * MB, 10, INLINE) for kind in ("bytes", "bytearray", "list")]
        more = {"text": make("text", 2 * MB), "none": None, "frame": make("frame", 2 * MB)}
        told, named = await size_jobs.describe_all(*values, **more)
        assert told == list(map(digest, values))
        assert named == {name: digest(value) for name, value in more.items()}

    sized(main)


@mostly_shared_memory
@pytest.mark.parametrize("size", [100, MB])
@pytest.mark.parametrize("kind", ["bytes", "bytearray", "frame", "list"])
def test_w42_the_same_object_twice_is_the_same_object_there(sized: Shared, kind: str, size: int) -> None:
    async def main() -> None:
        value = make(kind, size)
        assert await size_jobs.same(value, value, [value, value]) == (True, True, digest(value))
        one, other = await jobs.echo((value, value))
        assert one is other

    sized(main)


@mostly_shared_memory
def test_w42_equal_objects_stay_two(sized: Shared) -> None:
    async def main() -> None:
        one, other = bytearray(payload(MB)), bytearray(payload(MB))
        assert await size_jobs.same(one, other, [one, other]) == (False, False, digest(one))

    sized(main)


@mostly_chunks
def test_w42_large_exceptions(sized: Shared) -> None:
    async def main() -> None:
        for size in (1000, INLINE, MB):
            with pytest.raises(jobs.SeveralArguments) as caught:
                await size_jobs.fails_with(size)
            error = caught.value
            assert (error.code, error.reason, error.detail) == (7, "r" * size, {"data": payload(size)})
            assert "in innermost" in error.__notes__[-1]
        assert await jobs.add(1, 2) == 3

    sized(main)


# -- many -------------------------------------------------------------------------------------------------------------


@mostly_chunks
def test_w42_a_thousand_calls_of_5_kb_in_one_loop_turn(sized: Shared) -> None:
    async def main() -> None:
        whole = payload(MB)
        values = [whole[start : start + 5 * KB] for start in range(1000)]
        assert await asyncio.gather(*map(jobs.echo, values)) == values
        assert in_flight(sized.pool) == 0

    sized(main)


@mostly_shared_memory
@linux
def test_w42_many_large_calls_at_once_leave_few_descriptors(sized: Shared, scale: float) -> None:
    async def main() -> None:
        steady = Steady(os.getpid(), *pids(sized.pool))
        whole, half = payload(2 * MB), 100 if scale >= 1 else 30  # some more than loans that may be open
        values = [whole[start : start + MB] for start in range(0, half * 2000, 1000)]
        found = await asyncio.gather(*map(jobs.echo, values[:half]), *map(size_jobs.describe, values[half:]))
        assert found == [*values[:half], *map(digest, values[half:])]
        del found, values
        await steady.check()
        assert in_flight(sized.pool) == 0

    sized(main, patience=60)


@mostly_chunks
def test_w42_transfers_at_once_are_not_mixed_up(sized: Shared) -> None:
    async def main() -> None:
        chance = random.Random(5)
        values = [payload(chance.choice([1000, INLINE, MB, 3 * MB, 9 * MB]), seed) for seed in range(24)]
        assert await asyncio.gather(*map(jobs.echo, values)) == values

    sized(main, patience=60)


@mostly_shared_memory
def test_w42_small_calls_beside_large_ones(sized: Shared) -> None:
    """How long they take is measured elsewhere."""

    async def main() -> None:
        values = [payload(12 * MB, seed) for seed in range(3)]
        large = [asyncio.create_task(jobs.echo(value)) for value in values]
        small = 0
        while not all(call.done() for call in large):
            assert await asyncio.gather(*(jobs.add(small, n) for n in range(5))) == list(range(small, small + 5))
            small += 1
        assert [await call for call in large] == values
        assert small

    sized(main, patience=60)


@mostly_shared_memory
def test_w42_two_loops_at_once(sized: Shared) -> None:
    """Calls of another thread's loop have a conversation of their own."""

    async def echoes(seed: int) -> bool:
        values = [payload(3 * MB, seed + n) for n in range(4)]
        return await asyncio.gather(*map(jobs.echo, values)) == values

    async def main() -> None:
        context = contextvars.copy_context()
        ends: list[bool] = []
        thread = threading.Thread(target=lambda: ends.append(context.run(asyncio.run, echoes(100))))
        thread.start()
        assert await echoes(200)
        await until(lambda: not thread.is_alive())
        assert ends == [True]

    sized(main, patience=60)


# -- memory -----------------------------------------------------------------------------------------------------------


@linux
def test_w42_w34_a_worker_whose_payloads_are_copied_for_seconds_is_not_taken_for_blocked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Which a busy machine does with hundreds of megabytes. Two calls at once, each on a worker of its own: of one, the
    client needs its time to write the argument, and then the worker to read it; of the other, the worker to write the
    result."""
    choose("shared memory", monkeypatch)
    for name in ("read", "write"):
        monkeypatch.setattr(shared_memory, name, getattr(shared_memory, name))  # restores them

    async def main() -> None:
        async with WorkerPool(spawn=2, lazy=False) as pool:
            await pool.broadcast(size_jobs.copy_slowly, 1.5 * SILENT, reads=2, writes=3)
            size_jobs.slow_copies(1.5 * SILENT, writes=2)
            with capture_events("workers") as events:
                told = await asyncio.gather(size_jobs.describe(payload(2 * MB)), size_jobs.made("bytes", 3 * MB))
            assert told == [digest(payload(2 * MB)), payload(3 * MB)]
            assert [event for event in events if event.name == "worker_blocked"] == []

    run(main)


# -- interrupted ------------------------------------------------------------------------------------------------------


@mostly_chunks
@linux
@pytest.mark.parametrize("what", ["argument", "result"])
def test_w42_a_call_cancelled_in_the_middle_leaves_nothing(sized: Shared, scale: float, what: str) -> None:
    async def main() -> None:
        value = payload(8 * MB)
        wanted: Any = digest(value) if what == "argument" else value
        chance = random.Random(4)

        async def one(moment: float) -> None:
            call = size_jobs.describe(value) if what == "argument" else size_jobs.made("bytes", 8 * MB)
            task = asyncio.create_task(call)
            await asyncio.sleep(moment)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                assert await task == wanted
            assert await jobs.add(1, 2) == 3

        await all_give_back(sized.pool)
        steady = Steady(os.getpid(), *pids(sized.pool))
        for moment in (0.0, 0.001, *(chance.uniform(0, 0.05) for _ in range(max(6, int(60 * scale))))):
            await one(moment)
        assert in_flight(sized.pool) == 0
        await steady.check(private=4 * 8 * MB, pool=sized.pool)
        assert await size_jobs.describe(value) == digest(value)
        assert await size_jobs.made("bytes", 8 * MB) == value

    sized(main, patience=60 + 60 * scale)


@mostly_chunks
@linux
def test_w42_many_cancelled_at_once_leave_nothing(sized: Shared) -> None:
    async def main() -> None:
        steady = Steady(os.getpid(), *pids(sized.pool))
        values = [payload(2 * MB, seed) for seed in range(20)]
        tasks = [asyncio.create_task(jobs.echo(value)) for value in values]
        await asyncio.sleep(0.02)
        for task in tasks[::2]:
            task.cancel()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        assert ends[1::2] == values[1::2]
        assert all(isinstance(end, asyncio.CancelledError) or end in values for end in ends)
        del tasks, ends
        await steady.check()
        assert await asyncio.gather(*map(jobs.echo, values)) == values

    sized(main, patience=60)


def kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


@linux
@ways("shared memory")
def test_w42_a_worker_killed_while_an_argument_is_on_its_way(way: str, runtime: Path, log: str) -> None:
    """It was stopped before, so it cannot have the whole. A call that nobody began may go elsewhere, but only once."""
    value = payload(16 * MB)

    async def main() -> None:
        async with WorkerPool(spawn=1, lazy=False, shutdown_timeout=5) as pool:
            assert await size_jobs.describe(value) == digest(value)
            steady = Steady(os.getpid())
            [victim] = pids(pool)
            os.kill(victim, signal.SIGSTOP)
            call = asyncio.create_task(size_jobs.noted_digest(log, value))
            await asyncio.sleep(0.3)  # as much as goes without credit
            assert not call.done()
            kill(victim)
            try:
                assert await call == digest(value)
                assert len(lines(log)) == 1
            except WorkerLost:
                assert lines(log) == []
            await until(lambda: not alive(victim))
            await all_ready(pool, 1)
            await steady.check()
            assert await jobs.echo(value) == value
        assert files(runtime) == []

    run_alone(main)


@linux
@ways("shared memory")
def test_w42_a_worker_killed_while_its_result_is_on_its_way(way: str, runtime: Path, log: str) -> None:
    """This loop stands still meanwhile, so it cannot have given credit for the whole."""
    value = payload(16 * MB)

    async def main() -> None:
        async with WorkerPool(spawn=1, lazy=False, shutdown_timeout=5) as pool:
            await jobs.echo(value)
            steady = Steady(os.getpid())
            call = asyncio.create_task(size_jobs.noted_result(log, 16 * MB))
            await until(lambda: lines(log))
            time.sleep(0.3)  # noqa: ASYNC251 - that the loop stands still is the point
            [victim] = map(int, lines(log))
            kill(victim)
            if way == "chunks":
                with pytest.raises(WorkerLost):
                    await call
            else:  # all of it may have been there already
                with contextlib.suppress(WorkerLost):
                    assert await call == value
            assert len(lines(log)) == 1, "it ran once"
            del call
            await until(lambda: not alive(victim))
            await all_ready(pool, 1)
            await steady.check()
            assert await jobs.echo(value) == value
        assert files(runtime) == []

    run_alone(main)


@pytest.mark.soak  # the two moments that differ are above
@linux
def test_w42_workers_killed_at_any_moment_of_a_transfer(way: str, runtime: Path, log: str, scale: float) -> None:
    value = payload(8 * MB)
    chance = random.Random(8)

    async def main() -> None:
        async with WorkerPool(spawn=2, lazy=False, shutdown_timeout=5) as pool:
            await asyncio.gather(*(jobs.echo(value) for _ in range(4)))
            steady = Steady(os.getpid())
            for _ in range(max(3, int(30 * scale))):
                calls = [asyncio.create_task(jobs.echo(value)) for _ in range(4)]
                await asyncio.sleep(chance.uniform(0, 0.15))
                victim = chance.choice(pids(pool))
                kill(victim)
                for end in await asyncio.gather(*calls, return_exceptions=True):
                    assert isinstance(end, WorkerLost) or end == value, repr(end)[:1000]
                del calls, end
                await until(lambda victim=victim: not alive(victim))
                await all_ready(pool, 2)
            await steady.check()
            assert in_flight(pool) == 0
            assert await jobs.echo(value) == value
        assert files(runtime) == []

    run_alone(main, patience=60 + 60 * scale)


@ways("chunks")
def test_w42_a_worker_that_dies_of_its_argument_is_lost(way: str) -> None:
    async def main() -> None:
        async with WorkerPool(spawn=1, shutdown_timeout=5) as pool:
            value = payload(5 * MB)
            with pytest.raises(WorkerLost):
                await jobs.parameters(value, size_jobs.DiesOnLoad(), value, c=value)
            await all_ready(pool, 1)
            assert await jobs.echo(value) == value

    run_alone(main)


@ways("chunks")
def test_w42_a_retry_has_its_whole_argument_again(way: str, log: str) -> None:
    async def main() -> None:
        async with WorkerPool(spawn=2, shutdown_timeout=5) as pool:
            value = make("nested", 5 * MB)
            told, back = await size_jobs.dies_once(log, value)
            assert told == digest(back) == digest(value)
            assert len(lines(log)) == len(set(lines(log))) == 2
            await all_ready(pool, 2)

    run_alone(main)


@pytest.mark.parametrize("moment", [0.01, *(pytest.param(at, marks=pytest.mark.soak) for at in (0.0, 0.05))])
def test_w42_a_pool_left_in_the_middle_of_a_transfer(way: str, runtime: Path, moment: float) -> None:
    async def main() -> None:
        value = payload(8 * MB)
        async with WorkerPool(spawn=1, lazy=False, shutdown_timeout=0):
            calls = [asyncio.create_task(jobs.echo(value)) for _ in range(2)]
            await asyncio.sleep(moment)
        for end in await asyncio.gather(*calls, return_exceptions=True):
            assert isinstance(end, PoolClosed) or end == value, repr(end)[:1000]
        assert files(runtime) == []

    run_alone(main)


CLIENT = """
import asyncio, os
import headgate
from tests.support.workers import jobs
from tests.integration.workers import size_jobs

async def main():
    async with headgate.WorkerPool(spawn=2, lazy=False):
        value = size_jobs.payload(8 * 2**20)
        await jobs.echo(value)
        os.write(1, b"ready\\n")
        while True:
            await asyncio.gather(*(jobs.echo(value) for _ in range(2)))

asyncio.run(main())
"""


@linux
@ways("chunks")
def test_w42_a_client_killed_in_the_middle_of_a_transfer_leaves_nothing(
    way: str, runtime: Path, tmp_path: Path, scale: float
) -> None:
    chance = random.Random(6)
    path = tmp_path / "client.py"
    path.write_text(CLIENT)
    for _ in range(max(1, int(20 * scale**1.2))):
        mark = uuid.uuid4().hex
        client = subprocess.Popen(
            [sys.executable, str(path)],
            env=environment(**{MARK: mark}),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
        )
        assert client.stdout is not None
        try:
            assert read_line(client.stdout) == "ready"
            assert len(marked(mark)) >= 4, "itself, its keeper and its workers"
            time.sleep(chance.uniform(0, 0.2))
        finally:
            client.kill()
            client.wait(PATIENCE)
            client.stdout.close()
        try:
            wait_until(lambda mark=mark: not marked(mark), 5)
            wait_until(lambda: files(runtime) == [], 5)
        finally:
            for pid in marked(mark):
                sys.stderr.write(f"left behind: {pid} {command(pid)}\n")
                kill(pid)


# -- max_payload ------------------------------------------------------------------------------------------------------


def test_w42_by_default_max_payload_is_one_gib() -> None:
    assert inspect.signature(WorkerPool).parameters["max_payload"].default == 2**30


@pytest.mark.parametrize("value", [0, -1, True, False, "1", 1.5, b"1"])
def test_w42_a_bad_max_payload_is_refused(value: Any) -> None:
    with pytest.raises((InvalidArgument, InvalidType), match="max_payload"):
        WorkerPool(spawn=1, max_payload=value)


@pytest.mark.parametrize("size", [MB + 1, pytest.param(5 * MB, marks=pytest.mark.soak)])
@pytest.mark.parametrize("kind", ["bytes", "bytearray", "text", "array", "frame", "list", "nested"])
def test_w42_an_argument_above_max_payload_touches_no_worker(narrow: Shared, kind: str, size: int) -> None:
    async def main() -> None:
        value = make(kind, size)
        before = states(narrow.pool)
        with capture_events("workers") as events:
            for call in (jobs.echo(value), jobs.echo(value=value)):
                with pytest.raises(InvalidArgument, match="max_payload") as caught:
                    await call
                said = str(caught.value)
                assert "echo" in said or "value" in said, "the routine or its argument"
                assert caught.value.remedy in said
        assert "task_dispatched" not in events.names
        assert in_flight(narrow.pool) == 0
        assert states(narrow.pool) == before
        assert await jobs.add(1, 2) == 3

    narrow(main)


def test_w42_what_is_just_below_max_payload_goes_through(narrow: Shared) -> None:
    async def main() -> None:
        for kind in ("bytes", "bytearray", "text", "frame"):
            value = make(kind, MB - 2 * KB)  # room for what surrounds it
            assert digest(await jobs.echo(value)) == digest(value)

    narrow(main)


def test_w42_arguments_above_max_payload_beside_others_harm_nobody(narrow: Shared) -> None:
    async def main() -> None:
        values = [payload(2 * MB if n % 3 == 0 else 500 * KB if n % 3 == 1 else 100, n) for n in range(30)]
        found = await asyncio.gather(*map(jobs.echo, values), return_exceptions=True)
        for n, back in enumerate(found):
            assert isinstance(back, InvalidArgument) if n % 3 == 0 else back == values[n]

    narrow(main)


def test_w42_a_result_above_max_payload_is_that_calls_outcome(narrow: Shared) -> None:
    async def main() -> None:
        before = states(narrow.pool)
        for kind in ("bytes", "bytearray", "text", "nested"):
            beside = asyncio.create_task(jobs.slow(0.05, "fine"))
            with pytest.raises(HeadgateError, match="max_payload") as caught:
                await size_jobs.made(kind, 2 * MB)
            assert "made" in str(caught.value)
            assert caught.value.remedy in str(caught.value)
            assert await beside == "fine"
        assert states(narrow.pool) == before
        await until(lambda: in_flight(narrow.pool) == 0)
        assert digest(await size_jobs.made("bytes", MB - 2 * KB)) == digest(payload(MB - 2 * KB))

    narrow(main)


def test_w42_an_exception_above_max_payload_arrives_as_remote_error(narrow: Shared) -> None:
    async def main() -> None:
        before = states(narrow.pool)
        with pytest.raises(RemoteError, match="SeveralArguments"):
            await size_jobs.fails_with(2 * MB)
        assert states(narrow.pool) == before
        assert await jobs.add(1, 2) == 3

    narrow(main)


def test_w42_max_payload_holds_for_calls_inside_calls(narrow: Shared) -> None:
    async def main() -> None:
        said = await size_jobs.calls_with(2 * MB)
        assert "max_payload" in said
        assert await size_jobs.calls_with(500 * KB) == digest(payload(500 * KB))

    narrow(main)


def test_w42_max_payload_holds_for_streams(narrow: Shared) -> None:
    @routine
    async def stream(first: bytes, *sizes: int) -> AsyncIterator[bytes]:
        yield first
        for size in sizes:
            yield bytes(size)

    async def main() -> None:
        before = states(narrow.pool)
        with pytest.raises(InvalidArgument, match="max_payload"):
            await anext(stream(bytes(2 * MB)))
        values: Any = stream(b"small", 500 * KB, 2 * MB)
        assert await anext(values) == b"small"
        assert await anext(values) == bytes(500 * KB)
        with pytest.raises(HeadgateError, match="max_payload"):
            await anext(values)
        await values.aclose()
        values = stream(b"small", 10)
        await anext(values)
        with pytest.raises(InvalidArgument, match="max_payload"):
            await values.asend(bytes(2 * MB))
        await values.aclose()
        assert states(narrow.pool) == before
        await until(lambda: in_flight(narrow.pool) == 0)

    narrow(main)


def test_w42_max_payload_is_not_asked_where_nothing_travels(narrow: Shared) -> None:
    async def main() -> None:
        value = payload(2 * MB)
        with headgate.do_dispatch(False):
            assert await jobs.echo(value) is value

    narrow(main)


@ways("chunks")
def test_w42_max_payload_may_be_small(way: str) -> None:
    async def main() -> None:
        async with WorkerPool(spawn=1, max_payload=10_000):
            assert await jobs.echo(bytes(9_000)) == bytes(9_000)
            with pytest.raises(InvalidArgument, match="max_payload"):
                await jobs.echo(bytes(10_001))
            with pytest.raises(HeadgateError, match="max_payload"):
                await size_jobs.made("bytes", 10_001)
            assert await jobs.add(1, 2) == 3

    run_alone(main)


@pytest.mark.soak  # it takes a gibibyte
def test_w42_more_than_a_gib_is_refused_by_default(way: str) -> None:
    async def main() -> None:
        async with WorkerPool(spawn=1):
            with pytest.raises(InvalidArgument, match="max_payload"):
                await jobs.echo(bytes(2**30 + 1))
            assert await jobs.add(1, 2) == 3

    run_alone(main)
