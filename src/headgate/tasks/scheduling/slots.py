"""Slots, and lending them while waiting, so that nested work does not deadlock. Pure.

A task that waits for another task holds a slot it does not use, and if the other one needs that slot, both wait for
ever. So whoever waits through our own waits (``await handle``, ``pool_wait``) **lends** its slot, from its first
outstanding wait to its last: giving it back after each of five children would deadlock with the other four. It counts
as *waiting*, not as *active*, and the cap counts the active.

Where does a lent slot go? First to queued descendants of the lender, then to anyone. A slot remembers who lent it, so
when a borrower ends the next descendant has the same claim: the lender's family works on in the lender's place, however
long the queue is, and takes no more than that one slot out of the others' order.

When its waits are over (in the moment the last task it waits for ends, not when its code wakes up) the lender wants a
slot again, and stands before everything that queues. If a wait was cut
short (cancelled, timed out) it does not stand there blocked, for it may be about to cancel the very task that has its
slot: it goes on, counts as waiting, and gets the next slot that comes free.

Waits that form a circle can never end. `chain_of` finds the circle before the wait begins.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Mapping

from headgate.errors import InvalidArgument, WaitCycle
from headgate.tasks.model import TaskRecord


class Slot:
    """The right to run one task."""

    __slots__ = ("holder", "lenders", "number", "others")

    def __init__(self, number: int) -> None:
        self.number: int = number
        self.holder: TaskRecord | None = None
        self.others: tuple[Slot, ...] = ()
        """The further slots of its holder, if that takes several. They have no holder of their own."""
        self.lenders: list[TaskRecord] = []
        """The tasks that have lent it and not asked for one back, the newest last."""


class Slots:
    """The slots of one pool, and who waits to get one back. A slot is made when it is first needed."""

    __slots__ = ("_made", "_vanished", "active", "excess", "exhausted", "free", "limit", "returning", "without")

    def __init__(self, limit: int) -> None:
        self.limit: int = limit
        self.active: int = 0
        """How many tasks hold a slot."""
        self.without: dict[TaskRecord, None] = {}
        """Tasks that run and hold no slot, because they lend it."""
        self.returning: OrderedDict[TaskRecord, None] = OrderedDict()
        """The tasks among these that want a slot again, first come first served."""
        self.free: list[Slot] = []
        self.excess: bool = False
        """Are there more slots than the limit, because it was lowered?"""
        self.exhausted: bool = limit < 1
        """Is there no slot to take? Known without a look, for benchmarks/tasks.py."""
        self._made: dict[int, Slot] = {}
        self._vanished: list[int] = []

    @property
    def waiting(self) -> int:
        """How many tasks run and hold no slot."""
        return len(self.without)

    @property
    def room(self) -> int:
        """How many slots there are to take."""
        return len(self.free) + max(0, self.limit - len(self._made))

    def held(self) -> Iterator[Slot]:
        """The slots that tasks hold, one for each task: the others of a task go with it."""
        return (slot for slot in self._made.values() if slot.holder is not None)

    def holders(self) -> Iterator[TaskRecord]:
        """The tasks that hold a slot."""
        return (slot.holder for slot in self._made.values() if slot.holder is not None)

    def take(self) -> Slot:
        """Take a free slot, or make one; they are not `exhausted`."""
        if self.free:
            slot = self.free.pop()
        else:
            number = heapq.heappop(self._vanished) if self._vanished else len(self._made) + 1
            slot = self._made[number] = Slot(number)
        self._count()
        return slot

    def take_this(self, slot: Slot) -> None:
        """Take this one, which is free."""
        self.free.remove(slot)
        self._count()

    def _count(self) -> None:
        self.exhausted = not self.free and len(self._made) >= self.limit

    def take_others(self, slot: Slot, number: int) -> None:
        """Take so many further slots for the task that has this one. There is room for them."""
        slot.others = tuple(self.take() for _ in range(number))

    def put(self, slot: Slot) -> None:
        """Give a slot back, and those that go with it. If there are more than the limit, it vanishes."""
        if slot.others:
            others, slot.others = slot.others, ()
            for other in others:
                self.put(other)
        if self.excess:
            del self._made[slot.number]
            self.excess = len(self._made) > self.limit
            heapq.heappush(self._vanished, slot.number)
        else:
            self.free.append(slot)
        self._count()

    def resize(self, limit: int) -> None:
        """Hand out at most `limit` slots. What runs goes on; slots above the limit vanish as they come free."""
        self.limit = limit
        self.excess = len(self._made) > limit
        while self.free and self.excess:
            self.put(self.free.pop())
        self._count()


class Waits:
    """The outstanding waits of one task."""

    __slots__ = ("below", "by", "lent", "on", "roused")

    def __init__(self) -> None:
        self.on: dict[TaskRecord, int] = {}
        """The tasks that it waits for, and how many times."""
        self.by: dict[TaskRecord, None] = {}
        """The tasks that wait for this one."""
        self.lent: Slot | None = None
        """The slot it lent and has not asked back."""
        self.below: int = 0
        """How many waits of descendants are outstanding."""
        self.roused: int = 0
        """How many waits of descendants made it lend."""


def ancestors(task: TaskRecord) -> Iterator[TaskRecord]:
    """The unfinished tasks it was submitted from, nearest first. Finished ones are cut out of the chain on the way."""
    below, above = task, task.parent
    while above is not None:
        if above.finished:
            above = below.parent = above.parent
        else:
            yield above
            below, above = above, above.parent


def chain_of(waiter: TaskRecord, awaited: TaskRecord) -> list[TaskRecord] | None:
    """From `waiter` over `awaited` back to `waiter` by waits that are outstanding; None if there is no such circle."""
    path: dict[TaskRecord, TaskRecord] = {awaited: waiter}
    stack = [awaited]
    while stack:
        task = stack.pop()
        if task is waiter:
            break
        for further in task.waits.on if task.waits is not None and not task.finished else ():
            if further is waiter or further not in path:
                path[further] = task
                stack.append(further)
    else:
        return None
    chain, step = [waiter], path[waiter]
    while step is not waiter:
        chain.append(step)
        step = path[step]
    return [waiter, *reversed(chain)]


def waiting_for(task: TaskRecord) -> set[TaskRecord]:
    """Everyone who waits for this task, and for those who do."""
    found: set[TaskRecord] = set()
    todo = [task]
    while todo:
        waits = todo.pop().waits
        new = set(waits.by) - found if waits is not None else set()
        found |= new
        todo += new
    return found


def refuse_cycle(waiter: TaskRecord, awaited: TaskRecord) -> None:
    """WaitCycle, with the chain, if this wait could never end."""
    chain = chain_of(waiter, awaited)
    if chain is not None:
        steps = ", which waits for ".join(task.label for task in chain[1:])
        raise WaitCycle(f"{waiter.label} would wait for {steps}")


def stuck(task: TaskRecord, held: list[str], waiter: TaskRecord | None = None) -> WaitCycle:
    """It waits for resources that those have who wait for it: the error that says so."""
    first = waiter or next(iter(task.waits.by if task.waits is not None else ()))
    return WaitCycle(
        f"{first.label} waits for {task.label}, which can only run with {', '.join(held)}: held by tasks that wait for "
        "it, and a resource is not lent",
        remedy="Let the inner task run without a resource of its own, give the pool more, or submit and do not wait.",
    )


class Families:
    """Which queued tasks descend from whom. Only tasks submitted from inside a task are entered."""

    __slots__ = ("_below", "entered")

    def __init__(self) -> None:
        self._below: dict[TaskRecord, OrderedDict[TaskRecord, None]] = {}
        self.entered: dict[TaskRecord, tuple[TaskRecord, ...]] = {}
        """Queued tasks, and under whom they stand."""

    def joined(self, task: TaskRecord) -> None:
        """Enter a task that is queued now."""
        above = tuple(ancestors(task))
        if above:
            self.entered[task] = above
            for ancestor in above:
                self._below.setdefault(ancestor, OrderedDict())[task] = None

    def left(self, task: TaskRecord) -> None:
        """Remove a task that is not queued any more."""
        for ancestor in self.entered.pop(task, ()):
            queued = self._below[ancestor]
            del queued[task]
            if not queued:
                del self._below[ancestor]

    def queued_below(self, task: TaskRecord) -> Iterator[TaskRecord]:
        """The queued descendants of a task, oldest first."""
        return iter(self._below.get(task, ()))


def checked_limits(limits: object) -> int | dict[Hashable, int] | None:
    """Check `max_concurrent_per_key`: one limit for every tenant, limits for some, or None."""
    if limits is None:
        return None
    each = dict(limits) if isinstance(limits, Mapping) else {None: limits}
    for key, limit in each.items():
        if not isinstance(limit, int) or isinstance(limit, bool) or limit < 1:
            of = "" if key is None else f" of {key!r}"
            raise InvalidArgument(
                f"max_concurrent_per_key{of} must be >= 1, got {limit!r}",
                remedy="Pass a whole number for every key, a mapping for some, or None for no cap.",
            )
    return each if isinstance(limits, Mapping) else limits  # type: ignore[return-value]
