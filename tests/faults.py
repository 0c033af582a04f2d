"""A TCP proxy that breaks connections the way networks do, for tests."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Self


class Proxy:
    """Passes bytes between clients and a server, until a test says otherwise. Runs in a thread of its own."""

    def __init__(self, port: int, host: str = "127.0.0.1") -> None:
        self._target = (host, port)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="proxy")
        self._writers: set[asyncio.StreamWriter] = set()
        self._ready = threading.Event()
        self._stop = asyncio.Event()
        self.port = 0
        """Where clients connect."""
        self.connections = 0
        """How many clients have connected so far."""
        self.is_refusing = False
        """Close every new connection at once."""
        self.is_silent = False
        """Accept connections and bytes, and answer nothing."""
        self.swallows: Callable[[bytes], bool] | None = None
        """If this is true of what a client sends, the server gets it and its answer is thrown away; then the connection
        is cut."""
        self.swallowed = 0
        """How many answers were thrown away."""
        self.drops: Callable[[bytes], bool] | None = None
        """If this is true of what the server sends, the client does not get it."""
        self.delay = 0.0
        """Seconds by which the client gets what the server sends later."""

    def __enter__(self) -> Self:
        self._thread.start()
        self._ready.wait()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def cut(self) -> None:
        """Break all connections; returns when they are broken."""
        done = threading.Event()
        self._loop.call_soon_threadsafe(lambda: (self._cut(), done.set()))
        done.wait()

    def _cut(self) -> None:
        for writer in list(self._writers):
            writer.transport.abort()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._loop.close()
            asyncio.set_event_loop(None)

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        await self._stop.wait()
        server.close()
        self._cut()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await asyncio.sleep(0)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._writers.add(writer)
        try:
            if self.is_refusing:
                return
            there, to_server = await asyncio.open_connection(*self._target)
            self._writers.add(to_server)
            state = _State()
            try:
                forth = asyncio.ensure_future(self._forth(reader, to_server, state))
                back = asyncio.ensure_future(self._back(there, writer, state))
                try:
                    await asyncio.wait({forth, back}, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    forth.cancel()
                    back.cancel()
                    await asyncio.gather(forth, back, return_exceptions=True)
            finally:
                self._writers.discard(to_server)
                to_server.transport.abort()
        except OSError:
            pass  # the server is not there: the client sees a connection that is closed at once
        except asyncio.CancelledError:
            pass  # the proxy ends; the streams of 3.11 complain of tasks that were cancelled
        finally:
            self._writers.discard(writer)
            writer.transport.abort()

    async def _forth(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, state: _State) -> None:
        while data := await reader.read(65536):
            if self.is_silent:
                continue
            if self.swallows is not None and self.swallows(data):
                state.swallows = True
            writer.write(data)
            await writer.drain()

    async def _back(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, state: _State) -> None:
        while data := await reader.read(65536):
            if state.swallows:
                self.swallowed += 1
                return
            if self.is_silent or (self.drops is not None and self.drops(data)):
                continue
            if self.delay:
                await asyncio.sleep(self.delay)
            writer.write(data)
            await writer.drain()


class _State:
    """What is known of one connection."""

    def __init__(self) -> None:
        self.swallows = False
