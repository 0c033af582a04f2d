"""Which of the many names that a program meets have figures of their own. Pure.

A monitoring system keeps a series for each label for months, and names of tenants come from outside. So the first
hundred have series of their own, for good, and what all others do is counted as one.
"""

from __future__ import annotations

from typing import Final

MOST: Final = 100
"""Names that have figures of their own."""
OTHER: Final = "(other)"
NONE: Final = "(none)"


class Labels:
    """The labels that were given to tenants, or to resources. A label, once given, stays."""

    __slots__ = ("_known", "_most")

    def __init__(self, most: int = MOST) -> None:
        self._known: set[str] = set()
        self._most = most

    def of(self, name: str | None) -> str:
        """Return the label of a name: itself, or "(other)" once there are a hundred. None is "(none)"."""
        shown = NONE if name is None else name
        if shown in self._known:
            return shown
        if len(self._known) >= self._most:
            return OTHER
        self._known.add(shown)
        return shown
