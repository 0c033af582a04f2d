"""`LocalDiscovery`: workers and pools of one machine and one user find each other through files.

What the files are stands in `local_files`. A subscriber looks at those that inotify names, or at all of them from time
to time where there is no inotify.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Final, Self

from headgate.core.checks import checked_positive_seconds
from headgate.core.clock import clock
from headgate.discovery import inotify
from headgate.discovery.local_files import (
    HOLDER,
    RECORD,
    Entry,
    Folder,
    Holder,
    key_of,
    keys,
    look,
    remove,
    remove_all,
    sweep,
    write,
)
from headgate.discovery.namespaces import checked_namespace
from headgate.discovery.news import News, checked_type
from headgate.discovery.port import DiscoveryEvent, DiscoveryEventType, Filter
from headgate.discovery.records import to_record
from headgate.errors import DiscoveryFailed, DiscoveryTimeout, UnknownWorker
from headgate.workers.model import WorkerMetadata

LOCK_LIMIT: Final = 5.0
"""Seconds that a publisher waits for the lock of its namespace. It is held for microseconds, so somebody hangs."""
_POLL: Final = 0.25
"""Seconds between two looks where there is no inotify: a killed publisher is to be noticed within a second."""
_AGAIN: Final = (0.001, 0.004, 0.02, 0.1, 0.5)
"""Seconds after which a holder that was closed is looked at again. The kernel reports the close before it gives up the
lock, and says nothing when it has: so one may look too early."""
_REMAKE: Final = 0.05
"""Seconds after which a directory that was removed is made again. If it cannot be, it is tried again and again."""
_PAUSE: Final = (0.0005, 0.02)
"""Seconds between two tries to lock, at first and at most: flock(2) has no wait with a limit."""


class LocalDiscovery:
    """Finds the workers of this user on this machine that are announced in the same namespace.

    Without a namespace each discovery has one of its own; it can be passed on by pickling. `poll_interval` is a number
    of seconds between two looks at all workers. On Linux nothing needs it, because changes wake the subscribers.
    """

    bind_host: str | None = None
    """Where workers that are started for this discovery listen: on a Unix socket of this user, as nobody else finds
    them. With credentials on 127.0.0.1, because a Unix socket has no TLS."""

    def __init__(self, namespace: str | None = None, *, poll_interval: float | None = None) -> None:
        self.namespace: str = checked_namespace(namespace)
        self.poll_interval: float | None = checked_positive_seconds("poll_interval", poll_interval)

    def __eq__(self, other: object) -> bool:
        return self.namespace == other.namespace if isinstance(other, LocalDiscovery) else NotImplemented

    def __hash__(self) -> int:
        return hash((LocalDiscovery, self.namespace))

    def __repr__(self) -> str:
        return f"LocalDiscovery({self.namespace!r})"

    @property
    def publisher(self) -> LocalPublisher:
        """A new publisher, to be entered with ``async with``. What it has announced goes when it is left."""
        return LocalPublisher(self.namespace)

    async def subscribe(self, filter: Filter | None = None) -> AsyncIterator[DiscoveryEvent]:
        """Yield a "worker-added" for each worker that is there, then every change."""
        news = News(filter)
        known: dict[str, Entry] = {}
        watching = _Watching(Folder.of(self.namespace), self.poll_interval)
        try:
            while True:
                for event in watching.changes(known, news):
                    yield event
                await watching.wait()
        finally:
            watching.close()


class LocalPublisher:
    """Announces workers in one namespace, as long as this process lives and the publisher is not left."""

    def __init__(self, namespace: str) -> None:
        self._namespace = namespace
        self._holder: Holder | None = None
        self._announced: set[str] = set()

    async def __aenter__(self) -> Self:
        sweep(Folder.of(self._namespace).base)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        holder, self._holder = self._holder, None
        if holder is None or not holder.is_ours:
            return
        holder.release()  # now its workers are gone for everybody; the rest is tidying up
        try:
            folder = Folder.of(self._namespace)
            async with self._locked(folder, limit=0.5) as file:
                remove_all(file, holder.name, self._announced)
            folder.tidy(leave=True)
        except (OSError, DiscoveryFailed):
            pass  # the directory was removed, or somebody hangs: the next publisher sweeps

    async def publish(self, type: DiscoveryEventType, metadata: WorkerMetadata) -> None:
        """Announce that a worker came, changed or went.

        Announcing one that is there is an update. Updating one that is not is an `UnknownWorker`; dropping one that is
        not does nothing. `DiscoveryTimeout`: another process holds the namespace's lock.
        """
        checked_type(type)
        to_record(metadata)  # raises before anything is touched
        folder = Folder.of(self._namespace)
        try:
            try:
                await self._change(folder, type, metadata)
            except FileNotFoundError:  # somebody removed the directory just now: it is made again
                await self._change(folder, type, metadata)
        except DiscoveryFailed:
            raise
        except OSError as error:
            raise DiscoveryFailed(
                f"the record of worker {metadata.uid} cannot be written to {folder.path}: {error.strerror}",
                remedy="Free some space, or set XDG_RUNTIME_DIR to another directory of yours.",
            ) from error

    async def _change(self, folder: Folder, type: DiscoveryEventType, metadata: WorkerMetadata) -> None:
        async with self._locked(folder, limit=LOCK_LIMIT) as file:
            if type == "worker-dropped":
                self._announced.discard(metadata.uid)
                remove(file, f"{key_of(metadata.uid)}.json")
                return
            there = look(file, key_of(metadata.uid))
            if there is not None:
                write(file, metadata, there.holder)
            elif type == "worker-updated":
                raise UnknownWorker(f"worker {metadata.uid} is not announced in namespace {self._namespace!r}")
            else:
                write(file, metadata, self._holder_in(folder, file).name)
                self._announced.add(metadata.uid)

    def _holder_in(self, folder: Folder, file: int) -> Holder:
        """Return a locked holder. Another is made if the directory was removed, or this process is a forked child."""
        holder = self._holder
        if holder is None or not holder.is_in(file):
            if holder is not None:
                holder.release()
                self._announced.clear()
            holder = self._holder = Holder(file, folder.base)
        return holder

    @asynccontextmanager
    async def _locked(self, folder: Folder, *, limit: float) -> AsyncIterator[int]:
        """Lock the directory of the namespace, made if it is not there, for at most `limit` seconds of waiting."""
        pause, most = _PAUSE
        deadline = clock.now() + limit
        while True:
            with folder.tried(make=True) as file:
                if file is not None:
                    yield file
                    return
            if clock.now() >= deadline:
                raise DiscoveryTimeout(
                    f"namespace {self._namespace!r} is locked by another process, and was not free within {limit:g} s",
                    remedy=f"Look for a process that is stopped or hangs, with `fuser -v {folder.path}`.",
                )
            await asyncio.sleep(pause)
            pause = min(2 * pause, most)


class _Watching:
    """What one subscriber must look at next, and the watches that tell it."""

    def __init__(self, folder: Folder, poll_interval: float | None) -> None:
        self._folder = folder
        self._interval = poll_interval
        self._wake = asyncio.Event()
        self._names: set[str] = set()
        self._everything = True
        self._lost = False
        self._closed: dict[str, int] = {}  # holders that were closed, and how often we looked again
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._watches: list[inotify.Watch] = []
        try:
            self._watch()
        except BaseException:
            self.close()
            raise

    async def wait(self) -> None:
        """Return when there is something to look at."""
        if self._lost:  # the directory was removed, and perhaps what is above it: it is made again, not at once
            await asyncio.sleep(_REMAKE)
            return
        polls = self._interval if self._interval is not None else (None if self._watches else _POLL)
        try:
            async with asyncio.timeout(polls):
                await self._wake.wait()
        except TimeoutError:
            self._everything = True

    def changes(self, known: dict[str, Entry], news: News) -> Iterator[DiscoveryEvent]:
        """Look at what may have changed since the last time, note it in `known`, and yield the news."""
        self._wake.clear()
        if self._lost:
            self._stop()
            self._watch()
        names, self._names = self._names, set()
        everything, self._everything = self._everything, False
        dead = False
        for key, entry in self._looks(known, None if everything else names):
            before = known.get(key)
            if entry is None:
                if before is not None:
                    dead = True
                    del known[key]
                    yield from news.gone(before.metadata.uid)
            elif entry != before:
                known[key] = entry
                yield from news.present(entry.metadata)
        self._look_again(known, names)
        if dead:
            self._folder.tidy()

    def close(self) -> None:
        """End the watches. The directory is removed if nobody has a record there."""
        self._stop()
        self._folder.tidy(leave=True)

    def _watch(self) -> None:
        self._lost, self._everything = False, True
        self._folder.make()
        try:
            for path, changed in ((self._folder.path, self._changed), (self._folder.base, self._changed_above)):
                made = inotify.watch(path, changed)
                if made is None:  # no inotify, or no watch is left
                    self._stop()
                    return
                self._watches.append(made)
        except FileNotFoundError:  # removed between the two
            self._lost_it()
        except OSError:  # a file or a symbolic link: opening it says so
            self._stop()

    def _stop(self) -> None:
        watches, self._watches = self._watches, []
        for watch in watches:
            watch.close()
        timers, self._timers = self._timers, {}
        for timer in timers.values():
            timer.cancel()

    def _changed(self, name: str, mask: int) -> None:
        if mask & inotify.LOST:
            self._lost_it()
            return
        if mask & inotify.OVERFLOW:
            self._everything = True
        elif mask & inotify.CLOSE_WRITE and HOLDER.fullmatch(name):
            self._closed[name] = 0
        self._names.add(name)
        self._wake.set()

    def _changed_above(self, name: str, mask: int) -> None:
        gone = inotify.DELETE | inotify.MOVED_FROM
        if mask & inotify.LOST or (name == self._folder.name and mask & gone):
            self._lost_it()

    def _lost_it(self) -> None:
        self._lost = True
        self._wake.set()

    def _looks(self, known: dict[str, Entry], names: Iterable[str] | None) -> list[tuple[str, Entry | None]]:
        """Look at the records that these names concern, or at all."""
        try:
            with self._folder.opened() as file:
                if names is None:
                    wanted = keys(file) | known.keys()
                else:
                    wanted = {found[1] for name in names if (found := RECORD.fullmatch(name))}
                    wanted |= {key for key, entry in known.items() if entry.holder in names}
                return [(key, look(file, key)) for key in sorted(wanted)]
        except FileNotFoundError:
            self._lost_it()
            return [(key, None) for key in list(known)]
        except OSError:  # too many open files, say: nothing is known to have changed
            self._everything = True
            self._timer("", _AGAIN[-1])
            return []

    def _look_again(self, known: dict[str, Entry], names: Iterable[str]) -> None:
        """See to it that holders which were closed, and seem to be locked, are looked at again soon."""
        holders = {entry.holder for entry in known.values()} if self._closed else set()
        for name in [name for name in self._closed if name in names]:
            tries = self._closed[name]
            if name not in holders or tries >= len(_AGAIN):
                del self._closed[name]
                continue
            self._closed[name] = tries + 1
            self._timer(name, _AGAIN[tries])

    def _timer(self, name: str, seconds: float) -> None:
        if name not in self._timers:
            self._timers[name] = asyncio.get_running_loop().call_later(seconds, self._again, name)

    def _again(self, name: str) -> None:
        self._timers.pop(name, None)
        self._names.add(name)
        self._wake.set()
