"""The one queue, in every order, beside a line of tasks that is looked through from one end to the other."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Collection, Hashable
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from headgate.gate.lanes import Heap
from headgate.gate.queue import Order, Queue
from tests.unit.tasks.model import SCALE, TaskRecord, cost_of, record

KEYS: tuple[Hashable, ...] = ("a", "b", "c", None)
NEEDS: tuple[Hashable, ...] = (None, "gpu", ("eu", "large"))
WEIGHTS: dict[Hashable, float] = {"a": 1.0, "b": 0.3, "c": 7.0, None: 2.5}
COSTS = (None, 0.1, 1.0, 3.7, 20.0)

ORDERS: dict[str, Order] = {
    "fifo": Order(),
    "lifo": Order(newest_first=True),
    "priority": Order(levels=True),
    "turns": Order("turns"),
    "turns, levels": Order("turns", levels=True),
    "shares": Order("shares", weight=WEIGHTS.__getitem__),
    "shares, levels": Order("shares", weight=WEIGHTS.__getitem__, levels=True),
}
APART = {"fifo": False, "lifo": False, "priority": False}
CASES = [(kind, False) for kind in APART] + [(kind, True) for kind in ORDERS]
"""Orders, and whether tenants are kept apart."""


def queue_of(kind: str, unserved: Collection[Hashable] = (), *, apart: bool = True) -> Queue:
    queue = Queue(ORDERS[kind], unserved)
    queue.set_apart(tenants=apart)
    return queue


@dataclass
class Account:
    """What a tenant has had, at one level."""

    tag: float
    order: int


@dataclass
class State:
    """A line of tasks, and what tenants have had. Nothing is ever forgotten but by `idle`."""

    line: list[TaskRecord] = field(default_factory=list)
    accounts: dict[tuple[int, Hashable], Account] = field(default_factory=dict)
    past: dict[tuple[int, Hashable], float] = field(default_factory=dict)
    virtual: dict[int, float] = field(default_factory=dict)


class Model:
    """Says who is next after having looked at everybody."""

    def __init__(self, order: Order, unserved: Collection[Hashable]) -> None:
        self.order = order
        self.unserved = unserved
        self.parked: set[Hashable] = set()
        self.now = State()
        self.serial = 0

    def key(self, task: TaskRecord) -> tuple[int, Hashable]:
        fair = self.order.by != "arrival"
        return (-task.priority if self.order.levels else 0, task.partition if fair else None)

    def weight(self, tenant: Hashable) -> float:
        return 1.0 if self.order.weight is None else self.order.weight(tenant)

    def next_serial(self) -> int:
        self.serial += 1
        return self.serial

    def push(self, task: TaskRecord) -> None:
        self.join(task, 0 if self.order.newest_first else len(self.now.line))

    def push_front(self, task: TaskRecord) -> None:
        self.join(task, 0)

    def join(self, task: TaskRecord, at: int) -> None:
        now, key = self.now, self.key(task)
        if key not in now.accounts:
            now.accounts[key] = Account(self.first_tag(key), self.next_serial())
        now.line.insert(at, task)

    def first_tag(self, key: tuple[int, Hashable]) -> float:
        return max(self.now.virtual.get(key[0], 0.0), self.now.past.get(key, 0.0))

    def rank(self, task: TaskRecord) -> tuple[float, ...]:
        account = self.now.accounts[self.key(task)]
        level, place = self.key(task)[0], self.now.line.index(task)
        if self.order.by == "arrival":
            return (level, place)
        return (level, account.tag if self.order.by == "shares" else 0.0, account.order, place)

    def served_now(self) -> list[TaskRecord]:
        return [
            task for task in self.now.line if task.terms.need not in self.unserved and task.partition not in self.parked
        ]

    def first(self) -> TaskRecord | None:
        return min(self.served_now(), key=self.rank, default=None)

    def start(self, task: TaskRecord) -> None:
        self.leave(task, turn=True)

    def take(self, task: TaskRecord) -> None:
        self.leave(task, turn=False)

    def leave(self, task: TaskRecord, *, turn: bool) -> None:
        now, key = self.now, self.key(task)
        account = now.accounts[key]
        if self.order.by == "shares":
            if turn:
                now.virtual[key[0]] = account.tag = max(account.tag, now.virtual.get(key[0], 0.0))
            account.tag += cost_of(task) / self.weight(task.partition)
        if turn or self.order.by == "shares":
            account.order = self.next_serial()
        self.remove(task)

    def remove(self, task: TaskRecord) -> None:
        now, key = self.now, self.key(task)
        now.line.remove(task)
        if not any(self.key(other) == key for other in now.line):
            now.past[key] = now.accounts.pop(key).tag

    def charge(self, task: TaskRecord) -> None:
        now, key = self.now, self.key(task)
        amount = cost_of(task) / self.weight(task.partition)
        if self.order.by != "shares":
            return
        if key in now.accounts:
            now.accounts[key].tag += amount
        else:
            start = self.first_tag(key)
            now.virtual[key[0]] = max(now.virtual.get(key[0], 0.0), start)
            now.past[key] = start + amount

    def account_key(self, tenant: Hashable, priority: int) -> tuple[int, Hashable]:
        return (-priority if self.order.levels else 0, tenant)

    def tag(self, tenant: Hashable, priority: int) -> float:
        key = self.account_key(tenant, priority)
        return self.now.accounts[key].tag if key in self.now.accounts else self.first_tag(key)

    def set_tag(self, tenant: Hashable, tag: float, priority: int) -> None:
        key = self.account_key(tenant, priority)
        if key in self.now.accounts:
            self.now.accounts[key].tag = tag
        elif tag > self.now.virtual.get(key[0], 0.0):
            self.now.past[key] = tag

    def move_on(self, virtual: float, priority: int) -> None:
        rank, _ = self.account_key(None, priority)
        self.now.virtual[rank] = max(virtual, self.now.virtual.get(rank, 0.0))

    def first_keys(self) -> list[tuple[int, Hashable]]:
        """Who is next of all tenants and levels that can be served, in order."""
        return list(dict.fromkeys(self.key(task) for task in sorted(self.served_now(), key=self.rank)))

    def park(self, tenant: Hashable) -> None:
        self.parked.add(tenant)

    def unpark(self, tenant: Hashable) -> None:
        if tenant in self.parked:
            self.parked.discard(tenant)
            for key, account in self.now.accounts.items():
                if key[1] == tenant:
                    account.tag = max(account.tag, self.now.virtual.get(key[0], 0.0))

    def idle(self) -> None:
        self.now.past.clear()
        self.now.virtual.clear()


class Twin:
    """A queue and its model, under the same commands."""

    def __init__(self, kind: str, apart: bool, needs: tuple[Hashable, ...] = NEEDS) -> None:
        self.kind, self.apart, self.needs = kind, apart, needs
        self.fair = ORDERS[kind].by != "arrival"
        self.shares = ORDERS[kind].by == "shares"
        self.unserved: set[Hashable] = set()
        self.queue = queue_of(kind, self.unserved, apart=apart)
        self.model = Model(ORDERS[kind], self.unserved)
        self.out: list[TaskRecord] = []  # were in it before
        self.number = 0

    def new(self, key: Any, priority: int, cost: float | None, nth: int) -> TaskRecord:
        self.number += 1
        return record(self.number, key, priority, cost, need=self.needs[nth % len(self.needs)])

    def known(self, *choices: Any) -> TaskRecord:
        """One that was in it before, or a new one."""
        return self.out.pop(choices[-1] % len(self.out)) if self.out else self.new(*choices)

    # -- commands ------------------------------------------------------------------------------------------------------

    def push(self, *choices: Any) -> None:
        self.join("push", self.new(*choices))

    def push_again(self, *choices: Any) -> None:
        """One that was made earlier comes late: its delay was over."""
        self.join("push", self.known(*choices))

    def push_front(self, *choices: Any) -> None:
        self.join("push_front", self.known(*choices) if choices[-1] % 3 else self.new(*choices))

    def join(self, how: str, task: TaskRecord) -> None:
        getattr(self.queue, how)(task)
        getattr(self.model, how)(task)

    def first(self) -> TaskRecord | None:
        task: TaskRecord | None = self.queue.first()
        assert task is self.model.first()
        return task

    def pop(self, *_: Any) -> None:
        task = self.first()
        assert self.queue.pop() is task
        if task is not None:
            self.model.start(task)
            self.left(task)

    def start(self, *_: Any) -> None:
        """In two steps: who is next, and take it out."""
        if (task := self.first()) is not None:
            self.join("start", task)
            self.left(task)

    def start_late(self, *choices: Any) -> None:
        """One whose turn came, and others came before it since."""
        inside = [task for task in self.model.now.line if task.partition not in self.model.parked]
        if inside:
            task = inside[choices[-1] % len(inside)]
            self.join("start", task)
            self.left(task)

    def refuse(self, *_: Any) -> None:
        """Nothing serves the one that is next: it stays where it is, and nothing of this need is tried."""
        if (task := self.first()) is not None:
            self.unserved.add(task.terms.need)

    def regroup(self, *choices: Any) -> None:
        """One needs something else from now on, and stays where it is."""
        inside = self.model.now.line
        if inside:
            task, need = inside[choices[-1] % len(inside)], self.needs[choices[1] % len(self.needs)]
            self.queue.regroup(task, dataclasses.replace(task.terms, need=need))
            assert task.terms.need == need

    def take(self, *choices: Any) -> None:
        self.leave("take", choices[-1])

    def remove(self, *choices: Any) -> None:
        self.leave("remove", choices[-1])

    def leave(self, how: str, nth: int) -> None:
        inside = self.model.now.line
        if inside:
            task = inside[nth % len(inside)]
            self.join(how, task)
            self.left(task)

    def left(self, task: TaskRecord) -> None:
        assert task.before is None
        assert task.after is None
        self.out.append(task)

    def charge(self, *choices: Any) -> None:
        self.join("charge", self.new(*choices))

    def set_tag(self, key: Any, priority: int, cost: float | None, nth: int) -> None:
        """Another process has served this tenant, or says that it was charged too much."""
        if self.shares:
            tag = max(0.0, self.model.tag(key, priority) + (cost or 0.0) * (1 if nth % 2 else -1))
            self.queue.set_tag(key, tag, priority)
            self.model.set_tag(key, tag, priority)

    def move_on(self, key: Any, priority: int, *_: Any) -> None:
        """In another process time has passed until this tenant's turn."""
        if self.shares:
            virtual = self.model.tag(key, priority)
            self.queue.move_on(virtual, priority)
            self.model.move_on(virtual, priority)

    def park(self, key: Any, *_: Any) -> None:
        if self.apart:
            self.queue.park(key)
            self.model.park(key)

    def unpark(self, key: Any, *_: Any) -> None:
        if self.apart:
            self.queue.unpark(key)
            self.model.unpark(key)

    def set_apart(self, *_: Any) -> None:
        """The caps of tenants change: nobody is parked then."""
        for key in KEYS:
            self.unpark(key)
        if not self.fair:
            self.apart = not self.apart
        self.queue.set_apart(tenants=self.apart)

    def close(self, *choices: Any) -> None:
        self.unserved.add(self.needs[choices[-1] % len(self.needs)])

    def open(self, *choices: Any) -> None:
        self.unserved.discard(self.needs[choices[-1] % len(self.needs)])

    def open_all(self, *_: Any) -> None:
        self.unserved.clear()

    def idle(self, *_: Any) -> None:
        if not self.model.now.line:
            self.queue.idle()
            self.model.idle()

    # -- the same? -----------------------------------------------------------------------------------------------------

    def check(self) -> None:
        inside, expected = list(self.queue), self.model.now.line
        assert len(self.queue) == len(inside) == len(expected)
        assert set(inside) == set(expected)
        needs = {task.terms.need for task in expected}
        assert all(self.queue.has_room_for(need, 0) for need in needs)
        assert len([need for need in NEEDS if self.queue.has_room_for(need, 0)]) <= max(1, len(needs))

        if self.shares:
            self.check_shares()

    def check_shares(self) -> None:
        """What a queue tells of which other processes have a part."""
        line, levels = self.model.now.line, ORDERS[self.kind].levels
        assert self.queue.priorities() == sorted({task.priority if levels else 0 for task in line}, reverse=True)
        for priority in {0, *(task.priority for task in line)}:
            rank = -priority if levels else 0
            assert self.queue.virtual(priority) == self.model.now.virtual.get(rank, 0.0)
            for tenant in KEYS:
                assert self.queue.tag(tenant, priority) == self.model.tag(tenant, priority)
        for tenant in KEYS:
            accounts = self.queue.accounts_of(tenant)
            keys = sorted({self.model.key(task)[0] for task in line if task.partition == tenant})
            assert [account.level.rank for account in accounts] == keys
            if tenant not in self.model.parked:
                served = [task for task in self.model.served_now() if task.partition == tenant]
                assert self.queue.first_of(accounts) is min(served, key=self.model.rank, default=None)
        for most in (1, 3):
            found = [(account.level.rank, account.tenant) for account in self.queue.first_accounts(most)]
            assert found == self.model.first_keys()[:most]

    def drain(self) -> None:
        """Unpark and open all, and take out what is left: nothing stays behind."""
        for key in KEYS:
            self.unpark(key)
        self.unserved.clear()
        while self.model.now.line:
            self.pop()
            self.check()
        assert self.queue.pop() is None
        self.idle()
        assert not self.queue._accounts
        assert not self.queue._of_tenant
        assert not any(level.past or level.virtual for level in self.queue._levels.values())
        assert all(group.first() is None and not group.lanes for group in self.queue._groups.values())


