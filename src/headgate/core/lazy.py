"""Names of a package that are loaded, with their module, when they are first used."""

from __future__ import annotations

from importlib import import_module

TYPE_CHECKING = False  # typing's own, without importing typing: every program that uses headgate pays for this module
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any


def lazy(namespace: dict[str, Any], modules: Mapping[str, tuple[str, ...]]) -> Callable[[str], Any]:
    """A ``__getattr__`` for the package with this namespace, given which module has which names."""
    where = {name: module for module, names in modules.items() for name in names}

    def get(name: str) -> Any:
        if name not in where:
            raise AttributeError(f"module {namespace['__name__']!r} has no attribute {name!r}")
        value = namespace[name] = getattr(import_module(where[name]), name)
        return value

    return get
