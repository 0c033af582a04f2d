"""Lanes: queued tasks that agree in level, tenant and need, and the orders in which lanes take their turns. Pure.

See `queue`, which is made of these.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterator
from typing import Any, Final, Protocol, SupportsFloat

from headgate.gate.rounds import Rounds

_COUNTED: Final = 500
"""How far a task's place in a lane is counted. Beyond that it is estimated from the numbers of the tasks."""


class Terms(Protocol):
    """The part of a task that says what it needs and costs."""

    @property
    def need(self) -> Hashable: ...
    @property
    def cost(self) -> SupportsFloat | None: ...


class Queued(Protocol):
    """A task as the queue sees it."""

    number: int
    """Grows from task to task."""
    turn: int
    """Where it stands among the tasks of its lane and level: the smallest is first. The queue sets it."""
    before: Any
    after: Any

    @property
    def partition(self) -> Hashable:
        """The tenant."""
        ...

    @property
    def priority(self) -> int: ...

    terms: Any
    """What it needs and costs: `Terms`."""


class Chain:
    """Tasks linked by `before` and `after`."""

    __slots__ = ("head", "size", "tail")

    def __init__(self) -> None:
        self.head: Any = None
        self.tail: Any = None
        self.size: int = 0

    def append(self, task: Queued) -> None:
        """Link a task in at the end."""
        tail = self.tail
        if tail is None:
            self.head = task
        else:
            tail.after = task
            task.before = tail
        self.tail = task
        self.size += 1

    def prepend(self, task: Queued) -> None:
        """Link a task in before all others."""
        head = self.head
        if head is None:
            self.tail = task
        else:
            head.before = task
            task.after = head
        self.head = task
        self.size += 1

    def insert(self, task: Queued) -> None:
        """Link a task in where its turn is, which is probably near the head."""
        after = self.head
        while after is not None and after.turn < task.turn:
            after = after.after
        if after is None:
            self.append(task)
        elif after.before is None:
            self.prepend(task)
        else:
            before = after.before
            before.after = after.before = task
            task.before, task.after = before, after
            self.size += 1

    def unlink(self, task: Queued) -> None:
        """Take out a task, wherever it stands."""
        before, after = task.before, task.after
        if before is None:
            self.head = after
        else:
            before.after = after
            task.before = None
        if after is None:
            self.tail = before
        else:
            after.before = before
            task.after = None
        self.size -= 1

    def count_before(self, task: Queued) -> int:
        """Estimate how many tasks stand before this one; exact for the first few hundred."""
        count, one = 0, task.before
        while one is not None:
            count += 1
            if count == _COUNTED:
                each = abs(task.number - one.number) / count  # numbers of other lanes lie between
                behind = round(abs(self.tail.number - task.number) / max(1.0, each))
                return max(count, self.size - 1 - int(behind))
            one = one.before
        return count

    def __iter__(self) -> Iterator[Any]:
        task = self.head
        while task is not None:
            yield task
            task = task.after


class Lane(Chain):
    """The queued tasks of one account with one need. What puts it in an order is in its subclasses."""

    __slots__ = ("account", "need")

    def __init__(self, need: Hashable) -> None:
        super().__init__()
        self.account: Any = None
        self.need: Hashable = need


class Account(Lane):
    """The turn of a tenant at one level, and the lane of its tasks with the first of their needs."""

    __slots__ = ("got", "level", "order", "round", "tenant")

    weight: float = 1.0
    tag: float = 0.0

    def __init__(self, tenant: Hashable, level: Level, need: Hashable) -> None:
        super().__init__(need)
        self.account = self
        self.tenant: Hashable = tenant
        self.level: Level = level
        self.order: int = 0
        """When it was served last: of accounts with the same tag, the one with the smallest number is first."""
        self.round: int = 0  # see `rounds.Standing`
        self.got: float = 0.0


class RingAccount(Account):
    """An account whose lane is in a `Ring`."""

    __slots__ = ("following", "preceding")

    def __init__(self, tenant: Hashable, level: Level, need: Hashable) -> None:
        super().__init__(tenant, level, need)
        self.preceding: Any = None
        self.following: Any = None
        """The lane after it; None: it is not in the ring, because it is empty or parked."""


class HeapAccount(Account):
    """An account whose lane is in a `Heap`."""

    __slots__ = ("entry", "tag", "weight")

    def __init__(self, tenant: Hashable, level: Level, need: Hashable) -> None:
        super().__init__(tenant, level, need)
        self.entry: int = 0
        """The number of its entry; 0: it has none, because it is empty or parked."""
        self.weight: float = 1.0
        self.tag: float = 0.0


class FurtherLane(Lane):
    """The tasks of an account with a further need, in a group of either kind."""

    __slots__ = ("entry", "following", "preceding")

    def __init__(self, account: Account, need: Hashable) -> None:
        super().__init__(need)
        self.account = account
        self.entry: int = 0
        self.preceding: Any = None
        self.following: Any = None


