"""Journals in a PostgreSQL database: one writer, also when connections break, processes die and servers restart."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
from collections.abc import Iterator

import pytest

from headgate import PostgresStore
from headgate.errors import StoreLocked, StoreWriteFailed
from headgate.stores import Journal
from headgate.testing.stores import end, submit
from tests.faults import Proxy
from tests.integration.stores.shared.postgres_support import Child, children
from tests.postgres_server import PostgresServer
from tests.postgres_server import ask as query

pytestmark = pytest.mark.integration


@pytest.fixture
def proxy(postgres_server: PostgresServer) -> Iterator[Proxy]:
    with Proxy(postgres_server.port) as running:
        yield running


def through(proxy: Proxy, dsn: str) -> str:
    return f"postgresql://postgres@127.0.0.1:{proxy.port}/{dsn.rpartition('/')[2]}"


def append(journal: Journal, *numbers: int) -> list[StoreWriteFailed | None]:
    """Append tasks and their ends, one after the other; returns how each was answered."""

    async def work() -> list[StoreWriteFailed | None]:
        answers: list[StoreWriteFailed | None] = []
        for number in numbers:
            for entry in (submit(number), end(number, result=(number,))):
                answer: asyncio.Future[StoreWriteFailed | None] = asyncio.get_running_loop().create_future()
                journal.append(entry, answer.set_result)
                answers.append(await answer)
        return answers

    return asyncio.run(work())


def stored(dsn: str, pool_id: str = "pool") -> list[int]:
    with PostgresStore(dsn) as store:
        journal = store.open(pool_id, {}, 1000)
        try:
            return [task["task"] for task in journal.tasks if task["result"] == (task["task"],)]
        finally:
            journal.close()


def test_g03_results_keep_their_types(postgres_dsn: str) -> None:
    with PostgresStore(postgres_dsn) as store:
        journal = store.open("pool", {}, 10)
        assert append(journal, 1, 2) == [None] * 4
        journal.close()
    assert stored(postgres_dsn) == [1, 2]


def test_g03_a_journal_has_one_writer_who_is_named(postgres_dsn: str) -> None:
    child = Child("writes", postgres_dsn, "pool")
    with children(child), PostgresStore(postgres_dsn) as store:
        assert child.line() == "open"
        with pytest.raises(StoreLocked) as caught:
            store.open("pool", {}, 10)
        assert f"process {child.process.pid} on {socket.gethostname()}" in str(caught.value)
        child.process.send_signal(signal.SIGKILL)
        child.process.wait()
        for _ in range(1000):  # the server sees the end of the connection a moment later
            try:
                store.open("pool", {}, 10).close()
            except StoreLocked:
                continue
            break
        else:
            pytest.fail("a process that was killed still holds its journal")
        journal = store.open("pool", {}, 10)
        with pytest.raises(StoreLocked, match=f"process {os.getpid()}"):
            store.open("pool", {}, 10)
        journal.close()


def test_g03_appends_survive_cut_connections_and_lost_answers(proxy: Proxy, postgres_dsn: str) -> None:
    with PostgresStore(through(proxy, postgres_dsn)) as store:
        journal = store.open("pool", {}, 1000)
        assert append(journal, 1) == [None, None]
        proxy.cut()
        assert append(journal, 2) == [None, None]
        for number in range(3, 8):
            once = iter([True])
            proxy.swallows = lambda data, once=once: b'"kind":"submit"' in data and next(once, False)  # type: ignore[misc]
            before = proxy.swallowed
            assert append(journal, number) == [None, None]
            assert proxy.swallowed == before + 1
        journal.close()
    chunks = query(postgres_dsn, "SELECT string_agg(convert_from(lines, 'UTF8'), '' ORDER BY n) FROM headgate.chunks")
    assert [chunks.count(f'"kind":"{kind}"') for kind in ("open", "submit", "end")] == [1, 7, 7], "each line once"
    assert stored(postgres_dsn) == [1, 2, 3, 4, 5, 6, 7]


def test_g03_a_writer_whose_journal_was_taken_fails_and_does_not_mix_in(proxy: Proxy, postgres_dsn: str) -> None:
    with PostgresStore(through(proxy, postgres_dsn)) as store, PostgresStore(postgres_dsn) as other:
        elder = store.open("pool", {}, 1000)
        assert append(elder, 1) == [None, None]
        proxy.is_refusing = True
        proxy.cut()  # the server frees the lock, and the elder does not know
        younger = None
        while younger is None:
            try:
                younger = other.open("pool", {}, 1000)
            except StoreLocked:  # the server sees the end of the connection a moment later
                pass
        proxy.is_refusing = False
        answers = append(elder, 2)
        assert all(isinstance(answer, StoreWriteFailed) for answer in answers)
        assert f"process {os.getpid()}" in str(answers[0])
        assert append(younger, 3) == [None, None]
        elder.close()
        assert append(younger, 4) == [None, None]
        younger.close()
    assert stored(postgres_dsn) == [1, 3, 4]


def test_g03_a_writer_that_vanished_without_closing_its_connection_is_replaced(postgres_dsn: str) -> None:
    """Its session stays on the server, but its lease is over."""
    with PostgresStore(postgres_dsn) as store, PostgresStore(postgres_dsn) as other:
        elder = store.open("pool", {}, 1000)
        assert append(elder, 1) == [None, None]
        query(postgres_dsn, "UPDATE headgate.journals SET member = 'a member that is gone'")
        younger = other.open("pool", {}, 1000)
        assert append(younger, 2) == [None, None]
        assert isinstance(append(elder, 3)[0], StoreWriteFailed)
        younger.close()
        elder.close()
    assert stored(postgres_dsn) == [1, 2]


def test_g03_a_write_that_the_server_refuses_is_told(postgres_dsn: str) -> None:
    with PostgresStore(postgres_dsn) as store:
        journal = store.open("pool", {}, 1000)
        query(postgres_dsn, "ALTER TABLE headgate.chunks ADD CONSTRAINT full_disk CHECK (n < 2) NOT VALID")
        answers = append(journal, 1)
        assert all(isinstance(answer, StoreWriteFailed) for answer in answers)
        assert "full_disk" in str(answers[0])
        query(postgres_dsn, "ALTER TABLE headgate.chunks DROP CONSTRAINT full_disk")
        assert append(journal, 2) == [None, None]
        journal.close()
        assert isinstance(append(journal, 3)[0], StoreWriteFailed)
    assert stored(postgres_dsn) == [1, 2], "an end cannot be repeated: it is written with the next group"


def test_g03_journals_of_many_pools_share_one_connection(postgres_dsn: str) -> None:
    with PostgresStore(postgres_dsn) as store:
        journals = [store.open(f"pool {number}", {}, 1000) for number in range(5)]
        threads = [threading.Thread(target=append, args=(journal, *range(1, 11))) for journal in journals]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        sessions = query(postgres_dsn, "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()")
        assert sessions <= 4, "exchange, heartbeat, journals, and the one that asks"
        for journal in journals:
            journal.close()
    assert all(stored(postgres_dsn, f"pool {number}") == [*range(1, 11)] for number in range(5))


def test_g03_a_journal_is_compacted(postgres_dsn: str, scale: float) -> None:
    last = 4000 if scale >= 1 else 1600

    async def fill(journal: Journal, first: int) -> None:
        for number in range(first, first + 400):
            journal.append(submit(number))
            journal.append(end(number, result=(number,)))
        await journal.flush()

    with PostgresStore(postgres_dsn) as store:
        journal = store.open("pool", {}, 5)
        for first in range(1, last + 1, 400):
            asyncio.run(fill(journal, first))
        journal.close()
        size = query(postgres_dsn, "SELECT sum(length(lines)) FROM headgate.chunks")
        assert size == query(postgres_dsn, "SELECT size FROM headgate.journals")
        assert size < 2 * last * 60, "most of the lines are gone"
    assert stored(postgres_dsn)[-5:] == [*range(last - 4, last + 1)]


def test_g03_a_server_that_restarts_keeps_every_acknowledged_entry() -> None:
    pytest.importorskip("asyncpg")
    server = PostgresServer()
    try:
        server.start()
        with PostgresStore(server.dsn()) as store:
            journal = store.open("pool", {}, 1000)
            numbers = iter(range(1, 10_000))
            written: list[int] = []
            stop = threading.Event()

            def work() -> None:
                while not stop.is_set():
                    number = next(numbers)
                    if append(journal, number) == [None, None]:
                        written.append(number)

            thread = threading.Thread(target=work)
            thread.start()
            server.restart("immediate")
            server.restart("immediate")
            stop.set()
            thread.join()
            journal.close()
            assert written
        assert stored(server.dsn()) == written
    finally:
        server.close()
