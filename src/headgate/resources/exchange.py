"""The state that processes share about one pool of resources, and the step by which a process changes it. Pure.

The state is a small JSON text: the records of resources that are not healthy (`health`), and the processes that take
part with their permits (`permits`). It holds ids and numbers: no value of a resource, and no reason, which may contain
one.

A process sends one message at a time, with everything that it learned since the last. The step joins it, forgets
processes that are gone, grants free permits, and names whom to wake. It may run twice.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from headgate.resources.health import UNKNOWN, Outage, Record, is_forgotten, is_same, join
from headgate.resources.permits import Claim, Share, Wish, claim_of, grant, share_of
from headgate.sharing.states import Outcome, Seen

FORMAT = 1

Claims = dict[str, Claim]


class Message(NamedTuple):
    """What one pool of one process has to say."""

    token: str
    """Tells pools of one process apart."""
    member: str | None = None
    """The id under which the process took part when it counted its permits; None: it has not taken part yet."""
    records: Mapping[str, Record] = {}
    wishes: Mapping[str, Wish] = {}
    leaves: bool = False
    """The pool is gone."""


class Reply(NamedTuple):
    """What it is told."""

    now: float
    member: str
    health: Mapping[str, Record]
    shares: Mapping[str, Share]
    trouble: str | None = None
    """Why the text could not be used, if so."""
    is_usable: bool = True
    """Whether this headgate can take part at all."""


class State:
    """The shared state of one pool."""

    def __init__(self) -> None:
        self.health: dict[str, Record] = {}
        self.members: dict[str, Claims] = {}
        """What each pool of each process has of the permits, by `<member>/<token>`."""

    def text(self) -> str:
        """Write it as JSON, the same state always in the same way."""
        members = {
            who: {mark: list(one) for mark, one in sorted(claims.items())} for who, claims in self.members.items()
        }
        body = {"v": FORMAT, "health": self.health, "members": members}
        return json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False)


class _TooNew(ValueError):
    pass


def read(text: str | None) -> State:
    """Read a state. Raises ValueError for anything that `State.text` does not write."""
    state = State()
    if text is None:
        return state
    try:
        body = json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(body, dict) or type(body.get("v")) is not int:
        raise ValueError("it is not a state of a resource pool")
    if body["v"] > FORMAT:
        raise _TooNew(f"its format {body['v']} is newer than {FORMAT}")
    state.health = {mark: _record(one) for mark, one in _mapping(body.get("health")).items()}
    for who, claims in _mapping(body.get("members")).items():
        state.members[who] = {mark: _claim(one) for mark, one in _mapping(claims).items()}
    return state


def exchange(text: str | None, seen: Seen, message: Message) -> Outcome:
    """Take a message of one pool of one process, and answer it."""
    trouble = None
    try:
        state = read(text)
    except _TooNew as error:
        return Outcome(None, Reply(seen.now, seen.member, {}, {}, str(error), is_usable=False))
    except ValueError as error:
        state, trouble = State(), str(error)
    return _Step(state, seen, message).outcome(text, trouble)


class _Step:
    """One run of the step."""

    def __init__(self, state: State, seen: Seen, message: Message) -> None:
        self._state, self._seen, self._message = state, seen, message
        self._me = f"{seen.member}/{message.token}"
        self._wakes: set[str] = set()

    def outcome(self, text: str | None, trouble: str | None) -> Outcome:
        state = self._state
        self._forget_gone()
        self._join()
        if not self._message.leaves:
            self._claim()
        self._grant()
        self._wake_holders()
        after = state.text()
        members = {_member(who) for who in self._wakes}
        reply = Reply(self._seen.now, self._seen.member, state.health, self._shares(), trouble)
        return Outcome(None if after == text else after, reply, members)

    def _forget_gone(self) -> None:
        members, is_gone = self._state.members, self._seen.is_gone
        for who in list(members):
            mine = who == self._me and self._message.leaves
            if mine or (_member(who) != self._seen.member and is_gone(_member(who))):
                del members[who]

    def _join(self) -> None:
        health = self._state.health
        changed = False
        for mark, record in self._message.records.items():
            known = health.get(mark, UNKNOWN)
            joined = join(known, record)
            if not is_same(joined, known):
                # Kept from now on: it may have been on its way for long, and others have not heard of it.
                health[mark] = joined._replace(at=max(joined.at, self._seen.now))
                changed = True
        for mark in [mark for mark, record in health.items() if is_forgotten(record, self._seen.now)]:
            del health[mark]
        if changed:
            self._wakes.update(who for who in self._state.members if who != self._me)

    def _claim(self) -> None:
        mine = self._state.members.setdefault(self._me, {})
        is_new = self._message.member != self._seen.member
        for mark, wish in self._message.wishes.items():
            mine[mark] = claim_of(mine.get(mark), wish, self._seen.now, is_new=is_new)

    def _wake_holders(self) -> None:
        """Wake those who may return what this process wants and did not get."""
        mine = self._state.members.get(self._me, {})
        lacking = {mark for mark in self._message.wishes if mark in mine and mine[mark].wanted}
        for who, claims in self._state.members.items():
            if who != self._me and any(claims[mark].held for mark in lacking & claims.keys()):
                self._wakes.add(who)

    def _grant(self) -> None:
        wanted = {mark for claims in self._state.members.values() for mark, one in claims.items() if one.wanted}
        for mark in wanted:
            for who, claim in grant(self._claims(mark)).items():
                self._state.members[who][mark] = claim
                if who != self._me:
                    self._wakes.add(who)
        for claims in self._state.members.values():
            for mark in [mark for mark, one in claims.items() if one.is_empty]:
                del claims[mark]

    def _claims(self, mark: str) -> Claims:
        return {who: claims[mark] for who, claims in self._state.members.items() if mark in claims}

    def _shares(self) -> dict[str, Share]:
        mine = self._state.members.get(self._me, {})
        return {mark: share_of(self._claims(mark), self._me) for mark in mine}


def _member(who: str) -> str:
    return who.rpartition("/")[0]


# -- reading what may be anything --------------------------------------------------------------------------------------


def _mapping(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError("a mapping is missing")
    return value


def _row(value: Any, size: int) -> list[Any]:
    if not isinstance(value, list) or len(value) != size:
        raise ValueError("a row has the wrong length")
    return value


def _whole(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**53:
        raise ValueError("a count is not a whole number")
    return value


def _time(value: Any) -> float:
    if type(value) not in (int, float) or not math.isfinite(value):
        raise ValueError("a time is not a number")
    return float(value)


def _record(value: Any) -> Record:
    generation, disabled, cleared, outages, at = _row(value, 5)
    if type(disabled) is not bool or not isinstance(outages, list):
        raise ValueError("a record is not one of a resource")
    rows = [_row(one, 3) for one in outages]
    read_outages = tuple(Outage(_time(began), _whole(number), _time(until)) for began, number, until in rows)
    return join(
        Record(_whole(generation), disabled, _time(cleared), read_outages, _time(at)), Record(_whole(generation))
    )


def _claim(value: Any) -> Claim:
    granted, returned, asked, since, limit = _row(value, 5)
    return Claim(_whole(granted), _whole(returned), _whole(asked), _time(since), _whole(limit))
