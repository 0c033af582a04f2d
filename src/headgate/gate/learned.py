"""Limits that a provider's answers describe. Pure."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections.abc import Mapping
from typing import Any, Final, Literal, NamedTuple

from headgate.gate.refusals import Inference, RefusalMeter
from headgate.gate.windows import CLOSE, SOON, Pace, Row, default_burst

Kind = Literal["bucket", "window"]

_PERIODS: Final = (60.0, 1.0, 3600.0, 86400.0)
"""What providers count by. A rate that answers leave open is taken to be one of these, if it can be."""
_TRANSIT: Final = 0.05
"""Seconds by which calls may differ on their way to the provider. Grows with refusals."""
_MOST_CAUTION: Final = 40.0
_REGAINED: Final = 3e-9
"""The part by which a measured rate grows with each answer, times the square of the answers since the last refusal. So
about one call in 300 finds out whether more is allowed, and a rate that has doubled is noticed after 900 calls."""
_FOUND: Final = 3e-8
"""The same for a limit that only refusals describe: about one call in 100 finds out, as nothing else would tell."""
_EXACT: Final = 0.01
"""Once a rate is measured as exactly as this, measuring begins again: the rate may change."""
_LEAST_PART: Final = 0.1
"""The part of the rate in the headers that remains whatever is measured: refusals may have other causes."""
_ORDER: Final = 0.25
"""Seconds within which calls may be counted in another order than they started in, unless answers come sooner."""
_JITTER: Final = 0.02
_SAME_END: Final = 1.0
"""Seconds: ends of windows that are closer than this are the same."""
_UNTOLD: Final = 1.0
"""Seconds after which one call asks again, when answers do not say when an amount comes back."""
_LONGEST_SPREAD: Final = 3600.0
"""Seconds. A longer window is not spread if answers do not say when it ends: that may be soon."""
_EVEN_BURST: Final = 0.02
"""The part of such a window that may start at once. Nobody says when it comes back, so it must fit beside the rest."""
_KEPT_BACK: Final = 0.01
"""The part that stays unused, as calls may be counted closer together than they start."""
_SPREAD: Final = 3.0
"""Seconds over which what a bucket has saved is spread at least, unless it fills faster."""
_LATENCIES: Final = 4.0
"""The same, as a multiple of the time that answers take."""
_AGREE: Final = 2
"""Answers in a row that must say that a window ends earlier than was known."""
_MOST_VOTES: Final = 3
_MOST_ROWS: Final = 1024
_ROUNDED_TO: Final = 1000.0
"""Some providers round what remains of tokens to thousands."""


class _Answer(NamedTuple):
    """An answer to compare later ones with."""

    start: float
    arrived: float
    used: float
    reset: float


class LearnedLimit:
    """The limit that answers describe: a bucket that refills all the time, or a window that ends and begins again.

    The same headers mean different things. A bucket's reset is the time until it is *full*: each call moves "full at"
    by amount / rate, so used / reset stays the same. A window's reset is the time until it *ends*, which no call moves.
    So two answers tell the kinds apart; `_votes` counts what answers agree on.

    `_level` is our own estimate: it falls with each start and, in a bucket, rises with time. An answer says what was
    left when *its* call was counted: calls that started later are not in it, calls that started earlier are, and of
    those that started at about the same time nobody knows. So an answer gives a lowest and a highest level, and the
    estimate is moved only if it is outside. Old answers say nothing new. That makes it right in any order of answers,
    with any number of calls in flight, and when others use the same key.

    Starts are paced, whatever the kind: a tenth of the limit at once, and what is left evenly until the window ends.
    What a bucket has saved is spread over a few seconds, or over four times as long as answers take. If a full bucket
    is spent at once, its answers come at once too: the slots of a pool run out in waves, and headers that promise too
    much cost a storm of refusals.

    A refusal has one of three causes, and each has its own correction, so that few refusals are enough. Less remains
    than the headers say (`_overstated`): from then on they never raise our estimate of a bucket. It refills more slowly
    than they say (`_measured`): two refusals are exact moments between which the accepted calls are what has flowed in.
    Or calls overtook each other on their way (`_caution`): a constant part of a bucket stays unused, at the full rate.

    Some providers send no headers. As long as none has come, `_meter` infers a bucket from refusals alone.
    """

    __slots__ = (
        "_accepted",
        "_anchor",
        "_answers",
        "_as_of",
        "_asked",
        "_asks_at",
        "_at",
        "_caution",
        "_counts_tokens",
        "_earlier",
        "_empty_since",
        "_end",
        "_inferred",
        "_is_sure",
        "_latency",
        "_level",
        "_measured",
        "_meter",
        "_newest",
        "_overstated",
        "_pace",
        "_per",
        "_rate_range",
        "_rated",
        "_refused_at",
        "_rows",
        "_span",
        "_votes",
        "held",
        "kind",
        "limit",
        "rate",
    )

    def __init__(self, *, counts_tokens: bool = False) -> None:
        self.limit: float | None = None
        """How much a full bucket or a whole window holds, or None if no answer has said so."""
        self.kind: Kind | None = None
        """What the answers describe, or None if they leave it open."""
        self.rate: float | None = None
        """How fast a bucket refills, or None if that is not known."""
        self.held: float = 0.0
        self._counts_tokens = counts_tokens
        self._level: float | None = None  # without what is held
        self._as_of = -math.inf  # the time of `_level`
        self._newest = -math.inf  # start of the newest call that was answered
        self._asks_at = math.inf  # when one call finds out whether a bucket or a window has nothing left
        self._asked = -math.inf  # the start of that call
        self._end = math.inf  # when the window ends, or all of it is there again
        self._earlier = 0  # answers in a row that said it ends earlier
        self._span = 0.0  # the longest time until then that was told
        self._votes = 0  # > 0: a bucket; < 0: a window
        self._anchor: _Answer | None = None
        self._rate_range = (0.0, math.inf)
        self._rated = (0.0, 0.0, 0.0)  # what was used, and the rate that followed, in an answer to compare others with
        self._caution = 1.0
        self._refused_at = -math.inf  # when the last refusal came that was not of the same storm as the one before
        self._empty_since: float | None = None  # when a refused call would have been allowed: measured from then on
        self._accepted = 0.0  # what calls took since then, less what that one would have taken
        self._is_sure = True  # was no call in flight behind those that were refused since then?
        self._measured = math.inf  # how fast a bucket refills at most, as refusals show
        self._meter = RefusalMeter()
        self._inferred = False  # do refusals alone describe it?
        self._overstated = 0.0  # by how much `remaining` is more than there is, as refusals show
        self._answers = 0  # since the last refusal
        self._latency = 0.0  # the longest that a recent answer took
        self._rows: list[Row] = []  # calls that started since `_newest`, or shortly before: start and amount
        self._at = -math.inf  # the last start
        self._pace = Pace(1.0)
        self._per: float | None = None  # the length of a window whose end answers do not tell

    @property
    def is_known(self) -> bool:
        """Whether an answer has said what is left."""
        return self._level is not None

    @property
    def is_told(self) -> bool:
        """Whether an answer has said how much there is. What refusals alone have shown is a guess."""
        return self.limit is not None and not self._inferred

    def _conclude(self) -> None:
        """Draw the conclusions from what was learned: the rate and the kind."""
        before, self.rate = self.rate, None if self.limit is None else self._likely_rate(self.limit)
        if self.rate and before and self.rate < before and self._level is not None and self._level < 0:
            self._level *= (
                self.rate / before
            )  # what lacks stands for the wait that a refusal named, which stays as it is
        if self._votes > 0:
            self.kind = "bucket" if self.rate is not None else None
        else:
            self.kind = "window" if self._votes else None

    def _likely_rate(self, limit: float) -> float | None:
        """The rate that answers describe, as far as refusals do not contradict."""
        low, high = self._rate_range
        if self._inferred:
            return self._measured
        if math.isinf(high):
            return None
        told = low + (high - low) / 4 if low > 0 else high / 2
        told = next((limit / per for per in _PERIODS if low <= limit / per <= high), told)
        return min(told, max(self._measured, _LEAST_PART * told))

    @property
    def _order(self) -> float:
        """Seconds within which calls may be counted in another order than they started in."""
        return min(_ORDER, self._latency)

    # -- taking --------------------------------------------------------------------------------------------------------

    def left(self, now: float) -> float:
        """How much is left; infinite if that is not known."""
        self._advance(now)
        return math.inf if self._level is None else self._level - self.held

    def room(self, now: float, *, paced: bool = True) -> float:
        """How much may be taken now."""
        left = self.left(now)
        if math.isinf(left):
            return left
        if self.limit is not None and left >= self.limit - self._overstated - CLOSE:
            left = self.limit  # nothing is used: if a call fits at all, it fits now
        elif self.kind == "bucket":
            left -= self._slack()
        elif math.isinf(self._end) and now >= self._at + self._untold:
            return math.inf  # nobody said when there is more: one call asks
        elif self.kind is None and now >= self._asks_at:
            return max(1.0, left)
        if self.limit is None or not paced:
            return left
        if now > self._pace.at:  # benchmarks/quotas.py: this is asked several times for each call
            self._pace.refill(self._even_rate(left, now), now)
        return min(left, self._pace.room())

    def opens_at(self, amount: float, now: float) -> float:
        """When `amount` may be taken if nothing else is."""
        if self.room(now) >= amount - CLOSE:
            return now
        left = self.left(now)
        paced_at = now + max(SOON, self._pace.lacks(amount) / self._even_rate(left, now))
        if self.kind == "bucket" and self.rate:
            enough = amount + self._slack()
            enough = enough if self.limit is None else min(enough, self.limit)
            return max(now + SOON, min(max(paced_at, now + (enough - left) / self.rate), self._full_at()))
        opens_at = self._ends_at()
        if left >= amount - CLOSE:
            opens_at = min(opens_at, paced_at)
        if self.kind is None:
            opens_at = min(opens_at, self._asks_at)
        if math.isinf(self._end):  # if answers under way do not tell, one call asks again
            opens_at = min(opens_at, self._at + self._untold)
        return max(now + SOON, opens_at)

    @property
    def most(self) -> float:
        """The largest amount that may ever be taken in one go: calls reserve no more than a whole limit."""
        return math.inf

    def refilled_at(self, now: float) -> float:
        """When all of it is there again if nothing else is taken; infinite if that is not known."""
        left = self.left(now)
        if self.limit is not None and left >= self.limit - CLOSE:
            return now
        if self.kind == "bucket" and self.rate and self.limit is not None:
            return now + (self.limit - left) / self.rate
        return self._end

    def hold(self, amount: float, now: float) -> None:
        """Set an amount aside."""
        self._advance(now)
        self.held += amount
        self._pace.take(amount)

    def give_back(self, amount: float, now: float) -> None:
        """Return an amount that was held and is not used."""
        self.held = max(0.0, self.held - amount)
        self._pace.add(amount)

    def count(self, amount: float, start: float, now: float) -> None:
        """Count an amount that is used by a call that started at `start`."""
        if self._level is None:
            self._infer(self._meter.started(amount, start), now)
        elif self._inferred:
            self._answers += 1
            self._measured *= 1.0 + _FOUND * self._answers**2
            self._conclude()
        self._at = max(self._at, start)
        self._accepted += amount
        if start >= self._asks_at:
            self._asks_at, self._asked = math.inf, start
        if self._level is not None:
            self._level -= amount
        insort(self._rows, [start, amount])
        if len(self._rows) > _MOST_ROWS:
            self._merge()

    def amend(self, change: float, start: float, now: float) -> None:
        """Correct what was counted for a call that started at `start`, unless its answer or a later one has told since.

        An answer says what the provider has taken for the call, which may be more than the call used.
        """
        if start <= self._newest:
            return
        place = bisect_left(self._rows, [start])
        if place < len(self._rows) and self._rows[place][0] == start:
            self._rows[place][1] += change
            self._accepted += change
            if self._level is not None:
                self._level -= change
                if self.limit is not None:
                    self._level = min(self._level, self.limit)
            self._pace.add(-change)

    # -- learning ------------------------------------------------------------------------------------------------------

    def observe(
        self,
        limit: float | None,
        remaining: float | None,
        reset: float | None,
        *,
        start: float,
        now: float,
        per: float | None = None,
    ) -> None:
        """Learn from an answer that arrived at `now` to a call that started at `start`. `per`: its window's length."""
        if self._inferred and remaining is not None:
            self._forget()
        if limit is not None and limit >= 1 and limit != self.limit:  # nobody is allowed less than one call
            self._learn_limit(limit)
        if remaining is None:
            return
        self._answers += 1
        self._learn_length(per if reset is None and per is not None and 0 < per <= _LONGEST_SPREAD else None)
        self._latency = max(now - start, 0.9 * self._latency)
        self._caution = max(1.0, self._caution * 0.98)
        if self._measured < math.inf:
            self._measured *= 1.0 + _REGAINED * self._answers**2
        self._advance(now)
        was = self.kind
        if reset is not None and reset > 0 and self.limit is not None:
            self._compare(_Answer(start, now, self.limit - remaining, reset))
            self._learn_rate(self.limit - remaining, reset, remaining)
            self._conclude()
        remaining = max(0.0, remaining - self._overstated)
        if self._level is None or (was != self.kind and start >= self._newest):
            self._begin(remaining, reset, start, now)
        elif self.kind == "bucket":
            self._bound(remaining + (self.rate or 0.0) * max(0.0, now - start), start)
        else:
            self._observe_window(remaining, reset, start, now)
        self._newest = max(self._newest, start)
        if self.kind is None and remaining < 1 and reset and self.limit is not None and not self._counts_tokens:
            self._asks_at = now + max(_TRANSIT, 1.1 * reset / self.limit)  # a bucket has one then, a window has none
        del self._rows[: bisect_left(self._rows, [self._newest - 2 * self._order])]

    def refused(self, after: float | None, remaining: float | None, *, start: float, now: float) -> None:
        """Learn from a refusal: its call was not counted. `after`: the seconds it was asked to wait, if any.

        `remaining` is what the headers of the refusal said. If that was enough for the call, headers promise too much.
        """
        self._answers = 1
        place = bisect_left(self._rows, [start])
        amount = self._rows.pop(place)[1] if place < len(self._rows) and self._rows[place][0] == start else 0.0
        self._advance(now)
        if self._level is None:
            self._meter.refused(amount, start, now, after)
            return
        if self.kind == "window" and start < self._end - self._span < math.inf:
            return  # it was of the window before
        was = self.kind
        if after is None and start == self._asked and was is None:
            self._vote(-1)
        elif after is not None and now < self._end < math.inf:  # a bucket has some long before it is full
            left = self._end - now
            self._vote(1 if after < left / 2 - self._order else -1 if after > left - self._order else 0)
        is_explained = self._overstates(amount, after, remaining)
        if self._empty_since is not None and start > self._empty_since:
            self._accepted -= amount
        if self.kind == "bucket" and self.rate:
            lacking = max(1.0, amount)
            if start > self._refused_at:
                is_explained = self._measure(lacking, after, self.rate, start) or is_explained
            if start >= self._newest - self._order:
                then = self._left_then(lacking, after, self.rate)
                flowed = self.rate * (now - start)
                self._level = then + flowed - min(flowed, self._since(start))
            else:
                self._level += amount
        else:
            self._level = min(self._level + amount, 0.0)
            if after is not None and after > 0 and (was is None or math.isinf(self._end)):
                self._end = now + after
        if start > self._refused_at:  # the others of a storm started before anybody knew
            self._refused_at = now
            self._caution = self._caution if is_explained else min(_MOST_CAUTION, self._caution * 2)

    def _infer(self, found: Inference | None, now: float) -> None:
        """Adopt what refusals alone have shown, if anything."""
        if found is None:
            return
        rate, self.limit, empty_at, wait = found
        self._inferred, self._measured, self._votes = True, rate, _MOST_VOTES
        # Calls are in flight that were not counted here, and some will be refused: the next refusal begins the
        # measurement.
        self._empty_since, self._accepted, self._is_sure = None, -1.0, True
        self._level, self._as_of = self._left_then(1.0, wait, rate) + rate * (now - empty_at), now
        self._level = min(self._level, self.limit)
        self._pace = Pace(default_burst(self.limit), 0.0, now)
        self._refused_at = now
        self._conclude()

    def _forget(self) -> None:
        """Forget what refusals alone have shown, because an answer has described the limit."""
        self._inferred, self._measured, self._votes = False, math.inf, 0
        self.limit = self._level = self._empty_since = None
        self._meter = RefusalMeter()
        self._conclude()

    def _left_then(self, amount: float, after: float | None, rate: float) -> float:
        """How much was left when a call of this amount was refused, and asked to wait.

        Without headers, a wait that is longer than it takes to refill is that of a window: it saves nothing meanwhile.
        """
        if after is None:
            return 0.0
        return min(0.0, amount - rate * (after - _rounding(after))) if self._inferred else amount - rate * after

    def _overstates(self, amount: float, after: float | None, remaining: float | None) -> bool:
        """Whether headers said that there was enough for a call that was refused. Learns by how much they are wrong."""
        if remaining is None or self.limit is None or remaining - self._overstated < max(1.0, amount):
            return False
        truth = max(0.0, amount - (self.rate or 0.0) * (after or 0.0)) if self.kind == "bucket" else 0.0
        self._overstated = min(0.9 * self.limit, self.limit - 1.0, remaining - truth)
        return True

    def _measure(self, amount: float, after: float | None, rate: float, start: float) -> bool:
        """Measure how fast a bucket refills by a refusal. Returns True if that explains it: more slowly than was known.

        The bucket has just enough for the refused call when `after` has passed. What was accepted between two such
        moments has flowed in meanwhile. Calls that started in the time from a refused call to that moment were refused
        too, unless one has overtaken it: so the longer the time between two refusals, the more exact is the result.
        """
        wait, doubt = self._empty_for(amount, after, rate)
        later = self._since(start)
        empty_until, flowed = start + wait, self._accepted + amount - later
        del self._rows[bisect_right(self._rows, [start, math.inf]) : bisect_right(self._rows, [empty_until, math.inf])]
        self._is_sure, was_sure = self._is_sure and not later, self._is_sure
        unsure = rate * (2 * doubt + _JITTER) + (0.0 if self._is_sure else amount)
        is_exact = unsure <= _EXACT * flowed
        if self._empty_since is not None and empty_until > self._empty_since and flowed > 0:
            most = flowed if is_exact else flowed + unsure  # rather too fast: then the next refusal tells more
            self._measured = min(self._measured, most / (empty_until - self._empty_since))
            self._conclude()
        if self._empty_since is None or is_exact or not (was_sure or later):
            self._empty_since, self._is_sure, flowed = empty_until, not later, 0.0
        self._accepted = flowed - amount + self._since(empty_until)
        return self.rate is not None and self.rate < rate

    def _empty_for(self, amount: float, after: float | None, rate: float) -> tuple[float, float]:
        """The seconds until there is enough for a refused call, and by how much that may be off."""
        wait = amount / rate
        if after is not None and _rounding(after) < wait:
            return after, _rounding(after)
        if self._inferred and after is not None and after > wait + _rounding(after):  # a window, which ends then
            return after - 0.5, wait
        return wait, wait

    def _learn_limit(self, limit: float) -> None:
        self._rate_range, self._rated, self._anchor = (0.0, math.inf), (0.0, 0.0, 0.0), None
        self._span, self._end = 0.0, math.inf
        self.limit = limit
        self._set_burst()
        if self._level is not None:
            self._level = min(self._level, limit)
        self._conclude()

    def _learn_length(self, per: float | None) -> None:
        """Spread this window by its length, or by its end if `per` is None."""
        if per != self._per:
            self._per = per
            self._set_burst()

    def _set_burst(self) -> None:
        if self.limit is not None:
            even = None if self._per is None else max(1.0, _EVEN_BURST * self.limit)
            self._pace.burst = default_burst(self.limit) if even is None else even
            self._pace.level = min(self._pace.level, self._pace.burst)

    def _begin(self, remaining: float, reset: float | None, start: float, now: float) -> None:
        """Take an answer as it is: it is the first, or the first of this kind."""
        refilled = (self.rate or 0.0) * (now - start) if self.kind == "bucket" else 0.0
        self._level, self._as_of = remaining + refilled - self._since(start), now
        self._end = start + reset if reset else math.inf
        self._span = max(self._span, reset or 0.0)
        self._pace.level, self._pace.at = self._pace.burst, now

    def _observe_window(self, remaining: float, reset: float | None, start: float, now: float) -> None:
        if reset is None or reset <= 0:
            self._bound(remaining, start)
            return
        end = start + reset
        if end > self._end + _SAME_END or math.isinf(self._end):  # of a new window
            self._level = remaining - self._since(start)
            self._end = end
        elif end >= self._end - _SAME_END:
            self._bound(remaining, start)
            self._end, self._earlier = max(self._end, min(end, now + reset)), 0
        elif start >= max(self._newest, self._end - self._span + _SAME_END):  # what is known is wrong, or has changed
            self._earlier += 1
            if self._earlier >= _AGREE:
                self._level, self._end, self._span, self._earlier = remaining - self._since(start), end, reset, 0
        self._span = max(self._span, reset)

    def _bound(self, level: float, start: float) -> None:
        """Take in an answer: the level now would be `level` if no call had been counted after that one."""
        assert self._level is not None
        if start < self._newest - self._order:
            return  # it says nothing new
        highest = level - self._since(start + self._order)
        lowest = level - self._since(start - self._order, start)
        if self._overstated and self.kind == "bucket":
            lowest = -math.inf  # only refusals say how much there is at least
        self._level = min(highest, max(lowest, self._level))
        if self.limit is not None:
            self._level = min(self._level, self.limit)

    def _compare(self, answer: _Answer) -> None:
        """Vote for a bucket or a window: what happened to "now + reset" since an earlier answer?"""
        anchor = self._anchor
        if anchor is None or answer.start >= anchor.start + anchor.reset - self._order:  # that window may have ended
            self._anchor = answer
            return
        if answer.start < min(anchor.arrived, anchor.start + 1.0):
            return  # it may have been counted before
        moved = answer.start + answer.reset - anchor.start - anchor.reset
        made = answer.used - anchor.used if self._counts_tokens else max(1.0, answer.used - anchor.used)
        expected = max(0.0, made) * anchor.reset / max(1.0, anchor.used)  # how far a bucket's "full at" moves at least
        doubt = 2 * (self._order + _rounding(answer.reset)) + _JITTER
        if answer.used < anchor.used and moved > 4 * expected + doubt:
            self._anchor = answer  # a new window
        elif expected > doubt or abs(moved) > doubt:
            self._vote(1 if moved > max(expected, doubt) / 2 else -1)
            self._anchor = answer

    def _compare_rates(self, used: float, low: float, high: float) -> None:
        """Vote for a bucket if its reset has grown or fallen as much as what is used, whatever time has passed."""
        known_used, known_low, known_high = self._rated
        if abs(used - known_used) < max(2.0, 0.5 * known_used):
            return
        if max(low, known_low) <= min(high, known_high):
            self._vote(1)
        self._rated = (used, low, high)

    def _vote(self, vote: int) -> None:
        self._votes = max(-_MOST_VOTES, min(_MOST_VOTES, self._votes + vote)) or vote
        self._conclude()

    def _learn_rate(self, used: float, reset: float, remaining: float) -> None:
        """Narrow down how fast a bucket refills: used / reset, where both are rounded."""
        if used < 1:
            return
        rounded = _ROUNDED_TO if self._counts_tokens and not remaining % _ROUNDED_TO and used >= _ROUNDED_TO else 1.0
        off = _rounding(reset)
        low = max(0.0, used - rounded) / (reset + off)
        high = (used + (rounded if rounded > 1 else 0.0)) / max(reset - off, off / 10)
        if high <= 2.1 * low:
            self._compare_rates(used, low, high)
        known_low, known_high = self._rate_range
        if max(low, known_low) <= min(high, known_high):
            low, high = max(low, known_low), min(high, known_high)
        self._rate_range = (low, high)  # if they contradict each other, the rate has changed, or an answer was wrong

    # -- time passes ---------------------------------------------------------------------------------------------------

    def _advance(self, now: float) -> None:
        """Refill the bucket, or begin the next window: with as much as before, until an answer says otherwise."""
        if self._level is None:
            return
        elapsed, self._as_of = max(0.0, now - self._as_of), max(now, self._as_of)
        if self.kind == "bucket":
            self._level += (self.rate or 0.0) * elapsed
            if self.limit is not None:
                self._level = self.limit if now >= self._full_at() else min(self._level, self.limit)
            full = (self.limit or 0.0) - 1.0 if self._inferred else self._pace.burst + self._slack() + 1.0
            if self._empty_since is not None and self._level > full:
                self._empty_since = None  # it may have been full
        elif now >= self._ends_at():
            begin = self._end if now < self._ends_at() + self._span else now
            whole = 1.0 if self.limit is None else self.limit - self._overstated
            self._level = whole - self._since(begin if self.kind == "window" else min(begin, self._newest))
            self._end = begin + self._span if self._span and self.kind == "window" else math.inf
            self._pace.level, self._pace.at = min(1.0, self._pace.burst), now

    def _full_at(self) -> float:
        """When a bucket is full at the latest, if no other call starts: whatever was refused or overspent."""
        return self._at + self.limit / self.rate if self.limit is not None and self.rate else math.inf

    def _slack(self) -> float:
        return self._caution * _TRANSIT * (self.rate or 0.0)

    def _ends_at(self) -> float:
        return self._end + self._caution * _TRANSIT

    def _even_rate(self, left: float, now: float) -> float:
        """The pace at which what is left lasts until the window ends, or what a bucket has saved is spread.

        If it may be either, the faster of the two: at a pace that leaves it full, answers never tell.
        """
        refill = self._rate_range[1] if self.kind is None else self.rate or 0.0
        pace = 0.0
        if self.kind != "window" and self.limit is not None and 0.0 < refill < math.inf:
            spread = min(self.limit / refill, max(_SPREAD, _LATENCIES * self._latency))
            pace = refill + max(0.0, left) / spread
        if self.kind == "bucket" and pace:
            return pace
        if math.isinf(self._end) and self._per is not None and self.limit is not None:
            after_burst = (1.0 - _KEPT_BACK) * self.limit - (self._pace.burst - 1.0)  # the first is no extra one
            return max(pace, after_burst / self._per)
        if math.isinf(self._end):
            return max(pace, self._pace.burst / _UNTOLD)
        return max(pace, (max(0.0, left) + self._pace.unit) / max(self._ends_at() - now, SOON))

    @property
    def _untold(self) -> float:
        """Seconds after which one call asks again, when answers do not say when an amount comes back."""
        if self._per is None or self.limit is None:
            return _UNTOLD
        return max(_UNTOLD, 2 * self._per / self.limit)  # calls that are spaced leave shorter gaps

    def _since(self, start: float, but: float | None = None) -> float:
        """What calls take that started after `start`, except for the one that started at `but`."""
        later = self._rows[bisect_right(self._rows, [start, math.inf]) :]
        return sum(amount for at, amount in later if at != but) if later else 0.0

    def _merge(self) -> None:
        """Halve the rows. Each amount is counted as started a little later than it was."""
        pairs = zip(self._rows[::2], self._rows[1::2], strict=False)
        self._rows = [[later, first + second] for (_, first), (later, second) in pairs]

    # -- as a state that processes share -------------------------------------------------------------------------------

    def body(self) -> dict[str, Any]:
        """What is known, as JSON can hold it."""
        return {
            "limit": self.limit,
            "level": self._level,
            "as_of": finite(self._as_of),
            "newest": finite(self._newest),
            "end": finite(self._end),
            "span": self._span,
            "earlier": self._earlier,
            "votes": self._votes,
            "anchor": None if self._anchor is None else list(self._anchor),
            "rates": [self._rate_range[0], finite(self._rate_range[1]), *self._rated],
            "caution": [self._caution, finite(self._refused_at)],
            "measured": [finite(self._measured), self._empty_since, self._accepted, int(self._is_sure)],
            "inferred": [int(self._inferred), *self._meter.body()],
            "overstated": self._overstated,
            "answers": self._answers,
            "latency": self._latency,
            "asks": [finite(self._asks_at), finite(self._asked)],
            "rows": self._rows,
            "at": finite(self._at),
            "pace": [self._pace.burst, self._pace.level, finite(self._pace.at)],
            "per": self._per,
        }

    def load(self, body: Mapping[str, Any]) -> None:
        """Continue from what `body` wrote. Raises ValueError for anything else."""
        self.limit, self._level = _optional(body, "limit"), _optional(body, "level")
        self._as_of, self._newest = _optional(body, "as_of", -math.inf), _optional(body, "newest", -math.inf)
        self._end, self._span = _optional(body, "end", math.inf), number(body.get("span"))
        self._earlier = int(number(body.get("earlier")))
        self._votes = int(max(-_MOST_VOTES, min(_MOST_VOTES, number(body.get("votes")))))
        anchor = body.get("anchor")
        self._anchor = None if anchor is None else _Answer(*map(number, several(anchor, 4)))
        low, high, *rated = several(body.get("rates"), 5)
        used_then, low_then, high_then = map(number, rated)
        self._rated = (used_then, low_then, high_then)
        self._rate_range = (number(low), math.inf if high is None else number(high))
        caution, refused_at = several(body.get("caution"), 2)
        self._caution = max(1.0, min(_MOST_CAUTION, number(caution)))
        self._refused_at = -math.inf if refused_at is None else number(refused_at)
        measured, empty_since, accepted, is_sure = several(body.get("measured"), 4)
        self._measured = math.inf if measured is None else number(measured)
        self._empty_since = None if empty_since is None else number(empty_since)
        self._accepted, self._is_sure = number(accepted), is_sure == 1
        inferred, *counted = several(body.get("inferred"), 14)
        self._inferred = inferred == 1
        amounts, times = map(number, counted[:4]), (None if time is None else number(time) for time in counted[4:])
        self._meter.load(*amounts, *times)
        self._overstated = max(0.0, number(body.get("overstated")))
        self._answers = int(number(body.get("answers")))
        self._latency = number(body.get("latency"))
        asks_at, asked = several(body.get("asks"), 2)
        self._asks_at = math.inf if asks_at is None else number(asks_at)
        self._asked = -math.inf if asked is None else number(asked)
        self._rows = rows_of(body.get("rows"))
        self._at = _optional(body, "at", -math.inf)
        burst, level, at = several(body.get("pace"), 3)
        self._pace = Pace(number(burst), number(level), -math.inf if at is None else number(at))
        self._per = _optional(body, "per")
        self._conclude()


def _rounding(reset: float) -> float:
    """By how much a time may be off that was rounded: whole numbers by a second, others by milliseconds."""
    return 1.0 if reset == int(reset) else 0.002


# -- reading what may be anything --------------------------------------------------------------------------------------


def number(value: Any) -> float:
    """Return a finite number as a float. Raises ValueError for anything else."""
    if type(value) not in (int, float) or not math.isfinite(value):
        raise ValueError("an amount is not a number")
    return float(value)


def several(value: Any, count: int) -> list[Any]:
    """Return a list of this length. Raises ValueError for anything else."""
    if not isinstance(value, list) or len(value) != count:
        raise ValueError("a row has the wrong length")
    return value


def rows_of(value: Any) -> list[Row]:
    """Return rows as a state holds them. Raises ValueError for anything else."""
    if not isinstance(value, list):
        raise ValueError("rows are missing")
    return sorted([number(one) for one in several(row, 2)] for row in value)


def finite(value: float) -> float | None:
    """A time as JSON can hold it, or None if it is infinite."""
    return value if math.isfinite(value) else None


def _optional(body: Mapping[str, Any], name: str, missing: Any = None) -> Any:
    value = body.get(name)
    return missing if value is None else number(value)
