"""Jain's index of fairness between tenants, from what happened. Pure.

Fairness is judged in **rounds**. A round begins with the tenants that have tasks queued at that moment, its members,
and ends when each of them has been served at least once or has nothing queued. What each member was given in the round
(its cost, divided by its weight) is its share, and Jain's index over the shares is
``(sum x)**2 / (n * sum x*x)``: 1.0 when all got the same, 1/n when one got everything.

So a tenant that floods a first-in-first-out queue makes one endless, very unfair round; under round robin every round
gives each member one. Tenants that ran out of work, or came in the middle, distort nothing. Two numbers are kept for
each tenant with a backlog, and each task costs a few additions.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable, Iterable
from typing import Final, Protocol

_ROUNDS: Final = 256


class Standing(Protocol):
    """Where one tenant with a backlog stands in the rounds. A queue with accounts lets them carry it."""

    round: int
    """The first round in which it counts and was not served yet."""
    got: float
    """How much it was given in the round before that one; 0.0 if it did not count there."""


class Rounds:
    """Jain's index, round by round."""

    __slots__ = ("_backlogged", "_length", "_members", "_past", "_squares", "_sum", "_weighted", "number", "pending")

    def __init__(self) -> None:
        self.number: int = 1
        self._backlogged = 0
        self._members = 0
        self.pending: int = 0
        """How many members of this round were not served yet."""
        # Of this round, besides one task and 1.0 for each member that was served and is not `_weighted`: the usual turn
        # of a member changes `pending`, and nothing else (benchmarks/tasks.py).
        self._length = 0
        self._sum = 0.0
        self._squares = 0.0
        self._weighted = 0
        self._past: deque[tuple[float, int]] = deque(maxlen=_ROUNDS)

    def opened(self, standing: Standing) -> None:
        """Note that a tenant has queued tasks now. It counts from the next round on."""
        standing.round = self.number + 1
        standing.got = 0.0
        self._backlogged += 1

    def served(self, standing: Standing, amount: float = 1.0) -> None:
        """A task of this tenant was started; `amount` is its cost divided by the tenant's weight."""
        if standing.round <= self.number:
            standing.round = self.number + 1
            standing.got = amount
            self.pending -= 1
            if amount != 1.0:
                self._weighted += 1
                self._sum += amount
                self._squares += amount * amount
        else:
            self._length += 1
            if got := standing.got:  # else it came in the middle of this round
                standing.got = got + amount
                self._sum += amount
                self._squares += amount * (2 * got + amount)
        if self.pending <= 0:
            self.turn()

    def closed(self, standing: Standing) -> None:
        """Note that a tenant has nothing queued any more."""
        self._backlogged -= 1
        if standing.round <= self.number:
            self.pending -= 1
            self._members -= 1
            if self.pending <= 0:
                self.turn()

    def index(self) -> float:
        """Return the index over the last rounds, each counted by its number of tasks; 1.0 when nobody had to share."""
        return index_of([self])

    def last(self) -> list[tuple[float, int]]:
        """Return the index of each of the last rounds, and its number of tasks."""
        rounds = list(self._past)
        length = self._served_by_now()
        if self._members >= 2 and length >= 2 * self._members:  # an unfair round may take very long to end
            rounds.append((self._jain(), length))
        return rounds

    def _served_by_now(self) -> int:
        return self._length + self._members - self.pending

    def _jain(self) -> float:
        ones = self._members - self.pending - self._weighted
        total, most = self._sum + ones, self._members * (self._squares + ones)
        # 1.0 too if costs were so large that they cannot be added up. Tasks run all the same.
        return total * total / most if 0.0 < most < math.inf else 1.0

    def turn(self) -> None:
        """Begin the next round, with all who are members now."""
        if self._members >= 2:
            self._past.append((self._jain(), self._served_by_now()))
        self.number += 1
        self._members = self.pending = self._backlogged
        self._length = self._weighted = 0
        self._sum = self._squares = 0.0


def index_of(levels: Iterable[Rounds]) -> float:
    """Return the index over the last rounds of several levels, each round counted by its number of tasks."""
    rounds = [one for level in levels for one in level.last()]
    total = sum(length for _, length in rounds)
    return sum(index * length for index, length in rounds) / total if total else 1.0


class _Backlog:
    """The standing of a key in a queue that knows no partitions."""

    __slots__ = ("got", "queued", "round")

    def __init__(self) -> None:
        self.round = self.queued = 0
        self.got = 0.0


class Backlogs:
    """Standings for a queue that knows no partitions."""

    __slots__ = ("_held", "rounds")

    def __init__(self) -> None:
        self.rounds: Rounds = Rounds()
        self._held: dict[Hashable, _Backlog] = {}

    def joined(self, key: Hashable) -> None:
        """Count one more queued task of this tenant."""
        held = self._held.get(key)
        if held is None:
            held = self._held[key] = _Backlog()
            self.rounds.opened(held)
        held.queued += 1

    def left(self, key: Hashable, *, started: bool) -> None:
        """Count one queued task of this tenant less; `started` if its turn had come."""
        held = self._held[key]
        held.queued -= 1
        if started:
            self.rounds.served(held)
        if not held.queued:
            del self._held[key]
            self.rounds.closed(held)


def jain(shares: Iterable[float]) -> float:
    """Jain's index of these shares."""
    found = list(shares)
    squares = sum(share * share for share in found)
    return sum(found) ** 2 / (len(found) * squares) if squares else 1.0
