"""The runner port: how a pool runs a task once its turn has come.

A pool asks its runner to `reserve` what the task needs besides a slot (a key, a place on a worker). None means not now:
the task keeps its turn, and the pool asks again when the runner calls back. Without a runner a task needs nothing and
runs right here, which is what `headgate.tasks.TaskPool` does by itself.

A `Supply` is how the pool speaks with its runner. For a runner of somebody's own it is what this file says; for keys
and workers `headgate.combined.pool` has one that knows more: what different tasks need, when nothing can ever serve
one, how to stand in line, and why an attempt was no failure of its task.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from headgate.core.cancellation import primed
from headgate.tasks.model import TaskRecord, Terms, told_of
from headgate.tasks.runtime.nested_waits import CURRENT

if TYPE_CHECKING:
    from headgate.tasks.runtime.executor import Executor


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


class Again(Exception):
    """What a supply raises from `run`: the attempt is over, the task is not, and it is to be queued again."""

    def __init__(self, reason: str, *, spent: bool, resource_id: str | None = None) -> None:
        super().__init__(reason)
        self.reason: str = reason
        self.spent: bool = spent
        """Does it count as an attempt?"""
        self.resource_id: str | None = resource_id


def told(error: BaseException) -> str:
    """An exception in one line, as it may be shown to people."""
    return told_of(error, None, 0).line


_MOST_TERMS = 1024


class Supply:
    """A runner, as its pool deals with it."""

    options: tuple[str, ...] = ()
    """Keywords of `submit` that it understands."""

    def __init__(self, runner: Runner | None) -> None:
        self._runner: Any = runner
        self._terms: dict[Hashable, Terms] = {}

    def attach(self, pool: Executor) -> None:
        """This is the pool that it serves."""
        self._runner.on_ready(pool._on_ready)

    def bound(self, loop: Any) -> None:
        """The event loop of the pool."""

    def terms(self, need: Hashable) -> Terms:
        """The terms of tasks that ask for nothing but this: they share one object, as those do that ask for nothing."""
        terms = self._terms.get(need)
        if terms is None:
            if len(self._terms) >= _MOST_TERMS:
                self._terms.clear()
            terms = self._terms[need] = Terms(need=need)
        return terms

    def asks(self, options: Mapping[str, Any]) -> tuple[Hashable, Any]:
        """What these keywords of its own ask for: a need, and a wish."""
        return None, None

    @property
    def doubtful(self) -> bool:
        """Might there be nothing for anybody?"""
        return False

    def hopeless(self, task: TaskRecord) -> Exception | None:
        """Why nothing can ever serve this task; None: something can."""
        return None

    def reserve(self, task: TaskRecord, *, stand: bool) -> Any:
        """A permit to run this task now, or None. With `stand`: then tell the pool when its need might be served."""
        return self._runner.reserve(task)

    def leave(self, need: Hashable) -> bool:
        """The pool has no slot for it. Does nobody tell the pool about this need any more?"""
        return False

    def confirmed(self, task: TaskRecord) -> bool:
        """It was given its permit before it was accepted, and starts now. May it still do so with that?"""
        return True

    def started(self, task: TaskRecord) -> None:
        """It runs now."""

    def release(self, permit: Any) -> None:
        """The task of this permit will not be run."""
        self._runner.release(permit)

    def begin(self, pool: Executor, task: TaskRecord) -> Any:
        """Start it without a Task of asyncio; returns what has `cancel` as a Task has. None: it needs one."""
        return None

    async def drive(self, pool: Executor, task: TaskRecord) -> None:
        """Run it to its end, from within its own Task, and give the permit back."""
        try:
            await primed()
            CURRENT.set(task)
            permit, task.permit = task.permit, None
            result = await self._runner.run(task, permit)
        except BaseException as error:
            if not pool._ended_badly(task, error):
                raise
        else:
            pool._end(task, "completed", result)
        finally:
            del task  # see `PoolShell._drive`

    def failures(self, task: TaskRecord) -> int:
        """How many of its attempts were failures of its own."""
        return task.attempt

    def forget(self, task: TaskRecord) -> None:
        """It has ended, and not with a result."""

    def held(self, task: TaskRecord, waiting: Collection[TaskRecord]) -> list[str]:
        """The names of all that could serve a queued task, if none of it can come free before one of `waiting` ends."""
        return []

    def why_not(self, task: TaskRecord) -> str:
        """Why nothing serves it now; "" when that is not known."""
        return ""

    def waiting_for(self, needs: Collection[Hashable]) -> dict[str, Any]:
        """What tasks of these needs wait for, and for how long."""
        return {"cause": "runner", "seconds": None}

    def describe(self, permit: Any) -> str:
        """With what and where a task of this permit ran, for its story."""
        return ""


class Taskless:
    """A task that runs on a worker and that nobody awaits: its answer ends it."""

    __slots__ = ("_line", "_permit", "_pool", "_task")

    def __init__(self, line: Any, pool: Executor, task: TaskRecord, permit: Any) -> None:
        self._line = line
        self._pool = pool
        self._task: TaskRecord | None = task
        self._permit = permit

    def returned(self, result: Any) -> None:
        """What the function returned there."""
        task, permit = self._let_go()
        try:
            self._line._succeed(task, permit, result)
        except Exception as error:
            self._pool._ended_badly(task, error)
        else:
            self._pool._end(task, "completed", result)

    def raised(self, error: BaseException) -> bool:
        """What it raised there, or on the way. Must whoever ran it raise it too?"""
        task, permit = self._let_go()
        return not self._pool._ended_badly(task, self._line._outcome(task, permit, error))

    def unplaced(self) -> None:
        """No worker has run it: it waits for one in a Task."""
        task, _ = self._let_go()
        self._pool._make(task)

    def _let_go(self) -> tuple[TaskRecord, Any]:
        """Its task and its permit, for the last time: the permit refers to this, in a circle with the result."""
        task, permit = self._task, self._permit
        assert task is not None, "it ends once"
        self._task = self._permit = None
        return task, permit
