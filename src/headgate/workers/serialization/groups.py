"""Groups of functions and classes on a worker: what was sent together, and the copies of it that calls use.

Calls share one copy if none of them can change it, as far as its code tells (see `settled`). Of an *exclusive* group
each running call has a copy for itself, which is used again after the call. In either case a copy in which something
was changed is not used by later calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from headgate.core.imports import Require
from headgate.workers.serialization.dynamic_classes import Scope, loads
from headgate.workers.serialization.settled import Surroundings, surroundings_of

if TYPE_CHECKING:
    from headgate.workers.routines import Routine

_IDLE = 64  # copies of an exclusive group that are kept for later calls at most


class Copy:
    """A loaded group."""

    __slots__ = ("functions", "names", "scope", "seen")

    def __init__(
        self, scope: Scope, functions: tuple[Callable[..., Any], ...] = (), seen: Surroundings | None = None
    ) -> None:
        self.functions: tuple[Callable[..., Any], ...] = functions
        self.scope: Scope = scope if seen is None else _named(scope, seen)
        """Its classes, by id."""
        self.seen: Surroundings | None = seen
        """All that it sees; None: it cannot be used again."""
        self.names: Mapping[int, str] = {} if seen is None else {id(kind): name for name, kind in self.scope.items()}
        """The ids of its classes, by the identity of the class: the client knows them."""

    def is_unchanged(self) -> bool:
        """Tell whether later calls may use it."""
        return self.seen is not None and self.seen.has_its_attributes()

    def routines_of(self, fn: Callable[..., Any]) -> Iterator[Routine]:
        """Yield the routines of the group that run this function."""
        return (routine for routine in (self.seen.routines if self.seen else ()) if routine.fn is fn)


def _named(scope: Scope, seen: Surroundings) -> Scope:
    known = {id(kind) for kind in seen.classes} if seen.names_classes else ()
    return {name: kind for name, kind in scope.items() if id(kind) in known}


class Group:
    """What was sent in one pickle, and the copies of it."""

    __slots__ = ("__weakref__", "_exclusive", "_idle", "_shared", "_value")

    def __init__(self, value: bytes, exclusive: bool) -> None:
        self._value = value
        self._exclusive = exclusive
        self._shared: Copy | None = None
        self._idle: list[Copy] = []

    def idle(self) -> Copy | None:
        """Return a copy that a call may use now; None: one has to be loaded."""
        if not self._exclusive:
            shared = self._shared
            return shared if shared is not None and (not shared.scope or shared.is_unchanged()) else None
        while self._idle:
            copy = self._idle.pop()
            if copy.is_unchanged():
                return copy
        return None

    def load(self, require: Require | None) -> Copy:
        """Load a new copy. ImportNeeded: not yet (see `core.imports`)."""
        scope: Scope = {}
        loaded = loads(self._value, scope, require)
        functions, classes = loaded if isinstance(loaded, tuple) else ((loaded,), ())
        copy = Copy(scope, functions, surroundings_of(functions, classes))
        if not self._exclusive:
            self._shared = copy
        return copy

    def close(self, copy: Copy) -> None:
        """Keep a copy of an exclusive group for later calls."""
        if self._exclusive and copy.seen is not None and len(self._idle) < _IDLE:
            self._idle.append(copy)


_groups: WeakValueDictionary[tuple[bytes, bool], Group] = WeakValueDictionary()


def group_of(value: bytes, exclusive: bool) -> Group:
    """Return the group of a pickle, the same for all functions in it, and for all clients that sent it."""
    group = _groups.get((value, exclusive))
    if group is None:
        group = _groups[value, exclusive] = Group(value, exclusive)
    return group
