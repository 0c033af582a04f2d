"""The proxy of keys as a real server: the released SDKs, streams, rotation, clients and upstreams that misbehave."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import pytest

from headgate import Resource, ResourcePool
from headgate.integrations.keys_proxy import KeysProxy, Limits, ProxyRules, Tokens
from tests.ports import number_of, reserved_port
from tests.sdks import anthropic, openai
from tests.support.integrations.proxies import (
    CLIENTS,
    GATEWAY_TOKEN,
    KEY,
    OTHER_TOKEN,
    PATIENCE,
    TOKEN,
    Proxy,
    Reply,
    proxying,
    read_reply,
    until,
    written,
)
from tests.support.integrations.upstream import (
    Answer,
    Seen,
    Upstream,
    answering,
    openai_events,
    refusal,
    serving,
    streamed,
    usual,
)

pytestmark = pytest.mark.integration
MESSAGES: Any = [{"role": "user", "content": "hi"}]
SLOW = Limits(client_timeout=0.2, timeout=600)


@pytest.fixture(scope="module")
def quiet_upstream() -> Iterator[Upstream]:
    """An upstream that no request of these tests may reach."""
    with serving() as server:
        yield server


@pytest.fixture(scope="module")
def shared(quiet_upstream: Upstream) -> Iterator[Proxy]:
    """A proxy for requests that change nothing."""
    with proxying(quiet_upstream, limits=Limits(max_body=1000)) as made:
        yield made


@pytest.fixture
def proxy(upstream: Upstream) -> Iterator[Proxy]:
    with proxying(upstream) as made:
        yield made


# -- the released SDKs ------------------------------------------------------------------------------------------------


def three_keys() -> ResourcePool[str]:
    return ResourcePool({"revoked": "sk-revoked-0123456789", "limited": "sk-limited-0123456789", "good": KEY})


def revoke_and_limit(upstream: Upstream) -> None:
    upstream.answers = {
        "sk-revoked-0123456789": [refusal(401, "authentication_error")],
        "sk-limited-0123456789": [refusal(429, "rate_limit_error", retry_after="40")],
    }


def statuses(pool: ResourcePool[str]) -> dict[str, str]:
    return {key: one["status"] for key, one in pool.snapshot().items()}


ROTATED = {"revoked": "disabled", "limited": "cooling_down", "good": "healthy"}


def test_c24_the_sdk_of_openai_works_unchanged_and_keys_rotate(upstream: Upstream) -> None:
    revoke_and_limit(upstream)
    keys = three_keys()
    with proxying(upstream, keys) as proxy, openai.OpenAI(base_url=f"{proxy.url}/v1", api_key=TOKEN) as client:
        answer = client.chat.completions.create(model="m", messages=MESSAGES)
        assert answer.choices[0].message.content == "hello"
        parts = client.chat.completions.create(model="m", messages=MESSAGES, stream=True)
        assert "".join(part.choices[0].delta.content or "" for part in parts) == "hello"
    assert [key and key[:6] for key in upstream.keys] == ["sk-rev", "sk-lim", "sk-liv", "sk-liv"]
    assert statuses(keys) == ROTATED
    assert all(TOKEN not in str(seen) for seen in upstream.seen)


def test_c24_the_sdk_of_anthropic_works_unchanged_and_keys_rotate(upstream: Upstream) -> None:
    revoke_and_limit(upstream)
    keys = three_keys()
    with (
        proxying(upstream, keys, base="") as proxy,
        anthropic.Anthropic(base_url=proxy.url, api_key=TOKEN) as client,
    ):
        answer: Any = client.messages.create(model="m", max_tokens=5, messages=MESSAGES)
        assert answer.content[0].text == "hello"
        with client.messages.stream(model="m", max_tokens=5, messages=MESSAGES) as events:
            assert "".join(events.text_stream) == "hello"
    assert statuses(keys) == ROTATED
    assert all(TOKEN not in str(seen) for seen in upstream.seen)


def test_c24_a_wrong_token_is_the_authentication_error_of_the_sdk(shared: Proxy, quiet_upstream: Upstream) -> None:
    with openai.OpenAI(base_url=f"{shared.url}/v1", api_key="sk-not-the-token-0123") as client:
        with pytest.raises(openai.AuthenticationError, match="send the token of the proxy"):
            client.chat.completions.create(model="m", messages=MESSAGES)
    assert quiet_upstream.seen == []


def test_c24_when_all_keys_rest_the_sdk_is_told_for_how_long(upstream: Upstream) -> None:
    upstream.answers = {KEY: [refusal(429, "rate_limit_error", retry_after="300")]}
    limits = Limits(wait=0.1)
    with (
        proxying(upstream, limits=limits) as proxy,
        openai.OpenAI(base_url=f"{proxy.url}/v1", api_key=TOKEN) as client,
    ):
        for _ in range(2):
            with pytest.raises(openai.RateLimitError) as caught:
                client.chat.completions.create(model="m", messages=MESSAGES)
            assert 40 < float(caught.value.response.headers["retry-after"]) <= 300
        reply = proxy.ask()
    assert (reply.status, reply.code) == (429, "pool_exhausted"), "and any other client too"
    assert 40 < float(reply.headers["retry-after"]) <= 60
    assert len(upstream.seen) == 1, "nothing was sent while the key rested, and the SDK did not try again"


# -- requests of people who may want to harm others -------------------------------------------------------------------


@pytest.mark.parametrize("status", [401, 403])
def test_c24_one_request_does_not_take_all_keys_away(upstream: Upstream, status: int) -> None:
    """What the upstream refuses with every key is refused because of the request."""

    def picky(seen: Seen) -> Answer:
        return refusal(status, "model_not_found") if b"forbidden" in seen.body else usual(seen)

    keys = {f"key-{number}": f"sk-test-{number}-0123456789" for number in range(3)}
    upstream.answers = dict.fromkeys(keys.values(), picky)
    with proxying(upstream, keys) as proxy:
        assert proxy.ask(body=b'{"model": "forbidden"}').status == status
        told = json.loads(proxy.ask("/headgate/state", b"", "GET").body)["keys"]
        disabled = [name for name, one in told.items() if one["status"] == "disabled"]
        assert len(disabled) == (1 if status == 401 else 0)
        assert proxy.ask().status == 200


def test_c24_headers_that_mean_another_account_method_or_path_do_not_go_on(upstream: Upstream) -> None:
    sent = {
        "OpenAI-Organization": "bogus",
        "OpenAI-Project": "bogus",
        "X-HTTP-Method-Override": "DELETE",
        "X-Original-URL": "/v1/files",
        "X-Rewrite-URL": "/v1/files",
        "True-Client-IP": "10.0.0.1",
    }
    with proxying(upstream) as proxy:
        assert proxy.ask(**sent).status == 200
    [seen] = upstream.seen
    assert not {name.lower() for name in sent} & seen.headers.keys()


# -- what passes through ----------------------------------------------------------------------------------------------


def test_c24_chunks_of_a_stream_pass_as_they_come(upstream: Upstream) -> None:
    upstream.answers = {KEY: [streamed(openai_events(), stall_at=1)]}
    with proxying(upstream) as proxy, proxy.connect() as made:
        made.sendall(written())
        got = b""
        while openai_events()[0] not in got:
            got += made.recv(65536)
        assert b"text/event-stream" in got
        assert openai_events()[1] not in got, "the upstream has not sent it yet"


def test_c24_compressed_answers_pass_byte_by_byte(upstream: Upstream, proxy: Proxy) -> None:
    body = gzip.compress(b"hello " * 1000, mtime=0)
    upstream.answers = {KEY: [Answer(200, {"content-encoding": "gzip", "x-own": "1", "set-cookie": "a=b"}, body)]}
    reply = proxy.ask(accept_encoding="br, gzip")
    assert (reply.status, reply.body) == (200, body)
    assert reply.headers["content-encoding"] == "gzip"
    assert reply.headers["x-own"] == "1"
    assert "set-cookie" not in reply.headers
    assert upstream.seen[-1].headers["accept-encoding"] == "gzip"


def test_c24_inbound_credentials_are_replaced_by_the_key(upstream: Upstream, proxy: Proxy) -> None:
    reply = proxy.ask(
        cookie="session=1", proxy_authorization="Basic eDp5", x_api_key="sk-of-the-client", x_headgate_tenant="ann"
    )
    assert reply.status == 200
    sent = upstream.seen[-1].headers
    assert sent["authorization"] == f"Bearer {KEY}"
    assert not {"cookie", "proxy-authorization", "x-api-key", "x-headgate-tenant"} & sent.keys()
    assert sent["host"] == f"127.0.0.1:{upstream.port}"


@pytest.mark.parametrize("name", ["x-api-key", "api-key"])
def test_c24_the_key_comes_in_the_header_in_which_the_token_was(name: str, upstream: Upstream, proxy: Proxy) -> None:
    assert proxy.ask(authorization="", **{name: TOKEN}).status == 200
    sent = upstream.seen[-1].headers
    assert sent[name] == KEY
    assert "authorization" not in sent


def test_c24_the_key_comes_in_the_header_that_the_rules_name(upstream: Upstream) -> None:
    with proxying(upstream, header="x-api-key") as proxy:
        assert proxy.ask().status == 200
    assert upstream.seen[-1].headers["x-api-key"] == KEY
    assert "authorization" not in upstream.seen[-1].headers


def test_c24_a_chunked_body_arrives_whole(upstream: Upstream, proxy: Proxy) -> None:
    head = written(body=b"", content_length="", transfer_encoding="chunked")
    assert proxy.send(head + b'4\r\n{"a"\r\n4\r\n: 1}\r\n0\r\n\r\n').status == 200
    assert upstream.seen[-1].body == b'{"a": 1}'
    assert upstream.seen[-1].headers["content-length"] == "8"


def test_c24_a_body_is_sent_again_with_another_key(upstream: Upstream) -> None:
    body = json.dumps({"text": "x" * 200_000}).encode()
    upstream.answers = {"sk-first-0123456789": [refusal(500)]}
    with proxying(upstream, {"a": "sk-first-0123456789", "b": KEY}) as proxy:
        assert proxy.ask(body=body).status == 200
    assert [seen.body == body for seen in upstream.seen] == [True, True]


@pytest.mark.parametrize("how", [{"cut_at": -1}, {"cut_at": 0}])
def test_c24_an_answer_that_breaks_before_its_first_byte_comes_from_another_key(how: Any, upstream: Upstream) -> None:
    upstream.answers = {"sk-first-0123456789": [streamed(openai_events(), **how)]}
    with proxying(upstream, {"a": "sk-first-0123456789", "b": KEY}) as proxy:
        assert proxy.ask(body=b'{"stream": true}').status == 200


def test_c24_a_stream_that_breaks_after_its_first_byte_breaks_for_the_client_too(upstream: Upstream) -> None:
    upstream.answers = {KEY: [streamed(openai_events(), cut_at=1)]}
    with proxying(upstream) as proxy:
        with httpx.Client() as client, pytest.raises(httpx.RemoteProtocolError):
            client.post(f"{proxy.url}/v1/chat/completions", headers={"authorization": f"Bearer {TOKEN}"}, json={})
        assert proxy.in_flight() == 0
    assert len(upstream.seen) == 1


@pytest.mark.parametrize("status", [400, 401, 403, 404, 422, 429, 500])
def test_c24_errors_of_the_upstream_pass_without_keys(status: int, upstream: Upstream) -> None:
    told = {"error": {"message": f"Incorrect API key provided: {KEY[:8]}****{KEY[-4:]}, {KEY}", "code": "no"}}
    upstream.answers = {KEY: [Answer(status, {"x-debug": KEY, "set-cookie": KEY}, json.dumps(told).encode())]}
    with proxying(upstream, ResourcePool({"key-1": KEY}, max_attempts=1), limits=Limits(wait=0.1)) as proxy:
        reply = proxy.ask()
    assert reply.status == status
    assert json.loads(reply.body)["error"]["code"] == "no"
    assert KEY[:6].encode() not in reply.raw
    assert KEY[-4:].encode() not in reply.raw


@pytest.mark.parametrize(
    ("headers", "body"),
    [({"content-encoding": "br"}, b"anything"), ({}, b"x" * (1 << 21)), ({"content-encoding": "gzip"}, b"not gzip")],
    ids=["unknown encoding", "too long", "wrong encoding"],
)
def test_c24_errors_that_cannot_be_searched_are_replaced(
    headers: dict[str, str], body: bytes, upstream: Upstream, proxy: Proxy
) -> None:
    upstream.answers = {KEY: [Answer(404, headers, body)]}
    reply = proxy.ask()
    assert (reply.status, reply.code) == (404, "upstream_error")


def test_c24_redirects_are_not_followed(upstream: Upstream) -> None:
    with serving() as elsewhere, proxying(upstream, paths=["/redirect"], base="") as proxy:
        target = f"{elsewhere.url}/v1/steal?key={KEY}"
        reply = proxy.ask("/redirect", json.dumps({"to": target}).encode())
        assert reply.status == 307
        assert reply.headers["location"].startswith(f"{elsewhere.url}/v1/steal?key=")
        assert KEY not in reply.headers["location"]
        assert elsewhere.seen == []


# -- hostile requests -------------------------------------------------------------------------------------------------


def test_c24_bodies_of_all_requests_are_bounded_together_and_one_tenant_leaves_some_to_others(
    upstream: Upstream,
) -> None:
    half = written(body=b"x" * 600, content_length="1000")
    with (
        proxying(upstream, limits=Limits(max_body=1000, max_bodies=1500)) as proxy,
        proxy.connect() as anns,
    ):
        anns.sendall(half)
        until(lambda: proxy.send(written(body=b"x" * 600)).status == 503)
        refused = proxy.send(written(body=b"x" * 600))
        assert (refused.code, refused.headers["retry-after"]) == ("proxy_busy", "1")
        bobs = f"Bearer {OTHER_TOKEN}"
        assert proxy.send(written(body=b"x" * 600, authorization=bobs)).status == 200
        assert proxy.send(written(body=b"x" * 950, authorization=bobs)).status == 503, "more than all may have"
        anns.sendall(b"x" * 400)
        assert read_reply(anns).status == 200
        until(
            lambda: proxy.send(written(body=b"x" * 950, authorization=bobs)).status == 200, "nothing is held any more"
        )


@pytest.mark.parametrize(
    ("raw", "status", "code"),
    [
        (written(host="evil.example"), 403, "host_not_allowed"),
        (written(origin="http://127.0.0.1"), 403, "origin_not_allowed"),
        (written(authorization=""), 401, "invalid_token"),
        (written("/v1/files"), 404, "path_not_allowed"),
        (written("/v1/chat/../files"), 400, "invalid_path"),
        (written("//v1/chat/completions"), 400, "invalid_path"),
        (written("/v1%2fchat/completions"), 400, "invalid_path"),
        (written("http://evil.example/v1/chat/completions"), 400, "invalid_path"),
        (written("evil.example:443", method="CONNECT"), 400, "invalid_path"),
        (written(method="DELETE", body=b""), 405, "method_not_allowed"),
        (written("/v1/models", method="GET", body=b"GET /v1/files HTTP/1.1\r\nx: "), 400, "body_not_allowed"),
        (
            written("/v1/models", b"", "GET", content_length="", transfer_encoding="chunked") + b"0\r\n\r\n",
            400,
            "body_not_allowed",
        ),
        (written("/v1/models", b"", "GET", content_length="9", expect="100-continue"), 400, "body_not_allowed"),
        (written(method="TRACE", body=b""), 405, "method_not_allowed"),
        (written(x_headgate_tenant="bob"), 403, "tenant_not_allowed"),
        (written(body=b"x" * 1001), 413, "body_too_long"),
        (written(body=b"", content_length="5000000000"), 413, "body_too_long"),
        (
            written(body=b"", content_length="", transfer_encoding="chunked") + b"7d0\r\n" + b"x" * 2000,
            413,
            "body_too_long",
        ),
        (written(transfer_encoding="chunked"), 400, "invalid_length"),
        (written(transfer_encoding="gzip"), 400, "invalid_request"),
        (written(content_length="-1"), 400, "invalid_request"),
        (written(content_length="2, 3"), 400, "invalid_request"),
        (written(host=""), 400, "invalid_request"),
        (b"GARBAGE\r\n\r\n", 400, "invalid_request"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 8 + b"\r\n\r\n", 400, "invalid_request"),
        (written(x="y" * 40_000), 431, "head_too_long"),
        (written(x="y" * 1_000_000), 400, "invalid_request"),
        (written(body=b"", content_length="", transfer_encoding="chunked") + b"zz\r\n", 400, "invalid_request"),
        (b"POST /v1/models HTTP/1.0\r\n\r\n", 403, "host_not_allowed"),
        (written().replace(b"HTTP/1.1", b"HTTP/3.7"), 400, "invalid_request"),
        (written().replace(b"host:", b"host: evil.example\r\nhost:"), 400, "invalid_request"),
        (written().replace(b"host:", b"host :"), 400, "invalid_request"),
    ],
)
def test_c24_a_hostile_request_gets_a_json_error_and_never_reaches_the_upstream(
    raw: bytes, status: int, code: str, shared: Proxy, quiet_upstream: Upstream
) -> None:
    reply = shared.send(raw)
    assert (reply.status, reply.code) == (status, code)
    assert reply.headers["content-type"] == "application/json"
    assert quiet_upstream.seen == []


def test_c24_a_body_after_the_declared_length_is_not_taken_for_a_request(upstream: Upstream, proxy: Proxy) -> None:
    smuggled = b"POST /v1/files HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n"
    with proxy.connect() as made:
        made.sendall(written() + smuggled)
        assert read_reply(made).status == 200
        second = read_reply(made)
    assert (second.status, second.code) == (401, "invalid_token"), "it is a request of its own, without a token"
    assert [seen.path for seen in upstream.seen] == ["/v1/chat/completions"]


def test_c24_a_refused_upload_is_answered_and_the_connection_goes_on(shared: Proxy) -> None:
    with shared.connect() as made:
        made.sendall(written(body=b"x" * 300_000))
        assert read_reply(made).status == 413
        made.sendall(written("/healthz", b"", "GET"))
        assert read_reply(made).body == b'{"status": "ok"}'


def test_c24_an_expected_continue_is_given_only_to_what_is_accepted(upstream: Upstream, proxy: Proxy) -> None:
    head = written(body=b"", content_length="2", expect="100-continue")
    with proxy.connect() as made:
        made.sendall(head)
        assert made.recv(1000).startswith(b"HTTP/1.1 100 ")
        made.sendall(b"{}")
        assert read_reply(made).status == 200
    assert "expect" not in upstream.seen[-1].headers
    with proxy.connect() as made:
        made.sendall(head.replace(b"completions", b"x"))
        assert read_reply(made).status == 404


@pytest.fixture(scope="module")
def impatient(quiet_upstream: Upstream) -> Iterator[Proxy]:
    with proxying(quiet_upstream, limits=SLOW) as made:
        yield made


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"POST /v1",
        written(body=b"{", content_length="2"),
        written(body=b"", content_length="2", expect="100-continue"),
    ],
    ids=["nothing", "half a head", "half a body", "no body"],
)
def test_c24_a_client_that_is_slow_to_ask_is_told_and_disconnected(
    raw: bytes, impatient: Proxy, quiet_upstream: Upstream
) -> None:
    with impatient.connect() as made:
        made.sendall(raw)
        if b"expect" in raw:
            made.recv(1000)
        reply = read_reply(made)
        assert (reply.status, reply.code) == (408, "client_too_slow")
        assert made.recv(1000) == b""
    assert quiet_upstream.seen == []


def test_c24_half_a_head_on_a_used_connection_is_limited_too(impatient: Proxy) -> None:
    with impatient.connect() as made:
        made.sendall(written("/healthz", b"", "GET"))
        assert read_reply(made).status == 200
        made.sendall(b"POST /v1")
        assert read_reply(made).status == 408


def test_c24_a_refused_upload_that_never_ends_is_cut(impatient: Proxy) -> None:
    with impatient.connect() as made:
        made.sendall(written(body=b"x", content_length="5000000000"))
        assert read_reply(made).status == 413
        until(lambda: is_cut(made))


def is_cut(made: socket.socket) -> bool:
    try:
        made.sendall(b"x" * 1000)
    except OSError:
        return True
    return False


# -- clients that go, upstreams that stall ----------------------------------------------------------------------------


def test_c24_a_client_that_goes_half_way_ends_the_stream_and_frees_the_key(upstream: Upstream) -> None:
    upstream.answers = {KEY: [streamed(openai_events(), stall_at=1)]}
    key = Resource("key-1", KEY, max_in_flight=1)
    with proxying(upstream, {"key-1": key}) as proxy:
        with proxy.connect() as made:
            made.sendall(written())
            while openai_events()[0] not in made.recv(65536):
                pass
            assert proxy.in_flight() == 1
        until(lambda: proxy.in_flight() == 0)
        upstream.answers = {}
        assert proxy.ask().status == 200


def test_c24_a_client_that_goes_before_the_answer_frees_the_key(upstream: Upstream) -> None:
    upstream.answers = {KEY: [Answer(stall_at=-1)]}
    with proxying(upstream) as proxy:
        with proxy.connect() as made:
            made.sendall(written())
            until(lambda: upstream.seen)
        until(lambda: proxy.in_flight() == 0)


def test_c24_a_client_that_goes_while_it_waits_is_forgotten(upstream: Upstream) -> None:
    upstream.answers = {KEY: [Answer(stall_at=-1)]}
    with proxying(upstream, limits=Limits(max_concurrent=1)) as proxy:
        with proxy.connect() as first:
            first.sendall(written())
            until(lambda: upstream.seen)
            with proxy.connect() as second:
                second.sendall(written())
                until(lambda: state(proxy)["waiting"] == 1)
            until(lambda: state(proxy)["waiting"] == 0)
        until(lambda: state(proxy)["running"] == 0)
    assert len(upstream.seen) == 1


def state(proxy: Proxy) -> dict[str, Any]:
    reply = proxy.ask("/headgate/state", b"", "GET")
    assert reply.status == 200, reply
    told: dict[str, Any] = json.loads(reply.body)
    return told


@pytest.mark.parametrize("how", [{"stall_at": -1}, {"stall_at": 0}])
def test_c24_an_upstream_that_does_not_answer_in_time_is_a_504(how: Any, upstream: Upstream) -> None:
    upstream.answers = {KEY: [streamed(openai_events(), **how)]}
    with proxying(upstream, limits=Limits(timeout=0.1)) as proxy:
        reply = proxy.ask()
        assert (reply.status, reply.code) == (504, "upstream_too_slow")
        assert proxy.in_flight() == 0


def test_c24_a_stream_that_stalls_is_cut_off_when_its_time_is_over(upstream: Upstream) -> None:
    upstream.answers = {KEY: [streamed(openai_events(), stall_at=1)]}
    with proxying(upstream, limits=Limits(timeout=1.0)) as proxy, proxy.connect() as made:
        made.sendall(written())
        reply = read_reply(made)
        assert reply.status == 200
        assert not reply.body.endswith(b"0\r\n\r\n"), "the client sees that it is not complete"
        until(lambda: proxy.in_flight() == 0)


def test_c24_a_client_that_does_not_read_is_cut_off_when_its_time_is_over(upstream: Upstream) -> None:
    upstream.answers = {KEY: [streamed([b"x" * 1_000_000] * 100)]}
    with proxying(upstream, limits=Limits(timeout=1.0)) as proxy, proxy.connect() as made:
        made.sendall(written())
        until(lambda: proxy.in_flight() == 1)
        until(lambda: proxy.in_flight() == 0)


def endless(gone: threading.Event) -> Callable[[bytes, socket.socket], object]:
    """An upstream that sends an answer without an end, and notes when its connection is closed."""

    def answer(head: bytes, made: socket.socket) -> None:
        if b"/flood" not in head:
            made.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
            return
        try:
            made.sendall(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
            while True:
                made.sendall(b"10000\r\n" + b"x" * 0x10000 + b"\r\n")
        except OSError:
            gone.set()
            raise

    return answer


def test_c24_a_client_that_does_not_read_is_cut_off_and_leaves_its_slot_to_others() -> None:
    gone = threading.Event()
    limits = Limits(max_concurrent=1, client_timeout=1.0, timeout=600)
    with answering(endless(gone)) as url, proxying(url, limits=limits) as proxy, proxy.connect() as made:
        made.sendall(written("/v1/responses/flood", b"", "GET"))
        until(lambda: proxy.in_flight() == 1)
        reply = proxy.ask("/v1/models", b"", "GET", authorization=f"Bearer {OTHER_TOKEN}")
        assert (reply.status, reply.body) == (200, b"{}")
        assert gone.wait(PATIENCE), "the connection to the upstream is closed"
        until(lambda: is_reset(made))


def test_c24_a_client_that_reads_slowly_but_steadily_is_not_cut_off(caplog: pytest.LogCaptureFixture) -> None:
    """The system would keep megabytes for it, and take more only after a third of them, which are seconds here."""
    gone = threading.Event()
    limits = Limits(client_timeout=1.0, timeout=600)
    with answering(endless(gone)) as url, proxying(url, limits=limits) as proxy, proxy.connect() as made:
        made.sendall(written("/v1/responses/flood", b"", "GET"))
        until(lambda: proxy.in_flight() == 1)
        for _ in range(150):
            assert made.recv(10_000)
            assert not gone.wait(0.02), "it reads"  # so it reads 500 KB a second
        assert gone.wait(PATIENCE), "it has stopped reading"
        until(lambda: "read nothing of its answer for 1.5 s and was disconnected" in caplog.text)
        assert caplog.text.count("disconnected") == 1
        assert KEY not in caplog.text
        assert TOKEN not in caplog.text


def test_c24_the_log_has_one_line_about_many_clients_that_do_not_read(caplog: pytest.LogCaptureFixture) -> None:
    gone = threading.Event()
    limits = Limits(client_timeout=0.2, timeout=600)
    with answering(endless(gone)) as url, proxying(url, limits=limits) as proxy, ExitStack() as stack:
        clients = [stack.enter_context(proxy.connect()) for _ in range(5)]
        for made in clients:
            made.sendall(written("/v1/responses/flood", b"", "GET"))
        until(lambda: all(is_reset(made) for made in clients))
        assert caplog.text.count("and was disconnected") == 1


def test_c24_a_client_that_does_not_read_a_whole_answer_is_disconnected_too(upstream: Upstream) -> None:
    """A connection that is only closed stays open until the client has read everything."""
    upstream.answers = {KEY: [Answer(404, {}, b"x" * 1_000_000)]}
    with proxying(upstream, limits=SLOW) as proxy, socket.socket() as made:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)  # so that the system takes less than all of it
        made.connect(("127.0.0.1", proxy.port))
        for _ in range(12):
            made.sendall(written(connection="keep-alive"))
        until(lambda: is_reset(made))


def is_reset(made: socket.socket) -> bool:
    """Whether the other side has closed, although we have not read what it has sent."""
    try:
        made.send(b"x", socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except ConnectionError:
        return True
    return False


async def told(app: KeysProxy, send: Callable[[Any], Awaitable[None]], receive: Callable[[], Awaitable[Any]]) -> None:
    """Ask an application as a server would: a GET of `/v1/responses/flood`."""
    headers = [(b"host", b"127.0.0.1"), (b"authorization", f"Bearer {TOKEN}".encode())]
    scope = {"type": "http", "method": "GET", "raw_path": b"/v1/responses/flood", "query_string": b""}
    await app({**scope, "headers": headers, "http_version": "2"}, receive, send)


def test_c24_an_application_in_a_server_of_yours_waits_only_so_long_for_the_client(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Even if the client goes while the answer of the upstream is being closed, no connection stays open."""
    gone = threading.Event()

    async def main(url: str) -> None:
        left = asyncio.Event()
        asked = False

        async def receive() -> Any:
            nonlocal asked
            if asked:
                await left.wait()
                return {"type": "http.disconnect"}
            asked = True
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message: Any) -> None:
            if message["type"] == "http.response.body":
                try:
                    await asyncio.Event().wait()
                finally:
                    left.set()

        keys = ResourcePool({"key-1": KEY})
        rules = ProxyRules(f"{url}/v1", Tokens(CLIENTS, salt="s"))
        async with KeysProxy(keys, rules, Limits(client_timeout=0.1)) as app:
            await asyncio.wait_for(told(app, send, receive), PATIENCE)
            assert await asyncio.to_thread(gone.wait, PATIENCE)
            assert keys.snapshot()["key-1"]["in_flight"] == 0

    with answering(endless(gone)) as url:
        asyncio.run(main(url))
    assert caplog.text == ""


