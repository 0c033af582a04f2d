"""The journal of a run: how far it is, as lines of JSON with a checksum. Pure: texts in, states out.

    {"kind": "run", ...}      the first line: function, input and shape of the output, to notice that one has changed
    {"kind": "state", ...}    what was done when it was written, and how long the files were then
    {"kind": "early", ...}    a result that cannot be written yet, because an earlier record is not done

A state counts only if the files hold what it says. After a kill they do: what a process has written stays. After a
power cut only what was synced before counts, so a state says in which boot of the machine it was written, and
whether the files were synced before it. An early result stands in the journal itself and needs no other file.

The file is replaced by a shorter one now and then, and at the start of each run, so nothing is ever appended to a torn
line.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final
from zlib import crc32

from headgate.cli.output import WrongCall

FORMAT: Final = 1

Place = tuple[int, int, int, int]
"""A place between two records: how many records and lines stand before it, its byte, and the checksum up to there."""

START: Final[Place] = (0, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class Span:
    """Which records of an input are done: all before `low`, and those before `seen` that are not `open`."""

    low: Place = START
    seen: Place = START
    """Behind the last record that was ever begun."""
    open: tuple[tuple[int, int], ...] = ()
    """Ranges of numbers of records: the first, and the one after the last."""

    def is_done(self) -> Callable[[int], bool]:
        """Make a function that tells whether the record of a number is done."""
        low, seen = self.low[0], self.seen[0]
        undone = {index for first, end in self.open for index in range(first, end)}
        return lambda index: index < low or (index < seen and index not in undone)

    def reached(self, low: Place, seen: Place, still_open: tuple[tuple[int, int], ...]) -> Span:
        """Return how far it is when a later run has come from `low` to `seen`, and these are open there.

        What an earlier run knew of records that the later one has not come to yet stays true.
        """
        if seen[0] >= self.seen[0]:
            return Span(low, seen, still_open)
        ahead = tuple((max(first, seen[0]), end) for first, end in self.open if end > seen[0])
        return Span(low, self.seen, still_open + ahead)


def whole(numbers: range) -> tuple[tuple[int, int], ...]:
    """All of these numbers as ranges."""
    return ((numbers.start, numbers.stop),) if numbers else ()


def ranges(numbers: Iterable[int]) -> tuple[tuple[int, int], ...]:
    """Put sorted numbers together to ranges."""
    found: list[tuple[int, int]] = []
    for number in numbers:
        if found and found[-1][1] == number:
            found[-1] = (found[-1][0], number + 1)
        else:
            found.append((number, number + 1))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class State:
    """How far a run is, and how long its files are."""

    main: Span = Span()
    retry: Span | None = None
    """How far a retry of failed records is, while there is one."""
    out: int = 0
    failed: int = 0
    ids: int = 0
    """Bytes of the results, of the failures, and of the ids."""
    results: int = 0
    failures: int = 0
    cost: float = 0.0
    columns: tuple[str, ...] | None = None
    """The columns of a CSV file, once they are known."""


@dataclass(frozen=True, slots=True)
class Early:
    """A result, or a failure, that waits for its turn to be written."""

    index: int
    failed: bool
    text: str
    cost: float = 0.0
    retry: bool = False


@dataclass(frozen=True, slots=True)
class About:
    """What a run is about: a run goes on only with the same."""

    function: str
    digest: str | None
    """Of the source of the function's module; None where there is no source."""
    input: str
    size: int | None
    mtime: int | None
    """Of the input, in nanoseconds. Both are None for stdin."""
    formats: tuple[str, str]
    """Of input and output."""
    id: str | None = None
    """The field that names a record."""


@dataclass(slots=True)
class Journal:
    """What a journal says."""

    about: About
    state: State = State()
    early: dict[tuple[bool, int], Early] = field(default_factory=dict)
    """By run (is it a retry?) and number of the record."""


def about_line(about: About) -> bytes:
    """Make the first line of a journal."""
    return checked({"kind": "run", "format": FORMAT, **asdict(about)})


def state_line(state: State, number: int, *, boot: str | None, synced: bool) -> bytes:
    """Make the line that says how far a run is.

    A state is written when it is reached, and once more when the files are synced. Of those that count, the one with
    the highest number is the newest.
    """
    return checked({"kind": "state", "number": number, "boot": boot, "synced": synced, **asdict(state)})


def early_line(early: Early) -> bytes:
    """Make the line of a result that waits for its turn."""
    return checked({"kind": "early", **asdict(early)})


def read(lines: Iterable[bytes], boot: str | None) -> Journal | None:
    """Read a journal up to its first torn line; None: there is not even a first line.

    `boot` is the current boot of the machine.
    """
    entries = _entries(lines)
    head = next(entries, None)
    if head is None or head.get("kind") != "run":
        return None
    if head["format"] > FORMAT:
        raise WrongCall("its journal was written by a newer release of headgate: upgrade, or begin anew with --restart")
    journal = Journal(_about(head))
    columns, newest = None, -1
    for entry in entries:
        if entry["kind"] == "early":
            early = Early(**_without(entry, "kind"))
            journal.early[early.retry, early.index] = early
            continue
        columns = entry["columns"] or columns
        if (entry["synced"] or (boot is not None and entry["boot"] == boot)) and entry["number"] > newest:
            journal.state, newest = _state(entry), entry["number"]
    if columns:  # early results were made for them, also if the state that says so does not count
        journal.state = replace(journal.state, columns=tuple(columns))
    _forget_written(journal)
    return journal


def _forget_written(journal: Journal) -> None:
    """Drop early results that were written since: in their turn, or by a run that writes as records finish."""
    state = journal.state
    is_done = {False: state.main.is_done(), True: (state.retry or Span()).is_done()}
    for key, early in list(journal.early.items()):
        if is_done[early.retry](early.index) or (early.retry and state.retry is None):
            del journal.early[key]


def _about(head: dict[str, Any]) -> About:
    about = About(**_without(head, "kind", "format"))
    return replace(about, formats=(about.formats[0], about.formats[1]))


def _state(entry: dict[str, Any]) -> State:
    state = State(**_without(entry, "kind", "number", "boot", "synced"))
    columns = None if state.columns is None else tuple(state.columns)
    return replace(state, main=_span(state.main), retry=state.retry and _span(state.retry), columns=columns)


def _span(fields: Any) -> Span:
    return Span(tuple(fields["low"]), tuple(fields["seen"]), tuple((first, end) for first, end in fields["open"]))


def _without(entry: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in entry.items() if name not in names}


def checked(content: dict[str, Any]) -> bytes:
    """Make a line of the journal: the checksum, and JSON."""
    text = json.dumps(content, separators=(",", ":")).encode("ascii")
    return b"%08x %b\n" % (crc32(text), text)


def _entries(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    for line in lines:
        if not line.endswith(b"\n") or line[:9] != b"%08x " % crc32(line[9:-1]):
            return
        yield json.loads(line[9:])
