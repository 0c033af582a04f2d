"""Calling any function on a worker, on behalf of somebody who keeps the account of it: routines as they are, others as
if they were routines without options.

A function that has a routine below another decorator (`@keys.use()` above `@routine`) dispatches itself, and so is not
dispatched from here: `HERE` says that it is to be called in this process.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextvars import Context
from enum import Enum
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any

from headgate.workers.client.isolation import Losses
from headgate.workers.client.taskless import Direct, Owner, begin
from headgate.workers.model import RoutineOptions
from headgate.workers.protocol.messages import Request
from headgate.workers.routines import (
    ACTIVE,
    CALLER,
    Routine,
    as_routine,
    dispatch,
    dispatch_limit,
    do_dispatch,
    generator_over,
)
from headgate.workers.serialization.functions import inside
from headgate.workers.serialization.settled import routine_of

if TYPE_CHECKING:
    from headgate.workers.client.dispatcher import Dispatcher
    from headgate.workers.client.remote_stream import Stream
    from headgate.workers.pool import WorkerPool

Function = Callable[..., Any]
Args = tuple[Any, ...]


class Here(Enum):
    """The type of `HERE`, which has this one value."""

    HERE = "here"


HERE = Here.HERE
"""Says that a function is to be called here: it dispatches itself, or nothing is dispatched in this context."""

_MOST_ROUTINES, _MOST_CLOSURES = 1024, 32
_PLAIN = RoutineOptions()


class Placing:
    """What calls any function on the workers of one pool."""

    here: Here = HERE

    def __init__(self, workers: WorkerPool) -> None:
        self._workers = workers
        self.losses: Losses = Losses()
        self._routines: dict[FunctionType, Routine | Here] = {}  # how functions travel is remembered there
        self._closures: dict[FunctionType, Routine | Here] = {}  # the same for a few of those that hold on to something

    def can_stop(self, fn: Function | None) -> bool:
        """Whether a function runs on its worker's loop, and not in a thread there."""
        while isinstance(fn, functools.partial):
            fn = fn.func
        routine = self._routines.get(fn) if isinstance(fn, FunctionType) else None
        if routine is None:
            routine = routine_of(getattr(fn, "__func__", fn))
        if routine is None or routine is HERE:
            return inspect.iscoroutinefunction(fn) or not isinstance(fn, (FunctionType, MethodType))
        return not routine.portable.thread

    def send(self, fn: Any, args: Args, request: Request, context: Context, owner: Owner) -> Direct | None:
        """Call a function without awaiting it, in this context; None if it is not that simple, or something is wrong:
        it comes up again where it is awaited."""
        routine = self._routine(fn)
        if routine is HERE or (self.losses and request.request_id in self.losses):
            return None
        try:
            return context.run(self._begin, routine, args, request, context, owner)
        except Exception:
            return None

    def announce(self, sent: object) -> None:
        """Emit the event that a worker was given a call which `send` began."""
        if isinstance(sent, Direct):
            sent.announce()

    def _begin(self, routine: Routine, args: Args, request: Request, context: Context, owner: Owner) -> Direct | None:
        if not do_dispatch() or dispatch_limit() is not None:
            return None
        return begin(self._workers.__dispatcher__(), routine, args, {}, request, context, owner)

    def call(self, fn: Any, args: Args, request: Request) -> Awaitable[Any] | Here:
        """Return what to await for the result of a function on a worker; or `HERE`."""
        routine, given, kwargs = self._taken_apart(fn, args)
        if routine is HERE or not do_dispatch():
            ACTIVE.set(self._workers)
            return HERE
        self.losses.limit(request)
        dispatcher: Dispatcher = self._workers.__dispatcher__()
        return dispatcher.call(routine, given, kwargs, dispatch_limit(), request.request_id, request=request)

    async def call_alone(self, fn: Function, args: Args, kwargs: dict[str, Any]) -> Any:
        """Call a function for somebody who keeps no account: on a worker, or here if it dispatches itself."""
        routine, given, more = self._taken_apart(fn, args)
        if routine is HERE:
            ACTIVE.set(self._workers)
            result = fn(*args, **kwargs)
            return await result if inspect.isawaitable(result) else result
        if not do_dispatch():
            return await dispatch(routine, given, {**more, **kwargs})
        running, dispatcher = CALLER.get(), self._workers.__dispatcher__()
        caller = "" if running is None else running.id
        return await dispatcher.call(routine, given, {**more, **kwargs}, dispatch_limit(), caller)

    def stream(self, fn: Function, args: Args, request: Request) -> AsyncGenerator[Any, Any] | Here:
        """Return the generator of the items that a function makes on a worker; or `HERE`."""
        routine, given, kwargs = self._taken_apart(fn, args)
        if routine is HERE or not do_dispatch():
            ACTIVE.set(self._workers)
            return HERE
        self.losses.limit(request)
        dispatcher: Dispatcher = self._workers.__dispatcher__()
        limit, caller = dispatch_limit(), request.request_id

        def begin(args: Args, kwargs: dict[str, Any]) -> Stream:
            return dispatcher.stream(routine, args, kwargs, limit, caller, request=request)

        return generator_over(begin)(*given, **kwargs)

    def _taken_apart(self, fn: Function, args: Args) -> tuple[Routine | Here, Args, dict[str, Any]]:
        """Return the routine, and with what it is called: partials and methods bring arguments of their own."""
        kwargs: dict[str, Any] = {}
        while fn.__class__ is not FunctionType:
            if isinstance(fn, functools.partial):
                args, kwargs, fn = (*fn.args, *args), {**fn.keywords, **kwargs}, fn.func
            elif inspect.ismethod(fn):
                args, fn = (fn.__self__, *args), fn.__func__
            else:
                break
        return self._routine(fn), args, kwargs

    def _routine(self, fn: Function) -> Routine | Here:
        """Return the routine that a function is, or is taken for."""
        if not isinstance(fn, FunctionType):
            return _made(fn)  # objects that are called may be equal, and yet do different things
        found = self._routines.get(fn)
        if found is None:
            holds = fn.__closure__ is not None and routine_of(fn) is None
            known, most = (self._closures, _MOST_CLOSURES) if holds else (self._routines, _MOST_ROUTINES)
            if holds and (found := known.get(fn)) is not None:
                return found
            if len(known) >= most:
                known.clear()
            found = known[fn] = _made(fn)
        return found


def _made(fn: Function) -> Routine | Here:
    routine = routine_of(fn)
    if routine is not None:
        return routine
    if any(routine_of(inner) is not None for inner in inside(fn)):
        return HERE
    return as_routine(fn, _PLAIN)
