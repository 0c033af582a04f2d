"""T81 with real workers: tasks that are given a key here and run there, and what comes back."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import headgate
from headgate import (
    CooldownResource,
    DisableResource,
    HeadgateError,
    InvalidArgument,
    InvalidType,
    PoolExhausted,
    Resource,
    ResourcePool,
    RetryOperation,
    TaskPool,
    WorkerLost,
    WorkerPool,
    fair_round_robin,
    pool_wait,
)
from headgate.testing import capture_events, no_leaks
from tests.conftest import SCALE
from tests.integration.combined import combined_jobs
from tests.support.combined.combined_support import Apart, Line, noted, tell
from tests.support.resources.support import in_flight, keys, status
from tests.support.workers.support import all_ready, lines, pids, run, script, states, until
from tests.support.workers.support import in_flight as calls_in_flight

pytestmark = pytest.mark.integration

ON_A_LINE = pytest.mark.parametrize("line", ["resources", "workers", "both"], indirect=True)
PLACED = pytest.mark.parametrize("line", ["workers", "both"], indirect=True)


def two_keys(**options: Any) -> ResourcePool[str]:
    """ "a" is always the first choice."""
    return keys("a", "b", strategy="primary_backup", **options)


def marked_key() -> ResourcePool[str]:
    """One key whose counter tells what its pool learned: 0 after a success, 2 as long as nothing was said."""
    return ResourcePool([Resource("a", "secret-a", consecutive_cooldown=2)])


def rungs(pool: ResourcePool[Any], resource_id: str = "a") -> int:
    return pool.snapshot()[resource_id]["consecutive_cooldown"]


async def idle(workers: WorkerPool) -> None:
    await until(lambda: calls_in_flight(workers) == 0)


# -- making ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", [3, "spawn", WorkerPool, ResourcePool])
def test_t81_workers_of_a_wrong_type_are_named(wrong: Any) -> None:
    with pytest.raises(InvalidType, match="workers"):
        TaskPool(workers=wrong)


def test_t81_workers_and_a_runner_exclude_each_other() -> None:
    before = headgate.pool_list()  # other tests may have left some to the garbage collector
    with pytest.raises(InvalidArgument, match="runner"):
        TaskPool(workers=WorkerPool(spawn=1), runner=object())  # type: ignore[arg-type]
    assert not [pool for pool in headgate.pool_list() if pool not in before]


def test_t81_pool_create_makes_the_same(shared: Apart) -> None:
    async def main() -> None:
        async with headgate.pool_create(name="made", resources=keys("a"), workers=shared.pool) as pool:
            found = await (await pool.submit(combined_jobs.show))
        assert (found["key"], found["pid"] in pids(shared.pool)) == ("a", True)

    shared(main)


# -- every combination, every kind of function -------------------------------------------------------------------------

bonus = 10


def by_value() -> Callable[..., Any]:
    extra = 7

    async def closure(*args: Any) -> combined_jobs.Seen:
        return combined_jobs.seen(args, extra=extra + bonus)

    return closure


KINDS: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "async": (lambda: combined_jobs.show, {}),
    "plain": (lambda: combined_jobs.show_plainly, {}),
    "partial": (lambda: functools.partial(combined_jobs.show, x=1, y=[2]), {"x": 1, "y": [2]}),
    "partial of a plain one": (lambda: functools.partial(combined_jobs.show_plainly, x=1), {"x": 1}),
    "partial of a partial": (
        lambda: functools.partial(functools.partial(combined_jobs.show, x=1), y=2),
        {"x": 1, "y": 2},
    ),
    "method": (lambda: combined_jobs.Client("here").ask, {"base": "here"}),
    "plain method": (lambda: combined_jobs.Client("here").ask_plainly, {"base": "here"}),
    "partial of a method": (lambda: functools.partial(combined_jobs.Client("h").ask, x=1), {"base": "h", "x": 1}),
    "classmethod": (lambda: combined_jobs.Client.of_the_class, {"cls": "Client"}),
    "callable object": (lambda: combined_jobs.Client("here"), {"base": "here"}),
    "lambda": (lambda: lambda *args: combined_jobs.seen(args), {}),
    "lambda that gives a coroutine": (lambda: lambda *args: combined_jobs.show(*args), {}),
    "closure": (by_value, {"extra": 17}),
    "routine": (lambda: combined_jobs.show_by_routine, {}),
    "plain routine": (lambda: combined_jobs.show_by_plain_routine, {}),
    "partial of a routine": (lambda: functools.partial(combined_jobs.show_by_routine, x=1), {"x": 1}),
    "routine method": (lambda: combined_jobs.Client("here").ask_by_routine, {"base": "here"}),
}


@ON_A_LINE
@pytest.mark.parametrize("kind", KINDS)
def test_t81_every_kind_of_function_in_every_combination(line: Line, shared: Apart, kind: str) -> None:
    make, more = KINDS[kind]

    async def main() -> None:
        chosen = keys("a")
        async with line.pool(chosen, max_concurrent=2) as pool:
            found = await (await pool.submit(make(), 1, "two"))
            assert (found["key"], found["value"]) == (("a", "secret-a") if line.leases else ("", None))
            assert found["args"] == (1, "two")
            assert found["more"] == more
            if line.places:
                assert found["pid"] in pids(shared.pool)
            elif "routine" not in kind:
                assert found["pid"] == os.getpid()
        assert in_flight(chosen) == 0
        assert chosen.stats().successes == int(line.leases)

    shared(main)


@PLACED
def test_t81_a_plain_function_runs_in_a_thread_there_and_blocks_no_other(line: Line, shared: Apart, log: str) -> None:
    """Both workers have one that waits in its thread, and still answer."""

    async def main() -> None:
        chosen = keys("a")
        blocks = _waits_in_a_thread if line.leases else _waits_in_a_thread_alone
        async with line.pool(chosen, max_concurrent=8) as pool:
            waiting = [await pool.submit(blocks, log) for _ in range(2)]
            await noted(log, "begun", 2)
            assert await (await pool.submit(combined_jobs.show, 1))
            assert [handle.status for handle in waiting] == ["running"] * 2
            tell(log)
            assert await asyncio.gather(*waiting) == ["done"] * 2

    shared(main)


def _waits_in_a_thread_alone(path: str) -> str:
    combined_jobs.note(path, "begun")
    while not os.path.exists(f"{path}.go"):
        threading.Event().wait(0.005)
    return "done"


def _waits_in_a_thread(key: Resource[str], path: str) -> str:
    return _waits_in_a_thread_alone(path)


@PLACED
def test_t81_a_routine_is_dispatched_once(line: Line, shared: Apart, log: str) -> None:
    async def main() -> None:
        with capture_events("workers.tasks") as events:
            async with line.pool(keys("a")) as pool:
                handle = await pool.submit(combined_jobs.my_task_by_routine, log)
                found = await handle
        assert lines(log) == [f"ran {line.key()}"]
        assert events.names == ["task_dispatched", "task_finished"]
        assert found["caller"] == handle.id, "a routine dispatched by a placed function would have that one's id"
        assert "my_task_by_routine" in found["tag"]

    shared(main)


def test_t81_a_routine_in_a_pool_of_resources_alone_goes_to_the_active_workers(shared: Apart, log: str) -> None:
    async def main() -> None:
        async with TaskPool(resources=keys("a")) as pool:
            with capture_events("workers.tasks") as events:
                await (await pool.submit(combined_jobs.my_task_by_routine, log))
        assert lines(log) == ["ran a"]
        assert events.names == ["task_dispatched", "task_finished"]

    shared(main)


@PLACED
def test_t81_tasks_are_spread_over_the_workers(line: Line, shared: Apart) -> None:
    async def main() -> None:
        async with line.pool(keys("a"), max_concurrent=4) as pool:
            found = [one["pid"] async for one in pool.map(combined_jobs.show, range(20))]
        assert set(found) == set(pids(shared.pool))

    shared(main)


@PLACED
def test_t81_the_workers_need_not_be_active_where_the_task_is_submitted(line: Line, shared: Apart) -> None:
    """The pool was told which workers: a context without any will do."""

    async def main() -> None:
        async def inside() -> Any:
            async with line.pool(keys("a")) as pool:
                return await (await pool.submit(combined_jobs.branches, 2))

        pid, _, leaves = await asyncio.create_task(inside(), context=contextvars.Context())
        assert {pid, *(leaf for leaf, _ in leaves)} <= set(pids(shared.pool))

    shared(main)


@PLACED
def test_t81_two_task_pools_share_workers_and_keys(line: Line, shared: Apart) -> None:
    async def main() -> None:
        chosen = ResourcePool([Resource("a", "secret-a", max_in_flight=2)])
        async with line.pool(chosen, max_concurrent=3) as one, line.pool(chosen, max_concurrent=3) as other:
            handles = [await pool.submit(combined_jobs.show, n) for n in range(20) for pool in (one, other)]
            assert [found["args"][0] for found in await asyncio.gather(*handles)] == [n // 2 for n in range(40)]
        assert in_flight(chosen) == 0

    shared(main)


def test_t81_what_the_worker_does_to_its_copy_of_the_resource_stays_there(shared: Apart) -> None:
    async def spoil(key: Resource[str]) -> str:
        text = repr(key)
        key.status, key.value = "disabled", "other"
        return text

    async def main() -> None:
        chosen = keys("a")
        async with TaskPool(resources=chosen, workers=shared.pool) as pool:
            assert "secret" not in await (await pool.submit(spoil))
            assert (await (await pool.submit(combined_jobs.show)))["value"] == "secret-a"
        assert status(chosen, "a") == "healthy"

    shared(main)


# -- signals -----------------------------------------------------------------------------------------------------------

SIGNALLERS = [combined_jobs.by_key, combined_jobs.by_key_plainly, combined_jobs.by_key_by_routine]
SIGNALLER = pytest.mark.parametrize("fn", SIGNALLERS, ids=["async", "plain", "routine"])


@SIGNALLER
@pytest.mark.parametrize("own", [False, True], ids=["ours", "subclass"])
def test_r31_a_cooldown_raised_on_a_worker_reaches_the_pool_with_its_fields(
    shared: Apart, fn: Any, own: bool, log: str
) -> None:
    outcome: Any = (
        (combined_jobs.QuotaGone, ("acme",), {"retry": 77.0}) if own else (CooldownResource, (77.0, "busy"), {})
    )
    reason = "quota of acme is gone" if own else "busy"

    async def main() -> None:
        chosen = two_keys()
        with capture_events("resources.health") as events:
            async with TaskPool(resources=chosen, workers=shared.pool) as pool:
                handle = await pool.submit(fn, {"a": outcome}, log)
                assert await handle == "b"
        assert lines(log) == ["a", "b"]
        assert handle.snapshot().attempt == 2
        [cooled] = events
        assert cooled.name == "resource_cooled"
        assert cooled.to_dict()["resource_id"] == "a"
        assert (cooled.to_dict()["seconds"], cooled.to_dict()["reason"]) == (77.0, reason)
        assert cooled.to_dict()["usage"]["request_id"] == handle.id
        seen = chosen.snapshot()["a"]
        assert (seen["status"], seen["consecutive_cooldown"], seen["in_flight"]) == ("cooling_down", 1, 0)
        assert (chosen.stats().cooldowns, chosen.stats().successes) == (1, 1)

    shared(main)


def test_r31_a_cooldown_without_seconds_takes_the_table_of_the_pool_here(shared: Apart) -> None:
    async def main() -> None:
        chosen = two_keys(cooldown_table=(500.0, 1000.0))
        with capture_events("resources.health") as events:
            async with TaskPool(resources=chosen, workers=shared.pool) as pool:
                assert await (await pool.submit(combined_jobs.by_key, {"a": (CooldownResource, (), {})})) == "b"
        assert [(event.to_dict()["seconds"], event.to_dict()["reason"]) for event in events] == [(500.0, None)]

    shared(main)


@SIGNALLER
@pytest.mark.parametrize("own", [False, True], ids=["ours", "subclass"])
def test_r32_a_disable_raised_on_a_worker_reaches_the_pool(shared: Apart, fn: Any, own: bool) -> None:
    outcome: Any = (combined_jobs.Revoked, (), {"by": "ops"}) if own else (DisableResource, ("revoked by ops",), {})

    async def main() -> None:
        chosen = two_keys()
        with capture_events("resources.health") as events:
            async with TaskPool(resources=chosen, workers=shared.pool) as pool:
                assert await (await pool.submit(fn, {"a": outcome})) == "b"
                assert await (await pool.submit(fn, {})) == "b"
        assert [(event.name, event.to_dict()["reason"]) for event in events] == [
            ("resource_disabled", "revoked by ops")
        ]
        assert (status(chosen, "a"), chosen.stats().disables) == ("disabled", 1)

    shared(main)


@SIGNALLER
@pytest.mark.parametrize("own", [False, True], ids=["ours", "subclass"])
def test_r36_a_retry_raised_on_a_worker_blames_nobody(shared: Apart, fn: Any, own: bool, log: str) -> None:
    outcome: Any = (combined_jobs.Hiccup, (502,), {}) if own else (RetryOperation, ("status 502",), {})

    async def main() -> None:
        chosen = two_keys()
        with capture_events() as events:
            async with TaskPool(resources=chosen, workers=shared.pool) as pool:
                handle = await pool.submit(fn, {"a": outcome}, log)
                assert await handle == "b"
        assert lines(log) == ["a", "b"], "it is tried elsewhere"
        assert (status(chosen, "a"), chosen.stats().cooldowns, chosen.stats().retries) == ("healthy", 0, 1)
        [requeued] = [event for event in events if event.name == "pool_requeue"]
        fields = requeued.to_dict()
        assert (fields["resource_id"], fields["spent"]) == ("a", True)

    shared(main)


def test_r34_signals_in_a_group_of_the_workers_count(shared: Apart) -> None:
    async def main() -> None:
        chosen = two_keys()
        async with TaskPool(resources=chosen, workers=shared.pool) as pool:
            outcomes: combined_jobs.Outcomes = {"a": (DisableResource, ("gone",), {})}
            assert await (await pool.submit(combined_jobs.in_a_group, outcomes)) == "b"
        assert status(chosen, "a") == "disabled"

    shared(main)


def test_t81_attempts_on_workers_are_spent_and_listed(shared: Apart) -> None:
    async def main() -> None:
        chosen = keys("a", "b", "c", strategy="primary_backup", max_attempts=1)
        outcomes: combined_jobs.Outcomes = {
            "a": (combined_jobs.QuotaGone, ("acme",), {"retry": 60}),
            "b": (combined_jobs.Revoked, (), {"by": "ops"}),
        }
        async with TaskPool(resources=chosen, workers=shared.pool) as pool:
            handle = await pool.submit(combined_jobs.by_key, outcomes)
            with pytest.raises(PoolExhausted, match="max_attempts=1") as caught:
                await handle
            assert await (await pool.submit(combined_jobs.by_key, outcomes, max_attempts=1)) == "c"
        error = caught.value
        assert error.reason == "attempts"
        assert [(one.resource_id, type(one.signal)) for one in error.attempts] == [
            ("a", combined_jobs.QuotaGone),
            ("b", combined_jobs.Revoked),
        ]
        first, cause = error.attempts[0].signal, error.__cause__
        assert isinstance(first, combined_jobs.QuotaGone)
        assert (first.account, first.cooldown_seconds) == ("acme", 60)
        assert isinstance(cause, combined_jobs.Revoked)
        assert cause.by == "ops"
        assert handle.status == "failed"

    shared(main)


def test_r77_classify_sees_what_workers_raise_and_return(shared: Apart) -> None:
    def classify(outcome: object) -> RetryOperation | DisableResource | None:
        if isinstance(outcome, LookupError):
            return DisableResource("not found")
        return RetryOperation("not from there") if outcome == "b" else None

    async def main() -> None:
        chosen = keys("a", "b", "c", strategy="primary_backup", classify=classify)
        async with TaskPool(resources=chosen, workers=shared.pool) as pool:
            outcomes: combined_jobs.Outcomes = {"a": (LookupError, ("nothing",), {})}
            assert await (await pool.submit(combined_jobs.by_key, outcomes)) == "c"
        assert (status(chosen, "a"), status(chosen, "b")) == ("disabled", "healthy")
        assert chosen.stats().retries == 1

    shared(main)


def test_r30_another_exception_of_a_worker_is_the_tasks_and_the_key_is_healthy(shared: Apart) -> None:
    async def main() -> None:
        chosen = marked_key()
        async with TaskPool(resources=chosen, workers=shared.pool) as pool:
            handle = await pool.submit(combined_jobs.fails)
            with pytest.raises(LookupError, match="not found") as caught:
                await handle
        assert "combined_jobs.py" in caught.value.__notes__[-1], "the traceback of the worker"
        assert (rungs(chosen), in_flight(chosen), status(chosen, "a")) == (0, 0, "healthy")
        assert handle.snapshot().attempt == 1

    shared(main)


@PLACED
def test_t41_failures_on_workers_are_retried_as_asked(line: Line, log: str) -> None:
    async def main() -> None:
        async with line.pool(two_keys()) as pool:
            handle = await pool.submit(combined_jobs.fails_until, log, 2, retries=2)
            assert await handle == line.key("a")
            assert handle.snapshot().attempt == 3
            with pytest.raises(LookupError, match="not yet"):
                await (await pool.submit(combined_jobs.fails_until, log + "2", 2, retries=1))

    line(main)


def test_t81_a_signal_in_a_pool_without_resources_is_a_failure(shared: Apart) -> None:
    async def limited() -> None:
        raise CooldownResource(5, "busy")

    async def main() -> None:
        async with TaskPool(workers=shared.pool) as pool:
            with pytest.raises(CooldownResource, match="busy") as caught:
                await (await pool.submit(limited))
            assert caught.value.cooldown_seconds == 5

    shared(main)


# -- siblings ----------------------------------------------------------------------------------------------------------


def test_r60_a_younger_sibling_is_cancelled_on_its_worker_and_runs_again_with_another_key(
    shared: Apart, log: str
) -> None:
    async def main() -> None:
        chosen = two_keys()
        with capture_events() as events:
            async with TaskPool(max_concurrent=4, resources=chosen, workers=shared.pool) as pool:
                elder = await pool.submit(combined_jobs.elder, log)
                await noted(log, "elder begun a")
                younger = [await pool.submit(combined_jobs.younger, log, max_attempts=1) for _ in range(3)]
                await noted(log, "younger begun a", 3)
                tell(log)
                assert await asyncio.gather(elder, *younger) == ["b"] * 4
                assert [handle.snapshot().attempt for handle in (elder, *younger)] == [2, 1, 1, 1]
        assert lines(log).count("younger cancelled") == 3
        assert lines(log).count("younger begun b") == 3
        assert (chosen.stats().sibling_cancels, in_flight(chosen)) == (3, 0)
        ids = {handle.id for handle in younger}
        told = [event for event in events if event.name == "sibling_cancelled"]
        assert {event.to_dict()["usage"]["request_id"] for event in told} == ids
        back = {
            event.to_dict()["task_id"]: event.to_dict()["spent"] for event in events if event.name == "pool_requeue"
        }
        assert back == {elder.id: True, **dict.fromkeys(ids, False)}

    shared(main)


def test_r60_an_elder_sibling_is_left_alone(shared: Apart, log: str) -> None:
    async def main() -> None:
        chosen = two_keys()
        async with TaskPool(max_concurrent=4, resources=chosen, workers=shared.pool) as pool:
            first = await pool.submit(combined_jobs.once_told, log)
            await noted(log, "begun a")
            assert await (await pool.submit(combined_jobs.by_key, {"a": (DisableResource, (), {})})) == "b"
            assert first.status == "running"
            tell(log)
            assert await first == "a"
        assert lines(log) == ["begun a"]

    shared(main)


def test_r63_a_sibling_that_swallows_the_cancellation_there_has_its_result(shared: Apart, log: str) -> None:
    async def main() -> None:
        async with TaskPool(max_concurrent=4, resources=two_keys(), workers=shared.pool) as pool:
            elder = await pool.submit(combined_jobs.elder, log)
            await noted(log, "elder begun a")
            younger = await pool.submit(combined_jobs.younger_that_swallows, log)
            await noted(log, "younger begun a")
            tell(log)
            assert (await elder, await younger) == ("b", "swallowed on a")
            assert younger.snapshot().attempt == 1
        assert lines(log).count("younger begun a") == 1
        assert "younger begun b" not in lines(log)

    shared(main)


def test_r64_a_plain_function_in_a_thread_there_is_never_interrupted(shared: Apart, log: str) -> None:
    async def main() -> None:
        async with TaskPool(max_concurrent=4, resources=two_keys(), workers=shared.pool) as pool:
            elder = await pool.submit(combined_jobs.elder, log)
            await noted(log, "elder begun a")
            younger = await pool.submit(combined_jobs.younger_plainly, log)
            await noted(log, "younger begun a")
            tell(log)
            assert await elder == "b"
            assert younger.status == "running"
            tell(log, "end")
            assert await younger == "a"
        assert [line for line in lines(log) if line.startswith("younger")] == ["younger begun a"]

    shared(main)


def test_r63_siblings_run_on_where_the_pool_says_so(shared: Apart, log: str) -> None:
    async def main() -> None:
        chosen = two_keys(cancel_siblings=False)
        async with TaskPool(max_concurrent=4, resources=chosen, workers=shared.pool) as pool:
            elder = await pool.submit(combined_jobs.elder, log)
            await noted(log, "elder begun a")
            younger = await pool.submit(combined_jobs.once_told, log + "2")
            await noted(log + "2", "begun a")
            tell(log)
            assert await elder == "b"
            tell(log + "2")
            assert await younger == "a"

    shared(main)


# -- cancel, timeout, close --------------------------------------------------------------------------------------------


@PLACED
@pytest.mark.parametrize("how", ["cancel", "timeout", "close", "block"])
def test_t81_stopping_a_task_stops_it_on_its_worker(line: Line, shared: Apart, log: str, how: str) -> None:
    async def main() -> None:
        chosen = marked_key()
        pool = line.pool(chosen)
        handle = await pool.submit(combined_jobs.endless, log, timeout=0.5 if how == "timeout" else None)
        await noted(log, f"begun {line.key()}")
        if how == "cancel":
            assert handle.cancel()
        elif how == "close":
            await pool.close(cancel=True)
        elif how == "block":
            with pytest.raises(RuntimeError, match="out"):
                async with pool:
                    raise RuntimeError("out")
        end = await pool_wait(handle)
        assert end.status == ("failed" if how == "timeout" else "cancelled")
        if how == "timeout":
            with pytest.raises(TimeoutError):
                await handle
        await noted(log, f"ended {line.key()}")
        assert lines(log) == [f"{what} {line.key()}" for what in ("begun", "cancelled", "ended")]
        assert in_flight(chosen) == 0
        assert rungs(chosen) == 2, "nothing was learned of the key"
        assert pool.snapshot().active == 0
        await idle(shared.pool)
        await pool.close()

    shared(main)


@PLACED
def test_t81_draining_waits_for_what_runs_there(line: Line, log: str) -> None:
    async def main() -> None:
        pool = line.pool(keys("a"))
        handle = await pool.submit(combined_jobs.once_told, log)
        await noted(log, f"begun {line.key()}")
        closing = asyncio.create_task(pool.close())
        await asyncio.sleep(0.02)
        assert not closing.done()
        tell(log)
        await closing
        assert await handle == line.key()

    line(main)


@PLACED
def test_t15_cancelling_who_awaits_leaves_the_task_alone(line: Line, log: str) -> None:
    async def main() -> None:
        async with line.pool(keys("a")) as pool:
            handle = await pool.submit(combined_jobs.once_told, log)
            await noted(log, f"begun {line.key()}")

            async def wait() -> Any:
                return await handle

            awaiter = asyncio.create_task(wait())
            await asyncio.sleep(0.01)
            awaiter.cancel()
            with pytest.raises(asyncio.CancelledError):
                await awaiter
            tell(log)
            assert await handle == line.key()
        assert lines(log) == [f"begun {line.key()}"]

    line(main)


# -- workers that die --------------------------------------------------------------------------------------------------


@pytest.fixture(params=["workers", "both"])
def mortal(request: pytest.FixtureRequest, what_grpc_opens_once: None) -> Callable[..., None]:
    """Run a test with workers of its own, which it may kill."""
    leases = request.param == "both"

    def go(main: Callable[..., Any]) -> None:
        async def inside() -> None:
            chosen = marked_key()
            async with WorkerPool(spawn=2) as workers:
                options: dict[str, Any] = {"resources": chosen} if leases else {}
                async with TaskPool(max_concurrent=4, workers=workers, **options) as pool:
                    await main(pool, chosen, "a" if leases else "")
                assert in_flight(chosen) == 0

        with no_leaks(files=False, threads=False):  # gRPC opens and closes as connections come and go
            run(inside)

    return go


def test_t81_a_lost_worker_is_a_failure_that_says_nothing_of_the_key(mortal: Callable[..., None], log: str) -> None:
    """Without retries= the task fails; with them it runs again."""

    async def main(pool: TaskPool, chosen: ResourcePool[str], key: str) -> None:
        handle = await pool.submit(combined_jobs.dies, log)
        with pytest.raises(WorkerLost):
            await handle
        assert (handle.status, handle.snapshot().attempt) == ("failed", 1)
        assert lines(log) == [f"ran {key}"], "at most once"
        assert (status(chosen, "a"), rungs(chosen), chosen.stats().successes) == ("healthy", 2, 0)
        assert chosen.stats().cooldowns == 0
        again = await pool.submit(combined_jobs.dies_once, log + "2", retries=1)
        assert await again == f"alive {key}"
        assert again.snapshot().attempt == 2
        assert lines(log + "2") == ["ran", "ran"]

    mortal(main)


def test_t81_a_worker_killed_from_outside_takes_only_its_own_tasks(what_grpc_opens_once: None, log: str) -> None:
    """With retries all of them end well."""

    async def inside() -> None:
        chosen = keys("a", "b")
        async with WorkerPool(spawn=2) as workers:
            await all_ready(workers, 2)
            async with TaskPool(max_concurrent=10, resources=chosen, workers=workers) as pool:
                handles = [await pool.submit(combined_jobs.once_told, log, retries=3) for _ in range(10)]
                await until(lambda: len(lines(log)) == 10)
                victim, other = workers.workers()
                lost = victim.in_flight
                assert (0 < lost < 10, lost + other.in_flight) == (True, 10)
                os.kill(victim.pid, 9)
                await until(lambda: len(lines(log)) > 10)  # not all at once: they are to have fewer neighbours
                tell(log)
                assert set(await asyncio.gather(*handles)) <= {"a", "b"}
                assert sorted(handle.snapshot().attempt for handle in handles) == [1] * (10 - lost) + [2] * lost
            assert in_flight(chosen) == 0

    with no_leaks(files=False, threads=False):
        run(inside)


# -- context -----------------------------------------------------------------------------------------------------------


@PLACED
@pytest.mark.parametrize("fn", [combined_jobs.swap_tenant, combined_jobs.swap_tenant_plainly], ids=["async", "plain"])
def test_w81_variables_go_along_as_they_were_at_submit(line: Line, fn: Any) -> None:
    async def main() -> None:
        async with line.pool(keys("a")) as pool:
            assert await (await pool.submit(fn, "theirs")) == "nobody"
            combined_jobs.tenant.set("acme")
            handle = await pool.submit(fn, "theirs")
            combined_jobs.tenant.set("other")
            assert await handle == "acme"
            assert combined_jobs.tenant.get() == "other", "a task has a copy of its submitter's context"
            assert await (await pool.submit(fn, "theirs")) == "other", "and leaves nothing on the worker"

    line(main)


def test_w81_each_attempt_begins_with_what_was_set_at_submit(shared: Apart) -> None:
    async def changes(key: Resource[str], value: str) -> str:
        before = combined_jobs.tenant.get()
        combined_jobs.tenant.set(value)
        if key.resource_id == "a":
            raise RetryOperation(before)
        return before

    async def main() -> None:
        combined_jobs.tenant.set("acme")
        async with TaskPool(resources=two_keys(), workers=shared.pool) as pool:
            assert await (await pool.submit(changes, "changed")) == "acme"

    shared(main)


@PLACED
def test_w84_a_variable_that_cannot_travel_is_the_tasks_error_and_the_key_is_given_back(line: Line) -> None:
    async def main() -> None:
        chosen = marked_key()
        async with line.pool(chosen) as pool:
            token = combined_jobs.tenant.set(threading.Lock())  # type: ignore[arg-type]
            handle = await pool.submit(combined_jobs.show, 1)
            combined_jobs.tenant.reset(token)
            with pytest.raises(TypeError, match="line_tenant"):
                await handle
            assert (in_flight(chosen), rungs(chosen)) == (0, 2)
            assert (await (await pool.submit(combined_jobs.show, 1)))["args"] == (1,)

    line(main)


# -- who am I there ----------------------------------------------------------------------------------------------------

WHO = [combined_jobs.my_task, combined_jobs.my_task_plainly, combined_jobs.my_task_by_routine]


@PLACED
@pytest.mark.parametrize("fn", WHO, ids=["async", "plain", "routine"])
def test_w09_a_worker_knows_task_and_tenant(line: Line, fn: Any) -> None:
    async def main() -> None:
        async with line.pool(keys("a"), queue=fair_round_robin("tenant_id")) as pool:
            handle = await pool.submit(fn, tenant_id="acme")
            found = await handle
            assert (found["caller"], found["tenant"]) == (handle.id, "acme")
            assert found["id"] != handle.id
            assert fn.__name__ in found["tag"]
            assert (await (await pool.submit(fn, tenant_id="ümlaut & co")))["tenant"] == "ümlaut & co"
            assert (await (await pool.submit(fn)))["tenant"] is None

    line(main)


@PLACED
def test_w04_routines_called_by_a_placed_task_go_to_peers(line: Line, shared: Apart) -> None:
    async def main() -> None:
        async with line.pool(keys("a"), queue=fair_round_robin("tenant_id")) as pool:
            handle = await pool.submit(combined_jobs.branches, 6, tenant_id="acme")
            pid, me, leaves = await handle
        assert pid in pids(shared.pool)
        assert {leaf for leaf, _ in leaves} == set(pids(shared.pool)), "they spread"
        assert me["caller"] == handle.id
        assert {fields["caller"] for _, fields in leaves} == {me["id"]}
        assert {fields["tenant"] for _, fields in leaves} == {"acme"}, "for whom it runs goes along"

    shared(main)


def test_w09_outside_of_a_line_a_task_has_no_tenant(shared: Apart) -> None:
    async def main() -> None:
        _, fields = await combined_jobs.leaf()
        assert (fields["caller"], fields["tenant"]) == (None, None)

    shared(main)


def test_w09_a_routine_that_a_task_of_this_process_calls_knows_task_and_tenant(shared: Apart) -> None:
    async def main() -> None:
        async with TaskPool(queue=fair_round_robin("tenant_id")) as pool:
            handle = await pool.submit(combined_jobs.leaf, tenant_id="acme")
            _, fields = await handle
            assert (fields["caller"], fields["tenant"]) == (handle.id, "acme")

    shared(main)


class _Unnamed:
    def __str__(self) -> str:
        raise ValueError("no name")


@pytest.mark.parametrize(("tenant", "told"), [("half \ud83d", "half \\ud83d"), (_Unnamed(), "a _Unnamed")])
def test_w09_a_tenant_that_no_message_can_carry_costs_no_worker(shared: Apart, tenant: Any, told: str) -> None:
    async def main() -> None:
        before = pids(shared.pool)
        async with TaskPool(workers=shared.pool) as there, TaskPool() as here:
            assert (await there.run(combined_jobs.my_task, key=tenant))["tenant"] == told
            _, fields = await here.run(combined_jobs.leaf, key=tenant)
            assert fields["tenant"] == told
        assert pids(shared.pool) == before

    shared(main)


# -- what cannot travel ------------------------------------------------------------------------------------------------


@PLACED
def test_w42_an_argument_that_cannot_be_pickled_is_the_tasks_error(line: Line, shared: Apart) -> None:
    async def main() -> None:
        chosen, before = marked_key(), states(shared.pool)
        async with line.pool(chosen) as pool:
            handle = await pool.submit(combined_jobs.show, threading.Lock())
            with pytest.raises(HeadgateError) as caught:
                await handle
            assert caught.value.remedy in str(caught.value)
            assert handle.status == "failed"
            assert (in_flight(chosen), rungs(chosen)) == (0, 2), "given back, and nothing was learned of it"
            assert (await (await pool.submit(combined_jobs.show, 1)))["args"] == (1,)
        assert states(shared.pool) == before

    shared(main)


@PLACED
def test_w42_a_function_that_cannot_be_pickled_is_the_tasks_error(line: Line) -> None:
    lock = threading.Lock()

    async def locked(*args: Any) -> bool:
        return lock.locked()

    async def main() -> None:
        chosen = marked_key()
        async with line.pool(chosen) as pool:
            with pytest.raises(HeadgateError, match="locked"):
                await (await pool.submit(locked, 1))
            assert (in_flight(chosen), rungs(chosen)) == (0, 2)
            assert (await (await pool.submit(combined_jobs.show, 1)))["args"] == (1,)

    line(main)


@PLACED
def test_w40b_a_result_that_cannot_be_pickled_is_the_tasks_error(line: Line) -> None:
    async def main() -> None:
        chosen = marked_key()
        async with line.pool(chosen) as pool:
            with pytest.raises(HeadgateError, match="returns_a_lock"):
                await (await pool.submit(combined_jobs.returns_a_lock))
            assert (in_flight(chosen), status(chosen, "a")) == (0, "healthy")
            assert (await (await pool.submit(combined_jobs.show, 1)))["args"] == (1,)

    line(main)


def test_w42_a_resource_whose_value_cannot_be_pickled_is_the_tasks_error(shared: Apart) -> None:
    async def main() -> None:
        chosen: ResourcePool[Any] = ResourcePool(
            [Resource("held", threading.Lock(), consecutive_cooldown=2), Resource("b", "secret-b", 1)],
            strategy="primary_backup",
        )
        async with TaskPool(resources=chosen, workers=shared.pool) as pool:
            handle = await pool.submit(combined_jobs.show)
            with pytest.raises(HeadgateError, match=r"held|resource|argument") as caught:
                await handle
            assert caught.value.remedy in str(caught.value)
            assert (in_flight(chosen), status(chosen, "held"), rungs(chosen, "held")) == (0, "healthy", 2)
            assert (await (await pool.submit(combined_jobs.show, exclude=["held"])))["key"] == "b"

    shared(main)


# -- worker pools that are not open ------------------------------------------------------------------------------------


async def error_of(pool: TaskPool) -> HeadgateError:
    """At submit, or when the task is awaited: either is clear enough."""
    try:
        await (await pool.submit(combined_jobs.show, 1))
    except HeadgateError as error:
        return error
    raise AssertionError("it ran")


@pytest.mark.parametrize("leases", [False, True], ids=["workers", "both"])
@pytest.mark.parametrize("state", ["not yet", "closed"])
def test_t81_workers_that_are_not_open_are_a_clear_error(what_grpc_opens_once: None, leases: bool, state: str) -> None:
    async def main() -> None:
        chosen = marked_key()
        workers = WorkerPool(spawn=1)
        if state == "closed":
            async with workers:
                pass
        options: dict[str, Any] = {"resources": chosen} if leases else {}
        async with TaskPool(workers=workers, **options) as pool:
            error = await error_of(pool)
            assert error.remedy in str(error)
            assert "WorkerPool" in str(error) or "closed" in str(error)
            assert (pool.snapshot().active, pool.snapshot().queued) == (0, 0)
        assert (in_flight(chosen), rungs(chosen)) == (0, 2)

    run(main)


def test_t81_a_pool_made_before_its_workers_are_open_works_when_they_are(what_grpc_opens_once: None) -> None:
    async def main() -> None:
        workers = WorkerPool(spawn=1)
        pool = TaskPool(resources=keys("a"), workers=workers)
        async with workers, pool:
            assert (await (await pool.submit(combined_jobs.show)))["pid"] in pids(workers)

    run(main)


def test_w35_closing_the_workers_ends_what_runs_on_them_and_gives_the_key_back(
    what_grpc_opens_once: None, log: str
) -> None:
    async def main() -> None:
        chosen = marked_key()
        async with TaskPool(resources=chosen) as idle_pool:
            async with WorkerPool(spawn=1, shutdown_timeout=0.1) as workers:
                pool = TaskPool(resources=chosen, workers=workers)
                handle = await pool.submit(combined_jobs.endless, log)
                await noted(log, "begun a")
            with pytest.raises(HeadgateError):
                await handle
            assert (handle.status, in_flight(chosen), rungs(chosen)) == ("failed", 0, 2)
            assert await (await idle_pool.submit(combined_jobs.by_key, {})) == "a"
            await pool.close()

    run(main)


# -- @keys.use() above @headgate.routine -------------------------------------------------------------------------------


@pytest.fixture
def fresh_keys() -> Any:
    """The keys of `combined_jobs` are the module's: healthy for each test."""

    async def enable() -> None:
        for name in combined_jobs.module_keys.snapshot():
            await combined_jobs.module_keys.enable(name)

    asyncio.run(enable())
    return combined_jobs.module_keys


