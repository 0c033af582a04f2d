"""How a pool stands: snapshots and statistics, made from its counters and its newest records."""

from __future__ import annotations

from collections.abc import Hashable
from heapq import nlargest
from itertools import chain
from typing import TYPE_CHECKING, Any

from headgate.core.clock import clock
from headgate.errors import InvalidArgument, TaskFailed
from headgate.tasks.fairness import PoolStats, stats_of
from headgate.tasks.model import PoolSnapshot, Remains, TaskSnapshot, Told, View, task_snapshot

if TYPE_CHECKING:
    from headgate.tasks.pool import TaskPool


def pool_snapshot(pool: TaskPool, tasks: int) -> PoolSnapshot:
    """Counts, configuration, and the newest tasks."""
    if not isinstance(tasks, int) or isinstance(tasks, bool) or tasks < 0:
        raise InvalidArgument(f"tasks must be >= 0, got {tasks!r}", remedy="Pass how many of the newest tasks to show.")
    desk, slots = pool._desk, pool._desk.slots
    counts: dict[str, int] = {
        "active": slots.active,
        "waiting": slots.waiting,
        "queued": desk.depth,
        **{status: pool._ledger.counts[status] for status in _TERMINAL},
    }
    return PoolSnapshot(
        {
            "_type": "pool",
            "id": pool.id,
            "name": pool.name,
            "scope": pool.scope,
            "max_concurrent": slots.limit,
            **counts,
            "blocked_submitters": pool._door.submitters,
            "total": sum(counts.values()),
            "queue": pool._strategy.descriptor(),
            "backpressure": desk.policy.descriptor(),
            "config": dict(pool._config),
            "waiting_for": _waiting_for(pool),
            "tasks": tuple(_shown(pool, task) for task in _newest(pool, tasks)),
        }
    )


def _newest(pool: TaskPool, tasks: int) -> list[Any]:
    known = chain(pool._unfinished(), pool._ledger.remembered(), pool._ledger.newest_former(tasks))
    return nlargest(tasks, known, key=lambda task: task.number)


def _shown(pool: TaskPool, task: Any) -> TaskSnapshot:
    if not isinstance(task, Remains):
        shown: TaskSnapshot = task.snapshot()
        return shown
    error = None
    if isinstance(task.outcome, Told):
        pool._unseen.pop(task.number, None)  # somebody knows of it now
        error = TaskFailed(f"{pool.name}#{task.number} failed with {task.outcome.line}")
        error.add_note(task.outcome.traceback())
    return task_snapshot(task, pool, None, error)


_TERMINAL: tuple[Any, ...] = ("completed", "failed", "rejected", "cancelled", "expired", "stale")


def _waiting_for(pool: TaskPool) -> View | None:
    """Why nothing starts although slots are free; None when that is not so."""
    desk = pool._desk
    if not desk.depth or desk.slots.exhausted:
        return None
    if len(desk.queue):
        if desk.shut and pool._supply is not None:
            return View(pool._supply.waiting_for(desk.shut))
        return View({"cause": "max_concurrent_per_key", "seconds": None})
    at = pool._agenda.next_at()
    return View({"cause": "delay", "seconds": max(0.0, at - clock.now())}) if at is not None else None


def pool_stats(pool: TaskPool) -> PoolStats:
    """Ages and fairness. Its cost grows with what is queued, not with history."""
    now = clock.now()
    oldest: dict[Hashable, float] = {}
    for task in pool._desk.queue:
        waited = now - task.since.now
        if waited > oldest.get(task.partition, -1.0):
            oldest[task.partition] = waited
    return stats_of(pool._ages, pool._desk.jain, oldest)
