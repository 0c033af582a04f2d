"""A made-up API that behaves like real ones: it limits each key, revokes keys, and sometimes fails.

Each key has a token bucket. An empty bucket answers 429, mostly with Retry-After; a revoked key answers 401; a few
requests meet a 502. Latency and failures are drawn from a seed. It listens on a Unix socket, so that workers reach it
without a network: a line of JSON there, a line back.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field

from headgate.core.clock import chance_from, clock


@dataclass(frozen=True)
class Answer:
    """The answer to one request."""

    status: int
    body: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass
class Bucket:
    """The quota of one key: `burst` requests at once, `rate` per second in the long run."""

    rate: float
    burst: float
    tells_when: bool = True
    """Whether a 429 has a Retry-After."""
    tokens: float = field(init=False)
    filled_at: float = field(init=False)

    def __post_init__(self) -> None:
        self.tokens, self.filled_at = self.burst, clock.now()

    def take(self) -> float:
        """Take a token and return 0, or return the seconds until it is worth trying again."""
        now = clock.now()
        self.tokens = min(self.burst, self.tokens + (now - self.filled_at) * self.rate)
        self.filled_at = now
        if self.tokens < 1:
            return max(1, self.burst * 0.75) / self.rate
        self.tokens -= 1
        return 0.0


async def request(address: str, key: str, question: str) -> Answer:
    """Send a request to the API at this address."""
    reader, writer = await asyncio.open_unix_connection(address)
    try:
        writer.write(json.dumps({"key": key, "question": question}).encode() + b"\n")
        return Answer(**json.loads(await reader.readline()))
    finally:
        writer.close()


class Upstream:
    """The API itself. `listening` starts to serve it."""

    def __init__(self, buckets: Mapping[str, Bucket], *, seed: int, broken: float = 0.03) -> None:
        self._buckets = buckets
        self._chance = chance_from(seed)
        self._broken = broken
        self._revoked: set[str] = set()
        self._visits: set[asyncio.Task[None]] = set()

    def revoke(self, key: str) -> None:
        """Refuse this key from now on."""
        self._revoked.add(key)

    @asynccontextmanager
    async def listening(self, address: str) -> AsyncIterator[None]:
        """Context manager in which the API answers requests."""
        server = await asyncio.start_unix_server(self._serve, address)
        try:
            yield
        finally:
            server.close()
            for visit in self._visits:
                visit.cancel()
            await asyncio.gather(*self._visits)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        visit = asyncio.current_task()
        assert visit is not None, "a server makes a task for each visit"
        self._visits.add(visit)
        try:
            asked = json.loads(await reader.readline())
            answer = await self._answer(asked["key"], asked["question"])
            writer.write(json.dumps(asdict(answer)).encode() + b"\n")
            await writer.drain()
        except (ValueError, ConnectionError):
            pass  # the client was killed, or gave up
        except asyncio.CancelledError:
            pass  # the API is being closed
        finally:
            writer.close()
            self._visits.discard(visit)

    async def _answer(self, key: str, question: str) -> Answer:
        """Answer one request, after a while."""
        await asyncio.sleep(self._latency() / 4)
        if key in self._revoked:
            return Answer(401)
        if wait := self._buckets[key].take():
            return Answer(429, headers={"retry-after": f"{wait:.2f}"} if self._buckets[key].tells_when else {})
        await asyncio.sleep(self._latency())
        if self._chance.random() < self._broken:
            return Answer(502)
        return Answer(200, f"answer to {question}")

    def _latency(self) -> float:
        return min(0.5, self._chance.lognormvariate(-2.2, 0.5))
