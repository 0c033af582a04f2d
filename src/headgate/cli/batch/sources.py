"""Reads records: JSON lines, CSV and Parquet, from a file or from stdin.

A source hands out records in batches, each record with its place in the input, so that a run can go on there later.
What cannot be read as a record is handed out too, with its fault: it does not stop the run.
"""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, Protocol
from zlib import crc32

from headgate.cli.batch.journal import START, Place
from headgate.cli.output import WrongCall
from headgate.resources.costs import AnyCost

SUFFIXES = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".csv": "csv", ".parquet": "parquet"}
FORMATS = ("jsonl", "csv", "parquet")
_BLOCK = 1 << 18  # bytes read at a time
_MOST = 200  # records in a batch: few enough for the collector of garbage not to look at them (benchmarks/map.py)
_BOM = b"\xef\xbb\xbf"
_scan: Callable[[str, int], tuple[Any, int]] = vars(json.JSONDecoder())["scan_once"]  # without `decode` around it


class Item:
    """A record, or what stands in its place."""

    __slots__ = ("after", "before", "fault", "id", "index", "line", "record", "reserve", "tenant")

    def __init__(self, line: int, before: Place, after: Place, record: Any, fault: str | None) -> None:
        self.index: int = before[0]
        """Its number, counted from 0."""
        self.line: int = line
        """Where it stands in the input, counted from 1; in a Parquet file its row."""
        self.before: Place = before
        self.after: Place = after
        self.record: Any = record
        """The record; the raw text, if it cannot be read."""
        self.fault: str | None = fault
        """Why it cannot be run."""
        self.id: Any = None
        self.tenant: Any = None
        self.reserve: AnyCost = 0.0
        """Tokens that its call reserves of the quota of its key."""


class Source(Protocol):
    """Where records come from."""

    @property
    def is_slow(self) -> bool:
        """Whether `batch` may wait for somebody: it is called in a thread then."""
        ...

    def batch(self) -> list[Item]:
        """Return the next records, at least one; none at the end."""
        ...

    @property
    def share(self) -> Callable[[Place], float | None]:
        """Tells how much of the input stands before a place, from 0 to 1; None if nobody knows."""
        ...

    @property
    def close(self) -> Callable[[], None]:
        """Closes the input."""
        ...


def format_of(path: str, given: str | None) -> str:
    """Return the format of a file: as given, else by its suffix, else, for stdin and stdout, JSON lines."""
    if given is not None:
        return given
    if path == "-":
        return "jsonl"
    suffix = Path(path).suffix.lower()
    if suffix not in SUFFIXES:
        raise WrongCall(f"the format of {path} is not known by its suffix {suffix!r}: use {', '.join(SUFFIXES)}")
    return SUFFIXES[suffix]


def open_source(path: str, kind: str, place: Place = START) -> Source:
    """Open an input at the place where an earlier run has stopped."""
    if path == "-" and kind == "parquet":
        raise WrongCall("Parquet cannot be read from stdin: give a file")
    try:
        if kind == "parquet":
            return ParquetSource(path, place)
        lines = Lines(path)
        return JsonSource(lines, place) if kind == "jsonl" else CsvSource(lines, place)
    except OSError as error:
        raise WrongCall(f"{path} cannot be read: {error.strerror}") from None


def checksum(path: str, size: int) -> int | None:
    """Return the checksum of the first bytes of a file; None if it has fewer."""
    check = 0
    with open(path, "rb") as file:
        while size:
            block = file.read(min(size, 1 << 20))
            if not block:
                return None
            check = crc32(block, check)
            size -= len(block)
    return check


