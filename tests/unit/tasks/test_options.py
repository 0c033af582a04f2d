"""T10 to T13: what a submit takes, and when the task starts."""

from __future__ import annotations

import asyncio
import functools
from typing import Any

import pytest

from headgate import (
    InvalidArgument,
    InvalidType,
    QueueFull,
    ResourcePool,
    SubmitTimeout,
    TaskExpired,
    TaskPool,
    backpressure_queue,
    fair_round_robin,
    fair_share,
    fifo,
    pool_wait,
)
from headgate.testing import settle, virtual
from tests.support.tasks.support import EVERY_STRATEGY, Flaky, Turns, counts, order_behind_a_gate, quick, slow


def now() -> float:
    return asyncio.get_running_loop().time()


# -- T10: arguments and options ----------------------------------------------------------


@virtual
async def test_t10_positional_arguments_go_to_the_function() -> None:
    async def body(*args: Any) -> Any:
        return args

    async with TaskPool() as pool:
        assert await (await pool.submit(body, 1, "two", None)) == (1, "two", None)
        assert await pool.submit_nowait(body) == ()


@virtual
async def test_t10_a_partial_carries_keyword_arguments() -> None:
    async def body(a: int, *, priority: str, timeout: str) -> Any:
        return a, priority, timeout

    def plain(a: int, *, key: str) -> Any:
        return a, key

    async with TaskPool() as pool:
        handle = await pool.submit(functools.partial(body, priority="mine", timeout="too"), 3, priority=9)
        assert await handle == (3, "mine", "too")
        assert handle.snapshot().priority == 9
        assert await (await pool.submit(functools.partial(plain, 3, key="k"))) == (3, "k")
        nested = functools.partial(functools.partial(body, priority="in"), 4, timeout="out")
        assert await (await pool.submit(nested)) == (4, "in", "out")


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [
        ("prioritty", "priority"),
        ("prio", "priority"),
        ("idempotency", "idempotency_key"),
        ("timeouts", "timeout"),
        ("retry", "retries"),
        ("dead_line", "deadline"),
        ("label", "labels"),
        ("wait_time_out", "wait_timeout"),
        ("tenantid", "tenant_id"),
    ],
)
@virtual
async def test_t10_an_unknown_option_is_refused_with_the_nearest(wrong: str, meant: str) -> None:
    async with TaskPool(queue=fair_round_robin("tenant_id")) as pool:
        with pytest.raises(InvalidArgument, match=f"(?i)did you mean {meant}") as caught:
            await pool.submit(quick, **{wrong: 1})
        assert wrong in str(caught.value)
        with pytest.raises(InvalidArgument, match=meant):
            pool.submit_nowait(quick, **{wrong: 1})
        assert pool.snapshot().total == 0


@virtual
async def test_t10_an_option_like_none_of_them_is_refused_too() -> None:
    async with TaskPool() as pool:
        with pytest.raises(InvalidArgument, match="zzz"):
            await pool.submit(quick, zzz=1)


@virtual
async def test_t10_a_fairness_key_is_an_option_only_where_the_strategy_names_it() -> None:
    async with TaskPool(queue=fair_round_robin("tenant_id")) as pool:
        assert await (await pool.submit(quick, tenant_id="acme")) == "done"
    async with TaskPool(queue=fair_share("org_id")) as pool:
        assert await (await pool.submit(quick, org_id="acme")) == "done"
    async with TaskPool(queue=fifo()) as pool:
        with pytest.raises(InvalidArgument, match="tenant_id"):
            await pool.submit(quick, tenant_id="acme")


@pytest.mark.parametrize(
    ("option", "bad"),
    [
        *[("priority", bad) for bad in (1.5, "3", True, [], float("nan"))],
        *[("key", bad) for bad in ("", "  ", [], {})],
        *[("idempotency_key", bad) for bad in ("", "  ", 3, b"x")],
        *[("timeout", bad) for bad in (-1, 0, "soon", float("nan"), True)],
        *[("ttl", bad) for bad in (-1, 0, "soon", float("nan"))],
        *[("deadline", bad) for bad in ("soon", float("nan"), [])],
        *[("retries", bad) for bad in (-1, 1.5, "2", True)],
        *[("delay", bad) for bad in (-1, "soon", float("nan"), float("inf"))],
        *[("wait_timeout", bad) for bad in (-1, "soon", float("nan"))],
        *[("cost", bad) for bad in (-1, 0, "much", float("nan"), float("inf"))],
        *[("labels", bad) for bad in ("x", [1], 3, {1: 2})],
    ],
)
@virtual
async def test_t10_every_option_is_checked(option: str, bad: Any) -> None:
    async with TaskPool() as pool:
        with pytest.raises((InvalidArgument, InvalidType), match=option):
            await pool.submit(quick, **{option: bad})
        with pytest.raises((InvalidArgument, InvalidType), match=option):
            pool.submit_nowait(quick, **{option: bad})
        assert pool.snapshot().total == 0
        assert pool.size() == 0


