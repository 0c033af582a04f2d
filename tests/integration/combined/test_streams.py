"""`TaskPool.stream` in all combinations: a slot and a key are held from the start to the last item."""

from __future__ import annotations

import asyncio
import functools
import gc
import os
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any

import pytest

import headgate
from headgate import (
    CooldownResource,
    DisableResource,
    HeadgateError,
    InvalidArgument,
    InvalidType,
    PoolBusy,
    PoolClosed,
    PoolExhausted,
    Resource,
    ResourcePool,
    RetryOperation,
    TaskCancelled,
    TaskExpired,
    TaskPool,
    WaitCycle,
    WorkerLost,
    WorkerPool,
    fail_fast,
    fair_round_robin,
    fifo,
    pool_wait,
    priority,
)
from headgate import tasks as rooms
from headgate.testing import capture_events, no_leaks, settle, virtual
from tests.integration.combined import combined_jobs
from tests.support.combined.combined_support import KINDS, Apart, Line, noted, tell
from tests.support.resources.support import in_flight, keys, status
from tests.support.workers.support import lines, pids, run, until

pytestmark = pytest.mark.integration

EVERY = pytest.mark.parametrize("line", KINDS, indirect=True)
LEASED = pytest.mark.parametrize("line", ["resources", "both"], indirect=True)


def two_keys(**options: Any) -> ResourcePool[str]:
    """ "a" is always the first choice."""
    return keys("a", "b", strategy="primary_backup", **options)


def marked_key() -> ResourcePool[str]:
    """One key whose counter tells what its pool learned: 0 after a success, 2 as long as nothing was said."""
    return ResourcePool([Resource("a", "secret-a", consecutive_cooldown=2)])


def rungs(pool: ResourcePool[Any]) -> int:
    return pool.snapshot()["a"]["consecutive_cooldown"]


async def all_of(stream: AsyncIterator[Any]) -> list[Any]:
    return [item async for item in stream]


async def read_into(got: list[Any], stream: AsyncIterator[Any]) -> None:
    """The same, for streams that break: what came before is kept."""
    async for item in stream:
        got.append(item)


def is_free(pool: Any, chosen: ResourcePool[Any]) -> bool:
    """Neither a slot nor a key is held, and nobody waits."""
    seen = pool.snapshot(0)
    return (seen.active, seen.waiting, seen.queued, in_flight(chosen)) == (0, 0, 0, 0)


# -- items -------------------------------------------------------------------------------------------------------------


@EVERY
def test_r75_all_items_come_in_order_and_then_all_is_free(line: Line, log: str) -> None:
    async def main() -> None:
        chosen = marked_key()
        async with line.pool(chosen) as pool:
            assert await all_of(pool.stream(combined_jobs.counts, log, 3)) == [(line.key(), n) for n in range(3)]
            assert is_free(pool, chosen)
            seen = pool.snapshot()
            assert (seen.completed, seen.failed, seen.tasks[0].status) == (1, 0, "completed")
        assert lines(log) == [f"begun {line.key()}", "item 0", "item 1", "item 2", f"finally {line.key()}"]
        assert rungs(chosen) == (0 if line.leases else 2)

    line(main)


@EVERY
def test_r75_an_empty_stream(line: Line, log: str) -> None:
    async def main() -> None:
        chosen = keys("a")
        async with line.pool(chosen) as pool:
            assert await all_of(pool.stream(combined_jobs.counts, log, 0)) == []
            assert is_free(pool, chosen)
            assert pool.snapshot(0).completed == 1
        assert chosen.stats().successes == int(line.leases)

    line(main)


@EVERY
def test_r75_items_are_pulled_one_by_one(line: Line, log: str) -> None:
    async def main() -> None:
        async with line.pool(keys("a")) as pool:
            async with aclosing(pool.stream(combined_jobs.counts, log, 10)) as stream:
                for n in range(3):
                    assert await anext(stream) == (line.key(), n)
                    await asyncio.sleep(0.02)
                    assert lines(log)[-1] == f"item {n}", "nothing is made before it is asked for"

    line(main)


