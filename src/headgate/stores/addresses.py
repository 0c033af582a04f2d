"""Stores by their addresses: "sqlite:///shared.db", "postgresql://user@host/database", or HEADGATE_STORE."""

from __future__ import annotations

import os
import re
import threading
import weakref
from importlib import import_module
from typing import Any, Final

from headgate.errors import InvalidArgument

_SQLITE: Final = ("headgate.stores.sqlite", "SqliteStore")
_POSTGRES: Final = ("headgate.stores.postgres", "PostgresStore")
_FORMS: Final = (
    "Pass 'sqlite:///shared.db' (three slashes and a relative path, four for an absolute one) or "
    "'postgresql://user:password@host/database'."
)
_SCHEME: Final = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]{0,30})://")

_stores: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
_naming = threading.Lock()


def _forked() -> None:
    """In a forked child: another thread may have held the lock, and is not there to free it."""
    global _naming
    _naming = threading.Lock()


os.register_at_fork(after_in_child=_forked)


def store_of(value: Any) -> Any:
    """Return the store that a string names; anything else is returned as it is.

    "sqlite:///shared.db" is a relative path and "sqlite:////var/lib/shared.db" an absolute one; "postgresql://..." and
    "postgres://..." are given to PostgresStore as they are. The same name in one process gives the same store for as
    long as somebody holds it and nobody has closed it, so that all pools of a process are one member.

    InvalidArgument for any other string. The message never shows the string, which may have a password in it.
    """
    if not isinstance(value, str):
        return value
    (module, name), argument = _parsed(value)
    with _naming:
        store = _stores.get(key := f"{name} {argument}")
        if store is None or getattr(store, "is_closed", False):
            store = _stores[key] = getattr(import_module(module), name)(argument)
    return store


def store_from_environment() -> Any:
    """Return the store that HEADGATE_STORE names, or None if it is not set."""
    value = os.environ.get("HEADGATE_STORE", "").strip()
    try:
        return store_of(value) if value else None
    except InvalidArgument as error:
        raise InvalidArgument(f"HEADGATE_STORE: {error.message}", remedy=error.remedy) from None


def _parsed(value: str) -> tuple[tuple[str, str], str]:
    """The module and class of the store that a string names, and the argument for it."""
    found = _SCHEME.match(value)
    scheme = found[1].lower() if found is not None else ""
    rest = value[found.end() :] if found is not None else ""
    if scheme in ("postgresql", "postgres") and rest:
        return _POSTGRES, value
    if scheme != "sqlite":
        what = f"a string that begins with '{scheme}://'" if scheme else "a string that names no kind of store"
        raise InvalidArgument(f"store must be a store or the name of one, got {what}", remedy=_FORMS)
    path = rest[1:]
    if not rest.startswith("/") or not path.strip("/") or path == ":memory:":
        raise InvalidArgument("store: 'sqlite://' must be followed by a slash and the path of a file", remedy=_FORMS)
    if "?" in path:
        raise InvalidArgument(
            "store: a 'sqlite:///' name has no options after '?'",
            remedy="Leave them out. For a file with such a name pass SqliteStore(path).",
        )
    return _SQLITE, os.path.abspath(os.path.expanduser(path))
