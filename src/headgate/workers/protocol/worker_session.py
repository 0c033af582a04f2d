"""The worker's end of a session with a client. Pure: messages in, calls and messages out.

See `client_session` for what a session promises. Here a call is *open* from when it was received until it is answered,
and each is answered once. Frames of one call keep their order: those behind a bulk payload wait for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Literal

from headgate.core.lessons import Lesson
from headgate.workers.model import UNREPORTED, ReportedProcess
from headgate.workers.protocol.bulk import BulkPayload, ProtocolViolation
from headgate.workers.protocol.bulk_channel import BulkChannel, name_loan
from headgate.workers.protocol.call_ends import REFUSAL_OF_KIND, RESULT_OF_KIND
from headgate.workers.protocol.lessons import length_of_lessons, write_lessons
from headgate.workers.protocol.message_lengths import Lengths, lengths_of
from headgate.workers.protocol.messages import (
    FRAME,
    MESSAGE,
    NEWEST,
    OLDEST,
    STEP_TO_ADVANCE,
    Begun,
    Introduction,
    Kind,
    Peer,
    Received,
    Stepped,
)
from headgate.workers.protocol.wire.wire_pb2 import (
    Call,
    Definition,
    Probe,
    Pulse,
    Refusal,
    Result,
    Step,
    ToClient,
    ToWorker,
    Welcome,
    Yield,
)

if TYPE_CHECKING:
    from headgate.workers.serialization.functions import ReceivedFunction


class WorkerSession:
    """One session with one client, as the worker keeps it: open calls, and what is to be sent.

    `define` makes what calls run out of a definition.
    """

    def __init__(
        self, uid: str, version: str, define: Callable[[Definition], ReceivedFunction], max_message: int = 0
    ) -> None:
        self.bulk: BulkChannel[Result | Yield] = BulkChannel(self._payload_sent, name_loan)
        self.client: str = ""
        self.state: Literal["opening", "open", "over"] = "opening"
        self.leaves: bool = False
        """Whether the client has said that it waits for nothing and sends no call any more, or never says so."""
        self.max_payload: int = 0
        """Limit of the client for one payload, in bytes; 0: no limit."""
        self.open: dict[int, Begun] = {}
        """Calls that were received and not answered, or generators that have not ended."""
        self.peers: Introduction | None = None
        """Workers that routines may call, as the client last said."""
        self.lengths: Lengths = lengths_of(max_message)
        self._uid = uid
        self._version = version
        self._define = define
        self._functions: dict[int, ReceivedFunction] = {}
        self._reply: ToClient | None = None
        self._size = 0  # about how many bytes it has
        self._outbox: deque[Result | Yield | Refusal] = deque()
        self._behind: dict[
            int, deque[tuple[Result | Yield, bytes | BulkPayload]]
        ] = {}  # by call: frames behind one whose payload is being sent
        self._highest = 0

    def greet(
        self,
        message: ToWorker,
        *,
        stopping: bool = False,
        probe: Probe | None = None,
        shares: bool = False,
        max_age_ms: int = 0,
        process: ReportedProcess = UNREPORTED,
    ) -> bool:
        """Read the client's first message and prepare the answer for `take`. False: the client is refused.

        `probe` is for the client to try; `shares`: the probe that it offered could be read; `max_age_ms`: when its
        connection will be closed; `process`: of this worker.
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
                    max_age_ms=min(max_age_ms, 2**32 - 1),
                    max_message=min(self.lengths.longest, 2**32 - 1),
                    host=process.host,
                    pid=process.pid,
                    memory=process.memory or 0,
                )
            )
            reply.stopping = stopping
            self.client, self.state, self.max_payload = hello.client, "open", hello.max_payload
            self.leaves = not hello.tells_leaving
            return True
        reply.refused.reason = reason
        self.state = "over"
        return False

    def receive(self, message: ToWorker) -> Received:
        """Read a message; returns calls to begin, numbers of calls to cancel, and steps of generators."""
        if self.state != "open":
            return Received([], [], [])
        for definition in message.definitions:
            self._functions[definition.function] = self._define(definition)
        self.bulk.receive(message)
        if message.shares:
            self.bulk.shares = True
        if message.leaves:
            self.leaves = True
        if message.HasField("peers"):
            self.peers = Introduction(
                message.peers.pool,
                [Peer(one.uid, one.address, one.secure, one.options) for one in message.peers.workers],
                message.peers.number,
            )
        begun = [self._begun(call) for call in message.calls]
        steps = [stepped for step in message.steps if (stepped := self._stepped(step)) is not None]
        cancels = [number for number in message.cancels if number in self.open]
        for function in message.forgotten:
            self._functions.pop(function, None)
        return Received(begun, cancels, steps)

    def _stepped(self, step: Step) -> Stepped | None:
        payload = self.bulk.payload(step, step.payload)
        if step.number not in self.open:
            self.bulk.drop(payload)
            return None
        return Stepped(step.number, STEP_TO_ADVANCE.get(step.kind, "close"), step.count, payload, step.context)

    def _begun(self, call: Call) -> Begun:
        if call.number <= self._highest:
            raise ProtocolViolation(f"call {call.number} comes after call {self._highest}: it was sent before")
        self._highest = call.number
        function = self._functions.get(call.function)
        if function is None:
            raise ProtocolViolation(f"call {call.number} names the function {call.function}, which was not defined")
        payload = self.bulk.payload(call, call.arguments)
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
            call.origin,
        )
        self.open[call.number] = begun
        return begun

    def started(self, number: int) -> None:
        """Tell the client that a call has begun."""
        if self.state == "open" and number in self.open:
            self._message().started.append(number)

    def yielded(
        self,
        number: int,
        payload: bytes | BulkPayload,
        *,
        swallowed: bool = False,
        steps: int = 0,
        context: bytes = b"",
        lessons: Iterable[Lesson] = (),
    ) -> bool:
        """Send an item of a generator. False: nobody waits for it."""
        if self.state != "open" or number not in self.open:
            return False
        yields = self._message().yields if self._goes_at_once(payload, context) else None
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
        if lessons:
            write_lessons(item, lessons)
            if yields is not None:
                self._size += length_of_lessons(item)
        return True

    def answer(
        self,
        number: int,
        kind: Kind,
        payload: bytes | BulkPayload = b"",
        *,
        swallowed: bool = False,
        steps: int = 0,
        context: bytes = b"",
        lessons: Iterable[Lesson] = (),
    ) -> bool:
        """Send the end of a call. False: it was answered already, or nobody waits for it."""
        if self.state != "open" or self.open.pop(number, None) is None:
            return False
        if kind in REFUSAL_OF_KIND:
            reason = bytes(payload.pickle if isinstance(payload, BulkPayload) else payload)
            refusal = Refusal(number=number, why=REFUSAL_OF_KIND[kind], reason=reason.decode(errors="replace"))
            if self.lengths.longest and not self._goes_at_once(reason, b""):
                self._outbox.append(refusal)
            else:
                self._message().refusals.append(refusal)
        else:
            results = self._message().results if self._goes_at_once(payload, context) else None
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
            if lessons:
                write_lessons(result, lessons)
                if results is not None:
                    self._size += length_of_lessons(result)
        return True

    def _goes_at_once(self, payload: bytes | BulkPayload, context: bytes) -> bool:
        """May a frame with this payload be written into the next message at once? Only if nothing must go before it."""
        most = self.lengths.frames or MESSAGE
        if self._behind or self._outbox or self._size >= most or payload.__class__ is not bytes:
            return False
        self._size += len(payload) + len(context) + FRAME
        return True

    def _post(self, frame: Result | Yield, payload: bytes | BulkPayload) -> None:
        """Send a frame, after the frames of the same call that wait."""
        frames = self._behind.get(frame.number)
        if frames is not None:
            frames.append((frame, payload))
        elif isinstance(payload, BulkPayload):
            self._behind[frame.number] = deque()
            self.bulk.send(payload, frame)
        else:
            frame.payload = payload
            self._outbox.append(frame)

    def _payload_sent(self, frame: Result | Yield) -> None:
        """Send the frame whose bulk payload was sent, and the frames of the same call behind it."""
        self._outbox.append(frame)
        frames = self._behind.pop(frame.number)
        while frames:
            self._post(*frames.popleft())
            if frame.number in self._behind:
                self._behind[frame.number].extend(frames)
                return

    def beat(
        self,
        tick_age: float,
        number: int = 0,
        tag: str = "",
        timed: Iterable[tuple[int, float]] = (),
        memory: int = 0,
    ) -> None:
        """Report on the task loop, how many seconds calls with a timeout may still run, and how much memory is used."""
        if self.state == "open":
            pulse = Pulse(tick_age=int(tick_age * 1000), number=number, tag=tag, memory=memory)
            for timed_number, left in timed:
                pulse.timed.add(number=timed_number, left=int(left * 1000))
            self._message().pulse.CopyFrom(pulse)

    def stopping(self) -> None:
        """Tell that new calls will be refused."""
        if self.state == "open":
            self._message().stopping = True

    def grant(self, number: int) -> None:
        """Tell that the call of this reservation may be sent."""
        if self.state == "open":
            self._message().granted.append(number)

    def reserved(self, reserved: bool) -> None:
        """Tell whether calls without a reservation are refused."""
        if self.state == "open":
            self._message().reserved = reserved

    def takes_threads(self, takes: bool) -> None:
        """Tell whether calls that need a thread can begin."""
        if self.state == "open":
            self._message().takes_threads = takes

    def retiring(self, reason: str, *, at_once: bool, uid: str = "") -> None:
        """Tell that this worker, or a peer of it, is to be replaced."""
        if self.state == "open":
            self._message().retiring.add(uid=uid, reason=reason, at_once=at_once)

    def take(self) -> ToClient | None:
        """Return the next message, to be given to the transport now. None: nothing to send."""
        message, self._reply = self._reply, None
        size, self._size = self._size, 0
        bulk = self.bulk
        if self._outbox or bulk.transfers.leaving or bulk.has_notices:
            message, most = message or ToClient(), self.lengths.frames or MESSAGE
            if bulk.has_notices:
                bulk.write_notices(message)
            if self.lengths.longest:
                size = message.ByteSize()
            while self._outbox and size < most:
                frame = self._outbox.popleft()
                if isinstance(frame, Refusal):
                    size += len(frame.reason) + FRAME
                    message.refusals.append(frame)
                    continue
                size += len(frame.payload) + len(frame.context) + FRAME
                if frame.lessons:
                    size += length_of_lessons(frame)
                if isinstance(frame, Result):
                    message.results.append(frame)
                else:
                    message.yields.append(frame)
            if bulk.transfers.leaving and self.lengths.has_room_for_chunk(message):
                bulk.write_chunk(message)
        return message

    @property
    def owes(self) -> bool:
        """Does the client wait for something: for the end of a call, or for a long result that is on its way?"""
        return bool(self.open or self._behind)

    @property
    def has_more(self) -> bool:
        """Is there something to take, now or later?"""
        bulk = self.bulk
        return bool(
            self._reply is not None or self._outbox or self._behind or bulk.transfers.leaving or bulk.has_notices
        )

    def broken(self) -> list[int]:
        """End the session because its stream is gone; returns the calls that nobody waits for any more."""
        self.state = "over"
        left = list(self.open)
        self.open = {}
        self._outbox.clear()
        self._behind.clear()
        self.bulk.end()
        self._reply = None
        return left

    def _message(self) -> ToClient:
        if self._reply is None:
            self._reply = ToClient()
        return self._reply
