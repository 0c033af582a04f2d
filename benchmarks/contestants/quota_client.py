"""One process of a contestant of quotas.py: makes calls with its keys until its standard input ends.

    python quota_client.py CONTESTANT JSON

CONTESTANT is a key of `CONTESTANTS`, JSON holds the fields of `Job`. The process prints "ready" and begins when it
reads a line. For each further line it prints its CPU seconds, its failed calls, and when it submitted urgent calls.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import os
import random
import sys
import time
import traceback
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp

URGENT = 10
TOKENS_PER_CALL = 100
"""On average, as the upstream counts."""


@dataclass(frozen=True, slots=True)
class Job:
    """What is to be done, and what users know of their provider."""

    url: str
    keys: Sequence[str]
    requests: int
    per: float
    tokens: int
    """Per key and `per` seconds. 0: tokens are not limited."""
    at_a_time: int
    batch: int
    """Calls that are queued at the beginning. 0: make calls one by one, with a pause after each."""
    pause: float = 1.0
    urgent_every: float = 0.0
    """Seconds between urgent calls, on average. 0: there are none."""
    store: str = ""


Body = dict[str, Any]


def body(name: str, number: int) -> Body:
    """A request that a provider counts as 50, 100 or 150 tokens. The log knows it by its text."""
    messages = [{"role": "user", "content": f"{name:40}"}]
    return {"model": "m", "messages": messages, "max_tokens": (40, 90, 140)[number % 3]}


def tokens_of(request: Body) -> int:
    return len(request["messages"][-1]["content"]) // 4 + request["max_tokens"]


@dataclass(frozen=True, slots=True)
class Contestant:
    """What a contestant offers."""

    queue: Callable[[Sequence[Body]], Awaitable[object]]
    """Queue a batch; returns without waiting for it."""
    call: Callable[[Body], Awaitable[object]]
    """Make one urgent call."""
    failed: Callable[[], int]


Opened = AbstractAsyncContextManager[Contestant]


# -- headgate ---------------------------------------------------------------------------------------------------------


def _keys(job: Job, quota: Any) -> Any:
    from headgate import ResourcePool, http_errors

    shared: dict[str, Any] = {"name": "keys", "store": job.store} if job.store else {}
    return ResourcePool({key: key for key in job.keys}, quota=quota, classify=http_errors, **shared)


def _quota(job: Job) -> Any:
    from headgate import Quota

    return Quota(requests=job.requests, per=job.per, tokens=job.tokens or None)


@asynccontextmanager
async def tasks(job: Job, quota: Any) -> AsyncIterator[Contestant]:
    """Tasks that receive a key."""
    from headgate import TaskPool

    keys = _keys(job, quota)
    url = f"{job.url}/v1/chat/completions"
    async with http_client() as client, TaskPool(max_concurrent=job.at_a_time, resources=keys) as pool:

        async def ask(key: Any, request: Body) -> aiohttp.ClientResponse:
            async with client.post(url, json=request, headers=authorization(key.value)) as reply:
                reply.raise_for_status()
                await reply.read()
                return reply

        yield Contestant(
            queue=lambda batch: pool.submit_many(ask, [(request,) for request in batch], cost=tokens_of),
            call=lambda request: pool.run(ask, request, cost=tokens_of(request), priority=URGENT),
            failed=lambda: pool.snapshot(0).failed,
        )


@asynccontextmanager
async def sdk(job: Job, quota: Any) -> AsyncIterator[Contestant]:
    """Tasks that call OpenAI's SDK, whose client rotates the keys."""
    from headgate import TaskPool
    from headgate.integrations import openai

    keys = _keys(job, quota)
    client: Any = openai.client(keys, base_url=f"{job.url}/v1", within=600)
    async with client, TaskPool(max_concurrent=job.at_a_time) as pool:

        async def ask(request: Body) -> object:
            return await client.chat.completions.create(**request)

        yield Contestant(
            queue=lambda batch: pool.submit_many(ask, [(request,) for request in batch]),
            call=lambda request: pool.run(ask, request, priority=URGENT),
            failed=lambda: pool.snapshot(0).failed,
        )


