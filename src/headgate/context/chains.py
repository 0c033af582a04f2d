"""Where the values of context variables live, and which Context this is.

All of them stand in one stdlib context variable, `VALUES`, as a mapping that is never changed: so tasks, callbacks,
timers and threads see what Python's own rules let them see, to take a snapshot costs nothing, and if two are the same
object nothing has changed.

A *chain* is one Context as all processes see it that a call goes through. Python does not tell which Context is the
current one, but it knows: a token can be reset only where it was made. So a chain keeps a token of its Context, and who
finds a chain in a Context that was copied (a task, a callback) can tell that it is not the original.

A Context knows its chain weakly, for each holds the other: it lives as long as a token or somebody who asked for it. If
its id has become known that is remembered without it, by the task whose Context it is; only a token that has travelled
makes the Context hold it.
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

ABSENT: Any = object()
"""Not a value."""


class Values(dict["ContextVar[Any]", Any]):
    """The variables that are set, with their values. Not changed once it stands in `VALUES`."""

    __slots__ = ("encoded",)

    encoded: bytes
    """What it looks like on the wire, if that was asked for and it is short and simple."""


NONE = Values()
"""Nothing is set."""
SEEN: dict[bytes, Values] = {}
"""Frames that came lately, and what they mean: the next call with the same values need not read them again."""
VALUES: contextvars.ContextVar[Values] = contextvars.ContextVar("headgate.context.values", default=NONE)
CHAIN: contextvars.ContextVar[weakref.ref[Chain] | None] = contextvars.ContextVar(
    "headgate.context.chain", default=None
)

_KEPT: contextvars.ContextVar[tuple[Identity, Any, Chain | None] | None] = contextvars.ContextVar(
    "headgate.context.kept", default=None
)
_MARK: contextvars.ContextVar[None] = contextvars.ContextVar("headgate.context.mark")


class Identity:
    """What the Contexts of a chain have in common in one process: ids, and tokens that were used.

    Two processes may each make an id for one chain before they hear of each other: a generator that runs ahead, and its
    consumer. Then the caller's is used from then on, and the other is still known.
    """

    __slots__ = ("_also", "_id", "_listeners", "_spent")

    def __init__(self, id: str = "") -> None:
        self._id = id
        self._also: frozenset[str] = frozenset()
        self._spent: weakref.WeakKeyDictionary[Token[Any], str] | None = None
        self._listeners: weakref.WeakSet[Exchange] | None = None

    @property
    def id(self) -> str:
        """The id of this chain, made when it is first read."""
        if not self._id:
            self._id = clock.token()[:16]
        return self._id

    @property
    def known(self) -> str:
        """The id if somebody has asked; else empty."""
        return self._id

    def call(self, id: str) -> None:
        """Use the id of another process. One that was made here is still known."""
        if self._id and self._id != id:
            self._also |= {self._id}
        self._id = id

    def also_known_as(self, id: str) -> None:
        """Another process has made this id. It is the chain's own if that has none."""
        if not self._id:
            self._id = id
        elif self._id != id:
            self._also |= {id}

    def is_same(self, other: Identity) -> bool:
        """Whether another identity is of the same chain, perhaps by way of other processes."""
        if self is other or (self._id and self._id == other.known):
            return True
        return not self.names.isdisjoint(other.names)

    @property
    def names(self) -> frozenset[str]:
        """All ids by which processes know this chain."""
        return self._also | {self._id} if self._id else self._also

    @property
    def spent(self) -> list[str]:
        """Tokens that have travelled, were used, and are still in somebody's hands here."""
        return [] if self._spent is None else list(self._spent.values())

    def listen(self, exchange: Exchange) -> None:
        """On its other side there may be copies of tokens: it is to be told of those that are used."""
        if self._listeners is None:
            self._listeners = weakref.WeakSet()
        self._listeners.add(exchange)

    def spend(self, number: str, token: Token[Any] | None, source: Exchange | None = None) -> None:
        """A token that has travelled was used: here, or as `source` has just said."""
        if token is not None:
            if self._spent is None:
                self._spent = weakref.WeakKeyDictionary()
            self._spent[token] = number
        for listener in self._listeners or ():
            if listener is not source:
                listener.untold.append(number)


class Chain:
    """A Context that has an identity."""

    __slots__ = ("__weakref__", "_origin", "_proof", "context", "identity")

    def __init__(self, identity: Identity, origin: Chain | None = None) -> None:
        self._origin = origin
        self.identity: Identity = identity
        """Whose Context it is now: a generator on a worker runs in that of whoever asks for its next item."""
        self.context: weakref.ref[Context] | None = None
        """Who asked for it as an object."""
        self._proof: contextvars.Token[None] | None = _MARK.set(None)

    def is_here(self) -> bool:
        """Whether the Context of this chain is the current one."""
        proof = self._proof
        if proof is None:
            return False
        try:
            _MARK.reset(proof)
        except (ValueError, RuntimeError):
            return False
        self._proof = _MARK.set(None)
        return True

    def remember(self, owner: Any = None) -> Chain:
        """Somebody may know its id: whoever is the owner of this Context, which is its own, will have it again."""
        kept = _KEPT.get()
        if kept is None or kept[0] is not self.identity or owner is not None:
            _KEPT.set((self.identity, owner or _owner(), None))
        return self

    def hold_if_here(self) -> None:
        """A token of it may come back, from wherever: it is not forgotten as long as there is its Context."""
        if self.is_here():
            _KEPT.set((self.identity, _owner(), self))
        elif self._origin is not None:
            self._origin.hold_if_here()

    def end(self) -> None:
        """Nothing will run in its Context any more: let go of that, for it may hold this too."""
        self._proof = None


def _owner() -> Any:
    """Who runs here: a task, or a thread. Tasks weakly: their Contexts are theirs."""
    try:
        task = asyncio.current_task()
    except RuntimeError:
        task = None
    return threading.get_ident() if task is None else weakref.ref(task)


def present() -> Chain | None:
    """The chain of this Context, if it has one."""
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
    """Make it the chain of this Context, in which it was made."""
    CHAIN.set(weakref.ref(chain))
    return chain


def adopt(origin: Chain) -> Chain:
    """Make this Context part of another's chain, which lives as long."""
    return bind(Chain(origin.identity, origin))


def begin() -> Chain:
    """Make this Context the beginning of a chain."""
    return bind(Chain(Identity()))


def here() -> Chain:
    """The chain of this Context, begun now if it has none."""
    return present() or begin()
