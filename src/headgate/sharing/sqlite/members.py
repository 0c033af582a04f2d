"""The members of a `SqliteStore`: who is there, who has gone, and how one wakes another.

Each member has a file `<id>.lock` in the directory of the members, which it keeps locked with flock for as long as it
lives. The lock is the truth: the kernel frees it when the process has ended, however that happened, and not while the
process is merely stopped. No file, or a lock that can be taken, means that the member is gone for ever, because an id
is never used twice.

The keeper of a member's workers may hold the same open file (`core.kept_locks`). Then a member that was killed is gone
when its last worker has ended, at most 2 s later.

Locks tell nobody when they become free, so members are also connected with each other, by Unix sockets `<id>.sock` in
the same directory. The end of a connection says: look at the lock of that member. A frame on it says: listeners of this
key, look. Both are only hints. Whatever is lost, garbage or missing costs time until the next heartbeat, nothing else.

A new member locks its file, listens, and then connects to everybody who is there; so of two that come at once, at least
one finds the other. A frame is its length in four bytes and the key; the first frame on a connection is the id of who
made it. An empty frame stands for all keys.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import re
import socket
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Final

from headgate.core.clock import clock
from headgate.core.files import Files
from headgate.core.kept_locks import KeptLocks
from headgate.errors import InvalidArgument
from headgate.sharing.fork_guard import ForkGuard

_log = logging.getLogger("headgate.stores")

_ID: Final = re.compile(r"[0-9a-f]{12}")
_LONGEST_FRAME: Final = 4096
"""Bytes. A key that is longer is told as an empty frame; a frame that is longer is garbage."""
_LONGEST_ADDRESS: Final = 100
"""Bytes that the path of a Unix socket may have on every system."""
_MANY_GONE: Final = 10_000
_FIRST_PAUSE: Final = 0.001
"""Seconds. The kernel closes the files of a process one after the other: the lock may be free only after this."""
_LONGEST_PAUSE: Final = 0.032
"""Seconds between two looks at the lock of a member that does not listen. A look takes 10 us."""


class Members:
    """This process among the members of a store. All methods are called in the thread of the store."""

    def __init__(
        self,
        folder: Path,
        heartbeat: float,
        wake: Callable[[str | None], None],
        kept_locks: Callable[[], Sequence[KeptLocks]] = tuple,
    ) -> None:
        """`wake` is called with a key whose listeners are to look, or with None for all. It must not raise.

        `kept_locks` tells who is to hold the lock of this member too.
        """
        self.id: str = ""
        """The id of this member; "" before `join`."""
        self._path = folder
        self._heartbeat = heartbeat
        self._wake = wake
        self._kept_locks = kept_locks
        self._files = Files()
        self._folder = self._lock = -1
        self._loop: asyncio.AbstractEventLoop | None = None
        self._server: socket.socket | None = None
        self._connections: set[_Connection] = set()
        self._connected: dict[str, _Connection] = {}
        self._gone: set[str] = set()
        self._tried: set[str] = set()  # those that were asked for a connection since the last heartbeat
        self._suspected: set[str] = set()  # those whose locks are looked at again and again
        self._guard = ForkGuard(self._forked)

    # -- being a member ------------------------------------------------------------------------------------------------

    def join(self, loop: asyncio.AbstractEventLoop) -> None:
        """Take part under a new id. OSError or InvalidArgument if the directory cannot be used."""
        self._loop = loop
        self._files.make_folder(self._path)
        try:
            with self._guard:
                self._folder = os.open(self._path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            self._check_owner()
            self._take_id()
            self._listen()
            self.look()
        except BaseException:
            self.leave()
            raise

    def share_lock(self) -> None:
        """Have all who are to hold the lock of this member hold it."""
        if self._lock != -1:
            for locks in self._kept_locks():
                locks.add(self._lock)

    def leave(self, *, ends: bool = False) -> None:
        """Be gone. Twice is fine. `ends` says that the program ends: then its workers, if there are any, go first."""
        if self._lock != -1:
            lock, self._lock = self._lock, -1
            holders = self._kept_locks()
            if not (ends and any(locks.are_kept for locks in holders)):
                for locks in holders:
                    locks.remove(lock)
                self._remove(self.id)
                self._files.close(lock)  # before the sockets: who sees their end finds the lock free
        for connection in list(self._connections):
            self._drop(connection)
        server, self._server = self._server, None
        if server is not None and self._loop is not None:
            self._loop.remove_reader(server)
            with self._guard:
                server.close()
        with self._guard:
            folder, self._folder = self._folder, -1
            if folder != -1:
                os.close(folder)
        self._connected.clear()
        self._tried.clear()

    def is_still_there(self) -> bool:
        """Is the lock of this member still what others find? Not if somebody has deleted it."""
        try:
            return self._lock != -1 and self._files.is_at(self._lock, self._path / f"{self.id}.lock")
        except NotADirectoryError:
            return False

    def _check_owner(self) -> None:
        """Refuse a directory in which others could delete locks, and so take what this process holds."""
        found = os.fstat(self._folder)
        if found.st_uid != os.geteuid() or found.st_mode & 0o022:
            raise InvalidArgument(
                f"{self._path} belongs to another user, or others may write to it",
                remedy="Delete that directory, or use a path in a directory that is yours alone.",
            )

    def _take_id(self) -> None:
        while True:
            member = clock.token()[:12]
            path = self._path / f"{member}.lock"
            lock = self._files.open(path)
            try:
                # Somebody who looked between the two takes it for that of a dead member, and removes it.
                is_ours = self._files.lock(lock) and self._files.is_at(lock, path)
                if is_ours:
                    os.write(lock, f"{os.getpid()} {socket.gethostname()}\n".encode())  # for people
            except BaseException:  # the directory was replaced, the disk is full
                self._files.close(lock)
                raise
            if is_ours:
                break
            self._files.close(lock)
        self.id, self._lock = member, lock
        self.share_lock()

    def _listen(self) -> None:
        """Let others connect. Where that is impossible this member looks at every heartbeat only, and so do others."""
        assert self._loop is not None
        try:
            with self._guard:
                server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                server.setblocking(False)
                self._server = server
            server.bind(self._address(self.id))
            os.chmod(self._address(self.id), 0o600)
            server.listen(128)
        except OSError as error:
            _log.info("%s: members cannot listen there (%s): they look every %g s", self._path, error, self._heartbeat)
            unused, self._server = self._server, None
            if unused is not None:
                unused.close()
        else:
            self._loop.add_reader(server, self._accept)

    def _address(self, member: str) -> str:
        """Where a member listens. The kernel takes only short paths; Linux has a short name for an open directory."""
        path = os.fspath(self._path / f"{member}.sock")
        if len(os.fsencode(path)) <= _LONGEST_ADDRESS:
            return path
        if sys.platform != "linux":
            raise OSError(f"the path {path} is too long for a Unix socket")
        return f"/proc/self/fd/{self._folder}/{member}.sock"

    # -- who is gone ---------------------------------------------------------------------------------------------------

    def is_gone(self, member: str) -> bool:
        """Is the member of this id gone? Asks no file where a connection tells."""
        if member in self._connected or member == self.id:
            return False
        if member in self._gone:
            return True
        if not self._is_alive(member):
            self._bury(member)
            return True
        if member not in self._tried:
            self._tried.add(member)
            self._soon(lambda: self._connect(member))
        return False

    def look(self) -> None:
        """Find out about everybody who is or was there; connect to those who live. Called at every heartbeat."""
        if self._server is not None and self._loop is not None:
            self._loop.add_reader(self._server, self._accept)  # it is off after an error, see there
        self._tried.clear()
        for member in self._listed():
            if self._is_alive(member):
                self._connect(member)
            else:
                self._remove(member)
                if (connection := self._connected.pop(member, None)) is not None:
                    self._drop(connection)
                self._bury(member)

    def living(self) -> list[str]:
        """All members that live, this one too. May be called before `join`."""
        is_member = self._folder != -1
        try:
            if not is_member:
                self._folder = os.open(self._path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            others = [member for member in self._listed() if self._is_alive(member)]
            return [self.id, *others] if is_member else others
        except FileNotFoundError:
            return []
        finally:
            if not is_member and self._folder != -1:
                os.close(self._folder)
                self._folder = -1

    def _listed(self) -> set[str]:
        """All others that have a file in the directory. What has another name is none of ours."""
        names = (name.partition(".") for name in os.listdir(self._path))
        found = {member for member, _, ending in names if _ID.fullmatch(member) and ending in ("lock", "sock")}
        return found - {self.id}

    def _is_alive(self, member: str) -> bool:
        """Is the lock of this member held? If not, remove its files, so that the directory does not grow."""
        if not _ID.fullmatch(member):
            return False
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        try:
            file = os.open(f"{member}.lock", flags, dir_fd=self._folder)
        except FileNotFoundError:
            return False
        except OSError:
            return True  # not known now. A budget that is too small for a while is better than one that is too large
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared: two who look at once do not see each other
            self._remove(member)
        except OSError:
            return True
        finally:
            os.close(file)
        return False

    def _remove(self, member: str) -> None:
        for ending in ("sock", "lock"):
            try:
                os.unlink(f"{member}.{ending}", dir_fd=self._folder)
            except OSError:
                pass

    def _bury(self, member: str) -> None:
        """Note that a member is gone, and let everybody here look for what it left."""
        if member not in self._gone:
            if len(self._gone) >= _MANY_GONE:
                self._gone.clear()  # that they have no file says the same
            self._gone.add(member)
            self._soon(lambda: self._wake(None))

    def _suspect(self, member: str) -> None:
        """Check the lock of a member that no longer listens, until it is gone or connected again."""
        if member not in self._suspected:
            self._suspected.add(member)
            self._look_at(member, 0)

    def _look_at(self, member: str, looks: int) -> None:
        if member not in self._connected and member not in self._gone and self._lock != -1:
            if not self._is_alive(member):
                self._bury(member)
            elif looks * _LONGEST_PAUSE < self._heartbeat and self._loop is not None:
                # Nothing tells when a lock is freed, and its workers may hold it for 2 s. After so many looks the
                # heartbeat looks. It also connects again, and this does not: two that cannot agree would connect and
                # part without end.
                pause = min(_FIRST_PAUSE * 2 ** min(looks, 9), _LONGEST_PAUSE)
                self._loop.call_later(pause, self._look_at, member, looks + 1)
                return
        self._suspected.discard(member)

    # -- connections ---------------------------------------------------------------------------------------------------

    def wake(self, members: Iterable[str], key: str) -> None:
        """Tell these members that listeners of a key are to look."""
        frame = _frame(key)
        for member in members:
            if member == self.id or member in self._gone:
                continue
            if _ID.fullmatch(member) and self._connect(member):
                self._send(self._connected[member], frame)

    def _connect(self, member: str) -> bool:
        """Connect to a member, unless that is done; False if it does not listen."""
        if member in self._connected:
            return True
        if self._lock == -1:
            return False  # it has left
        connection = None
        try:
            with self._guard:
                connection = _Connection(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM), member)
                self._connections.add(connection)
            connection.socket.setblocking(False)
            connection.socket.connect(self._address(member))
        except OSError as error:  # not there yet, or no more, or too busy
            if connection is not None:
                self._close(connection)
            if isinstance(error, ConnectionRefusedError):
                self._soon(lambda: self._suspect(member))  # it was killed
            return False
        self._connected[member] = connection
        self._read_from(connection)
        self._send(connection, _frame(self.id))
        return True

    def _accept(self) -> None:
        while self._server is not None and self._loop is not None:
            try:
                with self._guard:
                    accepted, _ = self._server.accept()
                    connection = _Connection(accepted, None)
                    self._connections.add(connection)
            except BlockingIOError:
                return
            except OSError:  # no more descriptors: it would be asked again at once, for ever. See `look`
                self._loop.remove_reader(self._server)
                return
            accepted.setblocking(False)
            self._read_from(connection)

    def _read_from(self, connection: _Connection) -> None:
        if self._loop is not None:
            self._loop.add_reader(connection.socket, self._readable, connection)

    def _readable(self, connection: _Connection) -> None:
        try:
            data = connection.socket.recv(65536)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        frames = connection.frames(data) if data else None
        if frames is None:
            self._ended(connection)
            return
        if frames and connection.member is None:
            member = frames.pop(0).decode("latin-1")
            if not self._is_alive(member):
                self._drop(connection)  # no member has this id
                return
            connection.member = member
            self._connected[member] = connection
        for key in dict.fromkeys(frames):
            self._wake(_key(key))

    def _ended(self, connection: _Connection) -> None:
        member = connection.member
        self._drop(connection)
        if member is not None and self._connected.get(member) is connection:
            del self._connected[member]
            self._suspect(member)

    def _send(self, connection: _Connection, frame: bytes) -> None:
        """Send without waiting. One who does not read (it is stopped) is told once to look at everything."""
        if connection.unsent:
            connection.has_missed = True
            return
        try:
            sent = connection.socket.send(frame)
        except BlockingIOError:
            sent = 0
        except OSError:
            self._soon(lambda: self._ended(connection))
            return
        if sent < len(frame) and self._loop is not None:
            connection.unsent = frame[sent:]
            self._loop.add_writer(connection.socket, self._writable, connection)

    def _writable(self, connection: _Connection) -> None:
        if self._loop is None:
            return
        self._loop.remove_writer(connection.socket)
        frame, connection.unsent = connection.unsent, b""
        if connection.has_missed:
            connection.has_missed = False
            frame += _frame("")
        self._send(connection, frame)

    def _drop(self, connection: _Connection) -> None:
        if self._loop is not None and connection in self._connections:
            self._loop.remove_reader(connection.socket)
            self._loop.remove_writer(connection.socket)
        self._close(connection)

    def _close(self, connection: _Connection) -> None:
        with self._guard:
            self._connections.discard(connection)
            connection.socket.close()

    def _soon(self, callback: Callable[[], object]) -> None:
        """After the transaction that may be open now."""
        if self._loop is not None:
            self._loop.call_soon(callback)

    def _forked(self) -> None:
        """In a forked child: close its copies, or the end of the parent would not be seen while the child lives."""
        for connection in self._connections:
            connection.socket.close()
        if self._server is not None:
            self._server.close()
        if self._folder != -1:
            os.close(self._folder)
        self._connections, self._connected = set(), {}
        self._gone, self._tried, self._suspected = set(), set(), set()
        self._server = self._loop = None
        self._folder = self._lock = -1  # `Files` has closed the lock
        self.id = ""


class _Connection:
    """A connection with another member."""

    __slots__ = ("has_missed", "member", "received", "socket", "unsent")

    def __init__(self, connected: socket.socket, member: str | None) -> None:
        self.socket: socket.socket = connected
        self.member: str | None = member
        """None as long as it has not said its id."""
        self.received: bytes = b""
        self.unsent: bytes = b""
        self.has_missed: bool = False

    def frames(self, data: bytes) -> list[bytes] | None:
        """The frames that are complete with this data; None if it is garbage."""
        data = self.received + data
        frames, start = [], 0
        while len(data) - start >= 4:
            size = int.from_bytes(data[start : start + 4], "big")
            if size > _LONGEST_FRAME:
                return None
            if len(data) - start - 4 < size:
                break
            frames.append(data[start + 4 : start + 4 + size])
            start += 4 + size
        self.received = data[start:]
        return frames


def _frame(key: str) -> bytes:
    data = key.encode("utf-8", "surrogatepass")
    if len(data) > _LONGEST_FRAME:
        data = b""
    return len(data).to_bytes(4, "big") + data


def _key(frame: bytes) -> str | None:
    """The key that a frame names; None, for all of them, if it names none."""
    try:
        return frame.decode("utf-8", "surrogatepass") or None
    except UnicodeDecodeError:
        return None
