"""Publishers in other processes, and subscriptions that are read with a limit."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from headgate import DiscoveryEvent, DiscoveryLike, WorkerMetadata

PATIENCE = 30.0


def worker(uid: str = "w-1", **fields: Any) -> WorkerMetadata:
    return WorkerMetadata(**{"uid": uid, "address": "127.0.0.1:5000", "pid": 1, "version": "1", **fields})


class Events:
    """A subscription whose events are awaited one by one."""

    def __init__(self, stream: AsyncIterator[DiscoveryEvent]) -> None:
        self.stream = stream

    async def next(self) -> DiscoveryEvent:
        async with asyncio.timeout(PATIENCE):
            return await anext(self.stream)

    async def types(self, count: int) -> list[tuple[str, str]]:
        return [(event.type[7:], event.metadata.uid) for event in [await self.next() for _ in range(count)]]


@asynccontextmanager
async def subscribed(discovery: DiscoveryLike, filter: Any = None) -> AsyncIterator[Events]:
    stream = discovery.subscribe(filter)
    try:
        yield Events(stream)
    finally:
        await stream.aclose()  # type: ignore[attr-defined]


@contextmanager
def publishing(namespace: str, *uids: str) -> Iterator[subprocess.Popen[str]]:
    """A process that has announced these workers."""
    program = Path(__file__).with_name("publishing.py")
    process = subprocess.Popen(
        [sys.executable, str(program), namespace, *uids],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line == "announced\n", process.communicate()
        yield process
    finally:
        process.kill()
        process.communicate()


def end(process: subprocess.Popen[str]) -> None:
    """Let a process end by itself; it must have nothing to say."""
    _, said = process.communicate("\n", timeout=PATIENCE)
    assert process.returncode == 0
    assert said == "", "a publisher that ends writes nothing to stderr"
