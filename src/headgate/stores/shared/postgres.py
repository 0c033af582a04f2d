"""A store in a PostgreSQL database, for processes on many machines.

    store = PostgresStore("postgresql://user:password@host/database")

It keeps the texts of `SharedState` and the journals of pools, in tables of the schema `headgate`, which are made on
first use. Making a store does nothing yet: the first use starts its thread, which connects, takes part as a member and
renews its lease. `postgres_state` runs steps, `postgres_members` keeps the lease, `postgres_link` the connections,
`postgres_journal` the journals; `postgres_schema` has the tables.
"""

from __future__ import annotations

import atexit
import math
import os
import threading
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Literal, Self

from headgate.core.checks import is_finite, named_options
from headgate.core.clock import clock
from headgate.core.shared_state import Listener, Step
from headgate.errors import InvalidArgument, PoolClosed
from headgate.stores.codec import refuse_pickle
from headgate.stores.jsonl.writer import JsonLinesJournal
from headgate.stores.shared.postgres_address import parsed
from headgate.stores.shared.postgres_engine import Engine
from headgate.stores.shared.postgres_errors import require_asyncpg
from headgate.stores.shared.postgres_journal import Journals, open_journal
from headgate.stores.shared.postgres_state import Call, stored_key

_CLOSING = 3.0
"""Seconds that `close` waits at most."""
_AT_EXIT = 1.0
"""Seconds that the end of the program waits at most for stores that nobody closed."""

_stores: weakref.WeakSet[PostgresStore] = weakref.WeakSet()
_leaving: list[Engine] = []
"""Those whose store nobody holds any more, and whose threads have not ended yet."""


class PostgresStore:
    """Shared state and journals in a PostgreSQL database.

    `dsn` is an address as libpq knows it; what it leaves out is taken from PGHOST, PGPASSWORD and the like, or a
    passfile. `lease` is after how many seconds without a sign of life a member counts as gone: a process that was
    killed, stopped, or cut off. A process renews it every third of that, in a thread of the store; code that holds the
    GIL longer than the lease loses it.

    Texts that are not durable survive a clean restart of the server. If it crashes, or another takes over, changes of
    the last half second may be lost, and then all members have lost their leases too.

    One object serves all threads and event loops of a process. A forked child takes part as a member of its own;
    listeners that were added before the fork stay with the parent.
    """

    @named_options
    def __init__(self, dsn: str, *, lease: float = 15.0, codec: Literal["json"] = "json") -> None:
        refuse_pickle(codec)
        require_asyncpg()
        self._address = parsed(dsn)
        if not is_finite(lease) or lease <= 0:
            raise InvalidArgument(f"lease must be > 0 seconds, got {lease!r}")
        self.lease: float = float(lease)
        """Seconds after which a member that does not renew its lease is gone."""
        self._lock = threading.Lock()
        self._engine: Engine | None = None
        self._finalizer: weakref.finalize[[Engine, int], PostgresStore] | None = None
        self._journals: Journals | None = None
        self._is_closed = False
        _stores.add(self)

    def __repr__(self) -> str:
        return f"<PostgresStore {self._address.shown}{' closed' if self._is_closed else ''}>"

    @property
    def shared(self) -> bool:
        """True: several processes may share the state of one pool."""
        return True

    @property
    def deadline(self) -> float:
        """Until when the lease stands for certain, on the monotonic clock; minus infinity while there is none."""
        engine = self._engine
        return engine.deadline if engine is not None else -math.inf

    def connect(self, timeout: float) -> None:
        """Block until the server answers; StoreUnreachable and others if it does not, or if it cannot be used."""
        self._started().connect(timeout)

    def transact(self, key: str, step: Step, *, durable: bool = False) -> Future[Any]:
        """Run a step in one transaction; the future gets its reply when that is committed. See `SharedState`."""
        call = Call(stored_key(key), step, durable)
        try:
            engine = self._started()
        except PoolClosed as error:
            call.future.set_exception(error)
        else:
            engine.transact(call)
        return call.future

    def listen(self, key: str, listener: Listener) -> Callable[[], None]:
        """Tell this listener what happens to a key, until the returned function is called."""
        return self._started().listeners.add(stored_key(key), listener)

    def open(self, pool_id: str, about: Mapping[str, Any], keep: int) -> JsonLinesJournal:
        """Lock and read the journal of this pool, or make it. See `stores.port.Store`."""
        engine = self._started()
        with self._lock:
            if self._journals is None or self._journals.engine is not engine:
                self._journals = Journals(engine)
            journals = self._journals
        return open_journal(self, journals, pool_id, about, keep)

    @property
    def is_closed(self) -> bool:
        """Was `close` called?"""
        return self._is_closed

    def close(self, *, timeout: float = _CLOSING) -> None:
        """Stop taking part: what this member holds is free at once. Waits at most `timeout` seconds. Twice is fine."""
        with self._lock:
            self._is_closed = True
            engine, self._engine = self._engine, None
            if self._finalizer is not None:
                self._finalizer.detach()
        if engine is not None:
            engine.stop(timeout)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close()

    def _started(self) -> Engine:
        with self._lock:
            if self._is_closed:
                raise PoolClosed("the store is closed", remedy="Make a new store.")
            if self._engine is None:
                self._engine = engine = Engine(self._address, self.lease)
                self._finalizer = weakref.finalize(self, _let_go, engine, os.getpid())
                self._finalizer.atexit = False  # _close_all does it, and waits
            return self._engine

    def forked(self) -> None:
        """Begin anew, in a forked child. Called there by headgate itself."""
        self._lock = threading.Lock()
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.thread.abandon()
            if self._finalizer is not None:
                self._finalizer.detach()


def _let_go(engine: Engine, pid: int) -> None:
    """Nobody holds the store any more: end its thread, without waiting for it."""
    if pid == os.getpid():
        engine.stop(0.0)
        _leaving[:] = [one for one in _leaving if not one.thread.join(0.0)] + [engine]


def _close_all() -> None:
    until = clock.now() + _AT_EXIT
    for store in list(_stores):
        store.close(timeout=max(0.0, until - clock.now()))
    for engine in _leaving:
        engine.thread.join(max(0.0, until - clock.now()))


def _forked() -> None:
    for engine in _leaving:
        engine.thread.abandon()
    _leaving.clear()
    for store in list(_stores):
        store.forked()


os.register_at_fork(after_in_child=_forked)
atexit.register(_close_all)
