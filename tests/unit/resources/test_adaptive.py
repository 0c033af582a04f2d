"""L04: a resource finds how many calls at a time its provider takes, alone and with other processes."""

from __future__ import annotations

import asyncio
import copy
import logging
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest

from headgate import (
    Adaptive,
    CooldownResource,
    DisableResource,
    PoolExhausted,
    Quota,
    Resource,
    ResourcePool,
    RetryOperation,
    TaskPool,
    http_errors,
)
from headgate.errors import InvalidArgument, WorkerLost
from headgate.resources import AdaptiveStats, ResourceLimitChanged
from headgate.sharing.memory import SharedMemory
from headgate.testing import capture_events, settle, virtual
from tests.support.resources.providers import Capacity, Measured, Provider, keep_busy
from tests.support.resources.support import Gate, always, ident, status

SECONDS = 300.0


class Answer:
    """A response of an HTTP client."""

    def __init__(self, status_code: int, **headers: str) -> None:
        self.status_code = status_code
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}


class HttpError(Exception):
    """What an HTTP client raises."""

    def __init__(self, status_code: int, **headers: str) -> None:
        super().__init__(f"HTTP {status_code}")
        self.response = Answer(status_code, **headers)


def adaptive(policy: Any = "adaptive", **options: Any) -> ResourcePool[str]:
    return ResourcePool([Resource("k", "secret", policy)], **options)


def limit(pool: ResourcePool[Any], name: str = "k") -> int | None:
    return pool.snapshot()[name]["max_in_flight"]


def about(pool: ResourcePool[Any], name: str = "k") -> AdaptiveStats:
    stats = pool.stats().resources[name].adaptive
    assert stats is not None
    return stats


async def fill(pool: ResourcePool[Any], gate: Gate, number: int) -> list[asyncio.Task[Any]]:
    """Begin so many calls, each of which may wait for a place."""
    calls = [asyncio.ensure_future(pool.run(gate, wait_for_capacity=True, retry_delay=0)) for _ in range(number)]
    await settle()
    return calls


async def gone(*calls: asyncio.Future[Any]) -> None:
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, logger="headgate.resources")


# -- the setting -------------------------------------------------------------------------------------------------------


@virtual
async def test_l04_the_limit_may_be_given_for_a_resource_for_a_pool_and_for_one_that_is_added() -> None:
    policy = Adaptive(start=7, most=9)
    mixed = ResourcePool([Resource("a", "1", "adaptive"), Resource("b", "2", policy), Resource("c", "3", 5)])
    assert [limit(mixed, name) for name in "abc"] == [4, 7, 5]
    assert [mixed.stats().resources[name].adaptive for name in "abc"] == [
        AdaptiveStats(1, 200, 0),
        AdaptiveStats(1, 9, 0),
        None,
    ]
    pool = ResourcePool({"a": "1", "b": Resource("b", "2", 3)}, max_in_flight="adaptive")  # type: ignore[dict-item]
    await pool.add("c", "3")
    await pool.add("d", "4", max_in_flight=policy)
    assert [limit(pool, name) for name in "abcd"] == [4, 3, 4, 7]


@pytest.mark.parametrize("wrong", ["adaptiv", "", 0, -1, True, 2.5, [], {"start": 4}])
def test_l04_anything_else_is_refused_with_what_to_pass(wrong: Any) -> None:
    with pytest.raises(InvalidArgument, match="max_in_flight must be >= 1 or None") as refused:
        Resource("k", "v", wrong)
    assert "adaptive" in str(refused.value)
    with pytest.raises(InvalidArgument, match="max_in_flight must be >= 1 or None"):
        ResourcePool({"k": "v"}, max_in_flight=wrong)


def test_l04_a_copy_for_a_worker_has_the_number_of_that_moment() -> None:
    resource = Resource("k", "v", Adaptive(start=6))
    for made in (copy.copy(resource), pickle.loads(pickle.dumps(resource))):
        assert made.max_in_flight == 6
    assert "max_in_flight=6" in repr(resource)


# -- what it does ------------------------------------------------------------------------------------------------------


@virtual
async def test_l04_the_limit_doubles_when_all_calls_of_a_round_succeeded() -> None:
    pool, gate = adaptive(), Gate()
    calls = await fill(pool, gate, 30)
    seen = []
    for _ in range(3):
        seen.append(len(gate.uses))
        for use in gate.uses:
            if not use.done():
                use.set_result("ok")
        await settle()
    assert seen == [4, 12, 28], "4 at a time, then 8, then 16"
    await gone(*calls)


