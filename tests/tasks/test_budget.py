"""The SlotBudget port: how many slots a pool may hand out, and to which tenants."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Hashable

import pytest

from headgate import PoolBusy, TaskPool
from headgate.tasks.runtime.local_launcher import LocalLauncher
from headgate.tasks.runtime.ports import Ports
from headgate.tasks.scheduling.budget import LocalBudget, SlotBudget
from headgate.testing import check_slot_budget, settle, virtual
from tests.tasks.support import EVERY_STRATEGY, Gate


class Central:
    """A budget that somebody else changes while the pool runs. Remembers what it was told."""

    def __init__(self, limit: int, *, by_tenant: bool = False) -> None:
        self.limit = limit
        self.by_tenant = by_tenant
        self.grants: dict[Hashable, int] = {}
        self.queued: dict[Hashable, int] = {}
        self.active: Counter[Hashable] = Counter()
        self.changed: Callable[[int], None] = lambda limit: None

    def on_change(self, changed: Callable[[int], None]) -> None:
        self.changed = changed

    def resize(self, limit: int) -> None:
        self.limit = limit
        self.changed(limit)

    def grant(self, **grants: int) -> None:
        self.grants.update(grants)
        self.changed(self.limit)

    def want(self, tenant: Hashable, queued: int) -> None:
        self.queued[tenant] = queued

    def granted(self, tenant: Hashable) -> int:
        return self.grants.get(tenant, 0)

    def started(self, tenant: Hashable) -> None:
        self.active[tenant] += 1

    def ended(self, tenant: Hashable) -> None:
        self.active[tenant] -= 1


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


@virtual
async def test_t03_a_budget_that_does_not_differ_between_tenants_hears_of_no_task() -> None:
    budget = Central(2)
    async with pool_with(budget, queue="fair_round_robin") as pool:
        for tenant in ("ann", "bob", "ann"):
            await pool.submit(asyncio.sleep, 1, key=tenant)
    assert (budget.queued, budget.active) == ({}, {})


@pytest.mark.parametrize("strategy", EVERY_STRATEGY)
@virtual
async def test_t03_slots_go_to_the_tenants_that_have_grants(strategy: str) -> None:
    budget, gates = Central(3, by_tenant=True), {name: Gate() for name in ("ann", "bob")}
    async with pool_with(budget, queue=strategy) as pool:
        for tenant in ("ann", "ann", "bob", "bob"):
            await pool.submit(gates[tenant].wait, key=tenant)
        await settle()
        assert (counts(pool), budget.queued) == ((0, 4), {"ann": 2, "bob": 2})
        budget.grant(bob=1)
        await settle()
        assert (gates["ann"].entered, gates["bob"].entered) == (0, 1)
        assert (budget.queued, budget.active) == ({"ann": 2, "bob": 1}, {"bob": 1})
        budget.grant(ann=9, bob=2)
        await settle()
        assert counts(pool) == (3, 1), "no more than the limit, whatever is granted"
        pool.limit_keys(1)  # counts again what runs: the budget hears nothing of that
        assert budget.active.total() == 3
        for gate in gates.values():
            gate.open()
    assert (budget.queued, budget.active.total()) == ({"ann": 0, "bob": 0}, 0)


@virtual
async def test_t03_a_grant_that_is_taken_back_stops_nobody_and_starts_nobody() -> None:
    budget, gates = Central(5, by_tenant=True), [Gate() for _ in range(3)]
    budget.grants["ann"] = 2
    async with pool_with(budget, queue="fair_share", max_concurrent_per_key={"ann": 9}) as pool:
        for gate in gates:
            await pool.submit(gate.wait, key="ann")
        budget.grant(ann=0)
        gates[0].open()
        await settle()
        assert (counts(pool), budget.active["ann"]) == ((1, 1), 1)
        without = await pool.submit(asyncio.sleep, 0, "done")
        assert await without == "done", "a task without a tenant is limited by the whole budget only"
        budget.grant(ann=2)
        assert counts(pool) == (2, 0)
        for gate in gates:
            gate.open()


@virtual
async def test_t03_a_tenant_without_a_grant_is_busy_where_nothing_may_queue() -> None:
    budget = Central(5, by_tenant=True)
    async with pool_with(budget, queue="fair_share", backpressure="fail_fast") as pool:
        with pytest.raises(PoolBusy, match="the key 'ann' is at its cap"):
            await pool.submit(asyncio.sleep, 0, key="ann")


@virtual
async def test_t03_the_slot_of_a_task_that_waits_is_given_back_to_the_budget() -> None:
    budget = Central(1, by_tenant=True)
    budget.grants.update(ann=1)

    async def outer() -> str:
        inner = await pool.submit(asyncio.sleep, 1, "inner", key="ann")
        assert budget.active["ann"] == 1
        return await inner

    async with pool_with(budget, queue="fair_share") as pool:
        assert await (await pool.submit(outer, key="ann")) == "inner"
    assert (budget.active["ann"], budget.queued["ann"]) == (0, 0)


# -- the check that ships ----------------------------------------------------------------------------------------------


def test_t03_the_local_budget_keeps_the_contract() -> None:
    check_slot_budget(LocalBudget)


def generous(limit: int) -> Central:
    """A budget that differs between tenants, and gives each of them all."""
    budget = Central(limit, by_tenant=True)
    budget.grants.update(ann=9, bob=9, eve=9)
    return budget


def test_t03_a_budget_by_tenant_keeps_the_contract() -> None:
    check_slot_budget(generous)


class Silent(Central):
    """Does not tell the pool that its limit has changed."""

    def resize(self, limit: int) -> None:
        self.limit = limit


class Hasty(Central):
    """Changes from inside a call of the scheduler."""

    def ended(self, tenant: Hashable) -> None:
        super().ended(tenant)
        self.changed(self.limit)


class Wrong(Central):
    """Tells another limit than it has."""

    def resize(self, limit: int) -> None:
        self.limit = limit
        self.changed(limit + 1)


@pytest.mark.parametrize(
    ("kind", "complaint"), [(Silent, "was not told"), (Hasty, r"from inside ended\(\)"), (Wrong, "the budget said 4")]
)
def test_t03_the_check_tells_of_a_budget_that_breaks_the_contract(kind: type[Central], complaint: str) -> None:
    def make(limit: int) -> Central:
        budget = kind(limit, by_tenant=True)
        budget.grants.update(ann=9, bob=9, eve=9)
        return budget

    with pytest.raises(AssertionError, match=complaint):
        check_slot_budget(make)
