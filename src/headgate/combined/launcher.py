"""`TaskLauncher`: calls the function of a task with its resource, here or on a worker."""

from __future__ import annotations

from collections.abc import Awaitable
from inspect import CO_COROUTINE
from types import FunctionType
from typing import TYPE_CHECKING, Any

from headgate.combined.permit import Permit
from headgate.combined.remote_call import RemoteCall
from headgate.combined.verdicts import Interrupted, Verdicts
from headgate.core.cancellation import Steered, primed
from headgate.tasks.model import TaskRecord
from headgate.tasks.runtime.local_launcher import LocalLauncher
from headgate.tasks.runtime.nested_waits import CURRENT
from headgate.tasks.runtime.ports import Cancellable, Completion
from headgate.tasks.streams import StreamBody

if TYPE_CHECKING:
    from headgate.workers.client.any_function import Placing


class TaskLauncher:
    """Starts tasks with their resources, on workers if there are any."""

    def __init__(self, verdicts: Verdicts, placing: Placing | None) -> None:
        self.here: LocalLauncher = LocalLauncher()
        """Runs what runs in this process."""
        self._verdicts = verdicts
        self._placing = placing

    @property
    def in_threads(self) -> int:
        """How many tasks run in threads of this process."""
        return self.here.in_threads

    def start(self, task: TaskRecord, permit: Permit, completion: Completion) -> Cancellable:
        """Send the task to a worker, if that is all there is to do here; else run it in an asyncio Task."""
        placing, context = self._placing, task.context
        if placing is not None and context is not None and not permit.interrupted and task.fn.__class__ is FunctionType:
            args = task.args if permit.use is None else (permit.resource, *task.args)
            call = RemoteCall(self._verdicts, task, permit, completion, self._start_here)
            sent = permit.running = placing.send(task.fn, args, permit, context, call)
            if sent is not None:
                return sent
        return self.here.start_body(task, self._drive(task, permit, completion), completion)

    def _start_here(self, task: TaskRecord, completion: Completion) -> None:
        task.task = self.here.start_body(task, self._drive(task, task.permit, completion), completion)

    def announce(self, task: TaskRecord) -> None:
        """Tell what the task was given: not before, for who hears of it may do anything to the task."""
        self._verdicts.started(task)
        if self._placing is not None:
            self._placing.announce(task.task)

    def forget(self, task: TaskRecord) -> None:
        """Drop what is known of a task that has ended without a result."""
        self._verdicts.forget(task)

    def close(self) -> None:
        """End the threads."""
        self.here.close()

    async def _drive(self, task: TaskRecord, permit: Permit, completion: Completion) -> None:
        """Call the function with the resource and learn from how that ends, in one coroutine (benchmarks/line.py)."""
        use = permit.use
        try:
            await primed()
            CURRENT.set(task)
            if permit.interrupted:
                raise Interrupted
            fn: Any = task.fn
            args = task.args if use is None else (permit.resource, *task.args)
            if self._placing is not None:
                made: Any = self._call_there(self._placing, task, args, permit, completion)
            elif fn.__class__ is FunctionType and fn.__code__.co_flags & CO_COROUTINE:
                made = fn(*args)
            else:
                made = self.here.call(task, args, completion)
            if use is None or use.handle is not permit:
                result = await made
            else:  # it may be interrupted, as an operation of `ResourcePool.run`: only if it suspends
                try:
                    first = made.send(None)
                except StopIteration as done:
                    result = done.value
                else:
                    permit.running = Steered(made, first, patient=True)
                    result = await permit.running
        except BaseException as error:
            if not self._verdicts.failed(task, permit, error, completion):
                raise
        else:
            self._verdicts.succeeded(task, permit, result, completion)
        finally:
            del task  # see `LocalLauncher._drive`

    def _call_there(
        self, placing: Placing, task: TaskRecord, args: tuple[Any, ...], permit: Permit, completion: Completion
    ) -> Awaitable[Any]:
        """Call the function on a worker, or here if it dispatches itself. Returns what to await."""
        body = task.fn if isinstance(task.fn, StreamBody) else None
        called: Any = placing.stream(body.fn, args, permit) if body is not None else placing.call(task.fn, args, permit)
        if called is placing.here:
            permit.here = True
            called = self.here.call(task, args, completion)
        elif body is not None:
            called = body.feed(called)
        return called  # type: ignore[no-any-return]
