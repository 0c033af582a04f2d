"""Namespaces: the name that publishers and subscribers of a discovery have in common."""

from __future__ import annotations

import hashlib

from headgate.core.clock import clock
from headgate.errors import InvalidArgument, InvalidType

_LONGEST = 200


def checked_namespace(namespace: object) -> str:
    """Return a namespace. None: one that nobody else has."""
    if namespace is None:
        return clock.token()
    if not isinstance(namespace, str):
        raise InvalidType(f"namespace must be a string or None, got {type(namespace).__name__}")
    if not namespace.strip() or len(namespace) > _LONGEST or not namespace.isprintable():
        raise InvalidArgument(
            f"namespace must have 1 to {_LONGEST} printable characters, got {namespace[:_LONGEST]!r}",
            remedy="Pass a name that all programs of one application use, or None for one that nobody else has.",
        )
    return namespace


def digest(*parts: str, length: int = 32) -> str:
    """Return a name for files and DNS labels: hexadecimal digits that stand for these texts."""
    joined = "\0".join(parts).encode("utf-8", "surrogatepass")
    return hashlib.sha256(joined).hexdigest()[:length]
