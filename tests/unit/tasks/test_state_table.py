"""The ledger beside a naive one that looks at every task there ever was."""

from __future__ import annotations

import random
from functools import partial
from itertools import product
from typing import Any

import pytest

from headgate.core.key_windows import holds_key
from headgate.tasks.model import Moment, TaskRecord, Terms
from headgate.tasks.scheduling.states import TRANSITIONS, Former, IllegalMove, TaskStates
from tests.unit.tasks.model import LedgerModel, holds, record

UNFINISHED = ("queued", "running")
TERMINAL = ("completed", "failed", "cancelled", "rejected", "expired", "stale")
STATES = UNFINISHED + TERMINAL
WINDOWS = ("while_active", "until_success", "forever", 5.0, 0.5)
LEGAL = {
    *product(("queued",), ("running", "failed", "rejected", "cancelled", "expired", "stale")),
    *product(("running",), ("queued", "completed", "failed", "cancelled", "stale")),
}


def task_in(ledger: TaskStates, status: Any, number: int = 1, terms: Terms | None = None) -> TaskRecord:
    task = record(number, terms=terms)
    ledger.claim(task)
    if status not in ("queued", "rejected", "expired"):
        ledger.move(task, "running")
    if status not in UNFINISHED:
        ledger.end(task, status, Moment(1.0, 1.0))
    return task


@pytest.mark.parametrize("old", STATES)
def test_t41_a_task_becomes_what_it_may_and_nothing_else(old: str) -> None:
    for new, how in product(STATES, ("move", "end")):
        try_to_become(old, new, how)


def try_to_become(old: str, new: Any, how: str) -> None:
    assert (new in TRANSITIONS[old]) is ((old, new) in LEGAL)  # type: ignore[index]
    if how == "end" and new in UNFINISHED:
        return
    ledger = TaskStates(10)
    task = task_in(ledger, old)
    counts, remembered = dict(ledger.counts), list(ledger.remembered())
    change = partial(ledger.move, task, new) if how == "move" else partial(ledger.end, task, new, Moment(2.0, 2.0))
    if (old, new) in LEGAL:
        change()
        assert task.status == new
    else:
        with pytest.raises(IllegalMove, match=f"cannot become {new}: it is {old}"):
            change()
        assert task.status == old
        assert ledger.counts == counts
        assert list(ledger.remembered()) == remembered


@pytest.mark.parametrize("seed", range(10))
def test_t50_the_ledger_counts_remembers_and_holds_as_told(seed: int, scale: float) -> None:
    for walk in range(int(3 + 60 * scale)):
        Walk(random.Random(f"{seed} {walk}")).run(150)


