"""The rotation decides which resource is used next, which ones cool down, and which waiter gets what comes free.

Pure: it takes `now` and events, and returns what to do. A *resource* carries its health; a *member* is its membership
of one rotation; a *use* is one call's hold on it. A resource may be a member of several rotations: a change of its
health re-indexes all of them and is reported for each.

    acquire ──> use ──┬─> ok          healthy: counter and cooldown cleared, unless a later cooldown knows better
                      ├─> cooled      cools down; younger uses are to be cancelled
                      ├─> disabled    out until it is enabled; younger uses are to be cancelled
                      └─> ended       no verdict (retried, cancelled from outside, abandoned)

Each of the four ends the use, gives what came free to the first waiter that can use it, and returns the effects for the
engine to carry out: `Cool`, `Disable`, `Recover`, `Enable`, `Tell`, `Cancel`, `Serve`, `Starve`. An empty result is
``None``: most calls have none, and need no list.

One outage counts as one cooldown in a row. A cooldown remembers the newest acquisition at its beginning
(`Sharing.outage`); verdicts of uses up to that one are *late*: a late cooldown extends the current one without counting
as another, and a late success clears nothing. Order is by acquisition number, never by clock.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, cast

from headgate.core.checks import Affinity
from headgate.core.wait_queue import WaitQueue, serve
from headgate.errors import InvalidArgument, UnknownResource
from headgate.gate.adaptive import AdaptiveLevel
from headgate.resources import affinity_cooldowns
from headgate.resources.accounts import Account
from headgate.resources.cooldowns import SAME_UNTIL, Cooldown, cooldown_after, take_rest
from headgate.resources.costs import AnyCost
from headgate.resources.effects import (
    Cool,
    Disable,
    Effects,
    Enable,
    Limit,
    Pause,
    Recover,
    Serve,
    Starve,
    Tell,
    Watch,
)
from headgate.resources.holding import ask_others, hold, let_go, opened, overtake, unspent, unwatched
from headgate.resources.members import (
    ANY,
    Adopted,
    FurtherTicket,
    Member,
    Requirement,
    Totals,
    Trial,
    Use,
    WaitTicket,
    advance_trials,
    holders,
    hopeless,
    offer,
    refresh,
)
from headgate.resources.model import Resource, fields_of, limit_of, set_account, update_limit, update_number
from headgate.resources.openings import Openings, opens_at
from headgate.resources.permits import return_permits
from headgate.resources.pickers import GuidedPicker, Occasion, Picker, PickersByTags
from headgate.resources.siblings import younger_siblings
from headgate.resources.strategies import Strategy

if TYPE_CHECKING:
    from headgate.resources.engine import Engine


def _no_chance() -> float:
    return 0.0


_orders = count(1)  # one series for all rotations: a resource shared by two has one order of acquisition


class Rotation:
    """The members of one pool, their uses and their waiters; decides and does nothing itself."""

    def __init__(
        self,
        resources: Iterable[Resource[Any]],
        *,
        strategy: Strategy,
        cooldown_table: Sequence[float],
        cancel_siblings: bool = True,
        probe_on_recovery: bool = False,
        chance: Callable[[], float] = _no_chance,
        owner: Engine[Any] | None = None,
    ) -> None:
        """`chance` draws a number from 0 to 1, for strategies that choose by it."""
        self.owner: Engine[Any] | None = owner
        """The engine that carries out effects; not used here."""
        self.members: dict[str, Member] = {}
        """By resource id, in pool order."""
        self.wait_queue: WaitQueue[WaitTicket] = WaitQueue()
        self.openings: Openings = Openings(self.members)
        self.cooling: list[tuple[float, int, Member]] = self.openings.heap
        """The heap of the openings: if it is empty, no member cools down and no quota is spent."""
        self.cancel_siblings: bool = cancel_siblings
        self.probe_on_recovery: bool = probe_on_recovery
        self.is_shared: bool = False
        self.check_lease: Callable[[float], None] | None = None
        """Whether other processes are told what its calls learn."""
        self.shares_quotas: bool = False
        """Whether it has resources whose quota processes share."""
        self.cooling_for: dict[Affinity, set[str]] = {}
        """The ids of members that cool down for one affinity alone, by affinity."""
        self.paused: set[str] = set()
        """The ids of members that are paused."""
        self.totals: Totals = Totals()
        self.pickers: PickersByTags = PickersByTags(strategy)
        self._table = tuple(cooldown_table)
        self._indexes = count()
        self._chance = chance
        self._main: Picker = self.pickers.main
        # Asked once, so that a picker without these methods costs nothing more.
        self._guided = hasattr(self._main, "pick_for")
        self._learn: Callable[[Member, float, float, bool], object] | None = getattr(self._main, "learn", None)
        self._draining: dict[str, dict[int, Use]] = {}  # uses of removed members, by resource id
        self._requeued: list[Rotation] = []  # whose waiters went back to the queue, and were not looked at since
        self._dropped: list[Resource[Any]] = []  # before `settle`: other pools may hold them
        for resource in resources:
            self.admit(resource)

    # -- a use begins -------------------------------------------------------------------------------------------------

    def acquire(
        self,
        now: float,
        requirement: Requirement = ANY,
        avoid: Collection[str] = (),
        affinity: Affinity | None = None,
        cost: AnyCost = 0.0,
        ticket: WaitTicket | None = None,
    ) -> Use | None:
        """Choose the best resource for `requirement`, not one of `avoid`, and take it; None when none is eligible.

        Resources that cool down for the `affinity` are not eligible. Otherwise it decides only which one is chosen, and
        most strategies do not look at it. `cost` is what the use takes of a quota, and `ticket` the place of a waiter.
        """
        if self.check_lease is not None:
            self.check_lease(now)
        picker, skip = self._main, avoid
        if requirement is not ANY or affinity is not None:
            picker = self._picker(requirement.tags) if requirement.tags else self._main
            skip = requirement.skip.union(avoid) if requirement.skip or avoid else ()
            if self.cooling_for:
                skip = self.avoided(skip, affinity)
        while True:
            if self._guided:
                member = cast(GuidedPicker, picker).pick_for(skip, Occasion(now, self._chance, affinity))
            else:
                member = picker.pick(skip)
            if member is None:
                return None
            if member.plain or (account := member.sharing.account) is None or account.admits(cost, now, ticket):
                if affinity is None:
                    return self.take(member, now, cost)
                use = self.take(member, now, cost)
                use.affinity = affinity
                return use
            skip = {*skip, member.resource.resource_id}

    def avoided(self, ids: Collection[str], affinity: Affinity | None) -> Collection[str]:
        """Add those that cool down for an affinity to the ids of resources that a call does not use."""
        cooling = None if affinity is None else self.cooling_for.get(affinity)
        return ids if cooling is None else cooling.union(ids)

    def acquire_unpaced(
        self,
        now: float,
        requirement: Requirement,
        avoid: Collection[str],
        affinity: Affinity | None,
        cost: AnyCost,
    ) -> Use | None:
        """Take a resource for a call that cannot wait: its quota has enough left, and only the pace says to wait.

        Not while other calls wait: the pace is theirs.
        """
        if self.wait_queue:
            return None
        avoid = self.avoided(avoid, affinity)
        for member in self.matching_members(requirement):
            account = member.sharing.account
            usable = account is not None and member.lacks_only_quota and member.resource.resource_id not in avoid
            if usable and account is not None and account.spares(cost, now):
                use = self.take(member, now, cost)
                use.affinity = affinity
                return use
        return None

    def take(self, member: Member, now: float, cost: AnyCost = 0.0) -> Use:
        """Begin a use of this member, whoever chose it."""
        resource = member.resource
        resource.last_acquired_at = now
        member.acquires += 1
        order = next(_orders)
        use = member.uses[order] = Use(order, member, now)
        trial = member.trial
        if trial is not None:
            trial.running.add(order)
            member.unavailable = member.unavailable or trial.is_full
        if not member.plain:
            self._note_limits(use, cost, now)
        return use

    def _note_limits(self, use: Use, cost: AnyCost, now: float) -> None:
        """Note what a use takes of limits that learn from how it ends."""
        member = use.member
        account, resource = member.sharing.account, member.resource
        if member.sharing.adaptive is not None:
            elsewhere = (resource.max_in_flight or 0) - (resource.limit or 0)  # permits of other processes: all in use
            use.level = len(member.uses) + max(0, elsewhere)
        if account is not None:
            use.level = use.level or -1
            use.reservation = account.reserve(cost, now)
            account.refresh(now)

    def take_further(self, use: Use, now: float, ticket: FurtherTicket | None = None) -> Use | None:
        """Take another request of the quota of a running use; None: it must wait for that.

        What is returned is not a use of the resource: it ends here, and only counts.
        """
        further, account = Use(next(_orders), use.member, now), use.member.sharing.account
        if account is None:
            return further
        if not account.admits(0.0, now, ticket):
            return None
        account.reserve(0.0, now)  # it is never settled: nobody says how many tokens it used
        account.refresh(now)
        return further

    def matching(self, requirement: Requirement) -> int:
        """Count the members that fit `requirement`, whatever their status."""
        if not requirement.tags and not requirement.skip:
            return len(self.members)
        self._picker(requirement.tags)
        skipped = (member for member in map(self.members.get, requirement.skip) if member is not None)
        return self.pickers.size(requirement.tags) - sum(requirement.tags <= member.resource.tags for member in skipped)

    # -- a use ends ---------------------------------------------------------------------------------------------------

    def ok(self, use: Use, now: float = 0.0) -> Effects | None:
        """End a use that says its resource is fine: it worked, or failed for reasons of its own."""
        member = use.member
        resource = member.resource
        member.successes += 1
        troubled = resource.consecutive_cooldown or resource.cooldown_until or member.trial
        if troubled and not use.is_late:
            return self._proved(use, now)
        del member.uses[use.order]
        if member.plain:
            member.pickers[0].offer(member)
            return self._serve([resource], now) if self.wait_queue else None
        return self._after_use(use, now, well=True)

    def ended(self, use: Use, now: float = 0.0) -> Effects | None:
        """End a use that says nothing about its resource."""
        del use.member.uses[use.order]
        return self._after_use(use, now)

    def cooled(
        self, use: Use, seconds: float | None = None, *, now: float, affinity: Affinity | None = None
    ) -> Effects:
        """End a use that asks for a cooldown of `seconds`, or of what the table says; for one affinity, or all."""
        member = use.member
        resource = member.resource
        del member.uses[use.order]
        effects: Effects = []
        adapts = member.sharing.adapts if affinity is None else None
        if adapts is not None:
            use.is_refused = True
            effects += self._adapt(use, now)
        use.level = 0
        if resource.status != "disabled":
            member.cooldowns += 1
            if adapts is not None and seconds is None:
                effects += self._pause(use, adapts.rest, now)
            elif affinity is None:
                effects += self._cool(use, seconds, now)
            else:
                effects += self._cool_for(use, affinity, seconds, now)
            # A call within a quota, or within a limit that is found, may well be accepted, and then it is paid for.
            if member.sharing.account is None and (adapts is None or seconds is not None):
                effects += younger_siblings(use, affinity)
        effects += self._after_use(use, now) or ()
        effects += self._tell_hopeless(holders(resource), now)
        return effects

    def disabled(self, use: Use, now: float = 0.0) -> Effects:
        """End a use that found its resource unusable."""
        resource = use.member.resource
        del use.member.uses[use.order]
        use.level = 0
        effects: Effects = self._disable(use.member, use, now)
        effects += younger_siblings(use)
        effects += self._after_use(use, now) or ()
        effects += self._tell_hopeless(holders(resource), now)
        return effects

    # -- time passes --------------------------------------------------------------------------------------------------

    def due(self, now: float) -> bool:
        """Whether a member opens that `advance` has not seen."""
        return bool(self.cooling) and self.cooling[0][0] <= now

    def advance(self, now: float) -> Effects:
        """End the cooldowns that are over, open what has some of its quota again, and serve those who waited."""
        effects: Effects = []
        rested: list[Resource[Any]] = []
        accounts: set[Account | None] = set()
        while (member := self.openings.pop(now)) is not None:
            resource = member.resource
            if resource.status == "cooling_down" and resource.cooldown_until <= now:
                rested.append(resource)
                effects += self._reopen(resource, on_trial=True)
            if affinity_cooldowns.end_due(resource, now):
                rested.append(resource)
            accounts.add(member.sharing.account)
        effects += self._serve(rested, now, accounts) or ()
        return effects

    def next_expiry(self, requirement: Requirement = ANY, cost: AnyCost = 0.0, now: float = 0.0) -> float | None:
        """The time at which the first resource opens that fits `requirement`: its cooldown ends, or it has quota."""
        if requirement is ANY and not cost and not self.cooling_for and not self.paused:
            return self.openings.first()
        members = self.matching_members(requirement)
        times = (opens_at(member, cost, now, requirement.affinity) for member in members)
        return min((time for time in times if time is not None), default=None)

    # -- waiting ------------------------------------------------------------------------------------------------------

    def join(self, ticket: WaitTicket, now: float) -> Effects | None:
        """Add a waiter to the queue, for whom nothing was found."""
        affinity_cooldowns.set_apart(ticket)
        self.wait_queue.join(ticket)
        taken_back = overtake(ticket) if ticket.priority else set()
        if ticket.cost:
            hold(ticket, (), now)
        if self.shares_quotas:
            ask_others(ticket, now)
        return self._serve((), now, taken_back) if taken_back else None

    def leave(self, ticket: WaitTicket, now: float) -> Effects | None:
        """Remove a waiter from the queue; what it was granted meanwhile goes to the next."""
        self.wait_queue.leave(ticket)
        grant, ticket.grant = ticket.grant, None
        if isinstance(ticket, FurtherTicket):
            return None  # what was granted counts: the price of an attempt that was cancelled at this moment
        if grant is not None:
            unspent(grant, now)
            return self.ended(grant, now)
        return self._serve((), now, let_go(ticket, is_served=False)) if ticket.cost else None

    def can_become_free(self, requirement: Requirement, cost: AnyCost = 0.0) -> bool:
        """Whether a resource that fits `requirement` can come free without anybody's help."""
        return any(member.can_ever_serve(cost) for member in self.matching_members(requirement))

    def quota_changed(self, account: Account, now: float) -> Effects | None:
        """Note that there is more or less of a quota than before."""
        return self._serve((), now, {account})

    # -- steering -----------------------------------------------------------------------------------------------------

    def add(self, resource: Resource[Any], now: float = 0.0) -> Effects | None:
        """Add a resource, last in order, and serve waiters with it."""
        self.admit(resource)
        return self._serve([resource], now)

    def remove(self, resource_id: str, now: float = 0.0) -> Effects:
        """Forget a resource at once. Its uses run on, and count against the limit of a successor of the same id."""
        self.drop(resource_id)
        resource = self._dropped.pop()
        return [*(self._serve([resource], now) or ()), *self._tell_hopeless([self], now)]

    def admit(self, resource: Resource[Any]) -> None:
        """Add a resource without serving waiters: call `settle` afterwards."""
        resource_id = resource.resource_id
        if resource_id in self.members:
            raise InvalidArgument(
                f"Duplicate resource_id in pool: {resource_id!r}",
                remedy="Give each resource an id of its own, or remove the old one first.",
            )
        member = self.members[resource_id] = Member(resource, self, next(self._indexes))
        member.update_availability()
        if resource.sharing.paused:
            self.paused.add(resource_id)
        if resource.status == "cooling_down":
            self.openings.note(member, resource.cooldown_until)
        inherited = self._draining.get(resource_id)
        if inherited:
            uses = sorted({**inherited, **member.uses}.items())
            member.uses.clear()
            member.uses.update(uses)
        member.sharing.members.append(member)
        self.openings.note_closed(member)
        affinity_cooldowns.admitted(self, resource)
        self.shares_quotas = self.shares_quotas or member.shares_quota
        self.pickers.enter(member)
        refresh(resource)

    def drop(self, resource_id: str) -> None:
        """Remove a resource without telling waiters: call `settle` afterwards."""
        member = self._find(resource_id)
        resource = member.resource
        del self.members[resource_id]
        self.paused.discard(resource_id)
        affinity_cooldowns.dropped(self, resource)
        member.sharing.members.remove(member)
        inherited = self._draining.get(resource_id, {})
        for order, use in inherited.items():
            if use.member.resource is not resource:
                member.uses.pop(order, None)  # of its predecessor: it runs on, and counts here no longer
        draining = {**inherited, **{order: one for order, one in member.uses.items() if one.member is member}}
        if draining:
            self._draining[resource_id] = draining
        self.pickers.withdraw(member)
        member.gone, member.plain = True, False
        update_limit(resource)
        kept = (member.sharing.account, member.sharing.affinity_cooldowns)
        if resource.status == "cooling_down" or kept != (None, None):
            self.openings.tidy()  # lest its value stays in memory until then
        self.totals.absorb(member)
        refresh(resource)
        offer(resource)
        self._dropped.append(resource)

    def settle(self, now: float) -> Effects:
        """Serve waiters, or tell them that nothing can come, after several of `admit`, `drop`, `retag`, `reorder`."""
        resources = [*(member.resource for member in self.members.values()), *self._dropped]
        self._dropped = []
        touched = {self: None, **{rotation: None for resource in resources for rotation in holders(resource)}}
        return [*(self._serve(resources, now) or ()), *self._tell_hopeless(touched, now)]

    def enable(self, resource_id: str, now: float = 0.0) -> Effects:
        """Declare a resource usable: no cooldown, no counter, no trial."""
        member = self._find(resource_id)
        resource = member.resource
        affinity_cooldowns.clear(resource)
        old = resource.status
        effects: Effects = []
        if old != "healthy":
            effects += [Enable(resource_id, old, other) for other in member.sharing.members]
        effects += [Tell(other) for other in member.sharing.members if other.rotation.is_shared]
        self._reopen(resource, on_trial=False)
        resource.consecutive_cooldown, resource.cooldown_until = 0, 0.0
        resource.sharing.enables += 1
        effects += self._serve([resource], now) or ()
        return effects

    def rest(self, resource_id: str, seconds: float, reason: str | None, now: float) -> Effects:
        """Let a resource rest from now on. Cancels nothing: this is policy, not evidence."""
        member = self._find(resource_id)
        member.sharing.ask_rest(seconds, reason)
        effects = self._begin_rest(member, None, now)
        effects += self._serve([member.resource], now) or ()  # waiters from whom it was taken back may get another
        return effects + self._tell_hopeless(holders(member.resource), now)

    def _begin_rest(self, member: Member, use: Use | None, now: float) -> Effects:
        """Begin the rest that was asked for. It is a cooldown that is not counted on top of others."""
        cooldown = take_rest(member.resource, now)
        refresh(member.resource)
        if cooldown is None:
            return []
        member.cooldowns += 1
        return self._rest(member.resource, cooldown, use, now)

    def disable(self, resource_id: str, now: float = 0.0) -> Effects:
        """Take a resource out of use. Cancels nothing: this is policy, not evidence."""
        member = self._find(resource_id)
        effects = self._disable(member, None, now)
        effects += self._serve([member.resource], now) or ()  # waiters from whom it was taken back may get another
        return effects + self._tell_hopeless(holders(member.resource), now)

    def pause(self, resource_id: str, now: float = 0.0) -> Effects:
        """Begin no use of a resource until `resume`. Its health stays as it is, and what is in flight continues."""
        return self._set_paused(self._find(resource_id).resource, now, paused=True)

    def resume(self, resource_id: str, now: float = 0.0) -> Effects:
        """Let a resource be used again that was paused, if its health allows it."""
        return self._set_paused(self._find(resource_id).resource, now, paused=False)

    def _set_paused(self, resource: Resource[Any], now: float, *, paused: bool) -> Effects:
        if resource.sharing.paused is paused:
            return []
        resource.sharing.paused = paused
        members = list(resource.sharing.members)
        for member in members:
            (member.rotation.paused.add if paused else member.rotation.paused.discard)(resource.resource_id)
            member.update_availability()
        if paused:
            self._revoke(resource, now)
        else:
            offer(resource)
        effects: Effects = [Pause(resource.resource_id, paused, member) for member in members]
        effects += self._serve([resource], now) or ()  # waiters from whom it was taken back may get another
        return effects + self._tell_hopeless(holders(resource), now)

    # -- other processes ----------------------------------------------------------------------------------------------

    def adopt(self, resource_id: str, health: Adopted, now: float) -> Effects:
        """Take over what other processes know of a resource.

        Cancels nothing: a call in flight here may well succeed. But all of them count as begun before the cooldown, so
        their verdicts belong to the same outage. Only calls that began after its end do not.
        """
        member = self._find(resource_id)
        resource = member.resource
        effects = self.enable(resource_id, now) if health.enabled else []
        if resource.status != "disabled":
            if health.disabled:
                effects += self._disable(member, None, now)
                member.disables -= 1  # counted where it was found
            elif health.consecutive:
                effects += self._adopt_cooldown(resource, health, now)
            elif health.cleared:
                effects += self._adopt_success(resource)
        effects += self._serve([resource], now) or ()
        return effects + self._tell_hopeless(holders(resource), now)

    def _adopt_cooldown(self, resource: Resource[Any], health: Adopted, now: float) -> Effects:
        if health.until > max(now, resource.cooldown_until + SAME_UNTIL):
            cooldown = Cooldown(health.consecutive, health.until, health.until - now)
            return self._rest(resource, cooldown, None, now, is_new=health.is_new)
        resource.consecutive_cooldown = health.consecutive
        if health.is_new:
            self._date_back(resource, health.until, now)
        return []

    def _date_back(self, resource: Resource[Any], until: float, now: float) -> None:
        """Count the calls that began before the end of a cooldown as begun before it: it is over by now."""
        late = [order for order, use in resource.sharing.uses.items() if use.acquired_at < until]
        if not late:
            return
        resource.sharing.outage, resource.sharing.outage_at = late[-1], now
        for member in resource.sharing.members:
            if member.trial is not None:
                member.trial.running.difference_update(late)
                member.update_availability()
            member.rotation.leases_shrank(member)

    def _adopt_success(self, resource: Resource[Any]) -> Effects:
        effects = self._reopen(resource, on_trial=True) if resource.status == "cooling_down" else []
        resource.consecutive_cooldown, resource.cooldown_until = 0, 0.0
        advance_trials(resource, None)
        offer(resource)
        return effects

    def leases_changed(self, member: Member, now: float) -> Effects:
        """Note that this process may use a resource more or less often, or may or may not probe it."""
        self.leases_shrank(member)
        return self._serve([member.resource], now) or []

    def leases_shrank(self, member: Member) -> None:
        """Note that this process may use a resource less often at most. Leaves the waiters alone."""
        update_limit(member.resource)
        trial, probe = member.trial, member.probe
        if trial is not None and probe is not None and trial.limit <= 1:
            trial.limit = 1 if probe.usable or trial.running else 0
            member.update_availability()
        refresh(member.resource)
        offer(member.resource)

    # -- steering of many ---------------------------------------------------------------------------------------------

    def reorder(self, resource_ids: Sequence[str]) -> None:
        """Put the members into this order of resource ids."""
        if list(resource_ids) == list(self.members):
            return
        ordered = {resource_id: self.members[resource_id] for resource_id in resource_ids}
        self.members.clear()
        self.members.update(ordered)
        for member in self.members.values():
            for picker in member.pickers:
                picker.withdraw(member)
        for member in self.members.values():
            member.index = next(self._indexes)
            for picker in member.pickers:
                picker.offer(member)

    def retag(self, resource: Resource[Any], like: Resource[Any]) -> None:
        """Give a resource the limit, tags and weight of another; its health stays."""
        if fields_of(resource) == fields_of(like):
            return
        for member in resource.sharing.members:
            member.rotation.pickers.withdraw(member)
        resource.max_in_flight, resource.tags, resource.weight = limit_of(like), like.tags, like.weight
        former = resource.sharing.account
        if (resource.quota, resource.quota_group) != (like.quota, like.quota_group):
            set_account(resource, like.sharing.account)
            self._dropped += [] if former is None else former.resources  # one of them may have waited for this one
        for member in resource.sharing.members:
            member.update_availability()
            member.rotation.openings.note_closed(member)
            member.rotation.shares_quotas = member.rotation.shares_quotas or member.shares_quota
            member.rotation.pickers.enter(member)
        refresh(resource)

    def set_quota(self, resource: Resource[Any], account: Account) -> None:
        """Give a resource that has no quota this one. The uses in flight count against it, from when they began."""
        set_account(resource, account)
        for use in resource.sharing.uses.values():
            use.reservation, use.level = account.reserve(0.0, use.acquired_at), use.level or -1
        refresh(resource)

    def matching_members(self, requirement: Requirement) -> Iterator[Member]:
        """The members that fit `requirement`, whatever their status."""
        return (member for member in self.members.values() if requirement.fits(member.resource))

    def is_plain(self, member: Member) -> bool:
        """Whether the end of a use need only be told to the member's one picker and the waiters here.

        Otherwise there is a trial, a strategy or a limit that learns, a draining predecessor, or another pool or
        process with the resource.
        """
        return (
            len(member.pickers) == 1
            and member.trial is None
            and member.lease is None
            and self._learn is None
            and len(member.sharing.members) == 1
            and member.resource.resource_id not in self._draining
            and member.sharing.rest is None
            and member.sharing.account is None
            and member.sharing.adaptive is None
            and member.sharing.affinity_cooldowns is None
        )

    def in_flight(self, resource_id: str) -> list[Use]:
        """Uses of a resource that have not ended, oldest first."""
        return list(self._find(resource_id).uses.values())

    # -- inside -------------------------------------------------------------------------------------------------------

    def _find(self, resource_id: str) -> Member:
        try:
            return self.members[resource_id]
        except (KeyError, TypeError):
            known = ", ".join(map(repr, list(self.members)[:8])) + (", ..." if len(self.members) > 8 else "")
            raise UnknownResource(
                f"unknown resource_id {resource_id!r}: the pool has {known or 'no resources'}",
            ) from None

    def _picker(self, tags: frozenset[str]) -> Picker:
        picker = self.pickers.get(tags)
        if picker is None:
            picker = self.pickers.add(tags, self.members.values())
            for member in self.members.values():
                refresh(member.resource)
        return picker

    def _proved(self, use: Use, now: float) -> Effects | None:
        """End a use that succeeded after trouble."""
        effects = self._prove(use)
        del use.member.uses[use.order]
        return [*effects, *(self._after_use(use, now, well=True) or ())] or None

    def _prove(self, use: Use) -> Effects:
        """Note a success since the last cooldown began: the first counts for all pools, later ones for their own."""
        resource = use.member.resource
        if resource.status == "disabled":
            return []
        resource.consecutive_cooldown = 0
        resource.cooldown_until = 0.0
        resource.sharing.proofs += 1
        resource.sharing.proved_at = use.acquired_at
        advance_trials(resource, use.member)
        return [Tell(member) for member in resource.sharing.members if member.rotation.is_shared]

    def _cool(self, use: Use, seconds: float | None, now: float) -> Effects:
        resource = use.member.resource
        cooldown = cooldown_after(resource, self._table, seconds, is_late=use.is_late, now=now)
        return self._rest(resource, cooldown, use, now)

    def _cool_for(self, use: Use, affinity: Affinity, seconds: float | None, now: float) -> Effects:
        """Begin or extend a cooldown for calls with one affinity. The health of the resource stays as it is."""
        resource = use.member.resource
        newest = next(_orders)
        cooldown = affinity_cooldowns.cool_for(use, affinity, self._table, seconds, newest=newest, now=now)
        self._revoke(resource, now, affinity)
        consecutive, until, lasts, _ = cooldown
        return [
            Cool(resource.resource_id, until, lasts, consecutive, resource.status, member, use, affinity=affinity)
            for member in resource.sharing.members
        ]

    def _pause(self, use: Use, seconds: float, now: float) -> Effects:
        """Let a resource rest briefly, because it was given more calls at a time than its provider takes.

        That is no outage: it climbs no table, other processes need not know, and after it there is nothing to probe.
        """
        resource, sharing = use.member.resource, use.member.sharing
        in_order = resource.status == "healthy" and not resource.consecutive_cooldown
        is_brief = sharing.is_brief or (in_order and all(one.trial is None for one in sharing.members))
        until = max(resource.cooldown_until, now + seconds)
        lasts = seconds if until == now + seconds else until - now
        effects = self._rest(resource, Cooldown(resource.consecutive_cooldown, until, lasts), use, now)
        sharing.is_brief = is_brief
        return effects

    def _rest(
        self, resource: Resource[Any], cooldown: Cooldown, use: Use | None, now: float, *, is_new: bool = False
    ) -> Effects:
        """Begin or extend a cooldown. `is_new`: it is another one than the current, if there is one."""
        old, members = resource.status, list(resource.sharing.members)
        if old == "healthy" or is_new:
            resource.sharing.outage, resource.sharing.outage_at = next(_orders), now
        is_longer = old == "healthy" or cooldown.until > resource.cooldown_until
        resource.status, resource.cooldown_until = "cooling_down", cooldown.until
        resource.sharing.is_brief = False
        resource.consecutive_cooldown = cooldown.consecutive
        for member in members:
            member.unavailable, member.trial = True, None
            if is_longer:
                member.rotation.openings.note(member, cooldown.until)
        refresh(resource)
        self._revoke(resource, now)
        return [
            Cool(
                resource.resource_id,
                cooldown.until,
                cooldown.seconds,
                cooldown.consecutive,
                old,
                member,
                use,
                cooldown.reason,
            )
            for member in members
        ]

    def _disable(self, member: Member, use: Use | None, now: float) -> Effects:
        resource = member.resource
        old = resource.status
        if old == "disabled":
            return []
        resource.status = "disabled"
        self._revoke(resource, now)
        member.disables += 1
        for other in resource.sharing.members:
            other.unavailable, other.trial = True, None
        refresh(resource)
        return [Disable(resource.resource_id, old, other, use) for other in resource.sharing.members]

    def _reopen(self, resource: Resource[Any], *, on_trial: bool) -> Effects:
        resource.status = "healthy"
        for member in resource.sharing.members:
            probes = on_trial and member.rotation.probe_on_recovery and not resource.sharing.is_brief
            member.trial = Trial(1 if member.probe is None else min(1, member.probe.usable)) if probes else None
            member.update_availability()
            for picker in member.pickers:
                picker.offer(member)
        resource.sharing.is_brief = False
        refresh(resource)
        return [Recover(resource.resource_id, member) for member in resource.sharing.members]

    def _after_use(self, use: Use, now: float, *, well: bool = False) -> Effects | None:
        """Tell the trial, the strategy and the pickers that a use has ended, and serve waiters."""
        member = use.member
        if member.trial is not None and use.order in member.trial.running:
            member.trial.running.remove(use.order)
            member.update_availability()
        if member.gone:
            self.drained(use)
        elif self._learn is not None:
            self._learn(member, max(0.0, now - use.acquired_at), now, well)
        if well and member.sharing.affinity_cooldowns is not None:
            affinity_cooldowns.proved_for(use)
        if member.sharing.members.prune():
            refresh(member.resource)  # another pool that held it was dropped
        adapted = self._adapt(use, now, well=well) if member.sharing.adaptive is not None else []
        rested = [] if member.sharing.rest is None else self._begin_rest(member, use, now)
        offered = [member.resource]
        account = member.sharing.account
        reservation, use.reservation = use.reservation, None
        if reservation is not None:
            account = reservation.account
            account.settle(reservation, now, answered=well)
        if account is not None and (account.has_opened(now) or (reservation is None and not account.is_closed)):
            offered += account.resources
        successor = self.members.get(member.resource.resource_id) if member.gone else None
        if successor is not None:
            offered.append(successor.resource)
        told = return_permits(member)
        if reservation is not None and reservation.account.budget.wants_exchange:
            told.append(Tell(member))
        for resource in offered:
            offer(resource)
        served = self._serve(offered, now) or None
        if rested:
            rested += self._tell_hopeless(holders(member.resource), now)
        return [*adapted, *rested, *told, *(served or ())] if told or rested or adapted else served

    def _adapt(self, use: Use, now: float, *, well: bool = False) -> Effects:
        """Let an adaptive limit learn from the end of a use. What was cancelled or lost says nothing about it."""
        member, level = use.member, use.level
        resource, adapts, use.level = member.resource, member.sharing.adapts, 0
        known = None if adapts is None else adapts.level
        if adapts is None or level <= 0:
            pass  # a quota decides, or it began before the limit was adaptive
        elif use.is_refused:
            on_trial = member.trial is not None  # few are let in: that one is refused says nothing about how many could
            adapts.refused(use.acquired_at, 0 if on_trial else level, now)
        elif well:
            adapts.succeeded(use.acquired_at, now, used=member.fully_used(len(member.uses) + 1))
        old = resource.max_in_flight
        if update_number(resource):
            return self._limit_changed(resource, old, now, use)
        is_news = adapts is not None and adapts.level is not known
        return [Tell(one) for one in resource.sharing.members if one.rotation.is_shared] if is_news else []

    def _limit_changed(self, resource: Resource[Any], old: int | None, now: float, use: Use | None) -> Effects:
        """Report that an adaptive limit has changed. Waiters are served by the caller."""
        adaptive, number = resource.sharing.adaptive, resource.max_in_flight or 0
        cut = None if adaptive is None else adaptive.last_cut
        at = None if cut is None or cut.at != now else cut.in_flight
        return [Limit(resource.resource_id, number, old or 0, at, one, use) for one in resource.sharing.members]

    def level_heard(self, member: Member, level: AdaptiveLevel, now: float) -> Effects:
        """Take over what other processes know of an adaptive limit."""
        resource = member.resource
        adaptive, old = resource.sharing.adaptive, resource.max_in_flight
        if adaptive is None or not adaptive.heard(level, now) or not update_number(resource):
            return []
        return [*self._limit_changed(resource, old, now, None), *self.leases_changed(member, now)]

    def drained(self, use: Use) -> None:
        """Note the end of a use of a removed member: a successor of the same id may have one use more."""
        resource_id = use.member.resource.resource_id
        self.totals.absorb(use.member)
        draining = self._draining.get(resource_id, {})
        draining.pop(use.order, None)
        successor = self.members.get(resource_id)
        if successor is not None and successor.uses.pop(use.order, None) is not None:
            offer(successor.resource)
        if not draining:
            self._draining.pop(resource_id, None)
            if successor is not None:
                refresh(successor.resource)

    def _serve(
        self, resources: Iterable[Resource[Any]], now: float, accounts: Iterable[Account | None] = ()
    ) -> Effects | None:
        """Give what came free, and has opened of these quotas, to waiters of every rotation; longest wait first."""
        resources = list(resources)
        changed = {*accounts, *(one.sharing.account for one in resources)}
        effects = self._give_out(resources + opened(changed, now), now, changed)
        effects += map(Watch, unwatched(changed))
        return effects or None

    def _give_out(self, resources: list[Resource[Any]], now: float, accounts: set[Account | None]) -> Effects:
        holders = [*(member.rotation for resource in resources for member in resource.sharing.members), *self._requeued]
        waiting = {rotation: None for rotation in holders if rotation.wait_queue}
        if not waiting:
            return []
        freed = [] if self._requeued else resources  # nothing else is new to those who wait
        served = serve([(one.wait_queue, partial(one.grant, now, freed, accounts)) for one in waiting])
        left: set[Account | None] = set()
        for ticket in served:
            if ticket.grant is not None:
                ticket.grant.ticket = ticket
            if ticket.cost:
                left |= let_go(ticket, is_served=True)
        effects: Effects = [Serve(ticket) for ticket in served]
        return [*effects, *(self._serve((), now, left) or ())] if left else effects

    def grant(
        self, now: float, freed: list[Resource[Any]], accounts: set[Account | None], ticket: WaitTicket
    ) -> Use | None:
        """Take a resource for a waiter; None if none is free. Accounts that this changed are added to `accounts`."""
        requirement = ticket.requirement
        if freed and requirement is not ANY and not any(map(requirement.fits, freed)):
            return None
        if isinstance(ticket, FurtherTicket):
            return self.take_further(ticket.within, now, ticket)
        use = self.acquire(now, requirement, (), ticket.affinity, ticket.cost, ticket)
        if use is None and ticket.cost:
            accounts |= hold(ticket, freed, now)
        return use

    def _revoke(self, resource: Resource[Any], now: float, affinity: Affinity | None = None) -> None:
        """Take back what waiters (all, or those of one affinity) were granted and have not begun to use.

        They get their old places in the queue.
        """
        for use in list(reversed(resource.sharing.uses.values())):
            ticket = use.ticket
            if ticket is not None and affinity is not None and ticket.affinity != affinity:
                continue
            if ticket is not None and use.member.resource is resource:
                use.ticket = None
                unspent(use, now)
                use.member.acquires -= 1
                del resource.sharing.uses[use.order]
                trial = use.member.trial
                if trial is not None and use.order in trial.running:
                    trial.running.remove(use.order)
                    use.member.update_availability()
                if use.member.gone:
                    use.member.rotation.drained(use)
                affinity_cooldowns.set_apart(ticket)
                ticket.rotation.wait_queue.rejoin(ticket)
                self._requeued.append(ticket.rotation)

    def _tell_hopeless(self, rotations: Iterable[Rotation], now: float) -> Effects:
        """Remove waiters that nothing can come for any more, and have them told."""
        effects: Effects = []
        left: set[Account | None] = set()
        looked_at = dict.fromkeys([*rotations, *self._requeued])
        self._requeued = []
        for rotation in looked_at:
            if rotation.wait_queue:
                for ticket in hopeless(rotation):
                    rotation.wait_queue.leave(ticket)
                    left |= let_go(ticket, is_served=False)
                    effects.append(Starve(ticket))
        return [*effects, *(self._serve((), now, left) or ())] if left else effects
