"""Checks of the arguments of a WorkerPool."""

from __future__ import annotations

from typing import Any

from headgate.errors import InvalidArgument, InvalidType
from headgate.resources.fields import is_finite


def usable_as_balancer(value: Any) -> bool:
    """Is it a balancer, a factory of one, or a context manager that gives one?"""
    return callable(value) or any(hasattr(value, name) for name in ("order", "__aenter__", "__enter__"))


def checked_count(name: str, value: Any, least: int) -> None:
    """A whole number of at least `least`, or None."""
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidType(f"{name} must be a whole number, got {type(value).__name__}")
    if value < least:
        raise InvalidArgument(f"{name} must be >= {least}, got {value}")


def checked_seconds(name: str, value: Any) -> float | None:
    """A number of seconds, or None for no limit."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InvalidType(f"{name} must be a number of seconds or None, got {type(value).__name__}")
    if not is_finite(value) or value < 0:
        raise InvalidArgument(f"{name} must be >= 0, got {value!r}")
    return float(value)


def checked_limit(name: str, value: Any) -> float | None:
    """A number of seconds above 0, or None for no limit."""
    if value is None:
        return None
    if checked_seconds(name, value) == 0:
        raise InvalidArgument(f"{name} must be above 0, got {value!r}", remedy="None means that there is no limit.")
    return float(value)
