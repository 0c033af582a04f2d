"""Who waits, where, and for what: the words of `Hang` and `Leak`.

A suspended task is a chain: its coroutine awaits a second, that one a generator, at the end stands a future. Every link
of Python's own knows the next one (``cr_await``, ``ag_await``, ``gi_yieldfrom``). The others (the awaitable of an async
generator's ``__anext__``, an awaitable class) hide it, and there the garbage collector is asked what the object refers
to. A guess that fails costs a shorter report, never a wrong verdict: the chain is only read once the loop is stuck.
"""

from __future__ import annotations

import asyncio
import gc
import inspect
import linecache
import os
from collections.abc import Iterable, Iterator
from types import FrameType
from typing import Any, cast

__all__ = ["Hang", "Leak", "describe", "describe_all", "place"]

_DEEPEST = 50  # links followed; a chain this long is a recursion, and its first half says enough
_SHOWN = 8  # lines shown per task, the innermost ones
_WIDEST = 160  # characters of a foreign repr
_STDLIB = os.path.dirname(os.__file__)


class Hang(AssertionError):
    """The loop would wait for ever, or time ran past its limit. The message says who waits, where, and for what."""


class Leak(AssertionError):
    """Something outlived the block that made it. The message lists what."""


def describe_all(tasks: Iterable[asyncio.Task[Any]]) -> str:
    """One paragraph per task, in the order of their names."""
    ordered = sorted(tasks, key=lambda task: (len(task.get_name()), task.get_name()))
    return "\n".join(describe(task) for task in ordered)


def describe(task: asyncio.Task[Any]) -> str:
    """Name, coroutine, the lines where the task is suspended (innermost last), and what it waits on."""
    coroutine = task.get_coro()
    frames = list(_frames(coroutine))
    what = getattr(coroutine, "__qualname__", None) or _short(coroutine)
    lines = [f"  Task {task.get_name()!r} in {what}", *(f"    {place(frame)}" for frame in frames[-_SHOWN:])]
    return "\n".join([*lines, f"    waits on {_awaited(task, frames)}"])


def place(frame: FrameType) -> str:
    """``file:line in function: source`` of a frame."""
    path, line = frame.f_code.co_filename, frame.f_lineno
    source = linecache.getline(path, line).strip()
    for root in (os.getcwd(), _STDLIB):
        path = path.removeprefix(root + os.sep)
    return f"{path}:{line} in {frame.f_code.co_name}" + (f": {source}" if source else "")


def _frames(awaitable: object) -> Iterator[FrameType]:
    for _ in range(_DEEPEST):
        if awaitable is None:
            return
        frame, awaitable = _link(awaitable)
        if frame is not None:
            yield frame


def _link(awaitable: object) -> tuple[FrameType | None, object]:
    if inspect.iscoroutine(awaitable):
        return awaitable.cr_frame, awaitable.cr_await
    if inspect.isasyncgen(awaitable):
        return awaitable.ag_frame, awaitable.ag_await
    if inspect.isgenerator(awaitable):
        return awaitable.gi_frame, awaitable.gi_yieldfrom
    return None, next(_hidden(awaitable), None)


def _hidden(opaque: object) -> Iterator[object]:
    """Suspended coroutines and generators that an object of no known kind holds, directly or in its ``__dict__``."""
    if isinstance(opaque, asyncio.Future):
        return  # the end of the chain; what a task runs is that task's own story
    for held in gc.get_referents(opaque):
        inner: Iterable[object] = cast("dict[object, object]", held).values() if isinstance(held, dict) else (held,)
        for item in inner:
            if inspect.iscoroutine(item) or inspect.isasyncgen(item) or inspect.isgenerator(item):
                yield item


def _awaited(task: asyncio.Task[Any], frames: list[FrameType]) -> str:
    future = getattr(task, "_fut_waiter", None)  # private and old; without it the lines above still tell
    if future is None:
        return "its next turn"
    owner = _primitive(frames)
    return _short(owner) if owner is not None else _name(future)


def _primitive(frames: list[FrameType]) -> object:
    """The asyncio lock, event or queue in whose method the task is suspended: it tells more than its bare future.

    Only asyncio's own objects are shown. The repr of anything else could hold what must not be printed.
    """
    if not frames or not str(frames[-1].f_globals.get("__name__", "")).startswith("asyncio."):
        return None
    owner = frames[-1].f_locals.get("self")
    return owner if type(owner).__module__.startswith("asyncio.") else None


def _name(future: asyncio.Future[Any]) -> str:
    if isinstance(future, asyncio.Task):
        return f"Task {future.get_name()!r}"
    children = getattr(future, "_children", None)
    if children:
        return f"a gather of {len(children)}: " + ", ".join(_name(child) for child in children[:_SHOWN])
    return f"<{type(future).__name__} pending>"


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _WIDEST else text[:_WIDEST] + "..."
