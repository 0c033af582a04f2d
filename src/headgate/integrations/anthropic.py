"""Clients of the anthropic SDK that rotate the keys of a ResourcePool, or use the key of a task."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headgate.integrations.httpx import RotatingSyncTransport, RotatingTransport
from headgate.integrations.sdk_clients import ClientMaker

if TYPE_CHECKING:
    from anthropic import Anthropic, AsyncAnthropic

__all__ = ["client", "sync_client"]

client: ClientMaker[RotatingTransport, AsyncAnthropic]
client = ClientMaker("anthropic", "AsyncAnthropic", RotatingTransport, header="x-api-key")
"""Make an AsyncAnthropic: ``client(pool)`` gives each request a key of the pool, ``client(key)`` sends all with one.

Its options: `ClientMaker.__call__`.
"""

sync_client: ClientMaker[RotatingSyncTransport, Anthropic]
sync_client = ClientMaker("anthropic", "Anthropic", RotatingSyncTransport, header="x-api-key")
"""Make an Anthropic client, for code without an event loop; everything else is as for `client`."""
