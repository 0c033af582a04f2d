"""`resource.rest()`, `.spent()` and `.learn()` on a worker: a context variable carries them back, with the answer."""

from __future__ import annotations

import contextvars
from collections.abc import Mapping
from typing import Final, NamedTuple

from headgate.context.variables import ContextVar
from headgate.core.clock import clock
from headgate.core.rests import send_rests
from headgate.resources.costs import Spent

Told = tuple[int | None, tuple[tuple[str, str], ...]]
"""The status and the rate-limit headers of an answer."""


class Note(NamedTuple):
    """What a function told about its resource."""

    resource_id: str
    seconds: float = 0.0
    """Of the last rest that it asked for."""
    reason: str | None = None
    at: float = 0.0
    """When it asked for that rest, which tells the rest from the one before."""
    spent: tuple[float, float | None, float | None] | None = None
    """The tokens that it has used: in all, of its input and of its output. None if it has reported none."""
    told: Told | None = None
    """By its last answer."""


_REST: Final[ContextVar[tuple[object, ...] | None]] = ContextVar("rest", default=None)


def listen() -> None:
    """Note what is told of resources that no pool of this process holds, for the caller of the routine."""
    send_rests(_note, _note_spent, _note_told)


def noted(context: contextvars.Context | None = None) -> Note | None:
    """What was told last in this context, or in the current one."""
    found = _REST.get() if context is None else context.run(_REST.get)
    return None if found is None else Note(*found)  # type: ignore[arg-type]


def _note(resource_id: str, seconds: float, reason: str | None) -> None:
    before = _before(resource_id)
    _tell(before._replace(seconds=max(seconds, before.seconds), reason=reason, at=clock.now()))


def _note_spent(resource_id: str, total: float, input: float | None, output: float | None) -> None:
    before, more = _before(resource_id), Spent(total, input, output)
    spent = more if before.spent is None else Spent(*before.spent).plus(more)
    _tell(before._replace(spent=(spent.total, spent.input, spent.output)))


def _note_told(resource_id: str, status: int | None, headers: Mapping[str, str]) -> None:
    _tell(_before(resource_id)._replace(told=(status, tuple(headers.items()))))


def _before(resource_id: str) -> Note:
    before = noted()
    return before if before is not None and before.resource_id == resource_id else Note(resource_id)


def _tell(note: Note) -> None:
    _REST.set(tuple(note))  # plain values: what travels is read by workers of other versions too
