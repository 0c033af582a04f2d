"""T14: the same work twice is one task."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest

from headgate import (
    IdempotencyConflict,
    InvalidArgument,
    PoolClosed,
    QueueFull,
    SubmitTimeout,
    TaskHandle,
    TaskPool,
    backpressure_queue,
    pool_wait,
    ring_buffer,
    subscribe,
)
from headgate.core.clock import clock
from headgate.stores import MemoryStore
from headgate.testing import settle, virtual
from tests.support.tasks.support import AUDIT, Flaky, Gate, broken, counts, quick, slow


@virtual
async def test_t14_a_duplicate_is_the_same_handle_in_every_state() -> None:
    async with TaskPool() as pool:
        gate = Gate()
        blocker = await pool.submit(gate.wait, idempotency_key="running")
        queued = await pool.submit(quick, idempotency_key="queued")
        assert await pool.submit(gate.wait, idempotency_key="running") is blocker
        assert await pool.submit(quick, idempotency_key="queued") is queued
        assert pool.submit_nowait(quick, idempotency_key="queued") is queued
        gate.open()
        await queued
        assert await pool.submit(quick, idempotency_key="queued") is queued
        assert gate.entered == 1
        assert pool.snapshot().total == 2


@pytest.mark.parametrize("blank", ["", "   ", "\n"])
@virtual
async def test_t14_a_blank_key_is_refused(blank: str) -> None:
    async with TaskPool() as pool:
        with pytest.raises(InvalidArgument, match="idempotency_key"):
            await pool.submit(quick, idempotency_key=blank)
        assert pool.snapshot().total == 0


@virtual
async def test_t14_keys_belong_to_one_pool() -> None:
    async with TaskPool() as one, TaskPool() as other:
        first = await one.submit(quick, idempotency_key="k")
        assert await other.submit(quick, idempotency_key="k") is not first


# -- parked submitters -------------------------------------------------------------------


@virtual
async def test_t14_two_submitters_parked_with_one_key_get_one_task() -> None:
    async with TaskPool(backpressure=backpressure_queue(1)) as pool:
        calls: list[str] = []

        async def body() -> None:
            calls.append("run")

        await pool.submit(slow, 1)
        await pool.submit(slow, 1)
        parked = [asyncio.create_task(pool.submit(body, idempotency_key="k")) for _ in range(3)]
        await settle()
        assert pool.snapshot().blocked_submitters == 3
        handles = await asyncio.gather(*parked)
        assert len(set(handles)) == 1
        await pool.drain()
    assert calls == ["run"]
    assert counts(pool) == {"completed": 3}


@pytest.mark.parametrize("how", ["cancel", "wait_timeout"])
@virtual
async def test_t14_when_one_of_two_parked_gives_up_the_other_still_gets_the_task(how: str) -> None:
    async with TaskPool(backpressure=backpressure_queue(1)) as pool:
        await pool.submit(slow, 10)
        await pool.submit(slow, 10)
        patience = {"wait_timeout": 5} if how == "wait_timeout" else {}
        hasty = asyncio.create_task(pool.submit(quick, idempotency_key="k", **patience))
        patient = asyncio.create_task(pool.submit(quick, idempotency_key="k"))
        await settle()
        if how == "cancel":
            hasty.cancel()
        await asyncio.wait([hasty])
        assert hasty.cancelled() or isinstance(hasty.exception(), SubmitTimeout)
        assert pool.snapshot().blocked_submitters == 1
        assert await (await patient) == "done"


@virtual
async def test_t14_when_all_parked_give_up_the_key_is_free() -> None:
    async with TaskPool(backpressure=backpressure_queue(1)) as pool:
        await pool.submit(slow, 10)
        await pool.submit(slow, 10)
        parked = [asyncio.create_task(pool.submit(quick, idempotency_key="k")) for _ in range(2)]
        await settle()
        for one in parked:
            one.cancel()
        await asyncio.wait(parked)
        assert pool.snapshot().blocked_submitters == 0
        await pool.drain()
        other = await pool.submit(quick, "other work", idempotency_key="k")
        assert await other == "other work"


@virtual
async def test_t14_one_of_two_parked_is_cancelled_in_the_moment_both_are_let_in() -> None:
    async with TaskPool(backpressure=backpressure_queue(1)) as pool:
        gate = Gate()
        await pool.submit(gate.wait)
        await pool.submit(slow, 5)
        hasty, patient = [asyncio.create_task(pool.submit(quick, idempotency_key="k")) for _ in range(2)]
        await settle()

        def listen(event: Any) -> None:
            if event.name == "pool_submit":
                hasty.cancel()

        unsubscribe = subscribe(listen, AUDIT)
        gate.open()
        await asyncio.wait([hasty, patient])
        unsubscribe()
        assert await (await patient) == "done"  # it holds the handle: nobody else's cancel is its task's


@virtual
async def test_t14_a_conflict_with_a_parked_submitter_is_seen_too() -> None:
    async with TaskPool(backpressure=backpressure_queue(1)) as pool:
        await pool.submit(slow, 1)
        await pool.submit(slow, 1)
        parked = asyncio.create_task(pool.submit(quick, 1, idempotency_key="k"))
        await settle()
        with pytest.raises(IdempotencyConflict):
            await pool.submit(quick, 2, idempotency_key="k")
        with pytest.raises(QueueFull):
            pool.submit_nowait(quick, 1, idempotency_key="k")
        assert await (await parked) == 1


@virtual
async def test_t14_parked_submitters_of_one_key_all_hear_that_the_pool_closes() -> None:
    pool = TaskPool(backpressure=backpressure_queue(1))
    await pool.submit(slow, 1)
    await pool.submit(slow, 1)
    parked = [asyncio.create_task(pool.submit(quick, idempotency_key="k")) for _ in range(2)]
    await settle()
    await pool.close()
    assert [type(one.exception()) for one in parked] == [PoolClosed, PoolClosed]


# -- windows -----------------------------------------------------------------------------


async def ended(pool: TaskPool, status: str, **options: Any) -> TaskHandle[Any]:
    """A task of this key that has ended so. Its payload is always the same."""
    if status == "completed":
        handle = await pool.submit(_body, "ok", **options)
    elif status == "failed":
        handle = await pool.submit(_body, "fail", **options)
    elif status == "cancelled":
        handle = await pool.submit(_body, "hang", **options)
        handle.cancel()
    elif status == "expired":
        blocker = await pool.submit(slow, 2)
        handle = await pool.submit(_body, "ok", ttl=1, **options)
        await blocker
    else:
        blocker = await pool.submit(slow, 2)
        handle = await pool.submit(_body, "ok", **options)
        await pool.submit(slow, 0)
        await blocker
    await pool_wait(handle)
    await pool.drain()
    assert handle.status == status
    return handle


async def _body(how: str) -> str:
    if how == "fail":
        raise LookupError("failed")
    if how == "hang":
        await asyncio.sleep(3600)
    return how


HOLDS = {
    "while_active": set(),
    "until_success": {"completed"},
    "forever": {"completed", "failed", "expired"},
    50: {"completed"},
}


@pytest.mark.parametrize("status", ["completed", "failed", "cancelled", "expired", "rejected"])
@pytest.mark.parametrize("window", [None, *HOLDS])
@virtual
async def test_t14_a_window_says_which_ends_hold_the_key(window: Any, status: str) -> None:
    holds = HOLDS[window or "until_success"]
    options = {} if window is None else {"window": window}
    async with TaskPool(backpressure=ring_buffer(1)) as pool:
        handle = await ended(pool, status, idempotency_key="k", **options)
        payload = {"failed": "fail", "cancelled": "hang"}.get(status, "ok")
        again = await pool.submit(_body, payload, idempotency_key="k", **options)
        assert (again is handle) == (status in holds)
        again.cancel()


@virtual
async def test_t14_a_window_in_seconds_lapses() -> None:
    async with TaskPool() as pool:
        first = await pool.submit(slow, 10, idempotency_key="k", window=30)
        await first
        await asyncio.sleep(29)
        assert await pool.submit(slow, 10, idempotency_key="k", window=30) is first
        await asyncio.sleep(2)
        second = await pool.submit(quick, "even other work", idempotency_key="k", window=30)
        assert second is not first
        assert await second == "even other work"


@contextmanager
def jumping_clock() -> Iterator[list[float]]:
    """A wall clock that somebody sets: it is so many seconds ahead of the loop's time."""
    ahead, usual = [0.0], clock.wall
    with clock.replaced(wall=lambda: usual() + ahead[0]):
        yield ahead


