"""The values of context variables, and the identity of each Context.

All values are in one context variable of the standard library, `VALUES`, as a mapping that is never changed. So tasks,
callbacks, timers and threads see what Python's own rules let them see. A snapshot costs nothing, and as long as two
snapshots are the same object, nothing has changed.

A *chain* is one Context as seen by all processes that a call goes through. Python does not tell which Context is the
current one, but a token can be reset only in the Context where it was made. So a chain keeps a token of its Context. If
the token cannot be reset, the chain was found in a copy of that Context (a task, a callback).

A Context refers to its chain weakly, because each would keep the other alive: the chain lives as long as a token of it
or a `Context` object that somebody asked for. When another process may know the id of a chain, the id is kept apart
from the chain, with the task whose Context it is. Only a token that was sent to another process makes the Context hold
the chain itself.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
import weakref
from typing import TYPE_CHECKING, Any

from headgate.core.clock import clock

if TYPE_CHECKING:
    from headgate.context.contexts import Context
    from headgate.context.travel import Exchange
    from headgate.context.variables import ContextVar, Token

ABSENT: object = object()
"""Stands for the value of a variable that is not set."""


Owner = int | weakref.ref[asyncio.Task[Any]]
"""Who runs in a Context: the id of a thread, or a task (weakly, because a task holds its Context)."""


class Values(dict["ContextVar[Any]", Any]):
    """The variables that are set, with their values. Never changed once it is the value of `VALUES`."""

    __slots__ = ("encoded",)

    encoded: bytes
    """The encoded form, kept after the first use if it is short and all values are plain."""


NONE = Values()
"""The mapping of a Context in which nothing is set."""
SEEN: dict[bytes, Values] = {}
"""Values by the frame that they were read from: the next call with the same values need not read them again."""
VALUES: contextvars.ContextVar[Values] = contextvars.ContextVar("headgate.context.values", default=NONE)
CHAIN: contextvars.ContextVar[weakref.ref[Chain] | None] = contextvars.ContextVar(
    "headgate.context.chain", default=None
)

_KEPT: contextvars.ContextVar[tuple[Identity, Owner, Chain | None] | None] = contextvars.ContextVar(
    "headgate.context.kept", default=None
)
_MARK: contextvars.ContextVar[None] = contextvars.ContextVar("headgate.context.mark")


class Identity:
    """What the Contexts of a chain have in common in one process: their ids, and the tokens that were used.

    Two processes may each make an id for the same chain, for example a generator that runs ahead and its consumer. Then
    the id of the caller is used from then on, and the other one stays known.
    """

    __slots__ = ("_also", "_id", "_listeners", "_spent")

    def __init__(self, id: str = "") -> None:
        self._id = id
        self._also: frozenset[str] = frozenset()
        self._spent: weakref.WeakKeyDictionary[Token[Any], str] | None = None
        self._listeners: weakref.WeakSet[Exchange] | None = None

    @property
    def id(self) -> str:
        """The id of this chain, which is made when it is first read."""
        if not self._id:
            self._id = clock.token()[:16]
        return self._id

    @property
    def known(self) -> str:
        """The id of this chain if it was made already; else empty."""
        return self._id

    def rename(self, id: str) -> None:
        """Use the id that another process made. An id that was made here stays known."""
        if self._id and self._id != id:
            self._also |= {self._id}
        self._id = id

    def also_known_as(self, id: str) -> None:
        """Note an id that another process made for this chain; it becomes the id if the chain has none."""
        if not self._id:
            self._id = id
        elif self._id != id:
            self._also |= {id}

    def is_same(self, other: Identity) -> bool:
        """Tell whether another identity is of the same chain, also if they were made in different processes."""
        if self is other or (self._id and self._id == other.known):
            return True
        return not self.names.isdisjoint(other.names)

    @property
    def names(self) -> frozenset[str]:
        """All ids that processes made for this chain."""
        return self._also | {self._id} if self._id else self._also

    @property
    def spent(self) -> list[str]:
        """Numbers of tokens that were sent to other processes, were used, and are still referred to here."""
        return [] if self._spent is None else list(self._spent.values())

    def listen(self, exchange: Exchange) -> None:
        """Tell an exchange of tokens that are used from now on: there may be copies of them on its other side."""
        if self._listeners is None:
            self._listeners = weakref.WeakSet()
        self._listeners.add(exchange)

    def spend(self, number: str, token: Token[Any] | None, source: Exchange | None = None) -> None:
        """Note that a token was used which other processes know: here, or elsewhere as `source` reports."""
        if token is not None:
            if self._spent is None:
                self._spent = weakref.WeakKeyDictionary()
            self._spent[token] = number
        for listener in self._listeners or ():
            if listener is not source:
                listener.untold.append(number)


class Chain:
    """One Context together with its identity in all processes."""

    __slots__ = ("__weakref__", "_origin", "_proof", "context", "identity")

    def __init__(self, identity: Identity, origin: Chain | None = None) -> None:
        self._origin = origin
        self.identity: Identity = identity
        """The current identity; a generator on a worker takes that of whoever asks for its next item."""
        self.context: weakref.ref[Context] | None = None
        """The `Context` object of this chain, if somebody has asked for it."""
        self._proof: contextvars.Token[None] | None = _MARK.set(None)

    def is_here(self) -> bool:
        """Tell whether the Context of this chain is the current one."""
        proof = self._proof
        if proof is None:
            return False
        try:
            _MARK.reset(proof)
        except (ValueError, RuntimeError):
            return False
        self._proof = _MARK.set(None)
        return True

    def remember(self, owner: Owner | None = None) -> Chain:
        """Keep the identity for the owner of this Context: its id may be known elsewhere. Returns this chain."""
        kept = _KEPT.get()
        if kept is None or kept[0] is not self.identity or owner is not None:
            _KEPT.set((self.identity, owner or _owner(), None))
        return self

    def hold_if_here(self) -> None:
        """Keep this chain as long as its Context exists, because a token of it may come back from another process."""
        if self.is_here():
            _KEPT.set((self.identity, _owner(), self))
        elif self._origin is not None:
            self._origin.hold_if_here()

    def end(self) -> None:
        """Release the Context, in which nothing will run any more: it may hold this chain in turn."""
        self._proof = None


def _owner() -> Owner:
    """Return the current task or, outside of tasks, the current thread."""
    try:
        task = asyncio.current_task()
    except RuntimeError:
        task = None
    return threading.get_ident() if task is None else weakref.ref(task)


def present() -> Chain | None:
    """Return the chain of the current Context, if it has one."""
    ref = CHAIN.get()
    if ref is None:
        return None
    chain = ref()
    if chain is not None:
        return chain if chain.is_here() else None
    kept = _KEPT.get()
    if kept is not None and kept[1] == _owner():
        return bind(Chain(kept[0]))
    return None


def bind(chain: Chain) -> Chain:
    """Make a chain that was made in the current Context the chain of that Context."""
    CHAIN.set(weakref.ref(chain))
    return chain


def adopt(origin: Chain) -> Chain:
    """Make the current Context a part of another chain, and keep that chain as long."""
    return bind(Chain(origin.identity, origin))


def begin() -> Chain:
    """Begin a new chain with the current Context."""
    return bind(Chain(Identity()))


def here() -> Chain:
    """Return the chain of the current Context; it is begun now if there is none."""
    return present() or begin()