# -- peers ------------------------------------------------------------------------------------------------------------


class Refused(Exception):
    """A 429, and for how long it asks to wait."""

    def __init__(self, headers: Mapping[str, str]) -> None:
        milliseconds, seconds = headers.get("retry-after-ms"), headers.get("retry-after", "1")
        self.seconds = float(milliseconds) / 1000 if milliseconds else float(seconds)


@dataclass(order=True, slots=True)
class Waiting:
    """An entry of the priority queue."""

    order: tuple[int, int]
    request: Body = field(compare=False)
    done: asyncio.Future[None] = field(compare=False)


class ByHand:
    """What people write themselves: a priority queue, aiolimiter for each key, and tenacity for refused calls.

    Each key takes the first request of the queue once its limiter allows a call, so urgent calls overtake the batch.
    """

    def __init__(self, job: Job, client: aiohttp.ClientSession, *, limited: bool) -> None:
        import tenacity

        self._job, self._client, self._limited = job, client, limited
        self._waiting: asyncio.PriorityQueue[Waiting] = asyncio.PriorityQueue()
        self._slots = asyncio.Semaphore(job.at_a_time)
        self._numbers = itertools.count()
        self._running: set[asyncio.Task[None]] = set()
        self._retrying = tenacity.AsyncRetrying(
            retry=tenacity.retry_if_exception_type(Refused),
            wait=lambda state: state.outcome.exception().seconds + random.uniform(0, 0.05),  # type: ignore[union-attr]
            stop=tenacity.stop_after_attempt(50),
            reraise=True,
        )
        self.failed = 0

    def put(self, request: Body, priority: int) -> asyncio.Future[None]:
        done = asyncio.get_running_loop().create_future()
        self._waiting.put_nowait(Waiting((-priority, next(self._numbers)), request, done))
        return done

    async def serve(self, key: str) -> None:
        """Make calls with this key until cancelled."""
        from aiolimiter import AsyncLimiter

        limiters = {}
        if self._limited:
            limiters["requests"] = AsyncLimiter(self._job.requests, self._job.per)
        if self._limited and self._job.tokens:
            limiters["tokens"] = AsyncLimiter(self._job.tokens, self._job.per)
        while True:
            if "requests" in limiters:
                await limiters["requests"].acquire()
            await self._slots.acquire()
            first = await self._waiting.get()
            if "tokens" in limiters:
                await limiters["tokens"].acquire(tokens_of(first.request))
            task = asyncio.create_task(self._run(key, first, limiters))
            self._running.add(task)
            task.add_done_callback(self._running.discard)

    async def _run(self, key: str, waiting: Waiting, limiters: dict[str, Any]) -> None:
        amounts = {"requests": 1, "tokens": tokens_of(waiting.request)}
        try:
            async for attempt in self._retrying.copy():
                with attempt:
                    if attempt.retry_state.attempt_number > 1:
                        for name, limiter in limiters.items():
                            await limiter.acquire(amounts[name])
                    await self._ask(key, waiting.request)
        except Exception:
            self.failed += 1
        finally:
            self._slots.release()
            waiting.done.set_result(None)

    async def _ask(self, key: str, request: Body) -> None:
        url = f"{self._job.url}/v1/chat/completions"
        async with self._client.post(url, json=request, headers=authorization(key)) as reply:
            if reply.status == 429:
                raise Refused(reply.headers)
            reply.raise_for_status()
            await reply.read()


@asynccontextmanager
async def by_hand(job: Job, *, limited: bool = True) -> AsyncIterator[Contestant]:
    async with http_client() as client, asyncio.TaskGroup() as group:
        hand = ByHand(job, client, limited=limited)
        for key in job.keys:
            group.create_task(hand.serve(key))

        async def queue(batch: Sequence[Body]) -> None:
            for request in batch:
                hand.put(request, 0)

        yield Contestant(queue, lambda request: hand.put(request, URGENT), lambda: hand.failed)


