"""Rotating transports with the released httpx and httpx2, against a real server."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import AsyncIterator
from typing import Any

import httpx
import httpx2
import pytest

from headgate import (
    CooldownResource,
    InvalidArgument,
    InvalidType,
    PoolExhausted,
    Resource,
    ResourcePool,
    RetryOperation,
)
from headgate.integrations.httpx import RotatingSyncTransport, RotatingTransport
from tests.support.integrations.upstream import Answer, Upstream, refusal, serving

pytestmark = pytest.mark.integration
LIBRARIES = pytest.mark.parametrize("library", [httpx, httpx2], ids=["httpx", "httpx2"])
FINE = Answer(200, {}, b"fine")
CHUNKS = [b"one ", b"two ", b"three"]


def pool_of(*keys: str, **options: Any) -> ResourcePool[str]:
    return ResourcePool({key: key for key in keys}, **options)


def send(upstream: Upstream, pool: ResourcePool[str], library: Any = httpx, **how: Any) -> Any:
    """One POST by a client of the library; the response."""
    return send_many(upstream, pool, 1, library, **how)[0]


def send_many(upstream: Upstream, pool: ResourcePool[str], times: int, library: Any = httpx, **how: Any) -> list[Any]:
    content, timeout, headers = how.pop("content", b"{}"), how.pop("timeout", 5), how.pop("headers", {})

    async def main() -> list[Any]:
        transport = RotatingTransport(pool, retry_delay=0, **how)
        async with library.AsyncClient(transport=transport, timeout=timeout) as client:
            made = content() if callable(content) else content
            return [await client.post(upstream.url, content=made, headers=headers) for _ in range(times)]

    return asyncio.run(main())


def statuses(pool: ResourcePool[str]) -> dict[str, str]:
    return {key: one["status"] for key, one in pool.snapshot().items()}


def in_flight(pool: ResourcePool[str]) -> int:
    return sum(one["in_flight"] for one in pool.snapshot().values())


# -- rotation ---------------------------------------------------------------------------------------------------------


@LIBRARIES
def test_c20_keys_take_turns_and_refused_ones_rest(library: Any, upstream: Upstream) -> None:
    pool = pool_of("revoked", "limited", "good")
    upstream.answers = {"revoked": [refusal(401)], "limited": [refusal(429, retry_after="60")]}
    answers = send_many(upstream, pool, 3, library)
    assert [answer.status_code for answer in answers] == [200] * 3
    assert upstream.keys == ["revoked", "limited", "good", "good", "good"]
    assert statuses(pool) == {"revoked": "disabled", "limited": "cooling_down", "good": "healthy"}
    assert 50 < pool.snapshot()["limited"]["cooldown_seconds_remaining"] <= 60
    assert in_flight(pool) == 0
    assert pool.stats().runs_ok == 3


@LIBRARIES
def test_c20_the_sync_transport_does_the_same(library: Any, upstream: Upstream) -> None:
    pool = pool_of("revoked", "limited", "broken", "good", max_attempts=4)
    upstream.answers = {
        "revoked": [refusal(403)],
        "limited": [refusal(529)],
        "broken": [Answer(200, {}, CHUNKS, cut_at=0)],
        "good": [Answer(200, {}, CHUNKS)],
    }
    with library.Client(transport=RotatingSyncTransport(pool, retry_delay=0)) as client:
        assert client.post(upstream.url, content=b"{}").content == b"one two three"
        with client.stream("POST", upstream.url) as response:
            chunks = response.iter_raw()
            assert next(chunks) == b"one "
            assert in_flight(pool) == 1
    assert upstream.keys[:4] == ["revoked", "limited", "broken", "good"]
    assert statuses(pool) == {
        "revoked": "disabled",
        "limited": "cooling_down",
        "broken": "healthy",
        "good": "healthy",
    }
    assert in_flight(pool) == 0


@pytest.mark.parametrize(
    ("refused", "status"),
    [
        (refusal(401), "disabled"),
        (refusal(402), "disabled"),
        (refusal(403), "disabled"),
        (refusal(429), "cooling_down"),
        (refusal(529), "cooling_down"),
        (refusal(429, "insufficient_quota"), "disabled"),
        (refusal(500), "healthy"),
        (refusal(503), "healthy"),
        (Answer(cut_at=-1), "healthy"),
        (Answer(stall_at=-1), "healthy"),
        (Answer(200, {}, CHUNKS, cut_at=0), "healthy"),
        (Answer(200, {}, CHUNKS, stall_at=0), "healthy"),
    ],
)
def test_c20_before_the_first_byte_every_failure_is_tried_elsewhere(
    refused: Answer, status: str, upstream: Upstream
) -> None:
    pool = pool_of("bad", "good")
    upstream.answers = {"bad": [refused], "good": [FINE]}
    assert send(upstream, pool, timeout=2.0).content == b"fine"
    assert (upstream.keys, statuses(pool)["bad"]) == (["bad", "good"], status)


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({"retry-after": "40"}, 40),
        ({"retry-after-ms": "40000"}, 40),
        ({"x-ratelimit-remaining-requests": "0", "x-ratelimit-reset-requests": "40s"}, 40),
        ({"ratelimit": '"default";r=0;t=40'}, 40),
        ({"retry-after": "-3 bananas", "x-ratelimit-reset-tokens": "\xff", "ratelimit": ";;="}, 30),
    ],
)
def test_c20_every_family_of_headers_is_honoured(headers: dict[str, str], seconds: float, upstream: Upstream) -> None:
    pool = pool_of("limited", "good")
    upstream.answers = {"limited": [Answer(429, headers, b"")]}
    send(upstream, pool)
    assert seconds - 5 < pool.snapshot()["limited"]["cooldown_seconds_remaining"] <= seconds


def test_c20_a_key_whose_good_answer_says_that_nothing_remains_gets_a_learned_quota(upstream: Upstream) -> None:
    pool = pool_of("spent", "good")
    headers = {"x-ratelimit-remaining-requests": "0", "x-ratelimit-reset-requests": "40s"}
    upstream.answers = {"spent": [Answer(200, headers, b"fine")]}
    assert [answer.status_code for answer in send_many(upstream, pool, 3)] == [200] * 3
    assert upstream.keys == ["spent", "good", "good"], "no request was refused"
    spent = pool.snapshot()["spent"]
    assert (spent["status"], spent["quota"]["left"]) == ("healthy", {"requests": 0.0})
    assert 30 < spent["quota"]["seconds_until_open"] <= 41


def test_c20_a_good_answer_with_something_left_does_not(upstream: Upstream) -> None:
    pool = pool_of("a")
    headers = {"x-ratelimit-remaining-requests": "1", "x-ratelimit-reset-requests": "40s"}
    upstream.answers = {"a": [Answer(200, headers, b"fine")]}
    send_many(upstream, pool, 2)
    assert upstream.keys == ["a", "a"]


def test_c20_other_errors_are_the_callers(upstream: Upstream) -> None:
    pool = pool_of("a", "b")
    upstream.answers = {"a": [refusal(404, "not_found_error")]}
    answer = send(upstream, pool)
    assert (answer.status_code, answer.json()["error"]["type"]) == (404, "not_found_error")
    assert upstream.keys == ["a"]
    assert "x-should-retry" not in answer.headers


def test_c20_when_every_key_is_refused_the_client_gets_the_last_refusal(upstream: Upstream) -> None:
    pool = pool_of("a", "b")
    upstream.answers = {"a": [refusal(401, "first")], "b": [refusal(429, "second")]}
    answer = send(upstream, pool)
    assert (answer.status_code, answer.json()["error"]["type"]) == (429, "second")
    assert answer.headers["x-should-retry"] == "false"
    assert pool.stats().runs_exhausted == 1


def test_c20_a_key_that_was_disabled_last_does_not_hide_what_the_others_were_refused_for(upstream: Upstream) -> None:
    pool = pool_of("a", "b", "c")
    upstream.answers = {"a": [refusal(429, "first", retry_after="60")], "b": [refusal(401, "second")]}
    answer = send(upstream, pool, max_attempts=2)
    assert (answer.status_code, answer.json()["error"]["type"]) == (429, "first")


def test_c20_if_only_a_disabled_key_was_tried_the_client_gets_that_refusal(upstream: Upstream) -> None:
    upstream.answers = {"a": [refusal(401, "only")]}
    assert send(upstream, pool_of("a", "b"), max_attempts=1).status_code == 401


def test_c20_when_no_key_is_left_at_the_start_the_error_is_the_pools(upstream: Upstream) -> None:
    pool = pool_of("a")
    upstream.answers = {"a": [refusal(429, retry_after="60")]}
    send(upstream, pool)
    with pytest.raises(PoolExhausted, match="no eligible resource"):
        send(upstream, pool)
    assert upstream.keys == ["a"]


def test_c20_when_no_connection_is_made_the_error_is_the_clients(upstream: Upstream) -> None:
    pool = pool_of("a", "b")
    upstream.answers = {"a": [Answer(cut_at=-1)], "b": [Answer(cut_at=-1)]}
    with pytest.raises(httpx.RemoteProtocolError):
        send(upstream, pool)
    assert len(upstream.keys) == 3
    assert in_flight(pool) == 0


def test_c20_options_of_calls_are_options_of_the_transport(upstream: Upstream) -> None:
    pool: ResourcePool[str] = ResourcePool([Resource("a", "a"), Resource("b", "b", tags={"eu"})])
    send(upstream, pool, tags={"eu"}, max_attempts=1)
    assert upstream.keys == ["b"]
    with pytest.raises(InvalidType, match="no option 'timeot'"):
        RotatingTransport(pool, timeot=5)  # type: ignore[call-arg]


def test_c20_the_pools_own_classifier_goes_first(upstream: Upstream) -> None:
    def classify(outcome: Any) -> Any:
        return CooldownResource(5, "teapot") if getattr(outcome, "status_code", 0) == 418 else None

    pool = pool_of("a", "b", "c", classify=classify)
    upstream.answers = {"a": [Answer(418)], "b": [refusal(401)], "c": [FINE]}
    assert send(upstream, pool).content == b"fine"
    assert statuses(pool) == {"a": "cooling_down", "b": "disabled", "c": "healthy"}


# -- bodies -----------------------------------------------------------------------------------------------------------


def test_c20_a_body_that_cannot_be_replayed_is_sent_once(upstream: Upstream) -> None:
    async def parts() -> AsyncIterator[bytes]:
        yield b"{"
        yield b"}"

    pool = pool_of("limited", "good")
    upstream.answers = {"limited": [refusal(429)]}
    assert send(upstream, pool, content=parts).status_code == 429
    assert (upstream.keys, statuses(pool)["limited"]) == (["limited"], "cooling_down")


def test_c20_a_body_is_the_same_in_every_attempt_and_so_is_a_form(upstream: Upstream) -> None:
    pool = pool_of("limited", "good")
    upstream.answers = {"limited": [refusal(500)]}

    async def main() -> None:
        async with httpx.AsyncClient(transport=RotatingTransport(pool, retry_delay=0)) as client:
            await client.post(upstream.url, files={"file": b"contents of a file"})

    asyncio.run(main())
    [first, second] = upstream.seen
    assert first.body == second.body
    assert b"contents of a file" in first.body


# -- streams ----------------------------------------------------------------------------------------------------------


@LIBRARIES
@pytest.mark.parametrize("how", [{"cut_at": 1}, {"stall_at": 1}])
def test_c20_after_the_first_byte_nothing_is_tried_again(library: Any, how: Any, upstream: Upstream) -> None:
    pool = pool_of("a", "b")
    upstream.answers = {"a": [Answer(200, {}, CHUNKS, **how)]}
    got = []

    async def main() -> None:
        transport = RotatingTransport(pool)
        async with library.AsyncClient(transport=transport, timeout=2.0) as client:
            async with client.stream("POST", upstream.url) as response:
                async for chunk in response.aiter_raw():
                    got.append(chunk)

    with pytest.raises((library.RemoteProtocolError, library.ReadTimeout)):
        asyncio.run(main())
    assert (got, upstream.keys, in_flight(pool)) == ([b"one "], ["a"], 0)


def test_c20_a_stream_holds_its_key_until_it_ends(upstream: Upstream) -> None:
    pool = pool_of("a")
    upstream.answers = {"a": [Answer(200, {}, CHUNKS)]}

    async def main() -> None:
        async with httpx.AsyncClient(transport=RotatingTransport(pool)) as client:
            async with client.stream("POST", upstream.url) as response:
                assert in_flight(pool) == 1
                assert await response.aread() == b"one two three"
                assert in_flight(pool) == 0

    asyncio.run(main())


@pytest.mark.parametrize("how", ["closed", "cancelled", "dropped"])
def test_c20_a_stream_abandoned_half_way_ends_its_use_of_the_key(how: str, upstream: Upstream) -> None:
    pool = pool_of("a")
    upstream.answers = {"a": [Answer(200, {}, CHUNKS, stall_at=1)]}

    async def main() -> None:
        async with httpx.AsyncClient(transport=RotatingTransport(pool)) as client:
            if how == "dropped":
                request = client.build_request("POST", upstream.url)
                response = await client.send(request, stream=True)
                assert in_flight(pool) == 1
                del response
                gc.collect()
                return
            async with client.stream("POST", upstream.url) as response:
                chunks = response.aiter_raw()
                assert await anext(chunks) == b"one "
                assert in_flight(pool) == 1
                if how == "cancelled":
                    with pytest.raises(TimeoutError):
                        async with asyncio.timeout(0.05):
                            await anext(chunks)

    asyncio.run(main())
    assert in_flight(pool) == 0
    assert statuses(pool) == {"a": "healthy"}


def test_c20_a_request_that_is_cancelled_before_its_answer_ends_its_use(upstream: Upstream) -> None:
    pool = pool_of("a")
    upstream.answers = {"a": [Answer(stall_at=-1)]}

    async def main() -> None:
        async with httpx.AsyncClient(transport=RotatingTransport(pool)) as client:
            request = asyncio.create_task(client.post(upstream.url))
            while not upstream.keys:  # noqa: ASYNC110 - a thread of the upstream adds them
                await asyncio.sleep(0.005)
            request.cancel()
            await asyncio.wait([request])
            assert request.cancelled()

    asyncio.run(main())
    assert (in_flight(pool), upstream.keys) == (0, ["a"])


# -- where keys go ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("header", ["x-api-key", "Authorization"])
def test_c20_a_redirect_to_another_host_does_not_carry_the_key(header: str, upstream: Upstream) -> None:
    with serving() as elsewhere:
        upstream.answers = {"secret": [Answer(307, {"location": f"{elsewhere.url}/taken"})]}

        async def main() -> Any:
            transport = RotatingTransport(pool_of("secret"), header=header)
            async with httpx.AsyncClient(transport=transport, follow_redirects=True) as client:
                return await client.post(upstream.url, content=b"{}")

        assert asyncio.run(main()).status_code == 200
        [seen] = elsewhere.seen
        assert seen.path == "/taken"
        assert "secret" not in str(seen.headers)


def test_c20_hosts_names_where_keys_may_go(upstream: Upstream, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "headgate"):
        send(upstream, pool_of("secret"), hosts=["api.example.com"])
        send(upstream, pool_of("secret"), hosts=["127.0.0.1:1"])
    assert upstream.keys == [None, None]
    assert "carries no key" in caplog.text
    send(upstream, pool_of("secret"), hosts=["127.0.0.1"])
    send(upstream, pool_of("secret"), hosts=[f"127.0.0.1:{upstream.port}"])
    assert upstream.keys[2:] == ["secret", "secret"]


@pytest.mark.parametrize("hosts", [None, ["api.example.com"]])
def test_c20_without_tls_keys_stay_on_this_machine_unless_told(hosts: Any) -> None:
    sent = []

    def answer(request: httpx.Request) -> httpx.Response:
        sent.append(request.headers.get("authorization"))
        return httpx.Response(200)

    async def main(insecure: bool) -> None:
        options = {"hosts": hosts, "insecure": insecure, "transport": httpx.MockTransport(answer)}
        async with httpx.AsyncClient(transport=RotatingTransport(pool_of("secret"), **options)) as client:
            await client.get("http://api.example.com")

    with pytest.raises(InvalidArgument, match="without TLS") as caught:
        asyncio.run(main(False))
    assert "secret" not in str(caught.value)
    assert not sent
    asyncio.run(main(True))
    assert sent == ["Bearer secret"]


def test_c20_the_client_never_sees_the_key(upstream: Upstream) -> None:
    answer = send(upstream, pool_of("secret"))
    assert upstream.keys == ["secret"]
    assert "secret" not in str(answer.request.headers)


@pytest.mark.parametrize(
    ("header", "sent", "expected"),
    [
        (None, {}, ("authorization", "Bearer k")),
        (None, {"x-api-key": "placeholder"}, ("x-api-key", "k")),
        (None, {"x-goog-api-key": "placeholder"}, ("x-goog-api-key", "k")),
        ("api-key", {}, ("api-key", "k")),
        (lambda resource: {"X-Token": f"{resource.value}!"}, {}, ("x-token", "k!")),
    ],
)
def test_c20_the_key_goes_into_the_header_that_is_meant(
    header: Any, sent: dict[str, str], expected: tuple[str, str], upstream: Upstream
) -> None:
    send(upstream, pool_of("k"), header=header, headers=sent)
    name, value = expected
    assert upstream.seen[0].headers[name] == value


@pytest.mark.parametrize("value", ["line\nbreak", "", "kéy", 5])
def test_c20_a_value_that_no_header_may_have_is_refused_without_showing_it(value: Any, upstream: Upstream) -> None:
    with pytest.raises((InvalidArgument, InvalidType), match="'key-1'") as caught:
        send(upstream, ResourcePool({"key-1": value}))
    assert not value or str(value) not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hosts": "api.example.com"}, "list of host names"),
        ({"hosts": ["https://api.example.com"]}, "names such as"),
        ({"header": 5}, "header must be"),
        ({"proxies": True, "header": "x-api-key"}, "proxies=True"),
    ],
)
def test_c20_bad_options_are_refused_at_once(options: Any, message: str) -> None:
    with pytest.raises((InvalidArgument, InvalidType), match=message):
        RotatingTransport(pool_of("k"), **options)
    with pytest.raises(InvalidType, match="takes a ResourcePool"):
        RotatingTransport(["k"])  # type: ignore[arg-type]


# -- proxies ----------------------------------------------------------------------------------------------------------


def test_c20_a_pool_of_proxies_works_too(upstream: Upstream) -> None:
    with serving() as blocked, serving() as good:
        blocked.answers = {None: [Answer(403)]}
        good.answers = {None: [FINE]}
        proxies = {"dead": "http://127.0.0.1:1", "blocked": blocked.url, "good": good.url}
        pool = ResourcePool(proxies)
        answers = send_many(upstream, pool, 2, proxies=True)
        assert [answer.content for answer in answers] == [b"fine", b"fine"]
        assert statuses(pool) == {"dead": "cooling_down", "blocked": "cooling_down", "good": "healthy"}
        assert len(good.seen) == 2
        assert good.seen[0].path.startswith(upstream.url), "a proxy is asked for the whole URL"
        assert "authorization" not in good.seen[0].headers


def test_r80_signals_of_a_classifier_may_be_classes(upstream: Upstream) -> None:
    pool = pool_of("a", "b", classify=lambda outcome: RetryOperation if upstream.keys == ["a"] else None)
    send(upstream, pool)
    assert upstream.keys == ["a", "b"]


@pytest.mark.parametrize("broken", ["reading", "closing"])
def test_c20_a_transport_that_fails_in_any_way_leaves_no_key_in_use(broken: str) -> None:
    class Broken(httpx.AsyncByteStream):
        async def __aiter__(self) -> AsyncIterator[bytes]:
            if broken == "reading":
                raise ZeroDivisionError
            yield b"refused"

        async def aclose(self) -> None:
            if broken == "closing":
                raise ZeroDivisionError

    class Inner(httpx.AsyncBaseTransport):
        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            return httpx.Response(429, stream=Broken())

    async def main() -> None:
        async with httpx.AsyncClient(transport=RotatingTransport(pool, transport=Inner())) as client:
            await client.post("https://api.example.com")

    pool = pool_of("a", "b")
    with pytest.raises(ZeroDivisionError):
        asyncio.run(main())
    assert in_flight(pool) == 0


def test_c20_compressed_and_broken_refusals_are_judged_by_what_can_be_read() -> None:
    import gzip

    bodies = {
        "packed": gzip.compress(b'{"error": {"code": "insufficient_quota"}}'),
        "broken": b"not gzip at all",
        "long": gzip.compress(b"x")[:5] + b"\0" * 200_000,
    }

    def answer(request: httpx.Request) -> httpx.Response:
        key = request.headers["authorization"].removeprefix("Bearer ")
        if key not in bodies:
            return httpx.Response(200, content=b"fine")
        stream = httpx.ByteStream(bodies[key])
        return httpx.Response(429, headers={"content-encoding": "gzip"}, stream=stream)

    async def main() -> bytes:
        transport = RotatingTransport(pool, transport=httpx.MockTransport(answer), retry_delay=0)
        async with httpx.AsyncClient(transport=transport) as client:
            return (await client.post("https://api.example.com")).content

    pool = pool_of("packed", "broken", "long", "good", max_attempts=4)
    assert asyncio.run(main()) == b"fine"
    assert statuses(pool) == {
        "packed": "disabled",
        "broken": "cooling_down",
        "long": "cooling_down",
        "good": "healthy",
    }


@LIBRARIES
def test_c20_a_dropped_answer_gives_its_key_back_without_the_garbage_collector(
    library: Any, upstream: Upstream
) -> None:
    pool = pool_of("good")
    upstream.answers = {"good": [Answer(200, {}, CHUNKS)]}

    async def main() -> None:
        async with RotatingTransport(pool) as transport:
            answer = await transport.handle_async_request(library.Request("POST", upstream.url, content=b"{}"))
            assert in_flight(pool) == 1
            gc.disable()
            try:
                del answer
                assert in_flight(pool) == 0
            finally:
                gc.enable()

    asyncio.run(main())
