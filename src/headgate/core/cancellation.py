"""Whose cancellation is it? Interrupting an operation without touching the task that awaits it.

A pool awaits a caller's operation *inside the caller's task*, and must sometimes stop that operation, and only that:
a sibling found the key rate-limited, or the attempt ran out of time. Cancelling the caller's task and taking it back
with ``uncancel()`` looks like the tool and is not: an operation that swallows the cancellation and calls
``uncancel()`` itself eats a later, real one; a stream's consumer is hit between two items; a task on another loop is
woken late.

So `Steered` steps the operation itself and remembers the future it is suspended on. To interrupt is to cancel **that
future**, in a callback on the operation's own loop, just as ``Task.cancel`` would, minus the count. The operation sees
an ordinary CancelledError where it awaits, runs its ``finally`` blocks, may swallow it. If nothing can be cancelled at
that moment (a bare ``sleep(0)``, a future already done), CancelledError is thrown at the next resume. If the operation
has ended meanwhile, nothing happens.

The rule, in one place (`Steered.is_ours`): a CancelledError that leaves the operation is **ours** if and only if the
operation was asked to stop and the task's ``cancelling()`` count is not above what it was when the operation first
suspended. The outer world always raises that count, we never do; so an outer cancellation wins, in the same loop turn
too. Where one steered operation awaits another and both are asked at once, the message of the CancelledError tells
whose it is (`_Notice`), and the other is told when that one has ended.

Price: about 0.2 us for each suspension. Known residue: a stdlib TaskGroup whose child fails during its exit leaks a
count on 3.11 and 3.12, and is then taken for the outer world, which is the safe side. Where that would lose a task
(`patient`), such an operation is not interrupted any more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Generator
from contextvars import Context
from functools import partial
from typing import Any, Final, Generic, Self, TypeVar

R = TypeVar("R")


class Steered(Generic[R]):
    """Awaits an operation in the current task; `interrupt` stops it from any thread. Awaited once."""

    __slots__ = (
        "_arriving",
        "_base",
        "_behind",
        "_context",
        "_operation",
        "_owed",
        "_patient",
        "_suspended_on",
        "_task",
        "asked",
    )

    def __init__(
        self, operation: Coroutine[Any, Any, R], first: Any, context: Context | None = None, *, patient: bool = False
    ) -> None:
        """`operation` was stepped once, in the current task, and suspended on `first`.

        With `patient`, an interruption waits while the task's ``cancelling()`` count is above its base: whatever raised
        the count is handled first. So a count that was never taken back makes the operation immune to `interrupt`,
        and a CancelledError that came from `interrupt` is never taken for one of the outer world.
        """
        task = asyncio.current_task()
        assert task is not None, "asyncio runs coroutines in tasks"
        self._operation: Coroutine[Any, Any, R] | None = operation
        self._suspended_on = first
        self._task = task
        self._base = _settled(task) if task.cancelling() else 0
        self._context = context
        self._patient = patient
        self._owed = False  # asked while nothing could be cancelled: to be thrown at a resume
        self._arriving = False  # what it waits on was cancelled for it, and it has not resumed since
        self._behind: tuple[Steered[Any], ...] = ()  # asked in the same turn, of the same task: they come after this
        self.asked: object = None
        """Why it was asked to stop; None as long as it was not."""

    def interrupt(self, why: object) -> None:
        """Ask the operation to stop. From any thread; the first reason is kept, twice in one turn counts once."""
        if self.asked is None:
            self.asked = why
        try:
            self._task.get_loop().call_soon_threadsafe(self.deliver)
        except RuntimeError:
            pass  # its loop is closed: nothing runs there any more

    def stop(self, why: object) -> None:
        """`interrupt`, called on the operation's own loop, without the turn that it takes to get there."""
        if self.asked is None:
            self.asked = why
        self.deliver()

    def spare(self) -> None:
        """Take back what was asked and has not arrived: from here on it is not to be interrupted."""
        self.asked = None
        self._owed = False

    def is_ours(self, error: asyncio.CancelledError) -> bool:
        """Whether a CancelledError that just left the operation comes from `interrupt` alone."""
        if self.asked is None or self._task.cancelling() > self._base:
            return False
        if any(not other.has_ended for other in self._behind):
            return False  # the one that awaits us was asked as well: it goes through to that one
        sender = _sender(error.args[0] if error.args else None)
        if sender is None or sender is self or not sender.runs_in(self._task):
            return True
        return sender.has_ended_before(self)  # of one that we awaited, meant for us too

    @property
    def has_ended(self) -> bool:
        """Whether the operation has returned or raised."""
        return self._operation is None

    def runs_in(self, task: asyncio.Task[Any]) -> bool:
        """Whether this task awaits the operation."""
        return self._task is task

    def deliver_before(self, other: Steered[Any]) -> None:
        """Deliver the interruption of `other`, asked for in the same turn of the same task, when this has ended."""
        self._behind += (other,)

    def has_ended_before(self, other: Steered[Any]) -> bool:
        """Whether this has ended and the interruption of `other` waited for that."""
        return self._operation is None and other in self._behind

    def deliver(self) -> None:
        """Cancel what the operation waits for, if it was asked to stop. On the operation's own loop."""
        future = self._suspended_on
        if self._operation is None or self._arriving or self.asked is None:
            return
        if future is None or (self._patient and self._task.cancelling() > self._base):
            self._owed = True
        elif future.done():
            sender = _sender(getattr(future, "_cancel_message", None))
            if sender is None:
                self._owed = True
            elif sender.runs_in(self._task):
                sender.deliver_before(self)
            else:
                self._arriving = True  # another task awaits the same future and was asked too: it serves both
        elif future.cancel(_Notice(self)):
            self._arriving = True
        else:
            self._owed = True

    def __await__(self) -> Generator[Any, Any, R]:
        operation = self._operation
        assert operation is not None, "a Steered is awaited once"
        error: BaseException | None = None
        context = self._context
        try:
            while True:
                error = None
                try:
                    yield self._suspended_on
                except GeneratorExit:
                    _inside(context, operation.close)()
                    raise
                except BaseException as thrown:
                    error = thrown
                self._arriving = False
                if self._owed:
                    error = self._pay(error)
                try:
                    if error is not None:
                        self._suspended_on = _inside(context, operation.throw)(error)
                    elif context is None:  # no bound method is kept: at many operations the collector would run for it
                        self._suspended_on = operation.send(None)
                    else:
                        self._suspended_on = context.run(operation.send, None)
                except StopIteration as done:
                    result: R = done.value
                    return result
                if self._owed and self._task.cancelling() <= self._base:
                    # Something else interrupted it in that turn, and it went on: tell it now.
                    self._owed = False
                    self._task.get_loop().call_soon(self.deliver)
                if self._base:  # the operation may have called uncancel(): a later outer cancellation must stand out
                    self._base = min(self._base, self._task.cancelling())
        finally:
            self._operation = None
            for other in self._behind:
                self._task.get_loop().call_soon(other.deliver)
            del self, error  # the traceback holds this frame, the task may hold the exception, and this the task

    def _pay(self, error: BaseException | None) -> BaseException | None:
        """What to resume with, now that an interrupt is owed."""
        if self._task.cancelling() > self._base:
            return error  # the outer world, or a timeout inside, is cancelling it: do not disturb its clean-up
        if error is None:
            self._owed = False
            return asyncio.CancelledError(_Notice(self))
        if isinstance(error, asyncio.CancelledError) and error.args and _sender(error.args[0]) is not None:
            self._owed = False  # it is being told for another reason of ours: once in a turn is enough
        return error


