"""W81, W82, W83, W86 and W32: values that go with a call and come back with what it gives."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import importlib
import os
import pickle
import threading
import warnings
import zlib
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

import headgate
from headgate import (
    ContextVar,
    InvalidType,
    LocalWorker,
    NoWorkersAvailable,
    RoutineExited,
    RoutineTimeout,
    WorkerPool,
    routine,
)
from tests.integration.context import travel_jobs as far
from tests.integration.context.conftest import Apart
from tests.integration.context.travel_jobs import NOTHING, UNSET, Planted, extra, region, tenant, values
from tests.integration.context.wiretap import Tap
from tests.support.workers.support import all_ready, lines, run, script, until

pytestmark = pytest.mark.integration

MB = 1 << 20
KEYS = {"tenant": "tests:travel_tenant", "region": "tests:travel_region", "extra": "travel.elsewhere:travel_extra"}

SWAPS = [far.swap, far.swap_plainly, far.swap_on_a_thread]
FAILURES = [far.swap_and_fail, far.swap_plainly_and_fail, far.swap_on_a_thread_and_fail]


def _name(fn: Any) -> str:
    return str(fn.__name__)


async def fresh(main: Callable[[], Any]) -> Any:
    """In a task of its own: what it sets is its own."""
    return await asyncio.create_task(main())


# -- W81: there and back ----------------------------------------------------------------------------------------------


def test_w81_keys_are_what_both_sides_agree_on() -> None:
    assert {name: variable.key for name, variable in far.BY_NAME.items()} == KEYS


def test_w81_a_worker_sees_what_is_set_and_its_own_defaults(shared: Apart) -> None:
    async def main() -> None:
        assert await far.see() == NOTHING
        assert await far.see_with_defaults() == ("LookupError", "nowhere")
        tenant.set("acme")
        assert await far.see() == ("acme", UNSET, UNSET)
        assert await far.see_with_defaults() == ("acme", "nowhere")
        region.set("north")
        extra.set(None)
        assert await far.see() == ("acme", "north", None)

    shared(main)


@pytest.mark.parametrize("fn", SWAPS, ids=_name)
def test_w81_changes_come_back_with_the_result(shared: Apart, fn: Any) -> None:
    async def main() -> None:
        tenant.set("mine")
        extra.set({"kept": 1})
        kept = extra.get()
        assert await fn(tenant="theirs", region="south") == ("mine", UNSET, {"kept": 1})
        assert values() == ("theirs", "south", {"kept": 1})
        assert extra.get() is kept, "what was not changed is still the caller's own object"
        assert await far.see() == ("theirs", "south", {"kept": 1})

    shared(main)


@pytest.mark.parametrize("fn", FAILURES, ids=_name)
def test_w81_changes_come_back_with_an_exception(shared: Apart, fn: Any) -> None:
    async def main() -> None:
        tenant.set("mine")
        with pytest.raises(Planted) as caught:
            await fn(tenant="theirs", extra=7)
        assert caught.value.args == ("planted", ("theirs", UNSET, 7))
        assert values() == ("theirs", UNSET, 7)

    shared(main)


def test_w81_changes_come_back_with_an_exit(shared: Apart) -> None:
    async def main() -> None:
        with pytest.raises(RoutineExited):
            await far.swap_and_exit(tenant="left")
        assert values() == ("left", UNSET, UNSET)

    shared(main)


def test_w81_changes_come_back_with_a_timeout(shared: Apart) -> None:
    async def main() -> None:
        with pytest.raises(RoutineTimeout):
            await far.swap_and_time_out(tenant="late")
        assert values() == ("late", UNSET, UNSET)

    shared(main)


def test_w81_changes_come_back_with_a_cancelled_end(shared: Apart, log: str) -> None:
    async def main() -> None:
        found: list[Any] = []

        async def caller() -> None:
            region.set("mine")
            try:
                await far.swap_until_cancelled(log, region="theirs", extra="in finally")
            except asyncio.CancelledError:
                found.append(values())
                raise

        task = asyncio.create_task(caller())
        await until(lambda: lines(log))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert found == [("begun", "theirs", "in finally")]
        assert values() == NOTHING

    shared(main)


def test_w81_changes_come_back_from_a_swallowed_cancellation(shared: Apart, log: str) -> None:
    async def main() -> None:
        async def caller() -> Any:
            return await far.swap_and_swallow(log, tenant="swallowed"), values()

        task = asyncio.create_task(caller())
        await until(lambda: lines(log))
        task.cancel()
        assert await task == ("swallowed", ("swallowed", UNSET, UNSET))

    shared(main)


def test_w81_a_routine_that_is_cancelled_by_a_timeout_of_the_caller(shared: Apart, log: str) -> None:
    async def main() -> None:
        async def expire(bound: asyncio.Timeout) -> None:
            await until(lambda: lines(log))
            bound.reschedule(asyncio.get_running_loop().time())

        async def bounded() -> None:
            async with asyncio.timeout(None) as bound:
                expiring.append(asyncio.create_task(expire(bound)))
                await far.swap_until_cancelled(log, region="cancelled")

        expiring: list[asyncio.Task[None]] = []
        with pytest.raises(TimeoutError):
            await bounded()
        await expiring[0]
        assert values() == ("begun", "cancelled", UNSET)

    shared(main)


def test_w81_what_is_unset_there_is_unset_here(shared: Apart) -> None:
    async def main() -> None:
        first = tenant.set("first")
        second = tenant.set("second")
        assert await far.undo(second) == ("first", UNSET, UNSET)
        assert tenant.get() == "first"
        assert await far.undo(first) == NOTHING
        with pytest.raises(LookupError):
            tenant.get()
        token = region.set("north")
        assert await far.undo(token) == NOTHING
        assert region.get() == "nowhere"

    shared(main)


def test_w81_the_values_are_those_of_the_await(shared: Apart) -> None:
    """A coroutine takes what is set when it is awaited, and a task what is set when it is made."""

    async def main() -> None:
        tenant.set("when called")
        call = far.see()
        tenant.set("when awaited")
        assert await call == ("when awaited", UNSET, UNSET)
        task = asyncio.create_task(far.swap(region="of the task"))
        tenant.set("after the task was made")
        assert await task == ("when awaited", UNSET, UNSET)
        assert values() == ("after the task was made", UNSET, UNSET)

    shared(main)


def test_w81_only_set_and_reset_count_as_changes(shared: Apart) -> None:
    async def main() -> None:
        mine = ["mine"]
        tenant.set(mine)
        await far.appends("theirs")
        assert tenant.get() is mine
        assert mine == ["mine"]
        mine.append("more")  # here it is the very object, and travels as it is now
        assert await far.see() == (["mine", "more"], UNSET, UNSET)

    shared(main)


@pytest.mark.parametrize("size", [MB, 8 * MB], ids=["1 MB", "8 MB"])
def test_w81_large_values(shared: Apart, size: int) -> None:
    async def main() -> None:
        data = os.urandom(size)
        tenant.set(data)
        assert await far.crc() == (size, zlib.crc32(data))
        assert tenant.get() is data
        there = await far.enlarge(size)
        assert len(extra.get()) == size
        assert zlib.crc32(extra.get()) == there
        async with aclosing(far.converses()) as stream:
            _, seen = await anext(stream)
            assert seen == (data, UNSET, extra.get())

    shared(main)


def test_w81_many_variables(shared: Apart) -> None:
    """Declared in a function, and known to the worker by its arguments only."""

    async def main() -> None:
        many = [ContextVar[Any](f"travel_many_{number}") for number in range(100)]

        @routine
        async def rotate() -> list[Any]:
            found = [one.get(UNSET) for one in many]
            for number, one in enumerate(many):
                one.set(number + 1)
            return found

        for number, one in enumerate(many[::2]):
            one.set(number)
        expected = [number // 2 if number % 2 == 0 else UNSET for number in range(100)]
        assert await rotate() == expected
        assert [one.get() for one in many] == list(range(1, 101))

    shared(main)


def test_w81_equal_and_identical_values_are_changes_all_the_same(shared: Apart) -> None:
    """Unset, set to its default, and set to what it was: only the first is unset."""

    async def main() -> None:
        region.set("nowhere")
        assert await far.see() == (UNSET, "nowhere", UNSET)
        token = region.set("nowhere")
        assert await far.swap(tenant=None) == (UNSET, "nowhere", UNSET)
        assert values() == (None, "nowhere", UNSET)
        region.reset(token)
        assert region.get(UNSET) == "nowhere"

    shared(main)


# -- W81: the wire ----------------------------------------------------------------------------------------------------


def test_w81_nothing_goes_over_when_nothing_is_set(shared: Apart, tap: Tap) -> None:
    async def main() -> None:
        assert await far.see() == NOTHING
        assert await far.see_with_defaults() == ("LookupError", "nowhere")
        assert await far.swap_plainly() == NOTHING
        with pytest.raises(Planted):
            await far.swap_and_fail()
        async with aclosing(far.ends_with()) as stream:
            assert [item async for item in stream] == [NOTHING]
        async with aclosing(far.see_stream(os.devnull)) as stream:
            for _ in range(3):
                assert await anext(stream) == NOTHING
            await stream.asend(1)
            await stream.athrow(Planted())

    shared(main)
    assert len(tap.calls) == 6
    assert len(tap.steps) >= 5
    assert len(tap.yields) >= 6
    assert len(tap.results) >= 5
    assert set(tap.contexts) == {b""}


def test_w81_nothing_goes_over_when_all_was_reset(shared: Apart, tap: Tap) -> None:
    async def main() -> None:
        token = tenant.set("for a moment")
        tenant.reset(token)
        del token
        assert await far.see() == NOTHING

    shared(main)
    assert [call.context for call in tap.calls] == [b""]


def test_w81_only_what_changed_comes_back(shared: Apart, tap: Tap) -> None:
    async def main() -> None:
        tenant.set("t" * 100_000)
        region.set("r" * 100_000)
        await far.crc_of_strings()
        await far.swap(extra="small")
        async with aclosing(far.see_stream(os.devnull)) as stream:
            for _ in range(4):
                await anext(stream)
            extra.set("also small")
            await anext(stream)

    shared(main)
    assert [len(call.context) > 200_000 for call in tap.calls] == [True, True, True]
    assert [result.context for result in tap.results[:1]] == [b""], "it changed nothing"
    assert all(len(result.context) < 2_000 for result in tap.results)
    assert all(len(item.context) < 2_000 for item in tap.yields)
    assert len(tap.steps) >= 4
    assert all(len(step.context) < 2_000 for step in tap.steps)


def test_w81_the_size_is_that_of_what_is_set(shared: Apart, tap: Tap) -> None:
    """Ten thousand sets, and as many variables that are declared and not set, add nothing."""

    async def main() -> None:
        declared = [ContextVar[int](f"travel_declared_{number}", default=1) for number in range(1000)]
        tenant.set("once")
        await far.see()
        for number in range(10_000):
            tenant.set(str(number))
        tenant.set("once")
        await far.see()
        assert len(declared) == 1000

    shared(main)
    first, second = (len(call.context) for call in tap.calls)
    assert 0 < first < 300
    assert abs(second - first) <= 16


# -- W81: nested ------------------------------------------------------------------------------------------------------


def test_w81_nested_over_several_workers(shared: Apart) -> None:
    async def main() -> None:
        down = [["top", *range(5, 5 - number, -1)] for number in range(6)]
        up: list[Any] = [*down[-1], 0]
        ups = []
        for depth in range(6):
            ups.append(up)
            up = [*up, -depth]
        pids: set[int] = set()
        for _ in range(20):
            tenant.set(["top"])
            found = await far.relay(5)
            assert [seen for _, seen, _ in found] == down
            assert [seen for _, _, seen in found] == ups[::-1]
            assert tenant.get() == up
            pids |= {pid for pid, _, _ in found}
            if len(pids) == 2:
                return
        pytest.fail("all on one worker")

    shared(main)


def test_w81_an_exception_through_several_workers(shared: Apart) -> None:
    async def main() -> None:
        tenant.set([])
        with pytest.raises(Planted, match="at the bottom"):
            await far.relay_that_fails(3)
        assert tenant.get() == [3, 2, 1, 0, -1, -2, -3]

    shared(main)


def test_w81_a_function_that_is_given_to_a_routine(shared: Apart) -> None:
    async def main() -> None:
        tenant.set("mine")
        assert await far.apply(far.swap) == ("mine", UNSET, UNSET)
        assert await far.apply(far.apply, far.make_token, "deep") is not None
        assert tenant.get() == "deep"

    shared(main)


def test_w81_in_place(shared: Apart) -> None:
    """`do_dispatch(False)`: the same rule, here and on a worker."""

    async def main() -> None:
        tenant.set("mine")
        with headgate.do_dispatch(False):
            for number, fn in enumerate(SWAPS):
                before = values()
                assert await fn(region=number) == before
                assert values() == ("mine", number, UNSET)
            for fn in FAILURES:
                with pytest.raises(Planted):
                    await fn(extra=_name(fn))
                assert extra.get() == _name(fn)
            lock = threading.Lock()  # nothing travels, so nothing must be able to
            tenant.set(lock)
            assert (await far.see())[0] is lock
            tenant.set("mine")
            async with aclosing(far.converses()) as stream:
                assert (await anext(stream))[1][0] == "mine"
                assert tenant.get() == "worker 0"
                tenant.set("mine")
                assert (await stream.asend("x")) == ("x", ("mine", 2, _name(FAILURES[-1])))
        assert extra.get() == "closed"
        found = await far.nested_here()
        assert found[0][0] == "worker 1"
        assert [one[0] for one in found[1:]] == ["in place", "in place"]
        assert tenant.get() == "in place"

    shared(main)


# -- W81: threads, tasks, callbacks on the worker ---------------------------------------------------------------------


def test_w81_threads_of_a_routine_read_what_it_has(shared: Apart) -> None:
    async def main() -> None:
        region.set("north")
        first, after, again = await far.through_to_thread()
        assert first == ("set before", "north", UNSET)
        assert after == first, "a thread has a copy"
        assert again == first
        assert values() == first

    shared(main)


def test_w82_tasks_of_a_routine_fork(shared: Apart) -> None:
    async def main() -> None:
        *tasks, after = await far.through_tasks()
        expected = ("parent", UNSET, UNSET)
        assert tasks == [(expected, f"{word} far") for word in ("one", "two", "three")]
        assert after == expected
        assert values() == expected

    shared(main)


def test_w81_callbacks_of_a_routine(shared: Apart) -> None:
    async def main() -> None:
        assert await far.through_callbacks() == ["armed", "armed"]
        assert tenant.get() == "later"

    shared(main)


def test_w81_a_thread_with_a_loop_of_its_own(shared: Apart) -> None:
    """A call from another loop of this process takes along what is set there."""

    async def main() -> None:
        tenant.set("main")

        def there() -> Any:
            tenant.set("thread")

            async def calls() -> Any:
                return await far.swap(tenant="back"), values()

            return asyncio.run(calls())

        assert await asyncio.to_thread(there) == (("thread", UNSET, UNSET), ("back", UNSET, UNSET))
        assert tenant.get() == "main"

    shared(main)


def test_w81_a_task_of_a_task_pool_has_the_context_of_its_submitter(shared: Apart) -> None:
    async def main() -> None:
        async with headgate.TaskPool("travel", max_concurrent=1) as tasks:
            handles = []
            for number in range(3):
                tenant.set(number)
                handles.append(await tasks.submit(swap_item, f"item {number}"))
            tenant.set("later")
            expected = [(f"item {number}", (number, UNSET, UNSET)) for number in range(3)]
            assert [await handle for handle in handles] == expected
        assert values() == ("later", UNSET, UNSET)

    shared(main)


def test_w82_map_forks(shared: Apart) -> None:
    """Every call has what the caller had, and none what another set."""

    async def main() -> None:
        tenant.set("mine")
        found = [one async for one in headgate.map(swap_item, range(20))]
        assert found == [(number, ("mine", UNSET, UNSET)) for number in range(20)]
        assert values() == ("mine", UNSET, UNSET)
        found = [one async for one in headgate.map(swap_item, range(20), ordered=False, window=3)]
        assert sorted(found) == [(number, ("mine", UNSET, UNSET)) for number in range(20)]

    shared(main)


@routine
async def swap_item(number: Any) -> tuple[Any, Any]:
    before = values()
    tenant.set(number)
    await asyncio.sleep(0)
    assert tenant.get() == number
    return number, before


def test_w81_a_broadcast_takes_the_values_to_each(shared: Apart) -> None:
    async def main() -> None:
        tenant.set("all")
        assert list((await shared.pool.broadcast(far.see)).values()) == [("all", UNSET, UNSET)] * 2

    shared(main)


# -- W82: isolation ---------------------------------------------------------------------------------------------------


def test_w82_hundreds_at_once_never_mix(shared: Apart) -> None:
    async def one(number: int) -> None:
        if number % 7:
            tenant.set(f"caller {number}")
        mine = f"caller {number}" if number % 7 else UNSET
        assert tenant.get(UNSET) == mine
        seen = await far.after_a_while(number % 5 / 1000, f"worker {number}")
        assert seen == [mine, mine, f"worker {number}.0", f"worker {number}.1"]
        assert tenant.get() == f"worker {number}.2"
        fn = SWAPS[number % 3]
        assert (await fn(tenant=f"again {number}"))[0] == f"worker {number}.2"
        assert tenant.get() == f"again {number}"

    async def main() -> None:
        await asyncio.gather(*map(one, range(400)))
        assert values() == NOTHING

    shared(main)


def test_w82_streams_at_once_never_mix(shared: Apart) -> None:
    async def one(number: int) -> None:
        async with aclosing(far.converses()) as stream:
            for step in range(4):
                tenant.set((number, step))
                assert await anext(stream) == ("next", ((number, step), UNSET, UNSET))
                assert tenant.get() == f"worker {step}"
                await asyncio.sleep(0)

    async def main() -> None:
        await asyncio.gather(*map(one, range(60)))
        assert values() == NOTHING

    shared(main)


def test_w82_children_on_workers_never_mix(shared: Apart) -> None:
    async def main() -> None:
        before, after = await far.fans_out(50)
        assert before == [("fan", UNSET, UNSET)] * 50
        assert after == "fan"
        assert tenant.get() == "fan"

    shared(main)


def test_w82_nothing_is_left_for_the_next_call_on_that_worker() -> None:
    """One worker, so that it is the same; threads that are used again, too."""

    async def main() -> None:
        async with WorkerPool(spawn=1):
            for fn in (*SWAPS, *SWAPS):

                async def dirty(fn: Any = fn) -> None:
                    extra.set("sent")
                    await fn(tenant="left", region="behind")
                    assert values() == ("left", "behind", "sent")

                await asyncio.create_task(dirty())
                for other in (*SWAPS, far.see):
                    assert await other() == NOTHING
            for failing in FAILURES:

                async def fails(failing: Any = failing) -> None:
                    with pytest.raises(Planted):
                        await failing(tenant="left")

                await asyncio.create_task(fails())
                assert await far.swap_plainly() == NOTHING
            stream = far.holds_a_value()
            await asyncio.create_task(_first(stream))
            assert await far.see() == NOTHING
            await stream.aclose()

    run(main)


async def _first(stream: Any) -> Any:
    return await anext(stream)


def test_w82_two_tasks_with_one_awaiting_the_other(shared: Apart) -> None:
    async def main() -> None:
        tenant.set("parent")

        async def child() -> Any:
            before = await far.swap(tenant="child")
            return before, tenant.get()

        assert await asyncio.create_task(child()) == (("parent", UNSET, UNSET), "child")
        assert tenant.get() == "parent"
        assert await headgate.create_task(child()) == (("parent", UNSET, UNSET), "child")
        assert tenant.get() == "parent"
        assert await child() == (("parent", UNSET, UNSET), "child")
        assert tenant.get() == "child"

    shared(main)


# -- W81: generators --------------------------------------------------------------------------------------------------


def test_w81_generators_exchange_at_each_step(shared: Apart, log: str) -> None:
    async def main() -> None:
        stream = far.converses(log)
        tenant.set("before the first step")
        assert await anext(stream) == ("next", ("before the first step", UNSET, UNSET))
        assert values() == ("worker 0", UNSET, UNSET)

        tenant.set("with next")
        assert await anext(stream) == ("next", ("with next", UNSET, UNSET))
        assert tenant.get() == "worker 1"

        region.set("with send")
        assert await stream.asend("sent") == ("sent", ("worker 1", "with send", UNSET))
        assert values() == ("worker 2", "with send", UNSET)

        token = region.set("for a moment")
        region.reset(token)
        extra.set("with throw")
        assert await stream.athrow(Planted("it")) == ("thrown it", ("worker 2", "with send", "with throw"))
        assert values() == ("worker 3", "with send", "with throw")

        tenant.set("with close")
        await stream.aclose()
        assert lines(log) == [str(("with close", "with send", "with throw"))]
        assert values() == ("with close", "with send", "closed")

    shared(main)


def test_w81_a_variable_that_is_unset_between_two_steps(shared: Apart) -> None:
    async def main() -> None:
        token = region.set("set")
        async with aclosing(far.see_stream(os.devnull)) as stream:
            assert await anext(stream) == (UNSET, "set", UNSET)
            region.reset(token)
            assert await anext(stream) == NOTHING
            region.set("again")
            assert await anext(stream) == (UNSET, "again", UNSET)

    shared(main)


def test_w81_the_end_of_a_generator(shared: Apart) -> None:
    async def main() -> None:
        tenant.set("mine")
        seen = [(item, values()) async for item in far.ends_with(tenant="ended", region="too")]
        assert seen == [(("mine", UNSET, UNSET), ("mine", UNSET, UNSET))]
        assert values() == ("ended", "too", UNSET)
        stream = far.fails_with(tenant="failed")
        await anext(stream)
        with pytest.raises(Planted, match="in the generator"):
            await anext(stream)
        assert tenant.get() == "failed"

    shared(main)


def test_w81_a_step_that_is_cancelled(shared: Apart, log: str) -> None:
    async def main() -> None:
        found: list[Any] = []

        async def reads() -> None:
            stream = far.sets_while_cancelled(log)
            await anext(stream)
            try:
                await anext(stream)
            except asyncio.CancelledError:
                found.append(values())

        task = asyncio.create_task(reads())
        await until(lambda: lines(log))
        task.cancel()
        await task
        assert found == [("begun", "cancelled", UNSET)]

    shared(main)


def test_w81_a_loop_that_is_left(shared: Apart, log: str) -> None:
    """`break` inside `aclosing`: as locally, what `finally` set is here; without, the loop closes it elsewhere."""

    async def main() -> None:
        async with aclosing(far.converses()) as stream:
            async for _, _seen in stream:
                tenant.set("left")
                break
        assert values() == ("left", UNSET, "closed")
        extra.set("mine")
        async for _, _seen in far.converses(log):
            break
        await until(lambda: lines(log))
        assert values() == ("worker 0", UNSET, "mine")

    shared(main)


def test_w81_an_exception_of_the_reader(shared: Apart) -> None:
    async def main() -> None:
        async def reads() -> None:
            async with aclosing(far.converses()) as stream:
                async for _ in stream:
                    tenant.set("mine")
                    raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            await reads()
        assert values() == ("mine", UNSET, "closed")

    shared(main)


def test_w82_a_generator_has_the_context_of_whoever_asks(shared: Apart) -> None:
    """As locally: the same generator, read by two tasks in turn, has the values of each."""

    async def main() -> None:
        stream = far.holds_a_value()
        local = far.holds_a_value.__wrapped__()

        async def one(source: Any, value: str | None) -> list[Any]:
            if value is not None:
                region.set(value)
            return [await anext(source), values()]

        for source in (local, stream):
            assert await asyncio.create_task(one(source, "first")) == [("of the generator", "first", UNSET)] * 2
            assert await asyncio.create_task(one(source, "second")) == [(UNSET, "second", UNSET)] * 2
            assert await asyncio.create_task(one(source, None)) == [NOTHING] * 2
            assert await one(source, None) == [NOTHING] * 2
        await stream.aclose()
        await local.aclose()

    shared(main)


def test_w81_a_generator_between_workers(shared: Apart) -> None:
    async def main() -> None:
        tenant.set("mine")
        seen, closed = await far.reads_a_stream()
        assert seen == [(("next", (f"reader {n}", UNSET, UNSET)), f"worker {n}") for n in range(3)]
        assert closed == "closed"
        assert values() == ("worker 2", UNSET, "closed")

    shared(main)


def test_w81_a_generator_that_calls_and_reads(shared: Apart) -> None:
    async def main() -> None:
        tenant.set("mine")
        async with aclosing(far.delegates(3)) as stream:
            before, seen, after = await anext(stream)
            assert before == ("mine", UNSET, UNSET)
            assert seen == ("mine", "nested 0", UNSET)
            assert after == values() == ("worker 0", "nested 0", UNSET)
            tenant.set("again")
            region.set("mine")
            before, seen, after = await anext(stream)
            assert before == ("again", "mine", UNSET)
            assert seen == ("again", "nested 1", UNSET)
            assert after == values() == ("worker 1", "nested 1", UNSET)
        assert extra.get() == "closed"

    shared(main)


def test_w81_with_prefetch_changes_come_with_their_item(shared: Apart, log: str) -> None:
    async def main() -> None:
        async with aclosing(far.runs_ahead(log)) as stream:
            for number in range(12):
                assert (await anext(stream))[0] == number
                await until(lambda number=number: len(lines(log)) > number + 1)  # it has set the next ones already
                assert tenant.get() == number

    shared(main)


def test_w81_with_prefetch_the_readers_changes_arrive_and_stay(shared: Apart, log: str) -> None:
    async def main() -> None:
        region.set("first")
        async with aclosing(far.runs_ahead(log)) as stream:
            assert await anext(stream) == (0, "first")
            await until(lambda: len(lines(log)) > 1)
            region.set("second")
            extra.set("of the reader")
            for number in range(1, 50):
                item, seen = await anext(stream)
                assert item == tenant.get() == number
                assert values()[1:] == ("second", "of the reader"), "an older item takes nothing back"
                if seen == "second":
                    break
            else:
                pytest.fail("it never saw what was set here")

    shared(main)


# -- W81: workers that are lost ---------------------------------------------------------------------------------------


def test_w81_a_retry_begins_with_the_callers_values(log: str) -> None:
    async def main() -> None:
        async with WorkerPool(spawn=2) as pool:
            tenant.set("mine")
            assert await far.dies_once(log) == ["mine", UNSET, UNSET]
            assert lines(log) == [str(("mine", UNSET, UNSET))] * 2
            assert values() == ("second attempt", UNSET, UNSET)
            await all_ready(pool, 2)

    run(main)


# -- W81: functions by value ------------------------------------------------------------------------------------------


def test_w81_a_function_by_value_carries_no_old_value(shared: Apart) -> None:
    """It is pickled while something is set, and goes over once: later calls must not find that."""

    async def main() -> None:
        mine: ContextVar[str] = ContextVar("travel_mine")
        defaulted: ContextVar[str] = ContextVar("travel_defaulted", default="default")

        @routine
        async def look() -> tuple[str, str]:
            return mine.get(UNSET), defaulted.get()

        async def first() -> None:
            mine.set("once")
            defaulted.set("once")
            for _ in range(4):
                assert await look() == ("once", "once")

        await fresh(first)
        for _ in range(4):
            assert await look() == (UNSET, "default")

        async def second() -> None:
            mine.set("twice")
            for _ in range(4):
                assert await look() == ("twice", "default")

        await fresh(second)
        for _ in range(4):
            assert await look() == (UNSET, "default")

    shared(main)


def test_w81_a_generator_by_value(shared: Apart) -> None:
    async def main() -> None:
        mine: ContextVar[Any] = ContextVar("travel_of_a_closure")

        @routine
        async def numbers() -> AsyncGenerator[Any, None]:
            while True:
                seen = mine.get(UNSET)
                mine.set(f"{seen}!")
                yield seen

        async with aclosing(numbers()) as stream:
            assert await anext(stream) == UNSET
            assert mine.get() == f"{UNSET}!"
            mine.set("mine")
            assert await anext(stream) == "mine"
            assert mine.get() == "mine!"

    shared(main)


def test_w81_a_variable_as_an_argument_and_as_a_result(shared: Apart) -> None:
    async def main() -> None:
        @routine
        async def through(variable: Any) -> tuple[Any, Any, bool]:
            found = variable.get(UNSET)
            variable.set("through")
            return found, variable, variable is far.tenant

        assert await through(tenant) == (UNSET, tenant, True)
        assert tenant.get() == "through"
        local: ContextVar[Any] = ContextVar("travel_argument")
        local.set("local")
        found, back, _ = await through(local)
        assert found == "local"
        assert back is local
        assert local.get() == "through"

    shared(main)


def test_w81_the_frame_wins_over_a_variable_that_travels_by_itself(shared: Apart) -> None:
    """A variable that was pickled earlier, with an older value, among the arguments."""

    async def main() -> None:
        old = tenant.set("older")
        data = pickle.dumps(tenant)
        tenant.reset(old)

        @routine
        async def load(pickled: bytes) -> Any:
            variable = pickle.loads(pickled)
            return variable is far.tenant, variable.get(UNSET)

        tenant.set("newer")
        assert await load(data) == (True, "newer")
        assert tenant.get() == "newer"

    shared(main)


MAIN = """
import asyncio
import os
import headgate
from headgate import ContextVar, WorkerPool, routine

