"""T62 with real processes: killed while they write, fighting for one journal, forked while they have it."""

from __future__ import annotations

import os
import random
import re
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from headgate.errors import StoreLocked
from headgate.stores import read_journal
from tests.support.stores.support import append, numbers, open_journal, statuses, submit

pytestmark = pytest.mark.integration

PATIENCE = 30.0


def start(code: str, *args: object) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", code, *map(str, args)], stdout=subprocess.PIPE)


WRITER = """
import asyncio, os, sys
from pathlib import Path
from headgate.stores.jsonl import writer
from tests.support.stores.support import end, open_journal, submit

writer._MANY_LINES = 50

async def main():
    journal = open_journal(Path(sys.argv[1]), keep=5)
    loop = asyncio.get_running_loop()
    async def one(number):
        while True:
            about = {"idempotency_key": str(number)} if number % 3 == 0 else {}
            for kind, entry in (("s", submit(number, about)), ("e", end(number, result=number))):
                answer = loop.create_future()
                journal.append(entry, answer.set_result)
                assert await answer is None
                os.write(1, b"%s%d\\n" % (kind.encode(), number))
            number += 20
    first = max((task["task"] for task in journal.tasks), default=0) + 1
    await asyncio.gather(*(one(first + n) for n in range(20)))

asyncio.run(main())
"""


