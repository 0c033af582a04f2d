"""H10 over real HTTP: quotas with rotating transports, learned from the headers of a real server."""

from __future__ import annotations

import asyncio
import json
import math
import threading
import time
from collections import deque
from typing import Any

import httpx
import httpx2
import pytest
from hypothesis import given
from hypothesis import strategies as st

import headgate
from headgate import Cost, InvalidType, Quota, ResourcePool
from headgate.integrations import anthropic as anthropic_clients
from headgate.integrations import openai as openai_clients
from headgate.integrations.httpx import RotatingSyncTransport, RotatingTransport
from headgate.integrations.token_usage import UsageReader, estimated_cost, used_tokens
from tests.support.integrations.upstream import Answer, Seen, Upstream, refusal, usual

pytestmark = pytest.mark.integration
LIBRARIES = pytest.mark.parametrize("library", [httpx, httpx2], ids=["httpx", "httpx2"])


class Limits:
    """Fixed windows, kept by the server for each key, and told in headers of one of the families."""

    def __init__(self, requests: int, per: float, family: str = "openai") -> None:
        self.requests, self.per, self.family = requests, per, family
        self.refused = self.served = self.windows = 0
        self._lock = threading.Lock()
        self._began: dict[str | None, float] = {}
        self._used: dict[str | None, int] = {}

    def __call__(self, seen: Seen) -> Answer:
        with self._lock:
            now = time.monotonic()
            if now >= self._began.get(seen.key, -1e9) + self.per:
                self._began[seen.key], self._used[seen.key] = now, 0
                self.windows += 1
            reset = self._began[seen.key] + self.per - now
            if self._used[seen.key] >= self.requests:
                self.refused += 1
                return refusal(429, retry_after=str(max(1, round(reset))), **self._told(0, reset))
            self._used[seen.key] += 1
            self.served += 1
            told = self._told(self.requests - self._used[seen.key], reset)
        answer = usual(seen)
        named = {name.replace("_", "-"): value for name, value in told.items()}
        return Answer(answer.status, {**answer.headers, **named}, answer.body)

    def _told(self, remaining: int, reset: float) -> dict[str, str]:
        if self.family == "openai":
            names = ("x_ratelimit_limit_requests", "x_ratelimit_remaining_requests", "x_ratelimit_reset_requests")
            return dict(zip(names, (str(self.requests), str(remaining), f"{reset * 1000:.0f}ms"), strict=True))
        if self.family == "anthropic":
            at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(math.ceil(time.time() + reset)))
            names = ("limit", "remaining", "reset")
            told = dict(zip(names, (str(self.requests), str(remaining), f"{at}Z"), strict=True))
            return {f"anthropic_ratelimit_requests_{name}": value for name, value in told.items()}
        return {
            "ratelimit": f'"default";r={remaining};t={reset:.3f}',
            "ratelimit_policy": f'"default";q={self.requests};w={self.per}',
        }


def learning(*keys: str, **options: Any) -> ResourcePool[str]:
    return ResourcePool({key: key for key in keys}, quota="learn", cancel_siblings=False, **options)


@pytest.mark.parametrize(
    "family",
    ["openai", pytest.param("anthropic", marks=pytest.mark.soak), pytest.param("ietf", marks=pytest.mark.soak)],
)
def test_h10_a_transport_learns_from_every_family_of_headers(family: str, upstream: Upstream) -> None:
    limits = Limits(10, per=1.0, family=family)
    upstream.answers = {"a": limits, "b": limits}
    pool = learning("a", "b")

    async def main() -> list[int]:
        transport = RotatingTransport(pool, wait_for_capacity=True, within=30, max_attempts=10, retry_delay=0)
        async with httpx.AsyncClient(transport=transport, timeout=10) as client:
            answers = await asyncio.gather(*(client.post(upstream.url, content=b"{}") for _ in range(40)))
            return [answer.status_code for answer in answers]

    assert asyncio.run(main()) == [200] * 40
    assert limits.served == 40
    assert limits.refused <= 4  # two keys, and a reset or two


