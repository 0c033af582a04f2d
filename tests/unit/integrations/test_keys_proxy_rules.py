"""The rules of the proxy of keys, without a server: what is accepted, which headers go on, what is redacted."""

from __future__ import annotations

import gzip
import json
import posixpath
import zlib
from typing import Any
from urllib.parse import quote, unquote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate import InvalidArgument, InvalidType, ResourcePool
from headgate.integrations.keys_proxy import Client, Limits, ProxyRules, Tokens
from headgate.integrations.keys_proxy.app import RecentTenants
from headgate.integrations.keys_proxy.error_texts import LONGEST, ErrorTexts, without_values
from headgate.integrations.keys_proxy.headers import KEY_HEADERS, for_client, for_upstream
from headgate.integrations.keys_proxy.refusals import Headers, Refusal
from headgate.integrations.keys_proxy.rules import BODILESS, NO_BODY, Accepted, Request
from tests.support.integrations.proxies import CLIENTS, GATEWAY_TOKEN, KEY, OTHER_TOKEN, TOKEN

HOST = (b"host", b"127.0.0.1:8700")
AUTH = (b"authorization", f"Bearer {TOKEN}".encode())


def rules(upstream: str = "https://api.example.com/v1", **options: Any) -> ProxyRules:
    return ProxyRules(upstream, Tokens(CLIENTS, salt="salt"), **options)


def judged(
    path: str = "/v1/chat/completions",
    *headers: tuple[bytes, bytes],
    method: str = "POST",
    server: str = "",
    judge: ProxyRules | None = None,
) -> Accepted | Refusal:
    bare, _, query = path.encode().partition(b"?")
    return (judge or rules()).judge(Request(method, bare, query, list(headers or (HOST, AUTH)), server))


def refused(*args: Any, **options: Any) -> tuple[int, str]:
    found = judged(*args, **options)
    assert isinstance(found, Refusal), found
    return found.status, found.code


def accepted(*args: Any, **options: Any) -> Accepted:
    found = judged(*args, **options)
    assert isinstance(found, Accepted), found
    return found


def test_c24_an_accepted_request_goes_to_the_fixed_upstream_with_its_tenant() -> None:
    found = accepted("/v1/chat/completions?stream=1", HOST, AUTH, (b"content-length", b"2"))
    assert (found.what, found.tenant, found.target, found.length) == (
        "forward",
        "ann",
        b"/v1/chat/completions?stream=1",
        2,
    )
    assert dict(found.headers)[b"host"] == b"api.example.com"


@pytest.mark.parametrize(
    "host",
    ["evil.example", "127.0.0.1.evil.example", "localhost.evil.example", "", "127.0.0.1 evil", "user@127.0.0.1", "::1"],
)
def test_c24_a_host_that_is_not_of_the_proxy_is_refused(host: str) -> None:
    assert refused("/v1/models", (b"host", host.encode()), AUTH) == (403, "host_not_allowed")
    assert refused("/healthz", (b"host", host.encode()), method="GET") == (403, "host_not_allowed")


def test_c24_two_hosts_or_none_are_refused() -> None:
    assert refused("/v1/models", HOST, HOST, AUTH) == (403, "host_not_allowed")
    assert refused("/v1/models", AUTH) == (403, "host_not_allowed")


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost:1", "LOCALHOST", "[::1]:8700"])
def test_c24_hosts_of_the_loopback_are_allowed(host: str) -> None:
    assert accepted("/v1/models", (b"host", host.encode()), AUTH).what == "forward"


def test_c24_other_hosts_are_allowed_by_name_or_by_the_address_that_was_reached() -> None:
    named = (b"host", b"keys.example:8700")
    assert accepted("/v1/models", named, AUTH, judge=rules(hosts=["Keys.Example"])).what == "forward"
    assert accepted("/v1/models", (b"host", b"10.0.0.7:8700"), AUTH, server="10.0.0.7").what == "forward"
    assert refused("/v1/models", (b"host", b"10.0.0.8:8700"), AUTH, server="10.0.0.7") == (403, "host_not_allowed")


