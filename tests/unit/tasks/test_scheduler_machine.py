"""Several schedulers whose tasks submit, wait for each other, fail, end and are cancelled, in any order.

Tasks have no bodies here and there is no loop: `World` does what bodies would do, one step at a time. The waits are the
real ones (`nested_waits._Nested`), stepped by hand, so that every order of events can happen. After each step `check`
counts everything anew, and at the end of a walk everything that can end is ended: what is left was a deadlock.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Generator, Hashable, Iterator
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from headgate import fair_round_robin, fair_share, fifo, lifo, priority
from headgate.errors import WaitCycle
from headgate.tasks.admission import UNBOUNDED
from headgate.tasks.model import Moment, TaskRecord, Terms
from headgate.tasks.runtime.executor import Executor
from headgate.tasks.runtime.local_launcher import LocalLauncher
from headgate.tasks.runtime.nested_waits import _Nested
from headgate.tasks.runtime.ports import Ports
from headgate.tasks.scheduling.scheduler import Scheduler
from headgate.tasks.scheduling.slots import ancestors, chain_of
from tests.unit.tasks.model import START, record

STRATEGIES = (fifo(), lifo(), priority(), fair_round_robin(), fair_share())
TERMS = Terms(retries=1_000_000)


class Signal:
    """A future without a loop."""

    def __init__(self) -> None:
        self._done = False

    def done(self) -> bool:
        return self._done

    def set_result(self, _: None) -> None:
        self._done = True

    def __await__(self) -> Generator[Signal, None, None]:
        while not self._done:
            yield self


class Part:
    """A piece of a task's code that waits for others: first for them, then perhaps for a slot."""

    def __init__(self, task: TaskRecord, awaited: list[TaskRecord]) -> None:
        self.task = task
        self.awaited = awaited
        self.ended = Signal()
        self.coroutine = _Nested(task, awaited).wait(self.ended)
        self.at: Any = None

    @property
    def outstanding(self) -> bool:
        return self.at is self.ended

    @property
    def ready(self) -> bool:
        return all(task.finished for task in self.awaited) if self.outstanding else self.at.done()

    def begin(self) -> None:
        self.at = self.coroutine.send(None)

    def step(self) -> bool:
        """Is it over?"""
        if self.outstanding:
            self.ended.set_result(None)
        try:
            self.at = self.coroutine.send(None)
        except StopIteration:
            return True
        return False

    def cut(self) -> None:
        with pytest.raises(asyncio.CancelledError):
            self.coroutine.throw(asyncio.CancelledError())


class CheckedDesk(Scheduler):
    """Says who is next only after having looked at everybody."""

    __slots__ = ("world",)

    world: World

    def next(self) -> TaskRecord | None:
        returner, heirs = self._first_returner(), self._heirs()
        task = super().next()
        if returner is not None:
            assert task is returner, "who returns stands before all newcomers, first come first served"
        elif heirs:
            assert task is heirs[0], "a lent slot goes to the lender's descendants first"
        elif task is not None:
            assert task.status == "queued"
            assert task.slot is not None
        return task

    def succeed(self, task: TaskRecord) -> TaskRecord | None:
        lenders = list(task.slot.lenders) if task.slot is not None else []
        heirs = [heir for lender in reversed(lenders) for heir in self._below(lender)]
        returning = [one for one in self.slots.returning if not self.world.blocked(one)]
        heir = super().succeed(task)
        if heir is not None:
            assert not returning
            assert not heirs or heir is heirs[0]
        return heir

    def _first_returner(self) -> TaskRecord | None:
        if self.slots.active >= self.slots.limit:
            return None
        return next((task for task in self.slots.returning if not self.world.blocked(task)), None)

    def _heirs(self) -> list[TaskRecord]:
        """Queued descendants of those who lent the slot that is taken next, the best claim first."""
        if not self.slots.free:
            return []
        return [task for lender in reversed(self.slots.free[-1].lenders) for task in self._below(lender)]

    def _below(self, lender: TaskRecord) -> list[TaskRecord]:
        """Who can start, by when it joined the queue."""
        found = [task for task in self.world.queued(self) if lender in lineage(task) and not self.world.blocked(task)]
        return sorted(found, key=lambda task: self.world.joined[task])


