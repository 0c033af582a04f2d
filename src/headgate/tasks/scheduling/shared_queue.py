"""The queue of a pool whose budget other processes share: it hands out a task only if a slot was granted for it. Pure.

It knows which tenants were granted slots, and tells which of its tasks should be announced to the others (`heads`).
Where tenants do not count (`fifo`, `lifo`, `priority` without caps) all tasks belong to one tenant, "".

Tenants are known by a short text, their token, because that is what stands in the shared state.
"""

from __future__ import annotations

import hashlib
import heapq
import math
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from itertools import islice
from operator import attrgetter
from typing import Final

from headgate.errors import InvalidArgument
from headgate.gate.lanes import Account
from headgate.gate.queue import MOST_NEEDS, By, Order, Place, Queue
from headgate.sharing.slots import FAIR, Charge, Grant, Settings, Want, priority_of, tenant_of, turn_of
from headgate.stores.codec import canonical
from headgate.tasks.model import TaskRecord, Terms

_LONGEST: Final = 40


def token_of(tenant: Hashable) -> str:
    """A text that stands for a tenant in every process: itself if it is a short one.

    Raises InvalidArgument for a tenant of which no two processes could say that it is the same.
    """
    if type(tenant) is str and len(tenant) <= _LONGEST and not tenant.startswith("~"):
        return tenant
    text = canonical(tenant)
    if text is None:
        raise InvalidArgument(
            f"a tenant of a shared pool must be a value that other processes can compare, got {tenant!r}",
            remedy="Use a string or a number.",
        )
    return f"~{text}" if len(text) <= _LONGEST else f"~#{hashlib.sha256(text.encode()).hexdigest()[:20]}"


