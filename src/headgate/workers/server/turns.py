"""The limits of a worker on its task loop: lets calls begin, and generators continue, when `concurrency` says so."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING

from headgate.workers.server.concurrency import Concurrency
from headgate.workers.server.running_call import RunningCall

if TYPE_CHECKING:
    from headgate.workers.server.client_stream import ClientStream


class Turns:
    """The calls that wait for their turn on a task loop, and the steps of generators that do.

    `unbegun` holds the calls that the server's thread may take back: whoever removes one decides about it. `wake` is
    called when something may begin.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        per_client: int | None,
        total: int | None,
        unbegun: dict[RunningCall, bool],
        wake: Callable[[], None],
    ) -> None:
        self._limits: Concurrency[RunningCall | asyncio.Future[None]] = Concurrency(per_client, total)
        self._loop = loop
        self._unbegun = unbegun
        self._wake = wake
        self._taken_back: deque[RunningCall] = deque()

    # -- on any thread ------------------------------------------------------------------------------------------------

    @property
    def waiting(self) -> bool:
        """Does something wait?"""
        return self._limits.waiting > 0

    def took_back(self, calls: Iterable[RunningCall]) -> None:
        """Note that the server's thread has removed these from `unbegun`."""
        self._taken_back += calls

    # -- on the task loop ---------------------------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        """May something begin?"""
        return self._limits.ready

    def queue(self, incoming: deque[RunningCall]) -> None:
        """Let calls that have come wait for their turn. There they can still be taken back."""
        while self._taken_back:
            taken = self._taken_back.popleft()
            self._limits.withdraw(taken.client, (taken.stream, taken.begun.number))
        with suppress(IndexError):
            while True:
                running = incoming.popleft()
                self._unbegun[running] = True
                self._limits.add(running.client, (running.stream, running.begun.number), running)

    def pop(self) -> RunningCall:
        """Return the next call that may begin; IndexError: none may. Steps of generators before it are let go."""
        while (item := self._limits.next()) is not None:
            if isinstance(item, asyncio.Future):
                if not item.done():  # else it was cancelled, and gives its turn back
                    item.set_result(None)
                continue
            item.has_turn = True
            if item in self._unbegun:
                return item
            self.count(item)  # the server's thread has just taken it back
        raise IndexError

    async def step(self, running: RunningCall) -> None:
        """Wait until a generator may make its next step."""
        limits, client, key = self._limits, running.client, (running.stream, running.begun.number)
        if not limits.enter(client):
            turn: asyncio.Future[None] = self._loop.create_future()
            limits.add(client, key, turn)
            try:
                await turn
            except asyncio.CancelledError:
                if limits.withdraw(client, key) is None:
                    limits.ends(client)  # it was its turn
                    self._wake_if_ready()
                raise
        running.has_turn = True

    def count(self, running: RunningCall) -> None:
        """Update whether a call counts. One that nobody waits for, and that goes on in its thread, does not: it may
        never end."""
        counts = running.executes and not running.abandoned
        if counts == running.has_turn:
            return
        running.has_turn = counts
        if counts:
            self._limits.begins(running.client)
        else:
            self._limits.ends(running.client)
            self._wake_if_ready()

    def withdraw(self, stream: ClientStream, number: int) -> RunningCall | None:
        """Remove and return a call that waits. None: it does not, or the server's thread has just taken it back."""
        found = self._limits.withdraw(stream.session.client, (stream, number))
        return found if isinstance(found, RunningCall) and self._unbegun.pop(found, False) else None

    def withdraw_all(self) -> list[RunningCall]:
        """Remove and return every call that waits."""
        calls = [item for _, _, item in self._limits.items() if isinstance(item, RunningCall)]
        return [one for call in calls if (one := self.withdraw(call.stream, call.begun.number)) is not None]

    def _wake_if_ready(self) -> None:
        if self._limits.ready:
            self._wake()
