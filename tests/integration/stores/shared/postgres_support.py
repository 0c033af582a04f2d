"""Steps, listeners and processes for the tests of PostgresStore. Run as a program it is such a process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO, Any

from headgate import PostgresStore
from headgate.sharing.states import Outcome, Seen, Step

PATIENCE = 60.0
"""Seconds until what does not happen is a failure."""


def increment(who: str, seq: int) -> Step:
    """Add 1 to a counter, once for each sequence number of each process, however often the step is run."""

    def step(text: str | None, _: Seen) -> Outcome:
        state: dict[str, Any] = json.loads(text) if text else {"count": 0, "seqs": {}}
        if state["seqs"].get(who, 0) >= seq:
            return Outcome(None, state["count"])
        state["seqs"][who] = seq
        state["count"] += 1
        return Outcome(json.dumps(state), state["count"])

    return step


def who_am_i(_: str | None, seen: Seen) -> Outcome:
    return Outcome(None, seen.member)


def read(text: str | None, _: Seen) -> Outcome:
    return Outcome(None, text)


def gone(member: str) -> Step:
    return lambda _, seen: Outcome(None, seen.is_gone(member))


def ask(store: PostgresStore, step: Step, key: str = "key", *, durable: bool = False) -> Any:
    return store.transact(key, step, durable=durable).result(PATIENCE)


def eventually(holds: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


class Heard:
    """A listener that keeps what it is told."""

    def __init__(self) -> None:
        self.wakes = 0
        self.losses = 0
        self.errors: list[Exception] = []
        self.any = threading.Event()

    def woken(self) -> None:
        self.wakes += 1
        self.any.set()

    def lost(self) -> None:
        self.losses += 1

    def unreachable(self, error: Exception) -> None:
        self.errors.append(error)


class Child:
    """A process that uses a store; see `_MODES`."""

    def __init__(self, mode: str, *arguments: object) -> None:
        command = [sys.executable, os.path.abspath(__file__), mode, *map(str, arguments)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self._input: IO[str] = self.process.stdin
        self._output: IO[str] = self.process.stdout

    def line(self) -> str:
        return self._output.readline().strip()

    def say(self, text: str) -> None:
        self._input.write(text + "\n")
        self._input.flush()

    def end(self) -> str:
        """Let it end; returns what it still said."""
        self._input.close()
        said = self._output.read()
        assert self.process.wait(PATIENCE) == 0
        return said


@contextmanager
def children(*many: Child) -> Iterator[None]:
    """End these processes, whatever happens."""
    try:
        yield
    finally:
        for child in many:
            child.process.kill()
            child.process.wait()
            child._input.close()
            child._output.close()


def _say(*words: object) -> None:
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


def _counts(dsn: str, who: str, durable: str) -> None:
    """Count until nobody wants more, and say how far it came."""
    enough = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), enough.set()), daemon=True).start()
    seq = 0
    with PostgresStore(dsn, lease=2.0) as store:
        while not enough.is_set():
            seq += 1
            ask(store, increment(who, seq), durable=durable == "durable")
            if seq == 1:
                _say("began")
    _say(seq)


def _stays(dsn: str, lease: str) -> None:
    """Say the id; then, for each line, how often the lease was lost, whether the deadline has passed, and the id."""
    store = PostgresStore(dsn, lease=float(lease))
    heard = Heard()
    store.listen("key", heard)
    _say(ask(store, who_am_i))
    for _ in sys.stdin:
        passed = store.deadline < time.monotonic()
        _say(heard.losses, passed, ask(store, who_am_i), heard.losses)


def _forgets(dsn: str) -> None:
    """End without closing the store."""
    store = PostgresStore(dsn)
    _say(ask(store, who_am_i))


def _writes(dsn: str, pool_id: str) -> None:
    """Open a journal, and stay."""
    store = PostgresStore(dsn, lease=2.0)
    journal = store.open(pool_id, {}, 10)
    _say("open")
    sys.stdin.read()
    journal.close()
    store.close()


_MODES = {"counts": _counts, "stays": _stays, "forgets": _forgets, "writes": _writes}

if __name__ == "__main__":
    _MODES[sys.argv[1]](*sys.argv[2:])
