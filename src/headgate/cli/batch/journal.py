"""The journal of a run: how far it is, as lines of JSON with a checksum. Pure: texts in, states out.

    {"kind": "run", ...}      the first line: function, input and shape of the output, to notice that one has changed
    {"kind": "state", ...}    what is done when the files are as long as it says, with checksums of what makes them so
    {"kind": "synced", ...}   the disk has all that an earlier state counts
    {"kind": "early", ...}    a result that cannot be written yet, because an earlier record is not done

A state is written before the results that it counts, so it counts only if the files hold them: `recover` compares.
Whatever ends a process, no file is then longer than the newest state says. One that is shows that the journal was cut,
or replaced by an older copy, and going on would pay again for what the journal does not know. (If states were written
after their results, one that was cut off would look like one that a kill prevented.) Only a power cut may leave a
longer file, since it may keep the results and lose the line; so a state tells in which boot of the machine it was
written, and when. An early result stands in the journal itself and needs no other file.

The file is replaced by a shorter one now and then, and at the start of each run, so nothing is ever appended to a torn
line.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final, NamedTuple
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
    former: int = 0
    """Bytes of the ids that belong to another input: records that have them are done, whatever their lines are."""

    @property
    def sizes(self) -> Sizes:
        """How long the files are."""
        return self.out, self.failed, self.ids


Sizes = tuple[int, int, int]
"""Of the results, of the failures, and of the ids: bytes, or checksums."""


class Reached(NamedTuple):
    """A state as it stands in the journal."""

    state: State
    sums: Sizes
    """Checksums of what was written to reach it: of each file from the length that it had in the state before."""
    boot: str | None
    """In which boot of the machine it was written."""
    at: float
    """When, in Unix seconds."""


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
    """With what a run begins: what it is about, what is done, and what waits for its turn."""

    about: About
    state: State = State()
    early: dict[tuple[bool, int], Early] = field(default_factory=dict)
    """By run (is it a retry?) and number of the record."""


@dataclass(slots=True)
class Found:
    """What stands in a journal."""

    about: About
    reached: list[Reached]
    """The last state that the disk is known to have, and those after it."""
    early: dict[tuple[bool, int], Early]
    columns: tuple[str, ...] | None
    """The newest. Early results were made for them, also if the state that says so does not count."""

    def journal(self, state: State) -> Journal:
        """Return with what a run begins if this state counts."""
        journal = Journal(self.about, replace(state, columns=self.columns or state.columns), self.early)
        _forget_written(journal)
        return journal


def about_line(about: About) -> bytes:
    """Make the first line of a journal."""
    return checked({"kind": "run", "format": FORMAT, **asdict(about)})


def state_line(state: State, number: int, sums: Sizes = (0, 0, 0), *, boot: str | None, at: float) -> bytes:
    """Make the line that says how far a run is; see `Reached`."""
    return checked({"kind": "state", "number": number, "boot": boot, "at": at, "sums": sums, **asdict(state)})


def synced_line(number: int) -> bytes:
    """Make the line that says that the disk has all that the state of this number counts."""
    return checked({"kind": "synced", "number": number})


def early_line(early: Early) -> bytes:
    """Make the line of a result that waits for its turn."""
    return checked({"kind": "early", **asdict(early)})


def read(lines: Iterable[bytes]) -> Found | None:
    """Read a journal up to its first torn line; None: it does not even begin like one."""
    entries = _entries(lines)
    head = next(entries, None)
    if head is None or head.get("kind") != "run":
        return None
    if head["format"] > FORMAT:
        raise WrongCall("its journal was written by a newer release of headgate: upgrade, or begin anew with --restart")
    early: dict[tuple[bool, int], Early] = {}
    columns = None
    reached: dict[int, Reached] = {}
    for entry in entries:
        if entry["kind"] == "early":
            one = Early(**_without(entry, "kind"))
            early[one.retry, one.index] = one
        elif entry["kind"] == "synced":
            reached = {number: one for number, one in reached.items() if number >= entry["number"]}
        else:
            columns = entry["columns"] or columns
            reached[entry["number"]] = Reached(_state(entry), tuple(entry["sums"]), entry["boot"], entry["at"])
    if not reached:
        return None  # the first state is written with the first line
    return Found(_about(head), list(reached.values()), early, columns and tuple(columns))


_APART: Final = 60.0
"""Seconds between the newest state and the last write to a file after which no power cut explains that its state is
missing: states are synced once a second. On a busy disk it takes longer, and the price of a mistake is a question."""


class Recovered(NamedTuple):
    """How a run can go on."""

    state: State
    """What is done."""
    problem: str | None = None
    """Why it should not go on there."""
    is_hopeless: bool = False
    """It cannot go on at all, whatever the user says."""
    note: str | None = None


def recover(
    reached: Sequence[Reached],
    names: Sequence[str],
    sizes: Sizes,
    sums: Callable[[Sizes, Sizes], Sizes],
    *,
    boot: str | None,
    changed: float,
) -> Recovered:
    """Find the newest state that the files hold.

    `names` and `sizes` are those of the files, `changed` is when one was written last, and `sums` gives the checksums
    of what they hold between two lengths each.
    """
    newest, good = reached[-1], reached[0]
    for later in reached[1:]:
        if _is_shorter(sizes, later.state.sizes) or sums(good.state.sizes, later.state.sizes) != later.sums:
            break
        good = later
    same_boot = boot is not None and newest.boot == boot
    certain = reached[-2] if same_boot and len(reached) > 1 else reached[0]  # before a state comes what it follows
    for name, size, wanted in zip(names, sizes, certain.state.sizes, strict=True):
        if size < wanted:
            told = f"{name} has {size:,} bytes, and {wanted:,} were written: it was changed by somebody else"
            return Recovered(good.state, told, is_hopeless=True)
    for name, size, known in zip(names, sizes, newest.state.sizes, strict=True):
        if size > known:
            told = f"{name} has {size:,} bytes, and its journal knows of {known:,}"
            if same_boot or changed - newest.at > _APART:
                return Recovered(good.state, told)
            return Recovered(good.state, note=f"{told}, as after a power cut: the records of the rest run again")
    if same_boot and good is not newest and not (good is certain and _is_shorter(sizes, newest.state.sizes)):
        told = f"{names[0]}, or a file beside it, does not hold what was written: it was changed by somebody else"
        return Recovered(good.state, told, is_hopeless=True)
    return Recovered(good.state)


def _is_shorter(sizes: Sizes, wanted: Sizes) -> bool:
    return any(size < one for size, one in zip(sizes, wanted, strict=True))


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
    state = State(**_without(entry, "kind", "number", "boot", "at", "sums"))
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
