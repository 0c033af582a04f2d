"""R70, R71-R74, R37, R08: looking at a pool and steering it."""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from headgate import (
    CooldownResource,
    DisableResource,
    InvalidArgument,
    InvalidType,
    PoolExhausted,
    Resource,
    ResourcePool,
)
from headgate.resources import PoolStats, ResourceAdded, ResourceRemoved
from headgate.testing import capture_events, settle, virtual
from tests.support.resources.support import Gate, always, by_id, ident, in_flight, keys, rate_limited, revoked, status

# -- R70, R71: looking ---------------------------------------------------------------


@virtual
async def test_r70_a_snapshot_has_exactly_these_fields() -> None:
    pool = ResourcePool([Resource("a", 1, 3), Resource("b", 2)], strategy="primary_backup")
    await asyncio.sleep(5)
    async with pool.lease():
        assert pool.snapshot() == {
            "a": {
                "status": "healthy",
                "in_flight": 1,
                "max_in_flight": 3,
                "consecutive_cooldown": 0,
                "cooldown_seconds_remaining": 0.0,
                "last_acquired_at": 5.0,
            },
            "b": {
                "status": "healthy",
                "in_flight": 0,
                "max_in_flight": None,
                "consecutive_cooldown": 0,
                "cooldown_seconds_remaining": 0.0,
                "last_acquired_at": 0.0,
            },
        }


@virtual
async def test_r70_an_expired_cooldown_reads_healthy_before_anyone_asks_for_it() -> None:
    pool = keys("a")
    with pytest.raises(PoolExhausted):
        await pool.run(always(CooldownResource(10)))
    await asyncio.sleep(9)
    assert status(pool, "a") == "cooling_down"
    await asyncio.sleep(1)
    assert status(pool, "a") == "healthy"
    assert pool.snapshot()["a"]["cooldown_seconds_remaining"] == 0.0
    assert pool.stats().by_status["healthy"] == 1


@virtual
async def test_the_repr_tells_the_state() -> None:
    pool = keys("a", "b", "c", "d", name="keys", strategy="primary_backup")
    await pool.disable("d")
    with pytest.raises(PoolExhausted):
        await pool.run(always(CooldownResource(12)), max_attempts=1)
    async with pool.lease(), pool.lease(), pool.lease():
        assert repr(pool) == "<ResourcePool 'keys' 2 healthy, 1 cooling 12.0s, 1 disabled | 3 in flight>"


@virtual
async def test_r71_stats_count_everything() -> None:
    pool = keys("a", "b", "c", strategy="primary_backup")
    await pool.run(by_id(a=rate_limited(), b="ok"), retry_delay=0)
    with pytest.raises(ValueError, match="mine"):
        await pool.run(always(ValueError("mine")))
    with pytest.raises(PoolExhausted):
        await pool.run(by_id(b=revoked(), c=CooldownResource(5)), retry_delay=0)
    stats = pool.stats()
    assert isinstance(stats, PoolStats)
    assert (stats.attempts, stats.successes, stats.cooldowns, stats.disables, stats.retries) == (5, 2, 2, 1, 0)
    assert (stats.runs_ok, stats.runs_error, stats.runs_exhausted, stats.runs_cancelled) == (1, 1, 1, 0)
    assert stats.by_status == {"healthy": 0, "cooling_down": 2, "disabled": 1}
    assert (stats.eligible, stats.saturated, stats.in_flight) == (0, 0, 0)
    b = stats.resources["b"]
    assert (b.acquires, b.successes, b.disables, b.cooldowns) == (3, 2, 1, 0)
    assert b.status_one_hot() == {"healthy": 0, "cooling_down": 0, "disabled": 1}
    assert b.max_in_flight_gauge == float("inf")
    with pytest.raises(AttributeError):
        stats.attempts = 0  # type: ignore[misc]


@virtual
async def test_r71_eligible_and_saturated() -> None:
    pool = ResourcePool([Resource("a", 1, 1), Resource("b", 2, 2)], strategy="primary_backup")
    async with pool.lease(), pool.lease():
        stats = pool.stats()
        assert stats.resources["a"].saturated
        assert stats.resources["b"].eligible
        assert (stats.eligible, stats.saturated, stats.in_flight) == (1, 1, 2)


