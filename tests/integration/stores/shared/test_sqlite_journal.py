"""G03: SqliteStore keeps journals as JSON lines do, in rows; one writer for each, whose epoch is checked."""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

import headgate
from headgate.errors import InvalidArgument, StoreLocked, StoreWriteFailed
from headgate.stores import SqliteStore
from headgate.stores.jsonl import writer
from headgate.testing import check_store
from tests.integration.stores.shared.support import PATIENCE, Process, ask, increment
from tests.support.stores.support import append, end, lives, numbers, statuses, submit


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "shared.db"


def test_g03_journals_of_a_sqlite_store_keep_the_contract(path: Path) -> None:
    check_store(lambda: SqliteStore(path))


def test_g03_one_store_serves_journals_and_steps(path: Path) -> None:
    store = SqliteStore(path)
    journal = store.open("p", {}, 100)
    assert ask(store, increment, durable=True) == 1
    assert append(journal, submit(1), end(1, result=(1,))) == [None, None]
    assert ask(store, increment, durable=True) == 2
    store.close()
    assert append(journal, submit(2)) == [None], "open journals stay open"
    journal.close()
    again = SqliteStore(path).open("p", {}, 100)
    assert statuses(again.tasks) == {1: "completed", 2: "queued"}
    again.close()


def test_g03_a_durable_pool_finds_its_results_again(path: Path) -> None:
    async def run(expected: int) -> None:
        async with headgate.TaskPool("p", scope="pipeline", pipeline_id="x", store=SqliteStore(path)) as pool:
            handle = await pool.submit(work, idempotency_key="once")
            assert await handle == {"answer": (42,)}
        assert len(ran) == expected

    async def work() -> dict[str, tuple[int]]:
        ran.append(1)
        return {"answer": (42,)}

    ran: list[int] = []
    asyncio.run(run(1))
    asyncio.run(run(1))


def test_g03_an_append_of_an_older_epoch_fails(path: Path) -> None:
    first = SqliteStore(path).open("p", {}, 100)
    assert append(first, submit(1)) == [None]
    (lock,) = Path(f"{path}-members").iterdir()
    lock.unlink()  # as somebody does who cleans up by hand
    second = SqliteStore(path).open("p", {}, 100)
    (error,) = append(first, submit(2))
    assert isinstance(error, StoreWriteFailed)
    assert f"opened again by process {os.getpid()}" in str(error)
    assert append(second, submit(2), end(2)) == [None, None]
    first.close()
    assert append(second, submit(3)) == [None]
    second.close()
    third = SqliteStore(path).open("p", {}, 100)
    assert numbers(third.tasks) == [1, 2, 3]
    third.close()


@pytest.mark.integration
def test_g03_a_writer_that_is_killed_leaves_its_journal_free_and_whole(path: Path) -> None:
    code = """
import asyncio, os, sys
from headgate.stores import SqliteStore
from tests.support.stores.support import submit
async def main():
    journal = SqliteStore(sys.argv[1]).open("p", {}, 1000)
    loop = asyncio.get_running_loop()
    for number in range(1, 100000):
        answer = loop.create_future()
        journal.append(submit(number), answer.set_result)
        assert await answer is None
        os.write(1, b"%d\\n" % number)
asyncio.run(main())
"""
    writing = subprocess.Popen([sys.executable, "-c", code, path], stdout=subprocess.PIPE)
    assert writing.stdout is not None
    acknowledged = [int(writing.stdout.readline()) for _ in range(20)]
    with pytest.raises(StoreLocked, match=f"process {writing.pid} on "):
        SqliteStore(path).open("p", {}, 1000)
    writing.send_signal(signal.SIGKILL)
    acknowledged += map(int, writing.stdout.read().split())
    writing.wait()
    writing.stdout.close()
    journal = SqliteStore(path).open("p", {}, 10_000)
    found = numbers(journal.tasks)
    assert set(acknowledged) <= set(found)
    assert len(found) <= len(acknowledged) + 1
    journal.close()


