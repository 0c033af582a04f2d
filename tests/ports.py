"""Ports of this machine that stay reserved while a test uses them.

A port that was free a moment ago is no longer, if another process of pytest is given it meanwhile.
"""

from __future__ import annotations

import socket


def reserved_port() -> socket.socket:
    """Bind a port until the socket is closed. Connections to it are refused, until a program listens there.

    Programs can: they set SO_REUSEADDR, as servers do, and this socket does not listen.
    """
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind(("127.0.0.1", 0))
    return reserved


def number_of(reserved: socket.socket) -> int:
    """Return the number of a reserved port."""
    number: int = reserved.getsockname()[1]
    return number
