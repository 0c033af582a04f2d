"""`headgate enable KEY`: lets a resource be used again."""

from __future__ import annotations

import argparse

from headgate.cli.observing import configure_action, run_action

_DESCRIPTION = """\
Declare a resource usable: ends its cooldown, or its being disabled."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Describe the arguments of the command."""
    configure_action(parser, "enable", "KEY", _DESCRIPTION, "key-3")


def run(options: argparse.Namespace) -> int:
    """Act on the program that has it."""
    return run_action(options, "enable")
