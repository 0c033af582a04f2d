"""The state of one quota that processes share, and the step by which a process changes it. Pure.

The state is a small JSON text: the ledger of the quota, and what each process was granted of it and has ended. What a
process holds is the difference. It holds more than one call needs, so that most calls need no exchange; what it holds
counts as used for everybody else, so a quota is never exceeded, whatever becomes of the process. A process that is gone
counts as having used what it held.

When a process wants something that is not there, the others are woken once, and return what they do not use.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

from headgate.gate.learned import LearnedLimit
from headgate.resources.ledger import TOKENS, Ledger
from headgate.resources.quota import LEARN, Quota, QuotaSetting
from headgate.resources.rate_limits import Limit
from headgate.sharing.states import Outcome, Seen

FORMAT: Final = 2
_UNLIMITED_CHUNK: Final = 256.0
"""How much is granted at a time of something that is not limited, or not known to be."""


class Told(NamedTuple):
    """What an answer said about one limit, by the store's clock."""

    name: str
    limit: float | None
    remaining: float | None
    resets_at: float | None
    at: float
    start: float
    """When the call started that was answered."""


class Refused(NamedTuple):
    """A call that was refused, by the store's clock."""

    told: Mapping[str, float | None]
    """The limits that refused it, and what the answer said remains of each."""
    after: float | None
    """Seconds that it was asked to wait."""
    start: float
    at: float


class Want(NamedTuple):
    """What a process wants."""

    need: Mapping[str, float]
    """What its next call takes."""
    is_urgent: bool
    """Does a call wait for it? Otherwise it is given only if nobody else needs it."""


class Message(NamedTuple):
    """What one process has to say about one quota."""

    token: str
    """Tells pools of one process apart."""
    seq: int
    """The number of the message: one that arrives twice is counted once."""
    member: str | None
    """The id under which the process took part when it counted what it holds; None: it has not taken part yet."""
    quota: QuotaSetting
    ended: Mapping[str, float] = {}
    """How much of what it was granted is used or given back, since it takes part."""
    rows: Mapping[str, Iterable[tuple[float, float]]] = {}
    """What calls took that started since the last message: when, and how much."""
    changes: Mapping[str, Iterable[tuple[float, float]]] = {}
    """How much more or less calls used than they had taken, by their starts."""
    told: Iterable[Told] = ()
    refused: Iterable[Refused] = ()
    probed: bool | None = None
    """Set when the call has ended that asked what there is: was it answered?"""
    want: Want | None = None
    asks: bool = False
    """Is this want new, or asked for again? Then others are asked to give back what they do not use."""
    leaves: bool = False


class Reply(NamedTuple):
    """What it is told."""

    now: float
    member: str
    granted: Mapping[str, float]
    """How much it was granted since it takes part."""
    limits: Mapping[str, float | None]
    """The limits that there are, by name."""
    opens_at: float | None
    """When to ask again for what it wants and did not get; None: it got it, or will be woken."""
    is_wanted: bool
    """Do others wait for some of it?"""
    quota: QuotaSetting
    """The quota that counts."""
    asks: bool = False
    """Will the answer to its next call be the first to say what there is?"""
    trouble: str | None = None
    is_usable: bool = True


class _Part:
    """What one process has of the quota."""

    def __init__(self, seq: int = 0, since: float = 0.0) -> None:
        self.seq = seq
        self.granted: dict[str, float] = {}
        self.ended: dict[str, float] = {}
        self.want: dict[str, float] | None = None
        self.since = since

    def held(self) -> dict[str, float]:
        """How much it may still use."""
        held = {name: amount - self.ended.get(name, 0.0) for name, amount in self.granted.items()}
        return {name: amount for name, amount in held.items() if amount > 0}

    def row(self) -> list[Any]:
        return [self.seq, self.granted, self.ended, self.want, self.since]


class _State:
    def __init__(self, quota: QuotaSetting) -> None:
        self.ledger = Ledger(quota)
        self.parts: dict[str, _Part] = {}
        self.probe: str | None = None
        """Whose call asks what there is."""

    def text(self) -> str:
        quota = self.ledger.quota
        body = {
            "v": FORMAT,
            "quota": [getattr(quota, name) for name in _FIELDS] if isinstance(quota, Quota) else quota,
            "ledger": self.ledger.body(),
            "parts": {who: part.row() for who, part in self.parts.items()},
            "probe": self.probe,
        }
        return json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False)


_FIELDS: Final = ("requests", "per", "tokens", "window", "burst", "delay")


class _TooNew(ValueError):
    pass


