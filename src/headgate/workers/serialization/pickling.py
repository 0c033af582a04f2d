"""Python objects as bytes: arguments, results, exceptions.

Plain pickle is three times as fast as cloudpickle, but wrong for objects of ``__main__``: it pickles them by name, and
the ``__main__`` of a worker is another module. So plain pickle is tried first. cloudpickle is used where that fails, or
where the pickle contains the name of a module that is sent by value.

**Exceptions.** Python rebuilds an exception by calling its class with its ``args``, which fails if the constructor has
other parameters. Here it is rebuilt without its constructor: by the ``__new__`` and ``__init__`` of the builtin class
that it descends from, and then its attributes. Its cause, context and notes are sent with it, and so are the members of
a group. An exception that cannot be pickled becomes a RemoteError with its type and its text.
"""

from __future__ import annotations

import functools
import inspect
import io
import pickle
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import chain, count
from types import FunctionType, TracebackType
from typing import Any, Protocol

from headgate.context.variables import bare
from headgate.core.imports import Require
from headgate.core.redaction import redact
from headgate.errors import HeadgateError, InvalidType, RemoteError
from headgate.resources.model import Resource
from headgate.resources.signals import SIGNALS, CooldownResource
from headgate.workers.codec import known_class, reduced, restore
from headgate.workers.protocol.bulk import INLINE, BulkPayload, Payload
from headgate.workers.serialization.dynamic_classes import Scope, loads
from headgate.workers.serialization.functions import take_mains_by_value
from headgate.workers.serialization.settled import MAINS, is_by_name, modules_by_value

_ATOMS = frozenset({int, str, bytes, float, bool, type(None)})
_HERE = __file__.rsplit("serialization", 1)[0]
_NOTE = "Remote traceback ("
_FEW = 64  # long bytes are looked for in containers of so many members


class Naming(Protocol):
    """Which classes the receiver of a pickle has, so that the pickle may name them."""

    def names(self) -> Mapping[int, str]:
        """Return their ids, by the identity of the class."""
        ...

    def adopt(self, classes: Collection[type]) -> bool:
        """Let the receiver have these as well. False: it will not have any of them."""
        ...


class Given:
    """The classes that the sender of a call has: the result may name them."""

    __slots__ = ("_names",)

    def __init__(self, names: Mapping[int, str]) -> None:
        self._names = names

    def names(self) -> Mapping[int, str]:
        """Return their ids, by the identity of the class."""
        return self._names

    def adopt(self, classes: Collection[type]) -> bool:
        """Return False: what else a result contains is sent with it."""
        return False


NOTHING_GIVEN = Given({})


def dumps(value: object, naming: Naming = NOTHING_GIVEN) -> bytes | BulkPayload:
    """Pickle any object that cloudpickle can pickle: as bytes or, if it is long, as a bulk payload."""
    if type(value) not in _ATOMS or (isinstance(value, bytes) and len(value) >= INLINE):
        return _dumped_apart(value, naming)
    data = pickle.dumps(value, 5)
    return data if len(data) <= INLINE else BulkPayload(data)


def _dumped_apart(value: object, naming: Naming) -> bytes | BulkPayload:
    lifted = _Lifted(value)
    buffers: list[Any] = []

    def keep(buffer: pickle.PickleBuffer) -> bool:
        """True: pickle it with the rest. What may be changed while it travels is copied now."""
        try:
            raw = buffer.raw()
        except BufferError:  # it does not lie in one piece
            return True
        if len(raw) < INLINE:
            return True
        buffers.append(bytes(raw) if raw.readonly else bytearray(raw))
        return False

    if not lifted.of_main and not modules_by_value():
        try:
            data = lifted.pickled(pickle.Pickler, value, keep)
        except Exception:
            data = b""  # cloudpickle may do it, or says why not
        if data and b"_main__" not in data:
            return as_payload(data, [*lifted.buffers, *buffers], len(lifted.buffers))
        buffers.clear()
    names = naming.names()
    if names:
        try:
            data = lifted.pickled(_Named, value, keep, names)
        except Exception:
            data = b""  # there is more to it
        if data and b"_main__" not in data:
            return as_payload(data, [*lifted.buffers, *buffers], len(lifted.buffers))
        buffers.clear()
    take_mains_by_value()
    unnamed: list[type] = []
    data = lifted.pickled(_by_value(), value, keep, names, unnamed)
    if unnamed and naming.adopt(unnamed):
        buffers.clear()
        data = lifted.pickled(_by_value(), value, keep, naming.names())
    return as_payload(data, [*lifted.buffers, *buffers], len(lifted.buffers))


