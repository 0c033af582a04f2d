"""L09: limits that a provider's answers describe, against providers that behave as real ones do, in virtual time."""

from __future__ import annotations

import heapq
import itertools
import json
import math
import random
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from headgate.gate.learned import LearnedLimit
from tests.conftest import SCALE


class Answer(NamedTuple):
    """What a provider answers: was the call accepted, and what do the headers say?"""

    accepted: bool
    limit: float | None
    remaining: float | None
    reset: float | None
    retry_after: float | None = None


class Provider(Protocol):
    """A provider with one limit for one key."""

    def call(self, now: float, amount: float) -> Answer: ...
    def allowed(self, seconds: float) -> float: ...


def _rounded(seconds: float, digits: int) -> float:
    return round(seconds, digits) if digits else float(math.ceil(seconds))


class BucketProvider:
    """OpenAI: refills all the time; `reset` is the time until the bucket is full, `remaining` is rounded down."""

    def __init__(self, limit: float, per: float = 60.0, digits: int = 3) -> None:
        self.limit, self.rate, self.digits = limit, limit / per, digits
        self.left, self.at = float(limit), 0.0

    def call(self, now: float, amount: float) -> Answer:
        self.left, self.at = min(self.limit, self.left + (now - self.at) * self.rate), now
        accepted = self.left >= amount
        retry_after = None if accepted else (amount - self.left) / self.rate
        self.left -= amount if accepted else 0.0
        reset = _rounded((self.limit - self.left) / self.rate, self.digits)
        return Answer(accepted, self.limit, math.floor(self.left), reset, retry_after)

    def allowed(self, seconds: float) -> float:
        return self.rate * seconds


