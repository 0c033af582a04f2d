"""Adapts a `Runner` that a user wrote to the ports of an executor."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable, Iterable, Mapping
from typing import Any

from headgate.core.cancellation import PRIMED
from headgate.tasks.model import TaskRecord
from headgate.tasks.runtime.local_launcher import LocalLauncher
from headgate.tasks.runtime.nested_waits import CURRENT
from headgate.tasks.runtime.ports import Changes, Completion, Ports, Runner


class RunnerAllocator:
    """Asks a runner for permits. All tasks have the same requirement: None."""

    options: tuple[str, ...] = ()

    def __init__(self, runner: Runner) -> None:
        self._runner = runner

    def asks(self, options: Mapping[str, Any]) -> tuple[Hashable, Any]:
        """A runner has no keywords of `submit`."""
        return None, None

    def on_change(self, changes: Changes) -> None:
        """Have the runner call back when it has permits again."""
        self._runner.on_ready(changes.reopen_soon)

    def impossible(self, task: TaskRecord) -> None:
        """None: a runner may always have a permit later."""

    def reserve(self, task: TaskRecord, *, wait: bool) -> Any:
        """The permit that the runner gives now."""
        return self._runner.reserve(task)

    def is_in_order(self, permit: object) -> bool:
        """A runner does not take its permits back."""
        return True

    def rests(self, task: TaskRecord) -> bool:
        """A runner does not say."""
        return False

    def release(self, permit: object) -> None:
        """Give the runner its permit back."""
        self._runner.release(permit)

    def idle(self) -> None:
        """Do nothing: a runner is asked for each task."""

    def leave(self, requirement: Hashable) -> bool:
        """A runner always calls back."""
        return False


class RunnerLauncher:
    """Has a runner run each task, in an asyncio Task."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._here = LocalLauncher()

    def start(self, task: TaskRecord, permit: object, completion: Completion) -> asyncio.Task[None]:
        """Have the runner run the task."""
        return self._here.start_body(task, self._drive(task, completion), completion)

    def in_threads(self, tasks: Iterable[TaskRecord]) -> int:
        """None that is known of: a runner runs tasks in its own way."""
        return 0

    def announce(self, task: TaskRecord) -> None:
        """Nothing: the pool's own event says all."""

    def forget(self, task: TaskRecord) -> None:
        """Nothing: of a task that has ended nothing is known here."""

    def close(self) -> None:
        """Nothing: what a runner has is its own."""

    async def _drive(self, task: TaskRecord, completion: Completion) -> None:
        try:
            await PRIMED
            CURRENT.set(task)
            permit, task.permit = task.permit, None  # the runner gives it back
            result = await self._runner.run(task, permit)
        except BaseException as error:
            if not completion.failed(task, error):
                raise
        else:
            completion.succeeded(task, result)
        finally:
            del task  # see `LocalLauncher._drive`


def runner_ports(runner: Runner) -> Ports:
    """The ports of an executor whose tasks this runner runs."""
    return Ports(RunnerLauncher(runner), RunnerAllocator(runner))
