"""An HTTP upstream with fixed windows, which it tells of in OpenAI's headers. It counts what keys got in each window.

    python limited.py LIMIT WINDOW

It prints its port. Each key may make LIMIT requests in a window of WINDOW seconds. Windows begin at multiples of WINDOW
seconds of the wall clock. ``POST /v1/chat/completions`` is as OpenAI has it, ``GET /counts`` tells what was counted.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections import defaultdict

from upstream import Upstream, serve


class Limited(Upstream):
    """The windows of all keys."""

    def reset(self) -> None:
        """Forget everything."""
        super().reset()
        self.windows: dict[str, dict[int, list[int]]] = defaultdict(lambda: defaultdict(lambda: [0, 0]))

    async def answer(self, key: str, body: bytes) -> tuple[int, dict[str, str], bytes]:
        """Answer one request for a completion."""
        now = time.time()
        number = int(now // self.window)
        counted = self.windows[key][number]
        allowed = counted[0] < self.limit
        counted[0 if allowed else 1] += 1
        left = (number + 1) * self.window - now
        headers = {
            "x-ratelimit-limit-requests": str(self.limit),
            "x-ratelimit-remaining-requests": str(self.limit - counted[0]),
            "x-ratelimit-reset-requests": f"{left * 1000:.0f}ms",
        }
        if not allowed:
            refusal = b'{"error": {"message": "limited", "code": "rate_limit"}}'
            return 429, {**headers, "retry-after": f"{left:.3f}"}, refusal
        return 200, headers, await self.completed(body)

    def counts(self) -> bytes:
        """What each key got in each window, as JSON: the windows' numbers, with answers and refusals."""
        return json.dumps(self.windows).encode()


if __name__ == "__main__":
    asyncio.run(serve(Limited(int(sys.argv[1]), float(sys.argv[2]), revoke_after=0)))
