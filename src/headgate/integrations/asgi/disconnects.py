"""Requests whose client has gone away are cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from headgate.integrations.asgi.messages import App, Message, Receive, Scope, Send


class CancelOnDisconnect:
    """ASGI middleware: cancels a request when its client goes away before it has the whole answer.

    An endpoint that awaits ``pool.run(...)`` is cancelled there, and so is its task, queued or running. What runs after
    the answer, such as background tasks, is not cancelled. `only`, a function of the ASGI scope, says which requests
    may be cancelled; by default all may. A request with a body is watched from the moment when the application begins
    to read it.
    """

    def __init__(self, app: App, *, only: Callable[[Scope], bool] | None = None) -> None:
        self._app = app
        self._only = only

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http" or not (self._only is None or self._only(scope)):
            await self._app(scope, receive, send)
            return
        cancelled = asyncio.timeout(None)  # the cancel scope of asyncio: it knows its own cancellation from others
        try:
            async with cancelled:
                await self._watched(scope, receive, send, cancelled)
        except TimeoutError:
            if not cancelled.expired():
                raise

    async def _watched(self, scope: Scope, receive: Receive, send: Send, cancelled: asyncio.Timeout) -> None:
        answered = False

        async def note(message: Message) -> None:
            nonlocal answered
            if message["type"] == "http.response.body" and not message.get("more_body", False):
                answered = True
            await send(message)

        def on_gone() -> None:
            if not answered:
                cancelled.reschedule(asyncio.get_running_loop().time())

        client = _Client(receive, on_gone)
        if not _announces_body(scope):
            client.watch()
        try:
            await self._app(scope, client.receive, note)
        finally:
            await client.leave()


class _Client:
    """The messages of a client. They are read ahead to see that it goes away, a body at most one message ahead."""

    def __init__(self, receive: Receive, on_gone: Callable[[], None]) -> None:
        self._receive = receive
        self._on_gone = on_gone
        self._ahead: list[Message] = []
        self._changed = asyncio.Condition()
        self._reading: asyncio.Task[None] | None = None
        self._failure: Exception | None = None

    def watch(self) -> None:
        """Begin to read."""
        if self._reading is None:
            self._reading = asyncio.ensure_future(self._read())

    async def receive(self) -> Message:
        """Return the next message, for the application."""
        self.watch()
        async with self._changed:
            await self._changed.wait_for(lambda: self._ahead or self._failure is not None)
            if not self._ahead:
                assert self._failure is not None
                raise self._failure
            self._changed.notify_all()
            return self._ahead[0] if _is_last(self._ahead[0]) else self._ahead.pop(0)

    async def leave(self) -> None:
        """Stop reading."""
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.wait((self._reading,))

    async def _read(self) -> None:
        try:
            message: Message = {}
            while not _is_last(message):
                async with self._changed:
                    await self._changed.wait_for(lambda: not (self._ahead and self._ahead[-1].get("more_body")))
                message = await self._receive()
                async with self._changed:
                    self._ahead.append(message)
                    self._changed.notify_all()
            self._on_gone()
        except Exception as error:  # of the server; the application is told when it asks
            async with self._changed:
                self._failure = error
                self._changed.notify_all()


def _is_last(message: Message) -> bool:
    return message.get("type") == "http.disconnect"


def _announces_body(scope: Scope) -> bool:
    headers = {name.lower(): value for name, value in scope["headers"]}
    return b"transfer-encoding" in headers or headers.get(b"content-length", b"0").strip() != b"0"
