"""One SQLite file that several processes write, each transaction after the other.

Before BEGIN IMMEDIATE a lock of flock(2) is taken on a file beside it. SQLite has locks of its own, but who finds them
taken sleeps and tries again, for longer and longer: one of four busy processes can wait for seconds. flock wakes the
one that waited. The lock is not on the database itself, because closing any descriptor of that would free SQLite's own
locks.

The journal mode is never WAL: before 3.51.3 SQLite can lose data when a WAL is reset by two processes at once. It is
TRUNCATE, and PERSIST for a file that is not synced: keeping the pages of the journal, and writing over its first bytes,
takes a quarter less time than truncating it. A process that is killed in the middle leaves a journal which the next one
rolls back.

Nothing of this crosses a fork: see `fork_guard`. A process that is stopped (SIGSTOP) in the middle of a transaction
keeps all others waiting until it goes on; that is some hundred microseconds of its time, and the price of a file.
"""

from __future__ import annotations

import errno
import fcntl
import os
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from headgate.core.files import Files, write_failed
from headgate.errors import HeadgateError, InvalidArgument, StoreFormatTooNew, StoreUnreachable, StoreWriteFailed
from headgate.sharing.fork_guard import ForkGuard, never_free

FORMAT: Final = 1
"""Raised when an older release could misread what a newer one writes. Stands in `user_version`."""

APPLICATION: Final = 0x48656164
"""Stands in `application_id`, so that a database of another program is not taken for one of ours."""

_BUSY_SECONDS: Final = 10.0
"""How long to wait for a program that locks the database without asking for the gate, such as a shell of SQLite."""


_SMALLEST: Final = 512
"""Bytes of the smallest page. A shorter file that is not empty was written by another program."""


class SqliteFile:
    """A database, its connection, and the lock beside it. One thread at a time may use it."""

    def __init__(
        self,
        path: Path,
        tables: Sequence[str],
        *,
        synced: bool,
        made: Callable[[sqlite3.Connection], None] = lambda database: None,
    ) -> None:
        """`tables` are what follows CREATE in the statements that make them; `made` is called in the transaction in
        which the tables of a new file are made."""
        self.path: Path = path
        self._made = made
        self._tables = tables
        self._synced = synced
        self._files = Files()
        self._gate = -1
        self._database: sqlite3.Connection | None = None
        self._inode: tuple[int, int] | None = None
        self._guard = ForkGuard(self._forked)

    def __repr__(self) -> str:
        return f"<SqliteFile {self.path}>"

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """Open the file if it is not open, and commit at the end of the block; undo everything if it raises.

        Raises errors of headgate only, for what SQLite or the disk does; the next transaction tries again.
        """
        try:
            self._lock_gate()
        except OSError as error:
            raise write_failed(self.path, error) from error
        try:
            with self._guard:
                try:
                    database = self._opened()
                    database.execute("BEGIN IMMEDIATE")
                    yield database
                    database.execute("COMMIT")
                except BaseException as error:
                    self._undo()
                    if isinstance(error, sqlite3.Error):
                        self._close_database()  # the next transaction looks at what the file is now
                    if isinstance(error, sqlite3.Error | OSError | OverflowError):
                        raise explained(self.path, error) from error
                    raise
        finally:
            if self._gate != -1:  # else this is a child that was forked inside the block
                fcntl.flock(self._gate, fcntl.LOCK_UN)

    def close(self) -> None:
        """Close the connection. The next transaction opens it again."""
        with self._guard:
            self._close_database()
            gate, self._gate = self._gate, -1
            if gate != -1:
                self._files.close(gate)

    def _lock_gate(self) -> None:
        """Wait for the turn of this process."""
        while True:
            if self._gate == -1:
                self._files.make_folder(self.path.parent)
                self._gate = self._files.open(self.path.with_name(self.path.name + "-lock"))
            fcntl.flock(self._gate, fcntl.LOCK_EX)
            if os.fstat(self._gate).st_nlink:
                return
            gate, self._gate = self._gate, -1  # deleted: who comes now opens another
            self._files.close(gate)

    def _opened(self) -> sqlite3.Connection:
        """Return the connection to the file that has this name now."""
        if self._database is not None:
            try:
                found = os.stat(self.path)
                if (found.st_dev, found.st_ino) == self._inode:
                    return self._database
            except FileNotFoundError:
                pass
            self._close_database()
        size = self.path.stat().st_size if self.path.exists() else None
        if size and size < _SMALLEST and not Path(f"{self.path}-journal").exists():
            raise _no_database(self.path)  # SQLite takes it for an empty file, and would write over it
        if size is None:
            # SQLite would make it for everybody to read. Closing a descriptor of it is safe here, behind the gate.
            os.close(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))
        # Not bound to a thread: a journal is opened in one, written in another and closed in a third, one at a time.
        database = sqlite3.connect(
            self.path, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False, cached_statements=32
        )
        try:
            self._prepare(database)
            found = os.stat(self.path)
        except BaseException:
            database.close()
            raise
        self._database, self._inode = database, (found.st_dev, found.st_ino)
        return database

    def _prepare(self, database: sqlite3.Connection) -> None:
        database.text_factory = bytes  # a text that is no UTF-8 must not make a row unreadable
        # Order: the first of these that reads the file says so if it is no database.
        application = _number(database, "PRAGMA application_id")
        version = _number(database, "PRAGMA user_version")
        if application != APPLICATION and (version or _number(database, "SELECT count(*) FROM sqlite_master")):
            raise InvalidArgument(
                f"{self.path} is a SQLite database of another program",
                remedy="Pass another path. The file was left as it is.",
            )
        if version > FORMAT:
            raise StoreFormatTooNew(f"{self.path} has format {version}, and this release reads formats up to {FORMAT}")
        wanted = "TRUNCATE" if self._synced else "PERSIST"
        (mode,) = database.execute(f"PRAGMA journal_mode={wanted}").fetchone()
        if mode != wanted.lower().encode():
            raise StoreUnreachable(
                f"{self.path} has the journal mode {mode!r}, which another program uses now",
                remedy="Close that program: this store does not work with a write-ahead log.",
            )
        database.execute(f"PRAGMA synchronous={'FULL' if self._synced else 'OFF'}")
        database.execute(f"PRAGMA fullfsync={int(self._synced)}")  # macOS: through the memory of the drive
        database.execute("PRAGMA trusted_schema=OFF")
        database.execute("BEGIN IMMEDIATE")
        for made in self._tables:
            database.execute(f"CREATE {made}")
        if application != APPLICATION:
            database.execute(f"PRAGMA application_id={APPLICATION}")
            database.execute(f"PRAGMA user_version={FORMAT}")
            self._made(database)
        database.execute("COMMIT")

    def _undo(self) -> None:
        """Leave no transaction open; a connection that cannot even do that is closed, which does it."""
        database = self._database
        if database is not None and database.in_transaction:
            try:
                database.execute("ROLLBACK")
            except sqlite3.Error:
                self._close_database()

    def _close_database(self) -> None:
        database, self._database = self._database, None
        if database is not None:
            database.close()

    def _forked(self) -> None:
        if self._database is not None:
            never_free(self._database)
        self._database = None
        self._gate = -1  # `Files` has closed it


