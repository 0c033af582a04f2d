"""The open journal of one pool in a file: entries are written in groups, and told when their group is on the disk.

A disk takes about as long to sync a hundred entries as to sync one. So `append` only puts the text of an entry into the
open group. A thread takes the group as it is, writes it with one write and one sync, and wakes the event loop once to
tell everybody in it; what is appended meanwhile is the next group. Nobody waits for a group to fill: under light load
it holds the entries of one turn of the loop, under heavy load as many as came during one sync.

The thread is there while there is something to write, and some milliseconds longer. So an interpreter that ends while
somebody forgot to close a journal still writes what was appended, and then does end; and a journal that nobody holds
any more is not held by its thread.

When a write fails, the file is as it was before (`locked`), and everybody in the group is told. That is enough for a
submit, whose submitter is still there to hear it; the end of a task happens once and nobody can repeat it. So ends are
kept and go ahead of the next group, until they are written. They are told of the first failure only.

Reading happens once, before anything is written, in the thread of whoever asks for it first: `JsonLinesStore.open`
reads a small journal at once, and leaves a large one to a thread of the pool where an event loop runs.

Compaction happens here too, between two groups, because nobody else may write. Its price: the entries that come
meanwhile wait for it, some two microseconds for each line of the file. It happens when the file has four times the
lines it had after the last one, so in the long run each entry pays for a constant number of lines.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, compress
from pathlib import Path
from typing import Protocol

from headgate.core.clock import clock
from headgate.core.files import generation, write_failed
from headgate.errors import StoreWriteFailed
from headgate.stores.codec import Codec, why_opaque
from headgate.stores.jsonl.compaction import wanted, what_and_whose
from headgate.stores.jsonl.lines import entry_line
from headgate.stores.losses import Losses
from headgate.stores.port import Done, Entry, StoredTask

_log = logging.getLogger("headgate.stores")

_LINGER = 0.05
"""Seconds that the thread waits for more to do. Starting another costs some 50 us, so this may be short."""

_OPEN_AGAIN = "Open the store again."

_LINES_OF_A_TASK = 3
_MANY_LINES = 1000
_MANY_BYTES = 64_000_000
"""Bytes below which a file is never compacted."""


@dataclass(slots=True)
class Group:
    """Entries that are written and synced together."""

    lines: list[bytes] = field(default_factory=list)
    dones: dict[asyncio.AbstractEventLoop, list[Done]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.lines or self.dones)


class LineFile(Protocol):
    """Lines that this process alone appends to: a `LockedFile`, or rows of a database."""

    @property
    def path(self) -> Path: ...
    @property
    def size(self) -> int: ...
    @property
    def is_closed(self) -> bool: ...
    def lines(self) -> Iterator[bytes]: ...
    def append(self, data: bytes) -> None: ...
    def replace(self, lines: Iterable[bytes]) -> int: ...
    def close(self) -> None: ...


class JsonLinesJournal:
    """The open journal of one pool in a file (see `port.Journal`), made by `JsonLinesStore.open`."""

    def __init__(
        self,
        file: LineFile,
        read: Callable[[Iterable[bytes]], tuple[Sequence[StoredTask], int]],
        *,
        preamble: Sequence[bytes],
        keep: int,
        codec: Codec,
    ) -> None:
        self._file = file
        self._read_file = read  # given the lines of the file: the tasks in it, and how many lines it has then
        self._reading = threading.Lock()
        self._unreadable: Exception | None = None
        self._tasks: Sequence[StoredTask] = ()
        self._lines = 0
        self._preamble = preamble
        self.is_read: bool = False
        """Is it known what was in the file? If not, `tasks` reads it now, and may take long."""
        self._keep = keep
        self._codec: Codec = codec
        self._ahead = clock.wall() - clock.now()  # how far, when it was opened
        self._generation = generation()
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._thread: threading.Thread | None = None
        self._is_idle = False
        self._waking_on: asyncio.AbstractEventLoop | None = None
        self._is_closed = False
        self._group = Group()
        self._unwritten_ends: list[bytes] = []  # the thread's, or after its end that of `close`
        self._warned = False
        self._losses = Losses(file.path)

    @property
    def tasks(self) -> Sequence[StoredTask]:
        self.read()
        return self._tasks

    def read(self) -> None:
        """Read what is in the file, if that has not been done. One thread does it, and others wait for it."""
        if self.is_read:
            return
        if self._generation != generation():
            raise StoreWriteFailed(
                f"{self._file.path} was opened before this process was forked, by its parent", remedy=_OPEN_AGAIN
            )
        with self._reading:
            if self._unreadable is not None:
                raise self._unreadable
            if not self.is_read:
                if self._is_closed:
                    raise StoreWriteFailed(f"{self._file.path} is closed", remedy=_OPEN_AGAIN)
                try:
                    self._tasks, self._lines = self._read_file(self._lines_until_closed())
                except OSError as error:
                    self._unreadable = write_failed(self._file.path, error)
                    raise self._unreadable from error
                except Exception as error:
                    self._unreadable = error
                    raise
                self._count_from(_LINES_OF_A_TASK * len(self._tasks), 0)
                self.is_read = True

    def _lines_until_closed(self) -> Iterator[bytes]:
        for line in self._file.lines():
            if self._is_closed:
                raise StoreWriteFailed(f"{self._file.path} was closed while it was read", remedy=_OPEN_AGAIN)
            yield line

    def __repr__(self) -> str:
        return f"<JsonLinesJournal {self._file.path}{' closed' if self._is_closed else ''}>"

    def append(self, entry: Entry, done: Done | None = None) -> None:
        """Write this after all that was appended before. With `done`, only where an event loop runs."""
        self._put([self._line(entry)], () if done is None else (done,))

    def append_all(self, entries: Sequence[tuple[Entry, Done | None]]) -> None:
        """Write these after all that was appended before, in one group."""
        self._put([self._line(entry) for entry, _ in entries], [done for _, done in entries if done is not None])

    def _line(self, entry: Entry) -> bytes:
        line = entry_line(entry, self._codec)
        if b'"result":{"$opaque":' in line and b'"$pickle":' not in line:
            self._losses.tell(entry.get("result"), self._codec)
        return line

    def why_lost(self, result: object) -> str:
        """Why a result cannot be kept, for people; "" if it can."""
        return why_opaque(result, codec=self._codec)

    async def flush(self) -> None:
        """Return when everything appended so far is durable or has failed."""
        told: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._put((), [lambda _: None if told.done() else told.set_result(None)])
        await told

    def close(self) -> None:
        """Write what is left and release the lock."""
        if self._generation != generation():
            return  # a forked child: file, lock and thread are the parent's
        with self._lock:
            self._is_closed = True
            thread = self._thread
            self._changed.notify()
        if thread is not None:
            thread.join()
        with self._reading:
            pass  # whoever reads stops now
        with self._lock:
            group, self._group = self._group, Group()
            if (group or self._unwritten_ends) and not self._file.is_closed:
                self._commit(group)
                self._write_ends_that_fit()
            if self._unwritten_ends:
                _log.warning("%s: the ends of %d tasks are lost", self._file.path, len(self._unwritten_ends))
                self._unwritten_ends.clear()
            self._file.close()

    def _write_ends_that_fit(self) -> None:
        """Write those alone that could not be written together: what is lost is run and paid for again."""
        ends = sorted(self._unwritten_ends, key=len)
        try:
            while ends:
                self._file.append(ends[0])
                del ends[0]
        except Exception:  # longer ones have no room either
            pass
        self._unwritten_ends = ends

    # -- on the thread of whoever appends ---------------------------------------------

    def _put(self, lines: Sequence[bytes], dones: Sequence[Done]) -> None:
        """Put lines into the open group, all at once: the thread takes them together."""
        loop = asyncio._get_running_loop()
        if loop is None and dones:
            asyncio.get_running_loop()  # raises, and says why
        if self._generation != generation():
            _refuse(loop, dones, f"{self._file.path} was opened before this process was forked, by its parent")
            return
        with self._lock:
            if self._is_closed:
                _refuse(loop, dones, f"{self._file.path} is closed")
                return
            self._group.lines += lines
            if dones and loop is not None:
                self._group.dones.setdefault(loop, []).extend(dones)
            if self._thread is not None and not self._is_idle:
                return  # it takes this with the next group
            if loop is None:
                self._wake()
            elif self._waking_on is not loop:
                self._waking_on = loop
                loop.call_soon(self._turn_ends)

    def _turn_ends(self) -> None:
        with self._lock:
            self._waking_on = None
            if self._group:
                self._wake()

    def _wake(self) -> None:
        if self._thread is None:
            self._start()
        elif self._is_idle:
            self._is_idle = False
            self._changed.notify()

    def _start(self) -> None:
        self._thread = threading.Thread(target=self._write_groups, name=f"headgate-journal {self._file.path.name}")
        try:
            self._thread.start()
        except RuntimeError:  # the interpreter is ending, or the machine has no more threads: then it is done here
            self._thread = None
            group, self._group = self._group, Group()
            self._commit(group)

    # -- on the journal's own thread --------------------------------------------------

    def _write_groups(self) -> None:
        while True:
            with self._lock:
                if not self._group and not self._is_closed:
                    self._is_idle = True
                    self._changed.wait(_LINGER)
                    self._is_idle = False
                if not self._group:
                    self._thread = None
                    return
                group, self._group = self._group, Group()
            self._commit(group)
            if self._lines > self._most_lines or self._file.size > self._most_bytes:
                self._compact()

    def _commit(self, group: Group) -> None:
        """Write a group, and acknowledge its entries."""
        error: Exception | None = None
        lines = self._unwritten_ends + group.lines
        if lines:
            try:
                self.read()
                self._file.append(b"".join(lines))
            except Exception as failure:  # OSError, but nothing may end this thread
                error = failure
                self._unwritten_ends += _ends(group.lines)
            else:
                self._unwritten_ends.clear()
                self._lines += len(lines)
        for loop, dones in group.dones.items():
            try:
                loop.call_soon_threadsafe(_tell, loop, dones, error, str(self._file.path))
            except RuntimeError:
                pass  # the loop is closed: nobody is left to hear it

    def _compact(self) -> None:
        try:
            # A clock that was set forward, and may be set back, must not forget keys: the earlier one counts.
            now = min(clock.wall(), clock.now() + self._ahead)
            flags = wanted(self._file.lines(), self._keep, now)
            lines = self._file.replace(chain(self._preamble, compress(self._file.lines(), flags)))
        except Exception as error:
            if not self._warned:
                _log.warning("%s cannot be compacted, and goes on growing: %s", self._file.path, error)
            self._warned = True
            self._count_from(self._lines, self._file.size)
        else:
            self._lines = lines
            self._count_from(self._lines, self._file.size)

    def _count_from(self, lines: int, size: int) -> None:
        """Set at how many lines and bytes to compact, given how many are needed now."""
        self._most_lines = 4 * lines + _MANY_LINES
        self._most_bytes = 4 * size + _MANY_BYTES


def _told_of(path: str, error: Exception) -> StoreWriteFailed:
    """What somebody is told whose entry could not be written: an exception of one's own, because it may be raised."""
    return write_failed(path, error.__cause__ if isinstance(error.__cause__, OSError) else error)


def _tell(loop: asyncio.AbstractEventLoop, dones: Sequence[Done], error: Exception | None, path: str) -> None:
    for done in dones:
        try:
            done(None if error is None else _told_of(path, error))
        except Exception as mistake:  # of whoever passed it: the others must hear all the same
            loop.call_exception_handler(
                {"message": "a callback of a journal entry failed", "exception": mistake, "callback": done}
            )


def _refuse(loop: asyncio.AbstractEventLoop | None, dones: Sequence[Done], why: str) -> None:
    if loop is not None:
        for done in dones:
            loop.call_soon(done, StoreWriteFailed(why, remedy=_OPEN_AGAIN))


def _ends(lines: Sequence[bytes]) -> list[bytes]:
    """The lines that nobody can repeat: ends of tasks whose submit is not among the lines that failed."""
    contents = [(line, *what_and_whose(line)) for line in lines]
    never_there = {number for _, kind, number in contents if kind == "submit"}
    return [line for line, kind, number in contents if kind == "end" and number not in never_there]
