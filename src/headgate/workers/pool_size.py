"""How many workers a WorkerPool starts, and whether its options go together with that number."""

from __future__ import annotations

import os

from headgate.core.checks import checked_optional_count
from headgate.errors import InvalidArgument, InvalidType


def checked_size(spawn: int | None, lease: int | None, quorum: int | None, *, durable: bool) -> int:
    """Return how many workers to spawn; InvalidArgument: the numbers do not go together."""
    checked_optional_count("spawn", spawn, 0 if durable else 1)
    checked_optional_count("lease", lease, 0)
    checked_optional_count("quorum", quorum, 1)
    if quorum is None:
        raise InvalidType("quorum must be a whole number, got NoneType")
    size = spawn if spawn is not None else 0 if durable else (os.cpu_count() or 1)
    if durable and not size and lease == 0:
        raise InvalidArgument(
            "lease must be at least 1 when no worker is spawned, got 0", remedy="The pool could never use a worker."
        )
    if durable and lease is None:
        return size
    capacity = size + (lease or 0) if durable else size
    if quorum > capacity:
        raise InvalidArgument(
            f"quorum must be at most the capacity of the pool ({capacity}), got {quorum}",
            remedy="Lower quorum, spawn more workers, or raise lease.",
        )
    return size


def refuse_for_discovered(**options: object) -> None:
    """Raise if one of these is given in a pool that starts no workers: those that others started know nothing of it."""
    for name, given in options.items():
        if given is not None:
            raise InvalidArgument(
                f"{name} has no effect in a pool that starts no workers",
                remedy="Give spawn= too, or set it where the workers are started: `headgate worker --help`.",
            )
