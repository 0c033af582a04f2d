"""Pools that share a budget, each a member of a store in memory: all in one process, on one event loop.

Each pool plays a process of its own. Names are unique in a process, so a pool is made known under none here.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import Any

import pytest

import headgate
from headgate import (
    IdempotencyConflict,
    InvalidArgument,
    PoolBusy,
    QueueFull,
    ScopeNeedsStore,
    TaskFailed,
    TaskPool,
    WaitCycle,
    backpressure_queue,
    fair_round_robin,
    fair_share,
)
from headgate.sharing.memory import MemoryState, SharedMemory
from headgate.sharing.states import Step
from headgate.tasks.names import unregister
from headgate.tasks.scheduling.share import BLOCK
from headgate.testing import run, settle
from tests.support.tasks.result_samples import Answer

Made = tuple[TaskPool, MemoryState]


def make(place: SharedMemory, **options: Any) -> Made:
    """A pool of its own "process"."""
    member = place.member()
    settings = {"max_concurrent": 2, "scope": "tenant", "scope_id": "acme", "store": member, **options}
    pool = TaskPool("shared", **settings)
    unregister(pool)
    return pool, member


class Work:
    """Tasks that run until they are let go, and who ran."""

    def __init__(self) -> None:
        self.began: list[Any] = []
        self.running: Counter[Any] = Counter()
        self.most = 0
        self._open = False
        self._gates: dict[Any, asyncio.Event] = {}

    async def __call__(self, name: Any) -> Any:
        self.began.append(name)
        self.running[name] += 1
        self.most = max(self.most, self.running.total())
        try:
            await self.gate(name).wait()
        finally:
            self.running[name] -= 1
        return name

    def gate(self, name: Any) -> asyncio.Event:
        gate = self._gates.setdefault(name, asyncio.Event())
        if self._open:
            gate.set()
        return gate

    def let_go(self, *names: Any) -> None:
        """Let these end, or everything from now on."""
        self._open |= not names
        for name in names or list(self._gates):
            self.gate(name).set()


async def turns() -> None:
    await settle()


def scenario(body: Callable[[], Awaitable[None]]) -> Callable[[], None]:
    def test() -> None:
        run(body)

    test.__name__ = body.__name__
    return test


# -- making -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scope", ["tenant", "org"])
def test_g01_an_id_is_needed_and_the_error_names_the_three_ways(scope: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(f"HEADGATE_{scope.upper()}_ID", raising=False)
    with pytest.raises(InvalidArgument, match="needs the id") as caught:
        TaskPool("p", scope=scope, store=SharedMemory().member())  # type: ignore[arg-type]
    for way in ("scope_id=", f"HEADGATE_{scope.upper()}_ID", '"session"'):
        assert way in str(caught.value)
    monkeypatch.setenv(f"HEADGATE_{scope.upper()}_ID", "acme")
    pool = TaskPool("p", scope=scope, store=SharedMemory().member(), max_concurrent=1)  # type: ignore[arg-type]
    run(pool.close)


def test_g01_a_store_that_is_not_shared_is_refused_and_the_remedy_names_two_that_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("HEADGATE_STORE", raising=False)
    for store in (None, headgate.stores.MemoryStore()):
        with pytest.raises(ScopeNeedsStore) as caught:
            TaskPool("p", scope="tenant", scope_id="acme", store=store)
        assert "SqliteStore" in str(caught.value)
        assert "PostgresStore" in str(caught.value)
    assert headgate.pool_get("p") is None


@scenario
async def test_g01_pools_of_one_scope_id_and_name_share_one_budget() -> None:
    place, work = SharedMemory(), Work()
    pools = [make(place)[0] for _ in range(3)]
    other, _ = make(place, scope_id="another")
    for number, pool in enumerate(pools):
        for part in range(3):
            _ = await pool.submit(work, (number, part))
    _ = await other.submit(work, "other")
    assert work.running.total() == 3
    assert work.running["other"] == 1
    work.let_go("other")
    for _ in range(9):
        await turns()
        work.let_go(*[name for name, count in work.running.items() if count])
    await asyncio.gather(*(pool.close() for pool in (*pools, other)))
    assert len(work.began) == 10
    assert work.most == 3


def test_g04_a_newcomer_with_other_settings_is_warned_once_and_theirs_stand(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        place = SharedMemory()
        one, _ = make(place, max_concurrent=2, queue="fifo")
        with caplog.at_level(logging.WARNING, "headgate.tasks"):
            two, _ = make(place, max_concurrent=7, queue="lifo", max_concurrent_per_key=3)
        assert two.max_concurrent == 2
        (warning,) = caplog.records
        for part in ("max_concurrent=2", "max_concurrent=7", "'fifo'", "'lifo'", "max_concurrent_per_key=3"):
            assert part in warning.getMessage()
        await one.close()
        await two.close()

    run(main)


@scenario
async def test_g04_resize_and_limit_keys_count_for_everybody() -> None:
    place, work = SharedMemory(), Work()
    one, _ = make(place, max_concurrent=1, queue=fair_round_robin())
    two, _ = make(place, max_concurrent=1, queue=fair_round_robin())
    for number in range(4):
        _ = await one.submit(work, number, key="acme")
        _ = await two.submit(work, number + 10, key="bolt")
    assert work.running.total() == 1
    two.resize(3)
    await turns()
    assert work.running.total() == 3
    assert (one.max_concurrent, one.snapshot().max_concurrent) == (3, 3)
    one.limit_keys({"acme": 1})
    two.resize(4)
    await turns()
    assert sum(count for name, count in work.running.items() if name < 10) <= 2  # what runs goes on
    work.let_go()
    for _ in range(10):
        await turns()
        work.let_go()
    await asyncio.gather(one.close(), two.close())
    assert len(work.began) == 8


@scenario
async def test_g04_a_lower_limit_reaches_a_pool_that_is_alone_at_once() -> None:
    place, work = SharedMemory(), Work()
    one, _ = make(place, max_concurrent=3)
    two, _ = make(place, max_concurrent=3)
    for number in range(9):
        _ = await one.submit(work, number)
    two.resize(1)
    await asyncio.sleep(2 * BLOCK)
    work.let_go(0, 1, 2)
    await turns()
    assert work.running.total() == 1
    work.let_go()
    await asyncio.gather(one.close(), two.close())


def test_g04_weights_that_others_cannot_know_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="mapping"):
        make(SharedMemory(), queue=fair_share(weights=lambda tenant: 2.0))


# -- submitting -------------------------------------------------------------------------------------------------------


@scenario
async def test_g05_submit_waits_for_one_exchange_so_the_handle_says_running() -> None:
    place, work = SharedMemory(), Work()
    pool, _ = make(place, max_concurrent=1)
    first = await pool.submit(work, 1)
    second = await pool.submit(work, 2)
    assert (first.status, second.status) == ("running", "queued")
    third = pool.submit_nowait(work, 3)
    assert third.status == "queued"
    work.let_go(1, 2, 3)
    await pool.close()


@scenario
async def test_g05_fail_fast_decides_after_the_exchange() -> None:
    place, work = SharedMemory(), Work()
    one, _ = make(place, max_concurrent=1, backpressure="fail_fast")
    two, _ = make(place, max_concurrent=1, backpressure="fail_fast")
    first = await one.submit(work, 1)
    assert first.status == "running"
    with pytest.raises(PoolBusy, match="shared budget"):
        await two.submit(work, 2)
    assert two.size() == 0
    with pytest.raises(InvalidArgument, match="submit"):
        two.submit_nowait(work, 2)
    work.let_go(1)
    await first
    await turns()
    second = await two.submit(work, 2)
    assert second.status == "running"
    work.let_go()
    await asyncio.gather(one.close(), two.close())


@scenario
async def test_g05_tasks_one_after_the_other_need_one_exchange_while_there_is_no_other_member() -> None:
    place, work = SharedMemory(), Work()
    pool, member = make(place, max_concurrent=1, backpressure="fail_fast")
    work.let_go()
    await (await pool.submit(work, 0))
    member.hold_up()  # no exchange is possible now
    for number in range(1, 4):
        handle = await pool.submit(work, number)
        assert handle.status == "running"
        await handle
    assert pool.snapshot().shared.active == 0
    member.reconnect()
    await asyncio.sleep(1)
    (text,) = place.texts.values()
    assert '"h"' not in text, "a slot that is not used for a while goes back"
    await pool.close()


@scenario
async def test_g05_a_newcomer_is_not_refused_because_of_a_kept_slot() -> None:
    place, work = SharedMemory(), Work()
    work.let_go()
    one, _ = make(place, max_concurrent=1, backpressure="fail_fast")
    await (await one.submit(work, 1))
    two, _ = make(place, max_concurrent=1, backpressure="fail_fast")
    await turns()
    await (await two.submit(work, 2))
    await (await one.submit(work, 3))
    await asyncio.gather(one.close(), two.close())


@scenario
async def test_g05_a_submit_that_is_cancelled_in_the_exchange_leaves_nothing() -> None:
    place, work = SharedMemory(), Work()
    pool, member = make(place, max_concurrent=1)
    _ = await pool.submit(work, 0)
    work.let_go(0)
    await pool.drain()
    await asyncio.sleep(1)  # the slot is not kept any more
    member.hold_up()
    submitting = asyncio.ensure_future(pool.submit(work, 1))
    await asyncio.sleep(0)
    submitting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await submitting
    member.reconnect()
    await turns()
    assert work.began == [0]
    await pool.close()


@scenario
async def test_g20_a_pool_that_is_closed_while_the_store_hangs_gives_its_slot_back_when_it_answers() -> None:
    place, work = SharedMemory(), Work()
    one, member = make(place, max_concurrent=1)
    _ = await one.submit(work, 1)
    member.hold_up()
    began = asyncio.get_running_loop().time()
    await one.close(cancel=True)
    assert asyncio.get_running_loop().time() - began < 3, "it does not wait for ever"
    two, _ = make(place, max_concurrent=1)
    second = await two.submit(work, 2)
    assert second.status == "queued"
    member.reconnect()
    await turns()
    assert second.status == "running"
    await two.close(cancel=True)


@scenario
async def test_g20_a_pool_that_is_closed_while_the_store_cannot_write_gives_its_slot_back_afterwards() -> None:
    place, work = SharedMemory(), Work()
    one, member = make(place, max_concurrent=1)
    _ = await one.submit(work, 1)
    (key,) = place.texts
    good, place.texts[key] = place.texts[key], "garbage"
    await one.close(cancel=True)
    place.texts[key] = good
    member.wake(None)
    two, _ = make(place, max_concurrent=1)
    assert (await two.submit(work, 2)).status == "running"
    await two.close(cancel=True)


@scenario
async def test_g20_a_pool_closes_while_a_message_is_under_way_that_is_never_answered() -> None:
    place, work = SharedMemory(), Work()
    one, member = make(place, max_concurrent=1)
    member.hold_up()
    _ = one.submit_nowait(work, 1)
    await turns()
    await asyncio.wait_for(one.close(cancel=True), 3)
    member.reconnect()
    two, _ = make(place, max_concurrent=1)
    assert (await two.submit(work, 2)).status == "running"
    await two.close(cancel=True)


def test_g20_a_pool_is_closed_after_its_event_loop_and_gives_its_slots_back() -> None:
    place, work, loop = SharedMemory(), Work(), asyncio.new_event_loop()
    one, _ = make(place, max_concurrent=1)
    loop.run_until_complete(one.submit(work, 1))
    for task in asyncio.all_tasks(loop):
        task.cancel()
    loop.close()

    async def second() -> None:
        await one.close()
        two, _ = make(place, max_concurrent=1)
        assert (await two.submit(work, 2)).status == "running"
        await two.close(cancel=True)

    asyncio.run(second())


def test_g20_a_pool_whose_loop_was_closed_after_it_was_woken_gives_its_slots_back() -> None:
    """Between the last turn of the loop and its end nobody looks, and that must not be waited for."""
    place, work, loop = SharedMemory(), Work(), asyncio.new_event_loop()
    one, member = make(place, max_concurrent=1)
    loop.run_until_complete(one.submit(work, 1))
    member.wake(None)
    for task in asyncio.all_tasks(loop):
        task.cancel()
    loop.close()
    time.sleep(1.1)
    member.wake(None)

    async def second() -> None:
        two, _ = make(place, max_concurrent=1)
        assert (await two.submit(work, 2)).status == "running"
        await two.close(cancel=True)

    asyncio.run(second())
    assert one.size() == 1, "it was never closed"


def test_g20_a_store_that_is_closed_before_its_pool_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    place, work = SharedMemory(), Work()
    work.let_go()

    async def program() -> None:
        pool, member = make(place)
        await (await pool.submit(work, 1))
        await asyncio.sleep(1)
        member.close()
        await pool.close()

    asyncio.run(program())
    gc.collect()
    assert "never retrieved" not in caplog.text


@scenario
async def test_g02_a_pool_starts_nothing_while_a_newer_release_has_its_budget_and_goes_on_afterwards() -> None:
    place, work = SharedMemory(), Work()
    pool, member = make(place, max_concurrent=1)
    for number in range(3):
        _ = await pool.submit(work, number)
    assert pool.snapshot().shared.alone
    (key,) = place.texts
    place.texts[key] = '{"v":99}'
    member.wake(None)
    await turns()
    work.let_go(0)
    await asyncio.sleep(60)
    assert work.began == [0], "others may have the slot"
    assert place.texts[key] == '{"v":99}'
    del place.texts[key]
    await asyncio.sleep(2)
    assert work.began == [0, 1]
    work.let_go()
    await pool.close()


@scenario
async def test_g21_a_store_that_cannot_write_is_asked_once_a_second_however_often_it_says_to_look() -> None:
    place, work = SharedMemory(), Work()
    pool, member = make(place, max_concurrent=1)
    _ = await pool.submit(work, 0)
    (key,) = place.texts
    good, place.texts[key] = place.texts[key], "garbage"
    for _ in range(60):
        member.wake(None)
        await asyncio.sleep(0.4)
    asked = 0
    transact = member.transact

    def counted(*given: Any, **options: Any) -> Any:
        nonlocal asked
        asked += 1
        return transact(*given, **options)

    member.transact = counted  # type: ignore[method-assign]
    await asyncio.sleep(10)
    assert 8 <= asked <= 12
    place.texts[key] = good
    work.let_go()
    await pool.close()


@scenario
async def test_g12_backpressure_counts_this_process_or_all() -> None:
    place, work = SharedMemory(), Work()
    own, shared = backpressure_queue(3, "fail_submitter"), backpressure_queue(3, "fail_submitter", shared=True)
    one, _ = make(place, max_concurrent=1, backpressure=own)
    two, _ = make(place, max_concurrent=1, backpressure=shared)
    for number in range(4):
        _ = await one.submit(work, number)
    with pytest.raises(QueueFull):
        await one.submit(work, 9)
    with pytest.raises(QueueFull):
        await two.submit(work, 10)
    work.let_go()
    for _ in range(5):
        await turns()
        work.let_go()
    await one.close()
    _ = await two.submit(work, 11)
    work.let_go()
    await two.close()


@scenario
async def test_g12_a_submitter_that_waits_for_a_place_is_woken_by_another_process() -> None:
    place, work = SharedMemory(), Work()
    policy = backpressure_queue(1, shared=True)
    one, _ = make(place, max_concurrent=1, backpressure=policy)
    two, _ = make(place, max_concurrent=1, backpressure=policy)
    _ = await one.submit(work, 1)
    _ = await one.submit(work, 2)
    waiting = asyncio.ensure_future(two.submit(work, 3))
    await turns()
    assert not waiting.done()
    work.let_go(1)
    await turns()
    assert waiting.done()
    work.let_go(2, 3)
    await asyncio.gather(one.close(), two.close())


def test_g12_dropping_the_oldest_of_all_processes_is_refused() -> None:
    for on_full in ("drop_oldest", "drop_fair"):
        with pytest.raises(InvalidArgument, match="another process"):
            backpressure_queue(3, on_full, shared=True)  # type: ignore[arg-type]


# -- order and lending ------------------------------------------------------------------------------------------------


@scenario
async def test_g11_tenants_take_turns_across_pools() -> None:
    place, work = SharedMemory(), Work()
    pools = [make(place, max_concurrent=1, queue=fair_round_robin())[0] for _ in range(3)]
    blocker = await pools[0].submit(work, ("gate", 0), key="gate")
    for number in range(4):
        for pool in pools:
            _ = await pool.submit(work, ("flood", number), key="flood")
    for tenant, pool in zip("abc", pools, strict=True):
        for number in range(2):
            _ = await pool.submit(work, (tenant, number), key=tenant)
    work.let_go(("gate", 0))
    await blocker
    for _ in range(18):
        await asyncio.sleep(2 * BLOCK)
        work.let_go(*[name for name, count in work.running.items() if count])
    await asyncio.gather(*(pool.close() for pool in pools))
    began = [tenant for tenant, _ in work.began][1:]
    assert Counter(began[:8]) == {"flood": 2, "a": 2, "b": 2, "c": 2}


@scenario
async def test_g14_a_lender_of_a_pool_that_is_alone_resumes_before_its_newcomers() -> None:
    pool, _ = make(SharedMemory(), max_concurrent=2)
    ended: list[str] = []
    awaited: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    async def short(name: str) -> None:
        await asyncio.sleep(0.01)
        ended.append(name)

    async def lender() -> None:
        await (await awaited)
        ended.append("lender")

    first = await pool.submit(lender)
    before = [await pool.submit(short, "before") for _ in range(5)]
    awaited.set_result(await pool.submit(short, "awaited"))
    after = [await pool.submit(short, "after") for _ in range(30)]
    await asyncio.gather(first, *before, *after)
    await pool.close()
    assert ended.index("lender") - ended.index("awaited") <= 3, "and not behind all that was queued"


@scenario
async def test_g14_nested_work_does_not_deadlock_and_goes_first_in_its_own_process() -> None:
    place, order = SharedMemory(), []
    one, _ = make(place, max_concurrent=1)
    two, _ = make(place, max_concurrent=1)

    async def child(number: int) -> int:
        order.append(("child", number))
        await asyncio.sleep(0.01)
        return number

    async def parent() -> int:
        handles = [await one.submit(child, number) for number in range(3)]
        return sum([await handle for handle in handles])

    async def stranger(number: int) -> None:
        order.append(("stranger", number))
        await asyncio.sleep(0.01)

    family = await one.submit(parent)
    strangers = [await two.submit(stranger, number) for number in range(3)]
    assert await family == 3
    await asyncio.gather(*strangers)
    assert [who for who, _ in order[:3]] == ["child"] * 3
    await asyncio.gather(one.close(), two.close())


@scenario
async def test_g14_a_lent_slot_goes_back_to_the_others_when_no_descendant_is_queued() -> None:
    place, work = SharedMemory(), Work()
    one, _ = make(place, max_concurrent=1)
    two, _ = make(place, max_concurrent=1)
    elsewhere = TaskPool("elsewhere", max_concurrent=1)

    async def parent() -> str:
        return str(await (await elsewhere.submit(work, "inner")))

    outer = await one.submit(parent)
    await turns()
    other = await two.submit(work, "other")
    assert other.status == "running", "the parent waits, so its slot is free"
    work.let_go("inner")
    await turns()
    assert not outer.finished, "it resumes only with a slot"
    work.let_go("other")
    assert await outer == "inner"
    await asyncio.gather(one.close(), two.close(), elsewhere.close())


@scenario
async def test_g14_a_wait_in_a_circle_is_seen_in_this_process() -> None:
    pool, _ = make(SharedMemory(), max_concurrent=2)
    handles: list[Any] = []
    both = asyncio.Event()

    async def wait_for(index: int) -> Any:
        await both.wait()
        return await handles[index]

    handles += [await pool.submit(wait_for, 1), await pool.submit(wait_for, 0)]
    both.set()
    outcomes = await asyncio.gather(*handles, return_exceptions=True)
    assert any(isinstance(error, WaitCycle) for error in outcomes)
    await pool.close()


# -- members ----------------------------------------------------------------------------------------------------------


@scenario
async def test_g15_a_snapshot_shows_all_members() -> None:
    place, work = SharedMemory(), Work()
    one, _ = make(place, max_concurrent=2)
    two, _ = make(place, max_concurrent=2)
    for number in range(2):
        _ = await one.submit(work, number)
    for number in range(3):
        _ = await two.submit(work, number + 10)
    await turns()
    shared = two.snapshot().shared
    assert (shared["active"], shared["queued"], shared["held"]) == (2, 3, 0)
    assert [(member.held, member.queued, member.is_this_pool) for member in shared.members] == [
        (2, 0, False),
        (0, 3, True),
    ]
    assert all(member.host and member.pid for member in shared.members)
    stats = one.stats().shared
    assert stats is not None
    assert (stats["held"], len(stats["members"])) == (2, 2)
    assert two.snapshot().waiting_for.cause == "shared budget"  # type: ignore[union-attr]
    work.let_go()
    for _ in range(4):
        await turns()
        work.let_go()
    await asyncio.gather(one.close(), two.close())
    assert '"members":{}' in next(iter(place.texts.values()))


@scenario
async def test_g20_what_a_dead_process_held_is_free_at_once() -> None:
    place, work = SharedMemory(), Work()
    one, member = make(place, max_concurrent=1)
    two, _ = make(place, max_concurrent=1)
    _ = await one.submit(work, 1)
    second = await two.submit(work, 2)
    assert second.status == "queued"
    member.close()  # as if its process had ended
    await turns()
    assert second.status == "running"
    work.let_go()
    await two.close()
    await one.close(cancel=True)


def test_g20_a_lost_lease_starts_nothing_is_told_and_what_runs_finishes_uncounted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main() -> None:
        place, work = SharedMemory(), Work()
        one, member = make(place, max_concurrent=1)
        two, _ = make(place, max_concurrent=1)
        first = await one.submit(work, 1)
        queued = await one.submit(work, 2)
        other = await two.submit(work, 3)
        with caplog.at_level(logging.WARNING, "headgate.tasks"):
            member.lose()
            await turns()
        assert "the lease was lost; 1 running tasks finish" in caplog.text
        statuses = Counter((queued.status, other.status))
        assert statuses == {"queued": 1, "running": 1}, "the slot is given to one of those who wait"
        work.let_go(1)
        assert await first == 1
        await turns()
        assert Counter((queued.status, other.status)) == statuses, "the late end frees nothing"
        work.let_go(2, 3)
        await asyncio.gather(one.close(), two.close())

    run(main)


@scenario
async def test_g20_a_loop_that_is_busy_starts_nothing_with_a_lease_that_was_lost() -> None:
    place, work = SharedMemory(), Work()
    pool, member = make(place, max_concurrent=1)
    _ = await pool.submit(work, 1)
    queued = await pool.submit(work, 2)

    assert pool._shared is not None
    may_start = pool._shared.share.queue.is_valid
    member.lose()  # in the thread of the store: the loop, which may be busy, has not heard of it
    assert not may_start()
    await turns()
    assert may_start()
    assert queued.status == "queued", "what runs, although nobody counts it, is as much as the limit allows here"
    work.let_go(1)
    await turns()
    assert queued.status == "running"
    work.let_go()
    await pool.close()


@scenario
async def test_g20_on_lease_lost_cancel_cancels_what_runs() -> None:
    place, work = SharedMemory(), Work()
    one, member = make(place, max_concurrent=1, on_lease_lost="cancel")
    first = await one.submit(work, 1)
    member.lose()
    await turns()
    assert first.status == "cancelled"
    work.let_go()
    assert await (await one.submit(work, 2)) == 2
    await one.close()


def test_g21_without_the_store_nothing_starts_and_it_resumes_by_itself(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        place, work = SharedMemory(), Work()
        one, member = make(place, max_concurrent=1)
        two, _ = make(place, max_concurrent=1)
        _ = await one.submit(work, 1)
        _ = await two.submit(work, 2)
        await turns()
        with caplog.at_level(logging.WARNING, "headgate.tasks"):
            member.cut_off()
            await turns()
        assert "no task starts" in caplog.text
        late = await one.submit(work, 3)
        work.let_go(1)
        await turns()
        assert late.status == "queued"
        assert work.running == {1: 0, 2: 0} or work.running.total() == 0, "nobody has the slot that it cannot give back"
        member.reconnect()
        await turns()
        assert work.running.total() == 1
        work.let_go(2, 3)
        await asyncio.gather(one.close(), two.close())

    run(main)


@scenario
async def test_g20_past_its_deadline_a_member_starts_nothing() -> None:
    place, work = SharedMemory(), Work()
    pool, member = make(place, max_concurrent=1)
    _ = await pool.submit(work, 1)
    queued = await pool.submit(work, 2)
    member.deadline = -1.0
    work.let_go(1)
    await turns()
    assert queued.status == "queued"
    member.deadline = float("inf")
    member.wake(None)
    await turns()
    assert queued.status == "running"
    work.let_go(2)
    await pool.close()


def test_g24_a_damaged_state_is_a_clear_error_and_runs_nothing() -> None:
    place = SharedMemory()
    pool, _ = make(place)
    run(pool.close)
    (key,) = place.texts
    place.texts[key] = '{"f":1,"error":"os:system"}'
    with pytest.raises(headgate.StoreWriteFailed, match="cannot be read"):
        make(place)
    assert headgate.pool_get("shared") is None


def test_g01_tenants_that_others_could_not_compare_are_refused() -> None:
    async def main() -> None:
        pool, _ = make(SharedMemory(), queue=fair_round_robin())
        with pytest.raises(InvalidArgument, match="compare"):
            await pool.submit(asyncio.sleep, 0, key=object())
        _ = await pool.submit(asyncio.sleep, 0, key=("acme", 7))
        _ = await pool.submit(asyncio.sleep, 0, key="x" * 500)
        await pool.close()

    run(main)


# -- idempotency ------------------------------------------------------------------------------------------------------


@scenario
async def test_g13_a_key_runs_once_and_the_loser_gets_the_result() -> None:
    place, work = SharedMemory(), Work()
    one, _ = make(place)
    two, _ = make(place)
    winner = await one.submit(work, 1, idempotency_key="k")
    loser = await two.submit(work, 1, idempotency_key="k")
    again = await two.submit(work, 1, idempotency_key="k")
    assert again is loser
    assert (winner.status, loser.status) == ("running", "queued")
    work.let_go(1)
    assert await loser == 1
    assert await winner == 1
    assert work.began == [1]
    late = await two.submit(work, 1, idempotency_key="k")
    assert late is loser
    three, _ = make(place)
    assert await (await three.submit(work, 1, idempotency_key="k")) == 1
    assert work.began == [1]
    await asyncio.gather(one.close(), two.close(), three.close())


@scenario
async def test_g13_when_the_winner_dies_the_follower_runs_it() -> None:
    place, work = SharedMemory(), Work()
    one, member = make(place)
    two, _ = make(place)
    winner = await one.submit(work, 1, idempotency_key="k")
    loser = await two.submit(work, 1, idempotency_key="k")
    member.close()
    await turns()
    assert loser.status == "running"
    work.let_go(1)
    assert await loser == 1
    assert await winner == 1
    await turns()
    assert work.began == [1, 1]
    await two.close()
    await one.close()
    three, _ = make(place)
    assert await (await three.submit(work, 1, idempotency_key="k")) == 1
    assert work.began == [1, 1], "the late result of the dead one changed nothing"
    await three.close()


@scenario
async def test_g13_a_follower_that_is_woken_twice_keeps_what_it_takes_over() -> None:
    place, work = SharedMemory(), Work()
    one, dies = make(place)
    two, member = make(place)
    _ = await one.submit(work, 1, idempotency_key="k")
    loser = await two.submit(work, 1, idempotency_key="k")
    member.hold_up()  # two wake-ups come before the answer to the first
    dies.close()
    held, member._held_back = member._held_back, None
    member.wake(None)
    member._held_back = held
    await turns()
    member._held_back, again = None, member._held_back
    member.wake(None)
    await turns()
    for call in again or ():
        member._run(call)
    await turns()
    assert loser.status == "running"
    work.let_go(1)
    assert await loser == 1
    await turns()
    three, _ = make(place)
    assert await (await three.submit(work, 1, idempotency_key="k")) == 1
    assert work.began == [1, 1], "its result is kept"
    await asyncio.gather(one.close(cancel=True), two.close(), three.close())


@scenario
async def test_g13_when_the_winner_dies_exactly_one_of_those_who_follow_runs_it() -> None:
    place, work = SharedMemory(), Work()
    one, dies = make(place)
    pools = [make(place)[0] for _ in range(3)]
    _ = await one.submit(work, 1, idempotency_key="k", window="while_active")
    losers = [await pool.submit(work, 1, idempotency_key="k", window="while_active") for pool in pools]
    dies.close()
    await turns()
    assert sorted(loser.status for loser in losers) == ["queued", "queued", "running"]
    work.let_go(1)
    assert await asyncio.gather(*losers) == [1, 1, 1]
    assert work.began == [1, 1], "the others have the result of the one that took over, though the key is free"
    await asyncio.gather(one.close(cancel=True), *(pool.close() for pool in pools))


@scenario
async def test_g13_an_end_that_the_store_could_not_write_is_told_again() -> None:
    place, work = SharedMemory(), Work()
    one, member = make(place)
    two, _ = make(place)
    winner = await one.submit(work, 1, idempotency_key="k")
    loser = await two.submit(work, 1, idempotency_key="k")
    transact = member.transact

    def full(key: str, step: Step, *, durable: bool = False) -> Future[Any]:
        if not durable:
            return transact(key, step)
        future: Future[Any] = Future()
        future.set_exception(headgate.StoreWriteFailed("the disk is full"))
        return future

    member.transact = full  # type: ignore[method-assign]
    work.let_go(1)
    assert await winner == 1
    await asyncio.sleep(5.0)  # on the virtual clock
    assert loser.status == "queued"
    member.transact = transact  # type: ignore[method-assign]
    assert await loser == 1
    assert work.began == [1]
    await asyncio.gather(one.close(), two.close())


@scenario
async def test_g13_a_follower_that_is_woken_before_an_older_answer_arrives_asks_again() -> None:
    place, work = SharedMemory(), Work()
    one, _ = make(place)
    two, member = make(place)
    _ = await one.submit(work, 1, idempotency_key="k")
    loser = await two.submit(work, 1, idempotency_key="k")
    late: list[tuple[Future[Any], Future[Any]]] = []
    transact = member.transact

    def slow(key: str, step: Step, *, durable: bool = False) -> Future[Any]:
        done = transact(key, step, durable=durable)
        if not durable:
            return done
        late.append((Future(), done))
        return late[-1][0]

    member.transact = slow  # type: ignore[method-assign]
    member.wake(None)
    await turns()
    work.let_go(1)
    await turns()
    for future, done in late:
        future.set_result(done.result())
    assert await loser == 1
    assert work.began == [1]
    await asyncio.gather(one.close(), two.close())


@scenario
async def test_g13_a_submit_that_is_cancelled_while_it_asks_for_a_key_gives_it_back() -> None:
    place, work = SharedMemory(), Work()
    one, _ = make(place)
    two, _ = make(place)
    asking = asyncio.ensure_future(one.submit(work, 1, idempotency_key="k"))
    await asyncio.sleep(0)
    assert any(key.endswith("/k") for key in place.texts), "the key is taken, and the submit does not know yet"
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    other = await two.submit(work, 1, idempotency_key="k")
    assert other.status == "running"
    work.let_go(1)
    assert await other == 1
    await asyncio.gather(one.close(), two.close())


@scenario
async def test_g13_cancelling_a_follower_only_stops_following() -> None:
    place, work = SharedMemory(), Work()
    one, _ = make(place)
    two, _ = make(place)
    winner = await one.submit(work, 1, idempotency_key="k")
    (text,) = (text for key, text in place.texts.items() if key.endswith("/k"))
    loser = await two.submit(work, 1, idempotency_key="k")
    assert loser.cancel()
    assert loser.status == "cancelled"
    await turns()
    assert text in place.texts.values(), "nobody follows any longer"
    work.let_go(1)
    assert await winner == 1
    await asyncio.gather(one.close(), two.close())


@scenario
async def test_g24_a_damaged_text_of_a_key_is_a_clear_error_and_runs_nothing() -> None:
    place, work = SharedMemory(), Work()
    pool, _ = make(place)
    work.let_go()
    await (await pool.submit(work, 1, idempotency_key="k"))
    await pool.close()
    (key,) = (key for key in place.texts if key.endswith("/k"))
    other, _ = make(place)
    for text, error in (
        ('{"v":1,"by":"m9/1","error":"os:system"}', headgate.StoreWriteFailed),
        ('{"v":2}', headgate.StoreFormatTooNew),
    ):
        place.texts[key] = text
        with pytest.raises(error, match="an idempotency key cannot be"):
            await other.submit(work, 2, idempotency_key="k")
        assert place.texts[key] == text
    assert work.began == [1]
    await other.close()


@scenario
async def test_g13_a_task_that_awaits_a_followed_one_lends_its_slot() -> None:
    place, work = SharedMemory(), Work()
    one, _ = make(place, max_concurrent=2)
    two, _ = make(place, max_concurrent=2)
    winner = await one.submit(work, "key", idempotency_key="k")

    async def outer() -> Any:
        return await (await two.submit(work, "key", idempotency_key="k"))

    waiting = await two.submit(outer)
    await turns()
    other = await two.submit(work, "other")
    assert other.status == "running", "two slots: the winner, and the one that was lent"
    work.let_go()
    assert await waiting == "key"
    assert await winner == "key"
    await asyncio.gather(one.close(), two.close())


@scenario
async def test_g13_failures_and_results_that_cannot_be_stored() -> None:
    place = SharedMemory()
    one, _ = make(place)
    two, _ = make(place)
    gate = asyncio.Event()

    async def fails() -> None:
        await gate.wait()
        raise LookupError("nothing there")

    async def opaque() -> object:
        await gate.wait()
        return Work()

    handles = [
        (await one.submit(fn, idempotency_key=key), await two.submit(fn, idempotency_key=key))
        for fn, key in ((fails, "f"), (opaque, "o"))
    ]
    gate.set()
    with pytest.raises(LookupError):
        await handles[0][0]
    with pytest.raises(TaskFailed, match="another process with builtins:LookupError: nothing there"):
        await handles[0][1]
    assert isinstance(await handles[1][0], Work)
    with pytest.raises(TaskFailed, match="Work"):
        await handles[1][1]
    await turns()
    again = await two.submit(fails, idempotency_key="f")
    with pytest.raises(LookupError):  # every end but success releases the key: it ran here
        await again
    await asyncio.gather(one.close(), two.close())


@scenario
async def test_g13_other_work_under_the_same_key_is_a_conflict() -> None:
    place, work = SharedMemory(), Work()
    one, _ = make(place)
    two, _ = make(place)
    _ = await one.submit(work, 1, idempotency_key="k")
    with pytest.raises(IdempotencyConflict, match="arguments differ"):
        await two.submit(work, 2, idempotency_key="k")
    with pytest.raises(InvalidArgument, match="idempotency_key"):
        two.submit_nowait(work, 1, idempotency_key="k")
    work.let_go()
    await asyncio.gather(one.close(), two.close())


@scenario
async def test_t19_shared_keys_know_payload_ids_and_trust() -> None:
    place, work = SharedMemory(), Work()
    one, _ = make(place)
    two, _ = make(place, on_conflict="trust_key")
    work.let_go()
    assert await (await one.submit(work, 1, idempotency_key="k")) == 1
    assert await (await one.submit(work, 1, idempotency_key="p", payload_id="v1")) == 1
    await turns()
    assert await (await two.submit(work, 2, idempotency_key="k")) == 1
    three, _ = make(place)
    assert await (await three.submit(work, 3, idempotency_key="p", payload_id="v1")) == 1
    with pytest.raises(IdempotencyConflict, match="it was payload_id='v1' and is now payload_id='v2'"):
        await three.submit(work, 1, idempotency_key="p", payload_id="v2")
    with pytest.raises(IdempotencyConflict, match=r"the arguments differ: .*a digest is stored, \w{8}"):
        await three.submit(work, 2, idempotency_key="k")
    assert work.began == [1, 1]
    await asyncio.gather(one.close(), two.close(), three.close())


class Handle:
    """Something that no store keeps."""


@scenario
async def test_t60c_shared_keys_carry_dataclasses_and_lose_what_cannot_be_kept() -> None:
    place = SharedMemory()
    one, _ = make(place)
    two, _ = make(place)
    ran = []

    async def result(value: Any) -> Any:
        ran.append(value)
        return Handle() if value == "handle" else Answer(value)

    assert await (await one.submit(result, "a", idempotency_key="a")) == Answer("a")
    assert type(await (await one.submit(result, "handle", idempotency_key="h"))) is Handle
    await turns()
    assert await (await two.submit(result, "a", idempotency_key="a")) == Answer("a")
    with pytest.raises(TaskFailed, match=r"another process with a .*Handle, which could not be kept"):
        await (await two.submit(result, "handle", idempotency_key="h"))
    rerun, _ = make(place, on_opaque="rerun")
    assert type(await (await rerun.submit(result, "handle", idempotency_key="h"))) is Handle
    assert ran == ["a", "handle", "handle"]
    await asyncio.gather(one.close(), two.close(), rerun.close())


def test_t60c_a_pool_of_shared_keys_warns_once_for_each_type(caplog: pytest.LogCaptureFixture) -> None:
    async def handle() -> Handle:
        return Handle()

    async def main() -> None:
        pool, _ = make(SharedMemory())
        for key in "ab":
            await (await pool.submit(handle, idempotency_key=key))
        await pool.close()

    run(main)
    [said] = [record.getMessage() for record in caplog.records if "is not kept" in record.getMessage()]
    assert "the pool 'shared': a result of type" in said
    assert "Handle has no form in JSON" in said


@scenario
async def test_t60c_with_rerun_those_who_follow_a_lost_result_run_it_themselves() -> None:
    place, gate = SharedMemory(), asyncio.Event()
    one, _ = make(place, on_opaque="rerun")
    two, _ = make(place, on_opaque="rerun")
    fails, _ = make(place, on_opaque="fail")
    ran = []

    async def opaque() -> Handle:
        ran.append(1)
        await gate.wait()
        return Handle()

    first = await one.submit(opaque, idempotency_key="k")
    second = await two.submit(opaque, idempotency_key="k")
    gate.set()
    assert type(await first) is type(await second) is Handle
    assert ran == [1, 1]
    await turns()
    with pytest.raises(TaskFailed, match="cannot be kept"):
        await (await fails.submit(opaque, idempotency_key="k"))
    assert type(await (await fails.submit(opaque))) is Handle  # without a key nothing is stored of it
    await asyncio.gather(one.close(), two.close(), fails.close())


@scenario
async def test_g13_a_window_in_seconds_goes_by_the_clock_of_the_store() -> None:
    place, work = SharedMemory(), Work()
    one, _ = make(place)
    two, _ = make(place)
    work.let_go(1)
    assert await (await one.submit(work, 1, idempotency_key="k", window=10.0)) == 1
    await turns()
    assert await (await two.submit(work, 1, idempotency_key="k", window=10.0)) == 1
    assert work.began == [1]
    await asyncio.sleep(11.0)  # on the virtual clock
    assert await (await two.submit(work, 1, idempotency_key="k", window=10.0)) == 1
    assert work.began == [1, 1]
    await asyncio.gather(one.close(), two.close())


@scenario
async def test_g13_a_submit_that_is_refused_gives_the_key_back() -> None:
    place, work = SharedMemory(), Work()
    one, _ = make(place, max_concurrent=1, backpressure="fail_fast")
    two, _ = make(place, max_concurrent=1)
    running = await two.submit(work, 0)
    with pytest.raises(PoolBusy):
        await one.submit(work, 1, idempotency_key="k")
    work.let_go()
    await running
    assert await (await two.submit(work, 1, idempotency_key="k")) == 1
    await asyncio.gather(one.close(), two.close())


# -- fences -----------------------------------------------------------------------------------------------------------


@scenario
async def test_g16_a_fence_grows_with_every_grant_and_is_known_to_the_code() -> None:
    place, seen = SharedMemory(), []
    one, _ = make(place, max_concurrent=1, fencing=True)
    two, _ = make(place, max_concurrent=1, fencing=True, queue="fifo")

    async def note() -> None:
        task = headgate.current_task()
        assert task is not None
        seen.append(task.fence)
        await asyncio.sleep(0)
        assert task.id.startswith(one.id)

    handles = [await pool.submit(note) for _ in range(5) for pool in (one, two)]
    await asyncio.gather(*handles)
    assert seen == sorted(set(seen))
    assert len(seen) == 10
    assert headgate.current_task() is None
    await asyncio.gather(one.close(), two.close())


@scenario
async def test_g16_without_fencing_there_is_no_fence_and_the_error_says_so() -> None:
    pool, _ = make(SharedMemory())

    async def note() -> None:
        assert headgate.current_task() is None

    await (await pool.submit(note))
    await pool.close()
    task = headgate.Task("id", None, "module.function:1")
    with pytest.raises(InvalidArgument, match="fencing=True"):
        _ = task.fence


@pytest.mark.parametrize("options", [{"fencing": True}, {"on_lease_lost": "cancel"}])
def test_g16_options_of_shared_budgets_are_refused_elsewhere(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument, match="session"):
        TaskPool("alone", **options)
    with pytest.raises(InvalidArgument, match="on_lease_lost"):
        make(SharedMemory(), on_lease_lost="explode")


@pytest.mark.parametrize("queue", ["fifo", "fair_round_robin"])
def test_g17_the_end_of_a_task_and_the_submit_of_the_next_are_told_in_one_exchange(queue: str) -> None:
    async def scenario() -> None:
        place = SharedMemory()
        (pool, member), (other, _) = (
            make(place, max_concurrent=1, queue=queue),
            make(place, max_concurrent=1, queue=queue),
        )
        exchanges: list[str] = []
        transact = member.transact
        member.transact = lambda key, *args, **options: (  # type: ignore[method-assign]
            exchanges.append(key) or transact(key, *args, **options)
        )

        async def one_after_the_other(used: TaskPool) -> None:
            for _ in range(20):
                await (await used.submit(asyncio.sleep, 1.0))

        async with pool, other:
            await asyncio.gather(one_after_the_other(pool), one_after_the_other(other))
        # To be told of the slot, and to give it back and ask for the next; some to begin and to leave.
        assert len(exchanges) <= 2 * 20 + 5

    run(scenario())
