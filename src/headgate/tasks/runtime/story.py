"""`handle.story()`: what happened to one task, as a person would want to read it. Pure.

A task remembers when it was submitted, last started and ended; what else was worth telling (attempts that were not the
last, what it waited for) stands in its `trail`. A task that had no trouble has none, and costs nothing.
"""

from __future__ import annotations

from datetime import UTC, datetime

from headgate.core.redaction import redact
from headgate.tasks.model import Mark, TaskRecord
from headgate.tasks.runtime.ports import Supply


class Story(str):
    """The lines. A string whose repr is itself, so that a prompt or a notebook shows them as they are."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def story_of(task: TaskRecord, supply: Supply | None, now: float) -> Story:
    """The history of a task, whose pool has this supply; `now` in Unix seconds."""
    began = task.moment.wall
    marks = [Mark(began, f"submitted{_options(task)}"), *(task.trail or ())]
    if task.started is not None and not _waits_again(task):
        where = supply.describe(task.permit) if supply is not None and task.permit is not None else ""
        marks.append(Mark(task.started.wall, f"attempt {task.attempt} begins{where}"))
    if task.status == "queued" and task.terms.need in task.owner._desk.shut and supply is not None:
        marks.append(Mark(now, f"waits: {supply.why_not(task)}"))
    if task.ended is not None:
        marks.append(Mark(task.ended.wall, _end(task)))
    lines = [f"{_time(mark.wall)}  {max(0.0, mark.wall - began):+9.3f} s  {mark.what}" for mark in marks]
    return Story(redact("\n".join([_title(task, now), *(f"  {line}" for line in lines)])))


def _waits_again(task: TaskRecord) -> bool:
    """Is its last start told in its trail already?"""
    ends = [mark.what for mark in task.trail or () if " ends: " in mark.what]
    if task.status == "queued" or not ends or task.started is None:
        return task.status == "queued"
    if not ends[-1].endswith("queued again"):
        return True  # its attempts are spent
    return task.finished and task.permit is None and task.started.now <= task.since.now and task.status != "completed"


def _title(task: TaskRecord, now: float) -> str:
    whose = f" ({_text(task.partition)})" if task.partition is not None else ""
    ends = task.ended.wall if task.ended is not None else now
    state = task.status if task.finished else f"{task.status} for now"
    tries = f", {task.attempt} attempts" if task.attempt > 1 else ""
    name = f"{task.label}{whose}, {task.owner.id}/{task.number}"
    return f"{name}: {state} after {max(0.0, ends - task.moment.wall):.3f} s{tries}"


def _text(value: object) -> str:
    try:
        return " ".join(str(value).split())[:80]
    except Exception:
        return f"a {type(value).__qualname__}"


def _options(task: TaskRecord) -> str:
    said = [f"priority {task.priority}"] if task.priority else []
    terms = task.terms
    for name in ("idempotency_key", "timeout", "retries"):
        value = getattr(terms, name)
        if value:
            said.append(f"{name} {value}")
    return f" with {', '.join(said)}" if said else ""


def _end(task: TaskRecord) -> str:
    outcome = task.outcome
    if task.status == "failed":
        return f"failed: {outcome.told.line}"
    if task.status == "rejected":
        return f"rejected: {outcome.reason}"
    if task.status == "expired":
        return "expired: its ttl or deadline came first"
    return str(task.status)


def _time(wall: float) -> str:
    return datetime.fromtimestamp(wall, UTC).astimezone().strftime("%H:%M:%S.%f")[:-3]
