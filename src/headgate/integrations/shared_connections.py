"""Connections that all clients of single keys share.

`client(key)` is made for each task, and must cost neither a new connection nor a TLS context. So the clients of one
event loop send over the same connections, whatever their key; those without a loop over the same in all threads.
Closing such a client closes none of them: others use them.

**When they are closed.** Connections belong to an event loop, and nobody tells us when that ends, except an async
generator: asyncio closes those that are left before it closes the loop.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncGenerator
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

from headgate.errors import InvalidType

_MOST_IDLE = 100  # connections that are kept for later; those in use are bounded by whoever runs the tasks

_of_loops: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[Any, tuple[Any, AsyncGenerator[None, None]]]]
_of_loops = WeakKeyDictionary()


class SharedConnections:
    """A transport of httpx and httpx2 that sends over the connections of the running event loop."""

    async def handle_async_request(self, request: Any) -> Any:
        """Send a request."""
        library = library_of(request.__class__)
        shared = _of_loops.setdefault(asyncio.get_running_loop(), {})
        if library not in shared:
            transport = library.AsyncHTTPTransport(verify=_tls(library), limits=_limits(library))
            closing = _closed_with_loop(shared, library, transport)
            shared[library] = transport, closing
            await anext(closing)  # from here on the loop knows of it
        return await shared[library][0].handle_async_request(request)

    async def aclose(self) -> None:
        """Do nothing: other clients use the connections."""


class SharedSyncConnections:
    """The same for clients without an event loop. The connections are those of the process, and end with it."""

    def handle_request(self, request: Any) -> Any:
        """Send a request."""
        return _of_process(library_of(request.__class__)).handle_request(request)

    def close(self) -> None:
        """Do nothing: other clients use the connections."""


@cache
def library_of(kind: type[Any]) -> Any:
    """The module, httpx or httpx2, of which this is a class of requests."""
    for base in kind.__mro__:
        module = sys.modules.get(base.__module__.partition(".")[0])
        if hasattr(module, "AsyncByteStream"):
            return module
    raise InvalidType(
        f"a rotating transport sends requests of httpx or httpx2, got {kind.__name__}",
        remedy="Pass it as transport= to a client of one of these.",
    )


async def _closed_with_loop(shared: dict[Any, Any], library: Any, transport: Any) -> AsyncGenerator[None, None]:
    try:
        yield
    finally:
        shared.pop(library, None)
        await transport.aclose()


@cache
def _of_process(library: Any) -> Any:
    return library.HTTPTransport(verify=_tls(library), limits=_limits(library))


@cache
def _tls(library: Any) -> Any:
    return library.create_ssl_context()  # takes 0.1 s


def _limits(library: Any) -> Any:
    return library.Limits(max_connections=None, max_keepalive_connections=_MOST_IDLE)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_of_process.cache_clear)  # two processes must not write to one connection
