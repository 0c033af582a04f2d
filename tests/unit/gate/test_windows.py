"""L09: window limits that are configured, against models that remember every start."""

from __future__ import annotations

import copy
import itertools
import math
import random
from collections.abc import Callable, Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from headgate.gate.windows import Bucket, FixedWindow, SlidingWindow
from tests.conftest import SCALE

Window = SlidingWindow | Bucket | FixedWindow
Start = tuple[float, float]
"""When a call started, and the amount it took."""

CLOSE = 1e-5


def take(window: Window, amount: float, start: float) -> None:
    window.hold(amount, start)
    window.held -= amount
    window.count(amount, start, start)


def saturate(window: Window, seconds: float, amounts: Sequence[float] = (1.0,), until: float = 0.0) -> list[Start]:
    """Start calls as fast as a window allows, as a backlog does."""
    chance, now, starts = random.Random(1), until, []
    amount = chance.choice(amounts)
    while now < seconds:
        opens_at = window.opens_at(amount, now)
        assert opens_at < math.inf
        if opens_at > now:
            now = opens_at
            continue
        take(window, amount, now)
        starts.append((now, amount))
        amount = chance.choice(amounts)
    return starts


def most_in_any(seconds: float, starts: Sequence[Start]) -> float:
    """The most that any interval of this length has seen."""
    most = total = 0.0
    first = 0
    for at, amount in starts:
        total += amount
        while starts[first][0] <= at - seconds:
            total -= starts[first][1]
            first += 1
        most = max(most, total)
    return most


def gaps(starts: Sequence[Start], since: float) -> list[float]:
    times = [at for at, _ in starts if at >= since]
    return [later - earlier for earlier, later in itertools.pairwise(times)]


PERIODS = 12 if SCALE >= 1 else 5
LIMITS = [(1, 10.0), (2, 60.0), (10, 1.0), (60, 60.0), (600, 60.0), (3000, 60.0)]


@pytest.mark.parametrize(("limit", "per"), LIMITS)
def test_l09_a_sliding_window_is_used_to_the_full_and_never_exceeded(limit: int, per: float) -> None:
    starts = saturate(SlidingWindow(limit, per), PERIODS * per)
    assert most_in_any(per, starts) <= limit
    assert len([at for at, _ in starts if at >= per]) >= 0.97 * limit * (PERIODS - 1)


@pytest.mark.parametrize(("limit", "per"), LIMITS)
def test_l09_starts_of_a_sliding_window_are_spaced_evenly(limit: int, per: float) -> None:
    """So an urgent call, first in the queue whenever it comes, waits about per / limit seconds."""
    starts = saturate(SlidingWindow(limit, per), PERIODS * per / 2)
    assert max(gaps(starts, 0.0)) <= 1.2 * per / limit


def test_l09_a_sliding_window_lets_a_tenth_start_at_once_unless_told_otherwise() -> None:
    at_once = {
        burst: len([at for at, _ in saturate(SlidingWindow(50, 10.0, burst), 0.1)]) for burst in (None, 1, 20, 50)
    }
    assert at_once == {None: 5, 1: 1, 20: 20, 50: 50}
    for burst in (None, 1, 20, 50):
        assert most_in_any(10.0, saturate(SlidingWindow(50, 10.0, burst), 60.0)) <= 50


def test_l09_a_delay_is_added_to_every_count() -> None:
    starts = saturate(SlidingWindow(10, 1.0, delay=0.5), 15.0)
    assert most_in_any(1.5, starts) <= 10
    assert most_in_any(1.4, saturate(Bucket(10, 1.0, delay=0.4), 15.0)) <= 24
    assert [round(at) for at, _ in saturate(FixedWindow(1, 10.0, delay=5.0), 40.0)] == [0, 15, 30]


@pytest.mark.parametrize("burst", [None, 1.0, 5.0, 100.0])
def test_l09_a_bucket_gives_its_burst_at_once_and_its_refill_after_that(burst: float | None) -> None:
    starts = saturate(Bucket(20, 10.0, burst), 100.0)
    for seconds in (0.1, 1.0, 10.0, 33.0):
        assert most_in_any(seconds, starts) <= (burst or 20) + 2.0 * seconds + CLOSE
    assert len(starts) >= (burst or 20) + 2 * 100 - 2


