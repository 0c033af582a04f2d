"""`@routine`: a function that runs on a worker when it is called, and looks as it did before.

The wrapper is a real coroutine function, so methods, classmethods and introspection work as for any other. It holds
nothing but the `Routine`, which pickles by reference or by value like the function itself: a routine may be passed to
another as an argument, or be seen by it as a global.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from contextlib import AbstractContextManager
from contextvars import ContextVar, Token
from types import TracebackType
from typing import Any, ParamSpec, Protocol, Self, TypeVar, overload
from weakref import WeakSet

from headgate.calls.retrying import Backoff, RetryOn, checked_backoff, checked_retry_on
from headgate.core.checks import is_finite, nearest
from headgate.core.fences import FENCED
from headgate.core.lessons import LEARNER
from headgate.core.threads import call_in_thread, outlast_cancellation
from headgate.errors import InvalidArgument, InvalidType, NoActivePool
from headgate.workers.model import RoutineOptions, Task
from headgate.workers.serialization.functions import PortableFunction
from headgate.workers.serialization.settled import ROUTINE, routine_of

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S")

ACTIVE: ContextVar[Any] = ContextVar("headgate.worker_pool", default=None)
"""The innermost WorkerPool of this context."""
OPEN: WeakSet[Any] = WeakSet()
"""The pools of this process that are open."""
CALLER: ContextVar[Any] = LEARNER
"""On a worker: the call for which the current code runs."""
_DISPATCHES: ContextVar[bool] = ContextVar("headgate.do_dispatch", default=True)
MOST_AHEAD = 1_000_000
"""The highest `prefetch` that a generator may have."""
_DISPATCH_TIMEOUT: ContextVar[float | None] = ContextVar("headgate.dispatch_timeout", default=None)


class END:
    """What a step of a generator gives when there are no more items (the class itself: each process has one)."""


class Routine:
    """A function that runs on workers, with its options and the way it is sent."""

    __slots__ = ("decorated", "fn", "options", "portable", "tag")

    def __init__(self, fn: Callable[..., Any], options: RoutineOptions) -> None:
        self.fn: Callable[..., Any] = fn
        self.options: RoutineOptions = options
        plain = not inspect.iscoroutinefunction(fn) and not inspect.isasyncgenfunction(fn)
        self.portable: PortableFunction = PortableFunction(fn, options.thread or plain)
        self.tag: str = self.portable.tag
        self.decorated: Callable[..., Any] = fn
        """What users hold: the wrapper that dispatches."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuilt, (self.fn, self.options), self.decorated

    def __setstate__(self, decorated: Callable[..., Any]) -> None:
        self.decorated = decorated


def _rebuilt(fn: Callable[..., Any], options: RoutineOptions) -> Routine:
    """Make a routine of a pickle. Its wrapper, which holds it, is in the pickle too: see `__setstate__`."""
    made: Routine = getattr(_decorate(fn, options), ROUTINE)  # pickles of older releases have no wrapper
    return made


def _decorate(fn: Callable[..., Any], options: RoutineOptions) -> Callable[..., Any]:
    routine = Routine(fn, options)

    if inspect.isasyncgenfunction(fn):
        generate = generator_over(lambda args, kwargs: open_stream(routine, args, kwargs))
        made: Callable[..., Any] = functools.wraps(fn)(generate)
    else:

        @functools.wraps(fn)
        async def call(*args: Any, **kwargs: Any) -> Any:
            return await dispatch(routine, args, kwargs)

        made = call
    routine.decorated = made
    setattr(made, ROUTINE, routine)
    return made