def test_t62_a_writer_that_is_killed_loses_nothing_it_acknowledged(tmp_path: Path, scale: float) -> None:
    chance = random.Random(7)
    enough = 100 if scale >= 1 else 20
    for run in range(max(2, int(120 * scale**1.8))):
        folder = tmp_path / str(run // 6)  # a new one now and then, because what holds a key stays for ever
        if run % 6 == 0:
            ended: set[int] = set()
        with start(WRITER, folder) as process:
            assert process.stdout is not None
            first = os.read(process.stdout.fileno(), 10)
            while run % 6 == 0 and first.count(b"e") <= enough:  # the others are killed at any moment
                more = os.read(process.stdout.fileno(), 10)
                assert more, "the writer has ended"
                first += more
            time.sleep(chance.uniform(0, 0.06))
            process.kill()
            told = (first + process.stdout.read()).split(b"\n")[:-1]
        submitted = {int(line[1:]) for line in told if line.startswith(b"s")}  # of former runs some are stale now
        ended |= {int(line[1:]) for line in told if line.startswith(b"e")}
        found = statuses(read_journal(folder, pool_id="p"))
        assert all(found.get(number) == "completed" for number in ended if number % 3 == 0)
        assert all(found[number] == "completed" for number in ended & set(found))
        assert {number for number in submitted if number % 3 == 0} <= set(found)
        assert max(found) >= max(submitted, default=0)
    journal = open_journal(folder)
    journal.close()
    assert {number for number in ended if number % 3 == 0} <= set(numbers(journal.tasks))
    assert len(ended) > enough


HOLDER = """
import sys
from pathlib import Path
from headgate.errors import StoreLocked
from tests.support.stores.support import open_journal

sys.stdin.readline()
try:
    journal = open_journal(Path(sys.argv[1]))
except StoreLocked as error:
    print(f"lost {error}", flush=True)
else:
    print("won", flush=True)
    sys.stdin.read()
"""


def test_t62_of_two_processes_one_wins_and_the_other_is_told_who(tmp_path: Path, scale: float) -> None:
    for _ in range(max(1, int(20 * scale**1.5))):
        fighters = [
            subprocess.Popen(
                [sys.executable, "-c", HOLDER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            for _ in range(2)
        ]
        for fighter in fighters:
            assert fighter.stdin is not None
            fighter.stdin.write("\n")
            fighter.stdin.flush()
        said = [fighter.stdout.readline() for fighter in fighters if fighter.stdout is not None]
        assert sorted(line.split()[0] for line in said) == ["lost", "won"]
        winner = fighters[said.index("won\n")]
        told = next(line for line in said if line.startswith("lost"))
        named = re.search(r"in use by process (\d+)", told)
        # A loser that is quicker than the winner's first write cannot know its name, but says no wrong one.
        assert (named is not None and int(named[1]) == winner.pid) or "by another process" in told
        with pytest.raises(StoreLocked, match=f"in use by process {winner.pid} on "):
            open_journal(tmp_path)
        for fighter in fighters:
            fighter.kill()
            fighter.communicate()
        open_journal(tmp_path).close()


FORKER = """
import os, sys, time
from pathlib import Path
from tests.support.stores.support import append, open_journal, submit

journal = open_journal(Path(sys.argv[1]))
append(journal, submit(1))
child = os.fork()
if not child:
    answers = append(journal, submit(2))
    journal.append(submit(3))
    journal.close()
    os.write(1, b"%s %s\\n" % (type(answers[0]).__name__.encode(), str("forked" in str(answers[0])).encode()))
    time.sleep(60)
os.write(1, b"%d\\n" % child)  # in one piece: both write to this pipe
time.sleep(60)
"""


def test_t62_a_forked_child_does_not_keep_the_lock(tmp_path: Path) -> None:
    with start(FORKER, tmp_path) as parent:
        assert parent.stdout is not None
        said = sorted(parent.stdout.readline() for _ in range(2))
        child = int(said[0])
        assert said[1] == b"StoreWriteFailed True\n"
        try:
            with pytest.raises(StoreLocked, match=str(parent.pid)):  # what the child did changed nothing
                open_journal(tmp_path)
            parent.kill()
            parent.wait()
            os.kill(child, 0)
            journal = open_journal(tmp_path)
            assert statuses(journal.tasks) == {1: "queued"}
            journal.close()
        finally:
            os.kill(child, signal.SIGKILL)


def open_files() -> list[str]:
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{name}"))
        except OSError:  # that of the folder itself
            pass
    return found


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs /proc")
def test_t62_a_fork_waits_for_a_file_that_is_being_opened(tmp_path: Path, scale: float) -> None:
    """Children are forked while journals are opened and compacted: none of them may inherit a descriptor."""
    stop = threading.Event()

    def churn() -> None:
        while not stop.is_set():
            journal = open_journal(tmp_path)
            append(journal, submit(1))
            journal.close()

    thread = threading.Thread(target=churn)
    thread.start()
    try:
        for _ in range(30 if scale >= 1 else 10):
            read_end, write_end = os.pipe()
            child = os.fork()
            if not child:
                os.write(write_end, b"bad" if any("p.jsonl" in name for name in open_files()) else b"good")
                os._exit(0)
            os.close(write_end)
            assert select.select([read_end], [], [], PATIENCE)[0]
            assert os.read(read_end, 9) == b"good"
            os.close(read_end)
            os.waitpid(child, 0)
    finally:
        stop.set()
        thread.join()


FORGETFUL = """
import asyncio, sys
from pathlib import Path
from tests.support.stores.support import open_journal, submit

journal = open_journal(Path(sys.argv[1]))

async def main():
    for number in range(1, 1001):
        journal.append(submit(number))

asyncio.run(main())
"""


def test_t62_an_interpreter_that_ends_without_close_writes_and_ends(tmp_path: Path) -> None:
    with start(FORGETFUL, tmp_path) as process:
        assert process.wait(PATIENCE) == 0
    assert len(read_journal(tmp_path, pool_id="p")) == 1000


AT_EXIT = """
import atexit, sys
from pathlib import Path
from tests.support.stores.support import open_journal, submit

journal = open_journal(Path(sys.argv[1]))

@atexit.register
def late():
    journal.append(submit(1))
    journal.close()
"""


def test_t62_what_is_appended_at_exit_is_written(tmp_path: Path) -> None:
    with start(AT_EXIT, tmp_path) as process:
        assert process.wait(PATIENCE) == 0
    assert numbers(read_journal(tmp_path, pool_id="p")) == [1]


def test_t62_a_writer_whose_name_is_not_written_yet_is_not_confused_with_the_last(tmp_path: Path) -> None:
    with start("print()") as gone:
        gone.wait()
    journal = open_journal(tmp_path)
    path = tmp_path / "p.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"pid":%d' % os.getpid(), b'"pid":%d' % gone.pid))
    with pytest.raises(StoreLocked, match=rf"in use by another process; .* process {gone.pid} on \S+, has ended"):
        open_journal(tmp_path)
    journal.close()
