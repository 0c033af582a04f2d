"""`headgate resume POOL [PART]`: end what `headgate pause` has begun."""

from __future__ import annotations

import argparse

from headgate.cli.pause import act_on_part, add_part

_DESCRIPTION = """\
Let a paused TaskPool or tenant start tasks again, or a paused resource be used again."""
_EXAMPLE = """\
example:
  headgate resume calls
  headgate resume openai key-3
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Describe the arguments of the command."""
    parser.description, parser.epilog = _DESCRIPTION, _EXAMPLE
    add_part(parser)


def run(options: argparse.Namespace) -> int:
    """Resume what is meant."""
    return act_on_part(options, "resume")
