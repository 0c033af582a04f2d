"""What the commands have in common that look at running programs."""

from __future__ import annotations

import argparse
from contextlib import ExitStack

from headgate.cli.arguments import whole
from headgate.cli.output import WrongCall, complain, print_json
from headgate.core.one_line import one_line

TYPE_CHECKING = False  # see cli/main.py
if TYPE_CHECKING:
    from typing import Any, NoReturn

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
        raise WrongCall(nothing_seen(options.pid))
    return seen


def nothing_seen(pid: int | None) -> str:
    """Say that no program can be seen, and how one is."""
    which = "no program can be seen" if pid is None else f"no program with pid {pid} can be seen"
    return f"{which}. {HOW}"


def ask_one(options: argparse.Namespace, ask: str, **more: Any) -> Any:
    """Ask the one program that knows what is meant, and return its answer; if none does, or several, say so, and exit.

    Nothing is asked of a program that could be the wrong one: what is done cannot be taken back.
    """
    from headgate.observe.programs import Refused

    with ExitStack() as stack:
        seen = [stack.enter_context(program) for program in found(options)]
        if len(seen) > 1:
            seen = _having(seen, "story" if ask == "story" else "find", more)
        if len(seen) > 1:
            pids = ", ".join(str(program.pid) for program in seen)
            raise WrongCall(f"several programs have it: {pids}. Say which one is meant with --pid.")
        try:
            return seen[0].ask(ask, **more)
        except Refused as error:
            _give_up([f"pid {seen[0].pid}: {error}"])
        except OSError as error:
            _give_up([f"{error}. It will not do it later" if ask == "act" else str(error)])


def _having(programs: list[Program], ask: str, more: dict[str, Any]) -> list[Program]:
    """Return those that have what is meant; exit if there are none, or if one does not say."""
    from headgate.observe.programs import Refused

    having, refusals = [], []
    for program in programs:
        try:
            program.ask(ask, **more)
            having.append(program)
        except Refused as error:
            refusals.append(f"pid {program.pid}: {error}")
        except OSError as error:
            _give_up([f"{error}. Say which program is meant with --pid"])
    return having or _give_up(refusals)


def _give_up(reasons: list[str]) -> NoReturn:
    for reason in reasons:
        complain("headgate", one_line(reason))
    raise SystemExit(1)


def configure_action(parser: argparse.ArgumentParser, action: str, target: str, about: str, example: str) -> None:
    """Describe the arguments of a command that acts on a program."""
    parser.description = f"{about}\n\nIt is done on the event loop of the pool, and told as an event."
    parser.epilog = f"example:\n  headgate {action} {example}\n"
    parser.add_argument("target", metavar=target, help="which one, as `headgate top` shows it")
    parser.add_argument(
        "--pool",
        default="",
        metavar="NAME",
        help="of which pool, if it could be of several: its name, or its number, as in #2",
    )
    add_program(parser)


def run_action(options: argparse.Namespace, action: str, target: str | None = None, pool: str | None = None) -> int:
    """Carry out an action and print what was done."""
    named = options.pool if pool is None else pool
    given = {"target": target or options.target, **({"pool": named} if named else {})}
    done = ask_one(options, "act", action=action, **given)
    if options.json:
        print_json({"action": action, **given, "done": done})
    else:
        print(one_line(done))
    return 0
