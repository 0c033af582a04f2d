"""The ledger of states: what a task may become, how many became what, and which records are kept. Pure.

A task has one terminal state, ever. `TRANSITIONS` is the whole truth; docs/tasks.md shows it, and a test compares them.

Counts are counters, so looking costs the same after a million tasks. Of the finished, the newest `keep` are remembered,
and besides those every one that holds its idempotency key.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator
from itertools import count
from typing import Final

from headgate.tasks.idempotency import holds_key
from headgate.tasks.model import PLAIN, TERMINAL, Moment, TaskRecord, TaskStatus

TRANSITIONS: Final[dict[TaskStatus, frozenset[TaskStatus]]] = {
    "queued": frozenset({"running", "rejected", "cancelled", "expired", "stale"}),
    "running": frozenset({"queued", "completed", "failed", "cancelled", "stale"}),
    "completed": frozenset(),
    "failed": frozenset(),
    "cancelled": frozenset(),
    "rejected": frozenset(),
    "expired": frozenset(),
    "stale": frozenset(),
}
"""running -> queued: a retry ended an attempt. queued, running -> stale: the process that owned it ended first."""


class IllegalMove(AssertionError):
    """A task was asked to become what it cannot. Always a fault of headgate, never of the caller."""


class Ledger:
    """What became of the tasks of one pool, and who holds an idempotency key."""

    __slots__ = ("_lapses", "_serial", "counts", "finished", "keys", "numbers")

    def __init__(self, keep: int) -> None:
        self._lapses: list[tuple[float, int, TaskRecord]] = []  # when windows given in seconds end
        self._serial = count()
        self.numbers: count[int] = count(1)
        """What the next tasks are called."""
        self.counts: dict[TaskStatus, int] = dict.fromkeys(sorted(TERMINAL), 0)
        """How many ever reached each terminal state."""
        self.finished: deque[TaskRecord] = deque(maxlen=keep)
        """The last that ended, except those that hold a key."""
        self.keys: dict[str, TaskRecord] = {}
        """Who holds an idempotency key."""

    def start_from(self, number: int) -> None:
        """Call the next task so: those before are of former runs."""
        self.numbers = count(number)

    def claim(self, task: TaskRecord) -> None:
        """It holds its idempotency key from now on, if it has one."""
        key = task.terms.idempotency_key
        if key is not None:
            self.keys[key] = task

    def withdraw(self, task: TaskRecord) -> None:
        """It was never accepted: as if it had never been. It counts nowhere, and nothing may happen to it any more."""
        task.status = "cancelled"
        self._unclaim(task)

    def _unclaim(self, task: TaskRecord) -> None:
        key = task.terms.idempotency_key
        if key is not None and self.keys.get(key) is task:
            del self.keys[key]

    def move(self, task: TaskRecord, status: TaskStatus) -> None:
        """Make it what it may become."""
        if status not in TRANSITIONS[task.status]:
            raise IllegalMove(
                f"{task.label} cannot become {status}: it is {task.status} (attempt {task.attempt}, submitted at "
                f"{task.moment.now}, started {task.started}, ended {task.ended})"
            )
        task.status = status

    def end(self, task: TaskRecord, status: TaskStatus, moment: Moment) -> None:
        """Its terminal state."""
        if status in TRANSITIONS[task.status]:  # `move`, without the call
            task.status = status
        else:
            self.move(task, status)
        task.ended = moment
        self.counts[status] += 1
        if task.terms is PLAIN or task.terms.idempotency_key is None:
            self.finished.append(task)
        else:
            self._settle_key(task, moment.now, moment.now)

    def load(self, task: TaskRecord, status: TaskStatus, moment: Moment) -> None:
        """Remember a task of a former run, which has ended one way or another.

        How long ago is known by the wall clock only; from this `moment` on, the monotonic clock counts. A record from
        the future, because the wall clock was set back meanwhile, counts as one that has just ended.
        """
        self.claim(task)
        task.status = status
        self.counts[status] += 1
        if task.terms.idempotency_key is None:
            self.finished.append(task)
        else:
            ended = None if task.ended is None else moment.now - max(0.0, moment.wall - task.ended.wall)
            self._settle_key(task, ended, moment.now)

    def holder(self, key: str, now: float) -> TaskRecord | None:
        """Who holds this key. `now` in monotonic seconds: a wall clock that is set forward must not end a window."""
        self._lapse(now)
        return self.keys.get(key)

    def remembered(self) -> Iterator[TaskRecord]:
        """Everyone who has ended, each once."""
        yield from self.finished
        for task in self.keys.values():
            if task.finished:  # those that hold a key and have ended are nowhere else
                yield task

    def _settle_key(self, task: TaskRecord, ended: float | None, now: float) -> None:
        """It has ended: does it go on holding its key? Both times in monotonic seconds."""
        self._lapse(now)
        window = task.terms.window
        if not holds_key(window, task.status, ended, now):
            self._release(task)
        elif not isinstance(window, str):
            assert ended is not None, "it holds its key from its end on"
            heapq.heappush(self._lapses, (ended + window, next(self._serial), task))

    def _lapse(self, now: float) -> None:
        while self._lapses and self._lapses[0][0] <= now:
            self._release(heapq.heappop(self._lapses)[2])

    def _release(self, task: TaskRecord) -> None:
        self._unclaim(task)
        self.finished.append(task)
