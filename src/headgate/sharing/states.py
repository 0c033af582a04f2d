"""The SharedState port: small states that several processes read and change together.

A shared store keeps one text for each key. A process changes a text by giving the store a *step*: a pure function that
takes the text and returns the new one, a reply, and the members to wake. The store runs the step in one transaction, so
the steps of all processes have one order. Because steps are pure, a store may run one twice (after a conflict, or when
the answer to a COMMIT was lost), and the same step serves every store.

A process that takes part is a *member*, under an id of its own. A member is gone when its process has ended or when it
could not renew its lease in time. It never comes back under the same id: a process that lost its lease takes part again
under a new one. So whatever a step finds of a member that is gone may be given to others.

`headgate.testing.check_shared_state` tells whether a store of yours keeps this contract. A store that wants to do less
implements `transactions.Backend` instead: the thread, the queue of steps, listeners and heartbeats are written there.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

from headgate.core.clock import clock

if TYPE_CHECKING:
    from concurrent.futures import Future


class ClockOffset(NamedTuple):
    """How far the clock of a store is ahead of the monotonic clock of this process: two bounds.

    The store reads its clock at some moment between two readings of ours, so the difference is known only within them.
    Both conversions choose the later result: something that another process waits for never ends early because a
    message or an answer was slow, or because this process was not given the processor in between. The price is that it
    ends late by as long.
    """

    least: float = 0.0
    most: float = 0.0

    @classmethod
    def read_between(cls, before: float, stored: float, after: float) -> ClockOffset:
        """The bounds that follow if the store read `stored` between two readings of the monotonic clock."""
        return cls(stored - after, stored - before)

    def to_store(self, at: float) -> float:
        """A time of this process on the clock of the store: not earlier than it was."""
        return at + self.most

    def to_local(self, at: float) -> float:
        """A time of the store on the clock of this process: not earlier than it will be."""
        return at - self.least


class Seen(NamedTuple):
    """What a step is told besides the text."""

    now: float
    """Unix seconds by the clock of the store, the same for all members. It never goes back from one step to the next
    of one store, as far as the store can tell."""
    member: str
    """The id under which this process takes part now. It changes when a lease is lost, and in a forked child."""
    is_gone: Callable[[str], bool]
    """Is the member of this id gone? Once True, always True."""
    ahead: ClockOffset | None = None
    """How far `now` is ahead of the monotonic clock of this process, or None if the store does not know."""
    unheard: Collection[str] = ()
    """Members that may hold what the texts do not say, because the texts were lost a short time ago."""


class Outcome(NamedTuple):
    """What a step returns."""

    state: str | None
    """The new text; None leaves the text as it is (or absent)."""
    reply: Any = None
    """What the caller of `transact` gets."""
    wakes: Collection[str] = ()
    """Ids of members whose listeners for this key are called once the text is committed."""
    expires: float | None = None
    """When the new text may be deleted, by the clock of `Seen.now`; None: never. Only for texts that are durable. A
    store deletes such texts some time after that, a few at a time, or keeps them."""


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


def timed(step: Step, asked_at: float) -> Step:
    """A step that replies with (its reply, the `ClockOffset` when it ran), for a caller that asks at `asked_at`.

    A store that does not say how far its clock is ahead has read it between then and the moment at which the step runs.
    """

    def run(text: str | None, seen: Seen) -> Outcome:
        ahead = seen.ahead or ClockOffset.read_between(asked_at, seen.now, clock.now())
        state, reply, wakes, expires = step(text, seen)
        return Outcome(state, (reply, ahead), wakes, expires)

    return run
