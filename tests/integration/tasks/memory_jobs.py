"""Routines whose results are counted where they arrive."""

from __future__ import annotations

import weakref
from typing import Any

from headgate import routine

alive: weakref.WeakSet[Large] = weakref.WeakSet()


class Large:
    """Stands for a result of a megabyte."""

    def __init__(self) -> None:
        self.size = 1_000_000

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        alive.add(self)


@routine
async def make(*_: Any) -> Large:
    return Large()


@routine
async def fails(*_: Any) -> None:
    raise ValueError(Large())
