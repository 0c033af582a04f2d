"""The connections of the page's server: requests must arrive, and answers must be read, in time. Imports uvicorn."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any, Final

from headgate.dashboard.security import HEADERS
from headgate.integrations.limited_connection import LimitedConnection

HEAD_WITHIN: Final = 10.0
"""Seconds that a client has to send the head of a request."""
READ_WITHIN: Final = 30.0
"""Seconds that a client has to read what is written to it: a long message, over a slow line."""
MOST_CONNECTIONS: Final = 128
"""Many for a person with some pages; few for the program in which the page is served, whose files they are."""

_silent = logging.getLogger("headgate.dashboard.connections")
"""For what uvicorn says of strange requests: their senders are told. Failures are logged where the page answers."""
_silent.setLevel(logging.CRITICAL + 1)


class PageConnection(LimitedConnection):
    """A connection of a browser."""

    def __init__(self, **given: Any) -> None:
        super().__init__(HEAD_WITHIN, MOST_CONNECTIONS, **given)
        self.logger: logging.Logger = _silent
        self._unread: asyncio.TimerHandle | None = None

    def refusal(self, status: int, code: str, message: str) -> tuple[list[tuple[bytes, bytes]], bytes]:
        """Return an error as the page writes them."""
        body = json.dumps({"error": message}).encode()
        named = {**HEADERS, "Content-Type": "application/json", "Content-Length": str(len(body))}
        return [(name.encode(), value.encode()) for name, value in named.items()], body

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # as uvicorn has it
        """Take a connection, if there are not too many."""
        transport.set_write_buffer_limits(high=0)  # so that anything that is not read is noticed
        super().connection_made(transport)

    def pause_writing(self) -> None:
        """Begin to wait for a client that does not read."""
        super().pause_writing()
        self._unread = self.loop.call_later(READ_WITHIN, self.transport.abort)

    def resume_writing(self) -> None:
        """Note that the client reads."""
        super().resume_writing()
        self._stop_waiting()

    def connection_lost(self, exc: Exception | None) -> None:
        """Note that the connection has ended."""
        self._stop_waiting()
        super().connection_lost(exc)

    def _stop_waiting(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None