@pytest.mark.parametrize("origin", [b"http://127.0.0.1:8700", b"null", b""])
def test_c24_requests_with_an_origin_are_refused(origin: bytes) -> None:
    assert refused("/v1/models", HOST, AUTH, (b"origin", origin)) == (403, "origin_not_allowed")
    assert refused("/healthz", HOST, (b"origin", origin), method="GET") == (403, "origin_not_allowed")


@pytest.mark.parametrize(
    "path",
    [
        "/v1/../admin",
        "/v1/./models",
        "//evil.example/v1/models",
        "/v1//models",
        "/v1/models/",
        "/v1/models/%2e%2e/admin",
        "/v1/models%2Fx",
        "/v1/models%5cx",
        "/v1/models/%252e",
        "/v1/models\\x",
        "/v1/models;x=1",
        "/v1/models/%00",
        "/v1/models/%0d%0ax",
        "/v1/models/%c0%ae",
        "/v1/models/%zz",
        "http://evil.example/v1/models",
        "https://127.0.0.1/v1/models",
        "*",
        "",
        "v1/models",
    ],
)
def test_c24_paths_that_servers_read_differently_are_refused(path: str) -> None:
    assert refused(path) == (400, "invalid_path")


@pytest.mark.parametrize(
    "path", ["/v1/files", "/v2/chat/completions", "/chat/completions", "/v1/chat", "/v1/Models", "/v1", "/v1x/models"]
)
def test_c24_paths_outside_the_list_are_refused(path: str) -> None:
    assert refused(path) == (404, "path_not_allowed")


def test_c24_the_list_of_paths_is_relative_to_the_upstream() -> None:
    judge = rules("https://api.example.com/openai/", paths=["/answers", "/models/*"])
    for path in ("/openai/answers", "/openai/models/gpt", "/openai/models/a/b", "/openai/models/ft:gpt:org::1"):
        assert accepted(path, judge=judge).target == path.encode()
    for path in ("/openai/models", "/openai/chat/completions", "/answers"):
        assert refused(path, judge=judge) == (404, "path_not_allowed")
    assert accepted("/anything/at/all", judge=rules("https://api.example.com", paths=["/*"])).what == "forward"
    assert accepted("/v1/messages", judge=rules("https://api.example.com")).what == "forward"


@pytest.mark.parametrize(
    "query",
    [
        "key=sk-1",
        "a=b&API_KEY=x",
        "x-api-key=1",
        "X-Goog-Api-Key=x",
        "access_token=1",
        "api-key",
        "%6bey=x",
        "a=1;key=x",
        "token=x",
    ],
)
def test_c24_credentials_in_the_query_are_refused(query: str) -> None:
    assert refused(f"/v1/models?{query}") == (400, "key_in_query")


@pytest.mark.parametrize("method", ["DELETE", "PUT", "OPTIONS", "TRACE", "CONNECT", "post"])
def test_c24_other_methods_are_refused(method: str) -> None:
    assert refused(method=method) == (405, "method_not_allowed")
    found = judged(method=method)
    assert isinstance(found, Refusal)
    assert (b"allow", b"GET, POST") in found.headers


def test_c24_methods_can_be_allowed() -> None:
    assert accepted("/v1/responses/r1", method="DELETE", judge=rules(methods=["GET", "delete"])).what == "forward"


@pytest.mark.parametrize(
    "header",
    [
        (b"authorization", b""),
        (b"authorization", TOKEN.encode()),
        (b"authorization", b"Basic " + TOKEN.encode()),
        (b"authorization", b"Bearer " + TOKEN.encode() + b"x"),
        (b"authorization", b"Bearer " + TOKEN[:-1].encode()),
        (b"x-api-key", b"sk-of-a-stranger-0123456789"),
        (b"cookie", TOKEN.encode()),
        (b"x-api-key", b"\xff\x00"),
    ],
)
def test_c24_a_request_without_a_good_token_is_refused(header: tuple[bytes, bytes]) -> None:
    assert refused("/v1/models", HOST, header) == (401, "invalid_token")
    assert refused("/headgate/state", HOST, header, method="GET") == (401, "invalid_token")
    assert refused("/v1/unknown", HOST, header) == (401, "invalid_token"), "strangers do not learn what is allowed"