def test_c24_a_body_without_a_length_is_refused_with_get(upstream: Upstream) -> None:
    """HTTP/2, in a server of yours, has bodies without a header that announces them."""
    sent: list[Any] = []
    body = b"GET /v1/files HTTP/1.1\r\n"
    inbox = [{"type": "http.request", "body": body, "more_body": False}, {"type": "http.disconnect"}]

    async def main() -> None:
        async def send(message: Any) -> None:
            sent.append(message)

        async def receive() -> Any:
            return inbox.pop(0)

        rules = ProxyRules(f"{upstream.url}/v1", Tokens(CLIENTS, salt="s"))
        async with KeysProxy(ResourcePool({"key-1": KEY}), rules) as app:
            await told(app, send, receive)

    asyncio.run(main())
    assert sent[0]["status"] == 400
    assert b"body_not_allowed" in sent[1]["body"]
    assert upstream.seen == []


@pytest.mark.parametrize(
    ("method", "head"),
    [
        ("HEAD", b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\n"),
        ("HEAD", b"HTTP/1.1 404 Not Found\r\nContent-Length: 50\r\n\r\n"),
        ("GET", b"HTTP/1.1 304 Not Modified\r\n\r\n"),
        ("GET", b"HTTP/1.1 204 No Content\r\n\r\n"),
    ],
)
def test_c24_what_follows_an_answer_without_a_body_is_not_the_answer_to_the_next_tenant(
    method: str, head: bytes
) -> None:
    forged = b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\nforged"
    usual = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"

    def answer(asked: bytes, made: socket.socket) -> None:
        made.sendall(head + forged if b"/strange" in asked else usual)

    methods = ("GET", "HEAD")
    with answering(answer) as url, proxying(url, paths=["/strange", "/models"], methods=methods) as proxy:
        assert proxy.ask("/v1/strange", b"", method, connection="close").status == int(head.split()[1])
        assert proxy.ask("/v1/models", b"", "GET", authorization=f"Bearer {OTHER_TOKEN}").body == b"{}"


@pytest.mark.parametrize("length", [3, 30])
def test_c24_a_length_beside_chunks_cuts_nothing_off(length: int) -> None:
    def answer(head: bytes, made: socket.socket) -> None:
        lengths = f"Content-Length: {length}\r\nTransfer-Encoding: chunked\r\n"
        made.sendall(f"HTTP/1.1 200 OK\r\n{lengths}\r\n5\r\nhello\r\n0\r\n\r\n".encode())

    with answering(answer) as url, proxying(url) as proxy:
        assert proxy.ask("/v1/models", b"", "GET").body == b"5\r\nhello\r\n0\r\n\r\n"


def test_c24_a_key_in_an_error_with_two_content_encodings_does_not_pass() -> None:
    def answer(head: bytes, made: socket.socket) -> None:
        body = gzip.compress(b"Incorrect API key provided: " + KEY.encode())
        lines = b"Content-Encoding: identity\r\nContent-Encoding: gzip\r\nContent-Length: %d\r\n" % len(body)
        made.sendall(b"HTTP/1.1 400 Bad Request\r\n" + lines + b"\r\n" + body)

    with answering(answer) as url, proxying(url) as proxy:
        reply = proxy.ask("/v1/models", b"", "GET", accept_encoding="gzip")
    assert (reply.status, reply.code) == (400, "upstream_error")


def test_c24_an_upstream_that_cannot_be_reached_is_a_502() -> None:
    pool = ResourcePool({"key-1": KEY}, max_attempts=1)
    with reserved_port() as unheard, proxying(f"http://127.0.0.1:{number_of(unheard)}", pool) as proxy:
        reply = proxy.ask()
        assert (reply.status, reply.code) == (502, "upstream_unreachable")


def test_c24_an_answer_that_is_not_http_is_a_502(upstream: Upstream) -> None:
    upstream.answers = {KEY: [Answer(200, {"transfer-encoding": "nonsense"}, [b"x"])]}
    with proxying(upstream, ResourcePool({"key-1": KEY}, max_attempts=1)) as proxy:
        assert proxy.ask().status == 502


@pytest.mark.parametrize("status", [101, 600, 799])
def test_c24_a_status_that_is_no_answer_is_a_502(status: int, upstream: Upstream, proxy: Proxy) -> None:
    upstream.answers = {KEY: [Answer(status)]}
    reply = proxy.ask()
    assert (reply.status, reply.code) == (502, "upstream_unreachable" if status == 101 else "upstream_failed")


# -- turns ------------------------------------------------------------------------------------------------------------


def test_c24_tenants_take_turns_when_slots_are_scarce(upstream: Upstream) -> None:
    go = threading.Event()
    order: list[str] = []

    def answer(seen: Seen) -> Answer:
        order.append(json.loads(seen.body)["who"])
        go.wait(10)
        return usual(seen)

    upstream.answers = {KEY: answer}
    asked = [("ann", TOKEN)] * 4 + [("bob", OTHER_TOKEN)] * 2 + [("carol", GATEWAY_TOKEN)]
    with proxying(upstream, limits=Limits(max_concurrent=1)) as proxy:
        threads = []
        for number, (who, token) in enumerate(asked):
            headers = {"authorization": f"Bearer {token}"} | ({"x_headgate_tenant": who} if who == "carol" else {})
            body = json.dumps({"who": who}).encode()
            threads.append(threading.Thread(target=proxy.ask, kwargs={"body": body, **headers}))
            threads[-1].start()
            until(lambda count=number + 1: sum(state(proxy)[name] for name in ("running", "waiting")) == count)
        go.set()
        for thread in threads:
            thread.join()
    assert order[0] == "ann"
    assert sorted(order[1:4]) == ["ann", "bob", "carol"]
    assert sorted(order[4:6]) == ["ann", "bob"]


@pytest.mark.parametrize(
    ("most", "others", "running"),
    [(None, False, 4), (None, True, 3), (2, False, 2), (9, True, 4)],
    ids=["alone", "with others", "a number", "a higher number"],
)
def test_c24_one_tenant_leaves_slots_to_others(
    most: int | None, others: bool, running: int, upstream: Upstream
) -> None:
    go = threading.Event()

    def answer(seen: Seen) -> Answer:
        if b"wait" in seen.body:
            go.wait(PATIENCE)
        return usual(seen)

    upstream.answers = {KEY: answer}
    bobs = f"Bearer {OTHER_TOKEN}"
    limits = Limits(max_concurrent=4, max_per_tenant=most)
    with proxying(upstream, limits=limits) as proxy, ExitStack() as opened:
        if others:
            assert proxy.ask(authorization=bobs).status == 200
        anns = [opened.enter_context(proxy.connect()) for _ in range(5)]
        try:
            for made in anns:
                made.sendall(written(body=b'{"wait": 1}'))
            until(lambda: state(proxy)["waiting"] == 5 - running)
            assert state(proxy)["running"] == running
            if running < 4:
                assert proxy.ask(authorization=bobs).status == 200
        finally:
            go.set()
        assert [read_reply(made).status for made in anns] == [200] * 5


def test_c24_requests_beyond_what_may_wait_are_refused_with_retry_after(upstream: Upstream) -> None:
    upstream.answers = {KEY: [Answer(stall_at=-1)]}
    limits = Limits(max_concurrent=1, max_waiting=1, wait=0.3)
    with proxying(upstream, limits=limits) as proxy, proxy.connect() as first, proxy.connect() as second:
        first.sendall(written())
        until(lambda: upstream.seen)
        second.sendall(written())
        until(lambda: state(proxy)["waiting"] == 1)
        reply = proxy.ask()
        assert (reply.status, reply.code, reply.headers["retry-after"]) == (503, "proxy_busy", "1")
        waited = read_reply(second)
        assert (waited.status, waited.code) == (503, "proxy_busy"), "it waited longer than it may"
        assert b"no slot was free" in waited.body


# -- what it tells, and how it ends -----------------------------------------------------------------------------------


def test_c24_health_says_only_ok_and_state_shows_ids_without_values(upstream: Upstream) -> None:
    upstream.answers = {KEY: [refusal(429, "rate_limit_error", retry_after="300")]}
    with proxying(upstream, {"key-1": KEY, "key-2": "sk-other-0123456789"}) as proxy:
        assert proxy.ask().status == 200
        health = proxy.ask("/healthz", b"", "GET", authorization="")
        assert (health.status, health.body) == (200, b'{"status": "ok"}')
        told = proxy.ask("/headgate/state", b"", "GET")
        keys = json.loads(told.body)["keys"]
        assert {name: one["status"] for name, one in keys.items()} == {"key-1": "cooling_down", "key-2": "healthy"}
        assert 40 < keys["key-1"]["cooldown_seconds_remaining"] <= 60, "a limit may be that of one model"
        assert b"sk-" not in told.raw
        assert proxy.ask("/headgate/state", b"", "GET", authorization="").status == 401


def test_c24_stopping_lets_a_stream_finish(upstream: Upstream) -> None:
    go = threading.Event()

    def answer(seen: Seen) -> Answer:
        go.wait(10)
        return usual(seen)

    upstream.answers = {KEY: answer}
    with proxying(upstream) as proxy, proxy.connect() as made, proxy.connect() as idle:
        made.sendall(written(body=b'{"stream": true}'))
        until(lambda: upstream.seen)
        proxy.stop()
        assert idle.recv(10) == b"", "connections without a request are closed"
        until(lambda: refuses(proxy))
        go.set()
        reply = read_reply(made)
        assert reply.status == 200
        assert reply.body.endswith(b"0\r\n\r\n")
        until(lambda: not proxy.loop.is_running())
        assert proxy.server.cancelled == 0


def test_c24_stopping_while_a_connection_is_refused_ends_cleanly(upstream: Upstream) -> None:
    with proxying(upstream) as proxy, proxy.connect() as garbage, proxy.connect() as half, proxy.connect() as upload:
        garbage.sendall(b"GARBAGE\r\n\r\n")
        assert read_reply(garbage).status == 400
        half.sendall(b"POST /v1")
        upload.sendall(written("/v1/files", body=b"x", content_length="1000"))
        assert read_reply(upload).status == 404
        proxy.stop()
        assert [made.recv(10) for made in (garbage, half, upload)] == [b"", b"", b""]
        until(lambda: not proxy.loop.is_running())
        assert proxy.server.cancelled == 0


def refuses(proxy: Proxy) -> bool:
    try:
        proxy.connect().close()
    except OSError:
        return True
    return False


@pytest.mark.parametrize("grace", [0.1, 30.0])
def test_c24_stopping_again_or_the_end_of_the_grace_breaks_requests_off(grace: float, upstream: Upstream) -> None:
    upstream.answers = {KEY: [Answer(stall_at=-1)]}
    with proxying(upstream, grace=grace) as proxy, proxy.connect() as made, proxy.connect() as half:
        made.sendall(written())
        half.sendall(written(body=b"{", content_length="2"))
        until(lambda: upstream.seen)
        proxy.stop()
        if grace > 1:
            proxy.stop()
        reply = read_reply(made)
        assert (reply.status, reply.code) == (503, "proxy_ends")
        until(lambda: not proxy.loop.is_running())
        assert proxy.server.cancelled == 2
        assert proxy.in_flight() == 0


def test_c24_no_key_and_no_token_is_in_any_log_or_answer(
    upstream: Upstream, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.INFO)
    told = json.dumps({"error": {"message": f"bad key {KEY}", "code": "invalid_api_key"}}).encode()
    answers = [
        Answer(500, {}, KEY.encode()),
        Answer(200, {"transfer-encoding": KEY}, [b"x"]),
        Answer(cut_at=-1),
        streamed(openai_events(), cut_at=1),
        Answer(401, {"www-authenticate": KEY}, told),
    ]
    upstream.answers = {KEY: list(answers)}
    got: list[Reply] = []
    with proxying(upstream, ResourcePool({"key-1": KEY}, max_attempts=1)) as proxy:
        for _ in answers:
            got.append(proxy.ask())
        got += [proxy.send(b"GARBAGE\r\n\r\n"), proxy.ask(x=KEY * 2000), proxy.ask(f"/v1/{KEY}")]
        got.append(proxy.ask("/headgate/state", b"", "GET"))
        assert json.loads(got[-1].body)["keys"]["key-1"]["status"] == "disabled"
    printed = capfd.readouterr()
    seen = caplog.text + printed.out + printed.err + "".join(reply.raw.decode("latin-1") for reply in got)
    for secret in (KEY, KEY[:8], TOKEN):
        assert secret not in seen
    assert "key-1" in caplog.text, "that it was disabled is logged by its id"


def test_c24_websockets_are_closed() -> None:
    sent: list[Any] = []

    async def main() -> None:
        async def send(message: Any) -> None:
            sent.append(message)

        async def receive() -> Any:
            raise AssertionError

        rules = ProxyRules("https://api.example.com", Tokens(CLIENTS, salt="s"))
        async with KeysProxy(ResourcePool({"key-1": KEY}), rules) as app:
            await app({"type": "websocket"}, receive, send)

    asyncio.run(main())
    assert sent == [{"type": "websocket.close"}]


def test_c24_the_application_runs_in_a_server_of_yours(upstream: Upstream) -> None:
    sent: list[Any] = []
    inbox = [{"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}]

    async def main() -> None:
        rules = ProxyRules(f"{upstream.url}/v1", Tokens(CLIENTS, salt="s"))
        app = KeysProxy(ResourcePool({"key-1": KEY}), rules)

        async def receive() -> Any:
            return inbox.pop(0)

        async def send(message: Any) -> None:
            sent.append(message["type"])
            if len(sent) == 1:
                transport = httpx.ASGITransport(app, raise_app_exceptions=True)  # type: ignore[arg-type]
                async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
                    headers = {"authorization": f"Bearer {TOKEN}"}
                    assert (await client.post("/v1/responses", json={}, headers=headers)).status_code == 200

        await app({"type": "lifespan"}, receive, send)

    asyncio.run(main())
    assert sent == ["lifespan.startup.complete", "lifespan.shutdown.complete"]


def test_c24_one_tenant_cannot_fill_the_queue(upstream: Upstream) -> None:
    """Half of the places are for others, however many requests one tenant sends."""
    go = threading.Event()

    def answer(seen: Seen) -> Answer:
        go.wait(20)
        return usual(seen)

    upstream.answers = {KEY: answer}
    limits = Limits(max_concurrent=1, max_waiting=4, wait=20)
    with proxying(upstream, limits=limits) as proxy, ExitStack() as opened:

        def waits() -> int:
            told = json.loads(proxy.ask("/headgate/state", b"", "GET").body)
            return int(told["waiting"])

        greedy = [opened.enter_context(proxy.connect()) for _ in range(3)]
        for number, made in enumerate(greedy):  # one runs, two wait
            made.sendall(written())
            until(lambda: upstream.seen)
            until(lambda number=number: waits() == number)
        refused = proxy.ask()
        assert (refused.status, refused.code) == (503, "proxy_busy")
        other = opened.enter_context(proxy.connect())
        other.sendall(written(authorization=f"Bearer {OTHER_TOKEN}"))
        until(lambda: waits() == 3)
        go.set()
        assert [read_reply(made).status for made in (*greedy, other)] == [200] * 4
