"""Payloads too long for a frame, and the two ways they travel. Pure.

A *parcel* is a pickle and the buffers that the pickle speaks of without holding them: bytes and arrays are not copied
into it. As a **transfer** it goes in chunks, one with each message, taking turns with other transfers, at most `WINDOW`
bytes ahead of what the receiver has taken. As a **loan** it is written into memory that the receiver, a process of the
same machine, reads and returns; at most `LOANS` of them are open in a conversation, the others wait.

The frame that needs a parcel follows its last chunk, or names the loan: so nothing of it is sent before. A loan that
the receiver cannot open (it is short of descriptors, say) is recalled: what it holds goes as a transfer after all.
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
"""What fits into a frame; also the length of a chunk, and of the shortest buffer that stays out of the pickle."""
WINDOW = 4 * 1024 * 1024
GRANT = 1024 * 1024
"""The receiver says that it has room each time it took so much."""
LOANS = 16

FrameT = TypeVar("FrameT")


class ConversationBroken(RpcError):
    """The other side said what it may not say."""


class Parcel:
    """A pickle and its buffers."""

    __slots__ = ("buffers", "lifted", "pickle", "size")

    def __init__(self, pickle: bytes, buffers: Sequence[Any] = (), lifted: int = 0) -> None:
        self.pickle: bytes = pickle
        self.lifted: int = lifted
        """How many of the buffers, the first ones, the pickle names by their number."""
        self.buffers: Sequence[Any] = buffers
        """Going out: memoryviews of bytes. Arrived: bytes, or a bytearray where it was writable."""
        self.size: int = len(pickle) + sum(len(buffer) for buffer in buffers)

    def __len__(self) -> int:
        return self.size

    def segments(self) -> list[memoryview]:
        """Its parts, in order."""
        return [memoryview(self.pickle), *(memoryview(buffer) for buffer in self.buffers)]

    def layout(self) -> list[tuple[int, bool]]:
        """Lengths of its parts, and whether each is writable."""
        buffers = ((len(buffer), not memoryview(buffer).readonly) for buffer in self.buffers)
        return [(len(self.pickle), False), *buffers]

    def describe(self, layout: Layout) -> None:
        """Write down what it consists of."""
        layout.pickle = len(self.pickle)
        if self.lifted:
            layout.lifted = self.lifted
        for buffer in self.buffers:
            layout.buffers.add(length=len(buffer), writable=not memoryview(buffer).readonly)


class Borrowed(NamedTuple):
    """A parcel in memory of the other side, still to be read."""

    number: int
    descriptor: int
    segments: list[tuple[int, bool]]
    """Lengths, and whether each is to be writable."""
    lifted: int = 0
    """See `Parcel`."""


class Unreadable(NamedTuple):
    """What was lent and could not be read."""

    reason: str


Payload = bytes | Parcel | Borrowed | Unreadable


def segments_of(layout: Layout) -> list[tuple[int, bool]]:
    """Lengths of the parts, and whether each is to be writable."""
    return [(layout.pickle, False), *((buffer.length, buffer.writable) for buffer in layout.buffers)]


class _Leaving(Generic[FrameT]):
    __slots__ = ("credit", "frame", "number", "parcel", "rest")

    def __init__(self, number: int, parcel: Parcel, frame: FrameT) -> None:
        self.number: int = number
        self.parcel: Parcel | None = parcel  # until it was described
        self.rest: deque[memoryview] = deque(segment for segment in parcel.segments() if len(segment))
        self.frame: FrameT = frame
        self.credit: int = WINDOW


class _Arriving:
    __slots__ = ("_left", "_sink", "_todo", "done", "lifted", "taken")

    def __init__(self, segments: list[tuple[int, bool]], lifted: int = 0) -> None:
        self.lifted: int = lifted
        self._todo = deque(segments)
        self.done: list[Any] = []
        self.taken: int = 0
        """Bytes that the sender has not been told of."""
        self._sink: Any = None
        self._left = 0
        self._open()

    def _open(self) -> None:
        """The next part that has a length. BytesIO gives away what it holds without a copy."""
        while self._todo:
            self._left, writable = self._todo[0]
            self._sink = bytearray() if writable else io.BytesIO()
            if self._left:
                return
            self._close()

    def _close(self) -> None:
        sink, self._sink = self._sink, None
        self._todo.popleft()
        self.done.append(sink if isinstance(sink, bytearray) else sink.getvalue())

    def feed(self, data: bytes) -> None:
        if len(data) > self._left or self._sink is None:
            raise ConversationBroken("a chunk goes beyond what was announced")
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
    """What travels in chunks: the ones going out, taking turns, and the ones coming in."""

    __slots__ = ("_arriving", "_last", "_parked", "grants", "leaving")

    def __init__(self) -> None:
        self.leaving: deque[_Leaving[FrameT]] = deque()
        self._parked: dict[int, _Leaving[FrameT]] = {}  # those whose credit is used up
        self._arriving: dict[int, _Arriving] = {}
        self._last = 0
        self.grants: dict[int, int] = {}
        """Credit to be told: transfers of the other side, and bytes."""

    def __len__(self) -> int:
        """How many can go on now."""
        return len(self.leaving)

    def begin(self, parcel: Parcel, frame: FrameT) -> int:
        """Send it in chunks; `frame` is what follows them."""
        self._last += 1
        self.leaving.append(_Leaving(self._last, parcel, frame))
        return self._last

    def next(self, message: ToWorker | ToClient) -> FrameT | None:
        """Put one chunk into `message`; returns the frame that may follow, if that was the last of its parcel."""
        one = self.leaving.popleft()
        segment = one.rest.popleft()
        chunk = message.chunks.add(transfer=one.number, data=bytes(segment[:INLINE]))
        if one.parcel is not None:
            one.parcel.describe(chunk.layout)
            one.parcel = None
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
        """Send no more of what this frame needs. Its number, if there was such a transfer."""
        for one in (*self.leaving, *self._parked.values()):
            if one.frame is frame:
                self._parked.pop(one.number, None)
                if one in self.leaving:
                    self.leaving.remove(one)
                return one.number
        return None

    def receive(self, message: ToWorker | ToClient) -> None:
        """Keep the chunks of `message`, and use the credit in it."""
        for chunk in message.chunks:
            if chunk.abandoned:
                self._arriving.pop(chunk.transfer, None)
                self.grants.pop(chunk.transfer, None)
                continue
            arriving = self._arriving.get(chunk.transfer)
            if arriving is None:
                if not chunk.HasField("layout"):
                    raise ConversationBroken(f"chunks of the transfer {chunk.transfer}, of which no layout came")
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
        """Tell the other side that there is room."""
        for transfer, amount in self.grants.items():
            message.credits.add(transfer=transfer, bytes=amount)
        self.grants.clear()

    def parcel(self, transfer: int) -> Parcel:
        """All of what came by this transfer."""
        arrived = self._arriving.pop(transfer, None)
        self.grants.pop(transfer, None)
        if arrived is None or not arrived.complete:
            raise ConversationBroken(f"a frame names the transfer {transfer}, of which not all has come")
        pickle, *buffers = arrived.done
        return Parcel(pickle, buffers, arrived.lifted)


class Lending(Generic[FrameT]):
    """A parcel that is to be lent, or is."""

    __slots__ = ("descriptor", "frame", "number", "parcel")

    def __init__(self, parcel: Parcel, frame: FrameT) -> None:
        self.parcel: Parcel = parcel
        self.frame: FrameT | None = frame
        """None: nobody needs it any more."""
        self.number: int = 0
        self.descriptor: int = -1


class Lent(NamedTuple):
    """A parcel in memory of this side, that the other side is to read."""

    number: int
    descriptor: int
    segments: list[tuple[int, bool]]
    """Lengths, and whether each is writable."""
    lifted: int
    """See `Parcel`."""


class Loans(Generic[FrameT]):
    """What is lent to the other side. To make memory and to write into it is the shell's business."""

    __slots__ = ("_last", "_lent", "recalled", "released", "waiting", "writing")

    def __init__(self) -> None:
        self.waiting: deque[Lending[FrameT]] = deque()
        self.writing: list[Lending[FrameT]] = []
        self._lent: dict[int, Lent] = {}
        self._last = 0
        self.released: list[int] = []
        """Descriptors that the shell is to close."""
        self.recalled: list[Lent] = []
        """What the other side could not read, for the shell to read and to close."""

    def __len__(self) -> int:
        return len(self.waiting) + len(self.writing)

    def ask(self, parcel: Parcel, frame: FrameT) -> None:
        """Have it lent; `frame` is what will name it."""
        self.waiting.append(Lending(parcel, frame))

    def begin(self) -> Lending[FrameT] | None:
        """The next one to be written, if there may be one more."""
        if not self.waiting or len(self.writing) + len(self._lent) >= LOANS:
            return None
        lending = self.waiting.popleft()
        self.writing.append(lending)
        return lending

    def written(self, lending: Lending[FrameT], descriptor: int) -> FrameT | None:
        """It is in memory: the frame that may go now. None: nobody needs it any more."""
        known = lending in self.writing
        if known:
            self.writing.remove(lending)
        frame = lending.frame if known else None
        if frame is None:
            self.released.append(descriptor)
            return None
        self._last += 1
        lending.number, lending.descriptor = self._last, descriptor
        self._lent[self._last] = Lent(self._last, descriptor, lending.parcel.layout(), lending.parcel.lifted)
        return frame

    def failed(self, lending: Lending[FrameT]) -> FrameT | None:
        """It could not be written: the frame that has to travel otherwise."""
        if lending not in self.writing:
            return None
        self.writing.remove(lending)
        return lending.frame

    def stop(self, frame: FrameT) -> bool:
        """This frame needs nothing any more."""
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
        """The other side has read these."""
        for number in numbers:
            lent = self._lent.pop(number, None)
            if lent is not None:
                self.released.append(lent.descriptor)

    def recall(self, numbers: Iterable[int]) -> None:
        """The other side cannot read these."""
        self.recalled += [lent for number in numbers if (lent := self._lent.pop(number, None)) is not None]

    def end(self) -> None:
        """There is nobody to lend to."""
        self.waiting.clear()
        self.writing.clear()
        self.released += [lent.descriptor for lent in (*self._lent.values(), *self.recalled)]
        self._lent.clear()
        self.recalled.clear()

    def take_recalled(self) -> list[Lent]:
        """What is to be read and closed, each once."""
        recalled, self.recalled = self.recalled, []
        return recalled

    def take_released(self) -> Iterator[int]:
        """Descriptors to close, each once."""
        released, self.released = self.released, []
        return iter(released)
