"""`CooldownResource(..., only_for="affinity")`: a proxy that one site has banned still serves the others (R38)."""

from __future__ import annotations

import asyncio
import logging
import pickle
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from headgate import (
    CooldownResource,
    InvalidArgument,
    PoolExhausted,
    Resource,
    ResourcePool,
    RetryOperation,
    TaskPool,
)
from headgate.core.clock import clock
from headgate.resources import least_latency, primary_backup, round_robin, sticky, weighted
from headgate.sharing.memory import SharedMemory
from headgate.stores import JsonLinesStore
from headgate.testing import capture_events, settle, virtual
from tests.support.resources.support import Gate, at_once, ident, in_flight, keys

STRATEGIES = pytest.mark.parametrize(
    "strategy",
    [round_robin(), primary_backup(), weighted(), least_latency(), sticky()],
    ids=lambda one: type(one).__name__,
)


def banned(*pairs: tuple[str, str], seconds: float | None = 60.0) -> Any:
    """An operation for an affinity that each of these resources refuses; it returns the id of the one it was given."""

    def of(affinity: str | None) -> Any:
        async def operation(resource: Resource[Any]) -> str:
            if (resource.resource_id, affinity) in pairs:
                raise CooldownResource(seconds, "403", only_for="affinity")
            return resource.resource_id

        return operation

    return of


async def ban(pool: ResourcePool[Any], affinity: Any, *ids: str, seconds: float | None = 60.0) -> None:
    """Let these resources, or all, cool down for an affinity."""
    others = set(pool.snapshot()) - set(ids) if ids else set()
    for _ in range(len(pool.snapshot()) - len(others)):
        with pytest.raises(PoolExhausted):
            await pool.run(refuse(seconds), affinity=affinity, exclude=others, max_attempts=1)


def refuse(seconds: float | None = 60.0) -> Any:
    async def operation(resource: Resource[Any]) -> str:
        raise CooldownResource(seconds, "403", only_for="affinity")

    return operation


async def used(pool: ResourcePool[Any], affinity: Any, times: int = 6, **options: Any) -> set[str]:
    """The ids of the resources that these calls use, one after the other."""
    return {await pool.run(ident, affinity=affinity, **options) for _ in range(times)}


async def together(pool: ResourcePool[Any], affinity: Any, times: int = 12) -> set[str]:
    """The ids of the resources that calls use which run at the same time."""
    gate = Gate()
    calls = [asyncio.create_task(pool.run(gate, affinity=affinity)) for _ in range(times)]
    await settle()
    for number in range(times):
        gate.finish(number)
    await asyncio.gather(*calls)
    return set(gate.entered)


# -- which resource ---------------------------------------------------------------------------------------------------


@STRATEGIES
@virtual
async def test_r38_a_resource_rests_only_for_calls_with_the_affinity_that_was_refused(strategy: Any) -> None:
    pool = keys("p1", "p2", "p3", strategy=strategy)
    visit = banned(("p1", "shop"), ("p2", "shop"))
    assert await pool.run(visit("shop"), affinity="shop", retry_delay=0) == "p3"
    await ban(pool, "shop", "p1", "p2")
    for _ in range(3):
        assert await used(pool, "shop") == await together(pool, "shop") == {"p3"}
    for other in ("news", None, ("shop", "x"), b"shop"):
        assert await used(pool, other, exclude=["p3"]) <= {"p1", "p2"}, "for others they are as before"
    assert {one["status"] for one in pool.snapshot().values()} == {"healthy"}


@STRATEGIES
@virtual
async def test_r38_tags_and_exclude_still_count(strategy: Any) -> None:
    resources = [Resource(name, name, tags=["home"] if name != "p3" else []) for name in ("p1", "p2", "p3")]
    pool = ResourcePool(resources, strategy=strategy)
    await ban(pool, "shop", "p1")
    assert await used(pool, "shop", tags=["home"]) == {"p2"}
    assert await used(pool, "shop", exclude=["p2"]) == {"p3"}
    with pytest.raises(PoolExhausted, match="1 cooling down for this affinity"):
        await pool.run(ident, affinity="shop", tags=["home"], exclude=["p2"])


