"""The frame around every kind of shared state: who takes part, who is gone, and what may be in the text. Pure.

A state is a small JSON text with what its *kind* keeps and a part for each participant: a pool of a process, or one
submit of an idempotency key, named `<member>/<token>`. A participant sends one message at a time. `exchange` reads the
state, lets the kind forget participants that are gone, hands it the message, and writes what it has become. Because
steps may run twice, a message names all that its sender holds, or has a number. Nothing but ids and numbers is in a
state, and in that of a key how its task ended: no value of a resource, no argument, no reason, which may contain one.

A text that cannot be read is replaced by a new state, and the reply says so. One that a newer release wrote is left
alone, and whoever asks is told not to take part. A kind may forbid replacing it: then messages fail in both cases
until somebody deletes the text.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable
from typing import Any, Final, NamedTuple, Protocol, TypeVar

from headgate.errors import StoreFormatTooNew, StoreWriteFailed
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
    """The pool is gone, or takes part no longer after this."""


class Reply(NamedTuple):
    """What it is told."""

    now: float
    member: str
    body: Any = None
    trouble: str | None = None
    """Why the text could not be used, if so."""
    is_usable: bool = True
    """Whether this headgate can take part at all."""


class Turn:
    """One run of a step, as a kind sees it."""

    __slots__ = ("expires", "is_new", "me", "now", "unheard", "wakes")

    def __init__(self, me: str, now: float, is_new: bool, unheard: Collection[str] = ()) -> None:
        self.me: str = me
        """The participant that speaks."""
        self.now: float = now
        """By the clock of the store."""
        self.is_new: bool = is_new
        """Has it another id than when it was last answered? Then what it holds and counted means nothing."""
        self.unheard: Collection[str] = unheard
        """Members that live, have no part in the state, and may hold something: the state was lost a short time ago."""
        self.wakes: set[str] = set()
        """The participants to wake, which the kind fills."""
        self.expires: float | None = None
        """When the text may be deleted, which the kind sets. See `Outcome.expires`."""

    def is_alone(self, names: Iterable[str]) -> bool:
        """Whether all of these participants are in the process of the one that speaks."""
        mine = member_of(self.me)
        return all(member_of(who) == mine for who in names)


class Kind(Protocol[S]):
    """What differs between kinds of shared states."""

    @property
    def format(self) -> int:
        """The number of the format that `write` writes."""
        ...

    @property
    def is_replaceable(self) -> bool:
        """May a text that cannot be read be replaced by a new state? Otherwise messages fail until it is deleted."""
        ...

    @property
    def is_plain(self) -> bool:
        """Is a state the very mapping that is written? Then it is kept, and not parsed if nobody else has written."""
        ...

    def begin(self, body: Any, /) -> S:
        """The state if nobody has been there, by the body of the first message."""
        ...

    def read(self, found: dict[str, Any], /) -> S:
        """The state that `write` wrote. ValueError for anything else."""
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

        `body` is None after it has left.
        """
        ...


class TooNew(ValueError):
    """A state of a newer release."""


def exchange(kind: Kind[S], text: str | None, seen: Seen, message: Message) -> Outcome:
    """Take a message of one participant, and answer it."""
    trouble = None
    try:
        state = _read(kind, text, message)
    except TooNew as error:
        if not kind.is_replaceable:
            remedy = "Update headgate here, or use another store."
            raise StoreFormatTooNew(f"a shared state cannot be used: {error}", remedy=remedy) from None
        return Outcome(None, Reply(seen.now, seen.member, trouble=str(error), is_usable=False))
    except _FOUND_DAMAGED as error:
        if not kind.is_replaceable:
            raise _damaged() from None
        if not isinstance(error, ValueError):
            raise
        state, trouble = kind.begin(message.body), str(error)
    try:
        body, turn = _step(kind, state, seen, message)
        after = _encode({"v": kind.format, **kind.write(state)})
    except _FOUND_DAMAGED:
        if kind.is_replaceable:
            raise
        raise _damaged() from None
    if kind.is_plain:
        if len(_states) >= _MOST_STATES:
            _states.clear()
        _states[kind, after] = state
    turn.wakes.discard(turn.me)
    wakes = {member_of(who) for who in turn.wakes}
    reply = Reply(seen.now, seen.member, body, trouble)
    return Outcome(None if after == text else after, reply, wakes, turn.expires)


def _step(kind: Kind[S], state: S, seen: Seen, message: Message) -> tuple[Any, Turn]:
    mine, is_gone = seen.member, seen.is_gone
    me = f"{mine}/{message.token}"
    for who in list(kind.participants(state)):
        if (member := member_of(who)) != mine and is_gone(member):
            kind.drop(state, who, seen.now)
    unheard: Collection[str] = ()
    if seen.unheard:
        heard = {mine, *map(member_of, kind.participants(state))}
        unheard = {member for member in seen.unheard if member not in heard and not is_gone(member)}
    turn = Turn(me, seen.now, message.member != seen.member, unheard)
    body = None
    if message.body is not None:
        body = kind.step(state, turn, message.body)
    if message.leaves:
        if me in kind.participants(state):
            kind.drop(state, me, seen.now)
        kind.step(state, turn, None)
    return body, turn


_FOUND_DAMAGED: Final = (TypeError, ValueError, KeyError, IndexError, AttributeError)
"""What a step raises on a state that was not written here, as far as `read` did not notice."""


def _damaged() -> StoreWriteFailed:
    return StoreWriteFailed(
        "a shared state cannot be read: it was not written by headgate, or it was damaged",
        remedy="Delete that row of the store (for SQLite: the files beside its path) while no pool uses it.",
    )


def member_of(who: str) -> str:
    """The id of the process of a participant."""
    return who.rpartition("/")[0]


_encode: Final = json.JSONEncoder(separators=(",", ":"), check_circular=False, allow_nan=False).encode

_states: Final[dict[tuple[Kind[Any], str], Any]] = {}
"""The plain states of the texts that this process wrote last.

An entry is taken out before it is worked on, so no two threads have the same.
"""
_MOST_STATES: Final = 64


def _read(kind: Kind[S], text: str | None, message: Message) -> S:
    if text is None:
        return kind.begin(message.body)
    known: S | None = _states.pop((kind, text), None)
    return kind.read(_parsed(text, kind)) if known is None else known


def _parsed(text: str, kind: Kind[Any]) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(found, dict) or type(found.get("v")) is not int:
        raise ValueError("it is not a shared state")
    if found["v"] > kind.format:
        raise TooNew(f"its format {found['v']} is newer than {kind.format}")
    return found


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


def string(value: Any) -> str:
    """A text, or ValueError."""
    if not isinstance(value, str):
        raise ValueError("a text is missing")
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
