"""A queue whose tasks need different things, some of which nobody has at the moment. Pure.

Tasks with the same `need` (requirement) are a *class*. While nothing can serve a class it is `unserved`, and passed
over as a whole: no task of it is looked at, however many there are. Afterwards every task stands where it stood.

So each partition keeps its tasks by class, and each class has a heap of the partitions that have tasks of it, ordered
by what the strategy goes by: whose turn it is (round robin), who has had least for its weight (fair share), or who came
first (the others). The next task is the first of the heads of the classes that are open. A partition has one turn and
one account, whatever its tasks need: nobody gets more by asking for different things.

Being served can only move a partition back, so its entries are not touched then: one that turns out to be too early
when it reaches the top is put where it belongs. O(classes + log n); there are at most `MAX_CLASSES`.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Hashable, Iterator
from itertools import count, islice
from typing import Any

from headgate.tasks.fairness import Rounds
from headgate.tasks.model import TaskRecord
from headgate.tasks.scheduling.queues.places import MANY, Place, in_turn, mixed, stands_for
from headgate.tasks.scheduling.queues.simple import FifoQueue, LifoQueue, PriorityQueue

MAX_CLASSES = 64

Rank = tuple[float, int, int]
Entry = tuple[Rank, int, "Holder", Hashable]

_NOTHING: tuple[int, float, tuple[int, int], float] = (0, 0.0, (0, 0), 0.0)
_INNER: dict[str, Callable[[], Any]] = {"lifo": LifoQueue, "priority": PriorityQueue}


class Holder:
    """The queued tasks of one partition by class, its place in the order, and its standing (see `fairness`)."""

    __slots__ = ("entries", "got", "key", "parked", "queues", "round", "since", "tag", "weight")

    def __init__(self, key: Hashable, tag: float, weight: float) -> None:
        self.key: Hashable = key
        self.tag: float = tag
        self.weight: float = weight
        self.parked: bool = False
        self.queues: dict[Hashable, Any] = {}
        self.entries: dict[Hashable, int] = {}
        """The number of its entry in the heap of each class: another one is out of date."""
        self.since: int = 0
        self.round: int = 0
        self.got: float = 0.0


class ClassedQueue:
    """The order of `kind`, passing over classes in `unserved` and partitions that are parked."""

    __slots__ = (
        "_bound",
        "_by_key",
        "_counts",
        "_heaps",
        "_holders",
        "_kind",
        "_parked",
        "_past",
        "_ranks",
        "_serials",
        "_turns",
        "_undo",
        "_unserved",
        "_virtual",
        "_weight",
        "rounds",
    )

    def __init__(
        self,
        kind: str,
        unserved: Collection[Hashable],
        *,
        by_key: bool = False,
        weight: Callable[[Hashable], float] | None = None,
    ) -> None:
        self.rounds: Rounds | None = Rounds() if kind in ("fair_round_robin", "fair_share") else None
        self._kind = kind
        self._unserved = unserved
        self._by_key = by_key or self.rounds is not None
        self._weight = weight
        self._holders: dict[Hashable, Holder] = {}
        self._heaps: dict[Hashable, list[Entry]] = {}
        self._counts: dict[Hashable, int] = {}  # how many of each class are queued
        self._ranks: dict[TaskRecord, tuple[int, int]] = {}  # of all that are queued: by priority, by turn
        self._turns = count(1)
        self._serials = count(1)
        self._parked: set[Hashable] = set()
        self._past: dict[Hashable, float] = {}  # tags of partitions that ran empty (fair share)
        self._bound = 64
        self._virtual = 0.0
        self._undo: tuple[int, float, tuple[int, int], float] = _NOTHING

    @property
    def classes(self) -> Collection[Hashable]:
        """The needs of those who are queued."""
        return self._counts.keys()

    # -- in ------------------------------------------------------------------------------------------------------------

    def push(self, task: TaskRecord) -> None:
        """Where the order puts it."""
        turn = next(self._turns)
        self._join(task, -turn if self._kind == "lifo" else turn, front=False)

    def push_front(self, task: TaskRecord) -> None:
        """First of its partition, or of its priority."""
        self._join(task, -next(self._turns), front=True)

    def put_back(self, task: TaskRecord) -> None:
        """It is its turn still."""
        (popped, tag, rank, virtual), self._undo = self._undo, _NOTHING
        same = popped == task.number
        if same:  # it may be of another class than before, and not the first of that
            holder = self._join(task, rank[1], front=None)
        else:
            holder = self._join(task, -next(self._turns), front=True)
        if same and self.rounds is not None:
            holder.tag, self._virtual = tag, virtual
            self._list_all(holder)

    def _join(self, task: TaskRecord, turn: int, *, front: bool | None) -> Holder:
        """Queue a task with this turn: at the front, at the end, or (None) where its turn is."""
        holder, need = self._holder(task), task.terms.need
        queue = holder.queues.get(need)
        if queue is None:
            queue = holder.queues[need] = _INNER.get(self._kind, FifoQueue)()
            self._heaps.setdefault(need, [])
        self._counts[need] = self._counts.get(need, 0) + 1
        self._ranks[task] = (-task.priority if self._kind == "priority" else 0, turn)
        if front is None:
            queue.insert(task, self._ranks.__getitem__)
        elif front:
            queue.push_front(task)
        else:
            queue.push(task)
        if queue.peek() is task and not holder.parked:
            self._list(holder, need)
        return holder

    def _holder(self, task: TaskRecord) -> Holder:
        key = task.partition if self._by_key else None
        holder = self._holders.get(key)
        if holder is None:
            weight = 1.0 if self._weight is None else self._weight(key)
            holder = self._holders[key] = Holder(key, self._first_tag(key), weight)
            self._past.pop(key, None)
            holder.parked = key in self._parked
            if self.rounds is not None and not holder.parked:
                self.rounds.opened(holder)
        return holder

    def _first_tag(self, key: Hashable) -> float:
        if self._kind == "fair_round_robin":
            return float(next(self._turns))  # at the end of the ring
        return max(self._virtual, self._past.get(key, 0.0))

    # -- out -----------------------------------------------------------------------------------------------------------

    def pop(self) -> TaskRecord | None:
        """Take out the first that is neither unserved nor parked."""
        best: Entry | None = None
        for need in self._heaps:
            if need not in self._unserved:
                entry = self._first(need)
                if entry is not None and (best is None or entry < best):
                    best = entry
        if best is None:
            return None
        _, _, holder, need = best
        task: TaskRecord = holder.queues[need].peek()
        self._undo = task.number, holder.tag, self._ranks[task], self._virtual
        if self._kind == "fair_share":
            # One that was passed over, for nothing could serve it, has kept its turn, and has no claim on the rest.
            self._virtual = holder.tag = max(holder.tag, self._virtual)
        self._serve(holder, task)
        return task

    def take(self, task: TaskRecord) -> None:
        """Take out this one, to run it out of turn: it is charged, and moves nobody in the ring."""
        holder = self._holders[task.partition if self._by_key else None]
        if self._kind == "fair_round_robin":
            assert self.rounds is not None, "it is fair"
            self.rounds.served(holder)
            self.remove(task)
        else:
            if self._kind == "fair_share":
                self._undo = task.number, holder.tag, (0, -next(self._turns)), self._virtual
            self._serve(holder, task)

    def remove(self, task: TaskRecord) -> None:
        """Take out a task that will not run."""
        holder = self._holders[task.partition if self._by_key else None]
        self._unlink(holder, task)
        if not holder.queues:
            self._close(holder)

    def charge(self, task: TaskRecord) -> None:
        """It starts without having queued; where there are accounts, it counts all the same."""
        if self._kind != "fair_share":
            return
        key = task.partition
        holder = self._holders.get(key)
        if holder is not None:
            holder.tag += _cost(task) / holder.weight
            return
        start = self._first_tag(key)
        self._virtual = max(self._virtual, start)
        self._past[key] = start + _cost(task) / (1.0 if self._weight is None else self._weight(key))
        self._forget()

    def _serve(self, holder: Holder, task: TaskRecord) -> None:
        if self.rounds is not None:
            amount = _cost(task) / holder.weight if self._kind == "fair_share" else 1.0
            holder.tag = holder.tag + amount if self._kind == "fair_share" else float(next(self._turns))
            self.rounds.served(holder, amount)
        self._unlink(holder, task)
        if not holder.queues:
            self._close(holder)

    def _unlink(self, holder: Holder, task: TaskRecord) -> None:
        need = task.terms.need
        queue = holder.queues[need]
        queue.remove(task)
        del self._ranks[task]
        self._counts[need] -= 1
        if not self._counts[need]:
            del self._counts[need], self._heaps[need]
        if not len(queue):
            del holder.queues[need]
            holder.entries.pop(need, None)

    def _close(self, holder: Holder) -> None:
        del self._holders[holder.key]
        if self.rounds is not None and not holder.parked:
            self.rounds.closed(holder)
        if self._kind == "fair_share":
            self._past[holder.key] = holder.tag
            self._forget()

    def _forget(self) -> None:
        """Drop tags that virtual time has passed. Looked for when there are twice as many as the last time."""
        if len(self._past) > self._bound:
            self._past = {key: tag for key, tag in self._past.items() if tag > self._virtual}
            self._bound = 2 * len(self._past) + 64

    # -- the order -----------------------------------------------------------------------------------------------------

    def _first(self, need: Hashable) -> Entry | None:
        heap = self._heaps[need]
        while heap:
            rank, number, holder, _ = entry = heap[0]
            if holder.entries.get(need) != number:
                heapq.heappop(heap)
            elif rank != (true := self._rank(holder, need)):
                heapq.heapreplace(heap, (true, number, holder, need))
            else:
                return entry
        return None

    def _rank(self, holder: Holder, need: Hashable) -> Rank:
        first: TaskRecord = holder.queues[need].peek()
        return (holder.tag if self.rounds is not None else 0.0, *self._ranks[first])

    def _list(self, holder: Holder, need: Hashable) -> None:
        """Enter it into the heap of this class. An older entry of it is dropped when it surfaces."""
        heap = self._heaps[need]
        number = holder.entries[need] = next(self._serials)
        heapq.heappush(heap, (self._rank(holder, need), number, holder, need))
        if len(heap) > 4 * min(self._counts[need], len(self._holders)) + 64:
            heap[:] = [entry for entry in heap if entry[2].entries.get(need) == entry[1]]
            heapq.heapify(heap)

    def _list_all(self, holder: Holder) -> None:
        if not holder.parked:
            for need in holder.queues:
                self._list(holder, need)

    def inherit(self, virtual: float, tags: dict[Hashable, float]) -> None:
        """Go on with what each partition has had in another queue (fair share)."""
        self._virtual, self._past = virtual, dict(tags)

    def accounts(self) -> tuple[float, dict[Hashable, float]]:
        """Virtual time, and the tag of each partition."""
        return self._virtual, {**self._past, **{key: holder.tag for key, holder in self._holders.items()}}

    def place(self, task: TaskRecord, *, new: bool) -> Place:
        """As in a queue without requirements, among the tasks that can be served and those of its own requirement."""
        need = task.terms.need
        holder = self._holders.get(task.partition if self._by_key else None)
        queue = None if holder is None else holder.queues.get(need)
        own = 0.0 if queue is None else queue.place(task, new=new).ahead
        served = [
            (one, [queue for asked, queue in one.queues.items() if asked == need or asked not in self._unserved])
            for one in islice(self._holders.values(), MANY)
        ]
        each = stands_for(len(self._holders))
        if self.rounds is not None:
            others = [sum(map(len, queues)) for one, queues in served if one is not holder]
            return in_turn(own, others, each, last=holder is None)
        ahead = sum(one.place(task, new=True).ahead for _, queues in served for one in queues if one is not queue)
        return mixed(own, 0 if queue is None else len(queue), ahead * each, new=new)

    def park(self, key: Hashable) -> None:
        """Pass over the tasks of this partition until `unpark`."""
        self._parked.add(key)
        holder = self._holders.get(key)
        if holder is not None and not holder.parked:
            holder.parked = True
            holder.entries.clear()
            if self.rounds is not None:
                self.rounds.closed(holder)

    def unpark(self, key: Hashable) -> None:
        """They take their turns again, with no claim on the time they were parked."""
        self._parked.discard(key)
        holder = self._holders.get(key)
        if holder is None or not holder.parked:
            return
        holder.parked = False
        if self.rounds is not None:
            holder.tag = self._first_tag(key) if self._kind == "fair_round_robin" else max(holder.tag, self._virtual)
            self.rounds.opened(holder)
        self._list_all(holder)

    def idle(self) -> None:
        """Nothing waits and nothing runs: what is past may be forgotten."""
        self._past.clear()
        self._heaps.clear()
        self._undo = _NOTHING
        self._virtual = 0.0

    def __len__(self) -> int:
        return len(self._ranks)

    def __iter__(self) -> Iterator[TaskRecord]:
        for holder in self._holders.values():
            for queue in holder.queues.values():
                yield from queue


def _cost(task: TaskRecord) -> float:
    cost = task.terms.cost
    return 1.0 if cost is None else float(cost)
