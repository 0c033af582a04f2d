"""Read a journal that another process writes."""

from __future__ import annotations

import fcntl
import logging
import os
from pathlib import Path

from headgate.core.clock import clock
from headgate.errors import InvalidArgument, InvalidType
from headgate.stores.jsonl.journal import History, decoded, fold, viewed
from headgate.stores.jsonl.store import check, damage, journal_path
from headgate.stores.port import StoredTask

_log = logging.getLogger("headgate.stores")

_TRIES = 100
"""How often a compaction may replace the file while it is read, before the reader takes what it has."""


_STALE_AFTER = 30.0


def read_journal(
    path: str | os.PathLike[str], *, pool_id: str | None = None, stale_after: float | None = None
) -> list[StoredTask]:
    """Return the tasks in a journal, ordered by number. Changes nothing, and works while a pool writes it.

    `path` is the file, or the folder of the store together with `pool_id`. If nobody writes the journal any more, every
    unfinished task is "stale". Otherwise a task is stale when its writer has not reported for `stale_after` seconds (by
    default the value of the pool that writes it).
    """
    if stale_after is not None and not stale_after > 0:
        raise InvalidArgument(f"stale_after must be > 0 seconds, got {stale_after!r}")
    file = _file_of(path, pool_id)
    try:
        history, owned = _read(file)
    except OSError as error:
        raise InvalidArgument(f"{file} cannot be read: {error.strerror or error}") from error
    check(history, file, pool_id)
    if bad := history.skipped + ([] if owned else history.torn):  # the owner may be writing the last line now
        _log.warning("%s: %d lines cannot be read, the first is line %d%s", file, len(bad), bad[0].line, damage(bad))
    seconds = stale_after or history.stale_after or _STALE_AFTER
    return decoded(viewed(history, clock.wall(), seconds, owned=owned))


def _file_of(path: str | os.PathLike[str], pool_id: str | None) -> Path:
    try:
        place = Path(os.path.expanduser(os.fsdecode(path)))
    except TypeError:
        raise InvalidType(f"path must be a path, got {type(path).__name__}") from None
    if pool_id is not None:
        return journal_path(place, pool_id)
    if place.is_dir():
        raise InvalidArgument(f"{place} is a folder", remedy="Pass `pool_id=` too, or the path of one file in it.")
    return place


def _read(path: Path) -> tuple[History, bool]:
    """Read the file; returns its contents, and whether another process writes it."""
    for tries_left in reversed(range(_TRIES)):
        with open(path, "rb") as file:
            owned = _is_locked(file.fileno())
            history = fold(file)
            # Replaced meanwhile: what was read is whole, but nobody holds the lock of a file without a name.
            if not tries_left or os.path.samestat(os.fstat(file.fileno()), os.stat(path)):
                return history, owned
    raise AssertionError("the last try returns")


def _is_locked(file: int) -> bool:
    """Asked by taking the lock for a moment, which is the only way. Whoever opens a journal tries more than once."""
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    fcntl.flock(file, fcntl.LOCK_UN)
    return False
