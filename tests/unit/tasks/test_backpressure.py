"""T30 to T33, T35: what happens to a submit that finds the queue full."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from headgate import (
    InvalidArgument,
    PoolBusy,
    QueueFull,
    SubmitTimeout,
    TaskPool,
    TaskRejected,
    backpressure_queue,
    fail_fast,
    fair_round_robin,
    pool_wait,
    ring_buffer,
    subscribe,
)
from headgate.sharing.memory import SharedMemory
from headgate.tasks import PoolSubmit
from headgate.testing import capture_events, run, settle, virtual
from tests.support.tasks.support import AUDIT, EVERY_STRATEGY, Flaky, Gate, Turns, counts, quick, slow
from tests.unit.tasks.test_shared_pools import Work, make


async def park(pool: TaskPool, *submits: tuple[Any, dict[str, Any]], fn: Any = quick) -> list[asyncio.Task[Any]]:
    """Submitters that wait to submit, in this order."""
    parked = []
    for name, options in submits:
        parked.append(asyncio.create_task(pool.submit(fn, name, **options)))
        await settle()
    return parked


# -- T30: block_submitter ----------------------------------------------------------------


@pytest.mark.parametrize("queue", EVERY_STRATEGY)
@virtual
async def test_t30_the_door_is_first_come_first_served(queue: str) -> None:
    """Whatever the order of the queue, and however important a waiting submitter is."""
    async with TaskPool(queue=queue, backpressure=backpressure_queue(1)) as pool:
        gates = [Gate() for _ in range(2)]
        for gate in gates:
            await pool.submit(gate.wait)
        with capture_events(AUDIT) as events:
            parked = await park(
                pool, *[(n, {"priority": n, "key": f"k{n % 2}"}) for n in range(6)], fn=lambda n: slow(1, n)
            )
            assert pool.snapshot().blocked_submitters == 6
            for gate in gates:
                gate.open()
            handles = await asyncio.gather(*parked)
            await pool.drain()
        entered = [event.task_id for event in events.of(PoolSubmit)]
        assert entered == [handle.id for handle in handles]


@virtual
async def test_t30_nobody_barges() -> None:
    async with TaskPool(backpressure=backpressure_queue(1)) as pool:
        gate, turns = Gate(), Turns()
        await pool.submit(gate.wait)
        await pool.submit(turns.take, "queued")
        parked = await park(pool, ("parked", {}), fn=turns.take)
        barged: list[object] = []

        def barge(event: Any) -> None:
            if event.name in ("pool_finish", "pool_dequeue") and not barged:
                try:
                    barged.append(pool.submit_nowait(turns.take, "barger"))
                except QueueFull:
                    barged.append("refused")

        unsubscribe = subscribe(barge, AUDIT)
        gate.open()
        await asyncio.gather(*parked)
        unsubscribe()
        await pool.drain()
    assert barged == ["refused"]
    assert turns.order == ["queued", "parked"]


@virtual
async def test_t30_a_submit_behind_a_parked_one_parks_too() -> None:
    async with TaskPool(max_concurrent=2, backpressure=backpressure_queue(1), max_concurrent_per_key=1) as pool:
        gate, turns = Gate(), Turns()
        await pool.submit(gate.wait, key="a")
        await pool.submit(quick, key="a")  # fills the queue, while a slot is free
        first = await park(pool, ("first", {"key": "a"}), fn=turns.take)
        assert pool.snapshot().blocked_submitters == 1
        gate.open()
        await asyncio.gather(*first)


@virtual
async def test_t30_it_wakes_exactly_as_many_as_there_is_room_for() -> None:
    async with TaskPool(backpressure=backpressure_queue(2)) as pool:
        gates = [Gate() for _ in range(10)]
        for gate in gates[:3]:
            await pool.submit(gate.wait)
        parked = []
        for gate in gates[3:]:
            parked.append(asyncio.create_task(pool.submit(gate.wait)))
            await settle()
        assert pool.snapshot().blocked_submitters == 7
        gates[0].open()
        await settle()
        assert [one.done() for one in parked] == [True] + [False] * 6
        pool.resize(3)
        await settle()
        assert [one.done() for one in parked] == [True] * 3 + [False] * 4
        assert counts(pool) == {"active": 3, "queued": 2, "completed": 1}
        (await parked[1]).cancel()  # queued: its place is free
        await settle()
        assert [one.done() for one in parked] == [True] * 4 + [False] * 3
        assert pool.snapshot().blocked_submitters == 3
        for gate in gates:
            gate.open()
        await asyncio.gather(*parked)


@virtual
async def test_t30_a_parked_submitter_can_be_cancelled() -> None:
    async with TaskPool(backpressure=backpressure_queue(1)) as pool:
        gate, turns = Gate(), Turns()
        await pool.submit(gate.wait)
        await pool.submit(turns.take, "queued")
        parked = await park(pool, *[(n, {}) for n in range(3)], fn=turns.take)
        parked[1].cancel()
        await settle()
        assert parked[1].cancelled()
        assert pool.snapshot().blocked_submitters == 2
        gate.open()
        await asyncio.wait(parked)
        await pool.drain()
    assert turns.order == ["queued", 0, 2]
    assert pool.snapshot().total == 4


@virtual
async def test_t30_a_submitter_cancelled_in_the_moment_it_is_let_in_leaves_no_orphan() -> None:
    async with TaskPool(backpressure=backpressure_queue(1)) as pool:
        gate, turns = Gate(), Turns()
        await pool.submit(gate.wait)
        queued = await pool.submit(slow, 5)
        parked = await park(pool, ("parked", {}), fn=turns.take)

        def listen(event: Any) -> None:
            if event.name == "pool_submit":
                parked[0].cancel()

        unsubscribe = subscribe(listen, AUDIT)
        gate.open()
        await asyncio.wait(parked)
        unsubscribe()
        await queued
        await pool.drain()
        if parked[0].cancelled():
            assert turns.order == []
        else:
            assert turns.order == ["parked"]
        assert pool.size() == 0


@virtual
async def test_t30_wait_timeout_ends_in_submit_timeout_and_leaves_nothing() -> None:
    async with TaskPool(backpressure=backpressure_queue(1)) as pool:
        await pool.submit(slow, 100)
        await pool.submit(slow, 100)
        with pytest.raises(SubmitTimeout):
            await pool.submit(quick, "one", wait_timeout=3, idempotency_key="k")
        assert asyncio.get_running_loop().time() == 3
        assert pool.snapshot().blocked_submitters == 0
        assert pool.snapshot().total == 2
        with pytest.raises(SubmitTimeout):
            await pool.submit(quick, "other", wait_timeout=3, idempotency_key="k")


@virtual
async def test_t30_a_wait_timeout_of_zero_does_not_wait() -> None:
    async with TaskPool(backpressure=backpressure_queue(1)) as pool:
        await pool.submit(slow, 1, wait_timeout=0)
        await pool.submit(slow, 1, wait_timeout=0)
        with pytest.raises(SubmitTimeout):
            await pool.submit(quick, wait_timeout=0)
        assert asyncio.get_running_loop().time() == 0


@pytest.mark.parametrize("how", ["cancel", "wait_timeout", "close"])
@virtual
async def test_t30_a_submitter_that_gave_up_is_forgotten_by_its_ttl_too(how: str) -> None:
    """Found by the storm: the errand of a task that was never accepted came due, and took others out of the queue."""
    async with TaskPool(queue="fifo", backpressure=backpressure_queue(3)) as pool:
        handles = [await pool.submit(slow, 10, n) for n in range(4)]
        patience = {"wait_timeout": 1} if how == "wait_timeout" else {}
        parked = asyncio.create_task(pool.submit(quick, ttl=5, **patience))
        await asyncio.sleep(1)
        if how == "cancel":
            parked.cancel()
        elif how == "close":
            asyncio.get_running_loop().call_soon(parked.cancel)
            await pool.close()
        await asyncio.wait([parked])
        assert await asyncio.gather(*handles) == [0, 1, 2, 3]
        assert pool.size() == 0
        assert counts(pool) == {"completed": 4}


@virtual
async def test_t30_when_the_first_at_the_door_gives_up_the_next_is_looked_at() -> None:
    async with TaskPool(max_concurrent=2, backpressure=backpressure_queue(1), max_concurrent_per_key=1) as pool:
        gate = Gate()
        await pool.submit(gate.wait, key="a")
        await pool.submit(gate.wait, key="a")  # the queue is full, and a slot is free
        first, second = await park(pool, (1, {"key": "a"}), (2, {"key": "b"}))
        assert not second.done()  # it could start, but stands behind
        first.cancel()
        await settle()
        assert second.done()
        assert await (await second) == 2
        gate.open()


@virtual
async def test_t30_delayed_tasks_take_a_place_and_running_ones_do_not() -> None:
    async with TaskPool(max_concurrent=5, backpressure=backpressure_queue(1)) as pool:
        for _ in range(4):
            await pool.submit(slow, 50)
        await pool.submit(quick, delay=20)
        assert counts(pool) == {"active": 4, "queued": 1}
        with pytest.raises(SubmitTimeout):
            await pool.submit(quick, delay=1, wait_timeout=5)
        assert (await pool.submit(slow, 1, wait_timeout=5)).status == "running"  # it needs no place


@virtual
async def test_t30_nobody_is_lost_under_churn() -> None:
    async with TaskPool(max_concurrent=3, backpressure=backpressure_queue(2)) as pool:

        async def submitter(number: int) -> int:
            return await (await pool.submit(slow, number % 5, number))

        assert await asyncio.gather(*[submitter(n) for n in range(300)]) == list(range(300))
    assert counts(pool) == {"completed": 300}


# -- T31, T33: drops ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("backpressure", "policy", "reason"),
    [
        (backpressure_queue(2, "drop_oldest"), "drop_oldest", "drop_oldest_queue_full"),
        (ring_buffer(2), "ring_buffer", "ring_buffer_drop_oldest"),
    ],
)
@pytest.mark.parametrize("queue", EVERY_STRATEGY)
@virtual
async def test_t31_the_oldest_queued_task_makes_room(queue: str, backpressure: Any, policy: str, reason: str) -> None:
    async with TaskPool(queue=queue, backpressure=backpressure) as pool:
        gate, turns = Gate(), Turns()
        running = await pool.submit(gate.wait)
        handles = [await pool.submit(turns.take, n, priority=-n, key=f"k{n}") for n in range(5)]
        assert [handle.status for handle in handles] == ["rejected"] * 3 + ["queued"] * 2
        assert running.status == "running"
        for handle in handles[:3]:
            shown = handle.snapshot()
            assert (shown.status, shown.rejection_reason, shown.rejection_policy) == ("rejected", reason, policy)
            with pytest.raises(TaskRejected):
                await handle
        assert handles[4].snapshot().rejection_reason is None
        assert handles[4].snapshot().rejection_policy is None
        gate.open()
    assert sorted(turns.order) == [3, 4]
    assert counts(pool) == {"completed": 3, "rejected": 3}


@virtual
async def test_t31_drop_newest_returns_the_new_task_rejected() -> None:
    async with TaskPool(backpressure=backpressure_queue(1, "drop_newest")) as pool:
        gate, turns = Gate(), Turns()
        await pool.submit(gate.wait)
        kept = await pool.submit(turns.take, "kept")
        dropped = await pool.submit(turns.take, "dropped", priority=99)
        assert (kept.status, dropped.status) == ("queued", "rejected")
        shown = dropped.snapshot()
        assert (shown.rejection_reason, shown.rejection_policy) == ("drop_newest_queue_full", "drop_newest")
        assert shown.started_at is None
        assert shown.finished_at is not None
        assert pool.submit_nowait(turns.take, "dropped too").status == "rejected"
        gate.open()
    assert turns.order == ["kept"]
    assert counts(pool) == {"completed": 2, "rejected": 2}


@virtual
async def test_t31_a_delayed_task_is_queued_and_can_be_the_oldest() -> None:
    async with TaskPool(backpressure=backpressure_queue(1, "drop_oldest")) as pool:
        delayed = await pool.submit(quick, delay=60)
        running = await pool.submit(slow, 1)
        assert (delayed.status, running.status) == ("queued", "running")
        queued = await pool.submit(quick)
        assert (delayed.status, queued.status) == ("rejected", "queued")


@virtual
async def test_t31_no_policy_drops_while_the_task_can_start() -> None:
    for backpressure in (ring_buffer(1), backpressure_queue(1, "drop_oldest"), backpressure_queue(1, "drop_newest")):
        async with TaskPool(max_concurrent=2, backpressure=backpressure) as pool:
            delayed = await pool.submit(quick, delay=5)
            handles = [await pool.submit(slow, 1) for _ in range(2)]
            assert [handle.status for handle in (delayed, *handles)] == ["queued", "running", "running"]


@pytest.mark.parametrize("on_full", ["drop_oldest", "drop_newest", "drop_fair"])
@virtual
async def test_t33_waiters_of_a_dropped_task_wake(on_full: Any) -> None:
    async with TaskPool(backpressure=backpressure_queue(1, on_full)) as pool:
        gate = Gate()
        await pool.submit(gate.wait)
        first = await pool.submit(quick)
        waiter = asyncio.create_task(pool_wait(first))
        await settle()
        second = await pool.submit(quick)
        await settle()
        dropped = second if on_full == "drop_newest" else first
        assert waiter.done() == (dropped is first)
        assert (await pool_wait(dropped)).status == "rejected"
        gate.open()
        await waiter


@virtual
async def test_t33_a_retry_of_a_running_task_is_not_dropped_by_its_own_policy() -> None:
    """It came back to the head of the queue; the newcomer is what is one too many."""
    for backpressure in (fail_fast(), backpressure_queue(1, "fail_submitter"), backpressure_queue(1)):
        async with TaskPool(backpressure=backpressure) as pool:
            assert await (await pool.submit(Flaky(2).run, retries=2)) == 3


# -- T32: raising ------------------------------------------------------------------------


@virtual
async def test_t32_fail_submitter_raises_queue_full() -> None:
    async with TaskPool(backpressure=backpressure_queue(2, "fail_submitter")) as pool:
        handles = [await pool.submit(slow, 1) for _ in range(3)]
        for _ in range(2):
            with pytest.raises(QueueFull) as caught:
                await pool.submit(quick, "one", idempotency_key="k")
            assert caught.value.code == "HEADGATE-POL-001"
        with pytest.raises(QueueFull):
            pool.submit_nowait(quick, "one", idempotency_key="k")
        assert pool.snapshot().total == 3
        assert len(pool.snapshot().tasks) == 3
        await handles[0]
        assert await (await pool.submit(quick, "other", idempotency_key="k")) == "other"


@virtual
async def test_t32_fail_fast_raises_pool_busy() -> None:
    async with TaskPool(max_concurrent=2, backpressure="fail_fast") as pool:
        handles = [await pool.submit(slow, 1) for _ in range(2)]
        with pytest.raises(PoolBusy) as caught:
            await pool.submit(quick, "one", idempotency_key="k")
        assert caught.value.code == "HEADGATE-POL-002"
        with pytest.raises(PoolBusy):
            pool.submit_nowait(quick)
        assert pool.snapshot().total == 2
        await asyncio.gather(*handles)
        assert await (await pool.submit(quick, "other", idempotency_key="k")) == "other"


@virtual
async def test_t32_fail_fast_refuses_a_delay() -> None:
    async with TaskPool(backpressure=fail_fast()) as pool:
        with pytest.raises(PoolBusy):
            await pool.submit(quick, delay=5)
        assert pool.snapshot().total == 0


@virtual
async def test_t32_fail_fast_never_fails_while_a_slot_is_free() -> None:
    async with TaskPool(max_concurrent=2, backpressure=fail_fast()) as pool:
        blocker = await pool.submit(slow, 1000)
        for number in range(200):
            handle = await pool.submit(quick if number % 2 else slow, number % 3)
            if number % 5 == 0:
                handle.cancel()
                await pool_wait(handle)
            else:
                await handle
        pool.resize(3)
        more = [await pool.submit(slow, 1) for _ in range(2)]
        with pytest.raises(PoolBusy):
            await pool.submit(quick)
        await asyncio.gather(*more)
        blocker.cancel()


@pytest.mark.parametrize("how", ["on_end", "listener"])
@virtual
async def test_t32_fail_fast_does_not_fail_in_the_very_moment_a_task_has_ended(how: str) -> None:
    """Who hears that a task has completed may submit the next: the slot is free."""
    async with TaskPool(backpressure=fail_fast()) as pool:
        heard: list[Any] = []

        def follow(_: Any) -> None:
            if len(heard) < 3:
                try:
                    heard.append(pool.submit_nowait(quick))
                except PoolBusy as busy:
                    heard.append(busy)

        handle = await pool.submit(quick)
        unsubscribe = subscribe(lambda event: follow(event) if event.name == "pool_finish" else None, AUDIT)
        if how == "on_end":
            unsubscribe()
            handle.on_end(follow)
        await handle
        await pool.drain()
        unsubscribe()
    assert not [one for one in heard if isinstance(one, PoolBusy)]


@virtual
async def test_t32_fail_fast_refuses_a_key_at_its_cap() -> None:
    async with TaskPool(max_concurrent=2, backpressure=fail_fast(), max_concurrent_per_key=1) as pool:
        await pool.submit(slow, 1, key="a")
        with pytest.raises(PoolBusy):
            await pool.submit(quick, key="a")
        assert (await pool.submit(slow, 1, key="b")).status == "running"


# -- T35: drop_fair ----------------------------------------------------------------------


@virtual
async def test_t35_a_flood_hurts_only_itself() -> None:
    async with TaskPool(queue=fair_round_robin(), backpressure=backpressure_queue(6, "drop_fair")) as pool:
        gate, turns = Gate(), Turns()
        await pool.submit(gate.wait)
        small = [await pool.submit(turns.take, f"s{n}", key=f"s{n}") for n in range(3)]
        flood = [await pool.submit(turns.take, f"f{n}", key="flood") for n in range(50)]
        late = await pool.submit(turns.take, "late", key="late")
        assert [handle.status for handle in (*small, late)] == ["queued"] * 4
        assert [handle.status for handle in flood] == ["rejected"] * 48 + ["queued"] * 2
        shown = flood[0].snapshot()
        assert (shown.rejection_reason, shown.rejection_policy) == ("drop_fair_queue_full", "drop_fair")
        gate.open()
    assert turns.order == ["s0", "s1", "s2", "f48", "late", "f49"]


@virtual
async def test_t35_the_victim_is_the_oldest_of_the_key_with_most() -> None:
    async with TaskPool(queue="priority", backpressure=backpressure_queue(5, "drop_fair")) as pool:
        await pool.submit(slow, 1)
        handles = {name: await pool.submit(quick, key=name[0]) for name in ("a1", "b1", "b2", "b3", "a2")}
        handles["c1"] = await pool.submit(quick, key="c", priority=5)
        assert [name for name, one in handles.items() if one.status == "rejected"] == ["b1"]
        handles["b2"].cancel()
        handles["c2"] = await pool.submit(quick, key="c")  # a, a, b, c, c: nobody is one too many
        assert [name for name, one in handles.items() if one.status == "rejected"] == ["b1"]
        handles["d1"] = await pool.submit(quick, key="d")
        rejected = [name for name, one in handles.items() if one.status == "rejected"]
        assert rejected in (["a1", "b1"], ["b1", "c1"])


@pytest.mark.parametrize("how", ["submit", "submit_nowait", "submit_many", "run"])
@virtual
async def test_t35_refuse_fair_refuses_the_tenant_that_floods_at_once(how: str) -> None:
    async with TaskPool(queue=fair_round_robin(), backpressure=backpressure_queue(4, "refuse_fair")) as pool:
        gate, turns = Gate(), Turns()
        await pool.submit(gate.wait)
        flood = [await pool.submit(turns.take, f"f{n}", key="flood") for n in range(4)]

        async def submit() -> None:
            if how == "submit":
                await pool.submit(turns.take, "f4", key="flood", idempotency_key="k")
            elif how == "submit_nowait":
                pool.submit_nowait(turns.take, "f4", key="flood")
            elif how == "submit_many":
                await pool.submit_many(turns.take, [("f4",)], key="flood")
            else:
                await pool.run(turns.take, "f4", key="flood")

        with pytest.raises(QueueFull, match=r"4 tasks are queued .* than the one that submits, 'flood'") as caught:
            await submit()
        assert (caught.value.queued, caught.value.active) == (4, 1)
        assert (await pool.submit(turns.take, "quiet", key="quiet", idempotency_key="k")).status == "queued"
        assert [handle.status for handle in flood] == ["queued"] * 3 + ["rejected"], "it loses the newest"
        shown = flood[3].snapshot()
        assert (shown.rejection_reason, shown.rejection_policy) == ("refuse_fair_queue_full", "refuse_fair")
        gate.open()
    assert turns.order == ["f0", "quiet", "f1", "f2"]


@virtual
async def test_t35_refuse_fair_refuses_the_newest_of_equals() -> None:
    async with TaskPool(backpressure=backpressure_queue(3, "refuse_fair")) as pool:
        gate = Gate()
        await pool.submit(gate.wait)
        handles = {key: await pool.submit(quick, key=key) for key in "abc"}
        for key in ("d", "a", None):
            with pytest.raises(QueueFull):
                await pool.submit(quick, key=key)
        handles["b"].cancel()
        handles["a2"] = await pool.submit(quick, key="a")
        handles["d"] = await pool.submit(quick, key="d")
        assert [name for name, one in handles.items() if one.status == "rejected"] == ["a2"]
        gate.open()
    assert counts(pool) == {"completed": 4, "cancelled": 1, "rejected": 1}


def test_t35_refuse_fair_works_in_a_shared_pool_and_counts_this_process_alone() -> None:
    async def main() -> None:
        place, work = SharedMemory(), Work()
        pool, _ = make(place, max_concurrent=1, backpressure=backpressure_queue(2, "refuse_fair"))
        running = await pool.submit(work, 0, key="a")
        flood = [await pool.submit(work, number, key="a") for number in (1, 2)]
        with pytest.raises(QueueFull):
            await pool.submit(work, 3, key="a")
        late = await pool.submit(work, 4, key="b")
        assert [one.status for one in (running, *flood, late)] == ["running", "queued", "rejected", "queued"]
        work.let_go()
        await pool.close()

    run(main)


def test_t35_refuse_fair_cannot_drop_what_another_process_queued() -> None:
    with pytest.raises(InvalidArgument, match="on_full='refuse_fair' cannot go with shared=True"):
        backpressure_queue(2, "refuse_fair", shared=True)