@virtual
async def test_r38_it_comes_back_when_its_time_has_passed() -> None:
    pool = keys("p1", "p2", strategy="primary_backup")
    await ban(pool, "shop", "p1", seconds=30.0)
    assert await pool.run(ident, affinity="shop") == "p2"
    await asyncio.sleep(29.9)
    assert await pool.run(ident, affinity="shop") == "p2"
    await asyncio.sleep(0.2)
    assert await pool.run(ident, affinity="shop") == "p1"


# -- the ways to use a resource ---------------------------------------------------------------------------------------


@virtual
async def test_r38_leases_streams_and_classifiers_rest_a_resource_for_their_affinity_too() -> None:
    signal = CooldownResource(60.0, "403", only_for="affinity")

    async def leased(pool: ResourcePool[str]) -> None:
        with pytest.raises(CooldownResource):
            async with pool.lease(affinity="shop"):
                raise signal

    async def streamed(pool: ResourcePool[str]) -> None:
        async def items(resource: Resource[str]) -> AsyncIterator[str]:
            if resource.resource_id == "p1":
                raise signal
            yield resource.resource_id

        assert [item async for item in pool.stream(items, affinity="shop", retry_delay=0)] == ["p2"]

    async def judged(pool: ResourcePool[str]) -> None:
        assert await pool.run(ident, affinity="shop", retry_delay=0) == "p2"

    def classify(outcome: object) -> Any:
        return signal if outcome == "p1" else None

    for use, options in ((leased, {}), (streamed, {}), (judged, {"classify": classify})):
        pool = keys("p1", "p2", strategy="primary_backup", **options)
        await use(pool)
        async with pool.lease(affinity="shop") as resource:
            assert resource.resource_id == "p2", use.__name__
        async with pool.lease(affinity="news") as resource:
            assert resource.resource_id == "p1", use.__name__


def test_r38_run_sync_rests_a_resource_for_its_affinity_too() -> None:
    pool = keys("p1", "p2", strategy="primary_backup")

    def visit(resource: Resource[str]) -> str:
        if resource.resource_id == "p1":
            raise CooldownResource(60.0, "403", only_for="affinity")
        return resource.resource_id

    assert pool.run_sync(visit, affinity="shop", retry_delay=0) == "p2"
    assert [pool.run_sync(lambda one: one.resource_id, affinity=one) for one in ("shop", "news")] == ["p2", "p1"]


@virtual
async def test_r38_two_pools_with_the_same_resource_know_the_same() -> None:
    shared = Resource("p1", "p1")
    one, other = ResourcePool([shared]), ResourcePool([shared, Resource("p2", "p2")], strategy="primary_backup")
    await ban(one, "shop")
    assert await other.run(ident, affinity="shop") == "p2"
    late = ResourcePool([shared])
    with pytest.raises(PoolExhausted, match="1 cooling down for this affinity"):
        await late.run(ident, affinity="shop")
    await other.remove("p1")
    await other.add(shared)
    assert await other.run(ident, affinity="shop") == "p2"
    await asyncio.sleep(61)
    assert await late.run(ident, affinity="shop") == await one.run(ident, affinity="shop") == "p1"


# -- how long ---------------------------------------------------------------------------------------------------------


@virtual
async def test_r38_each_affinity_climbs_the_table_by_itself() -> None:
    pool = keys("p1", cooldown_table=(10.0, 100.0))

    def left(affinity: str) -> float | None:
        return pool.stats().resources["p1"].affinity_cooldowns.get(affinity)

    await ban(pool, "shop", seconds=None)
    assert left("shop") == 10.0
    await asyncio.sleep(10)
    await ban(pool, "shop", seconds=None)
    assert left("shop") == 100.0
    await ban(pool, "news", seconds=None)
    assert left("news") == 10.0
    assert pool.snapshot()["p1"]["consecutive_cooldown"] == 0
    await asyncio.sleep(100)
    assert await pool.run(ident, affinity="shop") == "p1"
    await ban(pool, "shop", seconds=None)
    assert left("shop") == 10.0, "a success has cleared the count"


