"""Runs tasks in this process: async functions on the loop of the pool, plain functions in threads.

**A task is an asyncio Task of its own**, in a copy of its submitter's context. Reusing one for several would be
cheaper, and would let a forgotten ``call_later(..., task.cancel)`` of one task end another. A body is stepped once
before the Task gets it: a Task that is cancelled before its first step throws into a coroutine that never entered its
``try``, and the slot would be lost.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
from collections.abc import Callable, Coroutine, Iterable
from inspect import CO_COROUTINE
from types import FunctionType
from typing import Any

from headgate.core.cancellation import PRIMED
from headgate.core.threads import Threads, call_in_thread, outlast_cancellation
from headgate.tasks.model import PLAIN, TaskRecord
from headgate.tasks.runtime.children import cancel_children
from headgate.tasks.runtime.functions import is_async
from headgate.tasks.runtime.nested_waits import CURRENT
from headgate.tasks.runtime.ports import Completion


class LocalLauncher:
    """Runs each task in an asyncio Task, and plain functions in threads of its own."""

    def __init__(self) -> None:
        self.make_task: Callable[..., asyncio.Task[Any]] = asyncio.Task
        """Makes the asyncio Tasks; tests put a class of their own here."""
        self._in_threads = 0
        self._threads: Threads | None = None

    def start(self, task: TaskRecord, permit: object, completion: Completion) -> asyncio.Task[None]:
        """Run the task in this process: on the loop of the pool, or in a thread."""
        fn = task.fn
        is_function = type(fn) is FunctionType and fn.__code__.co_flags & CO_COROUTINE  # benchmarks/tasks.py
        if is_function or is_async(fn):
            body = self._drive(task, completion)
        else:
            body = self._drive_plain(task, completion)
        body.send(None)
        terms, context = task.terms, task.context
        if terms is not PLAIN and terms.retries and context is not None:
            context = context.copy()  # each attempt begins as the first did
        return self.make_task(body, loop=completion.loop, name=task.owner.name, context=context)

    def start_body(
        self, task: TaskRecord, body: Coroutine[Any, Any, None], completion: Completion
    ) -> asyncio.Task[None]:
        """Run a body that somebody else wrote in the Task of this task. It must await `PRIMED` first."""
        body.send(None)
        context = None if task.context is None else task.context.copy()
        return self.make_task(body, loop=completion.loop, name=task.owner.name, context=context)

    def in_threads(self, tasks: Iterable[TaskRecord]) -> int:
        """How many tasks run in threads of this launcher; it need not look at the tasks."""
        return self._in_threads

    def announce(self, task: TaskRecord) -> None:
        """Nothing: the pool's own event says all."""

    def forget(self, task: TaskRecord) -> None:
        """Nothing: of a task that has ended nothing is known here."""

    def close(self) -> None:
        """End the threads; idle ones end at once."""
        if self._threads is not None:
            self._threads.shutdown(wait=not self._in_threads)

    async def _drive(self, task: TaskRecord, completion: Completion) -> None:
        """Run an async function: as `_drive_plain`, with one coroutine less (benchmarks/tasks.py)."""
        try:
            await PRIMED
            CURRENT.set(task)
            result = await task.fn(*task.args)  # type: ignore[misc]
        except BaseException as error:
            if not completion.failed(task, error):
                raise
        else:
            completion.succeeded(task, result)
        finally:
            # The traceback holds this frame, and the task holds the traceback: only the collector would find it.
            del task

    async def _drive_plain(self, task: TaskRecord, completion: Completion) -> None:
        """The same for what is not simply an async function."""
        try:
            await PRIMED
            CURRENT.set(task)
            result = await self.call(task, task.args, completion)
        except BaseException as error:
            if not completion.failed(task, error):
                raise
        else:
            completion.succeeded(task, result)
        finally:
            del task  # see `_drive`

    async def call(self, task: TaskRecord, args: tuple[Any, ...], completion: Completion) -> Any:
        """Call the function of a task here, with these arguments."""
        fn = task.fn
        assert fn is not None, "it was submitted"
        called = fn(*args) if is_async(fn) else self._in_thread(task, args, completion)
        del task  # see `_drive`
        result = await called
        return await result if inspect.isawaitable(result) else result

    async def _in_thread(self, task: TaskRecord, args: tuple[Any, ...], completion: Completion) -> Any:
        """Call a plain function in a thread. A thread cannot be interrupted, so neither can this wait."""
        loop = completion.loop
        assert loop is not None and task.fn is not None, "it was submitted"  # noqa: PT018
        threads = self._threads = self._threads or Threads(f"headgate {task.owner.name}")
        self._in_threads += 1
        # In a copy of the context: the Task's own is entered on the loop's thread meanwhile.
        context, fn = contextvars.copy_context(), task.fn
        future = loop.run_in_executor(threads, lambda: context.run(call_in_thread, fn, args))

        def on_cancel() -> None:
            if task.dependents:  # its thread may wait for them, and hears of nothing
                cancel_children(task, "timeout" if completion.asked(task) == "timeout" else "cancelled")
            if completion.interrupts() > 1:  # the program is to end at once
                future.cancel()
                raise asyncio.CancelledError

        stopped = await outlast_cancellation(future, on_cancel)
        self._in_threads -= 1
        asked = completion.asked(task)
        if stopped is None and asked is None:
            try:
                return future.result()
            finally:
                del task, future, context  # see `_drive`; the thread's frames have this context too, and it the task
        result = future.exception() or future.result()
        if inspect.iscoroutine(result):
            result.close()  # dropped, like any other result
        raise stopped or asyncio.CancelledError(asked)
