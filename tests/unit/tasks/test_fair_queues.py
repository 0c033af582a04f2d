"""Fairness between partitions: turns by round robin, shares by weight and cost, and the index that judges both."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Hashable
from itertools import combinations
from typing import Any

import pytest

from headgate import fair_round_robin, fair_share, fifo, lifo, priority
from headgate.gate.queue import Order, Queue
from headgate.gate.rounds import Backlogs, Rounds, jain
from headgate.tasks.admission import UNBOUNDED
from headgate.tasks.fairness import stats_of
from headgate.tasks.model import TaskRecord
from headgate.tasks.scheduling.scheduler import Scheduler
from tests.conftest import seeds
from tests.unit.tasks.model import RoundsModel, ShareModel, cost_of, record, refused

# -- round robin -------------------------------------------------------------------------------------------------------


def test_t21_partitions_take_turns() -> None:
    queue = Queue(Order("turns"))
    for number, key in enumerate("aabab"):
        queue.push(record(number, key))
    served = list(iter(queue.pop, None))
    assert [task.partition for task in served] == list("ababa")
    assert [task.number for task in served if task.partition == "a"] == [0, 1, 3]


@pytest.mark.parametrize("flood_first", [True, False])
def test_t22_who_floods_gets_one_of_the_first_hundred(flood_first: bool) -> None:
    queue = Queue(Order("turns"))
    flood = [record(number, "big") for number in range(200)]
    others = [record(1_000 + number, number) for number in range(100)]
    for task in [*flood, *others] if flood_first else [*others[:50], *flood, *others[50:]]:
        queue.push(task)
    first = [queue.pop() for _ in range(100)]
    assert sum(task.partition == "big" for task in first if task is not None) == 1


@pytest.mark.parametrize("seed", range(10))
def test_t22_a_newcomer_waits_one_round_at_most(seed: int, scale: float) -> None:
    """Between its arrival and its service every partition that was there has at most one turn."""
    chance = random.Random(seed)
    queue = Queue(Order("turns"))
    queued: Counter[Hashable] = Counter()
    waits: dict[Hashable, tuple[int, Counter[Hashable]]] = {}  # whoever heads its partition: others then, turns since
    for number in range(int(500 + 20_000 * scale**1.3)):
        if chance.random() < 0.48:
            key = chance.choice("abcdefgh") if chance.random() < 0.4 else chance.choice("ab")
            queue.push(record(number, key))
            queued[key] += 1
            if queued[key] == 1:
                waits[key] = (sum(count > 0 for count in queued.values()) - 1, Counter())
            continue
        task = queue.pop()
        if task is None:
            assert not queued.total()
            continue
        key = task.partition
        others, turns = waits.pop(key)
        assert turns.total() <= others
        assert max(turns.values(), default=0) <= 1
        for _, seen in waits.values():
            seen[key] += 1
        queued[key] -= 1
        if queued[key]:
            waits[key] = (sum(count > 0 for count in queued.values()) - 1, Counter())


def test_t22_the_rotation_survives_a_partition_that_runs_empty() -> None:
    queue = Queue(Order("turns"))
    for number in range(6):
        queue.push(record(number, "ab"[number % 2]))
    order = []
    for number in range(6, 30):  # c has one task at a time, and comes back as soon as it was served
        if not any(task.partition == "c" for task in queue):
            queue.push(record(number, "c"))
        queue.push(record(100 + number, "ab"[number % 2]))
        task = queue.pop()
        assert task is not None
        order.append(task.partition)
    assert {tuple(order[at : at + 3]) for at in range(0, 24, 3)} == {("a", "b", "c")}


# -- Jain's index ------------------------------------------------------------------------------------------------------


class Standing:
    """Where a key stands; the queues let their partitions carry this."""

    def __init__(self) -> None:
        self.round = 0
        self.got = 0.0


@pytest.mark.parametrize("seed", range(10))
def test_t51_the_index_is_what_its_definition_says(seed: int, scale: float) -> None:
    for walk in range(int(5 + 150 * scale)):
        chance = random.Random(f"{seed} {walk}")
        rounds, model = Rounds(), RoundsModel()
        standing: dict[Hashable, Standing] = {}
        keys = "abcdefgh"[: chance.randint(1, 8)]
        liking = chance.choice([(4, 4, 1), (1, 8, 0), (3, 3, 3), (2, 6, 2)])
        for _ in range(chance.randint(5, 120)):
            (what,) = chance.choices(("opened", "served", "closed"), liking)
            key = chance.choice(keys)
            if (what == "opened") is (key in standing):
                continue
            if what == "opened":
                standing[key] = Standing()
                rounds.opened(standing[key])
                model.story.append((what, key))
            elif what == "served":
                amount = chance.choice([1.0, 0.25, 7.0])
                rounds.served(standing[key], amount)
                model.story.append((what, key, amount))
            else:
                rounds.closed(standing.pop(key))
                model.story.append((what, key))
            assert rounds.index() == pytest.approx(model.index())


@pytest.mark.parametrize(
    ("make", "amount"),
    [
        (lambda: Queue(Order("turns")), 1.0),
        (lambda: Queue(Order("shares", weight=lambda key: 2.0)), 0.5),
        (Backlogs, 1.0),
    ],
)
def test_t51_queues_tell_the_rounds_what_happens(make: Any, amount: float, scale: float) -> None:
    """Pops, takes and removals of a real queue, beside the story as it was."""
    for seed in range(int(5 + 100 * scale)):
        chance = random.Random(seed)
        queue, model = make(), RoundsModel()
        inside: list[TaskRecord] = []
        for number in range(150):
            what = chance.choice(("push", "push", "pop", "pop", "take", "remove"))
            if what == "push":
                task = record(number, chance.choice("abcd"))
                if not any(other.partition == task.partition for other in inside):
                    model.story.append(("opened", task.partition))
                _join(queue, task)
                inside.append(task)
            elif inside:
                task = _leave(queue, what, chance.choice(inside))
                inside.remove(task)
                if what != "remove":
                    model.story.append(("served", task.partition, amount))
                if not any(other.partition == task.partition for other in inside):
                    model.story.append(("closed", task.partition))
            index = queue.rounds.index() if isinstance(queue, Backlogs) else queue.jain
            assert index == pytest.approx(model.index())


def _join(queue: Any, task: TaskRecord) -> None:
    queue.joined(task.partition) if isinstance(queue, Backlogs) else queue.push(task)


def _leave(queue: Any, what: str, task: TaskRecord) -> TaskRecord:
    if isinstance(queue, Backlogs):
        queue.left(task.partition, started=what != "remove")
    elif what == "pop":
        popped = queue.pop()
        assert popped is not None
        return popped  # type: ignore[no-any-return]
    else:
        getattr(queue, what)(task)
    return task


def desk_of(strategy: Any) -> Scheduler:
    return Scheduler(strategy, UNBOUNDED, 1)


def serve(scheduler: Scheduler) -> TaskRecord | None:
    """One task has the only slot, and gives it back."""
    task = scheduler.next()
    if task is not None:
        scheduler.release(task)
    return task


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("strategy", [fair_round_robin(), fair_share()])
def test_t22_backlogged_tenants_are_treated_alike(strategy: Any, seed: int, scale: float) -> None:
    """Random traffic, of which one tenant makes most: Jain's index stays at 0.99 and more."""
    chance = random.Random(seed)
    scheduler = desk_of(strategy)
    keys = [f"tenant-{number}" for number in range(20)]
    queued: Counter[Hashable] = Counter()
    served: Counter[Hashable] = Counter()
    always = set(keys[:10])  # these never run out
    for number in range(int(500 + 20_500 * scale**1.3)):
        for key in always - set(queued):
            scheduler.enqueue(record(number, key))
            queued[key] += 1
        for _ in range(chance.randrange(3)):
            key = keys[0] if chance.random() < 0.7 else chance.choice(keys)
            scheduler.enqueue(record(number, key))
            queued[key] += 1
        task = serve(scheduler)
        assert task is not None
        served[task.partition] += 1
        queued[task.partition] -= 1
        queued += Counter()
    assert scheduler.jain >= 0.99
    assert jain(served[key] for key in always) >= 0.99


