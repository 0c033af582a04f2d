"""Small things many tests of the line need: keys that are watched, and bodies that take one."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import headgate.tasks
from headgate import Resource, ResourcePool, TaskHandle, TaskPool, subscribe
from headgate.core.clock import clock
from tests.support.resources.support import in_flight

AUDIT = "lifecycle.pool.audit"
USAGE = "resources.usage"
EVERY_STRATEGY = ["fifo", "lifo", "priority", "fair_round_robin", "fair_share"]
TERMINAL = {"completed", "failed", "rejected", "cancelled", "expired"}

_ENOUGH = 500

Key = Resource[str]
Keys = ResourcePool[str]


# -- keys ----------------------------------------------------------------------------------


def shared(*names: str, **options: Any) -> Keys:
    """Keys that any number may use at a time, valued "secret-<id>"."""
    return ResourcePool([Resource(name, f"secret-{name}") for name in names], **options)


def exclusive(*names: str, **options: Any) -> Keys:
    """Keys that one may use at a time."""
    return ResourcePool([Resource(name, f"secret-{name}", 1) for name in names], **options)


def tagged(cap: int | None = 1, **tags: str | Sequence[str]) -> Keys:
    """Keys by their tags: ``tagged(c1="cpu", g1=["gpu", "big"])``."""
    return ResourcePool(
        [
            Resource(name, f"secret-{name}", cap, tags=[these] if isinstance(these, str) else these)
            for name, these in tags.items()
        ]
    )


def cooling(seconds: float, *names: str, cap: int | None = None, **options: Any) -> Keys:
    """Keys that rest until so many seconds from now."""
    until = clock.now() + seconds
    return ResourcePool(
        [Resource(name, f"secret-{name}", cap, "cooling_down", until) for name in names],
        **options,
    )


def free(keys: Keys) -> bool:
    """Is nothing in flight, and does nobody stand in line?"""
    return in_flight(keys) == 0 and keys.stats().waiting == 0


# -- bodies --------------------------------------------------------------------------------


async def use(key: Key, value: Any = "done") -> Any:
    """Done at once."""
    return value


async def which(key: Key, *_: Any) -> str:
    """The id of the key it was given."""
    return key.resource_id


async def hold(key: Key, seconds: float, value: Any = "done") -> Any:
    """Takes its time."""
    await asyncio.sleep(seconds)
    return value


class Script:
    """A body that does on each call what is next in its list: return it, or raise it. The last is repeated.

    It notes on which key each call was, and when.
    """

    def __init__(self, *outcomes: object, seconds: float = 0.0) -> None:
        self._outcomes = list(outcomes)
        self._seconds = seconds
        self.keys: list[str] = []
        self.times: list[float] = []

    async def run(self, key: Key, *_: Any) -> Any:
        return self._outcome(await self._begin(key))

    def plain(self, key: Key, *_: Any) -> Any:
        """The same as a plain function, for a thread."""
        self._note(key)
        if self._seconds:
            clock.sleep(self._seconds)
        return self._outcome(self._next())

    async def _begin(self, key: Key) -> object:
        self._note(key)
        outcome = self._next()
        if self._seconds:
            await asyncio.sleep(self._seconds)
        return outcome

    def _note(self, key: Key) -> None:
        # A virtual loop cannot tell work that never ends from work: time stands, and a test would go on for ever.
        assert len(self.keys) < _ENOUGH, f"called {_ENOUGH} times"
        self.keys.append(key.resource_id)
        self.times.append(clock.now())

    def _next(self) -> object:
        return self._outcomes.pop(0) if len(self._outcomes) > 1 else self._outcomes[0]

    def _outcome(self, outcome: object) -> object:
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome


class Turns:
    """Bodies that note whose turn it was, on which key, and when; each takes `seconds`."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.order: list[Any] = []
        self.keys: list[str] = []
        self.times: list[float] = []
        self._seconds = seconds

    async def take(self, key: Key, name: Any) -> Any:
        self.order.append(name)
        self.keys.append(key.resource_id)
        self.times.append(clock.now())
        if self._seconds:
            await asyncio.sleep(self._seconds)
        return name

    async def alone(self, name: Any) -> Any:
        """The same without a key, for a pool without resources."""
        self.order.append(name)
        if self._seconds:
            await asyncio.sleep(self._seconds)
        return name

    def outside(self, name: Any) -> Callable[[Key], Any]:
        """The same as an operation for the keys' own `run`."""
        return lambda key: self.take(key, name)


class Victim:
    """A body that lasts, and notes on which keys it began and where it was interrupted; then it ends at once."""

    def __init__(self, seconds: float = 1000.0) -> None:
        self.began: list[str] = []
        self.interrupted: list[str] = []
        self.seconds = seconds

    async def run(self, key: Key, *_: Any) -> str:
        self.began.append(key.resource_id)
        try:
            await asyncio.sleep(self.seconds)
        except asyncio.CancelledError:
            self.interrupted.append(key.resource_id)
            raise
        return f"to its end on {key.resource_id}"


# -- what must never happen -----------------------------------------------------------------


