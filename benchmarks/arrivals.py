"""What an upstream's log says about one contestant of quotas.py: how well it used what its keys allow. Pure."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

sys.path.append(str(Path(__file__).parent / "contestants"))

from limited import Bucket, Limits
from quota_client import TOKENS_PER_CALL


@dataclass(frozen=True, slots=True)
class Seen:
    """What was seen of one contestant. Figures are about the time from `begin` to `end`."""

    begin: float
    end: float
    log: list[tuple[float, str, str, int, bool]]
    """Requests that arrived until `end`: when, with which key, the name of the call, tokens, and if it was accepted."""
    cpu: float
    """Seconds of its processes between `begin` and `end`."""
    failed: int
    urgent: dict[str, float]
    """When urgent calls were submitted, by name."""


@dataclass(frozen=True, slots=True)
class Figures:
    """What is printed about one contestant."""

    accepted: float
    """Share of what the upstream allows."""
    gap: float
    """Longest time without an accepted call of a key, in seconds."""
    refused: float
    """Share of all requests."""
    cpu: float
    """Seconds of the client for each accepted call."""
    failed: int
    """Calls that the contestant gave up."""
    twice: int
    """Calls that were accepted again after they had been accepted."""
    p50: float
    """Seconds from submitting an urgent call until it is accepted."""
    p99: float


Arrival = tuple[float, float, bool]
"""When a call was accepted, its size (1.0 on average), and whether it was the first time."""


def rate(limits: Limits) -> float:
    """Calls per second that a key allows."""
    return (limits.tokens / TOKENS_PER_CALL if limits.tokens else limits.requests) / limits.per


def figures(limits: Limits, keys: Sequence[str], seen: Seen) -> Figures:
    first: dict[str, float] = {}
    by_key: dict[str, list[Arrival]] = {key: [] for key in keys}
    counts: dict[str, int] = defaultdict(int)
    for at, key, name, tokens, accepted in seen.log:
        what = "refused"
        if accepted:
            what = "twice" if name in first else "accepted"
            by_key[key].append((at, tokens / TOKENS_PER_CALL if limits.tokens else 1.0, name not in first))
            first.setdefault(name, at)
        counts[what] += at >= seen.begin
    waits = [first.get(name, seen.end) - at for name, at in seen.urgent.items() if seen.begin <= at < seen.end]
    return Figures(
        accepted=sum(_useful(limits, arrivals, seen) for arrivals in by_key.values())
        / (rate(limits) * (seen.end - seen.begin) * len(keys)),
        gap=max(_longest_gap(arrivals, seen) for arrivals in by_key.values()),
        refused=counts["refused"] / max(1, sum(counts.values())),
        cpu=seen.cpu / max(1, counts["accepted"]),
        failed=seen.failed,
        twice=counts["twice"],
        p50=percentile(waits, 0.5),
        p99=percentile(waits, 0.99),
    )


def _longest_gap(arrivals: Sequence[Arrival], seen: Seen) -> float:
    moments = [seen.begin, *(at for at, _, _ in arrivals if at >= seen.begin), seen.end]
    return max(later - earlier for earlier, later in pairwise(moments))


def _useful(limits: Limits, arrivals: Sequence[Arrival], seen: Seen) -> float:
    """Accepted calls of a key, without those that were paid from what its bucket had saved before `begin`.

    A bucket allows what flows in. A contestant that was slow at first must not make up for later pauses with savings.
    """
    useful = sum(size for at, size, is_first in arrivals if at >= seen.begin and is_first)
    if limits.kind == "bucket" and arrivals:
        useful -= max(0.0, _level(limits, arrivals, seen.begin) - _level(limits, arrivals, seen.end))
    return useful


def _level(limits: Limits, arrivals: Sequence[Arrival], when: float) -> float:
    """What a key's bucket holds at a time, in calls of average size."""
    bucket = Bucket(rate(limits) * limits.per, limits.per)
    bucket.at = arrivals[0][0]
    for at, size, _ in arrivals:
        if at < when:
            bucket.advance(at)
            bucket.left -= size
    bucket.advance(max(when, bucket.at))
    return bucket.left


def percentile(figures: Sequence[float], share: float) -> float:
    """The figure that this share of all does not exceed, or 0.0 if there are none."""
    return sorted(figures)[min(len(figures) - 1, int(share * len(figures)))] if figures else 0.0
