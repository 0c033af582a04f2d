"""The files of a run, and the order in which they are written.

    OUT                 results
    OUT.failed.jsonl    failures
    OUT.headgate        the journal
    OUT.headgate.ids    ids of records, with --id
    OUT.retrying.jsonl  failures that are being run again
    OUT.part.jsonl      results that become OUT at the end, if that is Parquet

A group of results is written first and then a line of the journal that says how long the files are now: whatever stands
behind that length after a kill is cut off, and its records run again. `sync` makes that hold after a power cut too.
"""

from __future__ import annotations

import fcntl
import os
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from headgate.cli.batch.book import Pending
from headgate.cli.batch.ids import Ids, entries
from headgate.cli.batch.journal import (
    About,
    Early,
    Journal,
    Span,
    State,
    about_line,
    early_line,
    read,
    state_line,
)
from headgate.cli.output import WrongCall
from headgate.stores.shared.sqlite_place import boot_id

_SHORT = 1 << 22  # bytes below which a journal is not replaced by a shorter one


class Output(Protocol):
    """Where results go."""

    def write(self, pending: Pending, state: State, early: list[Early]) -> None:
        """Write a group of results. It survives the end of this process."""

    def sync(self) -> State | None:
        """Wait until what was written survives a power cut; called in a thread. Returns what `synced` is to be told."""

    def synced(self, state: State | None) -> None:
        """Note that `sync` has ended."""

    @property
    def is_long(self) -> bool:
        """Whether `begin_journal` is due."""
        ...

    def begin_journal(self, state: State, early: list[Early]) -> None:
        """Replace the journal by a short one."""


class Paths:
    """The names of the files of a run."""

    def __init__(self, out: str, kind: str) -> None:
        self.final: Path = Path(out)
        """What the user named."""
        self.out: Path = Path(f"{out}.part.jsonl") if kind == "parquet" else Path(out)
        """What results are written to."""
        self.failed: Path = Path(f"{out}.failed.jsonl")
        self.retrying: Path = Path(f"{out}.retrying.jsonl")
        self.journal: Path = Path(f"{out}.headgate")
        self.ids: Path = Path(f"{out}.headgate.ids")

    def refuse_input(self, given: str) -> None:
        """WrongCall: the input is a file that the run writes."""
        for path in (self.final, self.out, self.failed, self.retrying, self.journal, self.ids):
            if path.exists() and os.path.exists(given) and os.path.samefile(path, given):
                raise WrongCall(
                    f"{given} is the input, and the run would overwrite it: it writes {path}. Name another -o"
                )


class Stdout:
    """Results on stdout, failures on stderr. Nothing is remembered."""

    def __init__(self, out: int, failed: int) -> None:
        self._out = out
        self._failed = failed

    def write(self, pending: Pending, state: State, early: list[Early]) -> None:
        """Write a group of results."""
        _write(self._out, b"".join(pending.out))
        _write(self._failed, b"".join(pending.failed))

    is_long = False

    def sync(self) -> State | None:
        """Nothing."""

    def synced(self, state: State | None) -> None:
        """Nothing."""

    def begin_journal(self, state: State, early: list[Early]) -> None:
        """Nothing."""


