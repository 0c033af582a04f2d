"""Which event loop a worker uses: the same as its client."""

from __future__ import annotations

import asyncio


def kind_of(loop: asyncio.AbstractEventLoop) -> str:
    """Its name, for a worker that is to use the same."""
    return "uvloop" if type(loop).__module__.partition(".")[0] == "uvloop" else ""


def new_loop(kind: str) -> asyncio.AbstractEventLoop:
    """A new one of that kind."""
    if kind == "uvloop":
        import uvloop

        made: asyncio.AbstractEventLoop = uvloop.new_event_loop()
        return made
    return asyncio.new_event_loop()
