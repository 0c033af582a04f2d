"""What the tests of variables, tokens and contexts of one process share: fresh keys, and a run on either loop."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import gc
import itertools
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec, TypeVar

import pytest

import headgate
from tests.support.workers.support import bounded

P = ParamSpec("P")
R = TypeVar("R")

LOOPS: dict[str, Any] = {"asyncio": asyncio.new_event_loop}
try:
    import uvloop
except ImportError:  # not on every platform
    pass
else:
    LOOPS["uvloop"] = uvloop.new_event_loop
    uvloop.new_event_loop().close()  # libuv opens a pipe of its own, once for the process: not a leak of any test

on_each_loop = pytest.mark.parametrize("loop", list(LOOPS))

_numbers = itertools.count()


def fresh(word: str = "case") -> str:
    """A namespace that no other test has."""
    return f"{word}{next(_numbers)}"


def declare(name: str = "thing", **options: Any) -> headgate.ContextVar[Any]:
    """A variable under a key of its own."""
    return headgate.ContextVar(name, namespace=fresh(), **options)


def apart(test: Callable[P, R]) -> Callable[P, R]:
    """Run this test in an empty context: what it sets is gone with it, and it sees what it set alone."""

    @functools.wraps(test)
    def in_an_empty_context(*args: P.args, **kwargs: P.kwargs) -> R:
        return contextvars.Context().run(test, *args, **kwargs)

    return in_an_empty_context


def on(loop: str, main: Callable[[], Coroutine[Any, Any, R]], patience: float = 10.0) -> R:
    """`asyncio.run` on this kind of loop, in an empty context, for so many seconds at most."""
    with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
        return runner.run(bounded(main, patience), context=contextvars.Context())


def error_of(call: Callable[[], Any]) -> str:
    """Which of Python's own errors this raises; "" when none. An error of ours counts as the one it derives from."""
    try:
        call()
    except Exception as error:
        return kind(error)
    return ""


def kind(error: BaseException) -> str:
    return next(one.__name__ for one in type(error).__mro__ if one.__module__ == "builtins")


def collect() -> None:
    for _ in range(3):
        if not gc.collect():
            return
