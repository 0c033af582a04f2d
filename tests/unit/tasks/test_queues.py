"""Every queue beside a naive list of the same order, under random commands."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from headgate.tasks.model import TaskRecord
from headgate.tasks.scheduling.queues.by_key import KeyedQueue
from headgate.tasks.scheduling.queues.fair import FairQueue, ShareQueue
from headgate.tasks.scheduling.queues.simple import FifoQueue, LifoQueue, PriorityQueue
from tests.unit.tasks.model import (
    SCALE,
    FairModel,
    FifoModel,
    KeyedModel,
    LifoModel,
    PriorityModel,
    ShareModel,
    record,
)

KEYS = ("a", "b", "c", None)
WEIGHTS = {"a": 1.0, "b": 0.3, "c": 7.0, None: 2.5}
COSTS = (None, 0.1, 1.0, 3.7, 20.0)

KINDS: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "fifo": (FifoQueue, FifoModel),
    "lifo": (LifoQueue, LifoModel),
    "priority": (PriorityQueue, PriorityModel),
    "fair": (FairQueue, FairModel),
    "share": (lambda: ShareQueue(WEIGHTS.__getitem__), lambda: ShareModel(WEIGHTS.__getitem__)),
    "keyed fifo": (lambda: KeyedQueue("fifo"), lambda: KeyedModel("fifo")),
    "keyed lifo": (lambda: KeyedQueue("lifo"), lambda: KeyedModel("lifo")),
    "keyed priority": (lambda: KeyedQueue("priority"), lambda: KeyedModel("priority")),
}
ORDERED = ("fifo", "lifo")  # whose iteration is in the order of service
PLAIN_KINDS = ("fifo", "lifo", "priority")
ROOM = 64


class Twin:
    """A queue and its model."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        make, model = KINDS[kind]
        self.queue, self.model = make(), model()
        self.out: list[TaskRecord] = []  # were in it before
        self.number = 0
        self.most = 0

    def new(self, key: Any, priority: int, cost: float | None) -> TaskRecord:
        self.number += 1
        return record(self.number, key, priority, cost)

    # -- commands ------------------------------------------------------------------------------------------------------

    def push(self, key: Any, priority: int, cost: float | None, nth: int) -> None:
        self._join("push", self.new(key, priority, cost))

    def push_back(self, key: Any, priority: int, cost: float | None, nth: int) -> None:
        """One that was made earlier comes late: its delay was over."""
        if self.out:
            self._join("push", self.out.pop(nth % len(self.out)))

    def push_front(self, key: Any, priority: int, cost: float | None, nth: int) -> None:
        task = self.out.pop(nth % len(self.out)) if self.out and nth % 3 else self.new(key, priority, cost)
        self._join("push_front", task)

    def _join(self, how: str, task: TaskRecord) -> None:
        getattr(self.queue, how)(task)
        getattr(self.model, how)(task)

    def pop(self, *_: Any) -> None:
        task = self.queue.pop()
        assert task is self.model.pop()
        if task is not None:
            self._left(task)

    def refuse(self, *_: Any) -> None:
        """Pop one, and put it back: all is as it was. (That virtual time has come to its tag, nobody can tell.)"""
        before = copy.deepcopy(self.model, {id(task): task for task in self.model})
        task = self.queue.pop()
        assert task is self.model.pop()
        if task is not None:
            self.queue.put_back(task)
            virtual = getattr(self.model, "virtual", None)
            self.model = before
            if virtual is not None:
                self.model.virtual = virtual

    def take(self, key: Any, priority: int, cost: float | None, nth: int) -> None:
        self._out("take", nth)

    def remove(self, key: Any, priority: int, cost: float | None, nth: int) -> None:
        self._out("remove", nth)

    def _out(self, how: str, nth: int) -> None:
        inside = list(self.model)
        if inside:
            task = inside[nth % len(inside)]
            getattr(self.queue, how)(task)
            getattr(self.model, how)(task)
            self._left(task)

    def _left(self, task: TaskRecord) -> None:
        assert task.before is None
        assert task.after is None
        self.out.append(task)

    def charge(self, key: Any, priority: int, cost: float | None, nth: int) -> None:
        task = self.new(key, priority, cost)
        self.queue.charge(task)
        self.model.charge(task)

    def park(self, key: Any, *_: Any) -> None:
        if self.kind not in PLAIN_KINDS:
            self.queue.park(key)
            self.model.park(key)

    def unpark(self, key: Any, *_: Any) -> None:
        if self.kind not in PLAIN_KINDS:
            self.queue.unpark(key)
            self.model.unpark(key)

    def idle(self, *_: Any) -> None:
        if not list(self.model):
            self.queue.idle()
            self.model.idle()

    # -- the same? -----------------------------------------------------------------------------------------------------

    def check(self) -> None:
        inside, expected = list(self.queue), list(self.model)
        assert len(self.queue) == len(expected)
        if self.kind in ORDERED:
            assert inside == expected
        assert len(inside) == len(expected)
        assert set(inside) == set(expected)
        keys = {task.priority if self.kind == "priority" else task.partition for task in inside}
        self.most = max(self.most, len(keys))
        self._check_inside(keys)

    def _check_inside(self, keys: set[Any]) -> None:
        """Nothing is kept for those who left."""
        queue = self.queue
        if self.kind in ("fifo", "lifo"):
            assert (queue._chain.head is None) is (queue._chain.tail is None) is (not keys)
        elif self.kind == "priority":
            assert set(queue._chains) == keys
            assert len(queue._heap) <= 2 * self.most + ROOM
        elif self.kind == "fair":
            assert set(queue._partitions) == keys
            assert self._ring() == self.model.ring
        elif self.kind == "share":
            assert set(queue._accounts) == keys
            assert len(queue._heap) <= 4 * self.most + ROOM
            assert not keys & set(queue._past)
        else:
            assert set(queue._partitions) == keys
            assert len(queue._heap) <= 4 * self.most + ROOM

    def _ring(self) -> list[Any]:
        """The keys in the ring, from whose turn it is; both ways round."""
        first = self.queue._turn
        if first is None:
            return []
        forward, backward, step, back = [first.key], [first.key], first.following, first.preceding
        while step is not first:
            forward.append(step.key)
            backward.append(back.key)
            step, back = step.following, back.preceding
        assert back is first
        assert backward == [forward[0], *reversed(forward[1:])]
        return forward

    def drain(self) -> None:
        """Unpark all and take out what is left: both in the same order, and nothing stays behind."""
        for key in KEYS:
            self.unpark(key)
        while list(self.model):
            self.pop()
            self.check()
        assert self.queue.pop() is None
        for name in ("_heap", "_chains", "_partitions", "_accounts"):
            assert not getattr(self.queue, name, None), name
        self.idle()
        assert not getattr(self.queue, "_past", None)


