"""An HTTP upstream that limits each key as real providers do, and logs every request that arrives.

    python limited.py JSON

JSON holds the fields of `Limits`. The program prints its port and serves until its standard input ends.
``POST /v1/chat/completions`` is OpenAI's. ``GET /counts`` returns the log, see `Limited.counts`.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import sys
import time
from collections import defaultdict
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal

from upstream import completion, serve

WALL_CLOCK = time.time() - time.monotonic()
"""Add it to `time.monotonic()`: windows begin at multiples of their length on the wall clock, so clients can align."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What each key is allowed, how the headers describe it, and how long answers take."""

    kind: Literal["bucket", "window"]
    requests: int
    per: float
    tokens: int = 0
    """0: tokens are not limited."""
    headers: Literal["openai", "anthropic", "ietf", "none"] = "openai"
    exaggeration: float = 1.0
    """Headers describe limits that are larger than the real ones by this factor."""
    latency: float = 0.05


class Bucket:
    """A limit that refills continuously, as OpenAI's and Anthropic's do."""

    def __init__(self, limit: float, per: float) -> None:
        self.limit, self.rate = limit, limit / per
        self.left, self.at = limit, time.monotonic()

    def advance(self, now: float) -> None:
        self.left, self.at = min(self.limit, self.left + (now - self.at) * self.rate), now

    def wait(self, amount: float) -> float:
        """Seconds until `amount` is there; 0.0 if it is."""
        return max(0.0, (amount - self.left) / self.rate)

    def reset(self) -> float:
        """Seconds until the bucket is full."""
        return (self.limit - self.left) / self.rate


class Window:
    """A limit that is whole again at each multiple of `per` seconds."""

    def __init__(self, limit: float, per: float) -> None:
        self.limit, self.per = limit, per
        self.left, self.number, self.ends_in = limit, -1, 0.0

    def advance(self, now: float) -> None:
        number, into = divmod(now + WALL_CLOCK, self.per)
        if number != self.number:
            self.number, self.left = int(number), self.limit
        self.ends_in = self.per - into

    def wait(self, amount: float) -> float:
        """Seconds until `amount` is there; 0.0 if it is."""
        return 0.0 if amount <= self.left else self.ends_in

    def reset(self) -> float:
        """Seconds until the window ends."""
        return self.ends_in


class Account:
    """The limits of one key: those that count, and those that the headers describe."""

    def __init__(self, limits: Limits) -> None:
        make = {"bucket": Bucket, "window": Window}[limits.kind]
        sizes = {"requests": limits.requests, "tokens": limits.tokens}
        self.real = {name: make(size, limits.per) for name, size in sizes.items() if size}
        self.told = {name: make(size * limits.exaggeration, limits.per) for name, size in sizes.items() if size}

    def take(self, now: float, tokens: int) -> float:
        """Count a request and return 0.0; or return the seconds until it would be accepted."""
        amounts = {"requests": 1, "tokens": tokens}
        for limit in (*self.real.values(), *self.told.values()):
            limit.advance(now)
        wait = max(limit.wait(amounts[name]) for name, limit in self.real.items())
        if not wait:
            for name, limit in (*self.real.items(), *self.told.items()):
                limit.left -= amounts[name]
        return wait


class Limited:
    """The accounts of all keys, and the log."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self.accounts: dict[str, Account] = defaultdict(lambda: Account(self.limits))
        self.log: list[tuple[float, str, str, int, bool]] = []

    async def answer(self, key: str, body: bytes) -> tuple[int, dict[str, str], bytes]:
        """Answer one request. Tokens are counted before it runs: the prompt, and the longest answer it allows."""
        now, request = time.monotonic(), json.loads(body)
        text, longest = request["messages"][-1]["content"], request["max_tokens"]
        prompt, account = len(text) // 4, self.accounts[key]
        wait = account.take(now, prompt + longest)
        self.log.append((now, key, text.strip(), prompt + longest, not wait))
        headers = _headers(account, self.limits)
        if wait:
            headers["retry-after"] = str(math.ceil(wait))
            if self.limits.headers == "openai":
                headers["retry-after-ms"] = str(math.ceil(wait * 1000))
            return 429, headers, b'{"error": {"message": "limited", "code": "rate_limit_exceeded"}}'
        await asyncio.sleep(self.limits.latency)
        return 200, headers, completion("an answer", prompt, longest // 2)

    def counts(self) -> bytes:
        """The log as JSON: when a request arrived, its key, its text, its tokens, and whether it was accepted.

        Times are of the monotonic clock, which all processes of the machine share. "cpu" are this process's seconds.
        """
        return json.dumps({"log": self.log, "cpu": time.process_time()}).encode()


def _headers(account: Account, limits: Limits) -> dict[str, str]:
    headers = {}
    for name, limit in account.told.items():
        size, left, reset = f"{limit.limit:.0f}", str(int(limit.left)), limit.reset()
        if limits.headers == "openai":
            headers[f"x-ratelimit-limit-{name}"] = size
            headers[f"x-ratelimit-remaining-{name}"] = left
            headers[f"x-ratelimit-reset-{name}"] = go_duration(reset)
        elif limits.headers == "anthropic":
            at = datetime.fromtimestamp(math.ceil(time.time() + reset), UTC)
            headers[f"anthropic-ratelimit-{name}-limit"] = size
            headers[f"anthropic-ratelimit-{name}-remaining"] = left
            headers[f"anthropic-ratelimit-{name}-reset"] = at.strftime("%Y-%m-%dT%H:%M:%SZ")
        elif limits.headers == "ietf" and name == "requests":
            headers["ratelimit-policy"] = f'"default";q={size};w={limits.per:.0f}'
            headers["ratelimit"] = f'"default";r={left};t={math.ceil(reset)}'
    return headers


def go_duration(seconds: float) -> str:
    """The duration as Go writes it, and so OpenAI: "17ms", "1.5s", "6m0s"."""
    milliseconds = math.ceil(seconds * 1000)
    if milliseconds < 1000:
        return f"{milliseconds}ms"
    minutes, rest = divmod(milliseconds, 60_000)
    return f"{f'{minutes}m' if minutes else ''}{rest / 1000:g}s"


async def main(limits: Limits) -> None:
    """Serve until standard input ends, which it also does when the parent process dies."""
    serving = asyncio.create_task(serve(Limited(limits)))
    await asyncio.wait([serving, asyncio.create_task(asyncio.to_thread(sys.stdin.read))], return_when="FIRST_COMPLETED")
    os._exit(0)  # clients may still be connected


if __name__ == "__main__":
    asyncio.run(main(Limits(**json.loads(sys.argv[1]))))
