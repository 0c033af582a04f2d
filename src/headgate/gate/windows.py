"""Window limits: amounts that come back as time passes. Pure.

    SlidingWindow   at most `limit` in any `per` seconds; starts are paced
    Bucket          `burst` at once, refilled at limit / per
    FixedWindow     `limit` in each period; what remains is spread over the rest of the period
    LearnedLimit    the bucket or the window that a provider's answers describe

All of them answer the same questions: how much may be taken now (`room`), when an amount may be taken (`opens_at`), how
much is left whatever the pace (`left`), how much may ever be taken in one go (`most`), and when all of it is there
again (`refilled_at`). Taking has two steps, because processes that share a limit take amounts
before they use them: `hold` sets an amount aside, `count` counts it from the moment when its call starts. `give_back`
returns an amount that was held and not used. `amend` corrects a counted amount once it is known what the call really
used: the amount changes, the moment does not.

Pacing. A window that is spent at its start leaves urgent work waiting for the next one. So a window lets a `burst`
start at once and spaces the rest: whoever is first in the queue gets the next start within about per / limit seconds.
A configured `Bucket` needs none of this: once it is empty, its refill is the pace.

Times may be of any clock that never jumps back, always of the same one.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import deque
from typing import Final

BURST_PART: Final = 0.1
"""The part of a window that may start at once, unless `burst` says otherwise."""
_GRAINS: Final = 200
"""The number of rows in which a sliding window is kept. Amounts leave it one to two rows late, never early. That costs
up to 1 % of the window, and covers calls that overtake each other on their way to the provider."""
_REPACE: Final = 0.01
"""Seconds after which the pace is worked out again. That looks at all rows, so a fast window does not do it for each
start; a slow one does, and its starts are even."""
_LEAST_MARGIN: Final = 0.01
"""Seconds by which amounts leave a sliding window late at least."""
CLOSE: Final = 1e-6
"""Amounts closer than this are equal: sums of fractions are not exact."""
_PEAKS: Final = 64
"""How many levels of a bucket are remembered, to know what would have overflowed."""
SOON: Final = 1e-4
"""Seconds. What is not there now is not there sooner than this."""

Row = list[float]
"""A moment and an amount."""


def default_burst(limit: float) -> float:
    """The amount that may start at once in a window with this limit."""
    return max(1.0, limit * BURST_PART)


class Pace:
    """Lets up to `burst` pass at once. An amount larger than that passes when `burst` is there, and leaves a debt."""

    __slots__ = ("at", "burst", "level", "unit")

    def __init__(self, burst: float, level: float | None = None, at: float = -math.inf) -> None:
        self.burst: float = burst
        self.level: float = burst if level is None else level
        self.at: float = at
        self.unit: float = 1.0
        """What a large call takes."""

    def take(self, amount: float) -> None:
        self.level -= amount
        self.unit = max(amount, 0.97 * self.unit)

    def refill(self, rate: float, now: float) -> None:
        if now > self.at:
            gained = 0.0 if math.isinf(self.at) else rate * (now - self.at)
            self.level, self.at = min(self.burst, self.level + gained), now

    def add(self, amount: float) -> None:
        self.level = min(self.burst, self.level + amount)

    def room(self) -> float:
        """How much may pass: anything, once the whole burst is there."""
        return math.inf if self.level >= self.burst - CLOSE else self.level

    def lacks(self, amount: float) -> float:
        """What is missing until `amount` may pass."""
        return max(0.0, min(amount, self.burst) - self.level)


# -- limits that we were told ------------------------------------------------------------------------------------------


class SlidingWindow:
    """At most `limit` in any `per` seconds.

    Up to `burst` starts at once. Then starts follow at the fastest even pace that never runs into the window: slower
    than limit / per while the burst is in the window, and limit / per after that. So the whole limit is used, and there
    is never a long gap.
    """

    __slots__ = (
        "_bottleneck",
        "_delay",
        "_grain",
        "_margin",
        "_pace",
        "_paced_at",
        "_rate",
        "_repaced_at",
        "_rows",
        "_used",
        "held",
        "limit",
        "per",
    )

    def __init__(self, limit: float, per: float, burst: float | None = None, delay: float = 0.0) -> None:
        """`delay` is added to every count: for calls that may reach the provider that much later than they start."""
        self.limit: float = limit
        self.per: float = per
        self.held: float = 0.0
        self._delay = delay
        self._grain = per / _GRAINS
        self._margin = max(self._grain, _LEAST_MARGIN)
        self._rows: list[Row] = []  # when an amount leaves the window, and the amount; in order
        self._used = 0.0
        self._pace = Pace(default_burst(limit) if burst is None else burst)
        self._rate = self._base_rate
        self._paced_at = self._repaced_at = -math.inf
        self._bottleneck = math.inf

    @property
    def most(self) -> float:
        """The largest amount that may ever be taken in one go."""
        return self.limit

    def left(self, now: float) -> float:
        """How much of the window is not used."""
        self._forget(now)
        return self.limit - self._used - self.held

    def room(self, now: float, *, paced: bool = True) -> float:
        """How much may be taken now."""
        left = self.left(now)
        self._refill(now)
        return min(left, self._pace.room()) if paced else left

    def opens_at(self, amount: float, now: float) -> float:
        """When `amount` may be taken if nothing else is; infinite if that depends on what is held."""
        if self.room(now) >= amount - CLOSE:
            return now
        return max(self._left_at(amount, now), self._paced(amount, now))

    def refilled_at(self, now: float) -> float:
        """When nothing is used any longer, if nothing else is taken."""
        self._forget(now)
        return self._rows[-1][0] if self._rows else now

    def hold(self, amount: float, now: float) -> None:
        """Set an amount aside."""
        self._forget(now)
        self._refill(now)
        self._pace.take(amount)
        self.held += amount
        if now >= self._repaced_at + _REPACE:
            self._repaced_at, self._paced_at = now, -math.inf

    def give_back(self, amount: float, now: float) -> None:
        """Return an amount that was held and is not used."""
        self.held = max(0.0, self.held - amount)
        self._refill(now)
        self._pace.add(amount)

    def count(self, amount: float, start: float, now: float) -> None:
        """Count an amount that is used by a call that started at `start`."""
        self._add(self._leaves_at(start), amount)

    def amend(self, change: float, start: float, now: float) -> None:
        """Correct what was counted for a call that started at `start`."""
        leaves_at = self._leaves_at(start)
        if leaves_at > now:
            self._add(leaves_at, change)
            self._pace.add(-change)
            self._paced_at = -math.inf

    def retime(self, since: float, now: float) -> None:
        """Count what started since then as started now: those calls could not reach the provider before."""
        late = bisect_left(self._rows, [self._leaves_at(since)])
        moved, self._rows[late:] = sum(amount for _, amount in self._rows[late:]), []
        self._used -= moved
        self._add(self._leaves_at(now), moved)
        self._pace.level, self._pace.at = min(self._pace.level, self._pace.burst - moved), now
        self._paced_at = -math.inf

    def rows(self) -> list[Row]:
        """What is counted: when it leaves the window, and how much."""
        return self._rows

    def load(self, rows: list[Row], level: float, at: float) -> None:
        """Continue from what another window of the same quota has counted, and from its pace."""
        for leaves_at, amount in rows:
            self._add(leaves_at, amount)
        self._pace.level, self._pace.at = min(level, self._pace.burst), at

    @property
    def pace(self) -> tuple[float, float]:
        """How much may start at once, and as of when."""
        return self._pace.level, self._pace.at

    @property
    def _base_rate(self) -> float:
        return self.limit / (self.per + self._delay + self._grain / 2 + self._margin)

    def _leaves_at(self, start: float) -> float:
        return math.ceil((start + self._delay) / self._grain) * self._grain + self._margin + self.per

    def _add(self, leaves_at: float, amount: float) -> None:
        self._used += amount
        place = bisect_left(self._rows, [leaves_at])
        if place < len(self._rows) and self._rows[place][0] == leaves_at:
            self._rows[place][1] += amount
        elif amount:
            self._rows.insert(place, [leaves_at, amount])

    def _forget(self, now: float) -> None:
        gone = bisect_right(self._rows, [now, math.inf])
        if gone:
            self._used -= sum(amount for _, amount in self._rows[:gone])
            del self._rows[:gone]
            self._paced_at = -math.inf
            if not self._rows:
                self._pace.level = self._pace.burst  # whatever a call has overspent has left the window too
        if not self._rows:
            self._used = 0.0  # sums of fractions never come back to 0 exactly

    def _left_at(self, amount: float, now: float) -> float:
        missing = amount - self.left(now)
        if missing <= CLOSE:
            return now
        for leaves_at, gone in self._rows:
            missing -= gone
            if missing <= CLOSE:
                return leaves_at
        return math.inf

    def _paced(self, amount: float, now: float) -> float:
        lacks = self._pace.lacks(amount)
        if not lacks:
            return now
        rate, until = self._rate, min(self._bottleneck, now + self.per)
        gained = rate * (until - now)
        if gained >= lacks:
            at = now + max(SOON, lacks / rate)
        else:
            at = until + (lacks - gained) / self._base_rate  # the pace rises when the bottleneck is past
        if self._rows:  # it rises a little with each row that leaves, and the last one leaves no debt behind
            at = min(at, max(now + SOON, self._rows[0 if rate < self._base_rate else -1][0]))
        return at

    def _refill(self, now: float) -> None:
        self._pace.refill(self._rate, now)
        if self._paced_at == -math.inf:  # something has changed
            self._paced_at = now
            self._rate, self._bottleneck = self._even_rate(now)

    def _even_rate(self, now: float) -> tuple[float, float]:
        """The fastest even pace that does not run into the window, and until when it lasts."""
        free, rate, until = self.limit - self._used - self.held, self._base_rate, math.inf
        for leaves_at, amount in self._rows:
            fits = free + min(amount, self._pace.unit)  # one more starts at the very moment when this leaves
            if fits < rate * (leaves_at - now):
                rate, until = max(0.0, fits) / (leaves_at - now), leaves_at
            free += amount
        return rate, until


class Bucket:
    """`burst` at once, refilled at limit / per: any t seconds see at most burst + t * limit / per."""

    __slots__ = ("_at", "_level", "_peaks", "burst", "full_at", "held", "limit", "rate")

    def __init__(self, limit: float, per: float, burst: float | None = None, delay: float = 0.0) -> None:
        self.limit: float = limit
        self.rate: float = limit / per
        self.burst: float = max(1.0, (limit if burst is None else burst) - self.rate * delay)
        self.held: float = 0.0
        self.full_at: float = -math.inf
        """When it was last found full, so that more would have overflowed."""
        self._level, self._at = self.burst, -math.inf
        # How full it was before amounts were taken, and when: of these the ones that no later one exceeds.
        self._peaks: deque[tuple[float, float]] = deque(maxlen=_PEAKS)

    @property
    def most(self) -> float:
        """The largest amount that may ever be taken in one go."""
        return self.burst

    def left(self, now: float) -> float:
        """How much is in the bucket."""
        if now > self._at:
            gained = 0.0 if math.isinf(self._at) else self.rate * (now - self._at)
            self._level, self._at = self._level + gained, now
            if self._level >= self.burst - self.held:
                self._level, self.full_at = self.burst - self.held, now
        return self._level

    def room(self, now: float, *, paced: bool = True) -> float:
        """How much may be taken now."""
        return self.left(now)

    def opens_at(self, amount: float, now: float) -> float:
        """When `amount` may be taken if nothing else is; infinite if it is more than the bucket holds."""
        missing = amount - self.room(now)
        if missing <= CLOSE:
            return now
        return now + max(SOON, missing / self.rate) if amount <= self.burst + CLOSE else math.inf

    def refilled_at(self, now: float) -> float:
        """When it is full, if nothing else is taken."""
        return now + max(0.0, self.burst - self.held - self.left(now)) / self.rate

    def hold(self, amount: float, now: float) -> None:
        """Take an amount out."""
        level, peaks = self.left(now), self._peaks
        while peaks and peaks[-1][1] <= level:
            peaks.pop()
        peaks.append((now, level))
        self._level = level - amount
        self.held += amount

    def give_back(self, amount: float, now: float) -> None:
        """Put back an amount that was held and is not used."""
        self.held = max(0.0, self.held - amount)
        self._level = min(self.burst - self.held, self.left(now) + amount)

    def count(self, amount: float, start: float, now: float) -> None:
        """Do nothing: `hold` has taken the amount out."""

    def amend(self, change: float, start: float, now: float) -> None:
        """Correct what was taken out for a call. What comes back and would have overflowed since is lost."""
        left = self.left(now)
        if change < 0 and start < self.full_at:
            return
        if change < 0:
            highest = max((level for at, level in self._peaks if at > start), default=left)
            change = max(change, min(0.0, max(highest, left) - self.burst))
        self._level = min(self.burst - self.held, left - change)

    def load(self, level: float, at: float, full_at: float) -> None:
        """Continue from the level of another bucket of the same quota."""
        self._level, self._at, self.full_at = min(level, self.burst), at, full_at

    @property
    def pace(self) -> tuple[float, float]:
        """How much is in the bucket, and as of when."""
        return self._level, self._at


class FixedWindow:
    """`limit` in each period of `per` seconds. A period begins with the first start after the one before it has ended.

    Up to `burst` starts at once; what remains is spread evenly until the period ends.
    """

    __slots__ = ("_begin", "_left", "_pace", "held", "limit", "per")

    def __init__(self, limit: float, per: float, burst: float | None = None, delay: float = 0.0) -> None:
        self.limit: float = limit
        self.per: float = per + delay
        self.held: float = 0.0
        self._pace = Pace(default_burst(limit) if burst is None else burst)
        self._begin, self._left = -math.inf, limit

    @property
    def most(self) -> float:
        """The largest amount that may ever be taken in one go."""
        return self.limit

    def left(self, now: float) -> float:
        """How much of this period is not used."""
        self._roll(now)
        return self._left - self.held

    def room(self, now: float, *, paced: bool = True) -> float:
        """How much may be taken now."""
        left = self.left(now)
        self._refill(now)
        return min(left, self._pace.room()) if paced else left

    def opens_at(self, amount: float, now: float) -> float:
        """When `amount` may be taken if nothing else is."""
        if self.room(now) >= amount - CLOSE:
            return now
        end = self._begin + self.per
        if self.left(now) < amount - CLOSE:
            return end if math.isfinite(end) else math.inf
        rate = self._rate(now)
        return min(end, now + max(SOON, self._pace.lacks(amount) / rate)) if rate > 0 else end

    def refilled_at(self, now: float) -> float:
        """When the period ends; `now` if none has begun."""
        self._roll(now)
        return now if math.isinf(self._begin) else self._begin + self.per

    def hold(self, amount: float, now: float) -> None:
        """Set an amount aside."""
        self._roll(now)
        self._refill(now)
        if math.isinf(self._begin):
            self._begin = now
        self._pace.take(amount)
        self.held += amount

    def give_back(self, amount: float, now: float) -> None:
        """Return an amount that was held and is not used."""
        self.held = max(0.0, self.held - amount)
        self._pace.add(amount)

    def count(self, amount: float, start: float, now: float) -> None:
        """Count an amount that is used by a call that started at `start`."""
        if start >= self._begin:
            self._left -= amount

    def amend(self, change: float, start: float, now: float) -> None:
        """Correct what was counted for a call that started at `start`."""
        self._roll(now)
        if start >= self._begin:
            self._left -= change
            self._pace.add(-change)

    def load(self, left: float, begin: float, level: float, at: float) -> None:
        """Continue from another window of the same quota."""
        self._left, self._begin = min(left, self.limit), begin
        self._pace.level, self._pace.at = min(level, self._pace.burst), at

    @property
    def state(self) -> tuple[float, float, float, float]:
        """What is left, when the period began, and the pace."""
        return self._left, self._begin, self._pace.level, self._pace.at

    def _rate(self, now: float) -> float:
        end = self._begin + self.per
        left = max(0.0, self._left - self.held)
        return (left + self._pace.unit) / max(end - now, SOON) if math.isfinite(end) else 0.0

    def _refill(self, now: float) -> None:
        self._pace.refill(self._rate(self._pace.at), now)  # the pace as `opens_at` has promised it

    def _roll(self, now: float) -> None:
        if now >= self._begin + self.per:
            self._begin, self._left = -math.inf, self.limit
            self._pace.level, self._pace.at = self._pace.burst, now
