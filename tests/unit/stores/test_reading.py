"""T61: readers that do not own a journal."""

from __future__ import annotations

from pathlib import Path

import pytest

from headgate.core.clock import clock
from headgate.errors import InvalidArgument, InvalidType
from headgate.stores import Opaque, read_journal
from tests.support.stores.support import NoSync, append, end, lives, numbers, open_journal, statuses, submit


def test_t61_the_lock_decides_and_then_the_signs_of_life(tmp_path: Path) -> None:
    with clock.replaced(wall=lambda: 1000.0):
        journal = open_journal(tmp_path)
        append(journal, submit(1, running=True), submit(2), *lives(3))
        append(journal, {"kind": "beat", "at": 1020.0})
    unfinished = {1: "running", 2: "queued", 3: "completed"}
    for now, seen in ((1045.0, unfinished), (1055.0, {1: "stale", 2: "queued", 3: "completed"})):
        with clock.replaced(wall=lambda now=now: now):
            assert statuses(read_journal(tmp_path, pool_id="p")) == seen
    with clock.replaced(wall=lambda: 1055.0):
        assert statuses(read_journal(tmp_path / "p.jsonl", stale_after=60)) == unfinished
        journal.close()
        assert statuses(read_journal(tmp_path, pool_id="p", stale_after=60)) == {1: "stale", 2: "stale", 3: "completed"}


def test_t61_a_reader_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    journal = open_journal(tmp_path)
    append(journal, submit(1), *lives(2), submit(3))
    journal.close()
    torn = path.read_bytes()[:-7]
    path.write_bytes(torn)
    path.chmod(0o400)
    assert numbers(read_journal(path)) == [1, 2]
    assert path.read_bytes() == torn
    assert [entry.name for entry in tmp_path.iterdir()] == ["p.jsonl"]


def test_t61_a_file_that_is_only_begun_has_no_tasks(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(b'{"headgate":"jour')
    assert read_journal(path) == []
    path.write_bytes(b"")
    assert read_journal(path) == []


def test_t61_results_read_as_values_and_pickles_as_their_names(tmp_path: Path) -> None:
    journal = open_journal(tmp_path, codec="pickle")
    append(journal, submit(1), end(1, result=(1, 2)), submit(2), end(2, result=slice(1)))
    journal.close()
    assert [task["result"] for task in read_journal(tmp_path, pool_id="p")] == [(1, 2), Opaque("builtins.slice")]


def test_t61_a_replaced_file_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a second look a reader would find the lock of the old file free, and call everything stale."""
    from headgate.stores.jsonl import reader

    journal = open_journal(tmp_path, files=NoSync())
    append(journal, submit(1, running=True, at=4e9))
    looked: list[bool] = []
    is_locked = reader._is_locked

    def look(file: int) -> bool:
        if not looked:
            journal._file.replace(list(journal._file.lines()))  # type: ignore[attr-defined]
        looked.append(is_locked(file))
        return looked[-1]

    monkeypatch.setattr(reader, "_is_locked", look)
    assert statuses(read_journal(tmp_path, pool_id="p")) == {1: "running"}
    assert looked == [False, True]
    journal.close()


def test_t61_what_cannot_be_read_is_said(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"x\.jsonl cannot be read: No such file"):
        read_journal(tmp_path / "x.jsonl")
    with pytest.raises(InvalidArgument, match=r"cannot be read: No such file"):
        read_journal(tmp_path, pool_id="x")
    with pytest.raises(InvalidArgument, match=r"is a folder.*pool_id"):
        read_journal(tmp_path)
    with pytest.raises(InvalidType, match="path must be a path, got int"):
        read_journal(7)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="stale_after must be > 0 seconds, got 0"):
        read_journal(tmp_path, stale_after=0)
    open_journal(tmp_path).close()
    with pytest.raises(InvalidArgument, match="is the journal of pool 'p', not of 'q'"):
        read_journal(tmp_path / "p.jsonl", pool_id="q")
