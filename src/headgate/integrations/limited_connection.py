"""A uvicorn connection that ends if a request does not arrive in time, or an answer is not read in time.

uvicorn parses with h11, which is strict: what two servers could read differently is an error. It does not limit how
long the head of a request may take, how long a client may leave an answer unread, or how many connections may be open
without a request. This class adds the three limits. Works with uvicorn from 0.29 on.

That a client reads is seen only when its system takes more from ours. Left alone, ours would keep 4 MB of an answer,
and would not call the connection writable before a third of that has gone, which takes a slow reader minutes. So ours
keeps about 64 KB (`PART`). The price: a client far away gets at most 128 KB in a round trip.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import Any, Final

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

PART: Final = 1 << 16
"""Bytes of an answer, about, that wait here for a client to read what was sent before."""
_LOOKS: Final = 4
"""How often we look, in the time that a client has to read, whether it has read something."""
FAREWELL: Final = 0.5
"""Seconds in which a client can read why its connection ends."""
_TOLD: Final = 32
"""Connections above the limit that are told why they are refused. More are closed without a word: each is a file."""


class LimitedConnection(H11Protocol):
    """A connection with limits. A class that derives from it says how errors are written."""

    def __init__(self, limit: float, most: int, *, read_within: float, **given: Any) -> None:
        """Limit a connection.

        `limit`: seconds in which a request must arrive. `most`: connections that may be open. `read_within`: seconds
        after which a client that reads nothing of its answer is disconnected.
        """
        super().__init__(**given)
        self._limit = limit
        self._most = most
        self._read_within = read_within
        self._timer: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None
        self._left = self._idle_looks = 0
        self._refused = False
        self.lost: asyncio.Event = asyncio.Event()

    def refusal(self, status: int, code: str, message: str) -> tuple[list[tuple[bytes, bytes]], bytes]:
        """Return the headers and the body that tell a client why its request is refused."""
        raise NotImplementedError

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # as uvicorn has it
        """Take a connection, if there are not too many."""
        transport.set_write_buffer_limits(high=0)  # so that anything that is not read is noticed
        _keep_little(transport.get_extra_info("socket"))
        super().connection_made(transport)
        count = len(self.connections)
        if count > self._most + _TOLD:
            self._refused = True
            transport.abort()
        elif count > self._most:
            self._refuse(503, "too_many_connections", f"{self._most} connections are open, and that is all")
        self._watch()

    def data_received(self, data: bytes) -> None:
        """Take what a client has sent, unless it was refused."""
        if not self._refused:
            super().data_received(data)
            self._watch()

    def on_response_complete(self) -> None:
        """Go on to the next request of the connection."""
        super().on_response_complete()
        if self.conn.their_state is h11.SEND_BODY:  # it was answered before it had sent everything
            self._watch()

    def shutdown(self) -> None:
        """End the connection when its request has ended."""
        # Refused: it will be closed soon. In both cases h11 may be in a state that uvicorn does not expect.
        if self._refused or self.conn.our_state is h11.ERROR:
            self.transport.close()
        else:
            super().shutdown()

    def pause_writing(self) -> None:
        """Begin to wait for a client that does not read. A closed connection also waits until all of it is read."""
        super().pause_writing()
        self._left, self._idle_looks = self.transport.get_write_buffer_size(), 0
        self._look_again()

    def client_stalled(self) -> None:
        """Note that the connection is cut, because the client does not read. For classes that derive from this one."""

    def resume_writing(self) -> None:
        """Note that the client reads."""
        super().resume_writing()
        self._stop_waiting()

    def connection_lost(self, exc: Exception | None) -> None:
        """Note that the connection has ended."""
        self._forget()
        self._stop_waiting()
        super().connection_lost(exc)
        self.lost.set()

    def _watch(self) -> None:
        """While the client is to send something, it has so many seconds. A request that has begun has its own limit."""
        if self.cycle is not None and not self.cycle.response_complete:
            self._forget()
        elif self._timer is None and not self._refused and not self.transport.is_closing():
            self._timer = self.loop.call_later(self._limit, self._too_late)

    def _look_again(self) -> None:
        self._unread = self.loop.call_later(self._read_within / _LOOKS, self._look)

    def _look(self) -> None:
        """Cut the connection if the client has read nothing for as long as it may."""
        left = self.transport.get_write_buffer_size()
        self._idle_looks = self._idle_looks + 1 if left >= self._left else 0
        self._left = left
        if self._idle_looks < _LOOKS:
            self._look_again()
            return
        self._unread = None
        self.client_stalled()
        self.transport.abort()

    def _forget(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _stop_waiting(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def _too_late(self) -> None:
        self._timer = None
        if self.conn.our_state is h11.IDLE:
            self._refuse(408, "client_too_slow", "the request took too long to arrive")
        else:
            self.transport.close()

    def send_400_response(self, msg: str) -> None:
        """Refuse what is not HTTP."""
        self._refuse(400, "invalid_request", "this is not HTTP as it should be")

    def _refuse(self, status: int, code: str, message: str) -> None:
        headers, body = self.refusal(status, code, message)
        with contextlib.suppress(h11.LocalProtocolError):  # an answer has begun
            begin = h11.Response(status_code=status, headers=[*headers, (b"connection", b"close")])
            events = (begin, h11.Data(data=body), h11.EndOfMessage())
            self.transport.write(b"".join(self.conn.send(event) or b"" for event in events))
        # Closed at once, with something unread, the connection would be reset, and the client might not see the answer.
        self._refused = True
        self._forget()
        self.transport.write_eof()
        self.loop.call_later(FAREWELL, self.transport.close)


def _keep_little(connection: Any) -> None:
    """Have the system keep little of an answer that the client does not take."""
    if connection is not None and connection.family in (socket.AF_INET, socket.AF_INET6):
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, PART)
