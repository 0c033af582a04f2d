"""The shared state of a `SqliteStore`: texts in two files, changed by steps.

Everything happens in the thread of the store. `transact` only queues a step; the thread takes all that are queued, and
runs those of one file in one transaction, because a transaction costs more than twenty steps. Each step gets the text
that the one before it left. A step that raises has changed nothing; if the transaction cannot be committed, each step
of it is tried once more alone, so that one text that does not fit on the disk fails alone.

The clock
---------
The wall clock can be set back while members run. The monotonic clock cannot, and is the same for all processes of one
boot. So `Seen.now` is the monotonic clock plus an offset, which the first member of this boot stores. The offset grows
when the wall clock has gone ahead of that by more than a second (the machine slept, or the clock was set); it never
shrinks. So nothing is written for a step that only asks for the time.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import math
import os
import sqlite3
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from functools import partial
from itertools import groupby, islice
from typing import Any, Final

from headgate.core.clock import clock
from headgate.core.kept_locks import KeptLocks
from headgate.core.shared_state import ClockOffset, Listener, Outcome, Seen, Step
from headgate.errors import HeadgateError, InvalidType, PoolClosed, StoreUnreachable
from headgate.stores.jsonl.writer import write_failed
from headgate.stores.shared.fork_guard import ForkGuard
from headgate.stores.shared.sqlite_file import SqliteFile, sql_value, text_of_sql
from headgate.stores.shared.sqlite_members import Members
from headgate.stores.shared.sqlite_place import Place
from headgate.stores.shared.store_thread import StoreThread

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

_CLOSING_SECONDS: Final = 10.0
"""How long `close` waits for steps that are queued. Longer only if a stopped process holds the lock of a file."""


_living: weakref.WeakSet[SqliteState] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """Let a program that forgot to close its stores still write what is queued, and leave no files of dead members."""
    for state in list(_living):
        state.close(ends=True)


class _Call:
    """One step that somebody asked for."""

    __slots__ = ("durable", "future", "has_begun", "key", "outcome", "step")

    def __init__(self, key: str, step: Step, durable: bool) -> None:
        self.key: str = key
        self.step: Step = step
        self.durable: bool = durable
        self.future: Future[Any] = Future()
        self.has_begun: bool = False
        self.outcome: Outcome | BaseException | None = None
        """What the step returned or raised, in a transaction that may still fail."""

    def begin(self) -> bool:
        """Let nobody cancel it any more; False if somebody has, or if `close` has given up waiting for it."""
        if self.future.done():
            return False
        if not self.has_begun:
            self.has_begun = self.future.set_running_or_notify_cancel()
        return self.has_begun

    def fail(self, error: BaseException) -> None:
        """Tell that it failed."""
        if self.begin():
            self.tell(error)

    def tell(self, outcome: Outcome | BaseException) -> None:
        """Tell how it ended, once."""
        try:
            if isinstance(outcome, Outcome):
                self.future.set_result(outcome.reply)
            else:
                self.future.set_exception(outcome)
        except InvalidStateError:
            pass  # `close` has given up waiting for it


class SqliteState:
    """Implements `core.shared_state.SharedState` for one process."""

    def __init__(self, place: Callable[[], Place], heartbeat: float) -> None:
        """`place` is called when the files are first needed: it may read what this machine is."""
        self._find_place = place
        self._heartbeat = heartbeat
        self._listeners: dict[str, tuple[tuple[Listener], ...]] = {}
        self._kept_locks: tuple[weakref.ref[KeptLocks], ...] = ()
        self._lock = threading.Lock()
        self._calls: list[_Call] = []
        self._is_posted = False
        self._running: list[_Call] = []
        self.is_closed: bool = False
        self._guard = ForkGuard(self._forked)
        self._thread = StoreThread("headgate-sqlite")
        self._place: Place | None = None
        self._opened: _Opened | None = None
        self._is_beating = False
        _living.add(self)

    @property
    def deadline(self) -> float:
        """Infinite: a member lives exactly as long as its process."""
        return math.inf

    # -- from any thread -----------------------------------------------------------------------------------------------

    def transact(self, key: str, step: Step, *, durable: bool = False) -> Future[Any]:
        """Queue a step."""
        if not isinstance(key, str):
            raise InvalidType(f"key must be a string, got {type(key).__name__}")
        call = _Call(key, step, durable)
        with self._lock:
            if self.is_closed:
                call.fail(self._closed())
                return call.future
            self._calls.append(call)
            is_first, self._is_posted = not self._is_posted, True
        if is_first:
            self._post(self._run_calls, self._refuse_calls)
        return call.future

    def connect(self, timeout: float) -> None:
        """Open everything, and wait for that."""
        answer: Future[None] = Future()

        def answered() -> None:
            if answer.set_running_or_notify_cancel():
                try:
                    self._open()
                except BaseException as error:
                    answer.set_exception(error)
                else:
                    answer.set_result(None)

        if self.is_closed:
            raise self._closed()
        self._post(answered, answer.set_exception)
        try:
            answer.result(timeout)
        except TimeoutError:
            answer.cancel()
            raise StoreUnreachable(
                f"{self._name()} did not answer within {timeout:g} s: another process holds its lock",
                remedy="Look for a process that is stopped (SIGSTOP, a debugger) while it uses this file, and end it.",
            ) from None

    def listen(self, key: str, listener: Listener) -> Callable[[], None]:
        """Tell this listener what happens to a key, from now on."""
        entry = (listener,)  # the same listener may be there twice
        with self._lock:
            self._listeners[key] = (*self._listeners.get(key, ()), entry)

        def stop() -> None:
            with self._lock:
                left = tuple(one for one in self._listeners.pop(key, ()) if one is not entry)
                if left:
                    self._listeners[key] = left

        return stop

    def share_lock(self, locks: KeptLocks) -> None:
        """Count as alive until those who keep these locks have ended too."""
        with self._lock:
            others = [one for one in self._kept_locks if one() not in (None, locks)]
            self._kept_locks = (*others, weakref.ref(locks))

        def share() -> None:
            if self._opened is not None:
                self._opened.members.share_lock()

        self._post(share, lambda _: None)

    def close(self, *, ends: bool = False) -> None:
        """Run what is queued, and be gone. `ends` says that the program ends."""
        with self._lock:
            self.is_closed = True
        if not self._thread.close(partial(self._shut, ends), _CLOSING_SECONDS):
            for call in list(self._running):
                call.fail(self._closed())
            self._refuse_calls(self._closed())

    def stop(self) -> None:
        """Do the same without waiting: for a store that was forgotten, which the collector may find anywhere."""
        self.is_closed = True
        self._thread.close(self._shut, 0.0)

    def _post(self, callback: Callable[[], None], fail: Callable[[BaseException], None]) -> None:
        try:
            self._thread.post(callback)
        except PoolClosed as error:
            fail(error)

    def _refuse_calls(self, error: BaseException) -> None:
        with self._lock:
            calls, self._calls = self._calls, []
            self._is_posted = False
        for call in calls:
            call.fail(_again(error))

    def _name(self) -> str:
        return "the store" if self._place is None else str(self._place.durable)

    def _closed(self) -> PoolClosed:
        return PoolClosed(f"{self._name()} is closed", remedy="Make a new store.")

    def _forked(self) -> None:
        """In a forked child: begin anew. Steps that the parent queued are the parent's; listeners stay."""
        self._lock = threading.Lock()
        self._calls, self._running = [], []
        self._is_posted = self._is_beating = False
        self._opened = None

    # -- in the thread of the store ------------------------------------------------------------------------------------

    def _open(self) -> _Opened:
        if self._opened is not None:
            return self._opened
        if self._place is None:
            self._place = self._find_place()
        members = Members(self._place.members, self._heartbeat, self._woken, self._lock_holders)
        opened = _Opened(self._place, members)
        try:
            opened.open(asyncio.get_running_loop())
        except BaseException as error:
            opened.close()
            if isinstance(error, OSError):
                raise write_failed(self._place.durable, error) from error
            raise
        self._opened = opened
        if not self._is_beating:
            self._is_beating = True
            asyncio.get_running_loop().call_later(self._heartbeat, self._beat)
        return opened

    def _run_calls(self) -> None:
        with self._lock:
            self._running, self._calls = self._calls, []
            self._is_posted = False
        calls = iter(self._running)
        try:
            opened = self._open()
        except BaseException as error:
            for call in calls:
                call.fail(_again(error))
            return
        for durable, some in groupby(calls, lambda call: call.durable):
            while group := list(islice(some, _AT_ONCE)):
                self._run(opened, group, durable)
        self._running = []

    def _run(self, opened: _Opened, calls: list[_Call], durable: bool) -> None:
        """Run steps in one transaction, then tell everybody."""
        try:
            opened.run(calls, durable)
        except BaseException as error:
            if len(calls) == 1 or isinstance(error, StoreUnreachable):
                for call in calls:
                    call.fail(_again(error))
            else:
                for call in calls:
                    self._run(opened, [call], durable)
            return
        for call in calls:
            if isinstance(call.outcome, Outcome) and call.outcome.wakes:
                opened.members.wake(call.outcome.wakes, call.key)
        for call in calls:
            outcome = call.outcome
            if outcome is not None:
                call.tell(outcome)
            if isinstance(outcome, Outcome) and opened.members.id in outcome.wakes:
                self._woken(call.key)

    def _woken(self, key: str | None) -> None:
        self._tell(key, lambda listener: listener.woken())

    def _beat(self) -> None:
        """Look at who is gone and let all listeners look, whatever may have been lost meanwhile."""
        if self.is_closed:  # in the turn of the loop that `_shut` ends: it would take part again, and never leave
            return
        asyncio.get_running_loop().call_later(self._heartbeat, self._beat)
        try:
            self._look()
        except Exception as error:
            cause = error
            self._tell(None, lambda listener: listener.unreachable(cause))
        else:
            self._woken(None)

    def _look(self) -> None:
        opened = self._open()  # again, if that has failed last time
        if opened.members.is_still_there():
            opened.members.look()
            opened.clock.look()
        else:  # somebody has deleted its lock, so to all others it is gone: take part again as another
            self._opened = None
            opened.close()
            self._tell(None, lambda listener: listener.lost())
            self._open()

    def _tell(self, key: str | None, news: Callable[[Listener], None]) -> None:
        """Tell the listeners of a key, or all."""
        groups = list(self._listeners.values()) if key is None else [self._listeners.get(key, ())]
        for (listener,) in [entry for group in groups for entry in group]:
            try:
                news(listener)
            except Exception:  # against the contract, and the others must hear all the same
                _log.exception("a listener of %s failed", self._name())

    def _lock_holders(self) -> list[KeptLocks]:
        return [locks for one in self._kept_locks if (locks := one()) is not None]

    def _shut(self, ends: bool = False) -> None:
        if self._calls:
            self._run_calls()
        opened, self._opened = self._opened, None
        if opened is not None:
            opened.close(ends=ends)


