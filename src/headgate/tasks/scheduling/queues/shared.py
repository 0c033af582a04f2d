"""The queue of a pool whose budget other processes share: it hands out a task only if a slot was granted for it. Pure.

It keeps the tasks of each tenant by requirement, knows which tenants were granted slots, and tells which of its tasks
should be announced to the others (`heads`). Where tenants do not count (`fifo`, `lifo`, `priority` without caps) all
tasks belong to one tenant, "".

Tenants are known by a short text, their token, because that is what stands in the shared state.
"""

from __future__ import annotations

import hashlib
import heapq
import math
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterator
from itertools import count, islice
from typing import Any, Final

from headgate.errors import InvalidArgument
from headgate.sharing.slots import FAIR, Charge, Grant, Settings, Want
from headgate.stores.codec import canonical
from headgate.tasks.model import TaskRecord
from headgate.tasks.scheduling.queues.places import MANY, Place, in_turn, mixed, stands_for
from headgate.tasks.scheduling.queues.simple import FifoQueue, LifoQueue, PriorityQueue

_INNER: dict[str, Callable[[], Any]] = {"lifo": LifoQueue, "priority": PriorityQueue}
_LONGEST: Final = 40
_LOOKED_AT: Final = 256
"""How many tenants are looked at for one that can be served. More would cost more than their turn is worth."""


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


class Tenant:
    """The queued tasks of one tenant by requirement, and its place in the order."""

    __slots__ = ("entry", "queues", "size", "tag", "token")

    def __init__(self, token: str, tag: float) -> None:
        self.token: str = token
        self.tag: float = tag
        self.queues: dict[Hashable, Any] = {}
        self.size: int = 0
        self.entry: int = 0
        """The number of its entry in the heap of tags: another one is out of date."""


