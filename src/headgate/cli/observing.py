"""What the commands have in common that look at running programs."""

from __future__ import annotations

import argparse

from headgate.cli.arguments import whole
from headgate.cli.output import WrongCall, complain, one_line, print_json

TYPE_CHECKING = False  # see cli/main.py
if TYPE_CHECKING:
    from typing import Any

    from headgate.observe.programs import Program

HOW = "Start the program with HEADGATE_OBSERVE=1, or call headgate.observe.publish() in it."


def add_program(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that say which programs are meant, and how to print."""
    parser.add_argument("--pid", type=whole(1), metavar="PID", help="only the program with this process id")
    parser.add_argument("--json", action="store_true", help="print JSON")


def found(options: argparse.Namespace) -> list[Program]:
    """Return the programs that are meant, or say that there are none."""
    from headgate.observe.programs import programs

    seen = programs(options.pid)
    if not seen:
        which = "no program can be seen" if options.pid is None else f"no program with pid {options.pid} can be seen"
        raise WrongCall(f"{which}. {HOW}")
    return seen


def ask_all(options: argparse.Namespace, ask: str, **more: Any) -> Any:
    """Ask the programs until one knows what is meant, and return its answer; if none does, say why, and exit."""
    from headgate.observe.programs import Refused

    refusals: list[str] = []
    for program in found(options):
        with program:
            try:
                return program.ask(ask, **more)
            except (Refused, OSError) as error:
                refusals.append(f"pid {program.pid}: {error}")
    for refusal in refusals:
        complain("headgate", refusal)
    raise SystemExit(1)


def configure_action(parser: argparse.ArgumentParser, action: str, target: str, about: str, example: str) -> None:
    """Describe the arguments of a command that acts on a program."""
    parser.description = f"{about}\n\nIt is done on the event loop of the pool, and told as an event."
    parser.epilog = f"example:\n  headgate {action} {example}\n"
    parser.add_argument("target", metavar=target, help="which one, as `headgate top` shows it")
    parser.add_argument("--pool", default="", metavar="NAME", help="of which pool, if it could be of several")
    add_program(parser)


def run_action(options: argparse.Namespace, action: str, target: str | None = None, pool: str | None = None) -> int:
    """Carry out an action and print what was done."""
    given = {"target": target or options.target, "pool": options.pool if pool is None else pool}
    done = ask_all(options, "act", action=action, **given)
    if options.json:
        print_json({"action": action, **given, "done": done})
    else:
        print(one_line(done))
    return 0
