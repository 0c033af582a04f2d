"""Which account of a quota serves a waiting call next, that needs more than there is. Pure: see `accounts`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from headgate.resources.accounts import Account
from headgate.resources.members import Member, Use, WaitTicket
from headgate.resources.model import Resource

if TYPE_CHECKING:
    from headgate.resources.rotation import Rotation


def hold(ticket: WaitTicket, now: float) -> Account | None:
    """Let the account that can serve a waiting call soonest serve nobody else before it, if it is first of its kind.

    Only one of a member that lacks nothing else: otherwise others would wait for a quota that nobody can use.
    Returns the account if it was not held for this call before.
    """
    if ticket.rotation.wait_queue.head(ticket.requirement) is not ticket or _holds(ticket):
        return None
    best: tuple[float, Member, Account] | None = None
    for member in ticket.rotation.matching_members(ticket.requirement):
        account = member.sharing.account
        if account is None or not member.lacks_only_quota or not member.can_ever_serve(ticket.cost):
            continue
        if account.holder() is None:
            at = account.would_open_at(ticket.cost, now)
            if best is None or at < best[0]:
                best = at, member, account
    if best is None:
        return None
    _, ticket.held, account = best
    account.hold(ticket)
    account.refresh(now)
    return account


def _holds(ticket: WaitTicket) -> bool:
    account = None if ticket.held is None else ticket.held.sharing.account
    return account is not None and account.holder() is ticket


def ask_others(ticket: WaitTicket, now: float) -> None:
    """Ask other processes for what a call waits for that has just joined the queue."""
    for member in ticket.rotation.matching_members(ticket.requirement):
        account = member.sharing.account
        if account is not None:
            account.refresh(now)


def let_go(ticket: WaitTicket) -> Account | None:
    """Do not hold an account for this call any more. Returns the account: others may have it, if it has opened."""
    held, ticket.held = ticket.held, None
    account = None if held is None else held.sharing.account
    if account is not None:
        account.let_go(ticket)
    return account


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


def reprice(use: Use, cost: float, now: float) -> bool:
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
