"""What rooms need of threads: to call a function in one, and to see what each of them is doing."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def call_in_thread(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Any:
    """Call it in a thread whose future somebody awaits.

    A future refuses to carry StopIteration, and whoever waits for it would wait for ever: it becomes a RuntimeError, as
    in a coroutine.
    """
    try:
        return fn(*args, **(kwargs or {}))
    except StopIteration as stop:
        raise RuntimeError("the function raised StopIteration") from stop


def current_frames() -> dict[int, FrameType]:
    """The topmost frame of each thread, by its ident.

    The collector must not run in the middle of it: CPython holds the lock of its list of threads here, and what is
    collected may want that lock too (seen on 3.11: a test suite that stood still for ever).
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        return sys._current_frames()
    finally:
        if collects:
            gc.enable()
