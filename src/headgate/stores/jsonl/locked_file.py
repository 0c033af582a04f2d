"""A file of lines that this process alone appends to.

The promise: when `append` returns, its bytes are on the disk; when it raises, none of them will be there when the file
is read again. A write may stop half-way (the disk is full), or succeed while the sync after it fails, and what the disk
then holds is anyone's guess. So the file is cut back to its last good size, and as long as even that fails nothing more
is written.

`replace` exchanges the whole content in one step: write another file beside it, sync it, lock it, give it the name,
sync the folder. Before the rename the old file is good, after it the new one, and the path names a locked file all the
time. Until the folder is synced a power cut may bring the old file back, so nothing is appended before that.
"""

from __future__ import annotations

import errno
import os
import warnings
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

from headgate.core.clock import clock
from headgate.core.files import Files, generation

_TRIES = 5
_PAUSE = 0.01
"""Seconds between two tries. A reader takes the lock for a moment to see whether it is free: no reason to give up."""

_AT_ONCE = 1000
"""Lines that are written together where it does not matter."""


def fresh_path(path: Path) -> Path:
    """Where a new content of `path` is written. One name is enough: only the owner of the lock writes there."""
    return path.with_name(path.name + ".new")


class LockedFile:
    """An open file and its lock."""

    def __init__(self, path: Path, file: int, files: Files) -> None:
        self.path: Path = path
        self.size: int = files.size(file)
        """Bytes that are on the disk."""
        self._file = file
        self._files = files
        self._generation = generation()
        self._is_torn = False
        self._is_renamed = False
        self.is_closed: bool = False

    @classmethod
    def take(cls, path: Path, files: Files) -> LockedFile | None:
        """Open and lock a file, made new if it is not there. None when another has the lock."""
        files.make_folder(path.parent)
        for _ in range(_TRIES):
            file = files.open(path)
            try:
                if not files.lock(file):
                    clock.sleep(_PAUSE)  # flock has no wait with a limit; see _PAUSE
                elif files.is_at(file, path):  # else a compaction has put another in its place meanwhile
                    taken, file = cls(path, file, files), -1
                    return taken
            finally:
                if file != -1:
                    files.close(file)
        return None

    def lines(self) -> Iterator[bytes]:
        return self._files.lines(self._file)

    def append(self, data: bytes) -> None:
        """Put this on the disk, or raise OSError and leave the file as it was."""
        self._mend()
        self._check()
        try:
            self._write(self._file, data)
            self._files.sync(self._file)
        except BaseException:
            self._is_torn = True
            try:
                self._mend()
            except OSError:
                pass  # tried again before the next write
            raise
        self.size += len(data)

    def cut(self, size: int) -> None:
        """Forget all after the first `size` bytes."""
        self.size = size
        self._is_torn = True
        self._mend()

    def sync_name(self) -> None:
        """Return when the name of the file is on the disk."""
        self._files.sync_folder(self.path.parent)

    def replace(self, lines: Iterable[bytes]) -> int:
        """Exchange the content for these lines in one step, or raise OSError and leave it as it was.

        Returns how many they were.
        """
        self._mend()
        self._check()
        fresh = fresh_path(self.path)
        file = self._files.open(fresh, empty=True)
        try:
            count, size = self._fill(file, lines)
            self._files.replace(fresh, self.path)
        except BaseException:
            self._files.close(file)
            self._files.remove(fresh)
            raise
        self._file, file = file, self._file
        self.size = size
        self._is_renamed = True
        self._files.close(file)
        self._mend()
        return count

    def close(self) -> None:
        """Give up the lock. Twice is fine."""
        if not self.is_closed:
            self.is_closed = True
            if self._generation == generation():  # else it was closed when this process was forked
                self._files.close(self._file)

    def __del__(self) -> None:
        if not getattr(self, "is_closed", True) and self._generation == generation():
            warnings.warn(f"unclosed journal {self.path}", ResourceWarning, stacklevel=2, source=self)
            self.close()

    def _fill(self, file: int, lines: Iterable[bytes]) -> tuple[int, int]:
        count = size = 0
        rest = iter(lines)
        while some := list(islice(rest, _AT_ONCE)):
            data = b"".join(some)
            self._write(file, data)
            count += len(some)
            size += len(data)
        self._files.sync(file)
        if not self._files.lock(file):
            raise OSError(errno.EWOULDBLOCK, os.strerror(errno.EWOULDBLOCK), str(fresh_path(self.path)))
        return count, size

    def _write(self, file: int, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            written = self._files.write(file, rest)
            if written <= 0:
                raise OSError(errno.EIO, "nothing was written", str(self.path))
            rest = rest[written:]

    def _check(self) -> None:
        """Is it still the file of this name, and as long as we left it? What goes elsewhere is not remembered."""
        if not self._files.is_at(self._file, self.path):
            raise OSError(errno.ESTALE, "it was deleted or replaced by somebody else", str(self.path))
        if self._files.size(self._file) != self.size:
            raise OSError(errno.ESTALE, "somebody else wrote to it, or cut it", str(self.path))

    def _mend(self) -> None:
        """Undo what failed, before anything else is done."""
        if self._is_torn:
            self._files.truncate(self._file, self.size)
            self._is_torn = False
        if self._is_renamed:
            self._files.sync_folder(self.path.parent)
            self._is_renamed = False
