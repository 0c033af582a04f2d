"""The gRPC service of a worker: the streams of its clients, health checks, and stopping.

It runs on the main thread's loop, where no user code runs. While routines run it watches the task loop (`watchdog`).
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import TYPE_CHECKING, Any

from headgate._version import __version__
from headgate.core.clock import clock
from headgate.errors import HeadgateError
from headgate.workers.client.failures import client_id
from headgate.workers.model import (
    ENDED,
    ENDS_BECAUSE,
    UNLIMITED,
    BackpressureContext,
    Limits,
    WorkerMetadata,
    metrics_port_of,
)
from headgate.workers.options import WorkerOptions
from headgate.workers.protocol.bulk import Borrowed, BulkPayload
from headgate.workers.protocol.call_ends import RESULT_OF_KIND
from headgate.workers.protocol.messages import HELD, NEWEST, OLDEST, UNREAD, Begun, Stepped
from headgate.workers.protocol.transport import EOF, grpc
from headgate.workers.protocol.wire import CONVERSE, STATUS, STOP
from headgate.workers.protocol.wire.wire_pb2 import StatusReply, StopReply, StopRequest, ToWorker
from headgate.workers.server.admission import Ask
from headgate.workers.server.client_stream import ClientStream
from headgate.workers.server.lifetime import memory_of_process
from headgate.workers.server.nested_pool import NestedPool
from headgate.workers.server.outcomes import Outcome
from headgate.workers.server.overdue import loop_overdue, places_overdue, timed_calls
from headgate.workers.server.task_loop import TaskLoop
from headgate.workers.server.watchdog import Watch

if TYPE_CHECKING:
    from headgate.workers.credentials import WorkerCredentials

FAREWELL = 2.0
"""Seconds that a worker which stops waits for clients that do not say that they have heard."""
HEALTH = "/grpc.health.v1.Health/"
_SERVING, _NOT_SERVING = b"\x08\x01", b"\x08\x02"  # grpc.health.v1.HealthCheckResponse

_log = logging.getLogger("headgate.workers")


class Service(grpc.GenericRpcHandler):  # type: ignore[misc] # it has no types
    """The handler of every gRPC call that comes to a worker."""

    def __init__(
        self,
        uid: str,
        where: str,
        backpressure: Callable[[BackpressureContext], Any] | None = None,
        loop: asyncio.AbstractEventLoop | None = None,
        limits: Limits = UNLIMITED,
        options: WorkerOptions | None = None,
        concurrency: int | None = None,
        credentials: WorkerCredentials | None = None,
    ) -> None:
        self.options: WorkerOptions = options or WorkerOptions()
        self.uid: str = uid
        self.credentials: WorkerCredentials | None = credentials
        """What it shows to the workers that its routines call."""
        self.limits: Limits = limits
        self.tasks: TaskLoop = TaskLoop(
            where,
            asyncio.get_running_loop(),
            self._deliver,
            backpressure,
            loop,
            on_reservations=self._tell_reservations,
            on_threads=self._threads_changed,
            per_client=self.options.channel.max_concurrent_streams,
            total=concurrency,
            behind=lambda: self._watch.behind(),
        )
        self.retiring: bool = False
        """Is it stopping because calls that nobody waits for hold all its threads?"""
        self.patient: bool = False
        """Does it wait for all that somebody may wait for, when it stops, also for generators that nobody advances?"""
        self._retirement: asyncio.Task[None] | None = None
        self._ending = False
        self._takes_threads = True
        self.stopped: asyncio.Event = asyncio.Event()
        self.stopping: bool = False
        self.finished: int = 0
        """Calls that were executed and have ended, however they ended."""
        self.cancelled: int = 0
        """Calls that were cancelled because the worker stopped."""
        self.on_change: Callable[[], None] | None = None
        """Called when `clients`, `finished` or `stopping` has changed."""
        self.metadata: WorkerMetadata | None = None
        """What the worker announces of itself; None: a pool started it and knows."""
        self._started_at = clock.wall()
        self._reserved = False
        self._streams: dict[ClientStream, None] = {}
        self._nested: dict[str, NestedPool] = {}
        self._idle = asyncio.Event()
        self._cut = asyncio.Event()  # set: do not wait any longer for running calls
        self._health = asyncio.Event()
        self._watch = Watch(self)

    @property
    def clients(self) -> int:
        """Number of sessions that are open."""
        return len(self._streams)

    @property
    def is_awaited(self) -> bool:
        """Are there calls that run or wait, or does a client wait for long arguments to be read or results to be sent?
        That takes seconds on a busy machine, and a worker that says nothing meanwhile is taken for one that hangs.
        An import that no call waits for any more can hold the interpreter's lock too."""
        return self.tasks.busy or self.tasks.imports.active or any(stream.session.owes for stream in self._streams)

    def _changed(self) -> None:
        if self.on_change is not None:
            self.on_change()

    # -- gRPC ---------------------------------------------------------------------------------------------------------

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Return the handler of a gRPC method; None: it is unknown."""
        method = handler_call_details.method
        if method == CONVERSE:
            return grpc.stream_stream_rpc_method_handler(self._converse)
        if method == STOP:
            return grpc.unary_unary_rpc_method_handler(self._stop)
        if method == STATUS:
            return grpc.unary_unary_rpc_method_handler(self._status)
        if method == HEALTH + "Check":
            return grpc.unary_unary_rpc_method_handler(self._check)
        if method == HEALTH + "Watch":
            return grpc.unary_stream_rpc_method_handler(self._watch_health)
        return None

    async def _converse(self, _: object, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        stream = ClientStream(self.uid, context, NestedPool("", self), self.options)
        session = stream.session
        writer: asyncio.Task[None] | None = None
        try:
            data = await context.read()
            if data is EOF:
                return
            if not stream.greet(_parsed(data), stopping=self.stopping):
                reply = session.take()
                assert reply is not None, "it was refused with a reason"
                await context.write(reply.SerializeToString())
                return
            self._streams[stream] = None
            self._changed()
            if self._reserved:
                session.reserved(True)
            if not self._takes_threads:
                session.takes_threads(False)
            writer = asyncio.create_task(stream.write())
            while True:
                data = await context.read()
                if data is EOF:
                    return
                self._handle(stream, _parsed(data))
        except HeadgateError as error:
            _log.warning("the session with %s ended: %s", session.client or "an unknown client", error)
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, error.message)
        except asyncio.CancelledError:
            pass  # the client went without a word; gRPC would print this
        finally:
            self._streams.pop(stream, None)
            self._changed()
            left = stream.end()
            if left:
                self.tasks.abandon(stream, left)
            if stream.asked:
                self.tasks.reserved_calls.leave(stream)
            self._leave(stream)
            if writer is not None:
                writer.cancel()
                await asyncio.gather(writer, return_exceptions=True)

    def _handle(self, stream: ClientStream, message: ToWorker) -> None:
        session = stream.session
        begun, cancels, steps = stream.receive(message)
        if message.HasField("peers") and session.peers is not None:
            pool = session.peers.pool
            stream.nested = self._nested.setdefault(pool, NestedPool(pool, self))
            stream.nested.max_payload = session.max_payload
            stream.nested.introduce(session.peers)
        if message.reserves or message.released:
            stream.asked = True
            self.tasks.reserved_calls.ask(stream, () if self.stopping else message.reserves, message.released)
        if self.stopping and begun:
            running = {one.id for one in list(self.tasks.running.values())}
            refused = [call for call in begun if call.caller not in running]  # what runs here may call here, to end
            begun = [call for call in begun if call.caller in running]
            for call in refused:
                session.answer(call.number, "unavailable", b"the worker is stopping")
                if isinstance(call.arguments, Borrowed):
                    session.bulk.has_read(call.arguments)
            stream.flush()
        lent = [call for call in begun if call.arguments.__class__ is Borrowed]
        if lent:
            begun = [call for call in begun if call.arguments.__class__ is not Borrowed]
            for call in lent:
                assert isinstance(call.arguments, Borrowed), "that is why"
                self._fetch(stream, call, call.arguments)
        for step in steps:
            stream.in_order(step, lambda step: self.tasks.step(stream, step))
        if cancels:
            cancels = self._cancel(stream, cancels)
        if begun or cancels:
            self._run(stream, begun, cancels)
        if session.bulk.has_work:
            stream.flush()

    def _cancel(self, stream: ClientStream, numbers: list[int]) -> list[int]:
        """Cancel calls whose arguments or steps are still being read; returns the others, for the task loop."""
        for number in numbers:
            if stream.fetching.pop(number, None) is not None:
                stream.session.answer(number, "cancelled")
                stream.flush()
            elif stream.is_reading(number):  # a step that it is meant for
                stream.in_order(Stepped(number, "next", 0, b""), lambda step: self._run(stream, [], [step.number]))
        return [number for number in numbers if not stream.is_reading(number)]

    def _run(self, stream: ClientStream, begun: list[Begun], cancels: list[int]) -> None:
        self._idle.clear()
        self.tasks.submit(stream, stream.session.client, begun, cancels)
        self._watch.begin()

    def _fetch(self, stream: ClientStream, call: Begun, borrowed: Borrowed) -> None:
        """Read the arguments of a call from lent memory, then run it."""
        stream.fetching[call.number] = call
        self._idle.clear()
        self._watch.begin()

        def done(bulk: BulkPayload | None) -> None:
            if stream.fetching.pop(call.number, None) is None:
                return  # it was cancelled
            if bulk is not None and stream.session.state == "open":
                self._run(stream, [call._replace(arguments=bulk)], [])
            else:
                stream.session.answer(call.number, "not_started", UNREAD)
                stream.flush()

        stream.read(borrowed, done)

    def _leave(self, stream: ClientStream) -> None:
        """Close the nested pool of a client that has gone, if no other client uses it."""
        nested = stream.nested
        if not any(other.nested is nested for other in self._streams):
            for pool in [pool for pool, known in self._nested.items() if known is nested]:
                del self._nested[pool]
            self.tasks.leave(nested.close)

    def _deliver(self, outcomes: list[Outcome]) -> None:
        """Send outcomes that came from the task loop to the clients."""
        touched = None
        for stream, number, kind, payload, swallowed, steps, context, lessons in outcomes:
            if kind is None:
                stream.session.started(number)
            elif kind == "yielded":
                stream.session.yielded(
                    number, payload, swallowed=swallowed, steps=steps, context=context, lessons=lessons
                )
            else:
                self.finished += kind in RESULT_OF_KIND
                stream.session.answer(
                    number, kind, payload, swallowed=swallowed, steps=steps, context=context, lessons=lessons
                )
            if stream is not touched:
                touched = stream
                stream.flush()
        if not self.tasks.busy:
            self._idle.set()
        self._changed()

    def _tell_reservations(self, granted: list[Ask], reserved: bool) -> None:
        """Tell clients which reservations were granted, and whether calls without one are refused."""
        for ask in granted:
            ask.stream.session.grant(ask.number)
            ask.stream.flush()
        if reserved != self._reserved:
            self._reserved = reserved
            for stream in self._streams:
                stream.session.reserved(reserved)
                stream.flush()

    def beat(self, age: float) -> None:
        """Report on the task loop to every client that waits for something."""
        held = self.tasks.held_by() if age > HELD else None
        number, tag = (held.begun.number, held.begun.function.tag) if held is not None else (0, "")
        timed: dict[ClientStream, list[tuple[int, float]]] = {}
        for running, left in timed_calls(self.tasks, clock.now()):
            timed.setdefault(running.stream, []).append((running.begun.number, left))
        memory = memory_of_process()
        for stream in self._streams:
            if stream.session.owes:
                stream.session.beat(age, number, tag, timed.get(stream, ()), memory)
                stream.flush()

    def give_back(self) -> None:
        """Refuse the calls that have not begun, because the task loop is held: they may run elsewhere."""
        for running in self.tasks.take_back():
            running.stream.session.answer(running.begun.number, "not_started", b"its task loop is held")
            running.stream.flush()

    def _threads_changed(self, free: bool) -> None:
        """Tell clients whether calls that need a thread can begin."""
        self._takes_threads = free
        if not free:
            _log.warning(
                "all %d thread places of worker %s are held by calls that timed out or were cancelled and go on; calls "
                "that need a thread go elsewhere until one of them ends",
                self.tasks.places.total,
                self.uid,
            )
        for stream in self._streams:
            stream.session.takes_threads(free)
            stream.flush()

    def report_peer(self, nested: NestedPool, uid: str, reason: str) -> None:
        """Tell the clients that introduced a worker that it must be replaced: a routine here noticed."""
        for stream in self._streams:
            if stream.nested is nested:
                stream.session.retiring(reason, at_once=True, uid=uid)
                stream.flush()

    def check_limits(self, now: float, age: float) -> None:
        """Have this worker replaced if it is of no use any more; `age`: seconds since its task loop last had a turn."""
        overdue, blocked = self.limits
        if age > HELD:
            held, late = loop_overdue(self.tasks, now)
            what = f"{held.begun.function.tag} (task {held.id})" if held is not None else "something a routine started"
            if overdue is not None and min(age, late) >= overdue:
                self._end_at_once(f"{what} holds its loop, {late:.0f} s past its timeout")
            elif blocked is not None and age >= blocked:
                self._end_at_once(f"{what} holds its loop for {age:.0f} s, and max_blocked is {blocked:g}")
        elif overdue is not None and not self.stopping and places_overdue(self.tasks, now) >= overdue:
            self._retire(
                f"all its {self.tasks.places.total} thread places are held by calls that are {overdue:g} s or more "
                "past their timeout"
            )

    def _retire(self, reason: str) -> None:
        """Finish the calls that somebody waits for, then stop; whoever started this worker starts another."""
        _log.warning("worker %s is to be replaced: %s. It finishes its other calls", self.uid, reason)
        self.retiring = True
        self._announce_end(reason, at_once=False)
        self._retirement = asyncio.get_running_loop().create_task(self.stop(-1.0))

    def _end_at_once(self, reason: str) -> None:
        """End the process, because its task loop has no turn any more."""
        if self._ending:
            return
        self._ending = True
        _log.error("worker %s %s%s. Its other calls are lost", self.uid, ENDS_BECAUSE, reason)
        self._announce_end(reason, at_once=True)
        self._retirement = asyncio.get_running_loop().create_task(self._exit())

    def _announce_end(self, reason: str, *, at_once: bool) -> None:
        for stream in self._streams:
            stream.session.retiring(reason, at_once=at_once)
            stream.flush()

    async def _exit(self) -> None:
        await _all_within(1.0, [stream.all_sent() for stream in self._streams])
        await asyncio.sleep(0.005)  # gRPC passes what was written to the kernel in a thread of its own
        os._exit(ENDED)

    # -- health -------------------------------------------------------------------------------------------------------

    async def _check(self, request: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> bytes:
        if not _known_service(request):
            await context.abort(grpc.StatusCode.NOT_FOUND, "unknown service")
        return _NOT_SERVING if self.stopping else _SERVING

    async def _watch_health(self, request: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[bytes]:
        if not _known_service(request):
            yield b"\x08\x03"  # SERVICE_UNKNOWN
            return
        if not self.stopping:
            yield _SERVING
            await self._health.wait()
        yield _NOT_SERVING
        await self.stopped.wait()

    async def _status(self, request: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> bytes:
        reply = StatusReply(
            uid=self.uid,
            version=__version__,
            oldest=OLDEST,
            newest=NEWEST,
            pid=os.getpid(),
            started_at=self._started_at,
            now=clock.wall(),
            clients=self.clients,
            running=self.tasks.open_calls,
            finished=self.finished,
            stopping=self.stopping,
            tags=() if self.metadata is None else sorted(self.metadata.tags),
            metrics_port=0 if self.metadata is None else metrics_port_of(self.metadata) or 0,
        )
        return bytes(reply.SerializeToString())

    # -- stopping -----------------------------------------------------------------------------------------------------

    async def _stop(self, request: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> bytes:
        await self.stop(StopRequest.FromString(request).timeout)
        return bytes(StopReply().SerializeToString())

    def cut_short(self) -> None:
        """Stop waiting for running calls: they are cancelled."""
        self._cut.set()

    async def stop(self, timeout: float) -> None:
        """Refuse new calls, let running ones finish for `timeout` seconds (below 0: without limit), cancel the rest."""
        if not self.stopping:
            self.stopping = True
            self._changed()
            self._health.set()
            for stream in self._streams:
                stream.session.stopping()
                stream.flush()
        if timeout == 0:
            self._cut.set()
        await self._drained(None if timeout < 0 else timeout)
        if self.tasks.busy:
            self.cancelled += self.tasks.open_calls
            self.tasks.stop_all()
            self._cut.clear()
            await self._drained(2.0, forgetful=False)
        await self._farewell()
        self.stopped.set()

    def end(self) -> None:
        """End the task loop and its thread, when the server has ended."""
        self._watch.end()
        self.tasks.stop()

    async def _farewell(self) -> None:
        """Wait until every client has heard that the worker stops, and was answered what it had sent before.

        Else a call that is on its way here would be lost, although the worker could have refused it. Routines of this
        worker are clients too, and none of them runs any more.
        """
        clients = [stream for stream in self._streams if stream.session.client != client_id()]
        await _all_within(FAREWELL, [stream.left() for stream in clients])

    def _busy(self, forgetful: bool) -> bool:
        if not forgetful:
            return self.tasks.busy
        fetching = any(stream.fetching for stream in self._streams)
        abandoned = not (self.retiring or self.patient)
        return fetching or self.tasks.is_waited_for(clock.now(), abandoned=abandoned, forgets=not self.patient)

    async def _drained(self, timeout: float | None, *, forgetful: bool = True) -> None:
        """Wait until nothing runs that is worth waiting for.

        This polls, because no event tells that a generator was not advanced for so long that it is not worth waiting
        for.
        """
        deadline = None if timeout is None else clock.now() + timeout
        while self._busy(forgetful) and not self._cut.is_set():
            left = 0.05 if deadline is None else min(0.05, deadline - clock.now())
            if left <= 0:
                return
            waits = [asyncio.ensure_future(self._cut.wait()), asyncio.ensure_future(self._idle.wait())]
            await asyncio.wait(waits, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            for wait in waits:
                wait.cancel()


async def _all_within(seconds: float, waits: list[Coroutine[Any, Any, None]]) -> None:
    """Await all of these, for at most so many seconds."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    if tasks:
        _, pending = await asyncio.wait(tasks, timeout=seconds)
        for task in pending:
            task.cancel()


def _parsed(data: bytes) -> ToWorker:
    try:
        message: ToWorker = ToWorker.FromString(data)
    except Exception as error:
        raise HeadgateError(f"a message could not be read: {error}") from error
    return message


def _known_service(request: bytes) -> bool:
    """Tell whether a HealthCheckRequest names our service (field 1), or with an empty name the whole server."""
    return request in (b"", b"\x0a\x00") or request[2:] == b"headgate.wire.v1.Worker"
