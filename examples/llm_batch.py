"""A batch of prompts over three API keys: two are limited (429), one is revoked (401), and no prompt is lost."""

import asyncio
import time
from collections import Counter
from functools import partial

from small_upstream import Reply, get, serve

from headgate import CooldownResource, DisableResource, Resource, ResourcePool, RetryOperation, TaskPool
from headgate.resources import parse_retry_after

free = Resource("free", "sk-aaa", max_in_flight=1)  # not more at a time than the provider allows
old = Resource("old", "sk-bbb", max_in_flight=4)
paid = Resource("paid", "sk-ccc", max_in_flight=4)
keys = ResourcePool([free, old, paid])


async def complete(key, prompt, url):
    """Make one call with one key. A signal tells the pool what to do with the key, and the prompt is queued again."""
    reply = await get(f"{url}/complete?{prompt}", {"Authorization": f"Bearer {key.value}"})
    if reply.status == 429:
        raise CooldownResource(parse_retry_after(reply.headers.get("retry-after")), "429")
    if reply.status in (401, 403):
        raise DisableResource(f"{reply.status}")
    if reply.status >= 500:
        raise RetryOperation(f"{reply.status}")
    return reply.text


async def main():
    async with serve(provider) as url, TaskPool("batch", max_concurrent=8, resources=keys) as pool:
        prompts = [f"Q{number}" for number in range(30)]
        # A revoked key costs one of max_attempts (3 by default); a rate limit, and waiting for a key, cost none.
        answers = pool.map(partial(complete, url=url), prompts, max_attempts=20)
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
