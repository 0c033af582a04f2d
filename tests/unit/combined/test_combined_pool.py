"""T81: a task has a slot and a key, and what it says of the key is heard. Verdicts, budgets, siblings, ends."""

from __future__ import annotations

import asyncio
import errno
import functools
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import httpx
import pytest

import headgate.tasks
from headgate import (
    CooldownResource,
    DisableResource,
    PoolExhausted,
    Quota,
    Resource,
    ResourcePool,
    RetryOperation,
    StoreWriteFailed,
    TaskCancelled,
    TaskExpired,
    TaskFailed,
    TaskHandle,
    TaskPool,
    fair_round_robin,
    pool_list,
    pool_wait,
)
from headgate.core.clock import clock
from headgate.core.files import Files
from headgate.stores import JsonLinesStore, MemoryStore
from headgate.testing import run, settle, virtual
from headgate.testing.virtual_loop import VirtualLoop
from tests.support.combined.support import (
    Key,
    Script,
    Turns,
    Uses,
    Victim,
    cooling,
    counts,
    exclusive,
    free,
    hold,
    outcome_of,
    shared,
    tagged,
    use,
    watched,
    which,
)
from tests.support.resources.support import Gate, in_flight, status

# A new one each time: an exception that a module keeps would keep the frames that raised it, and the pools in them.


def limited() -> CooldownResource:
    return CooldownResource(30, "rate limited")


def dead() -> DisableResource:
    return DisableResource("revoked")


def again() -> RetryOperation:
    return RetryOperation("bad gateway")


visitor: ContextVar[str] = ContextVar("visitor", default="nobody")


# -- running -------------------------------------------------------------------------------


@virtual
async def test_t81_the_key_is_the_first_argument() -> None:
    keys = shared("a")
    seen: list[Any] = []

    async def body(*args: Any) -> str:
        seen.append(args)
        return "done"

    async with TaskPool(resources=keys) as pool:
        assert await (await pool.submit(body, 1, "two", None)) == "done"
        assert await pool.submit_nowait(body) == "done"
    (first, second) = seen
    assert isinstance(first[0], Resource)
    assert (first[0].resource_id, first[0].value) == ("a", "secret-a")
    assert first[1:] == (1, "two", None)
    assert len(second) == 1
    assert free(keys)


@virtual
async def test_t11_it_starts_at_once_and_has_its_key_then() -> None:
    keys = shared("a")
    async with TaskPool(resources=keys) as pool:
        handle = pool.submit_nowait(hold, 5)
        assert handle.status == "running"
        assert in_flight(keys) == 1, "slot and key were taken together, before anybody else could run"
        await handle
        assert in_flight(keys) == 0, "whoever hears of the end finds the key free"
        assert clock.now() == 5


class Reviewer:
    async def review(self, key: Key, pr: int) -> str:
        return f"{key.resource_id} {pr}"

    def plain(self, key: Key, pr: int) -> str:
        assert threading.current_thread() is not threading.main_thread()
        return f"{key.resource_id} {pr}"

    async def __call__(self, key: Key, pr: int) -> str:
        return f"{key.resource_id} {pr}"


async def review(key: Key, pr: int, *, depth: str = "") -> str:
    return f"{key.resource_id} {pr}{depth}"


def plain_review(key: Key, pr: int, *, depth: str = "") -> str:
    assert threading.current_thread() is not threading.main_thread()
    return f"{key.resource_id} {pr}{depth}"


@pytest.mark.parametrize(
    ("fn", "found"),
    [
        (review, "a 7"),
        (plain_review, "a 7"),
        (functools.partial(review, depth=" deep"), "a 7 deep"),
        (functools.partial(plain_review, depth=" deep"), "a 7 deep"),
        (functools.partial(functools.partial(review), depth=" deep"), "a 7 deep"),
        (Reviewer().review, "a 7"),
        (Reviewer().plain, "a 7"),
        (Reviewer(), "a 7"),
        (lambda key, pr: review(key, pr), "a 7"),
        (lambda key, pr: f"{key.resource_id} {pr}", "a 7"),
    ],
)
@virtual
async def test_t17_every_kind_of_function(fn: Callable[..., Any], found: str) -> None:
    keys = shared("a")
    async with TaskPool(resources=keys) as pool:
        assert await (await pool.submit(fn, 7)) == found
    assert free(keys)
    assert keys.stats().successes == 1


@virtual
async def test_t81_slot_and_key_together_or_neither() -> None:
    keys = exclusive("a", "b")
    async with TaskPool(max_concurrent=5, resources=keys) as pool:
        with watched(keys, pool):
            handles = [await pool.submit(hold, 1, number) for number in range(10)]
            assert counts(pool) == {"active": 2, "queued": 8}
            assert in_flight(keys) == 2
            assert [await handle for handle in handles] == list(range(10))
            assert clock.now() == 5
    assert free(keys)


@virtual
async def test_t81_no_key_is_held_that_has_no_slot() -> None:
    keys = exclusive("a", "b", "c", "d")
    async with TaskPool(max_concurrent=2, resources=keys) as pool:
        for _ in range(6):
            await pool.submit(hold, 1)
        assert (pool.snapshot().active, in_flight(keys)) == (2, 2)
        assert await keys.run(which) in ("c", "d")
        await asyncio.sleep(1)
        assert (pool.snapshot().active, in_flight(keys)) == (2, 2)
    assert clock.now() == 3
    assert free(keys)


@virtual
async def test_r21_six_tasks_on_three_keys_are_two_on_each() -> None:
    keys = shared("a", "b", "c")
    async with TaskPool(max_concurrent=6, resources=keys) as pool:
        for _ in range(6):
            await pool.submit(hold, 1)
        assert {name: one["in_flight"] for name, one in keys.snapshot().items()} == {"a": 2, "b": 2, "c": 2}


@virtual
async def test_r22_the_strategy_of_the_keys_is_kept() -> None:
    keys = ResourcePool(
        [Resource("us", "s", 2), Resource("eu", "s", 2), Resource("asia", "s")], strategy="primary_backup"
    )
    async with TaskPool(max_concurrent=6, resources=keys) as pool:
        for _ in range(6):
            await pool.submit(hold, 1)
        assert {name: one["in_flight"] for name, one in keys.snapshot().items()} == {"us": 2, "eu": 2, "asia": 2}


@virtual
async def test_line_without_resources_it_is_the_pool_of_tasks() -> None:
    async def body(number: int) -> int:
        return number

    async with TaskPool() as pool:
        assert isinstance(pool, headgate.tasks.TaskPool)
        assert await (await pool.submit(body, 3)) == 3
        assert [one async for one in pool.map(body, range(3))] == [0, 1, 2]


@virtual
async def test_t81_bodies_never_use_a_key_above_its_cap() -> None:
    keys = ResourcePool([Resource("a", "s", 1), Resource("b", "s", 2), Resource("c", "s", 3)])
    uses = Uses()

    async def body(key: Key, seconds: float) -> None:
        with uses(key):
            await asyncio.sleep(seconds)

    async with TaskPool(max_concurrent=20, resources=keys) as pool:
        with watched(keys, pool) as watch:
            for number in range(60):
                await pool.submit(body, 1 + number % 3)
            await pool.drain()
    assert uses.wrong == []
    assert uses.most == {"a": 1, "b": 2, "c": 3}
    assert sum(watch.given.values()) == 60


