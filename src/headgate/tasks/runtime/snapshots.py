"""Snapshots and statistics of a pool, made from its counters and its newest records."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import replace
from heapq import nlargest
from itertools import chain
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from headgate.core.clock import clock
from headgate.core.html import card
from headgate.errors import InvalidArgument, TaskFailed
from headgate.tasks.fairness import PoolStats, stats_of
from headgate.tasks.model import PoolSnapshot, Remains, Scope, TaskSnapshot, Told, View, task_snapshot

if TYPE_CHECKING:
    from headgate.tasks.handle import TaskHandle
    from headgate.tasks.runtime.executor import Executor


class About(NamedTuple):
    """What a pool is, which never changes."""

    scope: Scope
    scope_id: str | None
    created_at: float
    """In Unix seconds."""
    config: Mapping[str, Any]


def pool_snapshot(executor: Executor, about: About, tasks: int, shared: View | None = None) -> PoolSnapshot:
    """Counts, configuration, and the newest tasks."""
    if not isinstance(tasks, int) or isinstance(tasks, bool) or tasks < 0:
        raise InvalidArgument(f"tasks must be >= 0, got {tasks!r}", remedy="Pass how many of the newest tasks to show.")
    scheduler, slots = executor.scheduler, executor.scheduler.slots
    counts: dict[str, int] = {
        "active": slots.active,
        "waiting": slots.waiting,
        "queued": scheduler.depth,
        **{status: executor.states.counts[status] for status in TERMINAL},
    }
    return PoolSnapshot(
        {
            "_type": "pool",
            "id": executor.id,
            "name": executor.name,
            "scope": about.scope,
            "scope_id": about.scope_id,
            "durable": executor.records is not None,
            "created_at": about.created_at,
            "max_concurrent": scheduler.limit,
            **counts,
            "blocked_submitters": executor.submit_queue.submitters,
            "total": sum(counts.values()),
            "queue": scheduler.strategy.descriptor(),
            "backpressure": scheduler.policy.descriptor(),
            "config": dict(about.config),
            "waiting_for": waiting_for(executor, shared),
            **({} if shared is None else {"shared": shared}),
            "tasks": tuple(_shown(executor, task) for task in _newest(executor, tasks)),
        }
    )


def _newest(executor: Executor, tasks: int) -> list[Any]:
    states = executor.states
    known = chain(executor.scheduler.unfinished(), states.remembered(), states.newest_former(tasks))
    return nlargest(tasks, known, key=lambda task: task.number)


def _shown(executor: Executor, task: TaskHandle[Any] | Remains) -> TaskSnapshot:
    if not isinstance(task, Remains):
        return task.snapshot()
    error = None
    if isinstance(task.outcome, Told):
        executor.unseen.pop(task.number, None)  # somebody knows of it now
        error = TaskFailed(f"{executor.name}#{task.number} failed with {task.outcome.line}")
        error.add_note(task.outcome.traceback())
    return task_snapshot(task, executor, None, error)


TERMINAL: tuple[Any, ...] = ("completed", "failed", "rejected", "cancelled", "expired", "stale")


def waiting_for(executor: Executor, shared: View | None) -> View | None:
    """Why nothing starts although slots are free, or that the pool is paused; None when that is not so."""
    if executor.scheduler.paused and executor.scheduler.depth:
        return View({"cause": "paused", "seconds": None})
    return _waiting_for(executor) if shared is None else _waiting_for_others(executor, shared)


_CAUSES: Final = ("rate_per_tenant", "max_concurrent_per_key", "paused")
"""Why tenants may start nothing. What ends by itself comes first."""


def _parked(executor: Executor, parked: Mapping[str, Iterable[Hashable]]) -> View:
    """Why these tenants start nothing, of which all is queued."""
    cause = min(parked, key=_CAUSES.index)
    times: list[float | None] = [None]
    if cause == "rate_per_tenant":
        times = [executor.scheduler.rate_opens_in(tenant) for tenant in parked[cause]]
    return View({"cause": cause, "seconds": min((time for time in times if time is not None), default=None)})


def _waiting_for(executor: Executor) -> View | None:
    """Why nothing starts although slots are free; None when that is not so."""
    scheduler = executor.scheduler
    if not scheduler.depth or scheduler.slots.exhausted:
        return None
    if scheduler.lacks_slots():
        return View({"cause": "slots", "seconds": None})
    if len(scheduler.queue):
        if not scheduler.unserved:
            parked = scheduler.parked()
            return _parked(executor, parked) if parked else None
        if executor.explainer is None:
            return View({"cause": "runner", "seconds": None})
        return View(executor.explainer.waiting_for(scheduler.unserved))
    at = executor.timers.next_at()
    return View({"cause": "delay", "seconds": max(0.0, at - clock.now())}) if at is not None else None


def _waiting_for_others(executor: Executor, shared: View) -> View | None:
    """Why nothing starts in a pool that shares its budget; None when nothing is queued."""
    if executor.scheduler.unserved or not executor.scheduler.depth:
        return _waiting_for(executor)
    if len(executor.scheduler.queue) and not executor.scheduler.has_startable():
        return View({"cause": "paused", "seconds": None})
    return View({"cause": "shared budget" if shared["reachable"] else "store", "seconds": None})


def pool_html(described: str, snapshot: PoolSnapshot) -> str:
    """What a notebook shows of a pool: its repr, and the newest tasks."""
    rows = [
        (
            f"#{task.id.rpartition('/')[2]}",
            task.status,
            task.partition if task.key is None else task.key,
            task.attempt or "",
            "" if task.started_at is None else f"{(task.finished_at or clock.wall()) - task.started_at:.1f} s",
            task.rejection_reason if task.error is None else f"{type(task.error).__name__}: {task.error}",
        )
        for task in snapshot.tasks
    ]
    columns = ("task", "status", "key", "attempt", "ran", "")
    return card(described, columns, rows, more=snapshot.total - len(rows))


def pool_stats(executor: Executor, shared: View | None = None) -> PoolStats:
    """Ages and fairness. Its cost grows with what is queued, not with history."""
    now = clock.now()
    oldest: dict[Hashable, float] = {}
    for task in executor.scheduler.queue:
        waited = now - task.since.now
        if waited > oldest.get(task.partition, -1.0):
            oldest[task.partition] = waited
    scheduler = executor.scheduler
    stats = stats_of(executor.ages, scheduler.jain, oldest)
    return replace(stats, shared=shared, paused=scheduler.paused, paused_tenants=scheduler.paused_tenants())
