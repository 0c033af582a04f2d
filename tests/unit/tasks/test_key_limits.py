"""Caps per key: kept, work conserving, and never paid for by looking at what is parked."""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Hashable
from typing import Any

import pytest

from headgate import fair_round_robin, fair_share, fifo, lifo, priority
from headgate.errors import InvalidArgument
from headgate.gate import lanes
from headgate.gate.queue import Queue
from headgate.gate.tenants import Caps, Tenants
from headgate.tasks.admission import UNBOUNDED
from headgate.tasks.model import TaskRecord
from headgate.tasks.scheduling.scheduler import Scheduler
from headgate.tasks.scheduling.slots import checked_limits
from tests.unit.tasks.model import record

STRATEGIES = {one.kind: one for one in (fifo(), lifo(), priority(), fair_round_robin(), fair_share())}


def parkable(kind: str) -> Queue:
    queue = Queue(STRATEGIES[kind].order)
    queue.set_apart(tenants=True)
    return queue


class CountingHeap:
    """`heapq`, and how many entries it was asked to touch."""

    def __init__(self) -> None:
        self.pushed = self.popped = self.rebuilt = 0

    def heappush(self, heap: list[Any], entry: Any) -> None:
        self.pushed += 1
        heapq.heappush(heap, entry)

    def heappop(self, heap: list[Any]) -> Any:
        self.popped += 1
        return heapq.heappop(heap)

    def heapreplace(self, heap: list[Any], entry: Any) -> Any:
        self.pushed += 1
        return heapq.heapreplace(heap, entry)

    def heapify(self, heap: list[Any]) -> None:
        self.rebuilt += len(heap)
        heapq.heapify(heap)


@pytest.fixture
def heaps(monkeypatch: pytest.MonkeyPatch) -> CountingHeap:
    counting = CountingHeap()
    monkeypatch.setattr(lanes, "heapq", counting)
    return counting


@pytest.mark.parametrize("kind", STRATEGIES)
@pytest.mark.parametrize("caps", [1, 3, {"a": 1}, {"a": 2, "b": 1, None: 1}])
def test_t24_the_cap_is_kept_and_no_slot_is_wasted(kind: str, caps: Any, heaps: CountingHeap, scale: float) -> None:
    for seed in range(int(2 + 50 * scale**1.5)):
        chance = random.Random(seed)
        queue = Queue(STRATEGIES[kind].order)
        limits = Tenants(queue)
        limits.set_caps(Caps(caps))
        running: list[TaskRecord] = []
        waiting: list[TaskRecord] = []
        steps = 300
        began = heaps.pushed
        for number in range(steps):
            what = chance.random()
            if what < 0.4:
                waiting.append(record(number, chance.choice(("a", "b", "c", "d", None)), chance.randint(0, 2)))
                queue.push(waiting[-1])
            elif what < 0.75:
                active = Counter(task.partition for task in running)
                free = [task for task in waiting if not _full(caps, task.partition, active)]
                task = queue.pop()
                assert (task is None) is (not free)
                if task is not None:
                    assert task in free
                    waiting.remove(task)
                    running.append(task)
                    limits.took(task.partition)
            elif running:
                task = running.pop(chance.randrange(len(running)))
                limits.gave(task.partition)
                if chance.random() < 0.2:
                    waiting.append(task)
                    queue.push_front(task)
            active = Counter(task.partition for task in running)
            assert all(limits.is_closed(key) is _full(caps, key, active) for key in ("a", "b", "c", "d", None))
        assert limits.caps is not None
        assert limits.caps.active == active
        assert heaps.pushed - began <= 2 * steps
        assert heaps.popped <= heaps.pushed
        assert heaps.rebuilt <= heaps.pushed


def _full(caps: Any, key: Hashable, active: Counter[Hashable]) -> bool:
    cap = None if key is None else caps.get(key) if isinstance(caps, dict) else caps
    return cap is not None and active[key] >= cap


@pytest.mark.parametrize("kind", STRATEGIES)
def test_t24_what_is_parked_costs_nothing(kind: str, heaps: CountingHeap) -> None:
    """A thousand keys are at their cap; one that is not is served a thousand times."""
    queue = parkable(kind)
    for number in range(1_000):
        queue.push(record(number, f"parked-{number}", priority=9))
        queue.park(f"parked-{number}")
    for number in range(1_000, 2_000):
        queue.push(record(number, "free"))
    before = heaps.pushed + heaps.popped + heaps.rebuilt
    for _ in range(1_000):
        task = queue.pop()
        assert task is not None
        assert task.partition == "free"
    assert heaps.pushed + heaps.popped + heaps.rebuilt - before <= 5_000
    assert queue.pop() is None
    once = heaps.popped
    assert queue.pop() is None
    assert heaps.popped == once, "an entry that is out of date is met once"


@pytest.mark.parametrize("kind", STRATEGIES)
def test_t24_keys_that_park_again_and_again_cost_a_constant(kind: str, heaps: CountingHeap) -> None:
    queue = parkable(kind)
    for number in range(500):
        queue.push(record(number, number % 100))
    turns = 20_000
    chance = random.Random(3)
    for _ in range(turns):
        key = chance.randrange(100)
        queue.park(key)
        queue.unpark(key)
    assert heaps.pushed + heaps.popped + heaps.rebuilt <= 4 * (turns + 500)
    served = [task.partition for task in iter(queue.pop, None)]
    assert Counter(served) == dict.fromkeys(range(100), 5)


