"""Routines that start processes in many ways, and wait for some of them only much later."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from headgate import routine

QUIET: dict[str, Any] = {
    "stdin": subprocess.DEVNULL,
    "stdout": subprocess.DEVNULL,
    "stderr": subprocess.DEVNULL,
}


def zombies() -> set[int]:
    """Children of this process that have ended and were not waited for."""
    found = set()
    for thread in os.listdir("/proc/self/task"):
        try:
            children = Path(f"/proc/self/task/{thread}/children").read_text().split()
        except OSError:
            continue
        for pid in children:
            try:
                state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
            except OSError:
                continue
            if state == "Z":
                found.add(int(pid))
    return found


@routine
async def zombies_here() -> set[int]:
    return zombies()


def in_a_thread_that_ends(start: Callable[[], Any]) -> Any:
    """What it returns. The thread is gone then, and what it started is a child of the main thread."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(start()))
    thread.start()
    thread.join()
    return found[0]


def forked(code: int) -> int:
    pid = os.fork()
    if pid == 0:
        os._exit(code)
    return pid


def spawned(code: int) -> int:
    return os.posix_spawn(sys.executable, [sys.executable, "-ISc", f"raise SystemExit({code})"], os.environ)


def opened(code: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(["sh", "-c", f"exit {code}"], **QUIET)


class Opened(subprocess.Popen):  # type: ignore[type-arg]
    """A class of a user's own."""


def process(method: Any, code: int) -> Any:
    made = multiprocessing.get_context(method).Process(target=os._exit, args=(code,))
    made.start()
    return made


def double_fork() -> int:
    """A daemon, as the books say: its parent ends at once, and was waited for."""
    reader, writer = os.pipe()
    between = os.fork()
    if between == 0:
        os.setsid()
        daemon = os.fork()
        if daemon == 0:
            os._exit(0)
        os.write(writer, b"%d" % daemon)
        os._exit(0)
    os.waitpid(between, 0)
    os.close(writer)
    try:
        return int(os.read(reader, 20))
    finally:
        os.close(reader)


def left_by_shell(command: str) -> int:
    told = subprocess.run(["sh", "-c", f"{command} </dev/null >/dev/null 2>&1 & echo $!"], stdout=-1, check=True)
    return int(told.stdout)


@routine
async def orphans() -> set[int]:
    """Leave some, all of which end at once or soon."""
    loop = asyncio.get_running_loop()
    found = {double_fork(), left_by_shell("true"), left_by_shell("sleep 0.2"), left_by_shell("setsid sleep 0.2")}
    found.add(await loop.run_in_executor(None, left_by_shell, "sleep 0.1"))
    for _ in range(20):
        found.add(left_by_shell("true"))
    return found


@routine(thread=True)
async def orphans_of_a_thread() -> set[int]:
    return {double_fork(), left_by_shell("sleep 0.1")}


@routine
async def statuses() -> dict[str, tuple[int, int]]:
    """Start processes of our own, wait for them only when the worker has reaped all orphans, and tell the exit status
    of each: what it was, and what it should be."""
    left = {double_fork(), left_by_shell("true")}
    expected = iter(range(11, 60))
    got: dict[str, tuple[int, int]] = {}
    waits: list[tuple[str, int, Callable[[], int]]] = []

    def later(name: str, start: Callable[[int], Any], wait: Callable[[Any], int]) -> None:
        code = next(expected)
        made = start(code)
        waits.append((name, code, lambda: wait(made)))

    def status(pid: int) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    def joined(one: Any) -> int:
        one.join()
        return int(one.exitcode)

    later("Popen", opened, lambda one: one.wait())
    later("Popen of a thread that ended", lambda code: in_a_thread_that_ends(lambda: opened(code)), lambda o: o.wait())
    later(
        "a subclass of Popen, of a thread that ended",
        lambda code: in_a_thread_that_ends(lambda: Opened(["sh", "-c", f"exit {code}"], **QUIET)),
        lambda one: one.wait(),
    )
    later("fork", forked, status)
    later("fork of a thread that ended", lambda code: in_a_thread_that_ends(lambda: forked(code)), status)
    later("posix_spawn", spawned, status)
    later("multiprocessing fork", lambda code: process("fork", code), joined)
    later("multiprocessing spawn", lambda code: process("spawn", code), joined)
    later(
        "multiprocessing fork of a thread that ended",
        lambda code: in_a_thread_that_ends(lambda: process("fork", code)),
        joined,
    )
    later(
        "multiprocessing spawn of a thread that ended",
        lambda code: in_a_thread_that_ends(lambda: process("spawn", code)),
        joined,
    )
    alone, leave = threading.Event(), threading.Event()
    seen: list[int] = []

    def lives_a_while() -> None:
        seen.append(spawned(10))
        alone.set()
        leave.wait(30)

    thread = threading.Thread(target=lives_a_while)
    thread.start()
    alone.wait(30)
    child = await asyncio.create_subprocess_exec("sh", "-c", "exit 9", **QUIET)
    got["asyncio"] = (await child.wait(), 9)
    got["run"] = (subprocess.run(["sh", "-c", "exit 8"], check=False, **QUIET).returncode, 8)  # noqa: ASYNC221
    deadline = time.monotonic() + 20
    await asyncio.sleep(1.5)
    leave.set()
    thread.join()
    while left & zombies() and time.monotonic() < deadline:  # noqa: ASYNC110 - the worker has reaped what it may
        await asyncio.sleep(0.05)
    await asyncio.sleep(2.2)  # two further looks at what is ours
    got["orphans that are left"] = (len(left & zombies()), 0)
    got["posix_spawn of a thread that ended later"] = (status(seen[0]), 10)
    for name, code, wait in waits:
        got[name] = (wait(), code)
    return got


def says_and_sleeps(writer: int) -> None:
    """Sleep in short steps: Python sees a signal that comes just before a sleep only after it."""
    os.write(writer, b".")
    for _ in range(6000):
        time.sleep(0.01)


@routine
async def terminated(number: int, at_once: bool) -> int | None:
    """Start a process by fork, send it this signal, and tell how it ended."""
    reader, writer = os.pipe()
    made = multiprocessing.get_context("fork").Process(target=says_and_sleeps, args=(writer,))
    made.start()
    try:
        if not at_once:
            await asyncio.to_thread(os.read, reader, 1)
        assert made.pid is not None
        os.kill(made.pid, number)
        await asyncio.to_thread(made.join, 10)
        return made.exitcode
    finally:
        made.kill()
        os.close(reader)
        os.close(writer)
