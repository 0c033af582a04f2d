"""Submitters that wait for a place in a bounded queue, first come first served. Pure.

Whoever arrives is one `Arrival`; submitters that bring the same idempotency key are one arrival together, so that they
all get the same task. It enters when there is a place, and nobody overtakes it.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from headgate.tasks.model import TaskRecord


class Arrival:
    """A task that has not been accepted yet, and the submitters that wait for it."""

    __slots__ = ("claimants", "error", "settled", "task")

    def __init__(self, task: TaskRecord) -> None:
        self.task: TaskRecord = task
        self.claimants: list[Any] = []
        """Futures of the submitters that have not given up; None for one that has the task already."""
        self.settled: bool = False
        """Do the submitters know whether the task was accepted?"""
        self.error: Exception | None = None
        """Why the task was refused; None if it was not."""


class SubmitQueue:
    """Submitters that wait for a place in the queue, oldest first."""

    __slots__ = ("_by_key", "line")

    def __init__(self) -> None:
        self.line: OrderedDict[TaskRecord, Arrival] = OrderedDict()
        """The arrivals, by their tasks. Mostly there is none, and `if queue.line:` costs next to nothing."""
        self._by_key: dict[str, Arrival] = {}

    def join(self, arrival: Arrival) -> None:
        """Add an arrival behind all others."""
        self.line[arrival.task] = arrival
        key = arrival.task.terms.idempotency_key
        if key is not None:
            self._by_key[key] = arrival

    def leave(self, task: TaskRecord) -> Arrival | None:
        """Remove the arrival of a task, which enters the pool or gives up; None if it is not here."""
        arrival = self.line.pop(task, None)
        key = task.terms.idempotency_key
        if arrival is not None and key is not None:
            del self._by_key[key]
        return arrival

    def first(self) -> Arrival | None:
        """The arrival that enters next; None if there is none."""
        return next(iter(self.line.values()), None)

    def with_key(self, key: str) -> Arrival | None:
        """The arrival that brings this idempotency key."""
        return self._by_key.get(key)

    @property
    def submitters(self) -> int:
        """How many submitters wait for a place."""
        return sum(len(arrival.claimants) for arrival in self.line.values())