@EVERY
def test_r75_a_stream_runs_where_tasks_run(line: Line, shared: Apart, log: str) -> None:
    async def main() -> None:
        async with line.pool(keys("a")) as pool:
            [found] = await all_of(pool.stream(combined_jobs.where, 1, "two"))
        assert (found["key"], found["value"]) == (("a", "secret-a") if line.leases else ("", None))
        assert found["args"] == (1, "two")
        assert found["pid"] in (pids(shared.pool) if line.places else [os.getpid()])

    line(main)


@EVERY
def test_r75_generators_of_other_kinds(line: Line, log: str) -> None:
    extra = "value"

    async def closure(*args: Any, more: str = "") -> AsyncGenerator[Any, None]:
        yield combined_jobs.split(args)[0], extra, more

    async def main() -> None:
        async with line.pool(keys("a")) as pool:
            assert await all_of(pool.stream(combined_jobs.Client("here").words)) == ["here", line.key()]
            assert await all_of(pool.stream(closure)) == [(line.key(), "value", "")]
            kept = functools.partial(closure, more="kw")
            assert await all_of(pool.stream(kept)) == [(line.key(), "value", "kw")]

    line(main)


def test_r75_a_generator_routine_is_dispatched_once(shared: Apart, log: str) -> None:
    async def main() -> None:
        async with TaskPool(resources=keys("a"), workers=shared.pool) as pool:
            with capture_events() as events:
                assert await all_of(pool.stream(combined_jobs.counts_by_routine, log, 2)) == [("a", 0), ("a", 1)]
        [submitted] = [event for event in events if event.name == "pool_submit"]
        assert lines(log) == ["begun a", f"caller {submitted.to_dict()['task_id']}"]
        assert events.names.count("task_dispatched") == 1

    shared(main)


def test_r75_a_generator_routine_in_a_pool_of_resources_alone(shared: Apart, log: str) -> None:
    async def main() -> None:
        async with TaskPool(resources=keys("a")) as pool:
            assert await all_of(pool.stream(combined_jobs.counts_by_routine, log, 2)) == [("a", 0), ("a", 1)]

    shared(main)


@EVERY
def test_r75_many_streams_at_once(line: Line, log: str) -> None:
    async def main() -> None:
        chosen = keys("a", "b")
        async with line.pool(chosen, max_concurrent=3) as pool:
            found = await asyncio.gather(*(all_of(pool.stream(combined_jobs.counts, log, n)) for n in range(12)))
            assert [[n for _, n in items] for items in found] == [list(range(n)) for n in range(12)]
            assert is_free(pool, chosen)

    line(main)


# -- what is held ------------------------------------------------------------------------------------------------------


@EVERY
def test_r75_slot_and_key_are_held_between_items(line: Line, log: str) -> None:
    async def main() -> None:
        chosen = keys("a")
        async with line.pool(chosen) as pool:
            stream = pool.stream(combined_jobs.counts, log, 2)
            await anext(stream)
            seen = pool.snapshot()
            assert (seen.active, seen.tasks[0].status, in_flight(chosen)) == (1, "running", int(line.leases))
            behind = await pool.submit(combined_jobs.show, 1)
            await asyncio.sleep(0.02)
            assert behind.status == "queued"
            assert await all_of(stream) == [(line.key(), 1)]
            assert (await behind)["args"] == (1,)
            assert is_free(pool, chosen)

    line(main)


@virtual
async def test_r75_an_exclusive_key_is_held_though_slots_are_free() -> None:
    chosen = ResourcePool([Resource("a", "secret-a", 1)])
    async with TaskPool(max_concurrent=5, resources=chosen) as pool:
        stream = pool.stream(combined_jobs.where)
        await anext(stream)
        behind = await pool.submit(combined_jobs.show)
        await settle()
        assert behind.status == "queued"
        assert pool.snapshot().waiting_for == {"cause": "resources", "seconds": None}
        await stream.aclose()
        assert (await behind)["key"] == "a"


