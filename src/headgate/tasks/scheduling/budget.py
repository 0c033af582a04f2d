"""The port between a pool and its budget: how many slots the pool may hand out. Pure.

A budget stands outside of the scheduler. `Slots` stays local and synchronous and reads a plain number; a budget changes
that number when it has a reason to, and the pool then starts what may start. So a budget that never changes costs
nothing for each task. The budget of a pool that shares it with nobody is its `max_concurrent` (`LocalBudget`).

A budget that several processes share is more than a number: the order of their tasks is shared too. It is a `Share`
(see `share.py`), which has the queue of the pool.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class SlotBudget(Protocol):
    """Says how many slots a pool may hand out.

    What runs goes on when the budget becomes smaller; its slots vanish as they come free.
    """

    @property
    def limit(self) -> int:
        """How many slots the pool may hand out now: 0 or more."""
        ...

    def on_change(self, changed: Callable[[int], None]) -> None:
        """Call `changed(limit)`, on the event loop of the pool, whenever `limit` has changed."""

    def resize(self, limit: int) -> None:
        """Ask for another limit, at least 1: somebody called `resize` of the pool."""


class LocalBudget:
    """The budget of a pool that shares it with nobody: the `max_concurrent` of the pool."""

    __slots__ = ("_changed", "limit")

    def __init__(self, limit: int) -> None:
        self.limit: int = limit
        self._changed: Callable[[int], None] | None = None

    def on_change(self, changed: Callable[[int], None]) -> None:
        """Call `changed(limit)` from now on whenever the limit has changed."""
        self._changed = changed

    def resize(self, limit: int) -> None:
        """Set the limit, and tell the pool."""
        self.limit = limit
        if self._changed is not None:
            self._changed(limit)
