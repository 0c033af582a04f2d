"""Adaptive concurrency: find how many calls at a time a provider takes, from its refusals alone. Pure.

Providers seldom say how many calls they take at a time, and the number changes. Latency is no measure of it either: a
provider that is busy for others is slow for us as well. A refusal is one.

**Slow start.** The limit doubles with each *clean round*, until the first refusal. A clean round is as many successes
as the limit, of calls that began under this limit, each of which ended while the limit was fully used. An idle resource
proves nothing.

**A cut.** A refusal sets the limit to 0.8 of what was in flight. Calls that were in flight together are refused
together, so only a call that began after the last cut may cut again (TCP cuts once per round trip for the same reason):
one storm is one cut, and a capacity that falls is followed at once, cut by cut.

**Growth after a cut.** Nothing grows for a pause. Then the limit returns quickly to just below the level that was
refused, and probes one step above it in each pause. Each clean probe doubles the next step, so a capacity that rises is
followed too. The price is about one refusal in two pauses, for as long as the capacity is fully used.

Measured in virtual time: 0.90 of a capacity that is fixed or falls is used, 0.75 of one that rises, 0.65 of one that
swings, and less than 2 % of calls are refused after the first minute.

**Many processes** that share a limit each learn from their own calls, and exchange an `AdaptiveLevel`. Levels are only
ever *joined*, and the join is the larger of two in one order, so processes come to the same level however often and in
which order messages arrive. A cut counts more than any growth before it. Two processes that cut because of the same
storm cut once, because both count it with the same number.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple, TypeAlias

from headgate.core.checks import is_finite
from headgate.errors import InvalidArgument

ADAPTIVE: Final = "adaptive"

_CUT: Final = 0.8
"""The part of what was in flight that remains after a cut."""
_BELOW: Final = 0.95
"""The part of the refused level to which the limit returns quickly."""
_RETURN: Final = 1.25
"""The factor of each clean round on the way back."""
_STEP: Final = 0.05
"""The first probe after a cut, as a part of the limit; at least 1."""
_REMEMBERED: Final = 4.0
"""Pauses after which a refused level is replaced by a higher one. Until then only a lower one replaces it."""
_REST: Final = 0.2
"""Seconds for which a resource rests after a refusal that names none."""
_LONGEST_REST: Final = 1.0
"""The same after many refusals with no success between them."""


@dataclass(frozen=True, slots=True)
class Adaptive:
    """A `max_in_flight` that follows what the provider takes: it begins at `start`, within `least` and `most`.

    pause:
        Seconds after a refusal in which the limit does not grow, and between two probes of a higher limit. A longer one
        means fewer refusals and a slower return.
    """

    start: int = 4
    least: int = 1
    most: int = 200
    pause: float = 5.0

    def __post_init__(self) -> None:
        for name, number in (("start", self.start), ("least", self.least), ("most", self.most)):
            if type(number) is not int or number < 1:
                raise InvalidArgument(f"{name} of Adaptive must be a whole number >= 1, got {number!r}")
        if self.least > self.most:
            raise InvalidArgument(f"least of Adaptive must be at most most={self.most}, got {self.least}")
        if not self.least <= self.start <= self.most:
            raise InvalidArgument(
                f"start of Adaptive must be between least={self.least} and most={self.most}, got {self.start}",
                remedy=f"Pass start= too, for example start={min(max(self.start, self.least), self.most)}.",
            )
        if not is_finite(self.pause) or self.pause <= 0:
            raise InvalidArgument(f"pause of Adaptive must be a finite number of seconds > 0, got {self.pause!r}")
        object.__setattr__(self, "pause", float(self.pause))


MaxInFlight: TypeAlias = int | Adaptive | Literal["adaptive"]
"""What `max_in_flight` may be, if there is a limit."""


def checked_max_in_flight(given: object) -> int | Adaptive | None:
    """Return a limit of uses, with "adaptive" as the `Adaptive` that it stands for, or raise InvalidArgument."""
    if given is None or isinstance(given, Adaptive):
        return given
    if given == ADAPTIVE and isinstance(given, str):
        return Adaptive()
    if not isinstance(given, int) or isinstance(given, bool) or given < 1:
        raise InvalidArgument(
            f'max_in_flight must be >= 1 or None, "adaptive" or Adaptive(...), got {given!r}',
            remedy='Pass a whole number, 1 for exclusive use, "adaptive" to find the number, or None for no limit.',
        )
    return given


class AdaptiveLevel(NamedTuple):
    """What is known of a limit, as processes exchange it. A later one compares as greater: see `join`."""

    cuts: int
    growths: int
    """Since the last cut."""
    limit: float
    refused: float = 0.0
    """The level that was refused; 0.0 before the first cut."""
    step: float = _STEP
    """The next probe, as a part of the limit."""


def join(one: AdaptiveLevel, other: AdaptiveLevel) -> AdaptiveLevel:
    """Return the later of two levels; of two that are as late, the lower one."""
    return max(one, other, key=_lateness)


def _lateness(level: AdaptiveLevel) -> tuple[float, ...]:
    return level.cuts, level.growths, -level.limit, -level.refused, -level.step


class Cut(NamedTuple):
    """A cut of a limit."""

    at: float
    in_flight: int
    """How many calls were in flight when the refused call began."""


class AdaptiveLimit:
    """The limit of one resource. `began` of a call is a time of the same clock as `now`."""

    __slots__ = ("_clean", "_cut_at", "_grown_at", "_streak", "last_cut", "level", "policy")

    def __init__(self, policy: Adaptive) -> None:
        self.policy: Adaptive = policy
        self.level: AdaptiveLevel = AdaptiveLevel(0, 0, float(policy.start))
        self.last_cut: Cut | None = None
        """The last cut, or None before the first."""
        self._cut_at = -math.inf  # or when this process heard of the last cut
        self._grown_at = -math.inf  # the same
        self._clean = 0  # successes of this round
        self._streak = 0  # storms of refusals since a call has succeeded

    @property
    def number(self) -> int:
        """How many uses there may be at a time."""
        return int(self._limit)

    @property
    def _limit(self) -> float:
        # Other processes may have other bounds.
        return float(min(self.policy.most, max(self.policy.least, self.level.limit)))

    def succeeded(self, began: float, now: float, *, used: int = 0) -> bool:
        """Count a success. True: the limit has grown.

        `used` is how many uses this process may have, if all of them were in use when the call ended. 0: some were
        free, so nothing is proved.
        """
        self._streak = 0
        if not used or began < max(self._cut_at, self._grown_at):
            return False
        self._clean += 1
        if self._clean < self._limit * min(1.0, used / self.number):
            return False
        self._clean = 0
        grown, step = self._grown(now)
        grown = min(float(self.policy.most), grown)
        if grown <= self._limit:
            return False
        self.level = self.level._replace(growths=self.level.growths + 1, limit=grown, step=step)
        self._grown_at = now
        return True

    def _grown(self, now: float) -> tuple[float, float]:
        """The limit and the step after a clean round."""
        limit, step, below = self._limit, self.level.step, _BELOW * self.level.refused
        if not self.level.cuts:
            return 2.0 * limit, step
        if now - self._cut_at < self.policy.pause:
            return limit, step
        if limit < below:
            return min(below, _RETURN * limit), step
        if now - self._grown_at < self.policy.pause:
            return limit, step
        return limit + max(1.0, step * limit), min(1.0, 2.0 * step)

    def refused(self, began: float, in_flight: int, now: float) -> bool:
        """Count a refusal for rate or overload. True: the limit was cut.

        `in_flight` is how many calls there were when the refused one began, with that one. 0: this call says nothing
        about the limit.
        """
        if began <= self._cut_at:
            return False
        self._streak += 1
        if not in_flight:
            return False
        limit, known = self._limit, self.level.refused
        refused = min(float(in_flight), limit)
        if known and in_flight >= known and now - self._cut_at <= _REMEMBERED * self.policy.pause:
            refused = known
        cut = max(float(self.policy.least), _CUT * min(float(in_flight), limit))
        self.level = AdaptiveLevel(self.level.cuts + 1, 0, cut, refused)
        self.last_cut = Cut(now, in_flight)
        self._cut_at, self._clean = now, 0
        return True

    @property
    def rest(self) -> float:
        """Seconds for which a resource rests after a refusal that names none."""
        return min(_LONGEST_REST, _REST * 2.0 ** min(8, max(0, self._streak - 1)))

    def heard(self, level: AdaptiveLevel, now: float) -> bool:
        """Join what another process knows. True: it is news.

        Calls that began before this moment began under another limit, whatever clock they are compared by. So a refusal
        of one of them belongs to the storm that another process has cut for.
        """
        joined = join(self.level, level)
        if joined == self.level:
            return False
        if joined.cuts > self.level.cuts:
            self._cut_at, self.last_cut = now, Cut(now, math.ceil(joined.refused))
        elif joined.growths > self.level.growths:
            self._grown_at = now
        self._clean = 0
        self.level = joined
        return True
