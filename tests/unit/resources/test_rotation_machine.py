"""Two rotations that share resources, driven by random commands beside a naive model of them.

`Twin` gives each command to both and compares what they answer and how they stand afterwards; the machine only chooses
the commands. HEADGATE_SCALE says how long: below 1 the choices are the same in every run.
"""

from __future__ import annotations

import os
import random
from collections import deque
from collections.abc import Callable, Collection, Container, Sequence
from itertools import combinations, permutations, product
from typing import Any, cast

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from headgate import Resource
from headgate.resources import Member, Occasion, Picker
from headgate.resources.effects import Cancel, Cool, Disable, Effects, Enable, Pause, Recover, Serve, Starve
from headgate.resources.members import ANY, Requirement, WaitTicket
from headgate.resources.members import Use as Flight
from headgate.resources.rotation import Rotation
from headgate.resources.stats import check, pool_stats
from headgate.resources.strategies import NAMED
from tests.unit.resources.model import News, Outcome, Pool, Res, Use, Waiter, World

SCALE = float(os.environ.get("HEADGATE_SCALE", "0.1"))

IDS = ("k0", "k1", "k2")
RUNS = dict.fromkeys(("retries", "runs_ok", "runs_exhausted", "runs_error", "runs_cancelled"), 0)

Tags = frozenset[str]


class Drawing:
    """`least_latency`, and which ids it drew: the model judges these, it cannot foresee them."""

    def __init__(self, drawn: deque[str]) -> None:
        self.drawn = drawn

    def picker(self) -> Picker:
        picker: Any = NAMED["least_latency"].picker()
        pick_for = picker.pick_for

        def watched(skip: Container[str], occasion: Occasion) -> Member | None:
            seat: Member | None = pick_for(skip, occasion)
            if seat is not None:
                self.drawn.append(seat.resource.resource_id)
            return seat

        picker.pick_for = watched
        return cast(Picker, picker)


