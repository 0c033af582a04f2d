"""Queues of tasks, in the order they shall run. Pure: nothing here knows a loop or a clock.

A queued task is linked into its queue by its own `before` and `after`, so queueing makes no object, and taking one out
of the middle (a cancel, an expiry, a descendant that goes first) is as cheap as taking the first: nothing is left
behind to be skipped or swept later. The price is one pointer a task.

Every operation is O(1), or O(log n) in the number of *different* priorities.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterator
from typing import Protocol

from headgate.tasks.model import TaskRecord


class Queue(Protocol):
    """What a pool asks of a queue. A task is in it at most once."""

    def push(self, task: TaskRecord) -> None:
        """It waits from now on."""

    def push_front(self, task: TaskRecord) -> None:
        """It waits again: next of its kind (of its partition, of its priority)."""

    def pop(self) -> TaskRecord | None:
        """Take out whose turn it is."""

    def put_back(self, task: TaskRecord) -> None:
        """It was popped and cannot start: it is its turn still, and nothing was spent."""

    def take(self, task: TaskRecord) -> None:
        """Take out this one, to run it out of turn."""

    def remove(self, task: TaskRecord) -> None:
        """Take out this one: it will not run."""

    def charge(self, task: TaskRecord) -> None:
        """It starts without having queued."""

    def park(self, key: Hashable) -> None:
        """Pass over the tasks of this partition until `unpark`."""

    def unpark(self, key: Hashable) -> None:
        """They take their turns again."""

    def idle(self) -> None:
        """Nothing waits and nothing runs: what is past may be forgotten."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[TaskRecord]: ...


class Chain:
    """Tasks linked by `before` and `after`."""

    __slots__ = ("head", "tail")

    def __init__(self) -> None:
        self.head: TaskRecord | None = None
        self.tail: TaskRecord | None = None

    def append(self, task: TaskRecord) -> None:
        """Link it in at the end."""
        tail = self.tail
        if tail is None:
            self.head = task
        else:
            tail.after = task
            task.before = tail
        self.tail = task

    def prepend(self, task: TaskRecord) -> None:
        """Link it in before all others."""
        head = self.head
        if head is None:
            self.tail = task
        else:
            head.before = task
            task.after = head
        self.head = task

    def unlink(self, task: TaskRecord) -> None:
        """Take it out, wherever it stands."""
        before, after = task.before, task.after
        if before is None:
            self.head = after
        else:
            before.after = after
            task.before = None
        if after is None:
            self.tail = before
        else:
            after.before = before
            task.after = None

    def __iter__(self) -> Iterator[TaskRecord]:
        task = self.head
        while task is not None:
            yield task
            task = task.after


class PlainQueue:
    """What queues without partitions have in common. They say who is first (`peek`), and take out one (`remove`)."""

    __slots__ = ("_size",)

    def __init__(self) -> None:
        self._size = 0

    def peek(self) -> TaskRecord | None:
        """Whose turn it is."""
        raise NotImplementedError

    def remove(self, task: TaskRecord) -> None:
        """Take out this one."""
        raise NotImplementedError

    def push_front(self, task: TaskRecord) -> None:
        """Before its equals."""
        raise NotImplementedError

    def put_back(self, task: TaskRecord) -> None:
        """It was first, and is again."""
        self.push_front(task)

    def pop(self) -> TaskRecord | None:
        """Take out whose turn it is."""
        task = self.peek()
        if task is not None:
            self.remove(task)
        return task

    def take(self, task: TaskRecord) -> None:
        """Take out this one."""
        self.remove(task)

    def park(self, key: Hashable) -> None:
        """Not here: see `keyed_queues`."""
        raise NotImplementedError("a plain queue knows no partitions")

    def unpark(self, key: Hashable) -> None:
        """Not here: see `keyed_queues`."""
        raise NotImplementedError("a plain queue knows no partitions")

    def charge(self, task: TaskRecord) -> None:
        """Nobody keeps accounts."""

    def idle(self) -> None:
        """Nothing to forget."""

    def __len__(self) -> int:
        return self._size


class FifoQueue(PlainQueue):
    """Oldest first."""

    __slots__ = ("_chain",)

    def __init__(self) -> None:
        super().__init__()
        self._chain = Chain()

    def push(self, task: TaskRecord) -> None:
        """At the end."""
        self._chain.append(task)
        self._size += 1

    def push_front(self, task: TaskRecord) -> None:
        """Before all."""
        self._chain.prepend(task)
        self._size += 1

    def peek(self) -> TaskRecord | None:
        """Whose turn it is."""
        return self._chain.head

    def remove(self, task: TaskRecord) -> None:
        """Take out this one."""
        self._chain.unlink(task)
        self._size -= 1

    def __iter__(self) -> Iterator[TaskRecord]:
        return iter(self._chain)


class LifoQueue(FifoQueue):
    """Newest first: the same chain, and everyone joins at its head."""

    __slots__ = ()

    def push(self, task: TaskRecord) -> None:
        """Before all."""
        self.push_front(task)


class PriorityQueue(PlainQueue):
    """Highest priority first, oldest first among equals: a chain for each priority, and a heap of priorities."""

    __slots__ = ("_chains", "_heap")

    def __init__(self) -> None:
        super().__init__()
        self._chains: dict[int, Chain] = {}
        self._heap: list[int] = []  # of -priority; one whose chain is gone is dropped when it surfaces

    def push(self, task: TaskRecord) -> None:
        """Behind its equals."""
        self._chain(task.priority).append(task)
        self._size += 1

    def push_front(self, task: TaskRecord) -> None:
        """Before its equals."""
        self._chain(task.priority).prepend(task)
        self._size += 1

    def peek(self) -> TaskRecord | None:
        """Whose turn it is."""
        heap = self._heap
        while heap:
            chain = self._chains.get(-heap[0])
            if chain is not None:
                return chain.head
            heapq.heappop(heap)
        return None

    def remove(self, task: TaskRecord) -> None:
        """Take out this one."""
        chain = self._chains[task.priority]
        chain.unlink(task)
        if chain.head is None:
            del self._chains[task.priority]
        self._size -= 1

    def _chain(self, priority: int) -> Chain:
        chain = self._chains.get(priority)
        if chain is None:
            chain = self._chains[priority] = Chain()
            heapq.heappush(self._heap, -priority)
            if len(self._heap) > 2 * len(self._chains) + 64:  # priorities that came and went many times
                self._heap = [-known for known in self._chains]
                heapq.heapify(self._heap)
        return chain

    def __iter__(self) -> Iterator[TaskRecord]:
        for priority in sorted(self._chains, reverse=True):
            yield from self._chains[priority]
