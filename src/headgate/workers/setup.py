"""What each worker of a pool does before its first call and at its end: `WorkerPool(setup=, teardown=)`.

The functions are pickled once, when the pool is opened, so that a worker that replaces another begins like that one.
They are sent by reference if they can be imported, else by value. `server/setup_task.py` runs them.
"""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

from headgate.context.variables import bare
from headgate.errors import InvalidType, NoActivePool
from headgate.workers.serialization.settled import routine_of

TEARDOWN_SECONDS = 10.0
"""Seconds that the teardown of a worker may take before it is cancelled."""

_NOTHING: Any = object()
_result: Any = _NOTHING


class Setup(NamedTuple):
    """What the workers of a pool run before their first call and at their end, ready to be sent."""

    pickled: bytes
    """The two functions; either may be None."""
    timeout: float | None
    """Seconds that the setup may take; None: no limit."""


def setup_result() -> Any:
    """Return what `setup` of this worker's pool returned, or what its context manager gave when it was entered.

    For routines, on a worker. NoActivePool: this process is no worker of a pool with `setup=`.
    """
    if _result is _NOTHING:
        raise NoActivePool(
            "setup_result() was called in a process that ran no setup",
            remedy="Call it in a routine, on a worker that WorkerPool(setup=...) started. Workers that a discovery "
            "found did not run the setup of this pool.",
        )
    return _result


def keep_result(result: Any) -> None:
    """Have `setup_result` return this, in the whole process."""
    global _result
    _result = result


def check_functions(setup: object, teardown: object) -> None:
    """Raise if these cannot be what workers run before their first call and at their end."""
    _check("setup", setup, "a function without parameters or a context manager")
    _check("teardown", teardown, "a function without parameters")


def _check(name: str, given: object, wanted: str) -> None:
    if given is None:
        return
    if inspect.iscoroutine(given) or is_unentered_generator(given):
        if inspect.iscoroutine(given):
            given.close()  # else Python warns that nobody awaited it
        raise InvalidType(
            f"{name} must be {wanted}, got what a function returned: a {type(given).__name__}",
            remedy=f"Pass the function itself: {name}=function, not {name}=function().",
        )
    if not callable(given) and not (name == "setup" and is_context_manager(given)):
        raise InvalidType(f"{name} must be {wanted}, got {type(given).__name__}")
    if inspect.isgeneratorfunction(given) or inspect.isasyncgenfunction(given):
        raise InvalidType(
            f"{name} is a generator function, and nobody would advance it",
            remedy="Decorate it with @contextlib.asynccontextmanager or @contextlib.contextmanager.",
        )
    if routine_of(given) is not None:
        raise InvalidType(
            f"{name} is a routine, and a call of it would be sent to a worker",
            remedy="Pass a function without @routine.",
        )


def is_context_manager(value: object) -> bool:
    """Tell whether this can be entered, by `with` or `async with`."""
    return hasattr(type(value), "__aenter__") or hasattr(type(value), "__enter__")


def is_unentered_generator(value: object) -> bool:
    """Tell whether a function with `@contextmanager` or `@asynccontextmanager` returned this."""
    generator = getattr(value, "gen", None)
    return is_context_manager(value) and (inspect.isgenerator(generator) or inspect.isasyncgen(generator))


def dumped(setup: object, teardown: object, timeout: float | None) -> Setup | None:
    """Pickle what workers run; None: there is nothing. InvalidType: it cannot be pickled."""
    if setup is None and teardown is None:
        return None
    import cloudpickle

    try:
        with bare:
            return Setup(cloudpickle.dumps((setup, teardown), 5), timeout)
    except Exception as error:
        raise InvalidType(
            f"setup or teardown cannot be sent to workers: {type(error).__name__}: {error}",
            remedy="Make connections and models inside of setup, not outside: it runs on the worker.",
        ) from error
