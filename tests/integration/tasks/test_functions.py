"""T17: what a task may be, and in which context it runs."""

from __future__ import annotations

import asyncio
import functools
import threading
import types
from contextvars import ContextVar
from typing import Any

import pytest

from headgate import InvalidType, TaskPool
from headgate.testing import virtual
from tests.support.tasks.support import Barrier, Flaky, quick, slow, until

user: ContextVar[str] = ContextVar("user", default="nobody")


# -- the context -------------------------------------------------------------------------


@virtual
async def test_t17_a_task_runs_in_the_context_of_its_submitter() -> None:
    async def body() -> str:
        return user.get()

    async with TaskPool() as pool:
        handles = []
        for name in ("ada", "grace", "mary"):
            user.set(name)
            handles.append(await pool.submit(body))
        user.set("later")
        assert [await handle for handle in handles] == ["ada", "grace", "mary"]


@virtual
async def test_t17_the_context_is_a_copy_taken_at_submit() -> None:
    async def body() -> str:
        before = user.get()
        user.set("changed inside")
        return before

    async with TaskPool() as pool:
        user.set("mine")
        first, second = await pool.submit(body), await pool.submit(body)
        user.set("changed outside")
        assert [await first, await second] == ["mine", "mine"]
        assert user.get() == "changed outside"


@virtual
async def test_t17_a_plain_function_sees_the_context_in_its_thread() -> None:
    def body() -> str:
        before = user.get()
        user.set("changed inside")
        return before

    async with TaskPool() as pool:
        user.set("mine")
        assert await (await pool.submit(body)) == "mine"
        assert await (await pool.submit(body)) == "mine"
        assert user.get() == "mine"


@virtual
async def test_t17_a_submitter_that_parked_gives_the_context_of_its_submit() -> None:
    async def body() -> str:
        return user.get()

    async with TaskPool(backpressure={"kind": "queue", "max_depth": 1}) as pool:
        await pool.submit(slow, 1)
        await pool.submit(slow, 1)

        async def submitter(name: str) -> Any:
            user.set(name)
            return await (await pool.submit(body))

        assert await asyncio.gather(*[submitter(name) for name in "abc"]) == ["a", "b", "c"]


# -- functions ---------------------------------------------------------------------------


class Callable:
    async def __call__(self, value: int) -> int:
        await asyncio.sleep(1)
        return value + 1

    async def method(self, value: int) -> int:
        return value + 2

    def plain(self, value: int) -> tuple[int, bool]:
        return value + 3, threading.current_thread() is threading.main_thread()

    @classmethod
    async def of_class(cls, value: int) -> int:
        return value + 4

    @staticmethod
    async def static(value: int) -> int:
        return value + 5


@virtual
async def test_t17_everything_that_can_be_called() -> None:
    async with TaskPool(max_concurrent=2) as pool:
        one = Callable()
        assert await (await pool.submit(one, 1)) == 2
        assert await (await pool.submit(one.method, 1)) == 3
        assert await (await pool.submit(one.plain, 1)) == (4, False)
        assert await (await pool.submit(Callable.of_class, 1)) == 5
        assert await (await pool.submit(Callable.static, 1)) == 6
        assert await (await pool.submit(functools.partial(one, 1))) == 2
        assert await (await pool.submit(len, "four")) == 4
        assert await (await pool.submit(dict, [(1, 2)])) == {1: 2}
        assert isinstance(await (await pool.submit(Callable)), Callable)


@virtual
async def test_t17_a_plain_function_runs_in_a_thread_of_the_pool() -> None:
    def body() -> str:
        assert threading.current_thread() is not threading.main_thread()
        with pytest.raises(RuntimeError):
            asyncio.get_running_loop()
        return threading.current_thread().name

    async with TaskPool("crunch") as pool:
        assert "crunch" in await (await pool.submit(body))


@virtual
async def test_t17_a_plain_function_fails_and_is_tried_again() -> None:
    calls = []

    def body() -> str:
        calls.append(1)
        if len(calls) < 3:
            raise LookupError(f"call {len(calls)}")
        return "at last"

    async with TaskPool() as pool:
        assert await (await pool.submit(body, retries=2)) == "at last"
        calls.clear()
        handle = await pool.submit(body, retries=1)
        with pytest.raises(LookupError, match="call 2"):
            await handle


@virtual
async def test_t17_a_lambda_that_returns_a_coroutine_is_awaited_on_the_loop() -> None:
    async def review(pr: int) -> tuple[int, bool]:
        await asyncio.sleep(10)
        return pr, threading.current_thread() is threading.main_thread()

    async with TaskPool() as pool:
        pr = 7
        assert await (await pool.submit(lambda: review(pr))) == (7, True)
        assert asyncio.get_running_loop().time() == 10


