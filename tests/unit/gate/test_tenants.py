"""The limits of tenants, against a naive model: a tenant is served only if no limit forbids it, and then at once."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Hashable
from typing import Any

import pytest

from headgate import fair_round_robin, fair_share, fifo, lifo, priority
from headgate.gate.queue import Queue
from headgate.gate.tenants import Caps, Rates, Tenants, Window
from headgate.gate.windows import Bucket, FixedWindow, SlidingWindow
from tests.unit.tasks.model import record

STRATEGIES = {
    "fifo": fifo(),
    "lifo": lifo(),
    "priority": priority(),
    "fair_round_robin": fair_round_robin(),
    "fair_share": fair_share(),
    "levels": fair_round_robin(levels=True),
}
TENANTS: tuple[Hashable, ...] = ("a", "b", "c", None)
WINDOWS: dict[Hashable, Callable[[], Window]] = {
    "a": lambda: SlidingWindow(3, 10.0),
    "b": lambda: Bucket(4, 10.0),
    "c": lambda: FixedWindow(2, 10.0, burst=2),
}


class Model:
    """What the limits say, worked out anew each time."""

    def __init__(self) -> None:
        self.caps: dict[Hashable, int] | int | None = None
        self.paused: set[Hashable] = set()
        self.running: list[Any] = []
        self.chosen: list[Any] = []  # have a slot, and do not run yet
        self.waiting: list[Any] = []
        self.windows: dict[Hashable, Window] = {}  # never forgotten
        self.now = 0.0

    def forbids(self, tenant: Hashable) -> list[str]:
        """All that keeps this tenant from starting a task."""
        if tenant is None:
            return []
        why = ["paused"] if tenant in self.paused else []
        cap = self.caps.get(tenant) if isinstance(self.caps, dict) else self.caps
        if cap is not None and Counter(task.partition for task in (*self.running, *self.chosen))[tenant] >= cap:
            why.append("max_concurrent_per_key")
        if tenant in self.windows and self.windows[tenant].room(self.now) < 1.0 - 1e-6:
            why.append("rate_per_tenant")
        return why


class Walk:
    """Random steps of the real thing and of the model."""

    def __init__(self, kind: str, seed: int) -> None:
        self.chance = random.Random(seed)
        self.queue = Queue(STRATEGIES[kind].order)
        self.tenants = Tenants(self.queue)
        self.model = Model()
        self.number = 0
        self.woken_at: list[float] = []
        rated = self.chance.sample(TENANTS[:3], k=self.chance.randrange(4))
        self.model.windows = {tenant: WINDOWS[tenant]() for tenant in rated}
        self.tenants.rates = Rates(lambda tenant: WINDOWS[tenant]() if tenant in rated else None, self.wake_at)

    def step(self) -> None:
        often = ["push"] * 4 + ["serve"] * 5 + ["begin"] * 4 + ["end"] * 3 + ["pass_time"] * 2
        what = self.chance.choice([*often, "requeue", "caps", "pause", "resume", "turn_back"])
        getattr(self, what)()
        self.check()

    def wake_at(self, at: float) -> None:
        self.woken_at.append(at)

    def pass_time(self) -> None:
        until = self.model.now + self.chance.choice([0.001, 0.5, 3.0, 20.0])
        rates = self.tenants.rates
        assert rates is not None
        while (at := rates.next_at()) is not None and at <= until:
            assert min(self.woken_at) <= at, "nobody was told to look at this time"
            self.woken_at = [one for one in self.woken_at if one > at] + [math.inf]
            self.model.now = max(self.model.now, at)
            self.tenants.due(self.model.now)
            self.check()
            if (at := rates.next_at()) is not None:
                self.woken_at.append(at)  # whoever looks asks for the next time
        self.model.now = until

    def push(self) -> None:
        self.number += 1
        task = record(self.number, self.chance.choice(TENANTS), self.chance.randrange(3))
        self.queue.push(task)
        self.model.waiting.append(task)

    def serve(self) -> None:
        free = [task for task in self.model.waiting if not self.model.forbids(task.partition)]
        task = self.queue.pop()
        assert (task is None) is (not free), "no work waits while everything it needs is free"
        if task is not None:
            assert task in free, f"{task.partition} is served although {self.model.forbids(task.partition)}"
            self.model.waiting.remove(task)
            self.model.chosen.append(task)
            self.tenants.took(task.partition)
            self.tenants.chosen(task.partition, self.model.now)
            if (window := self.model.windows.get(task.partition)) is not None:
                window.hold(1.0, self.model.now)
            if task.partition == "c":
                self.begin(-1)  # a fixed window remembers when it was taken from, also if that was given back

    def begin(self, which: int | None = None) -> None:
        """Run a task that was chosen, in the same moment or later."""
        if self.model.chosen:
            task = self.model.chosen.pop(self.chance.randrange(len(self.model.chosen)) if which is None else which)
            self.model.running.append(task)
            self.tenants.began(task.partition, self.model.now)
            if (window := self.model.windows.get(task.partition)) is not None:
                window.give_back(1.0, self.model.now)
                window.hold(1.0, self.model.now)
                window.held -= 1.0
                window.count(1.0, self.model.now, self.model.now)

    def turn_back(self) -> None:
        """Put a task back that was chosen and cannot run."""
        if self.model.chosen:
            task = self.model.chosen.pop()
            self.tenants.gave(task.partition)
            self.tenants.not_begun(task.partition, self.model.now)
            if (window := self.model.windows.get(task.partition)) is not None:
                window.give_back(1.0, self.model.now)
            self.queue.push_front(task)
            self.model.waiting.append(task)

    def end(self) -> Any | None:
        if not self.model.running:
            return None
        task = self.model.running.pop(self.chance.randrange(len(self.model.running)))
        self.tenants.gave(task.partition)
        return task

    def requeue(self) -> None:
        if (task := self.end()) is not None:
            self.queue.push_front(task)
            self.model.waiting.append(task)

    def caps(self) -> None:
        self.model.caps = self.chance.choice([None, 1, 2, {"a": 1}, {"a": 2, "b": 1}])
        active = [task.partition for task in (*self.model.running, *self.model.chosen)]
        self.tenants.set_caps(None if self.model.caps is None else Caps(self.model.caps, active))

    def pause(self) -> None:
        tenant = self.chance.choice(TENANTS[:3])
        assert self.tenants.set_paused(tenant, True) is (tenant not in self.model.paused)
        self.model.paused.add(tenant)

    def resume(self) -> None:
        tenant = self.chance.choice(TENANTS[:3])
        assert self.tenants.set_paused(tenant, False) is (tenant in self.model.paused)
        self.model.paused.discard(tenant)

    def check(self) -> None:
        causes = self.tenants.causes()
        for tenant in TENANTS:
            why = self.model.forbids(tenant)
            assert self.tenants.is_closed(tenant) is bool(why)
            is_queued = any(task.partition == tenant for task in self.model.waiting)
            named = [cause for cause, tenants in causes.items() if tenant in tenants]
            assert len(named) == (1 if why and is_queued else 0)
            assert set(named) <= set(why)


@pytest.mark.parametrize("kind", STRATEGIES)
def test_l03_l05_t24_a_tenant_is_served_if_and_only_if_no_limit_forbids_it(kind: str, scale: float) -> None:
    for seed in range(int(5 + 60 * scale)):
        walk = Walk(kind, seed)
        for _ in range(300):
            walk.step()


def test_l05_limits_that_are_gone_leave_nothing() -> None:
    tenants = Tenants(Queue(fifo().order))
    assert not tenants
    tenants.set_paused("a", True)
    tenants.set_caps(Caps(1))
    assert tenants
    tenants.took("b")
    tenants.set_caps(None)
    tenants.set_paused("a", False)
    assert not tenants
    assert not tenants.is_closed("b")


def test_l03_windows_of_tenants_that_come_and_go_are_forgotten() -> None:
    rates = Rates(lambda _: SlidingWindow(2, 10.0), lambda _: None)
    now, most = 0.0, 0
    for number in range(20_000):
        now += 0.01
        rates.due(now)
        rates.hold(number, now)
        rates.began(number, now)
        most = max(most, len(rates))
    assert 1_000 <= most <= 1_200, "as many as had a start within the last ten seconds"
    rates.due(now + 11.0)
    assert len(rates) == 0
    assert rates.next_at() is None


def test_l03_a_busy_tenant_leaves_no_trail() -> None:
    """Its window of a day opens again and again, and is looked at again each time."""
    rates = Rates(lambda _: SlidingWindow(8_640_000, 86_400.0, burst=1), lambda _: None)
    now = 0.0
    for _ in range(20_000):
        while (at := rates.next_at()) is not None and rates.is_closed("a"):
            now = at
            rates.due(now)
        rates.hold("a", now)
        rates.began("a", now)
    assert len(rates._heap) <= 70