class Twin:
    """The real rotations and the model of them."""

    def __init__(self, pools: list[Pool]) -> None:
        self.now = 100.0
        self.world = World()
        self.world.pools = pools
        chance = random.Random(0)
        self.rotations = [
            Rotation(
                (),
                strategy=Drawing(pool.drawn) if pool.strategy == "least_latency" else NAMED[pool.strategy],
                cooldown_table=pool.table,
                cancel_siblings=pool.cancels,
                probe_on_recovery=pool.probes,
                chance=chance.random,
                owner=pool.name,
            )
            for pool in pools
        ]
        self.resources: list[tuple[Resource[None], Res]] = []  # all there ever were
        self.flights: list[tuple[Flight, Use]] = []  # all that have not ended
        self.granted: list[tuple[WaitTicket, Waiter]] = []  # served, and not yet awake
        self.waiting: list[tuple[WaitTicket, Waiter]] = []
        self.starved: list[tuple[WaitTicket, Waiter]] = []
        self._waiters = 0

    # -- uses ---------------------------------------------------------------------------------------------------------

    def acquire(
        self, at: int, tags: Tags, skip: Tags, avoid: Tags, affinity: str | None = None, *, handle: bool
    ) -> tuple[Flight, Use] | None:
        """As a shell does it: first notice the cooldowns that are over."""
        self.advance_if_due(at)
        flight = self.rotations[at].acquire(self.now, Requirement(tags, skip), avoid, affinity)
        use = self.world.acquire(self.world.pools[at], self.now, tags, skip | avoid, affinity)
        assert (flight and flight.member.resource.resource_id) == (use and use.place.res.id), "the same choice"
        if flight is None or use is None:
            return None
        return self.begin(flight, use, handle=handle)

    def begin(self, flight: Flight, use: Use, *, handle: bool) -> tuple[Flight, Use]:
        flight.handle = object() if handle else None
        use.cancellable = handle
        self.flights.append((flight, use))
        return flight, use

    def finish(self, nth: int, verdict: str, seconds: float | None = None) -> None:
        flight, use = self.flights.pop(nth % len(self.flights))
        rotation, now = flight.member.rotation, self.now
        if verdict == "ok":
            self.same(rotation.ok(flight, now), self.world.ok(use, now))
        elif verdict == "ended":
            self.same(rotation.ended(flight, now), self.world.ended(use, now))
        elif verdict == "cooled":
            self.same(rotation.cooled(flight, seconds, now=now), self.world.cooled(use, seconds, now))
        elif verdict == "cooled for its affinity":
            effects = rotation.cooled(flight, seconds, now=now, affinity=flight.affinity)
            self.same(effects, self.world.cooled_for(use, seconds, now))
        else:
            self.same(rotation.disabled(flight, now), self.world.disabled(use, now))

    # -- time ---------------------------------------------------------------------------------------------------------

    def advance_if_due(self, at: int) -> None:
        rotation, pool = self.rotations[at], self.world.pools[at]
        is_due = any(p.res.status == "cooling_down" and p.res.until <= self.now for p in pool.places) or any(
            not ban.over and ban.until <= self.now for p in pool.places for ban in p.res.bans.values()
        )
        assert rotation.due(self.now) or not is_due
        if rotation.due(self.now):
            self.same(rotation.advance(self.now), self.world.advance(pool, self.now))

    # -- waiting ------------------------------------------------------------------------------------------------------

    def park(self, at: int, tags: Tags, skip: Tags, patience: float | None, affinity: str | None = None) -> None:
        """Take what there is; else stand in line if there is hope."""
        if self.acquire(at, tags, skip, frozenset(), affinity, handle=True) is not None:
            return
        rotation, pool = self.rotations[at], self.world.pools[at]
        if not self.ask(at, tags, skip, affinity):
            return
        deadline = None if patience is None else self.now + patience
        expiry = self.world.next_expiry(pool, tags, skip, affinity)
        if deadline is not None and (expiry is None or expiry >= deadline):
            return
        self._waiters += 1
        ticket = WaitTicket(Requirement(tags, skip), rotation, deadline=deadline, affinity=affinity)
        waiter = Waiter(self._waiters, pool, tags, skip, deadline, affinity)
        rotation.join(ticket, self.now)
        self.world.join(waiter)
        self.waiting.append((ticket, waiter))

    def wake(self, nth: int, *, handle: bool) -> None:
        """Somebody who was served begins to use it."""
        ticket, waiter = self.granted.pop(nth % len(self.granted))
        assert ticket.grant is not None
        assert waiter.grant is not None
        ticket.grant.ticket = None
        self.world.wake(waiter)
        self.begin(ticket.grant, waiter.grant, handle=handle)

    def leave(self, nth: int) -> None:
        pairs = [*self.waiting, *self.granted, *self.starved]
        pair = pairs[nth % len(pairs)]
        for one in (self.waiting, self.granted, self.starved):
            if pair in one:
                one.remove(pair)
        ticket, waiter = pair
        self.same(ticket.rotation.leave(ticket, self.now), self.world.leave(waiter, self.now))

    def ask(self, at: int, tags: Tags, skip: Tags, affinity: str | None = None) -> bool:
        """What a call learns about its chances; returns whether there are any."""
        rotation, pool = self.rotations[at], self.world.pools[at]
        want = Requirement(tags, skip, affinity) if tags or skip or affinity else ANY
        assert rotation.matching(want) == len(self.world.matching(pool, tags, skip))
        assert rotation.next_expiry(want) == self.world.next_expiry(pool, tags, skip, affinity)
        hope = self.world.can_hope(pool, tags, skip)
        assert rotation.can_become_free(want) is hope
        return hope

    # -- steering -----------------------------------------------------------------------------------------------------

    def make(
        self,
        id: str,
        limit: int | None,
        carried: Tags = frozenset(),
        weight: float = 1.0,
        status: str = "healthy",
        rest: float = 0.0,
    ) -> int:
        until = self.now + rest if status == "cooling_down" else 0.0
        real = Resource(id, None, limit, cast(Any, status), until, tags=carried, weight=weight)
        self.resources.append((real, Res(id, limit, status, until, tags=carried, weight=weight)))
        return len(self.resources) - 1

    def has(self, at: int, id: str) -> bool:
        return id in self.rotations[at].members

    def holds(self, at: int, id: str) -> Resource[None]:
        return self.rotations[at].members[id].resource

    def number(self, resource: Resource[None]) -> int:
        return [real for real, _ in self.resources].index(resource)

    def add(self, at: int, nth: int) -> None:
        real, res = self.resources[nth]
        self.same(self.rotations[at].add(real, self.now), self.world.add(self.world.pools[at], res, self.now))

    def steer(self, at: int, command: str, id: str) -> None:
        rotation, pool, now = self.rotations[at], self.world.pools[at], self.now
        if command == "remove":
            self.same(rotation.remove(id, now), self.world.remove(pool, id, now))
        elif command == "enable":
            self.same(rotation.enable(id, now), self.world.enable(pool, id, now))
        elif command == "pause":
            self.same(rotation.pause(id, now), self.world.set_paused(pool, id, now, paused=True))
        elif command == "resume":
            self.same(rotation.resume(id, now), self.world.set_paused(pool, id, now, paused=False))
        else:
            self.same(rotation.disable(id, now), self.world.disable(pool, id, now))

    def reconcile(
        self, at: int, drop: Collection[str], admit: int | None, retag: dict[str, Any], order: Sequence[str]
    ) -> None:
        """Several changes, told at once."""
        rotation, pool = self.rotations[at], self.world.pools[at]
        for name in drop:
            rotation.drop(name)
            self.world.drop(pool, name)
        if admit is not None:
            rotation.admit(self.resources[admit][0])
            self.world.admit(pool, self.resources[admit][1])
        for name, like in retag.items():
            limit, tags, weight = like["limit"], like["carried"], like["weight"]
            rotation.retag(self.holds(at, name), Resource(name, None, limit, tags=tags, weight=weight))
            self.world.retag(self.world.place(pool, name).res, limit, tags, weight)
        ids = [name for name in order if name in rotation.members]
        rotation.reorder(ids)
        self.world.reorder(pool, ids)
        self.same(rotation.settle(self.now), self.world.settle(self.now))

    # -- the same? ----------------------------------------------------------------------------------------------------

    def same(self, effects: Effects | None, outcome: Outcome) -> None:
        """Both decided the same; those who were served hold it."""
        effects = effects or []
        back = [pair for pair in self.granted if pair[1] in outcome.revoked]
        self.granted = [pair for pair in self.granted if pair not in back]
        self.waiting += back
        use_of: dict[Flight, Use] = dict(self.flights)
        waiter_of: dict[WaitTicket, Waiter] = dict(self.waiting)
        doomed = [use_of[one.use] for one in effects if isinstance(one, Cancel)]
        served = [one.ticket for one in effects if isinstance(one, Serve)]
        starved = [one.ticket for one in effects if isinstance(one, Starve)]
        assert _sorted(_news(effects)) == _sorted(outcome.news)
        assert sorted(use.order for use in doomed) == [use.order for use in outcome.doomed]
        for tickets, waiters in ((served, outcome.served), (starved, outcome.starved)):
            assert _by_pool([waiter_of[one] for one in tickets]) == _by_pool(waiters)
        for ticket in served:
            assert ticket.grant is not None
            grant = waiter_of[ticket].grant
            assert grant is not None
            assert ticket.grant.member.resource.resource_id == grant.place.res.id
            self.granted.append((ticket, waiter_of[ticket]))
        self.starved += [(ticket, waiter_of[ticket]) for ticket in starved]
        over = {*served, *starved}
        self.waiting = [pair for pair in self.waiting if pair[0] not in over]

    def check(self) -> None:
        """Both stand the same."""
        use_of = dict(self.flights) | {t.grant: w.grant for t, w in self.granted if t.grant and w.grant}
        for real, res in self.resources:
            mine = (real.status, real.consecutive_cooldown, real.cooldown_until, real.last_acquired_at)
            assert mine == (res.status, res.counter, res.until, res.last), res.id
            kept = real.sharing.affinity_cooldowns
            assert ({} if kept is None else kept.active()) == {
                affinity: ban.until for affinity, ban in res.bans.items() if not ban.over
            }, res.id
        for rotation, pool in zip(self.rotations, self.world.pools, strict=True):
            assert list(rotation.members) == [place.res.id for place in pool.places]
            for place in pool.places:
                seen = [use_of[flight] for flight in rotation.in_flight(place.res.id)]
                assert seen == self.world.in_flight(place.res), place.res.id
            assert [dict(self.waiting)[ticket] for ticket in rotation.wait_queue] == [
                waiter for waiter in self.world.line if waiter.pool is pool
            ]
            assert [seat.trial.limit if seat.trial else 0 for seat in rotation.members.values()] == [
                place.ramp for place in pool.places
            ]
            assert not pool.drawn, "the model was not asked for as many"
            self._check_stats(rotation, pool)
            check(rotation, self.now)

    def _check_stats(self, rotation: Rotation, pool: Pool) -> None:
        stats = pool_stats(rotation, self.now, RUNS)
        assert {name: getattr(stats, name) for name in pool.counts} == pool.counts
        assert stats.in_flight == sum(len(self.world.in_flight(place.res)) for place in pool.places)
        for place in pool.places:  # an expired cooldown reads healthy
            res, seen = place.res, stats.resources[place.res.id]
            over = res.status == "cooling_down" and res.until <= self.now
            assert seen.status == ("healthy" if over else res.status)
            left = res.until - self.now if seen.status == "cooling_down" else 0.0
            assert seen.cooldown_seconds_remaining == left
        if not rotation.due(self.now):
            assert stats.eligible == sum(self.world.eligible(place) for place in pool.places)