@virtual
async def test_l04_calls_one_at_a_time_prove_nothing() -> None:
    pool = adaptive()
    for _ in range(50):
        assert await pool.run(ident) == "k"
    assert limit(pool) == 4


@virtual
async def test_l04_a_refusal_cuts_rests_briefly_cancels_nothing_and_climbs_no_table() -> None:
    pool, gate = adaptive(Adaptive(start=10)), Gate()
    calls = await fill(pool, gate, 10)
    with capture_events("resources.health") as events:
        gate.finish(4, CooldownResource(reason="429"))
        await settle()
    seen = pool.snapshot()["k"]
    assert (seen["status"], seen["max_in_flight"], seen["consecutive_cooldown"]) == ("cooling_down", 4, 0)
    assert seen["cooldown_seconds_remaining"] == pytest.approx(0.2)
    assert seen["in_flight"] == 9, "the younger calls run on"
    assert pool.stats().sibling_cancels == 0
    assert events.names == ["resource_limit_changed", "resource_cooled"]
    changed = events[0].to_dict()
    assert (changed["limit"], changed["old_limit"], changed["refused_at"], changed["reason"]) == (4, 10, 5, "429")
    assert changed["usage"]["resource_id"] == "k"
    await asyncio.sleep(0.2)
    assert status(pool, "k") == "healthy"
    await gone(*calls)


@virtual
async def test_l04_the_storm_of_one_moment_is_one_cut_and_a_call_that_begins_later_cuts_again() -> None:
    pool, gate = adaptive(Adaptive(start=10)), Gate()
    calls = await fill(pool, gate, 10)
    for number in reversed(range(10)):
        gate.finish(number, CooldownResource())
        await asyncio.sleep(0.001)
    assert limit(pool) == 8
    await asyncio.sleep(0.2)  # those that were refused begin again, 8 at a time
    assert len(gate.uses) == 18
    gate.finish(17, CooldownResource())
    await settle()
    assert limit(pool) == 6
    assert about(pool).cuts == 2
    await gone(*calls)


@virtual
async def test_l04_while_nothing_succeeds_the_rests_grow_up_to_one_second() -> None:
    pool = adaptive()
    rests = []
    for _ in range(5):
        with pytest.raises(PoolExhausted):
            await pool.run(always(CooldownResource()), retry_delay=0)
        rests.append(round(pool.snapshot()["k"]["cooldown_seconds_remaining"], 6))
        await asyncio.sleep(rests[-1] + 0.01)
    assert rests == [0.2, 0.4, 0.8, 1.0, 1.0]
    assert pool.snapshot()["k"]["consecutive_cooldown"] == 0
    assert limit(pool) == 1


@virtual
async def test_l04_explicit_seconds_count_as_everywhere() -> None:
    pool, gate = adaptive(Adaptive(start=10)), Gate()
    calls = await fill(pool, gate, 10)
    gate.finish(4, CooldownResource(30, "429"))
    await settle()
    seen = pool.snapshot()["k"]
    assert (seen["cooldown_seconds_remaining"], seen["consecutive_cooldown"]) == (30.0, 1)
    assert seen["max_in_flight"] == 4, "and it is a refusal"
    assert pool.stats().sibling_cancels == 5
    await gone(*calls)


REFUSALS: list[Callable[[], BaseException]] = [
    lambda: CooldownResource(),
    lambda: CooldownResource(9.0),
    lambda: HttpError(429),
    lambda: HttpError(503),
    lambda: HttpError(529),
]
OTHERS: list[Callable[[], BaseException]] = [
    lambda: ValueError("of the caller"),
    lambda: HttpError(400),
    lambda: HttpError(500),
    lambda: HttpError(502),
    lambda: HttpError(504),
    lambda: RetryOperation("502"),
    lambda: DisableResource("401"),
    lambda: HttpError(401),
    lambda: TimeoutError(),
    lambda: ConnectionError(),
    lambda: WorkerLost("the worker is gone"),
    lambda: asyncio.CancelledError(),
    lambda: CooldownResource(only_for="affinity"),
]


