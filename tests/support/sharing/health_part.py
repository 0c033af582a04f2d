"""Health and permits in the machine: no more uses than permits, no cooldown ends early, and nobody waits in vain.

`HealthPart` does with a real `Replica` and `Rotation` what `resources.shared_health` and the engine do with them.
"""

from __future__ import annotations

import math
from collections import defaultdict
from typing import ClassVar, cast

from headgate.core.clock import clock
from headgate.gate.adaptive import Adaptive
from headgate.resources.effects import Effects, Serve, Starve
from headgate.resources.exchange import RESOURCE_HEALTH, News, Told
from headgate.resources.members import ANY, Requirement, Use, WaitTicket
from headgate.resources.model import Resource
from headgate.resources.replica import Replica
from headgate.resources.rotation import Rotation
from headgate.resources.stats import check
from headgate.resources.strategies import NAMED
from headgate.sharing.states import ClockOffset
from tests.support.sharing.world import Game, Part, Process, World

LIMIT = 2
NAMES = ("k0", "k1")
"""The first one has a limit."""
_LIMITED = Requirement(only=NAMES[0])
_COOLDOWNS = (30.0, 60.0, 90.0)
_CLOSE = 1e-3
_SAME = 0.05
"""Seconds by which two ends of a cooldown may differ: the clocks of two processes are not compared more exactly."""


class HealthGame(Game):
    """Counts uses, and keeps a list of what calls found out since all agreed."""

    def __init__(self, variant: int) -> None:
        self.cooldowns: dict[str, list[tuple[float, float, Process]]] = defaultdict(list)
        """When each began, until when it lasts, and who found out, by name."""
        self.successes: dict[str, list[float]] = defaultdict(list)
        """When the calls began."""
        self.enabled: set[str] = set()
        self.were_enabled: set[str] = set()
        """Ever. Whoever joins after the text was lost does not know of it, and what it learns counts as older."""
        self.disabled: set[tuple[str, Process]] = set()
        self.slowest = 0.0
        """Seconds between the two readings of a clock around the slowest exchange so far."""

    def part(self, process: Process) -> Part:
        return HealthPart(self, process)

    def enable(self, name: str) -> None:
        self.enabled.add(name)
        self.were_enabled.add(name)

    def lost(self, world: World) -> None:
        self.enabled |= self.were_enabled

    def check(self, world: World) -> None:
        parts = [cast(HealthPart, one.part) for one in world.living()]
        uses = [use for part in parts for use, lease in part.uses if lease == part.leases_lost]
        held = sum(use.member.resource.resource_id == NAMES[0] for use in uses)
        assert held <= LIMIT, f"{held} uses at a limit of {LIMIT}: {world.text}"
        for name in NAMES:
            members = [part.rotation.members[name] for part in parts]
            assert sum(one.lease.permits for one in members if one.lease is not None) <= LIMIT, world.text
            assert sum(one.probe.permits for one in members if one.probe is not None) <= 1, world.text
        for one in world.processes:
            self._never_shrinks(one, world.now)

    def _never_shrinks(self, process: Process, now: float) -> None:
        part = cast(HealthPart, process.part)
        for name in NAMES:
            resource = part.rotation.members[name].resource
            until = resource.cooldown_until + process.ahead if resource.status != "disabled" else math.inf
            shown = part.shown.get(name, 0.0)
            if shown > now and until < shown - _CLOSE:
                assert name in self.enabled or (shown < math.inf and self._is_cleared(name)), (
                    f"{name} of {process.member} is in use again before {shown - now:g} s have passed"
                )
            part.shown[name] = until

    def _is_cleared(self, name: str) -> bool:
        began = min((began for began, _, _ in self.cooldowns[name]), default=-math.inf)
        return any(start >= began for start in self.successes[name])

    def check_at_rest(self, world: World) -> None:
        if not world.processes:
            return
        for one in world.processes:
            world.act(one, "look", 0)
            check(cast(HealthPart, one.part).rotation, world.now - one.ahead)
        for name in NAMES:
            resources = [cast(HealthPart, one.part).rotation.members[name].resource for one in world.processes]
            states = {resource.status for resource in resources}
            ends = [r.cooldown_until + one.ahead for r, one in zip(resources, world.processes, strict=True)]
            if "healthy" in states and max(ends) - min(ends) <= 2 * (self.slowest + _SAME):
                states.discard("cooling_down")  # one cooldown: whoever told of it was slow, and whoever heard of it
            assert len(states) == 1, f"{name} is {states}: {world.text}"
            counts = {resource.consecutive_cooldown for resource in resources}
            assert len(counts) == 1 or states == {"disabled"}, f"{name} has cooled down {counts} times: {world.text}"
            if name not in self.enabled:
                assert states == {"disabled"} or not any((name, one) in self.disabled for one in world.processes)
                for began, until, who in self.cooldowns[name] if states != {"disabled"} else ():
                    is_cleared = any(start >= began for start in self.successes[name])
                    if until > world.now and who in world.processes and not is_cleared:
                        assert min(ends) >= until - _SAME - _CLOSE, f"{name} cools down until {until}: {ends}"
        for facts in (self.cooldowns, self.successes, self.enabled, self.disabled):
            facts.clear()


