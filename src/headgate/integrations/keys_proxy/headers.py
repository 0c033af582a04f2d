"""Which headers go on to the upstream, and which come back. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from headgate.integrations.keys_proxy.refusals import Headers

TENANT = b"x-headgate-tenant"
"""The header in which a client names its tenant, if its token allows that."""

KEY_HEADERS = (b"authorization", b"x-api-key", b"api-key", b"x-goog-api-key")
"""Where clients put a token: where the SDKs put a key."""

_HOP_BY_HOP = frozenset(
    (
        *(b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection"),
        *(b"te", b"trailer", b"transfer-encoding", b"upgrade", b"http2-settings"),
    )
)
_INBOUND = _HOP_BY_HOP.union(
    KEY_HEADERS,
    (b"cookie", b"x-amz-security-token", b"x-auth-token", TENANT),
    # Where a client is, and what it runs on, is not for the upstream to know.
    (b"forwarded", b"via", b"x-real-ip", b"referer", b"origin"),
    (b"true-client-ip", b"x-client-ip", b"cf-connecting-ip", b"x-goog-iam-authorization-token"),
    (b"x-method-override", b"x-override-url"),  # see _INBOUND_PREFIXES
    # Of the account to which a key belongs: with another one the upstream would refuse good keys.
    (b"openai-organization", b"openai-project"),
    # Written anew: the body has been read as a whole, and the host is another one.
    (b"host", b"content-length", b"expect", b"accept-encoding"),
)
# Some servers take them for another method, path or host than the one that was looked at.
_INBOUND_PREFIXES = (b"x-forwarded-", b"x-http-", b"x-original-", b"x-rewrite-")
# A cookie of the upstream is a credential too. The others would tell a browser things about the host of the proxy.
_OUTBOUND = _HOP_BY_HOP.union(
    (b"set-cookie", b"set-cookie2", b"strict-transport-security", b"alt-svc", b"clear-site-data")
)
_READABLE = (b"gzip", b"deflate")


def for_upstream(headers: Headers, host: bytes, key_header: bytes | None) -> Headers:
    """Return the headers for the upstream, without the key.

    `key_header`: where the client has sent its token; the key will stand in the same header.
    """
    named, encodings = _named(headers), b""
    kept = [(b"host", host)]
    for pair in headers:
        name = pair[0]
        # CGI and WSGI read X_Original_URL as X-Original-URL, so that a list of names would stop nothing.
        if name not in _INBOUND and not name.startswith(_INBOUND_PREFIXES) and b"_" not in name:
            if name not in named:
                kept.append(pair)
        elif name == b"accept-encoding":
            encodings = pair[1]
    kept.append((b"accept-encoding", _readable(encodings)))
    if key_header is not None and key_header != b"authorization":
        kept.append((key_header, b"-"))
    return kept


def for_client(headers: Iterable[tuple[bytes, bytes]]) -> Headers:
    """Return the headers of an answer for the client."""
    lowered = [(name.lower(), value) for name, value in headers]
    named = _named(lowered)
    if first(lowered, b"transfer-encoding") is not None:
        named |= {b"content-length"}  # it says nothing beside a Transfer-Encoding, and is wrong in what passes here
    return [pair for pair in lowered if pair[0] not in _OUTBOUND and pair[0] not in named and not _is_cors(pair[0])]


def first(headers: Headers, name: bytes) -> bytes | None:
    """Return the value of the first header of this name."""
    return next((value for one, value in headers if one == name), None)


def joined(headers: Headers, name: bytes) -> bytes:
    """Return the values of all headers of this name as one list, or nothing if there is none."""
    return b", ".join([value for one, value in headers if one == name])


def _named(headers: Headers) -> frozenset[bytes]:
    """The headers that `Connection` calls hop-by-hop."""
    values = [value for name, value in headers if name == b"connection"]
    if not values or values == [b"keep-alive"]:
        return frozenset()
    # Not those that say what the body is: a client must not be able to have them dropped.
    return frozenset(word.strip().lower() for value in values for word in value.split(b",")) - {b"content-type"}


def _is_cors(name: bytes) -> bool:
    return name.startswith(b"access-control-")


def _readable(encodings: bytes) -> bytes:
    """What the client accepts, of those encodings in which an error can be searched for keys."""
    words = [word.strip().lower() for word in encodings.split(b",")]
    kept = [word for word in words if word.partition(b";")[0].strip() in _READABLE]
    return b", ".join(kept) or b"identity"
