"""Arguments that several commands have: which workers are meant, and with which certificates they are reached."""

from __future__ import annotations

import argparse
import os

from headgate.cli.arguments import name
from headgate.cli.output import WrongCall

TYPE_CHECKING = False  # see cli/main.py
if TYPE_CHECKING:
    from headgate.discovery.port import DiscoveryLike
    from headgate.workers.credentials import WorkerCredentials

DEFAULT = "default"
"""The namespace of workers that were given none."""
CERTIFICATES = ("ca-cert.pem", "worker-key.pem", "worker-cert.pem")
"""The files of a folder that `headgate certs` makes, as `WorkerCredentials.from_files` takes them."""


def add_namespace(parser: argparse._ActionsContainer, *, none: str = "", dns: bool = False) -> None:
    """Add the arguments that choose a discovery; `none`: what it means to choose no discovery, where one may. `dns`:
    may it be one that only finds workers?"""
    parser.add_argument(
        "--namespace", type=name, default=DEFAULT, metavar="N", help=f"who finds each other ({DEFAULT!r})"
    )
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--local",
        dest="discovery",
        action="store_const",
        const="local",
        default="local",
        help="on this machine, for this user (the default)",
    )
    where.add_argument(
        "--lan",
        dest="discovery",
        action="store_const",
        const="lan",
        help="in this network, by DNS-SD (needs `pip install 'headgate[lan]'`)",
    )
    if dns:
        where.add_argument(
            "--dns", type=_host_and_port, metavar="HOST[:PORT]", help="at every address of a host name (port 50051)"
        )
    if none:
        where.add_argument("--none", dest="discovery", action="store_const", const="none", help=none)


def add_addresses(parser: argparse._ActionsContainer) -> None:
    """Add the arguments for workers that are known by their addresses."""
    parser.add_argument("addresses", nargs="*", metavar="ADDRESS", help="HOST:PORT or unix:/path of a worker")
    parser.add_argument(
        "--identity", type=name, metavar="NAME", help="the name in their certificates, if it is not their address"
    )


def addresses_of(options: argparse.Namespace) -> list[str] | None:
    """Return the addresses that were given, or those of the host name that was; None: neither was.

    OSError: the name cannot be looked up.
    """
    if options.addresses and (options.dns is not None or options.discovery != "local"):
        raise WrongCall("give addresses, or --dns HOST, or --lan: one of them says which workers are meant")
    if options.dns is None:
        return list(options.addresses) or None
    from headgate.discovery.dns import DnsDiscovery

    host, port = options.dns
    try:
        found = sorted(DnsDiscovery(host, **({} if port is None else {"port": port})).addresses())
    except OSError as error:
        raise OSError(f"the addresses of {host} cannot be looked up: {error.strerror or error}") from error
    if not found:
        raise OSError(f"the name {host} has no address now: no worker is ready, or the name is wrong")
    return found


def _host_and_port(text: str) -> tuple[str, int | None]:
    host, colon, port = text.partition(":")
    if not host.strip() or (colon and not (port.isascii() and port.isdigit() and 0 < int(port) < 65536)):
        raise argparse.ArgumentTypeError(f"must be HOST or HOST:PORT, such as workers.prod.svc:7070, got {text!r}")
    return host, int(port) if colon else None


def add_certificates(parser: argparse._ActionsContainer, does: str) -> None:
    """Add the argument that names a folder with certificates."""
    parser.add_argument("--cert-dir", metavar="DIR", help=f"{does} ({', '.join(CERTIFICATES)})")


def discovery_of(options: argparse.Namespace) -> DiscoveryLike | None:
    """Make the discovery that was chosen; None: none was."""
    if options.discovery == "none":
        return None
    if options.discovery == "lan":
        from headgate.discovery.lan import LanDiscovery

        return LanDiscovery(options.namespace, advertise_host=getattr(options, "advertise", None))
    from headgate.discovery.local import LocalDiscovery

    return LocalDiscovery(options.namespace)


def credentials_of(options: argparse.Namespace) -> WorkerCredentials | None:
    """Read the certificates of the folder that was given; None: none was."""
    folder = options.cert_dir
    if folder is None:
        return None
    paths = [os.path.join(folder, file) for file in CERTIFICATES]
    missing = [os.path.basename(path) for path in paths if not os.path.exists(path)]
    if missing:
        raise WrongCall(f"{folder} has no {', '.join(missing)}. Make certificates with `headgate certs {folder}`.")
    from headgate.workers.credentials import WorkerCredentials

    ca_cert, key, cert = paths
    return WorkerCredentials.from_files(ca_cert, key, cert, reload=True, identity=getattr(options, "identity", None))