@pytest.mark.parametrize(("limit", "per"), LIMITS)
def test_l09_a_fixed_window_is_spread_over_its_period(limit: int, per: float) -> None:
    starts = saturate(FixedWindow(limit, per), PERIODS * per)
    by_period = [sum(int(at / per + 1e-9) == period for at, _ in starts) for period in range(PERIODS)]
    assert max(by_period) <= limit
    assert sum(by_period[1:]) >= 0.97 * limit * (PERIODS - 1)
    assert max(gaps(starts, 0.0)) <= 2.2 * per / limit


def test_l09_tokens_count_from_the_start_and_settling_corrects_the_amount_not_the_time() -> None:
    window = SlidingWindow(1000, 10.0, burst=1000)
    take(window, 800, 0.0)
    assert window.left(5.0) == 200
    window.amend(-700, 0.0, 5.0)  # it used 100
    assert window.left(5.0) == 900
    window.amend(400, 0.0, 6.0)  # or rather 500
    assert window.left(6.0) == 500
    assert window.left(10.2) == 1000  # all of it leaves with the start
    window.amend(300, 0.0, 11.0)
    assert window.left(11.0) == 1000


def test_l09_what_started_in_a_fixed_window_is_corrected_until_it_ends() -> None:
    window = FixedWindow(1000, 10.0, burst=1000)
    take(window, 800, 3.0)  # and so the window begins at 3.0
    window.amend(-700, 3.0, 5.0)
    assert window.left(5.0) == 900
    window.amend(-50, 2.9, 6.0)  # of the window before
    assert window.left(6.0) == 900
    window.amend(300, 3.0, 13.1)
    assert window.left(13.1) == 1000


def test_l09_what_started_while_the_event_loop_stood_still_counts_from_when_it_ran_again() -> None:
    window = SlidingWindow(10, 1.0, burst=10)
    for at in (0.0, 0.2, 0.4):
        take(window, 1, at)
    window.retime(0.1, 0.9)
    assert window.left(1.1) == 8  # the first has left; the others reached the provider at 0.9
    assert window.left(1.85) == 8
    assert window.left(1.95) == 10


def test_l09_large_calls_pass_once_the_whole_burst_is_there() -> None:
    starts = saturate(SlidingWindow(10_000, 60.0), 12 * 60.0, (100.0, 3_000.0, 10_000.0))
    assert {amount for _, amount in starts} == {100.0, 3_000.0, 10_000.0}
    assert most_in_any(60.0, starts) <= 10_000


_MAKES: list[Callable[[float, float, float | None], Window]] = [SlidingWindow, Bucket, FixedWindow]
_STEPS = st.lists(
    st.tuples(
        st.sampled_from(["start", "start", "wait", "hold", "give back", "amend"]), st.integers(1, 8), st.floats(0, 4)
    ),
    max_size=80,
)


@given(make=st.sampled_from(_MAKES), limit=st.integers(1, 20), burst=st.none() | st.integers(1, 20), steps=_STEPS)
@settings(max_examples=max(100, int(3000 * SCALE)))
def test_l09_no_schedule_exceeds_a_window(
    make: Callable[[float, float, float | None], Window],
    limit: int,
    burst: int | None,
    steps: list[tuple[str, int, float]],
) -> None:
    """Amounts are taken when `room` allows, held and given back, and settled; a model counts what started."""
    burst = None if burst is None else min(burst, limit)
    window, now = make(limit, 10.0, burst), 5.0
    starts: list[list[float]] = []
    held: list[float] = []
    for what, amount, seconds in steps:
        if what == "wait":
            now += seconds
        elif what == "start" and window.room(now) >= amount:
            now += 1e-6  # no two calls start at the same time
            take(window, amount, now)
            starts.append([now, amount])
        elif what == "hold" and window.room(now) >= amount:
            window.hold(amount, now)
            held.append(amount)
        elif what == "give back" and held:
            window.give_back(held.pop(), now)
        elif what == "amend" and starts and starts[-1][1] > 1:
            window.amend(-1, starts[-1][0], now)
            starts[-1][1] -= 1
        assert window.left(now) >= -CLOSE
        _check(window, limit, [(at, amount) for at, amount in starts])
        if not held and window.limit >= 1:
            opens_at = window.opens_at(1, now)
            assert now <= opens_at <= now + 25.0  # a large amount leaves a debt
            if opens_at == now:
                assert window.room(now) >= 1 - CLOSE


