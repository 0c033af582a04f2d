"""One process of a contestant of quotas.py: asks one key for completions until its standard input ends.

    python quota_client.py CONTESTANT URL KEY DETAIL AT_A_TIME PAUSE

CONTESTANT is a name of `OPENED`. DETAIL is the address of a store, or the limit that LiteLLM is told. AT_A_TIME
requests are made at a time, with PAUSE seconds after each. It prints "ready", and begins when it reads a line.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
import time
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

Ask = Callable[[], Awaitable[None]]
"""Ask for one completion; returns when it is there, or when the next request may be made."""

MESSAGES = [{"role": "user", "content": "hello"}]


@asynccontextmanager
async def headgate(url: str, key: str, quota: Any, **shared: Any) -> AsyncIterator[Ask]:
    """An HTTP client with a rotating transport."""
    import httpx

    from headgate import ResourcePool
    from headgate.integrations.httpx import RotatingTransport

    pool = ResourcePool({"key": key}, quota=quota, cancel_siblings=False, **shared)
    transport = RotatingTransport(pool, wait_for_capacity=True, max_attempts=50, retry_delay=0)
    async with httpx.AsyncClient(transport=transport, timeout=300) as client:

        async def ask() -> None:
            await client.post(f"{url}/v1/chat/completions", json={"model": "m", "messages": MESSAGES})

        yield ask


def learned(url: str, key: str, store: str) -> contextlib.AbstractAsyncContextManager[Ask]:
    shared = {"name": "keys", "store": store} if store else {}
    return headgate(url, key, "learn", **shared)


def without(url: str, key: str, _: str) -> contextlib.AbstractAsyncContextManager[Ask]:
    return headgate(url, key, None)


@asynccontextmanager
async def litellm_router(url: str, key: str, limit: str) -> AsyncIterator[Ask]:
    """LiteLLM's Router, which refuses by itself what is more than `rpm` in a minute of the wall clock.

    It does not wait then, and says Retry-After: 60. Here the next request is made when the next minute begins, which is
    as early as it can be answered. To what the upstream refuses it listens itself, by Retry-After.
    """
    import litellm

    litellm.suppress_debug_info = True
    parameters = {"model": "openai/m", "api_key": key, "api_base": f"{url}/v1", "rpm": int(limit)}
    router = litellm.Router(
        model_list=[{"model_name": "m", "litellm_params": parameters}],
        num_retries=3,
        optional_pre_call_checks=["enforce_model_rate_limits"],
    )

    async def ask() -> None:
        try:
            await router.acompletion(model="m", messages=MESSAGES)
        except litellm.RateLimitError:
            await asyncio.sleep(60 - time.time() % 60)

    yield ask


OPENED = {"learned": learned, "without": without, "litellm": litellm_router}


async def main(name: str, url: str, key: str, detail: str, at_a_time: int, pause: float) -> None:
    async def work() -> None:
        while True:
            await ask()
            await asyncio.sleep(pause)

    async with OPENED[name](url, key, detail) as ask:
        print("ready", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        workers = asyncio.gather(*(work() for _ in range(at_a_time)))
        end = asyncio.create_task(asyncio.to_thread(sys.stdin.read))
        await asyncio.wait([workers, end], return_when=asyncio.FIRST_COMPLETED)
        if workers.done():
            await workers  # it raises what went wrong
    os._exit(0)  # requests that still wait are of no interest any more


if __name__ == "__main__":
    logging.disable(logging.ERROR)
    warnings.simplefilter("ignore")
    asyncio.run(main(*sys.argv[1:5], int(sys.argv[5]), float(sys.argv[6])))
