"""A store in one SQLite file, for the processes of one machine.

`SqliteStore` is what programs use. `sqlite_state` runs the steps of shared budgets, `sqlite_members` knows who is alive
and wakes others, `sqlite_journal` keeps journals, `sqlite_file` is one database, `sqlite_place` says where the files
are. Begin here.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Literal

from headgate.core.checks import checked_positive_seconds, named_options
from headgate.core.kept_locks import KeptLocks
from headgate.core.shared_state import Listener, Step
from headgate.errors import InvalidArgument, InvalidType
from headgate.stores.codec import refuse_pickle
from headgate.stores.port import Journal
from headgate.stores.shared.sqlite_journal import open_journal
from headgate.stores.shared.sqlite_place import Place
from headgate.stores.shared.sqlite_state import SqliteState


class SqliteStore:
    """Shared budgets and journals in one file, for all processes of this machine that name it.

    `path` is the file; it is made when it is first needed, and so is its directory, both for this user alone. Other
    files stand beside it, with its name in front of theirs. It must be on a disk of this machine.

    A process that ends, however that happens, is known to the others at once. A process that is stopped keeps what it
    has. One store object serves all threads and event loops of a process; in a forked child it joins anew when it is
    first used there. `heartbeat` is how often, in seconds, everybody looks for news that were lost.
    """

    @named_options
    def __init__(
        self, path: str | os.PathLike[str], *, heartbeat: float = 5.0, codec: Literal["json"] = "json"
    ) -> None:
        refuse_pickle(codec)
        self.path: Path = _path(path)
        """The file."""
        self.heartbeat: float = checked_positive_seconds("heartbeat", heartbeat) or 5.0
        """Seconds between two looks for news that were lost."""
        place = self.path
        self._state = SqliteState(lambda: Place(place), self.heartbeat)
        self._finalizer = weakref.finalize(self, SqliteState.stop, self._state)
        self._finalizer.atexit = False  # at the end of the program all stores are closed, and waited for

    def __repr__(self) -> str:
        return f"<SqliteStore {self.path}{' closed' if self.is_closed else ''}>"

    @property
    def shared(self) -> bool:
        """True: several processes may use it at once."""
        return True

    @property
    def is_closed(self) -> bool:
        """Has `close` been called?"""
        return self._state.is_closed

    @property
    def deadline(self) -> float:
        """Infinite: a member lives exactly as long as its process."""
        return self._state.deadline

    def transact(self, key: str, step: Step, *, durable: bool = False) -> Future[Any]:
        """Run a step in one transaction; the future gets its reply. See `core.shared_state.SharedState`."""
        return self._state.transact(key, step, durable=durable)

    def listen(self, key: str, listener: Listener) -> Callable[[], None]:
        """Tell this listener what happens to a key, from now on, until the returned function is called."""
        return self._state.listen(key, listener)

    def connect(self, timeout: float) -> None:
        """Open everything now, and say what is wrong. Without it the first step does that."""
        self._state.connect(timeout)

    def share_lock(self, locks: KeptLocks) -> None:
        """Count this process as alive until the workers of a pool have ended too: `store.share_lock(pool.kept_locks)`.

        `TaskPool(workers=)` does that. Say it yourself for workers whose routines tasks call.
        """
        self._state.share_lock(locks)

    def open(self, pool_id: str, about: Mapping[str, Any], keep: int) -> Journal:
        """Lock and read the journal of this pool, or make it. See `stores.port.Store`."""
        return open_journal(Place(self.path), pool_id, about, keep)

    def close(self) -> None:
        """Be gone: run what is queued, end the thread, close all files. Twice is fine. Open journals stay open."""
        self._finalizer.detach()
        self._state.close()


def _path(path: object) -> Path:
    if not isinstance(path, str | bytes | os.PathLike):
        raise InvalidType(f"path must be a path, got {type(path).__name__}")
    text = os.fsdecode(path)
    if not text or "\0" in text:
        raise InvalidArgument("path must not be empty, and must have no NUL character in it")
    return Path(os.path.expanduser(text)).absolute()
