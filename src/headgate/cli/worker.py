"""`headgate worker`: a worker in this process, until it is told to stop."""

from __future__ import annotations

import argparse
import os
import sys

from headgate.cli.arguments import memory, name, seconds, whole
from headgate.cli.finding import add_certificates, add_namespace, credentials_of, discovery_of
from headgate.cli.output import WrongCall, complain, print_json

TYPE_CHECKING = False  # see cli/main.py
if TYPE_CHECKING:
    from typing import NoReturn

    from headgate.observe.metrics_server import MetricsServer
    from headgate.workers.model import WorkerMetadata
    from headgate.workers.server.standalone import WorkerProcess

_DESCRIPTION = """\
Run a worker in this process. When it takes calls it prints one line of JSON on stdout (uid, address, pid, version,
secure, tags, namespace); its log goes to stderr. It answers grpc.health.v1.

The first SIGTERM or Ctrl-C lets running calls finish, and the exit code is 0; the second one cancels them (143 or 130).

Routines travel by reference: the worker needs the same code as its callers. The current folder and PYTHONPATH are
searched for it; --module imports modules before the worker is ready."""
_EXAMPLE = """\
example:
  headgate worker --tag gpu --module jobs
  headgate worker --lan --cert-dir certs --concurrency 8
  headgate worker --none --bind 0.0.0.0:7070 --cert-dir certs
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Describe the arguments of the command."""
    parser.description, parser.epilog = _DESCRIPTION, _EXAMPLE
    place = parser.add_argument_group("where it listens").add_mutually_exclusive_group()
    place.add_argument("--bind", type=_host_and_port, metavar="HOST:PORT", help="on TCP; port 0: any free one")
    place.add_argument("--socket", type=name, metavar="PATH", help="on a Unix socket, in a folder of yours")
    found = parser.add_argument_group("how it is found")
    add_namespace(found, none="nowhere: callers know the address")
    found.add_argument(
        "--advertise", type=_others_reach, metavar="HOST", help="with --lan: how others reach this machine"
    )
    found.add_argument("--tag", type=name, action="append", default=[], metavar="T", help="a tag; may be repeated")
    trust = parser.add_argument_group("who may call it").add_mutually_exclusive_group()
    add_certificates(trust, "those with a certificate of the CA in DIR, over TLS")
    trust.add_argument("--insecure", action="store_true", help="with --bind beyond loopback: EVERYBODY, without TLS")
    work = parser.add_argument_group("what it runs")
    work.add_argument("--concurrency", type=whole(1), metavar="N", help="at most N tasks at the same time")
    work.add_argument(
        "--module", type=name, action="append", default=[], metavar="M", help="import M before it is ready; repeatable"
    )
    seen = parser.add_argument_group("how it is watched")
    seen.add_argument(
        "--metrics-port", type=_port, metavar="PORT", help="/metrics, /healthz and /readyz over HTTP; 0: any free port"
    )
    seen.add_argument("--metrics-host", type=name, default="127.0.0.1", metavar="HOST", help="on HOST (127.0.0.1)")
    seen.add_argument(
        "--metrics-allow-host", type=name, action="append", default=[], metavar="NAME",
        help="a host name by which they may be asked for, besides addresses; repeatable",
    )  # fmt: skip
    ends = parser.add_argument_group("when it ends")
    ends.add_argument("--max-tasks", type=whole(1), metavar="N", help="after N tasks")
    ends.add_argument("--max-memory", type=memory, metavar="M", help="above so much memory: 512M, 2G")
    ends.add_argument("--orphan-timeout", type=seconds, metavar="S", help="after S seconds without a client")
    ends.add_argument(
        "--grace", type=seconds, metavar="S", help="told to stop, cancel calls after S seconds; else they finish"
    )


def run(options: argparse.Namespace) -> int:
    """Serve, and end the process. It returns only if no worker could be started."""
    import logging

    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    credentials = credentials_of(options)
    if options.socket is not None and credentials is not None:
        raise WrongCall("--socket and --cert-dir cannot be given together: a Unix socket has no TLS")
    host, port = options.bind or (None, 0)
    if options.discovery == "lan" and options.socket is not None:
        raise WrongCall("--socket and --lan cannot be given together: other machines cannot reach a Unix socket")
    if options.discovery == "lan" and credentials is None and host is None and not options.insecure:
        raise WrongCall(
            "--lan listens on all addresses, and whoever can connect can run code here: give --cert-dir DIR (`headgate "
            "certs DIR` makes certificates), or --insecure if nobody else can reach this network"
        )
    if host is not None and credentials is None and not options.insecure:
        _check_loopback(host)
    if options.discovery != "lan" and options.advertise is not None:
        raise WrongCall("--advertise is for --lan: elsewhere the worker is announced with the address it listens on")
    if not _prepared(options.module):
        return 1

    from headgate.workers.model import METRICS_PORT
    from headgate.workers.server.standalone import WorkerProcess

    worker = WorkerProcess(
        *options.tag,
        host=host,
        port=port,
        socket=options.socket,
        credentials=credentials,
        discovery=discovery_of(options),
        grace=options.grace,
        insecure=options.insecure,
        concurrency=options.concurrency,
        max_tasks=options.max_tasks,
        max_memory=options.max_memory,
        orphan_timeout=options.orphan_timeout,
    )
    namespace = None if options.discovery == "none" else options.namespace
    metrics = _metrics(worker, options)
    if metrics is not None:
        worker.extra[METRICS_PORT] = metrics.port
    _serve(worker, namespace, None if metrics is None else metrics.port)
    if metrics is not None:
        metrics.close()
    return _leave(128 + worker.signal if worker.cancelled and worker.signal else 0)


