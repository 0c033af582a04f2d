"""The conversation of a client with a worker, both ends. Pure: messages in, messages and answers out.

A call is *unsent* (it stands in the client's outbox), *sent* (a message that holds it was taken to be handed to the
transport) or *answered*. That order is the whole promise of at most once: when the stream breaks, unsent calls may go
elsewhere, because no transport ever had them; sent ones are lost, because the worker may have begun them; and an answer
that comes after the break finds nobody. A new stream is a new session, so nothing of an old one can be mistaken for it.

Two lanes. Small frames go first, all that is ready, up to `MESSAGE` bytes. Arguments and results longer than `INLINE`
bytes travel as a *transfer*, in chunks, one with each message, taking turns with other transfers: beside a long
argument a small call waits for one chunk, not for all of them, and however many small ones there are, the long one
moves. The frame that needs a transfer follows its last chunk, so a call whose chunks are on the way is unsent still.

Functions are defined once in a session, and named by number from then on. What is defined by value is kept by the
worker until the client says that it may forget it (`KEPT` bytes, the longest unused goes first).
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator
from typing import Any, Generic, Literal, NamedTuple, TypeVar

from headgate.errors import RpcError
from headgate.workers.model import FunctionForm
from headgate.workers.wire.wire_pb2 import Call, Hello, Pulse, Refusal, Result, ToClient, ToWorker, Welcome

OLDEST, NEWEST = 1, 1
"""The protocols this release speaks."""

MESSAGE = 512 * 1024
INLINE = 256 * 1024
"""Also the length of a chunk."""
OUTBOX = 8 * 1024 * 1024
"""With so much waiting to be sent, a client should ask another worker."""
KEPT = 64 * 1024 * 1024
CROWD = 256
"""So many small calls fill a message well enough."""
PULSE = 0.5
"""Seconds between two signs of life of a worker that has calls."""
HELD = 1.0
"""Seconds without a turn after which a task loop counts as held."""

Kind = Literal[
    "returned", "raised", "cancelled", "stopped", "unavailable", "exhausted", "not_started", "lost", "unsent"
]
"""How a call ended. The first four ran; of "lost" nobody knows; the others never began."""

_RESULTS: dict[int, Kind] = {
    Result.RETURNED: "returned",
    Result.RAISED: "raised",
    Result.CANCELLED: "cancelled",
    Result.STOPPED: "stopped",
}
_REFUSALS: dict[int, Kind] = {
    Refusal.UNAVAILABLE: "unavailable",
    Refusal.RESOURCE_EXHAUSTED: "exhausted",
    Refusal.NOT_STARTED: "not_started",
}
_WHYS = {kind: why for why, kind in _REFUSALS.items()}
_KINDS = {kind: number for number, kind in _RESULTS.items()}
_FRAME = 24  # about what a small frame takes besides its payload


class ConversationBroken(RpcError):
    """The other side said what it may not say."""


class Outgoing:
    """A call, as the client's end of a session keeps it."""

    __slots__ = ("arguments", "caller", "form", "number", "started", "task", "tell_start", "timeout", "waiter")

    def __init__(
        self,
        task: int,
        form: FunctionForm,
        arguments: bytes,
        timeout: float = 0.0,
        caller: str = "",
        tell_start: bool = False,
        waiter: Any = None,
    ) -> None:
        self.task: int = task
        """The number of the task in this process."""
        self.number: int = 0
        """Its number in the session; 0 while it is unsent."""
        self.form: FunctionForm = form
        self.arguments: bytes = arguments
        self.timeout: float = timeout
        self.caller: str = caller
        self.tell_start: bool = tell_start
        self.started: bool = False
        """Did the worker say so? Only calls with `tell_start` are told."""
        self.waiter: Any = waiter
        """Whom the shell has to tell; opaque here."""


