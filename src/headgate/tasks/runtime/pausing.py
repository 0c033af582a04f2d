"""Pausing a pool or some of its tenants: what is queued stays queued, and what runs continues.

Pauses of a shared budget are settings that all members have, and any of them may change. So what is told of a pause
follows from a comparison with what was told last, whoever has paused it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Final

from headgate.core.clock import clock
from headgate.core.redaction import redact
from headgate.errors import InvalidArgument, PoolClosed
from headgate.tasks.events import POOLS, PoolPaused, PoolResumed
from headgate.tasks.options import checked_tenant
from headgate.tasks.runtime.shortages import Shortages
from headgate.tasks.scheduling.shared_queue import token_of

if TYPE_CHECKING:
    from headgate.tasks.runtime.executor import Executor

_POOL: Final = None
"""Stands for the whole pool, where a tenant is named otherwise."""


class Pauses:
    """The pauses of one pool."""

    __slots__ = ("_apply_now", "_periods", "_pool", "_told")

    def __init__(self, pool: Executor) -> None:
        self._pool = pool
        self._apply_now: Callable[[], None] | None = None
        self._told: frozenset[Hashable] = frozenset()  # who was paused when that was last told
        self._periods = Shortages()

    def shared_by(self, apply_now: Callable[[], None]) -> None:
        """Share the pauses with other processes; `apply_now` sends a change that no event loop will send soon."""
        self._apply_now = apply_now

    def set(self, what: str, tenant: Hashable = _POOL, *, paused: bool) -> None:
        """Pause or resume the pool or a tenant; `what` is the method that was called."""
        pool = self._pool
        if pool.loop is not None:
            pool.require_loop(what)
        if paused and pool.state != "open":
            raise PoolClosed(f"the pool {pool.name!r} is {pool.state}, so {what} would keep its tasks from ending")
        if self._change(tenant, paused=paused):
            if self._apply_now is not None:
                self._apply_now()
            self.tell()
            pool.pump()  # also after a pause: slots may have been kept for a task that is paused now

    def set_tenant(self, what: str, tenant: Hashable, *, paused: bool) -> None:
        """Pause or resume a tenant."""
        if checked_tenant(tenant) is None:
            raise InvalidArgument(
                f"{what} takes a tenant, got None: tasks without a tenant have nothing in common",
                remedy="Name the tenant, or pause the whole pool with pause().",
            )
        self.set(what, tenant, paused=paused)

    def _change(self, tenant: Hashable, *, paused: bool) -> bool:
        scheduler = self._pool.scheduler
        if tenant is _POOL:
            return scheduler.pause(paused=paused)
        return scheduler.pause_tenant(tenant, paused=paused)

    def end(self, before: str) -> None:
        """Resume everything, because what is queued must end before this does."""
        pool, scheduler = self._pool, self._pool.scheduler
        for one in self._now():
            if one is _POOL:
                scheduler.pause(paused=False)
            elif scheduler.is_shared:
                scheduler.resume_token(str(one))
            else:
                scheduler.pause_tenant(one, paused=False)
        if self._told:
            self.tell(before)
            pool.pump()

    def _now(self) -> frozenset[Hashable]:
        scheduler = self._pool.scheduler
        tenants = scheduler.paused_tenants()
        return tenants | {_POOL} if scheduler.paused else tenants

    def tell(self, why: str | None = None) -> None:
        """Tell what has changed since the last time."""
        now, before = self._now(), self._told
        if now == before:
            return
        self._told = now
        wall, pool = clock.wall(), self._pool
        about = {"pool_id": pool.id, "pool": pool.name}
        for one in now - before:
            self._periods.begin(one, wall, "the pool is paused" if one is _POOL else "its tenant is paused")
            if POOLS.listeners:
                POOLS.emit(PoolPaused(at=wall, **about, tenant=_shown(one)))
        for one in before - now:
            self._periods.end(set(), [one], wall)
            if POOLS.listeners:
                POOLS.emit(PoolResumed(at=wall, **about, tenant=_shown(one), before=why))

    def between(self, tenant: Hashable, since: float, until: float) -> tuple[float, str]:
        """How many seconds of this time tasks of a tenant were paused, and the words for that."""
        found = [self._periods.between(_POOL, since, until)]
        if tenant is not None:
            known = token_of(tenant) if self._pool.scheduler.is_shared else tenant
            found.append(self._periods.between(known, since, until))
        return max(found)


def _shown(tenant: Hashable) -> Hashable:
    return redact(tenant) if isinstance(tenant, str) else tenant