@pytest.mark.parametrize("jump", [3600.0, -3600.0, 1e9])
@virtual
async def test_t14_a_wall_clock_that_is_set_neither_ends_nor_lengthens_a_window(jump: float) -> None:
    with jumping_clock() as ahead:
        async with TaskPool() as pool:
            first = await pool.submit(quick, idempotency_key="k", window=60)
            await first
            ahead[0] += jump
            await asyncio.sleep(59)
            assert await pool.submit(quick, idempotency_key="k", window=60) is first
            ahead[0] -= jump
            await asyncio.sleep(2)
            assert await pool.submit(quick, idempotency_key="k", window=60) is not first


@pytest.mark.parametrize(("away", "held_for"), [(0.0, 50), (40.0, 10), (-3600.0, 60), (61.0, 0)])
@virtual
async def test_t14_after_a_restart_the_wall_clock_says_how_much_of_a_window_is_left(away: float, held_for: int) -> None:
    store = MemoryStore()

    def durable() -> TaskPool:
        return TaskPool("work", scope="pipeline", pipeline_id="p", store=store)

    with jumping_clock() as ahead:
        async with durable() as pool:
            await (await pool.submit(quick, idempotency_key="k", window=60))
            await asyncio.sleep(10)
        ahead[0] += away
        async with durable() as pool:
            if held_for:
                held = await pool.submit(quick, "k", idempotency_key="j")
                assert held.number == 2
                ahead[0] += 1000  # from here on it does not matter
                await asyncio.sleep(held_for - 1)
                assert (await pool.submit(quick, idempotency_key="k", window=60)).number == 1
                await asyncio.sleep(2)
            fresh = await pool.submit(quick, idempotency_key="k", window=60)
            assert fresh.number > 1
            assert await fresh == "done"


