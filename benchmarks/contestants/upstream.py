"""An HTTP upstream that limits and revokes keys, and counts what each prompt and each key got.

    python upstream.py LIMIT WINDOW REVOKE_AFTER

It prints its port. Each key may make LIMIT requests in WINDOW seconds; more are refused with 429 and Retry-After. The
last key is revoked after REVOKE_AFTER answers: 401. ``POST /v1/chat/completions`` is as OpenAI has it, with one choice.
``POST /reset`` begins anew, ``GET /counts`` tells what was counted since.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections import Counter, defaultdict
from typing import Protocol

KEYS = [f"sk-{number}" for number in range(1, 6)]
LATENCY = 0.03
"""Seconds that an answer takes."""


def completion(text: str, prompt_tokens: int, completion_tokens: int) -> bytes:
    """An answer of OpenAI's chat completions API with one choice."""
    message = {"role": "assistant", "content": text}
    choice = {"index": 0, "finish_reason": "stop", "message": message}
    total = prompt_tokens + completion_tokens
    usage = {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens, "total_tokens": total}
    reply = {"id": "c", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice], "usage": usage}
    return json.dumps(reply).encode()


class Answers(Protocol):
    """What `serve` needs of an upstream."""

    async def answer(self, key: str, body: bytes) -> tuple[int, dict[str, str], bytes]:
        """Answer one request for a completion: status, headers, body."""

    def reset(self) -> None:
        """Forget everything."""

    def counts(self) -> bytes:
        """What was counted, as JSON."""


class Upstream:
    """The counters of one run, and the windows of the keys."""

    def __init__(self, limit: int, window: float, revoke_after: int) -> None:
        self.limit, self.window, self.revoke_after = limit, window, revoke_after
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self.statuses: Counter[int] = Counter()
        self.paid: Counter[str] = Counter()
        self.used: dict[str, int] = defaultdict(int)
        self.ends: dict[str, float] = {}
        self.answered: Counter[str] = Counter()

    def judge(self, key: str, now: float) -> tuple[int, float]:
        """Return the status of a request with this key, and how long the key is limited."""
        if key not in KEYS or (key == KEYS[-1] and self.answered[key] >= self.revoke_after):
            return 401, 0.0
        if now >= self.ends.get(key, 0.0):
            self.ends[key], self.used[key] = now + self.window, 0
        self.used[key] += 1
        if self.used[key] > self.limit:
            return 429, self.ends[key] - now
        self.answered[key] += 1
        return 200, 0.0

    async def answer(self, key: str, body: bytes) -> tuple[int, dict[str, str], bytes]:
        """Answer one request for a completion."""
        status, wait = self.judge(key, time.monotonic())
        self.statuses[status] += 1
        if status == 429:
            return status, {"retry-after": f"{wait:.3f}"}, b'{"error": {"message": "limited", "code": "rate_limit"}}'
        if status == 401:
            return status, {}, b'{"error": {"message": "revoked", "code": "invalid_api_key"}}'
        return 200, {}, await self.completed(body)

    async def completed(self, body: bytes) -> bytes:
        """Wait for as long as an answer takes, and return it."""
        prompt = json.loads(body)["messages"][-1]["content"]
        self.paid[prompt] += 1
        await asyncio.sleep(LATENCY)
        return completion(f"answer to {prompt}", 1, 1)

    def counts(self) -> bytes:
        """What was counted, as JSON."""
        paid_twice = sum(times - 1 for times in self.paid.values())
        told = {"refused": self.statuses[429], "unauthorized": self.statuses[401], "paid": len(self.paid)}
        return json.dumps({**told, "paid_twice": paid_twice}).encode()


async def serve(upstream: Answers) -> None:
    """Serve for ever, on a port that is printed."""

    async def visit(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                first, *lines = head.decode().split("\r\n")
                headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                path = first.split()[1]
                if path == "/reset":
                    upstream.reset()
                    status, extra, reply = 200, {}, b"{}"
                elif path == "/counts":
                    status, extra, reply = 200, {}, upstream.counts()
                else:
                    key = headers.get("authorization", "").removeprefix("Bearer ")
                    status, extra, reply = await upstream.answer(key, body)
                fields = {"content-type": "application/json", "content-length": str(len(reply)), **extra}
                text = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
                writer.write(f"HTTP/1.1 {status} X\r\n{text}\r\n".encode() + reply)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(visit, "127.0.0.1", 0, backlog=1000)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(serve(Upstream(int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]))))
