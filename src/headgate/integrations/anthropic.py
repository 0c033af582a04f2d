"""Clients of the anthropic SDK that rotate the keys of a ResourcePool."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from headgate.integrations.httpx import RotatingSyncTransport, RotatingTransport
from headgate.integrations.sdk_clients import make_client
from headgate.resources.pool import ResourcePool

if TYPE_CHECKING:
    from anthropic import Anthropic, AsyncAnthropic

__all__ = ["client", "sync_client"]


def client(pool: ResourcePool[str] | RotatingTransport, **options: Any) -> AsyncAnthropic:
    """Make an AsyncAnthropic whose requests are given keys of the pool.

    Options are those of AsyncAnthropic, without api_key and http_client. `max_retries` is 0 if it is not given: the
    pool tries again by itself. Keys go to the client's base_url and nowhere else.
    """
    return cast(
        "AsyncAnthropic", make_client("anthropic", "AsyncAnthropic", "x-api-key", RotatingTransport, pool, options)
    )


def sync_client(pool: ResourcePool[str] | RotatingSyncTransport, **options: Any) -> Anthropic:
    """Make an Anthropic client for code without an event loop; everything else is as for `client`."""
    return cast("Anthropic", make_client("anthropic", "Anthropic", "x-api-key", RotatingSyncTransport, pool, options))
