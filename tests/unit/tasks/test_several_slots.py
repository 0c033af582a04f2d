"""L06: tasks that take several slots."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Hashable
from typing import Any

import pytest

from headgate import (
    PoolBusy,
    Resource,
    ResourcePool,
    TaskPool,
    backpressure_queue,
    fail_fast,
    fair_round_robin,
    fair_share,
    fifo,
    lifo,
    pool_wait,
    priority,
)
from headgate.errors import InvalidArgument
from headgate.tasks.scheduling.scheduler import Scheduler
from headgate.testing import virtual
from tests.conftest import seeds
from tests.unit.tasks.model import TaskRecord, Terms, record

STRATEGIES = {one.kind: one for one in (fifo(), lifo(), priority(), fair_round_robin(), fair_share())}


class Used:
    """How many slots are in use, and by whom."""

    def __init__(self) -> None:
        self.now = self.most = 0
        self.started: list[str] = []

    async def take(self, name: str, slots: int, seconds: float = 1.0) -> None:
        self.started.append(name)
        self.now += slots
        self.most = max(self.most, self.now)
        await asyncio.sleep(seconds)
        self.now -= slots


@virtual
async def test_l06_a_task_counts_as_many_slots_as_it_takes() -> None:
    used = Used()
    async with TaskPool(max_concurrent=5, queue=fifo()) as pool:
        for number in range(20):
            slots = 1 + number % 4
            await pool.submit(used.take, f"{number}", slots, slots=slots)
    assert used.most == 5
    assert len(used.started) == 20


@virtual
async def test_l06_freed_slots_are_kept_for_a_task_that_is_first() -> None:
    used = Used()
    async with TaskPool(max_concurrent=3, queue=priority()) as pool:
        for number in range(3):
            await pool.submit(used.take, f"small {number}", 1, 1.0 + number)
        wide = await pool.submit(used.take, "wide", 3, slots=3)
        for number in range(3, 6):
            await pool.submit(used.take, f"small {number}", 1)
        await asyncio.sleep(1.5)
        assert pool.snapshot().waiting_for == {"cause": "slots", "seconds": None}
        assert "it takes 3 slots (1 free)" in str(wide.story())
        urgent = await pool.submit(used.take, "urgent", 1, priority=9)
        await asyncio.sleep(0.1)
        assert urgent.status == "queued", "nothing overtakes it"
    assert used.started == [f"small {n}" for n in range(3)] + ["wide", "urgent"] + [f"small {n}" for n in range(3, 6)]


@virtual
async def test_l06_small_tasks_of_others_do_not_starve_a_wide_one() -> None:
    used, started_at = Used(), 0.0

    async def wide() -> None:
        nonlocal started_at
        started_at = asyncio.get_running_loop().time() - began

    async with TaskPool(max_concurrent=4, queue=fair_round_robin("tenant")) as pool:
        began = asyncio.get_running_loop().time()
        for number in range(400):
            await pool.submit(used.take, f"{number}", 1, 0.5 + number % 3, tenant=f"t{number % 5}")
        await pool.submit(wide, slots=4, tenant="wide")
    assert 0.0 < started_at < 6.0


@virtual
async def test_l06_a_task_that_waits_lends_all_its_slots_and_gets_all_of_them_back() -> None:
    used = Used()

    async def parent() -> None:
        used.now += 3
        inner = [await pool.submit(used.take, f"inner {number}", 1) for number in range(3)]
        used.now -= 3
        for handle in inner:
            await handle
        used.now += 3
        assert used.now <= 3
        used.now -= 3

    async with TaskPool(max_concurrent=3, queue=fifo()) as pool:
        outer = [await pool.submit(parent, slots=3) for _ in range(2)]
        await asyncio.gather(*outer)
    assert len(used.started) == 6
    assert used.most <= 3


@virtual
async def test_l06_the_cap_of_a_tenant_counts_slots_and_holds_up_only_this_tenant() -> None:
    used = Used()
    running: Counter[str] = Counter()

    async def work(tenant: str, slots: int) -> None:
        running[tenant] += slots
        assert running["a"] <= 3
        await used.take(tenant, slots)
        running[tenant] -= slots

    async with TaskPool(max_concurrent=8, queue=fifo(), max_concurrent_per_key={"a": 3}) as pool:
        await pool.submit(work, "a", 2, slots=2, key="a")
        wide = await pool.submit(work, "a", 2, slots=2, key="a")
        small = await pool.submit(work, "a", 1, key="a")
        other = await pool.submit(work, "b", 4, slots=4, key="b")
        assert (wide.status, small.status, other.status) == ("queued", "queued", "running")
        assert pool.snapshot().waiting_for == {"cause": "max_concurrent_per_key", "seconds": None}
        await asyncio.sleep(1.01)
        assert (wide.status, small.status) == ("running", "running")


@pytest.mark.parametrize(("limit", "caps", "what"), [(2, None, "max_concurrent"), (9, {"a": 2}, "max_concurrent_per")])
@virtual
async def test_l06_more_slots_than_there_ever_are_is_refused(limit: int, caps: Any, what: str) -> None:
    async with TaskPool(max_concurrent=limit, max_concurrent_per_key=caps) as pool:
        with pytest.raises(InvalidArgument, match=f"slots must be at most 2, which is {what}.*got 3"):
            await pool.submit(asyncio.sleep, 0, slots=3, key="a")
        assert pool.size() == 0


@pytest.mark.parametrize("slots", [0, -1, 1.5, True, "2"])
@virtual
async def test_l06_slots_are_a_whole_number(slots: Any) -> None:
    async with TaskPool(max_concurrent=4) as pool:
        with pytest.raises(InvalidArgument, match="slots must be"):
            await pool.submit(asyncio.sleep, 0, slots=slots)


@virtual
async def test_l06_after_a_resize_below_it_the_task_stays_queued_and_holds_up_nobody() -> None:
    used = Used()
    async with TaskPool(max_concurrent=4, queue=fifo()) as pool:
        await pool.submit(used.take, "first", 1)
        wide = await pool.submit(used.take, "wide", 4, slots=4)
        after = await pool.submit(used.take, "after", 1)
        pool.resize(3)
        await asyncio.sleep(2.5)
        assert (wide.status, after.status) == ("queued", "completed")
        assert pool.snapshot().waiting_for == {"cause": "slots", "seconds": None}
        assert "it takes 4 slots, and max_concurrent is 3" in str(wide.story())
        pool.resize(4)
        await wide
    assert used.started == ["first", "after", "wide"]


@virtual
async def test_l06_a_task_for_which_slots_are_kept_can_be_cancelled_expire_and_be_paused() -> None:
    used = Used()
    async with TaskPool(max_concurrent=2, queue=fair_share("tenant")) as pool:
        await pool.submit(used.take, "busy", 1, 10.0, tenant="busy")
        cancelled = await pool.submit(used.take, "wide", 2, slots=2, tenant="a")
        expired = await pool.submit(used.take, "wide", 2, slots=2, tenant="a", ttl=1.0)
        assert cancelled.cancel()
        assert (await pool_wait(cancelled)).status == "cancelled"
        assert (await pool_wait(expired)).status == "expired"
        paused = await pool.submit(used.take, "wide", 2, slots=2, tenant="a")
        small = await pool.submit(used.take, "small", 1, tenant="b")
        await asyncio.sleep(1)
        assert (paused.status, small.status) == ("queued", "queued")
        pool.pause_tenant("a")
        await small
        assert paused.status == "queued"
        pool.resume_tenant("a")
        await paused
    assert used.started == ["busy", "small", "wide"]


@virtual
async def test_l06_fail_fast_refuses_a_task_for_which_there_are_too_few_slots() -> None:
    async with TaskPool("busy", max_concurrent=3, backpressure=fail_fast()) as pool:
        first = await pool.submit(asyncio.sleep, 1, slots=2)
        with pytest.raises(PoolBusy):
            await pool.submit(asyncio.sleep, 1, slots=2)
        await pool.submit(asyncio.sleep, 1)
        await first


@virtual
async def test_l06_a_lender_resumes_with_what_there_is_after_the_limit_or_its_cap_was_lowered() -> None:
    async def parent() -> None:
        await (await pool.submit(asyncio.sleep, 1))

    for lower in ("limit", "cap"):
        async with TaskPool(max_concurrent=4, queue=fifo(), max_concurrent_per_key=3) as pool:
            lender = await pool.submit(parent, slots=3, key="a")
            await asyncio.sleep(0.5)
            pool.resize(2) if lower == "limit" else pool.limit_keys(2)
            await asyncio.sleep(1)
            other = await pool.submit(asyncio.sleep, 1, key="a")
            await asyncio.sleep(2)
            assert (lender.status, other.status) == ("completed", "completed")


@virtual
async def test_l06_t42_a_lender_is_not_starved_by_small_tasks_of_its_own_tenant() -> None:
    async def parent() -> None:
        await (await pool.submit(asyncio.sleep, 1, key="a"))

    async with TaskPool(max_concurrent=4, queue=fifo(), max_concurrent_per_key=2) as pool:
        lender = await pool.submit(parent, slots=2, key="a")
        for number in range(60):
            await pool.submit(asyncio.sleep, 1.0 + number % 2 * 0.5, key="a")
        await asyncio.sleep(6)
        assert lender.status == "completed"


@virtual
async def test_l06_after_a_cap_below_it_the_task_stays_queued_and_holds_up_nobody() -> None:
    async with TaskPool(max_concurrent=3, queue=fifo(), max_concurrent_per_key=3) as pool:
        await pool.submit(asyncio.sleep, 1, key="a")
        wide = await pool.submit(asyncio.sleep, 1, slots=3, key="a")
        await asyncio.sleep(0.1)
        pool.limit_keys(2)
        others = [await pool.submit(asyncio.sleep, 1, key="a") for _ in range(4)]
        await asyncio.sleep(0.95)
        assert [one.status for one in others] == ["running", "running", "queued", "queued"]
        await asyncio.sleep(3)
        assert (wide.status, others[-1].status) == ("queued", "completed")
        assert "it takes 3 slots, and the cap of its tenant is 2" in str(wide.story())
        pool.limit_keys(None)
        await wide


@virtual
async def test_l06_t42_an_unseen_wait_for_a_wide_task_lends_the_slot_of_its_ancestor() -> None:
    event = asyncio.Event()

    async def inner() -> None: ...

    async def middle() -> None:
        await (await pool.submit(inner, slots=2))
        event.set()

    async def outer() -> None:
        await elsewhere.submit(middle)
        await event.wait()

    async with TaskPool(max_concurrent=2) as pool, TaskPool() as elsewhere:
        handle = await pool.submit(outer)
        await asyncio.wait_for(handle, 10)


@virtual
async def test_l06_t42_a_lent_slot_goes_to_a_descendant_though_slots_are_kept() -> None:
    event = asyncio.Event()

    async def parent() -> None:
        await asyncio.sleep(2)
        await (await pool.submit(asyncio.sleep, 1))
        event.set()

    async with TaskPool(max_concurrent=3, queue=fifo()) as pool:
        other = await pool.submit(event.wait)
        lender = await pool.submit(parent)
        await pool.submit(asyncio.sleep, 1)
        wide = await pool.submit(asyncio.sleep, 1, slots=3)
        await asyncio.wait_for(asyncio.gather(other, lender, wide), 10)


@virtual
async def test_l05_l06_a_pause_of_its_tenant_lets_others_start_at_once() -> None:
    async with TaskPool(max_concurrent=2, queue=fifo()) as pool:
        await pool.submit(asyncio.sleep, 10, key="busy")
        await pool.submit(asyncio.sleep, 1, slots=2, key="a")
        small = await pool.submit(asyncio.sleep, 1, key="b")
        pool.pause_tenant("a")
        assert small.status == "running"
        pool.resume_tenant("a")


@virtual
async def test_l06_while_nothing_serves_a_wide_task_it_holds_up_nobody() -> None:
    keys = ResourcePool([Resource("gpu", 1, tags=["gpu"]), Resource("cpu", 2, tags=["cpu"])])

    async def work(key: Resource[int], seconds: float = 1.0) -> None:
        await asyncio.sleep(seconds)

    async with TaskPool(max_concurrent=4, resources=keys) as pool:
        keys.pause("gpu")
        await pool.submit(work, 10.0, tags=["cpu"])
        wide = await pool.submit(work, slots=4, tags=["gpu"])
        small = await pool.submit(work, tags=["cpu"])
        assert (wide.status, small.status) == ("queued", "running")
        keys.resume("gpu")
        await small
        later = await pool.submit(work, tags=["cpu"])
        assert later.status == "queued", "now its slots are kept for it"
        await wide


class Room:
    """A scheduler under random commands beside counts that are made anew each time."""

    def __init__(self, kind: str, chance: random.Random) -> None:
        self.chance = chance
        self.limit = 4
        self.caps: dict[Hashable, int] | None = None
        self.scheduler = Scheduler(STRATEGIES[kind], backpressure_queue(10_000), self.limit)
        self.queued: list[TaskRecord] = []
        self.running: list[TaskRecord] = []
        self.number = 0

    def used(self, tenant: Hashable = None) -> int:
        return sum(task.terms.slots for task in self.running if tenant is None or task.partition == tenant)

    def submit(self) -> None:
        self.number += 1
        slots = self.chance.choice((1, 1, 1, 2, 3))
        need = self.chance.choice((None, "gpu"))
        task = record(self.number, self.chance.choice("abc"), terms=Terms(slots=slots, need=need))
        self.queued.append(task)
        self.scheduler.enqueue(task)

    def start(self) -> None:
        while (task := self.scheduler.next()) is not None:
            self.queued.remove(task)
            self.running.append(task)
            task.status = "running"

    def end(self) -> None:
        if self.running:
            task = self.running.pop(self.chance.randrange(len(self.running)))
            task.status = "completed"
            heir = self.scheduler.succeed(task)
            if heir is not None:
                self.queued.remove(heir)
                self.running.append(heir)
                heir.status = "running"

    def discard(self) -> None:
        if self.queued:
            self.scheduler.discard(self.queued.pop(self.chance.randrange(len(self.queued))))

    def close(self) -> None:
        self.scheduler.unserved.add("gpu")

    def open(self) -> None:
        self.scheduler.unserved.clear()

    def resize(self) -> None:
        self.limit = self.chance.choice((2, 3, 4, 6))
        self.scheduler.resize(self.limit)

    def cap(self) -> None:
        self.caps = self.chance.choice((None, {"a": 3}, {"a": 3, "b": 4}))
        self.scheduler.limit_keys(self.caps)

    def check(self) -> None:
        slots = self.scheduler.slots
        made = sum(1 + len(task.slot.others) for task in self.running if task.slot is not None)
        assert made == self.used()
        assert slots.active == len(self.running)
        assert self.scheduler.depth == len(self.queued)
        assert set(self.scheduler.queued()) == set(self.queued)
        assert slots.room == max(0, self.limit - self.used()) or slots.excess


@pytest.mark.parametrize("kind", STRATEGIES)
@pytest.mark.parametrize("seed", seeds(40, 6))
def test_l06_no_order_of_events_exceeds_a_limit_or_leaves_a_task_behind(kind: str, seed: int) -> None:
    chance = random.Random(f"{kind} {seed}")
    room = Room(kind, chance)
    for _ in range(300):
        before = room.used()
        what = chance.choice(
            ("submit",) * 4 + ("end",) * 4 + ("start",) * 4 + ("discard", "close", "open", "resize", "cap")
        )
        getattr(room, what)()
        room.check()
        assert room.used() <= max(room.limit, before)
        for tenant, cap in (room.caps or {}).items():
            if what in ("start", "end"):
                assert room.used(tenant) <= max(cap, before)
    room.open()
    room.limit = 6
    room.scheduler.resize(6)
    room.scheduler.limit_keys(None)
    while room.queued or room.running:
        room.start()
        assert room.running, "a task waits though everything it needs is free"
        room.end()
        room.check()


@virtual
async def test_l06_a_task_with_more_slots_than_are_left_does_not_hold_up_its_tenant_at_its_cap() -> None:
    async with TaskPool(max_concurrent=4, queue=fifo(), max_concurrent_per_key=3) as pool:
        await pool.submit(asyncio.sleep, 10.0, key="a")
        wide = await pool.submit(asyncio.sleep, 1.0, key="a", slots=3)
        small = await pool.submit(asyncio.sleep, 1.0, key="a")
        assert (wide.status, small.status) == ("queued", "queued"), "the cap lacks slots"
        pool.resize(2)
        assert (wide.status, small.status) == ("queued", "running"), "it can never start now, and holds up nobody"
        pool.resize(4)
        await asyncio.sleep(10.5)
        assert wide.status == "running"


@pytest.mark.parametrize("how", ["cools", "pauses"])
@virtual
async def test_l06_slots_are_not_kept_for_a_task_whose_key_rests(how: str) -> None:
    """It was first, and only slots were missing; then its key goes for a while. Others may use the slots until then."""
    keys = ResourcePool([Resource("big", 1, tags={"big"}), Resource("small", 2, tags={"small"})])
    order: list[str] = []

    async def work(_: Any, name: str, seconds: float = 1.0) -> None:
        order.append(name)
        await asyncio.sleep(seconds)

    async with TaskPool(max_concurrent=3, queue=fifo(), resources=keys) as pool:
        await pool.submit(work, "first", 5.0, tags={"small"})
        await pool.submit(work, "second", 2.0, tags={"small"})
        wide = await pool.submit(work, "wide", tags={"big"}, slots=3)
        for number in range(3):
            await pool.submit(work, f"{number}", tags={"small"})
        await asyncio.sleep(1)
        assert order == ["first", "second"], "a slot is kept for the wide one"
        if how == "cools":
            await keys.cool("big", 19)
        else:
            keys.pause("big")
            asyncio.get_running_loop().call_later(19, keys.resume, "big")
        await asyncio.sleep(4)
        assert order[2:] == ["0", "1", "2"]
        await wide
    assert order[-1] == "wide"
    assert asyncio.get_running_loop().time() == 21
