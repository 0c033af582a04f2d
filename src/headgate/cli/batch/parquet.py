"""Results as Parquet. A Parquet file cannot be continued, so results are JSON lines until all are there."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from headgate.cli.output import WrongCall

_AT_ONCE = 10_000  # rows in memory, and in a row group


def check_installed() -> None:
    """WrongCall: pyarrow is missing."""
    try:
        import pyarrow  # noqa: F401
    except ImportError:
        raise WrongCall("Parquet needs pyarrow: `pip install pyarrow`") from None


def make_parquet(source: Path, target: Path) -> None:
    """Write JSON lines as Parquet, some at a time. `target` is complete, or as it was before."""
    import pyarrow
    from pyarrow.parquet import ParquetWriter

    fresh = target.with_name(target.name + ".new")
    try:
        schema = _schema(source)
        with ParquetWriter(fresh, schema) as writer:
            for rows in _rows(source):
                writer.write_table(pyarrow.Table.from_pylist(rows, schema))
        os.replace(fresh, target)
    except (pyarrow.ArrowException, OSError) as error:
        fresh.unlink(missing_ok=True)  # a full disk needs the room
        raise OSError(
            f"the results cannot be written as Parquet: {error}. They are kept as JSON lines in {source}"
        ) from None


def _schema(source: Path) -> Any:
    """Return the columns of all results, each with a type that holds all its values."""
    import pyarrow

    schema = pyarrow.schema([])
    for rows in _rows(source):
        names = {name: None for row in rows for name in row}
        found = pyarrow.Table.from_pylist([dict.fromkeys(names) | row for row in rows]).schema
        schema = pyarrow.unify_schemas([schema, found], promote_options="permissive")
    return schema


def _rows(source: Path) -> Iterator[list[dict[str, Any]]]:
    with source.open("rb") as file:
        while lines := list(islice(file, _AT_ONCE)):
            found = map(json.loads, lines)
            yield [row if isinstance(row, dict) else {"result": row} for row in found]
