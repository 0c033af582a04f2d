"""Which workers take no calls at this moment, from one event loop, and who waits for one that does."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING

from headgate.core.clock import clock
from headgate.workers.events import WORKERS, WorkerBlocked, WorkerUnblocked

if TYPE_CHECKING:
    from headgate.workers.client.connection import Connection, Happening

_AT_A_TIME = 32  # of those who wait for room: each that finds some wakes another


class Openings:
    """Which workers take no calls now, as their connections tell, and the futures of calls that wait for one."""

    __slots__ = ("_busy", "_crowded", "_reserved", "waiters")

    def __init__(self) -> None:
        self.waiters: deque[asyncio.Future[None]] = deque()
        """A future for each call that waits for a worker."""
        self._busy: set[Connection] = set()  # blocked: no new calls
        self._crowded: set[Connection] = set()  # no new calls that need a thread
        self._reserved: set[Connection] = set()  # a call of few neighbours runs or waits there: no others

    def happened(self, connection: Connection, happening: Happening, reason: str) -> None:
        """Note what a connection tells of its worker."""
        if happening == "blocked":
            self._busy.add(connection)
            _emit(WorkerBlocked, connection, tag=reason or None)
        elif happening == "unblocked":
            self._busy.discard(connection)
            self.wake()
            _emit(WorkerUnblocked, connection)
        elif happening == "crowded":
            self._crowded.add(connection)
            _emit(WorkerBlocked, connection, tag=None, threads=True)
        elif happening == "uncrowded":
            self._crowded.discard(connection)
            self.wake()
            _emit(WorkerUnblocked, connection)
        elif happening == "reserved":
            self._reserved.add(connection)
        elif happening == "unreserved":
            self._reserved.discard(connection)
            self.wake()
        elif happening == "room":
            self.wake(_AT_A_TIME)

    def forget(self, connection: Connection) -> None:
        """Drop a connection that is not used any more."""
        self._busy.discard(connection)
        self._crowded.discard(connection)
        self._reserved.discard(connection)
        self.wake()

    @property
    def is_waited_for(self) -> bool:
        """Whether a call waits for a worker."""
        return any(not waiter.done() for waiter in self.waiters)  # those that gave up stay in the row for a while

    @property
    def limited(self) -> bool:
        """Whether some worker does not take every call."""
        return bool(self._busy or self._crowded or self._reserved)

    @property
    def reserved(self) -> bool:
        """Whether some worker refuses calls because one with few neighbours runs there, or waits for room."""
        return bool(self._reserved)

    def avoided(self, roster: Iterable[Connection], tried: Collection[str], thread: bool, here: str) -> Collection[str]:
        """Return the uids of workers that a call should not go to: it was tried there, or cannot begin there.

        The worker on which the caller itself runs (`here`) admits what is called from there even if it is reserved: it
        is left out when no other can take the call.
        """
        full = self.unable(thread)
        avoid = {*tried, *full, *(connection.metadata.uid for connection in self._reserved)}
        if here in avoid and here not in tried and here not in full:
            others = (one for one in roster if one.session.state not in ("stopping", "over"))
            if all(one.metadata.uid in avoid for one in others):
                avoid.discard(here)
        return avoid

    def unable(self, thread: bool) -> set[str]:
        """Return the uids of workers where no call can begin; `thread`: or no call that needs a thread."""
        uids = {connection.metadata.uid for connection in self._busy}
        return uids | {connection.metadata.uid for connection in self._crowded} if thread else uids

    @property
    def crowded(self) -> bool:
        """Whether there is a worker where no call that needs a thread can begin."""
        return bool(self._crowded)

    def wake(self, most: int | None = None) -> None:
        """Let calls that wait for a worker look again: the first `most` of them, or all."""
        waiters = self.waiters
        while waiters and most != 0:
            waiter = waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)
                most = most if most is None else most - 1


def _emit(event: Callable[..., WorkerBlocked | WorkerUnblocked], connection: Connection, **fields: object) -> None:
    if WORKERS.listeners:
        WORKERS.emit(event(at=clock.wall(), uid=connection.metadata.uid, pid=connection.pid, **fields))
