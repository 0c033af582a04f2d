"""Clients of the openai SDK that rotate the keys of a ResourcePool."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from headgate.integrations.httpx import RotatingSyncTransport, RotatingTransport
from headgate.integrations.sdk_clients import make_client
from headgate.resources.pool import ResourcePool

if TYPE_CHECKING:
    from openai import AsyncOpenAI, OpenAI

__all__ = ["client", "sync_client"]


def client(
    pool: ResourcePool[str] | RotatingTransport,
    *,
    wait_for_capacity: bool | None = None,
    wait_for_cooldown: bool | None = None,
    max_attempts: int | None = None,
    within: float | None = None,
    **options: Any,
) -> AsyncOpenAI:
    """Make an AsyncOpenAI whose requests are given keys of the pool.

    While all keys are limited or in use, a request waits for one, so that a batch goes through: as with
    `wait_for_capacity=True, within=60` and up to 50 refusals of keys; errors of the server are tried again as often as
    the pool's `max_attempts` says. These options, and the others of calls that `RotatingTransport` takes (`deadline`,
    `retry_delay`, `tags`, `exclude`, `affinity`), mean the same as for `ResourcePool.run`. With
    `wait_for_capacity=False` a request does not wait, and the SDK raises its RateLimitError.

    All other options are those of AsyncOpenAI, without api_key and http_client. `max_retries` is 0 if it is not
    given: the pool tries again by itself. Keys go to the client's base_url and nowhere else.
    """
    waits = {"wait_for_capacity": wait_for_capacity, "wait_for_cooldown": wait_for_cooldown}
    every = {**waits, "max_attempts": max_attempts, "within": within, **options}
    return cast("AsyncOpenAI", make_client("openai", "AsyncOpenAI", "Authorization", RotatingTransport, pool, every))


def sync_client(
    pool: ResourcePool[str] | RotatingSyncTransport,
    *,
    wait_for_capacity: bool | None = None,
    wait_for_cooldown: bool | None = None,
    max_attempts: int | None = None,
    within: float | None = None,
    **options: Any,
) -> OpenAI:
    """Make an OpenAI client for code without an event loop; everything else is as for `client`."""
    waits = {"wait_for_capacity": wait_for_capacity, "wait_for_cooldown": wait_for_cooldown}
    every = {**waits, "max_attempts": max_attempts, "within": within, **options}
    return cast("OpenAI", make_client("openai", "OpenAI", "Authorization", RotatingSyncTransport, pool, every))
