"""Running steps in a PostgreSQL database: read, run, write if nobody else has written meanwhile.

A transaction is two statements, each committed by itself: one reads the text with its version, the time and all members
from one snapshot; the other writes if the version is still that, and if this member's lease still stands. Nothing is
locked between them, so a process that is stopped there holds nobody up. When another was quicker, the step is run again
with what that one wrote. After some defeats the row is locked first, in a transaction of several statements: locks are
granted in the order in which they are asked for, so nobody starves. The price is four round trips instead of two.

Steps for one key that wait together are run together, in one transaction.

When a connection breaks, or an answer does not come, nobody knows whether the statement was committed. The steps are
run again on a new connection: they are pure, and they know by the sequence numbers in their text what they did before.
The lost statement cannot come after them: its version is no longer the current one. (If the steps now leave the text
as it is, it is written all the same, so that there is a new version.)
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from hashlib import sha256
from threading import Lock
from typing import Any, Final
from urllib.parse import quote

from headgate.core.clock import clock
from headgate.core.redaction import log_exception
from headgate.core.shared_state import ClockOffset, Outcome, Seen, Step
from headgate.errors import HeadgateError, PoolClosed, StoreWriteFailed
from headgate.stores.shared.postgres_errors import SCHEMA, Trouble, Verdict
from headgate.stores.shared.postgres_link import Link, Server
from headgate.stores.shared.postgres_members import REAP, Membership, channel_of, lease_of
from headgate.stores.shared.postgres_upkeep import Upkeep

_READ: Final = f"""
SELECT texts.version, texts.state, texts.expires,
       greatest(texts.at, extract(epoch FROM clock_timestamp())::float8) AS now,
       members.ids, members.formers, members.first_end <= clock_timestamp() AS is_any_over,
       (SELECT extract(epoch FROM clock_timestamp() - max(at))::float8 FROM {SCHEMA}.members_since) AS complete_for
FROM (SELECT array_agg(id) AS ids, array_agg(former) AS formers, min(lease_until) AS first_end FROM {SCHEMA}.members)
     AS members
LEFT JOIN {SCHEMA}.texts ON texts.key = $1
"""

_MEMBERS_BEGIN: Final = f"INSERT INTO {SCHEMA}.members_since VALUES (clock_timestamp())"

_MAY_WRITE: Final = f"EXISTS (SELECT FROM {SCHEMA}.members WHERE id = $5 AND lease_until > clock_timestamp())"

_UPDATE: Final = f"""
WITH written AS (
    UPDATE {SCHEMA}.texts SET version = version + 1, state = $3, at = $4, expires = $8
    WHERE key = $1 AND version = $2 AND {_MAY_WRITE} RETURNING version
)
SELECT version,
       set_config('synchronous_commit', CASE WHEN $7 THEN current_setting('synchronous_commit') ELSE 'off' END, true),
       (SELECT count(pg_notify(channel, $1)) FROM unnest($6::text[]) AS channel)
