"""Slots in the machine: what runs is never more than the limit, and no task waits while a slot is free.

`SlotsPart` does with a real `Share` what `tasks.runtime.shared_budget` and the executor do with it.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, cast

from headgate.core.clock import clock
from headgate.sharing.protocol import member_of
from headgate.sharing.slots import SLOTS, Said, Settings, Told
from headgate.sharing.states import ClockOffset
from headgate.tasks.model import PLAIN, Moment, TaskRecord
from headgate.tasks.scheduling.share import Share
from tests.support.sharing.world import Game, Part, Process, World

LIMIT = 3
TENANTS = "abcde"


class SlotsGame(Game):
    """Counts what runs."""

    def __init__(self, order: str, caps: int | None, variant: int) -> None:
        kind, _, levels = order.partition("/")
        self.settings = Settings(LIMIT, kind, None, caps, levels=bool(levels))
        self.tasks = 0
        self.most = LIMIT
        """The highest limit since what runs was last within the limit."""

    def part(self, process: Process) -> Part:
        return SlotsPart(self, process)

    def check(self, world: World) -> None:
        state, counted = world.state(), self.counted(world)
        limit = state["limit"] if state.get("members") else self.most  # the settings of the next one will stand
        parts = [cast(SlotsPart, one.part) for one in world.living()]
        inside = [task for part in parts for task in part.inside()]
        kept = sum(part.share.kept for part in parts)
        # A lost text may bring an older limit back, while those that have not spoken since go by the lost one.
        if max(counted, len(inside) + kept) <= limit and (limit > self.most or not world.unheard):
            self.most = limit
        assert counted <= self.most, f"{counted} slots are given at a limit of {limit}: {world.text}"
        assert len(inside) + kept <= self.most, f"{len(inside)} run, {kept} are kept at {limit}: {world.text}"
        if self.settings.caps is not None:
            by_tenant = Counter(task.partition for task in inside)
            assert max(by_tenant.values(), default=0) <= 1, f"{by_tenant} at a cap of 1"

    def counted(self, world: World) -> int:
        """How many slots those that live hold or may take, by the text."""
        return sum(
            sum(one.get("h", {}).values()) + len(one.get("l", ())) + len(one.get("n", ()))
            for who, one in world.state().get("members", {}).items()
            if member_of(who) not in world.gone
        )

    def check_at_rest(self, world: World) -> None:
        if not any(one.part.running for one in world.processes):
            assert not self.counted(world) or any(one.part.waits for one in world.processes), "slots leaked"


class SlotsPart(Part):
    """One process that runs tasks."""

    actions = (
        *("submit",) * 3,
        *("end",) * 2,
        "lend",
        "cancel",
        "run out",
        "serve again",
        "resize",
        "pause",
    )

    def __init__(self, game: SlotsGame, process: Process) -> None:
        self.game, self.process = game, process
        self.running: list[TaskRecord] = []
        self.outside: set[TaskRecord] = set()
        """They were running when the lease was lost: nobody counts them any more."""
        self.lenders: list[TaskRecord] = []
        self._is_due = self._sends = self._runs_out = False
        self.link = process.link(SLOTS, self)
        self.share = Share(game.settings, self._changed, kept=self._changed, clock=lambda: clock.now())
        self.share.queue.is_valid = lambda: not self.link.is_revoked and clock.now() < process.deadline
        self.share.has_returning = lambda: bool(self.lenders)

    def _changed(self) -> None:
        self._is_due = True

    def inside(self) -> list[TaskRecord]:
        """What runs and is counted."""
        return [task for task in self.running if task not in self.outside]

    # -- what a program does -------------------------------------------------------------------------------------------

    def act(self, what: str, which: int) -> None:
        queued = list(self.share.queue)
        if what == "submit":
            self._submit(TENANTS[which % len(TENANTS)], which % 3)
        elif what == "end" and self.running:
            self._end(self.running[which % len(self.running)])
        elif what == "lend" and (inside := self.inside()):
            self._lend(inside[which % len(inside)])
        elif what == "cancel" and queued:
            self.share.queue.remove(queued[which % len(queued)])
        elif what == "run out":
            self._runs_out = True
        elif what == "serve again":
            self._serve_again()
        elif what == "resize":
            self.share.resize(1 + which % 5)
        elif what == "pause":
            self._pause(which)

    def _pause(self, which: int) -> None:
        """Pause or resume a tenant, or all of the budget."""
        who = None if which % 3 == 0 or not self.share.settings.by_tenant else TENANTS[which % len(TENANTS)]
        settings = self.share.settings
        self.share.pause(who, paused=not (settings.paused if who is None else who in settings.paused_tenants))
        self._pump()

    def resume_all(self) -> bool:
        """End every pause. Returns whether there was any."""
        resumed = [self.share.pause(who, paused=False) for who in (None, *self.share.settings.paused_tenants)]
        self._pump()
        return any(resumed)

    def _submit(self, tenant: str, priority: int) -> None:
        self.game.tasks += 1
        self.process.world.now += 0.001
        moment = Moment(clock.now(), clock.now())
        self.share.queue.push(
            TaskRecord(cast(Any, None), self.game.tasks, None, (), None, moment, None, priority, tenant, tenant, PLAIN)
        )
        self._pump()

    def _pump(self) -> None:
        for lender in [lender for lender in self.lenders if self.share.take_return(lender)]:
            self.lenders.remove(lender)
            self._start(lender)  # it runs: no pause keeps its slot from it
        while (task := self.share.queue.pop()) is not None:
            settings = self.share.settings
            assert not settings.paused, "it starts a task while the budget is paused"
            assert task.partition not in settings.paused_tenants, "it starts a task of a paused tenant"
            self._start(task)

    def _start(self, task: TaskRecord) -> None:
        assert not self.process.is_gone, "it starts a task after its lease"
        self.share.started(task)
        self.running.append(task)

    def _end(self, task: TaskRecord) -> None:
        self.running.remove(task)
        self.share.ended(task)
        self.outside.discard(task)
        self._pump()

    def _lend(self, task: TaskRecord) -> None:
        """It waits for something, and wants its slot back at once: the shortest wait."""
        self.running.remove(task)
        self.share.lend(task)
        self.lenders.append(task)
        self.share.announce()

    def _run_out(self) -> None:
        """Nothing can serve the task that is next: what was granted for it goes back."""
        task = self.share.queue.first()
        if task is not None:
            self._runs_out = False
            self.share.unserved.add(task.terms.need)
            self.share.announce()

    def _serve_again(self) -> bool:
        """End what was lacking. Returns whether anything was."""
        self._runs_out, lacked = False, bool(self.share.unserved)
        self.share.unserved.clear()
        self.share.announce()
        self._pump()
        return lacked

    @property
    def is_due(self) -> bool:
        return self._is_due and not self.link.is_busy

    def turn(self) -> None:
        self._is_due, self._sends = False, True
        self.link.send()
        self._sends = False

    @property
    def waits(self) -> bool:
        return bool(len(self.share.queue) or self.lenders)

    def end_one(self) -> bool:
        if self.resume_all() or self._serve_again():
            return True
        if not self.running:
            return False
        self._end(self.running[0])
        return True

    def want_all(self) -> None:
        for number in range(self.share.settings.limit):
            self._submit(f"newcomer-{number}", 0)

    def has_all(self) -> bool:
        return len(self.running) == self.share.settings.limit

    # -- what the link asks --------------------------------------------------------------------------------------------

    def message(self, now: float, *, looks: bool) -> Said | None:
        if not looks and not self._sends:
            self._changed()
        if looks:
            self.share.contended()
        return None if self._is_due else self.share.message(now, ("host", 1), list(self.lenders))

    def take(self, said: Said, told: Told, offset: ClockOffset, now: float, *, is_current: bool) -> bool:
        if is_current:
            self.share.take(told, offset, now)
        return False

    def carry_out(self) -> None:
        if self._runs_out:
            self._run_out()
        self._pump()
        if self.share.has_unused():
            self._changed()

    def failed(self, said: Said, error: BaseException) -> None:
        self.share.end_blocks()
        self._changed()

    def forget(self, now: float, *, forked: bool = False) -> None:
        self.outside |= set(self.running)
        self.share.lose(list(self.running))

    def set_alone(self, now: float, *, alone: bool, why: Exception | None = None) -> None:
        if alone:
            self.share.end_blocks()
