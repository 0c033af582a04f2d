"""G20, G22, G06 for SqliteStore, with real processes: killed, stopped, forked, woken."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from headgate.stores import SqliteStore
from tests.integration.stores.shared.support import (
    PATIENCE,
    Listener,
    Process,
    ask,
    eventually,
    gone,
    increment,
    read,
    wake,
    who,
)

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("warm_programs")]

NEVER = 600.0
"""A heartbeat that does not come: what a test waits for must come by itself."""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "shared.db"


@pytest.fixture
def store(path: Path) -> Iterator[SqliteStore]:
    store = SqliteStore(path, heartbeat=NEVER)
    yield store
    store.close()


def lock_files(path: Path) -> set[str]:
    return {name for name in os.listdir(f"{path}-members") if name.endswith((".lock", ".sock"))}


def test_g20_a_member_that_is_killed_is_gone_and_wakes_the_others(store: SqliteStore, path: Path) -> None:
    listener = Listener()
    store.listen("any key", listener)
    ask(store, read)
    with Process(path) as member:
        name = member("id")
        assert ask(store, gone(name)) == [False]
        while listener.wakes.acquire(blocking=False):
            pass
        member.kill()
        listener.wait()  # by itself, and not with a heartbeat
        assert ask(store, gone(name)) == [True]
    eventually(lambda: not {file for file in lock_files(path) if file.startswith(name)})


def test_g20_a_member_that_was_killed_before_anybody_knew_it_is_gone(store: SqliteStore, path: Path) -> None:
    with Process(path) as member:
        name = member("id")
    assert ask(store, gone(name)) == [True]
    assert ask(store, gone(name)) == [True]


def test_g20_a_member_that_is_stopped_is_not_gone(store: SqliteStore, path: Path) -> None:
    with Process(path) as member, Process(path) as other:
        names = member("id"), other("id")
        member.signal(signal.SIGSTOP)
        eventually(lambda: "T (stopped)" in Path(f"/proc/{member.pid}/status").read_text())
        assert ask(store, gone(*names)) == [False, False]
        with Process(path) as late:
            assert late("gone", *names) == [False, False], "one that comes later cannot ask it, and knows by its lock"
        for number in range(2000):  # more than its socket takes
            ask(store, wake(names[0])) if number % 100 == 0 else store.transact("k", wake(names[0]))
        member.signal(signal.SIGCONT)
        assert member("gone", names[0]) == [False]
        member("listen")
        store.transact("k", wake(names[0]))
        member("wait")


def test_g20_a_process_that_ends_without_closing_its_store_is_gone(store: SqliteStore, path: Path) -> None:
    with Process(path) as member:
        name = member("id")
        assert ask(store, gone(name)) == [False]
        assert member.end() == 0
        eventually(lambda: ask(store, gone(name)) == [True])
    assert len(lock_files(path)) == 2, "its own"


def test_g22_members_in_other_processes_are_woken(store: SqliteStore, path: Path) -> None:
    listener = Listener()
    store.listen("k", listener)
    name = ask(store, who)
    with Process(path) as one, Process(path) as two:
        one("listen")
        names = one("id"), two("id")
        for _ in range(20):
            two("wake", name, names[0])
            listener.wait()
            one("wait")
            ask(store, wake(names[0]))
            one("wait")


def test_g22_a_wake_up_that_is_lost_costs_a_heartbeat(path: Path) -> None:
    store = SqliteStore(path, heartbeat=0.05)
    listener = Listener()
    stop = store.listen("k", listener)
    ask(store, who)
    listener.wait()
    listener.wait()
    stop()
    store.close()


def test_g20_without_sockets_a_death_is_found_at_a_heartbeat(path: Path) -> None:
    store = SqliteStore(path, heartbeat=0.05)
    with Process(path) as member:
        name = member("id")
        (Path(f"{path}-members") / f"{name}.sock").unlink()
        assert ask(store, gone(name)) == [False], "its lock is held"
        member.kill()
        eventually(lambda: ask(store, gone(name)) == [True])
    store.close()


def test_g20_a_hundred_that_come_and_are_killed_leave_no_files(store: SqliteStore, path: Path, scale: float) -> None:
    code = """
import os, sys
from headgate.stores import SqliteStore
from tests.integration.stores.shared.support import ask, increment
for _ in range(int(sys.argv[2])):
    pid = os.fork()
    if not pid:
        store = SqliteStore(sys.argv[1])
        ask(store, increment)
        os.kill(os.getpid(), 9)
    os.waitpid(pid, 0)