FROM written
"""

_INSERT: Final = _UPDATE.replace(
    f"""UPDATE {SCHEMA}.texts SET version = version + 1, state = $3, at = $4, expires = $8
    WHERE key = $1 AND version = $2 AND {_MAY_WRITE} RETURNING version""",
    f"""INSERT INTO {SCHEMA}.texts (key, version, state, at, expires) SELECT $1, $2::bigint + 1, $3, $4, $8::float8
    WHERE {_MAY_WRITE} ON CONFLICT (key) DO NOTHING RETURNING version""",
)

# A text is deleted long after it was last written, so no statement is under way that knows its version.
_SWEEP: Final = f"""
DELETE FROM {SCHEMA}.texts WHERE key IN (
    SELECT key FROM {SCHEMA}.texts WHERE expires < $1 ORDER BY expires LIMIT 128 FOR UPDATE SKIP LOCKED
)
"""

_NOTIFY: Final = "SELECT count(pg_notify(channel, $1)) FROM unnest($2::text[]) AS channel"

# A stopped process must not hold the lock for ever: the server ends its session.
_LOCK: Final = f"""
BEGIN; SET LOCAL idle_in_transaction_session_timeout = 2000; SELECT FROM {SCHEMA}.texts WHERE key = '%s' FOR UPDATE
"""

_SWEEP_AFTER: Final = 64
"""After how many durable texts expired ones are deleted."""

_DEFEATS: Final = 5
"""How often others may be quicker before the row is locked."""

_SOON: Final = 0.02
"""Seconds after the end of a lease at which it is looked for."""

_TOGETHER: Final = 100
_LONG: Final = 800


def stored_key(key: str) -> str:
    """Return a key as it is stored: ASCII without quotes, and short enough for an index and a notification."""
    text = quote(key, safe="/:=,@+ ", errors="surrogatepass")
    return text if len(text) <= _LONG else f"{text[:_LONG]}~{sha256(text.encode()).hexdigest()}"


@dataclass(slots=True)
class Call:
    """One step that somebody wants to be run."""

    key: str
    """As it is stored."""
    step: Step
    durable: bool
    future: Future[Any] = field(default_factory=Future)


class Batch:
    """Steps for one key that are run in one transaction."""

    def __init__(self, calls: list[Call]) -> None:
        self.calls: list[Call] = calls
        self.key: str = calls[0].key
        self.durable: bool = calls[0].durable
        self.state: bytes | None = None
        """The new text; None: it stays as it is."""
        self.expires: float | None = None
        """When the new text may be deleted."""
        self.wakes: set[str] = set()
        self.is_doubtful: bool = False
        """Was a write sent whose answer never came? The server may still be about to do it."""
        self._replies: list[tuple[Any, BaseException | None]] = []

    def run(self, text: str | None, seen: Seen) -> None:
        """Run all steps, one upon the other. One that raises changes nothing."""
        self._replies, self.wakes, self.state, self.expires = [], set(), None, None
        for call in self.calls:
            try:
                outcome: Outcome = call.step(text, seen)
                if outcome.state is not None and outcome.state != text:
                    self.state, text = outcome.state.encode("utf-8", "surrogatepass"), outcome.state
                    self.expires = outcome.expires
                self.wakes.update(outcome.wakes)
                self._replies.append((outcome.reply, None))
            except BaseException as error:
                self._replies.append((None, error))

    def succeed(self) -> None:
        """Give everybody their replies."""
        for call, (reply, error) in zip(self.calls, self._replies, strict=True):
            if error is not None:
                call.future.set_exception(error)
            else:
                call.future.set_result(reply)

    def fail(self, error: HeadgateError) -> None:
        """Tell everybody that nothing was committed."""
        for call in self.calls:
            # An exception of one's own, because each may be raised in another thread.
            call.future.set_exception(type(error)(error.message, remedy=error.remedy))


class Exchange:
    """Runs the steps of one store, in their order, on a connection of its own."""

    def __init__(self, server: Server, members: Membership, idle: float, upkeep: Upkeep) -> None:
        self._server = server
        self._upkeep = upkeep
        self._members = members
        self.link: Link = Link("exchange", server)
        """The connection on which steps are run."""
        self._idle = idle  # after so many seconds without a step the connection is tried
        self._lock = Lock()
        self._calls: deque[Call] = deque()
        self._arrived = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._is_waiting = False
        self._is_closed = False
        self._newest = 0.0
        self._grace: asyncio.TimerHandle | None = None  # until a member that a crash made unknown must be gone
        self._unswept = 0  # texts that were written since expired ones were last deleted

    # -- on any thread -------------------------------------------------------------------------------------------------

    def put(self, call: Call) -> None:
        """Run this after all that were put before."""
        with self._lock:
            if not self._is_closed:
                self._calls.append(call)
                if self._is_waiting:
                    self._is_waiting = False
                    self._loop.call_soon_threadsafe(self._arrived.set)
                return
        call.future.set_exception(_closed())

    # -- on the thread of the store ------------------------------------------------------------------------------------

    async def serve(self) -> None:
        """Run steps until the store is closed."""
        while not self._server.closing.is_set():
            batch = self._next()
            if batch is not None:
                await self._commit(batch)
                if self._unswept >= _SWEEP_AFTER:
                    await self._sweep()
            elif not await self._wait():
                # A connection that nobody uses may have been cut by the network, and nobody would tell us.
                await self._try()

    def close(self) -> None:
        """Refuse what has not been run, and what comes."""
        with self._lock:
            self._is_closed = True
            left = list(self._calls)
            self._calls.clear()
        for call in left:
            if call.future.set_running_or_notify_cancel():
                call.future.set_exception(_closed())
        if self._grace is not None:
            self._grace.cancel()
        self.link.drop()

    def stir(self) -> None:
        """Let `serve` look whether the store is being closed."""
        self._arrived.set()

    async def _sweep(self) -> None:
        """Delete texts that have expired: more than were written since the last time, so that none are left over."""
        self._unswept = 0
        try:
            await self.link.ask(_SWEEP, self._newest)
        except Trouble:
            pass  # others come soon, and the next who wants a step to be run hears of it

    async def _try(self) -> None:
        try:
            await self._server.persist("exchange", lambda: self.link.ask("SELECT 1"))
        except HeadgateError:
            pass  # whoever wants a step to be run hears of it

    async def _wait(self) -> bool:
        """Wait for a step, or for the time after which the connection is tried; returns whether one came."""
        with self._lock:
            if self._calls:
                return True
            self._arrived.clear()
            self._is_waiting = True
        try:
            async with asyncio.timeout(self._idle):
                await self._arrived.wait()
        except TimeoutError:
            return False
        return True

    def _next(self) -> Batch | None:
        """The first steps that wait, as far as they are for one key."""
        found: list[Call] = []
        with self._lock:
            while self._calls and len(found) < _TOGETHER:
                call = self._calls[0]
                if found and (call.key, call.durable) != (found[0].key, found[0].durable):
                    break
                self._calls.popleft()
                if call.future.set_running_or_notify_cancel():
                    found.append(call)
        return Batch(found) if found else None

    async def _commit(self, batch: Batch) -> None:
        defeats = 0

        async def until_committed() -> None:
            nonlocal defeats
            while not await (self._once(batch) if defeats < _DEFEATS else self._locked(batch)):
                defeats += 1

        try:
            await self._server.persist("exchange", until_committed)
        except HeadgateError as error:
            batch.fail(_closed() if self._server.closing.is_set() else error)
        except asyncio.CancelledError:  # the store is closed, and the server did not answer in time
            batch.fail(_closed())
            raise
        except Exception as error:  # a defect: whoever waits must hear of it, and the others must go on
            log_exception("headgate.stores", "a defect in PostgresStore: a transaction failed")
            batch.fail(StoreWriteFailed(f"the transaction failed: {type(error).__name__}: {error}"))
        else:
            batch.succeed()

    async def _locked(self, batch: Batch) -> bool:
        """The same as `_once` with the row locked before."""
        await self.link.tell(_LOCK % batch.key)
        try:
            is_done = await self._once(batch)
        except BaseException:
            if self.link.is_connected:
                await self.link.tell("ROLLBACK")
            raise
        await self.link.tell("COMMIT")
        return is_done

    async def _once(self, batch: Batch) -> bool:
        """Read, run and write; returns False when it must be done again."""
        me = await self._members.ensure(self.link)
        before = clock.now()
        row = await self.link.ask(_READ, batch.key)
        after = clock.now()
        if row["complete_for"] is None:  # the server has crashed. Two who find that write two rows: the later counts
            await self.link.ask(_MEMBERS_BEGIN)
            return False
        ids = frozenset(row["ids"] or ())
        if me not in ids:
            self._members.lose(me)
            return False
        if row["is_any_over"]:
            await self.link.ask(REAP)
            return False
        # The clock of the server may be set back. Its time is at least that of the last write, and our last one.
        self._newest = now = max(self._newest, row["now"])
        ahead = ClockOffset.read_between(before, now, after)
        batch.run(self._text(batch.key, row["state"]), Seen(now, me, self._asked_who_is_gone(row), ahead))
        if batch.is_doubtful and batch.state is None:
            batch.state, batch.expires = row["state"], row["expires"]
        channels = [channel_of(member) for member in batch.wakes if member in ids]
        if batch.state is not None:
            return await self._write(batch, row["version"], now, me, channels)
        if channels:
            await self.link.ask(_NOTIFY, batch.key, channels)
        return True

    def _asked_who_is_gone(self, row: Any) -> Callable[[str], bool]:
        """What tells a step who is gone, by the snapshot that a row is of."""
        ids, formers, complete_for = frozenset(row["ids"]), frozenset(row["formers"]), row["complete_for"]

        def is_gone(member: str) -> bool:
            if member in ids:
                return False
            left = lease_of(member) - complete_for
            if left <= 0 or member in formers:
                return True
            if self._grace is None:  # nobody will tell that its lease is over
                self._grace = self._loop.call_later(left + _SOON, self._grace_is_over)
            return False

        return is_gone

    def _grace_is_over(self) -> None:
        self._grace = None
        self._server.listeners.wake_all()

    async def _write(self, batch: Batch, version: int | None, now: float, me: str, channels: Iterable[str]) -> bool:
        query, known = (_INSERT, 0) if version is None else (_UPDATE, version)
        try:
            row = await self.link.ask(
                query, batch.key, known, batch.state, now, me, channels, batch.durable, batch.expires
            )
        except Trouble as trouble:
            batch.is_doubtful |= trouble.verdict is Verdict.AGAIN
            raise
        if row is None:
            return False
        self._upkeep.changed(row["version"])
        self._unswept += batch.durable
        return True

    def _text(self, key: str, state: bytes | None) -> str | None:
        if state is None:
            return None
        try:
            return state.decode("utf-8", "surrogatepass")
        except UnicodeDecodeError:
            pass
        place = f"{SCHEMA}.texts of {self._server.address.shown}"
        remedy = "Delete that row if somebody else wrote it."
        raise Trouble(
            Verdict.FAILED, StoreWriteFailed(f"the row {key!r} in {place} is not text of headgate", remedy=remedy)
        )


def _closed() -> PoolClosed:
    return PoolClosed("the store is closed", remedy="Make a new store.")
