"""PostgresStore with one server that behaves: the contracts, order, listeners, time, forks and ends."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from headgate import PostgresStore
from headgate.errors import InvalidArgument, PoolClosed, StoreWriteFailed
from headgate.sharing.states import Outcome, Seen, SharedState, Step
from headgate.testing import check_store
from tests.integration.stores.shared.postgres_support import (
    PATIENCE,
    Child,
    Heard,
    ask,
    children,
    eventually,
    increment,
    read,
)
from tests.integration.stores.shared.postgres_support import who_am_i as who
from tests.postgres_server import ask as query

pytestmark = pytest.mark.integration


def test_g02_a_postgres_store_keeps_the_contract_of_shared_states(postgres_dsn: str) -> None:
    suite = pytest.importorskip("headgate.testing.shared_states")
    suite.check_shared_state(lambda: PostgresStore(postgres_dsn))


def test_g03_a_postgres_store_keeps_the_contract_of_stores(postgres_dsn: str) -> None:
    check_store(lambda: PostgresStore(postgres_dsn))


def test_g02_making_a_store_does_nothing_and_imports_no_driver() -> None:
    code = (
        "import sys, threading, headgate; before = threading.active_count();"
        "store = headgate.PostgresStore('postgresql://nobody@192.0.2.1/none');"
        "assert store.shared and store.deadline < 0; store.close(); store.close();"
        "print('asyncpg' in sys.modules, threading.active_count() - before, isinstance(store, object))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["False", "0", "True"], done.stderr


def test_g02_without_the_driver_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_spec("asyncpg") is not None
    monkeypatch.setattr("headgate.sharing.postgres.errors.find_spec", lambda name: None)
    with pytest.raises(InvalidArgument, match=r'pip install "headgate\[postgres\]"'):
        PostgresStore("postgresql://localhost/db")


def test_g02_many_stores_make_the_tables_at_once(postgres_dsn: str) -> None:
    stores = [PostgresStore(postgres_dsn) for _ in range(6)]
    try:
        futures = [store.transact("key", increment(str(n), 1)) for n, store in enumerate(stores)]
        assert sorted(future.result(PATIENCE) for future in futures) == [1, 2, 3, 4, 5, 6]
        assert isinstance(stores[0], SharedState)
    finally:
        for store in stores:
            store.close()


def test_g23_one_store_serves_threads_and_event_loops(postgres_dsn: str) -> None:
    counts: list[int] = []

    async def on_a_loop(store: PostgresStore, who: str) -> None:
        for seq in range(1, 11):
            counts.append(await asyncio.wrap_future(store.transact("key", increment(who, seq))))

    with PostgresStore(postgres_dsn) as store:
        threads = [
            threading.Thread(target=lambda name=str(n): asyncio.run(on_a_loop(store, name)))  # type: ignore[misc]
            for n in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(counts) == [*range(1, 41)]


def test_g23_the_lease_is_renewed_while_the_loop_of_the_user_is_blocked(postgres_dsn: str) -> None:
    async def block(store: PostgresStore) -> tuple[float, float]:
        before = store.deadline
        time.sleep(2.0)  # noqa: ASYNC251 - blocks the loop, which is the point
        return before, store.deadline

    with PostgresStore(postgres_dsn, lease=1.5) as store:
        heard = Heard()
        store.listen("key", heard)
        store.connect(PATIENCE)
        me = ask(store, who)
        before, after = asyncio.run(block(store))
        assert after > before
        assert ask(store, who) == me
        assert heard.losses == 0
        assert heard.wakes >= 2, "a heartbeat lets everybody look"


def test_g24_time_never_goes_back(postgres_dsn: str) -> None:
    """The clock of the server cannot be set back here; a text that was written later is the same to a store."""

    def now(_: str | None, seen: Seen) -> Outcome:
        return Outcome(str(seen.now), seen.now)

    with PostgresStore(postgres_dsn) as store, PostgresStore(postgres_dsn) as other:
        first = ask(store, now)
        assert abs(first - time.time()) < 3600
        query(postgres_dsn, "UPDATE headgate.texts SET at = at + 1000")
        second = ask(store, now)
        assert second >= first + 1000
        assert ask(store, now, "another key") >= second, "a store remembers the newest time that it saw"
        assert ask(other, now) >= second, "and the text remembers it for the others"


def test_g13_texts_that_have_expired_are_deleted(postgres_dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headgate.sharing.postgres.backend._SWEEP_AFTER", 4)

    def put(expires: float | None) -> Step:
        return lambda _, seen: Outcome("text", expires=None if expires is None else seen.now + expires)

    count = "SELECT string_agg(key, ' ' ORDER BY key) FROM headgate.texts"
    with PostgresStore(postgres_dsn) as store:
        for name, expires in (("later", 6000.0), ("never", None), ("old", 500.0), ("renewed", 500.0)):
            ask(store, put(expires), name, durable=True)
        ask(store, lambda _, seen: Outcome("again"), "renewed", durable=True)
        assert query(postgres_dsn, count) == "later never old renewed", "it has been swept once, and nothing was old"
        query(postgres_dsn, "UPDATE headgate.texts SET at = at + 1000")  # time never goes back: now it is later
        ask(store, read, "never", durable=True)
        for number in (1, 2, 3):  # with the one that was renewed four texts
            ask(store, increment("a", number), "another", durable=True)
        ask(store, read, "another", durable=True)  # steps have one order: now it has been swept
        assert query(postgres_dsn, count) == "another later never renewed"
        assert ask(store, read, "old", durable=True) is None


def test_g02_a_text_that_is_changed_all_the_time_does_not_grow_its_table(
    postgres_dsn: str, monkeypatch: pytest.MonkeyPatch, scale: float
) -> None:
    monkeypatch.setattr("headgate.sharing.postgres.upkeep.EVERY", 50)
    vacuums = "SELECT vacuum_count FROM pg_stat_user_tables WHERE schemaname = 'headgate' AND relname = 'texts'"
    sizes = "SELECT pg_total_relation_size('headgate.texts') / pg_column_size(state) FROM headgate.texts"
    with PostgresStore(postgres_dsn) as store:
        ask(store, read)
        query(postgres_dsn, "ALTER TABLE headgate.texts SET (autovacuum_enabled = off, toast.autovacuum_enabled = off)")
        for _ in range(4 if scale >= 1 else 2):
            before = query(postgres_dsn, vacuums)
            for _ in range(250):
                text = os.urandom(2500).hex()  # larger than what PostgreSQL keeps in the row itself
                ask(store, lambda _, seen, text=text: Outcome(text))
            eventually(lambda before=before: query(postgres_dsn, vacuums) > before, "a vacuum")
        most = 700 if scale >= 1 else 350
        assert query(postgres_dsn, sizes) < most, "without vacuum there is room for every text that was written"


def test_g24_rows_that_others_wrote_give_a_clear_error(postgres_dsn: str) -> None:
    with PostgresStore(postgres_dsn) as store:
        ask(store, increment("a", 1), "broken")
        query(postgres_dsn, "UPDATE headgate.texts SET state = '\\xff00fe'")
        with pytest.raises(StoreWriteFailed, match=r"'broken'.*is not text of headgate"):
            ask(store, read, "broken")
        assert ask(store, increment("a", 1), "whole") == 1, "the other texts can be used"


def test_g24_hostile_lines_of_a_journal_run_nothing(postgres_dsn: str) -> None:
    hostile = (
        b'{"kind":"end","at":2.0,"task":1,"status":"failed","error":{"type":"os:system","text":"true","traceback":""}}\n'
        b'{"kind":"end","at":2.0,"task":2,"status":"completed","result":{"$opaque":"x","$pickle":"gASVCAAAAAAAAACMBG5vcGWULg=="}}\n'
        b"\xff\xfe garbage\n"
    )
    with PostgresStore(postgres_dsn) as store:
        store.open("pool", {}, 10).close()
        query(postgres_dsn, "UPDATE headgate.chunks SET lines = lines || $1", hostile)
        journal = store.open("pool", {}, 10)
        failed, opaque = journal.tasks
        assert failed["error"] == {"type": "os:system", "text": "true", "traceback": ""}
        assert type(opaque["result"]).__name__ == "Opaque"
        journal.close()


def test_g24_nothing_but_texts_is_stored(postgres_dsn: str) -> None:
    with PostgresStore(postgres_dsn) as store:
        ask(store, lambda _, seen: Outcome("{}", object()))
        columns = query(
            postgres_dsn,
            "SELECT array_agg(DISTINCT column_name::text) FROM information_schema.columns"
            " WHERE table_schema = 'headgate'",
        )
    assert set(columns) == {
        *("key", "version", "at", "state", "id", "lease_until", "host", "pid", "pool_id", "epoch", "seq", "size"),
        *("member", "opened_at", "journal", "n", "lines", "expires", "former"),
    }


def test_g21_a_step_that_fails_on_the_server_does_not_stop_the_next(postgres_dsn: str) -> None:
    with PostgresStore(postgres_dsn) as store:
        ask(store, increment("a", 1))
        query(postgres_dsn, "ALTER TABLE headgate.texts ADD CONSTRAINT small CHECK (length(state) < 1000)")
        with pytest.raises(StoreWriteFailed, match="small"):
            ask(store, lambda _, seen: Outcome("x" * 1000))
        assert ask(store, increment("a", 2)) == 2


def test_g21_many_stores_on_one_key_lose_nothing(postgres_dsn: str, scale: float) -> None:
    times = max(20, int(200 * scale))
    stores = [PostgresStore(postgres_dsn) for _ in range(4)]
    try:

        def work(number: int) -> None:
            for seq in range(1, times + 1):  # one at a time: each is a transaction of its own, and they collide
                ask(stores[number], increment(str(number), seq))

        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert ask(stores[0], increment("last", 1)) == 4 * times + 1
    finally:
        for store in stores:
            store.close()


def test_g21_a_step_that_others_overtake_again_and_again_is_run_with_the_row_locked(postgres_dsn: str) -> None:
    runs = 0

    def overtaken(text: str | None, _: Seen) -> Outcome:
        nonlocal runs
        runs += 1
        locked = query_elsewhere(
            postgres_dsn,
            "WITH found AS (SELECT key FROM headgate.texts WHERE key = 'key' FOR UPDATE SKIP LOCKED), written AS ("
            "UPDATE headgate.texts SET version = version + 1 FROM found WHERE texts.key = found.key RETURNING 1)"
            " SELECT count(*) = 0 FROM written",
        )
        return Outcome(f"{text}, {'locked' if locked else 'overtaken'}", runs)

    with PostgresStore(postgres_dsn) as store:
        ask(store, lambda _, seen: Outcome("begun"))
        assert ask(store, overtaken) > 1
        assert ask(store, read) == "begun, locked"
        assert ask(store, lambda _, seen: Outcome("goes on")) is None


def query_elsewhere(dsn: str, statement: str) -> bool:
    """Run a statement in a thread of its own, because steps run where a loop runs."""
    found: list[bool] = []
    thread = threading.Thread(target=lambda: found.append(query(dsn, statement)))
    thread.start()
    thread.join()
    return found[0]


def test_g02_after_closing_steps_get_an_error_and_the_member_is_gone(postgres_dsn: str) -> None:
    store = PostgresStore(postgres_dsn)
    ask(store, who)
    store.close()
    store.close()
    assert store.deadline < 0
    assert repr(store).endswith("closed>")
    with pytest.raises(PoolClosed):
        ask(store, who)
    with pytest.raises(PoolClosed):
        store.connect(1.0)
    assert query(postgres_dsn, "SELECT count(*) FROM headgate.members") == 0


def test_g02_closing_in_a_listener_does_not_wait_for_itself(postgres_dsn: str) -> None:
    store = PostgresStore(postgres_dsn, lease=1.0)
    closed = threading.Event()

    class Closer(Heard):
        def woken(self) -> None:
            store.close()
            closed.set()

    store.connect(PATIENCE)
    store.listen("key", Closer())
    assert closed.wait(PATIENCE)
    eventually(lambda: query(postgres_dsn, "SELECT count(*) FROM headgate.members") == 0, "the row is deleted")


def test_g02_a_program_that_forgets_to_close_ends_at_once_and_is_gone(postgres_dsn: str) -> None:
    child = Child("forgets", postgres_dsn)
    with children(child):
        member = child.line()
        assert child.end() == ""
    assert member
    assert query(postgres_dsn, "SELECT count(*) FROM headgate.members") == 0


def test_g02_a_forked_child_is_another_member(postgres_dsn: str) -> None:
    code = """
