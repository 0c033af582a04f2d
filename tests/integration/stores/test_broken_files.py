"""T62: a torn file loses what was torn, and says so; a full disk is told to whoever waits, and is not the end."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from headgate.errors import StoreWriteFailed
from headgate.stores import read_journal
from tests.support.stores.support import FullDisk, NoSync, append, end, lives, numbers, open_journal, statuses, submit

# -- torn -------------------------------------------------------------------------------------------------------------


def written(folder: Path, *groups: int) -> list[bytes]:
    """The lines of a journal into which so many tasks were submitted, group by group."""
    journal = open_journal(folder, files=NoSync())
    number = 0
    for size in groups:
        append(journal, *(submit(number + n + 1) for n in range(size)))
        number += size
    journal.close()
    path = folder / "p.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.unlink()
    return lines


def reopened(path: Path, content: bytes) -> list[int]:
    path.write_bytes(content)
    journal = open_journal(path, files=NoSync())
    found = numbers(journal.tasks)
    assert append(journal, submit(99)) == [None]
    journal.close()
    assert statuses(read_journal(path)) == dict.fromkeys([*found, 99], "stale")
    return found


def test_t62_a_tail_torn_at_any_byte_loses_the_torn_line_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, scale: float
) -> None:
    lines = written(tmp_path, 2, 3)
    before, group = b"".join(lines[:4]), lines[4:]
    for size in range(0, sum(map(len, group)), 1 if scale >= 1 else 3):
        caplog.clear()
        torn = b"".join(group)[:size]
        whole = torn.count(b"\n")
        assert reopened(tmp_path / "x.jsonl", before + torn) == list(range(1, 3 + whole))
        lost = size - sum(map(len, group[:whole]))
        said = [f"{tmp_path / 'x.jsonl'}: line {5 + whole} is torn, {lost} bytes are cut off"] if lost else []
        assert [record.getMessage() for record in caplog.records] == said
    assert {record.name for record in caplog.records} == {"headgate.stores"}
    assert {record.levelno for record in caplog.records} == {logging.WARNING}


@pytest.mark.parametrize("torn", [b"", b'{"kind":"sub'])
def test_t62_a_whole_line_at_the_end_whose_checksum_is_wrong_is_skipped_and_stays(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, torn: bytes
) -> None:
    *lines, last = written(tmp_path, 3)
    damaged, path = last.replace(b'"task":3', b'"task":4'), tmp_path / "x.jsonl"
    assert reopened(path, b"".join([*lines, damaged]) + torn) == [1, 2]
    number = len(lines) + 1
    said = f"1 lines cannot be read and are passed over, the first is line {number}, {len(damaged)} bytes"
    assert said in caplog.text
    assert ("12 bytes are cut off" in caplog.text) == bool(torn)
    assert path.read_bytes().splitlines(keepends=True)[number - 1] == damaged
    mended = path.read_bytes().replace(damaged, last)
    path.write_bytes(mended)
    assert 3 in statuses(read_journal(path)), "who mends it has lost nothing"


def test_t62_a_header_torn_at_any_byte_begins_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, scale: float
) -> None:
    lines = written(tmp_path, 1)
    for size in range(0, len(lines[0]), 1 if scale >= 1 else 3):
        caplog.clear()
        assert reopened(tmp_path / "x.jsonl", lines[0][:size]) == []
        assert [record.getMessage().partition(": ")[2] for record in caplog.records] == (
            [f"line 1 is torn, {size} bytes are cut off: it begins anew"] if size else []
        )


def test_t62_a_block_of_zeros_is_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    lines = written(tmp_path, 5)
    content = b"".join(lines)
    start, stop = len(b"".join(lines[:3])) + 5, len(b"".join(lines[:5])) - 5
    assert reopened(tmp_path / "x.jsonl", content[:start] + b"\0" * (stop - start) + content[stop:]) == [1, 4, 5]
    opened, read = [record.getMessage() for record in caplog.records]
    assert opened == (
        f"{tmp_path / 'x.jsonl'}: 1 lines cannot be read and are passed over, "
        f"the first is line 4, {len(lines[3] + lines[4])} bytes"
    )
    assert read == f"{tmp_path / 'x.jsonl'}: 1 lines cannot be read, the first is line 4"


def test_t62_a_file_that_ends_in_zeros_is_cut(tmp_path: Path) -> None:
    content = b"".join(written(tmp_path, 2))
    assert reopened(tmp_path / "x.jsonl", content + b"\0" * 4096) == [1, 2]


# -- full -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("most", [pytest.param(1 << 30, marks=pytest.mark.soak), 7])
def test_t62_a_disk_that_is_full_at_any_byte_acknowledges_nothing(tmp_path: Path, most: int, scale: float) -> None:
    files = FullDisk(most=most)
    group = [submit(3), end(1, result="kept"), submit(4)]
    journal = open_journal(tmp_path, files=files)
    append(journal, submit(1), submit(2))
    good = (tmp_path / "p.jsonl").read_bytes()
    assert append(journal, *group) == [None, None, None]
    size = len((tmp_path / "p.jsonl").read_bytes()) - len(good)
    journal.close()
    for room in range(0, size, 1 if scale >= 1 else 3):
        path = tmp_path / "x.jsonl"
        path.write_bytes(good)
        files.room = float("inf")
        journal = open_journal(path, files=files)
        before = path.read_bytes()
        files.room = room
        errors = append(journal, *group)
        said = f"{path} could not be written: No space left on device. Make room on the disk, then submit again."
        assert [str(error).removesuffix(" [HEADGATE-STO-002]") for error in errors] == [said] * 3
        assert all(isinstance(error, StoreWriteFailed) and isinstance(error.__cause__, OSError) for error in errors)
        assert len(set(map(id, errors))) == 3
        assert path.read_bytes() == before
        files.room = float("inf")
        assert append(journal, submit(5)) == [None]
        journal.close()
        found = {task["task"]: task for task in read_journal(path)}
        assert list(found) == [1, 2, 5]
        assert found[1]["status"] == "stale"  # it was ended by the open before


def test_t62_an_end_that_could_not_be_written_goes_ahead_of_the_next_group(tmp_path: Path) -> None:
    files = FullDisk()
    journal = open_journal(tmp_path, files=files)
    append(journal, submit(1), submit(2), submit(3))
    files.room = 10
    told = append(
        journal, end(1, result="kept"), {"kind": "start", "at": 1.0, "task": 2}, submit(4), end(4, "rejected")
    )
    assert [error is None for error in told] == [False] * 4
    assert [error is None for error in append(journal, end(2, "failed"))] == [False]
    files.room = float("inf")
    assert append(journal, submit(5)) == [None]
    lines = (tmp_path / "p.jsonl").read_bytes().splitlines()[-3:]
    assert [b'"task":%d' % number in line for number, line in zip([1, 2, 5], lines, strict=True)] == [True] * 3
    journal.close()
    journal = open_journal(tmp_path)
    # Task 4 was never acknowledged, so there is nothing that could have been rejected.
    assert statuses(journal.tasks) == {1: "completed", 2: "failed", 3: "queued", 5: "queued"}
    assert journal.tasks[0]["result"] == "kept"
    journal.close()


def test_t62_an_end_that_could_not_be_written_is_tried_again_by_close(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = FullDisk()
    for room, status in ((0, "stale"), (float("inf"), "completed")):
        journal = open_journal(tmp_path, files=files)
        number = max(numbers(journal.tasks), default=0) + 1
        append(journal, submit(number))
        files.room = 0
        assert append(journal, end(number)) != [None]
        files.room = room
        journal.close()
        journal.close()
        files.room = float("inf")
        assert statuses(read_journal(tmp_path, pool_id="p"))[number] == status
    assert [record.getMessage() for record in caplog.records] == [
        f"{tmp_path / 'p.jsonl'}: the ends of 1 tasks are lost"
    ]


def test_t62_ends_that_have_no_room_together_are_written_alone_by_close(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = FullDisk()
    journal = open_journal(tmp_path, files=files)
    append(journal, submit(1), submit(2), submit(3))
    files.room = 0
    append(journal, end(1, result="x" * 500), end(2, result="kept"), end(3, result="kept too"))
    files.room = 300
    journal.close()
    files.room = float("inf")
    assert statuses(read_journal(tmp_path, pool_id="p")) == {1: "stale", 2: "completed", 3: "completed"}
    assert [record.getMessage() for record in caplog.records] == [
        f"{tmp_path / 'p.jsonl'}: the ends of 1 tasks are lost"
    ]


def test_t62_an_entry_that_is_no_json_does_not_end_the_thread(tmp_path: Path) -> None:
    files = FullDisk()
    journal = open_journal(tmp_path, files=files)
    files.room = 0
    assert append(journal, submit(1, at=float("nan")), end(1, at=float("inf"))) != [None, None]
    files.room = float("inf")
    assert append(journal, submit(2)) == [None]
    journal.close()


def test_t62_a_sync_that_fails_acknowledges_nothing(tmp_path: Path) -> None:
    files = FullDisk()
    journal = open_journal(tmp_path, files=files)
    append(journal, submit(1))
    before = (tmp_path / "p.jsonl").read_bytes()
    files.syncs_fail = 1
    errors = append(journal, submit(2), end(1))
    assert all("Input/output error" in str(error) for error in errors)
    assert (tmp_path / "p.jsonl").read_bytes() == before
    assert append(journal, submit(3)) == [None]
    journal.close()
    assert statuses(read_journal(tmp_path, pool_id="p")) == {1: "completed", 3: "stale"}


def test_t62_nothing_is_written_while_the_torn_group_cannot_be_cut_off(tmp_path: Path) -> None:
    files = FullDisk()
    journal = open_journal(tmp_path, files=files)
    append(journal, submit(1))
    files.room, files.cuts_fail = 30, 2
    assert append(journal, submit(2)) != [None]
    files.room = float("inf")
    assert append(journal, submit(3)) != [None]  # the cut was tried again, and failed again
    assert append(journal, submit(4)) == [None]
    journal.close()
    assert numbers(read_journal(tmp_path, pool_id="p")) == [1, 4]


def test_t62_a_journal_that_cannot_be_begun_is_not_locked(tmp_path: Path) -> None:
    files = FullDisk(50)
    with pytest.raises(StoreWriteFailed, match="No space left on device"):
        open_journal(tmp_path, files=files)
    files.room = float("inf")
    open_journal(tmp_path, files=files).close()


FULL = """
import resource, signal, sys
from pathlib import Path
from tests.support.stores.support import append, end, lives, numbers, open_journal, submit

