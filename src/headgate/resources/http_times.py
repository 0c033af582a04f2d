"""Durations and dates as HTTP headers write them, in seconds. Pure: the time is an argument.

What cannot be read is None. So is what cannot be meant: a negative duration, or one beyond a year, such as a timestamp
where a duration should stand. A pool that believed it would never use the resource again.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime

YEAR = 366 * 86400.0

_LONGEST = 64  # characters: no duration or date needs more, and nobody can make the patterns below slow
_NUMBER = re.compile(r"\+?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d{1,3})?", re.ASCII)
_PART = re.compile(r"(\d+\.?\d*|\.\d+)(ns|us|\u00b5s|\u03bcs|ms|s|m|h|d)", re.ASCII)  # µ has two characters in Unicode
_UNITS = {"ns": 1e-9, "us": 1e-6, "\u00b5s": 1e-6, "\u03bcs": 1e-6, "ms": 1e-3, "s": 1, "m": 60, "h": 3600, "d": 86400}


def seconds_of(text: str, now: float) -> float | None:
    """Seconds that a text asks for: a number of them, a duration such as "6m0s" or "400ms", or a date."""
    seconds = number_of(text)
    if seconds is not None:
        return seconds if seconds <= YEAR else None
    seconds = duration_of(text)
    if seconds is not None:
        return seconds
    moment = moment_of(text)
    return None if moment is None else seconds_until(moment, now)


def number_of(text: str) -> float | None:
    """A number of at least 0 in decimal digits, however large."""
    text = text.strip()
    if len(text) > _LONGEST or not _NUMBER.fullmatch(text):
        return None
    number = float(text)
    return number if number != float("inf") else None


def duration_of(text: str) -> float | None:
    """Seconds of a duration as Go writes it: "1h30m", "6m0s", "400ms", "0s". None if it is longer than a year."""
    text = text.strip()
    if not text or len(text) > _LONGEST:
        return None
    seconds, at = 0.0, 0
    while at < len(text):
        part = _PART.match(text, at)
        if part is None:
            return None
        seconds += float(part[1]) * _UNITS[part[2]]
        at = part.end()
    return seconds if seconds <= YEAR else None


def moment_of(text: str) -> float | None:
    """Unix seconds of a date, as in RFC 3339 or as HTTP writes it."""
    text = text.strip()
    if not text or len(text) > _LONGEST:
        return None
    try:
        if text[:4].isdigit():
            moment = datetime.fromisoformat(text)
        else:
            from email.utils import parsedate_to_datetime  # slow to import, and few servers send such dates

            moment = parsedate_to_datetime(text)
        if moment.tzinfo is None:
            moment = moment.replace(tzinfo=UTC)
        return moment.timestamp()
    except (ValueError, TypeError, IndexError, OverflowError):
        return None


def seconds_until(moment: float, now: float) -> float | None:
    """Seconds from `now` to a moment, 0 if it has passed; None if it is more than a year away."""
    seconds = max(0.0, moment - now)
    return seconds if seconds <= YEAR else None
