"""How soon a subscriber hears that a worker which was announced has been killed: ``python noticed.py local|lan``.

The program announces nothing itself: it starts itself again as the publisher (``publish``), and kills that.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import time
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator

import headgate


def discovery(kind: str, namespace: str) -> headgate.LocalDiscovery | headgate.LanDiscovery:
    if kind == "local":
        return headgate.LocalDiscovery(namespace)
    return headgate.LanDiscovery(namespace, advertise_host="127.0.0.1")


async def publish(kind: str, namespace: str) -> None:
    metadata = headgate.WorkerMetadata("w-victim", "127.0.0.1:9", 1, headgate.__version__)
    async with discovery(kind, namespace).publisher as publisher:
        await publisher.publish("worker-added", metadata)
        print("announced", flush=True)
        await asyncio.sleep(3600)


async def heard(events: AsyncIterator[headgate.DiscoveryEvent], wanted: str) -> None:
    async for event in events:
        if event.type == wanted:
            return


async def measure(kind: str) -> float:
    """Seconds from the kill to the event."""
    namespace = headgate.LocalDiscovery().namespace
    command = (sys.executable, __file__, "publish", kind, namespace)
    publisher = await asyncio.create_subprocess_exec(*command, stdout=PIPE)
    assert publisher.stdout is not None
    events = discovery(kind, namespace).subscribe()
    try:
        await publisher.stdout.readline()
        async with asyncio.timeout(30):
            await heard(events, "worker-added")
            await asyncio.sleep(0.5)  # all is quiet again
            start = time.perf_counter()
            publisher.send_signal(signal.SIGKILL)
            await heard(events, "worker-dropped")
            return time.perf_counter() - start
    except BaseException:
        publisher.kill()
        raise
    finally:
        await publisher.wait()
        await events.aclose()  # type: ignore[attr-defined]


def main() -> None:
    if sys.argv[1] == "publish":
        asyncio.run(publish(*sys.argv[2:]))
    else:
        print(json.dumps(asyncio.run(measure(sys.argv[1]))))


if __name__ == "__main__":
    main()