COMMANDS = (
    *("push",) * 7,
    *("pop",) * 5,
    *("refuse",) * 2,
    *("push_front",) * 2,
    *("close",) * 2,
    *("open",) * 3,
    "push_again",
    "regroup",
    "start",
    "start_late",
    "take",
    "remove",
    "charge",
    "set_tag",
    "move_on",
    "park",
    "unpark",
    "unpark",
    "set_apart",
    "open_all",
    "idle",
)
CHOICES = (st.sampled_from(KEYS), st.integers(-2, 2), st.sampled_from(COSTS), st.integers(0, 11))
STEPS = st.lists(st.tuples(st.sampled_from(COMMANDS), *CHOICES), max_size=60)


@pytest.mark.parametrize("needs", [1, 3])
@pytest.mark.parametrize(("kind", "apart"), CASES)
def test_t20_t81_l01_a_queue_is_the_line_it_stands_for(kind: str, apart: bool, needs: int) -> None:
    @settings(max_examples=int(520 * SCALE**1.4), phases=[Phase.explicit, Phase.generate, Phase.shrink])
    @given(STEPS)
    def check(steps: list[tuple[Any, ...]]) -> None:
        twin = Twin(kind, apart, NEEDS[:needs])
        for command, *choices in steps:
            getattr(twin, command)(*choices)
            twin.check()
        twin.drain()

    check()