def generator_over(begin: Callable[[tuple[Any, ...], dict[str, Any]], Any]) -> Callable[..., AsyncGenerator[Any, Any]]:
    """A generator function of Python's own: what it makes is advanced, closed and abandoned in Python's own ways.

    `begin` gives a stream (see `remote_stream`), and for each step the generator has the stream do what was done to it.
    """

    async def generate(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, Any]:
        stream = begin(args, kwargs)
        item = await stream.advance("next", None)
        while item is not END:
            what, value = "next", None
            try:
                value = yield item
                what = "send" if value is not None else "next"
            except BaseException as error:  # GeneratorExit too: it may be caught there, as by any generator
                what, value = "throw", error
            item = await stream.advance(what, value)

    return generate


def as_routine(fn: Callable[..., Any], options: RoutineOptions) -> Routine:
    """Make a routine of a function that nobody decorated."""
    made = fn if hasattr(fn, "__code__") else _as_function(fn)
    routine = Routine(made, options)
    routine.decorated = made
    return routine


def limit_dispatch(seconds: float) -> None:
    """Set the seconds within which calls of this context must have begun."""
    _DISPATCH_TIMEOUT.set(seconds)


def dispatch_limit() -> float | None:
    """Return the seconds within which calls of this context must have begun; None: no limit."""
    return _DISPATCH_TIMEOUT.get()


