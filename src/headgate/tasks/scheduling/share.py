"""What one pool has of a budget that other processes share, and its side of the exchange. Pure.

The scheduler tells it which tasks use slots; `message` says what the others are to know, and `take` takes in the answer
(see `sharing/slots.py`). A slot that comes free is given back with the next message, unless nobody else
waits: then it goes to the next task here at once. If none is queued here and this pool is the only member, the slot
is kept for a moment: tasks that are submitted one after the other need no exchange then. Nobody is there who could miss
it, and this pool is woken when somebody joins. Grants that come to nothing (the task was cancelled, no resource is
there for it) go back with the next message too, and nobody pays for them.

A slot may also go to the next tasks here for `BLOCK` seconds after it was granted: see "Blocks" there.

A lent slot is kept until the next message, for descendants of the lender that are queued here; then it goes back. A
lender that wants a slot again is announced before all that only queue.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Final

from headgate.sharing.slots import FAIR, MOST_WANTS, Charge, MemberView, Said, Settings, Told, Want
from headgate.sharing.states import ClockOffset
from headgate.tasks.model import TaskRecord
from headgate.tasks.scheduling.shared_queue import SharedQueue

BLOCK: Final = 0.005
"""Seconds for which a granted slot goes from task to task without asking."""
_SPARE: Final = 2
"""How many more entries are announced than there are slots: what is granted meanwhile does not leave it empty."""


class Share:
    """The part of one pool in a shared budget."""

    def __init__(
        self,
        settings: Settings,
        changed: Callable[[], None],
        *,
        fencing: bool = False,
        kept: Callable[[], None] | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        """`changed` is called, possibly many times, when a message should be sent soon.

        `kept` is called when a slot is kept that no task uses: a message should be sent if that lasts. Without it none
        is kept. `clock` gives the time of `message` and `take`; without it there are no blocks.
        """
        self.unserved: set[Hashable] = set()
        """Requirements that nothing can serve now: tasks that have one are not announced."""
        self.queue: SharedQueue = SharedQueue(settings, self.unserved, self._on_joined)
        self.alone: bool = False
        """Does nobody else wait? Then freed slots are used again without asking."""
        self.me: str = ""
        """The name under which this pool takes part; "" before it does."""
        self.members: tuple[MemberView, ...] = ()
        """All members, as the newest answer told."""
        self.fences: dict[TaskRecord, int] = {}
        """The numbers of the grants of running tasks, if they are asked for."""
        self.has_returning: Callable[[], bool] = lambda: False
        """Does a lender here want its slot back? Then freed slots are for it, and are asked for."""
        self._fencing = fencing
        self._counted = False  # must some member know how many tasks are queued here?
        self._changed = changed
        self._on_kept = kept
        self.kept: int = 0
        """Slots that no task uses, for tasks that are submitted soon. They go back with the next message."""
        self._in_use: dict[TaskRecord, str] = {}  # tasks that use slots, and their tenants
        self._outside: set[TaskRecord] = set()  # started before the lease was lost: nobody counts them any more
        self._lent: list[str] = []  # lent slots that may still go to descendants of the lenders
        self._returns: list[str] = []  # slots granted to lenders
        self._refunds: list[tuple[str, float]] = []
        self._clock = None if fencing else clock
        self._block_ends: dict[TaskRecord, float] = {}  # of tasks whose slot was granted a short time ago
        self._charges: dict[str, Charge] = {}  # what was started within blocks, by tenant
        self._outranks = -math.inf
        self._seq = 0
        self._seen = 0
        self._ahead: float | None = None  # how far the clock of the store is ahead of ours
        self._full: frozenset[str] = frozenset()
        self._least: int | None = None  # the lowest announced priority, if as many tasks are announced as may be
        self._limit: tuple[int] | None = None  # to be set for all, until an answer says that it is
        self._caps: tuple[int | Mapping[str, int] | None] | None = None  # likewise
        self._pauses: dict[str | None, bool] = {}  # likewise
        self._told: tuple[object, object, dict[str | None, bool]] = (None, None, {})  # what the newest message had

    @property
    def settings(self) -> Settings:
        """What all members have in common."""
        return self.queue.settings

    @property
    def held(self) -> int:
        """How many slots this pool uses."""
        return len(self._in_use)

    @property
    def queued_elsewhere(self) -> int:
        """How many tasks are queued in the other pools, as the newest answer told."""
        return sum(view.queued for view in self.members if view.id != self.me)

    def _on_joined(self, task: TaskRecord) -> None:
        """Have the others told of a task that is queued now, unless that can make no difference yet."""
        settings = self.settings
        if self._counted:
            self._changed()
            return
        if self.kept and self._may_reuse() and self.queue.reuse("", self._seen) is not None:
            self.kept -= 1
            return
        if self.alone and not self._fencing and self.held >= settings.limit:
            return  # nobody waits to hear of it, and no slot is free
        least, kind = self._least, settings.kind
        if least is not None and kind != "lifo" and (kind != "priority" or task.priority <= least):
            return  # those that are announced come before it; when one of them is granted a slot, it is announced
        self._changed()

    # -- what the scheduler tells --------------------------------------------------------------------------------------

    def started(self, task: TaskRecord) -> None:
        """Note that a task uses a slot now."""
        self._in_use[task] = self.queue.token(task)
        taken = self.queue.taken
        if taken is not None:
            if self._fencing:
                self.fences[task] = taken.fence
            elif taken.block_ends:
                self._block_ends[task] = taken.block_ends
                self.queue.taken = None

    def ended(self, task: TaskRecord) -> None:
        """Note that a task uses its slot no longer. The slot may go to another task here at once."""
        block_ends = self._block_ends.pop(task, 0.0)
        token = self._stop(task)
        if token is None:
            self._changed()  # there is room here now, see `_wants`
            return
        if self.has_returning():
            self._changed()
            return
        if self._may_reuse():
            if self.queue.reuse(token, self._seen) is not None:
                return
        elif block_ends and self._reused_in_block(token, block_ends):
            return
        if self._on_kept is not None and self._may_keep():
            self.kept += 1
            self._on_kept()
        else:
            self._changed()

    def _reused_in_block(self, token: str, block_ends: float) -> bool:
        """Give a slot to the next task here if its block is not over. What that costs is said afterwards."""
        if self._clock is None or self._clock() >= block_ends or self._counted:
            return False
        reused = self.queue.reuse(token, self._seen, block_ends=block_ends, outranks=self._outranks)
        if reused is None:
            return False
        known = self._charges.get(reused.tenant)
        if known is not None:
            reused = known._replace(cost=known.cost + reused.cost)
        self._charges[reused.tenant] = reused
        return True

    def end_blocks(self) -> None:
        """Ask before any slot is used again: the store does not answer, or the limits have changed."""
        self._block_ends.clear()
        self.queue.end_blocks()

    def _may_keep(self) -> bool:
        """May a slot that came free wait for a task that is submitted soon? Only if there is no other member.

        With caps it might not be for the tenant that comes.
        """
        return self._may_reuse() and len(self.members) == 1 and self.settings.caps is None

    def _may_reuse(self) -> bool:
        """May a slot that came free be used again without asking?"""
        return self.alone and not self._fencing and self.held + self.queue.granted < self.settings.limit

    def lend(self, task: TaskRecord) -> None:
        """Note that a slot may go to a descendant of the task that lends it."""
        token = self._stop(task)
        if token is not None:
            self._lent.append(token)
            self._changed()

    def take_lent(self, task: TaskRecord) -> bool:
        """Use a lent slot for a descendant, or for the lender itself. Returns False if there is none for this task.

        With caps it must be of the same tenant: whether another tenant may have one more is not known here.
        """
        return self._take(self._lent, task)

    def has_lent(self) -> bool:
        """Is there a lent slot that nobody uses?"""
        return bool(self._lent)

    def take_return(self, task: TaskRecord) -> bool:
        """Use a slot that was granted to a lender of the tenant of this task. Returns False if there is none."""
        return self._take(self._returns, task)

    def _take(self, slots: list[str], task: TaskRecord) -> bool:
        token, queue = self.queue.token(task), self.queue
        if not slots or not queue.is_valid():
            return False
        fitting = [slot for slot in slots if slot == token] or [
            slot for slot in slots if self.settings.caps is None or queue.tenant(slot) == queue.tenant(token)
        ]
        if fitting:
            slots.remove(fitting[-1])
        return bool(fitting)

    def announce(self) -> None:
        """Have the others told soon: a lender wants a slot again, a submitter waits for a place, or tasks can be served
        that could not."""
        self._changed()

    def _stop(self, task: TaskRecord) -> str | None:
        self.fences.pop(task, None)
        self._block_ends.pop(task, None)
        if task in self._outside:
            self._outside.discard(task)
            return None
        return self._in_use.pop(task)

    def has_unused(self) -> bool:
        """Was something granted that no task uses? It goes back with the next message."""
        return bool(self.queue.ready or self._lent or self._returns or (self.kept and not self._may_keep()))

    # -- the exchange --------------------------------------------------------------------------------------------------

    def resize(self, limit: int) -> None:
        """Ask for another limit, for all members."""
        self._limit = (limit,)
        self._changed()

    def limit_tenants(self, caps: int | Mapping[str, int] | None) -> None:
        """Ask for other caps, for all members."""
        self._caps = (caps,)
        self._changed()

    def pause(self, tenant: str | None, *, paused: bool) -> bool:
        """Pause or resume a tenant, or the budget (None), for all members. Returns whether that changed anything.

        Here it holds at once.
        """
        settings = self.settings.with_pauses({tenant: paused})
        is_new = settings != self.settings
        self._pauses = {**self._pauses, tenant: paused}
        self._adopt(settings)
        self._changed()  # also if nothing changes here: another member may be changing it just now
        return is_new

    def message(
        self,
        now: float,
        origin: tuple[str, int],
        returning: Iterable[TaskRecord],
        *,
        counts: bool = False,
        blocked: bool = False,
        leaves: bool = False,
    ) -> Said:
        """What the others are to know now. What was granted and is not used is given back.

        `now` is the local clock, `origin` host and process, `returning` are the lenders that want a slot again.
        """
        self._refunds += [(grant.tenant, grant.cost) for grant in self.queue.drop_ready()]
        self._lent.clear()
        self._returns.clear()
        self.kept = 0
        refunds, self._refunds = self._refunds, []
        charges, self._charges = list(self._charges.values()), {}
        if self.settings.kind not in FAIR:
            refunds, charges = [], []
        wants = [] if leaves else self._wants(now, returning)
        self._seq += 1
        limit, caps, pauses = self._told = (self._limit, self._caps, self._pauses)
        return Said(
            self._seq,
            self.settings,
            Counter(self._in_use.values()),
            wants,
            len(self.queue),
            counts,
            blocked,
            refunds,
            charges,
            self._seen,
            *origin,
            None if limit is None else limit[0],
            None if caps is None else caps[0],
            caps is not None,
            pauses,
        )

    def _wants(self, now: float, returning: Iterable[TaskRecord]) -> list[Want]:
        if not self.queue.is_valid():  # it could start nothing, and would ask again at once
            return []
        most = min(MOST_WANTS, self.settings.limit + _SPARE)
        ahead = self._ahead or 0.0
        lenders = Counter(self.queue.token(task) for task in returning)
        wants = [Want(token, tasks, now + ahead, returning=True) for token, tasks in lenders.items()]
        heads = self.queue.heads(most, ahead, self._full)  # paused ones too: they start as soon as they may
        self._least = min(want.priority for want in heads) if len(heads) == most else None
        wants += heads
        if self._outside:  # these still run here although nobody counts them: there is no room for more
            wants = _first_of(wants, self.settings.limit - len(self._in_use) - len(self._outside))
        return wants[:MOST_WANTS]

    def take(self, told: Told, offset: ClockOffset, now: float) -> None:
        """Take in what this pool was told."""
        queue = self.queue
        self.me = told.me
        told_limit, told_caps, told_pauses = self._told
        self._pauses = {who: paused for who, paused in self._pauses.items() if told_pauses.get(who) is not paused}
        self._adopt(told.settings.with_pauses(self._pauses))
        self._limit = None if self._limit is told_limit else self._limit
        self._caps = None if self._caps is told_caps else self._caps
        self._ahead = self._ahead_by(offset)
        self._seen = max(self._seen, told.seen)
        self._full, self.members, self._outranks = told.full, told.members, told.outranks
        self.alone, self._counted = told.alone, told.counts
        for tenant, tag in told.recent:
            queue.set_tag(tenant, tag)
        queue.move_on(told.virtual)
        for grant in told.grants:
            if grant.returning:
                self._returns.append(grant.tenant)
            elif self._clock is not None:
                queue.grant(grant._replace(block_ends=now + BLOCK))
            else:
                queue.grant(grant)

    def _ahead_by(self, offset: ClockOffset) -> float:
        """How far the clock of the store is ahead, as far as the newest exchange tells.

        Each exchange gives two bounds, and what is believed moves only as far as they force it to: so one slow answer
        does not put the tasks of this process before or behind those of others, and clocks that drift are followed all
        the same.
        """
        least, most = offset
        believed = (least + most) / 2 if self._ahead is None else self._ahead
        return min(max(believed, least), most)

    def _adopt(self, settings: Settings) -> None:
        """Go by the settings that all members have."""
        before = self.queue.settings
        if settings != before:
            self.queue.change(settings)
            self.end_blocks()
            self._in_use = {task: self.queue.token(task) for task in self._in_use}
            if (settings.paused, settings.paused_tenants) != (before.paused, before.paused_tenants):
                self._changed()  # other tasks are next now

    def contended(self) -> None:
        """Ask before a slot is used again: somebody else may wait."""
        self.alone = False

    def lose(self, running: Iterable[TaskRecord]) -> None:
        """Begin anew: what this pool held belongs to others. What still runs is counted by nobody."""
        self._outside.update(running)
        self._in_use.clear()
        self.queue.drop_ready()
        self._lent.clear()
        self._returns.clear()
        self._refunds.clear()
        self._charges.clear()
        self.end_blocks()
        self.kept = 0
        self.me, self._seen, self.alone, self._least = "", 0, False, None


def _first_of(wants: Iterable[Want], room: int) -> list[Want]:
    """The first of these entries, with so many tasks together."""
    first: list[Want] = []
    for want in wants:
        if room > 0:
            first.append(want._replace(tasks=min(want.tasks, room)))
            room -= want.tasks
    return first