@virtual
async def test_r38_several_refusals_of_one_outage_count_once_and_a_late_success_clears_nothing() -> None:
    pool = keys("p1", cooldown_table=(10.0, 100.0), cancel_siblings=False)
    gate = Gate()
    calls = [asyncio.create_task(pool.run(gate, affinity="shop", max_attempts=1)) for _ in range(3)]
    await settle()
    for number in range(2):
        gate.finish(number, CooldownResource(reason="403", only_for="affinity"))
    gate.finish(2)
    await asyncio.gather(*calls, return_exceptions=True)
    assert pool.stats().resources["p1"].affinity_cooldowns == {"shop": 10.0}
    await asyncio.sleep(5)
    await pool.run(ident, affinity="news")
    assert pool.stats().resources["p1"].affinity_cooldowns == {"shop": 5.0}


@virtual
async def test_r38_a_cooldown_is_never_shortened_and_zero_seconds_count_without_rest() -> None:
    pool = keys("p1", cancel_siblings=False)
    gate = Gate()
    calls = [asyncio.create_task(pool.run(gate, affinity="shop", max_attempts=1)) for _ in range(2)]
    await settle()
    gate.finish(0, CooldownResource(50.0, only_for="affinity"))
    await settle()
    gate.finish(1, CooldownResource(5.0, only_for="affinity"))
    await asyncio.gather(*calls, return_exceptions=True)
    assert pool.stats().resources["p1"].affinity_cooldowns == {"shop": 50.0}
    await ban(pool, "news", seconds=0.0)
    assert await pool.run(ident, affinity="news") == "p1"


@virtual
async def test_r38_enable_ends_the_cooldowns_for_all_affinities() -> None:
    pool = keys("p1")
    await ban(pool, "shop")
    await pool.enable("p1")
    assert await pool.run(ident, affinity="shop") == "p1"
    assert pool.stats().resources["p1"].affinity_cooldowns == {}


@virtual
async def test_r38_without_an_affinity_it_is_a_cooldown_like_any_other() -> None:
    pool = keys("p1")
    with pytest.raises(PoolExhausted):
        await pool.run(refuse(60.0))
    assert pool.snapshot()["p1"]["status"] == "cooling_down"
    with pytest.raises(PoolExhausted, match="1 cooling down, 0 disabled"):
        await pool.run(ident, affinity="shop")


@virtual
async def test_r38_the_cooldown_for_all_and_the_one_for_an_affinity_both_hold() -> None:
    pool = keys("p1")
    await ban(pool, "shop", seconds=100.0)
    await pool.cool("p1", 30.0)
    with pytest.raises(PoolExhausted) as caught:
        await pool.run(ident, affinity="shop")
    assert caught.value.retry_after == 100.0
    with pytest.raises(PoolExhausted) as caught:
        await pool.run(ident, affinity="news")
    assert caught.value.retry_after == 30.0
    await asyncio.sleep(30)
    assert await pool.run(ident, affinity="news") == "p1"
    with pytest.raises(PoolExhausted):
        await pool.run(ident, affinity="shop")


# -- waiting ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["wait_for_cooldown", "wait_for_capacity"])
@virtual
async def test_r38_a_call_waits_until_a_resource_has_cooled_down_for_its_affinity(mode: str) -> None:
    pool = keys("p1", "p2")
    await ban(pool, "shop", "p1", seconds=40.0)
    await ban(pool, "shop", "p2", seconds=20.0)
    began = clock.now()
    assert await pool.run(ident, affinity="shop", **{mode: True}) == "p2"  # type: ignore[arg-type]
    assert clock.now() - began == 20.0
    with pytest.raises(PoolExhausted) as caught:
        await pool.run(refuse(), affinity="shop", max_attempts=1)
    assert caught.value.reason == "attempts"


