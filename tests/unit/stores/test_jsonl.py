"""T60, T62: where a journal lies, who may have it, and how it is written."""

from __future__ import annotations

import asyncio
import json
import os
import stat
import threading
from pathlib import Path
from typing import Any

import pytest

from headgate.core.files import Files
from headgate.errors import InvalidArgument, InvalidType, StoreFormatTooNew, StoreLocked, StoreWriteFailed
from headgate.stores import JsonLinesStore, Opaque, read_journal
from headgate.stores.jsonl import writer
from tests.support.stores.support import NoSync, append, end, lives, numbers, open_journal, statuses, submit


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


# -- where ------------------------------------------------------------------------------------------------------------


def test_t60_folder_and_file_are_for_this_user_alone(tmp_path: Path) -> None:
    os.umask(before := os.umask(0))
    try:
        os.umask(0)
        JsonLinesStore(tmp_path / "a" / "b").open("p", {}, 10).close()
    finally:
        os.umask(before)
    assert mode(tmp_path / "a") == mode(tmp_path / "a" / "b") == 0o700
    assert mode(tmp_path / "a" / "b" / "p.jsonl") == 0o600


def test_t60_a_path_that_ends_in_jsonl_is_the_file(tmp_path: Path) -> None:
    path = tmp_path / "one.jsonl"
    JsonLinesStore(path).open("p", {}, 10).close()
    JsonLinesStore(str(path)).open("p", {}, 10).close()
    assert os.listdir(tmp_path) == ["one.jsonl"]
    content = path.read_bytes()
    with pytest.raises(InvalidArgument, match=r"one\.jsonl is the journal of pool 'p', not of 'q'.*folder"):
        JsonLinesStore(path).open("q", {}, 10)
    assert path.read_bytes() == content


def test_t60_without_a_path_the_environment_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HEADGATE_DIR", raising=False)
    assert JsonLinesStore().path == tmp_path / ".headgate"
    monkeypatch.setenv("HEADGATE_DIR", str(tmp_path / "here"))
    assert JsonLinesStore().path == tmp_path / "here"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert JsonLinesStore("~/journals").path == tmp_path / "journals"
    assert JsonLinesStore(Path("x")).path == tmp_path / "x"


def test_t60_what_cannot_work_is_said_at_once() -> None:
    with pytest.raises(InvalidArgument, match="codec must be one of 'json', 'pickle', got 'yaml'"):
        JsonLinesStore("x", codec="yaml")  # type: ignore[arg-type]
    with pytest.raises(InvalidType, match="path must be a path, got int"):
        JsonLinesStore(7)  # type: ignore[arg-type]


def test_t62_a_place_that_cannot_be_written_is_a_store_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreWriteFailed, match="could not be written: Not a directory") as caught:
        open_journal(tmp_path / "file" / "folder")
    assert isinstance(caught.value.__cause__, OSError)
    (tmp_path / "folder.jsonl").mkdir()
    with pytest.raises(StoreWriteFailed, match="Is a directory"):
        open_journal(tmp_path / "folder.jsonl")


def test_t60_a_link_stays_a_link_after_a_compaction(tmp_path: Path, compacts_early: None) -> None:
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "real.jsonl")
    journal = open_journal(tmp_path / "link.jsonl", keep=1)
    append(journal, *lives(*range(1, 50)))
    journal.close()
    assert (tmp_path / "link.jsonl").is_symlink()
    assert numbers(read_journal(tmp_path / "real.jsonl"))[-1] == 49


# -- what is there ----------------------------------------------------------------------------------------------------


def test_t62_a_newer_format_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    open_journal(tmp_path).close()
    newer = path.read_bytes().replace(b'"format":1', b'"format":7')
    path.write_bytes(newer)
    for use in (lambda: open_journal(tmp_path), lambda: read_journal(path)):
        with pytest.raises(StoreFormatTooNew, match=r"p\.jsonl has format 7, and this release reads formats up to 1"):
            use()
    assert path.read_bytes() == newer