def exchange(text: str | None, seen: Seen, message: Message) -> Outcome:
    """Take a message of one process about one quota, and answer it."""
    trouble = None
    try:
        state = _read(text, seen, message)
    except _TooNew as error:
        reply = Reply(seen.now, seen.member, {}, {}, None, False, message.quota)
        return Outcome(None, reply._replace(trouble=str(error), is_usable=False))
    except ValueError as error:
        state, trouble = _State(message.quota), str(error)
    return _Step(state, seen, message).outcome(text, trouble)


class _Step:
    """One run of the step."""

    def __init__(self, state: _State, seen: Seen, message: Message) -> None:
        self._state, self._seen, self._message = state, seen, message
        self._me = f"{seen.member}/{message.token}"
        self._wakes: set[str] = set()

    def outcome(self, text: str | None, trouble: str | None) -> Outcome:
        state, ledger, me = self._state, self._state.ledger, self._me
        self._forget_gone()
        self._apply()
        self._reserve_held()
        self._grant()
        after = state.text()
        mine = state.parts.get(me, _Part())
        limits: dict[str, float | None] = {
            name: window.limit
            for name, window in ledger.windows.items()
            if not isinstance(window, LearnedLimit) or window.is_known
        }
        opens_at = None
        if mine.want is not None:
            known = {name: amount for name, amount in mine.want.items() if name in ledger.windows}
            soonest = ledger.opens_at(known, self._seen.now)
            opens_at = soonest if self._seen.now < soonest < math.inf else None  # it is another's turn, who wakes this
        wanted = any(part.want is not None for who, part in state.parts.items() if who != me)
        asks = state.probe == me
        told = (dict(mine.granted), limits, opens_at, wanted, ledger.quota, asks, trouble)
        reply = Reply(self._seen.now, self._seen.member, *told)
        return Outcome(None if after == text else after, reply, {_member(who) for who in self._wakes})

    def _forget_gone(self) -> None:
        state = self._state
        for who in list(state.parts):
            leaves = who == self._me and self._message.leaves
            if not leaves and (_member(who) == self._seen.member or not self._seen.is_gone(_member(who))):
                continue
            for name, amount in state.parts.pop(who).held().items():
                window = state.ledger.windows.get(name)
                if window is not None:
                    window.count(amount, self._seen.now, self._seen.now)
            if state.probe == who:
                state.probe = None
                state.ledger.probed(answered=False)

    def _apply(self) -> None:
        message, state = self._message, self._state
        if message.leaves:
            return
        part = state.parts.get(self._me)
        if part is None:
            part = state.parts[self._me] = _Part(since=self._seen.now)
        if message.seq <= part.seq:
            return  # it has been counted
        part.seq = message.seq
        self._count()
        if message.member == self._seen.member:
            before = part.held()
            part.ended = {name: max(amount, part.ended.get(name, 0.0)) for name, amount in message.ended.items()}
            self._give_back(before, part.held())
        if message.probed is not None and state.probe == self._me:
            state.probe = None
            state.ledger.probed(answered=message.probed)
        had, want = part.want, message.want
        part.want = dict(want.need) if want is not None and want.is_urgent else None
        if part.want is not None and had is None:
            part.since = self._seen.now
        if part.want is not None and (had is None or message.asks):
            self._wakes.update(who for who, one in state.parts.items() if who != self._me and one.held())

    def _count(self) -> None:
        message, ledger, now = self._message, self._state.ledger, self._seen.now
        for name, rows in message.rows.items():
            window = ledger.windows.get(name)
            if window is not None:
                for start, amount in rows:
                    window.count(amount, start, now)
        for name, changes in message.changes.items():
            for start, change in changes:
                ledger.amend({name: change}, start, now)
        for told in message.told:
            left = None if told.resets_at is None else told.resets_at - told.at
            ledger.observe([Limit(told.name, told.limit, told.remaining, left)], told.start, told.at)
        for one in message.refused:
            ledger.refused(one.told, one.after, one.start, one.at)

    def _give_back(self, before: Mapping[str, float], after: Mapping[str, float]) -> None:
        """Return to the windows what a process held and has not used."""
        for name, held in before.items():
            started = sum(amount for _, amount in self._message.rows.get(name, ()))
            unused = held - after.get(name, 0.0) - started
            if unused > 0 and name in self._state.ledger.windows:
                self._state.ledger.windows[name].give_back(unused, self._seen.now)

    def _reserve_held(self) -> None:
        """Let the ledger know what all processes hold."""
        parts = self._state.parts.values()
        for name, window in self._state.ledger.windows.items():
            window.held = sum(part.held().get(name, 0.0) for part in parts)
        self._state.ledger.probing = self._state.probe is not None

    def _grant(self) -> None:
        """Give to whoever holds least, but to nobody who has waited less than one for whom there is too little.

        Otherwise many small calls would keep out a large one of another process for ever.
        """
        parts = self._state.parts
        waiting = [(sum(part.held().values()), part.since, who) for who, part in parts.items() if part.want is not None]
        lacking = min((since for _, since, who in waiting if self._lacks(parts[who].want or {})), default=math.inf)
        for _, since, who in sorted(waiting):
            want = parts[who].want
            if want is not None and since <= lacking and self._give(who, want):
                parts[who].want = None
                if who != self._me:
                    self._wakes.add(who)
        want_now = self._message.want
        if want_now is not None and not want_now.is_urgent and self._me in parts and not self._someone_waits():
            self._give(self._me, want_now.need)

    def _lacks(self, need: Mapping[str, float]) -> bool:
        """Whether there is too little now, and will be enough some day."""
        return not self._allows(need) and self._state.ledger.can_ever_allow(need.get(TOKENS, 0.0))

    def _allows(self, need: Mapping[str, float]) -> bool:
        ledger = self._state.ledger
        return ledger.allows({**ledger.need(0.0), **need}, self._seen.now)

    def _someone_waits(self) -> bool:
        return any(part.want is not None for part in self._state.parts.values())

    def _give(self, who: str, need: Mapping[str, float]) -> bool:
        """Give a process what a call needs, and more so that it need not ask for each; False: there is too little."""
        ledger, part, now = self._state.ledger, self._state.parts[who], self._seen.now
        if not self._allows(need):
            return False
        need = {**ledger.need(0.0), **need}
        if ledger.needs_probe():
            amounts = dict(need)
        else:
            claimants = sum(one.want is not None or bool(one.held()) for one in self._state.parts.values())
            amounts = {
                name: max(amount, _share(ledger.room(name, now), max(1, claimants))) for name, amount in need.items()
            }
        if ledger.hold(amounts, now):
            self._state.probe = who
        for name, amount in amounts.items():
            part.granted[name] = part.granted.get(name, 0.0) + amount
        return True


