"""The output of the demo: a table that is redrawn in place on a terminal, plain lines anywhere else.

It knows nothing of pools: it is given a title, tables of cells, and lines of text.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import textwrap
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TextIO

_COLOURS = {"green": "32", "yellow": "33", "red": "31", "dim": "2", "bold": "1"}


class Cell(NamedTuple):
    """A text and its colour."""

    text: str
    colour: str = ""


@dataclass(frozen=True)
class Column:
    """`needs`: the width of terminal from which the column is shown."""

    title: str
    width: int
    right: bool = False
    needs: int = 0


class Grid(NamedTuple):
    """Rows of cells under their columns."""

    columns: Sequence[Column]
    rows: Iterable[Sequence[Cell]]


@dataclass
class Frame:
    """One moment, as it is shown."""

    title: str
    grids: Sequence[Grid]
    totals: str
    aside: str
    """Shorten a text to this width."""


_deserted: list[TextIO] = []  # streams whose reader is gone


def has_reader(out: TextIO) -> bool:
    """Whether nobody has closed the other end of a pipe, as far as `say` has noticed."""
    return out not in _deserted


def say(text: str, out: TextIO = sys.stdout) -> None:
    """Print a text. If the reader of a pipe is gone (`headgate demo | head`), end the program as Ctrl-C does."""
    try:
        print(text, file=out, flush=True)
    except BrokenPipeError:
        _deserted.append(out)
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, out.fileno())
        os.close(nowhere)
        signal.raise_signal(signal.SIGINT)


class Lines:
    """Prints each piece of news on a separate line, and the totals from time to time. For pipes and files."""

    pace: float = 1.0
    """Seconds between frames."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._silent = True

    def tell(self, news: str) -> None:
        say(news, self._out)

    def draw(self, frame: Frame) -> None:
        if self._silent:
            self.tell(frame.title)
            self._silent = False
        self.tell(frame.totals)
        self.tell(frame.aside)

    def close(self) -> None:
        pass


class Table:
    """Draws each frame over the previous one, with the latest news below. For terminals."""

    pace: float = 0.1
    news_kept: int = 3

    def __init__(self, out: TextIO, *, coloured: bool) -> None:
        self._out = out
        self._coloured = coloured
        self._drawn = 0
        self._news: deque[str] = deque([""] * self.news_kept, maxlen=self.news_kept)

    def tell(self, news: str) -> None:
        self._news.append(news)

    def draw(self, frame: Frame) -> None:
        width = shutil.get_terminal_size().columns - 1  # the last column wraps on some terminals
        lines = [
            self._line(frame.title, "bold", width),
            *(line for grid in frame.grids for line in ("", *self._grid(grid, width))),
            "",
            *(self._line(part, "bold", width) for part in textwrap.wrap(frame.totals, width, drop_whitespace=False)),
            self._line(frame.aside, "", width),
            "",
            *(self._line(news, "dim", width) for news in self._news),
        ]
        back = f"\x1b[{self._drawn}F" if self._drawn else "\x1b[?25l"  # up over the last frame, or hide the cursor
        self._out.write(back + "".join(f"{line}\x1b[K\n" for line in lines) + "\x1b[J")
        self._out.flush()
        self._drawn = len(lines)

    def close(self) -> None:
        self._out.write("\x1b[?25h")
        self._out.flush()

    def _line(self, text: str, colour: str, width: int) -> str:
        return self._paint(Cell(text if len(text) <= width else text[: width - 3] + "...", colour))

    def _grid(self, grid: Grid, width: int) -> Iterable[str]:
        yield self._row(grid.columns, [Cell(column.title, "dim") for column in grid.columns], width)
        for row in grid.rows:
            yield self._row(grid.columns, row, width)

    def _row(self, columns: Sequence[Column], cells: Sequence[Cell], width: int) -> str:
        parts, used = [], 0
        for column, cell in zip(columns, cells, strict=True):
            if column.needs <= width and used + column.width <= width:
                text = cell.text[: column.width]
                padded = text.rjust(column.width) if column.right else text.ljust(column.width)
                parts.append(self._paint(Cell(padded, cell.colour)))
                used += column.width + 2
        return "  ".join(parts)

    def _paint(self, cell: Cell) -> str:
        if not cell.colour or not self._coloured or not cell.text.strip():
            return cell.text
        return f"\x1b[{_COLOURS[cell.colour]}m{cell.text}\x1b[0m"


Screen = Lines | Table


def screen_for(out: TextIO, *, plain: bool, rows_needed: int) -> Screen:
    """Choose a table if it can be drawn here, else lines."""
    if plain or not out.isatty() or os.environ.get("TERM") == "dumb":
        return Lines(out)
    if shutil.get_terminal_size().lines < rows_needed:
        return Lines(out)  # text that has scrolled away cannot be overwritten
    return Table(out, coloured=not os.environ.get("NO_COLOR"))


def bar(share: float, width: int, out: TextIO = sys.stdout) -> str:
    """A bar that is full at 1 and empty at 0."""
    full = round(max(0.0, min(1.0, share)) * width)
    filled, empty = ("█", "░") if "utf" in (out.encoding or "").lower() else ("#", ".")
    return filled * full + empty * (width - full)