@pytest.mark.parametrize("strategy", [fifo(), lifo(), priority()])
def test_t22_a_flood_is_seen_where_nobody_is_protected(strategy: Any) -> None:
    scheduler = desk_of(strategy)
    small = [record(number, f"small-{number}") for number in range(20)]
    flood = [record(1_000 + number, "big") for number in range(1_000)]
    for task in [*small, *flood] if strategy.kind == "lifo" else [*flood, *small]:
        scheduler.enqueue(task)
    for _ in range(500):
        serve(scheduler)
    assert scheduler.jain < 0.1
    while serve(scheduler) is not None:
        pass
    assert scheduler.jain < 0.5


def test_t51_ages_are_percentiles_of_what_was_waited() -> None:
    chance = random.Random(7)
    story = [(chance.choice("abc"), chance.random()) for _ in range(1_000)]
    stats = stats_of(story, 0.5, {"a": 3.0, "d": 9.0})
    assert stats.jain == 0.5
    assert [age.key for age in stats.keys[:2]] == ["d", "a"]
    assert stats.worst is stats.keys[0]
    for age in stats.keys:
        waits = sorted(waited for key, waited in story if key == age.key)
        assert age.count == len(waits)
        assert age.lag == {"a": 3.0, "d": 9.0}.get(str(age.key), 0.0)
        for part, found in ((0.50, age.p50), (0.99, age.p99)):
            if waits:
                below = sum(waited < found for waited in waits)
                assert found in waits
                assert below <= part * len(waits) < below + 1
            else:
                assert found == 0.0


