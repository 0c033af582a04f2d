"""R12, R13, R20-R23, R30-R36, R40-R45: one call and its attempts."""

from __future__ import annotations

import asyncio
import contextvars
import itertools
import logging
import pickle
import subprocess
import sys
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
    RetryOperation,
    subscribe,
)
from headgate.core.clock import clock
from headgate.resources import Attempt
from headgate.testing import capture_events, settle, virtual
from tests.support.resources.support import Gate, always, by_id, ident, in_flight, keys, rate_limited, revoked, status


def now() -> float:
    return clock.now()


# -- R20-R23: selection ------------------------------------------------------------


@virtual
async def test_r21_six_concurrent_calls_on_three_resources_two_each() -> None:
    pool, gate = keys("a", "b", "c"), Gate()
    calls = [asyncio.create_task(pool.run(gate)) for _ in range(6)]
    await settle()
    assert sorted(gate.entered) == ["a", "a", "b", "b", "c", "c"]
    for number in range(6):
        gate.finish(number)
    await asyncio.gather(*calls)


@virtual(start=1.0)
async def test_r21_calls_in_a_row_rotate() -> None:
    pool = keys("a", "b", "c")
    seen = []
    for _ in range(7):
        seen.append(await pool.run(ident))
        await asyncio.sleep(0.001)
    assert seen == ["a", "b", "c", "a", "b", "c", "a"]


@virtual
async def test_r22_primary_backup_fans_out_at_the_limits() -> None:
    pool = ResourcePool(
        [Resource("us", 1, 8), Resource("eu", 2, 8), Resource("asia", 3)],
        strategy="primary_backup",
    )
    gate = Gate()
    calls = [asyncio.create_task(pool.run(gate)) for _ in range(20)]
    await settle()
    assert gate.entered == ["us"] * 8 + ["eu"] * 8 + ["asia"] * 4
    gate.finish(3)
    await settle()
    calls.append(asyncio.create_task(pool.run(gate)))
    await settle()
    assert gate.entered[-1] == "us"
    for number, use in enumerate(gate.uses):
        if not use.done():
            gate.finish(number)
    await asyncio.gather(*calls)


@virtual
async def test_r23_a_cooled_resource_returns_by_itself() -> None:
    pool = keys("paid", "free", strategy="primary_backup")
    assert await pool.run(by_id(paid=CooldownResource(5), free="ok"), retry_delay=0) == "ok"
    assert await pool.run(ident) == "free"
    await asyncio.sleep(5)
    assert await pool.run(ident) == "paid"


@virtual
async def test_r25_tags_and_exclude_narrow_the_choice() -> None:
    pool = ResourcePool([Resource("a", 1, tags=["eu"]), Resource("b", 2, tags=["eu", "gpu"]), Resource("c", 3)])
    assert {await pool.run(ident, tags=["eu"]) for _ in range(6)} <= {"a", "b"}
    assert {await pool.run(ident, tags={"eu", "gpu"}) for _ in range(4)} == {"b"}
    assert {await pool.run(ident, exclude=["a", "b"]) for _ in range(4)} == {"c"}
    with pytest.raises(PoolExhausted, match=r"none of its 3 matches tags \['moon'\]"):
        await pool.run(ident, tags=["moon"])


# -- R12: the budget ------------------------------------------------------------


@virtual
async def test_r12_the_budget_is_the_smaller_of_max_attempts_and_the_resources() -> None:
    for size, max_attempts, expected in [(2, 5, 2), (5, 3, 3), (1, 3, 1)]:
        pool = keys(*"abcde"[:size], max_attempts=max_attempts)
        with pytest.raises(PoolExhausted, match=f"max_attempts={expected} exhausted") as caught:
            await pool.run(always(rate_limited()), retry_delay=0)
        assert len(caught.value.attempts) == expected
        assert caught.value.reason == "attempts"


@virtual
async def test_r12_none_is_used_twice_even_if_eligible_again_at_once() -> None:
    pool, seen = keys("a", "b"), []

    async def operation(resource: Resource[str]) -> None:
        seen.append(resource.resource_id)
        raise CooldownResource(0)

    with pytest.raises(PoolExhausted, match="max_attempts=2 exhausted"):
        await pool.run(operation, max_attempts=9)
    assert seen == ["a", "b"]


