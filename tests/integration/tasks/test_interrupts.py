"""Ctrl-C, sent to real programs: what they print, and when they end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from headgate.core.threads import Threads
from tests.integration.tasks import programs

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("warm_programs")]

PATIENCE = 60.0
"""Real seconds after which a program is taken to hang; what it runs takes far longer."""

PROGRAM = """
import asyncio, pathlib, sys, time
import headgate

here = pathlib.Path(__file__).parent

async def slow(n):
    await asyncio.sleep(1000)

def stubborn(key, n):
    (here / f"started-{n}").touch()
    time.sleep(1000)

def ready():
    print("ready", flush=True)

async def when_full(pool):
    while pool.snapshot(0).queued < 900:
        await asyncio.sleep(0.01)
    ready()

async def in_as_completed():
    async with headgate.TaskPool("batch", max_concurrent=100) as pool:
        handles = [await pool.submit(slow, n) for n in range(1000)]
        ready()
        for handle in asyncio.as_completed(handles):
            await handle

async def in_tasks():
    async with headgate.TaskPool("batch", max_concurrent=100) as pool:
        waiting = [asyncio.ensure_future(await pool.submit(slow, n)) for n in range(1000)]
        ready()
        await asyncio.sleep(1000)

async def in_gather():
    async with headgate.TaskPool("batch", max_concurrent=100) as pool:
        handles = [await pool.submit(slow, n) for n in range(1000)]
        ready()
        await asyncio.gather(*handles)

async def in_the_exit():
    async with headgate.TaskPool("batch", max_concurrent=100) as pool:
        for n in range(1000):
            await pool.submit(slow, n)
        ready()

async def in_map():
    async with headgate.TaskPool("batch", max_concurrent=100) as pool:
        telling = asyncio.create_task(when_full(pool))
        async for _ in pool.map(slow, range(1000), window=1000):
            pass

async def without_a_block():
    pool = headgate.TaskPool("batch", max_concurrent=100)
    handles = [await pool.submit(slow, n) for n in range(1000)]
    ready()
    for handle in asyncio.as_completed(handles):
        await handle

async def failing():
    async with headgate.TaskPool("batch", max_concurrent=100) as pool:
        handles = [await pool.submit(slow, n) for n in range(1000)]
        handles.append(await pool.submit(int, "x", priority=9))
        handles[0].cancel()
        for handle in asyncio.as_completed(handles[1:]):
            await handle

async def threads(**options):
    keys = headgate.ResourcePool({"a": "secret-a"})
    async with headgate.TaskPool("batch", max_concurrent=4, resources=keys, **options) as pool:
        handles = [await pool.submit(stubborn, n) for n in range(6)]
        while len(list(here.glob("started-*"))) < 4:
            await asyncio.sleep(0.01)
        ready()
        for handle in asyncio.as_completed(handles):
            await handle

async def on_workers():
    async with headgate.WorkerPool(spawn=1, lazy=False) as workers:
        await threads(workers=workers)

async def threads_without_a_block():
    keys = headgate.ResourcePool({"a": "secret-a"})
    pool = headgate.TaskPool("batch", max_concurrent=4, resources=keys)
    handle = await pool.submit(stubborn, 1)
    ready()
    await handle

if __name__ == "__main__":
    try:
        asyncio.run(globals()[sys.argv[1]]())
    except (KeyboardInterrupt, ValueError) as error:
        print(type(error).__name__, flush=True)
