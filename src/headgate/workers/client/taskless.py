"""A call that nobody awaits: what came of it is told to its owner, from where the answer is read.

A TaskPool has a record for each of its tasks and needs no Task of asyncio for one that only waits for a worker: making
one, stepping it and waking it costs as much as the rest of the call. So a simple call is sent at once, and its answer
ends it. Whatever is not so simple becomes a Task after all: a call that is cancelled waits there for its end, and one
that no worker could take, or that was refused, is placed by its owner in the ordinary way.
"""

from __future__ import annotations

import asyncio
from contextvars import Context
from typing import TYPE_CHECKING, Any, Protocol

from headgate.core.cancellation import PRIMED
from headgate.workers.client.dispatcher import Dispatcher
from headgate.workers.client.failures import tell_dispatched
from headgate.workers.client.routine_call import Attempts, RoutineCall
from headgate.workers.events import TASKS
from headgate.workers.protocol.messages import Answer, Request

if TYPE_CHECKING:
    from headgate.workers.routines import Routine


class Owner(Protocol):
    """Who is told what came of a call that nobody awaits."""

    def returned(self, result: Any) -> None:
        """Hear what the routine returned."""

    def raised(self, error: BaseException) -> bool:
        """Hear what the routine raised, or that it was cancelled. Returns whether whoever ran it must raise it too."""
        ...

    def unplaced(self) -> None:
        """Hear that no worker has run the call: it is to be placed in the ordinary way."""


class Direct:
    """A call that nobody awaits. It is the waiter of its call, and has `cancel` as a Task has."""

    __slots__ = ("_call", "_context", "_dispatcher", "_ending", "_owner")

    def __init__(self, dispatcher: Dispatcher, call: RoutineCall, context: Context, owner: Owner):
        self._dispatcher = dispatcher
        self._call = call
        self._context = context
        self._owner = owner
        self._ending: asyncio.Task[None] | None = None

    def cancel(self, msg: object = None) -> bool:
        """Tell the worker that the call is cancelled, and wait in a Task for the routine to end there."""
        if self._ending is None:
            body = self._cancelled(msg)
            body.send(None)
            self._ending = self._dispatcher.loop.create_task(body, context=self._context.copy())
        else:
            self._ending.cancel(msg)
        return True

    def stop(self, why: object) -> None:
        """Interrupt the call for a reason that is no cancellation of its owner."""
        self.cancel(why)

    def is_ours(self, error: asyncio.CancelledError) -> bool:
        """Whether this CancelledError, which ended the call, comes from `stop` alone. (Its owner's canceller knows.)"""
        return self._ending is None or not self._ending.cancelling()

    def announce(self) -> None:
        """Emit the event that a worker was given the call. Its owner first emits what comes before."""
        if TASKS.listeners:
            tell_dispatched(self._call)

    # -- as the waiter of its call -------------------------------------------------------------------------------------

    def done(self) -> bool:
        """Return False: it can be told of an answer at any time."""
        return False

    def set_result(self, _: None) -> None:
        """Act on the answer that has come."""
        answer = self._call.take_answer()
        try:
            self._answered(answer)
        except BaseException as error:  # of listeners and the like: whoever reads answers must go on
            if isinstance(error, (KeyboardInterrupt, SystemExit)):
                raise
            self._dispatcher.loop.call_exception_handler(
                {"message": "what hears of answers failed", "exception": error}
            )

    def _answered(self, answer: Answer) -> None:
        dispatcher, call = self._dispatcher, self._call
        dispatcher.waits_no_more_for(call)
        if answer.kind in ("returned", "raised", "cancelled"):
            context = self._context.copy() if answer.context else self._context
            try:
                result = context.run(dispatcher.finished, call, answer, None)
            except BaseException as error:
                if self._owner.raised(error) and isinstance(error, (KeyboardInterrupt, SystemExit)):
                    # Ctrl-C in this very moment, for what a routine raises there is none of these. As its Task would:
                    # not from here, where answers are read.
                    dispatcher.loop.call_soon(_raise, error)
            else:
                self._owner.returned(result)
            return
        try:
            dispatcher.unanswered(call, answer, Attempts())
        except Exception as error:  # its worker or its pool is gone
            self._owner.raised(error)
        else:
            self._owner.unplaced()

    async def _cancelled(self, message: object) -> None:
        dispatcher, call = self._dispatcher, self._call
        begun = False
        try:
            await PRIMED
            if call.waiter is None:
                return  # it has been answered
            begun = True
            answer = await dispatcher.cancelled(call, asyncio.CancelledError(message))
        except BaseException as error:
            if not begun and call.waiter is None:
                raise  # it has been answered, and its loop ends
            dispatcher.waits_no_more_for(call)
            dispatcher.give_up(call)
            dispatcher.ended(call, error)
            if self._owner.raised(error):
                raise
        else:
            self._answered(answer)


def _raise(error: BaseException) -> None:
    raise error


def begin(
    dispatcher: Dispatcher,
    routine: Routine,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    request: Request,
    context: Context,
    owner: Owner,
) -> Direct | None:
    """Send a call to a worker that can take it now; None: there is none, or the call is not simple. Raises what
    `Dispatcher.prepare` raises."""
    options = routine.options
    if options.retries or options.timeout is not None or request.max_calls:
        return None
    call = dispatcher.prepare(routine, args, kwargs, None, request.request_id, None, request)
    use = None if call.is_bulky else dispatcher.choose(call, Attempts())
    if use is None:
        return None
    direct = Direct(dispatcher, call, context, owner)
    dispatcher.assign(call, use, direct)
    call.connection.submit(call)
    return direct
