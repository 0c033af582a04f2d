"""H10: whatever calls come, fail, are cancelled or wait, each of them ends, and nothing of a quota is lost."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st

import headgate
from headgate import (
    CooldownResource,
    DisableResource,
    PoolExhausted,
    Quota,
    Resource,
    ResourcePool,
    RetryOperation,
    TaskPool,
)
from headgate.core.clock import clock
from headgate.resources import Member
from headgate.resources.engine import engine_of
from headgate.resources.members import WaitTicket
from headgate.resources.signals import SIGNALS
from headgate.sharing.memory import SharedMemory
from headgate.testing import settle, virtual
from tests.conftest import SCALE
from tests.support.resources.support import at_once
from tests.unit.resources.test_quotas import Upstream

LIMIT, TOKENS, PER = 3, 100, 10.0
QUOTAS = (
    at_once(requests=LIMIT, per=PER, delay=0.0),
    at_once(tokens=TOKENS, per=PER, delay=0.0),
    at_once(requests=LIMIT, tokens=TOKENS, per=PER, delay=0.0),
)
MOST_EXCHANGES = 10_000
STRATEGIES = ("round_robin", "weighted", "least_latency", "sticky", "primary_backup")

_groups = itertools.count()


@dataclass(frozen=True)
class Key:
    """One resource."""

    quota: int | None
    in_group: bool
    max_in_flight: int | None
    tags: frozenset[str]


@dataclass(frozen=True)
class Ask:
    """One call."""

    at: float
    pool: int
    how: str
    cost: int
    tags: frozenset[str]
    seconds: float
    ends: str
    spends: int | None
    cancelled_after: float | None


@dataclass(frozen=True)
class Steer:
    """Something that is done to a resource."""

    at: float
    pool: int
    what: str
    key: int


TAGS = st.frozensets(st.sampled_from("xy"), max_size=1)
KEYS = st.builds(
    Key,
    quota=st.none() | st.integers(0, len(QUOTAS) - 1),
    in_group=st.booleans(),
    max_in_flight=st.none() | st.integers(1, 2),
    tags=st.frozensets(st.sampled_from("xy")),
)
ASKS = st.builds(
    Ask,
    at=st.integers(0, 60).map(lambda tenths: tenths / 2),
    pool=st.integers(0, 1),
    how=st.sampled_from(["run", "run", "lease", "stream", "task", "task", "at once"]),
    cost=st.sampled_from([0, 1, 10, 50, 90, 100]),
    tags=TAGS,
    seconds=st.sampled_from([0.0, 0.0, 1.0, 3.0, 15.0]),
    ends=st.sampled_from(["well", "well", "well", "error", "retry", "cooldown", "disable"]),
    spends=st.none() | st.integers(0, 120),
    cancelled_after=st.none() | st.sampled_from([0.0, 0.5, 1.0, 5.0, 10.0, 11.0]),
)
STEERS = st.builds(
    Steer,
    at=st.integers(0, 60).map(lambda tenths: tenths / 2),
    pool=st.integers(0, 1),
    what=st.sampled_from(["disable", "enable", "remove", "add", "reconcile", "cool"]),
    key=st.integers(0, 3),
)


class BoundedMemory(SharedMemory):
    """Ends a test in which processes ask and answer without end, instead of letting it run for ever."""

    asked = 0

    def call(self, wakes: Iterable[Callable[[], None]]) -> None:
        self.asked += 1
        assert self.asked < MOST_EXCHANGES, "processes exchange without end"
        super().call(wakes)


class World:
    """Two pools, their task pools, and a service that counts."""

    def __init__(self, keys: list[Key], pools: list[list[int]], options: dict[str, Any], stores: list[Any]) -> None:
        number = next(_groups)
        self.group = f"schedule {number}"
        self.is_shared = any(stores)
        self.keys = keys
        self._kept: list[Resource[str]] = []  # so that no other has the same id()
        self.upstreams: dict[str, Upstream] = {}
        group_quota = next((key.quota for key in keys if key.in_group and key.quota is not None), None)
        self.group_quota = group_quota
        self.pools: list[ResourcePool[str]] = []
        self.tasks: list[TaskPool] = []
        for nth, members in enumerate(pools):
            shared = {} if stores[nth] is None else {"name": "keys", "store": stores[nth]}
            pool: ResourcePool[str] = ResourcePool([self.resource(one) for one in members], **options, **shared)
            self.pools.append(pool)
            self.tasks.append(TaskPool(f"tasks-{number}-{nth}", max_concurrent=2, resources=pool))

    def quota_of(self, nth: int) -> Quota | None:
        key = self.keys[nth]
        if key.in_group and self.group_quota is not None:
            return QUOTAS[self.group_quota]
        return None if key.quota is None else QUOTAS[key.quota]

    def resource(self, nth: int) -> Resource[str]:
        key, quota = self.keys[nth], self.quota_of(nth)
        grouped = key.in_group and quota is not None
        return Resource(
            f"key-{nth}",
            f"key-{nth}",
            quota=quota,
            quota_group=self.group if grouped else None,
            max_in_flight=key.max_in_flight,
            tags=key.tags,
        )

    def arrive(self, resource: Resource[str], ask: Ask) -> None:
        """Count a request."""
        quota = resource.quota
        if not isinstance(quota, Quota):
            return
        own = resource.resource_id if self.is_shared else f"{resource.resource_id} {id(resource)}"
        account = resource.quota_group or own
        self._kept.append(resource)
        upstream = self.upstreams.setdefault(account, Upstream(quota.requests, quota.tokens, PER))
        upstream.arrive(account, ask.cost if ask.spends is None else min(ask.spends, ask.cost))

    async def call(self, ask: Ask) -> None:
        """Make one call, in the way that was drawn."""
        await asyncio.sleep(ask.at)
        task = asyncio.create_task(self._made(ask))
        if ask.cancelled_after is not None:
            await asyncio.wait([task], timeout=ask.cancelled_after)
            task.cancel()
        await asyncio.wait([task])
        if not task.cancelled() and (error := task.exception()) is not None:
            assert isinstance(error, (PoolExhausted, LookupError, *SIGNALS)), error

    async def _made(self, ask: Ask) -> None:
        pool = self.pools[ask.pool]
        how: dict[str, Any] = {"cost": ask.cost, "tags": ask.tags, "max_attempts": 4}
        waits: dict[str, Any] = {} if ask.how == "at once" else {"wait_for_capacity": True}

        async def operation(key: Resource[str]) -> None:
            self.arrive(key, ask)
            await asyncio.sleep(ask.seconds)
            if ask.spends is not None:
                key.spent(min(ask.spends, ask.cost))
            ends = {"error": LookupError("of its own"), "retry": RetryOperation(), "cooldown": CooldownResource(2.0)}
            ends["disable"] = DisableResource()
            if ask.ends in ends:
                raise ends[ask.ends]

        async def items(key: Resource[str]) -> AsyncIterator[int]:
            await operation(key)
            yield 1

        if ask.how == "task":
            handle = await self.tasks[ask.pool].submit(operation, cost=max(1, ask.cost), tags=ask.tags, max_attempts=4)
            try:
                await handle
            except asyncio.CancelledError:
                handle.cancel()
                raise
        elif ask.how == "lease":
            async with pool.lease(cost=ask.cost, tags=ask.tags, **waits) as key:
                await operation(key)
        elif ask.how == "stream":
            async for _ in pool.stream(items, **how, **waits):
                pass
        else:
            await pool.run(operation, **how, **waits)

    async def steer(self, steer: Steer) -> None:
        await asyncio.sleep(steer.at)
        pool, name = self.pools[steer.pool], f"key-{steer.key % len(self.keys)}"
        try:
            if steer.what == "add":
                resource = self.resource(steer.key % len(self.keys))
                await pool.reconcile(
                    [*(self.resource(int(one[4:])) for one in pool.snapshot() if one != name), resource]
                )
            elif steer.what == "reconcile":
                await pool.reconcile([self.resource(int(one[4:])) for one in pool.snapshot()])
            elif steer.what == "remove" and len(pool.snapshot()) > 1:
                await pool.remove(name)
            elif steer.what == "cool":
                await pool.cool(name, 3.0)
            elif steer.what in ("disable", "enable"):
                await getattr(pool, steer.what)(name)
        except headgate.UnknownResource:
            pass

    async def watch(self) -> None:
        """Look again and again whether a call waits that could be served, and never when something opens."""
        await asyncio.sleep(0.13)
        while True:
            await asyncio.sleep(0.25)
            await settle()
            for pool in self.pools:
                rotation = engine_of(pool).rotation
                for ticket in rotation.wait_queue.heads():
                    if not ticket.passes():
                        free = [one for one in rotation.matching_members(ticket.requirement) if serves(one, ticket)]
                        assert not free, f"{free[0].resource} is free for a call that waits, at {clock.now()}"

    async def close(self) -> None:
        for tasks in self.tasks:
            await tasks.close()


def serves(member: Member, ticket: WaitTicket) -> bool:
    """Whether a member could serve a call that waits."""
    account = member.sharing.account
    return member.lacks_only_quota and (account is None or account.admits(ticket.cost, clock.now(), ticket))


def whole(pool: ResourcePool[str]) -> bool:
    """Whether all of each quota is there."""
    for one in pool.snapshot().values():
        quota = one.get("quota")
        if quota is None:
            continue
        if any(left not in (LIMIT, TOKENS) for left in quota["left"].values()):
            return False
    return True


def ask(at: float, pool: int, how: str, cost: int, seconds: float, spends: int | None = None) -> Ask:
    return Ask(at, pool, how, cost, frozenset(), seconds, "well", spends, None)


@example(  # what was given to a call that does not wait was given back before the call was told of it, again and again
    keys=[Key(2, False, None, frozenset())],
    pools=(0, 0),
    asks=[ask(15.5, 0, "at once", 0, 15.0), *2 * [ask(10.5, 0, "task", 1, 1.0)], ask(15.5, 1, "lease", 100, 0.0, 118)],
    steers=[],
    strategy="sticky",
    probes=False,
    shared=True,
)
@given(
    keys=st.lists(KEYS, min_size=1, max_size=4),
    pools=st.tuples(st.integers(0, 15), st.integers(0, 15)),
    asks=st.lists(ASKS, min_size=1, max_size=30),
    steers=st.lists(STEERS, max_size=5),
    strategy=st.sampled_from(STRATEGIES),
    probes=st.booleans(),
    shared=st.booleans(),
)
@settings(max_examples=max(25, int(1000 * SCALE**1.6)))
def test_h10_every_call_ends_and_nothing_is_lost(
    keys: list[Key],
    pools: tuple[int, int],
    asks: list[Ask],
    steers: list[Steer],
    strategy: str,
    probes: bool,
    shared: bool,
) -> None:
    """`shared`: each pool stands for a process of its own, and they have one store."""

    @virtual
    async def scenario() -> None:
        options = {"strategy": strategy, "probe_on_recovery": probes}
        members = [[nth for nth in range(len(keys)) if chosen >> nth & 1] or [0] for chosen in pools]
        place = BoundedMemory()
        world = World(keys, members, options, [place.member() if shared else None for _ in members])
        watching = asyncio.create_task(world.watch())
        everything = asyncio.gather(*(world.call(ask) for ask in asks), *(world.steer(steer) for steer in steers))
        await asyncio.wait([watching, everything], timeout=1000, return_when=asyncio.FIRST_COMPLETED)
        if watching.done():
            await watching
        assert everything.done()
        watching.cancel()
        await everything
        await world.close()
        await asyncio.sleep(3 * PER)
        for upstream in world.upstreams.values():
            assert upstream.exceeded == []
        for pool in world.pools:
            assert all(one["in_flight"] == 0 for one in pool.snapshot().values())
            assert shared or whole(pool), pool.snapshot()

    scenario()
