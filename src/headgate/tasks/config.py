"""Checks of what a pool is made with."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from headgate.errors import InvalidArgument, InvalidType
from headgate.resources.fields import is_finite


def checked_name(name: object, pipeline_id: str | None) -> str:
    """A name. When there is none: "", and the registry draws one; for what is remembered the same each time."""
    if name is not None and not isinstance(name, str):
        raise InvalidType(f"name must be a string or None, got {type(name).__name__}")
    if name and name.strip():
        return name
    return "" if pipeline_id is None else f"pipeline {pipeline_id}"


def checked_whole(what: str, number: object, least: int) -> int:
    """A whole number of at least `least`."""
    if not isinstance(number, int) or isinstance(number, bool) or number < least:
        raise InvalidArgument(
            f"{what} must be >= {least}, got {number!r}", remedy=f"Pass a whole number of at least {least}."
        )
    return number


def checked_stale_after(stale_after: object) -> float:
    """Seconds."""
    seconds = stale_after.total_seconds() if isinstance(stale_after, timedelta) else stale_after
    if not is_finite(seconds) or seconds <= 0:
        raise InvalidArgument(f"stale_after must be > 0 seconds or a timedelta, got {stale_after!r}")
    return float(seconds)


def seconds_of(milliseconds: Any) -> Any:
    """Milliseconds as seconds."""
    if isinstance(milliseconds, timedelta):
        return milliseconds
    if not is_finite(milliseconds) or milliseconds <= 0:
        raise InvalidArgument(f"stale_after_ms must be > 0 milliseconds, got {milliseconds!r}")
    return milliseconds / 1000


def respell(what: str, options: dict[str, Any], name: str, *others: str) -> None:
    """Put an option that was given under one of its other names under its own."""
    refuse_both(what, options, name, *others)
    for other in others:
        if other in options:
            options[name] = options.pop(other)


def refuse_both(what: str, options: Mapping[str, Any], *names: str) -> None:
    """InvalidArgument: an option was given under two of its names."""
    given = [name for name in names if name in options]
    if len(given) > 1:
        raise InvalidArgument(
            f"{what} was given {' and '.join(given)}, which are names of one option", remedy=f"Pass {names[0]} alone."
        )


def check_store(store: object) -> None:
    """Refuse what is no store."""
    if store is not None and not (hasattr(store, "open") and hasattr(store, "shared")):
        raise InvalidType(
            f"store must be a Store, got {type(store).__name__}",
            remedy="Pass headgate.stores.JsonLinesStore(path), or something with the same methods.",
        )
