"""Conversations with workers, moved by hand, beside a naive model of them.

A `Pair` is one stream: both ends of a session, what is in transit between them, as bytes, and for each `End` what it
should have to send, to tell and to give back. A `Work` is one call of a routine, whatever becomes of it: it may be
placed on several pairs, one after the other. `World` does what a shell does, one step at a time, and compares each
answer with what lists and plain counting say; the memory that processes lend each other is a dict in it. Constants are
read from their modules at each use, so that a test may make them small (`limit`).
"""

from __future__ import annotations

import gc
import random
import types
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from headgate.core.lessons import Lesson
from headgate.workers.model import FunctionForm
from headgate.workers.protocol import bulk, client_session, worker_session
from headgate.workers.protocol.bulk import Borrowed, BulkPayload, Lending
from headgate.workers.protocol.call_ends import KIND_OF_RESULT, REFUSAL_OF_KIND
from headgate.workers.protocol.client_session import ClientSession
from headgate.workers.protocol.messages import Advance, Answer, Begun, Outgoing, Peer, Received
from headgate.workers.protocol.wire.wire_pb2 import Definition, Layout, Result, Step, ToClient, ToWorker, Yield
from headgate.workers.protocol.worker_session import WorkerSession

Manner = Literal["fine", "stopping", "refusing"]
Peers = tuple[str, list[Peer], int]
Packed = bytes | BulkPayload
Plain = bytes | tuple[int, tuple[tuple[bytes, bool], ...]]
Shape = int | tuple[Any, ...]
"""A length; or the length of a pickle and then, for each buffer, its length and whether it can be written to. Every
second buffer counts as lifted."""
SideName = Literal["client", "worker"]

REFUSALS = tuple(REFUSAL_OF_KIND)
ENDS = ("returned", "raised", "cancelled", "stopped")
NOTHING: Mapping[Any, int] = {}
SILENCE = Received([], [], [])
"""A message of which nothing concerns anybody."""


def limit(limits: Mapping[str, int], put: Callable[[Any, str, int], None] = setattr) -> None:
    """Have these limits, wherever they are read."""
    for name, value in limits.items():
        for module in (client_session, worker_session, bulk):
            if hasattr(module, name):
                put(module, name, value)


def form_of(definition: Definition) -> FunctionForm:
    """What a worker makes of a definition here: the form that it came from."""
    return FunctionForm(*(getattr(definition, name) for name in FunctionForm._fields))


def peers_of(message: ToWorker) -> Peers:
    workers = [Peer(one.uid, one.address, one.secure, one.options) for one in message.peers.workers]
    return message.peers.pool, workers, message.peers.number


def on_the_wire(frame: Any) -> set[str]:
    """The fields of a frame that take any room."""
    return {field.name for field, _ in frame.ListFields()}


def noise(seed: object, size: int) -> bytes:
    """Bytes in which no part is like another."""
    return random.Random(repr(seed)).randbytes(size)


