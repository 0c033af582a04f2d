"""The released SDKs of OpenAI and Anthropic over rotating transports, against a real server."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

import httpx2
import pytest

from headgate import InvalidArgument, InvalidType, ResourcePool
from headgate.integrations import anthropic as our_anthropic
from headgate.integrations import openai as our_openai
from headgate.integrations.httpx import RotatingSyncTransport, RotatingTransport
from tests.sdks import anthropic, openai
from tests.support.integrations.upstream import (
    Answer,
    Seen,
    Upstream,
    anthropic_events,
    openai_events,
    refusal,
    streamed,
    usual,
)

pytestmark = pytest.mark.integration
PATIENCE = 30.0
MESSAGES: Any = [{"role": "user", "content": "hi"}]


async def ask_openai(client: Any) -> str:
    answer = await client.chat.completions.create(model="m", messages=MESSAGES)
    return str(answer.choices[0].message.content)


async def stream_openai(client: Any) -> str:
    parts = ""
    async for event in await client.chat.completions.create(model="m", messages=MESSAGES, stream=True):
        parts += event.choices[0].delta.content or ""
    return parts


async def ask_anthropic(client: Any) -> str:
    answer = await client.messages.create(model="m", max_tokens=5, messages=MESSAGES)
    return str(answer.content[0].text)


async def stream_anthropic(client: Any) -> str:
    async with client.messages.stream(model="m", max_tokens=5, messages=MESSAGES) as events:
        return "".join([text async for text in events.text_stream])


class Sdk(NamedTuple):
    module: Any
    ours: Any
    name: str
    ask: Callable[[Any], Awaitable[str]]
    stream: Callable[[Any], Awaitable[str]]
    events: list[bytes]
    path: str

    @property
    def usual(self) -> Any:
        """The client of the SDK itself."""
        return getattr(self.module, self.name)

    def base_url(self, upstream: Upstream) -> str:
        return upstream.url + self.path


OPENAI = Sdk(openai, our_openai, "AsyncOpenAI", ask_openai, stream_openai, openai_events(), "/v1")
ANTHROPIC = Sdk(anthropic, our_anthropic, "AsyncAnthropic", ask_anthropic, stream_anthropic, anthropic_events(), "")
every_sdk = pytest.mark.parametrize("sdk", [OPENAI, ANTHROPIC], ids=["openai", "anthropic"])
LIMITS = {
    "openai": {"x-ratelimit-remaining-requests": "0", "x-ratelimit-reset-requests": "40s"},
    "anthropic": {"retry-after": "40", "anthropic-ratelimit-requests-remaining": "0"},
}


def pool_of(*keys: str) -> ResourcePool[str]:
    return ResourcePool({key: key for key in keys})


def with_unchanged_client(
    sdk: Sdk, upstream: Upstream, pool: ResourcePool[str], use: Callable[[Any], Awaitable[Any]], **options: Any
) -> Any:
    """The way of the SDK's own documentation: pass an HTTP client with a transport, and change nothing else."""

    async def main() -> Any:
        http_client = httpx2.AsyncClient(transport=RotatingTransport(pool, retry_delay=0))
        base_url = sdk.base_url(upstream)
        async with sdk.usual(api_key="-", base_url=base_url, http_client=http_client, **options) as client:
            return await use(client)

    return asyncio.run(main())


def statuses(pool: ResourcePool[str]) -> dict[str, str]:
    return {key: one["status"] for key, one in pool.snapshot().items()}


@every_sdk
@pytest.mark.parametrize("kind", ["ask", "stream"])
def test_c21_an_unchanged_client_rotates(sdk: Sdk, kind: str, upstream: Upstream) -> None:
    pool = pool_of("revoked", "limited", "good")
    limits = LIMITS[sdk.module.__name__]
    upstream.answers = {
        "revoked": [refusal(401, "authentication_error")],
        "limited": [refusal(429, "rate_limit_error", **limits)],
    }
    assert with_unchanged_client(sdk, upstream, pool, getattr(sdk, kind)) == "hello"
    assert upstream.keys == ["revoked", "limited", "good"]
    assert statuses(pool) == {"revoked": "disabled", "limited": "cooling_down", "good": "healthy"}
    assert 35 < pool.snapshot()["limited"]["cooldown_seconds_remaining"] <= 40


