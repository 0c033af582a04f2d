"""Every live pool of this process: its kind, its name, and a snapshot of its state.

Metrics, dashboards and commands read this list instead of asking users to hand over their pools. A pool enters itself:
a ResourcePool and a TaskPool when they are made, a WorkerPool when its block is entered. A pool leaves when it is
closed, because a closed pool is not live, or when nothing refers to it any more: the registry holds pools weakly. Names
need not be unique here. A forked child inherits the entries together with the pools.

There is no lock. Each change is one operation on a dict, which is atomic, and a reader copies the dict first. So pools
may be made in any thread, the garbage collector may take one away in the middle of a call, and a fork leaves nothing
locked.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeVar

Kind = Literal["resources", "tasks", "workers"]
"""What a pool is a pool of."""

P = TypeVar("P")


@dataclass(frozen=True, slots=True)
class LivePool:
    """One pool that was live when the list was read. It does not keep the pool alive."""

    kind: Kind
    name: str
    _pool: weakref.ref[Any] = field(repr=False)
    _snapshot: Callable[[Any], Any] = field(repr=False)

    def snapshot(self) -> Any:
        """Return the state of the pool now, without values of resources, or None if the pool is gone.

        It is what `ResourcePool.snapshot()`, `TaskPool.snapshot()` or `WorkerPool.workers()` returns.
        """
        pool = self._pool()
        return None if pool is None else self._snapshot(pool)


class _Registered(NamedTuple):
    kind: Kind
    pool: weakref.ref[Any]
    snapshot: Callable[[Any], Any]
    spare_name: str  # for a pool that has no name of its own


_live: dict[int, _Registered] = {}  # by the id of the pool, oldest first
_numbers = itertools.count(1)


def register(pool: P, kind: Kind, snapshot: Callable[[P], Any]) -> None:
    """Add a pool whose state ``snapshot(pool)`` returns, until `unregister` or until nothing else refers to it.

    A pool without a `name` is listed as "<kind>-<number>".
    """
    key, forget = id(pool), _live.pop
    weak = weakref.ref(pool, lambda _: forget(key, None))
    _live[key] = _Registered(kind, weak, snapshot, "" if hasattr(pool, "name") else f"{kind}-{next(_numbers)}")


def unregister(pool: object) -> None:
    """Remove a pool that is closed. One that is not registered is left alone."""
    _live.pop(id(pool), None)


def pools(kind: Kind | None = None) -> list[LivePool]:
    """Return the live pools, or those of one kind, oldest first."""
    found = []
    for known in _live.copy().values():
        pool = known.pool()
        if pool is not None and kind in (None, known.kind):
            name = getattr(pool, "name", known.spare_name)
            found.append(LivePool(known.kind, name, known.pool, known.snapshot))
    return found