class Lines:
    """Lines of bytes, and the place of the next one."""

    def __init__(self, path: str) -> None:
        self.is_slow: bool = path == "-"
        self._file = 0 if self.is_slow else os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._size = 0 if self.is_slow else os.fstat(self._file).st_size
        self._torn = b""
        self.ready: list[bytes] = []
        """Lines that can be taken without waiting, the next one last."""
        self.place: Place = START

    def take(self) -> bytes | None:
        """Take the next line; None at the end."""
        return self.ready.pop() if self.ready or self.fill() else None

    def passed(self, records: int, lines: list[bytes]) -> Place:
        """Move the place behind lines that were taken, with so many records in them."""
        index, line, offset, check = self.place
        for raw in lines:
            offset, check = offset + len(raw), crc32(raw, check)
        self.place = (index + records, line + len(lines), offset, check)
        return self.place

    def go_to(self, place: Place) -> None:
        """Move forward to a place that was reached before: in a file at once, in stdin by reading."""
        if not self.is_slow:
            os.lseek(self._file, place[2], os.SEEK_SET)
            self.ready, self._torn, self.place = [], b"", place
            return
        while self.place[1] < place[1] and (raw := self.take()) is not None:
            self.passed(0, [raw])
        if self.place[1:] != place[1:]:
            raise WrongCall(
                "stdin has changed since the run began: it does not begin with the records that are done. Give the "
                "same input again, or begin anew with --restart"
            )
        self.place = place

    def share(self, place: Place) -> float | None:
        """How much of the file stands before a place."""
        return min(1.0, place[2] / self._size) if self._size else None

    def close(self) -> None:
        """Close the file."""
        if self._file:
            os.close(self._file)

    def fill(self) -> bool:
        """Read until a line is ready; False: there is none any more."""
        parts = [self._torn]
        while block := os.read(self._file, _BLOCK):
            head, newline, tail = block.rpartition(b"\n")
            if newline:
                parts += head, newline
                self.ready = _split(b"".join(parts))
                self._torn = tail
                return True
            parts.append(block)
        rest, self._torn = b"".join(parts), b""
        self.ready = [rest] if rest else []
        return bool(rest)


def _split(block: bytes) -> list[bytes]:
    """Lines that end with a newline, the first one last. (`splitlines` would also split at a lone carriage return.)"""
    lines = [line + b"\n" for line in block.split(b"\n")]
    lines.pop()  # what stands after the last newline: nothing
    lines.reverse()
    return lines


class JsonSource:
    """JSON lines: each line that is not blank is a record."""

    def __init__(self, lines: Lines, place: Place) -> None:
        self._lines = lines
        self.is_slow: bool = lines.is_slow
        self.share: Callable[[Place], float | None] = lines.share
        self.close: Callable[[], None] = lines.close
        if place != START:
            lines.go_to(place)

    def batch(self) -> list[Item]:
        """Return the records of all lines that are ready. One loop, without calls of ours (benchmarks/map.py)."""
        lines = self._lines
        items: list[Item] = []
        index, number, offset, check = before = lines.place
        while len(items) < _MOST and (lines.ready or (not items and lines.fill())):
            raw = lines.ready.pop()
            number += 1
            offset += len(raw)
            check = crc32(raw, check)
            if raw.isspace():
                continue
            fault = None
            try:
                text = raw.decode().strip()
                record, end = _scan(text, 0)
                if end != len(text):
                    record, fault = _read_patiently(raw, number)
            except (ValueError, StopIteration, RecursionError):
                record, fault = _read_patiently(raw, number)
            index += 1
            after = (index, number, offset, check)
            items.append(Item(number, before, after, record, fault))
            before = after
        lines.place = (index, number, offset, check)
        return items


def _read_patiently(raw: bytes, number: int) -> tuple[Any, str | None]:
    """Read a line that is not plain JSON in UTF-8, or say what is wrong with it."""
    try:
        text = (raw.removeprefix(_BOM) if number == 1 else raw).decode().rstrip("\r\n")
    except UnicodeDecodeError as error:
        return raw.decode("utf-8", "replace").rstrip("\r\n"), f"not UTF-8: {error.reason} at byte {error.start + 1}"
    try:
        return json.loads(text), None
    except (ValueError, RecursionError) as error:
        return text, f"not JSON: {error}"