class Walk:
    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        keep = chance.choice((0, 1, 3, 10))
        self.former: list[TaskRecord] = []
        self.ledger, self.model = TaskStates(keep, self.former.__getitem__), LedgerModel(keep)
        self.now = 0.0
        self.number = 0
        self.counts = dict.fromkeys(TERMINAL, 0)

    def run(self, steps: int) -> None:
        for _ in range(steps):
            what = self.chance.choice(("submit", "submit", "move", "move", "end", "end", "pass", "load", "withdraw"))
            self.ledger.holder("nobody", self.now)  # so that it notices whose time is over
            self.model.settle(self.now)
            getattr(self, what if what != "pass" else "pass_time")()
            self.model.settle(self.now)
            self.check()

    def new(self) -> TaskRecord | None:
        """None: its key is held, so a submit returns the task that holds it."""
        chance = self.chance
        key = chance.choice((None, "k0", "k1", "k2"))
        if key is not None and self.ledger.holder(key, self.now) is not None:
            return None
        self.number += 1
        return record(self.number, terms=Terms(idempotency_key=key, window=chance.choice(WINDOWS)))

    def submit(self) -> None:
        if (task := self.new()) is not None:
            self.ledger.claim(task)
            self.model.tasks.append(task)

    def load(self) -> None:
        if (task := self.new()) is not None:
            status: Any = self.chance.choice(TERMINAL)
            task.ended = Moment(0.0, self.now - self.chance.choice((0.0, 1.0, 7.0)))
            moment, key = Moment(self.now, self.now), task.terms.idempotency_key
            by_key = False
            if key is not None and self.chance.random() < 0.5:
                place = Former(key, task.number, len(self.former))
                self.former.append(task)
                by_key = self.ledger.load_key(place, status, task.terms.window, task.ended.wall, moment)
                assert by_key is holds(task.terms.window, status, task.ended.wall, self.now)
                task.status = status
            if not by_key:
                self.ledger.load(task, status, moment)
            self.model.ended(task)
            self.model.tasks.append(task)
            self.counts[status] += 1

    def withdraw(self) -> None:
        queued = [task for task in self.model.tasks if task.status == "queued"]
        if queued:
            task = self.chance.choice(queued)
            self.ledger.withdraw(task)
            self.model.tasks.remove(task)

    def move(self) -> None:
        unfinished = [task for task in self.model.tasks if not task.finished]
        if unfinished:
            task = self.chance.choice(unfinished)
            self.ledger.move(task, "running" if task.status == "queued" else "queued")

    def end(self) -> None:
        unfinished = [task for task in self.model.tasks if not task.finished]
        if unfinished:
            task = self.chance.choice(unfinished)
            status: Any = self.chance.choice([new for old, new in sorted(LEGAL) if old == task.status])
            if status in TERMINAL:
                self.ledger.end(task, status, Moment(self.now, self.now))
                self.model.ended(task)
                self.counts[status] += 1

    def pass_time(self) -> None:
        self.now += self.chance.choice((0.1, 0.5, 1.0, 5.0))

    def check(self) -> None:
        ledger, model = self.ledger, self.model
        assert ledger.counts == self.counts
        assert ledger.holder("nobody", self.now) is None
        for key in ("k0", "k1", "k2"):
            if self.chance.random() < 0.5:  # asking for a former task makes its record
                assert ledger.holder(key, self.now) is model.holder(key, self.now)
        former = list(ledger.newest_former(1000))
        assert former == sorted(former, key=self.former.index, reverse=True)
        remembered = [*ledger.remembered(), *former]
        assert len(set(remembered)) == len(remembered), "each once"
        assert set(remembered) == {task for task in model.tasks if task.finished}
        assert remembered[: len(ledger.finished)] == model.idle


@pytest.mark.parametrize("window", WINDOWS)
def test_t14_a_key_is_held_as_the_table_says(window: Any) -> None:
    for status, ended, now in product(TERMINAL, (None, 0.0, 10.0), (0.0, 0.4, 0.5, 5.0, 10.0, 14.9, 15.0)):
        assert holds_key(window, status, ended, now) is holds(window, status, ended, now)


def test_t14_a_window_in_seconds_ends_to_the_moment() -> None:
    ledger = TaskStates(10)
    task = task_in(ledger, "completed", terms=Terms(idempotency_key="k", window=5.0))  # ended at 1
    assert ledger.holder("k", 5.9) is task
    assert ledger.holder("k", 6.0) is None
    assert list(ledger.remembered()) == [task]


def test_t14_who_holds_a_key_is_kept_beside_the_newest() -> None:
    ledger = TaskStates(2)
    holder = task_in(ledger, "completed", terms=Terms(idempotency_key="k"))
    rest = [task_in(ledger, "failed", number) for number in range(2, 6)]
    assert set(ledger.remembered()) == {holder, *rest[-2:]}


def test_t14_a_window_that_lapses_takes_nobody_elses_key() -> None:
    ledger = TaskStates(10)
    task_in(ledger, "completed", terms=Terms(idempotency_key="k", window=5.0))
    assert ledger.holder("k", 100.0) is None
    second = task_in(ledger, "running", 2, Terms(idempotency_key="k", window=5.0))
    assert ledger.holder("k", 200.0) is second
