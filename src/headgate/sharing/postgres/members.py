"""Taking part in a PostgreSQL database as a member: a row with a lease, renewed by a heartbeat.

A member lives while its row is there. The row is made under an id that nobody had before, and renewed every third of
the lease as long as the lease stands *by the clock of the database*; a lease that is over is never renewed. Whoever
sees a row whose lease is over deletes it. So "gone" is "has no row", which nothing can undo: a clock that is set back
cannot, nor a late renewal. The exception is the time after a crash of the server, which empties the table: a member
without a row counts as alive until its lease must be over, or until it says that it has taken a new id.

A member loses its lease when the database says so, or when its own deadline passes without an answer to a renewal. The
deadline is counted from before the renewal was sent, so it is never later than what the database knows. In both cases
it takes a new id.

A row is deleted in the same transaction that notifies all members, so all of them look again. They learn of a member
that died (nobody deletes its row) because each looks when the next lease of another would be over.
"""

from __future__ import annotations

import asyncio
import math
import os
import re
import socket
from collections.abc import Iterable
from typing import Final

from headgate.core.clock import clock
from headgate.sharing.postgres.errors import SCHEMA, Trouble, pooled
from headgate.sharing.postgres.link import Link, Server

ALL: Final = "headgate_members"
"""The channel in which everybody hears of members that are gone. Each member has one of its own besides."""

_JOIN: Final = f"""
WITH gone AS (DELETE FROM {SCHEMA}.members WHERE id = $5 RETURNING id)
INSERT INTO {SCHEMA}.members (id, lease_until, host, pid, former)
VALUES ($1, clock_timestamp() + make_interval(secs => $2), $3, $4, $5)
RETURNING (SELECT count(pg_notify('{ALL}', $5)) WHERE $5 <> '')
"""

_RENEW: Final = f"""
WITH renewed AS (
    UPDATE {SCHEMA}.members SET lease_until = clock_timestamp() + make_interval(secs => $2)
    WHERE id = $1 AND lease_until > clock_timestamp() RETURNING id
)
SELECT (SELECT count(*) FROM renewed) AS renewed, pg_backend_pid() AS backend,
       (SELECT extract(epoch FROM min(lease_until) - clock_timestamp())::float8 FROM {SCHEMA}.members WHERE id <> $1)
       AS next_end
"""

REAP: Final = f"""
WITH gone AS (DELETE FROM {SCHEMA}.members WHERE lease_until <= clock_timestamp() RETURNING id)
SELECT count(pg_notify('{ALL}', id)) FROM gone
"""

_LEAVE: Final = f"""
WITH gone AS (DELETE FROM {SCHEMA}.members WHERE id = $1 RETURNING id)
SELECT count(pg_notify('{ALL}', id)) FROM gone
"""

_SOON: Final = 0.02
"""Seconds after the end of a lease at which it is looked for."""


_LEASE: Final = re.compile(r"-(\d{1,15})\Z", re.ASCII)


def new_id(lease: float) -> str:
    """Return an id that nobody had before. It ends with the lease in milliseconds, rounded up: see `lease_of`."""
    return f"{clock.token()[:16]}-{math.ceil(1000 * lease)}"


def lease_of(member: str) -> float:
    """Return the lease of a member whose row a crash may have removed; 0.0 for what is no id of a member."""
    found = _LEASE.search(member)
    return int(found[1]) / 1000 if found is not None else 0.0


def channel_of(member: str) -> str:
    """Return the channel in which a member is woken."""
    return f"headgate_{member}"


