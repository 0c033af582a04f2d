"""The SlotBudget port: how many slots a pool may hand out."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from headgate import TaskPool
from headgate.tasks.runtime.local_launcher import LocalLauncher
from headgate.tasks.runtime.ports import Ports
from headgate.tasks.scheduling.budget import LocalBudget, SlotBudget
from headgate.testing import check_slot_budget, settle, virtual
from tests.support.tasks.support import Gate


class Central:
    """A budget that somebody else changes while the pool runs. Remembers what it was told."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.changed: Callable[[int], None] = lambda limit: None

    def on_change(self, changed: Callable[[int], None]) -> None:
        self.changed = changed

    def resize(self, limit: int) -> None:
        self.limit = limit
        self.changed(limit)


def pool_with(budget: SlotBudget, **options: object) -> TaskPool:
    return TaskPool(runner=Ports(LocalLauncher(), budget=budget), **options)  # type: ignore[arg-type]


def counts(pool: TaskPool) -> tuple[int, int]:
    """How many tasks are active, and how many are queued."""
    snapshot = pool.snapshot(0)
    return snapshot.active, snapshot.queued


@virtual
async def test_t03_a_lower_limit_lets_the_running_run_and_hands_out_no_slot_above_it() -> None:
    budget, gates = Central(3), [Gate() for _ in range(6)]
    async with pool_with(budget, max_concurrent=99) as pool:
        for gate in gates:
            await pool.submit(gate.wait)
        assert counts(pool) == (3, 3)
        budget.resize(1)
        await settle()
        assert (counts(pool), pool.max_concurrent) == ((3, 3), 1)
        for number, expected in enumerate([(2, 3), (1, 3), (1, 2), (1, 1)]):
            gates[number].open()
            await settle()
            assert counts(pool) == expected
        gates[4].open()
        gates[5].open()


@virtual
async def test_t03_a_higher_limit_starts_queued_tasks_at_once() -> None:
    budget, gate = Central(0), Gate()
    async with pool_with(budget) as pool:
        for _ in range(4):
            await pool.submit(gate.wait)
        assert counts(pool) == (0, 4)
        budget.resize(3)
        assert counts(pool) == (3, 1), "without a turn of the loop"
        await settle()
        assert gate.entered == 3
        budget.resize(0)
        gate.open()
        await settle()
        assert counts(pool) == (0, 1)
        pool.resize(1)  # the pool asks its budget
        assert (budget.limit, counts(pool)) == (1, (1, 0))


# -- the check that ships ----------------------------------------------------------------------------------------------


def test_t03_the_local_budget_keeps_the_contract() -> None:
    check_slot_budget(LocalBudget)


class Silent(Central):
    """Does not tell the pool that its limit has changed."""

    def resize(self, limit: int) -> None:
        self.limit = limit


class Wrong(Central):
    """Tells another limit than it has."""

    def resize(self, limit: int) -> None:
        self.limit = limit
        self.changed(limit + 1)


@pytest.mark.parametrize(("kind", "complaint"), [(Silent, "was not told"), (Wrong, "the budget said 4")])
def test_t03_the_check_tells_of_a_budget_that_breaks_the_contract(kind: type[Central], complaint: str) -> None:
    with pytest.raises(AssertionError, match=complaint):
        check_slot_budget(kind)
