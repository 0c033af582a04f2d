"""How long does a finished task hold its idempotency key?

While a task is unfinished it always holds its key: a duplicate is the same task. Afterwards its window decides.

| window | held after | released by |
|---|---|---|
| ``while_active`` | nothing | any end |
| ``until_success`` (default) | completed | every other end |
| ``forever`` | completed, failed, expired | rejected, cancelled, stale |
| seconds | completed, for so long from its end | every other end, or time |

Inside a process the monotonic clock counts these seconds. Across restarts only the wall clock can tell how many have
passed: who sets it forward meanwhile ends windows.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final, Literal, TypeAlias, get_args

from headgate.core.checks import is_finite
from headgate.errors import InvalidArgument

WindowName: TypeAlias = Literal["while_active", "until_success", "forever"]
Window: TypeAlias = WindowName | float
"""The name of a window, or its length in seconds."""

WINDOWS: Final[tuple[WindowName, ...]] = get_args(WindowName)

_HOLDING: Final[dict[str, frozenset[str]]] = {
    "while_active": frozenset(),
    "until_success": frozenset({"completed"}),
    "forever": frozenset({"completed", "failed", "expired"}),
}


def is_key(key: object) -> bool:
    """Can this be an idempotency key?"""
    return isinstance(key, str) and bool(key.strip())


def checked_window(window: object) -> Window:
    """A window as it may be used, or InvalidArgument."""
    if isinstance(window, str) and window in WINDOWS:
        return window
    if is_finite(window) and window > 0:
        return float(window)
    raise InvalidArgument(
        f"window must be one of {', '.join(WINDOWS)}, or seconds > 0, got {window!r}",
        remedy="Leave it out for 'until_success': a completed task holds its key, every other end releases it.",
    )


def holds_key(window: Window, status: str, finished_at: float | None, now: float) -> bool:
    """Does a task in this terminal status still hold its key? Both times on the same clock, in seconds."""
    if isinstance(window, str):
        return status in _HOLDING[window]
    return status == "completed" and finished_at is not None and now < finished_at + window


def difference(old: str, new: str, *, same_arguments: bool | None) -> str:
    """What is not the same about the work behind one key: functions by name (see `work_of`), "" where unknown.

    `same_arguments` is None when nobody can tell. Returns "" when nothing differs, as far as one can tell.
    """
    if not old or not new:
        return "the function or its arguments differ" if same_arguments is False else ""
    if old == new:
        return "the arguments differ" if same_arguments is False else ""
    arguments = {True: ", with the same arguments", False: ", with other arguments", None: ""}[same_arguments]
    same_name = old.partition(":")[2] == new.partition(":")[2]
    is_script = same_name and "__main__" in (old.partition(":")[0], new.partition(":")[0])
    hint = "; the module of a script that is run directly is called __main__" if is_script else ""
    return f"the function differs: it was {old} and is now {new}{arguments}{hint}"


def equal(one: object, other: object) -> bool:
    """Are they equal? No for arrays and the like, whose == is no yes or no."""
    try:
        return one is other or bool(one == other)
    except Exception:
        return False


def work_of(fn: Callable[..., Any] | None, args: tuple[Any, ...]) -> tuple[str, tuple[Any, ...]]:
    """The function by name, and its arguments. A `functools.partial` is what it wraps."""
    keywords: dict[str, Any] = {}
    while isinstance(fn, partial):
        args = (*fn.args, *args)
        keywords = {**fn.keywords, **keywords}
        fn = fn.func
    named: object = fn if hasattr(fn, "__qualname__") else type(fn)
    module = getattr(named, "__module__", None) or type(getattr(fn, "__self__", fn)).__module__
    return f"{module}:{getattr(named, '__qualname__', '')}", (*args, ("keywords", keywords)) if keywords else args
