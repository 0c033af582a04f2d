"""Three tenants share two API keys: one pays for three shares, one for two. At the end, the story of one question."""

import asyncio
import time
from collections import Counter
from functools import partial

from small_upstream import Reply, get, serve

from headgate import CooldownResource, Resource, ResourcePool, TaskPool, fair_share, pool_wait
from headgate.resources import parse_retry_after

one, two = Resource("key-1", "sk-aaa", max_in_flight=2), Resource("key-2", "sk-bbb", max_in_flight=2)
keys = ResourcePool([one, two], strategy="primary_backup", name="keys")
shares = fair_share("tenant", weights={"acme": 3, "bolt": 2})  # other tenants have one share
turns = []


async def ask(key, tenant, question, url):
    turns.append(tenant)
    reply = await get(f"{url}/{question}", {"Authorization": f"Bearer {key.value}"})
    if reply.status == 429:
        raise CooldownResource(parse_retry_after(reply.headers.get("retry-after")), "429")
    return reply.text


async def main():
    async with serve(api) as url, TaskPool("questions", max_concurrent=4, queue=shares, resources=keys) as pool:
        fn = partial(ask, url=url)
        for question in range(20):
            for tenant in ("acme", "bolt", "corp"):
                await pool.submit(fn, tenant, question, tenant=tenant)

        # These two are the last of their tenants. One has a limited waiting time, the other a deadline.
        short = await pool.submit(fn, "corp", "short", tenant="corp", ttl=0.02)
        until = await pool.submit(fn, "bolt", "until", tenant="bolt", deadline=time.monotonic() + 0.02)
        print([task.status for task in await pool_wait([short, until])])
        await pool.drain()
        print("of the first 24 turns:", dict(Counter(turns[:24])))

        hard = await pool.submit(fn, "acme", "hard", tenant="acme")
        print(await hard, "to the hard one")
        print(hard.story())


refusals = {"Bearer sk-aaa": "0.5", "Bearer sk-bbb": "60"}  # for the hard question, once with each key


async def api(request):
    key = request.headers["authorization"]
    if request.target == "/hard" and key in refusals:
        return Reply(429, headers={"retry-after": refusals.pop(key)})
    await asyncio.sleep(0.01)
    return Reply(200, "an answer")


asyncio.run(main())