# -- verdicts ------------------------------------------------------------------------------


@pytest.mark.parametrize(("signal", "after"), [(limited, "cooling_down"), (dead, "disabled"), (again, "healthy")])
@pytest.mark.parametrize("how", ["run", "plain"])
@virtual
async def test_t41_a_signal_ends_the_attempt_and_the_task_goes_on_elsewhere(
    signal: Callable[[], Exception], after: str, how: str
) -> None:
    keys = shared("a", "b", strategy="primary_backup" if after != "healthy" else "round_robin")
    script = Script(signal(), "found")
    async with TaskPool(resources=keys) as pool:
        with watched(keys, pool):
            handle = await pool.submit(getattr(script, how), 1)
            assert await handle == "found"
        assert script.keys == ["a", "b"]
        assert (status(keys, "a"), status(keys, "b")) == (after, "healthy")
        assert handle.snapshot().attempt == 2
        assert counts(pool) == {"completed": 1}
        assert clock.now() == 0, "nobody waits between two attempts while a key is free"
    assert free(keys)


@virtual
async def test_r31_the_keys_learn_as_from_their_own_run() -> None:
    keys = shared("a", "b", cooldown_table=(10.0, 70.0), strategy="primary_backup")
    async with TaskPool(resources=keys) as pool:
        assert await (await pool.submit(Script(CooldownResource(), "ok").run)) == "ok"
        assert keys.snapshot()["a"]["cooldown_seconds_remaining"] == 10
        assert keys.snapshot()["a"]["consecutive_cooldown"] == 1
        await asyncio.sleep(10)
        assert await (await pool.submit(Script(CooldownResource(), "ok").run)) == "ok"
        assert keys.snapshot()["a"]["cooldown_seconds_remaining"] == 70
        assert keys.snapshot()["a"]["consecutive_cooldown"] == 2
        await asyncio.sleep(70)
        assert await (await pool.submit(which)) == "a"
        assert keys.snapshot()["a"]["consecutive_cooldown"] == 0
    stats = keys.stats()
    assert (stats.cooldowns, stats.disables, stats.attempts) == (2, 0, 5)


class TooMany(CooldownResource):
    pass


@virtual
async def test_r34_subclasses_and_groups_of_signals_count() -> None:
    keys = shared("a", "b", "c", strategy="primary_backup")
    async with TaskPool(resources=keys) as pool:
        assert await (await pool.submit(Script(TooMany(40), "ok").run)) == "ok"
        assert keys.snapshot()["a"]["cooldown_seconds_remaining"] == 40
        group = ExceptionGroup("both", [CooldownResource(5), DisableResource()])
        assert await (await pool.submit(Script(group, "ok").run)) == "ok"
        assert status(keys, "b") == "disabled", "a group is as grave as its gravest"
        mixed = ExceptionGroup("mixed", [CooldownResource(5), LookupError("real")])
        handle = await pool.submit(Script(mixed, "not reached").run, retries=0)
        with pytest.raises(ExceptionGroup) as caught:
            await handle
        assert caught.value is mixed
        assert status(keys, "c") == "cooling_down", "the keys learn, and the failure reaches the caller"


@virtual
async def test_r36_a_retry_goes_elsewhere_where_there_is_an_elsewhere() -> None:
    keys = shared("a", "b", strategy="primary_backup")
    script = Script(again(), "found")
    async with TaskPool(resources=keys) as pool:
        assert await (await pool.submit(script.run)) == "found"
    assert script.keys == ["a", "b"]


@virtual
async def test_r36_a_retry_may_have_the_same_key_where_there_is_no_other() -> None:
    keys = shared("a")
    script = Script(again(), again(), "found")
    async with TaskPool(resources=keys) as pool:
        assert await (await pool.submit(script.run)) == "found"
    assert script.keys == ["a", "a", "a"]
    assert clock.now() == 0


@virtual
async def test_t41_slot_and_key_are_given_back_between_two_attempts() -> None:
    keys = tagged(a="a", b="b")
    async with TaskPool(resources=keys) as pool:
        first = await pool.submit(Script(limited(), "ok").run, tags=["a"])
        second = await pool.submit(which, tags=["b"])
        assert await second == "b"
        assert clock.now() == 0, "the only slot was free while the first one waited for its key"
        assert first.status == "queued"
        assert counts(pool) == {"queued": 1, "completed": 1}
        assert in_flight(keys) == 0
        assert await first == "ok"
        assert clock.now() == 30


@pytest.mark.parametrize("signal", [limited, dead, again])
@virtual
async def test_t41_it_is_queued_again_as_first_of_its_partition(signal: Callable[[], Exception]) -> None:
    keys = shared("k1", "k2", "k3")
    turns = Turns()
    failed: list[str] = []

    async def once(key: Key, name: str) -> None:
        turns.order.append(name)
        if not failed:
            failed.append(name)
            raise signal()

    async with TaskPool(queue=fair_round_robin("tenant_id"), resources=keys) as pool:
        await pool.submit(hold, 1, tenant_id="z")
        for name in ("a1", "a2", "b1", "b2", "a3"):
            await pool.submit(once, name, tenant_id=name[0])
        await pool.drain()
    assert turns.order == ["a1", "b1", "a1", "b2", "a2", "a3"], "a had its turn, and gets no other one for this"


@pytest.mark.parametrize(
    ("queue", "order"),
    [
        ("fifo", ["first", "first", "low", "high"]),
        ("lifo", ["first", "first", "high", "low"]),
        ("priority", ["first", "high", "first", "low"]),
    ],
)
@virtual
async def test_t41_and_as_first_of_all_where_there_are_no_partitions(queue: str, order: list[str]) -> None:
    keys, turns = shared("k1", "k2"), Turns()
    failed: list[str] = []

    async def once(key: Key, name: str) -> None:
        turns.order.append(name)
        if not failed:
            failed.append(name)
            raise again()

    async with TaskPool(queue=queue, resources=keys) as pool:
        for name, priority in (("first", 0), ("low", 0), ("high", 9)):
            await pool.submit(once, name, priority=priority)
        await pool.drain()
    assert turns.order == order


@virtual
async def test_t17_each_attempt_begins_in_the_context_of_the_submit() -> None:
    seen: list[str] = []

    async def body(key: Key) -> None:
        seen.append(visitor.get())
        visitor.set("the first attempt")
        if len(seen) == 1:
            raise again()

    visitor.set("ada")
    async with TaskPool(resources=shared("a", "b")) as pool:
        handle = await pool.submit(body)
        visitor.set("later")
        await handle
    assert seen == ["ada", "ada"]


@virtual
async def test_r30_another_exception_fails_the_task_and_clears_the_key() -> None:
    keys = ResourcePool([Resource("a", "s", consecutive_cooldown=2), Resource("b", "s")], strategy="primary_backup")
    error, calls = LookupError("mine"), []

    async def body(key: Key) -> None:
        calls.append(key.resource_id)
        raise error

    async with TaskPool(resources=keys) as pool:
        handle = await pool.submit(body)
        with pytest.raises(LookupError) as caught:
            await handle
        assert caught.value is error
        assert calls == ["a"], "nothing is tried again"
        assert (handle.status, handle.snapshot().attempt) == ("failed", 1)
        assert keys.snapshot()["a"]["consecutive_cooldown"] == 0, "the key answered: it is healthy"
    assert free(keys)