def _check(window: Window, limit: int, starts: list[Start]) -> None:
    if isinstance(window, SlidingWindow):
        assert most_in_any(10.0, starts) <= limit + CLOSE
    elif isinstance(window, Bucket):
        for nth, (first, _) in enumerate(starts):
            for seconds in (1.0, 10.0, 25.0):
                seen = sum(amount for at, amount in starts[nth:] if at <= first + seconds)
                assert seen <= window.burst + window.rate * seconds + CLOSE


@given(make=st.sampled_from(_MAKES), limit=st.integers(1, 30), taken=st.integers(0, 30), amount=st.integers(1, 30))
def test_l09_an_amount_may_be_taken_when_it_was_said_to_open(
    make: Callable[[float, float, float | None], Window], limit: int, taken: int, amount: int
) -> None:
    window, now, amount = make(limit, 10.0, None), 3.0, min(amount, limit)
    for _ in range(min(taken, limit)):
        now += 0.01
        if window.room(now) >= 1:
            take(window, 1, now)
    for _ in range(50):
        opens_at = window.opens_at(amount, now)
        if opens_at <= now:
            break
        now = opens_at
    assert window.room(now) >= amount - CLOSE
    assert now <= 3.0 + 0.01 * taken + 2 * 10.5


@given(
    make=st.sampled_from(_MAKES),
    burst=st.none() | st.integers(1, 20),
    starts=st.lists(st.tuples(st.floats(0, 4), st.integers(1, 20)), max_size=12),
    amount=st.integers(1, 20),
    seconds=st.floats(0, 12),
)
@example(make=SlidingWindow, burst=20, starts=[(0.0, 1), (0.0, 1), (0.5, 18)], amount=10, seconds=10.0)
@settings(max_examples=max(100, int(1000 * SCALE)))
def test_l09_nothing_may_be_taken_before_it_was_said_to_open(
    make: Callable[[float, float, float | None], Window],
    burst: int | None,
    starts: list[tuple[float, int]],
    amount: int,
    seconds: float,
) -> None:
    """Who waits looks again when the window is said to open. If it opened sooner, the call would wait for nothing."""
    window, now = make(20, 10.0, burst), 5.0
    for pause, taken in starts:
        now += pause
        if window.room(now) >= taken:
            take(window, taken, now)
    now += seconds
    opens_at = window.opens_at(amount, now)
    looks = 40
    for nth in range(looks):
        then = now + (min(opens_at, now + 25.0) - now) * nth / looks
        if then < opens_at - 1e-3:
            assert copy.deepcopy(window).room(then) < amount - CLOSE, f"{then} < {opens_at}"


@pytest.mark.parametrize("make", [SlidingWindow, FixedWindow, Bucket])
def test_l09_tokens_are_used_to_the_full_by_calls_of_up_to_five_percent(make: Callable[..., Window]) -> None:
    starts = saturate(make(30_000, 60.0), 12 * 60.0, (300.0, 1000.0, 1500.0))
    assert sum(amount for at, amount in starts if at >= 60.0) >= 0.97 * 30_000 * 11


def test_l09_what_a_bucket_has_overflowed_does_not_come_back() -> None:
    """A call that took much and used little ends after the bucket was full again."""
    bucket = Bucket(1000, 60.0)
    take(bucket, 1000, 0.0)
    assert bucket.left(60.0) == pytest.approx(1000)
    take(bucket, 1000, 60.0)
    bucket.amend(-990, 0.0, 61.0)
    assert bucket.left(61.0) <= 20


def test_l09_what_a_call_has_overspent_leaves_with_its_window() -> None:
    window = SlidingWindow(1000, 60.0)
    take(window, 100, 0.0)
    window.amend(49_900, 0.0, 0.0)
    assert window.room(59.0) <= 0
    assert window.opens_at(100, 70.0) == 70.0
