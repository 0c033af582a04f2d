"""Where programs show themselves: Unix sockets of mode 0600 in the runtime directory.

    <runtime directory>/programs/          0700
      <pid>-<token>.sock                   0600; whoever can connect is this user, or root
      <pid>-<token>.unready                the same for the moment before it listens; it refuses connections

A socket that refuses connections was left by a program that was killed, and is removed by whoever finds it. So one gets
its name only when it listens. One that was left without that name is removed when it is old.
"""

from __future__ import annotations

import os
import re
import socket
import struct
import sys
from typing import Final

from headgate.core.clock import clock
from headgate.discovery.local_files import private_directory, runtime_directory
from headgate.errors import HeadgateError
from headgate.observe.listeners import Listener

NAME: Final = re.compile(r"(\d+)-[0-9a-f]{12}\.sock")
UNREADY: Final = ".unready"
OLD: Final = 60.0
"""Seconds after which a socket that is not ready was left by a program that was killed: it takes a millisecond."""
_LONGEST: Final = 100
"""Bytes of the path of a socket; the system allows 104 to 108."""
_WAITING: Final = 128
"""Connections that wait until the program takes them; more would find nobody."""


def folder() -> str:
    """Return the directory of the sockets, made if it is not there, or raise `DiscoveryFailed`."""
    return private_directory(os.path.join(runtime_directory(), "programs"))


class ShortPath:
    """A path to a socket that is short enough, by a descriptor of its directory if need be."""

    def __init__(self, path: str) -> None:
        self._file: int | None = None
        self.path: str = path
        if len(os.fsencode(path)) > _LONGEST:
            if not sys.platform.startswith("linux"):
                raise HeadgateError(f"the path of a socket is too long: {path}", remedy="Set XDG_RUNTIME_DIR.")
            directory, name = os.path.split(path)
            self._file = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            self.path = f"/proc/self/fd/{self._file}/{name}"

    def __enter__(self) -> str:
        return self.path

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            os.close(self._file)


def listening() -> tuple[Listener, str]:
    """Return a socket of this program that listens, and its path; HeadgateError: it could not be made."""
    path = os.path.join(folder(), f"{os.getpid()}-{clock.token()[:12]}.sock")
    unready = path.removesuffix(".sock") + UNREADY
    made = Listener(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with ShortPath(unready) as short:
            made.bind(short)
        os.chmod(unready, 0o600)  # before it listens: until then nobody can connect
        made.listen(_WAITING)
        os.rename(unready, path)
    except BaseException as error:
        made.close()
        remove(unready)
        if isinstance(error, OSError):
            raise HeadgateError(
                f"the socket of this program could not be made at {path}: {error.strerror or error}",
                remedy="Set XDG_RUNTIME_DIR to a directory of yours that can be written to.",
            ) from error
        raise
    return made, path


def remove(path: str) -> None:
    """Remove a socket, if it is there."""
    try:
        os.unlink(path)
    except OSError:
        pass


def is_ours(peer: socket.socket) -> bool:
    """Is the other side a process of this user, or of root?"""
    if not hasattr(socket, "SO_PEERCRED"):
        return True  # the mode of the socket has to suffice
    credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return struct.unpack("3i", credentials)[1] in (os.getuid(), 0)


def paths() -> list[str]:
    """Return the sockets that there are, those of dead programs too, oldest process first."""
    try:
        there = os.listdir(folder())
    except OSError:
        return []
    for name in there:
        if name.endswith(UNREADY):
            _remove_if_old(os.path.join(folder(), name))
    names = [name for name in there if NAME.fullmatch(name)]
    return [os.path.join(folder(), name) for name in sorted(names, key=lambda name: int(name.partition("-")[0]))]


def _remove_if_old(path: str) -> None:
    try:
        is_old = os.lstat(path).st_mtime < clock.wall() - OLD
    except OSError:  # it is ready, or gone
        return
    if is_old:
        remove(path)


def connected(path: str, timeout: float) -> socket.socket | None:
    """Return a connection to a program; None: it is gone, and its socket is removed."""
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    made.settimeout(timeout)
    try:
        with ShortPath(path) as short:
            made.connect(short)
    except (ConnectionRefusedError, FileNotFoundError):
        made.close()
        remove(path)
        return None
    except OSError:
        made.close()
        return None
    return made
