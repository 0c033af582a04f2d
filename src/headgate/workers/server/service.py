"""The server of a worker: conversations, health, and stopping. Runs on the main thread's loop; no user code does.

While routines run it watches the task loop (`watchdog`).
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any

from headgate._version import __version__
from headgate.context.travel import Elsewhere
from headgate.core.clock import clock
from headgate.core.threads import on_loop
from headgate.errors import HeadgateError
from headgate.workers.model import ENDED, ENDS_BECAUSE, UNLIMITED, BackpressureContext, Limits, WorkerMetadata
from headgate.workers.protocol import shared_memory
from headgate.workers.protocol.bulk import Borrowed, Parcel
from headgate.workers.protocol.messages import HELD, UNREAD, Advance, Begun, Heard, Stepped
from headgate.workers.protocol.transport import EOF, grpc
from headgate.workers.protocol.wire import CONVERSE, STOP
from headgate.workers.protocol.wire.wire_pb2 import StopReply, StopRequest, ToWorker
from headgate.workers.protocol.worker_session import WorkerSession
from headgate.workers.routines import CALLER
from headgate.workers.serialization.functions import Arrived
from headgate.workers.server.admission import Ask
from headgate.workers.server.task_loop import Outcome, Running, TaskLoop
from headgate.workers.server.watchdog import Watch

HEALTH = "/grpc.health.v1.Health/"
_SERVING, _NOT_SERVING = b"\x08\x01", b"\x08\x02"  # grpc.health.v1.HealthCheckResponse

_log = logging.getLogger("headgate.workers")


class Nested:
    """A pool, as routines that run for it use it: a proxy on the task loop, made at the first call.

    One for each pool, whoever called: with one for each conversation, every level of nesting would double the streams.
    """

    def __init__(self, pool: str, service: Service) -> None:
        self.peers: list[tuple[str, str]] = []
        """The workers of the pool, as a client last said."""
        self.max_payload: int = 0
        self._pool = pool
        self._service = service
        self._tasks = service.tasks
        self._loop = service.tasks.loop
        self._server = asyncio.get_running_loop()
        self._made: Any = None

    def _proxy(self) -> Any:
        """What calls: the proxy, or for a routine in a thread, whose loop is another, a way to it."""
        return self if asyncio.get_running_loop() is not self._loop else self._current()

    def _current(self) -> Any:
        if self._made is None:
            from headgate.workers.client.balancing import RoundRobinLoadBalancer
            from headgate.workers.client.dispatcher import Dispatcher

            self._made = Dispatcher(
                RoundRobinLoadBalancer(),
                pool=self._pool,
                max_payload=self.max_payload,
                here=self._service.uid,
                limits=self._service.limits,
                on_retiring=self._retiring,
            )
        peers = self.peers
        if self._made.seen is not peers:
            self._made.seen = peers
            self._made.set_members([WorkerMetadata(uid, address, 0, __version__) for uid, address in peers])
        return self._made

    async def call(self, routine: Any, args: Any, kwargs: Any, limit: float | None, caller: str) -> Any:
        """`Proxy.call`, from another loop than the proxy's."""
        running = CALLER.get()
        elsewhere = Elsewhere()

        async def call() -> Any:
            self._tasks.unseat(running)  # while it waits, and from then on, others may have its thread's place
            return await self._current().call(routine, args, kwargs, limit, caller, running)

        try:
            return await on_loop(self._loop, call, elsewhere.context)
        finally:
            elsewhere.bring_back()

    def stream(self, routine: Any, args: Any, kwargs: Any, limit: float | None, caller: str) -> Any:
        """`Proxy.stream`, from another loop than the proxy's."""
        return Across(self, CALLER.get(), (routine, args, kwargs, limit, caller))

    def _retiring(self, uid: str, reason: str, at_once: bool) -> None:
        """A worker that routines of this one called is to be replaced. One that can say so itself has."""
        if at_once:
            try:
                self._server.call_soon_threadsafe(self._service.report_peer, self, uid, reason)
            except RuntimeError:  # the server is gone
                pass

    async def close(self) -> None:
        """On the task loop: end its conversations."""
        made, self._made = self._made, None
        if made is not None:
            await made.close("the client left")


