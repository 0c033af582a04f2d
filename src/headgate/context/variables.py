"""`ContextVar` and `Token`: like those of the standard library, with names that are the same in every process.

A variable is known by its key. A value that comes from another process for a key that is not declared here is kept in
a *stub*, which lives as long as somebody refers to it or a Context has a value for it. A later declaration finds the
stub and turns it into the variable.

Both can be pickled. An unpickled variable is the one object of its key in the process. An unpickled token is the object
that it was copied from, if that still exists. A token that was used is used in every process that has a copy of it.
"""

from __future__ import annotations

import contextvars
import copyreg
import pickle
import sys
import threading
import types
import weakref
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NoReturn, TypeVar, cast, final, overload

from headgate.context.chains import ABSENT, NONE, SEEN, VALUES, Chain, Identity, Values, here, present
from headgate.core.clock import clock
from headgate.errors import ContextVarCollision, InvalidArgument, InvalidType

T = TypeVar("T")
D = TypeVar("D")

MISSING: object = contextvars.Token.MISSING
ATOMS = frozenset({int, str, bytes, float, bool, type(None)})
"""Types of which every process can read a pickle, as it can of containers of them."""

_UNKNOWN = object()

_known: dict[str, weakref.ref[ContextVar[Any]]] = {}
_travelled: weakref.WeakValueDictionary[str, Token[Any]] = weakref.WeakValueDictionary()
_lock = threading.RLock()  # whether defaults are equal is asked of users' classes
# Defaults of stubs that came with this Context's call, and are of its own copies of classes.
_DEFAULTS: contextvars.ContextVar[dict[ContextVar[Any], Any]] = contextvars.ContextVar("headgate.context.defaults")
_NO_DEFAULTS: dict[Any, Any] = {}


def known(key: str) -> ContextVar[Any] | None:
    """Return the variable, or the stub, with this key; None: there is none in this process."""
    ref = _known.get(key)
    return None if ref is None else ref()


def travelled(number: str) -> Token[Any] | None:
    """Return the token of this process that has this number in every process."""
    return _travelled.get(number)


def is_declared(var: ContextVar[Any]) -> bool:
    """Tell whether a variable was declared in this process; else it is a stub."""
    return bool(var._place)


def mark_used(token: Token[Any]) -> None:
    """Note that a variable was reset with this token, perhaps in another process."""
    token._used, token._chain = True, None


def not_a_base(name: str) -> InvalidType:
    """Make the error for a class that derives from a final one, as `contextvars` has it for its classes."""
    return InvalidType(
        f"type 'headgate.{name}' is not an acceptable base type",
        remedy="Hold one in an attribute of your class.",
    )


