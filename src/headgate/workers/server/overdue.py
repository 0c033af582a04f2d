"""Which calls are past their timeout and still hold the task loop, or its thread places.

These functions run on the server's thread. The dict of running calls may change meanwhile, so it is copied.
"""

from __future__ import annotations

from headgate.workers.server.running_call import RunningCall
from headgate.workers.server.task_loop import TaskLoop


def timed_calls(tasks: TaskLoop, now: float) -> list[tuple[RunningCall, float]]:
    """Return the calls with a timeout that have begun, and the seconds that each may still run."""
    return [(one, due - now) for one in list(tasks.running.values()) if (due := one.due) is not None]


def loop_overdue(tasks: TaskLoop, now: float) -> tuple[RunningCall | None, float]:
    """Return the call that holds the loop, if known, and for how many seconds it has been past its timeout.

    What holds the loop may be a task that a call started. If all calls on the loop are past their timeout, it is a task
    of one of them.
    """
    held = tasks.held_by()
    if held is not None:
        return held, now - held.due if held.due is not None else 0.0
    there = [one for one in list(tasks.running.values()) if not one.has_thread_place and not one.rests]
    if not there or any(one.due is None for one in there):
        return None, 0.0
    return None, min(now - one.due for one in there if one.due is not None)


def places_overdue(tasks: TaskLoop, now: float) -> float:
    """Return for how many seconds every thread place has been held by a call that is past its timeout."""
    if not tasks.places.are_held:
        return 0.0
    late = [now - one.due for one in list(tasks.running.values()) if one.abandoned and one.due is not None]
    return min(late) if len(late) >= tasks.places.total else 0.0