@pytest.mark.parametrize("name", ["x-api-key", "api-key", "x-goog-api-key"])
def test_c24_the_key_goes_where_the_client_has_put_its_token(name: str) -> None:
    found = accepted("/v1/models", HOST, (name.encode(), TOKEN.encode()))
    assert (name.encode(), b"-") in found.headers
    assert TOKEN.encode() not in b"".join(value for _, value in found.headers)


def test_c24_the_key_goes_where_the_rules_say() -> None:
    judge = rules(header="X-Subscription-Key")
    found = accepted("/v1/models", HOST, (b"x-subscription-key", TOKEN.encode()), judge=judge)
    assert not {b"authorization", b"x-api-key"} & set(dict(found.headers))


def test_c24_a_tenant_is_bound_to_its_token() -> None:
    named = (b"x-headgate-tenant", b"bob")
    assert accepted().tenant == "ann"
    assert accepted("/v1/models", HOST, (b"authorization", f"bearer {OTHER_TOKEN}".encode())).tenant == "bob"
    assert refused("/v1/models", HOST, AUTH, named) == (403, "tenant_not_allowed")
    assert accepted("/v1/models", HOST, AUTH, (b"x-headgate-tenant", b"ann")).tenant == "ann"


def test_c24_only_a_token_that_may_name_tenants_does() -> None:
    gateway = (b"x-api-key", GATEWAY_TOKEN.encode())
    named = accepted("/v1/models", HOST, gateway, (b"x-headgate-tenant", b"carol"))
    assert named.tenant == "carol"
    assert b"x-headgate-tenant" not in dict(named.headers)
    assert accepted("/v1/models", HOST, gateway).tenant == "gateway"
    for bad in (b"", b" ", b"x" * 201):
        assert refused("/v1/models", HOST, gateway, (b"x-headgate-tenant", bad)) == (400, "invalid_tenant")
    twice = [(b"x-headgate-tenant", b"carol")] * 2
    assert refused("/v1/models", HOST, gateway, *twice) == (400, "invalid_tenant")


@pytest.mark.parametrize(
    "headers",
    [
        [(b"content-length", b"1"), (b"content-length", b"2")],
        [(b"content-length", b"-1")],
        [(b"content-length", b"1 ")],
        [(b"content-length", b"9" * 30)],
        [(b"content-length", b"2"), (b"transfer-encoding", b"chunked")],
        [(b"transfer-encoding", b"gzip, chunked")],
        [(b"transfer-encoding", b"chunked"), (b"transfer-encoding", b"identity")],
        [(b"transfer-encoding", b"xchunked")],
    ],
)
def test_c24_bodies_of_unclear_length_are_refused(headers: Headers) -> None:
    assert refused("/v1/models", HOST, AUTH, *headers) == (400, "invalid_length")


def test_c24_what_is_refused_is_told_in_a_sentence() -> None:
    assert NO_BODY.message == "a GET, HEAD or DELETE request must have no body"
    assert all(method in NO_BODY.message for method in BODILESS)
    refusal = judged("/v1/models", HOST)
    assert isinstance(refusal, Refusal)
    for header in KEY_HEADERS:
        assert header in refusal.message.lower().encode(), "every header that is accepted is named"


@pytest.mark.parametrize("method", ["GET", "HEAD", "DELETE"])
def test_c24_a_body_that_the_method_does_not_define_is_refused(method: str) -> None:
    """An upstream that does not read it takes it for the next request on the connection, which has a key."""
    judge = rules(methods=["GET", "HEAD", "DELETE", "POST"])
    for header in ((b"content-length", b"1"), (b"transfer-encoding", b"chunked")):
        for extra in ((), ((b"expect", b"100-continue"),)):
            found = refused("/v1/models", HOST, AUTH, header, *extra, method=method, judge=judge)
            assert found == (400, "body_not_allowed")
        assert accepted("/v1/models", HOST, AUTH, header, method="POST", judge=judge).what == "forward"
    for nothing in (b"0", b"00"):
        length = (b"content-length", nothing)
        assert accepted("/v1/models", HOST, AUTH, length, method=method, judge=judge).what == "forward"


