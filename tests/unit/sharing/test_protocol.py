"""The frame around shared states, shown with a trial kind: H04, G20, G21, G24."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from headgate.sharing.protocol import Message, Reply, exchange
from headgate.sharing.states import Outcome, Seen
from tests.support.sharing.spending import SHARED_BUDGET, Allowed, Spending


def say(text: str | None, message: Message, member: str = "m1", gone: set[str] | None = None) -> tuple[str, Reply, Any]:
    seen = Seen(100.0, member, lambda one: one in (gone or set()))
    outcome: Outcome = exchange(SHARED_BUDGET, text, seen, message)
    return outcome.state if outcome.state is not None else text or "", outcome.reply, outcome.wakes


def test_g20_a_message_that_is_said_twice_changes_nothing_the_second_time() -> None:
    text, first, _ = say(None, Message("t", "m1", Spending(10.0, 0.0, 4.0)))
    again, second, _ = say(text, Message("t", "m1", Spending(10.0, 0.0, 4.0)))
    assert (again, second) == (text, first)
    assert first.body == Allowed(4.0, 6.0)


def test_g20_participants_of_a_member_that_is_gone_are_dropped_and_those_of_this_one_never_are() -> None:
    text, _, _ = say(None, Message("t", "m1", Spending(10.0, 0.0, 4.0)))
    text, reply, wakes = say(text, Message("t", "m2", Spending(10.0, 0.0, 1.0)), "m2", {"m1", "m2"})
    assert reply.body == Allowed(1.0, 5.0), "the four of the dead one count as spent"
    assert wakes == set(), "nobody is left to wake"
    assert list(json.loads(text)["parts"]) == ["m2/t"]


def test_g20_whoever_takes_part_under_a_new_id_has_nothing_of_the_former() -> None:
    text, _, _ = say(None, Message("t", "m1", Spending(10.0, 0.0, 4.0)))
    _, reply, _ = say(text, Message("t", "m1", Spending(10.0, 4.0, 1.0)), "m2", {"m1"})
    assert reply.body == Allowed(1.0, 5.0)


def test_g20_two_pools_of_one_process_are_two_participants_and_one_leaves_without_the_other() -> None:
    text, _, _ = say(None, Message("one", "m1", Spending(10.0, 0.0, 4.0)))
    text, reply, wakes = say(text, Message("two", "m1", Spending(10.0, 0.0, 4.0)))
    assert (reply.body, wakes) == (Allowed(4.0, 2.0), {"m1"})
    text, reply, _ = say(text, Message("one", leaves=True))
    assert reply.body is None
    assert list(json.loads(text)["parts"]) == ["m1/two"]


def test_g24_what_cannot_be_read_begins_anew_and_what_is_newer_is_left_alone() -> None:
    text, reply, _ = say("garbage", Message("t", "m1", Spending(10.0, 0.0, 1.0)))
    assert reply.trouble is not None
    assert json.loads(text)["v"] == 1
    newer = '{"v":2}'
    text, reply, _ = say(newer, Message("t", "m1", Spending(10.0, 0.0, 1.0)))
    assert (text, reply.is_usable) == (newer, False)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(["v", "total", "gone", "parts"]), inner)
    ),
)


@given(st.text(max_size=40) | _JSON.map(json.dumps) | _JSON.map(lambda body: json.dumps({"v": 1, "parts": body})))
def test_g24_any_text_gives_an_answer(text: str) -> None:
    _, reply, _ = say(text, Message("t", "m1", Spending(10.0, 0.0, 1.0)))
    assert isinstance(reply, Reply)


class Spenders(RuleBasedStateMachine):
    """Processes that spend, die, lose leases and answers, against a count of what was really spent."""

    def __init__(self) -> None:
        super().__init__()
        self.text: str | None = None
        self.made = 0
        self.gone: set[str] = set()
        self.members: list[dict[str, Any]] = []
        self.spent = 0.0

    @precondition(lambda self: len(self.members) < 4)
    @rule()
    def join(self) -> None:
        self.made += 1
        self.members.append({"id": f"m{self.made}", "answered": None, "granted": 0.0, "spent": 0.0})

    @precondition(lambda self: self.members)
    @rule(nth=st.integers(0, 3), wants=st.integers(0, 5), lost=st.booleans(), twice=st.booleans())
    def speak(self, nth: int, wants: int, lost: bool, twice: bool) -> None:
        one = self.members[nth % len(self.members)]
        message = Message("t", one["answered"], Spending(20.0, one["spent"], float(wants)))
        for _ in range(1 + twice):
            self.text, reply, _ = say(self.text, message, one["id"], self.gone)
        if not lost:
            if one["answered"] != one["id"]:
                one.update(answered=one["id"], granted=0.0, spent=0.0)
            one["granted"] = reply.body.granted

    @precondition(lambda self: self.members)
    @rule(nth=st.integers(0, 3))
    def spend(self, nth: int) -> None:
        one = self.members[nth % len(self.members)]
        if one["granted"] - one["spent"] >= 1.0:
            one["spent"] += 1.0
            self.spent += 1.0

    @precondition(lambda self: self.members)
    @rule(nth=st.integers(0, 3), dies=st.booleans())
    def lose(self, nth: int, dies: bool) -> None:
        one = self.members[nth % len(self.members)]
        self.gone.add(one["id"])
        if dies:
            self.members.remove(one)
        else:
            self.made += 1
            one.update(id=f"m{self.made}", answered=None, granted=0.0, spent=0.0)

    @invariant()
    def never_more_than_there_is(self) -> None:
        held = sum(one["granted"] - one["spent"] for one in self.members)
        assert self.spent + held <= 20.0


@pytest.mark.parametrize("steps", [50])
def test_g10_g20_g21_a_trial_kind_of_forty_lines_is_never_overspent(steps: int, scale: float) -> None:
    run_state_machine_as_test(
        Spenders,
        settings=settings(
            max_examples=max(40, int(400 * scale)),
            stateful_step_count=steps,
        ),
    )
