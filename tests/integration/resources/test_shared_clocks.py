"""H05: slow answers and paused processes make no shared cooldown end early and no shared quota exceed its window."""

from __future__ import annotations

import asyncio
import itertools
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from headgate import CooldownResource, PoolExhausted, PostgresStore, Resource, ResourcePool, SqliteStore
from headgate.core.clock import clock
from headgate.sharing.memory import MemoryState, SharedMemory
from headgate.sharing.states import ClockOffset, Outcome, Seen, SharedState, Step, timed
from headgate.testing import virtual
from tests.faults import Proxy
from tests.integration.resources.paused_process import PER, REQUESTS
from tests.postgres_server import PostgresServer
from tests.support.resources.support import at_once, ident
from tests.unit.resources.test_quotas import Upstream

PROGRAM = Path(__file__).with_name("paused_process.py")
PATIENCE = 60.0


def pausing(store: SharedState, pause: Callable[[], None]) -> Any:
    """Let a store pause between the moment at which it reads its clock and each step, as a busy machine does."""
    transact = store.transact

    def paused(key: str, step: Step, *, durable: bool = False) -> Any:
        def run(text: str | None, seen: Seen) -> Outcome:
            pause()
            return step(text, seen)

        return transact(key, run, durable=durable)

    store.transact = paused  # type: ignore[method-assign]
    return store


def keys(store: SharedState, **options: Any) -> ResourcePool[str]:
    return ResourcePool([Resource("a", "sk-a")], name="keys", store=store, **options)


async def limit(pool: ResourcePool[str], seconds: float) -> float:
    """Cool the key; returns when its cooldown began."""
    began = 0.0

    async def refused(key: Resource[str]) -> None:
        nonlocal began
        began = clock.now()
        raise CooldownResource(seconds, "429")

    with pytest.raises(PoolExhausted):
        await pool.run(refused, max_attempts=1)
    return began


async def used(pool: ResourcePool[str]) -> float:
    """Use the key as soon as it may be used; returns when that was."""
    await pool.run(ident, wait_for_cooldown=True)
    return clock.now()


# -- the conversion ----------------------------------------------------------------------------------------------------


def test_h05_both_conversions_err_on_the_late_side() -> None:
    offset = ClockOffset.read_between(before=10.0, stored=1011.0, after=12.0)
    assert offset == (999.0, 1001.0)
    for true in (999.0, 1000.0, 1001.0):
        assert offset.to_store(50.0) >= 50.0 + true
        assert offset.to_local(2000.0) >= 2000.0 - true


def test_h05_a_store_that_knows_its_offset_is_believed_and_one_that_does_not_has_read_since_it_was_asked() -> None:
    def step(text: str | None, seen: Seen) -> Outcome:
        return Outcome(None, "reply")

    seen = Seen(1005.0, "m", lambda member: False)
    with clock.replaced(now=lambda: 9.0):
        assert timed(step, 3.0)(None, seen).reply == ("reply", (996.0, 1002.0))
        assert timed(step, 3.0)(None, seen._replace(ahead=ClockOffset(1000.0, 1000.5))).reply[1] == (1000.0, 1000.5)


# -- pools in virtual time ---------------------------------------------------------------------------------------------


@virtual
@pytest.mark.parametrize("slow", ["the one that cools", "the one that is told"])
async def test_h05_a_cooldown_does_not_end_early_if_a_process_pauses_after_its_store_has_read_the_clock(
    slow: str,
) -> None:
    place = SharedMemory()
    stores: list[SharedState] = [place.member(), place.member()]
    pauses = iter([2.0])  # in its first exchange, by which it knows the store's clock
    pausing(stores[slow != "the one that cools"], lambda: clock.sleep(next(pauses, 0.0)))
    told, other = map(keys, stores)
    began = await limit(told, 30.0)
    assert await used(other) >= began + 30.0
    assert clock.now() <= began + 40.0


@virtual
async def test_h05_a_quota_is_kept_if_processes_pause_after_their_store_has_read_the_clock() -> None:
    place, upstream, quota = SharedMemory(), Upstream(10, None, 20.0), at_once(requests=10, per=20.0)
    states = [place.member() for _ in range(3)]
    pools = [keys(state, quota=quota) for state in states]
    work = _serve_slowly(states, itertools.cycle([0.0, 0.0, 3.0]))

    async def call(pool: ResourcePool[str]) -> None:
        async def operation(key: Resource[str]) -> None:
            upstream.arrive("a", 0)

        await pool.run(operation, wait_for_capacity=True)

    await asyncio.gather(*(call(pool) for pool in pools for _ in range(30)))
    assert upstream.exceeded == []
    assert upstream.answered == 90
    for task in work:
        task.cancel()


