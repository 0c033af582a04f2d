"""The files of `LocalDiscovery`: how they are written, read, locked and cleared away.

    $XDG_RUNTIME_DIR/headgate/                   else <tmp>/headgate-<uid>/: 0700 and ours, in a directory in which no
                                                 other user can replace it; else it is refused
      workers-<namespace>-<digest>/              one for each namespace; locked while it is changed
        <digest of a worker's uid>.json          the record of a worker, replaced as a whole; it names its holder
        <token>.live                             a holder: open and locked as long as its publisher lives

A worker is there if its record can be read and its holder is locked. The kernel gives up a lock when the process ends,
however it ends, and closes the file, which inotify reports. So nobody has to send heartbeats. A record names its holder
instead of being locked itself, because it is replaced when another process announces the worker again: the process that
announced it first is still the one whose end counts.

A holder is locked before its name is in any record. Readers only try a shared lock, so they never disturb each other,
and nobody but its publisher ever locks it exclusively.

The lock of the directory is flock(2) on the directory itself. It is held while records are changed, for microseconds.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import stat
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Final, NamedTuple

from headgate.core.clock import clock
from headgate.discovery.namespaces import digest
from headgate.discovery.records import MAX_BYTES, decoded, encoded, from_record, to_record
from headgate.errors import DiscoveryFailed, InvalidArgument
from headgate.workers.model import WorkerMetadata

PREFIX: Final = "workers-"
RECORD: Final = re.compile(r"([0-9a-f]{32})\.json")
HOLDER: Final = re.compile(r"([0-9a-f]{32})\.live")
_UNFINISHED: Final = ".new"
_MOST: Final = MAX_BYTES + 1024  # bytes of a record with what is added to it here
_OPEN: Final = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # of a FIFO that somebody put there, opening would wait
_ABSENT: Final = (errno.ENOENT, errno.ELOOP, errno.EACCES, errno.EISDIR, errno.ENXIO, errno.ENOTDIR)
"""There is no file of ours with this name. ELOOP: it is a symbolic link; ENXIO: a socket."""


class Entry(NamedTuple):
    """The record of a worker that is there."""

    metadata: WorkerMetadata
    holder: str
    announcement: str
    """Differs at each announcement, so that a repeated one is seen although nothing else changed."""


def runtime_directory() -> str:
    """Return the directory for what runs now, made if it is not there, or raise `DiscoveryFailed`."""
    given = os.environ.get("XDG_RUNTIME_DIR", "")
    if os.path.isabs(given) and os.path.isdir(given):
        _check_above("XDG_RUNTIME_DIR", given)
        return private_directory(os.path.join(given, "headgate"))
    tmp = os.environ.get("TMPDIR", "")
    if os.path.isabs(tmp):
        _check_above("TMPDIR", tmp)
    else:
        tmp = "/tmp"  # not checked: where its owner is another user, as in some sandboxes, all is that user's
    return private_directory(os.path.join(tmp, f"headgate-{os.getuid()}"))


def private_directory(path: str) -> str:
    """Return a directory of this user alone, made if it is not there, or raise `DiscoveryFailed`."""
    try:
        try:
            os.mkdir(path, 0o700)
        except FileExistsError:
            pass
        about = os.lstat(path)
    except OSError as error:
        raise DiscoveryFailed(
            f"there is no directory for what runs now: {path}: {error.strerror}",
            remedy="Set XDG_RUNTIME_DIR to a directory of yours that can be written to.",
        ) from error
    _check_private(path, about)
    return path


def _check_above(variable: str, path: str) -> None:
    """Refuse a directory whose entries another user can replace. Of root, or sticky as /tmp is, it is fine."""
    try:
        about = os.stat(path)
    except OSError:
        return  # whoever makes a directory in it says why that cannot be done
    if about.st_uid not in (os.getuid(), 0):
        wrong = f"belongs to user {about.st_uid}, and this is user {os.getuid()}"
    elif about.st_mode & 0o022 and not about.st_mode & stat.S_ISVTX:
        wrong = f"has mode {stat.S_IMODE(about.st_mode):04o}, so others can write to it"
    else:
        return
    raise DiscoveryFailed(
        f"{variable} is {path}, which {wrong}: they could take the place of what runs there",
        remedy=f"Set {variable} to a directory of this user with mode 0700, or unset it.",
    )


def _check_private(path: str, about: os.stat_result) -> None:
    if stat.S_ISLNK(about.st_mode):
        wrong = "is a symbolic link"
    elif not stat.S_ISDIR(about.st_mode):
        wrong = "is no directory"
    elif about.st_uid != os.getuid():
        wrong = f"belongs to user {about.st_uid}"
    elif about.st_mode & 0o077:
        wrong = f"has mode {stat.S_IMODE(about.st_mode):04o}, so others can enter it"
    else:
        return
    raise DiscoveryFailed(
        f"{path} {wrong}, and what runs is only told where no other user can change it",
        remedy="Remove it, or give it to this user with mode 0700, or set XDG_RUNTIME_DIR to a directory of yours.",
    )


class Folder:
    """The directory of one namespace. All methods are quick; those that take `file` need it open, see `opened`."""

    def __init__(self, base: str, name: str) -> None:
        self.base = base
        self.name = name
        self.path: str = os.path.join(base, name)

    @classmethod
    def of(cls, namespace: str) -> Folder:
        """Return the folder of a namespace in the runtime directory, or raise `DiscoveryFailed`."""
        readable = re.sub(r"[^A-Za-z0-9.-]", "-", namespace)[:40]
        return cls(runtime_directory(), f"{PREFIX}{readable}-{digest(namespace)}")

    def make(self) -> None:
        """Make the directory if it is not there."""
        for _ in range(2):
            try:
                os.mkdir(self.path, 0o700)
            except FileExistsError:
                pass
            except FileNotFoundError:  # the directory above was removed
                runtime_directory()
                continue
            return

    @contextmanager
    def opened(self) -> Iterator[int]:
        """Open the directory, or raise FileNotFoundError; a symbolic link is refused with `DiscoveryFailed`."""
        file = self._open()
        try:
            yield file
        finally:
            held.close(file)

    @contextmanager
    def tried(self, *, make: bool = False) -> Iterator[int | None]:
        """Open and lock the directory. None: another has the lock, or the directory went while we took it."""
        if make:
            self.make()
        try:
            file = self._open()
        except FileNotFoundError:
            if not make:
                raise
            yield None
            return
        try:
            if not _locked(file, fcntl.LOCK_EX):
                yield None
                return
            try:
                yield file if self._is_at(file) else None
            finally:
                fcntl.flock(file, fcntl.LOCK_UN)  # closing is not enough while a child that was forked has it too
        finally:
            held.close(file)

    def _open(self) -> int:
        try:
            file = held.open(self.path, os.O_RDONLY | os.O_DIRECTORY | _OPEN)
        except NotADirectoryError as error:  # also a symbolic link
            raise DiscoveryFailed(
                f"{self.path} is no directory of ours, but a file or a symbolic link", remedy="Remove it."
            ) from error
        try:
            _check_private(self.path, os.fstat(file))
        except BaseException:
            held.close(file)
            raise
        return file

    def _is_at(self, file: int) -> bool:
        try:
            return os.path.samestat(os.fstat(file), os.lstat(self.path))
        except OSError:
            return False

    def tidy(self, *, leave: bool = False) -> None:
        """Remove what publishers that died left, if the lock is free. With `leave`, an empty directory too."""
        try:
            with self.tried() as file:
                if file is not None:
                    clear_away(file)
                    if leave:
                        os.rmdir(self.path)
        except (OSError, DiscoveryFailed):
            pass  # it is gone, or not empty, or not ours


def sweep(base: str) -> None:
    """Remove the directories of namespaces that nobody uses any more."""
    try:
        names = [name for name in os.listdir(base) if name.startswith(PREFIX)]
    except OSError:
        return
    for name in names:
        Folder(base, name).tidy(leave=True)


def clear_away(file: int) -> None:
    """Remove records without a live holder, holders that nobody has locked, and files that were never finished."""
    names = os.listdir(file)
    for name in names:
        if name.endswith(_UNFINISHED) or ((found := RECORD.fullmatch(name)) and look(file, found[1]) is None):
            remove(file, name)
    for name in names:
        if HOLDER.fullmatch(name) and not is_held(file, name):
            remove(file, name)


def key_of(uid: str) -> str:
    """Return the first part of the name of a worker's record."""
    return digest(uid)


