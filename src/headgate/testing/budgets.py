"""Checks whether a budget keeps the contract of `SlotBudget`, for budgets of your own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from headgate.tasks.pool import TaskPool
from headgate.tasks.runtime.local_launcher import LocalLauncher
from headgate.tasks.runtime.ports import Ports
from headgate.tasks.scheduling.budget import SlotBudget

_LIMITS: Final = (3, 1, 4, 2)
_TENANTS: Final = ("ann", "bob", "eve")
_TASKS: Final = 24
_PATIENCE: Final = 30.0  # real seconds until tasks that do not start are a failure


def check_slot_budget(make: Callable[[int], SlotBudget]) -> None:
    """Run a pool with budgets that `make(limit)` returns; AssertionError at the first thing that breaks the contract.

    Call it outside of an event loop.
    """
    for limit in _LIMITS:
        budget = make(limit)
        assert budget.limit >= 0, f"limit must be 0 or more, got {budget.limit}"
        asyncio.run(_use(_Watched(budget)))


async def _use(budget: _Watched) -> None:
    pool = TaskPool(queue="fair_round_robin", runner=Ports(LocalLauncher(), budget=budget))
    async with pool:
        async with asyncio.timeout(_PATIENCE):
            for number in range(_TASKS):
                _ = await pool.submit(asyncio.sleep, 0, key=_TENANTS[number % len(_TENANTS)])
            for limit in _LIMITS:
                pool.resize(limit)
                await asyncio.sleep(0)
            await pool.drain()
    assert pool.max_concurrent == budget.limit, "a limit that has changed was not told to the pool"


class _Watched:
    """A budget that passes everything on to another, and looks whether that keeps the contract."""

    def __init__(self, budget: SlotBudget) -> None:
        self._budget = budget

    @property
    def limit(self) -> int:
        return self._budget.limit

    def on_change(self, changed: Callable[[int], None]) -> None:
        loop = asyncio.get_running_loop()

        def checked(limit: int) -> None:
            assert asyncio.get_running_loop() is loop, "the budget said that it has changed, not on the pool's loop"
            assert limit == self._budget.limit, f"the budget said {limit}, and its limit is {self._budget.limit}"
            assert limit >= 0, f"limit must be 0 or more, got {limit}"
            changed(limit)

        self._budget.on_change(checked)

    def resize(self, limit: int) -> None:
        self._budget.resize(limit)
