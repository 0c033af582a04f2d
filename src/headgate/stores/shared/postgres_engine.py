"""What a PostgresStore does in its thread: the exchange of steps, the heartbeat, the connections.

One engine lives in one process. A forked child leaves that of its parent alone and makes another.
"""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Callable, Coroutine
from typing import Any

from headgate.core.redaction import log_exception
from headgate.core.shared_state import Outcome
from headgate.errors import StoreUnreachable
from headgate.stores.shared.postgres_address import Address
from headgate.stores.shared.postgres_link import Server
from headgate.stores.shared.postgres_listeners import Listeners
from headgate.stores.shared.postgres_members import Membership
from headgate.stores.shared.postgres_state import Call, Exchange
from headgate.stores.shared.postgres_thread import LoopThread
from headgate.stores.shared.postgres_upkeep import Upkeep

_GRACE = 1.0
"""Seconds that the last commands may take when the store is closed."""


class Engine:
    """The thread of a store and what runs there. Making one starts the thread."""

    def __init__(self, address: Address, lease: float) -> None:
        self._address = address
        self._lease = lease
        self.listeners: Listeners = Listeners()
        self._ready = threading.Event()
        self._exchange: Exchange | None = None
        self._members: Membership | None = None
        self._server: Server | None = None
        self._upkeep: Upkeep | None = None
        self.thread: LoopThread = LoopThread(f"headgate-postgres {address.place}", self._main)
        self._ready.wait()

    @property
    def deadline(self) -> float:
        """Until when the lease stands for certain, on the monotonic clock."""
        return self._members.deadline if self._members is not None else -math.inf

    @property
    def server(self) -> Server:
        """What the connections of this store share."""
        assert self._server is not None, "_main makes it before _ready is set"
        return self._server

    @property
    def members(self) -> Membership:
        """How this store takes part."""
        assert self._members is not None, "_main makes it before _ready is set"
        return self._members

    def transact(self, call: Call) -> None:
        """Run this step after all that were given before."""
        assert self._exchange is not None, "_main makes it before _ready is set"
        self._exchange.put(call)

    def connect(self, timeout: float) -> None:
        """Block until the server has answered and this store takes part."""
        call = Call("", lambda _, seen: Outcome(None), durable=False)
        self.transact(call)
        try:
            call.future.result(None if math.isinf(timeout) else timeout)
            return
        except TimeoutError:
            call.future.cancel()
        error = self.server.last_error
        if error is None:
            raise StoreUnreachable(f"{self._address.place} cannot be reached: no answer within {timeout:g} s")
        raise type(error)(error.message, remedy=error.remedy)

    def stop(self, timeout: float) -> None:
        """Delete the row of this member, close the connections and end the thread. Waits at most so long."""
        self.thread.post(self._close)
        if not self.thread.is_current():
            self.thread.join(timeout)

    def _close(self) -> None:
        self.server.closing.set()
        self.members.stir()
        if self._exchange is not None:
            self._exchange.stir()
        if self._upkeep is not None:
            self._upkeep.stir()

    async def _main(self) -> None:
        self._server = server = Server(self._address, self.listeners, min(5.0, max(1.0, self._lease / 5)))
        self._members = members = Membership(server, self._lease)
        self._upkeep = upkeep = Upkeep(server)
        self._exchange = exchange = Exchange(server, members, self._lease, upkeep)
        self._ready.set()
        parts = (exchange.serve, members.beat, upkeep.serve)
        tasks = [asyncio.ensure_future(_guarded(work, server)) for work in parts]
        await server.closing.wait()
        await asyncio.wait(tasks, timeout=_GRACE)
        links = (exchange.link, members.link)
        await members.leave([link for link, task in zip(links, tasks, strict=False) if task.done()])
        # Commands end with their connections. They are never cancelled: asyncpg would connect once more for that.
        server.drop_all()
        await asyncio.wait(tasks, timeout=_GRACE)
        server.drop_all()
        exchange.close()


async def _guarded(work: Callable[[], Coroutine[Any, Any, None]], server: Server) -> None:
    while not server.closing.is_set():
        try:
            await work()
        except Exception:
            log_exception("headgate.stores", "a defect in PostgresStore: it is tried again")
            await asyncio.sleep(1.0)  # so that a defect does not fill the log