@virtual
async def test_line_an_exhausted_pool_inside_a_body_is_a_failure_like_any_other() -> None:
    keys, inner = shared("a", "b"), shared("x")
    await inner.disable("x")
    calls = []

    async def body(key: Key) -> Any:
        calls.append(key.resource_id)
        return await inner.run(which)

    async with TaskPool(resources=keys) as pool:
        with pytest.raises(PoolExhausted) as caught:
            await (await pool.submit(body))
    assert caught.value.reason == "no_eligible"
    assert calls == ["a"]
    assert status(keys, "a") == "healthy"


@virtual
async def test_line_a_wrong_number_of_arguments_is_a_type_error_of_the_task() -> None:
    keys = shared("a")
    async with TaskPool(resources=keys) as pool:
        handle = await pool.submit(review)
        with pytest.raises(TypeError, match="pr"):
            await handle
    assert free(keys)
    assert status(keys, "a") == "healthy"


# -- budgets -------------------------------------------------------------------------------


@virtual
async def test_t81_max_attempts_bounds_the_verdicts_of_one_task() -> None:
    keys = shared("a", "b", "c", "d", "e")
    signals = [RetryOperation("once"), DisableResource("dead"), RetryOperation("again")]
    script = Script(*signals, "never")
    async with TaskPool(resources=keys) as pool:
        handle = await pool.submit(script.run)
        with pytest.raises(PoolExhausted, match="max_attempts=3 exhausted") as caught:
            await handle
        assert caught.value.reason == "attempts"
        assert [(one.resource_id, one.signal) for one in caught.value.attempts] == list(
            zip("abc", signals, strict=True)
        )
        assert caught.value.__cause__ is signals[-1]
        assert (handle.status, handle.snapshot().attempt) == ("failed", 3)
        assert handle.snapshot().error is caught.value
        assert script.keys == ["a", "b", "c"]
        assert counts(pool) == {"failed": 1}
        assert clock.now() == 0
    assert free(keys)


@pytest.mark.parametrize("where", ["resources", "submit"])
@pytest.mark.parametrize("allowed", [1, 2, 5])
@virtual
async def test_t81_the_budget_is_the_keys_or_the_submits_own(where: str, allowed: int) -> None:
    keys = shared("a", "b", max_attempts=allowed if where == "resources" else 4)
    script = Script(again())
    options = {} if where == "resources" else {"max_attempts": allowed}
    async with TaskPool(resources=keys) as pool:
        with pytest.raises(PoolExhausted) as caught:
            await (await pool.submit(script.run, **options))
        assert len(script.keys) == len(caught.value.attempts) == allowed
        just_enough = Script(*[again()] * (allowed - 1), "ok")
        assert await (await pool.submit(just_enough.run, **options)) == "ok"


@virtual
async def test_t81_the_last_attempt_fails_at_once_and_does_not_wait_for_a_key() -> None:
    keys = shared("only", cooldown_table=(10.0, 20.0, 40.0))
    script = Script(CooldownResource())
    async with TaskPool(resources=keys) as pool:
        with pytest.raises(PoolExhausted):
            await (await pool.submit(script.run))
    assert script.times == [0, 10, 30, *range(70, 311, 40)]
    assert clock.now() == 310


@virtual
async def test_t81_ten_cooldowns_without_any_success_end_a_task() -> None:
    keys = shared("a", "b")
    script = Script(CooldownResource(1, "429"))
    async with TaskPool(resources=keys) as pool:
        handle = await pool.submit(script.run, max_attempts=1, retries=5)
        with pytest.raises(PoolExhausted, match="10 cooldowns in a row, and no other call succeeded") as caught:
            await handle
    assert len(script.keys) == len(caught.value.attempts) == handle.snapshot().attempt == 10
    assert caught.value.reason == "attempts"
    assert isinstance(caught.value.__cause__, CooldownResource)
    assert caught.value.remedy is not None
    assert "max_in_flight" in caught.value.remedy
    assert free(keys)


@pytest.mark.parametrize("whose", ["a task", "a call"])
@virtual
async def test_t81_fifty_cooldowns_end_a_task_although_others_succeed(whose: str) -> None:
    keys = shared("a", "b")
    async with TaskPool(max_concurrent=2, resources=keys) as pool:

        async def unlucky(key: Resource[str]) -> None:
            tried.append(key.resource_id)
            if len(tried) % 9 == 0 and whose == "a task":
                await (await others.submit(which))
            elif len(tried) % 9 == 0:
                await keys.run(which)
            raise CooldownResource(3, "429")

        tried: list[str] = []
        async with TaskPool(resources=keys) as others:
            handle = await pool.submit(unlucky)
            with pytest.raises(PoolExhausted, match="50 cooldowns") as caught:
                await handle
    assert len(tried) == len(caught.value.attempts) == 50
    assert free(keys)


@pytest.mark.parametrize("answers", [(0.02, 0.0), (0.1, 0.2)], ids=["quick answers", "slow answers"])
@pytest.mark.parametrize("quota", [None, "learn"])
@virtual
async def test_t81_l09_tasks_that_rush_for_a_key_are_not_ended_by_its_short_cooldowns(
    quota: Any, answers: tuple[float, float]
) -> None:
    """A provider that takes ten calls a second and asks for exact waits: each task meets very many, within seconds."""
    tokens, at, refused = 10.0, 0.0, 0

    async def call(key: Resource[str]) -> None:
        nonlocal tokens, at, refused
        await asyncio.sleep(answers[0])
        now = asyncio.get_running_loop().time()
        tokens, at = min(10.0, tokens + 10 * (now - at)), now
        if tokens < 1:
            refused += now > 5
            raise CooldownResource((1 - tokens) / 10, "429")
        tokens -= 1
        await asyncio.sleep(answers[1])

    keys = ResourcePool([Resource("a", "sk-a", quota=quota)])
    async with TaskPool(max_concurrent=40, resources=keys, retry_budget=0.0) as pool:
        handles = [await pool.submit(call) for _ in range(400)]
        for handle in handles:
            await handle
    assert asyncio.get_running_loop().time() < 44, "nine tenths of what the provider allows"
    if quota == "learn":  # what was refused in the first seconds has told the rate
        assert refused <= 10


@virtual
async def test_t81_cooldowns_do_not_count_to_max_attempts_and_the_others_do() -> None:
    keys = shared("a", "b", "c", "d")
    mixed = [again(), CooldownResource(1), CooldownResource(1), dead(), CooldownResource(1)]
    async with TaskPool(resources=keys) as pool:
        script = Script(*mixed, "ok")
        assert await (await pool.submit(script.run)) == "ok"
        assert len(script.keys) == 6
        script = Script(*mixed, again(), "never")
        with pytest.raises(PoolExhausted, match="max_attempts=3 exhausted") as caught:
            await (await pool.submit(script.run))
        assert len(caught.value.attempts) == 6
    assert free(keys)


@virtual
async def test_t81_a_success_of_another_task_begins_the_count_again() -> None:
    keys = shared("a")
    async with TaskPool(max_concurrent=2, queue="fifo", resources=keys) as pool:
        script = Script(*[CooldownResource(1)] * 9, "seen", *[CooldownResource(1)] * 9, "ok")
        assert await (await pool.submit(script.run)) == "seen"
        assert await (await pool.submit(script.run)) == "ok"


