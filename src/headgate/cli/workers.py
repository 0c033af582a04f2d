"""`headgate workers`: which workers there are, their load, and why one is not used."""

from __future__ import annotations

import argparse

from headgate.cli.arguments import seconds
from headgate.cli.finding import (
    add_addresses,
    add_certificates,
    add_namespace,
    addresses_of,
    credentials_of,
    discovery_of,
)
from headgate.cli.output import complain, print_json, print_table

TYPE_CHECKING = False  # see cli/main.py
if TYPE_CHECKING:
    from typing import Any

    from headgate.workers.client.inspection import Inspection
    from headgate.workers.credentials import WorkerCredentials
    from headgate.workers.model import WorkerMetadata

_DESCRIPTION = """\
List the workers of a namespace, at the addresses of a host name (--dns), or at each ADDRESS: address, load (calls that
run), clients, version, tags, age, whether they serve TLS, the port of their metrics, and why a pool would not use one.
A worker of an older release that cannot tell its load shows "?"."""
_EXAMPLE = """\
example:
  headgate workers
  headgate workers --lan --cert-dir certs --json
  headgate workers 10.0.0.7:7070 10.0.0.8:7070 --cert-dir certs
  headgate workers --dns workers.prod.svc:7070 --cert-dir certs
"""
_WAITS = {"local": 0.5, "lan": 2.0}
_AT_ONCE = 32  # workers that are asked at the same time
TITLES = (
    "uid", "address", "state", "load", "clients", "version", "tags", "age", "TLS", "metrics port", "why it is not used"
)  # fmt: skip


def configure(parser: argparse.ArgumentParser) -> None:
    """Describe the arguments of the command."""
    parser.description, parser.epilog = _DESCRIPTION, _EXAMPLE
    add_addresses(parser)
    add_namespace(parser, dns=True)
    add_certificates(parser, "look as a pool does with the certificates in DIR")
    parser.add_argument("--wait", type=seconds, metavar="S", help="seconds to listen for workers (0.5, in a LAN 2)")
    parser.add_argument("--json", action="store_true", help="print a list of objects")


def run(options: argparse.Namespace) -> int:
    """List the workers."""
    import asyncio

    found = asyncio.run(look(options))
    if options.json:
        print_json([as_dict(one) for one in found])
    elif found:
        print_table(TITLES, [_row(one) for one in found], fold=("address", TITLES[-1]))
    if not found:
        complain("headgate workers", f"no workers in the namespace {options.namespace!r}")
    return 0


async def look(options: argparse.Namespace) -> list[Inspection]:
    """Find the workers of a namespace, of a host name or at addresses, and ask each of them."""
    credentials = credentials_of(options)
    addresses = addresses_of(options)
    if addresses is not None:
        return [_by_itself(one) for one in await inspect_all(_listed(addresses, credentials), credentials)]
    wait = getattr(options, "wait", None) or _WAITS[options.discovery]
    return await inspect_all(await _listen(options, wait), credentials)


async def inspect_all(found: list[WorkerMetadata], credentials: WorkerCredentials | None) -> list[Inspection]:
    """Ask workers, several at a time."""
    import asyncio

    from headgate.workers.client.inspection import inspect

    turn = asyncio.Semaphore(_AT_ONCE)

    async def one(metadata: WorkerMetadata) -> Inspection:
        async with turn:
            return await inspect(metadata, credentials)

    return await asyncio.gather(*map(one, found))


def _listed(addresses: list[str], credentials: WorkerCredentials | None) -> list[WorkerMetadata]:
    from headgate.discovery.static import listed_worker

    return [listed_worker(address, credentials is not None, frozenset()) for address in dict.fromkeys(addresses)]


def _by_itself(one: Inspection) -> Inspection:
    """Take from a worker's own answer what its address does not tell: who it is."""
    from dataclasses import replace

    load = one.load
    if load is None:
        return replace(one, metadata=replace(one.metadata, version=""))
    itself = replace(one.metadata, uid=load.uid, pid=load.pid, version=load.version, tags=load.tags)
    return replace(one, metadata=itself)


async def _listen(options: argparse.Namespace, wait: float) -> list[WorkerMetadata]:
    """The workers that a discovery tells of within some seconds: it says not when it has told of all."""
    import asyncio

    discovery = discovery_of(options)
    assert discovery is not None, "there is no --none here"
    found: dict[str, WorkerMetadata] = {}
    events = discovery.subscribe()
    try:
        async with asyncio.timeout(wait):
            async for event in events:
                if event.type == "worker-dropped":
                    found.pop(event.metadata.uid, None)
                else:
                    found[event.metadata.uid] = event.metadata
    except TimeoutError:
        pass
    finally:
        close = getattr(events, "aclose", None)
        if close is not None:
            await close()
    return sorted(found.values(), key=lambda metadata: (metadata.address, metadata.uid))


def as_dict(one: Inspection) -> dict[str, Any]:
    """What is known of a worker, as JSON."""
    metadata, load = one.metadata, one.load
    return {
        "uid": metadata.uid,
        "address": metadata.address,
        "pid": metadata.pid,
        "version": metadata.version or None,
        "secure": metadata.secure,
        "tags": sorted(metadata.tags),
        "metrics_port": _metrics_port(one),
        "extra": dict(metadata.extra),
        "admitted": one.admitted,
        "reason": one.reason or None,
        "remedy": one.remedy or None,
        "load": None if load is None else load.running,
        "clients": None if load is None else load.clients,
        "finished": None if load is None else load.finished,
        "age": None if load is None else round(load.age, 3),
    }


def _row(one: Inspection) -> tuple[str, ...]:
    metadata, load = one.metadata, one.load
    state = "ready" if one.admitted else "stopping" if load is not None and load.stopping else "not used"
    return (
        metadata.uid,
        metadata.address,
        state,
        "?" if load is None else str(load.running),
        "?" if load is None else str(load.clients),
        metadata.version or "?",
        ",".join(sorted(metadata.tags)) or "-",
        "?" if load is None else shown_age(load.age),
        "yes" if metadata.secure else "no",
        str(_metrics_port(one) or ""),
        one.reason,
    )


def _metrics_port(one: Inspection) -> int | None:
    """The port on its host where a worker has metrics, as it announces or answers."""
    from headgate.workers.model import metrics_port_of

    return metrics_port_of(one.metadata) or (None if one.load is None else one.load.metrics_port)


def shown_age(age: float) -> str:
    """A number of seconds in the largest unit that fits."""
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if age >= 2 * size:
            return f"{age / size:.0f} {unit}"
    return f"{age:.0f} s"
