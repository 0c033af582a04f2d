"""The conversation of a client with a worker, both ends. Pure: messages in, messages and answers out.

A call is *unsent* (it stands in the client's outbox), *sent* (a message that holds it was taken to be handed to the
transport) or *answered*. That order is the whole promise of at most once: when the stream breaks, unsent calls may go
elsewhere, because no transport ever had them; sent ones are lost, because the worker may have begun them; and an answer
that comes after the break finds nobody. A new stream is a new session, so nothing of an old one can be mistaken for it.

Two lanes. Small frames go first, all that is ready, up to `MESSAGE` bytes. Payloads longer than `INLINE` bytes travel
apart (see `parcels`), and the frame that needs one follows it: beside a long argument a small call waits for one chunk,
not for all of them, and a call whose argument is on the way is unsent still.

A call of a generator is answered many times: by an item for each step, and last by its end. Its frames keep their order
though some of them have to wait for a parcel.

Functions are defined once in a session, and named by number from then on. What is defined by value is kept by the
worker until the client says that it may forget it (`KEPT` bytes, the longest unused goes first).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any, Literal

from headgate.workers.protocol.bulk import (
    INLINE,
    ConversationBroken,
    Lending,
    Parcel,
)
from headgate.workers.protocol.call_ends import KIND_OF_REFUSAL, KIND_OF_RESULT, REFUSAL_OF_KIND, RESULT_OF_KIND
from headgate.workers.protocol.messages import (
    CROWD,
    KEPT,
    MESSAGE,
    NEWEST,
    OLDEST,
    OUTBOX,
    Advance,
    Answer,
    Begun,
    Heard,
    Kind,
    Outgoing,
    Side,
    Stepped,
)
from headgate.workers.protocol.wire.wire_pb2 import (
    Call,
    Hello,
    Probe,
    Pulse,
    Result,
    Step,
    ToClient,
    ToWorker,
    Welcome,
    Yield,
)
from headgate.workers.serialization.definitions import Definitions
from headgate.workers.server.admission import Reservations

_STEPS: dict[Advance, Step.Kind] = {"next": Step.NEXT, "send": Step.SEND, "throw": Step.THROW, "close": Step.CLOSE}
_ADVANCES: dict[int, Advance] = {number: advance for advance, number in _STEPS.items()}
_FRAME = 24  # about what a small frame takes besides its payload


class ClientSession(Side):
    """The client's end."""

    def __init__(self, epoch: int, client: str, version: str, max_payload: int = 0) -> None:
        super().__init__()
        self.epoch: int = epoch
        self.state: Literal["opening", "open", "stopping", "over"] = "opening"
        self.uid: str = ""
        self.probe: Probe | None = None
        """What the worker offers to be tried."""
        self.pulse: Pulse | None = None
        """The last sign of life of the worker's task loop."""
        self.outbox: int = 0
        """Bytes that wait to be sent in frames,"""
        self.apart: int = 0
        """and those that travel apart."""
        self.sent: dict[int, Outgoing] = {}
        self.left: dict[int, Outgoing] = {}
        """Calls that were sent and that nobody waits for any more: the worker has not ended them."""
        self.ended: list[Outgoing] = []
        """Those of them that have ended, until the shell has taken note."""
        self._client = client
        self._version = version
        self._max_payload = max_payload
        self._ready: dict[Outgoing, None] = {}  # unsent, and to be sent next
        self._bulky: dict[Outgoing, None] = {}  # unsent, and their arguments are on the way
        self._steps: list[Step] = []
        self._departing: set[int] = set()  # calls with a step whose value is on the way
        self._late: list[int] = []  # cancels that are to follow such a step
        self._last_number = 0
        self._cancels: list[tuple[int, int]] = []  # with how many steps are to be sent before, of all there ever were
        self._steps_sent = 0
        self._abandoned: list[int] = []
        self._peers: tuple[str, list[tuple[str, str]]] | None = None
        self._can_read = False
        self.room: Reservations = Reservations()
        self._definitions = Definitions()

    # -- calls --------------------------------------------------------------------------------------------------------

    def full(self, bulky: bool) -> bool:
        """Should the next call go elsewhere? One that travels apart does not hold up those that do not."""
        return (self.apart if bulky else self.outbox) >= OUTBOX

    @property
    def _urgent(self) -> bool:
        """Is there something to send besides calls and steps?"""
        transfers = self._transfers
        return bool(
            transfers.leaving
            or self.owes
            or self._cancels
            or self._abandoned
            or self._peers is not None
            or self._can_read
            or self.room.unsaid
        )

    @property
    def can_wait(self) -> bool:
        """Is there nothing to send but a few small frames, which may wait for others to share a message with?"""
        return not self._urgent and len(self._ready) + len(self._steps) < CROWD and self.outbox < INLINE

    @property
    def waiting(self) -> int:
        """Calls that are not answered."""
        return len(self._ready) + len(self._bulky) + len(self.sent)

    def submit(self, call: Outgoing) -> None:
        """It is in the outbox now."""
        assert self.state in ("open", "opening"), "nobody calls on a session that is over"
        arguments = call.arguments
        if isinstance(arguments, Parcel):
            self.outbox += _FRAME
            self.apart += len(arguments)
            self._bulky[call] = None
            if self.state == "open":
                self._depart(arguments, call)
        else:
            self.outbox += _FRAME + len(arguments)
            self._ready[call] = None

    def _name(self, frame: Any, lending: Lending[Any]) -> None:
        if isinstance(frame, Outgoing):
            frame.lending = lending
        else:
            super()._name(frame, lending)

    def _landed(self, frame: Any) -> None:
        if isinstance(frame, Outgoing):
            del self._bulky[frame]
            self._ready[frame] = None
        else:
            self._departing.discard(frame.number)
            self._steps.append(frame)
            if self._late:
                self._cancels += [self._behind(number) for number in self._late if number == frame.number]
                self._late = [number for number in self._late if number != frame.number]

    def step(
        self, call: Outgoing, advance: Advance, payload: bytes | Parcel = b"", count: int = 0, context: bytes = b""
    ) -> None:
        """Have a generator go on. One that has ended does not: its end is on the way, or here."""
        if self.sent.get(call.number) is not call:
            return
        step = Step(number=call.number, kind=_STEPS[advance])
        if count:
            step.count = count
        if context:
            step.context = context
        if isinstance(payload, Parcel):
            self._departing.add(call.number)
            self._depart(payload, step)
        else:
            step.payload = payload
            self._steps.append(step)

    def cancel(self, call: Outgoing) -> bool:
        """The caller was cancelled. True: it was unsent, and is gone. False: the worker will be told, and answer."""
        if call in self._ready:
            del self._ready[call]
            if call.lending is not None:
                self.loans.returned((call.lending.number,))
            elif call.transfer:
                self._abandoned.append(call.transfer)
        elif call in self._bulky:
            del self._bulky[call]
            if not self.loans.stop(call) and self._transfers.stop(call) is not None:
                self._abandoned.append(call.transfer)
        else:
            if self.sent.get(call.number) is call:
                if call.number in self._departing:
                    self._late.append(call.number)  # it is meant for a step that is still on its way
                else:
                    self._cancels.append(self._behind(call.number))
            return False
        self._left(call)
        return True

    def _left(self, call: Outgoing) -> None:
        """It is not in the outbox any more."""
        if isinstance(call.arguments, Parcel):
            self.outbox -= _FRAME
            self.apart -= len(call.arguments)
        else:
            self.outbox -= _FRAME + len(call.arguments)

    def _behind(self, number: int) -> tuple[int, int]:
        """A cancel follows the steps of its call that wait to be sent."""
        places = [place for place, step in enumerate(self._steps, 1) if step.number == number]
        return number, self._steps_sent + places[-1] if places else 0

    def abandon(self, call: Outgoing) -> None:
        """Nobody waits for its answer any more: it is dropped when it comes."""
        if self.sent.get(call.number) is call:
            self.left[call.number] = self.sent.pop(call.number)

    def take_ended(self) -> list[Outgoing]:
        """Abandoned calls that have ended since this was last asked."""
        ended, self.ended = self.ended, []
        return ended

    def _ends(self, number: int) -> None:
        """There is an end of a call that nobody waits for."""
        call = self.left.pop(number, None)
        if call is not None:
            self.ended.append(call)

    def introduce(self, pool: str, peers: list[tuple[str, str]]) -> None:
        """Tell the worker whom its routines may call: the pool, uids and addresses."""
        self._peers = pool, peers

    # -- the stream ---------------------------------------------------------------------------------------------------

    def hello(self, probe: Probe | None = None) -> ToWorker:
        """The first message."""
        return ToWorker(
            hello=Hello(
                oldest=OLDEST,
                newest=NEWEST,
                epoch=self.epoch,
                client=self._client,
                version=self._version,
                max_payload=self._max_payload,
                probe=probe,
            )
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
        self.may_lend(message.welcome.shares)
        self.probe = message.welcome.probe if message.welcome.HasField("probe") else None
        self.state = "stopping" if message.stopping else "open"
        self.room.hear(message)
        for call in self._bulky:
            assert isinstance(call.arguments, Parcel), "that is why it is there"
            self._depart(call.arguments, call)
        return None

    def can_read(self) -> None:
        """Memory that the worker lends can be read here: let it know."""
        self._can_read = True

    def take(self) -> ToWorker | None:
        """The next message, to be handed to the transport now: the calls in it are sent. None: there is nothing."""
        if self.state in ("opening", "over"):
            return None
        ready = self._ready
        if not (ready or self._steps or self._urgent):
            return None
        message, size = ToWorker(), 0
        transfers = self._transfers
        if self._can_read:
            message.shares = True
            self._can_read = False
        if self.owes:
            self._settle(message)
        if self._peers is not None:
            message.peers.pool, peers = self._peers
            for uid, address in peers:
                message.peers.workers.add(uid=uid, address=address)
            message.peers.SetInParent()
            self._peers = None
        if self.room.unsaid:
            self.room.write(message)
        if self._abandoned:
            for transfer in self._abandoned:
                message.chunks.add(transfer=transfer, abandoned=True)
            self._abandoned.clear()
        if self._steps:
            count = 0
            while count < len(self._steps) and size < MESSAGE:
                message.steps.append(self._steps[count])
                size += len(self._steps[count].payload) + len(self._steps[count].context) + _FRAME
                count += 1
            del self._steps[:count]
            self._steps_sent += count
        if self._cancels:
            message.cancels.extend(number for number, behind in self._cancels if behind <= self._steps_sent)
            self._cancels = [(number, behind) for number, behind in self._cancels if behind > self._steps_sent]
        while ready and size < MESSAGE:
            call = next(iter(ready))
            del ready[call]
            size += self._write(message, call)
        if transfers.leaving:
            last = transfers.next(message)
            if last is not None:
                self._follows(last)
        if self._definitions.kept > KEPT:
            self._definitions.forget(message, KEPT)
        return message

    def receive(self, message: ToClient) -> list[Answer]:
        """What came: the answers to calls somebody waits for."""
        if self.state in ("opening", "over"):
            return []
        self._hear(message)
        if message.HasField("pulse"):
            self.pulse = message.pulse
        if message.stopping:
            self.state = "stopping"
        self.room.hear(message)
        # Before anything is taken out: a message that breaks the conversation must leave every call to `broken`.
        items = [self._payload(one, one.payload) for one in message.yields]
        payloads = [self._payload(one, one.payload) for one in message.results]
        sent = self.sent
        for number in message.started:
            if number in sent:
                sent[number].started = True
        answers = []
        for item, payload in zip(message.yields, items, strict=True):
            call = sent.get(item.number)
            if call is not None and call.form.generator:
                answers.append(Answer(call, "yielded", payload, item.swallowed, item.steps, item.context))
            else:
                self._drop(payload)
        for result, payload in zip(message.results, payloads, strict=True):
            call = sent.pop(result.number, None)
            if call is not None:
                kind = KIND_OF_RESULT.get(result.kind, "lost")
                answers.append(Answer(call, kind, payload, result.swallowed, result.steps, result.context))
            else:
                self._drop(payload)
                self._ends(result.number)
        for refusal in message.refusals:
            call = sent.pop(refusal.number, None)
            if call is not None:
                answers.append(Answer(call, KIND_OF_REFUSAL.get(refusal.why, "not_started"), refusal.reason.encode()))
            else:
                self._ends(refusal.number)
        return answers

    def broken(self) -> list[Answer]:
        """The stream is gone: every call has its answer now, and none will come later."""
        self.state = "over"
        unsent = [Answer(call, "unsent") for call in (*self._ready, *self._bulky)]
        lost = [Answer(call, "lost") for call in self.sent.values()]
        self._ready, self._bulky, self.sent = {}, {}, {}
        self.ended += self.left.values()
        self.left = {}
        self._steps, self._departing, self._late = [], set(), []
        self._end()
        self.outbox = self.apart = 0
        return [*unsent, *lost]

    def _write(self, message: ToWorker, call: Outgoing) -> int:
        function, defined = self._definitions.number(message, call.form)
        self._last_number = call.number = number = self._last_number + 1
        self.sent[number] = call
        arguments = call.arguments
        size = _FRAME
        if isinstance(arguments, bytes):
            frame = message.calls.add(number=number, task=call.task, function=function, arguments=arguments)
            size += len(arguments)
        else:
            frame = message.calls.add(number=number, task=call.task, function=function)
            self.apart -= len(arguments)
            if call.lending is not None:
                super()._name(frame, call.lending)
                call.lending = None
            else:
                frame.transfer = call.transfer
        if call.timeout:
            frame.timeout = call.timeout
        if call.caller:
            frame.caller = call.caller
        if call.tell_start:
            frame.tell_start = True
        if call.prefetch:
            frame.prefetch = call.prefetch
        if call.tenant:
            frame.tenant = call.tenant
        if call.limit:
            frame.dispatch_timeout = call.limit
        if call.reservation:
            frame.reservation = call.reservation
        if call.context:
            frame.context = call.context
            defined += len(call.context)
        self.outbox -= size
        call.arguments = b""
        return defined + size


class WorkerSession(Side):
    """The worker's end. What a definition becomes is the shell's business: `define` makes it."""

    def __init__(self, uid: str, version: str, define: Any) -> None:
        super().__init__()
        self.client: str = ""
        self.state: Literal["opening", "open", "over"] = "opening"
        self.max_payload: int = 0
        """Bytes that one payload may have, as the client said; 0: no limit."""
        self.open: dict[int, Begun] = {}
        """Calls that were received and not answered, or generators that have not ended."""
        self.peers: tuple[str, list[tuple[str, str]]] | None = None
        """Whom routines may call, as the client last said: the pool, uids and addresses."""
        self._uid = uid
        self._version = version
        self._define = define
        self._functions: dict[int, Any] = {}
        self._reply: ToClient | None = None
        self._size = 0  # about what it takes
        self._outbox: deque[Result | Yield] = deque()
        self._lines: dict[int, deque[tuple[Result | Yield, bytes | Parcel]]] = {}  # frames behind one that waits
        self._highest = 0

    def greet(
        self, message: ToWorker, *, stopping: bool = False, probe: Probe | None = None, shares: bool = False
    ) -> bool:
        """Read the client's first message; the answer is to be taken. False: there will be no conversation.

        `probe` is for the client to try; `shares`: the one that it offered could be read.
        """
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
            reply.welcome.CopyFrom(
                Welcome(
                    protocol=min(hello.newest, NEWEST),
                    uid=self._uid,
                    version=self._version,
                    probe=probe,
                    shares=shares,
                )
            )
            reply.stopping = stopping
            self.client, self.state, self.max_payload = hello.client, "open", hello.max_payload
            return True
        reply.refused.reason = reason
        self.state = "over"
        return False

    def receive(self, message: ToWorker) -> Heard:
        """What came: calls to begin, numbers of calls to cancel, steps of generators."""
        if self.state != "open":
            return Heard([], [], [])
        for definition in message.definitions:
            self._functions[definition.function] = self._define(definition)
        self._hear(message)
        if message.shares:
            self.may_lend(True)
        if message.HasField("peers"):
            self.peers = message.peers.pool, [(peer.uid, peer.address) for peer in message.peers.workers]
        begun = [self._begun(call) for call in message.calls]
        steps = [stepped for step in message.steps if (stepped := self._stepped(step)) is not None]
        cancels = [number for number in message.cancels if number in self.open]
        for function in message.forgotten:
            self._functions.pop(function, None)
        return Heard(begun, cancels, steps)

    def _stepped(self, step: Step) -> Stepped | None:
        payload = self._payload(step, step.payload)
        if step.number not in self.open:
            self._drop(payload)
            return None
        return Stepped(step.number, _ADVANCES.get(step.kind, "close"), step.count, payload, step.context)

    def _begun(self, call: Call) -> Begun:
        if call.number <= self._highest:
            raise ConversationBroken(f"call {call.number} comes after call {self._highest}: it was sent before")
        self._highest = call.number
        function = self._functions.get(call.function)
        if function is None:
            raise ConversationBroken(f"call {call.number} names the function {call.function}, which was not defined")
        payload = self._payload(call, call.arguments)
        begun = Begun(
            call.number,
            call.task,
            function,
            payload,
            call.timeout,
            call.caller,
            call.tell_start,
            call.prefetch,
            call.context,
            call.tenant,
            call.reservation,
            call.dispatch_timeout,
        )
        self.open[call.number] = begun
        return begun

    def started(self, number: int) -> None:
        """It has begun, and its caller wants to know."""
        if self.state == "open" and number in self.open:
            self._message().started.append(number)

    def yielded(
        self, number: int, payload: bytes | Parcel, *, swallowed: bool = False, steps: int = 0, context: bytes = b""
    ) -> bool:
        """A generator has an item. False: nobody is there to have it."""
        if self.state != "open" or number not in self.open:
            return False
        yields = self._message().yields if self._has_room(payload, context) else None
        if yields is not None:
            item = yields.add(number=number, payload=payload)
        else:
            item = Yield(number=number)
            self._post(item, payload)
        if swallowed:
            item.swallowed = True
        if steps:
            item.steps = steps
        if context:
            item.context = context
        return True

    def answer(
        self,
        number: int,
        kind: Kind,
        payload: bytes | Parcel = b"",
        *,
        swallowed: bool = False,
        steps: int = 0,
        context: bytes = b"",
    ) -> bool:
        """It ended. False: it was answered already, or nobody is there to hear it."""
        if self.state != "open" or self.open.pop(number, None) is None:
            return False
        if kind in REFUSAL_OF_KIND:
            reason = bytes(payload.pickle if isinstance(payload, Parcel) else payload)
            self._message().refusals.add(
                number=number, why=REFUSAL_OF_KIND[kind], reason=reason.decode(errors="replace")
            )
        else:
            results = self._message().results if self._has_room(payload, context) else None
            if results is not None:
                result = results.add(number=number, kind=RESULT_OF_KIND[kind], payload=payload)
            else:
                result = Result(number=number, kind=RESULT_OF_KIND[kind])
                self._post(result, payload)
            if swallowed:
                result.swallowed = True
            if steps:
                result.steps = steps
            if context:
                result.context = context
        return True

    def _has_room(self, payload: bytes | Parcel, context: bytes) -> bool:
        """May a frame with this payload be written into the next message at once, for nothing is to go before it?"""
        if self._lines or self._outbox or self._size >= MESSAGE or payload.__class__ is not bytes:
            return False
        self._size += len(payload) + len(context) + _FRAME
        return True

    def _post(self, frame: Result | Yield, payload: bytes | Parcel) -> None:
        """Send it, behind the frames of the same call that wait."""
        line = self._lines.get(frame.number)
        if line is not None:
            line.append((frame, payload))
        elif isinstance(payload, Parcel):
            self._lines[frame.number] = deque()
            self._depart(payload, frame)
        else:
            frame.payload = payload
            self._outbox.append(frame)

    def _landed(self, frame: Any) -> None:
        self._outbox.append(frame)
        line = self._lines.pop(frame.number)
        while line:
            self._post(*line.popleft())
            if frame.number in self._lines:
                self._lines[frame.number].extend(line)
                return

    def beat(self, tick_age: float, number: int = 0, tag: str = "", timed: Iterable[tuple[int, float]] = ()) -> None:
        """Tell how the task loop is, and how many seconds calls with a timeout may still run."""
        if self.state == "open":
            pulse = Pulse(tick_age=int(tick_age * 1000), number=number, tag=tag)
            for timed_number, left in timed:
                pulse.timed.add(number=timed_number, left=int(left * 1000))
            self._message().pulse.CopyFrom(pulse)

    def stopping(self) -> None:
        """Tell that new calls will be refused."""
        if self.state == "open":
            self._message().stopping = True

    def grant(self, number: int) -> None:
        """There is room for the call of this reservation."""
        if self.state == "open":
            self._message().granted.append(number)

    def reserved(self, reserved: bool) -> None:
        """Tell that other calls are refused, or that they are not any more."""
        if self.state == "open":
            self._message().reserved = reserved

    def takes_threads(self, takes: bool) -> None:
        """Tell whether calls can begin that need a thread."""
        if self.state == "open":
            self._message().takes_threads = takes

    def retiring(self, reason: str, *, at_once: bool, uid: str = "") -> None:
        """Tell that this worker, or a peer of it, is to be replaced."""
        if self.state == "open":
            self._message().retiring.add(uid=uid, reason=reason, at_once=at_once)

    def take(self) -> ToClient | None:
        """The next message, to be handed to the transport now. None: there is nothing."""
        message, self._reply = self._reply, None
        size, self._size = self._size, 0
        transfers = self._transfers
        if self._outbox or transfers.leaving or self.owes:
            message = message or ToClient()
            if self.owes:
                self._settle(message)
            while self._outbox and size < MESSAGE:
                frame = self._outbox.popleft()
                size += len(frame.payload) + len(frame.context) + _FRAME
                if isinstance(frame, Result):
                    message.results.append(frame)
                else:
                    message.yields.append(frame)
            if transfers.leaving:
                last = transfers.next(message)
                if last is not None:
                    self._follows(last)
        return message

    @property
    def has_more(self) -> bool:
        """Is there something to take, or on its way to be?"""
        return self._reply is not None or bool(self._outbox or self._lines) or len(self._transfers) > 0 or self.owes

    def broken(self) -> list[int]:
        """The stream is gone: these calls run for nobody."""
        self.state = "over"
        left = list(self.open)
        self.open = {}
        self._outbox.clear()
        self._lines.clear()
        self._end()
        self._reply = None
        return left

    def _message(self) -> ToClient:
        if self._reply is None:
            self._reply = ToClient()
        return self._reply