def test_r50_a_routine_below_use_is_given_a_key_here_and_runs_there(
    shared: Apart, fresh_keys: ResourcePool[str]
) -> None:
    async def main() -> None:
        before = fresh_keys.stats().successes
        with capture_events() as events:
            found = await combined_jobs.ask("why", times=3)
            plain = await combined_jobs.ask_plainly("why")
        for one in (found, plain):
            assert one["pid"] in pids(shared.pool)
            assert (one["key"], one["value"], one["args"]) == ("m-a", "secret-m-a", ("why",))
        assert found["more"] == {"times": 3}
        assert events.names.count("task_dispatched") == 2
        assert (fresh_keys.stats().successes - before, in_flight(fresh_keys)) == (2, 0)
        assert (combined_jobs.ask.__name__, combined_jobs.ask.__doc__) == ("ask", "Ask it.")

    shared(main)


def test_r50_signals_of_a_routine_below_use_reach_the_pool(shared: Apart, fresh_keys: ResourcePool[str]) -> None:
    async def main() -> None:
        with capture_events("resources.health") as events:
            assert (
                await combined_jobs.ask_by_key({"m-a": (combined_jobs.QuotaGone, ("acme",), {"retry": 50.0})}) == "m-b"
            )
        assert [(event.to_dict()["seconds"], event.to_dict()["reason"]) for event in events] == [
            (50.0, "quota of acme is gone")
        ]
        with pytest.raises(PoolExhausted) as caught:
            await combined_jobs.ask_by_key({"m-b": (combined_jobs.Revoked, (), {"by": "ops"})})
        assert isinstance(caught.value.__cause__, combined_jobs.Revoked)
        assert (status(fresh_keys, "m-a"), status(fresh_keys, "m-b")) == ("cooling_down", "disabled")

    shared(main)