@virtual
async def test_r71_pool_counters_survive_remove_and_resource_counters_do_not() -> None:
    pool, gate = keys("a", "b", strategy="primary_backup"), Gate()
    await pool.run(ident)
    late = asyncio.create_task(pool.run(gate))
    await settle()
    await pool.remove("a")
    gate.finish(0)
    await late
    assert (pool.stats().attempts, pool.stats().successes) == (2, 2)
    await pool.add("a", "new")
    assert pool.stats().resources["a"].acquires == 0


@virtual
async def test_r70_snapshots_are_taken_from_other_threads_while_the_pool_works() -> None:
    pool, seen, done = keys("a", "b", "c"), [], threading.Event()

    def look() -> None:
        while not done.is_set():
            seen.append((pool.snapshot(), pool.stats(), repr(pool)))

    thread = threading.Thread(target=look)
    thread.start()
    try:
        for number in range(2000):
            await pool.run(ident)
            if number % 100 == 0:
                await pool.add(f"k{number}", "v")
    finally:
        done.set()
        thread.join()
    assert seen


# -- R72, R37: adding, removing, enabling, disabling ---------------------------------------------------------------


@virtual
async def test_r72_add_takes_a_resource_or_its_fields() -> None:
    pool = keys("a", strategy="primary_backup")
    one = Resource("b", "secret-b", 2)
    with capture_events("resources.members") as events:
        assert await pool.add(one) is one
        two = await pool.add("c", "secret-c", max_in_flight=3, tags=["eu"], weight=2.0)
    assert (two.resource_id, two.value, two.max_in_flight, two.tags) == ("c", "secret-c", 3, {"eu"})
    assert list(pool.snapshot()) == ["a", "b", "c"]
    assert [event.resource_id for event in events.of(ResourceAdded)] == ["b", "c"]


@virtual
async def test_r72_add_refuses_what_cannot_work() -> None:
    pool = keys("a")
    with pytest.raises(InvalidArgument, match="Duplicate resource_id in pool: 'a'"):
        await pool.add("a", "other")
    with pytest.raises(InvalidType, match="an id and a value"):
        await pool.add("b")  # type: ignore[call-overload]
    with pytest.raises(InvalidType, match="do not pass value"):
        await pool.add(Resource("b", 1), "v")  # type: ignore[call-overload]
    with pytest.raises(InvalidArgument, match="max_in_flight"):
        await pool.add("b", "v", max_in_flight=0)
    assert list(pool.snapshot()) == ["a"]


@virtual
async def test_r72_remove_is_at_once_and_what_is_in_flight_drains() -> None:
    pool, gate = keys("a", "b", strategy="primary_backup"), Gate()
    call = asyncio.create_task(pool.run(gate))
    await settle()
    with capture_events("resources.members") as events:
        await pool.remove("a")
    assert events.of(ResourceRemoved)[0].resource_id == "a"
    assert list(pool.snapshot()) == ["b"]
    assert await pool.run(ident) == "b"
    gate.finish(0, "drained")
    assert await call == "drained"


@virtual
async def test_r72_draining_uses_count_against_a_successor_of_the_same_id() -> None:
    pool, gate = ResourcePool([Resource("k", "old", 2)]), Gate()
    calls = [asyncio.create_task(pool.run(gate)) for _ in range(2)]
    await settle()
    await pool.remove("k")
    await pool.add("k", "new", max_in_flight=2)
    assert pool.snapshot()["k"]["in_flight"] == 2
    with pytest.raises(PoolExhausted):
        await pool.run(ident)
    waiter = asyncio.create_task(pool.run(ident, wait_for_capacity=True))
    await settle()
    gate.finish(0)
    assert await waiter == "k"
    gate.finish(1)
    await asyncio.gather(*calls)
    assert in_flight(pool) == 0


