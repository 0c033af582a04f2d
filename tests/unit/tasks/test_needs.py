"""Tasks that need different things, some of which cannot be had: what the queue costs then, and how they are scheduled.

`tests/unit/gate/test_queue.py` has the queue beside its model.
"""

from __future__ import annotations

import gc
import heapq
import random
import sys
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any

import pytest

from headgate import backpressure_queue, fair_round_robin, fair_share, fifo, lifo, priority
from headgate.errors import InvalidArgument
from headgate.gate import lanes
from headgate.gate.lanes import Heap, Lane
from headgate.gate.queue import MOST_NEEDS, Queue
from headgate.tasks import Strategy
from headgate.tasks.admission import UNBOUNDED
from headgate.tasks.model import TaskRecord
from headgate.tasks.scheduling.scheduler import Scheduler
from tests.conftest import SCALE, seeds
from tests.unit.tasks.model import BacklogModel, OldestModel, cost_of, record, refused

KEYS: tuple[Hashable, ...] = ("a", "b", "c", "d", None)
NEEDS: tuple[Hashable, ...] = (None, "gpu", ("eu", "large"))
WEIGHTS: dict[Hashable, float] = {"a": 1.0, "b": 0.3, "c": 7.0, "d": 1.0, None: 2.5}
COSTS = (None, 0.1, 1.0, 3.7, 20.0)
STRATEGIES: dict[str, Strategy] = {
    one.kind: one for one in (fifo(), lifo(), priority(), fair_round_robin(), fair_share(weights=WEIGHTS))
}
FAIR = ("fair_round_robin", "fair_share")
CASES = [(kind, by_key) for kind in STRATEGIES for by_key in ((True,) if kind in FAIR else (False, True))]
ROOM = 64
CROWD = int(100_000 * max(SCALE, 0.1) ** 1.6)


def classed(kind: str, unserved: set[Hashable] | None = None, *, by_key: bool = True) -> Queue:
    queue = Queue(STRATEGIES[kind].order, set() if unserved is None else unserved)
    queue.set_apart(tenants=by_key)
    return queue


def plain(kind: str, unserved: set[Hashable] | None = None) -> Queue:
    """All tenants alike."""
    order = fair_share().order if kind == "fair_share" else STRATEGIES[kind].order
    return Queue(order, set() if unserved is None else unserved)


def heaps_of(queue: Queue) -> list[list[Any]]:
    return [group._entries for group in queue._groups.values() if isinstance(group, Heap)]


def past_of(queue: Queue) -> dict[Hashable, float]:
    """The tags that are kept of tenants that have nothing queued."""
    return queue._levels[0].past if 0 in queue._levels else {}


def drained(queue: Any) -> list[TaskRecord]:
    return list(iter(queue.pop, None))


def numbers(tasks: Iterable[TaskRecord]) -> list[int]:
    return [task.number for task in tasks]


# -- what is unserved keeps its place ----------------------------------------------------------------------------------


def crowd(seed: int, count: int = 60, needs: tuple[Hashable, ...] = NEEDS) -> list[TaskRecord]:
    """The same tasks each time it is called."""
    chance = random.Random(seed)
    return [
        record(
            number,
            chance.choice(KEYS),
            chance.randint(-1, 1),
            chance.choice((None, 0.5, 3.0)),
            need=chance.choice(needs),
        )
        for number in range(count)
    ]


def filled(kind: str, by_key: bool, seed: int, unserved: set[Hashable] | None = None) -> Queue:
    queue = classed(kind, unserved, by_key=by_key)
    for task in crowd(seed):
        queue.push(task)
    return queue


@pytest.mark.parametrize(("kind", "by_key"), CASES)
def test_t81_shutting_and_opening_moves_nobody(kind: str, by_key: bool) -> None:
    for seed in range(10):
        chance = random.Random(seed)
        untouched = numbers(drained(filled(kind, by_key, seed)))
        unserved: set[Hashable] = set()
        queue, order = filled(kind, by_key, seed, unserved), []
        while len(queue):
            unserved |= set(chance.sample(NEEDS, k=chance.randint(1, 3)))
            task = queue.first()
            assert task is None or task.terms.need not in unserved
            unserved.clear()
            task = queue.pop()
            assert task is not None
            order.append(task.number)
        assert order == untouched


