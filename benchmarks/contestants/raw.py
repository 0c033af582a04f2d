"""The bare limit of whoever sends a message for each call: one grpc.aio stream, and nothing around it.

A call is three integers and its answer two. Run as a program this is the server, until its input ends:
`python raw.py SOCKET`.
"""

from __future__ import annotations

import asyncio
import struct
import sys
from collections.abc import AsyncIterator
from typing import Any, Self

import grpc.aio

CALL, ANSWER = struct.Struct("<qqq"), struct.Struct("<qq")
SERVICE, METHOD = "bench.Raw", "calls"


class Stream:
    """The client's end: calls go out in the order they come, answers find their future by number."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stream: Any = channel.stream_stream(f"/{SERVICE}/{METHOD}")()
        self._unsent: asyncio.Queue[bytes] = asyncio.Queue()
        self._waiting: dict[int, asyncio.Future[int]] = {}
        self._number = 0

    async def __aenter__(self) -> Self:
        self._ends = asyncio.gather(self._send(), self._receive())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._ends.cancel()
        await asyncio.gather(self._ends, return_exceptions=True)

    async def add(self, a: int, b: int) -> int:
        self._number += 1
        future = self._waiting[self._number] = asyncio.get_running_loop().create_future()
        self._unsent.put_nowait(CALL.pack(self._number, a, b))
        return await future

    async def _send(self) -> None:
        while True:
            await self._stream.write(await self._unsent.get())

    async def _receive(self) -> None:
        while (message := await self._stream.read()) is not grpc.aio.EOF:
            number, result = ANSWER.unpack(message)
            self._waiting.pop(number).set_result(result)


async def calls(requests: AsyncIterator[bytes], _: Any) -> AsyncIterator[bytes]:
    async for request in requests:
        number, a, b = CALL.unpack(request)
        yield ANSWER.pack(number, a + b)


async def serve(socket: str) -> None:
    server = grpc.aio.server()
    handlers = {METHOD: grpc.stream_stream_rpc_method_handler(calls)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    server.add_insecure_port(f"unix:{socket}")
    await server.start()
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await server.stop(None)


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1]))
