"""L04: a limit that finds from refusals how many calls at a time a provider takes."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.errors import InvalidArgument
from headgate.gate.adaptive import Adaptive, AdaptiveLevel, AdaptiveLimit, join


def clean_round(limit: AdaptiveLimit, now: float) -> bool:
    """As many successes as the limit, of calls that begin and end now, while it is fully used."""
    used = limit.number
    return any(limit.succeeded(now, now, used=used) for _ in range(math.ceil(limit.level.limit)))


def storm(limit: AdaptiveLimit, began: float, now: float) -> list[bool]:
    """All calls that are in flight are refused, one after another."""
    return [limit.refused(began, in_flight, now + in_flight / 1000) for in_flight in range(limit.number, 0, -1)]


# -- the policy --------------------------------------------------------------------------------------------------------


def test_l04_the_policy_is_a_frozen_value_with_these_defaults() -> None:
    assert Adaptive() == Adaptive(4, 1, 200, 5.0) == Adaptive(start=4, least=1, most=200, pause=5.0)
    assert hash(Adaptive()) == hash(Adaptive())
    with pytest.raises(AttributeError):
        Adaptive().most = 3  # type: ignore[misc]


@pytest.mark.parametrize("name", ["start", "least", "most"])
@pytest.mark.parametrize("number", [0, -1, 2.0, True, "4", None, math.nan])
def test_l04_bounds_are_whole_numbers_of_at_least_1(name: str, number: Any) -> None:
    with pytest.raises(InvalidArgument, match=f"{name} of Adaptive must be a whole number >= 1"):
        Adaptive(**{name: number})


@pytest.mark.parametrize("pause", [0, -1.0, math.inf, math.nan, True, "5", None])
def test_l04_a_pause_is_a_number_of_seconds(pause: Any) -> None:
    with pytest.raises(InvalidArgument, match="pause of Adaptive must be a finite number of seconds > 0"):
        Adaptive(pause=pause)


def test_l04_bounds_that_contradict_are_refused_with_what_to_pass() -> None:
    with pytest.raises(InvalidArgument, match="least of Adaptive must be at most most=3, got 9"):
        Adaptive(least=9, most=3, start=3)
    with pytest.raises(InvalidArgument, match="start of Adaptive must be between least=1 and most=3, got 4") as refused:
        Adaptive(most=3)
    assert "start=3" in str(refused.value)
    with pytest.raises(InvalidArgument, match="start=10"):
        Adaptive(least=10)


# -- growth ------------------------------------------------------------------------------------------------------------


def test_l04_slow_start_doubles_with_each_clean_round_up_to_the_bound() -> None:
    limit = AdaptiveLimit(Adaptive(most=50))
    seen = [limit.number]
    for now in range(1, 8):
        clean_round(limit, float(now))
        seen.append(limit.number)
    assert seen == [4, 8, 16, 32, 50, 50, 50, 50]


def test_l04_a_round_has_as_many_successes_as_the_limit() -> None:
    limit = AdaptiveLimit(Adaptive())
    assert [limit.succeeded(1.0, 2.0, used=4) for _ in range(4)] == [False, False, False, True]
    assert limit.number == 8


def test_l04_a_success_while_some_were_free_proves_nothing() -> None:
    limit = AdaptiveLimit(Adaptive())
    assert not any(limit.succeeded(1.0, 2.0) for _ in range(100))


def test_l04_calls_that_began_under_another_limit_prove_nothing() -> None:
    limit = AdaptiveLimit(Adaptive())
    assert clean_round(limit, 10.0)
    assert not any(limit.succeeded(9.9, 11.0, used=8) for _ in range(100))


def test_l04_after_a_cut_it_returns_quickly_to_just_below_and_then_probes_one_step_for_each_pause() -> None:
    limit = AdaptiveLimit(Adaptive(start=100))
    limit.refused(1.0, 100, 2.0)
    assert limit.number == 80
    seen = []
    for now in range(3, 44):  # a clean round each second
        if clean_round(limit, float(now)):
            seen.append((now, round(limit.level.limit, 1)))
    quick, probes = seen[:1], seen[1:]
    assert quick == [(7, 95.0)], "nothing grows for 5 s; then it returns to 0.95 of what was refused"
    assert [now for now, _ in probes] == [12, 17, 22, 27, 32], "one probe in each pause"
    steps = [after - before for before, after in zip([95.0, 99.8, 109.7], [99.8, 109.7, 131.7], strict=True)]
    assert [level for _, level in probes][:3] == [99.8, 109.7, 131.7]
    assert steps == sorted(steps)


def test_l04_a_probe_is_at_least_one_call() -> None:
    limit = AdaptiveLimit(Adaptive(start=3))
    limit.refused(1.0, 3, 2.0)
    assert (limit.number, limit.level.limit) == (2, pytest.approx(2.4))
    for now in (8.0, 9.0, 15.0):
        clean_round(limit, now)
    assert limit.level.limit == pytest.approx(0.95 * 3 + 1)


# -- cuts --------------------------------------------------------------------------------------------------------------


def test_l04_a_refusal_cuts_to_the_part_of_what_was_in_flight() -> None:
    limit = AdaptiveLimit(Adaptive(start=100))
    assert limit.refused(1.0, 50, 2.0)
    assert limit.number == 40


def test_l04_one_storm_is_one_cut() -> None:
    limit = AdaptiveLimit(Adaptive(start=100))
    assert storm(limit, 1.0, 2.0) == [True] + [False] * 99
    assert limit.number == 80


def test_l04_a_fall_is_followed_at_once() -> None:
    limit = AdaptiveLimit(Adaptive(start=100))
    now, cuts = 1.0, 0
    while limit.number > 10:  # what it lets in is refused, again and again, well within one pause
        assert limit.refused(now, limit.number, now + 0.02)
        now, cuts = now + 0.25, cuts + 1
    assert (cuts, now < 5.0) == (10, True)


@pytest.mark.parametrize(
    ("after", "in_flight", "level"), [(19.9, 70, 60.0), (20.0, 70, 60.0), (20.1, 70, 70.0), (5.0, 50, 50.0)]
)
def test_l04_a_refused_level_is_remembered_for_four_pauses_unless_a_lower_one_is_refused(
    after: float, in_flight: int, level: float
) -> None:
    limit = AdaptiveLimit(Adaptive(start=60))
    limit.refused(99.0, 60, 100.0)
    limit.heard(AdaptiveLevel(1, 9, 80.0, 60.0), 101.0)  # it has grown since, above the level that was refused
    assert limit.refused(100.0 + after, in_flight, 100.0 + after)
    assert limit.level.refused == level


def test_l04_it_is_never_cut_below_its_bound() -> None:
    limit = AdaptiveLimit(Adaptive(start=8, least=6))
    for now in range(1, 9):
        limit.refused(now + 0.5, limit.number, now + 0.9)
    assert limit.number == 6


def test_l04_a_call_that_says_nothing_about_the_limit_does_not_cut() -> None:
    limit = AdaptiveLimit(Adaptive())
    assert not limit.refused(1.0, 0, 2.0)
    assert limit.number == 4


def test_l04_the_rest_is_brief_and_grows_only_while_nothing_succeeds() -> None:
    limit = AdaptiveLimit(Adaptive(start=64))
    rests = []
    for now in range(6):
        limit.refused(now + 0.5, limit.number, now + 0.9)
        rests.append(limit.rest)
    assert rests == [0.2, 0.4, 0.8, 1.0, 1.0, 1.0]
    limit.succeeded(0.1, 7.0)
    limit.refused(7.5, limit.number, 8.0)
    assert limit.rest == 0.2


# -- many processes ----------------------------------------------------------------------------------------------------

LEVELS = st.builds(
    AdaptiveLevel,
    st.integers(0, 3),
    st.integers(0, 3),
    st.sampled_from([1.0, 2.5, 8.0]),
    st.sampled_from([0.0, 9.0]),
    st.sampled_from([0.0, 0.05, 0.4]),
)


@given(LEVELS, LEVELS, LEVELS)
def test_l04_levels_join_in_any_order_and_however_often(
    one: AdaptiveLevel, two: AdaptiveLevel, three: AdaptiveLevel
) -> None:
    assert join(one, two) == join(two, one)
    assert join(join(one, two), three) == join(one, join(two, three))
    assert join(one, one) == one


def test_l04_a_cut_counts_more_than_any_growth_before_it() -> None:
    assert join(AdaptiveLevel(1, 9, 80.0, 40.0), AdaptiveLevel(2, 0, 20.0, 25.0)).limit == 20.0
    assert join(AdaptiveLevel(1, 3, 30.0), AdaptiveLevel(1, 4, 33.0)).limit == 33.0, "a rise is followed by all"


def test_l04_two_processes_that_meet_one_storm_cut_once() -> None:
    one, other = AdaptiveLimit(Adaptive(start=100)), AdaptiveLimit(Adaptive(start=100))
    one.refused(1.0, 100, 2.0)
    other.refused(1.0, 96, 2.1)
    assert other.heard(one.level, 2.2) is False, "its own is the lower one of the two"
    assert one.heard(other.level, 2.2)
    assert one.level == other.level
    assert one.number == 76


def test_l04_calls_from_before_a_cut_was_heard_of_belong_to_its_storm() -> None:
    one, other = AdaptiveLimit(Adaptive(start=100)), AdaptiveLimit(Adaptive(start=100))
    one.refused(1.0, 100, 2.0)
    assert other.heard(one.level, 2.4)
    assert not other.refused(2.3, 99, 2.5), "after the cut by any clock, but under the old limit"
    assert other.refused(2.6, 80, 2.7)


# -- random histories --------------------------------------------------------------------------------------------------

POLICIES = st.builds(
    lambda least, start, most, pause: Adaptive(least + start, least, least + start + most, pause),
    *(st.integers(1, 5), st.integers(0, 30), st.integers(0, 80), st.sampled_from([0.5, 2.0, 5.0])),
)
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["ok", "ok", "round", "idle", "refused", "storm", "wait"]), st.floats(0.0, 3.0), st.floats(0, 1)
    ),
    max_size=80,
)


class Naive:
    """The rule as the specification says it, with a list of all that happened."""

    def __init__(self, policy: Adaptive) -> None:
        self.policy, self.limit = policy, float(policy.start)
        self.cuts: list[float] = []
        self.changes = [-math.inf]
        self.probed = -math.inf
        self.refused_level: float | None = None
        self.step = 0.05
        self.round: list[float] = []

    def ok(self, began: float, now: float, full: bool) -> None:
        if not full or began < self.changes[-1]:
            return
        self.round.append(now)
        if len(self.round) < self.limit:
            return
        self.round = []
        last = self.cuts[-1] if self.cuts else None
        grown = self.limit
        if last is None or self.refused_level is None:
            grown = 2 * self.limit
        elif now >= last + self.policy.pause:
            below = 0.95 * self.refused_level
            if self.limit < below:
                grown = min(below, 1.25 * self.limit)
            elif now >= self.probed + self.policy.pause:
                grown, step = self.limit + max(1.0, self.step * self.limit), min(1.0, 2 * self.step)
        if min(grown, self.policy.most) > self.limit:
            if last is not None and self.refused_level is not None and self.limit >= 0.95 * self.refused_level:
                self.step = step
            self.limit = min(grown, float(self.policy.most))
            self.changes.append(now)
            self.probed = now

    def no(self, began: float, in_flight: int, now: float) -> None:
        if self.cuts and began <= self.cuts[-1]:
            return
        level = min(float(in_flight), self.limit)
        recent = self.cuts and now <= self.cuts[-1] + 4 * self.policy.pause
        if not (recent and self.refused_level is not None and in_flight >= self.refused_level):
            self.refused_level = level
        self.limit = max(float(self.policy.least), 0.8 * level)
        self.cuts.append(now)
        self.changes.append(now)
        self.step, self.round = 0.05, []


@given(POLICIES, STEPS)
def test_l04_random_histories_keep_the_rule(policy: Adaptive, steps: list[tuple[str, float, float]]) -> None:
    limit, naive, now = AdaptiveLimit(policy), Naive(policy), 100.0
    for what, passes, part in steps:
        before, level, last = limit.number, limit.level, limit.last_cut
        now += passes
        began = now - part
        if what in ("ok", "round"):
            for _ in range(1 if what == "ok" else math.ceil(limit.level.limit)):
                used = limit.number
                limit.succeeded(began, now, used=used)
                naive.ok(began, now, full=True)
        elif what == "idle":
            limit.succeeded(began, now)
            assert limit.level == level, "growth only when it was fully used"
        elif what == "refused":
            in_flight = max(1, round(part * limit.number))
            limit.refused(began, in_flight, now)
            naive.no(began, in_flight, now)
        elif what == "storm":
            for in_flight in range(limit.number, 0, -1):
                limit.refused(began, in_flight, now)
                naive.no(began, in_flight, now)
            assert limit.level.cuts <= level.cuts + 1, "one storm is one cut"
        assert policy.least <= limit.number <= policy.most
        assert limit.level.limit == pytest.approx(naive.limit)
        if last is not None and now - last.at < policy.pause:
            assert limit.number <= before, "nothing grows during a pause"
        if limit.level.cuts > level.cuts:
            assert limit.last_cut is not None
            assert limit.last_cut.at == now


@given(st.lists(st.tuples(st.integers(0, 2), st.sampled_from(["round", "refused", "tell"]), st.integers(0, 2))))
def test_l04_processes_that_have_told_each_other_everything_agree(steps: list[tuple[int, str, int]]) -> None:
    limits = [AdaptiveLimit(Adaptive()) for _ in range(3)]
    known = [AdaptiveLevel(0, 0, 4.0)]
    for now, (who, what, whom) in enumerate(steps):
        if what == "round":
            clean_round(limits[who], float(now))
        elif what == "refused":
            limits[who].refused(now - 0.5, limits[who].number, float(now))
        else:
            limits[whom].heard(limits[who].level, float(now))
        known.append(limits[who].level)
    for level in [*reversed(known), *known]:
        for limit in limits:
            limit.heard(level, len(steps) + 1.0)
    assert len({limit.level for limit in limits}) == 1
    assert limits[0].level.cuts == max(level.cuts for level in known)