@pytest.mark.parametrize("late", [partial(DisableResource, "401"), partial(CooldownResource, 60)])
def test_r37_a_late_verdict_of_a_removed_key_never_hits_its_successor(late: Callable[[], Exception]) -> None:
    """The seed looks the resource up by id when the verdict comes, and finds the new key."""

    @virtual
    async def check() -> None:
        pool, gate = keys("k"), Gate()
        old = asyncio.create_task(pool.run(gate, max_attempts=1))
        await settle()
        await pool.remove("k")
        fresh = await pool.add("k", "new")
        young = asyncio.create_task(pool.run(gate))
        await settle()
        gate.finish(0, late())
        await asyncio.wait([old])
        assert isinstance(old.exception(), PoolExhausted)
        assert status(pool, "k") == "healthy"
        assert fresh.consecutive_cooldown == 0
        gate.finish(1, "unharmed")
        assert await young == "unharmed"

    check()


@virtual
async def test_r72_enable_clears_cooldown_counter_and_disabled() -> None:
    pool = keys("a")
    for signal in (rate_limited(), revoked()):
        with pytest.raises(PoolExhausted):
            await pool.run(always(signal))
        await pool.enable("a")
        assert pool.snapshot()["a"]["status"] == "healthy"
        assert pool.snapshot()["a"]["consecutive_cooldown"] == 0
        assert await pool.run(ident) == "a"


@virtual
async def test_r72_disable_cancels_nothing() -> None:
    pool, gate = keys("a"), Gate()
    calls = [asyncio.create_task(pool.run(gate)) for _ in range(3)]
    await settle()
    await pool.disable("a")
    await settle()
    for number in range(3):
        gate.finish(number)
    assert await asyncio.gather(*calls) == ["done"] * 3
    assert status(pool, "a") == "disabled"


@virtual
async def test_r72_reconcile_keeps_the_health_of_those_that_stay() -> None:
    pool = keys("a", "b", "c", strategy="primary_backup")
    with pytest.raises(PoolExhausted):
        await pool.run(always(CooldownResource(50)), max_attempts=1)
    await pool.disable("b")
    with capture_events("resources.members") as events:
        await pool.reconcile([Resource("d", "secret-d"), Resource("b", "rotated"), Resource("a", "secret-a", 7)])
    assert list(pool.snapshot()) == ["d", "b", "a"]
    assert pool.snapshot()["a"]["cooldown_seconds_remaining"] == 50
    assert pool.snapshot()["a"]["max_in_flight"] == 7
    assert status(pool, "b") == "healthy", "another value under the same id is another key"
    assert sorted(event.to_dict()["resource_id"] for event in events.of(ResourceRemoved)) == ["b", "c"]
    assert sorted(event.to_dict()["resource_id"] for event in events.of(ResourceAdded)) == ["b", "d"]
    assert await pool.run(ident) == "d"
    await pool.disable("d")
    assert await pool.run(ident) == "b"
    with pytest.raises(InvalidArgument, match="at least one resource"):
        await pool.reconcile([])
    assert list(pool.snapshot()) == ["d", "b", "a"]


@virtual
async def test_r72_reconcile_by_values_keeps_limits_and_by_resources_sets_them() -> None:
    pool = ResourcePool([Resource("a", "v", 4, tags=["eu"])])
    await pool.reconcile({"a": "v", "b": "w"})
    assert pool.snapshot()["a"]["max_in_flight"] == 4
    assert await pool.run(ident, tags=["eu"]) == "a"
    await pool.reconcile([Resource("a", "v"), Resource("b", "w")])
    assert pool.snapshot()["a"]["max_in_flight"] is None
    with pytest.raises(PoolExhausted):
        await pool.run(ident, tags=["eu"])


@virtual
async def test_r72_reconcile_reorders_the_priority() -> None:
    pool = keys("a", "b", strategy="primary_backup")
    assert await pool.run(ident) == "a"
    await pool.reconcile({"b": "secret-b", "a": "secret-a"})
    assert await pool.run(ident) == "b"


# -- R73: the hook ---------------------------------------------------------------


@virtual
async def test_r73_the_hook_hears_every_change_in_order() -> None:
    heard: list[tuple[str, str, str, int]] = []
    pool = keys("a", "b", on_state_change=lambda *change: heard.append(change), strategy="primary_backup")
    await pool.run(by_id(a=CooldownResource(5), b="ok"), retry_delay=0)
    await asyncio.sleep(5)
    await pool.run(ident)
    await pool.disable("b")
    await pool.disable("b")
    await pool.enable("b")
    await pool.enable("b")
    assert heard == [
        ("a", "healthy", "cooling_down", 1),
        ("a", "cooling_down", "healthy", 2),
        ("b", "healthy", "disabled", 3),
        ("b", "disabled", "healthy", 4),
    ]