@virtual
async def test_r38_wait_for_cooldown_does_not_wait_for_the_cooldown_of_another_affinity() -> None:
    pool = keys("p1", max_in_flight=1)
    await ban(pool, "shop", seconds=10.0)
    gate = Gate()
    running = asyncio.create_task(pool.run(gate, affinity="news"))
    await settle()
    for affinity in ("news", None):
        with pytest.raises(PoolExhausted) as caught:
            await pool.run(ident, affinity=affinity, wait_for_cooldown=True)
        assert caught.value.reason == "no_eligible"
        assert caught.value.retry_after is None
    with pytest.raises(PoolExhausted, match="after deadline"):
        await pool.run(ident, affinity="shop", wait_for_cooldown=True, within=5.0)
    gate.finish(0)
    await running


@virtual
async def test_r38_a_waiting_call_does_not_hold_up_those_behind_it_that_can_use_the_resource() -> None:
    pool = keys("p1", max_in_flight=1)
    await ban(pool, "shop", seconds=100.0)
    gate = Gate()
    running = asyncio.create_task(pool.run(gate))
    await settle()
    order: list[str] = []

    async def waits(name: str, affinity: str | None) -> None:
        await pool.run(ident, affinity=affinity, wait_for_capacity=True)
        order.append(name)

    calls = []
    for name, affinity in (("shop-1", "shop"), ("news", "news"), ("shop-2", "shop"), ("none", None)):
        calls.append(asyncio.create_task(waits(name, affinity)))
        await settle()
    gate.finish(0)
    await running
    await settle()
    assert order == ["news", "none"]
    await asyncio.gather(*calls)
    assert order == ["news", "none", "shop-1", "shop-2"]


@virtual
async def test_r38_calls_that_wait_already_are_passed_over_from_then_on() -> None:
    """The cooldown begins while calls of its affinity stand first in the queue, and one was just granted the slot."""
    pool = keys("p1", max_in_flight=1, cancel_siblings=False)
    gate = Gate()
    running = asyncio.create_task(pool.run(gate, affinity="shop", max_attempts=1))
    await settle()
    order: list[tuple[str, float]] = []

    async def waits(affinity: str) -> None:
        await pool.run(ident, affinity=affinity, wait_for_capacity=True)
        order.append((affinity, clock.now() - began))

    began = clock.now()
    calls = []
    for affinity in ("shop", "news", "shop", "maps"):
        calls.append(asyncio.create_task(waits(affinity)))
        await settle()
    gate.finish(0, CooldownResource(30.0, "403", only_for="affinity"))
    await asyncio.gather(running, *calls, return_exceptions=True)
    assert order == [("news", 0.0), ("maps", 0.0), ("shop", 30.0), ("shop", 30.0)]
    assert in_flight(pool) == 0


@virtual
async def test_r38_what_a_call_was_granted_is_taken_back_if_its_affinity_is_refused_meanwhile() -> None:
    pool = keys("p1", max_in_flight=2, cancel_siblings=False)
    gate = Gate()
    running = [asyncio.create_task(pool.run(gate, affinity="shop", max_attempts=1)) for _ in range(2)]
    await settle()
    began = clock.now()
    waiting = asyncio.create_task(pool.run(ident, affinity="shop", wait_for_capacity=True))
    other = asyncio.create_task(pool.run(ident, affinity="news", wait_for_capacity=True))
    await settle()
    gate.finish(0)  # its slot is granted to the first that waits,
    gate.finish(1, CooldownResource(30.0, "403", only_for="affinity"))  # and taken back before that runs
    await asyncio.gather(*running, return_exceptions=True)
    assert await other == "p1"
    assert clock.now() == began
    assert await waiting == "p1"
    assert clock.now() - began == 30.0


