"""`Context` objects: copies of the current Context to run code in, and tasks that run in one."""

from __future__ import annotations

import asyncio
import contextvars
import threading
import weakref
from collections.abc import Callable, Coroutine, Generator, Iterator, Mapping
from typing import Any, NoReturn, ParamSpec, TypeVar, cast, final

from headgate.context.chains import NONE, VALUES, Chain, Values, begin, here
from headgate.context.variables import ContextVar, not_a_base
from headgate.errors import InvalidType

P = ParamSpec("P")
R = TypeVar("R")

CoroutineLike = Generator[Any, None, R] | Coroutine[Any, Any, R]
"""What a task can run, as asyncio declares it."""


@final
class Context(Mapping[ContextVar[Any], Any]):
    """The variables that are set in a Context, and a way to run code in it. Made by `copy_context`."""

    __slots__ = ("__weakref__", "_chain", "_context", "_seen", "_task")

    def __new__(cls, context: contextvars.Context | None = None, chain: Chain | None = None) -> Context:
        # Called without `__init__` by `_made`.
        self = object.__new__(cls)
        self._context, self._task, self._seen = context, None, NONE
        if chain is not None:
            self._chain = chain
        return self

    def __init__(self) -> None:
        raise InvalidType("a Context is made by copy_context()", remedy="Call headgate.copy_context().")

    def __init_subclass__(cls) -> NoReturn:
        raise not_a_base("Context")

    _context: contextvars.Context | None  # None: it is one that somebody else made, and is in
    _chain: Chain
    _seen: Values
    _task: Callable[[], asyncio.Task[Any] | _Taken | None] | None

    @property
    def id(self) -> str:
        """The id of this Context, the same in every process that a call made in it goes through."""
        return self._chain.identity.id

    def run(self, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call a function in this Context, as `contextvars.Context.run` does."""
        if self._context is None:
            raise RuntimeError(f"cannot enter context: {self!r} is already entered")
        return self._context.run(fn, *args, **kwargs)

    def copy(self) -> Context:
        """Return a copy of this Context, with an id of its own."""
        if self._context is not None:
            return _made(self._context.copy())
        if self._chain.is_here():
            return copy_context()
        context = contextvars.Context()
        context.run(VALUES.set, self._seen)
        return _made(context)

    def _values(self) -> Values:
        if self._context is not None:
            return self._context.get(VALUES, NONE)
        if self._chain.is_here():
            self._seen = VALUES.get()
        return self._seen

    def __getitem__(self, var: ContextVar[Any]) -> Any:
        if not isinstance(var, ContextVar):
            raise InvalidType(f"a ContextVar key was expected, got {var!r}")
        return self._values()[var]

    def __contains__(self, var: object) -> bool:
        if not isinstance(var, ContextVar):
            raise InvalidType(f"a ContextVar key was expected, got {var!r}")
        return var in self._values()

    def __iter__(self) -> Iterator[ContextVar[Any]]:
        return iter(self._values())

    def __len__(self) -> int:
        return len(self._values())

    def __eq__(self, other: object) -> bool:
        """Compare as `contextvars.Context` does: the same variables with equal values. The ids may differ."""
        return self._values() == dict(other) if isinstance(other, Context) else NotImplemented

    __hash__ = None  # type: ignore[assignment] # what is set in it changes

    def __repr__(self) -> str:
        return f"<headgate.Context {self.id} with {len(self)} values>"

    def __reduce__(self) -> Any:
        raise InvalidType(
            "a Context cannot be pickled",
            remedy="Call the routine in it, ctx.run(...) or create_task(..., context=ctx): what is set goes along.",
        )

    def _take(self) -> contextvars.Context:
        """Return the Context for a new task to run in; RuntimeError: another task runs in it."""
        with _lock:
            task = None if self._task is None else self._task()
            if self._context is None or (task is not None and not task.done()):
                raise RuntimeError(f"{self!r} has a task already: one at a time may run in a Context")
            self._task = _taken
        return self._context

    def _give(self, task: asyncio.Task[Any] | None) -> None:
        """Note the task that runs in this Context; None: it could not be made."""
        self._task = None if task is None else weakref.ref(task)
        if self._task is None or self._context is None:
            return
        if self._chain.is_here():
            self._chain.remember(self._task)
        else:
            self._context.run(self._chain.remember, self._task)


class _Taken:
    """Stands for a task that is just being made."""

    def done(self) -> bool:
        return False


_lock = threading.Lock()
_being_made = _Taken()


def _taken() -> _Taken:
    return _being_made


def _made(context: contextvars.Context | None, chain: Chain | None = None) -> Context:
    chain = chain or cast(contextvars.Context, context).run(begin)
    made = Context.__new__(Context, context, chain)
    chain.context = weakref.ref(made)
    return made


def copy_context() -> Context:
    """Return a copy of the current Context, with an id of its own."""
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        pass
    else:
        install_task_factory(loop)  # so that it can be given to this loop's own `create_task`
    return _made(contextvars.copy_context())


def current_context() -> Context:
    """Return the Context of the code that calls this."""
    chain = here().remember()
    found = None if chain.context is None else chain.context()
    return found if found is not None else _made(None, chain)


def create_task(
    coro: Coroutine[Any, Any, R], *, name: str | None = None, context: Context | contextvars.Context | None = None
) -> asyncio.Task[R]:
    """Make a task as `asyncio.create_task` does; `context` may be one of `headgate.Context` too."""
    if context is not None and not isinstance(context, (Context, contextvars.Context)):
        raise InvalidType(f"context must be a Context, got {type(context).__name__}")
    loop = asyncio.get_running_loop()
    if not isinstance(context, Context):
        return loop.create_task(coro, name=name, context=context)
    return _in(context, coro, lambda inner: loop.create_task(coro, name=name, context=inner))


def _in(
    context: Context, coro: CoroutineLike[R], make: Callable[[contextvars.Context], asyncio.Task[R]]
) -> asyncio.Task[R]:
    """Make a task that runs in a `headgate.Context`."""
    try:
        inner = context._take()
    except RuntimeError:
        if asyncio.iscoroutine(coro):
            coro.close()
        raise
    task = None
    try:
        task = make(inner)
        return task
    finally:
        context._give(task)


class _Factory:
    """A task factory that makes tasks as the loop did before, and also accepts a `headgate.Context`."""

    def __init__(self, before: Callable[..., Any] | None) -> None:
        self._before = before

    def __call__(self, loop: asyncio.AbstractEventLoop, coro: CoroutineLike[R], **options: Any) -> asyncio.Task[R]:
        context = options.get("context")
        make = self._before or _task
        if not isinstance(context, Context):
            made: asyncio.Task[R] = make(loop, coro, **options)
            return made
        return _in(context, coro, lambda inner: make(loop, coro, **(options | {"context": inner})))


def _task(loop: asyncio.AbstractEventLoop, coro: CoroutineLike[R], **options: Any) -> asyncio.Task[R]:
    return asyncio.Task(coro, loop=loop, **options)


def install_task_factory(loop: asyncio.AbstractEventLoop | None = None) -> None:
    """Let `create_task(..., context=ctx)` of this loop accept a `headgate.Context`; its own factory is still used."""
    loop = loop or asyncio.get_running_loop()
    before = loop.get_task_factory()
    if not isinstance(before, _Factory):
        loop.set_task_factory(cast(Any, _Factory(before)))
