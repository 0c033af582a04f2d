"""Further requests within one use of a resource: a client sends again what its operation asked for once.

`sites.run(operation)` takes one request of a site's quota. If the HTTP client inside the operation sends its request
through a second proxy because the first one failed, the site sees two. So before each further attempt the transport
takes another request of every quota around it, and waits for it in the same queue as calls that start. It needs nothing
else of the resource, which is in use already: no place below `max_in_flight`, and no end of a cooldown.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from headgate.core.clock import clock
from headgate.resources.accounts import Account
from headgate.resources.current_use import current_uses
from headgate.resources.engine import Engine, end_abandoned, lock
from headgate.resources.members import FurtherTicket, Use
from headgate.resources.rotation import Rotation
from headgate.resources.wakeups import LoopWaiter, ThreadWaiter, Waiter

Taken = Literal["taken", "late", "gone"]
"""How it ended: the deadline may pass first, or the resource be disabled or removed."""


async def take_further(own: Rotation, deadline: float | None) -> Taken:
    """Take another request of each quota around the running code, except those of the pool `own`."""
    for use in _uses_around(own):
        waiter = LoopWaiter()
        ticket = _ask(use, waiter)
        if ticket is not None:
            try:
                await waiter.wait(deadline)
            except BaseException:
                _engine(use).let_go(ticket)
                raise
            if (taken := _collect(ticket)) != "taken":
                return taken
    return "taken"


def take_further_sync(own: Rotation, deadline: float | None) -> Taken:
    """`take_further` for a thread without a loop."""
    for use in _uses_around(own):
        waiter = ThreadWaiter()
        ticket = _ask(use, waiter)
        if ticket is not None:
            try:
                waiter.wait(deadline)
            except BaseException:
                _engine(use).let_go(ticket)
                raise
            if (taken := _collect(ticket)) != "taken":
                return taken
    return "taken"


def _uses_around(own: Rotation) -> Iterable[Use]:
    """One running use for each quota around this code. The pool `own` counts its attempts by itself."""
    found: dict[Account, Use] = {}
    uses = current_uses()
    if uses:
        with lock:
            for use in uses:
                account = use.member.sharing.account
                if account is not None and use.is_running and all(one.rotation is not own for one in account.members):
                    found.setdefault(account, use)
    return found.values()


def _ask(use: Use, waiter: Waiter) -> FurtherTicket | None:
    """Take another request for a use, or else join the wait queue of its pool; None: it was taken."""
    rotation, engine = use.member.rotation, _engine(use)
    end_abandoned()
    ticket = None
    with lock:
        now = clock.now()
        effects = rotation.advance(now) if rotation.due(now) else None
        if rotation.take_further(use, now) is None:
            ticket = FurtherTicket(use, waiter)
            rotation.join(ticket, now)
    engine.carry_out(effects)
    engine.watch()
    return ticket


def _collect(ticket: FurtherTicket) -> Taken:
    """What a waiter got, now that it was woken or its deadline has passed."""
    rotation, engine = ticket.rotation, _engine(ticket.within)
    with lock:
        got, ticket.grant = ticket.grant, None
        waits = ticket in rotation.wait_queue
        effects = rotation.leave(ticket, clock.now()) if waits else None
    engine.carry_out(effects)
    engine.watch()
    if got is not None:
        return "taken"
    return "late" if waits else "gone"


def _engine(use: Use) -> Engine[Any]:
    engine = use.member.rotation.owner
    assert engine is not None, "uses that code runs in are those of pools"
    return engine