def _news(effects: Effects) -> list[News]:
    news = []
    for one in effects:
        match one:
            case Cool():
                kind = "cool" if one.affinity is None else f"cool for {one.affinity}"
                news.append(News(kind, one.member.rotation.owner, one.resource_id, one.old, one.until, one.consecutive))
            case Disable():
                news.append(News("disable", one.member.rotation.owner, one.resource_id, one.old))
            case Enable():
                news.append(News("enable", one.member.rotation.owner, one.resource_id, one.old))
            case Pause():
                kind = "pause" if one.paused else "resume"
                news.append(News(kind, one.member.rotation.owner, one.resource_id, ""))
            case Recover():
                news.append(News("recover", one.member.rotation.owner, one.resource_id, "cooling_down"))
    return news


def _by_pool(waiters: list[Waiter]) -> list[Waiter]:
    """Of two pools it matters who is served, and not who is told first."""
    return sorted(waiters, key=lambda one: one.pool.name)


def _sorted(news: list[News]) -> list[News]:
    return sorted(news, key=lambda one: (one.pool, one.id))


# -- the choices -------------------------------------------------------------------------------------------------------

NOTHING: Tags = frozenset()

CHOICES: dict[str, Sequence[Any]] = {
    "at": [0, 1],
    "several": [(0, 0), (1, 1, 0), (0, 1, 0, 1), (1, 0, 0, 1, 1, 0)],
    "nth": range(12),
    "id": IDS,
    "order": list(permutations(IDS)),
    "drop": [NOTHING, NOTHING, *map(frozenset, combinations(IDS, 1)), *map(frozenset, combinations(IDS, 2))],
    "tags": [NOTHING, NOTHING, frozenset("a"), frozenset("b")],
    "skip": [NOTHING, NOTHING, NOTHING, frozenset({"k0"}), frozenset({"k1", "k2"})],
    "avoid": [NOTHING, NOTHING, NOTHING, frozenset({"k1"}), frozenset({"k0", "k2"})],
    "affinity": [None, None, "red", "green", "blue"],
    "handle": [True, True, False],
    "verdict": ["ok", "ok", "ended", "ended", "disabled"],
    "seconds": [None, None, None, 0.0, 5.0, 45.0],
    "time": [0.0, 1.0, 5.0, 30.0, 31.0, 120.0],
    "patience": [None, None, 5.0, 30.0, 31.0],
    "command": ["remove", "remove", "enable", "enable", "disable", "pause", "resume", "resume"],
    "limit": [None, 1, 1, 2, 5],
    "carried": [NOTHING, frozenset("a"), frozenset("b"), frozenset("ab")],
    "weight": [1.0, 1.0, 3.0, 0.5],
    "status": ["healthy"] * 6 + ["cooling_down", "disabled"],
    "rest": [-5.0, 0.0, 5.0, 30.0],
    "strategies": list(product(sorted(NAMED), repeat=2)),
    "tables": list(product([(30.0, 120.0, 300.0, 600.0), (5.0, 10.0), (0.0, 45.0)], repeat=2)),
    "cancels": [(True, True), (True, True), (True, False), (False, False)],
    "probes": [(True, True), (True, False), (False, False)],
    "limits": list(product([None, 1, 2, 5], repeat=3)),
}
KINDS = ("strategies", "tables", "cancels", "probes", "limits")
FIELDS = ("limit", "carried", "weight", "status", "rest")