def test_c24_a_chunked_body_of_http_1_0_is_refused() -> None:
    chunked = (b"transfer-encoding", b"chunked")
    found = rules().judge(Request("POST", b"/v1/models", b"", [HOST, AUTH, chunked], version="1.0"))
    assert isinstance(found, Refusal)
    assert found.code == "invalid_length"


def test_c24_health_needs_no_token_and_state_does() -> None:
    assert accepted("/healthz", HOST, method="GET").what == "health"
    assert accepted("/headgate/state", HOST, AUTH, method="GET").what == "state"
    assert refused("/headgate/state", HOST, method="GET") == (401, "invalid_token")
    assert refused("/headgate/state") == (404, "path_not_allowed")


PARTS = [
    "v1",
    "models",
    "files",
    "..",
    ".",
    "",
    "%2e%2e",
    "%2f",
    "%5c",
    "\\",
    ";",
    "%",
    "%00",
    "gpt-4",
    "*",
    "@",
    "a:b",
    "é",
]
ANY_HEADER = st.tuples(
    st.sampled_from([b"host", b"origin", b"authorization", b"content-length", b"transfer-encoding", b"connection"])
    | st.binary(max_size=20),
    st.sampled_from([b"127.0.0.1", b"Bearer " + TOKEN.encode(), b"2", b"chunked", b"close"]) | st.binary(max_size=50),
)


@given(
    parts=st.lists(st.sampled_from(PARTS) | st.text(max_size=5), max_size=6),
    headers=st.lists(ANY_HEADER, max_size=6),
    query=st.binary(max_size=20),
    plain=st.booleans(),
)
def test_c24_whatever_comes_is_judged_and_only_allowed_paths_are_accepted(
    parts: list[str], headers: Headers, query: bytes, plain: bool
) -> None:
    path = ("/" + "/".join(parts)).encode("utf-8", "replace")
    given = [HOST, AUTH] if plain else headers
    found = JUDGE.judge(Request("GET", path, query, given))
    assert isinstance(found, (Accepted, Refusal))
    if isinstance(found, Accepted) and found.what == "forward":
        once = unquote(path.decode())
        assert posixpath.normpath(once) == once == unquote(once)
        assert once.startswith(("/v1/models/",)) or once == "/v1/models"
        assert not {b"authorization", b"origin", b"connection"} & set(dict(found.headers))


JUDGE = rules(paths=["/models", "/models/*"])


# -- headers ----------------------------------------------------------------------------------------------------------


def test_c24_credentials_and_hop_by_hop_headers_do_not_go_on() -> None:
    given = {
        "authorization": "Bearer x",
        "x-api-key": "x",
        "api-key": "x",
        "x-goog-api-key": "x",
        "cookie": "session=x",
        "proxy-authorization": "Basic x",
        "connection": "keep-alive, X-Dropped",
        "x-dropped": "x",
        "keep-alive": "timeout=5",
        "te": "trailers",
        "trailer": "x",
        "upgrade": "h2c",
        "transfer-encoding": "chunked",
        "expect": "100-continue",
        "host": "127.0.0.1",
        "content-length": "2",
        "x-forwarded-for": "10.0.0.1",
        "forwarded": "for=10.0.0.1",
        "referer": "http://internal.example",
        "x-headgate-tenant": "ann",
        "content-type": "application/json",
        "openai-beta": "x",
        "user-agent": "me/1",
        "accept-encoding": "br, gzip;q=0.5, zstd, *",
    }
    kept = for_upstream([(name.encode(), value.encode()) for name, value in given.items()], b"api.example.com", None)
    assert dict(kept) == {
        b"host": b"api.example.com",
        b"content-type": b"application/json",
        b"openai-beta": b"x",
        b"user-agent": b"me/1",
        b"accept-encoding": b"gzip;q=0.5",
    }