class Uses:
    """Stands in the bodies: how many use each key right now, and was one ever used above its cap?"""

    def __init__(self) -> None:
        self.now: Counter[str] = Counter()
        self.most: Counter[str] = Counter()
        self.bodies = 0
        self.most_bodies = 0
        self.wrong: list[str] = []

    @contextmanager
    def __call__(self, key: Key) -> Iterator[None]:
        name = key.resource_id
        self.now[name] += 1
        self.bodies += 1
        self.most[name] = max(self.most[name], self.now[name])
        self.most_bodies = max(self.most_bodies, self.bodies)
        if key.max_in_flight is not None and self.now[name] > key.max_in_flight:
            self.wrong.append(f"{name}: {self.now[name]} bodies, {key.max_in_flight} allowed")
        try:
            yield
        finally:
            self.now[name] -= 1
            self.bodies -= 1


class Watch:
    """Listens to keys and pools: is a key given out while it rests, is out, or is full; is a pool above its cap?"""

    def __init__(self, keys: Keys, *pools: TaskPool, every: int = 1) -> None:
        self.keys = keys
        self._every = every
        self._heard = 0
        self.pools = {pool.id: pool for pool in pools}
        self.wrong: list[str] = []
        self.given: Counter[str] = Counter()
        self.open: set[int] = set()
        self._ended: set[int] = set()
        self.ends: dict[str, list[str]] = {}

    def usage(self, event: Any) -> None:
        if event.pool != self.keys.name:
            return
        usage = event.usage
        if event.name == "resource_acquired":
            if usage.id in self.open or usage.id in self._ended:
                self.wrong.append(f"use {usage.id} began twice")
            self.open.add(usage.id)
            self.given[usage.resource_id] += 1
            self._look(usage.resource_id)
        elif event.name == "resource_released":
            if usage.id in self._ended:
                self.wrong.append(f"use {usage.id} ended twice")
            self._ended.add(usage.id)
            self.open.discard(usage.id)

    def _look(self, name: str) -> None:
        seen = self.keys.snapshot().get(name)
        if seen is None:
            self.wrong.append(f"{name} was given out and is not in the pool")
        elif seen["status"] != "healthy":
            self.wrong.append(f"{name} was given out while {seen['status']}")
        elif seen["max_in_flight"] is not None and seen["in_flight"] > seen["max_in_flight"]:
            self.wrong.append(f"{name} has {seen['in_flight']} in flight, {seen['max_in_flight']} allowed")

    def task(self, event: Any) -> None:
        pool = self.pools.get(event.pool_id)
        if pool is None:
            return
        if event.name == "pool_finish":
            self.ends.setdefault(event.task_id, []).append(event.status)
        self._heard += 1
        if self._heard % self._every:
            return
        seen = pool.snapshot(0)
        if not 0 <= seen.active <= seen.max_concurrent or seen.waiting < 0 or seen.queued < 0:
            self.wrong.append(f"{event.name}: {seen.active} active of {seen.max_concurrent}")
        if pool.size() != seen.active + seen.waiting + seen.queued:
            self.wrong.append(f"{event.name}: size {pool.size()}")

    def check_ends(self, handles: Iterable[TaskHandle[Any]]) -> None:
        """Each of these has one end, the one that was told."""
        for handle in handles:
            assert self.ends.get(handle.id) == [handle.status], f"{handle!r}: {self.ends.get(handle.id)}"
            assert handle.status in TERMINAL


@contextmanager
def watched(keys: Keys, *pools: TaskPool, every: int = 1) -> Generator[Watch, None, None]:
    """Fails if in this block a key is given out that must not be, or a pool runs more than it may.

    Caps that are lowered in the block are not for this: what runs goes on. Pools are looked at when so many of their
    events have come: a snapshot is not for nothing.
    """
    watch = Watch(keys, *pools, every=every)
    unsubscribe = [subscribe(watch.usage, USAGE), subscribe(watch.task, AUDIT)]
    try:
        yield watch
    finally:
        for end in unsubscribe:
            end()
    assert watch.wrong == []


# -- order ----------------------------------------------------------------------------------


Submits = Sequence[tuple[Any, dict[str, Any]]]


async def order_without_keys(queue: Any, submits: Submits) -> list[Any]:
    """The oracle: in which order does a pool that knows nothing of resources run these, one by one?"""
    opened, turns = asyncio.Event(), Turns()
    async with headgate.tasks.TaskPool(queue=queue) as pool:
        await pool.submit(opened.wait)
        for name, options in submits:
            await pool.submit(turns.alone, name, **options)
        opened.set()
        await pool.drain()
    return turns.order


def random_submits(chance: random.Random, count: int, keys: str = "abc") -> Submits:
    """Names and options of so many submits, of a few keys with floods of different size."""
    return [
        (f"{(key := chance.choice(keys + keys[0] * 3))}{number}", {"key": key, "priority": chance.randrange(3)})
        for number in range(count)
    ]


def jain(shares: Sequence[float]) -> float:
    """1 when all got the same, 1/n when one got everything."""
    return sum(shares) ** 2 / (len(shares) * sum(share * share for share in shares))


def counts(pool: TaskPool) -> dict[str, int]:
    """The counters of a pool that are not 0."""
    snapshot = pool.snapshot(0)
    names = ("active", "waiting", "queued", "completed", "failed", "rejected", "cancelled", "expired", "stale")
    return {name: snapshot[name] for name in names if snapshot[name]}


async def outcome_of(handle: TaskHandle[Any]) -> Any:
    """Its result, or its exception."""
    try:
        return await handle
    except Exception as error:
        return error
