"""The PostgreSQL backend: read, run the steps, write if nobody else has written meanwhile.

A transaction is two statements, each committed by itself: one reads the text with its version, the time and all members
from one snapshot; the other writes if the version is still that, and if this member's lease still stands. Nothing is
locked between them, so a process that is stopped there holds nobody up. When another was quicker, the step is run again
with what that one wrote. After some defeats the row is locked first, in a transaction of several statements: locks are
granted in the order in which they are asked for, so nobody starves. The price is four round trips instead of two.

When a connection breaks, or an answer does not come, nobody knows whether the statement was committed. The steps are
run again on a new connection: they are pure, and they know by the sequence numbers in their text what they did before.
The lost statement cannot come after them: its version is no longer the current one. (If the steps now leave the text
as it is, it is written all the same, so that there is a new version.)
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from hashlib import sha256
from typing import Any, Final
from urllib.parse import quote

from headgate.core.clock import clock
from headgate.errors import HeadgateError, PoolClosed, StoreUnreachable, StoreWriteFailed
from headgate.sharing.postgres.address import Address
from headgate.sharing.postgres.errors import SCHEMA, Trouble, Verdict
from headgate.sharing.postgres.link import Link, Server
from headgate.sharing.postgres.members import REAP, Membership, channel_of, lease_of
from headgate.sharing.postgres.upkeep import Upkeep
from headgate.sharing.states import ClockOffset, Seen
from headgate.sharing.transactions import Call, Host

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
"""Steps in one transaction."""
_LONG: Final = 800


def stored_key(key: str) -> str:
    """Return a key as it is stored: ASCII without quotes, and short enough for an index and a notification."""
    text = quote(key, safe="/:=,@+ ", errors="surrogatepass")
    return text if len(text) <= _LONG else f"{text[:_LONG]}~{sha256(text.encode()).hexdigest()}"


class PostgresBackend:
    """Implements `sharing.transactions.Backend`."""

    def __init__(self, address: Address, lease: float, host: Host) -> None:
        self.server: Server = Server(address, host, min(5.0, max(1.0, lease / 5)))
        """What the connections of this store share."""
        self.members: Membership = Membership(self.server, lease)
        """How this process takes part."""
        self._address = address
        self._host = host
        self._link = Link("exchange", self.server)
        self._using = asyncio.Lock()  # of that connection
        self._trial: asyncio.Task[None] | None = None
        self._upkeep = Upkeep(self.server)
        self._newest = 0.0
        self._grace: asyncio.TimerHandle | None = None  # until a member that a crash made unknown must be gone
        self._unswept = 0  # texts that were written since expired ones were last deleted

    @property
    def deadline(self) -> float:
        """Until when the lease stands for certain, on the monotonic clock."""
        return self.members.deadline

    def together(self, calls: Sequence[Call]) -> int:
        """As many as are for the same key."""
        key, most = calls[0].key, min(len(calls), _TOGETHER)
        return next((count for count in range(1, most) if calls[count].key != key), most)

    async def commit(self, calls: Sequence[Call]) -> None:
        """Run these calls in one transaction, again and again until it is known to be committed."""
        transaction, defeats = _Transaction(calls), 0

        async def until_committed() -> None:
            nonlocal defeats
            while not await (self._once(transaction) if defeats < _DEFEATS else self._locked(transaction)):
                defeats += 1

        async with self._using:
            try:
                await self.server.persist("exchange", until_committed)
            except HeadgateError:
                if self._host.closing.is_set():
                    raise PoolClosed("the store is closed", remedy="Make a new store.") from None
                raise
            if self._unswept >= _SWEEP_AFTER:
                await self._sweep()

    async def look(self) -> float:
        """Renew the lease, and look who is gone. An idle connection may have been cut without a word: it is tried."""
        pause, is_beat = await self.members.look()
        if is_beat and not self._using.locked() and self._link.is_connected:
            self._trial = asyncio.get_running_loop().create_task(self._try())
        return pause

    async def _try(self) -> None:
        async with self._using:
            try:
                await self._link.ask("SELECT 1")
            except Trouble:
                pass  # the next transaction makes another

    async def leave(self, *, ends: bool) -> None:
        """Delete the row of this member, and close the connections.

        Commands end with their connections. They are never cancelled: asyncpg would connect once more for that.
        """
        if self._grace is not None:
            self._grace.cancel()
        await self.members.leave([] if self._using.locked() else [self._link])
        self.server.drop_all()

    def silence(self, timeout: float) -> HeadgateError:
        """Why the last connection failed."""
        error = self.server.last_error
        if error is None:
            return StoreUnreachable(f"{self._address.place} cannot be reached: no answer within {timeout:g} s")
        return type(error)(error.message, remedy=error.remedy)

    async def _sweep(self) -> None:
        """Delete texts that have expired: more than were written since the last time, so that none are left over."""
        self._unswept = 0
        try:
            await self._link.ask(_SWEEP, self._newest)
        except Trouble:
            pass  # others come soon, and the next who wants a step to be run hears of it

    async def _locked(self, transaction: _Transaction) -> bool:
        """The same as `_once` with the row locked before."""
        await self._link.tell(_LOCK % transaction.key)
        try:
            is_done = await self._once(transaction)
        except BaseException:
            if self._link.is_connected:
                await self._link.tell("ROLLBACK")
            raise
        await self._link.tell("COMMIT")
        return is_done

    async def _once(self, transaction: _Transaction) -> bool:
        """Read, run and write; returns False when it must be done again."""
        me = await self.members.ensure(self._link)
        before = clock.now()
        row = await self._link.ask(_READ, transaction.key)
        after = clock.now()
        if row["complete_for"] is None:  # the server has crashed. Two who find that write two rows: the later counts
            await self._link.ask(_MEMBERS_BEGIN)
            return False
        ids = frozenset(row["ids"] or ())
        if me not in ids:
            self.members.lose(me)
            return False
        if row["is_any_over"]:
            await self._link.ask(REAP)
            return False
        # The clock of the server may be set back. Its time is at least that of the last write, and our last one.
        self._newest = now = max(self._newest, row["now"])
        ahead = ClockOffset.read_between(before, now, after)
        transaction.run(self._text(transaction.key, row["state"]), Seen(now, me, self._asked_who_is_gone(row), ahead))
        if transaction.is_doubtful and transaction.state is None:
            transaction.state, transaction.expires = row["state"], row["expires"]
        channels = [channel_of(member) for member in transaction.wakes if member in ids]
        if transaction.state is not None:
            return await self._write(transaction, row["version"], now, me, channels)
        if channels:
            await self._link.ask(_NOTIFY, transaction.key, channels)
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
                self._grace = asyncio.get_running_loop().call_later(left + _SOON, self._grace_is_over)
            return False

        return is_gone

    def _grace_is_over(self) -> None:
        self._grace = None
        self._host.listeners.wake(None)

    async def _write(
        self, transaction: _Transaction, version: int | None, now: float, me: str, channels: Collection[str]
    ) -> bool:
        query, known = (_INSERT, 0) if version is None else (_UPDATE, version)
        key, state, durable, expires = transaction.key, transaction.state, transaction.durable, transaction.expires
        try:
            row = await self._link.ask(query, key, known, state, now, me, channels, durable, expires)
        except Trouble as trouble:
            transaction.is_doubtful |= trouble.verdict is Verdict.AGAIN
            raise
        if row is None:
            return False
        self._upkeep.changed(row["version"])
        self._unswept += durable
        return True

    def _text(self, key: str, state: bytes | None) -> str | None:
        if state is None:
            return None
        try:
            return state.decode("utf-8", "surrogatepass")
        except UnicodeDecodeError:
            pass
        place = f"{SCHEMA}.texts of {self._address.shown}"
        remedy = "Delete that row if somebody else wrote it."
        raise Trouble(
            Verdict.FAILED, StoreWriteFailed(f"the row {key!r} in {place} is not text of headgate", remedy=remedy)
        )


class _Transaction:
    """Steps for one key, and what they make of its text."""

    def __init__(self, calls: Sequence[Call]) -> None:
        self._calls = calls
        self.key: str = calls[0].key
        self.durable: bool = calls[0].durable
        self.state: bytes | None = None
        """The new text; None: it stays as it is."""
        self.expires: float | None = None
        """When the new text may be deleted."""
        self.wakes: set[str] = set()
        self.is_doubtful: bool = False
        """Was a write sent whose answer never came? The server may still be about to do it."""

    def run(self, text: str | None, seen: Seen) -> None:
        """Run all steps, one upon the other."""
        self.wakes, self.state, self.expires = set(), None, None
        for call in self._calls:
            if (outcome := call.run(text, seen)) is not None and outcome.state is not None:
                self.state, text = outcome.state.encode("utf-8", "surrogatepass"), outcome.state
                self.expires = outcome.expires
            self.wakes.update(call.wakes)
