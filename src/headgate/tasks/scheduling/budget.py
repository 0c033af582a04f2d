"""The port between a pool and its budget: how many slots the pool may hand out, and to which tenants. Pure.

A budget stands outside of the scheduler. `Slots` stays local and synchronous and reads a plain number; a budget changes
that number when it has a reason to, and the pool then starts what may start. So a budget that never changes costs
nothing for each task. A budget for one pool alone is a constant (`LocalBudget`). One that differs between tenants sets
`by_tenant`, and is told what each of them wants and holds.

A budget that several processes share is more than a number: the order of their tasks is shared too. It is a `Share`
(see `share.py`), which has the queue of the pool.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Protocol


class SlotBudget(Protocol):
    """Says how many slots a pool may hand out, and to which tenants.

    What runs goes on when the budget becomes smaller; its slots vanish as they come free.
    """

    by_tenant: bool
    """Does the budget differ between tenants? If False, the pool calls only `on_change` and `resize`."""

    @property
    def limit(self) -> int:
        """How many slots the pool may hand out now, to all tenants together: 0 or more."""
        ...

    def on_change(self, changed: Callable[[int], None]) -> None:
        """Call `changed(limit)` whenever `limit` or an answer of `granted` has changed.

        It is called on the event loop of the pool, and never from inside `want`, `granted`, `started` or `ended`: these
        are called while the scheduler decides.
        """

    def resize(self, limit: int) -> None:
        """Ask for another limit, at least 1: somebody called `resize` of the pool."""

    def want(self, tenant: Hashable, queued: int) -> None:
        """Hear how many tasks of a tenant are queued now. It replaces what was said before."""

    def granted(self, tenant: Hashable) -> int:
        """How many slots the tasks of this tenant may hold now. Never asked for None, the tasks without a tenant."""
        ...

    def started(self, tenant: Hashable) -> None:
        """Hear that a task of this tenant was given a slot."""

    def ended(self, tenant: Hashable) -> None:
        """Hear that a task of this tenant gave its slot back, or lends it."""


class LocalBudget:
    """The budget of a pool that shares it with nobody: the `max_concurrent` of the pool, for every tenant."""

    __slots__ = ("_changed", "limit")

    by_tenant = False

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

    def want(self, tenant: Hashable, queued: int) -> None:
        """Do nothing: the limit does not depend on what is queued."""

    def granted(self, tenant: Hashable) -> int:
        """The limit of the pool: no tenant has less than all of it."""
        return self.limit

    def started(self, tenant: Hashable) -> None:
        """Do nothing: `Slots` counts what runs."""

    def ended(self, tenant: Hashable) -> None:
        """Do nothing: `Slots` counts what runs."""