def keys(file: int) -> set[str]:
    """Return the keys of all records in a directory, those of dead workers too."""
    return {found[1] for name in os.listdir(file) if (found := RECORD.fullmatch(name))}


def look(file: int, key: str) -> Entry | None:
    """Return the record of a worker. None: there is none, it is garbage, or its publisher has died.

    OSError: this process cannot look now, for example because it has too many open files.
    """
    try:
        record = decoded(_read(file, f"{key}.json"), _MOST)
        holder, announcement = record["holder"], record["announcement"]
        if not isinstance(announcement, str) or not isinstance(holder, str) or not HOLDER.fullmatch(holder):
            return None
        metadata = from_record(record["worker"])
    except (InvalidArgument, KeyError):
        return None
    except OSError as error:
        if error.errno in _ABSENT:
            return None
        raise
    if key_of(metadata.uid) != key or not is_held(file, holder):
        return None
    return Entry(metadata, holder, announcement)


def is_held(file: int, holder: str) -> bool:
    """Whether the publisher with this holder lives."""
    try:
        probe = held.open(holder, os.O_RDONLY | _OPEN, file)
    except OSError as error:
        if error.errno in _ABSENT:
            return False
        raise
    try:
        return stat.S_ISREG(os.fstat(probe).st_mode) and not _locked(probe, fcntl.LOCK_SH)
    finally:
        held.close(probe)


