"""`EngineKeepers`: has workers started on the nodes of a cluster, where an engine runs hosts for us.

An engine has *places*: each is one process of it with a host beside it (`worker_host`). It says which places there are
and where their hosts listen. Everything else goes over our own connection to each host (`host_link`): commands, reports
and the news that a host is gone.

What an engine says is a hint. A worker counts as gone when its keeper reported its end, or when its host cannot be
reached and the worker itself does not answer either. That a session with it was lost is told by the pool (`signal`).
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Collection, Coroutine, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from headgate.core.clock import clock
from headgate.core.redaction import redact
from headgate.errors import WorkerStartFailed
from headgate.workers.processes.restarts import Trouble

if TYPE_CHECKING:
    from headgate.workers.credentials import WorkerCredentials
    from headgate.workers.processes.host_link import HostLink
    from headgate.workers.processes.keepers import OnReport
    from headgate.workers.processes.local_worker import LocalWorker
    from headgate.workers.processes.placement import Launch

FIRST_PATIENCE, PATIENCE = 0.2, 1.0
"""Seconds after which the workers of a host that cannot be reached are asked themselves, and between two such times."""
PROBE = 1.0
"""Seconds that a worker has to answer then."""
FAREWELL = 3.0
"""Seconds that hosts have to end everything when a placement closes."""

OnPlace = Callable[[str, str], None]
"""Is told that the host of the place with this key listens at this address."""
OnTrouble = Callable[[str], None]
"""Is told, in words for a person, why the engine provides no place."""


class Engine(Protocol):
    """What runs hosts on the nodes of a cluster. Used on one event loop, except where it says."""

    module_remedy: str
    """How its workers get modules that they lack, for an error."""
    keeps_places: bool
    """Whether a place that it restarts is the same place, and is dropped by us; else it gets another key."""

    async def open(self, settings: bytes, on_place: OnPlace, on_trouble: OnTrouble) -> int:
        """Connect to the cluster; return how many workers are right if nobody says how many."""
        ...

    def want(self, workers: int) -> Collection[str]:
        """Provide places for so many workers; return the keys of all places that there are to be."""
        ...

    def look(self, key: str) -> None:
        """Find out where the host of a place is now, because it does not answer, and tell `on_place`."""

    def drop(self, key: str) -> None:
        """End a place: no worker is wanted there any more."""

    async def close(self) -> None:
        """End all places, and leave the cluster. Also if `open` failed, or was not called."""

    def abandon(self) -> None:
        """The same from another loop, without waiting. What cannot be ended that way ends by its orphan timeout."""


class Place:
    """A process of the engine with a host beside it, and the workers there."""

    def __init__(self, key: str) -> None:
        self.key: str = key
        self.link: HostLink | None = None
        self.host: str = ""
        """The id of the host that was last connected."""
        self.workers: dict[str, LocalWorker] = {}
        self.vacated: set[str] = set()
        """Uids of workers whose place another may take."""
        self.seen: dict[str, int] = {}
        self.checks: bool = False
        """Is somebody finding out which of its workers live?"""

    @property
    def is_up(self) -> bool:
        """Is its host connected?"""
        return self.link is not None and self.link.is_up

    @property
    def load(self) -> int:
        """How many workers count there."""
        return len(self.workers.keys() - self.vacated)


class EngineKeepers:
    """Assigns workers to the places of an engine, and passes on what their hosts report."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._places: dict[str, Place] = {}
        self._pending: list[LocalWorker] = []
        self._size = 0
        self._closing = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._credentials: WorkerCredentials
        self._launch: Launch
        self._on_report: OnReport
        self._loop: asyncio.AbstractEventLoop

    # -- what KeptWorkers asks -----------------------------------------------------------------------------------------

    def open(self, launch: Launch, on_report: OnReport) -> None:
        """Note who is told of workers, and their certificates."""
        assert launch.credentials is not None, "placed workers have certificates"
        self._launch, self._on_report, self._credentials = launch, on_report, launch.credentials
        self._loop = asyncio.get_running_loop()

    def prepare(self, workers: int) -> None:
        """Have the engine provide places for so many workers."""
        self._size = workers
        for key in self._engine.want(workers):
            self._places.setdefault(key, Place(key))
        self._assign()
        self._drop_surplus()

    def spawn(self, worker: LocalWorker) -> None:
        """Have a worker started at the place with the fewest, as soon as there is one."""
        self._pending.append(worker)
        self._assign()

    def _assign(self) -> None:
        """Send workers that wait to places that have room: as many to each as are needed for all."""
        capacity = max(1, -(-self._size // max(1, len(self._places))))
        while self._pending:
            free = [place for place in self._places.values() if place.is_up and place.load < capacity]
            if not free:
                return
            place, worker = min(free, key=lambda place: place.load), self._pending.pop(0)
            place.workers[worker.uid] = worker
            assert place.link is not None, "it is up"
            place.link.send(do="spawn", uid=worker.uid)

    def signal(self, uid: str, number: int) -> None:
        """Have a host send a signal. A worker whose host cannot be reached counts as gone if it is to be killed."""
        for worker in [worker for worker in self._pending if worker.uid == uid]:
            self._pending.remove(worker)
            self._soon({"event": "exited", "uid": uid, "pid": 0, "code": -number, "errors": b""})
            self._drop_surplus()
        place = self._place_of(uid)
        if place is None:
            return
        if place.is_up and place.link is not None:
            place.link.send(do="signal", uid=uid, signal=int(number))
        elif number == signal.SIGKILL:
            place.workers.pop(uid)
            self._soon({"event": "gone", "uids": [uid]})

    def vacate(self, uid: str) -> None:
        """Let another worker take the place of this one."""
        place = self._place_of(uid)
        if place is not None:
            place.vacated.add(uid)
            self._assign()

    def clean_up(self, worker: LocalWorker) -> None:
        """Do nothing: its host has cleaned up."""

    def is_dead(self, worker: LocalWorker) -> bool:
        """Return False: nobody here sees its process."""
        return False

    async def close(self) -> None:
        """Have all hosts end."""
        self._closing = True
        for task in self._tasks:
            task.cancel()
        links = [place.link for place in self._places.values() if place.link is not None]
        for link in links:
            link.stop_trying()
            link.send(do="end")
        patience = [FAREWELL if link.is_up else 0.0 for link in links]
        await asyncio.gather(*(link.close(seconds) for link, seconds in zip(links, patience, strict=True)))
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def abandon(self, loop: asyncio.AbstractEventLoop) -> None:
        """Leave the connections to the loop that does not run: the engine ends the places."""
        self._closing = True

    # -- what the engine says ------------------------------------------------------------------------------------------

    def on_place(self, key: str, address: str) -> None:
        """Connect to the host of a place, which may be a new one in the place of another."""
        if self._closing or (key not in self._places and self._engine.keeps_places):
            return
        from headgate.workers.processes.host_link import HostLink

        place = self._places.setdefault(key, Place(key))
        if place.link is not None:
            if place.link.address == address:
                return  # it tries to connect again by itself
            place.link.stop_trying()
            self._start(place.link.close())
            self._check(place, at_once=True)
        place.link = HostLink(
            address,
            self._credentials,
            on_up=lambda host, uids: self._up(place, host, uids),
            on_down=lambda reason: self._down(place),
            on_report=lambda report: self._hear(place, report),
            seen=place.seen,
        )

    def on_trouble(self, reason: str) -> None:
        """Tell the pool why there is no place for a worker. The engine goes on trying."""
        if self._closing:
            return
        text = redact(reason)
        trouble = Trouble(WorkerStartFailed(text), text, 1, clock.now(), PATIENCE)
        self._launch.on_trouble(trouble)

    # -- what hosts say ------------------------------------------------------------------------------------------------

    def _up(self, place: Place, host: str, uids: Collection[str]) -> None:
        unknown = [uid for uid in place.workers if uid not in uids]
        if place.host not in ("", host):  # another host at the same address: the one before is gone
            self._gone(place, unknown)
        else:
            for uid in unknown:  # it was not sent before the connection broke
                assert place.link is not None, "it is up"
                place.link.send(do="spawn", uid=uid)
        place.host = host
        self._assign()

    def _down(self, place: Place) -> None:
        if self._closing or place.key not in self._places:
            return
        self._engine.look(place.key)
        self._check(place)

    def _hear(self, place: Place, report: Mapping[str, Any]) -> None:
        event = report["event"]
        ended = [report["uid"]] if event == "exited" else report["uids"] if event == "gone" else []
        for uid in ended:
            place.workers.pop(uid, None)
            place.vacated.discard(uid)
        self._on_report(report)
        if ended and not self._closing:
            self._assign()
            self._drop_surplus()

    def _drop_surplus(self) -> None:
        """End places without workers that nobody needs, the newest first."""
        if not self._engine.keeps_places:
            return
        empty = [place for place in reversed(self._places.values()) if not place.workers]
        for place in empty[: max(0, len(self._places) - max(self._size, len(self._pending), 1))]:
            self._forget(place)
            self._engine.drop(place.key)

    def _forget(self, place: Place) -> None:
        del self._places[place.key]
        if place.link is not None:
            place.link.stop_trying()
            place.link.send(do="end")
            self._start(place.link.close(FAREWELL))

    # -- places whose host cannot be reached ---------------------------------------------------------------------------

    def _check(self, place: Place, *, at_once: bool = False) -> None:
        """Find out which workers of a place live, if nobody does already; or of those that it has now, at once."""
        if at_once:
            self._start(self._ask_workers(place, list(place.workers.values())))
        elif not place.checks:
            place.checks = True
            self._start(self._check_while_down(place))

    async def _check_while_down(self, place: Place) -> None:
        pause = FIRST_PATIENCE
        try:
            while not place.is_up and place.key in self._places:
                await asyncio.sleep(pause)
                pause = PATIENCE
                if not place.is_up:
                    await self._ask_workers(place, list(place.workers.values()))
                if not place.workers and not self._engine.keeps_places and not place.is_up:
                    self._places.pop(place.key, None)
                    if place.link is not None:
                        place.link.stop_trying()
        finally:
            place.checks = False

    async def _ask_workers(self, place: Place, workers: list[LocalWorker]) -> None:
        answers = await asyncio.gather(*(self._answers(worker) for worker in workers))
        self._gone(place, [worker.uid for worker, lives in zip(workers, answers, strict=True) if not lives])

    async def _answers(self, worker: LocalWorker) -> bool:
        from headgate.workers.client.inspection import inspect

        metadata = worker.described()
        if not metadata.address:
            return False
        found = await inspect(metadata, self._credentials, timeout=PROBE)
        return found.load is not None and not found.load.stopping

    def _gone(self, place: Place, uids: Collection[str]) -> None:
        known = [uid for uid in uids if place.workers.pop(uid, None) is not None]
        if known and not self._closing:
            self._on_report({"event": "gone", "uids": known})

    # -- small things --------------------------------------------------------------------------------------------------

    def _place_of(self, uid: str) -> Place | None:
        return next((place for place in self._places.values() if uid in place.workers), None)

    def _soon(self, report: Mapping[str, Any]) -> None:
        self._loop.call_soon(self._on_report, report)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
