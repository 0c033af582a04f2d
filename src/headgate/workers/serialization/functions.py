"""How a function is sent to a worker, and how the worker loads it.

**By reference** when it can be imported: module and qualified name, with a digest of its compiled code, so that a
worker whose file differs can say so.

**By value** otherwise (``__main__``, notebooks, closures, lambdas). A function sees the globals of its module, its
defaults and its closure, and the caller expects their values at the time of the call. So it is pickled for each call,
unless everything it can see is *settled*: atoms, modules, objects that are imported by name, and functions that see
nothing else. Settled objects are remembered and compared by identity. As long as they are the same, the pickle is
reused, and the worker may keep the function that it has loaded. A function that is not settled is loaded again for each
call, because a call may change what it sees, and no later call may see that change.
"""

from __future__ import annotations

import dis
import hashlib
import importlib
import inspect
import logging
import sys
from collections.abc import Callable, Collection, Iterator
from types import CellType, CodeType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

from headgate.context.variables import ContextVar, bare
from headgate.core.clock import clock
from headgate.errors import InvalidType, RemoteError
from headgate.workers.model import FunctionForm
from headgate.workers.serialization.dynamic_classes import Scope, loads

if TYPE_CHECKING:
    from headgate.workers.protocol.wire.wire_pb2 import Definition
    from headgate.workers.routines import Routine

ROUTINE = "__headgate_routine__"
"""The attribute by which a decorated function is known."""

PYTHON = f"{sys.implementation.cache_tag}"
HEAVY_BYTES, HEAVY_SECONDS = 1024 * 1024, 0.005

_ATOMS = frozenset({int, float, complex, str, bytes, bool, type(None), type(Ellipsis)})
_UNSETTLING = frozenset({"globals", "exec", "eval", "vars", "setattr", "delattr", "__import__", "locals"})
_INNER = frozenset({"__dict__", "__globals__", "__closure__", "cell_contents", "__kwdefaults__"})
_MAINS = ("__main__", "__mp_main__")
_log = logging.getLogger("headgate.workers")

Holder = dict[str, Any] | CellType | FunctionType
"""What holds a value that a function sees: globals or defaults, a cell of its closure, or the function itself."""
Seen = tuple[Holder, str, Any]
"""A value that a function sees: what holds it, under which name, and the value."""


def routine_of(fn: object) -> Routine | None:
    """Return the routine of a decorated function; None: it is none, or only wraps one (`functools.wraps`)."""
    routine = getattr(fn, ROUTINE, None) if isinstance(fn, FunctionType) else None
    return routine if routine is not None and routine.decorated is fn else None


def tag_of(fn: object) -> str:
    """Name a function for people: ``module.qualname:line``."""
    code = getattr(fn, "__code__", None)
    line = f":{code.co_firstlineno}" if code is not None else ""
    return f"{getattr(fn, '__module__', '?')}.{getattr(fn, '__qualname__', type(fn).__qualname__)}{line}"


# -- at the client ----------------------------------------------------------------------------------------------------