@pytest.mark.parametrize(("kind", "apart"), CASES)
def test_t20_t81_l01_and_so_it_is_after_a_long_walk(kind: str, apart: bool, scale: float) -> None:
    for seed in range(int(2 + 200 * scale**1.8)):
        chance = random.Random(f"{kind} {seed}")
        liked = chance.sample(COMMANDS, k=chance.randrange(10, len(COMMANDS)))
        twin = Twin(kind, apart, NEEDS[: chance.randint(1, 3)])
        for _ in range(300):
            command = chance.choice(liked)
            getattr(twin, command)(
                chance.choice(KEYS), chance.randint(-2, 2), chance.choice(COSTS), chance.randrange(50)
            )
            twin.check()
        twin.drain()


def entries(queue: Queue) -> int:
    """How many lanes and old places of lanes are kept."""
    return sum(len(group._entries) for group in queue._groups.values() if isinstance(group, Heap))


def test_t20_l01_a_parked_tenant_stays_parked_when_its_tag_falls() -> None:
    queue = queue_of("shares")
    for number, tenant in enumerate("aab"):
        queue.push(record(number, tenant))
    queue.pop()
    queue.park("a")
    queue.set_tag("a", 0.5)
    assert queue.pop().partition == "b"
    assert queue.pop() is None