"""
    count = max(12, int(100 * scale))
    subprocess.run([sys.executable, "-c", code, path, str(count)], check=True, timeout=PATIENCE * 4)
    assert ask(store, read) == str(count)
    assert len(lock_files(path)) <= 2 + 2, "each removes those it finds; the last one may be there"


# -- forks -------------------------------------------------------------------------------------------------------------


def test_g06_the_end_of_a_forked_child_does_not_end_its_parent(store: SqliteStore, path: Path) -> None:
    listener = Listener()
    store.listen("k", listener)
    own = ask(store, who)
    with Process(path) as parent:
        name = parent("id")
        assert ask(store, gone(name)) == [False]
        assert parent("fork") == 0
        assert ask(store, gone(name)) == [False]
        with Process(path) as late:
            assert late("gone", name, own) == [False, False]
        parent("wake", own)
        listener.wait()
        assert parent("increment") == 1, "its connections still work"


def test_g06_a_forked_child_is_a_member_of_its_own(store: SqliteStore, path: Path) -> None:
    with Process(path) as parent:
        name = parent("id")
        for count in (1, 3):
            child, counted = parent("fork_and_use")
            assert child != name
            assert counted == count
            eventually(lambda child=child: ask(store, gone(child, name)) == [True, False])
            assert parent("increment") == count + 1


def test_g06_a_forked_child_that_lives_does_not_keep_its_parent_alive(store: SqliteStore, path: Path) -> None:
    with Process(path) as parent:
        name = parent("id")
        assert ask(store, gone(name)) == [False]
        child = parent("fork_and_stay")
        try:
            listener = Listener()
            stop = store.listen("k", listener)
            parent.kill()
            listener.wait()
            assert ask(store, gone(name)) == [True]
            assert Path(f"/proc/{child}").exists()
            stop()
        finally:
            os.kill(child, signal.SIGKILL)


def test_g06_to_open_a_store_imports_no_module_that_a_fork_could_cut_off() -> None:
    """It is opened in a thread. A fork meanwhile leaves what that thread imports half done in the child."""
    code = """
import sys
from headgate.sharing.sqlite.place import boot_id
before = set(sys.modules)
boot_id()
print(sorted(set(sys.modules) - before))
"""
    ran = subprocess.run([sys.executable, "-c", code], check=True, timeout=PATIENCE, stdout=subprocess.PIPE)
    assert ran.stdout == b"[]\n"


def test_g06_forks_while_steps_run_do_not_hang_the_child(path: Path, scale: float) -> None:
    code = """
import os, sys, threading
from headgate.stores import SqliteStore
from tests.integration.stores.shared.support import ask, increment
store = SqliteStore(sys.argv[1])
ended = threading.Event()
def work():
    while not ended.is_set():
        ask(store, increment)
        ask(store, increment, durable=True)
threads = [threading.Thread(target=work) for _ in range(2)]
for thread in threads:
    thread.start()
try:
    for _ in range(int(sys.argv[2])):
        pid = os.fork()
        if not pid:
            ask(store, increment, "child")
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
finally:
    ended.set()
    for thread in threads:
        thread.join()
print(ask(store, increment, "child"))
"""
    count = max(10, int(100 * scale))
    ran = subprocess.run(
        [sys.executable, "-c", code, path, str(count)], check=True, timeout=PATIENCE * 4, stdout=subprocess.PIPE
    )
    assert ran.stdout.split() == [b"%d" % (count + 1)]


def test_g02_steps_of_many_processes_have_one_order(path: Path, scale: float) -> None:
    count = max(50, int(1000 * scale**1.3))
    processes = [Process(path) for _ in range(4 if scale >= 1 else 2)]
    try:
        for process in processes:
            process.send("many", count)
        for process in processes:
            process.answer()
        assert processes[0]("read") == str(len(processes) * count)
    finally:
        for process in processes:
            process.__exit__(None, None, None)


def test_g20_processes_killed_in_the_middle_of_transactions_leave_a_whole_file(path: Path, scale: float) -> None:
    store = SqliteStore(path, heartbeat=NEVER)
    for _ in range(max(1, int(30 * scale**1.2) - 1)):
        with Process(path) as one, Process(path) as two:
            before = int(ask(store, read) or 0)
            for process in (one, two):
                process.send("many", 100_000)
            eventually(lambda before=before: int(ask(store, read) or 0) > before + 20)
    count = int(ask(store, read))
    assert ask(store, increment) == count + 1
    store.close()


def test_g02_a_program_that_forgets_its_store_ends_quietly(path: Path) -> None:
    code = """
import gc, sys
from headgate.stores import SqliteStore
from tests.integration.stores.shared.support import ask, increment
store = SqliteStore(sys.argv[1])
ask(store, increment)
other = SqliteStore(sys.argv[1])
ask(other, increment)
del other
gc.collect()
store.transact("k", increment)
"""
    ran = subprocess.run(
        [sys.executable, "-X", "dev", "-W", "error", "-c", code, path],
        check=True,
        timeout=PATIENCE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    said = [line for line in ran.stdout.splitlines() if not line.startswith(b"Executing ")]
    assert said == [], "but asyncio, which with -X dev tells of whatever took 0.1 s, as on a busy machine"
    assert lock_files(path) == set()
    store = SqliteStore(path)
    assert ask(store, read) == "3"
    store.close()