@virtual
async def test_r73_a_hook_that_raises_is_logged_and_never_felt(caplog: pytest.LogCaptureFixture) -> None:
    def broken(*change: object) -> None:
        raise RuntimeError("hook")

    pool = keys("a", "b", on_state_change=broken)
    assert await pool.run(by_id(a=rate_limited(), b="ok"), retry_delay=0) == "ok"
    assert [r.levelno for r in caplog.records if "on_state_change callback failed" in r.getMessage()] == [logging.ERROR]


@virtual
async def test_r73_a_hook_of_three_parameters_still_works_and_may_look_at_the_pool() -> None:
    heard: list[Any] = []

    def hook(resource_id: str, old: str, new: str) -> None:
        heard.append((resource_id, new, pool.snapshot()[resource_id]["status"]))

    pool = keys("a", on_state_change=hook)  # type: ignore[arg-type]
    await pool.disable("a")
    assert heard == [("a", "disabled", "disabled")]


# -- R74: probing ---------------------------------------------------------------


@virtual
async def test_r74_one_probe_until_a_success() -> None:
    pool, gate = keys("a", probe_on_recovery=True), Gate()
    with pytest.raises(PoolExhausted):
        await pool.run(always(CooldownResource(5)))
    await asyncio.sleep(5)
    probe = asyncio.create_task(pool.run(gate))
    await settle()
    with pytest.raises(PoolExhausted):
        await pool.run(ident)
    gate.finish(0)
    await probe
    async with pool.lease(), pool.lease():
        assert in_flight(pool) == 2


@virtual
async def test_r74_a_failed_probe_escalates() -> None:
    pool = keys("a", probe_on_recovery=True)
    for seconds in (30, 120):
        with pytest.raises(PoolExhausted):
            await pool.run(always(rate_limited()))
        assert pool.snapshot()["a"]["cooldown_seconds_remaining"] == seconds
        await asyncio.sleep(seconds)


@virtual
async def test_r74_uses_from_before_the_cooldown_do_not_block_the_probe() -> None:
    pool, gate = keys("a", probe_on_recovery=True, cancel_siblings=False), Gate()
    elder = asyncio.create_task(pool.run(gate))
    await settle()
    with pytest.raises(PoolExhausted):
        await pool.run(always(CooldownResource(5)))
    await asyncio.sleep(5)
    assert await pool.run(ident) == "a"
    gate.finish(0)
    await elder


@virtual
async def test_r30_a_probe_cancelled_from_outside_is_offered_again() -> None:
    pool, gate = keys("a", probe_on_recovery=True), Gate()
    with pytest.raises(PoolExhausted):
        await pool.run(always(CooldownResource(5)))
    await asyncio.sleep(5)
    probe = asyncio.create_task(pool.run(gate))
    waiter = asyncio.create_task(pool.run(ident, wait_for_capacity=True))
    await settle()
    probe.cancel()
    assert await waiter == "a"
    await asyncio.wait([probe])
    assert pool.snapshot()["a"]["consecutive_cooldown"] == 0


# -- R08: two pools, one resource ---------------------------------------------------------------


@virtual
async def test_r08_health_and_limit_are_shared_and_each_signal_uses_its_own_table() -> None:
    shared = Resource("k", "v", 2)
    fast = ResourcePool([shared], cooldown_table=(1.0, 2.0), name="fast")
    slow = ResourcePool([shared, Resource("other", "o")], cooldown_table=(100.0,), strategy="primary_backup")
    async with fast.lease(), slow.lease():
        assert fast.snapshot()["k"]["in_flight"] == slow.snapshot()["k"]["in_flight"] == 2
        with pytest.raises(PoolExhausted):
            await fast.run(ident)
        assert await slow.run(ident) == "other"
    with pytest.raises(PoolExhausted):
        await fast.run(always(rate_limited()))
    assert slow.snapshot()["k"]["cooldown_seconds_remaining"] == 1.0
    assert await slow.run(ident) == "other"
    await asyncio.sleep(1)
    await slow.run(by_id(k=rate_limited(), other="o"), retry_delay=0)
    assert fast.snapshot()["k"]["cooldown_seconds_remaining"] == 100.0
    assert fast.snapshot()["k"]["consecutive_cooldown"] == 2