@pytest.mark.integration
def test_g03_g06_a_forked_child_does_not_write_the_journal_of_its_parent(path: Path) -> None:
    with Process(path) as parent:
        parent("open")
        assert parent("fork") == 0
        with pytest.raises(StoreLocked, match=f"process {parent.pid} on "):
            SqliteStore(path).open("p", {}, 10)
        child = parent("fork_and_stay")
        parent.kill()
        try:
            SqliteStore(path).open("p", {}, 10).close()
        finally:
            os.kill(child, signal.SIGKILL)


def test_g03_a_journal_is_compacted(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "_MANY_LINES", 50)
    journal = SqliteStore(path).open("p", {}, 5)
    for start in range(1, 200, 20):
        assert set(append(journal, *lives(*range(start, start + 20)))) == {None}
    journal.close()
    database = sqlite3.connect(path)
    rows = [data for (data,) in database.execute("SELECT data FROM lines ORDER BY number")]
    database.close()
    assert sum(data.count(b"\n") for data in rows) < 200
    again = SqliteStore(path).open("p", {}, 5)
    assert numbers(again.tasks) == [196, 197, 198, 199, 200]
    again.close()


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        ("UPDATE lines SET data = x'ff00'", "not a journal"),
        ("UPDATE lines SET data = 'text'", "not a journal"),
        ("UPDATE lines SET data = 1e9", "not a journal"),
        ("DROP TABLE journals; CREATE TABLE journals (x)", "could not be written"),
        ("UPDATE lines SET number = 9223372036854775807", "could not be written"),
    ],
)
def test_g24_rows_that_somebody_spoilt_give_a_clear_error(path: Path, spoil: str, words: str) -> None:
    journal = SqliteStore(path).open("p", {}, 10)
    append(journal, submit(1))
    journal.close()
    database = sqlite3.connect(path)
    if "number =" in spoil:
        database.execute("DELETE FROM lines WHERE number > 1")
    database.executescript(spoil)
    database.close()
    with pytest.raises((InvalidArgument, StoreWriteFailed), match=words):
        SqliteStore(path).open("p", {}, 10)
    SqliteStore(path.with_name("other.db")).open("p", {}, 10).close()


@pytest.mark.parametrize("garbage", ["x'ff00ff0a'", '\'{"kind":"end"\'', "NULL", "x'00'", "12"])
def test_g24_garbage_after_good_rows_is_passed_over(path: Path, garbage: str) -> None:
    journal = SqliteStore(path).open("p", {}, 10)
    append(journal, submit(1), end(1))
    journal.close()
    database = sqlite3.connect(path)
    database.execute(f"INSERT INTO lines VALUES ('p', 99, {garbage})")
    database.execute("UPDATE journals SET epoch = 'many', pid = x'ff', host = 7")
    database.commit()
    database.close()
    for _ in range(2):
        journal = SqliteStore(path).open("p", {}, 10)
        assert statuses(journal.tasks) == {1: "completed"}
        journal.close()


def test_g24_a_row_that_names_a_function_runs_nothing(path: Path, tmp_path: Path) -> None:
    mark = tmp_path / "run"
    journal = SqliteStore(path).open("p", {}, 10)
    append(journal, submit(1))
    journal.close()
    line = (
        '{"kind":"end","at":1.0,"task":1,"status":"completed",'
        f'"result":{{"$type":"os:system","value":["touch {mark}"],"$pickle":"Y29zCnN5c3RlbQo="}}}}\n'
    )
    database = sqlite3.connect(path)
    database.execute("DELETE FROM lines WHERE number > 1")
    database.execute("INSERT INTO lines VALUES ('p', 99, ?)", (line.encode(),))
    database.commit()
    database.close()
    journal = SqliteStore(path).open("p", {}, 10)
    list(journal.tasks)
    journal.close()
    assert not mark.exists()


def test_g03_a_large_journal_is_read_by_whoever_asks_for_its_tasks(path: Path) -> None:
    journal = SqliteStore(path).open("p", {}, 100)
    append(journal, *(submit(number, {"text": "x" * 10_000}) for number in range(1, 61)))
    journal.close()

    async def run() -> None:
        journal = SqliteStore(path).open("p", {}, 100)
        assert not journal.is_read  # type: ignore[attr-defined]
        tasks = await asyncio.wait_for(asyncio.to_thread(lambda: journal.tasks), PATIENCE)
        assert len(tasks) == 60
        journal.close()

    asyncio.run(run())
