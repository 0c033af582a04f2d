"""A store in memory: for tests, and for pools that are restarted inside one process."""

from __future__ import annotations

import asyncio
import os
import socket
import weakref
from collections.abc import Mapping, Sequence
from itertools import compress
from typing import Any

from headgate.core.clock import clock
from headgate.errors import StoreLocked, StoreWriteFailed
from headgate.stores.codec import why_opaque
from headgate.stores.jsonl.compaction import wanted
from headgate.stores.jsonl.lines import Writer, entry_line, header_line, open_line, stale_line
from headgate.stores.jsonl.scanner import scan
from headgate.stores.losses import Losses
from headgate.stores.port import Done, Entry, StoredTask


class MemoryStore:
    """Journals in memory, as the lines that a file would hold: what comes back is what would come from a disk."""

    def __init__(self) -> None:
        self._lines: dict[str, list[bytes]] = {}
        self._open: weakref.WeakValueDictionary[str, MemoryJournal] = weakref.WeakValueDictionary()

    @property
    def shared(self) -> bool:
        """False: a journal has one writer."""
        return False

    def __repr__(self) -> str:
        return f"<MemoryStore of {len(self._lines)} journals>"

    def open(self, pool_id: str, about: Mapping[str, Any], keep: int) -> MemoryJournal:
        """Lock and read the journal of this pool, or make it."""
        if (holder := self._open.get(pool_id)) is not None and not holder.is_closed:
            raise StoreLocked(
                f"the journal of {pool_id!r} in {self!r} is in use by process {os.getpid()}",
                remedy="Close the pool that uses it, or make another store.",
            )
        lines = self._lines.setdefault(pool_id, [])
        journal = self._open[pool_id] = MemoryJournal(lines, header_line(pool_id, about, "json"), about, keep)
        return journal


class MemoryJournal:
    """The journal of one pool in memory (see `port.Journal`), made by `MemoryStore.open`."""

    def __init__(self, lines: list[bytes], header: bytes, about: Mapping[str, Any], keep: int) -> None:
        now = clock.wall()
        self._ahead = now - clock.now()
        self._lines = lines
        self._preamble = [header, open_line(Writer(os.getpid(), socket.gethostname(), now), about)]
        self._keep = keep
        self.is_closed: bool = False
        if not lines:
            lines.append(header)
        self._losses = Losses("a journal in memory")
        found = scan(lines)
        self._tasks = found.kept(keep, now, "json")
        self._most = 4 * len(lines) + 1000
        lines += [self._preamble[1], *(stale_line(number, now) for number in found.unfinished())]

    @property
    def tasks(self) -> Sequence[StoredTask]:
        return self._tasks

    def append(self, entry: Entry, done: Done | None = None) -> None:
        """Append an entry after all that were appended before."""
        loop = asyncio.get_running_loop() if done is not None else None
        error = StoreWriteFailed("this journal is closed", remedy="Open the store again.") if self.is_closed else None
        if error is None:
            self._lines.append(line := entry_line(entry))
            if b'"result":{"$opaque":' in line:
                self._losses.tell(entry.get("result"))
            if len(self._lines) > self._most:
                self._compact()
        if done is not None and loop is not None:
            loop.call_soon(done, error)

    def append_all(self, entries: Sequence[tuple[Entry, Done | None]]) -> None:
        """Append several entries."""
        for entry, done in entries:
            self.append(entry, done)

    def why_lost(self, result: object) -> str:
        """Why a result cannot be kept, for people; "" if it can."""
        return why_opaque(result)

    async def flush(self) -> None:
        """Return when every entry appended so far was acknowledged."""
        await asyncio.sleep(0)  # `append` acknowledges in the next turn of the loop

    def close(self) -> None:
        """Release the lock of the journal."""
        self.is_closed = True

    def _compact(self) -> None:
        flags = wanted(self._lines, self._keep, min(clock.wall(), clock.now() + self._ahead))
        self._lines[:] = [*self._preamble, *compress(self._lines, flags)]
        self._most = 4 * len(self._lines) + 1000
