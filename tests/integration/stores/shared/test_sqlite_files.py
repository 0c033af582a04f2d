"""G02 and G24 for SqliteStore: where its files are, what is refused, disks that are full, rows that somebody spoilt."""

from __future__ import annotations

import fcntl
import os
import pickle
import shutil
import socket
import sqlite3
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from headgate.errors import (
    HeadgateError,
    InvalidArgument,
    InvalidType,
    StoreFormatTooNew,
    StoreLocked,
    StoreUnreachable,
    StoreWriteFailed,
)
from headgate.sharing.sqlite import place as sqlite_place
from headgate.sharing.sqlite.place import network_file_system
from headgate.sharing.states import Outcome
from headgate.stores import SqliteStore
from tests.integration.stores.shared.support import (
    PATIENCE,
    Listener,
    ask,
    eventually,
    gone,
    increment,
    read,
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


def refused(path: Path, kind: type[HeadgateError], words: str) -> None:
    """Both `connect` and a step say why, and the file is as it was."""
    before = path.read_bytes() if path.is_file() else None
    store = SqliteStore(path)
    try:
        for _ in range(2):
            with pytest.raises(kind, match=words):
                store.connect(PATIENCE)
            with pytest.raises(kind, match=words):
                ask(store, increment)
    finally:
        store.close()
    assert before is None or path.read_bytes() == before


def admission_file(path: Path) -> Path:
    (found,) = [one for one in path.parent.glob("*-boot-*") if not one.name.endswith(("-lock", "-journal"))]
    return found


# -- making ------------------------------------------------------------------------------------------------------------


def test_g02_making_a_store_touches_nothing(path: Path) -> None:
    store = SqliteStore(str(path))
    store.listen("k", Listener())
    assert list(path.parent.iterdir()) == []
    assert repr(store) == f"<SqliteStore {path}>"
    assert store.shared is True
    store.close()
    store.close()
    assert repr(store) == f"<SqliteStore {path} closed>"
    assert list(path.parent.iterdir()) == []


def test_g02_wrong_arguments_are_refused(path: Path) -> None:
    with pytest.raises(InvalidType, match="path"):
        SqliteStore(3)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="empty"):
        SqliteStore("")
    with pytest.raises(InvalidArgument, match="no other process"):
        SqliteStore(":memory:")
    with pytest.raises((InvalidArgument, InvalidType), match="heartbeat"):
        SqliteStore(path, heartbeat=0)
    with pytest.raises(InvalidArgument, match="codec must be 'json'"):
        SqliteStore(path, codec="pickle")  # type: ignore[arg-type]
    store = SqliteStore(path)
    with pytest.raises(InvalidType, match="key"):
        store.transact(1, read)  # type: ignore[arg-type]
    store.close()


def test_g02_files_and_directories_are_made_for_this_user_alone(tmp_path: Path) -> None:
    path = tmp_path / "new" / "deep" / "shared.db"
    store = SqliteStore(path)
    ask(store, increment)
    ask(store, increment, durable=True)
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o700
    for found in path.parent.rglob("*"):
        assert stat.S_IMODE(found.stat().st_mode) == (0o700 if found.is_dir() else 0o600), found
    store.close()
    assert list(Path(f"{path}-members").iterdir()) == []


def test_g02_a_symbolic_link_leads_to_the_same_store(store: SqliteStore, path: Path, tmp_path: Path) -> None:
    ask(store, increment)
    (tmp_path / "elsewhere").mkdir()
    link = tmp_path / "elsewhere" / "link.db"
    link.symlink_to(path)
    other = SqliteStore(link)
    assert ask(other, increment) == 2
    assert ask(other, gone(ask(store, who))) == [False]
    other.close()
    assert list(link.parent.iterdir()) == [link]


