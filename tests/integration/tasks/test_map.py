"""T15c: one function over many items, in constant memory."""

from __future__ import annotations

import asyncio
import io
import sys
import tracemalloc
from collections.abc import AsyncIterator, Iterator
from functools import partial
from typing import Any

import pytest

from headgate import InvalidArgument, InvalidType, PoolBusy, TaskPool, backpressure_queue, pool_wait
from headgate.testing import settle, virtual
from tests.support.tasks.support import Busy, Gate, counts, never_above_the_cap, quick, slow


async def double(n: int) -> int:
    await asyncio.sleep(10 - n % 10)
    return 2 * n


def plain(n: int) -> int:
    return n + 1


async def source(n: int, pause: float = 0) -> AsyncIterator[int]:
    for number in range(n):
        if pause:
            await asyncio.sleep(pause)
        yield number


async def collect(found: list[Any], results: AsyncIterator[Any]) -> None:
    async for one in results:
        found.append(one)


@virtual
async def test_t15c_results_come_in_the_order_of_the_items() -> None:
    async with TaskPool(max_concurrent=4) as pool:
        assert [one async for one in pool.map(double, range(25))] == [2 * n for n in range(25)]
        assert [one async for one in pool.map(plain, [3, 1, 2])] == [4, 2, 3]
        assert [one async for one in pool.map(quick, [])] == []
    assert counts(pool) == {"completed": 28}


@virtual
async def test_t15c_unordered_results_come_as_they_are_done() -> None:
    async with TaskPool(max_concurrent=10) as pool:
        found = [one async for one in pool.map(double, range(10), ordered=False)]
        assert found == [2 * n for n in reversed(range(10))]
        assert asyncio.get_running_loop().time() == 10


@pytest.mark.parametrize("ordered", [True, False])
@virtual
async def test_t15c_async_iterables(ordered: bool) -> None:
    async with TaskPool(max_concurrent=3) as pool:
        assert sorted([one async for one in pool.map(double, source(20), ordered=ordered)]) == [
            2 * n for n in range(20)
        ]


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("window", [1, 3, 7])
@virtual
async def test_t15c_the_window_bounds_what_is_out(ordered: bool, window: int) -> None:
    taken = given = most = 0

    def items() -> Iterator[int]:
        nonlocal taken, most
        for number in range(40):
            taken += 1
            most = max(most, taken - given)
            yield number

    async with TaskPool(max_concurrent=4) as pool:
        async for _ in pool.map(double, items(), ordered=ordered, window=window):
            given += 1
            assert pool.size() <= window
            await asyncio.sleep(1)
    assert given == 40
    assert most <= window + 1  # one more may be in the feeder's hand


@pytest.mark.parametrize("ordered", [True, False])
@virtual
async def test_t15c_memory_is_constant_by_default_too(ordered: bool) -> None:
    taken = given = most = 0

    def items() -> Iterator[int]:
        nonlocal taken, most
        for number in range(2000):
            taken += 1
            most = max(most, taken - given)
            yield number

    async with TaskPool(max_concurrent=4, keep=10) as pool:
        async for _ in pool.map(quick, items(), ordered=ordered):
            given += 1
    assert given == 2000
    assert most <= 100


@pytest.mark.integration
@pytest.mark.parametrize("ordered", [True, pytest.param(False, marks=pytest.mark.soak)])
def test_t15c_a_million_items_take_no_more_memory_than_ten_thousand(ordered: bool, scale: float) -> None:
    async def items(count: int) -> AsyncIterator[int]:
        for number in range(count):
            yield number

    async def peak(count: int) -> int:
        total = 0
        async with TaskPool(max_concurrent=20, keep=100) as pool:
            tracemalloc.start()
            async for number in pool.map(quick, items(count), ordered=ordered, window=200):
                total += number is not None
            _, most = tracemalloc.get_traced_memory()
            tracemalloc.stop()
        assert total == count
        return most

    few = asyncio.run(peak(10_000 if scale >= 1 else 500))
    many = asyncio.run(peak(500_000 if scale >= 1 else 5_000))  # twice: in order, and as they come
    assert many < few + 1_000_000, "fifty times as many items; when the collector runs makes some difference"


@virtual
async def test_t15c_a_slow_source_does_not_hold_back_results() -> None:
    async with TaskPool(max_concurrent=4) as pool:
        times = []
        async for _ in pool.map(partial(slow, 1), source(5, pause=10)):
            times.append(asyncio.get_running_loop().time())
    assert times == [11, 21, 31, 41, 51]