@virtual
async def test_r75_a_stream_waits_its_turn(log: str) -> None:
    for make in (lambda **more: rooms.TaskPool(**more), lambda **more: TaskPool(resources=keys("a"), **more)):
        async with make(queue=priority()) as pool:
            first = await pool.submit(_sleep, 10)
            order: list[str] = []

            async def consume(name: str, rank: int, pool: Any = pool, order: list[str] = order) -> None:
                async for _ in pool.stream(combined_jobs.counts, log, 1, priority=rank):
                    order.append(name)

            consumers = [asyncio.create_task(consume(f"rank {rank}", rank)) for rank in (1, 3, 2)]
            await settle()
            assert pool.snapshot(0).queued == 3
            assert order == []
            await first
            await asyncio.gather(*consumers)
            assert order == ["rank 3", "rank 2", "rank 1"]


async def _sleep(*args: Any) -> None:
    await asyncio.sleep(args[-1])


@virtual
async def test_r75_options_of_submit_are_options_of_stream(log: str) -> None:
    async with TaskPool(queue=fair_round_robin("tenant_id"), resources=keys("a")) as pool:
        stream = pool.stream(combined_jobs.counts, log, 1, tenant_id="acme", labels={"x": 1}, tags=(), affinity="u")
        assert await all_of(stream) == [("a", 0)]
        seen = pool.snapshot().tasks[0]
        assert (seen.partition, seen.labels) == ("acme", {"x": 1})
        with pytest.raises(InvalidArgument, match="prioritty"):
            await all_of(pool.stream(combined_jobs.counts, log, 1, prioritty=1))
        with pytest.raises(PoolExhausted, match="nowhere"):
            await all_of(pool.stream(combined_jobs.counts, log, 1, tags=["nowhere"]))
    async with rooms.TaskPool() as plain:
        with pytest.raises(InvalidArgument, match="tags"):
            await all_of(plain.stream(combined_jobs.counts, log, 1, tags=["x"]))


@virtual
async def test_r75_a_stream_that_expires_in_the_queue(log: str) -> None:
    async with TaskPool(resources=keys("a")) as pool:
        first = await pool.submit(_sleep, 10)
        with pytest.raises(TaskExpired):
            await all_of(pool.stream(combined_jobs.counts, log, 1, ttl=1))
        await first
    assert lines(log) == []


@virtual
async def test_r75_a_stream_that_cannot_start_where_nothing_queues(log: str) -> None:
    async with TaskPool(resources=keys("a"), backpressure=fail_fast()) as pool:
        first = await pool.submit(_sleep, 10)
        with pytest.raises(PoolBusy):
            await all_of(pool.stream(combined_jobs.counts, log, 1))
        await first
        assert await all_of(pool.stream(combined_jobs.counts, log, 1)) == [("a", 0)]


@virtual
async def test_r75_a_stream_waits_for_a_key_that_cools(log: str) -> None:
    chosen = keys("a")
    async with TaskPool(resources=chosen) as pool:
        assert await (await pool.submit(_cool_once(9), retries=0)) == "a"
        with pytest.raises(CooldownResource):
            async with chosen.lease():
                raise CooldownResource(5)
        assert await all_of(pool.stream(combined_jobs.counts, log, 1)) == [("a", 0)]
        assert asyncio.get_running_loop().time() == 14


def _cool_once(seconds: float) -> Any:
    cooled: list[str] = []

    async def cool(key: Resource[str]) -> str:
        if not cooled:
            cooled.append(key.resource_id)
            raise CooldownResource(seconds)
        return key.resource_id

    return cool


# -- leaving -----------------------------------------------------------------------------------------------------------


