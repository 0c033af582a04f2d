"""`handle.story()`: what happened to one task, as a person would want to read it. Pure.

A task remembers when it was submitted, last started and ended; what else was worth telling (attempts that were not the
last, what it waited for) stands in its `trail`. A task that had no trouble has none, and costs nothing. How long it was
queued behind others follows from these times, and what its pool waited for meanwhile is kept by the pool.
"""

from __future__ import annotations

from datetime import UTC, datetime

from headgate.core.one_line import one_line
from headgate.core.redaction import redact
from headgate.tasks.model import Mark, Owner, Remains, TaskRecord, Told

_SHORT = 0.05
"""Seconds of waiting that are not told."""


class Story(str):
    """The lines of a story. A string whose repr is itself, so that a prompt or a notebook shows them as they are."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def story_of(task: TaskRecord, now: float) -> Story:
    """The history of a task; `now` in Unix seconds."""
    began, explainer, marks = task.moment.wall, task.owner.explainer, list(task.trail or ())
    if task.started is not None and not _start_is_told(task):
        with_what = task.permit
        where = explainer.describe(with_what) if explainer is not None and with_what is not None else ""
        marks.append(Mark("began", task.started.wall, where, task.attempt))
    if task.status == "queued" and task.terms.need in task.owner.scheduler.unserved and explainer is not None:
        marks.append(Mark("waits", now, explainer.why_waiting(task)))
    elif task.status == "queued" and task.owner.scheduler.lacks_slots(task):
        marks.append(Mark("waits", now, task.owner.scheduler.why_short(task)))
    elif task.status == "queued" and task.owner.scheduler.exceeds_rate(task):
        seconds = task.owner.scheduler.rate_opens_in(task.partition) or 0.0
        marks.append(Mark("waits", now, f"its tenant has used its rate, the next start is in {seconds:.1f} s"))
    lines = [(began, f"submitted{_options(task)}"), *_with_waits(task, marks, now, task.owner)]
    if task.ended is not None:
        lines.append((task.ended.wall, _end(task)))
    return _written(_title(task, now), began, lines)


def story_of_past(past: Remains, owner: Owner) -> Story:
    """What is left of the history of a task that has ended and whose handle nobody holds."""
    began = past.moment.wall
    whose = f" ({_text(past.partition)})" if past.partition is not None else ""
    ended = began if past.ended is None else past.ended.wall
    name = f"{owner.name}#{past.number}{whose}, {owner.id}/{past.number}"
    title = f"{name}: {past.status} after {max(0.0, ended - began):.3f} s{_tries(past.attempt)}"
    marks = list(past.trail or ())
    if past.started is not None and not _start_of_past_is_told(past):
        where = "" if past.ran_with is None or owner.explainer is None else owner.explainer.describe(past.ran_with)
        marks.append(Mark("began", past.started.wall, where, past.attempt))
    lines = [(began, "submitted"), *_with_waits(past, marks, ended, owner)]
    outcome = past.outcome
    why = "" if outcome is None else f": {outcome.line if isinstance(outcome, Told) else outcome.reason}"
    lines.append((ended, f"{past.status}{why}"))
    return _written(title, began, lines)


def _written(title: str, began: float, lines: list[tuple[float, str]]) -> Story:
    """The story as text. Whatever names and reasons contain, it has a line for each thing that happened."""
    told = [f"  {_time(wall)}  {max(0.0, wall - began):+9.3f} s  {redact(what)}" for wall, what in lines]
    return Story("\n".join(map(one_line, [redact(title), *told])))


def _queued(task: TaskRecord | Remains) -> float:
    """When a task was queued first: at its submit, or after its delay."""
    due = task.terms.due
    return task.moment.wall + (0.0 if due is None else max(0.0, due - task.moment.now))


def _with_waits(task: TaskRecord | Remains, marks: list[Mark], now: float, owner: Owner) -> list[tuple[float, str]]:
    """The lines of marks, and of the times in which the task was queued behind others."""
    lines: list[tuple[float, str]] = []
    first = next((mark.attempt for mark in marks if mark.kind != "waits"), 1)
    since = _queued(task) if first == 1 else None  # of a long story the last lines are kept
    attempt = 0  # that has ended
    for mark in marks:
        if mark.kind == "ended":
            since, attempt = (mark.wall + mark.pause if mark.again else None), mark.attempt
        elif since is not None:
            if mark.kind == "waits" or mark.attempt == attempt + 1:  # else marks between these were not kept
                lines += _turn(since, mark.wall, task, owner)
            since = None  # a mark says what it waited for from then on
        lines.append((mark.wall, _told(mark)))
    if since is None or task.status == "stale":  # its process was gone: nobody knows how long it was queued
        return lines
    return [*lines, *_turn(since, now if task.ended is None else task.ended.wall, task, owner)]


def _turn(since: float, until: float, task: TaskRecord | Remains, owner: Owner) -> list[tuple[float, str]]:
    """The line that says how long a task waited for its turn; none if it was short."""
    if until - since < _SHORT:
        return []
    paused = owner.pauses.between(task.partition, since, until)
    seconds, what = max(owner.shortages.between(task.terms.need, since, until), paused)
    told = f"waits {until - since:.3f} s for its turn"
    if until - since - seconds < _SHORT:
        return [(since, f"{told}: {what}")]
    rated = ", rate_per_tenant" if owner.scheduler.has_rates else ""
    told = f"{told} behind other tasks (max_concurrent {owner.scheduler.limit}{rated})"
    return [(since, f"{told}; for {seconds:.3f} s of it {what}" if seconds >= _SHORT else told)]


def _told(mark: Mark) -> str:
    if mark.kind == "waits":
        return f"waits: {mark.text}"
    if mark.kind == "began":
        return f"attempt {mark.attempt} begins{mark.text}"
    then = f"again in {mark.pause:.3g} s" if mark.pause else "queued again"
    return f"attempt {mark.attempt} ends: {mark.text}{f'; {then}' if mark.again else ''}"


def _start_is_told(task: TaskRecord) -> bool:
    """Is the last start of the task among its marks already?"""
    last = _last_end(task.trail)
    if task.status == "queued" or last is None or task.started is None:
        return task.status == "queued"
    if not last.again:
        return True  # its attempts are spent
    has_run_since = task.permit or task.status == "completed"
    return task.finished and not has_run_since and task.started.now <= task.since.now


def _start_of_past_is_told(past: Remains) -> bool:
    last = _last_end(past.trail)
    if last is None or past.started is None:
        return False
    return not last.again or (past.started.wall <= last.wall and not past.ran_with and past.status != "completed")


def _last_end(trail: list[Mark] | None) -> Mark | None:
    return next((mark for mark in reversed(trail or ()) if mark.kind == "ended"), None)


def _tries(attempt: int) -> str:
    return f", {attempt} attempts" if attempt > 1 else ""


def _title(task: TaskRecord, now: float) -> str:
    whose = f" ({_text(task.partition)})" if task.partition is not None else ""
    ends = task.ended.wall if task.ended is not None else now
    state = task.status if task.finished else f"{task.status} for now"
    name = f"{task.label}{whose}, {task.owner.id}/{task.number}"
    return f"{name}: {state} after {max(0.0, ends - task.moment.wall):.3f} s{_tries(task.attempt)}"


def _text(value: object) -> str:
    try:
        return str(value)[:80]
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
    if task.status == "cancelled" and outcome is not None:
        return f"cancelled: {outcome.reason}"
    return str(task.status)


def _time(wall: float) -> str:
    return datetime.fromtimestamp(wall, UTC).astimezone().strftime("%H:%M:%S.%f")[:-3]