class _Named(pickle.Pickler):
    """Plain pickle that names classes which the receiver has. It fails where something has to be sent by value."""

    names: Mapping[int, str] = {}

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, (type, FunctionType)):
            name = self.names.get(id(obj))
            if name is not None:
                return known_class, (name,)
            if obj is not known_class and not is_by_name(obj):
                raise pickle.PicklingError
        return NotImplemented


def as_payload(data: bytes, buffers: Sequence[Any] = (), lifted: int = 0) -> bytes | BulkPayload:
    """Return a pickle as it is if it fits into a frame, else as a bulk payload."""
    return BulkPayload(data, buffers, lifted) if buffers or len(data) > INLINE else data


class _Lifted:
    """Long bytes near the top of an object, which are sent beside its pickle because pickle would copy them.

    The pickle has a number in each place where they occur.
    """

    def __init__(self, value: object) -> None:
        self.buffers: list[bytes | bytearray] = []
        self.of_main: bool = False
        """Is there an object of a class of ``__main__`` near the top? Then plain pickle need not be tried."""
        self._numbers: dict[int, int] = {}
        self._look(value, 2)

    def _look(self, value: Any, depth: int) -> None:
        kind = value.__class__
        if kind is bytes or kind is bytearray:
            if len(value) >= INLINE and id(value) not in self._numbers:
                self._numbers[id(value)] = len(self.buffers)
                self.buffers.append(value if kind is bytes else bytearray(value))
        elif depth >= 0 and kind in (tuple, list, dict) and len(value) <= _FEW:
            for member in value.values() if kind is dict else value:
                self._look(member, depth - 1)
        elif kind.__module__ in MAINS or (kind is list and value and value[0].__class__.__module__ in MAINS):
            self.of_main = True

    def pickled(
        self,
        pickler: type[pickle.Pickler],
        value: object,
        keep: Callable[[pickle.PickleBuffer], bool],
        names: Mapping[int, str] | None = None,
        unnamed: list[type] | None = None,
    ) -> bytes:
        """Pickle the object, with a number in the place of each of these bytes."""
        if self._numbers:
            numbers = self._numbers

            class Naming(pickler):  # type: ignore[misc, valid-type] # one of two
                def persistent_id(self, obj: object) -> int | None:
                    return numbers.get(id(obj))

            pickler = Naming
        file = io.BytesIO()
        made: Any = pickler(file, 5, buffer_callback=keep)
        if names is not None:
            made.names = names
        if unnamed is not None:
            made.unnamed = unnamed
        with bare:
            made.dump(value)
        return file.getvalue()


def _cloudpickle() -> Any:
    """Import cloudpickle where it is needed: many programs never do."""
    import cloudpickle

    return cloudpickle


@functools.cache
def _by_value() -> Any:
    """Return the class of a cloudpickle Pickler that names classes which the receiver has."""

    class Pickler(_cloudpickle().Pickler):  # type: ignore[misc] # it has no types
        names: Mapping[int, str] = {}
        unnamed: list[type] | None = None  # collects the classes that the receiver has not

        def reducer_override(self, obj: Any) -> Any:
            if isinstance(obj, type):
                name = self.names.get(id(obj))
                if name is not None:
                    return known_class, (name,)
                how = super().reducer_override(obj)
                if self.unnamed is not None and how is not NotImplemented and not is_by_name(obj):
                    self.unnamed.append(obj)  # it is sent by value
                return how
            if not isinstance(obj, FunctionType):
                return NotImplemented
            return super().reducer_override(obj)

    return Pickler


