"""Work that tests of shared budgets run in this process and in others under the same name."""

from __future__ import annotations

import asyncio
import os

RAN: list[int] = []
"""One entry for each time that `run_here` was run in this process."""


async def run_here() -> int:
    """Return the id of the process that runs it; in a process that is to be killed, never."""
    RAN.append(os.getpid())
    if os.environ.get("NEVER_ENDS"):
        os.write(1, b"runs\n")
        await asyncio.Event().wait()
    return os.getpid()
