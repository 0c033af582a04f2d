"""The files of a run, and the order in which they are written.

    OUT                 results
    OUT.failed.jsonl    failures
    OUT.headgate        the journal
    OUT.headgate.ids    ids of records, with --id
    OUT.retrying.jsonl  failures that are being run again
    OUT.part.jsonl      results that become OUT at the end, if that is Parquet

A line of the journal says how long the files will be, and then a group of results is written: if a kill comes between,
the files are cut to the lengths of the line before, and the records of that group run again. If a write fails, the
files and the journal are cut back at once, so that each file ends with a whole line. `sync` makes that hold after a
power cut too.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from select import POLLOUT, poll
from typing import Protocol
from zlib import crc32

from headgate.cli.batch.book import Group
from headgate.cli.batch.ids import ENTRY, Ids, entries
from headgate.cli.batch.journal import (
    About,
    Early,
    Found,
    Journal,
    Sizes,
    Span,
    State,
    about_line,
    early_line,
    read,
    recover,
    state_line,
    synced_line,
)
from headgate.cli.output import WrongCall
from headgate.core.clock import clock
from headgate.sharing.sqlite.place import boot_id

_SHORT = 1 << 22  # bytes below which a journal is not replaced by a shorter one
_PIPE = 4096  # bytes that a pipe takes at once if it takes any
_PATIENCE = 200  # milliseconds between two looks whether a second Ctrl-C has come


class WriteFailed(OSError):
    """A file of the run cannot be written."""

    def __str__(self) -> str:
        return f"{self.filename} cannot be written: {self.strerror}"

    @property
    def remedy(self) -> str:
        """What the user can do."""
        if self.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            return "Make room"
        return "Put it back" if self.errno == errno.ESTALE else "Remove the cause"


class Output(Protocol):
    """Where results go. Methods raise WriteFailed."""

    @property
    def can_retry(self) -> bool:
        """Whether less may be written after `write` has failed: nothing of that group is left."""
        ...

    def write(self, group: Group) -> None:
        """Write a group of results. It survives the end of this process."""

    def sync(self) -> int:
        """Wait until what was written survives a power cut; called in a thread. Returns what `synced` is to be told."""
        ...

    def synced(self, number: int) -> None:
        """Note that `sync` has ended."""

    @property
    def is_long(self) -> bool:
        """Whether `begin_journal` is due."""
        ...

    def begin_journal(self, state: State, early: list[Early]) -> None:
        """Replace the journal by a short one. All that the state counts is written."""


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

    can_retry = False
    is_long = False

    def __init__(self, out: int, failed: int, is_hurried: Callable[[], bool]) -> None:
        """`is_hurried` says whether somebody who does not read is no longer waited for."""
        self._out = out
        self._failed = failed
        self._is_hurried = is_hurried

    def write(self, group: Group) -> None:
        """Write a group of results."""
        with _named("stdout"):
            self._write(self._out, group.out)
        with _named("stderr"):
            self._write(self._failed, group.failed)

    def _write(self, file: int, data: bytes) -> None:
        """Write as much at a time as a pipe takes without waiting: inside a write no second Ctrl-C would be seen."""
        room = poll()
        room.register(file, POLLOUT)
        rest = memoryview(data)
        while rest:
            if not room.poll(_PATIENCE):
                if self._is_hurried():
                    raise OSError(errno.EINTR, "nobody reads it, and the run was interrupted")
                continue
            try:
                rest = rest[os.write(file, rest[:_PIPE]) :]
            except BlockingIOError:
                pass  # it was made so by whoever shares it

    def sync(self) -> int:
        """Nothing."""
        return 0

    def synced(self, number: int) -> None:
        """Nothing."""

    def begin_journal(self, state: State, early: list[Early]) -> None:
        """Nothing."""


class Files:
    """The files of a run, locked as long as they are open."""

    def __init__(self, paths: Paths, *, with_ids: bool) -> None:
        self.paths: Paths = paths
        self._boot = boot_id()
        self._with_ids = with_ids
        self._out = _locked(paths.out)
        self._failed = self._ids = self._journal = -1
        self._number = 0
        self._state = State()
        self._journal_size = 0
        self._is_torn = False
        self._limit = _SHORT
        self._about: About | None = None

    def found(self) -> Found | None:
        """Read what earlier runs left; None: there was none. WrongCall: there was, and it is not known what."""
        paths = self.paths
        try:
            with paths.journal.open("rb") as file:
                found = read(file)
        except FileNotFoundError:
            self._refuse_foreign()
            return None
        except OSError as error:
            raise WrongCall(f"{paths.journal} cannot be read: {error.strerror}") from None
        if found is None:
            raise WrongCall(
                f"{paths.journal} was cut or damaged: it does not say how far the run is. Put it back, or begin anew "
                f"with --restart, which runs all records again"
            )
        return found

    def _refuse_foreign(self) -> None:
        """WrongCall: there are files that no run has left, and they would be overwritten."""
        paths = self.paths
        if os.fstat(self._out).st_size or (paths.final != paths.out and paths.final.exists()):
            raise WrongCall(
                f"{paths.final} exists and was not begun by `headgate map`: --restart overwrites it. (If it was, put "
                f"{paths.journal} back, which says how far it is.)"
            )
        for path in (paths.failed, paths.retrying):
            if _size(path):
                raise WrongCall(f"{path} exists, and it is not known what it belongs to: --restart overwrites it")

    def recovered(self, found: Found, *, anyway: bool) -> tuple[Journal, str | None]:
        """Find out what is done; returns also what the user is to be told. WrongCall: that is not certain.

        `anyway`: what the journal does not know of may run again.
        """
        paths = self.paths
        parts = [paths.out, self._failures(found.reached[-1].state), paths.ids]
        sizes = (_size(parts[0]), _size(parts[1]), _size(parts[2]))

        def sums(start: Sizes, end: Sizes) -> Sizes:
            one, two, three = (_sum(*given) for given in zip(parts, start, end, strict=True))
            return one, two, three

        changed = max((path.stat().st_mtime for path in parts if path.exists()), default=0.0)
        state, problem, is_hopeless, note = recover(
            found.reached, [str(path) for path in parts], sizes, sums, boot=self._boot, changed=changed
        )
        if problem is not None and is_hopeless:
            raise WrongCall(f"{problem}. Put it back, or begin anew with --restart")
        if problem is not None:
            told = f"{problem}: {paths.journal} was cut, or is an older copy, or somebody else wrote to the output"
            if not anyway:
                raise WrongCall(
                    f"{told}. Put it back; or --continue cuts off what it does not know, and runs those records again"
                )
            note = f"{told}; what it does not know of runs again"
        return found.journal(state), note

    def begin(self, journal: Journal) -> None:
        """Cut the files to the lengths that are known to be good, and begin a new journal."""
        state, paths = journal.state, self.paths
        self._mend_retry(state)
        with _named(paths.failed):
            self._failed = _open(paths.failed)
        if self._with_ids:
            with _named(paths.ids):
                self._ids = _open(paths.ids)
        self._state = state
        self._cut_back()
        self._about = journal.about
        self.begin_journal(state, list(journal.early.values()))

    def empty(self) -> None:
        """Forget what earlier runs left."""
        for path in (self.paths.journal, self.paths.failed, self.paths.retrying, self.paths.ids, self.paths.final):
            if path != self.paths.out:
                with _named(path):
                    path.unlink(missing_ok=True)
        with _named(self.paths.out):
            os.ftruncate(self._out, 0)

    def begin_retry(self, state: State, early: list[Early]) -> State:
        """Put the failures aside, to run them again."""
        with _named(self.paths.retrying):
            os.replace(self.paths.failed, self.paths.retrying)
        os.close(self._failed)
        self._failed = -1
        state = replace(state, retry=Span(), failed=0, failures=0)
        self.begin_journal(state, early)
        with _named(self.paths.failed):
            self._failed = _open(self.paths.failed)
        return state

    def end_retry(self, state: State, early: list[Early]) -> State:
        """Forget the failures that were run again."""
        state = replace(state, retry=None)
        self.begin_journal(state, early)
        self.paths.retrying.unlink(missing_ok=True)
        return state

    def read_ids(self) -> Ids:
        """Return the ids of the records that are done: those of another input without lines."""
        ids = Ids()
        for start in range(0, self._state.ids, 1 << 20):
            data = os.pread(self._ids, 1 << 20, start)
            for place, (hashed, line) in enumerate(entries(data)):
                ids.add(hashed, 0 if start + place * ENTRY < self._state.former else line)
        return ids

    # -- a running run -------------------------------------------------------------------------------------------------

    @property
    def can_retry(self) -> bool:
        """Whether nothing is left of a group that could not be written."""
        return not self._is_torn

    def write(self, group: Group) -> None:
        """Write how far the run will be, and then the group: all of it, or nothing."""
        if self._is_torn:
            self._cut_back()
        self._check()
        sums = crc32(group.out), crc32(group.failed), crc32(group.ids)
        lines = [early_line(one) for one in group.early]
        lines.append(state_line(group.state, self._number + 1, sums, boot=self._boot, at=clock.wall()))
        journal = b"".join(lines)
        with self._all_or_nothing():
            _write(self._journal, journal, self.paths.journal)
            _write(self._failed, group.failed, self.paths.failed)
            _write(self._ids, group.ids, self.paths.ids)
            _write(self._out, group.out, self.paths.out)
        self._journal_size += len(journal)
        self._number += 1
        self._state = group.state

    @property
    def is_long(self) -> bool:
        """Whether the journal is to be replaced by a shorter one."""
        return self._journal_size > self._limit

    def sync(self) -> int:
        """Wait for the disk. The journal comes first: what is on the disk without it would run again."""
        number = self._number
        with _named(self.paths.journal):
            os.fsync(self._journal)
        self._wait_for_disk()
        return number

    def synced(self, number: int) -> None:
        """Say in the journal that the disk has all that this state counts."""
        if self._is_torn:
            return
        line = synced_line(number)
        with self._all_or_nothing():
            _write(self._journal, line, self.paths.journal)
        self._journal_size += len(line)

    def begin_journal(self, state: State, early: list[Early]) -> None:
        """Replace the journal by a short one. It counts after a power cut too."""
        assert self._about is not None, "the run has begun"
        self._wait_for_disk()
        fresh = self.paths.journal.with_name(self.paths.journal.name + ".new")
        lines = [about_line(self._about), state_line(state, self._number, boot=self._boot, at=clock.wall())]
        lines += [early_line(one) for one in early]
        content = b"".join(lines)
        with _named(fresh):
            file = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o666)
        try:
            _write(file, content, fresh)
            with _named(fresh):
                os.fsync(file)
                os.replace(fresh, self.paths.journal)
        except BaseException:
            os.close(file)
            fresh.unlink(missing_ok=True)  # a full disk needs the room
            raise
        if self._journal != -1:
            os.close(self._journal)
        self._journal = file
        self._journal_size = len(content)
        self._state = state
        self._limit = max(_SHORT, 4 * len(content))
        with _named(self.paths.journal):
            _sync_folder(self.paths.journal.parent)

    def close(self) -> None:
        """Close the files, and give up the lock. Without failures no file of them is left."""
        if self._failed != -1 and not os.fstat(self._failed).st_size and _is_at(self._failed, self.paths.failed):
            self.paths.failed.unlink(missing_ok=True)
        for file in (self._out, self._failed, self._ids, self._journal):
            if file != -1:
                os.close(file)
        self._out = self._failed = self._ids = self._journal = -1

    def _wait_for_disk(self) -> None:
        for file, path, _ in self._data():
            with _named(path):
                os.fsync(file)

    def _data(self) -> list[tuple[int, Path, int]]:
        """The files that are open, apart from the journal, and how long they are to be."""
        paths, state = self.paths, self._state
        known = (
            (self._out, paths.out, state.out),
            (self._failed, paths.failed, state.failed),
            (self._ids, paths.ids, state.ids),
        )
        return [one for one in known if one[0] != -1]

    def _check(self) -> None:
        """Are these still the files of these names, and as long as we left them? What goes elsewhere is lost."""
        for file, path, size in (*self._data(), (self._journal, self.paths.journal, self._journal_size)):
            if not _is_at(file, path):
                raise WriteFailed(errno.ESTALE, "it was deleted, moved or replaced by somebody else", str(path))
            if os.fstat(file).st_size != size:
                raise WriteFailed(errno.ESTALE, "somebody else wrote to it, or cut it", str(path))

    @contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        """Undo what was written inside if not all of it could be."""
        try:
            yield
        except BaseException:
            self._is_torn = True
            try:
                self._cut_back()
            except OSError:
                pass  # tried again before the next write
            raise

    def _cut_back(self) -> None:
        """Undo a write that has failed: the journal last, which says to what length the others may be."""
        for file, path, size in self._data():
            if os.fstat(file).st_size > size:
                with _named(path):
                    os.ftruncate(file, size)
        if self._journal != -1 and os.fstat(self._journal).st_size > self._journal_size:
            with _named(self.paths.journal):
                os.ftruncate(self._journal, self._journal_size)
        self._is_torn = False

    def _failures(self, state: State) -> Path:
        """Where the failures are that a state counts. A retry that had not begun has moved them."""
        paths = self.paths
        moved = state.retry is None and paths.retrying.exists() and not paths.failed.exists()
        return paths.retrying if moved else paths.failed

    def _mend_retry(self, state: State) -> None:
        """Undo a retry that had not begun, or finish one that had ended, when the process was killed."""
        paths = self.paths
        if self._failures(state) == paths.retrying:
            os.replace(paths.retrying, paths.failed)
        elif state.retry is None:
            paths.retrying.unlink(missing_ok=True)


@contextmanager
def _named(path: Path | str) -> Iterator[None]:
    """Give errors the name of a file: those of a descriptor have none."""
    try:
        yield
    except OSError as error:
        raise WriteFailed(error.errno, error.strerror, str(path)) from error


def _locked(path: Path) -> int:
    try:
        file = _open(path)
    except OSError as error:
        raise WrongCall(f"{path} cannot be written: {error.strerror}") from None
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise WrongCall(f"{path} is not a file: only a file can be continued. -o - writes results to stdout")
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(file)
        raise WrongCall(f"another `headgate map` is writing to {path}: wait for it, or give another output") from None
    except BaseException:
        os.close(file)
        raise
    return file


def _open(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)


def _is_at(file: int, path: Path) -> bool:
    """Is this open file the one of this name?"""
    try:
        return os.path.samestat(os.fstat(file), os.stat(path))
    except OSError:
        return False


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _sum(path: Path, start: int, end: int) -> int:
    """The checksum of a part of a file."""
    found = 0
    if start < end:
        with path.open("rb") as file:
            file.seek(start)
            while start < end and (block := file.read(min(end - start, 1 << 20))):
                found = crc32(block, found)
                start += len(block)
    return found


def _write(file: int, data: bytes, path: Path | str) -> None:
    rest = memoryview(data)
    with _named(path):
        while rest:
            rest = rest[os.write(file, rest) :]


def _sync_folder(folder: Path) -> None:
    file = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)