def test_w81_variables_come_back_from_a_routine_below_use(shared: Apart, fresh_keys: ResourcePool[str]) -> None:
    async def main() -> None:
        combined_jobs.tenant.set("mine")
        assert await combined_jobs.ask_and_swap_tenant("theirs") == "mine"
        assert combined_jobs.tenant.get() == "theirs"

    shared(main)


def test_w06_cancelling_a_routine_below_use_cancels_it_there(
    shared: Apart, fresh_keys: ResourcePool[str], log: str
) -> None:
    async def main() -> None:
        call = asyncio.create_task(combined_jobs.ask_endlessly(log))
        await noted(log, "begun m-a")
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert lines(log) == ["begun m-a", "cancelled m-a", "ended m-a"]
        assert in_flight(fresh_keys) == 0

    shared(main)


def test_r50_a_routine_below_use_may_be_submitted(shared: Apart, fresh_keys: ResourcePool[str]) -> None:
    """To a pool that has neither: the key and the worker are the function's own affair."""

    async def main() -> None:
        async with TaskPool() as pool:
            found = await (await pool.submit(combined_jobs.ask, "why"))
        assert (found["key"], found["pid"] in pids(shared.pool)) == ("m-a", True)

    shared(main)


# -- programs ----------------------------------------------------------------------------------------------------------