@virtual
async def test_t15c_a_slow_consumer_does_not_hold_back_the_window() -> None:
    async with TaskPool(max_concurrent=4) as pool:
        async for one in pool.map(partial(slow, 1), range(4)):
            await asyncio.sleep(5)
            if one == 0:
                assert pool.size() == 0


@pytest.mark.parametrize("ordered", [True, False])
@virtual
async def test_t15c_the_first_failure_is_raised_and_the_rest_cancelled(ordered: bool) -> None:
    async def body(n: int) -> int:
        await asyncio.sleep(n)
        if n == 3:
            raise LookupError("three")
        return n

    async with TaskPool(max_concurrent=2) as pool:
        found: list[Any] = []
        with pytest.raises(LookupError, match="three"):
            await collect(found, pool.map(body, range(100), ordered=ordered))
        assert found == [0, 1, 2]
        await pool.drain()
        assert pool.size() == 0
        assert pool.snapshot().failed == 1
        assert pool.snapshot().completed < 10


@pytest.mark.parametrize("ordered", [True, False])
@virtual
async def test_t15c_return_exceptions_hands_failures_out(ordered: bool) -> None:
    async def body(n: int) -> int:
        await asyncio.sleep(n)
        if n % 2:
            raise LookupError(n)
        return n

    async with TaskPool(max_concurrent=6) as pool:
        found = [one async for one in pool.map(body, range(6), ordered=ordered, return_exceptions=True)]
    assert [one if isinstance(one, int) else (type(one), one.args[0]) for one in found] == [
        0,
        (LookupError, 1),
        2,
        (LookupError, 3),
        4,
        (LookupError, 5),
    ]


@pytest.mark.parametrize("ordered", [True, False])
@virtual
async def test_t15c_an_early_break_cancels_what_is_out(ordered: bool) -> None:
    async with TaskPool(max_concurrent=2) as pool:
        results = pool.map(partial(slow, 10), range(1000), ordered=ordered)
        async for _ in results:
            break
        await results.aclose()  # type: ignore[attr-defined]
        await settle()
        assert pool.size() == 0
        assert asyncio.get_running_loop().time() == 10
        assert pool.snapshot().cancelled > 0


@virtual
async def test_t15c_a_cancelled_consumer_cancels_what_is_out() -> None:
    async with TaskPool(max_concurrent=2) as pool:

        async def consume() -> None:
            async for _ in pool.map(partial(slow, 10), range(1000)):
                pass

        consumer = asyncio.create_task(consume())
        await asyncio.sleep(15)
        consumer.cancel()
        await asyncio.wait([consumer])
        await settle()
        assert consumer.cancelled()
        assert pool.size() == 0


@pytest.mark.parametrize("ordered", [True, False])
@virtual
async def test_t15c_a_source_that_fails_is_raised_after_its_results(ordered: bool) -> None:
    async def failing() -> AsyncIterator[int]:
        yield 1
        yield 2
        raise LookupError("source")

    async with TaskPool() as pool:
        found: list[Any] = []
        with pytest.raises(LookupError, match="source"):
            await collect(found, pool.map(quick, failing(), ordered=ordered))
        assert found == [1, 2]
        assert pool.size() == 0


@virtual
async def test_t15c_backpressure_holds_for_a_map() -> None:
    async with TaskPool(backpressure=backpressure_queue(1)) as pool:
        async for _ in pool.map(partial(slow, 1), range(10)):
            assert pool.snapshot().queued <= 1
    async with TaskPool(backpressure="fail_fast") as pool:
        with pytest.raises(PoolBusy):
            async for _ in pool.map(partial(slow, 1), range(10)):
                pass
    async with TaskPool(backpressure="fail_fast") as pool:
        assert [one async for one in pool.map(quick, range(10), window=1)] == list(range(10))


@virtual
async def test_t15c_options_go_to_every_submit() -> None:
    async with TaskPool(max_concurrent=2) as pool:
        async for _ in pool.map(quick, range(3), priority=4, key="k", labels={"a": 1}):
            pass
        for task in pool.snapshot().tasks:
            assert (task.priority, task.key, task.labels) == (4, "k", {"a": 1})
        found = [one async for one in pool.map(partial(slow, 60), range(2), timeout=5, return_exceptions=True)]
        assert [type(one) for one in found] == [TimeoutError, TimeoutError]


@pytest.mark.parametrize("bad", [0, -1, 1.5, "all", True])
@virtual
async def test_t15c_a_window_is_checked(bad: Any) -> None:
    async with TaskPool() as pool:
        with pytest.raises((InvalidArgument, InvalidType), match="window"):
            async for _ in pool.map(quick, [1], window=bad):
                pass


