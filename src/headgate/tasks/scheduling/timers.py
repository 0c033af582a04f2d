"""What shall happen to tasks at a later time: delays that end, and tasks that expire. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from itertools import count
from typing import Literal
from weakref import ref

from headgate.tasks.model import TaskRecord

Errand = Literal["due", "expire"]


class Timers:
    """What to do for tasks, by time. One whose task is not queued any more is dropped when it is due, or earlier."""

    __slots__ = ("_bound", "_heap", "_serial")

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Errand, ref[TaskRecord]]] = []  # not to keep the results of those that left
        self._serial = count()
        self._bound = 64

    def add(self, at: float, errand: Errand, task: TaskRecord) -> None:
        """Remember to do something for a task at this time."""
        heapq.heappush(self._heap, (at, next(self._serial), errand, ref(task)))
        if len(self._heap) > self._bound:
            self._heap = [entry for entry in self._heap if _queued(entry[3]) is not None]
            heapq.heapify(self._heap)
            self._bound = 2 * len(self._heap) + 64

    def due_at(self, task: TaskRecord, otherwise: float) -> float:
        """When a task that is set aside is queued. Looks at all errands."""
        return min((at for at, _, errand, one in self._heap if errand == "due" and one() is task), default=otherwise)

    def clear(self) -> None:
        """Forget all errands: nothing is queued."""
        self._heap.clear()

    def next_at(self) -> float | None:
        """When the next errand is due; None if there is none."""
        heap = self._heap
        while heap and _queued(heap[0][3]) is None:
            heapq.heappop(heap)
        return heap[0][0] if heap else None

    def due(self, now: float) -> Iterator[tuple[Errand, TaskRecord]]:
        """Take out the errands that are due, in order."""
        while self._heap and self._heap[0][0] <= now:
            _, _, errand, reference = heapq.heappop(self._heap)
            if (task := _queued(reference)) is not None:
                yield errand, task


def _queued(reference: ref[TaskRecord]) -> TaskRecord | None:
    """The task, if it is there and queued."""
    task = reference()
    return task if task is not None and task.status == "queued" else None