@virtual
async def test_t14_a_journal_that_is_compacted_while_the_wall_clock_is_ahead_keeps_its_keys() -> None:
    store = MemoryStore()
    with jumping_clock() as ahead:
        async with TaskPool("work", scope="pipeline", pipeline_id="p", store=store, keep=10) as pool:
            await (await pool.submit(quick, idempotency_key="k", window=3600))
            ahead[0] += 7200
            for _ in range(600):  # more than a thousand lines
                await (await pool.submit(quick))
        ahead[0] -= 7200
        async with TaskPool("work", scope="pipeline", pipeline_id="p", store=store, keep=10) as pool:
            assert (await pool.submit(quick, idempotency_key="k", window=3600)).number == 1


@virtual
async def test_t14_a_window_in_seconds_does_not_lapse_under_a_running_task() -> None:
    async with TaskPool() as pool:
        first = await pool.submit(slow, 100, idempotency_key="k", window=1)
        await asyncio.sleep(50)
        assert await pool.submit(slow, 100, idempotency_key="k", window=1) is first


@virtual
async def test_t14_forever_returns_the_failed_task_and_its_failure() -> None:
    async with TaskPool() as pool:
        first = await pool.submit(broken, idempotency_key="k", window="forever")
        await pool_wait(first)
        again = await pool.submit(broken, idempotency_key="k", window="forever")
        assert again is first
        with pytest.raises(LookupError):
            await again


