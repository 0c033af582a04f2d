"""Encoding and decoding of the context variables that are sent with calls.

What is set is sent with a call, and what has changed comes back with its outcome. A generator does both at each step.
A frame is the encoded form, and is empty when there is nothing to say. Each value is pickled by itself, so a value that
cannot be read does not affect the others. Plain values (numbers, text) are pickled together, and encoded once for all
calls that find the same values set.

A value that cannot be read is dropped, with a `ContextDecodeWarning`. The outcome of a routine is never lost because of
that, unless a filter of the `warnings` module makes the warning an error.
"""

from __future__ import annotations

import contextvars
import pickle
import sys
import warnings
from collections.abc import Callable, Iterable
from typing import Any, Literal, NamedTuple

from headgate.context.chains import ABSENT, CHAIN, NONE, SEEN, VALUES, Identity, Values, adopt, here, present
from headgate.context.variables import ATOMS, is_declared, mark_used, travelled, variable
from headgate.core.imports import ImportNeeded
from headgate.errors import InvalidType

_CONTAINERS = frozenset({tuple, list, dict, set, frozenset})

Dump = Callable[[Any], bytes]
Load = Callable[[bytes], Any]
Role = Literal["caller", "consumer", "worker"]
"""Which end of a call an exchange is; the generator of a consumer runs in the Context of whoever asks for an item."""

_PLAIN, _LOOSE, _FULL = b"\x01", b"\x02", b"\x03"
_FEW = 64  # containers with more members than this, counting those inside, are not examined
_SHORT = 4096  # length up to which frames are remembered
_MANY = 64  # number of frames that are remembered


class ContextDecodeWarning(Warning):
    """The value of a context variable could not be carried from one process to another, and was dropped."""


class Frame(NamedTuple):
    """What one end of a call tells the other about the variables in its Context."""

    plain: dict[str, Any] = {}  # noqa: RUF012 - never changed
    """Values by key that every process can read: atoms, and containers of atoms."""
    pickled: dict[str, bytes] = {}  # noqa: RUF012
    """Values by key that are pickled, because reading them may fail."""
    unset: tuple[str, ...] = ()
    chain: str = ""
    """The id of the Context, if it has one."""
    before: str = ""
    """The id of the Context of the last frame, if that was another one. From a worker: the id in `chain`, if the worker
    made it."""
    spent: tuple[str, ...] = ()
    """Numbers of the tokens that were used."""
    failed: tuple[str, ...] = ()
    """Texts about values that could not be pickled."""


# -- writing ----------------------------------------------------------------------------------------------------------


def outgoing(dump: Dump = pickle.dumps) -> bytes:
    """Encode what is set here, for a call; empty if nothing is. InvalidType names a value that cannot be pickled."""
    values = VALUES.get()
    if CHAIN.get() is None:
        if not values:
            return b""
        plain = _plain(values)
        if plain:
            return plain
    return Exchange("caller").send(dump)


def _plain(values: Values) -> bytes:
    """Encode values that are all plain; empty if some are not."""
    try:
        return values.encoded
    except AttributeError:
        pass
    kind, plain = _PLAIN, {}
    for var, value in values.items():
        if type(value) not in ATOMS:
            this = _kind(value)
            if this == _FULL:
                return b""
            kind = max(kind, this)
        plain[var.key] = value
    encoded = kind + pickle.dumps(plain, 5)
    if kind == _PLAIN and len(encoded) <= _SHORT:
        values.encoded = encoded
    return encoded


def _kind(value: Any) -> bytes:
    """Return the kind of frame that can hold a value: plain (it cannot change), loose (it can) or full (anything)."""
    found, todo = _PLAIN, [value]
    for member in todo:
        kind = type(member)
        if kind in ATOMS:
            continue
        if kind not in _CONTAINERS or len(member) + len(todo) > _FEW:
            return _FULL
        if kind is not tuple and kind is not frozenset:
            found = _LOOSE
        todo += member
        if kind is dict:
            todo += member.values()
    return found


