"""What `SqliteStore` and `PostgresStore` have in common: sharing through the thread of the store."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from concurrent.futures import Future
from types import TracebackType
from typing import Any, ClassVar, Self

from headgate.sharing.states import Listener, Step
from headgate.sharing.transactions import Transactions


class SharedStore:
    """A store that several processes use at once. Implements `sharing.states.SharedState`.

    One object serves all threads and event loops of a process. A forked child takes part as a member of its own when it
    first uses the store.
    """

    _closing: ClassVar[float] = 10.0
    """Seconds that `close` waits by default."""

    def __init__(self, transactions: Transactions) -> None:
        self._transactions = transactions
        self._finalizer = weakref.finalize(self, transactions.stop)
        self._finalizer.atexit = False  # at the end of the program all stores are closed, and waited for

    @property
    def shared(self) -> bool:
        """True: several processes may use it at once."""
        return True

    @property
    def is_closed(self) -> bool:
        """Has `close` been called?"""
        return self._transactions.is_closed

    @property
    def deadline(self) -> float:
        """Until when the lease of this process stands for certain, on its monotonic clock."""
        return self._transactions.deadline

    def transact(self, key: str, step: Step, *, durable: bool = False) -> Future[Any]:
        """Run a step in one transaction; the future gets its reply. See `sharing.states.SharedState`."""
        return self._transactions.transact(key, step, durable=durable)

    def listen(self, key: str, listener: Listener) -> Callable[[], None]:
        """Tell this listener what happens to a key, from now on, until the returned function is called."""
        return self._transactions.listen(key, listener)

    def connect(self, timeout: float) -> None:
        """Block until the store has answered. Raises what is wrong: StoreUnreachable, InvalidArgument and others."""
        self._transactions.connect(timeout)

    def close(self, *, timeout: float | None = None) -> None:
        """Stop taking part: run what is queued, and give up what this process holds. Twice is fine.

        Waits at most `timeout` seconds.
        """
        self._finalizer.detach()
        self._transactions.close(self._closing if timeout is None else timeout)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close()
