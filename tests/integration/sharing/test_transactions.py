"""G02, G06, G23: the thread that every shared store has, shown on a third store: the one in memory."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from functools import partial
from typing import Any

import pytest

from headgate.errors import PoolClosed, StoreUnreachable, StoreWriteFailed
from headgate.sharing.memory import MemoryBackend, SharedMemory
from headgate.sharing.states import Outcome, Seen
from headgate.sharing.transactions import Transactions
from headgate.testing import check_shared_state
from tests.support.workers.support import wait_until

PATIENCE = 30.0

pytestmark = pytest.mark.integration


class Store(Transactions):
    """A third kind of store is its backend, and nothing else."""

    def __init__(self, place: SharedMemory) -> None:
        super().__init__("test-store", "memory", partial(MemoryBackend, place))

    def close(self, timeout: float = PATIENCE, *, ends: bool = False) -> None:
        super().close(timeout, ends=ends)


@pytest.fixture
def store() -> Iterator[Store]:
    made = Store(SharedMemory())
    yield made
    made.close()


def append(letter: str, text: str | None, seen: Seen) -> Outcome:
    return Outcome((text or "") + letter, text)


def test_g02_a_store_that_only_implements_the_port_below_keeps_the_whole_contract() -> None:
    place = SharedMemory()
    check_shared_state(lambda: Store(place))


def test_g23_steps_run_in_order_in_one_thread_that_starts_with_the_first_use(store: Store) -> None:
    assert not [one for one in threading.enumerate() if one.name == "test-store"]
    names: set[str] = set()

    def step(letter: str, text: str | None, seen: Seen) -> Outcome:
        names.add(threading.current_thread().name)
        return append(letter, text, seen)

    futures = [store.transact(f"k{number % 3}", partial(step, str(number))) for number in range(9)]
    assert [future.result(PATIENCE) for future in futures] == [None, None, None, "0", "1", "2", "03", "14", "25"]
    assert names == {"test-store"}


def test_g23_a_store_that_was_never_used_starts_no_thread_and_closes_at_once() -> None:
    store = Store(SharedMemory())
    store.listen("k", Deaf())
    store.close(0.0)
    assert not [one for one in threading.enumerate() if one.name == "test-store"]
    with pytest.raises(PoolClosed, match="memory is closed"):
        store.transact("k", partial(append, "a")).result(0)
    with pytest.raises(PoolClosed):
        store.listen("k", Deaf())


class Deaf:
    def woken(self) -> None: ...
    def lost(self) -> None: ...
    def unreachable(self, error: Exception) -> None: ...


class Fails(Deaf):
    def woken(self) -> None:
        raise ZeroDivisionError


class Hears(Deaf):
    def __init__(self) -> None:
        self.woken_up = threading.Event()

    def woken(self) -> None:
        self.woken_up.set()


def test_g23_a_listener_that_fails_keeps_no_other_from_hearing(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    hears = Hears()
    store.listen("k", Fails())
    store.listen("k", hears)
    store.transact("k", lambda text, seen: Outcome("x", None, [seen.member])).result(PATIENCE)
    assert hears.woken_up.wait(PATIENCE)
    assert "ZeroDivisionError" in caplog.text


def test_g23_closing_from_the_thread_of_the_store_ends_it(store: Store) -> None:
    done = store.transact("k", partial(append, "a"))
    done.add_done_callback(lambda _: store.close())
    done.result(PATIENCE)
    store.close()
    assert not [one for one in threading.enumerate() if one.name == "test-store"]


def test_g23_closing_waits_no_longer_than_it_is_told_and_refuses_what_has_not_ended(store: Store) -> None:
    begun, release = threading.Event(), threading.Event()

    def block(text: str | None, seen: Seen) -> Outcome:
        begun.set()
        release.wait(PATIENCE)
        return Outcome("x")

    blocked = store.transact("k", block)
    assert begun.wait(PATIENCE)
    waits = store.transact("k", partial(append, "a"))
    store.close(0.01)
    for future in (blocked, waits):
        with pytest.raises(PoolClosed):
            future.result(0)
    release.set()
    store.close()


def test_g02_connecting_says_how_long_it_has_waited(store: Store) -> None:
    begun, release = threading.Event(), threading.Event()
    store.transact("k", lambda text, seen: Outcome(None, (begun.set(), release.wait(PATIENCE))))
    assert begun.wait(PATIENCE)
    with pytest.raises(StoreUnreachable, match=r"0\.05 s"):
        store.connect(0.05)
    release.set()
    store.connect(PATIENCE)


class Beats(MemoryBackend):
    """Counts how often it looks."""

    looks = 0

    async def look(self) -> float:
        type(self).looks += 1
        return 0.001


def test_g22_a_store_that_always_has_a_step_to_run_still_looks_who_is_gone() -> None:
    store, looks = Transactions("test-store", "memory", partial(Beats, SharedMemory())), Beats.looks
    enough = threading.Event()

    def again(done: Future[Any]) -> None:  # in the thread of the store: there is always a step in the queue
        if Beats.looks > looks + 5:
            enough.set()
        elif done.exception() is None:
            store.transact("k", partial(append, "")).add_done_callback(again)

    store.transact("k", partial(append, "")).add_done_callback(again)
    assert enough.wait(PATIENCE)
    store.close(PATIENCE)


class Falters(Beats):
    """Cannot look each second time."""

    async def look(self) -> float:
        pause = await super().look()
        if self.looks % 2:
            raise StoreUnreachable("no answer")
        return pause


def test_g21_a_heartbeat_that_failed_is_tried_again_as_soon_as_the_lease_wants_it() -> None:
    store = Transactions("test-store", "memory", partial(Falters, SharedMemory()))
    store.connect(PATIENCE)
    first = Falters.looks
    wait_until(lambda: Falters.looks > first + 100)  # half of them fail: with a second after each that would be 50
    store.close(PATIENCE)


def test_g23_a_store_is_stopped_while_its_own_lock_is_held() -> None:
    """As by the collector, which may find a forgotten store in the thread of that store."""
    store = Store(SharedMemory())
    store.connect(PATIENCE)
    with store._lock:
        store.stop()
    store.close()
    assert not [one for one in threading.enumerate() if one.name == "test-store"]


def fails_to_be_made(host: Any) -> MemoryBackend:
    raise ZeroDivisionError


def test_g21_a_store_whose_backend_cannot_be_made_refuses_everything(caplog: pytest.LogCaptureFixture) -> None:
    store = Transactions("test-store", "memory", fails_to_be_made)
    for _ in range(2):
        with pytest.raises(PoolClosed):
            store.transact("k", partial(append, "a")).result(PATIENCE)
    store.close(PATIENCE)
    assert "ZeroDivisionError" in caplog.text


class Full(MemoryBackend):
    """Its disk has no room for a text with an x in it."""

    async def commit(self, calls: Any) -> None:
        await super().commit(calls)
        if any("x" in (call.outcome.state or "") for call in calls):
            raise StoreWriteFailed("the disk is full")


def test_g02_a_text_that_cannot_be_written_fails_alone() -> None:
    place = SharedMemory()
    store = Transactions("test-store", "memory", partial(Full, place))
    begun, release = threading.Event(), threading.Event()
    store.transact("hold", lambda text, seen: Outcome(None, (begun.set(), release.wait(PATIENCE))))
    assert begun.wait(PATIENCE)
    futures: list[Future[Any]] = [store.transact(key, partial(append, key)) for key in ("a", "x", "b")]
    release.set()
    assert [type(future.exception(PATIENCE)) for future in futures] == [type(None), StoreWriteFailed, type(None)]
    store.close(PATIENCE)


class Broken(MemoryBackend):
    async def commit(self, calls: Any) -> None:
        raise ZeroDivisionError

    async def look(self) -> float:
        raise ZeroDivisionError


def test_g21_a_defect_of_a_backend_reaches_whoever_waits(caplog: pytest.LogCaptureFixture) -> None:
    store = Transactions("test-store", "memory", partial(Broken, SharedMemory()))
    for _ in range(2):
        with pytest.raises(StoreWriteFailed, match="ZeroDivisionError"):
            store.transact("k", partial(append, "a")).result(PATIENCE)
    store.close(PATIENCE)
    assert "a defect in a shared store" in caplog.text


def test_g06_a_forked_child_begins_anew_and_runs_nothing_of_its_parent() -> None:
    code = """
import os, threading, warnings
warnings.simplefilter("ignore")
from headgate.sharing.memory import MemoryBackend, SharedMemory
from headgate.sharing.states import Outcome
from headgate.sharing.transactions import Transactions
store = Transactions("test-store", "memory", lambda host: MemoryBackend(SharedMemory(), host))
busy, release = threading.Event(), threading.Event()
store.transact("k", lambda text, seen: Outcome(None, (busy.set(), release.wait(30))))
mine = store.transact("k", lambda text, seen: Outcome(None, os.write(1, b"parent %d\\n" % os.getpid())))
busy.wait(30)
pid = os.fork()
if not pid:
    store.transact("j", lambda text, seen: Outcome(None, os.write(1, b"child %d\\n" % os.getpid())))
    store.close(30)
    os._exit(0)
os.waitpid(pid, 0)
release.set()
mine.result(30)
store.close(30)
print(pid, os.getpid())
"""
    ran = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, check=True, timeout=PATIENCE, text=True)
    child, parent, numbers = ran.stdout.splitlines()
    assert numbers.split() == [child.removeprefix("child "), parent.removeprefix("parent ")]