@virtual
async def test_t15c_other_arguments_are_checked() -> None:
    async with TaskPool() as pool:
        with pytest.raises(InvalidType, match="items"):
            async for _ in pool.map(quick, 7):  # type: ignore[arg-type]
                pass
        with pytest.raises(InvalidType):
            async for _ in pool.map("quick", [1]):  # type: ignore[arg-type]
                pass
        with pytest.raises(InvalidArgument, match="prioritty"):
            async for _ in pool.map(quick, [1], prioritty=3):
                pass
        assert pool.snapshot().total == 0


# -- nested ------------------------------------------------------------------------------


@pytest.mark.parametrize("ordered", [True, False])
@virtual
async def test_t15c_a_map_inside_a_task_lends_its_slot(ordered: bool) -> None:
    busy = Busy()

    async def inner(n: int) -> int:
        with busy():
            await asyncio.sleep(1 + n % 3)
            return n

    async with TaskPool(backpressure=backpressure_queue(2)) as pool:

        async def outer() -> int:
            return sum([one async for one in pool.map(inner, range(20), ordered=ordered)])

        with never_above_the_cap(pool):
            handles = [asyncio.create_task(_result(pool, outer)) for _ in range(3)]
            assert await asyncio.gather(*handles) == [190, 190, 190]
    assert busy.most == 1


async def _result(pool: TaskPool, fn: Any) -> Any:
    return await (await pool.submit(fn))


@pytest.mark.parametrize("ordered", [True, False])
@virtual
async def test_t15c_a_map_in_a_map_in_a_map(ordered: bool) -> None:
    async with TaskPool(max_concurrent=2) as pool:

        async def total(depth: int) -> int:
            if not depth:
                return 1
            return sum([one async for one in pool.map(total, [depth - 1] * 3, ordered=ordered)])

        with never_above_the_cap(pool):
            assert await (await pool.submit(total, 3)) == 27


# -- progress ----------------------------------------------------------------------------


def test_t15c_progress_is_drawn_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    @virtual
    async def check() -> None:
        async with TaskPool("crunch") as pool:
            async for _ in pool.map(partial(slow, 1), range(5), progress=True):
                pass

    check()
    out, err = capsys.readouterr()
    lines = err.splitlines()
    assert out == ""
    assert all("crunch" in line for line in lines)
    assert "5 of 5" in lines[-1]
    assert len(lines) >= 2  # on the way, too


def test_t15c_progress_with_a_title_and_without_a_total(capsys: pytest.CaptureFixture[str]) -> None:
    @virtual
    async def check() -> None:
        async def body(n: int) -> int:
            if n == 2:
                raise LookupError
            return n

        async with TaskPool() as pool:
            async for _ in pool.map(body, source(4), progress="my files", return_exceptions=True):
                pass

    check()
    last = capsys.readouterr().err.splitlines()[-1]
    assert "my files" in last
    assert "4" in last
    assert "1 failed" in last
    assert " of " not in last


def test_t15c_progress_on_a_terminal_is_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rich")

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)

    async def main() -> None:
        async with TaskPool("crunch") as pool:
            async for _ in pool.map(quick, range(5), progress=True):
                pass

    asyncio.run(main())
    assert "crunch" in terminal.getvalue()
    assert "5/5" in terminal.getvalue()


@pytest.mark.parametrize("bad", [3, None, []])
@virtual
async def test_t15c_progress_is_checked(bad: Any) -> None:
    async with TaskPool() as pool:
        with pytest.raises((InvalidArgument, InvalidType), match="progress"):
            async for _ in pool.map(quick, [1], progress=bad):
                pass


def test_t15c_no_progress_is_drawn_unless_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    @virtual
    async def check() -> None:
        async with TaskPool() as pool:
            async for _ in pool.map(quick, range(5)):
                pass

    check()
    assert capsys.readouterr() == ("", "")


@virtual
async def test_t15c_two_maps_share_one_pool() -> None:
    gate = Gate()
    async with TaskPool(max_concurrent=2) as pool:

        async def collect(n: int) -> list[Any]:
            return [one async for one in pool.map(gate.wait, [n] * 5)]

        both = asyncio.gather(collect(1), collect(2))
        await settle()
        assert pool.snapshot().active == 2
        gate.open()
        assert await both == [[1] * 5, [2] * 5]
        extra = await pool.submit(quick)
        assert (await pool_wait(extra)).status == "completed"