@pytest.mark.parametrize("bad", ["sometimes", "", 0, -1, float("nan"), float("inf"), True, []])
@virtual
async def test_t10_a_window_is_checked(bad: Any) -> None:
    async with TaskPool() as pool:
        with pytest.raises((InvalidArgument, InvalidType), match="window"):
            await pool.submit(quick, idempotency_key="k", window=bad)
        assert await (await pool.submit(quick, idempotency_key="k")) == "done"


@virtual
async def test_t10_options_given_as_none_are_absent() -> None:
    async with TaskPool() as pool:
        options = dict.fromkeys(("key", "idempotency_key", "window", "timeout", "ttl", "deadline", "labels"))
        assert await (await pool.submit(quick, **options)) == "done"


@virtual
async def test_t10_labels_are_shown() -> None:
    async with TaskPool() as pool:
        labels = {"repo": "headgate", "n": 3}
        handle = await pool.submit(quick, labels=labels)
        labels["n"] = 4  # a later change of the caller's dict is not ours
        assert handle.snapshot().labels == {"repo": "headgate", "n": 3}


@virtual
async def test_t10_timeout_ends_a_running_task_as_failed() -> None:
    async with TaskPool() as pool:
        handle = await pool.submit(slow, 60, timeout=5)
        with pytest.raises(TimeoutError):
            await handle
        assert (handle.status, now()) == ("failed", 5)
        fine = await pool.submit(slow, 5, timeout=6)
        assert await fine == "done"


@virtual
async def test_t10_timeout_does_not_run_while_the_task_queues() -> None:
    async with TaskPool() as pool:
        await pool.submit(slow, 60)
        assert await (await pool.submit(slow, 4, timeout=5)) == "done"


@virtual
async def test_t10_ttl_ends_a_queued_task_as_expired() -> None:
    async with TaskPool() as pool:
        runner, turns = await pool.submit(slow, 60), Turns()
        handle = await pool.submit(turns.take, "never", ttl=5)
        alive = await pool.submit(turns.take, "runs", ttl=61)
        with pytest.raises(TaskExpired):
            await handle
        assert (handle.status, now()) == ("expired", 5)
        await runner
        assert await alive == "runs"
    assert turns.order == ["runs"]
    assert counts(pool) == {"completed": 2, "expired": 1}


@virtual
async def test_t10_ttl_says_nothing_about_a_running_task() -> None:
    async with TaskPool() as pool:
        assert await (await pool.submit(slow, 60, ttl=5)) == "done"


@virtual(start=100.0)
async def test_t10_a_deadline_is_absolute_for_queued_and_running() -> None:
    async with TaskPool() as pool:
        running = await pool.submit(slow, 60, deadline=110.0)
        queued = await pool.submit(slow, 60, deadline=105.0)
        with pytest.raises(TaskExpired):
            await queued
        assert now() == 105
        with pytest.raises(TimeoutError):
            await running
        assert now() == 110
        assert (queued.status, running.status) == ("expired", "failed")


@virtual(start=100.0)
async def test_t10_a_deadline_that_is_over_runs_nothing() -> None:
    async with TaskPool() as pool:
        turns = Turns()
        handle = await pool.submit(turns.take, "late", deadline=99.0)
        assert (await pool_wait(handle)).status in ("expired", "failed")
        assert turns.order == []


@virtual
async def test_t10_retries_run_it_again() -> None:
    async with TaskPool() as pool:
        flaky = Flaky(2)
        assert await (await pool.submit(flaky.run, retries=2)) == 3
        hopeless = Flaky(9)
        handle = await pool.submit(hopeless.run, retries=2)
        with pytest.raises(LookupError, match="failure 3"):
            await handle
        assert hopeless.calls == 3
        assert handle.status == "failed"