def counted(scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often the scheduler asks whether a task's key is full."""
    asked: Counter[str] = Counter()
    full = Caps.is_closed

    def counting(self: Caps, key: Hashable) -> bool:
        asked["full"] += 1
        return full(self, key)

    monkeypatch.setattr(Caps, "is_closed", counting)
    return asked


def test_t24_descendants_at_their_cap_are_not_looked_at_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A parent lends its slot while a thousand children of its own, of a key at its cap, are queued."""
    scheduler = Scheduler(fifo(), UNBOUNDED, 3, {"k": 1})
    parent, awaited, other = record(0), record(1), record(2, "k")
    for task in (parent, awaited, other):
        assert scheduler.enter(task)
        task.status = "running"
    children = [record(number, "k", parent=parent) for number in range(3, 1_003)]
    strangers = [record(number) for number in range(2_000, 2_500)]
    for task in (*children, *strangers):
        scheduler.enqueue(task)
    scheduler.begin_wait(parent, awaited)
    asked = counted(scheduler, monkeypatch)
    for stranger in strangers:
        assert scheduler.next() is stranger
        scheduler.release(stranger)
    assert asked["full"] <= 20 * len(strangers)
    scheduler.release(other)
    assert scheduler.next() is children[0]


@pytest.mark.parametrize("kind", STRATEGIES)
@pytest.mark.parametrize("seed", range(5))
def test_t24_changing_the_caps_keeps_the_order_of_each_key(kind: str, seed: int) -> None:
    """Live: none, some, all, none again. Nothing is lost, and inside a key nobody passes anybody."""
    orders: list[list[int]] = []
    for changes in ([], [None], [99], [1, None], [2, {"a": 1}, None], [1, 1, 99]):
        scheduler = Scheduler(STRATEGIES[kind], UNBOUNDED, 100)
        chance = random.Random(seed)
        for number in range(40):
            scheduler.enqueue(record(number, chance.choice("abc"), chance.randint(0, 2)))
        for change in changes:
            scheduler.limit_keys(change)
        orders.append([task.number for task in iter(scheduler.next, None)])
    assert all(sorted(order) == list(range(40)) for order in orders)
    if kind in ("fifo", "lifo", "priority"):
        assert all(order == orders[0] for order in orders)
    for order in orders:
        for key in "abc":
            chance = random.Random(seed)
            keys = [(chance.choice("abc"), chance.randint(0, 2))[0] for _ in range(40)]
            mine = [number for number in order if keys[number] == key]
            assert mine == [number for number in orders[0] if keys[number] == key]


@pytest.mark.parametrize("kind", STRATEGIES)
@pytest.mark.parametrize("before", [None, 5])
def test_t24_changing_the_caps_keeps_a_retry_at_the_head(kind: str, before: int | None) -> None:
    """It was put back first of its partition, and stays first."""
    scheduler = Scheduler(STRATEGIES[kind], UNBOUNDED, 1, before)
    for number in range(1, 4):
        scheduler.enqueue(record(number, "a"))
    retried = record(9, "a")  # started before the others: a descendant whose parent lent a slot
    assert scheduler.enter(retried)
    retried.attempt = 1
    scheduler.release(retried)
    scheduler.requeue(retried)
    scheduler.limit_keys(1)
    assert scheduler.next() is retried


@pytest.mark.parametrize("kind", ["fifo", "lifo", "priority"])
def test_t24_a_cap_nobody_reaches_changes_no_order(kind: str) -> None:
    """A retry goes to the head. Whoever never failed has his turn where he would have it without caps."""
    for seed in range(50):
        orders = []
        for limits in (None, 1_000):
            chance = random.Random(seed)
            scheduler = Scheduler(STRATEGIES[kind], UNBOUNDED, 3, limits)
            running: list[TaskRecord] = []
            for number in range(chance.randint(3, 12)):
                scheduler.enqueue(record(number, chance.choice("abc"), chance.randint(0, 2)))
                if chance.random() < 0.4 and (task := scheduler.next()) is not None:
                    running.append(task)
            for task in running:
                scheduler.release(task)
                task.attempt += 1
                scheduler.requeue(task)
            order = []
            while (task := scheduler.next()) is not None:
                scheduler.release(task)
                order.append(task)
            orders.append([task.number for task in order if not task.attempt])
        assert orders[0] == orders[1], f"seed {seed}"


def test_t24_live_caps_count_what_runs() -> None:
    scheduler = Scheduler(fifo(), UNBOUNDED, 10)
    running = []
    for number in range(6):
        scheduler.enqueue(record(number, "a"))
    for _ in range(3):
        running.append(scheduler.next())
    scheduler.limit_keys(2)
    assert scheduler.next() is None
    for task in running[:2]:
        assert task is not None
        scheduler.release(task)
        more = scheduler.next()
        assert (more is None) is (task is running[0]), "one goes, two are left; another goes, one may come"
    scheduler.limit_keys(None)
    assert scheduler.next() is not None


def test_t24_when_the_caps_are_lifted_tenants_come_back_in_the_order_in_which_they_were_set_aside() -> None:
    """And not in that of their hashes, which for text is another one in each process."""
    scheduler = Scheduler(fair_round_robin(), UNBOUNDED, 10)
    scheduler.limit_keys(1)
    for number, tenant in enumerate([3, 2, 1] * 2):
        scheduler.enqueue(record(number, tenant))
    assert [scheduler.next().partition for _ in range(3)] == [3, 2, 1]  # type: ignore[union-attr]
    scheduler.limit_keys(None)
    assert [scheduler.next().partition for _ in range(3)] == [3, 2, 1]  # type: ignore[union-attr]


def test_t24_caps_are_checked() -> None:
    assert checked_limits(None) is None
    assert checked_limits(3) == 3
    assert checked_limits({"a": 1}) == {"a": 1}
    for wrong in (0, -1, True, 1.5, "2", {"a": 0}, {"a": None}):
        with pytest.raises(InvalidArgument, match="max_concurrent_per_key"):
            checked_limits(wrong)