def _serve_slowly(states: Iterable[MemoryState], pauses: Iterator[float]) -> set[asyncio.Task[None]]:
    """Run steps one after the other, each some time after the clock was read, without holding up the event loop."""
    turn, work = asyncio.Lock(), set[asyncio.Task[None]]()

    async def run(transact: Callable[[str, Step], Future[Any]], key: str, step: Step, future: Future[Any]) -> None:
        async with turn:
            stored = clock.wall()
            await asyncio.sleep(next(pauses))
            done = transact(key, lambda text, seen: step(text, seen._replace(now=stored)))
            future.set_result(done.result())

    def slow(state: MemoryState) -> None:
        transact = state.transact

        def later(key: str, step: Step, *, durable: bool = False) -> Future[Any]:
            future: Future[Any] = Future()
            task = asyncio.ensure_future(run(transact, key, step, future))
            work.add(task)
            task.add_done_callback(work.discard)
            return future

        state.transact = later  # type: ignore[method-assign]

    for state in states:
        slow(state)
    return work


# -- real stores -------------------------------------------------------------------------------------------------------


@pytest.mark.integration
def test_h05_a_cooldown_on_sqlite_does_not_end_early_if_a_process_pauses(tmp_path: Path) -> None:
    path = tmp_path / "shared.db"
    with closing(SqliteStore(path)) as slow, closing(SqliteStore(path)) as direct:
        told, other = keys(pausing(slow, lambda: time.sleep(0.5))), keys(direct)
        assert asyncio.run(_rest_of(told, other, 1.5)) >= 1.5


@pytest.fixture
def proxy(postgres_server: PostgresServer) -> Iterator[Proxy]:
    with Proxy(postgres_server.port) as running:
        yield running


@pytest.mark.integration
@pytest.mark.parametrize("slow", ["the one that cools", "the one that is told"])
def test_h05_a_cooldown_on_postgres_does_not_end_early_if_answers_are_slow(
    proxy: Proxy, postgres_dsn: str, slow: str
) -> None:
    through = f"postgresql://postgres@127.0.0.1:{proxy.port}/{postgres_dsn.rpartition('/')[2]}"
    dsns = [through, postgres_dsn] if slow == "the one that cools" else [postgres_dsn, through]
    with PostgresStore(dsns[0], lease=30.0) as first, PostgresStore(dsns[1], lease=30.0) as second:
        proxy.delay = 0.3
        told, other = keys(first), keys(second)
        assert asyncio.run(_rest_of(told, other, 2.0)) >= 2.0


async def _rest_of(told: ResourcePool[str], other: ResourcePool[str], seconds: float) -> float:
    """Cool a key in one process; returns after how many seconds another one used it."""
    began = await limit(told, seconds)
    deadline = time.monotonic() + PATIENCE
    while not other.snapshot()["a"]["consecutive_cooldown"]:
        assert time.monotonic() < deadline, "the other one is told of the cooldown"
        await asyncio.sleep(0.01)
    return await used(other) - began


@pytest.mark.integration
def test_h05_a_process_that_pauses_in_a_transaction_keeps_the_quota_that_it_shares(tmp_path: Path) -> None:
    """The calls say when they begin; `delay` covers the time that they may take until they have said it."""
    processes: list[subprocess.Popen[str]] = []
    starts: list[float] = []
    try:
        for calls, pause in ((REQUESTS // 2, PER / 2), (REQUESTS, 0.0)):
            command = [sys.executable, str(PROGRAM), str(tmp_path / "shared.db"), str(calls), str(pause)]
            processes.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
            said = processes[-1].stdout
            assert said is not None
            starts += [float(said.readline()) for _ in range(calls)]
        for process in processes:
            process.communicate(timeout=PATIENCE)
        assert [process.returncode for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    windows = [len([one for one in starts if begin <= one < begin + PER]) for begin in starts]
    assert max(windows) <= REQUESTS