@virtual
async def test_r08_siblings_are_cancelled_across_pools() -> None:
    shared = Resource("k", "v")
    one, two = ResourcePool([shared]), ResourcePool([shared, Resource("spare", "s")], strategy="primary_backup")
    gate = Gate()
    signaller = asyncio.create_task(one.run(gate, max_attempts=1))
    await settle()
    victim = asyncio.create_task(two.run(gate, retry_delay=0))
    await settle()
    gate.finish(0, CooldownResource(5))
    await settle()
    assert gate.entered == ["k", "k", "spare"]
    gate.finish(2, "elsewhere")
    assert await victim == "elsewhere"
    assert isinstance((await asyncio.gather(signaller, return_exceptions=True))[0], PoolExhausted)
    assert two.stats().sibling_cancels == 1


@virtual
async def test_r08_a_slot_freed_in_one_pool_serves_a_waiter_of_another() -> None:
    shared = Resource("k", "v", 1)
    one, two = ResourcePool([shared]), ResourcePool([shared])
    gate = Gate()
    holder = asyncio.create_task(one.run(gate))
    await settle()
    first = asyncio.create_task(two.run(always("two"), wait_for_capacity=True))
    await settle()
    second = asyncio.create_task(one.run(always("one"), wait_for_capacity=True))
    await settle()
    ended: list[str] = []
    first.add_done_callback(lambda call: ended.append(call.result()))
    second.add_done_callback(lambda call: ended.append(call.result()))
    gate.finish(0)
    await asyncio.gather(holder, first, second)
    await settle()
    assert ended == ["two", "one"]


@virtual
async def test_r08_both_pools_report_and_recover() -> None:
    heard: list[str] = []
    shared = Resource("k", "v")
    one = ResourcePool([shared], on_state_change=lambda i, old, new, seq: heard.append(f"one {new}"))
    two = ResourcePool([shared], on_state_change=lambda i, old, new, seq: heard.append(f"two {new}"))
    with pytest.raises(PoolExhausted):
        await one.run(always(CooldownResource(3)))
    await asyncio.sleep(3)
    assert await two.run(ident) == "k"
    assert heard == ["one cooling_down", "two cooling_down", "one healthy", "two healthy"]
    assert await one.run(ident) == "k"


@virtual
async def test_r08_a_pool_that_is_dropped_is_forgotten_by_its_resources() -> None:
    shared = Resource("k", "v")
    kept = ResourcePool([shared])
    dropped = weakref.ref(ResourcePool([shared]))
    gc.collect()
    assert dropped() is None
    assert len(shared.sharing.members) == 1
    assert await kept.run(ident) == "k"
    assert kept._engine.rotation.members["k"].plain, "the short way is open again"


@virtual
async def test_r72_a_removed_key_is_not_kept_until_its_cooldown_ends() -> None:
    pool = ResourcePool([Resource("a", Key("sk")), Resource("b", Key("sk"))], strategy="primary_backup")
    secret = weakref.ref(pool._engine.rotation.members["a"].resource.value)
    async with pool.lease() as resource:
        await pool.disable(resource.resource_id)
        await pool.enable(resource.resource_id)
        del resource
    with pytest.raises(PoolExhausted):
        await pool.run(always(CooldownResource(1e6)), max_attempts=1)
    await pool.remove("a")
    gc.collect()
    assert secret() is None


class Key:
    def __init__(self, text: str) -> None:
        self.text = text


@virtual
async def test_r72_cooling_and_enabling_for_ever_costs_no_memory() -> None:
    pool = keys("a")
    for _ in range(500):
        with pytest.raises(PoolExhausted):
            await pool.run(always(CooldownResource(1e6)))
        await pool.enable("a")
    assert len(pool._engine.rotation.cooling) < 100
