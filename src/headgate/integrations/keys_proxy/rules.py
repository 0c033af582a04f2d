"""Which requests the proxy accepts, and where they go. Pure.

A request that is not accepted gets a `Refusal` and never reaches the upstream. The checks, in this order: the version
of HTTP and the length of the head, the Host (a page whose name was rebound to this machine has another one), no Origin
(a browser), one way to tell where the body ends, a path that all servers read alike, the token, the path, the method,
the tenant.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal
from urllib.parse import unquote_to_bytes

from headgate.errors import InvalidArgument
from headgate.integrations.key_rules import is_loopback
from headgate.integrations.keys_proxy.headers import KEY_HEADERS, TENANT, for_upstream
from headgate.integrations.keys_proxy.refusals import Headers, Refusal
from headgate.integrations.keys_proxy.tokens import Client, Tokens

INFERENCE_PATHS: tuple[str, ...] = (
    *("/chat/completions", "/completions", "/responses", "/responses/*", "/embeddings", "/moderations"),
    *("/models", "/models/*", "/messages", "/messages/count_tokens"),
    *("/images/generations", "/audio/speech", "/audio/transcriptions", "/audio/translations", "/rerank"),
)
"""What clients may call unless told otherwise: what uses a model, and nothing of what manages an account."""

HEALTH, STATE = b"/healthz", b"/headgate/state"
METHODS = ("GET", "POST")
LONGEST_HEAD = 32 << 10
"""Bytes of a path and of all headers."""
BODILESS = frozenset(("GET", "HEAD", "DELETE"))
"""Methods for which RFC 9110 defines no body. A server that does not read one takes it for the next request."""
_ALL_METHODS = frozenset(("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE"))

_LOOPBACK_HOSTS = frozenset(("localhost", "127.0.0.1", "[::1]"))
_HOST = re.compile(rb"([A-Za-z0-9._-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\])(?::[0-9]{1,5})?")
_PATH = re.compile(rb"(?:/(?:[A-Za-z0-9_.~!$&'()*+,=:@-]|%[0-9A-Fa-f]{2})+)+")
# Encoded: control characters, "/", "\", ".", "%", ";", "?", "#" and what is not ASCII. Some server on the way may
# decode them, and read another path than the one that was allowed.
_TRICKY = re.compile(rb"%(?:[01][0-9A-Fa-f]|7[Ff]|2[EeFf]|5[Cc]|25|3[BbFf]|23|[89A-Fa-f][0-9A-Fa-f])")
_HEADER = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,100}")
_CREDENTIALS_IN_QUERY = frozenset((*KEY_HEADERS, b"key", b"api_key", b"apikey", b"access_token", b"token"))


@dataclass(frozen=True, slots=True)
class Request:
    """A request as it came: method, path and query as they were written, headers with names in lower case."""

    method: str
    path: bytes
    query: bytes
    headers: Headers
    server: str = ""
    """The address at which the client has reached the proxy."""
    version: str = "1.1"
    """The version of HTTP."""


@dataclass(frozen=True, slots=True)
class Accepted:
    """What to do with a request: answer it, or send it on."""

    what: Literal["health", "state", "forward"]
    tenant: str = ""
    target: bytes = b""
    """Path and query at the upstream."""
    headers: Headers = field(default_factory=list)
    length: int | None = None
    """How long the body is, if the client says."""


class ProxyRules:
    """Decides about requests. Made once; `judge` is called for each."""

    def __init__(
        self,
        upstream: str,
        tokens: Tokens,
        *,
        paths: Iterable[str] = (),
        methods: Iterable[str] = METHODS,
        hosts: Iterable[str] = (),
        header: str | None = None,
        insecure: bool = False,
    ) -> None:
        """`upstream`: the URL that all paths follow. `paths`: what may be called, such as `/chat/completions` or
        `/models/*` (everything below); by default `INFERENCE_PATHS`, also below `/v1`. `hosts`: names by which clients
        reach the proxy, besides those of the loopback. `header`: where the upstream takes the key; by default where the
        client has sent its token. `insecure`: the upstream may be without TLS.
        """
        self.scheme: str
        self.authority: str
        """Host and port of the upstream."""
        self.base: str
        """Its path, without a slash at its end."""
        self.scheme, self.authority, self.base = _parts(upstream, insecure)
        self.insecure: bool = insecure
        self.header: str | None = _checked_header(header)
        self._tokens = tokens
        self._exact, self._below = _patterns(paths)
        self._methods = _checked_methods(methods)
        self._hosts = _LOOPBACK_HOSTS | {host.lower() for host in hosts}
        self._host = self.authority.encode()
        custom = () if header is None else (header.lower().encode(),)
        self._key_headers = tuple(dict.fromkeys((*KEY_HEADERS, *custom)))

    def judge(self, request: Request) -> Accepted | Refusal:
        """Accept a request or refuse it."""
        seen = _Seen(request.headers)
        refusal = _head_fault(request) or self._host_fault(seen, request.server)
        refusal = refusal or _body_fault(seen, request) or _path_fault(request.path, request.query)
        if refusal is not None:
            return refusal
        if request.path == HEALTH and request.method in ("GET", "HEAD"):
            return Accepted("health")
        found = self._client(seen)
        if found is None:
            return _NO_TOKEN
        client, key_header = found
        if request.path == STATE and request.method == "GET":
            return Accepted("state", client.tenant)
        return self._not_allowed(request) or self._tenant(client, seen, request, key_header)

    def _host_fault(self, seen: _Seen, server: str) -> Refusal | None:
        host = _HOST.fullmatch(seen.one(b"host"))
        name = host[1].decode().lower() if host is not None else ""
        if name not in self._hosts and not (server and name in (server, f"[{server}]")):
            return _OTHER_HOST
        return _FROM_A_PAGE if b"origin" in seen.values else None

    def _client(self, seen: _Seen) -> tuple[Client, bytes] | None:
        for name in self._key_headers:
            values = seen.values.get(name)
            if values is not None:
                bare = name == b"authorization"
                client = self._tokens.client(_bearer(value) if bare else value for value in values)
                if client is not None:
                    return client, name
        return None

    def _not_allowed(self, request: Request) -> Refusal | None:
        path = request.path.decode()
        inside = path.removeprefix(self.base) if path.startswith(f"{self.base}/") else None
        if inside is None or not (inside in self._exact or inside.startswith(self._below)):
            where = f"paths follow {self.base}" if self.base else "paths are those of the upstream"
            return Refusal(404, "path_not_allowed", f"this path is not allowed: {where}, and --allow-path allows them")
        if request.method not in self._methods:
            allowed = ", ".join(sorted(self._methods))
            return Refusal(405, "method_not_allowed", f"only {allowed} are allowed", ((b"allow", allowed.encode()),))
        return None

    def _tenant(self, client: Client, seen: _Seen, request: Request, key_header: bytes) -> Accepted | Refusal:
        tenant = client.tenant
        named = seen.values.get(TENANT)
        if named is not None:
            asked = named[0].decode("latin-1").strip()
            if len(named) > 1 or not asked or len(asked) > 200:
                return Refusal(400, "invalid_tenant", f"{TENANT.decode()} must name one tenant, in at most 200 letters")
            if asked != tenant and not client.names_tenant:
                return Refusal(403, "tenant_not_allowed", "this token is bound to its tenant, and may not name another")
            tenant = asked
        length = seen.one(b"content-length")
        target = request.path + b"?" + request.query if request.query else request.path
        kept = for_upstream(request.headers, self._host, key_header if self.header is None else None)
        return Accepted("forward", tenant, target, kept, int(length) if length else None)


class _Seen:
    """Headers by name."""

    __slots__ = ("values",)

    def __init__(self, headers: Headers) -> None:
        self.values: dict[bytes, list[bytes]] = {}
        for name, value in headers:
            self.values.setdefault(name, []).append(value)

    def one(self, name: bytes) -> bytes:
        """The value of a header that may come once; nothing if it came several times."""
        values = self.values.get(name, ())
        return values[0] if len(values) == 1 else b""


NO_BODY = Refusal(400, "body_not_allowed", "a GET, HEAD or DELETE request must have no body")
_VERSIONS = ("1.1", "1.0", "2", "3")
_OTHER_HOST = Refusal(
    403,
    "host_not_allowed",
    "this Host is not one of the proxy; reach it as 127.0.0.1 or localhost, or give --allow-host",
)
_FROM_A_PAGE = Refusal(403, "origin_not_allowed", "requests with an Origin come from web pages, and are refused")
_NO_TOKEN = Refusal(
    401,
    "invalid_token",
    "send the token of the proxy, as Authorization: Bearer, x-api-key, api-key or x-goog-api-key",
    ((b"www-authenticate", b"Bearer"),),
)


def _head_fault(request: Request) -> Refusal | None:
    if request.version not in _VERSIONS:
        return Refusal(400, "invalid_request", "this version of HTTP does not exist")
    length = sum([len(name) + len(value) for name, value in request.headers])
    if length + len(request.path) + len(request.query) > LONGEST_HEAD:
        return Refusal(431, "head_too_long", f"path and headers are longer than {LONGEST_HEAD} bytes")
    return None


def _body_fault(seen: _Seen, request: Request) -> Refusal | None:
    """Refuse what two servers could read as bodies of different lengths."""
    lengths, encodings = seen.values.get(b"content-length"), seen.values.get(b"transfer-encoding")
    if lengths is not None and (len(lengths) > 1 or not lengths[0].isdigit() or len(lengths[0]) > 15):
        return Refusal(400, "invalid_length", "Content-Length must be one number")
    if encodings is not None and (lengths is not None or [word.lower() for word in encodings] != [b"chunked"]):
        return Refusal(400, "invalid_length", "a body is either of a Content-Length or chunked")
    if encodings is not None and request.version == "1.0":
        return Refusal(400, "invalid_length", "HTTP/1.0 has no chunked bodies")
    if request.method in BODILESS and (encodings is not None or (lengths is not None and int(lengths[0]) > 0)):
        return NO_BODY
    return None


_PLAIN_PATH = "the path must be plain: one slash before each part, and nothing encoded that servers read differently"


def _path_fault(path: bytes, query: bytes) -> Refusal | None:
    segments = path.split(b"/")
    if _PATH.fullmatch(path) is None or _TRICKY.search(path) or b".." in segments or b"." in segments:
        return Refusal(400, "invalid_path", _PLAIN_PATH)
    names = (unquote_to_bytes(part.partition(b"=")[0]).strip().lower() for part in re.split(rb"[&;]", query))
    if b"#" in query or any(name in _CREDENTIALS_IN_QUERY for name in names):
        return Refusal(400, "key_in_query", "a key or token in the query is refused: send the token in a header")
    return None


def _bearer(value: bytes) -> bytes:
    kind, _, token = value.partition(b" ")
    return token.strip() if kind.lower() == b"bearer" else b""


def _patterns(paths: Iterable[str]) -> tuple[frozenset[str], tuple[str, ...]]:
    """The paths that are allowed as they are, and those below which everything is."""
    given = list(paths) or [f"{prefix}{path}" for prefix in ("", "/v1") for path in INFERENCE_PATHS]
    for path in given:
        plain = path.removesuffix("/*")
        if path != "/*" and ("*" in plain or _path_fault(plain.encode(), b"") is not None):
            raise InvalidArgument(
                f"a path that is allowed must be like /chat/completions or /models/*, got {path!r}",
                remedy="It is what follows the URL of the upstream, and begins with a slash.",
            )
    return frozenset(given), tuple(path.removesuffix("*") for path in given if path.endswith("/*"))


def _checked_header(header: str | None) -> str | None:
    if header is not None and (_HEADER.fullmatch(header) is None or header.lower() in ("host", "content-length")):
        raise InvalidArgument(f"header must be the name of a header such as x-api-key, got {header!r}")
    return header


def _checked_methods(methods: Iterable[str]) -> frozenset[str]:
    given = frozenset(method.upper() for method in methods)
    if not given or given - _ALL_METHODS:
        known = ", ".join(sorted(_ALL_METHODS))
        raise InvalidArgument(f"methods must be some of {known}, got {', '.join(sorted(given))}")
    return given


def _parts(upstream: str, insecure: bool) -> tuple[str, str, str]:
    from urllib.parse import urlsplit

    try:
        parts = urlsplit(upstream)
        host, _ = parts.hostname, parts.port
    except ValueError:
        parts, host = urlsplit(""), None
    path = parts.path.rstrip("/")
    wrong = parts.scheme not in ("http", "https") or not host or parts.query or parts.fragment or "@" in parts.netloc
    if wrong or not parts.netloc.isascii() or (path and _path_fault(path.encode(), b"") is not None):
        raise InvalidArgument(
            "the upstream must be a URL such as https://api.openai.com/v1, without a user, a query or a fragment",
            remedy="Keys belong into --keys.",
        )
    if parts.scheme == "http" and not insecure and not is_loopback(host or ""):
        raise InvalidArgument(
            f"keys do not go to http://{host}: without TLS everybody on the way can read them",
            remedy="Use https://, or say that the upstream may be insecure if the network is yours alone.",
        )
    return parts.scheme, parts.netloc, path