def packed(seed: object, shape: Shape) -> Packed:
    """A payload of this shape, as a codec makes them: what fits into a frame is bytes."""
    if isinstance(shape, int):
        data = noise(seed, shape)
        return data if shape <= bulk.INLINE else BulkPayload(data)
    buffers: list[Any] = []
    for nth, (size, writable) in enumerate(shape[1:]):
        data = noise((seed, nth), size)
        buffers.append(bytearray(data) if writable else memoryview(data))
    return BulkPayload(noise(seed, shape[0]), buffers, len(buffers) // 2)


def plain(payload: Any) -> Plain:
    """What a payload holds: bytes; or how much is lifted, and its parts, and which of them can be written to."""
    if isinstance(payload, bytes):
        return payload
    assert isinstance(payload, BulkPayload)
    return payload.lifted, tuple((bytes(part), not part.readonly) for part in payload.segments())


def pieces(payload: BulkPayload) -> list[bytes]:
    """Its chunks: no part shares one with another."""
    step = bulk.INLINE
    return [bytes(part[at : at + step]) for part in payload.segments() for at in range(0, len(part), step)]


def laid_out(payload: BulkPayload) -> Layout:
    pickle, *buffers = payload.segments()
    layout = Layout(pickle=len(pickle), lifted=payload.lifted)
    for part in buffers:
        layout.buffers.add(length=len(part), writable=not part.readonly)
    return layout


def cut(data: bytes, borrowed: Borrowed) -> Plain:
    """Memory, read as the borrower was told."""
    parts, at = [], 0
    for length, writable in borrowed.segments:
        parts.append((data[at : at + length], writable))
        at += length
    assert at == len(data), "all of it, and no more"
    return borrowed.lifted, tuple(parts)


def retained(end: ClientSession | WorkerSession) -> list[Any]:
    """Calls, frames and payloads that can be reached from it, once the shell has taken note of what ended."""
    if isinstance(end, ClientSession):
        end.take_ended()
    seen: set[int] = set()
    todo: list[Any] = [end]
    found = []
    while todo:
        one = todo.pop()
        if id(one) in seen or isinstance(one, (type, types.ModuleType, types.FunctionType)):
            continue
        seen.add(id(one))
        if isinstance(one, (BulkPayload, Lending, Outgoing, Begun, Borrowed, memoryview, Step, Result, Yield)):
            found.append(one)
        todo += gc.get_referents(one)
    return found


class Work:
    """A call of a routine, from its first attempt to its one outcome."""

    def __init__(
        self, task: int, form: FunctionForm, payload: Packed, retries: int, moves: int, context: bytes = b""
    ) -> None:
        self.task = task
        self.form = form
        self.payload = payload
        self.context = context
        self.retries = retries  # how often it may run again after it was lost
        self.moves = moves  # how often it tries another worker after a refusal
        self.pair: Pair | None = None  # who has it now
        self.call: Outgoing | None = None
        self.outcomes: list[str] = []
        self.received = 0
        self.refused = 0
        self.may_arrive = 1
        self.may_run = 1

    def attempt(self) -> Outgoing:
        terms = random.Random(self.task)
        timeout, caller = terms.choice((0.0, 2.5)), terms.choice(("", "client/7"))
        prefetch, tell_start = terms.choice((0, 0, 3)), terms.random() < 0.5
        return Outgoing(
            self.task,
            self.form,
            self.payload,
            timeout,
            caller,
            tell_start,
            prefetch=prefetch,
            context=self.context,
            tenant=terms.choice(("", "acme")),
        )

    def __repr__(self) -> str:
        return f"<work {self.task}, {len(self.payload)} bytes>"


@dataclass(eq=False)
class Ask:
    """What a client wants of a generator."""

    number: int
    advance: Advance
    times: int
    payload: Packed
    context: bytes


@dataclass(eq=False)
class Frame:
    """What a worker has to say of a call: an item of it, or its end."""

    number: int
    kind: str
    payload: Packed
    swallowed: bool
    steps: int
    context: bytes
    lessons: Sequence[Lesson] = ()


def lessons_of(number: int) -> Sequence[Lesson]:
    """What a frame says about resources: mostly nothing."""
    return [Lesson("k", spent=(number, None, 1.0)), Lesson("other", status=number)] if number % 5 == 0 else ()


class Long:
    """A payload on its way in chunks."""

    def __init__(self, key: Any) -> None:
        self.key = key
        self.layout: Layout | None = laid_out(key.payload)  # until its first chunk was sent
        self.pieces = pieces(key.payload)
        self.ahead = 0  # bytes that were sent, and not taken as far as the receiver has said
        self.transfer: int | None = None  # known from its first chunk


@dataclass(eq=False)
class Part:
    """A payload that comes in chunks."""

    total: int
    came: int = 0
    taken: int = 0  # up to here the sender is to be told
    told: int = 0


@dataclass(eq=False)
class Written:
    """A payload that is being written into memory."""

    lending: Lending[Any]
    key: Any  # None: nobody needs it


class Reading(NamedTuple):
    """What was lent to this end, and is still to be read."""

    borrowed: Borrowed
    payload: Packed
    lender: End


@dataclass(eq=False)
class End:
    """One end of a stream. Small frames are sent first come first served; long payloads take turns, or are lent."""

    session: ClientSession | WorkerSession
    over: bool = False
    shares: bool = False
    first: list[Any] = field(default_factory=list)  # steps
    queue: list[Any] = field(default_factory=list)  # calls, or what is said of them
    early: list[Any] = field(default_factory=list)  # what is long, before the stream is open
    bulk: list[Long] = field(default_factory=list)
    parked: list[Long] = field(default_factory=list)  # ahead by as much as it may be
    waiting: list[Any] = field(default_factory=list)  # for memory
    writing: list[Written] = field(default_factory=list)
    lent: dict[int, int] = field(default_factory=dict)
    released: list[int] = field(default_factory=list)
    ways: dict[Any, tuple[str, int, int]] = field(default_factory=dict)  # by which transfer or loan it travels
    lines: dict[int, list[Frame]] = field(default_factory=dict)  # behind one that is on the way
    parts: dict[int, Part] = field(default_factory=dict)
    returns: list[int] = field(default_factory=list)
    late: list[Written] = field(default_factory=list)  # being written when the stream broke
    cancels: list[tuple[int, Any]] = field(default_factory=list)  # with the step that each of them is to follow
    held: list[int] = field(default_factory=list)  # cancels of steps that are on the way
    reads: list[Reading] = field(default_factory=list)
    highest: int = 0
    loans: int = 0

    # -- what goes out ------------------------------------------------------------------------------------------------

    def add(self, key: Any) -> None:
        if isinstance(key, Frame) and key.number in self.lines:
            self.lines[key.number].append(key)
        elif isinstance(key.payload, bytes):
            (self.first if isinstance(key, Ask) else self.queue).append(key)
        else:
            if isinstance(key, Frame):
                self.lines[key.number] = []
            self.depart(key)

    def depart(self, key: Any) -> None:
        if self.shares:
            self.waiting.append(key)
        else:
            self.bulk.append(Long(key))

    def land(self, key: Any) -> None:
        """Its payload has gone: the frame may follow, and then those behind it."""
        (self.first if isinstance(key, Ask) else self.queue).append(key)
        if isinstance(key, Frame):
            for frame in self.lines.pop(key.number):
                self.add(frame)
        elif isinstance(key, Ask):
            self.cancels += [(number, key) for number in self.held if number == key.number]
            self.held = [number for number in self.held if number != key.number]

    def stepping(self, number: int) -> bool:
        """Is a step of this call on its way?"""
        return any(isinstance(key, Ask) and key.number == number for key in self.apart())

    def apart(self) -> list[Any]:
        """What needs a payload that is on its way."""
        keys = [*self.early, *self.waiting, *(long.key for long in [*self.bulk, *self.parked])]
        return [*keys, *(written.key for written in self.writing)]

    def cancel(self, number: int) -> None:
        if self.stepping(number):
            self.held.append(number)
        else:
            steps = [step for step in self.first if step.number == number]
            self.cancels.append((number, steps[-1] if steps else None))

    def remove(self, key: Any) -> list[int | None] | None:
        """Forget it. None: it is not here. Else the transfers that the other end has to forget."""
        if key in self.early:
            self.early.remove(key)
        elif key in self.waiting:
            self.waiting.remove(key)
        elif key in self.queue:
            self.queue.remove(key)
            how, number, _ = self.ways.pop(key, ("", 0, 0))
            if how == "transfer":
                return [number]
            if how == "loan":
                self.released.append(self.lent.pop(number))
        else:
            for long in [*self.bulk, *self.parked]:
                if long.key is key:
                    (self.bulk if long in self.bulk else self.parked).remove(long)
                    return [long.transfer]
            for written in self.writing:
                if written.key is key:
                    written.key = None
                    return []
            return None
        return []

    def works(self) -> list[Work]:
        """Calls that are unsent."""
        return [key for key in [*self.queue, *self.apart()] if isinstance(key, Work)]

    def nearly(self) -> list[Work]:
        """Those of them whose payload is being written, or on the other side, or within its reach."""
        keys = [*(written.key for written in self.writing), *(key for key in self.queue if key in self.ways)]
        return [key for key in keys if isinstance(key, Work)]

    def leave(self, firsts: int, others: int, chunks: Iterable[Any], defined: Mapping[Any, int] = NOTHING) -> list[Any]:
        """So many frames and these chunks left in one message: as many as should have? Some brought a definition."""
        size = 0
        left: list[Any] = []
        for queue, count in ((self.first, firsts), (self.queue, others)):
            for _ in range(count):
                assert size < client_session.MESSAGE, "a message ends when it is long enough"
                key = queue.pop(0)
                inline = len(key.payload) if isinstance(key.payload, bytes) else 0
                size += inline + len(key.context) + client_session.FRAME + defined.get(key, 0)
                left.append(key)
            assert not queue or size >= client_session.MESSAGE, "small frames never wait for a transfer"
        data = [chunk for chunk in chunks if not chunk.abandoned]
        if not self.bulk:
            assert not data
            return left
        (chunk,) = data  # one chunk a message: what comes next waits for no more than that
        long = self.bulk.pop(0)
        if long.transfer is None:
            assert chunk.transfer > self.highest, "numbers of transfers rise"
            long.transfer = self.highest = chunk.transfer
        assert chunk.transfer == long.transfer, "transfers take turns"
        assert (chunk.layout if chunk.HasField("layout") else None) == long.layout, "in the first chunk and only there"
        long.layout = None
        assert chunk.data == long.pieces.pop(0)
        assert long.ahead < bulk.WINDOW, "never more than one chunk above the window"
        long.ahead += len(chunk.data)
        if not long.pieces:
            self.ways[long.key] = ("transfer", long.transfer, 0)
            self.land(long.key)
        else:
            (self.bulk if long.ahead < bulk.WINDOW else self.parked).append(long)
        return left

    def said(self, key: Any, frame: Any, inline: bytes) -> None:
        """Does the frame say where the payload of `key` is? And what it has of a context, which travels with it."""
        assert frame.context == key.context
        assert ("context" in on_the_wire(frame)) is bool(key.context), "who sets nothing pays nothing"
        how, number, descriptor = self.ways.pop(key, ("inline", 0, 0))
        assert (frame.transfer, frame.HasField("loan")) == (number if how == "transfer" else 0, how == "loan")
        assert inline == (plain(key.payload) if how == "inline" else b"")
        if how == "loan":
            assert (frame.loan.number, frame.loan.descriptor) == (number, descriptor)
            assert frame.loan.layout == laid_out(key.payload)

    # -- what comes in ------------------------------------------------------------------------------------------------

    def hear(self, message: ToWorker | ToClient) -> None:
        """Chunks, room for chunks, and memory that came back."""
        for chunk in message.chunks:
            if chunk.abandoned:
                self.parts.pop(chunk.transfer, None)
                continue
            if chunk.transfer not in self.parts:
                total = chunk.layout.pickle + sum(buffer.length for buffer in chunk.layout.buffers)
                self.parts[chunk.transfer] = Part(total)
            part = self.parts[chunk.transfer]
            part.came += len(chunk.data)
            if part.came < part.total and part.came - part.taken >= bulk.GRANT:
                part.taken = part.came
        for credit in message.credits:
            for long in [*self.bulk, *self.parked]:
                if long.transfer == credit.transfer:
                    long.ahead -= credit.bytes
                    assert long.ahead >= 0, "nobody took what was not sent"
                    if long in self.parked and long.ahead < bulk.WINDOW:
                        self.parked.remove(long)
                        self.bulk.append(long)
        for number in message.returned:
            self.released.append(self.lent.pop(number))

    @property
    def owes(self) -> bool:
        return bool(self.returns or any(part.taken > part.told for part in self.parts.values()))

    def settle(self, message: ToWorker | ToClient) -> None:
        """It told what it owed?"""
        assert list(message.returned) == self.returns
        self.returns = []
        owed = {number: part.taken - part.told for number, part in self.parts.items() if part.taken > part.told}
        assert {credit.transfer: credit.bytes for credit in message.credits} == owed
        assert len(message.credits) == len(owed)
        for part in self.parts.values():
            part.told = part.taken

    def arrived(self, frame: Any, key: Any, payload: Any, context: bytes, lender: End) -> None:
        """What came with this frame is what `key` was given, whichever way it travelled."""
        assert context == key.context
        self.parts.pop(frame.transfer, None)
        if frame.HasField("loan"):
            assert isinstance(payload, Borrowed)
            assert payload[:2] == (frame.loan.number, frame.loan.descriptor)
            self.reads.append(Reading(payload, key.payload, lender))
        else:
            assert plain(payload) == plain(key.payload)

    def dropped(self, frame: Any) -> None:
        """Nobody wants what came with this frame."""
        self.parts.pop(frame.transfer, None)
        if frame.HasField("loan"):
            self.returns.append(frame.loan.number)

    # -- all of it ----------------------------------------------------------------------------------------------------

    def end(self) -> None:
        """The stream is gone."""
        self.over, self.shares = True, False
        self.released += self.lent.values()
        for written in self.writing:
            written.key = None
        self.late += self.writing
        for one in (self.first, self.queue, self.early, self.bulk, self.parked, self.waiting, self.writing):
            one.clear()
        for other in (self.lent, self.ways, self.lines, self.parts):
            other.clear()
        self.returns, self.cancels, self.held = [], [], []

    @property
    def quiet(self) -> bool:
        return self.over and not (self.late or self.released or self.reads)

    def check(self) -> None:
        loans = self.session.bulk.loans
        assert len(loans) == len(self.waiting) + len(self.writing)
        assert sorted(loans.released) == sorted(self.released)
        assert len(self.lent) + len(self.writing) <= bulk.LOANS
        assert self.session.bulk.transfers._arriving.keys() == self.parts.keys(), "nothing is kept of what was given up"
        assert self.session.bulk.has_notices is self.owes
        assert self.session.bulk.has_work is bool(self.owes or self.bulk or len(loans) or self.released)
        if not self.over:
            assert self.session.bulk.shares is self.shares
        for long in self.parked:
            assert bulk.WINDOW <= long.ahead < bulk.WINDOW + bulk.INLINE


class Pair:
    """One stream, both ends of it, and what both should know."""

    def __init__(self, epoch: int, manner: Manner, worker_reads: bool = False, client_reads: bool = False) -> None:
        self.manner = manner
        self.worker_reads = worker_reads  # memory of the client
        self.client_reads = client_reads
        self.client = ClientSession(epoch, "client", "1.0")
        self.worker = WorkerSession(f"w{epoch}", "1.0", form_of)
        hello = self.client.hello()
        if manner == "refusing":
            hello.hello.oldest = hello.hello.newest = 99
        self.to_worker = deque([hello.SerializeToString()])
        self.to_client: deque[bytes] = deque()
        # the client's end
        self.out = End(self.client)
        self.welcomed = False
        self.client_stopping = False
        self.says_shares = False
        self.sent: dict[int, Work] = {}
        self.numbered: dict[int, Work] = {}  # all that were ever sent here
        self.asked: dict[int, list[Ask]] = {}  # steps in transit
        self.got: dict[int, list[Frame]] = {}
        self.notices: list[int | None] = []  # transfers that were given up, and the worker has not been told
        self.peers: Peers | None = None
        self.known: dict[int, FunctionForm] = {}  # the longest unused first
        self.defined: set[int] = set()
        # the worker's end
        self.back = End(self.worker)
        self.greeted = False
        self.reply_due = False
        self.stopping = False
        self.open: dict[int, Work] = {}
        self.made: dict[int, list[Frame]] = {}
        self.answered: dict[int, list[Frame]] = {}  # what was said of a call, in transit
        self.taken: dict[int, int] = {}  # steps of a generator other than "next"
        self.refused: dict[int, tuple[str, bytes]] = {}
        self.refusals: list[int] = []
        self.started: list[int] = []
        self.told_start: set[int] = set()
        self.pulse: tuple[int, int, str] | None = None
        self.last_peers: Peers | None = None

    @property
    def takes_calls(self) -> bool:
        return not self.out.over and not self.client_stopping

    @property
    def quiet(self) -> bool:
        """Is it over on both sides, with nothing in transit?"""
        return self.out.quiet and self.back.quiet and not self.to_worker and not self.to_client

    def side(self, name: SideName) -> End:
        return self.out if name == "client" else self.back


class World:
    """All streams there are, and all calls there ever were."""

    def __init__(self) -> None:
        self.pairs: list[Pair] = []
        self.works: list[Work] = []  # that have not ended
        self.ended: list[Work] = []
        self.homeless: list[Work] = []  # on no stream: unsent when theirs broke, or to be tried again
        self.memory: dict[int, bytes] = {}  # what is lent, by descriptor
        self._epoch = 0
        self._tasks = 0
        self._contexts = 0
        self._descriptor = 100

    # -- the client ---------------------------------------------------------------------------------------------------

    def connect(self, manner: Manner = "fine", worker_reads: bool = False, client_reads: bool = False) -> Pair:
        self._epoch += 1
        pair = Pair(self._epoch, manner, worker_reads, client_reads)
        self.pairs.append(pair)
        return pair

    def _context(self, size: int) -> bytes:
        """One that is like no other."""
        self._contexts += 1
        return noise(("context", self._contexts), size)

    def make(self, form: FunctionForm, shape: Shape, retries: int = 0, moves: int = 0, context: int = 0) -> Work:
        self._tasks += 1
        work = Work(self._tasks, form, packed(self._tasks, shape), retries, moves, self._context(context))
        self.works.append(work)
        self.homeless.append(work)
        return work

    def place(self, work: Work, pair: Pair) -> None:
        self.homeless.remove(work)
        work.pair, work.call = pair, work.attempt()
        pair.client.submit(work.call)
        if pair.welcomed or isinstance(work.payload, bytes):
            pair.out.add(work)
        else:
            pair.out.early.append(work)

    def step(self, work: Work, advance: Advance, shape: Shape, times: int, context: int = 0) -> None:
        """Have a generator go on, if it is there."""
        pair, call = work.pair, work.call
        if pair is None or call is None or pair.out.stepping(call.number):
            return  # one long step at a time
        payload: Packed = packed((work.task, advance, times), shape) if advance in ("send", "throw") else b""
        ask = Ask(call.number, advance, times, payload, self._context(context))
        pair.client.step(call, advance, payload, times, context=ask.context)
        if call.number in pair.sent:
            pair.out.add(ask)

    def cancel(self, work: Work) -> None:
        if work.pair is None:
            self.homeless.remove(work)
            self._end(work, "gone")
            return
        pair, call = work.pair, work.call
        assert call is not None
        notices = pair.out.remove(work)
        assert pair.client.cancel(call) is (notices is not None)
        if notices is None:
            pair.out.cancel(call.number)
        else:
            pair.notices += notices
            self._end(work, "gone")

    def abandon(self, work: Work) -> None:
        """As a shell gives up: cancel it, and wait no more."""
        pair, call = work.pair, work.call
        self.cancel(work)
        if pair is not None and call is not None:
            pair.client.abandon(call)
            if pair.sent.pop(call.number, None) is not None:
                self._end(work, "abandoned")

    def introduce(self, pair: Pair, peers: Peers) -> None:
        pair.client.introduce(*peers)
        pair.peers = peers

    def client_takes(self, pair: Pair) -> bool:
        """Hand the client's next message to the transport. Was there one?"""
        message = pair.client.take()
        may_speak = pair.welcomed and not pair.out.over
        if message is None:
            assert not may_speak or not self._has_news(pair)
            return False
        assert may_speak, "nothing is sent before the welcome, nor after the end"
        assert self._has_news(pair)
        pair.to_worker.append(message.SerializeToString())
        assert pair.to_worker[-1], "an empty message says nothing"
        assert message.shares is pair.says_shares
        pair.says_shares = False
        pair.out.settle(message)
        peers, pair.peers = pair.peers, None
        assert message.HasField("peers") is (peers is not None)
        assert peers_of(message) == (peers or ("", [], 0))
        later = [id(step) for step in [*pair.out.first][len(message.steps) :]]
        assert list(message.cancels) == [number for number, step in pair.out.cancels if id(step) not in later]
        pair.out.cancels = [(number, step) for number, step in pair.out.cancels if id(step) in later]
        abandoned = {chunk.transfer for chunk in message.chunks if chunk.abandoned}
        assert abandoned >= {transfer for transfer in pair.notices if transfer is not None}
        on_the_way = {long.transfer for long in [*pair.out.bulk, *pair.out.parked]}
        on_the_way |= {number for how, number, _ in pair.out.ways.values() if how == "transfer"}
        assert not abandoned & (on_the_way - {*pair.notices})
        pair.notices = []
        self._calls_leave(pair, message)
        return True

    def _calls_leave(self, pair: Pair, message: ToWorker) -> None:
        for definition in message.definitions:
            form, number = form_of(definition), definition.function
            assert number not in pair.defined, "no number means two functions"
            assert form not in pair.known.values(), "it travels once"
            pair.known[number] = form
            pair.defined.add(number)
        fresh = {definition.function for definition in message.definitions}
        assert fresh <= {frame.function for frame in message.calls}, "defined when it is needed"
        works: list[Work] = []
        defined: dict[Work, int] = {}
        waiting = {work.task: work for work in pair.out.queue}
        for frame in message.calls:
            work = waiting[frame.task]
            assert work.call is not None
            assert frame.number > max(pair.numbered, default=0), "numbers rise"
            assert frame.number == work.call.number
            assert pair.known[frame.function] == work.form
            if work.form.value:
                pair.known[frame.function] = pair.known.pop(frame.function)  # used last
            pair.out.said(work, frame, frame.arguments)
            pair.sent[frame.number] = pair.numbered[frame.number] = work
            works.append(work)
            if frame.function in fresh:
                fresh.remove(frame.function)
                defined[work] = len(work.form.value)
        left = pair.out.leave(len(message.steps), len(message.calls), message.chunks, defined)
        asks, left = left[: len(message.steps)], left[len(message.steps) :]
        assert left == works, "first come, first served"
        for ask, step in zip(asks, message.steps, strict=True):
            assert (step.number, step.kind, step.count) == (
                ask.number,
                client_session.ADVANCE_TO_STEP[ask.advance],
                ask.times,
            )
            pair.out.said(ask, step, step.payload)
            pair.asked.setdefault(ask.number, []).append(ask)
        by_value = [number for number, form in pair.known.items() if form.value]
        forgotten = []
        while len(by_value) > 1 and sum(len(pair.known[number].value) for number in by_value) > client_session.KEPT:
            forgotten.append(by_value.pop(0))
        assert list(message.forgotten) == forgotten
        for number in forgotten:
            del pair.known[number]

    def _urgent(self, pair: Pair) -> bool:
        out = pair.out
        return bool(out.bulk or out.owes or out.cancels or pair.notices or pair.peers is not None or pair.says_shares)

    def _has_news(self, pair: Pair) -> bool:
        return bool(pair.out.queue or pair.out.first or self._urgent(pair))

    def client_hears(self, pair: Pair) -> None:
        """The next message from the worker arrives."""
        message = ToClient.FromString(pair.to_client.popleft())
        client, end = pair.client, pair.out
        if end.over:
            assert client.receive(message) == [], "an answer after the break finds nobody"
            return
        if not pair.welcomed:
            pair.welcomed = True
            reason = client.welcomed(message)
            if pair.manner == "refusing":
                assert reason
                assert client.state == "over"
                self.client_breaks(pair)
                return
            assert reason is None
            assert client.uid == message.welcome.uid
            pair.client_stopping = message.stopping
            end.shares = pair.worker_reads
            early, end.early = end.early, []
            for work in early:
                end.depart(work)
            if pair.client_reads:
                client.can_read()
                pair.says_shares = True
            return
        end.hear(message)
        expected: list[tuple[Work | None, Frame, Any]] = []
        for frame in (*message.yields, *message.results):
            said = pair.answered[frame.number].pop(0)
            final = said.kind != "yielded"
            expected.append(((pair.sent.pop if final else pair.sent.get)(frame.number, None), said, frame))
        refused = [(pair.sent.pop(frame.number, None), frame.number) for frame in message.refusals]
        answers = client.receive(message)
        pair.client_stopping |= message.stopping
        for number in message.started:
            if number in pair.sent:
                pair.told_start.add(number)
        if message.HasField("pulse"):
            assert client.pulse == message.pulse
        left = deque(answers)
        for work, said, frame in expected:
            if work is None:
                end.dropped(frame)
                continue
            answer = left.popleft()
            assert answer.call is work.call
            assert (answer.kind, answer.swallowed, answer.steps) == (said.kind, said.swallowed, said.steps)
            assert list(answer.lessons) == list(said.lessons)
            end.arrived(frame, said, answer.payload, answer.context, pair.back)
            pair.got.setdefault(frame.number, []).append(said)
            got, made = pair.got[frame.number], pair.made[frame.number]
            assert got == made[: len(got)], "in the order in which they were made"
            assert said.kind == "yielded" or got == made, "all of them before the end"
            if said.kind != "yielded":
                self._settle(work, answer)
        for work, number in refused:
            if work is not None:
                answer = left.popleft()
                assert answer[1:] == (*pair.refused[number], False, 0, b"", ()), (
                    "it never began: nothing is to come back"
                )
                self._settle(work, answer)
        assert not left

    def client_breaks(self, pair: Pair) -> None:
        """The client notices that the stream is gone."""
        works = pair.out.works()
        unsent = [(work.call, "unsent") for work in works]
        lost = [(work.call, "lost") for work in pair.sent.values()]
        work_of = {work.call: work for work in [*works, *pair.sent.values()]}
        pair.out.end()
        pair.sent = {}
        pair.notices, pair.peers, pair.says_shares = [], None, False
        answers = pair.client.broken()
        assert sorted((id(answer.call), answer.kind) for answer in answers) == sorted(
            (id(call), kind) for call, kind in [*unsent, *lost]
        )
        assert not retained(pair.client)
        for answer in answers:
            assert answer[2:] == Answer(answer.call, answer.kind)[2:], "nothing came with it"
            if answer.kind == "unsent":
                assert answer.call.number == 0
                assert answer.call.arguments is work_of[answer.call].payload, "it can be sent elsewhere as it is"
                assert answer.call.context == work_of[answer.call].context
            self._settle(work_of[answer.call], answer)
        assert pair.client.broken() == [], "nothing ends twice"

    def _settle(self, work: Work, answer: Answer) -> None:
        """One attempt has ended so."""
        assert work.call is answer.call, "the answer belongs to this very attempt"
        if answer.kind == "unsent":
            self._again(work)
        elif answer.kind in REFUSALS and work.moves:
            work.moves -= 1
            work.may_arrive += 1
            self._again(work)
        elif answer.kind == "lost" and work.retries:
            work.retries -= 1
            work.may_arrive += 1
            work.may_run += 1
            self._again(work)
        else:
            self._end(work, answer.kind)

    def _again(self, work: Work) -> None:
        work.pair = work.call = None
        self.homeless.append(work)

    def _end(self, work: Work, kind: str) -> None:
        work.pair = work.call = None
        work.outcomes.append(kind)

    # -- the worker ---------------------------------------------------------------------------------------------------

    def worker_hears(self, pair: Pair) -> None:
        """The next message from the client arrives."""
        message = ToWorker.FromString(pair.to_worker.popleft())
        worker, end = pair.worker, pair.back
        if end.over:
            assert worker.receive(message) == SILENCE
            return
        if not pair.greeted:
            pair.greeted = pair.reply_due = True
            welcome = pair.manner != "refusing"
            assert worker.greet(message, stopping=pair.manner == "stopping", shares=pair.worker_reads) is welcome
            pair.stopping = pair.manner == "stopping"
            if not welcome:
                end.end()
            return
        end.hear(message)
        begun, cancels, steps = worker.receive(message)
        end.shares |= message.shares
        assert [call.number for call in begun] == [frame.number for frame in message.calls]
        for call, frame in zip(begun, message.calls, strict=True):
            work = pair.numbered[frame.number]
            assert call.task == work.task
            assert call.function == work.form, "the worker knows the function it is to call"
            end.arrived(frame, work, call.arguments, call.context, pair.out)
            like = work.attempt()
            assert call[4:8] == (like.timeout, like.caller, like.tell_start, like.prefetch)
            assert (call.tenant, call.origin) == (like.tenant, like.origin)
            pair.open[frame.number] = work
            pair.made[frame.number] = []
            work.received += 1
        left = deque(steps)
        for frame in message.steps:
            ask = pair.asked[frame.number].pop(0)
            if frame.number not in pair.open:
                end.dropped(frame)
                continue
            step = left.popleft()
            assert step[:3] == (ask.number, ask.advance, ask.times)
            end.arrived(frame, ask, step.payload, step.context, pair.out)
            pair.taken[ask.number] = pair.taken.get(ask.number, 0) + (ask.advance != "next")
        assert not left
        assert cancels == [number for number in message.cancels if number in pair.open]
        if message.HasField("peers"):
            pair.last_peers = peers_of(message)

    def worker_yields(self, pair: Pair, number: int, shape: Shape, swallowed: bool, context: int = 0) -> None:
        """A generator has an item, or one that has ended is said to have one more."""
        nth = len(pair.made.get(number, ()))
        payload, steps = packed((number, nth), shape), pair.taken.get(number, 0)
        frame = Frame(number, "yielded", payload, swallowed, steps, self._context(context), lessons_of(number + nth))
        said = pair.worker.yielded(
            number, payload, swallowed=swallowed, steps=steps, context=frame.context, lessons=frame.lessons
        )
        assert said is (number in pair.open)
        if said:
            pair.made[number].append(frame)
            pair.back.add(frame)

    def worker_answers(
        self, pair: Pair, number: int, kind: str, shape: Shape, swallowed: bool, context: int = 0
    ) -> None:
        """A call ended, or is said to have ended once more."""
        if kind in REFUSALS and pair.made.get(number):
            kind = "raised"  # it has begun
        steps = pair.taken.get(number, 0) if kind in ENDS else 0
        payload: Packed = packed((number, kind), shape)
        frame = Frame(
            number, kind, payload, swallowed and kind in ENDS, steps, self._context(context), lessons_of(number)
        )
        if kind in REFUSALS:
            reason = noise((number, kind), shape if isinstance(shape, int) else shape[0]).hex().encode()
            frame.payload = payload = (
                BulkPayload(reason) if isinstance(payload, BulkPayload) else reason[: len(payload)]
            )
        work = pair.open.pop(number, None)
        said = pair.worker.answer(
            number,
            kind,  # type: ignore[arg-type]
            payload,
            swallowed=frame.swallowed,
            steps=steps,
            context=frame.context,
            lessons=frame.lessons,
        )
        assert said is (work is not None)
        if work is None:
            return
        if kind in REFUSALS:
            work.refused += 1
            pair.refused[number] = (kind, payload.pickle if isinstance(payload, BulkPayload) else payload)
            pair.refusals.append(number)
        else:
            pair.made[number].append(frame)
            pair.back.add(frame)

    def worker_starts(self, pair: Pair, number: int) -> None:
        pair.worker.started(number)
        if number in pair.open:
            pair.started.append(number)

    def worker_beats(self, pair: Pair, age: float, number: int) -> None:
        pair.worker.beat(age, number, "tag")
        if pair.greeted and not pair.back.over:
            pair.pulse = (int(age * 1000), number, "tag")

    def worker_stops(self, pair: Pair) -> None:
        pair.worker.stopping()
        if pair.greeted and not pair.back.over:
            pair.stopping = True

    def worker_takes(self, pair: Pair) -> bool:
        """Hand the worker's next message to the transport. Was there one?"""
        back = pair.back
        small = pair.reply_due or pair.started or pair.refusals or pair.pulse or pair.stopping
        has_news = bool(small or back.queue or back.bulk or back.owes)
        assert pair.worker.has_more is (has_news or bool(back.lines)), "something to take, or on its way to be"
        message = pair.worker.take()
        assert (message is not None) is has_news
        if message is None:
            return False
        pair.to_client.append(message.SerializeToString())
        assert message.HasField("welcome") is (pair.reply_due and pair.manner != "refusing")
        assert message.HasField("refused") is (pair.reply_due and pair.manner == "refusing")
        assert message.welcome.shares is (pair.worker_reads and message.HasField("welcome"))
        assert list(message.started) == pair.started
        assert [frame.number for frame in message.refusals] == pair.refusals
        assert message.HasField("pulse") is (pair.pulse is not None)
        if pair.pulse is not None:
            assert (message.pulse.tick_age, message.pulse.number, message.pulse.tag) == pair.pulse
        assert message.stopping is pair.stopping
        pair.started, pair.refusals, pair.pulse, pair.reply_due, pair.stopping = [], [], None, False, False
        back.settle(message)
        assert not any(chunk.abandoned for chunk in message.chunks)
        left = back.leave(0, len(message.yields) + len(message.results), message.chunks)
        items = [said for said in left if said.kind == "yielded"]
        for said, item in zip(items, message.yields, strict=True):
            assert (item.number, item.swallowed, item.steps) == (said.number, said.swallowed, said.steps)
        ends = [said for said in left if said.kind != "yielded"]
        for said, result in zip(ends, message.results, strict=True):
            assert (result.number, result.swallowed, result.steps) == (said.number, said.swallowed, said.steps)
            assert KIND_OF_RESULT[result.kind] == said.kind
        for said, frame in zip([*items, *ends], [*message.yields, *message.results], strict=True):
            back.said(said, frame, frame.payload)
            pair.answered.setdefault(said.number, []).append(said)
        return True

    def worker_breaks(self, pair: Pair) -> None:
        """The worker notices that the stream is gone."""
        assert pair.worker.broken() == list(pair.open), "what it has runs for nobody"
        assert pair.worker.broken() == []
        pair.back.end()
        pair.open = {}
        pair.started, pair.refusals, pair.pulse, pair.reply_due, pair.stopping = [], [], None, False, False
        assert not retained(pair.worker)

    # -- memory, at either end ----------------------------------------------------------------------------------------

    def lend(self, pair: Pair, side: SideName) -> bool:
        """Begin to write the next payload that is to be lent. Was there one that may be?"""
        end = pair.side(side)
        may = bool(end.waiting) and len(end.lent) + len(end.writing) < bulk.LOANS
        lending = end.session.bulk.loans.begin()
        assert (lending is not None) is may
        if lending is not None:
            end.writing.append(Written(lending, end.waiting.pop(0)))
            assert lending.bulk is end.writing[-1].key.payload, "first come, first served"
        return may

    def written(self, pair: Pair, side: SideName, nth: int, fails: bool = False) -> None:
        """One of them is in memory, or there was none."""
        end = pair.side(side)
        writing = [*end.writing, *end.late]
        one = writing[nth % len(writing)]
        (end.writing if one in end.writing else end.late).remove(one)
        if fails:
            end.session.bulk.not_lent(one.lending)
            if one.key is not None:
                end.bulk.append(Long(one.key))
            return
        self._descriptor += 1
        self.memory[self._descriptor] = b"".join(one.lending.bulk.segments())
        end.session.bulk.lend(one.lending, self._descriptor)
        if one.key is None:
            end.released.append(self._descriptor)
        else:
            end.loans += 1
            end.lent[end.loans] = self._descriptor
            end.ways[one.key] = ("loan", end.loans, self._descriptor)
            end.land(one.key)

    def close(self, pair: Pair, side: SideName) -> bool:
        """Let go of what came back. Was there anything?"""
        end = pair.side(side)
        released = list(end.session.bulk.loans.take_released())
        assert sorted(released) == sorted(end.released)
        end.released = []
        for descriptor in released:
            del self.memory[descriptor]  # KeyError: it was closed before
        return bool(released)

    def read(self, pair: Pair, side: SideName, nth: int) -> None:
        """Read something that was lent to this end."""
        end = pair.side(side)
        borrowed, payload, lender = end.reads.pop(nth % len(end.reads))
        data = self.memory.get(borrowed.descriptor)
        if data is None:
            assert lender.over, "it is there until it was read"
        else:
            assert cut(data, borrowed) == plain(payload)
        end.session.bulk.has_read(borrowed)
        if not end.over:
            end.returns.append(borrowed.number)

    def shell(self, pair: Pair, side: SideName) -> bool:
        """All of that, as a shell does it. Was there anything to do?"""
        end, moved = pair.side(side), False
        while self.lend(pair, side) or end.writing or end.late:
            self.written(pair, side, 0)
            moved = True
        while end.reads:
            self.read(pair, side, 0)
            moved = True
        return self.close(pair, side) or moved

    # -- everything ---------------------------------------------------------------------------------------------------

    def lose(self, pair: Pair, to_worker: int, to_client: int) -> None:
        """Of what is in transit on a broken stream only the first so many arrive, late."""
        for transit, kept in ((pair.to_worker, to_worker), (pair.to_client, to_client)):
            while len(transit) > kept:
                transit.pop()

    def tidy(self) -> None:
        self.pairs = [pair for pair in self.pairs if not pair.quiet]

    def check(self) -> None:
        for pair in self.pairs:
            self._check_client(pair)
            self._check_worker(pair)
        placed = [work for pair in self.pairs for work in [*pair.out.works(), *pair.sent.values()]]
        assert len(placed) == len({*placed}), "one stream at a time"
        where = {*placed}
        for work in self.works:
            places = [work in where, work in self.homeless, bool(work.outcomes)]
            assert places.count(True) == 1, f"{work} is in exactly one place"
            assert len(work.outcomes) <= 1
            assert work.received <= work.may_arrive, f"{work} was sent twice"
            assert work.received - work.refused <= work.may_run, f"{work} may have run twice"
            if work.outcomes and work.outcomes[0] in ENDS:
                assert work.received - work.refused > 0, "nobody answers for a worker"
            if work.outcomes and work.outcomes[0] == "gone":
                assert work.received < work.may_arrive, "this attempt never left"
        self.ended += [work for work in self.works if work.outcomes]
        self.works = [work for work in self.works if not work.outcomes]
        ends = [end for pair in self.pairs for end in (pair.out, pair.back)]
        held = [one for end in ends for one in (*end.lent.values(), *end.released)]
        assert sorted(held) == sorted(self.memory), "each descriptor is lent, or to be closed, or closed"

    def _check_client(self, pair: Pair) -> None:
        client, out = pair.client, pair.out
        out.check()
        unsent = out.works()
        waiting = sum(client_session.FRAME + len(work.payload) for work in unsent if isinstance(work.payload, bytes))
        waiting += sum(client_session.FRAME for work in unsent if isinstance(work.payload, BulkPayload))
        apart = sum(len(work.payload) for work in unsent if isinstance(work.payload, BulkPayload))
        assert (client.outbox, client.apart) == (waiting, apart)
        assert client.full(False) is (waiting >= client_session.OUTBOX)
        assert client.full(True) is (apart >= client_session.OUTBOX)
        assert client.waiting == len(unsent) + len(pair.sent)
        assert client.sent == {number: work.call for number, work in pair.sent.items()}
        crowded = len(out.queue) + len(out.first) >= client_session.CROWD or waiting >= client_session.INLINE
        if not out.over:
            assert client.can_wait is not bool(self._urgent(pair) or crowded)
        for work in unsent:
            assert work.call is not None
            assert work.call.number == 0
            assert work.call.arguments is work.payload
            assert work.call.context == work.context, "each attempt takes it along"
        for number, work in pair.sent.items():
            assert work.call is not None
            assert work.call.started is (number in pair.told_start)
            assert work.call.arguments == b"", "nobody needs them any more"
            assert work.call.lending is None
        by_value = [len(form.value) for form in pair.known.values() if form.value]
        assert sum(by_value) <= client_session.KEPT or len(by_value) == 1
        if out.over:
            assert client.state == "over"
        elif pair.client_stopping:
            assert client.state == "stopping"
        else:
            assert client.state == ("open" if pair.welcomed else "opening")

    def _check_worker(self, pair: Pair) -> None:
        worker = pair.worker
        pair.back.check()
        assert list(worker.open) == list(pair.open)
        assert worker.peers == pair.last_peers
        assert worker.state == ("over" if pair.back.over else "open" if pair.greeted else "opening")
        held = [len(form.value) for form in worker._functions.values() if form.value]
        assert sum(held) <= client_session.KEPT or len(held) == 1, "it keeps no more than was agreed"

    def finish(self, choose: Callable[[Sequence[Any]], Any]) -> None:
        """Let everything end by itself. What is left then was stuck."""
        for pair in list(self.pairs):
            if pair.out.over is not pair.back.over and pair.manner != "refusing":
                (self.worker_breaks if pair.out.over else self.client_breaks)(pair)
            elif pair.back.over and not (pair.out.over or pair.reply_due or pair.to_client):
                self.client_breaks(pair)  # the refusal was lost on the way
        payloads = [key.payload for pair in self.pairs for frames in pair.made.values() for key in frames]
        payloads += [work.payload for work in self.works]
        longest = sum(map(len, payloads)) + 200 * len(self.works) + 100 * len(payloads)
        for _ in range(200 + 10 * longest):
            while self.homeless:
                pair = next((pair for pair in self.pairs if pair.takes_calls), None) or self.connect()
                self.place(self.homeless[0], pair)
            moved = False
            for pair in list(self.pairs):
                moved |= self.shell(pair, "client")
                moved |= self.client_takes(pair)
                while pair.to_worker:
                    self.worker_hears(pair)
                    moved = True
                for number in list(pair.open):
                    kind, context = choose((*ENDS, *REFUSALS)), choose((0, 5))
                    self.worker_answers(pair, number, kind, 3 * bulk.INLINE, False, context)
                moved |= self.shell(pair, "worker")
                moved |= self.worker_takes(pair)
                while pair.to_client:
                    self.client_hears(pair)
                    moved = True
            if not moved and not self.homeless:
                break
        self.check()
        for work in (*self.works, *self.ended):
            assert len(work.outcomes) == 1, f"{work} never ended"
        assert self.memory == {}, "all that was lent came back"
        for pair in self.pairs:
            assert not pair.client.waiting
            assert not pair.out.parts, "nothing is kept of what was given up"
            assert not pair.back.parts, "nothing is kept of what was given up"