# -- shares by weight and cost -----------------------------------------------------------------------------------------


class Meter:
    """What each key was given, and how far the normalised gap of any two went while both were backlogged."""

    def __init__(self, weights: dict[Hashable, float]) -> None:
        self.weights = weights
        self.given: Counter[Hashable] = Counter()
        self.dearest: dict[Hashable, float] = dict.fromkeys(weights, 0.0)
        self.gaps: dict[tuple[Hashable, Hashable], tuple[float, float]] = {}

    def serve(self, task: TaskRecord) -> None:
        self.given[task.partition] += cost_of(task)  # type: ignore[assignment]

    def check(self, backlogged: set[Hashable]) -> None:
        """Over every interval, so: the highest and the lowest gap since both are backlogged are not too far apart."""
        for pair in combinations(sorted(self.weights, key=str), 2):
            one, two = pair
            gap = self.given[one] / self.weights[one] - self.given[two] / self.weights[two]
            low, high = self.gaps.get(pair, (gap, gap))
            low, high = min(low, gap), max(high, gap)
            bound = sum(self.dearest[key] / self.weights[key] for key in pair)
            if pair in self.gaps:
                assert high - low <= bound * (1 + 1e-9) + 1e-6
            if set(pair) <= backlogged:
                self.gaps[pair] = (low, high)
            else:  # the service that ended it still counted
                self.gaps.pop(pair, None)


@pytest.mark.parametrize("seed", seeds(20, 8))
def test_t23_the_normalised_gap_keeps_to_the_theorem(seed: int, scale: float) -> None:
    """Goyal, Vin and Cheng: |Wi/wi - Wj/wj| <= cmax_i/wi + cmax_j/wj while both are backlogged, whatever others do."""
    for walk in range(int(42 * scale)):
        chance = random.Random(f"{seed} {walk}")
        keys: list[Hashable] = [*"abcde"[: chance.randint(2, 5)]]
        weights = {key: 10 ** chance.uniform(-1, 1) for key in keys}
        dear = {key: chance.choice([0.1, 1.0, 20.0]) for key in keys}
        queue, meter = Queue(Order("shares", weight=weights.__getitem__)), Meter(weights)
        inside: list[TaskRecord] = []
        ran: list[TaskRecord] = []
        parked: set[Hashable] = set()
        eager = chance.uniform(0.35, 0.65)
        for number in range(400):
            step = chance.random()
            if step < eager:
                key = chance.choice(keys)
                task = record(number, key, cost=chance.uniform(0.1, dear[key]))
                meter.dearest[key] = max(meter.dearest[key], cost_of(task))
                inside.append(task)
                queue.push(task)
            elif step < 0.92:
                popped = queue.pop()
                eligible = [task for task in inside if task.partition not in parked]
                assert (popped is None) is (not eligible), "work conserving"
                if popped is not None:
                    assert popped is next(task for task in inside if task.partition == popped.partition)
                    inside.remove(popped)
                    ran.append(popped)
                    meter.serve(popped)
            elif step < 0.94 and inside:
                gone = inside.pop(chance.randrange(len(inside)))
                queue.remove(gone)
            elif step < 0.95 and ran:
                again = ran.pop(chance.randrange(len(ran)))
                inside.insert(0, again)
                queue.push_front(again)
            elif step < 0.97:
                key = chance.choice(keys)
                parked ^= {key}
                (queue.park if key in parked else queue.unpark)(key)
            elif not any(task.partition not in parked for task in inside):
                free = [key for key in keys if key not in parked]
                if free:  # a slot is free and nobody can use it: a newcomer starts at once
                    task = record(number, chance.choice(free), cost=0.1)
                    meter.dearest[task.partition] = max(meter.dearest[task.partition], 0.1)
                    queue.charge(task)
                    meter.serve(task)
            meter.check({task.partition for task in inside} - parked)