def dump_whole(value: object) -> bytes:
    """Pickle an object as one piece of bytes, however long it is."""
    with bare:
        data = b""
        if not modules_by_value():
            try:
                data = pickle.dumps(value, 5)
            except Exception:
                pass  # cloudpickle may do it, or says why not
        if not data or b"_main__" in data:
            take_mains_by_value()
            data = bytes(_cloudpickle().dumps(value, 5))
    return data


def dump_arguments(
    tag: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    fn: Callable[..., Any] | None = None,
    naming: Naming = NOTHING_GIVEN,
) -> bytes | BulkPayload:
    """Pickle the arguments of a call; InvalidType names the one that cannot be pickled."""
    if not kwargs:
        for value in args:
            kind = type(value)
            if kind is Resource:  # what a task of a TaskPool runs with: as easy as what it stands for
                value, kind = value.value, type(value.value)
            if kind not in _ATOMS or (kind is bytes and len(value) >= INLINE):
                break
        else:
            data = pickle.dumps((args, kwargs), 5)
            if len(data) <= INLINE:
                return data
    try:
        return _dumped_apart((args, kwargs), naming)
    except Exception as error:
        named = [(f"argument {name}", value) for name, value in zip(_names(fn), args, strict=False)]
        named += [(f"argument {name!r}", value) for name, value in kwargs.items()]
        for name, value in named:
            try:
                dumps(value)
            except Exception as cause:
                raise InvalidType(
                    f"{name} of {tag}, a {type(value).__qualname__}, cannot be pickled: {_said(cause)}",
                    remedy="Pass something that can be copied to another process, or make it in the routine.",
                ) from cause
        if isinstance(error, HeadgateError):
            raise  # it is about the function, whose classes the arguments were to name
        raise InvalidType(f"the arguments of {tag} cannot be pickled: {_said(error)}") from error


