"""`RemoteCall`: a task that runs on a worker without an asyncio Task here. Its answer ends it."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import Context

from headgate.combined.permit import Permit
from headgate.combined.verdicts import Verdicts
from headgate.context.rests import noted
from headgate.tasks.model import TaskRecord
from headgate.tasks.runtime.ports import Completion


class RemoteCall:
    """Is told how a call ended that nobody awaits (see `headgate.workers.client.taskless.Owner`)."""

    __slots__ = ("_await", "_completion", "_permit", "_task", "_verdicts")

    def __init__(
        self,
        verdicts: Verdicts,
        task: TaskRecord,
        permit: Permit,
        completion: Completion,
        awaited: Callable[[TaskRecord, Completion], None],
    ) -> None:
        self._verdicts = verdicts
        self._completion = completion
        self._task: TaskRecord | None = task
        self._permit: Permit | None = permit
        self._await = awaited

    def returned(self, result: object) -> None:
        """End the task: the function returned this there."""
        if self._task is not None:
            task, permit = self._let_go()
            self._verdicts.succeeded(task, permit, result, self._completion)

    def raised(self, error: BaseException) -> bool:
        """End the task: the function raised this there, or the call failed. True: the caller must raise it too."""
        if self._task is None:  # it was ended while everything was being cancelled, and its answer came all the same
            return False
        task, permit = self._let_go()
        return not self._verdicts.failed(task, permit, error, self._completion)

    def changed(self, before: Context, after: Context) -> None:
        """Tell the resource what the function told there."""
        if self._permit is not None:
            self._permit.tell(noted(before), noted(after))

    def unplaced(self) -> None:
        """Run the task in an asyncio Task, where it waits for a worker: no worker has run it."""
        task, _ = self._let_go()
        self._await(task, self._completion)

    def _let_go(self) -> tuple[TaskRecord, Permit]:
        """Return the task and the permit, and forget both: the permit refers to this object, which would be a cycle."""
        task, permit = self._task, self._permit
        assert task is not None and permit is not None, "it ends once"  # noqa: PT018
        self._task = self._permit = None
        return task, permit
