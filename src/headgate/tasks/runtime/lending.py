"""Slots of tasks that wait for other tasks: lent when a wait begins, wanted back when the last one is over.

`scheduling/slots.py` says why and to whom; `nested_waits` calls this for each wait of a running task.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from headgate.tasks.model import TaskRecord
from headgate.tasks.scheduling.slots import Waits, stuck, waiting_for

if TYPE_CHECKING:
    from headgate.tasks.runtime.executor import Executor


class Lending:
    """The lent slots of one pool, and the parts of its tasks that wait to get one back."""

    __slots__ = ("_pool", "_returns")

    def __init__(self, pool: Executor) -> None:
        self._pool = pool
        self._returns: dict[TaskRecord, list[asyncio.Future[None]]] = {}

    def begin_wait(self, waiter: TaskRecord, awaited: TaskRecord) -> None:
        """Lend the slot of a running task that begins to wait for another, of any pool."""
        explainer = awaited.owner.explainer
        if explainer is not None and awaited.status == "queued":
            held = explainer.held(awaited, {waiter, *waiting_for(waiter)})
            if held:
                raise stuck(awaited, held, waiter)
        self._pool.scheduler.begin_wait(waiter, awaited)
        self.resume(waiter)  # if a part of it stood for a slot: it waits again, so it needs none

    def lend_for_another(self, task: TaskRecord) -> Waits | None:
        """Lend the slot of a task, or its claim to one, while a descendant waits. None: it waits for itself already."""
        returning = self._pool.scheduler.slots.returning
        if task.slot is not None:
            self._pool.scheduler.lend(task)
        elif task in returning and task not in self._returns:
            del returning[task]
        elif task.waits is None or not task.waits.roused:
            return None
        assert task.waits is not None, "who lends has waits"
        task.waits.roused += 1
        return task.waits

    def reclaim(self, task: TaskRecord) -> bool:
        """Give a running task its slot back, now or later. Returns whether it has one."""
        if task in self._pool.scheduler.slots.returning:
            return False
        if not self._pool.scheduler.reclaim(task):
            self._pool.pump()  # a slot may be free for whoever stood there before
        return task.slot is not None

    async def slot_returned(self, task: TaskRecord) -> None:
        """Return when a task has its slot back. A wait that is cut short goes on without one, and keeps its turn."""
        if not self._pool.scheduler.needs_slot(task):
            return
        assert self._pool.loop is not None, "it runs on it"
        future = self._pool.loop.create_future()
        standing = self._returns.setdefault(task, [])
        standing.append(future)
        try:
            await future
        finally:
            standing.remove(future)
            if not standing and self._returns.get(task) is standing:
                del self._returns[task]

    def resume(self, task: TaskRecord) -> None:
        """Let the parts of a task continue that wait for its slot."""
        for future in self._returns.pop(task, ()):
            if not future.done():
                future.set_result(None)
