"""The gRPC stream of one client, on the server's loop: moves the messages of its session."""

from __future__ import annotations

import asyncio
import os
import socket
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from headgate._version import __version__
from headgate.workers.model import ReportedProcess
from headgate.workers.options import WorkerOptions
from headgate.workers.protocol import shared_memory
from headgate.workers.protocol.bulk import Borrowed, BulkPayload
from headgate.workers.protocol.messages import Begun, Received, Stepped
from headgate.workers.protocol.transport import grpc
from headgate.workers.protocol.wire.wire_pb2 import ToWorker
from headgate.workers.protocol.worker_session import WorkerSession
from headgate.workers.serialization.functions import ReceivedFunction
from headgate.workers.server.lifetime import memory_of_process

if TYPE_CHECKING:
    from headgate.workers.server.nested_pool import NestedPool


class ClientStream:
    """The gRPC stream of one client: its session, and the reading and writing of messages and lent memory."""

    def __init__(
        self, uid: str, context: grpc.aio.ServicerContext[Any, Any], nested: NestedPool, options: WorkerOptions
    ) -> None:
        self.nested: NestedPool = nested
        self.session: WorkerSession = WorkerSession(uid, __version__, ReceivedFunction, options.channel.max_message)
        self._max_age_ms = options.max_connection_age_ms or 0
        self.asked: bool = False
        """Has its client ever asked for a reservation?"""
        self.fetching: dict[int, Begun] = {}
        """Calls whose arguments are being read from lent memory."""
        # By call: steps behind one that is being read.
        self._steps_behind: dict[int, deque[tuple[Stepped, Callable[[Stepped], None]]]] = {}
        self._resent: dict[
            int, Callable[[BulkPayload | None], None]
        ] = {}  # by loan: who waits for it to come in chunks
        self._context = context
        self._work = asyncio.Event()
        self._all_sent = asyncio.Event()
        self._left = asyncio.Event()
        self._offer: shared_memory.Offer | None = None
        self._pid = 0

    def greet(self, message: ToWorker, *, stopping: bool) -> bool:
        """Answer the client's first message. False: the client is refused."""
        self._offer = shared_memory.Offer()
        probe = message.hello.probe if message.hello.HasField("probe") else None
        self._pid = probe.pid if probe is not None else 0
        offered = self._offer.probe if probe is not None else None
        shares = shared_memory.can_read(probe)
        return self.session.greet(
            message,
            stopping=stopping,
            probe=offered,
            shares=shares,
            max_age_ms=self._max_age_ms,
            process=ReportedProcess(socket.gethostname(), os.getpid(), memory_of_process()),
        )

    def receive(self, message: ToWorker) -> Received:
        """Read the next message. A client that sends one has tried the memory it was offered."""
        if self._offer is not None:
            self._offer.close()
            self._offer = None
        received = self.session.receive(message)
        if message.leaves:
            self._left.set()
        for number, bulk in self.session.bulk.take_resent():
            done = self._resent.pop(number, None)
            if done is not None:
                done(bulk)
        return received

    def read(self, borrowed: Borrowed, done: Callable[[BulkPayload | None], None], *, resend: bool = False) -> None:
        """Read memory that the client lends; `resend`: if it cannot be read, have the client send it in chunks."""

        def returned(bulk: BulkPayload | None, error: BaseException | None) -> None:
            if resend and isinstance(error, shared_memory.Unopened) and not self.session.bulk.over:
                self.session.bulk.cannot_read(borrowed)
                self._resent[borrowed.number] = done
                self.flush()
                return
            self.session.bulk.has_read(borrowed)
            self.flush()
            done(bulk)

        size = sum(length for length, _ in borrowed.segments)
        shared_memory.aside(size, lambda: shared_memory.read(self._pid, borrowed), returned)

    def is_reading(self, number: int) -> bool:
        """Is a step of this generator being read from lent memory?"""
        return number in self._steps_behind

    def in_order(self, step: Stepped, go_on: Callable[[Stepped], None]) -> None:
        """Call `go_on` with a step, after it was read and after the earlier steps of its generator."""
        behind = self._steps_behind.get(step.number)
        if behind is not None:
            behind.append((step, go_on))
            return
        if not isinstance(step.payload, Borrowed):
            go_on(step)
            return
        self._steps_behind[step.number] = deque()

        def done(bulk: BulkPayload | None) -> None:
            go_on(step._replace(payload=bulk) if bulk is not None else step._replace(advance="close", payload=b""))
            behind = self._steps_behind.pop(step.number)
            while behind:
                self.in_order(*behind.popleft())
                if step.number in self._steps_behind:
                    self._steps_behind[step.number].extend(behind)
                    return

        self.read(step.payload, done, resend=True)

    @property
    def max_payload(self) -> int:
        """Limit of the client for one payload, in bytes; 0: no limit."""
        return self.session.max_payload

    @property
    def max_context(self) -> tuple[int, str]:
        """Limit for the context variables that one result brings back, in bytes, and its name; 0: no limit."""
        own, extra = self.session.max_payload, self.session.lengths.extra
        return (own, "max_payload") if not extra or 0 < own <= extra else (extra, "the room for them in a message")

    def flush(self) -> None:
        """Wake the writer: there is something to send."""
        self._all_sent.clear()
        self._work.set()

    async def all_sent(self) -> None:
        """Wait until everything there is to say was written, or the stream has ended."""
        await self._all_sent.wait()

    async def left(self) -> None:
        """Wait until the client has heard that the worker stops and has no more to ask, or the stream has ended."""
        if not self.session.leaves:
            await self._left.wait()
        await self._all_sent.wait()

    def end(self) -> list[int]:
        """Clean up after the stream has ended; returns the calls that nobody waits for any more."""
        self._all_sent.set()
        self._left.set()
        left = self.session.broken()
        if self._offer is not None:
            self._offer.close()
        for descriptor in self.session.bulk.loans.take_released():
            os.close(descriptor)
        return left

    async def write(self) -> None:
        """Send whatever there is, until the end of the stream cancels this."""
        while True:
            loans = self.session.bulk.loans
            if loans.waiting or loans.released or loans.recalled:
                shared_memory.lend(self.session.bulk, self.flush)
            message = self.session.take()
            if message is None:
                if not self.session.has_more:
                    self._all_sent.set()
                self._work.clear()
                await self._work.wait()
            else:
                await self._context.write(message.SerializeToString())
