"""Bulk payloads, which are too long for a frame, and the two ways they are sent. Pure.

A bulk payload is a pickle and the buffers that the pickle refers to without holding them: bytes and arrays are not
copied into it. As a **transfer** it is sent in chunks, one with each message, taking turns with other transfers, at
most `WINDOW` bytes ahead of what the receiver has taken. As a **loan** it is written into memory that the receiver, a
process on the same machine, reads and returns; at most `LOANS` of them are open in a session, the others wait.

The frame that needs a bulk payload follows the last chunk, or names the loan: so the frame is never sent before its
payload. A loan that the receiver cannot open (for example for lack of descriptors) is recalled, and sent as a transfer.
"""

from __future__ import annotations

import io
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from headgate.errors import RpcError

if TYPE_CHECKING:  # decorating a function must not import protobuf
    from headgate.workers.protocol.wire.wire_pb2 import Layout, ToClient, ToWorker

INLINE = 256 * 1024
"""Bytes that fit into a frame; also the length of a chunk, and of the shortest buffer that is kept out of a pickle."""
WINDOW = 4 * 1024 * 1024
GRANT = 1024 * 1024
"""Bytes after which the receiver gives the sender new credit."""
LOANS = 16

FrameT = TypeVar("FrameT")


class ProtocolViolation(RpcError):
    """A message of the other side breaks the protocol: the session with it ends."""


class BulkPayload:
    """A pickle, and the buffers that it refers to without holding them."""

    __slots__ = ("buffers", "lifted", "pickle", "size")

    def __init__(self, pickle: bytes, buffers: Sequence[Any] = (), lifted: int = 0) -> None:
        self.pickle: bytes = pickle
        self.lifted: int = lifted
        """How many of the buffers the pickle names by number: the first ones."""
        self.buffers: Sequence[Any] = buffers
        """Before sending: memoryviews of bytes. After receiving: bytes, or a bytearray where it was writable."""
        self.size: int = len(pickle) + sum(len(buffer) for buffer in buffers)

    def __len__(self) -> int:
        return self.size

    def segments(self) -> list[memoryview]:
        """Return the pickle and the buffers, in the order in which they are sent."""
        return [memoryview(self.pickle), *(memoryview(buffer) for buffer in self.buffers)]

    def layout(self) -> list[tuple[int, bool]]:
        """Return the length of each part, and whether it is writable."""
        buffers = ((len(buffer), not memoryview(buffer).readonly) for buffer in self.buffers)
        return [(len(self.pickle), False), *buffers]

    def describe(self, layout: Layout) -> None:
        """Write the lengths of its parts into a message."""
        layout.pickle = len(self.pickle)
        if self.lifted:
            layout.lifted = self.lifted
        for buffer in self.buffers:
            layout.buffers.add(length=len(buffer), writable=not memoryview(buffer).readonly)


class Borrowed(NamedTuple):
    """A bulk payload in memory of the other side, which this side has to read."""

    number: int
    descriptor: int
    segments: list[tuple[int, bool]]
    """Lengths, and whether each is to be writable."""
    lifted: int = 0
    """How many of the buffers the pickle names by number, as in `BulkPayload`."""


class Unreadable(NamedTuple):
    """Stands for a payload in lent memory that could not be read."""

    reason: str


Payload = bytes | BulkPayload | Borrowed | Unreadable


def segments_of(layout: Layout) -> list[tuple[int, bool]]:
    """Return the length of each part, and whether it must be writable."""
    return [(layout.pickle, False), *((buffer.length, buffer.writable) for buffer in layout.buffers)]


class _Leaving(Generic[FrameT]):
    __slots__ = ("bulk", "credit", "frame", "number", "rest")

    def __init__(self, number: int, bulk: BulkPayload, frame: FrameT) -> None:
        self.number: int = number
        self.bulk: BulkPayload | None = bulk  # until it was described
        self.rest: deque[memoryview] = deque(segment for segment in bulk.segments() if len(segment))
        self.frame: FrameT = frame
        self.credit: int = WINDOW