@pytest.mark.parametrize(("kind", "by_key"), CASES)
@pytest.mark.parametrize("need", NEEDS)
def test_t81_what_is_shut_is_as_if_it_were_not_there(kind: str, by_key: bool, need: Hashable) -> None:
    """The others go on in the order that they have without it; then it comes in the order that it has alone."""
    for seed in range(10):
        unserved = {need}
        queue, others, alone = filled(kind, by_key, seed, unserved), classed(kind), classed(kind)
        for task in crowd(seed):
            (alone if task.terms.need == need else others).push(task)
        passed, expected = drained(queue), drained(others)
        unserved.clear()
        opened, expected_then = drained(queue), drained(alone)
        if kind in FAIR:  # a key keeps the place that it got by a task that is unserved, and turns that it has had
            for key in KEYS:
                assert of(key, passed) == of(key, expected)
                assert of(key, opened) == of(key, expected_then)
        else:
            assert numbers(passed) == numbers(expected)
            assert numbers(opened) == numbers(expected_then)
        assert not len(queue)


def of(key: Hashable, tasks: list[TaskRecord]) -> list[int]:
    return [task.number for task in tasks if task.partition == key]


def test_t23_who_was_passed_over_pays_nothing_for_the_refusal_of_another() -> None:
    unserved: set[Hashable] = {"gpu"}
    queue = plain("fair_share", unserved)
    queue.charge(record(0, "had much", cost=20.0))
    for number in range(1, 11):
        queue.push(record(number, "had nothing", need="gpu"))
    queue.push(refused := record(11, "had much"))
    assert queue.first() is refused
    unserved.clear()
    assert [task.partition for task in drained(queue)] == ["had nothing"] * 10 + ["had much"]


@pytest.mark.parametrize("kind", FAIR)
def test_t22_a_key_has_one_turn_a_round_whatever_its_tasks_need(kind: str) -> None:
    for needs in (1, 2, 20):
        queue = plain(kind)
        for number in range(200):
            queue.push(record(number, "big", need=number % needs))
        for number in range(200, 300):
            queue.push(record(number, number, need=number % 3))
        first = [queue.pop() for _ in range(101)]
        assert Counter(task.partition for task in first if task is not None)["big"] == 1


@pytest.mark.parametrize("seed", seeds(5, at_a_tenth=2))
def test_t22_whoever_can_be_served_waits_one_round_at_most(seed: int, scale: float) -> None:
    """From when it came, was served or was opened, every other key has one turn at most before it has its own."""
    chance = random.Random(seed)
    unserved: set[Hashable] = set()
    queue, queued = classed("fair_round_robin", unserved), list[TaskRecord]()
    turns: dict[Hashable, Counter[Hashable]] = {}
    for number in range(int(500 + 10_000 * scale)):
        what = chance.random()
        if what < 0.5:
            few = chance.random() < 0.6
            queued.append(record(number, chance.choice("ab" if few else "abcdefgh"), need=chance.choice(NEEDS)))
            queue.push(queued[-1])
        elif what < 0.55:
            unserved.add(chance.choice(NEEDS))
        elif what < 0.62:
            unserved.discard(chance.choice(NEEDS))
        elif (task := queue.pop()) is not None:
            queued.remove(task)
            del turns[task.partition]
            for seen in turns.values():
                seen[task.partition] += 1
                assert seen[task.partition] == 1
        servable = {task.partition for task in queued if task.terms.need not in unserved}
        turns = {key: turns.get(key, Counter()) for key in servable}


@pytest.mark.parametrize("seed", seeds(5, at_a_tenth=2))
def test_t23_the_gap_is_bounded_between_all_who_can_be_served(seed: int, scale: float) -> None:
    """Whatever is unserved and opened meanwhile, and whoever comes: the theorem holds for any two and any interval."""
    largest = {key: 5.0 / weight for key, weight in WEIGHTS.items()}
    for walk in range(int(2 + 20 * scale)):
        chance = random.Random(f"{seed} {walk}")
        unserved: set[Hashable] = set()
        queue, queued = classed("fair_share", unserved), list[TaskRecord]()
        given: dict[Hashable, float] = dict.fromkeys(KEYS, 0.0)
        gaps: dict[tuple[Hashable, Hashable], tuple[float, float]] = {}
        pace = chance.choice((0.4, 0.5, 0.6))
        for number in range(600):
            what = chance.random()
            if what < pace:
                task = record(number, chance.choice(KEYS), cost=chance.uniform(0.1, 5.0), need=chance.choice(NEEDS))
                queued.append(task)
                queue.push(task)
            elif what < pace + 0.02:
                unserved.add(chance.choice(NEEDS))
            elif what < pace + 0.04:
                unserved.discard(chance.choice(NEEDS))
            elif (popped := queue.pop()) is not None:
                queued.remove(popped)
                given[popped.partition] += cost_of(popped) / WEIGHTS[popped.partition]
            servable = {task.partition for task in queued if task.terms.need not in unserved}
            now: dict[tuple[Hashable, Hashable], tuple[float, float]] = {}
            for one in servable:
                for other in servable - {one}:
                    gap = given[one] - given[other]
                    low, high = gaps.get((one, other), (gap, gap))
                    now[one, other] = low, high = min(low, gap), max(high, gap)
                    assert high - low <= largest[one] + largest[other] + 1e-9
            gaps = now