class CsvSource:
    """CSV: mappings from the names in the first row to texts. A row may have several lines, if it is quoted."""

    def __init__(self, lines: Lines, place: Place) -> None:
        self._lines = lines
        self.is_slow: bool = lines.is_slow
        self.share: Callable[[Place], float | None] = lines.share
        self.close: Callable[[], None] = lines.close
        self._taken: list[bytes] = []
        self._rows = self._reader()
        self._columns: list[str] | None = None
        self._start = place

    def batch(self) -> list[Item]:
        """Return the records of the rows that are ready."""
        if self._columns is None:
            self._columns = self._header()
        items: list[Item] = []
        while len(items) < _MOST and (self._lines.ready or not items) and (item := self._next()) is not None:
            items.append(item)
        return items

    def _header(self) -> list[str]:
        try:
            row = next(self._rows, None) or []
        except (csv.Error, UnicodeDecodeError) as error:
            raise WrongCall(f"the first row of the CSV input has no names of columns: {error}") from None
        if len(set(row)) < len(row):
            raise WrongCall(f"two columns of the CSV input have the same name: {', '.join(row)}")
        self._pass(0)
        if self._start != START:
            self._lines.go_to(self._start)
        return [row[0].removeprefix("\ufeff"), *row[1:]] if row else []

    def _next(self) -> Item | None:
        columns = self._columns or []
        while True:
            before, fault = self._lines.place, None
            try:
                row = next(self._rows, None)
            except (csv.Error, UnicodeDecodeError) as error:
                row, fault = [""], f"not CSV: {error}"
                self._rows = self._reader()
            if row is None:
                return None
            if row:
                break
            self._pass(0)  # a blank line
        if fault is None and len(row) != len(columns):
            fault = f"it has {len(row)} fields, and there are {len(columns)} columns"
        record: Any
        if fault is None:
            record = dict(zip(columns, row, strict=True))
        else:
            record = b"".join(self._taken).decode("utf-8", "replace").rstrip("\r\n")
        return Item(before[1] + 1, before, self._pass(1), record, fault)

    def _pass(self, records: int) -> Place:
        place = self._lines.passed(records, self._taken)
        self._taken.clear()
        return place

    def _reader(self) -> Iterator[list[str]]:
        return csv.reader(self._texts(), strict=True)

    def _texts(self) -> Iterator[str]:
        while (raw := self._lines.take()) is not None:
            self._taken.append(raw)
            yield raw.decode()


class ParquetSource:
    """The rows of a Parquet file as mappings, read one row group at a time."""

    is_slow = False

    def __init__(self, path: str, place: Place) -> None:
        try:
            from pyarrow.parquet import ParquetFile
        except ImportError:
            raise WrongCall("Parquet needs pyarrow: `pip install pyarrow`") from None
        try:
            self._file = ParquetFile(path)
        except ValueError as error:  # pyarrow's own errors derive from it
            raise WrongCall(f"{path} cannot be read as Parquet: {error}") from None
        self._total: int = self._file.metadata.num_rows
        self._place = place
        self._batches = self._from(place[0])

    def batch(self) -> list[Item]:
        """Return the next rows."""
        items = []
        for record in next(self._batches, ()):
            before = self._place
            after = self._place = (before[0] + 1, before[1] + 1, 0, 0)
            items.append(Item(after[1], before, after, record, None))
        return items

    def share(self, place: Place) -> float | None:
        """How much of the file stands before a place."""
        return place[0] / self._total if self._total else None

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _from(self, skipped: int) -> Iterator[list[Any]]:
        """Yield the rows after those, without reading row groups that have only those."""
        for group in range(self._file.num_row_groups):
            rows = self._file.metadata.row_group(group).num_rows
            if skipped >= rows:
                skipped -= rows
                continue
            for batch in self._file.iter_batches(_MOST, row_groups=[group]):
                found = batch.to_pylist()
                kept = list(islice(found, skipped, None))
                skipped -= len(found) - len(kept)
                if kept:
                    yield kept


class FailedSource:
    """The failures that an earlier run has written, as records to run again."""

    is_slow = False

    def __init__(self, path: str, place: Place) -> None:
        self._source = JsonSource(Lines(path), place)
        self.share: Callable[[Place], float | None] = self._source.share
        self.close: Callable[[], None] = self._source.close

    def batch(self) -> list[Item]:
        """Return the next records, each with the line that it has in the input."""
        items = self._source.batch()
        for item in items:
            failure = item.record
            if item.fault is not None or not isinstance(failure, dict) or not isinstance(failure.get("line"), int):
                item.fault = "it is no line that headgate map wrote"
                continue
            item.line = failure["line"]
            if "record" in failure:
                item.record = failure["record"]
            else:  # it could not be read then, and it cannot be read now
                item.record, item.fault = failure.get("text"), str(failure.get("message"))
        return items
