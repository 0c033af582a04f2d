"""One connection to the server, made again when it breaks.

Every command has a time limit, because a server, or a network between, may accept and say nothing. asyncpg's own limit
cancels the command: it opens a second connection to ask the server for that, which may hang as well. Here a command is
never cancelled. When its time is over the connection is closed, and the command fails like one whose connection broke:
whether it was committed is unknown, and whoever gave it must be able to give it again.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from headgate.core.clock import clock
from headgate.errors import HeadgateError, StoreUnreachable
from headgate.sharing.postgres.address import Address
from headgate.sharing.postgres.errors import Trouble, Verdict, explained, pooled
from headgate.sharing.postgres.schema import prepare
from headgate.sharing.transactions import Host, Listeners

T = TypeVar("T")

_FIRST_PAUSE = 0.05
_LONGEST_PAUSE = 1.0
_LOOKS = 3


class Server:
    """What all connections of a store share."""

    def __init__(self, address: Address, host: Host, timeout: float) -> None:
        self.address: Address = address
        self.listeners: Listeners = host.listeners
        self.closing: asyncio.Event = host.closing
        self.stir: asyncio.Event = host.stir
        self.timeout: float = timeout
        """Seconds that a command or a new connection may take."""
        self.has_answered: bool = False
        """Was any connection ever made? Until then a refusal is final, afterwards it may be a passing one."""
        self.last_error: HeadgateError | None = None
        """Why the last connection failed."""
        self.half_made: set[Any] = set()
        """Connections that nobody has yet, because the tables are being looked at."""
        self._links: list[Link] = []

    async def persist(self, name: str, work: Callable[[], Awaitable[T]], *, until: float = math.inf) -> T:
        """Do this again and again until the server has answered. Raises the error of whatever else goes wrong.

        After the time `until` a failure is final.

        The first failure is tried again at once, because a broken connection is mostly a matter of making another.
        """
        pause, tries = _FIRST_PAUSE, 0
        while True:
            try:
                return await work()
            except Trouble as trouble:
                error, verdict = trouble.error, trouble.verdict
            self.last_error = error
            if verdict is not Verdict.AGAIN or self.closing.is_set() or clock.now() >= until:
                raise error
            tries += 1
            if tries > 1:
                self.listeners.cannot_reach(name, error)
                # Nobody tells when a server is back, so it is tried, at most each second.
                await _until(self.closing, pause * clock.uniform(0.5, 1.0))
                pause = min(_LONGEST_PAUSE, 2 * pause)

    def add(self, link: Link) -> None:
        """Close this connection with the others."""
        self._links.append(link)

    def remove(self, link: Link) -> None:
        """Forget a connection that is not used any more."""
        self._links.remove(link)

    def drop_all(self) -> None:
        """Close all connections without waiting for anything."""
        for link in self._links:
            link.drop()
        for connection in self.half_made:
            connection.terminate()

    def busy(self, why: str) -> Trouble:
        """Make the failure for something that will be possible soon."""
        return Trouble(Verdict.AGAIN, StoreUnreachable(f"{self.address.shown}: {why}", remedy="Try again."))


class Link:
    """One connection with a name."""

    def __init__(
        self, name: str, server: Server, on_lost: Callable[[], None] | None = None, *, timeout: float | None = None
    ) -> None:
        self.name: str = name
        self._server = server
        self._on_lost = on_lost
        server.add(self)
        self._connection: Any = None
        self._timeout = server.timeout if timeout is None else timeout
        self.made: int = 0
        """How many connections were made so far."""
        self.backend: int = 0
        """The process id of the session on the server."""

    @property
    def is_connected(self) -> bool:
        """Is there a connection, as far as is known?"""
        return self._connection is not None and not self._connection.is_closed()

    async def ask(self, query: str, *arguments: object) -> Any:
        """Run a statement; returns its first row, or None."""
        connection = self._connection or await self.connect()
        return await self._timed(connection, connection.fetchrow(query, *arguments))

    async def ask_all(self, query: str, *arguments: object) -> Any:
        """Run a statement; returns all rows."""
        connection = self._connection or await self.connect()
        return await self._timed(connection, connection.fetch(query, *arguments))

    async def tell(self, script: str) -> None:
        """Run several statements without arguments."""
        connection = self._connection or await self.connect()
        await self._timed(connection, connection.execute(script))

    async def listen(self, channel: str, callback: Callable[[str], None]) -> None:
        """Call this with the payload of every notification in a channel, as long as this connection stands."""
        connection = self._connection or await self.connect()
        await self._timed(connection, connection.add_listener(channel, lambda *told: callback(told[3])))

    async def connect(self) -> Any:
        """Make the connection if there is none. Trouble if that fails."""
        if self.is_connected:
            return self._connection
        server = self._server
        self._connection = None
        if server.closing.is_set():
            raise server.busy("the store is being closed")
        try:
            connection = await _made(server)
        except Trouble as trouble:
            if server.has_answered and trouble.verdict is Verdict.REFUSED:
                raise Trouble(Verdict.AGAIN, trouble.error) from None
            raise
        self._connection, self.backend = connection
        self._connection.add_termination_listener(self._ended)
        self.made += 1
        server.has_answered = True
        server.listeners.reached(self.name)
        return self._connection

    def drop(self) -> None:
        """Close the connection without waiting for anything."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.remove_termination_listener(self._ended)
            connection.terminate()

    def close(self) -> None:
        """Close the connection for good."""
        self.drop()
        self._server.remove(self)

    def _ended(self, connection: object) -> None:
        if connection is self._connection:
            self._connection = None
            if self._on_lost is not None:
                self._on_lost()

    async def _timed(self, connection: Any, command: Awaitable[T]) -> T:
        server, is_silent = self._server, False

        def close() -> None:
            nonlocal is_silent
            is_silent = True
            connection.terminate()

        timer = asyncio.get_running_loop().call_later(self._timeout, close)
        try:
            return await command
        except Exception as error:
            trouble = explained(error, server.address, silent_for=self._timeout if is_silent else None)
        finally:
            timer.cancel()
        if trouble.verdict is Verdict.AGAIN and connection is self._connection:
            self.drop()
        raise trouble


