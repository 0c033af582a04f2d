"""The proxy of keys as tests use it: a real server in a thread, and clients that may misbehave."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

from headgate import Resource, ResourcePool
from headgate.integrations.keys_proxy import Client, KeysProxy, Limits, ProxyRules, Tokens
from headgate.integrations.keys_proxy.serving import ProxyServer
from tests.support.integrations.upstream import Upstream

TOKEN = "token-of-ann-0123456789"
OTHER_TOKEN = "token-of-bob-0123456789"
GATEWAY_TOKEN = "token-of-gateway-0123456789"
CLIENTS = {TOKEN: "ann", OTHER_TOKEN: "bob", GATEWAY_TOKEN: Client("gateway", names_tenant=True)}
KEY = "sk-live-a1b2c3d4e5f6g7h8"
"""A key that no client, log or error may show."""
PATIENCE = 30.0


class Reply(NamedTuple):
    """What a raw socket got."""

    status: int
    headers: dict[str, str]
    body: bytes
    raw: bytes

    @property
    def code(self) -> str:
        """What the proxy calls the error."""
        return str(json.loads(self.body)["error"]["code"])


class Proxy(NamedTuple):
    """A proxy that serves."""

    server: ProxyServer
    keys: ResourcePool[str]
    loop: asyncio.AbstractEventLoop

    @property
    def url(self) -> str:
        return self.server.url

    @property
    def port(self) -> int:
        return self.server.address[1]

    def stop(self) -> None:
        self.loop.call_soon_threadsafe(self.server.stop)

    def connect(self) -> socket.socket:
        made = socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return made

    def send(self, raw: bytes) -> Reply:
        """Send bytes as they are, and read one answer to its end."""
        with self.connect() as made:
            made.sendall(raw)
            return read_reply(made)

    def ask(
        self, path: str = "/v1/chat/completions", body: bytes = b"{}", method: str = "POST", **headers: str
    ) -> Reply:
        """Send a request with headers; `token=None` leaves the token out."""
        return self.send(written(path, body, method, **headers))

    def in_flight(self) -> int:
        return sum(one["in_flight"] for one in self.keys.snapshot().values())


def written(path: str = "/v1/chat/completions", body: bytes = b"{}", method: str = "POST", **headers: str) -> bytes:
    """A request as bytes. Headers are given as keywords with _ for -."""
    lines = {"host": "127.0.0.1", "authorization": f"Bearer {TOKEN}", "content-length": str(len(body))}
    lines |= {name.replace("_", "-"): value for name, value in headers.items()}
    kept = "".join(f"{name}: {value}\r\n" for name, value in lines.items() if value)
    return f"{method} {path} HTTP/1.1\r\n{kept}\r\n".encode("latin-1") + body


def read_reply(made: socket.socket) -> Reply:
    """Read one answer: as long as it says, or until the connection ends."""
    raw = b""
    while b"\r\n\r\n" not in raw and (part := made.recv(1)):  # another answer may follow
        raw += part
    head, _, body = raw.partition(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    if headers.get("transfer-encoding") == "chunked":
        while not body.endswith(b"0\r\n\r\n") and (part := made.recv(65536)):
            body += part
    else:
        while (left := int(headers.get("content-length", 0)) - len(body)) and (part := made.recv(left)):
            body += part
    return Reply(int(first.split()[1]) if first else 0, headers, body, raw + body)


def until(condition: Callable[[], Any], what: object = "it") -> None:
    """Wait until a condition is true."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.005)


@contextmanager
def proxying(
    upstream: Upstream | str,
    keys: ResourcePool[str] | dict[str, str | Resource[str]] | None = None,
    *,
    base: str = "/v1",
    grace: float = 30.0,
    limits: Limits | None = None,
    **rules: Any,
) -> Iterator[Proxy]:
    """Serve a proxy in a thread that ends with the block."""
    pool: ResourcePool[str]
    pool = keys if isinstance(keys, ResourcePool) else ResourcePool(keys or {"key-1": KEY})  # type: ignore[arg-type]
    url = upstream if isinstance(upstream, str) else upstream.url
    judge = ProxyRules(f"{url}{base}", Tokens(CLIENTS, salt="salt"), **rules)
    ready: list[Proxy] = []

    async def main() -> None:
        async with KeysProxy(pool, judge, limits) as proxy:
            server = ProxyServer(proxy, grace=grace)
            made = Proxy(server, pool, asyncio.get_running_loop())
            await server.serve(lambda: ready.append(made))

    thread = threading.Thread(target=asyncio.run, args=(main(),))
    thread.start()
    until(lambda: ready or not thread.is_alive())
    [made] = ready
    try:
        yield made
    finally:
        with suppress(RuntimeError):  # it has ended, and its loop is closed
            made.loop.call_soon_threadsafe(lambda: (made.server.stop(), made.server.stop()))
        thread.join(PATIENCE)
        assert not thread.is_alive()