import os, sys, json
from headgate import PostgresStore
from tests.integration.stores.shared.postgres_support import ask, who_am_i, increment
store = PostgresStore(sys.argv[1])
mine = ask(store, who_am_i)
reader, writer = os.pipe()
child = os.fork()
if child == 0:
    os.write(writer, ask(store, who_am_i).encode())
    for seq in range(1, 21):
        ask(store, increment("child", seq))
    store.close()
    sys.exit(0)
for seq in range(1, 21):
    ask(store, increment("parent", seq))
_, status = os.waitpid(child, 0)
theirs = os.read(reader, 100).decode()
print(json.dumps([status, mine != theirs, ask(store, who_am_i) == mine, ask(store, increment("last", 1))]))
store.close()
"""
    root = str(Path(__file__).parents[4])
    command = [sys.executable, "-W", "error", "-c", code, postgres_dsn]
    done = subprocess.run(command, capture_output=True, text=True, cwd=root, timeout=120)
    assert (done.stdout.strip(), done.stderr) == ("[0, true, true, 41]", "")


def test_g22_a_listener_that_raises_does_not_keep_others_from_hearing(
    postgres_dsn: str, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken(Heard):
        def woken(self) -> None:
            raise ValueError("mine")

    with PostgresStore(postgres_dsn) as store:
        heard = Heard()
        store.listen("key", Broken())
        store.listen("key", heard)
        me = ask(store, who)
        heard.any.clear()
        ask(store, lambda _, seen: Outcome("x", None, [me]))
        assert heard.any.wait(PATIENCE)
    assert "a listener of a store failed" in caplog.text
