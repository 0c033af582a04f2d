"""When to start the next worker after starts that failed, and when to tell callers of the failures. Pure.

A worker that was ready and ended is replaced at once. A start that fails is tried again after a pause that doubles with
each failure in a row, up to `LONGEST` seconds, for as long as the pool is open: what is short now (processes, memory,
descriptors, a file that is being replaced) may be there again later. Starts that fail while a pause lasts belong to the
try before it and do not make it longer.

Two judgements are made on the way. A pool of which no worker was ever ready is given up after `DEATHS` failures within
`WITHIN` seconds: it is most likely wrong, and not unlucky. In a pool that had workers, callers who find none are told
why as soon as starts *keep failing*: `DEATHS` tries in a row, over at least `PATIENCE` seconds. Until then they wait.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from headgate.errors import WorkerStartFailed

DEATHS, WITHIN = 5, 30.0
"""So many starts that failed, within so many seconds, end a pool that never had a worker."""
FIRST, LONGEST = 0.05, 30.0
"""Seconds of the first pause, and of the longest."""
PATIENCE = 5.0
"""Seconds for which starts must have failed before callers are told instead of waiting."""


class Trouble(NamedTuple):
    """A start that failed, and how many failed in a row with it: what a placement tells its pool."""

    failure: WorkerStartFailed
    reason: str
    """Why it failed, without what the failure adds to that."""
    failed_tries: int
    since: float
    """When the first of these tries failed."""
    retry_in: float | None
    """Seconds until the next try; None: there is none, the pool is given up."""

    def keeps_failing(self, now: float) -> bool:
        """Have starts failed so often and for so long that nobody should wait for the next?"""
        return keeps_failing(self.failed_tries, self.since, now)


def keeps_failing(failed_tries: int, since: float, now: float) -> bool:
    """Tell whether so many failures in a row, the first of them at `since`, are more than bad luck."""
    return failed_tries >= DEATHS and now - since >= PATIENCE


class Starts:
    """The starts of a pool's workers: how many failed in a row, and when the next one is due."""

    def __init__(self) -> None:
        self.ever_ready: bool = False
        """Was any worker of the pool ever ready?"""
        self.failed_tries: int = 0
        """Tries in a row that failed."""
        self.next_try: float | None = None
        """When the next one is due; None: nothing is awaited."""
        self.since: float = 0.0
        """When the first of these tries failed."""
        self._failures: deque[float] = deque(maxlen=DEATHS)

    def failed(self, now: float) -> float:
        """Note that a start failed; return the seconds until the next one."""
        self._failures.append(now)
        due = self.next_try
        if due is None:
            if not self.failed_tries:
                self.since = now
            pause = LONGEST if self.failed_tries > 32 else min(FIRST * 2**self.failed_tries, LONGEST)
            self.failed_tries += 1
            due = self.next_try = now + pause
        return max(0.0, due - now)

    def trying(self) -> None:
        """Note that the pause is over and the next start has begun."""
        self.next_try = None

    def ready(self) -> None:
        """Note that a worker is ready, and so that starting works."""
        self.ever_ready = True
        self.failed_tries = 0
        self.next_try = None

    @property
    def hopeless(self) -> bool:
        """Is the pool to be given up? Never, once it had a worker."""
        failures = self._failures
        return not self.ever_ready and len(failures) == DEATHS and failures[-1] - failures[0] <= WITHIN

    def keeps_failing(self, now: float) -> bool:
        """Have starts failed so often and for so long that nobody should wait for the next?"""
        return keeps_failing(self.failed_tries, self.since, now)
