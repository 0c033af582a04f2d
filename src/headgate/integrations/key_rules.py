"""Where keys may go and in which header: the rules of the rotating transports. Pure."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import Any

from headgate.errors import InvalidArgument, InvalidType
from headgate.resources.model import Resource

Header = str | Callable[[Resource[Any]], Mapping[str, str]] | None

# Headers in which SDKs put a key, if it is not `Authorization: Bearer`: Anthropic, Google, Azure.
_KEY_HEADERS = (b"x-api-key", b"x-goog-api-key", b"api-key")


class KeyRules:
    """Decides whether a request may carry a key, and writes the key into its headers."""

    def __init__(self, header: Header, hosts: Iterable[str] | None, insecure: bool) -> None:
        """Without `hosts`, keys go only to where the first request goes."""
        if not (header is None or isinstance(header, str) or callable(header)):
            raise InvalidType(
                f"header must be the name of a header or a function, got {type(header).__name__}",
                remedy='Pass "Authorization", "x-api-key", or a function from the resource to headers.',
            )
        if isinstance(hosts, str):
            raise InvalidType("hosts must be a list of host names, got a string", remedy=f"Write hosts=[{hosts!r}].")
        self._header = header
        self._insecure = insecure
        self._hosts = None if hosts is None else frozenset(_checked_host(host) for host in hosts)
        self._origin: tuple[str, str, int | None] | None = None

    def keep_to(self, url: Any) -> None:
        """Without `hosts`: let keys go only to the scheme, host and port of this URL."""
        self._require_tls(url)
        self._origin = (url.scheme, url.host, url.port)

    def may_carry(self, url: Any) -> bool:
        """Whether a request to this URL may carry a key. Raises InvalidArgument if anybody on the way could read it."""
        if self._hosts is not None:
            host = url.host.lower()
            allowed = host in self._hosts or f"{host}:{url.port or _PORTS.get(url.scheme)}" in self._hosts
        elif self._origin is None:
            self.keep_to(url)
            return True
        else:
            return (url.scheme, url.host, url.port) == self._origin  # which has TLS, or need not: see `keep_to`
        if allowed:
            self._require_tls(url)
        return allowed

    def headers(self, resource: Resource[Any], present: Iterable[tuple[bytes, bytes]]) -> Mapping[str, str]:
        """The headers that carry the key of a resource, in the place of those `present` that the client has filled."""
        if callable(self._header):
            return self._header(resource)
        key = _checked_key(resource)
        name = _filled(b"\n".join([name for name, _ in present])) if self._header is None else self._header
        return {name: f"Bearer {key}" if name.lower() == "authorization" else key}

    def _require_tls(self, url: Any) -> None:
        if url.scheme == "https" or self._insecure or is_loopback(url.host):
            return
        raise InvalidArgument(
            f"keys do not go to {url.scheme}://{url.host}: without TLS everybody on the way can read them",
            remedy="Use https://, or pass insecure=True if the network is yours alone.",
        )


@lru_cache(maxsize=64)  # the requests of a program have the same few lists of headers
def _filled(names: bytes) -> str:
    """In which of these headers, one on each line, a client puts its key."""
    present = names.lower().split(b"\n")
    return next((name.decode() for name in _KEY_HEADERS if name in present), "Authorization")


_PORTS = {"http": 80, "https": 443}


def is_loopback(host: str) -> bool:
    """Whether a host of a URL is this machine."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _checked_host(host: object) -> str:
    if not isinstance(host, str) or not host or "/" in host or "@" in host:
        raise InvalidArgument(
            f"hosts must be names such as api.example.com or localhost:8080, got {host!r}",
            remedy="Leave out the scheme and the path.",
        )
    return host.lower()


def _checked_key(resource: Resource[Any]) -> str:
    """The value of a resource as text for a header. Errors name the resource, never its value."""
    key = resource.value
    if not isinstance(key, str):
        raise InvalidType(
            f"the value of {resource.resource_id!r} must be a string to go into a header, got {type(key).__name__}",
            remedy="Pass header= a function that makes the headers of a resource.",
        )
    if not key or not key.isascii() or not key.isprintable():
        raise InvalidArgument(
            f"the value of {resource.resource_id!r} is empty or has characters that no header may have",
            remedy="Look for a line break at its end: call strip() where it is read.",
        )
    return key
