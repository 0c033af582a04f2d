"""The client's side of one session: a gRPC stream to one worker, on one event loop.

Reader and writer are tasks of ours that nothing cancels but `close`: cancelling a task that reads or writes would end
the stream and every call on it. The reader iterates over the stream, because gRPC's ``read()`` drops the messages that
have arrived as soon as a ``write()`` has failed: when a worker ends, its last answers would be lost. Calls may be
submitted before the stream is open: they wait in the session's outbox, and go elsewhere if it never opens.

**Lost or blocked.** A worker is *lost* when the stream ends or gRPC's pings are not answered (its own threads answer
them, whatever Python does). It is *blocked* when it lives and its task loop has no turn: it says so itself (`Pulse`),
or says nothing for a while although it has calls, because a routine holds the interpreter's lock.

**Pace.** A message costs a hundred times what a call in it does. Calls that come one after the other while the worker
has a message would each travel alone, and so would their answers. So after a message the next one waits until a call of
that message is answered, or for two milliseconds. An answer to an older message does not count: two messages that are
under way at a time would follow each other forever, and no two would become one again (measured with 100 callers that
pause at random, on eight workers: 5.7 calls a message instead of 6.6, and 1.15 times the CPU time). The first call to a
worker that owes nothing never waits.

**Timeouts** are the worker's to keep. If it does not, the caller is told `CONFIRMATION` seconds later at the most. When
a call has begun, and so when its timeout is over, the worker's server says with each pulse: so a call that stands in
line there is never ended, however long the line. A worker whose interpreter's lock is held says nothing at all. Then
the timeout of a call that it was given, and has not said anything about, is counted from when it was last heard.

**Nothing of a call outlives it.** A session lasts longer than the pools whose tasks use it. So tasks and timers of ours
run in an empty context, not in a copy of the one whose call came first, and what waits for the next message holds none
of the last.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextvars import Context
from typing import TYPE_CHECKING, Literal, TypeAlias

from headgate._version import __version__
from headgate.core.clock import clock
from headgate.errors import HeadgateError
from headgate.workers.client.isolation import RESERVED
from headgate.workers.client.lent_answers import LentAnswers, tell
from headgate.workers.client.lifetime import Lifetime
from headgate.workers.model import UNLIMITED, Limits, WorkerMetadata, WorkerState
from headgate.workers.processes.exit_status import LAST_WORD, Ending
from headgate.workers.protocol import shared_memory
from headgate.workers.protocol.bulk import Borrowed, BulkPayload
from headgate.workers.protocol.client_session import ClientSession
from headgate.workers.protocol.messages import CONFIRMATION, HELD, OUTBOX, Advance, Answer, Introduction, Outgoing
from headgate.workers.protocol.transport import dial, grpc
from headgate.workers.protocol.wire import CONVERSE
from headgate.workers.protocol.wire.wire_pb2 import ToClient

if TYPE_CHECKING:
    from headgate.workers.credentials import WorkerCredentials

OPENING = 10.0
"""Seconds a worker has to answer the first message."""
SILENT = 1.75
"""A worker with calls that says nothing for so long is blocked: its signs of life come each half second."""
LINGER = 0.01
"""Seconds for gRPC's last events to find their loop: one that finds it closed is a traceback on stderr."""
PACE = 0.002
"""Seconds that small calls wait for others to share a message with, unless the last message is answered before."""
_LOOK = 0.5
_LATE = 0.3  # a look so much too late means that this loop was held
_EXPIRY = 2.0  # what is known of a worker without calls is old after so long

_Stream: TypeAlias = "grpc.aio.StreamStreamCall[bytes, bytes]"

Happening = Literal[
    "open",
    "refused",
    "lost",
    "stopped",
    "closed",
    "blocked",
    "unblocked",
    "crowded",
    "uncrowded",
    "reserved",
    "unreserved",
    "room",
    "aging",
    "idle",
]


