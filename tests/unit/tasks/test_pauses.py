"""L05: pausing pools and tenants, through the pool."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from headgate import (
    InvalidArgument,
    PoolBusy,
    PoolClosed,
    ResourcePool,
    TaskExpired,
    TaskPool,
    fail_fast,
    fair_round_robin,
    fair_share,
    fifo,
    lifo,
    priority,
)
from headgate.sharing.memory import SharedMemory
from headgate.testing import capture_events, run, settle, virtual
from tests.unit.tasks.test_shared_pools import Work, make

STRATEGIES = [fifo, lifo, priority, fair_round_robin, fair_share]


@pytest.mark.parametrize("strategy", STRATEGIES)
@virtual
async def test_l05_running_tasks_continue_and_queued_ones_wait(strategy: Any) -> None:
    work = Work()
    async with TaskPool(max_concurrent=2, queue=strategy()) as pool:
        for name in range(4):
            await pool.submit(work, name)
        pool.pause()
        work.let_go(*work.running)
        await settle()
        assert (len(work.began), pool.snapshot().queued, pool.snapshot().active) == (2, 2, 0)
        late = await pool.submit(work, 9)
        assert late.status == "queued", "not even a task that finds a free slot starts"
        assert pool.snapshot().waiting_for == {"cause": "paused", "seconds": None}
        assert late.eta() is None
        assert pool.stats().paused
        work.let_go()
        pool.resume()
        await settle()
        assert (len(work.began), pool.stats().paused, pool.snapshot().waiting_for) == (5, False, None)


@virtual
async def test_l05_ttl_deadline_and_delay_run_on_while_a_pool_is_paused() -> None:
    work = Work()
    work.let_go()
    async with TaskPool(max_concurrent=2) as pool:
        pool.pause()
        expiring = await pool.submit(work, "ttl", ttl=5.0)
        late = await pool.submit(work, "deadline", deadline=asyncio.get_running_loop().time() + 7.0)
        delayed = await pool.submit(work, "delayed", delay=8.0)
        await asyncio.sleep(6.0)
        assert (expiring.status, late.status) == ("expired", "queued")
        await asyncio.sleep(3.0)
        assert (late.status, delayed.status) == ("expired", "queued")
        pool.resume()
        assert await delayed == "delayed", "its delay was over already"
        assert asyncio.get_running_loop().time() == 9.0
        with pytest.raises(TaskExpired):
            await expiring


@virtual
async def test_l05_a_retry_waits_until_its_pool_is_resumed() -> None:
    tried: list[float] = []

    async def fails_once() -> None:
        tried.append(asyncio.get_running_loop().time())
        await asyncio.sleep(1.0)
        if len(tried) == 1:
            raise OSError

    async with TaskPool() as pool:
        task = await pool.submit(fails_once, retries=1)
        pool.pause()
        await asyncio.sleep(10.0)
        assert (task.status, tried) == ("queued", [0.0])
        pool.resume()
        await task
    assert tried == [0.0, 10.0]


@virtual
async def test_l05_a_task_that_waited_for_another_gets_its_slot_back_while_the_pool_is_paused() -> None:
    """It runs. What it submits does not."""
    said: list[str] = []
    gate = asyncio.Event()

    async def child() -> None:
        await gate.wait()

    async def parent() -> None:
        await (await pool.submit(child))
        said.append("back")
        await asyncio.sleep(1.0)
        await (await pool.submit(child))
        said.append("again")

    async with TaskPool(max_concurrent=1) as pool:
        await pool.submit(parent)
        await settle()
        waiting = await pool.submit(child)
        pool.pause()
        gate.set()
        await asyncio.sleep(5.0)
        assert said == ["back"]
        assert (waiting.status, pool.snapshot().queued, pool.snapshot().waiting) == ("queued", 2, 1)
        pool.resume()
        await settle()
        assert said == ["back", "again"]


@pytest.mark.parametrize("strategy", STRATEGIES)
@virtual
async def test_l05_a_paused_tenant_waits_and_the_others_do_not(strategy: Any) -> None:
    work = Work()
    work.let_go()
    async with TaskPool(max_concurrent=1, queue=strategy()) as pool:
        pool.pause_tenant("a")
        for number in range(6):
            await pool.submit(work, number, key="ab"[number % 2])
        await pool.submit(work, 6)
        await settle()
        assert sorted(work.began) == [1, 3, 5, 6]
        assert pool.stats().paused_tenants == {"a"}
        assert pool.snapshot().waiting_for == {"cause": "paused", "seconds": None}
        assert not pool.stats().paused
        pool.resume_tenant("a")
        await settle()
        assert sorted(work.began) == list(range(7))
        assert pool.stats().paused_tenants == frozenset()


@pytest.mark.parametrize("strategy", [fifo, lifo, priority])
@virtual
async def test_l05_a_pause_of_a_tenant_changes_the_order_of_no_other_task(strategy: Any) -> None:
    orders: list[list[int]] = []
    for pauses in (False, True):
        work = Work()
        work.let_go()
        async with TaskPool(max_concurrent=1, queue=strategy()) as pool:
            pool.pause()
            for number in range(12):
                await pool.submit(work, number, key="abc"[number % 3], priority=number * 7 % 4)
            if pauses:
                pool.pause_tenant("a")
                pool.resume_tenant("a")
            pool.resume()
            await settle()
        orders.append(work.began)
    assert orders[0] == orders[1]


@virtual
async def test_l05_a_pause_and_a_cap_of_one_tenant_hold_together() -> None:
    work = Work()
    async with TaskPool(max_concurrent=9, max_concurrent_per_key=1, queue=fair_round_robin()) as pool:
        for number in range(3):
            await pool.submit(work, number, key="a")
        pool.pause_tenant("a")
        pool.limit_keys(None)
        await settle()
        assert work.began == [0], "the cap is gone, the pause is not"
        pool.limit_keys(2)
        pool.resume_tenant("a")
        await settle()
        assert work.began == [0, 1], "and here it is the other way round"
        assert pool.snapshot().waiting_for == {"cause": "max_concurrent_per_key", "seconds": None}
        work.let_go()


@virtual
async def test_l05_fail_fast_says_that_it_is_paused() -> None:
    work = Work()
    work.let_go()
    async with TaskPool(max_concurrent=2, backpressure=fail_fast()) as pool:
        pool.pause()
        with pytest.raises(PoolBusy, match="the pool is paused") as caught:
            await pool.submit(work, 1)
        assert caught.value.retry_after is None
        pool.resume()
        pool.pause_tenant("a")
        with pytest.raises(PoolBusy, match="the tenant 'a' is paused"):
            await pool.submit(work, 2, key="a")
        assert await (await pool.submit(work, 3, key="b")) == 3


@pytest.mark.parametrize("leaves", [False, True])
def test_l05_drain_and_leaving_the_block_resume_first_and_log_it(
    leaves: bool, caplog: pytest.LogCaptureFixture
) -> None:
    work = Work()
    work.let_go()

    async def main() -> None:
        async with TaskPool("l05-drained") as pool:
            pool.pause()
            pool.pause_tenant("a")
            await pool.submit(work, 1)
            await pool.submit(work, 2, key="a")
            if not leaves:
                await pool.drain()
                assert sorted(work.began) == [1, 2]
                assert (pool.stats().paused, pool.stats().paused_tenants) == (False, frozenset())

    with caplog.at_level(logging.WARNING, "headgate.tasks"):
        run(main)
    assert sorted(work.began) == [1, 2]
    lines = sorted(record.getMessage() for record in caplog.records)
    assert lines == [
        "l05-drained: the pool is resumed, because drain() waits for what is queued",
        "l05-drained: the tenant 'a' is resumed, because drain() waits for what is queued",
    ]


@virtual
async def test_l05_a_pool_that_closes_cannot_be_paused() -> None:
    work = Work()
    pool = TaskPool("l05-closing")
    await pool.submit(work, 1)
    closing = asyncio.ensure_future(pool.close())
    await settle()
    with pytest.raises(PoolClosed, match="the pool 'l05-closing' is closing"):
        pool.pause()
    with pytest.raises(PoolClosed, match="pause_tenant"):
        pool.pause_tenant("a")
    pool.resume()
    work.let_go()
    await closing


@virtual
async def test_l05_a_pause_is_told_once_and_to_pause_again_is_nothing() -> None:
    with capture_events("tasks.pools") as events:
        async with TaskPool("l05-told") as pool:
            pool.pause()
            pool.pause()
            pool.pause_tenant("a")
            pool.resume()
            pool.resume()
            pool.resume_tenant("b")
            pool.resume_tenant("a")
    assert [(event.name, event.pool, event.tenant) for event in events] == [
        ("pool_paused", "l05-told", None),
        ("pool_paused", "l05-told", "a"),
        ("pool_resumed", "l05-told", None),
        ("pool_resumed", "l05-told", "a"),
    ]


@virtual
async def test_l05_what_is_no_tenant_is_refused() -> None:
    async with TaskPool() as pool:
        with pytest.raises(InvalidArgument, match="takes a tenant, got None"):
            pool.pause_tenant(None)
        with pytest.raises(InvalidArgument, match="blank"):
            pool.resume_tenant(" ")


@virtual
async def test_l05_the_story_says_that_a_task_was_paused() -> None:
    work = Work()
    work.let_go()
    async with TaskPool(max_concurrent=5) as pool:
        pool.pause()
        task = await pool.submit(work, 1, key="a")
        await asyncio.sleep(4.0)
        assert "waits 4.000 s for its turn: the pool is paused" in task.story()
        pool.resume()
        await task
        assert "waits 4.000 s for its turn: the pool is paused" in task.story()
        pool.pause_tenant("a")
        other = await pool.submit(work, 2, key="a")
        await asyncio.sleep(2.0)
        pool.resume_tenant("a")
        await other
        assert "waits 2.000 s for its turn: its tenant is paused" in other.story()


@virtual
async def test_l05_pauses_before_the_first_submit_count() -> None:
    work = Work()
    work.let_go()
    pool = TaskPool()
    pool.pause()
    pool.pause_tenant("a")
    task = await pool.submit(work, 1, key="a")
    pool.resume()
    await settle()
    assert task.status == "queued"
    await pool.close()
    assert task.status == "completed"


# -- with resources ----------------------------------------------------------------------------------------------------


@virtual
async def test_l05_tasks_that_only_a_paused_resource_serves_wait_and_the_others_do_not() -> None:
    used: list[str] = []

    async def use(resource: Any) -> None:
        used.append(resource.resource_id)

    keys = ResourcePool({"k1": 1, "k2": 2})
    async with TaskPool(max_concurrent=4, resources=keys) as pool:
        keys.pause("k1")
        held = await pool.submit(use, exclude=["k2"])
        for _ in range(3):
            await pool.submit(use)
        await settle()
        assert (used, held.status) == (["k2"] * 3, "queued")
        assert pool.snapshot().waiting_for == {"cause": "paused", "seconds": None}
        assert "1 paused" in held.story()
        keys.resume("k1")
        await settle()
        assert used == ["k2", "k2", "k2", "k1"]


@virtual
async def test_l05_a_paused_task_pool_leaves_resources_to_others() -> None:
    """A place that it has in the queue for a resource is passed over while it starts nothing."""
    keys = ResourcePool({"k1": 1}, max_in_flight=1)
    used: list[Any] = []

    async def use(resource: Any, name: Any = "run") -> None:
        used.append(name)
        await asyncio.sleep(1.0)

    async with TaskPool(max_concurrent=2, resources=keys) as pool:
        await pool.submit(use, 1)
        await pool.submit(use, 2)
        await settle()
        pool.pause()
        await asyncio.wait_for(keys.run(use, wait_for_capacity=True), 10.0)
        assert used == [1, "run"]
        pool.resume()
        await settle()
        assert used == [1, "run", 2]


# -- shared ------------------------------------------------------------------------------------------------------------


@virtual
async def test_l05_a_pause_counts_for_all_who_share_the_budget() -> None:
    place, work = SharedMemory(), Work()
    one, _ = make(place)
    two, _ = make(place)
    for number in range(4):
        await one.submit(work, ("one", number))
        await two.submit(work, ("two", number))
    assert work.running.total() == 2
    two.pause()
    await settle()
    assert one.stats().paused
    work.let_go(*list(work.running))
    await settle()
    assert (work.running.total(), len(work.began)) == (0, 2)
    assert one.snapshot().waiting_for == {"cause": "paused", "seconds": None}
    three, _ = make(place)
    assert three.stats().paused, "who joins later is told"
    work.let_go()
    one.resume()
    await settle()
    assert len(work.began) == 8
    assert work.most == 2
    assert not two.stats().paused
    await asyncio.gather(*(pool.close() for pool in (one, two, three)))


@pytest.mark.parametrize("strategy", STRATEGIES)
@virtual
async def test_l05_a_paused_tenant_is_paused_for_all_who_share_the_budget(strategy: Any) -> None:
    place, work = SharedMemory(), Work()
    work.let_go()
    one, _ = make(place, queue=strategy())
    two, _ = make(place, queue=strategy())
    await one.submit(work, "first")
    one.pause_tenant("a")
    for number in range(40):
        await two.submit(work, number, key="a")
    await two.submit(work, "b", key="b")
    await settle()
    assert work.began == ["first", "b"]
    assert two.snapshot().waiting_for == {"cause": "paused", "seconds": None}
    two.resume_tenant("a")
    await settle()
    assert len(work.began) == 42
    assert one.stats().paused_tenants == frozenset()
    await asyncio.gather(one.close(), two.close())


@virtual
async def test_l05_whoever_has_nothing_queued_leaves_without_resuming_the_others() -> None:
    place, work = SharedMemory(), Work()
    work.let_go()
    one, _ = make(place)
    two, _ = make(place)
    one.pause()
    task = await one.submit(work, 1)
    await two.close()
    await settle()
    assert (one.stats().paused, task.status) == (True, "queued")
    await one.close()
    assert task.status == "completed"


@virtual
async def test_l05_pauses_are_not_stored() -> None:
    place, work = SharedMemory(), Work()
    work.let_go()
    one, _ = make(place)
    one.pause()
    one.pause_tenant("a")
    await one.close()
    two, _ = make(place)
    assert await (await two.submit(work, 1, key="a")) == 1
    assert not two.stats().paused
    await two.close()


@virtual
async def test_l05_fail_fast_of_a_shared_pool_says_that_it_is_paused() -> None:
    place, work = SharedMemory(), Work()
    one, _ = make(place, backpressure=fail_fast())
    two, _ = make(place, backpressure=fail_fast())
    one.pause()
    await settle()
    with pytest.raises(PoolBusy, match="paused"):
        await two.submit(work, 1)
    await asyncio.gather(one.close(), two.close())


@virtual
async def test_l05_two_members_that_pause_two_tenants_at_once_pause_both() -> None:
    place = SharedMemory()
    one, _ = make(place, queue=fair_round_robin(levels=True))
    two, _ = make(place, queue=fair_round_robin(levels=True))
    work = Work()
    work.let_go()
    await one.submit(work, 0)
    await two.submit(work, 0)
    one.pause_tenant("a")
    two.pause_tenant("b")
    await settle()
    for pool in (one, two):
        assert pool.stats().paused_tenants == {"a", "b"}
        for number in range(3):
            for tenant in "abc":
                await pool.submit(work, f"{tenant}{number}", key=tenant, priority=number)
    await settle()
    assert sorted(set(work.began[2:])) == ["c0", "c1", "c2"]
    one.resume_tenant("b")
    two.resume_tenant("a")
    await settle()
    assert len(work.began) == 20
    await asyncio.gather(one.close(), two.close())


@virtual
async def test_l05_a_task_of_a_paused_shared_pool_gets_its_slot_back_after_a_wait() -> None:
    place = SharedMemory()
    one, _ = make(place, max_concurrent=1)
    two, _ = make(place, max_concurrent=1)
    gate = asyncio.Event()
    ended: list[str] = []

    async def parent() -> None:
        await (await one.submit(gate.wait))
        ended.append("parent")

    await one.submit(parent)
    await settle()
    other = await two.submit(asyncio.sleep, 0)
    two.pause()
    await settle()
    gate.set()
    await settle()
    assert (ended, other.status) == (["parent"], "queued")
    two.resume()
    await other
    await asyncio.gather(one.close(), two.close())
