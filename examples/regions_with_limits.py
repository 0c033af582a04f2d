"""Fill the first region up to its limit, then the next. From rotapool's README; only the import line is different."""

import asyncio
from collections import Counter

from headgate.resources import Pool, Resource

us_client, eu_client, asia_client = "us.example.com", "eu.example.com", "asia.example.com"

pool = Pool(
    resources=[
        Resource(resource_id="region-us", value=us_client, max_in_flight=8),
        Resource(resource_id="region-eu", value=eu_client, max_in_flight=8),
        Resource(resource_id="region-asia", value=asia_client),
    ],
    strategy="primary_backup",
)
# 1st-8th concurrent calls -> region-us
# 9th-16th -> region-eu (us is at capacity)
# 17th+ -> region-asia (eu is at capacity)


async def fetch(resource):
    await asyncio.sleep(0.05)
    return resource.resource_id


async def main():
    for concurrent in (8, 16, 20):
        regions = await asyncio.gather(*(pool.run(fetch) for _ in range(concurrent)))
        print(f"{concurrent} at once:", dict(Counter(regions)))


asyncio.run(main())
