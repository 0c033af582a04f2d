"""Rests, tokens and limits told on copies of resources: what a worker is given belongs to no pool there."""

from __future__ import annotations

from collections.abc import Callable, Mapping

Elsewhere = Callable[[str, float, str | None], None]
"""Told the id of a resource, the seconds and the reason."""

SpentElsewhere = Callable[[str, float, float | None, float | None], None]
"""Receives the id of a resource, and how many tokens a call used: in all, of its input and of its output, if known."""

LearnedElsewhere = Callable[[str, int | None, Mapping[str, str]], None]
"""Told the id of a resource, and the status and the rate-limit headers of an answer."""

_elsewhere: Elsewhere | None = None
_spent: SpentElsewhere | None = None
_learned: LearnedElsewhere | None = None


def send_rests(elsewhere: Elsewhere, spent: SpentElsewhere, learned: LearnedElsewhere) -> None:
    """Tell these of rests, tokens and limits of resources that no pool of this process holds, from now on."""
    global _elsewhere, _spent, _learned
    _elsewhere, _spent, _learned = elsewhere, spent, learned


def rest_elsewhere(resource_id: str, seconds: float, reason: str | None) -> None:
    """Pass on the rest of a resource that no pool of this process holds, if somebody wants to know."""
    if _elsewhere is not None:
        _elsewhere(resource_id, seconds, reason)


def spent_elsewhere(resource_id: str, total: float, input: float | None, output: float | None) -> None:
    """Pass on how many tokens a call used of a resource that no pool of this process holds."""
    if _spent is not None:
        _spent(resource_id, total, input, output)


def learned_elsewhere(resource_id: str, status: int | None, headers: Mapping[str, str]) -> None:
    """Pass on what an answer said about the limits of a resource that no pool of this process holds."""
    if _learned is not None:
        _learned(resource_id, status, headers)
