"""L02: several windows per quota, all of which hold at once, against models that remember every start."""

from __future__ import annotations

import itertools
import random
from typing import NamedTuple

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from headgate import Cost, Quota
from headgate.gate.windows import Bucket, FixedWindow, SlidingWindow
from headgate.resources.ledger import Ledger
from headgate.resources.quota import checked_quota, windows_of
from tests.conftest import SCALE

CLOSE = 1e-5
DIMENSIONS = ("requests", "tokens", "input_tokens", "output_tokens")


class Limit(NamedTuple):
    """One limit that an upstream keeps."""

    dimension: str
    quota: Quota

    @property
    def most(self) -> int:
        return int(self.quota.limits[self.dimension])


class Upstream:
    """Remembers every start, and checks every limit over all of them."""

    def __init__(self, quotas: tuple[Quota, ...]) -> None:
        self.limits = [Limit(dimension, quota) for quota in quotas for dimension in quota.limits]
        self.calls: dict[float, Cost] = {}
        self.cancelled: set[float] = set()

    def used(self, dimension: str) -> list[tuple[float, float]]:
        parts = {
            "requests": lambda cost: 1.0,
            "tokens": lambda cost: cost.input + cost.output,
            "input_tokens": lambda cost: cost.input,
            "output_tokens": lambda cost: cost.output,
        }
        return sorted((at, 0.0 if at in self.cancelled else parts[dimension](cost)) for at, cost in self.calls.items())

    def check(self) -> None:
        for limit in self.limits:
            most = _MOST_SEEN[limit.quota.window](limit, self.used(limit.dimension))
            assert most <= limit.most + CLOSE, f"{most:g} {limit}"


def _sliding(limit: Limit, used: list[tuple[float, float]]) -> float:
    per = limit.quota.per
    return max((sum(one for at, one in used if end - per < at <= end) for end, _ in used), default=0.0)


def _bucket(limit: Limit, used: list[tuple[float, float]]) -> float:
    """How much a bucket of this size and refill would have had to hold, at most."""
    level = most = 0.0  # what was taken and has not been refilled
    before = -float("inf")
    for at, one in used:
        level = max(0.0, level - limit.most / limit.quota.per * (at - before)) + one
        most, before = max(most, level), at
    return most


def _fixed(limit: Limit, used: list[tuple[float, float]]) -> float:
    begin, total, most = -float("inf"), 0.0, 0.0
    for at, one in used:
        if at >= begin + limit.quota.per:
            begin, total = at, 0.0
        total += one
        most = max(most, total)
    return most


_MOST_SEEN = {"sliding": _sliding, "bucket": _bucket, "fixed": _fixed}

_QUOTAS = st.builds(
    Quota,
    requests=st.integers(1, 12),
    per=st.sampled_from([1.0, 5.0, 10.0, 60.0]),
    tokens=st.none() | st.integers(10, 80),
    input_tokens=st.none() | st.integers(10, 60),
    output_tokens=st.none() | st.integers(10, 60),
    window=st.sampled_from(["sliding", "bucket", "fixed"]),
)
_LISTS = st.lists(_QUOTAS, min_size=1, max_size=3, unique_by=lambda quota: quota.per).map(tuple)
_STEPS = st.lists(
    st.tuples(
        st.sampled_from(["start", "start", "start", "wait", "wait", "open", "settle", "cancel"]),
        st.integers(0, 9),
        st.integers(0, 9),
        st.floats(0, 8),
    ),
    max_size=60,
)


class Alone:
    """The windows of the same quotas, each by itself: what a call could start with if there were only that one."""

    def __init__(self, quotas: tuple[Quota, ...]) -> None:
        self.windows = windows_of(quotas)

    def all_have_room(self, need: dict[str, float], now: float) -> bool:
        return all(self.windows[name].room(now) >= amount - 1e-6 for name, amount in need.items())

    def opens_at(self, need: dict[str, float], now: float) -> float:
        return max(self.windows[name].opens_at(amount, now) for name, amount in need.items())

    def take(self, need: dict[str, float], start: float, now: float) -> None:
        for name, amount in need.items():
            self.windows[name].hold(amount, now)
            self.windows[name].held -= amount
            self.windows[name].count(amount, start, now)

    def amend(self, change: dict[str, float], start: float, now: float) -> None:
        for name, amount in change.items():
            if amount:
                self.windows[name].amend(amount, start, now)