@virtual
async def test_r12_the_budget_counts_only_resources_that_match() -> None:
    pool = ResourcePool([Resource("a", 1, tags=["x"]), Resource("b", 2, tags=["x"]), Resource("c", 3)])
    with pytest.raises(PoolExhausted) as caught:
        await pool.run(always(rate_limited()), tags=["x"], exclude=["b"], retry_delay=0)
    assert [attempt.resource_id for attempt in caught.value.attempts] == ["a"]


@virtual
async def test_r12_retry_operation_is_bounded_by_max_attempts_alone_and_may_reuse() -> None:
    pool = keys("only")
    with pytest.raises(PoolExhausted, match="max_attempts=4 exhausted") as caught:
        await pool.run(always(RetryOperation("502")), max_attempts=4, retry_delay=0)
    assert [attempt.resource_id for attempt in caught.value.attempts] == ["only"] * 4


@virtual
async def test_r12_retry_operation_goes_elsewhere_while_anything_else_is_eligible() -> None:
    pool, seen = keys("a", "b", strategy="primary_backup"), []

    async def operation(resource: Resource[str]) -> str:
        seen.append(resource.resource_id)
        if len(seen) < 4:
            raise RetryOperation
        return "done"

    assert await pool.run(operation, max_attempts=4, retry_delay=0) == "done"
    assert seen[:2] == ["a", "b"]


@virtual
async def test_r12_with_a_wait_mode_a_resource_may_come_again() -> None:
    pool = keys("only", cooldown_table=(10.0,))
    with pytest.raises(PoolExhausted, match="max_attempts=3 exhausted"):
        await pool.run(always(rate_limited()), wait_for_cooldown=True, retry_delay=0)
    assert now() == 20.0


# -- R13, R31: the table ------------------------------------------------------------


@virtual
async def test_r13_r31_the_table_climbs_and_clamps() -> None:
    pool = keys("a")
    for seconds in (30.0, 120.0, 300.0, 600.0, 600.0):
        with pytest.raises(PoolExhausted) as caught:
            await pool.run(always(rate_limited()))
        assert pool.snapshot()["a"]["cooldown_seconds_remaining"] == seconds
        assert caught.value.reason == "attempts"
        await asyncio.sleep(seconds)
    assert pool.snapshot()["a"]["consecutive_cooldown"] == 5
    assert await pool.run(ident) == "a"
    assert pool.snapshot()["a"]["consecutive_cooldown"] == 0


@virtual
async def test_r31_explicit_seconds_override_once_and_still_count() -> None:
    pool = keys("a")
    with pytest.raises(PoolExhausted):
        await pool.run(always(CooldownResource(5)))
    assert pool.snapshot()["a"]["cooldown_seconds_remaining"] == 5
    await asyncio.sleep(5)
    with pytest.raises(PoolExhausted):
        await pool.run(always(rate_limited()))
    assert pool.snapshot()["a"]["cooldown_seconds_remaining"] == 120
    assert pool.snapshot()["a"]["consecutive_cooldown"] == 2


@virtual
async def test_r31_zero_seconds_count_and_leave_it_eligible() -> None:
    pool = keys("a")
    with pytest.raises(PoolExhausted):
        await pool.run(always(CooldownResource(0)))
    assert pool.snapshot()["a"]["consecutive_cooldown"] == 1
    assert await pool.run(ident) == "a"


@pytest.mark.parametrize("seconds", [-1, float("nan"), float("inf"), True, "5"])
def test_r31_negative_or_non_finite_seconds_are_refused(seconds: Any) -> None:
    with pytest.raises(InvalidArgument, match="cooldown_seconds must be >= 0 or None") as caught:
        CooldownResource(seconds)
    assert repr(seconds) in str(caught.value)


def test_r31_signals_carry_their_fields_and_travel() -> None:
    class Mine(CooldownResource):
        def __init__(self, code: int) -> None:
            super().__init__(cooldown_seconds=9, reason=f"code {code}")
            self.code = code

    for signal in (CooldownResource(5, "slow down"), DisableResource("gone"), RetryOperation("502")):
        twin = pickle.loads(pickle.dumps(signal))
        assert type(twin) is type(signal)
        assert vars(twin) == vars(signal)
        assert str(twin) == str(signal)
        assert signal.reason is not None
        assert signal.reason in str(signal)
        assert type(signal).__bases__ == (Exception,)
    assert CooldownResource().reason is None
    assert CooldownResource(cooldown_seconds=3).cooldown_seconds == 3
    assert Mine(7).reason == "code 7"