class _Arriving:
    __slots__ = ("_left", "_sink", "_todo", "done", "lifted", "taken")

    def __init__(self, segments: list[tuple[int, bool]], lifted: int = 0) -> None:
        self.lifted: int = lifted
        self._todo = deque(segments)
        self.done: list[bytes | bytearray] = []
        self.taken: int = 0
        """Bytes that the sender has not been told of."""
        self._sink: bytearray | io.BytesIO | None = None
        self._left = 0
        self._open()

    def _open(self) -> None:
        """Begin the next part that is not empty. (BytesIO gives away what it holds without a copy.)"""
        while self._todo:
            self._left, writable = self._todo[0]
            self._sink = bytearray() if writable else io.BytesIO()
            if self._left:
                return
            self._close()

    def _close(self) -> None:
        sink, self._sink = self._sink, None
        assert sink is not None, "`_open` came before"
        self._todo.popleft()
        self.done.append(sink if isinstance(sink, bytearray) else sink.getvalue())

    def feed(self, data: bytes) -> None:
        if len(data) > self._left or self._sink is None:
            raise ProtocolViolation("a chunk goes beyond what was announced")
        if isinstance(self._sink, bytearray):
            self._sink += data
        else:
            self._sink.write(data)
        self._left -= len(data)
        self.taken += len(data)
        if not self._left:
            self._close()
            self._open()

    @property
    def complete(self) -> bool:
        return not self._todo


class Transfers(Generic[FrameT]):
    """The transfers of one session: those being sent, which take turns, and those being received."""

    __slots__ = ("_arriving", "_last", "_parked", "grants", "leaving")

    def __init__(self) -> None:
        self.leaving: deque[_Leaving[FrameT]] = deque()
        self._parked: dict[int, _Leaving[FrameT]] = {}  # those whose credit is used up
        self._arriving: dict[int, _Arriving] = {}
        self._last = 0
        self.grants: dict[int, int] = {}
        """Credit to give: bytes, by transfer of the other side."""

    def __len__(self) -> int:
        """Number of transfers that can send a chunk now."""
        return len(self.leaving)

    def begin(self, bulk: BulkPayload, frame: FrameT) -> int:
        """Begin to send a payload in chunks; `frame` follows the last one."""
        self._last += 1
        self.leaving.append(_Leaving(self._last, bulk, frame))
        return self._last

    def next(self, message: ToWorker | ToClient) -> FrameT | None:
        """Put one chunk into `message`; returns the frame that may follow, if that was the last of its bulk payload."""
        one = self.leaving.popleft()
        segment = one.rest.popleft()
        chunk = message.chunks.add(transfer=one.number, data=bytes(segment[:INLINE]))
        if one.bulk is not None:
            one.bulk.describe(chunk.layout)
            one.bulk = None
        if len(segment) > INLINE:
            one.rest.appendleft(segment[INLINE:])
        one.credit -= len(chunk.data)
        if not one.rest:
            return one.frame
        if one.credit > 0:
            self.leaving.append(one)
        else:
            self._parked[one.number] = one
        return None

    def stop(self, frame: FrameT) -> int | None:
        """Stop the transfer that this frame waits for; returns its number, or None if there is none."""
        for one in (*self.leaving, *self._parked.values()):
            if one.frame is frame:
                self._parked.pop(one.number, None)
                if one in self.leaving:
                    self.leaving.remove(one)
                return one.number
        return None

    def receive(self, message: ToWorker | ToClient) -> None:
        """Take the chunks and the credit out of a message."""
        for chunk in message.chunks:
            if chunk.abandoned:
                self._arriving.pop(chunk.transfer, None)
                self.grants.pop(chunk.transfer, None)
                continue
            arriving = self._arriving.get(chunk.transfer)
            if arriving is None:
                if not chunk.HasField("layout"):
                    raise ProtocolViolation(f"chunks of the transfer {chunk.transfer}, of which no layout came")
                arriving = self._arriving[chunk.transfer] = _Arriving(segments_of(chunk.layout), chunk.layout.lifted)
            arriving.feed(chunk.data)
            if arriving.taken >= GRANT and not arriving.complete:
                self.grants[chunk.transfer] = self.grants.get(chunk.transfer, 0) + arriving.taken
                arriving.taken = 0
        for credit in message.credits:
            parked = self._parked.get(credit.transfer)
            if parked is not None:
                parked.credit += credit.bytes
                if parked.credit > 0:
                    self.leaving.append(self._parked.pop(credit.transfer))
            else:
                for one in self.leaving:
                    if one.number == credit.transfer:
                        one.credit += credit.bytes

    def grant(self, message: ToWorker | ToClient) -> None:
        """Write the credit to give into a message."""
        for transfer, amount in self.grants.items():
            message.credits.add(transfer=transfer, bytes=amount)
        self.grants.clear()

    def received(self, transfer: int) -> BulkPayload:
        """Return and forget the whole payload of a transfer."""
        arrived = self._arriving.pop(transfer, None)
        self.grants.pop(transfer, None)
        if arrived is None or not arrived.complete:
            raise ProtocolViolation(f"a frame names the transfer {transfer}, of which not all has come")
        pickle, *buffers = arrived.done
        return BulkPayload(bytes(pickle), buffers, arrived.lifted)


