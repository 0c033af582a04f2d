"""Decides for one pool: who may enter, who goes next, who gets a slot back. Pure, and the only place that decides.

It joins the parts: a queue (the order), a policy (how many may queue), slots (with lending), limits of tenants, a
supply (all that a task needs besides slots), and what keeps track of victims and families. The executor asks, and does
what it is told; nothing here awaits, so nothing here can be half done.

**The decision** is `next`: it looks at who comes first, and gives it its slots and what it needs together, or neither.
Nobody leaves the queue before that, so whoever cannot start stands where it stood. A submit, the end of a task, a
resource that comes free, a timer and a grant of other processes all lead to it. Two shorter ways give the same answer
where the question is simpler: `enter`, for a new task that nobody stands before, and `succeed`, for a slot that goes
from one task to the next.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import replace
from itertools import islice
from typing import Protocol

from headgate.errors import InvalidArgument, PoolBusy, QueueFull
from headgate.gate.queue import MOST_NEEDS, Place, Queue
from headgate.gate.rounds import Backlogs
from headgate.gate.tenants import Caps, Rates, Tenants, Window
from headgate.tasks.admission import Answer, OfLargestBacklog, Policy, victims_of
from headgate.tasks.model import PLAIN, TaskRecord
from headgate.tasks.scheduling.share import Share
from headgate.tasks.scheduling.shared_queue import SharedQueue, token_of
from headgate.tasks.scheduling.slots import Families, Slot, Slots, Waits, refuse_cycle
from headgate.tasks.strategies import Strategy


class Supply(Protocol):
    """All that tasks need besides slots."""

    def take(self, task: TaskRecord, *, wait: bool) -> bool:
        """Take for a task what it needs now. False: nothing serves it now, or nothing ever can and it has ended.

        With `wait`, the task is queued, and the pool is told when its requirement might be served.
        """
        ...

    def give_back(self, task: TaskRecord) -> None:
        """Take back what a task has, which will not start with it."""

    def rests(self, task: TaskRecord) -> bool:
        """Is all that could serve a task cooling down or paused, so that it will be a while before it is served?"""
        ...


_LOOKED_AT = 16
"""How many descendants of a lender are looked at for one that is not at its key's limit. Looking at all of them, again
and again, would cost more than the preference is worth: the queue offers them too, when their turn comes."""


def _no_time() -> float:
    return 0.0


class Scheduler:
    """The queue and the slots of one pool."""

    __slots__ = (
        "_aside",
        "_backlogs",
        "_direct",
        "_families",
        "_has_wide",
        "_kept",
        "_now",
        "_paused",
        "_share",
        "_tenants",
        "_too_wide",
        "_tracked",
        "_victims",
        "coming",
        "policy",
        "queue",
        "slots",
        "strategy",
        "supply",
        "unserved",
    )

    def __init__(
        self,
        strategy: Strategy,
        policy: Policy,
        limit: int,
        key_limits: int | Mapping[Hashable, int] | None = None,
        share: Share | None = None,
    ) -> None:
        """`share` is what the pool has of a budget of several processes; it has the queue, caps and pauses then."""
        self.strategy: Strategy = strategy
        self._aside: set[TaskRecord] = set()  # counted as queued, and not to be started yet
        self.coming: set[TaskRecord] = set()
        """Tasks that are not accepted or counted yet: they will replace others, which keep their places until then."""
        self._families = Families()
        self._has_wide = False  # was a task queued that takes several slots, since the pool was idle?
        self._kept: TaskRecord | None = None  # it is first, and free slots are kept for it until there are enough
        self.supply: Supply | None = None
        """What gives tasks all else that they need; None: they need nothing else."""
        self._too_wide: set[TaskRecord] = set()  # set aside: they take more slots than there are
        self._victims = victims_of(policy)
        self._tenants: Tenants | None = None
        self._paused = False
        self._now: Callable[[], float] = _no_time
        self._direct = share is None  # may an ended task's slot go to the next without asking anybody?
        self._share = share
        self.unserved: set[Hashable] = set() if share is None else share.unserved
        """Requirements that nothing can serve now: the tasks that have one keep their turn, and do not start."""
        self.policy: Policy = policy
        # In a shared budget a task starts with a granted slot, and that is all: tasks that still run after a lost lease
        # must not keep those from starting that were granted slots since.
        self.slots: Slots = Slots(limit if share is None else sys.maxsize)
        self.queue: Queue | SharedQueue = Queue(strategy.order, self.unserved) if share is None else share.queue
        self._backlogs = Backlogs() if self.queue.jain is None else None
        self._tracked = self._victims is not None or self._backlogs is not None
        if key_limits is not None:
            self.limit_keys(key_limits)

    # -- entering ------------------------------------------------------------------------------------------------------

    @property
    def jain(self) -> float:
        """Jain's index of fairness between keys, lately."""
        jain = self.queue.jain
        if jain is None:
            return 1.0 if self._backlogs is None else self._backlogs.rounds.index()
        return jain

    def announce(self) -> None:
        """Tell the processes that share the budget, if any do: a submitter waits for a place, or tasks can be served
        that could not."""
        if self._share is not None:
            self._share.announce()

    @property
    def limit(self) -> int:
        """How many tasks may be active at a time, in all processes that share the budget."""
        return self.slots.limit if self._share is None else self._share.settings.limit

    @property
    def is_shared(self) -> bool:
        """Do other processes share the budget?"""
        return self._share is not None

    @property
    def depth(self) -> int:
        """How many tasks are queued."""
        return len(self.queue) + len(self._aside)

    def lacks_slots(self, task: TaskRecord | None = None) -> bool:
        """Is this task, or any, first and short of the several slots that it takes?"""
        if task is not None:
            return task is self._kept or task in self._too_wide
        return self._kept is not None or bool(self._too_wide)

    @property
    def size(self) -> int:
        """How many tasks are unfinished: active, waiting and queued."""
        return self.slots.active + self.slots.waiting + self.depth

    def unfinished(self) -> Iterator[TaskRecord]:
        """Every task that holds a slot, runs without one, or is queued."""
        yield from self.slots.holders()
        yield from self.slots.without
        yield from self.queued()

    def check_slots(self, slots: int, tenant: Hashable) -> None:
        """Raise InvalidArgument for a task that takes more slots than it can ever have."""
        if self._share is not None:
            raise InvalidArgument(
                f"slots={slots} cannot be given to a pool that shares its budget: its tasks take one slot each",
                remedy="Leave slots= out, or use a pool of one process.",
            )
        limit = self._most_slots(tenant)
        if slots > limit:
            what = "max_concurrent" if limit == self.slots.limit else f"max_concurrent_per_key of {tenant!r}"
            raise InvalidArgument(
                f"slots must be at most {limit}, which is {what}, got {slots}",
                remedy="Take fewer slots, or raise that limit.",
            )

    def _has_room(self, task: TaskRecord) -> bool:
        """Are there as many slots as this task takes, and does the cap of its tenant leave as many?"""
        return self.slots.room >= self._width(task) and not self._capped(task)

    def _width(self, task: TaskRecord) -> int:
        """How many slots a task takes: not more than there may be now, for one that runs already needs no more."""
        slots = task.terms.slots
        return slots if slots == 1 else min(slots, self._most_slots(task.partition))

    def _most_slots(self, tenant: Hashable) -> int:
        """How many slots a task of this tenant could ever have."""
        cap = self.cap(tenant)
        return self.slots.limit if cap is None else min(cap, self.slots.limit)

    def why_short(self, task: TaskRecord) -> str:
        """Say in words why a task that `lacks_slots` does."""
        slots, most = task.terms.slots, self._most_slots(task.partition)
        if slots <= most:
            return f"it takes {slots} slots ({self.slots.room} free)"
        if most == self.slots.limit:
            return f"it takes {slots} slots, and max_concurrent is {most}"
        return f"it takes {slots} slots, and the cap of its tenant is {most}"

    def is_short_for(self, task: TaskRecord) -> bool:
        """Do slots lack for a queued task, or are they kept for another?"""
        return self._share is not None or self._kept is not None or self.slots.room < task.terms.slots

    def _may_return(self, task: TaskRecord) -> bool:
        """Could this task, which runs and has lent its slot, have one at once?"""
        if self._share is not None or self.slots.exhausted or self._capped(task) or not self._has_room(task):
            return False
        return all(map(self._capped, self.slots.returning))

    def full(self) -> bool:
        """Are as many tasks queued as the policy allows?"""
        bound = self.policy.max_depth
        if bound is None:
            return False
        if self._share is None or not self.policy.shared:
            return self.depth >= bound
        return self.depth + self._share.queued_elsewhere >= bound

    def answer(self, task: TaskRecord, why: str = "", retry_after: float | None = None) -> Answer:
        """What the policy says about a task that can neither start nor queue.

        Raises QueueFull or PoolBusy where the policy refuses.
        """
        policy, name = self.policy, task.owner.name
        if policy.answer == "fail":
            raise self.queue_full(
                f"{self.depth} tasks are queued in {name!r}, all that max_depth={policy.max_depth} allows", retry_after
            )
        if policy.answer == "refuse_fair" and self._floods(task):
            whose = "" if task.partition is None else f", {task.partition!r}"
            raise self.queue_full(
                f"{self.depth} tasks are queued in {name!r}, all that max_depth={policy.max_depth} allows, and no "
                f"tenant has more of them than the one that submits{whose}",
                retry_after,
            )
        if policy.answer == "busy":
            raise self.busy(f"{self._why_not(task, why)}, and the policy of {name!r} is fail_fast", retry_after)
        return policy.answer

    def _floods(self, task: TaskRecord) -> bool:
        return isinstance(self._victims, OfLargestBacklog) and self._victims.would_be(task)

    def place(self, task: TaskRecord, *, new: bool) -> Place:
        """Estimate how many queued tasks start before this one, which is queued or, if `new`, would join them now."""
        if task is self._kept:
            return Place(0.0, 0.0)
        return self.queue.place(task, new=new or task in self._aside or task in self.coming)

    def cap(self, tenant: Hashable) -> int | None:
        """How many tasks of this tenant may be active at a time; None if it has no limit of its own."""
        caps = None if self._tenants is None else self._tenants.caps
        return None if caps is None else caps.limit(tenant)

    def queue_full(self, message: str, retry_after: float | None) -> QueueFull:
        """The error for a task that finds no place in the queue."""
        return QueueFull(message, retry_after=retry_after, queued=self.depth, active=self.slots.active)

    def busy(self, message: str, retry_after: float | None) -> PoolBusy:
        """The error for a task that cannot start at once."""
        return PoolBusy(message, retry_after=retry_after, queued=self.depth, active=self.slots.active)

    def _why_not(self, task: TaskRecord, why: str) -> str:
        """Say why a task cannot start now."""
        if self.paused:
            return "the pool is paused"
        if self.is_paused(task):
            return f"the tenant {task.partition!r} is paused"
        if self.slots.exhausted:
            return f"every slot is in use ({self.slots.active} of {self.slots.limit})"
        if self._capped(task):
            return f"the key {task.partition!r} is at its cap"
        if self.exceeds_rate(task):
            return f"the tenant {task.partition!r} has started as many tasks as its rate allows"
        if task.terms.due is not None:
            return "a task with a delay cannot start at once"
        return why or "it cannot start now"

    def victim(self, newcomer: TaskRecord | None = None) -> TaskRecord:
        """The task to drop. The newcomer is queued already, and is never the one."""
        assert self._victims is not None, "only policies that drop ask"
        return self._victims.choose(newcomer)

    def enqueue(self, task: TaskRecord) -> None:
        """Queue a task until its turn comes."""
        if self.coming:
            self.coming.discard(task)
        if self._aside and task in self._aside:
            self._leave_aside(task)
        if task.terms is not PLAIN and task.terms.slots > 1:
            self._note_wide()
        self.queue.push(task)
        if self._tracked or task.parent is not None:
            self._joined(task)

    def enqueue_new(self, task: TaskRecord) -> None:
        """Do what `enqueue` does for a new task that was submitted without options, and by no other task."""
        self.queue.push(task)
        if self._tracked:
            self._joined(task)

    def requeue(self, task: TaskRecord) -> None:
        """Queue a task again whose attempt has ended, as the first of its tenant."""
        if self._aside and task in self._aside:
            self._leave_aside(task)
        self.queue.push_front(task)
        self._joined(task)

    def set_aside(self, task: TaskRecord, *, accepted: bool = True) -> None:
        """Count a task as queued and give it no turn yet: it is delayed, or not `accepted` yet.

        Where a new task takes the place of a victim, it has no place before it is accepted.
        """
        if self._victims is not None and not accepted:
            self.coming.add(task)
            return
        self.coming.discard(task)
        self._aside.add(task)
        if self._victims is not None:
            self._victims.joined(task)

    def _leave_aside(self, task: TaskRecord) -> None:
        self._aside.discard(task)
        self._too_wide.discard(task)
        if self._victims is not None:
            self._victims.left(task)

    def queued(self) -> Iterator[TaskRecord]:
        """All queued tasks, in no particular order."""
        yield from self.queue
        yield from self._aside

    def is_aside(self, task: TaskRecord) -> bool:
        """Was this task set aside, and has no turn yet?"""
        return task in self._aside

    def discard(self, task: TaskRecord) -> None:
        """Remove a task from the queue without running it."""
        if task in self.coming:
            self.coming.discard(task)
        elif task in self._aside:
            self._leave_aside(task)
        else:
            if task is self._kept:
                self._kept = None
            self.queue.remove(task)
            self._left(task, started=False)
            if self._tenants is not None and task.terms.slots > 1:
                self._tenants.wait_for(task.partition, 1)

    def _blocked(self, task: TaskRecord) -> bool:
        """Does a limit of its tenant hold up this task, or can nothing serve its requirement?"""
        if self.unserved and task.terms.need in self.unserved:
            return True
        if self._share is not None:
            return self.is_paused(task)
        return self._tenants is not None and self._tenants.is_closed(task.partition)

    def _capped(self, task: TaskRecord) -> bool:
        """Is the tenant of this task at its cap? What runs already is held up by nothing else."""
        caps = None if self._tenants is None else self._tenants.caps
        return caps is not None and not caps.has_room(task.partition, self._width(task))

    # -- needs ---------------------------------------------------------------------------------------------------------

    def check_need(self, need: Hashable) -> None:
        """Raise InvalidArgument if too many different requirements are queued already."""
        if not self.queue.has_room_for(need):
            raise InvalidArgument(
                f"tasks with {MOST_NEEDS} different combinations of tags and exclude are queued, all that a pool "
                "keeps apart",
                remedy="Use fewer combinations, wait until some have run, or make another pool.",
            )

    def keeps_apart(self, need: Hashable) -> bool:
        """Whether queued tasks may be given this requirement: at most half of the needs are made in this way."""
        return self.queue.has_room_for(need, MOST_NEEDS // 2)

    def set_need(self, task: TaskRecord, need: Hashable) -> None:
        """Give a task that asks the supply another requirement. It keeps its place in the queue."""
        terms = replace(task.terms, need=need)
        if task.turn:
            self.queue.regroup(task, terms)
        else:  # it never queued
            task.terms = terms

    def _joined(self, task: TaskRecord) -> None:
        if self._backlogs is not None and task.partition is not None:
            self._backlogs.joined(task.partition)
        if task.parent is not None:
            self._families.joined(task)
        if self._victims is not None:
            self._victims.joined(task)

    def _left(self, task: TaskRecord, *, started: bool) -> None:
        if self._backlogs is not None and task.partition is not None:
            self._backlogs.left(task.partition, started=started)
        if self._families.entered:  # not `task.parent`: that is cut off when the parent has ended
            self._families.left(task)
        if self._victims is not None:
            self._victims.left(task)

    # -- the decision --------------------------------------------------------------------------------------------------

    def next(self) -> TaskRecord | None:
        """Start the task that is next: it has its slots and what it needs, together. None: nobody can start now.

        First are running tasks that lent their slots and want them back; then queued descendants of the task that lent
        the slot that is free; then the queue, in its order, without those that nothing can serve now.
        """
        slots = self.slots
        if slots.returning:
            if (returner := self._returner()) is not None:
                return returner
            if self._keeps_for_returners():
                return None
        if self._paused:
            return None
        if self._families.entered and (heir := self._heir()) is not None:
            return heir
        while not slots.exhausted:
            kept = self._kept
            if kept is not None and self._blocked(kept):  # meanwhile, by a pause for example: others may start
                kept = self._kept = None
            task = kept or self.queue.first()
            if task is None:
                return None
            if task.terms is not PLAIN and task.terms.slots > 1 and not self._fits(task):
                if self._kept is not None:
                    return None
            elif self._supplied(task):
                self._kept = None
                self.queue.start(task)
                return self._seated(task, slots.take())
        return None

    def enter(self, task: TaskRecord) -> bool:
        """Start a new task at once, if it can. (What is queued while a slot is free cannot use that slot.)

        Not if processes share the budget: which task of all of them is next is not decided here.
        """
        slots = self.slots
        if self._share is not None or self._paused or slots.exhausted or self._blocked(task):
            return False
        if self._kept is not None or (task.terms is not PLAIN and task.terms.slots > 1 and not self._has_room(task)):
            return False
        if slots.returning and not all(map(self._capped, slots.returning)):
            return False
        if self.supply is not None and not self.supply.take(task, wait=False):
            return False
        self._occupy(task, slots.take())
        self.queue.charge(task)
        return True

    def succeed(self, task: TaskRecord) -> TaskRecord | None:
        """Give the slot of a task that has ended to the next in the queue, and return that.

        Returns None if nobody can have it now, or if it is not so simple: then `next` decides.
        """
        slot, slots = task.slot, self.slots
        if slot is None or slots.excess or not self._direct or (slots.without and (slot.lenders or slots.returning)):
            self.release(task)
            return None
        if self.supply is None:
            heir = self.queue.pop()
        else:
            while (heir := self.queue.first()) is not None and not self._supplied(heir):
                pass
            if heir is not None:
                self.queue.start(heir)
        if heir is None:
            self.release(task)
            return None
        task.slot, heir.slot, slot.holder = None, slot, heir
        if self._tracked or heir.rare is not None:
            self._left(heir, started=True)
        return heir

    def open_kept(self) -> None:
        """Note that only slots are missing for the task that free ones are kept for: its requirement can be served."""
        if self._kept is not None:
            self.unserved.discard(self._kept.terms.need)

    def _supplied(self, task: TaskRecord) -> bool:
        """Take what a task needs that is first. If it is not there, all that need the same are passed over."""
        if self.supply is None or self.supply.take(task, wait=True):
            return True
        if task.status == "queued":
            self.unserved.add(task.terms.need)
            if self._kept is task:
                self._kept = None
        if self._share is not None:
            self._share.announce()  # what was granted for it goes back
        return False

    def _heir(self) -> TaskRecord | None:
        """Start a queued descendant of a task that lent a free slot: the one that is taken next.

        Of all lent slots if free ones are kept for another task, or if they were lent to other processes otherwise.
        """
        free, share = self.slots.free, self._share
        some = free[-1:] if share is None and self._kept is None else list(free)
        for slot in some:
            if slot.lenders and (share is None or share.has_lent()) and (task := self._descendant(slot)) is not None:
                self.slots.take_this(slot)
                self.queue.take(task)
                return self._seated(task, slot)
        return None

    def _descendant(self, slot: Slot) -> TaskRecord | None:
        """A queued descendant of a task that lent this slot, with all else that it needs."""
        share = self._share
        for lender in reversed(slot.lenders):
            for task in list(islice(self._families.queued_below(lender), _LOOKED_AT)):
                if task.status != "queued" or task.terms.slots > 1 or self._blocked(task):
                    continue
                if not self._supplied(task):
                    if slot not in self.slots.free:  # it has failed, and whoever waited for it has the slot again
                        return None
                    continue
                if share is None or share.take_lent(task):
                    return task
                if self.supply is not None:
                    self.supply.give_back(task)
        return None

    def _returner(self) -> TaskRecord | None:
        """Give a running task that lent its slot one back."""
        slots = self.slots
        for task in () if slots.exhausted else slots.returning:
            if not self._capped(task):
                if slots.room < self._width(task):
                    return None
                if self._share is not None and not self._share.take_return(task):
                    continue
                del slots.returning[task]
                del slots.without[task]
                self._occupy(task, slots.take())
                return task
        return None

    def _keeps_for_returners(self) -> bool:
        """Are the free slots for a lender that wants several back? If its cap lacks them, its tenant starts nothing."""
        keeps = False
        for task in self.slots.returning:
            if not self._capped(task):
                keeps = True
            elif self._tenants is not None and task.terms.slots > 1:
                self._tenants.wait_for(task.partition, self._width(task))
        return keeps

    def _fits(self, task: TaskRecord) -> bool:
        """Are there slots for a task that takes several and is first? Otherwise it waits in one of three ways.

        If only slots are missing, nothing overtakes it: those that come free are kept for it. If it is the cap of its
        tenant, only this tenant waits. A task that takes more slots than there are waits aside.
        """
        slots = task.terms.slots
        caps = None if self._tenants is None else self._tenants.caps
        if slots > self._most_slots(task.partition):
            self._kept = None
            self.queue.remove(task)
            self._left(task, started=False)
            self._too_wide.add(task)
            self.set_aside(task)
            if self._tenants is not None:
                self._tenants.wait_for(task.partition, 1)
        elif caps is not None and self._tenants is not None and not caps.has_room(task.partition, slots):
            self._kept = None
            self._tenants.wait_for(task.partition, slots)
        elif self.slots.room >= slots:
            return True
        elif (task is not self._kept or (self.supply is not None and self.supply.rests(task))) and self._supplied(task):
            if self.supply is not None:
                self.supply.give_back(task)  # it was taken only to see whether slots are all that is missing
            self._kept = task
        return False

    def _seated(self, task: TaskRecord, slot: Slot) -> TaskRecord:
        """Give a slot to a task that was queued."""
        if self._tracked or self._families.entered:
            self._left(task, started=True)
        self._occupy(task, slot)
        return task

    # -- slots ---------------------------------------------------------------------------------------------------------

    def release(self, task: TaskRecord) -> None:
        """Take back the slot of a task that does not run any more."""
        slot = task.slot
        if slot is None:
            self._stop_lending(task)
            del self.slots.without[task]
        else:
            self._vacate(task, slot)
            self.slots.put(slot)
        if task.waits is not None:  # of parts that its body left behind: they have no say in another attempt
            for on in list(task.waits.on):
                self._forget_wait(task, task.waits, on)
            waits = Waits()
            waits.by, task.waits = task.waits.by, waits

    def vacate(self, task: TaskRecord) -> None:
        """Take back the slot of a task whose end is being written: it counts as waiting until `release`."""
        slot = task.slot
        if slot is None:
            self._stop_lending(task)
        else:
            self._vacate(task, slot)
            self.slots.without[task] = None
            self.slots.put(slot)

    def resize(self, limit: int) -> None:
        """Hand out at most so many slots from now on."""
        self.slots.resize(limit)
        if self._tenants is not None and self._tenants.caps is not None:
            for tenant in list(self._tenants.caps.wanted):  # its next task may take more slots than there are now
                self._tenants.wait_for(tenant, 1)
        self._requeue_narrow()

    def _requeue_narrow(self) -> None:
        """Queue the tasks again that took more slots than there were, and do not now."""
        for task in [task for task in self._too_wide if task.terms.slots <= self._most_slots(task.partition)]:
            self.requeue(task)

    def limit_keys(self, limits: int | Mapping[Hashable, int] | None) -> None:
        """Limit the active tasks of each tenant from now on. (The caps of a shared budget are kept elsewhere.)"""
        if limits is None and self._tenants is None:
            return
        holding = ((slot, slot.holder) for slot in self.slots.held())
        held = (task.partition for slot, task in holding if task is not None for _ in range(1 + len(slot.others)))
        caps = None if limits is None else Caps(limits, held)
        self._limited().set_caps(caps)
        self._settle_limits()
        self._requeue_narrow()

    def _limited(self) -> Tenants:
        """The limits of tenants, which are made when there is one."""
        if self._tenants is None:
            assert isinstance(self.queue, Queue), "its slots are its own"
            self._tenants = Tenants(self.queue)
        return self._tenants

    def _settle_limits(self) -> None:
        """Do without limits that are gone. The queue is put together again when it is empty: then it costs nothing."""
        self._tenants = self._tenants or None
        self._direct = not (self._share is not None or self._tenants is not None or self._paused or self._has_wide)

    def _note_wide(self) -> None:
        """Take the longer way from now on until the pool is idle: there is a task that takes several slots."""
        if not self._has_wide:
            self._has_wide = True
            self._settle_limits()

    def limit_rates(
        self,
        window_of: Callable[[Hashable], Window | None],
        woken_at: Callable[[float], object],
        now: Callable[[], float],
    ) -> None:
        """Limit how many tasks of each tenant start within some time. See `Rates`; `now` is the clock."""
        self._now = now
        self._limited().rates = Rates(window_of, woken_at)
        self._settle_limits()

    def began(self, task: TaskRecord) -> None:
        """Count the start of a task against the rate of its tenant."""
        if self._tenants is not None:
            self._tenants.began(task.partition, self._now())

    def next_at(self) -> float | None:
        """When `due` must be called."""
        rates = None if self._tenants is None else self._tenants.rates
        return None if rates is None else rates.next_at()

    def due(self, now: float) -> None:
        """Let the tenants start tasks again whose rates allow it by now."""
        if self._tenants is not None:
            self._tenants.due(now)

    def rate_opens_in(self, tenant: Hashable, ahead: float = 0.0) -> float | None:
        """Estimate in how many seconds the rate of a tenant allows a start after `ahead` others; None without rates."""
        rates = None if self._tenants is None else self._tenants.rates
        return None if rates is None else rates.opens_in(tenant, self._now(), ahead)

    @property
    def has_rates(self) -> bool:
        """Are there rates of tenants?"""
        return self._tenants is not None and self._tenants.rates is not None

    def exceeds_rate(self, task: TaskRecord) -> bool:
        """Does the rate of its tenant allow no start now?"""
        rates = None if self._tenants is None else self._tenants.rates
        return rates is not None and rates.is_closed(task.partition)

    # -- pausing -------------------------------------------------------------------------------------------------------

    @property
    def paused(self) -> bool:
        """Does no queued task start? What runs continues, and gets its slot back after a wait."""
        return self._paused if self._share is None else self._share.settings.paused

    def paused_tenants(self) -> frozenset[Hashable]:
        """The tenants whose tasks do not start; of a shared budget their tokens."""
        if self._share is not None:
            return frozenset(self._share.settings.paused_tenants)
        return frozenset() if self._tenants is None else frozenset(self._tenants.pauses.tenants)

    def is_paused(self, task: TaskRecord) -> bool:
        """Is the pool paused, or the tenant of this task?"""
        if self._share is not None:
            settings = self._share.settings
            return settings.paused or (
                bool(settings.paused_tenants) and token_of(task.partition) in settings.paused_tenants
            )
        return self._paused or (self._tenants is not None and self._tenants.pauses.is_closed(task.partition))

    def pause(self, *, paused: bool) -> bool:
        """Start no queued task from now on, or start them again. Returns whether that changed anything."""
        if self._share is not None:
            return self._share.pause(None, paused=paused)
        changed, self._paused = self._paused is not paused, paused
        self._settle_limits()
        return changed

    def pause_tenant(self, tenant: Hashable, *, paused: bool) -> bool:
        """Start no queued task of a tenant from now on, or start them again. Returns whether that changed anything."""
        if self._share is not None:
            return self._share.pause(token_of(tenant), paused=paused)
        if not paused and self._tenants is None:
            return False
        changed = self._limited().set_paused(tenant, paused)
        self._settle_limits()
        return changed

    def resume_token(self, token: str) -> None:
        """Start the queued tasks of a tenant of a shared budget again."""
        if self._share is not None:
            self._share.pause(token, paused=False)

    def has_startable(self) -> bool:
        """Of a shared budget: is a task queued that is not paused?"""
        return isinstance(self.queue, SharedQueue) and self.queue.has_startable()

    def parked(self) -> dict[str, list[Hashable]]:
        """The tenants that have tasks queued and may start none, by the limit that says so."""
        return {} if self._tenants is None else self._tenants.causes()

    def idle(self) -> None:
        """Forget what is past: nothing is queued and nothing runs."""
        self.queue.idle()
        if self._tenants is None and isinstance(self.queue, Queue):
            self.queue.set_apart(tenants=False)
        if self._has_wide:
            self._has_wide = False
            self._settle_limits()

    def _occupy(self, task: TaskRecord, slot: Slot) -> None:
        task.slot = slot
        slot.holder = task
        self.slots.active += 1
        if task.terms is not PLAIN and task.terms.slots > 1:
            self._note_wide()
            self.slots.take_others(slot, self._width(task) - 1)
        if self._tenants is not None:
            if task.terms.slots > 1:
                self._tenants.wait_for(task.partition, 1)
            self._tenants.took(task.partition, 1 + len(slot.others))
            if self._tenants.rates is not None and task.status == "queued":  # else it runs, and has waited for another
                self._tenants.chosen(task.partition, self._now())
        if self._share is not None:
            self._share.started(task)

    def _vacate(self, task: TaskRecord, slot: Slot, *, lends: bool = False) -> None:
        task.slot = slot.holder = None
        self.slots.active -= 1
        if self._tenants is not None:
            self._tenants.gave(task.partition, 1 + len(slot.others))
            if self._tenants.rates is not None and task.status == "queued":
                self._tenants.not_begun(task.partition, self._now())
        if self._share is not None:
            (self._share.lend if lends or slot.lenders else self._share.ended)(task)

    # -- waiting -------------------------------------------------------------------------------------------------------

    def begin_wait(self, task: TaskRecord, on: TaskRecord) -> bool:
        """Note that a running task waits for another, of any pool. Returns whether it lent its slot.

        Raises WaitCycle if the wait could never end.
        """
        refuse_cycle(task, on)
        waits = task.waits
        if waits is None:
            waits = task.waits = Waits()
        waits.on[on] = waits.on.get(on, 0) + 1
        others = on.waits
        if others is None:
            others = on.waits = Waits()
        others.by[task] = None
        if task.slot is None:
            self.slots.returning.pop(task, None)  # it stood to get one back, and needs none now
            return False
        self.lend(task)
        return True

    def end_wait(self, task: TaskRecord, on: TaskRecord) -> None:
        """Note that one wait of a task is over. (When the awaited task has ended, all waits for it are: see `over`.)"""
        waits = task.waits
        assert waits is not None, "it waited"
        count = waits.on.get(on, 0)
        if count > 1:
            waits.on[on] = count - 1
        elif count == 1:
            self._forget_wait(task, waits, on)

    def over(self, on: TaskRecord) -> list[TaskRecord]:
        """End all waits for a task that has ended. Returns the tasks that want their slots back now."""
        waits = on.waits
        if waits is None or not waits.by:
            return []
        waiters = list(waits.by)
        for task in waiters:
            assert task.waits is not None, "it waits"
            self._forget_wait(task, task.waits, on)
        return [task for task in waiters if self.needs_slot(task)]

    def needs_slot(self, task: TaskRecord) -> bool:
        """Does this task run, wait for no other, and hold no slot?"""
        return task.slot is None and task.status == "running" and not (task.waits is not None and task.waits.on)

    def _forget_wait(self, task: TaskRecord, waits: Waits, on: TaskRecord) -> None:
        del waits.on[on]
        if on.waits is not None:
            on.waits.by.pop(task, None)

    def lend(self, task: TaskRecord) -> None:
        """Lend the slot of a task: to its descendants first, then to anyone."""
        slot, waits = task.slot, task.waits
        if waits is None:
            waits = task.waits = Waits()
        assert slot is not None, "it holds one"
        self._vacate(task, slot, lends=True)
        self.slots.without[task] = None
        slot.lenders.append(task)
        waits.lent = slot
        self.slots.put(slot)

    def reclaim(self, task: TaskRecord) -> bool:
        """Give a slot back to a task that lent its own. False: none is free, and it will get the next one."""
        slots, share = self.slots, self._share
        self._stop_lending(task)
        if self._may_return(task) or (share is not None and share.take_lent(task)):
            del slots.without[task]
            self._occupy(task, slots.take())
            return True
        slots.returning[task] = None
        if share is not None:
            share.announce()
        return False

    def _stop_lending(self, task: TaskRecord) -> None:
        if task in self.slots.returning:
            del self.slots.returning[task]
            if self._tenants is not None and task.terms.slots > 1:
                self._tenants.wait_for(task.partition, 1)
        waits = task.waits
        if waits is not None and waits.lent is not None:
            waits.lent.lenders.remove(task)
            waits.lent = None