class SharedQueue:
    """Tasks in the order of a strategy, of which those are handed out that were granted a slot."""

    def __init__(
        self, settings: Settings, unserved: Collection[Hashable], joined: Callable[[TaskRecord], None]
    ) -> None:
        """`joined` is called with each task that is queued: it may have to be announced."""
        self.settings: Settings = settings
        self.ready: dict[str, deque[Grant]] = {}
        """Slots that were granted and that no task uses yet, by tenant."""
        self.is_valid: Callable[[], bool] = lambda: True
        """May anything be started? False when the lease of this process may be over."""
        self.taken: Grant | None = None
        """The grant with which the last task was handed out."""
        self._unserved = unserved
        self._joined = joined
        self._queue = self._made()

    def _made(self) -> Queue:
        """An empty queue. Where tenants share, others say what each has had: no turn is charged here."""
        kind = self.settings.kind
        by: By = "shares" if kind in FAIR else "arrival"
        levels = kind == "priority" or self.settings.levels
        order = Order(by, newest_first=kind == "lifo", levels=levels, weight=self.settings.weight)
        queue = Queue(order, self._unserved, tenant=self.token)
        queue.set_apart(tenants=self.settings.by_tenant)
        return queue

    def token(self, task: TaskRecord) -> str:
        """The tenant of a task, as the budget knows it: its turn at a level, where there are levels."""
        if not self.settings.by_tenant:
            return ""
        token = token_of(task.partition)
        return turn_of(token, task.priority) if self.settings.levels else token

    def tenant(self, token: str) -> str:
        """The tenant that has a turn, as the caps know it."""
        return tenant_of(token) if self.settings.levels else token

    def _priority(self, token: str) -> int:
        """The level of a turn."""
        return priority_of(token) if self.settings.levels else 0

    def cost(self, task: TaskRecord) -> float:
        """What a task costs its tenant."""
        cost = task.terms.cost
        return 1.0 if cost is None or self.settings.kind != "fair_share" else float(cost)

    # -- the queue -----------------------------------------------------------------------------------------------------

    def push(self, task: TaskRecord) -> None:
        """Put a task behind the others of its tenant."""
        self._queue.push(task)
        self._joined(task)

    def push_front(self, task: TaskRecord) -> None:
        """Put a task before the others of its tenant."""
        self._queue.push_front(task)
        self._joined(task)

    def first(self) -> TaskRecord | None:
        """The next task for which there is a granted slot."""
        if not self.ready or not self.is_valid() or self.settings.paused:
            return None
        for token in self.ready:
            task = None if self._is_paused(token) else self._first(token)
            if task is not None:
                return task
        return None

    def pop(self) -> TaskRecord | None:
        """Take out the next task for which there is a granted slot."""
        task = self.first()
        if task is not None:
            self.start(task)
        return task

    def start(self, task: TaskRecord) -> None:
        """Take out a task, with the slot that was granted for it."""
        self._take_grant(self.token(task))
        self._queue.remove(task)

    def _take_grant(self, token: str) -> None:
        grants = self.ready[token]
        self.taken = grants.popleft()
        if not grants:
            del self.ready[token]

    def regroup(self, task: TaskRecord, terms: Terms) -> None:
        """Give a queued task other terms, with another need. It keeps its place."""
        self._queue.regroup(task, terms)

    def take(self, task: TaskRecord) -> None:
        """Take out this task, to run it with a slot that somebody lends."""
        self._queue.remove(task)

    def remove(self, task: TaskRecord) -> None:
        """Take out a task that will not run."""
        self._queue.remove(task)

    def charge(self, task: TaskRecord) -> None:
        """Do nothing: a task of a shared pool never starts without having queued."""

    def idle(self) -> None:
        """Do nothing: others may be busy."""

    def has_room_for(self, need: Hashable, most: int = MOST_NEEDS) -> bool:
        """Whether tasks with this need are kept apart already, or fewer than `most` others are."""
        return self._queue.has_room_for(need, most)

    @property
    def jain(self) -> float | None:
        """Nothing: turns are given out elsewhere."""
        return None

    def place(self, task: TaskRecord, *, new: bool) -> Place:
        """Among the tasks of this process: the pace at which these start is its part of the budget."""
        return self._queue.place(task, new=new)

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[TaskRecord]:
        return iter(self._queue)

    def _accounts(self, token: str) -> list[Account]:
        """The accounts of a tenant, the one that is next first."""
        return self._queue.accounts_of(token) if self.settings.by_tenant else self._queue.first_accounts(1)

    def _is_paused(self, token: str) -> bool:
        """Is the tenant paused that has this turn?"""
        paused = self.settings.paused_tenants
        return bool(paused) and self.tenant(token) in paused

    def _next_accounts(self, most: int, full: Collection[str] = ()) -> list[Account]:
        """The accounts that are next. Tenants that are in `full` or paused come last."""
        last = {*full, *self.settings.paused_tenants}
        if not last:
            return self._queue.first_accounts(most)
        turns = len(self._queue.priorities()) if self.settings.levels else 1
        found = self._queue.first_accounts(most + len(last) * turns)
        found.sort(key=lambda account: self.tenant(str(account.tenant)) in last)
        return found[:most]

    def _startable(self) -> list[Account]:
        """The account that is next and not paused, if there is one."""
        if self.settings.paused:
            return []
        return [account for account in self._next_accounts(1) if not self._is_paused(str(account.tenant))]

    def has_startable(self) -> bool:
        """Is a task queued that only lacks a slot?"""
        return bool(self._startable())

    def _first(self, token: str) -> TaskRecord | None:
        """The first task of a tenant that something can serve."""
        task: TaskRecord | None = self._queue.first_of(self._accounts(token))
        return task

    @property
    def granted(self) -> int:
        """How many slots were granted that no task uses yet."""
        return sum(map(len, self.ready.values()))

    # -- what is granted -----------------------------------------------------------------------------------------------

    def grant(self, grant: Grant) -> None:
        """Have one more slot for a tenant."""
        self.ready.setdefault(grant.tenant, deque()).append(grant)

    def reuse(self, token: str, fence: int, *, block_ends: float = 0.0, outranks: float = -math.inf) -> Charge | None:
        """Give a slot that came free to the task that is next, without asking, unless `outranks` is above its priority.

        Returns what that costs, or None if there is no task for it. With caps only a task of the same tenant may have
        it: whether others may is not known here.
        """
        queue, by_tenant = self._queue, self.settings.by_tenant
        if self.settings.caps is None:
            accounts = self._startable()
        elif self.settings.paused or self._is_paused(token):
            return None
        else:
            accounts = self._accounts_of_tenant(token)
        task: TaskRecord | None = queue.first_of(accounts)
        if task is None or task.priority < outranks:
            return None
        token = self.token(task)
        mine = queue.accounts_of(token) if by_tenant else ()
        queued = sum(lane.size for one in mine for lane in queue.lanes_of(one)) if by_tenant else len(queue)
        if queued <= len(self.ready.get(token, ())):
            return None
        cost, before = self.cost(task), self._queue.tag(token, self._priority(token))
        if self.settings.kind in FAIR:
            start = max(self._queue.virtual(self._priority(token)), before)
            if not block_ends:  # nobody else waits: it is the first of all
                self._queue.move_on(start, self._priority(token))
            self.set_tag(token, start + cost / self.settings.weight(token))
        self.grant(Grant(token, fence, cost, block_ends=block_ends))
        return Charge(token, before, cost)

    def _accounts_of_tenant(self, token: str) -> list[Account]:
        """The accounts of the tenant that has this turn, at all levels."""
        if not self.settings.levels:
            return self._queue.accounts_of(token)
        turns = [turn_of(tenant_of(token), priority) for priority in self._queue.priorities()]
        return [account for turn in turns for account in self._queue.accounts_of(turn)]

    def change(self, settings: Settings) -> None:
        """Go by other settings; all tasks stay queued."""
        old = self.settings
        if (settings.by_tenant, settings.kind, settings.levels) == (old.by_tenant, old.kind, old.levels):
            self.settings = settings
            return
        tasks = sorted(self, key=lambda task: task.number)
        for task in tasks:
            self._queue.remove(task)
        self.settings = settings
        self._queue = self._made()
        for task in tasks:
            self.push(task)

    def end_blocks(self) -> None:
        """Let the granted slots that no task uses yet go to one task each."""
        for grants in self.ready.values():
            for place, grant in enumerate(grants):
                grants[place] = grant._replace(block_ends=0.0)

    def drop_ready(self) -> list[Grant]:
        """Give up the granted slots that no task uses. Returns them."""
        unused = [grant for grants in self.ready.values() for grant in grants]
        self.ready.clear()
        return unused

    def set_tag(self, token: str, tag: float) -> None:
        """Note the tag of a tenant."""
        self._queue.set_tag(token, tag, self._priority(token))

    def move_on(self, virtual: Mapping[int, float]) -> None:
        """Take over virtual time, which is told for each level."""
        for priority, time in virtual.items():
            self._queue.move_on(time, priority)

    # -- what is announced ---------------------------------------------------------------------------------------------

    def heads(self, most: int, ahead: float, full: Collection[str] = ()) -> list[Want]:
        """The first tasks that could start if they had slots, as others are told of them.

        `ahead` is how far the clock of the store is ahead of ours. Tenants in `full` are at their caps and come last.
        """
        if not self.settings.by_tenant:
            tasks = islice(self._in_order(self._queue.first_accounts(most)), most)
            return [Want("", 1, task.moment.now + ahead, 0.0, task.priority) for task in tasks]
        return [self._want(account, ahead) for account in self._next_accounts(most, full)]

    def _want(self, account: Account, ahead: float) -> Want:
        lanes = self._queue.open_lanes(account)
        first: TaskRecord = min((lane.head for lane in lanes), key=attrgetter("turn"))
        tasks = sum(lane.size for lane in lanes)
        return Want(str(account.tenant), tasks, first.moment.now + ahead, account.tag, first.priority, self.cost(first))

    def _in_order(self, accounts: list[Account]) -> Iterator[TaskRecord]:
        for account in accounts:
            yield from heapq.merge(*self._queue.open_lanes(account), key=attrgetter("turn"))