@LIBRARIES
def test_h10_a_transport_keeps_a_quota_that_it_was_given(library: Any, upstream: Upstream) -> None:
    """The server keeps a sliding window itself, and would have refused what was too much."""
    arrived: deque[float] = deque()
    most = 0

    def count(seen: Seen) -> Answer:
        nonlocal most
        arrived.append(time.monotonic())
        while arrived[0] <= arrived[-1] - 0.8:
            arrived.popleft()
        most = max(most, len(arrived))
        return usual(seen)

    upstream.answers = {"a": count}
    pool = ResourcePool({"a": "a"}, quota=Quota(requests=5, per=0.8, burst=5, delay=0.2))

    async def main() -> None:
        transport = RotatingTransport(pool, wait_for_capacity=True)
        async with library.AsyncClient(transport=transport, timeout=10) as client:
            await asyncio.gather(*(client.post(upstream.url, content=b"{}") for _ in range(14)))

    asyncio.run(main())
    assert 1 < most <= 5


def test_h10_a_sync_transport_waits_for_a_quota(upstream: Upstream) -> None:
    pool = ResourcePool({"a": "a"}, quota=Quota(requests=2, per=0.5))
    with httpx.Client(transport=RotatingSyncTransport(pool, wait_for_capacity=True)) as client:
        assert [client.post(upstream.url, content=b"{}").status_code for _ in range(5)] == [200] * 5


# -- tokens -----------------------------------------------------------------------------------------------------------


def left(pool: ResourcePool[str]) -> float | None:
    return pool.snapshot()["a"]["quota"]["left"]["tokens"]


def usage(seen: Seen) -> Answer:
    body = json.dumps({"text": "x" * 9000, "usage": {"prompt_tokens": 30, "total_tokens": 42}}).encode()
    return Answer(200, {"content-type": "application/json"}, body)


def test_h10_requests_cost_what_they_may_use_until_the_answer_says_what_it_was(upstream: Upstream) -> None:
    upstream.answers = {"a": usage}
    pool = ResourcePool({"a": "a"}, quota=Quota(tokens=1000))
    body = json.dumps({"max_tokens": 500, "messages": [{"content": "x" * 300}]}).encode()
    with httpx.Client(transport=RotatingSyncTransport(pool)) as client:
        with client.stream("POST", upstream.url, content=body) as answer:
            assert left(pool) == 1000 - 500 - math.ceil(len(body) / 4)
            answer.read()
        assert left(pool) == 1000 - 42


@pytest.mark.parametrize("cost", [700, lambda request: len(request.content) + 698])
def test_h10_the_cost_of_requests_may_be_given(cost: Any, upstream: Upstream) -> None:
    pool = ResourcePool({"a": "a"}, quota=Quota(tokens=1000))
    with httpx.Client(transport=RotatingSyncTransport(pool, cost=cost)) as client:
        client.post(upstream.url, content=b"{}")
    assert left(pool) == 300


def test_h10_a_cost_that_is_none_is_named(upstream: Upstream) -> None:
    pool = ResourcePool({"a": "a"}, quota=Quota(tokens=1000))
    with pytest.raises(InvalidType, match="cost must be a number of tokens, a Cost or a function"):
        RotatingTransport(pool, cost="many")  # type: ignore[arg-type]
    with (
        httpx.Client(transport=RotatingSyncTransport(pool, cost=lambda request: -1)) as client,
        pytest.raises(headgate.InvalidArgument, match="cost of a request"),
    ):
        client.post(upstream.url, content=b"{}")
    assert left(pool) == 1000


def test_h10_sdks_settle_what_their_answers_say(upstream: Upstream) -> None:
    pool = ResourcePool({"a": "a"}, quota=Quota(tokens=10_000))
    messages: Any = [{"role": "user", "content": "hello"}]

    async def main() -> list[str]:
        client = anthropic_clients.client(pool, base_url=upstream.url)
        async with client, client.messages.stream(model="m", max_tokens=100, messages=messages) as stream:
            return [text async for text in stream.text_stream]

    assert asyncio.run(main()) == ["hel", "lo"]
    assert left(pool) == 10_000 - 3  # one token read, two written
    with anthropic_clients.sync_client(pool, base_url=upstream.url) as client:
        client.messages.create(model="m", max_tokens=100, messages=messages)
    assert left(pool) == 10_000 - 5
    with openai_clients.sync_client(pool, base_url=upstream.url) as other:
        other.chat.completions.create(model="m", max_completion_tokens=100, messages=messages)
    assert 10_000 - 5 - 200 < (left(pool) or 0) <= 10_000 - 105  # this answer has no usage: the estimate stays


