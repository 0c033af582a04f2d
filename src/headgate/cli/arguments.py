"""Types of arguments that several commands have: numbers, seconds, sizes of memory."""

from __future__ import annotations

import argparse

TYPE_CHECKING = False  # see cli/main.py
if TYPE_CHECKING:
    from collections.abc import Callable


def whole(least: int) -> Callable[[str], int]:
    """Make a type for whole numbers that are at least this."""

    def number(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"must be at least {least}, got {text}")
        return value

    return number  # argparse says "invalid number value" if it is none


def seconds(text: str) -> float:
    """A number of seconds above 0."""
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number of seconds above 0, got {text}")
    return value


def memory(text: str) -> int:
    """A size of memory in bytes, from ``2G``, ``512M`` or ``1000000``."""
    from headgate.core.checks import memory_size

    size = memory_size(text)
    if size is None:
        raise argparse.ArgumentTypeError(f"must be a size such as 512M or 2G, got {text!r}")
    return size


def name(text: str) -> str:
    """A text that is not blank."""
    if not text.strip():
        raise argparse.ArgumentTypeError("must not be blank")
    return text