folder = Path(sys.argv[1])
limited = sys.argv[2] == "limit"
journal = open_journal(folder)
assert append(journal, submit(1), submit(2)) == [None, None]
size = (folder / "p.jsonl").stat().st_size
ballast = folder / "ballast"
if limited:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 100, resource.RLIM_INFINITY))
else:
    with ballast.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(b"x" * 4096)
        except OSError:
            pass
errors = append(journal, submit(3), end(1, result="x" * 5000))
assert all(error is not None for error in errors), errors
print(errors[0].__cause__.errno)
assert (folder / "p.jsonl").stat().st_size == size
if limited:
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
else:
    ballast.unlink()
assert append(journal, submit(4)) == [None]
journal.close()
journal = open_journal(folder)
assert numbers(journal.tasks) == [1, 2, 4], journal.tasks
assert journal.tasks[0]["result"] == "x" * 5000
journal.close()
"""


@pytest.mark.integration
def test_t62_a_write_that_the_kernel_refuses(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FULL, str(tmp_path), "limit"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr, int(done.stdout)) == (0, "", errno.EFBIG)


@pytest.mark.integration
def test_t62_a_file_system_that_is_full(tmp_path: Path) -> None:
    """In a mount namespace of its own, so that nothing is left mounted whatever happens."""
    small = 'mount -t tmpfs -o size=64k none "$1" && exec "$2" -c "$3" "$1" disk'
    unshare = shutil.which("unshare")
    if unshare is None or subprocess.run([unshare, "-Urm", "true"], capture_output=True, check=False).returncode:
        pytest.skip("no mount namespaces here")
    command = [unshare, "-Urm", "sh", "-c", small, "sh", str(tmp_path), sys.executable, FULL]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if "mount" in done.stderr:
        pytest.skip(f"mounting is not permitted: {done.stderr}")
    assert (done.returncode, done.stderr, int(done.stdout)) == (0, "", errno.ENOSPC)
    assert os.listdir(tmp_path) == []


def test_t62_lives_of_many_groups_are_all_there(tmp_path: Path) -> None:
    files = FullDisk(most=11)
    journal = open_journal(tmp_path, files=files)
    for number in range(1, 20):
        assert append(journal, *lives(number)) == [None, None]
    journal.close()
    assert statuses(read_journal(tmp_path, pool_id="p")) == dict.fromkeys(range(1, 20), "completed")