class Exchange:
    """One end of a call: which values of the Context here the other end knows."""

    __slots__ = ("__weakref__", "_first", "_identity", "_known", "_role", "_told", "untold")

    def __init__(self, role: Role) -> None:
        self._role = role
        self._known = NONE
        self._first: Identity | None = None
        """Of a consumer: the first identity that the worker was told, the only one for which it may make an id."""
        self._identity: Identity | None = None
        self._told = ""  # the id of the chain that the other end knows
        self.untold: list[str] = []
        """Numbers of used tokens that the other end was not told of, and may have copies of."""

    def send(
        self, dump: Dump, *, lenient: bool = False, tag: str = "", most: int = 0, limit: str = "max_payload"
    ) -> bytes:
        """Encode what has changed since the last time; empty if nothing has.

        With `lenient`, a value that cannot be pickled, or a frame of more than `most` bytes, is not an error: both ends
        warn. `tag` names the routine that set the values, `limit` what `most` is.
        """
        values, chain = VALUES.get(), here() if self._role == "consumer" else present()
        spent: list[str] = []
        name = before = ""
        if chain is not None:
            if self._role == "consumer" and self._identity is not chain.identity:
                if self._identity is not None:
                    before = self._identity.id
                    chain.identity.id  # noqa: B018 - it needs one now
                self._identity = chain.identity
                self._first = self._first or chain.identity
            name = chain.identity.known
            if name or self._role == "consumer":
                chain.remember()
            spent = [] if self._told else chain.identity.spent
            chain.identity.listen(self)
        if values is self._known and name == self._told and not self.untold and not spent:
            return b""
        if self._known is NONE and not (name or spent or self.untold):
            plain = _plain(values)
            if plain and not (lenient and 0 < most < len(plain)):
                self._known = values
                return plain
        failed: list[str] = []
        simple: dict[str, Any] = {}
        pickled: dict[str, bytes] = {}
        for var, value in values.items():
            if self._known.get(var, ABSENT) is value:
                continue
            if type(value) in ATOMS or _kind(value) != _FULL:
                simple[var.key] = value
                continue
            try:
                pickled[var.key] = dump(value)
            except BaseException as error:
                text = (
                    f"the context variable {var.key!r}, a {type(value).__qualname__}, cannot be pickled: {_said(error)}"
                )
                if not lenient:
                    if not isinstance(error, Exception):
                        raise
                    raise InvalidType(
                        text, remedy="Set something that can be copied to another process, or reset it before the call."
                    ) from error
                failed.append(text)
        if pickled and chain is not None and not name:
            name = chain.identity.known  # a token in a value was pickled: whoever reads it must know whose it is
            if name:
                chain.remember()
        if self._role == "worker" and not self._told:
            before = name
        unset = tuple(var.key for var in self._known if var not in values)
        frame = Frame(simple, pickled, unset, name, before, (*spent, *self.untold), tuple(failed))
        self._known, self._told, self.untold = values, name, []
        data = _FULL + pickle.dumps(tuple(frame), 5)
        if lenient and 0 < most < len(data):
            failed = [f"the context variables that {tag} set take {len(data):,} bytes, and {limit} is {most:,}"]
            frame = Frame(chain=name, before=before, spent=frame.spent, failed=tuple(failed))
            data = _FULL + pickle.dumps(tuple(frame), 5)
        if failed:
            warn_and_go_on(failed, tag)
        return data

    def receive(self, data: bytes, load: Load, *, skipped: bool = False) -> list[str]:
        """Set what the other end has sent; returns texts about what could not be read.

        `skipped`: it came with an item that nobody takes, so nothing is set.
        """
        if not data:
            return []
        first = self._known is NONE and VALUES.get() is NONE and not skipped
        if first and data in SEEN:
            self._known = SEEN[data]
            VALUES.set(self._known)
            return []
        try:
            if first and data[:1] != _FULL:
                self._known = _plainly(data)
                VALUES.set(self._known)
                return []
            frame = _read(data)
        except Exception as error:
            return [f"the context of a call cannot be read: {_said(error)}"]
        failures = list(frame.failed)
        values = {variable(key): value for key, value in frame.plain.items()}
        for key, pickled in frame.pickled.items():
            try:
                values[variable(key)] = load(pickled)
            except ImportNeeded:
                raise  # nothing is set yet: it is received again
            except BaseException as error:
                failures.append(f"the value of the context variable {key!r} cannot be read: {_said(error)}")
        unset = [variable(key) for key in frame.unset]
        before, self._known = self._known, _changed(self._known, values, unset)
        if (values or unset) and not skipped:
            now = VALUES.get()
            VALUES.set(self._known if now is before else _changed(now, values, unset))
        if frame.chain or frame.spent:
            self._take_over(frame)
        return failures

    def _take_over(self, frame: Frame) -> None:
        """Take over the chain of the other end, and mark the tokens that were used there."""
        chain = here()
        if frame.chain:
            self._told = frame.chain
            if self._role == "worker":
                chain.identity.rename(frame.before or frame.chain)
                if frame.before:
                    chain.identity = Identity(frame.chain)
            elif frame.before:
                (self._first or chain.identity).also_known_as(frame.chain)
            chain.remember()
        identity = chain.identity
        identity.listen(self)
        for number in frame.spent:
            token = travelled(number)
            if token is not None:
                mark_used(token)
            identity.spend(number, token, self)


