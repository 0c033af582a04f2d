"""How long until a task starts: what `handle.eta()` returns, and what refusals carry as `retry_after`."""

from __future__ import annotations

from itertools import islice

from headgate.core.clock import clock
from headgate.tasks.model import TaskRecord
from headgate.tasks.scheduling.load import LATELY, seconds_of_slots


def seconds_until_start(task: TaskRecord, *, new: bool) -> float | None:
    """Estimate in how many seconds a task starts that is queued or, if `new`, would be queued now.

    None if there is nothing to estimate it from.
    """
    pool, now = task.owner, clock.now()
    scheduler = pool.scheduler
    if scheduler.is_paused(task):
        return None  # until somebody resumes it
    found: list[float | None] = []
    if task.terms.due is not None:
        found.append(max(0.0, task.terms.due - now))
    if task.started is not None and scheduler.is_aside(task):  # it pauses before its next attempt
        found.append(max(0.0, pool.timers.due_at(task, now) - now))
    if pool.explainer is not None and not scheduler.slots.exhausted:
        found.append(pool.explainer.waiting_for([task.terms.need])["seconds"])
    place, pace = scheduler.place(task, new=new), pool.pace.seconds(now, scheduler.slots.active)
    if pace is not None:
        found.append((place.ahead + 1) * pace)
    elif scheduler.slots.exhausted or scheduler.is_shared:
        found.append(_of_slots(task, place.ahead, now))
    if (cap := scheduler.cap(task.partition)) is not None:
        found.append(_of_slots(task, place.own, now, cap))
    found.append(scheduler.rate_opens_in(task.partition, place.own) or None)
    return max((seconds for seconds in found if seconds is not None), default=None)


def _of_slots(task: TaskRecord, ahead: float, now: float, cap: int | None = None) -> float | None:
    """The estimate from run times: of the whole pool, or of the tenant of the task if that has a cap."""
    pool = task.owner
    slots = pool.scheduler.slots
    holders = slots.holders() if cap is None else (one for one in slots.holders() if one.partition == task.partition)
    started = [one.started for one in islice(holders, LATELY)]
    running = [now - since.now for since in started if since is not None]
    if cap is not None and len(running) < min(cap, LATELY):
        return None  # it has slots of its own left
    return seconds_of_slots(ahead, cap or max(1, slots.active), pool.states.run_times(LATELY), running)