def test_t23_many_keys_may_be_forgotten_and_nothing_changes(scale: float) -> None:
    """Tags that virtual time has passed are dropped now and then: the order is as if none ever were."""
    for seed in range(int(1 + 32 * scale)):
        chance = random.Random(seed)
        weights = {key: 10 ** chance.uniform(-1, 1) for key in range(400)}
        queue, model = Queue(Order("shares", weight=weights.__getitem__)), ShareModel(weights.__getitem__)
        most = 0
        for number in range(3_000):
            if chance.random() < 0.5:
                task = record(number, chance.randrange(400), cost=chance.choice([None, 0.1, 20.0]))
                if not len(queue) and chance.random() < 0.5:
                    queue.charge(task)
                    model.charge(task)
                else:
                    queue.push(task)
                    model.push(task)
            else:
                assert queue.pop() is model.pop()
            most = max(most, len(queue._level_of(0).past))
            assert not len(queue) or queue._level_of(0).virtual == model.virtual
        assert most < 400


@pytest.mark.parametrize("weight", [0.1, 1.0, 10.0])
def test_t23_who_empties_and_returns_at_once_gains_nothing(weight: float) -> None:
    """`quick` has one task at a time and comes back when it was served; `steady` has a backlog."""
    queue = Queue(Order("shares", weight={"quick": weight, "steady": 1.0}.__getitem__))
    given: Counter[Hashable] = Counter()
    for number in range(2_000):
        if not any(task.partition == "quick" for task in queue):
            queue.push(record(number, "quick", cost=3.0))
        queue.push(record(10_000 + number, "steady"))
        task = queue.pop()
        assert task is not None
        given[task.partition] += int(cost_of(task))
        assert given["quick"] / weight <= given["steady"] + 3.0 / weight + 1.0
        assert given["steady"] <= given["quick"] / weight + 3.0 / weight + 1.0


def test_t23_work_that_runs_counts() -> None:
    """One that started at once, without queueing, was served all the same: others catch up first."""
    queue = Queue(Order("shares"))
    queue.charge(record(0, "a", cost=10.0))
    for number in range(1, 41):
        queue.push(record(number, "ab"[number % 2]))
    first = [queue.pop() for _ in range(10)]
    assert {task.partition for task in first if task is not None} == {"b"}
    rest = Counter(task.partition for task in (queue.pop() for _ in range(10)) if task is not None)
    assert abs(rest["a"] - rest["b"]) <= 1


def test_t23_an_idle_pool_begins_anew() -> None:
    queue = Queue(Order("shares"))
    queue.charge(record(0, "a", cost=1_000.0))
    queue.idle()
    for number in range(1, 11):
        queue.push(record(number, "ab"[number % 2]))
    served = Counter(task.partition for task in (queue.pop() for _ in range(6)) if task is not None)
    assert served == {"a": 3, "b": 3}
    assert not queue._level_of(0).past


def test_t23_a_weight_is_a_share_of_what_is_run() -> None:
    queue = Queue(Order("shares", weight={"gold": 3.0, "lead": 1.0}.__getitem__))
    for number in range(2_000):
        queue.push(record(number, ("gold", "lead")[number % 2], cost=1.0 + number % 4))
    given: Counter[Hashable] = Counter()
    for _ in range(800):
        task = queue.pop()
        assert task is not None
        given[task.partition] += int(cost_of(task))
    assert given["gold"] / given["lead"] == pytest.approx(3.0, rel=0.02)


@pytest.mark.parametrize("strategy", [fifo(), lifo(), priority(), fair_round_robin(), fair_share()])
@pytest.mark.parametrize("keys", ["aaaaaa", "abcabc", "aabbcc", "abcdef"])
def test_t23_a_task_that_was_refused_costs_its_key_no_turn(strategy: Any, keys: str) -> None:
    """A runner may refuse who is next, again and again: the order is what it would have been."""
    orders = []
    for refusals in (0, 3):
        scheduler = desk_of(strategy)
        for number, key in enumerate(keys):
            scheduler.enqueue(record(number, key))
        order = []
        while len(scheduler.queue):
            firsts = {refused(scheduler) for _ in range(refusals)}
            task = scheduler.next()
            assert task is not None
            assert firsts <= {task}
            scheduler.release(task)
            order.append(task.number)
        orders.append(order)
    assert orders[0] == orders[1]
