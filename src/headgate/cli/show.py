"""`headgate show TASK`: what happened to one task, a line each."""

from __future__ import annotations

import argparse

from headgate.cli.observing import add_program, ask_one
from headgate.cli.output import print_json
from headgate.core.one_line import one_line

_DESCRIPTION = """\
Print the story of a task of a running program: when it was submitted, what it waited for, each attempt with its
resource and worker, and how it ended. Of tasks that have ended a pool remembers the last ones."""
_EXAMPLE = """\
example:
  headgate show calls/17
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Describe the arguments of the command."""
    parser.description, parser.epilog = _DESCRIPTION, _EXAMPLE
    parser.add_argument("task", metavar="TASK", help="pool/17, pool#17, or its whole id")
    add_program(parser)


def run(options: argparse.Namespace) -> int:
    """Print the story."""
    story = ask_one(options, "story", task=options.task)
    if options.json:
        title, *lines = story.split("\n")
        print_json({"task": options.task, "title": title, "lines": [line.strip() for line in lines]})
    else:
        print("\n".join(map(one_line, story.split("\n"))))
    return 0
