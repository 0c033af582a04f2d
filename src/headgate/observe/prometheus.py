"""Metrics for Prometheus, from what the sampler sees. Needs the extra `prometheus`.

    from headgate.observe import prometheus
    stop = prometheus.install()              # into prometheus_client's own registry
    text = prometheus.exposition()           # or what `GET /metrics` returns

Names begin with `headgate_`, units are seconds and bytes. Labels are bounded: of each pool a hundred tenants and a
hundred resources have figures of their own, and what others do is counted under "(other)". Workers are counted and not
named, because each one that is replaced would be a new label for ever.
"""

from __future__ import annotations

from asyncio import _get_running_loop
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Final

from headgate.errors import HeadgateError
from headgate.observe import sampler as sampling
from headgate.observe.history import OTHER, has_counters

if TYPE_CHECKING:
    from prometheus_client.core import Metric
    from prometheus_client.registry import CollectorRegistry

    from headgate.observe.history import Labels, PoolHistory
    from headgate.observe.sampler import Sampler
    from headgate.resources.model import QuotaSnapshot

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
"""Of what `exposition` returns."""
_ENDS: Final = ("completed", "failed", "rejected", "cancelled", "expired", "stale")
_STATUSES: Final = ("healthy", "cooling_down", "disabled")
_STATES: Final = ("starting", "ready", "cooling", "blocked", "lost", "stopping")
_FOLDED: Final = {
    "tasks": ("tenants", "tenant", "queued", "lag", "tenant_count"),
    "resources": ("resources", "id", "in_flight", "cooldown", "resource_count"),
}
"""For each kind of pool: its list, and there the name, an amount that the view has the total of, and seconds; how many
there are in all."""
_OUTCOMES: Final = ("ok", "exhausted", "error", "cancelled")


def prometheus_client() -> Any:
    """Return the package of that name, or raise an error that says how to install it."""
    try:
        import prometheus_client as package
    except ImportError as error:
        raise HeadgateError(
            "metrics need prometheus-client, which is not installed", remedy="pip install 'headgate[prometheus]'"
        ) from error
    return package


def install(registry: CollectorRegistry | None = None) -> Callable[[], None]:
    """Add the metrics of all pools of this process to a registry, by default to prometheus_client's own.

    Returns a function that takes them out again.
    """
    client = prometheus_client()
    chosen = client.REGISTRY if registry is None else registry
    sampler = sampling.acquire()
    collector = PoolCollector(sampler)
    try:
        chosen.register(collector)
    except BaseException:
        sampling.release(sampler)
        raise
    installed = True

    def uninstall() -> None:
        nonlocal installed
        if installed:
            installed = False
            chosen.unregister(collector)
            sampling.release(sampler)

    return uninstall


def exposition(*collectors: Any) -> bytes:
    """Return what `/metrics` answers: of these collectors alone."""
    client = prometheus_client()
    registry = client.CollectorRegistry(auto_describe=False)
    for collector in collectors:
        registry.register(collector)
    text: bytes = client.generate_latest(registry)
    return text


class PoolCollector:
    """Makes metrics of what the sampler saw last."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler

    def describe(self) -> Iterable[Metric]:
        """Say nothing: which metrics there are does not depend on what is seen."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Look at the pools, and make the metrics."""
        families = _Families()
        # A loop that makes the metrics itself cannot answer meanwhile: then what was seen last will do.
        seen = self._sampler.look() if _get_running_loop() is None else self._sampler.latest
        names = _unique_names(seen["pools"])
        for view, name in zip(seen["pools"], names, strict=True):
            if not has_counters(view):
                continue
            history = self._sampler.history.get(view["number"])
            if history is None:  # it is gone by now
                continue
            {"tasks": _tasks, "resources": _resources, "workers": _workers}[view["kind"]](families, view, name, history)
        for event, count in list(self._sampler.feed.counts.items()):
            families.count("headgate_events", "Events since somebody looks, by name.", count, event=event)
        families.gauge("headgate_observe_look_seconds", "What the last looks cost an event loop.", seen["cost"])
        yield from families.made()