class HealthPart(Part):
    """One process that uses resources."""

    actions = ("call", "call", "call", "wait", "wait", "ok", "ok", "ended", "cooled", "disabled", "enable", "give up")
    limit: ClassVar[int | Adaptive] = LIMIT

    def __init__(self, game: HealthGame, process: Process) -> None:
        self.game, self.process = game, process
        self.uses: list[tuple[Use, int]] = []
        """With the number of leases that had been lost when they began."""
        self.tickets: list[WaitTicket] = []
        self.shown: dict[str, float] = {}
        """Until when each resource cools down, by the clock of the store, as it was at the last look."""
        self.leases_lost = 0
        self._effects: Effects = []
        self.rotation = Rotation(
            [Resource(NAMES[0], "v", self.limit), Resource(NAMES[1], "v")],
            strategy=NAMED["round_robin"],
            cooldown_table=_COOLDOWNS,
            probe_on_recovery=True,
        )
        self.replica = Replica(self.rotation, "pool")
        self.replica.guard(lambda: process.deadline)
        self.link = process.link(RESOURCE_HEALTH, self)

    # -- what a program does -------------------------------------------------------------------------------------------

    def act(self, what: str, which: int) -> None:
        now, name = clock.now(), NAMES[which % len(NAMES)]
        self._advance()
        if what in ("call", "wait"):
            self._call(_LIMITED if which % 2 else ANY, waits=what == "wait")
        elif what == "enable":
            self.game.enable(name)
            self._carry_out(self.rotation.enable(name, now))
        elif what == "give up" and self.tickets:
            self._leave(self.tickets[which % len(self.tickets)])
        elif self.uses and what not in ("give up", "look"):
            self._finish(self.uses.pop(which % len(self.uses))[0], what)

    def _call(self, requirement: Requirement, *, waits: bool) -> None:
        now = clock.now()
        use = self.rotation.acquire(now, requirement)
        if use is not None:
            self._begin(use)
        elif waits:
            ticket = WaitTicket(requirement, self.rotation)
            if self.rotation.can_become_free(requirement):
                self.tickets.append(ticket)
                self._carry_out(self.rotation.join(ticket, now))
                self.link.send()
        elif self.replica.lacks(requirement, (), now) is not None:
            self.link.send()

    def _begin(self, use: Use) -> None:
        assert use.member.resource.resource_id != NAMES[0] or not self.process.is_gone, "it begins after its lease"
        self.uses.append((use, self.leases_lost))

    def _finish(self, use: Use, how: str) -> None:
        now, name = clock.now(), use.member.resource.resource_id
        start = use.acquired_at + self.process.ahead
        if how == "cooled":
            was_disabled = use.member.resource.status == "disabled"
            effects: Effects | None = self.rotation.cooled(use, now=now)
            if not was_disabled:
                # What it asks for. A longer cooldown that was known before may have been told by a slow message.
                rank = min(use.member.resource.consecutive_cooldown, len(_COOLDOWNS))
                began = self.process.world.now
                self.game.cooldowns[name].append((began, began + _COOLDOWNS[rank - 1], self.process))
        elif how == "disabled":
            self.game.disabled.add((name, self.process))
            effects = self.rotation.disabled(use, now)
        elif how == "ok":
            self.game.successes[name].append(start)
            effects = self.rotation.ok(use, now)
        else:
            effects = self.rotation.ended(use, now)
        self._carry_out(effects)

    def _leave(self, ticket: WaitTicket) -> None:
        self.tickets.remove(ticket)
        self._carry_out(self.rotation.leave(ticket, clock.now()))
        self.link.send()

    def _carry_out(self, effects: Effects | None) -> None:
        members = set()
        for effect in effects or ():
            if isinstance(effect, Serve):
                use, effect.ticket.grant = effect.ticket.grant, None
                if use is not None:
                    use.ticket = None
                    self.tickets.remove(effect.ticket)
                    self._begin(use)
            elif isinstance(effect, Starve):
                if effect.ticket in self.tickets:
                    self._leave(effect.ticket)
            elif (member := getattr(effect, "member", None)) is not None:
                members.add(member)
        if members:
            for member in members:
                self.replica.learn(member, clock.now())
            self.replica.want_more(clock.now())
            self.link.send()

    def _advance(self) -> None:
        if self.rotation.due(clock.now()):
            self._carry_out(self.rotation.advance(clock.now()))

    @property
    def is_due(self) -> bool:
        return bool(self.tickets) and self.rotation.due(clock.now())

    def turn(self) -> None:
        self._advance()

    def next_at(self) -> float:
        return (self.rotation.next_expiry() or math.inf) if self.tickets else math.inf

    @property
    def waits(self) -> bool:
        return bool(self.tickets)

    def end_one(self) -> bool:
        if not self.uses:
            return False
        self._finish(self.uses.pop(0)[0], "ended")
        return True

    def want_all(self) -> None:
        for name in NAMES:
            self._carry_out(self.rotation.enable(name, clock.now()))
            self.game.enable(name)
        for nth in range(2 * LIMIT):
            self._call(_LIMITED if nth < LIMIT else ANY, waits=True)

    def has_all(self) -> bool:
        return not self.tickets

    # -- what the link asks --------------------------------------------------------------------------------------------

    def message(self, now: float, *, looks: bool) -> News | None:
        if looks:
            self.replica.want_more(now)
        return self.replica.message(now, (), looks=looks)

    def take(self, said: News, told: Told, offset: ClockOffset, now: float, *, is_current: bool) -> bool:
        self.game.slowest = max(self.game.slowest, offset.most - offset.least)
        self._effects += self.replica.take(told, offset, now, is_current=is_current)
        return True

    def failed(self, said: News, error: BaseException) -> None:
        self.replica.failed(said)

    def forget(self, now: float, *, forked: bool = False) -> None:
        self.leases_lost += 1
        self.replica.forget_permits()

    def set_alone(self, now: float, *, alone: bool, why: Exception | None = None) -> None:
        self._effects += self.replica.set_alone(now, alone=alone)

    def carry_out(self) -> None:
        effects, self._effects = self._effects, []
        self._carry_out(effects)
