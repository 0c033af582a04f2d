"""Processes that share a budget, and a judge of what they ran: for tests/integration/tasks/test_shared_processes.py."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

CHILD = Path(__file__).with_name("shared_child.py")
ROOT = Path(__file__).parents[3]
PATIENCE = 60.0


def eventually(holds: Callable[[], Any], seconds: float = PATIENCE) -> Any:
    """Return what it gives as soon as that is true."""
    deadline = time.monotonic() + seconds
    while not (found := holds()):
        assert time.monotonic() < deadline, f"not within {seconds:g} s"
        time.sleep(0.005)
    return found


class Nursery:
    """A process that has imported headgate and forks others."""

    def __init__(self, *before: str) -> None:
        """`before` is put in front of the command."""
        environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
        self._process = subprocess.Popen(
            [*before, sys.executable, str(CHILD)], stdin=subprocess.PIPE, bufsize=0, env=environment
        )

    def fork(self, options: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(options).encode() + b"\n")

    def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        assert self._process.wait(PATIENCE) == 0


class Child:
    """One process that shares a budget. It is told what to do, and answers."""

    def __init__(self, connection: socket.socket, stderr: Path) -> None:
        connection.settimeout(PATIENCE)
        self._socket = connection
        self._stderr = stderr
        self._numbers = count(1)
        self._answers: dict[int, dict[str, Any]] = {}
        self._received = b""
        self.died: float | None = None
        """When it was killed, at the earliest."""
        self.pid: int = self.answer(0)

    def send(self, command: str, *given: Any, **options: Any) -> int:
        """Tell it to do something; returns a number for `answer`."""
        number = next(self._numbers)
        self._socket.sendall(json.dumps([number, command, options or list(given)]).encode() + b"\n")
        return number

    def answer(self, number: int, seconds: float = PATIENCE) -> Any:
        deadline = time.monotonic() + seconds
        while number not in self._answers:
            ready, _, _ = select.select([self._socket], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"no answer within {seconds:g} s\n{self.stderr()}"
            data = self._socket.recv(1 << 16)
            assert data, f"it has ended\n{self.stderr()}"
            *lines, self._received = (self._received + data).split(b"\n")
            for line in lines:
                found = json.loads(line)
                self._answers[found["number"]] = found
        found = self._answers.pop(number)
        assert "error" not in found, f"{found.get('error')}\n{self.stderr()}"
        return found["value"]

    def __call__(self, command: str, *given: Any, **options: Any) -> Any:
        return self.answer(self.send(command, *given, **options))

    def stderr(self) -> str:
        return self._stderr.read_text() if self._stderr.exists() else ""

    def kill(self) -> None:
        """End it at once. Returns when it is gone."""
        if self.died is None:
            self.died = time.monotonic()
            os.kill(self.pid, signal.SIGKILL)
            eventually(self._is_gone)
            self._socket.close()

    def _is_gone(self) -> bool:
        try:
            return "\nState:\tZ" in Path(f"/proc/{self.pid}/status").read_text()
        except OSError:
            return True

    def stop(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)
        eventually(lambda: "T (stopped)" in Path(f"/proc/{self.pid}/status").read_text())

    def go_on(self) -> None:
        os.kill(self.pid, signal.SIGCONT)


class Interval(NamedTuple):
    """When a task ran: a little shorter than it had its slot."""

    start: float
    end: float
    name: str
    pid: int


class World:
    """The processes of one test, their store, and what they tell of their tasks."""

    def __init__(self, nursery: Nursery, folder: Path) -> None:
        self.path = folder / "store" / "shared.db"
        self.events = folder / "events"
        self.children: list[Child] = []
        self._folder = folder
        self._nursery = nursery
        self._server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._server.settimeout(PATIENCE)
        self._server.bind(os.fspath(folder / "s"))
        self._server.listen(64)
        self._numbers = count()

    def child(self, *, heartbeat: float = 0.5, keys: int | None = None, **pool: Any) -> Child:
        """Start one more process, whose pool has these options."""
        stderr = self._folder / f"stderr-{next(self._numbers)}"
        options = {"socket": os.fspath(self._folder / "s"), "events": os.fspath(self.events), "stderr": str(stderr)}
        self._nursery.fork({**options, "path": str(self.path), "pool": pool, "keys": keys, "heartbeat": heartbeat})
        connection, _ = self._server.accept()
        child = Child(connection, stderr)
        self.children.append(child)
        return child

    def some(self, number: int, **options: Any) -> list[Child]:
        return [self.child(**options) for _ in range(number)]

    def stop(self, child: Child) -> None:
        """Stop a process, and not in the middle of a transaction: all others would wait for it (see `sqlite_file`)."""
        while True:
            child.stop()
            gates = {f":{gate.stat().st_ino}" for gate in self.path.parent.glob("*-lock")}
            held = [line.split() for line in Path("/proc/locks").read_text().splitlines() if "->" not in line]
            if not any(lock[4] == str(child.pid) and lock[5].endswith(tuple(gates)) for lock in held):
                return
            child.go_on()

    # -- the judge -----------------------------------------------------------------------------------------------------

    def told(self, what: str) -> list[dict[str, Any]]:
        """The events of a kind so far, in the order of time."""
        lines = self.events.read_text().splitlines() if self.events.exists() else []
        return sorted((e for e in map(json.loads, lines) if e["what"] == what), key=lambda event: event["at"])

    def started(self) -> list[str]:
        return [event["name"] for event in self.told("start")]

    def intervals(self) -> list[Interval]:
        """When each task ran. What a killed process left open ended when it was killed; the rest runs still."""
        deaths = {child.pid: child.died for child in self.children if child.died is not None}
        ends = {(event["pid"], event["name"]): event["at"] for event in self.told("end")}
        return [
            Interval(event["at"], ends.get(place, deaths.get(event["pid"], float("inf"))), event["name"], event["pid"])
            for event in self.told("start")
            for place in [(event["pid"], event["name"])]
        ]

    def running(self) -> list[str]:
        """What runs now."""
        return [one.name for one in self.intervals() if one.end == float("inf")]

    def most(self) -> int:
        """How many ran at once, at the worst moment."""
        return most_at_once(self.intervals())

    def wait_started(self, *names: str, seconds: float = PATIENCE) -> None:
        eventually(lambda: set(names) <= set(self.started()), seconds)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._server.close()
        for child in self.children:
            child.kill()


def most_at_once(intervals: list[Interval]) -> int:
    """The greatest number of intervals that have a moment in common. One that ends as another begins does not."""
    steps = sorted([(one.start, 1) for one in intervals] + [(one.end, -1) for one in intervals])
    running = most = 0
    for _, step in steps:
        running += step
        most = max(most, running)
    return most