@asynccontextmanager
async def litellm_router(job: Job, *, share: float = 1.0, usage_based: bool = False) -> AsyncIterator[Contestant]:
    """LiteLLM's Router, which raises an error for calls beyond `rpm` in a minute of the wall clock instead of waiting.

    The error says "Try again in 5 seconds", so that is done here, or earlier if the next minute begins earlier. The
    Router retries what the upstream refuses by itself, and obeys Retry-After.
    """
    import litellm
    from litellm.types.router import RouterRateLimitError

    litellm.suppress_debug_info = True
    common = {"model": "openai/m", "api_base": f"{job.url}/v1", "rpm": int(job.requests * share * 60 / job.per)}
    routing: dict[str, Any] = {"optional_pre_call_checks": ["enforce_model_rate_limits"]}
    if usage_based:
        routing = {"routing_strategy": "usage-based-routing-v2"}
    router = litellm.Router(
        model_list=[{"model_name": "m", "litellm_params": {**common, "api_key": key}} for key in job.keys],
        num_retries=3,
        **routing,
    )
    failed = 0

    async def call(request: Body) -> None:
        nonlocal failed
        while True:
            try:
                await router.acompletion(**request)
            except (litellm.RateLimitError, RouterRateLimitError):
                await asyncio.sleep(min(5.0, 60 - time.time() % 60))
            except Exception:
                failed += 1
                return
            else:
                return

    running: list[asyncio.Task[None]] = []

    async def queue(batch: Sequence[Body]) -> None:
        left = iter(batch)

        async def work() -> None:
            for request in left:
                await call(request)

        running.extend(asyncio.create_task(work()) for _ in range(job.at_a_time))

    yield Contestant(queue, call, lambda: failed)


def http_client() -> aiohttp.ClientSession:
    """The cheapest client, so that figures are about limits and not about HTTP."""
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(300))


def authorization(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


CONTESTANTS: dict[str, Callable[[Job], Opened]] = {
    "tasks, learned": lambda job: tasks(job, "learn"),
    "tasks, configured": lambda job: tasks(job, _quota(job)),
    "tasks, no quota": lambda job: tasks(job, None),
    "sdk, learned": lambda job: sdk(job, "learn"),
    "tenacity + aiolimiter": by_hand,
    "tenacity": lambda job: by_hand(job, limited=False),
    "litellm": litellm_router,
    "litellm, usage-based": lambda job: litellm_router(job, usage_based=True),
    "litellm, a third": lambda job: litellm_router(job, share=1 / 3),
}


# -- the process ------------------------------------------------------------------------------------------------------


async def work(contestant: Contestant, job: Job, urgent: dict[str, float]) -> None:
    """Do the job. `urgent` is filled with the names of urgent calls and the times at which they were submitted."""
    prefix = f"{os.getpid()}"
    if job.batch:
        await contestant.queue([body(f"{prefix}-{number}", number) for number in range(job.batch)])
    else:
        for number in itertools.count():
            await contestant.call(body(f"{prefix}-{number}", number))
            await asyncio.sleep(job.pause)
    chance, waiting = random.Random(1), set()
    while job.urgent_every:
        await asyncio.sleep(chance.uniform(0.5, 1.5) * job.urgent_every)
        name = f"{prefix}-urgent-{len(urgent)}"
        urgent[name] = time.monotonic()
        waiting.add(asyncio.ensure_future(contestant.call(body(name, 1))))


def end_if_failed(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()):
        traceback.print_exception(error)
        os._exit(1)


async def main(name: str, job: Job) -> None:
    """Open the contestant, and do what the parent process says."""
    urgent: dict[str, float] = {}
    lines = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    async with CONTESTANTS[name](job) as contestant:
        print("ready", flush=True)
        await lines.readline()
        working = asyncio.create_task(work(contestant, job, urgent))
        working.add_done_callback(end_if_failed)
        while await lines.readline():
            told = {"cpu": time.process_time(), "failed": contestant.failed(), "urgent": urgent}
            print(json.dumps(told), flush=True)
        os._exit(0)  # calls that still wait are of no interest


if __name__ == "__main__":
    logging.disable(logging.ERROR)
    warnings.simplefilter("ignore")
    asyncio.run(main(sys.argv[1], Job(**json.loads(sys.argv[2]))))