PROGRAM = """
import asyncio
import os
import headgate

keys = headgate.ResourcePool({"a": "sk-aaa", "b": "sk-bbb"}, strategy="primary_backup")
MULTIPLIER = 3

class Busy(headgate.CooldownResource):
    def __init__(self, *, account):
        super().__init__(60, f"{account} is busy")

async def review(key, pr):
    if key.resource_id == "a":
        raise Busy(account="acme")
    return key.value, pr * MULTIPLIER, os.getpid()

def review_plainly(key, pr):
    return key.value, pr * MULTIPLIER, os.getpid()

@headgate.routine
async def review_by_routine(key, pr):
    return key.value, pr * MULTIPLIER, os.getpid()

async def pages(key, count):
    for n in range(count):
        yield key.resource_id, n

@keys.use()
@headgate.routine
async def ask(key, q):
    return key.resource_id, q, os.getpid()

async def main():
    async with headgate.WorkerPool(spawn=2) as workers, headgate.TaskPool(
        "pr-review", max_concurrent=50, queue=headgate.fair_round_robin("tenant_id"), resources=keys, workers=workers,
    ) as pool:
        pids = {view.pid for view in workers.workers()}
        for fn in (review, review_plainly, review_by_routine):
            value, product, pid = await (await pool.submit(fn, 7, tenant_id="acme", priority=10))
            print(fn.__name__, value, product, pid in pids)
        print([item async for item in pool.stream(pages, 3)])
        key, q, pid = await ask("why")
        print("ask", key, q, pid in pids)
        print(keys.snapshot()["a"]["status"], keys.stats().cooldowns, keys.stats().in_flight)

if __name__ == "__main__":
    asyncio.run(main())
"""


