"""A worker's service over TCP, as a process: ``python -m tests.support.workers.tls_worker '{"files": [...]}'``.

It prints its address, and ends when its stdin does.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any


async def main(settings: dict[str, Any]) -> None:
    from headgate import WorkerCredentials
    from headgate.workers.protocol import transport
    from headgate.workers.server.service import Service

    if "handshake_ms" in settings:
        setattr(transport, "HANDSHAKE_MS", settings["handshake_ms"])  # noqa: B010 - to checkers it is final
    credentials = None
    if settings.get("files"):
        credentials = WorkerCredentials.from_files(*settings["files"], settings.get("mutual", True), reload=True)
    service = Service("w-tls", "the worker of a test")
    server = transport.make_server(service)
    address = transport.bind(server, "127.0.0.1:0", credentials=credentials)
    service.tasks.start()
    await server.start()
    print(address, flush=True)  # noqa: T201 - the test reads it
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    await reader.read()
    await server.stop(0.02)
    service.end()


if __name__ == "__main__":
    asyncio.run(main(json.loads(sys.argv[1])))
