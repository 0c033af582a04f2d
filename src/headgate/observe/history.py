"""What was seen of a pool lately: points for plots, and histograms for metrics. Pure.

A point is made each time somebody looks. Rates are differences of counters over the last two seconds, divided by that
time; after a time without looks, over that time. Nothing here grows without end: points, tenants and buckets are
bounded.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any, Final

from headgate.core.labels import NONE, OTHER, Labels
from headgate.core.views import PoolView, ResourcePoolView, ResourceRow, TaskPoolView, TenantRow, Unread

POINTS: Final = 300
"""Points that are kept of each pool."""
SENT: Final = 4 * 1024 * 1024
"""Characters of points that who begins to watch is sent at once: a quarter of what an answer may have."""
WINDOW: Final = 2.5
"""Seconds over which a rate is taken at most: two looks, so that a number can be read."""
SHORTEST: Final = 0.5
"""Seconds over which a rate is taken at least: one task between two looks of several people is no thousand a second."""
PLOTTED: Final = 6
"""Tenants whose queues are in each point: those that wait longest."""
STAYS: Final = 10.0
"""Seconds that a tenant is plotted after it last waited about as long as the others."""
BUCKETS: Final = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0, 3600.0)
"""Upper bounds in seconds: from a cached answer to a batch that waits an hour for its keys."""

DROPPED: Final = ("rejected", "expired", "stale")
"""How tasks end that are taken out of the queue: no failure of what they run."""
_RATES: Final[dict[str, dict[str, tuple[str, ...]]]] = {
    "tasks": {
        "done": ("completed",),
        "failed": ("failed",),
        "dropped": DROPPED,
    },
    "resources": {"ok": ("successes",), "refused": ("refusals",), "used": ("attempts",)},
    "workers": {"lost": ("losses",)},
}
_LEVELS: Final[dict[str, tuple[str, ...]]] = {
    "tasks": ("queued", "active", "waiting", "lag", "jain"),
    "resources": ("in_flight", "healthy", "cooling_down", "disabled", "waiting"),
    "workers": ("in_flight", "ready", "blocked", "memory"),
}
COUNTED: Final = {
    "attempts": "acquires",
    "successes": "successes",
    "refusals": "refusals",
    "cooldowns": "cooldowns",
    "disables": "disables",
    "sibling_cancels": "sibling_cancels",
}
"""Counters of a resource pool, and what the row of a resource has of them."""


class Histogram:
    """How many of the observed times were in which bucket."""

    __slots__ = ("counts", "total")

    def __init__(self) -> None:
        self.counts: list[float] = [0.0] * (len(BUCKETS) + 1)
        """One for each bucket, and one for what is above all of them."""
        self.total: float = 0.0

    def add(self, seconds: float, times: float = 1.0) -> None:
        """Note one time, or one that stands for several."""
        self.counts[bisect_left(BUCKETS, seconds)] += times
        self.total += seconds * times

    def cumulated(self) -> list[tuple[str, float]]:
        """Return the buckets as metric systems want them: each bound with the number of all up to it."""
        sums, so_far = [], 0.0
        for bound, count in zip((*map(str, BUCKETS), "+Inf"), self.counts, strict=True):
            so_far += count
            sums.append((bound, so_far))
        return sums


class Plotted:
    """Which tenants are plotted. One stays as long as it waits, so that lines can be followed."""

    __slots__ = ("_since",)

    def __init__(self) -> None:
        self._since: dict[str, float] = {}  # when each last waited

    def choose(self, rows: Iterable[TenantRow], now: float) -> dict[str, list[float]]:
        """Return the tenants to plot, each with its queue and the age of its oldest task. Longest waiting come first.

        One that has waited for nothing lately, or for less than half as long as one that is not plotted, gives up its
        place to that.
        """
        known = {NONE if row.tenant is None else row.tenant: [row.queued, row.lag] for row in rows}
        others = [name for name, (queued, _) in known.items() if queued and name not in self._since]
        enough = known[others[0]][1] / 2 - 1.0 if others else 0.0
        for name in self._since:
            queued, lag = known.get(name, (0, 0.0))
            if queued and lag >= enough:
                self._since[name] = now
        for name in others:
            if len(self._since) >= PLOTTED:
                oldest = min(self._since, key=self._since.__getitem__)
                if now - self._since[oldest] < STAYS:
                    break
                del self._since[oldest]
            self._since[name] = now
        return {name: known.get(name, [0, 0.0]) for name in self._since}


class PoolHistory:
    """The points and histograms of one pool."""

    def __init__(self, kind: str) -> None:
        self.kind: str = kind
        self.points: deque[dict[str, Any]] = deque(maxlen=POINTS)
        self.waits: Histogram = Histogram()
        self.runs: Histogram = Histogram()
        self.labels: Labels = Labels()
        self.ended: dict[tuple[str, str], float] = {}
        """How many tasks have ended, by tenant and status."""
        self.seen: int = 0
        """How many tasks had ended when somebody looked last."""
        self.counted: dict[str, dict[str, float]] = {}
        """The counters of resources, by label. They only grow, also when a resource is removed and comes again."""
        self._before: dict[str, ResourceRow] = {}  # the last row of each resource that has a label
        self._plotted = Plotted()
        self._sums: deque[tuple[float, dict[str, float]]] = deque()

    def note(self, view: PoolView | Unread, now: float, wall: float) -> dict[str, Any] | None:
        """Make a point of what a pool shows now; `now` monotonic. None: it could not be read."""
        if isinstance(view, Unread):
            return None
        sums = {name: float(sum(getattr(view, one) for one in parts)) for name, parts in _RATES[self.kind].items()}
        point: dict[str, Any] = {"t": round(wall, 3)}
        point |= self._rates(sums, now)
        for name in _LEVELS[self.kind]:
            point[name] = getattr(view, name)
        if isinstance(view, TaskPoolView):
            point["p50"] = max((row.p50 for row in view.tenants), default=0.0)
            point["p99"] = max((row.p99 for row in view.tenants), default=0.0)
            point["tenants"] = self._plotted.choose(view.tenants, now)
        if isinstance(view, ResourcePoolView):
            self._count_resources(view)
        self.points.append(point)
        return point

    def _rates(self, sums: dict[str, float], now: float) -> dict[str, float]:
        while len(self._sums) > 1 and now - self._sums[0][0] > WINDOW:
            self._sums.popleft()
        then, before = self._sums[0] if self._sums else (now, sums)
        if not self._sums or now - self._sums[-1][0] >= SHORTEST:
            self._sums.append((now, sums))
        if now - then < SHORTEST:
            return {name: self.points[-1][name] if self.points else 0.0 for name in sums}
        return {name: round(max(0.0, value - before[name]) / (now - then), 3) for name, value in sums.items()}

    def count(self, ended: Iterable[tuple[str | None, str, float | None, float | None]], new: int) -> None:
        """Count tasks that have ended: tenant, status, seconds waited and run. `new`: how many there were in all.

        If a pool remembers fewer than have ended, each of those stands for several.
        """
        listed = list(ended)
        times = new / len(listed) if listed else 0.0
        for tenant, status, waited, ran in listed:
            key = self.labels.of(tenant), status
            self.ended[key] = self.ended.get(key, 0.0) + times
            if waited is not None:
                self.waits.add(waited, times)
            if ran is not None:
                self.runs.add(ran, times)

    def _count_resources(self, view: ResourcePoolView) -> None:
        """Count what resources have done since the last look. What has no label, or was removed since, is others'."""
        if len(view.resources) == view.resource_count:  # else one that is not listed may be there
            listed = {row.id for row in view.resources}
            self._before = {label: row for label, row in self._before.items() if label in listed}
        for row in sorted(view.resources, key=lambda row: row.position):  # the first are listed by each look
            label = self.labels.of(row.id)
            if label != OTHER:
                before, sums = self._before.get(label), self.counted.setdefault(label, dict.fromkeys(COUNTED, 0.0))
                for name, own in COUNTED.items():
                    then, number = 0 if before is None else getattr(before, own), getattr(row, own)
                    sums[name] += number - then if number >= then else number  # else it was removed, and is new
                self._before[label] = row
        known, ours = self.counted.get(OTHER, {}), [sums for label, sums in self.counted.items() if label != OTHER]
        others = {
            name: max(known.get(name, 0.0), getattr(view, name) - sum(sums[name] for sums in ours)) for name in COUNTED
        }
        if any(others.values()):
            self.counted[OTHER] = others


def recent_points(histories: Mapping[int, PoolHistory], most: int = SENT) -> dict[str, list[dict[str, Any]]]:
    """Return the last points of each pool, by its number: as many of each as fit into about `most` characters."""
    points = {str(number): list(history.points) for number, history in list(histories.items())}
    of_one_look = sum(len(json.dumps(past[-1])) for past in points.values() if past)
    kept = max(1, most // max(1, of_one_look))
    return {number: past[-kept:] for number, past in points.items()}