class PortableFunction:
    """A function that is sent to workers, and the form in which it was sent last."""

    __slots__ = ("_form", "_seen", "_slow", "_warned", "fn", "generator", "tag", "thread")

    def __init__(self, fn: Callable[..., Any], thread: bool) -> None:
        self.fn: Callable[..., Any] = fn
        self.tag: str = _plain(tag_of(fn))
        self.thread: bool = thread
        self.generator: bool = inspect.isasyncgenfunction(fn)
        self._form: FunctionForm | None = None
        self._seen: list[Seen] | None = None  # what a form by value was made of; None: by reference
        self._warned = False
        self._slow = 0  # dumps that took long: some do because the machine is busy

    def form(self, decorated: Callable[..., Any]) -> FunctionForm:
        """Return the form in which the function has to be sent now."""
        form = self._form
        if form is not None:
            seen = self._seen
            if seen is None:
                return form
            for holder, name, value in seen:
                if _look(holder, name) is not value:
                    break
            else:
                return form
        return self._make(decorated)

    def _make(self, decorated: Callable[..., Any]) -> FunctionForm:
        fn = self.fn
        if importable(decorated):
            self._form = FunctionForm(
                tag=self.tag,
                module=fn.__module__,
                qualname=fn.__qualname__,
                digest=code_digest(fn.__code__) if hasattr(fn, "__code__") else b"",
                python=PYTHON,
                thread=self.thread,
                generator=self.generator,
                file=_plain(getattr(getattr(fn, "__code__", None), "co_filename", "")),
            )
            return self._form
        import cloudpickle  # not at the top: decorating a function is to be quick

        take_mains_by_value()
        seen = _settled(fn)
        began = clock.now()
        try:
            with bare:
                value = bytes(cloudpickle.dumps(fn, 5))
        except Exception as error:
            remedy = "Move it to a module that workers can import, or pass what it needs as arguments."
            if "_contextvars.ContextVar" in str(error):
                remedy = "A variable of contextvars stays in its process: headgate.ContextVar goes along with calls."
            raise InvalidType(
                f"{self.tag} cannot be pickled with what it refers to: {type(error).__name__}: {error}", remedy=remedy
            ) from error
        if not self._warned:
            self._warn(len(value), clock.now() - began)
        form = FunctionForm(tag=self.tag, value=value, fresh=seen is None, thread=self.thread, generator=self.generator)
        self._form, self._seen = (form, seen) if seen is not None else (None, None)
        return form

    def _warn(self, size: int, seconds: float) -> None:
        self._slow += seconds > HEAVY_SECONDS
        if size > HEAVY_BYTES or self._slow > 8:
            self._warned = True
            _log.warning(
                "%s travels by value with all it refers to, %.1f MB in %.0f ms for each call: pass it as an argument "
                "or move it to a module",
                self.tag,
                size / 1e6,
                seconds * 1e3,
            )


def _plain(text: str) -> str:
    """Make text that UTF-8 can hold: names of files may contain anything."""
    return text.encode("utf-8", "backslashreplace").decode()


def importable(decorated: Callable[..., Any]) -> bool:
    """Tell whether a worker that imports the module finds this function under its name."""
    module = getattr(decorated, "__module__", None)
    if module is None or module in _MAINS or _registered(module):
        return False
    found = sys.modules.get(module)
    if found is None or getattr(found, "__spec__", None) is None:  # made by hand: no file to import it from
        return False
    try:
        return any(inner is decorated for inner in inside(_reach(found, decorated.__qualname__)))
    except AttributeError:
        return False


def _reach(module: ModuleType, qualname: str) -> Any:
    """Look up a qualified name in a module, also of ``__private`` members of a class."""
    found: object = module
    for name in qualname.split("."):
        if isinstance(found, type) and name.startswith("__") and not name.endswith("__"):
            name = f"_{found.__name__.lstrip('_')}{name}"
        found = inspect.getattr_static(found, name) if isinstance(found, type) else getattr(found, name)
    return found


def inside(found: object) -> Iterator[object]:
    """Yield an object and what it wraps: methods, properties, decorators above the routine."""
    for _ in range(32):
        yield found
        for name in ("__func__", "fget", "func", "__wrapped__"):
            inner = getattr(found, name, None)
            if inner is not None:
                found = inner
                break
        else:
            return


def take_mains_by_value() -> None:
    """Have cloudpickle send ``__mp_main__`` by value: a child of multiprocessing has its main program there."""
    main = sys.modules.get("__mp_main__")
    if main is not None:
        import cloudpickle

        cloudpickle.register_pickle_by_value(main)


def modules_by_value() -> Collection[str]:
    """Return the names of the modules that cloudpickle was told to send by value."""
    cloudpickle = sys.modules.get("cloudpickle")
    return cloudpickle.list_registry_pickle_by_value() if cloudpickle is not None else ()


def _registered(module: str) -> bool:
    return any(module == name or module.startswith(f"{name}.") for name in modules_by_value())


def _look(holder: Holder, name: str) -> Any:
    """Return the current value of a name: of a global, a cell, or an attribute of a function."""
    if isinstance(holder, FunctionType):  # most are
        return getattr(holder, name) if name != "attributes" else None if _attributes(holder) else ()
    if isinstance(holder, dict):
        return dict.get(holder, name, _ABSENT)
    try:
        return holder.cell_contents
    except ValueError:
        return _ABSENT


