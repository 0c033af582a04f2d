"""How long until a pool has room? An estimate from the tasks that have ended lately and those that run. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

LATELY = 32
"""How many of the tasks that have ended last are looked at."""


def seconds_until_room(ran_for: Sequence[float], running_for: Iterable[float]) -> float | None:
    """Estimate when the next running task ends, so that another may start and a place in the queue comes free.

    `ran_for` are the run times of tasks that have ended lately, `running_for` those of the running ones so far. A task
    is expected to run as long as others did on average. One that has run longer than that, or without anything to
    compare it with, is expected to run as long again as it has: the longer something has lasted, the longer it lasts.
    """
    mean = sum(ran_for) / len(ran_for) if ran_for else 0.0
    left = [mean - so_far if so_far < mean else so_far for so_far in running_for]
    if not left:
        return mean if ran_for else None
    soonest = min(left)
    return soonest if soonest > 0 or ran_for else None
