"""Which errors are tried again, after which pauses, and how often in all."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate import Backoff, InvalidArgument, InvalidType
from headgate.calls.retry_budget import LEAST, SECONDS, RetryBudget, checked_retry_budget
from headgate.calls.retrying import checked_backoff, checked_retry_on, is_retried

CHANCE = st.floats(0.0, 1.0)


def test_l10_pauses_double_up_to_the_most() -> None:
    backoff = Backoff(0.5, jitter=False)
    assert [backoff.seconds(failures, 0.3) for failures in range(1, 10)] == [0.5, 1, 2, 4, 8, 16, 32, 60, 60]
    assert Backoff(1.5, factor=1, jitter=False).seconds(7, 0.9) == 1.5


@given(st.floats(0, 1e6), st.floats(1, 1e6), st.floats(0, 1e6), st.integers(1, 10**9), CHANCE, st.floats(0, 1e6))
def test_l10_a_pause_is_between_half_and_all_of_what_is_due(
    first: float, factor: float, most: float, failures: int, chance: float, at_least: float
) -> None:
    sure = Backoff(first, factor, most, jitter=False).seconds(failures, chance)
    drawn = Backoff(first, factor, most).seconds(failures, chance)
    assert 0 <= sure <= most
    assert sure / 2 <= drawn <= sure
    assert Backoff(first, factor, most).seconds(failures, chance, at_least) == max(at_least, drawn)


def test_l10_pauses_of_calls_that_failed_together_differ() -> None:
    assert Backoff(8.0).seconds(1, 0.0) == 4.0
    assert Backoff(8.0).seconds(1, 1.0) == 8.0


@pytest.mark.parametrize("bad", [-1, math.inf, math.nan, "1", None, True])
@pytest.mark.parametrize("name", ["first", "factor", "most"])
def test_l10_a_backoff_refuses_what_is_no_pause(name: str, bad: Any) -> None:
    with pytest.raises(InvalidArgument, match=f"{name} of a Backoff"):
        Backoff(**{name: bad})


def test_l10_a_backoff_may_be_given_as_its_first_pause() -> None:
    assert checked_backoff(2) == Backoff(2)
    assert checked_backoff(None) is None
    with pytest.raises(InvalidType, match="Backoff"):
        checked_backoff("fast")
    with pytest.raises(InvalidType, match="mapping"):
        checked_backoff({"first": 1})


@pytest.mark.parametrize("bad", ["ValueError", 3, (), (ValueError, "x"), [ValueError], int, ValueError()])
def test_l10_retry_on_takes_classes_of_errors_or_a_function(bad: Any) -> None:
    with pytest.raises(InvalidType, match="retry_on"):
        checked_retry_on(bad)


def test_l10_retry_on_cannot_name_what_ends_a_program() -> None:
    with pytest.raises(InvalidArgument, match="KeyboardInterrupt"):
        checked_retry_on((OSError, KeyboardInterrupt))


def test_l10_a_function_decides_and_one_that_raises_says_no() -> None:
    assert is_retried((OSError, ValueError), TimeoutError())
    assert not is_retried((OSError, ValueError), KeyError())
    assert is_retried(lambda error: "again" in str(error), ValueError("again"))
    error = ValueError("once")
    assert not is_retried(lambda error: error.missing, error)  # type: ignore[attr-defined]
    assert "retry_on raised AttributeError" in error.__notes__[0]


class Unshown(Exception):
    """Its text cannot be had, and no note can be added."""

    def __str__(self) -> str:
        raise RuntimeError

    def add_note(self, note: str) -> None:
        raise RuntimeError


def test_l10_errors_of_any_class_are_judged() -> None:
    def breaks(error: BaseException) -> bool:
        raise Unshown

    error = ValueError()
    assert not is_retried(breaks, error)
    assert "retry_on raised Unshown: (it cannot be shown)" in error.__notes__[0]
    assert not is_retried(breaks, Unshown())


# -- the budget --------------------------------------------------------------------------------------------------------

EVENTS = st.lists(st.tuples(st.sampled_from(["first", "first", "retry"]), st.floats(0, 20)), max_size=120)


class Log:
    """The same budget, which looks at everything that ever happened."""

    def __init__(self, share: float) -> None:
        self.share, self.firsts, self.retries = share, list[float](), list[float]()

    def take(self, now: float) -> bool:
        firsts, retries = (sum(now - at < SECONDS for at in times) for times in (self.firsts, self.retries))
        if retries + 1 > max(LEAST, self.share * firsts):
            return False
        self.retries.append(now)
        return True


@given(EVENTS, st.sampled_from([0.0, 0.1, 0.5, 3.0]))
def test_l11_retries_are_a_share_of_first_attempts(events: list[tuple[str, float]], share: float) -> None:
    """Whole seconds, so that what is counted together is of the same time."""
    budget, log, now = RetryBudget(share), Log(share), 0.0
    for what, pause in events:
        now += math.floor(pause)
        if what == "first":
            budget.began(now)
            log.firsts.append(now)
        else:
            assert budget.take(now) is log.take(now)


def test_l11_a_share_is_never_exceeded_not_even_by_a_part_of_a_retry() -> None:
    budget = RetryBudget(0.25)
    for _ in range(47):
        budget.began(0.0)
    assert sum(budget.take(0.0) for _ in range(20)) == 11


def test_l11_a_first_attempt_that_is_taken_back_counts_no_longer() -> None:
    budget = RetryBudget(1.0)
    for second in range(40):
        budget.began(second)
    for second in range(20):
        budget.take_back(second, 40.0)
    assert budget.allowed == 20
    budget.began(59.5)
    assert budget.allowed == 21
    budget.take_back(1.0, 90.0)
    assert budget.allowed == 10, "its time was over: nothing is taken back twice"
    assert sum(budget.take(90.0) for _ in range(99)) == 10


def test_l11_a_budget_stays_small() -> None:
    budget = RetryBudget(0.2)
    for number in range(100_000):
        budget.began(number / 1_000)
        budget.take(number / 1_000)
    assert len(budget._slices) <= SECONDS + 1
    assert "retry_budget=0.2" in budget.why_spent()


@pytest.mark.parametrize("bad", [-0.1, math.nan, math.inf, "0.2", True])
def test_l11_a_budget_is_a_share(bad: Any) -> None:
    with pytest.raises(InvalidArgument, match="retry_budget"):
        checked_retry_budget(bad)
