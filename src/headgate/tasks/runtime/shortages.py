"""When tasks of a requirement could not be served although slots were free, for the stories of those that waited. Pure.

Only the task that is next is refused and has a mark of it: those behind it are not asked. So the times are kept once
for the pool, and a story looks up those in which its task was queued.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Hashable

_KEPT = 100  # periods that are remembered of one pool
_PAUSE = 1.0  # seconds: of periods that are no further apart, one is made


class _Period:
    __slots__ = ("began", "ended", "need", "what")

    def __init__(self, need: Hashable, began: float, what: str) -> None:
        self.need = need
        self.began = began  # in Unix seconds
        self.ended: float | None = None
        self.what = what


class Shortages:
    """The last periods in which tasks waited for something other than a slot."""

    __slots__ = ("_periods",)

    def __init__(self) -> None:
        self._periods: deque[_Period] = deque(maxlen=_KEPT)

    def begin(self, need: Hashable, wall: float, what: str) -> None:
        """Note that nothing serves this requirement from now on; `what` says so in words."""
        last = self._last(need)
        if last is None or (last.ended is not None and wall - last.ended > _PAUSE):
            self._periods.append(_Period(need, wall, what))
        else:
            last.ended = None

    def end(self, unserved: set[Hashable], needs: Collection[Hashable], wall: float) -> None:
        """Take these requirements out of those that are unserved: they may be served now."""
        for need in needs:
            last = self._last(need)
            if last is not None and last.ended is None:
                last.ended = wall
        unserved.difference_update(needs)

    def between(self, need: Hashable, since: float, until: float) -> tuple[float, str]:
        """How many seconds of this time nothing served the requirement, and the words for that."""
        seconds, what = 0.0, ""
        for one in list(self._periods):
            ended = until if one.ended is None else min(until, one.ended)
            if one.need == need and ended > max(since, one.began):
                seconds, what = seconds + ended - max(since, one.began), one.what
        return seconds, what

    def _last(self, need: Hashable) -> _Period | None:
        return next((one for one in reversed(self._periods) if one.need == need), None)
