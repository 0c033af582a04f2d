"""The audit file of a pool: one JSON line for each event, and a disk that may be full.

A pool does not stop, and does not fail, because its audit file cannot be written: the events are missing there, and the
pool says so once when it begins and once when the file is closed, with their number.

Each line is written with one unbuffered write. What a full disk took of a line is not written twice: the rest of it
goes ahead of the next line, so that every line in the file is whole as soon as there is room again.
"""

from __future__ import annotations

import errno
import os
from io import FileIO
from pathlib import Path

from headgate.errors import InvalidArgument


class AuditFile:
    """A file to which lines are appended."""

    __slots__ = ("_file", "_rest", "error", "lost", "path")

    def __init__(self, audit: str | os.PathLike[str]) -> None:
        try:
            self.path: Path = Path(audit).expanduser()
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = FileIO(self.path, "ab", opener=_private)
        except (OSError, TypeError) as error:
            raise InvalidArgument(
                f"audit {audit!r} cannot be written: {error}",
                remedy="Pass the path of a file that may be appended to.",
            ) from error
        self._rest = b""  # of a line of which the disk took a part
        self.lost: int = 0
        """Lines that are not in the file."""
        self.error: Exception | None = None
        """The first failure to write; None while there was none."""

    def append(self, line: str) -> bool:
        """Write a line. Is this the first failure?"""
        return self._write(line.encode() + b"\n")

    def close(self) -> bool:
        """Close it. Is this the first failure?"""
        is_first = bool(self._rest) and self._write(b"")
        if self._rest:
            self.lost += 1
        try:
            self._file.close()
        except OSError as error:  # some file systems tell only now that there was no room
            is_first = self._failed(error) or is_first
        return is_first

    def _write(self, line: bytes) -> bool:
        data, written = self._rest + line, 0
        try:
            while written < len(data):
                taken = self._file.write(data[written:])
                if not taken:  # a pipe that is full
                    raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN), str(self.path))
                written += taken
        except (OSError, ValueError) as error:
            begun = len(data) - written < len(line)
            self._rest = data[written:] if begun else self._rest[written:]
            self.lost += bool(line) and not begun
            return self._failed(error)
        self._rest = b""
        return False

    def _failed(self, error: Exception) -> bool:
        is_first = self.error is None
        self.error = self.error or error
        return is_first


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