class Pool(Executor):
    """A pool that starts tasks by saying so."""

    def __init__(self, world: World, name: str, strategy: Any, limit: int) -> None:
        scheduler = CheckedDesk(strategy, UNBOUNDED, limit)
        scheduler.world = world
        super().__init__(name, name, scheduler, SimpleNamespace(audit=None), Ports(LocalLauncher()))  # type: ignore[arg-type]
        self.loop = SimpleNamespace(create_future=Signal)  # type: ignore[assignment]
        self.scheduler = scheduler
        self.limits: Any = None

    def start(self, task: TaskRecord, moment: Moment) -> None:
        assert task.status == "queued"
        self.states.move(task, "running")
        task.attempt += 1

    def cap(self, key: Hashable) -> int | None:
        if key is None or self.limits is None:
            return None
        return self.limits.get(key) if isinstance(self.limits, dict) else self.limits  # type: ignore[no-any-return]


def lineage(task: TaskRecord) -> Iterator[TaskRecord]:
    while task.parent is not None:
        task = task.parent
        yield task


class World:
    """Pools and their tasks. Commands do what is possible, else nothing."""

    def __init__(self, pools: int, chance: random.Random) -> None:
        self.chance = chance
        self.pools = [
            Pool(self, f"pool-{number}", chance.choice(STRATEGIES), chance.choice((1, 1, 2, 3)))
            for number in range(pools)
        ]
        self.tasks: list[TaskRecord] = []
        self.parts: list[Part] = []
        self.joined: dict[TaskRecord, int] = {}
        self.steps = 0
        self.active: dict[Pool, Counter[Hashable]] = {pool: Counter() for pool in self.pools}

    # -- seeing --------------------------------------------------------------------------------------------------------

    def unfinished(self) -> list[TaskRecord]:
        return [task for task in self.tasks if not task.finished]

    def running(self, pool: Pool | None = None) -> list[TaskRecord]:
        return [task for task in self.tasks if task.status == "running" and pool in (None, task.owner)]

    def queued(self, scheduler: Scheduler) -> list[TaskRecord]:
        """Who may start: not those who were set aside."""
        return [
            task
            for task in self.tasks
            if task.status == "queued"
            and task.slot is None
            and task.owner.scheduler is scheduler
            and not scheduler.is_aside(task)
        ]

    def blocked(self, task: TaskRecord) -> bool:
        cap = task.owner.cap(task.partition)
        peers = [one for one in self.tasks if one.slot is not None and one.owner is task.owner]
        return cap is not None and sum(one.partition == task.partition for one in peers) >= cap

    def parts_of(self, task: TaskRecord) -> list[Part]:
        return [part for part in self.parts if part.task is task]

    def idlers(self) -> list[TaskRecord]:
        """Running tasks all of whose code goes on."""
        return [task for task in self.running() if not self.parts_of(task)]

    def outstanding(self, task: TaskRecord) -> Counter[TaskRecord]:
        """Whom it waits for, and how many times. A wait for one that has ended is over, though nobody has woken yet."""
        awaited = [one for part in self.parts_of(task) if part.outstanding for one in part.awaited]
        return Counter(one for one in awaited if not one.finished)

    def pick(self, tasks: list[Any]) -> Any:
        return self.chance.choice(tasks) if tasks else None

    def reaches(self, start: TaskRecord, goal: TaskRecord) -> bool:
        """By outstanding waits, found the slow way."""
        seen, todo = set(), [start]
        while todo:
            task = todo.pop()
            if task is goal:
                return True
            if task not in seen and not task.finished:
                seen.add(task)
                todo += self.outstanding(task)
        return False

    # -- commands ------------------------------------------------------------------------------------------------------

    def submit(self, parent: TaskRecord | None = None, pool: Pool | None = None, key: Any = ...) -> TaskRecord:
        chance = self.chance
        pool = pool or chance.choice(self.pools)
        key = chance.choice(("a", "b", None)) if key is ... else key
        task = record(len(self.tasks), key, chance.randint(-1, 1), parent=parent, terms=TERMS, owner=pool)
        self.tasks.append(task)
        if pool.scheduler.enter(task):
            assert not any(not self.blocked(one) for one in pool.scheduler.slots.returning)
            pool.start(task, START)
        elif chance.random() < 0.1:
            pool.scheduler.set_aside(task)
        else:
            self._queue(task)
        return task

    def _queue(self, task: TaskRecord) -> None:
        self.joined[task] = self.steps = self.steps + 1
        task.owner.scheduler.enqueue(task)
        if task.owner.scheduler.slots.active < task.owner.scheduler.slots.limit:
            task.owner.pump()

    def submit_inside(self) -> None:
        if (parent := self.pick(self.running())) is not None:
            for _ in range(self.chance.randint(1, 3)):
                self.submit(parent)

    def fall_due(self) -> None:
        aside = [task for task in self.tasks if task.owner.scheduler.is_aside(task)]
        if aside:
            self._queue(self.chance.choice(aside))

    def wait(self) -> None:
        able = [task for task in self.running() if len(self.parts_of(task)) < 2]
        task = self.pick(able)
        if task is None:
            return
        family = [one for one in self.unfinished() if task in lineage(one)]
        among = family if family and self.chance.random() < 0.6 else self.unfinished()
        self.begin(task, self.chance.sample(among, k=min(len(among), self.chance.randint(1, 3))))

    def begin(self, task: TaskRecord, awaited: list[TaskRecord]) -> Part | None:
        closes = [one for one in awaited if self.reaches(one, task)]
        for one in awaited:
            chain = chain_of(task, one)
            assert (chain is not None) is (one in closes), "a circle is found exactly if there is one"
            if chain is not None:
                assert chain[:2] == [task, one]
                assert chain[-1] is task
                for left, right in pairwise(chain[1:]):
                    assert left.waits is not None
                    assert right in left.waits.on
        part = Part(task, awaited)
        if closes:
            with pytest.raises(WaitCycle, match="would wait for"):
                part.begin()
            return None
        part.begin()
        self.parts.append(part)
        return part

    def resume(self) -> None:
        ready = [part for part in self.parts if part.ready]
        if ready:
            self.step(self.chance.choice(ready))

    def step(self, part: Part) -> None:
        if part.step():
            self.parts.remove(part)

    def cut(self) -> None:
        """A wait of its own timeout: the task goes on."""
        if (part := self.pick(self.parts)) is not None:
            self._cut(part)

    def _cut(self, part: Part) -> None:
        self.parts.remove(part)
        part.cut()

    def finish(self) -> None:
        if (task := self.pick(self.idlers())) is not None:
            task.owner.end(task, "completed", None)

    def abandon(self) -> None:
        """Its body ends, and something it started goes on waiting."""
        if (part := self.pick(self.parts)) is not None and not part.task.finished:
            part.task.owner.end(part.task, "completed", None)

    def fail(self) -> None:
        """And try again."""
        if (task := self.pick(self.idlers())) is not None:
            self.joined[task] = self.steps = self.steps + 1
            assert task.owner._retry(task, OSError(), task.attempt)

    def cancel(self) -> None:
        task = self.pick(self.unfinished())
        if task is None:
            return
        if task.status == "queued":
            task.owner._discard(task, "cancelled")
            task.owner.pump()
            return
        for part in self.parts_of(task):
            self._cut(part)
        task.owner.end(task, "cancelled", None)

    def resize(self) -> None:
        pool = self.chance.choice(self.pools)
        pool.scheduler.resize(self.chance.randint(1, 4))
        pool.pump()

    def limit_keys(self) -> None:
        pool = self.chance.choice(self.pools)
        pool.limits = self.chance.choice((None, 1, 2, {"a": 1}, {"a": 2, "b": 1}))
        pool.scheduler.limit_keys(pool.limits)
        pool.pump()

    # -- what must hold ------------------------------------------------------------------------------------------------

    def check(self) -> None:
        for pool in self.pools:
            self._check_slots(pool)
            self._check_caps(pool)
            self._check_lending(pool)
            self._check_use(pool)

    def _check_slots(self, pool: Pool) -> None:
        slots, running = pool.scheduler.slots, self.running(pool)
        held = [task.slot for task in running if task.slot is not None]
        assert slots.active == len(held)
        assert slots.waiting == len(running) - len(held)
        assert slots.active <= max(slots.limit, self.active[pool].total()), "the cap, or fewer than there were"
        assert len({*held, *slots.free}) == len(held) + len(slots.free), "nobody holds a slot twice"
        numbers = [slot.number for slot in (*held, *slots.free)]
        assert len(set(numbers)) == len(numbers)
        assert not any(task.slot is not None for task in self.tasks if task.status != "running")

    def _check_caps(self, pool: Pool) -> None:
        now = Counter(task.partition for task in self.running(pool) if task.slot is not None)
        for key, active in now.items():
            cap = pool.cap(key)
            assert cap is None or active <= max(cap, self.active[pool][key]), key
        self.active[pool] = now

    def _check_lending(self, pool: Pool) -> None:
        slots = pool.scheduler.slots
        for task in self.running(pool):
            waits = [one for part in self.parts_of(task) if part.outstanding for one in part.awaited]
            outstanding = Counter(one for one in waits if not one.finished)
            assert (task.waits.on if task.waits is not None else {}) == outstanding
            assert not outstanding or task.slot is None, "who waits holds no slot"
            assert not outstanding or task not in slots.returning, "who waits wants no slot"
            lent = task.waits.lent if task.waits is not None else None
            assert lent is None or (task.slot is None and lent.lenders.count(task) == 1)
        for task in slots.returning:
            assert task.status == "running"
            assert task.slot is None
        for slot in {*slots.free, *(task.slot for task in self.tasks if task.slot is not None)}:
            assert all(task.waits is not None and task.waits.lent is slot for task in slot.lenders)

    def _check_use(self, pool: Pool) -> None:
        scheduler, slots = pool.scheduler, pool.scheduler.slots
        queued = self.queued(scheduler)
        assert set(scheduler.queue) == set(queued)
        assert len(scheduler.queue) == len(queued)
        aside = [task for task in self.tasks if task.owner is pool and scheduler.is_aside(task)]
        assert scheduler.depth == len(queued) + len(aside)
        if slots.active < slots.limit:
            assert all(map(self.blocked, (*queued, *slots.returning))), "no slot stays free that somebody can use"
        for task in self.unfinished():
            below = [one for one in queued if task in lineage(one)]
            assert set(scheduler._families.queued_below(task)) == set(below)

    def settle(self) -> None:
        """End all that can end. What is left then could never have ended."""
        while True:
            aside = [task for task in self.tasks if task.owner.scheduler.is_aside(task)]
            ready = [part for part in self.parts if part.ready]
            if aside:
                self._queue(aside[0])
            elif ready:
                self.step(self.chance.choice(ready))
            elif idlers := self.idlers():
                task = self.chance.choice(idlers)
                task.owner.end(task, "completed", None)
            else:
                break
            self.check()
        assert not self.unfinished(), "deadlock"
        assert not self.parts
        for pool in self.pools:
            slots = pool.scheduler.slots
            assert (slots.active, slots.waiting, len(pool.scheduler.queue)) == (0, 0, 0)
            assert not slots.returning
            assert not any(slot.lenders for slot in slots.free)
            assert not pool.scheduler._families._below
            assert not pool.scheduler._families.entered
            assert not pool.lending._returns


