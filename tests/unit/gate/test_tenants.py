"""The limits of tenants, against a naive model: a tenant is served only if no limit forbids it, and then at once."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Hashable
from typing import Any

import pytest

from headgate import fair_round_robin, fair_share, fifo, lifo, priority
from headgate.gate.queue import Queue
from headgate.gate.tenants import Caps, Tenants
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


class Model:
    """What the limits say, worked out anew each time."""

    def __init__(self) -> None:
        self.caps: dict[Hashable, int] | int | None = None
        self.paused: set[Hashable] = set()
        self.running: list[Any] = []
        self.waiting: list[Any] = []

    def forbids(self, tenant: Hashable) -> list[str]:
        """All that keeps this tenant from starting a task."""
        if tenant is None:
            return []
        why = ["paused"] if tenant in self.paused else []
        cap = self.caps.get(tenant) if isinstance(self.caps, dict) else self.caps
        if cap is not None and Counter(task.partition for task in self.running)[tenant] >= cap:
            why.append("max_concurrent_per_key")
        return why


class Walk:
    """Random steps of the real thing and of the model."""

    def __init__(self, kind: str, seed: int) -> None:
        self.chance = random.Random(seed)
        self.queue = Queue(STRATEGIES[kind].order)
        self.tenants = Tenants(self.queue)
        self.model = Model()
        self.number = 0

    def step(self) -> None:
        what = self.chance.choice(["push"] * 4 + ["serve"] * 5 + ["end"] * 3 + ["requeue", "caps", "pause", "resume"])
        getattr(self, what)()
        self.check()

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
            self.model.running.append(task)
            self.tenants.took(task.partition)

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
        active = [task.partition for task in self.model.running]
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
def test_l05_t24_a_tenant_is_served_if_and_only_if_no_limit_forbids_it(kind: str, scale: float) -> None:
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