@EVERY
def test_r75_closing_early_runs_the_finally_and_frees_all_before_it_returns(line: Line, log: str) -> None:
    async def main() -> None:
        chosen = keys("a")
        async with line.pool(chosen) as pool:
            stream = pool.stream(combined_jobs.counts, log, 10)
            assert await anext(stream) == (line.key(), 0)
            await stream.aclose()
            assert lines(log) == [f"begun {line.key()}", "item 0", f"finally {line.key()}"]
            assert is_free(pool, chosen)
            await stream.aclose()
            assert await all_of(stream) == []
            assert await all_of(pool.stream(combined_jobs.counts, log, 1)) == [(line.key(), 0)]

    line(main)


@EVERY
def test_r75_breaking_out_of_the_loop(line: Line, log: str) -> None:
    async def main() -> None:
        chosen = keys("a")
        async with line.pool(chosen) as pool:
            async for item in pool.stream(combined_jobs.counts, log, 10):
                assert item == (line.key(), 0)
                break
            gc.collect()
            await until(lambda: is_free(pool, chosen))
            assert lines(log) == [f"begun {line.key()}", "item 0", f"finally {line.key()}"]

    line(main)


@EVERY
def test_r75_a_consumer_that_fails_inside_aclosing(line: Line, log: str) -> None:
    async def main() -> None:
        chosen = marked_key()
        async with line.pool(chosen) as pool:

            async def consume() -> None:
                async with aclosing(pool.stream(combined_jobs.counts, log, 10)) as stream:
                    async for _ in stream:
                        raise RuntimeError("mine")

            with pytest.raises(RuntimeError, match="mine"):
                await consume()
            assert is_free(pool, chosen)
            assert lines(log)[-1] == f"finally {line.key()}"

    line(main)


@EVERY
def test_r75_a_stream_that_nobody_reads_holds_nothing_for_ever(line: Line, log: str) -> None:
    async def main() -> None:
        chosen = keys("a")
        async with line.pool(chosen) as pool:
            unread = pool.stream(combined_jobs.counts, log, 10)
            del unread
            gc.collect()
            await until(lambda: is_free(pool, chosen))
            closed = pool.stream(combined_jobs.counts, log, 10)
            await closed.aclose()
            assert is_free(pool, chosen)
            assert await all_of(pool.stream(combined_jobs.counts, log, 1)) == [(line.key(), 0)]

    line(main)


@EVERY
@pytest.mark.parametrize("count", [0, 1], ids=["before the first item", "after it"])
def test_r75_cancelling_the_consumer_cancels_the_generator(line: Line, log: str, count: int) -> None:
    async def main() -> None:
        chosen = marked_key()
        async with line.pool(chosen) as pool:
            consumer = asyncio.create_task(all_of(pool.stream(combined_jobs.stalls, log, count)))
            await noted(log, f"stalled {line.key()}")
            consumer.cancel()
            with pytest.raises(asyncio.CancelledError):
                await consumer
            await noted(log, f"finally {line.key()}")
            assert lines(log)[-2:] == [f"cancelled {line.key()}", f"finally {line.key()}"]
            await until(lambda: is_free(pool, chosen))
            assert rungs(chosen) == 2, "nothing was learned of the key"

    line(main)


@virtual
async def test_r75_cancelling_a_consumer_that_waits_for_its_turn(log: str) -> None:
    chosen = keys("a")
    async with TaskPool(resources=chosen) as pool:
        first = await pool.submit(_sleep, 10)
        consumer = asyncio.create_task(all_of(pool.stream(combined_jobs.counts, log, 3)))
        await settle()
        assert pool.snapshot(0).queued == 1
        consumer.cancel()
        with pytest.raises(asyncio.CancelledError):
            await consumer
        assert pool.snapshot(0).queued == 0
        await first
        assert is_free(pool, chosen)
    assert lines(log) == []


# -- failures ----------------------------------------------------------------------------------------------------------