"""


class Program:
    """A program that is interrupted."""

    def __init__(self, path: Path, way: str) -> None:
        file = path / "program.py"
        file.write_text(PROGRAM)
        self.process = programs.Program(
            [sys.executable, file, way],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._hangs = threading.Timer(PATIENCE, self.process.kill)
        self._hangs.start()

    def interrupt(self) -> None:
        os.kill(self.process.pid, signal.SIGINT)

    def waits(self) -> None:
        """Return when its main thread has slept for a while: it waits for something."""
        asleep = 0
        while asleep < 20:
            of_main = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/stat").read_text()
            asleep = asleep + 1 if of_main.rpartition(")")[2].split()[0] == "S" else 0
            time.sleep(0.025)

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def told(self) -> str:
        """The next line of its log."""
        assert self.process.stderr is not None
        return self.process.stderr.readline()

    def ended(self) -> tuple[str, list[str]]:
        """What it printed since, and what it logged."""
        out, err = self.process.communicate()
        self._hangs.cancel()
        self._hangs.join()
        assert self.process.returncode != -signal.SIGKILL, "it did not end"
        return out, err.splitlines()


@pytest.mark.parametrize(
    "way",
    [
        "in_map",
        *(
            pytest.param(way, marks=pytest.mark.soak)
            for way in ("in_tasks", "in_as_completed", "in_gather", "in_the_exit")
        ),
    ],
)
def test_t18_a_pool_that_is_left_by_ctrl_c_says_so_in_one_line(tmp_path: Path, way: str) -> None:
    program = Program(tmp_path, way)
    assert program.line() == "ready\n"
    program.interrupt()
    out, log = program.ended()
    assert out == "KeyboardInterrupt\n"
    assert log == ["batch was interrupted: 100 running and 900 queued tasks are cancelled"]


def test_t18_a_pool_without_a_block_says_in_one_line_what_ctrl_c_has_lost(tmp_path: Path) -> None:
    program = Program(tmp_path, "without_a_block")
    assert program.line() == "ready\n"
    program.interrupt()
    out, log = program.ended()
    assert out == "KeyboardInterrupt\n"
    [line] = log
    assert line.startswith("batch was never closed, and 100 running and 900 queued tasks were lost")


def test_t18_a_block_that_fails_prints_nothing_about_the_tasks_it_cancels(tmp_path: Path) -> None:
    out, log = Program(tmp_path, "failing").ended()
    assert (out, log) == ("ValueError\n", [])


@pytest.mark.parametrize("way", ["threads", "on_workers"])
def test_t18_the_second_ctrl_c_ends_a_program_whose_plain_function_holds_a_key(tmp_path: Path, way: str) -> None:
    program = Program(tmp_path, way)
    assert program.line() == "ready\n"
    program.interrupt()
    told = program.told()
    assert told.startswith("batch was interrupted: 4 running and 2 queued tasks are cancelled")
    assert told.endswith("; 4 in threads, which end by themselves or with another Ctrl-C\n")
    program.waits()  # for what runs; and asyncio raises the second one in whatever task it hits
    program.interrupt()
    out, log = program.ended()
    assert out == "KeyboardInterrupt\n"
    assert not [line for line in log if "retrieved" in line]


def test_t18_the_second_ctrl_c_ends_it_without_a_block_too(tmp_path: Path) -> None:
    program = Program(tmp_path, "threads_without_a_block")
    assert program.line() == "ready\n"
    program.interrupt()
    program.waits()  # for the thread, and must be interrupted there and not before
    program.interrupt()
    out, log = program.ended()
    assert out == "KeyboardInterrupt\n"
    assert any(line.startswith("batch was never closed") for line in log)


# -- the threads of a pool ---------------------------------------------------------------------------------------------


def test_threads_are_as_many_as_there_are_calls_in_progress_and_are_used_again() -> None:
    threads, gate = Threads("test"), threading.Event()
    first = [threads.submit(gate.wait) for _ in range(5)]
    named = {thread.name for thread in threading.enumerate() if thread.name.startswith("test_")}
    assert len(named) == 5
    gate.set()
    assert all(future.result(10) for future in first)
    for _ in range(50):
        assert threads.submit(threading.current_thread).result(10).name in named
    threads.shutdown()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("test_")]


def test_threads_end_when_nobody_holds_them_any_more() -> None:
    threads = Threads("dropped")
    thread = threads.submit(threading.current_thread).result(10)
    del threads
    thread.join(10)
    assert not thread.is_alive()


def test_threads_tell_what_a_call_raises() -> None:
    threads = Threads("raising")
    assert isinstance(threads.submit(int, "x").exception(10), ValueError)
    assert isinstance(threads.submit(sys.exit, 3).exception(10), SystemExit)
    assert threads.submit(int, "7").result(10) == 7
    threads.shutdown()
