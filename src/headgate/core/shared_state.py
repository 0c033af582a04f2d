"""The SharedState port: small states that several processes read and change together.

A shared store keeps one text for each key. A process changes a text by giving the store a *step*: a pure function that
takes the text and returns the new one, a reply, and the members to wake. The store runs the step in one transaction, so
the steps of all processes have one order. Because steps are pure, a store may run one twice (after a conflict, or when
the answer to a COMMIT was lost), and the same step serves every store.

A process that takes part is a *member*, under an id of its own. A member is gone when its process has ended or when it
could not renew its lease in time. It never comes back under the same id: a process that lost its lease takes part again
under a new one. So whatever a step finds of a member that is gone may be given to others.

`headgate.testing.check_shared_state` tells whether a store of yours keeps this contract. The port stands in `core` so
that resources and tasks can share their states without importing a store; `store_of` imports one when it is named.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

if TYPE_CHECKING:
    from concurrent.futures import Future


class Seen(NamedTuple):
    """What a step is told besides the text."""

    now: float
    """Unix seconds by the clock of the store, the same for all members. It never goes back from one step to the next
    of one store, as far as the store can tell."""
    member: str
    """The id under which this process takes part now. It changes when a lease is lost, and in a forked child."""
    is_gone: Callable[[str], bool]
    """Is the member of this id gone? Once True, always True."""


class Outcome(NamedTuple):
    """What a step returns."""

    state: str | None
    """The new text; None leaves the text as it is (or absent)."""
    reply: Any = None
    """What the caller of `transact` gets."""
    wakes: Collection[str] = ()
    """Ids of members whose listeners for this key are called once the text is committed."""


Step: TypeAlias = Callable[[str | None, Seen], Outcome]
"""Takes the text (None if the key has none) and `Seen`. Pure: it may be run more than once, in any thread."""


class Listener(Protocol):
    """Is told what may have changed. Called in the thread of the store: it must return at once, and not raise."""

    def woken(self) -> None:
        """Look again. Called when a step of another member woke this one, when another member has gone, after a
        connection was lost and made again, and at every heartbeat. May be called too often, but never too seldom."""

    def lost(self) -> None:
        """The lease of this member was lost. What it held belongs to others; it has a new id from now on."""

    def unreachable(self, error: Exception) -> None:
        """The store cannot be reached. It is tried again and again; `woken` is called when it answers."""


@runtime_checkable
class SharedState(Protocol):
    """Texts that several processes change together."""

    @property
    def deadline(self) -> float:
        """Until when the lease of this member stands for certain, on the monotonic clock of this process.

        Infinite where a member lives exactly as long as its process. Past it, nothing new may be begun on the strength
        of what this member holds.
        """
        ...

    def transact(self, key: str, step: Step, *, durable: bool = False) -> Future[Any]:
        """Run a step in one transaction; the future gets its reply when the transaction is committed.

        Steps of one process run in the order in which they were given, also across keys. While the store cannot be
        reached they wait. With `durable` the text survives a crash of the machine; a key is always used with the same
        value of it. May be called from any thread. An exception that the step raises is that of the future, and
        nothing is changed. The future gets StoreWriteFailed when the store cannot write (a full disk), PoolClosed when
        it was closed, and can be cancelled as long as the step has not been run.
        """
        ...

    def listen(self, key: str, listener: Listener) -> Callable[[], None]:
        """Tell this listener what happens to a key, from now on, until the returned function is called."""
        ...

    def connect(self, timeout: float) -> None:
        """Return when the store answers; block this thread until then.

        Raises StoreUnreachable, with host and cause and without any password, StoreFormatTooNew, StoreWriteFailed or
        InvalidArgument if the store cannot be used.
        """
        ...


def store_of(value: object) -> object:
    """Return the store that a string names; other objects as they are."""
    return value


def store_from_environment() -> object | None:
    """Return the store that HEADGATE_STORE names; None if it is not set."""
    return None