@virtual
async def test_r31_a_cooldown_of_no_seconds_counts_and_is_over_at_once() -> None:
    keys = shared("only")
    script = Script(CooldownResource(0))
    async with TaskPool(resources=keys) as pool:
        with pytest.raises(PoolExhausted) as caught:
            await (await pool.submit(script.run))
    assert script.times == [0] * 10
    assert caught.value.reason == "attempts"


@virtual
async def test_t81_waiting_for_a_key_costs_no_attempt() -> None:
    keys = shared("a", max_attempts=1)
    with pytest.raises(PoolExhausted):
        await keys.run(Script(CooldownResource(3600)).run)
    async with TaskPool(resources=keys) as pool:
        handle = await pool.submit(which)
        assert handle.status == "queued"
        assert await handle == "a"
        assert handle.snapshot().attempt == 1
        assert clock.now() == 3600


@virtual
async def test_t81_the_verdicts_of_others_cost_a_task_nothing() -> None:
    """Ten tasks, each of which would be out of attempts if it paid for the cooldowns of the one before it."""
    keys = exclusive("a", max_attempts=2)
    async with TaskPool(max_concurrent=10, queue="fifo", resources=keys) as pool:
        scripts = [Script(CooldownResource(1), "ok") for _ in range(10)]
        handles = [await pool.submit(script.run) for script in scripts]
        assert [await handle for handle in handles] == ["ok"] * 10
        assert [handle.snapshot().attempt for handle in handles] == [2] * 10
    assert free(keys)


@virtual
async def test_t81_the_last_key_is_disabled_by_the_task_itself() -> None:
    keys, signal = shared("a", "b"), dead()
    async with TaskPool(resources=keys) as pool:
        handle = await pool.submit(Script(signal).run, max_attempts=5)
        with pytest.raises(PoolExhausted) as caught:
            await handle
    assert caught.value.reason == "no_eligible"
    assert [one.resource_id for one in caught.value.attempts] == ["a", "b"]
    assert caught.value.__cause__ is signal
    assert handle.status == "failed"
    assert free(keys)


# -- retries -------------------------------------------------------------------------------


@virtual
async def test_t41_retries_count_failures_and_attempts_count_verdicts() -> None:
    keys = shared("a", "b")
    script = Script(LookupError(1), again(), LookupError(2), again(), "ok")
    async with TaskPool(resources=keys) as pool:
        handle = await pool.submit(script.run, retries=2, max_attempts=3)
        assert await handle == "ok"
        assert handle.snapshot().attempt == 5
        script = Script(again(), LookupError(1), again(), LookupError(2), "not reached")
        handle = await pool.submit(script.run, retries=1, max_attempts=3)
        with pytest.raises(LookupError, match="2"):
            await handle
        assert len(script.keys) == 4
    assert free(keys)


@virtual
async def test_t41_verdicts_do_not_use_up_retries_nor_do_retries_use_up_attempts() -> None:
    keys = shared("a", "b")
    async with TaskPool(resources=keys) as pool:
        script = Script(again(), again(), LookupError("late"), "ok")
        assert await (await pool.submit(script.run, retries=1, max_attempts=3)) == "ok"
        script = Script(LookupError(), LookupError(), LookupError(), again(), "ok")
        assert await (await pool.submit(script.run, retries=3, max_attempts=2)) == "ok"


@virtual
async def test_t81_a_spent_budget_is_final_whatever_retries_are_left() -> None:
    keys = shared("a", "b")
    script = Script(again(), again(), "not reached")
    async with TaskPool(resources=keys) as pool:
        with pytest.raises(PoolExhausted):
            await (await pool.submit(script.run, retries=5, max_attempts=2))
    assert len(script.keys) == 2


@virtual
async def test_t41_a_retry_gives_the_key_back_too() -> None:
    keys = exclusive("a")
    script = Script(LookupError(), "ok", seconds=1)
    async with TaskPool(max_concurrent=2, queue="fifo", resources=keys) as pool:
        with watched(keys, pool):
            handle = await pool.submit(script.run, retries=1)
            behind = await pool.submit(hold, 1)
            assert await handle == "ok"
            assert await behind == "done"
        assert clock.now() == 3
    assert free(keys)


# -- timeout and cancel --------------------------------------------------------------------


def troubled(*names: str, cap: int | None = None) -> ResourcePool[str]:
    """Keys that had a cooldown before: a verdict of any kind would change their count."""
    return ResourcePool([Resource(name, f"secret-{name}", cap, consecutive_cooldown=1) for name in names])


@virtual
async def test_t15b_a_timeout_is_no_verdict_and_gives_the_key_back() -> None:
    keys = troubled("a", cap=1)
    async with TaskPool(max_concurrent=2, resources=keys) as pool:
        handle = await pool.submit(hold, 100, timeout=5)
        behind = await pool.submit(hold, 1)
        with pytest.raises(TimeoutError):
            await handle
        assert clock.now() == 5
        assert handle.status == "failed"
        assert behind.status == "running"
        assert keys.snapshot()["a"]["consecutive_cooldown"] == 1
        assert status(keys, "a") == "healthy"
        await behind
    assert free(keys)


@virtual
async def test_t41_a_timeout_is_a_failure_that_retries_count() -> None:
    keys = shared("a", "b")
    calls: list[str] = []

    async def body(key: Key) -> str:
        calls.append(key.resource_id)
        await asyncio.sleep(10 if len(calls) == 1 else 1)
        return "ok"

    async with TaskPool(resources=keys) as pool:
        assert await (await pool.submit(body, timeout=5, retries=1)) == "ok"
    assert (len(calls), clock.now()) == (2, 6)
    assert free(keys)


@virtual
async def test_t10_a_deadline_ends_a_running_attempt() -> None:
    keys = troubled("a")
    async with TaskPool(resources=keys) as pool:
        handle = await pool.submit(hold, 100, deadline=5.0)
        with pytest.raises(TimeoutError):
            await handle
        assert clock.now() == 5
    assert keys.snapshot()["a"]["consecutive_cooldown"] == 1
    assert free(keys)


@virtual
async def test_t10_a_deadline_between_two_attempts_ends_the_task() -> None:
    keys = shared("a")
    script = Script(limited())
    async with TaskPool(resources=keys) as pool:
        handle = await pool.submit(script.run, deadline=12.0)
        with pytest.raises(TaskExpired):
            await handle
        assert clock.now() == 12
        assert script.times == [0]
        assert counts(pool) == {"expired": 1}
    assert free(keys)


@virtual
async def test_t10_a_ttl_is_for_the_first_start_only() -> None:
    keys = shared("a")
    script = Script(limited(), "ok")
    async with TaskPool(resources=keys) as pool:
        assert await (await pool.submit(script.run, ttl=5)) == "ok"
    assert script.times == [0, 30]


