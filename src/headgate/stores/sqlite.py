"""`SqliteStore`: shared budgets, health and journals in one SQLite file, for the processes of one machine.

`sharing/sqlite` runs the steps and knows who is alive, `sqlite_journal` keeps journals.
"""

from __future__ import annotations

import math
import os
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from headgate.core.checks import checked_positive_seconds, named_options
from headgate.core.kept_locks import KeptLocks
from headgate.errors import InvalidArgument, InvalidType
from headgate.sharing.sqlite.backend import SqliteBackend
from headgate.sharing.sqlite.place import Place
from headgate.sharing.transactions import Transactions
from headgate.stores.codec import refuse_pickle
from headgate.stores.port import Journal
from headgate.stores.shared import SharedStore
from headgate.stores.sqlite_journal import open_journal


class SqliteStore(SharedStore):
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
        self._kept_locks: weakref.WeakSet[KeptLocks] = weakref.WeakSet()
        file, beat, kept = self.path, self.heartbeat, self._kept_locks  # not `self`: the thread would keep it alive
        super().__init__(
            Transactions(
                "headgate-sqlite", str(file), lambda host: SqliteBackend(Place(file), beat, host, lambda: list(kept))
            )
        )

    def __repr__(self) -> str:
        return f"<SqliteStore {self.path}{' closed' if self.is_closed else ''}>"

    @property
    def deadline(self) -> float:
        """Infinite until the store is closed: a member lives exactly as long as its process."""
        return -math.inf if self.is_closed else math.inf

    def share_lock(self, locks: KeptLocks) -> None:
        """Count this process as alive until the workers of a pool have ended too: `store.share_lock(pool.kept_locks)`.

        `TaskPool(workers=)` does that. Say it yourself for workers whose routines tasks call.
        """
        self._kept_locks.add(locks)
        self._transactions.post(SqliteBackend.share_lock)

    def open(self, pool_id: str, about: Mapping[str, Any], keep: int) -> Journal:
        """Lock and read the journal of this pool, or make it. See `stores.port.Store`."""
        return open_journal(Place(self.path), pool_id, about, keep)


def _path(path: object) -> Path:
    if not isinstance(path, str | bytes | os.PathLike):
        raise InvalidType(f"path must be a path, got {type(path).__name__}")
    text = os.fsdecode(path)
    if not text or "\0" in text:
        raise InvalidArgument("path must not be empty, and must have no NUL character in it")
    if text == ":memory:":
        raise InvalidArgument(
            "path is ':memory:', and no other process could see what is there",
            remedy="Pass the path of a file such as 'shared.db', or leave store= out if nothing is to be shared.",
        )
    return Path(os.path.expanduser(text)).absolute()