@virtual
async def test_t17_any_awaitable_that_is_returned_is_awaited() -> None:
    class Later:
        def __await__(self) -> Any:
            yield from asyncio.sleep(5).__await__()
            return "later"

    async with TaskPool() as pool:
        assert await (await pool.submit(lambda: Later())) == "later"
        assert await (await pool.submit(Later)) == "later"
        assert asyncio.get_running_loop().time() == 10


@virtual
async def test_t17_a_lambda_with_a_coroutine_can_be_cancelled_and_timed_out() -> None:
    async with TaskPool() as pool:
        handle = await pool.submit(lambda: slow(60), timeout=5)
        with pytest.raises(TimeoutError):
            await handle
        flaky = Flaky(1)
        assert await (await pool.submit(lambda: flaky.run(), retries=1)) == 2


@pytest.mark.integration
def test_t17_at_most_max_concurrent_threads() -> None:
    """The pool's own threads: so many as it has slots, however many functions go through them."""

    async def main() -> None:
        seen: set[int] = set()
        alive = most = 0
        lock = threading.Lock()

        def body() -> None:
            nonlocal alive, most
            with lock:
                seen.add(threading.get_ident())
                alive += 1
                most = max(most, alive)
            with lock:
                alive -= 1

        async with TaskPool("three", max_concurrent=3) as pool:
            for _ in range(600):
                await pool.submit(body)
            await pool.drain()
            threads = [one for one in threading.enumerate() if "three" in one.name]
            assert most <= 3
            assert len(threads) <= 3
            assert len(seen) <= 3

    asyncio.run(main())


@pytest.mark.integration
def test_t17_every_slot_has_a_thread_and_two_pools_do_not_share_them() -> None:
    async def main() -> None:
        barrier = Barrier()
        async with TaskPool(max_concurrent=40) as pool, TaskPool() as other:
            for _ in range(40):
                await pool.submit(barrier.wait)
            entered = 0

            def all_in() -> bool:
                nonlocal entered
                while barrier.entered.acquire(blocking=False):
                    entered += 1
                return entered == 40

            await until(all_in)  # more than the threads of asyncio's own executor
            assert await (await other.submit(len, "abc")) == 3
            barrier.released.set()

    asyncio.run(main())


# -- what cannot be a task ---------------------------------------------------------------


@virtual
async def test_t17_a_coroutine_object_is_refused_with_the_remedy() -> None:
    async with TaskPool() as pool:
        for submit in (pool.submit_nowait, pool.submit):
            with pytest.raises(InvalidType, match="coroutine") as caught:
                await submit(quick())
            assert "submit(" in str(caught.value) or "lambda" in str(caught.value)
        assert pool.snapshot().total == 0


@pytest.mark.parametrize("bad", [None, 3, "work", [quick], object()])
@virtual
async def test_t17_what_cannot_be_called_is_refused(bad: Any) -> None:
    async with TaskPool() as pool:
        with pytest.raises(InvalidType, match="fn"):
            await pool.submit(bad)
        with pytest.raises(InvalidType, match="fn"):
            pool.submit_nowait(bad)
        assert pool.snapshot().total == 0


@virtual
async def test_t17_a_future_is_refused() -> None:
    async with TaskPool() as pool:
        future = asyncio.get_running_loop().create_future()
        with pytest.raises(InvalidType):
            await pool.submit(future)
        task = asyncio.create_task(quick())
        with pytest.raises(InvalidType):
            await pool.submit(task)
        await task


@virtual
async def test_t17_a_wrong_call_is_the_tasks_failure() -> None:
    async with TaskPool() as pool:
        handle = await pool.submit(quick, 1, 2, 3)
        with pytest.raises(TypeError, match="argument"):
            await handle
        assert await (await pool.submit(quick)) == "done"


# -- generators --------------------------------------------------------------------------


def numbers(n: int = 3) -> Any:
    yield from range(n)


class Numbers:
    def __call__(self) -> Any:
        yield 1

    def listed(self) -> Any:
        yield 2


@pytest.mark.parametrize(
    "fn",
    [numbers, functools.partial(numbers, 2), Numbers(), Numbers().listed, lambda: (yield 1)],
    ids=["function", "partial", "object", "method", "lambda"],
)
@virtual
async def test_t17_a_generator_function_is_refused_with_the_remedy(fn: Any) -> None:
    async with TaskPool() as pool:
        for call in (lambda: pool.submit_nowait(fn), lambda: pool.map(fn, [1])):
            with pytest.raises(InvalidType, match="must not be a generator function") as caught:
                call()
            assert "returns a list" in str(caught.value)
            assert "pool.stream" in str(caught.value)
        assert pool.snapshot().total == 0


@virtual
async def test_t17_what_returns_a_generator_or_is_awaitable_is_none() -> None:
    @types.coroutine
    def awaitable() -> Any:
        yield from asyncio.sleep(0).__await__()
        return 3

    async with TaskPool() as pool:
        assert await (await pool.submit(lambda: numbers(2))) is not None
        assert await (await pool.submit(list, (1, 2))) == [1, 2]
        assert await (await pool.submit(awaitable)) == 3
