"""The state of a task pool as rows: what terminals, pages and metrics show.

It is computed when somebody looks, in one pass over what is queued, and is exact on the event loop of the pool. Text of
users (tenants, reasons, names of functions) is redacted and cut.
"""

from __future__ import annotations

from collections.abc import Hashable
from heapq import nlargest, nsmallest
from itertools import islice
from typing import TYPE_CHECKING, Final, NamedTuple

from headgate.core.clock import clock
from headgate.core.events import maker
from headgate.core.redaction import redact
from headgate.core.views import BudgetView, EndedRow, MemberRow, TaskPoolView, TaskRow, TenantRow
from headgate.tasks.fairness import KeyAge, stats_of
from headgate.tasks.model import Moment, Remains, TaskRecord, TaskStatus, Told
from headgate.tasks.runtime.snapshots import waiting_for
from headgate.tasks.scheduling.shared_queue import token_of
from headgate.tasks.scheduling.states import LISTED

if TYPE_CHECKING:
    from headgate.tasks.model import View
    from headgate.tasks.runtime.executor import Executor

_WIDEST: Final = 200
_LISTED: Final = LISTED
"""Tasks that are listed at most, of each kind: running, queued, ended badly."""
_COUNTED: Final = 1000
"""Ended tasks that one look counts by tenant and time."""
_AGES: Final = 1000
"""Waits of which percentiles are made: those of the last tasks."""


def shown(value: object) -> str:
    """Return a text of users in one line that can be sent as UTF-8, without values of resources."""
    try:
        text = " ".join(redact(str(value)).split())
    except Exception:  # it runs code of users
        return f"a {type(value).__qualname__}"
    text = text.encode("utf-8", "backslashreplace").decode()  # names of files may have halves of characters
    return text if len(text) <= _WIDEST else f"{text[:_WIDEST]}..."


_tenant, _task = maker(TenantRow), maker(TaskRow)  # a look makes hundreds of them on the loop of the pool


class _Tenant:
    """What one pass over the queue and the slots finds of a tenant."""

    __slots__ = ("active", "lag", "oldest", "queued")

    def __init__(self) -> None:
        self.queued = self.active = 0
        self.lag = 0.0
        self.oldest: TaskRecord | None = None


def pool_view(executor: Executor, rows: int, shared: View | None) -> TaskPoolView:
    """Return the counters of a pool, its tenants, and the tasks that matter most."""
    scheduler, slots, now = executor.scheduler, executor.scheduler.slots, clock.now()
    tenants = _tenants(executor, now)
    listed = min(rows, _LISTED)
    running = nsmallest(listed, (*slots.holders(), *slots.without), key=_began)
    first = (one.oldest for one in tenants.values() if one.oldest is not None)
    oldest = nlargest(listed, first, key=lambda task: now - task.since.now)
    ended_badly = islice(reversed(executor.states.ended_badly), listed)
    waits = waiting_for(executor, shared)
    paused = scheduler.paused_tenants()
    # Those that wait longest come first, then those that waited. Paused ones are listed also if nothing is queued.
    lags = {**dict.fromkeys(paused, 0.0), **{key: one.lag for key, one in tenants.items()}}
    ages, nothing = stats_of(islice(reversed(executor.ages), _AGES), 1.0, lags).keys, _Tenant()
    return TaskPoolView(
        id=executor.id,
        state=executor.state,
        paused=scheduler.paused,
        max_concurrent=scheduler.limit,
        active=slots.active,
        waiting=slots.waiting,
        queued=scheduler.depth,
        **executor.states.counts,
        blocked_submitters=executor.submit_queue.submitters,
        queue=scheduler.strategy.descriptor()["kind"],
        max_queued=scheduler.policy.max_depth,
        waiting_for=None if waits is None else dict(waits),
        jain=round(scheduler.jain, 4),
        lag=round(max((one.lag for one in tenants.values()), default=0.0), 3),
        tenant_count=len(ages),
        tenants=[
            _tenant_row(age, tenants.get(age.key, nothing), _known(executor, age.key) in paused)
            for age in islice(ages, rows)
        ],
        running=[_task_row(task, now) for task in running],
        oldest=[_task_row(task, now) for task in oldest],
        failures=[_ended_row(executor, Remains._make(one)) for one in ended_badly],
        shared=None if shared is None else _budget(shared, rows),
    )


def _known(executor: Executor, tenant: Hashable) -> Hashable:
    """A tenant as its pauses know it."""
    return token_of(tenant) if executor.scheduler.is_shared and tenant is not None else tenant