@pytest.mark.parametrize("classify", [..., http_errors, None])
@pytest.mark.parametrize("refusal", REFUSALS)
@virtual
async def test_l04_refusals_for_rate_or_overload_cut(refusal: Callable[[], BaseException], classify: Any) -> None:
    pool, gate = adaptive(Adaptive(start=10), classify=classify, cancel_siblings=False), Gate()
    calls = await fill(pool, gate, 10)
    gate.finish(9, refusal())
    await settle()
    assert (limit(pool), about(pool).cuts, about(pool).refused_at) == (8, 1, 10)
    await gone(*calls)


@pytest.mark.parametrize("classify", [..., http_errors, None])
@pytest.mark.parametrize("error", OTHERS)
@virtual
async def test_l04_nothing_else_cuts_and_no_error_counts_as_a_success(
    error: Callable[[], BaseException], classify: Any
) -> None:
    pool, gate = adaptive(classify=classify, cancel_siblings=False), Gate()
    calls = [
        asyncio.ensure_future(pool.run(gate, wait_for_capacity=True, retry_delay=0, affinity="a", max_attempts=1))
        for _ in range(12)
    ]
    await settle()
    for number in range(4):
        gate.finish(number, error())
        await settle()
    assert limit(pool) == 4
    assert about(pool).cuts == 0
    await gone(*calls)


@virtual
async def test_l04_a_429_because_the_money_is_gone_disables_and_cuts_nothing() -> None:
    error = HttpError(429)
    error.code = "insufficient_quota"  # type: ignore[attr-defined]
    pool = adaptive(classify=http_errors)
    with pytest.raises(PoolExhausted):
        await pool.run(always(error), retry_delay=0)
    assert (status(pool, "k"), limit(pool), about(pool).cuts) == ("disabled", 4, 0)


@pytest.mark.parametrize("code", [429, 503, 529])
@virtual
async def test_l04_a_response_that_is_returned_is_looked_at_too(code: int) -> None:
    pool, gate = adaptive(Adaptive(start=10)), Gate()
    calls = await fill(pool, gate, 10)
    gate.finish(9, Answer(code))
    await settle()
    assert limit(pool) == 8
    assert status(pool, "k") == "healthy", "whether it rests is for `classify` to say"
    await gone(*calls)


@virtual
async def test_l04_slow_calls_and_calls_that_are_interrupted_count_for_nothing() -> None:
    pool, gate = adaptive(), Gate()
    calls = [asyncio.ensure_future(pool.run(gate, timeout=600, max_attempts=1)) for _ in range(4)]
    await asyncio.sleep(600)
    await asyncio.gather(*calls, return_exceptions=True)
    assert limit(pool) == 4
    await gone(*await fill(pool, gate, 4))
    assert (limit(pool), about(pool).cuts, pool.snapshot()["k"]["in_flight"]) == (4, 0, 0)


@virtual
async def test_l04_leases_streams_and_tasks_teach_the_limit_as_calls_do() -> None:
    pool = adaptive(Adaptive(start=1))

    async def words(key: Resource[str]) -> Any:
        yield key.resource_id

    async with pool.lease():
        pass
    assert limit(pool) == 2

    async with pool.lease():
        assert [word async for word in pool.stream(words)] == ["k"]
    assert limit(pool) == 2, "one success is no round of two"
    async with pool.lease():
        assert [word async for word in pool.stream(words)] == ["k"]
    assert limit(pool) == 4

    async def work(key: Resource[str]) -> str:
        await asyncio.sleep(1)
        return key.resource_id

    async with TaskPool("tasks", resources=pool, max_concurrent=50) as tasks:
        handles = [await tasks.submit(work) for _ in range(60)]
        assert {await handle for handle in handles} == {"k"}
    assert (limit(pool) or 0) >= 16


@virtual
async def test_l04_a_refused_task_waits_for_the_resource_and_cuts() -> None:
    pool = adaptive(Adaptive(start=2))
    provider = Provider(lambda _: 1, 1.0)

    async with TaskPool("tasks", resources=pool, max_concurrent=5) as tasks:
        handles = [await tasks.submit(provider) for _ in range(5)]
        assert [await handle for handle in handles] == ["k"] * 5
    assert provider.most == 1
    assert about(pool).refused_at == 2


# -- probing, disabling and changing the limit -------------------------------------------------------------------------


@virtual
async def test_l04_a_brief_rest_needs_no_probe() -> None:
    pool, gate = adaptive(Adaptive(start=10), probe_on_recovery=True), Gate()
    calls = await fill(pool, gate, 20)
    gate.finish(9, CooldownResource())
    await settle()
    for number in range(9):
        gate.finish(number)
    await asyncio.sleep(0.3)
    assert len(gate.uses) == 18, "8 at a time as soon as it has rested"
    await gone(*calls)


