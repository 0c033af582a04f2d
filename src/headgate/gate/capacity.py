"""A capacity: so many uses at a time, each given back when it ends. Who is next when some are free. Pure.

Slots of a shared budget, permits of a resource with `max_in_flight` and the probe after a cooldown are capacities. They
differ in who ranks first and in what counts as a use; how the free ones are given out is here.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias, TypeVar

Claimant = TypeVar("Claimant")

Rank: TypeAlias = tuple[Any, ...]


def allot(
    free: int, claimants: Iterable[Claimant], rank: Callable[[Claimant], Rank | None], give: Callable[[Claimant], None]
) -> int:
    """Give what is free, one by one, to whoever ranks first at that moment: the smallest rank. Returns what is left.

    The rank of a claimant is None once it may have no more. Giving to one may change the ranks of others, but only to
    later ones: a claimant whose rank has changed since it was last looked at goes back into the line.
    """
    if free <= 0:
        return free
    heap = [(ranked, place, one) for place, one in enumerate(claimants) if (ranked := rank(one)) is not None]
    heapq.heapify(heap)
    while heap and free > 0:
        before, place, one = heap[0]
        current = rank(one)
        if current is None:
            heapq.heappop(heap)
        elif current != before:
            heapq.heapreplace(heap, (current, place, one))
        else:
            give(one)
            free -= 1
    return free
