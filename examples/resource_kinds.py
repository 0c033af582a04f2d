"""A resource is anything that is scarce. From rotapool's README; only the import line is different."""

import asyncio

from headgate.resources import Pool, Resource


class Webdriver:
    """In place of a browser session."""


pools = {
    # API keys (string bearer tokens)
    "keys": Pool([Resource(resource_id="key-1", value="sk-...")]),
    # HTTP proxies
    "proxies": Pool([Resource(resource_id="proxy-1", value="http://proxy.example.com:8080", max_in_flight=10)]),
    # Browser sessions (exclusive)
    "browsers": Pool([Resource(resource_id="session-1", value=Webdriver(), max_in_flight=1)]),
    # GPU workers
    "gpus": Pool([Resource(resource_id="gpu-0", value="cuda:0", max_in_flight=1)]),
}


async def main():
    for kind, pool in pools.items():
        most = 0

        async def use(resource, pool=pool):
            nonlocal most
            most = max(most, pool.snapshot()[resource.resource_id]["in_flight"])
            await asyncio.sleep(0.01)

        await asyncio.gather(*(pool.run(use, wait_for_capacity=True) for _ in range(20)))
        print(f"{kind}: 20 calls, at most {most} at once")


asyncio.run(main())
