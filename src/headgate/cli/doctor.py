"""`headgate doctor`: why a worker cannot be reached, and what to do."""

from __future__ import annotations

import argparse
from dataclasses import asdict

from headgate.cli.finding import (
    add_addresses,
    add_certificates,
    add_namespace,
    addresses_of,
    credentials_of,
    discovery_of,
)
from headgate.cli.output import paint, print_json
from headgate.core.one_line import one_line

TYPE_CHECKING = False  # see cli/main.py
if TYPE_CHECKING:
    from headgate.workers.diagnosis import Finding, State

_DESCRIPTION = """\
Name the cause when a worker cannot be reached: nobody listens, TLS and why it fails, protocol versions, clocks,
multicast, limits, permissions; and say what to do. Without ADDRESS and --dns it checks this machine and the workers of
the namespace. Exit code 0: all is well, or merely could be better; 1: something is wrong."""
_EXAMPLE = """\
example:
  headgate doctor
  headgate doctor gpu-3.example.org:7070 --cert-dir certs
  headgate doctor --dns workers.prod.svc:7070 --cert-dir certs
  headgate doctor --lan --json
"""
_COLOURS = {"ok": "green", "note": "yellow", "wrong": "red"}


def configure(parser: argparse.ArgumentParser) -> None:
    """Describe the arguments of the command."""
    parser.description, parser.epilog = _DESCRIPTION, _EXAMPLE
    add_addresses(parser)
    add_namespace(parser, dns=True)
    add_certificates(parser, "connect with the certificates in DIR")
    parser.add_argument("--json", action="store_true", help="print a list of objects")


def run(options: argparse.Namespace) -> int:
    """Check, and print what was found."""
    import asyncio

    found = asyncio.run(_check(options))
    if options.json:
        print_json([asdict(one) for one in found])
    else:
        width = max(len(one_line(one.name)) for one in found)
        for one in found:
            print(
                f"{paint(f'{one.state:<5}', _COLOURS[one.state])}  {one_line(one.name):<{width}}  {one_line(one.text)}"
            )
            if one.remedy and one.state != "ok":
                print(f"{'':<{width + 9}}{one_line(one.remedy)}")
    return 1 if any(one.state == "wrong" for one in found) else 0


async def _check(options: argparse.Namespace) -> list[Finding]:
    from headgate.workers.diagnosis import Finding, check_address, check_announcing, check_machine, findings_of

    credentials = credentials_of(options)
    found = _certificates(options.cert_dir, "wrong" if not options.addresses and options.dns is None else "note")
    try:
        addresses = addresses_of(options)
    except OSError as error:
        remedy = "Look for a mistake in the name, and at the DNS server of this machine."
        return [*found, Finding("name", "wrong", str(error), remedy)]
    if addresses is not None:
        for address in addresses:
            found += await check_address(address, credentials, named=len(addresses) > 1)
        return found
    found = [*check_machine(), *found]
    if not any(one.name == "runtime directory" and one.state == "wrong" for one in found):
        discovery = discovery_of(options)
        assert discovery is not None, "there is no --none here"
        found.append(await check_announcing(type(discovery)()))  # in a namespace that nobody else has
        if found[-1].state == "ok":
            from headgate.cli.workers import look

            found += [finding for one in await look(options) for finding in findings_of(one)]
    return found


def _certificates(folder: str | None, state: State) -> list[Finding]:
    """Check the certificates, as far as that can be done here; `state`: of an error. (With an address, the connection
    decides: where certificates are mounted, as in Kubernetes, they belong to others and work.)"""
    from headgate.workers.diagnosis import Finding

    if folder is None:
        return []
    try:
        from headgate.certs import check_certificates

        report = check_certificates(folder)
    except ImportError as error:
        return [Finding("certificates", "note", "they were not checked", str(error))]
    if not report.findings:
        return [Finding("certificates", "ok", f"valid until {report.expires:%Y-%m-%d}, for {', '.join(report.names)}")]
    return [
        Finding("certificates", state if one.level == "error" else "note", f"{one.file}: {one.text}", one.remedy)
        for one in report.findings
    ]
