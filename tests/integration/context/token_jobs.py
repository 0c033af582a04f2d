"""Routines that find tokens where no argument or result shows them: in values, closures, defaults and attributes."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from headgate import ContextVar, current_context, routine
from tests.support.workers.jobs import note

held: ContextVar[Any] = ContextVar("token_held")
"""What is set and reset."""
holder: ContextVar[Any] = ContextVar("token_holder", default=None)
"""Whose value holds tokens of the other one."""


class Box:
    """An object that holds something."""

    def __init__(self, content: Any) -> None:
        self.content = content


class Boxed(Exception):
    """An error with an attribute."""

    def __init__(self, content: Any) -> None:
        super().__init__("boxed")
        self.content = content


def reset(token: Any) -> str:
    """How that goes, and what the variable is then."""
    try:
        held.reset(token)
        said = "reset"
    except (RuntimeError, ValueError) as error:
        said = type(error).__name__
    return f"{said}, {held.get('unset')}"


def found() -> Any:
    """The token in the value."""
    return holder.get().content


@routine
async def reset_found() -> str:
    return reset(found())


@routine
def reset_found_plainly() -> str:
    return reset(found())


@routine(thread=True)
async def reset_found_on_a_thread() -> str:
    await asyncio.sleep(0)
    return reset(found())


@routine
async def reset_found_on_another() -> str:
    return await reset_found()


@routine
async def reset_found_in_a_task() -> str:
    """Which is another Context."""
    return await asyncio.create_task(reset_found())


@routine
async def hold(value: str) -> None:
    """A token of a worker, in a value that goes back."""
    holder.set(Box(held.set(value)))


@routine
def hold_plainly(value: str) -> None:
    holder.set(Box(held.set(value)))


@routine
async def hold_on_another(value: str) -> None:
    await hold(value)


@routine
async def hold_and_fail(value: str) -> None:
    holder.set(Box(held.set(value)))
    raise Boxed("nothing")


@routine
async def fail_with(value: str) -> None:
    raise Boxed(held.set(value))


@routine
async def fail_with_a_cause(value: str) -> None:
    try:
        raise Boxed(held.set(value))
    except Boxed as cause:
        raise ValueError("what it caused") from cause


@routine
async def hold_until_cancelled(started: str) -> None:
    holder.set(Box(held.set("of a worker")))
    note(started, "started")
    await asyncio.Event().wait()


@routine
async def give_a_function(value: str) -> Any:
    """A token of a worker, in a closure and a default of what is returned."""
    token = held.set(value)

    def undo(again: Any = token) -> list[str]:
        return [reset(token), reset(again)]

    return undo


@routine
async def reset_content(box: Any) -> str:
    return reset(box.content)


@routine
async def is_used(token: Any) -> bool:
    return bool(token.used)


@routine
async def call(fn: Any) -> Any:
    return fn()


@routine
async def steps(count: int) -> AsyncGenerator[Any, Any]:
    """What it finds in the value at each step is reset."""
    for _ in range(count):
        try:
            yield reset(found()) if holder.get() is not None else "nothing"
        except Boxed as thrown:
            yield f"thrown: {reset(found())}, {reset(thrown.content)}"


@routine
async def holding_steps() -> AsyncGenerator[str, Any]:
    """Each step holds a token of its own in the value, and so does the end."""
    for number in range(2):
        holder.set(Box(held.set(f"step {number}")))
        yield f"step {number}"
    holder.set(Box(held.set("end")))


@routine
async def reads_holding_steps() -> list[str]:
    """The consumer is a worker."""
    said = []
    async with aclosing(holding_steps()) as stream:
        async for _ in stream:
            said.append(reset(found()))
    return [*said, reset(found())]


@routine(prefetch=4)
async def ahead(mark: str) -> AsyncGenerator[Any, None]:
    """Tokens in items and in values, made before anybody asks for them."""
    for number in range(4):
        token = held.set(f"{mark} {number}")
        holder.set(Box(token))
        yield token


@routine(prefetch=4)
async def ahead_later(mark: str) -> AsyncGenerator[Any, None]:
    """The same from the second item on."""
    yield None
    for number in range(4):
        token = held.set(f"{mark} {number}")
        holder.set(Box(token))
        yield token


@routine
async def hold_when_told(started: str, go_on: str) -> str:
    """Waits for a file before its token makes an id necessary."""
    token = held.set("of a worker")
    note(started, "started")
    while not os.path.exists(go_on):  # noqa: ASYNC110, ASYNC240 - nobody here could set an event
        await asyncio.sleep(0.005)
    holder.set(Box(token))
    return current_context().id


@routine
async def use_and_set_too_much(token: Any, size: int) -> Any:
    """More than the payload may be; what else the frame says must arrive."""
    held.reset(token)
    holder.set(b"x" * size)
    return held.set("of a worker")


@routine
async def set_plainly_too_much(size: int) -> None:
    holder.set("x" * size)


@routine
async def same(token: Any) -> Any:
    return token
