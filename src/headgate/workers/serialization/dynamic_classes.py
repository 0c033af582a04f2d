"""Classes that are sent by value, and how they are loaded.

cloudpickle gives a class of ``__main__`` an id when it first sends it. When such a class is loaded in a process that
has a class of that id, cloudpickle overwrites that class with what was sent. This is wrong on both sides:

* **At the client** the class belongs to the program. A result must refer to it and must not change it: its counters,
  its patched methods, the globals of its methods.
* **On a worker** every call has its own copy of what it sees. If two calls shared a class, one would see what the other
  did to it.

So data that holds such a class is loaded here. With a `Scope`, the classes of one call are used. Without one, the
classes of the process are used, and those that this process defined itself are not changed.

Data may also *name* a class that the receiver has, by its id (`codec.known_class`).
"""

from __future__ import annotations

import functools
import importlib
import io
import pickle
import sys
import types
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from headgate.core.imports import Require
from headgate.workers.codec import known_class
from headgate.workers.protocol.bulk import Borrowed, BulkPayload, Payload, Unreadable

_SIGN = b"_make_skeleton"
_NAMED = known_class.__name__.encode()
_GLOBAL = pickle.STACK_GLOBAL  # of each class or function that a pickle names, and of no pickle without one
_received: weakref.WeakSet[type] = weakref.WeakSet()
_usable: set[str] = set()  # modules that need not be asked for again

Scope = dict[str, type]
"""The classes of one call, by cloudpickle's id."""


def id_of(kind: type) -> str:
    """Return the id by which processes know a class that is sent by value."""
    from cloudpickle import cloudpickle

    made: str = cloudpickle._get_or_create_tracker_id(kind)
    return made


def loads(data: Payload, scope: Scope | None = None, require: Require | None = None) -> Any:
    """Unpickle a payload; classes that were sent by value are loaded into `scope`, or into the process.

    `require` is asked before anything is used of a module. When it raises ImportNeeded, `scope` is unchanged, and the
    payload can be loaded again.
    """
    if isinstance(data, bytes) and _SIGN not in data:
        if _NAMED in data:
            finder = _Finder(io.BytesIO(data))
            finder.scope, finder.require = scope, require
            return finder.load()
        if require is None or _GLOBAL not in data:
            return pickle.loads(data)
        asking = _Asking(io.BytesIO(data))
        asking.require = require
        return asking.load()
    buffers: Sequence[Any] = ()
    lifted = 0
    assert not isinstance(data, Borrowed), "it was read"
    if isinstance(data, Unreadable):
        raise OSError(data.reason)
    if isinstance(data, BulkPayload):
        buffers, lifted, data = data.buffers, data.lifted, data.pickle
    if _SIGN not in data and _NAMED not in data and not lifted and (require is None or _GLOBAL not in data):
        return pickle.loads(data, buffers=buffers)
    attempt = scope if require is None or scope is None else dict(scope)
    value = _Unpickler(data, buffers, lifted, attempt, require).load()
    if scope is not None and attempt is not None:
        scope.update(attempt)
    return value


@functools.cache
def _known_here() -> Mapping[str, type]:
    """Return the classes that this process has defined itself, by id."""
    from cloudpickle import cloudpickle

    known: Mapping[str, type] = cloudpickle._DYNAMIC_CLASS_TRACKER_BY_ID
    return known


_find_class = pickle.Unpickler.find_class  # not by super(): this is the way of most arguments (benchmarks/dispatch.py)


class _Asking(pickle.Unpickler):
    """Asks before it uses something of a module, or a module itself."""

    require: Require | None = None

    def find_class(self, module: str, name: str) -> Any:
        if self.require is not None:
            if module not in _usable or module not in sys.modules:
                self.require(module)
                _usable.add(module)
            if name == "subimport" and module == "cloudpickle.cloudpickle":
                return self._import
        return _find_class(self, module, name)

    def _import(self, name: str) -> types.ModuleType:
        """Return a module that a function or class sees, as cloudpickle's `subimport` does."""
        if self.require is not None:
            self.require(name)
        return importlib.import_module(name)


