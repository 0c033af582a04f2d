"""Rests and tokens told on copies of resources: what a worker is given belongs to no pool there."""

from __future__ import annotations

from collections.abc import Callable

Elsewhere = Callable[[str, float, str | None], None]
"""Told the id of a resource, the seconds and the reason."""

SpentElsewhere = Callable[[str, float], None]
"""Told the id of a resource, and how many tokens a call used."""

_elsewhere: Elsewhere | None = None
_spent: SpentElsewhere | None = None


def send_rests(elsewhere: Elsewhere, spent: SpentElsewhere) -> None:
    """Tell these of rests and tokens of resources that no pool of this process holds, from now on."""
    global _elsewhere, _spent
    _elsewhere, _spent = elsewhere, spent


def rest_elsewhere(resource_id: str, seconds: float, reason: str | None) -> None:
    """Pass on the rest of a resource that no pool of this process holds, if somebody wants to know."""
    if _elsewhere is not None:
        _elsewhere(resource_id, seconds, reason)


def spent_elsewhere(resource_id: str, tokens: float) -> None:
    """Pass on how many tokens a call used of a resource that no pool of this process holds."""
    if _spent is not None:
        _spent(resource_id, tokens)
