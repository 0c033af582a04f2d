"""`headgate pause POOL [PART]`: start no more tasks of a pool or tenant, or begin no call with a resource, for now."""

from __future__ import annotations

import argparse

from headgate.cli.arguments import name
from headgate.cli.observing import add_program, run_action

_DESCRIPTION = """\
Let a TaskPool, or one of its tenants, start no more tasks until it is resumed. Running tasks continue; queued ones
wait, and can still expire. With a ResourcePool and the id of a resource, no call begins with that resource until
then."""
_EXAMPLE = """\
example:
  headgate pause calls                 # a TaskPool
  headgate pause calls acme            # one tenant of it
  headgate pause openai key-3          # a resource of a ResourcePool
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Describe the arguments of the command."""
    parser.description, parser.epilog = _DESCRIPTION, _EXAMPLE
    add_part(parser)


def add_part(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that say which pool is meant, or what of it."""
    parser.add_argument("pool", type=name, metavar="POOL", help="the name of the pool, or its number, as in #2")
    parser.add_argument("part", type=name, nargs="?", metavar="PART", help="a tenant of a TaskPool, or a resource")
    add_program(parser)


def run(options: argparse.Namespace) -> int:
    """Pause what is meant."""
    return act_on_part(options, "pause")


def act_on_part(options: argparse.Namespace, action: str) -> int:
    """Carry out an action on a pool or on what is meant of it."""
    target, pool = (options.pool, "") if options.part is None else (options.part, options.pool)
    return run_action(options, action, target, pool)
