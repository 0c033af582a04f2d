"""A provider that takes so many calls at a time and refuses the rest, and callers that keep it busy."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any, NamedTuple

from headgate.errors import PoolExhausted
from headgate.resources import CooldownResource, Resource, ResourcePool

Capacity = Callable[[float], int]
"""How many calls it takes at a time, by the seconds since it was made."""

WARM = 60.0
"""Seconds that are not measured."""
ANSWERED = 0.02
"""Seconds after which a refusal arrives."""


def _now() -> float:
    return asyncio.get_running_loop().time()


class Measured(NamedTuple):
    """What was seen after the first minute."""

    busy: float
    """The part of the capacity that was used."""
    refused: float
    """The part of the calls that were refused."""
    accepted: int


class Provider:
    """Takes `capacity` calls at a time, each of `latency` seconds give or take 30 %, and refuses the others at once."""

    def __init__(self, capacity: Capacity, latency: float, seed: int = 1) -> None:
        self.capacity = capacity
        self.latency = latency
        self.inside = 0
        self.most = 0
        """How many calls it has had at a time, since it was measured from."""
        self._random = random.Random(seed)
        self._began = self._looked = _now()
        self._room = self._used = 0.0
        self._accepted = self._refused = 0

    def _look(self) -> None:
        """Count what was used since the last look. Capacities change at whole seconds."""
        now = _now()
        while self._looked < now:
            since = self._looked - self._began
            until = min(now, self._began + int(since + 1e-9) + 1.0)
            if since >= WARM - 1e-9:
                room = self.capacity(since + 1e-9)
                self._room += room * (until - self._looked)
                self._used += min(room, self.inside) * (until - self._looked)
            self._looked = until

    @property
    def is_warm(self) -> bool:
        return _now() - self._began >= WARM

    def refusal(self) -> BaseException:
        """What a refused call raises."""
        return CooldownResource(reason="429")

    async def __call__(self, resource: Resource[Any]) -> str:
        self._look()
        if self.inside >= self.capacity(_now() - self._began):
            self._refused += self.is_warm
            await asyncio.sleep(ANSWERED)
            raise self.refusal()
        self.inside += 1
        self.most = max(self.most, self.inside)
        try:
            await asyncio.sleep(self.latency * self._random.uniform(0.7, 1.3))
        finally:
            self._look()
            self.inside -= 1
        self._accepted += self.is_warm
        return resource.resource_id

    def measured(self) -> Measured:
        """What was used and refused after the first minute."""
        self._look()
        calls = self._accepted + self._refused
        return Measured(self._used / self._room, self._refused / calls, self._accepted)


async def keep_busy(pool: ResourcePool[Any], provider: Provider, callers: int, seconds: float) -> None:
    """Have so many callers call the provider, one call after another, for so long."""
    end = _now() + seconds

    async def caller() -> None:
        while _now() < end:
            try:
                await pool.run(provider, wait_for_capacity=True, max_attempts=100, retry_delay=0, within=end - _now())
            except PoolExhausted as error:
                if error.reason != "deadline":
                    raise

    await asyncio.gather(*(caller() for _ in range(callers)))
