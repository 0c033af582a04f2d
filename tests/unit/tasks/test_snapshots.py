"""T50, T51: how a pool stands, and how fair it has been."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from headgate import (
    InvalidArgument,
    InvalidType,
    TaskPool,
    backpressure_queue,
    fair_round_robin,
    fair_share,
    pool_wait,
    ring_buffer,
    subscribe,
)
from headgate.testing import settle, virtual
from tests.support.tasks.support import AUDIT, Gate, Turns, broken, counts, ids, quick, slow

FIELDS = {
    "_type",
    "id",
    "name",
    "scope",
    "max_concurrent",
    "active",
    "waiting",
    "queued",
    "completed",
    "failed",
    "rejected",
    "cancelled",
    "expired",
    "stale",
    "blocked_submitters",
    "total",
    "queue",
    "backpressure",
    "config",
    "waiting_for",
    "tasks",
}
SUMMED = ("active", "waiting", "queued", "completed", "failed", "rejected", "cancelled", "expired", "stale")


@virtual
async def test_t50_a_snapshot_has_every_field() -> None:
    async with TaskPool(
        "shown", max_concurrent=3, queue=fair_round_robin("tenant_id"), backpressure=backpressure_queue(9)
    ) as pool:
        shown = pool.snapshot()
        assert set(shown) >= FIELDS
        assert (shown._type, shown.id, shown.name, shown.scope) == ("pool", pool.id, "shown", "session")
        assert shown.max_concurrent == 3
        assert shown.queue == {"kind": "fair_round_robin", "key": "tenant_id"}
        assert shown.backpressure == {"kind": "queue", "max_depth": 9, "on_full": "block_submitter"}
        assert [shown[name] for name in (*SUMMED, "blocked_submitters", "total")] == [0] * 11
        assert list(shown.tasks) == []
        assert shown.waiting_for is None


@virtual
async def test_t50_config_is_as_it_was_given() -> None:
    async with TaskPool("given", max_concurrent=3, queue="fifo", keep=7, stale_after=12) as pool:
        pool.resize(5)
        config = pool.snapshot().config
        assert pool.snapshot().max_concurrent == 5
    assert (config["name"], config["max_concurrent"], config["keep"], config["stale_after"]) == ("given", 3, 7, 12)
    assert (config["scope"], config["pipeline_id"]) == ("session", None)
    assert "fifo" in str(config["queue"])
    async with TaskPool() as pool:
        assert pool.snapshot().config["name"] is None


@virtual
async def test_t50_every_counter() -> None:
    async with TaskPool(max_concurrent=2, backpressure=ring_buffer(2)) as pool:
        gate = Gate()

        async def parent() -> Any:
            return await (await pool.submit(gate.wait, "child"))

        await pool.submit(parent)
        await settle()
        running = await pool.submit(slow, 60)
        await pool.submit(quick)  # to be rejected
        await pool.submit(quick, ttl=1)
        failing = await pool.submit(broken)
        await asyncio.sleep(2)
        assert counts(pool) == {"active": 2, "waiting": 1, "queued": 1, "rejected": 1, "expired": 1}
        assert pool.size() == 4
        running.cancel()
        await pool_wait(failing)
        await pool.submit(slow, 5)
        await settle()
        shown = pool.snapshot()
        assert [shown[name] for name in SUMMED] == [2, 1, 0, 0, 1, 1, 1, 1, 0]
        assert shown.total == sum(shown[name] for name in SUMMED) == 7
        gate.open()
    shown = pool.snapshot()
    assert (shown.completed, shown.total, pool.size()) == (3, 7, 0)


@virtual
async def test_t50_blocked_submitters_are_counted_and_are_not_in_the_total() -> None:
    async with TaskPool(backpressure=backpressure_queue(1)) as pool:
        for _ in range(2):
            await pool.submit(slow, 1)
        parked = [asyncio.create_task(pool.submit(quick)) for _ in range(3)]
        await settle()
        assert pool.snapshot().blocked_submitters == 3
        assert pool.snapshot().total == pool.size() == 2
        await asyncio.gather(*parked)
        assert pool.snapshot().blocked_submitters == 0


@virtual
async def test_t50_tasks_are_newest_first_and_limited() -> None:
    async with TaskPool() as pool:
        handles = [await pool.submit(quick, n) for n in range(30)]
        newest = list(reversed(ids(handles)))
        assert [task.id for task in pool.snapshot().tasks] == newest
        await pool.drain()
        assert [task.id for task in pool.snapshot().tasks] == newest
        assert [task.id for task in pool.snapshot(tasks=5).tasks] == newest[:5]
        assert list(pool.snapshot(tasks=0).tasks) == []
        assert pool.snapshot(tasks=0).total == 30
        assert {task._type for task in pool.snapshot().tasks} == {"pool_task"}


@virtual
async def test_t50_a_thousand_tasks_are_shown_by_default() -> None:
    async with TaskPool() as pool:
        for _ in range(1100):
            await pool.submit(quick)
        assert len(pool.snapshot().tasks) == 1000
        assert pool.snapshot().total == 1100


@pytest.mark.parametrize("bad", [-1, 1.5, "all", True, None])
@virtual
async def test_t50_tasks_is_checked(bad: Any) -> None:
    async with TaskPool() as pool:
        with pytest.raises((InvalidArgument, InvalidType), match="tasks"):
            pool.snapshot(tasks=bad)


@pytest.mark.parametrize("keep", [0, 1, 5])
@virtual
async def test_t50_terminal_records_are_kept_to_keep(keep: int) -> None:
    async with TaskPool(keep=keep) as pool:
        handles = [await pool.submit(quick if n % 2 else broken) for n in range(20)]
        await pool.drain()
        shown = pool.snapshot()
        assert len(shown.tasks) == keep
        assert (shown.completed, shown.failed, shown.total) == (10, 10, 20)
        assert handles[1].status == "completed"  # a handle outlives its record
        assert await handles[1] == "done"
        with pytest.raises(LookupError):
            await handles[0]
        running = [await pool.submit(slow, 1) for _ in range(9)]
        assert len(pool.snapshot().tasks) == 9 + keep  # what is unfinished is not history
        await asyncio.gather(*running)


@virtual
async def test_t50_a_snapshot_is_frozen_and_answers_as_attributes() -> None:
    async with TaskPool("frozen") as pool:
        shown = pool.snapshot()
        assert shown["name"] == shown.name == "frozen"
        with pytest.raises(AttributeError):
            shown.active = 5
        with pytest.raises(TypeError):
            shown["active"] = 5  # type: ignore[index]
        await pool.submit(quick)
        assert shown.active == 0
        assert pool.snapshot().active == 1


@virtual
async def test_t50_what_is_changed_in_a_snapshot_is_not_changed_in_the_pool() -> None:
    async with TaskPool("safe", max_concurrent_per_key={"a": 1}) as pool:
        shown = pool.snapshot()
        for field in ("config", "queue", "backpressure"):
            try:
                shown[field]["kind"] = "changed"
            except TypeError:
                continue
        assert pool.snapshot().queue == {"kind": "priority"}
        assert pool.snapshot().config.get("kind") is None


@virtual
async def test_t50_nothing_is_waited_for_while_slots_are_simply_full() -> None:
    async with TaskPool() as pool:
        assert pool.snapshot().waiting_for is None
        await pool.submit(slow, 1)
        await pool.submit(slow, 1)
        await pool.drain()
        assert pool.snapshot().waiting_for is None


@virtual
async def test_t50_waiting_for_tells_cause_and_seconds() -> None:
    async with TaskPool(max_concurrent=2, max_concurrent_per_key=1) as pool:
        await pool.submit(quick, delay=30)
        await pool.submit(quick, delay=20)
        await asyncio.sleep(5)
        waiting_for = pool.snapshot().waiting_for
        assert set(waiting_for) == {"cause", "seconds"}
        assert waiting_for["seconds"] == 15
        assert isinstance(waiting_for["cause"], str)
        await asyncio.sleep(50)
        await pool.submit(slow, 1, key="a")
        await pool.submit(slow, 1, key="a")
        waiting_for = pool.snapshot().waiting_for
        assert "key" in waiting_for["cause"]


@virtual
async def test_t50_counters_add_up_at_every_event() -> None:
    """Whoever looks from a listener sees each task exactly once."""
    async with TaskPool() as pool:
        seen: list[tuple[str, int, int]] = []

        def look(event: Any) -> None:
            if event.name != "pool_submit":
                seen.append((event.name, pool.snapshot(0).total, pool.size()))

        unsubscribe = subscribe(look, AUDIT)
        await (await pool.submit(quick))
        unsubscribe()
    assert seen == [("pool_dequeue", 1, 1), ("pool_finish", 1, 0)]


def test_t50_a_pool_tells_its_state() -> None:
    @virtual
    async def check() -> None:
        async with TaskPool("told", max_concurrent=2) as pool:
            for _ in range(5):
                await pool.submit(slow, 1)
            assert "told" in repr(pool)
            assert "2" in repr(pool)
            assert "3 queued" in repr(pool)

    check()


# -- T51 ---------------------------------------------------------------------------------


@virtual
async def test_t51_nothing_has_happened_yet() -> None:
    async with TaskPool() as pool:
        stats = pool.stats()
        assert stats.jain == 1.0
        assert list(stats.keys) == []
        assert stats.worst is None


@virtual
async def test_t51_queue_age_per_key() -> None:
    async with TaskPool(queue="fifo") as pool:
        for key in "ab":
            for _ in range(10):
                await pool.submit(slow, 1, key=key)
        await pool.drain()
        ages = {age.key: age for age in pool.stats().keys}
        assert (ages["a"].count, ages["b"].count) == (10, 10)
        assert ages["a"].p50 == pytest.approx(4.5, abs=0.5)
        assert ages["a"].p99 == 9
        assert ages["b"].p50 == pytest.approx(14.5, abs=0.5)
        assert ages["b"].p99 == 19
        assert ages["a"].lag == 0


@virtual
async def test_t51_the_worst_key_and_its_lag() -> None:
    async with TaskPool(queue="lifo") as pool:
        gate = Gate()
        await pool.submit(gate.wait)
        await pool.submit(quick, key="forgotten")
        await asyncio.sleep(30)
        await pool.submit(quick, key="recent")
        await asyncio.sleep(2)
        stats = pool.stats()
        assert stats.worst is not None
        assert (stats.worst.key, stats.worst.lag) == ("forgotten", 32)
        assert {age.key: age.lag for age in stats.keys if age.key} == {"forgotten": 32, "recent": 2}
        gate.open()


@virtual
async def test_t51_costs_that_cannot_be_added_up_leave_the_tasks_alone() -> None:
    async with TaskPool("huge", max_concurrent=1, queue=fair_share("tenant_id")) as pool:
        handles = [await pool.submit(asyncio.sleep, 0, tenant_id=f"t{n % 3}", cost=1e200) for n in range(12)]
        assert [await handle for handle in handles] == [None] * 12
        assert pool.stats().jain == 1.0


@pytest.mark.parametrize(("queue", "fair"), [("fair_round_robin", True), ("fifo", False)])
@virtual
async def test_t51_jains_index_tells_fair_from_unfair(queue: str, fair: bool) -> None:
    async with TaskPool(queue=queue) as pool:
        gate, turns = Gate(), Turns()
        await pool.submit(gate.wait)
        for _ in range(200):
            await pool.submit(turns.take, "flood", key="flood")
        for number in range(10):
            await pool.submit(turns.take, number, key=f"small-{number}")
        gate.open()
        await pool.drain()
        assert (pool.stats().jain >= 0.99) == fair
        assert 0 < pool.stats().jain <= 1
