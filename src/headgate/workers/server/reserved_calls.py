"""Reservations on a worker for calls that must run with few others: carries out what `admission` decides.

That is decided on the task loop, where calls begin and end, and told on the server's loop.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING

from headgate.workers.protocol.wire.wire_pb2 import Reserve
from headgate.workers.server.admission import Admission, Ask, RunningCallLike

if TYPE_CHECKING:
    from headgate.workers.server.client_stream import ClientStream
    from headgate.workers.server.running_call import RunningCall

REFUSED = b"a call that is to have few neighbours runs there, or waits for room"


class ReservedCalls:
    """The reservations on one worker: which are granted, and whether other calls are refused.

    `running` are the calls on the task loop. `tell` is called on the server's loop with what was granted, and whether
    other calls are refused from now on.
    """

    def __init__(
        self,
        running: Mapping[tuple[ClientStream, int], RunningCallLike],
        server: asyncio.AbstractEventLoop,
        tell: Callable[[list[Ask], bool], None],
        wake: Callable[[], None],
    ) -> None:
        self._admission = Admission(running)
        self._server = server
        self._tell = tell
        self._wake = wake
        self._requests: deque[Callable[[], None]] = deque()
        self._closed = False  # what was last told

    @property
    def active(self) -> bool:
        """Must calls be checked before they begin?"""
        return self._admission.active

    # -- on the server's thread ----------------------------------------------------------------------------------------

    def ask(self, stream: ClientStream, asked: Iterable[Reserve], released: Iterable[int]) -> None:
        """Note reservations that a client asks for, or does not need any more."""
        for one in asked:
            ask = Ask(stream, one.number, one.caller, max(1, one.max_calls), one.overdue)
            self._requests.append(partial(self._admission.ask, ask))
        for number in released:
            self._requests.append(partial(self._admission.withdraw, stream, number))
        self._wake()

    def leave(self, stream: ClientStream) -> None:
        """Drop the reservations of a client that has gone."""
        self._requests.append(partial(self._admission.leave, stream))
        self._wake()

    # -- on the task loop ----------------------------------------------------------------------------------------------

    def process_requests(self) -> None:
        """Process the requests of clients for reservations."""
        if self._requests:
            while self._requests:
                self._requests.popleft()()
            self.update()

    def admits(self, call: RunningCall) -> bool:
        """Decide whether this call may begin. If so, it must begin now."""
        begun, admission = call.begun, self._admission
        if begun.reservation:
            may = admission.begins(call.stream, begun.reservation, call)
        else:
            may = admission.admits(begun.caller)
        if not may:
            self.update()  # its client learns that others are refused before it learns that this call is
        return may  # `began` updates: before it, the call is not among the running ones and would not be counted

    def began(self) -> None:
        """Note that the call which `admits` let in is running."""
        self._admission.began()
        self.update()

    def ended(self, call: RunningCallLike) -> None:
        """Note that a call has ended, and grant what can be granted now."""
        self._admission.ended(call)
        self.update()

    def update(self) -> None:
        """Grant what can be granted, and tell the server when other calls begin or cease to be refused."""
        granted = self._admission.grant()
        closed = self._admission.closed
        if granted or closed != self._closed:
            self._closed = closed
            try:
                self._server.call_soon_threadsafe(self._tell, granted, closed)
            except RuntimeError:  # the server is gone
                pass
