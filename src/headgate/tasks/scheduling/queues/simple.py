"""Queues of tasks, in the order they shall run. Pure: nothing here knows a loop or a clock.

A queued task is linked into its queue by its own `before` and `after`, so queueing makes no object, and taking one out
of the middle (a cancel, an expiry, a descendant that goes first) is as cheap as taking the first: nothing is left
behind to be skipped or swept later. The price is one pointer a task.

Every operation is O(1), or O(log n) in the number of *different* priorities.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable, Iterator
from itertools import islice
from typing import Any, Final, Protocol

from headgate.tasks.model import TaskRecord
from headgate.tasks.scheduling.queues.places import MANY, Place

_COUNTED: Final = 500
"""How far a task's place in a chain is counted. Beyond that it is estimated from the numbers of the tasks."""


class Queue(Protocol):
    """What a pool asks of a queue. A task is in it at most once."""

    def push(self, task: TaskRecord) -> None:
        """Queue a task from now on."""

    def push_front(self, task: TaskRecord) -> None:
        """Queue a task again, as the next of its kind (of its tenant, of its priority)."""

    def pop(self) -> TaskRecord | None:
        """Take out the task whose turn it is."""

    def put_back(self, task: TaskRecord) -> None:
        """Queue a task again that was popped and cannot start: it is still its turn, and nothing was spent."""

    def take(self, task: TaskRecord) -> None:
        """Take out this task, to run it out of turn."""

    def remove(self, task: TaskRecord) -> None:
        """Take out this task, which will not run."""

    def charge(self, task: TaskRecord) -> None:
        """Count a turn of a task that starts without having queued."""

    def park(self, key: Hashable) -> None:
        """Pass over the tasks of this tenant until `unpark`."""

    def unpark(self, key: Hashable) -> None:
        """Let the tasks of this tenant take their turns again."""

    def idle(self) -> None:
        """Forget what is past: nothing is queued and nothing runs."""

    def place(self, task: TaskRecord, *, new: bool) -> Place:
        """Estimate how many tasks start before this one, which is queued or, if `new`, would be pushed now."""
        ...

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[TaskRecord]: ...


class Chain:
    """Tasks linked by `before` and `after`."""

    __slots__ = ("head", "size", "tail")

    def __init__(self) -> None:
        self.head: TaskRecord | None = None
        self.tail: TaskRecord | None = None
        self.size: int = 0

    def append(self, task: TaskRecord) -> None:
        """Link it in at the end."""
        tail = self.tail
        if tail is None:
            self.head = task
        else:
            tail.after = task
            task.before = tail
        self.tail = task
        self.size += 1

    def prepend(self, task: TaskRecord) -> None:
        """Link it in before all others."""
        head = self.head
        if head is None:
            self.tail = task
        else:
            head.before = task
            task.after = head
        self.head = task
        self.size += 1

    def insert(self, task: TaskRecord, rank: Callable[[TaskRecord], Any]) -> None:
        """Link it in behind the last one that does not rank after it."""
        mine, before = rank(task), self.tail
        while before is not None and rank(before) > mine:
            before = before.before
        if before is None:
            self.prepend(task)
        elif before is self.tail:
            self.append(task)
        else:
            after = before.after
            assert after is not None, "it is not the last"
            before.after = after.before = task
            task.before, task.after = before, after
            self.size += 1

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
        self.size -= 1

    def before(self, task: TaskRecord) -> int:
        """How many tasks stand before this one."""
        count, one = 0, task.before
        while one is not None:
            count += 1
            if count == _COUNTED:
                assert self.tail is not None, "it has tasks"
                each = abs(task.number - one.number) / count  # numbers of other chains lie between
                return max(count, self.size - 1 - round(abs(self.tail.number - task.number) / max(1.0, each)))
            one = one.before
        return count

    def __iter__(self) -> Iterator[TaskRecord]:
        task = self.head
        while task is not None:
            yield task
            task = task.after


