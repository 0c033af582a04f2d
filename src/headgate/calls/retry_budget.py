"""`RetryBudget`: at most so many retries for the first attempts of the last minute. Pure.

When a provider is down every call fails, and each retry makes it worse: with three retries a pool sends four times its
traffic into an outage. A budget keeps retries to a share of the first attempts, however many calls fail.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from headgate.core.checks import is_finite
from headgate.errors import InvalidArgument

SECONDS: Final = 60.0
"""How long a first attempt and a retry count."""
LEAST: Final = 10
"""Retries that are always allowed in that time: a pool with little to do could never repeat anything otherwise."""
_SLICE: Final = 1.0  # seconds that are counted together, so that a budget is small whatever the traffic


class _Slice:
    """What began within one second."""

    __slots__ = ("at", "firsts", "retries")

    def __init__(self, at: float) -> None:
        self.at = at
        self.firsts = self.retries = 0


class RetryBudget:
    """Counts first attempts and retries of one pool."""

    def __init__(self, share: float) -> None:
        """`share` is how many retries are allowed for each first attempt."""
        self.share: float = share
        self._slices: deque[_Slice] = deque()
        self._firsts = self._retries = 0

    def began(self, now: float) -> None:
        """Count a first attempt."""
        self._slice(now).firsts += 1
        self._firsts += 1

    def take_back(self, began: float, now: float) -> None:
        """Count a first attempt no longer that began at this time: it is still to come."""
        self._slice(now)
        for part in reversed(self._slices):
            if part.at <= began:  # else it is of a time that no longer counts
                part.firsts -= 1
                self._firsts -= 1
                return

    def take(self, now: float) -> bool:
        """Count a retry, if it is allowed. Returns whether it is."""
        part = self._slice(now)
        if self._retries + 1 > self.allowed:
            return False
        part.retries += 1
        self._retries += 1
        return True

    @property
    def allowed(self) -> float:
        """How many retries the first attempts that still count allow."""
        return max(LEAST, self.share * self._firsts)

    def why_spent(self) -> str:
        """Say in words that no retry is allowed now."""
        return (
            f"not tried again: the retry budget is spent ({self._retries} retries for {self._firsts} first attempts in "
            f"{SECONDS:g} s, retry_budget={self.share:g})"
        )

    def _slice(self, now: float) -> _Slice:
        """What is counted now. Drops what no longer counts."""
        slices = self._slices
        while slices and now - slices[0].at >= SECONDS:
            old = slices.popleft()
            self._firsts -= old.firsts
            self._retries -= old.retries
        if not slices or now - slices[-1].at >= _SLICE:
            slices.append(_Slice(now))
        return slices[-1]


def checked_retry_budget(value: object) -> RetryBudget | None:
    """Make the budget of a pool from its option `retry_budget`; None is none."""
    if value is None:
        return None
    if not is_finite(value) or not value >= 0:
        raise InvalidArgument(
            f"retry_budget must be a share >= 0, got {value!r}",
            remedy="retry_budget=0.2 allows one retry for five first attempts.",
        )
    return RetryBudget(float(value))
