"""`headgate certs`: certificates for workers, for development; and a check of a folder with certificates."""

from __future__ import annotations

import argparse
import os

from headgate.cli.arguments import name, whole
from headgate.cli.output import WrongCall, complain, paint, print_json
from headgate.core.one_line import one_line

TYPE_CHECKING = False  # see cli/main.py
if TYPE_CHECKING:
    from headgate.certs import CertificateReport

_DESCRIPTION = """\
Make a certificate authority and the certificate of a worker in DIR, for development, and print when they expire. With a
CA that is there already, it signs another certificate. Nothing is overwritten; keys are readable for you alone.
`headgate certs check DIR` says what is wrong with such a folder, with exit code 1 if something is.

Needs `pip install 'headgate[certs]'`."""
_EXAMPLE = """\
example:
  headgate certs certs --name gpu-3.example.org --name 10.0.0.7
  headgate certs check certs
  headgate worker --lan --cert-dir certs
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Describe the arguments of the command."""
    parser.description, parser.epilog = _DESCRIPTION, _EXAMPLE
    parser.usage = "headgate certs [-h] [--name N]... [--days D] [--json] [check] DIR"
    parser.add_argument("words", nargs="+", metavar="DIR", help="the folder")
    parser.add_argument("--name", type=name, action="append", default=[], metavar="N", help="a host name or IP address")
    parser.add_argument("--days", type=whole(1), metavar="D", help="how long the worker's certificate is valid (365)")
    parser.add_argument("--json", action="store_true", help="print an object")


def run(options: argparse.Namespace) -> int:
    """Make certificates, or check them."""
    *before, folder = options.words
    if before not in ([], ["check"]):
        raise WrongCall(f"give one folder, got {', '.join(options.words)}. See `headgate certs --help`.")
    if before and (options.name or options.days):
        raise WrongCall("--name and --days are for making certificates, and `check` makes none")
    if not before and folder == "check":
        raise WrongCall("`check` needs a folder: headgate certs check DIR. (For a folder of that name: ./check)")
    if before and not os.path.isdir(folder):
        raise WrongCall(f"there is no folder {folder}. Make certificates with `headgate certs {folder}`.")
    try:
        report = _check(folder) if before else _make(folder, options)
    except ImportError as error:
        complain("headgate certs", str(error))
        return 1
    if options.json:
        print_json(report.to_dict())
    else:
        _print(report)
    return 0 if report.ok else 1


def _make(folder: str, options: argparse.Namespace) -> CertificateReport:
    from headgate.certs import WORKER_DAYS, make_certificates

    return make_certificates(folder, options.name, days=options.days or WORKER_DAYS)


def _check(folder: str) -> CertificateReport:
    from headgate.certs import check_certificates

    return check_certificates(folder)


def _print(report: CertificateReport) -> None:
    for path in report.made:
        print(f"made {path}")
    dates = [(f"certificate authority {one_line(ca.name)}", ca.expires) for ca in report.cas]
    if len(dates) == 1:
        dates = [("certificate authority", report.cas[0].expires)]
    if report.expires is not None:
        dates.append(("worker", report.expires))
    for what, until in dates:
        print(f"{what}: valid until {until:%Y-%m-%d %H:%M} UTC")
    if report.names:
        print(f"names: {', '.join(report.names)}")
    for finding in report.findings:
        colour = "red" if finding.level == "error" else "yellow"
        where = f"{finding.file}: " if finding.file else ""
        print(f"{paint(finding.level, colour)}: {where}{finding.text}. {finding.remedy}")