@virtual
async def test_t10_a_delayed_task_waits_although_a_slot_is_free() -> None:
    async with TaskPool() as pool:
        turns = Turns()
        handle = await pool.submit(turns.take, "delayed", delay=10)
        assert handle.status == "queued"
        assert pool.size() == 1
        await pool.submit(turns.take, "other")
        await handle
        assert now() == 10
        assert (await pool.submit(quick, delay=0)).status == "running"
    assert turns.order == ["other", "delayed"]


@virtual
async def test_t10_a_delayed_task_can_be_cancelled_and_can_expire() -> None:
    async with TaskPool() as pool:
        gone, late = await pool.submit(quick, delay=10), await pool.submit(quick, delay=10, ttl=5)
        assert gone.cancel() is True
        assert gone.status == "cancelled"
        await pool.drain()
        assert (late.status, now()) == ("expired", 5)


@virtual
async def test_t10_wait_timeout_bounds_the_wait_for_a_place() -> None:
    async with TaskPool(backpressure=backpressure_queue(1)) as pool:
        await pool.submit(slow, 60)
        await pool.submit(slow, 60)
        with pytest.raises(SubmitTimeout) as caught:
            await pool.submit(quick, wait_timeout=5)
        assert caught.value.code == "HEADGATE-POL-009"
        assert now() == 5
        assert pool.snapshot().total == 2
        assert await (await pool.submit(quick, wait_timeout=56)) == "done"


@virtual
async def test_t10_wait_timeout_is_no_timeout_of_the_task() -> None:
    async with TaskPool() as pool:
        assert await (await pool.submit(slow, 60, wait_timeout=5)) == "done"


@virtual
async def test_t10_submit_nowait_never_waits() -> None:
    async with TaskPool(backpressure=backpressure_queue(1)) as pool:
        running, queued = pool.submit_nowait(slow, 1), pool.submit_nowait(slow, 1)
        assert (running.status, queued.status) == ("running", "queued")
        with pytest.raises(QueueFull) as caught:
            pool.submit_nowait(quick, idempotency_key="k")
        assert caught.value.code == "HEADGATE-POL-001"
        assert pool.snapshot().total == 2
        await pool.drain()
        assert await pool.submit_nowait(slow, 0, "other payload", idempotency_key="k") == "other payload"


# -- T11: starting -----------------------------------------------------------------------


@pytest.mark.parametrize("queue", EVERY_STRATEGY)
@virtual
async def test_t11_the_handle_says_running_when_a_slot_was_free(queue: str) -> None:
    async with TaskPool(max_concurrent=2, queue=queue) as pool:
        handles = [await pool.submit(slow, 1) for _ in range(3)]
        assert [handle.status for handle in handles] == ["running", "running", "queued"]
        assert counts(pool) == {"active": 2, "queued": 1}


@virtual
async def test_t11_no_await_lies_between_deciding_and_starting() -> None:
    async with TaskPool(max_concurrent=2) as pool:
        others: list[str] = []
        asyncio.get_running_loop().call_soon(others.append, "the loop turned")
        for _ in range(4):
            await pool.submit(quick)
        assert others == []
        assert counts(pool) == {"active": 2, "queued": 2}


@virtual
async def test_t11_a_freed_slot_is_taken_in_the_same_turn() -> None:
    async with TaskPool() as pool:
        first, second = await pool.submit(quick), await pool.submit(slow, 1)
        seen: list[str] = []
        first.on_end(lambda _: asyncio.get_running_loop().call_soon(lambda: seen.append(second.status)))
        await first
        await settle()
        assert seen == ["running"]


# -- T12: priority -----------------------------------------------------------------------


@virtual
async def test_t12_higher_goes_first_and_ties_are_first_in_first_out() -> None:
    async with TaskPool() as pool:
        priorities = [0, 5, -3, 5, 0, 10**30, 5, -(10**30)]
        order = await order_behind_a_gate(pool, *[((p, n), {"priority": p}) for n, p in enumerate(priorities)])
    assert order == sorted(order, key=lambda one: (-one[0], one[1]))


@pytest.mark.parametrize("queue", EVERY_STRATEGY)
@virtual
async def test_t12_priority_is_recorded_under_every_strategy(queue: str) -> None:
    async with TaskPool(queue=queue) as pool:
        handle = await pool.submit(quick, priority=7)
        assert handle.snapshot().priority == 7
        assert pool.snapshot().tasks[0].priority == 7
        assert (await pool.submit(quick)).snapshot().priority == 0


