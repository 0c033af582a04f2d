"""The rotation: who may be used, who is resting, who waits. Pure: it takes `now` and events and returns what to do.

A *resource* carries its health; a *seat* is its place in one rotation; a *flight* is one use of it that has not
ended. A resource may have seats in several rotations: what changes its health re-indexes all of them and is reported
for each.

    acquire ──> flight ──┬─> ok          healthy: counter and cooldown cleared, unless a later cooldown knows better
                         ├─> cooled      rests; younger flights are to be cancelled
                         ├─> disabled    never again; younger flights are to be cancelled
                         └─> ended       no verdict (retried, cancelled from outside, abandoned)

Each of the four ends the flight, gives its place to the first waiter that can use it, and returns the effects for the
shell to carry out: `Cool`, `Disable`, `Recover`, `Enable`, `Cancel`, `Serve`, `Starve`. An empty result is ``None``:
most calls have none, and a list nobody needs is a list nobody should make.

One outage is one escalation. A cooldown remembers the newest acquisition at its beginning (`Resource._outage`);
verdicts of flights up to that one are *late*: a late cooldown extends at the current rung and does not climb, a late
success clears nothing. Order is by acquisition number, never by clock.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from itertools import count
from typing import Any, cast

from headgate.core.checks import Affinity
from headgate.core.wait_queue import Line, serve
from headgate.errors import InvalidArgument, UnknownResource
from headgate.resources.effects import Cancel, Cool, Disable, Effects, Enable, Recover, Serve, Starve
from headgate.resources.members import ANY, DOOMED, RAMP_TOP, Member, Requirement, Totals, Trial, Use, WaitTicket
from headgate.resources.model import Resource
from headgate.resources.stats import Looking
from headgate.resources.strategies import GuidedPicker, Occasion, Picker, Strategy

MAX_CLASSES = 64  # sets of tags whose order is kept; the one longest known goes first


def _no_chance() -> float:
    return 0.0


_orders = count(1)  # one series for all rotations: a resource shared by two has one order of acquisition


class Rotation(Looking):
    """The decisions of one pool."""

    def __init__(
        self,
        resources: Iterable[Resource[Any]],
        *,
        strategy: Strategy,
        cooldown_table: Sequence[float],
        cancel_siblings: bool = True,
        probe_on_recovery: bool = False,
        chance: Callable[[], float] = _no_chance,
        owner: Any = None,
    ) -> None:
        """`chance` draws a number from 0 to 1, for strategies that choose by it."""
        self.owner: Any = owner
        """The shell that carries out effects; opaque here."""
        self.seats: dict[str, Member] = {}
        self.line: Line[WaitTicket] = Line()
        self.cooling: list[tuple[float, int, Member]] = []
        self._strategy = strategy
        self._table = tuple(cooldown_table)
        self._cancel_siblings = cancel_siblings
        self._probe_on_recovery = probe_on_recovery
        self._indexes = count()
        self._chance = chance
        self._main: Picker = self._new_picker()
        # Asked once, so that pickers which want to know nothing cost what they always did.
        self._guided = hasattr(self._main, "pick_for")
        self._learn: Callable[[Member, float, float, bool], object] | None = getattr(self._main, "learn", None)
        self._pickers: dict[frozenset[str], Picker] = {frozenset(): self._main}
        self._sizes: dict[frozenset[str], int] = {frozenset(): 0}  # how many seats each of them orders
        self._draining = {}
        self._back: list[Rotation] = []  # where a waiter stands again, and has not been looked at since
        self._left: list[Resource[Any]] = []  # dropped, and not yet settled: other pools may hold them
        self._totals = Totals()
        for resource in resources:
            self.admit(resource)

    # -- a use begins -------------------------------------------------------------------------------------------------

    def acquire(
        self, now: float, want: Requirement = ANY, avoid: Collection[str] = (), affinity: Affinity | None = None
    ) -> Use | None:
        """Choose the best resource for `want`, not one of `avoid`, and take it; None when none is eligible.

        `affinity` never decides whether there is one, only which; most strategies do not look at it.
        """
        picker = self._main if not want.tags else self._picker(want.tags)
        skip = want.skip.union(avoid) if want.skip or avoid else ()
        if self._guided:
            seat = cast(GuidedPicker, picker).pick_for(skip, Occasion(now, self._chance, affinity))
        else:
            seat = picker.pick(skip)
        return None if seat is None else self.take(seat, now)

    def take(self, seat: Member, now: float) -> Use:
        """Take this one, whoever chose it."""
        resource = seat.resource
        resource.last_acquired_at = now
        seat.acquires += 1
        order = next(_orders)
        flight = resource._flights[order] = Use(order, seat, now)
        trial = seat.trial
        if trial is not None:
            trial.aloft.add(order)
            seat.shut = seat.shut or trial.is_full
        return flight

    def matching(self, want: Requirement) -> int:
        """How many resources `want` could ever mean."""
        if not want.tags and not want.skip:
            return len(self.seats)
        self._picker(want.tags)
        skipped = (seat for seat in map(self.seats.get, want.skip) if seat is not None)
        return self._sizes[want.tags] - sum(want.tags <= seat.resource.tags for seat in skipped)

    # -- a use ends ---------------------------------------------------------------------------------------------------

    def ok(self, flight: Use, now: float = 0.0) -> Effects | None:
        """It worked, or failed for reasons of its own: the resource is fine."""
        seat = flight.seat
        resource = seat.resource
        seat.successes += 1
        troubled = resource.consecutive_cooldown or resource.cooldown_until or seat.trial
        if troubled and flight.order > resource._outage:
            self._prove(flight)
        del resource._flights[flight.order]
        if seat.plain:
            seat.pickers[0].offer(seat)
            return self._serve([resource], now) if self.line else None
        return self._landed(flight, now, well=True)

    def ended(self, flight: Use, now: float = 0.0) -> Effects | None:
        """It ended and says nothing about the resource."""
        del flight.seat.resource._flights[flight.order]
        return self._landed(flight, now)

    def cooled(self, flight: Use, seconds: float | None = None, *, now: float) -> Effects:
        """The resource asked for a rest of `seconds`, or of what the table says."""
        seat = flight.seat
        resource = seat.resource
        del resource._flights[flight.order]
        effects: Effects = []
        if resource.status != "disabled":
            seat.cooldowns += 1
            effects += self._cool(flight, seconds, now)
            effects += self._younger(flight)
        effects += self._landed(flight, now) or ()
        effects += self._hopeless(_holders(resource))
        return effects

    def disabled(self, flight: Use, now: float = 0.0) -> Effects:
        """The resource is dead."""
        resource = flight.seat.resource
        del resource._flights[flight.order]
        effects: Effects = self._disable(flight.seat, flight)
        effects += self._younger(flight)
        effects += self._landed(flight, now) or ()
        effects += self._hopeless(_holders(resource))
        return effects

    # -- time passes --------------------------------------------------------------------------------------------------

    def advance(self, now: float) -> Effects:
        """End the cooldowns that are over, and serve those who waited for them."""
        effects: Effects = []
        recovered: list[Resource[Any]] = []
        while self.cooling and self.cooling[0][0] <= now:
            until, _, seat = heapq.heappop(self.cooling)
            if self._rests(seat, until):
                recovered.append(seat.resource)
                effects += self._reopen(seat.resource, on_trial=True)
        effects += self._serve(recovered, now) or ()
        return effects

    def next_expiry(self, want: Requirement = ANY) -> float | None:
        """When the first cooldown ends of a resource that `want` could use."""
        while self.cooling and not self._rests(self.cooling[0][2], self.cooling[0][0]):
            heapq.heappop(self.cooling)
        if want is ANY:
            return self.cooling[0][0] if self.cooling else None
        return min(
            (seat.resource.cooldown_until for seat in self._matching(want) if seat.resource.status == "cooling_down"),
            default=None,
        )

    # -- waiting ------------------------------------------------------------------------------------------------------

    def leave(self, ticket: WaitTicket, now: float) -> Effects | None:
        """Step out of line; what was granted meanwhile is handed on."""
        self.line.leave(ticket)
        grant, ticket.grant = ticket.grant, None
        return None if grant is None else self.ended(grant, now)

    def can_hope(self, want: Requirement) -> bool:
        """Can anything that `want` could use come free by itself?"""
        return any(seat.resource.status != "disabled" for seat in self._matching(want))

    # -- steering -----------------------------------------------------------------------------------------------------

    def add(self, resource: Resource[Any], now: float = 0.0) -> Effects | None:
        """A new resource, last in order."""
        self.admit(resource)
        return self._serve([resource], now)

    def remove(self, resource_id: str, now: float = 0.0) -> Effects:
        """Forget it at once. What is in flight drains, and counts against a successor of the same id."""
        self.drop(resource_id)
        resource = self._left.pop()
        return [*(self._serve([resource], now) or ()), *self._hopeless([self])]

    def admit(self, resource: Resource[Any]) -> None:
        """`add`, before anybody is told."""
        resource_id = resource.resource_id
        if resource_id in self.seats:
            raise InvalidArgument(
                f"Duplicate resource_id in pool: {resource_id!r}",
                remedy="Give each resource an id of its own, or remove the old one first.",
            )
        seat = self.seats[resource_id] = Member(resource, self, next(self._indexes))
        seat.shut = resource.status != "healthy"
        if resource.status == "cooling_down":
            heapq.heappush(self.cooling, (resource.cooldown_until, seat.index, seat))
        heirlooms = self._draining.get(resource_id)
        if heirlooms:
            resource._flights = dict(sorted({**heirlooms, **resource._flights}.items()))
        resource._seats.append(seat)
        self._enter(seat)
        _refresh(resource)

    def drop(self, resource_id: str) -> None:
        """`remove`, before anybody is told."""
        seat = self._find(resource_id)
        resource = seat.resource
        del self.seats[resource_id]
        resource._seats.remove(seat)
        inherited = self._draining.get(resource_id, {})
        for order, flight in inherited.items():
            if flight.seat.resource is not resource:
                resource._flights.pop(order, None)  # of its predecessor: it drains on, and is no longer its concern
        draining = {**inherited, **{order: f for order, f in resource._flights.items() if f.seat is seat}}
        if draining:
            self._draining[resource_id] = draining
        self._withdraw(seat)
        seat.gone, seat.plain = True, False
        if resource.status == "cooling_down":
            self._tidy()  # lest its value stays in memory until then
        self._totals.absorb(seat)
        _refresh(resource)
        self._offer(resource)
        self._left.append(resource)

    def settle(self, now: float) -> Effects:
        """After several of `admit`, `drop`, `retag`, `reorder`: serve those who wait, or tell them there is no hope."""
        resources = [*(seat.resource for seat in self.seats.values()), *self._left]
        self._left = []
        touched = {self: None, **{rotation: None for resource in resources for rotation in _holders(resource)}}
        return [*(self._serve(resources, now) or ()), *self._hopeless(touched)]

    def enable(self, resource_id: str, now: float = 0.0) -> Effects:
        """Declare it usable: no cooldown, no counter, no trial."""
        seat = self._find(resource_id)
        resource = seat.resource
        old = resource.status
        effects: Effects = []
        if old != "healthy":
            effects += [Enable(resource_id, old, other) for other in resource._seats]
        self._reopen(resource, on_trial=False)
        resource.consecutive_cooldown, resource.cooldown_until = 0, 0.0
        effects += self._serve([resource], now) or ()
        return effects

    def disable(self, resource_id: str, now: float = 0.0) -> Effects:
        """Take it out of use. Cancels nothing: this is policy, not evidence."""
        seat = self._find(resource_id)
        effects = self._disable(seat, None)
        effects += self._serve([seat.resource], now) or ()  # others may serve those it was taken back from
        return effects + self._hopeless(_holders(seat.resource))

    def reorder(self, resource_ids: Sequence[str]) -> None:
        """Put the seats into this order."""
        if list(resource_ids) == list(self.seats):
            return
        self.seats = {resource_id: self.seats[resource_id] for resource_id in resource_ids}
        for seat in self.seats.values():
            for picker in seat.pickers:
                picker.withdraw(seat)
        for seat in self.seats.values():
            seat.index = next(self._indexes)
            for picker in seat.pickers:
                picker.offer(seat)

    def retag(self, resource: Resource[Any], like: Resource[Any]) -> None:
        """Take over another's limit, tags and weight; its health stays."""
        if (resource.max_in_flight, resource.tags, resource.weight) == (like.max_in_flight, like.tags, like.weight):
            return
        for seat in resource._seats:
            seat.rotation._withdraw(seat)
        resource.max_in_flight, resource.tags, resource.weight = like.max_in_flight, like.tags, like.weight
        for seat in resource._seats:
            seat.rotation._enter(seat)
        _refresh(resource)

    def in_flight(self, resource_id: str) -> list[Use]:
        """Uses of a resource that have not ended, oldest first."""
        return list(self._find(resource_id).resource._flights.values())

    # -- inside -------------------------------------------------------------------------------------------------------

    def _enter(self, seat: Member) -> None:
        """Let it be chosen by every order that its tags belong to."""
        orders = [(tags, picker) for tags, picker in self._pickers.items() if tags <= seat.resource.tags]
        seat.pickers = tuple(picker for _, picker in orders)
        for tags, picker in orders:
            self._sizes[tags] += 1
            picker.offer(seat)

    def _withdraw(self, seat: Member) -> None:
        for tags, picker in self._pickers.items():
            if picker in seat.pickers:
                self._sizes[tags] -= 1
                picker.withdraw(seat)
        seat.pickers = ()

    def _find(self, resource_id: str) -> Member:
        try:
            return self.seats[resource_id]
        except (KeyError, TypeError):
            known = ", ".join(map(repr, list(self.seats)[:8])) + (", ..." if len(self.seats) > 8 else "")
            raise UnknownResource(
                f"unknown resource_id {resource_id!r}: the pool has {known or 'no resources'}",
            ) from None

    def _picker(self, tags: frozenset[str]) -> Picker:
        """The order of those that carry these tags, kept from the first call that asks for it."""
        picker = self._pickers.get(tags)
        if picker is None:
            if len(self._pickers) > MAX_CLASSES:
                self._forget(next(tags for tags in self._pickers if tags))
            picker = self._pickers[tags] = self._new_picker()
            self._sizes[tags] = 0
            for seat in self.seats.values():
                if tags <= seat.resource.tags:
                    seat.pickers += (picker,)
                    seat.plain = False
                    self._sizes[tags] += 1
                    picker.offer(seat)
        return picker

    def _new_picker(self) -> Picker:
        return cast(Picker, self._strategy.picker())  # of a guided one `pick` is never called

    def _forget(self, tags: frozenset[str]) -> None:
        del self._sizes[tags]
        dropped = self._pickers.pop(tags)
        for seat in self.seats.values():
            seat.pickers = tuple(picker for picker in seat.pickers if picker is not dropped)
            _refresh(seat.resource)

    def _matching(self, want: Requirement) -> Iterator[Member]:
        return (seat for seat in self.seats.values() if want.fits(seat.resource))

    def _tidy(self) -> None:
        """Forget cooldowns that are over, and seats that are gone."""
        resting = {entry[2]: entry for entry in self.cooling if self._rests(entry[2], entry[0])}
        self.cooling[:] = sorted(resting.values(), key=lambda entry: entry[:2])

    def _rests(self, seat: Member, until: float) -> bool:
        resource = seat.resource
        return not seat.gone and resource.status == "cooling_down" and resource.cooldown_until == until

    def _prove(self, flight: Use) -> None:
        """A success since the last cooldown began. The first is proof for all pools; then each ramps up by its own."""
        resource = flight.seat.resource
        if resource.status == "disabled":
            return
        resource.consecutive_cooldown = 0
        resource.cooldown_until = 0.0
        top = RAMP_TOP if resource.max_in_flight is None else resource.max_in_flight
        for seat in resource._seats:
            trial = seat.trial
            if trial is not None and (trial.limit == 1 or seat is flight.seat):
                if trial.succeeded(top):
                    seat.trial = None
                seat.reckon()
        _refresh(resource)

    def _cool(self, flight: Use, seconds: float | None, now: float) -> Effects:
        resource = flight.seat.resource
        old = resource.status
        late = flight.order <= resource._outage and resource.consecutive_cooldown > 0
        if not late:
            resource.consecutive_cooldown += 1
        if seconds is None:
            seconds = self._table[min(resource.consecutive_cooldown, len(self._table)) - 1]
        if old == "healthy":
            resource._outage = next(_orders)
        until = max(resource.cooldown_until, now + seconds)
        for seat in resource._seats:
            seat.shut, seat.trial = True, None
            if old == "healthy" or until > resource.cooldown_until:
                heapq.heappush(seat.rotation.cooling, (until, seat.index, seat))
        resource.status, resource.cooldown_until = "cooling_down", until
        for rotation in _holders(resource):
            if len(rotation.cooling) > 4 * len(rotation.seats) + 64:
                rotation._tidy()
        _refresh(resource)
        self._revoke(resource)
        rung = resource.consecutive_cooldown
        left = seconds if until == now + seconds else until - now
        return [Cool(resource.resource_id, until, left, rung, old, seat, flight) for seat in resource._seats]

    def _disable(self, seat: Member, flight: Use | None) -> Effects:
        resource = seat.resource
        old = resource.status
        if old == "disabled":
            return []
        resource.status = "disabled"
        self._revoke(resource)
        seat.disables += 1
        for other in resource._seats:
            other.shut, other.trial = True, None
        _refresh(resource)
        return [Disable(resource.resource_id, old, other, flight) for other in resource._seats]

    def _reopen(self, resource: Resource[Any], *, on_trial: bool) -> Effects:
        resource.status = "healthy"
        for seat in resource._seats:
            seat.shut = False
            seat.trial = Trial() if on_trial and seat.rotation._probe_on_recovery else None
            for picker in seat.pickers:
                picker.offer(seat)
        _refresh(resource)
        return [Recover(resource.resource_id, seat) for seat in resource._seats]

    def _younger(self, flight: Use) -> Effects:
        """Flights acquired after this one. The elder may already have had their effect upstream and are left alone."""
        effects: Effects = []
        if not self._cancel_siblings:
            return effects
        resource = flight.seat.resource
        for other in reversed(resource._flights.values()):
            if other.order < flight.order:
                break
            seat = other.seat
            inherited = seat.resource is not resource  # a use of its predecessor, which only counts against the limit
            if inherited or other.status != "in_flight" or not seat.rotation._cancel_siblings:
                continue
            if other.handle is None or other.handle is DOOMED:
                other.handle = DOOMED  # it may be in its first step, on another thread: then it is told when it can be
                continue
            other.status = "cancelled"
            seat.sibling_cancels += 1
            if seat.gone:
                seat.rotation._totals.absorb(seat)
            effects.append(Cancel(other))
        return effects

    def _landed(self, flight: Use, now: float, *, well: bool = False) -> Effects | None:
        """A flight is over: whoever could use its place may."""
        seat = flight.seat
        if seat.trial is not None and flight.order in seat.trial.aloft:
            seat.trial.aloft.remove(flight.order)
            seat.reckon()
        if seat.gone:
            self._drained(flight)
        elif self._learn is not None:
            self._learn(seat, max(0.0, now - flight.acquired_at), now, well)
        if seat.resource._seats.prune():
            _refresh(seat.resource)  # another pool that held it was dropped
        offered = [seat.resource]
        heir = self.seats.get(seat.resource.resource_id) if seat.gone else None
        if heir is not None:
            offered.append(heir.resource)
        for resource in offered:
            self._offer(resource)
        return self._serve(offered, now) or None

    def _offer(self, resource: Resource[Any]) -> None:
        """It may have moved forward, in every rotation that holds it."""
        for seat in resource._seats:
            for picker in seat.pickers:
                picker.offer(seat)

    def _drained(self, flight: Use) -> None:
        """A flight of a removed seat ended: its id's next owner has one place more."""
        resource_id = flight.seat.resource.resource_id
        self._totals.absorb(flight.seat)
        draining = self._draining.get(resource_id, {})
        draining.pop(flight.order, None)
        heir = self.seats.get(resource_id)
        if heir is not None and heir.resource._flights.pop(flight.order, None) is not None:
            self._offer(heir.resource)
        if not draining:
            self._draining.pop(resource_id, None)
            if heir is not None:
                _refresh(heir.resource)

    def _serve(self, resources: Iterable[Resource[Any]], now: float) -> Effects | None:
        """Let waiters have what came free, in every rotation that holds one of these: longest wait first, of all."""
        resources = list(resources)
        holders = [*(seat.rotation for resource in resources for seat in resource._seats), *self._back]
        waiting = {rotation: None for rotation in holders if rotation.line}
        if not waiting:
            return None
        freed = [] if self._back else resources  # who could use none of these could not before, and cannot now
        served = serve([(one.line, partial(one._grant, now, freed)) for one in waiting])
        for ticket in served:
            if ticket.grant is not None:
                ticket.grant.ticket = ticket
        return [Serve(ticket) for ticket in served]

    def _grant(self, now: float, freed: list[Resource[Any]], ticket: WaitTicket) -> Use | None:
        want = ticket.want
        if freed and want is not ANY and not any(map(want.fits, freed)):
            return None
        return self.acquire(now, want, (), ticket.affinity)

    def _revoke(self, resource: Resource[Any]) -> None:
        """Take back what waiters were granted and have not begun to use: they stand where they stood."""
        for flight in list(reversed(resource._flights.values())):
            ticket = flight.ticket
            if ticket is not None and flight.seat.resource is resource:
                flight.ticket = None
                flight.seat.acquires -= 1
                del resource._flights[flight.order]
                if flight.seat.gone:
                    flight.seat.rotation._drained(flight)
                ticket.rotation.line.rejoin(ticket)
                self._back.append(ticket.rotation)

    def _hopeless(self, rotations: Iterable[Rotation]) -> Effects:
        """Waiters that nothing can come for any more."""
        effects: Effects = []
        looked_at = dict.fromkeys([*rotations, *self._back])
        self._back = []
        for rotation in looked_at:
            if not rotation.line:
                continue
            hope: dict[Requirement, tuple[bool, float]] = {}
            for ticket in list(rotation.line):
                if ticket.want not in hope:
                    hope[ticket.want] = rotation._outlook(ticket.want)
                can_come, earliest = hope[ticket.want]
                if not can_come or (ticket.deadline is not None and earliest >= ticket.deadline):
                    rotation.line.leave(ticket)
                    effects.append(Starve(ticket))
        return effects

    def _outlook(self, want: Requirement) -> tuple[bool, float]:
        """Can anything come for `want`, and not before when? (In use counts as any moment.)"""
        matching = [seat.resource for seat in self._matching(want) if seat.resource.status != "disabled"]
        times = [r.cooldown_until if r.status == "cooling_down" else 0.0 for r in matching]
        return bool(matching), min(times, default=0.0)


def _holders(resource: Resource[Any]) -> list[Rotation]:
    return [seat.rotation for seat in resource._seats]


def _refresh(resource: Resource[Any]) -> None:
    """Note for each seat whether the short way may be taken when a flight of it ends."""
    alone = len(resource._seats) == 1
    for seat in resource._seats:
        draining = resource.resource_id in seat.rotation._draining
        learns = seat.rotation._learn is not None
        seat.plain = alone and seat.trial is None and not draining and not learns and len(seat.pickers) == 1
