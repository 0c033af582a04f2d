"""`run`, `virtual` and `settle`: a test's way onto the virtual loop and off it again."""

from __future__ import annotations

import asyncio
import functools
import inspect
import itertools
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NoReturn, cast

import pytest

from headgate.core.clock import clock
from headgate.errors import InvalidType
from headgate.testing import Hang, Leak, run, settle, virtual


def now() -> float:
    return asyncio.get_running_loop().time()


async def forever() -> NoReturn:
    await asyncio.get_running_loop().create_future()
    raise AssertionError("unreachable")


# -- settle ------------------------------------------------------------------------------------------------------------


@virtual
async def test_settle_runs_everything_ready_and_moves_no_time() -> None:
    steps: list[int] = []

    async def walk() -> None:
        for i in range(50):
            steps.append(i)
            await asyncio.sleep(0)
        await asyncio.sleep(1)
        steps.append(-1)

    task = asyncio.create_task(walk())
    asyncio.get_running_loop().call_later(0, steps.append, 100)
    await settle()
    assert sorted(steps) == [*range(50), 100]
    assert now() == 0.0
    await task


@virtual
async def test_many_may_settle_at_once() -> None:
    await asyncio.gather(*[settle(20) for _ in range(100)])
    cancelled = asyncio.create_task(settle())
    await asyncio.sleep(0)
    cancelled.cancel()
    await settle()
    assert cancelled.cancelled()


@virtual
async def test_settle_does_not_wait_for_threads() -> None:
    gate = threading.Event()
    waiting = asyncio.create_task(asyncio.to_thread(gate.wait))
    await settle()
    assert not waiting.done()
    gate.set()
    assert await waiting


@virtual
async def test_settle_gives_up_on_a_loop_that_never_does() -> None:
    async def spin() -> None:
        for _ in itertools.count():
            await asyncio.sleep(0)

    task = asyncio.create_task(spin())
    with pytest.raises(Hang, match="did not settle within 10 turns"):
        await settle(10)
    task.cancel()


def test_settle_on_another_loop_takes_its_turns() -> None:
    async def main() -> list[int]:
        seen: list[int] = []
        asyncio.get_running_loop().call_soon(seen.append, 1)
        await settle(3)
        return seen

    assert asyncio.run(main()) == [1]


# -- run ---------------------------------------------------------------------------------------------------------------


def test_run_takes_a_coroutine_or_a_function() -> None:
    async def main(value: int = 1) -> int:
        return value

    assert run(main) == 1
    assert run(main(2)) == 2
    assert run(functools.partial(main, 3)) == 3


@pytest.mark.parametrize("wrong", [3, int, lambda: 5])
def test_run_refuses_what_is_no_coroutine(wrong: Any) -> None:
    with pytest.raises(InvalidType, match="main must be a coroutine or a coroutine function, got int"):
        run(wrong)


def test_the_clock_follows_the_loop_and_comes_back() -> None:
    before = (clock.now, clock.wall, clock.sleep, clock.uniform, clock.token)

    async def main() -> tuple[float, float, str, str]:
        await asyncio.sleep(60)
        return clock.now(), clock.wall(), clock.token(), clock.token()

    assert run(main, start=5.0) == (65.0, 1_700_000_060.0, "token-1", "token-2")
    assert (clock.now, clock.wall, clock.sleep, clock.uniform, clock.token) == before


def test_the_clock_comes_back_after_a_failure() -> None:
    async def main() -> None:
        assert clock.now() == 0.0
        raise LookupError("mine")

    with pytest.raises(LookupError, match="mine"):
        run(main)
    assert clock.now is time.monotonic
    with pytest.raises(RuntimeError, match="no running event loop"):
        asyncio.get_running_loop()


def test_the_same_seed_draws_the_same_numbers() -> None:
    async def draw() -> list[float]:
        return [clock.uniform(0, 1) for _ in range(5)]

    assert run(draw) == run(draw) == run(draw, seed=0)
    assert run(draw, seed=1) != run(draw, seed=2)


