"""PostgresStore while connections break, answers are lost and servers end: nothing is lost or done twice."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest

from headgate import PostgresStore
from headgate.errors import PoolClosed, StoreUnreachable
from headgate.sharing.states import Outcome
from tests.faults import Proxy
from tests.integration.stores.shared.postgres_support import (
    PATIENCE,
    Child,
    Heard,
    ask,
    children,
    eventually,
    gone,
    increment,
    read,
)
from tests.integration.stores.shared.postgres_support import who_am_i as who
from tests.postgres_server import PostgresServer
from tests.postgres_server import ask as query

pytestmark = pytest.mark.integration


@pytest.fixture
def proxy(postgres_server: PostgresServer) -> Iterator[Proxy]:
    with Proxy(postgres_server.port) as running:
        yield running


def through(proxy: Proxy, dsn: str) -> str:
    return f"postgresql://postgres@127.0.0.1:{proxy.port}/{dsn.rpartition('/')[2]}"


@pytest.fixture
def own_server() -> Iterator[PostgresServer]:
    """A server that a test may stop."""
    pytest.importorskip("asyncpg")
    server = PostgresServer()
    try:
        server.start()
        yield server
    finally:
        server.close()


def count(dsn: str) -> int:
    with PostgresStore(dsn) as store:
        text = ask(store, read)
        return int(json.loads(text)["count"])


@pytest.mark.parametrize("durable", [pytest.param(False, marks=pytest.mark.soak), True])
def test_g21_an_answer_to_a_commit_that_never_comes_changes_nothing(
    proxy: Proxy, postgres_dsn: str, durable: bool
) -> None:
    with PostgresStore(through(proxy, postgres_dsn)) as store:
        heard = Heard()
        store.listen("key", heard)
        assert ask(store, increment("me", 1), durable=durable) == 1
        for seq in range(2, 7):
            before = proxy.swallowed
            once = iter([True])
            # Only writes carry the text. The server gets it, commits, and its answer is thrown away.
            proxy.swallows = lambda data, once=once: b'"seqs"' in data and next(once, False)  # type: ignore[misc]
            assert ask(store, increment("me", seq), durable=durable) == seq
            assert proxy.swallowed == before + 1
        assert heard.losses == 0
    assert count(postgres_dsn) == 6


def test_g21_connections_that_are_cut_under_load_lose_and_repeat_nothing(
    proxy: Proxy, postgres_dsn: str, scale: float
) -> None:
    cuts = max(3, int(50 * scale**1.2))
    with PostgresStore(through(proxy, postgres_dsn)) as store, PostgresStore(through(proxy, postgres_dsn)) as other:
        stop = threading.Event()
        done = [0, 0]

        def work(number: int, used: PostgresStore) -> None:
            while not stop.is_set():
                done[number] += 1
                ask(used, increment(str(number), done[number]))

        threads = [threading.Thread(target=work, args=pair) for pair in enumerate((store, other))]
        for thread in threads:
            thread.start()
        for _ in range(cuts):
            before = list(done)
            eventually(lambda before=before: done[0] > before[0] + 3, "work goes on")  # type: ignore[misc]
            proxy.cut()
        stop.set()
        for thread in threads:
            thread.join()
    assert count(postgres_dsn) == sum(done)


def test_g21_while_the_server_is_away_steps_wait_and_everybody_is_told_once(
    proxy: Proxy, postgres_dsn: str, scale: float
) -> None:
    seconds = 30.0 if scale >= 1 else 2.0
    with PostgresStore(through(proxy, postgres_dsn), lease=60.0) as store:
        heard = Heard()
        store.listen("key", heard)
        ask(store, increment("me", 1))
        me = ask(store, who)
        proxy.is_refusing = True
        proxy.cut()
        future = store.transact("key", increment("me", 2))
        eventually(lambda: heard.errors, "it is told")
        began = time.monotonic()
        connections = proxy.connections
        while time.monotonic() < began + seconds:  # real time is what this is about
            assert not future.done()
            time.sleep(0.1)
        assert proxy.connections - connections < 12 * seconds, "it is tried with pauses"
        wakes = heard.wakes
        proxy.is_refusing = False
        assert future.result(PATIENCE) == 2
        eventually(lambda: heard.wakes > wakes, "everybody looks again")
        assert len(heard.errors) == 1
        assert isinstance(heard.errors[0], StoreUnreachable)
        assert f"127.0.0.1:{proxy.port}" in str(heard.errors[0])
        assert ask(store, who) == me, "the lease was longer than that"


@pytest.mark.soak
def test_g20_a_member_that_is_cut_off_longer_than_its_lease_has_lost_it(proxy: Proxy, postgres_dsn: str) -> None:
    with PostgresStore(through(proxy, postgres_dsn), lease=1.5) as store, PostgresStore(postgres_dsn) as other:
        heard = Heard()
        store.listen("key", heard)
        me = ask(store, who)
        proxy.is_refusing = True
        proxy.cut()
        eventually(lambda: heard.losses, "it is told although the server does not answer")
        assert store.deadline < time.monotonic()
        eventually(lambda: ask(other, lambda _, seen: Outcome(None, seen.is_gone(me))), "the others know it too")
        proxy.is_refusing = False
        assert ask(store, who) != me
        assert heard.losses == 1
        assert store.deadline > time.monotonic()


def test_g21_a_server_that_goes_silent_is_left_for_a_new_connection(proxy: Proxy, postgres_dsn: str) -> None:
    with PostgresStore(through(proxy, postgres_dsn), lease=5.0) as store:
        heard = Heard()
        store.listen("key", heard)
        ask(store, increment("me", 1))
        proxy.is_silent = True
        future = store.transact("key", increment("me", 2))
        eventually(lambda: heard.errors, "silence is noticed")
        assert "no answer within" in str(heard.errors[0])
        proxy.is_silent = False
        assert future.result(PATIENCE) == 2


def test_g21_sessions_that_the_server_ends_are_made_again(postgres_server: PostgresServer, postgres_dsn: str) -> None:
    with PostgresStore(postgres_dsn) as store:
        ask(store, increment("me", 1))
        for seq in range(2, 5):
            query(
                postgres_server.dsn(),
                "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE datname = $1",
                postgres_dsn.rpartition("/")[2],
            )
            assert ask(store, increment("me", seq)) == seq


def test_g22_lost_notifications_change_nothing_but_latency(proxy: Proxy, postgres_dsn: str) -> None:
    with PostgresStore(through(proxy, postgres_dsn), lease=3.0) as store, PostgresStore(postgres_dsn) as waker:
        heard = Heard()
        store.listen("key", heard)
        me = ask(store, who)
        proxy.drops = lambda data: data.startswith(b"A")  # NotificationResponse, which comes by itself
        ask(waker, lambda _, seen: Outcome("x", None, [me]))
        heard.any.clear()
        assert heard.any.wait(PATIENCE), "the heartbeat lets it look"


def test_g22_duplicated_and_foreign_notifications_only_wake(postgres_dsn: str) -> None:
    with PostgresStore(postgres_dsn) as store:
        heard, other = Heard(), Heard()
        store.listen("key", heard)
        store.listen("other", other)
        me = ask(store, who)

        def wake(key: str) -> bool:
            """Send a notification. Returns whether one has woken the first listener alone."""
            query(postgres_dsn, "SELECT pg_notify($1, $2)", f"headgate_{me}", key)
            return heard.wakes > other.wakes

        eventually(lambda: wake("key"), "it listens: what was sent before that is lost")
        alone = heard.wakes - other.wakes
        for _ in range(5):
            wake("key")
        wake("no such key")
        # Both are woken when a connection is made and at a heartbeat. Those of other keys sleep on otherwise.
        eventually(lambda: heard.wakes - other.wakes >= alone + 5, "each wakes")
        before_other = other.wakes
        query(postgres_dsn, "SELECT pg_notify('headgate_members', 'nobody')")
        eventually(lambda: other.wakes > before_other, "a member that is gone is news for all")
        assert heard.losses == 0


@pytest.mark.parametrize(
    ("mode", "durable"), [("immediate", "durable"), pytest.param("fast", "kept in memory", marks=pytest.mark.soak)]
)
def test_g21_a_restart_under_load_from_two_processes_loses_and_repeats_nothing(
    own_server: PostgresServer, mode: str, durable: str, scale: float
) -> None:
    dsn = own_server.dsn()
    workers = [Child("counts", dsn, name, durable) for name in ("one", "two")]
    with children(*workers):
        for worker in workers:
            assert worker.line() == "began"
        for _ in range(max(1, int(20 * scale**1.3))):
            before = count(dsn)
            own_server.restart(mode)
            eventually(lambda before=before: count(dsn) > before + 10, "work goes on by itself")  # type: ignore[misc]
        done = sum(int(worker.end()) for worker in workers)
    assert count(dsn) == done


def test_g21_after_a_crash_of_the_server_all_members_are_gone(own_server: PostgresServer) -> None:
    """Texts that are not durable may then be older than what members know, so what these hold must not count."""
    with PostgresStore(own_server.dsn()) as store, PostgresStore(own_server.dsn()) as other:
        heard = Heard()
        store.listen("key", heard)
        me, them = ask(store, who), ask(other, who)
        own_server.restart("fast")
        assert (ask(store, who), ask(other, who)) == (me, them), "a clean restart loses nothing"
        assert heard.losses == 0
        own_server.restart("immediate")
        now = ask(store, who)
        assert now not in (me, them)
        eventually(lambda: heard.losses == 1, "it is told, once")
        assert ask(other, who) != them
        said = ask(store, lambda _, seen: Outcome(None, [seen.is_gone(me), seen.is_gone(them), seen.is_gone(now)]))
        assert said == [True, True, False], "both have said that they took new ids"


@pytest.mark.parametrize("crash", ["of the server", "of one of its processes"])
def test_g25_after_a_crash_a_member_that_is_cut_off_counts_as_alive_until_its_lease_is_over(
    own_server: PostgresServer, crash: str
) -> None:
    with Proxy(own_server.port) as proxy, PostgresStore(own_server.dsn(), lease=90.0) as direct:
        with PostgresStore(f"postgresql://postgres@127.0.0.1:{proxy.port}/postgres", lease=4.0) as cut_off:
            ask(direct, who)
            member = ask(cut_off, who)
            proxy.is_silent = True
            deadline = cut_off.deadline
            if crash == "of the server":
                own_server.restart("immediate")
            else:
                others = "SELECT max(pid) FROM pg_stat_activity WHERE datname IS NOT NULL AND pid <> pg_backend_pid()"
                os.kill(own_server.ask(others), signal.SIGKILL)
            heard = Heard()
            direct.listen("key", heard)
            while not ask(direct, gone(member)):
                heard.any.clear()
                assert heard.any.wait(20.0), "it is told to look when the lease is over, long before a heartbeat"
            assert time.monotonic() >= deadline


def test_g25_after_a_crash_a_member_that_comes_back_has_given_up_its_former_id_at_once(
    own_server: PostgresServer,
) -> None:
    with PostgresStore(own_server.dsn(), lease=90.0) as store, PostgresStore(own_server.dsn(), lease=90.0) as other:
        members = ask(store, who), ask(other, who)
        own_server.restart("immediate")
        began = time.monotonic()
        eventually(lambda: all(ask(store, gone(one)) for one in members), "nobody waits for the end of a lease")
        assert time.monotonic() < began + 25.0, "nor for a heartbeat"


@pytest.mark.soak
def test_g21_a_store_is_closed_while_the_server_is_away(proxy: Proxy, postgres_dsn: str) -> None:
    store = PostgresStore(through(proxy, postgres_dsn))
    ask(store, increment("me", 1))
    proxy.is_silent = True
    futures = [store.transact(f"key {number}", increment("me", 2)) for number in range(3)]
    began = time.monotonic()
    store.close()
    assert time.monotonic() - began < 20.0
    for future in futures:
        assert isinstance(future.exception(PATIENCE), PoolClosed)


def test_g21_another_server_takes_over(own_server: PostgresServer) -> None:
    standby = own_server.standby()
    try:
        standby.start()
        hosts = f"127.0.0.1:{own_server.port},127.0.0.1:{standby.port}"
        with PostgresStore(f"postgresql://postgres@{hosts}/postgres") as store:
            heard = Heard()
            store.listen("key", heard)
            assert ask(store, increment("me", 1), durable=True) == 1
            me = ask(store, who)
            written = own_server.ask("SELECT pg_current_wal_lsn()")
            follows = "SELECT pg_last_wal_replay_lsn() >= $1"
            eventually(lambda: standby.ask(follows, written), "the standby follows")
            own_server.stop()
            future = store.transact("key", increment("me", 2), durable=True)
            eventually(lambda: heard.errors, "nobody takes writes now")
            standby.promote()
            assert future.result(PATIENCE) == 2
            assert ask(store, who) != me, "the new server knows no members"
            assert heard.losses == 1
    finally:
        standby.close()
