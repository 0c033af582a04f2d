"""H10: a process that has lost its lease uses nothing of what it held. Members of a `SharedMemory` play processes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest

from headgate import PoolExhausted, Resource, ResourcePool
from headgate.core.clock import clock
from headgate.resources.shared_quotas import PATIENCE
from headgate.sharing.memory import MemoryState, SharedMemory
from headgate.sharing.states import Step
from headgate.testing import settle, virtual
from tests.support.resources.support import Gate, at_once, ident
from tests.unit.resources.test_quotas import Upstream
from tests.unit.resources.test_shared_health import count_exchanges
from tests.unit.resources.test_shared_quotas import share, use_up

QUOTA = at_once(requests=10, per=60.0)


@virtual
async def test_h10_nothing_begins_after_the_lease_has_ended() -> None:
    """The process was stopped, and the thread of its store has not come to know that."""
    place = SharedMemory()
    store = place.member()
    pool = share(store, QUOTA)
    await pool.run(ident)
    store.deadline = clock.now() + 15
    assert await pool.run(ident) == "a"
    await asyncio.sleep(15)
    store.hold_up()
    with pytest.raises(PoolExhausted):
        await pool.run(ident)
    waiting = asyncio.create_task(pool.run(ident, wait_for_capacity=True))
    await asyncio.sleep(5)
    assert not waiting.done()
    store.deadline = clock.now() + 15
    store.reconnect()
    assert await waiting == "a"


@virtual
async def test_h10_what_a_process_held_that_lost_its_lease_counts_as_used() -> None:
    place, upstream = SharedMemory(), Upstream(10, None, 60.0)
    store = place.member()
    one, other = share(store, QUOTA), share(place, QUOTA)
    gate = Gate()
    running = asyncio.create_task(one.run(gate, wait_for_capacity=True))
    await settle()
    upstream.arrive("a", 0)
    store.lose()
    used = await use_up(one, upstream) + await use_up(other, upstream)
    assert 0 < used < 10
    gate.finish(0)
    await running
    for pool in (one, other) * 5:
        assert await pool.run(ident, wait_for_capacity=True) == "a"
        upstream.arrive("a", 0)
    assert upstream.exceeded == []


class SlowStore(MemoryState):
    """Runs steps at once, and delivers their replies when it is told to."""

    def __init__(self, place: SharedMemory) -> None:
        super().__init__(place)
        self.is_slow = False
        self.undelivered: list[Callable[[], None]] = []

    def transact(self, key: str, step: Step, *, durable: bool = False) -> Future[Any]:
        done = super().transact(key, step, durable=durable)
        if not self.is_slow or not key.startswith("quotas/"):
            return done
        future: Future[Any] = Future()
        self.undelivered.append(lambda: future.set_result(done.result()))
        return future


@virtual
async def test_h10_an_answer_from_before_the_lease_was_lost_gives_nothing() -> None:
    place = SharedMemory()
    store = SlowStore(place)
    one, other = share(store, QUOTA), share(place, QUOTA)
    assert await use_up(other)
    store.is_slow = True
    waiting = [asyncio.create_task(one.run(ident, wait_for_capacity=True)) for _ in range(10)]
    await asyncio.sleep(65)  # it was granted something, and does not know that
    assert store.undelivered
    before = sum(task.done() for task in waiting)
    store.lose()
    late, store.undelivered = store.undelivered, []
    for deliver in late:
        deliver()
    await settle()
    assert sum(task.done() for task in waiting) == before
    store.is_slow = False
    while store.undelivered:
        store.undelivered.pop()()
    await asyncio.gather(*waiting)


@virtual
async def test_h10_a_call_without_a_wait_mode_waits_for_the_store_only_for_a_moment() -> None:
    place = SharedMemory()
    store = place.member()
    pool = share(store, QUOTA)
    await use_up(pool)
    began = clock.now()
    store.hold_up()
    with pytest.raises(PoolExhausted):
        await pool.run(ident)
    assert clock.now() - began <= PATIENCE


@pytest.mark.parametrize("cost", [0, 60])
def test_h10_a_call_without_a_wait_mode_gives_up_that_lacks_both_a_permit_and_the_quota(cost: int) -> None:
    @virtual
    async def scenario() -> None:
        place = SharedMemory()
        store = place.member()
        quota = at_once(requests=1, per=60.0) if not cost else at_once(tokens=100, per=60.0)
        one, other = share(place, quota, max_in_flight=1), share(store, quota, max_in_flight=1)
        assert await one.run(ident, cost=cost) == "a"
        asked = count_exchanges(store)
        with pytest.raises(PoolExhausted):
            await other.run(ident, cost=cost)
        assert len(asked) < 20
        assert await other.run(ident, cost=cost, wait_for_capacity=True) == "a"

    scenario()


@pytest.mark.parametrize("group", [None, "one account of two pools"])
def test_h10_processes_that_wait_for_a_quota_do_not_pass_a_permit_to_and_fro(group: str | None) -> None:
    @virtual
    async def scenario() -> None:
        place, quota = SharedMemory(), at_once(requests=3, per=10.0, delay=0.0)
        stores = [place.member() for _ in range(2)]
        asked = [count_exchanges(store) for store in stores]
        pools = [
            ResourcePool(
                [Resource("a", "a", quota=quota, quota_group=group, max_in_flight=1)], name="keys", store=store
            )
            for store in stores
        ]
        calls = [pools[number == 11].run(ident, wait_for_capacity=True) for number in range(12)]
        assert await asyncio.gather(*calls) == ["a"] * 12
        assert clock.now() == pytest.approx(30.0, abs=1.0)
        assert sum(map(len, asked)) < 200

    scenario()


@virtual
async def test_h10_a_call_without_a_wait_mode_asks_for_what_it_costs_and_not_for_less_again_and_again() -> None:
    place, quota = SharedMemory(), at_once(tokens=100, per=10.0, delay=0.0)
    store = place.member()
    one, other = share(place, quota), share(store, quota)
    await one.run(ident, cost=60)
    waiting = asyncio.create_task(one.run(ident, cost=100, wait_for_capacity=True))
    await asyncio.sleep(0.1)
    asked = count_exchanges(store)
    with pytest.raises(PoolExhausted):
        await other.run(ident, cost=50)
    assert len(asked) < 10
    assert await waiting == "a"