def test_t12_priorities_that_come_and_go_leave_nothing_behind() -> None:
    queue = Queue(Order(levels=True))
    queue.push(stays := record(0))
    for number in range(1, 10_000):
        task = record(number, priority=number)
        queue.push(task)
        queue.remove(task)
        assert entries(queue) <= 80
        assert len(queue._levels) <= 2 * 64 + 2
    assert queue.pop() is stays


@pytest.mark.parametrize("kind", ["turns, levels", "shares, levels"])
def test_l01_levels_that_come_and_go_leave_nothing_behind(kind: str) -> None:
    queue = queue_of(kind)
    queue.push(stays := record(0, "a"))
    for number in range(1, 5_000):
        queue.push(record(number, "b", priority=number))
        assert queue.pop() is not stays
        assert len(queue._levels) <= 2 * 64 + 2
    assert queue.pop() is stays


@pytest.mark.parametrize("kind", ORDERS)
def test_t24_tenants_that_come_and_go_leave_nothing_behind(kind: str) -> None:
    queue = Queue(dataclasses.replace(ORDERS[kind], weight=None))
    queue.set_apart(tenants=True)
    queue.push(stays := record(0, "stays"))
    for number in range(1, 5_000):
        task = record(number, number)
        queue.push(task)
        queue.park(number)
        queue.unpark(number)
        queue.remove(task)
        assert entries(queue) <= 80
        assert all(len(level.past) <= 128 for level in queue._levels.values())  # no time has passed
    assert list(queue) == [stays]
    assert len(queue._accounts) == 1
