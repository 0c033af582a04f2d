"""G02, G22, G23 for SqliteStore inside one process: threads, event loops, time, closing."""

from __future__ import annotations

import asyncio
import fcntl
import gc
import math
import sqlite3
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import CancelledError
from contextlib import closing
from pathlib import Path

import pytest

from headgate.core.clock import clock
from headgate.errors import InvalidType, PoolClosed
from headgate.sharing.states import Outcome, Seen, Step
from headgate.stores import SqliteStore
from headgate.testing import check_shared_state
from tests.integration.stores.shared.support import (
    PATIENCE,
    Listener,
    ask,
    eventually,
    gone,
    increment,
    read,
    wake,
    who,
    write,
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "shared.db"


@pytest.fixture
def store(path: Path) -> Iterator[SqliteStore]:
    store = SqliteStore(path)
    yield store
    store.close()


def test_g02_a_sqlite_store_keeps_the_contract(path: Path) -> None:
    check_shared_state(lambda: SqliteStore(path))


def test_g02_a_member_lives_as_long_as_its_process(store: SqliteStore) -> None:
    assert store.deadline == math.inf


@pytest.mark.parametrize("durable", [False, True])
def test_g02_keys_and_texts_may_have_any_characters(path: Path, store: SqliteStore, durable: bool) -> None:
    odd = ["", "\0", "a\0b", "\ud800", "\udfff\ud800", "\U0001f600", "a" * 5000, "\u00e9", "e\u0301"]
    for key in odd:
        ask(store, write(f"text of {key}"), key, durable=durable)
    store.close()
    again = SqliteStore(path)
    for key in odd:
        assert ask(again, read, key, durable=durable) == f"text of {key}"
    again.close()


def test_g13_texts_that_have_expired_are_deleted_some_at_a_time(path: Path, store: SqliteStore) -> None:
    def put(expires: float | None) -> Step:
        return lambda _, seen: Outcome("text", expires=None if expires is None else seen.now + expires)

    def keys() -> list[str]:
        with closing(sqlite3.connect(path)) as database:
            return [key for (key,) in database.execute("SELECT key FROM texts")]

    for number in range(150):
        store.transact(f"old-{number}", put(3600.0), durable=True)
    for name, expires in (("later", 7200.0), ("never", None), ("renewed", 3600.0)):
        ask(store, put(expires), name, durable=True)
    ask(store, write("again"), "renewed", durable=True)
    assert len(keys()) == 153
    with closing(sqlite3.connect(path)) as database, database:  # an hour passes
        database.execute("UPDATE texts SET expires = expires - 3600")
    ask(store, write("text"), "another", durable=True)
    left = len(keys())
    assert 4 <= left < 154, "so many in one transaction"
    assert left > 80, "and not all"
    for number in range(3):
        ask(store, write(f"text {number}"), "another", durable=True)
    assert sorted(keys()) == ["another", "later", "never", "renewed"]
    assert ask(store, read, "old-1", durable=True) is None


def test_g02_an_expiry_that_is_no_number_is_refused(store: SqliteStore) -> None:
    with pytest.raises(InvalidType, match="expires of an Outcome"):
        ask(store, lambda text, seen: Outcome("text", expires="soon"), durable=True)  # type: ignore[arg-type]


def test_g22_long_and_odd_keys_are_woken_too(path: Path) -> None:
    one, two = SqliteStore(path, heartbeat=600.0), SqliteStore(path, heartbeat=600.0)
    name = ask(one, who)
    for key in ("", "\ud800", "x" * 5000, "\0"):
        listener = Listener()
        stop = one.listen(key, listener)
        ask(two, wake(name), key)
        listener.wait()
        stop()
    one.close()
    two.close()


def test_g23_threads_and_event_loops_share_one_store(store: SqliteStore) -> None:
    async def work() -> list[int]:
        loop = asyncio.get_running_loop()
        woken = asyncio.Event()

        class OnLoop(Listener):
            def woken(self) -> None:
                loop.call_soon_threadsafe(woken.set)

        stop = store.listen("k", OnLoop())
        name = await asyncio.wrap_future(store.transact("k", who))
        store.transact("k", wake(name))
        await asyncio.wait_for(woken.wait(), PATIENCE)
        stop()
        return await asyncio.gather(*(asyncio.wrap_future(store.transact("n", increment)) for _ in range(50)))

    results: list[list[int]] = []
    threads = [threading.Thread(target=lambda: results.append(asyncio.run(work()))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(number for numbers in results for number in numbers) == [*range(1, 151)]
    assert all(numbers == sorted(numbers) for numbers in results)


def test_g23_a_blocked_event_loop_does_not_delay_a_heartbeat(path: Path) -> None:
    store = SqliteStore(path, heartbeat=0.05)
    listener = Listener()
    stop = store.listen("k", listener)

    async def block() -> None:
        await asyncio.wrap_future(store.transact("k", who))
        for _ in range(3):
            listener.wait()  # blocks this loop

    asyncio.run(block())
    stop()
    store.close()


def test_g22_a_listener_that_fails_does_not_deafen_the_others(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Listener):
        def woken(self) -> None:
            raise RuntimeError("broken listener")

    store = SqliteStore(path, heartbeat=600.0)
    name = ask(store, who)
    good = Listener()
    stops = [store.listen("k", Broken()), store.listen("k", good), store.listen("k", good)]
    ask(store, wake(name))
    good.wait()
    good.wait()
    assert "broken listener" in caplog.text
    stops[1]()
    ask(store, wake(name))
    good.wait()
    assert not good.wakes.acquire(blocking=False), "only one of the two was stopped"
    for stop in stops:
        stop()
    store.close()


# -- steps -------------------------------------------------------------------------------------------------------------


def test_g02_queued_steps_share_a_transaction_and_see_each_other(store: SqliteStore) -> None:
    ask(store, read)
    running, release = threading.Event(), threading.Event()

    def block(text: str | None, _: Seen) -> Outcome:
        running.set()
        release.wait(PATIENCE)
        return Outcome(None)

    def refuse(text: str | None, _: Seen) -> Outcome:
        raise ValueError(text)

    store.transact("other", block)
    assert running.wait(PATIENCE)
    times = [store.transact("k", lambda text, seen: Outcome(f"{text or ''}x", seen.now)) for _ in range(20)]
    bad = store.transact("k", refuse)
    cancelled = store.transact("k", write("cancelled"))
    assert cancelled.cancel()
    last = store.transact("k", read)
    release.set()
    assert last.result(PATIENCE) == "x" * 20
    assert len({future.result() for future in times}) == 1, "one transaction, one time"
    with pytest.raises(ValueError, match="x" * 20):
        bad.result()
    with pytest.raises(CancelledError):
        cancelled.result()


@pytest.mark.parametrize("wrong", [None, "text", Outcome(3), Outcome(b"x"), Outcome("x", 1, [1])])  # type: ignore[arg-type]
def test_g02_a_step_that_returns_something_else_fails_alone(store: SqliteStore, wrong: object) -> None:
    with pytest.raises(InvalidType, match="Outcome"):
        ask(store, lambda _, seen: wrong)  # type: ignore[arg-type, return-value]
    assert ask(store, increment) == 1


@pytest.mark.parametrize("error", [StopIteration(), SystemExit(3), KeyboardInterrupt(), GeneratorExit()])
def test_g02_whatever_a_step_raises_the_thread_goes_on(store: SqliteStore, error: BaseException) -> None:
    def refuse(_: str | None, seen: Seen) -> Outcome:
        raise error

    with pytest.raises((RuntimeError, type(error))):
        ask(store, refuse)
    assert ask(store, increment) == 1


def test_g02_durable_steps_keep_their_place_in_the_order(store: SqliteStore) -> None:
    ran: list[int] = []
    futures = [
        store.transact(
            f"{number % 4 == 3}", lambda _, seen, n=number: Outcome("x", ran.append(n)), durable=number % 4 == 3
        )
        for number in range(50)
    ]
    for future in futures:
        future.result(PATIENCE)
    assert ran == [*range(50)]


# -- time --------------------------------------------------------------------------------------------------------------


def now(store: SqliteStore) -> float:
    found: float = ask(store, lambda _, seen: Outcome(None, seen.now))
    return found


def test_g02_time_never_goes_back_when_the_clock_is_set_back(path: Path, store: SqliteStore) -> None:
    other = SqliteStore(path)
    before = now(store)
    assert abs(before - time.time()) < 5
    with clock.replaced(wall=lambda: time.time() - 3600):
        middle = now(other)
        assert before <= middle <= now(store) < before + 60, "and it goes on"
        late = SqliteStore(path)
        assert middle <= now(late) < before + 60
        late.close()
    other.close()


def test_g02_time_follows_a_clock_that_is_set_forward(path: Path, store: SqliteStore) -> None:
    other = SqliteStore(path)
    before = now(store)
    assert now(other) >= before
    with clock.replaced(wall=lambda: time.time() + 3600):
        assert now(store) >= before + 3590
        assert now(other) >= before + 3590
    assert now(other) >= before + 3590, "and does not go back with it"
    late = SqliteStore(path)
    assert now(late) >= before + 3590
    late.close()
    other.close()


# -- closing -----------------------------------------------------------------------------------------------------------


def test_g02_closing_runs_what_is_queued_and_refuses_the_rest(path: Path) -> None:
    store = SqliteStore(path)
    futures = [store.transact("k", increment, durable=True) for _ in range(200)]
    store.close()
    assert [future.result(0) for future in futures] == [*range(1, 201)]
    with pytest.raises(PoolClosed, match=r"shared\.db is closed"):
        store.transact("k", increment).result(0)
    with pytest.raises(PoolClosed):
        store.connect(1)
    store.close()


def test_g02_a_heartbeat_that_is_due_when_a_store_is_closed_does_not_open_it_again(path: Path) -> None:
    """Its thread would leave the lock of a member behind, whom all others take to be alive."""
    store = SqliteStore(path, heartbeat=0.05)
    ask(store, read)
    begun = threading.Event()

    def slow(_: str | None, seen: Seen) -> Outcome:
        begun.set()
        eventually(lambda: store.is_closed)
        time.sleep(0.1)  # the end of the thread is asked for by now, and the heartbeat is due: both in the next turn
        return Outcome(None, seen.member)

    slowly = store.transact("k", slow)
    assert begun.wait(PATIENCE)
    store.close()
    with closing(SqliteStore(path)) as other:
        assert ask(other, gone(slowly.result(PATIENCE))) == [True]
        assert [file.stem for file in Path(f"{path}-members").glob("*.lock")] == [ask(other, who)]


def test_g02_a_store_may_be_closed_by_a_callback_of_its_own_thread(path: Path) -> None:
    store = SqliteStore(path)
    first = store.transact("k", increment)
    first.add_done_callback(lambda _: store.close())
    assert first.result(PATIENCE) == 1
    eventually(lambda: store.is_closed and not [one for one in threading.enumerate() if one.name == "headgate-sqlite"])
    other = SqliteStore(path)
    assert ask(other, read) == "1"
    other.close()


def test_g02_a_store_that_nobody_holds_any_more_is_closed(path: Path) -> None:
    other = SqliteStore(path, heartbeat=600.0)
    store = SqliteStore(path)
    name = ask(store, who)
    assert ask(other, gone(name)) == [False]
    reference = weakref.ref(store)
    del store
    gc.collect()
    assert reference() is None
    eventually(lambda: ask(other, gone(name)) == [True])
    other.close()


def test_g02_closing_gives_up_when_somebody_keeps_the_lock(path: Path) -> None:
    store = SqliteStore(path)
    ask(store, read)
    (gate,) = path.parent.glob("*-boot-*-lock")
    with open(gate) as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        waiting = [store.transact("k", increment) for _ in range(3)]
        store.close(timeout=0.1)
        for future in waiting:
            with pytest.raises(PoolClosed):
                future.result(0)
    other = SqliteStore(path)
    assert ask(other, read) is None, "what was told to be refused is not run"
    other.close()
