"""A storm: thousands of tasks of every kind, cancelled at random, in pools of every kind. Nothing may be lost.

Each seed draws a pool and its weather: strategy, backpressure, caps, retries, timeouts, ttl, delays, nested waits,
submitters that give up, and a stream of cancels. After every event the slots are counted, and at the end every task has
one end, the counters add up, and nothing is left.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from typing import Any

import pytest

from headgate import (
    PoolBusy,
    QueueFull,
    SubmitTimeout,
    TaskHandle,
    TaskPool,
    backpressure_queue,
    fail_fast,
    fair_share,
    pool_wait,
    ring_buffer,
    subscribe,
)
from headgate.testing import run
from tests.support.tasks.support import AUDIT, EVERY_STRATEGY, Busy

TERMINAL = {"completed", "failed", "rejected", "cancelled", "expired"}


class Storm:
    """One pool, its weather, and what was seen of it."""

    def __init__(self, seed: int, tasks: int, *, cut_waits: bool = True) -> None:
        self.chance = random.Random(seed)
        self.tasks = tasks
        self.cut_waits = cut_waits
        self.slots = self.chance.choice([1, 2, 3, 8, 40])
        self.handles: list[TaskHandle[Any]] = []
        self.finished: Counter[str] = Counter()
        self.final: dict[str, str] = {}
        self.submitted: set[str] = set()
        self.running: set[str] = set()
        self.wrong: list[str] = []
        self.busy = Busy()
        self.pool: TaskPool = self._pool()

    def _pool(self) -> TaskPool:
        chance = self.chance
        queue = chance.choice([*EVERY_STRATEGY, fair_share(weights={"k1": 5.0})])
        depth = chance.choice([1, 5, 50])
        backpressure = chance.choice(
            [
                None,
                backpressure_queue(depth),
                backpressure_queue(depth),
                backpressure_queue(depth, "fail_submitter"),
                backpressure_queue(depth, "drop_oldest"),
                backpressure_queue(depth, "drop_newest"),
                backpressure_queue(depth, "drop_fair"),
                backpressure_queue(depth, "refuse_fair"),
                ring_buffer(depth),
                fail_fast(),
            ]
        )
        caps = chance.choice([None, None, 1, 3, {"k1": 1}])
        return TaskPool(
            max_concurrent=self.slots,
            queue=queue,
            backpressure=backpressure,
            max_concurrent_per_key=caps,
            keep=chance.choice([0, 10, 10_000]),
        )

    # -- what is seen --------------------------------------------------------------------

    def __call__(self, event: Any) -> None:
        name, task = event.name, event.task_id
        if name == "pool_finish":
            self.finished[task] += 1
            self.final[task] = event.status
            self.running.discard(task)
        elif name == "pool_submit":
            self.submitted.add(task)
        elif name == "pool_dequeue":
            self.running.add(task)
        seen = self.pool.snapshot(0)
        if not 0 <= seen.active <= self.slots or seen.waiting < 0 or seen.queued < 0:
            self.wrong.append(f"{name} {task}: {seen.active} active of {self.slots}, {seen.waiting} waiting")

    # -- what happens --------------------------------------------------------------------

    def options(self, depth: int = 0) -> dict[str, Any]:
        chance, options = self.chance, {}
        if chance.random() < 0.6:
            options["key"] = f"k{chance.randrange(5)}"
        if chance.random() < 0.3:
            options["priority"] = chance.randrange(-3, 4)
        if chance.random() < 0.2:
            options["retries"] = chance.randrange(3)
        if chance.random() < 0.1:
            options["timeout"] = chance.choice([0.5, 1.0, 2.0])
        if chance.random() < 0.1:
            options["ttl"] = chance.choice([0.5, 1.0, 5.0])
        if chance.random() < 0.05:
            options["deadline"] = asyncio.get_running_loop().time() + chance.choice([0.5, 1.0, 5.0])
        if chance.random() < 0.05:
            options["delay"] = chance.choice([0.0, 0.5, 1.0])
        if chance.random() < 0.1:
            options["idempotency_key"] = f"i{depth}-{chance.randrange(30)}"
            options["window"] = chance.choice(["while_active", "until_success", "forever", 2.0])
        return options

    async def body(self, depth: int = 0) -> int:
        roll = self.chance.random()
        with self.busy():
            if roll < 0.4:
                return depth
            if roll < 0.5:
                raise LookupError("body")
            await asyncio.sleep(self.chance.choice([0, 0, 0.5, 1.0]))
            if roll < 0.6:
                raise LookupError("body")
            if roll < 0.8 or depth > 3:
                return depth
        await self.nest(depth)
        return depth

    async def nest(self, depth: int) -> None:
        chance, children = self.chance, []
        for _ in range(chance.randrange(1, 4)):
            try:
                children.append(await self.pool.submit(self.body, depth + 1, **self.options(depth + 1)))
            except (QueueFull, PoolBusy):
                continue
        self.handles += children
        how = chance.random()
        if how < 0.3:
            await pool_wait(children)
        elif how < 0.6:
            await asyncio.gather(*children, return_exceptions=True)
        elif how < 0.8 and self.cut_waits:
            try:
                async with asyncio.timeout(0.5):
                    await pool_wait(children)
            except TimeoutError:
                for child in children:
                    child.cancel()
        for child in children:
            if chance.random() < 0.5:
                await pool_wait(child)

    async def submitter(self) -> None:
        chance, options = self.chance, self.options()
        if chance.random() < 0.2:
            options["wait_timeout"] = chance.choice([0.0, 0.5, 2.0])
        try:
            if chance.random() < 0.2:
                options.pop("wait_timeout", None)
                handle = self.pool.submit_nowait(self.body, **options)
            else:
                handle = await self.pool.submit(self.body, **options)
        except (QueueFull, PoolBusy, SubmitTimeout):
            return
        self.handles.append(handle)
        if chance.random() < 0.3:
            delay = chance.choice([0, 0, 0.5, 1.0])
            asyncio.get_running_loop().call_later(delay, handle.cancel)

    async def blow(self) -> None:
        chance, submitters = self.chance, []
        unsubscribe = subscribe(self, AUDIT)
        try:
            for _ in range(self.tasks):
                submitters.append(asyncio.create_task(self.submitter()))
                roll = chance.random()
                if roll < 0.1:
                    await asyncio.sleep(chance.choice([0, 0.25, 0.5]))
                elif roll < 0.15:
                    chance.choice(submitters).cancel()
                elif roll < 0.2 and self.handles:
                    for handle in chance.sample(self.handles, min(5, len(self.handles))):
                        handle.cancel()
            await asyncio.gather(*submitters, return_exceptions=True)
            await self.pool.drain()
        finally:
            unsubscribe()
        failed = [one.exception() for one in submitters if not one.cancelled() and one.exception() is not None]
        assert failed == []

    async def main(self) -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, told: self.wrong.append(str(told)))
        await self.blow()
        self.check()
        if not self.cut_waits:
            assert self.busy.most <= self.slots
        refill = [await self.pool.submit(asyncio.sleep, 1) for _ in range(self.slots)]
        assert {handle.status for handle in refill} == {"running"}  # every slot is there again
        await self.pool.close()

    def check(self) -> None:
        pool = self.pool
        assert self.wrong == []
        assert self.running == set()
        assert set(self.finished.values()) <= {1}, "a task ended twice"
        assert self.submitted <= set(self.finished), "a task never ended"
        for handle in self.handles:
            assert handle.status in TERMINAL
            assert self.final[handle.id] == handle.status
        seen = pool.snapshot()
        assert (pool.size(), seen.active, seen.waiting, seen.queued, seen.blocked_submitters) == (0, 0, 0, 0, 0)
        ends = Counter(self.final.values())
        assert {name: seen[name] for name in TERMINAL} == {name: ends[name] for name in TERMINAL}
        assert seen.total == sum(ends.values())
        assert seen.stale == 0


def weather(seeds: range, tasks: int, **options: Any) -> None:
    """Every seed is tried; those that fail are told together."""
    failed: list[Exception] = []
    for seed in seeds:
        storm = Storm(seed, tasks, **options)
        try:
            run(storm.main(), seed=seed, patience=60)
        except Exception as error:
            error.add_note(f"seed {seed}: {storm.pool.snapshot(0)}")
            failed.append(error)
    if failed:
        raise ExceptionGroup(f"{len(failed)} of {len(seeds)} seeds", failed)


def test_t41_t42_a_storm_of_cancels_loses_nothing(scale: float) -> None:
    seeds, tasks = max(2, int(40 * scale)), max(400, int(10_000 * scale**1.5))
    weather(range(seeds), tasks)


def test_t42_a_storm_without_cut_waits_never_runs_more_bodies_than_slots(scale: float) -> None:
    """Not by the counters but by the bodies themselves. A wait that is cut short goes on without a slot."""
    weather(range(1000, 1000 + max(2, int(50 * scale))), 300 if scale >= 1 else 200, cut_waits=False)


@pytest.mark.parametrize("seed", range(3))
def test_t01b_a_storm_ends_when_the_pool_is_closed(seed: int) -> None:
    async def main() -> None:
        storm = Storm(seed, 300)
        blowing = asyncio.create_task(storm.blow())
        await asyncio.sleep(2)
        await storm.pool.close(cancel=True)
        assert storm.pool.size() == 0
        assert {handle.status for handle in storm.handles} <= TERMINAL
        await asyncio.wait([blowing])
        blowing.exception()

    run(main(), patience=60)
