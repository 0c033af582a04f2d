"""L05: pausing resources."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from headgate import CooldownResource, PoolExhausted, Quota, Resource, ResourcePool, UnknownResource
from headgate.resources import ResourcePaused, ResourceResumed
from headgate.testing import capture_events, settle, virtual
from tests.support.resources.support import ident, keys, status


@pytest.mark.parametrize("strategy", ["round_robin", "primary_backup", "weighted", "least_latency", "sticky"])
@virtual
async def test_l05_a_paused_resource_gets_no_new_call_and_keeps_its_status(strategy: str) -> None:
    pool = ResourcePool({"a": 1, "b": 2}, strategy=strategy)
    gate = asyncio.Event()
    running = [asyncio.ensure_future(pool.run(lambda _: gate.wait())) for _ in range(4)]
    await settle()
    pool.pause("a")
    gate.set()
    await asyncio.gather(*running)
    assert {await pool.run(ident) for _ in range(6)} == {"b"}
    assert status(pool, "a") == "healthy"
    stats = pool.stats()
    assert (stats.paused, stats.resources["a"].paused, stats.resources["b"].paused, stats.eligible) == (
        1,
        True,
        False,
        1,
    )
    pool.resume("a")
    assert pool.stats().paused == 0
    pool.pause("b")
    assert {await pool.run(ident) for _ in range(6)} == {"a"}


@virtual
async def test_l05_what_uses_a_resource_continues_and_its_verdict_counts() -> None:
    pool = keys("a")
    gate = asyncio.Event()

    async def refused(resource: Resource[Any]) -> None:
        await gate.wait()
        raise CooldownResource(10)

    running = asyncio.ensure_future(pool.run(refused, max_attempts=1))
    await settle()
    pool.pause("a")
    gate.set()
    with pytest.raises(PoolExhausted):
        await running
    assert (status(pool, "a"), pool.stats().resources["a"].paused) == ("cooling_down", True)
    await asyncio.sleep(10)
    assert status(pool, "a") == "healthy"
    with pytest.raises(PoolExhausted, match="1 paused"):
        await pool.run(ident)
    pool.resume("a")
    assert await pool.run(ident) == "a"


@virtual
async def test_l05_to_resume_ends_no_cooldown_and_to_enable_no_pause() -> None:
    pool = keys("a")
    await pool.disable("a")
    pool.pause("a")
    pool.resume("a")
    assert status(pool, "a") == "disabled"
    pool.pause("a")
    await pool.enable("a")
    assert status(pool, "a") == "healthy"
    with pytest.raises(PoolExhausted):
        await pool.run(ident)


@virtual
async def test_l05_a_call_that_waits_goes_on_waiting_and_gets_another_resource_if_one_comes_free() -> None:
    pool = ResourcePool([Resource("a", 1, 1), Resource("b", 2, 1)], strategy="primary_backup")
    pool.pause("a")
    pool.pause("b")
    waiting = [asyncio.ensure_future(pool.run(ident, wait_for_capacity=True)) for _ in range(2)]
    await asyncio.sleep(100)
    assert not any(one.done() for one in waiting), "somebody will resume it"
    pool.resume("b")
    assert await asyncio.gather(*waiting) == ["b", "b"]


@virtual
async def test_l05_what_a_waiter_was_granted_and_has_not_begun_to_use_is_taken_back() -> None:
    pool = ResourcePool([Resource("a", 1, 1)])
    used: list[str] = []
    async with pool.lease():
        waiting = asyncio.ensure_future(pool.run(always_noting(used), wait_for_capacity=True))
        await settle()
    pool.pause("a")  # in the very turn in which it was granted
    await settle()
    assert used == []
    pool.resume("a")
    await waiting
    assert used == ["a"]


def always_noting(used: list[str]) -> Any:
    async def note(resource: Resource[Any]) -> None:
        used.append(resource.resource_id)

    return note


@virtual
async def test_l05_a_call_that_waits_for_a_cooldown_does_not_wait_for_a_paused_resource() -> None:
    pool = ResourcePool({"a": 1, "b": 2})
    await pool.cool("a", 5)
    await pool.cool("b", 20)
    pool.pause("a")
    with pytest.raises(PoolExhausted) as caught:
        await pool.run(ident)
    assert caught.value.retry_after == 20
    pool.pause("b")
    with pytest.raises(PoolExhausted) as caught:
        await pool.run(ident)
    assert caught.value.retry_after is None


@virtual
async def test_l05_a_pause_is_told_once_to_every_pool_that_has_the_resource() -> None:
    shared = Resource("a", 1)
    one, two = ResourcePool([shared], name="one"), ResourcePool([shared], name="two")
    with capture_events("resources.health") as events:
        one.pause("a")
        two.pause("a")
        with pytest.raises(PoolExhausted):
            await two.run(ident)
        two.resume("a")
        one.resume("a")
    assert [(type(event), event.pool, event.resource_id) for event in events] == [
        (ResourcePaused, "one", "a"),
        (ResourcePaused, "two", "a"),
        (ResourceResumed, "one", "a"),
        (ResourceResumed, "two", "a"),
    ]
    assert await one.run(ident) == "a"


@virtual
async def test_l05_no_state_change_is_called_back() -> None:
    changes: list[Any] = []
    pool = ResourcePool({"a": 1}, on_state_change=lambda *change: changes.append(change))
    pool.pause("a")
    pool.resume("a")
    assert changes == []


def test_l05_a_resource_is_paused_from_any_thread_and_without_an_event_loop() -> None:
    pool = ResourcePool({"a": 1})
    thread = threading.Thread(target=pool.pause, args=("a",))
    thread.start()
    thread.join()
    with pytest.raises(PoolExhausted, match="1 paused"):
        pool.run_sync(lambda resource: resource)
    pool.resume("a")
    assert pool.run_sync(lambda resource: resource.resource_id) == "a"
    with pytest.raises(UnknownResource, match="'b'"):
        pool.pause("b")


@virtual
async def test_l05_a_resource_that_is_removed_while_it_is_paused_leaves_nothing() -> None:
    pool = ResourcePool({"a": 1, "b": 2})
    pool.pause("a")
    await pool.remove("a")
    assert pool.stats().paused == 0
    await pool.add("a", 1)
    assert await pool.run(ident, exclude=["b"]) == "a"


@virtual
async def test_l05_a_paused_resource_with_a_quota_opens_when_it_is_resumed() -> None:
    pool = ResourcePool({"a": 1}, quota=Quota(requests=1, per=10))
    await pool.run(ident)
    pool.pause("a")
    waiting = asyncio.ensure_future(pool.run(ident, wait_for_capacity=True))
    await asyncio.sleep(30)
    assert not waiting.done()
    pool.resume("a")
    assert await waiting == "a"
    assert asyncio.get_running_loop().time() == 30
