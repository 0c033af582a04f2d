"""Outcomes of calls: how results and exceptions are written, and how they get back to the server's loop."""

from __future__ import annotations

import asyncio
import inspect
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING

from headgate.core.clock import clock
from headgate.core.lessons import Lesson
from headgate.errors import RemoteError
from headgate.workers.protocol.bulk import BulkPayload
from headgate.workers.protocol.messages import Kind
from headgate.workers.serialization.pickling import dump_exception, dumps
from headgate.workers.server.running_call import RunningCall

if TYPE_CHECKING:
    from headgate.workers.server.client_stream import ClientStream

TURN = 0.005
"""Seconds that a turn of the task loop should take, and that an outcome may wait for others to share a message with."""

Outcome = tuple["ClientStream", int, Kind | None, bytes | BulkPayload, bool, int, bytes, Iterable[Lesson]]
"""What the task loop reports about a call: the stream of its client; its number; how it ended (None: it has begun, and
its caller wants to know); the payload; whether it was cancelled and ended in another way; of a generator, how many
steps other than "next" it had taken; the changes of its Context; and what it learned about resources."""


class Outcomes:
    """Collects the outcomes of a task loop and gives them to the server's loop, several at a time.

    `incoming` are the calls that wait to begin: while there are some, more outcomes will soon follow.
    """

    __slots__ = ("_deliver", "_first_at", "_incoming", "_loop", "_server", "pending")

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        server: asyncio.AbstractEventLoop,
        deliver: Callable[[list[Outcome]], None],
        incoming: deque[RunningCall],
    ) -> None:
        self.pending: list[Outcome] = []
        self._first_at = 0.0
        self._loop = loop
        self._server = server
        self._deliver = deliver
        self._incoming = incoming

    def send(self, outcome: Outcome) -> None:
        """Give back an outcome soon, with others."""
        if not self.pending:
            self._first_at = clock.now()
            self._loop.call_soon(self.flush)
        self.pending.append(outcome)

    def flush(self) -> None:
        """Give back what was collected, unless more will follow at once."""
        if self._incoming and clock.now() - self._first_at < TURN:
            self._loop.call_soon(self.flush)
            return
        outcomes, self.pending = self.pending, []
        if outcomes:
            self.give_back(outcomes)

    def give_back(self, outcomes: list[Outcome]) -> None:
        """Give these to the server's loop now."""
        with suppress(RuntimeError):  # the server is gone: so is whoever waited
            self._server.call_soon_threadsafe(self._deliver, outcomes)


def dump_result(running: RunningCall, result: object) -> bytes | BulkPayload:
    """Pickle what a routine returned or yielded; RemoteError says why it cannot be sent."""
    try:
        payload = dumps(result, running.given)
    except BaseException as error:
        remedy = "Return something that can be copied to another process."
        if inspect.iscoroutine(result):
            result.close()
            remedy = "Await it in the routine, and return what it gives."
        raise RemoteError(
            f"{_what(running)}, a {type(result).__qualname__}, cannot be pickled: {type(error).__name__}: {error}",
            remedy=remedy,
        ) from error
    limit = running.stream.max_payload
    if limit and len(payload) > limit:
        raise RemoteError(
            f"{_what(running)} takes {len(payload):,} bytes, and max_payload is {limit:,}",
            remedy="Yield it in parts from a generator, or open the pool with a higher `max_payload`.",
        )
    return payload


def _what(running: RunningCall) -> str:
    return f"what {running.begun.function.tag} {'returned' if running.orders is None else 'yielded'}"


def dump_raised(running: RunningCall, error: BaseException, where: str) -> bytes | BulkPayload:
    """Pickle what a routine raised; if it is too long, an error that says so."""
    payload = dump_exception(error, where, running.given, running.scope)
    limit = running.stream.max_payload
    if limit and len(payload) > limit:
        what = f"the routine raised {type(error).__qualname__}, which takes {len(payload):,} bytes"
        remedy = "Raise one that holds less, or open the pool with a higher `max_payload`."
        payload = dump_exception(RemoteError(f"{what}, and max_payload is {limit:,}", remedy=remedy), where)
    return payload
