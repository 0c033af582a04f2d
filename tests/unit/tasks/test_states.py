"""T40, T41: waiting for tasks, and the states they go through."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from headgate import (
    InvalidType,
    TaskHandle,
    TaskPool,
    backpressure_queue,
    fair_round_robin,
    pool_wait,
    ring_buffer,
    wait_agent,
)
from headgate.tasks import PoolDequeue, PoolFinish
from headgate.testing import capture_events, settle, virtual
from tests.support.tasks.support import AUDIT, Flaky, Gate, Turns, broken, counts, quick, slow

# -- T40 ---------------------------------------------------------------------------------


@virtual
async def test_t40_pool_wait_returns_the_final_snapshot() -> None:
    async with TaskPool("waited") as pool:
        handle = await pool.submit(slow, 10, 42, key="k")
        shown = await pool_wait(handle)
        assert asyncio.get_running_loop().time() == 10
        assert (shown._type, shown.id, shown.status, shown.result, shown.error) == (
            "pool_task",
            handle.id,
            "completed",
            42,
            None,
        )
        assert shown.submitted_at == handle.submitted_at
        assert shown.started_at == shown.submitted_at
        assert shown.finished_at == shown.started_at + 10


@virtual
async def test_t40_it_never_raises_for_the_tasks_own_end() -> None:
    async with TaskPool(backpressure=ring_buffer(2)) as pool:
        error = LookupError("mine")
        cancelled = await pool.submit(slow, 60)
        rejected, failed, expired = (
            await pool.submit(quick),
            await pool.submit(broken, error),
            await pool.submit(quick, ttl=1),
        )
        await asyncio.sleep(2)
        cancelled.cancel()
        shown = await pool_wait([cancelled, rejected, failed, expired])
        assert [one.status for one in shown] == ["cancelled", "rejected", "failed", "expired"]
        assert shown[2].error is error or "mine" in str(shown[2].error)
        assert all(one.result is None for one in shown)
        assert all(one.finished_at is not None for one in shown)


@virtual
async def test_t40_a_list_gives_a_list_in_input_order() -> None:
    async with TaskPool(max_concurrent=5) as pool:
        handles = [await pool.submit(slow, 5 - n, n) for n in range(5)]
        assert [one.result for one in await pool_wait(handles)] == [0, 1, 2, 3, 4]
        assert [one.result for one in await pool_wait(tuple(reversed(handles)))] == [4, 3, 2, 1, 0]
        assert [one.result for one in await pool_wait(handle for handle in handles[:2])] == [0, 1]
        assert [one.result for one in await pool_wait([handles[1], handles[1]])] == [1, 1]
        assert await pool_wait([]) == []


@virtual
async def test_t40_what_has_ended_returns_at_once() -> None:
    async with TaskPool() as pool:
        handle = await pool.submit(quick)
        await handle
        turned: list[int] = []
        asyncio.get_running_loop().call_soon(turned.append, 1)
        assert (await pool_wait(handle)).status == "completed"
        assert [one.status for one in await pool_wait([handle, handle])] == ["completed"] * 2
        assert turned == []


def test_t40_wait_agent_is_the_same_function() -> None:
    assert wait_agent is pool_wait


@pytest.mark.parametrize("bad", [None, 3, "id", [3], [None], object()])
@virtual
async def test_t40_only_handles_can_be_waited_for(bad: Any) -> None:
    with pytest.raises(InvalidType):
        await pool_wait(bad)


@virtual
async def test_t40_handles_of_several_pools() -> None:
    async with TaskPool("one") as one, TaskPool("two") as two:
        shown = await pool_wait([await one.submit(slow, 2), await two.submit(slow, 1)])
        assert [each.pool for each in shown] == ["one", "two"]


@virtual
async def test_t40_cancelling_the_wait_leaves_the_tasks_alone() -> None:
    async with TaskPool(max_concurrent=2) as pool:
        handles = [await pool.submit(slow, 10) for _ in range(3)]
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(pool_wait(handles), 5)
        assert {handle.status for handle in handles} == {"running", "queued"}


# -- T41: moves --------------------------------------------------------------------------


def story(handle: TaskHandle[Any], seen: list[str]) -> None:
    if not seen or seen[-1] != handle.status:
        seen.append(handle.status)


async def told(pool: TaskPool, body: Any, *args: Any, stop: float | None = None, **options: Any) -> list[str]:
    """Every state a queued task goes through, looked at after each turn of the loop."""
    blocker = await pool.submit(slow, 5)
    handle = await pool.submit(body, *args, **options)
    seen: list[str] = []
    if stop is not None:
        asyncio.get_running_loop().call_later(stop, handle.cancel)
    while not seen or seen[-1] in ("queued", "running"):
        story(handle, seen)
        await (asyncio.sleep(0.25) if seen[-1] == "queued" and not blocker.finished else asyncio.sleep(0))
        if (handle.status == "running" and options.get("timeout")) or (handle.status == "running" and stop is not None):
            await asyncio.sleep(0.25)
    for _ in range(5):
        await asyncio.sleep(1)
        story(handle, seen)
    return seen


@pytest.mark.parametrize(
    ("expected", "body", "args", "options"),
    [
        (["queued", "running", "completed"], quick, (), {}),
        (["queued", "running", "failed"], broken, (), {}),
        (["queued", "running", "failed"], slow, (60,), {"timeout": 1}),
        (["queued", "running", "cancelled"], slow, (60,), {"stop": 7}),
        (["queued", "cancelled"], quick, (), {"stop": 3}),
        (["queued", "expired"], quick, (), {"ttl": 3}),
    ],
)
@virtual
async def test_t41_every_way_from_queued(expected: list[str], body: Any, args: Any, options: Any) -> None:
    async with TaskPool() as pool:
        assert await told(pool, body, *args, **options) == expected


@virtual
async def test_t41_queued_to_rejected() -> None:
    async with TaskPool(backpressure=ring_buffer(1)) as pool:
        await pool.submit(slow, 1)
        handle = await pool.submit(quick)
        assert handle.status == "queued"
        await pool.submit(quick)
        assert handle.status == "rejected"


@virtual
async def test_t41_running_to_queued_to_running_on_a_retry() -> None:
    async with TaskPool() as pool:
        gates, seen = [Gate(), Gate()], []

        async def body() -> str:
            await gates[len(seen)].wait()
            seen.append("attempt")
            if len(seen) == 1:
                raise LookupError
            return "done"

        handle = await pool.submit(body, retries=1)
        first = handle.snapshot().attempt
        urgent = await pool.submit(slow, 1, priority=9)
        gates[0].open()
        await settle()
        assert (handle.status, urgent.status) == ("queued", "running")  # its slot was given back
        assert counts(pool) == {"active": 1, "queued": 1}
        await urgent
        assert handle.status == "running"
        assert handle.snapshot().attempt == first + 1
        gates[1].open()
        assert await handle == "done"
        assert counts(pool) == {"completed": 2}


@virtual
async def test_t41_a_retry_comes_back_to_the_head_of_its_partition() -> None:
    for queue in ("fifo", "priority", "lifo", "fair_round_robin", "fair_share"):
        async with TaskPool(queue=queue) as pool:
            order: list[str] = []

            async def body(name: str, order: list[str] = order) -> None:
                order.append(name)
                if name == "flaky" and order.count("flaky") == 1:
                    await asyncio.sleep(1)
                    raise LookupError

            await pool.submit(body, "flaky", key="a", retries=1)
            for number in range(3):
                await pool.submit(body, f"a{number}", key="a")
            await pool.drain()
            again = order.index("flaky", 1)
            assert again == 1, (queue, order)


@virtual
async def test_t41_a_retry_does_not_pass_a_higher_priority_or_another_tenants_turn() -> None:
    async with TaskPool() as pool:
        order: list[str] = []

        async def body(name: str) -> None:
            order.append(name)
            if name == "flaky" and order.count("flaky") < 3:
                raise LookupError

        await pool.submit(body, "flaky", retries=2)
        await pool.submit(body, "same")
        await pool.submit(body, "higher", priority=1)
        await pool.drain()
        assert order == ["flaky", "higher", "flaky", "flaky", "same"]
    async with TaskPool(queue=fair_round_robin()) as pool:
        order.clear()
        await pool.submit(body, "flaky", key="a", retries=2)
        for name in ("b1", "b2", "a1"):
            await pool.submit(body, name, key=name[0])
        await pool.drain()
        assert order.index("b1") <= 2
        assert order.index("a1") == 5 or order[-1] in ("a1", "b2")
        assert [name for name in order if name in ("flaky", "a1")] == ["flaky"] * 3 + ["a1"]


@virtual
async def test_t41_a_timeout_is_a_failed_attempt_and_each_attempt_has_its_own() -> None:
    async with TaskPool() as pool:
        calls: list[float] = []

        async def body() -> str:
            calls.append(asyncio.get_running_loop().time())
            await asyncio.sleep(10 if len(calls) < 3 else 1)
            return "done"

        assert await (await pool.submit(body, timeout=5, retries=2)) == "done"
        assert calls == [0, 5, 10]


@virtual
async def test_t41_a_retry_does_not_begin_after_its_deadline() -> None:
    async with TaskPool() as pool:
        calls: list[float] = []

        async def body() -> None:
            calls.append(asyncio.get_running_loop().time())
            await asyncio.sleep(4)
            raise LookupError

        handle = await pool.submit(body, deadline=10.0, retries=99)
        shown = await pool_wait(handle)
        assert calls == [0, 4, 8]
        assert asyncio.get_running_loop().time() == 10
        assert shown.status in ("failed", "expired")


@virtual
async def test_t41_a_full_queue_takes_a_retry_back() -> None:
    for on_full in ("block_submitter", "fail_submitter", "drop_newest"):
        async with TaskPool(backpressure=backpressure_queue(1, on_full)) as pool:
            gate, flaky = Gate(), Flaky(1)

            async def body(gate: Gate = gate, flaky: Flaky = flaky) -> int:
                await gate.wait()
                return await flaky.run()

            handle, other = await pool.submit(body, retries=1), await pool.submit(quick)
            gate.open()
            assert await handle == 2
            assert await other == "done"


@virtual
async def test_t41_one_terminal_state_ever() -> None:
    """Whatever happens at once: an end, a cancel, a timeout, a deadline, a drop."""
    with capture_events(AUDIT) as events:
        async with TaskPool(max_concurrent=3, backpressure=ring_buffer(5)) as pool:
            handles: list[TaskHandle[Any]] = []
            for number in range(200):
                options: dict[str, Any] = {"timeout": 1 + number % 2, "retries": number % 3, "ttl": 3}
                handles.append(await pool.submit(slow if number % 4 else broken, 1 if number % 4 else None, **options))
                asyncio.get_running_loop().call_later(number % 3, handles[-1].cancel)
                if number % 7 == 0:
                    await asyncio.sleep(1)
            await pool.drain()
            final = {handle.id: handle.status for handle in handles}
            for handle in handles:
                assert handle.cancel() is False
            await asyncio.sleep(10)
            assert {handle.id: handle.status for handle in handles} == final
    ends = events.of(PoolFinish)
    assert {event.task_id: event.status for event in ends} == final
    assert len(ends) == 200
    assert sum(counts(pool).values()) == 200


@virtual
async def test_t41_a_timeout_and_a_cancel_at_once_give_one_end() -> None:
    async with TaskPool() as pool:
        handle = await pool.submit(slow, 60, timeout=5)
        asyncio.get_running_loop().call_later(5, handle.cancel)
        assert (await pool_wait(handle)).status in ("cancelled", "failed")
        assert counts(pool) in ({"cancelled": 1}, {"failed": 1})


@virtual
async def test_t41_a_cancel_in_the_turn_in_which_the_body_ends() -> None:
    async with TaskPool() as pool:
        handle, behind = await pool.submit(slow, 5), await pool.submit(slow, 1)
        asyncio.get_running_loop().call_at(5, handle.cancel)
        assert (await pool_wait(handle)).status in ("cancelled", "completed")
        assert await behind == "done"


@virtual
async def test_t41_base_exceptions_of_a_body_do_not_lose_the_slot() -> None:
    class Odd(BaseException):
        pass

    async def body() -> None:
        raise Odd

    async with TaskPool() as pool:
        handle, behind = await pool.submit(body), await pool.submit(quick)
        assert (await pool_wait(handle)).status == "failed"
        assert await behind == "done"
        with pytest.raises(Odd):
            await handle


@virtual
async def test_t41_attempts_that_are_told_are_attempts_that_ran() -> None:
    with capture_events(AUDIT) as events:
        async with TaskPool(max_concurrent=2) as pool:
            turns = Turns()

            async def body(n: int) -> None:
                turns.order.append(n)
                if turns.order.count(n) <= n % 3:
                    raise LookupError

            for number in range(30):
                await pool.submit(body, number, retries=2)
    assert len(events.of(PoolDequeue)) == len(turns.order) == 60
    assert counts(pool) == {"completed": 30}
