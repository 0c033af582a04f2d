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

from headgate.core.cancellation import primed
from headgate.workers.client.dispatcher import TASK_NUMBERS, Dispatcher
from headgate.workers.client.failures import tell_dispatched
from headgate.workers.events import TASKS
from headgate.workers.protocol.bulk import BulkPayload
from headgate.workers.protocol.messages import Answer, Outgoing, Request
from headgate.workers.serialization import context_frames
from headgate.workers.serialization.pickling import dump_arguments

if TYPE_CHECKING:
    from headgate.workers.client.connection import Connection
    from headgate.workers.routines import Routine


class Owner(Protocol):
    """Who is told."""

    def returned(self, result: Any) -> None:
        """It returned this."""

    def raised(self, error: BaseException) -> bool:
        """It raised this, or was cancelled. Must whoever ran it raise it too?"""
        ...

    def unplaced(self) -> None:
        """No worker has run it: place it in the ordinary way."""


class Direct:
    """One such call. Has `cancel` as a Task has."""

    __slots__ = ("_call", "_connection", "_context", "_dispatcher", "_ending", "_owner", "_routine", "_use")

    def __init__(
        self, dispatcher: Dispatcher, routine: Routine, use: Any, call: Outgoing, context: Context, owner: Owner
    ):
        self._dispatcher = dispatcher
        self._routine = routine
        self._use = use
        self._connection: Connection = dispatcher.roster.worker_of(use)
        self._call = call
        self._context = context
        self._owner = owner
        self._ending: asyncio.Task[None] | None = None

    def cancel(self, msg: Any = None) -> bool:
        """Tell the worker, and wait for the end there: that takes a Task."""
        if self._ending is None:
            body = self._cancelled(msg)
            body.send(None)
            self._ending = self._dispatcher.loop.create_task(body, context=self._context.copy())
        else:
            self._ending.cancel(msg)
        return True

    def stop(self, why: object) -> None:
        """Interrupt it, for a reason that is no cancellation of its owner."""
        self.cancel(why)

    def is_ours(self, error: asyncio.CancelledError) -> bool:
        """Does this CancelledError, which ended it, come from `stop` alone? (Whoever cancels its owner knows that.)"""
        return self._ending is None or not self._ending.cancelling()

    def announce(self) -> None:
        """Tell that a worker was given it: when its owner has told what comes before."""
        if TASKS.listeners:
            tell_dispatched(self._routine, self._call, self._connection)

    # -- as the waiter of its call -------------------------------------------------------------------------------------

    def done(self) -> bool:
        """Never before `set_result`."""
        return False

    def set_result(self, _: None) -> None:
        """The answer is there."""
        answer: Answer = self._call.waiter
        self._call.waiter = None
        try:
            self._answered(answer)
        except BaseException as error:  # of listeners and the like: whoever reads answers must go on
            if isinstance(error, (KeyboardInterrupt, SystemExit)):
                raise
            self._dispatcher.loop.call_exception_handler(
                {"message": "what hears of answers failed", "exception": error}
            )

    def _answered(self, answer: Answer) -> None:
        dispatcher, routine, call, use = self._dispatcher, self._routine, self._call, self._use
        dispatcher.waits_no_more_for(call)
        if answer.kind in ("returned", "raised", "cancelled"):
            context = self._context.copy() if answer.context else self._context
            try:
                result = context.run(dispatcher.finished, routine, use, call, answer, None)
            except BaseException as error:
                if self._owner.raised(error) and isinstance(error, (KeyboardInterrupt, SystemExit)):
                    # Ctrl-C in this very moment, for what a routine raises there is none of these. As its Task would:
                    # not from here, where answers are read.
                    dispatcher.loop.call_soon(_raise, error)
            else:
                self._owner.returned(result)
            return
        try:
            dispatcher.unanswered(routine, use, call, answer, {}, again=False)
        except Exception as error:  # its worker or its pool is gone
            self._owner.raised(error)
        else:
            self._owner.unplaced()

    async def _cancelled(self, message: Any) -> None:
        dispatcher, connection, call = self._dispatcher, self._connection, self._call
        begun = False
        try:
            await primed()
            if call.waiter is None:
                return  # it has been answered
            begun = True
            answer = await dispatcher.cancelled(connection, call, asyncio.CancelledError(message))
        except BaseException as error:
            if not begun and call.waiter is None:
                raise  # it has been answered, and its loop ends
            dispatcher.waits_no_more_for(call)
            dispatcher.give_up(connection, call)
            dispatcher.ended(self._routine, self._use, call, connection, error)
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
    """Send a call to a worker that can take it now; None: there is none, or the call is not simple."""
    options = routine.options
    if options.retries or options.timeout is not None or request.max_calls:
        return None
    arguments = dump_arguments(routine.tag, args, kwargs, routine.fn)
    bulky = isinstance(arguments, BulkPayload)
    if bulky or 0 < dispatcher.max_payload < len(arguments):
        return None
    form = routine.traveller.form(routine.decorated)
    set_here = b"" if context_frames.nothing() else context_frames.sent(routine.tag, dispatcher.max_payload)
    number = next(TASK_NUMBERS)
    use = dispatcher.choose(routine, number, {}, bulky)
    if use is None:
        return None
    call = Outgoing(number, form, arguments, 0.0, request.request_id, False, None, 0, set_here, request.tenant, request)
    direct = Direct(dispatcher, routine, use, call, context, owner)
    connection = dispatcher.roster.worker_of(use)
    request.placed(connection.metadata.uid)
    call.waiter = direct
    dispatcher.waits_for(call)
    connection.submit(call)
    return direct
