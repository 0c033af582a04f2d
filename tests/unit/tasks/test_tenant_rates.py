"""L03: rates of tenants, through the pool."""

from __future__ import annotations

import asyncio
import gc
from collections import defaultdict
from collections.abc import Sequence
from statistics import median
from typing import Any

import pytest

from headgate import (
    InvalidArgument,
    InvalidType,
    PoolBusy,
    Quota,
    ResourcePool,
    RetryOperation,
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
from headgate.stores import JsonLinesStore
from headgate.testing import settle, virtual

STRATEGIES = [fifo, lifo, priority, fair_round_robin, fair_share]


class Starts:
    """When tasks started, by tenant."""

    def __init__(self) -> None:
        self.at: defaultdict[Any, list[float]] = defaultdict(list)

    async def __call__(self, tenant: Any, seconds: float = 0.0) -> None:
        self.at[tenant].append(asyncio.get_running_loop().time())
        await asyncio.sleep(seconds)


def most_within(times: Sequence[float], seconds: float) -> int:
    """The largest number of these times within so many seconds."""
    return max((sum(begin <= time < begin + seconds for time in times) for begin in times), default=0)


@pytest.mark.parametrize("strategy", STRATEGIES)
@virtual
async def test_l03_a_tenant_beyond_its_rate_waits_and_the_others_do_not(strategy: Any) -> None:
    starts = Starts()
    async with TaskPool(max_concurrent=3, queue=strategy(), rate_per_tenant={"a": Quota(requests=6, per=60)}) as pool:
        for _ in range(20):
            await pool.submit(starts, "a", key="a")
        for _ in range(20):
            await pool.submit(starts, "b", 1.0, key="b")
        await asyncio.sleep(10)
        assert len(starts.at["b"]) == 20, "it needs slots alone, and these are free"
        assert pool.snapshot().active == 0, "a tenant that waits for its rate holds no slot"
    assert len(starts.at["a"]) == 20
    assert most_within(starts.at["a"], 60) == 6
    assert starts.at["a"][-1] < 60 * 20 / 6 * 1.1, "the rate is used to the full"


@pytest.mark.parametrize("window", ["sliding", "bucket", "fixed"])
@virtual
async def test_l03_the_window_and_the_burst_of_the_quota_count(window: Any) -> None:
    starts = Starts()
    rate = Quota(requests=10, per=10, window=window, burst=4)
    async with TaskPool(max_concurrent=50, rate_per_tenant=rate) as pool:
        for _ in range(60):
            await pool.submit(starts, "a", key="a")
            await pool.submit(starts, None)
        await settle()
        assert (len(starts.at["a"]), len(starts.at[None])) == (4, 60), "no tenant, no rate"
    assert most_within(starts.at["a"], 10) <= (14 if window == "bucket" else 20 if window == "fixed" else 10)
    assert 45 < starts.at["a"][-1] < 65


@virtual
async def test_l03_every_tenant_has_a_rate_of_its_own() -> None:
    starts = Starts()

    def rate_of(tenant: str) -> Quota | None:
        return None if tenant == "free" else Quota(requests=len(tenant), per=100, burst=len(tenant))

    async with TaskPool(max_concurrent=50, rate_per_tenant=rate_of) as pool:
        for tenant in ("a", "bb", "ccc", "free"):
            for _ in range(5):
                await pool.submit(starts, tenant, key=tenant)
        await settle()
        assert {tenant: len(times) for tenant, times in starts.at.items()} == {"a": 1, "bb": 2, "ccc": 3, "free": 5}


@virtual
async def test_l03_retries_count_as_starts() -> None:
    tried: list[float] = []

    async def fail() -> None:
        tried.append(asyncio.get_running_loop().time())
        raise OSError("refused")

    async with TaskPool(max_concurrent=5, rate_per_tenant=Quota(requests=2, per=10, burst=2)) as pool:
        task = await pool.submit(fail, key="a", retries=5)
        with pytest.raises(OSError, match="refused"):
            await task
    assert len(tried) == 6
    assert most_within(tried, 10) == 2


@virtual
async def test_l03_a_verdict_and_another_attempt_count_as_a_start() -> None:
    tried: list[float] = []

    async def again(resource: Any) -> None:
        tried.append(asyncio.get_running_loop().time())
        if len(tried) < 3:
            raise RetryOperation

    keys = ResourcePool({"k1": 1, "k2": 2, "k3": 3})
    rate = Quota(requests=1, per=10)
    async with TaskPool(max_concurrent=5, rate_per_tenant=rate, resources=keys) as pool:
        await (await pool.submit(again, key="a", max_attempts=9))
    assert len(tried) == 3
    assert most_within(tried, 10) == 1


@virtual
async def test_l03_a_task_that_goes_on_after_a_wait_counts_once() -> None:
    async def parent() -> float:
        await (await pool.submit(asyncio.sleep, 1.0, key="child"))
        return asyncio.get_running_loop().time()

    rates = {"a": Quota(requests=1, per=1000)}
    async with TaskPool(max_concurrent=1, rate_per_tenant=rates) as pool:
        assert await (await pool.submit(parent, key="a")) == 1.0


@virtual
async def test_l03_a_task_that_does_not_run_takes_nothing_of_the_rate() -> None:
    """It has its slot, and no resource: it goes back to the queue each time somebody looks."""
    starts = Starts()
    keys = ResourcePool({"k1": 1}, max_in_flight=1)

    async def use(resource: Any) -> None:
        await starts("a")

    rate = Quota(requests=1, per=100)
    async with TaskPool(max_concurrent=5, rate_per_tenant=rate, resources=keys) as pool:
        async with keys.lease():
            await pool.submit(use, key="a")
            for _ in range(5):
                keys.pause("k1")
                keys.resume("k1")
                await asyncio.sleep(1)
            assert starts.at["a"] == []
        await settle()
        assert starts.at["a"] == [5.0]


@virtual
async def test_l03_the_snapshot_the_story_and_the_eta_say_what_a_task_waits_for() -> None:
    starts = Starts()
    async with TaskPool(max_concurrent=5, rate_per_tenant=Quota(requests=1, per=20)) as pool:
        first = await pool.submit(starts, "a", key="a")
        second = await pool.submit(starts, "a", key="a")
        await asyncio.sleep(5)
        waiting = pool.snapshot().waiting_for
        assert waiting.cause == "rate_per_tenant"
        assert 15 <= waiting.seconds <= 15.5
        eta = second.eta()
        assert eta is not None
        assert 15 <= eta <= 15.5
        assert "its tenant has used its rate, the next start is in 15." in second.story()
        pool.pause_tenant("a")
        assert pool.snapshot().waiting_for.cause == "paused", "that does not end by itself"
        pool.resume_tenant("a")
        await second
        assert (first.eta(), second.eta()) == (0.0, 0.0)
        assert "for its turn behind other tasks (max_concurrent 5, rate_per_tenant)" in second.story()


@pytest.mark.parametrize("window", ["sliding", "bucket", "fixed"])
@virtual
async def test_l03_l07_the_eta_is_about_right_for_tasks_that_wait_for_their_rate(window: Any) -> None:
    rate = Quota(requests=20, per=60, window=window)
    async with TaskPool(max_concurrent=5, rate_per_tenant=rate) as pool:
        told: list[tuple[float, float]] = []

        async def note(eta: float) -> None:
            told.append((eta, asyncio.get_running_loop().time()))

        for _ in range(100):
            box: list[float] = []
            eta = (await pool.submit(_first, box, note, key="a")).eta()
            box.append(0.0 if eta is None else eta)  # nothing is known of those that only wait for a slot
        await pool.drain()
    ratios = [eta / at for eta, at in told if at > 1.0]
    assert len(ratios) > 50
    assert 0.5 <= median(ratios) <= 2
    assert sum(0.5 <= ratio <= 2 for ratio in ratios) >= 0.9 * len(ratios)


async def _first(box: list[float], note: Any) -> None:
    await note(box[0])


@virtual
async def test_l03_tasks_expire_while_they_wait_for_their_rate() -> None:
    starts = Starts()
    async with TaskPool(max_concurrent=5, rate_per_tenant=Quota(requests=1, per=20)) as pool:
        await pool.submit(starts, "a", key="a")
        late = await pool.submit(starts, "a", key="a", ttl=5)
        with pytest.raises(TaskExpired):
            await late
        assert asyncio.get_running_loop().time() == 5


@virtual
async def test_l03_fail_fast_refuses_a_tenant_beyond_its_rate_and_says_when() -> None:
    starts = Starts()
    async with TaskPool(max_concurrent=5, backpressure=fail_fast(), rate_per_tenant=Quota(requests=1, per=20)) as pool:
        await pool.submit(starts, "a", key="a")
        with pytest.raises(PoolBusy, match="as many tasks as its rate allows") as caught:
            await pool.submit(starts, "a", key="a")
        assert caught.value.retry_after is not None
        assert 20 <= caught.value.retry_after <= 21
        await pool.submit(starts, "b", key="b")


@virtual
async def test_l03_caps_pauses_and_rates_hold_together() -> None:
    starts = Starts()
    rate = Quota(requests=3, per=10, burst=3)
    async with TaskPool(max_concurrent=9, max_concurrent_per_key=2, rate_per_tenant=rate) as pool:
        for _ in range(6):
            await pool.submit(starts, "a", 1.0, key="a")
        await asyncio.sleep(0.5)
        assert starts.at["a"] == [0.0, 0.0]
        assert pool.snapshot().waiting_for.cause == "max_concurrent_per_key"
        await asyncio.sleep(1.0)
        assert starts.at["a"] == [0.0, 0.0, 1.0]
        assert pool.snapshot().waiting_for.cause == "rate_per_tenant"
        pool.pause_tenant("a")
        await asyncio.sleep(30)
        assert len(starts.at["a"]) == 3
        pool.resume_tenant("a")
        await settle()
        assert len(starts.at["a"]) == 5


@virtual
async def test_l03_tenants_that_come_and_go_leave_nothing() -> None:
    async def nothing() -> None:
        pass

    def held() -> int:
        gc.collect()
        return sum(type(one).__module__ == "headgate.gate.windows" for one in gc.get_objects())

    tenants = 2_000
    async with TaskPool(max_concurrent=5, rate_per_tenant=Quota(requests=2, per=10), keep=0) as pool:
        before = held()
        for number in range(tenants):
            await (await pool.submit(nothing, key=f"tenant-{number}"))
        assert held() - before >= tenants
        await asyncio.sleep(12)
        assert held() - before <= 10


@virtual
async def test_l03_a_durable_pool_counts_starts_too(tmp_path: Any) -> None:
    starts = Starts()
    rate = Quota(requests=2, per=10, burst=2)
    store = JsonLinesStore(tmp_path)
    async with TaskPool("l03", scope="pipeline", pipeline_id="p", store=store, rate_per_tenant=rate) as pool:
        handles = [await pool.submit(starts, "a", key="a") for _ in range(6)]
        for handle in handles:
            await handle
    assert len(starts.at["a"]) == 6
    assert most_within(starts.at["a"], 10) <= 2


@virtual
async def test_l03_what_a_function_of_the_user_raises_is_raised_by_submit() -> None:
    def rate_of(tenant: str) -> Quota | None:
        if tenant == "tokens":
            return Quota(tokens=5)
        raise KeyError(tenant)

    async with TaskPool(rate_per_tenant=rate_of) as pool:
        with pytest.raises(KeyError, match="unknown"):
            await pool.submit(asyncio.sleep, 0, key="unknown")
        with pytest.raises(InvalidArgument, match="requests alone"):
            await pool.submit(asyncio.sleep, 0, key="tokens")
        await (await pool.submit(asyncio.sleep, 0))


def test_l03_what_is_no_rate_is_refused() -> None:
    for wrong, kind, why in (
        (5, InvalidType, "must be a Quota or None, got int"),
        ({"a": 5}, InvalidType, "of 'a' must be a Quota or None, got int"),
        (Quota(tokens=5), InvalidArgument, "requests alone"),
        ({"a": Quota(requests=5, tokens=5)}, InvalidArgument, "of 'a' must be a Quota of requests alone"),
        (Quota, InvalidType, "must be a Quota"),
    ):
        with pytest.raises(kind, match=why):
            TaskPool(rate_per_tenant=wrong)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="shares its budget"):
        TaskPool(
            scope="tenant",
            scope_id="acme",
            max_concurrent=1,
            store=SharedMemory().member(),
            rate_per_tenant=Quota(requests=1),
        )