@given(quotas=_LISTS, steps=_STEPS)
@example(
    quotas=(Quota(5, 1.0), Quota(6, 60.0, 20, input_tokens=15, output_tokens=15, window="bucket")),
    steps=[("start", 4, 4, 0.0), ("wait", 0, 0, 1.0), ("start", 4, 4, 0.0), ("settle", 1, 0, 0.0), ("open", 1, 1, 0.0)],
)
@example(  # what the first one had taken was partly refilled before the second
    quotas=(Quota(2, 5.0, window="bucket"),),
    steps=[(what, 0, 0, 1.0) for what in ("start", "wait", "start", "cancel", "start", "open", "start")],
)
@settings(max_examples=max(150, int(3000 * SCALE)), deadline=None)
def test_l02_no_window_is_exceeded_and_nothing_waits_while_all_have_room(
    quotas: tuple[Quota, ...], steps: list[tuple[str, int, int, float]]
) -> None:
    ledger, alone, upstream, now = Ledger(quotas), Alone(quotas), Upstream(quotas), 50.0
    running: list[tuple[dict[str, float], float]] = []
    for what, one, other, seconds in steps:
        cost = Cost(input=1 + one, output=1 + other)
        need = ledger.need(cost)
        if what == "wait":
            now += seconds
        elif what == "open" and ledger.can_ever_allow(need):
            opens_at = ledger.opens_at(need, now)
            assert opens_at == pytest.approx(alone.opens_at(need, now))
            assert now <= opens_at
            now = min(opens_at, now + 120.0)
        elif what in ("settle", "cancel") and running:
            taken, start = running.pop(one % len(running))
            if what == "cancel":  # it was never begun
                upstream.cancelled.add(start)
                ledger.cancel(taken, start, now)
                alone.amend({name: -amount for name, amount in taken.items()}, start, now)
            else:  # it has used less than it had reserved: of its input, its output or both
                spent = Cost(upstream.calls[start].input - one % 2, upstream.calls[start].output - other % 2)
                upstream.calls[start] = spent
                parts = {"tokens": spent.input + spent.output, "input": spent.input, "output": spent.output}
                change = {
                    name: parts[name.partition("/")[0].removesuffix("_tokens")] - amount
                    for name, amount in taken.items()
                    if not name.startswith("requests")
                }
                ledger.amend(change, start, now)
                alone.amend(change, start, now)
        allowed = ledger.allows(need, now)
        assert allowed == alone.all_have_room(need, now)
        if what == "start" and allowed:
            start, _ = ledger.start(need, now)
            alone.take(need, start, now)
            upstream.calls[start] = cost
            running.append((need, start))
            upstream.check()
        upstream.check()


def saturate(quotas: list[Quota], seconds: float, cost: Cost) -> list[float]:
    """Start calls as fast as all windows allow, as a backlog does."""
    checked = checked_quota(quotas)
    assert isinstance(checked, tuple)
    ledger, now, starts = Ledger(checked), 0.0, []
    need = ledger.need(cost)
    while now < seconds:
        if ledger.allows(need, now):
            starts.append(ledger.start(need, now)[0])
        else:
            now = ledger.opens_at(need, now)
    return starts


@pytest.mark.parametrize("window", ["sliding", "bucket", "fixed"])
@pytest.mark.parametrize(
    ("quotas", "cost", "rate"),
    [
        ([{"requests": 5, "per": 1.0}, {"requests": 120, "per": 60.0}], Cost(), 2.0),
        ([{"requests": 120, "per": 60.0}, {"requests": 1, "per": 1.0}], Cost(), 1.0),
        ([{"requests": 100, "per": 10.0}, {"input_tokens": 6000, "output_tokens": 60_000}], Cost(50, 10), 2.0),
        ([{"requests": 100, "per": 10.0}, {"input_tokens": 60_000, "output_tokens": 6000}], Cost(10, 25), 4.0),
        ([{"requests": 2, "per": 1.0}, {"tokens": 5000, "per": 30.0}, {"input_tokens": 9000}], Cost(60, 40), 5 / 3),
    ],
)
def test_l02_the_scarcest_window_is_used_to_the_full(
    quotas: list[dict[str, float]], cost: Cost, rate: float, window: str
) -> None:
    made = [Quota(**one, window=window) for one in quotas]  # type: ignore[arg-type]
    longest = max(quota.per for quota in made)
    starts = saturate(made, 6 * longest, cost)
    late = [at for at in starts if longest <= at < 6 * longest]
    assert len(late) >= 0.97 * rate * 5 * longest
    upstream = Upstream(tuple(made))
    upstream.calls = dict.fromkeys(starts, cost)
    upstream.check()


def test_l02_calls_are_spaced_by_the_window_that_needs_it() -> None:
    starts = saturate([Quota(5, 1.0), Quota(60, 60.0)], 300.0, Cost())
    later = [at for at in starts if at > 60]
    assert max(b - a for a, b in itertools.pairwise(later)) <= 1.3  # one a second, not 60 at once
    assert all(b - a >= 1.0 for a, b in zip(starts, starts[5:], strict=False))


def test_l02_random_costs_leave_little_of_the_scarcest_window() -> None:
    chance = random.Random(3)
    quotas = (Quota(20, 1.0), Quota(per=60.0, input_tokens=30_000, output_tokens=12_000))
    ledger, upstream, now = Ledger(quotas), Upstream(quotas), 0.0
    while now < 600:
        cost = Cost(input=chance.randint(1, 300), output=chance.randint(1, 200))
        need = ledger.need(cost)
        while not ledger.allows(need, now):
            now = ledger.opens_at(need, now)
        upstream.calls[ledger.start(need, now)[0]] = cost
    upstream.check()
    written = sum(cost.output for at, cost in upstream.calls.items() if 60 <= at < 600)
    assert written >= 0.97 * 12_000 * 9


@pytest.mark.parametrize(
    ("quotas", "names"),
    [
        ([Quota(5)], {"requests": SlidingWindow}),
        ([Quota(5, tokens=7, window="fixed")], {"requests": FixedWindow, "tokens": FixedWindow}),
        (
            [Quota(5, 1.0), Quota(per=3600.0, requests=9, tokens=8, window="bucket"), Quota(9, 90.0)],
            {
                "requests/second": SlidingWindow,
                "requests/hour": Bucket,
                "tokens": Bucket,
                "requests/90s": SlidingWindow,
            },
        ),
        (
            [Quota(input_tokens=5), Quota(output_tokens=5, per=86400.0), Quota(input_tokens=50, per=86400.0)],
            {"input_tokens/minute": SlidingWindow, "output_tokens": SlidingWindow, "input_tokens/day": SlidingWindow},
        ),
    ],
)
def test_l02_windows_are_named_after_what_they_count(quotas: list[Quota], names: dict[str, type[object]]) -> None:
    made = windows_of(tuple(quotas))
    assert {name: type(window) for name, window in made.items()} == names
