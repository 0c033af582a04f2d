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


def add_namespace(parser: argparse._ActionsContainer, *, none: str = "") -> None:
    """Add the arguments that choose a discovery; `none`: what it means to choose no discovery, where one may."""
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
    if none:
        where.add_argument("--none", dest="discovery", action="store_const", const="none", help=none)


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
    return WorkerCredentials.from_files(ca_cert, key, cert, reload=True)
