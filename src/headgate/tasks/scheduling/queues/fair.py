"""Queues that are fair between partitions (tenants, customers, keys). Pure.

**Round robin.** A ring of the partitions that have something queued; each turn takes one task of the first and moves it
to the end. A partition that runs empty leaves the ring, and joins at the end when it comes back, as a newcomer does:
so nobody waits longer than one round, and a tenant that floods gets one turn a round like everyone else.

**Weighted, by cost** (start-time fair queueing, Goyal, Vin and Cheng 1996). Each partition has a *start tag*: the
virtual time at which its next task should begin. Taking a task of cost c moves the tag by c / weight; the smallest tag
is next; virtual time is the tag of what was taken last. While two partitions i and j both have work queued, what they
got differs, divided by their weights, by at most ``max cost i / weight i + max cost j / weight j``, whatever the others
do. A partition that runs empty keeps its tag until virtual time has passed it, so work that is still running counts.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable, Iterator
from itertools import count, islice

from headgate.tasks.fairness import Rounds
from headgate.tasks.model import TaskRecord
from headgate.tasks.scheduling.queues.places import MANY, Place, stands_for
from headgate.tasks.scheduling.queues.simple import Chain


class Partition(Chain):
    """The queued tasks of one key, its place in the ring, and its standing (see `fairness`)."""

    __slots__ = ("following", "got", "key", "preceding", "round", "since")

    def __init__(self, key: Hashable) -> None:
        super().__init__()
        self.since: int = 0
        self.round: int = 0
        self.got: float = 0.0
        self.key: Hashable = key
        self.preceding: Partition | None = None
        self.following: Partition | None = None


class FairQueue:
    """A queue in which tenants take turns, oldest task first for each."""

    __slots__ = ("_parked", "_partitions", "_size", "_turn", "rounds")

    def __init__(self) -> None:
        self.rounds: Rounds = Rounds()
        self._partitions: dict[Hashable, Partition] = {}
        self._turn: Partition | None = None  # whose turn it is; the one before it in the ring is the last
        self._parked: set[Hashable] = set()
        self._size = 0

    def push(self, task: TaskRecord) -> None:
        """Put a task behind the others of its tenant."""
        partition = self._partitions.get(task.partition)
        if partition is None:
            partition = self._open(task.partition)
        tail = partition.tail  # Chain.append, without the call: this is where every task comes through
        if tail is None:
            partition.head = task
        else:
            tail.after = task
            task.before = tail
        partition.tail = task
        partition.size += 1
        self._size += 1

    def push_front(self, task: TaskRecord) -> None:
        """Put a task before the others of its tenant, which gets no extra turn."""
        partition = self._partitions.get(task.partition)
        if partition is None:
            partition = self._open(task.partition)
        partition.prepend(task)
        self._size += 1

    def pop(self) -> TaskRecord | None:
        """Take out the first task of the tenant whose turn it is."""
        partition = self._turn
        if partition is None:
            return None
        task = partition.head
        assert task is not None, "a partition in the ring has something queued"
        after = task.after
        partition.head = after
        partition.size -= 1
        self._size -= 1
        rounds = self.rounds  # Rounds.served, without the call
        rounds.length += 1
        if partition.since < rounds.number:
            if partition.round != rounds.number:
                partition.round = rounds.number
                partition.got = 0.0
                rounds.pending -= 1
            rounds.sum += 1.0
            rounds.squares += 2 * partition.got + 1.0
            partition.got += 1.0
        if rounds.pending <= 0:
            rounds.turn()
        if after is None:
            partition.tail = None
            self._leave(partition)
            del self._partitions[partition.key]
        else:
            task.after = after.before = None
            self._turn = partition.following
        return task

    def put_back(self, task: TaskRecord) -> None:
        """Put a popped task back: its tenant has its turn again."""
        self.push_front(task)
        partition = self._partitions[task.partition]
        if partition.following is not None:
            self._leave(partition)
            self._join(partition)
            self._turn = partition

    def remove(self, task: TaskRecord) -> None:
        """Take out a task that will not run."""
        partition = self._partitions[task.partition]
        partition.unlink(task)
        self._size -= 1
        if partition.head is None:
            if partition.following is not None:
                self._leave(partition)
            del self._partitions[partition.key]

    def take(self, task: TaskRecord) -> None:
        """Take out this one; it counts as a turn of its partition in the rounds, and moves nobody in the ring."""
        self.rounds.served(self._partitions[task.partition])
        self.remove(task)

    def park(self, key: Hashable) -> None:
        """Take a tenant out of the ring."""
        self._parked.add(key)
        partition = self._partitions.get(key)
        if partition is not None and partition.following is not None:
            self._leave(partition)

    def unpark(self, key: Hashable) -> None:
        """Put a tenant back into the ring, at its end."""
        self._parked.discard(key)
        partition = self._partitions.get(key)
        if partition is not None and partition.following is None:
            self._join(partition)

    def charge(self, task: TaskRecord) -> None:
        """Do nothing: a turn that nobody else wanted costs nothing."""

    def idle(self) -> None:
        """Do nothing: a ring forgets by itself."""

    def place(self, task: TaskRecord, *, new: bool) -> Place:
        """Behind the others of its tenant, and as many tasks of each other tenant."""
        mine = self._partitions.get(task.partition)
        own = 0 if mine is None else mine.size if new else mine.before(task)
        others = [one.size for one in islice(self._partitions.values(), MANY) if one is not mine]
        turns = stands_for(len(self._partitions)) * sum(min(size, own) for size in others)
        return Place(min(own + turns + self._before(mine, own), max(own, self._size)), own)

    def _before(self, partition: Partition | None, tasks: int) -> int:
        """How many tenants with more queued tasks than this have their turns before this one."""
        found, one = 0, self._turn
        for _ in range(MANY):
            if one is None or one is partition:
                break
            found, one = found + (one.size > tasks), one.following
            if one is self._turn:  # it is not in the ring
                break
        return found

    def _open(self, key: Hashable) -> Partition:
        partition = self._partitions[key] = Partition(key)
        if key not in self._parked:
            self._join(partition)
        return partition

    def _join(self, partition: Partition) -> None:
        self.rounds.opened(partition)  # one that is parked takes no part in the rounds
        turn = self._turn
        if turn is None:
            self._turn = partition.preceding = partition.following = partition
            return
        last = turn.preceding
        assert last is not None, "a ring is closed"
        partition.preceding, partition.following = last, turn
        last.following = turn.preceding = partition

    def _leave(self, partition: Partition) -> None:
        preceding, following = partition.preceding, partition.following
        assert preceding is not None and following is not None, "it is in the ring"  # noqa: PT018
        if following is partition:
            self._turn = None
        else:
            preceding.following, following.preceding = following, preceding
            if self._turn is partition:
                self._turn = following
        partition.preceding = partition.following = None
        self.rounds.closed(partition)

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[TaskRecord]:
        for partition in self._partitions.values():
            yield from partition


class Account(Chain):
    """The queued tasks of one key, how much it has had, and its standing (see `fairness`)."""

    __slots__ = ("entry", "got", "key", "round", "since", "start", "weight")

    def __init__(self, key: Hashable, start: float, weight: float) -> None:
        super().__init__()
        self.since: int = 0
        self.round: int = 0
        self.got: float = 0.0
        self.key: Hashable = key
        self.start: float = start
        self.weight: float = weight
        self.entry: int = 0
        """The number of its entry in the heap: another one is out of date. 0: it is parked."""


class ShareQueue:
    """A queue in which the tenant that has had least for its weight is next, oldest task first for each."""

    __slots__ = (
        "_accounts",
        "_bound",
        "_entries",
        "_heap",
        "_parked",
        "_past",
        "_size",
        "_undo",
        "_virtual",
        "_weight",
        "rounds",
    )

    def __init__(self, weight: Callable[[Hashable], float]) -> None:
        self.rounds: Rounds = Rounds()
        self._weight = weight
        self._accounts: dict[Hashable, Account] = {}
        self._past: dict[Hashable, float] = {}  # tags of partitions that ran empty
        self._heap: list[tuple[float, int, Account]] = []
        self._entries = count(1)
        self._parked: set[Hashable] = set()
        self._virtual = 0.0
        self._undo: tuple[int, float] = (0, 0.0)  # the number of the last that was popped, and its tag
        self._bound = 64
        self._size = 0

    def push(self, task: TaskRecord) -> None:
        """Put a task behind the others of its tenant."""
        self._account(task).append(task)
        self._size += 1

    def push_front(self, task: TaskRecord) -> None:
        """Put a task before the others of its tenant."""
        self._account(task).prepend(task)
        self._size += 1

    def pop(self) -> TaskRecord | None:
        """Take out the first task of the tenant with the smallest tag."""
        heap = self._heap
        while heap:
            start, entry, account = heap[0]
            if account.entry != entry:
                heapq.heappop(heap)
                continue
            task = account.head
            assert task is not None, "a partition in the heap has something queued"
            self._undo = task.number, start
            self._virtual = start
            self._charge(account, task)
            return task
        return None

    def put_back(self, task: TaskRecord) -> None:
        """Put a popped task back: its tenant has its tag again."""
        account = self._account(task)
        popped, start = self._undo
        if popped == task.number:  # and no sum of floats that may differ in its last digit
            account.start = start
        account.prepend(task)
        self._size += 1
        if account.entry:
            self._list(account, first=True)

    def take(self, task: TaskRecord) -> None:
        """Take out this one, and charge it: it runs as the others do."""
        account = self._accounts[task.partition]
        self._undo = task.number, account.start
        self._charge(account, task)

    def inherit(self, virtual: float, tags: dict[Hashable, float]) -> None:
        """Go on with what each tenant has had in another queue."""
        self._virtual, self._past = virtual, dict(tags)

    def accounts(self) -> tuple[float, dict[Hashable, float]]:
        """Return virtual time, and the tag of each tenant."""
        return self._virtual, {**self._past, **{key: account.start for key, account in self._accounts.items()}}

    def charge(self, task: TaskRecord) -> None:
        """Charge a task that starts without having queued: it counts all the same."""
        account = self._accounts.get(task.partition)
        if account is None:
            account = Account(task.partition, self._tag(task.partition), self._weight(task.partition))
            self._virtual = max(self._virtual, account.start)
            self._past[account.key] = account.start + _cost(task) / account.weight
            self._forget()
        else:
            account.start += _cost(task) / account.weight
            if account.entry:
                self._list(account)

    def remove(self, task: TaskRecord) -> None:
        """Take out a task that will not run; nothing is charged."""
        account = self._accounts[task.partition]
        account.unlink(task)
        self._size -= 1
        if account.head is None:
            self._close(account)

    def park(self, key: Hashable) -> None:
        """Pass over a tenant: its entry in the heap is out of date from now on."""
        self._parked.add(key)
        account = self._accounts.get(key)
        if account is not None and account.entry:
            account.entry = 0
            self.rounds.closed(account)

    def unpark(self, key: Hashable) -> None:
        """Put a tenant back where its tag belongs, with no claim on the time it was parked."""
        self._parked.discard(key)
        account = self._accounts.get(key)
        if account is not None and not account.entry:
            account.start = max(account.start, self._virtual)
            self.rounds.opened(account)
            self._list(account)

    def idle(self) -> None:
        """Let every tenant begin anew: the busy period is over."""
        self._past.clear()
        self._heap.clear()
        self._undo = (0, 0.0)
        self._virtual = 0.0

    def place(self, task: TaskRecord, *, new: bool) -> Place:
        """Behind the others of its tenant, and what each other tenant is due until then."""
        key = task.partition
        mine = self._accounts.get(key)
        weight = self._weight(key) if mine is None else mine.weight
        own = 0 if mine is None else mine.size if new else mine.before(task)
        due = (self._tag(key) if mine is None else mine.start) + own * _cost(task) / weight
        others = [one for one in islice(self._accounts.values(), MANY) if one is not mine and one.head is not None]
        ahead = sum(min(one.size, max(0.0, due - one.start) / _step(one)) for one in others)
        return Place(own + ahead * stands_for(len(self._accounts)), own)

    def _account(self, task: TaskRecord) -> Account:
        key = task.partition
        account = self._accounts.get(key)
        if account is None:
            account = Account(key, self._tag(key), self._weight(key))
            self._past.pop(key, None)
            self._accounts[key] = account
            if key not in self._parked:
                self.rounds.opened(account)
                self._list(account)
        return account

    def _tag(self, key: Hashable) -> float:
        return max(self._virtual, self._past.get(key, 0.0))

    def _charge(self, account: Account, task: TaskRecord) -> None:
        amount = _cost(task) / account.weight
        account.start += amount
        self.rounds.served(account, amount)
        account.unlink(task)
        self._size -= 1
        if account.head is None:
            self._close(account)
        elif account.entry:
            self._list(account)

    def _list(self, account: Account, *, first: bool = False) -> None:
        """Enter a tenant into the heap, by its tag (`first` of equals). An older entry is dropped when it surfaces."""
        account.entry = -next(self._entries) if first else next(self._entries)
        heapq.heappush(self._heap, (account.start, account.entry, account))
        if len(self._heap) > 4 * len(self._accounts) + 64:
            self._heap = [(known.start, known.entry, known) for known in self._accounts.values() if known.entry]
            heapq.heapify(self._heap)

    def _close(self, account: Account) -> None:
        if account.entry:
            account.entry = 0
            self.rounds.closed(account)
        del self._accounts[account.key]
        self._past[account.key] = account.start
        self._forget()

    def _forget(self) -> None:
        """Drop tags that virtual time has passed. Looked for when there are twice as many as the last time."""
        if len(self._past) > self._bound:
            self._past = {key: start for key, start in self._past.items() if start > self._virtual}
            self._bound = 2 * len(self._past) + 64

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[TaskRecord]:
        for account in self._accounts.values():
            yield from account


def _step(account: Account) -> float:
    """How far the tag of a tenant moves with its next task."""
    assert account.head is not None, "it has something queued"
    return _cost(account.head) / account.weight


def _cost(task: TaskRecord) -> float:
    cost = task.terms.cost
    return 1.0 if cost is None else float(cost)
