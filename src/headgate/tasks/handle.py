"""What a submit returns: a task, to be awaited, asked and cancelled."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, ClassVar, Generic, Literal, NoReturn, TypeVar

from headgate.core.clock import clock
from headgate.core.redaction import redact
from headgate.errors import (
    HeadgateError,
    InvalidType,
    TaskCancelled,
    TaskExpired,
    TaskFailed,
    TaskRejected,
    TaskStale,
)
from headgate.stores.codec import REMEDY, Opaque
from headgate.tasks.model import UNFINISHED, TaskRecord, TaskSnapshot, task_snapshot
from headgate.tasks.runtime.estimates import seconds_until_start
from headgate.tasks.runtime.nested_waits import Callback, add_waiter, need_not_be_retrieved, wait_for_one
from headgate.tasks.runtime.story import Story, story_of

R = TypeVar("R")
E = TypeVar("E", bound=BaseException)


class TaskHandle(TaskRecord, Generic[R]):
    """A task of a pool. ``await handle`` gives its result, any number of times, to any number of awaiters.

    A failed task raises its own exception there; one that was rejected, cancelled, expired or found stale raises
    TaskRejected, TaskCancelled, TaskExpired or TaskStale. Cancelling an awaiter leaves the task alone.
    """

    __slots__ = ()

    _type: ClassVar[Literal["pool_task"]] = "pool_task"

    @property
    def id(self) -> str:
        """The unique id of the task: the id of its pool and its number."""
        return f"{self.owner.id}/{self.number}"

    @property
    def pool(self) -> str:
        """The name of the pool that runs the task."""
        return str(self.owner.name)

    @property
    def pool_id(self) -> str:
        """The id of the pool that runs the task."""
        return str(self.owner.id)

    @property
    def submitted_at(self) -> float:
        """When the task was submitted, in Unix seconds."""
        return self.moment.wall

    def cancel(self) -> bool:
        """Ask the task to stop. Returns False if it has ended already.

        A queued task ends at once, a running one when its function ends. A plain function in a thread cannot be
        interrupted: it keeps its slot until it returns, and its result is dropped.
        """
        return bool(self.owner.cancel(self))

    def on_end(self, callback: Callable[[TaskHandle[R]], object]) -> None:
        """Call `callback(handle)` on the loop as soon as the task has ended; now if it has."""
        waiter = Callback(callback, self)
        if self.finished:
            waiter.set_result(None)
        else:
            add_waiter(self, waiter)

    def snapshot(self) -> TaskSnapshot:
        """Return the status, the result or error, and the times of the task."""
        failed = _seen(self) if self.status == "failed" else None
        return task_snapshot(self, self.owner, self.outcome if self.status == "completed" else None, failed)

    def eta(self) -> float | None:
        """Estimate in how many seconds the task starts: 0.0 once it has, None if nothing is known.

        It is also None if the task never starts, or as long as its pool or tenant is paused.

        It is how many tasks start before it, at the pace of the last 30 seconds. Later tasks that are more urgent, or
        of other tenants, make it longer.
        """
        if self.status != "queued" or self.slot is not None:
            return None if self.started is None else 0.0
        return seconds_until_start(self, new=False)

    def children(self) -> list[TaskHandle[Any]]:
        """Return the unfinished tasks that end with this one, in the order of their submits.

        They are those that its code has submitted without `detached=True`. A task that has ended has none.
        """
        return list(self.dependents or ())  # type: ignore[arg-type] # every task is a handle

    def story(self) -> Story:
        """Return what happened to the task so far, a line each, with times and reasons: ``print(handle.story())``."""
        return story_of(self, clock.wall())

    def __await__(self) -> Generator[Any, Any, R]:
        if self.status in UNFINISHED:
            yield from wait_for_one(self)
        try:
            result: R = result_of(self)
            return result
        finally:
            del self  # what is raised holds this frame, and the task holds that: only the collector would find it

    def __getitem__(self, name: str) -> Any:
        """`_type`, `id`, `pool`, `pool_id`, `submitted_at`, `status` and `key`, also as keys."""
        if name not in _KEYS:
            raise KeyError(name)
        return getattr(self, name)

    __iter__ = None  # else Python would take its keys for a sequence

    def __dir__(self) -> list[str]:
        return list(_PUBLIC)  # the record of the pool, which it is too, is not for users

    def __repr__(self) -> str:
        what = f" {self.key!r}" if self.key is not None else ""
        return redact(f"<TaskHandle {self.label}{what} {self.status}>")

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise InvalidType(
            f"{self!r} cannot be pickled or copied: it belongs to this process",
            remedy="Await it here and send its result.",
        )


def result_of(task: TaskRecord) -> Any:
    """The result of a task that has ended; raises what it ended with otherwise."""
    status, outcome = task.status, task.outcome
    if status == "completed":
        if outcome.__class__ is Opaque:
            raise TaskFailed(
                f"{task.label} completed in {'another process' if task.owner.scheduler.is_shared else 'a former run'} "
                f"with a {outcome.type_name}, which could not be kept",
                remedy=f"{REMEDY} To run such tasks again, pass on_opaque='rerun' to the pool.",
            )
        return outcome
    if status == "failed":
        if task.owner.ending.is_early and isinstance(outcome.error, HeadgateError):  # no worker any more, or the like
            need_not_be_retrieved(outcome.error)
        try:
            raise _seen(task).with_traceback(outcome.traceback)
        finally:
            del task, outcome  # see `TaskHandle.__await__`
    if status == "rejected":
        raise TaskRejected(
            f"{task.label} was dropped by the policy {outcome.policy}: {outcome.reason}",
            retry_after=outcome.retry_after,
        )
    if status == "expired":
        if task.started is None:
            why = f" ({outcome.reason})" if outcome is not None else ""
            raise TaskExpired(f"{task.label} did not start in time: its ttl or deadline came first{why}")
        raise TaskExpired(f"{task.label} met its deadline while it was queued again, after attempt {task.attempt}")
    if status == "stale":
        raise TaskStale(f"{task.label} was not finished when the process that owned it ended")
    raise _cancelled(task)


def outcome_of(task: TaskRecord) -> Any:
    """Return the result of a task that has ended, or the exception that `result_of` would raise.

    Its traceback is without our frames: they lead to the frame of the caller, which holds the exception.
    """
    try:
        return result_of(task)
    except Exception as error:
        return _without_frames(error, 2)


def end_of(task: TaskRecord) -> tuple[Any, BaseException | None]:
    """Return the result of a task that has ended, and None; or None, and the exception that `result_of` would raise."""
    try:
        return result_of(task), None
    except BaseException as error:
        return None, _without_frames(error, 2)


def _without_frames(error: E, count: int) -> E:
    """The exception, with a traceback that lacks the first frames."""
    traceback = error.__traceback__
    for _ in range(count):
        traceback = None if traceback is None else traceback.tb_next
    return error.with_traceback(traceback)


def _cancelled(task: TaskRecord) -> TaskCancelled:
    """Made here, not where it is raised: a frame of its traceback that names it would be a cycle."""
    why = f" because {task.outcome.reason}" if task.outcome is not None else ""
    error = TaskCancelled(f"{task.label} was cancelled{why}")
    if task.owner.ending.is_early:
        need_not_be_retrieved(error)
    return error


def _seen(task: TaskRecord) -> BaseException:
    """The exception of a failed task, of which somebody knows from now on."""
    task.owner.unseen.pop(task.number, None)
    error: BaseException = task.outcome.error
    return error


_KEYS = ("_type", "id", "pool", "pool_id", "submitted_at", "status", "key")
_METHODS = ("cancel", "children", "eta", "on_end", "snapshot", "story")
_FIELDS = ("attempt", "finished", "partition", "priority")
_PUBLIC = tuple(sorted((*_METHODS, *_FIELDS, *_KEYS[1:])))