def limit_for(how: dict[str, int]) -> float:
    """Seconds that a read may take. A stall is found by it, so every other read must be quicker, on a busy machine too;
    a cut is found without."""
    return 2.0 if "stall_at" in how else PATIENCE


@every_sdk
@pytest.mark.parametrize("how", [{"cut_at": 0}, {"stall_at": 0}, {"cut_at": -1}])
def test_c21_a_stream_that_breaks_before_its_first_byte_is_tried_elsewhere(
    sdk: Sdk, how: Any, upstream: Upstream
) -> None:
    pool = pool_of("bad", "good")
    upstream.answers = {"bad": [streamed(sdk.events, **how)]}
    assert with_unchanged_client(sdk, upstream, pool, sdk.stream, timeout=limit_for(how)) == "hello"
    assert upstream.keys == ["bad", "good"]


@every_sdk
@pytest.mark.parametrize("how", [{"cut_at": 1}, {"stall_at": 1}])
def test_c21_a_stream_that_breaks_after_its_first_byte_fails(sdk: Sdk, how: Any, upstream: Upstream) -> None:
    pool = pool_of("bad", "good")
    upstream.answers = {"bad": [streamed(sdk.events, **how)]}
    with pytest.raises((httpx2.HTTPError, sdk.module.APIError)):
        with_unchanged_client(sdk, upstream, pool, sdk.stream, timeout=limit_for(how))
    assert upstream.keys == ["bad"]
    assert all(one["in_flight"] == 0 for one in pool.snapshot().values())


@every_sdk
def test_c21_refusals_are_not_multiplied_by_the_sdks_own_retries(sdk: Sdk, upstream: Upstream) -> None:
    pool = pool_of("a", "b", "c", "d", "e")
    upstream.answers = {key: [refusal(500)] for key in "abcde"}
    with pytest.raises(sdk.module.InternalServerError):
        with_unchanged_client(sdk, upstream, pool, sdk.ask, max_retries=2)
    assert upstream.keys == ["a", "b", "c"], "3 attempts of the pool, none of the SDK"


@every_sdk
def test_c21_broken_connections_are_not_multiplied_either(
    sdk: Sdk, upstream: Upstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sdk.module._base_client, "INITIAL_RETRY_DELAY", 0.01)
    pool = pool_of("a", "b", "c", "d", "e")
    upstream.answers = {key: [Answer(cut_at=-1)] for key in "abcde"}
    with pytest.raises(sdk.module.APIConnectionError):
        with_unchanged_client(sdk, upstream, pool, sdk.ask, max_retries=2)
    assert len(upstream.keys) == 5, "3 attempts of the pool, and 1 for each of 2 retries of the SDK; not 9"


@every_sdk
def test_c21_when_all_keys_rest_the_sdk_raises_its_own_rate_limit_error(sdk: Sdk, upstream: Upstream) -> None:
    pool = pool_of("a")
    upstream.answers = {"a": [refusal(429, "rate_limit_error", retry_after="60")]}
    for _ in range(2):
        with pytest.raises(sdk.module.RateLimitError) as caught:
            with_unchanged_client(sdk, upstream, pool, sdk.ask)
    assert upstream.keys == ["a"], "while its key rests, nothing is sent"
    assert "no eligible resource" in str(caught.value)
    assert 50 <= int(caught.value.response.headers["retry-after"]) <= 60


@every_sdk
def test_c21_a_revoked_key_is_not_the_clients_error_while_others_are_left(sdk: Sdk, upstream: Upstream) -> None:
    pool = pool_of("limited", "revoked")
    upstream.answers = {
        "limited": [refusal(429, "rate_limit_error", retry_after="60")],
        "revoked": [refusal(401, "authentication_error")],
    }
    with pytest.raises(sdk.module.RateLimitError) as caught:
        with_unchanged_client(sdk, upstream, pool, sdk.ask)
    assert upstream.keys == ["limited", "revoked"]
    assert caught.value.response.headers["retry-after"] == "60", "the answer to the other key"


