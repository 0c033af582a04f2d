"""The workers that a dispatcher knows, and its connections to them: who may be used, who is tried again, who leaves.

A worker of a pool's own that listens on a Unix socket is used at once. Others are `candidates` until a session with
them is open. Those that may be used stand in the roster, which balancers choose from. A session that gets old is
replaced by another (`renewal`), and one whose worker leaves finishes its calls first.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from itertools import count
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from headgate.core.clock import clock
from headgate.core.redaction import redact
from headgate.workers.client.candidates import Candidates, Places
from headgate.workers.client.connection import Connection, Happening
from headgate.workers.client.failures import client_id
from headgate.workers.client.peers import Introductions
from headgate.workers.client.renewal import Renewals
from headgate.workers.events import WORKERS, WorkerLostEvent, WorkerReady, WorkerStopped
from headgate.workers.model import Limits, WorkerMetadata, WorkerView
from headgate.workers.processes.exit_status import Ending
from headgate.workers.protocol.messages import Introduction, Outgoing

if TYPE_CHECKING:
    from headgate.discovery.port import DiscoveryEvent
    from headgate.workers.client.availability import Openings
    from headgate.workers.client.balancing import Roster
    from headgate.workers.credentials import WorkerCredentials
    from headgate.workers.protocol.tls_causes import Refusal

_epochs = count(1)
_MOST_EVICTED = 64  # whose reasons are kept
LEAVING = 1.0
"""Seconds that the session with a worker is kept when its discovery drops it: a discovery may hear of a death before
the connection does, and what is seen of the session meanwhile tells a death from a farewell."""


class Connections:
    """Keeps the connections of one dispatcher, and the roster of the workers that may be used."""

    def __init__(
        self,
        roster: Roster[Connection],
        openings: Openings,
        *,
        introductions: Introductions,
        here: str,
        max_payload: int,
        limits: Limits,
        credentials: WorkerCredentials | None,
        awaits_endings: bool,
        on_lost: Callable[[WorkerMetadata, str], None] | None,
        on_retiring: Callable[[str, str, bool], None] | None,
        places: Places | None,
        on_evicted: Callable[[Connection], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._roster = roster
        self._openings = openings
        self._here = here
        self._max_payload = max_payload
        self._limits = limits
        self._credentials = credentials
        self._awaits_endings = awaits_endings
        self._on_lost = on_lost
        self._on_retiring = on_retiring
        self._places = places
        self._on_evicted = on_evicted
        self.is_closed: bool = False
        """Whether no new calls are taken: sessions that end are not replaced."""
        self.gone: set[Connection] = set()
        """Connections that are not in the roster any more, and not closed: they may have calls."""
        self._leaving: dict[Connection, float] = {}  # of discovered workers that were dropped, and until when to look
        self._known: WeakValueDictionary[int, Connection] = WeakValueDictionary()  # by epoch
        self._discovered: dict[str, WorkerMetadata] = {}  # workers that the pool did not start
        self._candidates = Candidates(
            self._connection_to,
            self._reached,
            self._not_reached,
            self._silent,
            self._why_refused,
            lambda: openings.is_waited_for,
        )
        self._renewals = Renewals(roster, openings, self.gone, self._connection_to, self._takes_over, self._end)
        self._introductions = introductions
        self._told: Introduction | None = None  # in a worker: the list that is passed on
        self._evicted: dict[str, str] = {}
        self._listeners: set[asyncio.Task[Any] | None] = set()
        self._endings: set[asyncio.Task[None]] = set()
        self._watchers: list[asyncio.Future[None]] = []

    @property
    def reasons(self) -> dict[str, str]:
        """By uid, why workers that are known, or were lately, cannot be used."""
        return {**self._evicted, **self._candidates.reasons}

    @property
    def remedy(self) -> str | None:
        """What to do about the workers that refuse; None: nothing in particular."""
        return self._candidates.remedy

    @property
    def out_of_reach(self) -> list[str]:
        """The uids of workers that could not be connected, and are tried again."""
        return self._candidates.out_of_reach

    @property
    def hopeless(self) -> bool:
        """Whether no worker may be used, and all that are known refuse for a reason that will not go away by itself."""
        return not len(self._roster) and self._candidates.hopeless

    def hurry(self) -> None:
        """Try workers again now that could not be connected, because a call has begun to wait for one."""
        self._candidates.hurry()

    def follow(self, events: AsyncIterator[DiscoveryEvent], *, discovered: bool = False) -> None:
        """Admit and drop workers as these events say; `discovered`: they were not started by the pool."""
        self._listeners.add(self._loop.create_task(self._follow(events, discovered)))

    async def _follow(self, events: AsyncIterator[DiscoveryEvent], discovered: bool) -> None:
        try:
            async for event in events:
                if event.type == "worker-dropped":
                    self.drop(event.metadata.uid)
                else:
                    self.admit(event.metadata, discovered=discovered)
        finally:
            # The loop ends. A task that was cancelled keeps its frames (from Python 3.13 on), those of asyncio.run too,
            # and with them every task and so every stream of that loop; the pool keeps this dispatcher.
            self._listeners.discard(asyncio.current_task())

    def admit(self, metadata: WorkerMetadata, *, discovered: bool = False) -> None:
        """Add a worker, to be used from now on; if it is known, sessions that begin from now on go where this says.

        One that was discovered, or listens on TCP, is used when a session with it is open: it may not be there, or have
        a certificate that this client does not accept.
        """
        uid = metadata.uid
        if discovered:
            self._discovered[uid] = metadata
        known = self._roster.get(uid)
        if known is not None:
            if known.metadata != metadata:
                self._renewals.update(known, metadata)
        elif discovered or not metadata.address.startswith("unix:"):
            self._candidates.add(metadata)
        else:
            self._admit(self._connection_to(metadata))

    def _connection_to(self, metadata: WorkerMetadata) -> Connection:
        epoch = next(_epochs)
        connection = Connection(
            metadata,
            epoch,
            client_id(),
            self._happened,
            self._max_payload,
            self._limits,
            self._on_retiring,
            self._credentials if metadata.secure else None,
        )
        connection.here = self._here
        connection.awaits_ending = self._awaits_endings and metadata.uid not in self._discovered
        self._known[epoch] = connection
        return connection

    def _admit(self, connection: Connection) -> None:
        uid = connection.metadata.uid
        self._evicted.pop(uid, None)
        self._roster.admit(uid, connection)
        self._introductions.add(connection.metadata, connection.session.uid)
        self._introduce()
        self._openings.wake()
        self.changed()

    def _reached(self, connection: Connection) -> None:
        """Use a discovered worker from now on, if there is a place for it: a session with it is open."""
        uid = connection.metadata.uid
        if self._places is not None and uid in self._discovered and not self._places.answers(uid):
            self._end(connection)
            return
        self._admit(connection)
        if WORKERS.listeners and connection.metadata.uid in self._discovered:
            WORKERS.emit(WorkerReady(at=clock.wall(), uid=connection.metadata.uid, pid=connection.pid))
        self._openings.happened(connection, "open", "")

    def _not_reached(self, metadata: WorkerMetadata, is_explained: bool) -> None:
        """Note that a worker could not be reached, and, a little later, that it is known why. It is tried again; one
        that the pool started is replaced, unless the next one would be refused as well."""
        refused = self._candidates.refuses(metadata.uid)
        if metadata.uid in self._discovered:
            if self._places is not None:
                self._places.out_of_reach(metadata.uid)
        elif self._on_lost is not None and is_explained and not refused:
            self._on_lost(metadata, self._candidates.reasons.get(metadata.uid, "it cannot be reached"))
        if self.hopeless:
            self._openings.wake()  # who waits for a worker need not wait for long
        self.changed()

    def _silent(self, metadata: WorkerMetadata) -> None:
        """Note that a worker has not answered yet."""
        if self._places is not None and metadata.uid in self._discovered:
            self._places.silent(metadata.uid)

    async def _why_refused(self, metadata: WorkerMetadata) -> Refusal | None:
        """Find out why a worker cannot be reached. (gRPC says the same whatever the cause is.)"""
        from headgate.workers.protocol.tls_causes import why_refused

        return await why_refused(metadata.address, self._credentials if metadata.secure else None)

    def drop(self, uid: str) -> None:
        """Remove a worker. Calls that it has may end."""
        discovered = self._discovered.pop(uid, None)
        self._candidates.drop(uid)
        connection = self._roster.get(uid)
        if connection is not None:
            self._remove(connection)
            if discovered is not None and self._places is not None:
                self._leaving[connection] = clock.now() + LEAVING
            self._end(connection)
        self._evicted.pop(uid, None)

    def learn(self, uid: str, ending: Ending) -> None:
        """Hear how the process of a worker has ended."""
        for connection in list(self._known.values()):
            if connection.metadata.uid == uid:
                connection.learn(ending)

    def set_members(self, members: list[WorkerMetadata], told: Introduction | None = None) -> None:
        """Make these the workers that may be used, and no others. Those that are reached over a network are dialled
        first, as discovered ones are. `told`: the list by which the pool's client introduced them, to be passed on."""
        self._told = told
        uids = {metadata.uid for metadata in members}
        for uid in {*(connection.metadata.uid for connection in self._roster), *self._discovered} - uids:
            self.drop(uid)
        for metadata in members:
            if metadata.address.startswith("unix:"):
                self.admit(metadata)
            elif self._discovered.get(metadata.uid) != metadata:
                self.admit(metadata, discovered=True)
        if told is not None:
            self._introduce()

    async def connect(self, workers: int, failed: Callable[[], bool]) -> None:
        """Connect to this number of workers now; or to those that are there, when no more can be had."""
        await self._until(lambda: len(self._roster) >= workers or failed())
        for connection in self._roster:
            connection.open()
        await self._until(lambda: all(connection.session.state != "opening" for connection in self._roster))

    async def until_known(self, uids: list[str]) -> None:
        """Wait until discovery has told of these workers, for a second at most."""
        try:
            async with asyncio.timeout(1.0):
                await self._until(lambda: all(uid in self._roster for uid in uids))
        except TimeoutError:
            pass

    async def _until(self, condition: Callable[[], bool]) -> None:
        """Wait until a condition on the roster holds, which is looked at whenever a worker or its state changes."""
        while not condition():
            watcher = self._loop.create_future()
            self._watchers.append(watcher)
            await watcher

    def changed(self) -> None:
        """Have those look again who wait for a change of the workers."""
        watchers, self._watchers = self._watchers, []
        for watcher in watchers:
            if not watcher.done():
                watcher.set_result(None)

    def views(self) -> list[WorkerView]:
        """Describe the workers that may be used now."""
        return [self.view(connection) for connection in self._roster]

    def view(self, connection: Connection) -> WorkerView:
        """Describe the worker of a connection, with its state and load."""
        state = connection.state
        if state == "ready" and self._roster.cooling(connection.metadata.uid, clock.now()):
            state = "cooling"
        calls = connection.in_flight
        if self.gone:  # its earlier sessions finish theirs
            calls += sum(one.in_flight for one in self.gone if one.metadata.uid == connection.metadata.uid)
        return WorkerView(connection.metadata, state, calls, process=connection.session.process)

    def _takes_over(self, connection: Connection) -> None:
        """Note that a session takes the place of another with the same worker."""
        self._introductions.add(connection.metadata, connection.session.uid)
        self._introduce()

    def _introduce(self) -> None:
        """Tell workers whom their routines may call.

        A worker passes on the list that the pool's client made. The workers that it has reached itself, at first none
        and then one after the other, say nothing about whom others may call: two workers that tell each other only of
        those would each drop what the other has, until nobody is left.
        """
        introduction = self._told or self._introductions.latest
        for connection in (*self._roster, *self.gone):  # those that leave finish calls that may call others
            connection.introduce(introduction)

    def _remove(self, connection: Connection, *, is_there: bool = False) -> None:
        """Stop to use a connection. `is_there`: only this dispatcher does, and the worker is there still."""
        uid = connection.metadata.uid
        if self._roster.get(uid) is connection:
            self._roster.drop(uid)
            if not (is_there or self.is_closed):
                self._introductions.remove(uid)
                self._introduce()
            self.changed()
        self._openings.forget(connection)

    def _end(self, connection: Connection) -> None:
        self.gone.add(connection)
        task = self._loop.create_task(self._ended(connection))
        self._endings.add(task)
        task.add_done_callback(self._endings.discard)

    async def _ended(self, connection: Connection) -> None:
        # What it has, it finishes: one that was told to stop answers first, and one that died ends the stream. It is
        # looked at, because an event would have to be told with each answer of each worker (benchmarks/dispatch.py).
        while self._is_needed(connection):  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        self._leaving.pop(connection, None)
        await connection.close("it left the pool")
        self.gone.discard(connection)

    def _is_needed(self, connection: Connection) -> bool:
        """Whether a connection that is not in the roster has calls, or is looked at."""
        state = connection.session.state
        if connection.is_busy:
            return state in ("open", "stopping")
        return state == "open" and clock.now() < self._leaving.get(connection, 0.0)

    def _happened(self, connection: Connection, happening: Happening, reason: str) -> None:
        """Act on what a connection tells of its worker."""
        if self._candidates.heard(connection, happening, reason):
            return
        if not self.is_closed and self._renewals.happened(connection, happening):
            return
        self._openings.happened(connection, happening, reason)
        self.changed()
        if happening == "closed":
            known = self._roster.get(connection.metadata.uid) is connection
            self._remove(connection, is_there=True)
            if known and not self.is_closed:  # somebody cancelled all tasks of this loop
                self._admit(self._connection_to(connection.metadata))
        elif happening in ("lost", "refused", "stopped"):
            known = self._roster.get(connection.metadata.uid) is connection
            self._remove(connection)
            if known and not self.is_closed:
                self._evicted[connection.metadata.uid] = reason
                while len(self._evicted) > _MOST_EVICTED:
                    del self._evicted[next(iter(self._evicted))]
                if happening == "refused":
                    self._on_evicted(connection)
                discovered = self._discovered.get(connection.metadata.uid)
                if discovered is not None:
                    self._departed(connection, happening, reason)
                    self._candidates.add(discovered, reason, permanent=happening == "refused")
                elif self._on_lost is not None and happening == "lost":
                    self._on_lost(connection.metadata, reason)
                self._end(connection)
            elif connection in self._leaving:
                self._departed(connection, happening, reason)

    def _departed(self, connection: Connection, happening: Happening, reason: str) -> None:
        """Tell that a discovered worker has gone: one that said before that it would stop is not lost."""
        uid, pid, at = connection.metadata.uid, connection.pid, clock.wall()
        if happening != "stopped" and self._places is not None:
            self._places.lost(uid)
        if not WORKERS.listeners:
            return
        if happening == "stopped":
            WORKERS.emit(WorkerStopped(at=at, uid=uid, pid=pid))
        else:
            WORKERS.emit(WorkerLostEvent(at=at, uid=uid, pid=pid, reason=redact(reason), restarted=False))

    def abandon(self) -> None:
        """Break every session without awaiting anything, because the loop is closed or does not turn."""
        self.is_closed = True
        for connection in [*self._roster, *self.gone]:
            connection.abandon()

    async def close(self, calls: Iterable[Outgoing]) -> None:
        """End every session, and cancel those of these calls that workers have."""
        self.is_closed = True
        listeners = [listener for listener in self._listeners if listener is not None]
        for listener in listeners:
            listener.cancel()
        await asyncio.gather(*listeners, self._candidates.close(), return_exceptions=True)
        connections = [*self._roster, *self.gone]
        for connection in list(self._known.values()):
            connection.let_go()
        for connection in connections:
            for call in [call for call in calls if call.number in connection.session.sent]:
                connection.cancel(call)
        await asyncio.gather(*(connection.close() for connection in connections), return_exceptions=True)
        for connection in connections:
            if connection.metadata.uid in self._roster:
                self._roster.drop(connection.metadata.uid)
        if self._endings:
            await asyncio.gather(*self._endings, return_exceptions=True)