def _tasks(to: _Families, view: dict[str, Any], pool: str, history: PoolHistory) -> None:
    for status in _ENDS:
        to.count("headgate_tasks_ended", "Tasks that have ended.", view[status], pool=pool, status=status)
    to.gauge("headgate_tasks_active", "Tasks that hold a slot.", view["active"], pool=pool)
    to.gauge("headgate_tasks_waiting", "Tasks that wait for other tasks.", view["waiting"], pool=pool)
    to.gauge("headgate_tasks_limit", "Tasks that may hold a slot.", view["max_concurrent"], pool=pool)
    to.gauge("headgate_tasks_queued", "Tasks in the queue.", view["queued"], pool=pool)
    to.gauge("headgate_submitters_blocked", "Submitters that wait for room.", view["blocked_submitters"], pool=pool)
    to.gauge("headgate_queue_age_seconds", "How long the oldest task is queued.", view["lag"], pool=pool)
    to.gauge("headgate_fairness", "Jain's index between tenants: 1 is fair.", view["jain"], pool=pool)
    to.gauge("headgate_loop_held_seconds", "How long the event loop gives no answer.", view["held"] or 0, pool=pool)
    queued, oldest = _folded(view, history.labels)
    for label, number in queued.items():
        to.gauge("headgate_tenant_queued", "Tasks in the queue, by tenant.", number, pool=pool, tenant=label)
        to.gauge(
            "headgate_tenant_queue_age_seconds",
            "Age of the oldest, by tenant.",
            oldest[label],
            pool=pool,
            tenant=label,
        )
    for (label, status), ended in list(history.ended.items()):
        to.count("headgate_tenant_tasks_ended", "Tasks that have ended.", ended, pool=pool, tenant=label, status=status)
    to.histogram("headgate_task_wait_seconds", "From submit to the last start.", history.waits, pool=pool)
    to.histogram("headgate_task_run_seconds", "From the last start to the end.", history.runs, pool=pool)


def _resources(to: _Families, view: dict[str, Any], pool: str, history: PoolHistory) -> None:
    for status in _STATUSES:
        to.gauge("headgate_resources", "Resources, by status.", view[status], pool=pool, status=status)
    waiters = "Calls that wait for a resource; a TaskPool is one for each requirement, however many tasks it has."
    to.gauge("headgate_resource_waiters", waiters, view["waiting"], pool=pool)
    for name in ("attempts", "successes", "cooldowns", "disables", "retries", "sibling_cancels"):
        to.count(f"headgate_resource_{name}", f"{name.replace('_', ' ').capitalize()}.", view[name], pool=pool)
    for outcome in _OUTCOMES:
        to.count("headgate_resource_runs", "Calls.", view[f"runs_{outcome}"], pool=pool, outcome=outcome)
    for row in view["resources"]:
        label, adaptive = history.labels.of(row["id"]), row.get("adaptive")
        if label != OTHER and row["max_in_flight"] is not None:
            limit = "Uses there may be at a time; an adaptive limit as it is now."
            to.gauge("headgate_resource_limit", limit, row["max_in_flight"], pool=pool, resource=label)
        if label != OTHER and adaptive is not None:
            for bound in ("least", "most"):
                about = f"The {bound} that an adaptive limit may be."
                to.gauge(f"headgate_resource_limit_{bound}", about, adaptive[bound], pool=pool, resource=label)
            cuts = "Cuts of an adaptive limit because of refusals."
            to.count("headgate_resource_limit_cuts", cuts, adaptive["cuts"], pool=pool, resource=label)
            if adaptive["refused_at"] is not None:
                about = "Calls that were in flight at the last cut."
                to.gauge("headgate_resource_refused_at", about, adaptive["refused_at"], pool=pool, resource=label)
    flights, rests = _folded(view, history.labels)
    for label, number in flights.items():
        to.gauge("headgate_resource_in_flight", "Uses at this moment.", number, pool=pool, resource=label)
        to.gauge("headgate_resource_cooldown_seconds", "Seconds of rest left.", rests[label], pool=pool, resource=label)
    for row in view["resources"]:
        label = history.labels.of(row["id"])
        if label != OTHER and "quota" in row:
            _quota(to, row["quota"], pool, label)


def _quota(to: _Families, quota: QuotaSnapshot, pool: str, resource: str) -> None:
    """What is known of each window of a resource's quota. A provider names at most eight windows."""
    for name, window in quota["windows"].items():
        known = (
            ("headgate_resource_quota_left", "What is left of a window of a quota.", window["left"]),
            ("headgate_resource_quota_limit", "How much a window of a quota holds.", window["limit"]),
            ("headgate_resource_quota_full_seconds", "Seconds until it is full again.", window["seconds_until_full"]),
        )
        for gauge, about, number in known:
            if number is not None:
                to.gauge(gauge, about, number, pool=pool, resource=resource, window=name)


