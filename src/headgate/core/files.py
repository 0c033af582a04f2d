"""The file operations that journals and shared stores need, in one small class.

A test gives a store another `Files`, whose disk is full, forgets what was not
synced, or fails when it is asked to sync.

Locks and forks
---------------
A lock of flock(2) belongs to the open file, not to the process, and a forked child shares the open file: if the parent
dies, the child would go on holding the lock of a journal that it knows nothing of. So every descriptor opened here is
closed in children as they are forked. (A child that execs loses them anyway.) A fork waits until no other thread is
between opening a file and having noted it here. For the same reason a lock that is given up is given up by name: to
close is not enough while a child that has not reached its exec still shares the file.
"""

from __future__ import annotations

import errno
import fcntl
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from headgate.errors import StoreWriteFailed

_opening = threading.RLock()
_descriptors: set[int] = set()
_generation = 0


def generation() -> int:
    """Return a number that differs in a forked child: files that were opened before are closed there."""
    return _generation


def _forked() -> None:
    global _opening, _generation
    _opening = threading.RLock()
    _generation += 1
    for descriptor in _descriptors:
        try:
            os.close(descriptor)
        except OSError:
            pass
    _descriptors.clear()


os.register_at_fork(
    before=lambda: _opening.acquire(),
    after_in_parent=lambda: _opening.release(),
    after_in_child=_forked,
)


class Files:
    """Files on the disk. All methods raise OSError, and all but `make_folder` and `lines` make one system call."""

    def make_folder(self, folder: Path) -> None:
        """Make it and those above it, for this user alone, so that a power cut does not unmake them."""
        if folder.is_dir():
            return
        self.make_folder(folder.parent)
        try:
            folder.mkdir(0o700)
        except FileExistsError as error:
            if not folder.is_dir():
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder)) from error
        self.sync_folder(folder.parent)

    def open(self, path: Path, *, empty: bool = False) -> int:
        """Open to read and append, made for this user alone if it is not there. With `empty`, forget its content."""
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | (os.O_TRUNC if empty else 0)
        with _opening:
            file = os.open(path, flags, 0o600)
            _descriptors.add(file)
        return file

    def close(self, file: int) -> None:
        """Close it, and with it give up its lock."""
        with _opening:
            _descriptors.discard(file)
            try:
                fcntl.flock(file, fcntl.LOCK_UN)
            finally:
                os.close(file)

    def lock(self, file: int) -> bool:
        """Lock it against all others; False when another has it."""
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                return False
            raise
        return True

    def is_at(self, file: int, path: Path) -> bool:
        """Is this open file the one that `path` names now?"""
        try:
            return os.path.samestat(os.fstat(file), os.stat(path))
        except FileNotFoundError:
            return False

    def size(self, file: int) -> int:
        return os.fstat(file).st_size

    def lines(self, file: int) -> Iterator[bytes]:
        """Yield all lines of a file, each with its newline."""
        with open(file, "rb", closefd=False) as reader:  # no new descriptor, which a child would inherit
            reader.seek(0)
            yield from reader

    def write(self, file: int, data: memoryview) -> int:
        """Append; returns how much of it."""
        return os.write(file, data)

    def sync(self, file: int) -> None:
        """Return when all that was written is on the disk."""
        if sys.platform == "darwin":
            fcntl.fcntl(file, fcntl.F_FULLFSYNC)  # its fsync stops at the drive's own memory
        else:
            os.fdatasync(file)

    def truncate(self, file: int, size: int) -> None:
        os.ftruncate(file, size)

    def replace(self, source: Path, target: Path) -> None:
        """Let `target` name the file that `source` names, in one step."""
        os.replace(source, target)

    def remove(self, path: Path) -> None:
        """Remove a file, if it is there."""
        path.unlink(missing_ok=True)

    def sync_folder(self, folder: Path) -> None:
        """Return when the names in it are on the disk."""
        file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(file)
        finally:
            os.close(file)


def write_failed(path: object, cause: Exception) -> StoreWriteFailed:
    """Make the error for a file that could not be written."""
    text, number = (cause.strerror, cause.errno) if isinstance(cause, OSError) else (None, None)
    is_full = number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    remedy = None if is_full else "Check the permissions and the disk, or use another path."
    error = StoreWriteFailed(f"{path} could not be written: {text or cause}", remedy=remedy)
    error.__cause__ = cause
    return error
