"""Pools without a loop that share a budget through a store that loses answers, wakes and members.

`World` plays the store. Each `Pool` has a real `Share`, and does what an executor does with it: it starts what the
share hands out, ends tasks, lends slots. Nothing happens by itself, so every order of events can be tried. `check`
counts everything anew after each step, and `drain` ends everything that can end: what is left was never woken.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Any, cast

from headgate.sharing.protocol import Message, Reply, exchange, member_of
from headgate.sharing.slots import SLOTS, Settings
from headgate.sharing.states import ClockOffset, Outcome, Seen
from headgate.tasks.model import PLAIN, Moment, TaskRecord, Terms
from headgate.tasks.scheduling.share import Share


class World:
    """A store of one text, and the pools that use it."""

    def __init__(self, settings: Settings, *, blocks: bool = False) -> None:
        """With `blocks`, slots may go from task to task for a moment without asking."""
        self.settings = settings
        self.blocks = blocks
        self.text: str | None = None
        self.now = 1000.0
        self.alive: set[str] = set()
        self.pools: list[Pool] = []
        self.ids = 0
        self.numbers = 0
        self.most = settings.limit
        """The highest limit since what runs was last within the limit."""
        self.largest = 0
        self.started: list[TaskRecord] = []

    def join(self) -> Pool:
        pool = Pool(self)
        self.pools.append(pool)
        pool.speak()
        return pool

    def new_id(self) -> str:
        self.ids += 1
        self.alive.add(f"m{self.ids}")
        return f"m{self.ids}"

    def transact(self, member: str, message: Message, *, lose_wakes: bool = False) -> Reply:
        seen = Seen(self.now, member, lambda other: other not in self.alive)
        outcome: Outcome = exchange(SLOTS, self.text, seen, message)
        # It is a pure function. The first time it may know the text, and the second time it has to read it.
        assert outcome == exchange(SLOTS, self.text, seen, message)
        if outcome.state is not None:
            self.text = outcome.state
            self.largest = max(self.largest, len(outcome.state))
        for name in () if lose_wakes else outcome.wakes:
            for pool in self.pools:
                if pool.id == name:
                    pool.woken = True
        self.check()
        return cast(Reply, outcome.reply)

    def state(self) -> dict[str, Any]:
        return {} if self.text is None else json.loads(self.text)

    def check(self) -> None:
        state = self.state()
        limit = state.get("limit", self.settings.limit)
        counted = 0
        for name, entry in state.get("members", {}).items():
            slots = sum(entry.get("h", {}).values()) + len(entry.get("l", ())) + len(entry.get("n", ()))
            counted += slots if member_of(name) in self.alive else 0
        running = sum(len(pool.share_running()) + pool.share.kept for pool in self.pools)
        if counted <= limit:
            self.most = limit
        assert counted <= max(limit, self.most), f"{counted} slots at a limit of {limit}: {self.text}"
        assert running <= max(counted, self.most), f"{running} run, {counted} are counted: {self.text}"
        assert running <= max(limit, self.most)
        if self.settings.caps is not None and isinstance(self.settings.caps, int):
            by_tenant = Counter(task.partition for pool in self.pools for task in pool.share_running())
            worst = max(by_tenant.values(), default=0)
            assert worst <= self.settings.caps, f"{by_tenant} at a cap of {self.settings.caps}"

    def drain(self, *, heartbeat: bool) -> None:
        """End everything; without `heartbeat` only those speak who were woken or have something to say."""
        for _ in range(100_000):
            busy = [pool for pool in self.pools if pool.woken or pool.changed or pool.resend or pool.keeps]
            if busy:
                busy[0].speak()
                continue
            running = [(pool, task) for pool in self.pools for task in pool.running]
            if running:
                pool, task = running[0]
                pool.end(task)
                continue
            if not any(len(pool.share.queue) for pool in self.pools):
                return
            assert heartbeat, f"tasks are queued, nothing runs and nobody was woken: {self.text}"
            self.now += 2.0
            for pool in self.pools:
                pool.woken = True
        raise AssertionError("it never comes to an end")


class Pool:
    """One member: a share, and what runs."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.id = world.new_id()
        self.answered: str | None = None
        """Its id when it was last answered."""
        self.changed = False
        self.woken = False
        self.resend: Message | None = None
        """A message of which the answer was lost."""
        self.running: list[TaskRecord] = []
        self.outside: set[TaskRecord] = set()
        self.lenders: list[TaskRecord] = []
        self.keeps = False
        """Has it kept a slot since it last spoke? A real pool would speak soon."""
        self.share = Share(
            world.settings, self._changed, kept=self._kept, clock=(lambda: world.now) if world.blocks else None
        )

    def _changed(self) -> None:
        self.changed = True

    def _kept(self) -> None:
        self.keeps = True

    def share_running(self) -> list[TaskRecord]:
        return [task for task in self.running if task not in self.outside]

    def submit(self, tenant: str | None = None, priority: int = 0, cost: float | None = None) -> TaskRecord:
        self.world.numbers += 1
        self.world.now += 0.001
        moment = Moment(self.world.now, self.world.now)
        terms = PLAIN if cost is None else Terms(cost=cost)
        task = TaskRecord(
            cast(Any, None), self.world.numbers, None, (), None, moment, None, priority, tenant, tenant, terms
        )
        self.share.queue.push(task)
        self.pump()
        return task

    def cancel(self, task: TaskRecord) -> None:
        self.share.queue.remove(task)

    def pump(self) -> None:
        for lender in [lender for lender in self.lenders if self.share.take_return(lender)]:
            self.lenders.remove(lender)
            self.share.started(lender)
            self.running.append(lender)
        while (task := self.share.queue.pop()) is not None:
            self.share.started(task)
            self.running.append(task)
            self.world.started.append(task)

    def end(self, task: TaskRecord) -> None:
        self.running.remove(task)
        self.share.ended(task)
        self.outside.discard(task)
        self.pump()

    def lend(self, task: TaskRecord) -> None:
        """It waits for something, and wants its slot back at once: the shortest wait."""
        if task in self.outside:
            return
        self.running.remove(task)
        self.share.lend(task)
        self.lenders.append(task)
        self.share.announce()

    def run_out(self) -> None:
        """Nothing can serve the task that is next: what was granted for it goes back."""
        task = self.share.queue.first()
        if task is not None:
            self.share.unserved.add(task.terms.need)
            self.share.announce()

    def serve_again(self) -> None:
        self.share.unserved.clear()
        self.share.announce()
        self.pump()

    def message(self) -> Message:
        return Message("t", self.answered, self.share.message(self.world.now, ("host", 1), list(self.lenders)))

    def speak(self, *, lose_answer: bool = False, lose_wakes: bool = False, unserved: bool = False) -> None:
        if self.resend is not None:  # what has changed since is not in it, and who was woken since still has to look
            message, self.resend = self.resend, None
        else:
            self.woken = self.changed = self.keeps = False
            self.share.contended()
            message = self.message()
        reply = self.world.transact(self.id, message, lose_wakes=lose_wakes)
        if lose_answer:
            self.resend = message
            return
        self.answered = reply.member
        self.share.take(reply.body, ClockOffset(), self.world.now)
        if unserved:
            self.run_out()
        self.pump()
        if self.share.has_unused():
            self.changed = True
        self.world.check()

    def lose_lease(self) -> None:
        """Its old id is gone; it goes on under a new one, and what runs is counted by nobody."""
        self.world.alive.discard(self.id)
        self.id = self.world.new_id()
        self.outside |= set(self.running)
        self.resend, self.answered = None, None
        self.share.lose(list(self.running))
        self.changed = True
        for pool in self.world.pools:
            pool.woken = True

    def die(self) -> None:
        self.world.alive.discard(self.id)
        self.world.pools.remove(self)
        for pool in self.world.pools:
            pool.woken = True