COMMANDS = (
    *("submit",) * 3,
    *("submit_inside",) * 4,
    *("wait",) * 6,
    *("resume",) * 5,
    *("finish",) * 4,
    "cut",
    "abandon",
    "fail",
    "cancel",
    "fall_due",
    "resize",
    "limit_keys",
)


def walk(seed: int, length: int, without: tuple[str, ...] = ()) -> None:
    chance = random.Random(seed)
    world = World(chance.randint(1, 3), chance)
    allowed = [command for command in COMMANDS if command not in without]
    liked = chance.sample(allowed, k=chance.randrange(12, len(allowed) + 1))
    for _ in range(chance.randrange(length)):
        if len(world.unfinished()) < 25 or chance.random() < 0.2:
            getattr(world, chance.choice(liked))()
        else:
            world.finish()
        world.check()
    world.settle()


@pytest.mark.parametrize("seed", range(10))
def test_t42_waits_that_are_not_cut_short_never_deadlock(seed: int, scale: float) -> None:
    for number in range(int(102 * scale**1.2)):
        walk(1_000 * seed + number, 120, without=("cut",))


@pytest.mark.parametrize("seed", range(10))
def test_t42_nested_work_never_deadlocks(seed: int, scale: float) -> None:
    for number in range(int(102 * scale**1.2)):
        walk(1_000 * seed + number, 120)


