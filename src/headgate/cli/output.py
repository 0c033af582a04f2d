"""Printing: data on stdout, as JSON or as a table, and complaints on stderr."""

from __future__ import annotations

import os
import sys

from headgate.core.one_line import one_line

TYPE_CHECKING = False  # typing's own, without importing typing: `headgate --help` is to be quick
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import TextIO

_COLOURS = {"green": "32", "yellow": "33", "red": "31", "dim": "2", "bold": "1"}


class WrongCall(Exception):
    """The arguments of a command do not go together, or name what does not exist. The exit code is 2."""


def complain(prog: str, text: str) -> None:
    """Write one line, or a few, to stderr."""
    say(f"{prog}: {text}", sys.stderr)


def say(text: str, out: TextIO | None) -> None:
    """Write a text to a stream that may be closed or full, or may not be there."""
    try:
        print(text, file=out, flush=True)
    except (OSError, ValueError):
        pass


def discard(stream: TextIO) -> None:
    """Have everything that is written to a stream forgotten, also what it could not write so far."""
    try:
        number = stream.fileno()
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, number)
        os.close(nowhere)
    except (OSError, ValueError):
        pass


def print_json(value: object, *, indent: int | None = 2) -> None:
    """Print a value as JSON; `indent` None: on one line."""
    import json

    text = json.dumps(value, indent=indent, ensure_ascii=False)
    try:
        text.encode(getattr(sys.stdout, "encoding", None) or "utf-8")
    except UnicodeEncodeError:  # half a character in the name of something, or a terminal that has few letters
        text = json.dumps(value, indent=indent)
    print(text, flush=True)


def is_coloured(out: TextIO | None) -> bool:
    """Tell whether colours may be written: only to a terminal, and not with NO_COLOR."""
    return (
        out is not None and out.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM", "dumb") != "dumb"
    )


def paint(text: str, colour: str, out: TextIO | None = None) -> str:
    """Return a text in a colour, where colours may be written; `out` None: on stdout."""
    return f"\x1b[{_COLOURS[colour]}m{text}\x1b[0m" if is_coloured(sys.stdout if out is None else out) else text


def print_table(titles: Sequence[str], rows: Sequence[Sequence[str]], *, fold: Sequence[str] = ()) -> None:
    """Print rows under their titles: with `rich` on a terminal if it is installed, else as plain columns.

    What a cell says may come from others, and is escaped. `fold`: the titles of columns whose cells may take several
    lines. Columns without any text are left out.
    """
    shown = [column for column in range(len(titles)) if any(row[column] for row in rows)]
    titles, rows = [titles[column] for column in shown], [[one_line(row[column]) for column in shown] for row in rows]
    if is_coloured(sys.stdout) and _print_rich(titles, rows, fold):
        return
    widths = [max(len(row[column]) for row in (titles, *rows)) for column in range(len(titles))]
    for row in (titles, *rows):
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _print_rich(titles: Sequence[str], rows: Sequence[Sequence[str]], fold: Sequence[str]) -> bool:
    try:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        return False
    table = Table(box=None, pad_edge=False, header_style="dim")
    for title in titles:
        table.add_column(title, no_wrap=title not in fold, overflow="fold" if title in fold else "ellipsis")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    Console().print(table)
    return True