@virtual
async def test_r31_cooldowns_and_disables_are_logged_as_warnings(caplog: pytest.LogCaptureFixture) -> None:
    pool = keys("a", "b", name="openai")
    with pytest.raises(PoolExhausted):
        await pool.run(by_id(a=CooldownResource(reason="429"), b=DisableResource("401")), retry_delay=0)
    records = [r for r in caplog.records if r.name == "headgate.resources"]
    assert [(r.levelno, r.getMessage()) for r in records] == [
        (logging.WARNING, "openai: a cools down for 30.0 s (1 in a row): 429"),
        (logging.WARNING, "openai: b is disabled: 401"),
    ]


def said(caplog: pytest.LogCaptureFixture) -> list[tuple[int, str]]:
    records = [record for record in caplog.records if record.name == "headgate.resources"]
    return [(record.levelno, record.getMessage()) for record in records]


async def refuse(pool: ResourcePool[str], times: int, seconds: float = 0.5) -> None:
    """Have every key refuse so many calls, one a second."""
    for _ in range(times):
        with pytest.raises(PoolExhausted):
            await pool.run(always(CooldownResource(seconds, "429")), retry_delay=0)
        await asyncio.sleep(1)


@virtual
async def test_r31_cooldowns_are_one_warning_a_minute_with_the_number_of_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    pool = keys("a", name="openai")
    with caplog.at_level(logging.INFO, "headgate.resources"):
        await refuse(pool, 50)
        first = (logging.WARNING, "openai: a cools down for 0.5 s (1 in a row): 429")
        assert [line for line in said(caplog) if "cools down" in line[1]] == [first]
        await asyncio.sleep(60)
        await refuse(pool, 2)
        second = (logging.WARNING, "openai: a cools down for 0.5 s (51 in a row): 429; 49 more since the last warning")
        assert [line for line in said(caplog) if "cools down" in line[1]] == [first, second]
        await asyncio.sleep(600)
        await refuse(pool, 1)
        assert said(caplog)[-1][1].endswith("(53 in a row): 429; 1 more since the last warning")
        await asyncio.sleep(60)
        await refuse(pool, 1)
        assert said(caplog)[-1][1].endswith("(54 in a row): 429"), "there was no other"


@virtual
async def test_r31_only_cooldowns_that_were_logged_are_said_to_be_over(caplog: pytest.LogCaptureFixture) -> None:
    pool = keys("a", name="openai")
    with caplog.at_level(logging.INFO, "headgate.resources"):
        await refuse(pool, 50)
        await pool.run(ident)
    assert said(caplog) == [
        (logging.WARNING, "openai: a cools down for 0.5 s (1 in a row): 429"),
        (logging.INFO, "openai: a is back after its cooldown"),
    ]


@virtual
async def test_r31_the_first_cooldown_of_each_resource_is_logged_at_once(caplog: pytest.LogCaptureFixture) -> None:
    for pool in (keys("a", "b", name="openai"), keys("a", name="anthropic")):
        await refuse(pool, 3)
    assert sorted(text for _, text in said(caplog)) == [
        "anthropic: a cools down for 0.5 s (1 in a row): 429",
        "openai: a cools down for 0.5 s (1 in a row): 429",
        "openai: b cools down for 0.5 s (1 in a row): 429",
    ]


@virtual
async def test_r31_a_disable_is_logged_once_and_whatever_was_logged_before(caplog: pytest.LogCaptureFixture) -> None:
    pool = keys("a", name="openai")
    await refuse(pool, 1)
    for _ in range(2):
        with pytest.raises(PoolExhausted):
            await pool.run(always(DisableResource("401")), retry_delay=0)
        await pool.disable("a")
    await pool.enable("a")
    await pool.disable("a")
    assert [text for level, text in said(caplog) if level == logging.WARNING][1:] == [
        "openai: a is disabled: 401",
        "openai: a is disabled: by hand",
    ]


@virtual
async def test_r31_a_cooldown_that_is_extended_counts_as_another(caplog: pytest.LogCaptureFixture) -> None:
    pool = keys("a", name="openai")
    with caplog.at_level(logging.DEBUG, "headgate.resources"):
        for _ in range(3):
            await pool.cool("a", 100)
            await asyncio.sleep(30)
    assert [level for level, _ in said(caplog)] == [logging.WARNING, logging.DEBUG, logging.WARNING]
    assert said(caplog)[-1][1].endswith("; 1 more since the last warning")


