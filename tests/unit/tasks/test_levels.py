"""L01: levels above tenants, through the pool."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from headgate import TaskPool, fair_round_robin, fair_share
from headgate.errors import InvalidArgument
from headgate.testing import virtual


async def order_of(queue: Any, asked: list[tuple[str, int]], **options: Any) -> list[tuple[str, int]]:
    """Submit behind a gate; return the order in which tasks started."""
    started: list[tuple[str, int]] = []

    async def note(tenant: str, priority: int) -> None:
        started.append((tenant, priority))

    async with TaskPool(queue=queue, **options) as pool:
        gate = asyncio.Event()
        await pool.submit(gate.wait)
        for tenant, priority in asked:
            await pool.submit(note, tenant, priority, tenant_id=tenant, priority=priority)
        gate.set()
    return started


@pytest.mark.parametrize("make", [fair_round_robin, fair_share])
@virtual
async def test_l01_a_higher_priority_starts_first_and_tenants_take_turns_at_each_level(make: Any) -> None:
    asked = [("a", 0), ("a", 0), ("b", 0), ("a", 5), ("a", 5), ("b", 5), ("c", 0)]
    assert await order_of(make("tenant_id", levels=True), asked) == [
        *[("a", 5), ("b", 5), ("a", 5)],
        *[("a", 0), ("b", 0), ("c", 0), ("a", 0)],
    ]


@virtual
async def test_l01_a_low_level_waits_as_long_as_there_is_a_higher_one() -> None:
    started: list[int] = []

    async def again(number: int) -> None:
        started.append(number)
        if number < 50:
            await pool.submit(again, number + 1, tenant_id="a", priority=1)

    async def low() -> None:
        started.append(-1)

    async with TaskPool(queue=fair_round_robin("tenant_id", levels=True)) as pool:
        await pool.submit(again, 0, tenant_id="a", priority=1)
        await pool.submit(low, tenant_id="b")
    assert started == [*range(51), -1]


@virtual
async def test_l01_weights_count_inside_a_level() -> None:
    queue = fair_share("tenant_id", weights={"gold": 3.0}, levels=True)
    asked = [(tenant, level) for level in (0, 1) for tenant in ("gold", "lead") for _ in range(40)]
    started = await order_of(queue, asked)
    assert [level for _, level in started] == [1] * 80 + [0] * 80
    for first in (started[:40], started[80:120]):
        assert 29 <= sum(tenant == "gold" for tenant, _ in first) <= 31


@virtual
async def test_l01_a_cap_counts_what_a_tenant_runs_at_all_levels() -> None:
    most = running = 0

    async def work() -> None:
        nonlocal most, running
        running += 1
        most = max(most, running)
        await asyncio.sleep(1)
        running -= 1

    async with TaskPool(
        max_concurrent=8, queue=fair_round_robin("tenant_id", levels=True), max_concurrent_per_key=2
    ) as pool:
        for number in range(12):
            await pool.submit(work, tenant_id="a", priority=number % 3)
    assert most == 2


@virtual
async def test_l01_the_snapshot_shows_levels_only_where_there_are_some() -> None:
    for make in (fair_round_robin, fair_share):
        async with TaskPool(queue=make("tenant_id", levels=True)) as pool:
            assert pool.snapshot().queue["levels"] is True
        async with TaskPool(queue=make("tenant_id")) as pool:
            assert "levels" not in pool.snapshot().queue
    async with TaskPool(queue={"kind": "fair_round_robin", "key": "tenant_id", "levels": True}) as pool:
        assert pool.snapshot().queue == {"kind": "fair_round_robin", "key": "tenant_id", "levels": True}


@pytest.mark.parametrize("make", [fair_round_robin, fair_share])
@virtual
async def test_l01_without_levels_priority_is_ignored_and_one_hint_says_so(
    make: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "headgate.tasks"):
        asked = [("a", 0), ("a", 9), ("b", 9), ("b", 0)]
        assert await order_of(make("tenant_id"), asked, name="plain") == [("a", 0), ("b", 9), ("a", 9), ("b", 0)]
    (said,) = [one.getMessage() for one in caplog.records]
    assert said == (
        f"plain: priority= has no effect with {make.__name__}('tenant_id'); {make.__name__}('tenant_id', levels=True) "
        "starts tasks of a higher priority first"
    )


@virtual
async def test_l01_with_levels_or_without_priorities_nothing_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "headgate.tasks"):
        await order_of(fair_round_robin("tenant_id", levels=True), [("a", 1)])
        await order_of(fair_round_robin("tenant_id"), [("a", 0)])
    assert not caplog.records


def test_l01_levels_is_a_flag() -> None:
    for make in (fair_round_robin, fair_share):
        with pytest.raises(InvalidArgument, match="levels must be True or False, got 1"):
            make("tenant_id", levels=1)