def test_g02_members_with_long_paths_still_wake_each_other(tmp_path: Path) -> None:
    path = tmp_path / ("x" * 100) / ("y" * 100) / "shared.db"
    one, two = SqliteStore(path, heartbeat=600.0), SqliteStore(path, heartbeat=600.0)
    listener = Listener()
    one.listen("k", listener)
    name = ask(one, who)
    ask(two, lambda _, seen: Outcome("x", None, [name]))
    listener.wait()
    one.close()
    two.close()


def test_g02_the_admission_file_of_another_boot_is_deleted(
    path: Path, store: SqliteStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ask(store, write("admission"))
    ask(store, write("kept"), durable=True)
    store.close()
    old = admission_file(path)
    boot = tmp_path / "boot_id"
    boot.write_text("00000000-1111-2222-3333-444444444444\n")
    monkeypatch.setattr(sqlite_place, "BOOT", boot)
    later = SqliteStore(path)
    assert ask(later, read) is None
    assert ask(later, read, durable=True) == "kept"
    assert not old.exists()
    assert admission_file(path).name == "shared.db-boot-00000000-1111-2222-3333-444444444444"
    later.close()


def test_g02_where_the_boot_is_not_known_admission_is_kept(
    path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sqlite_place, "BOOT", tmp_path / "missing")
    store = SqliteStore(path)
    assert ask(store, increment) == 1
    assert admission_file(path).name == "shared.db-boot-unknown"
    store.close()


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_g24_a_file_of_keys_that_is_removed_while_it_is_used_is_made_again_with_a_warning(
    store: SqliteStore, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ask(store, write("kept"), durable=True)
    assert "was removed" not in caplog.text
    path.unlink()
    assert ask(store, read, durable=True) is None
    assert f"{path} was removed while 1 processes use it" in caplog.text


def test_g02_a_directory_is_refused(tmp_path: Path) -> None:
    refused(tmp_path, InvalidArgument, "is a directory")


def test_g02_a_file_in_place_of_the_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    refused(tmp_path / "file" / "shared.db", StoreWriteFailed, "Not a directory")


@pytest.mark.parametrize("garbage", [b"garbage\n" * 1000, b"x", os.urandom(5000)], ids=["text", "short", "random"])
def test_g02_a_file_that_is_no_database_is_refused_and_left(path: Path, garbage: bytes) -> None:
    path.write_bytes(garbage)
    refused(path, InvalidArgument, "not a SQLite database")


def test_g02_a_database_of_another_program_is_refused_and_left(path: Path) -> None:
    with sqlite3.connect(path) as database:
        database.execute("CREATE TABLE theirs (x)")
    database.close()
    refused(path, InvalidArgument, "another program")


def test_g02_a_newer_format_is_refused_and_left(path: Path, store: SqliteStore) -> None:
    ask(store, increment, durable=True)
    store.close()
    with sqlite3.connect(path) as database:
        database.execute("PRAGMA user_version = 7")
    database.close()
    refused(path, StoreFormatTooNew, "has format 7")
    with pytest.raises(StoreFormatTooNew, match="has format 7"):
        SqliteStore(path).open("p", {}, 10)


def test_g02_a_file_that_is_cut_in_the_middle_is_an_error(path: Path, store: SqliteStore) -> None:
    for number in range(50):
        ask(store, write("x" * 1000), f"k{number}", durable=True)
    store.close()
    size = path.stat().st_size
    with open(path, "r+b") as file:
        file.seek(4096)
        file.write(b"\xff" * (size - 4096))
    again = SqliteStore(path)
    with pytest.raises(StoreWriteFailed, match="damaged"):
        ask(again, read, "k7", durable=True)
    assert ask(again, increment) == 1, "the other file is not damaged"
    again.close()


def test_g02_a_database_with_a_write_ahead_log_in_use_is_refused(path: Path) -> None:
    SqliteStore(path).open("p", {}, 10).close()
    database = sqlite3.connect(path)
    database.execute("PRAGMA journal_mode=WAL")
    database.execute("BEGIN IMMEDIATE")
    store = SqliteStore(path)
    with pytest.raises(StoreUnreachable, match=r"locked|journal mode"):
        store.connect(PATIENCE)
    database.close()
    store.connect(PATIENCE)
    assert ask(store, increment, durable=True) == 1
    store.close()
    assert not Path(f"{path}-wal").exists()


def test_g02_a_lock_that_somebody_keeps_is_named_after_the_timeout(path: Path, store: SqliteStore) -> None:
    with open(f"{path}-lock", "w") as gate:
        fcntl.flock(gate, fcntl.LOCK_EX)
        with pytest.raises(StoreUnreachable, match=r"did not answer within 0\.1 s.*SIGSTOP"):
            store.connect(0.1)
        waiting = store.transact("k", increment)
        assert waiting.cancel()
        other = store.transact("k", increment)
    assert other.result(PATIENCE) == 1
    store.connect(PATIENCE)


@pytest.mark.parametrize(
    ("mount", "kind"),
    [
        ("nfs4 server:/x rw", "nfs4"),
        ("nfs server:/x rw", "nfs"),
        ("cifs //server/x rw", "cifs"),
        ("smb3 //server/x rw", "smb3"),
        ("9p x rw", "9p"),
        ("fuse.sshfs user@host:/x rw", r"fuse\.sshfs"),
        ("ceph x rw", "ceph"),
    ],
)
def test_g02_a_network_file_system_is_refused_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mount: str, kind: str
) -> None:
    table = tmp_path / "mountinfo"
    place = tmp_path / "with space"
    place.mkdir()
    mounted = str(place).replace(" ", "\\040")
    table.write_text(f"1 0 8:1 / / rw - ext4 /dev/x rw\n2 1 0:5 / {mounted} rw,nosuid shared:1 - {mount}\n")
    monkeypatch.setattr(sqlite_place, "MOUNTS", table)
    refused(place / "deep" / "shared.db", InvalidArgument, rf"network file system \({kind}\)")
    with pytest.raises(InvalidArgument, match="network file system"):
        SqliteStore(place / "shared.db").open("p", {}, 10)
    assert list(place.iterdir()) == []


@pytest.mark.parametrize("kind", ["ext4", "xfs", "btrfs", "zfs", "tmpfs", "overlay", "fuseblk", "fuse.mergerfs", "new"])
def test_g02_other_file_systems_are_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    table = tmp_path / "mountinfo"
    lines = [
        "1 0 8:1 / / rw - nfs server:/root rw",
        f"2 1 0:5 / {tmp_path} rw - nfs server:/hidden rw",
        f"3 1 0:6 / {tmp_path} rw shared:1 master:2 - {kind} x rw",
        f"4 1 0:7 / {tmp_path}-other rw - nfs server:/x rw",
        "garbage",
        "",
    ]
    table.write_text("\n".join(lines))
    monkeypatch.setattr(sqlite_place, "MOUNTS", table)
    assert network_file_system(tmp_path) is None
    assert network_file_system(Path("/elsewhere")) == "nfs"
    monkeypatch.setattr(sqlite_place, "MOUNTS", tmp_path / "missing")
    assert network_file_system(Path("/elsewhere")) is None


# -- disks -------------------------------------------------------------------------------------------------------------


USE = """
import os, sys
from headgate.errors import HeadgateError
from headgate.stores import SqliteStore
from tests.integration.stores.shared.support import ask, increment
warm = SqliteStore(sys.argv[2])  # what is imported later, a user who may not read the library could not
ask(warm, increment)
warm.open("p", {}, 1).close()
warm.close()
if not os.geteuid():
    os.seteuid(65534)
store = SqliteStore(sys.argv[1])
for use in (lambda: store.connect(9), lambda: ask(store, increment), lambda: store.open("p", {}, 1).close()):
    try:
        use()
        print("used")
    except HeadgateError as error:
        print(type(error).__name__, error)
store.close()
"""


def as_nobody(path: Path, other: Path) -> str:
    """Use a store as a user who may not write everywhere, as root may; `other` is used before."""
    ran = subprocess.run(
        [sys.executable, "-c", USE, path, other],
        timeout=PATIENCE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return ran.stdout


@pytest.mark.integration
def test_g02_a_directory_without_permission_is_named(tmp_path: Path) -> None:
    open_to_all(tmp_path, 0o755)
    closed = tmp_path / "closed"
    closed.mkdir(0o555)
    said = as_nobody(closed / "new" / "shared.db", tmp_path / "other.db")
    assert said.count("StoreWriteFailed") == 3, said
    assert "Permission denied" in said
    assert list(closed.iterdir()) == []


def open_to_all(folder: Path, mode: int) -> None:
    for one in folder.parents:
        if one == Path(tempfile.gettempdir()):
            break
        one.chmod(0o755)
    folder.chmod(mode)


@pytest.mark.integration
def test_g02_a_read_only_file_is_named_and_works_when_it_can_be_written(path: Path) -> None:
    open_to_all(path.parent, 0o777)
    SqliteStore(path).open("p", {}, 10).close()
    path.chmod(0o444)
    Path(f"{path}-lock").chmod(0o666)
    os.chown(f"{path}-members", 65534 if os.getuid() == 0 else -1, -1)
    said = as_nobody(path, path.with_name("other.db"))
    assert said.count("StoreWriteFailed") == 3, said
    assert "readonly" in said
    path.chmod(0o666)
    Path(f"{path}-journal").chmod(0o666)
    said = as_nobody(path, path.with_name("other.db"))
    assert said.split() == ["used"] * 3


@pytest.mark.integration
def test_g20_a_full_disk_fails_the_step_alone_and_the_next_one_works(path: Path) -> None:
    code = """
import resource, sys
from headgate.errors import StoreWriteFailed
from headgate.stores import SqliteStore
from tests.integration.stores.shared.support import ask, increment, read, write
store = SqliteStore(sys.argv[1])
for durable in (False, True):
    ask(store, increment, durable=durable)
    resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, resource.RLIM_INFINITY))
    futures = [
        store.transact(key, step, durable=durable)
        for key, step in [("k", increment), ("big", write("x" * 200_000)), ("k", increment)]
    ]
    for future in futures:
        try:
            print(future.result(30))
        except StoreWriteFailed as error:
            print("StoreWriteFailed", "could not be written" in str(error))
    print(ask(store, read, "big", durable=durable))
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    ask(store, write("x" * 200_000), "big", durable=durable)
    print(ask(store, increment, durable=durable))
"""
    ran = subprocess.run([sys.executable, "-c", code, path], timeout=PATIENCE, stdout=subprocess.PIPE, text=True)
    assert ran.stdout.splitlines() == ["2", "StoreWriteFailed True", "3", "None", "4"] * 2


@pytest.mark.integration
@pytest.mark.skipif(os.getuid() != 0, reason="a file system is mounted")
def test_g20_a_file_system_without_room_fails_steps_until_there_is_room(tmp_path: Path) -> None:
    code = """
import os, subprocess, sys
from pathlib import Path
from headgate.errors import StoreWriteFailed
from headgate.stores import SqliteStore
from tests.integration.stores.shared.support import ask, increment, write
place = Path(sys.argv[1])
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "small", place], check=True)
store = SqliteStore(place / "shared.db")
ask(store, increment)
filler = place / "filler"
with open(filler, "wb", buffering=0) as file:
    try:
        while True:
            file.write(b"x" * 4096)
    except OSError:
        pass
for _ in range(2):
    try:
        ask(store, write("x" * 20_000), "big")
    except StoreWriteFailed as error:
        print("StoreWriteFailed", "Make room" in str(error))
filler.unlink()
ask(store, write("x" * 20_000), "big")
print(ask(store, increment))
"""
    ran = subprocess.run(
        ["unshare", "-m", sys.executable, "-c", code, tmp_path],
        timeout=PATIENCE,
        capture_output=True,
        text=True,
    )
    if "permitted" in ran.stderr or "denied" in ran.stderr:
        pytest.skip("this machine lets nobody mount")
    assert ran.stdout.splitlines() == ["StoreWriteFailed True"] * 2 + ["2"], ran.stderr


# -- what others do to the files ---------------------------------------------------------------------------------------


def test_g24_a_step_gets_garbage_as_text_and_nothing_is_run(path: Path, store: SqliteStore, tmp_path: Path) -> None:
    ask(store, write("x"))
    mark = tmp_path / "run"

    class Evil:
        def __reduce__(self) -> tuple[object, ...]:
            return os.system, (f"touch {mark}",)

    values: list[object] = [pickle.dumps(Evil()), b"\xff\xfe", "\ufffd", 3, 2.5, None, "", '{"$type": "os:system"}']
    with sqlite3.connect(admission_file(path)) as database:
        for number, value in enumerate(values):
            database.execute("INSERT INTO texts (key, text) VALUES (?, ?)", (f"bad{number}", value))
        database.execute("INSERT INTO texts (key, text) VALUES (?, ?)", (7, 7))
    database.close()
    for number, value in enumerate(values):
        found = ask(store, read, f"bad{number}")
        assert found is None if value is None else isinstance(found, str)
    assert ask(store, increment, "bad3") == 4
    assert not mark.exists()


@pytest.mark.parametrize("ahead", [1e300, float("inf"), float("-inf"), None, "tomorrow", b"\xff", -1e300])
def test_g24_garbage_for_a_clock_does_not_move_time(path: Path, store: SqliteStore, ahead: object) -> None:
    ask(store, increment)
    store.close()
    with sqlite3.connect(admission_file(path)) as database:
        database.execute("UPDATE clocks SET ahead = ?", (ahead,))
    database.close()
    again = SqliteStore(path)
    now = ask(again, lambda _, seen: Outcome(None, seen.now))
    assert abs(now - time.time()) < 60
    again.close()


def test_g24_tables_that_are_not_ours_give_an_error(path: Path, store: SqliteStore) -> None:
    ask(store, increment)
    store.close()
    with sqlite3.connect(admission_file(path)) as database:
        database.execute("DROP TABLE texts")
        database.execute("CREATE VIEW texts AS SELECT 1 AS wrong")
    database.close()
    again = SqliteStore(path)
    with pytest.raises(StoreWriteFailed):
        ask(again, increment)
    again.close()


def test_g22_garbage_in_the_directory_of_members_does_no_harm(path: Path) -> None:
    folder = Path(f"{path}-members")
    folder.mkdir(parents=True, mode=0o700)
    (folder / "garbage").write_bytes(b"\xff")
    (folder / "0123456789ab.lock").mkdir()
    (folder / "0123456789ac.lock").symlink_to("/etc/passwd")
    (folder / "0123456789ad.sock").write_text("no lock")
    (folder / "0123456789ae.lock").write_text("nobody holds it")
    (folder / "0123456789ae.sock").write_text("no socket")
    os.mkfifo(folder / "0123456789af.lock")
    store = SqliteStore(path)
    assert ask(store, increment) == 1
    assert ask(store, gone("0123456789ae", "../../etc/passwd", "", "\0", "garbage")) == [True] * 5
    left = {one.name for one in folder.iterdir()}
    assert "garbage" in left
    assert not left & {"0123456789ad.sock", "0123456789ae.lock", "0123456789ae.sock", "0123456789af.lock"}
    ask(store, lambda _, seen: Outcome("2", None, ["nobody", "0123456789ab", "../x", "\ud800"]))
    store.close()


@pytest.mark.parametrize("kind", ["writable", "foreign"])
def test_g24_a_directory_of_members_in_which_others_may_write_is_refused(path: Path, kind: str) -> None:
    folder = Path(f"{path}-members")
    folder.mkdir()
    if kind == "writable":
        folder.chmod(0o777)
    elif os.getuid() == 0:
        os.chown(folder, 65534, -1)
    else:
        pytest.skip("only root can give a directory away")
    refused(path, InvalidArgument, "belongs to another user, or others may write to it")


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs /proc: run this on Linux")
def test_g22_garbage_on_a_connection_does_no_harm(path: Path) -> None:
    store = SqliteStore(path, heartbeat=600.0)
    name = ask(store, who)
    folder = os.open(f"{path}-members", os.O_RDONLY)
    address = f"/proc/self/fd/{folder}/{name}.sock"  # the path itself may be too long for a socket
    wrong = [
        b"\xff" * 100,
        b"\0\0\0\x03abc",
        b"\0\0\0\x0c0123456789ab\0\0\0\x01k",
        b"\0\0\0\0",
        b"",
        b"\0",
        b"\0\0\0\x0c" + name.encode() + b"\0\0\0\x02\xff\xff" + b"\xff" * 10,
    ]
    for data in wrong:
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(address)
            client.sendall(data)
    assert ask(store, gone(name)) == [False]
    other = SqliteStore(path, heartbeat=600.0)
    listener = Listener()
    stop = store.listen("k", listener)
    ask(other, lambda _, seen: Outcome("x", None, [name]))
    listener.wait()
    stop()
    store.close()
    other.close()
    os.close(folder)


def test_g22_a_member_whose_files_are_deleted_takes_part_again(path: Path) -> None:
    store = SqliteStore(path, heartbeat=0.05)
    other = SqliteStore(path, heartbeat=0.05)
    listener = Listener()
    store.listen("k", listener)
    name = ask(store, who)
    (Path(f"{path}-members") / f"{name}.lock").unlink()
    eventually(lambda: listener.losses == 1)
    assert ask(store, who) != name
    eventually(lambda: ask(other, gone(name, ask(store, who))) == [True, False])
    store.close()
    other.close()


def test_g22_files_that_are_deleted_while_a_store_is_used_are_made_again(path: Path, store: SqliteStore) -> None:
    other = SqliteStore(path)
    assert ask(store, increment) == 1
    assert ask(other, increment) == 2
    for file in (admission_file(path), path):
        for ending in ("", "-lock", "-journal"):
            Path(f"{file}{ending}").unlink()
    assert ask(store, increment) == 1
    assert ask(other, increment) == 2, "both use the new file"
    assert ask(store, increment, durable=True) == 1
    other.close()


def test_g22_a_directory_that_is_deleted_while_a_store_is_used_is_made_again(tmp_path: Path) -> None:
    path = tmp_path / "data" / "shared.db"
    store = SqliteStore(path, heartbeat=0.05)
    listener = Listener()
    store.listen("k", listener)
    name = ask(store, who)
    shutil.rmtree(path.parent)
    path.parent.write_text("in the way")
    eventually(lambda: listener.losses == 1 and bool(listener.errors))
    with pytest.raises(StoreWriteFailed):
        ask(store, increment)
    path.parent.unlink()
    while listener.wakes.acquire(blocking=False):
        pass
    listener.wait()
    assert ask(store, increment) == 1
    assert ask(store, who) != name
    assert listener.losses == 1
    store.close()


def test_g03_one_writer_and_who_it_is(path: Path) -> None:
    journal = SqliteStore(path).open("pool", {}, 10)
    with pytest.raises(StoreLocked, match=rf"'pool' in .*shared\.db is in use by process {os.getpid()} on "):
        SqliteStore(path).open("pool", {}, 10)
    journal.close()
    SqliteStore(path).open("pool", {}, 10).close()
