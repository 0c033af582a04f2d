"""What is left behind is found, and what goes away in time is not."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import IO

import pytest

from headgate.errors import InvalidArgument
from headgate.testing import Leak, no_leaks, run, virtual

needs_proc = pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="files and children are read from /proc")


def test_a_clean_block_passes() -> None:
    with no_leaks():
        with socket.socket():
            pass
        thread = threading.Thread(target=int)
        thread.start()
        thread.join()
        subprocess.run([sys.executable, "-c", "pass"], check=True)
        run(lambda: asyncio.to_thread(int))


def test_a_thread_is_found_with_its_line() -> None:
    gate = threading.Event()
    thread = threading.Thread(target=gate.wait, name="the stray", daemon=True)
    try:
        words = r"1 left behind:\n  daemon thread 'the stray' at .*threading.py:\d+ in wait"
        with pytest.raises(Leak, match=words), no_leaks(grace=0.02):
            thread.start()
    finally:
        gate.set()
        thread.join()


def test_a_thread_that_ends_in_time_is_no_leak() -> None:
    gate = threading.Event()
    with no_leaks(grace=10):
        threading.Thread(target=gate.wait).start()
        threading.Timer(0.05, gate.set).start()


@needs_proc
def test_an_open_file_is_found_with_its_target(tmp_path: Path) -> None:
    opened: list[IO[str]] = []
    with pytest.raises(Leak, match=r"file \d+ -> .*/left.txt"), no_leaks(grace=0.02):
        opened.append((tmp_path / "left.txt").open("w"))
    opened.pop().close()


@needs_proc
def test_a_number_reused_for_another_file_is_found(tmp_path: Path) -> None:
    first = os.open(tmp_path / "first", os.O_CREAT)
    second = os.open(tmp_path / "second", os.O_CREAT)
    with pytest.raises(Leak, match=rf"file {first} -> .*/second"), no_leaks(grace=0):
        os.dup2(second, first)
    os.close(first)
    os.close(second)


@needs_proc
@pytest.mark.parametrize("state", ["alive", "ended"])
def test_a_child_is_found(state: str) -> None:
    expected = "import sys" if state == "alive" else "ended, and nobody waited for it"
    children: list[subprocess.Popen[bytes]] = []

    def start() -> None:
        code = "import sys; print(flush=True); sys.stdin.read()"
        child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        children.append(child)
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdout.readline()
        if state == "ended":
            child.stdin.close()
            os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)

    with pytest.raises(Leak, match=rf"child \d+: .*{expected}"), no_leaks(files=False, grace=0):
        start()
    with children.pop():
        pass


def test_the_resource_tracker_is_nobodys_leak() -> None:
    with no_leaks():
        multiprocessing.get_context("spawn").Lock()


def test_a_task_is_found() -> None:
    async def main() -> None:
        strays: list[asyncio.Task[None]] = []
        with pytest.raises(Leak, match=r"Task 'stray' in sleep"), no_leaks(grace=0.02):
            strays.append(asyncio.create_task(asyncio.sleep(10), name="stray"))
        strays.pop().cancel()

    run(main)


@virtual
async def test_async_with_lets_tasks_end_while_time_stands() -> None:
    strays: list[asyncio.Task[None]] = []
    async with no_leaks():
        strays.append(asyncio.create_task(asyncio.sleep(0)))
        asyncio.create_task(asyncio.sleep(10)).cancel()
    with pytest.raises(Leak, match="Task 'stray'"):
        async with no_leaks(grace=0.02):
            strays.append(asyncio.create_task(asyncio.sleep(10), name="stray"))
    strays.pop().cancel()
    assert asyncio.get_running_loop().time() == 0.0


def test_what_is_not_asked_for_is_not_checked(tmp_path: Path) -> None:
    gate = threading.Event()
    thread = threading.Thread(target=gate.wait)

    async def main() -> None:
        with no_leaks(tasks=False, threads=False, files=False, children=False):
            strays.append(asyncio.create_task(asyncio.sleep(0)))
            thread.start()
            streams.append((tmp_path / "x").open("w"))

    strays: list[object] = []
    streams: list[IO[str]] = []
    run(main, check_leaks=False)
    streams.pop().close()
    gate.set()
    thread.join()


def test_an_error_in_the_block_comes_first() -> None:
    gate = threading.Event()
    thread = threading.Thread(target=gate.wait)

    def fail() -> None:
        thread.start()
        raise LookupError

    with pytest.raises(LookupError), no_leaks():
        fail()
    gate.set()
    thread.join()


def test_a_bad_grace_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="grace must be >= 0 seconds, got -1"):
        no_leaks(grace=-1)


def test_importing_it_imports_no_pytest() -> None:
    code = "import sys, headgate.testing; sys.exit('pytest' in sys.modules)"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", code], check=True, env=env)
