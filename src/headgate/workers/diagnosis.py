"""Find out what keeps workers from being reached: checks of this machine and of one address.

Every check returns a `Finding`, and none of them raises for what it finds. Checks that block are short.
"""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import socket
import stat
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from headgate._version import __version__
from headgate.core.clock import clock
from headgate.errors import HeadgateError
from headgate.workers.model import WorkerMetadata
from headgate.workers.protocol.addresses import TcpAddress, parse_address

if TYPE_CHECKING:
    from headgate.discovery.port import DiscoveryLike
    from headgate.workers.client.inspection import Inspection, Load
    from headgate.workers.credentials import WorkerCredentials

State = Literal["ok", "note", "wrong"]

FILES = (256, 4096)
"""Open files that a process needs at least, and that a pool with many workers may need."""
CLOCKS = 30.0
"""Seconds that two clocks may differ before certificates that are fresh, or nearly expired, are refused."""
GROUP = ("239.255.71.71", 0)
"""A multicast group of this site, for a try that disturbs nobody who speaks DNS-SD."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check."""

    name: str
    state: State
    """"ok"; "note": it works, and may be better; "wrong": it keeps workers from working."""
    text: str
    remedy: str = ""


# -- this machine -----------------------------------------------------------------------------------------------------


def check_open_files() -> Finding:
    """Check how many files a process may open: each worker and each client takes a few."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    least, good = FILES
    text = f"a process may open {soft if soft != resource.RLIM_INFINITY else 'any number of'} files"
    if soft == resource.RLIM_INFINITY or soft >= good:
        return Finding("open files", "ok", text)
    remedy = f"Raise the limit: ulimit -n {good}" + (
        f" (at most {hard} without root)." if 0 < hard < good else ", or LimitNOFILE= in a systemd unit."
    )
    return Finding("open files", "wrong" if soft < least else "note", text, remedy)


def check_socket_directory() -> Finding:
    """Check that there is a directory for sockets, with a path that is short enough."""
    from headgate.workers.processes.keeper_client import MAX_PATH, make_directory

    try:
        directory, lock = make_directory()
    except (OSError, HeadgateError) as error:
        text = error.message if isinstance(error, HeadgateError) else str(error)
        return Finding("sockets", "wrong", text, "Set XDG_RUNTIME_DIR to a short path of a directory of yours.")
    shutil.rmtree(directory, ignore_errors=True)
    os.close(lock)
    where = os.path.dirname(directory)
    return Finding("sockets", "ok", f"in {where}, with paths below {MAX_PATH} bytes")


def check_runtime_directory() -> Finding:
    """Check the directory in which workers of this machine are announced."""
    from headgate.discovery.local_files import runtime_directory

    try:
        path = runtime_directory()
    except (OSError, HeadgateError) as error:
        if isinstance(error, HeadgateError):
            return Finding("runtime directory", "wrong", error.message, error.remedy)
        return Finding("runtime directory", "wrong", str(error), "Set XDG_RUNTIME_DIR to a directory of yours.")
    return Finding("runtime directory", "ok", f"{path} is ours alone")


def check_shared_memory() -> Finding:
    """Check whether long arguments can be passed to workers of this machine without a copy through a socket."""
    from headgate.workers.protocol.shared_memory import Offer, can_read

    offer = Offer()
    try:
        if can_read(offer.probe):
            return Finding("shared memory", "ok", "long arguments go to workers of this machine through memory")
    finally:
        offer.close()
    return Finding(
        "shared memory",
        "note",
        "long arguments go through sockets: this machine has no memfd_create, or /proc cannot be read",
        "Nothing must be done; on Linux mount /proc and unset HEADGATE_SHARED_MEMORY for more speed.",
    )


def check_multicast(timeout: float = 1.0) -> Finding:
    """Check whether a multicast message of this machine is heard on this machine."""
    name = "multicast"
    remedy = "Join a network with multicast (containers: host networking), or use StaticDiscovery or DnsDiscovery."
    receiver = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    sender = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    try:
        receiver.bind(("", 0))
        member = socket.inet_aton(GROUP[0]) + socket.inet_aton("0.0.0.0")
        receiver.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, member)
        receiver.settimeout(timeout)
        sender.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_TTL, 0)  # it stays on this machine
        sender.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_LOOP, 1)
        token = os.urandom(16)
        sender.sendto(token, (GROUP[0], receiver.getsockname()[1]))
        while receiver.recv(64) != token:
            pass
    except TimeoutError:
        return Finding(name, "note", "a message was sent and not heard: LAN discovery will find nobody", remedy)
    except OSError as error:
        return Finding(name, "note", f"it cannot be used, so LAN discovery will not work: {error.strerror}", remedy)
    finally:
        receiver.close()
        sender.close()
    return Finding(name, "ok", "a message of this machine is heard on this machine")


async def check_announcing(discovery: DiscoveryLike, timeout: float = 5.0) -> Finding:
    """Check whether a worker that is announced is found, with a worker that does not exist."""
    name = "announcing"
    made_up = WorkerMetadata(f"doctor-{clock.token()[:10]}", "192.0.2.1:9", os.getpid(), __version__)
    try:
        async with asyncio.timeout(timeout), discovery.publisher as publisher:
            await publisher.publish("worker-added", made_up)
            async for event in discovery.subscribe():
                if event.metadata.uid == made_up.uid:
                    break
            await publisher.publish("worker-dropped", made_up)
    except TimeoutError:
        text = f"a worker that was announced was not found within {timeout:g} s"
        return Finding(name, "wrong", text, "Allow UDP port 5353 in the firewall, and multicast in the network.")
    except HeadgateError as error:
        return Finding(name, "wrong", error.message, error.remedy)
    except OSError as error:
        return Finding(name, "wrong", str(error), "Look at the limits and permissions above.")
    return Finding(name, "ok", "a worker that was announced is found")


def check_machine() -> list[Finding]:
    """Check all that workers need of this machine."""
    return [
        check_open_files(),
        check_socket_directory(),
        check_runtime_directory(),
        check_shared_memory(),
        check_multicast(),
    ]


# -- one address ------------------------------------------------------------------------------------------------------


async def check_address(
    address: str, credentials: WorkerCredentials | None, timeout: float = 3.0, *, named: bool = False
) -> list[Finding]:
    """Check whether a worker can be reached; `named`: call it by its address. InvalidArgument: this is none."""
    from headgate.workers.client.inspection import inspect

    where = parse_address(address)
    known = await (check_name(where) if isinstance(where, TcpAddress) else asyncio.to_thread(_check_unix, where))
    if known.state == "wrong":
        return [known]
    secure = credentials is not None and isinstance(where, TcpAddress)
    metadata = WorkerMetadata("", address, 0, __version__, secure=secure)
    worker, *others = findings_of(await inspect(metadata, credentials if secure else None, timeout=timeout))
    return [known, replace(worker, name=f"worker {address}") if named else worker, *others]


async def check_name(where: TcpAddress) -> Finding:
    """Check whether the host of an address is known."""
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(where.host, where.port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        text = f"the name {where.host} is not known: {getattr(error, 'strerror', None) or error}"
        return Finding("name", "wrong", text, "Look for a mistake in the name, and at the DNS server of this machine.")
    hosts = sorted({str(one[4][0]) for one in found})
    return Finding("name", "ok", f"{where.host} is {', '.join(hosts)}")


def _check_unix(path: str) -> Finding:
    from headgate.workers.protocol.transport import check_socket

    name = "socket"
    try:
        check_socket(path)
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            return Finding(name, "wrong", f"{path} is no socket", "Look for a mistake in the path.")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as one:
            one.settimeout(1.0)
            one.connect(path)
    except PermissionError as error:
        return Finding(name, "wrong", str(error), "A Unix socket is for the user who started the worker.")
    except FileNotFoundError:
        return Finding(name, "wrong", f"there is no {path}: no worker listens there", "Start the worker.")
    except OSError as error:
        if error.errno == errno.ECONNREFUSED:
            return Finding(name, "wrong", f"nobody listens on {path}: its worker has died", "Start the worker again.")
        return Finding(name, "wrong", f"{path} cannot be used: {error}", "Give a path of at most 100 bytes.")
    return Finding(name, "ok", f"somebody listens on {path}")


def findings_of(inspection: Inspection) -> list[Finding]:
    """Say what an inspection of a worker has found."""
    metadata, load = inspection.metadata, inspection.load
    name = f"worker {load.uid if load is not None and not metadata.uid else metadata.uid}".strip()
    where = "" if name == "worker" else f" at {metadata.address}"
    if not inspection.admitted:
        said = f"{where.strip()}: {inspection.reason}" if where else inspection.reason
        return [Finding(name, "wrong", said, inspection.remedy), *_clock_of(load)]
    if load is None:
        return [Finding(name, "ok", f"{where.strip()}: {inspection.reason}" if where else inspection.reason)]
    how = "with TLS" if metadata.secure else "without TLS"
    text = f"it answers{where} {how}: version {load.version}, protocol {load.newest}, {load.running} calls running"
    return [Finding(name, "ok", text), *_clock_of(load)]


def _clock_of(load: Load | None) -> list[Finding]:
    if load is None or abs(load.clock_offset) < CLOCKS:
        return []
    which = "ahead of" if load.clock_offset > 0 else "behind"
    text = f"the clock of worker {load.uid} is {abs(load.clock_offset):.0f} s {which} ours"
    return [
        Finding("clock", "wrong", text, "Set both clocks with NTP: else certificates seem expired or not valid yet.")
    ]
