"""The types of ASGI, and answers that are made here."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class ErrorAnswer:
    """An answer with a status and a small JSON body; called as an ASGI application it sends itself."""

    def __init__(self, status: int, code: str, detail: str, retry_after: int | None = None) -> None:
        self.status: int = status
        """The HTTP status."""
        self.body: bytes = json.dumps({"code": code, "detail": detail}).encode()
        """What is sent as JSON: a code that never changes, and a sentence for people."""
        self.headers: list[tuple[bytes, bytes]] = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(self.body)).encode()),
        ]
        """The headers, as ASGI wants them."""
        if retry_after is not None:
            self.headers.append((b"retry-after", str(retry_after).encode()))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status, "headers": self.headers})
        await send({"type": "http.response.body", "body": self.body})
