"""The paid key first, the free one only while the paid key cools down. From rotapool's README, with another import."""

import asyncio

from headgate.resources import CooldownResource, Pool, Resource

pool = Pool(
    resources=[
        Resource(resource_id="paid-primary", value="sk-paid-..."),
        Resource(resource_id="free-fallback", value="sk-free-..."),
    ],
    strategy="primary_backup",
)


async def ask(resource):
    return resource.resource_id


async def ask_when_paid_is_limited(resource):
    if resource.resource_id == "paid-primary":
        raise CooldownResource(cooldown_seconds=0.5, reason="429")
    return resource.resource_id


async def main():
    print("healthy:", [await pool.run(ask) for _ in range(3)])
    print("limited:", await pool.run(ask_when_paid_is_limited, retry_delay=0))
    print("cooling:", [await pool.run(ask) for _ in range(3)])
    await asyncio.sleep(0.6)
    print("later:  ", [await pool.run(ask) for _ in range(3)])


asyncio.run(main())