def test_h10_estimates_count_the_text_and_the_longest_answer() -> None:
    assert estimated_cost(b"") == Cost()
    assert estimated_cost(b"x" * 400) == Cost(input=100)
    assert estimated_cost(b'{"max_tokens": 50}') == Cost(input=18 / 4, output=50)
    assert estimated_cost(b'{"max_tokens": 50, "n": 3}') == Cost(input=26 / 4, output=150)
    assert estimated_cost(b'{"max_tokens": "all", "n": -3}') == Cost(input=30 / 4)
    assert estimated_cost(b'{"max_tokens": tru') == Cost(input=18 / 4)


@pytest.mark.parametrize(
    ("answer", "spent"),
    [
        (b'{"usage": {"prompt_tokens": 30, "completion_tokens": 12, "total_tokens": 42}}', (42, 30, 12)),
        (b'{"usage": {"input_tokens": 30, "output_tokens": 12}}', (42, 30, 12)),
        (b'{"input_tokens": 30, "output_tokens": 1} ... {"output_tokens": 12}', (42, 30, 12)),  # streamed
        (b'{"usage": {"prompt_tokens": 30, "total_tokens": 42}}', (42, 30, 12)),
        (b'{"usage": {"completion_tokens": 12, "total_tokens": 42}}', (42, 30, 12)),
        (b'{"usage": {"prompt_tokens": 30, "completion_tokens": 12, "total_tokens": 50}}', (50, 30, 12)),  # reasoning
        (b'{"usage": {"prompt_tokens": 30}}', (30, 30, 0)),  # embeddings
        (b'{"usage": {"prompt_tokens": 30, "completion_tokens": 12, "total_tokens": 1}}', (42, 30, 12)),
        (b'{"usage": {"total_tokens": 42}}', (42, 42, 42)),  # nobody knows how much of it was input
        (b'{"usage": {"tokens": 42}}', None),
    ],
)
def test_l02_an_answer_settles_input_and_output_separately(answer: bytes, spent: tuple[int, ...] | None) -> None:
    assert used_tokens(answer) == spent


def test_l02_requests_reserve_and_settle_input_and_output(upstream: Upstream) -> None:
    during: list[dict[str, float | None]] = []

    def count(seen: Seen) -> Answer:
        during.append(pool.snapshot()["a"]["quota"]["left"])
        return usage(seen)

    upstream.answers = {"a": count}
    pool = ResourcePool({"a": "a"}, quota=Quota(tokens=10_000, input_tokens=1000, output_tokens=1000))
    with httpx.Client(transport=RotatingSyncTransport(pool)) as client:
        client.post(upstream.url, content=b'{"max_tokens": 400}   ').read()
    assert during == [{"tokens": 9594.0, "input_tokens": 994.0, "output_tokens": 600.0}]
    assert pool.snapshot()["a"]["quota"]["left"] == {"tokens": 9958.0, "input_tokens": 970.0, "output_tokens": 988.0}
    with httpx.Client(transport=RotatingSyncTransport(pool, cost=headgate.Cost(input=1, output=600))) as client:
        client.post(upstream.url, content=b"{}")
    assert during[1]["output_tokens"] == 388.0


@given(st.binary(max_size=200))
def test_h10_any_body_has_an_estimate_and_any_answer_a_usage(body: bytes) -> None:
    assert float(estimated_cost(body)) >= 0
    assert float(estimated_cost(b'{"max_tokens":' + body + b"}")) >= 0
    used = used_tokens(b'{"usage": {"total_tokens": ' + body)
    assert used is None or min(used) >= 0


@given(st.integers(0, 10**8), st.lists(st.integers(1, 5000), max_size=30))
def test_h10_the_usage_is_found_however_the_answer_is_cut(tokens: int, cuts: list[int]) -> None:
    text = b'{"choices": "' + b"x" * 9000 + b'", "usage": {"total_tokens": %d}, "id": "m"}' % tokens
    reader = UsageReader()
    for cut in cuts:
        reader.feed(text[:cut])
        text = text[cut:]
    reader.feed(text)
    assert reader.spent() == (tokens, tokens, tokens)  # in all, and as much of either part: it is not known