@virtual
async def test_r31_the_log_remembers_a_limited_number_of_resources(caplog: pytest.LogCaptureFixture) -> None:
    pool = keys(*(f"k{number}" for number in range(3000)), name="proxies")
    for number in range(3000):
        await pool.cool(f"k{number}", 0.001)
    assert len(said(caplog)) == 3000
    await asyncio.sleep(1)
    await pool.cool("k2999", 0.001)
    assert len(said(caplog)) == 3000


# -- R30, R32-R34, R35, R36: what a verdict means ------------------------------------------------------------


@virtual
async def test_r30_an_ordinary_exception_propagates_unchanged_and_is_not_retried() -> None:
    pool, error = keys("a", "b"), ValueError("mine")
    with pytest.raises(ValueError, match="mine") as caught:
        await pool.run(always(error))
    assert caught.value is error
    assert pool.stats().attempts == 1
    assert pool.stats().successes == 1


@virtual
async def test_r30_an_ordinary_exception_clears_counter_and_cooldown() -> None:
    pool = keys("a")
    with pytest.raises(PoolExhausted):
        await pool.run(always(CooldownResource(1)))
    await asyncio.sleep(1)
    with pytest.raises(ValueError, match="mine"):
        await pool.run(always(ValueError("mine")))
    assert pool.snapshot()["a"]["consecutive_cooldown"] == 0


@virtual
async def test_r30_outer_cancellation_gives_no_verdict() -> None:
    pool, gate = keys("a"), Gate()
    with pytest.raises(PoolExhausted):
        await pool.run(always(CooldownResource(1)))
    await asyncio.sleep(1)
    call = asyncio.create_task(pool.run(gate))
    await settle()
    call.cancel()
    await asyncio.wait([call])
    assert call.cancelled()
    assert pool.snapshot()["a"]["consecutive_cooldown"] == 1
    assert in_flight(pool) == 0
    assert pool.stats().runs_cancelled == 1


@virtual
async def test_r32_disabled_is_permanent_and_retried_elsewhere() -> None:
    pool = keys("a", "b", strategy="primary_backup")
    assert await pool.run(by_id(a=revoked(), b="ok"), retry_delay=0) == "ok"
    await asyncio.sleep(1e6)
    assert status(pool, "a") == "disabled"
    assert await pool.run(ident) == "b"


@pytest.mark.parametrize("late", [str, ValueError, partial(CooldownResource, 0), RetryOperation])
def test_r32_no_late_verdict_revives_a_disabled_resource(late: Callable[[], object]) -> None:
    @virtual
    async def check() -> None:
        pool, gate = keys("a"), Gate()
        elder = asyncio.create_task(pool.run(gate))
        younger = asyncio.create_task(pool.run(gate))
        await settle()
        gate.finish(1, revoked())
        await settle()
        gate.finish(0, late())
        await asyncio.wait([elder, younger])
        elder.exception()
        assert isinstance(younger.exception(), PoolExhausted)
        assert status(pool, "a") == "disabled"

    check()


@virtual
async def test_r33_a_late_ok_clears_neither_cooldown_nor_counter() -> None:
    pool, gate = keys("a"), Gate()
    elder = asyncio.create_task(pool.run(gate))
    younger = asyncio.create_task(pool.run(gate))
    await settle()
    gate.finish(1, CooldownResource(60))
    await asyncio.wait([younger])
    assert isinstance(younger.exception(), PoolExhausted)
    await asyncio.sleep(70)  # over, but nobody has come since
    gate.finish(0, "late")
    assert await elder == "late"
    assert pool.snapshot()["a"]["consecutive_cooldown"] == 1


@virtual
async def test_r34_subclasses_and_synchronous_signals_count() -> None:
    class TooMany(CooldownResource):
        pass

    def plain(resource: Resource[str]) -> Any:
        if resource.resource_id == "a":
            raise TooMany(7)
        return ident(resource)

    pool = keys("a", "b", strategy="primary_backup")
    assert await pool.run(plain, retry_delay=0) == "b"
    assert pool.snapshot()["a"]["cooldown_seconds_remaining"] == 7