@pytest.mark.parametrize("when", ["before its first step", "running"])
@virtual
async def test_t15b_a_cancel_is_no_verdict_and_gives_the_key_back(when: str) -> None:
    keys = troubled("a", cap=1)
    async with TaskPool(max_concurrent=2, resources=keys) as pool:
        handle = await pool.submit(hold, 100)
        behind = await pool.submit(hold, 1)
        if when == "running":
            await asyncio.sleep(3)
        assert handle.cancel() is True
        with pytest.raises(TaskCancelled):
            await handle
        assert clock.now() == (3 if when == "running" else 0)
        await settle()
        assert behind.status == "running"
        assert keys.snapshot()["a"]["consecutive_cooldown"] == 1
        await behind
        assert keys.snapshot()["a"]["consecutive_cooldown"] == 0
    assert free(keys)


@virtual
async def test_t15b_a_cancelled_thread_keeps_its_key_until_it_returns() -> None:
    keys = troubled("a", cap=1)

    def body(key: Key) -> str:
        clock.sleep(10)
        return "dropped"

    async with TaskPool(max_concurrent=2, resources=keys) as pool:
        handle, behind = await pool.submit(body), await pool.submit(which)
        await asyncio.sleep(3)
        handle.cancel()
        await asyncio.sleep(3)
        assert in_flight(keys) == 1, "the thread still has it in its hands"
        assert behind.status == "queued"
        with pytest.raises(TaskCancelled):
            await handle
        assert clock.now() == 10
        assert keys.snapshot()["a"]["consecutive_cooldown"] == 1, "its result was dropped, and so is its verdict"
        assert await behind == "a"
    assert free(keys)


@virtual
async def test_t15b_a_cancel_while_it_waits_for_its_second_attempt() -> None:
    keys = shared("a")
    script = Script(limited(), "not reached")
    async with TaskPool(resources=keys) as pool:
        handle = await pool.submit(script.run)
        await asyncio.sleep(1)
        assert handle.status == "queued"
        assert handle.cancel() is True
        assert counts(pool) == {"cancelled": 1}
        await pool.drain()
        assert clock.now() == 1
    assert free(keys)
    assert len(script.keys) == 1


@virtual
async def test_line_a_signal_of_a_task_that_was_told_to_stop_is_heard_and_ends_it() -> None:
    """It was cancelled, and on its way out it learned that its key is dead: the keys know, the task is over."""
    keys = shared("a", "b", strategy="primary_backup")

    async def body(key: Key) -> None:
        try:
            await asyncio.sleep(100)
        finally:
            raise dead()

    async with TaskPool(resources=keys) as pool:
        handle = await pool.submit(body)
        await asyncio.sleep(1)
        handle.cancel()
        snapshot = await pool_wait(handle)
        assert snapshot.status in ("cancelled", "failed")
        assert snapshot.attempt == 1, "nobody wants it any more: it is not tried elsewhere"
        assert status(keys, "a") == "disabled"
    assert free(keys)


@virtual
async def test_t01b_leaving_the_block_waits_for_tasks_between_attempts() -> None:
    keys = shared("a")
    async with TaskPool(resources=keys) as pool:
        handle = await pool.submit(Script(limited(), "ok").run)
    assert handle.status == "completed"
    assert clock.now() == 30


@virtual
async def test_t01b_close_with_cancel_ends_everything_and_gives_all_back() -> None:
    keys = exclusive("a", "b")
    pool = TaskPool(max_concurrent=4, resources=keys)
    handles = [await pool.submit(Script(limited()).run)]
    handles += [await pool.submit(hold, 100) for _ in range(4)]
    await asyncio.sleep(1)
    await pool.close(cancel=True)
    assert clock.now() == 1
    assert {handle.status for handle in handles} == {"cancelled"}
    assert free(keys)


@virtual
async def test_t01b_a_block_that_raises_gives_all_back() -> None:
    keys = exclusive("a")
    handles: list[TaskHandle[Any]] = []

    async def block() -> None:
        async with TaskPool(max_concurrent=3, resources=keys) as pool:
            handles.extend([await pool.submit(hold, 100) for _ in range(3)])
            await asyncio.sleep(1)
            raise LookupError

    with pytest.raises(LookupError):
        await block()
    assert clock.now() == 1
    assert [handle.status for handle in handles] == ["cancelled"] * 3
    assert free(keys)


# -- classify ------------------------------------------------------------------------------


def judge(found: Any) -> Any:
    if isinstance(found, ConnectionError):
        return CooldownResource(50, "proxy does not answer")
    if isinstance(found, PermissionError):
        return DisableResource
    return RetryOperation("busy") if found == 503 else None


@virtual
async def test_r77_classify_is_asked_of_exceptions_and_of_results() -> None:
    keys = shared("a", "b", "c", "d", classify=judge, strategy="primary_backup", max_attempts=4)
    script = Script(ConnectionError(), PermissionError(), 200)
    async with TaskPool(resources=keys) as pool:
        assert await (await pool.submit(script.run)) == 200
        assert script.keys == ["a", "b", "c"]
        assert keys.snapshot()["a"]["cooldown_seconds_remaining"] == 50
        assert (status(keys, "b"), status(keys, "c")) == ("disabled", "healthy")
        script = Script(503, 503, 200)
        assert await (await pool.submit(script.run)) == 200
        assert len(script.keys) == 3
        with pytest.raises(LookupError):
            await (await pool.submit(Script(LookupError()).run))


@virtual
async def test_r77_what_classify_calls_a_signal_spends_an_attempt() -> None:
    keys = shared("a", classify=judge)
    async with TaskPool(resources=keys) as pool:
        with pytest.raises(PoolExhausted) as caught:
            await (await pool.submit(Script(503).run, max_attempts=2, retries=9))
    assert [type(one.signal) for one in caught.value.attempts] == [RetryOperation, RetryOperation]


def answered(status: int, **headers: str) -> httpx.HTTPStatusError:
    """What `raise_for_status` raises after such an answer."""
    request = httpx.Request("POST", "https://api.example.org/v1")
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return httpx.HTTPStatusError("no", request=request, response=httpx.Response(status, headers=named, request=request))


@virtual
async def test_r77_r80_errors_of_http_clients_that_tasks_raise_are_signals_by_default() -> None:
    keys = shared("a", "b", "c", "d", strategy="primary_backup")
    script = Script(answered(401), answered(429, retry_after="50"), answered(503), 200)
    async with TaskPool(resources=keys) as pool:
        assert await (await pool.submit(script.run)) == 200
        assert script.keys == ["a", "b", "c", "d"]
        assert [status(keys, key) for key in "abcd"] == ["disabled", "cooling_down", "healthy", "healthy"]
        assert keys.snapshot()["b"]["cooldown_seconds_remaining"] == 50
        with pytest.raises(httpx.HTTPStatusError):
            await (await pool.submit(Script(answered(404)).run))
        assert status(keys, "c") == "healthy"


@virtual
async def test_r77_r80_a_response_that_a_task_returns_is_its_result() -> None:
    keys, response = shared("a"), httpx.Response(503)
    async with TaskPool(resources=keys) as pool:
        assert await pool.run(Script(response).run) is response


@pytest.mark.parametrize("error", [TimeoutError, ConnectionResetError])
@virtual
async def test_r77_r80_a_timeout_of_the_tasks_own_does_not_run_it_twice(error: type[Exception]) -> None:
    script = Script(error())
    async with TaskPool(resources=shared("a", "b")) as pool:
        with pytest.raises(error):
            await (await pool.submit(script.run))
    assert len(script.keys) == 1


