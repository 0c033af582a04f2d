"""`headgate serve-keys`: a local proxy that holds keys, and rotates them for programs in any language."""

from __future__ import annotations

import argparse
import os
import sys

from headgate.cli.arguments import memory, name, seconds, whole
from headgate.cli.output import WrongCall, complain, discard, print_json

TYPE_CHECKING = False  # see cli/main.py
if TYPE_CHECKING:
    from typing import Any

    from headgate.cli.batch.keys import Keys
    from headgate.integrations.keys_proxy import ProxyRules, Tokens
    from headgate.integrations.keys_proxy.serving import ProxyServer

_DESCRIPTION = """\
Hold API keys in a local proxy. Programs send their requests to it with a token instead of a key; it gives each request
a key, and rotates when one is limited or revoked. Streams pass through as they come. Tenants take turns.

When it takes requests it prints one line on stdout: the base URL and, unless --tokens is given, the token that it has
made. Its log goes to stderr; keys are in neither.

The first Ctrl-C or SIGTERM lets running requests finish, and the exit code is 0; the second one, or the end of --grace,
breaks them off (130 or 143)."""
_EXAMPLE = """\
example:
  headgate serve-keys --upstream https://api.openai.com/v1 --keys keys.toml
  headgate serve-keys --upstream https://api.anthropic.com --keys keys.toml \\
      --tokens tokens.toml --port 8700
  OPENAI_BASE_URL=http://127.0.0.1:8700/v1 OPENAI_API_KEY=TOKEN program
"""
_MADE = "default"  # the tenant of the token that the command makes


def configure(parser: argparse.ArgumentParser) -> None:
    """Describe the arguments of the command."""
    parser.description, parser.epilog = _DESCRIPTION, _EXAMPLE
    keys = parser.add_argument_group("where keys come from, and where they go")
    keys.add_argument("--upstream", type=name, required=True, metavar="URL", help="the API; paths follow this URL")
    keys.add_argument(
        "--keys",
        type=name,
        action="append",
        required=True,
        metavar="KEYS",
        help="a TOML file with keys, env:NAME, or command:...; repeatable",
    )
    keys.add_argument("--header", type=name, metavar="H", help="where the key goes (where the client has its token)")
    keys.add_argument("--insecure-upstream", action="store_true", help="the upstream may be without TLS")
    asks = parser.add_argument_group("who may ask for what")
    asks.add_argument("--tokens", type=name, metavar="TOKENS", help="a TOML file with tokens and their tenants")
    asks.add_argument(
        "--allow-path",
        type=name,
        action="append",
        default=[],
        metavar="PATH",
        help="such as /chat/completions or /models/*; repeatable (paths that use models)",
    )
    asks.add_argument(
        "--allow-method", type=name, action="append", default=[], metavar="M", help="besides GET and POST; repeatable"
    )
    asks.add_argument(
        "--allow-host", type=name, action="append", default=[], metavar="H", help="a name of this machine; repeatable"
    )
    place = parser.add_argument_group("where it listens")
    place.add_argument("--host", type=name, default="127.0.0.1", metavar="H", help="an address (127.0.0.1)")
    place.add_argument("--port", type=_port, default=0, metavar="N", help="a port; 0: any free one (0)")
    place.add_argument("--insecure-listen", action="store_true", help="beyond loopback: others can read all of it")
    _configure_limits(parser)


def _configure_limits(parser: argparse.ArgumentParser) -> None:
    limits = parser.add_argument_group("limits")
    limits.add_argument("--max-concurrent", type=whole(1), metavar="N", help="requests at a time (what keys allow)")
    limits.add_argument(
        "--max-per-tenant",
        type=whole(1),
        metavar="N",
        help="requests of one tenant at a time (three quarters if there are several)",
    )
    limits.add_argument(
        "--max-waiting",
        type=whole(1),
        default=1000,
        metavar="N",
        help="requests that wait for a turn, half of them of one tenant at most (1000)",
    )
    limits.add_argument("--max-body", type=memory, default=10 << 20, metavar="SIZE", help="of a request (10M)")
    limits.add_argument("--max-bodies", type=memory, default=256 << 20, metavar="SIZE", help="of all (256M)")
    limits.add_argument("--timeout", type=seconds, default=600.0, metavar="S", help="for an answer (600)")
    limits.add_argument("--wait", type=seconds, default=60.0, metavar="S", help="for a turn, and for a key (60)")
    limits.add_argument(
        "--client-timeout",
        type=seconds,
        default=30.0,
        metavar="S",
        help="to send a request; a client that reads nothing for 1.5 times as long is cut off (30)",
    )
    limits.add_argument("--grace", type=seconds, default=30.0, metavar="S", help="for requests at the end (30)")
    parser.add_argument("--json", action="store_true", help="print the line as JSON")