@virtual
async def test_r38_a_success_lets_the_calls_that_wait_for_its_affinity_go_on() -> None:
    """A use that began before, and raised no signal, proves nothing; one that began after the cooldown does."""
    pool = keys("p1", "p2")
    await ban(pool, "shop", "p1", "p2", seconds=30.0)
    await asyncio.sleep(30)
    assert await used(pool, "shop") == {"p1", "p2"}
    await ban(pool, "shop", "p1", seconds=None)
    assert pool.stats().resources["p1"].affinity_cooldowns == {"shop": 30.0}


@virtual
async def test_r38_with_a_quota_a_call_does_not_keep_it_from_others_while_it_cannot_use_it() -> None:
    resource = Resource("p1", "p1", quota=at_once(tokens=100, per=10.0))
    pool = ResourcePool([resource])
    await ban(pool, "shop", seconds=100.0)
    await pool.run(ident, cost=90)
    large = asyncio.create_task(pool.run(ident, affinity="shop", cost=90, wait_for_capacity=True))
    await settle()
    began = clock.now()
    assert await pool.run(ident, affinity="news", cost=5, wait_for_capacity=True) == "p1"
    assert clock.now() == began
    assert await large == "p1"
    assert clock.now() - began == pytest.approx(100.0)


# -- siblings ---------------------------------------------------------------------------------------------------------


@virtual
async def test_r38_only_younger_calls_of_the_same_affinity_are_cancelled() -> None:
    pool = keys("p1", "p2", strategy="primary_backup")
    gate = Gate()
    affinities = ("shop", "shop", "news", None)
    calls = [asyncio.create_task(pool.run(gate, affinity=one, retry_delay=0)) for one in affinities]
    await settle()
    gate.finish(0, CooldownResource(30.0, "403", only_for="affinity"))
    await settle()
    assert gate.entered == ["p1"] * 4 + ["p2"] * 2
    assert pool.stats().sibling_cancels == 1
    for number in (2, 3, 4, 5):
        gate.finish(number, number)
    assert sorted(await asyncio.gather(*calls)) == [2, 3, 4, 5]  # type: ignore[type-var]


# -- tasks ------------------------------------------------------------------------------------------------------------


async def outcomes(pool: TaskPool, *affinities: str | None, visit: Any, **options: Any) -> list[Any]:
    return [await pool.submit(visit, one, affinity=one, **options) for one in affinities]


@virtual
async def test_r38_tasks_with_other_affinities_pass_one_that_must_wait() -> None:
    proxies = keys("p1", max_in_flight=1)
    await ban(proxies, "shop", seconds=100.0)
    ended: list[tuple[str | None, float]] = []
    began = clock.now()

    async def visit(proxy: Resource[str], site: str | None) -> None:
        await asyncio.sleep(1)
        ended.append((site, clock.now() - began))

    async with TaskPool(max_concurrent=4, resources=proxies) as pool:
        handles = await outcomes(pool, "shop", "news", "shop", None, "maps", visit=visit)
        await asyncio.sleep(50)
        assert [one.status for one in handles] == ["queued", "completed", "queued", "completed", "completed"]
        assert "1 cooling down for this affinity" in handles[0].story()
    assert ended == [("news", 1.0), (None, 2.0), ("maps", 3.0), ("shop", 101.0), ("shop", 102.0)]


@pytest.mark.parametrize("queue", ["fifo", "lifo", "priority", "fair_round_robin", "fair_share"])
@virtual
async def test_r38_tasks_of_an_affinity_keep_their_order_while_others_pass_them(queue: str) -> None:
    proxies = keys("p1", max_in_flight=1)
    await ban(proxies, "shop", seconds=100.0)
    ended: list[str] = []

    async def visit(proxy: Resource[str], name: str) -> None:
        await asyncio.sleep(1)
        ended.append(name)

    async with TaskPool(max_concurrent=4, resources=proxies, queue=queue) as pool:
        for number in range(3):
            for site in ("shop", "news"):
                await pool.submit(visit, f"{site}-{number}", affinity=site)
        await asyncio.sleep(50)
        await pool.submit(visit, "shop-3", affinity="shop")
        await asyncio.sleep(1)
        assert sorted(ended) == ["news-0", "news-1", "news-2"]
    late = [name for name in ended if name.startswith("shop")]
    assert late == (["shop-3", "shop-2", "shop-1", "shop-0"] if queue == "lifo" else [f"shop-{n}" for n in range(4)])


