"""The address of a PostgreSQL server: checked when a store is made, and shown without its password."""

from __future__ import annotations

import os
from typing import NamedTuple
from urllib.parse import SplitResult, parse_qs, unquote, urlsplit

from headgate.errors import InvalidArgument, InvalidType

_EXAMPLE = "Pass an address such as postgresql://user:password@host:5432/database."
_ENCODE = (
    "Percent-encode special characters of the user name and the password, for example with "
    'urllib.parse.quote(password, safe=""), or leave the password out and set PGPASSWORD or a passfile.'
)
_PORT = "5432"


class Address(NamedTuple):
    """Where a server is."""

    dsn: str
    """As it was given, with the password. Only asyncpg sees it."""
    place: str
    """The host and port, or several of them."""
    shown: str
    """The host, port and database, for people."""
    targets: str | None
    """What asyncpg is to look for among the hosts; None when the address or the environment says it."""

    def __repr__(self) -> str:
        return f"<Address {self.shown}>"


def parsed(dsn: object) -> Address:
    """Check an address; InvalidArgument, which never shows any of it that may be a password."""
    if not isinstance(dsn, str):
        raise InvalidType(f"dsn must be a string, got {type(dsn).__name__}", remedy=_EXAMPLE)
    complaint, parts, query = _split(dsn)
    if complaint is not None:
        raise InvalidArgument(f"the address of the PostgreSQL server {complaint[0]}", remedy=complaint[1])
    hosts = parts.netloc.rpartition("@")[2] or query.get("host") or os.environ.get("PGHOST") or "localhost"
    port = query.get("port") or os.environ.get("PGPORT") or _PORT
    place = ",".join(_with_port(unquote(host), port) for host in hosts.split(","))
    database = unquote(parts.path[1:]) or query.get("dbname") or query.get("database") or os.environ.get("PGDATABASE")
    says = "target_session_attrs" in query or "PGTARGETSESSIONATTRS" in os.environ
    return Address(dsn, place, f"{place}/{database or ''}", None if says else "read-write")


def _split(dsn: str) -> tuple[tuple[str, str] | None, SplitResult, dict[str, str]]:
    """What is wrong with an address and what to do (or None), its parts, and the options after its question mark."""
    nothing = urlsplit("")
    if not dsn.startswith(("postgresql://", "postgres://")):
        return ("does not begin with postgresql://", _EXAMPLE), nothing, {}
    try:
        parts = urlsplit(dsn)
        query = {key: values[-1] for key, values in parse_qs(parts.query, strict_parsing=bool(parts.query)).items()}
    except ValueError:
        return ("cannot be read", _ENCODE), nothing, {}
    host = parts.netloc.rpartition("@")[2]
    if parts.netloc.count("@") > 1 or "@" in parts.path or parts.fragment or "#" in dsn:
        return ("has an unexpected '@', '/' or '#'", _ENCODE), nothing, {}
    if any(not _is_port(port) for port in (*_ports(host), *query.get("port", _PORT).split(","))):
        return ("has a port that is no number from 1 to 65535", _EXAMPLE), nothing, {}
    return None, parts, query


def _ports(hosts: str) -> list[str]:
    found = []
    for host in hosts.split(","):
        rest = host.rpartition("]")[2] if host.startswith("[") else host
        if ":" in rest:
            found.append(rest.rpartition(":")[2])
    return found


def _is_port(text: str) -> bool:
    return text.isascii() and text.isdigit() and 0 < int(text) < 65536


def _with_port(host: str, port: str) -> str:
    rest = host.rpartition("]")[2] if host.startswith("[") else host
    return host if ":" in rest else f"{host}:{port}"
