"""Quotas in the machine: an upstream counts every start, and no call waits for what nobody uses.

`QuotasPart` does with a real `LeasedBudget` what `resources.shared_quotas` and an account do with it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from headgate.core.clock import clock
from headgate.resources.leased_budget import LeasedBudget
from headgate.resources.quota import Quota, QuotaWindow
from headgate.resources.quota_exchange import SHARED_QUOTA, Granted, Report
from headgate.sharing.states import ClockOffset
from tests.support.sharing.world import Game, Part, Process

PER = 10.0


@dataclass
class Arrival:
    """A request that the upstream has counted."""

    at: float
    tokens: float


class QuotasGame(Game):
    """The upstream."""

    def __init__(self, window: QuotaWindow, variant: int) -> None:
        """`variant` chooses the limits."""
        burst = 1.0 if variant % 3 == 1 and window == "sliding" else None
        tokens = 20 if variant % 2 else None
        self.quota = Quota(1 + variant % 8, PER, tokens, window=window, burst=burst)
        self.quotas = (self.quota,) if variant % 5 < 3 else (self.quota, Quota(2, PER / 5, 40, window=window))
        self.arrived: list[Arrival] = []

    def part(self, process: Process) -> Part:
        return QuotasPart(self, process)

    def arrive(self, at: float, tokens: float) -> Arrival:
        """Count a request."""
        arrival = Arrival(at, tokens)
        self.arrived.append(arrival)
        counted = {
            "requests": [(one.at, 1.0) for one in self.arrived],
            "tokens": [(one.at, one.tokens) for one in self.arrived],
        }
        for quota in self.quotas:
            for name, limit in quota.limits.items():
                self._count(quota, name, float(limit), counted[name], at)
        return arrival

    @staticmethod
    def _count(quota: Quota, name: str, limit: float, amounts: list[tuple[float, float]], now: float) -> None:
        if quota.window == "sliding":
            used = sum(amount for at, amount in amounts if at > now - quota.per)
            assert used <= limit, f"{used:g} {name} in a window that allows {limit:g}"
            return
        level, before = limit, -math.inf
        for at, amount in amounts:
            level = min(limit, level + limit / quota.per * (at - before)) - amount
            before = at
        assert level >= -1e-6, f"{-level:g} {name} more than the bucket has"


class QuotasPart(Part):
    """One process that calls."""

    survives_loss = False  # what was used is forgotten with the text: no promise holds then
    actions = ("call", "call", "call", "wait", "wait", "wait", "give up", "used less", "cancel")

    def __init__(self, game: QuotasGame, process: Process) -> None:
        self.game, self.process = game, process
        self.waiting: list[int] = []
        """The costs of calls that wait."""
        self.started: list[tuple[dict[str, float], float, Arrival]] = []
        self._alarm = math.inf
        self.link = process.link(SHARED_QUOTA, self)
        self.budget = LeasedBudget(game.quotas, self.link.note, lambda: process.deadline)
        self.budget.lack(self.budget.need(0.0), clock.now())

    # -- what a program does -------------------------------------------------------------------------------------------

    def act(self, what: str, which: int) -> None:
        now, cost = clock.now(), 1 + which % (self.game.quota.tokens or 1)
        if what in ("call", "wait"):
            need = self.budget.need(cost)
            if not self.waiting and self.budget.allows(need, now):
                self._start(cost)
            elif what == "wait":
                self.waiting.append(cost)
        elif what == "give up" and self.waiting:
            self.waiting.pop(which % len(self.waiting))
            if not self.waiting:
                self.budget.want_no_more()
        elif what in ("used less", "cancel") and self.started:
            need, start, arrival = self.started.pop(which % len(self.started))
            self._correct(need, start, arrival, what)
        self._serve()

    def _correct(self, need: dict[str, float], start: float, arrival: Arrival, what: str) -> None:
        now = clock.now()
        if self.game.quota.window != "sliding":
            return  # a bucket that was full meanwhile has nothing to return, and how full it was elsewhere is not known
        if what == "cancel" and arrival.at == self.process.world.now:
            self.game.arrived = [one for one in self.game.arrived if one is not arrival]
            self.budget.cancel(need, start, now)
        elif arrival.tokens > 1.0:
            arrival.tokens -= 1.0
            self.budget.amend({name: -1.0 for name in need if name.startswith("tokens")}, start, now)

    def _start(self, cost: int) -> None:
        assert not self.process.is_gone, "a call starts after the lease"
        need = self.budget.need(cost)
        start, _ = self.budget.start(need, clock.now())
        self.started.append((need, start, self.game.arrive(self.process.world.now, float(cost))))

    def _serve(self) -> None:
        now = clock.now()
        while self.waiting and self.budget.allows(self.budget.need(self.waiting[0]), now):
            self.process.world.changes += 1
            self._start(self.waiting.pop(0))
        if self.waiting:
            self.budget.lack(self.budget.need(self.waiting[0]), now)
            self._alarm = self.budget.opens_at(self.budget.need(self.waiting[0]), now)
        elif not self.budget.allows(self.budget.need(0.0), now):
            self.budget.lack(self.budget.need(0.0), now, waits=False)

    @property
    def is_due(self) -> bool:
        return bool(self.waiting) and not self.link.is_busy and self._alarm <= clock.now()

    def turn(self) -> None:
        self._serve()

    def next_at(self) -> float:
        return self._alarm if self.waiting else math.inf

    @property
    def waits(self) -> bool:
        return bool(self.waiting)

    def want_all(self) -> None:
        self.waiting.append(self.game.quota.tokens or 1)
        self._serve()

    def has_all(self) -> bool:
        return not self.waiting

    # -- what the link asks --------------------------------------------------------------------------------------------

    def message(self, now: float, *, looks: bool) -> Report | None:
        return self.budget.message(looks=looks)

    def take(self, said: Report, told: Granted, offset: ClockOffset, now: float, *, is_current: bool) -> bool:
        if is_current:
            self.budget.take(said, told, offset, now)
            self._serve()
            if told.is_wanted:
                self.budget.give_back(now)
        return False

    def forget(self, now: float, *, forked: bool = False) -> None:
        self.budget.forget()
        self._serve()
