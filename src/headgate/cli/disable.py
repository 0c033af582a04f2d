"""`headgate disable KEY`: keeps a resource from being used."""

from __future__ import annotations

import argparse

from headgate.cli.observing import configure_action, run_action

_DESCRIPTION = """\
Take a resource out of use until it is enabled. What uses it goes on."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Describe the arguments of the command."""
    configure_action(parser, "disable", "KEY", _DESCRIPTION, "key-3 --pool openai")


def run(options: argparse.Namespace) -> int:
    """Act on the program that has it."""
    return run_action(options, "disable")
