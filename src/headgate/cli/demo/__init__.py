"""`headgate demo`: three tenants, six keys, two workers, one of them killed, and an API that refuses calls.

`play` is the program, `ask` runs on its workers, `tenants` and `upstream` are its users and its API, `screen` draws it.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec

from headgate.cli.arguments import whole
from headgate.cli.output import WrongCall

TYPE_CHECKING = False  # see cli/main.py
if TYPE_CHECKING:
    from typing import TextIO

    from headgate.cli.demo.clusters import Theatre
    from headgate.dashboard import Dashboard

_DESCRIPTION = """\
Three tenants, one of which submits too much, six keys, an API that limits and revokes keys, and two workers, one of
which is killed. It needs no network, takes about 10 seconds, and loses no result. A terminal shows live tables, a pipe
plain lines. Exit code 0, or 1 if a call was lost."""
_EXAMPLE = """\
example:
  headgate demo
  headgate demo --on ray
  headgate demo --calls 100 --json
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Describe the arguments of the command."""
    parser.description, parser.epilog = _DESCRIPTION, _EXAMPLE
    parser.add_argument("--calls", type=whole(0), default=480, metavar="N", help="calls to submit (480)")
    parser.add_argument("--slots", type=whole(1), default=40, metavar="N", help="calls at a time (40)")
    parser.add_argument("--seed", type=int, default=7, metavar="N", help="what latencies and failures are drawn from")
    parser.add_argument(
        "--on", choices=["ray", "dask"], help="run the workers on a cluster of three nodes, and kill a node"
    )
    parser.add_argument("--plain", action="store_true", help="lines, on a terminal too")
    parser.add_argument("--dashboard", action="store_true", help="show it on a web page too, while it runs")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON, and the rest to stderr")


def _page(out: TextIO) -> Dashboard | None:
    """Serve the page of this program and say where; None: it cannot be served here, and the demo goes on without."""
    from headgate.cli.demo.screen import say
    from headgate.dashboard import serve
    from headgate.errors import HeadgateError

    try:
        page = serve()
    except HeadgateError as error:
        say(f"no page: {error}", sys.stderr)
        return None
    say(f"Watch it at {page.url}\n", out)
    return page


def theatre_of(engine: str | None) -> AbstractContextManager[Theatre | None]:
    """Return what starts a cluster for the demo, or nothing."""
    if engine is None:
        return nullcontext()
    from headgate.cli.demo.clusters import CLUSTERS

    if find_spec({"ray": "ray", "dask": "distributed"}[engine]) is None:
        raise WrongCall(f"--on {engine} needs the extra: pip install 'headgate[{engine}]'")
    return CLUSTERS[engine]()


def run(options: argparse.Namespace) -> int:
    """Run the demo."""
    import logging

    from headgate.cli.demo import play
    from headgate.cli.demo.screen import has_reader, say, screen_for
    from headgate.cli.output import print_json

    logging.getLogger("headgate").setLevel(logging.ERROR)  # the screen shows what is logged as warnings
    out = sys.stderr if options.json else sys.stdout
    page = _page(out) if options.dashboard else None
    screen = screen_for(out, plain=options.plain, rows_needed=play.ROWS + (2 if page else 0))
    chronicle = play.Chronicle(options.calls, screen)
    try:
        with theatre_of(options.on) as theatre:
            ending = play.run(chronicle, slots=options.slots, seed=options.seed, theatre=theatre)
        say(ending.text, out)
    except KeyboardInterrupt:
        if not has_reader(out):
            raise BrokenPipeError from None
        say(f"\nstopped by Ctrl-C: {chronicle.answered} of {chronicle.calls} calls were answered", out)
        raise
    finally:
        if page is not None:
            page.close()
    if options.json:
        print_json(ending.figures)
    return 0 if ending.right else 1