@virtual
async def test_r34_a_group_of_signals_counts_as_its_gravest() -> None:
    group = ExceptionGroup("", [RetryOperation(), ExceptionGroup("", [CooldownResource(5), CooldownResource(9)])])
    pool = keys("a", "b", strategy="primary_backup")
    assert await pool.run(by_id(a=group, b="ok"), retry_delay=0) == "ok"
    assert pool.snapshot()["a"]["cooldown_seconds_remaining"] == 9
    graver = ExceptionGroup("", [CooldownResource(5), revoked()])
    with pytest.raises(PoolExhausted) as caught:
        await pool.run(by_id(b=graver), exclude=["a"])
    assert isinstance(caught.value.__cause__, DisableResource)
    assert status(pool, "b") == "disabled"


@virtual
async def test_r34_a_task_group_in_an_operation_works_as_expected() -> None:
    async def operation(resource: Resource[str]) -> str:
        if resource.resource_id == "b":
            return "ok"
        async with asyncio.TaskGroup() as group:
            group.create_task(always(rate_limited())(resource))
            group.create_task(asyncio.sleep(100))
        raise AssertionError("unreachable")

    pool = keys("a", "b", strategy="primary_backup")
    assert await pool.run(operation, retry_delay=0) == "ok"
    assert status(pool, "a") == "cooling_down"


@virtual
async def test_r34_a_mixed_group_updates_health_and_propagates() -> None:
    group = ExceptionGroup("both", [CooldownResource(5), ValueError("mine")])
    pool = keys("a", "b", strategy="primary_backup")
    with pytest.raises(ExceptionGroup) as caught:
        await pool.run(always(group))
    assert caught.value is group
    assert status(pool, "a") == "cooling_down"
    assert pool.stats().attempts == 1


@virtual
async def test_r35_a_burst_of_429s_escalates_once() -> None:
    """The seed counts each of the burst: four 429s of one moment are 600 s, and the key is gone for ten minutes."""
    pool, gate = keys("a", cancel_siblings=False), Gate()
    calls = [asyncio.create_task(pool.run(gate, max_attempts=1)) for _ in range(8)]
    await settle()
    for number in range(8):
        gate.finish(number, rate_limited())
        await asyncio.sleep(1)
    await asyncio.wait(calls)
    assert pool.snapshot()["a"]["consecutive_cooldown"] == 1
    assert pool.snapshot()["a"]["cooldown_seconds_remaining"] == 29.0  # extended by the last one, at the first rung
    for call in calls:
        assert isinstance(call.exception(), PoolExhausted)


@virtual
async def test_r36_retry_operation_leaves_the_resource_alone() -> None:
    pool = keys("a", "b", strategy="primary_backup")
    assert await pool.run(by_id(a=RetryOperation("502"), b="ok"), retry_delay=0) == "ok"
    assert status(pool, "a") == "healthy"
    assert pool.stats().retries == 1
    assert pool.stats().cooldowns == 0


# -- R40: operations ------------------------------------------------------------

tenant: contextvars.ContextVar[str] = contextvars.ContextVar("tenant", default="none")


@virtual
async def test_r40_the_operation_runs_in_the_callers_task_and_context() -> None:
    async def operation(resource: Resource[str]) -> asyncio.Task[Any] | None:
        await asyncio.sleep(1)
        tenant.set("acme")
        return asyncio.current_task()

    assert await keys("a").run(operation) is asyncio.current_task()
    assert tenant.get() == "acme"


@virtual
async def test_r40_isolate_runs_it_in_a_copy() -> None:
    async def operation(resource: Resource[str]) -> str:
        tenant.set("before")
        await asyncio.sleep(1)
        seen = tenant.get()
        tenant.set("after")
        return seen

    tenant.set("mine")
    assert await keys("a").run(operation, isolate=True) == "before"
    assert tenant.get() == "mine"

    def plain(resource: Resource[str]) -> Any:
        tenant.set("plain")
        return ident(resource)

    assert await keys("a").run(plain, isolate=True) == "a"
    assert tenant.get() == "mine"


@virtual
async def test_r40_a_future_and_any_awaitable_will_do() -> None:
    class Later:
        def __await__(self) -> Any:
            yield from asyncio.sleep(1).__await__()
            return "later"

    pool = keys("a")
    future: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    future.set_result("future")
    assert await pool.run(lambda resource: future) == "future"
    assert await pool.run(lambda resource: Later()) == "later"
    assert await pool.run(lambda resource: asyncio.ensure_future(ident(resource))) == "a"


# -- R41: deadlines and timeouts ------------------------------------------------------------