@EVERY
@pytest.mark.parametrize("count", [0, 2], ids=["before the first item", "after it"])
def test_r75_an_error_reaches_the_consumer(line: Line, log: str, count: int) -> None:
    async def main() -> None:
        chosen = marked_key()
        async with line.pool(chosen) as pool:
            got: list[Any] = []
            with pytest.raises(LookupError, match="torn"):
                await read_into(got, pool.stream(combined_jobs.breaks, log, count, LookupError, ("torn",)))
            assert got == [(line.key(), n) for n in range(count)]
            assert lines(log) == [f"begun {line.key()}", f"finally {line.key()}"]
            assert is_free(pool, chosen)
            assert (pool.snapshot(0).failed, pool.snapshot().tasks[0].status) == (1, "failed")
            assert rungs(chosen) == (0 if line.leases else 2), "any other exception: the key is healthy"

    line(main)


@EVERY
def test_r75_retries_work_before_the_first_item(line: Line, log: str) -> None:
    async def main() -> None:
        async with line.pool(keys("a")) as pool:
            assert await all_of(pool.stream(combined_jobs.breaks_until, log, 2, retries=2)) == [(line.key(), 0)]
            assert lines(log) == ["ran"] * 3
            assert pool.snapshot().tasks[0].attempt == 3
            with pytest.raises(LookupError):
                await all_of(pool.stream(combined_jobs.breaks_until, log + "2", 2, retries=1))

    line(main)


@EVERY
def test_r75_retries_do_not_work_after_it(line: Line, log: str) -> None:
    async def main() -> None:
        async with line.pool(keys("a")) as pool:
            got: list[Any] = []
            with pytest.raises(LookupError, match="torn"):
                await read_into(got, pool.stream(combined_jobs.breaks, log, 1, LookupError, ("torn",), retries=5))
            assert (got, lines(log).count(f"begun {line.key()}")) == ([(line.key(), 0)], 1)

    line(main)


# -- signals -----------------------------------------------------------------------------------------------------------

SIGNALS: dict[str, Any] = {
    "cooldown": (CooldownResource, (70.0, "busy"), {}),
    "disable": (DisableResource, ("gone",), {}),
    "retry": (RetryOperation, ("hiccup",), {}),
    "subclass": (combined_jobs.QuotaGone, ("acme",), {"retry": 70.0}),
}
AFTERWARDS = {"cooldown": "cooling_down", "disable": "disabled", "retry": "healthy", "subclass": "cooling_down"}


@LEASED
@pytest.mark.parametrize("signal", SIGNALS)
def test_r75_a_signal_before_the_first_item_fails_over(line: Line, log: str, signal: str) -> None:
    async def main() -> None:
        chosen = two_keys()
        async with line.pool(chosen) as pool:
            with capture_events() as events:
                stream = pool.stream(combined_jobs.breaks_by_key, log, 0, {"a": SIGNALS[signal]})
                assert await all_of(stream) == [("b", 0)]
            assert is_free(pool, chosen)
            assert pool.snapshot().tasks[0].attempt == 2
        assert lines(log) == ["begun a", "begun b"]
        assert status(chosen, "a") == AFTERWARDS[signal]
        [back] = [event.to_dict() for event in events if event.name == "pool_requeue"]
        assert (back["resource_id"], back["spent"]) == ("a", True)

    line(main)


@LEASED
@pytest.mark.parametrize("signal", SIGNALS)
def test_r75_a_signal_after_it_reaches_the_consumer_and_the_pool(line: Line, log: str, signal: str) -> None:
    kind = SIGNALS[signal][0]

    async def main() -> None:
        chosen = two_keys()
        async with line.pool(chosen) as pool:
            got: list[Any] = []
            with capture_events("resources.health") as events, pytest.raises(kind) as caught:
                await read_into(got, pool.stream(combined_jobs.breaks_by_key, log, 2, {"a": SIGNALS[signal]}))
            assert got == [("a", 0), ("a", 1)]
            assert is_free(pool, chosen)
            assert pool.snapshot(0).failed == 1
        assert lines(log) == ["begun a"]
        assert status(chosen, "a") == AFTERWARDS[signal]
        if signal in ("cooldown", "subclass"):
            [cooled] = events
            assert cooled.to_dict()["seconds"] == caught.value.cooldown_seconds == 70.0
            assert cooled.to_dict()["reason"] == caught.value.reason

    line(main)