def dispatch(routine: Routine, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Coroutine[Any, Any, Any]:
    """Run a routine on a worker, or here if nothing is dispatched in this context."""
    if not _DISPATCHES.get():
        return _run_here(routine, args, kwargs)
    dispatcher, caller = _dispatcher_for(routine)
    run: Coroutine[Any, Any, Any] = dispatcher.call(routine, args, kwargs, _DISPATCH_TIMEOUT.get(), caller)
    return run


def open_stream(routine: Routine, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return what advances a generator, on a worker or here."""
    if not _DISPATCHES.get():
        return _Here(routine.fn(*args, **kwargs))
    dispatcher, caller = _dispatcher_for(routine)
    return dispatcher.stream(routine, args, kwargs, _DISPATCH_TIMEOUT.get(), caller)


class _Here:
    """A generator that runs in this process."""

    def __init__(self, generator: AsyncGenerator[Any, Any]) -> None:
        self._generator = generator

    async def advance(self, what: str, value: Any = None) -> Any:
        try:
            if what == "throw":
                return await self._generator.athrow(value)
            return await self._generator.asend(value)
        except StopAsyncIteration:
            return END


def _dispatcher_for(routine: Routine) -> tuple[Any, str]:
    """Return what calls the workers of this context, and the id of the task that calls."""
    pool, running = ACTIVE.get(), CALLER.get()
    if pool is None:
        if running is None:
            raise _no_pool(routine)
        pool = running.pool
    else:
        pool = pool.__open_pool__()
    return pool.__dispatcher__(), "" if running is None else running.id


def _no_pool(routine: Routine) -> NoActivePool:
    name = routine.tag.rpartition(".")[2].partition(":")[0]
    if routine.portable.generator:
        use, through = f"async for item in {name}(...): print(item)", f"async for item in pool.stream({name}, ...):"
        through += " print(item)"
    else:
        use, through = f"result = await {name}(...)", f"result = await (await pool.submit({name}, ...))"
    # Complete, so that it can be pasted: in a notebook everything has to be in one cell.
    lines = (
        "Open one, in an async function or in the same cell of a notebook:\n\n"
        f"    import headgate\n\n    async with headgate.WorkerPool():\n        {use}\n"
    )
    message = f"{routine.tag} was called and no WorkerPool is open around the call"
    if not OPEN:
        return NoActivePool(message, remedy=lines)
    return NoActivePool(
        f"{message} (one is open in this process, but not in this context)",
        remedy=f"{lines}\nOr use the one that is open, which threads and other cells of a notebook do not see by "
        "themselves. If it is called `workers`:\n\n"
        f"    import headgate\n\n    async with headgate.TaskPool(workers=workers) as pool:\n        {through}\n",
    )


async def _run_here(routine: Routine, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if inspect.iscoroutinefunction(routine.fn):
        return await routine.fn(*args, **kwargs)
    import asyncio
    from concurrent.futures import ThreadPoolExecutor

    from headgate.context.travel import Elsewhere

    thread = ThreadPoolExecutor(1, thread_name_prefix="headgate routine")
    elsewhere = Elsewhere()
    future = asyncio.get_running_loop().run_in_executor(
        thread, lambda: elsewhere.context.run(call_in_thread, routine.fn, args, kwargs)
    )
    stopped = await outlast_cancellation(future)  # as on a worker: a thread cannot be interrupted
    thread.shutdown(wait=False)
    elsewhere.bring_back()
    if stopped is not None:
        future.exception()
        raise stopped
    result = future.result()
    return await result if inspect.isawaitable(result) else result


class Decorator(Protocol):
    """The type of ``@routine(...)``: what it makes of each kind of function."""

    @overload
    def __call__(  # type: ignore[overload-overlap] # what is no generator is the last
        self, fn: Callable[P, AsyncGenerator[R, S]], /
    ) -> Callable[P, AsyncGenerator[R, S]]: ...
    @overload
    def __call__(  # type: ignore[overload-overlap]
        self, fn: Callable[P, AsyncIterator[R]], /
    ) -> Callable[P, AsyncIterator[R]]: ...
    @overload
    def __call__(self, fn: Callable[P, Coroutine[Any, Any, R]], /) -> Callable[P, Coroutine[Any, Any, R]]: ...
    @overload
    def __call__(self, fn: Callable[P, R], /) -> Callable[P, Coroutine[Any, Any, R]]: ...


@overload
def routine(  # type: ignore[overload-overlap]
    fn: Callable[P, AsyncGenerator[R, S]], /
) -> Callable[P, AsyncGenerator[R, S]]: ...
@overload
def routine(  # type: ignore[overload-overlap]
    fn: Callable[P, AsyncIterator[R]], /
) -> Callable[P, AsyncIterator[R]]: ...
@overload
def routine(fn: Callable[P, Coroutine[Any, Any, R]], /) -> Callable[P, Coroutine[Any, Any, R]]: ...
@overload
def routine(fn: Callable[P, R], /) -> Callable[P, Coroutine[Any, Any, R]]: ...
@overload
def routine(
    *,
    timeout: float | None = None,
    retries: int = 0,
    thread: bool = False,
    prefetch: int = 0,
    backoff: Backoff | float | None = None,
    retry_on: RetryOn | None = None,
) -> Decorator: ...
def routine(
    fn: Callable[..., Any] | None = None,
    /,
    *,
    timeout: float | None = None,
    retries: int = 0,
    thread: bool = False,
    prefetch: int = 0,
    backoff: Backoff | float | None = None,
    retry_on: RetryOn | None = None,
    **misspelt: object,
) -> Any:
    """Make a function run on a worker of the active WorkerPool when it is called and awaited, or iterated over.

    `timeout`: seconds one run, or one step of a generator, may take (RoutineTimeout). `retries`: how many times it may
    be run again after its worker was lost; without it a call runs at most once. `retry_on`: exception classes, or a
    function of the error, that are tried again instead of a lost worker alone; name WorkerLost too if that is meant.
    `backoff`: the pauses before that, a `Backoff` or the first one in seconds. `thread`: run it in a thread of the
    worker, for code that computes and would hold the worker's loop; a plain function always runs in a thread.
    `prefetch`: by how many items a generator may run ahead of its consumer.
    """
    for name in misspelt:
        known = RoutineOptions._fields
        near = "Did you mean retries?" if name in ("retry", "max_retries") else nearest(name, known)
        raise InvalidType(f"@routine has no option {name!r}", remedy=near)
    options = _checked(timeout, retries, thread, prefetch, backoff, retry_on)
    if fn is None:
        return lambda fn: _made(fn, options)
    return _made(fn, options)


def _made(fn: Any, options: RoutineOptions) -> Any:
    if isinstance(fn, (classmethod, staticmethod)):
        return type(fn)(_made(fn.__func__, options))
    if isinstance(fn, type):
        raise InvalidType(
            f"@routine takes a function, got the class {fn.__qualname__}", remedy="Decorate its methods instead."
        )
    if inspect.iscoroutine(fn):
        fn.close()
        raise InvalidType("@routine takes a function, got a coroutine", remedy="Leave out the parentheses.")
    if not callable(fn):
        raise InvalidType(
            f"@routine takes a function, got {type(fn).__name__}",
            remedy="Put it above `async def`; its options are keywords: @routine(timeout=5).",
        )
    if inspect.isgeneratorfunction(fn):
        raise InvalidType(
            f"@routine cannot take the plain generator {fn.__qualname__}", remedy="Make it one of `async def`."
        )
    _check_generator(fn, options)
    if routine_of(fn) is not None:
        raise InvalidType(f"{fn.__qualname__} is a routine already", remedy="Decorate it once.")
    if inspect.ismethod(fn) or not hasattr(fn, "__code__"):
        return _decorate(_as_function(fn), options)
    return _decorate(fn, options)


def _check_generator(fn: Callable[..., Any], options: RoutineOptions) -> None:
    """Raise InvalidArgument for options that do not fit a generator, or fit only one."""
    if not inspect.isasyncgenfunction(fn):
        if options.prefetch:
            raise InvalidArgument(
                f"prefetch is for generators, and {getattr(fn, '__qualname__', fn)} is none",
                remedy="Leave it out, or yield from an `async def`.",
            )
    elif options.retries:
        raise InvalidArgument(
            f"retries cannot be had for the generator {fn.__qualname__}: what it has yielded cannot be taken back",
            remedy="Catch WorkerLost, and begin a new one where the old one ended.",
        )
    elif options.thread:
        raise InvalidArgument(
            f"thread=True cannot be had for the generator {fn.__qualname__}",
            remedy="Await what computes in it: a routine, or asyncio.to_thread.",
        )


def _as_function(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Make a function that calls a bound method, a partial, a builtin or an object with `__call__`."""
    target: Any = fn if inspect.ismethod(fn) or inspect.isbuiltin(fn) else getattr(fn, "func", fn)
    if inspect.isasyncgenfunction(target) or inspect.isasyncgenfunction(type(target).__call__):
        made: Callable[..., Any] = generator_over(lambda args, kwargs: _Here(fn(*args, **kwargs)))
    elif inspect.iscoroutinefunction(target) or inspect.iscoroutinefunction(type(target).__call__):

        async def call_async(*args: Any, **kwargs: Any) -> Any:
            return await fn(*args, **kwargs)

        made = call_async
    else:

        def call(*args: Any, **kwargs: Any) -> Any:
            return fn(*args, **kwargs)

        made = call
    made.__name__ = getattr(target, "__name__", type(target).__name__)
    made.__qualname__ = f"<{made.__name__}>"
    return made


def _checked(
    timeout: object, retries: object, thread: object, prefetch: object, backoff: object, retry_on: object
) -> RoutineOptions:
    if timeout is not None:
        if isinstance(timeout, bool) or not isinstance(timeout, (int, float)):
            raise InvalidType(f"timeout must be a number of seconds or None, got {type(timeout).__name__}")
        if not is_finite(timeout) or timeout <= 0:
            raise InvalidArgument(f"timeout must be above 0, got {timeout!r}")
    if isinstance(retries, bool) or not isinstance(retries, int):
        raise InvalidType(f"retries must be a whole number, got {type(retries).__name__}")
    if retries < 0:
        raise InvalidArgument(f"retries must be >= 0, got {retries}")
    if not isinstance(thread, bool):
        raise InvalidType(f"thread must be True or False, got {thread!r}")
    if isinstance(prefetch, bool) or not isinstance(prefetch, int):
        raise InvalidType(f"prefetch must be a whole number, got {type(prefetch).__name__}")
    if not 0 <= prefetch <= MOST_AHEAD:
        raise InvalidArgument(f"prefetch must be from 0 to {MOST_AHEAD:,}, got {prefetch}")
    pauses, errors = checked_backoff(backoff), checked_retry_on(retry_on)
    if not retries and (pauses is not None or errors is not None):
        raise InvalidArgument(
            "backoff and retry_on need retries, which says how often", remedy="Pass retries=3, or leave them out."
        )
    return RoutineOptions(None if timeout is None else float(timeout), retries, thread, prefetch, pauses, errors)


class _Gate:
    """What ``with do_dispatch(...):`` enters and leaves."""

    __slots__ = ("_gate", "_token")

    def __init__(self, gate: bool) -> None:
        self._gate = gate
        self._token: Token[bool] | None = None

    def __enter__(self) -> None:
        if self._token is not None:
            raise RuntimeError("this do_dispatch() block was entered already: make a new one")
        self._token = _DISPATCHES.set(self._gate)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        token, self._token = self._token, None
        if token is not None:
            _DISPATCHES.reset(token)


@overload
def do_dispatch() -> bool: ...
@overload
def do_dispatch(gate: bool) -> AbstractContextManager[None]: ...
def do_dispatch(gate: bool | None = None) -> bool | AbstractContextManager[None]:
    """``do_dispatch()`` tells whether routines go to workers here; ``with do_dispatch(False):`` runs them locally.

    Locally a routine is just its function: `timeout`, `retries` and `thread` are for workers.
    """
    if gate is None:
        return _DISPATCHES.get()
    if not isinstance(gate, bool):
        raise InvalidType(f"do_dispatch takes True or False, got {gate!r}")
    return _Gate(gate)


_NOT_GIVEN: Any = object()


class RuntimeContext:
    """A block in which dispatch is bounded: a call that no worker has begun in time raises DispatchTimeout.

    So does each call that a routine called here makes itself. Without `dispatch_timeout` the limit of an outer block
    stays; None lifts it.
    """

    __slots__ = ("_given", "_token", "dispatch_timeout")

    def __init__(self, *, dispatch_timeout: float | None = _NOT_GIVEN) -> None:
        self._given = dispatch_timeout is not _NOT_GIVEN
        dispatch_timeout = dispatch_timeout if self._given else None
        if dispatch_timeout is not None:
            if isinstance(dispatch_timeout, bool) or not isinstance(dispatch_timeout, (int, float)):
                raise InvalidType(f"dispatch_timeout must be seconds or None, got {type(dispatch_timeout).__name__}")
            if not is_finite(dispatch_timeout) or dispatch_timeout <= 0:
                raise InvalidArgument(f"dispatch_timeout must be above 0, got {dispatch_timeout!r}")
        self.dispatch_timeout: float | None = dispatch_timeout
        """Seconds in which calls must have begun; None: no limit, or, before the block is entered, that of outside."""
        self._token: Token[float | None] | None = None

    def __enter__(self) -> Self:
        if self._token is not None:
            raise RuntimeError("this RuntimeContext was entered already: make a new one")
        if not self._given:
            self.dispatch_timeout = _DISPATCH_TIMEOUT.get()
        self._token = _DISPATCH_TIMEOUT.set(self.dispatch_timeout)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        token, self._token = self._token, None
        if token is not None:
            _DISPATCH_TIMEOUT.reset(token)


def current_task() -> Task | None:
    """Return the task that this code runs in, on a worker or in a pool with `fencing=True`; None elsewhere."""
    running = CALLER.get()
    if running is not None:
        task: Task = running.describe()
        return task
    here = FENCED.get()
    return None if here is None else Task(here.task_id, here.caller, here.function, None, here.tenant, here.fence)


__all__ = ["ACTIVE", "CALLER", "Routine", "RuntimeContext", "current_task", "dispatch", "do_dispatch", "routine"]
