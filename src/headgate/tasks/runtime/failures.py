"""Failed tasks: which of them nobody has seen yet, and what is kept to run the last of them again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from contextvars import Context
from dataclasses import replace
from typing import Any, Final, NamedTuple

from headgate.errors import InvalidArgument
from headgate.tasks.model import PLAIN, TaskRecord, Terms, Told
from headgate.tasks.streams import StreamBody

_UNSEEN: Final = 1000
"""Failures that nobody awaited are not all kept: there may be very many."""


class Kept(NamedTuple):
    """What is needed to submit a failed task again."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    context: Context | None
    priority: int
    key: Hashable
    partition: Hashable
    terms: Terms


class Failures:
    """The failures of one pool."""

    __slots__ = ("_most", "forgotten", "kept", "retried", "unseen")

    def __init__(self, keep: int) -> None:
        self.unseen: OrderedDict[int, Told] = OrderedDict()
        """Failures that nobody has seen yet, by the numbers of their tasks."""
        self.forgotten: int = 0
        """Unseen failures that are not kept."""
        self.kept: OrderedDict[int, Kept] = OrderedDict()
        """The last tasks that can be submitted again, by their numbers."""
        self.retried: OrderedDict[int, int] = OrderedDict()
        """As which task each of the last that were submitted again runs, by their numbers."""
        self._most = keep

    def note(self, task: TaskRecord) -> None:
        """Note that a task has failed, while it still has its function and arguments."""
        self.unseen[task.number] = task.outcome.told
        if len(self.unseen) > _UNSEEN:
            self.unseen.popitem(last=False)
            self.forgotten += 1
        if self._most and task.fn is not None and not isinstance(task.fn, StreamBody):
            terms = task.terms
            if terms is not PLAIN:  # times are over, and its idempotency key holds or frees other work
                terms = replace(terms, idempotency_key=None, expires_at=None, deadline=None, due=None)
            self.kept[task.number] = Kept(
                task.fn, task.args, task.context, task.priority, task.key, task.partition, terms
            )
            if len(self.kept) > self._most:
                self.kept.popitem(last=False)

    def to_retry(self, number: int, name: str) -> Kept:
        """Return what was kept of a task, or raise InvalidArgument that says why there is nothing."""
        kept = self.kept.get(number)
        if kept is not None:
            return kept
        if not self._most:
            why, remedy = "the pool keeps no failed tasks", "Make it with TaskPool(keep_failed=100)."
        else:
            why = f"it did not fail, was retried already, or is not among the last {self._most} that failed"
            remedy = "A larger keep_failed= keeps more of them."
        raise InvalidArgument(f"{name}#{number} cannot be retried: {why}", remedy=remedy)

    def ran_again(self, number: int, again: int) -> None:
        """Note that a task was submitted again, as the task `again`."""
        self.kept.pop(number, None)
        self.retried[number] = again
        if len(self.retried) > self._most:
            self.retried.popitem(last=False)
