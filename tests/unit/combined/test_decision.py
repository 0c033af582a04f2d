"""The whole decision of a pool, walked at random: slots, caps, rates, resources, waits and pauses, all at once.

`test_machine` plays days, one event after the other. Here several things happen within one turn of the event loop: a
task ends while another is cancelled, the pool is resized, a key comes back and a third task expires. When everything
that is ready has happened, what is seen is compared with statements that are obviously right:

- no work waits while everything that it needs is free, except behind a task that takes several slots and lacks some
  (L06), or a running one that wants its slots back (T42);
- no more slots are in use than there are, no tenant is above its cap or rate, no key above its limit or quota;
- a key that is disabled, cooling down or paused is given to nobody, and nobody starts while paused;
- every use of a key belongs to a task that runs or to somebody outside.

At the end everything has ended, and every slot can be taken again at once.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from headgate import (
    CooldownResource,
    DisableResource,
    PoolExhausted,
    Quota,
    Resource,
    ResourcePool,
    RetryOperation,
    TaskHandle,
    TaskPool,
    fair_round_robin,
    fair_share,
    pool_wait,
    subscribe,
)
from headgate.errors import WaitCycle
from headgate.testing import run, settle, virtual
from tests.support.combined.support import AUDIT, TERMINAL, Key, Keys, Uses, Watch, hold, which
from tests.support.resources.support import in_flight

TAGS = ["cpu", "gpu"]
TENANTS = ["a", "b", "c"]
SITES = ["x", "y"]
SLACK = 0.1
"""Seconds by which a window of a rate or quota may open later than the naive count says."""

ORDERS: list[Callable[[], Any]] = [
    lambda: "fifo",
    lambda: "lifo",
    lambda: "priority",
    lambda: fair_round_robin("key"),
    lambda: fair_round_robin("key", levels=True),
    lambda: fair_share("key", weights={"a": 3.0}),
    lambda: fair_share("key", levels=True),
]


def now() -> float:
    """The time of the loop, which is that of pools."""
    return asyncio.get_running_loop().time()


class Job:
    """One task, as the walk knows it."""

    def __init__(self, number: int, parent: Job | None, slots: int, cost: float, options: dict[str, Any]) -> None:
        self.number = number
        self.parent = parent
        self.slots = slots
        self.cost = cost
        self.tags = frozenset(options.get("tags", ()))
        self.exclude = frozenset(options.get("exclude", ()))
        self.site: str | None = options.get("affinity")
        self.tenant: str | None = options.get("key")
        self.due = now() + options.get("delay", 0.0)
        self.handle: TaskHandle[Any] = None  # type: ignore[assignment]
        self.awaits: list[Job] = []
        self.width = (slots, slots)
        """The fewest and most slots that it holds while it runs and waits for nobody."""
        self.is_cut = False  # was a wait refused in the middle? Then it continues, and gets its slot back when it can
        self.returned = 0

    def lineage(self) -> Iterator[Job]:
        """The tasks above it. They lend their slots too while it waits (T42), whether they wait themselves or not."""
        above = self.parent
        while above is not None:
            yield above
            above = above.parent

    @property
    def status(self) -> str:
        return "new" if self.handle is None else self.handle.status

    def __repr__(self) -> str:
        parts = [f"#{self.number}", self.status, f"slots={self.slots}", f"tenant={self.tenant}"]
        parts += [
            f"{name}={value}" for name, value in vars(self).items() if name in ("tags", "exclude", "site") and value
        ]
        return f"<{' '.join(parts)}>"


class Walk:
    """One pool with all its limits, its keys, and what happens to them."""

    def __init__(self, seed: int, steps: int) -> None:
        self.chance = chance = random.Random(seed)
        self.steps = steps
        self.made = 0
        self.quotas: dict[str, tuple[str, int, float]] = {}
        self.tags: dict[str, frozenset[str]] = {}
        self.keys: Keys = ResourcePool(
            [self._key() for _ in range(chance.randrange(1, 5))],
            strategy=chance.choice(["round_robin", "primary_backup"]),
            cooldown_table=(1.0, 2.0),
            cancel_siblings=chance.random() < 0.5,
            max_attempts=100,
        )
        self.limit = self.top = chance.choice([1, 2, 3, 5, 8])
        self.caps: Any = chance.choice([None, None, 1, 2, 3, {"a": 2}])
        self.former_caps = [self.caps]
        self.rate = chance.choice([None, None, None, (2, 1.0), (3, 2.0)])
        self.wide = chance.choice([0.0, 0.0, 0.1, 0.4])
        self.choosy = chance.choice([0.0, 0.2, 0.6])
        self.nests = chance.choice([0.0, 0.1, 0.3])
        self.echoes = chance.choice([0.0, 0.0, 0.03])
        self.has_keys = chance.random() < 0.85
        self.order = chance.choice(ORDERS)()
        self.pool = TaskPool(
            max_concurrent=self.limit,
            queue=self.order,
            max_concurrent_per_key=self.caps,
            rate_per_tenant=None if self.rate is None else Quota(self.rate[0], self.rate[1], burst=self.rate[0]),
            resources=self.keys if self.has_keys else None,
        )
        self.jobs: list[Job] = []
        self.by_id: dict[str, Job] = {}
        self.ends: dict[str, list[str]] = {}
        self.gates: list[asyncio.Future[None]] = []
        self.paused: set[str | None] = set()  # None: the pool
        self.paused_keys: set[str] = set()
        self.used = 0
        self.per_tenant: Counter[str | None] = Counter()
        self.starts: dict[str | None, list[float]] = {}
        self.given: dict[str, float] = {}
        self.outside: set[asyncio.Task[Any]] = set()
        self.visitors = 0
        self.uses = Uses()
        self.wrong: list[str] = []
        self.log: list[str] = []
        self.is_evening = False
        self.within = False

    def _key(self) -> Key:
        chance = self.chance
        self.made += 1
        name = f"k{self.made}"
        self.tags[name] = frozenset(tag for tag in TAGS if chance.random() < 0.5)
        quota = None
        if chance.random() < 0.2:
            what, most, per = chance.choice(["requests", "tokens"]), chance.choice([3, 5]), chance.choice([1.0, 2.0])
            self.quotas[name] = what, most, per
            quota = Quota(**{what: most}, per=per, burst=most)  # type: ignore[arg-type]
        return Resource(name, f"secret-{name}", chance.choice([None, 1, 1, 2, 3]), tags=self.tags[name], quota=quota)

    def cap(self, tenant: str | None) -> int | None:
        return self._cap(self.caps, tenant)

    @staticmethod
    def _cap(caps: Any, tenant: str | None) -> int | None:
        if tenant is None:
            return None
        return caps.get(tenant) if isinstance(caps, dict) else caps

    def most(self, tenant: str | None) -> int:
        cap = self.cap(tenant)
        return self.limit if cap is None else min(cap, self.limit)

    # -- what bodies do ------------------------------------------------------------------------------------------------

    async def body(self, key: Key, job: Job) -> int:
        with self.uses(key):
            return await self.alone(job)

    async def alone(self, job: Job) -> int:
        chance = self.chance
        job.awaits, job.is_cut = [], False
        await self._pass_time()
        if chance.random() < self.nests and (job.parent is None or job.parent.parent is None):
            await self._nest(job)
            await self._pass_time()
        roll = chance.random()
        if not self.is_evening and self.has_keys and roll < 0.25:
            self._verdict(job, roll)
        if roll > 0.92:
            raise LookupError("its own")
        job.returned += 1
        return job.number

    def _verdict(self, job: Job, roll: float) -> None:
        if roll < 0.08:
            raise CooldownResource(self.chance.choice([None, 0.25, 0.5, 1.0]))
        if roll < 0.16:
            raise CooldownResource(self.chance.choice([0.25, 1.0]), only_for="affinity")
        if roll < 0.18:
            raise DisableResource("revoked")
        raise RetryOperation("502")

    async def _pass_time(self) -> None:
        roll = self.chance.random()
        if self.is_evening:
            await asyncio.sleep(self.chance.choice([0.0, 0.25]))
        elif roll < 0.5:
            gate: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self.gates.append(gate)
            await gate
        elif roll < 0.9:
            await asyncio.sleep(self.chance.choice([0.0, 0.25, 0.5, 1.0]))

    async def _nest(self, job: Job) -> None:
        chance, children = self.chance, []
        for _ in range(chance.randrange(1, 4)):
            children.append(self.submit(job))
        how = chance.random()
        if how < 0.4:
            await self._wait(job, children, lambda: pool_wait([one.handle for one in children]))
        elif how < 0.7:
            together = [one.handle for one in children]
            await self._wait(job, children, lambda: asyncio.gather(*together, return_exceptions=True))
        else:
            for child in children:
                await self._wait(job, [child], lambda child=child: pool_wait(child.handle))  # type: ignore[misc]
        if chance.random() < 0.2:
            self.submit(job)  # nobody waits for it

    async def _wait(self, job: Job, children: list[Job], wait: Callable[[], Any]) -> None:
        job.awaits = children
        try:
            job.is_cut |= any(isinstance(one, WaitCycle) for one in await wait() or ())
        except WaitCycle:
            job.is_cut = True
            for child in children:  # a key that it has itself is all that serves one of them
                child.handle.cancel()
        finally:
            job.awaits = []
            job.width = (min(job.slots, self.most(job.tenant)), job.slots)

    async def visit(self, lease: bool, options: dict[str, Any]) -> None:
        try:
            if lease:
                async with self.keys.lease(wait_for_capacity=True, **options):
                    await self._visit(None)
            else:
                await self.keys.run(self._visit, wait_for_capacity=True, retry_delay=0, **options)
        except (PoolExhausted, LookupError):
            pass

    async def _visit(self, key: Key | None) -> None:
        self.visitors += 1
        try:
            await self._pass_time()
        finally:
            self.visitors -= 1

    # -- what happens --------------------------------------------------------------------------------------------------

    def narrowed(self) -> dict[str, Any]:
        chance, options = self.chance, {}
        if chance.random() < self.choosy:
            options["tags"] = [chance.choice(TAGS)]
        if chance.random() < self.choosy / 2:
            options["exclude"] = [f"k{chance.randrange(1, 5)}"]
        return options

    def submit(self, parent: Job | None = None) -> Job:
        chance, options = self.chance, {}
        if self.has_keys:
            options |= self.narrowed()
            if chance.random() < 0.2:
                options["affinity"] = chance.choice(SITES)
            if chance.random() < 0.5:
                options["max_attempts"] = chance.randrange(1, 6)
        if chance.random() < 0.8:
            options["key"] = chance.choice(TENANTS)
        if chance.random() < 0.3:
            options["priority"] = chance.randrange(-1, 2)
        if not self.is_evening:
            if chance.random() < 0.15:
                options["ttl"] = chance.choice([0.25, 0.5, 1.0, 3.0])
            if chance.random() < 0.1:
                options["timeout"] = chance.choice([0.5, 1.0])
            if chance.random() < 0.1:
                options["deadline"] = now() + chance.choice([0.5, 1.0, 3.0])
        if chance.random() < 0.2:
            options["retries"] = chance.randrange(1, 3)
        if chance.random() < 0.1:
            options["delay"] = chance.choice([0.25, 0.5, 1.0])
        cost = float(chance.choice([1, 1, 2, 3])) if chance.random() < 0.3 else 0.0
        if cost:
            options["cost"] = cost
        slots = 1
        if chance.random() < self.wide:
            slots = chance.randrange(1, self.most(options.get("key")) + 1)
            options["slots"] = slots
        job = Job(len(self.jobs), parent, slots, cost, options)
        self.jobs.append(job)
        if self.has_keys:
            job.handle = self.pool.submit_nowait(self.body, job, **options)
        else:
            job.handle = self.pool.submit_nowait(self.alone, job, **options)
        self.by_id[job.handle.id] = job
        return job

    def known(self) -> list[Job]:
        return [job for job in self.jobs[-40:] if job.handle is not None and job.status not in TERMINAL]

    def do_submit(self) -> None:
        for _ in range(self.chance.choice([1, 1, 2, 5])):
            self.submit()

    def do_finish(self) -> None:
        self.chance.shuffle(self.gates)
        for _ in range(self.chance.choice([1, 1, 2, 5])):
            if self.gates and not (gate := self.gates.pop()).done():
                gate.set_result(None)

    def do_cancel(self) -> None:
        known = self.known()
        for job in self.chance.sample(known, min(2, len(known))):
            job.handle.cancel()

    def do_resize(self) -> None:
        self.limit = self.chance.choice([1, 2, 3, 5, 8])
        self.top = max(self.top, self.limit)
        self.pool.resize(self.limit)

    def do_caps(self) -> None:
        self.caps = self.chance.choice([None, 1, 2, 3, {"a": 2}, {"a": 1, "b": 3}])
        self.former_caps.append(self.caps)
        self.pool.limit_keys(self.caps)

    def do_pause(self) -> None:
        what = self.chance.choice([None, *TENANTS])
        self.paused.add(what)
        self.pool.pause() if what is None else self.pool.pause_tenant(what)

    def do_resume(self) -> None:
        for what in [one for one in [None, *TENANTS] if one in self.paused and self.chance.random() < 0.7]:
            self.paused.discard(what)
            self.pool.resume() if what is None else self.pool.resume_tenant(what)

    def do_key(self) -> None:
        chance, names = self.chance, sorted(self.keys.snapshot())
        what = chance.choice(
            ["disable", "enable", "enable", "enable", "cool", "pause", "resume", "resume", "add", "remove"]
        )
        name = chance.choice(names) if names else ""
        if what == "add" and len(names) < 6:
            self.later(self.keys.add(self._key()))
        elif what in ("pause", "resume") and name:
            (self.paused_keys.add if what == "pause" else self.paused_keys.discard)(name)
            getattr(self.keys, what)(name)
        elif what == "cool" and name:
            self.later(self.keys.cool(name, chance.choice([0.25, 0.5, 1.0])))
        elif what in ("disable", "enable") and name:
            self.later(getattr(self.keys, what)(name))
        elif what == "remove" and len(names) > 2 and not self.keys.snapshot()[name]["in_flight"]:
            self.paused_keys.discard(name)
            self.later(self.keys.remove(name))

    def later(self, coroutine: Any) -> None:
        """Run something that never waits, now if possible."""
        try:
            coroutine.send(None)
        except StopIteration:
            return
        raise AssertionError("it waits")

    def do_come(self) -> None:
        if not self.has_keys:
            return
        task = asyncio.create_task(self.visit(self.chance.random() < 0.4, self.narrowed()))
        self.outside.add(task)
        task.add_done_callback(self.outside.discard)

    def do_go(self) -> None:
        if self.outside:
            self.chance.choice(sorted(self.outside, key=lambda task: task.get_name())).cancel()

    def act(self) -> None:
        what = self.chance.choices(
            ["submit", "finish", "cancel", "resize", "caps", "pause", "resume", "key", "come", "go"],
            [10, 10, 3, 1.5, 0.7, 0.5, 2, 4, 1, 0.5],
        )[0]
        self.log.append(f"{now():g} {what}")
        getattr(self, f"do_{what}")()

    async def step(self) -> None:
        for _ in range(self.chance.choice([1, 1, 2, 3, 6])):
            if self.chance.random() < 0.8:
                self.act()
            else:
                asyncio.get_running_loop().call_soon(self.act)
        if self.chance.random() < 0.4:
            await asyncio.sleep(self.chance.choice([0.0, 0.25, 0.25, 0.5, 1.0]))
            if self.chance.random() < 0.5:
                self.act()

    # -- what is heard -------------------------------------------------------------------------------------------------

    def hear(self, event: Any) -> None:
        if event.name == "pool_finish":
            self.ends.setdefault(event.task_id, []).append(event.status)
        if event.name == "pool_dequeue" and event.pool_id == self.pool.id:
            job = self.by_id.get(event.task_id)
            if job is None:  # it starts within its own submit
                job = self.jobs[-1]
            self.starts.setdefault(job.tenant, []).append(now())
            job.width = (job.slots, job.slots)
            if not self.echoes and self.is_paused(job):
                self.wrong.append(f"{job} started while {self.paused} were paused")
        # A listener that acts at once: in the middle of what is being decided or started.
        if not self.within and self.echoes and self.chance.random() < self.echoes and not self.is_evening:
            self.within = True
            try:
                self.chance.choice([self.do_cancel, self.do_resize, self.do_pause, self.do_resume, self.do_key])()
            finally:
                self.within = False

    def hear_use(self, event: Any) -> None:
        if event.name != "resource_acquired" or event.pool != self.keys.name:
            return
        name = event.usage.resource_id
        self.given[name] = now()
        if name in self.paused_keys and not self.echoes:
            self.wrong.append(f"{name} was given out while paused")

    # -- what must hold ------------------------------------------------------------------------------------------------

    def check(self, watch: Watch) -> None:
        assert self.wrong == [], self.wrong
        assert self.echoes or watch.wrong == [], watch.wrong  # a listener may cool what was just taken
        assert self.uses.wrong == [], self.uses.wrong
        seen, keys = self.pool.snapshot(0), self.keys.snapshot()
        running = [job for job in self.jobs if job.status == "running"]
        queued = [job for job in self.jobs if job.status == "queued"]
        active = [job for job in running if not job.awaits]
        loose = [job for job in active if job.is_cut or any(job in one.lineage() for one in running if one.awaits)]
        assert (seen.active + seen.waiting, seen.queued) == (len(running), len(queued))
        assert len(active) - len(loose) <= seen.active <= len(active)
        sure = [job for job in active if job not in loose]
        used = sum(job.width[0] for job in sure)
        assert used <= max(self.top, self.used), f"{used} slots in use, {self.limit} allowed"
        per_tenant: Counter[str | None] = Counter()
        for job in sure:
            per_tenant[job.tenant] += job.width[0]
        for tenant, slots in per_tenant.items():
            caps = [self._cap(caps, tenant) for caps in self.former_caps]
            most = max((cap for cap in caps if cap is not None), default=0)
            assert None in caps or slots <= max(most, self.per_tenant[tenant]), f"{tenant} has {slots} slots"
        if self.has_keys:
            assert self.uses.bodies == len(running), "a body without a task"
            assert len(watch.open) == len(running) + self.visitors, "a key is held by nobody"
        self.check_rates()
        if self.has_keys:
            self.check_hope(queued, keys)
        if not loose:
            self.check_idle(queued, active, running, keys)
        self.used, self.per_tenant, self.top, self.former_caps = used, per_tenant, self.limit, [self.caps]

    def check_rates(self) -> None:
        if self.rate is None:
            return
        most, per = self.rate
        for tenant, times in self.starts.items():
            if tenant is not None:
                for first, last in zip(times, times[most:], strict=False):
                    assert last - first > per - 1e-6, f"{tenant} started {most + 1} tasks in {last - first} s"

    def check_hope(self, queued: list[Job], keys: dict[str, Any]) -> None:
        for job in queued:
            assert any(keys[name]["status"] != "disabled" for name in self.could(job, keys)), f"{job} waits in vain"

    def could(self, job: Job, keys: Iterable[str]) -> list[str]:
        found = [name for name in keys if job.tags <= self.tags[name] and name not in job.exclude]
        return [name for name in found if self.quotas.get(name, ("", 9, 0.0))[1] >= job.cost]

    def has_free_key(self, job: Job, keys: dict[str, Any]) -> bool:
        if not self.has_keys:
            return True
        stats = self.keys.stats().resources
        for name in self.could(job, keys):
            one = keys[name]
            if one["status"] != "healthy" or name in self.paused_keys:
                continue
            if one["max_in_flight"] is not None and one["in_flight"] >= one["max_in_flight"]:
                continue
            if job.site is not None and job.site in (stats[name].affinity_cooldowns or {}):
                continue
            if name in self.quotas and now() - self.given.get(name, -100.0) < self.quotas[name][2] + SLACK:
                continue
            return True
        return False

    def is_paused(self, job: Job) -> bool:
        return None in self.paused or (job.tenant is not None and job.tenant in self.paused)

    def is_open(self, job: Job) -> bool:
        """May its tenant start something, but for its cap?"""
        if job.due > now() or self.is_paused(job):
            return False
        if self.rate is None or job.tenant is None:
            return True
        starts = self.starts.get(job.tenant)
        return not starts or now() - starts[-1] > self.rate[1] + SLACK  # a whole window without any

    def check_idle(self, queued: list[Job], active: list[Job], running: list[Job], keys: dict[str, Any]) -> None:
        room = self.limit - sum(job.width[1] for job in active)
        held: Counter[str | None] = Counter()
        for job in active:
            held[job.tenant] += job.width[1]

        def cap_room(job: Job) -> float:
            cap = self.cap(job.tenant)
            return float("inf") if cap is None else cap - held[job.tenant]

        tenants_held_up: set[str | None] = set()
        returners = [job for job in running if job.awaits and all(one.status in TERMINAL for one in job.awaits)]
        wants = {job: min(job.slots, self.most(job.tenant)) for job in returners}
        tenants_held_up |= {job.tenant for job, width in wants.items() if cap_room(job) < width and job.slots > 1}
        uncapped = {job: width for job, width in wants.items() if cap_room(job) >= width}
        if uncapped:
            assert room < max(uncapped.values()), f"{uncapped} want slots back, and {room} are free"
            return  # what is free is kept for them
        for job in queued:  # slots were kept when it was first, and stay so while its key is in use
            if job.slots > 1 and job.slots <= self.most(job.tenant) and not self.is_paused(job):
                if cap_room(job) < job.slots:
                    tenants_held_up.add(job.tenant)
                elif room < job.slots:
                    return
        for job in queued:
            if (
                not self.is_open(job)
                or room < job.slots
                or cap_room(job) < job.slots
                or self.most(job.tenant) < job.slots
            ):
                continue
            held_up = job.tenant is not None and job.tenant in tenants_held_up
            if not held_up and self.has_free_key(job, keys):
                raise AssertionError(f"{job} waits, and {room} slots and all else that it needs are free")

    # -- a walk --------------------------------------------------------------------------------------------------------

    async def main(self) -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, told: self.wrong.append(str(told)))
        unsubscribe = [subscribe(self.hear, AUDIT), subscribe(self.hear_use, "resources.usage")]
        watch = Watch(self.keys, self.pool)
        watch_use = subscribe(watch.usage, "resources.usage")
        try:
            for _ in range(self.steps):
                await self.step()
                await settle(5000)
                self.check(watch)
            await self.evening()
        finally:
            for end in [*unsubscribe, watch_use]:
                end()
        self.check_ends(watch)
        await self.pool.close()

    async def evening(self) -> None:
        """Everything gets better, so that everything can end."""
        self.is_evening = True
        self.paused.clear()
        await self.keys.add(Resource("last", "secret-last", tags=TAGS))
        self.pool.resize(8)
        self.pool.limit_keys(None)
        self.paused_keys.clear()
        for name in self.keys.snapshot():
            await self.keys.enable(name)
            self.keys.resume(name)
        for gate in self.gates:
            if not gate.done():
                gate.set_result(None)
        await self.pool.drain()
        while self.outside:
            await asyncio.wait(list(self.outside))
        await settle()
        seen = self.pool.snapshot(0)
        assert (seen.active, seen.waiting, seen.queued, self.pool.size()) == (0, 0, 0, 0)
        everything = self.pool.submit_nowait(self.take_all, slots=8)
        assert everything.status == "running", "every slot is there again"
        await everything
        await settle()

    async def take_all(self, key: Key | None = None) -> None:
        """Take every slot."""

    def check_ends(self, watch: Watch) -> None:
        assert self.wrong == [], self.wrong
        for job in self.jobs:
            assert self.ends[job.handle.id] == [job.status], job
        assert self.echoes or watch.wrong == [], watch.wrong  # a listener may cool what was just taken
        assert self.uses.wrong == [], self.uses.wrong
        assert watch.open == set()
        assert (in_flight(self.keys), self.keys.stats().waiting, self.visitors) == (0, 0, 0)
        for job in self.jobs:
            assert job.returned == (job.status == "completed"), job
            error = job.handle.snapshot().error
            assert error is None or isinstance(error, (PoolExhausted, LookupError, TimeoutError, WaitCycle)), error


def walk(seeds: Iterable[int], steps: int) -> None:
    """Every seed is tried; those that fail are told together."""
    failed: list[Exception] = []
    seeds = list(seeds)
    for seed in seeds:
        one = Walk(seed, steps)
        try:
            run(one.main(), seed=seed, patience=60)
        except Exception as error:
            error.add_note(f"seed {seed}: {one.pool!r}")
            failed.append(error)
    if failed:
        raise ExceptionGroup(f"{len(failed)} of {len(seeds)} seeds", failed)


def test_t81_whatever_happens_in_one_turn_nothing_waits_in_vain(scale: float) -> None:
    walk(range(max(8, int(1000 * scale**2))), 60)


@virtual
async def test_l06_a_key_that_comes_free_for_a_task_that_lacks_slots_does_not_go_round() -> None:
    """Other requirements wait for the same key. It was offered to one after the other, in every turn of the loop."""
    keys: Keys = ResourcePool([Resource("k", "v", 1, tags=["cpu", "gpu"]), Resource("f", "v", tags=["free"])])
    async with TaskPool(max_concurrent=3, resources=keys) as pool:
        await pool.submit(hold, 10.0, tags=["free"])
        await pool.submit(hold, 1.0, tags=["cpu"])
        await pool.submit(hold, 1.0, tags=["gpu"])
        await pool.submit(hold, 1.0, exclude=["f"])
        wide = await pool.submit(hold, 1.0, tags=["cpu"], slots=3, priority=1)
        await asyncio.sleep(1.0)
        await settle(100)
        assert wide.status == "queued"
        await asyncio.sleep(9.0)
        assert wide.status == "running", "nothing overtakes it"


@virtual
async def test_l06_a_descendant_that_is_waited_for_gets_the_key_that_a_task_that_lacks_slots_cannot_use_yet() -> None:
    """It starts in the slot that was lent. The key was offered to all but it before, in every turn of the loop."""
    keys: Keys = ResourcePool([Resource("k", "v", 1, tags=["gpu"]), Resource("f", "v", tags=["free"])])
    inner: list[TaskHandle[Any]] = []

    async def outer(key: Key) -> None:
        inner.append(pool.submit_nowait(hold, 1.0, tags=["gpu"]))
        await pool_wait(inner)

    async with TaskPool(max_concurrent=4, resources=keys) as pool:
        await pool.submit(hold, 2.0, tags=["gpu"])
        await pool.submit(hold, 10.0, tags=["free"])
        await pool.submit(outer, tags=["free"])
        await pool.submit(hold, 1.0, tags=["free"])
        await settle()
        other = await pool.submit(hold, 1.0, exclude=["f"])
        wide = await pool.submit(hold, 1.0, tags=["gpu"], slots=4, priority=1)
        await asyncio.sleep(2.0)
        await settle(100)
        assert [inner[0].status, wide.status, other.status] == ["running", "queued", "queued"]
        await asyncio.sleep(9.0)
        assert [wide.status, other.status] == ["running", "queued"]


@virtual
async def test_t42_a_descendant_that_can_never_start_gives_the_slot_back_to_whoever_waits_for_it() -> None:
    """And to no other descendant: the slot that both were to have is taken."""
    keys: Keys = ResourcePool([Resource(name, "v", tags=[name]) for name in "kfg"])
    ended: list[str] = []

    async def outer(key: Key) -> None:
        first = pool.submit_nowait(which, tags=["f"])
        second = pool.submit_nowait(which, tags=["g"])
        await keys.disable("f")
        await pool_wait(first)
        ended.append(first.status)
        ended.append(second.status)

    async with TaskPool(max_concurrent=1, resources=keys) as pool:
        handle = await pool.submit(outer, tags=["k"])
        await handle
    assert ended == ["failed", "queued"]
    assert in_flight(keys) == 0