@LEASED
def test_r75_attempts_before_the_first_item_are_bounded(line: Line, log: str) -> None:
    async def main() -> None:
        chosen = keys("a", "b", "c", strategy="primary_backup", max_attempts=2)
        outcomes = {"a": SIGNALS["disable"], "b": SIGNALS["retry"]}
        async with line.pool(chosen) as pool:
            with pytest.raises(PoolExhausted) as caught:
                await all_of(pool.stream(combined_jobs.breaks_by_key, log, 0, outcomes))
            assert is_free(pool, chosen)
            stream = pool.stream(combined_jobs.breaks_by_key, log, 0, outcomes, max_attempts=3)
            assert await all_of(stream) == [("c", 0)]
        assert caught.value.reason == "attempts"
        assert [one.resource_id for one in caught.value.attempts] == ["a", "b"]
        assert isinstance(caught.value.__cause__, RetryOperation)

    line(main)


@LEASED
def test_r64_a_stream_is_cancelled_as_a_sibling_only_before_its_first_item(line: Line, log: str) -> None:
    async def main() -> None:
        chosen = two_keys()
        async with line.pool(chosen, max_concurrent=4, queue=fifo()) as pool:
            elder = await pool.submit(combined_jobs.elder, log)
            await noted(log, "elder begun a")
            opened = pool.stream(combined_jobs.waits_to_go_on, log)
            assert await anext(opened) == ("a", 0)
            going_on = asyncio.create_task(all_of(opened))
            waiting = asyncio.create_task(all_of(pool.stream(combined_jobs.waits_to_begin, log)))
            await noted(log, "waits on a")
            tell(log)
            assert await elder == "b"
            assert await waiting == [("b", 0)]
            assert not going_on.done()
            tell(log, "on")
            assert await going_on == [("a", 1)]
            assert is_free(pool, chosen)
        assert lines(log).count("waiting one cancelled") == 1
        assert "open one cancelled" not in lines(log)
        assert chosen.stats().sibling_cancels == 1

    line(main)


@virtual
async def test_r64_a_consumer_that_is_busy_between_items_is_not_touched() -> None:
    chosen = two_keys()

    async def two(key: Resource[str]) -> AsyncGenerator[str, None]:
        yield key.resource_id
        yield key.resource_id

    async def elder(key: Resource[str]) -> str:
        await asyncio.sleep(1)
        if key.resource_id == "a":
            raise DisableResource("gone")
        return key.resource_id

    async with TaskPool(max_concurrent=3, resources=chosen) as pool:
        handle = await pool.submit(elder)
        got = []
        async for item in pool.stream(two):
            got.append(item)
            await asyncio.sleep(5)
        assert got == ["a", "a"]
        assert await handle == "b"


# -- time and ends -----------------------------------------------------------------------------------------------------


@EVERY
def test_r75_a_timeout_before_the_first_item(line: Line, log: str) -> None:
    async def main() -> None:
        chosen = marked_key()
        async with line.pool(chosen) as pool:
            with pytest.raises(TimeoutError):
                await all_of(pool.stream(combined_jobs.stalls, log, 0, timeout=0.5))
            await noted(log, f"finally {line.key()}")
            await until(lambda: is_free(pool, chosen))
            assert rungs(chosen) == 2, "nothing was learned of the key"
            assert pool.snapshot().tasks[0].status == "failed"

    line(main)


