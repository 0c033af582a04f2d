"""gRPC: the only module that imports it, opens channels to workers and binds servers.

`dial` opens a channel, `bind` lets a server listen. The options of both ends stand here side by side, because they
must agree. A Unix socket is plain text in a directory of this user, which is checked each time. TCP is plain text
without credentials, which a worker offers to its own machine only unless it is told otherwise, and else TLS.

gRPC's C core runs handlers at ``os.fork``, in the parent and in the child, that have crashed children which never used
gRPC (seen with 1.85). A forked child cannot use our workers anyhow, and is told so; without the handlers it survives.
So they are switched off before the import.
"""

from __future__ import annotations

import asyncio
import os
import socket
import stat
import threading
from typing import TYPE_CHECKING, Any, Final

from headgate.workers.protocol.grpc_environment import grpc_variables

os.environ.update(grpc_variables(os.environ))

import grpc
import grpc.aio

from headgate.errors import InvalidArgument
from headgate.workers.options import KEEPALIVE_MS, ChannelOptions, WorkerOptions
from headgate.workers.protocol.addresses import TcpAddress, is_loopback, parse_address

if TYPE_CHECKING:
    from headgate.workers.credentials import WorkerCredentials

LOADED_IN: int = os.getpid()
"""Pid of the process that imported gRPC. In a child forked from that one gRPC would hang."""

EOF: Final[Any] = vars(grpc.aio)["EOF"]
"""What reading a stream returns at its end. (gRPC does not declare it to type checkers.)"""

HANDSHAKE_MS: Final = 10_000
"""Milliseconds that who connects to a worker has to finish its handshake, or it is disconnected."""

_CHANNEL_OPTIONS = (
    ("grpc.use_local_subchannel_pool", 1),  # each channel has a connection of its own
    ("grpc.enable_http_proxy", 0),  # workers are near: what HTTP_PROXY is meant for is not
)
_COMPRESSION = {None: None, "gzip": grpc.Compression.Gzip, "deflate": grpc.Compression.Deflate}

_Options = tuple[tuple[str, int | str], ...]


def start_threads() -> None:
    """Have gRPC start its own threads now, and not with the first channel."""

    async def start() -> None:
        vars(grpc.aio)["init_grpc_aio"]()  # not declared to type checkers either

    # It wants an event loop, and would make one for the caller's thread. That may have one that runs, too.
    thread = threading.Thread(target=lambda: asyncio.run(start()), name="headgate-grpc")
    thread.start()
    thread.join()


def let_threads_end() -> None:
    """Undo `start_threads`: they end when no channel needs them."""
    vars(grpc.aio)["shutdown_grpc_aio"]()


def dial(
    address: str,
    *,
    session: bool = True,
    credentials: WorkerCredentials | None = None,
    options: ChannelOptions | None = None,
) -> grpc.aio.Channel:
    """Open a channel to the worker at this address.

    With `session` the channel pings the worker and ends when no pong comes. Without, for a single request, it waits as
    long as the request does. Credentials that are renewed are used as they are known: await their `refreshed` before.
    PermissionError: the address is a Unix socket that others could have made.
    """
    given = channel_options(options) if session else _CHANNEL_OPTIONS
    compression = None if options is None else _COMPRESSION[options.compression]
    where = parse_address(address)
    if isinstance(where, str):
        check_socket(where)
    elif credentials is not None:
        if credentials.identity is not None:
            given = (*given, ("grpc.ssl_target_name_override", credentials.identity))
        return grpc.aio.secure_channel(address, credentials.client_credentials, options=given, compression=compression)
    return grpc.aio.insecure_channel(address, options=given, compression=compression)


def make_server(handler: grpc.GenericRpcHandler, options: WorkerOptions | None = None) -> grpc.aio.Server:
    """Make a server for the calls that this handler knows; `bind` gives it an address."""
    compression = None if options is None else _COMPRESSION[options.channel.compression]
    server = grpc.aio.server(options=server_options(options), compression=compression)
    server.add_generic_rpc_handlers((handler,))
    return server


def bind(
    server: grpc.aio.Server, address: str, *, credentials: WorkerCredentials | None = None, insecure: bool = False
) -> str:
    """Let a server listen on this address, with TLS if there are credentials; return it with the port that it got.

    A Unix socket never has TLS: its directory is private. InvalidArgument: other machines could connect to it without
    a certificate, and `insecure` does not say that they may. OSError: it cannot listen there.
    """
    where = parse_address(address)
    if isinstance(where, str):
        check_socket(where)
        if is_listening(where):
            raise OSError(f"cannot listen on {address}: another process does")
        before = os.umask(0o177)  # nobody else may connect, whatever the directory allows to others
        try:
            _listen(server, address, None)
        finally:
            os.umask(before)
        return address
    if credentials is None and not insecure and not is_loopback(where.host):
        raise InvalidArgument(
            f"a worker at {address} without credentials would run the code of everybody who can connect to it",
            remedy="Pass credentials=WorkerCredentials.from_files(...) (`headgate certs DIR` makes certificates), "
            "listen on 127.0.0.1, or pass insecure=True if nobody else can reach this network.",
        )
    port = _listen(server, address, None if credentials is None else credentials.server_credentials)
    return str(TcpAddress(where.host, port))


