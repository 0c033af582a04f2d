"""Metrics: what the exporter says of pools at work, and that the queries we ship ask for what it has."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

import headgate
from headgate import (
    Adaptive,
    CooldownResource,
    Cost,
    PoolExhausted,
    Quota,
    Resource,
    ResourcePool,
    TaskPool,
    WorkerPool,
)
from headgate.core.labels import Labels
from headgate.core.views import Unread
from headgate.dashboard.scraping import KEPT, Labelled, joined
from headgate.dashboard.sources import ThisProgram
from headgate.observe import metrics, prometheus, sampler
from headgate.observe.history import BUCKETS, Histogram, PoolHistory
from headgate.observe.metrics_server import MetricsServer
from tests.support.cli.support import PATIENCE, Worker, command, environment, worker
from tests.system.observe.conftest import Program
from tests.system.observe.support import SECRET, eventually

ROOT = Path(__file__).parents[3]
pytestmark = pytest.mark.integration

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


@pytest.fixture
def registry() -> Iterator[CollectorRegistry]:
    registry = CollectorRegistry()
    uninstall = prometheus.install(registry)
    yield registry
    uninstall()
    uninstall()  # twice is fine


def scraped(registry: CollectorRegistry) -> str:
    from prometheus_client import generate_latest

    return generate_latest(registry).decode()


def samples(text: str) -> Samples:
    return {
        (one.name, frozenset(one.labels.items())): one.value
        for family in text_string_to_metric_families(text)
        for one in family.samples
    }


def value(seen: Samples, name: str, **labels: str) -> float:
    [found] = [number for (known, has), number in seen.items() if known == name and frozenset(labels.items()) <= has]
    return found


def test_o30_counters_gauges_and_histograms_of_pools_at_work(program: Program, registry: CollectorRegistry) -> None:
    text = scraped(registry)
    seen, pool = samples(text), program.pool.name
    assert value(seen, "headgate_tasks_ended_total", pool=pool, status="completed") == 4
    assert value(seen, "headgate_tasks_ended_total", pool=pool, status="failed") == 1
    assert value(seen, "headgate_tasks_active", pool=pool) == 2
    assert value(seen, "headgate_tasks_queued", pool=pool) == 2
    assert value(seen, "headgate_tenant_tasks_ended_total", pool=pool, tenant="ann", status="completed") == 3
    assert value(seen, "headgate_task_run_seconds_count", pool=pool) == 5
    assert value(seen, "headgate_task_wait_seconds_bucket", pool=pool, le="+Inf") == 5
    assert value(seen, "headgate_resources", pool=program.keys.name, status="cooling_down") == 1
    assert 200 < value(seen, "headgate_resource_cooldown_seconds", pool=program.keys.name, resource="key-2") <= 300
    assert value(seen, "headgate_resource_in_flight", pool=program.keys.name, resource="key-1") == 1
    again = samples(scraped(registry))
    assert value(again, "headgate_tasks_ended_total", pool=pool, status="completed") == 4, "counted once"
    assert value(again, "headgate_task_run_seconds_count", pool=pool) == 5
    assert SECRET not in text
    assert SECRET[::-1] not in text


def test_l02_o30_each_window_of_a_quota_is_a_series(program: Program, registry: CollectorRegistry) -> None:
    quotas = [Quota(requests=5, per=3600.0), Quota(requests=100, per=86400.0, output_tokens=700, window="bucket")]
    pool = ResourcePool({"limited": "a", "free": "b"}, name="l02-windows", quota=quotas)
    learning = ResourcePool({"learning": "c"}, name="l02-learning", quota="learn")
    pool.run_sync(lambda key: None, cost=Cost(output=200), exclude=["free"])
    seen = samples(scraped(registry))
    labels = {"pool": "l02-windows", "resource": "limited"}
    assert value(seen, "headgate_resource_quota_left", window="requests/hour", **labels) == 4
    assert value(seen, "headgate_resource_quota_limit", window="requests/hour", **labels) == 5
    assert value(seen, "headgate_resource_quota_limit", window="requests/day", **labels) == 100
    assert value(seen, "headgate_resource_quota_left", window="output_tokens", **labels) == pytest.approx(500, abs=1)
    full_in = value(seen, "headgate_resource_quota_full_seconds", window="output_tokens", **labels)
    assert full_in == pytest.approx(86400 * 200 / 700, abs=60)
    assert len([name for name, _ in seen if name == "headgate_resource_quota_left"]) == 6, (
        "what is learned is not known"
    )
    del pool, learning


def test_l04_o30_an_adaptive_limit_has_its_bounds_and_its_last_cut() -> None:
    async def refused(key: Resource[str]) -> None:
        raise CooldownResource

    async def main() -> None:
        resources = [Resource("a", "secret-a", Adaptive(start=6, most=50)), Resource("b", "secret-b", 7)]
        keys = ResourcePool([*resources, Resource("c", "secret-c")], name="l04-keys")
        with pytest.raises(PoolExhausted):
            await keys.run(refused, exclude=["b", "c"])
        source = ThisProgram()
        await source.open(lambda: None)
        try:
            seen = samples(await source.ask("here", {"ask": "metrics"}))
        finally:
            await source.close()
        limits = labelled(seen, "headgate_resource_limit", "resource", keys.name)
        assert limits == {"a": 1.0, "b": 7.0}
        figures = ("limit_least", "limit_most", "limit_cuts_total", "refused_at")
        found = [value(seen, f"headgate_resource_{name}", pool=keys.name, resource="a") for name in figures]
        assert found == [1.0, 50.0, 1.0, 1.0]

    asyncio.run(main())


def test_o30_units_are_base_units_and_names_begin_alike(program: Program, registry: CollectorRegistry) -> None:
    for family in text_string_to_metric_families(scraped(registry)):
        assert family.name.startswith("headgate_")
        assert not re.search(r"_(ms|milliseconds|minutes|kb|mb|percent)\b", family.name)
        assert family.documentation


def test_o30_tenants_above_a_hundred_are_folded() -> None:
    history, labels = PoolHistory("tasks"), Labels()
    history.count([(f"t{number}", "completed", 0.1, 0.1) for number in range(1000)], 1000)
    assert len(history.ended) == 101
    assert history.ended["(other)", "completed"] == 900
    assert (labels.of(None), labels.of("a")) == ("(none)", "a")
    history.count([("t5", "failed", None, None)], 1)
    assert history.ended["t5", "failed"] == 1, "a label, once given, stays"


def test_o30_labels_stay_below_a_hundred_and_one_whoever_is_listed_and_nothing_is_left_out() -> None:
    async def main() -> None:
        keys = ResourcePool({f"key-{number:03}": f"value-{number:03}" for number in range(300)}, name="o30-keys")
        source = ThisProgram()
        pool = TaskPool("o30-tenants", max_concurrent=1)
        for number in range(900):
            pool.submit_nowait(asyncio.sleep, 60, key=f"t{number % 300}")
        await source.open(lambda: None)
        labels: dict[str, set[str]] = {"tenant": set(), "resource": set()}
        try:
            async with AsyncExitStack() as uses:
                for number in range(250):
                    await uses.enter_async_context(keys.lease(exclude=[f"key-{number:03}"]))
                for first in range(0, 300, 50):  # those that are out of order are listed first
                    for number in range(first, first + 50):
                        await keys.disable(f"key-{number:03}")
                    seen = samples(await source.ask("here", {"ask": "metrics"}))
                    queued = labelled(seen, "headgate_tenant_queued", "tenant", pool.name)
                    flights = labelled(seen, "headgate_resource_in_flight", "resource", keys.name)
                    assert sum(queued.values()) == value(seen, "headgate_tasks_queued", pool=pool.name) == 899
                    assert sum(flights.values()) == keys.stats().in_flight == 250
                    labels["tenant"] |= queued.keys()
                    labels["resource"] |= flights.keys()
                    for number in range(first, first + 50):
                        await keys.enable(f"key-{number:03}")
        finally:
            await source.close()
            await pool.close(cancel=True)
        for known in labels.values():
            assert len(known) == 101
            assert "(other)" in known

    asyncio.run(main())


def labelled(seen: Samples, name: str, label: str, pool: str) -> dict[str, float]:
    """The values of a metric of a pool, by one of its labels."""
    of_pool = ((dict(has), number) for (known, has), number in seen.items() if known == name)
    return {labels[label]: number for labels, number in of_pool if labels["pool"] == pool}


def test_o30_a_tenant_that_is_called_as_all_others_is_counted_with_them() -> None:
    rows = [("(other)", 1, 2.0), ("ann", 1, 2.0)]
    assert metrics.folded(rows, 3, 2, Labels()) == ({"ann": 1, "(other)": 2}, {"(other)": 2.0, "ann": 2.0})
    assert metrics.folded([("ann", 1, 2.0), (None, 1, 2.0)], 2, 2, Labels())[0] == {"ann": 1, "(none)": 1}, "no others"


def test_o30_when_more_ended_than_a_pool_remembers_those_it_knows_stand_for_all() -> None:
    history = PoolHistory("tasks")
    history.count([("a", "completed", 0.2, 0.3)] * 10, 40)
    assert history.ended["a", "completed"] == 40
    assert history.waits.cumulated()[-1] == ("+Inf", 40)
    assert history.waits.total == pytest.approx(8.0)


def test_o30_a_time_on_a_bound_counts_below_it() -> None:
    histogram = Histogram()
    for bound in BUCKETS:
        histogram.add(bound)
    histogram.add(1e9)
    assert [count for _, count in histogram.cumulated()] == list(range(1, len(BUCKETS) + 2))


def test_o30_two_pools_of_one_name_do_not_make_one_series_twice(registry: CollectorRegistry) -> None:
    pools = [ResourcePool(["k"], name="o30-same") for _ in range(2)]
    text = scraped(registry)
    assert len(re.findall(r'headgate_resources\{pool="o30-same(?:#\d+)?",status="healthy"\} 1.0', text)) == len(pools)


def test_o30_a_loop_that_scrapes_itself_is_not_held(registry: CollectorRegistry) -> None:
    async def main() -> str:
        async with TaskPool("o30-self") as pool:
            await (await pool.submit(asyncio.sleep, 0))
            while "o30-self" not in (text := scraped(registry)):  # noqa: ASYNC110 - it asks what nobody tells
                await asyncio.sleep(0.05)
            return text

    assert 'headgate_loop_held_seconds{pool="o30-self"} 0.0' in asyncio.run(main())


def test_o30_a_loop_that_is_held_is_shown_as_held(program: Program) -> None:
    import threading

    watched, free = sampler.acquire(), threading.Event()
    try:
        eventually(lambda: watched.latest["pools"])
        program.loop.call_soon_threadsafe(free.wait)
        seen = [one for one in watched.look()["pools"] if one["name"] == program.pool.name]
        assert seen[0]["held"] >= 0.3
        assert seen[0]["active"] == 2, "with what was seen last"
        free.set()
        eventually(
            lambda: all(one["held"] is None for one in watched.look()["pools"] if one["name"] == program.pool.name)
        )
    finally:
        free.set()
        sampler.release()


# -- what we ship for Prometheus and Grafana ---------------------------------------------------------------------------

SELECTOR = re.compile(r"(headgate_\w+)(?:\{([^}]*)\})?")
GROUPED = re.compile(r"by \(([^)]*)\)")
UP = 'up{job="headgate-workers"} == 0'
"""The one query for what Prometheus knows by itself."""
ADDED = {"instance", "job", "le"}
"""Labels that Prometheus gives each series itself, or that a bucket has."""


def panels() -> list[dict[str, str]]:
    """All queries of the Grafana dashboard, with their legends."""
    dashboard = json.loads((ROOT / "deploy/grafana/headgate.json").read_text("utf-8"))
    return [target for panel in dashboard["panels"] for target in panel["targets"]]


def variables() -> dict[str, str]:
    """The queries by which the Grafana dashboard finds what one can choose."""
    dashboard = json.loads((ROOT / "deploy/grafana/headgate.json").read_text("utf-8"))
    return {one["name"]: one["query"]["query"] for one in dashboard["templating"]["list"] if one["type"] == "query"}


def alerts() -> dict[str, str]:
    """The alerts, each as it stands in the file."""
    text = (ROOT / "deploy/prometheus/headgate-alerts.yml").read_text("utf-8")
    return {one.partition("\n")[0]: one for one in text.split("- alert: ")[1:]}


def shipped() -> list[str]:
    """All queries of the Grafana dashboard and of the alerts."""
    asked = [query for one in alerts().values() for query in re.findall(r"^\s+expr: (.*)$", one, re.M)]
    assert len(panels()) >= 15
    assert len(asked) == len(alerts()) >= 6
    return [*(one["expr"] for one in panels()), *asked]


def exported(program: Program, registry: CollectorRegistry) -> Samples:
    """What the page of several programs and a worker say."""

    async def worked() -> str:
        async with WorkerPool(spawn=1):
            return await asyncio.to_thread(scraped, registry)

    load = {"running": 1.0, "finished": 2.0, "clients": 1.0, "memory": 5.0, "certificate_expiry": 9.0}
    one = Labelled("1-0123456789ab.sock", {"program": "job.py", "pid": 1})
    one.label = one.name
    text = joined([(one, asyncio.run(worked()))]) + prometheus.exposition(prometheus.WorkerCollector(lambda: load))
    return samples(text.decode())


def test_o30_every_query_we_ship_asks_for_what_the_exporter_has(program: Program, registry: CollectorRegistry) -> None:
    known: dict[str, set[str]] = {}
    for name, labels in exported(program, registry):
        known.setdefault(name, set(ADDED)).update(label for label, _ in labels)
    for query in shipped():
        names = SELECTOR.findall(query)
        assert names or query == UP, query
        for name, wanted in names:
            assert name in known, f"{name} of {query} is exported by nobody"
            for label in re.findall(r"(\w+)=", wanted):
                assert label in known[name], f"{name} has no label {label}: {query}"
            for group in GROUPED.findall(query):
                assert {one.strip() for one in group.split(",")} <= known[name], query
    assert variables().keys() == {"program", "pool"}
    assert "headgate_program_up, program" in variables()["program"]
    [choice] = re.findall(r"headgate_\(([\w|]+)\)", variables()["pool"])
    assert {f"headgate_{name}" for name in choice.split("|")} <= known.keys()


def test_o30_no_query_we_ship_adds_up_programs() -> None:
    for query in shipped():
        assert all("program" in group for group in GROUPED.findall(query)), query
        assert " without " not in query, query
        assert query.count("sum") == len(GROUPED.findall(query)), query
    for one in panels():
        if "headgate_worker_" not in one["expr"]:
            assert 'program=~"$program"' in one["expr"]
            assert one["legendFormat"].startswith("{{program}}")


def test_o30_every_alert_has_a_severity_and_one_tells_of_a_program_that_is_gone() -> None:
    told = alerts()
    for one in told.values():
        assert re.search(r"labels: \{severity: (critical|warning)\}", one), one
        assert ("$labels.instance" if "worker_" in one or UP in one else "$labels.program") in one
    assert "expr: headgate_program_up == 0" in told["HeadgateProgramDown"]
    assert f"expr: {UP}" in told["HeadgateWorkerDown"]
    jobs = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text("utf-8"))["scrape_configs"]
    assert "headgate-workers" in [job["job_name"] for job in jobs]
    assert KEPT > 60, "it is there for longer than the alert waits"
    assert "for: 1m" in told["HeadgateProgramDown"]


def test_o30_w67_discovered_workers_that_are_missing_and_lost_are_told_and_there_are_alerts_for_both(
    registry: CollectorRegistry, tmp_path: Path
) -> None:
    @headgate.routine
    async def pid() -> int:
        return os.getpid()

    async def main(there: Worker) -> None:
        discovery = headgate.StaticDiscovery([there.ready["address"], "127.0.0.1:1"])
        async with WorkerPool(discovery=discovery, name="o30-fleet"):
            assert await pid() == there.ready["pid"]
            there.process.kill()
            end = asyncio.get_running_loop().time() + PATIENCE
            lost = 0.0
            while not lost:
                assert asyncio.get_running_loop().time() < end
                seen = samples(await asyncio.to_thread(scraped, registry))
                lost = value(seen, "headgate_workers_lost_total", pool="o30-fleet")
            assert value(seen, "headgate_workers_expected", pool="o30-fleet") == 2
            assert value(seen, "headgate_workers", pool="o30-fleet", state="ready") == 0
            assert lost == 1

    with worker(tmp_path, "--none", "--bind", "127.0.0.1:0") as there:
        asyncio.run(main(there))
    told = alerts()
    assert "headgate_workers_lost_total" in told["HeadgateWorkersLost"]
    assert re.search(r"headgate_workers_expected.* > .*headgate_workers\{", told["HeadgateWorkersMissing"])


def documented() -> set[str]:
    """The metrics in the table of docs/observe.md. `_more` after a name has the same beginning and its own end."""
    section = (ROOT / "docs/observe.md").read_text("utf-8").partition("\n## Metrics\n")[2].partition("\n## ")[0]
    found: set[str] = set()
    for row in re.findall(r"^\| (`.*?) \|", section, re.M):
        first, *others = re.findall(r"`(\w+)`", row)
        names = [first, *(one if one.startswith("headgate_") else _prefix(first) + one for one in others)]
        assert not found & set(names), f"twice in the table: {row}"
        found.update(names)
    return found


def _prefix(name: str) -> str:
    """What the names of one row have in common: `headgate_tasks` of `headgate_tasks_active`."""
    return re.match(r"headgate_[a-z]+", name)[0]  # type: ignore[index]


def test_o30_the_table_of_the_documentation_names_exactly_what_is_exported(
    program: Program, registry: CollectorRegistry
) -> None:
    def refused(key: Resource[str]) -> None:
        raise CooldownResource

    limited = ResourcePool({"limited": "a"}, quota=Quota(requests=5))  # only such a pool has series of windows
    limited.run_sync(lambda key: key.spent(3))  # and of tokens
    adaptive = ResourcePool({"adaptive": "a"}, max_in_flight="adaptive")  # and such a one of bounds and a last cut
    with pytest.raises(PoolExhausted):
        adaptive.run_sync(refused)
    names = {re.sub(r"_(bucket|sum|count)$", "", name) for name, _ in exported(program, registry)}
    assert documented() == names
    del limited, adaptive


# -- the server of a worker --------------------------------------------------------------------------------------------


def get(port: int, path: str, host: str = "") -> tuple[int, str]:
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", headers={"Host": host} if host else {})
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_o30_a_pool_whose_loop_was_held_from_the_first_look_on_keeps_no_other_out() -> None:
    class Held:
        name = "held"

    pool, loop, free = Held(), asyncio.new_event_loop(), threading.Event()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    loop.call_soon_threadsafe(free.wait)
    headgate.registry.register(
        pool, "workers", lambda pool: None, view=lambda pool, rows: Unread(), home=lambda pool: loop
    )
    keys = ResourcePool({"key-1": "value"}, name="others")
    try:
        text = prometheus.exposition(prometheus.PoolCollector(sampler.acquire())).decode()
        assert 'headgate_resources{pool="others",status="healthy"} 1.0' in text
        assert 'pool="held"' not in text
    finally:
        sampler.release()
        headgate.registry.unregister(pool)
        free.set()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
        del keys


def test_o30_a_metrics_server_answers_three_paths_and_no_strange_host() -> None:
    ready = [False]

    def broken() -> bytes:
        if not ready[0]:
            raise RuntimeError("no metrics")
        return b"x 1\n"

    server = MetricsServer("127.0.0.1", 0, broken, lambda: ready[0])
    try:
        assert get(server.port, "/healthz") == (200, "ok\n")
        assert get(server.port, "/readyz")[0] == 503
        assert get(server.port, "/metrics")[0] == 500
        ready[0] = True
        assert get(server.port, "/readyz")[0] == 200
        assert get(server.port, "/metrics") == (200, "x 1\n")
        assert get(server.port, "/")[0] == 404
        assert get(server.port, "/metrics", "rebound.example:80")[0] == 403
        assert get(server.port, "/metrics", "10.0.0.7:9464")[0] == 200
        assert get(server.port, "/metrics", "[::1]:9464")[0] == 200
    finally:
        server.close()


def test_o30_a_worker_serves_its_metrics(tmp_path: Path) -> None:
    with subprocess.Popen(
        command("worker", "--none", "--metrics-port", "0"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env=environment(),
    ) as worker:
        assert worker.stdout is not None
        try:
            line: dict[str, Any] = json.loads(worker.stdout.readline())
            port = line["metrics_port"]
            assert get(port, "/readyz")[0] == 200
            seen = samples(get(port, "/metrics")[1])
            assert value(seen, "headgate_worker_calls_running") == 0
            assert value(seen, "headgate_worker_memory_bytes") > 1_000_000
        finally:
            worker.terminate()
            worker.communicate(timeout=20)
    assert worker.returncode == 0


def test_o30_nothing_is_imported_and_the_error_names_the_extra() -> None:
    code = (
        "import sys; sys.modules['prometheus_client'] = None\n"
        "import headgate.observe.prometheus as p, headgate\n"
        "try: p.install()\n"
        "except headgate.HeadgateError as error: print(error)\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pip install 'headgate[prometheus]'" in ran.stdout
    code = "import headgate, sys; headgate.TaskPool('x'); print([m for m in sys.modules if 'prometheus' in m])"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"