class Answer(NamedTuple):
    """The one outcome of a call in a session."""

    call: Outgoing
    kind: Kind
    payload: bytes = b""
    """A pickle if it returned or raised; a reason, as text, if it was refused."""
    swallowed: bool = False
    """It was cancelled and ended otherwise all the same."""


class Begun(NamedTuple):
    """A call for the worker to run."""

    number: int
    task: int
    function: Any
    arguments: bytes
    timeout: float
    caller: str
    tell_start: bool


FrameT = TypeVar("FrameT")


class Transfers(Generic[FrameT]):
    """What travels in chunks: the ones going out, taking turns, and the ones coming in."""

    __slots__ = ("_arriving", "_last", "_leaving")

    def __init__(self) -> None:
        self._leaving: deque[tuple[int, memoryview, FrameT]] = deque()
        self._arriving: dict[int, list[bytes]] = {}
        self._last = 0

    def __len__(self) -> int:
        return len(self._leaving)

    def __iter__(self) -> Iterator[FrameT]:
        return (frame for _, _, frame in self._leaving)

    def begin(self, payload: bytes, frame: FrameT) -> int:
        """Send `payload` in chunks; `frame` is what follows them."""
        self._last += 1
        self._leaving.append((self._last, memoryview(payload), frame))
        return self._last

    def next(self, message: ToWorker | ToClient) -> FrameT | None:
        """Put one chunk into `message`; returns the frame that may follow, if that was the last of its payload."""
        transfer, rest, frame = self._leaving.popleft()
        message.chunks.add(transfer=transfer, data=bytes(rest[:INLINE]))
        if len(rest) <= INLINE:
            return frame
        self._leaving.append((transfer, rest[INLINE:], frame))
        return None

    def stop(self, frame: FrameT) -> None:
        """Send no more of what this frame needs."""
        for entry in self._leaving:
            if entry[2] is frame:
                self._leaving.remove(entry)
                return

    def receive(self, message: ToWorker | ToClient) -> None:
        """Keep the chunks of `message`."""
        for chunk in message.chunks:
            if chunk.abandoned:
                self._arriving.pop(chunk.transfer, None)
            else:
                self._arriving.setdefault(chunk.transfer, []).append(chunk.data)

    def payload(self, transfer: int) -> bytes:
        """All of what came by this transfer."""
        try:
            return b"".join(self._arriving.pop(transfer))
        except KeyError:
            raise ConversationBroken(f"a frame names the transfer {transfer}, of which nothing came") from None


