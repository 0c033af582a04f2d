"""What a pool does with its discovery: it follows what it tells of workers, and announces the workers of its own.

`Finder` subscribes once for the whole pool, on the pool's loop, and has `membership` decide. What the pool may use is
told to its dispatchers on all loops through a discovery inside the process. `Announcer` publishes the pool's own
workers, and takes that back when they end.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any

from headgate.core.clock import clock
from headgate.core.redaction import log_exception, redact
from headgate.workers.membership import Change, Membership
from headgate.workers.missing import MissingWorkers
from headgate.workers.model import WorkerMetadata

if TYPE_CHECKING:
    from headgate.discovery.in_process import OwnDiscovery
    from headgate.discovery.port import DiscoveryEvent, DiscoveryEventType, DiscoveryLike

_LOGGER = "headgate.workers"
_log = logging.getLogger(_LOGGER)
AGAIN = 1.0
"""Seconds until a subscription that failed is tried again."""
SETTLING = 2.0
"""Seconds in which a subscription that began again has told of the workers that are there."""
SILENT = 3.0
"""Seconds after which it is logged that no worker was found."""
LAST = 2.0
"""Seconds that a discovery has to take back an announcement, and to close, when its pool does."""


class Finder:
    """Follows a discovery for a pool."""

    def __init__(self, discovery: DiscoveryLike, membership: Membership, on_change: Callable[[], None]) -> None:
        from headgate.discovery.in_process import OwnDiscovery

        self.membership: Membership = membership
        self.discovery: DiscoveryLike = discovery
        self.missing: MissingWorkers = MissingWorkers()
        self.places: Places = Places(membership, self.missing, self._tell)
        self._on_change = on_change
        self._found: OwnDiscovery = OwnDiscovery()
        self._task: asyncio.Task[None] | None = None
        self._stale: set[str] = set()
        self._settling: asyncio.TimerHandle | None = None
        self._warning: asyncio.TimerHandle | None = None
        self._closed = False

    def start(self) -> None:
        """Begin to follow the discovery, unless that has begun."""
        if self._task is None and not self._closed:
            loop = asyncio.get_running_loop()
            self._task = loop.create_task(self._follow())
            self._warning = loop.call_later(SILENT, self._warn)

    def stop(self) -> None:
        """Stop to follow the discovery without waiting for anything."""
        self._closed = True
        if self._task is not None:
            self._task.cancel()
        self._found.close()

    def subscribe(self) -> AsyncIterator[DiscoveryEvent]:
        """Tell of the workers that the pool may use, on any loop."""
        return self._found.subscribe()

    def owns(self, uid: str) -> None:
        """Hear that the pool started this worker itself."""
        self._tell(self.membership.owns(uid))

    def _warn(self) -> None:
        """Tell who waits for a first worker that none was found that may be used."""
        if not self.membership.admitted and not self._closed:
            refused = "; ".join(f"{uid}: {reason}" for uid, reason in list(self.membership.refused.items())[-3:])
            _log.warning(
                "%r has told of no worker that this pool may use%s; calls wait for one. "
                "`headgate workers` shows who is there",
                self.discovery,
                f" ({redact(refused)})" if refused else "",
            )

    async def _follow(self) -> None:
        while True:
            subscription: AsyncIterator[DiscoveryEvent] | None = None
            try:
                subscription = self.discovery.subscribe()
                async for event in subscription:
                    self._hear(event)
                return  # it has ended: nothing more will be told
            except Exception:
                log_exception(_LOGGER, "the discovery %r failed; it is asked again", self.discovery)
                self._stale = {metadata.uid for metadata in self.membership.known}  # until they are told of again
                _cancel(self._settling)
                self._settling = None
            finally:
                if subscription is not None:
                    await _close_iterator(subscription)
            await asyncio.sleep(AGAIN)

    def _forget_stale(self) -> None:
        """Drop workers of which a discovery told before it failed, and not since."""
        stale, self._stale, self._settling = self._stale, set(), None
        for metadata in self.membership.known:
            if metadata.uid in stale:
                self._tell(self.membership.heard("worker-dropped", metadata))

    def _hear(self, event: DiscoveryEvent) -> None:
        """Take an event; one that makes no sense is logged and left out."""
        try:
            changes = self.membership.heard(event.type, event.metadata)
        except Exception as error:
            _log.warning("the discovery %r told %r, which is no event: %s", self.discovery, event, error)
            return
        self._tell(changes)
        if self._stale:
            self._stale.discard(event.metadata.uid)
            if self._settling is None:  # it has begun to tell all that are there
                self._settling = asyncio.get_running_loop().call_later(SETTLING, self._forget_stale)

    def _tell(self, changes: list[Change]) -> None:
        for change in changes:
            self.missing.heard(change, clock.now())
            self._found.announce(change.type, change.metadata)
        if changes:
            self._on_change()

    async def close(self) -> None:
        """Stop to follow the discovery."""
        self._closed = True
        task, self._task = self._task, None
        if task is not None and not await _ended(task):
            _log.warning("the subscription of %r did not close within %g s", self.discovery, LAST)
        _cancel(self._warning)
        _cancel(self._settling)
        self._found.close()


class Places:
    """What the dispatchers of a pool tell its membership, each on its own loop. The membership lives on the pool's."""

    def __init__(self, membership: Membership, missing: MissingWorkers, tell: Callable[[list[Change]], None]) -> None:
        self._membership = membership
        self._missing = missing
        self._tell = tell
        self._loop = asyncio.get_running_loop()

    def silent(self, uid: str) -> None:
        """Hear that a worker has not answered a dispatcher yet: others may be tried beside it."""
        self._hear(self._membership.silent, uid)

    def answers(self, uid: str) -> bool:
        """Hear that a dispatcher has a session with a worker. False: others have all places, and it may not be used.

        On another loop than the pool's that is known a moment later, and the worker is dropped then.
        """
        self._hear(self._answers, uid)
        return asyncio.get_running_loop() is not self._loop or self._membership.uses(uid)

    def out_of_reach(self, uid: str) -> None:
        """Hear that a dispatcher cannot reach a worker: another one may have its place."""
        self._hear(self._membership.out_of_reach, uid)

    def lost(self, uid: str) -> None:
        """Hear that the session of a dispatcher with a worker has broken."""
        self._hear(self._lost, uid)

    def _answers(self, uid: str) -> list[Change]:
        self._missing.answers(uid)
        return self._membership.answers(uid)

    def _lost(self, uid: str) -> list[Change]:
        self._missing.lost(uid, clock.now())
        return []

    def _hear(self, what: Callable[[str], list[Change]], uid: str) -> None:
        def hear() -> None:
            self._tell(what(uid))

        if asyncio.get_running_loop() is self._loop:
            hear()
            return
        try:
            self._loop.call_soon_threadsafe(hear)
        except RuntimeError:  # it is closed
            pass


