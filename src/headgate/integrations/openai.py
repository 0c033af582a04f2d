"""Clients of the openai SDK that rotate the keys of a ResourcePool, or use the key of a task."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headgate.integrations.httpx import RotatingSyncTransport, RotatingTransport
from headgate.integrations.sdk_clients import ClientMaker

if TYPE_CHECKING:
    from openai import AsyncOpenAI, OpenAI

__all__ = ["client", "sync_client"]

client: ClientMaker[RotatingTransport, AsyncOpenAI]
client = ClientMaker("openai", "AsyncOpenAI", RotatingTransport, header="Authorization")
"""Make an AsyncOpenAI: ``client(pool)`` gives each request a key of the pool, ``client(key)`` sends all with one.

Its options: `ClientMaker.__call__`.
"""

sync_client: ClientMaker[RotatingSyncTransport, OpenAI]
sync_client = ClientMaker("openai", "OpenAI", RotatingSyncTransport, header="Authorization")
"""Make an OpenAI client, for code without an event loop; everything else is as for `client`."""