@virtual
async def test_r77_classify_none_takes_no_error_for_a_signal(caplog: pytest.LogCaptureFixture) -> None:
    keys = shared("a", "b", classify=None)
    script = Script(answered(401))
    async with TaskPool(resources=keys) as pool:
        with pytest.raises(httpx.HTTPStatusError):
            await (await pool.submit(script.run))
    with pytest.raises(httpx.HTTPStatusError):
        await keys.run(Script(answered(401)).run)
    assert (script.keys, status(keys, "a"), status(keys, "b")) == (["a"], "healthy", "healthy")
    assert not caplog.records, "who says None needs no hint"


@virtual
async def test_r77_r80_retries_count_for_errors_of_the_service_too() -> None:
    script = Script(answered(500))
    async with TaskPool(resources=shared("a", "b")) as pool:
        with pytest.raises(PoolExhausted) as caught:
            await (await pool.submit(script.run))
        assert len(script.keys) == 3, "the max_attempts of the pool"
        assert isinstance(caught.value.__cause__, RetryOperation)
        assert isinstance(caught.value.__cause__.__cause__, httpx.HTTPStatusError)
        with pytest.raises(PoolExhausted):
            await (await pool.submit(script.run, retries=4))
    assert len(script.keys) == 3 + 5


# -- siblings ------------------------------------------------------------------------------


def pair(**options: Any) -> ResourcePool[str]:
    """Everyone takes a, until it is out."""
    return shared("a", "b", strategy="primary_backup", **options)


@pytest.mark.parametrize("signal", [functools.partial(CooldownResource, 10_000), dead], ids=["cooldown", "disable"])
@virtual
async def test_r60_younger_uses_of_a_failing_key_go_elsewhere_and_pay_nothing(signal: Callable[[], Exception]) -> None:
    keys, gate, elder, younger = pair(max_attempts=2), Gate(), Victim(50), Victim(50)
    async with TaskPool(max_concurrent=5, resources=keys) as pool:
        with watched(keys, pool):
            first = await pool.submit(elder.run)
            failing = await pool.submit(gate)
            last = await pool.submit(younger.run, max_attempts=1)
            await asyncio.sleep(1)
            gate.finish(0, signal())
            await settle()
            gate.finish(1)
            assert await failing == "done"
            assert await first == "to its end on a", "it is older, and may have had its effect"
            assert await last == "to its end on b"
        assert (elder.interrupted, younger.interrupted) == ([], ["a"])
        assert (last.snapshot().attempt, failing.snapshot().attempt) == (1, 2)
        assert counts(pool) == {"completed": 3}
    assert keys.stats().sibling_cancels == 1
    assert free(keys)


@virtual
async def test_t41_a_task_that_is_interrupted_again_and_again_is_not_exhausted() -> None:
    """One key after the other fails under an older use from outside, and each time the task is thrown out with it."""
    keys = ResourcePool([Resource("k0", "secret", 2)])
    gate, victim = Gate(), Victim(50)
    async with TaskPool(resources=keys) as pool:
        outside = [asyncio.create_task(keys.run(gate, max_attempts=1))]
        await settle()
        handle = await pool.submit(victim.run, max_attempts=1)
        for number in range(6):
            await settle()
            assert victim.began[-1] == f"k{number}"
            outside.append(asyncio.create_task(keys.run(gate, max_attempts=1, wait_for_capacity=True)))
            await settle()  # it stands in line, and so comes before the task when that is back there
            gate.finish(number, CooldownResource(1e6))
            await settle()
            assert handle.status == "queued"
            assert victim.interrupted[-1] == f"k{number}"
            await keys.add(f"k{number + 1}", "secret", max_in_flight=2)
        await settle()
        gate.finish(6)
        assert await handle == "to its end on k6"
        assert handle.snapshot().attempt == 1
        await asyncio.wait(outside)
    assert [type(one.exception()) for one in outside] == [PoolExhausted] * 6 + [type(None)]
    assert free(keys)


@pytest.mark.parametrize("uncancel", [False, True])
@virtual
async def test_r63_one_that_swallows_it_and_returns_has_its_result(uncancel: bool) -> None:
    keys, gate = pair(), Gate()

    async def stubborn(key: Key) -> str:
        try:
            await asyncio.sleep(100)
        except asyncio.CancelledError:
            if uncancel:
                current = asyncio.current_task()
                assert current is not None
                current.uncancel()
            await asyncio.sleep(2)
        return f"{key.resource_id}, all the same"

    async with TaskPool(max_concurrent=2, resources=keys) as pool:
        failing, handle = await pool.submit(gate), await pool.submit(stubborn)
        await asyncio.sleep(1)
        gate.finish(0, limited())
        assert await handle == "a, all the same"
        assert clock.now() == 3
        assert handle.snapshot().attempt == 1
        gate.finish(1)
        await failing
    assert free(keys)


@pytest.mark.parametrize("how", ["cancel", "timeout"])
@virtual
async def test_r63_after_a_swallowed_one_it_can_still_be_stopped(how: str) -> None:
    keys, gate = pair(), Gate()

    async def stubborn(key: Key) -> None:
        try:
            await asyncio.sleep(100)
        except asyncio.CancelledError:
            await asyncio.sleep(100)

    async with TaskPool(max_concurrent=2, resources=keys) as pool:
        failing = await pool.submit(gate)
        handle = await pool.submit(stubborn, **({"timeout": 5} if how == "timeout" else {}))
        await asyncio.sleep(1)
        gate.finish(0, limited())
        await asyncio.sleep(3)
        if how == "cancel":
            await asyncio.sleep(1)
            handle.cancel()
        error = await outcome_of(handle)
        assert isinstance(error, TaskCancelled if how == "cancel" else TimeoutError)
        assert clock.now() == 5
        assert handle.snapshot().attempt == 1
        gate.finish(1)
        await failing
    assert free(keys)


@virtual
async def test_r63_cancel_siblings_false_lets_them_run() -> None:
    keys, gate, victim = pair(cancel_siblings=False), Gate(), Victim(50)
    async with TaskPool(max_concurrent=2, resources=keys) as pool:
        failing, handle = await pool.submit(gate), await pool.submit(victim.run)
        await asyncio.sleep(1)
        gate.finish(0, limited())
        await settle()
        gate.finish(1)
        assert await handle == "to its end on a"
        await failing
    assert victim.interrupted == []


@virtual
async def test_r64_a_plain_function_in_a_thread_is_never_interrupted() -> None:
    keys, gate = pair(), Gate()

    def body(key: Key) -> str:
        clock.sleep(10)
        return key.resource_id

    async with TaskPool(max_concurrent=2, resources=keys) as pool:
        failing, handle = await pool.submit(gate), await pool.submit(body)
        await asyncio.sleep(1)
        gate.finish(0, dead())
        await settle()
        gate.finish(1)
        assert await failing == "done"
        assert await handle == "a"
        assert clock.now() == 10
        assert handle.snapshot().attempt == 1
    assert status(keys, "a") == "disabled", "a late success does not revive it"
    assert free(keys)


