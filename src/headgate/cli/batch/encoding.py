"""Results and failures as bytes to write. Pure.

A result is written as it is: one line of JSON, or one row of CSV. Dataclasses and pydantic models count by their
fields. What has no such form is a failure that names its type.
"""

from __future__ import annotations

import csv
import datetime
import decimal
import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, Protocol
from uuid import UUID

from headgate.cli.batch.sources import Item
from headgate.core.redaction import redact

_LONGEST = 4000  # characters of a message that are kept


class Unwritable(Exception):
    """A result has no form in the output."""


class Encoder(Protocol):
    """Turns results into bytes."""

    columns: tuple[str, ...] | None
    """The columns of the output, once they are known."""

    def encode(self, result: Any) -> bytes:
        """Return the line or row of a result; Unwritable: it has none."""
        ...

    def header(self) -> bytes:
        """Return what stands before the first result."""
        ...


def encoder_of(kind: str, columns: tuple[str, ...] | None = None) -> Encoder:
    """Make the encoder of a format. Parquet is made of JSON lines at the end."""
    return CsvRows(columns) if kind == "csv" else JsonLines()


def by_value(value: Any) -> Any:
    """Return what JSON knows in place of what it does not; TypeError: there is nothing."""
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, (datetime.date, datetime.time)):
        return value.isoformat()
    if isinstance(value, (UUID, decimal.Decimal)):
        return str(value)
    for method, options in (("model_dump", {"mode": "json"}), ("tolist", {})):  # pydantic; numpy
        if not isinstance(value, type) and callable(found := getattr(value, method, None)):
            return found(**options)
    raise TypeError(f"a {type(value).__module__}.{type(value).__qualname__} has no form in JSON")


def _json_encoder() -> Callable[[Any], str]:
    """Make what turns values into JSON.

    JSONEncoder sets itself up anew for each value, which takes longer than a small value does (benchmarks/map.py). So
    this asks for its compiled part once, and does without where there is none.
    """
    usual = json.JSONEncoder(ensure_ascii=False, allow_nan=False, default=by_value)
    make = getattr(json.encoder, "c_make_encoder", None)
    quote = json.encoder.encode_basestring
    try:
        compiled = make(None, by_value, quote, None, ": ", ", ", False, False, False)  # type: ignore[misc]
        assert "".join(compiled(["a", 1], 0)) == '["a", 1]'
    except Exception:
        return usual.encode
    return lambda value: quote(value) if type(value) is str else "".join(compiled(value, 0))


class JsonLines:
    """One line of JSON for each result."""

    columns: tuple[str, ...] | None = None

    def __init__(self) -> None:
        self._encode = _json_encoder()

    def header(self) -> bytes:
        """Nothing."""
        return b""

    def encode(self, result: Any) -> bytes:
        """Return the line of a result."""
        try:
            return self._encode(result).encode() + b"\n"
        except Exception as error:  # also what a property of somebody's raises
            raise Unwritable(f"the result cannot be written as JSON: {error}") from error


class CsvRows:
    """One row for each result, with the columns of the first one. What is not a mapping is in a column `result`."""

    def __init__(self, columns: tuple[str, ...] | None = None) -> None:
        self.columns: tuple[str, ...] | None = columns
        self._json = JsonLines()

    def header(self) -> bytes:
        """Return the row of columns. The first result that is written need not be the first that came."""
        return _row(self.columns or ())

    def encode(self, result: Any) -> bytes:
        """Return the row of a result."""
        named = self._named(result)
        columns = tuple(named) if self.columns is None else self.columns
        if unknown := [name for name in named if name not in columns]:
            raise Unwritable(f"the result has a field {unknown[0]!r}, and the columns are {', '.join(columns)}")
        row = _row([self._cell(named.get(name)) for name in columns])
        self.columns = columns
        return row

    def _named(self, result: Any) -> Mapping[str, Any]:
        if not isinstance(result, (Mapping, str, int, float, list, tuple, type(None))):
            try:
                result = by_value(result)
            except TypeError as error:
                raise Unwritable(f"the result cannot be written as CSV: {error}") from error
        if not isinstance(result, Mapping):
            return {"result": result}
        if not result or not all(isinstance(name, str) for name in result):
            raise Unwritable("the result cannot be written as CSV: its fields have no names")
        return result

    def _cell(self, value: Any) -> Any:
        if value is None or (isinstance(value, (str, int, float)) and not isinstance(value, bool)):
            return value
        return self._json.encode(value).decode().rstrip("\n").removeprefix('"').removesuffix('"')


def _row(cells: Sequence[Any]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(cells)
    try:
        return text.getvalue().encode()
    except UnicodeEncodeError as error:
        raise Unwritable(f"the result cannot be written as UTF-8: {error}") from error


def failure_line(item: Item, error: BaseException | str, attempts: int) -> bytes:
    """Make the line of a record that failed: where it stands, why it failed, and the record itself."""
    about: dict[str, Any] = {"line": item.line}
    if item.id is not None:
        about["id"] = item.id
    if isinstance(error, str):
        about |= {"error": "Unreadable" if item.fault else "Unwritable", "message": error}
    else:
        about |= {"error": type(error).__qualname__, "message": _message(error)}
        if where := _where(error):
            about["where"] = where
    about["attempts"] = attempts
    about["text" if item.fault and isinstance(item.record, str) else "record"] = item.record
    return json.dumps(about, default=_told).encode() + b"\n"


def _message(error: BaseException) -> str:
    try:
        text = redact(str(error))
    except Exception:  # a __str__ of somebody's that raises
        text = ""
    return text if len(text) <= _LONGEST else text[:_LONGEST] + " ..."


def _where(error: BaseException) -> str | None:
    """The last line of somebody's code that the error came through."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return None
    code = trace.tb_frame.f_code
    return f"{code.co_filename}:{trace.tb_lineno} in {code.co_qualname}"


def _told(value: Any) -> Any:
    """A record from Parquet may hold what JSON does not know."""
    try:
        return by_value(value)
    except TypeError:
        return redact(repr(value))