# -- one at a time -----------------------------------------------------------------------------------------------------


def world_of(*limits: int) -> World:
    """A first-in-first-out pool for each limit."""
    world = World(len(limits), random.Random(1))
    world.pools = [Pool(world, f"pool-{number}", fifo(), limit) for number, limit in enumerate(limits)]
    world.active = {pool: Counter() for pool in world.pools}
    world.chance.random = lambda: 0.5  # type: ignore[method-assign]
    return world


def begun(world: World, task: TaskRecord, *awaited: TaskRecord) -> Part:
    part = world.begin(task, [*awaited])
    assert part is not None
    world.check()
    return part


def test_t42_a_lent_slot_serves_the_family_before_the_queue() -> None:
    world = world_of(1)
    (pool,) = world.pools
    parent = world.submit(key=None)
    strangers = [world.submit(key=None) for _ in range(3)]
    children = [world.submit(parent, key=None) for _ in range(2)]
    begun(world, parent, *children)
    for child in children:
        assert child.status == "running"
        pool.end(child, "completed", None)
        world.check()
    assert all(stranger.status == "queued" for stranger in strangers), "the lender returns before newcomers"
    world.resume()
    assert parent.slot is not None
    world.settle()


def test_t42_a_wait_that_was_cut_short_and_begins_again_needs_no_slot() -> None:
    """It stood for a slot when it began to wait again. Had it got that slot, the one it waits for never would."""
    world = world_of(1)
    (pool,) = world.pools
    parent = world.submit(key=None)
    first, second = (world.submit(parent, key=None) for _ in range(2))
    part = begun(world, parent, first)
    world._cut(part)
    assert parent in pool.scheduler.slots.returning
    begun(world, parent, second)
    pool.end(first, "completed", None)
    world.check()
    assert second.status == "running"
    world.settle()


