"""W26: when the next worker is started after starts that failed, and when callers are told. Without processes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.workers.processes import restarts
from headgate.workers.processes.restarts import DEATHS, FIRST, LONGEST, PATIENCE, WITHIN, Starts


def fail_again(starts: Starts, now: float) -> float:
    """Try and fail at this moment; when the next try is due."""
    starts.trying()
    return now + starts.failed(now)


def test_w26_pauses_double_up_to_half_a_minute() -> None:
    starts, now, pauses = Starts(), 100.0, []
    for _ in range(60):
        due = fail_again(starts, now)
        pauses.append(due - now)
        now = due
    assert [round(pause, 6) for pause in pauses[:11]] == [0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6, 30.0]
    assert {round(pause, 6) for pause in pauses[11:]} == {LONGEST}


def test_w26_failures_during_a_pause_belong_to_the_try_before_it() -> None:
    starts = Starts()
    starts.ready()
    pauses = [starts.failed(10.0), starts.failed(10.0), starts.failed(10.0 + FIRST)]
    assert pauses == pytest.approx([FIRST, FIRST, 0.0])
    assert starts.failed(11.0) == 0.0, "it is overdue, not put off"
    assert starts.failed_tries == 1


def test_w26_a_worker_that_is_ready_ends_the_pauses() -> None:
    starts, now = Starts(), 0.0
    for _ in range(8):
        now = fail_again(starts, now)
    assert starts.keeps_failing(now)
    starts.ready()
    assert (starts.failed_tries, starts.next_try, starts.keeps_failing(now)) == (0, None, False)
    assert starts.failed(now) == pytest.approx(FIRST)


def test_w26_only_a_pool_that_never_had_a_worker_is_given_up() -> None:
    starts = Starts()
    for number in range(DEATHS):
        assert not starts.hopeless
        fail_again(starts, number * WITHIN / (DEATHS - 1))
    assert starts.hopeless
    starts.ready()
    for number in range(20):
        fail_again(starts, 100.0 + number)
        assert not starts.hopeless


def test_w26_deaths_that_are_far_apart_do_not_end_a_pool() -> None:
    starts = Starts()
    for number in range(20):
        fail_again(starts, number * (WITHIN / (DEATHS - 1) + 0.1))
        assert not starts.hopeless


def test_w26_callers_wait_through_a_shortage_of_two_seconds() -> None:
    starts, now = Starts(), 0.0
    starts.ready()
    while now < 2.0:
        now = fail_again(starts, now)
        assert not starts.keeps_failing(now)


def test_w26_callers_are_told_when_starts_keep_failing() -> None:
    starts, now, tried = Starts(), 0.0, 0
    starts.ready()
    while not starts.keeps_failing(now):
        tried += 1
        due = fail_again(starts, now)
        if starts.keeps_failing(now):
            break
        now = due
    assert tried >= DEATHS
    assert PATIENCE <= now <= 4 * PATIENCE


def test_w26_a_start_that_fails_slowly_needs_several_tries_too() -> None:
    starts = Starts()
    starts.ready()
    fail_again(starts, 0.0)
    fail_again(starts, 100.0)
    assert not starts.keeps_failing(100.0)


@given(st.lists(st.tuples(st.sampled_from(["failed", "trying", "ready"]), st.floats(0, 40)), max_size=80))
def test_w26_whatever_happens_pauses_are_bounded_and_ready_pools_go_on(steps: list[tuple[str, float]]) -> None:
    starts, now, in_a_row = Starts(), 0.0, 0
    for step, passed in steps:
        now += passed
        if step == "failed":
            in_a_row += 1
            assert 0.0 <= starts.failed(now) <= restarts.LONGEST
            assert starts.next_try is not None
        elif step == "trying":
            starts.trying()
        else:
            in_a_row = 0
            starts.ready()
        assert starts.failed_tries <= in_a_row
        assert not (starts.ever_ready and starts.hopeless)
        assert not (in_a_row < DEATHS and starts.keeps_failing(now))
