"""A store of JSON-lines files: one journal for each pool, one writer for each journal.

How a journal is opened, in this order, because each step relies on those before it:

1. Lock. What is read afterwards cannot change any more.
2. Read the first line. A file that is not ours is left exactly as it is.
3. Read the rest.
4. Cut off a torn end, remove what an interrupted compaction left.
5. Write who opened it, and that all unfinished tasks of the former run are stale. It is synced before anything else is
   written, and before anybody is told what was in the file: whoever reads the journal later sees what this run saw.

`open` does all of that. Only for a large file, and where an event loop runs, it leaves steps 3 to 5 to the first who
asks for `tasks`: a TaskPool asks in a thread.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any, Final, get_args

from headgate.core.checks import named_options
from headgate.core.clock import clock
from headgate.core.files import Files, write_failed
from headgate.errors import InvalidArgument, InvalidType, StoreFormatTooNew, StoreLocked
from headgate.stores.codec import Codec
from headgate.stores.jsonl.journal import Bad, History, last_writer
from headgate.stores.jsonl.lines import FORMAT, Writer, file_name, header_line, open_line, stale_line
from headgate.stores.jsonl.locked_file import LockedFile, fresh_path
from headgate.stores.jsonl.scanner import scan
from headgate.stores.jsonl.writer import JsonLinesJournal
from headgate.stores.port import StoredTask

_log = logging.getLogger("headgate.stores")

_LARGE: Final = 256_000
"""Bytes. Reading so much takes some milliseconds: what is larger is not read where an event loop waits for it."""

_CODECS: Final[tuple[Codec, ...]] = get_args(Codec)


class JsonLinesStore:
    """Journals in files that people and other tools can read.

    `path` is a folder, where each pool gets a file; or, when it ends in ".jsonl", one file for one pool. Left out, it
    is the folder that HEADGATE_DIR names, else ".headgate". Folder and files are made for this user alone.

    ``codec="pickle"`` keeps results that JSON cannot hold. Opening such a journal runs code that stands in it: only for
    folders that nobody else can write.
    """

    @named_options
    def __init__(
        self, path: str | os.PathLike[str] | None = None, *, codec: Codec = "json", files: Files | None = None
    ) -> None:
        if codec not in _CODECS:
            raise InvalidArgument(f"codec must be one of {', '.join(map(repr, _CODECS))}, got {codec!r}")
        self.path: Path = _place(path)
        """The folder, or the one file."""
        self.codec: Codec = codec
        self._files = files or Files()

    @property
    def shared(self) -> bool:
        """False: a journal has one writer."""
        return False

    def __repr__(self) -> str:
        return f"<JsonLinesStore {self.path}>"

    def open(self, pool_id: str, about: Mapping[str, Any], keep: int) -> JsonLinesJournal:
        """Lock and read the journal of this pool, or make it."""
        path = journal_path(self.path, pool_id)
        try:
            file = LockedFile.take(path, self._files)
        except OSError as error:
            raise write_failed(path, error) from error
        if file is None:
            raise _locked(path)
        try:
            return self._opened(file, pool_id, about, keep)
        except OSError as error:
            file.close()
            raise write_failed(path, error) from error
        except BaseException:
            file.close()
            raise

    def _opened(self, file: LockedFile, pool_id: str, about: Mapping[str, Any], keep: int) -> JsonLinesJournal:
        header = header_line(pool_id, about, self.codec)
        opened = open_line(Writer(os.getpid(), socket.gethostname(), clock.wall()), about)

        def read(lines: Iterable[bytes]) -> tuple[Sequence[StoredTask], int]:
            return self._read(file, lines, pool_id, keep, header, opened)

        journal = JsonLinesJournal(file, read, preamble=(header, opened), keep=keep, codec=self.codec)
        if file.size <= _LARGE or asyncio._get_running_loop() is None:
            journal.read()
        else:
            check(scan(islice(file.lines(), 1)).history, file.path, pool_id)
        return journal

    def _read(
        self, file: LockedFile, lines: Iterable[bytes], pool_id: str, keep: int, header: bytes, opened: bytes
    ) -> tuple[Sequence[StoredTask], int]:
        """Do steps 2 to 5 of the order above: read the file, and check and repair what is there."""
        found = scan(lines)
        history = found.history
        check(history, file.path, pool_id)
        _report(history, file)
        if file.size > history.size:
            file.cut(history.size)
        self._files.remove(fresh_path(file.path))
        now = clock.wall()
        news = [opened, *(stale_line(number, now) for number in found.unfinished())]
        file.append(b"".join([header, *news] if history.unwritten else news))
        file.sync_name()
        return found.kept(keep, now, self.codec), history.lines + len(news)


def journal_path(place: Path, pool_id: str) -> Path:
    """The file of this pool. A symbolic link is followed: a compaction must replace the file, not the link."""
    path = place if place.suffix == ".jsonl" else place / file_name(pool_id)
    return Path(os.path.realpath(path))


def check(history: History, path: Path, pool_id: str | None) -> None:
    """Raise unless this is a journal that this release can read, of this pool if one is named."""
    header = history.header
    if header is None:
        if history.unwritten:
            return
        raise InvalidArgument(
            f"{path} is not a journal of headgate: it does not begin with a header",
            remedy="Pass another path. The file was left as it is.",
        )
    if header.format > FORMAT:
        raise StoreFormatTooNew(f"{path} has format {header.format}, and this release reads formats up to {FORMAT}")
    if pool_id is not None and header.pool_id != pool_id and not header.is_intact:
        raise InvalidArgument(
            f"{path}: line 1, the header, is damaged: its checksum is wrong, and it names pool {header.pool_id!r}",
            remedy=f"If it is the journal of {pool_id!r}, mend that name. The file was left as it is.",
        )
    if pool_id is not None and header.pool_id != pool_id:
        raise InvalidArgument(
            f"{path} is the journal of pool {header.pool_id!r}, not of {pool_id!r}",
            remedy="Pass a folder, where each pool gets its own file.",
        )


def _place(path: str | os.PathLike[str] | None) -> Path:
    if path is None:
        path = os.environ.get("HEADGATE_DIR") or ".headgate"
    try:
        text = os.fsdecode(path)
    except TypeError:
        raise InvalidType(f"path must be a path, got {type(path).__name__}") from None
    return Path(os.path.expanduser(text)).absolute()


def _locked(path: Path) -> StoreLocked:
    try:
        with open(path, "rb") as file:
            writer = last_writer(file)
    except OSError:
        writer = None
    if writer is None:
        return StoreLocked(f"{path} is being opened by another process")
    if not _may_live(writer):  # whoever has the lock has not come to write its own name yet, or sees other numbers
        last = f"the last to write its name there, process {writer.pid} on {writer.host}, has ended"
        return StoreLocked(f"{path} is in use by another process; {last}")
    return StoreLocked(f"{path} is in use by process {writer.pid} on {writer.host}, since {_date(writer.at)}")


def _may_live(writer: Writer) -> bool:
    if writer.host != socket.gethostname():
        return True
    try:
        os.kill(writer.pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:
        pass  # it is there, and another user's
    return True


def _date(at: float) -> str:
    try:
        return datetime.fromtimestamp(at, UTC).isoformat(" ", "seconds")
    except (ValueError, OverflowError, OSError):
        return f"{at}"


def _report(history: History, file: LockedFile) -> None:
    """Log what was broken in the file."""
    if history.unwritten:
        if file.size:
            _log.warning("%s: line 1 is torn, %d bytes are cut off: it begins anew", file.path, file.size)
        return
    if skipped := history.skipped:
        _log.warning(
            "%s: %d lines cannot be read and are passed over, the first is line %d, %d bytes%s",
            file.path,
            len(skipped),
            skipped[0].line,
            sum(bad.size for bad in skipped),
            damage(skipped),
        )
    if torn := history.torn:
        size = sum(bad.size for bad in torn)
        _log.warning("%s: line %d is torn, %d bytes are cut off%s", file.path, torn[0].line, size, damage(torn))


def damage(lines: Sequence[Bad]) -> str:
    """How many of these have a wrong checksum, for a message; "" for none."""
    count = sum(bad.is_damaged for bad in lines)
    return f" ({count} of them damaged: the checksum is wrong)" if count else ""