@final
class ContextVar(Generic[T]):
    """A context variable whose value is sent with calls of routines, and comes back with their changes.

    `namespace` is part of its name everywhere; without it, the top-level package of the module that declares it.
    """

    __slots__ = ("__weakref__", "_default", "_key", "_module", "_place", "_portable")

    _key: str
    _default: Any
    _module: str
    _place: str  # where it was declared; empty: it is a stub
    _portable: bool | None

    @overload
    def __new__(cls, name: str, *, namespace: str | None = None) -> ContextVar[T]: ...
    @overload
    def __new__(cls, name: str, *, default: T, namespace: str | None = None) -> ContextVar[T]: ...
    def __new__(cls, name: str, *, default: Any = ABSENT, namespace: str | None = None) -> ContextVar[T]:
        if not isinstance(name, str):
            raise InvalidType(f"the name of a context variable must be a str, got {type(name).__name__}")
        if not name:
            raise InvalidArgument("the name of a context variable must not be empty")
        if namespace is not None and not isinstance(namespace, str):
            raise InvalidType(f"namespace must be a str, got {type(namespace).__name__}")
        frame = sys._getframe(1)
        module = frame.f_globals.get("__name__") or "__main__"
        namespace = module.partition(".")[0] if namespace is None else namespace
        if not namespace or ":" in namespace:
            raise InvalidArgument(f"namespace must be a name without colons, got {namespace!r}")
        key, place = f"{namespace}:{name}", f"{frame.f_code.co_filename}:{frame.f_lineno}"
        SEEN.clear()  # which holds variables that nobody else may hold
        with _lock:
            found = known(key)
            if found is None:
                found = _make(key)
            elif found._place:
                again = frame.f_code.co_name == "<module>" and place == found._place  # its module is loaded again
                if module == found._module and (again or module == "__main__") and _is_same(default, found._default):
                    return found  # or it is a cell of a notebook
                raise ContextVarCollision(
                    f"the context variable {key!r} is declared at {place}, and was before at {found._place}",
                    remedy="Give one of them another name or namespace; one that is meant to be the same is declared "
                    "once, at the top of a module, and imported from there.",
                )
            found._default, found._module, found._place = default, module, place
            found._portable = None
        return found

    def __init_subclass__(cls) -> NoReturn:
        raise not_a_base("ContextVar")

    if not TYPE_CHECKING:
        __class_getitem__ = classmethod(types.GenericAlias)

    @property
    def key(self) -> str:
        """The name of the variable in every process: ``namespace:name``."""
        return self._key

    @property
    def name(self) -> str:
        """The name of the variable as it was declared."""
        return self._key.partition(":")[2]

    @property
    def namespace(self) -> str:
        """The part of the key before the colon."""
        return self._key.partition(":")[0]

    @overload
    def get(self) -> T: ...
    @overload
    def get(self, default: T, /) -> T: ...
    @overload
    def get(self, default: D, /) -> D | T: ...
    def get(self, default: Any = ABSENT, /) -> Any:  # type: ignore[misc] # mypy does not see the default
        """Return the value in this Context; else `default`, else the default of the variable; else LookupError."""
        value = VALUES.get().get(self, ABSENT)
        if value is ABSENT:
            value = default
            if value is ABSENT:
                value = self._fallback()
            if value is ABSENT:
                raise LookupError(self)
        return value

    def set(self, value: T) -> Token[T]:
        """Set the value in this Context. The returned token restores the value before."""
        values, chain = VALUES.get(), here()
        token: Token[T] = Token.__new__(Token, self, values.get(self, ABSENT), chain.identity, chain)
        values = Values(values)
        values[self] = value
        VALUES.set(values)
        return token

    def reset(self, token: Token[T]) -> None:
        """Restore the value that the variable had before the `set` that made this token."""
        if not isinstance(token, Token):
            raise InvalidType(
                f"expected an instance of headgate.Token, got {token!r}",
                remedy="Pass what set() of this variable gave.",
            )
        token._use(self)
        values = Values(VALUES.get())
        if token._old is ABSENT:
            values.pop(self, None)
        else:
            values[self] = token._old
        VALUES.set(values or NONE)

    @property
    def is_plain(self) -> bool:
        """Has the variable no default, or one that is the same in every process?"""
        return self._default is ABSENT or type(self._default) in ATOMS

    def __repr__(self) -> str:
        default = "" if self._default is ABSENT else f" default={self._default!r}"
        return f"<headgate.ContextVar {self.key!r}{default} at {id(self):#x}>"

    def __reduce__(self) -> Any:
        value = ABSENT if bare.depth else VALUES.get().get(self, ABSENT)
        default = () if self._default is ABSENT or not self._is_portable() else (self._fallback(),)
        state = None if value is ABSENT else (value,)  # which may hold the variable itself
        return _arrived, (self._key, default), state, None, None, _set_where_unset

    def __copy__(self) -> ContextVar[T]:
        return self

    def __deepcopy__(self, _: object) -> ContextVar[T]:
        return self

    def _fallback(self) -> Any:
        """Return the default of the variable in this process and Context."""
        return self._default if self._place else _DEFAULTS.get(_NO_DEFAULTS).get(self, self._default)

    def _is_portable(self) -> bool:
        """Tell whether the default of the variable can be pickled."""
        if self._portable is None:
            self._portable = type(self._default) in ATOMS or _can_be_pickled(self._default, pickle)
        if self._portable or not bare.depth:
            return self._portable
        import cloudpickle  # which is what a dispatch takes where pickle cannot

        return _can_be_pickled(self._fallback(), cloudpickle)


def _make(key: str) -> ContextVar[Any]:
    """Make a stub and register it. To be called with the lock held."""
    made = cast(Any, object.__new__(ContextVar))
    made._key, made._default, made._module, made._place, made._portable = key, ABSENT, "", "", None
    _known[key] = weakref.ref(made, lambda gone: _forget(key, gone))
    return cast(ContextVar[Any], made)


def _forget(key: str, gone: weakref.ref[Any]) -> None:
    if _known.get(key) is gone:  # and not one that was declared since
        _known.pop(key, None)


def variable(key: str) -> ContextVar[Any]:
    """Return the variable with this key; if there is none, a new stub."""
    ref = _known.get(key)
    found = None if ref is None else ref()
    if found is None:
        with _lock:
            found = known(key) or _make(key)
    return found


def _arrived(key: str, default: tuple[Any, ...]) -> ContextVar[Any]:
    """Unpickle a variable: the one of this key, with the default that it was pickled with."""
    found = variable(key)
    if default and not found._place:
        if type(default[0]) not in ATOMS:
            _DEFAULTS.set({**_DEFAULTS.get(_NO_DEFAULTS), found: default[0]})
        if found._default is ABSENT:
            found._default, found._portable = default[0], None
    return found


