"""`headgate resize POOL SIZE`: how many tasks, or workers, a pool may have from now on."""

from __future__ import annotations

import argparse

from headgate.cli.arguments import name, whole
from headgate.cli.observing import add_program, run_action

_DESCRIPTION = """\
Let a TaskPool run at most SIZE tasks at a time, or let a WorkerPool have SIZE workers, from now on. What runs goes on.
A pool of workers without a name has one that `headgate ps` shows."""
_EXAMPLE = """\
example:
  headgate resize calls 20
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Describe the arguments of the command."""
    parser.description, parser.epilog = _DESCRIPTION, _EXAMPLE
    parser.add_argument("pool", type=name, metavar="POOL", help="the name of the pool")
    parser.add_argument("size", type=whole(1), metavar="SIZE", help="tasks or workers")
    add_program(parser)


def run(options: argparse.Namespace) -> int:
    """Resize the pool."""
    return run_action(options, "resize", str(options.size), options.pool)