@virtual
async def test_l04_a_probe_after_a_cooldown_says_nothing_about_the_limit() -> None:
    pool, gate = adaptive(Adaptive(start=10), probe_on_recovery=True, cancel_siblings=False), Gate()
    calls = await fill(pool, gate, 30)
    gate.finish(9, CooldownResource(30))
    for number in range(9):
        gate.finish(number)
    await asyncio.sleep(30.1)
    assert (len(gate.uses), limit(pool)) == (11, 8), "one probe"
    gate.finish(10, CooldownResource())
    await asyncio.sleep(1)
    assert (len(gate.uses), limit(pool)) == (12, 8), "another one, and no cut because of one call"
    gate.finish(11)
    await settle()
    assert len(gate.uses) == 14, "then two at a time"
    gate.finish(12)
    gate.finish(13)
    await settle()
    assert len(gate.uses) == 18
    for number in range(14, 18):
        gate.finish(number)
    await settle()
    assert (len(gate.uses), limit(pool)) == (26, 8), "and then as many as the limit allows"
    await gone(*calls)


@virtual
async def test_l04_what_was_learned_outlives_disable_and_enable() -> None:
    pool, gate = adaptive(Adaptive(start=10)), Gate()
    calls = await fill(pool, gate, 10)
    gate.finish(9, CooldownResource())
    await settle()
    await pool.disable("k")
    gate.finish(8, CooldownResource())
    await settle()
    assert (limit(pool), status(pool, "k")) == (8, "disabled")
    await pool.enable("k")
    assert (limit(pool), about(pool).cuts) == (8, 1)
    await gone(*calls)


@virtual
async def test_l04_the_limit_may_be_changed_while_calls_run() -> None:
    pool, gate = adaptive(Adaptive(start=10)), Gate()
    calls = await fill(pool, gate, 40)
    gate.finish(9, CooldownResource())
    await settle()
    await pool.reconcile([Resource("k", "secret", Adaptive(start=10))])
    assert (limit(pool), about(pool).cuts) == (8, 1), "the same again keeps what was learned"
    await pool.reconcile([Resource("k", "secret", Adaptive(start=3, most=6))])
    assert (limit(pool), about(pool)) == (6, AdaptiveStats(1, 6, 1, 0.0, 10)), "and other bounds too"
    await pool.reconcile({"k": "secret"})
    assert limit(pool) == 6, "a value alone says nothing about the limit"
    await pool.reconcile([Resource("k", "secret", 20)])
    assert (limit(pool), pool.stats().resources["k"].adaptive) == (20, None)
    await asyncio.sleep(0.2)
    assert pool.snapshot()["k"]["in_flight"] == 20
    gate.finish(8, CooldownResource())
    await settle()
    assert limit(pool) == 20
    await pool.enable("k")
    await pool.reconcile([Resource("k", "secret", "adaptive")])
    assert (limit(pool), about(pool).cuts) == (4, 0)
    for use in gate.uses:
        if not use.done():
            use.set_result("of a time before the limit was adaptive")
    await settle()
    assert limit(pool) == 4
    await gone(*calls)


@virtual
async def test_l04_two_pools_that_hold_one_resource_learn_together() -> None:
    resource = Resource("k", "secret", Adaptive(start=2))
    one, other = ResourcePool([resource]), ResourcePool([resource])
    gate = Gate()
    calls = [*await fill(one, gate, 1), *await fill(other, gate, 9)]
    assert len(gate.uses) == 2
    gate.finish(0)
    gate.finish(1)
    await settle()
    assert (limit(one), limit(other)) == (4, 4)
    assert len(gate.uses) == 6
    await gone(*calls)


@virtual
async def test_l04_a_late_refusal_of_a_replaced_resource_says_nothing_about_its_successor() -> None:
    pool, gate = adaptive(Adaptive(start=5)), Gate()
    calls = await fill(pool, gate, 5)
    await pool.remove("k")
    await pool.add("k", "another secret", max_in_flight=Adaptive(start=7))
    gate.finish(4, CooldownResource())
    await settle()
    assert (limit(pool), about(pool).cuts) == (7, 0)
    await gone(*calls)


# -- quotas ------------------------------------------------------------------------------------------------------------