def _set_where_unset(found: ContextVar[Any], state: tuple[Any, ...]) -> None:
    """Set the value that a variable was pickled with, unless a value is set here."""
    values = VALUES.get()
    if found not in values:
        values = Values(values)
        values[found] = state[0]
        VALUES.set(values)


def _is_same(one: object, other: object) -> bool:
    if one is other:
        return True
    try:
        return type(one) is type(other) and bool(one == other)
    except Exception:  # it runs code of users
        return False


def _can_be_pickled(value: object, by: types.ModuleType) -> bool:
    try:
        by.dumps(value, 5)
    except Exception:
        return False
    return True


class _Bare(threading.local):
    """While it is entered, variables are pickled without their values. Used for all that is sent with a call.

    The values are sent beside it. A function that is pickled once for many calls must not hold the values of the first.
    """

    depth: int = 0

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *_: object) -> None:
        self.depth -= 1


bare: _Bare = _Bare()


@final
class Token(Generic[T]):
    """The result of `ContextVar.set`, which `ContextVar.reset` accepts once."""

    __slots__ = ("__weakref__", "_chain", "_identity", "_number", "_old", "_used", "_var")

    MISSING: ClassVar[Any] = MISSING
    """The old value of a variable that had none."""

    _var: ContextVar[T]
    _old: Any
    _used: bool
    _identity: Identity  # of the Context it was made in
    _chain: Chain | None  # which must not be forgotten before this is used; None: it was made in another process
    _number: str  # the same in every process; empty: it has not travelled

    def __new__(cls, var: Any = None, old: Any = None, identity: Any = None, chain: Any = None) -> Token[T]:
        # Called without `__init__` by `ContextVar.set` and by unpickling.
        self = object.__new__(cls)
        self._var, self._old, self._identity, self._chain = var, old, identity, chain
        self._used, self._number = False, ""
        return self

    def __init__(self) -> None:
        raise RuntimeError("tokens are made by ContextVar.set() and by nothing else")

    def __init_subclass__(cls) -> NoReturn:
        raise not_a_base("Token")

    if not TYPE_CHECKING:
        __class_getitem__ = classmethod(types.GenericAlias)

    @property
    def var(self) -> ContextVar[T]:
        """The variable that `set` made this token for."""
        return self._var

    @property
    def old_value(self) -> Any:
        """The value of the variable before the `set`; `Token.MISSING` if it was not set."""
        return MISSING if self._old is ABSENT else self._old

    @property
    def used(self) -> bool:
        """Was the variable reset with this token, here or on a worker from which an answer has come since?"""
        return self._used

    def _use(self, var: ContextVar[Any]) -> None:
        if self._used:
            raise RuntimeError(f"{self!r} has already been used once")
        if self._var is not var:
            raise ValueError(f"{self!r} was created by a different ContextVar")
        chain = present()
        if chain is None or not chain.identity.is_same(self._identity):
            raise ValueError(f"{self!r} was created in a different Context")
        mark_used(self)
        if self._number:
            chain.identity.spend(self._number, self)

    def __repr__(self) -> str:
        return f"<headgate.Token{' used' if self._used else ''} var={self._var!r} at {id(self):#x}>"

    def __reduce__(self) -> Any:
        if not self._number:
            self._number = clock.token()[:16]
            _travelled[self._number] = self
        if self._chain is not None:
            self._chain.hold_if_here()
        old = () if self._old is ABSENT else (self._old,)
        chain = present()  # which may have had another id where the token was made
        identity = chain.identity if chain is not None and chain.identity.is_same(self._identity) else self._identity
        about = self._number, self._var.key, identity.id, self._used
        return _token_arrived, about, (self._var, old), None, None, _remember  # what it was may hold the token

    def __copy__(self) -> Token[T]:
        return self

    def __deepcopy__(self, _: object) -> Token[T]:
        return self


def _token_arrived(number: str, key: str, chain: str, used: bool) -> Token[Any]:
    token = _travelled.get(number)
    if token is None:
        token = Token.__new__(Token, variable(key), _UNKNOWN, Identity(chain))
        token._number = number
        _travelled[number] = token
    if used:
        mark_used(token)
    return token


def _remember(token: Token[Any], state: tuple[Any, tuple[Any, ...]]) -> None:
    """Give an unpickled token the value that its variable had before."""
    _, old = state
    if token._old is _UNKNOWN:
        token._old = old[0] if old else ABSENT


def _missing() -> Any:
    return MISSING


copyreg.pickle(type(MISSING), lambda _: (_missing, ()))  # so that a routine may return what a token tells


__all__ = ["ContextVar", "Token", "bare", "is_declared", "known", "mark_used", "not_a_base", "variable"]
