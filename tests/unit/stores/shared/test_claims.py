"""Idempotency keys that processes share: the pure steps, and for how long their texts are kept (G13)."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from headgate.sharing.claims import SLACK, Ended, Work, claim, follow, release, settle
from headgate.sharing.states import Outcome, Seen

NOW = 1000.0


def seen(now: float = NOW, member: str = "m1", gone: tuple[str, ...] = ()) -> Seen:
    return Seen(now, member, lambda other: other in gone)


def work(window: Any = "until_success") -> Work:
    return Work("module:function", "digest", window)


def settled(window: Any, status: str) -> Outcome:
    claimed = claim(1, work(window), None, seen())
    assert claimed.expires is None, "a task that runs holds its key"
    return settle(claimed.reply.owner, Ended(status), claimed.state, seen())


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
    outcome = settled(window, status)
    assert outcome.expires == expires
    again = claim(2, work(window), outcome.state, seen(NOW + 10.0, "m2"))
    is_held = again.reply.kind == "ended"
    assert is_held == (expires is None or expires > NOW + SLACK)
    if not is_held:
        assert again.expires is None, "it is held again"


def test_g13_who_follows_a_key_finds_its_end_for_a_while_after_it_was_released() -> None:
    claimed = claim(1, work("while_active"), None, seen())
    followed = claim(1, work("while_active"), claimed.state, seen(member="m2"))
    assert followed.reply.kind == "follow"
    assert followed.expires is None
    ended = settle(claimed.reply.owner, Ended("completed", 5), followed.state, seen())
    assert ended.wakes == ["m2"]
    late = follow(claimed.reply.owner, 1, work("while_active"), ended.state, seen(NOW + SLACK, "m2"))
    assert late.reply.kind == "ended"


def test_g13_a_claim_that_was_given_back_leaves_a_text_that_expires() -> None:
    claimed = claim(1, work(), None, seen())
    outcome = release(claimed.reply.owner, claimed.state, seen())
    assert (outcome.state, outcome.expires) == ("", NOW + SLACK)


def test_g13_only_the_owner_ends_a_claim_and_a_late_end_changes_nothing() -> None:
    claimed = claim(1, work(), None, seen())
    taken = claim(1, work(), claimed.state, seen(member="m2", gone=("m1",)))
    assert taken.reply.kind == "yours"
    late = partial(settle, claimed.reply.owner, Ended("completed"))
    assert late(taken.state, seen()) == Outcome(None, reply=False)
    assert late(taken.state, seen(member="m2")) == Outcome(None, reply=False)
    assert settle(taken.reply.owner, Ended("completed"), taken.state, seen(member="m2")).reply is True
