"""SIGINT and SIGTERM, sent to real programs that drain: what they print, how they end, what they paid for."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.integration.tasks.programs import Program

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("warm_programs")]

PATIENCE = 60.0
"""Real seconds after which a program is taken to hang."""

PROGRAM = Path(__file__).with_name("batch_program.py")


class Upstream(ThreadingHTTPServer):
    """Answers prompts, counts for which it was paid, refuses every seventh call, and revokes a key in the middle."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.paid: Counter[int] = Counter()
        self.calls = 0
        self.delay = 0.02
        self.lock = threading.Lock()
        self.answered = 0
        self.holds_from: int | None = None
        """From so many paid prompts on they get no answer, until `let_go`."""
        self.held: list[int] = []
        self.let_go = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Upstream

    def do_POST(self) -> None:
        prompt = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        key = self.headers["Authorization"]
        with self.server.lock:
            self.server.calls += 1
            calls = self.server.calls
            refused = calls % 7 == 0
            revoked = key == "Bearer sk-3" and calls > 40
            held = self.server.holds_from is not None and sum(self.server.paid.values()) >= self.server.holds_from
            if not refused and not revoked:
                self.server.paid[prompt["id"]] += 1
                if held:
                    self.server.held.append(prompt["id"])
                else:
                    self.server.answered += 1
        if refused or revoked:
            self._answer(401 if revoked else 429, {})
        elif held:
            self.server.let_go.wait(PATIENCE)
            self.close_connection = True
        else:
            time.sleep(self.server.delay)
            self._answer(200, {"id": prompt["id"], "text": f"answer {prompt['id']}"})

    def _answer(self, status: int, content: Any) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        if status == 429:
            self.send_header("Retry-After", "0.05")
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: Any) -> None:
        pass


@contextmanager
def upstream() -> Iterator[Upstream]:
    server = Upstream()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def run(
    folder: Path, server: Upstream, *, until: Callable[[], bool] | None, what: signal.Signals
) -> tuple[int, list[str]]:
    """Run the program, signal it when this is true, and return its code and what it printed."""
    environment = {**os.environ, "HEADGATE_DIR": str(folder / "journal")}
    process = Program(
        [sys.executable, PROGRAM, folder, server.url],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=environment,
    )
    hangs = threading.Timer(PATIENCE, process.kill)
    hangs.start()
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    while until is not None and not until() and process.poll() is None:
        time.sleep(0.005)
    if until is not None:
        os.kill(process.pid, what)
    _, errors = process.communicate()
    hangs.cancel()
    hangs.join()
    return process.returncode, errors.splitlines()


def prompts_in(folder: Path, count: int) -> None:
    lines = [json.dumps({"id": number, "text": f"prompt {number}"}) for number in range(count)]
    (folder / "prompts.jsonl").write_text("\n".join(lines))


