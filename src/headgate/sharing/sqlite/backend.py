"""The SQLite backend: texts in two files, changed in transactions; members who are alive exactly as long as they live.

One transaction runs up to 64 steps of one file. Everything here is synchronous: it runs on the thread of the store.

The clock
---------
The wall clock can be set back while members run. The monotonic clock cannot, and is the same for all processes of one
boot. So `Seen.now` is the monotonic clock plus an offset, which the first member of this boot stores. The offset grows
when the wall clock has gone ahead of that by more than a second (the machine slept, or the clock was set); it never
shrinks. So nothing is written for a step that only asks for the time.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import sqlite3
from collections.abc import Callable, Sequence
from typing import Final

from headgate.core.clock import clock
from headgate.core.files import write_failed
from headgate.core.kept_locks import KeptLocks
from headgate.errors import StoreUnreachable
from headgate.sharing.sqlite.file import SqliteFile, sql_value, text_of_sql
from headgate.sharing.sqlite.members import Members
from headgate.sharing.sqlite.place import Place
from headgate.sharing.states import ClockOffset, Outcome, Seen
from headgate.sharing.transactions import Call, Host

_log = logging.getLogger("headgate.stores")

TEXTS: Final = "TABLE IF NOT EXISTS texts (key PRIMARY KEY, text, expires REAL) WITHOUT ROWID"
_EXPIRING: Final = "INDEX IF NOT EXISTS expiring ON texts (expires) WHERE expires IS NOT NULL"
_CLOCKS: Final = "TABLE IF NOT EXISTS clocks (name PRIMARY KEY, ahead REAL) WITHOUT ROWID"
_LOST: Final = "TABLE IF NOT EXISTS lost (member PRIMARY KEY, at REAL) WITHOUT ROWID"

_READ_FIRST: Final = "SELECT (SELECT text FROM texts WHERE key = ?), EXISTS (SELECT 1 FROM lost)"

# Not INSERT OR REPLACE, which deletes the row first: for a text of 3 KB, which has a page of its own, a quarter slower.
_WRITE: Final = """
INSERT INTO texts VALUES (?, ?, ?) ON CONFLICT (key) DO UPDATE SET text = excluded.text, expires = excluded.expires
"""

# Some at a time: other processes wait meanwhile. More than are written, so that none are left over.
_SWEEP: Final = "DELETE FROM texts WHERE key IN (SELECT key FROM texts WHERE expires < ? ORDER BY expires LIMIT 64)"

_AT_ONCE: Final = 64
"""Steps in one transaction: other processes wait meanwhile."""

_FAR: Final = 366 * 86400.0
"""Seconds. A stored time that is further ahead of the wall clock is garbage, and not a clock that was set back."""

_HEARD_SECONDS: Final = 10.0
"""How long members that lived when the file of texts was removed are waited for: two heartbeats of the usual length."""


class SqliteBackend:
    """Implements `sharing.transactions.Backend`."""

    @property
    def deadline(self) -> float:
        """Infinite: a member lives exactly as long as its process."""
        return math.inf

    def __init__(
        self, place: Place, heartbeat: float, host: Host, kept_locks: Callable[[], Sequence[KeptLocks]] = tuple
    ) -> None:
        """`kept_locks` tells who is to hold the lock of this member too."""
        self._place = place
        self._heartbeat = heartbeat
        self._host = host
        self._kept_locks = kept_locks
        self._opened: _Opened | None = None
        self._looks = 0

    def together(self, calls: Sequence[Call]) -> int:
        """As many as are for the same file."""
        durable = calls[0].durable
        most = min(len(calls), _AT_ONCE)
        return next((count for count in range(1, most) if calls[count].durable is not durable), most)

    async def commit(self, calls: Sequence[Call]) -> None:
        """Run these calls, then wake whom they name."""
        opened = self._open()
        opened.run(calls, durable=calls[0].durable)
        members = opened.members
        for call in calls:
            if wakes := call.wakes:
                members.wake(wakes, call.key)
                if members.id in wakes:  # after it was told what it asked
                    asyncio.get_running_loop().call_soon(self._host.listeners.wake, call.key)

    async def look(self) -> float:
        """Look at who is gone and let all listeners look, whatever may have been lost meanwhile."""
        self._looks += 1
        if self._looks == 1:
            return self._heartbeat  # it has just joined, or is about to
        opened = self._open()  # again, if that has failed last time
        if opened.members.is_still_there():
            opened.members.look()
            opened.clock.look()
        else:  # somebody has deleted its lock, so to all others it is gone: take part again as another
            self._opened = None
            opened.close()
            self._host.listeners.lost()
            self._open()
        self._host.listeners.wake(None)
        return self._heartbeat

    async def leave(self, *, ends: bool) -> None:
        """Leave, and close both files."""
        opened, self._opened = self._opened, None
        if opened is not None:
            opened.close(ends=ends)

    def share_lock(self) -> None:
        """Have all who are to hold the lock of this member hold it."""
        if self._opened is not None:
            self._opened.members.share_lock()

    def silence(self, timeout: float) -> StoreUnreachable:
        """The error for a file whose lock another process holds."""
        return StoreUnreachable(
            f"{self._place.durable} did not answer within {timeout:g} s: another process holds its lock",
            remedy="Look for a process that is stopped (SIGSTOP, a debugger) while it uses this file, and end it.",
        )

    def _open(self) -> _Opened:
        if self._opened is not None:
            return self._opened
        members = Members(self._place.members, self._heartbeat, self._host.listeners.wake, self._kept_locks)
        opened = _Opened(self._place, members)
        try:
            opened.open(asyncio.get_running_loop())
        except BaseException as error:
            opened.close()
            if isinstance(error, OSError):
                raise write_failed(self._place.durable, error) from error
            raise
        self._opened = opened
        return opened


class _Opened:
    """The files and the membership of a process that has opened its store."""

    def __init__(self, place: Place, members: Members) -> None:
        self._place = place
        self._durable = SqliteFile(place.durable, [TEXTS, _EXPIRING], synced=True, made=self._made_durable)
        self._admission = SqliteFile(
            place.admission, [TEXTS, _CLOCKS, _LOST], synced=not place.is_boot_known, made=self._made
        )
        self.members: Members = members
        self.clock: _Clock = _Clock(self._admission)

    def open(self, loop: asyncio.AbstractEventLoop) -> None:
        """Make or open both files, and join."""
        self._place.check()
        with self._durable.transaction():
            pass
        self._place.remove_other_boots()
        self.clock.look()
        self.members.join(loop)

    def close(self, *, ends: bool = False) -> None:
        """Leave, and close both files."""
        try:
            self.members.leave(ends=ends)
        finally:
            try:
                self._durable.close()
            finally:
                self._admission.close()

    def run(self, calls: Sequence[Call], *, durable: bool) -> None:
        """Run these steps in one transaction. Errors of headgate if it could not be committed."""
        if self.clock.is_behind():
            self.clock.look()
        file = self._durable if durable else self._admission
        with file.transaction() as database:
            texts: dict[str, str | None] = {}
            unheard: Sequence[str] = ()
            if not durable and _read_first(database, calls[0].key, texts):
                unheard = self._unheard_members(database)
            seen = Seen(self.clock.now(), self.members.id, self.members.is_gone, self.clock.offset, unheard)
            if _run_steps(database, calls, texts, seen) and durable:
                database.execute(_SWEEP, (seen.now,))

    def _made_durable(self, database: sqlite3.Connection) -> None:
        """Warn of a new file if processes live that used the one before: somebody has removed it."""
        if living := self.members.living():
            what = "was removed while %d processes use it: the idempotency keys and journals in it are forgotten"
            _log.warning(f"%s {what}", self._durable.path, len(living))

    def _made(self, database: sqlite3.Connection) -> None:
        """Note in a new file for texts which members live already: somebody has removed the one that they used."""
        living = self.members.living()
        if living:
            what = "was removed while %d processes use it: no task starts until each of them has said what it runs"
            _log.warning(f"%s {what}", self._admission.path, len(living))
            database.executemany("INSERT INTO lost VALUES (?, ?)", [(member, clock.wall()) for member in living])

    def _unheard_members(self, database: sqlite3.Connection) -> list[str]:
        """Those that `_made` noted a short time ago."""
        found = database.execute("SELECT member, at FROM lost").fetchall()
        recent = [one for one, at in found if isinstance(at, float) and abs(clock.wall() - at) < _HEARD_SECONDS]
        if not recent:
            database.execute("DELETE FROM lost")
        return [text_of_sql(member) for member in recent]


def _read_first(database: sqlite3.Connection, key: str, texts: dict[str, str | None]) -> bool:
    """Read the text of the first step; returns whether any members are noted in the table `lost`.

    That is asked every time, because a file that was emptied is still the same. One statement for both: a transaction
    is a hot path (benchmarks/shared.py).
    """
    text, is_any_lost = database.execute(_READ_FIRST, (sql_value(key),)).fetchone()
    texts[key] = None if text is None else text_of_sql(text)
    return bool(is_any_lost)


def _run_steps(database: sqlite3.Connection, calls: Sequence[Call], texts: dict[str, str | None], seen: Seen) -> bool:
    """Run steps and write what they changed; returns whether there was anything. `texts` are those that were read."""
    changed: dict[str, Outcome] = {}
    for call in calls:
        key = call.key
        if key not in texts:
            texts[key] = _read(database, key)
        if (outcome := call.run(texts[key], seen)) is not None:
            texts[key], changed[key] = outcome.state, outcome
    for key, outcome in changed.items():
        assert outcome.state is not None, "it was changed"
        database.execute(_WRITE, (sql_value(key), sql_value(outcome.state), outcome.expires))
    return bool(changed)


def _read(database: sqlite3.Connection, key: str) -> str | None:
    row = database.execute("SELECT text FROM texts WHERE key = ?", (sql_value(key),)).fetchone()
    return None if row is None or row[0] is None else text_of_sql(row[0])


class _Clock:
    """The clock of all members: see the top of this file."""

    def __init__(self, file: SqliteFile) -> None:
        self._file = file
        self.ahead: float = -math.inf
        """How far it is ahead of the monotonic clock."""
        self._name = _clock_name()

    @property
    def offset(self) -> ClockOffset:
        """The same, as steps are told it: it is known exactly."""
        return ClockOffset(self.ahead, self.ahead)

    def now(self) -> float:
        """Unix seconds, the same for all members."""
        return clock.now() + self.ahead

    def is_behind(self) -> bool:
        """Has the wall clock gone ahead?"""
        return clock.wall() - clock.now() > self.ahead + 1.0

    def look(self) -> None:
        """Learn how far others have set it ahead, and set it ahead if that is not enough."""
        with self._file.transaction() as database:
            row = database.execute("SELECT ahead FROM clocks WHERE name = ?", (self._name,)).fetchone()
            ahead = clock.wall() - clock.now()
            found = row[0] if row is not None and isinstance(row[0], float) else -math.inf
            if found < ahead + _FAR:
                self.ahead = max(self.ahead, found)
            if ahead > self.ahead + 1.0:
                self.ahead = ahead
                database.execute("INSERT OR REPLACE INTO clocks VALUES (?, ?)", (self._name, self.ahead))


def _clock_name() -> str:
    """What names the monotonic clock of this process: containers may have clocks of their own."""
    try:
        return os.readlink("/proc/self/ns/time")
    except OSError:
        return "monotonic"
