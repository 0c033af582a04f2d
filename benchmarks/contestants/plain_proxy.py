"""A plain pass-through of starlette and httpx: no tokens, no rotation, no turns, no limits.

    python plain_proxy.py UPSTREAM_URL

It prints its port.
"""

from __future__ import annotations

import asyncio
import socket
import sys

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route

DROPPED = (b"host", b"authorization", b"connection")


def application(upstream: str) -> Starlette:
    client = httpx.AsyncClient(base_url=upstream, timeout=600, limits=httpx.Limits(max_connections=None))

    async def forward(request: Request) -> StreamingResponse:
        headers = [pair for pair in request.headers.raw if pair[0] not in DROPPED]
        headers.append((b"authorization", b"Bearer sk-1"))
        body = await request.body()
        sent = client.build_request(request.method, request.url.path, headers=headers, content=body)
        response = await client.send(sent, stream=True)
        kept = {name: value for name, value in response.headers.items() if name != "transfer-encoding"}
        closing = BackgroundTask(response.aclose)
        return StreamingResponse(response.aiter_raw(), response.status_code, kept, background=closing)

    return Starlette(routes=[Route("/{path:path}", forward, methods=["GET", "POST"])])


async def main() -> None:
    listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)  # named: else no TCP_NODELAY
    listening.bind(("127.0.0.1", 0))
    listening.listen(2048)
    print(listening.getsockname()[1], flush=True)
    options = {"http": "h11", "log_level": "error", "access_log": False, "timeout_keep_alive": 75}
    config = uvicorn.Config(application(sys.argv[1]), **options)
    await uvicorn.Server(config).serve(sockets=[listening])


if __name__ == "__main__":
    asyncio.run(main())
