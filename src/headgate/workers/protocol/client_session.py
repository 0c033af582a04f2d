"""The client's end of a session with a worker. Pure: messages in, messages and answers out.

A call is *unsent* (it is in the client's outbox), *sent* (a message that holds it was taken to be given to the
transport) or *answered*. That order is the whole promise of at most once. When the stream breaks, unsent calls may go
to another worker, because no transport ever had them. Sent calls are lost, because the worker may have begun them. An
answer that comes after the break is dropped. A new stream is a new session, so nothing of an old one can be mistaken
for it.

A message has small frames first, all that are ready, up to `MESSAGE` bytes. Payloads longer than `INLINE` bytes travel
apart from frames (see `bulk`), and the frame that needs one follows it. So next to a long argument a small call waits
for one chunk, not for all of them, and a call whose argument is still being sent is unsent.

A call of a generator is answered many times: by an item for each step, and last by its end. Its frames keep their order
even when some of them wait for a bulk payload.

Functions are defined once in a session and named by number after that. The worker keeps functions that were sent by
value until the client says that it may forget them (at most `KEPT` bytes; the longest unused goes first).
"""

from __future__ import annotations

from typing import Literal

from headgate.workers.model import UNREPORTED, ReportedProcess
from headgate.workers.protocol.bulk import INLINE, BulkPayload, Lending
from headgate.workers.protocol.bulk_channel import BulkChannel, name_loan
from headgate.workers.protocol.call_ends import KIND_OF_REFUSAL, KIND_OF_RESULT
from headgate.workers.protocol.lessons import lessons_of
from headgate.workers.protocol.message_lengths import Lengths, lengths_of
from headgate.workers.protocol.messages import (
    ADVANCE_TO_STEP,
    CROWD,
    FRAME,
    KEPT,
    MESSAGE,
    NEWEST,
    OLDEST,
    OUTBOX,
    Advance,
    Answer,
    Introduction,
    Outgoing,
    Peer,
)
from headgate.workers.protocol.wire.wire_pb2 import Hello, Probe, Pulse, Step, ToClient, ToWorker
from headgate.workers.serialization.definitions import Definitions
from headgate.workers.server.admission import Reservations

_LONGEST_HOST = 253  # as DNS allows