class Across:
    """A stream whose consumer is on another loop than its proxy: a routine that runs in a thread."""

    def __init__(self, nested: Nested, running: Running, called: tuple[Any, ...]) -> None:
        self._nested = nested
        self._running = running
        self._called = called
        self._stream: Any = None

    async def _there(self, method: str, *args: Any) -> Any:
        async def call() -> Any:
            self._nested._tasks.unseat(self._running)
            if self._stream is None:
                self._stream = self._nested._current().stream(*self._called, self._running)
            return await getattr(self._stream, method)(*args)

        elsewhere = Elsewhere()
        try:
            return await on_loop(self._nested._loop, call, elsewhere.context)
        finally:
            elsewhere.bring_back()

    async def advance(self, what: Advance, value: Any = None) -> Any:
        """See `streams.Stream`."""
        return await self._there("advance", what, value)


class Conversation:
    """One stream: a session, and what moves its messages."""

    def __init__(self, uid: str, context: Any, nested: Nested) -> None:
        self.nested: Nested = nested
        self.session: WorkerSession = WorkerSession(uid, __version__, Arrived)
        self.writing: bool = False
        self.asked: bool = False
        """Did its client ever ask for room?"""
        self.fetching: dict[int, Begun] = {}
        """Calls whose arguments are being read."""
        self._lines: dict[int, deque[tuple[Stepped, Callable[[Stepped], None]]]] = {}  # behind one that is being read
        self._resent: dict[int, Callable[[Parcel | None], None]] = {}  # loans that are to come in chunks
        self._context = context
        self._work = asyncio.Event()
        self._offer: shared_memory.Offer | None = None
        self._pid = 0

    def greet(self, message: ToWorker, *, stopping: bool) -> bool:
        """Answer the first message. False: there will be no conversation."""
        self._offer = shared_memory.Offer()
        probe = message.hello.probe if message.hello.HasField("probe") else None
        self._pid = probe.pid if probe is not None else 0
        offered = self._offer.probe if probe is not None else None
        return self.session.greet(message, stopping=stopping, probe=offered, shares=shared_memory.can_read(probe))

    def hear(self, message: ToWorker) -> Heard:
        """The next message: whoever sends one has tried what it was offered."""
        if self._offer is not None:
            self._offer.close()
            self._offer = None
        heard = self.session.receive(message)
        for number, parcel in self.session.take_resent():
            done = self._resent.pop(number, None)
            if done is not None:
                done(parcel)
        return heard

    def read(self, borrowed: Borrowed, done: Callable[[Parcel | None], None], *, resend: bool = False) -> None:
        """Read what the client lends; `resend`: if that cannot be, have it sent."""

        def returned(parcel: Parcel | None, error: BaseException | None) -> None:
            if resend and isinstance(error, shared_memory.Unopened) and not self.session.over:
                self.session.cannot_read(borrowed)
                self._resent[borrowed.number] = done
                self.flush()
                return
            self.session.has_read(borrowed)
            self.flush()
            done(parcel)

        size = sum(length for length, _ in borrowed.segments)
        shared_memory.aside(size, lambda: shared_memory.read(self._pid, borrowed), returned)

    def is_reading(self, number: int) -> bool:
        """Is a step of this generator being read?"""
        return number in self._lines

    def in_order(self, step: Stepped, go_on: Callable[[Stepped], None]) -> None:
        """Call `go_on` with the step when it was read, and those of its generator before it."""
        line = self._lines.get(step.number)
        if line is not None:
            line.append((step, go_on))
            return
        if not isinstance(step.payload, Borrowed):
            go_on(step)
            return
        self._lines[step.number] = deque()

        def done(parcel: Parcel | None) -> None:
            go_on(step._replace(payload=parcel) if parcel is not None else step._replace(advance="close", payload=b""))
            line = self._lines.pop(step.number)
            while line:
                self.in_order(*line.popleft())
                if step.number in self._lines:
                    self._lines[step.number].extend(line)
                    return

        self.read(step.payload, done, resend=True)

    def flush(self) -> None:
        """There is something to send."""
        self._work.set()

    def end(self) -> list[int]:
        """The stream is gone: these calls run for nobody."""
        left = self.session.broken()
        if self._offer is not None:
            self._offer.close()
        for descriptor in self.session.loans.take_released():
            os.close(descriptor)
        return left

    async def write(self) -> None:
        """Send what there is, for ever. Nothing but the end of the stream cancels this."""
        while True:
            loans = self.session.loans
            if loans.waiting or loans.released or loans.recalled:
                shared_memory.lend(self.session, self.flush)
            message = self.session.take()
            if message is None:
                self._work.clear()
                await self._work.wait()
            else:
                self.writing = True
                await self._context.write(message.SerializeToString())
                self.writing = False