@pytest.mark.parametrize("first", ["sibling", "cancel"])
@virtual
async def test_r62_a_cancel_in_the_same_turn_as_a_siblings_wins(first: str) -> None:
    keys, gate, victim = pair(), Gate(), Victim()
    async with TaskPool(max_concurrent=2, resources=keys) as pool:
        failing, handle = await pool.submit(gate), await pool.submit(victim.run)
        await asyncio.sleep(1)
        if first == "sibling":
            gate.finish(0, limited())
            await asyncio.sleep(0)
            handle.cancel()
        else:
            handle.cancel()
            gate.finish(0, limited())
        with pytest.raises(TaskCancelled):
            await handle
        await settle()
        gate.finish(1)
        await failing
        assert victim.began == ["a"]
        assert counts(pool) == {"completed": 1, "cancelled": 1}
    assert free(keys)


@pytest.mark.parametrize("turns", range(6))
@virtual
async def test_r62_a_cancel_around_the_moment_of_a_siblings(turns: int) -> None:
    """Asked to stop, stopped, queued again, started again: whenever the cancel comes, it is the end."""
    keys, gate, victim = pair(), Gate(), Victim()
    async with TaskPool(max_concurrent=2, resources=keys) as pool:
        failing, handle = await pool.submit(gate), await pool.submit(victim.run)
        await asyncio.sleep(1)
        gate.finish(0, limited())
        for _ in range(turns):
            await asyncio.sleep(0)
        assert handle.cancel() is True
        with pytest.raises(TaskCancelled):
            await handle
        assert clock.now() == 1
        await settle()
        gate.finish(1)
        await failing
    assert free(keys)


@virtual
async def test_r60_an_outside_use_that_fails_interrupts_younger_tasks() -> None:
    keys, gate, victim = pair(), Gate(), Victim(50)
    async with TaskPool(resources=keys) as pool:
        outside = asyncio.create_task(keys.run(gate, retry_delay=0))
        await settle()
        handle = await pool.submit(victim.run, max_attempts=1)
        await asyncio.sleep(1)
        gate.finish(0, limited())
        await settle()
        gate.finish(1)
        assert await outside == "done"
        assert await handle == "to its end on b"
        assert handle.snapshot().attempt == 1
    assert free(keys)


@virtual
async def test_r60_a_task_that_fails_interrupts_younger_outside_uses() -> None:
    keys, gate, victim = pair(), Gate(), Victim(50)
    async with TaskPool(resources=keys) as pool:
        failing = await pool.submit(gate)
        await settle()
        outside = asyncio.create_task(keys.run(victim.run, retry_delay=0))
        await asyncio.sleep(1)
        gate.finish(0, limited())
        await settle()
        gate.finish(1)
        assert await failing == "done"
        assert await outside == "to its end on b"
        assert victim.interrupted == ["a"]
    assert free(keys)


@virtual
async def test_r08_siblings_are_interrupted_across_pools_of_tasks() -> None:
    keys, gate, victim = pair(), Gate(), Victim(50)
    async with TaskPool(resources=keys) as one, TaskPool(resources=keys) as other:
        failing = await one.submit(gate)
        await settle()
        handle = await other.submit(victim.run, max_attempts=1)
        await asyncio.sleep(1)
        gate.finish(0, limited())
        await settle()
        gate.finish(1)
        assert await handle == "to its end on b"
        await failing
    assert free(keys)


@virtual
async def test_t41_a_sibling_goes_back_as_first_of_its_partition() -> None:
    keys = ResourcePool([Resource("a", "s", 2)])
    gate, turns = Gate(), Turns()

    async def victim(key: Key, name: str) -> None:
        turns.order.append(name)
        await asyncio.sleep(5)

    async with TaskPool(max_concurrent=2, queue="fifo", resources=keys) as pool:
        failing = await pool.submit(gate)
        await settle()
        for name in ("v1", "v2", "v3"):
            await pool.submit(victim, name)
        await asyncio.sleep(1)
        gate.finish(0, limited())
        await asyncio.sleep(40)
        gate.finish(1)
        await failing
        await pool.drain()
    assert turns.order[:2] == ["v1", "v1"], "it had its turn, and lost it by no fault of its own"
    assert sorted(turns.order) == ["v1", "v1", "v2", "v3"]
    assert free(keys)


@virtual
async def test_t10_a_ttl_is_over_when_it_has_started_also_for_a_sibling() -> None:
    keys = ResourcePool([Resource("a", "s")])
    gate, victim = Gate(), Victim(5)
    async with TaskPool(max_concurrent=2, resources=keys) as pool:
        failing = await pool.submit(gate)
        await settle()
        handle = await pool.submit(victim.run, ttl=10)
        await asyncio.sleep(1)
        gate.finish(0, limited())
        await settle()
        failing.cancel()
        assert await handle == "to its end on a"
        assert clock.now() == 36, "its ttl asked for a start within 10 s, and it had one at 0"
    assert free(keys)


@virtual
async def test_r35_one_outage_is_one_escalation() -> None:
    """Five tasks meet the same 429: the key rests once, and its count climbs by one."""
    keys, gate = shared("a", cancel_siblings=False, cooldown_table=(10.0, 500.0), max_attempts=9), Gate()
    async with TaskPool(max_concurrent=5, resources=keys) as pool:
        handles = [await pool.submit(gate) for _ in range(5)]
        await settle()
        for number in range(5):
            gate.finish(number, CooldownResource())
        await settle()
        assert keys.snapshot()["a"]["consecutive_cooldown"] == 1
        await asyncio.sleep(10)
        await settle()
        for number in range(5, 10):
            gate.finish(number)
        assert [await handle for handle in handles] == ["done"] * 5
    assert free(keys)


@virtual
async def test_r37_a_late_verdict_belongs_to_the_key_that_gave_it() -> None:
    keys, gate = shared("a"), Gate()
    async with TaskPool(resources=keys) as pool:
        handle = await pool.submit(gate)
        await settle()
        await keys.remove("a")
        await keys.add("a", "another secret")
        gate.finish(0, dead())
        await settle()
        assert status(keys, "a") == "healthy"
        gate.finish(1)
        assert await handle == "done"
    assert free(keys)


@virtual
async def test_r74_one_task_at_a_time_tries_a_rested_key() -> None:
    keys = shared("a", probe_on_recovery=True)
    gate = Gate()
    async with TaskPool(max_concurrent=5, resources=keys) as pool:
        cooled = await pool.submit(gate)
        await settle()
        gate.finish(0, limited())
        await settle()
        others = [await pool.submit(use) for _ in range(4)]
        await asyncio.sleep(30)
        await settle()
        assert len(gate.uses) == 2
        assert in_flight(keys) == 1, "one tries, four wait"
        assert {one.status for one in others} == {"queued"}
        gate.finish(1)
        await cooled
        assert [await one for one in others] == ["done"] * 4
    assert free(keys)


@pytest.mark.parametrize("how", ["cancel", "timeout"])
@virtual
async def test_r30_a_probe_that_is_stopped_is_offered_again(how: str) -> None:
    keys = shared("a", probe_on_recovery=True)
    async with TaskPool(max_concurrent=5, resources=keys) as pool:
        cooled = await pool.submit(Script(limited(), "ok").run)
        await settle()
        cooled.cancel()
        probe = await pool.submit(hold, 100, **({"timeout": 5} if how == "timeout" else {}))
        behind = await pool.submit(which)
        await asyncio.sleep(35)
        if how == "cancel":
            assert (probe.status, behind.status) == ("running", "queued")
            probe.cancel()
        assert await behind == "a"
        assert clock.now() == 35
        assert (await pool_wait(probe)).status == ("cancelled" if how == "cancel" else "failed")
    assert free(keys)