def test_t81_a_program_whose_functions_are_in_main(tmp_path: Path) -> None:
    told = script(PROGRAM, tmp_path)
    assert (told.returncode, len(told.stderr.splitlines())) == (0, 1), told.stderr
    assert "a cools down for 60.0 s (1 in a row): acme is busy" in told.stderr, "the warning, and nothing else"
    assert told.stdout.splitlines() == [
        "review sk-bbb 21 True",
        "review_plainly sk-bbb 21 True",
        "review_by_routine sk-bbb 21 True",
        "[('b', 0), ('b', 1), ('b', 2)]",
        "ask b why True",
        "cooling_down 1 0",
    ]


# -- many --------------------------------------------------------------------------------------------------------------


@PLACED
def test_t81_many_tasks_and_none_is_lost(line: Line) -> None:
    async def main() -> None:
        chosen = keys("a", "b", "c")
        count = 2000 if SCALE >= 1 else 500
        async with line.pool(chosen, max_concurrent=64) as pool:
            if line.leases:
                handles = [await pool.submit(combined_jobs.number, n) for n in range(count)]
                assert await asyncio.gather(*handles) == list(range(count))
            else:
                handles = [await pool.submit(os.path.basename, f"x/{n}") for n in range(count)]
                assert await asyncio.gather(*handles) == [str(n) for n in range(count)]
            seen = pool.snapshot(0)
            assert (seen.completed, seen.failed, seen.active, seen.queued) == (count, 0, 0, 0)
        assert in_flight(chosen) == 0
        assert chosen.stats().successes == (count if line.leases else 0)

    line(main)