@pytest.mark.parametrize(
    "name",
    ["X_Original_URL", "X_HTTP_Method_Override", "Content_Length", "X_Api_Key", "X-Original-Uri", "X-Forwarded-Uri"],
)
def test_c24_headers_that_some_servers_read_as_another_path_or_length_do_not_go_on(name: str) -> None:
    kept = for_upstream([(name.lower().encode(), b"/v1/files")], b"api.example.com", None)
    assert [name for name, _ in kept] == [b"host", b"accept-encoding"]


def test_c24_a_length_beside_chunks_does_not_come_back() -> None:
    given = [(b"Content-Length", b"3"), (b"Transfer-Encoding", b"chunked"), (b"X-Own", b"1")]
    assert for_client(given) == [(b"x-own", b"1")]


def test_c24_a_client_cannot_have_the_type_of_its_body_dropped() -> None:
    kept = for_upstream([(b"connection", b"content-type"), (b"content-type", b"text/plain")], b"h", None)
    assert (b"content-type", b"text/plain") in kept


def test_c24_cookies_and_hop_by_hop_headers_do_not_come_back() -> None:
    given = [
        (b"Content-Type", b"text/event-stream"),
        (b"Set-Cookie", b"session=x"),
        (b"Connection", b"close, x-own"),
        (b"X-Own", b"x"),
        (b"Transfer-Encoding", b"chunked"),
        (b"Strict-Transport-Security", b"max-age=1"),
        (b"Access-Control-Allow-Origin", b"*"),
        (b"X-Request-Id", b"1"),
        (b"Content-Encoding", b"gzip"),
    ]
    assert for_client(given) == [
        (b"content-type", b"text/event-stream"),
        (b"x-request-id", b"1"),
        (b"content-encoding", b"gzip"),
    ]


# -- errors of the upstream -------------------------------------------------------------------------------------------


@pytest.fixture
def pool() -> ResourcePool[str]:
    return ResourcePool({"key-1": KEY, "key-2": "short"})


def error(text: str) -> bytes:
    return json.dumps({"error": {"message": text, "code": "invalid_api_key"}}).encode()


@pytest.mark.parametrize(
    "shown",
    [
        KEY,
        KEY[:12],
        f"{KEY[:8]}********{KEY[-4:]}",
        f"{KEY[:7]}...{KEY[-4:]}",
        f"{KEY[:6]}",
        f"'{KEY}'",
        f"****{KEY[-4:]}",
        f"\N{HORIZONTAL ELLIPSIS}{KEY[-4:]}",
    ],
)
@pytest.mark.parametrize("encoding", ["", "gzip", "deflate", "raw deflate"])
def test_c24_keys_and_their_beginnings_are_taken_out_of_errors(
    shown: str, encoding: str, pool: ResourcePool[str]
) -> None:
    told = f"Incorrect API key provided: {shown}. Find it at https://example.com."
    plain = json.dumps({"error": {"message": told, "code": "no"}}, ensure_ascii=False).encode()
    raw = zlib.compressobj(wbits=-15)
    body = {
        "": plain,
        "gzip": gzip.compress(plain),
        "deflate": zlib.compress(plain),
        "raw deflate": raw.compress(plain) + raw.flush(),
    }[encoding]
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if encoding:
        headers.append((b"content-encoding", encoding.split()[-1].encode()))
    found = ErrorTexts([KEY, "short", 7]).body(body, headers)
    assert found is not None
    text = json.loads(found[0])["error"]["message"]
    assert KEY[:6] not in text
    assert KEY[-4:] not in text
    assert text.startswith("Incorrect API key provided: ")
    assert dict(found[1]) == {b"content-type": b"application/json", b"content-length": str(len(found[0])).encode()}
    assert len(pool.snapshot()) == 2


def test_c24_errors_without_keys_pass_byte_by_byte() -> None:
    for body, headers in (
        (error("no \\u00e9 \xe9"), []),
        (gzip.compress(error("no")), [(b"content-encoding", b"gzip")]),
        (b"\xff\xfe\x00", []),
        (b"", []),
    ):
        assert ErrorTexts([KEY]).body(body, headers) == (body, headers)


