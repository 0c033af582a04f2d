"""The server of the proxy: uvicorn, with limits for connections (`limited_connection`), and an end in two steps."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn

from headgate.core.clock import clock
from headgate.core.signal_handlers import SignalHandlers
from headgate.integrations.keys_proxy.app import KeysProxy
from headgate.integrations.keys_proxy.refusals import Headers, Refusal
from headgate.integrations.keys_proxy.rules import LONGEST_HEAD
from headgate.integrations.limited_connection import FAREWELL, LimitedConnection

_log = logging.getLogger("headgate.integrations")

_IDLE = 75.0  # seconds that a connection is kept without a request: longer than clients keep theirs
_USUAL_CONNECTIONS = 10_000
_OWN_FILES = 64  # files that are no connections
_PAUSE = 10.0  # seconds between two lines of the log about clients that do not read


class ProxyServer:
    """Serves a `KeysProxy` until it is stopped."""

    def __init__(self, proxy: KeysProxy, *, host: str = "127.0.0.1", port: int = 0, grace: float = 30.0) -> None:
        """`port` 0: any that is free. `grace`: seconds that requests have to finish when it is stopped."""
        self._proxy = proxy
        self._grace = grace
        self._socket = _listening(host, port)
        self.address: tuple[str, int] = self._socket.getsockname()[:2]
        """Where it listens."""
        self.signal: int = 0
        """The first signal that told it to stop; 0: none did."""
        self.cancelled: int = 0
        """How many requests were broken off at its end."""
        self._timers: list[asyncio.TimerHandle] = []
        self._server = _Server(self._config())

    @property
    def url(self) -> str:
        """The address as a URL of this machine, without a path."""
        host, port = self.address
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    async def serve(self, ready: Callable[[], None] | None = None, *, signals: bool = False) -> None:
        """Serve until `stop` is called; `ready` is called when requests are taken.

        With `signals` SIGINT and SIGTERM stop it: the first one lets requests finish, the second one breaks them off.
        """
        handlers = SignalHandlers(asyncio.get_running_loop(), self._heard) if signals else None
        self._server.when_started = ready
        try:
            await self._server.serve(sockets=[self._socket])
        finally:
            if handlers is not None:
                handlers.remove()
            for timer in self._timers:
                timer.cancel()
            self._server.stop_listening()
            self._socket.close()
            self._server.cut()
            self._server.abort()
            await self._proxy.aclose(timeout=0)

    def stop(self) -> None:
        """Take no new requests, and return from `serve` when the running ones have ended. Again: break them off."""
        if self._server.stopping.is_set():
            self._cut()
        else:
            self._server.stopping.set()
            self._later(self._grace, self._cut)

    def close(self) -> None:
        """Close the socket of a server that never served."""
        self._socket.close()

    def _cut(self) -> None:
        """Break off what runs. Clients are told; those who do not listen are left."""
        if not self.cancelled:
            self.cancelled = self._server.cut()
            self._later(FAREWELL, self._server.abort)

    def _later(self, seconds: float, do: Callable[[], None]) -> None:
        self._timers.append(asyncio.get_running_loop().call_later(seconds, do))

    def _heard(self, number: signal.Signals) -> None:
        if not self.signal:
            self.signal = int(number)
            count = len(self._server.server_state.tasks)
            _log.info("got %s: the proxy finishes %d requests; a second one ends them", number.name, count)
        self.stop()

    def _config(self) -> uvicorn.Config:
        proxy, limits, most = self._proxy, self._proxy.limits, _most_connections()
        stalled = _StallLog(limits.read_within)

        def connection(**given: Any) -> _Connection:
            return _Connection(limits.client_timeout, most, stalled, read_within=limits.read_within, **given)

        async def application(scope: Any, receive: Any, send: Any) -> None:
            await proxy.answer(scope, receive, send, read_within=None)

        return uvicorn.Config(
            application,
            http=connection,  # type: ignore[arg-type] # it is called, and need not be a class
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            date_header=False,
            timeout_keep_alive=int(_IDLE),
            h11_max_incomplete_event_size=LONGEST_HEAD,
        )


class _Server(uvicorn.Server):
    """uvicorn's server, which leaves signals to others, tells when it listens, and waits without looking."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.stopping = asyncio.Event()
        self.when_started: Callable[[], None] | None = None

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started and self.when_started is not None:
            self.when_started()

    async def main_loop(self) -> None:
        await self.stopping.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Return when the last connection has ended. One without a request is closed, one with a request after it."""
        self.stop_listening()
        connections = self.server_state.connections
        for connection in list(connections):
            connection.shutdown()
        while connections:
            last = next(iter(connections))
            assert isinstance(last, _Connection), "the server makes no others"
            await last.lost.wait()
        while self.server_state.tasks:
            await asyncio.wait(list(self.server_state.tasks))

    def stop_listening(self) -> None:
        for server in getattr(self, "servers", ()):
            server.close()

    def cut(self) -> int:
        """Cancel what runs; returns how many requests that were."""
        running = list(self.server_state.tasks)
        for task in running:
            task.cancel()
        return len(running)

    def abort(self) -> None:
        for connection in list(self.server_state.connections):
            connection.transport.abort()


class _Connection(LimitedConnection):
    """A connection that is told of errors as providers write them."""

    def __init__(self, limit: float, most: int, stalled: _StallLog, **given: Any) -> None:
        super().__init__(limit, most, **given)
        self._stalled = stalled

    def client_stalled(self) -> None:
        self._stalled.write(self.client)

    def refusal(self, status: int, code: str, message: str) -> tuple[Headers, bytes]:
        refusal = Refusal(status, code, message)
        return refusal.all_headers(refusal.body), refusal.body


class _StallLog:
    """Logs that clients were disconnected because they do not read: one line in ten seconds, however many they are."""

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._next = 0.0
        self._more = 0

    def write(self, client: tuple[str, int] | None) -> None:
        now = clock.now()
        if now < self._next:
            self._more += 1
            return
        who = "a client" if client is None else f"the client {client[0]}:{client[1]}"
        more = f"; {self._more} more since the last such line" if self._more else ""
        _log.warning("%s read nothing of its answer for %g s and was disconnected%s", who, self._limit, more)
        self._next, self._more = now + _PAUSE, 0


def _most_connections() -> int:
    """How many clients may be connected: as many as there are files to open, half of which are for the upstream.

    Without such a number the system refuses connections at some point, and asyncio logs that again and again.
    """
    try:
        import resource

        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    except (ImportError, OSError):  # Windows
        return _USUAL_CONNECTIONS
    return _USUAL_CONNECTIONS if files < 0 else max(1, min(_USUAL_CONNECTIONS, (files - _OWN_FILES) // 2))


def _listening(host: str, port: int) -> socket.socket:
    """A socket that listens; OSError if it cannot."""
    kind = socket.AF_INET6 if ":" in host else socket.AF_INET
    # The protocol is named, because asyncio sets TCP_NODELAY only then: without it answers are held back for 40 ms.
    made = socket.socket(kind, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(socket.getaddrinfo(host, port, kind, socket.SOCK_STREAM)[0][4])
        made.listen(2048)
        made.setblocking(False)
    except OSError as error:
        made.close()
        raise OSError(f"cannot listen on {host}:{port}: {error.strerror}") from None
    return made
