"""W10: `headgate.map`, a routine over many items in constant memory; `pool.broadcast`, a routine on every worker."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import os
import signal
import sys
import threading
import weakref
from collections import Counter
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import headgate
from headgate import (
    HeadgateError,
    InvalidArgument,
    InvalidType,
    NoActivePool,
    PoolClosed,
    WorkerLost,
    WorkerPool,
    routine,
)
from headgate.workers import WorkerView
from tests.integration.workers import size_jobs
from tests.support.workers import jobs
from tests.support.workers.support import Shared, all_ready, in_flight, lines, pids, run, states, until

pytestmark = pytest.mark.integration

both_orders = pytest.mark.parametrize("ordered", [True, False], ids=["ordered", "unordered"])
mostly_ordered = pytest.mark.parametrize(
    "ordered", [True, pytest.param(False, marks=pytest.mark.soak)], ids=["ordered", "unordered"]
)


def go(path: str) -> None:
    """Let those go on that wait for it."""
    Path(f"{path}.go").touch()


async def collect(results: AsyncIterable[Any]) -> list[Any]:
    return [result async for result in results]


async def collect_into(found: list[Any], results: AsyncIterable[Any]) -> None:
    async for result in results:
        found.append(result)


async def source(count: int) -> AsyncIterator[int]:
    for number in range(count):
        await asyncio.sleep(0)
        yield number


def begun(path: str) -> list[int]:
    return [int(line.split()[1]) for line in lines(path) if line.startswith("begun ")]


def all_ended(path: str) -> bool:
    said = lines(path)
    return Counter(line.split()[1] for line in said if line.startswith("begun ")) == Counter(
        line.split()[1] for line in said if line.startswith("ended ")
    )


class Taken:
    """Numbers without an end, that know how many were taken; each becomes an item."""

    def __init__(self, item: Callable[[int], Any]) -> None:
        self.count = 0
        self._item = item

    def __iter__(self) -> Iterator[Any]:
        for number in itertools.count():
            self.count += 1
            yield self._item(number)


# -- results ----------------------------------------------------------------------------------------------------------


def test_w10_results_come_in_the_order_of_the_items(shared: Shared) -> None:
    async def main() -> None:
        found = await collect(headgate.map(size_jobs.where, range(200)))
        assert [number for number, _ in found] == list(range(200))
        assert {pid for _, pid in found} == set(pids(shared.pool)), "all workers are used"
        assert await collect(headgate.map(jobs.echo, [3, 1, 2])) == [3, 1, 2]
        assert await collect(headgate.map(jobs.echo, [])) == []
        assert in_flight(shared.pool) == 0

    shared(main)


@both_orders
def test_w10_any_iterable_will_do(shared: Shared, ordered: bool) -> None:
    async def main() -> None:
        async def listed(items: Any) -> list[Any]:
            return sorted(await collect(headgate.map(jobs.echo, items, ordered=ordered)))

        assert await listed(source(50)) == list(range(50))
        assert await listed(source(0)) == []
        assert await listed(n for n in range(5)) == [0, 1, 2, 3, 4]
        assert await listed({"a": 1, "b": 2}) == ["a", "b"]
        assert await listed({2, 1}) == [1, 2]
        assert await listed("abc") == ["a", "b", "c"]
        assert await listed(iter([1])) == [1]

    shared(main)


def test_w10_an_item_is_one_argument(shared: Shared) -> None:
    async def main() -> None:
        items = [(1, 2), {"value": 3}, None, [], False]
        assert await collect(headgate.map(jobs.echo, items)) == items
        assert await collect(headgate.map(size_jobs.nothing, range(3))) == [None] * 3

    shared(main)


def test_w10_routines_of_every_kind(shared: Shared) -> None:
    factor = 5

    @routine
    async def local(number: int) -> int:
        return factor * number

    async def main() -> None:
        assert await collect(headgate.map(size_jobs.squared, range(10))) == [n * n for n in range(10)]
        assert await collect(headgate.map(size_jobs.Doubler(3).times, range(4))) == [0, 3, 6, 9]
        assert await collect(headgate.map(size_jobs.Doubler.twice, range(4))) == [0, 2, 4, 6]
        assert await collect(headgate.map(local, range(3))) == [0, 5, 10]
        assert await collect(headgate.map(routine(lambda n: -n), range(3))) == [0, -1, -2]

    shared(main)


def test_w10_unordered_results_come_as_they_are_done(shared: Shared, log: str) -> None:
    async def main() -> None:
        items = [(log, number, number == 0) for number in range(10)]
        found = []
        async for number in headgate.map(size_jobs.gated, items, ordered=False):
            found.append(number)
            if len(found) == 9:
                assert 0 not in found
                go(log)
        assert (sorted(found), found[-1]) == (list(range(10)), 0)

    shared(main)


def test_w10_ordered_results_wait_for_those_before_them(shared: Shared, log: str) -> None:
    async def main() -> None:
        items = [(log, number, number == 0) for number in range(10)]
        mapping = asyncio.create_task(collect(headgate.map(size_jobs.gated, items)))
        await until(lambda: len(lines(log)) == 10 + 9)
        assert not mapping.done()
        go(log)
        assert await mapping == list(range(10))

    shared(main)


@both_orders
def test_w10_a_slow_source_does_not_hold_back_results(shared: Shared, ordered: bool) -> None:
    """The second item is there only after the result of the first was seen, and so on."""

    async def main() -> None:
        seen = asyncio.Event()

        async def slow_source() -> AsyncIterator[int]:
            for number in range(5):
                yield number
                await seen.wait()
                seen.clear()

        found = []
        async for number in headgate.map(jobs.echo, slow_source(), ordered=ordered):
            found.append(number)
            seen.set()
        assert found == list(range(5))

    shared(main)


def test_w10_maps_at_once_are_not_mixed_up(shared: Shared) -> None:
    async def main() -> None:
        maps = [headgate.map(jobs.echo, range(n, n + 100), ordered=n % 200 == 0) for n in range(0, 1000, 100)]
        for number, found in enumerate(await asyncio.gather(*map(collect, maps))):
            assert sorted(found) == list(range(100 * number, 100 * number + 100))

    shared(main)


def test_w10_two_consumers_cannot_take_at_once_or_share(shared: Shared) -> None:
    """As with any async generator: either an error, or every result goes to one of them."""

    async def main() -> None:
        results = headgate.map(jobs.echo, range(20))
        ends = await asyncio.gather(collect(results), collect(results), return_exceptions=True)
        found = [number for end in ends if isinstance(end, list) for number in end]
        assert any(isinstance(end, RuntimeError) for end in ends) or sorted(found) == list(range(20))

    shared(main)


# -- the window -------------------------------------------------------------------------------------------------------


class Watch:
    """How many calls are out: dispatched, and their results not handed out."""

    def __init__(self) -> None:
        self.given = 0
        self.most = 0
        self._tasks: set[str] = set()

    def __call__(self, event: Any) -> None:
        if event.name == "task_dispatched":
            self._tasks.add(str(event.task))
            self.most = max(self.most, len(self._tasks) - self.given)


@both_orders
@pytest.mark.parametrize("window", [1, pytest.param(3, marks=pytest.mark.soak), 7])
def test_w10_the_window_bounds_what_is_out(shared: Shared, ordered: bool, window: int) -> None:
    async def main() -> None:
        watch = Watch()
        unsubscribe = headgate.subscribe(watch, "workers")
        try:
            items = Taken(lambda number: number)
            async for _ in headgate.map(jobs.echo, itertools.islice(items, 40), ordered=ordered, window=window):
                watch.given += 1
                assert items.count - watch.given <= window + 1, "one more may be in the feeder's hand"
                await asyncio.sleep(0.002)
        finally:
            unsubscribe()
        assert watch.given == 40
        assert watch.most <= window

    shared(main)


@both_orders
def test_w10_the_whole_window_is_used(shared: Shared, log: str, ordered: bool) -> None:
    async def main() -> None:
        items = [(log, number, True) for number in range(30)]
        mapping = asyncio.create_task(collect(headgate.map(size_jobs.gated, items, ordered=ordered, window=12)))
        await until(lambda: len(begun(log)) >= 12)
        await asyncio.sleep(0.1)  # time enough for one too many
        assert sorted(begun(log)) == list(range(12))
        go(log)
        assert sorted(await mapping) == list(range(30))

    shared(main)


def test_w10_a_slow_consumer_does_not_hold_back_the_window(shared: Shared, log: str) -> None:
    async def main() -> None:
        items = Taken(lambda number: (log, number, False))
        async with contextlib.aclosing(headgate.map(size_jobs.gated, items, window=5)) as results:
            assert await anext(results) == 0
            await until(lambda: sorted(begun(log)) == list(range(6)))
            await asyncio.sleep(0.1)
            assert sorted(begun(log)) == list(range(6))
            assert items.count <= 7

    shared(main)


@both_orders
def test_w10_by_default_the_window_keeps_workers_busy_and_has_an_end(shared: Shared, log: str, ordered: bool) -> None:
    async def main() -> None:
        items = Taken(lambda number: (log, number, True))
        results = headgate.map(size_jobs.gated, items, ordered=ordered)
        first = asyncio.create_task(anext(results))
        await until(lambda: len(begun(log)) >= 4)
        await asyncio.sleep(0.2)
        assert 4 <= len(begun(log)) <= items.count <= 1000
        go(log)
        await first
        await results.aclose()
        await until(lambda: all_ended(log))

    shared(main)


class Item:
    """One that knows how many of its kind there are."""

    alive: weakref.WeakSet[Item] = weakref.WeakSet()

    def __init__(self, number: int) -> None:
        self.number = number
        self.alive.add(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return Item, (self.number,)


@mostly_ordered
def test_w10_memory_is_constant_however_many_items(shared: Shared, scale: float, ordered: bool) -> None:
    count = int(50_000 * scale) if scale > 0.1 else 4_000  # twice: in order, and as they come

    async def main() -> None:
        most = given = tasks = 0
        blocks: list[int] = []
        items = (Item(number) for number in range(count))
        async for back in headgate.map(jobs.echo, items, ordered=ordered, window=50):
            assert isinstance(back, Item)
            given += 1
            most = max(most, len(Item.alive))
            if given in (2_000, count - 200):
                gc.collect()
                blocks.append(sys.getallocatedblocks())
                tasks = max(tasks, len(asyncio.all_tasks()))
        assert given == count
        assert most <= 4 * 50, "items and results that are held"
        assert tasks <= 50 + 30
        assert blocks[1] - blocks[0] < (count - 2_200) * 3 / 4, "something is kept for each item"

    shared(main, patience=60 + 60 * scale)


# -- leaving early ----------------------------------------------------------------------------------------------------


@both_orders
@pytest.mark.parametrize("how", ["aclosing", "break"])
def test_w10_leaving_early_cancels_what_is_out(shared: Shared, log: str, ordered: bool, how: str) -> None:
    """The items have no end; all but the first wait until they are cancelled."""

    async def main() -> None:
        items = Taken(lambda number: (log, number, number > 0))
        if how == "aclosing":
            async with contextlib.aclosing(headgate.map(size_jobs.gated, items, ordered=ordered, window=8)) as results:
                async for number in results:
                    assert number == 0
                    await until(lambda: len(begun(log)) == 9)
                    break
        else:
            async for number in headgate.map(size_jobs.gated, items, ordered=ordered, window=8):
                assert number == 0
                await until(lambda: len(begun(log)) == 9)
                break
        await until(lambda: gc.collect() >= 0 and all_ended(log) and in_flight(shared.pool) == 0)
        assert len(begun(log)) == 9
        taken = items.count
        assert await jobs.add(1, 2) == 3
        assert items.count == taken <= 10, "nothing is taken any more"

    shared(main)


@both_orders
def test_w10_a_cancelled_consumer_cancels_what_is_out(shared: Shared, log: str, ordered: bool) -> None:
    async def main() -> None:
        items = Taken(lambda number: (log, number, True))
        consumer = asyncio.create_task(collect(headgate.map(size_jobs.gated, items, ordered=ordered, window=6)))
        await until(lambda: len(begun(log)) == 6)
        consumer.cancel()
        with pytest.raises(asyncio.CancelledError):
            await consumer
        await until(lambda: all_ended(log) and in_flight(shared.pool) == 0)
        assert len(begun(log)) == 6

    shared(main)


def test_w10_a_map_that_is_closed_stays_closed(shared: Shared) -> None:
    async def main() -> None:
        results = headgate.map(jobs.echo, itertools.count())
        assert await anext(results) == 0
        await results.aclose()
        with pytest.raises(StopAsyncIteration):
            await anext(results)
        await results.aclose()
        untouched = Taken(lambda number: number)
        await headgate.map(jobs.echo, untouched).aclose()
        assert untouched.count == 0, "nothing was asked for"
        assert in_flight(shared.pool) == 0

    shared(main)


# -- failures ---------------------------------------------------------------------------------------------------------


def test_w10_the_first_failure_in_order_is_raised_and_the_rest_cancelled(shared: Shared, log: str) -> None:
    async def main() -> None:
        def item(number: int) -> tuple[str, int, str]:
            return log, number, "return" if number < 3 else "fail" if number == 3 else "wait"

        found: list[int] = []
        with pytest.raises(jobs.SeveralArguments, match="told to") as caught:
            await collect_into(found, headgate.map(size_jobs.gated_failure, Taken(item), window=8))
        assert found == [0, 1, 2]
        assert (caught.value.code, caught.value.detail) == (3, {})
        assert "gated_failure" in "\n".join(caught.value.__notes__)
        await until(lambda: all_ended(log) and in_flight(shared.pool) == 0)
        assert max(begun(log)) <= 3 + 8

    shared(main)


def test_w10_unordered_a_failure_is_raised_at_once(shared: Shared, log: str) -> None:
    """Though those before it would never end."""

    async def main() -> None:
        def item(number: int) -> tuple[str, int, str]:
            return log, number, "fail" if number == 3 else "wait"

        with pytest.raises(jobs.SeveralArguments):
            await collect(headgate.map(size_jobs.gated_failure, Taken(item), ordered=False, window=6))
        await until(lambda: all_ended(log) and in_flight(shared.pool) == 0)
        assert 3 not in begun(log)

    shared(main)


@both_orders
def test_w10_return_exceptions_hands_failures_out(shared: Shared, ordered: bool) -> None:
    async def main() -> None:
        results = headgate.map(size_jobs.fails_if_odd, range(40), ordered=ordered, return_exceptions=True)
        found = [one if isinstance(one, int) else (type(one), one.code) for one in await collect(results)]
        wanted = [(jobs.SeveralArguments, n) if n % 2 else n for n in range(40)]
        assert found == wanted if ordered else Counter(found) == Counter(wanted)

    shared(main)


def test_w10_return_exceptions_hands_out_what_cannot_be_sent(shared: Shared) -> None:
    async def main() -> None:
        items = [1, threading.Lock(), 3]
        found = await collect(headgate.map(jobs.echo, items, return_exceptions=True))
        assert (found[0], found[2]) == (1, 3)
        assert isinstance(found[1], HeadgateError)
        with pytest.raises(HeadgateError, match="value"):
            await collect(headgate.map(jobs.echo, items))
        assert await jobs.add(1, 2) == 3

    shared(main)


@both_orders
@pytest.mark.parametrize("kind", ["plain", "async"])
def test_w10_a_source_that_fails_is_raised_after_its_results(shared: Shared, ordered: bool, kind: str) -> None:
    def failing() -> Iterator[int]:
        yield 1
        yield 2
        raise LookupError("of the source")

    async def failing_too() -> AsyncIterator[int]:
        for number in failing():
            yield number

    async def main() -> None:
        found: list[int] = []
        items = failing() if kind == "plain" else failing_too()
        with pytest.raises(LookupError, match="of the source"):
            await collect_into(found, headgate.map(jobs.echo, items, ordered=ordered))
        assert sorted(found) == [1, 2]
        with pytest.raises(LookupError, match="of the source"):  # it is no result, whatever is asked of results
            await collect(headgate.map(jobs.echo, failing(), ordered=ordered, return_exceptions=True))
        assert in_flight(shared.pool) == 0

    shared(main)


def test_w10_a_lost_worker_is_a_failure_of_its_item() -> None:
    async def main() -> None:
        async with WorkerPool(spawn=2, shutdown_timeout=5) as pool:
            items = [(number, 3) for number in range(8)]
            results = headgate.map(size_jobs.dies_at, items, window=1, return_exceptions=True)
            found = await collect(results)
            assert [isinstance(one, WorkerLost) or one for one in found] == [0, 1, 2, True, 4, 5, 6, 7]
            with pytest.raises(WorkerLost):
                await collect(headgate.map(size_jobs.dies_at, items))
            await all_ready(pool, 2)

    run(main)


@mostly_ordered
def test_w10_with_retries_a_map_outlives_its_workers(log: str, ordered: bool) -> None:
    @routine(retries=10)
    async def again(number: int) -> int:
        return await jobs.again.__wrapped__(log, number, 0.005)

    async def main() -> None:
        async with WorkerPool(spawn=2, shutdown_timeout=5) as pool:
            found = []
            async for number in headgate.map(again, range(300), ordered=ordered, window=20):
                found.append(number)
                if len(found) in (50, 150):
                    os.kill(pids(pool)[0], signal.SIGKILL)
            assert found == list(range(300)) if ordered else sorted(found) == list(range(300))
            await all_ready(pool, 2)

    run(main)


@pytest.mark.parametrize(
    ("words", "options"),
    [
        ("window", {"window": 0}),
        ("window", {"window": -1}),
        ("window", {"window": True}),
        ("window", {"window": 1.5}),
        ("window", {"window": "3"}),
    ],
)
def test_w10_a_bad_window_is_refused(words: str, options: dict[str, Any]) -> None:
    with pytest.raises((InvalidArgument, InvalidType), match=words):
        headgate.map(jobs.echo, [1], **options)


@pytest.mark.parametrize("items", [None, 5, 1.5, object()])
def test_w10_items_that_are_none_are_refused(items: Any) -> None:
    with pytest.raises(InvalidType, match="items"):
        headgate.map(jobs.echo, items)


def test_w10_unknown_options_are_refused() -> None:
    with pytest.raises(TypeError):
        headgate.map(jobs.echo, [1], widow=3)  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        headgate.map(jobs.echo, [1], 3)  # type: ignore[misc]


async def not_a_routine(number: int) -> int:
    return number


NO_ROUTINES = {
    "function": not_a_routine,
    "builtin": len,
    "class": str,
    "lambda": lambda number: number,
    "None": None,
    "name": "tests.support.workers.jobs.echo",
    "coroutine function of a routine": jobs.echo.__wrapped__,
}


@pytest.mark.parametrize("what", NO_ROUTINES.values(), ids=NO_ROUTINES.keys())
def test_w10_what_is_no_routine_is_refused(shared: Shared, what: Any) -> None:
    async def main() -> None:
        before = states(shared.pool)
        with pytest.raises(InvalidType, match="routine"):
            headgate.map(what, [1])
        with pytest.raises(InvalidType, match="routine"):
            await shared.pool.broadcast(what)
        assert states(shared.pool) == before

    shared(main)


def test_w10_a_stream_has_no_one_result_and_is_refused(shared: Shared) -> None:
    @routine
    async def stream(number: int) -> AsyncIterator[int]:
        yield number

    async def main() -> None:
        with pytest.raises(InvalidType, match=r"generator|stream"):
            headgate.map(stream, [1])
        with pytest.raises(InvalidType, match=r"generator|stream"):
            await shared.pool.broadcast(stream, 1)

    shared(main)


def test_w10_without_a_pool_there_is_no_map() -> None:
    async def main() -> None:
        with pytest.raises(NoActivePool):
            await collect(headgate.map(jobs.echo, [1]))

    run(main)


def test_w10_a_map_with_a_closed_gate_runs_here(shared: Shared) -> None:
    async def main() -> None:
        with headgate.do_dispatch(False):
            assert await collect(headgate.map(size_jobs.where, range(3))) == [(n, os.getpid()) for n in range(3)]

    shared(main)


# -- inside a routine -------------------------------------------------------------------------------------------------


@both_orders
def test_w10_a_routine_may_map(shared: Shared, ordered: bool) -> None:
    async def main() -> None:
        for me, found in await asyncio.gather(*(size_jobs.maps(30, ordered) for _ in range(4))):
            assert me in pids(shared.pool)
            numbers = [number for number, _ in found]
            assert (numbers if ordered else sorted(numbers)) == list(range(30))
            assert {pid for _, pid in found} == set(pids(shared.pool)), "the calls went to peers"

    shared(main)


def test_w10_a_map_left_early_inside_a_routine_cancels_what_is_out(shared: Shared, log: str) -> None:
    async def main() -> None:
        assert await size_jobs.maps_and_breaks(log) == 0
        await until(lambda: all_ended(log))
        assert len(begun(log)) <= 6

    shared(main)


def test_w10_a_map_of_maps(shared: Shared) -> None:
    async def main() -> None:
        found = await collect(headgate.map(size_jobs.maps, range(1, 12)))
        assert [len(inner) for _, inner in found] == list(range(1, 12))

    shared(main)


# -- broadcast --------------------------------------------------------------------------------------------------------


def test_w10_a_broadcast_reaches_every_worker_once(shared: Shared, log: str) -> None:
    async def main() -> None:
        for _ in range(3):
            found = await shared.pool.broadcast(jobs.pid)
            assert found == {view.uid: view.pid for view in shared.pool.workers()}
        assert type(found) is dict
        await shared.pool.broadcast(jobs.noted_pid, log, 7)
        assert lines(log) == ["7", "7"]
        assert in_flight(shared.pool) == 0

    shared(main)


def test_w10_a_broadcast_takes_arguments(shared: Shared) -> None:
    async def main() -> None:
        uids = [view.uid for view in shared.pool.workers()]
        wanted = (1, 5, (6,), 3, 4, {"timeout": 9, "retries": 2})
        found = await shared.pool.broadcast(jobs.parameters, 1, 5, 6, c=3, timeout=9, retries=2)
        assert found == dict.fromkeys(uids, wanted)
        assert await shared.pool.broadcast(size_jobs.nothing, 1) == dict.fromkeys(uids)
        value = size_jobs.payload(5 * size_jobs.MB)
        found = await shared.pool.broadcast(size_jobs.describe, value)
        assert found == dict.fromkeys(uids, size_jobs.digest(value))
        values = ["mine"]
        assert await shared.pool.broadcast(jobs.append_to, values) == {uid: ["mine", "worker"] for uid in uids}
        assert values == ["mine"]

    shared(main)


def test_w10_a_broadcast_of_routines_of_every_kind(shared: Shared) -> None:
    @routine
    async def local() -> int:
        return os.getpid()

    async def main() -> None:
        wanted = {view.uid: view.pid for view in shared.pool.workers()}
        assert await shared.pool.broadcast(local) == wanted
        found = await shared.pool.broadcast(jobs.plain, 1)
        assert {uid: pid for uid, (_, pid, _) in found.items()} == wanted
        found = await shared.pool.broadcast(size_jobs.Doubler(4).times, 2)
        assert found == dict.fromkeys(wanted, 8)

    shared(main)


def test_w10_broadcasts_at_once(shared: Shared) -> None:
    async def main() -> None:
        wanted = {view.uid: view.pid for view in shared.pool.workers()}
        calls = [shared.pool.broadcast(jobs.pid) for _ in range(50)]
        beside = [jobs.add(n, 1) for n in range(50)]
        found = await asyncio.gather(*calls, *beside)
        assert found == [wanted] * 50 + list(range(1, 51))

    shared(main)


def test_w10_a_broadcast_asks_no_balancer_which_workers() -> None:
    class OnlyOne:
        def order(self, task: Any, workers: Any) -> list[WorkerView]:
            return sorted(workers, key=lambda worker: worker.uid)[:1]

        def report(self, worker: Any, outcome: str) -> None: ...

    async def main() -> None:
        async with WorkerPool(spawn=3, loadbalancer=OnlyOne()) as pool:
            assert len({await jobs.pid() for _ in range(4)}) == 1
            assert await pool.broadcast(jobs.pid) == {view.uid: view.pid for view in pool.workers()}

    run(main)


def test_w10_a_broadcast_goes_to_its_own_pool_and_to_the_workers_of_now() -> None:
    async def main() -> None:
        async with WorkerPool(spawn=1) as outer:
            async with WorkerPool(spawn=1) as inner:
                for pool in (outer, inner):
                    [view] = pool.workers()
                    assert await pool.broadcast(jobs.pid) == {view.uid: view.pid}
            await outer.resize(3)
            assert await outer.broadcast(jobs.pid) == {view.uid: view.pid for view in outer.workers()}
            assert len(outer.workers()) == 3
        for pool in (outer, inner):
            with pytest.raises(PoolClosed):
                await pool.broadcast(jobs.pid)

    run(main)


def test_w10_the_failure_of_one_worker_is_raised_after_all_have_ended(shared: Shared, log: str) -> None:
    async def main() -> None:
        [first, second] = shared.pool.workers()
        orders = {first.pid: (0.3, "return"), second.pid: (0.0, "fail")}
        with pytest.raises(jobs.SeveralArguments, match="told to") as caught:
            await shared.pool.broadcast(size_jobs.as_told, log, orders)
        assert sorted(lines(log)) == sorted(f"{what} {pid}" for what in ("begun", "ended") for pid in orders)
        assert caught.value.code == second.pid
        assert second.uid in "\n".join(caught.value.__notes__)
        assert "as_told" in "\n".join(caught.value.__notes__), "the remote traceback is there too"
        assert in_flight(shared.pool) == 0

    shared(main)


@pytest.mark.parametrize("sooner", [0, 1])
def test_w10_of_several_failures_the_first_workers_is_raised(shared: Shared, log: str, sooner: int) -> None:
    """Whichever came first."""

    async def main() -> None:
        views = shared.pool.workers()
        orders = {view.pid: (0.0 if index == sooner else 0.2, "fail") for index, view in enumerate(views)}
        with pytest.raises(jobs.SeveralArguments) as caught:
            await shared.pool.broadcast(size_jobs.as_told, log, orders)
        assert caught.value.code == views[0].pid
        assert views[0].uid in "\n".join(caught.value.__notes__)
        assert len(lines(log)) == 4

    shared(main)


def test_w10_a_worker_killed_during_a_broadcast(log: str) -> None:
    async def main() -> None:
        async with WorkerPool(spawn=3, shutdown_timeout=5) as pool:
            views = pool.workers()
            orders = {view.pid: (0.0, "die") if view is views[1] else (0.4, "return") for view in views}
            with pytest.raises(WorkerLost) as caught:
                await pool.broadcast(size_jobs.as_told, log, orders)
            assert views[1].uid in "\n".join([str(caught.value), *getattr(caught.value, "__notes__", ())])
            assert sum(line.startswith("ended") for line in lines(log)) == 3, "after all had ended"
            assert len(lines(log)) == 6, "and nothing ran twice"
            await all_ready(pool, 3)
            found = await pool.broadcast(jobs.pid)
            assert found == {view.uid: view.pid for view in pool.workers()}
            assert views[1].uid not in found

    run(main)


def test_w10_a_cancelled_broadcast_ends_on_every_worker(shared: Shared, log: str) -> None:
    async def main() -> None:
        call = asyncio.create_task(shared.pool.broadcast(size_jobs.endless_here, log))
        await until(lambda: len(lines(log)) == 2)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert sorted(line.split()[0] for line in lines(log)) == ["begun", "begun", "ended", "ended"]
        assert in_flight(shared.pool) == 0

    shared(main)


def test_w10_a_broadcast_of_what_cannot_be_pickled_touches_no_worker(shared: Shared, log: str) -> None:
    async def main() -> None:
        before = states(shared.pool)
        with pytest.raises(HeadgateError, match="value"):
            await shared.pool.broadcast(jobs.echo, threading.Lock())
        assert states(shared.pool) == before
        assert len(await shared.pool.broadcast(jobs.pid)) == 2

    shared(main)


def test_w10_a_pool_that_is_not_open_has_nobody_to_broadcast_to() -> None:
    async def main() -> None:
        with pytest.raises((HeadgateError, RuntimeError)):
            await WorkerPool(spawn=1).broadcast(jobs.pid)

    run(main)
