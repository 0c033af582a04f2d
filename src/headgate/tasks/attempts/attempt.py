"""`Attempt`: one try of a task, from when it gets its resource to its verdict.

It is also the handle by which an older use of its resource stops it, the request that a worker is sent for it, and,
where it runs on a worker without an asyncio Task here, the owner of that call: the answer ends the task.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from headgate.core.cancellation import Steered
from headgate.core.current_task import CURRENT, tenant_text
from headgate.resources.engine import Engine
from headgate.resources.members import Use
from headgate.resources.model import Resource
from headgate.tasks.model import RanWith, TaskRecord, ran_with
from headgate.tasks.streams import has_opened

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Sequence

    from headgate.core.lessons import Lesson
    from headgate.tasks.runtime.ports import Completion

_STOP = "headgate: an older use of its resource failed"


class Stoppable(Protocol):
    """What an attempt runs in: the `Steered` of a coroutine here, or a call on a worker."""

    def stop(self, why: object) -> None:
        """Interrupt the attempt, which is no cancellation of its task. On the loop of the pool."""

    def is_ours(self, error: asyncio.CancelledError) -> bool:
        """Whether this CancelledError, which ended the attempt, comes from `stop` alone."""
        ...


class Judge(Protocol):
    """Decides what the end of an attempt means, and ends the task or queues it again: see `verdicts`."""

    def succeeded(self, task: TaskRecord, attempt: Attempt, result: object, completion: Completion) -> None:
        """End a task whose function returned this."""

    def failed(self, task: TaskRecord, attempt: Attempt, error: BaseException, completion: Completion) -> bool:
        """End a task whose function raised this. Returns as `Completion.failed` does."""
        ...


class Attempt:
    """One try of a task, with a resource or without."""

    # No slots: one is made for each attempt, and what most never have is not set.
    worker: str | None = None
    max_calls: int = 0  # see `headgate.workers.protocol.messages.Request`
    here: bool = False
    """Did the attempt run here although there are workers?"""
    interrupted: bool = False
    """Was the attempt told to stop, because an older use of its resource failed?"""
    running: Stoppable | None = None
    """What stops the attempt; None as long as there is nothing to stop."""
    _sent: tuple[Judge, Callable[[TaskRecord, Attempt, Completion], None], Completion] | None = None
    # is set while the answer of a worker is to end the task

    def __init__(self, task: TaskRecord, use: Use | None, resource: Resource[Any] | None) -> None:
        self.task: TaskRecord | None = task
        self.use: Use | None = use
        """The use of its resource; None when it has ended, or there is none."""
        self.resource: Resource[Any] | None = resource

    @property
    def resource_id(self) -> str | None:
        """The id of the resource; None without one."""
        return None if self.resource is None else self.resource.resource_id

    @property
    def request_id(self) -> str:
        """The id of the task, made of its pool's id and its number."""
        task = self.task
        return "" if task is None else f"{task.owner.id}/{task.number}"

    @property
    def tenant(self) -> str:
        """The fairness key of its task."""
        return "" if self.task is None else tenant_text(self.task.partition)

    @property
    def holds(self) -> bool:
        """Is a resource in use until the call has ended? Then a cancelled caller waits for that end."""
        return self.use is not None

    def learned(self, lessons: Sequence[Lesson]) -> None:
        """Tell the resource what the function has learned about it on a worker."""
        use = self.use
        engine = None if use is None else use.member.rotation.owner
        for lesson in lessons:
            if use is not None and engine is not None and lesson.resource_id == self.resource_id:
                engine.learned(use, lesson, self.task)

    def placed(self, uid: str) -> None:
        """Note which worker was given the call."""
        self.worker = uid

    def interrupt(self, why: str) -> None:
        """Stop the attempt soon. May be called from any thread."""
        task = self.task
        loop = None if task is None else task.owner.loop
        if loop is not None:
            try:
                loop.call_soon_threadsafe(self._stop)
            except RuntimeError:
                pass  # its loop is closed: nothing runs there any more

    def opened(self) -> None:
        """Protect a stream whose first item is out: from here on the attempt is not interrupted for others."""
        if self.use is not None:
            self.use.request_id = self.request_id
            self.use.handle = None
        if isinstance(self.running, Steered):  # as every stream is
            self.running.spare()

    def remains(self) -> RanWith:
        """What is kept of the attempt when its task has ended."""
        resource = self.resource
        return ran_with(None if resource is None else resource.resource_id, self.worker)

    # -- as the owner of a call that nobody awaits (see `headgate.workers.client.taskless.Owner`) ----------------------

    def sent(
        self,
        call: Stoppable,
        judge: Judge,
        run_here: Callable[[TaskRecord, Attempt, Completion], None],
        completion: Completion,
    ) -> None:
        """Note that a worker was sent this call, and that its answer is to end the task.

        `run_here` runs the task in an asyncio Task, for a call that no worker takes after all.
        """
        self.running = call
        self._sent = judge, run_here, completion

    def returned(self, result: object) -> None:
        """End the task: the function returned this on its worker."""
        if self._sent is not None:
            task, (judge, _, completion) = self._answered()
            judge.succeeded(task, self, result, completion)

    def raised(self, error: BaseException) -> bool:
        """End the task: the function raised this on its worker, or the call failed. True: the caller must raise it."""
        if self._sent is None:  # it was ended while everything was being cancelled, and its answer came all the same
            return False
        task, (judge, _, completion) = self._answered()
        return not judge.failed(task, self, error, completion)

    def unplaced(self) -> None:
        """Run the task in an asyncio Task, where it waits for a worker: no worker has run it."""
        task, (_, run_here, completion) = self._answered()
        self.running = None
        run_here(task, self, completion)

    def _answered(
        self,
    ) -> tuple[TaskRecord, tuple[Judge, Callable[[TaskRecord, Attempt, Completion], None], Completion]]:
        task, sent = self.task, self._sent
        assert task is not None and sent is not None, "it ends once"  # noqa: PT018
        self._sent = None
        return task, sent

    def _stop(self) -> None:
        task = self.task
        if task is None or self.use is None or task.permit is not self or has_opened(task.fn):
            return
        if task.owner.asked(task) is not None:
            return  # it is being cancelled: do not disturb its clean-up
        self.interrupted = True
        if self.running is not None:
            self.running.stop(_STOP)


def use_of_task(engine: Engine[Any]) -> Use | None:
    """The use of a resource of this pool with which the task runs whose code asks; None if there is none."""
    task: TaskRecord | None = CURRENT.get()
    attempt = None if task is None else task.permit
    use = attempt.use if isinstance(attempt, Attempt) else None
    return use if use is not None and use.member.rotation.owner is engine and use.is_running else None
