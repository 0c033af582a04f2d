"""L09: what refusals alone tell about a limit."""

from __future__ import annotations

import heapq
import json

from hypothesis import given, settings
from hypothesis import strategies as st

from headgate.gate.refusals import Inference, RefusalMeter
from tests.conftest import SCALE


def storm(meter: RefusalMeter, at: float, accepted: int, refused: int, after: float | None = 1.0) -> Inference | None:
    """Start calls at about the same time; of these the last ones are refused."""
    starts = [at + 1e-6 * number for number in range(accepted + refused)]
    found = [one for start in starts if (one := meter.started(1.0, start)) is not None]
    for start in starts[accepted:]:
        meter.refused(1.0, start, at + 0.05, after)
    return found[0] if found else None


def test_l09_two_refusals_show_the_rate_of_a_bucket_and_the_first_one_its_size() -> None:
    meter = RefusalMeter()
    assert storm(meter, 0.0, accepted=60, refused=8) is None
    assert storm(meter, 1.1, accepted=11, refused=8) is None
    found = storm(meter, 2.2, accepted=11, refused=8)
    assert found is not None
    assert 9.0 <= found.rate <= 11.5
    assert 59.0 <= found.size <= 60.0


def test_l09_the_rate_of_a_window_is_taken_from_the_ends_it_names() -> None:
    meter = RefusalMeter()
    storm(meter, 5.0, accepted=60, refused=8, after=55.0)
    storm(meter, 60.1, accepted=60, refused=8, after=60.0)
    found = storm(meter, 120.2, accepted=1, refused=0)
    assert found is not None
    assert 0.9 <= found.rate <= 1.1


def test_l09_a_pause_is_not_taken_for_a_slow_limit() -> None:
    """Between the two refusals the bucket was full for an hour."""
    meter = RefusalMeter()
    storm(meter, 0.0, accepted=60, refused=8)
    storm(meter, 3600.0, accepted=60, refused=8)
    assert storm(meter, 3601.1, accepted=11, refused=8) is None
    found = storm(meter, 3602.2, accepted=1, refused=0)
    assert found is not None
    assert found.rate >= 9.0


def test_l09_a_trickle_of_calls_is_not_taken_for_a_slow_limit() -> None:
    meter = RefusalMeter()
    storm(meter, 0.0, accepted=60, refused=8)
    for second in range(2, 100):
        assert meter.started(1.0, float(second)) is None
    storm(meter, 100.0, accepted=60, refused=8)
    assert storm(meter, 101.1, accepted=1, refused=0) is None


def test_l09_an_outage_is_not_taken_for_a_slow_limit() -> None:
    meter = RefusalMeter()
    storm(meter, 0.0, accepted=60, refused=8)
    for second in range(1, 600):
        assert storm(meter, second * 1.1, accepted=0, refused=3) is None
    storm(meter, 661.0, accepted=60, refused=8)
    found = storm(meter, 662.1, accepted=1, refused=0)
    assert found is None or found.rate >= 9.0


def test_l09_a_call_that_is_refused_late_belongs_to_its_storm() -> None:
    meter = RefusalMeter()
    storm(meter, 0.0, accepted=60, refused=8)
    for number in range(20):
        meter.started(1.0, 1.1 + 1e-6 * number)
    meter.refused(1.0, 1.1, 1.15, 1.0)  # the first that started is refused first, and half of the others were accepted
    for number in range(11, 20):
        meter.refused(1.0, 1.1 + 1e-6 * number, 1.16, 1.0)
    found = meter.started(1.0, 2.2)
    assert found is not None
    assert found.rate <= 11.0


def test_l09_short_waits_and_slow_answers_show_the_rate_too() -> None:
    """A bucket of ten a second that names exact waits: each time thirty calls rush for one place.

    A refusal takes 0.1 s and the waits are shorter. So a storm is still being refused when the next one starts.
    """
    meter, events = RefusalMeter(), list[tuple[float, str, float]]()
    tokens, at, resumes_at, free, found = 10.0, 0.0, 0.0, 30, None

    def at_time(when: float, what: str, start: float) -> None:
        heapq.heappush(events, (when, what, start))

    at_time(0.0, "start", 0.0)
    while events and found is None:
        now, what, start = heapq.heappop(events)
        assert now < 20
        if what == "start":
            while free and now >= resumes_at:
                free -= 1
                found = found or meter.started(1.0, now + 1e-6 * free)
                at_time(now + 0.1, "asked", now + 1e-6 * free)
            if free:
                at_time(max(now + 1e-4, resumes_at), "start", 0.0)
        elif what == "asked":
            tokens, at = min(10.0, tokens + 10 * (now - at)), now
            if tokens >= 1:
                tokens -= 1
                at_time(now + 0.2, "free", start)
            else:
                resumes_at = max(resumes_at, now + (1 - tokens) / 10)
                meter.refused(1.0, start, now, (1 - tokens) / 10)
                at_time(now, "free", start)
        else:
            free += 1
            at_time(max(now, resumes_at), "start", 0.0)
    assert found is not None
    assert 9.0 <= found.rate <= 12.0


@settings(max_examples=int(300 * SCALE) + 20)
@given(
    st.lists(
        st.tuples(st.floats(0.0, 100.0), st.integers(0, 30), st.integers(0, 5), st.sampled_from([None, 0.0, 1.0, 30.0]))
    ),
    st.integers(0, 8),
)
def test_l09_a_meter_continues_from_what_it_wrote_and_never_divides_by_nothing(
    storms: list[tuple[float, int, int, float | None]], cut: int
) -> None:
    meter, other, now = RefusalMeter(), RefusalMeter(), 0.0
    for number, (pause, accepted, refused, after) in enumerate(storms):
        now += pause
        found = storm(meter, now, accepted, refused, after)
        if number < cut:
            other.load(*json.loads(json.dumps(meter.body())))
        else:
            assert storm(other, now, accepted, refused, after) == found
        assert found is None or (found.rate > 0 and found.size >= 1)