def _number(database: sqlite3.Connection, statement: str) -> int:
    (found,) = database.execute(statement).fetchone()
    return int(found)


def sql_value(text: str) -> str | bytes:
    """Return what SQLite takes for a text: it has none for half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-8", "surrogatepass")
    return text


def text_of_sql(value: object) -> str:
    """Return the text of a value that SQLite gave, whatever somebody has put there."""
    if not isinstance(value, bytes):
        return str(value)
    try:
        return value.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        return value.decode("utf-8", "replace")


def _no_database(path: Path) -> InvalidArgument:
    return InvalidArgument(f"{path} is not a SQLite database", remedy="Pass another path. The file was left as it is.")


def explained(path: Path, error: Exception) -> HeadgateError:
    """Make the error of headgate for one of SQLite or of the disk."""
    if not isinstance(error, sqlite3.Error):
        return write_failed(path, error)
    code = getattr(error, "sqlite_errorcode", None) or 0
    match code & 0xFF:
        case sqlite3.SQLITE_NOTADB:
            return _no_database(path)
        case sqlite3.SQLITE_CORRUPT:
            return StoreWriteFailed(
                f"{path} is damaged: {error}",
                remedy="End all processes that use it, then delete it, or restore it from a backup.",
            )
        case sqlite3.SQLITE_BUSY | sqlite3.SQLITE_LOCKED:
            return StoreUnreachable(
                f"{path} is locked by another program: {error}", remedy="Close the program that has it open."
            )
        case sqlite3.SQLITE_FULL:
            return write_failed(path, OSError(errno.ENOSPC, str(error)))
        case sqlite3.SQLITE_READONLY | sqlite3.SQLITE_PERM | sqlite3.SQLITE_CANTOPEN | sqlite3.SQLITE_AUTH:
            return StoreWriteFailed(
                f"{path} could not be written: {error}",
                remedy="Make the file and its directory writable for this user, or use another path.",
            )
    return write_failed(path, error)