async def _made(server: Server) -> tuple[Any, int]:
    """A connection that is ready for use, and the process id of its session."""
    address, timeout = server.address, server.timeout
    connection = await _connected(address, timeout)
    if server.closing.is_set():
        connection.terminate()
        raise server.busy("the store is being closed")
    server.half_made.add(connection)
    trouble: Trouble | None = None
    timer = asyncio.get_running_loop().call_later(timeout, connection.terminate)
    try:
        backend: int = await connection.fetchval("SELECT pg_backend_pid()")
        if backend != connection.get_server_pid():  # the login came from somebody else: there is a pooler between
            await _refuse_shared_sessions(connection, server)
        await prepare(connection, address)
    except Trouble as known:
        trouble = known
    except Exception as error:
        trouble = explained(error, address)
    else:
        return connection, backend
    finally:
        timer.cancel()
        server.half_made.discard(connection)
    connection.terminate()
    raise trouble.with_traceback(None) from None


async def _connected(address: Address, timeout: float) -> Any:
    import asyncpg  # not above: only a store that is used needs it

    connect: Any = asyncpg.connect  # whose own types say that a time is an int
    try:
        return await connect(
            address.dsn,
            timeout=timeout,
            max_cached_statement_lifetime=0,
            target_session_attrs=address.targets,
        )
    except Exception as error:
        trouble = explained(error, address, silent_for=timeout if isinstance(error, TimeoutError) else None)
    raise trouble


async def _refuse_shared_sessions(first: Any, server: Server) -> None:
    """Trouble if a pooler gives two connections the same session. In session mode each has its own."""
    second = await _connected(server.address, server.timeout)
    server.half_made.add(second)
    timer = asyncio.get_running_loop().call_later(server.timeout, second.terminate)
    try:
        for _ in range(_LOOKS):
            before, other, after = [await one.fetchval("SELECT pg_backend_pid()") for one in (first, second, first)]
            if before != after or before == other:
                raise pooled(server.address)
    finally:
        timer.cancel()
        server.half_made.discard(second)
        second.terminate()


async def _until(event: asyncio.Event, timeout: float) -> None:
    try:
        async with asyncio.timeout(timeout):
            await event.wait()
    except TimeoutError:
        pass
