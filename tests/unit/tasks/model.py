"""Naive models of what orders, counts and remembers tasks: plain lists and linear scans, each rule as it is documented.

    ShareModel                 a queue of tenants that share by weight and cost
    RoundsModel                Jain's index, from a log of what happened
    OldestModel, BacklogModel  who is dropped
    LedgerModel                states, counts, keys and which records are kept

They are slow on purpose: whatever is asked, everything is looked at again.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Iterator
from types import SimpleNamespace
from typing import Any

from headgate.core.key_windows import Window
from headgate.gate.rounds import jain
from headgate.tasks.model import PLAIN, Moment, TaskRecord, Terms
from headgate.tasks.scheduling.scheduler import Scheduler

SCALE = float(os.environ.get("HEADGATE_SCALE", "0.1"))

START = Moment(0.0, 0.0)
OWNER = SimpleNamespace(name="pool")


def record(
    number: int,
    key: Hashable = None,
    priority: int = 0,
    cost: float | None = None,
    parent: TaskRecord | None = None,
    terms: Terms | None = None,
    owner: Any = OWNER,
    need: Hashable = None,
) -> TaskRecord:
    """A queued task."""
    if terms is None:
        terms = PLAIN if cost is None and need is None else Terms(cost=cost, need=need)
    return TaskRecord(owner, number, None, (), None, START, parent, priority, key, key, terms)


class Stock:
    """A supply that has nothing, and notes who asked for something."""

    def __init__(self) -> None:
        self.asked: list[TaskRecord] = []

    def take(self, task: TaskRecord, *, wait: bool) -> bool:
        self.asked.append(task)
        return False

    def give_back(self, task: TaskRecord) -> None:
        raise AssertionError("nobody got anything")


def refused(scheduler: Scheduler) -> TaskRecord | None:
    """Have nothing for anybody when the next may start, and have it again then. Returns who was asked about first."""
    scheduler.supply = stock = Stock()
    unserved = set(scheduler.unserved)
    assert scheduler.next() is None
    scheduler.supply = None
    scheduler.unserved &= unserved
    return stock.asked[0] if stock.asked else None


def cost_of(task: TaskRecord) -> float:
    return 1.0 if task.terms.cost is None else task.terms.cost


# -- queues ------------------------------------------------------------------------------------------------------------


class FifoModel:
    """A list, the next one first."""

    def __init__(self) -> None:
        self.tasks: list[TaskRecord] = []

    def push(self, task: TaskRecord) -> None:
        self.tasks.append(task)

    def push_front(self, task: TaskRecord) -> None:
        self.tasks.insert(0, task)

    def first(self) -> TaskRecord | None:
        return self.tasks[0] if self.tasks else None

    def pop(self) -> TaskRecord | None:
        task = self.first()
        if task is not None:
            self.tasks.remove(task)
        return task

    def remove(self, task: TaskRecord) -> None:
        self.tasks.remove(task)

    def take(self, task: TaskRecord) -> None:
        self.tasks.remove(task)

    def charge(self, task: TaskRecord) -> None:
        pass

    def idle(self) -> None:
        pass

    def __iter__(self) -> Iterator[TaskRecord]:
        return iter(self.tasks)


class Partitioned:
    """Tasks by partition, some of which are parked."""

    def __init__(self, make: Callable[[], FifoModel] = FifoModel) -> None:
        self.make = make
        self.partitions: dict[Hashable, FifoModel] = {}
        self.parked: set[Hashable] = set()

    def push(self, task: TaskRecord) -> None:
        self._came(task.partition).push(task)

    def push_front(self, task: TaskRecord) -> None:
        self._came(task.partition).push_front(task)

    def _came(self, key: Hashable) -> FifoModel:
        if key not in self.partitions:
            self.partitions[key] = self.make()
            self.opened(key)
        return self.partitions[key]

    def pop(self) -> TaskRecord | None:
        if not self.eligible():
            return None
        key = self.turn()
        task = self.partitions[key].first()
        assert task is not None
        self.serving(task)
        self._drop(task)
        self.served(key)
        return task

    def take(self, task: TaskRecord) -> None:
        self.taking(task)
        self._drop(task)

    def remove(self, task: TaskRecord) -> None:
        self._drop(task)

    def _drop(self, task: TaskRecord) -> None:
        key = task.partition
        self.partitions[key].remove(task)
        if not self.partitions[key].tasks:
            del self.partitions[key]
            self.closed(key)

    def park(self, key: Hashable) -> None:
        self.parked.add(key)

    def unpark(self, key: Hashable) -> None:
        self.parked.discard(key)

    def eligible(self) -> list[Hashable]:
        return [key for key in self.partitions if key not in self.parked]

    def __iter__(self) -> Iterator[TaskRecord]:
        for partition in self.partitions.values():
            yield from partition

    # What the kinds differ in.

    def turn(self) -> Hashable:
        raise NotImplementedError

    def opened(self, key: Hashable) -> None: ...
    def closed(self, key: Hashable) -> None: ...
    def serving(self, task: TaskRecord) -> None: ...
    def served(self, key: Hashable) -> None: ...
    def taking(self, task: TaskRecord) -> None: ...
    def charge(self, task: TaskRecord) -> None: ...
    def idle(self) -> None: ...


class ShareModel(Partitioned):
    """Start-time fair queueing. Tags are never forgotten, and the smallest is looked for among all."""

    def __init__(self, weight: Callable[[Hashable], float]) -> None:
        super().__init__()
        self.weight = weight
        self.tags: dict[Hashable, float] = {}
        self.listed: dict[Hashable, int] = {}  # when a key got its place among equal tags
        self.virtual = 0.0
        self.clock = 0

    def turn(self) -> Hashable:
        return min(self.eligible(), key=lambda key: (self.tags[key], self.listed[key]))

    def opened(self, key: Hashable) -> None:
        self.tags[key] = max(self.virtual, self.tags.get(key, 0.0))
        self._list(key)

    def serving(self, task: TaskRecord) -> None:
        self.virtual = self.tags[task.partition]
        self.taking(task)

    def taking(self, task: TaskRecord) -> None:
        self.tags[task.partition] += cost_of(task) / self.weight(task.partition)
        self._list(task.partition)

    def charge(self, task: TaskRecord) -> None:
        key = task.partition
        if key not in self.partitions:
            self.tags[key] = self.virtual = max(self.virtual, self.tags.get(key, 0.0))
        self.taking(task)

    def unpark(self, key: Hashable) -> None:
        if key in self.parked and key in self.partitions:
            self.tags[key] = max(self.tags[key], self.virtual)
            self._list(key)
        super().unpark(key)

    def idle(self) -> None:
        self.tags.clear()
        self.virtual = 0.0

    def _list(self, key: Hashable) -> None:
        self.clock += 1
        self.listed[key] = self.clock


# -- fairness ----------------------------------------------------------------------------------------------------------


class RoundsModel:
    """Jain's index, from the whole story: ("opened", key), ("served", key, amount), ("closed", key)."""

    def __init__(self) -> None:
        self.story: list[tuple[Any, ...]] = []

    def index(self) -> float:
        past: list[tuple[float, int]] = []
        backlogged: set[Hashable] = set()
        shares: dict[Hashable, float] = {}  # of the members of this round
        owed: set[Hashable] = set()  # members not served yet
        present: set[Hashable] = set()  # members that never ran empty
        length = 0
        for what, key, *amount in self.story:
            begins = False
            if what == "opened":
                backlogged.add(key)
            elif what == "served":
                length += 1
                if key in present:
                    shares[key] += amount[0]
                    owed.discard(key)
                begins = not owed
            else:
                backlogged.discard(key)
                present.discard(key)
                if key in owed:
                    owed.discard(key)
                    del shares[key]
                    begins = not owed
            if begins:
                if len(shares) >= 2:
                    past.append((jain(shares.values()), length))
                shares, owed, present, length = dict.fromkeys(backlogged, 0.0), set(backlogged), set(backlogged), 0
        past = past[-256:]
        if len(shares) >= 2 and length >= 2 * len(shares):
            past.append((jain(shares.values()), length))
        total = sum(tasks for _, tasks in past)
        return sum(index * tasks for index, tasks in past) / total if total else 1.0