class _Finder(_Asking):
    """Unpickles what names classes."""

    scope: Scope | None = None

    def find_class(self, module: str, name: str) -> Any:
        if name == known_class.__name__ and module == known_class.__module__:
            return self._find
        return super().find_class(module, name)

    def _find(self, tracker: str) -> type:
        """Return the class of this id that the receiver has: the one of the call, or one that it has defined itself."""
        found = None if self.scope is None else self.scope.get(tracker)
        if found is None:
            found = _known_here().get(tracker)
        if not isinstance(found, type):
            known_class(tracker)
        return found


class _Unpickler(_Finder):
    """Unpickles what contains classes."""

    def __init__(
        self, data: bytes, buffers: Sequence[Any], lifted: int, scope: Scope | None, require: Require | None
    ) -> None:
        super().__init__(io.BytesIO(data), buffers=buffers[lifted:])
        self._lifted = buffers[:lifted]
        self.scope, self.require = scope, require
        self._made: set[int] = set()  # classes that this data defines

    def persistent_load(self, number: int) -> Any:
        """Return bytes that were sent beside the pickle."""
        return self._lifted[number]

    def find_class(self, module: str, name: str) -> Any:
        if module == "cloudpickle.cloudpickle":
            if name == "_make_skeleton_class":
                return self._make_class
            if name == "_make_skeleton_enum":
                return self._make_enum
            if name == "_class_setstate":
                return self._set_state
        return super().find_class(module, name)

    def _make_class(
        self,
        kind: type,
        name: str,
        bases: tuple[type, ...],
        namespace: dict[str, Any],
        tracker: str | None,
        extra: object,
    ) -> type:
        from cloudpickle import cloudpickle

        if self.scope is None or tracker is None:
            return self._known(
                tracker, lambda: cloudpickle._make_skeleton_class(kind, name, bases, namespace, tracker, extra)
            )
        made = self.scope.get(tracker)
        if made is None:
            made = types.new_class(name, bases, {"metaclass": kind}, lambda space: space.update(namespace))
            self._enter(made, tracker)
        return made

    def _make_enum(
        self,
        bases: tuple[type, ...],
        name: str,
        qualname: str,
        members: dict[str, Any],
        module: str,
        tracker: str | None,
        extra: object,
    ) -> type:
        from cloudpickle import cloudpickle

        if self.scope is None or tracker is None:
            return self._known(
                tracker,
                lambda: cloudpickle._make_skeleton_enum(bases, name, qualname, members, module, tracker, extra),
            )
        made = self.scope.get(tracker)
        if made is None:
            made = cloudpickle._make_skeleton_enum(bases, name, qualname, members, module, None, extra)
            self._enter(made, tracker)
        return made

    def _known(self, tracker: str | None, make: Callable[[], type]) -> type:
        """Return the class of this id, or make it."""
        from cloudpickle import cloudpickle

        known = tracker is not None and tracker in cloudpickle._DYNAMIC_CLASS_TRACKER_BY_ID
        made: type = make()
        if not known:
            _received.add(made)
        return made

    def _enter(self, made: type, tracker: str) -> None:
        """Put a class into the scope, and remember its id for when it is sent back."""
        from cloudpickle import cloudpickle

        assert self.scope is not None, "asked for"
        self.scope[tracker] = made
        self._made.add(id(made))
        _received.add(made)
        with cloudpickle._DYNAMIC_CLASS_TRACKER_LOCK:
            cloudpickle._DYNAMIC_CLASS_TRACKER_BY_CLASS[made] = tracker

    def _set_state(self, made: type, state: object) -> type:
        from cloudpickle import cloudpickle

        if id(made) in self._made or (self.scope is None and made in _received):
            cloudpickle._class_setstate(made, state)
        return made
