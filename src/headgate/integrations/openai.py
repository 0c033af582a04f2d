"""Clients of the openai SDK that rotate the keys of a ResourcePool."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from headgate.integrations.httpx import RotatingSyncTransport, RotatingTransport
from headgate.integrations.sdk_clients import make_client
from headgate.resources.pool import ResourcePool

if TYPE_CHECKING:
    from openai import AsyncOpenAI, OpenAI

__all__ = ["client", "sync_client"]


def client(pool: ResourcePool[str] | RotatingTransport, **options: Any) -> AsyncOpenAI:
    """Make an AsyncOpenAI whose requests are given keys of the pool.

    Options are those of AsyncOpenAI, without api_key and http_client. `max_retries` is 0 if it is not given: the
    pool tries again by itself. Keys go to the client's base_url and nowhere else.
    """
    return cast("AsyncOpenAI", make_client("openai", "AsyncOpenAI", "Authorization", RotatingTransport, pool, options))


def sync_client(pool: ResourcePool[str] | RotatingSyncTransport, **options: Any) -> OpenAI:
    """Make an OpenAI client for code without an event loop; everything else is as for `client`."""
    return cast("OpenAI", make_client("openai", "OpenAI", "Authorization", RotatingSyncTransport, pool, options))
