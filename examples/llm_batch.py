"""A batch of prompts over three API keys: two are limited (429), one is revoked (401), and no prompt is lost.

With any client on httpx. The function raises what the client raises, and the pool judges it.
"""

import asyncio
import time
from collections import Counter

import httpx
from small_upstream import Reply, serve

from headgate import Resource, ResourcePool, TaskPool
from headgate.integrations.httpx import RotatingTransport

free = Resource("free", "sk-aaa", max_in_flight=1)  # not more at a time than the provider allows
old = Resource("old", "sk-bbb", max_in_flight=4)
paid = Resource("paid", "sk-ccc", max_in_flight=4)
keys = ResourcePool([free, old, paid], cancel_siblings=False)


async def main():
    transport = RotatingTransport(keys)  # in a task it sends with the key of the task
    async with serve(provider) as url, httpx.AsyncClient(transport=transport, base_url=url) as client:

        async def complete(key, prompt):
            reply = await client.get(f"/complete?{prompt}")
            reply.raise_for_status()  # 429: the key rests; 401: it is disabled; the prompt is queued again
            return reply.text

        async with TaskPool("batch", max_concurrent=8, resources=keys) as pool:
            # A rate limit, and waiting for a key, cost a prompt nothing. A revoked key costs one of 3 attempts.
            answers = pool.map(complete, [f"Q{number}" for number in range(30)])
            print(*[answer async for answer in answers])  # in the order of the prompts
    for name, seen in keys.snapshot().items():
        print(f"{name}: {keys.stats().resources[name].successes} answers, now {seen['status']}")


QUOTAS = {"Bearer sk-aaa": (3, 60), "Bearer sk-ccc": (10, 0.3)}  # so many requests in so many seconds
ends, asked = {}, Counter()


async def provider(request):
    key, now = request.headers["authorization"], time.monotonic()
    if key not in QUOTAS:
        return Reply(401)
    if now >= ends.get(key, 0):
        ends[key], asked[key] = now + QUOTAS[key][1], 0
    asked[key] += 1
    if asked[key] > QUOTAS[key][0]:
        return Reply(429, headers={"retry-after": f"{ends[key] - now:.3f}"})
    return Reply(200, request.target.replace("/complete?Q", "A"))


asyncio.run(main())
