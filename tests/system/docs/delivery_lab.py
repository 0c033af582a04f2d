"""The tables of docs/delivery.md, the experiments for their rows, and what an experiment works with."""

from __future__ import annotations

import asyncio
import builtins
import os
import re
import signal
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any, NamedTuple

import headgate
from headgate import WorkerPool
from tests.support.workers.support import all_ready, lines, until

GUIDE = Path(__file__).parents[3] / "docs" / "delivery.md"
CALLS, TASKS, BLOCKED = "Every ending", "A task with a key on a worker", "Lost, or only blocked"
"""The headings above the tables."""
PROSE = "prose"
"""For what the page says outside of its tables."""

Body = Callable[["Lab"], Coroutine[Any, Any, None]]


class Experiment(NamedTuple):
    heading: str
    rows: tuple[str, ...]
    """The first cells of the rows that it checks."""
    body: Body
    apart: bool
    """Whether it has its own workers. Such experiments run at the same time: they wait more than they compute."""
    soak: bool
    """Whether it runs at full scale only: it takes long, and the tests of workers and of tasks show the same."""
    complete: bool
    """Whether it causes every exception that its rows name."""

    @property
    def name(self) -> str:
        return f"{self.body.__module__.rpartition('_')[2]}-{self.body.__name__}"


EXPERIMENTS: list[Experiment] = []


def shows(
    heading: str, *rows: str, apart: bool = False, soak: bool = False, complete: bool = True
) -> Callable[[Body], Body]:
    """Register an experiment for these rows of the table below this heading."""

    def register(body: Body) -> Body:
        EXPERIMENTS.append(Experiment(heading, rows, body, apart, soak, complete))
        return body

    return register


# -- the document -----------------------------------------------------------------------------------------------------


def tables_of(text: str) -> dict[str, dict[str, list[str]]]:
    """By heading: the rows of the table below it, the other cells by the first one."""
    tables: dict[str, dict[str, list[str]]] = {}
    for heading, body in re.findall(r"^## ([^\n]*)\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL):
        rows = [line.strip("| ").split(" | ") for line in body.splitlines() if line.startswith("| ")]
        if rows:
            assert len({cells[0] for cells in rows}) == len(rows), f"two rows of {heading!r} begin alike"
            tables[heading] = {cells[0]: cells[1:] for cells in rows[1:]}
    return tables


def named_in(cells: list[str]) -> set[str]:
    """The exceptions and warnings that these cells name."""
    words = set(re.findall(r"\w+", " ".join(cells)))
    return {word for word in words if _is_told(word)}


def _is_told(name: str) -> bool:
    """Whether a row must name this exception; those that experiments raise themselves need no name."""
    found = getattr(headgate, name, None) or getattr(asyncio, name, None) or getattr(builtins, name, None)
    ours = isinstance(found, type) and issubclass(found, BaseException)
    return ours and name not in ("LookupError", "CooldownResource", "DisableResource", "RetryOperation")


# -- the experiments --------------------------------------------------------------------------------------------------


class Lab:
    """The tools of one experiment: workers, files in which routines write what they do, and what callers got."""

    def __init__(self, path: Path, pool: WorkerPool) -> None:
        self.path = str(path)
        self.pool = pool
        self.got: set[str] = set()
        """The exceptions that callers got, by name."""
        self._files = 0

    def file(self) -> str:
        """Path of a new file for notes of routines."""
        self._files += 1
        return f"{self.path}.{self._files}"

    async def outcome(self, awaitable: Awaitable[Any]) -> Any:
        """Return the result or the exception of an awaitable, and record the exception."""
        try:
            return await awaitable
        except (Exception, asyncio.CancelledError, SystemExit, KeyboardInterrupt) as error:
            if _is_told(type(error).__name__):
                self.got.add(type(error).__name__)
            return error

    async def rested(self) -> WorkerPool:
        """The shared pool, with both workers ready."""
        await all_ready(self.pool, 2)
        return self.pool


def begun(path: str) -> list[int]:
    """The pids of the workers that began the routine, one for each run."""
    return [int(line.split()[1]) for line in lines(path) if line.startswith("begun ")]


def ended(path: str) -> list[str]:
    """The notes other than "begun"."""
    return [line for line in lines(path) if not line.startswith("begun ")]


async def until_begun(path: str, count: int = 1) -> list[int]:
    """Wait until the routine was begun so many times; return the pids of the workers."""
    await until(lambda: len(begun(path)) >= count)
    return begun(path)


def tell(path: str, word: str = "go") -> None:
    """Create the file that a routine waits for."""
    Path(f"{path}.{word}").touch()


def untell(path: str, word: str) -> None:
    """Remove the file of `tell` again."""
    Path(f"{path}.{word}").unlink()


def kill(pid: int, number: int = signal.SIGKILL) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass


def uid_of(pool: WorkerPool, pid: int) -> str:
    return next(view.uid for view in pool.workers() if view.pid == pid)