def _names(fn: Callable[..., Any] | None) -> Iterator[str]:
    """Yield how the positional arguments of a function are named in errors: by name, then by number."""
    try:
        parameters = list(inspect.signature(fn).parameters.values()) if fn is not None else []
    except (TypeError, ValueError):
        parameters = []
    named = [repr(p.name) for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return chain(named, map(str, count(len(named) + 1)))


def load_arguments(
    data: bytes | BulkPayload, scope: Scope | None = None, require: Require | None = None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Unpickle the arguments of a call that `dump_arguments` pickled."""
    args, kwargs = loads(data, scope, require)
    return args, kwargs


def _said(error: BaseException) -> str:
    """Return the type and the text of an exception, even if its ``__str__`` fails."""
    try:
        return f"{type(error).__name__}: {error}"
    except BaseException:  # it runs code of users
        return type(error).__name__


# -- exceptions -------------------------------------------------------------------------------------------------------


@functools.cache
def _pickler() -> Any:
    """Return the class of a cloudpickle Pickler that writes exceptions as `codec` says."""

    class Pickler(_by_value()):  # type: ignore[misc] # it has no types
        def reducer_override(self, obj: Any) -> Any:
            if isinstance(obj, BaseException):
                return reduced(obj)
            return super().reducer_override(obj)

    return Pickler


def dump_exception(
    error: BaseException, where: str, naming: Naming = NOTHING_GIVEN, scope: Scope | None = None
) -> bytes | BulkPayload:
    """Pickle an exception with its chain; the remote traceback is its last note. Never fails.

    `scope`: the classes of the call, among them those that may be named.
    """
    note = f"{_NOTE}{where}):\n{describe(error)}"
    return as_payload(pickle.dumps((_dumped(error, naming, scope), note, _qualname(type(error)), _said(error)), 5))


def load_exception(data: Payload, scope: Scope | None = None) -> BaseException:
    """Unpickle what `dump_exception` wrote; if that fails, return a RemoteError that describes it."""
    try:
        dumped, note, name, said = loads(data)
    except BaseException as cause:
        return RemoteError(f"the routine raised something that cannot be read here ({redact(_said(cause))})")
    note, said = redact(note), redact(said)  # ours to write; the exception itself stays as it is
    error: object = None
    reason, remedy = "which cannot travel", None
    if dumped:
        try:
            error = loads(dumped, scope)
        except BaseException as cause:
            reason = f"which cannot be read here ({_said(cause)})"
            remedy = "Make its class importable here under the same name to get the real one."
    if not isinstance(error, BaseException):
        error = RemoteError(f"the routine raised {name}, {reason}: {said}", remedy=remedy)
    try:
        # What another worker noted is part of this note, as it is of every traceback.
        notes = [kept for kept in getattr(error, "__notes__", ()) if not str(kept).startswith(_NOTE)] + [note]
        BaseException.__setattr__(error, "__notes__", notes)  # whatever its class thinks of being changed
    except BaseException:
        pass
    return error


def dump_sent(tag: str, value: object) -> bytes | BulkPayload:
    """Pickle a value that is sent into a generator; InvalidType: it cannot be pickled."""
    try:
        return dumps(value)
    except Exception as error:
        raise InvalidType(
            f"what is sent to {tag}, a {type(value).__qualname__}, cannot be pickled: {_said(error)}",
            remedy="Send something that can be copied to another process.",
        ) from error


def dump_thrown(error: BaseException) -> bytes | BulkPayload:
    """Pickle an exception that is thrown into a generator; InvalidType: it cannot be pickled."""
    data = _dumped(error)
    if not data:
        raise InvalidType(
            f"{_qualname(type(error))} cannot be thrown into a generator on a worker: it cannot be pickled",
            remedy="Throw an exception whose attributes can be copied to another process.",
        ) from error
    return as_payload(data)


def _dumped(error: BaseException, naming: Naming = NOTHING_GIVEN, scope: Scope | None = None) -> bytes:
    """Pickle an exception with its chain; empty if it cannot be pickled at all.

    If the chain cannot be pickled, its members are replaced; of a signal, at least its verdict on the resource is kept.
    """
    for form in (lambda error: error, _stripped, _bare_signal):
        try:
            data = _pickled(form(error), naming)
            loads(data, dict(scope or {}))  # one that goes in and does not come out must not cost the caller the news
            return data
        except BaseException:
            continue
    return b""


def _bare_signal(error: BaseException) -> BaseException:
    """Make a plain copy of a signal: that a resource is dead must reach the caller, whatever else the signal holds."""
    reason = str(getattr(error, "reason", None) or error)
    if isinstance(error, CooldownResource):
        made: BaseException = CooldownResource(error.cooldown_seconds, reason)
    else:
        made = next(kind for kind in SIGNALS[1:] if isinstance(error, kind))(reason)
    for note in getattr(error, "__notes__", ()):
        made.add_note(str(note))
    return made


def _pickled(value: object, naming: Naming = NOTHING_GIVEN) -> bytes:
    buffer = io.BytesIO()
    pickler = _pickler()(buffer, 5)
    pickler.names = naming.names()
    with bare:
        pickler.dump(value)
    return buffer.getvalue()


def _stripped(error: BaseException) -> BaseException:
    """Copy an exception, with a RemoteError in its chain for each exception that cannot be pickled."""
    make, args, state, *_ = reduced(error)
    copy: BaseException = make(*args)
    attributes, (cause, context, suppress) = state
    cause, context = (
        linked if linked is None or _travels(linked) else RemoteError(_said(linked)) for linked in (cause, context)
    )
    restore(copy, (attributes, (cause, context, suppress)))
    return copy


def _travels(value: object) -> bool:
    try:
        loads(_pickled(value), {})
    except BaseException:
        return False
    return True


def describe(error: BaseException) -> str:
    """Return the traceback of an exception as text, from the first frame outside headgate."""
    try:
        return "".join(traceback.format_exception(type(error), error, _theirs(error.__traceback__))).rstrip()
    except BaseException as cause:  # a broken __str__
        return f"{_qualname(type(error))} (its traceback cannot be shown: {type(cause).__name__})"


def _theirs(tb: TracebackType | None) -> TracebackType | None:
    first = tb
    while tb is not None and tb.tb_frame.f_code.co_filename.startswith(_HERE):
        tb = tb.tb_next
    return tb if tb is not None else first


def _qualname(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
