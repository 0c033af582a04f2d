"""Things that happen in one turn of the loop, or at its end, and code that is called back in the middle of them."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from typing import Any

import pytest

from headgate import (
    PoolBusy,
    SubmitTimeout,
    TaskPool,
    WaitCycle,
    backpressure_queue,
    fail_fast,
    fair_share,
    pool_get,
    pool_wait,
    subscribe,
)
from headgate.testing import virtual
from tests.support.tasks.support import quick, slow


@pytest.mark.integration
def test_t41_a_late_heir_that_a_callback_cancels_ends_once() -> None:
    async def busy() -> None:
        await asyncio.sleep(0)
        time.sleep(0.03)  # noqa: ASYNC251 - the loop is held until the ttl of the next one is over

    async def main() -> list[str]:
        async with TaskPool(queue="fifo") as pool:
            first = await pool.submit(busy)
            late = await pool.submit(quick, ttl=0.02)
            rest = [await pool.submit(quick) for _ in range(3)]
            first.on_end(lambda _: late.cancel())
            return [task.status for task in await pool_wait([first, late, *rest])]

    assert asyncio.run(main()) == ["completed", "cancelled", *["completed"] * 3]


@virtual
async def test_t42_a_nested_duplicate_of_a_parked_submit_does_not_park() -> None:
    async with TaskPool(backpressure=backpressure_queue(1)) as pool:
        gate = asyncio.Event()

        async def parent() -> Any:
            await gate.wait()
            return await (await pool.submit(quick, idempotency_key="k"))

        outer = await pool.submit(parent)
        await pool.submit(quick)
        parked = asyncio.ensure_future(pool.submit(quick, idempotency_key="k"))
        await asyncio.sleep(1)
        assert pool.snapshot().blocked_submitters == 1
        gate.set()
        await outer
        assert (await parked).status == "completed"


@virtual
async def test_t30_who_was_told_no_does_not_run_when_room_comes_in_the_same_turn() -> None:
    ran: list[Any] = []

    async def work(number: Any) -> None:
        ran.append(number)

    async with TaskPool(backpressure=backpressure_queue(1)) as pool:
        await pool.submit(slow, 5)
        await pool.submit(work, 1)
        with pytest.raises(SubmitTimeout):
            await pool.submit(work, "ghost", wait_timeout=5)
    assert ran == [1]


@virtual
async def test_t15_generator_exit_is_an_exception_like_any_other() -> None:
    async def bad() -> None:
        await asyncio.sleep(1)
        raise GeneratorExit

    async with TaskPool() as pool:
        failed, after = await pool.submit(bad), await pool.submit(quick)
        assert [task.status for task in await pool_wait([failed, after])] == ["failed", "completed"]


class Odd(BaseException):
    pass


@virtual
async def test_t15_a_base_exception_is_told_to_who_awaits_and_to_nobody_else() -> None:
    told: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))

    async def bad() -> None:
        raise Odd

    async with TaskPool() as pool:
        with pytest.raises(Odd):
            await (await pool.submit(bad))
    assert told == []


@virtual
async def test_t42_a_helper_of_an_earlier_attempt_does_not_end_the_waits_of_the_next() -> None:
    kept: list[Any] = []

    async def parent() -> Any:
        if not kept:
            kept.append(await pool.submit(quick, delay=3, detached=True))
            kept.append(asyncio.ensure_future(pool_wait(kept[0])))
            await asyncio.sleep(0)
            raise ValueError
        asyncio.get_running_loop().call_later(1, kept[1].cancel)
        return await kept[0]

    async with TaskPool() as pool:
        handle = await pool.submit(parent, retries=1)
        assert (await pool_wait(handle)).status == "completed"


@pytest.mark.parametrize("where", ["on_end", "listener"])
@virtual
async def test_t33_a_cancelled_error_of_a_callback_loses_neither_slot_nor_waiter(where: str) -> None:
    gone = asyncio.get_running_loop().create_future()
    gone.cancel()
    async with TaskPool(queue="fifo") as pool:
        first = await pool.submit(slow, 1)
        second = await pool.submit(slow, 1)
        unsubscribe = subscribe(lambda _: gone.result(), "lifecycle.pool.audit") if where == "listener" else None
        if where == "on_end":
            first.on_end(lambda _: gone.result())
        assert [task.status for task in await pool_wait([first, second])] == ["completed"] * 2
        if unsubscribe is not None:
            unsubscribe()


@virtual
async def test_t42_ancestors_lend_until_the_last_descendant_has_waited() -> None:
    one, many = TaskPool("one"), TaskPool("many", max_concurrent=5)
    done = asyncio.Event()
    waited: list[int] = []

    async def child(number: int) -> None:
        await (await one.submit(slow, 1))
        waited.append(number)
        if len(waited) == 3:
            done.set()

    async def parent() -> None:
        for number in range(3):
            await many.submit(child, number)
        await done.wait()

    async with one, many:
        await (await one.submit(parent))
    assert len(waited) == 3


@virtual
async def test_t50_a_task_that_submits_its_successor_does_not_keep_its_ancestors() -> None:
    async def tick(left: int) -> None:
        if left:
            handles.append(await pool.submit(tick, left - 1))

    handles: list[Any] = []
    async with TaskPool(max_concurrent=2, keep=0) as pool:
        await pool.submit(tick, 50)
        await pool.drain()
    deepest = max(sum(1 for _ in _chain(handle)) for handle in handles)
    assert deepest <= 2


def _chain(task: Any) -> Any:
    while task.parent is not None:
        task = task.parent
        yield task


@virtual
async def test_t23_cost_by_function_holds_without_options_too() -> None:
    async def work(size: int) -> None:
        pass

    async with TaskPool(queue=fair_share(cost=lambda size: size)) as pool:
        assert (await pool.submit(work, 100)).terms.cost == 100


@virtual
async def test_t34_a_listener_may_cancel_what_it_hears_starting() -> None:
    heard: list[bool] = []
    async with TaskPool() as pool:
        gate = asyncio.Event()
        await pool.submit(gate.wait)
        handle = await pool.submit(slow, 5)

        def stop(event: Any) -> None:
            if event.name == "pool_dequeue":
                heard.append(handle.cancel())

        unsubscribe = subscribe(stop, "lifecycle.pool.audit")
        gate.set()
        assert (await pool_wait(handle)).status == "cancelled"
        unsubscribe()
    assert heard == [True]


@virtual
async def test_t01b_closing_from_inside_is_refused_and_changes_nothing() -> None:
    async with TaskPool() as pool:
        with pytest.raises(WaitCycle):
            await (await pool.submit(pool.close))
        assert await (await pool.submit(quick)) is not ...


@virtual
async def test_t01b_a_cancellation_while_it_drains_ends_the_pool() -> None:
    with pytest.raises(TimeoutError):  # noqa: PT012 - what raises is the leaving of the block
        async with asyncio.timeout(1):
            async with TaskPool("cut") as pool:
                running, queued = await pool.submit(slow, 60), await pool.submit(slow, 60)
    assert [running.status, queued.status] == ["cancelled", "cancelled"]
    assert pool_get("cut") is None


@virtual
async def test_t35_of_keys_with_equally_much_the_one_with_the_oldest_task_loses_it() -> None:
    async with TaskPool(backpressure=backpressure_queue(2, "drop_fair")) as pool:
        running = await pool.submit(slow, 1)
        flood = [await pool.submit(quick, key="flood") for _ in range(2)]
        ann = await pool.submit(quick, key="ann")
        zed = await pool.submit(quick, key="zed")
        assert [task.status for task in (*flood, ann, zed)] == ["rejected", "rejected", "queued", "queued"]
        await running


@virtual
async def test_t32_busy_says_why() -> None:
    async with TaskPool("tight", max_concurrent=2, backpressure=fail_fast(), max_concurrent_per_key=1) as pool:
        await pool.submit(slow, 1, key="a")
        with pytest.raises(PoolBusy, match=r"'a' is at its cap.*'tight'"):
            await pool.submit(slow, 1, key="a")
        with pytest.raises(PoolBusy, match="delay"):
            await pool.submit(slow, 1, delay=1)


def test_t01_names_are_drawn_one_by_one() -> None:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    pools: list[TaskPool] = []
    errors: list[Exception] = []

    def make() -> None:
        try:
            pools.extend(TaskPool() for _ in range(50))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=make) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sys.setswitchinterval(before)
    for pool in pools:
        asyncio.run(pool.close())
    assert errors == []
    assert len({pool.name for pool in pools}) == 300


@pytest.mark.integration
def test_t17_two_calls_in_progress_have_two_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker is preempted before it says that it is idle, and is then taken for idle when it is not."""
    release = threading.Semaphore.release

    def late(self: threading.Semaphore, n: int = 1) -> None:
        if threading.current_thread() is not threading.main_thread():
            time.sleep(0.01)
        release(self, n)

    monkeypatch.setattr(threading.Semaphore, "release", late)

    async def main() -> str:
        loop = asyncio.get_running_loop()
        async with TaskPool(max_concurrent=2) as pool:
            await (await pool.submit(lambda: None))

            async def ask() -> str:
                return await (await pool.submit(lambda: "inner"))

            def outer() -> str:
                time.sleep(0.03)
                return asyncio.run_coroutine_threadsafe(ask(), loop).result(5)

            return await (await pool.submit(outer))

    assert asyncio.run(main()) == "inner"