_ABSENT = object()
_UNSETTLED = [None]  # something a call could change


def _attributes(function: FunctionType) -> set[str]:
    """Return the names of attributes that somebody has set on a function."""
    return {name for name in function.__dict__ if name not in (ROUTINE, "__wrapped__")}


def _settled(fn: Callable[..., Any]) -> list[Seen] | None:
    """Return all that a function can see, as (holder, name, value); None when a call could change some of it."""
    seen: list[Seen] = []
    todo: list[Any] = [fn]
    done, writes, carries = set[int](), False, False
    while todo:
        function = todo.pop()
        if not isinstance(function, FunctionType) or _attributes(function):
            return None
        if id(function) in done:
            continue
        done.add(id(function))
        code = _Reading(function.__code__)
        if code.unsettles:
            return None
        writes = writes or code.writes_attributes
        seen += [(function, name, getattr(function, name)) for name in ("__code__", "__defaults__", "__kwdefaults__")]
        seen.append((function, "attributes", ()))
        values = list(_seen_by(function, code))
        for _, _, value in values:
            further = _further(value)
            if further is None:
                return None
            todo += further
            carries = carries or bool(further)
            if routine_of(value) is not None:
                seen.append((value, "attributes", ()))
        seen += values
    return None if writes and carries else seen  # it may hang something on a function that travels with it


def _seen_by(function: FunctionType, code: _Reading) -> Iterator[Seen]:
    for cell in function.__closure__ or ():
        yield cell, "cell", _look(cell, "cell")
    for value in function.__defaults__ or ():
        yield {"": value}, "", value
    defaults = function.__kwdefaults__ or {}
    for name, value in defaults.items():
        yield defaults, name, value
    for name in code.globals:
        value = dict.get(function.__globals__, name, _ABSENT)
        if value is _ABSENT and name in _UNSETTLING:
            value = _UNSETTLED
        yield function.__globals__, name, value


def _further(value: Any) -> list[Any] | None:
    """Return the functions inside a value, which have to be looked at too; None: a call could change the value."""
    kind = type(value)
    if value is _ABSENT or kind in _ATOMS:
        return []
    if isinstance(value, ModuleType):
        found = sys.modules.get(value.__name__) is value and getattr(value, "__spec__", None) is not None
        return [] if found and not _registered(value.__name__) else None
    if kind in (tuple, frozenset):
        further = [_further(item) for item in value]
        return None if None in further else [function for functions in further for function in functions or ()]
    if isinstance(value, (FunctionType, type)) and _by_name(value):
        return []
    if kind.__name__ == "builtin_function_or_method" and isinstance(getattr(value, "__self__", None), ModuleType):
        return []
    if isinstance(value, ContextVar):  # one for each key in a process: its default is part of it, its values are not
        return [] if value.is_plain else None
    if not isinstance(value, FunctionType):
        return None
    routine = routine_of(value)
    if routine is not None:
        return None if _attributes(value) else [routine.fn]
    return [value]


class _Reading:
    """The names that the code of a function uses, with the code nested in it."""

    __slots__ = ("_free", "globals", "unsettles", "writes_attributes")

    def __init__(self, code: CodeType) -> None:
        self.globals: set[str] = set()
        self.unsettles: bool = False
        """Does the code write to globals, or to a closure that outlives the call?"""
        self.writes_attributes: bool = False
        self._free = frozenset(code.co_freevars)
        self._read(code)

    def _read(self, code: CodeType) -> None:
        for instruction in dis.get_instructions(code):
            name = instruction.opname
            if name in ("LOAD_GLOBAL", "LOAD_NAME"):
                self.globals.add(instruction.argval)
            elif name in ("STORE_GLOBAL", "DELETE_GLOBAL", "IMPORT_STAR"):
                self.unsettles = True
            elif name in ("STORE_DEREF", "DELETE_DEREF"):
                self.unsettles = self.unsettles or instruction.argval in self._free
            elif name in ("STORE_ATTR", "DELETE_ATTR"):
                self.writes_attributes = True
            elif name in ("LOAD_ATTR", "LOAD_METHOD") and instruction.argval in _INNER:
                self.unsettles = True
        for constant in code.co_consts:
            if isinstance(constant, CodeType):
                self._read(constant)


