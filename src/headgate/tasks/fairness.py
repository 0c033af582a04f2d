"""How long tasks waited for their turn, by tenant. Pure."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from headgate.core.redaction import redact


@dataclass(frozen=True, slots=True)
class KeyAge:
    """How long tasks of one key waited for their turn, in seconds."""

    key: Hashable
    count: int
    """Of the last few thousand tasks of the pool, how many were of this key."""
    p50: float
    p99: float
    lag: float
    """How long its oldest queued task has been waiting; 0 when none is."""

    def __repr__(self) -> str:
        ages = f"count={self.count}, p50={self.p50!r}, p99={self.p99!r}, lag={self.lag!r}"
        return f"KeyAge(key={redact(repr(self.key))}, {ages})"


@dataclass(frozen=True, slots=True)
class PoolStats:
    """Statistics of a pool: how long tasks were queued, and how fairly they were served."""

    jain: float
    """Jain's index of fairness between keys: 1.0 is perfectly fair."""
    keys: tuple[KeyAge, ...]
    """By lag, then by p99, the worst first. Tasks without a key are under None."""
    worst: KeyAge | None
    """The key that waits longest."""
    shared: Mapping[str, Any] | None = None
    """What all processes that share the budget hold and have queued; None: this process shares it with nobody."""
    paused: bool = False
    """Was the pool paused, so that nothing queued starts?"""
    paused_tenants: frozenset[Hashable] = frozenset()
    """The tenants that were paused."""


def stats_of(waits: Iterable[tuple[Hashable, float]], jain: float, oldest: Mapping[Hashable, float]) -> PoolStats:
    """From how long tasks waited, by key, and how long the oldest queued task of each key has waited so far."""
    by_key: dict[Hashable, list[float]] = {key: [] for key in oldest}
    for key, waited in waits:
        by_key.setdefault(key, []).append(waited)
    keys = [_age(key, sorted(found), oldest.get(key, 0.0)) for key, found in by_key.items()]
    keys.sort(key=lambda age: (-age.lag, -age.p99, _name(age.key)))
    return PoolStats(jain, tuple(keys), keys[0] if keys else None)


def _name(key: Hashable) -> str:
    try:
        return str(key)
    except Exception:  # it runs code of users
        return type(key).__qualname__


def _age(key: Hashable, waits: list[float], lag: float) -> KeyAge:
    return KeyAge(key, len(waits), _percentile(waits, 0.50), _percentile(waits, 0.99), lag)


def _percentile(ordered: list[float], part: float) -> float:
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))] if ordered else 0.0
