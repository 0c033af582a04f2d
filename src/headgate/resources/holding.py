"""Which account of a quota serves a waiting call next, that needs more than there is. Pure: see `accounts`."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from headgate.resources.accounts import Account
from headgate.resources.costs import AnyCost
from headgate.resources.members import Member, Use, WaitTicket
from headgate.resources.model import Resource

if TYPE_CHECKING:
    from headgate.resources.rotation import Rotation


def hold(ticket: WaitTicket, freed: Collection[Resource[Any]], now: float) -> set[Account]:
    """Let the account that can serve a waiting call soonest serve nobody else before it, if it is first of its kind.

    The accounts of the others that came free (of all that fit, if `freed` is empty) are to look at it again when they
    have enough. Returns the accounts about which something has changed.
    """
    if ticket.rotation.wait_queue.head(ticket.requirement) is not ticket:
        return set()
    changed = set() if _holds(ticket) else _hold_soonest(ticket, now)
    for member in _candidates(ticket, freed):
        account = member.sharing.account
        if account is not None and account not in changed and not account.is_closed:
            ticket.short_of |= {account}
            account.note_short(ticket, now)
            changed.add(account)
    return changed


def _hold_soonest(ticket: WaitTicket, now: float) -> set[Account]:
    best: tuple[float, Member, Account] | None = None
    for member in _candidates(ticket, ()):
        account = member.sharing.account
        if account is not None:
            at = account.would_open_at(ticket.cost, now)
            if best is None or at < best[0]:
                best = at, member, account
    if best is None:
        return set()
    _, ticket.held, account = best
    account.hold(ticket)
    account.refresh(now)
    return {account}


def _candidates(ticket: WaitTicket, freed: Collection[Resource[Any]]) -> Iterator[Member]:
    """The members with accounts that could serve a call and that nobody holds: of those `freed`, or all if it is empty.

    Only those that lack nothing else: otherwise others would wait for a quota that nobody can use.
    """
    rotation, requirement = ticket.rotation, ticket.requirement
    known = (rotation.members.get(resource.resource_id) for resource in freed if requirement.fits(resource))
    found = (member for member in known if member is not None) if freed else rotation.matching_members(requirement)
    for member in found:
        account = member.sharing.account
        usable = account is not None and ticket.lacks_only_quota_of(member) and member.can_ever_serve(ticket.cost)
        if usable and account is not None and account.holder() is None:
            yield member


def _holds(ticket: WaitTicket) -> bool:
    account = None if ticket.held is None else ticket.held.sharing.account
    return account is not None and account.holder() is ticket


def ask_others(ticket: WaitTicket, now: float) -> None:
    """Ask other processes for what a call waits for that has just joined the queue."""
    for member in ticket.rotation.matching_members(ticket.requirement):
        account = member.sharing.account
        if account is not None:
            account.refresh(now)


def overtake(ticket: WaitTicket) -> set[Account]:
    """Take back the accounts that less urgent calls hold, because a more urgent one is first now. Returns them."""
    taken_back: set[Account] = set()
    for member in ticket.rotation.matching_members(ticket.requirement):
        account = member.sharing.account
        holder = None if account is None else account.holder()
        if holder is not None and holder.priority < ticket.priority:
            taken_back |= let_go(holder, is_served=False)
    return taken_back


def let_go(ticket: WaitTicket, *, is_served: bool) -> set[Account]:
    """Do not hold an account for this call any more. Returns those that others may have, if they have opened."""
    held, ticket.held = ticket.held, None
    short_of, ticket.short_of = ticket.short_of, frozenset()
    for account in short_of:
        account.forget_short(ticket, for_others=not is_served)
    left = set() if is_served else set(short_of)
    if held is not None and held.sharing.account is not None:
        held.sharing.account.let_go(ticket)
        left.add(held.sharing.account)
    return left


def opened(accounts: Iterable[Account | None], now: float) -> list[Resource[Any]]:
    """The resources that share one of these quotas, of which there is some again."""
    open_ones = [account for account in accounts if account is not None and account.has_opened(now)]
    return [resource for account in open_ones for resource in account.resources]


def unwatched(accounts: Iterable[Account | None]) -> list[WaitTicket]:
    """The first waiters of pools that are to look again when one of these quotas opens."""
    rotations: set[Rotation] = set()
    for account in accounts:
        if account is not None and account.unwatched:
            rotations |= account.unwatched
            account.unwatched = set()
    return [ticket for one in rotations if (ticket := one.wait_queue.first()) is not None]


def unspent(use: Use, now: float) -> None:
    """Give back what a use has taken of a quota: it was never begun. Others may have it when its resource is served."""
    reservation, use.reservation = use.reservation, None
    if reservation is not None:
        reservation.account.cancel(reservation, now)


def reprice(use: Use, cost: AnyCost, now: float) -> bool:
    """Let a use that has not begun take what another call costs; False: there is too little for that.

    Others may have what it does not take any more: call `quota_changed` afterwards.
    """
    reservation = use.reservation
    if reservation is None or reservation.cost == cost:
        return True
    account = reservation.account
    account.cancel(reservation, now)
    fits = account.admits(cost, now, None)
    use.reservation = account.reserve(cost if fits else reservation.cost, now)
    return fits
