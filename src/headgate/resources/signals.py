"""What an operation may say about the resource it was given, by raising.

    return, or any other exception      the resource is healthy
    raise CooldownResource(...)         it is overloaded for now (429): rest it, try another
    raise DisableResource(...)          it is dead (401): never again, try another
    raise RetryOperation(...)           it is fine, this attempt is not (502): try again, best elsewhere

They derive from Exception alone. They are messages to the pool, and a caller who catches HeadgateError must not catch
one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from headgate.core.checks import is_finite
from headgate.core.clock import clock
from headgate.errors import InvalidArgument, travel
from headgate.resources.http_times import seconds_of


class CooldownResource(Exception):
    """The resource is overloaded: rest it for `cooldown_seconds`, or as long as the pool's table says.

    With ``only_for="affinity"`` it rests for calls with the same `affinity=` as this one, and serves all others: a
    proxy that one site has banned. For a call without an affinity that is a cooldown like any other.
    """

    cooldown_seconds: float | None = None  # also for a subclass that does not call our constructor
    reason: str | None = None
    only_for: Literal["affinity"] | None = None

    def __init__(
        self,
        cooldown_seconds: float | None = None,
        reason: str | None = None,
        *,
        only_for: Literal["affinity"] | None = None,
    ) -> None:
        if cooldown_seconds is not None and not _is_duration(cooldown_seconds):
            raise InvalidArgument(
                f"cooldown_seconds must be >= 0 or None, got {cooldown_seconds!r}",
                remedy="Pass finite seconds, or None for the pool's cooldown_table; text goes into reason=.",
            )
        if only_for not in (None, "affinity"):
            raise InvalidArgument(
                f'only_for must be "affinity" or None, got {only_for!r}',
                remedy="It names no site or user: the cooldown is for the affinity= that the call was made with.",
            )
        super().__init__(reason or "resource cooldown")
        self.cooldown_seconds = cooldown_seconds
        self.reason = reason
        if only_for is not None:
            self.only_for = only_for

    def __reduce__(self) -> tuple[Any, ...]:
        return travel(self)


class DisableResource(Exception):
    """The resource is unusable and stays so until somebody enables it."""

    reason: str | None = None

    def __init__(self, reason: str | None = None) -> None:
        super().__init__(reason or "resource disabled")
        self.reason = reason

    def __reduce__(self) -> tuple[Any, ...]:
        return travel(self)


class RetryOperation(Exception):
    """The resource is fine, this attempt is not: try again, elsewhere if anything else is eligible."""

    reason: str | None = None

    def __init__(self, reason: str | None = None) -> None:
        super().__init__(reason or "operation retry")
        self.reason = reason

    def __reduce__(self) -> tuple[Any, ...]:
        return travel(self)


Signal = CooldownResource | DisableResource | RetryOperation
SIGNALS = (CooldownResource, DisableResource, RetryOperation)


def signal_in(error: BaseException) -> tuple[Signal | None, bool]:
    """The gravest signal that `error` is or groups, and whether it says nothing else.

    A TaskGroup inside an operation wraps what its children raise. A group of signals alone is as good as its gravest; a
    group with a real failure in it teaches the pool the same, but the failure must reach the caller.
    """
    if isinstance(error, SIGNALS):
        return error, True
    if not isinstance(error, BaseExceptionGroup):
        return None, False
    leaves = list(_leaves(error))
    signals = [leaf for leaf in leaves if isinstance(leaf, SIGNALS)]
    if not signals:
        return None, False
    return max(signals, key=_gravity), len(signals) == len(leaves)


def parse_retry_after(text: str | None) -> float | None:
    """Seconds that a Retry-After header asks for (a number, "400ms", "6m0s" or a date); None if it is unreadable."""
    return seconds_of(text, clock.wall()) if isinstance(text, str) else None


def _is_duration(seconds: object) -> bool:
    return is_finite(seconds) and float(seconds) >= 0


def _leaves(group: BaseExceptionGroup[BaseException]) -> Iterator[BaseException]:
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _leaves(error)
        else:
            yield error


def _gravity(signal: Signal) -> tuple[int, float]:
    if isinstance(signal, DisableResource):
        return 3, 0.0
    if isinstance(signal, CooldownResource):
        seconds = -1.0 if signal.cooldown_seconds is None else signal.cooldown_seconds
        return 2 if signal.only_for is None else 1, seconds
    return 0, 0.0