# -- durable -------------------------------------------------------------------------------


@pytest.fixture
def journals(tmp_path: Path) -> Iterator[Path]:
    """A folder for journals; pools that a test left open are let go of."""
    before = pool_list()
    yield tmp_path / "journals"
    for pool in pool_list():
        if pool not in before:
            pool._let_go()


def durable(store: Any, keys: ResourcePool[str], **options: Any) -> TaskPool:
    store = JsonLinesStore(store) if isinstance(store, Path) else store
    return TaskPool("durable", scope="pipeline", pipeline_id="p", store=store, resources=keys, **options)


def test_t60_a_durable_line_writes_what_became_of_a_task_and_no_secret(journals: Path) -> None:
    keys = shared("a", "b", "c")
    script = Script(again(), dead(), {"found": 1})

    async def main() -> dict[str, Any]:
        async with durable(journals, keys) as pool:
            handle = await pool.submit(script.run, 7, key="acme", idempotency_key="seven")
            assert await handle == {"found": 1}
            return dict(handle.snapshot())

    before = asyncio.run(main())
    assert before["attempt"] == 3
    assert free(keys)
    assert "secret-" not in "".join(file.read_text() for file in journals.iterdir())
    pool = durable(journals, keys)
    (after,) = pool.snapshot().tasks
    for field in ("id", "status", "key", "result", "attempt", "submitted_at", "finished_at"):
        assert after[field] == before[field], field


def test_t60_a_completed_key_gives_its_stored_result_and_takes_no_key(journals: Path) -> None:
    keys = exclusive("a")
    calls: list[int] = []

    async def body(key: Key, number: int) -> int:
        calls.append(number)
        return 6 * number

    async def once() -> Any:
        async with durable(journals, keys) as pool:
            return await (await pool.submit(body, 7, idempotency_key="k"))

    assert asyncio.run(once()) == 42
    used = keys.stats().attempts
    assert asyncio.run(once()) == 42
    assert calls == [7]
    assert keys.stats().attempts == used == 1


def test_t60_an_exhausted_task_reads_as_failed_after_a_restart(journals: Path) -> None:
    keys = shared("a", "b")

    async def main() -> None:
        async with durable(journals, keys) as pool:
            assert isinstance(await outcome_of(await pool.submit(Script(again()).run, max_attempts=2)), PoolExhausted)

    asyncio.run(main())
    pool = durable(journals, keys)
    (task,) = pool.snapshot().tasks
    assert (task.status, task.attempt) == ("failed", 2)
    assert isinstance(task.error, TaskFailed)
    assert "PoolExhausted" in str(task.error)


def test_t60_what_waited_for_a_key_is_stale_after_a_restart_and_runs_afresh(journals: Path) -> None:
    async def first() -> None:
        pool = durable(journals, cooling(1e6, "a"), max_concurrent=4)
        for number in range(3):
            await pool.submit(which, number, idempotency_key=f"n{number}")
        assert counts(pool) == {"queued": 3}
        pool._let_go()

    async def second() -> None:
        keys = exclusive("c")
        async with durable(journals, keys) as pool:
            assert counts(pool) == {"stale": 3}
            assert await (await pool.submit(which, 1, idempotency_key="n1")) == "c"
        assert free(keys)

    asyncio.run(first())
    asyncio.run(second())


class Full(Files):
    """A disk with no room, as long as it is told so."""

    full = False

    def write(self, file: int, data: memoryview) -> int:
        if self.full:
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write(file, data)


def test_t11_a_failed_write_gives_slot_and_key_back(journals: Path) -> None:
    keys = exclusive("a")
    calls: list[str] = []

    async def body(key: Key) -> str:
        calls.append(key.resource_id)
        return key.resource_id

    async def main() -> None:
        disk = Full()
        async with durable(JsonLinesStore(journals, files=disk), keys) as pool:
            disk.full = True
            with pytest.raises(StoreWriteFailed):
                await pool.submit(body)
            assert in_flight(keys) == 0
            assert pool.size() == 0
            disk.full = False
            assert await (await pool.submit(body)) == "a"

    asyncio.run(main())
    assert calls == ["a"], "what was not written did not run"
    assert free(keys)


@virtual
async def test_t11_a_durable_submit_reserves_its_key_with_its_slot() -> None:
    """Two submits in one turn, one key: the second queues, however long the disk takes for the first."""
    keys = exclusive("a")
    async with durable(MemoryStore(), keys, max_concurrent=5) as pool:
        with watched(keys, pool) as watch:
            handles = await asyncio.gather(*[pool.submit(hold, 1, number) for number in range(5)])
            assert counts(pool)["active"] == 1
            assert [await handle for handle in handles] == list(range(5))
            assert clock.now() == 5
        assert watch.given == {"a": 5}
    assert free(keys)


@virtual
async def test_t11_a_durable_submit_that_is_cancelled_while_it_is_written_gives_its_key_back() -> None:
    keys = exclusive("a")
    async with durable(MemoryStore(), keys) as pool:
        submitter = asyncio.create_task(pool.submit(hold, 1))
        await asyncio.sleep(0)
        submitter.cancel()
        await asyncio.wait([submitter])
        await pool.drain()
        assert in_flight(keys) == 0
        assert await (await pool.submit(which)) == "a"
    assert free(keys)


@virtual
async def test_t41_a_durable_line_waits_fails_over_and_expires_like_any_other() -> None:
    keys = exclusive("a", "b")
    async with durable(MemoryStore(), keys, max_concurrent=3) as pool:
        with watched(keys, pool) as watch:
            handles = [
                await pool.submit(Script(CooldownResource(10), "ok", seconds=1).run),
                await pool.submit(Script(dead(), "ok", seconds=1).run),
                await pool.submit(use, ttl=5),
                await pool.submit(Script(CooldownResource(10)).run, max_attempts=1),
                await pool.submit(use, tags=["nowhere"]),
                await pool.submit(use),
            ]
            handles[5].cancel()
            await pool.drain()
        watch.check_ends(handles)
        assert [handle.status for handle in handles] == [
            "completed",
            "completed",
            "expired",
            "failed",
            "failed",
            "cancelled",
        ]
    assert free(keys)


@pytest.mark.parametrize("held", [0.02, 0.06, 0.3, 0.8])
def test_l09_a_task_that_begins_late_because_the_loop_was_held_counts_from_then(held: float) -> None:
    """Its quota is taken when it is submitted, and it begins when the code that submitted it next awaits something."""

    async def main() -> None:
        keys = ResourcePool({"key": "value"}, quota=Quota(requests=10, per=1.0))
        loop, begins = asyncio.get_running_loop(), list[float]()
        assert isinstance(loop, VirtualLoop)

        async def call(_: object) -> None:
            begins.append(clock.now())

        async with TaskPool("late", max_concurrent=5, resources=keys) as pool:
            for number in range(25):
                _ = await pool.submit(call)
                if not number:
                    loop.sleep(held)
            await pool.drain()
        assert all(later - earlier >= 1.0 for earlier, later in zip(begins, begins[10:], strict=False))

    run(main)
