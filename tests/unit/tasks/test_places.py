"""L07: how many tasks start before one, as queues estimate it, beside the order in which they really come out."""

from __future__ import annotations

import random
from typing import Any

import pytest

from headgate.gate.queue import Order, Queue
from headgate.tasks.model import TaskRecord
from headgate.tasks.scheduling.load import Pace, seconds_of_slots
from tests.conftest import seeds
from tests.unit.tasks.model import record

EXACT: dict[str, tuple[Order, bool]] = {
    "fifo": (Order(), False),
    "lifo": (Order(newest_first=True), False),
    "priority": (Order(levels=True), False),
    "fair_round_robin": (Order("turns"), False),
    "fair_round_robin with levels": (Order("turns", levels=True), False),
    "fifo with caps": (Order(), True),
    "lifo with caps": (Order(newest_first=True), True),
    "priority with caps": (Order(levels=True), True),
    "fifo by requirement": (Order(), False),
    "round robin by requirement": (Order("turns"), True),
}
"""Orders, and whether tenants are kept apart."""
NEARLY: dict[str, tuple[Order, bool]] = {
    "fair_share": (Order("shares", weight=lambda key: 3.0 if key == "a" else 1.0), True),
    "fair_share with levels": (Order("shares", weight=lambda key: 3.0 if key == "a" else 1.0, levels=True), True),
}


def filled(case: tuple[Order, bool], chance: random.Random, tasks: int, needs: int) -> tuple[Any, list[TaskRecord]]:
    queue, queued = Queue(case[0]), []
    queue.set_apart(tenants=case[1])
    for number in range(1, tasks + 1):
        task = record(
            number,
            key=chance.choice("aaab" if chance.random() < 0.5 else "abcdef"),
            priority=chance.randrange(4),
            need=chance.randrange(needs) or None,
        )
        queue.push(task)
        queued.append(task)
        if chance.random() < 0.2:
            queued.remove(queue.pop())
        elif chance.random() < 0.2 and queued:
            gone = chance.choice(queued)
            queued.remove(gone)
            queue.remove(gone)
    return queue, queued


def order(queue: Any) -> dict[int, int]:
    """Where each task comes out. Empties the queue."""
    return {task.number: place for place, task in enumerate(iter(queue.pop, None))}


@pytest.mark.parametrize("kind", EXACT)
@pytest.mark.parametrize("seed", seeds(100, 10))
def test_l07_a_place_is_how_many_come_out_before(kind: str, seed: int) -> None:
    queue, queued = filled(EXACT[kind], random.Random(seed), 60, 3 if "requirement" in kind else 1)
    new = record(1000, key="z" if seed % 2 else "a", priority=2)
    told = queue.place(new, new=True).ahead
    queue.push(new)
    assert queue.place(new, new=False).ahead == told
    assert {task.number: queue.place(task, new=False).ahead for task in [*queued, new]} == order(queue)


@pytest.mark.parametrize("kind", NEARLY)
@pytest.mark.parametrize("seed", seeds(100, 10))
def test_l07_a_place_among_tenants_is_nearly_right(kind: str, seed: int) -> None:
    queue, queued = filled(NEARLY[kind], random.Random(seed), 120, 1)
    told = {task.number: queue.place(task, new=False).ahead for task in queued}
    true = order(queue)
    assert all(abs(told[number] - true[number]) <= 5 + 0.5 * true[number] for number in true)
    far = sorted(told[number] / true[number] for number in true if true[number] >= 10)
    assert not far or 0.7 < far[len(far) // 2] < 1.4


@pytest.mark.parametrize("kind", ["fifo", "priority", "fair_round_robin"])
def test_l07_a_place_far_behind_is_estimated_in_bounded_time(kind: str) -> None:
    queue = Queue(EXACT[kind][0])
    tasks = [record(number, key=f"t{number % 7}", priority=number % 3) for number in range(1, 20_001)]
    for task in tasks:
        queue.push(task)
    steps = CountedSteps(tasks[19_000])
    told = queue.place(steps, new=False).ahead  # type: ignore[arg-type]
    assert told == pytest.approx(order(queue)[19_001], rel=0.1)
    assert steps.taken <= 1


class CountedSteps:
    """Stands for a task, and counts how often its own links are followed."""

    def __init__(self, task: TaskRecord) -> None:
        self._task = task
        self.taken = 0

    def __getattr__(self, name: str) -> Any:
        self.taken += name == "before"
        return getattr(self._task, name)


def test_l07_the_pace_is_that_of_tasks_that_had_queued() -> None:
    pace = Pace()
    pace.begin(100.0)
    assert pace.seconds(100.0, 1) is None, "nothing has started"

    def queued(now: float) -> None:
        if now >= pace.until:
            pace.sample(now)
        pace.count += 1
        pace.last = now

    def free(now: float) -> None:
        pace.free += now - pace.last
        pace.last = now

    free(110.0)
    assert pace.seconds(110.0, 1) is None, "it found a slot free, so nothing is known of the pace"
    for second in range(111, 116):
        queued(second)
        queued(second + 0.5)
    assert pace.seconds(115.5, 2) == pytest.approx(5.5 / 10)
    free(120.0)  # idle until then
    queued(120.5)
    assert pace.seconds(120.5, 2) == pytest.approx(6.0 / 11)
    assert pace.seconds(130.5, 2) > 1.0, "nothing has started for long: it is slower than it was"  # type: ignore[operator]
    assert pace.seconds(150.6, 2) is None, "that was long ago"


@pytest.mark.parametrize(
    ("ahead", "slots", "ran_for", "running_for", "seconds"),
    [
        (0, 2, [10.0], [4.0, 4.0], 6.0),
        (1, 2, [10.0], [4.0, 7.0], 6.0),
        (2, 2, [10.0], [4.0, 7.0], 13.0),
        (5, 2, [10.0], [4.0, 7.0], 26.0),
        (0, 1, [10.0], [12.0], 12.0),  # as long again as it has run
        (0, 1, [], [12.0], 12.0),
        (1, 1, [], [12.0], 36.0),
        (0, 1, [], [0.0], None),
        (0, 1, [], [], None),
        (3, 1, [5.0], [], 5.0),
        (8, 4, [10.0], [5.0, 5.0], 25.0),  # two of four are known
    ],
)
def test_l07_without_a_pace_run_times_tell(
    ahead: int, slots: int, ran_for: list[float], running_for: list[float], seconds: float | None
) -> None:
    assert seconds_of_slots(ahead, slots, ran_for, running_for) == seconds