@pytest.mark.parametrize(
    ("body", "encoding"),
    [
        (b"anything", b"br"),
        (b"anything", b"gzip"),
        (gzip.compress(b"x" * (LONGEST + 1)), b"gzip"),
        (gzip.compress(b"x")[:-3], b"gzip"),
        (gzip.compress(b"x") + gzip.compress(KEY.encode()), b"gzip"),
        (gzip.compress(gzip.compress(KEY.encode())), b"gzip, gzip"),
    ],
    ids=["unknown", "not gzip", "too long", "cut", "two members", "twice"],
)
def test_c24_errors_that_cannot_be_searched_do_not_pass(body: bytes, encoding: bytes) -> None:
    assert ErrorTexts([KEY]).body(body, [(b"content-encoding", encoding)]) is None


@pytest.mark.parametrize(
    "encodings", [["identity", "gzip"], ["gzip", "identity"], ["", "gzip"], ["gzip", "gzip"], ["br", ""]]
)
def test_c24_errors_with_several_content_encodings_do_not_pass(encodings: list[str]) -> None:
    headers = [(b"content-encoding", encoding.encode()) for encoding in encodings]
    assert ErrorTexts([KEY]).body(gzip.compress(KEY.encode()), headers) is None
    assert ErrorTexts([KEY]).body(KEY.encode(), headers) is None


SIGNS = "sk-PLANTED/abcdefgh+SECRETTAIL99=="


@pytest.mark.parametrize(
    "body",
    [
        KEY.encode("utf-16"),
        KEY.encode("utf-16-be"),
        KEY.encode("utf-32"),
        KEY.replace("-", "%2D").encode(),
        KEY.replace("-", "&#45;").encode(),
        KEY.replace("-", "\\u002d").encode(),
        gzip.compress(KEY.encode()),
        quote(SIGNS, safe="").encode(),
        quote(SIGNS[:24], safe="").encode() + b"...",
        SIGNS.replace("/", "&#x2F;").replace("+", "&#43;").encode(),
    ],
    ids=["utf-16", "utf-16-be", "utf-32", "percent", "html", "json", "gzip", "signs", "a part", "signs in html"],
)
def test_c24_keys_in_another_charset_or_escaped_do_not_pass(body: bytes) -> None:
    texts = ErrorTexts([KEY, SIGNS])
    for wrapped, headers in ((body, []), (gzip.compress(body), [(b"content-encoding", b"gzip")])):
        found = texts.body(wrapped, headers)
        shown = b"" if found is None else found[0].replace(b"\0", b"")
        assert not any(part in shown for part in (b"a1b2", b"g7h8", b"PLANTED", b"SECRET", b"abcdefgh"))
        assert found is None or b"[redacted]" in shown


def test_c24_an_empty_error_passes_in_any_encoding() -> None:
    headers = [(b"content-encoding", b"gzip"), (b"content-length", b"50")]
    assert ErrorTexts([KEY]).body(b"", headers) == (b"", headers), "as the answer to a HEAD is"


def test_c24_escaped_keys_are_taken_out_of_headers(pool: ResourcePool[str]) -> None:
    target = f"https://other.example/?key={KEY.replace('-', '%2D')}".encode()
    for shown in (ErrorTexts([KEY]).headers, without_values):
        assert shown([(b"location", target), (b"x-own", b"100%")]) == [
            (b"location", b"[redacted]"),
            (b"x-own", b"100%"),
        ]
    assert len(pool.snapshot()) == 2


def test_c24_keys_are_taken_out_of_headers(pool: ResourcePool[str]) -> None:
    headers = [(b"location", f"https://other.example/?key={KEY}".encode()), (b"x-note", KEY[:8].encode())]
    assert KEY[:6].encode() not in b"".join(value for _, value in ErrorTexts([KEY]).headers(headers))
    shown = dict(without_values(headers))
    assert KEY.encode() not in shown[b"location"]
    assert shown[b"x-note"] == KEY[:8].encode(), "of an answer that is no error, only whole keys"
    assert len(pool.snapshot()) == 2


