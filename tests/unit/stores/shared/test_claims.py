"""Idempotency keys that processes share: the pure kind, and for how long its texts are kept (G13, G24)."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from headgate.errors import StoreFormatTooNew, StoreWriteFailed
from headgate.sharing.claims import SLACK, Answer, Ask, Ended, Work, exchange_key
from headgate.sharing.protocol import Message
from headgate.sharing.states import Outcome, Seen

NOW = 1000.0


def work(window: Any = "until_success") -> Work:
    return Work("module:function", "digest", window)


class Key:
    """The text of one key, and the clock and the members of its store."""

    def __init__(self, text: str | None = None) -> None:
        self.text = text
        self.now = NOW
        self.gone: set[str] = set()
        self.expires: float | None = None

    def say(self, who: str, body: Ask | Ended | None) -> Outcome:
        """Have a participant speak; without a body it leaves."""
        member, _, token = who.partition("/")
        seen = Seen(self.now, member, self.gone.__contains__)
        outcome = exchange_key(Message(token, None, body, leaves=body is None), self.text, seen)
        if outcome.state is not None:
            self.text, self.expires = outcome.state, outcome.expires
        return outcome

    def ask(self, who: str, window: Any = "until_success", *, followed: str = "", reruns: bool = False) -> Answer:
        answer: Answer = self.say(who, Ask(work(window), reruns, followed)).reply.body
        return answer


# -- how long a text is kept ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("window", "status", "expires"),
    [
        ("until_success", "completed", None),
        ("until_success", "failed", NOW + SLACK),
        ("forever", "failed", None),
        ("forever", "cancelled", NOW + SLACK),
        ("while_active", "completed", NOW + SLACK),
        (60.0, "completed", NOW + 60 + SLACK),
        (60.0, "failed", NOW + SLACK),
    ],
)
def test_g13_the_text_of_a_key_expires_when_no_window_can_ask_for_it(
    window: Any, status: str, expires: float | None
) -> None:
    key = Key()
    assert key.ask("m1/1", window).kind == "yours"
    assert key.expires is None, "a task that runs holds its key"
    key.say("m1/1", Ended(status))
    assert key.expires == expires
    key.now += 10.0
    is_held = key.ask("m2/2", window).kind == "ended"
    assert is_held == (expires is None or expires > NOW + SLACK)
    if not is_held:
        assert key.expires is None, "it is held again"


def test_g13_who_follows_a_key_finds_its_end_for_a_while_after_it_was_released() -> None:
    key = Key()
    key.ask("m1/1", "while_active")
    assert key.ask("m2/1", "while_active").kind == "follow"
    assert key.expires is None
    assert key.say("m1/1", Ended("completed", 5)).wakes == {"m2"}
    key.now += SLACK
    late = key.ask("m2/1", "while_active", followed="m1/1")
    assert (late.kind, late.ended) == ("ended", Ended("completed", 5))


def test_g13_a_claim_that_was_given_back_leaves_a_text_that_expires() -> None:
    key = Key()
    key.ask("m1/1")
    key.say("m1/1", None)
    assert key.expires == NOW + SLACK
    assert key.ask("m1/2").kind == "yours"


# -- who runs it ------------------------------------------------------------------------------------------------------


def test_g13_only_the_owner_ends_a_claim_and_a_late_end_changes_nothing() -> None:
    key = Key()
    key.ask("m1/1")
    key.gone = {"m1"}
    assert key.ask("m2/1").kind == "yours"
    for late in ("m1/1", "m2/2", "m3/1"):
        outcome = key.say(late, Ended("completed", "late"))
        assert (outcome.state, set(outcome.wakes)) == (None, set())
    key.say("m2/1", Ended("completed", "in time"))
    assert key.ask("m3/1").ended == Ended("completed", "in time")


def test_g13_an_end_that_is_told_under_a_new_id_ends_nothing() -> None:
    key = Key()
    key.ask("m1/1")
    key.gone = {"m1"}
    key.say("m2/1", Ended("completed"))  # the same submit of the same process, which has lost its lease
    assert key.ask("m3/1").kind == "yours"
    assert key.say("m2/1", Ended("completed")).state is None
    assert key.ask("m4/1").kind == "follow"


@pytest.mark.parametrize("last", [Ask(work()), Ended("completed", 1), None])
@pytest.mark.parametrize("who", ["m1/1", "m2/1"])
def test_g13_a_message_that_is_said_twice_changes_nothing_the_second_time(who: str, last: Ask | Ended | None) -> None:
    key = Key()
    key.ask("m1/1")
    key.ask("m2/1")
    first = key.say(who, last)
    again = key.say(who, last)
    assert (again.state, again.reply) == (None, first.reply)


def test_g13_those_who_follow_are_woken_at_the_end_or_if_the_key_is_given_back_and_not_after_they_have_left() -> None:
    for last in (Ended("failed"), None):
        key = Key()
        key.ask("m1/1")
        assert key.ask("m2/1") == Answer("follow", "m1/1", work())
        for follower in ("m3/1", "m4/1", "m5/1"):
            key.ask(follower)
        assert key.say("m3/1", None).wakes == set()
        key.gone = {"m4"}
        assert key.say("m1/1", last).wakes == {"m2", "m5"}


def test_g13_a_claim_whose_owner_died_is_taken_by_exactly_one_follower() -> None:
    key = Key()
    key.ask("m1/1")
    for follower in ("m2/1", "m3/1", "m4/1"):
        key.ask(follower)
    key.gone = {"m1"}
    answers = [key.ask(follower, followed="m1/1") for follower in ("m2/1", "m3/1", "m4/1") * 2]
    assert [answer.kind for answer in answers] == ["yours", "follow", "follow"] * 2
    assert key.say("m2/1", Ended("completed", 7)).wakes == {"m3", "m4"}
    assert key.ask("m3/1", followed="m2/1").ended == Ended("completed", 7)


class Processes(RuleBasedStateMachine):
    """Processes that submit one key, die, lose leases and repeat themselves, against a list of who runs it."""

    def __init__(self) -> None:
        super().__init__()
        self.key = Key()
        self.made = 0
        self.submits: list[dict[str, Any]] = []
        self.result: Any = None

    def new_id(self) -> str:
        self.made += 1
        return f"m{self.made}"

    @precondition(lambda self: len(self.submits) < 4)
    @rule()
    def submit(self) -> None:
        self.submits.append({"who": f"{self.new_id()}/t", "told": None, "owner": ""})

    @precondition(lambda self: self.submits)
    @rule(nth=st.integers(0, 3), times=st.integers(1, 2))
    def ask(self, nth: int, times: int) -> None:
        one = self.submits[nth % len(self.submits)]
        if one["told"] in (None, "follow"):
            for _ in range(times):
                answer = self.key.ask(one["who"], followed=one["owner"])
            if answer.ended is None:
                assert self.result is None
            elif answer.ended.status == "completed":
                assert answer.ended.result == self.result
            else:
                assert answer.owner == one["owner"], "only who followed a task gets an end that frees the key"
            one.update(told=answer.kind, owner=answer.owner)

    @precondition(lambda self: self.submits)
    @rule(nth=st.integers(0, 3), completes=st.booleans(), leaves=st.booleans())
    def end(self, nth: int, completes: bool, leaves: bool) -> None:
        one = self.submits[nth % len(self.submits)]
        if one["told"] in ("yours", "lost"):
            if completes and not leaves and one["told"] == "yours":
                self.result = one["who"]
            status = "completed" if completes else "cancelled"
            wakes = set(self.key.say(one["who"], None if leaves else Ended(status, one["who"])).wakes)
            if one["told"] == "yours":
                assert wakes >= {
                    other["who"].partition("/")[0]
                    for other in self.submits
                    if (other["told"], other["owner"]) == ("follow", one["who"])
                }
        else:
            self.key.say(one["who"], None)
        self.submits.remove(one)

    @precondition(lambda self: self.submits)
    @rule(nth=st.integers(0, 3), dies=st.booleans())
    def lose(self, nth: int, dies: bool) -> None:
        one = self.submits[nth % len(self.submits)]
        self.key.gone.add(one["who"].partition("/")[0])
        if dies:
            self.submits.remove(one)
        else:
            one.update(who=f"{self.new_id()}/t", told="lost" if one["told"] in ("yours", "lost") else None)

    @invariant()
    def runs_once(self) -> None:
        running = [one["who"] for one in self.submits if one["told"] == "yours"]
        assert len(running) <= (self.result is None)


def test_g13_a_key_is_run_by_one_process_at_a_time_and_never_after_it_was_completed(scale: float) -> None:
    run_state_machine_as_test(
        Processes,
        settings=settings(
            max_examples=max(60, int(600 * scale)),
            stateful_step_count=40,
        ),
    )


# -- what others wrote ------------------------------------------------------------------------------------------------

_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["v", "by", "work", "tell", "ended", "at"]), inner)
    ),
)
_KNOWN = {"v": 1, "by": "m9/1", "work": ["m:f", "d", "forever"], "ended": ["completed", 5, ["", ""], False], "at": 1.0}
_CHANGED = st.dictionaries(st.sampled_from(sorted(_KNOWN)), _JSON).map(lambda changes: {**_KNOWN, **changes})


@given(st.text(max_size=40) | _JSON.map(json.dumps) | _CHANGED.map(json.dumps))
def test_g24_any_text_gives_an_answer_or_a_clear_error_and_is_then_left_alone(text: str) -> None:
    for body in (Ask(work()), Ended("completed"), None):
        key = Key(text)
        try:
            answer = key.say("m1/1", body).reply.body
        except (StoreWriteFailed, StoreFormatTooNew):
            assert key.text == text
        else:
            assert isinstance(answer, Answer) == isinstance(body, Ask)


@pytest.mark.parametrize(
    "change",
    [
        {"by": None},
        {"work": ["f", "d"]},
        {"work": [1, "d", "forever"]},
        {"work": ["f", "d", "sometimes"]},
        {"tell": ["m2/1"]},
        {"ended": "completed"},
        {"ended": ["completed", float("nan"), ["", ""], False]},
        {"ended": ["failed", None, "os:system", False]},
        {"at": "yesterday"},
    ],
)
def test_g24_a_damaged_text_is_a_clear_error_and_is_not_replaced(change: dict[str, Any]) -> None:
    key = Key(json.dumps({**_KNOWN, **change}))
    with pytest.raises(StoreWriteFailed, match="cannot be read") as caught:
        key.ask("m1/1")
    assert "use another key" in str(caught.value)
    assert Key(json.dumps(_KNOWN)).ask("m1/1").ended == Ended("completed", 5)


def test_g24_a_text_of_a_newer_release_is_left_alone() -> None:
    key = Key('{"v":2}')
    with pytest.raises(StoreFormatTooNew, match="format 2 is newer than 1"):
        key.ask("m1/1")