def test_t23_who_was_passed_over_claims_one_turn_and_newcomers_claim_nothing() -> None:
    unserved: set[Hashable] = {"gpu"}
    queue = plain("fair_share", unserved)
    for number in range(200):
        queue.push(record(number, "passed over", need="gpu"))
    for number in range(200, 600):
        queue.push(record(number, "busy"))
    for _ in range(100):
        queue.pop()
    unserved.clear()
    first = queue.pop()
    assert first is not None
    assert first.partition == "passed over"
    for number in range(600, 800):
        queue.push(record(number, "newcomer"))
    assert set(Counter(task.partition for _ in range(30) if (task := queue.pop())).values()) <= {9, 10, 11}


# -- what it costs -----------------------------------------------------------------------------------------------------


class CountingHeap:
    """`heapq`, and how many entries it was asked to touch."""

    def __init__(self) -> None:
        self.touched = 0

    def heapreplace(self, heap: list[Any], item: Any) -> Any:
        self.touched += 1
        return heapq.heapreplace(heap, item)

    def heappush(self, heap: list[Any], entry: Any) -> None:
        self.touched += 1
        heapq.heappush(heap, entry)

    def heappop(self, heap: list[Any]) -> Any:
        self.touched += 1
        return heapq.heappop(heap)

    def heapify(self, heap: list[Any]) -> None:
        self.touched += len(heap)
        heapq.heapify(heap)


@pytest.fixture
def heaps(monkeypatch: pytest.MonkeyPatch) -> CountingHeap:
    counting = CountingHeap()
    monkeypatch.setattr(lanes, "heapq", counting)
    return counting


