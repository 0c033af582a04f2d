"""One queue for every order: fifo, lifo, priority, fair rotation, weighted shares, and levels above tenants. Pure.

Three things decide where a task stands: its level (`priority`, where the order has levels), its tenant's turn (where
tenants are served fairly), and when it joined. Tasks that agree in level, tenant and need stand in one **lane**, the
oldest first. The lanes of a level and tenant belong to one **account**, which has the tenant's turn: whatever its tasks
need, a tenant has one turn. Lanes with the same need form a **group**. While nothing can serve a need, the group is
passed over as a whole, however many tasks are in it, and afterwards every task stands where it stood. The next task is
the head of the first lane of the open groups.

How the lanes of a group are ordered:

- *Arrival* (fifo, lifo, priority): by level, then by the turn of the first task.
- *Turns* (fair round robin): by level, then the account that was served longest ago. A tenant that floods gets one turn
  a round, like everyone else, and a newcomer waits one round at most.
- *Shares* (start-time fair queueing, Goyal, Vin and Cheng 1996): by level, then by the account's *tag*, the virtual
  time at which its next task should begin. A task of cost c moves the tag by c / weight; virtual time is the tag of
  what was served last. While two tenants have tasks queued, what they got differs, divided by their weights, by at most
  ``max cost i / weight i + max cost j / weight j``, whatever the others do. A tenant that runs empty keeps its tag
  until virtual time has passed it, so work that is still running counts.

Levels are strict: a lower one may starve. Turns and tags are kept for each level.

A queued task is linked into its lane by its own `before` and `after`, so queueing makes no object, and taking one out
of the middle (a cancel, an expiry, a descendant that goes first) costs the same as taking the first. Turns without
levels keep the lanes of a group in a ring. Every other order keeps them in a heap, where serving a tenant can only move
it back: an entry that turns out to be too early when it reaches the top is put where it belongs. So a task costs
O(needs + log accounts).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from operator import attrgetter
from typing import Any, Final, Literal, NamedTuple, TypeAlias

from headgate.gate.lanes import Account, FurtherLane, Heap, HeapAccount, Lane, Level, Queued, Ring, RingAccount
from headgate.gate.rounds import Rounds, index_of

MOST_NEEDS: Final = 64
"""How many different needs a queue keeps apart."""
MANY: Final = 1_000
"""How many tenants or levels a place is computed from. Of more, these stand for the rest."""
_LEVELS: Final = 64
"""When there are more levels than these, those with nothing queued are forgotten, with what tenants have had there."""

By: TypeAlias = Literal["arrival", "turns", "shares"]


@dataclass(frozen=True, slots=True)
class Order:
    """Which task is next."""

    by: By = "arrival"
    """Whether tasks go by their arrival, tenants take turns, or tenants share by weight and cost."""
    newest_first: bool = False
    levels: bool = False
    """Does a higher priority go before every lower one?"""
    weight: Callable[[Any], float] | None = None
    """The weight of a tenant; None: they all have the same."""


class Place(NamedTuple):
    """How many tasks start before one, if no others come."""

    ahead: float
    own: float
    """How many of these are of its own tenant."""


_PARTITION: Final = attrgetter("partition")


class Queue:
    """Tasks in an order. A task is in it at most once."""

    __slots__ = (
        "_accounts",
        "_by_level",
        "_by_tenant",
        "_fair",
        "_found",
        "_group",
        "_groups",
        "_key",
        "_levels",
        "_most_levels",
        "_newest",
        "_of_tenant",
        "_others",
        "_parked",
        "_ring",
        "_serial",
        "_shares",
        "_size",
        "_takes_turns",
        "_tenant",
        "_turn",
        "_weight",
        "unserved",
    )

    def __init__(
        self,
        order: Order,
        unserved: Collection[Hashable] = (),
        tenant: Callable[[Any], Hashable] = _PARTITION,
    ) -> None:
        """`unserved` holds the needs that nothing can serve now. It is looked at here, and changed elsewhere.

        `tenant` tells whose a task is.
        """
        self.unserved: Collection[Hashable] = unserved
        self._tenant = tenant
        self._newest = order.newest_first
        self._by_level = order.levels
        self._fair = self._by_tenant = order.by != "arrival"
        self._shares = order.by == "shares"
        self._takes_turns = order.by == "turns" and not order.levels
        self._weight = order.weight
        self._accounts: dict[Hashable, Any] = {}  # RingAccount or HeapAccount: the groups are all rings or all heaps
        self._of_tenant: dict[Hashable, list[Any]] = {}  # where a tenant may have several, one for each level
        self._key = self._key_of_accounts()
        self._others: dict[Account, list[FurtherLane]] = {}  # the lanes of accounts with further needs; all have tasks
        self._groups: dict[Hashable, Ring | Heap] = {}
        self._group: Ring | Heap | None = None  # the only one
        self._ring: Ring | None = None  # the only one, if it is a ring
        self._levels: dict[int, Level] = {}
        self._most_levels = _LEVELS
        self._parked: set[Hashable] = set()
        self._found: Lane | None = None  # the lane of the task that was found to be first
        self._serial = 0  # of turns of accounts
        self._turn = 0  # of tasks
        self._size = 0

    # -- in ------------------------------------------------------------------------------------------------------------

    def push(self, task: Queued) -> None:
        """Queue a task from now on."""
        number = task.number
        if number <= self._turn:  # one that was made later has joined before it
            number = self._turn + 1
        self._turn = number
        if self._newest:
            self._join(task, -number)
            return
        account = self._accounts.get(self._key(task))
        tail = None if account is None else account.tail
        if account is None or tail is None or account.need != task.terms.need:
            self._join(task, number)
            return
        task.turn = number
        tail.after = task  # Chain.append, without the call (benchmarks/tasks.py)
        task.before = tail
        account.tail = task
        account.size += 1
        self._size += 1

    def push_front(self, task: Queued) -> None:
        """Queue a task as the next of its tenant (and level)."""
        self._turn += 1
        self._join(task, -self._turn)

    def regroup(self, task: Queued, terms: Any) -> None:
        """Give a queued task other terms, with another need. It keeps its place, and its tenant its turn."""
        if terms.need == task.terms.need:
            task.terms = terms
            return
        lane = self._lane(task)
        lane.unlink(task)
        self._size -= 1
        task.terms = terms
        self._join(task, task.turn)
        if lane.head is None:
            self._forget(lane)

    def _join(self, task: Queued, turn: int) -> None:
        """Queue a task where this turn is."""
        task.turn = turn
        lane = self._lane(task)
        head, tail = lane.head, lane.tail
        self._size += 1
        if tail is None or turn > tail.turn:
            lane.append(task)
        else:
            lane.insert(task)
        group = self._groups[lane.need]
        if head is None:
            group.lanes += 1
            if not self._is_parked(lane.account):
                group.enter(lane)
        elif not self._fair and lane.head is task and group.lists(lane):
            group.advance(lane)

    def _key_of_accounts(self) -> Callable[[Any], Hashable]:
        """What gives the key of a task's account: a function in C, where there is one (benchmarks/tasks.py)."""
        tenant = self._tenant
        if not self._by_level:
            return tenant if self._by_tenant else _no_key
        if not self._by_tenant:
            return attrgetter("priority")
        if tenant is _PARTITION:
            return attrgetter("priority", "partition")
        return lambda task: (task.priority, tenant(task))

    def _is_parked(self, account: Account) -> bool:
        return bool(self._parked) and account.tenant in self._parked

    def _lane(self, task: Queued) -> Lane:
        """The lane that a task belongs to, and its account and group: those that are missing are made."""
        need, key = task.terms.need, self._key(task)
        if need not in self._groups:
            if self._group is not None and not self._group.lanes:
                self._groups.clear()
            self._groups[need] = Ring(need) if self._takes_turns else Heap(need, fair=self._fair)
            self._note_only_group()
        account: Account | None = self._accounts.get(key)
        if account is None:
            return self._open(key, task)
        if account.need == need:
            return account
        others = self._others.setdefault(account, [])
        for lane in others:
            if lane.need == need:
                return lane
        others.append(FurtherLane(account, need))
        return others[-1]

    def lanes_of(self, account: Account) -> Iterator[Lane]:
        """The lanes of an account that have queued tasks."""
        if account.head is not None:
            yield account
        if self._others:
            yield from self._others.get(account, ())

    def _note_only_group(self) -> None:
        group = self._group = next(iter(self._groups.values())) if len(self._groups) == 1 else None
        self._ring = group if isinstance(group, Ring) else None

    def _open(self, key: Hashable, task: Queued) -> Account:
        tenant = self._tenant(task) if self._by_tenant else None
        level = self._level(task)
        kind = RingAccount if self._takes_turns else HeapAccount
        account = self._accounts[key] = kind(tenant, level, task.terms.need)
        level.accounts += 1
        if self._by_level and self._by_tenant:
            self._of_tenant.setdefault(tenant, []).append(account)
        if level.rounds is not None:
            self._serial += 1
            account.order = self._serial
            if not self._is_parked(account):
                level.rounds.opened(account)
            if self._shares:
                account.weight = self._weight_of(tenant)
                account.tag = level.first_tag(tenant)
                level.past.pop(tenant, None)
        return account

    def _weight_of(self, tenant: Hashable) -> float:
        return 1.0 if self._weight is None else self._weight(tenant)

    def _level(self, task: Queued) -> Level:
        return self._level_of(task.priority)

    def _level_of(self, priority: int) -> Level:
        rank = -priority if self._by_level else 0
        level = self._levels.get(rank)
        if level is None:
            if len(self._levels) >= self._most_levels:
                self._levels = {rank: one for rank, one in self._levels.items() if one.accounts}
                self._most_levels = 2 * len(self._levels) + _LEVELS
            level = self._levels[rank] = Level(rank, Rounds() if self._fair else None)
        return level

    # -- out -----------------------------------------------------------------------------------------------------------

    def first(self) -> Any:
        """The task that is next; None if no task can be served."""
        ring = self._ring
        lane = self._found = self._first_lane() if ring is None or self.unserved else ring.turn
        return None if lane is None else lane.head

    def _first_lane(self) -> Any:
        group = self._group
        if group is None:
            return self._first_of_all()
        if self.unserved and group.need in self.unserved:
            return None
        return group.first()

    def pop(self) -> Any:
        """Take out the task that is next; None if no task can be served."""
        ring = self._ring
        if ring is None or self.unserved:
            lane = self._first_lane()
            if lane is None:
                return None
            if self._fair:
                self._serve(lane.account, lane.head)
        else:  # `_serve`, where it is simple (benchmarks/tasks.py)
            lane = ring.turn
            if lane is None:
                return None
            account = lane.account
            self._serial += 1
            account.order = self._serial
            ring.turn = lane.following
            rounds = account.level.rounds
            if account.round <= rounds.number and rounds.pending > 1:  # Rounds.served
                account.round = rounds.number + 1
                account.got = 1.0
                rounds.pending -= 1
            else:
                rounds.served(account)
        task = lane.head
        after = task.after
        if after is None:
            self._unlink(lane, task)
            return task
        lane.head = after  # Chain.unlink
        task.after = after.before = None
        lane.size -= 1
        self._size -= 1
        return task

    def start(self, task: Queued) -> None:
        """Take out a task whose turn has come, though others may stand before it by now."""
        lane, ring = self._found, self._ring  # almost always that of `first` a moment ago (benchmarks/combined.py)
        if ring is not None and lane is ring.turn and lane is not None and lane.head is task and not self.unserved:
            self.pop()
            return
        if lane is None or lane.head is not task:
            lane = self._lane(task)
        if self._fair:
            self._serve(lane.account, task)
        self._unlink(lane, task)

    def take(self, task: Queued) -> None:
        """Take out a task to run it out of turn. Its tenant is charged for it, and keeps its turn."""
        lane = self._lane(task)
        if self._shares:
            self._serve(lane.account, task, out_of_turn=True)
        elif self._fair:
            lane.account.level.rounds.served(lane.account)
        self._unlink(lane, task)

    def remove(self, task: Queued) -> None:
        """Take out a task that will not run."""
        self._unlink(self._lane(task), task)

    def charge(self, task: Queued) -> None:
        """Count the turn of a task that starts without having queued, where tenants share by cost."""
        if not self._shares:
            return
        account = self._accounts.get(self._key(task))
        if account is not None:
            account.tag += _cost(task) / account.weight
            return
        level, tenant = self._level(task), self._tenant(task)
        start = level.first_tag(tenant)
        level.virtual = max(level.virtual, start)
        level.remember(tenant, start + _cost(task) / self._weight_of(tenant))

    def _serve(self, account: Any, task: Queued, *, out_of_turn: bool = False) -> None:
        """Give an account its turn."""
        level = account.level
        assert level.rounds is not None, "it is fair"
        amount = 1.0
        if self._shares:
            if not out_of_turn:
                # A tenant that was passed over, because nothing could serve it, has kept its turn, and claims no more.
                level.virtual = account.tag = max(account.tag, level.virtual)
            amount = _cost(task) / account.weight
            account.tag += amount
        self._serial += 1
        account.order = self._serial
        level.rounds.served(account, amount)
        if self._takes_turns:  # in a heap, a lane that has to move back is noticed when it is first
            for lane in self.lanes_of(account):
                group = self._groups[lane.need]
                if group.lists(lane):
                    group.advance(lane)

    def _unlink(self, lane: Lane, task: Queued) -> None:
        """Take a task out of its lane, and forget the lane if that was its last."""
        lane.unlink(task)
        self._size -= 1
        if lane.head is None:
            self._forget(lane)

    def _forget(self, lane: Any) -> None:
        """List a lane no longer that has no task left."""
        need, account = lane.need, lane.account
        group = self._groups[need]
        if group.lists(lane):
            group.leave(lane)
        group.lanes -= 1
        if not group.lanes and len(self._groups) > 1:
            del self._groups[need]
            self._note_only_group()
        others = self._others.get(account, ()) if self._others else ()
        if others and lane is not account:
            others.remove(lane)
        if not others:
            self._others.pop(account, None)
            if account.head is None:
                self._close(account)

    def _close(self, account: Account) -> None:
        level, tenant = account.level, account.tenant
        if not self._by_level:
            del self._accounts[tenant]
        else:
            del self._accounts[(-level.rank, tenant) if self._by_tenant else -level.rank]
        level.accounts -= 1
        if (known := self._of_tenant.get(account.tenant)) is not None:
            known.remove(account)
            if not known:
                del self._of_tenant[account.tenant]
        if level.rounds is not None and not self._is_parked(account):
            level.rounds.closed(account)
        if self._shares:
            level.remember(account.tenant, account.tag)
        account.account = None  # it referred to itself

    def _first_of_all(self) -> Lane | None:
        """The lane that is next of all groups that are open."""
        unserved, firsts = self.unserved, []
        for need, group in self._groups.items():
            if need not in unserved and (lane := group.first()) is not None:
                firsts.append(lane)
        return min(firsts, key=self._rank, default=None)

    def _rank(self, lane: Lane) -> tuple[int, float, int, int]:
        account = lane.account
        return account.level.rank, account.tag, account.order, lane.head.turn

    # -- for a queue that others share ---------------------------------------------------------------------------------

    def first_accounts(self, most: int) -> list[Account]:
        """The accounts that are next and can be served, in order. (Not where tenants take turns without tags.)"""
        lanes = [
            lane
            for need, group in self._groups.items()
            if need not in self.unserved and isinstance(group, Heap)
            for lane in group.smallest(most)
        ]
        accounts = dict.fromkeys(lane.account for lane in sorted(lanes, key=self._rank))
        return list(islice(accounts, most))

    def accounts_of(self, tenant: Hashable) -> list[Any]:
        """The accounts of a tenant, one for each level at which it has tasks queued, the first level first."""
        if self._by_level:
            return sorted(self._of_tenant.get(tenant, ()), key=lambda account: account.level.rank)
        account = self._accounts.get(tenant)
        return [] if account is None else [account]

    def priorities(self) -> list[int]:
        """The priorities at which tasks are queued, where there are levels; otherwise 0. The highest is first."""
        return [-rank for rank in sorted(self._levels) if self._levels[rank].accounts]

    def first_of(self, accounts: Iterable[Account]) -> Any:
        """The first task of the first of these accounts that something can serve."""
        for account in accounts:
            if lanes := self.open_lanes(account):
                return min((lane.head for lane in lanes), key=attrgetter("turn"))
        return None

    def tag(self, tenant: Hashable, priority: int = 0) -> float:
        """The tag of a tenant, at the level of this priority."""
        account = self._accounts.get((priority, tenant) if self._by_level else tenant)
        return self._level_of(priority).first_tag(tenant) if account is None else float(account.tag)

    def set_tag(self, tenant: Hashable, tag: float, priority: int = 0) -> None:
        """Let a tenant have this tag, at the level of this priority."""
        account = self._accounts.get((priority, tenant) if self._by_level else tenant)
        if account is None:
            level = self._level_of(priority)
            if tag > level.virtual:
                level.remember(tenant, tag)
        elif account.tag != tag:
            is_smaller, account.tag = tag < account.tag, tag
            for lane in self.lanes_of(account) if is_smaller else ():
                group = self._groups[lane.need]
                if group.lists(lane):  # else it is parked
                    group.advance(lane)

    def virtual(self, priority: int = 0) -> float:
        """Virtual time at the level of this priority."""
        return self._level_of(priority).virtual

    def move_on(self, virtual: float, priority: int = 0) -> None:
        """Let virtual time be at least this, at the level of this priority."""
        level = self._level_of(priority)
        level.virtual = max(level.virtual, virtual)

    # -- tenants and needs ---------------------------------------------------------------------------------------------

    def park(self, tenant: Hashable) -> None:
        """Pass over the tasks of this tenant until `unpark`."""
        if tenant in self._parked:
            return
        self._parked.add(tenant)
        for account in self.accounts_of(tenant):
            for lane in self.lanes_of(account):
                self._groups[lane.need].leave(lane)
            if account.level.rounds is not None:
                account.level.rounds.closed(account)

    def unpark(self, tenant: Hashable) -> None:
        """Let the tasks of this tenant take their turns again. It claims at most the one turn that it missed."""
        if tenant not in self._parked:
            return
        self._parked.discard(tenant)
        for account in self.accounts_of(tenant):
            level = account.level
            if level.rounds is not None:
                if self._shares:
                    account.tag = max(account.tag, level.virtual)
                level.rounds.opened(account)
            for lane in self.lanes_of(account):
                self._groups[lane.need].enter(lane)

    def set_apart(self, tenants: bool) -> None:
        """Keep tenants apart, so that they can be parked, or no longer. Nobody is parked. Fair orders always do."""
        if self._fair or tenants == self._by_tenant:
            return
        tasks = sorted(self, key=lambda task: task.turn)
        for task in tasks:
            self.remove(task)
        self._by_tenant = tenants
        self._key = self._key_of_accounts()
        for task in tasks:
            self._join(task, task.turn)

    def has_room_for(self, need: Hashable, most: int = MOST_NEEDS) -> bool:
        """Whether tasks with this need are kept apart already, or fewer than `most` others are."""
        return need in self._groups or len(self._groups) < most

    def idle(self) -> None:
        """Forget what tenants have had: nothing is queued and nothing runs."""
        for level in self._levels.values():
            level.past.clear()
            level.virtual = 0.0

    # -- seeing --------------------------------------------------------------------------------------------------------

    @property
    def jain(self) -> float | None:
        """Jain's index of fairness between tenants, lately; None if the order is not fair."""
        levels = (level.rounds for level in self._levels.values())
        return index_of(rounds for rounds in levels if rounds is not None) if self._fair else None

    def place(self, task: Queued, *, new: bool) -> Place:
        """Estimate how many tasks start before this one, which is queued or, if `new`, would be pushed now."""
        key, need = self._key(task), task.terms.need
        mine = self._accounts.get(key)
        turn = task.turn if not new else -self._turn - 1 if self._newest else self._turn + 1
        lanes = [] if mine is None else self.open_lanes(mine, need)
        own = float(sum(self._count(lane, task, turn, new=new) for lane in lanes))
        rank, ahead = -task.priority if self._by_level else 0, 0.0
        order = self._serial + 1 if mine is None else mine.order
        due = 0.0
        if self._shares:
            tenant = self._tenant(task)
            tag = self._level(task).first_tag(tenant) if mine is None else mine.tag
            due = tag + own * _cost(task) / (self._weight_of(tenant) if mine is None else mine.weight)
        for other in islice(self._accounts.values(), MANY):
            if other is mine or self._is_parked(other) or other.level.rank > rank:
                continue
            lanes = self.open_lanes(other, need)
            size = sum(lane.size for lane in lanes)
            if other.level.rank < rank:
                ahead += size
            elif not self._fair:
                ahead += sum(self._count(lane, None, turn, new=False) for lane in lanes)
            elif not self._shares:
                ahead += min(size, own + (other.order < order))
            elif lanes:
                ahead += min(size, max(0.0, due - other.tag) / (_cost(lanes[0].head) / other.weight))
        each = max(1.0, len(self._accounts) / MANY)
        return Place(min(own + ahead * each, max(own, self._size)), own)

    def open_lanes(self, account: Account, *needs: Hashable) -> list[Lane]:
        """The lanes of an account that can be served, and those with one of these needs."""
        return [lane for lane in self.lanes_of(account) if lane.need not in self.unserved or lane.need in needs]

    def _count(self, lane: Lane, task: Queued | None, turn: int, *, new: bool) -> float:
        """How many tasks of a lane come before this turn."""
        first, last = lane.head.turn, lane.tail.turn
        if turn > last:
            return lane.size
        if turn <= first:
            return 0.0
        if task is not None and not new and lane is self._lane(task):
            return lane.count_before(task)
        if self._size <= MANY:
            return float(sum(one.turn < turn for one in lane))
        return float(lane.size * (turn - first) / (last - first))

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Any]:
        for account in self._accounts.values():
            for lane in self.lanes_of(account):
                yield from lane


def _no_key(task: Queued) -> None:
    """All tasks have one account."""


def _cost(task: Queued) -> float:
    cost = task.terms.cost
    return 1.0 if cost is None else float(cost)