class Membership:
    """The part that one store takes: its id, its lease, and the heartbeat that renews it."""

    def __init__(self, server: Server, lease: float) -> None:
        self._server = server
        self._listeners = server.listeners
        self._lease = lease
        self._joining = asyncio.Lock()
        self.link: Link = Link("heartbeat", server, on_lost=server.stir.set)
        """The connection on which the lease is renewed and notifications come."""
        self._heard: tuple[int, str] | None = None  # the connection and the id for which we listen
        self._timer: asyncio.TimerHandle | None = None
        self._next_beat = -math.inf
        self._is_looking = False  # is our connection in use?
        self._has_left = False
        self._former = ""  # the id that was lost last
        self.id: str | None = None
        """The id under which this store takes part; None until it has joined."""
        self.deadline: float = -math.inf
        """Until when the lease stands for certain, on the monotonic clock."""

    async def ensure(self, link: Link) -> str:
        """Take part, if this does not already; returns the id."""
        if self.id is not None and clock.now() < self.deadline:
            return self.id
        if self._has_left:
            raise self._server.busy("the store is being closed")
        async with self._joining:
            if self.id is not None and clock.now() >= self.deadline:
                self.lose(self.id)
            if self.id is None:
                before, new = clock.now(), new_id(self._lease)
                await link.ask(_JOIN, new, self._lease, socket.gethostname(), os.getpid(), self._former)
                self.id = new
                self._stands_from(before)
                self._server.stir.set()
            return self.id

    def lose(self, member: str) -> None:
        """The lease of this id is lost: tell it, once. The next `ensure` takes a new id."""
        if member != self.id:
            return
        # The database may not know it yet. Nobody should wait for what we do not hold any more, so we tell it.
        self.id, self._former = None, member
        self.deadline = -math.inf
        self._listeners.lost()
        self._server.stir.set()

    def _stands_from(self, before: float) -> None:
        self.deadline = before + self._lease
        if self._timer is not None:
            self._timer.cancel()
        left = max(0.0, self.deadline - clock.now())
        self._timer = asyncio.get_running_loop().call_later(left, self._look_at_deadline)

    def _look_at_deadline(self) -> None:
        if self.id is not None and clock.now() >= self.deadline:
            self.lose(self.id)

    # -- the heartbeat -------------------------------------------------------------------------------------------------

    async def look(self) -> tuple[float, bool]:
        """Renew the lease every third of it, and look when another's is over.

        Returns in how many seconds to look again, and whether this was a heartbeat.
        """
        self._is_looking = True
        try:
            next_end, is_due = await self._server.persist("heartbeat", self._looked)
        finally:
            self._is_looking = False
        if is_due:
            self._next_beat = clock.now() + self._lease / 3
            self._listeners.wake(None)
        # The next event is known in advance: our own renewal, or the end of a lease that is not renewed.
        return min(max(0.0, self._next_beat - clock.now()), next_end + _SOON), is_due

    async def _looked(self) -> tuple[float, bool]:
        """Renew the lease if that is due, or look; returns when to look again, and whether it was renewed.

        It is due on every new connection, also if the former broke while we looked: after a crash of the server the
        others wait until this member has said that its row is lost.
        """
        is_due = clock.now() >= self._next_beat or not self.link.is_connected
        return await (self._renew() if is_due else self._look()), is_due

    async def _renew(self) -> float:
        """Renew the lease; returns in how many seconds the next lease of another ends."""
        me = await self._attend()
        before = clock.now()
        row = await self.link.ask(_RENEW, me, self._lease)
        if row["backend"] != self.link.backend:
            self.link.drop()
            raise pooled(self._server.address)
        if row["renewed"]:
            if me == self.id:
                self._stands_from(before)
        else:
            self.lose(me)
            await self._attend()
        return await self._reaped(row["next_end"])

    async def _look(self) -> float:
        """Delete rows whose lease is over; returns in how many seconds the next lease of another ends."""
        me = await self._attend()
        return await self._reaped((await self.link.ask(_NEXT_END, me))["next_end"])

    async def _reaped(self, next_end: float | None) -> float:
        if next_end is None:
            return math.inf
        if next_end > 0:
            return next_end
        await self.link.ask(REAP)
        return 0.0

    async def _attend(self) -> str:
        """Take part and listen. What was told before we listened is lost, so all must look then."""
        me = await self.ensure(self.link)
        await self.link.connect()
        if self._heard != (self.link.made, me):
            await self.link.listen(ALL, lambda _: self._listeners.wake(None))
            await self.link.listen(channel_of(me), self._listeners.wake)
            self._heard = (self.link.made, me)
            self._listeners.wake(None)
        return me

    async def leave(self, links: Iterable[Link]) -> None:
        """Delete the row, on one of these connections or our own, if one is idle and the server answers."""
        if self._timer is not None:
            self._timer.cancel()
        me, self.id, self.deadline, self._has_left = self.id, None, -math.inf, True
        for link in links if self._is_looking else (self.link, *links):
            if me is not None and link.is_connected:
                try:
                    await link.ask(_LEAVE, me)
                except Trouble:
                    continue  # if there is no other, the lease ends by itself
                return


_NEXT_END: Final = f"""
SELECT extract(epoch FROM min(lease_until) - clock_timestamp())::float8 AS next_end
FROM {SCHEMA}.members WHERE id <> $1
"""
