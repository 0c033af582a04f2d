"""Infer a limit from refusals alone, for providers that send no rate-limit headers. Pure.

When a provider refuses a call, its bucket is empty. So the calls it accepts between two refusals are what has flowed
in: that is the rate. What it accepted before the first refusal, less the inflow, is the size. A provider that counts by
windows has the same rate, if the time of a refusal is taken to be the end of its window.

Calls in flight are refused in storms, in any order. A storm consists of all calls that had started when its first
refusal arrived. It is evaluated when as much time has passed as that refusal took, because by then it is known which of
them were accepted. Calls that have started since belong to what follows.

A bucket that was full in between has lost inflow and would look slower than it is. So a measurement starts over after a
pause that nobody asked for, when a refusal comes long after calls were allowed again, and when nothing was accepted
since the last refusal (an outage).
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

_ENOUGH: Final = 10.0
"""Calls that must be accepted between storms for a measurement."""
_ROUNDED: Final = 1.0
"""A shorter wait may be a rounded one."""
_PROMPT: Final = 1.0
"""Seconds without a call, or without a refusal, after which the bucket may have been full."""


class Inference(NamedTuple):
    """The bucket that refusals describe."""

    rate: float
    size: float
    empty_at: float
    """Start of the last call that found it empty."""
    wait: float | None
    """Seconds which that call was asked to wait, or None if the provider did not say."""


class RefusalMeter:
    """Counts accepted calls from one storm of refusals to the next."""

    __slots__ = (
        "_accepted",
        "_at",
        "_burst",
        "_burst_for",
        "_counts_from",
        "_empty_until",
        "_first",
        "_found",
        "_known_at",
        "_later",
        "_refused_at",
        "_resumes_at",
        "_storm",
        "_wait",
    )

    def __init__(self) -> None:
        self._accepted = 0.0  # since the measurement began, up to the storm that was not evaluated yet
        self._later = 0.0  # started after that storm
        self._found: Inference | None = None  # by a storm that was evaluated when the next one came
        self._counts_from: float | None = None  # the calls up to this start are of an earlier measurement
        self._known_at: float | None = None  # when all calls of the last storm should have been answered
        self._burst = 0.0  # accepted before the first refusal
        self._burst_for = 0.0  # in how many seconds
        self._first: float | None = None  # the first start since the bucket may have been full
        self._empty_until: float | None = None  # when the measurement began, or None if the bucket may be full
        self._at: float | None = None  # the last start
        self._storm: float | None = None  # start of the first refused call of a storm that was not evaluated yet
        self._refused_at: float | None = None  # when the first refusal of the last storm arrived
        self._resumes_at: float | None = None  # when that refusal said that calls are allowed again
        self._wait: float | None = None  # the seconds it named

    def started(self, amount: float, start: float) -> Inference | None:
        """Count a call that starts. Returns the limit if the storm before it has revealed it."""
        if self._storm is not None and (self._known_at is None or start >= self._known_at):
            self._evaluate(self._storm)
        found, self._found = self._found, None
        last = max((when for when in (self._at, self._resumes_at) if when is not None), default=None)
        if last is None or start > last + _PROMPT:
            self._first, self._empty_until, self._accepted, self._later = start, None, 0.0, 0.0
        self._at = start if self._at is None else max(self._at, start)
        if self._storm is None:
            self._accepted += amount
        else:
            self._later += amount
        return found

    def refused(self, amount: float, start: float, now: float, after: float | None) -> None:
        """Count a refusal that arrived at `now`, of a call that started at `start`."""
        if self._refused_at is not None and start <= self._refused_at:  # of the same storm
            if self._counts_from is None or start > self._counts_from:
                self._accepted -= amount
            return
        if self._storm is not None:
            self._evaluate(self._storm)
        self._accepted -= amount
        if self._resumes_at is not None and self._refused_at is not None:
            longest = max(_PROMPT, self._resumes_at - self._refused_at)
            if start > self._resumes_at + longest:
                self._empty_until = None
        self._storm, self._refused_at, self._resumes_at, self._wait = start, now, now + (after or 0.0), after
        self._known_at = now + (now - start)

    def _evaluate(self, storm: float) -> None:
        """Look at what was accepted up to this storm, and begin the next measurement if it says nothing."""
        accepted, began, self._storm = self._accepted, self._empty_until, None
        self._accepted += self._later
        later, self._later = self._later, 0.0
        empty_until = storm + (self._wait if self._wait and self._wait > _ROUNDED else 0.0)
        if began is None:
            self._burst, self._burst_for = accepted, 0.0 if self._first is None else storm - self._first
        elif accepted >= _ENOUGH and empty_until > began:
            rate = (accepted + 1.0) / (empty_until - began)  # rather too fast: then the next refusal tells more
            self._found = Inference(rate, max(1.0, self._burst - rate * self._burst_for), storm, self._wait)
            return
        if began is None or accepted < 1 or empty_until <= began:
            self._empty_until, self._accepted, self._counts_from = empty_until, later, self._refused_at

    def body(self) -> list[Any]:
        """What was counted, as JSON can hold it."""
        amounts = self._accepted, self._later, self._burst, self._burst_for
        return [*amounts, *(getattr(self, name) for name in _TIMES)]

    def load(self, accepted: float, later: float, burst: float, burst_for: float, *times: float | None) -> None:
        """Continue from what `body` wrote."""
        self._accepted, self._later, self._burst, self._burst_for = accepted, later, burst, burst_for
        for name, time in zip(_TIMES, times, strict=True):
            setattr(self, name, time)


_TIMES: Final = (
    *("_first", "_empty_until", "_at", "_storm", "_refused_at", "_resumes_at", "_wait"),
    *("_counts_from", "_known_at"),
)
