"""A process of the tests of shared quotas: sends requests with a key of a shared pool, and prints what it got."""

from __future__ import annotations

import asyncio
import sys
import time
from collections import Counter

import httpx

from headgate import Quota, ResourcePool
from headgate.integrations.httpx import RotatingTransport


def say(text: str) -> None:
    """Write one line for the test to read."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


class Stamped(httpx.AsyncHTTPTransport):
    """Notes in each request when it started, which is what a quota limits: a busy machine delivers them late."""

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request that was given a key."""
        request.headers["x-started"] = repr(time.monotonic())  # a clock that all processes of the machine share
        return await super().handle_async_request(request)


async def main(url: str, store: str, quota: str, requests: int) -> None:
    """Send so many requests, with at most 20 at a time."""
    # On a busy machine some time may pass before a request that was given a key notes its start.
    allowed = "learn" if quota == "learn" else Quota(requests=int(quota), per=1.0, delay=1.0)
    pool = ResourcePool({"a": "planted-key"}, name="keys", store=store, quota=allowed, cancel_siblings=False)  # type: ignore[arg-type]
    waits = {"wait_for_capacity": True, "within": 60, "max_attempts": 50, "retry_delay": 0}
    transport = RotatingTransport(pool, transport=Stamped(), **waits)  # type: ignore[arg-type]
    slots = asyncio.Semaphore(20)
    seen: Counter[int] = Counter()

    async def send() -> None:
        async with slots:
            seen[(await client.post(url, content=b"{}")).status_code] += 1

    async with httpx.AsyncClient(transport=transport, timeout=60) as client:
        async with httpx.AsyncClient() as other:
            await other.post(url, content=b"{}")  # httpx imports what it needs: meanwhile the loop stands still
        say("ready")
        await asyncio.to_thread(sys.stdin.readline)
        await asyncio.gather(*(send() for _ in range(requests)))
    say(str(seen[200]))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])))