def test_t42_a_wait_that_is_refused_half_way_leaves_no_slot_unused() -> None:
    """The first of two waits lent the slot, the second would close a circle."""
    world = world_of(1)
    early = world.submit(key=None)
    late, third = (world.submit(early, key=None) for _ in range(2))
    begun(world, early, late)
    assert late.slot is not None
    queued = world.submit(key=None)
    assert world.begin(late, [queued, early]) is None
    world.check()
    assert not late.waits or not late.waits.on
    assert third.status == "queued"
    world.settle()


def test_t42_an_ancestor_that_was_roused_and_failed_meanwhile_only_queues() -> None:
    """It lent its slot because of a grandchild's wait, its body failed, it queues for its next attempt."""
    world = world_of(1, 2)
    home, away = world.pools
    parent = world.submit(pool=home, key=None)
    child = world.submit(parent, away, None)
    grandchild = world.submit(child, home, None)
    begun(world, child, grandchild)
    assert parent.slot is None, "it lends, since it may wait for its child in a way that cannot be seen"
    assert grandchild.status == "running"
    world.joined[parent] = 99
    assert home._retry(parent, OSError(), parent.attempt)
    world.check()
    home.end(grandchild, "completed", None)
    world.check()
    world.settle()


def test_t42_families_forget_whoever_left_the_queue() -> None:
    """Even if all it descends from has ended meanwhile."""
    world = world_of(1, 3)
    home, away = world.pools
    grandparent = world.submit(pool=away, key=None)
    parent = world.submit(grandparent, home, None)
    child = world.submit(parent, away, None)
    other = world.submit(pool=home, key=None)
    world.joined[parent] = 99
    assert home._retry(parent, OSError(), parent.attempt)
    parent.status = "queued"
    home.scheduler.release(parent)
    home.scheduler.requeue(parent)
    away.end(grandparent, "completed", None)
    assert list(ancestors(child)) == [parent]
    assert list(ancestors(parent)) == []
    home.pump()
    world.check()
    assert other.status == "queued"
    world.settle()