def refused(text: str) -> bytes:
    """Encode a frame that holds only a text about what could not be sent."""
    return _FULL + pickle.dumps(tuple(Frame(failed=(text,))), 5)


def received(data: bytes, load: Load) -> list[str]:
    """Set what came back with the outcome of a call; returns texts about what could not be read."""
    return Exchange("caller").receive(data, load)


def _changed(values: Values, new: dict[Any, Any], unset: Iterable[Any]) -> Values:
    changed = Values(values)
    changed.update(new)
    for var in unset:
        changed.pop(var, None)
    return changed or NONE


def _plainly(data: bytes) -> Values:
    """Decode a frame of plain values for a Context in which nothing is set."""
    values, sure = Values(), len(data) <= _SHORT
    for key, value in pickle.loads(memoryview(data)[1:]).items():
        var = variable(key)
        values[var] = value
        sure = sure and is_declared(var)
    if data[:1] == _PLAIN and sure:
        values.encoded = data
        if len(SEEN) >= _MANY:
            SEEN.clear()
        SEEN[data] = values
    return values or NONE


def _read(data: bytes) -> Frame:
    kind, rest = data[:1], data[1:]
    if kind in (_PLAIN, _LOOSE):
        return Frame(dict(pickle.loads(rest)))
    if kind != _FULL:
        raise ValueError("it is of a kind that is not known here")
    frame = Frame(*pickle.loads(rest))
    texts = (*frame.plain, *frame.pickled, *frame.unset, frame.chain, frame.before, *frame.spent, *frame.failed)
    if not all(isinstance(text, str) for text in texts) or not isinstance(frame.plain, dict):
        raise TypeError("it says what no frame says")
    return frame._replace(pickled=dict(frame.pickled))


def _said(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"
    except BaseException:  # it runs code of users
        return type(error).__name__


# -- what could not be carried ----------------------------------------------------------------------------------------


def warn(failures: Iterable[str], tag: str) -> None:
    """Warn of values that could not be sent or read. A filter may make the warning an exception.

    The warning points at the code of the user that waits or, if an event loop runs this, at the routine of this tag.
    """
    for text in failures:
        warning, depth = ContextDecodeWarning(text), _depth()
        if depth:
            warnings.warn(warning, stacklevel=depth)
        else:
            name, _, line = tag.rpartition(":")
            warnings.warn_explicit(warning, None, name, int(line) if line.isdigit() else 0)


def warn_and_go_on(failures: Iterable[str], tag: str) -> None:
    """Warn as `warn` does, and continue even if a filter makes the warning an exception."""
    for text in failures:
        try:
            warn([text], tag)
        except ContextDecodeWarning:  # whoever gets the outcome is told too
            pass


def _depth() -> int:
    """Return the `stacklevel` of the first frame outside headgate; 0: an event loop runs this, there is none."""
    package = __name__.partition(".")[0]
    frame, depth = sys._getframe(2), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == package:
        frame, depth = frame.f_back, depth + 1
    return 0 if frame.f_globals.get("__name__", "").partition(".")[0] in (package, "asyncio") else depth


# -- threads and other loops ------------------------------------------------------------------------------------------


class Elsewhere:
    """A copy of the current Context with the same identity, for code in another thread that this code waits for."""

    def __init__(self) -> None:
        self._here = here()
        self.context: contextvars.Context = contextvars.copy_context()
        self._there = self.context.run(adopt, self._here)
        self._before = VALUES.get()

    def bring_back(self) -> None:
        """Set here what the code in the other thread has set. To be called after it has ended."""
        values, before = self.context.get(VALUES, NONE), self._before
        if values is not before:
            now = VALUES.get()
            new = {var: value for var, value in values.items() if before.get(var, ABSENT) is not value}
            gone = [var for var in before if var not in values]
            VALUES.set(values if now is before else _changed(now, new, gone))
        if self._here.identity.known:
            self._here.remember()
        self._there.end()
