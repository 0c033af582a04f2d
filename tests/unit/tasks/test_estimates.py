"""L07: `handle.eta()`, and `retry_after` of refusals, beside what really happens."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from statistics import median
from typing import Any

import pytest

from headgate import (
    PoolBusy,
    QueueFull,
    ResourcePool,
    SubmitTimeout,
    TaskHandle,
    TaskPool,
    TaskRejected,
    backpressure_queue,
    fail_fast,
    fair_round_robin,
    fair_share,
    fifo,
    priority,
)
from headgate.tasks import Strategy
from headgate.testing import settle, virtual
from tests.support.tasks.support import Gate, quick, slow

ORDERS: dict[str, tuple[Strategy, int | dict[str, int] | None]] = {
    "fifo": (fifo(), None),
    "priority": (priority(), None),
    "fair_round_robin": (fair_round_robin("tenant_id"), None),
    "fair_share": (fair_share("tenant_id", weights={"t0": 3}), None),
    "fair_round_robin, each capped": (fair_round_robin("tenant_id"), 2),
    "fair_round_robin, one capped": (fair_round_robin("tenant_id"), {"t0": 1}),
    "fifo, each capped": (fifo(), 2),
}


class Simulation:
    """A pool under load. Estimates are noted while it runs, and compared with the truth at its end."""

    def __init__(self, pool: TaskPool, tenant: str, seed: int) -> None:
        self.pool = pool
        self._tenant = tenant
        self._chance = random.Random(seed)
        self._handles: dict[int, TaskHandle[Any]] = {}
        self._started: dict[int, float] = {}
        self._estimates: list[tuple[int, float, float]] = []

    async def _work(self, number: int) -> None:
        self._started[number] = asyncio.get_running_loop().time()
        await asyncio.sleep(self._chance.expovariate(1.0))

    async def submit(self) -> None:
        number, chance = len(self._handles), self._chance
        tenant = {self._tenant: f"t{int(5 * chance.random() ** 2)}"}
        urgency = chance.choice([0, 0, 0, 1])
        self._handles[number] = await self.pool.submit(self._work, number, priority=urgency, **tenant)  # type: ignore[arg-type]

    def estimate(self) -> None:
        for number, handle in self._handles.items():
            if handle.status == "queued" and self._chance.random() < 0.1:
                eta = handle.eta()
                assert eta is not None
                self._estimates.append((number, asyncio.get_running_loop().time(), eta))

    async def run(self, burst: int, later: int, per_second: float) -> float:
        for _ in range(burst):
            await self.submit()
        await asyncio.sleep(0.5)
        for _ in range(later):
            await asyncio.sleep(self._chance.expovariate(per_second))
            await self.submit()
            self.estimate()
        while self.pool.snapshot(0).queued:
            self.estimate()
            await asyncio.sleep(1)
        await self.pool.drain()
        truths = [(eta, self._started[number] - at) for number, at, eta in self._estimates]
        assert len(truths) > 100
        return median(eta / truth for eta, truth in truths if truth > 0.1)


@pytest.mark.parametrize("slots", [1, 4, 16])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("burst", "load"), [(150, 0.7), (0, 1.5)])
@virtual
async def test_l07_estimates_are_within_half_and_twice_the_truth(
    order: str, slots: int, burst: int, load: float
) -> None:
    queue, caps = ORDERS[order]
    async with TaskPool(max_concurrent=slots, queue=queue, max_concurrent_per_key=caps) as pool:
        ratio = await Simulation(pool, queue.key, seed=slots).run(burst, 300, load * slots)
    assert 0.5 <= ratio <= 2


@virtual
async def test_l07_eta_is_none_then_seconds_then_zero() -> None:
    async with TaskPool() as pool:
        gate = Gate()
        running = await pool.submit(gate.wait)
        handles = [await pool.submit(slow, 2) for _ in range(3)]
        assert running.eta() == 0.0
        assert [handle.eta() for handle in handles] == [None] * 3, "nothing has run yet"
        await asyncio.sleep(4)
        gate.open()
        await settle()
        assert handles[0].eta() == 0.0
        await asyncio.sleep(2)
        await settle()
        assert handles[0].eta() == 0.0, "it has ended, and so it has started"
        assert [handle.eta() for handle in handles] == [0.0, 0.0, 3.0], "two starts in six seconds"
        handles[2].cancel()
        assert handles[2].eta() is None, "it never starts"


@virtual
async def test_l07_a_delay_and_resting_keys_are_part_of_it() -> None:
    async with TaskPool() as pool:
        await pool.run(slow, 1)
        handle = await pool.submit(quick, delay=40)
        assert handle.eta() == 40.0
        handle.cancel()
    keys = ResourcePool({"a": 1})
    async with TaskPool(resources=keys) as pool:
        await keys.cool("a", 30)
        waits = await pool.submit(_with_key)
        assert waits.eta() == 30.0
        waits.cancel()


async def _with_key(key: Any) -> None:
    pass


@virtual
async def test_l07_a_pool_that_stands_still_says_so() -> None:
    async with TaskPool(max_concurrent=2) as pool:
        gate = Gate()
        for _ in range(20):
            await pool.submit(slow, 1)
        for _ in range(2):
            await pool.submit(gate.wait)
        handles = [await pool.submit(quick) for _ in range(10)]
        await asyncio.sleep(10.5)
        assert handles[9].eta() == 5.0
        await asyncio.sleep(14)
        eta = handles[9].eta()
        assert eta is not None
        assert eta > 11, "in half of the last 24 seconds nothing has started"
        gate.open()


@virtual
async def test_l07_idle_times_do_not_count() -> None:
    async with TaskPool(max_concurrent=2) as pool:
        for _ in range(2):
            handles = [await pool.submit(slow, 1) for _ in range(12)]
            await asyncio.sleep(2.5)
            assert handles[-1].eta() == 3.0, "the sixth of those that are queued, and two start each second"
            await asyncio.sleep(15)
            for _ in range(3):
                await pool.run(slow, 1)  # a slot is free: it says nothing about the pace


# -- refusals ----------------------------------------------------------------------------------------------------------


async def _refused(submit: Callable[[], Awaitable[Any]], error: type[Exception]) -> float | None:
    with pytest.raises(error) as caught:
        await submit()
    seconds: float | None = caught.value.retry_after  # type: ignore[attr-defined]
    return seconds


@virtual
async def test_l07_a_refusal_tells_how_long_the_queue_is() -> None:
    async with TaskPool(max_concurrent=2, backpressure=backpressure_queue(20, "fail_submitter")) as pool:
        for _ in range(22):
            await pool.submit(slow, 1)
        assert await _refused(lambda: pool.submit(slow, 1), QueueFull) is None, "nothing is known yet"
        refused: list[float | None] = []
        for _ in range(6):
            await asyncio.sleep(1)
            await settle()
            for _ in range(2):
                await pool.submit(slow, 1)
            refused.append(await _refused(lambda: pool.submit(slow, 1), QueueFull))
        assert refused == [10.5] * 6, "20 tasks ahead, two start each second"


@virtual
async def test_l07_the_tenant_that_floods_is_told_to_wait_longer() -> None:
    queue = fair_round_robin("tenant_id")
    async with TaskPool(max_concurrent=2, queue=queue, backpressure=backpressure_queue(20, "fail_submitter")) as pool:
        for number in range(22):
            await pool.submit(slow, 1, tenant_id="few" if number > 20 else "many")
        await asyncio.sleep(2)
        await settle()
        while pool.snapshot(0).queued < 20:
            await pool.submit(slow, 1, tenant_id="many")
        many = await _refused(lambda: pool.submit(slow, 1, tenant_id="many"), QueueFull)
        few = await _refused(lambda: pool.submit(slow, 1, tenant_id="new"), QueueFull)
        assert many is not None
        assert few is not None
        assert (many, few) == (pytest.approx(10.5), pytest.approx(1.0))


@virtual
async def test_l07_every_refusal_carries_it() -> None:
    async def warm(pool: TaskPool, queued: int) -> list[TaskHandle[Any]]:
        handles = [await pool.submit(slow, 2) for _ in range(1 + queued)]
        await asyncio.sleep(2)
        await settle()
        return [*handles, await pool.submit(slow, 2)]

    async with TaskPool(backpressure=backpressure_queue(2)) as pool:
        await warm(pool, 2)
        assert await _refused(lambda: pool.submit(quick, wait_timeout=0.5), SubmitTimeout) == 6.0
        with pytest.raises(QueueFull) as caught:
            pool.submit_nowait(quick)
        assert caught.value.retry_after == 6.0
    for policy in ("drop_oldest", "drop_newest", "drop_fair"):
        async with TaskPool(backpressure=backpressure_queue(2, policy)) as pool:
            handles = await warm(pool, 2)
            handles.append(await pool.submit(slow, 2))
            [dropped] = [handle for handle in handles if handle.status == "rejected"]
            assert await _refused(lambda handle=dropped: _awaited(handle), TaskRejected) == 6.0  # type: ignore[misc]
    async with TaskPool(backpressure=fail_fast()) as pool:
        await pool.run(slow, 2)
        await pool.submit(slow, 2)
        await asyncio.sleep(0.5)
        assert await _refused(lambda: pool.submit(quick), PoolBusy) == 1.5


async def _awaited(handle: TaskHandle[Any]) -> Any:
    return await handle
