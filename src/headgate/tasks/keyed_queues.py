"""A first-in-first-out, last-in-first-out or priority queue of which some partitions can be parked. Pure.

Each partition is a queue of its own, and the partitions stand in a heap by the rank of their first task. A parked
partition is out of the heap and costs nothing until it comes back: never rescanned. O(log n) in the number of keys.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable, Iterator
from itertools import count
from typing import Any, Protocol

from headgate.tasks.model import TaskRecord
from headgate.tasks.queues import FifoQueue, LifoQueue, PriorityQueue


class Peekable(Protocol):
    """What this needs of the queue of one partition."""

    push: Callable[[TaskRecord], None]
    push_front: Callable[[TaskRecord], None]

    def peek(self) -> TaskRecord | None: ...
    def remove(self, task: TaskRecord) -> None: ...
    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[TaskRecord]: ...


Rank = tuple[int, int]


def _by_age(task: TaskRecord) -> Rank:
    return (0, task.number)


def _by_youth(task: TaskRecord) -> Rank:
    return (0, -task.number)


def _by_priority(task: TaskRecord) -> Rank:
    return (-task.priority, task.number)


_KINDS: dict[str, tuple[Callable[[], Any], Callable[[TaskRecord], Rank]]] = {
    "fifo": (FifoQueue, _by_age),
    "lifo": (LifoQueue, _by_youth),
    "priority": (PriorityQueue, _by_priority),
}


class KeyedQueue:
    """The order of `kind`, passing over what is parked."""

    __slots__ = (
        "_entries",
        "_fronted",
        "_fronts",
        "_heap",
        "_kind",
        "_make",
        "_order",
        "_parked",
        "_partitions",
        "_size",
    )

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._make, self._order = _KINDS[kind]
        self._partitions: dict[Hashable, Peekable] = {}
        self._heap: list[tuple[Rank, int, TaskRecord]] = []  # an entry that is not first of its partition is old
        self._entries = count()
        self._fronts = count(1)
        self._fronted: dict[TaskRecord, Rank] = {}  # those that were put before their equals
        self._parked: set[Hashable] = set()
        self._size = 0

    def push(self, task: TaskRecord) -> None:
        """Where the order puts it."""
        partition = self._partition(task)
        partition.push(task)
        self._joined(partition, task)

    def push_front(self, task: TaskRecord) -> None:
        """First of its kind."""
        first = _KINDS[self._kind][1](task)[0] - (self._kind == "lifo")
        self._fronted[task] = (first, -next(self._fronts))
        partition = self._partition(task)
        partition.push_front(task)
        self._joined(partition, task)

    put_back = push_front

    def pop(self) -> TaskRecord | None:
        """Take out the first that is not parked."""
        heap = self._heap
        while heap:
            task = heap[0][2]
            key = task.partition
            partition = self._partitions.get(key)
            if partition is not None and key not in self._parked and partition.peek() is task:
                self.remove(task)
                return task
            heapq.heappop(heap)
        return None

    def remove(self, task: TaskRecord) -> None:
        """Take out this one."""
        key = task.partition
        partition = self._partitions[key]
        was_first = partition.peek() is task
        partition.remove(task)
        self._fronted.pop(task, None)
        self._size -= 1
        if not len(partition):
            del self._partitions[key]
        elif was_first and key not in self._parked:
            self._list(partition)

    take = remove

    def park(self, key: Hashable) -> None:
        """Its entry is dropped when it surfaces."""
        self._parked.add(key)

    def unpark(self, key: Hashable) -> None:
        """Its first task stands in the heap again."""
        self._parked.discard(key)
        partition = self._partitions.get(key)
        if partition is not None:
            self._list(partition)

    def charge(self, task: TaskRecord) -> None:
        """Nobody keeps accounts."""

    def idle(self) -> None:
        """Nothing waits: no entry means anything."""
        self._heap.clear()

    def _rank(self, task: TaskRecord) -> Rank:
        return self._fronted.get(task) or self._order(task)

    def _partition(self, task: TaskRecord) -> Peekable:
        partition = self._partitions.get(task.partition)
        if partition is None:
            partition = self._partitions[task.partition] = self._make()
        return partition

    def _joined(self, partition: Peekable, task: TaskRecord) -> None:
        self._size += 1
        if partition.peek() is task and task.partition not in self._parked:
            self._list(partition)

    def _list(self, partition: Peekable) -> None:
        first = partition.peek()
        assert first is not None, "a partition that is kept has something queued"
        heapq.heappush(self._heap, (self._rank(first), next(self._entries), first))
        if len(self._heap) > 4 * len(self._partitions) + 64:
            self._rebuild()

    def _rebuild(self) -> None:
        firsts = [p.peek() for key, p in self._partitions.items() if key not in self._parked]
        self._heap = [(self._rank(task), next(self._entries), task) for task in firsts if task is not None]
        heapq.heapify(self._heap)

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[TaskRecord]:
        for partition in self._partitions.values():
            yield from partition
