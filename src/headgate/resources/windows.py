"""How much of one limit is left: counted in a window that slides, or learned from what answers say. Pure.

Both kinds of window answer the same questions. `reserved` is what was handed out and has not been counted yet: calls
that run, or what processes lease. The times may be of any clock that never jumps back, always of the same one.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable
from typing import Final

from headgate.resources.rate_limits import Limit

_GRAINS: Final = 100
"""Into how many parts a sliding window is divided. What is counted leaves it up to one part late, never early."""


class SlidingWindow:
    """A limit that we were told: at most `limit` within any `per` seconds."""

    __slots__ = ("_amounts", "_ends", "_used", "limit", "per")

    def __init__(self, limit: float, per: float, rows: Iterable[tuple[float, float]] = ()) -> None:
        """`rows` are those of another window of the same length, to go on from there."""
        self.limit: float = limit
        self.per: float = per
        self._used = 0.0
        self._ends: list[float] = []  # a heap
        self._amounts: dict[float, float] = {}
        for until, amount in rows:
            self._add(until, amount)

    def room(self, reserved: float, now: float) -> float:
        """How much may be taken now."""
        self._forget(now)
        return self.limit - self._used - reserved

    def count(self, amount: float, until: float) -> None:
        """Count what was used. It leaves the window at `until`, or a little later."""
        grain = self.per / _GRAINS
        self._add(math.ceil(until / grain) * grain, amount)

    def room_at(self, amount: float, reserved: float, now: float) -> float:
        """When `amount` may be taken, if nothing else is taken before. What is reserved is gone after `per` seconds."""
        missing = amount - self.room(reserved, now)
        if missing <= 0:
            return now
        for until in sorted(self._ends):
            missing -= self._amounts[until]
            if missing <= 0:
                return until
        return now + self.per

    def rows(self) -> list[tuple[float, float]]:
        """What is counted: until when, and how much."""
        return sorted(self._amounts.items())

    def _add(self, until: float, amount: float) -> None:
        if amount <= 0:
            return
        if until not in self._amounts:
            heapq.heappush(self._ends, until)
        self._amounts[until] = self._amounts.get(until, 0.0) + amount
        self._used += amount

    def _forget(self, now: float) -> None:
        while self._ends and self._ends[0] <= now:
            self._used -= self._amounts.pop(heapq.heappop(self._ends))
        if not self._ends:
            self._used = 0.0  # sums of fractions never come back to 0 exactly


_SAME_WINDOW: Final = 1.0
"""Seconds: servers round the end of a window, and answers take different times to arrive."""
_UNTOLD_RESET: Final = 1.0
"""Seconds after which a limit is asked again whose answers do not say when it is reset."""


LearnedRow = tuple[float | None, float | None, float | None, float | None, bool]
"""What a `LearnedWindow` knows: limit, remaining, resets_from, resets_at, lacked."""


class LearnedWindow:
    """A limit that answers tell of, which may come late and out of order.

    An answer says when its window ends, counted from when the service wrote it. That was after the call began and
    before the answer arrived, so its window ends within some span. Answers whose spans have a time in common are of one
    window, and the lowest `remaining` among them counts: within a window it only falls. A window that ends later is
    newer, and one that ends earlier is old news. This is right for fixed windows, and for buckets that fill steadily
    too: the time when a bucket will be full moves only when something is taken from it.

    When the window is over in which somebody found too little, one call has to find out what there is now.
    """

    __slots__ = ("lacked", "limit", "remaining", "resets_at", "resets_from")

    def __init__(self, row: LearnedRow = (None, None, None, None, False)) -> None:
        """`row` is that of another window, to go on from there."""
        self.limit: float | None
        """How much there is in a window; None: not known."""
        self.remaining: float | None
        """How much of it is left; None: no answer has said so."""
        self.resets_from: float | None
        """Not before this all of it is there again."""
        self.resets_at: float | None
        """When all of it is there again, at the latest; None: no answer has said so."""
        self.lacked: bool
        """Did somebody find too little left, since the window began?"""
        self.limit, self.remaining, self.resets_from, self.resets_at, self.lacked = row

    def observe(self, told: Limit, now: float, began: float) -> None:
        """Learn from an answer that arrived at `now`, to a call that began at `began`."""
        if told.limit is not None:
            self.limit = told.limit
        remaining, known = told.remaining, self.resets_at
        if remaining is None:
            return
        if told.reset_after is None:
            if known is None or now >= known:  # without windows the last answer is the best there is
                self._begin(remaining, None, None)
            else:
                self._lower(remaining)
        elif told.reset_after > 0:
            self._place(remaining, min(began, now) + told.reset_after, now + told.reset_after, now, began)
        elif remaining < 1 and (known is None or now >= known):
            self._begin(remaining, None, None)  # its window ends in this second: some servers round the time down

    def _place(self, remaining: float, first: float, last: float, now: float, began: float) -> None:
        """Learn what was left in a window that ends between `first` and `last`."""
        known_first, known_last = self.resets_from, self.resets_at
        if known_first is None or known_last is None or began >= known_last or first > known_last + _SAME_WINDOW:
            self._begin(remaining, first, last)
        elif now < known_last and last >= known_first - _SAME_WINDOW:
            self._lower(remaining)
            self.resets_from = max(known_first, min(first, known_last))
            self.resets_at = max(self.resets_from, min(last, known_last))

    def room(self, reserved: float, now: float) -> float:
        """How much may be taken now; if the window is over, by one call."""
        if self.remaining is None:
            return math.inf
        if self.is_over(now):
            return math.inf if self.limit is None else self.limit
        return self.remaining - reserved

    def is_over(self, now: float) -> bool:
        """Whether it is not known what is left, because the window is over in which somebody found too little."""
        return self.lacked and self.resets_at is not None and now >= self.resets_at

    def lack(self, now: float) -> None:
        """Note that somebody found too little left."""
        self.lacked = True
        if self.resets_at is None:
            self.resets_from = self.resets_at = now + _UNTOLD_RESET

    def room_at(self, amount: float, reserved: float, now: float) -> float:
        """When `amount` may be taken, as far as answers have said."""
        if self.room(reserved, now) >= amount:
            return now
        if self.resets_at is None or self.resets_at <= now:
            return now + _UNTOLD_RESET
        return self.resets_at

    def count(self, amount: float) -> None:
        """Count what was used by a call whose answer told nothing."""
        if self.remaining is not None:
            self.remaining = max(0.0, self.remaining - amount)

    def forget(self) -> None:
        """Know nothing any more: answers have ceased to tell of this limit."""
        self.limit = self.remaining = self.resets_from = self.resets_at = None
        self.lacked = False

    def row(self) -> LearnedRow:
        """What is known, for another window to go on from."""
        return self.limit, self.remaining, self.resets_from, self.resets_at, self.lacked

    def _begin(self, remaining: float, first: float | None, last: float | None) -> None:
        self.remaining, self.resets_from, self.resets_at, self.lacked = remaining, first, last, False

    def _lower(self, remaining: float) -> None:
        self.remaining = remaining if self.remaining is None else min(self.remaining, remaining)