@virtual
async def test_r41_a_deadline_already_past_never_calls_the_operation() -> None:
    pool = keys("a")
    for options in ({"deadline": now()}, {"deadline": -5.0}, {"within": 0}):
        with pytest.raises(PoolExhausted, match=r"deadline exceeded after 0 attempt\(s\)") as caught:
            await pool.run(always(AssertionError("called")), **options)  # type: ignore[arg-type]
        assert caught.value.reason == "deadline"
    assert pool.stats().attempts == 0


@virtual
async def test_r41_a_deadline_bounds_starts_and_pauses_and_never_interrupts() -> None:
    async def slow(resource: Resource[str]) -> str:
        await asyncio.sleep(10)
        return "late but whole"

    pool = keys("a", "b")
    assert await pool.run(slow, within=3) == "late but whole"
    start = now()
    with pytest.raises(PoolExhausted, match=r"deadline exceeded after 1 attempt\(s\)") as caught:
        await pool.run(always(rate_limited()), deadline=start + 2, retry_delay=100)
    assert now() == start + 2
    assert isinstance(caught.value.__cause__, CooldownResource)


@virtual
async def test_r41_a_timeout_bounds_one_attempt_and_counts_as_a_retry() -> None:
    async def slow(resource: Resource[str]) -> str:
        await asyncio.sleep(10 if resource.resource_id == "a" else 1)
        return resource.resource_id

    pool = keys("a", "b", strategy="primary_backup")
    assert await pool.run(slow, timeout=3, retry_delay=0) == "b"
    assert now() == 4
    assert status(pool, "a") == "healthy"
    with pytest.raises(PoolExhausted) as caught:
        await pool.run(slow, timeout=0.5, max_attempts=2, retry_delay=0)
    assert isinstance(caught.value.__cause__, TimeoutError)
    assert isinstance(caught.value.__cause__, RetryOperation)
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


@virtual
async def test_r41_a_timeout_reaches_awaitables_that_siblings_cannot() -> None:
    class Endless:
        def __await__(self) -> Any:
            yield from asyncio.get_running_loop().create_future().__await__()

    with pytest.raises(PoolExhausted) as caught:
        await keys("a").run(lambda resource: Endless(), timeout=2, max_attempts=1)
    assert isinstance(caught.value.__cause__, TimeoutError)
    assert now() == 2


# -- R42: pauses ------------------------------------------------------------


@virtual(seed=5)
async def test_r42_the_pause_is_jittered_and_none_follows_the_last_attempt() -> None:
    pauses: list[tuple[float, float]] = []
    real = clock.uniform

    def uniform(low: float, high: float) -> float:
        pauses.append((low, high))
        return real(low, high)

    starts: list[float] = []

    async def operation(resource: Resource[str]) -> None:
        starts.append(now())
        raise rate_limited()

    with clock.replaced(uniform=uniform), pytest.raises(PoolExhausted):
        await keys("a", "b", "c").run(operation, retry_delay=10)
    assert pauses == [(0.5, 1.5), (0.5, 1.5)]
    gaps = [later - earlier for earlier, later in itertools.pairwise(starts)]
    assert all(5 <= gap <= 15 for gap in gaps)
    assert len(set(gaps)) == 2
    assert now() == starts[-1]


@virtual
async def test_r42_no_pause_when_it_is_zero() -> None:
    with pytest.raises(PoolExhausted):
        await keys("a", "b", "c").run(always(rate_limited()), retry_delay=0)
    assert now() == 0


@virtual
async def test_r42_the_slot_is_free_during_the_pause() -> None:
    """The seed holds the slot while it sleeps, so an exclusive resource stands idle and nobody may use it."""
    pool = ResourcePool([Resource("only", 1, max_in_flight=1)])
    turns: list[str] = []

    async def failing(resource: Resource[int]) -> None:
        turns.append("first")
        raise RetryOperation

    patient = asyncio.create_task(pool.run(failing, max_attempts=2, retry_delay=100))
    await settle()
    assert in_flight(pool) == 0
    assert await pool.run(ident) == "only"
    await asyncio.wait([patient])
    assert isinstance(patient.exception(), PoolExhausted)


# -- R44, R45: what can be told afterwards ------------------------------------------------------------


