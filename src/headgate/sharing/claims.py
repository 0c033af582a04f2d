"""Idempotency keys that several processes share: a kind of shared state (see `protocol`). Pure.

Each key has a state: who runs its work, who follows, and how it ended. Each submit is a participant with a token of its
own, so a message that is repeated changes nothing. It asks for the key, and the answer is one of

    yours    run the work, then say how it ended; or leave, if that should count for nobody
    follow   another participant runs it. Ask again when woken: it has ended, or the key is free
    ended    how it ended

The claim of an owner that has left or is gone belongs to the first that asks. Only its owner can end a claim, so a late
result of a process that lost its lease changes nothing.

The text of a key that nobody holds is kept for `SLACK` seconds, for followers that have not asked again yet and for
messages that are under way. Then the store may delete it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, Literal, NamedTuple

from headgate.core.key_windows import Window, checked_window, holds_key
from headgate.errors import StoreFormatTooNew, StoreWriteFailed
from headgate.sharing.protocol import Message, Turn, exchange, mapping, number, row, string
from headgate.sharing.states import Outcome, Seen

SLACK: Final = 3600.0
"""Seconds for which the text of a key is kept although nobody can hold it by that text any more."""


class Work(NamedTuple):
    """What a key stands for."""

    function: str
    """The function by name."""
    digest: str
    """Of the function and its arguments; "" if there is none."""
    window: Window


class Ask(NamedTuple):
    """What a submit says, at first and whenever it is woken."""

    work: Work
    reruns: bool = False
    """Take a key as free if its result could not be kept."""
    followed: str = ""
    """The owner that it follows. It is told how that task ended even if the key is free again."""


class Ended(NamedTuple):
    """What an owner says: how its task ended."""

    status: str
    result: Any = None
    """With "completed": what JSON can hold."""
    error: tuple[str, str] = ("", "")
    """The type and the text of the exception, with "failed"; reason and policy, with "rejected"."""
    is_lost: bool = False
    """With "completed": the result could not be kept."""


class Answer(NamedTuple):
    """The answer to an `Ask`."""

    kind: Literal["yours", "follow", "ended"]
    owner: str
    """Whose claim it is, or was."""
    work: Work
    """What the key stands for."""
    ended: Ended | None = None


class State:
    """What is known of one key."""

    def __init__(self, owner: str, work: Work) -> None:
        self.owner: str = owner
        """Who runs the work, or has run it; "": the key is free."""
        self.work: Work = work
        self.followers: dict[str, None] = {}
        """Who is woken at the end, in the order in which they asked."""
        self.ended: Ended | None = None
        self.ended_at: float = 0.0

    @property
    def is_active(self) -> bool:
        """True while somebody runs the work."""
        return bool(self.owner) and self.ended is None


class IdempotencyKeys:
    """The kind of the shared state of a key. Implements `sharing.protocol.Kind`."""

    format: int = 1
    """Raised when an older release could misread a state."""
    is_replaceable: bool = False
    """Work that has run would run again."""
    is_plain: bool = False

    def begin(self, body: Ask | Ended | None) -> State:
        """The key is free."""
        return State("", Work("", "", "while_active"))

    def read(self, found: dict[str, Any]) -> State:
        """Read a state. ValueError for anything that `write` does not write."""
        function, digest, window = row(found["work"], 3)
        state = State(string(found["by"]), Work(string(function), string(digest), checked_window(window)))
        state.followers = dict.fromkeys(mapping(found.get("tell", {})))
        if "ended" in found:
            status, result, error, is_lost = row(found["ended"], 4)
            kind, text = row(error, 2)
            state.ended = Ended(string(status), result, (string(kind), string(text)), is_lost is True)
            state.ended_at = number(found["at"])
        return state

    def write(self, state: State) -> dict[str, Any]:
        """The state as JSON can hold it."""
        written: dict[str, Any] = {"by": state.owner, "work": state.work}
        if state.followers:
            written["tell"] = state.followers
        if state.ended is not None:
            written.update(ended=state.ended, at=state.ended_at)
        return written

    def participants(self, state: State) -> Iterable[str]:
        """The owner while it runs the work, and those who follow it."""
        return (state.owner, *state.followers) if state.is_active else state.followers

    def drop(self, state: State, who: str, now: float) -> None:
        """The key is free if it was the owner."""
        state.followers.pop(who, None)
        if who == state.owner and state.is_active:
            state.owner = ""

    def step(self, state: State, turn: Turn, body: Ask | Ended | None) -> Answer | None:
        """Answer whoever asks for the key; end the claim of an owner whose task has ended."""
        answer = _answer(state, turn, body) if isinstance(body, Ask) else None
        if isinstance(body, Ended) and state.owner == turn.me and state.is_active:
            state.ended, state.ended_at = body, turn.now
            turn.wakes.update(state.followers)
            state.followers = {}
        elif not state.owner:
            turn.wakes.update(state.followers)
        turn.expires = _expires(state, turn.now)
        return answer


IDEMPOTENCY_KEYS: Final = IdempotencyKeys()


def exchange_key(message: Message, text: str | None, seen: Seen) -> Outcome:
    """`exchange` for a key. Raises StoreWriteFailed and StoreFormatTooNew for a text that cannot be used."""
    try:
        return exchange(IDEMPOTENCY_KEYS, text, seen, message)
    except StoreFormatTooNew as error:
        raise StoreFormatTooNew(f"an idempotency key cannot be used: {error.message}", remedy=error.remedy) from None
    except StoreWriteFailed:
        raise StoreWriteFailed(
            "the record of an idempotency key cannot be read: it was not written by headgate, or it was damaged",
            remedy="Delete that row of the store while no pool uses it, or use another key.",
        ) from None


def _answer(state: State, turn: Turn, ask: Ask) -> Answer:
    ended = state.ended
    if ended is not None and not (ask.reruns and ended.is_lost):
        is_awaited = state.owner in (ask.followed, turn.me)
        if is_awaited or holds_key(state.work.window, ended.status, state.ended_at, turn.now):
            return Answer("ended", state.owner, state.work, ended)
    if state.is_active and state.owner != turn.me:
        state.followers[turn.me] = None
        return Answer("follow", state.owner, state.work)
    state.owner, state.work, state.ended = turn.me, ask.work, None
    state.followers.pop(turn.me, None)
    return Answer("yours", state.owner, state.work)


def _expires(state: State, now: float) -> float | None:
    """When the text may be deleted: `SLACK` after the key was or will be free. None while it is held for good."""
    if state.ended is None:
        return None if state.owner else now + SLACK
    if not holds_key(state.work.window, state.ended.status, now, now):
        return now + SLACK
    return None if isinstance(state.work.window, str) else state.ended_at + state.work.window + SLACK