# -- who is dropped ----------------------------------------------------------------------------------------------------


class OldestModel:
    """Whoever was submitted first, except the newcomer."""

    def __init__(self) -> None:
        self.tasks: list[TaskRecord] = []

    def joined(self, task: TaskRecord) -> None:
        self.tasks.append(task)

    def left(self, task: TaskRecord) -> None:
        self.tasks.remove(task)

    def choose(self, newcomer: TaskRecord | None = None) -> TaskRecord:
        return min((task for task in self.tasks if task is not newcomer), key=lambda task: task.number)


class BacklogModel(OldestModel):
    """Of the key with most; of several, the one whose oldest task is the oldest."""

    sign = 1

    def choose(self, newcomer: TaskRecord | None = None) -> TaskRecord:
        keys = [task.partition for task in self.tasks]
        others = [task for task in self.tasks if task is not newcomer]

        def rank(key: Hashable) -> tuple[int, int]:
            return -keys.count(key), min(self.sign * task.number for task in self.tasks if task.partition == key)

        largest = min({task.partition for task in others}, key=rank)
        return min((task for task in others if task.partition == largest), key=lambda task: self.sign * task.number)


class NewestBacklogModel(BacklogModel):
    """Of the key with most; of several, the one whose newest task is the newest."""

    sign = -1