@virtual
async def test_l04_where_a_quota_is_known_the_quota_decides() -> None:
    quota = Quota(requests=1000, per=60, burst=1000)
    pool, gate = adaptive(Adaptive(start=4, most=20), quota=quota), Gate()
    assert limit(pool) == 20
    calls = await fill(pool, gate, 20)
    assert len(gate.uses) == 20
    gate.finish(19, CooldownResource())
    await settle()
    seen = pool.snapshot()["k"]
    assert (seen["max_in_flight"], about(pool).cuts) == (20, 0)
    assert (seen["cooldown_seconds_remaining"], seen["consecutive_cooldown"]) == (30.0, 1), "the table of the pool"
    await gone(*calls)


@virtual
async def test_l04_a_learned_quota_decides_as_soon_as_headers_have_told_it() -> None:
    pool = adaptive(Adaptive(start=4, most=20), quota="learn")
    assert limit(pool) == 4
    headers = {
        "x_ratelimit_limit_requests": "600",
        "x_ratelimit_remaining_requests": "599",
        "x_ratelimit_reset_requests": "100ms",
    }
    await pool.run(always(Answer(200, **headers)))
    assert limit(pool) == 20


@virtual
async def test_l04_while_no_header_tells_a_quota_refusals_teach_the_limit_and_not_a_rate() -> None:
    pool = adaptive(Adaptive(pause=0.01), quota="learn", classify=http_errors)
    provider = Provider(lambda _: 12, 0.1)
    provider.refusal = lambda: HttpError(429)  # type: ignore[method-assign]
    await keep_busy(pool, provider, 20, 65.0)
    assert provider.measured().refused >= 0.02, "often enough to make a rate of it"
    assert pool.snapshot()["k"]["quota"]["left"] == {"requests": None}, "no rate was made of it"


# -- looking -----------------------------------------------------------------------------------------------------------


@virtual
async def test_l04_the_bounds_and_the_last_cut_are_shown_where_the_limit_is() -> None:
    pool, gate = adaptive(Adaptive(start=10, most=50), name="keys"), Gate()
    calls = await fill(pool, gate, 10)
    assert about(pool) == AdaptiveStats(1, 50, 0, None, None)
    gate.finish(9, CooldownResource())
    await asyncio.sleep(3)
    stats = pool.stats().resources["k"]
    assert (stats.max_in_flight, stats.max_in_flight_gauge, stats.saturated) == (8, 8.0, True)
    assert stats.adaptive == AdaptiveStats(1, 50, 1, pytest.approx(3.0), 10)
    with pytest.raises(PoolExhausted, match=r"k takes 8 at a time \(between 1 and 50, refused at 10 3.0 s ago\)"):
        await pool.run(ident)

    async def work(key: Resource[str]) -> None:
        pass

    async with TaskPool("tasks", resources=pool) as tasks:
        waiting = await tasks.submit(work)
        await settle()
        assert "k takes 8 at a time (between 1 and 50, refused at 10 3.0 s ago)" in str(waiting.story())
        await gone(*calls)
        await waiting


# -- how busy it keeps a provider --------------------------------------------------------------------------------------


def fixed(capacity: int) -> Capacity:
    return lambda _: capacity


def falls(before: int, after: int, at: float = 150) -> Capacity:
    return lambda now: before if now < at else after


def swings(low: int, high: int) -> Capacity:
    return lambda now: low if int(now / 40) % 2 else high


