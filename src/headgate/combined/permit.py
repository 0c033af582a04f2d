"""`Permit`: what one attempt of a task runs with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from headgate.context.rests import Note
from headgate.core.cancellation import Steered
from headgate.core.current_task import CURRENT, tenant_text
from headgate.resources.costs import Spent
from headgate.resources.engine import Engine
from headgate.resources.http_status import Answer
from headgate.resources.members import Use
from headgate.resources.model import Resource
from headgate.tasks.model import RanWith, TaskRecord, remains_of
from headgate.tasks.streams import has_opened

if TYPE_CHECKING:
    import asyncio

_STOP = "headgate: an older use of its resource failed"


class Stoppable(Protocol):
    """What an attempt runs in: the `Steered` of a coroutine here, or a call on a worker."""

    def stop(self, why: object) -> None:
        """Interrupt the attempt, which is no cancellation of its task. On the loop of the pool."""

    def is_ours(self, error: asyncio.CancelledError) -> bool:
        """Whether this CancelledError, which ended the attempt, comes from `stop` alone."""
        ...


class Permit:
    """What one attempt of a task runs with. Also the handle by which an older use of its resource stops it."""

    # No slots: one is made for each attempt, and what most never have is not set.
    worker: str | None = None
    max_calls: int = 0  # see `headgate.workers.protocol.messages.Request`
    here: bool = False
    """Did the attempt run here although there are workers?"""
    interrupted: bool = False
    """Was the attempt told to stop, because an older use of its resource failed?"""
    running: Stoppable | None = None
    """What stops the attempt; None as long as there is nothing to stop."""

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

    def tell(self, before: Note | None, after: Note | None) -> None:
        """Tell the resource what its function told on a worker: a rest, tokens, and what an answer said of limits."""
        if after is None or after == before or self.resource is None or after.resource_id != self.resource_id:
            return
        known = before if before is not None and before.resource_id == after.resource_id else Note(after.resource_id)
        if after.at != known.at:
            self.resource.rest(after.seconds, after.reason)
        use = self.use
        engine = None if use is None else use.member.rotation.owner
        if use is None or engine is None:
            return
        if after.spent is not None and after.spent != known.spent:
            spent = Spent(*after.spent)
            spent = spent if known.spent is None else spent.since(Spent(*known.spent))
            if use.reservation is not None:
                use.reservation.spend(spent)
            engine.reporter.spent(use.member.resource.resource_id, spent, self.task)
        if use.level and after.told is not None and after.told != known.told:
            status, headers = after.told
            engine.hear(use, Answer(status, dict(headers)))

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
        """What is kept of the permit when its task has ended."""
        return remains_of(self)

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
    permit = None if task is None else task.permit
    use = permit.use if isinstance(permit, Permit) else None
    return use if use is not None and use.member.rotation.owner is engine and use.is_running else None
