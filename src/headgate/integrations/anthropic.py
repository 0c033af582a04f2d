"""Clients of the anthropic SDK that rotate the keys of a ResourcePool."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headgate.integrations.httpx import RotatingSyncTransport, RotatingTransport
from headgate.integrations.sdk_clients import ClientMaker

if TYPE_CHECKING:
    from anthropic import Anthropic, AsyncAnthropic

__all__ = ["client", "sync_client"]

client: ClientMaker[RotatingTransport, AsyncAnthropic]
client = ClientMaker("anthropic", "AsyncAnthropic", RotatingTransport, header="x-api-key")
"""Make an AsyncAnthropic whose requests are given keys of a pool: ``client(pool)``. Its options: `ClientMaker`."""

sync_client: ClientMaker[RotatingSyncTransport, Anthropic]
sync_client = ClientMaker("anthropic", "Anthropic", RotatingSyncTransport, header="x-api-key")
"""Make an Anthropic client, for code without an event loop; everything else is as for `client`."""
