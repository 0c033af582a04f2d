"""The generator wool's workers are asked to run: `ours_streams`, decorated by wool, which knows no running ahead."""

from __future__ import annotations

from collections.abc import AsyncIterator

import wool


@wool.routine
async def count(items: int) -> AsyncIterator[int]:
    for item in range(items):
        yield item
