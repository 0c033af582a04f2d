"""What is left of one quota: its windows, and what was handed out and has not been counted yet. Pure.

The same ledger serves one process, where what is handed out are calls, and the state that several processes share,
where it is what they lease.

A quota that is learned begins with one call at a time, until an answer came: it may tell of limits, or of none. And
when a window is over in which too little was left, one call finds out what there is in the next. If it comes too
early, that is one refusal, and not one for each call that waited.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, Final

from headgate.resources.quota import Quota, QuotaSetting
from headgate.resources.rate_limits import Limit
from headgate.resources.windows import LearnedWindow, SlidingWindow

Need = Mapping[str, float]
"""How much of each limit a call takes, by the name of the limit."""

REQUESTS: Final = "requests"
TOKENS: Final = "tokens"

_MOST_WINDOWS: Final = 8
"""Names of limits come from a server, which may invent any number of them."""


def needed(name: str, cost: float, most: float | None = None) -> float:
    """How much of one limit a call takes that costs so many tokens, but not more than `most`.

    Whole amounts: sums of fractions are not exact, and a call that needs all there is would wait for the last bit.
    """
    amount = max(1.0, float(math.ceil(cost))) if name.endswith(TOKENS) else 1.0
    return amount if most is None else min(amount, max(1.0, float(math.floor(most))))


class Ledger:
    """What is left of one quota."""

    def __init__(self, quota: QuotaSetting) -> None:
        self.quota: QuotaSetting = quota
        self.wants_exchange: bool = False
        """Nothing is ever to be sent: all of it is here."""
        self.fixed: dict[str, SlidingWindow] = {}
        self.learned: dict[str, LearnedWindow] = {}
        self.reserved: dict[str, float] = {}
        self.probing: bool = False
        """Does a call find out what there is?"""
        self.heard: bool = False
        """Has an answer come, since which it is known whether answers tell of limits?"""
        if isinstance(quota, Quota):
            limits = {REQUESTS: quota.requests, TOKENS: quota.tokens}
            self.fixed = {name: SlidingWindow(limit, quota.per) for name, limit in limits.items() if limit is not None}
        else:
            self.learned = {REQUESTS: LearnedWindow()}

    # -- taking -------------------------------------------------------------------------------------------------------

    def need(self, cost: float) -> dict[str, float]:
        """What a call takes that costs so many tokens. One whose cost is not known takes a token."""
        need = {name: needed(name, cost) for name in self.fixed}
        for name, window in self.learned.items():
            need[name] = needed(name, cost, window.limit)
        return need

    def can_ever_allow(self, cost: float) -> bool:
        """Whether a call that costs so many tokens fits into a whole window."""
        window = self.fixed.get(TOKENS)
        return window is None or cost <= window.limit

    def needs_probe(self, now: float) -> bool:
        """Whether one call has to find out what there is before others may begin."""
        if not self.learned:
            return False
        return not self.heard or any(window.is_over(now) for window in self.learned.values())

    def allows(self, need: Need, now: float) -> bool:
        """Whether so much may be taken now."""
        if self.needs_probe(now):
            return not self.probing
        return all(self.room(name, now) >= amount for name, amount in need.items())

    def room(self, name: str, now: float) -> float:
        """How much of one limit may be taken now; infinite if it is not known, or not limited."""
        window: SlidingWindow | LearnedWindow | None = self.fixed.get(name) or self.learned.get(name)
        return math.inf if window is None else window.room(self.reserved.get(name, 0.0), now)

    def lack(self, need: Need, now: float, *, waits: bool = True) -> None:
        """Note that there is less than so much. Does a call wait for it?"""
        if self.needs_probe(now):
            return
        for name, window in self.learned.items():
            if self.room(name, now) < need.get(name, 0.0):
                window.lack(now)

    def opens_at(self, need: Need, now: float) -> float:
        """When so much may be taken, as far as can be told; `now` if it may be taken now."""
        if self.needs_probe(now):
            return now if not self.probing else math.inf
        windows: dict[str, SlidingWindow | LearnedWindow] = {**self.fixed, **self.learned}
        times = (
            window.room_at(need.get(name, 0.0), self.reserved.get(name, 0.0), now) for name, window in windows.items()
        )
        return max(times, default=now)

    def reserve(self, need: Need, now: float) -> bool:
        """Hand out so much. True: to a call that has to find out what there is."""
        is_probe = self.needs_probe(now) and not self.probing
        self.probing = self.probing or is_probe
        for name, amount in need.items():
            self.reserved[name] = self.reserved.get(name, 0.0) + amount
        return is_probe

    def release(self, need: Need, *, used: bool = True) -> None:
        """Take back what was handed out. What was used is counted apart."""
        for name, amount in need.items():
            self.reserved[name] = max(0.0, self.reserved.get(name, 0.0) - amount)

    # -- counting -----------------------------------------------------------------------------------------------------

    def count(self, name: str, amount: float, until: float) -> None:
        """Count what was used of a limit that we were told, until it leaves the window."""
        window = self.fixed.get(name)
        if window is not None:
            window.count(amount, until)

    def count_untold(self, used: Need) -> None:
        """Count what calls used whose answers told nothing."""
        for name, window in self.learned.items():
            window.count(used.get(name, 0.0))

    def observe(self, limits: Iterable[Limit], now: float, began: float) -> None:
        """Learn what an answer told that arrived at `now`, to a call that began at `began`."""
        if not self.learned:
            return
        self.heard = True
        for told in limits:
            window = self.learned.get(told.name)
            if window is None and len(self.learned) < _MOST_WINDOWS:
                window = self.learned[told.name] = LearnedWindow()
            if window is not None:
                window.observe(told, now, began)

    def probed(self, now: float, *, answered: bool, told: bool) -> None:
        """Note that the call has ended that had to find out what there is; `told`: its answer said something."""
        self.probing = False
        if answered and not told:
            self.heard = True
            for window in self.learned.values():
                if window.is_over(now):
                    window.forget()

    # -- as a state that processes share ------------------------------------------------------------------------------

    def body(self) -> dict[str, Any]:
        """What is counted and learned, as JSON can hold it. What is reserved is not part of it."""
        return {
            "fixed": {name: window.rows() for name, window in self.fixed.items()},
            "learned": {name: window.row() for name, window in self.learned.items()},
            "heard": self.heard,
            "probing": self.probing,
        }

    def load(self, body: Mapping[str, Any]) -> None:
        """Go on from what `body` wrote, for the same quota. Raises ValueError for anything else."""
        for name, rows in _mapping(body.get("fixed")).items():
            if name in self.fixed:
                known = self.fixed[name]
                pairs = [(_number(until), _number(amount)) for until, amount in map(_pair, rows)]
                self.fixed[name] = SlidingWindow(known.limit, known.per, pairs)
        if self.learned:
            for name, row in list(_mapping(body.get("learned")).items())[:_MOST_WINDOWS]:
                if not isinstance(row, list) or len(row) != 5 or type(row[4]) is not bool:
                    raise ValueError("a learned limit has the wrong form")
                limit, remaining, first, last = (None if one is None else _number(one) for one in row[:4])
                self.learned[name] = LearnedWindow((limit, remaining, first, last, row[4]))
        self.heard = body.get("heard") is True
        self.probing = body.get("probing") is True


def _mapping(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ValueError("a mapping is missing")
    return value


def _pair(value: Any) -> tuple[Any, Any]:
    if not isinstance(value, list) or len(value) != 2:
        raise ValueError("a row has the wrong length")
    return value[0], value[1]


def _number(value: Any) -> float:
    if type(value) not in (int, float) or not math.isfinite(value) or value < 0:
        raise ValueError("an amount is not a number")
    return float(value)
