"""C20, L09: transports keep keys busy at the pace of the provider, whether or not the pool was given a quota."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import httpx
import pytest

from headgate import ResourcePool
from headgate.integrations.httpx import RotatingTransport
from tests.support.integrations.upstream import Answer, Seen, Upstream, usual


class Bucket:
    """Answers as OpenAI does: a bucket that refills all the time, whose reset is the time until it is full."""

    def __init__(self, limit: int, per: float, *, says_when: bool = True) -> None:
        self.limit, self.rate, self.says_when = limit, limit / per, says_when
        self.left, self.at = float(limit), time.monotonic()
        self.accepted: list[float] = []
        self.refused = 0

    def __call__(self, seen: Seen) -> Answer:
        now = time.monotonic()
        self.left, self.at = min(self.limit, self.left + (now - self.at) * self.rate), now
        ok = self.left >= 1
        self.left -= ok
        headers = {
            "x-ratelimit-limit-requests": str(self.limit),
            "x-ratelimit-remaining-requests": str(int(self.left)),
            "x-ratelimit-reset-requests": f"{(self.limit - self.left) / self.rate:.3f}s",
        }
        if ok:
            self.accepted.append(now)
            return Answer(200, headers, usual(seen).body)
        self.refused += 1
        if self.says_when:
            headers["retry-after-ms"] = str(int(1000 * (1 - self.left) / self.rate) + 1)
        return Answer(429, headers, b"{}")


async def flood(upstream: Upstream, pool: ResourcePool[str], seconds: float, callers: int = 8) -> None:
    """Send requests as fast as the pool lets them through."""
    transport = RotatingTransport(pool, wait_for_capacity=True, max_attempts=50, retry_delay=0)
    until = time.monotonic() + seconds

    async def caller(client: Any) -> None:
        while time.monotonic() < until:
            await client.post(upstream.url, content=b"{}")

    async with httpx.AsyncClient(transport=transport, timeout=30) as client:
        await asyncio.gather(*(caller(client) for _ in range(callers)))


@pytest.mark.parametrize(("quota", "says_when"), [("learn", True), (None, True), (None, False)])
def test_l09_a_key_is_used_at_the_pace_of_a_bucket(quota: Any, says_when: bool, upstream: Upstream) -> None:
    """It does not sleep until the bucket is full: that takes 2 s, and a call is allowed each 0.1 s."""
    bucket = Bucket(20, 2.0, says_when=says_when)
    upstream.answers = {"a": bucket}
    pool = ResourcePool({"a": "a"}, quota=quota)
    asyncio.run(flood(upstream, pool, 3.0))
    gaps = [later - earlier for earlier, later in zip(bucket.accepted, bucket.accepted[1:], strict=False)]
    assert len(bucket.accepted) >= 40  # 20 at once, and 10 a second
    assert max(gaps) < 1.2
    assert bucket.refused <= (2 if quota else 12)
