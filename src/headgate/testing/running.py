"""From a test to a virtual loop: `run`, the decorator `virtual`, and `settle`."""

from __future__ import annotations

import asyncio
import functools
import inspect
import itertools
import random
import threading
from collections.abc import Callable, Coroutine, Generator
from contextlib import contextmanager, suppress
from typing import Any, ParamSpec, TypedDict, TypeVar, Unpack, overload

from headgate.core.clock import clock
from headgate.errors import InvalidType
from headgate.testing.virtual_loop import VirtualLoop
from headgate.testing.waiting import Hang, Leak, describe_all

__all__ = ["Options", "run", "settle", "virtual"]

P = ParamSpec("P")
R = TypeVar("R")

WALL = 1_700_000_000.0
"""The Unix time at which every virtual run begins, so that what a test records is the same each time."""

_turn = threading.Lock()


class Options(TypedDict, total=False):
    """What `virtual` passes on to `run`."""

    seed: int
    start: float
    limit: float
    patience: float
    debug: bool | None
    check_leaks: bool


def run(
    main: Callable[[], Coroutine[Any, Any, R]] | Coroutine[Any, Any, R],
    *,
    seed: int = 0,
    start: float = 0.0,
    limit: float = 1e7,
    patience: float = 5.0,
    debug: bool | None = None,
    check_leaks: bool = True,
) -> R:
    """``asyncio.run`` on virtual time: hours pass in milliseconds, and a hang is an error that says who waits.

    headgate's clock follows the loop until this returns: time begins at `start`, chance is drawn from `seed`, names are
    "token-1", "token-2" and so on. A `Hang` is raised when nothing can happen any more, when more than `limit` virtual
    seconds have passed, or when threads and sockets have been silent for `patience` real seconds. Tasks that are left
    when `main` returns are cancelled, and are a `Leak` unless `check_leaks` is False.
    """
    with _alone(main):
        coroutine = _coroutine(main)
        loop = VirtualLoop(start=start, limit=limit, patience=patience)
        names = itertools.count(1)
        with clock.replaced(
            now=loop.time,
            wall=lambda: WALL + (loop.time() - start),
            sleep=loop.sleep,
            uniform=random.Random(seed).uniform,
            token=lambda: f"token-{next(names)}",
        ):
            return _run_to_the_end(loop, coroutine, debug, check_leaks)


@overload
def virtual(test: Callable[P, Coroutine[Any, Any, R]], /) -> Callable[P, R]: ...
@overload
def virtual(**options: Unpack[Options]) -> Callable[[Callable[P, Coroutine[Any, Any, R]]], Callable[P, R]]: ...
def virtual(test: Callable[..., Any] | None = None, /, **options: Unpack[Options]) -> Any:
    """Make an ``async def`` test a plain one that `run`s it: ``@virtual``, or with options ``@virtual(seed=3)``.

    Name, place and parameters stay, so pytest finds it and hands it fixtures, and no plugin is needed.
    """
    if test is None:
        return functools.partial(virtual, **options)
    if not inspect.iscoroutinefunction(test):
        raise InvalidType(
            f"@virtual needs an async def function, got {getattr(test, '__qualname__', repr(test))}",
            remedy="Write `async def`, and put @virtual nearest to it, below @given and the like.",
        )

    @functools.wraps(test)
    def run_test(*args: Any, **kwargs: Any) -> Any:
        return run(functools.partial(test, *args, **kwargs), **options)

    return run_test


async def settle(turns: int = 1000) -> None:
    """Let everything that is ready run, and what that makes ready, until nothing is. Time does not move.

    Work in threads is not waited for. Still busy after so many `turns`: `Hang`. On any other loop than a `VirtualLoop`
    nobody can see what is ready, and just so many turns pass.
    """
    loop = asyncio.get_running_loop()
    if isinstance(loop, VirtualLoop):
        await loop.settled(turns)
    else:
        for _ in range(turns):
            await asyncio.sleep(0)


@contextmanager
def _alone(main: object) -> Generator[None, None, None]:
    """The clock belongs to the process, so two runs at a time would pull at it from both sides."""
    refusal = ""
    if asyncio._get_running_loop() is not None:
        refusal = "run() cannot be called inside a running event loop. Await the coroutine, or test with a plain def"
    elif not _turn.acquire(blocking=False):
        refusal = "another thread is inside run(), and virtual time is one per process. Run one after the other"
    if refusal:
        if inspect.iscoroutine(main):
            main.close()  # else Python warns that it was never awaited, and hides the reason
        raise RuntimeError(f"headgate.testing: {refusal}.")
    try:
        yield
    finally:
        _turn.release()


def _coroutine(main: Callable[[], Coroutine[Any, Any, R]] | Coroutine[Any, Any, R]) -> Coroutine[Any, Any, R]:
    coroutine = main() if callable(main) else main
    if not inspect.iscoroutine(coroutine):
        raise InvalidType(
            f"main must be a coroutine or a coroutine function, got {type(coroutine).__name__}",
            remedy="Pass an `async def` function without arguments, or call it and pass what it returns.",
        )
    return coroutine


def _run_to_the_end(loop: VirtualLoop, main: Coroutine[Any, Any, R], debug: bool | None, check_leaks: bool) -> R:
    runner = asyncio.Runner(debug=debug, loop_factory=lambda: loop)
    try:
        result = runner.run(main)
        if check_leaks:
            _check_leaks(runner)
    except BaseException as error:
        _close(runner, error)
        raise
    _close(runner)
    return result


def _check_leaks(runner: asyncio.Runner) -> None:
    # A task cancelled a moment ago, or about to end at this very time, is no leak: what is ready may still run.
    with suppress(Hang):
        runner.run(settle())
    left = asyncio.all_tasks(runner.get_loop())
    if left:
        count = f"{len(left)} task{'s' * (len(left) > 1)}"
        raise Leak(f"{count} still pending when main returned (cancelled now):\n{describe_all(left)}")


def _close(runner: asyncio.Runner, error: BaseException | None = None) -> None:
    try:
        runner.close()
    except Hang as hang:
        if error is None:
            raise
        error.add_note(f"The cleaning up after it hung too: {hang}")
