"""How long does a finished task hold its idempotency key?

While a task is unfinished it always holds its key: a duplicate is the same task. Afterwards its window decides.

| window | held after | released by |
|---|---|---|
| ``while_active`` | nothing | any end |
| ``until_success`` (default) | completed | every other end |
| ``forever`` | completed, failed, expired | rejected, cancelled, stale |
| seconds | completed, for so long from its end | every other end, or time |

Inside a process the monotonic clock counts these seconds. Across restarts only the wall clock can tell how many have
passed: setting it forward ends windows early.
"""

from __future__ import annotations

from typing import Final, Literal, TypeAlias, get_args

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
