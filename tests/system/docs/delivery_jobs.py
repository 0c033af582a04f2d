"""What the experiments of `test_delivery` run on workers. Each notes in a file when it begins and how it ends.

Functions for tasks of a TaskPool may get a resource as their first argument; those for calls never do.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import time
from collections.abc import AsyncGenerator, Callable
from typing import Any, NoReturn

import headgate
from headgate import CooldownResource, DisableResource, Resource, RetryOperation, routine

SIGNALS = {
    "cooldown": lambda: CooldownResource(60, "429"),
    "blink": lambda: CooldownResource(0, "429"),
    "disable": lambda: DisableResource("revoked"),
    "retry": lambda: RetryOperation("try again"),
}


def note(path: str, text: object) -> None:
    """Append a line in one write: it is noted whole or not at all, whoever is killed."""
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(file, f"{text}\n".encode())
    finally:
        os.close(file)


def split(args: tuple[Any, ...]) -> tuple[str, tuple[Any, ...]]:
    """The id of the resource that came first ("" if none did), and the other arguments."""
    if args and isinstance(args[0], Resource):
        return args[0].resource_id, args[1:]
    return "", args


async def told(path: str) -> None:
    """Wait until there is a file that says so."""
    while not os.path.exists(f"{path}.go"):  # noqa: ASYNC110, ASYNC240 - nobody here could set an event
        await asyncio.sleep(0.005)


def begin(args: tuple[Any, ...]) -> tuple[str, str]:
    """Note that it runs, and where; the id of its resource, and the path of the file."""
    key, (path, *_) = split(args)
    note(path, f"begun {os.getpid()} {key}")
    return key, path


# -- it ends by itself ------------------------------------------------------------------------------------------------


async def returns(*args: Any) -> str:
    begin(args)
    return "result"


async def raises(*args: Any) -> NoReturn:
    begin(args)
    raise LookupError("its own")


async def exits(*args: Any) -> NoReturn:
    begin(args)
    sys.exit(3)


async def interrupts(*args: Any) -> NoReturn:
    begin(args)
    raise KeyboardInterrupt


async def returns_a_lock(*args: Any) -> Any:
    begin(args)
    return threading.Lock()


class HasALock(Exception):
    """Cannot be pickled."""

    def __init__(self) -> None:
        super().__init__("it has a lock")
        self.lock = threading.Lock()


async def raises_a_lock(*args: Any) -> NoReturn:
    begin(args)
    raise HasALock


async def returns_bytes(*args: Any) -> bytes:
    begin(args)
    return bytes(args[-1])


async def raises_text(*args: Any) -> NoReturn:
    begin(args)
    raise ValueError("x" * args[-1])


class Local:
    """Can be unpickled only in the process that made it."""

    def __init__(self) -> None:
        self.pid = os.getpid()

    def __setstate__(self, state: dict[str, Any]) -> None:
        if os.getpid() != state["pid"]:
            raise RuntimeError("it can be read only where it was made")
        self.__dict__.update(state)


async def returns_a_local(*args: Any) -> Local:
    begin(args)
    return Local()


variable: headgate.ContextVar[Any] = headgate.ContextVar("delivery_variable", default=None)


async def sets_a_lock(*args: Any) -> str:
    begin(args)
    variable.set(threading.Lock())
    return "result"


async def numbered(path: str, number: int, data: bytes = b"") -> None:
    note(path, number)


# -- it takes its time ------------------------------------------------------------------------------------------------


async def waits(*args: Any) -> str:
    """For so many seconds; 60, if no number is given."""
    _, path = begin(args)
    try:
        await asyncio.sleep(args[-1] if isinstance(args[-1], (int, float)) else 60)
    finally:
        note(path, "finally")
    return "result"


async def waits_for_a_file(*args: Any) -> str:
    key, path = begin(args)
    await told(path)
    return key or "result"


async def ends_slowly(path: str, seconds: float) -> None:
    """When it is cancelled, it needs so long to end."""
    begin((path,))
    try:
        await asyncio.sleep(60)
    finally:
        await asyncio.sleep(seconds)
        note(path, "finally")


async def catches(*args: Any) -> str:
    """Catches the CancelledError and returns."""
    begin(args)
    try:
        await asyncio.sleep(60)
    except asyncio.CancelledError:
        return "caught"
    raise AssertionError("it was to be cancelled")


async def replaces(*args: Any) -> NoReturn:
    """Catches the CancelledError and raises something else."""
    begin(args)
    try:
        await asyncio.sleep(60)
    except asyncio.CancelledError:
        raise LookupError("instead") from None
    raise AssertionError("it was to be cancelled")


def sleeps_in_a_thread(*args: Any) -> str:
    _, path = begin(args)
    time.sleep(args[-1])
    note(path, "to its end")
    return "result"


async def holds_the_loop(*args: Any) -> str:
    _, path = begin(args)
    time.sleep(args[-1])  # noqa: ASYNC251 - that it blocks the loop is the point
    note(path, "to its end")
    return "result"


class SlowToLoad:
    """Takes so many seconds to unpickle, as an import may."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        time.sleep(self.seconds)


