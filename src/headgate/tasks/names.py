"""The pools of this process, by name and by id."""

from __future__ import annotations

import atexit
import os
import threading
from typing import TYPE_CHECKING

from headgate.errors import DuplicatePool, InvalidType
from headgate.tasks.model import TaskSnapshot, task_snapshot

if TYPE_CHECKING:
    from headgate.tasks.pool import TaskPool
    from headgate.tasks.runtime.executor import Executor

_lock = threading.Lock()
_pools: dict[str, TaskPool] = {}
_executors: dict[str, Executor] = {}  # of those that are made completely
_of_parent: set[Executor] = set()  # in a forked child: those that ran in the parent, and cannot run here


def register(pool: TaskPool) -> None:
    """Hold a pool until it is closed. A pool whose event loop is gone can never be closed: its name is free.

    One without a name is given a free one.
    """
    with _lock:
        if not pool.name:
            number = len(_pools) + 1
            while f"tasks-{number}" in _pools:
                number += 1
            pool.name = f"tasks-{number}"
        known = _executors.get(pool.name)
        if pool.name in _pools:
            if known is None or not known.is_abandoned():
                raise DuplicatePool(
                    f"a live pool has the name {pool.name!r}",
                    remedy=f"Use it: `headgate.pool_get({pool.name!r})`. Or close it first: "
                    f"`await headgate.pool_get({pool.name!r}).close()`. Pools of one process need different names, "
                    "also for different values of scope_id.",
                )
            del _pools[pool.name], _executors[pool.name]
        _pools[pool.name] = pool
    if known is not None:
        known.let_go()


def register_executor(executor: Executor) -> None:
    """Name the executor of a registered pool: it knows whether its loop is gone, and what is left to do."""
    with _lock:
        _executors[executor.name] = executor


def unregister(pool: TaskPool) -> None:
    """Free the name of a pool that is closed."""
    with _lock:
        if _pools.get(pool.name) is pool:
            del _pools[pool.name]
            _executors.pop(pool.name, None)


def pool_get(name_or_id: str) -> TaskPool | None:
    """The live pool of this name or id, or None."""
    if not isinstance(name_or_id, str):
        raise InvalidType(f"name_or_id must be a string, got {type(name_or_id).__name__}")
    with _lock:
        found = _pools.get(name_or_id)
        return found or next((pool for pool in _pools.values() if pool.id == name_or_id), None)


def pool_list() -> list[TaskPool]:
    """Every live pool, oldest first."""
    with _lock:
        return list(_pools.values())


def pending() -> list[TaskSnapshot]:
    """Every task of this process that is queued or runs, of all live pools, in the order of their submits."""
    with _lock:
        executors = list(_executors.values())
    tasks = [task for executor in executors for task in list(executor.scheduler.unfinished())]
    return [task_snapshot(task, task.owner, None, None) for task in sorted(tasks, key=lambda task: task.moment)]


def _tell_unclosed() -> None:
    """Log at the end of the program which work nobody will do any more."""
    with _lock:
        executors = [executor for executor in _executors.values() if executor not in _of_parent]
    for executor in executors:
        lost = executor.ending.left_over()
        if lost:
            import logging

            logging.getLogger("headgate.tasks").warning(
                "%s was never closed, and %s: use `async with`, or `await pool.close()`", executor.name, lost
            )


def _forked() -> None:
    """In a forked child: what runs is the parent's. Another thread may have held the lock, and is not there."""
    global _lock
    _lock = threading.Lock()
    _of_parent.update(executor for executor in _executors.values() if executor.loop is not None)


atexit.register(_tell_unclosed)
os.register_at_fork(after_in_child=_forked)