def _budget(shared: View, rows: int) -> BudgetView:
    members = sorted(shared["members"], key=lambda one: not one["is_this_pool"])
    return BudgetView(
        member=next((one["id"] for one in members if one["is_this_pool"]), ""),
        active=shared["active"],
        queued=shared["queued"],
        reachable=shared["reachable"],
        as_of=shared["as_of"],
        member_count=len(members),
        members=[
            MemberRow(one["id"], shown(one["host"]), one["pid"], active=one["held"], queued=one["queued"])
            for one in members[: max(1, rows)]
        ],
    )


def _began(task: TaskRecord) -> tuple[float, int]:
    return (task.since if task.started is None else task.started).now, task.number


def _tenants(executor: Executor, now: float) -> dict[Hashable, _Tenant]:
    tenants: dict[Hashable, _Tenant] = {}
    for task in executor.scheduler.queue:
        tenant = tenants.get(task.partition)
        if tenant is None:
            tenant = tenants[task.partition] = _Tenant()
        tenant.queued += 1
        waited = now - task.since.now
        if waited > tenant.lag or tenant.oldest is None:
            tenant.lag, tenant.oldest = waited, task
    for task in executor.scheduler.slots.holders():
        tenant = tenants.get(task.partition)
        if tenant is None:
            tenant = tenants[task.partition] = _Tenant()
        tenant.active += 1
    return tenants


def _tenant_row(age: KeyAge, one: _Tenant, paused: bool) -> TenantRow:
    return _tenant(
        tenant=None if age.key is None else shown(age.key),
        queued=one.queued,
        active=one.active,
        lag=round(age.lag, 3),
        started=age.count,
        p50=round(age.p50, 4),
        p99=round(age.p99, 4),
        paused=paused,
    )


def _task_row(task: TaskRecord, now: float) -> TaskRow:
    since = task.started if task.status == "running" and task.started is not None else task.since
    permit = task.permit
    return _task(
        id=f"{task.owner.id}/{task.number}",
        number=task.number,
        tenant=None if task.partition is None else shown(task.partition),
        what=shown(getattr(task.fn, "__qualname__", type(task.fn).__name__)),
        status="waiting" if task.status == "running" and task.slot is None else task.status,
        seconds=round(max(0.0, now - since.now), 3),
        attempt=task.attempt,
        resource=getattr(permit, "resource_id", None),
        worker=getattr(permit, "worker", None),
    )


def _ended_row(executor: Executor, one: Remains) -> EndedRow:
    outcome = one.outcome
    why = outcome.line if isinstance(outcome, Told) else "" if outcome is None else outcome.reason
    return EndedRow(
        id=f"{executor.id}/{one.number}",
        number=one.number,
        tenant=None if one.partition is None else shown(one.partition),
        status=one.status,
        why=shown(why),
        attempt=one.attempt,
        ended_at=None if one.ended is None else one.ended.wall,
        can_retry=one.number in executor.failures.kept,
        retried_as=executor.failures.retried.get(one.number),
    )


class Ended(NamedTuple):
    """Tasks that have ended since somebody looked, or some of them."""

    total: int
    """How many have ended so far, in all."""
    new: int
    """How many have ended since."""
    tasks: list[tuple[Hashable, TaskStatus, Moment, Moment | None, Moment | None]]
    """Partition, status, submit, last start and end: of all that are new, or evenly chosen among them."""


def endings(executor: Executor, since: int) -> Ended:
    """Return the tasks that have ended since there were `since`, at most `_COUNTED` of them.

    A pool remembers the last `keep` tasks: of more than these, and of more than can be looked at for little, the ones
    that are returned stand for all.
    """
    total = sum(executor.states.counts.values())
    new = max(0, total - since)
    step = max(1, -(-new // _COUNTED))
    kept = islice(reversed(executor.states.finished), 0, new, step)
    ended = (executor.states.remains(one) for one in kept if isinstance(one, tuple))
    return Ended(total, new, [(one.partition, one.status, one.moment, one.started, one.ended) for one in ended])


def tenant_named(executor: Executor, text: str) -> Hashable:
    """Return the tenant that a person means by this text: one that is paused or has tasks, or else the text itself."""
    scheduler = executor.scheduler
    known = {*scheduler.paused_tenants(), *(task.partition for task in scheduler.unfinished())} - {None}
    if text in known:
        return text
    return next((tenant for tenant in known if shown(tenant) == text), text)


def find_task(executor: Executor, number: int) -> TaskRecord | Remains | None:
    """Return the task of this number: unfinished, or among the last that have ended. On the loop of the pool."""
    for task in executor.scheduler.unfinished():
        if task.number == number:
            return task
    for kept in executor.states.remembered():
        if kept.number == number:
            return kept
    for one in executor.states.ended_badly:
        if one[1] == number:
            return Remains._make(one)
    return None