def _listen(server: grpc.aio.Server, address: str, credentials: grpc.ServerCredentials | None) -> int:
    try:
        if credentials is None:
            port = server.add_insecure_port(address)
        else:
            port = server.add_secure_port(address, credentials)
    except RuntimeError as error:
        raise OSError(f"cannot listen on {address}: {error}") from None
    if not port:
        raise OSError(f"cannot listen on {address}")
    return int(port)


def is_listening(path: str) -> bool:
    """Whether somebody listens on this Unix socket. (gRPC would take the path from them.)"""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(path)
        except (OSError, ValueError):
            return False
    return True


def check_socket(path: str) -> None:
    """Raise PermissionError unless this Unix socket, if there is one, and its directory are this user's alone."""
    folder, us = os.path.dirname(path), os.geteuid()
    try:
        found = os.lstat(folder)
    except FileNotFoundError:
        return  # nobody listens there
    if not stat.S_ISDIR(found.st_mode):
        raise PermissionError(f"{folder} is a symbolic link or no directory: name the directory itself")
    if found.st_uid != us:
        raise PermissionError(
            f"{folder} belongs to the user {found.st_uid}, not to {us}: use a directory of your own for the sockets of "
            "workers, as who owns it decides who answers there"
        )
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(
            f"others can write to {folder} (mode {stat.S_IMODE(found.st_mode):04o}) and put a socket of theirs in the "
            "place of a worker's: use a directory of your own (mkdir -m 700 ...)"
        )
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(found.st_mode) or found.st_uid != us:
        raise PermissionError(f"{path} is not a socket of the user {us}: remove it, or use another path")


# -- options ----------------------------------------------------------------------------------------------------------


def channel_options(options: ChannelOptions | None) -> _Options:
    """Return the options of gRPC for a channel that carries a session."""
    options = options if options is not None else ChannelOptions()
    timeout = _or(options.keepalive_timeout_ms, KEEPALIVE_MS)
    return (
        *_CHANNEL_OPTIONS,
        *_lengths(options),
        ("grpc.enable_retries", 0),  # a call that may have begun is never sent again
        ("grpc.keepalive_time_ms", _or(options.keepalive_time_ms, KEEPALIVE_MS)),
        ("grpc.keepalive_timeout_ms", timeout),
        ("grpc.http2.ping_timeout_ms", timeout),
        ("grpc.keepalive_permit_without_calls", int(_or(options.keepalive_permit_without_calls, True))),
        ("grpc.http2.max_pings_without_data", _or(options.max_pings_without_data, 0)),
    )


def server_options(options: WorkerOptions | None) -> _Options:
    """Return the options of gRPC for the server of a worker. `max_concurrent_streams` is none: see `concurrency`."""
    options = options if options is not None else WorkerOptions()
    limits = {
        "grpc.max_connection_idle_ms": options.max_connection_idle_ms,
        "grpc.max_connection_age_ms": options.max_connection_age_ms,
        "grpc.max_connection_age_grace_ms": options.max_connection_age_grace_ms,
    }
    return (
        *_lengths(options.channel),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", options.min_ping_interval_ms),
        ("grpc.http2.min_ping_interval_without_data_ms", options.min_ping_interval_ms),
        ("grpc.http2.max_ping_strikes", _or(options.max_ping_strikes, 0)),
        ("grpc.keepalive_permit_without_calls", int(options.channel.keepalive_permit_without_calls is not False)),
        ("grpc.server_handshake_timeout_ms", HANDSHAKE_MS),
        ("grpc.so_reuseport", 0),  # and no pings: a client that is stopped for a while (Ctrl-Z) comes back
        *((name, limit) for name, limit in limits.items() if limit is not None),
    )


def _lengths(options: ChannelOptions) -> _Options:
    return (
        ("grpc.max_receive_message_length", _or(options.max_receive_message_length, -1)),
        ("grpc.max_send_message_length", _or(options.max_send_message_length, -1)),
    )


def _or(value: int | None, otherwise: int) -> int:
    return otherwise if value is None else value


__all__ = [
    "EOF",
    "LOADED_IN",
    "bind",
    "channel_options",
    "check_socket",
    "dial",
    "grpc",
    "make_server",
    "server_options",
]
