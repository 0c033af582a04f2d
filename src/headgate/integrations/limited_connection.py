"""A uvicorn connection that ends if a request does not arrive in time, or an answer is not read in time.

uvicorn parses with h11, which is strict: what two servers could read differently is an error. It does not limit how
long the head of a request may take, how long a client may leave an answer unread, or how many connections may be open
without a request. This class adds the three limits. Works with uvicorn from 0.29 on.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any, Final

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

FAREWELL: Final = 0.5
"""Seconds in which a client can read why its connection ends."""
_TOLD: Final = 32
"""Connections above the limit that are told why they are refused. More are closed without a word: each is a file."""


class LimitedConnection(H11Protocol):
    """A connection with limits. A class that derives from it says how errors are written."""

    def __init__(self, limit: float, most: int, *, read_within: float, **given: Any) -> None:
        """Limit a connection.

        `limit`: seconds in which a request must arrive. `most`: connections that may be open. `read_within`: seconds
        that a client has to read each part of an answer.
        """
        super().__init__(**given)
        self._limit = limit
        self._most = most
        self._read_within = read_within
        self._timer: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None
        self._refused = False
        self.lost: asyncio.Event = asyncio.Event()

    def refusal(self, status: int, code: str, message: str) -> tuple[list[tuple[bytes, bytes]], bytes]:
        """Return the headers and the body that tell a client why its request is refused."""
        raise NotImplementedError

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # as uvicorn has it
        """Take a connection, if there are not too many."""
        transport.set_write_buffer_limits(high=0)  # so that anything that is not read is noticed
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
        self._unread = self.loop.call_later(self._read_within, self.transport.abort)

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
