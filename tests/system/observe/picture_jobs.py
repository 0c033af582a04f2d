"""What runs on workers while pictures of the page are made."""

from __future__ import annotations

import asyncio

from headgate import CooldownResource, DisableResource, Resource
from headgate.core.clock import clock


async def ask(key: Resource[str], number: int) -> str:
    """Runs on a worker: some calls are refused, some fail."""
    await asyncio.sleep(clock.uniform(0.1, 0.8))
    drawn = clock.uniform(0.0, 1.0)
    if drawn < 0.025:
        raise CooldownResource(clock.uniform(2.0, 9.0), "rate limited")
    if drawn < 0.032:
        raise ValueError("the answer is no JSON: Expecting value: line 1 column 1 (char 0)")
    if key.resource_id == "key-5" and number > 300:
        raise DisableResource("key revoked")
    return "fine"
