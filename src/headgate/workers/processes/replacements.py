"""How many workers to start, and how many of those that are to be replaced may go. Pure.

A worker that has reached a limit of its life is *expired*: it works until another is there. So that a pool never has
fewer workers than it wants, their replacements come first; and so that it never has many more, which would cost the
memory of as many, only some are replaced at the same time, as in a rolling update.
"""

from __future__ import annotations

SHARE = 4
"""One of so many workers is replaced at the same time, and at least one."""


def missing(size: int, fresh: int, expired: int) -> int:
    """Return how many workers to start, in a pool that wants `size` and has so many, ready or starting."""
    beside = -(-size // SHARE)
    return max(0, min(size - fresh, size + beside - fresh - expired))


def surplus(size: int, fresh_and_ready: int, expired: int) -> int:
    """Return how many of the expired workers may go, because others are ready."""
    return max(0, min(expired, fresh_and_ready + expired - size))
