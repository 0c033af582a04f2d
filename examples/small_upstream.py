"""A small HTTP server that an example starts for itself, and a small client. In your code: the real API, and httpx.

    async with serve(answer) as url:                    # on 127.0.0.1, on a port that is free
        reply = await get(f"{url}/page", {"X-Name": "ann"})     # or get_plainly(...), where there is no loop

`answer(request)` is async and returns a Reply. If it raises ConnectionError the connection is closed without one.
"""

from __future__ import annotations

import asyncio
import http.client
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from urllib.parse import urlsplit


@dataclass(frozen=True)
class Request:
    """A request. For a proxy the target is a whole address, otherwise a path."""

    target: str
    headers: Mapping[str, str]
    text: str = ""


@dataclass(frozen=True)
class Reply:
    """An answer. Names of headers are in lower case."""

    status: int
    text: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)


@asynccontextmanager
async def serve(answer: Callable[[Request], Awaitable[Reply]]) -> AsyncIterator[str]:
    """Context manager of a server that calls `answer` for each request; gives its address."""
    visits: set[asyncio.Task[None]] = set()

    async def visit(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None, "a server makes a task for each visit"
        visits.add(task)
        try:
            first, headers = await _head(reader)
            text = (await reader.readexactly(int(headers.get("content-length", 0)))).decode()
            reply = await answer(Request(first.split()[1], headers, text))
            writer.write(_written(f"HTTP/1.1 {reply.status} {http.client.responses.get(reply.status, '')}", reply))
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # the client closed the connection, or `answer` wants it closed
        except asyncio.CancelledError:
            pass  # the block is left
        finally:
            writer.close()
            visits.discard(task)

    server = await asyncio.start_server(visit, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    try:
        yield f"http://{host}:{port}"
    finally:
        server.close()
        for task in visits:
            task.cancel()
        await asyncio.gather(*visits)


async def get(url: str, headers: Mapping[str, str] | None = None, *, proxy: str | None = None) -> Reply:
    """GET this address, through the proxy if one is given. Raises ConnectionError if there is no answer."""
    whole, parts = urlsplit(url), urlsplit(proxy or url)
    path = url if proxy else whole.path + (f"?{whole.query}" if whole.query else "")
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    try:
        asked = {"host": whole.netloc, **(headers or {})}
        writer.write(_written(f"GET {path or '/'} HTTP/1.1", Reply(0, "", asked)))
        try:
            first, back = await _head(reader)
            text = await reader.readexactly(int(back.get("content-length", 0)))
        except asyncio.IncompleteReadError as error:
            raise ConnectionResetError(f"{parts.netloc} did not answer") from error
        return Reply(int(first.split()[1]), text.decode(), back)
    finally:
        writer.close()


def get_plainly(url: str) -> Reply:
    """The same for plain functions: it blocks its thread."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.netloc)
    try:
        connection.request("GET", parts.path + (f"?{parts.query}" if parts.query else ""))
        response = connection.getresponse()
        return Reply(response.status, response.read().decode(), {name.lower(): v for name, v in response.getheaders()})
    finally:
        connection.close()


async def _head(reader: asyncio.StreamReader) -> tuple[str, dict[str, str]]:
    """The first line and the headers."""
    first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")[:-2]
    pairs = (line.partition(":") for line in lines)
    return first, {name.strip().lower(): value.strip() for name, _, value in pairs}


def _written(first: str, reply: Reply) -> bytes:
    body = reply.text.encode()
    headers = {"connection": "close", **reply.headers, "content-length": str(len(body))}
    return "\r\n".join([first, *(f"{name}: {value}" for name, value in headers.items()), "", ""]).encode() + body
