"""Puts together what a TaskPool with `resources=` or `workers=` works with. The one place where the three pools meet.

    submit -> TaskPool: whose turn is it? -> ResourcePool: with which key? -> WorkerPool: on which worker? -> run
    result <-  record, event              <-  what it said about the key   <-  result, exception, stream

`supply` reserves a resource in the same moment in which a task gets its slot (neither is held while waiting for the
other), `launcher` calls the function with the resource as first argument, here or on a worker, `verdicts` tells the
ResourcePool what that call said about it, and `explainer` says what tasks wait for.

What ends an attempt:

    returned, raised          the task's own outcome; the resource is in order
    CooldownResource          a verdict: the resource rests, and the task goes back to the head of its partition. Only
                              very many of these end it: see `headgate.resources.attempts.Cooldowns`
    DisableResource, Retry... a verdict too, and one of the task's `max_attempts` is spent
    an older use failed       the task goes back as well, and nothing is spent: it was not its fault
    its worker was lost       the task's own failure, which says nothing about the resource
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from headgate.core.kept_locks import SharesLock
from headgate.errors import InvalidType
from headgate.resources.pool import ResourcePool
from headgate.tasks.attempts.explainer import TaskExplainer
from headgate.tasks.attempts.launcher import AttemptLauncher
from headgate.tasks.attempts.supply import OnlySlots, ResourceSupply
from headgate.tasks.attempts.verdicts import Verdicts
from headgate.tasks.attempts.worker_slots import WorkerSlots
from headgate.tasks.runtime.ports import Ports

if TYPE_CHECKING:
    from headgate.workers.pool import WorkerPool


def ports_with(
    resources: ResourcePool[Any] | None,
    workers: WorkerPool | None,
    *,
    follows_workers: bool,
) -> Ports:
    """The ports of a pool with these resources, these workers, or both.

    With `follows_workers` it has as many slots as its workers take calls.
    """
    if resources is not None and not isinstance(resources, ResourcePool):
        raise InvalidType(
            f"resources must be a ResourcePool, got {type(resources).__name__}",
            remedy='Make one: ResourcePool({"key-1": "sk-aaa"}).',
        )
    placing = None
    if workers is not None:
        from headgate.workers.pool import WorkerPool  # not above: it is slow to import, and most pools need none

        if not isinstance(workers, WorkerPool):
            raise InvalidType(
                f"workers must be a WorkerPool, got {type(workers).__name__}",
                remedy="Pass what `async with headgate.WorkerPool() as workers:` gives.",
            )
        from headgate.workers.client.any_function import Placing

        placing = Placing(workers)
    supply = None if resources is None else ResourceSupply(resources, placing)
    allocator = supply or OnlySlots()
    budget = None
    if workers is not None:
        if follows_workers:
            budget = WorkerSlots(workers, allocator.loop)
            workers.__follow_workers__(budget)
        if supply is not None and (shared := supply.engine.shared) is not None:
            _share_lock(workers, shared.store)
    launcher = AttemptLauncher(Verdicts(supply, placing), placing)
    on_shared = None if workers is None else partial(_share_lock, workers)
    return Ports(launcher, allocator, TaskExplainer(supply), budget, on_shared)


def _share_lock(workers: WorkerPool, store: object) -> None:
    """Have what this process holds in a store stay its own until its workers have ended, if it is killed."""
    if isinstance(store, SharesLock):
        store.share_lock(workers.kept_locks)
