"""What runs on a worker in the tests of logs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator

from headgate import TaskPool, routine
from headgate.observe import logging as observed


def log_to(path: str) -> None:
    """Write JSON lines to a file from now on."""
    observed.json(open(path, "a", buffering=1, encoding="utf-8"), logger="jobs")  # noqa: SIM115 - while the worker lives


async def far(path: str, text: str) -> None:
    """Write a record on a worker."""
    if not logging.getLogger("jobs").handlers:
        log_to(path)
    logging.getLogger("jobs").info("far: %s", text)


async def plain(text: str) -> None:
    """Write a record on a worker that its setup has prepared."""
    logging.getLogger("jobs").info("plain: %s", text)


@routine
async def inner(text: str) -> None:
    """Write a record in a routine."""
    logging.getLogger("jobs").info(text)


@routine
async def outer(text: str) -> None:
    """Write a record in a routine that calls a routine that calls a routine."""
    logging.getLogger("jobs").info(text)
    await middle(text)


@routine
async def middle(text: str) -> None:
    logging.getLogger("jobs").info("%s 2", text)
    await inner(f"{text} 3")


@routine
def in_thread(text: str) -> None:
    """Write a record in a thread of a worker."""
    logging.getLogger("jobs").info(text)


@routine
async def items(text: str) -> AsyncIterator[int]:
    """Write a record in a generator."""
    logging.getLogger("jobs").info(text)
    yield 1


async def calls_all() -> None:
    """The code of a task, here or on a worker: calls routines of every kind."""
    await outer("outer")
    await in_thread("thread")
    async for _ in items("stream"):
        pass
    await asyncio.gather(inner("gathered"), asyncio.create_task(inner("child")))


@routine
async def has_a_pool() -> str:
    """A routine with a TaskPool of its own, whose task calls a routine. Returns the id of the task."""
    async with TaskPool("o32-inner") as pool:
        handle = await pool.submit(inner, "of the inner task", key="eve")
        await handle
        return handle.id