def calls_of(work: Callable[[], object]) -> int:
    """How many functions it called, Python's own included."""
    calls = 0

    def count(frame: Any, event: str, arg: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
    return calls


@pytest.mark.parametrize("kind", STRATEGIES)
def test_t25_shutting_and_opening_costs_the_same_in_a_crowd(kind: str, heaps: CountingHeap, scale: float) -> None:
    """Again and again, with one serving and one joining in between; unserved classes are not looked at."""
    turns = 1_000 if scale >= 1 else 100

    def cost(keys: int) -> tuple[int, int]:
        unserved: set[Hashable] = set()
        queue = classed(kind, unserved)
        for number in range(keys):
            queue.push(record(number, number, number % 7, need=("x", "y", None)[number % 3]))
            if not number % 4:
                queue.push(record(keys + number, number, number % 7, need=("x", "y", None)[number % 2]))

        def work() -> None:
            for turn in range(turns):
                unserved.add("x")
                first = queue.pop()
                assert first is not None
                assert first.terms.need != "x"
                unserved.discard("x")
                second = queue.first()
                assert second is not None
                unserved.add(second.terms.need)
                queue.push(record(10 * keys + turn, turn % keys, turn % 7, need=("x", "y")[turn % 2]))
                third = queue.pop()
                assert third is not None
                assert third.terms.need != second.terms.need
                unserved.clear()
                queue.push_front(third)

        before = heaps.touched
        calls = calls_of(work)
        return heaps.touched - before, calls

    few, crowded = cost(CROWD // 5), cost(CROWD)
    assert crowded[0] <= 25 * turns, "a few for each of six operations a turn"
    assert crowded[0] <= 1.5 * few[0]
    assert crowded[1] <= 1.5 * few[1]


@pytest.mark.parametrize("kind", STRATEGIES)
def test_t25_a_class_that_is_shut_costs_its_name(kind: str, heaps: CountingHeap) -> None:
    """Many tasks of it stand before the one that can be served."""
    unserved: set[Hashable] = {"x"}
    queue = classed(kind, unserved)
    for number in range(CROWD):
        queue.push(record(number, number % 1_000, 9, need="x"))
    for number in range(100):
        queue.push(record(CROWD + number, "free", need="y"))
    before = heaps.touched
    assert {task.partition for task in drained(queue)} == {"free"}
    assert heaps.touched - before <= 500
    assert queue.pop() is None
    assert len(queue) == CROWD


@pytest.mark.parametrize("kind", STRATEGIES)
def test_t25_a_task_of_some_need_costs_the_same_in_a_crowd(kind: str, heaps: CountingHeap, scale: float) -> None:
    """Queue all, serve all."""

    def cost(tasks: int, keys: int) -> float:
        queue = classed(kind)
        records = [record(number, number % keys, number % 17, need=NEEDS[number // 3 % 3]) for number in range(tasks)]
        before = heaps.touched

        def work() -> None:
            for task in records:
                queue.push(task)
            assert len(drained(queue)) == tasks

        return max(calls_of(work) / tasks, 10 * (heaps.touched - before) / tasks)

    many = 10_000 if scale >= 1 else 1_500
    assert cost(many, many // 10) <= 1.5 * cost(500, 5)


@pytest.mark.parametrize("kind", STRATEGIES)
def test_t25_heaps_stay_as_long_as_there_are_keys(kind: str, heaps: CountingHeap, scale: float) -> None:
    """Keys are served, charged, parked and put back again and again, and most of their classes are never looked at."""
    unserved: set[Hashable] = set(range(1, 8))
    queue = classed(kind, unserved)
    for number in range(400):
        queue.push(record(number, number % 10, need=number % 8))
    chance = random.Random(1)
    operations = 20_000 if scale >= 1 else 2_500
    for number in range(400, 400 + operations):
        key = number % 10
        if number % 5 == 0:
            queue.park(key)
            queue.unpark(key)
        elif number % 5 == 1:
            queue.charge(record(number, key))
        elif number % 5 == 2:
            assert queue.first() is not None
        elif number % 5 == 3:
            queue.push_front(record(number, key, need=(need := chance.randrange(8))))
            queue.remove(next(task for task in queue if task.terms.need == need and task.partition == key))
        else:
            queue.push(record(number, key, need=0))
            queue.pop()
        assert all(len(heap) <= 4 * 10 + ROOM for heap in heaps_of(queue))
    assert heaps.touched <= 8 * 4 * operations, "each of eight classes, with what is rebuilt"


def test_t25_what_is_kept_of_keys_that_ran_empty_is_swept_now_and_then() -> None:
    """A sweep looks at all of them, so there must not be one for each that runs empty."""
    queue, keys, swept = plain("fair_share"), 4_000, 0
    for number in range(keys):
        queue.push(record(number, number, need=number % 2))
    for _ in range(keys):
        past = past_of(queue)
        assert queue.pop() is not None
        swept += 0 if past_of(queue) is past else len(past)
    assert swept <= 4 * keys


def test_t25_a_class_of_few_has_no_heap_of_many() -> None:
    """A key with tasks of 63 classes that are unserved, beside a thousand keys that have none of these."""
    queue = plain("fair_share", set(range(1, MOST_NEEDS)))
    for number in range(1_000):
        queue.push(record(number, number, need=0))
    for need in range(1, MOST_NEEDS):
        queue.push(record(1_000 + need, "many", need=need))
    for number in range(5_000):
        queue.charge(record(2_000 + number, "many"))
    assert sum(map(len, heaps_of(queue))) <= 5 * len(queue) + ROOM * MOST_NEEDS


def test_t23_tags_that_time_has_passed_are_let_go() -> None:
    """Keys whose tasks start at once, one after the other, beside one that always has something queued."""
    queue = plain("fair_share", set())
    queue.push(record(0, "busy"))
    for number in range(1, 20_000, 2):
        queue.push(record(number, "busy", need=number % 3))
        assert queue.pop() is not None
        queue.charge(record(number + 1, number))
    assert len(past_of(queue)) <= 2 * ROOM


@pytest.mark.parametrize(
    ("kind", "how"),
    [
        pytest.param(kind, how, marks=() if how == "pop" or kind in ("fifo", "fair_share") else pytest.mark.soak)
        for kind in STRATEGIES
        for how in ("pop", "take", "remove")
    ],
)
def test_t25_what_was_emptied_is_let_go(kind: str, how: str) -> None:
    def kept() -> int:
        gc.collect()
        return sum(isinstance(one, (Lane, TaskRecord)) for one in gc.get_objects())

    before = kept()
    queue = classed(kind)
    tasks = [record(number, number % 200, number % 5, need=number % 7) for number in range(2_000)]
    for task in tasks:
        queue.push(task)
    for task in tasks:
        if how == "pop":
            queue.pop()
        else:
            getattr(queue, how)(task)
    assert not len(queue)
    assert not queue._accounts
    queue.idle()
    assert not past_of(queue)
    del task, tasks
    assert kept() == before


@pytest.mark.parametrize("kind", STRATEGIES)
def test_t25_classes_that_come_and_go_leave_nothing(kind: str) -> None:
    queue = classed(kind)
    queue.push(stays := record(0, "stays", need="stays"))
    for number in range(1, 3_000):
        task = record(number, number, need=number)
        queue.push(task)
        assert len(queue._groups) == 2
        queue.remove(task)
    assert list(queue) == [stays]
    assert list(queue._groups) == ["stays"]
    assert all(len(heap) <= 4 + ROOM for heap in heaps_of(queue))
    assert len(past_of(queue)) <= 2 * ROOM


# -- the scheduler -----------------------------------------------------------------------------------------------------


def running(scheduler: Scheduler, *tasks: TaskRecord) -> None:
    for task in tasks:
        assert scheduler.enter(task)
        task.status = "running"


def all_next(scheduler: Scheduler) -> Iterator[TaskRecord]:
    """Serve all, one after the other."""
    while (task := scheduler.next()) is not None:
        yield task
        scheduler.release(task)


@pytest.mark.parametrize("kind", ["fifo", "lifo", "priority", "fair_round_robin"])
def test_t81_a_second_need_in_the_middle_moves_nobody(kind: str, scale: float) -> None:
    """Beside a scheduler that never hears of needs: the same commands, the same order, whenever the needs begin."""
    for seed in range(int(2 + 218 * scale**1.9)):
        chance = random.Random(f"{kind} {seed}")
        schedulers = Scheduler(STRATEGIES[kind], UNBOUNDED, 2), Scheduler(STRATEGIES[kind], UNBOUNDED, 2)
        runs: list[tuple[TaskRecord, TaskRecord]] = []
        queued: dict[int, tuple[TaskRecord, TaskRecord]] = {}
        begins = chance.randrange(100)
        for number in range(150):
            what = chance.choice(("new", "new", "new", "next", "next", "end", "retry", "discard", "refuse", "caps"))
            if what == "new":
                key, rank = chance.choice("abc"), chance.randint(0, 2)
                need = chance.choice(NEEDS) if number > begins else None
                queued[number] = record(number, key, rank, need=need), record(number, key, rank)
                for scheduler, task in zip(schedulers, queued[number], strict=True):
                    scheduler.enqueue(task)
            elif what in ("next", "refuse"):
                mine, plain = ((refused if what == "refuse" else Scheduler.next)(one) for one in schedulers)
                assert (mine is None) is (plain is None)
                if mine is not None and plain is not None:
                    assert mine.number == plain.number
                    if what == "next":
                        runs.append(queued.pop(mine.number))
            elif what in ("end", "retry") and runs:
                tasks = runs.pop(chance.randrange(len(runs)))
                for scheduler, task in zip(schedulers, tasks, strict=True):
                    scheduler.release(task)
                    if what == "retry":
                        scheduler.requeue(task)
                if what == "retry":
                    queued[tasks[0].number] = tasks
            elif what == "discard" and queued:
                for scheduler, task in zip(schedulers, queued.pop(chance.choice(list(queued))), strict=True):
                    scheduler.discard(task)
            elif what == "caps" and chance.random() < 0.3:
                caps: Any = chance.choice((None, 1, 2, {"a": 1}))
                for scheduler in schedulers:
                    scheduler.limit_keys(caps)
            assert schedulers[0].depth == schedulers[1].depth == len(queued)
        for tasks in runs:
            for scheduler, task in zip(schedulers, tasks, strict=True):
                scheduler.release(task)
        assert numbers(all_next(schedulers[0])) == numbers(all_next(schedulers[1]))


def test_t23_a_second_need_in_the_middle_keeps_the_accounts() -> None:
    """A key has paid 100 for what it was given, before a task comes that needs something else than all others."""
    orders = []
    for need in (None, "gpu"):
        scheduler = Scheduler(fair_share(), UNBOUNDED, 1)
        for number in range(6):
            scheduler.enqueue(record(number, "big", cost=100.0))
        for number in range(6, 12):
            scheduler.enqueue(record(number, "small"))
        for _ in range(2):
            task = scheduler.next()
            assert task is not None
            scheduler.release(task)
        scheduler.enqueue(record(12, "small", need=need))
        orders.append([task.partition for task in all_next(scheduler)])
    assert orders[0] == ["small"] * 6 + ["big"] * 5
    assert orders[1] == orders[0]


@pytest.mark.parametrize("changes", [["need"], [99], [99, "need"], ["need", 99, None], [99, None]], ids=str)
def test_t23_a_queue_that_is_made_anew_goes_on_with_the_accounts(changes: list[Any]) -> None:
    """Where no tags are equal, to the task; each key was charged something of its own first."""
    for seed in range(20):
        orders = []
        for change in ([], changes):
            chance = random.Random(seed)
            scheduler = Scheduler(STRATEGIES["fair_share"], UNBOUNDED, 1)
            for number, key in enumerate(KEYS):
                started = record(number, key, cost=chance.uniform(0.1, 30.0))
                assert scheduler.enter(started)
                scheduler.release(started)
            for number in range(10, 110):
                scheduler.enqueue(record(number, KEYS[number % 5], cost=chance.uniform(0.1, 5.0)))
            order: list[int] = []
            for what in (*change, None):
                for _ in range(5):
                    task = scheduler.next()
                    assert task is not None
                    order.append(task.number)
                    scheduler.release(task)
                if what == "need":
                    scheduler.enqueue(other := record(500, "a", need="gpu"))
                    scheduler.discard(other)
                elif len(order) <= 5 * len(change):
                    scheduler.limit_keys(what)
            orders.append(order + numbers(all_next(scheduler)))
        assert orders[0] == orders[1], f"seed {seed}"


class Room:
    """A scheduler under random commands, and who is where."""

    def __init__(self, strategy: Strategy, chance: random.Random, limit: int = 3) -> None:
        self.chance = chance
        self.scheduler = Scheduler(strategy, UNBOUNDED, limit)
        self.caps: Any = None
        self.queued: list[TaskRecord] = []
        self.active: list[TaskRecord] = []
        self.number = 0

    def may_start(self) -> list[TaskRecord]:
        """Looking at everybody."""
        full = {key for key, held in Counter(task.partition for task in self.active).items() if held >= self.cap(key)}
        return [
            task
            for task in self.queued
            if task.terms.need not in self.scheduler.unserved and task.partition not in full
        ]

    def cap(self, key: Hashable) -> float:
        if key is None or self.caps is None:
            return float("inf")
        return float(self.caps.get(key, "inf") if isinstance(self.caps, dict) else self.caps)

    def submit(self) -> None:
        self.number += 1
        chance = self.chance
        task = record(self.number, chance.choice(KEYS), chance.randint(0, 2), need=chance.choice(NEEDS))
        self.queued.append(task)
        could = task in self.may_start() and len(self.active) < self.scheduler.slots.limit
        if chance.random() < 0.5:
            self.scheduler.enqueue(task)
            return
        assert self.scheduler.enter(task) is could
        if could:
            self._started(task)
        else:
            self.scheduler.enqueue(task)

    def _started(self, task: TaskRecord) -> None:
        self.queued.remove(task)
        self.active.append(task)

    def next(self) -> None:
        """Given away, or nobody is there who could use it."""
        expected = self.may_start() if len(self.active) < self.scheduler.slots.limit else []
        first = refused(self.scheduler) if self.chance.random() < 0.3 else None
        task = self.scheduler.next()
        assert first in (None, task), "it stands where it stood"
        if task is None:
            assert not expected
            return
        assert task in expected
        self._started(task)

    def end(self) -> None:
        if not self.active:
            return
        task = self.active.pop(self.chance.randrange(len(self.active)))
        expected = self.may_start()
        heir = self.scheduler.succeed(task)
        assert task.slot is None
        if heir is None:
            assert not expected or self.caps is not None, "with caps, `next` says"
        else:
            assert heir in expected
            self._started(heir)

    def retry(self) -> None:
        if self.active:
            task = self.active.pop(self.chance.randrange(len(self.active)))
            self.scheduler.release(task)
            self.scheduler.requeue(task)
            self.queued.append(task)

    def discard(self) -> None:
        if self.queued:
            task = self.queued.pop(self.chance.randrange(len(self.queued)))
            self.scheduler.discard(task)

    def close(self) -> None:
        self.scheduler.unserved.add(self.chance.choice(NEEDS))

    def open(self) -> None:
        self.scheduler.unserved.discard(self.chance.choice(NEEDS))

    def limit_keys(self) -> None:
        if self.chance.random() < 0.3:
            self.caps = self.chance.choice((None, None, 1, 2, {"a": 1, "b": 2}))
            self.scheduler.limit_keys(self.caps)


ROOM_COMMANDS = ("submit",) * 5 + ("next",) * 4 + ("end",) * 3 + ("close", "open", "open", "retry", "discard")


@pytest.mark.parametrize("caps", [False, True])
@pytest.mark.parametrize("kind", STRATEGIES)
def test_t81_no_slot_is_given_to_what_is_shut_and_none_is_wasted(kind: str, caps: bool, scale: float) -> None:
    """`next` and `succeed`, with one need or several, with caps (b24) and live changes of them."""
    commands = (*ROOM_COMMANDS, "limit_keys") if caps else ROOM_COMMANDS
    for seed in range(int(215 * scale**1.8)):
        chance = random.Random(f"{kind} {seed}")
        room = Room(STRATEGIES[kind], chance)
        for _ in range(200):
            getattr(room, chance.choice(commands))()
            assert room.scheduler.depth == len(room.queued)
            assert set(room.scheduler.queued()) == set(room.queued)
            assert room.scheduler.slots.active == len(room.active)
        room.scheduler.unserved.clear()
        while room.queued or room.active:
            room.next()
            room.scheduler.unserved.clear()
            room.end()
        assert not len(room.scheduler.queue)


@pytest.mark.parametrize("kind", STRATEGIES)
def test_t24_caps_and_classes_pass_over_each_what_is_theirs(kind: str) -> None:
    scheduler = Scheduler(STRATEGIES[kind], UNBOUNDED, 10, {"a": 1})
    tasks = {
        (key, need): record(number, key, need=need)
        for number, (key, need) in enumerate((key, need) for key in "ab" for need in ("x", "y"))
    }
    for task in tasks.values():
        scheduler.enqueue(task)
    scheduler.unserved.add("x")
    assert {scheduler.next(), scheduler.next()} == {tasks["a", "y"], tasks["b", "y"]}
    assert scheduler.next() is None
    scheduler.unserved.clear()
    assert scheduler.next() is tasks["b", "x"], "the key a is at its cap, in every class"
    assert scheduler.next() is None
    scheduler.unserved.add("x")
    scheduler.release(tasks["a", "y"])
    assert scheduler.next() is None, "it may run again, and what it needs cannot be had"
    scheduler.limit_keys(None)
    assert scheduler.next() is None
    assert scheduler.unserved == {"x"}, "it was put aside while the queue was made anew"
    scheduler.unserved.clear()
    assert scheduler.next() is tasks["a", "x"]


@pytest.mark.parametrize("on_full", ["drop_oldest", "drop_fair"])
@pytest.mark.parametrize("kind", STRATEGIES)
def test_t35_victims_are_the_same_whatever_they_need(kind: str, on_full: Any) -> None:
    for seed in range(20):
        chance = random.Random(seed)
        depth = chance.randint(2, 8)
        scheduler = Scheduler(STRATEGIES[kind], backpressure_queue(depth, on_full), 2)
        model = OldestModel() if on_full == "drop_oldest" else BacklogModel()
        runs: list[TaskRecord] = []
        for number in range(150):
            what = chance.choice(("new", "new", "new", "next", "end", "retry", "unserved", "open"))
            if what == "new":
                newcomer = record(number, chance.choice("abc"), chance.randint(0, 2), need=chance.choice(NEEDS))
                scheduler.enqueue(newcomer)
                model.joined(newcomer)
                while scheduler.depth > depth:
                    victim = scheduler.victim(newcomer)
                    assert victim is model.choose(newcomer)
                    scheduler.discard(victim)
                    model.left(victim)
            elif what == "next" and (task := scheduler.next()) is not None:
                model.left(task)
                runs.append(task)
            elif what in ("end", "retry") and runs:
                scheduler.release(task := runs.pop())
                if what == "retry":
                    scheduler.requeue(task)
                    model.joined(task)
            elif what == "unserved":
                scheduler.unserved.add(chance.choice(NEEDS))
            elif what == "open":
                scheduler.unserved.clear()
            assert set(scheduler.queued()) == set(model.tasks)


@pytest.mark.parametrize("kind", STRATEGIES)
@pytest.mark.parametrize("several", [False, True])
def test_t81_a_lent_slot_passes_over_descendants_whose_need_is_shut(kind: str, several: bool) -> None:
    scheduler = Scheduler(STRATEGIES[kind], UNBOUNDED, 1)
    parent = record(0, "p")
    running(scheduler, parent)
    strangers = [record(number, "s", need="eu" if several else "gpu") for number in range(1, 4)]
    children = [record(number, "p", need="gpu", parent=parent) for number in range(4, 7)]
    for task in (*strangers, *children):
        scheduler.enqueue(task)
    scheduler.unserved.add("gpu")
    assert scheduler.begin_wait(parent, children[-1])
    if several:
        first = scheduler.next()
        assert first in strangers
        assert first is not None
        scheduler.release(first)
        strangers.remove(first)
    else:
        assert scheduler.next() is None
    scheduler.unserved.clear()
    for child in children:
        assert scheduler.next() is child, "the lender's own first"
        child.status = "completed"
        scheduler.release(child)
    assert scheduler.over(children[-1]) == [parent]
    scheduler.unserved |= {"gpu", "eu", None}
    assert scheduler.reclaim(parent) or scheduler.next() is parent, "it runs, and has what it needs"
    assert scheduler.next() is None


@pytest.mark.parametrize("kind", STRATEGIES)
def test_t81_a_slot_comes_back_to_who_runs_though_its_need_is_shut(kind: str) -> None:
    scheduler = Scheduler(STRATEGIES[kind], UNBOUNDED, 1)
    parent = record(0, need="gpu")
    running(scheduler, parent)
    child = record(1, need="eu", parent=parent)
    scheduler.enqueue(child)
    scheduler.enqueue(record(2, need="eu"))
    scheduler.begin_wait(parent, child)
    assert scheduler.next() is child
    child.status = "completed"
    assert scheduler.over(child) == [parent]
    assert not scheduler.reclaim(parent)
    scheduler.unserved.add("gpu")
    assert scheduler.succeed(child) is None, "it is not so simple: somebody returns"
    assert scheduler.next() is parent


@pytest.mark.parametrize("kind", STRATEGIES)
def test_t81_who_is_refused_is_first_again(kind: str) -> None:
    """And all others are where they were: seen beside a scheduler where nothing was refused."""
    for seed in range(20):
        chance = random.Random(seed)
        orders = []
        for refuses in (False, True):
            scheduler = Scheduler(STRATEGIES[kind], UNBOUNDED, 2)
            for task in crowd(seed, 30):
                scheduler.enqueue(task)
            order: list[TaskRecord] = []
            while len(scheduler.queue):
                if refuses and chance.random() < 0.5:
                    first = refused(scheduler)
                    assert first is not None
                    scheduler.unserved.add(first.terms.need)
                    other = refused(scheduler)
                    assert other is None or other.terms.need != first.terms.need
                    scheduler.unserved.clear()
                    assert refused(scheduler) is first
                task = scheduler.next()
                assert task is not None
                scheduler.release(task)
                order.append(task)
            orders.append(numbers(order))
        assert orders[0] == orders[1]


@pytest.mark.parametrize("kind", FAIR)
def test_t51_tasks_that_are_refused_again_and_again_make_nobody_look_unfair(kind: str) -> None:
    """Tenants take turns exactly, and what they need is rarely there: the first of each is refused three times."""
    strategy = fair_share() if kind == "fair_share" else fair_round_robin()
    scheduler = Scheduler(strategy, UNBOUNDED, 1)
    for number in range(120):
        scheduler.enqueue(record(number, "abcd"[number % 4]))
    while (first := refused(scheduler)) is not None:
        for _ in range(2):
            assert refused(scheduler) is first
        assert scheduler.next() is first
        scheduler.release(first)
        assert scheduler.jain == pytest.approx(1.0)


@pytest.mark.parametrize("need", [None, "gpu"])
def test_t23_a_descendant_that_was_refused_has_spent_nothing(need: Hashable) -> None:
    """It was first for a lent slot, and nothing served it: ten times."""
    scheduler = Scheduler(fair_share(), UNBOUNDED, 1)
    parent = record(0, "other")
    running(scheduler, parent)
    child = record(1, "family", need=need, parent=parent)
    scheduler.enqueue(child)
    for number in range(2, 12):
        scheduler.enqueue(record(number, "family", need=need))
        scheduler.enqueue(record(number + 100, "stranger"))
    scheduler.begin_wait(parent, child)
    for _ in range(10):
        assert refused(scheduler) is child
    scheduler.discard(child)
    first = [task.partition for task, _ in zip(all_next(scheduler), range(10), strict=False)]
    assert Counter(first) == {"family": 5, "stranger": 5}


def test_t81_a_pool_keeps_so_many_needs_apart() -> None:
    scheduler = Scheduler(fifo(), UNBOUNDED, 1)
    for number in range(MOST_NEEDS):
        scheduler.check_need(number)
        scheduler.enqueue(record(number, need=number))
    scheduler.check_need(3)
    with pytest.raises(InvalidArgument, match=f"{MOST_NEEDS} different combinations"):
        scheduler.check_need("one more")
    assert scheduler.next() is not None
    scheduler.check_need("one more")
