"""Pages of three sites through three proxies: each site at its own pace, one proxy dead, one banned by one site."""

import asyncio
from collections import Counter
from functools import partial

import httpx
from small_upstream import Reply, serve

from headgate import Quota, Resource, ResourcePool, TaskPool, fair_round_robin, pool_wait
from headgate.integrations.httpx import RotatingTransport

PACE = {"news.example.com": 20, "shop.example.com": 10, "maps.example.com": 20}  # requests a second


async def main(one, two, three):
    paced = [Resource(site, f"http://{site}", tags=[site], quota=Quota(rate, per=1.0)) for site, rate in PACE.items()]
    sites = ResourcePool(paced, classify=None)  # a 403 is about a page, or a proxy, and not about the whole site
    proxies = ResourcePool({"one": one, "two": two, "three": three}, strategy="primary_backup")
    # A 403 rests the proxy for that site alone. What is sent again counts for the site's quota, as every request does.
    by_site = RotatingTransport(proxies, proxies=True, affinity=lambda request: request.url.host, retry_delay=0.01)
    async with httpx.AsyncClient(transport=by_site) as client:

        async def fetch(site, page):
            return (await client.get(f"{site.value}/{page}")).status_code

        async with TaskPool("pages", max_concurrent=9, resources=sites, queue=fair_round_robin("host")) as pool:
            todo = [(site, page) for page in range(8) for site in PACE]
            handles = [await pool.submit(fetch, page, host=site, tags=[site]) for site, page in todo]
            print("answers:", dict(Counter(task.result for task in await pool_wait(handles))))
    for name, seen in proxies.stats().resources.items():
        print(f"{name}: {seen.status}, rests for {list(seen.affinity_cooldowns)}, served {sorted(served[name])}")


served = {"one": set(), "two": set(), "three": set()}


async def proxy(name, request):  # in place of a proxy and the sites behind it
    site = request.headers["host"]
    await asyncio.sleep(0.01)
    if name == "one":
        raise ConnectionResetError  # the dead proxy closes the connection without an answer
    if (name, site) == ("two", "shop.example.com"):
        return Reply(403)
    served[name].add(site)
    return Reply(404 if request.target.endswith("/7") else 200)


async def with_proxies():
    async with (
        serve(partial(proxy, "one")) as a,
        serve(partial(proxy, "two")) as b,
        serve(partial(proxy, "three")) as c,
    ):
        await main(a, b, c)


asyncio.run(with_proxies())
