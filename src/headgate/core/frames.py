"""What every thread is doing at this moment."""

from __future__ import annotations

import gc
import sys
from types import FrameType


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
