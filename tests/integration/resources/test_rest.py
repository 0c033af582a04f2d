"""R81: an operation lets its resource rest after the call and keeps its answer. R82: the limit of a whole pool."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from headgate import CooldownResource, DisableResource, InvalidArgument, PoolExhausted, Resource, ResourcePool
from headgate.errors import UnknownResource
from headgate.resources import events
from headgate.sharing.memory import SharedMemory
from headgate.stores import SqliteStore
from headgate.testing import capture_events, run, settle, virtual


def cooling(pool: ResourcePool[Any]) -> dict[str, float]:
    """The seconds left of those that cool down."""
    return {
        name: round(one["cooldown_seconds_remaining"], 6)
        for name, one in pool.snapshot().items()
        if one["status"] == "cooling_down"
    }


async def resting(resource: Resource[str]) -> str:
    resource.rest(30.0, "the quota is used up")
    return f"from {resource.resource_id}"


@virtual
async def test_r81_run_keeps_the_answer_and_the_resource_rests_after_the_call() -> None:
    pool = ResourcePool({"a": "x", "b": "y"})

    async def slowly(resource: Resource[str]) -> str:
        resource.rest(30.0)
        assert cooling(pool) == {}
        await asyncio.sleep(10.0)
        return "answer"

    assert await pool.run(slowly) == "answer"
    assert cooling(pool) == {"a": 30.0}
    assert await pool.run(resting) == "from b"
    with pytest.raises(PoolExhausted) as caught:
        await pool.run(resting)
    assert caught.value.retry_after == pytest.approx(30.0)
    await asyncio.sleep(31.0)
    assert await pool.run(resting) == "from a"


@virtual
async def test_r81_use_lease_and_stream_too() -> None:
    pool = ResourcePool(["x", "y", "z"])

    @pool.use()
    async def used(resource: Resource[str]) -> str:
        return await resting(resource)

    async def items(resource: Resource[str]) -> AsyncIterator[int]:
        resource.rest(7.0)
        yield 1
        assert len(cooling(pool)) == 2  # not before the stream has ended
        yield 2

    assert await used() == "from resource-0"
    async with pool.lease() as leased:
        leased.rest(5.0)
        assert len(cooling(pool)) == 1
    assert [item async for item in pool.stream(items)] == [1, 2]
    assert cooling(pool) == {"resource-0": 30.0, "resource-1": 5.0, "resource-2": 7.0}


def test_r81_run_sync_too() -> None:
    pool = ResourcePool(["x"])

    def plain(resource: Resource[str]) -> int:
        resource.rest(30.0)
        return 7

    assert pool.run_sync(plain) == 7
    assert 0.0 < cooling(pool)["resource-0"] <= 30.0


@virtual
async def test_r81_a_failure_of_the_callers_own_rests_it_as_well() -> None:
    pool = ResourcePool(["x"])

    async def fails(resource: Resource[str]) -> None:
        resource.rest(3.0)
        raise LookupError

    with pytest.raises(LookupError):
        await pool.run(fails)
    assert cooling(pool) == {"resource-0": 3.0}


@virtual
async def test_r81_a_cancelled_call_rests_it_as_well() -> None:
    pool = ResourcePool(["x"])

    async def hangs(resource: Resource[str]) -> None:
        resource.rest(3.0)
        await asyncio.sleep(100.0)

    task = asyncio.ensure_future(pool.run(hangs))
    await settle()
    task.cancel()
    await asyncio.wait([task])
    assert cooling(pool) == {"resource-0": 3.0}


@virtual
async def test_r81_of_a_rest_and_a_cooldown_the_longer_counts() -> None:
    pool = ResourcePool(["x"], max_attempts=1, cooldown_table=[10.0, 99.0])

    async def both(resource: Resource[str], rest: float) -> None:
        resource.rest(rest)
        raise CooldownResource

    with pytest.raises(PoolExhausted):
        await pool.run(lambda resource: both(resource, 3.0))
    assert cooling(pool) == {"resource-0": 10.0}
    await pool.enable("resource-0")
    with pytest.raises(PoolExhausted):
        await pool.run(lambda resource: both(resource, 30.0))
    assert cooling(pool) == {"resource-0": 30.0}


@virtual
async def test_r81_a_disabled_resource_stays_disabled() -> None:
    pool = ResourcePool(["x"], max_attempts=1)

    async def dies(resource: Resource[str]) -> None:
        resource.rest(3.0)
        raise DisableResource

    with pytest.raises(PoolExhausted):
        await pool.run(dies)
    await pool.cool("resource-0", 5.0)
    assert pool.snapshot()["resource-0"]["status"] == "disabled"
    await pool.enable("resource-0")
    assert cooling(pool) == {}  # the rest is not kept for later


@virtual
async def test_r81_a_rest_cancels_no_sibling() -> None:
    pool = ResourcePool(["x"])
    gate = asyncio.Event()

    async def waits(_: Resource[str]) -> str:
        await gate.wait()
        return "sibling"

    async def rests_later(resource: Resource[str]) -> str:
        await asyncio.sleep(1.0)
        return await resting(resource)

    older = asyncio.ensure_future(pool.run(waits))
    rests = asyncio.ensure_future(pool.run(rests_later))
    younger = asyncio.ensure_future(pool.run(waits))
    assert await rests == "from resource-0"
    assert cooling(pool) == {"resource-0": 30.0}
    gate.set()
    assert [await older, await younger] == ["sibling", "sibling"]
    assert cooling(pool) == {"resource-0": 30.0}  # they began before it: their success does not end it


@virtual
async def test_r81_polite_pauses_do_not_grow() -> None:
    pool = ResourcePool(["x"], cooldown_table=[10.0, 99.0])

    async def polite(resource: Resource[str]) -> None:
        resource.rest(1.0)
        resource.rest(0.5)  # the longer counts

    for _ in range(5):
        await pool.run(polite, wait_for_cooldown=True)
        assert cooling(pool) == {"resource-0": 1.0}
        assert pool.snapshot()["resource-0"]["consecutive_cooldown"] == 1


@virtual
async def test_r81_a_waiter_is_served_when_the_rest_is_over() -> None:
    pool = ResourcePool({"a": "x"}, max_in_flight=1)
    started = asyncio.get_running_loop().time()
    await asyncio.gather(*(pool.run(resting, wait_for_capacity=True) for _ in range(2)))
    assert asyncio.get_running_loop().time() - started == pytest.approx(30.0)


@virtual
async def test_r81_listeners_hear_of_it_with_its_reason() -> None:
    changes: list[tuple[str, str, str]] = []
    pool = ResourcePool(
        {"a": "sk-secret-1"}, on_state_change=lambda name, old, new, _: changes.append((name, old, new))
    )

    async def op(resource: Resource[str]) -> None:
        resource.rest(3.0, f"quota of {resource.value}")

    with capture_events() as heard:
        await pool.run(op)
    cooled = [one for one in heard if isinstance(one, events.ResourceCooled)]
    assert [(one.resource_id, one.seconds, one.reason) for one in cooled] == [("a", 3.0, "quota of <a>")]
    assert changes == [("a", "healthy", "cooling_down")]


@virtual
async def test_r81_cool_from_outside() -> None:
    pool = ResourcePool({"a": "x", "b": "y"})
    await pool.cool("a", 60.0, "maintenance")
    await pool.cool("a", 5.0)  # never shorter
    await pool.cool("b", 0.0)
    assert cooling(pool) == {"a": 60.0}
    with pytest.raises(UnknownResource, match="'c'"):
        await pool.cool("c", 1.0)


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf"), "3", None])
def test_r81_seconds_are_checked(seconds: Any) -> None:
    pool = ResourcePool({"a": "x"})
    with pytest.raises(InvalidArgument, match=r"rest\(\) must be finite and >= 0, got"):
        Resource("a", "x").rest(seconds)
    with pytest.raises(InvalidArgument, match=r"cool\(\) must be finite and >= 0, got"):
        run(pool.cool("a", seconds))


@virtual
async def test_r81_a_resource_of_two_pools_rests_in_both() -> None:
    shared = Resource("a", "x")
    one, two = ResourcePool([shared]), ResourcePool([shared])
    await one.run(resting)
    assert cooling(one) == cooling(two) == {"a": 30.0}


@virtual
async def test_r81_outside_of_calls_it_rests_at_once_and_without_a_pool_nothing_happens() -> None:
    resource = Resource("a", "x")
    resource.rest(3.0)  # as in a test of an operation
    assert resource.status == "healthy"
    pool = ResourcePool([resource])
    resource.rest(3.0)
    assert cooling(pool) == {"a": 3.0}


@virtual
async def test_r81_other_processes_learn_of_it() -> None:
    place = SharedMemory()
    one = ResourcePool({"a": "x", "b": "y"}, name="keys", store=place.member())
    two = ResourcePool({"a": "x", "b": "y"}, name="keys", store=place.member())
    assert await one.run(resting) == "from a"
    await settle()
    await one.cool("b", 12.0)
    await settle()
    assert {name: round(seconds, 1) for name, seconds in cooling(two).items()} == {"a": 30.0, "b": 12.0}


@pytest.mark.integration
def test_r81_other_members_of_a_sqlite_store_learn_of_it(tmp_path: Path) -> None:
    async def main() -> None:
        stores = [SqliteStore(tmp_path / "shared.db") for _ in range(2)]
        try:
            one, two = (ResourcePool({"a": "x", "b": "y"}, name="keys", store=store) for store in stores)
            assert await one.run(resting) == "from a"
            await one.cool("b", 12.0)
            async with asyncio.timeout(10):
                while len(cooling(two)) < 2:  # noqa: ASYNC110  # another thread tells it
                    await asyncio.sleep(0.005)
            assert 20.0 < cooling(two)["a"] <= 30.0
            assert 2.0 < cooling(two)["b"] <= 12.0
            with pytest.raises(PoolExhausted):
                await two.run(resting)
        finally:
            for store in stores:
                store.close()

    asyncio.run(main())


# -- R82 ---------------------------------------------------------------------------------------------------------------


@virtual
async def test_r82_a_pool_limits_resources_that_have_no_limit() -> None:
    pool = ResourcePool([Resource("own", "x", max_in_flight=5), Resource("none", "y")], max_in_flight=2)
    await pool.add("added", "z")
    await pool.add("explicit", "z", max_in_flight=None)
    await pool.add(Resource("object", "z"))
    limits = {name: one["max_in_flight"] for name, one in pool.snapshot().items()}
    assert limits == {"own": 5, "none": 2, "added": 2, "explicit": None, "object": 2}
    await pool.reconcile({"fresh": "v", "none": "y"})
    assert {name: one["max_in_flight"] for name, one in pool.snapshot().items()} == {"fresh": 2, "none": 2}


@virtual
async def test_r82_the_limit_holds() -> None:
    pool = ResourcePool({"a": "x"}, max_in_flight=2)
    most = running = 0

    async def op(_: Resource[str]) -> None:
        nonlocal most, running
        running += 1
        most = max(most, running)
        await asyncio.sleep(1.0)
        running -= 1

    await asyncio.gather(*(pool.run(op, wait_for_capacity=True) for _ in range(6)))
    assert most == 2


@pytest.mark.parametrize("number", [0, -1, True, 1.5, "2"])
def test_r82_the_limit_is_checked(number: Any) -> None:
    with pytest.raises(InvalidArgument, match="max_in_flight must be >= 1 or None"):
        ResourcePool(["x"], max_in_flight=number)


def test_r82_the_first_screen_of_the_docs_warns_of_interrupted_calls() -> None:
    page = (Path(__file__).parents[3] / "docs" / "resources.md").read_text("utf-8")
    first = page.partition("## The operation")[0]
    assert "already paid for may be interrupted" in first
    assert "cancel_siblings=False" in first