def test_runs_follow_each_other() -> None:
    async def main() -> float:
        await asyncio.sleep(1)
        return now()

    assert [run(main) for _ in range(20)] == [1.0] * 20


def test_a_run_inside_a_run_is_refused() -> None:
    async def inner() -> None: ...

    async def main() -> None:
        with pytest.raises(RuntimeError, match=r"cannot be called inside a running event loop.*[Aa]wait"):
            run(inner)
        with pytest.raises(RuntimeError, match="running event loop"):
            run(inner())  # and no warning that it was never awaited
        with pytest.raises(RuntimeError, match="another thread is inside run"):
            await asyncio.to_thread(run, inner)

    run(main)
    run(inner)


def test_a_task_left_behind_is_a_leak() -> None:
    cancelled: list[bool] = []

    async def background() -> None:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    keep: list[object] = []

    async def main() -> None:
        keep.append(asyncio.create_task(background(), name="left"))
        await asyncio.sleep(1)

    with pytest.raises(Leak, match=r"1 task still pending(?s:.)*Task 'left' in .*background\n.*in background: await"):
        run(main)
    assert cancelled == [True]
    run(main, check_leaks=False)
    assert cancelled == [True, True]


def test_a_task_about_to_end_is_no_leak() -> None:
    async def tidy() -> None:
        try:
            await forever()
        finally:
            for _ in range(5):
                await asyncio.sleep(0)

    async def main() -> None:
        task = asyncio.create_task(tidy())
        await asyncio.sleep(1)
        task.cancel()

    run(main)


def test_a_failure_is_told_rather_than_the_leak_it_makes() -> None:
    keep: list[object] = []

    async def main() -> None:
        keep.append(asyncio.create_task(forever()))
        raise LookupError

    with pytest.raises(LookupError):
        run(main)


def test_async_generators_are_closed() -> None:
    closed: list[bool] = []

    async def numbers() -> AsyncIterator[int]:
        try:
            yield 1
        finally:
            await asyncio.sleep(10)
            closed.append(True)

    keep = numbers()

    async def main() -> int:
        return await anext(keep)

    assert run(main) == 1
    assert closed == [True]


def test_debug_mode() -> None:
    async def main() -> bool:
        with pytest.raises(RuntimeError, match="Non-thread-safe"):
            await asyncio.to_thread(asyncio.get_running_loop().call_later, 1, print)
        await asyncio.sleep(1)
        return asyncio.get_running_loop().get_debug()

    assert run(main, debug=True)


# -- the decorator -----------------------------------------------------------------------------------------------------


@virtual
async def test_the_decorator_keeps_fixtures(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    await asyncio.sleep(3600)
    assert tmp_path.name.startswith("test_the_decorator_keeps_fix")
    assert request.node.name == "test_the_decorator_keeps_fixtures"
    assert now() == 3600.0


@pytest.mark.parametrize("number", [1, 2])
@virtual(seed=3, start=10.0)
async def test_the_decorator_takes_options(number: int) -> None:
    assert now() == 10.0
    assert number in (1, 2)


class TestMethods:
    @virtual
    async def test_in_a_class(self) -> None:
        await asyncio.sleep(1)


def test_the_decorated_looks_like_a_plain_function() -> None:
    @virtual(start=2.0)
    async def sample(a: int, *, b: int = 2) -> tuple[int, int, float]:
        """Words."""
        return a, b, now()

    assert sample(1) == (1, 2, 2.0)
    assert sample(1, b=3) == (1, 3, 2.0)
    assert sample.__name__ == "sample"
    assert sample.__doc__ == "Words."
    assert list(inspect.signature(sample).parameters) == ["a", "b"]
    assert not inspect.iscoroutinefunction(sample)


def test_the_decorator_refuses_a_plain_function() -> None:
    def plain() -> None: ...

    with pytest.raises(InvalidType, match=r"async def function, got .*plain\. Write"):
        virtual(cast("Any", plain))
