"""`headgate top`: pools, tenants, resources, workers and the slowest tasks of running programs, live."""

from __future__ import annotations

import argparse
import os
import select
import shutil
import signal
import sys

from headgate.cli.arguments import seconds
from headgate.cli.observing import add_program
from headgate.cli.output import WrongCall, discard, paint, print_json

TYPE_CHECKING = False  # see cli/main.py
if TYPE_CHECKING:
    from types import FrameType
    from typing import Any, TextIO

    from headgate.cli.top_frame import Line
    from headgate.observe.programs import Program

_DESCRIPTION = """\
Show the pools of running programs, tenants with the age of their oldest task, resources with their countdowns, workers,
and the slowest tasks, live.

Keys: q quits, p or space pauses, s sorts by age, name or load, / filters, Esc shows all again."""
_EXAMPLE = """\
example:
  headgate top
  headgate top --once --json
"""

PATIENCE = 3.0
"""Seconds that a program has to answer: meanwhile the others are not shown, and keys do nothing."""
_BRIEFLY = 0.2
"""Seconds that a program has that did not answer the last time."""
_BETWEEN = 1.0
"""Seconds between the two looks of `--once`: the first one says nothing of how many tasks end in a second."""
_OR = "Or call headgate.observe.publish() in it."  # below what a frame without programs says


def configure(parser: argparse.ArgumentParser) -> None:
    """Describe the arguments of the command."""
    parser.description, parser.epilog = _DESCRIPTION, _EXAMPLE
    parser.add_argument("--every", type=seconds, default=1.0, metavar="S", help="seconds between two looks (1)")
    parser.add_argument("--once", action="store_true", help="print once, and end")
    add_program(parser)


def run(options: argparse.Namespace) -> int:
    """Show what there is."""
    sources = Sources(options.pid)
    try:
        if options.json or options.once:
            return _once(sources, options)
        if not (sys.stdin.isatty() and sys.stdout.isatty()):
            raise WrongCall("top needs a terminal; `headgate top --once` prints what it shows")
        with Terminal(sys.stdout) as terminal:
            return _live(sources, terminal, options.every)
    finally:
        sources.close()


def _once(sources: Sources, options: argparse.Namespace) -> int:
    from headgate.cli.top_frame import Settings, frame

    if sources.look():
        select.select([], [], [], _BETWEEN)
    seen = sources.look()
    code = int(any("silent" in one for one in seen))
    if options.json:
        print_json(seen)
        return code
    width = shutil.get_terminal_size(fallback=(200, 0)).columns
    for line in frame(seen, Settings(), width, 10_000, keys=False):
        print(_text(line).rstrip())
    if not seen:
        print(_OR)
    return code


def _live(sources: Sources, terminal: Terminal, every: float) -> int:
    from headgate.cli.top_frame import Settings, frame
    from headgate.core.clock import clock

    settings: Settings | None = Settings()
    seen, asked = sources.look(), clock.now()
    while settings is not None:
        now = clock.now()
        if not settings.paused and now - asked >= every:
            seen, asked = sources.look(), clock.now()
        size = shutil.get_terminal_size()
        since = 0.0 if settings.paused else clock.now() - asked
        lines = [_text(line) for line in frame(seen, settings, size.columns - 1, size.lines - 1, since)]
        terminal.draw(lines if seen else [*lines, _OR[: size.columns - 1]][: size.lines - 1])
        for key in terminal.keys(0.2):
            settings = settings.pressed(key) if settings is not None else None
    return 0


class _Source:
    """A program, and what it said last."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.last: dict[str, Any] = {"pid": program.pid, "program": "", "pools": []}
        self.asked_at: float | None = None
        """Since when it gives no answer; None: it answers."""

    def look(self) -> dict[str, Any]:
        """Ask it what it sees. If it does not answer, return what it said last, with "silent": the seconds since."""
        from headgate.core.clock import clock

        now = clock.now()
        try:
            self.last = self.program.ask("snapshot", patience=PATIENCE if self.asked_at is None else _BRIEFLY)
            self.asked_at = None
        except TimeoutError:
            self.asked_at = now if self.asked_at is None else self.asked_at
            return {**self.last, "silent": round(clock.now() - self.asked_at, 1)}
        return self.last


class Sources:
    """The programs, connected to as long as they live."""

    def __init__(self, pid: int | None) -> None:
        self._pid = pid
        self._known: dict[str, _Source] = {}

    def look(self) -> list[dict[str, Any]]:
        """Ask all programs what they see, and look for new ones."""
        from headgate.observe.programs import Program, Refused
        from headgate.observe.sockets import connected, paths

        for path in paths():
            ours = self._pid is None or path.rpartition("/")[2].startswith(f"{self._pid}-")
            if ours and path not in self._known and (connection := connected(path, PATIENCE)) is not None:
                self._known[path] = _Source(Program(path, connection))
        seen = []
        for path, source in list(self._known.items()):
            try:
                seen.append(source.look())
            except (Refused, OSError) as error:
                self._known.pop(path).program.close()
                if isinstance(error, Refused):  # else it has ended
                    seen.append({**source.last, "silent": 0.0, "why": str(error)})
        return seen

    def close(self) -> None:
        """Close all connections."""
        for source in self._known.values():
            source.program.close()


class Terminal:
    """A terminal that shows frames instead of lines, and gives single keys."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._before: list[Any] | None = None

    def __enter__(self) -> Terminal:  # noqa: PYI034 - nobody derives from it, and typing is not imported here
        if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:  # not with `nohup`
            signal.signal(signal.SIGHUP, _hung_up)
        signal.signal(signal.SIGTSTP, self._suspended)
        self._take()
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        self._give_back()

    def _take(self) -> None:
        import termios
        import tty

        self._before = termios.tcgetattr(sys.stdin.fileno())
        tty.setcbreak(sys.stdin.fileno())
        self._switch("\x1b[?1049h\x1b[?25l\x1b[?7l")  # another screen, without a cursor, that cuts long lines

    def _give_back(self) -> None:
        import termios

        try:
            self._switch("\x1b[?7h\x1b[?25h\x1b[?1049l")
            if self._before is not None:
                termios.tcsetattr(sys.stdin.fileno(), termios.TCSADRAIN, self._before)
        except (OSError, termios.error):  # the terminal is gone
            discard(self._out)

    def _switch(self, codes: str) -> None:
        os.write(self._out.fileno(), codes.encode())  # a handler of a signal must not write to a stream that is in use

    def _suspended(self, number: int, frame: FrameType | None) -> None:
        """Ctrl-Z: give the terminal back until this process goes on."""
        self._give_back()
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        signal.raise_signal(signal.SIGTSTP)
        signal.signal(signal.SIGTSTP, self._suspended)
        self._take()

    def draw(self, lines: list[str]) -> None:
        """Draw a frame over the last one. Lines that are the same do not flicker."""
        self._out.write("\x1b[H" + "".join(f"{line}\x1b[K\n" for line in lines) + "\x1b[J")
        self._out.flush()

    def keys(self, wait: float) -> list[str]:
        """Return the keys that were pressed, after at most so many seconds."""
        ready, _, _ = select.select([sys.stdin], [], [], wait)
        if not ready:
            return []
        pressed = os.read(sys.stdin.fileno(), 64)
        if not pressed:  # the terminal is gone
            return ["q"]
        text = pressed.decode("utf-8", "replace")
        return ["\x1b"] if text == "\x1b" else [] if text.startswith("\x1b") else list(text)


def _hung_up(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _text(line: Line) -> str:
    return "".join(paint(piece.text, piece.colour) if piece.colour else piece.text for piece in line)