async def measure(
    capacity: Capacity, latency: float, callers: int, processes: int = 1, seconds: float = SECONDS
) -> Measured:
    place = SharedMemory() if processes > 1 else None
    pools = [adaptive(name="keys", store=place.member() if place else None) for _ in range(processes)]
    provider = Provider(capacity, latency)
    await asyncio.gather(*(keep_busy(pool, provider, callers // processes, seconds) for pool in pools))
    assert len({limit(pool) for pool in pools}) == 1, "all know the same"
    return provider.measured()


LONG = pytest.mark.soak


@pytest.mark.parametrize(
    ("capacity", "latency", "callers", "busy", "refused"),
    [
        pytest.param(fixed(12), 0.1, 15, 0.90, 0.02, id="fixed-short", marks=LONG),
        pytest.param(fixed(12), 0.5, 20, 0.90, 0.02, id="fixed"),
        pytest.param(fixed(12), 2.0, 20, 0.90, 0.02, id="fixed-long"),
        pytest.param(fixed(100), 2.0, 150, 0.90, 0.02, id="many-long"),
        pytest.param(fixed(100), 0.1, 150, 0.90, 0.02, id="many-short", marks=LONG),
        pytest.param(falls(100, 10), 2.0, 130, 0.90, 0.02, id="falls-long"),
        pytest.param(falls(100, 10), 0.5, 130, 0.90, 0.02, id="falls", marks=LONG),
        pytest.param(falls(100, 10), 0.1, 130, 0.90, 0.02, id="falls-short", marks=LONG),
        # How soon a rise is noticed depends on when the last cut was: one cut more is 5 s of 240 s.
        pytest.param(falls(10, 100), 2.0, 130, 0.72, 0.02, id="rises-long"),
        pytest.param(falls(10, 100), 0.5, 130, 0.72, 0.02, id="rises", marks=LONG),
        pytest.param(falls(10, 100), 0.1, 130, 0.75, 0.02, id="rises-short", marks=LONG),
        # A call of 2 s that is refused while the capacity falls to a third is one of few.
        pytest.param(swings(20, 60), 2.0, 150, 0.65, 0.022, id="swings-long"),
        pytest.param(swings(20, 60), 0.5, 80, 0.65, 0.02, id="swings", marks=LONG),
        pytest.param(swings(20, 60), 0.1, 80, 0.65, 0.02, id="swings-short", marks=LONG),
    ],
)
def test_l04_a_provider_is_kept_busy_and_hardly_refuses(
    capacity: Capacity, latency: float, callers: int, busy: float, refused: float
) -> None:
    measured = virtual(measure)(capacity, latency, callers)
    assert measured.busy >= busy
    assert measured.refused <= refused


@virtual
async def test_l04_short_calls_keep_a_provider_busy_too() -> None:
    measured = await measure(falls(16, 8, at=90), 0.1, 18, seconds=130)
    assert measured.busy >= 0.90
    assert measured.refused <= 0.005


@pytest.mark.parametrize(
    ("capacity", "latency", "callers", "busy", "refused"),
    [
        pytest.param(fixed(12), 0.5, 60, 0.90, 0.02, id="fixed"),
        pytest.param(fixed(12), 2.0, 60, 0.90, 0.02, id="fixed-long"),
        pytest.param(fixed(12), 0.1, 60, 0.90, 0.02, id="fixed-short", marks=LONG),
        pytest.param(falls(40, 12), 2.0, 60, 0.90, 0.02, id="falls-long"),
        pytest.param(falls(20, 60), 2.0, 60, 0.75, 0.02, id="rises-long"),
        pytest.param(swings(10, 30), 0.5, 60, 0.65, 0.02, id="swings", marks=LONG),
        pytest.param(falls(100, 10), 2.0, 150, 0.90, 0.02, id="falls-many", marks=LONG),
    ],
)
def test_l04_three_processes_keep_one_provider_busy_together(
    capacity: Capacity, latency: float, callers: int, busy: float, refused: float
) -> None:
    measured = virtual(measure)(capacity, latency, callers, processes=3)
    assert measured.busy >= busy
    assert measured.refused <= refused


# -- what processes share ----------------------------------------------------------------------------------------------


def process(place: SharedMemory, policy: Any = "adaptive", **options: Any) -> ResourcePool[str]:
    """A pool as another process has it."""
    return ResourcePool([Resource("k", "secret", policy)], name="keys", store=place.member(), **options)


@virtual
async def test_l04_a_cut_in_one_process_is_a_cut_in_all_and_one_storm_is_one_cut() -> None:
    place, gates = SharedMemory(), [Gate() for _ in range(3)]
    pools = [process(place, Adaptive(start=30)) for _ in gates]
    calls = [one for pool, gate in zip(pools, gates, strict=True) for one in await fill(pool, gate, 10)]
    await asyncio.sleep(1)
    assert [len(gate.uses) for gate in gates] == [10, 10, 10]
    for gate in gates:  # all three meet the same storm
        gate.finish(9, CooldownResource())
        await asyncio.sleep(0.001)
    after = limit(pools[0]) or 0
    assert 8 <= after <= 24
    assert [(limit(pool), about(pool).cuts) for pool in pools] == [(after, 1)] * 3
    calls += [one for pool, gate in zip(pools, gates, strict=True) for one in await fill(pool, gate, 20)]
    for gate in gates:
        for number in range(9):
            gate.finish(number)
    await asyncio.sleep(1)
    assert sum(pool.snapshot()["k"]["in_flight"] for pool in pools) == after, "all keep the new limit together"
    await gone(*calls)


@virtual
async def test_l04_permits_above_a_new_limit_are_given_back_though_nobody_waits_for_them() -> None:
    place, gates = SharedMemory(), [Gate() for _ in range(3)]
    pools = [process(place, Adaptive(start=30)) for _ in gates]
    calls = [one for pool, gate in zip(pools, gates, strict=True) for one in await fill(pool, gate, 10)]
    await asyncio.sleep(1)
    gates[0].finish(9, CooldownResource())
    for gate in gates:
        for use in gate.uses:
            if not use.done():
                use.set_result("ok")
    await asyncio.sleep(1)
    after = limit(pools[0]) or 0
    assert after < 30
    calls += [one for pool, gate in zip(pools, gates, strict=True) for one in await fill(pool, gate, 10)]
    assert sum(pool.snapshot()["k"]["in_flight"] for pool in pools) <= after, "at once, and not when others have asked"
    await gone(*calls)


@virtual
async def test_l04_a_process_that_uses_only_its_part_does_not_prove_that_all_is_used() -> None:
    place, gate = SharedMemory(), Gate()
    one, other = process(place, Adaptive(start=12)), process(place, Adaptive(start=12))
    idle = await fill(other, gate, 8)
    work = Gate()
    for _ in range(6):  # its four permits are in use, and the others are with a process that does nothing
        calls = await fill(one, work, 4)
        await gone(*idle)
        for use in work.uses:
            if not use.done():
                use.set_result("ok")
        await asyncio.gather(*calls)
    assert (limit(one), limit(other)) == (12, 12)


@virtual
async def test_l04_a_rise_is_followed_by_all() -> None:
    place, gate = SharedMemory(), Gate()
    busy, idle = process(place, Adaptive(start=2)), process(place, Adaptive(start=2))
    calls = await fill(busy, gate, 30)
    for _ in range(3):
        for use in list(gate.uses):
            if not use.done():
                use.set_result("ok")
        await asyncio.sleep(1)
    assert (limit(busy), limit(idle)) == (16, 16)
    late = process(place, Adaptive(start=2))
    assert limit(late) == 16, "and by one that comes later"
    await gone(*calls)


@virtual
async def test_l04_an_event_says_that_another_process_cut_the_limit() -> None:
    place, gate = SharedMemory(), Gate()
    one, other = process(place, Adaptive(start=10)), process(place, Adaptive(start=10))
    calls = await fill(one, gate, 10)
    with capture_events("resources.health") as events:
        gate.finish(9, CooldownResource(reason="429"))
        await asyncio.sleep(1)
        for thread in threading.enumerate():
            if thread.name == "headgate-reports":
                thread.join(10)
    changed = events.of(ResourceLimitChanged)
    assert sorted((event.limit, event.old_limit, event.from_another_process) for event in changed) == [
        (8, 10, False),
        (8, 10, True),
    ]
    assert status(other, "k") == "healthy", "only the process that was refused rests"
    assert about(other).refused_at == 10
    await gone(*calls)


@virtual
async def test_l04_a_fixed_limit_of_another_process_counts_if_it_is_lower() -> None:
    place, gates = SharedMemory(), [Gate(), Gate()]
    pools = [process(place, Adaptive(start=10)), process(place, 5)]
    calls = [one for pool, gate in zip(pools, gates, strict=True) for one in await fill(pool, gate, 20)]
    await asyncio.sleep(1)
    for use in list(gates[0].uses):
        use.set_result("ok")
    await asyncio.sleep(1)
    assert sum(pool.snapshot()["k"]["in_flight"] for pool in pools) == 5
    await gone(*calls)


@virtual
async def test_l04_what_was_learned_survives_the_loss_of_the_shared_state() -> None:
    place, gate = SharedMemory(), Gate()
    one, other = process(place, Adaptive(start=10)), process(place, Adaptive(start=10))
    calls = await fill(one, gate, 10)
    gate.finish(9, CooldownResource())
    await asyncio.sleep(1)
    place.texts.clear()
    await gone(*calls[:9])
    assert await other.run(ident, wait_for_capacity=True, within=60) == "k"
    third = process(place, Adaptive(start=10))
    assert [limit(pool) for pool in (one, other, third)] == [8, 8, 8]
    await gone(*calls)