class Connection:
    """A session with one worker, and the gRPC stream that carries it."""

    def __init__(
        self,
        metadata: WorkerMetadata,
        epoch: int,
        client: str,
        tell: Callable[[Connection, Happening, str], None],
        max_payload: int = 0,
        limits: Limits = UNLIMITED,
        replace: Callable[[str, str, bool], None] | None = None,
        credentials: WorkerCredentials | None = None,
    ) -> None:
        self.metadata: WorkerMetadata = metadata
        self.session: ClientSession = ClientSession(epoch, client, __version__, max_payload)
        self.blocked: bool = False
        self.crowded: bool = False
        """Whether all its thread places are held by calls that nobody waits for."""
        self.reason: str = ""
        """The reason why the session is over."""
        self.ending: Ending | None = None
        """How the worker's process ended, once that is known."""
        self.awaits_ending: bool = False
        """Whether somebody will call `learn` when the process has ended."""
        self.here: str = ""
        """The uid of the worker in whose process this connection is; "": in none."""
        self._held: list[Answer] = []  # of calls that were lost: until it is known how the process ended
        self._hold: asyncio.TimerHandle | None = None
        self.casualties: int = 0
        """Number of calls that were lost when the session broke."""
        self.reserved: bool = False
        """Whether the worker refuses calls because one with few neighbours runs there, or waits for room."""
        self._asked: dict[int, asyncio.Future[bool]] = {}  # for room
        self._introduced: Introduction | None = None  # the list that the worker was told last
        self._tell = tell
        self._loop = asyncio.get_running_loop()
        # Of its timers. Else they would have that of whoever calls, and keep it: one that looks sets the next one.
        self._context = Context()
        self.lifetime: Lifetime = Lifetime(self._loop, self._last_use, lambda end: self._tell(self, end, ""))
        self._channel: grpc.aio.Channel | None = None
        self._stream: _Stream | None = None
        self._messages: AsyncGenerator[bytes, None] | None = None  # what comes from the stream
        self._tasks: list[asyncio.Task[None]] = []
        self._idle: asyncio.Future[None] | None = None  # the writer waits for something to write
        self._look: asyncio.TimerHandle | None = None
        self._look_at = 0.0
        self._heard = 0.0
        self._closing = False
        self._was_full = False
        self._limits = limits
        self._replace = replace  # a worker, by its uid: why, and whether at once
        self._credentials = credentials
        self._timed: dict[Outgoing, None] = {}  # calls with a timeout
        self._ending = ""  # why it is being ended
        self._lent = LentAnswers(self.session, self._lent_read)
        self._write_failed = False
        self._paced_until = 0.0  # by the loop's time; 0: the last message is answered
        self._pace: asyncio.TimerHandle | None = None  # there are frames that wait until then

    @property
    def in_flight(self) -> int:
        """Number of calls that were submitted and have not ended, also of those that nobody waits for any more."""
        return self.session.waiting + len(self.session.left)

    @property
    def pid(self) -> int:
        """The process id of the worker; 0: not known. Of one in a list of addresses only the worker itself tells it."""
        return self.metadata.pid or self.session.process.pid

    @property
    def is_begun(self) -> bool:
        """Whether it has begun to connect."""
        return bool(self._tasks)

    @property
    def is_busy(self) -> bool:
        """Whether there are calls in flight, or answers that are still being read."""
        return bool(self.in_flight or self._lent)

    def _last_use(self) -> float | None:
        return None if self.is_busy or self._asked else self._heard

    @property
    def state(self) -> WorkerState:
        """The state of the worker, as far as this session can tell."""
        if self.session.state == "stopping":
            return "stopping"
        if self.session.state == "over":
            return "lost"
        return "blocked" if self.blocked or self.crowded else "ready"

    @property
    def load(self) -> int:
        """Number of calls in flight, and of those that wait for room there."""
        return self.in_flight + len(self._asked)

    # -- calls --------------------------------------------------------------------------------------------------------

    def submit(self, call: Outgoing) -> None:
        """Send a call with the next message. Its waiter is told when the answer is there."""
        session = self.session
        if session.lengths.longest and (why := session.refusal(call)):
            self._loop.call_soon(tell, call, Answer(call, "exhausted", why.encode()))
            return
        session.submit(call)
        if call.timeout:
            self._timed[call] = None
        if self._idle is not None:
            self._rouse()
        elif not self._tasks:
            self.open()
        if self._look is None:
            self._heard = clock.now()
            self._watch()

    async def begins(self, call: Outgoing, waiter: asyncio.Future[None], until: float) -> bool:
        """Wait until a call has begun, or was answered. False: it has not by `until`."""
        # `started` is looked at: few calls have such a limit, and an event would need a place in each of them.
        while not (call.started or waiter.done()):
            left = until - clock.now()
            if left <= 0:
                return False
            await asyncio.wait((waiter,), timeout=min(left, 0.05))
        return True

    def step(
        self, call: Outgoing, advance: Advance, payload: bytes | BulkPayload = b"", count: int = 0, context: bytes = b""
    ) -> None:
        """Tell a generator what to do next. The call's waiter is told when the answer is there."""
        if call.timeout:
            self._timed[call] = None
            call.handed, call.due = clock.now(), None
        self.session.step(call, advance, payload, count, context)
        self._rouse()

    def cancel(self, call: Outgoing) -> bool:
        """Cancel a call. True: it was never sent, and is gone. False: the worker is told, and will answer."""
        self._timed.pop(call, None)  # who cancels it knows for how long to wait
        gone = self.session.cancel(call)
        self._rouse()
        self._leave_if_idle()
        return gone

    async def reserve(self, max_calls: int, caller: str, overdue: bool, patience: float) -> int:
        """Ask for room for a call. Returns the number of the reservation, or 0 if none came within `patience`."""
        number = self.session.reservations.ask(max_calls, caller, overdue)
        granted = self._asked[number] = self._loop.create_future()
        self.open()
        self._rouse()
        timer = self._loop.call_later(patience, _decide, granted, False, context=Context())
        kept = False
        try:
            kept = await granted
        finally:
            timer.cancel()
            del self._asked[number]
            if not kept:
                self.release(number)
        return number if kept else 0

    def release(self, number: int) -> None:
        """Give back room that is not needed any more."""
        if self.session.state != "over":
            self.session.reservations.release(number)
            self._rouse()

    def give_no_room(self) -> None:
        """Send those who wait for room here to other workers."""
        for granted in self._asked.values():
            _decide(granted, False)

    def _take_reservations(self) -> None:
        reservations = self.session.reservations
        for number in reservations.granted:
            if number in self._asked:
                _decide(self._asked[number], True)
        reservations.granted.clear()
        if reservations.closed != self.reserved:
            self.reserved = reservations.closed
            self._tell(self, "reserved" if self.reserved else "unreserved", "")

    def introduce(self, introduction: Introduction) -> None:
        """Tell the worker whom its routines may call, unless it was told just that."""
        if self.session.state != "over" and introduction is not self._introduced:
            self._introduced = introduction
            self.session.introduce(*introduction)
            self._rouse()

    # -- the stream ---------------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Begin to connect, unless that has begun."""
        if not self._tasks and self.session.state == "opening":
            self._tasks.append(self._loop.create_task(self._run(), context=Context()))

    async def _run(self) -> None:
        happening: Happening = "lost"
        reason = "its stream ended"
        try:
            if self._credentials is not None:
                self._credentials = await self._credentials.refreshed()
            options = self.metadata.options
            self._channel = dial(self.metadata.address, credentials=self._credentials, options=options)
            stream: _Stream = self._channel.stream_stream(CONVERSE)()
            self._stream = stream
            self._messages = messages = _iterate(stream)
            local = self.metadata.address.startswith("unix:")
            offer = shared_memory.Offer() if local else None
            try:
                hello = self.session.hello(offer.probe if offer is not None else None)
                async with asyncio.timeout(OPENING):
                    await stream.write(hello.SerializeToString())
                    data = await anext(messages, None)
            finally:
                if offer is not None:
                    offer.close()
            if data is None:
                reason = "it closed the stream instead of answering"
                return
            refusal = self.session.welcomed(ToClient.FromString(data))
            if refusal is not None:
                happening, reason = "refused", refusal
                return
            if local and shared_memory.can_read(self.session.probe):
                self.session.can_read()
            for answer in self.session.unsendable() if self.session.lengths.longest else ():
                self._timed.pop(answer.call, None)
                tell(answer.call, answer)
            self._heard = clock.now()
            self.lifetime.begin(self.session.max_age)
            self._tell(self, "open", "")
            self._take_reservations()
            self._tasks.append(self._loop.create_task(self._write(stream)))
            self._leave_if_idle()
            await self._read(messages)
        except TimeoutError:
            reason = f"it did not answer within {OPENING:g} s"
        except grpc.aio.AioRpcError as error:
            reason = _status(error)
            is_lost = self._write_failed or error.code() in _TRANSIENT
            happening = "lost" if is_lost else "refused"
        except HeadgateError as error:  # of the protocol, or of the address
            happening, reason = "refused", error.message
        except PermissionError as error:  # `dial` does not trust that socket
            happening, reason = "refused", str(error)
        except asyncio.CancelledError:
            happening, reason = "closed", "its event loop or its pool ended"
        finally:
            self._break(happening, reason)
            if not self._closing:
                await self._hang_up()

    async def _read(self, messages: AsyncIterator[bytes]) -> None:
        async for data in messages:
            self._hear(ToClient.FromString(data))

    def _hear(self, message: ToClient) -> None:
        session = self.session
        self._heard = clock.now()
        if message.HasField("pulse") and self._timed:
            left = {timed.number: timed.left / 1000 for timed in message.pulse.timed}
            for call in self._timed:
                # A call that it does not name is in line, perhaps again: after an import it waits for a thread place.
                call.due = self._heard + left[call.number] if call.number in left else None
        answers = session.receive(message)
        if session.bulk.resent:
            self._lent.take_resent()
        for answer in answers:
            call = answer.call
            if self._timed and call.number not in session.sent:
                self._timed.pop(call, None)
            if call.backlog is not None or answer.payload.__class__ is Borrowed:
                self._lent.arrived(answer)
                continue
            tell(call, answer)
        if self._paced_until and session.answers_last(message):
            self._end_pace()
        if session.bulk.has_work:
            self._rouse()
        if session.reservations.granted or session.reservations.closed != self.reserved:
            self._take_reservations()
        if message.stopping:
            self.give_no_room()
        if session.state == "stopping":
            self._leave_if_idle()
        if message.HasField("pulse"):
            self._set_blocked(message.pulse.tick_age > HELD * 1000, message.pulse.tag)
        elif self.blocked and (message.results or message.yields):
            self._set_blocked(False, "")
        if session.ended or message.HasField("takes_threads") or message.retiring:
            self._hear_more(message)

    def _hear_more(self, message: ToClient) -> None:
        """Read the parts of a message that seldom come."""
        self._note_ended()
        if message.HasField("takes_threads") and message.takes_threads == self.crowded:
            self.crowded = not message.takes_threads
            self._tell(self, "crowded" if self.crowded else "uncrowded", "")
        for retiring in message.retiring:
            uid = retiring.uid or self.metadata.uid
            if retiring.at_once and uid == self.metadata.uid:
                self._end(retiring.reason)
            elif self._replace is not None:
                self._replace(uid, retiring.reason, retiring.at_once)

    def _note_ended(self) -> None:
        for call in self.session.take_ended():
            ended, call.ended = call.ended, None
            if ended is not None:
                ended()

    def _end(self, reason: str) -> None:
        """Have a worker that cannot go on ended by whoever started it."""
        if not self._ending:
            self._ending = reason
            if self._replace is not None:
                self._replace(self.metadata.uid, reason, True)

    async def _write(self, stream: _Stream) -> None:
        session = self.session
        try:
            while True:
                if session.bulk.loans.waiting or session.bulk.loans.released or session.bulk.loans.recalled:
                    shared_memory.lend(session.bulk, self._rouse)
                message = None if self._paced_until and self._is_paced() else session.take()
                if message is None:
                    self._idle = self._loop.create_future()
                    await self._idle
                    if session.state == "over":
                        return
                else:
                    if message.calls or message.steps:
                        self._paced_until = self._loop.time() + PACE
                    await stream.write(message.SerializeToString())
                    if self._was_full and max(session.outbox, session.apart) < OUTBOX // 2:
                        self._was_full = False
                        self._tell(self, "room", "")
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            self._write_failed = True  # the stream has ended: the reader ends the session
        except Exception as error:
            self._break("lost", f"a message to it could not be written: {type(error).__name__}: {error}")
            stream.cancel()

    def reads(self, call: Outgoing) -> bool:
        """Whether an answer of this call is still being read, or held."""
        return call in self._lent or any(answer.call is call for answer in self._held)

    def _lent_read(self) -> None:
        self._rouse()
        self._leave_if_idle()

    def _leave_if_idle(self) -> None:
        """Let a worker that stops know when nothing is awaited from it: it ends when all its clients have said so."""
        if self.session.state == "stopping" and not (self.is_busy or self._asked):
            self.session.leave()
            self._rouse()

    def _is_paced(self) -> bool:
        """True if what there is to send waits for others to share a message with.

        Mostly there is nothing, and no timer is made. One that is due already is made all the same: answers that have
        arrived are read before it fires, and on a busy machine that keeps messages whole.
        """
        session = self.session
        if not session.can_wait:
            return False
        if self._pace is None and session.has_frames:
            self._pace = self._loop.call_at(self._paced_until, self._end_pace, context=self._context)
        return True

    def _end_pace(self) -> None:
        pace, self._pace, self._paced_until = self._pace, None, 0.0
        if pace is not None:
            pace.cancel()
            self._rouse()

    def _rouse(self) -> None:
        idle, self._idle = self._idle, None
        if idle is not None and not idle.done():
            idle.set_result(None)

    @property
    def obstacle(self) -> str:
        """The reason why calls cannot begin there, for messages; "": they can."""
        if self.blocked:
            return "blocked by a routine that holds its loop"
        if self.crowded:
            return "its thread places are held by calls that timed out or were cancelled"
        return RESERVED if self.reserved else ""

    def can_take(self, bulky: bool) -> bool:
        """Whether the next call may go here: not when the worker stops, nor when the outbox is long."""
        session = self.session
        if session.state == "over" or (session.state == "stopping" and session.uid != self.here):
            return False  # a worker that stops still takes what its own calls call
        if session.full(bulky):
            self._was_full = True
            return False
        return True

    # -- lost or blocked ----------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        self._look_at = clock.now() + _LOOK
        self._look = self._loop.call_later(_LOOK, self._check, context=self._context)

    def _check(self) -> None:
        now, late = clock.now(), self._look_at
        self._look = None
        session = self.session
        if session.state == "over":
            return
        if now - late > _LATE:
            self._heard = now  # this loop had no turn itself: that says nothing about the worker
        silent = now - self._heard
        if session.sent or session.left:
            if silent > SILENT:
                self._set_blocked(True, "")
                self._judge(now, silent)
            if self._timed and now - late <= _LATE:  # else what came meanwhile is still to be read
                self._end_overdue(now, silent)
        elif self.blocked:
            if silent > _EXPIRY:
                self._set_blocked(False, "")
        elif session.waiting:
            self._heard = now  # long arguments are on their way into memory: the worker has nothing to say yet
        if session.waiting or session.left or self.blocked:
            self._watch()

    def _end_overdue(self, now: float, silent: float) -> None:
        """Tell the callers of calls that are past their timeout, and that the worker does not end."""
        sent = self.session.sent
        for call in list(self._timed):
            if not call.number:
                continue  # it is on its way
            if sent.get(call.number) is not call:
                del self._timed[call]
                continue
            if call.handed is None:
                call.handed = now
            if call.due is None and silent <= SILENT:
                continue  # it waits for its turn, or for an order
            due = self._due(call)
            waiter = call.waiter
            if waiter is None or waiter.done():
                continue
            if now < due + max(0.0, CONFIRMATION - 2 * _LOOK):  # less, because this is looked at twice a second
                continue
            if call.request is not None and call.request.holds:
                continue  # what it holds is in use until it has ended
            del self._timed[call]
            tell(call, Answer(call, "overdue"))

    def _judge(self, now: float, silent: float) -> None:
        """End a silent worker if a routine there has held the interpreter's lock for too long."""
        overdue, blocked = self._limits
        if blocked is not None and silent >= blocked:
            self._end(f"it gives no sign of life for {silent:.0f} s, and max_blocked is {blocked:g}")
        elif overdue is not None and silent >= overdue and (late := self._holder(now, overdue)) is not None:
            self._end(
                f"it gives no sign of life for {silent:.0f} s, and has {late.form.tag}, {overdue:g} s or more past its "
                "timeout"
            )

    def _holder(self, now: float, overdue: float) -> Outgoing | None:
        """Return the call past its timeout that holds the interpreter's lock, if it can be no other.

        Calls begin in the order in which they were sent. So one that the worker never said had begun holds the lock,
        unless one that was sent before it does; one that had begun, unless any other does. Calls that need a thread may
        begin later than others do. A call without a timeout may hold the lock for as long as it likes.
        """
        first: Outgoing | None = None  # past its timeout
        for call in sorted((*self.session.sent.values(), *self.session.left.values()), key=lambda call: call.number):
            if call.backlog is not None and call.waiter is None:
                continue  # a generator between two steps
            late = call.timeout and now - self._due(call) >= overdue
            if late:
                first = first or call
            elif first is None or first.due is not None or first.form.thread:
                return None
        return first

    def is_late(self, call: Outgoing) -> bool:
        """Is it past its timeout, as far as that is known? Of one that never said it had begun it is, once it is the
        reason why the worker is ended."""
        known = call.due is not None or (self._ending and call.timeout and call.number)
        return bool(known) and clock.now() >= self._due(call)

    def _due(self, call: Outgoing) -> float:
        """Return when the timeout of a call is over."""
        since = self._heard if call.handed is None else max(call.handed, self._heard)
        return call.due if call.due is not None else since + call.timeout

    def block(self, known_by: Connection | None = None) -> None:
        """Note that the worker refused a call because its loop is held, or that another session with it is blocked."""
        # Not newer than it is: otherwise a worker whose sessions are replaced all the time would stay blocked.
        self._heard = clock.now() if known_by is None else known_by._heard
        self._set_blocked(True, "")
        if self._look is None:
            self._watch()

    def _set_blocked(self, blocked: bool, tag: str) -> None:
        if blocked != self.blocked:
            self.blocked = blocked
            if blocked:
                self.give_no_room()
            self._tell(self, "blocked" if blocked else "unblocked", tag)

    def _break(self, happening: Happening, reason: str) -> None:
        if self.session.state == "over" and self.reason:
            return
        if self._ending:
            reason = f"it was ended, to be replaced: {self._ending}"
        elif happening == "lost" and self.session.state == "stopping":
            happening, reason = "stopped", "it has stopped"
        self.reason = reason
        answers = self.session.broken()
        self.casualties = sum(answer.kind == "lost" for answer in answers)
        self.give_no_room()
        self.lifetime.end()
        for timer in (self._look, self._pace):
            if timer is not None:
                timer.cancel()
        self._look = self._pace = None
        for descriptor in self.session.bulk.loans.take_released():
            os.close(descriptor)
        self._lent.end()
        if happening in ("lost", "stopped") and self.awaits_ending and self.ending is None:
            self._held = [answer for answer in answers if answer.kind == "lost"]
            answers = [answer for answer in answers if answer.kind != "lost"]
            if self._held:
                self._hold = self._loop.call_later(LAST_WORD, self.let_go, context=Context())
        for answer in answers:
            self._lent.arrived(answer)
        self._note_ended()
        self._timed.clear()
        self._rouse()  # the writer ends
        self._tell(self, happening, reason)

    def learn(self, ending: Ending) -> None:
        """Hear how the worker's process has ended."""
        self.ending = ending
        self.let_go()

    def let_go(self) -> None:
        """Hand out lost calls without waiting any longer to know how the process ended."""
        hold, self._hold = self._hold, None
        if hold is not None:
            hold.cancel()
        held, self._held = self._held, []
        for answer in held:
            self._lent.arrived(answer)

    def give_up(self, call: Outgoing) -> None:
        """Stop waiting for a call: its answer, if one comes, is dropped, and a generator is closed."""
        if call.backlog is not None:
            self.step(call, "close")
        else:
            call.waiter = None  # a task that was cancelled, and its pool: the worker may run the call for hours
        self._timed.pop(call, None)
        self.session.abandon(call)

    def has_left(self, call: Outgoing) -> bool:
        """Whether a call was given up here and has not ended on its worker."""
        return self.session.left.get(call.number) is call

    async def close(self, reason: str = "its pool was closed") -> None:
        """End the stream. Calls that are not answered get the answer that they were lost or never sent."""
        self._closing = True
        self._break("closed", reason)
        tasks, self._tasks = self._tasks, []
        if self._stream is not None:
            self._stream.cancel()
        for task in reversed(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._hang_up()

    def abandon(self) -> None:
        """Let the worker see the end of the stream when the loop is closed already, or does not turn. gRPC's own way to
        close is a coroutine of that loop, so this is what it would come to in the end."""
        stream, self._stream = self._stream, None
        core = getattr(stream, "_cython_call", None)
        if core is not None:
            core.cancel("its event loop is closed or busy")

    async def _hang_up(self) -> None:
        """End the stream and see its end: gRPC would tell of it later, on a loop that may be closed by then."""
        stream, self._stream = self._stream, None
        channel, self._channel = self._channel, None
        messages, self._messages = self._messages, None
        if messages is not None:
            await messages.aclose()
        if stream is not None:
            stream.cancel()
            await asyncio.wait([asyncio.ensure_future(stream.code())], timeout=1.0)
        if channel is not None:
            await channel.close()
            await asyncio.sleep(LINGER)


def _iterate(stream: _Stream) -> AsyncGenerator[bytes, None]:
    messages = aiter(stream)
    assert isinstance(messages, AsyncGenerator), "gRPC makes one, and `aclose` is needed"
    return messages


def _decide(granted: asyncio.Future[bool], result: bool) -> None:
    if not granted.done():
        granted.set_result(result)


_TRANSIENT = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.CANCELLED,
)


def _status(error: grpc.aio.AioRpcError) -> str:
    code = error.code()
    return f"{code.name if code is not None else 'UNKNOWN'}: {error.details() or 'no details'}"
