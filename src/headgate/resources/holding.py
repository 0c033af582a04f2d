"""Which account of a quota serves a waiting call next, that needs more than there is. Pure: see `accounts`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from headgate.resources.accounts import Account
from headgate.resources.members import Member, Use, WaitTicket
from headgate.resources.model import Resource


def hold(ticket: WaitTicket, members: Iterable[Member], now: float) -> None:
    """Let the account that can serve a waiting call soonest serve nobody else before it."""
    best: Account | None = None
    soonest = 0.0
    for member in members:
        account = member.sharing.account
        if account is None or member.resource.status != "healthy" or not member.can_ever_serve(ticket.cost):
            continue
        if account.holder() is None:
            at = account.would_open_at(ticket.cost, now)
            if best is None or at < soonest:
                best, soonest = account, at
    if best is not None:
        best.hold(ticket)
        ticket.held = best
        best.refresh(now)


def ask_others(members: Iterable[Member], now: float) -> None:
    """Ask other processes for what a call waits for that has just joined the queue."""
    for member in members:
        account = member.sharing.account
        if account is not None and account.is_closed:
            account.refresh(now)


def let_go(ticket: WaitTicket, now: float) -> list[Resource[Any]]:
    """Do not hold an account for this call any more. Returns the resources that are open again because of that."""
    account, ticket.held = ticket.held, None
    if account is None:
        return []
    account.let_go(ticket)
    return account.resources if account.refresh(now) else []


def unspent(use: Use, now: float) -> None:
    """Give back what a use has taken of a quota: it was never begun."""
    reservation, use.reservation = use.reservation, None
    if reservation is not None:
        reservation.account.cancel(reservation, now)
        reservation.account.refresh(now)


def reprice(use: Use, cost: float, now: float) -> bool:
    """Let a use that has not begun take what another call costs; False: there is too little for that."""
    reservation = use.reservation
    if reservation is None or reservation.cost == cost:
        return True
    account = reservation.account
    account.cancel(reservation, now)
    fits = account.admits(cost, now, None)
    use.reservation = account.reserve(cost if fits else reservation.cost, now)
    account.refresh(now)
    return fits
