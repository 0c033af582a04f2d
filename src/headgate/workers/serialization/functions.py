"""How a function is sent to a worker, and how the worker loads it.

**By reference** when it can be imported: module and qualified name, with a digest of its compiled code, so that a
worker whose file differs can say so.

**By value** otherwise (``__main__``, notebooks, closures, lambdas). A function sees the globals of its module, its
defaults and its closure, and the caller expects their values at the time of the call. So it is pickled for each call,
unless everything it can see is settled (see `settled`). Then the functions, routines and classes that see each other
are pickled together, as a *group*, once for as long as they are the same, and the worker may keep what it has loaded.
A function that is not settled is loaded again for each call, because a call may change what it sees, and no later call
may see that change.

**Classes of arguments** join the group of the function that is called, if they are settled. From then on arguments and
results name them by id, and their pickles do not contain them. So the group of a function that is sent by reference may
consist of classes alone.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import logging
import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from types import CodeType, ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakSet

from headgate.context.variables import bare
from headgate.core.clock import clock
from headgate.core.imports import Require
from headgate.errors import InvalidType, RemoteError
from headgate.workers.model import FunctionForm
from headgate.workers.serialization.dynamic_classes import Scope, id_of, loads
from headgate.workers.serialization.groups import Copy, Group, group_of
from headgate.workers.serialization.settled import MAINS, Surroundings, is_registered, routine_of, surroundings_of

if TYPE_CHECKING:
    from headgate.workers.protocol.wire.wire_pb2 import Definition

PYTHON = f"{sys.implementation.cache_tag}"
HEAVY_BYTES, HEAVY_SECONDS = 1024 * 1024, 0.005

MODULE_REMEDY = "HEADGATE_MODULE_REMEDY"
"""The environment variable with which who placed a worker says how it gets modules that it lacks."""

_COMPANY = 64  # classes of arguments that a function takes along at most
_NO_NAMES: Mapping[int, str] = {}
_log = logging.getLogger("headgate.workers")


def tag_of(fn: object) -> str:
    """Name a function for people: ``module.qualname:line``."""
    code = getattr(fn, "__code__", None)
    line = f":{code.co_firstlineno}" if code is not None else ""
    return f"{getattr(fn, '__module__', '?')}.{getattr(fn, '__qualname__', type(fn).__qualname__)}{line}"


# -- at the client ----------------------------------------------------------------------------------------------------


class PortableFunction:
    """A function that is sent to workers, and the form in which it was sent last."""

    __slots__ = (
        *("_company", "_form", "_refused", "_slow", "_warned"),
        *("fn", "generator", "names", "seen", "tag", "thread"),
    )

    def __init__(self, fn: Callable[..., Any], thread: bool) -> None:
        self.fn: Callable[..., Any] = fn
        self.tag: str = _plain(tag_of(fn))
        self.thread: bool = thread
        self.generator: bool = inspect.isasyncgenfunction(fn)
        self.seen: Surroundings | None = None
        """What the group of the last form was made of; None: it has no group."""
        self.names: Mapping[int, str] = _NO_NAMES
        """The ids of the classes in that group, by the identity of the class."""
        self._form: FunctionForm | None = None
        self._company: list[type] = []  # classes of arguments
        self._refused: WeakSet[type] = WeakSet()
        self._warned = False
        self._slow = 0  # dumps that took long: some do because the machine is busy

    def form(self, decorated: Callable[..., Any]) -> FunctionForm:
        """Return the form in which the function has to be sent now."""
        form = self._form
        if form is not None and (self.seen is None or self.seen.is_unchanged()):
            return form
        return self._make(decorated)

    def receive(self, form: FunctionForm, copy: Copy) -> None:
        """Send the function on as it was received, as long as nothing in its group changes."""
        self._form, self.seen, self.names = form, copy.seen, copy.names
        self._company = list(copy.scope.values())

    def adopt(self, decorated: Callable[..., Any], classes: Collection[type]) -> FunctionForm | None:
        """Add classes of arguments to the group, so that arguments can name them; returns the form that the function
        has then. None: none of them can be named."""
        if self._form is None:
            return None  # it is not settled itself
        added = [kind for kind in classes if id(kind) not in self.names and self._takes(kind)]
        if not added:
            return None
        ids = {id_of(kind) for kind in added}  # on a worker there may be several copies of one class
        kept = [kind for kind in self._company if id_of(kind) not in ids]
        self._company = [*kept, *added] if len(kept) + len(added) <= _COMPANY else added
        return self._make(decorated)

    def disown(self) -> None:
        """Take no classes of arguments along any more that were: perhaps a worker cannot load one of them, and with it
        the function, also for calls that do not need that class."""
        if self._company:
            self._refused.update(self._company)
            self._company, self._form = [], None

    def _takes(self, kind: type) -> bool:
        if kind in self._refused:
            return False
        if surroundings_of((), (kind,)) is not None:
            return True
        self._refused.add(kind)
        return False

    def _make(self, decorated: Callable[..., Any]) -> FunctionForm:
        self._form, self.seen, self.names = None, None, _NO_NAMES
        is_importable = importable(decorated)
        if is_importable and not self._company:
            self._form = self._by_reference()
            return self._form
        take_mains_by_value()
        functions = () if is_importable else (self.fn,)
        seen = surroundings_of(functions, self._company)
        if seen is None and self._company:
            self._refused.update(self._company)
            self._company = []
            return self._make(decorated)
        if seen is None:
            return FunctionForm(
                tag=self.tag, value=self._dumped(self.fn), fresh=True, thread=self.thread, generator=self.generator
            )
        members = (*functions, *(routine.fn for routine in seen.routines if routine.fn is not self.fn))
        alone = len(members) == 1 and not self._company
        value = self._dumped(self.fn if alone else (members, tuple(self._company)))
        if is_importable:
            self._form = self._by_reference()._replace(value=value, reusable=seen.exclusive)
        else:
            self._form = self.member(value, 0 if alone else 1, seen.exclusive)
        self.seen = seen
        if seen.names_classes:
            self.names = {id(kind): id_of(kind) for kind in seen.classes}
        return self._form

    def member(self, value: bytes, number: int, reusable: bool) -> FunctionForm:
        """Return the form of the function as a member of a group."""
        return FunctionForm(
            tag=self.tag,
            value=value,
            fresh=reusable,
            thread=self.thread,
            generator=self.generator,
            member=number,
            reusable=reusable,
        )

    def _by_reference(self) -> FunctionForm:
        fn = self.fn
        return FunctionForm(
            tag=self.tag,
            module=fn.__module__,
            qualname=fn.__qualname__,
            digest=code_digest(fn.__code__) if hasattr(fn, "__code__") else b"",
            python=PYTHON,
            thread=self.thread,
            generator=self.generator,
            file=_plain(getattr(getattr(fn, "__code__", None), "co_filename", "")),
        )

    def _dumped(self, value: object) -> bytes:
        import cloudpickle  # not at the top: decorating a function is to be quick

        began = clock.now()
        try:
            with bare:
                data = bytes(cloudpickle.dumps(value, 5))
        except Exception as error:
            remedy = "Move it to a module that workers can import, or pass what it needs as arguments."
            if "_contextvars.ContextVar" in str(error):
                remedy = "A variable of contextvars stays in its process: headgate.ContextVar goes along with calls."
            raise InvalidType(
                f"{self.tag} cannot be pickled with what it refers to: {type(error).__name__}: {error}", remedy=remedy
            ) from error
        if not self._warned:
            self._warn(len(data), clock.now() - began)
        return data

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
    if module is None or module in MAINS or is_registered(module):
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


class Loaded(NamedTuple):
    """A function on the worker, ready to be called, and the copy of its group that it belongs to."""

    fn: Callable[..., Any]
    copy: Copy


_NO_GROUP = Copy({})


class ReceivedFunction:
    """A function that a client defined, on the worker. Loaded at its first call: importing a module runs user code."""

    __slots__ = ("_definition", "_group", "_imported", "generator", "tag", "thread")

    def __init__(self, definition: Definition) -> None:
        self._definition = definition
        self._group: Group | None = None
        self._imported: Loaded | None = None
        self.tag: str = definition.tag
        self.thread: bool = definition.thread
        self.generator: bool = definition.generator

    @property
    def has_group(self) -> bool:
        """Whether there are classes that calls may have in common."""
        return bool(self._definition.value) and (self._definition.reusable or not self._definition.fresh)

    def open(self, scope: Scope, require: Require | None = None) -> Loaded:
        """Return the function for one call, whose classes are put into `scope`; RemoteError says why it cannot be.

        ImportNeeded: not before a module is imported (see `core.imports`).
        """
        loaded = self._open(scope, require)
        if loaded.copy.scope:
            scope.update(loaded.copy.scope)
        return loaded

    def _open(self, scope: Scope, require: Require | None) -> Loaded:
        definition = self._definition
        if definition.module:
            if self._imported is None:
                self._imported = Loaded(_imported(definition, require), _NO_GROUP)
            return self._imported if not definition.value else Loaded(self._imported.fn, self._copy(require))
        if self.has_group:
            copy = self._copy(require)
            return Loaded(copy.functions[max(0, definition.member - 1)], copy)
        return Loaded(self._loaded(lambda: loads(definition.value, scope, require)), _NO_GROUP)

    def close(self, copy: Copy) -> None:
        """Hear that a call has ended, and does not use its copy any more."""
        if self._group is not None:
            self._group.close(copy)

    def _copy(self, require: Require | None) -> Copy:
        definition = self._definition
        group = self._group
        if group is None:
            group = self._group = group_of(definition.value, definition.reusable)
        copy = group.idle()
        if copy is None:
            copy = self._loaded(lambda: group.load(require))
            first = 1 if definition.member or definition.module else 0
            for member, fn in enumerate(copy.functions, first):
                for routine in copy.routines_of(fn):
                    form = routine.portable.member(definition.value, member, definition.reusable)
                    routine.portable.receive(form, copy)
        return copy

    def _loaded(self, load: Callable[[], Any]) -> Any:
        try:
            return load()
        except ModuleNotFoundError as error:
            raise missing_module(self.tag, error) from error
        except Exception as error:
            raise RemoteError(
                f"{self.tag} could not be loaded on the worker: {type(error).__name__}: {error}",
                remedy="Move it to a module that workers can import, and pass what it needs as arguments.",
            ) from error


def missing_module(tag: str, error: ModuleNotFoundError) -> RemoteError:
    """Make the error for a module that a function needs and the worker does not have."""
    return RemoteError(
        f"{tag} needs the module {error.name or error!s}, which the worker cannot import",
        remedy=os.environ.get(
            MODULE_REMEDY, "Install it where the worker runs, or add its folder to sys.path before the pool is made."
        ),
    )


_warned: set[tuple[str, str]] = set()


def _imported(definition: Definition, require: Require | None) -> Callable[..., Any]:
    try:
        if require is not None:
            require(definition.module)
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
