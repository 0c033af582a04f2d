"""`resource.rest()` and `resource.spent()` on a worker: a context variable carries them back, with the answer."""

from __future__ import annotations

import contextvars
from typing import Final

from headgate.context.variables import ContextVar
from headgate.core.clock import clock
from headgate.core.rests import send_rests

Noted = tuple[str, float, str | None, float, float | None] | tuple[str, float, str | None, float] | None
"""Resource id, seconds and reason of the last rest, when that was told, which tells it from the one before, and the
tokens that were spent. Former releases know of no tokens."""

_REST: Final[ContextVar[Noted]] = ContextVar("rest", default=None)


def listen() -> None:
    """Note rests of resources that no pool of this process holds, for the caller of the routine that asks for them."""
    send_rests(_note, _note_spent)


def noted(context: contextvars.Context | None = None) -> Noted:
    """What was asked for last in this context, or in the current one."""
    return _REST.get() if context is None else context.run(_REST.get)


def spent_of(note: Noted) -> float | None:
    """The tokens that were told to be spent, if any."""
    return note[4] if note is not None and len(note) > 4 else None


def _note(resource_id: str, seconds: float, reason: str | None) -> None:
    before = _REST.get()
    spent = None
    if before is not None and before[0] == resource_id:
        spent = spent_of(before)
        if before[1] > seconds:
            seconds = before[1]
    _REST.set((resource_id, seconds, reason, clock.now(), spent))


def _note_spent(resource_id: str, tokens: float) -> None:
    before = _REST.get()
    if before is None or before[0] != resource_id:
        before = (resource_id, 0.0, None, 0.0)
    _REST.set((before[0], before[1], before[2], before[3], (spent_of(before) or 0.0) + tokens))