def write(file: int, metadata: WorkerMetadata, holder: str) -> None:
    """Put the record of a worker into the directory, in place of the one that may be there."""
    data = {"worker": to_record(metadata), "holder": holder, "announcement": clock.token()}
    unfinished = clock.token() + _UNFINISHED
    made = held.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _OPEN, file)
    try:
        try:
            with open(made, "wb", closefd=False) as writer:
                writer.write(encoded(data, _MOST))
        finally:
            held.close(made)
        os.rename(unfinished, f"{key_of(metadata.uid)}.json", src_dir_fd=file, dst_dir_fd=file)
    except BaseException:
        remove(file, unfinished)
        raise


def remove(file: int, name: str) -> None:
    """Remove a file, if it is there and can be removed."""
    try:
        os.unlink(name, dir_fd=file)
    except OSError:
        pass


def remove_all(file: int, holder: str, uids: Iterable[str]) -> None:
    """Remove those of these workers that have this holder, and then the holder."""
    for uid in uids:
        try:
            record = decoded(_read(file, f"{key_of(uid)}.json"), _MOST)
        except (OSError, InvalidArgument):
            continue
        if record.get("holder") == holder:
            remove(file, f"{key_of(uid)}.json")
    remove(file, holder)


class Holder:
    """A file that is open for writing and locked until `release`, or until this process ends.

    With it the directory above is locked, shared: a locked directory is what `systemd-tmpfiles` spares when it removes
    old files from /tmp.
    """

    def __init__(self, file: int, base: str) -> None:
        self.name: str = f"{clock.token()}.live"
        self._generation = held.generation
        self._files: list[int] = []
        try:
            self._files.append(held.open(self.name, os.O_RDWR | os.O_CREAT | os.O_EXCL | _OPEN, file))
            if not _locked(self._files[0], fcntl.LOCK_EX):
                raise BlockingIOError(errno.EWOULDBLOCK, f"{self.name} was locked by another process")
            self._files.append(held.open(base, os.O_RDONLY | os.O_DIRECTORY | _OPEN))
            _locked(self._files[1], fcntl.LOCK_SH)  # if it fails, old files are being removed now, and this one is new
        except BaseException:
            if self._files:
                remove(file, self.name)
                self.release()
            raise

    @property
    def is_ours(self) -> bool:
        """False in a child that was forked after it was made: its descriptor is closed there."""
        return bool(self._files) and self._generation == held.generation

    def is_in(self, file: int) -> bool:
        """Whether it is still in this directory."""
        try:
            return self.is_ours and os.path.samestat(os.fstat(self._files[0]), os.lstat(self.name, dir_fd=file))
        except OSError:
            return False

    def release(self) -> None:
        """Give up the lock. For everybody who looks, its workers are gone. Twice is fine."""
        if self.is_ours:
            for file in self._files:
                fcntl.flock(file, fcntl.LOCK_UN)
                held.close(file)
        self._files = []


def _read(file: int, name: str) -> bytes:
    opened = held.open(name, os.O_RDONLY | _OPEN, file)
    try:
        about = os.fstat(opened)
        if not stat.S_ISREG(about.st_mode) or about.st_size > _MOST:
            raise InvalidArgument(f"{name} is no record")
        return os.read(opened, _MOST)
    finally:
        held.close(opened)


def _locked(file: int, how: int) -> bool:
    try:
        fcntl.flock(file, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


class _Descriptors:
    """The descriptors that this module has open. A forked child closes them.

    A lock of flock(2) belongs to the open file, which a forked child shares: as long as the child lives, the workers of
    a publisher that was killed would seem alive. (A child that execs loses the descriptors anyway.)
    """

    def __init__(self) -> None:
        self.generation: int = 0
        self._lock = threading.RLock()
        self._files: set[int] = set()
        os.register_at_fork(
            before=lambda: self._lock.acquire(),
            after_in_parent=lambda: self._lock.release(),
            after_in_child=self._forked,
        )

    def open(self, path: str, flags: int, folder: int | None = None) -> int:
        with self._lock:
            file = os.open(path, flags, 0o600, dir_fd=folder)
            self._files.add(file)
        return file

    def close(self, file: int) -> None:
        with self._lock:
            if file in self._files:
                self._files.discard(file)
                os.close(file)

    def _forked(self) -> None:
        self._lock = threading.RLock()
        self.generation += 1
        files, self._files = self._files, set()
        for file in files:
            try:
                os.close(file)
            except OSError:
                pass


held: Final = _Descriptors()
