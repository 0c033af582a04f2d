"""Parents and children: a task that another task submits ends with it, unless that returns normally.

The parent of a task is the unfinished task whose context submits it. When an attempt of the parent ends in any way but
a normal return, its unfinished children are cancelled, and everything below them.

`TaskRecord.parent` is more than that: it is whose slot a task may borrow, also of one that is detached. A task is a
child only as long as `parent.dependents` has it. A pool whose tasks submit nothing pays for a field that stays None.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Final

from headgate.tasks.model import PLAIN, TaskRecord, Terms
from headgate.tasks.runtime.nested_waits import Callback, add_waiter

if TYPE_CHECKING:
    from collections.abc import Iterable


_ENDS: Final = {
    "failed": "failed",
    "timeout": "timed out",
    "cancelled": "was cancelled",
    "expired": "expired",
    "rejected": "was rejected",
    "queued": "is tried again",
}
"""How an attempt of a task ended, in the words that its children hear."""


def terms_below(parent: TaskRecord | None, own: Terms) -> Terms:
    """The terms of a task that this parent submits, which asks for `own`: its deadline is the earlier of both."""
    if parent is None or own.detached or parent.terms.deadline is None:
        return own
    deadline = parent.terms.deadline
    if own is PLAIN:
        return _plain_within(deadline)
    expires_at = deadline if own.expires_at is None else min(own.expires_at, deadline)
    return replace(
        own, deadline=deadline if own.deadline is None else min(own.deadline, deadline), expires_at=expires_at
    )


def adopt(task: TaskRecord, own: Terms) -> None:
    """Make a task that was accepted a child of the task that submitted it; it asked for the terms `own`."""
    parent = task.parent
    if parent is None or own.detached or task.finished or parent.finished:
        return
    if parent.dependents is None:
        parent.dependents = {}
    parent.dependents[task] = own


def share(task: TaskRecord, newcomer: TaskRecord) -> None:
    """Keep a task alive for another caller that has submitted the same work, by its idempotency key.

    It is from now on the child of the task that both callers descend from; of none if there is no such task. The
    deadline of its former parent does not count any longer.
    """
    parent = task.parent
    if parent is None or parent.dependents is None or task not in parent.dependents:
        return
    above = [] if newcomer.terms.detached or newcomer.parent is None else list(_upwards(newcomer.parent))
    if parent in above:
        return  # the newcomer ends with it anyway
    own = parent.dependents.pop(task)
    common = next((one for one in _upwards(parent) if one in above), None)
    task.owner.change_terms(task, terms_below(common, own))
    if common is not None:
        task.parent = common
        adopt(task, own)


def cancel_children(task: TaskRecord, end: str) -> list[TaskRecord]:
    """Cancel the unfinished children of a task whose attempt has ended so, and theirs. Returns those yet to end.

    Those below are told at once, and not when the child has ended: none of them is to start in the meantime.
    """
    todo = list(task.dependents or ())
    for child in todo:
        if child.owner.asked(child) != "cancel":
            whose = "parent" if child.parent is task else "ancestor"
            child.owner.cancel(child, f"its {whose} {task.label} {_ENDS[end]}")
            todo += child.dependents or ()
    return [child for child in todo if not child.finished]


def stopped_with_parent(task: TaskRecord) -> bool:
    """Is the deadline of a task that of its parent, which is unfinished? Then nobody need be told of both."""
    parent = task.parent
    own = None if parent is None or parent.dependents is None else parent.dependents.get(task)
    return own is not None and own.deadline != task.terms.deadline


def requeue_after(children: Iterable[TaskRecord], task: TaskRecord, at: float) -> None:
    """Queue a task that was set aside for its next attempt when these children of the last one have ended.

    Not before the time `at`.
    """
    left, pool = set(children), task.owner

    def ended(child: TaskRecord) -> None:
        left.discard(child)
        if not left and pool.scheduler.is_aside(task):
            pool.resume_at(task, at)

    for child in list(left):
        add_waiter(child, Callback(ended, child))


def _upwards(task: TaskRecord) -> Iterator[TaskRecord]:
    """The task, its parent, and so on: each ends with the next."""
    yield task
    while (parent := task.parent) is not None and parent.dependents is not None and task in parent.dependents:
        yield parent
        task = parent


@lru_cache(64)
def _plain_within(deadline: float) -> Terms:
    """The terms of children that have no options of their own: they share one object."""
    return Terms(deadline=deadline, expires_at=deadline)
