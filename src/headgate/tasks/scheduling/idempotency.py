"""Idempotency keys of one pool: what a key stands for, and how other work under the same key is told apart."""

from __future__ import annotations

import reprlib
from collections.abc import Callable
from functools import partial
from typing import Any, Final, Literal, TypeAlias

from headgate.core.redaction import redact
from headgate.errors import InvalidArgument

OnConflict: TypeAlias = Literal["error", "trust_key"]
"""What becomes of a submit whose key is held by other work: IdempotencyConflict, or the result of that work."""

_PAYLOAD: Final = "payload_id="
_SHORT: Final = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 80


def is_key(key: object) -> bool:
    """Can this be an idempotency key?"""
    return isinstance(key, str) and bool(key.strip())


def checked_on_conflict(on_conflict: object) -> OnConflict:
    """An `on_conflict` as it may be used, or InvalidArgument."""
    if on_conflict not in ("error", "trust_key"):
        raise InvalidArgument(f"on_conflict must be 'error' or 'trust_key', got {on_conflict!r}")
    return on_conflict


def difference(old: str, new: str, *, same_arguments: bool | None, arguments_differ: str = "") -> str:
    """What is not the same about the work behind one key: by name (see `work_of`), "" where unknown.

    `same_arguments` is None when nobody can tell; `arguments_differ` says how they differ. Returns "" when nothing
    differs, as far as one can tell.
    """
    how = f": {arguments_differ}" if arguments_differ else ""
    if not old or not new:
        return f"the function or its arguments differ{how}" if same_arguments is False else ""
    if old == new:
        return f"the arguments differ{how}" if same_arguments is False else ""
    if old.startswith(_PAYLOAD) or new.startswith(_PAYLOAD):
        return f"the payload differs: it was {old} and is now {new}"
    arguments = {True: ", with the same arguments", False: ", with other arguments", None: ""}[same_arguments]
    same_name = old.partition(":")[2] == new.partition(":")[2]
    is_script = same_name and "__main__" in (old.partition(":")[0], new.partition(":")[0])
    hint = "; the module of a script that is run directly is called __main__" if is_script else ""
    return f"the function differs: it was {old} and is now {new}{arguments}{hint}"


def unequal(old: tuple[Any, ...], new: tuple[Any, ...]) -> str:
    """How arguments differ, for people: the first that does, as it was and as it is."""
    for place, (one, other) in enumerate(zip(old, new, strict=False), 1):
        if not equal(one, other):
            return f"argument {place} was {_shown(one)} and is now {_shown(other)}"
    return f"there were {len(old)} and are now {len(new)}" if len(old) != len(new) else ""


def _shown(value: object) -> str:
    try:
        return redact(_SHORT.repr(value))
    except Exception:  # it runs code of users
        return f"a {type(value).__qualname__}"


def equal(one: object, other: object) -> bool:
    """Are they equal? No for arrays and the like, whose == is no yes or no."""
    try:
        return one is other or bool(one == other)
    except Exception:
        return False


def payload_name(payload_id: str) -> str:
    """The name of work that the caller named, which is compared instead of function and arguments."""
    return f"{_PAYLOAD}{payload_id!r}"


def work_of(
    fn: Callable[..., Any] | None, args: tuple[Any, ...], payload_id: str | None = None
) -> tuple[str, tuple[Any, ...]]:
    """What is compared: the function by name, and its arguments. A `functools.partial` is what it wraps.

    With a `payload_id`, that alone.
    """
    if payload_id is not None:
        return payload_name(payload_id), ()
    keywords: dict[str, Any] = {}
    while isinstance(fn, partial):
        args = (*fn.args, *args)
        keywords = {**fn.keywords, **keywords}
        fn = fn.func
    named: object = fn if hasattr(fn, "__qualname__") else type(fn)
    module = getattr(named, "__module__", None) or type(getattr(fn, "__self__", fn)).__module__
    return f"{module}:{getattr(named, '__qualname__', '')}", (*args, ("keywords", keywords)) if keywords else args
