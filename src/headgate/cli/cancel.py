"""`headgate cancel TASK`: cancels a task of a running program."""

from __future__ import annotations

import argparse

from headgate.cli.observing import configure_action, run_action

_DESCRIPTION = """\
Cancel a task of a running program: a queued one ends at once, a running one when its function ends."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Describe the arguments of the command."""
    configure_action(parser, "cancel", "TASK", _DESCRIPTION, "calls/17")


def run(options: argparse.Namespace) -> int:
    """Act on the program that has it."""
    return run_action(options, "cancel")