class Service(grpc.GenericRpcHandler):  # type: ignore[misc] # it has no types
    """The server's side of every call."""

    def __init__(
        self,
        uid: str,
        where: str,
        backpressure: Callable[[BackpressureContext], Any] | None = None,
        loop: asyncio.AbstractEventLoop | None = None,
        limits: Limits = UNLIMITED,
    ) -> None:
        self.uid: str = uid
        self.limits: Limits = limits
        self.tasks: TaskLoop = TaskLoop(
            where,
            asyncio.get_running_loop(),
            self._deliver,
            backpressure,
            loop,
            on_room=self._tell_room,
            on_threads=self._threads_changed,
        )
        self.retiring: bool = False
        """Does it stop because calls that nobody waits for keep it from its work?"""
        self._retirement: asyncio.Task[None] | None = None
        self._ending = False
        self._takes_threads = True
        self.stopped: asyncio.Event = asyncio.Event()
        self.stopping: bool = False
        self._reserved = False
        self._conversations: dict[Conversation, None] = {}
        self._nested: dict[str, Nested] = {}
        self._idle = asyncio.Event()
        self._cut = asyncio.Event()  # do not wait any longer
        self._health = asyncio.Event()
        self._watch = Watch(self)

    # -- gRPC ---------------------------------------------------------------------------------------------------------

    def service(self, handler_call_details: Any) -> Any:
        """Which method is it?"""
        method = handler_call_details.method
        if method == CONVERSE:
            return grpc.stream_stream_rpc_method_handler(self._converse)
        if method == STOP:
            return grpc.unary_unary_rpc_method_handler(self._stop)
        if method == HEALTH + "Check":
            return grpc.unary_unary_rpc_method_handler(self._check)
        if method == HEALTH + "Watch":
            return grpc.unary_stream_rpc_method_handler(self._watch_health)
        return None

    async def _converse(self, _: Any, context: Any) -> None:
        conversation = Conversation(self.uid, context, Nested("", self))
        session = conversation.session
        writer: asyncio.Task[None] | None = None
        try:
            data = await context.read()
            if data is EOF:
                return
            if not conversation.greet(_parsed(data), stopping=self.stopping):
                reply = session.take()
                assert reply is not None, "it was refused with a reason"
                await context.write(reply.SerializeToString())
                return
            self._conversations[conversation] = None
            if self._reserved:
                session.reserved(True)
            if not self._takes_threads:
                session.takes_threads(False)
            writer = asyncio.create_task(conversation.write())
            while True:
                data = await context.read()
                if data is EOF:
                    return
                self._hear(conversation, _parsed(data))
        except HeadgateError as error:
            _log.warning("a conversation with %s ended: %s", session.client or "an unknown client", error)
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, error.message)
        except asyncio.CancelledError:
            pass  # the client went without a word; gRPC would print this
        finally:
            self._conversations.pop(conversation, None)
            left = conversation.end()
            if left:
                self.tasks.abandon(conversation, left)
            if conversation.asked:
                self.tasks.room.leave(conversation)
            self._leave(conversation)
            if writer is not None:
                writer.cancel()
                await asyncio.gather(writer, return_exceptions=True)

    def _hear(self, conversation: Conversation, message: ToWorker) -> None:
        session = conversation.session
        begun, cancels, steps = conversation.hear(message)
        if message.HasField("peers") and session.peers is not None:
            pool, peers = session.peers
            conversation.nested = self._nested.setdefault(pool, Nested(pool, self))
            conversation.nested.peers = peers
            conversation.nested.max_payload = session.max_payload
        if message.reserves or message.released:
            conversation.asked = True
            self.tasks.room.ask(conversation, () if self.stopping else message.reserves, message.released)
        if self.stopping and begun:
            for call in begun:
                session.answer(call.number, "unavailable", b"the worker is stopping")
                if isinstance(call.arguments, Borrowed):
                    session.has_read(call.arguments)
            begun = []
            conversation.flush()
        lent = [call for call in begun if call.arguments.__class__ is Borrowed]
        if lent:
            begun = [call for call in begun if call.arguments.__class__ is not Borrowed]
            for call in lent:
                assert isinstance(call.arguments, Borrowed), "that is why"
                self._fetch(conversation, call, call.arguments)
        for step in steps:
            conversation.in_order(step, lambda step: self.tasks.step(conversation, step))
        if cancels:
            cancels = self._cancel(conversation, cancels)
        if begun or cancels:
            self._run(conversation, begun, cancels)
        if session.stirs:
            conversation.flush()

    def _cancel(self, conversation: Conversation, numbers: list[int]) -> list[int]:
        """Cancel what has not been read; the rest is for the task loop."""
        for number in numbers:
            if conversation.fetching.pop(number, None) is not None:
                conversation.session.answer(number, "cancelled")
                conversation.flush()
            elif conversation.is_reading(number):  # a step that it is meant for
                conversation.in_order(
                    Stepped(number, "next", 0, b""), lambda step: self._run(conversation, [], [step.number])
                )
        return [number for number in numbers if not conversation.is_reading(number)]

    def _run(self, conversation: Conversation, begun: list[Begun], cancels: list[int]) -> None:
        self._idle.clear()
        self.tasks.hand_over(conversation, conversation.session.client, begun, cancels)
        self._watch.begin()

    def _fetch(self, conversation: Conversation, call: Begun, borrowed: Borrowed) -> None:
        """Read the arguments of a call, and run it then."""
        conversation.fetching[call.number] = call
        self._idle.clear()

        def done(parcel: Parcel | None) -> None:
            if conversation.fetching.pop(call.number, None) is None:
                return  # it was cancelled
            if parcel is not None and conversation.session.state == "open":
                self._run(conversation, [call._replace(arguments=parcel)], [])
            else:
                conversation.session.answer(call.number, "not_started", UNREAD)
                conversation.flush()

        conversation.read(borrowed, done)

    def _leave(self, conversation: Conversation) -> None:
        """The last conversation of a pool takes the pool's own ones with it."""
        nested = conversation.nested
        if not any(other.nested is nested for other in self._conversations):
            for pool in [pool for pool, known in self._nested.items() if known is nested]:
                del self._nested[pool]
            self.tasks.leave(nested.close)

    def _deliver(self, outcomes: list[Outcome]) -> None:
        """A burst of ends, from the task loop."""
        touched = None
        for conversation, number, kind, payload, swallowed, steps, context in outcomes:
            if kind is None:
                conversation.session.started(number)
            elif kind == "yielded":
                conversation.session.yielded(number, payload, swallowed=swallowed, steps=steps, context=context)
            else:
                conversation.session.answer(number, kind, payload, swallowed=swallowed, steps=steps, context=context)
            if conversation is not touched:
                touched = conversation
                conversation.flush()
        if not self.tasks.busy:
            self._idle.set()

    def _tell_room(self, granted: list[Ask], reserved: bool) -> None:
        """Calls of few neighbours may begin; do others have to wait?"""
        for ask in granted:
            ask.session.session.grant(ask.number)
            ask.session.flush()
        if reserved != self._reserved:
            self._reserved = reserved
            for conversation in self._conversations:
                conversation.session.reserved(reserved)
                conversation.flush()

    def beat(self, age: float) -> None:
        """Tell every client that waits how the task loop is."""
        held = self.tasks.held_by() if age > HELD else None
        number, tag = (held.begun.number, held.begun.function.tag) if held is not None else (0, "")
        timed: dict[Conversation, list[tuple[int, float]]] = {}
        for running, left in self.tasks.timed(clock.now()):
            timed.setdefault(running.session, []).append((running.begun.number, left))
        for conversation in self._conversations:
            if conversation.session.open:
                conversation.session.beat(age, number, tag, timed.get(conversation, ()))
                conversation.flush()

    def give_back(self) -> None:
        """The task loop is held: what has not begun goes back to its callers."""
        for running in self.tasks.take_back():
            running.session.session.answer(running.begun.number, "not_started", b"its task loop is held")
            running.session.flush()

    def _threads_changed(self, free: bool) -> None:
        """Calls that need a thread can begin, or cannot."""
        self._takes_threads = free
        if not free:
            _log.warning(
                "all %d thread places of worker %s are held by calls that timed out or were cancelled and go on; calls "
                "that need a thread go elsewhere until one of them ends",
                self.tasks.places.total,
                self.uid,
            )
        for conversation in self._conversations:
            conversation.session.takes_threads(free)
            conversation.flush()

    def report_peer(self, nested: Nested, uid: str, reason: str) -> None:
        """A routine of ours called a worker that is to be ended: tell those who introduced it."""
        for conversation in self._conversations:
            if conversation.nested is nested:
                conversation.session.retiring(reason, at_once=True, uid=uid)
                conversation.flush()

    def judge(self, now: float, age: float) -> None:
        """Is the worker of no use any more, its loop without a turn for `age` seconds? Then see to its replacement."""
        overdue, blocked = self.limits
        if age > HELD:
            held, late = self.tasks.loop_overdue(now)
            what = f"{held.begun.function.tag} (task {held.id})" if held is not None else "something a routine started"
            if overdue is not None and min(age, late) >= overdue:
                self._end_at_once(f"{what} holds its loop, {late:.0f} s past its timeout")
            elif blocked is not None and age >= blocked:
                self._end_at_once(f"{what} holds its loop for {age:.0f} s, and max_blocked is {blocked:g}")
        elif overdue is not None and not self.stopping and self.tasks.places_overdue(now) >= overdue:
            self._retire(
                f"all its {self.tasks.places.total} thread places are held by calls that are {overdue:g} s or more "
                "past their timeout"
            )

    def _retire(self, reason: str) -> None:
        """Finish what somebody waits for, and stop: whoever started this worker starts another."""
        _log.warning("worker %s is to be replaced: %s. It finishes its other calls", self.uid, reason)
        self.retiring = True
        self._announce_end(reason, at_once=False)
        self._retirement = asyncio.get_running_loop().create_task(self.stop(-1.0))

    def _end_at_once(self, reason: str) -> None:
        """The loop has no turn: end the process."""
        if self._ending:
            return
        self._ending = True
        _log.error("worker %s %s%s. Its other calls are lost", self.uid, ENDS_BECAUSE, reason)
        self._announce_end(reason, at_once=True)
        self._retirement = asyncio.get_running_loop().create_task(self._exit())

    def _announce_end(self, reason: str, *, at_once: bool) -> None:
        for conversation in self._conversations:
            conversation.session.retiring(reason, at_once=at_once)
            conversation.flush()

    async def _exit(self) -> None:
        await self._said_all(1.0)
        os._exit(ENDED)

    # -- health -------------------------------------------------------------------------------------------------------

    async def _check(self, request: bytes, context: Any) -> bytes:
        if not _known_service(request):
            await context.abort(grpc.StatusCode.NOT_FOUND, "unknown service")
        return _NOT_SERVING if self.stopping else _SERVING

    async def _watch_health(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        if not _known_service(request):
            yield b"\x08\x03"  # SERVICE_UNKNOWN
            return
        if not self.stopping:
            yield _SERVING
            await self._health.wait()
        yield _NOT_SERVING
        await self.stopped.wait()

    # -- stopping -----------------------------------------------------------------------------------------------------

    async def _stop(self, request: bytes, context: Any) -> bytes:
        await self.stop(StopRequest.FromString(request).timeout)
        return bytes(StopReply().SerializeToString())

    def cut_short(self) -> None:
        """Do not wait any longer for what runs."""
        self._cut.set()

    async def stop(self, timeout: float) -> None:
        """Refuse new work, let go on what runs (0: not at all, below: for ever), cancel the rest."""
        if not self.stopping:
            self.stopping = True
            self._health.set()
            for conversation in self._conversations:
                conversation.session.stopping()
                conversation.flush()
        if timeout == 0:
            self._cut.set()
        await self._drained(None if timeout < 0 else timeout)
        if self.tasks.busy:
            self.tasks.stop_all()
            self._cut.clear()
            await self._drained(2.0, forgetful=False)
        await self._said_all(2.0)
        self.stopped.set()

    async def _said_all(self, seconds: float) -> None:
        """Wait until what there is to say was said, for so long at most."""
        deadline = clock.now() + seconds
        while any(map(_has_more, self._conversations)) and clock.now() < deadline:  # noqa: ASYNC110 - the last answers
            await asyncio.sleep(0.005)

    def _busy(self, forgetful: bool) -> bool:
        if not forgetful:
            return self.tasks.busy
        fetching = any(conversation.fetching for conversation in self._conversations)
        return fetching or self.tasks.is_waited_for(clock.now(), forsaken=not self.retiring)

    async def _drained(self, timeout: float | None, *, forgetful: bool = True) -> None:
        deadline = None if timeout is None else clock.now() + timeout
        while self._busy(forgetful) and not self._cut.is_set():
            left = 0.05 if deadline is None else min(0.05, deadline - clock.now())
            if left <= 0:
                return
            waits = [asyncio.ensure_future(self._cut.wait()), asyncio.ensure_future(self._idle.wait())]
            await asyncio.wait(waits, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            for wait in waits:
                wait.cancel()


def _has_more(conversation: Conversation) -> bool:
    return conversation.writing or conversation.session.has_more


def _parsed(data: bytes) -> ToWorker:
    try:
        message: ToWorker = ToWorker.FromString(data)
    except Exception as error:
        raise HeadgateError(f"a message could not be read: {error}") from error
    return message


def _known_service(request: bytes) -> bool:
    """Of a HealthCheckRequest: field 1 is the name of the service; empty means the whole server."""
    return request in (b"", b"\x0a\x00") or request[2:] == b"headgate.wire.v1.Worker"
