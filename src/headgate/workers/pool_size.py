"""How many workers a WorkerPool starts, and whether its options go together with that number."""

from __future__ import annotations

import os

from headgate.core.checks import checked_optional_count
from headgate.errors import InvalidArgument, InvalidType
from headgate.workers.processes.local_placement import LocalPlacement
from headgate.workers.processes.placement import Placement


def checked_size(spawn: int | None, lease: int | None, quorum: int | None, *, durable: bool) -> int:
    """Return how many workers to start; InvalidArgument: the numbers do not go together."""
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


def checked_placed(
    placement: object, lease: int | None, quorum: int | None, *, durable: bool, secure: bool, **others: object
) -> int:
    """Return how many workers a placement starts; 1 if it does not know yet. InvalidArgument: options contradict it."""
    if not isinstance(placement, Placement):
        raise InvalidType(
            f"placement must be a Placement, got {type(placement).__name__}",
            remedy="Pass LocalPlacement(4), RayPlacement(num_workers=4) or DaskPlacement(client).",
        )
    for name, given in others.items():
        if given is not None:
            raise InvalidArgument(
                f"placement= and {name}= cannot be given together", remedy=f"Leave {name}= out: the placement says it."
            )
    if durable and not secure and not isinstance(placement, LocalPlacement):
        raise InvalidArgument(
            "credentials= must be given when placed workers and discovered ones serve one pool",
            remedy="Pass certificates that both have; those that a placement makes are for its own workers alone.",
        )
    size = placement.num_workers
    if size is None:
        checked_optional_count("lease", lease, 0)
        checked_optional_count("quorum", quorum, 1)
        return 1
    return checked_size(size, lease, quorum, durable=durable)


def refuse_for_discovered(**options: object) -> None:
    """Raise if one of these is given in a pool that starts no workers: those that others started know nothing of it."""
    for name, given in options.items():
        if given is not None:
            raise InvalidArgument(
                f"{name} has no effect in a pool that starts no workers",
                remedy="Give spawn= too, or set it where the workers are started: `headgate worker --help`.",
            )