# -- T13: where the fairness key comes from ----------------------------------------------


@virtual
async def test_t13_option_then_labels_then_key_then_one_shared_partition() -> None:
    async with TaskPool(queue=fair_round_robin("tenant_id")) as pool:
        order = await order_behind_a_gate(
            pool,
            ("a1", {"tenant_id": "a"}),
            ("a2", {"labels": {"tenant_id": "a"}}),
            ("a3", {"key": "a"}),
            ("a4", {"tenant_id": "a", "labels": {"tenant_id": "b"}, "key": "b"}),
            ("b1", {"labels": {"tenant_id": "b"}, "key": "a"}),
            ("n1", {}),
            ("n2", {"labels": {"other": "b"}}),
            ("b2", {"key": "b"}),
        )
    assert order == ["a1", "b1", "n1", "a2", "b2", "n2", "a3", "a4"]


@virtual
async def test_t13_the_handle_shows_the_key_that_was_given() -> None:
    async with TaskPool(queue=fair_round_robin("tenant_id")) as pool:
        assert (await pool.submit(quick, key="k", tenant_id="t")).key == "k"
        assert (await pool.submit(quick)).key is None


async def ask(question: int, model: str = "small") -> str:
    return f"{question} {model}"


async def many(question: int, model: str = "small") -> Any:
    yield f"{question} {model}"


@virtual
async def test_t10_a_keyword_of_the_function_is_told_from_an_option() -> None:
    async with TaskPool() as pool:
        calls = {
            "submit": lambda: pool.submit_nowait(ask, 1, model="m"),  # type: ignore[arg-type, call-overload]
            "map": lambda: pool.map(ask, [1], model="m"),
            "stream": lambda: pool.stream(many, 1, model="m"),
        }
        for name, call in calls.items():
            with pytest.raises(InvalidArgument) as caught:
                call()
            assert f"{name}() has no option 'model': it is a parameter of" in str(caught.value)
            assert f"{name}(functools.partial(" in str(caught.value)
            assert "model=...)" in str(caught.value)
            assert "delay" not in str(caught.value)
        with pytest.raises(InvalidArgument, match="parameter of ask"):
            await pool.submit(functools.partial(ask, 1), model="m")  # type: ignore[call-arg]
        with pytest.raises(InvalidArgument, match="Did you mean priority"):
            await pool.submit(ask, 1, prioritty=1)
        with pytest.raises(InvalidArgument, match="has no option 'modle'"):
            await pool.submit(ask, 1, modle="m")
        assert await (await pool.submit(functools.partial(ask, model="m"), 1)) == "1 m"


@pytest.mark.parametrize(
    "option",
    [
        "tenant_id",
        "key",
        "priority",
        "idempotency_key",
        "window",
        "timeout",
        "ttl",
        "deadline",
        "retries",
        "delay",
        "wait_timeout",
        "cost",
        "labels",
        "tags",
        "exclude",
        "affinity",
        "max_attempts",
    ],
)
@virtual
async def test_t17a_a_function_where_a_value_is_expected_is_refused(option: str) -> None:
    def tenant_of(item: Any) -> str:
        return "acme"

    keys = ResourcePool({"a": 1})
    async with TaskPool(queue=fair_round_robin("tenant_id"), resources=keys) as pool:
        more = {"idempotency_key": "k"} if option == "window" else {}
        for value in (tenant_of, lambda item: 3, functools.partial(tenant_of, 1), str):
            options: dict[str, Any] = {option: value, **more}
            calls: list[Any] = [lambda o=options: pool.submit_nowait(quick, **o)]
            if option not in ("idempotency_key", "window"):
                calls += [lambda o=options: pool.stream(many, **o)]
            if option not in ("tenant_id", "key", "priority", "idempotency_key", "cost", "tags", "affinity", "window"):
                calls += [lambda o=options: pool.map(quick, [1], **o)]
            for call in calls:
                with pytest.raises(InvalidType, match=f"{option} must be a plain value, got .*, which is to be called"):
                    call()
            with pytest.raises(InvalidType, match="plain value"):
                await pool.submit(quick, **options)
        with pytest.raises(InvalidType, match="tenant_id must be a plain value"):
            await pool.submit(quick, labels={"tenant_id": tenant_of})
        assert pool.snapshot().total == 0, "nothing of it was accepted"
