"""Listening sockets that a forked child can let go of, together with their connections.

A connection ends for the other side when every process has closed it. A forked child has a copy of each descriptor. So
when the program is killed, who is connected to it would wait until the child ends too.
"""

from __future__ import annotations

import os
import socket
import threading
from typing import Any, Final
from weakref import WeakSet

_lock: Final = threading.Lock()
"""Held while a connection is taken, and during a fork: a child knows every connection that it has."""
os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)


class Listener(socket.socket):
    """A listening socket that knows its open connections. It must not block: `accept` would hold up a fork.

    It has to be served by an event loop of asyncio itself. Others, as uvloop, do not call `accept`.
    """

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._connections: WeakSet[socket.socket] = WeakSet()

    def accept(self) -> tuple[socket.socket, Any]:
        """Take a connection."""
        with _lock:
            connection, address = super().accept()
            self._connections.add(connection)
        return connection, address

    def abandon(self) -> None:
        """In a forked child: close the descriptors of the listener and of its connections.

        Not through their transports, which would take them out of the epoll that the child shares with its parent. The
        sockets forget their descriptors: what collects them later must not close a file that has the same number.
        """
        for one in (self, *self._connections):
            file = one.detach()
            if file != -1:
                os.close(file)
