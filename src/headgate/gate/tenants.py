"""The limits that each tenant of a queue has for itself: how many of its tasks run, and whether it is paused. Pure.

A tenant is parked in the queue while one of its limits allows no further start: its tasks are passed over as a whole,
however many there are, and it keeps its turn. Another kind of limit is another class with `is_closed`, which
`Tenants` asks like the others.

A task without a tenant (None) has nothing in common with others, so no limit holds for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from typing import Protocol

from headgate.gate.queue import Queue


class TenantLimit(Protocol):
    """One kind of limit, for all tenants."""

    @property
    def cause(self) -> str:
        """The limit as `waiting_for` names it."""
        ...

    def is_closed(self, tenant: Hashable) -> bool:
        """Whether no further task of this tenant may start now."""
        ...


class Caps:
    """How many tasks of a tenant may be active at a time: one number for all, or some by name."""

    __slots__ = ("active", "limits")

    cause: str = "max_concurrent_per_key"

    def __init__(self, limits: int | Mapping[Hashable, int], active: Iterable[Hashable] = ()) -> None:
        """`active` names the tenant of each active task."""
        self.limits: int | Mapping[Hashable, int] = limits
        self.active: dict[Hashable, int] = dict(Counter(active))
        """How many tasks of each tenant are active."""

    def limit(self, tenant: Hashable) -> int | None:
        """How many tasks of this tenant may be active, or None if it has no cap."""
        if tenant is None:
            return None
        return self.limits.get(tenant) if isinstance(self.limits, Mapping) else self.limits

    def is_closed(self, tenant: Hashable) -> bool:
        """Whether as many tasks of this tenant are active as its cap allows."""
        limit = self.limit(tenant)
        return limit is not None and self.active.get(tenant, 0) >= limit

    def took(self, tenant: Hashable) -> None:
        """Count one more active task."""
        self.active[tenant] = self.active.get(tenant, 0) + 1

    def gave(self, tenant: Hashable) -> None:
        """Count one active task less."""
        self.active[tenant] -= 1
        if not self.active[tenant]:
            del self.active[tenant]


class Pauses:
    """Tenants that are paused by hand."""

    __slots__ = ("tenants",)

    cause: str = "paused"

    def __init__(self) -> None:
        self.tenants: set[Hashable] = set()

    def is_closed(self, tenant: Hashable) -> bool:
        """Whether this tenant is paused."""
        return tenant in self.tenants


class Tenants:
    """Keeps the tenants of one queue parked whose limits allow no further start."""

    __slots__ = ("_parked", "_queue", "caps", "pauses")

    def __init__(self, queue: Queue) -> None:
        queue.set_apart(tenants=True)
        self._queue = queue
        self._parked: dict[Hashable, None] = {}  # in the order in which they were parked
        self.caps: Caps | None = None
        self.pauses: Pauses = Pauses()

    def __bool__(self) -> bool:
        """Whether there is any limit."""
        return self.caps is not None or bool(self.pauses.tenants)

    def limits(self) -> list[TenantLimit]:
        """All limits: those that end by themselves come before those that somebody must end."""
        return [self.pauses] if self.caps is None else [self.caps, self.pauses]

    def is_closed(self, tenant: Hashable) -> bool:
        """Whether no further task of this tenant may start now."""
        return (self.caps is not None and self.caps.is_closed(tenant)) or self.pauses.is_closed(tenant)

    def set_caps(self, caps: Caps | None) -> None:
        """Cap tenants from now on."""
        former = () if self.caps is None else self.caps.active
        self.caps = caps
        for tenant in {**self._parked, **dict.fromkeys(former), **({} if caps is None else dict.fromkeys(caps.active))}:
            self.update(tenant)

    def set_paused(self, tenant: Hashable, paused: bool) -> bool:
        """Pause or resume a tenant. Returns whether that changed anything."""
        tenants = self.pauses.tenants
        if (tenant in tenants) is paused:
            return False
        (tenants.add if paused else tenants.discard)(tenant)
        self.update(tenant)
        return True

    def took(self, tenant: Hashable) -> None:
        """Count a slot that a task of this tenant has taken."""
        if self.caps is not None:
            self.caps.took(tenant)
            self.update(tenant)

    def gave(self, tenant: Hashable) -> None:
        """Count a slot that a task of this tenant has given back."""
        if self.caps is not None:
            self.caps.gave(tenant)
            self.update(tenant)

    def update(self, tenant: Hashable) -> None:
        """Park a tenant, or let it take its turns again, as its limits say."""
        closed = self.is_closed(tenant)
        if closed is (tenant in self._parked):
            return
        if closed:
            self._parked[tenant] = None
            self._queue.park(tenant)
        else:
            del self._parked[tenant]
            self._queue.unpark(tenant)

    def causes(self) -> dict[str, list[Hashable]]:
        """The parked tenants that have tasks queued, by the limit that parks them."""
        found: dict[str, list[Hashable]] = {}
        for tenant in self._parked:
            if self._queue.accounts_of(tenant):
                cause = next(limit.cause for limit in self.limits() if limit.is_closed(tenant))
                found.setdefault(cause, []).append(tenant)
        return found
