"""Polling, and what is planted to be searched for."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
PATIENCE = 20.0
SECRET = "sk-planted-observed-0c1d2e"


def eventually(look: Callable[[], T], patience: float = PATIENCE) -> T:
    """Look again and again until there is something to see, and return that."""
    limit = time.monotonic() + patience
    while True:
        seen = look()
        if seen or time.monotonic() > limit:
            assert seen, "it did not come"
            return seen
        time.sleep(0.02)
