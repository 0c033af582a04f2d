"""Directories watched by Linux' inotify, through ctypes.

All watches of one event loop share one inotify instance, because a user has only 128 of them by default. Where there is
no inotify, or no instance or watch is left, `watch` returns None, and the caller looks from time to time instead.
"""

from __future__ import annotations

import asyncio
import os
import struct
import sys
import threading
from collections.abc import Callable
from typing import Any, Final

CLOSE_WRITE: Final = 0x8
MOVED_FROM: Final = 0x40
MOVED_TO: Final = 0x80
DELETE: Final = 0x200
DELETE_SELF: Final = 0x400
MOVE_SELF: Final = 0x800
OVERFLOW: Final = 0x4000
IGNORED: Final = 0x8000
_ONLYDIR: Final = 0x01000000
_DONT_FOLLOW: Final = 0x02000000

LOST: Final = DELETE_SELF | MOVE_SELF | IGNORED
"""The directory is no longer where it was, and the watch is over or worthless."""
_MASK: Final = CLOSE_WRITE | MOVED_FROM | MOVED_TO | DELETE | DELETE_SELF | MOVE_SELF | _ONLYDIR | _DONT_FOLLOW
_HEADER: Final = struct.Struct("iIII")
_BUFFER: Final = 64 * 1024

Changed = Callable[[str, int], None]
"""Called on the loop with the name of a file in the directory ("" for the directory itself), and what happened."""


class Watch:
    """One directory that is watched for one caller, until it is closed."""

    def __init__(self, instance: _Instance, number: int, changed: Changed) -> None:
        self.changed = changed
        self._instance = instance
        self._number = number

    def close(self) -> None:
        """Stop watching, and free the descriptor if no other watch of the loop needs it. Twice is fine."""
        self._instance.leave(self._number, self)


def watch(path: str, changed: Changed) -> Watch | None:
    """Watch a directory from the running event loop. None: that is not possible here. OSError: no such directory."""
    instance = _instance_of(asyncio.get_running_loop())
    return None if instance is None else instance.join(path, changed)


class _Instance:
    """The inotify instance of one event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, libc: Any, file: int) -> None:
        self.loop = loop
        self._libc = libc
        self._file = file
        self._watches: dict[int, list[Watch]] = {}
        loop.add_reader(file, self._read)

    def join(self, path: str, changed: Changed) -> Watch | None:
        import ctypes

        number = self._libc.inotify_add_watch(self._file, os.fsencode(path), _MASK)
        if number < 0:
            error = ctypes.get_errno()
            self._close_if_unused()
            if error in (2, 20, 40):  # ENOENT, ENOTDIR, ELOOP
                raise OSError(error, os.strerror(error), path)
            return None  # as many watches as the user may have
        made = Watch(self, number, changed)
        self._watches.setdefault(number, []).append(made)
        return made

    def leave(self, number: int, watch: Watch) -> None:
        watches = self._watches.get(number, [])
        if watch in watches:
            watches.remove(watch)
            if not watches:
                del self._watches[number]
                self._libc.inotify_rm_watch(self._file, number)
            self._close_if_unused()

    def close(self) -> None:
        with _lock:
            if _instances.get(self.loop) is self:
                del _instances[self.loop]
        self._watches.clear()
        file, self._file = self._file, -1
        if file >= 0:
            try:
                self.loop.remove_reader(file)
            except RuntimeError:  # the loop is closed
                pass
            os.close(file)

    def _close_if_unused(self) -> None:
        if not self._watches:
            self.close()

    def _read(self) -> None:
        try:
            data = os.read(self._file, _BUFFER)
        except (BlockingIOError, InterruptedError):
            return
        at = 0
        while at < len(data):
            number, mask, _, length = _HEADER.unpack_from(data, at)
            at += _HEADER.size
            name = os.fsdecode(data[at : at + length].rstrip(b"\0"))
            at += length
            self._tell(number, name, mask)

    def _tell(self, number: int, name: str, mask: int) -> None:
        if mask & OVERFLOW:  # of all watches
            told = [watch for watches in self._watches.values() for watch in watches]
        elif mask & IGNORED:  # the kernel has ended this watch
            told = self._watches.pop(number, [])
        else:
            told = list(self._watches.get(number, ()))
        for watch in told:
            watch.changed(name, mask)
        self._close_if_unused()


_lock = threading.Lock()
_instances: dict[asyncio.AbstractEventLoop, _Instance] = {}


def _instance_of(loop: asyncio.AbstractEventLoop) -> _Instance | None:
    with _lock:
        found = _instances.get(loop)
        closed = [instance for instance in _instances.values() if instance.loop.is_closed()]
    for instance in closed:  # whoever watched there did not end its subscription
        instance.close()
    if found is not None:
        return found
    if not sys.platform.startswith("linux"):
        return None
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "inotify_init1"):
        return None
    file = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
    if file < 0:
        return None  # as many instances as the user may have
    try:
        made = _Instance(loop, libc, file)
    except NotImplementedError:  # a loop that cannot wait for descriptors
        os.close(file)
        return None
    with _lock:
        _instances[loop] = made
    return made
