"""What a call learns about resources whose pool is in another process: its answer carries it back.

A worker is given copies of resources. `resource.rest()`, `.spent()` and `.learn()` on a copy are noted with the call
that runs, in whichever task or thread of it, and the process that has the pool hears of them with the answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from typing import Final, NamedTuple, Protocol


class Lesson(NamedTuple):
    """What a call has learned about one resource."""

    resource_id: str
    rest: float | None = None
    """The seconds for which it is to rest; None: it is not."""
    reason: str | None = None
    spent: tuple[float, float | None, float | None] | None = None
    """The tokens that the call used: in all, of its input and of its output, if known. None: none were reported."""
    status: int | None = None
    headers: tuple[tuple[str, str], ...] = ()
    """Of the last answer that said something about rate limits."""


class Learner(Protocol):
    """A call of another process that runs here."""

    def learned(self, lessons: Sequence[Lesson]) -> None:
        """Note what it has learned, for its answer."""


LEARNER: Final[ContextVar[Learner | None]] = ContextVar("headgate.caller", default=None)
"""The call of another process whose code is running. `workers.routines` has it with its type, as CALLER."""


def joined(first: Lesson, second: Lesson) -> Lesson:
    """What two lessons about the same resource say together."""
    spent = first.spent
    if spent is None or second.spent is None:
        spent = spent or second.spent
    else:
        spent = (
            spent[0] + second.spent[0],
            _sum(spent[1], second.spent[1]),
            _sum(spent[2], second.spent[2]),
        )
    rests = second.rest is not None and (first.rest is None or second.rest >= first.rest)
    rest, reason = (second.rest, second.reason) if rests else (first.rest, first.reason)
    told = second if second.headers or second.status is not None else first
    return Lesson(first.resource_id, rest, reason, spent, told.status, told.headers)


def _sum(first: float | None, second: float | None) -> float | None:
    return second if first is None else first if second is None else first + second


def rest_elsewhere(resource_id: str, seconds: float, reason: str | None) -> None:
    """Let a resource rest whose pool is in another process, if the code runs for a call of that."""
    _note(Lesson(resource_id, rest=seconds, reason=None if reason is None else _text(reason)))


def spent_elsewhere(resource_id: str, total: float, input: float | None, output: float | None) -> None:
    """Report how many tokens a call used of a resource whose pool is in another process."""
    _note(Lesson(resource_id, spent=(total, input, output)))


def learned_elsewhere(resource_id: str, status: int | None, headers: Mapping[str, str]) -> None:
    """Report what an answer said about the limits of a resource whose pool is in another process."""
    told, left = [], _MOST_TEXT
    for name, value in headers.items():
        left -= len(name) + len(value)
        if left < 0:
            break
        told.append((_text(name), _text(value)))
    _note(Lesson(resource_id, status=status, headers=tuple(told)))


def _note(lesson: Lesson) -> None:
    learner = LEARNER.get()
    if learner is not None:
        learner.learned((lesson._replace(resource_id=_text(lesson.resource_id)),))


_MOST_TEXT = 8192  # characters of the headers of one answer, of which providers send a tenth of that


def _text(text: object) -> str:
    """What a message can carry: a reason may be any object, and a text may have halves of characters."""
    try:
        text = str(text)[:_MOST_TEXT]
    except Exception:  # it runs code of users
        return "it cannot be shown"
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()
