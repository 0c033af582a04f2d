"""How the subscribers of a LAN learn that a publisher has died: they hold a connection to it.

Multicast DNS itself would take minutes, and heartbeats by multicast are lost in a wireless network now and then. So a
publisher listens on a port of its own, a `Beacon`, whose number is announced with its workers. It says its session to
whoever connects, and nothing else; whatever it is sent, it drops. The kernel closes the connection when the process
ends, however it ends. Who is connected then tries again, and if nobody answers with that session, the publisher is
dead. That takes milliseconds, and costs no traffic while nothing happens, apart from TCP's keepalive, which finds a
machine that was cut off.

A publisher that cannot be reached this way, because of a firewall or an address that somebody else forwards, is asked
by multicast DNS from time to time instead.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Final, Literal

from headgate.core.clock import clock
from headgate.discovery.lan_records import Place

MAX_CONNECTIONS: Final = 1024
"""Connections that a beacon holds; who comes later is told the session, and nothing more."""
MAX_FOLLOWED: Final = 256
"""Publishers that are followed at the same time. Records that were made up must not use up all descriptors."""
_CONNECT_TIMEOUT: Final = 1.0
_ASK_EVERY: Final = 5.0
_ASK_TRIES: Final = 2
_LONGEST_PAUSE: Final = 30.0
_SHORTEST: Final = 0.25
_ACCEPT_AGAIN: Final = 1.0

Outcome = Literal["refused", "unreachable", "wrong", "ended"]


class Beacon:
    """The port on which a publisher shows that it lives.

    It has plain sockets and no transports: they are closed at once, and asyncio's servers lose connections that were
    accepted just before they are closed.
    """

    def __init__(self, session: str, host: str) -> None:
        """Listen on any port: of loopback only if that is where the workers are, else of all addresses."""
        self._greeting = session.encode() + b"\n"
        self._loop = asyncio.get_running_loop()
        self._open: set[socket.socket] = set()
        self._pause: asyncio.TimerHandle | None = None
        self._listening = _listening(host)
        self._listening.setblocking(False)
        self.port: int = self._listening.getsockname()[1]
        self._accept_from_now()

    def close(self) -> None:
        """Close the port and all connections: for subscribers, this publisher is dead."""
        if self._pause is not None:
            self._pause.cancel()
        for each in (self._listening, *self._open):
            self._loop.remove_reader(each.fileno())
            each.close()
        self._open.clear()

    def _accept_from_now(self) -> None:
        self._pause = None
        self._loop.add_reader(self._listening.fileno(), self._accept)

    def _accept(self) -> None:
        try:
            connection, _ = self._listening.accept()
        except (BlockingIOError, ConnectionError, InterruptedError):
            return
        except OSError:  # too many open files: it would be tried again and again
            self._loop.remove_reader(self._listening.fileno())
            self._pause = self._loop.call_later(_ACCEPT_AGAIN, self._accept_from_now)
            return
        try:
            connection.setblocking(False)
            _keep_alive(connection)
            connection.send(self._greeting)
        except OSError:  # who connected is gone
            connection.close()
            return
        if len(self._open) >= MAX_CONNECTIONS:
            connection.close()
            return
        self._open.add(connection)
        self._loop.add_reader(connection.fileno(), self._ended, connection)

    def _ended(self, connection: socket.socket) -> None:
        """Close a connection that was closed at the other end, or on which something was said."""
        self._loop.remove_reader(connection.fileno())
        connection.close()
        self._open.discard(connection)


def _listening(host: str) -> socket.socket:
    if is_loopback(host):
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, 0), family=family)
    if socket.has_dualstack_ipv6():
        with suppress(OSError):  # IPv6 is switched off
            return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))


class _Listener(asyncio.Protocol):
    """The subscriber's end of a connection."""

    def __init__(self, session: str) -> None:
        loop = asyncio.get_running_loop()
        self.greeted: asyncio.Future[bool] = loop.create_future()
        self.ended: asyncio.Future[None] = loop.create_future()
        self._expected = session.encode() + b"\n"
        self._data = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        _keep_alive(transport.get_extra_info("socket"))

    def data_received(self, data: bytes) -> None:
        self._data += data[: len(self._expected) + 1 - len(self._data)]
        if not self.greeted.done() and (len(self._data) >= len(self._expected) or b"\n" in self._data):
            self.greeted.set_result(self._data == self._expected)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.greeted.done():
            self.greeted.set_result(False)
        if not self.ended.done():
            self.ended.set_result(None)


async def reach(place: Place, answered: Callable[[], None]) -> Outcome:
    """Connect to a beacon, call `answered` when it has said its session, and wait until the connection ends."""
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(_CONNECT_TIMEOUT):
            transport, listener = await loop.create_connection(lambda: _Listener(place.session), place.host, place.port)
    except ConnectionRefusedError:
        return "refused"
    except (OSError, UnicodeError):  # TimeoutError too
        return "unreachable"
    try:
        try:
            async with asyncio.timeout(_CONNECT_TIMEOUT):
                if not await listener.greeted:
                    return "wrong"
        except TimeoutError:
            return "unreachable"
        answered()
        await listener.ended
        return "ended"
    finally:
        transport.abort()


async def lives(place: Place) -> bool:
    """Whether a publisher answers now."""
    if not place.port:
        return False
    answers = asyncio.Event()
    trying = asyncio.ensure_future(reach(place, answers.set))
    waiting = asyncio.ensure_future(answers.wait())
    try:
        await asyncio.wait((trying, waiting), return_when=asyncio.FIRST_COMPLETED)
        return answers.is_set()
    finally:
        trying.cancel()
        waiting.cancel()
        await asyncio.wait((trying, waiting))


async def until_dead(place: Place, answered: Callable[[], None], ask: Callable[[], Awaitable[bool]]) -> None:
    """Return when a publisher has died. `ask` asks another way, and says whether there was an answer.

    As long as there was no connection, a port that is closed proves nothing: the host may be one that only forwards the
    workers' ports. If there is no answer either, that is proof enough.
    """
    was_there, pause, unanswered = False, 1.0, 0

    def here() -> None:
        nonlocal was_there, pause, unanswered
        was_there, pause, unanswered = True, 1.0, 0
        answered()

    while True:
        began = clock.now()
        outcome: Outcome = await reach(place, here) if place.port else "unreachable"
        if outcome == "ended":  # look at once whether the process is still there
            if clock.now() - began < _SHORTEST:
                await asyncio.sleep(_SHORTEST)  # it has too many connections, and ended this one
            continue
        if was_there:
            return
        if await ask():
            unanswered = 0
            answered()
        else:
            unanswered += 1
            if unanswered >= _ASK_TRIES or outcome != "unreachable":
                return
        await asyncio.sleep(pause if unanswered else max(pause, _ASK_EVERY))
        pause = min(2 * pause, _LONGEST_PAUSE)


def _keep_alive(connection: socket.socket) -> None:
    """Let the kernel notice within some seconds that the other machine is cut off."""
    with suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in (("TCP_KEEPIDLE", 1), ("TCP_KEEPINTVL", 1), ("TCP_KEEPCNT", 2)):
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def is_loopback(host: str) -> bool:
    """Whether other machines cannot reach this host."""
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return host.lower().rstrip(".") == "localhost" or host.lower().rstrip(".").endswith(".localhost")