def _folded(view: dict[str, Any], labels: Labels) -> tuple[dict[str, int], dict[str, float]]:
    """Return by label how many tasks are queued or uses there are, and the longest age or rest.

    A look lists some tenants or resources and counts all: what has no label of its own, or is not listed, is "(other)".
    """
    listed, name, amount, seconds, count = _FOLDED[view["kind"]]
    amounts: dict[str, int] = {}
    longest: dict[str, float] = {}
    others = view[count]
    for row in view[listed]:
        label = labels.of(row[name])
        longest[label] = max(longest.get(label, 0.0), row[seconds])
        if label != OTHER:
            amounts[label] = amounts.get(label, 0) + row[amount]
            others -= 1
    if others > 0:
        amounts[OTHER] = max(0, view[amount] - sum(amounts.values()))
        longest.setdefault(OTHER, 0.0)
    return amounts, longest


def _workers(to: _Families, view: dict[str, Any], pool: str, _: PoolHistory) -> None:
    for state in _STATES:
        to.gauge("headgate_workers", "Workers, by state.", view[state], pool=pool, state=state)
    expected = "Workers that the pool should have: those it starts, and those it discovers or has lost."
    to.gauge("headgate_workers_expected", expected, view["expected"], pool=pool)
    to.gauge("headgate_workers_in_flight", "Calls that workers have.", view["in_flight"], pool=pool)
    to.gauge("headgate_workers_memory_bytes", "Resident memory of workers.", view["memory"], pool=pool)
    to.count(
        "headgate_workers_lost", "Workers that ended without being told to, or broke off.", view["losses"], pool=pool
    )


class WorkerCollector:
    """The metrics of a worker process: what it runs itself."""

    def __init__(self, read: Callable[[], dict[str, float]]) -> None:
        self._read = read

    def describe(self) -> Iterable[Metric]:
        """Say nothing: see `PoolCollector`."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Make the metrics of this moment."""
        families, now = _Families(), self._read()
        families.gauge("headgate_worker_calls_running", "Calls that run here.", now["running"])
        families.count("headgate_worker_calls_finished", "Calls that have ended here.", now["finished"])
        families.gauge("headgate_worker_clients", "Clients that are connected.", now["clients"])
        families.gauge("headgate_worker_memory_bytes", "Resident memory of the process.", now["memory"])
        if "certificate_expiry" in now:
            expiry = "headgate_worker_certificate_expiry_timestamp_seconds"
            families.gauge(expiry, "When its certificate expires, in Unix seconds.", now["certificate_expiry"])
        yield from families.made()


class _Families:
    """Metrics by name, in the order in which they come."""

    def __init__(self) -> None:
        self._made: dict[str, Any] = {}

    def gauge(self, name: str, about: str, value: float, **labels: str) -> None:
        self._family("GaugeMetricFamily", name, about, labels).add_metric(_values(labels), float(value))

    def count(self, name: str, about: str, value: float, **labels: str) -> None:
        self._family("CounterMetricFamily", name, about, labels).add_metric(_values(labels), float(value))

    def histogram(self, name: str, about: str, seen: Any, **labels: str) -> None:
        family = self._family("HistogramMetricFamily", name, about, labels)
        family.add_metric(_values(labels), buckets=seen.cumulated(), sum_value=seen.total)

    def made(self) -> Iterator[Any]:
        yield from self._made.values()

    def _family(self, kind: str, name: str, about: str, labels: dict[str, str]) -> Any:
        family = self._made.get(name)
        if family is None:
            from prometheus_client import core

            family = self._made[name] = getattr(core, kind)(name, about, labels=list(labels))
        return family


def _values(labels: dict[str, str]) -> list[str]:
    """The values of labels as UTF-8 can have them: one that it cannot have would make all metrics fail."""
    return [value.encode("utf-8", "backslashreplace").decode() for value in labels.values()]


def _unique_names(views: Iterable[dict[str, Any]]) -> list[str]:
    """Two pools of one kind may have one name, and two series may not."""
    seen: Counter[tuple[str, str]] = Counter()
    names = []
    for view in views:
        key = view["kind"], view["name"]
        seen[key] += 1
        names.append(view["name"] if seen[key] == 1 else f"{view['name']}#{view['number']}")
    return names


__all__ = ["CONTENT_TYPE", "PoolCollector", "WorkerCollector", "exposition", "install"]