@every_sdk
def test_c21_nor_is_it_while_all_others_rest(sdk: Sdk, upstream: Upstream) -> None:
    pool = pool_of("revoked", "resting")
    upstream.answers = {"revoked": [refusal(401, "authentication_error")]}

    async def ask(client: Any) -> str:
        await pool.cool("resting", 60)
        return await sdk.ask(client)

    with pytest.raises(sdk.module.RateLimitError, match="no eligible resource") as caught:
        with_unchanged_client(sdk, upstream, pool, ask)
    assert upstream.keys == ["revoked"]
    assert 50 <= int(caught.value.response.headers["retry-after"]) <= 60


@every_sdk
def test_c21_when_every_key_is_revoked_the_client_is_told_so(sdk: Sdk, upstream: Upstream) -> None:
    upstream.answers = {key: [refusal(401, "authentication_error")] for key in "ab"}
    with pytest.raises(sdk.module.AuthenticationError):
        with_unchanged_client(sdk, upstream, pool_of("a", "b"), sdk.ask)
    assert upstream.keys == ["a", "b"]


@every_sdk
def test_c22_one_line_to_a_client_that_rotates(sdk: Sdk, upstream: Upstream) -> None:
    pool = pool_of("revoked", "good")
    upstream.answers = {"revoked": [refusal(401)]}

    async def main() -> None:
        async with sdk.ours.client(pool, base_url=sdk.base_url(upstream)) as client:
            assert isinstance(client, sdk.usual)
            assert client.max_retries == 0
            assert await sdk.ask(client) == "hello"
            assert await sdk.stream(client) == "hello"

    asyncio.run(main())
    assert upstream.keys == ["revoked", "good", "good"]


def test_c22_clients_for_code_without_a_loop(upstream: Upstream) -> None:
    with our_openai.sync_client(pool_of("k"), base_url=f"{upstream.url}/v1") as client:
        assert client.chat.completions.create(model="m", messages=MESSAGES).choices[0].message.content == "hello"
    with our_anthropic.sync_client(pool_of("k"), base_url=upstream.url) as other:
        assert other.messages.create(model="m", max_tokens=5, messages=MESSAGES).content
    assert upstream.keys == ["k", "k"]


class Windows:
    """Answers as a provider that allows each key a few requests, refuses the next, and then for some seconds all."""

    def __init__(self, allowed: int, seconds: float) -> None:
        self._allowed = allowed
        self._seconds = seconds
        self._lock = threading.Lock()  # the server answers in threads
        self._answered: Counter[str | None] = Counter()
        self._rests_until: dict[str | None, float] = {}
        self.refused = 0

    def __call__(self, seen: Seen) -> Answer:
        with self._lock:
            now = time.monotonic()
            if now >= self._rests_until.get(seen.key, now):
                self._answered[seen.key] += 1
                if self._answered[seen.key] <= self._allowed:
                    return usual(seen)
                self._answered[seen.key] = 0
                self._rests_until[seen.key] = now + self._seconds
            self.refused += 1
            left = self._rests_until[seen.key] - now
            return refusal(429, "rate_limit_error", retry_after_ms=str(round(left * 1000) + 1))


KEYS = tuple("abcde")


@every_sdk
def test_c22_a_batch_over_limited_keys_goes_through(sdk: Sdk, upstream: Upstream) -> None:
    limits = Windows(allowed=2, seconds=1.5)  # longer than the pauses between attempts, which must not be what helps
    upstream.answers = {**dict.fromkeys(KEYS, limits), "revoked": [refusal(401)]}

    async def main() -> list[str]:
        async with sdk.ours.client(pool_of(*KEYS, "revoked"), base_url=sdk.base_url(upstream)) as client:
            return await asyncio.gather(*(sdk.ask(client) for _ in range(20)))

    assert asyncio.run(main()) == ["hello"] * 20, "twice what the keys allow at once"
    assert limits.refused


@every_sdk
def test_c22_a_client_without_a_loop_waits_too(sdk: Sdk, upstream: Upstream) -> None:
    upstream.answers = dict.fromkeys(KEYS, Windows(allowed=1, seconds=1.0))
    with sdk.ours.sync_client(pool_of("a", "b"), base_url=sdk.base_url(upstream)) as client:
        for _ in range(3):
            if sdk is OPENAI:
                client.chat.completions.create(model="m", messages=MESSAGES)
            else:
                client.messages.create(model="m", max_tokens=5, messages=MESSAGES)


