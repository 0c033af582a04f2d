"""`headgate drain POOL`: let a pool of tasks finish what it has, and close."""

from __future__ import annotations

import argparse

from headgate.cli.arguments import name
from headgate.cli.observing import add_program, run_action

_DESCRIPTION = """\
Let a TaskPool take no more tasks, finish those that it has, and close. It cannot be opened again: what the program
submits later fails. In the program, `pool.close()` does the same; `pool.drain()` waits, and leaves the pool open."""
_EXAMPLE = """\
example:
  headgate drain calls
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Describe the arguments of the command."""
    parser.description, parser.epilog = _DESCRIPTION, _EXAMPLE
    parser.add_argument("pool", type=name, metavar="POOL", help="the name of the pool, or its number, as in #2")
    add_program(parser)


def run(options: argparse.Namespace) -> int:
    """Drain the pool."""
    return run_action(options, "drain", options.pool, "")
