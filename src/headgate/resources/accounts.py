"""The account of a quota: what resources that share the quota may still use, and who waits for it. Pure.

Each resource with a quota has an account; resources of one `quota_group` have one together, in whichever pool they are.
An account whose quota is spent *closes* its resources: none of them is eligible until it opens again. So a spent quota
is to the rotation as a cooldown is, and calls that need no quota pay nothing for any of this.

Calls cost different amounts, so an account may be open and still have too little for a call. That call takes another
resource, or waits. So that small calls cannot keep out a large one for ever, the first of the waiting calls *holds* the
account that can serve it soonest: nobody else is served by that account until it was. It is *short of* the others:
they serve whom they can, and serve it too when they have enough for it before the account that it holds.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from headgate.core.weakrefs import WeakList
from headgate.errors import InvalidArgument
from headgate.resources.costs import REQUESTS, AnyCost, Spent, dimension_of
from headgate.resources.ledger import Ledger, Need, WindowView
from headgate.resources.quota import LEARN, QuotaSetting, as_given
from headgate.resources.rate_limits import Limit

if TYPE_CHECKING:
    from headgate.resources.leased_budget import LeasedBudget
    from headgate.resources.members import Member, WaitTicket
    from headgate.resources.model import QuotaSnapshot, Resource, Sharing, WindowSnapshot
    from headgate.resources.rotation import Rotation
    from headgate.resources.shared_quotas import SharedQuota


class Budget(Protocol):
    """What an account asks and tells: a `Ledger` of this process, or what this process leases of a shared one."""

    @property
    def wants_exchange(self) -> bool: ...
    @property
    def is_known(self) -> bool: ...
    def need(self, cost: AnyCost) -> dict[str, float]: ...
    def can_ever_allow(self, need: Need) -> bool: ...
    def allows(self, need: Need, now: float, *, paced: bool = True) -> bool: ...
    def views(self, now: float) -> dict[str, WindowView]: ...
    def lack(self, need: Need, now: float, *, waits: bool) -> None: ...
    def opens_at(self, need: Need, now: float) -> float: ...
    def start(self, need: Need, now: float) -> tuple[float, bool]: ...
    def cancel(self, need: Need, start: float, now: float) -> None: ...
    def amend(self, change: Need, start: float, now: float) -> None: ...
    def retime(self, since: float, now: float) -> None: ...
    def observe(self, limits: Iterable[Limit], start: float, now: float) -> None: ...
    def refused(self, told: Mapping[str, float | None], after: float | None, start: float, now: float) -> None: ...
    def probed(self, *, answered: bool) -> None: ...


class Refusal(NamedTuple):
    """What a service said when it refused a call for its rate."""

    retry_after: float | None = None
    """Seconds to wait, if it said so."""


class Reservation:
    """What one use of a resource takes of a quota, from its start on."""

    __slots__ = ("account", "asks", "cost", "has_failed", "is_open", "is_refused", "made_at", "need", "spent", "start")

    def __init__(
        self, account: Account, need: dict[str, float], cost: AnyCost, start: float, asks: bool, made_at: float
    ) -> None:
        self.account: Account = account
        self.need: dict[str, float] = need
        self.cost: AnyCost = cost
        self.start: float = start
        """Stands for the use in the budget: a time of its clock."""
        self.spent: Spent | None = None
        """The tokens that were really used, or None if the call has not reported them."""
        self.asks: bool = asks
        """Will the answer to the call be the first to say what there is?"""
        self.made_at: float = made_at
        """On the clock of this process."""
        self.is_open: bool = True
        """Has it not been settled or cancelled?"""
        self.has_failed: bool = False
        """Did the call raise something, so that it is not known whether the service has answered?"""
        self.is_refused: bool = False
        """Has its refusal been learned from? A call may tell of it in two ways."""

    def spend(self, spent: Spent) -> None:
        """Add tokens to those that were really used."""
        self.spent = spent if self.spent is None else self.spent.plus(spent)


class Account:
    """What is left of the quotas in this process, for the resources that share them."""

    def __init__(self, quota: QuotaSetting, group: str | None = None) -> None:
        self.quota: QuotaSetting = quota
        self.group: str | None = group
        self.budget: Budget = Ledger(quota)
        """Where amounts are taken from. Replaced when processes share the quota."""
        self.sharings: WeakList[Sharing] = WeakList()
        """Of the resources that share it."""
        self.is_closed: bool = False
        """Is too little left for whoever comes next?"""
        self.opens_at: float = math.inf
        """When it is worth looking again, while it is closed."""
        self.unwatched: set[Rotation] = set()
        """With calls that wait, and were not told of the last change of `opens_at`."""
        self.shared: SharedQuota | None = None
        """Shares it with other processes, if a pool of its resources has a store."""
        self.enough_at: float = math.inf
        """When it has enough for one of the calls that are short of it, while it is open."""
        self._holder: WaitTicket | None = None
        self._short: dict[WaitTicket, None] = {}
        self._has_opened = False

    @property
    def members(self) -> Iterator[Member]:
        """The memberships of its resources in pools."""
        return (member for sharing in self.sharings for member in sharing.members)

    @property
    def resources(self) -> list[Resource[Any]]:
        """The resources that share it, as far as a pool has them."""
        return list({id(member.resource): member.resource for member in self.members}.values())

    def cost_waited_for(self) -> AnyCost | None:
        """The least that a call costs which waits, and could use one of its resources now; None: no call does.

        A call with a cost waits for the account that it holds, and not for a little of another one.
        """
        holder = self.holder()
        if holder is not None:
            return holder.cost
        heads = (
            (ticket, member)
            for member in self.members
            if member.rotation.wait_queue
            for ticket in member.rotation.wait_queue.heads()
        )
        waits = (
            not one.cost and one.requirement.fits(on.resource) and one.lacks_only_quota_of(on) for one, on in heads
        )
        if any(waits):
            return 0.0
        return None if self.shared is None else min(self.shared.askers.values(), key=float, default=None)

    @property
    def is_known(self) -> bool:
        """Whether its limits are configured, or were learned from the headers of answers."""
        return self.budget.is_known

    @property
    def is_short(self) -> bool:
        """Whether it has too little for a waiting call that does not hold it."""
        return bool(self._short)

    def lease(self, budget: LeasedBudget, shared: SharedQuota, now: float) -> None:
        """Share it with other processes from now on. What calls took before counts in this process alone."""
        self.budget, self.shared = budget, shared
        self.refresh(now)

    # -- taking -------------------------------------------------------------------------------------------------------

    def can_ever_allow(self, cost: AnyCost) -> bool:
        """Whether a call with this cost fits into every window when nothing of it is used."""
        return self.budget.can_ever_allow(self.budget.need(cost))

    def admits(self, cost: AnyCost, now: float, ticket: WaitTicket | None) -> bool:
        """Whether a call with this cost may begin. `ticket` is its place in the wait queue, if it has one."""
        holder = self.holder()
        return (holder is None or holder is ticket) and self.budget.allows(self.budget.need(cost), now)

    def spares(self, cost: AnyCost, now: float) -> bool:
        """Whether a call that cannot wait may begin: there is enough, though calls that wait would be spaced."""
        return self.holder() is None and self.budget.allows(self.budget.need(cost), now, paced=False)

    def reserve(self, cost: AnyCost, now: float) -> Reservation:
        """Take what a call needs that costs so many tokens, and starts now."""
        need = self.budget.need(cost)
        start, asks = self.budget.start(need, now)
        return Reservation(self, need, cost, start, asks, now)

    def would_open_at(self, cost: AnyCost, now: float) -> float:
        """When a call that costs so much may begin, as far as can be told: soon, if others find out about it now."""
        opens_at = self.budget.opens_at(self.budget.need(cost), now)
        return now if math.isinf(opens_at) else opens_at

    def opens_in(self, now: float) -> float | None:
        """Seconds until the next call may begin, or None if this process does not know."""
        return None if self.shared is not None else max(0.0, self.would_open_at(0.0, now) - now)

    def cost_now(self) -> AnyCost:
        """What the next call costs at least: it is that of the holder, if there is one."""
        holder = self.holder()
        return 0.0 if holder is None else holder.cost

    # -- a use ends ---------------------------------------------------------------------------------------------------

    def settle(self, reservation: Reservation, now: float, *, answered: bool) -> None:
        """Correct what a use has taken to what it has used. `answered`: it found its resource in order."""
        if not reservation.is_open:
            return
        reservation.is_open = False
        if reservation.spent is not None:
            change = {
                name: reservation.spent.of(dimension, amount) - amount
                for name, amount in reservation.need.items()
                if (dimension := dimension_of(name)) != REQUESTS
            }
            self.budget.amend(change, reservation.start, now)
        if reservation.asks:
            self.budget.probed(answered=answered and not reservation.has_failed)

    def cancel(self, reservation: Reservation, now: float) -> None:
        """Take back what a use did not take: it was never begun."""
        if reservation.is_open:
            reservation.is_open = False
            self.budget.cancel(reservation.need, reservation.start, now)
            if reservation.asks:
                self.budget.probed(answered=False)

    def spend(self, spent: Spent, now: float) -> None:
        """Count tokens that belong to no use."""
        if self.quota != LEARN:
            counted = {name: dimension_of(name) for name in self.budget.need(0.0)}
            change = {name: spent.of(dimension, 0.0) for name, dimension in counted.items() if dimension != REQUESTS}
            self.budget.amend(change, now, now)

    def hear(
        self, reservation: Reservation | None, limits: Iterable[Limit], now: float, refusal: Refusal | None = None
    ) -> None:
        """Learn from an answer, which may have said nothing, or was a refusal."""
        limits = list(limits)
        start = now if reservation is None else reservation.start
        if limits:
            self.budget.observe(limits, start, now)
        if reservation is not None and reservation.is_open and reservation.asks:
            reservation.asks = False
            self.budget.probed(answered=True)
        if refusal is not None and (reservation is None or not reservation.is_refused):
            need = {} if reservation is None else reservation.need
            if reservation is not None:
                reservation.is_refused = True
            self.budget.refused(_to_blame(limits, need), refusal.retry_after, start, now)

    def retime(self, since: float, now: float) -> None:
        """Count what started since then as started now: the event loop stood still, and nothing was sent before."""
        self.budget.retime(since, now)

    # -- open and closed ----------------------------------------------------------------------------------------------

    def has_opened(self, now: float) -> bool:
        """Look again, and say whether there may be something for waiting calls since this was asked last.

        That is if its resources were closed and are open, or were held for a call that holds them no more.
        """
        self.refresh(now)
        has_opened, self._has_opened = self._has_opened, False
        return has_opened and not self.is_closed

    def refresh(self, now: float) -> None:
        """Close or open its resources, after anything has changed."""
        need = self.budget.need(self.cost_now())
        was_closed, self.is_closed = self.is_closed, not self.budget.allows(need, now)
        self._has_opened = self._has_opened or was_closed
        if not was_closed and not self.is_closed:
            self._look_at_short(now)
            return
        self.enough_at = math.inf
        if self.is_closed:
            cost = self.cost_waited_for()
            self.budget.lack(self.budget.need(cost or 0.0), now, waits=cost is not None)
            opens_at = self.budget.opens_at(need, now)
            if was_closed and opens_at == self.opens_at:
                return
            self.opens_at = opens_at
        for member in self.members:
            if self.is_closed != was_closed:
                member.update_availability()
            if not self.is_closed:
                for picker in member.pickers:
                    picker.offer(member)
            elif self.opens_at < math.inf:
                member.rotation.openings.note(member, self.opens_at)
                if member.rotation.wait_queue:
                    self.unwatched.add(member.rotation)

    def _look_at_short(self, now: float) -> None:
        """Open for calls that are short of it if it has enough for one of them, or note when that will be."""
        if not self._short or self.holder() is not None:
            return
        at = min(self.budget.opens_at(self.budget.need(ticket.cost), now) for ticket in self._short)
        if at <= now:
            self._has_opened = True
        elif at != self.enough_at and self.shared is None:  # nobody knows when other processes return some
            self.enough_at = at
            for member in self.members if at < math.inf else ():
                member.rotation.openings.note(member, at)
                if member.rotation.wait_queue:
                    self.unwatched.add(member.rotation)

    # -- reading ------------------------------------------------------------------------------------------------------

    def snapshot(self, now: float) -> QuotaSnapshot:
        """What is left of each window."""
        windows = {name: _window(view, now) for name, view in self.budget.views(now).items()}
        waits = self.opens_at - now if self.is_closed and math.isfinite(self.opens_at) else 0.0
        return {
            "left": {name: window["left"] for name, window in windows.items()},
            "windows": windows,
            "seconds_until_open": max(0.0, waits),
        }

    # -- waiting ------------------------------------------------------------------------------------------------------

    def holder(self) -> WaitTicket | None:
        """The waiting call that is served next by this account, because it waits for more than there was."""
        holder = self._holder
        if holder is not None and not self._serves(holder):
            self.let_go(holder)
        return self._holder

    def _serves(self, holder: WaitTicket) -> bool:
        """Whether a call still waits, and could use the member for which it holds this account."""
        member = holder.held
        is_ours = member is not None and member.sharing.account is self and holder.lacks_only_quota_of(member)
        return is_ours and holder in holder.rotation.wait_queue

    def hold(self, ticket: WaitTicket) -> None:
        """Let this waiting call be served next."""
        self._holder = ticket

    def note_short(self, ticket: WaitTicket, now: float) -> None:
        """Note that it has too little for a waiting call that does not hold it."""
        self._short[ticket] = None
        self.enough_at = math.inf
        self.refresh(now)

    def forget_short(self, ticket: WaitTicket, *, for_others: bool) -> None:
        """Forget such a call. `for_others`: it does not wait any more, and those behind it may need less."""
        self._short.pop(ticket, None)
        self._has_opened = self._has_opened or for_others

    def let_go(self, ticket: WaitTicket) -> None:
        """Do not hold it for this call any more."""
        if self._holder is ticket:
            self._holder, self._has_opened = None, True


def _window(view: WindowView, now: float) -> WindowSnapshot:
    return {
        "left": max(0.0, view.left) if math.isfinite(view.left) else None,
        "limit": view.limit,
        "seconds_until_full": max(0.0, view.refilled_at - now) if math.isfinite(view.refilled_at) else None,
    }


def _to_blame(limits: Iterable[Limit], need: Need) -> dict[str, float | None]:
    """Return the limits because of which a call was refused, and what remains of each.

    These are the limits of which too little remains for it. If headers say that there is enough of all, one of them is
    not what they say, or the call takes more than it reserved: most likely of the limit of which the least remains.
    """
    told = [(one, one.remaining) for one in limits if one.remaining is not None]
    lacking: dict[str, float | None] = {one.name: left for one, left in told if left < need.get(one.name, 1.0)}
    if lacking or not told:
        return lacking or {REQUESTS: None}
    scarcest, left = min(told, key=lambda pair: pair[1] / pair[0].limit if pair[0].limit else 1.0)
    return {scarcest.name: left}


# -- the accounts of this process --------------------------------------------------------------------------------------

_groups: weakref.WeakValueDictionary[str, Account] = weakref.WeakValueDictionary()


def account_of(quota: QuotaSetting | None, group: str | None) -> Account | None:
    """Return the account for a resource with this quota: that of its group, if it is of one."""
    if group is None:
        return None if quota is None else Account(quota)
    known = _groups.get(group)
    if known is None:
        if quota is None:
            raise InvalidArgument(
                f"quota_group {group!r} has no quota yet",
                remedy='Pass quota= too: Resource(..., quota=Quota(requests=60), quota_group="org").',
            )
        known = _groups[group] = Account(quota, group)
    elif quota is not None and quota != known.quota:
        raise InvalidArgument(
            f"quota_group {group!r} has the quota {as_given(known.quota)!r}, and cannot have {as_given(quota)!r} too",
            remedy="Give all resources of a group the same quota, or another group.",
        )
    return known