@pytest.mark.integration
@pytest.mark.skipif(sys.version_info < (3, 12), reason="eager tasks came with Python 3.12: run this with 3.12 or newer")
def test_t11_bodies_are_not_run_eagerly() -> None:
    async def main() -> None:
        asyncio.get_running_loop().set_task_factory(asyncio.eager_task_factory)  # type: ignore[attr-defined]
        async with TaskPool() as pool:
            handles = [await pool.submit(quick, timeout=100) for _ in range(3000)]
            assert handles[0].status == "running"
            await pool_wait(handles)

    asyncio.run(main())


LEFT_OPEN = """
import asyncio
from headgate import TaskPool

async def work(number):
    print("begin", number)
    await asyncio.sleep(10)

async def main():
    pool = TaskPool("left")
    for number in range(4):
        await pool.submit(work, number)
    await asyncio.sleep(0.05)

asyncio.run(main())
"""


@pytest.mark.integration
def test_the_end_of_the_loop_starts_nothing_and_what_was_lost_is_told() -> None:
    ended = subprocess.run([sys.executable, "-X", "dev", "-c", LEFT_OPEN], capture_output=True, text=True, check=True)
    assert ended.stdout.split("\n") == ["begin 0", ""]
    assert "left was never closed, and 1 running and 3 queued tasks were lost" in ended.stderr
    assert "destroyed" not in ended.stderr
