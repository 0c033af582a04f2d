"""`headgate retry TASK`: runs a failed task of a running program again."""

from __future__ import annotations

import argparse

from headgate.cli.observing import configure_action, run_action

_DESCRIPTION = """\
Run a failed task again, as a new task. The pool must keep failed tasks: TaskPool(keep_failed=100)."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Describe the arguments of the command."""
    configure_action(parser, "retry", "TASK", _DESCRIPTION, "calls/17")


def run(options: argparse.Namespace) -> int:
    """Act on the program that has it."""
    return run_action(options, "retry")
