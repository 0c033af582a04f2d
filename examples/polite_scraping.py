"""Pages of three sites through three proxies: the sites take turns, at most two pages at a time each; a proxy dies."""

import asyncio
from collections import Counter

from small_upstream import Reply, get, serve

from headgate import CooldownResource, Resource, ResourcePool, TaskPool, fair_round_robin, pool_wait

WANTS = {
    "news.example.com": {},
    "shop.example.com": {"tags": ["home"]},  # answers only to proxies with this tag
    "maps.example.com": {"exclude": ["proxy-3"]},  # has banned this proxy
}
TAGS = {"proxy-1": ["home"], "proxy-2": [], "proxy-3": ["home"]}


def classify(outcome):
    """Fetch one page. A proxy that does not answer cools down; a missing page says nothing about the proxy."""
    return CooldownResource(60, "no answer") if isinstance(outcome, ConnectionError) else None


async def fetch(proxy, site, page):
    return (await get(f"http://{site}/{page}", {"Via": proxy.resource_id}, proxy=proxy.value)).status


async def main():
    async with serve(sites) as url:  # one small server in place of all proxies and sites
        proxies = ResourcePool(
            [Resource(name, url, max_in_flight=3, tags=TAGS[name]) for name in TAGS],
            classify=classify,
            cancel_siblings=False,  # running requests may still succeed: do not ask for a page twice
        )
        polite = {"queue": fair_round_robin("host"), "max_concurrent_per_key": 2}
        async with TaskPool("pages", max_concurrent=9, resources=proxies, **polite) as pool:
            todo = [(site, page) for page in range(8) for site in WANTS]
            handles = [await pool.submit(fetch, site, page, host=site, **WANTS[site]) for site, page in todo]
            print("answers:", dict(Counter(task.result for task in await pool_wait(handles))))
        print("for one site at a time: at most", max(most.values()))
        print({name: seen["status"] for name, seen in proxies.snapshot().items()})


now, most, visits = Counter(), Counter(), Counter()


async def sites(request):
    site, proxy = request.headers["host"], request.headers["via"]
    visits[proxy] += 1
    if proxy == "proxy-2" and visits[proxy] > 2:
        raise ConnectionResetError  # the dead proxy closes the connection without an answer
    now[site] += 1
    most[site] = max(most[site], now[site])
    await asyncio.sleep(0.02)
    now[site] -= 1
    banned = (site, proxy) in (("shop.example.com", "proxy-2"), ("maps.example.com", "proxy-3"))
    return Reply(403 if banned else 404 if request.target.endswith("/7") else 200)


asyncio.run(main())