def answers_in(folder: Path) -> list[int]:
    return [json.loads(line)["id"] for line in (folder / "answers.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("first", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.soak)])
def test_t18_a_batch_interrupted_three_times_pays_for_no_prompt_twice_and_loses_none(
    tmp_path: Path, first: signal.Signals, scale: float
) -> None:
    stops = 3 if scale >= 1 else 2
    count = 60 * stops
    other = signal.SIGTERM if first == signal.SIGINT else signal.SIGINT
    prompts_in(tmp_path, count)
    with upstream() as server:
        for until, what in ((40, first), (80, other), (120, first))[:stops]:
            code, printed = run(tmp_path, server, until=lambda n=until: sum(server.paid.values()) >= n, what=what)
            assert code == 128 + what
            said = [line for line in printed if "cools down" not in line and "is disabled" not in line]
            assert len(said) == 1, said
            assert said[0].startswith(f"answers was interrupted: {what.name}, "), said
            found = answers_in(tmp_path)
            assert found == list(range(len(found))), "what finished was handed out, in order"
            assert until <= sum(server.paid.values()) < count
        code, _ = run(tmp_path, server, until=None, what=first)
        assert code == 0
        assert answers_in(tmp_path) == list(range(count))
        assert server.paid == Counter(range(count)), "each prompt was paid for once"


def ends_in(folder: Path) -> int:
    """How many tasks have completed, as the journal says."""
    return sum(file.read_text().count('"status":"completed"') for file in (folder / "journal").glob("*.jsonl"))


def test_t18_a_killed_batch_pays_twice_at_most_for_what_was_in_flight(tmp_path: Path, scale: float) -> None:
    """In flight are the calls that have no answer. (A call that has one may run again until its end is on the disk.)"""
    kills = (20, 40) if scale >= 1 else (20,)
    count = 40 + 20 * len(kills)
    at_once = min(12, (os.cpu_count() or 1) + 4)  # threads of asyncio.to_thread
    prompts_in(tmp_path, count)
    with upstream() as server:
        for number, server.holds_from in enumerate(kills, 1):
            code, _ = run(
                tmp_path,
                server,
                until=lambda n=at_once * number: len(server.held) == n and ends_in(tmp_path) == server.answered,
                what=signal.SIGKILL,
            )
            assert code == -signal.SIGKILL
            server.let_go.set()
            server.let_go = threading.Event()
        server.holds_from = None
        code, _ = run(tmp_path, server, until=None, what=signal.SIGKILL)
        assert code == 0
        assert answers_in(tmp_path) == list(range(count))
        assert set(server.paid) == set(range(count))
        assert sum(server.paid.values()) <= count + len(kills) * at_once
        assert {prompt for prompt, times in server.paid.items() if times > 1} == set(server.held)


WAYS = """
import asyncio, sys, time
import headgate

def ready():
    print("ready", flush=True)

async def slow(n, seconds=None):
    # Without seconds: until there was a signal, and a moment longer.
    while seconds is None and " closing " not in repr(headgate.pool_get("batch")):
        await asyncio.sleep(0.01)
    await asyncio.sleep(seconds or 0.05)
    return n

async def when_full(pool):
    while pool.snapshot(0).queued < 90:
        await asyncio.sleep(0.01)
    ready()

def stubborn(n):
    time.sleep(1000)

async def in_tasks():
    async with headgate.TaskPool("batch", max_concurrent=10, on_signal="drain") as pool:
        handles = await pool.submit_many(slow, [(n,) for n in range(100)])
        waiting = [asyncio.ensure_future(handle) for handle in handles]
        ready()
        await asyncio.sleep(1000)

async def in_group():
    async with headgate.TaskPool("batch", max_concurrent=10, on_signal="drain") as pool:
        async with asyncio.TaskGroup() as group:
            for n in range(100):
                group.create_task(pool.run(slow, n))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            ready()

async def in_the_exit():
    async with headgate.TaskPool("batch", max_concurrent=10, on_signal="drain") as pool:
        await pool.submit_many(slow, [(n,) for n in range(100)])
        ready()

async def in_unordered():
    async with headgate.TaskPool("batch", max_concurrent=10, on_signal="drain") as pool:
        asyncio.get_running_loop().create_task(when_full(pool))
        done = 0
        async for _ in pool.map(slow, range(100), ordered=False, window=100):
            done += 1
            print("done", done, flush=True)

async def in_map_with_more_to_do():
    try:
        async with headgate.TaskPool("batch", max_concurrent=10, on_signal="drain") as pool:
            asyncio.get_running_loop().create_task(when_full(pool))
            async for _ in pool.map(slow, range(100), window=100):
                pass
    finally:
        await asyncio.sleep(0.01)
        print("cleaned up", flush=True)

async def without_a_block():
    pool = headgate.TaskPool("batch", max_concurrent=10)
    pool.drain_on_signals()
    handles = await pool.submit_many(slow, [(n,) for n in range(100)])
    ready()
    await asyncio.sleep(1000)

async def two_pools():
    async with headgate.TaskPool("idle", on_signal="drain"):
        await in_the_exit()

async def endless():
    async with headgate.TaskPool("batch", max_concurrent=10, on_signal="drain") as pool:
        handles = await pool.submit_many(slow, [(n, 1000) for n in range(100)])
        ready()
        await asyncio.gather(*handles)

async def threads():
    async with headgate.TaskPool("batch", max_concurrent=10, on_signal="drain") as pool:
        handles = await pool.submit_many(stubborn, [(n,) for n in range(100)])
        ready()
        await asyncio.gather(*handles)

async def afterwards():
    async with headgate.TaskPool("batch", on_signal="drain") as pool:
        print(await pool.run(slow, 1, 0), flush=True)
    ready()
    await asyncio.sleep(1000)

asyncio.run(globals()[sys.argv[1]]())
"""


def interrupted(folder: Path, way: str, *signals: signal.Signals) -> tuple[int, list[str], list[str]]:
    """Start a program, send it signals when it is ready, and return its code, its output and its log."""
    file = folder / "ways.py"
    file.write_text(WAYS)
    process = Program(
        [sys.executable, file, way], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    hangs = threading.Timer(PATIENCE, process.kill)
    hangs.start()
    assert process.stdout is not None
    assert process.stderr is not None
    while process.stdout.readline() not in ("ready\n", ""):
        pass
    log = []
    for what in signals:
        os.kill(process.pid, what)
        if what is not signals[-1]:
            log.append(process.stderr.readline().rstrip("\n"))
    out, errors = process.communicate()
    hangs.cancel()
    hangs.join()
    return process.returncode, out.splitlines(), log + errors.splitlines()


DRAINS = "batch was interrupted: SIGTERM, waits for 10 running tasks, starts no more (90 queued); again to cancel"


@pytest.mark.parametrize(
    "way",
    [
        "in_unordered",
        "without_a_block",
        *(pytest.param(way, marks=pytest.mark.soak) for way in ("in_tasks", "in_group", "in_the_exit", "two_pools")),
    ],
)
def test_t18_a_signal_finishes_what_runs_and_ends_the_program_in_one_line(tmp_path: Path, way: str) -> None:
    code, out, log = interrupted(tmp_path, way, signal.SIGTERM)
    assert code == 143
    assert [line for line in log if not line.startswith("idle was")] == [DRAINS]
    assert out == ([f"done {n}" for n in range(1, 11)] if way == "in_unordered" else [])


def test_t18_what_stands_around_the_pool_cleans_up_before_the_program_ends(tmp_path: Path) -> None:
    assert interrupted(tmp_path, "in_map_with_more_to_do", signal.SIGTERM) == (143, ["cleaned up"], [DRAINS])


@pytest.mark.parametrize("way", ["endless", "threads"])
def test_t18_the_second_signal_cancels_what_runs(tmp_path: Path, way: str) -> None:
    code, out, log = interrupted(tmp_path, way, signal.SIGTERM, signal.SIGINT)
    assert (code, out) == (143, [])
    assert log[0] == DRAINS
    assert log[1].startswith("batch was interrupted: SIGINT again, 10 running tasks are cancelled")
    assert len(log) == 2, log


def test_t18_when_the_pool_is_closed_signals_do_what_they_did_before(tmp_path: Path) -> None:
    code, out, log = interrupted(tmp_path, "afterwards", signal.SIGTERM)
    assert (code, out, log) == (-signal.SIGTERM, [], [])
    code, _, log = interrupted(tmp_path, "afterwards", signal.SIGINT)
    assert code == -signal.SIGINT
    assert log[-1] == "KeyboardInterrupt"