@EVERY
def test_r75_a_timeout_that_is_not_reached(line: Line, log: str) -> None:
    async def main() -> None:
        async with line.pool(keys("a")) as pool:
            assert len(await all_of(pool.stream(combined_jobs.counts, log, 5, timeout=25))) == 5

    line(main)


@EVERY
@pytest.mark.parametrize("count", [0, 1], ids=["before the first item", "after it"])
def test_r75_closing_the_pool_with_cancel_ends_its_streams(line: Line, log: str, count: int) -> None:
    async def main() -> None:
        chosen = marked_key()
        pool = line.pool(chosen)
        got: list[Any] = []

        consumer = asyncio.create_task(read_into(got, pool.stream(combined_jobs.stalls, log, count)))
        await noted(log, f"stalled {line.key()}")
        await pool.close(cancel=True)
        with pytest.raises((TaskCancelled, PoolClosed)):
            await consumer
        assert len(got) == count
        await noted(log, f"finally {line.key()}")
        assert (in_flight(chosen), rungs(chosen)) == (0, 2)
        with pytest.raises(PoolClosed):
            await all_of(pool.stream(combined_jobs.counts, log, 1))

    line(main)


@EVERY
def test_r75_closing_the_pool_waits_for_its_streams(line: Line, log: str) -> None:
    async def main() -> None:
        pool = line.pool(keys("a"))
        stream = pool.stream(combined_jobs.counts, log, 3)
        await anext(stream)
        closing = asyncio.create_task(pool.close())
        await asyncio.sleep(0.02)
        assert not closing.done()
        assert await all_of(stream) == [(line.key(), 1), (line.key(), 2)]
        await closing

    line(main)


@EVERY
def test_r75_an_idle_stream_of_a_pool_closed_with_cancel(line: Line, log: str) -> None:
    """Its consumer is busy elsewhere: the pool closes all the same, and the consumer hears of it at its next step."""

    async def main() -> None:
        chosen = keys("a")
        pool = line.pool(chosen)
        stream = pool.stream(combined_jobs.counts, log, 3)
        await anext(stream)
        async with asyncio.timeout(20):
            await pool.close(cancel=True)
        assert in_flight(chosen) == 0
        await noted(log, f"finally {line.key()}")
        with pytest.raises((TaskCancelled, PoolClosed)):
            await anext(stream)

    line(main)


@pytest.mark.parametrize("count", [0, 1], ids=["before the first item", "after it"])
def test_r75_a_worker_that_dies_under_a_stream(what_grpc_opens_once: None, count: int) -> None:
    async def dying(key: Resource[str], items: int) -> AsyncGenerator[str, None]:
        for _ in range(items):
            yield key.resource_id
        os.kill(os.getpid(), 9)

    async def main() -> None:
        chosen = marked_key()
        async with WorkerPool(spawn=1) as workers, TaskPool(resources=chosen, workers=workers) as pool:
            got: list[str] = []
            with pytest.raises(WorkerLost):
                await read_into(got, pool.stream(dying, count))
            assert got == ["a"] * count
            assert is_free(pool, chosen)
            assert (rungs(chosen), status(chosen, "a")) == (2, "healthy"), "nothing was learned of the key"

    with no_leaks(files=False, threads=False):
        run(main)


# -- inside a task -----------------------------------------------------------------------------------------------------


@virtual
async def test_t42_a_task_that_reads_a_stream_lends_its_slot(log: str) -> None:
    for make in (lambda: rooms.TaskPool(), lambda: TaskPool(resources=keys("a"))):
        async with make() as pool:

            async def reads(*args: Any, pool: Any = pool) -> list[Any]:
                return [n for _, n in await all_of(pool.stream(combined_jobs.counts, log, 3))]

            assert await (await pool.submit(reads)) == [0, 1, 2]
            assert (pool.snapshot(0).active, pool.snapshot(0).waiting) == (0, 0)


