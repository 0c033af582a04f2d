"""Backpressure: what happens to a submit that finds the queue full? Values, and the choice of a victim. Pure.

Depth counts queued tasks only, delayed ones too; what runs is never evicted.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from itertools import count
from typing import Any, ClassVar, Literal, Protocol, TypeAlias, cast, get_args

from headgate.core.checks import respell
from headgate.errors import InvalidArgument
from headgate.tasks.model import TaskRecord

OnFull: TypeAlias = Literal[
    "block_submitter", "drop_oldest", "drop_newest", "drop_fair", "fail_submitter", "refuse_fair"
]
Answer: TypeAlias = Literal["block", "drop_oldest", "drop_newest", "drop_fair", "fail", "refuse_fair", "busy"]
"""What to do with a submit when the queue is full."""

ON_FULL: tuple[OnFull, ...] = get_args(OnFull)


@dataclass(frozen=True, slots=True)
class Policy:
    """How many tasks may queue, and what happens to the next one."""

    kind: str
    max_depth: int | None
    answer: Answer
    name: str
    """What a dropped task names as its `rejection_policy`."""
    reason: str = ""
    """The `rejection_reason` of a task that the policy drops."""
    shared: bool = False
    """Does `max_depth` count the queued tasks of all processes that share the budget?"""

    def descriptor(self) -> dict[str, Any]:
        """Describe the policy in values that JSON knows."""
        if self.kind == "queue":
            described = {"kind": "queue", "max_depth": self.max_depth, "on_full": self.name}
            return {**described, "shared": True} if self.shared else described
        if self.kind == "ring_buffer":
            return {"kind": "ring_buffer", "capacity": self.max_depth}
        return {"kind": self.kind}


UNBOUNDED = Policy("unbounded", None, "block", "unbounded")
_ANSWERS: dict[str, Answer] = {"block_submitter": "block", "fail_submitter": "fail"}


def backpressure_queue(max_depth: int, on_full: OnFull = "block_submitter", *, shared: bool = False) -> Policy:
    """At most `max_depth` tasks queue; `on_full` says what happens to the next.

    "block_submitter" makes it wait, "fail_submitter" raises QueueFull, "drop_oldest" and "drop_newest" reject a task,
    "drop_fair" rejects the oldest task of the tenant that has the most queued. "refuse_fair" takes the newest of that
    tenant: if that is the task being submitted, it raises QueueFull. With `shared` the queued tasks of all processes
    count that share the budget of the pool, as this process last heard of them.
    """
    if on_full not in ON_FULL:
        raise InvalidArgument(f"on_full must be one of {', '.join(ON_FULL)}, got {on_full!r}")
    if shared and on_full in ("drop_oldest", "drop_fair", "refuse_fair"):
        raise InvalidArgument(
            f"on_full={on_full!r} cannot go with shared=True: a task that another process queued cannot be dropped",
            remedy='Use "block_submitter", "fail_submitter" or "drop_newest", or count this process alone.',
        )
    answer = cast("Answer", _ANSWERS.get(on_full, on_full))
    depth = _depth("max_depth", max_depth)
    return Policy("queue", depth, answer, on_full, f"{on_full}_queue_full", shared is True)


def fail_fast() -> Policy:
    """No queue: a task that cannot start at once is refused with PoolBusy."""
    return Policy("fail_fast", 0, "busy", "fail_fast")


def ring_buffer(capacity: int) -> Policy:
    """Keep the newest `capacity` queued tasks; the oldest is rejected to make room."""
    return Policy("ring_buffer", _depth("capacity", capacity), "drop_oldest", "ring_buffer", "ring_buffer_drop_oldest")


class Backpressure:
    """The policies under one name, called or not: ``Backpressure().queue(100)``, ``Backpressure.fail_fast()``."""

    queue: Callable[..., Policy] = staticmethod(backpressure_queue)
    fail_fast: Callable[[], Policy] = staticmethod(fail_fast)
    ring_buffer: Callable[[int], Policy] = staticmethod(ring_buffer)


def policy_of(backpressure: object) -> Policy:
    """Make a policy of what was given: a policy, its name, its descriptor, a factory without arguments, or None."""
    if isinstance(backpressure, Policy):
        return backpressure
    if backpressure is fail_fast:
        backpressure = "fail_fast"
    given = {"kind": backpressure} if backpressure is None or isinstance(backpressure, str) else backpressure
    if isinstance(given, Mapping):
        options = {name: value for name, value in given.items() if value is not None and name != "_type"}
        respell("backpressure", options, "kind", "strategy")
        kind = str(options.pop("kind", "unbounded"))
        if kind == "ring_buffer":
            respell("backpressure", options, "capacity", "max_depth")
        else:
            respell("backpressure", options, "max_depth", "capacity")
        factory = {"queue": backpressure_queue, "ring_buffer": ring_buffer, "fail_fast": fail_fast}.get(kind)
        if kind == "unbounded" and not options:
            return UNBOUNDED
        if factory is not None:
            try:
                made: Policy = factory(**options)  # type: ignore[operator]
            except TypeError:
                needs = {"queue": "max_depth and perhaps on_full", "ring_buffer": "capacity"}.get(kind, "nothing")
                raise InvalidArgument(
                    f"backpressure {kind!r} takes {needs}, got {', '.join(options) or 'nothing'}",
                    remedy="Pass a policy such as `backpressure_queue(100)` or `ring_buffer(100)`.",
                ) from None
            return made
    shown = repr(backpressure) if isinstance(backpressure, (str, Mapping)) else type(backpressure).__name__
    raise InvalidArgument(
        f"backpressure must be one of queue, ring_buffer, fail_fast, unbounded, got {shown}",
        remedy="Pass a policy such as `backpressure_queue(100)`, or None for no bound.",
    )


def _depth(what: str, depth: object) -> int:
    if not isinstance(depth, int) or isinstance(depth, bool) or depth < 1:
        raise InvalidArgument(f"{what} must be >= 1, got {depth!r}", remedy="Pass a whole number of at least 1.")
    return depth


# -- who is dropped ----------------------------------------------------------------------------------------------------


class Victims(Protocol):
    """Knows whom to drop. Is told of every task that queues and of every one that leaves the queue."""

    def joined(self, task: TaskRecord) -> None: ...
    def left(self, task: TaskRecord) -> None: ...
    def choose(self, newcomer: TaskRecord | None = None) -> TaskRecord:
        """Choose the task to drop: any but the newcomer."""
        ...


class Oldest:
    """Drops the task that was submitted first. A task that comes back to the queue is as old as it was."""

    __slots__ = ("_heap", "_tasks")

    sign: ClassVar[int] = 1

    def __init__(self) -> None:
        self._tasks: dict[int, TaskRecord] = {}  # by `rank`
        self._heap: list[int] = []  # ranks; one that has left is dropped when it surfaces

    def rank(self, task: TaskRecord) -> int:
        """The task with the lowest rank is dropped."""
        return self.sign * task.number

    def joined(self, task: TaskRecord) -> None:
        """Remember a task that is queued now."""
        rank = self.rank(task)
        self._tasks[rank] = task
        heapq.heappush(self._heap, rank)
        if len(self._heap) > 2 * len(self._tasks) + 64:
            self._heap = sorted(self._tasks)

    def left(self, task: TaskRecord) -> None:
        """Forget a task that is not queued any more."""
        self._tasks.pop(self.rank(task), None)
        if not self._tasks:
            self._heap.clear()

    def choose(self, newcomer: TaskRecord | None = None) -> TaskRecord:
        """Choose the queued task with the lowest rank."""
        heap, tasks = self._heap, self._tasks
        while heap[0] not in tasks:
            heapq.heappop(heap)
        if tasks[heap[0]] is newcomer and len(tasks) > 1:
            return tasks[min(rank for rank, task in tasks.items() if task is not newcomer)]
        return tasks[heap[0]]

    def __contains__(self, task: TaskRecord) -> bool:
        return self.rank(task) in self._tasks

    def __len__(self) -> int:
        return len(self._tasks)


class Newest(Oldest):
    """Drops the task that was submitted last."""

    __slots__ = ()

    sign: ClassVar[int] = -1


class OfLargestBacklog:
    """Drops a task of the tenant that has most queued, so that who submits too much delays only itself.

    It is the oldest of that tenant, or the newest. Keys stand in levels by how much they have queued. A change moves a
    key to the next level, so the largest is known without a search. Among keys with equally much, the one whose oldest
    task is the oldest (or whose newest is the newest).
    """

    __slots__ = ("_keys", "_kind", "_largest", "_levels")

    def __init__(self, kind: type[Oldest] = Oldest) -> None:
        self._kind = kind
        self._keys: dict[Hashable, Oldest] = {}
        self._levels: dict[int, _Level] = {}
        self._largest = 0

    def joined(self, task: TaskRecord) -> None:
        """Count one more queued task of its tenant."""
        key = task.partition
        tasks = self._keys.get(key)
        if tasks is None:
            tasks = self._keys[key] = self._kind()
        held = len(tasks)
        tasks.joined(task)
        self._move(key, tasks, held, held + 1)
        self._largest = max(self._largest, held + 1)

    def left(self, task: TaskRecord) -> None:
        """Count one queued task of its tenant less."""
        key = task.partition
        tasks = self._keys.get(key)
        if tasks is None or task not in tasks:
            return
        held = len(tasks)
        tasks.left(task)
        self._move(key, tasks, held, held - 1)
        if held == 1:
            del self._keys[key]
        if self._largest == held and held not in self._levels:
            self._largest = held - 1

    def choose(self, newcomer: TaskRecord | None = None) -> TaskRecord:
        """Choose the first task of the largest backlog. Where that is the newcomer (each has one), of the next."""
        level = self._levels[self._largest]
        key = level.first()
        task = self._keys[key].choose(newcomer)
        if task is newcomer and len(level.keys) > 1:
            others = (self._keys[other].choose() for other in level.keys if other != key)
            task = min(others, key=self._keys[key].rank)
        return task

    def would_be(self, newcomer: TaskRecord) -> bool:
        """Would its tenant have the largest backlog, or one of them, if this task were queued?"""
        tasks = self._keys.get(newcomer.partition)
        return (0 if tasks is None else len(tasks)) + 1 >= self._largest

    def _move(self, key: Hashable, tasks: Oldest, old: int, new: int) -> None:
        if old:
            level = self._levels[old]
            del level.keys[key]
            if not level.keys:
                del self._levels[old]
        if new:
            self._levels.setdefault(new, _Level()).add(key, tasks.rank(tasks.choose()))


class _Level:
    """Tenants that have equally many tasks queued, by the rank of the task that each would lose."""

    __slots__ = ("_heap", "_serial", "keys")

    def __init__(self) -> None:
        self.keys: dict[Hashable, int] = {}
        self._heap: list[tuple[int, int, Hashable]] = []  # one that has left the level is dropped when it surfaces
        self._serial = count()

    def add(self, key: Hashable, rank: int) -> None:
        self.keys[key] = rank
        heapq.heappush(self._heap, (rank, next(self._serial), key))
        if len(self._heap) > 2 * len(self.keys) + 64:
            self._heap = [(rank, next(self._serial), known) for known, rank in self.keys.items()]
            heapq.heapify(self._heap)

    def first(self) -> Hashable:
        while self.keys.get(self._heap[0][2]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][2]


def victims_of(policy: Policy) -> Victims | None:
    """Make what chooses the tasks to drop for this policy; None if it drops no queued task."""
    if policy.answer == "drop_oldest":
        return Oldest()
    if policy.answer == "drop_fair":
        return OfLargestBacklog()
    return OfLargestBacklog(Newest) if policy.answer == "refuse_fair" else None
