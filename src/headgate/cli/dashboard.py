"""`headgate dashboard`: the web page of all running programs of this user."""

from __future__ import annotations

import argparse
import os
import sys

from headgate.cli.arguments import name
from headgate.cli.observing import HOW
from headgate.cli.output import WrongCall, print_json

_DESCRIPTION = f"""\
Serve a page that shows all running programs of this user, live: pools, tenants, resources, workers, events. {HOW}

It listens on this machine alone, and its address has a token that is new each time. Whoever has the address can see the
programs and act on them."""
_EXAMPLE = """\
example:
  headgate dashboard
  headgate dashboard --port 8090 --token-file token.txt
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Describe the arguments of the command."""
    parser.description, parser.epilog = _DESCRIPTION, _EXAMPLE
    parser.add_argument("--port", type=_port, default=0, metavar="PORT", help="on this port (any free one)")
    parser.add_argument("--host", type=name, default="127.0.0.1", metavar="HOST", help="on this address (127.0.0.1)")
    parser.add_argument(
        "--allow-host", type=name, action="append", default=[], metavar="NAME", help="also called by NAME; repeatable"
    )
    parser.add_argument("--token-file", type=name, metavar="FILE", help="a file with the token, instead of a new one")
    parser.add_argument("--insecure", action="store_true", help="with --host beyond loopback: without TLS")
    parser.add_argument("--json", action="store_true", help="print the address as JSON")


def run(options: argparse.Namespace) -> int:
    """Serve until Ctrl-C."""
    from headgate.dashboard.server import serve
    from headgate.dashboard.sources import PublishedPrograms

    token = None
    if options.token_file is not None:
        try:
            with open(options.token_file, encoding="utf-8") as file:
                if os.fstat(file.fileno()).st_mode & 0o077:
                    raise WrongCall(f"others can read --token-file {options.token_file}: chmod 600 it")
                token = file.read().strip()
        except (OSError, ValueError) as error:
            raise WrongCall(f"--token-file {options.token_file} cannot be read: {error}") from error
    with serve(
        options.port,
        options.host,
        token=token,
        hosts=options.allow_host,
        insecure=options.insecure,
        source=PublishedPrograms(),
    ) as page:
        if options.json:
            print_json({"url": page.url, "port": page.port}, indent=None)
        else:
            print(f"The page is at {page.url}", flush=True)
            print("Ctrl-C ends it.", file=sys.stderr)
        page.wait()
    return 0


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"must be a port from 0 to 65535, got {text!r}")
    return int(text)