class _Notice(str):
    """The message of a CancelledError of ours: readable, and it knows who sent it."""

    __slots__ = ("sender",)
    sender: Steered[Any]

    def __new__(cls, sender: Steered[Any]) -> Self:
        notice = super().__new__(cls, f"interrupted: {sender.asked}")
        notice.sender = sender
        return notice


def _sender(message: object) -> Steered[Any] | None:
    return message.sender if isinstance(message, _Notice) else None


def _inside(context: Context | None, call: Callable[..., R]) -> Callable[..., R]:
    return call if context is None else partial(context.run, call)


def _settled(task: asyncio.Task[Any]) -> int:
    """How many cancellations a running task has seen: one that was asked for and not yet delivered is new.

    (`cancel()` of a running task is delivered when it next suspends, which is now.)
    """
    count = task.cancelling()
    return count - 1 if getattr(task, "_must_cancel", False) else count


async def adopt(awaitable: Awaitable[R]) -> R:
    """A coroutine that awaits `awaitable`, so that one kind of thing is steered."""
    return await awaitable


class _Primed(tuple[None]):
    """Suspends whoever awaits it once: as a coroutine that only yields, with no frame (benchmarks/tasks.py)."""

    __slots__ = ()
    __await__ = tuple.__iter__


PRIMED: Final[Awaitable[None]] = _Primed((None,))  # type: ignore[assignment] # an iterator is all that `await` needs
"""What a body awaits, stepped once by hand, until its Task takes it over.

A Task that is cancelled before its first step throws into a coroutine that never entered its ``try``. One that awaits
this inside its ``try`` and was stepped before it became a Task always ends where it wants to.
"""