@virtual
async def test_r44_one_request_id_on_every_event_of_a_call() -> None:
    pool = keys("a", "b", strategy="primary_backup")
    with capture_events("resources") as events:
        await pool.run(by_id(a=rate_limited(), b="ok"), retry_delay=0, request_id="req-7")
    assert events.names == [
        "resource_acquired",
        "resource_cooled",
        "resource_released",
        "resource_acquired",
        "resource_released",
        "run_finished",
    ]
    for event in events:
        told = event.to_dict()
        assert (told.get("usage") or told)["request_id"] == "req-7"
    usage = events[0].usage  # type: ignore[attr-defined]
    assert (usage.resource_id, usage.status, usage.acquired_at) == ("a", "in_flight", 0.0)
    assert isinstance(usage.id, int)
    with pytest.raises(AttributeError):
        usage.status = "done"
    assert events[2].usage.status == "done"  # type: ignore[attr-defined]


@virtual
async def test_r44_an_id_is_made_lazily_and_kept_for_the_call() -> None:
    pool, made = keys("a", "b", strategy="primary_backup"), []
    real = clock.token

    def token() -> str:
        made.append(real())
        return made[-1]

    with clock.replaced(token=token):
        await pool.run(ident)
        assert made == []
        with capture_events("resources.usage") as events:
            await pool.run(by_id(a=RetryOperation(), b="ok"), retry_delay=0)
    assert {event.to_dict()["usage"]["request_id"] for event in events} == set(made)
    assert len(made) == 1


@virtual
async def test_r45_exhausted_tells_what_was_tried() -> None:
    async def operation(resource: Resource[str]) -> None:
        await asyncio.sleep(2)
        raise CooldownResource(30 if resource.resource_id == "a" else 90, reason="busy")

    pool = keys("a", "b")
    with pytest.raises(PoolExhausted) as caught:
        await pool.run(operation, retry_delay=0)
    error = caught.value
    assert [attempt[0] for attempt in error.attempts] == ["a", "b"]
    assert [type(attempt.signal) for attempt in error.attempts] == [CooldownResource, CooldownResource]
    assert [attempt.duration for attempt in error.attempts] == [2.0, 2.0]
    assert isinstance(error.attempts[0], Attempt)
    assert error.__cause__ is error.attempts[-1].signal
    twin = pickle.loads(pickle.dumps(error))
    assert (twin.reason, twin.retry_after, len(twin.attempts)) == (error.reason, error.retry_after, 2)
    assert str(twin) == str(error)

    with pytest.raises(PoolExhausted, match="no eligible resource in pool: 2 cooling down, 0 disabled") as caught:
        await pool.run(ident)
    assert caught.value.reason == "no_eligible"
    assert caught.value.retry_after == 28.0
    assert caught.value.attempts == ()
    assert caught.value.code == "HEADGATE-RES-001"


@virtual
async def test_r45_nothing_eligible_after_an_attempt_keeps_the_last_signal_as_cause() -> None:
    pool = keys("a", "b")
    await pool.disable("b")
    with pytest.raises(PoolExhausted, match="no eligible resource") as caught:
        await pool.run(always(rate_limited()), retry_delay=0)
    assert caught.value.reason == "no_eligible"
    assert isinstance(caught.value.__cause__, CooldownResource)
    assert caught.value.retry_after == 30.0
    assert caught.value.remedy.endswith("call again after `retry_after` seconds.")


@virtual
async def test_r45_retry_after_is_told_whatever_ran_out() -> None:
    pool = keys("a", "b")
    with pytest.raises(PoolExhausted, match="3 were allowed, but no resource is used twice and 2 match") as caught:
        await pool.run(by_id(a=CooldownResource(40), b=CooldownResource(25)), retry_delay=0)
    assert (caught.value.reason, caught.value.retry_after) == ("attempts", 25.0)
    with pytest.raises(
        PoolExhausted, match=r"waiting for a resource: 2 cooling down, 0 disabled, 0 in full use"
    ) as caught:
        await pool.run(ident, wait_for_capacity=True, within=5)
    assert (caught.value.reason, caught.value.retry_after) == ("deadline", 20.0)