# -- wrong arguments --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "upstream",
    [
        "",
        "api.example.com",
        "ftp://api.example.com",
        "https://",
        "https://user:sk-secret@api.example.com/v1",
        "https://api.example.com/v1?key=sk-secret",
        "https://api.example.com/v1#x",
        "https://api.example.com/a/../b",
        "https://api.example.com:port",
        "https://[::1",
    ],
)
def test_c24_an_upstream_that_is_no_plain_url_is_refused(upstream: str) -> None:
    with pytest.raises(InvalidArgument, match="upstream must be a URL") as caught:
        rules(upstream)
    assert "sk-secret" not in str(caught.value)


def test_c24_an_upstream_without_tls_is_refused_beyond_loopback_unless_told() -> None:
    with pytest.raises(InvalidArgument, match="without TLS"):
        rules("http://api.example.com")
    assert rules("http://api.example.com", insecure=True).scheme == "http"
    for here in ("http://127.0.0.1:1/v1", "http://localhost/v1", "http://[::1]:1"):
        assert rules(here).scheme == "http"


@pytest.mark.parametrize(
    "options",
    [
        {"paths": ["chat"]},
        {"paths": ["/a/../b"]},
        {"paths": ["/a/*/b"]},
        {"paths": ["/a/"]},
        {"paths": [""]},
        {"methods": ["CONNECT"]},
        {"methods": []},
        {"header": "x key"},
        {"header": "Host"},
    ],
)
def test_c24_rules_check_their_arguments(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument):
        rules(**options)


@pytest.mark.parametrize(
    "token", ["short", "", "a token with blanks in it", "t\N{LATIN SMALL LETTER E WITH ACUTE}" * 20]
)
def test_c24_tokens_that_can_be_guessed_or_sent_by_nobody_are_refused(token: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        Tokens({token: "ann"}, salt="")
    assert not token or token not in str(caught.value)


def test_c24_tokens_check_their_types() -> None:
    with pytest.raises(InvalidArgument, match="no token"):
        Tokens({}, salt="")
    with pytest.raises(InvalidType):
        Tokens({7: "ann"}, salt="")  # type: ignore[dict-item]
    with pytest.raises(InvalidType):
        Tokens({TOKEN: 7}, salt="")  # type: ignore[dict-item]
    tokens = Tokens({TOKEN: Client("ann")}, salt="s" * 100)
    assert TOKEN not in repr(tokens)
    assert tokens.client([b"", TOKEN.encode()]) == Client("ann")


@pytest.mark.parametrize(
    "field",
    ["max_concurrent", "max_per_tenant", "max_waiting", "max_body", "max_bodies", "timeout", "wait", "client_timeout"],
)
def test_c24_limits_check_themselves(field: str) -> None:
    with pytest.raises(InvalidArgument, match=field):
        Limits(**{field: 0})


@given(st.lists(st.tuples(st.floats(0, 30), st.sampled_from("abc")), max_size=30))
def test_c24_a_tenant_is_alone_while_no_other_has_sent_a_request_lately(steps: list[tuple[float, str]]) -> None:
    recent, seen, now = RecentTenants(60.0), [], 0.0
    for pause, tenant in steps:
        now += pause
        seen.append((now, tenant))
        assert recent.several(tenant, now) == any(now - then <= 60.0 and other != tenant for then, other in seen)


@pytest.mark.parametrize(
    "written",
    [
        r"sk-PLANTED\/abcdefgh+SECRETTAIL99==",
        r"sk-PLANTED/abcdefgh\u002bSECRETTAIL99\u003d\u003d",
        "sk-PLANTED/abcdefgh+SECRETTA...",
    ],
)
def test_c24_keys_with_signs_are_redacted_however_they_are_escaped(written: str) -> None:
    text = ErrorTexts(["sk-PLANTED/abcdefgh+SECRETTAIL99=="]).text(f'{{"error": "bad key \\"{written}\\" here"}}')
    assert text == '{"error": "bad key \\"[redacted]\\" here"}'