@virtual
async def test_r38_tasks_of_pools_that_share_a_budget_keep_their_order_too() -> None:
    proxies = keys("p1", max_in_flight=1)
    await ban(proxies, "shop", seconds=20.0)
    ended: list[str] = []

    async def visit(proxy: Resource[str], name: str) -> None:
        await asyncio.sleep(0.1)
        ended.append(name)

    store = SharedMemory().member()
    shared = {"scope": "tenant", "scope_id": "acme", "store": store}
    async with TaskPool("visits", max_concurrent=4, resources=proxies, **shared) as pool:  # type: ignore[arg-type]
        for number in range(3):
            for site in ("shop", "news"):
                await pool.submit(visit, f"{site}-{number}", affinity=site)
        await asyncio.sleep(10)
        assert ended == ["news-0", "news-1", "news-2"]
    assert ended[3:] == ["shop-0", "shop-1", "shop-2"]
    store.close()


def test_r38_a_proxy_that_was_kept_for_a_task_is_not_used_if_it_was_banned_meanwhile(tmp_path: Path) -> None:
    """A durable pool reserves it, and writes the task down before it starts."""

    async def main() -> None:
        proxies = keys("p1", "p2", strategy="primary_backup")
        durable = {"scope": "pipeline", "pipeline_id": "p", "store": JsonLinesStore(tmp_path)}
        async with TaskPool("visits", max_concurrent=1, resources=proxies, **durable) as pool:  # type: ignore[arg-type]
            submitting = asyncio.create_task(pool.submit(ident, affinity="shop"))
            await asyncio.sleep(0)
            assert proxies.snapshot()["p1"]["in_flight"] == 1
            await ban(proxies, "shop", "p1")
            assert await (await submitting) == "p2"

    asyncio.run(main())


@virtual
async def test_r38_a_task_that_is_refused_goes_to_another_proxy_and_the_banned_one_serves_others() -> None:
    proxies = keys("p1", "p2", strategy="primary_backup")
    visits: list[tuple[str, str]] = []

    async def visit(proxy: Resource[str], site: str) -> None:
        visits.append((site, proxy.resource_id))
        await asyncio.sleep(1)
        if (site, proxy.resource_id) == ("shop", "p1"):
            raise CooldownResource(60.0, "403", only_for="affinity")

    async with TaskPool(max_concurrent=1, resources=proxies) as pool:
        await outcomes(pool, "shop", "news", "shop", "news", visit=visit)
    assert visits == [("shop", "p1"), ("shop", "p2"), ("news", "p1"), ("shop", "p2"), ("news", "p1")]


@virtual
async def test_r38_many_banned_affinities_are_all_served_in_the_end() -> None:
    """More than are kept apart: then tasks wait together, and none is lost."""
    proxies = keys("p1", max_in_flight=1)
    sites = [f"site-{number}" for number in range(100)]
    for number, site in enumerate(sites):
        await ban(proxies, site, seconds=100.0 + number)
    ended: list[str] = []

    async def visit(proxy: Resource[str], site: str) -> None:
        ended.append(site)

    async with TaskPool(max_concurrent=4, resources=proxies) as pool:
        await outcomes(pool, *sites, "free", visit=visit)
        await pool.submit(visit, "tagged", exclude=["p9"])
    assert sorted(ended) == sorted([*sites, "free", "tagged"])


