"""Real servers and raw clients for the tests of `headgate.integrations.asgi`."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import uvicorn
from uvicorn.main import STARTUP_FAILURE

from tests.support.tasks.support import until


@asynccontextmanager
async def serving(app: Any, **options: Any) -> AsyncIterator[str]:
    """Serve an application with uvicorn on this event loop, from its start-up to its shutdown; gives the address."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        server = _server(app, options)
        task = asyncio.create_task(server.serve(sockets=[listening]))
        try:
            await until(lambda: server.started)
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        except BaseException:
            task.cancel()  # else it would wait for requests that never end
            await asyncio.wait((task,))
            raise
        server.should_exit = True
        await task


async def fails_to_start(app: Any, **options: Any) -> bool:
    """Whether uvicorn ends because the start-up of the application fails."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        server = _server(app, options)
        try:
            await server.serve(sockets=[listening])
        except SystemExit as ended:
            return ended.code == STARTUP_FAILURE and not server.started
    return False


def _server(app: Any, options: dict[str, Any]) -> uvicorn.Server:
    settings = {"log_config": None, "log_level": "error", "ws": "none", "lifespan": "on", **options}
    return uvicorn.Server(uvicorn.Config(app, **settings))


@asynccontextmanager
async def client_of(app: Any, **options: Any) -> AsyncIterator[httpx.AsyncClient]:
    """A client of an application that uvicorn serves meanwhile."""
    async with serving(app, **options) as url, httpx.AsyncClient(base_url=url, timeout=10) as client:
        yield client


class Hangup:
    """A client that sends a request and can go away without waiting for the answer."""

    def __init__(self, url: str, method: str = "GET", path: str = "/", body: bytes = b"") -> None:
        host, _, port = url.removeprefix("http://").partition(":")
        self._socket = socket.create_connection((host, int(port)))
        length = f"content-type: application/json\r\ncontent-length: {len(body)}\r\n" if body else ""
        self._socket.sendall(f"{method} {path} HTTP/1.1\r\nhost: x\r\n{length}\r\n".encode() + body)

    def go(self) -> None:
        self._socket.close()


class Raw:
    """An ASGI server of one request, without a socket: what the application sent, and what it is told."""

    def __init__(self, *messages: dict[str, Any]) -> None:
        self.sent: list[dict[str, Any]] = []
        self._messages = list(messages)

    async def receive(self) -> Any:
        if not self._messages:
            await asyncio.get_running_loop().create_future()
        return self._messages.pop(0)

    async def send(self, message: Any) -> None:
        self.sent.append(dict(message))

    async def get(self, app: Any, headers: tuple[tuple[bytes, bytes], ...] = (), **scope: Any) -> None:
        """Let the application answer one request."""
        asked = {"type": "http", "method": "GET", "path": "/", "query_string": b"", "headers": list(headers)}
        await app({**asked, **scope}, self.receive, self.send)

    @property
    def status(self) -> int:
        return int(self.sent[0]["status"])

    @property
    def headers(self) -> dict[str, str]:
        return {name.decode(): value.decode() for name, value in self.sent[0]["headers"]}

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent[1:])
