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
from headgate.observe.history import NONE, OTHER, TENANTS, Labels

if TYPE_CHECKING:
    from prometheus_client.core import Metric
    from prometheus_client.registry import CollectorRegistry

    from headgate.observe.sampler import Sampler

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
_ENDS: Final = ("completed", "failed", "rejected", "cancelled", "expired", "stale")
_STATUSES: Final = ("healthy", "cooling_down", "disabled")
_STATES: Final = ("starting", "ready", "cooling", "blocked", "lost", "stopping")
_COUNTED: Final = {"tasks": "active", "resources": "healthy", "workers": "ready"}
"""For each kind of pool something that a view has which tells anything."""
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
    collector = PoolCollector(sampling.acquire())
    try:
        chosen.register(collector)
    except BaseException:
        sampling.release()
        raise
    installed = True

    def uninstall() -> None:
        nonlocal installed
        if installed:
            installed = False
            chosen.unregister(collector)
            sampling.release()

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
        self._labels: dict[int, Labels] = {}  # of resources, by pool

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
            if view.get("state") == "loading" or _COUNTED[view["kind"]] not in view:
                continue  # it changes, or its loop was held when it was first looked at
            {"tasks": self._tasks, "resources": self._resources, "workers": _workers}[view["kind"]](
                families, view, name
            )
        for event, count in list(self._sampler.feed.counts.items()):
            families.count("headgate_events", "Events since somebody looks, by name.", count, event=event)
        families.gauge("headgate_observe_look_seconds", "What the last looks cost an event loop.", seen["cost"])
        yield from families.made()

    def _tasks(self, to: _Families, view: dict[str, Any], pool: str) -> None:
        history = self._sampler.history.get(view["number"])
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
        if history is None:
            return
        queued: Counter[str] = Counter()
        oldest: dict[str, float] = {}
        for row in view["tenants"]:
            label = history.labels.of(row["tenant"])
            queued[label] += row["queued"]
            oldest[label] = max(oldest.get(label, 0.0), row["lag"])
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
            to.count(
                "headgate_tenant_tasks_ended", "Tasks that have ended.", ended, pool=pool, tenant=label, status=status
            )
        to.histogram("headgate_task_wait_seconds", "From submit to the last start.", history.waits, pool=pool)
        to.histogram("headgate_task_run_seconds", "From the last start to the end.", history.runs, pool=pool)

    def _resources(self, to: _Families, view: dict[str, Any], pool: str) -> None:
        labels = self._labels.setdefault(view["number"], Labels(TENANTS))
        for status in _STATUSES:
            to.gauge("headgate_resources", "Resources, by status.", view[status], pool=pool, status=status)
        waiters = "Calls that wait for a resource; a TaskPool is one for each requirement, however many tasks it has."
        to.gauge("headgate_resource_waiters", waiters, view["waiting"], pool=pool)
        for name in ("attempts", "successes", "cooldowns", "disables", "retries", "sibling_cancels"):
            to.count(f"headgate_resource_{name}", f"{name.replace('_', ' ').capitalize()}.", view[name], pool=pool)
        for outcome in _OUTCOMES:
            to.count("headgate_resource_runs", "Calls.", view[f"runs_{outcome}"], pool=pool, outcome=outcome)
        flights: Counter[str] = Counter()
        rests: dict[str, float] = {}
        for row in view["resources"]:
            label = labels.of(row["id"])
            flights[label] += row["in_flight"]
            rests[label] = max(rests.get(label, 0.0), row["cooldown"])
        for label, number in flights.items():
            to.gauge("headgate_resource_in_flight", "Uses at this moment.", number, pool=pool, resource=label)
            to.gauge(
                "headgate_resource_cooldown_seconds", "Seconds of rest left.", rests[label], pool=pool, resource=label
            )


def _workers(to: _Families, view: dict[str, Any], pool: str) -> None:
    for state in _STATES:
        to.gauge("headgate_workers", "Workers, by state.", view[state], pool=pool, state=state)
    to.gauge("headgate_workers_in_flight", "Calls that workers have.", view["in_flight"], pool=pool)
    to.gauge("headgate_workers_memory_bytes", "Resident memory of local workers.", view["memory"], pool=pool)
    to.count("headgate_workers_lost", "Workers that ended without being told to.", view["losses"], pool=pool)


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


__all__ = ["CONTENT_TYPE", "NONE", "OTHER", "PoolCollector", "WorkerCollector", "exposition", "install"]