@pytest.mark.parametrize("content", [b"hello", b"a,b\n1,2\n", b"{}\n", b"\n", b"\0\0\n\0"])
def test_t62_a_file_that_is_no_journal_is_left_alone(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(content)
    for use in (lambda: open_journal(tmp_path), lambda: read_journal(path)):
        with pytest.raises(InvalidArgument, match=r"p\.jsonl is not a journal of headgate"):
            use()
    assert path.read_bytes() == content
    assert os.listdir(tmp_path) == ["p.jsonl"]


def test_t60_every_line_is_json_and_the_first_says_what_it_is(tmp_path: Path) -> None:
    journal = JsonLinesStore(tmp_path).open("p", {"name": "pr-review", "stale_after": 30.0}, 10)
    append(journal, *lives(1))
    journal.close()
    header, opened, *entries = map(json.loads, (tmp_path / "p.jsonl").read_text().splitlines())
    assert all(len(line.pop("crc")) == 8 for line in (header, opened, *entries))
    assert header == {
        "headgate": "journal",
        "format": 1,
        "pool_id": "p",
        "codec": "json",
        "about": {"name": "pr-review", "stale_after": 30.0},
    }
    assert opened["kind"] == "open"
    assert opened["pid"] == os.getpid()
    assert [entry["kind"] for entry in entries] == ["submit", "end"]


def test_t60b_pickles_are_read_only_by_a_store_that_writes_them(tmp_path: Path) -> None:
    journal = open_journal(tmp_path, codec="pickle")
    append(journal, submit(1), end(1, result=range(3)), submit(2), end(2, result=42))
    journal.close()
    for codec, result in (("pickle", range(3)), ("json", Opaque("builtins.range")), ("pickle", range(3))):
        journal = open_journal(tmp_path, codec=codec)
        assert [task["result"] for task in journal.tasks] == [result, 42]
        journal.close()
    assert read_journal(tmp_path, pool_id="p")[0]["result"] == Opaque("builtins.range")


def test_t60_leftovers_of_a_compaction_are_removed(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl.new").write_text("half a jour")
    open_journal(tmp_path).close()
    assert os.listdir(tmp_path) == ["p.jsonl"]


# -- who --------------------------------------------------------------------------------------------------------------


def test_t62_the_second_is_told_who_has_it(tmp_path: Path) -> None:
    journal = open_journal(tmp_path)
    said = rf"p\.jsonl is in use by process {os.getpid()} on \S+, since 20\d\d-.*End the process named above"
    with pytest.raises(StoreLocked, match=said):
        open_journal(tmp_path)
    journal.close()
    open_journal(tmp_path).close()


def test_t62_a_reader_who_looks_at_the_lock_is_no_reason_to_give_up(tmp_path: Path) -> None:
    open_journal(tmp_path).close()
    stop = threading.Event()

    def look() -> None:
        while not stop.is_set():
            read_journal(tmp_path, pool_id="p")

    readers = [threading.Thread(target=look) for _ in range(3)]
    for reader in readers:
        reader.start()
    try:
        for _ in range(20):
            open_journal(tmp_path, files=NoSync()).close()
    finally:
        stop.set()
        for reader in readers:
            reader.join()


def test_t62_a_lock_on_a_file_that_was_replaced_meanwhile_is_worth_nothing(tmp_path: Path) -> None:
    """Between opening and locking, another compacts it and closes it: the lock is free, and the file has no name."""
    path = tmp_path / "p.jsonl"

    class Late(NoSync):
        def lock(self, file: int) -> bool:
            if not (tmp_path / "done").exists():
                (tmp_path / "done").touch()
                other = path.read_bytes()
                path.unlink()
                path.write_bytes(other)
            return super().lock(file)

    open_journal(tmp_path).close()
    journal = open_journal(tmp_path, files=Late())
    append(journal, submit(1))
    journal.close()
    assert numbers(read_journal(path)) == [1]


def test_t62_a_forgotten_journal_gives_its_lock_back(tmp_path: Path) -> None:
    journal = open_journal(tmp_path)
    append(journal, submit(1))
    for thread in threading.enumerate():
        if thread.name.startswith("headgate-journal"):
            thread.join()  # it lingers for a moment
    with pytest.warns(ResourceWarning, match="unclosed journal"):
        del journal, thread
    journal = open_journal(tmp_path)
    assert numbers(journal.tasks) == [1]
    journal.close()


# -- groups -----------------------------------------------------------------------------------------------------------


class Watched(NoSync):
    """Counts, and holds a sync back while the gate is shut."""

    def __init__(self) -> None:
        self.writes: list[bytes] = []
        self.syncs = 0
        self.gate = threading.Event()
        self.gate.set()

    def write(self, file: int, data: memoryview) -> int:
        self.writes.append(bytes(data))
        return super().write(file, data)

    def sync(self, file: int) -> None:
        assert self.gate.wait(10)
        self.syncs += 1


def test_t62_a_group_is_one_write_one_sync_and_one_wake_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = Watched()
    journal = open_journal(tmp_path, files=files)
    files.writes.clear()
    files.syncs = 0
    told: list[int] = []

    async def work() -> None:
        loop = asyncio.get_running_loop()
        wake_ups: list[Any] = []
        wake = loop.call_soon_threadsafe
        monkeypatch.setattr(loop, "call_soon_threadsafe", lambda *args: [wake_ups.append(args), wake(*args)][1])
        files.gate.clear()
        journal.append(submit(1), lambda _: told.append(1))
        while not files.writes:  # noqa: ASYNC110 - the first group is on its way to the disk, in another thread
            await asyncio.sleep(0.001)
        for number in range(2, 101):
            journal.append(submit(number), lambda _, number=number: told.append(number))
        await asyncio.sleep(0.01)
        assert told == []  # an acknowledgement waits for its own group
        files.gate.set()
        await journal.flush()
        assert told == list(range(1, 101))
        assert len(wake_ups) == 2

    asyncio.run(work())
    assert files.syncs == 2
    assert [data.count(b"\n") for data in files.writes] == [1, 99]
    journal.close()


def test_t62_a_callback_that_fails_keeps_no_news_from_the_others(tmp_path: Path) -> None:
    journal = open_journal(tmp_path, files=NoSync())
    told: list[int] = []
    mistakes: list[Any] = []

    async def work() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: mistakes.append(context["exception"]))
        journal.append(submit(1), lambda _: 1 // 0)
        journal.append(submit(2), lambda _: told.append(2))
        await journal.flush()

    asyncio.run(work())
    journal.close()
    assert told == [2]
    assert [type(mistake) for mistake in mistakes] == [ZeroDivisionError]


def test_t62_a_loop_that_is_gone_is_nobody_to_tell(tmp_path: Path) -> None:
    journal = open_journal(tmp_path, files=Watched())

    async def leave() -> None:
        journal.append(submit(1), lambda _: None)

    asyncio.run(leave())
    journal.close()
    assert numbers(read_journal(tmp_path, pool_id="p")) == [1]


def test_t62_where_no_thread_can_be_started_it_is_written_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    journal = open_journal(tmp_path, files=NoSync())
    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert append(journal, submit(1)) == [None]
    journal.append(submit(2))
    journal.close()
    assert numbers(read_journal(tmp_path, pool_id="p")) == [1, 2]


def test_t62_after_close_nothing_is_written(tmp_path: Path) -> None:
    journal = open_journal(tmp_path)
    journal.close()
    [error] = append(journal, submit(1))
    assert isinstance(error, StoreWriteFailed)
    assert "is closed" in str(error)
    assert "closed" in repr(journal)


# -- compaction -------------------------------------------------------------------------------------------------------


@pytest.fixture
def compacts_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "_MANY_LINES", 20)


def test_t62_the_file_stays_small_and_keeps_what_it_must(tmp_path: Path, compacts_early: None) -> None:
    journal = open_journal(tmp_path, keep=5, files=NoSync())
    append(journal, *lives(1, idempotency_key="k"), submit(2), submit(3, running=True))
    for number in range(4, 400):
        append(journal, *lives(number))
        assert (tmp_path / "p.jsonl").read_bytes().count(b"\n") < 120
    with pytest.raises(StoreLocked, match=str(os.getpid())):  # the new file is locked, and says by whom
        open_journal(tmp_path)
    journal.close()
    journal = open_journal(tmp_path, keep=5)
    assert numbers(journal.tasks) == [1, 2, 3, *range(395, 400)]
    assert statuses(journal.tasks)[2] == "queued"
    assert journal.tasks[0]["result"] == 1
    journal.close()
    assert os.listdir(tmp_path) == ["p.jsonl"]
    assert mode(tmp_path / "p.jsonl") == 0o600


def test_t62_a_file_in_which_all_is_wanted_is_compacted_ever_more_rarely(
    tmp_path: Path, compacts_early: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    compact = writer.JsonLinesJournal._compact
    monkeypatch.setattr(writer.JsonLinesJournal, "_compact", lambda self: [sizes.append(self._lines), compact(self)][1])
    journal = open_journal(tmp_path, files=NoSync())
    for number in range(1, 1001):
        append(journal, submit(number))
    journal.close()
    assert sizes == sorted(sizes)
    assert len(sizes) <= 4
    journal = open_journal(tmp_path)
    assert len(journal.tasks) == 1000
    journal.close()


@pytest.mark.parametrize("step", ["replace", "lock", "open"])
def test_t62_a_compaction_that_fails_is_said_once_and_the_old_file_goes_on(
    tmp_path: Path, compacts_early: None, caplog: pytest.LogCaptureFixture, step: str
) -> None:
    class Stubborn(NoSync):
        armed = False

        def fails(self, name: str) -> bool:
            return self.armed and name == step

        def open(self, path: Path, *, empty: bool = False) -> int:
            if self.fails("open"):
                raise PermissionError(13, "Permission denied")
            return super().open(path, empty=empty)

        def lock(self, file: int) -> bool:
            return not self.fails("lock") and super().lock(file)

        def replace(self, source: Path, target: Path) -> None:
            if self.fails("replace"):
                raise PermissionError(13, "Permission denied")
            super().replace(source, target)

    files = Stubborn()
    journal = open_journal(tmp_path, keep=1, files=files)
    files.armed = True
    for number in range(1, 200):
        assert append(journal, *lives(number)) == [None, None]
    journal.close()
    assert [record.getMessage().partition(" ")[2] for record in caplog.records] == [
        f"cannot be compacted, and goes on growing: {'[Errno 11] ' if step == 'lock' else '[Errno 13] '}"
        + (os.strerror(11) + f": '{tmp_path / 'p.jsonl.new'}'" if step == "lock" else "Permission denied")
    ]
    assert os.listdir(tmp_path) == ["p.jsonl"]
    files.armed = False
    journal = open_journal(tmp_path, files=files)
    assert numbers(journal.tasks) == list(range(1, 200))
    journal.close()


def test_t62_after_a_rename_nothing_is_acknowledged_before_the_folder_is_synced(
    tmp_path: Path, compacts_early: None
) -> None:
    class Absent(NoSync):
        renamed = False
        failures = 2

        def replace(self, source: Path, target: Path) -> None:
            super().replace(source, target)
            self.renamed = True

        def sync_folder(self, folder: Path) -> None:
            if self.renamed and self.failures:
                self.failures -= 1
                raise OSError(5, "Input/output error")

    files = Absent()
    journal = open_journal(tmp_path, keep=1, files=files)
    append(journal, *lives(*range(1, 30)))
    [error] = append(journal, submit(30))
    assert isinstance(error, StoreWriteFailed)
    assert files.failures == 0
    assert append(journal, submit(31)) == [None]
    journal.close()


def test_t60_readers_see_a_whole_file_while_it_is_replaced(tmp_path: Path, compacts_early: None, scale: float) -> None:
    journal = open_journal(tmp_path, keep=3, files=NoSync())
    append(journal, *lives(1, idempotency_key="k"), submit(2, running=True, at=4e9))
    seen: list[dict[int, str]] = []
    stop = threading.Event()

    def look() -> None:
        while not stop.is_set():
            seen.append(statuses(read_journal(tmp_path, pool_id="p")))

    reader = threading.Thread(target=look)
    reader.start()
    try:
        for number in range(3, max(150, int(2000 * scale**1.3))):
            append(journal, *lives(number))
    finally:
        stop.set()
        reader.join()
        journal.close()
    assert len(seen) > 5
    assert all(view[1] == "completed" and view[2] == "running" for view in seen)


def test_t62_files_that_are_real_are_the_default(tmp_path: Path) -> None:
    assert type(JsonLinesStore(tmp_path)._files) is Files
    assert JsonLinesStore(tmp_path).shared is False
    assert repr(JsonLinesStore(tmp_path)) == f"<JsonLinesStore {tmp_path}>"