def _check_loopback(host: str) -> None:
    from headgate.workers.protocol.addresses import is_loopback

    if not is_loopback(host):
        raise WrongCall(
            f"--bind {host} listens beyond this machine, and whoever can connect can run code here: give --cert-dir "
            "DIR (`headgate certs DIR` makes certificates), listen on 127.0.0.1, or give --insecure if nobody else can "
            "reach this network"
        )


def _prepared(modules: list[str]) -> bool:
    """Prepare the interpreter, and import modules. False: one of them failed, and it was said why."""
    from importlib import import_module

    from headgate.workers.processes.worker_main import prepare

    sys.path.insert(0, os.getcwd())  # as `python -m` does, and the installed command does not
    prepare()
    for module in modules:
        try:
            import_module(module)
        except (Exception, SystemExit) as error:
            import traceback

            traceback.print_exc()
            complain("headgate worker", f"module {module} cannot be imported: {type(error).__name__}: {error}")
            return False
    return True


def _metrics(worker: WorkerProcess, options: argparse.Namespace) -> MetricsServer | None:
    """Serve what the worker does, if that was asked for."""
    if options.metrics_port is None:
        return None
    from headgate.observe.metrics_server import MetricsServer
    from headgate.observe.prometheus import WorkerCollector, exposition

    collector = WorkerCollector(worker.load)
    exposition(collector)  # says now if the extra is missing
    try:
        return MetricsServer(
            options.metrics_host.removeprefix("[").removesuffix("]"),
            options.metrics_port,
            lambda: exposition(collector),
            lambda: worker.takes_calls,
            *options.metrics_allow_host,
        )
    except OSError as error:
        raise OSError(f"--metrics-port {options.metrics_port} cannot be used: {error.strerror or error}") from error


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"must be a port from 0 to 65535, got {text!r}")
    return int(text)


def _serve(worker: WorkerProcess, namespace: str | None, metrics_port: int | None) -> None:
    from headgate.workers.server.event_loops import new_loop

    def ready(metadata: WorkerMetadata) -> None:
        line: dict[str, object] = {
            "uid": metadata.uid,
            "address": metadata.address,
            "pid": metadata.pid,
            "version": metadata.version,
            "secure": metadata.secure,
            "tags": sorted(metadata.tags),
            "namespace": namespace,
        }
        if metrics_port is not None:
            line["metrics_port"] = metrics_port
        try:
            print_json(line, indent=None)
        except OSError as error:  # nobody reads it: the worker works all the same
            complain("headgate worker", f"the line for stdout could not be written: {error}")

    # Not asyncio.run, which would cancel what is left of gRPC's own tasks, and they would print that.
    new_loop("").run_until_complete(worker.serve(ready))


def _leave(code: int) -> NoReturn:
    """End the process at once: threads of routines that cannot be interrupted must not keep it."""
    import atexit

    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except Exception:  # closed, or there is none
            pass
    os._exit(code)


def _others_reach(text: str) -> str:
    from headgate.errors import InvalidArgument
    from headgate.workers.protocol.addresses import TcpAddress, is_wildcard, parse_address

    host = text.strip().removeprefix("[").removesuffix("]")
    try:
        parse_address(str(TcpAddress(host, 1)))
        fits = not is_wildcard(host)
    except InvalidArgument:
        fits = False
    if not fits:
        raise argparse.ArgumentTypeError(f"must be a host name or an address that others can reach, got {text!r}")
    return host


def _host_and_port(text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    if not colon or not port.isdecimal() or int(port) > 65535:
        raise argparse.ArgumentTypeError(f"must be HOST:PORT, such as 127.0.0.1:7070 or [::]:0, got {text!r}")
    bracketed = host.startswith("[") and host.endswith("]")
    if not host or (":" in host and not bracketed):
        raise argparse.ArgumentTypeError(f"must be HOST:PORT with an IPv6 address in brackets, got {text!r}")
    return host.strip("[]"), int(port)
