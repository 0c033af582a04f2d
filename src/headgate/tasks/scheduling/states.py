"""The ledger of states: what a task may become, how many became what, and which records are kept. Pure.

A task has one terminal state, ever. `TRANSITIONS` is the whole truth; docs/tasks.md shows it, and a test compares them.

Counts are counters, so looking costs the same after a million tasks. Of the finished, the newest `keep` are remembered,
without their results and exceptions, and besides those, whole, every one that holds its idempotency key. Tasks of
former runs that hold a key are known by a number only, because there may be very many; the record is made when somebody
asks for the key.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterator
from itertools import count, islice
from typing import Any, Final, NamedTuple
from weakref import ref

from headgate.core.key_windows import Window, holds_key
from headgate.tasks.model import (
    PLAIN,
    TERMINAL,
    Completed,
    Moment,
    RanWith,
    Remains,
    TaskRecord,
    TaskStatus,
    ended_so,
    leave_parent,
    remains_of,
    remains_of_completed,
)

TRANSITIONS: Final[dict[TaskStatus, frozenset[TaskStatus]]] = {
    "queued": frozenset({"running", "failed", "rejected", "cancelled", "expired", "stale"}),
    "running": frozenset({"queued", "completed", "failed", "cancelled", "stale"}),
    "completed": frozenset(),
    "failed": frozenset(),
    "cancelled": frozenset(),
    "rejected": frozenset(),
    "expired": frozenset(),
    "stale": frozenset(),
}
"""running -> queued: a retry ended an attempt. queued -> failed: nothing can ever serve it. queued, running -> stale:
the process that owned it ended first."""

_MARKS = 20
"""Lines of its story that are remembered of a task that nobody holds: the last ones."""


BAD: Final[frozenset[TaskStatus]] = frozenset({"failed", "rejected", "expired", "stale"})
LISTED: Final = 50
"""Tasks that ended badly and that are kept apart from the others, for those who look on."""


class IllegalMove(AssertionError):
    """A task was asked to become what it cannot. Always a fault of headgate, never of the caller."""


class Former(NamedTuple):
    """A task of a former run that holds its idempotency key."""

    key: str
    number: int
    place: int
    """By which the pool finds its record. The newer the task, the higher."""


class TaskStates:
    """What became of the tasks of one pool, and who holds an idempotency key."""

    __slots__ = (
        "_former",
        "_keyed",
        "_lapses",
        "_revive",
        "_serial",
        "counts",
        "ended_badly",
        "finished",
        "keys",
        "numbers",
    )

    def __init__(self, keep: int, revive: Callable[[int], TaskRecord] | None = None, *, keyed: bool = False) -> None:
        """`keyed`: the pool knows tenants by their `key`."""
        self._keyed = keyed
        self._revive = revive  # makes the record of a task of a former run, given its place
        self._former: dict[str, int] = {}  # the places of those that hold a key, oldest first
        self._lapses: list[tuple[float, int, TaskRecord | Former]] = []  # when windows given in seconds end
        self._serial = count()
        self.numbers: count[int] = count(1)
        """What the next tasks are called."""
        self.counts: dict[TaskStatus, int] = dict.fromkeys(sorted(TERMINAL), 0)
        """How many ever reached each terminal state."""
        self.finished: deque[TaskRecord | tuple[Any, ...]] = deque(maxlen=keep)
        """The last that ended, except those that hold a key. Those of former runs whole, of others the `Remains`, or
        what is shorter (`Completed`)."""
        self.ended_badly: deque[tuple[Any, ...]] = deque(maxlen=min(keep, LISTED))
        """The last `Remains` of those that failed or were dropped: many that go well must not displace them."""
        self.keys: dict[str, TaskRecord] = {}
        """Who holds an idempotency key."""

    def start_from(self, number: int) -> None:
        """Give the next task this number: those before are of former runs."""
        self.numbers = count(number)

    def claim(self, task: TaskRecord) -> None:
        """Let a task hold its idempotency key from now on, if it has one."""
        key = task.terms.idempotency_key
        if key is not None:
            self.keys[key] = task

    def withdraw(self, task: TaskRecord) -> None:
        """Forget a task that was never accepted. It counts nowhere, and nothing may happen to it any more."""
        task.status = "cancelled"
        self._unclaim(task)
        leave_parent(task)

    def _unclaim(self, task: TaskRecord) -> None:
        key = task.terms.idempotency_key
        if key is not None and self.keys.get(key) is task:
            del self.keys[key]

    def move(self, task: TaskRecord, status: TaskStatus) -> None:
        """Change the status of a task, if the table allows it."""
        if status not in TRANSITIONS[task.status]:
            raise IllegalMove(
                f"{task.label} cannot become {status}: it is {task.status} (attempt {task.attempt}, submitted at "
                f"{task.moment.now}, started {task.started}, ended {task.ended})"
            )
        task.status = status

    def completed(self, task: TaskRecord, moment: Moment) -> None:
        """Do what `end` does for a task that completed and has no terms of its own: most do."""
        if task.status != "running":
            self.move(task, "completed")
        task.status = "completed"
        task.stage = moment
        if task.permit is not None and task.permit.__class__ is not RanWith:
            task.permit = remains_of(task.permit)
        self.counts["completed"] += 1
        if task.rare is not None:
            self._remember(task)
            return
        kept: Completed = (
            ref(task),
            task.number,
            task.partition,
            task.priority,
            task.moment,
            task.started,
            moment,
            task.permit,
        )
        self.finished.append(kept)

    def end(self, task: TaskRecord, status: TaskStatus, moment: Moment) -> None:
        """Move a task to its terminal state."""
        if status in TRANSITIONS[task.status]:  # `move`, without the call
            task.status = status
        else:
            self.move(task, status)
        task.ended = moment
        self.counts[status] += 1
        if task.terms is PLAIN or task.terms.idempotency_key is None:
            self._remember(task)
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
            self._former.pop(task.terms.idempotency_key, None)
            ended = None if task.ended is None else _since(task.ended.wall, moment)
            self._settle_key(task, ended, moment.now)
            if self.finished and self.keys.get(task.terms.idempotency_key) is not task:
                self.finished[-1] = task  # whole: a journal is read to see what became of it

    def load_key(
        self, former: Former, status: TaskStatus, window: Window, finished_at: float | None, moment: Moment
    ) -> bool:
        """Remember a task of a former run by its key, if it still holds that. Does it?"""
        ended = None if finished_at is None else _since(finished_at, moment)
        if not holds_key(window, status, ended, moment.now):
            return False
        self.counts[status] += 1
        self._former.pop(former.key, None)  # so that the newest stand last
        self._former[former.key] = former.place
        if not isinstance(window, str):
            assert ended is not None, "it holds its key from its end on"
            heapq.heappush(self._lapses, (ended + window, next(self._serial), former))
        return True

    def newest_former(self, count: int) -> Iterator[TaskRecord]:
        """The newest of former runs that hold a key and that nobody has asked for."""
        if self._former and self._revive is not None:
            yield from map(self._revive, list(islice(reversed(self._former.values()), count)))

    def holder(self, key: str, now: float) -> TaskRecord | None:
        """The task that holds this key. `now` is monotonic: a wall clock that is set forward must not end a window."""
        self._lapse(now)
        task = self.keys.get(key)
        if task is None and self._revive is not None and (place := self._former.pop(key, None)) is not None:
            task = self.keys[key] = self._revive(place)
        return task

    def remembered(self) -> Iterator[TaskRecord | Remains]:
        """Everyone who has ended, each once: the task itself, while somebody holds it, or what remains of it. Besides
        those of `newest_former`."""
        for kept in self.finished:
            yield kept if isinstance(kept, TaskRecord) else kept[0]() or self.remains(kept)
        for task in self.keys.values():
            if task.finished:  # those that hold a key and have ended are nowhere else
                yield task

    def run_times(self, count: int) -> list[float]:
        """How many seconds the last attempts took of the tasks that have ended last, of at most `count` of them.

        Of this run of the program, and without those that hold a key.
        """
        ended = (kept for kept in islice(reversed(self.finished), count) if not isinstance(kept, TaskRecord))
        tasks = map(self.remains, ended)
        return [one.ended.now - one.started.now for one in tasks if one.ended and one.started]

    def _settle_key(self, task: TaskRecord, ended: float | None, now: float) -> None:
        """Decide whether a task that has ended goes on holding its key. Both times in monotonic seconds."""
        self._lapse(now)
        window = task.terms.window
        if not holds_key(window, task.status, ended, now):
            self.release(task)
        elif not isinstance(window, str):
            assert ended is not None, "it holds its key from its end on"
            heapq.heappush(self._lapses, (ended + window, next(self._serial), task))

    def _lapse(self, now: float) -> None:
        while self._lapses and self._lapses[0][0] <= now:
            over = heapq.heappop(self._lapses)[2]
            if not isinstance(over, Former):
                self.release(over)
            elif self._former.get(over.key) == over.place and self._revive is not None:
                del self._former[over.key]
                self.finished.append(self._revive(over.place))
            elif (task := self.keys.get(over.key)) is not None and task.number == over.number:
                self.release(task)  # somebody has asked for it

    def release(self, task: TaskRecord) -> None:
        """Let a task that has ended hold its idempotency key no longer."""
        self._unclaim(task)
        self._remember(task)

    def _remember(self, task: TaskRecord) -> None:
        """Keep `Remains` of an ended task, as the plain tuple that is made in half the time (benchmarks/tasks.py)."""
        status, permit, trail = task.status, task.permit, task.trail
        remains = (
            ref(task),
            task.number,
            status,
            task.key,
            task.partition,
            task.priority,
            task.terms,
            task.attempt,
            task.moment,
            task.started,
            task.ended,
            None if status == "completed" else ended_so(task),
            None if permit is None else remains_of(permit),
            None if trail is None else trail[-_MARKS:],
        )
        self.finished.append(remains)
        if status in BAD:
            self.ended_badly.append(remains)

    def remains(self, kept: tuple[Any, ...]) -> Remains:
        """Return the `Remains` that an entry of `finished` stands for."""
        if len(kept) == len(Remains._fields):
            return Remains._make(kept)
        return remains_of_completed(kept, keyed=self._keyed)


def _since(wall: float, moment: Moment) -> float:
    """When was that, on the monotonic clock of `moment`? Not later than now, whatever the wall clock says."""
    return moment.now - max(0.0, moment.wall - wall)
