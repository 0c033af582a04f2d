"""`resource.rest()` on a worker: a context variable carries it back to the pool, with the answer of the call."""

from __future__ import annotations

import contextvars
from typing import Final

from headgate.context.variables import ContextVar
from headgate.core.clock import clock
from headgate.core.rests import send_rests

_REST: Final[ContextVar[tuple[str, float, str | None, float] | None]] = ContextVar("rest", default=None)
"""The last rest that was asked for: resource id, seconds, reason, and when, which tells it from the one before."""

Noted = tuple[str, float, str | None, float] | None


def listen() -> None:
    """Note rests of resources that no pool of this process holds, for the caller of the routine that asks for them."""
    send_rests(_note)


def noted(context: contextvars.Context | None = None) -> Noted:
    """What was asked for last in this context, or in the current one."""
    return _REST.get() if context is None else context.run(_REST.get)


def _note(resource_id: str, seconds: float, reason: str | None) -> None:
    before = _REST.get()
    if before is not None and before[0] == resource_id and before[1] > seconds:
        seconds = before[1]
    _REST.set((resource_id, seconds, reason, clock.now()))