COMMANDS = (
    *("push",) * 6,
    *("pop",) * 5,
    "push_back",
    "push_front",
    "push_front",
    "refuse",
    "take",
    "remove",
    "charge",
    "park",
    "unpark",
    "unpark",
    "idle",
)

STEPS = st.lists(
    st.tuples(
        st.sampled_from(COMMANDS),
        st.sampled_from(KEYS),
        st.integers(-2, 2),
        st.sampled_from(COSTS),
        st.integers(0, 11),
    ),
    max_size=60,
)


@pytest.mark.parametrize("kind", KINDS)
def test_t20_a_queue_is_the_list_it_stands_for(kind: str) -> None:
    @settings(
        max_examples=int(520 * SCALE**1.4),
        phases=[Phase.explicit, Phase.generate, Phase.shrink],
    )
    @given(STEPS)
    def check(steps: list[tuple[Any, ...]]) -> None:
        twin = Twin(kind)
        for command, *choices in steps:
            getattr(twin, command)(*choices)
            twin.check()
        twin.drain()

    check()


@pytest.mark.parametrize("kind", KINDS)
def test_t20_and_so_it_is_after_a_long_walk(kind: str, scale: float) -> None:
    for seed in range(int(155 * scale**1.7)):
        chance = random.Random(seed)
        liked = chance.sample(COMMANDS, k=chance.randrange(8, len(COMMANDS)))
        twin = Twin(kind)
        for _ in range(400):
            command = chance.choice(liked)
            getattr(twin, command)(
                chance.choice(KEYS), chance.randint(-2, 2), chance.choice(COSTS), chance.randrange(50)
            )
            twin.check()
        twin.drain()


@pytest.mark.parametrize("kind", PLAIN_KINDS)
def test_t24_a_plain_queue_refuses_to_park(kind: str) -> None:
    queue = KINDS[kind][0]()
    for refused in (queue.park, queue.unpark):
        with pytest.raises(NotImplementedError, match="no partitions"):
            refused("a")


def test_t12_priorities_that_come_and_go_leave_no_heap_behind() -> None:
    queue = PriorityQueue()
    for number in range(10_000):
        task = record(number, priority=number)
        queue.push(task)
        queue.remove(task)
        assert len(queue._heap) <= 66


@pytest.mark.parametrize("kind", ["share", "keyed fifo", "keyed lifo", "keyed priority"])
def test_t24_keys_that_come_and_go_leave_no_heap_behind(kind: str) -> None:
    queue = KINDS[kind][0]() if kind != "share" else ShareQueue(lambda key: 1.0)
    stays = record(0, "stays")
    queue.push(stays)
    for number in range(1, 5_000):
        task = record(number, number)
        queue.push(task)
        queue.park(number)
        queue.unpark(number)
        queue.remove(task)
        assert len(queue._heap) <= 4 * 2 + ROOM
    if kind == "share":  # no time has passed, so no tag of theirs says anything
        assert len(queue._past) <= 2 * ROOM
    assert list(queue) == [stays]
