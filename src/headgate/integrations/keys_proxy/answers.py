"""What a client is sent: the answer of the upstream, byte by byte, or a refusal of the proxy."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from headgate.integrations.keys_proxy.error_texts import LONGEST, ErrorTexts, without_values
from headgate.integrations.keys_proxy.headers import first, for_client
from headgate.integrations.keys_proxy.refusals import Headers, Refusal


class ClientStalled(Exception):
    """The client has not read a part of its answer in time."""


class Answer:
    """The answer to one request: begun at most once."""

    __slots__ = ("_begun", "_limit", "_send", "complete")

    def __init__(self, send: Callable[[Any], Awaitable[None]], limit: float | None) -> None:
        """`limit`: seconds that the client has to read each part, or None. Then the methods raise ClientStalled."""
        self._send = send
        self._limit = limit
        self._begun = False
        self.complete: bool = False
        """Whether all of it has been sent."""

    async def refuse(self, refusal: Refusal) -> None:
        """Send a refusal. After the beginning of an answer nothing is sent: the server breaks the connection.

        A client that does not read it in time is not an error.
        """
        if not self._begun:
            body = refusal.body
            with suppress(ClientStalled):
                await self._whole(refusal.status, refusal.all_headers(body), body)

    async def tell(self, value: object) -> None:
        """Send a value as JSON."""
        body = json.dumps(value).encode()
        length = (b"content-length", str(len(body)).encode())
        await self._whole(200, [(b"content-type", b"application/json"), length, (b"cache-control", b"no-store")], body)

    async def pass_on(self, response: Any, texts: Callable[[], ErrorTexts]) -> None:
        """Send the answer of the upstream; `texts` takes keys out of errors."""
        status, headers = response.status_code, for_client(response.headers.raw)
        if not 200 <= status <= 599:
            await self.refuse(Refusal(502, "upstream_failed", f"the upstream answered with the status {status}"))
            return
        if status >= 300:
            await self._error(status, headers, response, texts())
            return
        length = first(headers, b"content-length")
        left = int(length) if length is not None and length.isdigit() else -1
        await self._begin(status, without_values(headers))
        async for chunk in response.stream:
            if not chunk:
                continue
            left -= len(chunk)
            self.complete = left == 0  # known now, so that the client need not wait for the end of the stream
            await self._write({"type": "http.response.body", "body": chunk, "more_body": left != 0})
        if not self.complete:
            self.complete = True
            await self._write({"type": "http.response.body", "body": b"", "more_body": False})

    async def _error(self, status: int, headers: Headers, response: Any, texts: ErrorTexts) -> None:
        body = b""
        async for chunk in response.stream:
            body += chunk
            if len(body) > LONGEST:
                break
        shown = texts.body(body, texts.headers(headers)) if len(body) <= LONGEST else None
        if shown is None:
            # Its encoding is unknown here, or it is very long: it may contain a key.
            hidden = f"the upstream answered {status}, with a text that is too long or in an unknown encoding"
            await self.refuse(Refusal(status, "upstream_error", hidden))
            return
        await self._whole(status, shown[1], shown[0])

    async def _begin(self, status: int, headers: Headers) -> None:
        self._begun = True
        await self._write({"type": "http.response.start", "status": status, "headers": headers})

    async def _whole(self, status: int, headers: Headers, body: bytes) -> None:
        await self._begin(status, headers)
        self.complete = True
        await self._write({"type": "http.response.body", "body": body, "more_body": False})

    async def _write(self, message: dict[str, Any]) -> None:
        """Give the server a part of the answer. It takes it when the client has read enough of what came before."""
        try:
            async with asyncio.timeout(self._limit):
                await self._send(message)
        except TimeoutError:
            raise ClientStalled from None
