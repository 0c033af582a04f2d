"""The arithmetic of progress: rates, time left, percentiles, and sums for each tenant and key. Pure."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from math import frexp, ldexp
from typing import Any

_BELOW = -20  # 2**-20 s, a microsecond: what is quicker counts as this
_BUCKETS = 36 * 8  # up to 2**16 s, 18 hours
_SPAN = 30.0  # seconds over which a rate is taken
MOST_TENANTS = 10_000
"""How many tenants are told apart; further ones count together, so that memory stays constant."""
OTHERS = "(others)"


class Durations:
    """Durations, counted in buckets that are 9 % wide: constant memory, percentiles to 5 %."""

    __slots__ = ("_counts", "count")

    def __init__(self) -> None:
        self.count: int = 0
        self._counts: list[int] | None = None

    def add(self, seconds: float) -> None:
        """Count a duration."""
        counts = self._counts
        if counts is None:
            counts = self._counts = [0] * _BUCKETS
        share, power = frexp(seconds)  # share is from 0.5 to 1
        bucket = (power - _BELOW) * 8 + int(share * 16) - 8
        counts[0 if bucket < 0 else bucket if bucket < _BUCKETS else _BUCKETS - 1] += 1
        self.count += 1

    def percentile(self, share: float) -> float | None:
        """Return the duration that this share of all does not exceed; None if there are none."""
        if not self.count or self._counts is None:
            return None
        left = share * self.count
        for bucket, count in enumerate(self._counts):
            left -= count
            if count and left <= 0:
                power, part = divmod(bucket, 8)
                return ldexp((part + 8.5) / 16, power + _BELOW)
        return None


@dataclass(slots=True)
class Tally:
    """What was done for one tenant, or with one key, or altogether."""

    done: int = 0
    failed: int = 0
    cost: float = 0.0
    durations: Durations = field(default_factory=Durations)

    def to_dict(self) -> dict[str, Any]:
        """Return the figures as JSON shows them."""
        p50, p99 = self.durations.percentile(0.5), self.durations.percentile(0.99)
        figures: dict[str, Any] = {"done": self.done, "failed": self.failed, "p50": _short(p50), "p99": _short(p99)}
        return figures | ({"cost": round(self.cost, 9)} if self.cost else {})


def _short(seconds: float | None) -> float | None:
    return None if seconds is None else float(f"{seconds:.3g}")


class Rate:
    """How many records a second, lately."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int, float]] = deque()

    def saw(self, now: float, done: int, share: float) -> None:
        """Note how many are done now, and which share of the input that is."""
        seen = self._seen
        seen.append((now, done, share))
        while len(seen) > 2 and now - seen[1][0] >= _SPAN:
            seen.popleft()

    @property
    def per_second(self) -> float:
        """Records a second."""
        seconds = self._seconds()
        return (self._seen[-1][1] - self._seen[0][1]) / seconds if seconds else 0.0

    @property
    def left(self) -> float | None:
        """Seconds until all is done, if it goes on like this; None if nobody knows."""
        seconds = self._seconds()
        if not seconds:
            return None
        share = self._seen[-1][2]
        speed = (share - self._seen[0][2]) / seconds
        return (1 - share) / speed if speed > 0 else None

    def _seconds(self) -> float:
        return self._seen[-1][0] - self._seen[0][0] if self._seen else 0.0


def duration(seconds: float) -> str:
    """A duration for people: 850 ms, 12 s, 3 min 20 s, 2 h 5 min."""
    if seconds < 0.0995:
        return f"{seconds * 1000:.2g} ms"
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 120:
        return f"{whole} s"
    if whole < 7200:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
