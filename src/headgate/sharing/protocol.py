"""The frame around every kind of shared state: who takes part, who is gone, and what may be in the text. Pure.

A state is a small JSON text with what its *kind* keeps and a part for each participant: a pool of a process, named
`<member>/<token>`. A participant sends one message at a time. `exchange` reads the state, lets the kind forget
participants that are gone, hands it the message, and writes what it has become. Because steps may run twice, a message
names all that its sender holds, or has a number. Nothing but ids and numbers is in a state: no value of a resource, no
argument, no reason, which may contain one.

A text that cannot be read is replaced by a new state, and the reply says so. One that a newer release wrote is left
alone, and whoever asks is told not to take part.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Protocol, TypeVar

from headgate.sharing.states import Outcome, Seen

S = TypeVar("S")


class Message(NamedTuple):
    """What a participant says."""

    token: str
    """Tells pools of one process apart."""
    member: str | None = None
    """The id under which the process took part when it was last answered; None: it has not taken part yet."""
    body: Any = None
    """What its kind understands; None: it only leaves."""
    leaves: bool = False
    """The pool is gone."""


class Reply(NamedTuple):
    """What it is told."""

    now: float
    member: str
    body: Any = None
    trouble: str | None = None
    """Why the text could not be used, if so."""
    is_usable: bool = True
    """Whether this headgate can take part at all."""


class Turn(NamedTuple):
    """One run of a step, as a kind sees it."""

    me: str
    """The participant that speaks."""
    now: float
    """By the clock of the store."""
    is_new: bool
    """Has it another id than when it was last answered? Then what it counted means nothing."""
    wakes: set[str]
    """The participants to wake, which the kind fills."""


class Kind(Protocol[S]):
    """What differs between kinds of shared states."""

    @property
    def format(self) -> int:
        """The number of the format that `write` writes."""
        ...

    def begin(self, body: Any, /) -> S:
        """The state if nobody has been there, by the body of the first message."""
        ...

    def read(self, found: dict[str, Any], body: Any, is_alone: Callable[[Iterable[str]], bool], /) -> S:
        """The state that `write` wrote. ValueError for anything else.

        `is_alone` tells whether none of some participants is alive, apart from those of this process.
        """
        ...

    def write(self, state: S, /) -> dict[str, Any]:
        """The state as JSON can hold it."""
        ...

    def participants(self, state: S, /) -> Iterable[str]:
        """All that have a part in the state."""
        ...

    def drop(self, state: S, who: str, now: float, /) -> None:
        """Forget a participant that is gone: what it held is free, or counts as used."""

    def step(self, state: S, turn: Turn, body: Any, /) -> Any:
        """Take in what a participant says, give what is free to whoever is next, and return what it is told.

        `body` is None if it leaves.
        """
        ...


class TooNew(ValueError):
    """A state of a newer release."""


def exchange(kind: Kind[S], text: str | None, seen: Seen, message: Message) -> Outcome:
    """Take a message of one participant, and answer it."""
    trouble = None
    try:
        state = _read(kind, text, seen, message)
    except TooNew as error:
        return Outcome(None, Reply(seen.now, seen.member, trouble=str(error), is_usable=False))
    except ValueError as error:
        state, trouble = kind.begin(message.body), str(error)
    turn = Turn(f"{seen.member}/{message.token}", seen.now, message.member != seen.member, set())
    for who in list(kind.participants(state)):
        if (who == turn.me and message.leaves) or _is_gone(who, seen):
            kind.drop(state, who, seen.now)
    body = kind.step(state, turn, None if message.leaves else message.body)
    after = json.dumps({"v": kind.format, **kind.write(state)}, sort_keys=True, separators=(",", ":"), allow_nan=False)
    wakes = {member_of(who) for who in turn.wakes if who != turn.me}
    return Outcome(None if after == text else after, Reply(seen.now, seen.member, body, trouble), wakes)


def member_of(who: str) -> str:
    """The id of the process of a participant."""
    return who.rpartition("/")[0]


def _is_gone(who: str, seen: Seen) -> bool:
    member = member_of(who)
    return member != seen.member and seen.is_gone(member)


def parsed(text: str | None, kind: Kind[Any]) -> dict[str, Any]:
    """The JSON of a state. ValueError for what is none, TooNew for one of a newer release."""
    try:
        found = json.loads(text or "null")
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(found, dict) or type(found.get("v")) is not int:
        raise ValueError("it is not a shared state")
    if found["v"] > kind.format:
        raise TooNew(f"its format {found['v']} is newer than {kind.format}")
    return found


def _read(kind: Kind[S], text: str | None, seen: Seen, message: Message) -> S:
    if text is None:
        return kind.begin(message.body)

    def is_alone(names: Iterable[str]) -> bool:
        return all(member_of(who) == seen.member or seen.is_gone(member_of(who)) for who in names)

    return kind.read(parsed(text, kind), message.body, is_alone)


# -- reading what may be anything --------------------------------------------------------------------------------------


def mapping(value: Any) -> dict[str, Any]:
    """A mapping, or ValueError."""
    if not isinstance(value, dict):
        raise ValueError("a mapping is missing")
    return value


def row(value: Any, size: int) -> list[Any]:
    """A list of this length, or ValueError."""
    if not isinstance(value, list) or len(value) != size:
        raise ValueError("a row has the wrong length")
    return value


def whole(value: Any) -> int:
    """A count, or ValueError."""
    if type(value) is not int or not 0 <= value < 2**53:
        raise ValueError("a count is not a whole number")
    return value


def number(value: Any, least: float = -math.inf) -> float:
    """A finite number that is not below `least`, or ValueError."""
    if type(value) not in (int, float) or not math.isfinite(value) or value < least:
        raise ValueError("an amount or a time is not a number")
    return float(value)
