"""Checks of single values, each with an error that names the parameter and shows what was given.

What may be a secret put in the wrong place is shown by its type only.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TypeGuard

from headgate.errors import InvalidArgument, InvalidType

Affinity = str | int | bytes | tuple[str | int | bytes, ...]
"""What calls may be kept together by: values that read the same in every process."""


def is_finite(number: object) -> TypeGuard[float]:
    """A number that arithmetic can bear: not a bool, not infinite, not an integer beyond all floats."""
    if not isinstance(number, (int, float)) or isinstance(number, bool):
        return False
    try:
        return math.isfinite(number)
    except OverflowError:
        return False


def checked_id(resource_id: object) -> str:
    """A usable id, or InvalidArgument."""
    if not isinstance(resource_id, str) or not resource_id:
        # The thing passed may well be the secret, put in the wrong place: show its type, never itself.
        shown = "an empty string" if resource_id == "" else type(resource_id).__name__
        raise InvalidArgument(
            f"resource_id must be a non-empty string, got {shown}",
            remedy="Name each resource, for example 'key-1'; the secret itself goes into value.",
        )
    return resource_id


def checked_limit(max_in_flight: object) -> int | None:
    """A usable limit, or InvalidArgument."""
    if max_in_flight is None:
        return None
    if not isinstance(max_in_flight, int) or isinstance(max_in_flight, bool) or max_in_flight < 1:
        raise InvalidArgument(
            f"max_in_flight must be >= 1 or None, got {max_in_flight!r}",
            remedy="Pass a whole number, 1 for exclusive use, or None for no limit.",
        )
    return max_in_flight


def checked_names(parameter: str, names: object) -> frozenset[str]:
    """A set of names (tags or ids), or InvalidType."""
    if isinstance(names, str) or not isinstance(names, Iterable):
        shown = repr(names) if isinstance(names, str) else type(names).__name__
        raise InvalidType(
            f"{parameter} must be a collection of strings, got {shown}",
            remedy=f"Write {parameter}=({shown},)" if isinstance(names, str) else "Pass a list or a set of strings.",
        )
    found = list(names)
    for name in found:
        if not isinstance(name, str):
            raise InvalidType(f"{parameter} must hold strings only, got {type(name).__name__}")
    return frozenset(found)


def checked_affinity(affinity: object) -> Affinity | None:
    """None, or a value that reads the same in every process; else InvalidType."""
    if affinity is None or _is_affinity(affinity):
        return affinity
    shown = type(affinity).__name__
    if isinstance(affinity, tuple):
        shown += f" with {', '.join(sorted({type(part).__name__ for part in affinity if not _is_atom(part)}))} in it"
    raise InvalidType(
        f"affinity must be a str, an int, bytes or a tuple of these, got {shown}",
        remedy="Pass what names the user, session or document, such as affinity=user_id or affinity=(tenant, user_id).",
    )


def _is_affinity(affinity: object) -> TypeGuard[Affinity]:
    return _is_atom(affinity) or (isinstance(affinity, tuple) and all(map(_is_atom, affinity)))


def _is_atom(part: object) -> bool:
    # A bool is an int to Python, and a mistake here: all calls would be kept together, or in two heaps.
    return isinstance(part, (str, int, bytes)) and not isinstance(part, bool)


def checked_number(parameter: str, number: object) -> float:
    """A finite number, or InvalidArgument."""
    if not is_finite(number):
        raise InvalidArgument(f"{parameter} must be a finite number, got {number!r}")
    return number


def checked_attempts(max_attempts: object) -> int:
    """A usable number of attempts, or InvalidArgument."""
    if not isinstance(max_attempts, int) or isinstance(max_attempts, bool) or max_attempts < 1:
        raise InvalidArgument(
            f"max_attempts must be >= 1, got {max_attempts!r}", remedy="Pass a whole number of at least 1."
        )
    return max_attempts


def checked_flag(parameter: str, flag: object) -> bool:
    """True or False, or InvalidType."""
    if not isinstance(flag, bool):
        raise InvalidType(f"{parameter} must be bool, got {type(flag).__name__}", remedy="Pass True or False.")
    return flag


def checked_seconds(rule: str, seconds: object, least: float = 0.0) -> float:
    """A finite number of at least `least`, or InvalidArgument with the `rule`."""
    if not is_finite(seconds) or seconds < least:
        raise InvalidArgument(f"{rule}, got {seconds!r}")
    return seconds