class _Opened:
    """The files and the membership of a process that has opened its store."""

    def __init__(self, place: Place, members: Members) -> None:
        self._place = place
        self._durable = SqliteFile(place.durable, [TEXTS, _EXPIRING], synced=True)
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

    def run(self, calls: list[_Call], durable: bool) -> None:
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


def _run_steps(database: sqlite3.Connection, calls: list[_Call], texts: dict[str, str | None], seen: Seen) -> bool:
    """Run steps and write what they changed; returns whether there was anything. `texts` are those that were read."""
    changed: dict[str, Outcome] = {}
    for call in calls:
        call.outcome = None
        if not call.begin():
            continue
        key = call.key
        if key not in texts:
            texts[key] = _read(database, key)
        call.outcome = outcome = _ran(call.step, texts[key], seen)
        if isinstance(outcome, Outcome) and outcome.state is not None and outcome.state != texts[key]:
            texts[key], changed[key] = outcome.state, outcome
    for key, outcome in changed.items():
        assert outcome.state is not None, "it was changed"
        database.execute(_WRITE, (sql_value(key), sql_value(outcome.state), outcome.expires))
    return bool(changed)


def _ran(step: Step, text: str | None, seen: Seen) -> Outcome | BaseException:
    try:
        outcome: object = step(text, seen)
    except StopIteration as error:  # a future refuses to carry it to an event loop
        mistake = RuntimeError("the step raised StopIteration")
        mistake.__cause__ = error
        return mistake
    except BaseException as error:
        return error
    if not isinstance(outcome, Outcome):
        return InvalidType(f"a step must return an Outcome, got {type(outcome).__name__}")
    if not isinstance(outcome.state, str | None):
        return InvalidType(f"the state of an Outcome must be a string or None, got {type(outcome.state).__name__}")
    if not isinstance(outcome.expires, float | int | None):
        return InvalidType(f"the expires of an Outcome must be a number or None, got {type(outcome.expires).__name__}")
    if outcome.wakes and not all(isinstance(member, str) for member in outcome.wakes):
        return InvalidType("the wakes of an Outcome must be ids of members")
    return outcome


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


def _again(error: BaseException) -> BaseException:
    """An error for one of several who are told the same: each gets its own, because it may be raised."""
    if not isinstance(error, HeadgateError):
        return error
    copy = type(error)(*error.args, remedy=error.remedy)
    copy.__cause__ = error.__cause__
    return copy