class Lending(Generic[FrameT]):
    """A bulk payload that will be lent, or is lent."""

    __slots__ = ("bulk", "descriptor", "frame", "number")

    def __init__(self, bulk: BulkPayload, frame: FrameT) -> None:
        self.bulk: BulkPayload = bulk
        self.frame: FrameT | None = frame
        """None: nobody needs it any more."""
        self.number: int = 0
        self.descriptor: int = -1


class Lent(NamedTuple):
    """A bulk payload in memory of this side, which the other side has to read."""

    number: int
    descriptor: int
    segments: list[tuple[int, bool]]
    """Lengths, and whether each is writable."""
    lifted: int
    """How many of the buffers the pickle names by number, as in `BulkPayload`."""


class Loans(Generic[FrameT]):
    """The loans of one session. It decides; `shared_memory` makes the memory and writes into it."""

    __slots__ = ("_last", "_lent", "recalled", "released", "waiting", "writing")

    def __init__(self) -> None:
        self.waiting: deque[Lending[FrameT]] = deque()
        self.writing: list[Lending[FrameT]] = []
        self._lent: dict[int, Lent] = {}
        self._last = 0
        self.released: list[int] = []
        """Descriptors to close; see `take_released`."""
        self.recalled: list[Lent] = []
        """Loans that the other side could not read; see `take_recalled`."""

    def __len__(self) -> int:
        return len(self.waiting) + len(self.writing)

    def ask(self, bulk: BulkPayload, frame: FrameT) -> None:
        """Queue a payload to be lent; `frame` will name it."""
        self.waiting.append(Lending(bulk, frame))

    def begin(self) -> Lending[FrameT] | None:
        """Return the next payload to write into memory; None: there is none, or too many loans are open."""
        if not self.waiting or len(self.writing) + len(self._lent) >= LOANS:
            return None
        lending = self.waiting.popleft()
        self.writing.append(lending)
        return lending

    def written(self, lending: Lending[FrameT], descriptor: int) -> FrameT | None:
        """Note that a payload is in memory; returns the frame to send now. None: nobody needs it any more."""
        known = lending in self.writing
        if known:
            self.writing.remove(lending)
        frame = lending.frame if known else None
        if frame is None:
            self.released.append(descriptor)
            return None
        self._last += 1
        lending.number, lending.descriptor = self._last, descriptor
        self._lent[self._last] = Lent(self._last, descriptor, lending.bulk.layout(), lending.bulk.lifted)
        return frame

    def failed(self, lending: Lending[FrameT]) -> FrameT | None:
        """Note that a payload could not be written; returns the frame that needs it sent in chunks."""
        if lending not in self.writing:
            return None
        self.writing.remove(lending)
        return lending.frame

    def stop(self, frame: FrameT) -> bool:
        """Drop the payload that was queued for this frame. False: there is none."""
        for lending in self.waiting:
            if lending.frame is frame:
                self.waiting.remove(lending)
                return True
        for lending in self.writing:
            if lending.frame is frame:
                lending.frame = None
                return True
        return False

    def returned(self, numbers: Iterable[int]) -> None:
        """Release the loans that the other side has read."""
        for number in numbers:
            lent = self._lent.pop(number, None)
            if lent is not None:
                self.released.append(lent.descriptor)

    def recall(self, numbers: Iterable[int]) -> None:
        """Take back the loans that the other side cannot read."""
        self.recalled += [lent for number in numbers if (lent := self._lent.pop(number, None)) is not None]

    def end(self) -> None:
        """Release everything, because the session is over."""
        self.waiting.clear()
        self.writing.clear()
        self.released += [lent.descriptor for lent in (*self._lent.values(), *self.recalled)]
        self._lent.clear()
        self.recalled.clear()

    def take_recalled(self) -> list[Lent]:
        """Return the loans to read back and to close, each once."""
        recalled, self.recalled = self.recalled, []
        return recalled

    def take_released(self) -> Iterator[int]:
        """Return the descriptors to close, each once."""
        released, self.released = self.released, []
        return iter(released)
