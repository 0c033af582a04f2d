"""Addresses of workers: ``unix:/path``, ``host:port`` and ``[v6]:port``. Pure, but for names that must be looked up."""

from __future__ import annotations

import ipaddress
import re
from typing import NamedTuple

from headgate.errors import InvalidArgument, InvalidType

_HOST = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_.])?")


class TcpAddress(NamedTuple):
    """A host and a port."""

    host: str
    """A name, or an IPv4 or IPv6 address without brackets."""
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_address(address: object) -> TcpAddress | str:
    """Return a host and a port, or the path of a Unix socket. InvalidArgument: it is neither."""
    if not isinstance(address, str):
        raise InvalidType(f"the address of a worker must be a string, got {type(address).__name__}")
    if address.startswith("unix:"):
        path = address.removeprefix("unix:")
        path = path.removeprefix("//") if path.startswith("///") else path
        if not path.startswith("/") or path.startswith("//") or path.endswith("/") or "\0" in path:
            raise _wrong(address)
        return path
    host, colon, port = address.rpartition(":")
    if not colon or not (port.isascii() and port.isdigit()) or int(port) > 65535:
        raise _wrong(address)
    if host.startswith("[") and host.endswith("]"):
        try:
            ipaddress.IPv6Address(host[1:-1])
        except ValueError:
            raise _wrong(address) from None
        return TcpAddress(host[1:-1], int(port))
    if not _HOST.fullmatch(host):
        raise _wrong(address)
    return TcpAddress(host, int(port))


def _wrong(address: str) -> InvalidArgument:
    return InvalidArgument(
        f"{address!r} is not the address of a worker", remedy="Write host:port, [IPv6]:port or unix:/path/to/socket."
    )


def is_loopback(host: str) -> bool:
    """Whether only programs of this machine reach this host. Names are looked up. OSError: that failed."""
    try:
        found = [ipaddress.ip_address(host)]
    except ValueError:
        import socket

        known = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        found = [ipaddress.ip_address(str(one[4][0])) for one in known]
    return all((getattr(one, "ipv4_mapped", None) or one).is_loopback for one in found)


def is_wildcard(host: str) -> bool:
    """Whether a host means every address of this machine: to listen on, not to connect to."""
    return host in ("0.0.0.0", "::")


def checked_host(host: object) -> str | None:
    """Return a host to listen on, without brackets; None: none is given."""
    if host is None:
        return None
    if not isinstance(host, str):
        raise InvalidType(f"host must be a string or None, got {type(host).__name__}")
    if not host.strip():
        raise InvalidArgument("host must not be blank", remedy='Use "127.0.0.1" for this machine, "0.0.0.0" for all.')
    return host.strip().removeprefix("[").removesuffix("]")


def checked_port(port: object) -> int:
    """Return a port to listen on; 0: one that is free."""
    if not isinstance(port, int) or isinstance(port, bool) or not 0 <= port <= 65535:
        raise InvalidArgument(f"port must be a whole number from 0 to 65535, got {port!r}")
    return port
