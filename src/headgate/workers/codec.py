"""How an exception is pickled and rebuilt, whatever its constructor takes, and how a class is named by its id.

The names `_State`, `_made`, `_by_itself`, `_restore` and `known_class` are inside the pickles that clients and workers
exchange.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable
from typing import Any, NoReturn, cast

from headgate.errors import RemoteError


def reduced(error: BaseException) -> Any:
    """Return how pickle has to rebuild an exception, whatever its constructor takes."""
    kind = type(error)
    reduced = cast(Any, error.__reduce_ex__(5))
    chain = (error.__cause__, error.__context__, error.__suppress_context__)
    if reduced[0] is not kind or _defines(kind, ("__reduce__", "__reduce_ex__")):
        notes = {"__notes__": error.__notes__} if hasattr(error, "__notes__") else {}
        return _by_itself, (reduced[0], tuple(reduced[1]), *reduced[2:3]), (notes, chain), None, None, _restore
    state = reduced[2] if len(reduced) > 2 else None
    if hasattr(kind, "__setstate__") and _defines(kind, ("__setstate__", "__getstate__")):
        return _made, (kind, tuple(reduced[1])), (_State(state), chain), None, None, _restore
    attributes: dict[str, Any] = dict(state) if isinstance(state, dict) else {}
    for name in _slots(kind):
        if hasattr(error, name):
            attributes[name] = getattr(error, name)
    args = tuple(reduced[1])
    if isinstance(error, BaseExceptionGroup):  # a list would still be empty where a member points back to its group
        args = (args[0], tuple(args[1]), *args[2:])
    return _made, (kind, args), (attributes, chain), None, None, _restore


def _defines(kind: type[BaseException], names: tuple[str, ...]) -> bool:
    """Tell whether a class, or one between it and its builtin base, defines one of these names."""
    builtin = _builtin_base(kind).__mro__
    return any(name in vars(base) for base in kind.__mro__ if base not in builtin for name in names)


class _State:
    """The state of an exception whose class has its own ``__getstate__`` and ``__setstate__``."""

    def __init__(self, state: Any) -> None:
        self.state: Any = state


def _builtin_base(kind: type[BaseException]) -> type[BaseException]:
    """Return the builtin exception class that an exception class descends from."""
    base: type = kind
    while getattr(builtins, base.__name__, None) is not base and base.__base__ is not None:
        base = base.__base__
    return base


def _slots(kind: type) -> list[str]:
    names: list[str] = []
    for base in kind.__mro__:
        declared = vars(base).get("__slots__", ())
        for name in (declared,) if isinstance(declared, str) else tuple(declared):
            if name not in ("__dict__", "__weakref__"):
                hidden = name.startswith("__") and not name.endswith("__")
                names.append(f"_{base.__name__.lstrip('_')}{name}" if hidden else name)
    return names


def _made(kind: type[BaseException], args: tuple[Any, ...]) -> BaseException:
    builtin = _builtin_base(kind)
    error: BaseException = builtin.__new__(kind, *args)
    try:
        builtin.__init__(error, *args)
    except BaseException:
        error.args = args
    return error


def _by_itself(make: Callable[..., BaseException], args: tuple[Any, ...], state: Any = None) -> BaseException:
    error: BaseException = make(*args)
    if state is not None:
        error.__setstate__(state)
    return error


def _restore(error: BaseException, state: tuple[Any, tuple[Any, Any, bool]]) -> None:
    attributes, (cause, context, suppress) = state
    if isinstance(attributes, _State):
        if attributes.state is not None:
            error.__setstate__(attributes.state)
        attributes = {}
    values = {**attributes, "__cause__": cause, "__context__": context, "__suppress_context__": suppress}
    for name, value in values.items():
        try:
            BaseException.__setattr__(error, name, value)  # whatever its class thinks of being changed
        except Exception:  # a property of the class: its value lies elsewhere
            vars(error)[name] = value


restore = _restore


def known_class(tracker: str) -> NoReturn:
    """Stand in a pickle for a class that its receiver has. `dynamic_classes` finds it; this says that there is none."""
    raise RemoteError(f"a class that is sent by value is named ({tracker}), and is not known here")
