"""Politeness: further attempts count for the site around them (C26), and requests say which site is theirs (C27)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import httpx2
import pytest

from headgate import InvalidType, PoolExhausted, Quota, Resource, ResourcePool, TaskPool
from headgate.core.clock import clock
from headgate.integrations.httpx import RotatingSyncTransport, RotatingTransport
from headgate.sharing.memory import SharedMemory
from headgate.testing import settle, virtual
from tests.support.integrations.upstream import Answer, Upstream, serving

LIBRARIES = pytest.mark.parametrize("library", [httpx, httpx2], ids=["httpx", "httpx2"])
SITE = "https://a.example/page"


class Site:
    """A site behind a transport: notes when requests arrive, and fails those that carry one of these keys."""

    def __init__(self, library: Any = httpx, *failing: str, **options: Any) -> None:
        self.library = library
        self.failing = failing
        self.arrivals: list[float] = []
        self.seen: list[tuple[str, str]] = []
        self.options = options

    def __call__(self, request: Any) -> Any:
        self.arrivals.append(clock.now())
        key = request.headers["authorization"].removeprefix("Bearer ")
        self.seen.append((request.url.host, key))
        if key in self.failing:
            raise self.library.ConnectError("no answer", request=request)
        return self.library.Response(200, text=key)

    def client(self, keys: ResourcePool[str], **options: Any) -> Any:
        given = {"retry_delay": 0, "hosts": ["a.example", "b.example"], **self.options, **options}
        transport = RotatingTransport(keys, transport=self.library.MockTransport(self), **given)
        return self.library.AsyncClient(transport=transport, follow_redirects=True)

    def sync_client(self, keys: ResourcePool[str], **options: Any) -> Any:
        given = {"retry_delay": 0, "hosts": ["a.example", "b.example"], **self.options, **options}
        transport = RotatingSyncTransport(keys, transport=self.library.MockTransport(self), **given)
        return self.library.Client(transport=transport)

    def most_within(self, seconds: float) -> int:
        """The most requests that arrived in any so many seconds."""
        return max(sum(begin <= at < begin + seconds for at in self.arrivals) for begin in self.arrivals)


def proxies(*names: str, **options: Any) -> ResourcePool[str]:
    return ResourcePool({name: name for name in names or ("dead", "good")}, strategy="primary_backup", **options)


def sites(quota: Quota | str | None, **fields: Any) -> ResourcePool[str]:
    return ResourcePool([Resource("a.example", "a.example", quota=quota, **fields)], name="sites")  # type: ignore[arg-type]


def at_once(requests: int, per: float = 60.0) -> Quota:
    return Quota(requests, per, burst=requests)


def left(pool: ResourcePool[Any], name: str = "a.example") -> float | None:
    return pool.snapshot()[name]["quota"]["left"]["requests"]


async def nothing(*_: object) -> None:
    pass


def page(client: Any) -> Callable[..., Any]:
    async def visit(*_: object) -> str:
        return str((await client.get(SITE)).text)

    return visit


# -- C26: further attempts --------------------------------------------------------------------------------------------


@LIBRARIES
@virtual
async def test_c26_a_site_never_sees_more_requests_than_its_quota_allows(library: Any) -> None:
    """Every second request is sent again, because its proxy is dead."""
    site, allowed = Site(library, "dead"), sites(Quota(requests=2, per=1.0))
    dying = ResourcePool({"dead": "dead", "good": "good"}, cooldown_table=(0.0,), classify=None)
    async with site.client(dying, wait_for_capacity=True) as client:
        visit = page(client)
        calls = (allowed.run(visit, wait_for_capacity=True) for _ in range(10))
        assert await asyncio.gather(*calls) == ["good"] * 10
    assert len(site.arrivals) > 12, "some were sent again"
    assert site.most_within(1.0) <= 2


@pytest.mark.parametrize("in_thread", [False, True], ids=["async", "thread"])
def test_c26_the_same_holds_for_tasks_with_resources(in_thread: bool) -> None:
    site, allowed = Site(httpx, "dead"), sites(at_once(20))

    async def main() -> None:
        async with site.client(proxies()) as client, TaskPool(max_concurrent=3, resources=allowed) as pool:
            with site.sync_client(proxies()) as sync:

                def blocking(resource: Resource[str]) -> str:
                    return str(sync.get(SITE).text)

                for _ in range(3):
                    assert await pool.run(blocking if in_thread else page(client)) == "good"

    asyncio.run(main())
    assert len(site.arrivals) == 6
    assert left(allowed) == 20 - 6


@virtual
async def test_c26_a_further_attempt_waits_in_the_order_of_the_calls_that_start() -> None:
    site, allowed = Site(httpx, "dead"), sites(Quota(requests=1, per=10.0))
    order: list[tuple[str, float]] = []
    began = clock.now()

    async def waits(name: str, visit: Callable[..., Any]) -> None:
        async def operation(resource: Resource[str]) -> None:
            await visit()
            order.append((name, clock.now() - began))

        await allowed.run(operation, wait_for_capacity=True)

    release = asyncio.Event()

    async def slow_failure(request: Any) -> Any:
        site(request) if request.headers["authorization"].endswith("good") else await release.wait()
        if request.headers["authorization"].endswith("good"):
            return httpx.Response(200, text="good")
        raise httpx.ConnectError("no answer", request=request)

    transport = RotatingTransport(proxies(), transport=httpx.MockTransport(slow_failure), retry_delay=0)
    async with httpx.AsyncClient(transport=transport) as client:
        calls = [asyncio.create_task(waits("retried", lambda: client.get(SITE)))]
        await settle()
        calls.append(asyncio.create_task(waits("before", nothing)))
        await settle()
        release.set()
        await settle()
        calls.append(asyncio.create_task(waits("after", nothing)))
        await asyncio.gather(*calls)
    assert [name for name, _ in order] == ["before", "retried", "after"]
    assert [at for _, at in order] == pytest.approx([10, 20, 30], abs=0.5)


@LIBRARIES
@virtual
async def test_c26_it_waits_no_longer_than_the_deadline_of_its_request(library: Any) -> None:
    site, allowed = Site(library, "dead"), sites(Quota(requests=1, per=10.0))
    async with site.client(proxies(), within=3.0) as client:
        began = clock.now()
        with pytest.raises(library.ConnectError, match="no answer"):
            await allowed.run(page(client))
        assert clock.now() - began == 3.0
    assert len(site.arrivals) == 1
    stats = allowed.stats()
    assert (stats.waiting, stats.in_flight) == (0, 0)
    await asyncio.sleep(7.5)
    async with Site(library).client(proxies("good")) as client:
        assert await allowed.run(page(client)) == "good", "nothing of the quota was taken"


@pytest.mark.parametrize("kind", ["run", "lease", "stream"])
@virtual
async def test_c26_it_needs_no_second_place_at_the_site(kind: str) -> None:
    site, allowed = Site(httpx, "dead"), sites(Quota(requests=1, per=10.0), max_in_flight=1)
    async with site.client(proxies()) as client:
        began = clock.now()
        if kind == "run":
            assert await allowed.run(page(client)) == "good"
        elif kind == "lease":
            async with allowed.lease():
                assert (await client.get(SITE)).text == "good"
        else:

            async def items(resource: Resource[str]) -> AsyncIterator[str]:
                yield (await client.get(SITE)).text

            assert [one async for one in allowed.stream(items)] == ["good"]
        assert clock.now() - began == pytest.approx(10, abs=0.5)
    assert left(allowed) == 0


@virtual
async def test_c26_a_quota_of_the_transports_own_pool_counts_each_attempt_once() -> None:
    site = Site(httpx, "dead")
    quotas = proxies(quota=at_once(20))
    async with site.client(quotas) as client:
        assert await quotas.run(page(client), exclude=["dead"]) == "good"
    assert (left(quotas, "dead"), left(quotas, "good")) == (19, 18), "the call around it, and an attempt on each"

    both = [
        ResourcePool([Resource(name, name, quota=at_once(20), quota_group="c26") for name in names])
        for names in (["a.example"], ["dead", "good"])
    ]
    async with site.client(both[1]) as client:
        assert await both[0].run(page(client)) == "good"
    assert left(both[0]) == 20 - 3


@virtual
async def test_c26_every_quota_around_it_is_charged_once() -> None:
    site = Site(httpx, "dead", "dead too")
    group = {"quota": at_once(20), "quota_group": "c26 around"}
    one, same = sites(**group), sites(**group)  # type: ignore[arg-type]
    other, free = sites(at_once(20)), sites(None)
    async with site.client(proxies("dead", "dead too", "good")) as client:
        visit = page(client)
        nested = lambda *_: other.run(lambda _: free.run(lambda _: same.run(visit)))  # noqa: E731
        assert await one.run(nested) == "good"
    assert left(other) == 20 - 3
    assert left(one) == left(same) == 20 - 4, "two calls, and two further attempts"


@virtual
async def test_c26_a_site_without_a_quota_costs_nothing() -> None:
    site, free = Site(httpx, "dead"), sites(None)
    async with site.client(proxies()) as client:
        began = clock.now()
        assert await free.run(page(client)) == "good"
        assert clock.now() == began


@virtual
async def test_c26_separate_requests_of_one_operation_are_its_own_business() -> None:
    """Pages one after the other, and a redirect: the operation knows of them, and can take the site for each."""
    allowed = sites(at_once(20))

    def answer(request: Any) -> Any:
        moved = request.url.path == "/old"
        return httpx.Response(302, headers={"location": "/new"}) if moved else httpx.Response(200)

    transport = RotatingTransport(proxies(), transport=httpx.MockTransport(answer))
    async with httpx.AsyncClient(transport=transport, follow_redirects=True) as client:

        async def crawl(resource: Resource[str]) -> None:
            for number in range(3):
                await client.get(f"https://a.example/{number}")
            await client.get("https://a.example/old")

        await allowed.run(crawl)
    assert left(allowed) == 19


@virtual
async def test_c26_a_cancelled_request_leaves_the_queue() -> None:
    site, allowed = Site(httpx, "dead"), sites(Quota(requests=1, per=10.0))
    async with site.client(proxies()) as client:
        call = asyncio.create_task(allowed.run(page(client)))
        await settle()
        other = asyncio.create_task(allowed.run(nothing, wait_for_capacity=True))
        await settle()
        assert allowed.stats().waiting == 2
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        began = clock.now()
        await other
        assert clock.now() - began == pytest.approx(10, abs=0.5)
    assert (allowed.stats().waiting, allowed.stats().in_flight) == (0, 0)


@pytest.mark.parametrize("how", ["disable", "remove"])
@virtual
async def test_c26_if_the_site_is_given_up_there_is_no_further_attempt(how: str) -> None:
    site = Site(httpx, "dead")
    allowed = ResourcePool({"a.example": Resource("a.example", "", quota=Quota(requests=1, per=10.0)), "b": ""})
    async with site.client(proxies()) as client:
        call = asyncio.create_task(allowed.run(page(client), exclude=["b"]))
        await settle()
        await getattr(allowed, how)("a.example")
        with pytest.raises(httpx.ConnectError, match="no answer"):
            await call
    assert len(site.arrivals) == 1


@virtual
async def test_c26_an_operation_that_has_ended_is_not_charged() -> None:
    site, allowed = Site(httpx, "dead"), sites(at_once(20))
    left_behind: list[asyncio.Task[Any]] = []
    async with site.client(proxies()) as client:

        async def operation(resource: Resource[str]) -> None:
            left_behind.append(asyncio.create_task(client.get(SITE)))

        await allowed.run(operation)
        assert (await left_behind[0]).text == "good"
    assert len(site.arrivals) == 2
    assert left(allowed) == 19


@virtual
async def test_c26_a_quota_that_is_learned_does_not_wait_for_the_answer_of_the_attempt_itself() -> None:
    site, learning = Site(httpx, "dead"), sites("learn")
    async with site.client(proxies()) as client:
        assert await learning.run(page(client)) == "good"
    assert len(site.arrivals) == 2


@virtual
async def test_c26_processes_that_share_a_quota_count_the_further_attempts_of_all() -> None:
    """Members of a `SharedMemory` play the processes. The site has one place in all, which its use holds meanwhile."""
    place, site = SharedMemory(), Site(httpx, "dead")
    quota = Quota(requests=2, per=10.0)
    pools = [
        ResourcePool([Resource("a.example", "", 1, quota=quota)], name="sites", store=place.member()) for _ in range(2)
    ]
    async with site.client(proxies()) as client:
        calls = [pools[number % 2].run(page(client), wait_for_capacity=True) for number in range(6)]
        assert await asyncio.gather(*calls) == ["good"] * 6
    assert len(site.arrivals) == 12
    assert site.most_within(10.0) <= 2
    assert clock.now() < 80, "and they are not much slower than that"


@LIBRARIES
def test_c26_the_sync_transport_waits_too(library: Any) -> None:
    site, allowed = Site(library, "dead"), sites(Quota(requests=1, per=0.05, delay=0.0))
    began = clock.now()
    with site.sync_client(proxies()) as client:
        assert allowed.run_sync(lambda _: client.get(SITE).text) == "good"
    _, second = site.arrivals
    assert second - began >= 0.05, "the quota allows no more"
    slow = sites(Quota(requests=1, per=3600.0))
    with site.sync_client(proxies(), within=0.02) as client, pytest.raises(library.ConnectError, match="no answer"):
        slow.run_sync(lambda _: client.get(SITE))
    assert slow.stats().waiting == 0


# -- C27: the affinity of a request -----------------------------------------------------------------------------------


def keys(**options: Any) -> ResourcePool[str]:
    return ResourcePool({name: name for name in ("k1", "k2", "k3", "k4", "k5")}, strategy="sticky", **options)


def homes(pool: ResourcePool[str], *affinities: Any) -> list[str]:
    return [pool.run_sync(lambda one: one.resource_id, affinity=affinity) for affinity in affinities]


@LIBRARIES
@virtual
async def test_c27_a_function_names_the_affinity_of_each_request(library: Any) -> None:
    site, pool = Site(library), keys()
    async with site.client(pool, affinity=lambda request: request.url.host) as client:
        for _ in range(3):
            await client.get("https://a.example/1")
            await client.get("https://b.example/2")
    [of_a], [of_b] = ({key for host, key in site.seen if host == one} for one in ("a.example", "b.example"))
    assert [of_a, of_b] == await asyncio.to_thread(homes, keys(), "a.example", "b.example")


@LIBRARIES
@virtual
async def test_c27_a_request_names_its_own_affinity_in_its_extensions(library: Any) -> None:
    site, pool = Site(library), keys()
    expected = await asyncio.to_thread(homes, keys(), "ann", ("acme", 7), "usual")
    async with site.client(pool, affinity="usual") as client:
        for affinity in ("ann", ("acme", 7)):
            await client.get(SITE, extensions={"headgate": {"affinity": affinity}})
        await client.get(SITE)
    assert [key for _, key in site.seen] == expected
    async with site.client(keys(), affinity=lambda request: "usual") as client:
        await client.get(SITE, extensions={"headgate": {"affinity": "ann"}})
        await client.get(SITE)
    assert [key for _, key in site.seen[3:]] == [expected[0], expected[2]]


@LIBRARIES
def test_c27_the_sync_transport_does_the_same(library: Any) -> None:
    site, pool = Site(library), keys()
    with site.sync_client(pool, affinity=lambda request: request.url.host) as client:
        client.get("https://b.example/")
        client.get(SITE, extensions={"headgate": {"affinity": "ann"}})
    assert [key for _, key in site.seen] == homes(keys(), "b.example", "ann")


@pytest.mark.parametrize(
    ("extension", "message"),
    [
        ("ann", 'must be a mapping with the key "affinity", got str'),
        ({}, r"got the keys \[\]"),
        ({"afinity": "ann"}, r"got the keys \['afinity'\]"),
        ({"affinity": "ann", "tags": ["x"]}, r"got the keys \['affinity', 'tags'\]"),
        ({"affinity": 1.5}, "affinity must be a str, an int, bytes or a tuple of these, got float"),
        ({"affinity": True}, "affinity must be .*, got bool"),
    ],
)
@virtual
async def test_c27_a_wrong_extension_is_refused_before_anything_is_sent(extension: Any, message: str) -> None:
    site, pool = Site(), keys()
    async with site.client(pool) as client:
        with pytest.raises(InvalidType, match=message):
            await client.get(SITE, extensions={"headgate": extension})
    assert not site.seen
    assert pool.stats().attempts == 0


@virtual
async def test_c27_a_wrong_affinity_of_a_function_is_refused_before_anything_is_sent() -> None:
    site, pool = Site(), keys()
    async with site.client(pool, affinity=lambda request: request.url) as client:
        with pytest.raises(InvalidType, match="affinity must be a str, an int, bytes or a tuple of these, got URL"):
            await client.get(SITE)
    async with site.client(pool, affinity=lambda request: None) as client:
        assert (await client.get(SITE)).status_code == 200
    with pytest.raises(InvalidType, match=r"affinity must be .*, got list"):
        RotatingTransport(pool, affinity=["a"])  # type: ignore[arg-type]
    assert pool.stats().attempts == 1


# -- a proxy that a site has banned -----------------------------------------------------------------------------------


@pytest.mark.integration
@LIBRARIES
@pytest.mark.parametrize("status", [403, 429])
def test_c27_a_proxy_banned_by_one_site_serves_the_others(library: Any, status: int) -> None:
    with serving() as one, serving() as two:
        one.answers = {None: lambda seen: Answer(status if "//shop.example" in seen.path else 200, {}, b"one")}
        two.answers = {None: [Answer(200, {}, b"two")]}
        pool = ResourcePool({"one": one.url, "two": two.url}, strategy="primary_backup")

        async def main() -> list[bytes]:
            by_host = RotatingTransport(pool, proxies=True, affinity=lambda request: request.url.host, retry_delay=0)
            async with library.AsyncClient(transport=by_host) as client:
                hosts = ("shop", "shop", "news", "shop")
                return [(await client.get(f"http://{host}.example/")).content for host in hosts]

        assert asyncio.run(main()) == [b"two", b"two", b"one", b"two"]
        assert len(one.seen) == 2, "the site was asked once through the proxy that it bans"
        assert {key: seen["status"] for key, seen in pool.snapshot().items()} == {"one": "healthy", "two": "healthy"}
        assert list(pool.stats().resources["one"].affinity_cooldowns) == ["shop.example"]


@pytest.mark.integration
def test_c27_what_is_wrong_with_the_proxy_itself_counts_for_all_sites(upstream: Upstream) -> None:
    with serving() as refusing, serving() as good:
        refusing.answers = {None: [Answer(407)]}
        good.answers = {None: [Answer(200, {}, b"good")]}
        pool = ResourcePool(
            {"dead": "http://127.0.0.1:1", "refusing": refusing.url, "good": good.url}, strategy="primary_backup"
        )
        by_host = RotatingSyncTransport(pool, proxies=True, affinity=lambda request: request.url.host, retry_delay=0)
        with httpx.Client(transport=by_host) as client:
            assert client.get("http://shop.example/").content == b"good"
        statuses = {key: seen["status"] for key, seen in pool.snapshot().items()}
        assert statuses == {"dead": "cooling_down", "refusing": "disabled", "good": "healthy"}
        with pytest.raises(PoolExhausted):
            pool.run_sync(lambda one: one, affinity="news.example", exclude=["good"])
