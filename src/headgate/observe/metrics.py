"""The metrics of this process, from what the sampler sees: what every monitoring system is given.

Names begin with `headgate_`, units are seconds and bytes. Labels are bounded: of each pool a hundred tenants and a
hundred resources have figures of their own, and what others do is counted under "(other)". Workers are counted and not
named, because each one that is replaced would be a new label for ever.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal

from headgate.core.labels import OTHER
from headgate.core.views import ResourcePoolView, TaskPoolView, WorkerPoolView
from headgate.observe.history import COUNTED
from headgate.tasks.runtime.view import shown

if TYPE_CHECKING:
    from headgate.core.labels import Labels
    from headgate.core.views import PoolLook
    from headgate.observe.history import Histogram, PoolHistory
    from headgate.observe.sampler import Sampler

_ENDS: Final = ("completed", "failed", "rejected", "cancelled", "expired", "stale")
_STATUSES: Final = ("healthy", "cooling_down", "disabled")
_STATES: Final = ("starting", "ready", "cooling", "blocked", "lost", "stopping")
_PARTS: Final = ("input", "output", "unsplit")
_OUTCOMES: Final = ("ok", "exhausted", "error", "cancelled")


@dataclass(frozen=True, slots=True)
class Family:
    """One metric: a figure for each combination of labels."""

    kind: Literal["gauge", "counter", "histogram"]
    name: str
    """Without what a monitoring system appends, such as `_total`."""
    about: str
    labels: tuple[str, ...]
    figures: list[tuple[tuple[str, ...], Any]] = field(default_factory=list)
    """Values of the labels, and a number, or a `Histogram`."""


class Families:
    """Metrics by name, in the order in which they come."""

    def __init__(self) -> None:
        self.made: dict[str, Family] = {}

    def gauge(self, name: str, about: str, value: float, **labels: str) -> None:
        """Add what is so now."""
        self._add("gauge", name, about, float(value), labels)

    def count(self, name: str, about: str, value: float, **labels: str) -> None:
        """Add what only grows."""
        self._add("counter", name, about, float(value), labels)

    def histogram(self, name: str, about: str, seen: Histogram, **labels: str) -> None:
        """Add how many times were in which bucket."""
        self._add("histogram", name, about, seen, labels)

    def _add(
        self, kind: Literal["gauge", "counter", "histogram"], name: str, about: str, value: Any, labels: dict[str, str]
    ) -> None:
        family = self.made.get(name)
        if family is None:
            family = self.made[name] = Family(kind, name, about, tuple(labels))
        # One that UTF-8 cannot have would make all metrics fail.
        values = tuple(value.encode("utf-8", "backslashreplace").decode() for value in labels.values())
        family.figures.append((values, value))


def families_of(sampler: Sampler) -> Iterable[Family]:
    """Return the metrics of what the sampler saw last."""
    families, pools = Families(), sampler.pools
    for look, name in zip(pools, _unique_names(pools), strict=True):
        history = sampler.history.get(look.number)
        if history is None:  # it is gone by now
            continue
        if isinstance(look.state, TaskPoolView):
            _tasks(families, look.state, look.held, name, history)
        elif isinstance(look.state, ResourcePoolView):
            _resources(families, look.state, name, history)
        elif isinstance(look.state, WorkerPoolView):
            _workers(families, look.state, name)
    for event, count in list(sampler.feed.counts.items()):
        families.count("headgate_events", "Events since somebody looks, by name.", count, event=event)
    families.gauge("headgate_observe_look_seconds", "What the last looks cost an event loop.", sampler.latest["cost"])
    return families.made.values()


def _tasks(to: Families, view: TaskPoolView, held: float | None, pool: str, history: PoolHistory) -> None:
    for status in _ENDS:
        to.count("headgate_tasks_ended", "Tasks that have ended.", getattr(view, status), pool=pool, status=status)
    to.gauge("headgate_tasks_active", "Tasks that hold a slot.", view.active, pool=pool)
    to.gauge("headgate_tasks_waiting", "Tasks that wait for other tasks.", view.waiting, pool=pool)
    to.gauge("headgate_tasks_limit", "Tasks that may hold a slot.", view.max_concurrent, pool=pool)
    to.gauge("headgate_tasks_queued", "Tasks in the queue.", view.queued, pool=pool)
    to.gauge("headgate_submitters_blocked", "Submitters that wait for room.", view.blocked_submitters, pool=pool)
    to.gauge("headgate_queue_age_seconds", "How long the oldest task is queued.", view.lag, pool=pool)
    to.gauge("headgate_fairness", "Jain's index between tenants: 1 is fair.", view.jain, pool=pool)
    to.gauge("headgate_loop_held_seconds", "How long the event loop gives no answer.", held or 0, pool=pool)
    rows = ((row.tenant, row.queued, row.lag) for row in view.tenants)
    queued, oldest = folded(rows, view.queued, view.tenant_count, history.labels)
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


def _resources(to: Families, view: ResourcePoolView, pool: str, history: PoolHistory) -> None:
    for status in _STATUSES:
        to.gauge("headgate_resources", "Resources, by status.", getattr(view, status), pool=pool, status=status)
    waiters = "Calls that wait for a resource; a TaskPool is one for each requirement, however many tasks it has."
    to.gauge("headgate_resource_waiters", waiters, view.waiting, pool=pool)
    to.count("headgate_resource_retries", "Attempts that said nothing against their resource.", view.retries, pool=pool)
    for label, counts in list(history.counted.items()):
        for name in COUNTED:
            about = f"{name.replace('_', ' ').capitalize()}."
            to.count(f"headgate_resource_{name}", about, counts[name], pool=pool, resource=label)
    of_tenants: Counter[tuple[str, str]] = Counter()
    for part in _PARTS:
        for tokens in view.tokens:
            about, number = "Tokens that calls have reported.", getattr(tokens, part)
            to.count("headgate_resource_tokens", about, number, pool=pool, resource=tokens.name, type=part)
        for tokens in view.tenant_tokens:
            of_tenants[shown(tokens.name), part] += getattr(tokens, part)  # several may be shown alike
    for (tenant, part), number in of_tenants.items():
        about = "Tokens that calls have reported, by the tenant of the task that made them."
        to.count("headgate_tenant_tokens", about, number, pool=pool, tenant=tenant, type=part)
    for outcome in _OUTCOMES:
        to.count("headgate_resource_runs", "Calls.", getattr(view, f"runs_{outcome}"), pool=pool, outcome=outcome)
    for row in view.resources:
        label, adaptive = history.labels.of(row.id), row.adaptive
        for status in _STATUSES if label != OTHER else ():
            about = "1 for the status of a resource, 0 for the others."
            is_so = row.status == status
            to.gauge("headgate_resource_status", about, is_so, pool=pool, resource=label, status=status)
        if label != OTHER and row.max_in_flight is not None:
            limit = "Uses there may be at a time; an adaptive limit as it is now."
            to.gauge("headgate_resource_limit", limit, row.max_in_flight, pool=pool, resource=label)
        if label != OTHER and adaptive is not None:
            for bound in ("least", "most"):
                about = f"The {bound} that an adaptive limit may be."
                to.gauge(f"headgate_resource_limit_{bound}", about, getattr(adaptive, bound), pool=pool, resource=label)
            cuts = "Cuts of an adaptive limit because of refusals."
            to.count("headgate_resource_limit_cuts", cuts, adaptive.cuts, pool=pool, resource=label)
            if adaptive.refused_at is not None:
                about = "Calls that were in flight at the last cut."
                to.gauge("headgate_resource_refused_at", about, adaptive.refused_at, pool=pool, resource=label)
    uses = ((row.id, row.in_flight, row.cooldown) for row in view.resources)
    flights, rests = folded(uses, view.in_flight, view.resource_count, history.labels)
    for label, number in flights.items():
        to.gauge("headgate_resource_in_flight", "Uses at this moment.", number, pool=pool, resource=label)
        to.gauge("headgate_resource_cooldown_seconds", "Seconds of rest left.", rests[label], pool=pool, resource=label)
    for row in view.resources:
        label = history.labels.of(row.id)
        if label != OTHER and row.quota is not None:
            _quota(to, row.quota, pool, label)


def _quota(to: Families, quota: Mapping[str, Any], pool: str, resource: str) -> None:
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


def folded(
    rows: Iterable[tuple[str | None, int, float]], amount: int, count: int, labels: Labels
) -> tuple[dict[str, int], dict[str, float]]:
    """Return by label how many tasks are queued or uses there are, and the longest age or rest.

    Rows are names with both. A look lists some tenants or resources and counts all, `count` of them with this `amount`:
    what has no label of its own, or is not listed, is "(other)".
    """
    amounts: dict[str, int] = {}
    longest: dict[str, float] = {}
    others = count
    for name, number, seconds in rows:
        label = labels.of(name)
        longest[label] = max(longest.get(label, 0.0), seconds)
        if label != OTHER:
            amounts[label] = amounts.get(label, 0) + number
            others -= 1
    if others > 0:
        amounts[OTHER] = max(0, amount - sum(amounts.values()))
        longest.setdefault(OTHER, 0.0)
    return amounts, longest


def _workers(to: Families, view: WorkerPoolView, pool: str) -> None:
    for state in _STATES:
        to.gauge("headgate_workers", "Workers, by state.", getattr(view, state), pool=pool, state=state)
    expected = "Workers that the pool should have: those it starts, and those it discovers or has lost."
    to.gauge("headgate_workers_expected", expected, view.expected, pool=pool)
    to.gauge("headgate_workers_in_flight", "Calls that workers have.", view.in_flight, pool=pool)
    to.gauge("headgate_workers_memory_bytes", "Resident memory of workers.", view.memory, pool=pool)
    to.count("headgate_workers_lost", "Workers that ended without being told to, or broke off.", view.losses, pool=pool)


def _unique_names(looks: Iterable[PoolLook]) -> list[str]:
    """Two pools of one kind may have one name, and two series may not."""
    seen: Counter[tuple[str, str]] = Counter()
    names = []
    for look in looks:
        key = look.kind, look.name
        seen[key] += 1
        names.append(look.name if seen[key] == 1 else f"{look.name}#{look.number}")
    return names
