"""Notes in a task what happened on its way, for its story. A task that had no trouble has none, and costs nothing."""

from __future__ import annotations

from headgate.tasks.model import Mark, TaskRecord

_LONG = 400  # characters that are told of one thing
_MARKS = 200  # things that are remembered of one task


def mark_attempt(task: TaskRecord, reason: str, wall: float, *, again: bool, pause: float = 0.0) -> None:
    """Note that the last attempt has ended for this reason; `again` if the task is queued again, after a `pause`."""
    explainer = task.owner.explainer
    where = "" if explainer is None or task.permit is None else explainer.describe(task.permit)
    started = task.started.wall if task.started is not None else wall
    _mark(task, Mark("began", started, where, task.attempt))
    _mark(task, Mark("ended", wall, _short(reason), task.attempt, again, pause))


def mark_waiting(task: TaskRecord, wall: float) -> str:
    """Note what a queued task waits for, if that is known and not the last thing that was noted. Returns what it is."""
    why = "" if task.owner.explainer is None else task.owner.explainer.why_waiting(task)
    told = why
    if why and not (task.trail and task.trail[-1].kind == "waits"):
        why = _short(why)
        _mark(task, Mark("waits", wall, why))
    if why:
        task.owner.shortages.begin(task.terms.need, wall, why.partition(":")[0])  # the rest is of this moment
    return told


def _mark(task: TaskRecord, mark: Mark) -> None:
    trail = task.trail
    if trail is None:
        trail = task.trail = []
    if len(trail) < _MARKS:
        trail.append(mark)


def _short(text: str) -> str:
    return " ".join(text.split())[:_LONG]
