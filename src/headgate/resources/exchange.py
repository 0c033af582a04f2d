"""What processes share about one pool of resources: records of health, and permits. Pure.

The state holds the records of resources that are not healthy (`health`), the levels of adaptive limits (`levels`), and
for each participant its permits (`permits`). A participant tells what it learned since its last message, and all its
levels; free permits go to whoever wants some.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

from headgate.gate.adaptive import AdaptiveLevel
from headgate.gate.adaptive import join as join_levels
from headgate.resources.health import UNKNOWN, Outage, Record, is_forgotten, is_same, join
from headgate.resources.permits import Claim, Share, Wish, claim_of, grant, share_of
from headgate.sharing.protocol import Turn, mapping, number, row, whole

Claims = dict[str, Claim]

REMEMBERED_LEVEL = 3600.0
"""Seconds for which the level of an adaptive limit is kept that nobody uses."""


class News(NamedTuple):
    """What a participant says."""

    records: Mapping[str, Record] = {}
    wishes: Mapping[str, Wish] = {}
    held: Mapping[str, Wish] = {}
    """Other permits that it has. They count if the state was lost: whoever has spoken has said all that it holds."""
    levels: Mapping[str, AdaptiveLevel] = {}
    """Of its adaptive limits, all of them: no permit is granted by a bound alone."""


class Told(NamedTuple):
    """What it is told."""

    now: float
    health: Mapping[str, Record]
    shares: Mapping[str, Share]
    levels: Mapping[str, AdaptiveLevel] = {}


class State:
    """The shared state of one pool."""

    def __init__(self) -> None:
        self.health: dict[str, Record] = {}
        self.levels: dict[str, tuple[AdaptiveLevel, float]] = {}
        """Of adaptive limits, and when each was changed last."""
        self.members: dict[str, Claims] = {}
        """What each participant has of the permits."""


class ResourceHealth:
    """The kind of the shared state of a resource pool. Implements `sharing.protocol.Kind`."""

    format: int = 1
    """Raised when an older release could misread a state."""
    is_replaceable: bool = True
    """Everybody says again what others must know."""
    is_plain: bool = False
    """Its records are read into values of their own."""

    def begin(self, news: News | None) -> State:
        """Nothing is known."""
        return State()

    def read(self, found: dict[str, Any]) -> State:
        """Read a state. ValueError for anything that `write` does not write."""
        state = State()
        state.health = {mark: _record(one) for mark, one in mapping(found.get("health")).items()}
        state.levels = {mark: _level(one) for mark, one in mapping(found.get("levels")).items()}
        for who, claims in mapping(found.get("members")).items():
            state.members[who] = {mark: _claim(one) for mark, one in mapping(claims).items()}
        return state

    def write(self, state: State) -> dict[str, Any]:
        """The state as JSON can hold it."""
        members = {who: {mark: list(one) for mark, one in claims.items()} for who, claims in state.members.items()}
        levels = {mark: [*level, at] for mark, (level, at) in state.levels.items()}
        return {"health": state.health, "levels": levels, "members": members}

    def participants(self, state: State) -> Iterable[str]:
        """Those that have taken part."""
        return state.members

    def drop(self, state: State, who: str, now: float) -> None:
        """What it held is free."""
        del state.members[who]

    def step(self, state: State, turn: Turn, news: News | None) -> Told | None:
        """Join what was learned, grant free permits, and name whom to wake."""
        wishes: Mapping[str, Wish] = {}
        if news is not None:
            _join(state, turn, news.records)
            _join_levels(state, turn, news.levels)
            wishes = _claim_permits(state, turn, news)
        _forget_old(state, turn.now)
        if not turn.unheard:
            _grant(state, turn)
        if news is None:
            return None
        _wake_holders(state, turn, wishes)
        turn.wakes |= {f"{member}/" for member in turn.unheard}
        mine = state.members[turn.me]
        shares = {mark: share_of(_claims(state, mark), turn.me, _most(state, mark)) for mark in mine}
        return Told(turn.now, state.health, shares, {mark: level for mark, (level, _) in state.levels.items()})


RESOURCE_HEALTH: Final = ResourceHealth()


def _join(state: State, turn: Turn, records: Mapping[str, Record]) -> None:
    for mark, record in records.items():
        known = state.health.get(mark, UNKNOWN)
        joined = join(known, record)
        if not is_same(joined, known):
            # Kept from now on: it may have been on its way for long, and others have not heard of it.
            state.health[mark] = joined._replace(at=max(joined.at, turn.now))
            turn.wakes.update(state.members)


def _join_levels(state: State, turn: Turn, levels: Mapping[str, AdaptiveLevel]) -> None:
    for mark, level in levels.items():
        known = state.levels.get(mark)
        joined = level if known is None else join_levels(known[0], level)
        if known is None or joined != known[0]:
            state.levels[mark] = joined, turn.now
            turn.wakes.update(state.members)


def _forget_old(state: State, now: float) -> None:
    for mark in [mark for mark, record in state.health.items() if is_forgotten(record, now)]:
        del state.health[mark]
    for mark in [mark for mark, (_, at) in state.levels.items() if at + REMEMBERED_LEVEL < now]:
        if not _claims(state, mark):
            del state.levels[mark]


def _most(state: State, mark: str) -> float:
    """The adaptive level of a resource; infinite if its limit is not adaptive."""
    known = state.levels.get(mark)
    return math.inf if known is None else known[0].limit


def _claim_permits(state: State, turn: Turn, news: News) -> Mapping[str, Wish]:
    """Take over what a participant holds and wants. Returns what of that is new."""
    mine = state.members.setdefault(turn.me, {})
    wishes = {**{mark: wish for mark, wish in news.held.items() if mark not in mine}, **news.wishes}
    for mark, wish in wishes.items():
        mine[mark] = claim_of(mine.get(mark), wish, turn.now, is_new=turn.is_new)
    return wishes


def _grant(state: State, turn: Turn) -> None:
    wanted = {mark for claims in state.members.values() for mark, one in claims.items() if one.wanted}
    for mark in wanted:
        for who, claim in grant(_claims(state, mark), _most(state, mark)).items():
            state.members[who][mark] = claim
            turn.wakes.add(who)
    for claims in state.members.values():
        for mark in [mark for mark, one in claims.items() if one.is_empty]:
            del claims[mark]


def _wake_holders(state: State, turn: Turn, wishes: Mapping[str, Wish]) -> None:
    """Wake those who may return what this participant wants and did not get."""
    mine = state.members[turn.me]
    lacking = {mark for mark in wishes if mark in mine and mine[mark].wanted}
    for who, claims in state.members.items():
        if any(claims[mark].held for mark in lacking & claims.keys()):
            turn.wakes.add(who)


def _claims(state: State, mark: str) -> Claims:
    return {who: claims[mark] for who, claims in state.members.items() if mark in claims}


def _record(value: Any) -> Record:
    generation, disabled, cleared, outages, at = row(value, 5)
    if type(disabled) is not bool or not isinstance(outages, list):
        raise ValueError("a record is not one of a resource")
    rows = [row(one, 3) for one in outages]
    known = tuple(Outage(number(began), whole(count), number(until)) for began, count, until in rows)
    return join(Record(whole(generation), disabled, number(cleared), known, number(at)), Record(whole(generation)))


def _level(value: Any) -> tuple[AdaptiveLevel, float]:
    cuts, growths, limit, refused, step, at = row(value, 6)
    level = AdaptiveLevel(whole(cuts), whole(growths), number(limit, 1.0), number(refused, 0.0), number(step, 0.0))
    return level, number(at)


def _claim(value: Any) -> Claim:
    granted, returned, asked, since, limit = row(value, 5)
    return Claim(whole(granted), whole(returned), whole(asked), number(since), whole(limit))