@every_sdk
@pytest.mark.parametrize(
    "options",
    [
        {"wait_for_capacity": False},
        {"wait_for_cooldown": False},
        {"wait_for_cooldown": True, "within": 5},
        {"within": 0.01},
        {"max_attempts": 1},
    ],
    ids=str,
)
def test_c22_the_caller_says_how_long_a_request_waits(sdk: Sdk, options: Any, upstream: Upstream) -> None:
    upstream.answers = {"a": [refusal(429, "rate_limit_error", retry_after="30")]}

    async def main() -> None:
        async with sdk.ours.client(pool_of("a"), base_url=sdk.base_url(upstream), **options) as client:
            with pytest.raises(sdk.module.RateLimitError):
                await sdk.ask(client)

    asyncio.run(asyncio.wait_for(main(), 20))
    assert upstream.keys == ["a"]


@every_sdk
@pytest.mark.parametrize(("options", "sent"), [({}, 3), ({"max_attempts": 5}, 5)])
def test_c22_errors_of_the_server_are_tried_no_oftener_than_the_pool_says(
    sdk: Sdk, options: Any, sent: int, upstream: Upstream
) -> None:
    upstream.answers = {"a": [refusal(500)]}

    async def main() -> None:
        base_url = sdk.base_url(upstream)
        async with sdk.ours.client(pool_of("a"), base_url=base_url, retry_delay=0, **options) as client:
            with pytest.raises(sdk.module.InternalServerError):
                await sdk.ask(client)

    asyncio.run(main())
    assert len(upstream.keys) == sent


@every_sdk
@pytest.mark.parametrize(
    ("name", "near"), [("wait_for_capacty", "wait_for_capacity"), ("base_ul", "base_url"), ("tag", "tags")]
)
def test_c22_a_misspelt_option_is_refused(sdk: Sdk, name: str, near: str) -> None:
    for make in (sdk.ours.client, sdk.ours.sync_client):
        with pytest.raises(InvalidType, match=rf"takes no option '{name}'.*Did you mean {near}\?"):
            make(pool_of("k"), **{name: True})
    with pytest.raises(InvalidType, match=r"Options are affinity, .*, and those of Async"):
        sdk.ours.client(pool_of("k"), zzz=1)
    with pytest.raises(InvalidArgument, match="max_attempts must be >= 1"):
        sdk.ours.client(pool_of("k"), max_attempts=0)


@every_sdk
def test_c22_options_of_calls_do_not_go_with_a_transport(sdk: Sdk) -> None:
    with pytest.raises(InvalidType, match=r"'within' with a transport.*Pass it to RotatingTransport"):
        sdk.ours.client(RotatingTransport(pool_of("k")), within=5)


@every_sdk
def test_c22_a_transport_may_be_passed_instead_of_the_pool(sdk: Sdk, upstream: Upstream) -> None:
    async def main() -> None:
        transport = RotatingTransport(pool_of("k"), max_attempts=1)
        async with sdk.ours.client(transport, base_url=sdk.base_url(upstream), max_retries=1) as client:
            assert client.max_retries == 1
            assert await sdk.ask(client) == "hello"

    asyncio.run(main())


@every_sdk
def test_c22_a_base_url_without_tls_is_refused_when_the_client_is_made(sdk: Sdk) -> None:
    with pytest.raises(InvalidArgument, match="without TLS"):
        sdk.ours.client(pool_of("k"), base_url="http://api.example.com")


@every_sdk
@pytest.mark.parametrize("options", [{"api_key": "k"}, {"http_client": None}])
def test_c22_options_that_the_pool_takes_care_of_are_refused(sdk: Sdk, options: Any) -> None:
    with pytest.raises(InvalidType, match="keys come from the pool"):
        sdk.ours.client(pool_of("k"), **options)
    with pytest.raises(InvalidType, match="takes a ResourcePool"):
        sdk.ours.client(["k"])
    with pytest.raises(InvalidType, match="or a RotatingTransport, got RotatingSyncTransport"):
        sdk.ours.client(RotatingSyncTransport(pool_of("k")))
