"""What processes share about one quota: its ledger, and what each participant was granted of it and has ended. Pure.

What a participant holds is the difference. It holds more than one call needs, so that most calls need no exchange; what
it holds counts as used for everybody else, so a quota is never exceeded, whatever becomes of the process. One that is
gone counts as having used what it held.

When a participant wants something that is not there, the others are woken once, and return what they do not use.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

from headgate.gate.learned import LearnedLimit
from headgate.resources.ledger import Ledger
from headgate.resources.quota import LEARN, Quota, QuotaSetting, checked_quota, former_names
from headgate.resources.rate_limits import Limit
from headgate.sharing.protocol import Turn, mapping, number, row

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
    window: float | None = None
    """The length of the window in seconds, if the answer told it."""


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


class Report(NamedTuple):
    """What one participant has to say about one quota."""

    seq: int
    """The number of the message: one that arrives twice is counted once."""
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


class Granted(NamedTuple):
    """What it is told."""

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


class _Part:
    """What one process has of the quota."""

    def __init__(self, seq: int = 0, since: float = 0.0) -> None:
        self.seq: int = seq
        self.granted: dict[str, float] = {}
        self.ended: dict[str, float] = {}
        self.want: dict[str, float] | None = None
        self.since: float = since

    def held(self) -> dict[str, float]:
        """How much it may still use."""
        held = {name: amount - self.ended.get(name, 0.0) for name, amount in self.granted.items()}
        return {name: amount for name, amount in held.items() if amount > 0}

    def row(self) -> list[Any]:
        return [self.seq, self.granted, self.ended, self.want, self.since]


class _State:
    def __init__(self, quota: QuotaSetting) -> None:
        self.ledger: Ledger = Ledger(quota)
        self.parts: dict[str, _Part] = {}
        self.probe: str | None = None
        """Whose call asks what there is."""

    def adopt(self, quota: QuotaSetting) -> None:
        """Go by another quota. What was used of windows that both have counts."""
        before, self.ledger = self.ledger, Ledger(quota)
        if quota != LEARN and before.quota != LEARN:
            body = before.body()
            former = former_names(before.quota, quota)
            self.ledger.load({**body, "windows": {name: body["windows"][was] for name, was in former.items()}})

    def reserve_held(self) -> None:
        """Let the ledger know what all processes hold."""
        for name, window in self.ledger.windows.items():
            window.held = sum(part.held().get(name, 0.0) for part in self.parts.values())
        self.ledger.probing = self.probe is not None

    def pass_time(self, now: float) -> None:
        """Refill the windows while what was held until now still counts as held.

        A bucket does not refill beyond what is held of it. If it were told first that this is used, it would also
        refill for the time before that, when it was full.
        """
        self.reserve_held()
        for window in self.ledger.windows.values():
            window.left(now)


_FIELDS: Final = ("requests", "per", "tokens", "input_tokens", "output_tokens", "window", "burst", "delay")


class SharedQuotaState:
    """The kind of the shared state of a quota. Implements `sharing.protocol.Kind`."""

    format: int = 3
    """Raised when an older release could misread a state."""
    is_replaceable: bool = True
    """What was used is forgotten, as if the provider had given everybody a new window."""
    is_plain: bool = False
    """Its records are read into values of their own."""

    def begin(self, report: Report | None) -> _State:
        """Nothing is used."""
        return _State(LEARN if report is None else report.quota)

    def read(self, found: dict[str, Any]) -> _State:
        """Read a state. ValueError for what was not written here."""
        state = _State(_quota(found.get("quota")))
        state.ledger.load(mapping(found.get("ledger")))
        state.parts = {who: _part(one) for who, one in mapping(found.get("parts")).items()}
        state.probe = found["probe"] if isinstance(found.get("probe"), str) and found["probe"] in state.parts else None
        return state

    def write(self, state: _State) -> dict[str, Any]:
        """The state as JSON can hold it."""
        quota = state.ledger.quota
        return {
            "quota": quota if quota == LEARN else [[getattr(one, name) for name in _FIELDS] for one in quota],
            "ledger": state.ledger.body(),
            "parts": {who: part.row() for who, part in state.parts.items()},
            "probe": state.probe,
        }

    def participants(self, state: _State) -> Iterable[str]:
        """Those that have taken part."""
        return state.parts

    def drop(self, state: _State, who: str, now: float) -> None:
        """What it held counts as used."""
        state.pass_time(now)
        for name, amount in state.parts.pop(who).held().items():
            window = state.ledger.windows.get(name)
            if window is not None:
                window.count(amount, now, now)
        if state.probe == who:
            state.probe = None
            state.ledger.probed(answered=False)

    def step(self, state: _State, turn: Turn, report: Report | None) -> Granted | None:
        """Count what was used, grant what is free, and name whom to wake. Who is alone brings its own quota."""
        if report is not None and report.quota != state.ledger.quota and turn.is_alone(state.parts):
            state.adopt(report.quota)
        return _Step(state, turn, report).outcome()


SHARED_QUOTA: Final = SharedQuotaState()


class _Step:
    """One run of the step."""

    def __init__(self, state: _State, turn: Turn, report: Report | None) -> None:
        self._state, self._turn, self._report = state, turn, report

    def outcome(self) -> Granted | None:
        self._state.pass_time(self._turn.now)
        if self._report is not None:
            self._apply(self._report)
        self._state.reserve_held()
        self._grant()
        return None if self._report is None else self._granted()

    def _granted(self) -> Granted:
        state, ledger, now = self._state, self._state.ledger, self._turn.now
        mine = state.parts[self._turn.me]
        limits: dict[str, float | None] = {
            name: window.limit
            for name, window in ledger.windows.items()
            if not isinstance(window, LearnedLimit) or window.is_known
        }
        opens_at = None
        if mine.want is not None:
            known = {name: amount for name, amount in mine.want.items() if name in ledger.windows}
            soonest = ledger.opens_at(known, now)
            opens_at = soonest if now < soonest < math.inf else None  # it is another's turn, who wakes this
        wanted = any(part.want is not None for who, part in state.parts.items() if who != self._turn.me)
        return Granted(dict(mine.granted), limits, opens_at, wanted, ledger.quota, state.probe == self._turn.me)

    def _apply(self, report: Report) -> None:
        state, turn = self._state, self._turn
        part = state.parts.get(turn.me)
        if part is None:
            part = state.parts[turn.me] = _Part(since=turn.now)
        if report.seq <= part.seq:
            return  # it has been counted
        part.seq = report.seq
        self._count(report)
        if not turn.is_new:
            before = part.held()
            part.ended = {name: max(amount, part.ended.get(name, 0.0)) for name, amount in report.ended.items()}
            self._give_back(report, before, part.held())
        if report.probed is not None and state.probe == turn.me:
            state.probe = None
            state.ledger.probed(answered=report.probed)
        had, want = part.want, report.want
        part.want = dict(want.need) if want is not None and want.is_urgent else None
        if part.want is not None and had is None:
            part.since = turn.now
        if part.want is not None and (had is None or report.asks):
            turn.wakes.update(who for who, one in state.parts.items() if one.held())

    def _count(self, report: Report) -> None:
        ledger, now = self._state.ledger, self._turn.now
        for name, rows in report.rows.items():
            window = ledger.windows.get(name)
            if window is not None:
                for start, amount in rows:
                    window.count(amount, start, now)
        for name, changes in report.changes.items():
            for start, change in changes:
                ledger.amend({name: change}, start, now)
        for told in report.told:
            left = None if told.resets_at is None else told.resets_at - told.at
            ledger.observe([Limit(told.name, told.limit, told.remaining, left, told.window)], told.start, told.at)
        for one in report.refused:
            ledger.refused(one.told, one.after, one.start, one.at)

    def _give_back(self, report: Report, before: Mapping[str, float], after: Mapping[str, float]) -> None:
        """Return to the windows what a process held and has not used."""
        for name, held in before.items():
            started = sum(amount for _, amount in report.rows.get(name, ()))
            unused = held - after.get(name, 0.0) - started
            if unused > 0 and name in self._state.ledger.windows:
                self._state.ledger.windows[name].give_back(unused, self._turn.now)

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
                self._turn.wakes.add(who)
        ahead = None if self._report is None else self._report.want
        if ahead is not None and not ahead.is_urgent and not self._someone_waits():
            self._give(self._turn.me, ahead.need)

    def _lacks(self, need: Mapping[str, float]) -> bool:
        """Whether there is too little now, and will be enough some day."""
        return not self._allows(need) and self._state.ledger.can_ever_allow(need)

    def _allows(self, need: Mapping[str, float]) -> bool:
        ledger = self._state.ledger
        return ledger.allows({**ledger.need(0.0), **need}, self._turn.now)

    def _someone_waits(self) -> bool:
        return any(part.want is not None for part in self._state.parts.values())

    def _give(self, who: str, need: Mapping[str, float]) -> bool:
        """Give a process what a call needs, and more so that it need not ask for each; False: there is too little."""
        ledger, part, now = self._state.ledger, self._state.parts[who], self._turn.now
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


# -- reading what may be anything --------------------------------------------------------------------------------------


def _quota(value: Any) -> QuotaSetting:
    if value == LEARN:
        return LEARN
    if not isinstance(value, list):
        raise ValueError("quotas are missing")
    quotas = checked_quota([_one_quota(one) for one in value])
    assert quotas is not None, "a list is no None"
    return quotas


def _one_quota(value: Any) -> Quota:
    return Quota(**dict(zip(_FIELDS, row(value, len(_FIELDS)), strict=True)))


def _part(value: Any) -> _Part:
    seq, granted, ended, want, since = row(value, 5)
    if type(seq) is not int:
        raise ValueError("what a participant holds has the wrong form")
    part = _Part(seq, number(since, 0.0))
    part.granted, part.ended = _amounts(granted), _amounts(ended)
    part.want = None if want is None else _amounts(want)
    return part


def _amounts(value: Any) -> dict[str, float]:
    return {name: number(amount, 0.0) for name, amount in mapping(value).items()}