# -- its worker ends --------------------------------------------------------------------------------------------------


async def dies(*args: Any) -> NoReturn:
    """Always, when all its work is done."""
    _, path = begin(args)
    note(path, "to its end")
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("unreachable")


async def leaves(*args: Any) -> NoReturn:
    begin(args)
    os._exit(7)


async def dies_once(*args: Any) -> str:
    key, path = begin(args)
    with open(path) as file:  # noqa: ASYNC230 - short
        if file.read().count("begun") == 1:
            os.kill(os.getpid(), signal.SIGKILL)
    return key or "result"


async def dies_when_told(*args: Any) -> NoReturn:
    _, path = begin(args)
    await told(path)
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("unreachable")


async def calls_another(path: str) -> str:
    """A nested call, which waits."""
    begin((path,))
    return await routine(waits)(f"{path}.nested")


# -- resources --------------------------------------------------------------------------------------------------------


async def refuses(*args: Any) -> str:
    """Raises the signal that is planned for its resource; its id, if none is."""
    key, path = begin(args)
    plan: dict[str, str] = args[2]
    if key in plan:
        raise SIGNALS[plan[key]]()
    note(path, "to its end")
    return key


async def fails_once(*args: Any) -> str:
    key, path = begin(args)
    with open(path) as file:  # noqa: ASYNC230 - short
        if file.read().count("begun") == 1:
            raise LookupError("its own")
    return key


async def older(*args: Any) -> str:
    """Finds the resource "a" limited when it is told to."""
    key, (path,) = split(args)
    note(path, f"older {key}")
    await told(path)
    if key == "a":
        raise CooldownResource(60, "429")
    return key


async def younger(*args: Any) -> str:
    """Waits on the resource "a" only."""
    key, path = begin(args)
    if key != "a":
        return key
    try:
        await asyncio.Event().wait()  # a cancelled timer would keep the context of the task, and its pool
    except asyncio.CancelledError:
        how = args[-1]
        if how == "replace":
            raise asyncio.CancelledError("another one") from None
        if how == "return":
            return "caught"
        if how == "fail":
            raise LookupError("instead") from None
        raise
    finally:
        note(path, "finally")
    raise AssertionError("it was to be cancelled")


def younger_in_a_thread(*args: Any) -> str:
    key, path = begin(args)
    while not os.path.exists(f"{path}.end"):
        time.sleep(0.005)
    return key


# -- streams ----------------------------------------------------------------------------------------------------------


async def items(*args: Any) -> AsyncGenerator[int, None]:
    """0, 1, 2, and so on; after so many it waits for a file."""
    _, path = begin(args)
    number = 0
    try:
        while True:
            if number == args[-1]:
                note(path, "waits")
                await told(path)
                raise LookupError("its own")
            yield number
            number += 1
    finally:
        note(path, "finally")


async def refused_after(*args: Any) -> AsyncGenerator[int, None]:
    """One item, and then the resource is limited."""
    _, path = begin(args)
    try:
        yield 0
        raise CooldownResource(60, "429")
    finally:
        note(path, "finally")


# -- hooks of workers -------------------------------------------------------------------------------------------------


def refuse_where_told(path: str) -> Callable[[Any], bool]:
    """A hook that refuses on the worker whose pid ends the name of a file, and on all if "all" does."""

    def hook(context: Any) -> bool:
        if os.path.exists(f"{path}.raise"):
            raise LookupError("the hook's own")
        return os.path.exists(f"{path}.refuse.{os.getpid()}") or os.path.exists(f"{path}.refuse.all")

    return hook


def delay(seconds: float) -> Callable[[Any], Any]:
    """A hook that takes so long to say yes."""

    async def hook(context: Any) -> bool:
        await asyncio.sleep(seconds)
        return False

    return hook


class Starting:
    """A hook that is loaded while its worker starts: it waits while there is a file, or breaks while there is one."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __call__(self, context: Any) -> bool:
        return False

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        while os.path.exists(f"{self.path}.slow"):
            time.sleep(0.01)
        if os.path.exists(f"{self.path}.broken"):
            raise RuntimeError("the hook cannot be loaded")


def factory(hook: Any) -> Callable[..., headgate.LocalWorker]:
    """`WorkerPool(worker=)` for workers with this hook."""

    def worker(*tags: str, credentials: Any = None) -> headgate.LocalWorker:
        return headgate.LocalWorker(*tags, credentials=credentials, backpressure=hook)

    return worker
