"""gRPC: the only module that imports it, opens channels to workers and binds servers.

`dial` opens a channel, `bind` lets a server listen. The options of both ends stand here side by side, because they
must agree. Today both are plain text over Unix sockets in a private directory. TLS belongs here too: credentials will
be an argument of `dial` and `bind`, and nothing else outside this module needs to know.

gRPC's C core runs handlers at ``os.fork``, in the parent and in the child, that have crashed children which never used
gRPC (seen with 1.85). A forked child cannot use our workers anyhow, and is told so; without the handlers it survives.
So they are switched off before the import.
"""

from __future__ import annotations

import os
from typing import Any, Final

os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")  # both are read when the library is first used
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # else each connection that a killed worker resets is a line of stderr

import grpc
import grpc.aio

LOADED_IN: int = os.getpid()
"""Pid of the process that imported gRPC. In a child forked from that one gRPC would hang."""

EOF: Final[Any] = vars(grpc.aio)["EOF"]
"""What reading a stream returns at its end. (gRPC does not declare it to type checkers.)"""

_CHANNEL_OPTIONS = (("grpc.use_local_subchannel_pool", 1),)  # each channel has a connection of its own
_SESSION_OPTIONS = (
    *_CHANNEL_OPTIONS,
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.enable_retries", 0),  # a call that may have begun is never sent again
    ("grpc.keepalive_time_ms", 3000),
    ("grpc.keepalive_timeout_ms", 3000),
    ("grpc.http2.ping_timeout_ms", 3000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)
_SERVER_OPTIONS = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 500),
    ("grpc.http2.min_ping_interval_without_data_ms", 500),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.so_reuseport", 0),  # and no pings: a client that is stopped for a while (Ctrl-Z) comes back
)


def dial(address: str, *, session: bool = True) -> grpc.aio.Channel:
    """Open a channel to the worker at this address.

    With `session` the channel pings the worker and ends when no pong comes. Without, for a single request, it waits as
    long as the request does.
    """
    return grpc.aio.insecure_channel(address, options=_SESSION_OPTIONS if session else _CHANNEL_OPTIONS)


def make_server(handler: grpc.GenericRpcHandler) -> grpc.aio.Server:
    """Make a server for the calls that this handler knows; `bind` gives it an address."""
    server = grpc.aio.server(options=_SERVER_OPTIONS)
    server.add_generic_rpc_handlers((handler,))
    return server


def bind(server: grpc.aio.Server, address: str) -> None:
    """Let a server listen on this address; OSError: it cannot."""
    if not server.add_insecure_port(address):
        raise OSError(f"cannot listen on {address}")


__all__ = ["EOF", "LOADED_IN", "bind", "dial", "grpc", "make_server"]
