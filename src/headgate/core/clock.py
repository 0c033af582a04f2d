"""Time and chance: the only module of headgate that reads a clock or draws a number.

Other packages never call ``time`` or ``random``. Their pure parts take ``now`` as an argument; their shells ask the one
`clock` below. A test swaps what that clock answers (`Clock.replaced`), and hours of cooldown pass in milliseconds.

The swap is process-wide on purpose: a pool made at import time, or used from a helper thread, follows the test's time
without being told. The price: two tests on different clocks cannot run in one process at the same moment.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Clock:
    """Four questions about time and chance, each answered by a plain callable that can be swapped.

    They are attributes, not methods, so that the usual clock costs one call of a builtin and nothing more.
    """

    __slots__ = ("now", "sleep", "swaps", "token", "uniform", "wall")

    now: Callable[[], float]
    """Seconds on a clock that never jumps back. Only differences mean anything."""
    wall: Callable[[], float]
    """Unix seconds, for people and records; nothing is ever decided by it."""
    sleep: Callable[[float], None]
    """Block this thread. Only for code without an event loop."""
    uniform: Callable[[float, float], float]
    """A number between two others."""
    token: Callable[[], str]
    """A name that no other call has been given."""
    swaps: int
    """How many times the answers were swapped. Times that were noted before the last swap mean nothing after it."""

    def __init__(self) -> None:
        self.now = time.monotonic
        self.wall = time.time
        self.sleep = time.sleep
        self.uniform = random.uniform
        self.token = _random_token
        self.swaps = 0

    @contextmanager
    def replaced(
        self,
        *,
        now: Callable[[], float] | None = None,
        wall: Callable[[], float] | None = None,
        sleep: Callable[[float], None] | None = None,
        uniform: Callable[[float, float], float] | None = None,
        token: Callable[[], str] | None = None,
    ) -> Iterator[Clock]:
        """Answer with these instead, inside the block; what is not given stays as it was."""
        before = (self.now, self.wall, self.sleep, self.uniform, self.token)
        self.now = now or self.now
        self.wall = wall or self.wall
        self.sleep = sleep or self.sleep
        self.uniform = uniform or self.uniform
        self.token = token or self.token
        self.swaps += 1
        try:
            yield self
        finally:
            self.now, self.wall, self.sleep, self.uniform, self.token = before
            self.swaps += 1


def chance_from(seed: int) -> random.Random:
    """Random numbers that are the same for the same seed, for programs that are to run the same way again."""
    return random.Random(seed)


def _random_token() -> str:
    return os.urandom(16).hex()


clock: Clock = Clock()
"""The clock of this process."""
