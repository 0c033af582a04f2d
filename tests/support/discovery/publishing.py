"""A program that announces workers with a LocalDiscovery, says so, and then waits to be killed or told to end.

python publishing.py NAMESPACE UID... [--again]
"""

from __future__ import annotations

import asyncio
import os
import sys

from headgate import LocalDiscovery, WorkerMetadata


async def main(namespace: str, uids: list[str]) -> None:
    async with LocalDiscovery(namespace).publisher as publisher:
        for uid in uids:
            metadata = WorkerMetadata(uid, "127.0.0.1:5000", os.getpid(), "1", extra={"by": os.getpid()})
            await publisher.publish("worker-added", metadata)
        print("announced", flush=True)  # noqa: T201 - what the test waits for
        await asyncio.to_thread(sys.stdin.readline)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2:]))