COMMANDS: list[tuple[str, tuple[str, ...], Callable[[Any], object]]] = []

Command = Callable[..., None]


def drawn(names: Sequence[str]) -> dict[str, st.SearchStrategy[Any]]:
    return {name: st.sampled_from(CHOICES[name]) for name in names}


def command(*names: str, when: Callable[[Any], object] = lambda self: True) -> Callable[[Command], Command]:
    """A rule of the machine and a step of the walks, with these choices as arguments."""

    def decorate(function: Command) -> Command:
        COMMANDS.append((function.__name__, names, when))
        return precondition(when)(rule(**drawn(names))(function))

    return decorate


class RotationMachine(RuleBasedStateMachine):
    twin: Twin

    @initialize(**drawn(KINDS))
    def begin(self, strategies: Any, tables: Any, cancels: Any, probes: Any, limits: Any) -> None:
        """k0 is shared, k1 and k2 are not, so far."""
        self.twin = Twin(list(map(Pool, "AB", strategies, tables, cancels, probes)))
        for name, limit, holders in zip(IDS, limits, [(0, 1), (0,), (1,)], strict=True):
            nth = self.twin.make(name, limit)
            for at in holders:
                self.twin.add(at, nth)

    def _skip(self, at: int, skip: Tags) -> Tags:
        """Who is skipped by some calls may lag in `weighted`: an approximation that the model does not make."""
        return NOTHING if self.twin.world.pools[at].strategy == "weighted" else skip

    @command("at", "tags", "skip", "avoid", "affinity", "handle")
    def acquire(self, at: int, tags: Tags, skip: Tags, avoid: Tags, affinity: str | None, handle: bool) -> None:
        self.twin.acquire(at, tags, self._skip(at, skip), self._skip(at, avoid), affinity, handle=handle)

    @command("several")
    def acquire_several(self, several: Sequence[int]) -> None:
        for at in several:
            self.twin.acquire(at, NOTHING, NOTHING, NOTHING, handle=True)

    @command("nth", "verdict", when=lambda self: self.twin.flights)
    def finish(self, nth: int, verdict: str) -> None:
        self.twin.finish(nth, verdict)

    @command("nth", "seconds", when=lambda self: self.twin.flights)
    def cool(self, nth: int, seconds: float | None) -> None:
        self.twin.finish(nth, "cooled", seconds)

    @command("nth", "seconds", when=lambda self: self.twin.flights)
    def cool_for_its_affinity(self, nth: int, seconds: float | None) -> None:
        _, use = self.twin.flights[nth % len(self.twin.flights)]
        skips = all(pool.strategy != "weighted" for pool in self.twin.world.pools)  # see `_skip`
        if use.affinity is not None and skips:
            self.twin.finish(nth, "cooled for its affinity", seconds)

    @command("at", "id", "affinity")
    def pass_the_cooldown_of_an_affinity(self, at: int, id: str, affinity: str | None) -> None:
        """To the very moment."""
        if affinity is not None and self.twin.has(at, id):
            kept = self.twin.holds(at, id).sharing.affinity_cooldowns
            until = None if kept is None else kept.until(affinity)
            self.twin.now = max(self.twin.now, until or 0.0)
            self.twin.advance_if_due(at)

    @command("several", when=lambda self: self.twin.flights)
    def succeed_several(self, several: Sequence[int]) -> None:
        """The oldest ones, one after another: as a ramp needs it."""
        for _ in several:
            if self.twin.flights:
                self.twin.now += 0.25
                self.twin.finish(0, "ok")

    @command("time")
    def pass_time(self, time: float) -> None:
        self.twin.now += time

    @command("at", "id")
    def pass_a_cooldown(self, at: int, id: str) -> None:
        """To the very moment."""
        if self.twin.has(at, id):
            self.twin.now = max(self.twin.now, self.twin.holds(at, id).cooldown_until)
            self.twin.advance_if_due(at)

    @command("at")
    def notice_time(self, at: int) -> None:
        self.twin.advance_if_due(at)

    @command("at", "tags", "skip", "patience", "affinity")
    def park(self, at: int, tags: Tags, skip: Tags, patience: float | None, affinity: str | None) -> None:
        self.twin.park(at, tags, self._skip(at, skip), patience, affinity)

    @command("several", "tags", "patience", "affinity")
    def park_several(self, several: Sequence[int], tags: Tags, patience: float | None, affinity: str | None) -> None:
        for at in several:
            self.twin.park(at, tags, NOTHING, patience, affinity)

    @command("nth", "handle", when=lambda self: self.twin.granted)
    def wake(self, nth: int, handle: bool) -> None:
        self.twin.wake(nth, handle=handle)

    @command("nth", when=lambda self: self.twin.waiting or self.twin.granted or self.twin.starved)
    def leave(self, nth: int) -> None:
        self.twin.leave(nth)

    @command("at", "tags", "skip", "affinity")
    def ask(self, at: int, tags: Tags, skip: Tags, affinity: str | None) -> None:
        self.twin.ask(at, tags, skip, affinity)

    @command("at", "id", "command")
    def steer(self, at: int, id: str, command: str) -> None:
        if self.twin.has(at, id):
            self.twin.steer(at, command, id)

    @command("at", "nth")
    def add_known(self, at: int, nth: int) -> None:
        """One that the other pool holds, or that was removed before."""
        nth %= len(self.twin.resources)
        if not self.twin.has(at, self.twin.resources[nth][0].resource_id):
            self.twin.add(at, nth)

    @command("at", "id", *FIELDS)
    def replace(self, at: int, id: str, **fields: Any) -> None:
        """By a new one of the same id."""
        if self.twin.has(at, id):
            self.twin.steer(at, "remove", id)
        self.twin.add(at, self.twin.make(id, **fields))

    @command("at", "id")
    def put_back(self, at: int, id: str) -> None:
        if self.twin.has(at, id):
            known = self.twin.holds(at, id)
            self.twin.steer(at, "remove", id)
            self.twin.add(at, self.twin.number(known))

    @command("at", "id")
    def take_over(self, at: int, id: str) -> None:
        """Hold from now on what the other pool holds under this id."""
        if self.twin.has(at, id) and self.twin.has(1 - at, id):
            self.twin.steer(at, "remove", id)
            self.twin.add(at, self.twin.number(self.twin.holds(1 - at, id)))

    @command("at", "drop", "id", *FIELDS, "order")
    def reconcile(self, at: int, drop: Tags, id: str, order: Sequence[str], **fields: Any) -> None:
        """Drop some; add `id`, or change it if it is there and stays; put all into an order."""
        gone = [one for one in sorted(drop) if self.twin.has(at, one)]
        if self.twin.has(at, id) and id not in gone:
            self.twin.reconcile(at, gone, None, {id: fields}, order)
        else:
            self.twin.reconcile(at, gone, self.twin.make(id, **fields), {}, order)

    @invariant()
    def both_stand_the_same(self) -> None:
        if hasattr(self, "twin"):
            self.twin.check()


TestRotationMachine = RotationMachine.TestCase
TestRotationMachine.settings = settings(
    max_examples=int(820 * SCALE**1.7),
    stateful_step_count=50,
    report_multiple_bugs=False,  # one at a time: shrinking is the slow part
    phases=[Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink],
)


@pytest.mark.parametrize("seed", range(int(620 * SCALE**1.7)))
def test_a_long_walk(seed: int) -> None:
    """The same commands by plain chance: nothing is shrunk, and a second goes ten times as far."""
    chance = random.Random(seed)
    machine = RotationMachine()
    machine.begin(**{name: chance.choice(CHOICES[name]) for name in KINDS})
    liked = chance.sample(COMMANDS, k=chance.randrange(6, len(COMMANDS) + 1))  # who may do all does nothing often
    for _ in range(300):
        name, names, when = chance.choice(liked)
        if when(machine):
            getattr(machine, name)(**{one: chance.choice(CHOICES[one]) for one in names})
            machine.twin.check()