def _by_name(value: FunctionType | type) -> bool:
    found: object = sys.modules.get(value.__module__ or "")
    if found is None or value.__module__ in _MAINS or getattr(found, "__spec__", None) is None:
        return found is not None and value.__module__ == "builtins"
    if _registered(value.__module__):
        return False
    for name in value.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is value


def code_digest(code: CodeType) -> bytes:
    """Return a digest of compiled code that does not depend on the name of its file."""
    digest = hashlib.blake2b(digest_size=16)
    _feed(digest, code)
    return digest.digest()


def _feed(digest: hashlib.blake2b, code: CodeType) -> None:
    shape = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags)
    names = (code.co_name, code.co_names, code.co_varnames, code.co_freevars)
    digest.update(repr((*names, *shape, code.co_code)).encode())
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            _feed(digest, constant)
        elif isinstance(constant, frozenset):
            digest.update(repr(sorted(map(repr, constant))).encode())
        else:
            digest.update(repr(constant).encode())


# -- at the worker ----------------------------------------------------------------------------------------------------


class ReceivedFunction:
    """A function that a client defined, on the worker. Loaded at its first call: importing a module runs user code."""

    __slots__ = ("_definition", "_loaded", "generator", "tag", "thread")

    def __init__(self, definition: Definition) -> None:
        self._definition = definition
        self._loaded: Callable[..., Any] | None = None
        self.tag: str = definition.tag
        self.thread: bool = definition.thread
        self.generator: bool = definition.generator

    def load(self, scope: Scope | None = None) -> Callable[..., Any]:
        """Return the function itself, with the classes of this scope; RemoteError says why it cannot be loaded."""
        if self._loaded is not None:
            return self._loaded
        definition = self._definition
        if not definition.value:
            self._loaded = _imported(definition)
            return self._loaded
        try:
            fn: Callable[..., Any] = loads(definition.value, scope)
        except ModuleNotFoundError as error:
            raise missing_module(self.tag, error) from error
        except Exception as error:
            raise RemoteError(
                f"{self.tag} could not be loaded on the worker: {type(error).__name__}: {error}",
                remedy="Move it to a module that workers can import, and pass what it needs as arguments.",
            ) from error
        if not definition.fresh:
            self._loaded = fn
        return fn


def missing_module(tag: str, error: ModuleNotFoundError) -> RemoteError:
    """Make the error for a module that a function needs and the worker does not have."""
    return RemoteError(
        f"{tag} needs the module {error.name or error!s}, which the worker cannot import",
        remedy="Install it where the worker runs, or add its folder to sys.path before the pool is made.",
    )


_warned: set[tuple[str, str]] = set()


def _imported(definition: Definition) -> Callable[..., Any]:
    try:
        module = importlib.import_module(definition.module)
    except ModuleNotFoundError as error:
        raise missing_module(definition.tag, error) from error
    except (Exception, SystemExit) as error:
        raise RemoteError(
            f"{definition.tag} needs the module {definition.module}, whose import failed on the worker: "
            f"{type(error).__name__}: {error}",
            remedy="Mend the module, or what differs there: its environment, its folder, its arguments.",
        ) from error
    try:
        found = _reach(module, definition.qualname)
    except AttributeError as error:
        raise RemoteError(
            f"{definition.module} on the worker ({getattr(module, '__file__', '?')}) has no {definition.qualname}",
            remedy=f"Give workers the same code as the client, which has it in {definition.file}.",
        ) from error
    routine = next(filter(None, map(routine_of, inside(found))), None)
    fn: Callable[..., Any] = routine.fn if routine is not None else getattr(found, "__func__", found)
    key = (definition.module, definition.qualname)
    code = getattr(fn, "__code__", None)
    if definition.python != PYTHON or key in _warned or code is None:
        return fn
    if code_digest(code) != definition.digest:
        _warned.add(key)
        _log.warning(
            "%s differs between client and worker: %s there, %s here; the worker runs its own",
            definition.tag,
            definition.file,
            code.co_filename,
        )
    return fn
