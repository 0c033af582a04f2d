"""The command `headgate` itself: finds the command, runs it, and turns its end into an exit code.

0: done. 1: the work failed. 2: the call was wrong. 130 and 143: ended by Ctrl-C and by SIGTERM.
"""

from __future__ import annotations

import argparse
import signal
import sys
from importlib import import_module

from headgate._version import __version__
from headgate.cli.output import WrongCall, complain, discard
from headgate.errors import HeadgateError, InvalidArgument, InvalidType

TYPE_CHECKING = False  # typing's own, without importing typing: `headgate --help` is to be quick
if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import FrameType
    from typing import Any, NoReturn, TextIO

COMMANDS: dict[str, str] = {
    "map": "run a function over every record of a file, resumable",
    "serve-keys": "hold keys in a local proxy, and rotate them for any program",
    "worker": "run a worker in this process",
    "workers": "list the workers that can be found, and why one is not used",
    "ps": "list the running programs and their pools",
    "top": "show the pools of running programs, live",
    "dashboard": "serve a web page of all running programs",
    "show": "print the story of a task",
    "cancel": "cancel a task of a running program",
    "retry": "run a failed task of a running program again",
    "enable": "declare a resource of a running program usable",
    "disable": "take a resource of a running program out of use",
    "pause": "begin no new work with a pool, tenant or resource for now",
    "resume": "end what `headgate pause` has begun",
    "resize": "change how many tasks or workers a pool may have",
    "drain": "let a pool of tasks finish what it has, and close",
    "certs": "make and check certificates for workers, for development",
    "doctor": "find out why a worker cannot be reached",
    "demo": "show all three pools in one program, without a network",
    "completion": "print a script that completes commands in your shell",
}
"""The commands, each with what it does. The module of a command is in `headgate.cli`, with `_` for `-`."""

_EXAMPLE = """\
example:
  headgate worker --tag gpu                 # in one terminal
  headgate workers                          # in another one

`headgate COMMAND --help` describes a command. Exit codes: 0 done, 1 the work failed, 2 the call was wrong,
130 and 143 ended by Ctrl-C and by SIGTERM.
"""


class _Formatter(argparse.HelpFormatter):
    """Fits paragraphs into the terminal, and leaves those with indented lines as they were written."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        fill = super()._fill_text
        parts = text.strip().split("\n\n")
        return "\n\n".join(part if "\n " in part else fill(part, width, indent) for part in parts)


class Parser(argparse.ArgumentParser):
    """A parser that keeps the paragraphs of descriptions, and takes no abbreviated options."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog=prog, allow_abbrev=False, formatter_class=_Formatter)

    def error(self, message: str) -> NoReturn:
        """Write what is wrong with the arguments, and exit with code 2."""
        self.print_usage(sys.stderr)
        complain(self.prog, f"{message}{'' if message.endswith('?') else '.'} See `{self.prog} --help`.")
        raise SystemExit(2)


def root_parser() -> Parser:
    """Make the parser of what stands before the command."""
    parser = Parser("headgate")
    parser.usage = "headgate [--help] [--version] COMMAND ..."
    width = max(map(len, COMMANDS))
    listed = "\n".join(f"  {name:<{width}}  {does}" for name, does in COMMANDS.items())
    parser.description = f"Run async Python work under scarcity.\n\ncommands:\n{listed}"
    parser.epilog = _EXAMPLE
    parser.add_argument("--version", action="version", version=f"headgate {__version__}")
    return parser


def command_parser(name: str) -> Parser:
    """Make the parser of a command."""
    parser = Parser(f"headgate {name}")
    _module(name).configure(parser)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    name = given[0] if given and given[0] in COMMANDS else ""
    prog = f"headgate {name}".rstrip()
    end = _End()
    try:
        try:
            code = _command(name, given)
        finally:
            _flush()
    except KeyboardInterrupt:
        code = end.code
    except BrokenPipeError:  # whoever read the output has enough: `headgate workers | head -1`
        _discard_output()
        code = 1
    except (WrongCall, InvalidArgument, InvalidType) as error:
        complain(prog, str(error))
        code = 2
    except (HeadgateError, OSError) as error:
        _discard_output()
        complain(prog, str(error))
        code = 1
    finally:
        _empty_stderr()
    return code


def _command(name: str, given: list[str]) -> int:
    if name:
        options = command_parser(name).parse_intermixed_args(given[1:])  # an option may stand between two arguments
        code: int = _module(name).run(options)
        return code
    parser = root_parser()
    if given and not given[0].startswith("-"):
        parser.error(_unknown(given[0]))
    parser.parse_args(given)
    parser.print_help(sys.stderr)
    return 2


def _module(name: str) -> Any:
    return import_module(f"headgate.cli.{name.replace('-', '_')}")


def _unknown(name: str) -> str:
    from difflib import get_close_matches

    close = get_close_matches(name, COMMANDS, n=1)
    return f"{name!r} is not a command" + (f"; did you mean {close[0]!r}?" if close else "")


class _End:
    """Makes SIGTERM end a command as Ctrl-C does, and knows which of the two it was."""

    def __init__(self) -> None:
        self.code = 130
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._terminate)

    def _terminate(self, number: int, frame: FrameType | None) -> None:
        self.code = 143
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # started in the background of a shell
            raise KeyboardInterrupt
        signal.raise_signal(signal.SIGINT)


def _flush() -> None:
    if sys.stdout is not None:
        sys.stdout.flush()


def _discard_output() -> None:
    """Keep Python from writing, at its end, what could not be written."""
    if sys.stdout is not None:
        discard(sys.stdout)


def _empty_stderr() -> None:
    """Have what could not be written to stderr forgotten: Python would exit with another code because of it."""
    stderr: TextIO | None = sys.stderr
    if stderr is None:
        return
    try:
        stderr.flush()
    except (OSError, ValueError):
        discard(stderr)