class PlainQueue:
    """What queues without tenants have in common. They say who is first (`peek`), and take out one (`remove`)."""

    __slots__ = ("_size",)

    def __init__(self) -> None:
        self._size = 0

    def peek(self) -> TaskRecord | None:
        """The task whose turn it is; None if nothing is queued."""
        raise NotImplementedError

    def remove(self, task: TaskRecord) -> None:
        """Take out a task that will not run."""
        raise NotImplementedError

    def push_front(self, task: TaskRecord) -> None:
        """Put a task before its equals."""
        raise NotImplementedError

    def put_back(self, task: TaskRecord) -> None:
        """It was first, and is again."""
        self.push_front(task)

    def insert(self, task: TaskRecord, rank: Callable[[TaskRecord], Any]) -> None:
        """Put a task in its place by rank: it comes from another queue, where it was first."""
        first = self.peek()
        if first is None or rank(task) < rank(first):
            self.push_front(task)
        else:
            self._insert(task, rank)

    def _insert(self, task: TaskRecord, rank: Callable[[TaskRecord], Any]) -> None:
        raise NotImplementedError

    def pop(self) -> TaskRecord | None:
        """Take out whose turn it is."""
        task = self.peek()
        if task is not None:
            self.remove(task)
        return task

    def take(self, task: TaskRecord) -> None:
        """Take out a task, to run it out of turn."""
        self.remove(task)

    def park(self, key: Hashable) -> None:
        """Never called: `by_key` has the queues that can pass over a tenant."""
        raise NotImplementedError("a plain queue knows no partitions")

    def unpark(self, key: Hashable) -> None:
        """Never called: nothing is parked here."""
        raise NotImplementedError("a plain queue knows no partitions")

    def charge(self, task: TaskRecord) -> None:
        """Do nothing: these orders keep no account of what a tenant has had."""

    def idle(self) -> None:
        """Do nothing: these orders remember nothing that is past."""

    def __len__(self) -> int:
        return self._size


class FifoQueue(PlainQueue):
    """A queue in which the oldest task is first."""

    __slots__ = ("_chain",)

    def __init__(self) -> None:
        super().__init__()
        self._chain = Chain()

    def push(self, task: TaskRecord) -> None:
        """Put a task behind all others."""
        self._chain.append(task)
        self._size += 1

    def push_front(self, task: TaskRecord) -> None:
        """Put a task before all others."""
        self._chain.prepend(task)
        self._size += 1

    def _insert(self, task: TaskRecord, rank: Callable[[TaskRecord], Any]) -> None:
        self._chain.insert(task, rank)
        self._size += 1

    def peek(self) -> TaskRecord | None:
        """The task whose turn it is; None if nothing is queued."""
        return self._chain.head

    def remove(self, task: TaskRecord) -> None:
        """Take out a task, wherever it stands."""
        self._chain.unlink(task)
        self._size -= 1

    def place(self, task: TaskRecord, *, new: bool) -> Place:
        """A new task is behind all others."""
        ahead = self._size if new else self._chain.before(task)
        return Place(ahead, ahead)

    def __iter__(self) -> Iterator[TaskRecord]:
        return iter(self._chain)


class LifoQueue(FifoQueue):
    """Newest first: the same chain, and everyone joins at its head."""

    __slots__ = ()

    def push(self, task: TaskRecord) -> None:
        """Put a task before all others."""
        self.push_front(task)

    def place(self, task: TaskRecord, *, new: bool) -> Place:
        """A new task is before all others."""
        ahead = 0 if new else self._chain.before(task)
        return Place(ahead, ahead)


class PriorityQueue(PlainQueue):
    """Highest priority first, oldest first among equals: a chain for each priority, and a heap of priorities."""

    __slots__ = ("_chains", "_heap")

    def __init__(self) -> None:
        super().__init__()
        self._chains: dict[int, Chain] = {}
        self._heap: list[int] = []  # of -priority; one whose chain is gone is dropped when it surfaces

    def push(self, task: TaskRecord) -> None:
        """Put a task behind the others of its priority."""
        self._chain(task.priority).append(task)
        self._size += 1

    def push_front(self, task: TaskRecord) -> None:
        """Put a task before the others of its priority."""
        self._chain(task.priority).prepend(task)
        self._size += 1

    def _insert(self, task: TaskRecord, rank: Callable[[TaskRecord], Any]) -> None:
        self._chain(task.priority).insert(task, rank)
        self._size += 1

    def peek(self) -> TaskRecord | None:
        """The task whose turn it is; None if nothing is queued."""
        heap = self._heap
        while heap:
            chain = self._chains.get(-heap[0])
            if chain is not None:
                return chain.head
            heapq.heappop(heap)
        return None

    def remove(self, task: TaskRecord) -> None:
        """Take out a task, wherever it stands."""
        chain = self._chains[task.priority]
        chain.unlink(task)
        if chain.head is None:
            del self._chains[task.priority]
        self._size -= 1

    def place(self, task: TaskRecord, *, new: bool) -> Place:
        """Behind those of higher priorities, and behind the others of its own."""
        chains, priority = self._chains, task.priority
        equal = chains.get(priority)
        seen = list(islice(chains.items(), MANY))
        higher = float(sum(chain.size for level, chain in seen if level > priority))
        if len(chains) > MANY:
            higher *= self._size / sum(chain.size for _, chain in seen)
        ahead = higher if equal is None else higher + (equal.size if new else equal.before(task))
        return Place(ahead, ahead)

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
