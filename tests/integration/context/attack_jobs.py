"""Routines that set what should not be set, and the like. Workers import this by name."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator
from typing import Any

from headgate import ContextVar, routine

thing: ContextVar[Any] = ContextVar("attack_thing")
page: ContextVar[int] = ContextVar("attack_page", default=0)


class Pretender:
    """Says that it is a text, and cannot be pickled."""

    @property
    def __class__(self) -> Any:  # type: ignore[override]
        return str

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise NotImplementedError("planted")


def _raise(kind: type[BaseException], home: int, at_home: bool) -> str:
    if (os.getpid() == home) is at_home:
        raise kind("planted")
    return "read"


class Raising:
    """Unpickled at home, or anywhere else, it raises."""

    def __init__(self, kind: type[BaseException], home: int, at_home: bool) -> None:
        self.about: Any = (kind, home, at_home)

    def __reduce__(self) -> Any:
        return _raise, self.about


@routine
async def see() -> Any:
    return thing.get("unset")


@routine
async def pretends() -> int:
    thing.set(Pretender())
    return 42


@routine
async def pretends_in_a_list() -> int:
    thing.set([Pretender()])
    raise ValueError("planted")


@routine
async def pretends_at_last() -> AsyncGenerator[int, None]:
    yield 1
    thing.set(Pretender())
    yield 2
    thing.set((Pretender(), 1))


@routine
async def sets_raising(kind: type[BaseException], home: int) -> int:
    thing.set(Raising(kind, home, True))
    return 42


@routine
async def sets_long(size: int) -> int:
    thing.set("x" * size)
    page.set(7)
    return 42


@routine
async def numbers() -> AsyncGenerator[int, None]:
    number = 0
    while True:
        number += 1
        yield number


@routine(prefetch=8)
async def pages() -> AsyncGenerator[int, None]:
    for number in range(1, 100):
        page.set(number)
        yield number


@routine
async def turn(to: int) -> None:
    page.set(to)


@routine
async def call_it(value: str) -> None:
    thing.set(value)


@routine(thread=True)
async def two_in_one_context() -> tuple[Any, Any]:
    """Two tasks that share a Context, each with a call that sets something else."""
    import asyncio
    import contextvars

    context = contextvars.copy_context()
    async with asyncio.TaskGroup() as group:
        group.create_task(call_it("theirs"), context=context)
        group.create_task(turn(9), context=context)
    return context.run(thing.get, "unset"), context.run(page.get)


@routine
async def what_it_was() -> Any:
    return thing.set("now").old_value


def hook_that_sets(context: Any) -> bool:
    thing.set("of the hook")
    return False
