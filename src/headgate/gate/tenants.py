"""The limits that each tenant of a queue has for itself: a rate, how many of its tasks run, and pauses. Pure.

A tenant is parked in the queue while one of its limits allows no further start: its tasks are passed over as a whole,
however many there are, and it keeps its turn. Another kind of limit is another class with `is_closed`, which
`Tenants` asks like the others.

A task without a tenant (None) has nothing in common with others, so no limit holds for it.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping
from itertools import count
from typing import Protocol, TypeAlias

from headgate.gate.queue import Queue
from headgate.gate.windows import CLOSE, Bucket, FixedWindow, SlidingWindow

Window: TypeAlias = SlidingWindow | Bucket | FixedWindow


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
    """How many slots the tasks of a tenant may hold at a time: one number for all tenants, or some by name."""

    __slots__ = ("active", "limits", "wanted")

    cause: str = "max_concurrent_per_key"

    def __init__(self, limits: int | Mapping[Hashable, int], active: Iterable[Hashable] = ()) -> None:
        """`active` names the tenant of each slot that is held."""
        self.limits: int | Mapping[Hashable, int] = limits
        self.active: dict[Hashable, int] = dict(Counter(active))
        """How many slots the tasks of each tenant hold."""
        self.wanted: dict[Hashable, int] = {}
        """How many slots the next task of a tenant takes, where it waits for several."""

    def limit(self, tenant: Hashable) -> int | None:
        """How many slots the tasks of this tenant may hold, or None if it has no cap."""
        if tenant is None:
            return None
        return self.limits.get(tenant) if isinstance(self.limits, Mapping) else self.limits

    def is_closed(self, tenant: Hashable) -> bool:
        """Whether the next task of this tenant would exceed its cap."""
        return not self.has_room(tenant, self.wanted.get(tenant, 1) if self.wanted else 1)

    def has_room(self, tenant: Hashable, slots: int) -> bool:
        """Whether a task of this tenant may take so many more slots."""
        limit = self.limit(tenant)
        return limit is None or self.active.get(tenant, 0) + slots <= limit

    def took(self, tenant: Hashable, slots: int = 1) -> None:
        """Count slots that a task has taken."""
        self.active[tenant] = self.active.get(tenant, 0) + slots

    def gave(self, tenant: Hashable, slots: int = 1) -> None:
        """Count slots that a task has given back."""
        self.active[tenant] -= slots
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


class _Rate:
    """The window of one tenant."""

    __slots__ = ("at", "is_closed", "window")

    def __init__(self, window: Window) -> None:
        self.window: Window = window
        self.is_closed: bool = False
        self.at: float = math.inf
        """When it is looked at again: as soon as it may open, or may be full and be forgotten."""


class Rates:
    """How many tasks of a tenant may start within some time.

    A start has two steps: `hold` when it is decided, and `began` when the task runs; or `give_back`, if it never does.
    A window with nothing used is as good as none, so it is forgotten: tenants that come and go leave nothing.
    """

    __slots__ = ("_heap", "_kept", "_serial", "_window_of", "_woken_at")

    cause: str = "rate_per_tenant"

    def __init__(self, window_of: Callable[[Hashable], Window | None], woken_at: Callable[[float], object]) -> None:
        """`window_of` makes the window of a tenant, or returns None for one without a rate.

        `woken_at` is called with each time at which `due` must be called, if none that is earlier was named.
        """
        self._window_of = window_of
        self._woken_at = woken_at
        self._kept: dict[Hashable, _Rate] = {}
        self._heap: list[tuple[float, int, Hashable]] = []  # when to look at tenants; outdated entries are passed over
        self._serial = count()

    def __len__(self) -> int:
        """How many tenants have a window of which something is used."""
        return len(self._kept)

    def is_closed(self, tenant: Hashable) -> bool:
        """Whether the rate of this tenant allows no start now."""
        rate = self._kept.get(tenant)
        return rate is not None and rate.is_closed

    def hold(self, tenant: Hashable, now: float) -> None:
        """Set a start aside for a task that was chosen."""
        rate = self._kept.get(tenant)
        if rate is None:
            window = None if tenant is None else self._window_of(tenant)
            if window is None:
                return
            rate = self._kept[tenant] = _Rate(window)
        rate.window.hold(1.0, now)
        self._look(tenant, rate, now)

    def began(self, tenant: Hashable, now: float) -> None:
        """Count a start that was held: it counts from now on."""
        rate = self._kept.get(tenant)
        if rate is None:
            return
        window = rate.window
        window.give_back(1.0, now)  # held anew: a fixed window may have begun another period since
        window.hold(1.0, now)
        window.held -= 1.0
        window.count(1.0, now, now)
        self._look(tenant, rate, now)

    def give_back(self, tenant: Hashable, now: float) -> None:
        """Take back a start that was held, because the task did not begin."""
        rate = self._kept.get(tenant)
        if rate is not None:
            rate.window.give_back(1.0, now)
            self._look(tenant, rate, now)

    def due(self, now: float) -> list[Hashable]:
        """Look at the tenants whose time has come. Returns those whose rate may have opened."""
        looked_at: list[Hashable] = []
        while self._heap and self._heap[0][0] <= now:
            at, _, tenant = heapq.heappop(self._heap)
            rate = self._kept.get(tenant)
            if rate is not None and rate.at == at:
                rate.at = math.inf
                self._look(tenant, rate, now)
                looked_at.append(tenant)
        return looked_at

    def next_at(self) -> float | None:
        """When `due` must be called, or None if there is nothing to wait for."""
        return self._heap[0][0] if self._heap else None

    def opens_in(self, tenant: Hashable, now: float, ahead: float = 0.0) -> float:
        """Estimate the seconds until a task of this tenant may start, if `ahead` others of it start before."""
        rate = self._kept.get(tenant)
        window = rate.window if rate is not None else None if tenant is None else self._window_of(tenant)
        if window is None:
            return 0.0
        left, first = window.left(now), window.opens_at(1.0, now) - now
        level = window.state[2] if isinstance(window, FixedWindow) else window.pace[0]
        missing = ahead + 1.0 - max(0.0, math.floor(min(left, level) + CLOSE))
        if missing <= 0.0:
            return 0.0
        each = 1.0 / window.rate if isinstance(window, Bucket) else window.per / window.limit
        seconds = first + (missing - 1.0 if first > 0.0 else missing) * each
        if ahead + 1.0 <= window.limit and not isinstance(window, Bucket):
            seconds = max(seconds, window.opens_at(ahead + 1.0, now) - now)
        return seconds

    def _look(self, tenant: Hashable, rate: _Rate, now: float) -> None:
        """Note whether a tenant may start a task, and when to look at it again."""
        window = rate.window
        at = window.opens_at(1.0, now)
        rate.is_closed = at > now
        if not rate.is_closed:
            at = window.opens_at(window.burst if isinstance(window, Bucket) else window.limit, now)
            if at <= now and not window.held:
                del self._kept[tenant]
                return
        if at >= rate.at:
            return  # it is looked at before, and then again
        rate.at = at
        is_first = not self._heap or at < self._heap[0][0]
        heapq.heappush(self._heap, (at, next(self._serial), tenant))
        if len(self._heap) > 2 * len(self._kept) + 64:
            self._heap = [(one.at, next(self._serial), who) for who, one in self._kept.items() if one.at < math.inf]
            heapq.heapify(self._heap)
        if is_first:
            self._woken_at(at)


class Tenants:
    """Keeps the tenants of one queue parked whose limits allow no further start."""

    __slots__ = ("_parked", "_queue", "caps", "pauses", "rates")

    def __init__(self, queue: Queue) -> None:
        queue.set_apart(tenants=True)
        self._queue = queue
        self._parked: dict[Hashable, None] = {}  # in the order in which they were parked
        self.caps: Caps | None = None
        self.pauses: Pauses = Pauses()
        self.rates: Rates | None = None

    def __bool__(self) -> bool:
        """Whether there is any limit."""
        return self.caps is not None or self.rates is not None or bool(self.pauses.tenants)

    def limits(self) -> list[TenantLimit]:
        """All limits: those that somebody must end come before those that end by themselves."""
        limits: list[TenantLimit | None] = [self.pauses, self.caps, self.rates]
        return [limit for limit in limits if limit is not None]

    def is_closed(self, tenant: Hashable) -> bool:
        """Whether no further task of this tenant may start now."""
        if self.caps is not None and self.caps.is_closed(tenant):
            return True
        if self.rates is not None and self.rates.is_closed(tenant):
            return True
        return self.pauses.is_closed(tenant)

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

    def took(self, tenant: Hashable, slots: int = 1) -> None:
        """Count the slots that a task of this tenant has taken."""
        if self.caps is not None:
            self.caps.took(tenant, slots)
            self.update(tenant)

    def gave(self, tenant: Hashable, slots: int = 1) -> None:
        """Count the slots that a task of this tenant has given back."""
        if self.caps is not None:
            self.caps.gave(tenant, slots)
            self.update(tenant)

    def wait_for(self, tenant: Hashable, slots: int) -> None:
        """Start nothing of this tenant until its cap leaves so many slots for its next task, or no longer (1)."""
        if self.caps is not None:
            if slots > 1:
                self.caps.wanted[tenant] = slots
            else:
                self.caps.wanted.pop(tenant, None)
            self.update(tenant)

    def chosen(self, tenant: Hashable, now: float) -> None:
        """Count a start that was decided."""
        if self.rates is not None:
            self.rates.hold(tenant, now)
            self.update(tenant)

    def began(self, tenant: Hashable, now: float) -> None:
        """Note that the chosen task runs now."""
        if self.rates is not None:
            self.rates.began(tenant, now)
            self.update(tenant)

    def not_begun(self, tenant: Hashable, now: float) -> None:
        """Take back a start: the chosen task does not run."""
        if self.rates is not None:
            self.rates.give_back(tenant, now)
            self.update(tenant)

    def due(self, now: float) -> None:
        """Let the tenants start tasks again whose rates allow it by now."""
        for tenant in () if self.rates is None else self.rates.due(now):
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