tenant = ContextVar("tenant")
region = ContextVar("region", default="nowhere")

@routine
async def swap(value):
    before = tenant.get("unset"), region.get()
    tenant.set(value)
    return before

@routine
def plainly(value):
    before = tenant.get("unset"), region.get()
    tenant.set(value)
    return before

@routine
async def nested(depth):
    seen = tenant.get("unset")
    tenant.set(f"{seen}{depth}")
    return [seen, *(await nested(depth - 1) if depth else []), tenant.get()]

@routine
async def stream():
    while True:
        seen = tenant.get("unset")
        tenant.set(f"{seen}!")
        yield seen

@routine
async def undo(token):
    token.var.reset(token)
    return token.var is tenant, tenant.get("unset")

async def main():
    async with WorkerPool(spawn=2):
        async def one():
            tenant.set("mine")
            for fn in (swap, plainly) * 2:
                tenant.set("mine")
                assert await fn("theirs") == ("mine", "nowhere"), fn
                assert tenant.get() == "theirs"
            region.set("north")
            assert await swap("x") == ("theirs", "north")
            tenant.set("")
            assert await nested(3) == ["", "3", "32", "321", "3210", "3210", "3210", "3210"]
            assert tenant.get() == "3210"

        await asyncio.create_task(one())
        for fn in (swap, plainly) * 3:
            assert await asyncio.create_task(fn("left")) == ("unset", "nowhere"), fn
        try:
            tenant.get()
        except LookupError:
            pass
        else:
            raise AssertionError(tenant.get())
        numbers = stream()
        assert await anext(numbers) == "unset"
        tenant.set("here")
        assert await anext(numbers) == "here"
        assert tenant.get() == "here!"
        await numbers.aclose()
        token = tenant.set("for a moment")
        assert await undo(token) == (True, "here!")
        assert tenant.get() == "here!"
        try:
            tenant.reset(token)
        except RuntimeError:
            pass
        else:
            raise AssertionError("used twice")
    print("done", tenant.key)

