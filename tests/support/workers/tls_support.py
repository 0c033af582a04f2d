"""Servers over TLS for tests: a small one in this process, and the service of a worker in a process of its own."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from headgate import WorkerCredentials
from headgate.workers.protocol.transport import bind, dial, grpc, make_server
from tests.support.workers.support import ROOT

ECHO, REPEAT = "/test/Echo", "/test/Repeat"


class Handler(grpc.GenericRpcHandler):  # type: ignore[misc] # it has no types
    """Answers with what it was sent, once or again and again, and counts what reaches it."""

    def __init__(self) -> None:
        self.calls = 0

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        self.calls += 1
        if details.method == ECHO:
            return grpc.unary_unary_rpc_method_handler(self._echo)
        return grpc.stream_stream_rpc_method_handler(self._repeat)

    async def _echo(self, request: bytes, _: object) -> bytes:
        return request

    async def _repeat(self, requests: AsyncIterator[bytes], _: object) -> AsyncIterator[bytes]:
        async for request in requests:
            yield request


@asynccontextmanager
async def serving(
    credentials: WorkerCredentials | None, address: str = "127.0.0.1:0"
) -> AsyncIterator[tuple[str, Handler]]:
    """A server with this one handler, and its address."""
    handler = Handler()
    server = make_server(handler)
    bound = bind(server, address, credentials=credentials)
    await server.start()
    try:
        yield bound, handler
    finally:
        await server.stop(0)


@asynccontextmanager
async def idle_server() -> AsyncIterator[grpc.aio.Server]:
    """A server that listens nowhere. It is started at the end, because only then does gRPC let go of all it opened."""
    server = make_server(Handler())
    try:
        yield server
    finally:
        await server.start()
        await server.stop(0)


async def call(address: str, credentials: WorkerCredentials | None, timeout: float = 20.0) -> str:
    """Make one call over a new connection: "answered", or the name of gRPC's status."""
    async with dial(address, credentials=credentials) as channel:
        try:
            answer = await channel.unary_unary(ECHO)(b"hello", timeout=timeout)
        except grpc.aio.AioRpcError as error:
            return str(error.code().name)
    assert answer == b"hello"
    return "answered"


async def eventually(ask: Callable[[], Awaitable[bool]], times: int = 400) -> None:
    """Ask again and again, in real time, till it is so."""
    for _ in range(times):
        if await ask():
            return
        await asyncio.sleep(0.05)
    raise AssertionError("it never was")


@contextmanager
def tls_worker(files: tuple[Path, Path, Path] | None, **settings: Any) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """The service of a worker in a process of its own, and its address."""
    text = json.dumps({"files": [os.fspath(path) for path in files] if files else None, **settings})
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.support.workers.tls_worker", text],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        assert address, process.stderr.read() if process.stderr is not None else ""
        yield address, process
    finally:
        try:
            process.communicate(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            raise
