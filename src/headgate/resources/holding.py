"""Which account of a quota serves a waiting call next, that needs more than there is. Pure: see `accounts`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from headgate.resources.accounts import Account
from headgate.resources.members import Member, Use, WaitTicket
from headgate.resources.model import Resource

if TYPE_CHECKING:
    from headgate.resources.rotation import Rotation


def hold(ticket: WaitTicket, now: float) -> None:
    """Let the account that can serve a waiting call soonest serve nobody else before it, if it is first of its kind.

    Only one of a member that lacks nothing else: otherwise others would wait for a quota that nobody can use.
    """
    if ticket.rotation.wait_queue.head(ticket.requirement) is not ticket or _holds(ticket):
        return
    best: tuple[float, Member, Account] | None = None
    for member in ticket.rotation.matching_members(ticket.requirement):
        account = member.sharing.account
        if account is None or not member.lacks_only_quota or not member.can_ever_serve(ticket.cost):
            continue
        if account.holder() is None:
            at = account.would_open_at(ticket.cost, now)
            if best is None or at < best[0]:
                best = at, member, account
    if best is not None:
        _, ticket.held, account = best
        account.hold(ticket)
        account.refresh(now)


def _holds(ticket: WaitTicket) -> bool:
    account = None if ticket.held is None else ticket.held.sharing.account
    return account is not None and account.holder() is ticket


def ask_others(ticket: WaitTicket, now: float) -> None:
    """Ask other processes for what a call waits for that has just joined the queue."""
    for member in ticket.rotation.matching_members(ticket.requirement):
        account = member.sharing.account
        if account is not None:
            account.refresh(now)


def let_go(ticket: WaitTicket, now: float) -> list[Resource[Any]]:
    """Do not hold an account for this call any more. Returns the resources that are open again because of that."""
    held, ticket.held = ticket.held, None
    account = None if held is None else held.sharing.account
    if account is None:
        return []
    account.let_go(ticket)
    return account.resources if account.has_opened(now) else []


def with_opened(resources: Iterable[Resource[Any]], now: float) -> list[Resource[Any]]:
    """These resources, and those that share a quota with one of them if there is some of it again."""
    found = list(resources)
    for account in {one.sharing.account for one in found}:
        if account is not None and account.has_opened(now):
            found += account.resources
    return found


def unwatched(resources: Iterable[Resource[Any]]) -> list[WaitTicket]:
    """The first waiters of pools that are to look again when a quota opens that one of these resources has."""
    rotations: set[Rotation] = set()
    for account in {one.sharing.account for one in resources}:
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
