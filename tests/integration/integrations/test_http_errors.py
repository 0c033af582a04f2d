"""headgate.http_errors with the errors and responses of released clients, from a real server."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import aiohttp
import httpx
import httpx2
import pytest
import requests

import headgate
from headgate import CooldownResource, DisableResource, Resource, ResourcePool, RetryOperation, TaskPool, http_errors
from headgate.testing import run
from tests.sdks import anthropic, openai
from tests.support.integrations.upstream import Answer, Upstream, anthropic_events, refusal, streamed

pytestmark = pytest.mark.integration
MESSAGES: Any = [{"role": "user", "content": "hi"}]

# -- clients: each makes one request and raises the error of its library ---------------------------------------------


async def by_httpx(url: str, timeout: float = 10) -> None:
    async with httpx.AsyncClient(timeout=timeout, trust_env=False) as client:
        (await client.get(url)).raise_for_status()


async def by_httpx2(url: str, timeout: float = 10) -> None:
    async with httpx2.AsyncClient(timeout=timeout, trust_env=False) as client:
        (await client.get(url)).raise_for_status()


async def by_aiohttp(url: str, timeout: float = 10) -> None:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=timeout)) as session:
        async with session.get(url) as response:
            response.raise_for_status()
            await response.read()


async def by_requests(url: str, timeout: float = 10) -> None:
    def get() -> None:
        with requests.Session() as session:
            session.trust_env = False
            session.get(url, timeout=timeout).raise_for_status()

    await asyncio.to_thread(get)


async def by_openai(url: str, timeout: float = 10) -> None:
    async with openai.AsyncOpenAI(api_key="k", base_url=f"{url}/v1", max_retries=0, timeout=timeout) as client:
        await client.chat.completions.create(model="m", messages=MESSAGES)


async def by_anthropic(url: str, timeout: float = 10) -> None:
    async with anthropic.AsyncAnthropic(api_key="k", base_url=url, max_retries=0, timeout=timeout) as client:
        await client.messages.create(model="m", max_tokens=5, messages=MESSAGES)


CLIENTS = [by_httpx, by_httpx2, by_aiohttp, by_requests, by_openai, by_anthropic]
Client = Callable[..., Awaitable[None]]
every_client = pytest.mark.parametrize("client", CLIENTS)


def error_of(client: Client, url: str, **options: float) -> Exception:
    async def main() -> Exception:
        try:
            await client(url, **options)
        except Exception as error:
            return error
        raise AssertionError("it succeeded")

    return asyncio.run(main())


def all_answer(upstream: Upstream, answer: Answer) -> None:
    upstream.answers = {None: [answer], "k": [answer]}


@every_client
def test_r80_statuses_of_every_client(client: Client, upstream: Upstream) -> None:
    expected: dict[int, type[Exception] | None] = {
        400: None,
        401: DisableResource,
        402: DisableResource,
        403: DisableResource,
        404: None,
        409: None,
        422: None,
        429: CooldownResource,
        500: RetryOperation,
        503: RetryOperation,
        529: CooldownResource,
    }
    found = {}
    for status in expected:
        all_answer(upstream, refusal(status, retry_after="7"))
        signal = http_errors(error_of(client, upstream.url))
        found[status] = None if signal is None else type(signal)
        if isinstance(signal, CooldownResource):
            assert signal.cooldown_seconds == 7.0
    assert found == expected


@every_client
def test_r80_timeouts_and_connection_errors_retry_elsewhere(client: Client, upstream: Upstream) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        refused = error_of(client, f"http://127.0.0.1:{taken.getsockname()[1]}")  # bound, and nobody listens
    assert isinstance(http_errors(refused), RetryOperation)
    for answer in (Answer(stall_at=-1), Answer(cut_at=-1)):
        all_answer(upstream, answer)
        assert isinstance(http_errors(error_of(client, upstream.url, timeout=0.2)), RetryOperation), answer


@pytest.mark.parametrize("client", [by_openai, by_anthropic])
@pytest.mark.parametrize(
    ("status", "kind", "expected"),
    [
        (429, "insufficient_quota", DisableResource),
        (429, "rate_limit_exceeded", CooldownResource),
        (400, "billing_error", DisableResource),
        (500, "overloaded_error", CooldownResource),
        (400, "invalid_request_error", type(None)),
    ],
)
def test_r80_what_the_provider_says_goes_before_the_status(
    client: Client, status: int, kind: str, expected: type, upstream: Upstream
) -> None:
    all_answer(upstream, refusal(status, kind))
    assert type(http_errors(error_of(client, upstream.url))) is expected


def test_r80_an_error_in_the_middle_of_a_stream_is_understood(upstream: Upstream) -> None:
    overloaded = {"type": "error", "error": {"type": "overloaded_error", "message": "Overloaded"}}
    events = [*anthropic_events()[:3], f"event: error\ndata: {json.dumps(overloaded)}\n\n".encode()]
    all_answer(upstream, streamed(events))

    async def stream(url: str) -> None:
        async with anthropic.AsyncAnthropic(api_key="k", base_url=url, max_retries=0) as client:
            async with client.messages.stream(model="m", max_tokens=5, messages=MESSAGES) as events:
                async for _ in events:
                    pass

    error = error_of(stream, upstream.url)
    assert isinstance(http_errors(error), CooldownResource), repr(error)


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({"retry-after-ms": "1500", "retry-after": "2"}, 1.5),
        ({"x-ratelimit-remaining-tokens": "0", "x-ratelimit-reset-tokens": "6m0s"}, 360.0),
        ({"RateLimit": '"default";r=0;t=30'}, 30.0),
        ({"retry-after": "\x01garbage"}, None),
        ({}, None),
    ],
)
def test_r80_rate_limit_headers_are_honoured(headers: dict[str, str], seconds: float | None) -> None:
    request = httpx.Request("GET", "https://api.example")
    signal = http_errors(httpx.Response(429, headers=headers, request=request))
    assert isinstance(signal, CooldownResource)
    assert signal.cooldown_seconds == seconds


def test_r80_responses_that_are_returned_are_understood(upstream: Upstream) -> None:
    all_answer(upstream, refusal(429, "insufficient_quota"))

    async def main() -> list[object]:
        async with httpx.AsyncClient(trust_env=False) as client, aiohttp.ClientSession() as session:
            by_aiohttp = await session.get(upstream.url)
            await by_aiohttp.read()
            return [await client.get(upstream.url), by_aiohttp]

    for response in (*asyncio.run(main()), requests.get(upstream.url, timeout=5)):
        assert isinstance(http_errors(response), DisableResource), response


# -- shapes of SDKs that are not installed with the others -----------------------------------------------------------


class GoogleError(Exception):
    """As google.genai.errors.APIError."""

    def __init__(self, code: int, status: str, details: list[dict[str, Any]]) -> None:
        super().__init__(f"{code} {status}")
        self.code, self.status, self.response = code, status, httpx.Response(code)
        self.details = {"error": {"code": code, "status": status, "details": details}}


class BotoError(Exception):
    """As botocore.exceptions.ClientError."""

    def __init__(self, code: str, status: int, **headers: str) -> None:
        super().__init__(code)
        metadata = {"HTTPStatusCode": status, "HTTPHeaders": headers}
        self.response = {"Error": {"Code": code, "Message": "no"}, "ResponseMetadata": metadata}


def google_and_botocore() -> tuple[Any, Any]:
    """The real classes where they are installed, else stand-ins of the same shape."""

    def google(code: int, status: str, details: list[dict[str, Any]]) -> Exception:
        try:
            from google.genai import errors
        except ImportError:
            return GoogleError(code, status, details)
        return errors.APIError(code, {"error": {"code": code, "status": status, "details": details}})

    def boto(code: str, status: int, **headers: str) -> Exception:
        error = BotoError(code, status, **headers)
        try:
            from botocore.exceptions import ClientError
        except ImportError:
            return error
        return ClientError(error.response, "InvokeModel")

    return google, boto


@pytest.mark.parametrize(("google", "boto"), [(GoogleError, BotoError), google_and_botocore()])
def test_r80_errors_of_google_and_botocore(google: Any, boto: Any) -> None:
    cooled = http_errors(google(429, "RESOURCE_EXHAUSTED", [{"@type": "RetryInfo", "retryDelay": "34s"}]))
    assert isinstance(cooled, CooldownResource)
    assert cooled.cooldown_seconds == 34.0
    assert isinstance(http_errors(google(400, "INVALID_ARGUMENT", [{"reason": "API_KEY_INVALID"}])), DisableResource)
    assert isinstance(http_errors(google(503, "UNAVAILABLE", [])), RetryOperation)
    assert http_errors(google(404, "NOT_FOUND", [])) is None

    throttled = http_errors(boto("ThrottlingException", 400, **{"retry-after": "3"}))
    assert isinstance(throttled, CooldownResource)
    assert throttled.cooldown_seconds == 3.0
    assert isinstance(http_errors(boto("ExpiredTokenException", 400)), DisableResource)
    assert isinstance(http_errors(boto("InternalServerError", 500)), RetryOperation)
    assert http_errors(boto("ValidationException", 400)) is None


class Hostile(Exception):
    @property
    def status_code(self) -> int:
        raise RuntimeError("no")

    @property
    def response(self) -> int:
        raise RuntimeError("no")


@pytest.mark.parametrize(
    "outcome",
    [None, 5, "429", {"status_code": 429}, ValueError("429"), KeyError(401), Hostile(), headgate.PoolClosed("429")],
    ids=repr,
)
def test_r80_everything_else_is_the_callers(outcome: object) -> None:
    assert http_errors(outcome) is None


def test_r80_reasons_do_not_repeat_what_the_provider_wrote() -> None:
    body = {"error": {"message": "Incorrect API key provided: sk-abc", "code": "invalid_api_key"}}
    signal = http_errors(httpx.Response(401, json=body, request=httpx.Request("GET", "https://api.example")))
    assert signal is not None
    assert signal.reason == "HTTP 401 (invalid_api_key)"


# -- in pools ---------------------------------------------------------------------------------------------------------


def three_keys(**options: Any) -> ResourcePool[str]:
    return ResourcePool({name: f"secret-{name}" for name in ("revoked", "limited", "good")}, **options)


async def ask(key: Resource[str]) -> str:
    """What a routine on a worker does too: raises a real error of the SDK."""
    statuses = {"revoked": 401, "limited": 429}
    status = statuses.get(key.resource_id)
    if status is None:
        return "fine"
    headers = {"retry-after": "60"}
    response = httpx2.Response(status, headers=headers, request=httpx2.Request("POST", "https://api.example"))
    kind = openai.AuthenticationError if status == 401 else openai.RateLimitError
    raise kind("no", response=response, body={"code": None})


def check_learned(pool: ResourcePool[str]) -> None:
    statuses = {name: one["status"] for name, one in pool.snapshot().items()}
    assert statuses == {"revoked": "disabled", "limited": "cooling_down", "good": "healthy"}


def test_r80_a_pool_learns_from_the_errors_of_an_sdk() -> None:
    async def main() -> None:
        pool = three_keys(classify=http_errors)
        assert [await pool.run(ask) for _ in range(3)] == ["fine"] * 3
        check_learned(pool)
        assert 59 < pool.snapshot()["limited"]["cooldown_seconds_remaining"] <= 60

    run(main())


def test_r80_a_task_pool_with_resources_learns_too() -> None:
    async def main() -> None:
        keys = three_keys(classify=http_errors)
        async with TaskPool("asking", resources=keys) as pool:
            handles = [await pool.submit(ask) for _ in range(3)]
            assert [await handle for handle in handles] == ["fine"] * 3
        check_learned(keys)

    run(main())


def test_r80_errors_of_sdks_travel_from_workers_with_what_they_say() -> None:
    from headgate.workers.serialization.pickling import dump_exception, load_exception

    @contextmanager
    def raised(name: str) -> Iterator[list[BaseException]]:
        caught: list[BaseException] = []
        try:
            run(ask(Resource(name, "value")))
        except Exception as error:
            caught.append(load_exception(dump_exception(error, "a worker")))
        yield caught

    with raised("limited") as [limited], raised("revoked") as [revoked]:
        signal = http_errors(limited)
        assert isinstance(signal, CooldownResource)
        assert signal.cooldown_seconds == 60.0
        assert isinstance(http_errors(revoked), DisableResource)


@pytest.mark.parametrize("status", [401, 403, 429])
def test_r80_a_pool_without_a_classifier_logs_one_hint(status: int, caplog: pytest.LogCaptureFixture) -> None:
    async def refused(key: Resource[str]) -> None:
        httpx.Response(status, request=httpx.Request("GET", "https://api.example")).raise_for_status()

    async def main() -> None:
        pool = three_keys(name="keys")
        for _ in range(3):
            with pytest.raises(httpx.HTTPStatusError):
                await pool.run(refused)

    with caplog.at_level(logging.WARNING, "headgate"):
        run(main())
    [record] = caplog.records
    assert record.getMessage() == (
        f"keys: an operation raised HTTPStatusError with HTTP status {status}, which says something about its resource"
        "; pass classify=headgate.http_errors to the pool to have such resources cooled or disabled"
    )


def test_r80_other_errors_and_pools_with_a_classifier_log_no_hint(caplog: pytest.LogCaptureFixture) -> None:
    async def fails(key: Resource[str]) -> None:
        httpx.Response(404, request=httpx.Request("GET", "https://api.example")).raise_for_status()

    async def refused(key: Resource[str]) -> None:
        httpx.Response(429, request=httpx.Request("GET", "https://api.example")).raise_for_status()

    async def main() -> None:
        for pool, operation in ((three_keys(), fails), (three_keys(classify=lambda outcome: None), refused)):
            with pytest.raises(httpx.HTTPStatusError):
                await pool.run(operation)

    with caplog.at_level(logging.WARNING, "headgate"):
        run(main())
    assert not caplog.records