def run(options: argparse.Namespace) -> int:
    """Serve until a signal ends it."""
    import asyncio
    import logging

    missing = _missing()
    if missing is not None:
        complain("headgate serve-keys", f"this needs the package {missing}: pip install 'headgate[http]'")
        return 1
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    # What uvicorn says of answers that were broken off is known to the client; failures are logged by the proxy.
    logging.getLogger("uvicorn").setLevel(logging.CRITICAL)
    _check_host(options)
    made = _new_token() if options.tokens is None else None
    rules = _rules(options, _tokens(options, made))
    keys = _keys(options)
    return asyncio.run(_serve(options, rules, keys, made))


def _missing() -> str | None:
    from importlib import import_module

    for package in ("httpx", "uvicorn"):
        try:
            import_module(package)
        except ImportError:
            return package
    return None


def _check_host(options: argparse.Namespace) -> None:
    from headgate.integrations.key_rules import is_loopback

    if not options.insecure_listen and not is_loopback(options.host):
        raise WrongCall(
            f"--host {options.host} listens beyond this machine, without TLS: everybody on the way can read tokens and "
            "prompts. Listen on 127.0.0.1, or give --insecure-listen if the network is yours alone"
        )


def _new_token() -> str:
    from headgate.core.clock import clock

    return f"hg-{clock.token()}"


def _tokens(options: argparse.Namespace, made: str | None) -> Tokens:
    from pathlib import Path

    from headgate.cli.client_tokens import read_tokens
    from headgate.core.clock import clock
    from headgate.integrations.keys_proxy import Client, Tokens

    if made is None:
        clients = read_tokens(Path(options.tokens), os.environ)
    else:
        clients = {made: Client(_MADE, names_tenant=True)}
    return Tokens(clients, salt=clock.token())


def _rules(options: argparse.Namespace, tokens: Tokens) -> ProxyRules:
    from headgate.integrations.keys_proxy import ProxyRules
    from headgate.integrations.keys_proxy.rules import METHODS

    return ProxyRules(
        options.upstream,
        tokens,
        paths=options.allow_path,
        methods=(*METHODS, *options.allow_method),
        hosts=(*options.allow_host, options.host),
        header=options.header,
        insecure=options.insecure_upstream,
    )


def _keys(options: argparse.Namespace) -> Keys:
    from headgate.cli.batch.keys import read_keys

    keys = read_keys(options.keys, os.environ)
    if keys.classify is not None:
        raise WrongCall("`classify` in a file of keys is for `headgate map`: the proxy judges answers by its own rules")
    for key, fields in keys.fields.items():
        value = fields["value"]
        if not isinstance(value, str) or not value.isascii() or not value.isprintable() or not value.strip():
            raise WrongCall(f"the key {key} has no value that can go into a header: it must be one line of ASCII text")
    return keys


async def _serve(options: argparse.Namespace, rules: ProxyRules, keys: Keys, made: str | None) -> int:
    from headgate.integrations.keys_proxy import KeysProxy, Limits
    from headgate.integrations.keys_proxy.serving import ProxyServer

    pool = keys.pool(max_attempts=3)
    limits = Limits(
        max_concurrent=options.max_concurrent or _allowed(keys),
        max_per_tenant=options.max_per_tenant,
        max_waiting=options.max_waiting,
        max_body=options.max_body,
        max_bodies=options.max_bodies,
        timeout=options.timeout,
        wait=options.wait,
        client_timeout=options.client_timeout,
    )
    async with KeysProxy(pool, rules, limits) as proxy:
        server = ProxyServer(proxy, host=options.host, port=options.port, grace=options.grace)
        await server.serve(lambda: _tell(server, rules, made, options.json), signals=True)
    return 128 + server.signal if server.cancelled and server.signal else 0


def _allowed(keys: Keys) -> int:
    """As many requests at a time as the keys allow; 100 if one of them has no limit."""
    return keys.most_in_flight or 100


def _tell(server: ProxyServer, rules: ProxyRules, made: str | None, as_json: bool) -> None:
    """Print the line for who started it. If nobody reads it, the proxy works all the same."""
    told: dict[str, Any] = {"base_url": f"{server.url}{rules.base}", "pid": os.getpid()}
    if made is not None:
        told["token"] = made
    try:
        if as_json:
            print_json(told, indent=None)
        else:
            print(f"base_url={told['base_url']}" + (f" token={made}" if made else ""), flush=True)
    except OSError as error:
        discard(sys.stdout)
        complain("headgate serve-keys", f"the line for stdout could not be written: {error}")


def _port(text: str) -> int:
    value = int(text)
    if not 0 <= value <= 65535:
        raise argparse.ArgumentTypeError(f"must be a port from 0 to 65535, got {text}")
    return value