class Level:
    """What the accounts of one level have in common."""

    __slots__ = ("accounts", "bound", "past", "rank", "rounds", "virtual")

    def __init__(self, rank: int, rounds: Rounds | None) -> None:
        self.rank: int = rank
        """The level with the smallest rank goes first."""
        self.rounds: Rounds | None = rounds
        """How fairly its tenants are served; None: tasks go by their arrival."""
        self.accounts: int = 0
        self.virtual: float = 0.0
        self.past: dict[Hashable, float] = {}
        """Tags of tenants that ran empty."""
        self.bound: int = 64

    def first_tag(self, tenant: Hashable) -> float:
        """The tag of a tenant that has nothing queued."""
        return max(self.virtual, self.past.get(tenant, 0.0))

    def remember(self, tenant: Hashable, tag: float) -> None:
        """Keep the tag of a tenant that ran empty.

        Tags that virtual time has passed are dropped. They are looked for when there are twice as many as the last
        time.
        """
        self.past[tenant] = tag
        if len(self.past) > self.bound:
            self.past = {other: tag for other, tag in self.past.items() if tag > self.virtual}
            self.bound = 2 * len(self.past) + 64


class Ring:
    """Lanes that take turns: the one whose account was served longest ago is first."""

    __slots__ = ("lanes", "need", "turn")

    def __init__(self, need: Hashable) -> None:
        self.need: Hashable = need
        self.lanes: int = 0
        """How many lanes of this need have queued tasks, parked ones included."""
        self.turn: Any = None
        """The first one, if there is one; the one before it in the ring is the last."""

    def first(self) -> Any:
        """The lane that is next."""
        return self.turn

    def lists(self, lane: Any) -> bool:
        """Whether this lane is in the ring."""
        return lane.following is not None

    def enter(self, lane: Any) -> None:
        """List a lane, almost always as the last."""
        turn = self.turn
        if turn is None:
            self.turn = lane.preceding = lane.following = lane
            return
        last, after, order = turn.preceding, turn, lane.account.order
        if order < last.account.order:
            while after.account.order < order:
                after = after.following
            if after is turn:
                self.turn = lane
        before = after.preceding
        lane.preceding, lane.following = before, after
        before.following = after.preceding = lane

    def leave(self, lane: Any) -> None:
        """List a lane no longer."""
        preceding, following = lane.preceding, lane.following
        if following is lane:
            self.turn = None
        else:
            preceding.following, following.preceding = following, preceding
            if self.turn is lane:
                self.turn = following
        lane.preceding = lane.following = None

    def advance(self, lane: Any) -> None:
        """Put a lane where it belongs: its account has another turn."""
        self.leave(lane)
        self.enter(lane)


class Heap:
    """Lanes by level, tag and turn."""

    __slots__ = ("_entries", "_fair", "_number", "lanes", "need")

    def __init__(self, need: Hashable, *, fair: bool) -> None:
        self.need: Hashable = need
        self.lanes: int = 0
        """How many lanes of this need have queued tasks, parked ones included."""
        self._fair = fair
        self._number = 0
        self._entries: list[tuple[int, float, int, int, Any]] = []

    def first(self) -> Any:
        """The lane that is next. Entries that are out of date are dropped, or put where they belong."""
        entries = self._entries
        while entries:
            _, tag, order, number, lane = entries[0]
            if lane.entry != number:
                heapq.heappop(entries)
            elif len(entries) == 1:
                return lane  # whatever its rank is
            elif order != (lane.account.order if self._fair else lane.head.turn) or tag != lane.account.tag:
                heapq.heapreplace(entries, self._entry(lane))
            else:
                return lane
        return None

    def lists(self, lane: Any) -> bool:
        """Whether this lane has an entry."""
        return bool(lane.entry)

    def enter(self, lane: Any) -> None:
        """List a lane. An older entry of it is dropped when it surfaces."""
        entries = self._entries
        if len(entries) == 1 and (only := entries[0][-1]).entry:
            entries[0] = self._entry(only)  # alone, its rank did not matter
        self._number += 1
        lane.entry = self._number
        heapq.heappush(entries, self._entry(lane))
        if len(entries) > 4 * self.lanes + 64:
            entries[:] = [self._entry(known[-1]) for known in entries if known[-1].entry == known[-2]]
            heapq.heapify(entries)

    def smallest(self, most: int) -> list[Any]:
        """The first lanes, in order."""
        lanes: list[Any] = []
        entries = []
        while len(lanes) < most and (lane := self.first()) is not None:
            lanes.append(lane)
            entries.append(heapq.heappop(self._entries))
        for entry in entries:
            heapq.heappush(self._entries, entry)
        return lanes

    def leave(self, lane: Any) -> None:
        """List a lane no longer."""
        lane.entry = 0
        if self.lanes == 1:
            self._entries.clear()

    def advance(self, lane: Any) -> None:
        """Put a lane where it belongs: its rank is smaller than it was."""
        if len(self._entries) > 1:
            self.enter(lane)

    def _entry(self, lane: Any) -> tuple[int, float, int, int, Any]:
        account = lane.account
        order = account.order if self._fair else lane.head.turn
        return account.level.rank, account.tag, order, lane.entry, lane