@virtual
async def test_t14_a_task_between_retries_is_active() -> None:
    async with TaskPool() as pool:
        flaky, gate = Flaky(1), Gate()
        first = await pool.submit(flaky.run, retries=1, priority=0, idempotency_key="k", window="while_active")
        urgent = await pool.submit(gate.wait, priority=9)
        await settle()
        assert (first.status, urgent.status) == ("queued", "running")  # its first attempt is over
        assert flaky.calls == 1
        assert await pool.submit(flaky.run, retries=1, idempotency_key="k", window="while_active") is first
        gate.open()
        assert await first == 2
        assert await pool.submit(flaky.run, idempotency_key="k", window="while_active") is not first


@virtual
async def test_t14_a_record_that_holds_its_key_is_exempt_from_keep() -> None:
    async with TaskPool(keep=2) as pool:
        first = await pool.submit(quick, idempotency_key="k")
        for _ in range(20):
            await (await pool.submit(quick))
        assert await pool.submit(quick, idempotency_key="k") is first
        shown = [task.id for task in pool.snapshot().tasks]
        assert len(shown) == 3
        assert first.id in shown
        released = await pool.submit(quick, idempotency_key="r", window="while_active")
        for _ in range(20):
            await (await pool.submit(quick))
        assert released.id not in [task.id for task in pool.snapshot().tasks]
        assert pool.snapshot().completed == 42


@virtual
async def test_t14_a_record_whose_window_lapsed_counts_in_keep() -> None:
    async with TaskPool(keep=2) as pool:
        first = await pool.submit(quick, idempotency_key="k", window=10)
        await first
        await asyncio.sleep(11)
        for _ in range(5):
            await (await pool.submit(quick, idempotency_key="j", window="while_active"))
        assert first.id not in [task.id for task in pool.snapshot().tasks]


# -- conflicts ---------------------------------------------------------------------------


class Adder:
    async def add(self, a: int, b: int = 0) -> int:
        return a + b


@virtual
async def test_t14_the_same_key_for_other_work_is_a_conflict() -> None:
    async with TaskPool() as pool:
        held = await pool.submit(slow, 1, "a", idempotency_key="k")
        for work in ((slow, 1, "b"), (slow, 1), (quick, 1, "a"), (slow, 1, "a", 3)):
            with pytest.raises(IdempotencyConflict) as caught:
                await pool.submit(*work, idempotency_key="k")
            assert caught.value.code == "HEADGATE-POL-006"
            assert "k" in str(caught.value)
        assert pool.snapshot().total == 1
        await held
        with pytest.raises(IdempotencyConflict):  # completed holds it
            await pool.submit(slow, 1, "b", idempotency_key="k")
        assert await pool.submit(slow, 1.0, "a", idempotency_key="k") is held  # 1 == 1.0


@virtual
async def test_t14_functions_are_compared_by_name_and_captured_values_not_at_all() -> None:
    def make(value: int) -> Any:
        async def body() -> int:
            return value

        return body

    async with TaskPool() as pool:
        first = await pool.submit(make(1), idempotency_key="k")
        assert await pool.submit(make(2), idempotency_key="k") is first
        method = await pool.submit(Adder().add, 1, idempotency_key="m")
        assert await pool.submit(Adder().add, 1, idempotency_key="m") is method


@virtual
async def test_t14_keyword_arguments_of_a_partial_are_arguments() -> None:
    async with TaskPool() as pool:
        first = await pool.submit(partial(Adder().add, b=2), 1, idempotency_key="k")
        assert await pool.submit(partial(Adder().add, b=2), 1, idempotency_key="k") is first
        with pytest.raises(IdempotencyConflict):
            await pool.submit(partial(Adder().add, b=3), 1, idempotency_key="k")


