"""A naive model of pools that share resources: plain lists and linear scans, each rule as the specification words it.

`World` is all pools together, because resources may sit in several of them (R08). It is slow on purpose: whatever
changed, everything is looked at again. The real rotation must do the same with its heaps and short ways.

    Res      a resource: health, counter, limit
    Place    a resource in a pool; gone after `remove`
    Use      one use that has not ended
    Waiter   somebody in line
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import count

from headgate.resources.affinity import Rendezvous, stable_text

Tags = frozenset[str]
NONE: Tags = frozenset()


@dataclass(eq=False)
class Res:
    id: str
    limit: int | None = None
    status: str = "healthy"
    until: float = 0.0
    last: float = 0.0
    counter: int = 0
    tags: Tags = NONE
    weight: float = 1.0
    began: int = 0  # when, in the order of acquisitions, its latest cooldown began
    bans: dict[str, Ban] = field(default_factory=dict)  # by affinity
    paused: bool = False


@dataclass(eq=False)
class Ban:
    """R38: a cooldown for one affinity; when it is over, how many in a row there were."""

    counter: int = 0
    until: float = 0.0
    began: int = 0
    over: bool = True


@dataclass(eq=False)
class Pool:
    name: str
    strategy: str = "round_robin"
    table: Sequence[float] = (30.0, 120.0, 300.0, 600.0)
    cancels: bool = True
    probes: bool = False
    places: list[Place] = field(default_factory=list)
    turns: dict[Tags, Turns] = field(default_factory=dict)
    drawn: deque[str] = field(default_factory=deque)  # ids that the real one chose by chance, to be judged
    counts: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(("attempts", "successes", "cooldowns", "disables", "sibling_cancels"), 0)
    )


@dataclass(eq=False)
class Place:
    pool: Pool
    res: Res
    gone: bool = False
    ramp: int = 0  # how many uses at a time since the last cooldown; 1 is a probe, 0: as many as ever
    proofs: int = 0  # successes of this round
    seconds: float | None = None  # how long its uses take
    measured: float = 0.0  # when


@dataclass(eq=False)
class Use:
    order: int
    place: Place
    at: float
    affinity: str | None = None
    cancellable: bool = False
    doomed: bool = False


@dataclass(eq=False)
class Waiter:
    number: int
    pool: Pool
    tags: Tags = NONE
    skip: Tags = NONE
    deadline: float | None = None
    affinity: str | None = None
    grant: Use | None = None


@dataclass(eq=False)
class Turns:
    """Whose turn it is in `weighted`: each turn puts a place back by 1/weight, the one furthest in front is next."""

    behind: dict[Place, float] = field(default_factory=dict)
    away: set[Place] = field(default_factory=set)
    level: float = 0.0

    def next(self, places: list[Place], eligible: list[Place]) -> Place | None:
        for place in places:
            if place not in eligible:
                self.away.add(place)
        for place in eligible:  # one that was away, or is new, returns level with the others
            if place in self.away or place not in self.behind:
                self.behind[place] = max(self.behind.get(place, 0.0), self.level)
                self.away.discard(place)
        if not eligible:
            return None
        chosen = min(eligible, key=lambda place: self.behind[place])
        self.level = max(self.level, self.behind[chosen])
        self.behind[chosen] += 1 / chosen.res.weight
        return chosen

    def forget(self, places: Collection[Place]) -> None:
        self.behind = {place: at for place, at in self.behind.items() if place not in places}


@dataclass(frozen=True)
class News:
    """A change of health, as every pool that holds the resource hears it."""

    kind: str
    pool: str
    id: str
    old: str
    until: float = 0.0
    rung: int = 0


@dataclass
class Outcome:
    """What an event led to."""

    news: list[News] = field(default_factory=list)
    doomed: list[Use] = field(default_factory=list)
    revoked: list[Waiter] = field(default_factory=list)
    served: list[Waiter] = field(default_factory=list)
    starved: list[Waiter] = field(default_factory=list)


class World:
    def __init__(self) -> None:
        self.pools: list[Pool] = []
        self.flying: list[Use] = []  # in the order of acquisition
        self.line: list[Waiter] = []  # of all pools, first come first
        self.granted: list[Waiter] = []  # served, and not yet awake
        self._orders = count(1)

    # -- what can be seen ---------------------------------------------------------------------------------------------

    def places(self, res: Res) -> list[Place]:
        """R08: a resource may sit in several pools."""
        return [place for pool in self.pools for place in pool.places if place.res is res]

    def in_flight(self, res: Res) -> list[Use]:
        """Its own uses, and (R72) those of a predecessor that was removed from a pool which now holds it."""
        pools = [place.pool for place in self.places(res)]
        return [use for use in self.flying if use.place.res is res or self._drains_for(use, res, pools)]

    @staticmethod
    def _drains_for(use: Use, res: Res, pools: list[Pool]) -> bool:
        return use.place.gone and use.place.pool in pools and use.place.res.id == res.id

    def eligible(self, place: Place) -> bool:
        """R20; and R74: back from a cooldown, one at a time, then two, then four; uses from before do not count."""
        res = place.res
        has_room = res.limit is None or len(self.in_flight(res)) < res.limit
        since = [use for use in self.flying if use.place is place and use.order > res.began]
        return res.status == "healthy" and not res.paused and has_room and not (place.ramp and len(since) >= place.ramp)

    def matching(self, pool: Pool, tags: Tags = NONE, skip: Collection[str] = ()) -> list[Place]:
        """R25."""
        return [place for place in pool.places if tags <= place.res.tags and place.res.id not in skip]

    def can_hope(self, pool: Pool, tags: Tags = NONE, skip: Collection[str] = ()) -> bool:
        return any(place.res.status != "disabled" for place in self.matching(pool, tags, skip))

    def next_expiry(
        self, pool: Pool, tags: Tags = NONE, skip: Collection[str] = (), affinity: str | None = None
    ) -> float | None:
        alive = [place.res for place in self.matching(pool, tags, skip) if place.res.status != "disabled"]
        alive = [res for res in alive if not res.paused]  # L05: when it is resumed is not known
        times = [self.rests_until(res, affinity) for res in alive]
        return min((time for time in times if time is not None), default=None)

    def is_banned(self, res: Res, affinity: str | None) -> bool:
        """R38."""
        return affinity in res.bans and not res.bans[affinity].over

    def rests_until(self, res: Res, affinity: str | None) -> float | None:
        times = [res.until] if res.status == "cooling_down" else []
        if affinity is not None and self.is_banned(res, affinity):
            times.append(res.bans[affinity].until)
        return max(times, default=None)

    # -- a use begins -------------------------------------------------------------------------------------------------

    def acquire(
        self, pool: Pool, now: float, tags: Tags = NONE, skip: Collection[str] = (), affinity: str | None = None
    ) -> Use | None:
        place = self._choose(pool, now, tags, skip, affinity)
        if place is None:
            return None
        use = Use(next(self._orders), place, now, affinity)
        self.flying.append(use)
        place.res.last = now
        pool.counts["attempts"] += 1
        return use

    def _choose(self, pool: Pool, now: float, tags: Tags, skip: Collection[str], affinity: str | None) -> Place | None:
        places = self.matching(pool, tags, skip)
        eligible = [place for place in places if self.eligible(place) and not self.is_banned(place.res, affinity)]
        if pool.strategy == "weighted":
            return pool.turns.setdefault(tags, Turns()).next(places, eligible)
        if not eligible:
            return None
        if pool.strategy == "primary_backup":  # R22
            return eligible[0]
        if pool.strategy == "sticky" and affinity is not None:
            return _nearest(affinity, eligible)
        if pool.strategy == "least_latency":
            return self._judge(pool.drawn.popleft(), eligible, now)
        # R21; min() takes the first of equals: insertion order.
        return min(eligible, key=lambda place: (len(self.in_flight(place.res)), place.res.last))

    def _judge(self, drawn: str, eligible: list[Place], now: float) -> Place:
        """Of two by chance the better: so anybody but the worst."""
        [chosen] = [place for place in eligible if place.res.id == drawn]
        others = [self._cost(place, now) for place in eligible if place is not chosen]
        assert not others or self._cost(chosen, now) <= max(others)
        return chosen

    def _cost(self, place: Place, now: float) -> tuple[float, int]:
        load = len(self.in_flight(place.res))
        if place.seconds is None:
            return (math.inf if load else 0.0), load
        return place.seconds * math.exp((place.measured - now) / 10.0) * (load + 1), load

    # -- a use ends ---------------------------------------------------------------------------------------------------

    def _measure(self, use: Use, now: float, *, well: bool) -> None:
        """A rise counts at once; a fall, of those that ended well, by how long ago the last one was."""
        place, seconds = use.place, now - use.at
        if place.seconds is None or seconds >= place.seconds:
            place.seconds = seconds
        elif well:
            weight = math.exp((place.measured - now) / 10.0)
            place.seconds = seconds + (place.seconds - seconds) * weight
        place.measured = now

    def ok(self, use: Use, now: float) -> Outcome:
        """R30; R33: one that started before the cooldown began knows nothing about it."""
        self._end(use)
        self._measure(use, now, well=True)
        use.place.pool.counts["successes"] += 1
        res = use.place.res
        if res.status == "healthy" and use.order > res.began:
            res.counter, res.until = 0, 0.0
            for place in self.places(res):  # R74: the first is proof for every pool, then each counts its own
                if place.ramp == 1 or (place.ramp and place is use.place):
                    self._ramp_up(place)
        if use.affinity in res.bans and use.order > res.bans[use.affinity].began:
            del res.bans[use.affinity]
        return self._settle(Outcome(), now)

    @staticmethod
    def _ramp_up(place: Place) -> None:
        place.proofs += 1
        if place.proofs == place.ramp:
            place.ramp, place.proofs = 2 * place.ramp, 0
        if place.ramp >= (64 if place.res.limit is None else place.res.limit):
            place.ramp = 0

    def ended(self, use: Use, now: float) -> Outcome:
        """R30: no verdict; a probe so ended is offered again."""
        self._end(use)
        self._measure(use, now, well=False)
        return self._settle(Outcome(), now)

    def cooled(self, use: Use, seconds: float | None, now: float) -> Outcome:
        """R31, R13; R35: one that started before the cooldown began extends it and does not climb."""
        self._end(use)
        self._measure(use, now, well=False)
        outcome = Outcome()
        res, pool = use.place.res, use.place.pool
        if res.status != "disabled":  # R32
            pool.counts["cooldowns"] += 1
            late = use.order < res.began and res.counter > 0
            if not late:
                res.counter += 1
            if seconds is None:  # R08: by the table of its own pool
                seconds = pool.table[min(res.counter, len(pool.table)) - 1]
            old, res.status = res.status, "cooling_down"
            if old == "healthy":
                res.began = next(self._orders)
            res.until = max(res.until, now + seconds)
            self._stop_ramps(res)
            outcome.news = self._tell("cool", res, old, res.until, res.counter)
            outcome.revoked = self._revoke(res)
            outcome.doomed = self._doom_younger(use)
        return self._settle(outcome, now)

    def cooled_for(self, use: Use, seconds: float | None, now: float) -> Outcome:
        """R38: as R31, R33 and R35 say, for calls with the same affinity; the health of the resource is the same."""
        self._end(use)
        self._measure(use, now, well=False)
        outcome = Outcome()
        res, pool = use.place.res, use.place.pool
        assert use.affinity is not None
        if res.status != "disabled":
            pool.counts["cooldowns"] += 1
            ban = res.bans.setdefault(use.affinity, Ban())
            if use.order > ban.began or not ban.counter:
                ban.counter += 1
            if seconds is None:
                seconds = pool.table[min(ban.counter, len(pool.table)) - 1]
            if ban.over:
                ban.began = next(self._orders)
            ban.until, ban.over = max(ban.until, now + seconds), False
            outcome.news = self._tell(f"cool for {use.affinity}", res, res.status, ban.until, ban.counter)
            outcome.revoked = self._revoke(res, use.affinity)
            outcome.doomed = self._doom_younger(use, use.affinity)
        return self._settle(outcome, now)

    def disabled(self, use: Use, now: float) -> Outcome:
        """R32."""
        self._end(use)
        self._measure(use, now, well=False)
        outcome = Outcome(news=self._disable(use.place))
        outcome.revoked = self._revoke(use.place.res)
        outcome.doomed = self._doom_younger(use)
        return self._settle(outcome, now)

    def _end(self, use: Use) -> None:
        self.flying.remove(use)

    def _doom_younger(self, signaller: Use, affinity: str | None = None) -> list[Use]:
        """R60: strictly younger uses of the same resource. R38: of the same affinity.

        R63: if both pools cancel. R64: if there is a handle.
        """
        doomed = [
            use
            for use in self.flying
            if use.place.res is signaller.place.res
            and use.order > signaller.order
            and (affinity is None or use.affinity == affinity)
            and use.cancellable
            and not use.doomed
            and use.place.pool.cancels
            and signaller.place.pool.cancels
        ]
        for use in doomed:
            use.doomed = True
            use.place.pool.counts["sibling_cancels"] += 1
        return doomed

    def _disable(self, place: Place) -> list[News]:
        res = place.res
        if res.status == "disabled":
            return []
        old, res.status = res.status, "disabled"
        place.pool.counts["disables"] += 1
        self._stop_ramps(res)
        return self._tell("disable", res, old)

    def _stop_ramps(self, res: Res) -> None:
        for place in self.places(res):
            place.ramp, place.proofs = 0, 0

    def _tell(self, kind: str, res: Res, old: str, until: float = 0.0, rung: int = 0) -> list[News]:
        return [News(kind, place.pool.name, res.id, old, until, rung) for place in self.places(res)]

    # -- time passes --------------------------------------------------------------------------------------------------

    def advance(self, pool: Pool, now: float) -> Outcome:
        """R23: a cooled resource returns by itself. Noticed by the pool that looks, and true for all."""
        outcome = Outcome()
        over = [p.res for p in pool.places if p.res.status == "cooling_down" and p.res.until <= now]
        for res in over:
            res.status = "healthy"
            for place in self.places(res):
                place.ramp, place.proofs = int(place.pool.probes), 0
            outcome.news += self._tell("recover", res, "cooling_down")
        for place in pool.places:
            for ban in place.res.bans.values():
                ban.over = ban.over or ban.until <= now
        return self._settle(outcome, now)

    # -- waiting ------------------------------------------------------------------------------------------------------

    def join(self, waiter: Waiter) -> None:
        self.line.append(waiter)

    def leave(self, waiter: Waiter, now: float) -> Outcome:
        """R43: one that wakes and does not take hands on."""
        if waiter in self.line:
            self.line.remove(waiter)
        elif waiter.grant is not None:
            self.wake(waiter)
            return self.ended(waiter.grant, now)
        return Outcome()

    def wake(self, waiter: Waiter) -> None:
        self.granted.remove(waiter)

    def _revoke(self, res: Res, affinity: str | None = None) -> list[Waiter]:
        """Who was granted a resource that now rests, and has not begun to use it, stands again where it stood."""
        back = [waiter for waiter in self.granted if waiter.grant and waiter.grant.place.res is res]
        back = [waiter for waiter in back if affinity is None or waiter.affinity == affinity]
        for waiter in back:
            assert waiter.grant is not None
            self._end(waiter.grant)
            waiter.pool.counts["attempts"] -= 1
            waiter.grant = None
        self.granted = [waiter for waiter in self.granted if waiter not in back]
        self.line = sorted([*self.line, *back], key=lambda waiter: waiter.number)
        return back

    def _settle(self, outcome: Outcome, now: float) -> Outcome:
        """R43: whoever came first takes what suits them, until nobody can; then tell those without hope."""
        while waiter := self._first_that_can_be_served(now):
            self.line.remove(waiter)
            self.granted.append(waiter)
            outcome.served.append(waiter)
        outcome.starved = [waiter for waiter in self.line if self._is_hopeless(waiter)]
        self.line = [waiter for waiter in self.line if waiter not in outcome.starved]
        return outcome

    def _first_that_can_be_served(self, now: float) -> Waiter | None:
        for waiter in self.line:
            waiter.grant = self.acquire(waiter.pool, now, waiter.tags, waiter.skip, waiter.affinity)
            if waiter.grant is not None:
                return waiter
        return None

    def _is_hopeless(self, waiter: Waiter) -> bool:
        places = self.matching(waiter.pool, waiter.tags, waiter.skip)
        alive = [place.res for place in places if place.res.status != "disabled"]
        if waiter.deadline is None:
            return not alive
        return all(res.paused or (self.rests_until(res, waiter.affinity) or 0.0) >= waiter.deadline for res in alive)

    # -- steering (R72) -----------------------------------------------------------------------------------------------

    def add(self, pool: Pool, res: Res, now: float) -> Outcome:
        self.admit(pool, res)
        return self.settle(now)

    def remove(self, pool: Pool, id: str, now: float) -> Outcome:
        self.drop(pool, id)
        return self.settle(now)

    def enable(self, pool: Pool, id: str, now: float) -> Outcome:
        """Clears cooldown and counter."""
        res = self.place(pool, id).res
        news = [] if res.status == "healthy" else self._tell("enable", res, res.status)
        res.status, res.counter, res.until = "healthy", 0, 0.0
        res.bans.clear()
        self._stop_ramps(res)
        return self._settle(Outcome(news=news), now)

    def disable(self, pool: Pool, id: str, now: float) -> Outcome:
        """Cancels nothing."""
        place = self.place(pool, id)
        return self._settle(Outcome(news=self._disable(place), revoked=self._revoke(place.res)), now)

    def set_paused(self, pool: Pool, id: str, now: float, *, paused: bool) -> Outcome:
        """L05: its health is as it was."""
        res = self.place(pool, id).res
        if res.paused is paused:
            return Outcome()
        res.paused = paused
        news = self._tell("pause" if paused else "resume", res, "")
        return self._settle(Outcome(news=news, revoked=self._revoke(res) if paused else []), now)

    def admit(self, pool: Pool, res: Res) -> None:
        pool.places.append(Place(pool, res))

    def drop(self, pool: Pool, id: str) -> None:
        place = self.place(pool, id)
        place.gone = True
        pool.places.remove(place)

    def retag(self, res: Res, limit: int | None, tags: Tags, weight: float) -> None:
        if (limit, tags, weight) == (res.limit, res.tags, res.weight):
            return
        res.limit, res.tags, res.weight = limit, tags, weight
        for place in self.places(res):
            for turns in place.pool.turns.values():
                turns.forget([place])

    def reorder(self, pool: Pool, ids: Sequence[str]) -> None:
        if [place.res.id for place in pool.places] == list(ids):
            return
        pool.places = [self.place(pool, one) for one in ids]
        for turns in pool.turns.values():
            turns.forget(pool.places)

    def settle(self, now: float) -> Outcome:
        return self._settle(Outcome(), now)

    @staticmethod
    def place(pool: Pool, id: str) -> Place:
        return next(place for place in pool.places if place.res.id == id)


def _nearest(affinity: str, places: list[Place]) -> Place:
    """R24: whom the hash prefers, asked anew each time; what the hash is, other tests say."""
    rendezvous = Rendezvous()
    for place in places:
        rendezvous.admit(place.res.id, place.res.weight)
    [(_, first), *_], _ = rendezvous.favourites(stable_text(affinity))
    return next(place for place in places if place.res.id == first)