class Announcer:
    """Publishes the workers that a pool started, for as long as they take calls."""

    def __init__(self, discovery: DiscoveryLike, on_own: Callable[[str], None]) -> None:
        self._discovery = discovery
        self._on_own = on_own
        self._publisher: Any = None
        self._context: Any = None
        self._announced: dict[str, WorkerMetadata] = {}
        self._task: asyncio.Task[None] | None = None

    @property
    def is_open(self) -> bool:
        """Whether it can publish."""
        return self._publisher is not None

    async def open(self) -> None:
        """Enter the publisher of the discovery."""
        self._context = self._discovery.publisher
        self._publisher = await self._context.__aenter__()

    async def announce(self, workers: list[WorkerMetadata]) -> None:
        """Publish these workers. What the discovery raises is raised."""
        for metadata in workers:
            self._on_own(metadata.uid)
            await self._publisher.publish("worker-added", metadata)
            self._announced[metadata.uid] = metadata

    def follow(self, events: AsyncIterator[DiscoveryEvent]) -> None:
        """Publish what becomes of the workers from now on."""
        self._task = asyncio.get_running_loop().create_task(self._follow(events))

    async def _follow(self, events: AsyncIterator[DiscoveryEvent]) -> None:
        async for event in events:
            self._on_own(event.metadata.uid)
            known = self._announced.get(event.metadata.uid)
            if event.type == "worker-dropped":
                if known is not None:
                    await self._publish("worker-dropped", event.metadata)
            elif known != event.metadata:
                await self._publish("worker-added" if known is None else "worker-updated", event.metadata)

    async def _publish(self, type: DiscoveryEventType, metadata: WorkerMetadata) -> None:
        """Publish an event; a failure is logged, and the workers of the pool go on."""
        try:
            await self._publisher.publish(type, metadata)
        except Exception as error:
            _log.warning("worker %s could not be announced (%s): %s: %s", metadata.uid, type, _name_of(error), error)
            return
        if type == "worker-dropped":
            self._announced.pop(metadata.uid, None)
        else:
            self._announced[metadata.uid] = metadata

    async def close(self) -> None:
        """Take back what was published, and leave the publisher. A discovery that fails or hangs is not waited for."""
        task, self._task = self._task, None
        if task is not None:
            await _ended(task)
        if self._publisher is None:
            return
        dropping = asyncio.ensure_future(self._take_back())
        _, late = await asyncio.wait((dropping,), timeout=LAST)
        if late:
            dropping.cancel()
            _log.warning(
                "%d workers of a pool that closes could not be taken back from %r within %g s",
                len(self._announced),
                self._discovery,
                LAST,
            )
        leaving = asyncio.ensure_future(self._context.__aexit__(None, None, None))
        _, late = await asyncio.wait((leaving,), timeout=LAST)
        if late:
            leaving.cancel()
            _log.warning("the publisher of %r did not close within %g s", self._discovery, LAST)
        elif not leaving.cancelled() and (error := leaving.exception()) is not None:
            _log.warning("the publisher of %r failed to close: %s: %s", self._discovery, _name_of(error), error)

    async def _take_back(self) -> None:
        for metadata in list(self._announced.values()):
            await self._publish("worker-dropped", metadata)


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()


async def _ended(task: asyncio.Task[None]) -> bool:
    """Cancel a task and wait for it; again, if it does something that hangs when it is cancelled."""
    for seconds in (LAST, 0.1):
        task.cancel()
        await asyncio.wait((task,), timeout=seconds)
        if task.done():
            return seconds == LAST
    return False


def _name_of(error: BaseException) -> str:
    return type(error).__name__


async def _close_iterator(iterator: AsyncIterator[Any]) -> None:
    """Close an iterator that may be a generator."""
    close = getattr(iterator, "aclose", None)
    if close is not None:
        try:
            await close()
        except Exception:
            log_exception(_LOGGER, "a subscription could not be closed")