if __name__ == "__main__":
    asyncio.run(main())
"""


def test_w81_variables_of_a_script(tmp_path: Path) -> None:
    done = script(MAIN, tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "done __main__:tenant\n", "")


# -- W83: variables that a worker does not know -----------------------------------------------------------------------


class Late:
    """A module that this process has imported and no worker has, as yet."""

    _number = 0

    def __init__(self, folder: Path, declaration: str = 'ContextVar("late", namespace={namespace!r})') -> None:
        Late._number += 1
        self.name = f"headgate_late_{os.getpid()}_{Late._number}"
        self.key = f"{self.name}.space:late"
        body = declaration.format(namespace=f"{self.name}.space")
        (folder / f"{self.name}.py").write_text(f"from headgate import ContextVar\nlate = {body}\n")
        importlib.invalidate_caches()
        self.late: ContextVar[Any] = importlib.import_module(self.name).late


def test_w83_a_stub_is_promoted_in_place(shared: Apart) -> None:
    async def main() -> None:
        module = Late(shared.folder)
        assert module.late.key == module.key
        module.late.set("early")
        assert await far.import_late(module.name, module.key) == [
            True,
            True,
            "early",
            "late",
            f"{module.name}.space",
            module.key,
        ]
        assert module.late.get() == "early"

    shared(main)


def test_w83_a_variable_declared_late_changes_and_comes_back(shared: Apart) -> None:
    async def main() -> None:
        module = Late(shared.folder)
        module.late.set("early")
        assert await far.import_late_and_set(module.name, "back") == "early"
        assert module.late.get() == "back"
        assert await far.get_late(module.name) == "back"

    shared(main)


def test_w83_a_promoted_variable_has_the_default_of_its_declaration(shared: Apart) -> None:
    async def main() -> None:
        module = Late(shared.folder, 'ContextVar("late", namespace={namespace!r}, default="default")')

        async def early() -> None:
            module.late.set("early")
            for _ in range(4):
                assert await far.get_late(module.name) == "early"

        await fresh(early)
        for _ in range(4):
            assert await far.get_late(module.name) == "default"

    shared(main)


def test_w83_a_stub_lives_as_long_as_a_stream(shared: Apart) -> None:
    async def main() -> None:
        module = Late(shared.folder)
        module.late.set("early")
        async with aclosing(far.stream_late(module.name)) as stream:
            assert await anext(stream) == "begun"
            assert module.late.get() == "early"
            assert await anext(stream) == "early"
            assert await anext(stream) == "third"
            assert module.late.get() == "third"

    shared(main)


def test_w83_a_stub_that_is_changed_before_it_is_declared(shared: Apart) -> None:
    """Between two steps its value changes here, while nobody there has declared it."""

    async def main() -> None:
        module = Late(shared.folder)
        module.late.set("early")
        async with aclosing(far.stream_late(module.name)) as stream:
            assert await anext(stream) == "begun"
            module.late.set("changed")
            assert await anext(stream) == "changed"

    shared(main)


def test_w83_a_stub_goes_on_with_a_nested_call(shared: Apart) -> None:
    """A worker that does not know it hands it on."""

    async def main() -> None:
        module = Late(shared.folder)
        module.late.set("handed on")
        for _ in range(4):
            assert await far.apply(far.apply, far.get_late, module.name) == "handed on"
        assert await far.apply(far.import_late_and_set, module.name, "back") == "handed on"
        assert module.late.get() == "back"

    shared(main)


def test_w83_what_is_never_declared_is_dropped(shared: Apart) -> None:
    async def main() -> None:
        local: ContextVar[Any] = ContextVar("travel_never", namespace="travel.never")
        token = local.set({"value": 1})
        for _ in range(4):
            assert await far.known(local.key), "while the call runs there"
        with contextlib.suppress(Planted):
            await far.swap_and_fail()
        async with aclosing(far.see_stream(os.devnull)) as stream:
            await anext(stream)
            await anext(stream)
        assert local.get() == {"value": 1}, "nothing is lost here"
        local.reset(token)
        for _ in range(4):
            assert await shared.pool.broadcast(far.known, local.key) == dict.fromkeys(
                (view.uid for view in shared.pool.workers()), False
            )

    shared(main)


# -- W86: the chain ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("something", [True, False], ids=["set", "nothing set"])
def test_w86_a_dispatch_keeps_the_chain(shared: Apart, something: bool) -> None:
    async def main() -> None:
        if something:
            tenant.set("mine")
        mine = headgate.current_context().id
        assert isinstance(mine, str)
        assert await far.my_chain() == mine
        assert await far.my_chain_plainly() == mine
        assert await far.my_chain_on_a_thread() == mine
        assert set(await far.chains(3)) == {mine}
        async with aclosing(far.chain_stream()) as stream:
            assert [await anext(stream) for _ in range(3)] == [mine] * 3
        with headgate.do_dispatch(False):
            assert await far.my_chain() == mine
        assert headgate.current_context().id == mine

    shared(main)


def test_w86_whoever_asks_first(shared: Apart) -> None:
    async def main() -> None:
        there = await far.my_chain()
        assert headgate.current_context().id == there
        assert await far.my_chain() == there

    shared(main)


def test_w86_tasks_and_copies_have_chains_of_their_own(shared: Apart) -> None:
    async def main() -> None:
        tenant.set("mine")
        mine = headgate.current_context().id
        parent, child, copied, again = await far.chain_of_a_task()
        assert parent == again == mine
        assert len({mine, child, copied}) == 3
        others = await asyncio.gather(*(far.my_chain() for _ in range(20)))
        assert len({mine, *others}) == 21

    shared(main)


@pytest.mark.parametrize("something", [True, False], ids=["set", "nothing set"])
@pytest.mark.parametrize("where", ["local", "far"])
def test_w86_a_generator_has_the_chain_of_whoever_asks(shared: Apart, where: str, something: bool) -> None:
    async def main() -> None:
        async def child(source: Any) -> tuple[str, str]:
            return headgate.current_context().id, await anext(source)

        if something:
            tenant.set("mine")
        mine = headgate.current_context().id
        stream = far.chain_stream() if where == "far" else far.chain_stream.__wrapped__()
        assert await anext(stream) == mine
        here, there = await asyncio.create_task(child(stream))
        assert here != mine
        assert there == here
        assert await anext(stream) == mine
        await stream.aclose()

    shared(main)


def test_w86_a_dispatch_in_a_context_that_was_given(shared: Apart) -> None:
    async def main() -> None:
        tenant.set("mine")
        context = headgate.copy_context()
        tenant.set("later")

        async def there() -> Any:
            return await far.my_chain(), await far.swap(tenant="theirs")

        assert await headgate.create_task(there(), context=context) == (context.id, ("mine", UNSET, UNSET))
        assert context[tenant] == "theirs"
        assert tenant.get() == "later"
        task: Any = asyncio.create_task(there(), context=context)  # type: ignore[arg-type]
        assert await task == (context.id, ("theirs", UNSET, UNSET))

    shared(main)


# -- W85: tokens that travel ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fn", [far.undo, far.undo_plainly, far.undo_on_another], ids=_name)
def test_w85_a_token_is_used_on_a_worker(shared: Apart, fn: Any) -> None:
    async def main() -> None:
        tenant.set("first")
        token = tenant.set("second")
        assert await fn(token) == ("first", UNSET, UNSET)
        assert tenant.get() == "first"
        with pytest.raises(RuntimeError):
            tenant.reset(token)
        with pytest.raises(RuntimeError):
            await fn(token)
        assert tenant.get() == "first"

    shared(main)


def test_w85_a_token_that_was_used_here_is_used_there(shared: Apart) -> None:
    async def main() -> None:
        token = tenant.set("mine")
        tenant.reset(token)
        tenant.set("other")
        with pytest.raises(RuntimeError):
            await far.undo(token)
        assert tenant.get() == "other"

    shared(main)


def test_w85_a_token_of_a_worker(shared: Apart) -> None:
    async def main() -> None:
        tenant.set("mine")
        token = await far.make_token("theirs")
        assert isinstance(token, headgate.Token)
        assert token.var is tenant
        assert token.old_value == "mine"
        assert tenant.get() == "theirs"
        with pytest.raises(ValueError, match=r".") as caught:
            region.reset(token)
        assert not isinstance(caught.value, RuntimeError)
        tenant.reset(token)
        assert tenant.get() == "mine"
        with pytest.raises(RuntimeError):
            tenant.reset(token)
        with pytest.raises(RuntimeError):
            await far.undo(token)

    shared(main)


def test_w85_a_token_of_an_unset_variable(shared: Apart) -> None:
    async def main() -> None:
        token = await far.make_token("theirs")
        assert token.old_value is contextvars.Token.MISSING
        assert token.old_value is headgate.Token.MISSING
        assert await far.look_at_token(token) == [True, True, True, True]
        tenant.reset(token)
        assert values() == NOTHING
        second = tenant.set("a")
        third = tenant.set("b")
        assert await far.look_at_token(second) == [True, True, True, True]
        assert await far.look_at_token(third) == [True, True, False, "a"]

    shared(main)


def test_w85_a_token_in_an_exception(shared: Apart) -> None:
    async def main() -> None:
        with pytest.raises(Planted) as caught:
            await far.fail_with_token("theirs")
        [token] = caught.value.args
        assert tenant.get() == "theirs"
        tenant.reset(token)
        assert values() == NOTHING

    shared(main)


def test_w85_a_copy_that_comes_home_is_the_same_token(shared: Apart) -> None:
    async def main() -> None:
        token = tenant.set("mine")
        assert await far.same_token(token) is token
        assert await far.apply(far.same_token, token) is token
        assert (await far.same_token([token, {"again": token}]))[1]["again"] is token
        tenant.reset(token)
        assert await far.same_token(token) is token

    shared(main)


def test_w85_tokens_in_streams(shared: Apart) -> None:
    async def main() -> None:
        tenant.set("base")
        mine = tenant.set("mine")
        async with aclosing(far.keeps_a_token(mine)) as stream:
            theirs = await anext(stream)
            assert tenant.get() == "of the generator"
            tenant.reset(theirs)
            assert tenant.get() == "mine"
            assert await anext(stream) == "reset"
            assert tenant.get() == "base"
        with pytest.raises(RuntimeError):
            tenant.reset(mine)
        async with aclosing(far.takes_tokens()) as stream:
            await anext(stream)
            mine = tenant.set("more")
            assert await stream.asend(mine) == ("base", UNSET, UNSET)
            assert tenant.get() == "base"
            assert await stream.asend(mine) == "RuntimeError"
            with pytest.raises(RuntimeError):
                tenant.reset(mine)

    shared(main)


def test_w85_a_token_that_is_used_here_while_a_stream_keeps_a_copy(shared: Apart) -> None:
    """It does not travel again: that it was used does."""

    async def main() -> None:
        mine = tenant.set("mine")
        async with aclosing(far.keeps_a_token(mine)) as stream:
            await anext(stream)
            tenant.reset(mine)
            assert await anext(stream) == "RuntimeError"
        assert values() == NOTHING

    shared(main)


def test_w85_a_token_of_another_task_is_refused_there(shared: Apart) -> None:
    async def main() -> None:
        token = tenant.set("mine")

        async def child() -> None:
            with pytest.raises(ValueError, match=r".") as caught:
                await far.undo(token)
            assert not isinstance(caught.value, RuntimeError)
            assert tenant.get() == "mine"

        await asyncio.create_task(child())
        assert await far.undo(token) == NOTHING
        theirs = await asyncio.create_task(far.make_token("of a task"))
        with pytest.raises(ValueError, match=r"."):
            tenant.reset(theirs)
        with pytest.raises(ValueError, match=r"."):
            await far.undo(theirs)

    shared(main)


@pytest.mark.parametrize("where", ["local", "far"])
def test_w85_a_token_that_a_generator_made_for_another_task(shared: Apart, where: str) -> None:
    """As locally: the generator runs in the Context of whoever asks, and its token is of that one."""

    async def main() -> None:
        async def child() -> Any:
            return await anext(stream), values()

        stream = far.makes_and_undoes() if where == "far" else far.makes_and_undoes.__wrapped__()
        assert await anext(stream) == "made"
        assert tenant.get() == "made"
        assert await asyncio.create_task(child()) == ("ValueError", ("made", UNSET, UNSET))
        assert await anext(stream) == "undone"
        assert values() == NOTHING
        await stream.aclose()

    shared(main)


def test_w85_one_token_for_many(shared: Apart) -> None:
    """Each of them a task: a token of the parent is of no use to any."""

    async def main() -> None:
        token = tenant.set("mine")
        found = await asyncio.gather(*(far.undo(token) for _ in range(20)), return_exceptions=True)
        assert {type(one) for one in found} == {ValueError}
        tenant.reset(token)

    shared(main)


# -- W32: hooks -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hook", [far.refuses_tenants, far.refuses_tenants_later], ids=["sync", "async"])
def test_w32_a_hook_sees_the_callers_values(what_grpc_opens_once: None, hook: Any) -> None:
    def worker(*tags: str, credentials: Any = None) -> LocalWorker:
        return LocalWorker(*tags, credentials=credentials, backpressure=hook)

    async def main() -> None:
        async with WorkerPool(spawn=1, worker=worker):
            assert await far.see() == NOTHING
            tenant.set("welcome")
            assert await far.see() == ("welcome", UNSET, UNSET)
            tenant.set("refused")
            with pytest.raises(NoWorkersAvailable, match="backpressure"):
                await far.swap(tenant="changed")
            assert tenant.get() == "refused"
            with pytest.raises(NoWorkersAvailable, match="backpressure"):
                await anext(far.converses())

            async def other(name: str) -> Any:
                tenant.set(name)
                return await far.swap_plainly()

            found = await asyncio.gather(
                *(other("refused" if number % 2 else f"tenant {number}") for number in range(20)),
                return_exceptions=True,
            )
            for number, one in enumerate(found):
                if number % 2:
                    assert isinstance(one, NoWorkersAvailable)
                else:
                    assert one == (f"tenant {number}", UNSET, UNSET)
            tenant.set("welcome again")
            assert (await far.see())[0] == "welcome again"

    run(main)


# -- what cannot be sent ----------------------------------------------------------------------------------------------


def test_w84_a_value_that_cannot_be_pickled(shared: Apart, tap: Tap, log: str) -> None:
    async def main() -> None:
        region.set("sound")
        extra.set(threading.Lock())
        for fn in (far.see_and_note, far.fail_and_note, far.apply):
            with pytest.raises(InvalidType, match=KEYS["extra"]) as caught:
                await fn(log)
            assert isinstance(caught.value, TypeError)
            assert isinstance(caught.value, headgate.HeadgateError)
        with pytest.raises(InvalidType, match=KEYS["extra"]):
            await anext(far.see_stream(log))
        assert extra.get() is not None
        assert region.get() == "sound"
        extra.set("sound too")
        assert await far.see() == (UNSET, "sound", "sound too")

    shared(main)
    assert len(tap.calls) == 1
    assert lines(log) == []


STEPS = {
    "next": anext,
    "send": lambda stream: stream.asend(1),
    "throw": lambda stream: stream.athrow(Planted()),
}


@pytest.mark.parametrize("step", STEPS)
def test_w84_a_step_that_cannot_be_sent(shared: Apart, log: str, step: str) -> None:
    async def main() -> None:
        stream = far.see_stream(log)
        assert await anext(stream) == NOTHING
        token = tenant.set(threading.Lock())
        with pytest.raises(InvalidType, match=KEYS["tenant"]):
            await STEPS[step](stream)
        tenant.reset(token)
        assert await far.see() == NOTHING
        await stream.aclose()
        await until(lambda: lines(log) == ["ran", "closed"])

    shared(main)


def test_w84_a_stream_is_closed_though_a_value_cannot_be_sent(shared: Apart, log: str) -> None:
    async def main() -> None:
        stream = far.see_stream(log)
        assert await anext(stream) == NOTHING
        tenant.set(threading.Lock())
        with warnings.catch_warnings(), contextlib.suppress(InvalidType):
            warnings.simplefilter("ignore", headgate.ContextDecodeWarning)
            await stream.aclose()
        await until(lambda: lines(log) == ["ran", "closed"])
        assert isinstance(tenant.get(), type(threading.Lock()))

    shared(main)


def test_w84_a_nested_call_that_cannot_be_sent(shared: Apart) -> None:
    async def main() -> None:
        assert KEYS["tenant"] in await far.dispatches_what_cannot_be_written()
        assert values() == NOTHING

    shared(main)
