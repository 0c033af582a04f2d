"""Metrics for Prometheus, from what the sampler sees. Needs the extra `prometheus`.

    from headgate.observe import prometheus
    stop = prometheus.install()              # into prometheus_client's own registry
    text = prometheus.exposition()           # or what `GET /metrics` returns

`observe.metrics` says which metrics there are.
"""

from __future__ import annotations

from asyncio import _get_running_loop
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Final

from headgate.errors import HeadgateError
from headgate.observe import sampler as sampling
from headgate.observe.metrics import Families, families_of

if TYPE_CHECKING:
    from prometheus_client.core import Metric
    from prometheus_client.registry import CollectorRegistry

    from headgate.observe.metrics import Family
    from headgate.observe.sampler import Sampler

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
"""Of what `exposition` returns."""


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
        # A loop that makes the metrics itself cannot answer meanwhile: then what was seen last will do.
        if _get_running_loop() is None:
            self._sampler.look()
        yield from map(_made, families_of(self._sampler))


class WorkerCollector:
    """The metrics of a worker process: what it runs itself."""

    def __init__(self, read: Callable[[], dict[str, float]]) -> None:
        self._read = read

    def describe(self) -> Iterable[Metric]:
        """Say nothing: see `PoolCollector`."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Make the metrics of this moment."""
        families, now = Families(), self._read()
        families.gauge("headgate_worker_calls_running", "Calls that run here.", now["running"])
        families.count("headgate_worker_calls_finished", "Calls that have ended here.", now["finished"])
        families.gauge("headgate_worker_clients", "Clients that are connected.", now["clients"])
        families.gauge("headgate_worker_memory_bytes", "Resident memory of the process.", now["memory"])
        if "certificate_expiry" in now:
            expiry = "headgate_worker_certificate_expiry_timestamp_seconds"
            families.gauge(expiry, "When its certificate expires, in Unix seconds.", now["certificate_expiry"])
        yield from map(_made, families.made.values())


def _made(family: Family) -> Any:
    """A metric as prometheus_client has it."""
    from prometheus_client import core

    made = getattr(core, f"{family.kind.capitalize()}MetricFamily")(family.name, family.about, labels=family.labels)
    for values, figure in family.figures:
        if family.kind == "histogram":
            made.add_metric(values, buckets=figure.cumulated(), sum_value=figure.total)
        else:
            made.add_metric(values, figure)
    return made


__all__ = ["CONTENT_TYPE", "PoolCollector", "WorkerCollector", "exposition", "install"]