# -- states ------------------------------------------------------------------------------------------------------------

HOLDING = {
    "while_active": (),
    "until_success": ("completed",),
    "forever": ("completed", "failed", "expired"),
}


def holds(window: Window, status: str, ended: float | None, now: float) -> bool:
    """The table in `idempotency`, read aloud. An unfinished task always holds its key."""
    if status in ("queued", "running"):
        return True
    if isinstance(window, str):
        return status in HOLDING[window]
    return status == "completed" and ended is not None and now < ended + window


class LedgerModel:
    """All tasks that are remembered; whose time is over is found anew each time."""

    def __init__(self, keep: int) -> None:
        self.keep = keep
        self.tasks: list[TaskRecord] = []  # oldest first
        self.idle: list[TaskRecord] = []  # finished and holding no key, in the order in which they became so
        self.order: list[TaskRecord] = []  # in which they ended

    def ended(self, task: TaskRecord) -> None:
        self.order.append(task)

    def settle(self, now: float) -> None:
        """Whoever holds nothing any more is remembered only among the newest `keep`."""
        over = [task for task in self.order if task not in self.idle and not self.holding(task, now)]
        self.order = [task for task in self.order if task not in over]
        self.idle += sorted(over, key=self._lapsed_at)
        while len(self.idle) > self.keep:
            self.tasks.remove(self.idle.pop(0))

    def holding(self, task: TaskRecord, now: float) -> bool:
        terms = task.terms
        ended = task.ended.wall if task.ended is not None else None
        return terms.idempotency_key is not None and holds(terms.window, task.status, ended, now)

    def holder(self, key: str, now: float) -> TaskRecord | None:
        for task in reversed(self.tasks):
            if task.terms.idempotency_key == key and self.holding(task, now):
                return task
        return None

    def _lapsed_at(self, task: TaskRecord) -> float:
        assert task.ended is not None
        timed = task.terms.idempotency_key is not None and task.status == "completed"
        window = task.terms.window
        return task.ended.wall + (window if timed and not isinstance(window, str) else 0.0)
