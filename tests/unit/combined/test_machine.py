"""Random days of the line, step by step on virtual time, against what must hold after every step.

Each seed draws keys (caps, tags, tempers), a pool (slots, strategy, caps of keys) and a few hundred steps: submits of
every kind, cancels, outside users, leases, keys that are disabled, enabled, added, removed, resizes, time that passes.
After each step everything ready is let happen, and then:

- no more tasks are active than there are slots, no key is used above its limit or while it rests or is out;
- every use in flight belongs to a task that runs or to somebody outside: nothing leaks;
- nobody is idle without reason: while a slot is free, no queued task could have a key that is free;
- a task whose keys are all out or gone is not queued any more.

And at the end every task has one end, and everything is given back.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from typing import Any

import pytest

from headgate import (
    CooldownResource,
    DisableResource,
    PoolExhausted,
    Resource,
    ResourcePool,
    RetryOperation,
    TaskHandle,
    TaskPool,
    fair_round_robin,
    fair_share,
    subscribe,
)
from headgate.core.clock import clock
from headgate.testing import run, settle
from tests.support.combined.support import AUDIT, EVERY_STRATEGY, TERMINAL, Key, Keys, Uses, Watch, watched
from tests.support.resources.support import in_flight

TAGS = ["cpu", "gpu", "big"]
TEMPERS = ["good", "good", "good", "limited", "dead", "flaky", "slow"]


class Day:
    """One pool, its keys, and what happens to them."""

    def __init__(self, seed: int, steps: int) -> None:
        self.chance = random.Random(seed)
        self.steps = steps
        self.tempers: dict[str, str] = {}
        self.tags: dict[str, frozenset[str]] = {}
        self.removed = False
        self.keys: Keys = ResourcePool(
            [self._key(f"k{number}") for number in range(self.chance.randrange(1, 7))],
            strategy=self.chance.choice(["round_robin", "primary_backup"]),
            cooldown_table=(3.0, 10.0),
            cancel_siblings=self.chance.random() < 0.8,
        )
        self.made = len(self.keys.snapshot())
        self.key_cap = self.chance.choice([None, None, 1, 2])
        orders: list[Any] = [*EVERY_STRATEGY, fair_share(weights={"p": 4.0})]
        self.pool = TaskPool(
            max_concurrent=self.chance.choice([1, 2, 5, 20]),
            queue=self.chance.choice(orders),
            max_concurrent_per_key=self.key_cap,
            resources=self.keys,
        )
        self.handles: list[TaskHandle[Any]] = []
        self.wants: dict[str, tuple[frozenset[str], frozenset[str]]] = {}
        self.due: dict[str, float] = {}
        self.verdicts: Counter[str] = Counter()
        self.allowed: dict[str, int] = {}
        self.retries: dict[str, int] = {}
        self.uses = Uses()
        self.outside: set[asyncio.Task[Any]] = set()
        self.using_outside = 0
        self.returned: Counter[int] = Counter()

    def _key(self, name: str) -> Key:
        chance = self.chance
        self.tempers[name] = chance.choice(TEMPERS)
        tags = [tag for tag in TAGS if chance.random() < 0.5]
        self.tags[name] = frozenset(tags)
        return Resource(name, f"secret-{name}", chance.choice([None, 1, 1, 2, 3]), tags=tags)

    # -- what bodies do ------------------------------------------------------------------

    async def _work(self, key: Key) -> None:
        chance, temper = self.chance, self.tempers.get(key.resource_id, "good")
        await asyncio.sleep(chance.choice([0.0, 0.0, 0.5, 1.0, 4.0]) * (3 if temper == "slow" else 1))
        roll = chance.random()
        if temper == "limited" and roll < 0.5:
            raise CooldownResource(chance.choice([None, 0.0, 2.0, 8.0]))
        if temper == "dead" and roll < 0.3:
            raise DisableResource("revoked")
        if temper == "flaky" and roll < 0.5:
            raise RetryOperation("502")
        if roll > 0.95:
            raise LookupError("its own")

    async def body(self, key: Key, number: int) -> int:
        with self.uses(key):
            await self._work(key)
        self.returned[number] += 1
        return number

    async def visit(self, lease: bool, options: dict[str, Any]) -> None:
        try:
            if lease:
                async with self.keys.lease(wait_for_capacity=True, **options):
                    self.using_outside += 1
                    try:
                        await asyncio.sleep(self.chance.choice([0.0, 1.0, 3.0]))
                    finally:
                        self.using_outside -= 1
            else:
                await self.keys.run(self._visit, wait_for_capacity=True, retry_delay=0, **options)
        except (PoolExhausted, LookupError):
            pass

    async def _visit(self, key: Key) -> None:
        self.using_outside += 1
        try:
            await self._work(key)
        finally:
            self.using_outside -= 1

    # -- what happens --------------------------------------------------------------------

    def narrowed(self) -> dict[str, Any]:
        chance, options = self.chance, {}
        if chance.random() < 0.4:
            options["tags"] = chance.sample(TAGS, chance.choice([1, 1, 2]))
        if chance.random() < 0.2:
            options["exclude"] = [f"k{chance.randrange(6)}"]
        return options

    def submit(self) -> None:
        chance, options = self.chance, self.narrowed()
        tags, exclude = options.get("tags", ()), options.get("exclude", ())
        if chance.random() < 0.6:
            options["key"] = chance.choice("pqr")
        if chance.random() < 0.3:
            options["priority"] = chance.randrange(-2, 3)
        if chance.random() < 0.2:
            options["ttl"] = chance.choice([0.5, 2.0, 20.0])
        if chance.random() < 0.1:
            options["timeout"] = chance.choice([0.5, 2.0])
        if chance.random() < 0.1:
            options["deadline"] = clock.now() + chance.choice([0.5, 5.0])
        if chance.random() < 0.2:
            options["retries"] = chance.randrange(1, 3)
        if chance.random() < 0.1:
            options["delay"] = chance.choice([0.5, 3.0])
        if chance.random() < 0.5:
            options["max_attempts"] = chance.randrange(1, 6)
        handle = self.pool.submit_nowait(self.body, len(self.handles), **options)
        self.handles.append(handle)
        self.wants[handle.id] = frozenset(tags), frozenset(exclude)
        self.due[handle.id] = clock.now() + options.get("delay", 0.0)
        self.allowed[handle.id] = options.get("max_attempts", 3)
        self.retries[handle.id] = options.get("retries", 0)

    def cancel(self) -> None:
        for handle in self.chance.sample(self.handles, min(3, len(self.handles))):
            handle.cancel()

    def come(self) -> None:
        task = asyncio.create_task(self.visit(self.chance.random() < 0.4, self.narrowed()))
        self.outside.add(task)
        task.add_done_callback(self.outside.discard)
        if self.chance.random() < 0.2:
            asyncio.get_running_loop().call_later(self.chance.choice([0.0, 0.5, 2.0]), task.cancel)

    async def steer(self) -> None:
        chance, names = self.chance, sorted(self.keys.snapshot())
        what = chance.choice(["disable", "enable", "enable", "add", "remove"])
        if what == "add" or not names:
            self.made += 1
            await self.keys.add(self._key(f"k{self.made}"))
        elif what != "remove" or len(names) > 1:
            self.removed |= what == "remove"
            await getattr(self.keys, what)(chance.choice(names))

    async def step(self) -> None:
        roll = self.chance.random()
        if roll < 0.45:
            for _ in range(self.chance.choice([1, 1, 1, 5])):
                self.submit()
        elif roll < 0.65:
            await asyncio.sleep(self.chance.choice([0.0, 0.25, 0.5, 1.0, 5.0]))
        elif roll < 0.75:
            self.come()
        elif roll < 0.82:
            self.cancel()
        elif roll < 0.92:
            await self.steer()
        elif roll < 0.95 and self.outside:
            self.chance.choice(sorted(self.outside, key=lambda task: task.get_name())).cancel()
        elif roll < 0.97:
            self.pool.resize(max(self.pool.snapshot(0).active, self.chance.choice([1, 2, 5, 20])))
        elif self.key_cap is not None:
            self.pool.limit_keys(self.key_cap)  # the same again: the queue is built anew, and nobody may get lost

    # -- what must hold ------------------------------------------------------------------

    def check(self, watch: Watch) -> None:
        seen, keys = self.pool.snapshot(0), self.keys.snapshot()
        active = [handle for handle in self.handles if handle.status == "running"]
        queued = [handle for handle in self.handles if handle.status == "queued"]
        assert (seen.active, seen.queued, seen.waiting) == (len(active), len(queued), 0)
        assert seen.active <= seen.max_concurrent
        assert len(watch.open) == len(active) + self.using_outside, "a key is held by nobody"
        if not self.removed:
            assert in_flight(self.keys) == len(watch.open)
        self.check_idle(queued, active, seen.active < seen.max_concurrent, keys)

    def check_idle(
        self, queued: list[TaskHandle[Any]], active: list[TaskHandle[Any]], slot: bool, keys: dict[str, Any]
    ) -> None:
        tags = {name: self.tags[name] for name in keys}
        per_key = Counter(handle.key for handle in active if handle.key is not None)
        for handle in queued:
            if self.due[handle.id] > clock.now():
                continue
            wanted, excluded = self.wants[handle.id]
            could = [name for name in keys if wanted <= tags[name] and name not in excluded]
            hope = [name for name in could if keys[name]["status"] != "disabled"]
            assert hope, f"{handle!r} waits for what can never come"
            if not slot or (self.key_cap is not None and per_key[handle.key] >= self.key_cap):
                continue
            for name in hope:
                one = keys[name]
                full = one["max_in_flight"] is not None and one["in_flight"] >= one["max_in_flight"]
                assert one["status"] != "healthy" or full, f"{handle!r} waits, and a slot and {name} are free"

    def hear(self, event: Any) -> None:
        if event.name == "pool_requeue" and event.spent and "(CooldownResource)" not in event.reason:
            self.verdicts[event.task_id] += 1

    async def main(self) -> None:
        wrong: list[str] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, told: wrong.append(str(told)))
        unsubscribe = subscribe(self.hear, AUDIT)
        with watched(self.keys, self.pool) as watch:
            for _ in range(self.steps):
                await self.step()
                await settle(5000)
                self.check(watch)
            await self.evening()
        unsubscribe()
        assert wrong == []
        self.check_ends(watch)
        await self.pool.close()

    async def evening(self) -> None:
        """Everything gets better, so that everything can end."""
        self.tempers = dict.fromkeys(self.tempers, "good")
        for name in self.keys.snapshot():
            await self.keys.enable(name)
        await self.pool.drain()
        while self.outside:
            await asyncio.wait(list(self.outside))
        await settle()

    def check_ends(self, watch: Watch) -> None:
        watch.check_ends(self.handles)
        assert self.uses.wrong == []
        assert watch.open == set()
        assert (in_flight(self.keys), self.keys.stats().waiting, self.using_outside) == (0, 0, 0)
        seen = self.pool.snapshot(0)
        ends: Counter[str] = Counter(handle.status for handle in self.handles)
        assert {status: seen[status] for status in TERMINAL} == {status: ends[status] for status in TERMINAL}
        assert self.pool.size() == 0
        assert set(self.returned.values()) <= {1}, "a body returned twice"
        for number, handle in enumerate(self.handles):
            if handle.status == "completed":
                assert self.returned[number] == 1
            assert self.verdicts[handle.id] <= self.allowed[handle.id] + self.retries[handle.id]
            error = handle.snapshot().error
            if isinstance(error, PoolExhausted) and error.reason == "attempts":
                cooled = sum(isinstance(one.signal, CooldownResource) for one in error.attempts)
                assert cooled >= 10 or len(error.attempts) - cooled == self.allowed[handle.id]
            assert error is None or isinstance(error, (PoolExhausted, LookupError, TimeoutError)), error


def weather(seeds: range, day: Any) -> None:
    """Every seed is tried; those that fail are told together."""
    failed: list[Exception] = []
    for seed in seeds:
        try:
            run(day(seed), seed=seed, patience=60)
        except Exception as error:
            error.add_note(f"seed {seed}")
            failed.append(error)
    if failed:
        raise ExceptionGroup(f"{len(failed)} of {len(seeds)} seeds", failed)


def test_t81_random_days_break_no_rule(scale: float) -> None:
    weather(range(max(5, int(300 * scale**1.8))), lambda seed: Day(seed, 150).main())


def test_t81_a_few_long_days(scale: float) -> None:
    steps = 1500 if scale >= 1 else 400
    weather(range(1000, 1000 + max(1, int(20 * scale**1.3))), lambda seed: Day(seed, steps).main())


# -- fair, whatever happens to the keys -----------------------------------------------------


class Turns:
    """Listens to one pool: has any partition two turns while another one that has something queued has none?"""

    def __init__(self, pool: TaskPool, handles: list[TaskHandle[Any]]) -> None:
        self.pool = pool
        self.handles = handles
        self.partitions: dict[str, Any] = {}
        self.passed: Counter[tuple[Any, Any]] = Counter()  # how often it was passed over by another since its last turn
        self.started: dict[
            Any, list[int]
        ] = {}  # the numbers of tasks, by partition, in the order of their first starts
        self.wrong: list[str] = []

    def __call__(self, event: Any) -> None:
        if event.pool_id != self.pool.id:
            return
        if event.name == "pool_submit":
            self.partitions[event.task_id] = event.partition
        elif event.name == "pool_dequeue":
            self._turn(self.partitions[event.task_id], int(event.task_id.rpartition("/")[2]))
        elif event.name == "pool_finish" and self.partitions[event.task_id] not in self._queued():
            for pair in [pair for pair in self.passed if pair[0] == self.partitions[event.task_id]]:
                self.passed[pair] = 0  # its last one was cancelled: when it comes back, it is a newcomer

    def _queued(self) -> set[Any]:
        return {handle.partition for handle in self.handles if handle.status == "queued"}

    def _turn(self, mine: Any, number: int) -> None:
        starts = self.started.setdefault(mine, [])
        if number not in starts:
            starts.append(number)
        queued = self._queued()
        for other in set(self.partitions.values()) - {mine}:
            self.passed[mine, other] = 0
            self.passed[other, mine] = self.passed[other, mine] + 1 if other in queued else 0
            if self.passed[other, mine] > 1:
                self.wrong.append(f"{mine} has a turn again with {number}, and {other} waits since its last one")


async def fair_day(seed: int) -> None:
    """Tenants of different appetite on keys of every temper: verdicts and waits, and still everyone in turn."""
    chance = random.Random(seed)
    tempers = {f"k{number}": chance.choice(TEMPERS) for number in range(chance.randrange(2, 6))}
    tempers["k0"] = "good"
    keys: Keys = ResourcePool(
        [Resource(name, "secret", chance.choice([1, 1, 2])) for name in tempers],
        cooldown_table=(2.0,),
        max_attempts=1000,
    )

    async def body(key: Key, name: str) -> str:
        await asyncio.sleep(chance.choice([0.0, 0.5, 1.0]))
        temper, roll = tempers[key.resource_id], chance.random()
        if temper == "limited" and roll < 0.5:
            raise CooldownResource()
        if temper == "dead" and roll < 0.2:
            raise DisableResource()
        if temper == "flaky" and roll < 0.5:
            raise RetryOperation()
        return name

    async def crowd() -> None:
        for _ in range(10):
            await keys.run(lambda key: asyncio.sleep(chance.choice([0.0, 1.0])), wait_for_capacity=True)
            await asyncio.sleep(chance.choice([0.0, 2.0]))

    handles: list[TaskHandle[Any]] = []
    queue = fair_round_robin("tenant_id")
    async with TaskPool(max_concurrent=chance.choice([1, 2, 4]), queue=queue, resources=keys) as pool:
        turns = Turns(pool, handles)
        unsubscribe = subscribe(turns, AUDIT)
        visitors = [asyncio.create_task(crowd()) for _ in range(chance.randrange(3))]
        with watched(keys, pool):
            for _ in range(60):
                tenant = chance.choice("aaaabbc")
                handles.append(pool.submit_nowait(body, tenant, tenant_id=tenant))
                if chance.random() < 0.2:
                    await asyncio.sleep(chance.choice([0.0, 0.5, 1.0]))
                if chance.random() < 0.05:
                    chance.choice(handles).cancel()
            await pool.drain()
            await asyncio.gather(*visitors)
        unsubscribe()
    assert turns.wrong == []
    for tenant, starts in turns.started.items():
        assert starts == sorted(starts), f"{tenant} first in first out"
    assert all(handle.status in ("completed", "cancelled") for handle in handles)
    assert (in_flight(keys), keys.stats().waiting) == (0, 0)


def test_t22_turns_stay_fair_whatever_happens_to_the_keys(scale: float) -> None:
    weather(range(max(10, int(400 * scale**1.4))), fair_day)


# -- the oracle of this file is no tautology ------------------------------------------------


@pytest.mark.parametrize("order", ["fifo", "lifo"])
def test_line_an_unfair_queue_is_noticed(order: str) -> None:
    """The same listener on a pool that does not share: it must find something."""

    async def main() -> None:
        keys: Keys = ResourcePool([Resource("a", "secret", 1)])
        handles: list[TaskHandle[Any]] = []

        async def body(key: Key) -> None:
            await asyncio.sleep(1)

        async with TaskPool(max_concurrent=2, queue=order, resources=keys) as pool:
            turns = Turns(pool, handles)
            unsubscribe = subscribe(turns, AUDIT)
            for tenant in "aaaaabb":
                handles.append(pool.submit_nowait(body, key=tenant))
            await pool.drain()
            unsubscribe()
        assert turns.wrong

    run(main())


def test_line_a_key_that_is_used_while_it_rests_is_noticed() -> None:
    """And so is the other one."""

    async def main() -> list[str]:
        keys: Keys = ResourcePool([Resource("a", "secret", 1)])
        watch = Watch(keys)
        unsubscribe = subscribe(watch.usage, "resources.usage")
        async with keys.lease():
            await keys.disable("a")
            watch._look("a")
        unsubscribe()
        return watch.wrong

    assert run(main()) == ["a was given out while disabled"]
