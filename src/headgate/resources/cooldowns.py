"""The rule for cooldowns: how long a resource rests after a rate limit. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple, Protocol

from headgate.resources.model import Resource

DEFAULT_COOLDOWN_TABLE: Final = (30.0, 120.0, 300.0, 600.0)
"""Seconds of the first, second, ... cooldown in a row; the last entry counts for all that follow."""


SAME_UNTIL: Final = 0.05
"""Two ends of a cooldown that differ by less seconds are the same: the clocks of two processes are not compared more
exactly."""


class Cooling(Protocol):
    """What a cooldown follows from: a resource, or its state for one affinity."""

    consecutive_cooldown: int
    cooldown_until: float


class Cooldown(NamedTuple):
    """The cooldown that follows from a verdict."""

    consecutive: int
    """How many cooldowns in a row this is."""
    until: float
    seconds: float
    """From now on; exactly what was asked for, unless the current cooldown ends later."""
    reason: str | None = None
    """Why, where no signal says it."""


def cooldown_after(
    resource: Cooling, table: Sequence[float], asked: float | None, *, is_late: bool, now: float
) -> Cooldown:
    """Return the cooldown of a resource after a verdict that asks for so many seconds; None: the table decides.

    A late verdict, of a use from before the current cooldown, belongs to the same outage and is not counted again. No
    verdict makes a cooldown shorter.
    """
    consecutive = resource.consecutive_cooldown
    if not (is_late and consecutive > 0):
        consecutive += 1
    seconds = table[min(consecutive, len(table)) - 1] if asked is None else asked
    until = max(resource.cooldown_until, now + seconds)
    return Cooldown(consecutive, until, seconds if until == now + seconds else until - now)


def take_rest(resource: Resource[Any], now: float) -> Cooldown | None:
    """Return the rest that was asked for, and forget it; None if there is none, or it would change nothing.

    It is no sign of trouble, so it is not counted on top of the cooldowns before it.
    """
    rest, resource.sharing.rest = resource.sharing.rest, None
    if rest is None or resource.status == "disabled" or now + rest[0] <= resource.cooldown_until:
        return None
    return Cooldown(max(1, resource.consecutive_cooldown), now + rest[0], *rest)
