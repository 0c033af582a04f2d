"""Event loops of other threads on which a pool has a dispatcher: calling functions there, and closing it there."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVarTuple

if TYPE_CHECKING:
    from headgate.workers.client.dispatcher import Dispatcher

Ts = TypeVarTuple("Ts")
LAST = 2.0
"""Seconds for a dispatcher to close on a loop of another thread."""


def on(loop: asyncio.AbstractEventLoop, fn: Callable[[*Ts], object], *args: *Ts) -> None:
    """Call a function on that loop, at once if it is the running one."""
    if asyncio._get_running_loop() is loop:
        fn(*args)
        return
    try:
        loop.call_soon_threadsafe(fn, *args)
    except RuntimeError:  # it is closed
        pass


async def close_on(loop: asyncio.AbstractEventLoop, dispatcher: Dispatcher) -> None:
    """Close a dispatcher on its own loop. A loop that is busy or ends meanwhile is not waited for."""
    if loop.is_closed():
        dispatcher.abandon()
    elif loop is asyncio.get_running_loop():
        await dispatcher.close("it was closed")
    elif loop.is_running():
        closing = asyncio.run_coroutine_threadsafe(dispatcher.close("it was closed"), loop)
        await asyncio.wait([asyncio.wrap_future(closing)], timeout=LAST)
        if not closing.done():
            dispatcher.abandon("its event loop is busy")  # else its workers would wait for it when they stop


async def turns(loop: asyncio.AbstractEventLoop) -> bool:
    """Whether the loop of another thread runs, and takes what it is given."""
    turned: concurrent.futures.Future[None] = concurrent.futures.Future()
    on(loop, turned.set_result, None)
    if loop.is_running():
        await asyncio.wait([asyncio.wrap_future(turned)], timeout=LAST)
    return turned.done()
