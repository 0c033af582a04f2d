"""The connections of the page's server: requests must arrive, and answers must be read, in time. Imports uvicorn."""

from __future__ import annotations

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
        super().__init__(HEAD_WITHIN, MOST_CONNECTIONS, read_within=READ_WITHIN, **given)
        self.logger: logging.Logger = _silent

    def refusal(self, status: int, code: str, message: str) -> tuple[list[tuple[bytes, bytes]], bytes]:
        """Return an error as the page writes them."""
        body = json.dumps({"error": message}).encode()
        named = {**HEADERS, "Content-Type": "application/json", "Content-Length": str(len(body))}
        return [(name.encode(), value.encode()) for name, value in named.items()], body
