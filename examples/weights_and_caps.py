"""A paying tenant gets three times as much, measured by cost; a cap keeps any tenant from holding every slot."""

import asyncio
from collections import Counter

from headgate import TaskPool, fair_share

by_tokens = fair_share("tenant_id", weights={"paying": 3}, cost=lambda tenant, tokens, story: tokens)


class Story:
    def __init__(self):
        self.served, self.running, self.most = [], Counter(), Counter()


async def ask(tenant, tokens, story):
    story.running[tenant] += 1
    story.most[tenant] = max(story.most[tenant], story.running[tenant])
    await asyncio.sleep(0.001)
    story.running[tenant] -= 1
    story.served.append((tenant, tokens))


async def serve(**options):
    story = Story()
    async with TaskPool(queue=by_tokens, **options) as pool:
        for _ in range(60):
            for tenant, tokens in (("paying", 100), ("free", 100), ("long", 300)):
                await pool.submit(ask, tenant, tokens, story, tenant_id=tenant)
    return story


async def main():
    tokens = Counter()
    for tenant, cost in (await serve(max_concurrent=1)).served[:40]:
        tokens[tenant] += cost
    print("tokens in the first 40 tasks:", dict(tokens))

    story = await serve(max_concurrent=8)
    print("at once, at most:", story.most["long"])  # the other tenants were done, and no slot stays idle
    story = await serve(max_concurrent=8, max_concurrent_per_key=2)
    print("with a cap of 2 for each:", dict(story.most))
    story = await serve(max_concurrent=8, max_concurrent_per_key={"long": 1})
    print("with a cap for one:", story.most["long"])


asyncio.run(main())
