"""What is left of the quotas of one resource or group: a list of window limits, each with a dimension. Pure.

A call takes an amount of each window, all at once or not at all: a request of those that count requests, its tokens of
those that count tokens. So a window of requests per second, one of tokens per hour and one that answers describe are
asked the same questions. Names stand for windows, between processes too.

The same ledger serves one process and the state that several processes share. In one process a call takes what it needs
when it starts. Processes that share a ledger are granted amounts, which are held until they report what they started.

A quota that is learned begins with one call: its answer may describe limits, or none. A slow answer does not stop
everything: another call starts after a second.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

from headgate.gate.learned import LearnedLimit, finite, number, rows_of, several
from headgate.gate.windows import CLOSE, Bucket, FixedWindow, SlidingWindow
from headgate.resources.costs import REQUESTS, AnyCost, dimension_of, needed
from headgate.resources.quota import LEARN, QuotaSetting, windows_of
from headgate.resources.rate_limits import Limit

Need = Mapping[str, float]
"""How much of each limit a call takes, by the name of the limit."""
Window = SlidingWindow | Bucket | FixedWindow | LearnedLimit

_MOST_LIMITS: Final = 8
"""Names of limits come from a server, which may invent any number of them."""
_ANOTHER: Final = 1.0
"""Seconds after which another call asks what there is, while none has been answered."""
_TICK: Final = 1e-6
"""Starts are told apart by their times, so no two of them are the same."""


class WindowView(NamedTuple):
    """How one window stands."""

    left: float
    """How much is left; infinite if that is not known."""
    limit: float | None
    """How much there is in all, or None if that is not known."""
    refilled_at: float
    """When all of it is there again if nothing else is taken; infinite if that is not known."""


class Ledger:
    """What is left of the quotas of one resource or group."""

    def __init__(self, quota: QuotaSetting) -> None:
        self.quota: QuotaSetting = quota
        self.wants_exchange: bool = False
        """Always False: there is nobody to tell."""
        self.windows: dict[str, Window] = {}
        self.probing: bool = False
        """Is a call under way whose answer will say what there is?"""
        self.heard: bool = False
        """Has an answer come, so that it is known whether answers describe limits?"""
        self._asked_at = -math.inf
        self._started_at = -math.inf
        if quota == LEARN:
            self.windows[REQUESTS] = LearnedLimit()
        else:
            self.windows.update(windows_of(quota))

    # -- taking -------------------------------------------------------------------------------------------------------

    def need(self, cost: AnyCost) -> dict[str, float]:
        """The amounts one call reserves: one request, and its tokens (at least 1)."""
        return {
            name: needed(name, cost, window.limit if isinstance(window, LearnedLimit) else None)
            for name, window in self.windows.items()
        }

    def can_ever_allow(self, need: Need) -> bool:
        """Whether so much fits into every window when nothing of it is used."""
        return all(amount <= self.windows[name].most + CLOSE for name, amount in need.items() if name in self.windows)

    @property
    def is_known(self) -> bool:
        """Whether there is a limit that is configured, or that answers have told."""
        return any(not isinstance(window, LearnedLimit) or window.is_told for window in self.windows.values())

    def needs_probe(self) -> bool:
        """Whether nothing is known before a call has asked."""
        return self.quota == LEARN and not self.heard

    def allows(self, need: Need, now: float, *, paced: bool = True) -> bool:
        """Whether so much may be taken now. Not `paced`: by a call that cannot wait for its turn."""
        if self.needs_probe():
            return not self.probing or now >= self._asked_at + _ANOTHER
        return all(self.room(name, now, paced=paced) >= amount - CLOSE for name, amount in need.items())

    def room(self, name: str, now: float, *, paced: bool = True) -> float:
        """How much of one limit may be taken now; infinite if it is not known, or not limited."""
        window = self.windows.get(name)
        return math.inf if window is None else window.room(now, paced=paced)

    def views(self, now: float) -> dict[str, WindowView]:
        """How each window stands, whatever the pace."""
        return {
            name: WindowView(window.left(now), window.limit, window.refilled_at(now))
            for name, window in self.windows.items()
        }

    def lack(self, need: Need, now: float, *, waits: bool) -> None:
        """Do nothing: there is nobody to ask for more."""

    def opens_at(self, need: Need, now: float) -> float:
        """When so much may be taken, as far as can be told; `now` if it may be taken now."""
        if self.needs_probe():
            return max(now, self._asked_at + _ANOTHER) if self.probing else now
        return max((self.windows[name].opens_at(amount, now) for name, amount in need.items()), default=now)

    def hold(self, need: Need, now: float) -> bool:
        """Set so much aside. True: for a call that asks what there is."""
        asks = self.needs_probe()
        if asks:
            self.probing, self._asked_at = True, now
        for name, amount in need.items():
            if name in self.windows:
                self.windows[name].hold(amount, now)
        return asks

    def start(self, need: Need, now: float) -> tuple[float, bool]:
        """Take so much for a call that starts now. Returns the start that stands for it, and whether it asks."""
        asks = self.hold(need, now)
        start = self._started_at = max(now, self._started_at + _TICK)
        for name, amount in need.items():
            self.windows[name].held -= amount
            self.windows[name].count(amount, start, now)
        return start, asks

    def cancel(self, need: Need, start: float, now: float) -> None:
        """Take back what a call took that was never begun."""
        self.amend({name: -amount for name, amount in need.items()}, start, now)

    def amend(self, change: Need, start: float, now: float) -> None:
        """Correct what a call took: it used more or less than it had reserved."""
        for name, amount in change.items():
            window = self.windows.get(name)
            if window is not None and amount:
                window.amend(amount, start, now)

    def retime(self, since: float, now: float) -> None:
        """Count what started since then as started now."""
        for window in self.windows.values():
            if isinstance(window, SlidingWindow):  # others are not counted by when a call starts
                window.retime(since, now)

    # -- learning -----------------------------------------------------------------------------------------------------

    def observe(self, limits: Iterable[Limit], start: float, now: float) -> None:
        """Learn what an answer said that arrived at `now`, to a call that started at `start`."""
        if self.quota != LEARN:
            return
        self.heard = True
        for told in limits:
            window = self.windows.get(told.name)
            if window is None and len(self.windows) < _MOST_LIMITS:
                window = self.windows[told.name] = _learned(told.name)
            if isinstance(window, LearnedLimit):
                window.observe(told.limit, told.remaining, told.reset_after, start=start, now=now, per=told.window)

    def refused(self, told: Mapping[str, float | None], after: float | None, start: float, now: float) -> None:
        """Learn that a call was refused because of these limits, and what it was told remains of each.

        `after` is the number of seconds it was asked to wait.
        """
        for name, remaining in told.items():
            window = self.windows.get(name)
            if isinstance(window, LearnedLimit):
                window.refused(after, remaining, start=start, now=now)

    def probed(self, *, answered: bool) -> None:
        """Note that a call has ended that asked what there is."""
        self.probing = False
        self.heard = self.heard or answered

    # -- as a state that processes share ------------------------------------------------------------------------------

    def body(self) -> dict[str, Any]:
        """What is counted and learned, as JSON can hold it. What is held is not part of it."""
        windows = {name: _body(window) for name, window in self.windows.items()}
        return {"windows": windows, "heard": self.heard, "probing": self.probing, "asked_at": finite(self._asked_at)}

    def load(self, body: Mapping[str, Any]) -> None:
        """Continue from what `body` wrote for the same quota. Raises ValueError for anything else."""
        windows = body.get("windows")
        if not isinstance(windows, dict):
            raise ValueError("a mapping is missing")
        for name, state in windows.items():
            if not isinstance(state, dict):
                raise ValueError("a mapping is missing")
            if self.quota == LEARN and name not in self.windows and len(self.windows) < _MOST_LIMITS:
                self.windows[name] = _learned(name)
            if name in self.windows:
                _load(self.windows[name], state)
        self.heard = body.get("heard") is True
        self.probing = body.get("probing") is True
        asked_at = body.get("asked_at")
        self._asked_at = -math.inf if asked_at is None else number(asked_at)


def _learned(name: str) -> LearnedLimit:
    return LearnedLimit(counts_tokens=dimension_of(name) != REQUESTS)


def _body(window: Window) -> dict[str, Any]:
    if isinstance(window, LearnedLimit):
        return window.body()
    if isinstance(window, FixedWindow):
        return {"fixed": [finite(one) for one in window.state]}
    level, at = window.pace
    if isinstance(window, Bucket):
        return {"bucket": [level, finite(at), finite(window.full_at)]}
    return {"rows": window.rows(), "pace": [level, finite(at)]}


def _load(window: Window, state: Mapping[str, Any]) -> None:
    if isinstance(window, LearnedLimit):
        window.load(state)
        return
    if isinstance(window, FixedWindow):
        left, begin, level, at = several(state.get("fixed"), 4)
        window.load(number(left), _moment(begin), number(level), _moment(at))
        return
    if isinstance(window, Bucket):
        level, at, full_at = several(state.get("bucket"), 3)
        window.load(number(level), _moment(at), _moment(full_at))
        return
    level, at = several(state.get("pace"), 2)
    window.load(rows_of(state.get("rows")), number(level), _moment(at))


def _moment(value: Any) -> float:
    return -math.inf if value is None else number(value)
