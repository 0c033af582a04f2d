"""The bulk payloads of one end of a session: sending, receiving, lending and returning them. Pure.

Both ends of a session own one `BulkChannel`. It decides whether a payload is sent as a transfer or as a loan (see
`bulk`), and calls back when the frame that needs the payload may be sent.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from headgate.workers.protocol.bulk import Borrowed, BulkPayload, Lending, Lent, Loans, Payload, Transfers, segments_of
from headgate.workers.protocol.wire.wire_pb2 import Call, Resent, Result, Step, ToClient, ToWorker, Yield


class NeedsPayload(Protocol):
    """A frame, or a call, that is sent after its bulk payload."""

    transfer: int
    """The number of the transfer that sends the payload; 0: none does."""


FrameT = TypeVar("FrameT", bound=NeedsPayload)


class BulkChannel(Generic[FrameT]):
    """The bulk payloads of one end of a session.

    `ready` is called with a frame when its payload was sent or lent, so that the frame may follow. Before that, for a
    loan, `name` is called to write into the frame which memory holds its payload.
    """

    def __init__(self, ready: Callable[[FrameT], None], name: Callable[[FrameT, Lending[FrameT]], None]) -> None:
        self.shares: bool = False
        """Can the other side read memory that is lent to it?"""
        self.over: bool = False
        """Is the session over? Then nothing is sent or returned any more."""
        self.loans: Loans[FrameT] = Loans()
        self.transfers: Transfers[FrameT | Resent] = Transfers()
        self.resent: list[tuple[int, BulkPayload | None]] = []
        """Loans of the other side that came in chunks, until `take_resent` takes them; None: they could not be sent."""
        self._ready = ready
        self._name = name
        self._returns: list[int] = []
        self._unread: list[int] = []  # loans of the other side that it is to send in chunks
        self._resending: list[Resent] = []  # what it could not read of ours, and has in chunks

    # -- sending ------------------------------------------------------------------------------------------------------

    def send(self, bulk: BulkPayload, frame: FrameT) -> None:
        """Send a bulk payload; `ready(frame)` follows when the frame may be sent."""
        if self.shares:
            self.loans.ask(bulk, frame)
        else:
            frame.transfer = self.transfers.begin(bulk, frame)

    def lend(self, lending: Lending[FrameT], descriptor: int) -> None:
        """Lend a payload that was written into this memory."""
        frame = self.loans.written(lending, descriptor)
        if frame is not None:
            self._name(frame, lending)
            self._ready(frame)

    def not_lent(self, lending: Lending[FrameT]) -> None:
        """Send a payload in chunks, because there is no memory for it."""
        frame = self.loans.failed(lending)
        if frame is not None:
            frame.transfer = self.transfers.begin(lending.bulk, frame)

    def resend(self, lent: Lent, bulk: BulkPayload | None) -> None:
        """Send in chunks a loan that the other side could not read. None: it cannot be read here either."""
        if self.over:
            return
        frame = Resent(loan=lent.number)
        if bulk is None:
            self._resending.append(frame)
        else:
            frame.transfer = self.transfers.begin(bulk, frame)

    def write_chunk(self, message: ToWorker | ToClient) -> None:
        """Put one chunk into a message. If it was the last of its payload, the frame may follow."""
        frame = self.transfers.next(message)
        if isinstance(frame, Resent):
            self._resending.append(frame)
        elif frame is not None:
            self._ready(frame)

    def write_notices(self, message: ToWorker | ToClient) -> None:
        """Write into a message what was read, what could not be read, and new credit."""
        if self._unread:
            message.unread.extend(self._unread)
            self._unread.clear()
        if self._resending:
            message.resent.extend(self._resending)
            self._resending.clear()
        if self._returns:
            message.returned.extend(self._returns)
            self._returns.clear()
        if self.transfers.grants:
            self.transfers.grant(message)

    # -- receiving ----------------------------------------------------------------------------------------------------

    def receive(self, message: ToWorker | ToClient) -> None:
        """Take out of a message what it holds and says about bulk payloads."""
        if message.chunks or message.credits:
            self.transfers.receive(message)
        if message.returned:
            self.loans.returned(message.returned)
        if message.unread:
            self.loans.recall(message.unread)
        for resent in message.resent:
            bulk = self.transfers.received(resent.transfer) if resent.transfer else None
            self.resent.append((resent.loan, bulk))

    def payload(self, frame: Call | Step | Result | Yield, inline: bytes) -> Payload:
        """Return the payload of a received frame, however it was sent."""
        if inline:
            return inline
        if frame.transfer:
            return self.transfers.received(frame.transfer)
        if frame.HasField("loan"):
            layout = frame.loan.layout
            return Borrowed(frame.loan.number, frame.loan.descriptor, segments_of(layout), layout.lifted)
        return inline

    def has_read(self, borrowed: Borrowed) -> None:
        """Return memory of the other side that was read."""
        if not self.over:
            self._returns.append(borrowed.number)

    def drop(self, payload: Payload) -> None:
        """Return a payload that nobody needs."""
        if isinstance(payload, Borrowed):
            self.has_read(payload)

    def cannot_read(self, borrowed: Borrowed) -> None:
        """Ask the other side to send in chunks what it lent. It comes as one of `resent`."""
        if not self.over:
            self._unread.append(borrowed.number)

    def take_resent(self) -> list[tuple[int, BulkPayload | None]]:
        """Return the loans that came in chunks, each once."""
        resent, self.resent = self.resent, []
        return resent

    # -- state --------------------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Is there something to send, to write or to close after a message was read?"""
        transfers, loans = self.transfers, self.loans
        return bool(
            self.has_notices or transfers.leaving or loans.waiting or loans.writing or loans.released or loans.recalled
        )

    @property
    def has_notices(self) -> bool:
        """Is there something to tell the other side about the payloads that it sent?"""
        return bool(self._returns or self.transfers.grants or self._unread or self._resending)

    def end(self) -> None:
        """Release and forget everything, because the session is over."""
        self.over = True
        self.loans.end()
        self.transfers = Transfers()
        self._returns.clear()
        self._unread.clear()
        self._resending.clear()
        self.resent.clear()


def name_loan(frame: Call | Step | Result | Yield, lending: Lending[FrameT]) -> None:
    """Write into a frame in which memory its payload is."""
    frame.loan.number, frame.loan.descriptor = lending.number, lending.descriptor
    lending.bulk.describe(frame.loan.layout)