@virtual
async def test_r45_the_remedy_fits_the_situation() -> None:
    pool = keys("a")
    for options, remedy in (
        ({"tags": ["moon"]}, "Check tags= and exclude="),
        ({"exclude": ["a"], "wait_for_capacity": True}, "Check tags= and exclude="),
    ):
        with pytest.raises(PoolExhausted, match=remedy):
            await pool.run(ident, **options)  # type: ignore[arg-type]
    busy = ResourcePool([Resource("a", 1, 1)])
    async with busy.lease():
        with pytest.raises(PoolExhausted, match="Pass wait_for_capacity=True to wait for those in use too"):
            await busy.run(ident, wait_for_cooldown=True)
    await pool.disable("a")
    with pytest.raises(PoolExhausted, match=r"enable\(\) one, or add\(\) another"):
        await pool.run(ident, wait_for_capacity=True)


@virtual
async def test_r40_what_cannot_be_called_is_explained() -> None:
    pool = keys("a")
    for wrong, shown in ((ident(Resource("x", "y")), "coroutine"), (None, "NoneType")):
        with pytest.raises(InvalidType, match=f"operation must be a function that takes the resource, got {shown}"):
            await pool.run(wrong)  # type: ignore[arg-type]

    async def generator(resource: Resource[str]) -> Any:
        yield resource

    with pytest.raises(InvalidType, match=r"got async_generator. Use stream\(\) for an async generator"):
        await pool.run(generator)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="text goes into reason="):
        CooldownResource("rate limited")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="mine"):
        await pool.run(always(TypeError("mine")))
    assert in_flight(pool) == 0


# -- whatever happens, the resource comes back -------------------------------------------


@virtual
async def test_r34_a_signal_class_that_skips_our_constructor_works() -> None:
    class Limited(CooldownResource):
        def __init__(self, response: object) -> None:
            self.response = response

    class Dead(DisableResource):
        def __init__(self, response: object) -> None:
            self.response = response

    pool = keys("a", "b", "c", strategy="primary_backup")
    assert await pool.run(by_id(a=Limited(429), b=Dead(401), c="ok"), retry_delay=0) == "ok"
    assert (status(pool, "a"), status(pool, "b")) == ("cooling_down", "disabled")
    assert pool.snapshot()["a"]["cooldown_seconds_remaining"] == 30.0


class Interrupt(BaseException):
    pass


@virtual
async def test_nothing_that_raises_between_leaks_a_use() -> None:
    class NeedsMore(CooldownResource):
        def __init__(self, one: int, two: int) -> None:
            super().__init__()

    def interrupt(outcome: object) -> Any:
        raise Interrupt

    assert await keys("a", classify=lambda outcome: NeedsMore).run(always("ok")) == "ok"
    pool = keys("a", classify=interrupt)
    with pytest.raises(Interrupt):
        await pool.run(always("ok"))
    assert in_flight(pool) == 0
    listening = keys("a")
    unsubscribe = subscribe(interrupt, "resources.usage")
    try:
        for options in ({}, {"wait_for_capacity": True}):
            with pytest.raises(Interrupt):
                await listening.run(ident, **options)  # type: ignore[arg-type]
    finally:
        unsubscribe()
    assert in_flight(listening) == 0


@pytest.mark.parametrize("huge", [10**400, -(10**400)])
def test_numbers_beyond_all_floats_are_refused(huge: int) -> None:
    with pytest.raises(InvalidArgument):
        CooldownResource(huge)
    with pytest.raises(InvalidArgument):
        ResourcePool({"a": 1}, cooldown_table=(huge,))
    with pytest.raises(InvalidArgument):
        ResourcePool({"a": 1}).use(deadline=huge)
    assert ResourcePool([Resource("a", 1, 10**400)]).stats().eligible == 1


@virtual
async def test_a_key_built_cooling_is_proven_by_one_success() -> None:
    pool = ResourcePool([Resource("a", 1, status="cooling_down")], probe_on_recovery=True)
    assert await pool.run(ident) == "a"
    async with pool.lease(), pool.lease():
        assert in_flight(pool) == 2


def test_a_fork_in_the_middle_of_a_transition_leaves_the_child_able_to_work() -> None:
    code = (
        "import os, threading\n"
        "from headgate import ResourcePool\n"
        "from headgate.resources.engine import lock\n"
        "pool = ResourcePool({'a': 1})\n"
        "held, done = threading.Event(), threading.Event()\n"
        "def hold():\n"
        "    with lock:\n"
        "        held.set(); done.wait()\n"
        "thread = threading.Thread(target=hold); thread.start(); held.wait()\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    os._exit(0 if pool.run_sync(lambda r: r.value) == 1 else 1)\n"
        "code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]); done.set(); thread.join(); raise SystemExit(code)\n"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, timeout=20)
