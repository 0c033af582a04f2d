"""Metrics of each resource, and of tokens: counted as a naive count does, with few labels, and without values."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

import headgate
from headgate import CooldownResource, DisableResource, Quota, Resource, ResourcePool, TaskPool, WorkerPool
from headgate.integrations.httpx import RotatingTransport
from headgate.observe import opentelemetry_metrics, prometheus
from tests.conftest import SCALE
from tests.system.observe.support import SECRET, eventually
from tests.system.observe.trace_jobs import spend_there

pytestmark = pytest.mark.integration

COUNTERS = ("attempts", "successes", "refusals", "cooldowns", "disables", "sibling_cancels")


@pytest.fixture
def registry() -> Iterator[CollectorRegistry]:
    registry = CollectorRegistry()
    uninstall = prometheus.install(registry)
    yield registry
    uninstall()


def series(registry: CollectorRegistry, name: str, pool: str) -> dict[tuple[str, ...], float]:
    """The figures of one metric of a pool, by their other labels in alphabetical order."""
    return {labels: number for one, labels, number in scraped(registry, pool) if one == name}


def scraped(registry: CollectorRegistry, pool: str) -> Iterator[tuple[str, tuple[str, ...], float]]:
    text = generate_latest(registry).decode()
    lines = (line for line in text.splitlines(keepends=True) if line.startswith("#") or f'pool="{pool}"' in line)
    for family in text_string_to_metric_families("".join(lines)):
        for one in family.samples:
            labels = (value for label, value in sorted(one.labels.items()) if label != "pool")
            yield one.name, tuple(labels), one.value


def counted(registry: CollectorRegistry, pool: str) -> Counter[tuple[str, str]]:
    """What the exporter counts, by counter and resource."""
    names = {f"headgate_resource_{name}_total": name for name in COUNTERS}
    figures = ((names.get(name), labels, number) for name, labels, number in scraped(registry, pool))
    return Counter({(name, labels[0]): int(number) for name, labels, number in figures if name and number})


class Naive:
    """Counts the events of a pool by resource, one after the other."""

    OF_RELEASE = ("ok", "error"), ("cooldown", "disable")

    def __init__(self, pool: str) -> None:
        self.counts: Counter[tuple[str, str]] = Counter()
        self._pool = pool
        self.stop = headgate.subscribe(self._count, "resources")

    def _count(self, event: Any) -> None:
        if event.pool != self._pool or event.topic not in ("resources.usage", "resources.health"):
            return
        resource = event.usage.resource_id if event.topic == "resources.usage" else event.resource_id
        name = {
            "resource_acquired": "attempts",
            "resource_cooled": "cooldowns",
            "resource_disabled": "disables",
            "sibling_cancelled": "sibling_cancels",
        }.get(event.name)
        if event.name == "resource_released":
            succeeded, refused = self.OF_RELEASE
            name = "successes" if event.outcome in succeeded else "refusals" if event.outcome in refused else None
        if name is not None:
            self.counts[name, resource] += 1


async def random_calls(keys: ResourcePool[str], chance: random.Random, calls: int) -> None:
    """Calls that overlap, and end in every way."""

    async def call(key: Resource[str], turns: int, ends: str) -> None:
        for _ in range(turns):
            await asyncio.sleep(0)
        if ends == "cool":
            raise CooldownResource(0)
        if ends == "disable":
            raise DisableResource
        if ends == "fail":
            raise ValueError

    ends = chance.choices(("ok", "cool", "disable", "fail"), (20, 4, 1, 2), k=calls)
    made = [keys.run(lambda key, end=end: call(key, chance.randrange(4), end), retry_delay=0) for end in ends]
    await asyncio.gather(*made, return_exceptions=True)
    for resource_id, one in keys.snapshot().items():
        if one["status"] == "disabled" and chance.random() < 0.7:
            await keys.enable(resource_id)


@pytest.mark.parametrize("seed", range(max(3, int(20 * SCALE))))
def test_l12_counters_of_each_resource_are_those_of_a_naive_count(seed: int, registry: CollectorRegistry) -> None:
    chance, name = random.Random(seed), f"l12-{seed}"
    keys = ResourcePool({f"key-{number}": f"value {number}" for number in range(4)}, name=name)
    naive = Naive(name)
    try:
        for turn in range(12):
            asyncio.run(random_calls(keys, chance, chance.randrange(1, 12)))
            assert counted(registry, name) == naive.counts
            if turn in (3, 7):  # it comes again with counters of its own, and the series goes on
                asyncio.run(keys.remove(f"key-{turn % 4}"))
                assert counted(registry, name) == naive.counts
                asyncio.run(keys.add(f"key-{turn % 4}", "another value"))
    finally:
        naive.stop()
    assert {event for event, _ in naive.counts} >= set(COUNTERS) - {"sibling_cancels", "disables"}


def test_l12_counters_of_many_resources_never_fall_and_their_sum_is_that_of_the_pool(
    registry: CollectorRegistry,
) -> None:
    chance, name = random.Random(12), "l12-many"
    keys = ResourcePool({f"key-{number}": f"value {number}" for number in range(250)}, name=name)
    before: Counter[tuple[str, str]] = Counter()
    for turn in range(8):
        asyncio.run(random_calls(keys, chance, 300))
        for number in range(10):
            asyncio.run(keys.remove(f"key-{20 * turn + number}"))
        asyncio.run(keys.add(f"new-{turn}", "another value"))
        now = counted(registry, name)
        assert all(now[one] >= number for one, number in before.items())
        stats = keys.stats()
        for counter in COUNTERS:
            assert sum(number for (one, _), number in now.items() if one == counter) == getattr(stats, counter)
        before = now
    assert len({resource for _, resource in before}) == 101
    assert before["attempts", "(other)"]


def test_l12_a_resource_has_its_status_its_limit_its_uses_and_what_is_left_of_its_quota(
    registry: CollectorRegistry,
) -> None:
    async def main() -> None:
        async with keys.lease(exclude=["b"]):
            statuses = await asyncio.to_thread(series, registry, "headgate_resource_status", "l12-states")
            assert {one for one, is_so in statuses.items() if is_so} == {("a", "healthy"), ("b", "disabled")}
            assert len(statuses) == 6
            in_flight = await asyncio.to_thread(series, registry, "headgate_resource_in_flight", "l12-states")
            assert in_flight == {("a",): 1.0, ("b",): 0.0}

    keys = ResourcePool([Resource("a", "value a", 3, quota=Quota(requests=9, per=3600)), Resource("b", "value b")])
    keys.name = "l12-states"
    asyncio.run(keys.disable("b"))
    asyncio.run(main())
    assert series(registry, "headgate_resource_limit", "l12-states") == {("a",): 3.0}
    assert series(registry, "headgate_resource_quota_left", "l12-states") == {("a", "requests"): 8.0}


# -- tokens ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("quota", [None, Quota(tokens=1_000_000)], ids=["without a quota", "with one"])
def test_l12_tokens_are_counted_by_resource_and_by_tenant(quota: Quota | None, registry: CollectorRegistry) -> None:
    chance, resources, tenants = random.Random(3), Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    keys = ResourcePool({"a": "value a", "b": "value b"}, name="l12-tokens", quota=quota)

    async def ask(key: Resource[str], tenant: str | None) -> None:
        read, written, total = chance.randrange(1, 90), chance.randrange(1, 90), chance.randrange(1, 90)
        key.spent(input=read, output=written)
        await asyncio.sleep(0)
        key.spent(total)
        for kind, number in (("input", read), ("output", written), ("unsplit", total)):
            resources[key.resource_id, kind] += number
            tenants[tenant or "(none)", kind] += number

    async def main() -> None:
        async with TaskPool("l12-tasks", resources=keys) as pool:
            for _ in range(60):
                tenant = chance.choice(["ann", "bob", None])
                await pool.submit(ask, tenant, key=tenant)
        await keys.run(lambda key: ask(key, None))

    asyncio.run(main())
    assert series(registry, "headgate_resource_tokens_total", "l12-tokens") == resources
    assert series(registry, "headgate_tenant_tokens_total", "l12-tokens") == tenants


def test_l12_tokens_that_are_reported_on_a_worker_are_counted_too(registry: CollectorRegistry) -> None:
    async def main() -> None:
        keys = ResourcePool({"a": "value a"}, name="l12-far")
        async with WorkerPool(spawn=1) as workers, TaskPool("l12-far", resources=keys, workers=workers) as pool:
            for tenant in ("ann", "ann", "bob"):
                await pool.run(spend_there, 10, 5, key=tenant)
            seen = await asyncio.to_thread(series, registry, "headgate_tenant_tokens_total", "l12-far")
            assert {one: number for one, number in seen.items() if number} == {
                ("ann", "input"): 20.0,
                ("ann", "output"): 10.0,
                ("bob", "input"): 10.0,
                ("bob", "output"): 5.0,
            }

    asyncio.run(main())


def test_l12_tokens_of_answers_that_pass_a_transport_are_counted_without_a_quota(registry: CollectorRegistry) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, json={"usage": {"prompt_tokens": 11, "completion_tokens": 4}})

    async def ask(key: Resource[str] | None) -> None:
        transport = RotatingTransport(key or keys, transport=httpx.MockTransport(answer))
        async with httpx.AsyncClient(transport=transport) as client:
            await client.post("https://api.example.com", json={})

    async def main() -> None:
        await ask(None)
        async with TaskPool("l12-http", resources=keys) as pool:
            await pool.run(ask, key="ann")

    keys = ResourcePool({"a": "value a"}, name="l12-http")
    asyncio.run(main())
    seen = series(registry, "headgate_tenant_tokens_total", "l12-http")
    assert {(tenant, part): seen[tenant, part] for tenant in ("ann", "(none)") for part in ("input", "output")} == {
        (tenant, part): number for tenant in ("ann", "(none)") for part, number in (("input", 11.0), ("output", 4.0))
    }


def test_l12_labels_stay_few_with_a_hundred_thousand_tenants(registry: CollectorRegistry) -> None:
    keys = ResourcePool({f"key-{number}": f"value {number}" for number in range(300)}, name="l12-tenants")

    async def ask(key: Resource[str]) -> None:
        key.spent(input=2, output=1)

    async def main() -> None:
        async with TaskPool("l12-tenants", resources=keys, keep=1000) as pool:
            for number in range(100_000):
                last = pool.submit_nowait(ask, key=f"tenant {number}")
                if number % 500 == 0:
                    await last

    asyncio.run(main())
    for name, label in (("headgate_tenant_tokens_total", 0), ("headgate_resource_tokens_total", 0)):
        seen = series(registry, name, "l12-tenants")
        assert len({labels[label] for labels in seen}) == 101
        assert sum(seen.values()) == 300_000
    text = generate_latest(registry).decode()
    assert len(text.splitlines()) < 10_000


def test_l12_the_value_of_a_key_is_nowhere_in_the_metrics(registry: CollectorRegistry) -> None:
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader])
    stop = opentelemetry_metrics.install(provider)
    keys = ResourcePool({"key-1": SECRET}, name="l12-secret")

    async def ask(key: Resource[str]) -> None:
        key.spent(input=3)
        if key.resource_id == "key-1":
            raise CooldownResource(60, f"too fast for {key.value}")

    async def main() -> None:
        async with TaskPool("l12-secret", resources=keys) as pool:
            labels = {"gen_ai.request.model": f"model of {SECRET}"}
            handle = pool.submit_nowait(ask, key=f"tenant with {SECRET}", labels=labels)
            await asyncio.sleep(0)
            text = await asyncio.to_thread(lambda: generate_latest(registry).decode())
            assert "tenant with <key-1>" in text
            assert SECRET not in text
            handle.cancel()

    asyncio.run(main())
    eventually(lambda: "headgate_tenant_tokens" in metrics_of(reader))
    collected = reader.get_metrics_data()
    assert collected is not None
    stop()
    assert "model of <key-1>" in collected.to_json()
    assert SECRET not in collected.to_json()
    provider.shutdown()


# -- OpenTelemetry -----------------------------------------------------------------------------------------------------


def metrics_of(reader: InMemoryMetricReader) -> dict[str, dict[tuple[str, ...], Any]]:
    """The figures of all metrics, by name and by the values of their attributes, in alphabetical order."""
    collected = reader.get_metrics_data()
    return {
        metric.name: {
            tuple(str(value) for _, value in sorted((one.attributes or {}).items())): getattr(one, "value", one)
            for one in metric.data.data_points
        }
        for resource in (() if collected is None else collected.resource_metrics)
        for scope in resource.scope_metrics
        for metric in scope.metrics
    }


def test_l12_opentelemetry_has_the_metrics_of_prometheus_under_the_same_names(registry: CollectorRegistry) -> None:
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader])
    stop = opentelemetry_metrics.install(provider)
    keys = ResourcePool({"a": "value a", "b": "value b"}, name="l12-otel", quota=Quota(requests=50))

    async def ask(key: Resource[str]) -> None:
        key.spent(input=7, output=2)

    async def main() -> None:
        async with TaskPool("l12-otel", resources=keys) as pool:
            labels = {"gen_ai.request.model": "m-1", "gen_ai.conversation.id": "c-1"}
            for _ in range(4):
                await pool.submit(ask, key="ann", labels=labels)
            await pool.drain()
            seen = await asyncio.to_thread(eventually, lambda: wanted(metrics_of(reader)))
            assert seen["headgate_tenant_tokens"] == {
                ("l12-otel", "ann", "input"): 28.0,
                ("l12-otel", "ann", "output"): 8.0,
                ("l12-otel", "ann", "unsplit"): 0.0,
            }
            assert seen["headgate_tasks_ended"]["l12-otel", "completed"] == 4.0
            assert seen["headgate_resources"]["l12-otel", "healthy"] == 2.0
            usage = {key: one.sum for key, one in seen["gen_ai.client.token.usage"].items()}
            assert usage == {("m-1", "input"): 28.0, ("m-1", "output"): 8.0}
            families = await asyncio.to_thread(
                lambda: text_string_to_metric_families(generate_latest(registry).decode())
            )
            names = {one.name for one in families if one.type != "histogram"}
            assert names == seen.keys() - {"gen_ai.client.token.usage"}

    def wanted(seen: dict[str, dict[tuple[str, ...], Any]]) -> Any:
        return seen if seen.get("headgate_tasks_ended", {}).get(("l12-otel", "completed")) == 4.0 else None

    asyncio.run(main())
    stop()
    stop()  # twice is fine
    assert not any(name.startswith("headgate_") for name in metrics_of(reader)), "nothing is told any more"
    provider.shutdown()