class Files:
    """The files of a run, locked as long as they are open."""

    def __init__(self, paths: Paths, *, with_ids: bool) -> None:
        self.paths: Paths = paths
        self._boot = boot_id()
        self._with_ids = with_ids
        try:
            self._out = _locked(paths.out)
        except OSError as error:
            raise WrongCall(f"{paths.out} cannot be written: {error.strerror}") from None
        self._failed = self._ids = self._journal = -1
        self._number = 0
        self._state = State()
        self._synced = 0
        self._limit = _SHORT
        self._about: About | None = None

    def found(self) -> Journal | None:
        """Read what earlier runs left; None: there was none."""
        try:
            with self.paths.journal.open("rb") as file:
                return read(file, self._boot)
        except FileNotFoundError:
            return None

    def refuse_foreign(self) -> None:
        """WrongCall: there is an output that no run has left, and it would be overwritten."""
        paths = self.paths
        if os.fstat(self._out).st_size or (paths.final != paths.out and paths.final.exists()):
            raise WrongCall(f"{paths.final} exists and was not begun by `headgate map`: --restart overwrites it")

    def begin(self, journal: Journal) -> None:
        """Cut the files to the lengths that are known to be good, and begin a new journal."""
        state, paths = journal.state, self.paths
        self._mend_retry(state)
        self._failed = _open(paths.failed)
        _cut(self._out, state.out, paths.out)
        _cut(self._failed, state.failed, paths.failed)
        if self._with_ids:
            self._ids = _open(paths.ids)
            _cut(self._ids, state.ids, paths.ids)
        self._about = journal.about
        self.begin_journal(state, list(journal.early.values()))

    def empty(self) -> None:
        """Forget what earlier runs left."""
        for path in (self.paths.journal, self.paths.failed, self.paths.retrying, self.paths.ids, self.paths.final):
            if path != self.paths.out:
                path.unlink(missing_ok=True)
        os.ftruncate(self._out, 0)

    def begin_retry(self, state: State, early: list[Early]) -> State:
        """Put the failures aside, to run them again."""
        os.replace(self.paths.failed, self.paths.retrying)
        os.close(self._failed)
        self._failed = -1
        state = replace(state, retry=Span(), failed=0, failures=0)
        self.begin_journal(state, early)
        self._failed = _open(self.paths.failed)
        return state

    def end_retry(self, state: State, early: list[Early]) -> State:
        """Forget the failures that were run again."""
        state = replace(state, retry=None)
        self.begin_journal(state, early)
        self.paths.retrying.unlink(missing_ok=True)
        return state

    def read_ids(self, *, former: bool) -> Ids:
        """Return the ids of the records that are done; `former`: as those of another input, without lines."""
        ids = Ids()
        size = os.fstat(self._ids).st_size
        for start in range(0, size, 1 << 20):
            for hashed, line in entries(os.pread(self._ids, 1 << 20, start)):
                ids.add(hashed, 0 if former else line)
        return ids

    # -- a running run -------------------------------------------------------------------------------------------------

    def write(self, pending: Pending, state: State, early: list[Early]) -> None:
        """Write a group of results, and then how far the run is."""
        for file, parts in ((self._out, pending.out), (self._failed, pending.failed), (self._ids, pending.ids)):
            if parts:
                _write(file, b"".join(parts))
        self._number += 1
        self._state = state
        lines = [early_line(one) for one in early]
        lines.append(state_line(state, self._number, boot=self._boot, synced=False))
        _write(self._journal, b"".join(lines))

    @property
    def is_long(self) -> bool:
        """Whether the journal is to be replaced by a shorter one."""
        return os.fstat(self._journal).st_size > self._limit

    def sync(self) -> State | None:
        """Wait for the disk."""
        number, state = self._number, self._state
        self._wait_for_disk()
        self._synced = number
        return state

    def synced(self, state: State | None) -> None:
        """Say in the journal that the disk has all that this state counts."""
        if state is not None:
            _write(self._journal, state_line(state, self._synced, boot=self._boot, synced=True))

    def begin_journal(self, state: State, early: list[Early]) -> None:
        """Replace the journal by a short one. It counts after a power cut too."""
        assert self._about is not None, "the run has begun"
        self._wait_for_disk()
        fresh = self.paths.journal.with_name(self.paths.journal.name + ".new")
        file = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o666)
        try:
            lines = [about_line(self._about), state_line(state, self._number, boot=self._boot, synced=True)]
            lines += [early_line(one) for one in early]
            _write(file, b"".join(lines))
            os.fsync(file)
            os.replace(fresh, self.paths.journal)
        except BaseException:
            os.close(file)
            raise
        _sync_folder(self.paths.journal.parent)
        if self._journal != -1:
            os.close(self._journal)
        self._journal = file
        self._state = state
        self._limit = max(_SHORT, 4 * os.fstat(file).st_size)

    def close(self) -> None:
        """Close the files, and give up the lock. Without failures no file of them is left."""
        if self._failed != -1 and not os.fstat(self._failed).st_size:
            self.paths.failed.unlink(missing_ok=True)
        for file in (self._out, self._failed, self._ids, self._journal):
            if file != -1:
                os.close(file)
        self._out = self._failed = self._ids = self._journal = -1

    def _wait_for_disk(self) -> None:
        for file in (self._out, self._failed, self._ids):
            if file != -1:
                os.fsync(file)

    def _mend_retry(self, state: State) -> None:
        """Undo a retry that had not begun, or finish one that had ended, when the process was killed."""
        paths = self.paths
        if state.retry is None and paths.retrying.exists():
            if paths.failed.exists():
                paths.retrying.unlink()
            else:
                os.replace(paths.retrying, paths.failed)


def _locked(path: Path) -> int:
    file = _open(path)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(file)
        raise WrongCall(f"another `headgate map` is writing to {path}: wait for it, or give another output") from None
    return file


def _open(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)


def _cut(file: int, size: int, path: Path) -> None:
    found = os.fstat(file).st_size
    if found < size:
        raise WrongCall(
            f"{path} has {found:,} bytes, and {size:,} were written: it was changed by somebody else. Put it back, or "
            "begin anew with --restart"
        )
    if found > size:
        os.ftruncate(file, size)


def _write(file: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(file, rest) :]


def _sync_folder(folder: Path) -> None:
    file = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)
