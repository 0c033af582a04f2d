"""Journals in a PostgreSQL database: the lines that `stores.jsonl` would write into files, in rows.

Everything that the lines mean is read and written by the code of `stores.jsonl`; here is only where they are. A row of
`chunks` holds the lines that were written together, so a journal is its rows in order.

One process writes a journal. It holds an advisory lock of the server, which the server frees when the connection ends:
a process that was killed can be started again at once. But a connection may also break while its process lives. So
whoever opens a journal raises its epoch, and every write checks in its own transaction that the epoch is still that: if
another has opened the journal meanwhile, the elder fails. If nobody has, it takes the lock again and goes on. A machine
that vanished without closing its connections does not free the lock; then the lease of its member decides, and the
session is ended by force.

A write whose answer never came is sent again under the same number, so it is there once. The lock makes sure that the
session in which it was sent first has ended.
"""

from __future__ import annotations

import asyncio
import errno
import io
import logging
import os
import socket
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from functools import partial
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import Any, Final, TypeVar
from weakref import WeakValueDictionary

from headgate.core.clock import clock
from headgate.errors import HeadgateError, PoolClosed, StoreLocked
from headgate.sharing.postgres.backend import PostgresBackend
from headgate.sharing.postgres.errors import SCHEMA
from headgate.sharing.postgres.link import Link
from headgate.sharing.transactions import Transactions
from headgate.stores.jsonl.lines import Writer, header_line, open_line, stale_line
from headgate.stores.jsonl.scanner import scan
from headgate.stores.jsonl.store import check, damage
from headgate.stores.jsonl.writer import JsonLinesJournal
from headgate.stores.port import StoredTask

T = TypeVar("T")
_log = logging.getLogger("headgate.stores")

_LARGE: Final = 256_000
"""Bytes. Reading so much takes some milliseconds: what is larger is not read where an event loop waits for it."""
_PATIENCE: Final = 10.0
"""Seconds that a write is tried while the server cannot be reached, before it has failed."""
_SLOWEST: Final = 10.0
"""Seconds that one command may take: a group of entries may be large."""
_AT_ONCE: Final = 1000
"""Lines in one row, where it does not matter."""
_ROWS: Final = 50
"""Rows that are read with one command."""

_HOLDER: Final = f"""
SELECT journals.pid, journals.host,
       EXISTS (SELECT FROM {SCHEMA}.members WHERE id = member AND lease_until > clock_timestamp()) AS lives
FROM {SCHEMA}.journals WHERE id = $1
"""

# A number of 64 bits is shown in two halves. Only sessions of the same role can be ended without further rights.
_END_SESSION: Final = """
SELECT pg_terminate_backend(pid) FROM pg_locks JOIN pg_stat_activity USING (pid)
WHERE locktype = 'advisory' AND granted AND objsubid = 1 AND pid <> pg_backend_pid() AND usename = current_user
  AND ((classid::bigint << 32) | objid::bigint) = $1::bigint
  AND pg_locks.database = (SELECT oid FROM pg_database WHERE datname = current_database())
"""

_OWN: Final = f"""
INSERT INTO {SCHEMA}.journals AS known (id, pool_id, epoch, seq, size, member, host, pid, opened_at)
VALUES ($1, $2, 1, 0, 0, $3, $4, $5, $6)
ON CONFLICT (id) DO UPDATE SET epoch = known.epoch + 1, member = $3, host = $4, pid = $5, opened_at = $6
RETURNING epoch, seq, size
"""

_HELD: Final = f"""
WITH held AS (
    UPDATE {SCHEMA}.journals SET seq = $4, size = $5, member = $6
    WHERE id = $1 AND epoch = $2 AND seq BETWEEN $3 AND $4 RETURNING id
)"""

_APPEND: Final = f"""{_HELD}
INSERT INTO {SCHEMA}.chunks (journal, n, lines) SELECT id, $4, $7 FROM held
ON CONFLICT (journal, n) DO UPDATE SET lines = excluded.lines RETURNING n
"""