def test_t42_a_part_that_outlives_its_attempt_takes_no_slot() -> None:
    """A body that leaves a wait behind and fails: when that wait ends, the task queues, and needs nothing."""
    world = world_of(1)
    (pool,) = world.pools
    task = world.submit(key=None)
    awaited = world.submit(key=None)
    part = begun(world, task, awaited)
    assert awaited.status == "running"
    world.parts.remove(part)
    world.joined[task] = 99
    assert pool._retry(task, OSError(), task.attempt)
    assert task.status == "queued"
    pool.end(awaited, "completed", None)
    while not part.step():
        pass
    slots = pool.scheduler.slots
    assert task.status == "running"
    assert (slots.active, slots.waiting, len(slots.returning)) == (1, 0, 0)


def test_t42_a_circle_over_a_task_that_has_ended_is_none() -> None:
    """Its body left a wait behind. Nobody who waited for it waits for that, though he may not have woken yet."""
    world = world_of(3)
    waiter, between, ended = (world.submit(key=None) for _ in range(3))
    begun(world, between, ended)
    begun(world, ended, waiter)
    assert chain_of(waiter, between) == [waiter, between, ended, waiter]
    world.pools[0].end(ended, "completed", None)
    begun(world, waiter, between)
    world.settle()


def test_t42_the_slots_of_the_whole_ancestry_are_lent() -> None:
    """Two parents fill a pool and wait for children elsewhere in a way that cannot be seen; those need the pool."""
    world = world_of(2, 2)
    home, away = world.pools
    parents = [world.submit(pool=home, key=None) for _ in range(2)]
    children = [world.submit(parent, away, None) for parent in parents]
    needed = [world.submit(child, home, None) for child in children]
    for child, one in zip(children, needed, strict=True):
        begun(world, child, one)
    assert [task.status for task in needed] == ["running", "running"]


@pytest.mark.parametrize("how", ["ends", "fails"])
def test_t42_a_part_that_stands_for_a_slot_goes_on_when_its_task_is_done(how: str) -> None:
    """Nobody would ever give it one, and whoever awaits that part would wait for ever."""
    world = world_of(1, 1)
    home, away = world.pools
    task = world.submit(pool=home, key=None)
    awaited = world.submit(pool=away, key=None)
    part = begun(world, task, awaited)
    borrower = world.submit(pool=home, key=None)
    assert borrower.status == "running"
    away.end(awaited, "completed", None)
    assert not part.step(), "it stands for a slot"
    world.parts.remove(part)
    if how == "ends":
        home.end(task, "completed", None)
    else:
        world.joined[task] = 99
        assert home._retry(task, OSError(), task.attempt)
    home.end(borrower, "completed", None)
    assert part.ready
    assert part.step()


def test_t42_an_ancestor_that_stands_for_a_slot_gets_none_while_a_descendant_waits() -> None:
    """The first wait that roused it was cut short, the second began before it had its slot again."""
    world = world_of(1, 2)
    home, away = world.pools
    parent = world.submit(pool=home, key=None)
    first, second = (world.submit(parent, away, None) for _ in range(2))
    early = world.submit(first, home, None)
    world._cut(begun(world, first, early))
    assert parent in home.scheduler.slots.returning
    late = world.submit(second, home, None)
    begun(world, second, late)
    home.end(early, "completed", None)
    assert late.status == "running", "the parent may wait for its child in a way that cannot be seen"
    world.settle()