def _share(room: float, claimants: int) -> float:
    """Half of a fair share: the other half is for those who come next."""
    return _UNLIMITED_CHUNK if math.isinf(room) else math.floor(room / (2 * claimants))


def _member(who: str) -> str:
    return who.rpartition("/")[0]


# -- reading what may be anything --------------------------------------------------------------------------------------


def _read(text: str | None, seen: Seen, message: Message) -> _State:
    """Read a state. Raises ValueError for anything that was not written here."""
    if text is None:
        return _State(message.quota)
    try:
        body = json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(body, dict) or type(body.get("v")) is not int:
        raise ValueError("it is not a state of a quota")
    if body["v"] > FORMAT:
        raise _TooNew(f"its format {body['v']} is newer than {FORMAT}")
    parts = {who: _part(row) for who, row in _mapping(body.get("parts")).items()}
    others = [who for who in parts if _member(who) != seen.member and not seen.is_gone(_member(who))]
    quota = _quota(body.get("quota"))
    state = _State(quota if others else message.quota)
    if isinstance(state.ledger.quota, Quota) is isinstance(quota, Quota):
        state.ledger.load(_mapping(body.get("ledger")))
    state.parts = parts
    state.probe = body["probe"] if isinstance(body.get("probe"), str) and body["probe"] in parts else None
    return state


def _quota(value: Any) -> QuotaSetting:
    if value == LEARN:
        return LEARN
    if not isinstance(value, list) or len(value) != len(_FIELDS):
        raise ValueError("its quota has the wrong form")
    return Quota(**dict(zip(_FIELDS, value, strict=True)))


def _part(row: Any) -> _Part:
    if not isinstance(row, list) or len(row) != 5 or type(row[0]) is not int:
        raise ValueError("what a process holds has the wrong form")
    part = _Part(row[0], _amount(row[4]))
    part.granted, part.ended = _amounts(row[1]), _amounts(row[2])
    part.want = None if row[3] is None else _amounts(row[3])
    return part


def _mapping(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError("a mapping is missing")
    return value


def _amounts(value: Any) -> dict[str, float]:
    return {name: _amount(amount) for name, amount in _mapping(value).items()}


def _amount(value: Any) -> float:
    if type(value) not in (int, float) or not math.isfinite(value) or value < 0:
        raise ValueError("an amount is not a number")
    return float(value)
