"""The generators our workers are asked to run. Apart from `ours_work`: an older headgate refuses to decorate them."""

from __future__ import annotations

from collections.abc import AsyncIterator

import headgate


@headgate.routine
async def count(items: int) -> AsyncIterator[int]:
    for item in range(items):
        yield item


@headgate.routine(prefetch=64)
async def count_ahead(items: int) -> AsyncIterator[int]:
    for item in range(items):
        yield item