class ClientSession:
    """The client's end."""

    def __init__(self, epoch: int, client: str, version: str) -> None:
        self.epoch: int = epoch
        self.state: Literal["opening", "open", "stopping", "over"] = "opening"
        self.uid: str = ""
        self.pulse: Pulse | None = None
        """The last sign of life of the worker's task loop."""
        self.outbox: int = 0
        """Bytes that wait to be sent."""
        self.sent: dict[int, Outgoing] = {}
        self._client = client
        self._version = version
        self._ready: dict[Outgoing, int] = {}  # unsent, and to be sent next; with their transfer
        self._bulky: dict[Outgoing, int] = {}  # unsent, and their arguments are on the way
        self._transfers: Transfers[Outgoing] = Transfers()
        self._last_number = 0
        self._cancels: list[int] = []
        self._abandoned: list[int] = []
        self._peers: tuple[str, list[tuple[str, str]]] | None = None
        self._functions: OrderedDict[FunctionForm, int] = OrderedDict()
        self._kept = 0
        self._last_function = 0

    # -- calls --------------------------------------------------------------------------------------------------------

    @property
    def full(self) -> bool:
        """Should the next call go elsewhere?"""
        return self.outbox >= OUTBOX

    @property
    def can_wait(self) -> bool:
        """Is there nothing to send but a few small calls, which may wait for others to share a message with?"""
        urgent = self._transfers or self._cancels or self._abandoned or self._peers is not None
        return not urgent and len(self._ready) < CROWD and self.outbox < INLINE

    @property
    def waiting(self) -> int:
        """Calls that are not answered."""
        return len(self._ready) + len(self._bulky) + len(self.sent)

    def submit(self, call: Outgoing) -> None:
        """It is in the outbox now."""
        assert self.state in ("open", "opening"), "nobody calls on a session that is over"
        size = len(call.arguments)
        self.outbox += size + _FRAME
        if size > INLINE:
            self._bulky[call] = self._transfers.begin(call.arguments, call)
        else:
            self._ready[call] = 0

    def cancel(self, call: Outgoing) -> bool:
        """The caller was cancelled. True: it was unsent, and is gone. False: the worker will be told, and answer."""
        transfer = self._ready.pop(call, None)
        if transfer is None:
            transfer = self._bulky.pop(call, None)
        if transfer is not None:
            self.outbox -= len(call.arguments) + _FRAME
            if transfer:
                self._transfers.stop(call)
                self._abandoned.append(transfer)
            return True
        if self.sent.get(call.number) is call:
            self._cancels.append(call.number)
        return False

    def abandon(self, call: Outgoing) -> None:
        """Nobody waits for its answer any more: it is dropped when it comes."""
        if self.sent.get(call.number) is call:
            del self.sent[call.number]

    def introduce(self, pool: str, peers: list[tuple[str, str]]) -> None:
        """Tell the worker whom its routines may call: the pool, uids and addresses."""
        self._peers = pool, peers

    # -- the stream ---------------------------------------------------------------------------------------------------

    def hello(self) -> ToWorker:
        """The first message."""
        return ToWorker(
            hello=Hello(oldest=OLDEST, newest=NEWEST, epoch=self.epoch, client=self._client, version=self._version)
        )

    def welcomed(self, message: ToClient) -> str | None:
        """Read the answer to it: None if they may talk, else why not."""
        if message.HasField("refused"):
            self.state = "over"
            return message.refused.reason or "the worker gave no reason"
        if not message.HasField("welcome") or not OLDEST <= message.welcome.protocol <= NEWEST:
            self.state = "over"
            return (
                f"the worker speaks protocol {message.welcome.protocol or 'unknown'} and this client "
                f"{OLDEST} to {NEWEST}"
            )
        self.uid = message.welcome.uid
        self.state = "stopping" if message.stopping else "open"
        return None

    def take(self) -> ToWorker | None:
        """The next message, to be handed to the transport now: the calls in it are sent. None: there is nothing."""
        if self.state in ("opening", "over"):
            return None
        ready = self._ready
        if not (ready or self._transfers or self._cancels or self._abandoned or self._peers is not None):
            return None
        message, size = ToWorker(), 0
        if self._peers is not None:
            message.peers.pool, peers = self._peers
            for uid, address in peers:
                message.peers.workers.add(uid=uid, address=address)
            message.peers.SetInParent()
            self._peers = None
        if self._abandoned:
            for transfer in self._abandoned:
                message.chunks.add(transfer=transfer, abandoned=True)
            self._abandoned.clear()
        if self._cancels:
            message.cancels.extend(self._cancels)
            self._cancels.clear()
        while ready and size < MESSAGE:
            call = next(iter(ready))
            size += self._write(message, call, ready.pop(call))
        if self._transfers:
            last = self._transfers.next(message)
            if last is not None:
                ready[last] = self._bulky.pop(last)
        if self._kept > KEPT:
            self._forget(message)
        return message

    def receive(self, message: ToClient) -> list[Answer]:
        """What came: the answers to calls somebody waits for."""
        if self.state in ("opening", "over"):
            return []
        if message.chunks:
            self._transfers.receive(message)
        if message.HasField("pulse"):
            self.pulse = message.pulse
        if message.stopping:
            self.state = "stopping"
        # Before anything is taken out: a message that breaks the conversation must leave every call to `broken`.
        payloads = [self._transfers.payload(one.transfer) if one.transfer else one.payload for one in message.results]
        sent = self.sent
        for number in message.started:
            if number in sent:
                sent[number].started = True
        answers = []
        for result, payload in zip(message.results, payloads, strict=True):
            call = sent.pop(result.number, None)
            if call is not None:
                answers.append(Answer(call, _RESULTS.get(result.kind, "lost"), payload, result.swallowed))
        for refusal in message.refusals:
            call = sent.pop(refusal.number, None)
            if call is not None:
                answers.append(Answer(call, _REFUSALS.get(refusal.why, "not_started"), refusal.reason.encode()))
        return answers

    def broken(self) -> list[Answer]:
        """The stream is gone: every call has its answer now, and none will come later."""
        self.state = "over"
        unsent = [Answer(call, "unsent") for call in (*self._ready, *self._bulky)]
        lost = [Answer(call, "lost") for call in self.sent.values()]
        self._ready, self._bulky, self.sent = {}, {}, {}
        self._transfers = Transfers()
        self.outbox = 0
        return [*unsent, *lost]

    def _write(self, message: ToWorker, call: Outgoing, transfer: int) -> int:
        form = call.form
        function = self._functions.get(form)
        defined = 0
        if function is None:
            function = self._define(message, form)
            defined = len(form.value)
        elif form.value:
            self._functions.move_to_end(form)
        self._last_number = call.number = number = self._last_number + 1
        self.sent[number] = call
        frame = message.calls.add(number=number, task=call.task, function=function)
        size = len(call.arguments)
        if transfer:
            frame.transfer = transfer
        else:
            frame.arguments = call.arguments
        if call.timeout:
            frame.timeout = call.timeout
        if call.caller:
            frame.caller = call.caller
        if call.tell_start:
            frame.tell_start = True
        self.outbox -= size + _FRAME
        call.arguments = b""
        return defined + _FRAME + (0 if transfer else size)

    def _define(self, message: ToWorker, form: FunctionForm) -> int:
        self._last_function += 1
        self._functions[form] = self._last_function
        self._kept += len(form.value)
        message.definitions.add(
            function=self._last_function,
            tag=form.tag,
            module=form.module,
            qualname=form.qualname,
            digest=form.digest,
            python=form.python,
            value=form.value,
            fresh=form.fresh,
            thread=form.thread,
            file=form.file,
        )
        return self._last_function

    def _forget(self, message: ToWorker) -> None:
        for form in [form for form in self._functions if form.value][:-1]:
            if self._kept <= KEPT:
                return
            message.forgotten.append(self._functions.pop(form))
            self._kept -= len(form.value)