class WindowProvider:
    """Many APIs: so much in each period; `reset` is the time until the next one begins."""

    def __init__(self, limit: float, per: float = 60.0, digits: int = 3) -> None:
        self.limit, self.per, self.digits = limit, per, digits
        self.used, self.period = 0.0, 0

    def call(self, now: float, amount: float) -> Answer:
        if int(now // self.per) != self.period:
            self.period, self.used = int(now // self.per), 0.0
        accepted = self.used + amount <= self.limit
        self.used += amount if accepted else 0.0
        reset = _rounded((self.period + 1) * self.per - now, self.digits)
        return Answer(accepted, self.limit, self.limit - self.used, reset, None if accepted else reset)

    def allowed(self, seconds: float) -> float:
        return self.limit * seconds / self.per


class Boasting:
    """A provider whose headers promise twice what it allows. Its refusals tell the truth."""

    def __init__(self, provider: Provider) -> None:
        self.provider = provider

    def call(self, now: float, amount: float) -> Answer:
        answer = self.provider.call(now, amount)
        assert answer.limit is not None
        assert answer.remaining is not None
        return answer._replace(limit=2 * answer.limit, remaining=answer.remaining + answer.limit)

    def allowed(self, seconds: float) -> float:
        return self.provider.allowed(seconds)


class Exaggerating:
    """A provider whose headers describe a limit that is larger and refills faster than the one that counts."""

    def __init__(self, limit: float, per: float, factor: float) -> None:
        self.real, self.told = BucketProvider(limit, per), BucketProvider(factor * limit, per)

    def call(self, now: float, amount: float) -> Answer:
        answer = self.real.call(now, amount)
        told = self.told.call(now, amount if answer.accepted else 0.0)
        return told._replace(accepted=answer.accepted, retry_after=answer.retry_after)

    def allowed(self, seconds: float) -> float:
        return self.real.allowed(seconds)


class Curt:
    """A provider whose refusals do not say when to call again."""

    def __init__(self, provider: Provider) -> None:
        self.provider = provider

    def call(self, now: float, amount: float) -> Answer:
        return self.provider.call(now, amount)._replace(retry_after=None)

    def allowed(self, seconds: float) -> float:
        return self.provider.allowed(seconds)


SECONDS = 600.0 if SCALE >= 1 else 240.0
"""How long a simulation runs: some periods after the first, in which a limit is learned."""


class Figures(NamedTuple):
    """What a simulation saw after its first period, while calls were always waiting."""

    used: float
    """The accepted amount as a part of what was allowed."""
    refused: float
    """Refused calls as a part of all."""
    gap: float
    """The longest time between two accepted calls."""
    kind: str | None


def simulate(
    provider: Provider,
    *,
    latency: float = 0.2,
    transit: float = 0.01,
    seconds: float = SECONDS,
    warm: float = 60.0,
    amounts: tuple[float, ...] = (1.0,),
    stranger_every: float | None = None,
) -> Figures:
    """Call as fast as the learned limit allows. A call is counted `transit` after it starts, answered `latency` later.

    A stranger uses the same key, if told to.
    """
    chance, numbers, events = random.Random(1), itertools.count(), [(0.0, 0, "look", ())]
    limit = LearnedLimit(counts_tokens=amounts != (1.0,))
    now, last, in_flight, calls, refusals, taken = 0.0, -1.0, 0, 0, 0, 0.0
    accepted_at: list[float] = []
    amount = chance.choice(amounts)
    if stranger_every is not None:
        heapq.heappush(events, (stranger_every, next(numbers), "stranger", ()))
    while now < seconds:
        first = limit.limit if limit.limit is not None else math.inf
        opens_at = limit.opens_at(min(amount, first), now) if limit.is_known or not in_flight else math.inf
        if events and events[0][0] <= max(opens_at, now):
            now, _, what, about = heapq.heappop(events)
            if what == "arrives":
                start, asked = about
                answer = provider.call(now, asked)
                if answer.accepted:
                    accepted_at.append(now)
                if now > warm:
                    calls, refusals = calls + 1, refusals + (not answer.accepted)
                    taken += asked if answer.accepted else 0.0
                at = now + latency * chance.uniform(0.5, 1.5)
                heapq.heappush(events, (at, next(numbers), "answered", (start, answer)))
            elif what == "answered":
                start, answer = about
                in_flight -= 1
                limit.observe(answer.limit, answer.remaining, answer.reset, start=start, now=now)
                if not answer.accepted:
                    limit.refused(answer.retry_after, answer.remaining, start=start, now=now)
            elif what == "stranger":
                assert stranger_every is not None
                taken += (now > warm) * provider.call(now, amounts[0]).accepted * amounts[0]
                heapq.heappush(events, (now + stranger_every, next(numbers), "stranger", ()))
            continue
        now = max(now, opens_at)
        if limit.is_known and limit.room(now) < min(amount, first) - 1e-6:
            now += 1e-4  # what it said was a guess: look again
            continue
        start = last = max(now, last + 1e-6)
        limit.hold(amount, now)
        limit.held -= amount
        limit.count(amount, start, now)
        in_flight += 1
        arrives = now + transit * chance.uniform(0.0, 2.0)
        heapq.heappush(events, (arrives, next(numbers), "arrives", (start, amount)))
        amount = chance.choice(amounts)
    late = [at for at in accepted_at if at > warm]
    gap = max(later - earlier for earlier, later in itertools.pairwise(late))
    return Figures(taken / provider.allowed(seconds - warm), refusals / calls, gap, limit.kind)


LATENCIES = pytest.mark.parametrize("latency", [0.05, 0.2, 2.0, 10.0])
TRANSITS = pytest.mark.parametrize("transit", [0.002, 0.05])


@LATENCIES
@TRANSITS
@pytest.mark.parametrize(("limit", "per", "digits"), [(60, 60.0, 3), (60, 60.0, 0), (600, 60.0, 3), (60, 6.0, 3)])
def test_l09_a_bucket_is_kept_busy_and_hardly_ever_refuses(
    limit: int, per: float, digits: int, latency: float, transit: float
) -> None:
    seen = simulate(BucketProvider(limit, per, digits), latency=latency, transit=transit)
    assert seen.kind == "bucket"
    assert seen.used >= 0.97
    assert seen.refused <= 0.01
    if latency <= 2.0:
        assert seen.gap <= 2 * per / limit + 0.2


@LATENCIES
@TRANSITS
@pytest.mark.parametrize(("limit", "per", "digits"), [(60, 60.0, 3), (60, 60.0, 0), (600, 60.0, 3), (600, 60.0, 0)])
def test_l09_a_window_is_spread_and_hardly_ever_refuses(
    limit: int, per: float, digits: int, latency: float, transit: float
) -> None:
    seen = simulate(WindowProvider(limit, per, digits), latency=latency, transit=transit)
    assert seen.kind == "window"
    assert seen.used >= 0.97
    assert seen.refused <= 0.01
    assert seen.gap <= 2.5 * per / limit + 0.2


@pytest.mark.parametrize("make", [BucketProvider, WindowProvider])
@pytest.mark.parametrize("latency", [0.2, 2.0])
def test_l09_tokens_of_calls_of_different_sizes(make: Callable[..., Provider], latency: float) -> None:
    seen = simulate(make(90_000), latency=latency, amounts=(300.0, 1000.0, 1500.0))
    assert seen.used >= 0.97
    assert seen.refused <= 0.01


@pytest.mark.parametrize("make", [BucketProvider, WindowProvider])
def test_l09_what_others_use_of_the_key_is_seen_in_the_answers(make: Callable[..., Provider]) -> None:
    seen = simulate(make(600), stranger_every=0.3)  # a third of it
    assert seen.used >= 0.95
    assert seen.refused <= 0.03


@pytest.mark.parametrize("make", [BucketProvider, WindowProvider])
@pytest.mark.parametrize("limit", [60, 600])
def test_l09_refusals_correct_headers_that_promise_too_much(make: Callable[..., Provider], limit: int) -> None:
    seen = simulate(Boasting(make(limit)))
    assert seen.used >= 0.97
    assert seen.refused <= 0.01


@pytest.mark.parametrize("latency", [0.05, 0.5])
@pytest.mark.parametrize("factor", [1.2, 2.0])
@pytest.mark.parametrize(("limit", "per"), [(60, 60.0), (600, 60.0), (60, 6.0)])
def test_l09_a_few_refusals_measure_a_bucket_whose_headers_exaggerate(
    limit: int, per: float, factor: float, latency: float
) -> None:
    seen = simulate(Exaggerating(limit, per, factor), latency=latency)
    assert seen.kind == "bucket"
    assert seen.used >= 0.97
    assert seen.refused <= 0.01
    assert seen.gap <= 2 * per / limit + 0.2


@pytest.mark.parametrize("latency", [0.05, 0.5])
@pytest.mark.parametrize("factor", [1.2, 2.0])
@pytest.mark.parametrize(("limit", "per"), [(60, 60.0), (600, 60.0)])
def test_l09_refusals_measure_a_bucket_also_if_they_name_no_wait(
    limit: int, per: float, factor: float, latency: float
) -> None:
    seen = simulate(Curt(Exaggerating(limit, per, factor)), latency=latency)
    assert seen.kind == "bucket"
    assert seen.used >= 0.97
    assert seen.refused <= 0.03


def test_l09_a_rate_that_was_measured_grows_again() -> None:
    """The provider allowed half of what it says for a minute, and then all of it."""

    class Recovering(Exaggerating):
        def call(self, now: float, amount: float) -> Answer:
            return super().call(now, amount) if now < 60.0 else self.told.call(now, amount)

    seen = simulate(Recovering(600, 60.0, 2.0), seconds=max(SECONDS, 300.0), warm=180.0)
    assert seen.used >= 1.9  # of what it allowed at first
    assert seen.refused <= 0.01


def test_l09_a_bucket_that_is_empty_opens_when_there_is_enough_not_when_it_is_full() -> None:
    limit = LearnedLimit()
    for number in range(31):
        limit.count(1.0, number / 1000, number / 1000)
        reset = number + 1.0
        limit.observe(30, 29 - number, reset, start=number / 1000, now=number / 1000 + 1e-4)
    assert limit.kind == "bucket"
    assert limit.opens_at(1.0, 0.04) < 3.0


def test_l09_a_window_that_is_spent_opens_when_it_ends() -> None:
    limit = LearnedLimit()
    for number in range(30):
        at = number / 10
        limit.count(1.0, at, at)
        limit.observe(30, 29 - number, 30.0 - at, start=at, now=at + 0.05)
    assert limit.kind == "window"
    assert limit.opens_at(1.0, 3.0) == pytest.approx(30.0, abs=0.2)


def test_l09_the_kind_is_open_until_two_answers_agree() -> None:
    limit = LearnedLimit()
    assert limit.kind is None
    limit.observe(60, 40, 20.0, start=0.0, now=0.1)
    assert limit.kind is None
    limit.observe(60, 20, 38.5, start=1.5, now=1.6)
    assert limit.kind == "bucket"


def test_l09_a_bucket_holds_no_more_than_its_limit_however_long_nobody_calls() -> None:
    limit = LearnedLimit()
    limit.count(20.0, 0.0, 0.0)
    limit.observe(60, 40, 20.0, start=0.0, now=0.1)
    limit.count(21.5, 1.5, 1.5)
    limit.observe(60, 20, 38.5, start=1.5, now=1.6)
    assert limit.kind == "bucket"
    assert limit.rate == pytest.approx(1.0, rel=0.03)
    assert limit.left(11.6) == pytest.approx(30.0, abs=0.5)
    assert limit.refilled_at(11.6) == pytest.approx(41.6, abs=1.5)
    assert limit.left(1000.0) == 60
    assert limit.refilled_at(1000.0) == 1000.0


def test_l09_a_call_that_was_refused_cannot_be_corrected() -> None:
    limit = LearnedLimit(counts_tokens=True)
    limit.observe(1000, 800, 60.0, start=0.0, now=0.1)
    for start in (1.0, 2.0):
        limit.count(100.0, start, start)
    limit.refused(30.0, None, start=2.0, now=2.1)
    left = limit.left(2.2)
    limit.amend(50.0, 2.0, 2.2)
    assert limit.left(2.2) == left
    limit.amend(50.0, 1.0, 2.2)
    assert limit.left(2.2) == left - 50


def test_l09_retry_after_tells_a_bucket_from_a_window() -> None:
    for after, kind in ((0.9, "bucket"), (40.0, "window")):
        limit = LearnedLimit()
        limit.count(1.0, 0.0, 0.0)
        limit.observe(60, 0, 40.0, start=0.0, now=0.0)
        limit.count(1.0, 0.5, 0.5)
        limit.refused(after, 0.0, start=0.5, now=0.6)
        assert limit.kind == kind
        assert limit.opens_at(1.0, 0.6) == pytest.approx(0.6 + after, abs=0.6)


@pytest.mark.parametrize(
    ("after", "kind"),
    [(1.0, "bucket"), (19.0, "bucket"), (20.0, None), (38.0, None), (39.3, "window"), (60.0, "window")],
)
def test_l09_a_wait_of_less_than_half_the_reset_is_that_of_a_bucket(after: float, kind: str | None) -> None:
    limit = LearnedLimit()
    limit.count(1.0, 0.0, 0.0)
    limit.observe(60, 0, 40.0, start=0.0, now=0.1)
    limit.count(1.0, 0.5, 0.5)
    limit.refused(after, 0.0, start=0.5, now=0.7)  # 39.3 seconds before the end
    assert limit.kind == kind


def test_l09_what_was_set_aside_and_given_back_is_left_again() -> None:
    limit = LearnedLimit()
    limit.observe(60, 40, 30.0, start=0.0, now=0.0)
    limit.hold(10.0, 0.0)
    assert limit.left(0.0) == 30
    limit.give_back(4.0, 0.0)
    assert limit.left(0.0) == 34
    limit.give_back(7.0, 0.0)
    assert limit.left(0.0) == 40, "never more than was set aside"


def test_l09_answers_out_of_order_never_add_to_a_window() -> None:
    limit = LearnedLimit()
    for at in (0.0, 0.1, 0.2):
        limit.count(1.0, at, at)
    limit.observe(60, 7, 30.0, start=0.2, now=0.5)
    limit.observe(60, 9, 30.2, start=0.0, now=0.6)  # sent before, arrives after
    assert limit.left(0.7) <= 7


@given(st.permutations(range(12)), st.sampled_from(["bucket", "window"]))
@settings(max_examples=max(60, int(600 * SCALE)))
def test_l09_any_order_of_answers_leaves_no_more_than_the_provider_has(order: list[int], kind: str) -> None:
    provider = BucketProvider(60) if kind == "bucket" else WindowProvider(60)
    limit, answers = LearnedLimit(), []
    for number in range(30):  # what kind it is, in order
        at = float(number)
        limit.count(1.0, at, at)
        answer = provider.call(at, 1.0)
        limit.observe(answer.limit, answer.remaining, answer.reset, start=at, now=at + 0.1)
    for number in range(12):
        start = 30.0 + number / 2
        limit.count(1.0, start, start)
        answers.append((start, provider.call(start, 1.0)))
    for number in order:
        start, answer = answers[number]
        limit.observe(answer.limit, answer.remaining, answer.reset, start=start, now=37.0)
    left = provider.left + provider.rate * 1.5 if isinstance(provider, BucketProvider) else 60 - provider.used
    assert left - 3 <= limit.left(37.0) <= left + 1


_AMOUNTS = st.none() | st.floats(0, 1e6)
_NEWS = st.lists(
    st.tuples(_AMOUNTS, _AMOUNTS, st.none() | st.floats(0, 1e5), st.floats(0, 30), st.booleans(), st.floats(0, 5)),
    max_size=40,
)
_LENGTHS = st.none() | st.sampled_from([0.0, 1.0, 60.0, 1e9]) | st.floats(1e-9, 1e4)


@given(_NEWS, _LENGTHS)
@example(
    news=[
        (2.0, None, None, 0.0, False, 0.0),
        (None, 1.0, None, 0.0, True, 0.0),
        (156064.0, 0.0, 3.0, 0.0, False, 0.0),
        (None, None, None, 1.0, True, 0.0),  # it waits for a second, at 48,770 a second
        (None, 156053.0, 1.0, 10.0, False, 0.0),  # and the rate is found to be 43 a second
    ],
    per=None,
)
@settings(max_examples=max(100, int(2000 * SCALE)))
def test_l09_l02_whatever_headers_say_a_limit_opens_again(news: list[Any], per: float | None) -> None:
    """Nothing raises, the state survives its trip through JSON, and one call may always ask again."""
    limit, now = LearnedLimit(), 0.0
    for told, remaining, reset, wait, refused, seconds in news:
        now += seconds
        limit.count(1.0, now, now)
        limit.observe(told, remaining, reset, start=now, now=now + 0.1, per=per)
        if refused:
            limit.refused(wait, remaining, start=now, now=now + 0.1)
        copy = LearnedLimit()
        copy.load(json.loads(json.dumps(limit.body())))
        assert copy.body() == limit.body()
    resets = [reset for _, _, reset, *_ in news if reset is not None]
    now += 0.1
    for _ in range(100):
        opens_at = limit.opens_at(min(1.0, limit.limit or 1.0), now)
        assert opens_at < math.inf
        if opens_at <= now:
            break
        now = opens_at
    assert limit.room(now) >= min(1.0, limit.limit or 1.0) - 1e-6
    # two windows whose length alone was told, spread over as little as one call each
    untold = 0.0 if per is None or per > 3600.0 else 2 * per
    assert now <= 250 + 3 * max(resets, default=0.0) + 100 + untold


# -- details -----------------------------------------------------------------------------------------------------------


class DoubleLimit:
    """A bucket whose headers name twice the limit it has, and are right about what remains."""

    def __init__(self, provider: Provider) -> None:
        self.provider = provider

    def call(self, now: float, amount: float) -> Answer:
        answer = self.provider.call(now, amount)
        assert answer.limit is not None
        return answer._replace(limit=2 * answer.limit)

    def allowed(self, seconds: float) -> float:
        return self.provider.allowed(seconds)


def test_l09_a_bucket_that_refills_more_slowly_than_it_says_is_found_out_by_its_refusals() -> None:
    seen = simulate(DoubleLimit(BucketProvider(600)))
    assert seen.used >= 0.97
    assert seen.refused <= 0.01  # one of two if headers were believed


def test_l09_a_bucket_is_known_by_its_rate_although_answers_take_seconds() -> None:
    """Four calls at once: each answer says more is used, and takes longer in proportion to be full."""
    limit = LearnedLimit()
    for number, start in enumerate((0.0, 0.001, 0.002, 0.003)):
        limit.count(1.0, start, start)
        limit.observe(60, 58 - number, (number + 2) / 10 + 0.003, start=start, now=start + 5.0)
    assert limit.kind == "bucket"


def test_l09_tokens_that_an_answer_has_told_of_are_not_settled_again() -> None:
    """The provider took what the request might use; the call used less, and the provider does not give that back."""
    limit = LearnedLimit(counts_tokens=True)
    limit.count(800.0, 1.0, 1.0)
    limit.observe(10_000, 9_200, 4.8, start=1.0, now=1.2)
    limit.amend(-700.0, 1.0, 1.3)
    assert limit.left(1.3) == 9_200
    limit.count(500.0, 2.0, 2.0)
    limit.amend(-400.0, 2.0, 2.1)  # nothing was told of this one
    assert limit.left(2.1) == 9_100


def test_l09_one_storm_of_refusals_is_one_lesson() -> None:
    limit = LearnedLimit()
    for number in range(30):
        start = number / 1000
        limit.count(1.0, start, start)
        limit.observe(600, 599 - number, (number + 1) / 10, start=start, now=start + 0.01)
    for number in range(20):
        limit.count(1.0, 0.1 + number / 1000, 0.1 + number / 1000)
    for number in range(20):
        limit.refused(0.1, 0.0, start=0.1 + number / 1000, now=0.2)
    assert limit.opens_at(1.0, 0.2) <= 0.5, "20 lessons would keep a hundred calls unused"


def test_l09_a_window_that_ends_earlier_than_was_known_is_believed_after_two_answers() -> None:
    limit = LearnedLimit()
    for number in range(5):
        limit.observe(30, 29 - number, 10.0 - number, start=float(number), now=number + 0.05)
    limit.observe(30, 24, 3600.0, start=5.0, now=5.05)  # one absurd answer
    for number in range(3):
        start = 6.5 + number
        limit.observe(30, 20 - number, 10.0 - start, start=start, now=start + 0.05)
    assert limit.opens_at(20.0, 9.0) <= 11.0


def test_l09_another_limit_is_another_window() -> None:
    limit = LearnedLimit()
    for number in range(5):
        limit.observe(50, 49 - number, 3600.0 - number, start=float(number), now=number + 0.05)
    limit.observe(600, 599, 60.0, start=10.0, now=10.05)
    limit.observe(600, 598, 58.0, start=12.0, now=12.05)
    assert limit.opens_at(1.0, 12.1) <= 12.3


def test_l09_a_bucket_is_full_after_its_period_whatever_was_refused() -> None:
    """The limit is cut while many calls are in flight, and nobody says that they were refused."""
    limit = LearnedLimit()
    for number in range(20):
        limit.count(1.0, number / 100, number / 100)
        limit.observe(100, 99 - number, (number + 1) * 0.6, start=number / 100, now=number / 100 + 0.001)
    for number in range(28):
        limit.count(1.0, 1.0 + number / 1000, 1.0 + number / 1000)
    limit.observe(1, 0, 60.0, start=1.02, now=1.5)
    assert limit.opens_at(1.0, 2.0) <= 62.0


def test_l09_what_a_bucket_has_saved_is_spent_evenly_and_not_at_once() -> None:
    """All answers of a burst come at the same time, and so do the calls that take their slots."""
    provider, limit, started = BucketProvider(60, 6.0), LearnedLimit(), []
    now, last = 0.0, -1.0
    while now < 6.0:
        now = max(now, limit.opens_at(1.0, now))
        start = last = max(now, last + 1e-6)
        limit.hold(1.0, now)
        limit.held -= 1.0
        limit.count(1.0, start, now)
        answer = provider.call(now, 1.0)
        limit.observe(answer.limit, answer.remaining, answer.reset, start=start, now=now + 0.001)
        started.append(now)
        now += 0.001
    assert len([at for at in started if at < 1.0]) <= 40
    assert len(started) >= 90
    assert max(later - earlier for earlier, later in itertools.pairwise(started)) <= 0.2


def test_l09_a_refusal_of_the_window_before_says_nothing_about_this_one() -> None:
    limit = LearnedLimit()
    for number in range(30):
        at = number / 10
        limit.count(1.0, at, at)
        limit.observe(30, 29 - number, 30.0 - at, start=at, now=at + 0.05)
    limit.count(1.0, 29.9, 29.9)
    assert limit.left(30.5) == 30.0
    limit.refused(0.1, 0.0, start=29.9, now=30.6)
    assert limit.left(30.6) == 30.0


def test_l09_a_call_that_was_taken_back_has_not_flowed_in() -> None:
    """A grant that no call used is not part of what a bucket accepted between two refusals."""
    limit = LearnedLimit()
    for number in range(30):
        limit.count(1.0, number / 100, number / 100)
        limit.observe(600, 599 - number, (number + 1) / 20, start=number / 100, now=number / 100 + 0.001)
    assert limit.kind == "bucket"
    assert limit.rate == pytest.approx(20.0, rel=0.05)
    now = 1.0
    for _ in range(40):  # it refills by ten a second
        limit.count(1.0, now, now)
        limit.refused(0.05, 0.0, start=now, now=now + 0.001)
        limit.count(1.0, now + 0.05, now + 0.05)
        limit.count(1.0, now + 0.06, now + 0.06)
        limit.amend(-1.0, now + 0.06, now + 0.06)
        now += 0.1
    assert limit.rate == pytest.approx(10.0, rel=0.05)


@pytest.mark.parametrize(
    ("per", "seconds"), [(0.5, 0.05), (1.0, 0.1), (60.0, 6.0), (3600.0, 360.0), (3601.0, 1.0), (0.0, 1.0), (None, 1.0)]
)
def test_l09_a_window_whose_end_is_not_told_is_spread_by_its_length_of_up_to_an_hour(
    per: float | None, seconds: float
) -> None:
    limit = LearnedLimit()
    limit.count(1.0, 0.0, 0.0)
    limit.observe(10, 9, None, start=0.0, now=0.0, per=per)
    limit.hold(1.0, 0.0)
    assert limit.opens_at(1.0, 0.0) == pytest.approx(seconds, rel=0.02)


def test_l09_an_answer_with_headers_replaces_what_refusals_have_shown() -> None:
    provider, limit, now = BucketProvider(60, 6.0), LearnedLimit(), 0.0
    while not limit.is_known:
        now += 0.05
        limit.count(1.0, now, now)
        answer = provider.call(now, 1.0)
        if not answer.accepted and not limit.is_known:
            limit.refused(None, None, start=now, now=now + 0.01)
    assert limit.kind == "bucket"
    assert limit.rate == pytest.approx(10.0, rel=0.2)
    assert limit.limit == pytest.approx(60.0, rel=0.2)
    assert not limit.is_told
    limit.observe(None, 500, None, start=now, now=now + 0.01)
    assert (limit.kind, limit.rate, limit.limit) == (None, None, None)
    assert limit.left(now + 0.02) == 500
