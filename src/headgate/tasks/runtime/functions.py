"""What may be submitted: async functions, plain functions, and objects that are called like either."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable
from typing import Any

from headgate.errors import InvalidType

_COROUTINE = inspect.CO_COROUTINE
_GENERATOR = inspect.CO_GENERATOR
_AWAITABLE_GENERATOR = inspect.CO_ITERABLE_COROUTINE


def is_async(fn: object) -> bool:
    """Does calling it give an awaitable, and do no work before that is awaited?"""
    code = getattr(fn, "__code__", None)
    if code is not None and code.co_flags & _COROUTINE:
        return True
    return _looks_async(fn)


def check_function(fn: object) -> None:
    """Refuse what cannot be called later, with the remedy."""
    code = getattr(fn, "__code__", None)
    if code is not None and code.co_flags & _COROUTINE:
        return
    if inspect.isawaitable(fn):
        if inspect.iscoroutine(fn):
            fn.close()  # else Python warns that it was never awaited, and hides the reason
        raise InvalidType(
            f"fn must be a function, got a {type(fn).__name__} object: it has been called already",
            remedy="Pass the function and its arguments: submit(review, pr) instead of submit(review(pr)).",
        )
    if not callable(fn):
        raise InvalidType(f"fn must be callable, got {type(fn).__name__}", remedy="Pass a function and its arguments.")
    if inspect.isasyncgenfunction(_unwrapped(fn)):
        raise InvalidType(
            f"fn must not be an async generator function, got {name_of(fn)}",
            remedy="Take its items with `async for item in pool.stream(fn, ...)`, or submit one that returns a list.",
        )
    if _is_generator(_unwrapped(fn)):
        raise InvalidType(
            f"fn must not be a generator function, got {name_of(fn)}: calling it runs nothing of it",
            remedy="Submit one that returns a list; or make it an async generator, and take its items with "
            "`async for item in pool.stream(fn, ...)`.",
        )


def takes(fn: Callable[..., Any] | None, name: str) -> bool:
    """Has it a parameter of this name that can be given by keyword?"""
    if fn is None:
        return False
    try:
        parameter = inspect.signature(fn).parameters.get(name)
    except (TypeError, ValueError):
        return False  # it has no signature
    return parameter is not None and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)


def explain(error: TypeError, fn: Callable[..., Any] | None, args: tuple[Any, ...]) -> None:
    """If a function was written without an argument for the resource that comes first, say so."""
    try:
        inspect.signature(fn).bind(*args)  # type: ignore[arg-type] # TypeError for what is not callable
    except TypeError:
        error.add_note("A pool with resources= passes the resource as first argument, before those of submit().")
    except ValueError:
        pass  # it has no signature


def _looks_async(fn: object) -> bool:
    fn = _unwrapped(fn)
    if asyncio.iscoroutinefunction(fn) or inspect.iscoroutinefunction(fn):
        return True
    if inspect.isfunction(fn) or inspect.ismethod(fn) or inspect.isclass(fn):
        return False
    return inspect.iscoroutinefunction(getattr(type(fn), "__call__", None))  # noqa: B004 - is it async, not is it there


def _unwrapped(fn: object) -> object:
    while isinstance(fn, functools.partial):
        fn = fn.func
    return fn


def _is_generator(fn: object) -> bool:
    """Does calling it give a generator? One that is made awaitable (types.coroutine) is none."""
    if not inspect.isfunction(fn) and not inspect.ismethod(fn):
        if inspect.isclass(fn):
            return False
        fn = getattr(type(fn), "__call__", fn)  # noqa: B004 - what it is, not whether it is there
    code = getattr(fn, "__code__", None)
    return code is not None and code.co_flags & (_GENERATOR | _AWAITABLE_GENERATOR) == _GENERATOR


def name_of(fn: object) -> str:
    """The name by which messages call a function."""
    fn = _unwrapped(fn)
    return getattr(fn, "__qualname__", type(fn).__qualname__)