class ClientSession:
    """One session with one worker, as the client keeps it: which calls are unsent, sent and answered."""

    def __init__(self, epoch: int, client: str, version: str, max_payload: int = 0) -> None:
        self.bulk: BulkChannel[Outgoing | Step] = BulkChannel(self._payload_sent, self._name_loan)
        self.epoch: int = epoch
        self.state: Literal["opening", "open", "stopping", "over"] = "opening"
        self.uid: str = ""
        self.process: ReportedProcess = UNREPORTED
        self.lengths: Lengths = lengths_of(0)
        self.max_age: float = 0.0
        """Seconds after which the worker closes the connection; 0: never."""
        self.probe: Probe | None = None
        """Memory of the worker, for the client to try whether it can read that; None: nothing to try."""
        self.pulse: Pulse | None = None
        """The worker's last report on its task loop."""
        self.outbox: int = 0
        """Bytes that wait to be sent in frames."""
        self.apart: int = 0
        """Bytes of bulk payloads that wait to be sent."""
        self.sent: dict[int, Outgoing] = {}
        self.left: dict[int, Outgoing] = {}
        """Calls that were sent, that nobody waits for any more, and that the worker has not ended."""
        self.ended: list[Outgoing] = []
        """Abandoned calls that have ended, until `take_ended` takes them."""
        self._client = client
        self._version = version
        self._max_payload = max_payload
        self._ready: dict[Outgoing, None] = {}  # unsent, and to be sent next
        self._bulky: dict[Outgoing, None] = {}  # unsent, and their arguments are being sent
        self._steps: list[Step] = []
        self._departing: set[int] = set()  # calls with a step whose value is being sent
        self._late: list[int] = []  # cancels that must follow such a step
        self._last_number = 0
        self._newest = 0  # the first call of the last message with calls or steps; 0: it had steps
        self._cancels: list[
            tuple[int, int]
        ] = []  # each with the number of steps to be sent before it, counted from the start of the session
        self._steps_sent = 0
        self._abandoned: list[int] = []
        self._peers: Introduction | None = None
        self._can_read = False
        self._leaves: Literal["no", "unsaid", "said"] = "no"
        self.reservations: Reservations = Reservations()
        self._definitions = Definitions()

    # -- calls --------------------------------------------------------------------------------------------------------

    def full(self, bulky: bool) -> bool:
        """Should the next call go to another worker? Calls with bulk arguments do not count against small ones."""
        return (self.apart if bulky else self.outbox) >= OUTBOX

    @property
    def _urgent(self) -> bool:
        """Is there something to send that is neither a call nor a step?"""
        return bool(
            self.bulk.transfers.leaving
            or self.bulk.has_notices
            or self._cancels
            or self._abandoned
            or self._peers is not None
            or self._can_read
            or self._leaves == "unsaid"
            or self.reservations.unsaid
        )

    @property
    def can_wait(self) -> bool:
        """Is there nothing to send but a few small frames, which may wait for others to share a message with?"""
        return not self._urgent and len(self._ready) + len(self._steps) < CROWD and self.outbox < INLINE

    @property
    def has_frames(self) -> bool:
        """Is there a small call or step to send?"""
        return bool(self._ready or self._steps)

    @property
    def waiting(self) -> int:
        """Number of calls that are not answered."""
        return len(self._ready) + len(self._bulky) + len(self.sent)

    def submit(self, call: Outgoing) -> None:
        """Put a call into the outbox."""
        assert self.state != "over", "no call is submitted to a session that is over"
        arguments = call.arguments
        if isinstance(arguments, BulkPayload):
            self.outbox += FRAME
            self.apart += len(arguments)
            self._bulky[call] = None
            if self.state != "opening":
                self.bulk.send(arguments, call)
        else:
            self.outbox += FRAME + len(arguments)
            self._ready[call] = None

    def _name_loan(self, frame: Outgoing | Step, lending: Lending[Outgoing | Step]) -> None:
        if isinstance(frame, Outgoing):
            frame.lending = lending
        else:
            name_loan(frame, lending)

    def _payload_sent(self, frame: Outgoing | Step) -> None:
        """Send the frame whose bulk payload was sent: a call, or a step of a generator."""
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
        self, call: Outgoing, advance: Advance, payload: bytes | BulkPayload = b"", count: int = 0, context: bytes = b""
    ) -> None:
        """Tell a generator what to do next. Ignored when it has ended: its end has come, or is being sent."""
        if self.sent.get(call.number) is not call:
            return
        step = Step(number=call.number, kind=ADVANCE_TO_STEP[advance])
        if count:
            step.count = count
        if context:
            step.context = context
        if isinstance(payload, BulkPayload):
            self._departing.add(call.number)
            self.bulk.send(payload, step)
        else:
            step.payload = payload
            self._steps.append(step)

    def cancel(self, call: Outgoing) -> bool:
        """Cancel a call. True: it was unsent, and is removed. False: the worker will be told, and will answer."""
        if call in self._ready:
            del self._ready[call]
            if call.lending is not None:
                self.bulk.loans.returned((call.lending.number,))
            elif call.transfer:
                self._abandoned.append(call.transfer)
        elif call in self._bulky:
            del self._bulky[call]
            if not self.bulk.loans.stop(call) and self.bulk.transfers.stop(call) is not None:
                self._abandoned.append(call.transfer)
        else:
            if self.sent.get(call.number) is call:
                if call.number in self._departing:
                    self._late.append(call.number)  # it is meant for a step that is still being sent
                else:
                    self._cancels.append(self._behind(call.number))
            return False
        self._left(call)
        return True

    def _left(self, call: Outgoing) -> None:
        """Subtract a call that is not in the outbox any more."""
        if isinstance(call.arguments, BulkPayload):
            self.outbox -= FRAME
            self.apart -= len(call.arguments)
        else:
            self.outbox -= FRAME + len(call.arguments)

    def _behind(self, number: int) -> tuple[int, int]:
        """Pair a cancel with the steps of its call that must be sent before it."""
        places = [place for place, step in enumerate(self._steps, 1) if step.number == number]
        return number, self._steps_sent + places[-1] if places else 0

    def abandon(self, call: Outgoing) -> None:
        """Stop waiting for a call: its answer will be dropped when it comes."""
        if self.sent.get(call.number) is call:
            self.left[call.number] = self.sent.pop(call.number)

    def take_ended(self) -> list[Outgoing]:
        """Return the abandoned calls that have ended since the last time."""
        ended, self.ended = self.ended, []
        return ended

    def _ends(self, number: int) -> None:
        """Note the end of a call that nobody waits for."""
        call = self.left.pop(number, None)
        if call is not None:
            self.ended.append(call)

    def introduce(self, pool: str, peers: list[Peer], number: int = 0) -> None:
        """Tell the worker which workers its routines may call: the pool, the uid and address of each, and which list of
        the pool this is."""
        self._peers = Introduction(pool, peers, number)

    # -- the stream ---------------------------------------------------------------------------------------------------

    def hello(self, probe: Probe | None = None) -> ToWorker:
        """Make the first message of the stream."""
        return ToWorker(
            hello=Hello(
                oldest=OLDEST,
                newest=NEWEST,
                epoch=self.epoch,
                client=self._client,
                version=self._version,
                max_payload=self._max_payload,
                probe=probe,
                tells_leaving=True,
            )
        )

    def welcomed(self, message: ToClient) -> str | None:
        """Read the answer to `hello`. None: the session is open; else the reason why it is not."""
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
        welcome = message.welcome
        self.process = ReportedProcess(welcome.host[:_LONGEST_HOST], welcome.pid, welcome.memory or None)
        self.max_age = message.welcome.max_age_ms / 1000
        self.lengths = lengths_of(message.welcome.max_message)
        self.bulk.shares = message.welcome.shares
        self.probe = message.welcome.probe if message.welcome.HasField("probe") else None
        self.state = "stopping" if message.stopping else "open"
        self.reservations.receive(message)
        for call in self._bulky:
            assert isinstance(call.arguments, BulkPayload), "_bulky holds no others"
            self.bulk.send(call.arguments, call)
        return None

    def unsendable(self) -> list[Answer]:
        """Remove the calls that do not fit into a message, now that its length is known; returns their answers."""
        calls = (*self._ready, *self._bulky)
        answers = [Answer(call, "exhausted", why.encode()) for call in calls if (why := self.refusal(call))]
        for answer in answers:
            self.cancel(answer.call)
        return answers

    def refusal(self, call: Outgoing) -> str:
        """Say why a call does not fit into a message; "": it does."""
        return self.lengths.refusal(len(call.form.value), len(call.context))

    def can_read(self) -> None:
        """Tell the worker that memory which it lends can be read here."""
        self._can_read = True

    def leave(self) -> None:
        """Tell a worker that stops that nothing is awaited from it, and that no call will come: it may end."""
        if self._leaves == "no":
            self._leaves = "unsaid"

    def take(self) -> ToWorker | None:
        """Return the next message, to be given to the transport now: its calls count as sent. None: nothing to send."""
        if self.state in ("opening", "over"):
            return None
        ready = self._ready
        if not (ready or self._steps or self._urgent):
            return None
        message, size, bulk = ToWorker(), 0, self.bulk
        most, limited, defined = self.lengths.frames or MESSAGE, self.lengths.longest > 0, 0
        if self._can_read:
            message.shares = True
            self._can_read = False
        if self._leaves == "unsaid":
            message.leaves = True
            self._leaves = "said"
        if bulk.has_notices:
            bulk.write_notices(message)
        if self._peers is not None:
            message.peers.pool, peers, message.peers.number = self._peers
            for peer in peers:
                message.peers.workers.add(uid=peer.uid, address=peer.address, secure=peer.secure, options=peer.options)
            message.peers.SetInParent()
            self._peers = None
        if self.reservations.unsaid:
            self.reservations.write(message)
        if self._abandoned:
            for transfer in self._abandoned:
                message.chunks.add(transfer=transfer, abandoned=True)
            self._abandoned.clear()
        if limited:
            size = message.ByteSize()
        if ready:
            self._newest = self._last_number + 1
        if self._steps:
            count, self._newest = 0, 0
            while count < len(self._steps) and size < most:
                message.steps.append(self._steps[count])
                size += len(self._steps[count].payload) + len(self._steps[count].context) + FRAME
                count += 1
            del self._steps[:count]
            self._steps_sent += count
        if self._cancels:
            message.cancels.extend(number for number, behind in self._cancels if behind <= self._steps_sent)
            self._cancels = [(number, behind) for number, behind in self._cancels if behind > self._steps_sent]
        while ready and size < most:
            call = next(iter(ready))
            del ready[call]
            size += self._write(message, call)
            if limited:  # what `_write` does not count: names, and the like. Rather too much than too little
                size += message.calls[-1].ByteSize()
                while defined < len(message.definitions):
                    size += message.definitions[defined].ByteSize()
                    defined += 1
        if bulk.transfers.leaving and self.lengths.has_room_for_chunk(message):
            bulk.write_chunk(message)
        if self._definitions.kept > KEPT:
            self._definitions.forget(message, KEPT)
        return message

    def receive(self, message: ToClient) -> list[Answer]:
        """Read a message; returns the answers to calls that somebody waits for."""
        if self.state in ("opening", "over"):
            return []
        bulk = self.bulk
        bulk.receive(message)
        if message.HasField("pulse"):
            self.pulse = message.pulse
            if message.pulse.memory:
                self.process = self.process._replace(memory=message.pulse.memory)
        if message.stopping:
            self.state = "stopping"
        self.reservations.receive(message)
        # Before anything is taken out: a message that breaks the session must leave every call to `broken`.
        items = [bulk.payload(one, one.payload) for one in message.yields]
        payloads = [bulk.payload(one, one.payload) for one in message.results]
        sent = self.sent
        for number in message.started:
            if number in sent:
                sent[number].started = True
        answers = []
        for item, payload in zip(message.yields, items, strict=True):
            call = sent.get(item.number)
            if call is not None and call.form.generator:
                lessons = lessons_of(item.lessons) if item.lessons else ()
                answers.append(Answer(call, "yielded", payload, item.swallowed, item.steps, item.context, lessons))
            else:
                bulk.drop(payload)
        for result, payload in zip(message.results, payloads, strict=True):
            call = sent.pop(result.number, None)
            if call is not None:
                kind = KIND_OF_RESULT.get(result.kind, "lost")
                lessons = lessons_of(result.lessons) if result.lessons else ()
                answers.append(Answer(call, kind, payload, result.swallowed, result.steps, result.context, lessons))
            else:
                bulk.drop(payload)
                self._ends(result.number)
        for refusal in message.refusals:
            call = sent.pop(refusal.number, None)
            if call is not None:
                answers.append(Answer(call, KIND_OF_REFUSAL.get(refusal.why, "not_started"), refusal.reason.encode()))
            else:
                self._ends(refusal.number)
        return answers

    def answers_last(self, message: ToClient) -> bool:
        """Does it answer a call of the last message with calls? If that had steps too, any answer does."""
        newest = self._newest
        for answers in (message.results, message.yields, message.refusals):
            for answer in answers:
                if answer.number >= newest:
                    return True
        return False

    def broken(self) -> list[Answer]:
        """End the session because its stream is gone: every open call gets its answer now, and none will come later."""
        self.state = "over"
        unsent = [Answer(call, "unsent") for call in (*self._ready, *self._bulky)]
        lost = [Answer(call, "lost") for call in self.sent.values()]
        self._ready, self._bulky, self.sent = {}, {}, {}
        self.ended += self.left.values()
        self.left = {}
        self._steps, self._departing, self._late = [], set(), []
        self.bulk.end()
        self.outbox = self.apart = 0
        return [*unsent, *lost]

    def _write(self, message: ToWorker, call: Outgoing) -> int:
        function, defined = self._definitions.number(message, call.form)
        self._last_number = call.number = number = self._last_number + 1
        self.sent[number] = call
        arguments = call.arguments
        size = FRAME
        if isinstance(arguments, bytes):
            frame = message.calls.add(number=number, task=call.task, function=function, arguments=arguments)
            size += len(arguments)
        else:
            frame = message.calls.add(number=number, task=call.task, function=function)
            self.apart -= len(arguments)
            if call.lending is not None:
                name_loan(frame, call.lending)
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
        if call.origin:
            frame.origin = call.origin
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
