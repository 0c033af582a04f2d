"""The runner port: how a pool runs a task once its turn has come.

A pool asks its runner to `reserve` what the task needs besides a slot (a key, a place on a worker). None means not now:
the task keeps its turn, and the pool asks again when the runner calls back. Without a runner a task needs nothing and
runs right here, which is what `headgate.tasks.TaskPool` does by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from headgate.tasks.model import TaskRecord


class Runner(Protocol):
    """Runs tasks somewhere, with something."""

    def reserve(self, task: TaskRecord) -> object | None:
        """A permit to run this task now, or None. Never waits."""

    def on_ready(self, callback: Callable[[], None]) -> None:
        """Call this back whenever a task that was refused a permit might get one."""

    def release(self, permit: Any) -> None:
        """The task of this permit will not be run."""

    async def run(self, task: TaskRecord, permit: Any) -> Any:
        """Run it to its result, and give the permit back."""
