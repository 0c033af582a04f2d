"""An HTTP upstream that answers at once, with as little work as possible: a body of fixed length, or a stream.

    python echo_upstream.py

It prints its port. A body that contains "stream" is answered with events: the first at once, the others 20 ms later.
"""

from __future__ import annotations

import asyncio

BODY = b'{"id": "c", "object": "chat.completion", "choices": [{"message": {"content": "' + b"hello " * 50 + b'"}}]}'
WHOLE = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(BODY), BODY)
BEGIN = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
EVENT = b"data: %b\n\n" % (b"hello " * 20)
CHUNK = b"%x\r\n%b\r\n" % (len(EVENT), EVENT)


class Connection(asyncio.Protocol):
    """Answers each request that has arrived as a whole."""

    def __init__(self) -> None:
        self.received = b""
        self.transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.received += data
        head, found, rest = self.received.partition(b"\r\n\r\n")
        if not found:
            return
        at = head.lower().find(b"content-length:")
        length = int(head[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
        if len(rest) < length:
            return
        body, self.received = rest[:length], rest[length:]
        if b"stream" not in body:
            self.transport.write(WHOLE)
            return
        self.transport.write(BEGIN + CHUNK)
        asyncio.get_running_loop().call_later(0.02, self.transport.write, CHUNK + CHUNK + b"0\r\n\r\n")


async def main() -> None:
    server = await asyncio.get_running_loop().create_server(Connection, "127.0.0.1", 0, backlog=1000)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
