"""How far is it? Drawn with rich on a terminal where rich is installed, by the notebook in a notebook, and as plain
lines otherwise.

A bar is drawn again and again over itself, so whatever else is written to the terminal meanwhile would tear it. rich
takes care of what goes through ``sys.stderr`` and ``sys.stdout``; log handlers keep the stream that they were made
with, so those that write to the same terminal are given another one as long as the bar is there. What they write stands
above it.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from html import escape
from types import TracebackType
from typing import Any, Protocol, Self, TextIO

from headgate.core.clock import clock
from headgate.errors import InvalidType

_EVERY = 1.0  # seconds between two plain lines
_DRAWN_EVERY = 0.2  # seconds between two pictures in a notebook


class Progress(Protocol):
    """Counts what is done, inside a ``with`` block."""

    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None: ...
    def advance(self, *, failed: bool) -> None: ...


def progress_of(progress: bool | str, name: str, total: int | None) -> Progress:
    """Make what draws progress: nothing for False, lines or a bar on stderr for True or a title."""
    if progress is False:
        return _Silent()
    if progress is not True and not isinstance(progress, str):
        raise InvalidType(
            f"progress must be True, False or a title, got {type(progress).__name__}", remedy="Pass True."
        )
    title = name if progress is True else progress
    if (display := _notebook_display()) is not None:
        return _Notebook(title, total, display)
    if sys.stderr.isatty():
        try:
            return _Rich(title, total)
        except ImportError:
            pass
    return _Lines(title, total, sys.stderr)


class _Silent:
    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        pass

    def advance(self, *, failed: bool) -> None:
        pass


class _Lines(_Silent):
    """Writes a line at most once a second, and one at the end."""

    def __init__(self, title: str, total: int | None, out: TextIO) -> None:
        self._title = title
        self._total = total
        self._out = out
        self._done = self._failed = 0
        self._began = self._said = 0.0
        self._pause = _EVERY

    def __enter__(self) -> Self:
        self._began = self._said = clock.now()
        return self

    def advance(self, *, failed: bool) -> None:
        self._done += 1
        self._failed += failed
        now = clock.now()
        if now - self._said >= self._pause:
            self._said = now
            self._say(now)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._say(clock.now(), "stopped" if kind is not None else "done")

    def _say(self, now: float, end: str = "") -> None:
        of = "" if self._total is None else f" of {self._total:,}"
        failed = f", {self._failed:,} failed" if self._failed else ""
        seconds = now - self._began
        rate = f", {self._done / seconds:,.0f}/s" if seconds > 0 else ""
        self._write(f"{self._title}: {self._done:,}{of}{failed}{rate}{' ' * bool(end)}{end}")

    def _write(self, text: str) -> None:
        self._out.write(text + "\n")
        self._out.flush()


def _notebook_display() -> Callable[..., Any] | None:
    """Return what shows something below the cell that runs, if this is the kernel of a notebook."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    if shell is None or not hasattr(shell, "kernel"):
        return None
    from IPython.display import display

    shows: Callable[..., Any] = display
    return shows


class _Notebook(_Lines):
    """Shows a bar below the cell, and draws it again in its place."""

    def __init__(self, title: str, total: int | None, display: Callable[..., Any]) -> None:
        super().__init__(title, total, sys.stderr)
        self._display = display
        self._shown: Any = None
        self._text = title
        self._pause = _DRAWN_EVERY

    def __enter__(self) -> Self:
        super().__enter__()
        self._shown = self._display(self, display_id=True)
        return self

    def _write(self, text: str) -> None:
        self._text = text
        if self._shown is not None:
            self._shown.update(self)

    def __repr__(self) -> str:
        return self._text

    def _repr_html_(self) -> str:
        bar = "" if self._total is None else f'<progress max="{max(1, self._total)}" value="{self._done}"></progress> '
        return f"<div>{bar}{escape(self._text)}</div>"


def _handlers_of(terminal: TextIO) -> list[logging.StreamHandler[Any]]:
    """The log handlers that write to this terminal, of all loggers."""
    loggers = [logging.getLogger(), *logging.getLogger().manager.loggerDict.values()]
    handlers = {
        handler: None for logger in loggers if isinstance(logger, logging.Logger) for handler in logger.handlers
    }
    return [
        handler
        for handler in handlers
        if isinstance(handler, logging.StreamHandler) and _is_same(handler.stream, terminal)
    ]


def _is_same(stream: TextIO, terminal: TextIO) -> bool:
    if stream is terminal:
        return True
    try:
        return bool(stream.isatty()) and os.path.samestat(os.fstat(stream.fileno()), os.fstat(terminal.fileno()))
    except Exception:  # closed, no file at all, or something that only looks like a stream
        return False


class _Rich(_Silent):
    """A bar that moves, drawn by the `rich` package."""

    def __init__(self, title: str, total: int | None) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Bar

        self._bar = Bar(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[failed]}"),
            console=Console(stderr=True),
            redirect_stdout=sys.stdout.isatty(),  # else it is a file or a pipe, and what is printed belongs there
        )
        self._handlers: list[logging.StreamHandler[Any]] = []
        self._streams: list[Any] = []  # what they wrote to before
        self._terminal: TextIO = sys.stderr
        self._above: TextIO = sys.stderr
        self._failed = 0
        self._row = self._bar.add_task(title, total=total, failed="")

    def __enter__(self) -> Self:
        self._terminal = sys.stderr
        self._bar.start()
        self._above = sys.stderr  # rich has put another in its place
        if self._above is not self._terminal:
            self._handlers = [one for one in _handlers_of(self._terminal) if type(one.stream) is not type(self._above)]
            self._streams = [handler.setStream(self._above) for handler in self._handlers]
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        for handler, stream in zip(self._handlers, self._streams, strict=True):
            if handler.stream is self._above:  # else somebody else has given it another
                handler.setStream(stream)
        self._handlers.clear()
        self._streams.clear()
        self._bar.stop()

    def advance(self, *, failed: bool) -> None:
        if failed:
            self._failed += 1
            self._bar.update(self._row, failed=f"{self._failed} failed")
        self._bar.advance(self._row)
