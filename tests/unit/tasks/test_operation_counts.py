"""T25 as counts instead of seconds: how many functions are called for one task, in a small pool and in a large one."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest

from headgate import backpressure_queue, fair_round_robin, fair_share, fifo, lifo, priority
from headgate.tasks import Policy, Strategy
from headgate.tasks.admission import UNBOUNDED
from headgate.tasks.scheduling.scheduler import Scheduler
from tests.unit.tasks.model import record

STRATEGIES = {one.kind: one for one in (fifo(), lifo(), priority(), fair_round_robin(), fair_share())}
WEIGHTED = fair_share(weights={number: 1.0 + number % 7 for number in range(2_000)})


def calls_of(work: Callable[[], object]) -> int:
    """How many functions it called, Python's own included."""
    calls = 0

    def count(frame: Any, event: str, arg: Any) -> None:
        nonlocal calls
        if event in ("call", "c_call"):
            calls += 1

    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
    return calls


def per_task(strategy: Strategy, policy: Policy, caps: int | None, tasks: int, keys: int) -> float:
    """Queue them all, then run them four at a time."""
    scheduler = Scheduler(strategy, policy, 4, caps)
    records = [record(number, number % keys, priority=number % 17) for number in range(tasks)]

    def work() -> None:
        for task in records:
            scheduler.enqueue(task)
            while policy.max_depth is not None and scheduler.depth > policy.max_depth:
                scheduler.discard(scheduler.victim(task))
        running = [scheduler.next() for _ in range(4)]
        while running:
            task = running.pop(0)
            if task is not None:
                scheduler.release(task)
                running.append(scheduler.next())

    calls = calls_of(work)
    assert not scheduler.depth
    assert not scheduler.slots.active
    return calls / tasks


CASES: dict[str, tuple[Strategy, Callable[[int], Policy], int | None]] = {
    **{kind: (strategy, lambda depth: UNBOUNDED, None) for kind, strategy in STRATEGIES.items()},
    **{f"{kind}, capped": (strategy, lambda depth: UNBOUNDED, 1) for kind, strategy in STRATEGIES.items()},
    "fair_share, weighted": (WEIGHTED, lambda depth: UNBOUNDED, None),
    "fifo, drop_oldest": (fifo(), lambda depth: backpressure_queue(depth, "drop_oldest"), None),
    "fair_round_robin, drop_fair": (fair_round_robin(), lambda depth: backpressure_queue(depth, "drop_fair"), None),
}


@pytest.mark.parametrize("case", CASES)
def test_t25_a_task_costs_the_same_in_a_crowd(case: str, scale: float) -> None:
    strategy, policy, caps = CASES[case]
    some, many = (300, 1_200) if scale < 1 else (1_000, 20_000)
    few = per_task(strategy, policy(some // 2), caps, some, 10)
    crowd = per_task(strategy, policy(many // 2), caps, many, many // 10)
    assert crowd <= 1.5 * few


@pytest.mark.parametrize("kind", STRATEGIES)
def test_t25_leaving_from_the_middle_costs_the_same_in_a_crowd(kind: str, scale: float) -> None:
    """A cancel is as cheap as a turn."""

    def cancelled(tasks: int, keys: int) -> float:
        scheduler = Scheduler(STRATEGIES[kind], UNBOUNDED, 1)
        records = [record(number, number % keys, priority=number % 17) for number in range(tasks)]
        for task in records:
            scheduler.enqueue(task)

        def work() -> None:
            for task in records[1::2]:
                scheduler.discard(task)

        return calls_of(work) / (tasks // 2)

    many = 5_000 if scale >= 1 else 2_000
    assert cancelled(many, many // 10) <= 1.5 * cancelled(500, 10)


@pytest.mark.parametrize("caps", [None, 1])
def test_t25_a_family_costs_the_same_in_a_crowd(caps: int | None) -> None:
    """A parent waits for its children, each of a key of its own: the lent slot goes from one to the next."""

    def per_child(children: int) -> float:
        scheduler = Scheduler(fifo(), UNBOUNDED, 1, caps)
        parent = record(0)
        assert scheduler.enter(parent)
        parent.status = "running"
        family = [record(number, number, parent=parent) for number in range(1, children + 1)]
        for child in family:
            scheduler.enqueue(child)
        scheduler.begin_wait(parent, family[-1])

        def work() -> None:
            for child in family:
                assert scheduler.next() is child
                child.status = "completed"
                scheduler.release(child)

        return calls_of(work) / children

    assert per_child(500) <= 1.5 * per_child(50)
