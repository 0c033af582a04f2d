"""How long until a task starts? An estimate from how fast tasks have started lately. Pure.

What counts is the pace while tasks wait: the time between two starts, if the second task had queued. A task that starts
without having queued found a slot free, so it says nothing about the pace; but from then on every slot is in use until
the first queued task starts, so the time between these two counts.

Where nothing of the kind was seen lately, run times are the next best: those of tasks that have ended, and those of the
running ones so far.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final

LATELY: Final = 32
"""How many tasks that have ended last are looked at, and how many running ones."""
WINDOW: Final = 30
"""Seconds for which starts are remembered."""


class Pace:
    """Counts starts of tasks that had queued, and the time they took. A sample a second gives the last 30 seconds.

    The times between starts add up to the time from the first to the last, less what lies before starts of tasks that
    had not queued. So a start is one addition, which the executor does by itself (benchmarks/tasks.py).
    """

    __slots__ = ("_samples", "count", "free", "last", "until")

    def __init__(self) -> None:
        self.count: int = 0
        """How many tasks that had queued have started."""
        self.free: float = 0.0
        """Seconds that do not count, because a slot was free at their end."""
        self.last: float = 0.0
        """When the last task started, whether it had queued or not."""
        self.until: float = 0.0
        """When the next sample is due."""
        self._samples: deque[tuple[float, int, float]] = deque(maxlen=WINDOW + 1)

    def begin(self, now: float) -> None:
        """Count from now on."""
        self.last = now
        self.sample(now)

    def sample(self, now: float) -> None:
        """Remember how many tasks had started by the last start. To be called at least once a second while any do."""
        self._samples.append((self.last, self.count, self.free))
        self.until = now + 1.0

    def seconds(self, now: float, slots: int) -> float | None:
        """The mean time between two starts, where so many tasks are active; None if too little was seen lately."""
        samples = self._samples
        if not samples:
            return None
        while len(samples) > 1 and samples[1][0] < now - WINDOW:
            samples.popleft()
        since, count, free = samples[0]
        counted = self.count - count
        if not counted or self.last < now - WINDOW:
            return None
        mean = (self.last - since - (self.free - free)) / counted
        silence = now - self.last - slots * mean  # longer than any slot was in use: it is slower than it was
        return mean + max(0.0, silence) / counted


def seconds_of_slots(ahead: float, slots: int, ran_for: Sequence[float], running_for: Sequence[float]) -> float | None:
    """Estimate when a task starts if so many start before it and all of these slots are in use.

    `ran_for` are the run times of tasks that have ended lately, `running_for` those of running tasks so far, of all or
    of some. A task is expected to run as long as others did on average. One that has run longer than that, or without
    anything to compare it with, is expected to run as long again as it has: the longer something has lasted, the longer
    it lasts.
    """
    if not running_for:
        return sum(ran_for) / len(ran_for) if ran_for else None
    mean = sum(ran_for) / len(ran_for) if ran_for else 2 * sum(running_for) / len(running_for)
    if not mean:
        return None
    left = sorted(mean - so_far if ran_for and so_far < mean else so_far for so_far in running_for)
    rounds, place = divmod(int(ahead * len(left) / slots), len(left))
    return left[place] + rounds * mean