class WorkerSession:
    """The worker's end. What a definition becomes is the shell's business: `define` makes it."""

    def __init__(self, uid: str, version: str, define: Any) -> None:
        self.client: str = ""
        self.state: Literal["opening", "open", "over"] = "opening"
        self.open: dict[int, Begun] = {}
        """Calls that were received and not answered."""
        self.peers: tuple[str, list[tuple[str, str]]] | None = None
        """Whom routines may call, as the client last said: the pool, uids and addresses."""
        self._uid = uid
        self._version = version
        self._define = define
        self._functions: dict[int, Any] = {}
        self._transfers: Transfers[Result] = Transfers()
        self._reply: ToClient | None = None
        self._outbox: deque[Result] = deque()
        self._highest = 0

    def greet(self, message: ToWorker, *, stopping: bool = False) -> bool:
        """Read the client's first message; the answer is to be taken. False: there will be no conversation."""
        reply = self._message()
        hello = message.hello
        if not message.HasField("hello") or not hello.newest:
            reason = "the first message says no hello: this client does not speak headgate's protocol"
        elif hello.newest < OLDEST or hello.oldest > NEWEST:
            reason = (
                f"the client (headgate {hello.version or 'unknown'}) speaks protocols {hello.oldest} to "
                f"{hello.newest}, this worker (headgate {self._version}) {OLDEST} to {NEWEST}"
            )
        else:
            reply.welcome.CopyFrom(Welcome(protocol=min(hello.newest, NEWEST), uid=self._uid, version=self._version))
            reply.stopping = stopping
            self.client, self.state = hello.client, "open"
            return True
        reply.refused.reason = reason
        self.state = "over"
        return False

    def receive(self, message: ToWorker) -> tuple[list[Begun], list[int]]:
        """What came: calls to begin, and numbers of calls to cancel."""
        if self.state != "open":
            return [], []
        for definition in message.definitions:
            self._functions[definition.function] = self._define(definition)
        if message.chunks:
            self._transfers.receive(message)
        if message.HasField("peers"):
            self.peers = message.peers.pool, [(peer.uid, peer.address) for peer in message.peers.workers]
        begun = [self._begun(call) for call in message.calls]
        cancels = [number for number in message.cancels if number in self.open]
        for function in message.forgotten:
            self._functions.pop(function, None)
        return begun, cancels

    def _begun(self, call: Call) -> Begun:
        if call.number <= self._highest:
            raise ConversationBroken(f"call {call.number} comes after call {self._highest}: it was sent before")
        self._highest = call.number
        function = self._functions.get(call.function)
        if function is None:
            raise ConversationBroken(f"call {call.number} names the function {call.function}, which was not defined")
        payload = self._transfers.payload(call.transfer) if call.transfer else call.arguments
        begun = Begun(call.number, call.task, function, payload, call.timeout, call.caller, call.tell_start)
        self.open[call.number] = begun
        return begun

    def started(self, number: int) -> None:
        """It has begun, and its caller wants to know."""
        if self.state == "open" and number in self.open:
            self._message().started.append(number)

    def answer(self, number: int, kind: Kind, payload: bytes = b"", *, swallowed: bool = False) -> bool:
        """It ended. False: it was answered already, or nobody is there to hear it."""
        if self.state != "open" or self.open.pop(number, None) is None:
            return False
        if kind in _WHYS:
            self._message().refusals.add(number=number, why=_WHYS[kind], reason=payload.decode(errors="replace"))
        elif len(payload) > INLINE:
            result = Result(number=number, kind=_KINDS[kind], swallowed=swallowed)  # type: ignore[arg-type]
            result.transfer = self._transfers.begin(payload, result)
        else:
            result = Result(number=number, kind=_KINDS[kind], payload=payload)  # type: ignore[arg-type]
            if swallowed:
                result.swallowed = True
            self._outbox.append(result)
        return True

    def beat(self, tick_age: float, number: int = 0, tag: str = "") -> None:
        """Tell how the task loop is."""
        if self.state == "open":
            self._message().pulse.CopyFrom(Pulse(tick_age=int(tick_age * 1000), number=number, tag=tag))

    def stopping(self) -> None:
        """Tell that new calls will be refused."""
        if self.state == "open":
            self._message().stopping = True

    def take(self) -> ToClient | None:
        """The next message, to be handed to the transport now. None: there is nothing."""
        message, self._reply = self._reply, None
        if self._outbox or self._transfers:
            message = message or ToClient()
            size = 0
            while self._outbox and size < MESSAGE:
                result = self._outbox.popleft()
                size += len(result.payload) + _FRAME
                message.results.append(result)
            if self._transfers:
                last = self._transfers.next(message)
                if last is not None:
                    self._outbox.append(last)
        return message

    @property
    def has_more(self) -> bool:
        """Is there something to take?"""
        return self._reply is not None or bool(self._outbox) or len(self._transfers) > 0

    def broken(self) -> list[int]:
        """The stream is gone: these calls run for nobody."""
        self.state = "over"
        left = list(self.open)
        self.open = {}
        self._outbox.clear()
        self._transfers = Transfers()
        self._reply = None
        return left

    def _message(self) -> ToClient:
        if self._reply is None:
            self._reply = ToClient()
        return self._reply