@virtual
async def test_t42_streams_inside_streams(log: str) -> None:
    async with rooms.TaskPool() as pool:

        async def outer(depth: int) -> AsyncGenerator[int, None]:
            yield depth
            if depth:
                async for item in pool.stream(outer, depth - 1):
                    yield item

        assert await all_of(pool.stream(outer, 4)) == [4, 3, 2, 1, 0]
        assert pool.size() == 0


@virtual
async def test_t42_a_task_whose_key_the_stream_would_need_is_a_wait_cycle(log: str) -> None:
    chosen = ResourcePool([Resource("a", "secret-a", 1)])
    async with TaskPool(max_concurrent=5, resources=chosen) as pool:

        async def reads(key: Resource[str]) -> Any:
            return await all_of(pool.stream(combined_jobs.counts, log, 3))

        handle = await pool.submit(reads)
        with pytest.raises(WaitCycle):
            await handle
        assert is_free(pool, chosen)


@virtual
async def test_t42_a_task_that_reads_a_stream_of_another_pool() -> None:
    async with rooms.TaskPool() as outer, TaskPool(resources=two_keys()) as inner:

        async def reads() -> list[Any]:
            return [found["key"] for found in await all_of(inner.stream(combined_jobs.where))]

        handles = [await outer.submit(reads) for _ in range(5)]
        assert [end.result for end in await pool_wait(handles)] == [["a"]] * 5


# -- wrong input -------------------------------------------------------------------------------------------------------

WRONG: dict[str, Any] = {
    "a coroutine function": lambda: combined_jobs.show,
    "a plain function": lambda: combined_jobs.show_plainly,
    "a plain generator function": lambda: combined_jobs.plain_generator,
    "a routine that is no generator": lambda: combined_jobs.show_by_routine,
    "a generator that was called": lambda: combined_jobs.counts("path", 1),
    "a number": lambda: 3,
    "None": lambda: None,
    "a partial of a coroutine function": lambda: functools.partial(combined_jobs.show, x=1),
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("kind", ["plain", "resources"])
def test_r75_what_is_no_async_generator_function_is_refused_when_called(wrong: str, kind: str) -> None:
    @virtual
    async def main() -> None:
        async with Line(kind, None).pool() as pool:
            with pytest.raises(InvalidType) as caught:
                pool.stream(WRONG[wrong]())
            assert caught.value.remedy in str(caught.value)
            assert pool.snapshot(0).total == 0

    main()


@virtual
async def test_r75_submit_still_refuses_generators_and_names_stream() -> None:
    for pool in (rooms.TaskPool(), TaskPool(resources=keys("a"))):
        with pytest.raises(InvalidType, match="stream"):
            await pool.submit(combined_jobs.counts, "path", 1)
        await pool.close()


@EVERY
def test_w81_variables_of_a_stream_go_along(line: Line) -> None:
    async def main() -> None:
        async with line.pool(keys("a")) as pool:
            combined_jobs.tenant.set("acme")
            assert await all_of(pool.stream(combined_jobs.tenants)) == ["acme", "step 0", "step 1"]

    line(main)


@EVERY
def test_r75_an_item_that_cannot_be_pickled_is_the_streams_error(line: Line) -> None:
    async def locks(*args: Any) -> AsyncGenerator[Any, None]:
        import threading

        yield 1
        yield threading.Lock()

    async def main() -> None:
        chosen = keys("a")
        async with line.pool(chosen) as pool:
            stream = pool.stream(locks)
            assert await anext(stream) == 1
            if line.places:
                with pytest.raises(HeadgateError):
                    await anext(stream)
            else:
                assert await anext(stream)
            await stream.aclose()
            assert is_free(pool, chosen)

    line(main)


def test_r75_the_line_is_the_root_s_task_pool() -> None:
    assert headgate.TaskPool is TaskPool
    assert issubclass(TaskPool, rooms.TaskPool)