@virtual
async def test_r38_tasks_retried_for_another_reason_keep_their_affinity() -> None:
    proxies = keys("p1", "p2", strategy="primary_backup")
    await ban(proxies, "shop", "p1", seconds=60.0)
    visits: list[str] = []

    async def visit(proxy: Resource[str]) -> None:
        visits.append(proxy.resource_id)
        if len(visits) < 3:
            raise RetryOperation("502")

    async with TaskPool(max_concurrent=1, resources=proxies) as pool:
        await pool.run(visit, affinity="shop", max_attempts=5)
    assert visits == ["p2", "p2", "p2"]


# -- what is seen -----------------------------------------------------------------------------------------------------


@virtual
async def test_r38_events_and_statistics_say_for_whom_it_rests(caplog: pytest.LogCaptureFixture) -> None:
    changes: list[object] = []
    pool = keys("p1", on_state_change=lambda *change: changes.append(change))
    with capture_events("resources.health") as events, caplog.at_level(logging.WARNING, "headgate.resources"):
        await ban(pool, ("acme", 7), seconds=12.0)
        await ban(pool, "shop", seconds=30.0)
    told = [event.to_dict() for event in events]
    assert [(one["old_status"], one["seconds"], one["only_for"]) for one in told] == [
        ("healthy", 12.0, "('acme', 7)"),
        ("healthy", 30.0, "shop"),
    ]
    assert "p1 cools down for ('acme', 7) for 12.0 s (1 in a row): 403" in caplog.text
    assert not changes, "its status is the same"
    stats = pool.stats()
    assert stats.resources["p1"].affinity_cooldowns == {"shop": 30.0, ("acme", 7): 12.0}
    assert (stats.cooldowns, stats.resources["p1"].eligible) == (2, True)
    assert "1 healthy" in repr(pool)
    await asyncio.sleep(12)
    assert pool.stats().resources["p1"].affinity_cooldowns == {"shop": 18.0}


@virtual
async def test_r38_what_is_remembered_and_shown_is_bounded() -> None:
    pool = keys("p1")
    for number in range(1_100):
        await ban(pool, number, seconds=60.0 + number)
    shown = pool.stats().resources["p1"].affinity_cooldowns
    assert list(shown) == list(range(1_099, 999, -1)), "the longest"
    assert await pool.run(ident, affinity=0) == "p1", "the one that would have ended first was forgotten"
    with pytest.raises(PoolExhausted):
        await pool.run(ident, affinity=1_099)


@virtual
async def test_r38_the_count_is_forgotten_an_hour_after_the_end() -> None:
    pool = keys("p1", cooldown_table=(10.0, 100.0))
    await ban(pool, "shop", seconds=None)
    await asyncio.sleep(10 + 3601)
    await ban(pool, "shop", seconds=None)
    assert pool.stats().resources["p1"].affinity_cooldowns == {"shop": 10.0}


# -- the signal -------------------------------------------------------------------------------------------------------


def test_r38_only_for_is_checked_and_travels() -> None:
    signal = pickle.loads(pickle.dumps(CooldownResource(5.0, "403", only_for="affinity")))
    assert (signal.cooldown_seconds, signal.reason, signal.only_for) == (5.0, "403", "affinity")
    assert CooldownResource().only_for is None
    with pytest.raises(InvalidArgument, match="only_for must be \"affinity\" or None, got 'shop'"):
        CooldownResource(5.0, only_for="shop")  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        CooldownResource(5.0, "403", "affinity")  # type: ignore[misc]


@virtual
async def test_r38_in_a_group_of_signals_a_cooldown_for_all_counts_more() -> None:
    pool = keys("p1")

    async def operation(resource: Resource[str]) -> None:
        signals = [CooldownResource(500.0, only_for="affinity"), CooldownResource(5.0)]
        raise ExceptionGroup("two", signals)

    with pytest.raises(PoolExhausted):
        await pool.run(operation, affinity="shop", max_attempts=1)
    assert pool.snapshot()["p1"]["cooldown_seconds_remaining"] == 5.0