_REPLACE: Final = f"""{_HELD}, gone AS (
    DELETE FROM {SCHEMA}.chunks USING held WHERE journal = held.id AND n <= $3
), written AS (
    INSERT INTO {SCHEMA}.chunks (journal, n, lines)
    SELECT held.id, $3 + new.n, new.lines FROM held, unnest($7::bytea[]) WITH ORDINALITY AS new (lines, n)
    ON CONFLICT (journal, n) DO UPDATE SET lines = excluded.lines
)
SELECT id FROM held
"""

_LINES: Final = f"""
SELECT n, lines FROM {SCHEMA}.chunks WHERE journal = $1 AND n > $2 AND n <= $3 ORDER BY n LIMIT {_ROWS}
"""


class Journals:
    """The journals that one store has open, on one connection. Used in the thread of the store."""

    def __init__(self, transactions: Transactions, backend: PostgresBackend) -> None:
        self.backend: PostgresBackend = backend
        self.link: Link = Link("journals", backend.server, timeout=_SLOWEST)
        self._transactions = transactions
        self.turn: asyncio.Lock = asyncio.Lock()
        """Held by whoever uses the connection."""
        self.rows: WeakValueDictionary[bytes, Rows] = WeakValueDictionary()
        """Those that are open, by their id."""

    def wait(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Do this in the thread of the store, and wait for it here. The error of whatever goes wrong."""
        until = clock.now() + _PATIENCE

        async def lasting(backend: PostgresBackend) -> T:
            if backend is not self.backend:  # this is a forked child: the journal is its parent's
                raise PoolClosed("the journal belongs to another process", remedy="Make a new pool.")
            async with self.turn:
                return await backend.server.persist("journals", work, until=until)

        return self._transactions.call(lasting).result()


def open_journal(
    store: object, journals: Journals, pool_id: str, about: Mapping[str, Any], keep: int
) -> JsonLinesJournal:
    """Lock and read the journal of a pool, or make it. See `stores.port.Store.open`."""
    rows = Rows(store, journals, pool_id)
    writer = Writer(os.getpid(), socket.gethostname(), clock.wall())
    journals.wait(lambda: rows.own(writer))
    try:
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
        if bad := history.skipped + history.torn:
            _log.warning("%s: %d lines cannot be read and are passed over%s", rows.path, len(bad), damage(bad))
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

    def __init__(self, store: object, journals: Journals, pool_id: str) -> None:
        self._store = store  # as long as a journal is open, its store is in use
        self._journals = journals
        self._link = journals.link
        self._pool_id = pool_id.encode("utf-8", "surrogatepass")
        self._id = sha256(self._pool_id).digest()
        self._number = int.from_bytes(self._id[:8], "big", signed=True)
        self._locked_on = 0  # the connection on which the lock was taken
        self._epoch = 0
        self._last = 0
        self.path: Path = Path(f"{journals.backend.server.address.shown}/{pool_id}")
        """Where the journal is, for people."""
        self.size: int = 0
        """Bytes of all lines."""
        self.is_closed: bool = False

    # -- in any thread -------------------------------------------------------------------------------------------------

    def lines(self) -> Iterator[bytes]:
        """Yield all lines that are there now, each with its newline."""
        number, last = 0, self._last
        while True:
            found = self._wait(partial(self._link.ask_all, _LINES, self._id, number, last))
            if not found:
                return
            number = found[-1]["n"]
            for row in found:
                yield from io.BytesIO(row["lines"])

    def append(self, data: bytes) -> None:
        """Commit these lines, or raise OSError and leave the journal as it was."""
        size = self.size + len(data)
        self._wait(lambda: self._write(_APPEND, self._last + 1, size, data))
        self._last, self.size = self._last + 1, size

    def replace(self, lines: Iterable[bytes]) -> int:
        """Exchange the content for these lines in one step, or raise OSError; returns how many they were."""
        chunks: list[bytes] = []
        count, rest = 0, iter(lines)
        while some := list(islice(rest, _AT_ONCE)):
            chunks.append(b"".join(some))
            count += len(some)
        last, size = self._last + len(chunks), sum(map(len, chunks))
        self._wait(lambda: self._write(_REPLACE, last, size, chunks))
        self._last, self.size = last, size
        return count

    def close(self) -> None:
        """Give up the lock. Twice is fine."""
        if not self.is_closed:
            self.is_closed = True
            try:
                self._journals.wait(self._unlock)
            except HeadgateError:
                pass  # without a connection, or with a closed store, there is no lock

    def _wait(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        try:
            return self._journals.wait(work)
        except HeadgateError as error:
            text = error.message
        raise OSError(text)

    # -- in the thread of the store ------------------------------------------------------------------------------------

    async def own(self, writer: Writer) -> None:
        """Lock the journal, raise its epoch, and learn how much is there. StoreLocked if another has it."""
        open_here = self._journals.rows.get(self._id)
        if open_here is not None and not open_here.is_closed:
            raise StoreLocked(f"the journal {self.path} is in use by process {os.getpid()} on {socket.gethostname()}")
        if not await self._lock():
            raise await self._locked()
        member = await self._journals.backend.members.ensure(self._link)
        arguments = (self._id, self._pool_id, member, writer.host, writer.pid, writer.at)
        row = await self._link.ask(_OWN, *arguments)
        self._epoch, self._last, self.size = row["epoch"], row["seq"], row["size"]
        self._journals.rows[self._id] = self

    async def _lock(self) -> bool:
        """Take the lock of the server, unless this connection has it. Ends the session of a holder that is gone."""
        await self._link.connect()
        if self._locked_on == self._link.made:
            return True
        if not await self._try_lock():
            holder = await self._link.ask(_HOLDER, self._id)
            if holder is None or holder["lives"]:
                return False
            await self._link.ask(_END_SESSION, self._number)
            for _ in range(100):  # a session that was told to end does so soon, and nobody tells us when
                if await self._try_lock():
                    break
                await asyncio.sleep(0.01)
            else:
                return False
        self._locked_on = self._link.made
        return True

    async def _try_lock(self) -> bool:
        row = await self._link.ask("SELECT pg_try_advisory_lock($1) AS taken", self._number)
        return bool(row["taken"])

    async def _write(self, query: str, last: int, size: int, data: object) -> None:
        """Write as number `last`, if the journal is still ours. May be done twice."""
        if self._locked_on != self._link.made or not self._link.is_connected:
            await self._end_former_session()
        member = await self._journals.backend.members.ensure(self._link)
        row = await self._link.ask(query, self._id, self._epoch, self._last, last, size, member, data)
        if row is None:
            raise await self._taken()

    async def _end_former_session(self) -> None:
        """After a broken connection: take the lock again, which the former session may still hold on the server."""
        if await self._lock():
            return
        holder = await self._link.ask(f"SELECT epoch FROM {SCHEMA}.journals WHERE id = $1", self._id)
        if holder is None or holder["epoch"] != self._epoch:
            raise await self._taken()
        await self._link.ask(_END_SESSION, self._number)
        raise self._journals.backend.server.busy("the former session of this journal has not ended yet")

    async def _unlock(self) -> None:
        if self._journals.rows.get(self._id) is self:
            del self._journals.rows[self._id]
        if self._link.is_connected and self._locked_on == self._link.made:
            await self._link.ask("SELECT pg_advisory_unlock($1)", self._number)
        if not any(not rows.is_closed for rows in self._journals.rows.values()):
            self._link.drop()

    async def _locked(self) -> StoreLocked:
        holder = await self._link.ask(_HOLDER, self._id)
        who = f"process {holder['pid']} on {holder['host']}" if holder is not None else "a process that opens it now"
        remedy = "End the process named above, or use another pool id. A process that died is gone after its lease."
        return StoreLocked(f"the journal {self.path} is in use by {who}", remedy=remedy)

    async def _taken(self) -> OSError:
        holder = await self._link.ask(_HOLDER, self._id)
        by = f" by process {holder['pid']} on {holder['host']}" if holder is not None else ""
        return OSError(errno.ESTALE, f"the journal was opened again{by}", str(self.path))