@virtual
async def test_t14_other_options_are_no_conflict() -> None:
    async with TaskPool() as pool:
        first = await pool.submit(slow, 1, idempotency_key="k", priority=1)
        assert await pool.submit(slow, 1, idempotency_key="k", priority=2, timeout=5) is first
        assert first.snapshot().priority == 1


@virtual
async def test_t14_ends_that_release_let_other_work_have_the_key() -> None:
    async with TaskPool() as pool:
        failed = await pool.submit(broken, idempotency_key="k")
        await pool_wait(failed)
        other = await pool.submit(quick, idempotency_key="k")
        assert await other == "done"


# -- what differs, and who says that nothing does --------------------------------------------------------------------


class Unshowable:
    def __repr__(self) -> str:
        raise RuntimeError

    __hash__ = None  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ((slow, 1, "a"), (slow, 1, "b"), "the arguments differ: argument 2 was 'a' and is now 'b'"),
        ((slow, 1), (slow, 1, "a"), "the arguments differ: there were 1 and are now 2"),
        ((slow, 1), (quick, 1), r"the function differs: it was .*:slow and is now .*:quick, with the same arguments"),
        ((slow, 1), (quick, 2), r"the function differs: it was .*:slow and is now .*:quick, with other arguments"),
        ((slow, "x" * 1000), (slow, "y" * 1000), r"argument 1 was 'x{10,60}\.\.\.x+' and is now 'y{10,60}\.\.\.y+'"),
        ((slow, Unshowable()), (slow, Unshowable()), r"argument 1 was .*Unshowable.* and is now .*Unshowable"),
    ],
)
@virtual
async def test_t19_a_conflict_says_what_differs_old_and_new(old: Any, new: Any, says: str) -> None:
    async with TaskPool() as pool:
        held = await pool.submit(*old, idempotency_key="k")
        with pytest.raises(IdempotencyConflict, match=says):
            await pool.submit(*new, idempotency_key="k")
        with pytest.raises(IdempotencyConflict, match=r"payload_id.*trust_key"):  # the remedy
            await pool.submit(*new, idempotency_key="k")
        held.cancel()


@virtual
async def test_t19_trust_key_gives_the_held_task_whatever_is_submitted() -> None:
    async with TaskPool(on_conflict="trust_key") as pool:
        held = await pool.submit(quick, "a", idempotency_key="k")
        assert await pool.submit(slow, 1, idempotency_key="k") is held
        assert await held == "a"
        assert await pool.submit(broken, idempotency_key="k") is held


@virtual
async def test_t19_a_payload_id_is_compared_instead_of_function_and_arguments() -> None:
    async with TaskPool() as pool:
        held = await pool.submit(quick, "a", idempotency_key="k", payload_id="v1")
        assert await pool.submit(slow, 1, idempotency_key="k", payload_id="v1") is held
        with pytest.raises(
            IdempotencyConflict, match="the payload differs: it was payload_id='v1' and is now payload_id='v2'"
        ):
            await pool.submit(quick, "a", idempotency_key="k", payload_id="v2")
        with pytest.raises(IdempotencyConflict, match=r"it was payload_id='v1' and is now .*:quick"):
            await pool.submit(quick, "a", idempotency_key="k")


@virtual
async def test_t19_payload_id_and_on_conflict_are_checked() -> None:
    async with TaskPool() as pool:
        with pytest.raises(InvalidArgument, match="payload_id names the work behind an idempotency_key"):
            await pool.submit(quick, payload_id="v1")
        for value in ("", " ", 3, b"x"):
            with pytest.raises(InvalidArgument, match="payload_id must be a non-blank string"):
                await pool.submit(quick, idempotency_key="k", payload_id=value)
    for value in ("trust", None, True):
        with pytest.raises(InvalidArgument, match="on_conflict must be 'error' or 'trust_key'"):
            TaskPool(on_conflict=value)  # type: ignore[arg-type]
