"""W50: how many calls of one client, and of all, execute at a time: the queue alone."""

from __future__ import annotations

import random
from collections import defaultdict, deque

from headgate.workers.server.concurrency import Concurrency


def begun(limits: Concurrency[str]) -> list[str]:
    """Everything that may begin now."""
    found = []
    while (item := limits.next()) is not None:
        found.append(item)
    return found


def filled(limits: Concurrency[str], **clients: int) -> Concurrency[str]:
    for client, count in clients.items():
        for number in range(count):
            limits.add(client, number, f"{client}{number}")
    return limits


def test_w50_calls_of_one_client_begin_in_order_up_to_its_limit() -> None:
    limits = filled(Concurrency(2), a=5)
    assert begun(limits) == ["a0", "a1"]
    assert (limits.executing, limits.waiting, limits.ready) == (2, 3, False)
    limits.ends("a")
    assert limits.ready
    assert begun(limits) == ["a2"]
    limits.ends("a")
    limits.ends("a")
    assert begun(limits) == ["a3", "a4"]
    assert (limits.executing, limits.waiting) == (2, 0)


def test_w50_the_limit_of_one_client_does_not_keep_another_from_beginning() -> None:
    limits = filled(Concurrency(1), a=3, b=2)
    assert begun(limits) == ["a0", "b0"]
    limits.ends("b")
    assert begun(limits) == ["b1"]


def test_w50_with_a_total_limit_clients_take_turns() -> None:
    limits = filled(Concurrency(None, 2), a=4, b=2, c=1)
    assert begun(limits) == ["a0", "b0"]
    order = []
    while limits.waiting:
        limits.ends("a" if not order else order[-1][0])
        order += begun(limits)
    assert order == ["c0", "a1", "b1", "a2", "a3"]


def test_w50_both_limits_hold_together() -> None:
    limits = filled(Concurrency(2, 3), a=5, b=5)
    assert begun(limits) == ["a0", "b0", "a1"]
    limits.ends("a")
    assert begun(limits) == ["b1"], "it is the turn of the other"
    limits.ends("a")
    assert begun(limits) == ["a2"]


def test_w50_a_call_that_waits_for_another_gives_its_place_away_and_continues_without_asking() -> None:
    limits = filled(Concurrency(1), a=2)
    assert begun(limits) == ["a0"]
    limits.ends("a")  # it waits for what it called
    assert begun(limits) == ["a1"]
    limits.begins("a")  # and goes on
    limits.add("a", 2, "a2")
    assert begun(limits) == []
    limits.ends("a")
    assert begun(limits) == [], "there is still one"
    limits.ends("a")
    assert begun(limits) == ["a2"]


def test_w50_who_does_not_wait_passes_only_where_nobody_waits() -> None:
    limits: Concurrency[str] = Concurrency(2, 3)
    assert limits.enter("a")
    assert limits.enter("a")
    assert not limits.enter("a")
    limits.add("b", 0, "b0")
    assert not limits.enter("b"), "another was there before"
    assert begun(limits) == ["b0"]
    assert not limits.enter("b"), "there are as many as there may be"
    limits.ends("a")
    assert limits.enter("b")


def test_w50_what_is_withdrawn_never_begins_and_leaves_nothing() -> None:
    limits = filled(Concurrency(1), a=3)
    assert begun(limits) == ["a0"]
    assert limits.withdraw("a", 1) == "a1"
    assert limits.withdraw("a", 1) is None
    assert limits.withdraw("b", 1) is None
    assert limits.items() == [("a", 2, "a2")]
    assert limits.withdraw("a", 2) == "a2"
    limits.ends("a")
    assert begun(limits) == []
    assert (limits.executing, limits.waiting, limits.ready) == (0, 0, False)


class Naive:
    """The same, with lists and counting."""

    def __init__(self, per_client: int | None, total: int | None) -> None:
        self.per_client, self.total = per_client, total
        self.queues: dict[str, deque[int]] = defaultdict(deque)
        self.executing: dict[str, int] = defaultdict(int)

    def has_room(self, client: str) -> bool:
        return self.per_client is None or self.executing[client] < self.per_client

    def may_begin(self) -> set[int]:
        if self.total is not None and sum(self.executing.values()) >= self.total:
            return set()
        return {queue[0] for client, queue in self.queues.items() if queue and self.has_room(client)}


def test_w50_whatever_happens_the_limits_hold_and_nothing_that_may_begin_waits(scale: float) -> None:
    for seed in range(max(20, int(400 * scale))):
        chance = random.Random(seed)
        per_client, total = chance.choice([None, 1, 2, 3]), chance.choice([None, 1, 2, 5])
        limits: Concurrency[int] = Concurrency(per_client, total)
        naive = Naive(per_client, total)
        clients = "abc"[: chance.randint(1, 3)]
        for number in range(300):
            client = chance.choice(clients)
            match chance.randrange(6):
                case 0 | 1:
                    limits.add(client, number, number)
                    naive.queues[client].append(number)
                case 2 if naive.executing[client]:
                    limits.ends(client)
                    naive.executing[client] -= 1
                case 3:
                    limits.begins(client)
                    naive.executing[client] += 1
                case 4 if naive.queues[client]:
                    gone = chance.choice(naive.queues[client])
                    naive.queues[client].remove(gone)
                    assert limits.withdraw(client, gone) == gone
                case 5:
                    may = naive.may_begin()
                    item = limits.next()
                    assert (item in may) if may else (item is None)
                    if item is not None:
                        [owner] = [one for one, queue in naive.queues.items() if item in queue]
                        naive.queues[owner].popleft()
                        naive.executing[owner] += 1
            assert limits.executing == sum(naive.executing.values())
            assert limits.waiting == sum(map(len, naive.queues.values()))
            if naive.may_begin():
                assert limits.ready
