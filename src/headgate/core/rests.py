"""Rests asked for on copies of resources: what a worker is given belongs to no pool there."""

from __future__ import annotations

from collections.abc import Callable

Elsewhere = Callable[[str, float, str | None], None]
"""Told the id of a resource, the seconds and the reason."""

_elsewhere: Elsewhere | None = None


def send_rests(elsewhere: Elsewhere) -> None:
    """Tell this of the rests of resources that no pool of this process holds, from now on."""
    global _elsewhere
    _elsewhere = elsewhere


def rest_elsewhere(resource_id: str, seconds: float, reason: str | None) -> None:
    """Pass on the rest of a resource that no pool of this process holds, if somebody wants to know."""
    if _elsewhere is not None:
        _elsewhere(resource_id, seconds, reason)
