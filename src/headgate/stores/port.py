"""The Store port: what a task pool needs in order to remember its tasks across restarts.

A store holds one journal for each pool. A pool opens its own when it is made (which locks it: one writer), reads what
was there, and from then on appends what happens to its tasks. An entry is acknowledged when it is durable, not before;
entries that arrive while the disk is busy are made durable together.

`headgate.testing.check_store` tells whether a store of yours keeps this contract.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NotRequired, Protocol, TypeAlias, TypedDict

from headgate.errors import StoreWriteFailed

Done: TypeAlias = Callable[[StoreWriteFailed | None], None]
"""Called once, on the event loop that appended, when the entry is durable (None) or could not be made so."""


class ErrorText(TypedDict):
    """An exception as it is stored."""

    type: str
    """The class of the exception, as module:qualname."""
    text: str
    traceback: str


class Entry(TypedDict):
    """One change of one task. `kind` and `at` are always there, `task` in all but "beat"."""

    kind: Literal["submit", "start", "requeue", "end", "beat"]
    at: float
    """When it happened, in Unix seconds."""
    task: NotRequired[int]
    """The number of the task in its pool."""
    about: NotRequired[Mapping[str, Any]]
    """With "submit": what describes the task, as values that JSON knows (idempotency_key, window, digest ...)."""
    running: NotRequired[bool]
    """With "submit": it has its slot already and starts when this is durable. Saves the "start" entry."""
    attempt: NotRequired[int]
    """With "start": 1 for the first."""
    status: NotRequired[str]
    """With "end": the terminal status."""
    result: NotRequired[Any]
    """With "end" and "completed": any Python value. The store encodes it before `append` returns."""
    window: NotRequired[str]
    """With "end": how long it holds its idempotency key, if that is not what its submit said."""
    error: NotRequired[ErrorText]
    """With kind "end" and status "failed": the exception."""
    reason: NotRequired[str]
    policy: NotRequired[str]
    """With kind "end" and status "rejected": the policy that rejected the task."""


class StoredTask(TypedDict):
    """The state of one task, made from all its entries."""

    task: int
    about: Mapping[str, Any]
    status: str
    """As it was written: "queued", "running" or terminal. The owner reads unfinished ones as stale."""
    submitted_at: float
    attempt: int
    """0 when it never started."""
    started_at: float | None
    finished_at: float | None
    result: Any
    """With "completed": its value and type as they were, or an `Opaque` when they could not be kept."""
    error: ErrorText | None
    reason: str | None
    policy: str | None


class Journal(Protocol):
    """The open journal of one pool."""

    @property
    def tasks(self) -> Sequence[StoredTask]:
        """The tasks that were there when the journal was opened, by number.

        A journal that has an attribute `is_read`, and that is False, is read when this is asked for, in the thread that
        asks: a pool asks in a thread of its own. What `open` may raise, this may raise then.
        """
        ...

    # A journal may have a method ``why_lost(result) -> str`` too: why this result could not be given back after a
    # restart, "" if it could. Pools with on_opaque="rerun" or "fail" ask it; without it everything counts as kept.

    def append(self, entry: Entry, done: Done | None = None) -> None:
        """Write this after all that was appended before. Called on one event loop; never blocks, never raises for
        what the disk does: that is told to `done`.
        """

    def append_all(self, entries: Sequence[tuple[Entry, Done | None]]) -> None:
        """Do what `append` does, for several entries that are made durable together: with one sync, one transaction.

        A journal may lack this method. Then its pool appends them one by one.
        """

    async def flush(self) -> None:
        """Return when everything appended so far is durable or has failed."""

    def close(self) -> None:
        """Write what is left and release the lock. May be called twice. May block for one write."""


class Store(Protocol):
    """Keeps one journal for each pool."""

    @property
    def shared(self) -> bool:
        """May several processes use one pool's journal at once? Scopes "tenant" and "org" need that."""
        ...

    def open(self, pool_id: str, about: Mapping[str, Any], keep: int) -> Journal:
        """Lock and read the journal of this pool, or make it. Needs no event loop. Reading may come later: see `tasks`.

        `about` describes the pool (name, scope, stale_after ...), as values that JSON knows. Of the finished tasks that
        hold no idempotency key only the newest `keep` need be remembered.

        StoreLocked when another writer has it, StoreFormatTooNew, StoreWriteFailed when it cannot be made.
        """
        ...
