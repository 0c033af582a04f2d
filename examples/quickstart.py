"""Three keys, one of them rate-limited and one revoked: the call succeeds, and the pool remembers."""

import asyncio

from headgate import CooldownResource, DisableResource, ResourcePool

pool = ResourcePool({"key-1": "sk-aaa", "key-2": "sk-bbb", "key-3": "sk-ccc"})


async def ask(key, prompt):
    """In place of a request to an API that limits its callers."""
    status = {"key-1": 429, "key-2": 401}.get(key.resource_id, 200)
    if status == 429:
        raise CooldownResource(cooldown_seconds=30, reason="rate limited")
    if status == 401:
        raise DisableResource(reason="key revoked")
    return f"{key.resource_id} says: hello, {prompt}"


async def main():
    print(await pool.run(lambda key: ask(key, "world")))
    print(pool)


asyncio.run(main())
