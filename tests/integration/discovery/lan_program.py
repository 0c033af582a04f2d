"""A program that announces workers with a LanDiscovery, or listens for them.

python lan_program.py publish NAMESPACE ADDRESS UID...       says "announced", and ends at a line on stdin
python lan_program.py again NAMESPACE ADDRESS UID...         the same
python lan_program.py drop NAMESPACE ADDRESS UID...          drops them, when it has heard of them
python lan_program.py listen NAMESPACE                       writes a line of JSON for each event
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time

from headgate import LanDiscovery, WorkerMetadata


def say(**words: object) -> None:
    print(json.dumps(words), flush=True)  # noqa: T201 - what the test reads


async def publish(what: str, namespace: str, address: str, uids: list[str]) -> None:
    discovery = LanDiscovery(namespace)
    async with discovery.publisher as publisher:
        if what == "drop":
            left = set(uids)
            async for event in discovery.subscribe():
                left.discard(event.metadata.uid)
                await publisher.publish("worker-dropped", event.metadata)
                if not left:
                    break
        else:
            for uid in uids:
                metadata = WorkerMetadata(uid, address, os.getpid(), "1", extra={"by": what})
                await publisher.publish("worker-added", metadata)
        say(said="announced")
        await asyncio.to_thread(sys.stdin.readline)


async def listen(namespace: str) -> None:
    say(said="listening")
    async for event in LanDiscovery(namespace).subscribe():
        metadata = event.metadata
        say(type=event.type[7:], uid=metadata.uid, address=metadata.address, by=metadata.extra["by"], at=time.time())


if __name__ == "__main__":
    if sys.argv[1] == "listen":
        asyncio.run(listen(sys.argv[2]))
    else:
        asyncio.run(publish(sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4:]))
