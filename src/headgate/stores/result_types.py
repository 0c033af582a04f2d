"""Which class does a stored name mean?

A file that names a class must not be able to import a module or to run anything. So a name is looked up among the
classes that the program named itself (`result_types=`) and in modules that are loaded already, and there by reading
dictionaries: a module or a class that makes its attributes on demand is not asked to.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

from headgate.errors import InvalidType
from headgate.stores.structures import is_structure


def stored_name(kind: type) -> str:
    """The name of a class as it is stored: module:qualname."""
    return f"{kind.__module__}:{kind.__qualname__}"


class ResultTypes:
    """Finds classes by their stored names.

    A class that is given is found by its full name, and by its qualname alone if only one of those given has it: it may
    have moved to another module, or stand in a script that was `__main__` when it ran.
    """

    __slots__ = ("_given", "_moved", "on_miss")

    def __init__(self, given: Iterable[type] = (), on_miss: Callable[[str, str], None] | None = None) -> None:
        self._given: dict[str, type] = {}
        self._moved: dict[str, type | None] = {}
        self.on_miss: Callable[[str, str], None] | None = on_miss
        """Told the name of a class, and why a value of it comes back as a mapping."""
        for kind in given:
            self._given[stored_name(kind)] = kind
            known = self._moved.setdefault(kind.__qualname__, kind)
            if known is not kind:
                self._moved[kind.__qualname__] = None

    def find(self, name: str) -> type | None:
        """The class of this name, if it is given or its module is loaded. Imports nothing and calls nothing."""
        if (kind := self._given.get(name)) is not None:
            return kind
        module, _, qualname = name.partition(":")
        if (kind := self._moved.get(qualname)) is not None:
            return kind
        return _loaded(module, qualname)

    def missed(self, name: str, why: str) -> None:
        """Tell whoever wants to know that a value of this class comes back as a mapping."""
        if self.on_miss is not None:
            self.on_miss(name, why)


LOADED = ResultTypes()
"""Knows the classes of modules that are loaded, and no others."""


def checked_types(given: object) -> tuple[type, ...]:
    """The classes of `result_types=`, or InvalidType."""
    if given is None:
        return ()
    kinds: tuple[Any, ...] = (given,) if isinstance(given, type) or not isinstance(given, Iterable) else tuple(given)
    for kind in kinds:
        if not isinstance(kind, type) or not is_structure(kind):
            what = kind.__qualname__ if isinstance(kind, type) else repr(kind)
            raise InvalidType(
                f"result_types must be classes whose values are stored by their fields, got {what}",
                remedy="Pass dataclasses, named tuples, enums, or models of pydantic 2 or msgspec. "
                "What JSON knows, and the types in docs/tasks.md, need not be named.",
            )
    return kinds


def _loaded(module: str, qualname: str) -> type | None:
    """What stands under this name in a module that is loaded, if it is a class."""
    home = sys.modules.get(module)
    if home is None:
        return None
    name, bracket, _ = qualname.partition("[")
    found: object = home
    for part in name.split("."):
        # Not getattr, vars or isinstance: a module that loads itself on the first look would do so.
        get: Any = type.__getattribute__ if issubclass(type(found), type) else object.__getattribute__
        try:
            found = get(found, "__dict__")[part]
        except (AttributeError, KeyError, TypeError):
            return None
    if not isinstance(found, type):
        return None
    return _parametrized(found, qualname) if bracket else found


def _parametrized(origin: type, qualname: str) -> type | None:
    """``Page[Item]`` of pydantic is a class of its own below `Page`. None if there is none of this name, or several."""
    below: list[type] = type.__subclasses__(origin)
    kinds = [kind for kind in below if kind.__qualname__ == qualname]
    return kinds[0] if len(kinds) == 1 else None
