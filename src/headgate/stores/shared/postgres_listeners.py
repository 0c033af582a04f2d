"""Who is told what happens to the texts of a PostgresStore, and when that is told."""

from __future__ import annotations

import threading
from collections.abc import Callable

from headgate.core.redaction import log_exception
from headgate.core.shared_state import Listener
from headgate.errors import HeadgateError


class Listeners:
    """The listeners of one store, by key. They are called in the thread of the store."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_key: dict[str, tuple[Listener, ...]] = {}
        self._broken: set[str] = set()

    def add(self, key: str, listener: Listener) -> Callable[[], None]:
        """Add a listener; returns what removes it."""
        with self._lock:
            self._by_key[key] = (*self._by_key.get(key, ()), listener)

        def remove() -> None:
            with self._lock:
                left = [one for one in self._by_key.get(key, ()) if one is not listener]
                if left:
                    self._by_key[key] = tuple(left)
                else:
                    self._by_key.pop(key, None)

        return remove

    def wake(self, key: str) -> None:
        """Tell those of a key to look."""
        for listener in self._by_key.get(key, ()):
            _call(listener.woken)

    def wake_all(self) -> None:
        """Tell all to look."""
        for listener in self._all():
            _call(listener.woken)

    def lost(self) -> None:
        """Tell all that the lease was lost."""
        for listener in self._all():
            _call(listener.lost)

    def cannot_reach(self, connection: str, error: HeadgateError) -> None:
        """Tell all that the server cannot be reached, once until a connection is made again."""
        if not self._broken:
            for listener in self._all():
                _call(lambda told=listener: told.unreachable(error))  # type: ignore[misc]
        self._broken.add(connection)

    def reached(self, connection: str) -> None:
        """A connection was made again: what was told through the old one may be lost, so all must look."""
        self._broken.discard(connection)
        self.wake_all()

    def _all(self) -> list[Listener]:
        with self._lock:
            return [listener for listeners in self._by_key.values() for listener in listeners]


def _call(tell: Callable[[], None]) -> None:
    try:
        tell()
    except Exception:  # against the contract; the others must hear all the same
        log_exception("headgate.stores", "a listener of a store failed")
