"""Work that tests of shared budgets run in this process and in others under the same name."""

from __future__ import annotations

import asyncio
import os
import time

RAN: list[int] = []
"""One entry for each time that `run_here` was run in this process."""


async def run_here() -> int:
    """Return the id of the process that runs it; in a process that is to be killed, never."""
    RAN.append(os.getpid())
    if os.environ.get("NEVER_ENDS"):
        os.write(1, b"runs\n")
        await asyncio.Event().wait()
    return os.getpid()


def note_for_a_minute(notes: str) -> None:
    """Write the time every few milliseconds. A plain function: nothing but the end of its process stops it."""
    with open(notes, "a", buffering=1) as file:
        for _ in range(12_000):
            file.write(f"{time.monotonic()}\n")
            time.sleep(0.005)


def note_with_resource(_: object, notes: str) -> None:
    note_for_a_minute(notes)


def pid() -> int:
    return os.getpid()
