"""Keys change while calls run: `reconcile` takes the new list and keeps the health of the keys that stay."""

import asyncio

from headgate import CooldownResource, ResourcePool

pool = ResourcePool({"key-1": "sk-old", "key-2": "sk-bbb"})


async def ask(key):
    if key.resource_id == "key-2":
        raise CooldownResource(60, "429")
    await asyncio.sleep(0.05)
    return key.value


def show(when):
    print(when, {key: seen["status"] for key, seen in pool.snapshot().items()})


async def main():
    await pool.run(ask)
    await pool.run(ask, retry_delay=0)
    show("before:")

    slow = asyncio.create_task(pool.run(ask))  # starts with the old key, and ends with it
    await asyncio.sleep(0)
    await pool.reconcile({"key-1": "sk-new", "key-2": "sk-bbb", "key-3": "sk-ccc"})
    show("after: ")  # key-1 has another value, so it is another resource. key-2 is still cooling
    print("in flight meanwhile:", await slow)
    print("from now on:", sorted([await pool.run(ask), await pool.run(ask)]))

    await pool.remove("key-3")
    await pool.disable("key-1")
    await pool.enable("key-2")
    show("by hand:")


asyncio.run(main())
