"""What tests of shared stores need: steps, listeners, and members in processes of their own."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from headgate.sharing.states import Outcome, Seen, SharedState, Step
from tests.integration.tasks.programs import Program

PATIENCE = 30.0


def increment(text: str | None, _: Seen) -> Outcome:
    count = int(text or 0) + 1
    return Outcome(str(count), count)


def read(text: str | None, _: Seen) -> Outcome:
    return Outcome(None, text)


def who(_: str | None, seen: Seen) -> Outcome:
    return Outcome(None, seen.member)


def write(text: str) -> Step:
    return lambda _, seen: Outcome(text)


def wake(*members: str) -> Step:
    return lambda _, seen: Outcome(None, None, members)


def gone(*members: str) -> Step:
    return lambda _, seen: Outcome(None, [seen.is_gone(member) for member in members])


def ask(store: SharedState, step: Step, key: str = "k", *, durable: bool = False) -> Any:
    return store.transact(key, step, durable=durable).result(PATIENCE)


def eventually(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.005)


class Listener:
    """Counts what it is told."""

    def __init__(self) -> None:
        self.wakes = threading.Semaphore(0)
        self.losses = 0
        self.errors: list[Exception] = []

    def woken(self) -> None:
        self.wakes.release()

    def lost(self) -> None:
        self.losses += 1

    def unreachable(self, error: Exception) -> None:
        self.errors.append(error)

    def wait(self) -> None:
        assert self.wakes.acquire(timeout=PATIENCE)


MEMBER = """
import json, os, sys, threading
from headgate.sharing.states import Outcome
from headgate.stores.sqlite import SqliteStore
from tests.integration.stores.shared.support import Listener, ask, gone, increment, read, wake, who, write

store = SqliteStore(sys.argv[1], heartbeat=float(sys.argv[2]))
listener = Listener()
journals = []

def fork():
    pid = os.fork()
    if not pid:
        os._exit(0)
    return os.waitpid(pid, 0)[1]

def fork_and_use():
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        os.write(writer, json.dumps([ask(store, who), ask(store, increment)]).encode())
        os._exit(0)
    os.waitpid(pid, 0)
    os.close(writer)
    answer = json.loads(os.read(reader, 1000))
    os.close(reader)
    return answer

def fork_and_stay():
    pid = os.fork()
    if not pid:
        sys.stdout.close()
        sys.stdin.readline()
        os._exit(0)
    return pid

def many(count):
    for _ in range(count):
        ask(store, increment)

commands = {
    "id": lambda: ask(store, who),
    "increment": lambda: ask(store, increment),
    "many": many,
    "read": lambda: ask(store, read),
    "wake": lambda *members: ask(store, wake(*members)),
    "gone": lambda *members: ask(store, gone(*members)),
    "listen": lambda: store.listen("k", listener) and None,
    "wait": listener.wait,
    "close": lambda: store.close(),
    "fork": fork,
    "fork_and_use": fork_and_use,
    "fork_and_stay": fork_and_stay,
    "open": lambda: journals.append(store.open("p", {}, 10)),
}
for line in sys.stdin:
    name, *arguments = json.loads(line)
    print(json.dumps(commands[name](*arguments)), flush=True)
"""


class Process:
    """A member in a process of its own, which is killed at the end of a `with` block."""

    def __init__(self, path: Path, *, heartbeat: float = 600.0) -> None:
        """With this heartbeat nothing is found by looking from time to time."""
        self._process = Program(
            [sys.executable, "-c", MEMBER, str(path), str(heartbeat)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
        )
        self.pid = self._process.pid

    def send(self, name: str, *arguments: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([name, *arguments]).encode() + b"\n")

    def answer(self) -> Any:
        assert self._process.stdout is not None
        data = b""
        while not data.endswith(b"\n"):
            assert select.select([self._process.stdout], [], [], PATIENCE)[0], "no answer"
            got = os.read(self._process.stdout.fileno(), 65536)
            assert got, "it has ended"
            data += got
        return json.loads(data)

    def __call__(self, name: str, *arguments: object) -> Any:
        self.send(name, *arguments)
        return self.answer()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def end(self) -> int:
        """Let it reach the end of its program."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        return self._process.wait(PATIENCE)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
