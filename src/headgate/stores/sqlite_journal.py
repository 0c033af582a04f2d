"""Journals in a SQLite file: the lines that `stores.jsonl` would write into files, in rows.

Everything that the lines mean is read and written by the code of `stores.jsonl`; here is only where they are. A row
holds the lines that were written together, as they are, so a journal is its rows in order.

One process writes a journal. It holds a lock of flock(2) on a file of its own for each, which the kernel frees when the
process ends. Whoever opens a journal also raises its epoch, and every write checks that the epoch is still its own: if
somebody has deleted the lock, two may believe that they own a journal, and then the elder fails instead of mixing in.
"""

from __future__ import annotations

import asyncio
import errno
import io
import os
import socket
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import Any, Final

from headgate.core.clock import clock
from headgate.core.files import Files, write_failed
from headgate.errors import StoreLocked
from headgate.sharing.sqlite.file import SqliteFile, sql_value, text_of_sql
from headgate.sharing.sqlite.place import Place
from headgate.stores.jsonl.lines import Writer, header_line, open_line, stale_line
from headgate.stores.jsonl.locked_file import LockedFile
from headgate.stores.jsonl.scanner import scan
from headgate.stores.jsonl.store import check
from headgate.stores.jsonl.writer import JsonLinesJournal
from headgate.stores.port import StoredTask

TABLES: Final = (
    "TABLE IF NOT EXISTS journals (pool_id PRIMARY KEY, epoch INTEGER, pid INTEGER, host TEXT, at REAL) WITHOUT ROWID",
    "TABLE IF NOT EXISTS lines (pool_id, number INTEGER, data BLOB, PRIMARY KEY (pool_id, number)) WITHOUT ROWID",
)

_LARGE: Final = 256_000
"""Bytes. Reading so much takes some milliseconds: what is larger is not read where an event loop waits for it."""

_AT_ONCE: Final = 1000
"""Lines in one row, where it does not matter."""

_ROWS: Final = 100
"""Rows that are read in one transaction."""


def open_journal(place: Place, pool_id: str, about: Mapping[str, Any], keep: int) -> JsonLinesJournal:
    """Lock and read the journal of a pool, or make it. See `stores.port.Store.open`."""
    place.check()
    digest = sha256(pool_id.encode("utf-8", "surrogatepass")).hexdigest()[:32]
    path = place.members / f"journal-{digest}.lock"
    file = SqliteFile(place.durable, TABLES, synced=True)
    try:
        lock = LockedFile.take(path, Files())
        if lock is None:
            raise _locked(file, pool_id)
    except OSError as error:
        raise write_failed(path, error) from error
    finally:
        file.close()
    rows = Rows(file, pool_id, lock)
    try:
        writer = Writer(os.getpid(), socket.gethostname(), clock.wall())
        rows.own(writer)
        return _opened(rows, writer, pool_id, about, keep)
    except BaseException:
        rows.close()
        raise


def _opened(rows: Rows, writer: Writer, pool_id: str, about: Mapping[str, Any], keep: int) -> JsonLinesJournal:
    header, opened = header_line(pool_id, about, "json"), open_line(writer, about)

    def read(lines: Iterable[bytes]) -> tuple[Sequence[StoredTask], int]:
        found = scan(lines)
        history = found.history
        check(history, rows.path, pool_id)
        if rows.size > history.size:
            rows.cut(history.size)
        now = clock.wall()
        news = [opened, *(stale_line(number, now) for number in found.unfinished())]
        rows.append(b"".join([header, *news] if history.unwritten else news))
        return found.kept(keep, now, "json"), history.lines + len(news)

    journal = JsonLinesJournal(rows, read, preamble=(header, opened), keep=keep, codec="json")
    if rows.size <= _LARGE or asyncio._get_running_loop() is None:
        journal.read()
    else:
        check(scan(islice(rows.lines(), 1)).history, rows.path, pool_id)
    return journal


