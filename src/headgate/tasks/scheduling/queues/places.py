"""Where a task stands in a queue: how many tasks start before it. Estimates, in bounded time. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

MANY: Final = 1_000
"""How many tenants or priorities are looked at. Of more, these stand for the rest."""


class Place(NamedTuple):
    """How many tasks start before one, if no others come."""

    ahead: float
    own: float
    """How many of these are of its own tenant."""


def stands_for(count: int) -> float:
    """How many tenants each stands for that is looked at, of so many."""
    return max(1.0, count / MANY)


def in_turn(own: float, others: Iterable[int], each: float, *, last: bool) -> Place:
    """The place of a task of a tenant that takes turns with others, behind `own` tasks of its own.

    `others` says how many tasks other tenants have queued, of which `each` stands for so many. With `last` its tenant
    comes after all others; otherwise it comes somewhere among them.
    """
    turns = own + (1.0 if last else 0.5)
    return Place(own + each * sum(min(size, turns) for size in others), own)


def mixed(own: float, size: int, others: float, *, new: bool) -> Place:
    """The place of a task behind `own` of the `size` tasks of its group, where groups are mixed evenly."""
    part = 1.0 if new else (own + 0.5) / max(1, size)
    return Place(own + part * others, own)
