"""Who is dropped when the queue is too long."""

from __future__ import annotations

import random
from typing import Any

import pytest

from headgate import backpressure_queue, fail_fast, fair_round_robin, fifo, lifo, priority, ring_buffer
from headgate.tasks.admission import Newest, OfLargestBacklog, Oldest, victims_of
from headgate.tasks.model import TaskRecord
from headgate.tasks.scheduling.scheduler import Scheduler
from tests.unit.tasks.model import BacklogModel, NewestBacklogModel, OldestModel, record, refused

KINDS: dict[str, tuple[Any, Any]] = {
    "oldest": (Oldest, OldestModel),
    "fair": (OfLargestBacklog, BacklogModel),
    "fair, newest": (lambda: OfLargestBacklog(Newest), NewestBacklogModel),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(5))
def test_t35_the_victim_is_whom_the_rule_names(kind: str, seed: int, scale: float) -> None:
    for walk in range(int(4 + 100 * scale**1.5)):
        chance = random.Random(f"{seed} {walk}")
        victims, model = (make() for make in KINDS[kind])
        keys = "abcdef"[: chance.randint(1, 6)]
        gone: list[TaskRecord] = []
        for number in range(200):
            if chance.random() < 0.55 or not model.tasks:
                newcomer = record(number, chance.choice(keys))
                if gone and chance.random() < 0.2:
                    newcomer = gone.pop(chance.randrange(len(gone)))
                    newcomer.attempt += 1
                victims.joined(newcomer)
                model.joined(newcomer)
                if len(model.tasks) > 1:
                    assert victims.choose(newcomer) is model.choose(newcomer)
                    assert victims.choose(newcomer) is not newcomer, "the newcomer is never the victim"
            else:
                leaver = model.choose() if chance.random() < 0.3 else chance.choice(model.tasks)
                victims.left(leaver)
                model.left(leaver)
                gone.append(leaver)
            if model.tasks:
                assert victims.choose() is model.choose()
        for task in list(model.tasks):
            victims.left(task)
        for name in ("_tasks", "_keys", "_buckets"):
            assert not getattr(victims, name, None), "nothing is kept for those who left"


@pytest.mark.parametrize("kind", KINDS)
def test_t35_who_was_never_there_may_leave(kind: str) -> None:
    """A task that started without having queued is told to leave like all others."""
    victims = KINDS[kind][0]()
    stays = record(1, "a")
    victims.joined(stays)
    victims.left(record(2, "a"))
    victims.left(record(3, "b"))
    assert victims.choose() is stays


def test_t35_a_flood_hurts_only_itself() -> None:
    victims = OfLargestBacklog()
    quiet = [record(number, f"quiet-{number}") for number in range(50)]
    for task in quiet:
        victims.joined(task)
    dropped = []
    for number in range(100, 1_100):
        victims.joined(record(number, "flood"))
        if number >= 150:
            dropped.append(victims.choose())
            victims.left(dropped[-1])
    assert [task.number for task in dropped] == list(range(100, 1_050))


def test_t35_policies_that_drop_keep_track() -> None:
    assert isinstance(victims_of(backpressure_queue(3, "drop_oldest")), Oldest)
    assert isinstance(victims_of(ring_buffer(3)), Oldest)
    assert isinstance(victims_of(backpressure_queue(3, "drop_fair")), OfLargestBacklog)
    assert isinstance(victims_of(backpressure_queue(3, "refuse_fair")), OfLargestBacklog)
    for policy in (backpressure_queue(3, "drop_newest"), backpressure_queue(3), fail_fast()):
        assert victims_of(policy) is None


def make_room(scheduler: Scheduler, newcomer: TaskRecord) -> list[TaskRecord]:
    """As the pool does it after a newcomer has queued."""
    dropped = []
    assert scheduler.policy.max_depth is not None
    while scheduler.depth > scheduler.policy.max_depth:
        dropped.append(scheduler.victim(newcomer))
        scheduler.discard(dropped[-1])
    return dropped


@pytest.mark.parametrize("on_full", ["drop_oldest", "drop_fair"])
@pytest.mark.parametrize("strategy", [fifo(), lifo(), priority(), fair_round_robin()])
def test_t35_the_newcomer_stays(on_full: Any, strategy: Any) -> None:
    """Whatever was set aside, retried or started meanwhile."""
    for seed in range(40):
        chance = random.Random(seed)
        scheduler = Scheduler(strategy, backpressure_queue(chance.randint(1, 4), on_full), 2)
        running: list[TaskRecord] = []
        for number in range(150):
            what = chance.random()
            if what < 0.5:
                newcomer = record(number, chance.choice("abc"), chance.randint(0, 2))
                (scheduler.set_aside if chance.random() < 0.2 else scheduler.enqueue)(newcomer)
                assert newcomer not in make_room(scheduler, newcomer)
            elif what < 0.7 and running:
                scheduler.release(running.pop(chance.randrange(len(running))))
            elif what < 0.8 and running:
                again = running.pop(chance.randrange(len(running)))
                again.attempt += 1
                scheduler.release(again)
                scheduler.requeue(again)
            elif (task := scheduler.next()) is not None:
                running.append(task)


def test_t35_the_newcomer_stays_when_several_must_go() -> None:
    """A retry may make the queue longer than it should be: a smaller pool has no slot for it."""
    scheduler = Scheduler(fifo(), backpressure_queue(1, "drop_fair"), 2)
    retried, other = record(1, "a"), record(2, "x")
    for task in (retried, other):
        scheduler.enqueue(task)
        assert scheduler.next() is task
    scheduler.enqueue(record(3, "a"))
    scheduler.resize(1)
    retried.attempt = 1
    scheduler.release(retried)
    scheduler.requeue(retried)
    newcomer = record(4, "b")
    scheduler.enqueue(newcomer)
    assert newcomer not in make_room(scheduler, newcomer)


def test_t31_a_task_that_was_refused_is_still_the_oldest() -> None:
    """Nothing served it when its turn came, so it is still at the head of the queue."""
    scheduler = Scheduler(fifo(), backpressure_queue(5, "drop_oldest"), 1)
    first, second = record(1, "a"), record(2, "a")
    scheduler.enqueue(first)
    scheduler.enqueue(second)
    assert refused(scheduler) is first
    assert scheduler.victim(record(3)) is first


def test_t31_a_task_whose_delay_is_over_is_as_old_as_it_was() -> None:
    """Depth counts delayed tasks too, so a delayed one has been queued since it was submitted."""
    scheduler = Scheduler(fifo(), backpressure_queue(5, "drop_oldest"), 1)
    delayed, later = record(1, "a"), record(2, "a")
    scheduler.set_aside(delayed)
    scheduler.enqueue(later)
    assert scheduler.victim(record(3)) is delayed
    scheduler.enqueue(delayed)
    assert scheduler.victim(record(3)) is delayed
