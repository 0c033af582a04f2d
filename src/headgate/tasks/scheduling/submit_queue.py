"""The door of a bounded queue: submitters that wait for a place, first come first served. Pure.

Whoever arrives is one `Arrival`; submitters that bring the same idempotency key are one arrival together, so that they
all get the same task. It enters when there is room, and nobody passes it.
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
        """Have they been told?"""
        self.error: Exception | None = None
        """And that it was refused."""


class SubmitQueue:
    """Arrivals, oldest first."""

    __slots__ = ("_by_key", "line")

    def __init__(self) -> None:
        self.line: OrderedDict[TaskRecord, Arrival] = OrderedDict()
        """Who stands here. Most of the time nobody does, and asking `if door.line:` costs next to nothing."""
        self._by_key: dict[str, Arrival] = {}

    def join(self, arrival: Arrival) -> None:
        """Stand at the end."""
        self.line[arrival.task] = arrival
        key = arrival.task.terms.idempotency_key
        if key is not None:
            self._by_key[key] = arrival

    def leave(self, task: TaskRecord) -> Arrival | None:
        """Step out, to enter or to go away; None if it does not stand here."""
        arrival = self.line.pop(task, None)
        key = task.terms.idempotency_key
        if arrival is not None and key is not None:
            del self._by_key[key]
        return arrival

    def first(self) -> Arrival | None:
        """Whose turn it is to enter."""
        return next(iter(self.line.values()), None)

    def with_key(self, key: str) -> Arrival | None:
        """The arrival that brings this idempotency key."""
        return self._by_key.get(key)

    @property
    def submitters(self) -> int:
        """How many wait."""
        return sum(len(arrival.claimants) for arrival in self.line.values())
