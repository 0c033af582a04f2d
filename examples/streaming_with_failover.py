"""A stream moves to another key until its first item. After that, items cannot be taken back."""

import asyncio

from headgate import CooldownResource, ResourcePool

pool = ResourcePool({"key-1": "sk-aaa", "key-2": "sk-bbb", "key-3": "sk-ccc"})


async def tokens(key):
    """An async generator, in place of a streamed completion."""
    if key.resource_id == "key-1":
        raise CooldownResource(30, "429 before the first token")
    for word in ("keys", "come", "and", "go"):
        yield f"{key.resource_id}:{word}"
        if (key.resource_id, word) == ("key-3", "come"):
            raise CooldownResource(30, "429 in the middle")


async def main():
    async for token in pool.stream(tokens, retry_delay=0):
        print(token)
    try:
        async for token in pool.stream(tokens):
            print(token)
    except CooldownResource as signal:
        print(f"broke off: {signal}")
    print({key: seen["status"] for key, seen in pool.snapshot().items()})


asyncio.run(main())
