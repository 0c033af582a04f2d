"""Small things many tests of resource pools need."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from headgate import Quota
from headgate.resources import CooldownResource, DisableResource, Resource, ResourcePool

Op = Callable[[Resource[Any]], Coroutine[Any, Any, Any]]


def keys(*names: str, **options: Any) -> ResourcePool[str]:
    """A pool of resources of these ids, whose values are "secret-<id>"."""
    return ResourcePool([Resource(name, f"secret-{name}") for name in names], **options)


def at_once(requests: int | None = None, per: float = 60.0, tokens: int | None = None, **options: Any) -> Quota:
    """A quota all of which may be used at once, for tests that look at waiting and not at the pace."""
    most = requests or tokens or options.get("input_tokens") or options.get("output_tokens")
    return Quota(requests, per, tokens, burst=most, **options)


async def ident(resource: Resource[Any]) -> str:
    """The id of the resource it was given."""
    return resource.resource_id


def always(outcome: object) -> Op:
    """An operation that returns `outcome`, or raises it when it is an exception."""

    async def operation(resource: Resource[Any]) -> object:
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    return operation


def by_id(**outcomes: object) -> Op:
    """An operation that does for each resource id what is given for it (with _ for -)."""

    async def operation(resource: Resource[Any]) -> object:
        outcome = outcomes[resource.resource_id.replace("-", "_")]
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    return operation


class Gate:
    """An operation that waits until it is told how to end, once for each use."""

    def __init__(self) -> None:
        self.entered: list[str] = []
        self.uses: list[asyncio.Future[object]] = []

    async def __call__(self, resource: Resource[Any]) -> object:
        self.entered.append(resource.resource_id)
        end = asyncio.get_running_loop().create_future()
        self.uses.append(end)
        return await end

    def finish(self, number: int, outcome: object = "done") -> None:
        """End the `number`th use by returning or raising."""
        if isinstance(outcome, BaseException):
            self.uses[number].set_exception(outcome)
        else:
            self.uses[number].set_result(outcome)


def status(pool: ResourcePool[Any], resource_id: str) -> str:
    return str(pool.snapshot()[resource_id]["status"])


def in_flight(pool: ResourcePool[Any]) -> int:
    return sum(one["in_flight"] for one in pool.snapshot().values())


# A new one each time: an exception that a module keeps would keep the frames that raised it, and the pools in them.


def rate_limited() -> CooldownResource:
    return CooldownResource(reason="rate limited")


def revoked() -> DisableResource:
    return DisableResource("revoked")