class SharedQueue:
    """Tasks in the order of a strategy, of which those are handed out that were granted a slot."""

    def __init__(
        self, settings: Settings, unserved: Collection[Hashable], joined: Callable[[TaskRecord], None]
    ) -> None:
        """`joined` is called with each task that is queued: it may have to be announced."""
        self.settings: Settings = settings
        self.virtual: float = 0.0
        """Virtual time, of start-time fair queueing."""
        self.ready: dict[str, deque[Grant]] = {}
        """Slots that were granted and that no task uses yet, by tenant."""
        self.is_valid: Callable[[], bool] = lambda: True
        """May anything be started? False when the lease of this process may be over."""
        self.taken: Grant | None = None
        """The grant with which the last task was handed out."""
        self._unserved = unserved
        self._joined = joined
        self._tenants: dict[str, Tenant] = {}
        self._past: dict[str, float] = {}  # tags of tenants that have nothing queued
        self._bound = 64
        self._heap: list[tuple[float, int, Tenant]] = []
        self._entries = count(1)
        self._last_out: tuple[int, Hashable] = (0, None)  # the number and the need of the task that left last
        self._size = 0

    @property
    def _fair(self) -> bool:
        return self.settings.kind in FAIR

    def token(self, task: TaskRecord) -> str:
        """The tenant of a task, as the budget knows it."""
        return token_of(task.partition) if self.settings.by_tenant else ""

    def cost(self, task: TaskRecord) -> float:
        """What a task costs its tenant."""
        cost = task.terms.cost
        return 1.0 if cost is None or self.settings.kind != "fair_share" else float(cost)

    # -- the queue -----------------------------------------------------------------------------------------------------

    def push(self, task: TaskRecord) -> None:
        """Put a task behind the others of its tenant."""
        self._inner(task).push(task)
        self._joined(task)

    def push_front(self, task: TaskRecord) -> None:
        """Put a task before the others of its tenant."""
        self._inner(task).push_front(task)
        self._joined(task)

    def pop(self) -> TaskRecord | None:
        """Take out a task for which there is a granted slot."""
        if not self.ready or not self.is_valid():
            return None
        for token in self.ready:
            tenant = self._tenants.get(token)
            task = None if tenant is None else self._first(tenant)
            if task is not None:
                self._take_grant(token)
                self.remove(task)
                return task
        return None

    def _take_grant(self, token: str) -> None:
        grants = self.ready[token]
        self.taken = grants.popleft()
        if not grants:
            del self.ready[token]

    def put_back(self, task: TaskRecord) -> None:
        """Put a task back that was handed out and could not start."""
        if self._last_out == (task.number, task.terms.need):
            self.push_front(task)
        else:  # it is of another class than before, and may not be the first of that
            self._inner(task).insert(task, self._rank)
            self._joined(task)

    def take(self, task: TaskRecord) -> None:
        """Take out this task, to run it with a slot that somebody lends."""
        self.remove(task)

    def remove(self, task: TaskRecord) -> None:
        """Take out a task that will not run."""
        tenant = self._tenants[self.token(task)]
        queue = tenant.queues[task.terms.need]
        queue.remove(task)
        self._last_out = task.number, task.terms.need
        tenant.size -= 1
        self._size -= 1
        if not len(queue):
            del tenant.queues[task.terms.need]
        if not tenant.size:
            self._close(tenant)

    def charge(self, task: TaskRecord) -> None:
        """Do nothing: a task of a shared pool never starts without having queued."""

    def park(self, key: Hashable) -> None:
        """Never called: the caps of tenants are kept by the shared budget."""
        raise NotImplementedError("a shared budget keeps the caps of tenants")

    unpark = park

    def idle(self) -> None:
        """Do nothing: others may be busy."""

    def place(self, task: TaskRecord, *, new: bool) -> Place:
        """Among the tasks of this process: the pace at which these start is its part of the budget."""
        tenant = self._tenants.get(self.token(task))
        queue = None if tenant is None else tenant.queues.get(task.terms.need)
        own = 0.0 if queue is None else queue.place(task, new=new).ahead
        others = [one.size for one in islice(self._tenants.values(), MANY) if one is not tenant]
        each = stands_for(len(self._tenants))
        if self._fair:
            return in_turn(own, others, each, last=tenant is None)
        beside = 0 if tenant is None else tenant.size - (0 if queue is None else len(queue))
        return mixed(own, 0 if queue is None else len(queue), beside + each * sum(others), new=new)

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[TaskRecord]:
        for tenant in self._tenants.values():
            for queue in tenant.queues.values():
                yield from queue

    def _inner(self, task: TaskRecord) -> Any:
        token = self.token(task)
        tenant = self._tenants.get(token)
        if tenant is None:
            tenant = self._tenants[token] = Tenant(token, max(self.virtual, self._past.pop(token, 0.0)))
            self._list(tenant)
        queue = tenant.queues.get(task.terms.need)
        if queue is None:
            queue = tenant.queues[task.terms.need] = _INNER.get(self.settings.kind, FifoQueue)()
        tenant.size += 1
        self._size += 1
        return queue

    def _close(self, tenant: Tenant) -> None:
        del self._tenants[tenant.token]
        tenant.entry = 0
        if self._fair:
            self._past[tenant.token] = tenant.tag
            if len(self._past) > self._bound:
                self._past = {token: tag for token, tag in self._past.items() if tag > self.virtual}
                self._bound = 2 * len(self._past) + 64

    def _list(self, tenant: Tenant) -> None:
        """Enter a tenant into the heap by its tag. An older entry is dropped when it surfaces."""
        if self._fair:
            tenant.entry = next(self._entries)
            heapq.heappush(self._heap, (tenant.tag, tenant.entry, tenant))
            if len(self._heap) > 4 * len(self._tenants) + 64:
                self._heap = [(known.tag, known.entry, known) for known in self._tenants.values()]
                heapq.heapify(self._heap)

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
        if self.settings.caps is not None:
            tenants = [tenant for tenant in (self._tenants.get(token),) if tenant is not None]
        else:
            tenants = self._first_tenants(1)
        for tenant in tenants:
            task = self._first(tenant)
            waiting = len(self.ready.get(tenant.token, ()))
            if task is not None and tenant.size > waiting and task.priority >= outranks:
                cost, before = self.cost(task), tenant.tag
                if self._fair:
                    start = max(self.virtual, tenant.tag)
                    if not block_ends:  # nobody else waits: it is the first of all
                        self.virtual = start
                    self.set_tag(tenant.token, start + cost / self.settings.weight(tenant.token))
                self.grant(Grant(tenant.token, fence, cost, block_ends=block_ends))
                return Charge(tenant.token, before, cost)
        return None

    def change(self, settings: Settings) -> None:
        """Go by other settings; all tasks stay queued."""
        if settings.by_tenant == self.settings.by_tenant and settings.kind == self.settings.kind:
            self.settings = settings
            return
        tasks = sorted(self, key=lambda task: task.number)
        for task in tasks:
            self.remove(task)
        self.settings = settings
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
        tenant = self._tenants.get(token)
        if tenant is not None:
            if tenant.tag != tag:
                tenant.tag = tag
                self._list(tenant)
        elif tag > self.virtual:
            self._past[token] = tag

    def tag(self, token: str) -> float:
        """The tag of a tenant, as far as it is known here."""
        tenant = self._tenants.get(token)
        return self._past.get(token, self.virtual) if tenant is None else tenant.tag

    # -- what is announced ---------------------------------------------------------------------------------------------

    def heads(self, most: int, ahead: float, full: Collection[str] = ()) -> list[Want]:
        """The first tasks that could start if they had slots, as others are told of them.

        `ahead` is how far the clock of the store is ahead of ours. Tenants in `full` are at their caps and come last.
        """
        if not self.settings.by_tenant:
            tenant = self._tenants.get("")
            tasks = () if tenant is None else islice(self._in_order(tenant), most)
            return [Want("", 1, task.moment.now + ahead, 0.0, task.priority) for task in tasks]
        found = self._first_tenants(most + len(full))
        found.sort(key=lambda tenant: tenant.token in full)
        return [want for tenant in found[:most] if (want := self._want(tenant, ahead)) is not None]

    def _want(self, tenant: Tenant, ahead: float) -> Want | None:
        first = self._first(tenant)
        if first is None:
            return None
        tasks = sum(len(queue) for need, queue in tenant.queues.items() if need not in self._unserved)
        return Want(tenant.token, tasks, first.moment.now + ahead, tenant.tag, first.priority, self.cost(first))

    def _first_tenants(self, most: int) -> list[Tenant]:
        """The tenants that are next and can be served, in order."""
        if not self._fair:
            servable = [tenant for tenant in self._tenants.values() if self._first(tenant) is not None]
            return heapq.nsmallest(most, servable, key=self._rank_of)
        found: list[Tenant] = []
        seen: list[tuple[float, int, Tenant]] = []
        while self._heap and len(found) < most and len(seen) < most + _LOOKED_AT:
            entry = heapq.heappop(self._heap)
            _, number, tenant = entry
            if tenant.entry != number:
                continue
            seen.append(entry)
            if self._first(tenant) is not None:
                found.append(tenant)
        for entry in seen:
            heapq.heappush(self._heap, entry)
        return found

    def _rank_of(self, tenant: Tenant) -> tuple[float, float]:
        first = self._first(tenant)
        assert first is not None, "only tenants that can be served are compared"
        return self._rank(first)

    def _rank(self, task: TaskRecord) -> tuple[float, float]:
        kind, number = self.settings.kind, task.number
        if kind == "lifo":
            return (0.0, -number)
        return (-task.priority if kind == "priority" else 0.0, number)

    def _first(self, tenant: Tenant) -> TaskRecord | None:
        """The first task of a tenant that something can serve."""
        queues, unserved = tenant.queues, self._unserved
        if len(queues) == 1:
            for need, queue in queues.items():
                return None if need in unserved else queue.peek()
        firsts = [queue.peek() for need, queue in queues.items() if need not in unserved]
        return min(firsts, key=self._rank, default=None)

    def _in_order(self, tenant: Tenant) -> Iterator[TaskRecord]:
        queues = [queue for need, queue in tenant.queues.items() if need not in self._unserved]
        return iter(queues[0]) if len(queues) == 1 else heapq.merge(*queues, key=self._rank)
