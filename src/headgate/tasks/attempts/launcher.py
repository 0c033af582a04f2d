"""`AttemptLauncher`: calls the function of a task with its resource, in this process or on a worker."""

from __future__ import annotations

from collections.abc import AsyncIterator, Coroutine, Iterable
from inspect import CO_COROUTINE
from types import FunctionType
from typing import TYPE_CHECKING, Any, cast

from headgate.core.cancellation import PRIMED, Steered
from headgate.resources.current_use import begin_use
from headgate.resources.events import USAGE
from headgate.tasks.attempts.attempt import Attempt
from headgate.tasks.attempts.verdicts import Interrupted, Verdicts
from headgate.tasks.model import Cancellable, TaskRecord
from headgate.tasks.runtime.local_launcher import LocalLauncher
from headgate.tasks.runtime.nested_waits import CURRENT
from headgate.tasks.runtime.ports import Completion
from headgate.tasks.streams import StreamBody

if TYPE_CHECKING:
    from headgate.workers.client.any_function import Placing


class AttemptLauncher:
    """Starts tasks with their resources, on workers if there are any."""

    def __init__(self, verdicts: Verdicts, placing: Placing | None) -> None:
        self.here: LocalLauncher = LocalLauncher()
        """Starts the tasks that run in this process."""
        self.verdicts: Verdicts = verdicts
        """Decide what the end of an attempt means."""
        self._placing = placing

    @property
    def is_remote(self) -> bool:
        """Do tasks run on workers, unless they must run here?"""
        return self._placing is not None

    def in_threads(self, tasks: Iterable[TaskRecord]) -> int:
        """How many tasks run in threads, here or on workers, and are waited for because they hold a resource there."""
        here, placing = self.here.in_threads(tasks), self._placing
        return here if placing is None else here + sum(_holds_thread(placing, task) for task in tasks)

    def start(self, task: TaskRecord, permit: Attempt, completion: Completion) -> Cancellable:
        """Send the task to a worker, if that is all there is to do here; else run it in an asyncio Task."""
        placing = self._placing
        if placing is None:
            return self.here.start_body(task, self._drive(task, permit, completion), completion)
        context = task.context
        if context is not None and not permit.interrupted and task.fn.__class__ is FunctionType:
            sent = placing.send(task.fn, _args(task, permit), permit, context, permit)
            if sent is not None:
                permit.sent(sent, self.verdicts, self.start_here, completion)
                if permit.use is not None and (engine := permit.use.member.rotation.owner) is not None:
                    engine.watch_lag(permit.use)
                return sent
        return self.here.start_body(task, self._drive(task, permit, completion), completion)

    def start_here(self, task: TaskRecord, attempt: Attempt, completion: Completion) -> None:
        """Run a task in an asyncio Task whose call no worker has taken."""
        task.stage = self.here.start_body(task, self._drive(task, attempt, completion), completion)

    def announce(self, task: TaskRecord) -> None:
        """Emit the events that say with what the task runs. Listeners may do anything to the task, so not earlier."""
        if USAGE.listeners:
            self.verdicts.started(task)
        if self._placing is not None:
            self._placing.announce(task.task)

    def forget(self, task: TaskRecord) -> None:
        """Drop what is known of a task that has ended without a result."""
        self.verdicts.forget(task)

    def close(self) -> None:
        """End the threads of this process in which plain functions ran."""
        self.here.close()

    async def _drive(self, task: TaskRecord, attempt: Attempt, completion: Completion) -> None:
        """Call the function with the resource and learn from how it ends: one coroutine (benchmarks/combined.py)."""
        use, placing = attempt.use, self._placing
        try:
            await PRIMED
            CURRENT.set(task)
            if use is not None and use.reservation is not None:
                begin_use(use)
            if attempt.interrupted:
                raise Interrupted
            fn = task.fn
            made: Coroutine[Any, Any, Any]
            if placing is not None:
                made = self._call_there(placing, task, _args(task, attempt), attempt, completion)
            elif use is not None and type(fn) is FunctionType and fn.__code__.co_flags & CO_COROUTINE:
                made = fn(attempt.resource, *task.args)
            else:
                made = self.here.call(task, _args(task, attempt), completion)
            if use is None or use.handle is not attempt:
                result = await made
            else:  # it may be interrupted, as an operation of `ResourcePool.run`: only if it suspends
                try:
                    first = made.send(None)
                except StopIteration as done:
                    result = done.value
                else:
                    attempt.running = Steered(made, first, patient=True)
                    result = await attempt.running
        except BaseException as error:
            if not self.verdicts.failed(task, attempt, error, completion):
                raise
        else:
            self.verdicts.succeeded(task, attempt, result, completion)
        finally:
            del task  # see `LocalLauncher._drive`

    def _call_there(
        self, placing: Placing, task: TaskRecord, args: tuple[Any, ...], attempt: Attempt, completion: Completion
    ) -> Coroutine[Any, Any, Any]:
        """Call the function on a worker, or here if it dispatches itself. Returns what to await."""
        if isinstance(task.fn, StreamBody):
            items = placing.stream(task.fn.fn, args, attempt)
            if items is not placing.here:
                return task.fn.feed(cast("AsyncIterator[Any]", items))
        else:
            called = placing.call(task.fn, args, attempt)
            if called is not placing.here:
                return cast("Coroutine[Any, Any, Any]", called)
        attempt.here = True
        return self.here.call(task, args, completion)


def _args(task: TaskRecord, attempt: Attempt) -> tuple[Any, ...]:
    return task.args if attempt.use is None else (attempt.resource, *task.args)


def _holds_thread(placing: Placing, task: TaskRecord) -> bool:
    """Does the task run on a worker, with a resource, as a plain function that nothing can interrupt?"""
    attempt = task.permit
    if not isinstance(attempt, Attempt) or attempt.worker is None or not attempt.holds:
        return False
    return not placing.can_stop(task.fn)
