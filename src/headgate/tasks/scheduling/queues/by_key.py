"""A first-in-first-out, last-in-first-out or priority queue of which some partitions can be parked. Pure.

Each partition is a queue of its own, and the partitions stand in a heap by the rank of their first task: the turn in
which it joined, which tells who came first across partitions. A parked partition is out of the heap and costs nothing
until it comes back: never rescanned. O(log n) in the number of keys.
"""

from __future__ import annotations

import heapq
import sys
from collections.abc import Callable, Hashable, Iterator
from itertools import count, islice
from typing import Any, Protocol

from headgate.tasks.model import TaskRecord
from headgate.tasks.scheduling.queues.places import MANY, Place, mixed, stands_for
from headgate.tasks.scheduling.queues.simple import FifoQueue, LifoQueue, PriorityQueue


class Peekable(Protocol):
    """What this needs of the queue of one partition."""

    push: Callable[[TaskRecord], None]
    push_front: Callable[[TaskRecord], None]

    def peek(self) -> TaskRecord | None: ...
    def remove(self, task: TaskRecord) -> None: ...
    def place(self, task: TaskRecord, *, new: bool) -> Place: ...
    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[TaskRecord]: ...


Rank = tuple[int, int]

_KINDS: dict[str, Callable[[], Any]] = {"fifo": FifoQueue, "lifo": LifoQueue, "priority": PriorityQueue}


class KeyedQueue:
    """The order of `kind`, passing over what is parked."""

    __slots__ = ("_entries", "_heap", "_kind", "_parked", "_partitions", "_ranks", "_turns", "_undo")

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._partitions: dict[Hashable, Peekable] = {}
        self._ranks: dict[TaskRecord, Rank] = {}  # of all that are queued
        self._turns = count(1)
        self._heap: list[tuple[Rank, int, TaskRecord]] = []  # an entry that is not first of its partition is old
        self._entries = count()
        self._parked: set[Hashable] = set()
        self._undo: tuple[int, Rank] = (0, (0, 0))  # the number of the last that was popped

    def push(self, task: TaskRecord) -> None:
        """Put a task where the order wants it."""
        turn = next(self._turns)
        partition = self._partition(task)
        partition.push(task)
        self._joined(partition, task, -turn if self._kind == "lifo" else turn)

    def push_front(self, task: TaskRecord) -> None:
        """Put a task before the others of its tenant, or of its tenant and priority."""
        partition = self._partition(task)
        partition.push_front(task)
        self._joined(partition, task, -next(self._turns))

    def put_back(self, task: TaskRecord) -> None:
        """Put a task first of its tenant, with the rank it had."""
        popped, rank = self._undo
        partition = self._partition(task)
        partition.push_front(task)
        self._joined(partition, task, rank[1] if popped == task.number else -next(self._turns))

    def pop(self) -> TaskRecord | None:
        """Take out the first that is not parked."""
        heap = self._heap
        while heap:
            rank, _, task = heap[0]
            key = task.partition
            # One that left and came back has another rank; one that is not first of its partition is listed later.
            if self._ranks.get(task) == rank and key not in self._parked and self._partitions[key].peek() is task:
                self._undo = task.number, rank
                heapq.heappop(heap)  # now, and not when it surfaces again: it would hold the task, and so its result
                self.remove(task)
                return task
            heapq.heappop(heap)
        return None

    def remove(self, task: TaskRecord) -> None:
        """Take out a task that will not run."""
        key = task.partition
        partition = self._partitions[key]
        was_first = partition.peek() is task
        partition.remove(task)
        del self._ranks[task]
        if not self._ranks:
            self._heap.clear()
        if not len(partition):
            del self._partitions[key]
        elif was_first and key not in self._parked:
            self._list(partition)

    take = remove

    def park(self, key: Hashable) -> None:
        """Pass over a tenant; its entry in the heap is dropped when it surfaces."""
        self._parked.add(key)

    def unpark(self, key: Hashable) -> None:
        """Put the first task of a tenant into the heap again."""
        self._parked.discard(key)
        partition = self._partitions.get(key)
        if partition is not None:
            self._list(partition)

    def charge(self, task: TaskRecord) -> None:
        """Do nothing: these orders keep no account of what a tenant has had."""

    def idle(self) -> None:
        """Forget all entries: nothing is queued."""
        self._heap.clear()
        self._undo = (0, (0, 0))

    def place(self, task: TaskRecord, *, new: bool) -> Place:
        """Behind the others of its tenant, and those of other tenants that are not parked and came before it."""
        mine = self._partitions.get(task.partition)
        own = 0.0 if mine is None else mine.place(task, new=new).ahead
        if len(self._ranks) <= MANY:
            last = (
                -task.priority if self._kind == "priority" else 0,
                -sys.maxsize if self._kind == "lifo" else sys.maxsize,
            )
            rank, parked = self._ranks.get(task, last), self._parked
            before = (one for one, other in self._ranks.items() if other < rank and one.partition != task.partition)
            return Place(own + sum(one.partition not in parked for one in before), own)
        seen = islice(self._partitions.items(), MANY)
        others = sum(
            one.place(task, new=True).ahead for key, one in seen if one is not mine and key not in self._parked
        )
        others *= stands_for(len(self._partitions))
        return mixed(own, 0 if mine is None else len(mine), others, new=new)

    def _partition(self, task: TaskRecord) -> Peekable:
        partition = self._partitions.get(task.partition)
        if partition is None:
            partition = self._partitions[task.partition] = _KINDS[self._kind]()
        return partition

    def _joined(self, partition: Peekable, task: TaskRecord, turn: int) -> None:
        self._ranks[task] = (-task.priority if self._kind == "priority" else 0, turn)
        if partition.peek() is task and task.partition not in self._parked:
            self._list(partition)

    def _list(self, partition: Peekable) -> None:
        first = partition.peek()
        assert first is not None, "a partition that is kept has something queued"
        heapq.heappush(self._heap, (self._ranks[first], next(self._entries), first))
        if len(self._heap) > 4 * len(self._partitions) + 64:
            self._rebuild()

    def _rebuild(self) -> None:
        firsts = [p.peek() for key, p in self._partitions.items() if key not in self._parked]
        self._heap = [(self._ranks[task], next(self._entries), task) for task in firsts if task is not None]
        heapq.heapify(self._heap)

    def __len__(self) -> int:
        return len(self._ranks)

    def __iter__(self) -> Iterator[TaskRecord]:
        for partition in self._partitions.values():
            yield from partition