def test_t81_many_tasks_with_trouble_and_none_is_lost(shared: Apart) -> None:
    async def main() -> None:
        chosen = keys("a", "b", "c", max_attempts=1000)
        count = 400 if SCALE >= 1 else 150
        async with TaskPool(max_concurrent=32, resources=chosen, workers=shared.pool) as pool:
            handles = [await pool.submit(combined_jobs.stormy, n) for n in range(count)]
            assert await asyncio.gather(*handles) == list(range(count))
            assert pool.snapshot(0).completed == count
        assert (in_flight(chosen), chosen.stats().successes) == (0, count)
        assert chosen.stats().cooldowns > 0

    shared(main)


@pytest.mark.parametrize("client", ["httpx2", pytest.param("openai", marks=pytest.mark.soak)])
def test_r80_errors_of_a_client_on_a_worker_reach_the_classifier(shared: Apart, client: str) -> None:
    async def main() -> None:
        pool = keys("revoked", "limited", "good", strategy="primary_backup", classify=headgate.http_errors)
        async with TaskPool("asking", resources=pool, workers=shared.pool) as tasks:
            assert await (await tasks.submit(combined_jobs.asks, client)) == "fine"
        assert [status(pool, name) for name in ("revoked", "limited", "good")] == [
            "disabled",
            "cooling_down",
            "healthy",
        ]
        assert 50 < pool.snapshot()["limited"]["cooldown_seconds_remaining"] <= 60

    shared(main)