class Rows:
    """The rows of one journal, which this process alone writes. See `stores.jsonl.writer.LineFile`."""

    def __init__(self, file: SqliteFile, pool_id: str, lock: LockedFile) -> None:
        self.path: Path = file.path
        self.size: int = 0
        """Bytes of all lines."""
        self.is_closed: bool = False
        self._file = file
        self._key = sql_value(pool_id)
        self._owned = lock
        self._using = threading.RLock()  # the thread of the journal writes while others read
        self._database: sqlite3.Connection | None = None
        self._epoch = 0
        self._last = 0

    def own(self, writer: Writer) -> None:
        """Raise the epoch, and learn how much is there."""
        with self._transaction() as database:
            row = database.execute("SELECT epoch FROM journals WHERE pool_id = ?", (self._key,)).fetchone()
            self._epoch = 1 + (row[0] if row is not None and isinstance(row[0], int) else 0)
            database.execute(
                "INSERT OR REPLACE INTO journals VALUES (?, ?, ?, ?, ?)", (self._key, self._epoch, *writer)
            )
            last, size = database.execute(
                "SELECT max(number), sum(length(CAST(data AS BLOB))) FROM lines WHERE pool_id = ?", (self._key,)
            ).fetchone()
            self._last, self.size = last or 0, int(size or 0)

    def lines(self) -> Iterator[bytes]:
        """Yield all lines that are there now, each with its newline."""
        for data in self._rows(self._last):
            yield from io.BytesIO(data)

    def append(self, data: bytes) -> None:
        """Put these lines on the disk, or raise and leave the journal as it was."""
        with self._transaction() as database:
            self._check(database)
            self._insert(database, self._last + 1, data)
        self._last += 1
        self.size += len(data)

    def cut(self, size: int) -> None:
        """Forget all after the first `size` bytes."""
        with self._using:
            kept = b"".join(self._rows(self._last))[:size]
            self._exchange([kept] if kept else [])

    def replace(self, lines: Iterable[bytes]) -> int:
        """Exchange the content for these lines in one step, or raise and leave it as it was; returns how many."""
        count = 0

        def groups() -> Iterator[bytes]:
            nonlocal count
            rest = iter(lines)
            while some := list(islice(rest, _AT_ONCE)):
                count += len(some)
                yield b"".join(some)

        with self._using:
            self._exchange(groups())
        return count

    def close(self) -> None:
        """Give up the lock. Twice is fine."""
        with self._using:
            if not self.is_closed:
                self.is_closed = True
                self._file.close()
                if not self._owned.is_closed:
                    self._owned.path.unlink(missing_ok=True)
                    self._owned.close()

    def _exchange(self, groups: Iterable[bytes]) -> None:
        """Write new rows after the old ones, and delete the old ones: all in one transaction."""
        old, last, size = self._last, self._last, 0
        with self._transaction() as database:
            self._check(database)
            for data in groups:  # may read the old rows meanwhile
                last += 1
                size += len(data)
                self._insert(database, last, data)
            database.execute("DELETE FROM lines WHERE pool_id = ? AND number <= ?", (self._key, old))
        self._last, self.size = last, size

    def _insert(self, database: sqlite3.Connection, number: int, data: bytes) -> None:
        database.execute("INSERT INTO lines VALUES (?, ?, ?)", (self._key, number, data))

    def _check(self, database: sqlite3.Connection) -> None:
        row = database.execute("SELECT epoch, pid, host FROM journals WHERE pool_id = ?", (self._key,)).fetchone()
        if row is None or row[0] != self._epoch:
            by = "" if row is None else f" by process {row[1]} on {text_of_sql(row[2])}"
            raise OSError(errno.ESTALE, f"the journal was opened again{by}", str(self.path))

    def _rows(self, last: int) -> Iterator[bytes]:
        """Yield the content of all rows up to this number, in order."""
        number = -(1 << 63)
        while True:
            with self._transaction() as database:
                rows = database.execute(
                    "SELECT number, data FROM lines WHERE pool_id = ? AND number > ? AND number <= ?"
                    " ORDER BY number LIMIT ?",
                    (self._key, number, last, _ROWS),
                ).fetchall()
            if not rows:
                return
            number = rows[-1][0]
            for _, data in rows:
                yield data if isinstance(data, bytes) else str(data).encode()  # the second is garbage, and reads so

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """One transaction, or the one that this thread is in."""
        with self._using:
            if self._database is not None:
                yield self._database
                return
            with self._file.transaction() as database:
                self._database = database
                try:
                    yield database
                finally:
                    self._database = None


def _locked(file: SqliteFile, pool_id: str) -> StoreLocked:
    with file.transaction() as database:
        row = database.execute("SELECT pid, host FROM journals WHERE pool_id = ?", (sql_value(pool_id),)).fetchone()
    if row is None:
        return StoreLocked(f"the journal of {pool_id!r} in {file.path} is being opened by another process")
    holder = f"process {row[0]} on {text_of_sql(row[1])}"
    return StoreLocked(f"the journal of {pool_id!r} in {file.path} is in use by {holder}")
